"""Read the JSON Lines files of a run, for reports and comparisons.

The run itself reads and writes them with `weft.monitor.jsonl`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from pydantic_core import from_json

from weft.config.files import open_regular, reading
from weft.monitor.jsonl import MAX_LINE_BYTES, Record, is_record

CHUNK_BYTES = 1 << 22  # read at a time
MAX_NUMBER = 1e100  # a larger number is damage, and sums of it would overflow


def parse_records(lines: Sequence[bytes]) -> list[Record]:
    """Return the records in lines, without damaged ones.

    A line that exceeds the parser's limit of nesting is damaged.
    """
    try:
        values = from_json(b"[" + b",".join(lines) + b"]")
        if len(values) != len(lines):  # a line may have the end of one value and another one
            raise ValueError
    except ValueError:  # a line is damaged; that is rare
        values = [value for line in lines for value in _parse_value(line)]
    return [value for value in values if is_record(value)]


def _parse_value(line: bytes) -> list[Any]:
    try:
        return [from_json(line)]
    except ValueError:
        return []


def read_lines(file: IO[bytes]) -> Iterator[tuple[list[bytes], int, int]]:
    """Read complete lines from the position of a file, some thousand at a time.

    Yields:
        Lines; the number of others, which are too long; the position of the next line.
    """
    end, rest, skipping = file.tell(), b"", False
    while block := file.read(CHUNK_BYTES):
        data = rest + block
        cut = data.rfind(b"\n") + 1
        lines, rest = data[: cut - 1].split(b"\n") if cut else [], data[cut:]
        num_long = 0
        if lines and skipping:
            del lines[0]
            num_long, skipping = 1, False
        short = [line for line in lines if len(line) <= MAX_LINE_BYTES]
        num_long += len(lines) - len(short)
        if skipping or len(rest) > MAX_LINE_BYTES:
            end += cut
            skipping = True
            yield short, num_long, end
            end += len(rest)
            rest = b""
        else:
            end += cut
            yield short, num_long, end


def read_records(path: Path) -> list[Record]:
    """Return the records in a file, without damaged lines; none if there is no file.

    Raises:
        WeftError: if the file cannot be read.
    """
    if not os.path.lexists(path):
        return []
    with reading(path), open_regular(path) as file:
        return [record for lines, _, _ in read_lines(file) for record in parse_records(lines)]


def is_number(value: object) -> bool:
    """Return True for a number in JSON, which excludes NaN and infinity."""
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
    values, count, end = list[Any](), 0, 0
    with file:
        for lines, num_long, end in read_lines(file):  # noqa: B007
            values += [value for line in lines for value in _parse_value(line)]
            count += len(lines) + num_long
        file.seek(end)
        last = _parse_value(file.read(MAX_LINE_BYTES))  # it may be incomplete
        values += last
        count += len(last)
    return values, count - len(values)
