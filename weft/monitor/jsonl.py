"""Files of a run with a JSON object in each line: ``metrics.jsonl``, ``statistics.jsonl``.

A run that resumes reads such a file from its end, and only as far as its checkpoint.  A damaged
line (one that is no object with a step, or longer than `MAX_LINE_BYTES`) is left out by every
reader.  Where lines of later steps are cut off, the damaged ones among them are moved into a file
beside, because nobody can tell which step they are of.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, NamedTuple

from pydantic_core import from_json

from weft.config.files import append_bytes, open_regular, reading
from weft.monitor.log_buffer import MAX_WAITING_BYTES, LogBuffer

MAX_LINE_BYTES = 1 << 20
BLOCK_BYTES = 1 << 16  # read at a time from the end
PIECE_BYTES = 1 << 22  # read at a time from the beginning
MAX_STEP = 2**53
MAX_NUMBER = 1e100  # a greater one is damage, and sums of it would overflow

Record = dict[str, Any]


class Line(NamedTuple):
    """A line of a file: where it begins and ends in bytes, and its record; None: damaged."""

    begin: int
    end: int
    record: Record | None


class Tail(NamedTuple):
    """What the end of a file says to a run that goes back to a step."""

    last: Record | None  # the newest record
    kept: Record | None  # the newest one that is not later than the step
    anomalies: list[Record]  # of later steps, in order


def parse_records(lines: Sequence[bytes]) -> list[Record]:
    """Return the records among some lines; damaged ones are left out.

    The parser's own limit on nesting makes a line that is nested deeper a damaged one.
    """
    try:
        found = from_json(b"[" + b",".join(lines) + b"]")
        if len(found) != len(lines):  # a line may have the end of one value and another one
            raise ValueError
    except ValueError:  # one of them is damaged; that is rare
        found = [one for line in lines for one in _parse_value(line)]
    return [one for one in found if _is_record(one)]


def _parse_value(line: bytes) -> list[Any]:
    try:
        return [from_json(line)]
    except ValueError:
        return []


def _is_record(value: object) -> bool:
    if not isinstance(value, dict):
        return False
    step = value.get("step")
    return type(step) is int and 0 <= step <= MAX_STEP


def read_lines(file: IO[bytes]) -> Iterator[tuple[list[bytes], int, int]]:
    """Read complete lines from where a file stands, some thousand at a time.

    Yields:
        Lines; how many others were too long; where the next one begins.
    """
    end, rest, skipping = file.tell(), b"", False
    while block := file.read(PIECE_BYTES):
        data = rest + block
        cut = data.rfind(b"\n") + 1
        lines, rest = data[: cut - 1].split(b"\n") if cut else [], data[cut:]
        long = 0
        if lines and skipping:
            del lines[0]
            long, skipping = 1, False
        short = [line for line in lines if len(line) <= MAX_LINE_BYTES]
        long += len(lines) - len(short)
        if skipping or len(rest) > MAX_LINE_BYTES:
            end += cut
            skipping = True
            yield short, long, end
            end += len(rest)
            rest = b""
        else:
            end += cut
            yield short, long, end


def read_lines_from_end(file: IO[bytes]) -> Iterator[Line]:
    """Read the lines of a file, the last one first, in bounded memory."""
    start = end = file.seek(0, os.SEEK_END)
    held, stop, long = b"", 0, False  # held: bytes from start on; up to stop they are not read yet
    while end:
        # The line's own end does not count.
        found = held.rfind(b"\n", 0, stop if long else max(0, stop - 1))
        if found >= 0 or start == 0:
            begin = start + found + 1
            text = held[found + 1 : stop]
            records = [] if long or not text.endswith(b"\n") else parse_records([text])
            too_long = long or len(text) > MAX_LINE_BYTES
            yield Line(begin, end, records[0] if records and not too_long else None)
            end, stop, long = begin, found + 1, False
            continue
        if stop > MAX_LINE_BYTES:
            stop, long = 0, True
        size = min(start, BLOCK_BYTES)
        start -= size
        file.seek(start)
        held = file.read(size) + held[:stop]
        stop += size


def read_records(path: Path) -> list[Record]:
    """Return the records in a file; none if there is no file.  Damaged lines are left out.

    Raises:
        WeftError: if the file cannot be read.
    """
    if not os.path.lexists(path):
        return []
    with reading(path), open_regular(path) as file:
        return [record for lines, _, _ in read_lines(file) for record in parse_records(lines)]


def is_number(value: object) -> bool:
    """Return True for a number as JSON has it; NaN and infinity are none."""
    return type(value) in (int, float) and -MAX_NUMBER < value < MAX_NUMBER  # type: ignore[operator]


def read_values(path: Path) -> tuple[list[Any], int]:
    """Return the JSON values in a file of lines, and how many lines are damaged.

    Raises:
        OSError: if the file cannot be read.
    """
    try:
        file = open_regular(path)
    except FileNotFoundError:
        return [], 0
    found, count, end = list[Any](), 0, 0
    with file:
        for lines, long, end in read_lines(file):  # noqa: B007
            found += [value for line in lines for value in _parse_value(line)]
            count += len(lines) + long
        file.seek(end)
        last = _parse_value(file.read(MAX_LINE_BYTES))  # it may be being written
        found += last
        count += len(last)
    return found, count - len(found)


def read_tail(path: Path, step: int = MAX_STEP) -> Tail:
    """Read the end of a file, as far as the newest record that is not later than ``step``."""
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


def _later_anomalies(record: Record, step: int) -> list[Record]:
    """Return the anomalies in a record that are of later steps than ``step``."""
    found = record.get("anomalies")
    some = [one for one in found if _is_record(one)] if isinstance(found, list) else []
    return [one for one in some if one["step"] > step]


def damaged_path(path: Path) -> Path:
    """Return where the damaged lines of a file are moved: ``metrics.damaged.jsonl``."""
    return path.with_suffix(".damaged" + path.suffix)


def drop_later(path: Path, step: int) -> int:
    """Cut off the lines of later steps than ``step``; return how many others were damaged.

    The anomalies of what is cut off go into the last record that stays.  Damaged lines go into
    `damaged_path`.

    Raises:
        OSError: if a file cannot be written; no line is lost then.
    """
    if not path.exists():
        return 0
    anomalies, damaged, kept = list[Record](), list[tuple[int, int]](), None
    with open_regular(path) as file:
        cut = end = file.seek(0, os.SEEK_END)
        for line in read_lines_from_end(file):
            if line.record is not None and line.record["step"] <= step:
                kept = line
                break
            cut = line.begin
            if line.record is None:
                if not (line.end == end and _is_cut_short(path, line)):
                    damaged.append((line.begin, line.end))
            else:
                anomalies[:0] = _later_anomalies(line.record, step)
        if damaged:
            _copy(file, damaged[::-1], damaged_path(path))
    if cut == end:
        return 0
    if not (kept and _amend(path, kept, anomalies)):
        os.truncate(path, cut)
    return len(damaged)


def add_anomalies(path: Path, anomalies: Sequence[Record]) -> None:
    """Add anomalies to the last record of a file.

    Raises:
        OSError: if the file cannot be written.
    """
    with open_regular(path) as file:
        found = (line for line in read_lines_from_end(file) if line.record is not None)
        last = next(found, None)
    if last is not None:
        _amend(path, last, anomalies)


def _amend(path: Path, line: Line, anomalies: Sequence[Record]) -> bool:
    """Add anomalies to a line, and cut off what follows; False: the line has them all."""
    assert line.record is not None
    there = line.record.get("anomalies")
    there = there if isinstance(there, list) else []
    more = [one for one in anomalies if one not in there]
    if more:
        text = json.dumps(line.record | {"anomalies": there + more}).encode() + b"\n"
        with path.open("r+b") as file:
            file.seek(line.begin)
            file.write(text)
            file.truncate()
    return bool(more)


def _is_cut_short(path: Path, line: Line) -> bool:
    """Return True if the last line is the beginning of a record: its step will be done again."""
    if line.end - line.begin > MAX_LINE_BYTES:
        return False
    with open_regular(path) as file:
        file.seek(line.begin)
        text = file.read(line.end - line.begin)
    return not text.endswith(b"\n") and text.startswith(b'{"step": '[: len(text)])


def _copy(file: IO[bytes], pieces: Sequence[tuple[int, int]], to: Path) -> None:
    """Append pieces of a file, which begin and end there, to another; all or nothing."""
    with to.open("ab") as aside:
        size = aside.tell()
        try:
            for begin, end in pieces:
                file.seek(begin)
                block = b""
                while begin < end and (block := file.read(min(PIECE_BYTES, end - begin))):
                    aside.write(block)
                    begin += len(block)
                if not block.endswith(b"\n"):
                    aside.write(b"\n")
            aside.flush()
        except OSError:
            os.truncate(to, size)
            raise


class JsonlFile:
    """A file of records that is appended to, from a step on; see `LogBuffer` for its failures.

    What an earlier start wrote of later steps is cut off, and damaged lines there are reported.
    """

    def __init__(self, path: Path, step: int, warn: Callable[[str], object]) -> None:
        self._path, self._step, self._warn = path, step, warn
        self._is_cut = False
        self._buffer = LogBuffer[bytes](
            str(path), self._write, warn, size=len, limit=MAX_WAITING_BYTES
        )
        with suppress(OSError):  # the first record tries again, and reports it
            self._cut()

    def append(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Write records, one a line, together."""
        self._buffer.write("".join(f"{json.dumps(record)}\n" for record in records).encode())

    def close(self) -> None:
        """Try to write what waits, and report what is lost."""
        self._buffer.close()

    def _write(self, lines: bytes) -> None:
        self._cut()
        append_bytes(self._path, lines)

    def _cut(self) -> None:
        if self._is_cut:
            return
        damaged = drop_later(self._path, self._step)
        self._is_cut = True
        if damaged:
            some = "1 damaged line was" if damaged == 1 else f"{damaged:,} damaged lines were"
            self._warn(f"warning: {self._path}: {some} moved to {damaged_path(self._path).name}")
