"""Configuration errors: key, value, rule and remedy, all of them at once.

This module imports nothing of weft.
"""

from __future__ import annotations

import difflib
import importlib
import json
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
        shown = json.dumps(self.value) if isinstance(self.value, bool | str) else str(self.value)
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
    """Suggest the name of ``known`` that is nearest, or list all if none is near."""
    known = sorted(known)
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    return f"did you mean {near[0]!r}?" if near else f"use one of {', '.join(known)}"


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
