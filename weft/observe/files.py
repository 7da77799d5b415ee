"""Files of a run that are read while they are written: replaced as a whole, or a line at a time."""

from __future__ import annotations

import json
import math
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from weft.job import WeftError


def replace_text(path: Path, text: str) -> None:
    """Write a file so that a reader sees the old or the new one, never a part."""
    replace_bytes(path, text.encode())


def replace_bytes(path: Path, data: bytes) -> None:
    """See `replace_text`."""
    # Other nodes may be writing the same.
    temporary = path.with_name(f".{path.name}.{socket.gethostname()}-{os.getpid()}.tmp")
    try:
        temporary.write_bytes(data)
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)  # a full disk needs its bytes
        raise


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


def read_json(path: Path) -> dict[str, Any]:
    """The object in a file; empty if there is no file.

    Raises:
        WeftError: if it cannot be read.
    """
    try:
        found = json.loads(path.read_text("utf-8")) if path.exists() else {}
    except (OSError, ValueError) as error:
        raise WeftError(f"{path}: cannot be read: {error}") from error
    return found if isinstance(found, dict) else {}


def drop_later(path: Path, step: int) -> None:
    """Drop the lines of later steps than ``step``, and one that a crash cut short."""
    if path.exists():
        kept = (line for line, record in _records(path) if int(record["step"]) <= step)
        replace_text(path, "".join(kept))


def read_records(path: Path) -> list[dict[str, Any]]:
    """The records in a ``metrics.jsonl``, an object with a step in each line; none if there is no
    file.  Other lines are left out, and one that is not whole."""
    return [record for _, record in _records(path)]


def _records(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """The lines that are records, with these."""
    text = path.read_text("utf-8", errors="replace") if path.exists() else ""
    for line in text.splitlines(keepends=True):
        try:
            record = json.loads(line)
            int(record["step"])
        except (ValueError, KeyError, TypeError):
            continue
        if line.endswith("\n"):
            yield line, record
