"""When a rank did what, always on, in a file that Perfetto and chrome://tracing open.

*Phases* last from one site (`weft.monitor.faults.SITES`) to the next, and are called as the
watchdog calls them (`ACTIVITIES`).  Inside of them are *spans* that the code names itself: the
forward and backward pass of each microbatch, called as in a timetable (``2F5``: stage, kind,
microbatch), loss, gradient norm, clipping, optimizer.

The times are the host's.  On a CPU that is all there is; a GPU computes what its host has asked for
later, and the host's spans say when it asked.  A profile (`weft.monitor.profiler`) has both, under
the same names: while it is taken, each phase and span is a range of torch.profiler, too.

A span costs some microseconds, most of them when it is written: at the site ``record``, where the
host would wait for the device, when many wait, and at the end.  A rank that is killed loses what it
noted since.  The file is whole JSON after every write, an event a line; at `FILE_BYTES` it is
renamed, and replaces the one renamed before.
"""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path
from typing import Any, Self

from pydantic_core import from_json
from torch.profiler import record_function

from weft.config.files import open_regular, replace_bytes
from weft.monitor import faults
from weft.monitor.log_buffer import MAX_WAITING_BYTES, LogBuffer

FILE_BYTES = 2**20
WAITING_EVENTS = 2000  # for being written, at most
MAX_MICROSECONDS = 10**17  # since the epoch; a later time is damage
END = b"\n]\n"
encode = json.JSONEncoder(separators=(",", ":")).encode


class Spans:
    """This process's spans, from now until `close`."""

    def __init__(self, path: Path | None, rank: int) -> None:
        """``path``: of the file; None: nothing is noted, but a profile has its ranges."""
        global _current
        if _current is not None:
            _current.close()  # of a run in this process that failed before it could
        self.step = 0
        self.ranges = False  # whether spans are also torch.profiler's
        self._path, self._rank = path, rank
        self._events: list[dict[str, Any]] = []
        self._buffer: LogBuffer[bytes] | None = None
        self._is_open = False
        self._end = 0  # of what is in the file, but for `END`
        # Two clocks: one that never jumps, and what it says of the epoch.
        self._epoch = time.time_ns() - time.perf_counter_ns()
        self._thread = threading.get_ident()
        self._phase: span | None = None
        if path is not None:
            self._buffer = LogBuffer(
                str(path),
                self._write,
                lambda text: print(text, flush=True),
                size=len,
                limit=MAX_WAITING_BYTES,
            )
        _current = self
        faults.listeners.append(self._pass)
        self._pass("start", None)

    def _pass(self, site: str, step: int | None) -> None:
        """One phase ends, and another one begins."""
        if threading.get_ident() != self._thread:
            return  # what is written in the background
        name = faults.activity(site)
        if step is None and self._phase is not None and name == self._phase.name:
            return
        if self._phase is not None:
            self._phase.__exit__()
        self.step = self.step if step is None else step
        self._phase = span(name).__enter__()
        if site == "record":
            self.flush()

    def note(self, name: str, began: int, args: dict[str, Any]) -> None:
        """A span ends, in Chrome's trace format; ``began``: on the clock that never jumps."""
        if self._path is not None:
            # Whole microseconds keep spans inside of others.
            start = (self._epoch + began) // 1000
            end = (self._epoch + time.perf_counter_ns()) // 1000
            event = {"name": name, "ph": "X", "ts": start, "dur": end - start}
            event |= {"pid": self._rank, "tid": 0, "args": {**args, "step": self.step}}
            self._events.append(event)
            if len(self._events) >= WAITING_EVENTS:
                self.flush()

    def flush(self) -> None:
        """Write what is noted."""
        if self._buffer is None or not self._events:
            return
        self._buffer.write("".join(f",\n{encode(event)}" for event in self._events).encode())
        self._events.clear()

    def _write(self, text: bytes) -> None:
        """Write some events over the old end of the file."""
        assert self._path is not None
        if not self._is_open:
            self._open(self._path)
            self._is_open = True
        with self._path.open("r+b", buffering=0) as file:
            file.seek(self._end)
            data, done = text + END, 0
            while done < len(data):
                done += file.write(data[done:]) or 0
        self._end += len(text)
        self._is_open = self._end <= FILE_BYTES

    def _open(self, path: Path) -> None:
        """Continue the file that is there, unless it is full, or torn where a rank was killed."""
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            text = path.read_bytes() if path.stat().st_size <= FILE_BYTES else b""
            if text.endswith(END):
                self._end = len(text) - len(END)
                return
            os.replace(path, path.with_suffix(".old.json"))
        about = {"name": f"rank {self._rank} (times of the host)"}
        head = {"name": "process_name", "ph": "M", "pid": self._rank, "tid": 0, "args": about}
        text = b"[\n" + json.dumps(head).encode()
        replace_bytes(path, text + END)
        self._end = len(text)

    def close(self) -> None:
        """End the phase that goes on, and write what is left."""
        global _current
        faults.listeners.remove(self._pass)
        if self._phase is not None:
            self._phase.__exit__()
        _current = None
        self.flush()
        if self._buffer is not None:
            self._buffer.close()


_current: Spans | None = None


class span:
    """What happens inside is a span of that name."""

    __slots__ = ("_args", "_began", "_range", "name")

    def __init__(self, name: str, **args: Any) -> None:
        self.name, self._args = name, args

    def __enter__(self) -> Self:
        on = _current is not None and _current.ranges
        self._range = record_function(self.name) if on else None
        if self._range is not None:
            self._range.__enter__()  # type: ignore[no-untyped-call]
        self._began = time.perf_counter_ns()
        return self

    def __exit__(self, *error: object) -> None:
        if _current is not None:
            _current.note(self.name, self._began, self._args)
        if self._range is not None:
            self._range.__exit__(None, None, None)


def action(stage: int, kind: str, microbatch: int) -> span:
    """The span of a forward (F) or backward (B) pass of a stage, or half of one (I, W)."""
    name = f"{stage}{kind}{microbatch}"
    return span(name, stage=stage, kind=kind, microbatch=microbatch)


def set_ranges(on: bool) -> None:
    """Whether spans that begin from now on are also ranges of torch.profiler."""
    if _current is not None:
        _current.ranges = on


def spans_path(folder: Path, rank: int) -> Path:
    """Where rank ``rank`` of the run in ``folder`` writes its spans."""
    return folder / "spans" / f"rank-{rank}.json"


def read_spans(folder: Path, rank: int) -> list[dict[str, Any]]:
    """What rank ``rank`` of the run in ``folder`` noted, the renamed file first.

    An event is a line; one that is being written, or is damaged, is left out, and so is a file that
    cannot be read.
    """
    path = spans_path(folder, rank)
    found = []
    for each in (path.with_suffix(".old.json"), path):
        try:
            with open_regular(each) as file:
                text = file.read(2 * (FILE_BYTES + MAX_WAITING_BYTES))
        except OSError:
            continue
        for line in text.splitlines():
            try:
                event = from_json(line.strip(b"[],"))
            except ValueError:
                continue
            if _is_span(event):
                found.append(event)
    return found


def _is_span(event: Any) -> bool:
    if not isinstance(event, dict) or event.get("ph") != "X":
        return False
    times, args = (event.get("ts"), event.get("dur")), event.get("args")
    return (
        isinstance(event.get("name"), str)
        and all(type(value) is int and 0 <= value < MAX_MICROSECONDS for value in times)
        and isinstance(args, dict)
        and type(args.get("step")) is int
    )
