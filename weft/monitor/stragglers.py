"""Which rank is slow, when all of them need the same time?

In synchronous training every rank's step takes as long as the slowest one's: the others wait in
collectives.  So each measures what it needs before it can be made to wait, in two parts:

* getting its data, on the wall clock: nobody waits for others there (less what its device still
  had to do when it was done, because that hides it);
* computing.  On a CPU the processor time of its main thread, which stands still while it waits (so
  does what another program takes away: that is noise, on the machines where one trains on CPUs).
  On a GPU, whose kernels of communication are busy waiting, a probe: a product of matrices of
  fixed size, which comes after everything that the step has queued.

The parts are exchanged with every record, and each rank is compared with the median of its peers
without it: those at the same place of the pipeline and of the sequence, which have as much to do.
A rank is named when it makes steps 1.5 times as long for three records in a row that span at least
ten steps; a hiccup is no straggler.
"""

from __future__ import annotations

import statistics
from bisect import bisect_left
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist

RATIO, RECORDS, STEPS = 1.5, 3, 10


def every_rank(values: Sequence[float]) -> list[list[float]]:
    """Each rank's values, in the order of the ranks; every rank calls it, with equally many."""
    table = torch.zeros(dist.get_world_size(), len(values), dtype=torch.float64)
    table[dist.get_rank()] = torch.tensor(values)
    if len(table) > 1:
        dist.all_reduce(table)
    rows: list[list[float]] = table.tolist()
    return rows


class Stragglers:
    """The judgement over time."""

    def __init__(self) -> None:
        self._since: list[int] = []  # the steps of the records in which one rank was slow ...
        self._slow: int | None = None  # ... this one

    def judge(
        self,
        step: int,
        step_seconds: float,
        table: Sequence[Sequence[float]],
        say: Callable[[str], None],
    ) -> tuple[int | None, float | None]:
        """The rank that is slow, and how many times as long steps take for it; else None twice.

        Args:
            table: as `slowest` takes it, per step since the last call.
            say: told once of every straggler.
        """
        rank, ratio, why = slowest(step_seconds, table)
        if ratio < RATIO:
            rank = None
        if rank != self._slow:
            self._slow, self._since = rank, []
        if rank is None:
            return None, None
        known = self._lasts()
        self._since.append(step)
        if not self._lasts():
            return None, None
        if not known:
            say(f"rank {rank} is slow: {why} makes steps {ratio:.1f} times as long")
        return rank, ratio

    def _lasts(self) -> bool:
        since = self._since
        return len(since) >= RECORDS and since[-1] - since[0] >= STEPS


def slowest(step_seconds: float, table: Sequence[Sequence[float]]) -> tuple[int | None, float, str]:
    """The rank that slows the others down the most, by which factor, and with what.

    Args:
        table: of each rank the seconds for its data, those of computing, and its place.
    """
    # Of all with a place the values in order, so that leaving one out costs no new sorting: there
    # may be thousands of ranks.
    places: dict[tuple[float, ...], tuple[list[float], list[float]]] = {}
    for data, compute, *place in table:
        values = places.setdefault(tuple(place), ([], []))
        values[0].append(data)
        values[1].append(compute)
    for values in places.values():
        values[0].sort()
        values[1].sort()
    worst: tuple[int | None, float, str] = (None, 1.0, "")
    for rank, (data, compute, *place) in enumerate(table):
        all_data, all_compute = places[tuple(place)]
        if len(all_data) == 1:
            continue
        more = data - _median_without(all_data, data)
        usual = _median_without(all_compute, compute)
        by_data = step_seconds / max(step_seconds - more, 1e-9)
        by_compute = compute / usual if usual > 0 else 1.0
        if by_data > worst[1]:
            worst = rank, by_data, "waiting for its data"
        if by_compute > worst[1]:
            worst = rank, by_compute, "its computing"
    return worst


def _median_without(ordered: Sequence[float], one: float) -> float:
    """The median of all but one of at least two values."""
    gone, count = bisect_left(ordered, one), len(ordered) - 1

    def at(place: int) -> float:
        return ordered[place + (place >= gone)]

    return (at((count - 1) // 2) + at(count // 2)) / 2


class Probe:
    """How fast a GPU is: a fixed piece of work, which waits its turn and is not waited for."""

    def __init__(self, device: torch.device, size: int = 2048, times: int = 8) -> None:
        """Queue it; ``times`` products of two ``[size, size]`` matrices."""
        a = torch.ones(size, size, device=device, dtype=torch.bfloat16)
        out = torch.empty_like(a)
        event: Any = torch.cuda.Event  # whose constructor has no types
        self._events = [event(enable_timing=True) for _ in range(times + 1)]
        self._events[0].record()
        for event in self._events[1:]:
            torch.mm(a, a, out=out)
            event.record()

    def seconds(self) -> float:
        """Of one product: the median, once the device has come past it."""
        return float(statistics.median(a.elapsed_time(b) for a, b in pairwise(self._events))) / 1000
