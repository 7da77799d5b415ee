"""Declare keys: one home for everything that weft knows about a key.

A key is a field of a `Section` with its type, default and help, and beside them the facts that
other parts of weft read: `KeyFacts`.  A section can set facts for all of its keys.

*Conditions* are data, so that this package stays below the plan.  A condition is terms joined by
``and``:

    parallel.pp>1                   a key whose value is above a number
    optim.name=muon|module:function a key with one of these values; the last: any function of a user
    checkpoint.best!=off            a key with another value; nothing behind the sign: empty
    has_experts                     a fact about the plan, from `weft.planning.needs.FACTS`
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field

# May a run that resumes change the key?  The sentences are part of the key's help.
OnResume = Literal["free", "layout", "branch", "fixed", "weights"]
ON_RESUME: dict[OnResume, str] = {
    "free": "A run that resumes may change it, and computes the same.",
    "layout": "A run that resumes may change it: it is a part of the layout.",
    # So with another value it has another directory by default.
    "branch": "A run that resumes may change it, and learns something else from then on.",
    # Its weights or the order of its data depend on the key.
    "fixed": "A run that resumes cannot change it after its first step.",
    # Weights depend on the key that are imported before the first step.
    "weights": "A run that resumes cannot change it.",
}


@dataclass(frozen=True)
class KeyFacts:
    """The facts about a key beside its type, default and help.

    Attributes:
        needs: the condition under which the key has an effect; elsewhere a value other than the
            default causes a warning.  Empty: it always has.
        on_resume: whether a run that resumes may change the key.
        tries: values for random jobs, each with the condition that makes it valid; empty: the key
            is not drawn; None: values follow from the type.
        other_loss: runs with other values have losses of another meaning.
        same_speed: the time of a step does not depend on the key.
    """

    needs: str = ""
    on_resume: OnResume = "branch"
    tries: Mapping[str, str] | None = None
    other_loss: bool = False
    same_speed: bool = False


class Section(BaseModel):
    """A frozen group of keys.  Unknown keys, NaN and infinity are refused.

    Attributes:
        facts: facts of the keys that do not declare their own.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)
    facts: ClassVar[KeyFacts] = KeyFacts()


class _Declared(NamedTuple):
    """The facts that a key declares itself."""

    facts: dict[str, Any]


def key(
    default: Any,
    description: str,
    *,
    tries: Mapping[str, str] | tuple[str, ...] | None = None,
    needs: str | None = None,
    on_resume: OnResume | None = None,
    other_loss: bool | None = None,
    same_speed: bool | None = None,
    **rules: Any,
) -> Any:
    """Define a key: its default, help and `KeyFacts`.

    Facts that are not given are those of the section.  ``tries`` can be the values alone.
    ``rules`` are those of `pydantic.Field`.
    """
    info = Field(default, description=description, **rules)
    values = dict.fromkeys(tries, "") if isinstance(tries, tuple) else tries
    facts: dict[str, Any] = {"needs": needs, "on_resume": on_resume, "tries": values}
    facts |= {"other_loss": other_loss, "same_speed": same_speed}
    info.metadata.append(_Declared({k: v for k, v in facts.items() if v is not None}))
    return info


def facts_of(section: type[Section], name: str) -> KeyFacts:
    """Return the facts about a key of a section."""
    own = [m for m in section.model_fields[name].metadata if isinstance(m, _Declared)]
    return replace(section.facts, **own[0].facts) if own else section.facts


def describe_facts(section: type[Section], name: str) -> list[str]:
    """Return sentences for the help of a key: what it needs, and if it may change."""
    facts = facts_of(section, name)
    needed = [term.describe() for term in parse_condition(facts.needs) if term.sign]
    effect = [f"It has an effect only with {' and '.join(needed)}."] if needed else []
    return [*effect, ON_RESUME[facts.on_resume]]


# --------------------------------------------------------------------------- conditions


class Term(NamedTuple):
    """A term of a condition: a key with values, or a fact without."""

    name: str
    sign: Literal["=", "!=", ">", ""]
    values: tuple[str, ...] = ()

    def holds(self, value: Any) -> bool:
        """Return True if a value of the key fulfills the term; not for facts."""
        text = format_scalar(value)
        if self.sign == ">":
            return re.fullmatch(r"[\d.]+", text) is not None and float(text) > float(self.values[0])
        is_own = "module:function" in self.values and re.fullmatch(r"[\w.]+:\w+", text) is not None
        return (is_own or text in self.values) == (self.sign == "=")

    def describe(self) -> str:
        """Describe a setting that fulfills the term; not for facts."""
        if self.sign == ">":
            return f"{self.name} above {self.values[0]}"
        if self.sign == "!=":
            return self.name
        return f"{self.name}={self.values[0]}" if self.values[0] else f"no {self.name}"


def parse_condition(text: str) -> list[Term]:
    """Parse a condition; an empty one has no terms."""
    terms = []
    for part in text.split(" and ") if text else ():
        match = re.fullmatch(r"([\w.]+?)(?:(!=|=|>)(.*))?", part)
        assert match is not None, text
        name, sign, values = match[1], match[2] or "", match[3]
        terms.append(Term(name, sign, tuple(values.split("|")) if sign else ()))  # type: ignore[arg-type]
    return terms


def format_scalar(value: Any) -> str:
    """Format a value as in a condition: true, 0.5; empty texts and lists as ""."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:g}"
    return "" if not value and not isinstance(value, int) else str(value)
