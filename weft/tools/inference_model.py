"""A trained model that is asked, not trained: found, laid out over ranks or not, and its logits.

Its layout is that of the command, not of the run: one process unless degrees are given.  Shapes in
names: B rows, T tokens of a row, N places that are asked for, D model width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from weft.checkpoint.load import load, load_frozen
from weft.checkpoint.manifest import checkpoint_step, checkpoints, read_manifest
from weft.config.errors import ConfigError, InvalidConfig
from weft.config.reader import read_job
from weft.config.schema import Job, Section, replace
from weft.models import Family, load_family, resolve_model
from weft.parallel.apply import build_model_parts
from weft.parallel.lora import apply_lora
from weft.parallel.mesh import Mesh, build_mesh
from weft.plan.resolve import Plan, resolve
from weft.train.setup import Rank, allocate, detect_machine
from weft.train.state import checkpoint_dir

DEGREES = ("dp_replicate", "dp_shard", "tp", "pp", "cp")
# Sections of the run that say how it was trained, not what came of it.
FORGOTTEN = (
    "run",
    "parallel",
    "pipeline",
    "activation_checkpoint",
    "compile",
    "resilience",
    "debug",
    "profile",
)


class CheckpointRef(NamedTuple):
    """A committed checkpoint, and the run that it belongs to."""

    path: Path
    run: Path
    job: Job
    config: Any  # of the model's family


def find_checkpoint(path: Path) -> CheckpointRef:
    """The checkpoint at ``path``: a run's folder, of which the newest is taken, or one checkpoint.

    Raises:
        InvalidConfig: if there is none.
    """
    is_run = (path / "job.toml").is_file()
    folder = path if is_run else path.parent.parent
    found = [path]
    if (folder / "job.toml").is_file():
        job, _, problems = read_job(str(folder / "job.toml"))
        if is_run:
            found = checkpoints(checkpoint_dir(job.checkpoint.dir, path))[-1:]
    if (
        not (folder / "job.toml").is_file()
        or not found
        or not (found[0] / "manifest.json").is_file()
    ):
        rule = "is neither the folder of a run with a checkpoint nor a checkpoint in one"
        raise InvalidConfig(
            [ConfigError("checkpoint", str(path), rule, "train first: weft train demo")]
        )
    config, more = resolve_model(job.model.kind, job.model.preset, job.model.overrides())
    if problems or more:
        raise InvalidConfig(problems + more)
    return CheckpointRef(found[0], folder, job, config)


def base_of(found: CheckpointRef) -> Path | None:
    """The checkpoint that has a LoRA run's frozen weights; None if its own has all.

    Raises:
        InvalidConfig: if there is none.
    """
    if not found.job.lora.rank or checkpoint_step(found.path) == 0:
        return None
    name = read_manifest(found.path).get("base", "")
    base = found.path.with_name(name or "none")
    if not name or not (base / "manifest.json").is_file():
        rule = f"has adapters to {f'{name}, which is not there' if name else 'random weights'}"
        remedy = "put it back" if name else "start from weights: weft import makes a run of them"
        raise InvalidConfig([ConfigError("checkpoint", str(found.path), rule, remedy)])
    return base


def plan_inference(
    found: CheckpointRef,
    overrides: Sequence[tuple[str, str]],
    problems: Sequence[ConfigError],
    allowed: Sequence[str],
    generating: bool,
) -> tuple[Job, Plan]:
    """The job to ask the model by, and its plan: one process, or what the overrides say.

    Args:
        problems: what was wrong with the command line already.
        allowed: prefixes of the keys that may be overridden.
        generating: rows grow token by token, which neither a pipeline nor context parallelism can.

    Raises:
        InvalidConfig: with every reason why it cannot be.
    """
    given = {name for name, _ in overrides}
    rule = "is the checkpoint's, or of no use here"
    problems = [*problems]
    problems += [
        ConfigError(name, text, rule, f"what may be given: {' '.join(allowed)}")
        for name, text in overrides
        if not name.startswith(tuple(allowed))
    ]
    job, _, wrong = read_job(str(found.run / "job.toml"), overrides)
    problems += wrong
    fresh, changes = Job(), {}
    for name in FORGOTTEN:
        section: Section = getattr(fresh, name)
        changes[name] = {
            k: v for k, v in section.model_dump().items() if f"{name}.{k}" not in given
        }
    degrees = [
        getattr(job.parallel, axis) if f"parallel.{axis}" in given else 1 for axis in DEGREES
    ]
    size = 1
    for degree in degrees:
        size *= degree if isinstance(degree, int) else 1
    changes["run"] |= {"dir": str(found.run), "nproc_per_node": size}
    if generating:
        problems += [
            ConfigError(f"parallel.{axis}", degree, rule, "use parallel.tp or parallel.dp_shard")
            for axis, degree in zip(DEGREES, degrees, strict=True)
            for rule in (f"generating has no {'pipeline' if axis == 'pp' else 'slices of a row'}",)
            if axis in ("pp", "cp") and degree != 1
        ]
        changes["parallel"]["sequence_parallel"] = False  # one token is no sequence
        rows = detect_machine(changes["run"].get("device", job.run.device)).world_size or size
        changes["train"] = {"global_batch_size": rows, "microbatch_size": 1}
    try:
        if base_of(found) is None:  # there are no adapters yet
            changes["lora"] = {"rank": 0}
    except InvalidConfig as error:
        problems += error.problems
    if problems:
        raise InvalidConfig(problems)
    job = replace(job, **changes)
    return job, resolve(job, detect_machine(job.run.device))


class LanguageModel:
    """Logits of a model that may be spread over ranks, all of which ask the same."""

    def __init__(
        self, module: nn.Module, family: Family, config: Any, tensor: dist.ProcessGroup | None
    ) -> None:
        self.module, self.family, self.config = module.eval(), family, config
        self.tensor = tensor  # ranks that share the vocabulary
        # Whole logits of a long row would be the largest thing there is.
        self._weight = None if family.without_head is None else family.without_head(module)
        self.device = next(iter(module.buffers()), next(module.parameters())).device

    @torch.no_grad()
    def logits(
        self, tokens_BT: Tensor, rows_N: Tensor, places_N: Tensor, positions_BT: Tensor | None
    ) -> Tensor:
        """Of the token after each place that is asked for: float32 ``[N, V]``."""
        out = self.module(tokens_BT, None, positions_BT)[rows_N, places_N]
        logits_NV = out if self._weight is None else F.linear(out, self._weight())
        if self.tensor is not None:
            parts = [torch.empty_like(logits_NV) for _ in range(self.tensor.size())]
            dist.all_gather(parts, logits_NV.contiguous(), self.tensor)
            logits_NV = torch.cat(parts, dim=1)
        return logits_NV.float()


def restore_parts(
    found: CheckpointRef, job: Job, plan: Plan, rank: Rank
) -> tuple[list[nn.Module], Mesh, Family]:
    """This rank's parts of the model, in any layout, with the checkpoint's weights."""
    family = load_family(job.model.kind)
    mesh = build_mesh(plan)
    parts = build_model_parts(job, plan, mesh, family)
    for part in parts:
        allocate(part, rank.device, job.parallel.cpu_offload)
    if (base := base_of(found)) is not None:
        load_frozen(base, parts)
    load(found.path, parts, optimizer=None)
    return parts, mesh, family


def restore(found: CheckpointRef, job: Job, plan: Plan, rank: Rank) -> LanguageModel:
    """The model over the ranks of a plan that `plan_inference` made for generating."""
    if plan.world_size == 1:
        return restore_alone(found, rank.device)
    (part,), mesh, family = restore_parts(found, job, plan, rank)
    return LanguageModel(part, family, found.config, mesh.group("tp") if plan.tp > 1 else None)


def restore_alone(found: CheckpointRef, device: torch.device | None = None) -> LanguageModel:
    """The model in this process, which needs no others and no process group.

    On a GPU its weights are bfloat16, unless the run says float32.
    """
    if device is None:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    module = load_whole(found, device)
    if device.type == "cuda" and found.job.precision.compute_dtype != "float32":
        module.to(torch.bfloat16)
    family = load_family(found.job.model.kind)
    return LanguageModel(module, family, found.config, None)


def load_whole(found: CheckpointRef, device: torch.device) -> nn.Module:
    """The module as its family builds it, with the checkpoint's weights and adapters."""
    family, base = load_family(found.job.model.kind), base_of(found)
    with torch.device("meta"):
        module = family.build(found.config)
        if base is not None:
            apply_lora(module, family.blocks(module), found.job.lora, torch.float32)
    module.to_empty(device=device)
    if base is not None:
        load_frozen(base, [module])
    load(found.path, [module], optimizer=None)
    return module
