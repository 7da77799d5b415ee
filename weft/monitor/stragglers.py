"""Detect a rank that slows down all others.

In synchronous training every rank's step takes as long as the slowest rank's, because the others
wait in collectives.  So each rank measures what it needs before it can be made to wait:

- loading its data, in wall-clock time, because that waits for no other rank (minus the time that
  its device still needed, which hides the loading);
- computing.  On a CPU this is the processor time of the main thread, which excludes waiting.  It
  also excludes time that other programs take, which on shared machines is noise.  On a GPU, where
  communication kernels keep the device busy while they wait, it is a probe: a matrix product of
  fixed size after the queued work of the step.

Ranks exchange both with every record.  Each rank is compared with the median of its peers: the
other ranks with the same pipeline and context-parallel rank, which have the same amount of work.  A
rank is reported if it makes steps `RATIO` times as long in `RECORDS` records in a row that span at
least `STEPS` steps.
"""

from __future__ import annotations

import statistics
from bisect import bisect_left
from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
import torch.distributed as dist

RATIO, RECORDS, STEPS = 1.5, 3, 10


def gather_rows(values: Sequence[float]) -> list[list[float]]:
    """Return the values of every rank, in the order of the ranks; a collective."""
    table = torch.zeros(dist.get_world_size(), len(values), dtype=torch.float64)
    table[dist.get_rank()] = torch.tensor(values)
    if len(table) > 1:
        dist.all_reduce(table)
    rows: list[list[float]] = table.tolist()
    return rows


class StragglerDetector:
    """Compare the ranks over several records."""

    def __init__(self) -> None:
        self._rank: int | None = None  # the slowest rank of the last records
        self._slow_steps: list[int] = []  # the steps of these records

    def check(
        self,
        step: int,
        step_seconds: float,
        table: Sequence[Sequence[float]],
        log: Callable[[str], None],
    ) -> tuple[int | None, float | None]:
        """Return the straggler, and the slowdown of steps; None, None without one.

        Args:
            step: step of the record.
            step_seconds: mean time of a step since the last record.
            table: see `find_slowest`; per step since the last record.
            log: receives one message per straggler.
        """
        rank, ratio, reason = find_slowest(step_seconds, table)
        if ratio < RATIO:
            rank = None
        if rank != self._rank:
            self._rank, self._slow_steps = rank, []
        if rank is None:
            return None, None
        was_straggler = self._is_straggler()
        self._slow_steps.append(step)
        if not self._is_straggler():
            return None, None
        if not was_straggler:
            log(f"rank {rank} is slow: {reason} makes steps {ratio:.1f} times as long")
        return rank, ratio

    def _is_straggler(self) -> bool:
        steps = self._slow_steps
        return len(steps) >= RECORDS and steps[-1] - steps[0] >= STEPS


def find_slowest(
    step_seconds: float, table: Sequence[Sequence[float]]
) -> tuple[int | None, float, str]:
    """Return the rank that slows the others down most, the factor, and the reason.

    Args:
        step_seconds: mean time of a step.
        table: for each rank its seconds of data loading and of computing, and its coordinates.
    """
    # The sorted values of all peers, so that leaving one out needs no new sorting: there may be
    # thousands of ranks.
    peers: dict[tuple[float, ...], tuple[list[float], list[float]]] = {}
    for data, compute, *coordinates in table:
        values = peers.setdefault(tuple(coordinates), ([], []))
        values[0].append(data)
        values[1].append(compute)
    for values in peers.values():
        values[0].sort()
        values[1].sort()
    worst: tuple[int | None, float, str] = (None, 1.0, "")
    for rank, (data, compute, *coordinates) in enumerate(table):
        all_data, all_compute = peers[tuple(coordinates)]
        if len(all_data) == 1:
            continue
        more = data - _median_without(all_data, data)
        usual = _median_without(all_compute, compute)
        by_data = step_seconds / max(step_seconds - more, 1e-9)
        by_compute = compute / usual if usual > 0 else 1.0
        if by_data > worst[1]:
            worst = rank, by_data, "waiting for data"
        if by_compute > worst[1]:
            worst = rank, by_compute, "computing"
    return worst


def _median_without(ordered: Sequence[float], one: float) -> float:
    """Return the median of at least two sorted values without ``one`` of them."""
    removed, count = bisect_left(ordered, one), len(ordered) - 1

    def remaining(index: int) -> float:
        return ordered[index + (index >= removed)]

    return (remaining((count - 1) // 2) + remaining(count // 2)) / 2


class Probe:
    """Speed of an accelerator, measured by a fixed amount of work behind the step.

    The host does not wait for it.

    Args:
        device: the accelerator.
        size: rows and columns of the matrices.
        times: number of matrix products.
    """

    def __init__(self, device: torch.device, size: int = 2048, times: int = 8) -> None:
        a = torch.ones(size, size, device=device, dtype=torch.bfloat16)
        out = torch.empty_like(a)
        self._events = [torch.Event(device, enable_timing=True) for _ in range(times + 1)]
        self._events[0].record()
        for event in self._events[1:]:
            torch.mm(a, a, out=out)
            event.record()

    def seconds(self) -> float:
        """Return the median seconds of a matrix product, after all are computed."""
        return float(statistics.median(a.elapsed_time(b) for a, b in pairwise(self._events))) / 1000
