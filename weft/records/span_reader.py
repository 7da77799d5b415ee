"""Reader of the spans that `weft.monitor.spans` writes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic_core import from_json

from weft.config.files import open_regular
from weft.monitor.log_buffer import MAX_WAITING_BYTES
from weft.monitor.spans import FILE_BYTES, spans_path

MAX_MICROSECONDS = 10**17  # since the epoch; a later time is damage


def read_spans(run_dir: Path, rank: int) -> list[dict[str, Any]]:
    """Return a rank's spans, those of the renamed file first.

    Damaged events, events that are being written and unreadable files are left out.
    """
    path = spans_path(run_dir, rank)
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
