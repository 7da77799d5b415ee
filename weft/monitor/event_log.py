"""Events of a run: a log beside the records that is only appended to.

A run that rewinds to a checkpoint drops its later records; the event of the rewind stays here.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, Literal

from weft.monitor.log_buffer import LogBuffer

Kind = Literal[
    "start",
    "change",
    "checkpoint",
    "evaluation",
    "best",
    "generation",
    "anomaly",
    "divergence",
    "slow rank",
    "notice",
    "unhealthy node",
    "restart",
    "hang",
    "failure",
    "warning",
    "stop",
    "end",
]


class EventLog:
    """Writer of ``events.jsonl`` in a run directory, for one process.

    Args:
        run_dir: the run directory.
        log: receives warnings, and messages for the terminal.
        enabled: False on all ranks but 0, which write nothing.
    """

    def __init__(self, run_dir: Path, log: Callable[[str], object], enabled: bool = True) -> None:
        self.log = log
        self._enabled = enabled
        self._buffer = LogBuffer.for_file(run_dir / "events.jsonl", log)

    def add(self, kind: Kind, step: int, text: str, warning: bool = False) -> None:
        """Add an event.

        Args:
            kind: kind of the event.
            step: completed optimizer steps.
            text: the event in words.
            warning: True: also print the text as a warning.
        """
        if self._enabled:
            event = {"time": time.time(), "step": step, "kind": kind, "text": text}
            self._buffer.write(f"{json.dumps(event)}\n".encode())
        if warning:
            self.log(f"warning: {text}")

    def flush(self) -> None:
        """Write events that could not be written before."""
        self._buffer.flush()

    def close(self) -> None:
        """Write waiting events, or report that they are lost.

        Later events can still be added.
        """
        self._buffer.close()


class EventFollower:
    """Reader of the events that are added to a run.

    Args:
        run_dir: the run directory.
        from_start: also read the events that are already there.
    """

    def __init__(self, run_dir: Path, from_start: bool) -> None:
        self._path = run_dir / "events.jsonl"
        has_old = self._path.exists() and not from_start
        self._offset = self._path.stat().st_size if has_old else 0

    def read_new(self) -> Iterator[dict[str, Any]]:
        """Yield the new events, without damaged and incomplete lines."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                lines = file.read()
        except OSError:  # none yet, or not readable for a while
            return
        complete = lines[: lines.rfind(b"\n") + 1]
        self._offset += len(complete)
        for line in complete.splitlines():
            try:
                event = json.loads(line)
            except ValueError:
                continue
            if isinstance(event, dict) and isinstance(event.get("kind"), str):
                yield event


@cache
def _log_of(run_dir: Path) -> EventLog:
    return EventLog(run_dir, lambda text: print(f"weft: {text}", file=sys.stderr))


def note_event(run_dir: Path, kind: Kind, step: int, text: str) -> None:
    """Add an event of a run from outside its ranks; failures go to stderr."""
    _log_of(run_dir).add(kind, step, text)
