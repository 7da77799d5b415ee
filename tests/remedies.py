"""Read what an error proposes, and follow it.

A remedy proposes alternatives, such as ``use 6 or 9, or run.nproc_per_node=1 or 2``.  Each is a
change of keys: a new value of the error's own key, ``section.key=value``, ``--section.key value``,
or the removal of a key.  `Follower` makes each change and reports the errors that it leaves.  A
warning is followed as an error is: see `warning_error`.
"""

from __future__ import annotations

import random
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tests.job_space import candidate_values
from weft.config.errors import MISSING, ConfigError, ConfigErrors, InvalidConfig
from weft.config.reader import read_job
from weft.config.schema import SECTIONS
from weft.conversion.adapter_path import adopt_paths
from weft.planning.needs import list_keys
from weft.planning.plan import Machine
from weft.planning.resolve import resolve_nodes

Overrides = tuple[tuple[str, str], ...]
Change = dict[str, str | None]  # key to value; None: without the key

KEY = rf"(?:launch\.(?:options|mounts|secrets|env)\.[\w/-]+|(?:{'|'.join(SECTIONS)})\.[a-z_0-9]+)"
ASSIGNMENT = re.compile(rf"(?:--)?({KEY})(?:=| )([\w.:*/\[\]-]*[\w\]*])")
VALUE = re.compile(r"(?:at most |at least |up to )?([\w.*:/+-]*\w|\[[^\]]*\])")
NO_VALUE = {
    "fewer",
    "more",
    "nodes",
    "it",
    "the",
    "a",
    "an",
    "one",
    "another",
    "of",
    "several",
    "only",
    "this",
}


def proposed_changes(error: ConfigError) -> list[Change]:
    """Return the changes that a remedy proposes; empty if it has none that a machine can read."""
    if isinstance(error, Warned):
        return _changes_of_warning(error)
    if error.key == "optim.groups" or (
        re.match(r"must (be|match)|is missing|is not a known key", error.rule)
        and not error.key.startswith("launch.")
    ):
        return []  # the remedy is the description of the key
    if error.rule == "is an option of Slurm's sbatch only":
        same = re.match("use (launch[.][a-z_]+)=", error.remedy)
        return [{error.key: None} | ({same[1]: str(error.value)} if same else {})]
    text = re.sub(r"\([^)]*\)", "", error.remedy).strip()
    text = re.sub(r" or a multiple of \d+", "", text)
    if re.match(r"give --", text):  # "give --key VALUE, its meaning": see `Follower.examples`
        text = text.partition(":")[0]
        named = [re.findall(rf"--({KEY}) VALUE", each) for each in text.split(", or ")]
        return [dict.fromkeys(each, "VALUE") for each in named if each]
    if example := re.search(r"such as (\S+)$", text):
        text = f"use {example[1]}" if error.key.startswith(("launch.", "run.dir")) else text
    changes: list[Change] = []
    own = error.key if re.fullmatch(KEY, error.key) else ""
    for clause in re.split(
        r"[;,] (?:or|and) |; (?:or )?|, (?=--|[a-z_]+\.[a-z_]+=)| or (?=--|parallel\.|remove )",
        text,
    ):
        clause = re.sub(
            r"^(?:did you mean|use|set|add|leave (?!it)|and|or) ", "", clause.strip(), flags=re.I
        )
        if error.key.startswith("launch.") and re.search("/[.]{3}|[A-Z]{2}", clause):
            continue  # the value has a name that the user knows
        if re.search(r"(above \d+|or more|or less)|such as|times run|a multiple of", clause):
            continue  # a direction, not a value
        clause = re.sub(r"^leave it out", "remove it", clause)
        removed = re.match(rf"remove ({KEY}|it\b|the key\b)", clause, re.I)
        if removed:
            name = removed[1] if "." in removed[1] else own
            changes += [{name: None}] if name else []
            continue
        if clause == "another run.dir":
            changes.append({"run.dir": "VALUE"})
            continue
        found = ASSIGNMENT.findall(clause)
        if found:
            # "key=1, 2 or 4": each value is a change of its own.
            key, first = found[-1]
            rest = clause[clause.rindex(first) + len(first) :]
            others = re.findall(r"(?:,| or) ([\w.-]+)\b(?! \w)", rest) if len(found) == 1 else []
            changes += [{key: value} for value in (first, *others)] if others else [dict(found)]
            continue
        if own and not re.fullmatch(KEY, clause):
            words = re.split(r", | or ", clause)
            for word in words:
                match = VALUE.fullmatch(word.strip(" .'?"))
                if match and match[1] not in NO_VALUE and match[1] != "...":
                    changes.append({own: match[1]})
    return changes


@dataclass(frozen=True)
class Warned(ConfigError):
    """A warning of a plan: the sentences before "Set", "Use" or "Remove", and the remedy."""


def warning_error(text: str) -> Warned:
    key = re.match(KEY, text)
    rule, *remedy = re.split(r"(?<=\.) (?=(?:Set|Use|Remove|Add) )", text, maxsplit=1)
    return Warned(key[0] if key else "warning", MISSING, rule, "".join(remedy))


def _changes_of_warning(error: Warned) -> list[Change]:
    """Return the changes of a warning; a direction, as "above 1", is followed by its first value.

    The keys of an alternative, "Set A=1 and B above 1", are one change.
    """
    changes: list[Change] = []
    for clause in re.split(r", or |; or ", error.remedy.rstrip(".")):
        if re.match(r"remove (it|the key)", clause, re.I):
            changes.append({error.key: None})
            continue
        change: Change = dict(re.findall(rf"({KEY})=([\w.:/*-]*\w(?:,[\w.*-]*\w)*)", clause))
        above = re.search(rf"({KEY}(?: and {KEY})*) above (\d+)", clause)
        if above:
            change |= dict.fromkeys(re.findall(KEY, above[1]), str(int(above[2]) + 1))
        bare = re.fullmatch(rf"(?:Set|set) ({KEY})", clause)
        if bare:
            change[bare[1]] = next(iter(candidate_values(bare[1])), "2")
        choice = re.search(rf"({KEY}) to (\w+) or (\w+)", clause)
        changes += [{choice[1]: choice[i]} for i in (2, 3)] if choice else []
        changes += [change] if change else []
        if not change and not choice and "." in error.key:
            clause = re.sub(r".*: (?=[\w.]+(, | or ))", "", clause)  # "a divisor: 1, 2 or 4"
            changes += proposed_changes(ConfigError(error.key, MISSING, "", clause))
    return changes


def apply_change(overrides: Overrides, change: Change) -> Overrides:
    kept = [(key, value) for key, value in overrides if key not in change]
    return (*kept, *((key, value) for key, value in change.items() if value is not None))


@dataclass
class Follower:
    """Provokes errors and follows their remedies; ``attempt`` returns the errors of overrides.

    ``any_key``: an error of any key that a remedy leads to is a failure, not only one of its keys.
    """

    attempt: Callable[[str, Overrides], list[ConfigError]]
    any_key: bool = False
    examples: dict[str, str] = field(default_factory=dict)  # values for "--key VALUE"
    followed: int = 0
    unread: dict[str, str] = field(default_factory=dict)  # rule to error, without a change to read
    failed: dict[str, str] = field(default_factory=dict)  # rule to what happened
    seen: set[tuple[str, str]] = field(default_factory=set)

    def provoke(self, recipe: str, overrides: Overrides) -> list[ConfigError]:
        """Follow every remedy of the errors that ``overrides`` have; return the errors."""
        errors = self.attempt(recipe, overrides)
        given = dict(overrides)
        for error in errors:
            shape = error.key, _shape(error.rule + error.remedy)
            if shape in self.seen:
                continue
            self.seen.add(shape)
            changes = proposed_changes(error)
            if not changes:
                self.unread[f"{error.key} {shape[1]}"] = str(error)
            for change in changes:
                if all(value is None and key not in given for key, value in change.items()):
                    continue  # a key of the recipe, which nobody can remove on the command line
                self.followed += 1
                change = self._fill(change)
                after = self.attempt(recipe, apply_change(overrides, change))
                for e in self._failures(recipe, overrides, change, errors, error, after):
                    command = " ".join(f"--{k} {v}" for k, v in overrides)
                    self.failed.setdefault(
                        f"{error.key} {shape[1]}",
                        f"{recipe} {command}\n   {error}\n   with {change}: {e}",
                    )
        return errors

    def _fill(self, change: Change) -> Change:
        return {k: self.examples[k] if v == "VALUE" else v for k, v in change.items()}

    def _failures(
        self,
        recipe: str,
        overrides: Overrides,
        change: Change,
        before: list[ConfigError],
        error: ConfigError,
        after: list[ConfigError],
        hops: int = 3,
    ) -> list[ConfigError]:
        """Return the errors that following a remedy has led to.

        Those are the same error again, and errors of a key that was just set.  Another rule about
        that key is allowed if following its remedy ends well: rules are told one after the other
        where one needs the result of another.
        """
        known = {(e.key, e.rule) for e in before}
        same = [e for e in after if (e.key, e.rule) == (error.key, error.rule)]
        if isinstance(error, Warned):
            same = [e for e in after if (e.key, _shape(e.rule)) == (error.key, _shape(error.rule))]
        new = [
            e
            for e in after
            if not isinstance(e, Warned)
            and (self.any_key or e.key in change)
            and (e.key, e.rule) not in known
        ]
        if same or not new or not hops:
            return same or new
        applied = apply_change(overrides, change)
        for e in new:
            nexts = [self._fill(c) for c in proposed_changes(e) if c != change]
            if not any(
                not self._failures(
                    recipe,
                    applied,
                    c,
                    [error],
                    error,
                    self.attempt(recipe, apply_change(applied, c)),
                    hops - 1,
                )
                for c in nexts
            ):
                return [e]
        return []


def _shape(text: str) -> str:
    """Return the text of a rule without its numbers and quotations."""
    return re.sub(r"[\d.]+|\"[^\"]*\"", "#", text)


def plan_errors(
    recipe: str, overrides: Overrides, machine: Machine, with_warnings: bool = False
) -> list[ConfigError]:
    """Return the errors of reading and planning, in the order of a start, and the warnings."""
    job, base, errors = read_job(recipe, overrides)
    later = ConfigErrors()
    try:
        plan = resolve_nodes(job, machine, recipe, base, adopt_paths)
        later += [warning_error(text) for text in plan.warnings if with_warnings]
    except InvalidConfig as invalid:
        later += invalid.errors
    errors.add_independent(later)
    return list(errors)


EXTREME = ("0", "1", "2", "3", "4", "5", "6", "7", "8", "16", "100", "1000", "70000")


def random_overrides(rng: random.Random, count: int) -> Overrides:
    """Draw ``count`` keys with valid or extreme values."""
    keys = [k for k in list_keys() if not k.startswith(("launch.", "run.rendezvous", "model.path"))]
    drawn = {}
    for key in rng.sample(keys, count):
        extreme = EXTREME[:-2] if key.startswith("model.") else EXTREME
        values = [*candidate_values(key), *(extreme if rng.random() < 0.5 else ())]
        if values:
            drawn[key] = rng.choice(values)
    return tuple(drawn.items())


def record_sites(sites: set[tuple[str, int]]) -> Iterator[None]:
    """Record the lines that add errors while the generator is suspended."""
    add = ConfigErrors.add

    def recording(self: ConfigErrors, *args: object, **kwargs: object) -> None:
        frame = sys._getframe(1)
        sites.add((Path(frame.f_code.co_filename).name, frame.f_lineno))
        add(self, *args, **kwargs)  # type: ignore[arg-type]

    ConfigErrors.add = recording  # type: ignore[method-assign]
    try:
        yield
    finally:
        ConfigErrors.add = add  # type: ignore[method-assign]
