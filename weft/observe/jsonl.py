"""Files of a run with a JSON object in each line: ``metrics.jsonl``, ``statistics.jsonl``."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from weft.files import replace_text


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
