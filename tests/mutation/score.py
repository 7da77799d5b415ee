"""How many of the planted faults are found, and in how many the right module is named."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def found_share(outcomes: Sequence[Any]) -> float:
    """The share of faults that a check found."""
    return sum(bool(each.check) for each in outcomes) / max(1, len(outcomes))


def named_share(outcomes: Sequence[Any]) -> float:
    """Of those that were found the share of which the right module was named."""
    found = [each for each in outcomes if each.check]
    return sum(each.named for each in found) / max(1, len(found))


def report(outcomes: Sequence[Any]) -> str:
    """A table by kind, the scores, and what was missed."""
    kinds = sorted({each.kind for each in outcomes})
    lines = ["| kind | faults | found | module named |", "|---|---|---|---|"]
    for kind in kinds:
        some = [each for each in outcomes if each.kind == kind]
        found = sum(bool(each.check) for each in some)
        named = sum(each.named for each in some)
        lines.append(f"| {kind} | {len(some)} | {found} | {named} |")
    lines.append(
        f"| all | {len(outcomes)} | {found_share(outcomes):.1%} | {named_share(outcomes):.1%} |"
    )
    for each in outcomes:
        if not each.check:
            lines.append(f"missed: {each.name} ({each.file})")
        elif not each.named:
            lines.append(f"named {each.module or 'nothing'}: {each.name} ({each.file})")
    return "\n".join(lines)
