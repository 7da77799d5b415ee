"""How far a run is, and where its checkpoints let it go on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

import weft
from weft.checkpoint.load import load_checkpoint, load_frozen_params, load_local_checkpoint
from weft.checkpoint.local_save import list_local_steps, local_run_dir
from weft.checkpoint.manager import CheckpointManager, list_quarantined, quarantine
from weft.checkpoint.manifest import (
    CheckpointError,
    DamagedCheckpoint,
    checkpoint_step,
    list_checkpoints,
    resumed_step,
    run_on_rank_0,
)
from weft.checkpoint.state_dict import frozen_parameters
from weft.checkpoint.storage import open_directory
from weft.data.dataset import Dataset
from weft.plan.resolve import Plan


@dataclass(frozen=True)
class TrainState:
    """How far a run is: optimizer steps done, and sequences consumed.

    ``samples`` alone decides which data comes next, whatever the batch and the layout become.
    ``watch`` is what the watch for anomalies knows: see `weft.monitor.anomaly`.  ``base`` is the
    name of the checkpoint beside the run's own that has the weights which are not trained; empty if
    there are none, or if they follow from the seed.
    """

    step: int
    samples: int
    watch: Mapping[str, Any] = field(default_factory=dict)
    base: str = ""

    def manifest(self, plan: Plan, text: Dataset) -> dict[str, Any]:
        """What a checkpoint says of itself, as JSON values."""
        return {
            "step": self.step,
            "samples": self.samples,
            "watch": self.watch,
            **({"base": self.base} if self.base else {}),
            "data": text.fingerprint,
            "mesh": plan.axis_sizes,
            "weft": weft.__version__,
            "torch": torch.__version__,
        }


def checkpoint_dir(value: str, run: Path) -> Path:
    """Where the checkpoints of the run in folder ``run`` lie, by the value of checkpoint.dir."""
    return run / "checkpoints" if value == "auto" else open_directory(value)


def resume(
    folder: Path,
    local: str,
    parts: list[nn.Module],
    optimizer: Optimizer,
    warn: Callable[[str], None],
    frozen: bool = True,
) -> TrainState:
    """Load the newest intact checkpoint of a run; return where the run is then.

    Damaged checkpoints are renamed once an intact one is loaded, never before: until then they are
    all that is left of the run.  Weights that are not trained come from the checkpoint of step 0,
    which has all weights.

    Args:
        folder: the run's checkpoints. local: the value of checkpoint.local_dir; the nodes' state is
        taken if it is as new or newer.
        warn: called with what is damaged, on every rank.
        frozen: load the weights that are not trained, too.

    Raises:
        CheckpointError: if the run has trained steps and none of its checkpoints is intact: every
            time, until a person decides to start over.
    """
    # One decision for all ranks, each of which might see the folder at another moment.
    found, resumed, lost = run_on_rank_0(lambda: _survey(folder), f"{folder}: could not be read")
    base = base_checkpoint(found, parts)
    if frozen and base is None and any(True for _ in frozen_parameters(parts)):
        rule = "the weights that adapters are trained to are random: there is no checkpoint"
        warn(f"{rule} of step 0, as weft import makes one")
    if base is not None and frozen:
        load_frozen_params(base, parts)
    at_home = [path for path in found if path != base]
    # Before the first one it is not known whether what lies there is of the same model and text.
    on_nodes = local_run_dir(local, folder) if at_home or resumed else None
    kept = list_local_steps(on_nodes, folder) if on_nodes else []
    sources: list[_Source] = [
        *(
            _Source(checkpoint_step(path), "", partial(load_checkpoint, path), path)
            for path in at_home
        ),
        *(
            _Source(
                step,
                f"step {step} kept by the nodes: ",
                partial(load_local_checkpoint, on_nodes, step, epoch),
            )
            for step, epoch in kept
            if on_nodes is not None
        ),
    ]
    damaged: list[Path] = []
    for source in sorted(sources, key=lambda each: (each.step, each.path is None), reverse=True):
        if source.step == 0 and (lost or resumed):
            break  # initial weights are none of the work
        try:
            manifest = source.load(parts, optimizer)
        except CheckpointError as error:
            if source.path is not None and not isinstance(error, DamagedCheckpoint):
                raise  # it cannot be read, which says nothing of what was written
            lost.append(f"{source.name}{error}")
            damaged += [source.path] if source.path is not None else []
            warn(f"damaged: {error}; taking the one before")
            continue
        dist.barrier()  # nobody reads the damaged ones any more
        if dist.get_rank() == 0:
            for path in damaged:
                quarantine(path, "damaged")
        if source.step < resumed:
            rule = f"the run was resumed at step {resumed} before, and no checkpoint of it is left"
            warn(f"warning: {rule}: resuming at step {source.step}")
        return _position(manifest, base)
    if resumed and not lost:
        lost.append(f"the run was resumed at step {resumed}, and no checkpoint of it is left")
    if lost:
        raise CheckpointError(_refusal(folder, lost))
    return TrainState(0, 0, base="" if base is None else base.name)


class _Source(NamedTuple):
    """A state that a run may be resumed from."""

    step: int
    name: str  # for people, where the error does not have it
    load: Callable[[list[nn.Module], Optimizer], Mapping[str, Any]]
    path: Path | None = None  # None: on the nodes


def _survey(folder: Path) -> tuple[list[Path], int, list[str]]:
    """Return the run's checkpoints, newest first, and what else shows that the run has trained.

    Returns:
        The checkpoints; the step of the newest lease; what was renamed as damaged.
    """
    renamed = [
        f"{path}: renamed by an earlier start because it is damaged"
        for path in list_quarantined(folder)
    ]
    return list_checkpoints(folder)[::-1], resumed_step(folder), renamed


def _refusal(folder: Path, lost: Sequence[str]) -> str:
    """Return the message for a run whose work is there and cannot be loaded."""
    listed = "".join(f"\n  {each}" for each in lost)
    return (
        f"{folder}: none of the run's checkpoints is intact; nothing was started, renamed or "
        f"deleted:{listed}\n  Put an intact copy back. Or give this work up: `weft rollback "
        "RUN_DIR 0`, and the same command starts the run from step 1. Or use another --run.dir."
    )


def base_checkpoint(found: Sequence[Path], parts: Sequence[nn.Module]) -> Path | None:
    """Of a run's checkpoints the one of step 0, if this model has weights that are not trained."""
    if not any(True for _ in frozen_parameters(parts)):
        return None
    return next((path for path in found if checkpoint_step(path) == 0), None)


def _position(manifest: Mapping[str, Any], base: Path | None) -> TrainState:
    name, there = manifest.get("base", ""), "" if base is None else base.name
    if name != there:
        rule = f"step {manifest['step']} has adapters to the weights of {name or 'the seed'}"
        remedy = "put it back" if name else "take it away"
        raise CheckpointError(
            f"{rule}, and {name or there} is {'not ' * bool(name)}there; {remedy}"
        )
    return TrainState(manifest["step"], manifest["samples"], manifest.get("watch", {}), name)


def rewind(
    folder: Path,
    local: str,
    saver: CheckpointManager,
    parts: list[nn.Module],
    optimizer: Optimizer,
    warn: Callable[[str], None],
) -> TrainState:
    """`resume` in the middle of a run, which goes on from there on a branch of its own.

    Raises:
        CheckpointError: if there is none after step 0: early trouble has a cause that samples do
            not cure.
    """
    saver.close()
    at = resume(folder, local, parts, optimizer, warn, frozen=False)
    if at.step == 0:
        rule = "there is no checkpoint after step 0 to rewind to yet"
        raise CheckpointError(
            f"{folder}: {rule}; try a lower --optim.lr, or --resilience.on_anomaly skip"
        )
    saver.acquire_lease(at.step)
    return at
