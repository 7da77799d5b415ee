"""Timeline of a rank, always on, in a file for Perfetto or chrome://tracing.

*Phases* (`weft.monitor.step_timer.PHASES`) follow one another.  Inside them are *spans* that the
code names: the forward and backward pass of each microbatch, named as in a pipeline schedule
(``2F5``: stage, kind, microbatch), loss, gradient norm, clipping, optimizer.

Times are those of the host.  A GPU runs its work later, so its spans show when the host queued it.
A profile (`weft.monitor.profiler`) has both under the same names: while it runs, each phase and
span is also a range of torch.profiler.

A span costs a few microseconds, most of them for writing: before the host waits for the device,
when many events wait, and at the end.  A killed rank loses the events since the last write.  The
file is valid JSON after every write, one event per line; at `FILE_BYTES` it is renamed, and
replaces the file that was renamed before.
"""

from __future__ import annotations

import json
import os
import threading
import time
from functools import partial
from pathlib import Path
from typing import IO, Any, Self

from weft.monitor.log_buffer import LogBuffer

FILE_BYTES = 2**20
WAITING_EVENTS = 2000  # for being written, at most
END = b"\n]\n"
encode = json.JSONEncoder(separators=(",", ":")).encode


class SpanWriter:
    """Writer of this process's spans.

    Args:
        path: of the file; None: nothing is written, but a profile has its ranges.
        rank: number of this rank.
    """

    def __init__(self, path: Path | None, rank: int) -> None:
        global _current
        if _current is not None:
            _current.close()  # left by a failed run in this process
        self.step = 0
        self.ranges = False  # spans are also ranges of torch.profiler
        self._path, self._rank = path, rank
        # Name, start and end in monotonic nanoseconds, thread, arguments.
        self._events: list[tuple[str, int, int, int, dict[str, Any]]] = []
        self._buffer: LogBuffer[bytes] | None = None
        self._file: IO[bytes] | None = None  # stays open: each rank writes at every record
        self._end = 0  # bytes of the file before `END`
        # A monotonic clock, and its offset from the epoch.
        self._epoch = time.time_ns() - time.perf_counter_ns()
        self._phase: span | None = None
        if path is not None:
            warn = partial(print, flush=True)
            self._buffer = LogBuffer.for_file(path, warn, self._write)
        _current = self

    def begin_phase(self, name: str, step: int | None) -> None:
        """End the current phase and begin another; ``step``: the new step, else None."""
        if self._phase is not None:
            self._phase.__exit__()
        self.step = self.step if step is None else step
        self._phase = span(name).__enter__()

    def add(self, name: str, began: int, args: dict[str, Any]) -> None:
        """Add a span from ``began``, in monotonic nanoseconds, until now."""
        if self._path is not None:
            end, thread = time.perf_counter_ns(), threading.get_ident()
            self._events.append((name, began, end, thread, {**args, "step": self.step}))
            if len(self._events) >= WAITING_EVENTS:
                self.flush()

    def flush(self) -> None:
        """Write all waiting events."""
        if self._buffer is None or not self._events:
            return
        main_thread = threading.main_thread().ident
        events = []
        for name, began, end, thread, args in self._events:
            # Rounding to microseconds keeps nested spans nested.
            start = (self._epoch + began) // 1000
            event = {"name": name, "ph": "X", "ts": start}
            event["dur"] = (self._epoch + end) // 1000 - start
            # Two passes of a pipeline may overlap: see `weft.parallel.pass_overlap`.
            event |= {"pid": self._rank, "tid": int(thread != main_thread), "args": args}
            events.append(event)
        self._buffer.write("".join(f",\n{encode(event)}" for event in events).encode())
        self._events.clear()

    def _write(self, text: bytes) -> None:
        """Write events over the old end of the file."""
        assert self._path is not None
        if self._file is None:
            self._file = self._open(self._path)
        self._file.seek(self._end)
        data, done = text + END, 0
        while done < len(data):
            done += self._file.write(data[done:]) or 0
        self._end += len(text)
        if self._end > FILE_BYTES:
            self._file.close()
            self._file = None

    def _open(self, path: Path) -> IO[bytes]:
        """Open the file for appending; rename one that is full, or torn by a kill."""
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            text = path.read_bytes() if path.stat().st_size <= FILE_BYTES else b""
            if text.endswith(END):
                self._end = len(text) - len(END)
                return path.open("r+b", buffering=0)
            os.replace(path, path.with_suffix(".old.json"))
        about = {"name": f"rank {self._rank} (host times)"}
        head = {"name": "process_name", "ph": "M", "pid": self._rank, "tid": 0, "args": about}
        text = b"[\n" + json.dumps(head).encode()
        # No rename: a start would have as many as ranks.
        self._end = path.write_bytes(text + END) - len(END)
        return path.open("r+b", buffering=0)

    def close(self) -> None:
        """End the current phase and write the remaining events."""
        global _current
        if self._phase is not None:
            self._phase.__exit__()
            self._phase = None
        if _current is self:
            _current = None
        self.flush()
        if self._buffer is not None:
            self._buffer.close()
        if self._file is not None:
            self._file.close()


_current: SpanWriter | None = None


class span:
    """Context manager: record its body as a span."""

    __slots__ = ("_args", "_began", "_range", "name")

    def __init__(self, name: str, **args: Any) -> None:
        self.name, self._args = name, args

    def __enter__(self) -> Self:
        self._range: Any = None
        if _current is not None and _current.ranges:
            from torch.profiler import record_function  # readers of spans need no torch

            self._range = record_function(self.name)
            self._range.__enter__()
        self._began = time.perf_counter_ns()
        return self

    def __exit__(self, *error: object) -> None:
        if _current is not None:
            _current.add(self.name, self._began, self._args)
        if self._range is not None:
            self._range.__exit__(None, None, None)


def action(stage: int, kind: str, microbatch: int) -> span:
    """Return the span of a stage's action.

    Kinds are forward (F), backward (B), and backward of inputs (I) or weights (W).
    """
    name = f"{stage}{kind}{microbatch}"
    return span(name, stage=stage, kind=kind, microbatch=microbatch)


def set_ranges(enabled: bool) -> None:
    """Set whether later spans are also ranges of torch.profiler."""
    if _current is not None:
        _current.ranges = enabled


def flush_spans() -> None:
    """Write all waiting events."""
    if _current is not None:
        _current.flush()


def spans_path(run_dir: Path, rank: int) -> Path:
    """Return the file of a rank's spans."""
    return run_dir / "spans" / f"rank-{rank}.json"
