"""What happened to a run, beside its records: a log that is only ever added to.

A run that goes back to a checkpoint takes its later records back; that it did so stays in here.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, Literal

from weft.monitor.jsonl import MAX_STEP, read_values
from weft.monitor.log_buffer import LogBuffer

Kind = Literal[
    "start",
    "checkpoint",
    "evaluation",
    "anomaly",
    "divergence",
    "slow rank",
    "restart",
    "hang",
    "failure",
    "warning",
    "stop",
    "end",
]

MAX_TIME = 1e11  # seconds since the epoch; a later one is damage


class EventLog:
    """``events.jsonl`` of the run in ``folder``, as one process writes it."""

    def __init__(self, folder: Path, warn: Callable[[str], object]) -> None:
        self._buffer = LogBuffer.of_file(folder / "events.jsonl", warn)

    def note(self, kind: Kind, step: int, text: str) -> None:
        """Add an event; ``step``: optimizer steps done."""
        event = {"time": time.time(), "step": step, "kind": kind, "text": text}
        self._buffer.write(f"{json.dumps(event)}\n".encode())

    def flush(self) -> None:
        """Write events that could not be written before."""
        self._buffer.flush()

    def close(self) -> None:
        """Try to write what waits, and report what is lost; later events still can be noted."""
        self._buffer.close()


@cache
def _log_of(folder: Path) -> EventLog:
    return EventLog(folder, lambda text: print(f"weft: {text}", file=sys.stderr))


def note_event(folder: Path, kind: Kind, step: int, text: str) -> None:
    """Add an event of the run in ``folder`` from outside its ranks; failures go to stderr."""
    _log_of(folder).note(kind, step, text)


def read_events(folder: Path) -> tuple[list[dict[str, Any]], int]:
    """Return all events of a run in order, and how many lines are damaged; none without a file.

    Raises:
        OSError: if the file cannot be read.
    """
    values, damaged = read_values(folder / "events.jsonl")
    found = [value for value in values if _is_event(value)]
    return found, damaged + len(values) - len(found)


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
