"""Where the seconds of a run went, over all its starts: the share of them that was good for it.

Each second belongs to one of `KINDS`.  A step that is done again after a failure was productive
until then, and is lost from then on.  What a start finds between the last record of the one before
and its own beginning (steps without a record, noticing, waiting in a queue, importing) is
restarting.  Starting a profile and writing its traces counts as saving.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

MAX_SECONDS = 1e11
KINDS = ("productive", "saving", "evaluating", "restoring", "restarting", "lost")


class Ledger:
    """Seconds of each of `KINDS` since the run began."""

    def __init__(self, last: Mapping[str, Any] | None) -> None:
        """``last``: the newest record of the run so far, also of a step to be done again."""
        self._last = now = time.time()
        self.seconds = {kind: _seconds(last, kind) for kind in KINDS}
        if last is not None:
            self.seconds["restarting"] += max(0.0, now - _number(last.get("time"), now))

    def spent(self, kind: str) -> None:
        """The time since the last call was of this kind."""
        now = time.time()
        self.seconds[kind] += max(0.0, now - self._last)
        self._last = now

    def back_to(self, last: Mapping[str, Any] | None, kept: Mapping[str, Any] | None) -> None:
        """Count the steps between the newest record and the one that is ``kept`` as lost."""
        lost = _seconds(last, "productive") - _seconds(kept, "productive")
        self.seconds["productive"] -= lost
        self.seconds["lost"] += lost


def _seconds(record: Mapping[str, Any] | None, kind: str) -> float:
    """Return what a record says of a kind; 0 where it is damaged."""
    spent = None if record is None else record.get("time_breakdown")
    return _number(spent.get(kind), 0.0) if isinstance(spent, dict) else 0.0


def _number(value: object, default: float) -> float:
    """Return a number that a clock may have given; else the default."""
    is_number = isinstance(value, int | float) and 0 <= value < MAX_SECONDS
    return float(value) if is_number else default  # type: ignore[arg-type]


def goodput(seconds: Mapping[str, float]) -> float:
    """The productive share of all seconds, in [0, 1]."""
    return seconds["productive"] / max(1e-9, sum(seconds.values()))
