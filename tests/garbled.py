"""Garbled run directories made from an intact one, as after crashes or bad disks."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

# Files of a run that weft reads back, except checkpoints.
FILES = (
    "job.toml",
    "plan.json",
    "environment.json",
    "metrics.jsonl",
    "events.jsonl",
    "statistics.jsonl",
    "expected.json",
    "tokenizer.json",
    "spans/rank-0.json",
    "logs/rank-0.error.json",
)
WRONG: list[Any] = [
    None,
    True,
    -1,
    0.5,
    2**70,
    10**400,
    1e308,
    float("nan"),
    float("inf"),
    "text",
    "\ud800",
    "x" * 100_000,
    [],
    {},
    [[1]],
    {"a": {"b": None}},
]


class Case(NamedTuple):
    """One way to garble one file of a run."""

    name: str
    file: str
    garble: Callable[[Path, random.Random], None]


def truncate(path: Path, rng: random.Random) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: rng.randrange(len(data))])


def flip(path: Path, rng: random.Random) -> None:
    data = bytearray(path.read_bytes())
    for _ in range(20):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    path.write_bytes(data)


def drop_lines(path: Path, rng: random.Random) -> None:
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(line for line in lines if rng.random() < 0.6))


def binary(path: Path, rng: random.Random) -> None:
    path.write_bytes(rng.randbytes(3000))


def not_utf8(path: Path, rng: random.Random) -> None:
    path.write_bytes(path.read_text("utf-8").replace("e", "\xe9").encode("latin-1", "replace"))


def empty(path: Path, rng: random.Random) -> None:
    path.write_bytes(b"")


def missing(path: Path, rng: random.Random) -> None:
    path.unlink()


def directory(path: Path, rng: random.Random) -> None:
    path.unlink()
    path.mkdir()


def fifo(path: Path, rng: random.Random) -> None:
    path.unlink()
    os.mkfifo(path)


def endless(path: Path, rng: random.Random) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


def dangling(path: Path, rng: random.Random) -> None:
    path.unlink()
    path.symlink_to("nowhere")


def loop(path: Path, rng: random.Random) -> None:
    path.unlink()
    path.symlink_to(path.name)


def nested(path: Path, rng: random.Random) -> None:
    path.write_bytes(b"[" * 100_000 + b"]" * 100_000 + b"\n")


def nested_objects(path: Path, rng: random.Random) -> None:
    path.write_bytes(b'{"a":' * 100_000 + b"1" + b"}" * 100_000 + b"\n")


def huge(path: Path, rng: random.Random) -> None:
    """Extend the file to 128 MiB; the file is sparse and takes no space."""
    with path.open("ab") as file:
        file.truncate(1 << 27)


def another_json(path: Path, rng: random.Random) -> None:
    path.write_text(rng.choice(["[]", "null", "7", '"text"', "NaN", "{}", "[1, {}]"]) + "\n")


def wrong_types(path: Path, rng: random.Random) -> None:
    """Remove some values at any depth, or replace them by a wrong type or range."""
    if path.suffix == ".toml":
        lines = path.read_text().splitlines()
        for position, line in enumerate(lines):
            if " = " in line and rng.random() < 0.1:
                values = ['"x"', "-1", "nan", "inf", "[]", "1979-05-27", "9" * 30, "{a = 1}"]
                lines[position] = f"{line.partition(' = ')[0]} = {rng.choice(values)}"
        path.write_text("\n".join(lines))
    elif path.suffix == ".jsonl":
        lines = path.read_text().splitlines()
        changed = [json.dumps(change(json.loads(line), rng)) for line in lines]
        path.write_text("\n".join(changed) + "\n")
    else:
        path.write_text(json.dumps(change(json.loads(path.read_text()), rng)))


def change(value: Any, rng: random.Random) -> Any:
    if isinstance(value, dict):
        remaining = {name: item for name, item in value.items() if rng.random() > 0.03}
        return {name: change(item, rng) for name, item in remaining.items()}
    if isinstance(value, list):
        return [change(item, rng) for item in value[:200]]
    return rng.choice(WRONG) if rng.random() < 0.15 else value


ALL = (
    empty,
    missing,
    binary,
    directory,
    fifo,
    endless,
    dangling,
    loop,
    nested,
    nested_objects,
    huge,
    not_utf8,
    another_json,
    drop_lines,
)
SEEDED = (truncate, flip, wrong_types)  # differ from seed to seed


def cases(seeds: int = 4) -> list[Case]:
    """Return all cases, shuffled so that files and kinds of damage alternate."""
    result = [
        Case(f"{file}-{variant.__name__}", file, variant) for variant in ALL for file in FILES
    ]
    result += [
        Case(f"{file}-{way.__name__}-{seed}", file, way)
        for way in SEEDED
        for file in FILES
        for seed in range(seeds)
    ]
    random.Random(0).shuffle(result)
    return result


def garbled(valid: Path, case: Case, to: Path) -> Path:
    """Copy a run directory and garble one file; checkpoints are shared by a link."""
    to.mkdir()
    for path in valid.iterdir():
        if path.name == "checkpoints":
            (to / path.name).symlink_to(path)
        elif path.is_dir():
            shutil.copytree(path, to / path.name)
        else:
            shutil.copy(path, to)
    case.garble(to / case.file, random.Random(case.name))
    return to
