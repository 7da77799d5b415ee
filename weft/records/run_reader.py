"""Reader of a run's records and events, as columns, without torch.

Records are read some thousand lines at a time, and become one array per metric, so that a million
records need no more memory than the arrays.  A reader can later continue with the new records,
which keeps the report of a running run cheap.
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
from weft.config.writer import read_changes
from weft.monitor.jsonl import MAX_STEP, SYSTEM_FILE
from weft.monitor.step_timer import KINDS, goodput
from weft.records.jsonl_reader import MAX_NUMBER, is_number, parse_records, read_lines, read_values

MAX_TIME = 1e11  # seconds since the epoch; a later one is damage

Floats = NDArray[np.float64]

T = TypeVar("T")

WARMUP_RECORDS = 2  # first records of a start, before the steady state
# A run is stopped if its last record is older than this plus the time of ten records.
SILENCE_SECONDS = 60.0

# Kinds of expected events, of events that end a run, and of generated text.
ROUTINE_KINDS = {"start", "change", "checkpoint", "evaluation", "best", "stop", "end"}
FAILURE_KINDS = {"failure", "hang"}
TEXT_KIND = "generation"


class RunEvent(NamedTuple):
    """An event of a run."""

    step: int
    time: float  # seconds since the epoch
    kind: str
    text: str


def is_run_dir(path: Path) -> bool:
    """Return True if a report can show something of the directory, damaged or not."""
    return any(os.path.lexists(path / name) for name in ("job.toml", "metrics.jsonl"))


def run_dir_error(path: Path, key: str = "run") -> ConfigError:
    """Return the error that the value of ``key`` is not a run directory."""
    rule, remedy = "is not a run directory", "use the directory that has the run's job.toml"
    return ConfigError(key, str(path), rule, remedy)


def read_run_job(run_dir: Path, key: str = "run") -> Job:
    """Read the job of a run.

    Raises:
        InvalidConfig: if ``run_dir``, the value of ``key``, is not a run directory, or if its
            job.toml is damaged.
    """
    path = run_dir / "job.toml"
    if not path.is_file():
        raise InvalidConfig([run_dir_error(run_dir, key)])
    job, _, errors = read_job(str(path))
    if errors:
        rule, remedy = "is damaged", "repair the file, or use another run"
        raise InvalidConfig([ConfigError(key, str(path), rule, remedy), *errors])
    return job


class RunReader:
    """Records and events of a run.

    Args:
        run_dir: the run directory.

    Attributes:
        columns: float64 ``[records]`` for each metric; NaN where a record lacks it.  Names of
            nested metrics have dots: ``time_breakdown.productive``.
        steps: steps of the whole run; 0 if neither plan.json nor job.toml has them.
        damaged: number of damaged lines of metrics.jsonl.
        damaged_events: number of damaged lines of events.jsonl, after `read_events`.
        unreadable: for each file that cannot be read, the reason.

    Raises:
        InvalidConfig: if ``run_dir`` is not a run directory.
    """

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.name = os.path.basename(os.path.realpath(run_dir))
        self.columns: dict[str, Floats] = {}
        self.damaged = self.damaged_events = 0
        self.unreadable: dict[str, str] = {}
        self._offset = 0
        self._system: tuple[int, dict[str, Floats]] | None = None  # bytes read, and samples
        if not is_run_dir(run_dir):
            raise InvalidConfig([run_dir_error(run_dir)])
        text = self._read("job.toml", read_text) or ""
        self.job: dict[str, dict[str, Any]] = self._read("job.toml", lambda path: _job(text)) or {}
        steps = self.job.get("train", {}).get("steps")
        self.steps = _valid_steps(steps)
        if not self.steps and steps != "auto" and "job.toml" not in self.unreadable:
            self.unreadable["job.toml"] = "train.steps is not a valid number of steps"
        self.changes = read_changes(text)
        self.environment = self._read("environment.json", read_json) or {}
        self.plan: dict[str, Any] = self._read("plan.json", read_json) or {}
        self.read_new_records()

    def __len__(self) -> int:
        return len(self.columns["step"]) if self.columns else 0

    def _read(self, name: str, read: Callable[[Path], T]) -> T | None:
        """Read a file of the run; if this fails, store the reason and return None."""
        path = self.run_dir / name
        try:
            content = read(path)
            self.unreadable.pop(name, None)
            return content
        except (OSError, ValueError, RecursionError, WeftError) as error:
            cause = (
                str(error) if isinstance(error, WeftError | ValueError) else describe_cause(error)
            )
            cause = cause.removeprefix(f"{path}: cannot be read: ")
            self.unreadable.setdefault(name, cause)
            return None

    def read_new_records(self) -> None:
        """Append the new complete lines of metrics.jsonl to the columns."""
        if not self.steps:  # train.epochs and the data decide; the ranks write the plan
            self.plan = self._read("plan.json", read_json) or {}
            self.steps = _valid_steps(self.plan.get("num_steps"))
        if os.path.lexists(self.run_dir / "metrics.jsonl"):
            self._read("metrics.jsonl", self._read_records)

    def _read_records(self, path: Path) -> None:
        tables = [(self.columns, len(self))] if self.columns else []
        with open_regular(path) as file:
            file.seek(self._offset)
            for lines, num_overlong, end in read_lines(file):
                self._offset = end
                records = parse_records(lines)
                self.damaged += len(lines) + num_overlong - len(records)
                if records:
                    tables.append((to_columns(records), len(records)))
        names = dict.fromkeys(chain.from_iterable(columns for columns, _ in tables))
        self.columns = {
            name: np.concatenate([c.get(name, np.full(count, np.nan)) for c, count in tables])
            for name in names
        }

    def column(self, name: str) -> Floats:
        """Return a column, NaN without values; ``rest_seconds``: of a step without data."""
        if name == "rest_seconds":
            return self.column("step_seconds") - self.column("data_seconds")
        return self.columns.get(name, np.full(len(self), np.nan))

    def last(self, name: str) -> float | None:
        """Return the newest finite value of a column; None if it has none."""
        values = self.column(name)
        finite = values[np.isfinite(values)]
        return float(finite[-1]) if len(finite) else None

    def steady_median(self, name: str) -> float | None:
        """Return the median of the last start, without its first records if it has others."""
        values, starts = self.column(name), self.column("time_breakdown.restarting")
        values = values[starts == starts[-1]] if len(starts) and starts[-1] >= 0 else values
        values = values[WARMUP_RECORDS:] if len(values) > WARMUP_RECORDS else values
        values = values[np.isfinite(values)]
        return float(np.median(values)) if len(values) else None

    def time_breakdown(self) -> dict[str, float]:
        """Return the seconds of the run by kind: see `weft.monitor.step_timer`."""
        return {kind: self.last(f"time_breakdown.{kind}") or 0.0 for kind in KINDS}

    def goodput(self) -> float | None:
        """Return the productive fraction of the run's seconds; None without records."""
        breakdown = self.time_breakdown()
        return goodput(breakdown) if sum(breakdown.values()) else None

    def read_system(self) -> dict[str, Floats]:
        """Return the samples of the node as columns: see `weft.monitor.system_sampler`."""
        path = self.run_dir / SYSTEM_FILE
        if self._system is None or (path.exists() and path.stat().st_size != self._system[0]):
            size = path.stat().st_size if path.exists() else 0
            self._system = (size, self._read(SYSTEM_FILE, _read_samples) or {} if size else {})
        return self._system[1]

    def read_events(self) -> list[RunEvent]:
        """Read the events of the run, sorted by time."""
        log = self._read("events.jsonl", lambda path: read_event_log(path.parent))
        values, self.damaged_events = log or ([], 0)
        events = [RunEvent(e["step"], float(e["time"]), e["kind"], e["text"]) for e in values]
        return sorted(events, key=lambda event: event.time)

    def state(self, now: float, running: bool | None = None) -> tuple[str, str]:
        """Return the state of the run and the reason.

        Args:
            now: seconds since the epoch.
            running: True if the run is running; None: decide by the age of its last record.

        Returns:
            ``finished``, ``running``, ``failed``, ``stopped`` or ``not started``; and the reason,
            empty if there is none.
        """
        events = self.read_events()
        if self.steps and (self.last("step") or 0) >= self.steps:
            return "finished", self.divergence()
        if running is None:
            timeout = SILENCE_SECONDS + 10 * (self.last("step_seconds") or 0) * self._log_interval()
            newest = max([self.last("time") or 0.0, *(event.time for event in events[-1:])])
            has_ended = bool(events) and events[-1].kind in FAILURE_KINDS | {"stop", "end"}
            running = now - newest < timeout and not has_ended
        if running:
            return "running", self.divergence()
        for event in reversed(events):
            if event.kind in FAILURE_KINDS:
                return "failed", event.text
            if event.kind == "end":  # train.early_stopping
                return "finished", event.text
            if event.kind in ("start", "stop"):
                return "stopped", event.text if event.kind == "stop" else ""
        return ("stopped" if len(self) else "not started"), ""

    def best_event(self) -> RunEvent | None:
        """Return the event of the best checkpoint on the current branch."""
        best: list[RunEvent] = []
        for event in self.read_events():
            if event.kind == "start":
                best = [each for each in best if each.step <= event.step]
            elif event.kind == "best":
                best.append(event)
        return best[-1] if best else None

    def divergence(self) -> str:
        """Return a note that the run has diverged; empty if it has not."""
        since = self.column("diverged_since")[-1:]
        return f"diverged since step {since[0]:.0f}" if np.isfinite(since).any() else ""

    def _log_interval(self) -> float:
        """Return the median number of steps between the newest records."""
        steps = self.column("step")[-20:]
        return float(np.median(np.diff(steps))) if len(steps) > 1 else 1.0


def _job(text: str) -> dict[str, dict[str, Any]]:
    """Return the sections of a job, without other entries."""
    tree = tomllib.loads(text)
    return {name: section for name, section in tree.items() if isinstance(section, dict)}


def _read_samples(path: Path) -> dict[str, Floats]:
    values, _ = read_values(path)
    samples = [v for v in values if isinstance(v, dict) and is_number(v.get("time"))]
    return to_columns(samples, "system.") if samples else {}


def _valid_steps(value: object) -> int:
    return value if type(value) is int and 0 < value <= MAX_STEP else 0


def _number(value: object) -> float:
    """Return a JSON value as a float; NaN if it is not a number."""
    try:
        return float(value) if isinstance(value, int | float) else math.nan
    except OverflowError:
        return math.nan


def to_columns(records: Sequence[Mapping[str, Any]], prefix: str = "") -> dict[str, Floats]:
    """Convert records to columns, named as in `RunReader.columns`."""
    columns: dict[str, Floats] = {}
    for name in dict.fromkeys(chain.from_iterable(records)):
        try:
            values = [*map(itemgetter(name), records)]
        except KeyError:  # some records lack it
            values = [record.get(name) for record in records]
        first = next((value for value in values if value is not None), None)
        if isinstance(first, dict):
            nested = [value if isinstance(value, dict) else {} for value in values]
            columns |= to_columns(nested, f"{prefix}{name}.")
        elif isinstance(first, int | float):
            try:
                column = np.array(values, np.float64)  # None becomes NaN
                if column.ndim != 1:
                    raise TypeError
            except (TypeError, ValueError, OverflowError):  # not all are numbers
                column = np.array([_number(value) for value in values], np.float64)
            with np.errstate(invalid="ignore"):
                column[np.abs(column) > MAX_NUMBER] = np.nan
            columns[prefix + name] = column
    return columns


def read_event_log(run_dir: Path) -> tuple[list[dict[str, Any]], int]:
    """Read the events of a run.

    Returns:
        The events in the order of the file, none without a file; the number of damaged lines.

    Raises:
        OSError: if the file cannot be read.
    """
    values, damaged = read_values(run_dir / "events.jsonl")
    events = [value for value in values if _is_event(value)]
    return events, damaged + len(values) - len(events)


def _is_event(value: Any) -> bool:
    if not isinstance(value, dict):
        return False
    step, when = value.get("step"), value.get("time")
    return (
        isinstance(value.get("kind"), str)
        and isinstance(value.get("text"), str)
        and type(step) is int
        and 0 <= step <= MAX_STEP
        and isinstance(when, int | float)
        and math.isfinite(when)
        and 0 <= when < MAX_TIME
    )
