"""How far a run is, and where its checkpoints let it go on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

import weft
from weft.checkpoint.load import load, load_frozen, load_local
from weft.checkpoint.local import kept_steps, local_folder
from weft.checkpoint.manifest import (
    CheckpointError,
    DamagedCheckpoint,
    checkpoint_step,
    checkpoints,
)
from weft.checkpoint.state import frozen_parameters
from weft.checkpoint.storage import open_folder
from weft.checkpoint.store import Saver, set_aside
from weft.data.text import Text
from weft.plan.resolve import Plan


@dataclass(frozen=True)
class Position:
    """How far a run is: optimizer steps done, and sequences consumed.

    ``samples`` alone decides which data comes next, whatever the batch and the layout become.
    ``watch`` is what the watch for anomalies knows: see `weft.resilience.anomaly`.  ``base`` is the
    name of the checkpoint beside the run's own that has the weights which are not trained; empty if
    there are none, or if they follow from the seed.
    """

    step: int
    samples: int
    watch: Mapping[str, Any] = field(default_factory=dict)
    base: str = ""

    def manifest(self, plan: Plan, text: Text) -> dict[str, Any]:
        """What a checkpoint says of itself, as JSON values."""
        return {
            "step": self.step,
            "samples": self.samples,
            "watch": self.watch,
            **({"base": self.base} if self.base else {}),
            "data": text.fingerprint,
            "mesh": plan.sizes,
            "weft": weft.__version__,
            "torch": torch.__version__,
        }


def home_of(value: str, run: Path) -> Path:
    """Where the checkpoints of the run in folder ``run`` lie, by the value of checkpoint.dir."""
    return run / "checkpoints" if value == "auto" else open_folder(value)


def resume(
    folder: Path,
    local: str,
    parts: list[nn.Module],
    optimizer: Optimizer,
    warn: Callable[[str], None],
    frozen: bool = True,
) -> Position:
    """Load the newest sound checkpoint in ``folder``; the start of the run if there is none at all.

    A damaged one is renamed, so that it is out of the way and not lost.  Weights that are not
    trained come from that of step 0, which has all.

    Args:
        frozen: whether they are to be loaded, too.
        local: the value of checkpoint.local; what lies there is taken if it is as new or newer.
        warn: told what is damaged, on every rank.

    Raises:
        CheckpointError: if all are damaged: to start from scratch is not for weft to decide.
    """
    # One decision for all ranks, each of which might see the folder at another moment.
    found = [checkpoints(folder)[::-1] if dist.get_rank() == 0 else []]
    dist.broadcast_object_list(found, src=0)
    at_home = found[0]
    base = base_of(at_home, parts)
    if frozen and base is None and any(True for _ in frozen_parameters(parts)):
        rule = "the weights that adapters are trained to are random: there is no checkpoint"
        warn(f"{rule} of step 0, as weft import makes one")
    if base is not None:
        at_home = [path for path in at_home if path != base]
        if frozen:
            load_frozen(base, parts)
    # Before the first one it is not known whether what lies there is of the same model and text.
    on_nodes = local_folder(local, folder) if at_home else None
    kept = [(on_nodes, *each) for each in kept_steps(on_nodes, folder)] if on_nodes else []
    for path in at_home:
        while kept and kept[-1][1] >= checkpoint_step(path):
            try:
                manifest = load_local(*kept.pop(), parts, optimizer)
            except CheckpointError as error:
                warn(f"{error}; taking the one before")
            else:
                return _position(manifest, base)
        try:
            manifest = load(path, parts, optimizer)
        except DamagedCheckpoint as error:
            dist.barrier()  # nobody reads it any more
            if dist.get_rank() == 0:
                set_aside(path, "damaged")
            warn(f"damaged: {error}; taking the one before")
        else:
            return _position(manifest, base)
    if at_home:
        rule = "every checkpoint is damaged; nothing was started"
        raise CheckpointError(f"{folder}: {rule}: move the folder away to start from scratch")
    return Position(0, 0, base="" if base is None else base.name)


def base_of(found: Sequence[Path], parts: Sequence[nn.Module]) -> Path | None:
    """Of a run's checkpoints the one of step 0, if this model has weights that are not trained."""
    if not any(True for _ in frozen_parameters(parts)):
        return None
    return next((path for path in found if checkpoint_step(path) == 0), None)


def _position(manifest: Mapping[str, Any], base: Path | None) -> Position:
    name, there = manifest.get("base", ""), "" if base is None else base.name
    if name != there:
        rule = f"step {manifest['step']} has adapters to the weights of {name or 'the seed'}"
        remedy = "put it back" if name else "take it away"
        raise CheckpointError(
            f"{rule}, and {name or there} is {'not ' * bool(name)}there; {remedy}"
        )
    return Position(manifest["step"], manifest["samples"], manifest.get("watch", {}), name)


def rewind(
    folder: Path,
    local: str,
    saver: Saver,
    parts: list[nn.Module],
    optimizer: Optimizer,
    warn: Callable[[str], None],
) -> Position:
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
            f"{folder}: {rule}; try a lower --optim.lr, or --resilience.anomaly skip"
        )
    saver.take(at.step)
    return at
