"""Device hours and cost of a run so far, over all its starts.

A start counts from the beginning of its ranks to its last sign of life (a record, an event or a
sample of the node), with its own number of ranks.  The time until a restart by the same launcher
counts, because the nodes are held.  Time in a queue does not count.
"""

from __future__ import annotations

import json
import re
from typing import NamedTuple

import numpy as np

from weft.config.accelerators import unit_of
from weft.records.run_reader import RunEvent, RunReader

RANKS = re.compile(r" on (\d+) ranks?$")  # in the text of the event "start"
MAX_RESTART_SECONDS = 1800.0  # a later start after a failure is another job
LAUNCH_FILE = "launch.json"  # of `weft.submission.submit`


def device_seconds(run: RunReader, now: float) -> float:
    """Return the seconds of all ranks together.

    Args:
        run: the records and events of the run.
        now: seconds since the epoch.
    """
    starts, events = [], run.read_events()
    for event in events:
        if event.kind == "start" and (match := RANKS.search(event.text)):
            starts.append((event.time, int(match[1])))
    times, samples = run.column("time"), run.read_system().get("system.time", np.empty(0))
    signs = np.sort(np.concatenate([times, samples, [event.time for event in events]]))
    is_running = run.state(now)[0] == "running"
    total, end = 0.0, 0.0  # end of the start before
    for index, (time, ranks) in enumerate(starts):
        is_last = index == len(starts) - 1
        following = np.inf if is_last else starts[index + 1][0]
        restarted = _restart_time(events, time)
        begin = max(end, restarted or time - _loading_seconds(run, time, following))
        before_next = signs[signs < following]
        end = now if is_last and is_running else max(time, float(before_next[-1]))
        total += ranks * (end - begin)
    return total


def _loading_seconds(run: RunReader, start: float, following: float) -> float:
    """Return the seconds in which a start built and loaded the model.

    It is in the first record of the start, if there is one before the following start.
    """
    times, loading = run.column("time"), run.column("time_breakdown.restoring")
    after = np.flatnonzero((times >= start) & (times < following))
    if not len(after) or not np.isfinite(loading[after[0]]):
        return 0.0
    before = loading[after[0] - 1] if after[0] else 0.0
    return max(0.0, float(loading[after[0]] - before)) if np.isfinite(before) else 0.0


def _restart_time(events: list[RunEvent], start: float) -> float:
    """Return the time of the failure before a restart; 0 if another job began it."""
    before = [event for event in events if event.time < start and event.kind != "change"]
    is_restart = bool(before) and before[-1].kind == "restart"
    return before[-1].time if is_restart and start - before[-1].time < MAX_RESTART_SECONDS else 0.0


class Cost(NamedTuple):
    """Use and cost of a run; ``price``: per hour of the unit, 0 if unknown."""

    hours: float
    unit: str
    price: float

    def __str__(self) -> str:
        hours = f"{self.hours:,.{0 if self.hours >= 100 else 2}f} {self.unit}"
        if not self.price:
            return hours
        cost = self.hours * self.price
        return f"{cost:,.{0 if cost >= 1000 else 2}f} ({hours} at {self.price:g})"


def compute_cost(run: RunReader, now: float) -> Cost:
    """Return the use of a run so far and its price, by device, or on CPUs by node."""
    device = str(run.plan.get("device", "cpu"))
    hours, unit = device_seconds(run, now) / 3600, f"{unit_of(device)}-hours"
    if device == "cpu":
        unit, ranks = "node-hours", run.plan.get("local_world_size")
        hours /= ranks if isinstance(ranks, int) and ranks > 0 else 1
    return Cost(hours, unit, read_price(run))


def read_price(run: RunReader) -> float:
    """Return the price of a submitted run, or that of its recipe; 0: unknown."""
    try:
        record = json.loads((run.run_dir / LAUNCH_FILE).read_text("utf-8"))
        price = record.get("price_per_gpu_hour")
    except (OSError, ValueError, AttributeError):
        price = None
    price = price or run.job.get("launch", {}).get("price_per_gpu_hour")
    return float(price) if isinstance(price, int | float) and price > 0 else 0.0
