"""The state of a run, and how it is restored from checkpoints."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from weft.checkpoint.best import read_evaluation
from weft.checkpoint.commit import list_quarantined, quarantine
from weft.checkpoint.load import load_checkpoint, load_frozen_params, load_local_checkpoint
from weft.checkpoint.local_save import list_local_steps, local_run_dir
from weft.checkpoint.manifest import (
    CheckpointError,
    DamagedCheckpoint,
    checkpoint_path,
    checkpoint_step,
    list_checkpoints,
    read_manifest,
    resumed_step,
    run_on_rank_0,
)
from weft.checkpoint.state_dict import frozen_parameters
from weft.config.schema import CheckpointSection
from weft.config.storage import open_directory
from weft.data.dataset import Dataset
from weft.planning.plan import Plan
from weft.version import __version__


@dataclass(frozen=True)
class TrainState:
    """State that changes with every step, except weights and optimizer state.

    Attributes:
        step: completed optimizer steps.
        samples: sequences that were consumed or skipped.  This alone decides which data is next,
            for any batch size and layout.
        anomaly_state: see `weft.monitor.anomaly.AnomalyDetector.state`.
        divergence_state: see `weft.monitor.anomaly.DivergenceDetector.state`.
        evaluation: metrics of the validation set after this step; empty: it was not evaluated.
        early_stopping: see `weft.training.early_stopping`; empty before the first evaluation.
        base: name of the checkpoint with the frozen parameters; empty if there are none, or if they
            follow from the seed.
    """

    step: int
    samples: int
    anomaly_state: Mapping[str, Any] = field(default_factory=dict)
    divergence_state: Mapping[str, Any] = field(default_factory=dict)
    evaluation: Mapping[str, float] = field(default_factory=dict)
    early_stopping: Mapping[str, Any] = field(default_factory=dict)
    base: str = ""

    def manifest(self, plan: Plan, dataset: Dataset) -> dict[str, Any]:
        """Return the manifest of a checkpoint without its table of contents: JSON values."""
        return {
            "step": self.step,
            "samples": self.samples,
            "anomaly_state": self.anomaly_state,
            "divergence_state": self.divergence_state,
            **({"evaluation": dict(self.evaluation)} if self.evaluation else {}),
            **({"early_stopping": dict(self.early_stopping)} if self.early_stopping else {}),
            **({"base": self.base} if self.base else {}),
            "data": dataset.fingerprint,
            **({"frozen": list(plan.frozen_params)} if plan.frozen_params else {}),
            "mesh": plan.axis_sizes,
            "weft": __version__,
            "torch": torch.__version__,
        }


def checkpoint_dir(section: CheckpointSection, run_dir: Path) -> Path:
    """Return the directory of a run's checkpoints."""
    return run_dir / "checkpoints" if section.is_in_run_dir else open_directory(section.dir)


def resume(
    directory: Path,
    local_dir: str,
    model_parts: list[nn.Module],
    optimizer: Optimizer,
    log: Callable[[str], None],
    load_frozen: bool = True,
) -> TrainState:
    """Load the newest intact checkpoint of a run; return its state.

    Damaged checkpoints are renamed after an intact one is loaded, never before: until then they
    are all that is left of the run.  Frozen parameters come from the checkpoint of step 0, which
    has all parameters.

    Args:
        directory: directory of the run's checkpoints.
        local_dir: ``checkpoint.local_dir``; local checkpoints are used if they are as new or newer.
        model_parts: this rank's parts of the model.
        optimizer: the optimizer.
        log: receives warnings, on every rank.
        load_frozen: also load the frozen parameters.

    Raises:
        CheckpointError: if the run has trained steps and none of its checkpoints is intact: every
            time, until a person decides to start over.
    """
    # Rank 0 decides, because ranks could see the directory at different moments.
    found, resumed, lost = run_on_rank_0(
        lambda: _survey(directory), f"{directory}: could not be read"
    )
    base = base_checkpoint(found, model_parts)
    if load_frozen and base is None and any(True for _ in frozen_parameters(model_parts)):
        log(
            "the adapters are trained on random weights, because there is no checkpoint of step 0, "
            "which weft import creates"
        )
    if base is not None and load_frozen:
        load_frozen_params(base, model_parts)
    # The base has imported adapters (`weft.conversion.peft_import`) if it is its own base.
    persistent = [path for path in found if path != base or "base" in read_manifest(path)]
    # Without a persistent checkpoint, local ones could be of another model or text.
    run_local_dir = local_run_dir(local_dir, directory) if persistent or resumed else None
    damaged: list[Path] = []
    sources = _list_sources(persistent, run_local_dir, directory)
    for source in sources:
        if source.step == 0 and (lost or resumed):
            break  # initial weights are no replacement for trained ones
        try:
            manifest = source.load(model_parts, optimizer)
        except CheckpointError as error:
            if source.path is not None and not isinstance(error, DamagedCheckpoint):
                raise  # it cannot be read, which says nothing about its content
            lost.append(f"{source.name}{error}")
            damaged += [source.path] if source.path is not None else []
            log(f"damaged: {error}; trying the checkpoint before it")
            continue
        dist.barrier()  # no rank reads the damaged ones any more
        if dist.get_rank() == 0:
            for path in damaged:
                quarantine(path, "damaged")
        if source is not sources[0]:
            log(f"resuming from step {source.step}, not {sources[0].step}")
        if source.step < resumed:
            log(
                f"warning: the run was resumed at step {resumed} before, and no later checkpoint "
                f"is left: resuming at step {source.step}"
            )
        path = source.path or checkpoint_path(directory, source.step)
        evaluation = run_on_rank_0(partial(read_evaluation, path, manifest), f"{path}")
        return replace(_state_of(manifest, base), **evaluation)
    if resumed and not lost:
        lost.append(f"the run was resumed at step {resumed}, and no checkpoint of it is left")
    if lost:
        raise CheckpointError(_no_intact_checkpoint(directory, lost))
    return TrainState(0, 0, base="" if base is None else base.name)


class _Source(NamedTuple):
    """A checkpoint from which a run can resume."""

    step: int
    name: str  # prefix of its error messages
    load: Callable[[list[nn.Module], Optimizer], Mapping[str, Any]]
    path: Path | None = None  # None: a local checkpoint


def _list_sources(
    persistent: Sequence[Path], run_local_dir: Path | None, directory: Path
) -> list[_Source]:
    """Return the checkpoints of a run, newest first; of one step, the local one first.

    Collective if ``run_local_dir`` is given.
    """
    sources = [
        _Source(checkpoint_step(path), "", partial(load_checkpoint, path), path)
        for path in persistent
    ]
    if run_local_dir is not None:
        for step, epoch in list_local_steps(run_local_dir, directory):
            load = partial(load_local_checkpoint, run_local_dir, step, epoch)
            sources.append(_Source(step, f"local checkpoint of step {step}: ", load))
    return sorted(sources, key=lambda each: (each.step, each.path is None), reverse=True)


def _survey(directory: Path) -> tuple[list[Path], int, list[str]]:
    """Survey the checkpoints of a run, and other evidence that it has trained.

    Returns:
        The checkpoints, newest first; the step of the newest lease; the damaged checkpoints that
        were renamed.
    """
    renamed = [
        f"{path}: renamed by an earlier start because it is damaged"
        for path in list_quarantined(directory)
    ]
    return list_checkpoints(directory)[::-1], resumed_step(directory), renamed


def _no_intact_checkpoint(directory: Path, lost: Sequence[str]) -> str:
    """Return the message for a run none of whose checkpoints can be loaded."""
    listed = "".join(f"\n  {each}" for each in lost)
    is_inside = directory.name == checkpoint_dir(CheckpointSection(), Path()).name
    run_dir = shlex.quote(str(directory.parent)) if is_inside else "RUN_DIR"
    return (
        f"{directory}: none of the run's checkpoints is intact; nothing was started, renamed or "
        f"deleted:{listed}\n  Restore an intact copy. Or give up this work: `weft rollback "
        f"{run_dir} 0`, and the same command starts the run from step 1. Or use another --run.dir."
    )


def base_checkpoint(found: Sequence[Path], model_parts: Sequence[nn.Module]) -> Path | None:
    """Return the checkpoint of step 0 if the model has frozen parameters, else None."""
    if not any(True for _ in frozen_parameters(model_parts)):
        return None
    return next((path for path in found if checkpoint_step(path) == 0), None)


def _state_of(manifest: Mapping[str, Any], base: Path | None) -> TrainState:
    """Return the state in a manifest.

    Raises:
        CheckpointError: if its adapters belong to other frozen parameters than ``base``.
    """
    name, found = manifest.get("base", ""), "" if base is None else base.name
    if name != found:
        rule = f"step {manifest['step']} has adapters for the weights of {name or 'the seed'}"
        state = f"{name} is missing; restore it" if name else f"{found} is there; remove it"
        raise CheckpointError(f"{rule}, but {state}")
    return TrainState(
        step=manifest["step"],
        samples=manifest["samples"],
        anomaly_state=manifest.get("anomaly_state", {}),
        divergence_state=manifest.get("divergence_state", {}),
        base=name,
    )
