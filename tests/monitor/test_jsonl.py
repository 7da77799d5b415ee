"""Read JSON Lines files from their end, and preserve damaged lines."""

from __future__ import annotations

import json
import random
import resource
import time
from pathlib import Path
from typing import Any

import pytest

from tests.harness import run_ranks
from weft.monitor.jsonl import (
    MAX_LINE_BYTES,
    JsonlFile,
    add_anomalies,
    damaged_path,
    drop_later,
    read_lines_from_end,
    read_tail,
)
from weft.records.jsonl_reader import read_records, read_values

Records = list[dict[str, Any]]


def make(path: Path, steps: range, **extra: Any) -> list[bytes]:
    lines = [
        json.dumps({"step": step, "loss": 1 / step} | extra).encode() + b"\n" for step in steps
    ]
    path.write_bytes(b"".join(lines))
    return lines


BAD = {
    "binary": bytes(range(128, 256)) + b"\n",
    "cut": b'{"step": 7, "lo\n',
    "list": b"[1, 2]\n",
    "two values": b'{"step": 3}, {"step": 4}\n',
    "nested": b"[" * 100_000 + b"\n",
    "nested object": b'{"a":' * 100_000 + b"1" + b"}" * 100_000 + b"\n",
    "no step": b'{"loss": 1.0}\n',
    "step of a wrong type": b'{"step": "7"}\n',
    "negative step": b'{"step": -7}\n',
    "huge step": b'{"step": 1' + b"0" * 40 + b"}\n",
    "huge number": b'{"step": ' + b"9" * 5000 + b"}\n",
    "long": b'{"step": 7, "text": "' + b"x" * 2 * MAX_LINE_BYTES + b'"}\n',
    "empty": b"\n",
}


@pytest.mark.parametrize("kind", BAD)
def test_drop_later_moves_damaged_lines_aside(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = make(path, range(1, 45))
    text = [*lines[:10], BAD[kind], *lines[10:30], BAD[kind], *lines[30:]]
    path.write_bytes(b"".join(text))
    assert drop_later(path, 20) == 1
    assert path.read_bytes() == b"".join([*lines[:10], BAD[kind], *lines[10:20]])
    assert damaged_path(path).name == "metrics.damaged.jsonl"
    assert damaged_path(path).read_bytes() == BAD[kind]
    assert [record["step"] for record in read_records(path)] == list(range(1, 21))


def test_drop_later_of_damaged_lines_only_keeps_every_byte(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = make(path, range(1, 45))
    bad = [line[:-3] + b"\n" for line in lines[:38]]
    path.write_bytes(b"".join([*bad, *lines[38:]]))
    messages: list[str] = []
    JsonlFile(path, 10, messages.append).close()
    assert path.read_bytes() == b""
    assert damaged_path(path).read_bytes() == b"".join(bad)
    assert messages == [f"warning: {path}: 38 damaged lines were moved to metrics.damaged.jsonl"]


def test_drop_later_of_random_bytes_without_a_line_keeps_them(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    noise = random.Random(0).randbytes(5000).replace(b"\n", b"")
    path.write_bytes(noise)
    assert drop_later(path, 10) == 1
    assert damaged_path(path).read_bytes() == noise + b"\n"


def test_drop_later_without_later_lines_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    make(path, range(1, 11))
    before = path.stat()
    assert drop_later(path, 10) == 0
    assert path.stat().st_mtime_ns == before.st_mtime_ns
    assert drop_later(tmp_path / "none", 10) == 0


def test_drop_later_keeps_anomalies_in_the_last_record(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = make(path, range(1, 6))
    first, second = ({"step": step, "what": "loss"} for step in (8, 9))
    text = json.dumps({"step": 6, "anomalies": [first]}).encode() + b"\n"
    path.write_bytes(b"".join([*lines, text]))
    assert read_tail(path, 5).anomalies == [first]
    drop_later(path, 5)
    records = read_records(path)
    assert [record["step"] for record in records] == [1, 2, 3, 4, 5]
    assert records[-1]["anomalies"] == [first]
    add_anomalies(path, [second, first])
    assert read_records(path)[-1]["anomalies"] == [first, second]
    assert read_tail(path, 5).anomalies == [first, second]
    drop_later(path, 5)
    assert read_records(path)[-1]["anomalies"] == [first, second]


def test_lines_from_the_end_are_those_of_the_file(tmp_path: Path) -> None:
    """Lines of random lengths around the block size, with and without a line end."""
    rng = random.Random(3)
    for case in range(30):
        sizes = [rng.choice([0, 1, 50, 65_530, 65_536, 70_000, 300_000]) for _ in range(8)]
        lines = [b"x" * size + b"\n" for size in sizes]
        if case % 2:
            lines[-1] = lines[-1][:-1]
        path = tmp_path / "file"
        path.write_bytes(b"".join(lines))
        with path.open("rb") as file:
            result = [(line.begin, line.end) for line in read_lines_from_end(file)]
        ends = [sum(map(len, lines[: n + 1])) for n in range(len(lines))]
        expected = [(end - len(line), end) for end, line in zip(ends, lines, strict=True) if line]
        assert result == expected[::-1]


def test_read_values_counts_damage(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_bytes(b'{"a": 1}\n' + BAD["nested"] + BAD["binary"] + BAD["long"] + b'{"a": 2}')
    assert read_values(path) == ([{"a": 1}, {"a": 2}], 3)
    assert read_values(tmp_path / "none") == ([], 0)


def test_drop_later_reads_the_tail_only(tmp_path: Path) -> None:
    """Reading all of a million lines would take 100 MB and seconds."""
    path = tmp_path / "metrics.jsonl"
    line = json.dumps({"step": 10_000_000, "more": "x" * 1000})
    with path.open("w") as file:
        for first in range(0, 100_000, 1000):
            file.writelines(
                line.replace("10000000", str(step)) + "\n" for step in range(first, first + 1000)
            )
    ((grown, seconds),) = run_ranks(_drop_tail, 1, str(path), 99_900)
    assert grown < 8 << 10  # KiB
    assert seconds < 0.25
    assert read_tail(path).last == {"step": 99_900, "more": "x" * 1000}


def _drop_tail(path: str, step: int) -> tuple[int, float]:
    before, start_time = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    tail = read_tail(Path(path), step)
    assert tail.last is not None
    assert tail.current is not None
    assert (tail.last["step"], tail.current["step"]) == (99_999, step)
    drop_later(Path(path), step)
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return after - before, time.process_time() - start_time
