"""Configuration errors: key, value, rule and remedy, all of them at once.

This module imports nothing of weft.
"""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")

SHOWN = 10  # items of a list in a message


class _Missing:
    def __repr__(self) -> str:
        return "(missing)"


MISSING = _Missing()
FROM_SOURCE = object()


@dataclass(frozen=True)
class ConfigError:
    """One configuration error: key, value, rule, remedy.

    ``depends`` names the other keys that the rule read.  If one of them is invalid, this error may
    only follow from that one, and is not shown.
    """

    key: str
    value: object
    rule: str
    remedy: str = ""
    depends: tuple[str, ...] = ()

    def __str__(self) -> str:
        """Return the error as sentences: key, value and rule, then the remedy."""
        shown = str(self.value)
        if isinstance(self.value, bool | str):
            readable = isinstance(self.value, str) and self.value.isprintable()
            shown = json.dumps(self.value, ensure_ascii=not readable)
        text = self.key if self.value is MISSING else f"{self.key}={shown}"
        for part in filter(None, (self.rule, capitalize(self.remedy))):
            text += "\n" if "\n" in text else " "  # a remedy follows a list on its own line
            text += part if part[-1] in ".?!" or "\n" in part else f"{part}."
        return text


class ConfigErrors(list[ConfigError]):
    """Collect configuration errors; the values come from what is checked.

    Args:
        source: has the values: an object such as a `Job`, whose attributes are the keys, or a
            mapping such as the environment.  None: errors without ``value`` have no value.
        section: prefix of every key, if ``source`` is one section of a job.
    """

    def __init__(self, source: object = None, section: str = "") -> None:
        super().__init__()
        self._source, self._prefix = source, f"{section}." if section else ""

    def add(
        self,
        key: str,
        rule: str,
        remedy: str = "",
        depends: tuple[str, ...] = (),
        *,
        value: object = FROM_SOURCE,
    ) -> None:
        """Add the error of a key; without ``value``, with its value in the source."""
        if value is FROM_SOURCE:
            value = self._read(key)
        self.append(ConfigError(key, value, rule, remedy, depends))

    def add_independent(self, errors: Iterable[ConfigError]) -> None:
        """Add errors, except those that may only follow from an error of the list."""
        keys = {error.key for error in self}
        self += [e for e in errors if keys.isdisjoint((e.key, *e.depends))]

    @contextmanager
    def collect(self) -> Iterator[None]:
        """Add the errors of an `InvalidConfig` instead of raising it."""
        try:
            yield
        except InvalidConfig as error:
            self += error.errors

    def raise_any(self, *keys: str) -> None:
        """Raise `InvalidConfig` with all errors, if there are any; of ``keys``, if given."""
        if any(not keys or error.key in keys for error in self):
            raise InvalidConfig(self)

    def _read(self, key: str) -> object:
        if self._source is None:
            return MISSING
        value, rest = self._source, key.removeprefix(self._prefix)
        while rest and not isinstance(value, Mapping):
            name, _, rest = rest.partition(".")
            value = getattr(value, name)
        if isinstance(value, Mapping):
            value = value.get(rest, MISSING)
        return list(value) if isinstance(value, tuple) else value


class WeftError(Exception):
    """An expected failure; the user sees its message without a traceback."""


class InvalidConfig(WeftError):
    """A run that cannot start; ``errors`` lists every reason."""

    def __init__(self, errors: Iterable[ConfigError]) -> None:
        self.errors = list(errors)
        super().__init__("\n".join(str(error) for error in self.errors))

    def __reduce__(self) -> tuple[type[InvalidConfig], tuple[list[ConfigError]]]:
        """Pickle the problems, not the message: processes send this error to each other."""
        return InvalidConfig, (self.errors,)


def suggest(name: str, known: Iterable[str]) -> str:
    """Suggest the name of ``known`` that ``name`` misspells, or list all."""
    known = sorted(known)
    near = find_misspelled(name, known)
    return f"did you mean {near!r}?" if near else f"use one of {', '.join(known)}"


def find_misspelled(name: str, known: Iterable[str]) -> str:
    """Return the one name of ``known`` that ``name`` misspells; else an empty string.

    A similar name may mean another thing (min_lr and max_lr, beta1 and beta2, H20 and H200), and a
    user who follows a wrong suggestion trains something else.  So only typing errors count: names
    are compared word by word, digits must be equal, and a word that other names contain is right.
    """
    known = list(known)
    words = _split_words(name)
    right = {_singular(word) for other in known for word in _split_words(other)}
    capitals = [] if name.isalpha() and name.isupper() else re.findall("[A-Z]", name)
    distances: dict[str, int] = {}
    for other in known:
        theirs = _split_words(other)
        if sorted(words) == sorted(theirs) or "".join(words) == "".join(theirs):
            distances[other] = 0
        elif len(words) == len(theirs):
            pairs = zip(words, theirs, strict=True)
            changed = [(a, b) for a, b in pairs if _singular(a) != _singular(b)]
            is_variant = capitals and capitals != re.findall("[A-Z]", other)  # DualPipe, DualPipeV
            if not is_variant and all(
                _singular(a) not in right and _is_misspelling(a, b) for a, b in changed
            ):
                distances[other] = 1 + len(changed)
    nearest = min(distances.values(), default=0)
    found = [other for other, distance in distances.items() if distance == nearest]
    return found[0] if len(found) == 1 else ""


def _split_words(name: str) -> list[str]:
    return [word for word in re.split(r"[^0-9A-Za-z]+", name.lower()) if word]


def _singular(word: str) -> str:
    return word[:-1] if len(word) > 3 and word[-1] == "s" else word


def _is_misspelling(word: str, right: str) -> bool:
    """Return True if ``word`` differs from ``right`` by letters that one mistypes."""
    shorter, longer = sorted((word, right), key=len)
    if longer in (f"un{shorter}", f"non{shorter}", f"dis{shorter}"):  # the opposite
        return False
    if re.sub(r"\D", "", word) != re.sub(r"\D", "", right):  # versions: v3, H200, beta1
        return False
    if re.sub(r"(.)\1", r"\1", longer) == re.sub(r"(.)\1", r"\1", shorter):
        return True  # a letter is doubled
    if longer.startswith(shorter):  # olmo and olmoe, adam and adamw
        return False
    if len(shorter) > 4:
        return _edit_distance(word, right) <= (1 if len(shorter) < 8 else 2)
    if word[0] != right[0] or _edit_distance(word, right) != 1:
        return False
    if len(shorter) == len(longer):
        return sorted(word) == sorted(right)  # two letters are swapped
    return re.sub("[aeiou]", "", longer) == re.sub("[aeiou]", "", shorter)  # a vowel is missing


def _edit_distance(a: str, b: str) -> int:
    """Return the letters to insert, delete, replace or swap with their neighbor."""
    rows = [list(range(len(b) + 1))]
    for i, x in enumerate(a, 1):
        row = [i]
        for j, y in enumerate(b, 1):
            row.append(min(rows[-1][j] + 1, row[-1] + 1, rows[-1][j - 1] + (x != y)))
            if i > 1 and j > 1 and (x, y) == (b[j - 2], a[i - 2]):
                row[j] = min(row[j], rows[i - 2][j - 2] + 1)
        rows.append(row)
    return rows[-1][-1]


def lookup(name: str, table: Mapping[str, T | str]) -> T:
    """Return ``table[name]``, or the attribute that ``module:attribute`` names.

    A value of the table may be ``module:attribute`` too: the module is imported when it is used.

    Raises:
        LookupError: the name is unknown, or the module cannot be imported.
    """
    entry = table.get(name, name)
    if not isinstance(entry, str):
        return entry
    module, colon, attribute = entry.partition(":")
    if not colon:
        raise LookupError("is not a known name, and not of the form module:attribute")
    try:
        found: T = getattr(importlib.import_module(module), attribute)
    except Exception as error:  # of any type, from the user's module
        raise LookupError(f"cannot be imported: {type(error).__name__}: {error}") from error
    return found


def capitalize(sentence: str) -> str:
    """Capitalize a sentence, unless it begins with a key or a command."""
    word = sentence.partition(" ")[0].rstrip(",:;")
    return sentence[0].upper() + sentence[1:] if word.isalpha() and word.islower() else sentence


def truncate_list(lines: Sequence[str], separator: str = ", ", count: int | None = None) -> str:
    """Join the first `SHOWN` lines, and add the number of the others.

    ``count`` is the total number, if ``lines`` does not contain all.
    """
    more = (len(lines) if count is None else count) - len(lines[:SHOWN])
    return separator.join([*lines[:SHOWN], *([f"and {more:,} more"] if more else [])])
