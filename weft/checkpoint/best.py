"""Find the checkpoint with the best value of a metric.

The manifest of a checkpoint has the metrics of the validation set if the run evaluated after that
step.  So the best checkpoint follows from the checkpoints that exist: nothing points to it, and
after a rollback, or in a copy of the run, it is the best of those that count there.

A stop may skip the evaluation of a step that it saves.  The next start makes up for it, when the
checkpoint exists.  It then adds `EVALUATION_FILE` to the checkpoint.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from weft.checkpoint.manifest import (
    DamagedCheckpoint,
    checkpoint_path,
    checkpoint_step,
    list_checkpoints,
    read_manifest,
)
from weft.config.errors import ConfigError, InvalidConfig
from weft.config.files import replace_bytes
from weft.config.schema import CheckpointSection
from weft.config.storage import is_remote

EVALUATION_FILE = "evaluation.json"  # {"manifest": its hash, and fields of the manifest}
FIELDS = ("evaluation", "early_stopping")
# Endings of the names of metrics whose lower values are better, without the number of mtp_loss/1.
LOWER_IS_BETTER = ("loss", "nll", "kl", "reward_rejected")


class BestMetric(NamedTuple):
    """A metric of the validation set, and its direction."""

    name: str
    is_higher_better: bool

    def is_better(self, value: float, other: float) -> bool:
        """Return True if ``value`` is better than ``other``."""
        return value > other if self.is_higher_better else value < other


def get_best_metric(section: CheckpointSection) -> BestMetric:
    """Return the metric of ``checkpoint.best``; without one, the validation loss."""
    if section.best == "off":
        return BestMetric("eval_loss", is_higher_better=False)
    if section.best_mode != "auto":
        return BestMetric(section.best, section.best_mode == "max")
    name = re.sub(r"/\d+$", "", section.best)
    return BestMetric(section.best, not name.endswith(LOWER_IS_BETTER))


def read_evaluation(path: Path, manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Return `FIELDS` of a checkpoint: of its manifest, or added to it later."""
    if not manifest.get("evaluation"):
        with suppress(OSError, ValueError, AttributeError):
            added = json.loads((path / EVALUATION_FILE).read_bytes())
            if added.get("manifest") == manifest["hash"]:
                return {name: added.get(name) or {} for name in FIELDS}
    return {name: manifest.get(name) or {} for name in FIELDS}


def add_evaluation(directory: Path, step: int, fields: Mapping[str, Any]) -> None:
    """Add an evaluation to the checkpoint of its step, if there is one.

    Args:
        directory: directory of the run's checkpoints.
        step: step of the checkpoint.
        fields: values of `FIELDS`.

    Raises:
        OSError: if the file cannot be written.
    """
    path = checkpoint_path(directory, step)
    if path not in list_checkpoints(directory):
        return
    content = json.dumps({"manifest": read_manifest(path)["hash"], **fields}).encode()
    if is_remote(path):
        (path / EVALUATION_FILE).write_bytes(content)
    else:
        replace_bytes(path / EVALUATION_FILE, content)


def select_checkpoint(paths: Sequence[Path], step: int | str, section: CheckpointSection) -> Path:
    """Return the checkpoint of a step, or the best one.

    Args:
        paths: the checkpoints of the run.
        step: the step; ``best``: the checkpoint with the best value of ``checkpoint.best``.
        section: the section ``[checkpoint]`` of the run.

    Raises:
        InvalidConfig: if there is no such checkpoint.
    """
    steps = [checkpoint_step(path) for path in paths]
    remedy = f"use one of {steps}" if steps else "train first"
    if step == "best":
        rule = "is not known: checkpoint.best=off, so the run kept only its newest checkpoints"
        if section.best != "off":
            if (found := find_best(paths, get_best_metric(section))) is not None:
                return found[0]
            rule = f"is not known: no checkpoint of the run has an evaluation of {section.best}"
        raise InvalidConfig([ConfigError("step", step, rule, remedy)])
    if step not in steps:
        raise InvalidConfig([ConfigError("step", step, "has no checkpoint", remedy)])
    return paths[steps.index(step)]


def find_best(paths: Sequence[Path], metric: BestMetric) -> tuple[Path, float] | None:
    """Return the best of some checkpoints, the earliest of equal ones, and its value.

    Returns:
        None if none of them has the metric.

    Raises:
        CheckpointError: if a manifest cannot be read, so its value is unknown.
    """
    best: tuple[Path, float] | None = None
    for path in paths:
        try:
            values = read_evaluation(path, read_manifest(path))["evaluation"]
        except DamagedCheckpoint:
            continue
        value = values.get(metric.name)
        if value is not None and (best is None or metric.is_better(value, best[1])):
            best = path, value
    return best
