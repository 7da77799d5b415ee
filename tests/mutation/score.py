"""Compute the share of planted faults that are found and located."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def detected_share(outcomes: Sequence[Any]) -> float:
    """Return the share of faults that a check found."""
    return sum(bool(outcome.check) for outcome in outcomes) / max(1, len(outcomes))


def named_share(outcomes: Sequence[Any]) -> float:
    """Return the share of found faults whose module was named."""
    result = [outcome for outcome in outcomes if outcome.check]
    return sum(item.named for item in result) / max(1, len(result))


def report(outcomes: Sequence[Any]) -> str:
    """Format a table by kind, the scores and the missed faults."""
    kinds = sorted({item.kind for item in outcomes})
    lines = ["| kind | faults | found | module named |", "|---|---|---|---|"]
    for kind in kinds:
        subset = [item for item in outcomes if item.kind == kind]
        result = sum(bool(item.check) for item in subset)
        named = sum(item.named for item in subset)
        lines.append(f"| {kind} | {len(subset)} | {result} | {named} |")
    lines.append(
        f"| all | {len(outcomes)} | {detected_share(outcomes):.1%} | {named_share(outcomes):.1%} |"
    )
    for outcome in outcomes:
        if not outcome.check:
            lines.append(f"missed: {outcome.name} ({outcome.file})")
        elif not outcome.named:
            lines.append(f"named {outcome.module or 'nothing'}: {outcome.name} ({outcome.file})")
    return "\n".join(lines)
