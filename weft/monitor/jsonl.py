"""JSON Lines files of a run: ``metrics.jsonl`` and ``statistics.jsonl``.

A resumed run reads such a file from its end, only as far as its checkpoint.  Every reader skips
damaged lines: those that are not an object with a step, or are longer than `MAX_LINE_BYTES`.  When
lines of later steps are removed, the damaged ones among them are moved to a separate file, because
their steps are unknown.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, NamedTuple

from pydantic_core import from_json

from weft.config.files import append_bytes, open_regular
from weft.monitor.log_buffer import LogBuffer

MAX_LINE_BYTES = 1 << 20
BLOCK_BYTES = 1 << 12  # read at a time, to find the start of a line
CHUNK_BYTES = 1 << 22  # copied at a time
MAX_STEP = 2**53
SYSTEM_FILE = "system.jsonl"  # of `weft.monitor.system_sampler`

Record = dict[str, Any]


class Line(NamedTuple):
    """A line of a file: its byte range, and its record; None: damaged."""

    begin: int
    end: int
    record: Record | None


class Tail(NamedTuple):
    """The end of a file, for a run that resumes from a step."""

    last: Record | None  # the newest record
    current: Record | None  # the newest record up to the step
    anomalies: list[Record]  # of later steps, in order


def parse_record(line: bytes) -> Record | None:
    """Return the record in a line; None: the line is damaged.

    A line that exceeds the parser's limit of nesting is damaged.
    """
    try:
        value = from_json(line)
    except ValueError:
        return None
    return value if is_record(value) else None


def is_record(value: object) -> bool:
    """Return True for an object with a step."""
    if not isinstance(value, dict):
        return False
    step = value.get("step")
    return type(step) is int and 0 <= step <= MAX_STEP


def read_lines_from_end(file: IO[bytes]) -> Iterator[Line]:
    """Read the lines of a file, the last one first, in bounded memory."""
    end = file.seek(0, os.SEEK_END)
    while end:
        begin, record = _find_line_start(file, end - 1), None  # without this line's own newline
        if end - begin <= MAX_LINE_BYTES:
            text = _read_range(file, begin, end)
            record = parse_record(text) if text.endswith(b"\n") else None
        yield Line(begin, end, record)
        end = begin


def _find_line_start(file: IO[bytes], end: int) -> int:
    """Return the position after the last newline before ``end``."""
    while end:
        start = max(0, end - BLOCK_BYTES)
        newline = _read_range(file, start, end).rfind(b"\n")
        if newline >= 0:
            return start + newline + 1
        end = start
    return 0


def _read_range(file: IO[bytes], begin: int, end: int) -> bytes:
    file.seek(begin)
    return file.read(end - begin)


def read_tail(path: Path, step: int = MAX_STEP) -> Tail:
    """Read the end of a file, as far as the newest record up to ``step``."""
    last, anomalies = None, list[Record]()
    try:
        file = open_regular(path)
    except OSError:
        return Tail(None, None, [])
    with file:
        for line in read_lines_from_end(file):
            record = line.record
            if record is None:
                continue
            last = last or record
            anomalies[:0] = _later_anomalies(record, step)
            if record["step"] <= step:
                return Tail(last, record, anomalies)
    return Tail(last, None, anomalies)


def last_logged_step(run_dir: Path) -> int:
    """Return the step of a run's last record; 0 if there is none."""
    last = read_tail(run_dir / "metrics.jsonl").last
    return 0 if last is None else int(last["step"])


def _later_anomalies(record: Record, step: int) -> list[Record]:
    """Return the anomalies in a record of later steps than ``step``."""
    value = record.get("anomalies")
    anomalies = [each for each in value if is_record(each)] if isinstance(value, list) else []
    return [each for each in anomalies if each["step"] > step]


def damaged_path(path: Path) -> Path:
    """Return the file for the damaged lines of a file: ``metrics.damaged.jsonl``."""
    return path.with_suffix(".damaged" + path.suffix)


def drop_later(path: Path, step: int) -> int:
    """Remove the lines of later steps; return the number of damaged lines.

    Anomalies of removed records move to the last record that stays, damaged lines to
    `damaged_path`.

    Raises:
        OSError: if a file cannot be written; then no line is lost.
    """
    if not path.exists():
        return 0
    anomalies, damaged, current = list[Record](), list[tuple[int, int]](), None
    with open_regular(path) as file:
        cut = end = file.seek(0, os.SEEK_END)
        for line in read_lines_from_end(file):
            if line.record is not None and line.record["step"] <= step:
                current = line
                break
            cut = line.begin
            if line.record is None:
                if not (line.end == end and _is_cut_short(file, line)):
                    damaged.append((line.begin, line.end))
            else:
                anomalies[:0] = _later_anomalies(line.record, step)
        if damaged:
            _copy(file, damaged[::-1], damaged_path(path))
    if cut == end:
        return 0
    if not (current and _amend(path, current, anomalies)):
        os.truncate(path, cut)
    return len(damaged)


def add_anomalies(path: Path, anomalies: Sequence[Record]) -> None:
    """Add anomalies to the last record of a file.

    Raises:
        OSError: if the file cannot be written.
    """
    if (last := _last_intact(path)) is not None:
        _amend(path, last, anomalies)


def replace_last(path: Path, record: Record) -> None:
    """Replace the last record of a file, if it is of the same step.

    Raises:
        OSError: if the file cannot be written.
    """
    last = _last_intact(path)
    if last is not None and last.record is not None and last.record["step"] == record["step"]:
        _rewrite(path, last, record)


def _last_intact(path: Path) -> Line | None:
    with open_regular(path) as file:
        return next((line for line in read_lines_from_end(file) if line.record is not None), None)


def _amend(path: Path, line: Line, anomalies: Sequence[Record]) -> bool:
    """Add anomalies to a line and remove all later lines, unless it has them already.

    Returns:
        True if the file was changed.
    """
    assert line.record is not None
    value = line.record.get("anomalies")
    old = value if isinstance(value, list) else []
    new = [each for each in anomalies if each not in old]
    if new:
        _rewrite(path, line, line.record | {"anomalies": old + new})
    return bool(new)


def _rewrite(path: Path, line: Line, record: Record) -> None:
    """Replace a line by a record, and remove all later lines."""
    with path.open("r+b") as file:
        file.seek(line.begin)
        file.write(json.dumps(record).encode() + b"\n")
        file.truncate()


def _is_cut_short(file: IO[bytes], line: Line) -> bool:
    """Return True if the last line is an incomplete record; its step will run again."""
    if line.end - line.begin > MAX_LINE_BYTES:
        return False
    text = _read_range(file, line.begin, line.end)
    return not text.endswith(b"\n") and text.startswith(b'{"step": '[: len(text)])


def _copy(file: IO[bytes], ranges: Sequence[tuple[int, int]], target: Path) -> None:
    """Append byte ranges of a file to another file; all or nothing."""
    with target.open("ab") as out:
        size = out.tell()
        try:
            for begin, end in ranges:
                file.seek(begin)
                block = b""
                while begin < end and (block := file.read(min(CHUNK_BYTES, end - begin))):
                    out.write(block)
                    begin += len(block)
                if not block.endswith(b"\n"):
                    out.write(b"\n")
            out.flush()
        except OSError:
            os.truncate(target, size)
            raise


class JsonlFile:
    """A file of records, open for appending; see `LogBuffer` for its failures.

    Records of steps after ``step``, from an earlier start, are removed.
    """

    def __init__(self, path: Path, step: int, warn: Callable[[str], object] = print) -> None:
        self._path, self._step, self._warn = path, step, warn
        self._has_dropped = False
        self._buffer = LogBuffer.for_file(path, warn, self._write)
        with suppress(OSError):  # the first record tries again, and reports it
            self._drop_later()

    def append(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Write records together, one per line."""
        self._buffer.write("".join(f"{json.dumps(record)}\n" for record in records).encode())

    def close(self) -> None:
        """Write waiting records, and report lost ones."""
        self._buffer.close()

    def _write(self, lines: bytes) -> None:
        self._drop_later()
        append_bytes(self._path, lines)

    def _drop_later(self) -> None:
        if self._has_dropped:
            return
        damaged = drop_later(self._path, self._step)
        self._has_dropped = True
        if damaged:
            lines = "1 damaged line was" if damaged == 1 else f"{damaged:,} damaged lines were"
            self._warn(f"warning: {self._path}: {lines} moved to {damaged_path(self._path).name}")
