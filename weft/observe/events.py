"""What happened to a run, beside its records: a journal that is only ever added to.

A run that goes back to a checkpoint takes its later records back; that it did so stays in here.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any, Literal

Kind = Literal[
    "start",
    "checkpoint",
    "evaluation",
    "anomaly",
    "slow rank",
    "restart",
    "hang",
    "failure",
    "warning",
    "stop",
    "end",
]


def note_event(folder: Path, kind: Kind, step: int, text: str) -> None:
    """Add a line to ``events.jsonl`` of the run in ``folder``; ``step``: optimizer steps done."""
    event = {"time": time.time(), "step": step, "kind": kind, "text": text}
    # One short write at the file's end is whole, whoever else writes.
    with (folder / "events.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps(event) + "\n")


def read_events(folder: Path) -> list[dict[str, Any]]:
    """All events of a run, in order; none if there is no file.  A damaged line is left out."""
    path = folder / "events.jsonl"
    found = []
    for line in path.read_text("utf-8", "replace").splitlines() if path.exists() else ():
        try:
            event = json.loads(line)
        except ValueError:
            continue
        if isinstance(event, dict) and {"time", "step", "kind", "text"} <= event.keys():
            found.append(event)
    return found
