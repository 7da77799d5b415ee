"""Give up damaged checkpoints, before a run resumes from an earlier step."""

from __future__ import annotations

from pathlib import Path

from weft.checkpoint.commit import list_quarantined, quarantine
from weft.checkpoint.manifest import (
    DamagedCheckpoint,
    checkpoint_step,
    list_committed,
    read_manifest,
)
from weft.checkpoint.storage import is_remote, put_if_absent


def abandon_damaged(directory: Path, step: int) -> None:
    """Rename damaged checkpoints after ``step``, so that they do not count.

    Only a user decides this: see `weft.cluster.start.rollback`.
    """
    for path in list_quarantined(directory):
        if is_remote(path):
            put_if_absent(
                path.with_name(path.name.replace("damaged", "abandoned", 1)), path.read_bytes()
            )
            path.unlink()
        else:
            path.rename(path.with_name(path.name.replace("damaged", "abandoned", 1)))
    for path in list_committed(directory):
        try:
            read_manifest(path)
        except DamagedCheckpoint:
            if checkpoint_step(path) > step:
                quarantine(path, "abandoned")
