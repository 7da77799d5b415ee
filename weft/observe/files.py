"""Files of a run that are read while they are written: replaced as a whole, or a line at a time."""

from __future__ import annotations

import json
import math
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any


def replace_text(path: Path, text: str) -> None:
    """Write a file so that a reader sees the old or the new one, never a part."""
    replace_bytes(path, text.encode())


def replace_bytes(path: Path, data: bytes) -> None:
    """See `replace_text`."""
    # Other nodes may be writing the same.
    temporary = path.with_name(f".{path.name}.{socket.gethostname()}-{os.getpid()}.tmp")
    temporary.write_bytes(data)
    os.replace(temporary, path)


def write_json(path: Path, value: object, indent: int | None = None) -> None:
    """See `replace_text`."""
    replace_text(path, json.dumps(value, indent=indent) + "\n")


def only_finite(value: Any, instead: Callable[[float], object] = lambda number: None) -> Any:
    """A tree of dicts and lists as JSON can have it: what is infinite or not a number becomes null.

    Args:
        instead: makes something else of such a number.
    """
    if isinstance(value, dict):
        return {name: only_finite(each, instead) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [only_finite(each, instead) for each in value]
    return instead(value) if isinstance(value, float) and not math.isfinite(value) else value


def drop_later(path: Path, step: int) -> None:
    """Drop the lines of later steps than ``step``, and one that a crash cut short."""
    if path.exists():
        replace_text(path, "".join(line for line in _lines(path) if _step(line) <= step))


def read_records(path: Path) -> list[dict[str, Any]]:
    """The records in a ``metrics.jsonl``; none if there is no file."""
    return [json.loads(line) for line in _lines(path) if _step(line) != float("inf")]


def _lines(path: Path) -> list[str]:
    """Complete lines; none if there is no file."""
    if not path.exists():
        return []
    text = path.read_text("utf-8", errors="replace")
    return [line for line in text.splitlines(keepends=True) if line.endswith("\n")]


def _step(line: str) -> float:
    """The step of a record; infinite (so that it is dropped) for a line that is none."""
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return float("inf")
