"""Where the seconds of a run went, over all its starts: the share of them that was good for it.

Each second belongs to one of `KINDS`.  A step that is done again after a failure was productive
until then, and is lost from then on.  What a start finds between the last record of the one before
and its own beginning (steps without a record, noticing, waiting in a queue, importing) is
restarting.  Starting a profile and writing its traces counts as saving.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

KINDS = ("productive", "saving", "evaluating", "restoring", "restarting", "lost")


class Ledger:
    """Seconds of each of `KINDS` since the run began."""

    def __init__(self, records: Sequence[Mapping[str, Any]]) -> None:
        """``records``: of the run so far, also of steps that are to be done again."""
        self._last = now = time.time()
        self.seconds = dict.fromkeys(KINDS, 0.0)
        if records:
            self.seconds |= records[-1].get("seconds", {})
            self.seconds["restarting"] += max(0.0, now - records[-1]["time"])

    def spent(self, kind: str) -> None:
        """The time since the last call was of this kind."""
        now = time.time()
        self.seconds[kind] += max(0.0, now - self._last)
        self._last = now

    def back_to(self, step: int, records: Sequence[Mapping[str, Any]]) -> None:
        """The steps after ``step`` were for nothing."""
        kept = [record for record in records if record["step"] <= step]
        done, before = (_productive(some[-1:]) for some in (records, kept))
        self.seconds["productive"] -= done - before
        self.seconds["lost"] += done - before


def _productive(records: Sequence[Mapping[str, Any]]) -> float:
    return float(records[0].get("seconds", {}).get("productive", 0.0)) if records else 0.0


def goodput(seconds: Mapping[str, float]) -> float:
    """The productive share of all seconds, in [0, 1]."""
    return seconds["productive"] / max(1e-9, sum(seconds.values()))
