"""How often to save: at a fixed number of steps, or so that least time is lost.

With failures every M seconds on average, a checkpoint that holds training up for C seconds, and
one every t seconds, the share of time lost is about C / t (saving) + t / (2 M) (done again after a
failure), which is least at t = sqrt(2 C M): J. W. Young, "A first order approximation to the
optimum checkpoint interval", CACM 17 (1974); J. T. Daly's higher-order estimate (FGCS 22, 2006)
differs by less than C while C is far below M.  Only C is measured: what a save in the background
takes beside training is not lost, but there cannot be two at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.distributed as dist

from weft.config.schema import CheckpointSection

FIRST = 10  # steps after which the first one is saved, whose cost decides


def young_interval(cost_seconds: float, mtbf_seconds: float) -> float:
    """Seconds between checkpoints that lose least time."""
    return math.sqrt(2 * cost_seconds * mtbf_seconds)


class CheckpointSchedule:
    """After which steps to save."""

    def __init__(self, section: CheckpointSection, step: int, say: Callable[[str], None]) -> None:
        self._mtbf_seconds = section.mtbf_hours * 3600
        self._interval = section.interval
        self._nodes = 0 if section.local_dir == "off" else section.local_interval
        self._next, self._told = step + FIRST, FIRST
        self._say = say

    def due(self, step: int) -> bool:
        """Whether to save after ``step``; the same on every rank."""
        if self._interval == "auto":
            return step >= self._next
        return self._interval > 0 and step % self._interval == 0

    def is_local_due(self, step: int) -> bool:
        """Whether nodes keep the state after ``step``, see `weft.checkpoint.local_save`."""
        return self._nodes > 0 and step % self._nodes == 0

    def saved(
        self, step: int, stall_seconds: float, write_seconds: float, step_seconds: float
    ) -> None:
        """Learn from a save; every rank calls it.

        Args:
            stall_seconds: that training stood still for it.
            write_seconds: that the one before took in the background, 0 if there was none.
            step_seconds: of a step.
        """
        if self._interval != "auto":
            return
        slowest = torch.tensor([stall_seconds, write_seconds, step_seconds], dtype=torch.float64)
        if dist.get_world_size() > 1:
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
        stall, write, one = slowest.tolist()
        between = max(1, math.ceil(max(young_interval(stall, self._mtbf_seconds), write) / one))
        if not 0.5 < between / self._told < 2:
            self._say(f"checkpoint: holds training up for {stall:.2g} s; now every {between} steps")
            self._told = between
        self._next = step + between
