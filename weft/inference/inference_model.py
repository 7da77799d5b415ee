"""Load a trained model for inference, in one process or over ranks.

The command sets the layout, not the run: one process unless degrees are given.  Shapes in names:
B sequences, T tokens of a sequence, N positions with logits, D model width, V vocabulary.
"""

from __future__ import annotations

import fnmatch
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from weft.checkpoint.best import select_checkpoint
from weft.checkpoint.load import load_checkpoint, load_frozen_params
from weft.checkpoint.manifest import checkpoint_step, list_checkpoints, read_manifest
from weft.checkpoint.run_fingerprints import check_run_files
from weft.config.axes import AXES
from weft.config.errors import ConfigError, InvalidConfig
from weft.config.keys import Section
from weft.config.reader import read_job
from weft.config.run_paths import run_directory
from weft.config.schema import Job, LoraSection, replace
from weft.models import Family, load_family
from weft.parallel.apply import build_model_parts
from weft.parallel.initialization import allocate
from weft.parallel.lora import TokenRows, apply_lora, find_head_with_rows
from weft.parallel.mesh import Mesh, build_mesh
from weft.planning.matrices import list_matrices
from weft.planning.model_config import NO_MTP, resolve_section
from weft.planning.plan import Plan
from weft.planning.resolve import resolve
from weft.planning.shard_sizes import chunk_range
from weft.training.machine import default_device, detect_machine
from weft.training.setup import Rank
from weft.training.state import checkpoint_dir

# Sections of the run that do not affect the trained model; inference uses their defaults.
DEFAULT_SECTIONS = (
    "run",
    "parallel",
    "pipeline",
    "activation_checkpoint",
    "compile",
    "optim",
    "resilience",
    "debug",
    "profile",
)


class CheckpointRef(NamedTuple):
    """A committed checkpoint and its run."""

    path: Path
    run_dir: Path
    job: Job
    config: Any  # the model's configuration

    @property
    def family(self) -> Family:
        """The model family."""
        return load_family(self.job.model.kind).of(self.config)

    @property
    def has_score_head(self) -> bool:
        """True if the model computes scores, not logits."""
        return getattr(self.config, "score_head", False)


def find_checkpoint(path: Path, step: int | str | None = None) -> CheckpointRef:
    """Find the checkpoint at ``path``, or one of a run directory.

    Args:
        path: a checkpoint or a run directory.
        step: of a run directory: step of the checkpoint; ``best``: see ``checkpoint.best``; None:
            the newest one.

    Raises:
        InvalidConfig: if there is none, or if the run's files are not those of the checkpoint.
        CheckpointError: if its manifest cannot be read.
    """
    path = run_directory(path)
    is_run = (path / "job.toml").is_file()
    run_dir = path if is_run else path.parent.parent
    paths: list[Path] = []
    if (run_dir / "job.toml").is_file():
        job, _, errors = read_job(str(run_dir / "job.toml"))
        if errors:
            rule = f"has a damaged job.toml ({errors[0]})"
            raise InvalidConfig([ConfigError("checkpoint", str(run_dir), rule)])
        paths = list_checkpoints(checkpoint_dir(job.checkpoint, run_dir)) if is_run else [path]
    if step is not None and paths and not is_run:
        rule, remedy = "is for a run directory, not for a checkpoint", "leave it out"
        raise InvalidConfig([ConfigError("step", step, rule, remedy)])
    if step is not None and paths:
        paths = [select_checkpoint(paths, step, job.checkpoint)]
    paths = paths[-1:]
    if not paths or not (paths[0] / "manifest.json").is_file():
        rule = "is neither a run directory with a checkpoint nor a checkpoint in one"
        remedy = "train first: weft train demo"
        raise InvalidConfig([ConfigError("checkpoint", str(path), rule, remedy)])
    config, model_errors = resolve_section(job.model)
    problems = [*model_errors, *check_run_files(paths[0], run_dir, job)]
    if problems:
        raise InvalidConfig(problems)
    return CheckpointRef(paths[0], run_dir, job, config)


def find_base_checkpoint(checkpoint: CheckpointRef) -> Path | None:
    """Return the checkpoint of a LoRA run's frozen weights; None without any.

    Raises:
        InvalidConfig: if that checkpoint is missing.
    """
    if not checkpoint.job.lora.has_adapters:
        return None
    name = read_manifest(checkpoint.path).get("base", "")
    if not name and checkpoint_step(checkpoint.path) == 0:  # with adapters, its own base
        return None
    base = checkpoint.path.with_name(name or "none")
    if not name or not (base / "manifest.json").is_file():
        rule = f"has adapters to {f'{name}, which does not exist' if name else 'random weights'}"
        remedy = "restore it" if name else "train LoRA from an imported model: weft import"
        raise InvalidConfig([ConfigError("checkpoint", str(checkpoint.path), rule, remedy)])
    return base


def check_language_model(checkpoint: CheckpointRef) -> list[ConfigError]:
    """Return an error if a checkpoint's model computes scores, and no next tokens."""
    if not checkpoint.has_score_head:
        return []
    rule = "is a reward model: it computes a score of an answer, and no next tokens"
    remedy = "use weft evaluate for its accuracy on pairs, or weft export and "
    remedy += "AutoModelForSequenceClassification of transformers for scores"
    return [ConfigError("checkpoint", str(checkpoint.path), rule, remedy)]


def drop_mtp(checkpoint: CheckpointRef) -> CheckpointRef:
    """Return the checkpoint as one of a model without multi-token prediction."""
    if not getattr(checkpoint.config, "mtp_layers", 0):
        return checkpoint
    job = replace(checkpoint.job, model=NO_MTP)
    return checkpoint._replace(job=job, config=checkpoint.config.model_copy(update=NO_MTP))


def is_mtp_weight(name: str, config: Any) -> bool:
    """Return True for a weight of a layer of multi-token prediction."""
    match = re.match(r"layers\.(\d+)\.", name)
    return match is not None and int(match[1]) >= getattr(config, "num_layers", math.inf)


def format_dropped_mtp(config: Any) -> str:
    """Return the end of a message about an export without multi-token prediction."""
    layers = getattr(config, "mtp_layers", 0)
    return f", without its layers of multi-token prediction (model.mtp_layers={layers})" * (
        layers > 0
    )


def plan_inference(
    checkpoint: CheckpointRef,
    overrides: Sequence[tuple[str, str]],
    cli_errors: Sequence[ConfigError],
    allowed: Sequence[str],
    for_generation: bool,
) -> tuple[Job, Plan]:
    """Plan inference: one process, or the layout of the overrides.

    Args:
        checkpoint: weights of the model.
        overrides: keys from the command line.
        cli_errors: errors that the command line already has.
        allowed: prefixes of the keys that may be overridden.
        for_generation: plan generation, which supports neither pipeline nor context parallelism.

    Raises:
        InvalidConfig: with every error.
    """
    given = {name for name, _ in overrides}
    recipe, remedy = str(checkpoint.run_dir / "job.toml"), f"use one of {' '.join(allowed)}"
    job, _, errors = read_job(recipe, overrides, cli_errors)
    for name, text in overrides:
        if not name.startswith(tuple(allowed)):
            errors.add(name, "cannot be changed here", remedy, value=text)
    default_job, changes = Job(), {}
    for name in DEFAULT_SECTIONS:
        section: Section = getattr(default_job, name)
        changes[name] = {
            k: v for k, v in section.model_dump().items() if f"{name}.{k}" not in given
        }
    degrees = {
        axis: getattr(job.parallel, axis) if f"parallel.{axis}" in given else 1 for axis in AXES
    }
    size = math.prod(degree for degree in degrees.values() if isinstance(degree, int))
    changes["run"] |= {"dir": str(checkpoint.run_dir), "nproc_per_node": size}
    if for_generation:
        errors += check_language_model(checkpoint)
        for axis, name in (("pp", "pipeline"), ("cp", "context")):
            if degrees[axis] != 1:
                rule = f"generation does not support {name} parallelism"
                remedy = "use parallel.tp or parallel.dp_shard"
                errors.add(f"parallel.{axis}", rule, remedy, value=degrees[axis])
        if job.parallel.has_experts_without_tp and "parallel.etp" in given:
            rule = "splits sequences, but generation computes one token at a time"
            errors.add("parallel.etp", rule, "use tp")
        changes["parallel"]["sequence_parallel"] = False  # one token is no sequence
        batch_size = detect_machine(job.run.model_copy(update=changes["run"])).world_size or size
        changes["train"] = {"global_batch_size": batch_size, "microbatch_size": 1}
    elif not (job.data.compares_answers or checkpoint.has_score_head):
        changes["train"] = {"objective": "next_token"}
    with errors.collect():
        if find_base_checkpoint(checkpoint) is None:  # no adapters
            changes["lora"] = LoraSection().model_dump()
    errors.raise_any()
    if getattr(checkpoint.config, "mtp_layers", 0):
        changes["model"] = NO_MTP  # they serve training
        small = drop_mtp(checkpoint)
        names = [matrix.name for matrix in list_matrices(small.config, small.family)]
        patterns = [p for p in job.precision.float8_exclude if any(fnmatch.filter(names, p))]
        changes["precision"] = {"float8_exclude": patterns}  # of layers that remain
    job = replace(job, **changes)
    return job, resolve(job, detect_machine(job.run))


class LanguageModel:
    """A model that computes logits, in one process or over ranks with equal inputs."""

    def __init__(
        self, module: nn.Module, family: Family, config: Any, tp_group: dist.ProcessGroup | None
    ) -> None:
        self.module, self.family, self.config = module.eval(), family, config
        self.tp_group = tp_group  # ranks that share the vocabulary
        # Logits of all positions would need more memory than anything else.
        self._weight = (
            None if family.enable_fused_loss is None else family.enable_fused_loss(module)
        )
        self._rows: TokenRows | None = None
        if self._weight is not None and (head := find_head_with_rows(module)) is not None:
            self._weight, self._rows = lambda: head.weight, head.lora_rows
        self.device = next(iter(module.buffers()), next(module.parameters())).device

    @torch.no_grad()
    def logits(
        self, tokens_BT: Tensor, batch_N: Tensor, indices_N: Tensor, positions_BT: Tensor | None
    ) -> Tensor:
        """Return float32 logits [N, V] of the tokens after (batch_N, indices_N)."""
        out = self.module(tokens_BT, None, positions_BT)[batch_N, indices_N]
        logits_NV = out if self._weight is None else F.linear(out, self._weight())
        if self._rows is not None:
            logits_NV = self._rows.add_logits(logits_NV, out)
        if self.tp_group is not None:
            ranks, vocab_size = self.tp_group.size(), self.config.vocab_size
            width = len(chunk_range(vocab_size, ranks, 0))
            padded_NV = F.pad(logits_NV, (0, width - logits_NV.shape[1]))
            shards = [torch.empty_like(padded_NV) for _ in range(ranks)]
            dist.all_gather(shards, padded_NV, self.tp_group)
            logits_NV = torch.cat(shards, dim=1)[:, :vocab_size]
        return logits_NV.float()


def load_model_parts(
    checkpoint: CheckpointRef, plan: Plan, rank: Rank
) -> tuple[list[nn.Module], Mesh, Family]:
    """Load this rank's model parts from a checkpoint, in any layout."""
    family = plan.family
    mesh = build_mesh(plan)
    model_parts = build_model_parts(plan, mesh, family)
    for part in model_parts:
        allocate(part, rank.device, plan.cpu_offload)
    if (base := find_base_checkpoint(checkpoint)) is not None:
        load_frozen_params(base, model_parts)
    load_checkpoint(checkpoint.path, model_parts, optimizer=None)
    return model_parts, mesh, family


def load_model(checkpoint: CheckpointRef, plan: Plan, rank: Rank) -> LanguageModel:
    """Load the model over the ranks of a plan of `plan_inference` for generation."""
    if plan.world_size == 1:
        return load_local_model(checkpoint, rank.device)
    (part,), mesh, family = load_model_parts(checkpoint, plan, rank)
    return LanguageModel(
        part, family, checkpoint.config, mesh.get_group("tp") if plan.tp > 1 else None
    )


def load_local_model(
    checkpoint: CheckpointRef, device: torch.device | None = None
) -> LanguageModel:
    """Load the model in this process, without a process group.

    On an accelerator the weights are bfloat16, unless the run computes in float32.

    Raises:
        InvalidConfig: it is a reward model.
    """
    if errors := check_language_model(checkpoint):
        raise InvalidConfig(errors)
    if device is None:
        device = default_device()
    module = load_unsharded(checkpoint, device)
    if device.type != "cpu" and checkpoint.job.precision.compute_dtype != "float32":
        module.to(torch.bfloat16)
    return LanguageModel(module, checkpoint.family, checkpoint.config, None)


def load_unsharded(checkpoint: CheckpointRef, device: torch.device) -> nn.Module:
    """Load the unsharded module, with its adapters, in float32.

    It has no layers of multi-token prediction.
    """
    checkpoint = drop_mtp(checkpoint)
    family, base = checkpoint.family, find_base_checkpoint(checkpoint)
    with torch.device("meta"):
        module = family.build(checkpoint.config)
        if base is not None:
            apply_lora(module, family.blocks(module), checkpoint.job.lora, torch.float32)
    module.to_empty(device=device)
    if base is not None:
        load_frozen_params(base, [module])
    load_checkpoint(checkpoint.path, [module], optimizer=None)
    return module
