"""Move a run to an earlier step: see `weft.cli.checkpoint_commands.roll_back`."""

from __future__ import annotations

from pathlib import Path

from weft.checkpoint.commit import list_quarantined, quarantine
from weft.checkpoint.manifest import (
    DamagedCheckpoint,
    acquire_lease,
    checkpoint_step,
    list_checkpoints,
    list_committed,
    read_manifest,
)
from weft.config.errors import ConfigError, InvalidConfig
from weft.config.storage import is_remote, put_if_absent


def drop_later_checkpoints(directory: Path, step: int) -> list[int]:
    """Make a run resume from ``step``; return the steps of dropped checkpoints.

    No file is deleted: the run continues on a new branch.

    Raises:
        InvalidConfig: if there is no checkpoint of that step.
    """
    steps = [checkpoint_step(path) for path in list_checkpoints(directory)]
    if step not in [0, *steps]:
        rule = "has no valid checkpoint"
        raise InvalidConfig([ConfigError("step", step, rule, f"use one of {[0, *steps]}")])
    abandon_damaged(directory, step)
    acquire_lease(directory, step)
    return [each for each in steps if each > step]


def abandon_damaged(directory: Path, step: int) -> None:
    """Rename damaged checkpoints after ``step``, so that they do not count.

    Only a user decides this.
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
