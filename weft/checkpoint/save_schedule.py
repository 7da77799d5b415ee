"""Checkpoint schedule: a fixed interval, or the one that loses the least time.

With one failure every M seconds on average, a checkpoint that blocks training for C seconds, and
one checkpoint every t seconds, the fraction of time lost is about C / t (saving) + t / (2 M)
(repeated after a failure).  It is minimal at t = sqrt(2 C M): J. W. Young, "A first order
approximation to the optimum checkpoint interval", CACM 17 (1974).  J. T. Daly's higher-order
estimate (FGCS 22, 2006) differs by less than C while C is far below M.  Only the blocking time C
counts: an asynchronous write costs no training time, but two writes cannot overlap.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.distributed as dist

from weft.config.schema import CheckpointSection

FIRST_SAVE_STEPS = 10  # steps before the first save, whose cost sets the interval


def young_interval(cost_seconds: float, mtbf_seconds: float) -> float:
    """Return the seconds between checkpoints that minimize lost time."""
    return math.sqrt(2 * cost_seconds * mtbf_seconds)


class CheckpointSchedule:
    """Decides after which steps to save."""

    def __init__(self, section: CheckpointSection, step: int, log: Callable[[str], None]) -> None:
        self._mtbf_seconds = section.mtbf_hours * 3600
        self._interval = section.interval
        self._local_interval = section.local_interval if section.saves_locally else 0
        self._next, self._steps_between = step + FIRST_SAVE_STEPS, FIRST_SAVE_STEPS
        self._log = log

    def is_due(self, step: int) -> bool:
        """Return True if the run saves after ``step``; the same on every rank."""
        if self._interval == "auto":
            return step >= self._next
        return self._interval > 0 and step % self._interval == 0

    def is_local_due(self, step: int) -> bool:
        """Return True if nodes save after ``step``: see `weft.checkpoint.local_save`."""
        return self._local_interval > 0 and step % self._local_interval == 0

    def record_save(
        self, step: int, blocking_seconds: float, write_seconds: float, step_seconds: float
    ) -> None:
        """Update the automatic interval after a save; every rank calls it.

        Args:
            step: step of the save.
            blocking_seconds: time for which the save blocked training.
            write_seconds: time of the previous asynchronous write; 0 if there was none.
            step_seconds: time of a step.
        """
        if self._interval != "auto":
            return
        slowest = torch.tensor([blocking_seconds, write_seconds, step_seconds], dtype=torch.float64)
        if dist.get_world_size() > 1:
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
        blocking, write, step_time = slowest.tolist()
        steps_between = max(
            1, math.ceil(max(young_interval(blocking, self._mtbf_seconds), write) / step_time)
        )
        if not 0.5 < steps_between / self._steps_between < 2:
            self._log(
                f"checkpoint.interval=auto: a save blocks training for {blocking:.2g} s; saving "
                f"every {steps_between} steps"
            )
            self._steps_between = steps_between
        self._next = step + steps_between
