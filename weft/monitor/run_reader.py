"""What a run's folder tells, in columns: quick for a million records, without torch.

Records are read in pieces of some thousand lines and become one array for each number in them, so
that the memory is that of the numbers alone.  A history can be read on where it ended, which is
how a page of a running run stays cheap.
"""

from __future__ import annotations

import math
import os
import tomllib
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from weft.config.errors import ConfigError, InvalidConfig, WeftError
from weft.config.files import describe_cause, open_regular, read_json, read_text
from weft.config.reader import read_job
from weft.config.schema import Job
from weft.monitor.event_log import read_events
from weft.monitor.goodput import KINDS, goodput
from weft.monitor.jsonl import MAX_NUMBER, MAX_STEP, parse_records, read_lines

Floats = NDArray[np.float64]

T = TypeVar("T")

WARMING = 2  # records of a start that are not the steady state
# A run that says nothing for this and ten records' time is not running.
SILENCE_SECONDS = 60.0

# Kinds of events that are to be expected, and those that end a run.
ROUTINE = {"start", "checkpoint", "evaluation", "stop", "end"}
FAILURES = {"failure", "hang"}


class Mark(NamedTuple):
    """Something that happened in a run, at ``time``, seconds since the epoch."""

    step: int
    time: float
    kind: str
    text: str


def no_run(folder: Path, key: str = "run") -> ConfigError:
    """What to say of a folder that was named as a run's, with ``key``, and is none."""
    rule, remedy = "is not the folder of a run", "name the one with job.toml in it"
    return ConfigError(key, str(folder), rule, remedy)


def job_of(folder: Path, key: str = "run") -> Job:
    """The job of the run in ``folder``, as it was written there.

    Raises:
        InvalidConfig: if it is not the folder of a run, or job.toml is damaged.
    """
    if not (folder / "job.toml").is_file():
        raise InvalidConfig([no_run(folder, key)])
    job, _, problems = read_job(str(folder / "job.toml"))
    if problems:
        path = str(folder / "job.toml")
        rule, remedy = f"is damaged ({problems[0]})", "mend the file, or name another run"
        raise InvalidConfig([ConfigError(key, path, rule, remedy)])
    return job


class RunReader:
    """The records and events of the run in ``folder``.

    Attributes:
        columns: of each number in the records, float64 ``[records]``; NaN where there is none.
            Those of an object in a record are named with dots: ``time_breakdown.productive``.
        steps: of the job; 0: its job.toml does not say.
        damaged: lines of metrics.jsonl that are no records.
        damaged_events: the same of events.jsonl, once `marks` has read it.
        unreadable: why a file cannot be read, by its name.

    Raises:
        InvalidConfig: if it is not the folder of a run.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.name = folder.resolve().name
        self.columns: dict[str, Floats] = {}
        self.damaged = self.damaged_events = 0
        self.unreadable: dict[str, str] = {}
        self._offset = 0
        if not any(os.path.lexists(folder / name) for name in ("job.toml", "metrics.jsonl")):
            raise InvalidConfig([no_run(folder)])
        text = self._read("job.toml", read_text) or ""
        self.job: dict[str, dict[str, Any]] = self._read("job.toml", lambda path: _job(text)) or {}
        steps = self.job.get("train", {}).get("steps")
        self.steps = steps if type(steps) is int and 0 < steps <= MAX_STEP else 0
        if not self.steps and "job.toml" not in self.unreadable:
            self.unreadable["job.toml"] = "train.steps is not a number of steps"
        head = [line for line in text.splitlines() if line.startswith("# ")]
        changes = [line[2:].partition(": ") for line in head if " -> " in line]
        self.changes = {name: change for name, _, change in changes}
        self.environment = self._read("environment.json", read_json) or {}
        self.plan = self._read("plan.json", read_json) or {}
        self.read_on()

    def __len__(self) -> int:
        return len(self.columns["step"]) if self.columns else 0

    def _read(self, name: str, read: Callable[[Path], T]) -> T | None:
        """Read a file of the run; None, and a line in `unreadable`, if that is not possible."""
        path = self.folder / name
        try:
            found = read(path)
            self.unreadable.pop(name, None)
            return found
        except (OSError, ValueError, RecursionError, WeftError) as error:
            cause = (
                str(error) if isinstance(error, WeftError | ValueError) else describe_cause(error)
            )
            cause = cause.removeprefix(f"{path}: cannot be read: ")
            self.unreadable.setdefault(name, cause)
            return None

    def read_on(self) -> None:
        """Take in the complete lines that metrics.jsonl has by now."""
        if os.path.lexists(self.folder / "metrics.jsonl"):
            self._read("metrics.jsonl", self._read_records)

    def _read_records(self, path: Path) -> None:
        pieces = [(self.columns, len(self))] if self.columns else []
        with open_regular(path) as file:
            file.seek(self._offset)
            for lines, long, end in read_lines(file):
                self._offset = end
                records = parse_records(lines)
                self.damaged += len(lines) + long - len(records)
                if records:
                    pieces.append((columns_of(records), len(records)))
        names = dict.fromkeys(chain.from_iterable(columns for columns, _ in pieces))
        self.columns = {
            name: np.concatenate([c.get(name, np.full(count, np.nan)) for c, count in pieces])
            for name in names
        }

    def column(self, name: str) -> Floats:
        """A column, or what follows from others: ``rest_seconds``, of a step without the data."""
        if name == "rest_seconds":
            return self.column("step_seconds") - self.column("data_seconds")
        return self.columns.get(name, np.full(len(self), np.nan))

    def last(self, name: str) -> float | None:
        """The newest number of a column, None if there is none."""
        values = self.column(name)
        found = values[np.isfinite(values)]
        return float(found[-1]) if len(found) else None

    def steady(self, name: str) -> float | None:
        """The median over the last start, without its first records if there are others."""
        values, starts = self.column(name), self.column("time_breakdown.restarting")
        values = values[starts == starts[-1]] if len(starts) and starts[-1] >= 0 else values
        values = values[WARMING:] if len(values) > WARMING else values
        values = values[np.isfinite(values)]
        return float(np.median(values)) if len(values) else None

    def seconds(self) -> dict[str, float]:
        """Of the run so far, by kind: see `weft.monitor.goodput`."""
        return {kind: self.last(f"time_breakdown.{kind}") or 0.0 for kind in KINDS}

    def goodput(self) -> float | None:
        """The productive share of the seconds so far; None if there are none."""
        spent = self.seconds()
        return goodput(spent) if sum(spent.values()) else None

    def marks(self) -> list[Mark]:
        """What happened, in its order in time."""
        found = self._read("events.jsonl", lambda path: read_events(path.parent))
        events, self.damaged_events = found or ([], 0)
        marks = [Mark(e["step"], float(e["time"]), e["kind"], e["text"]) for e in events]
        return sorted(marks, key=lambda mark: mark.time)

    def state(self, now: float, running: bool | None = None) -> tuple[str, str]:
        """``finished``, ``running``, ``failed``, ``stopped`` or ``not started``, and why.

        Args:
            now: seconds since the epoch.
            running: whether it is, if that is known; else by how long nothing was heard of it.
        """
        marks = self.marks()
        if self.steps and (self.last("step") or 0) >= self.steps:
            return "finished", self.divergence()
        if running is None:
            quiet = SILENCE_SECONDS + 10 * (self.last("step_seconds") or 0) * self._interval()
            heard = max([self.last("time") or 0.0, *(mark.time for mark in marks[-1:])])
            ended = bool(marks) and marks[-1].kind in FAILURES | {"stop", "end"}
            running = now - heard < quiet and not ended
        if running:
            return "running", self.divergence()
        for mark in reversed(marks):
            if mark.kind in FAILURES:
                return "failed", mark.text
            if mark.kind in ("start", "stop"):
                return "stopped", mark.text if mark.kind == "stop" else ""
        return ("stopped" if len(self) else "not started"), ""

    def divergence(self) -> str:
        """Return since when the run has diverged, for people; empty if it has not."""
        since = self.column("diverged_since")[-1:]
        return f"diverged since step {since[0]:.0f}" if np.isfinite(since).any() else ""

    def _interval(self) -> float:
        """Steps between records."""
        steps = self.column("step")[-20:]
        return float(np.median(np.diff(steps))) if len(steps) > 1 else 1.0


def _job(text: str) -> dict[str, dict[str, Any]]:
    """Return the sections of a job; anything beside them is left out."""
    tree = tomllib.loads(text)
    return {name: section for name, section in tree.items() if isinstance(section, dict)}


def _number(value: object) -> float:
    """NaN for what is no number."""
    try:
        return float(value) if isinstance(value, int | float) else math.nan
    except OverflowError:
        return math.nan


def columns_of(records: Sequence[Mapping[str, Any]], prefix: str = "") -> dict[str, Floats]:
    """The numbers in records, by the names of `History.columns`."""
    found: dict[str, Floats] = {}
    for name in dict.fromkeys(chain.from_iterable(records)):
        try:
            values = [*map(itemgetter(name), records)]
        except KeyError:  # some lack it
            values = [record.get(name) for record in records]
        first = next((value for value in values if value is not None), None)
        if isinstance(first, dict):
            inner = [value if isinstance(value, dict) else {} for value in values]
            found |= columns_of(inner, f"{prefix}{name}.")
        elif isinstance(first, int | float):
            try:
                column = np.array(values, np.float64)  # None becomes NaN
                if column.ndim != 1:
                    raise TypeError
            except (TypeError, ValueError, OverflowError):  # not all are numbers
                column = np.array([_number(v) for v in values], np.float64)
            with np.errstate(invalid="ignore"):
                column[np.abs(column) > MAX_NUMBER] = np.nan
            found[prefix + name] = column
    return found


def fewer(values: Floats, most: int) -> tuple[NDArray[np.intp], Floats | None]:
    """Which of the values to draw so that no extreme is lost.

    Returns:
        The indices of at most about ``most`` finite values, rising: of every so many the least and
        the most, and the first and the last of all; and the mean of the ones that each stands for,
        None if all are there.
    """
    there = np.flatnonzero(np.isfinite(values))
    if len(there) <= most:
        return there, None
    finite = values[there]
    each = -(-len(there) // (most // 2))
    starts = np.arange(0, len(there), each)
    whole = len(there) // each * each
    table = finite[:whole].reshape(-1, each)
    rows = np.arange(len(table)) * each
    tail = finite[whole:]
    picks = [rows + table.argmin(1), rows + table.argmax(1), np.array([0, len(there) - 1])]
    if len(tail):
        picks.append(whole + np.array([tail.argmin(), tail.argmax()]))
    picked = np.unique(np.concatenate(picks))
    counts = np.minimum(each, len(there) - starts)
    means = np.add.reduceat(finite, starts) / counts
    return there[picked], means[picked // each]
