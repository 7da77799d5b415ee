"""Time the phases of a rank: the one clock of a run.

A rank is always in one phase of `PHASES`.  `enter_phase` ends the previous phase and begins the
next one.  Everything that measures time reads the same phases:

- the watchdog: the phase is the heartbeat's position (`weft.monitor.heartbeat`);
- the timeline: each phase is a span (`weft.monitor.spans`);
- step time, data time and the straggler check: `StepTimer.measure`, means over the steps since the
  last record;
- goodput: `StepTimer.time_breakdown`, seconds of the whole run, over all its starts, by `KINDS`.

Seconds of a step that is repeated after a failure are productive until the failure and lost from
then on.  The time between the last record of a start and the beginning of the next one (steps
without a record, detection, a queue, imports) is restarting.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

from weft.monitor.heartbeat import beat
from weft.monitor.spans import SpanWriter

MAX_SECONDS = 1e11
KINDS = ("productive", "saving", "evaluating", "restoring", "restarting", "lost")


class Phase(NamedTuple):
    """A phase of a rank: its name for people, and the kind of its seconds."""

    activity: str
    kind: str


# In the order of a step.
PHASES = {
    "start": Phase("building the model", "restoring"),
    "load": Phase("loading a checkpoint", "restoring"),
    "sync": Phase("synchronizing replica groups", "productive"),
    "data": Phase("waiting for data", "productive"),
    "bytes": Phase("waiting for bytes of a token store in a bucket", "productive"),
    "forward_backward": Phase("forward and backward", "productive"),
    "update": Phase("updating the parameters", "productive"),
    "device": Phase("waiting for the device", "productive"),
    "log": Phase("logging the step", "saving"),
    "evaluate": Phase("evaluating", "evaluating"),
    "checkpoint": Phase("saving a checkpoint", "saving"),
    "profile": Phase("writing a profile", "saving"),
}


class StepTimes(NamedTuple):
    """Mean seconds per step since the last record, of this rank."""

    step: float
    data: float  # of which waiting for data
    stall: float  # waiting for data that the device did not hide
    cpu: float  # processor time of the main thread


class StepTimer:
    """Seconds by phase, on the main thread.

    Args:
        last_record: the newest record of the run before this start; None: the first start.
        spans: receives each phase.
    """

    def __init__(self, last_record: Mapping[str, Any] | None, spans: SpanWriter) -> None:
        global _current
        self._spans, self._thread = spans, threading.get_ident()
        self._breakdown = {kind: recorded_seconds(last_record, kind) for kind in KINDS}
        if last_record is not None:
            now = time.time()
            self._breakdown["restarting"] += max(0.0, now - _number(last_record.get("time"), now))
        self._phase, self._began, self._cpu_began = "", 0.0, 0.0
        self.completed_step = 0
        self._restart()
        _current = self
        self.enter("start")

    def enter(self, name: str, step: int | None = None) -> None:
        """End the current phase and begin another; ``step``: the new step, else None."""
        if threading.get_ident() != self._thread:
            return  # a background writer
        is_new = step is not None or name != self._phase
        self._lap()
        self._phase = name
        if is_new:
            self._spans.begin_phase(PHASES[name].activity, step)

    def complete_step(self, step: int) -> None:
        """Count a completed step."""
        self.completed_step = step
        self._steps += 1

    def measure(self) -> StepTimes:
        """Return the means since the last call or `rewind`, and begin a new interval."""
        self._lap()
        steps = max(1, self._steps)
        total = sum(self._interval.values())
        data, device = (self._interval.get(name, 0.0) for name in ("data", "device"))
        times = (total, data, max(0.0, data - device), self._cpu)
        self._restart()
        return StepTimes(*(seconds / steps for seconds in times))

    def rewind(
        self, step: int, last: Mapping[str, Any] | None, kept: Mapping[str, Any] | None
    ) -> None:
        """Continue from ``step``; the seconds of later steps are lost.

        Args:
            step: completed steps.
            last: the newest record.
            kept: the newest record up to ``step``.
        """
        self.completed_step = step
        self._lap()
        lost = recorded_seconds(last, "productive") - recorded_seconds(kept, "productive")
        lost += sum(self._interval.values())
        self._breakdown["productive"] -= lost
        self._breakdown["lost"] += lost
        self._restart()

    def time_breakdown(self) -> dict[str, float]:
        """Return the seconds of the whole run so far, by `KINDS`."""
        self._lap()
        return dict(self._breakdown)

    def close(self) -> None:
        """End the last phase."""
        global _current
        _current = None
        self._spans.close()

    def _restart(self) -> None:
        """Begin an interval of steps."""
        self._interval: dict[str, float] = {}  # seconds of the productive phases
        self._cpu, self._steps = 0.0, 0

    def _lap(self) -> None:
        """Add the seconds since the last call to the current phase."""
        now, cpu = time.perf_counter(), time.thread_time()
        if self._phase:
            kind, seconds = PHASES[self._phase].kind, now - self._began
            self._breakdown[kind] += seconds
            if kind == "productive":
                self._interval[self._phase] = self._interval.get(self._phase, 0.0) + seconds
                self._cpu += cpu - self._cpu_began
        self._began, self._cpu_began = now, cpu


_current: StepTimer | None = None


def enter_phase(name: str, step: int | None = None) -> None:
    """Begin a phase of this rank, for the watchdog and the rank's `StepTimer`."""
    beat(name, step)
    if _current is not None:
        _current.enter(name, step)


def goodput(time_breakdown: Mapping[str, float]) -> float:
    """Return the productive fraction of all seconds, in [0, 1]."""
    return time_breakdown["productive"] / max(1e-9, sum(time_breakdown.values()))


def recorded_seconds(record: Mapping[str, Any] | None, kind: str) -> float:
    """Return the seconds of a kind in a record; 0 without an intact record."""
    breakdown = None if record is None else record.get("time_breakdown")
    return _number(breakdown.get(kind), 0.0) if isinstance(breakdown, dict) else 0.0


def _number(value: object, default: float) -> float:
    """Return a number that a clock can have given, else the default."""
    is_number = isinstance(value, int | float) and 0 <= value < MAX_SECONDS
    return float(value) if is_number else default  # type: ignore[arg-type]
