"""Build a Plan on this rank: process group, device, model and optimizer.

Environment variables of a launcher are read here, in `weft.preparation.environment`, in
`weft.training.machine`, in `weft.preparation.job_checks` and in `weft.supervision` only.
"""

from __future__ import annotations

import ctypes
import os
import random
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.optim import Optimizer

from weft.checkpoint.state_dict import (
    frozen_parameters,
    persistent_buffers,
    saved_parameters,
    trainable_parameters,
)
from weft.config.accelerators import supports
from weft.config.errors import lookup
from weft.models.family import Init
from weft.monitor.heartbeat import name_groups
from weft.monitor.layer_stats import LayerStats, name_layers
from weft.optim.optimizer import OPTIMIZERS, SCHEDULES, Decay, build_optimizer
from weft.parallel.apply import build_model_parts
from weft.parallel.backend import DEVICE_BACKEND, Backend
from weft.parallel.lora import adapter_init
from weft.parallel.mesh import Mesh, axis_by_group_name, build_mesh
from weft.parallel.private import (
    configure_flight_recorder,
    create_tcp_store,
    enable_expandable_segments,
)
from weft.planning.lora_plan import is_change, lora_lr_factor
from weft.planning.plan import Plan
from weft.training.machine import is_launched_rank
from weft.training.step import TrainStep
from weft.training.step_hooks import build_hooks

# --------------------------------------------------------------------------- the ranks


@dataclass(frozen=True)
class Rank:
    """Rank and device of this process."""

    rank: int
    local_rank: int
    world_size: int
    device: torch.device


def _rendezvous() -> dict[str, Any]:
    """Return arguments of init_process_group; none if torch's own rendezvous suffices."""
    if not is_launched_rank():
        return {"store": dist.HashStore(), "rank": 0, "world_size": 1}  # type: ignore[attr-defined]
    host, port = os.environ.get("MASTER_ADDR", ""), int(os.environ.get("MASTER_PORT", "0"))
    if not port or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return {}  # the launcher serves the store
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = create_tcp_store(host, port, rank == 0, size)
    return {"store": store, "rank": rank, "world_size": size}


@contextmanager
def connect(plan: Plan, deterministic: bool = False) -> Iterator[Rank]:
    """Initialize the process group, also of one process; destroy it at the end.

    Args:
        plan: decides the device and the number of threads.
        deterministic: give the same bits every time, or raise an error.
    """
    if deterministic:
        enable_determinism()
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    rendezvous = _rendezvous() | {"timeout": collective_timeout(plan.job.resilience.step_timeout)}
    configure_flight_recorder(str(Path(plan.run_dir).absolute() / "logs" / "flight-rank-"))
    if plan.device != "cpu":
        # A scheduler may make only its own device visible to each rank.
        index = local_rank if torch.accelerator.device_count() > 1 else 0
        device = torch.device(plan.device, index)
        torch.accelerator.set_device_index(device)
        # Pools of symmetric memory are incompatible with growing segments (pytorch#187465), and so
        # are NCCL's buffers in CUDA graphs (pytorch#158029, torchtitan#3306).
        uses_pools = plan.async_tp or plan.parallel.symmetric_memory or plan.cuda_graphs
        if supports(plan.device, "expandable segments") and not uses_pools:
            enable_expandable_segments()
        backend = dist.get_default_backend_for_device(device)
        # gloo in addition, for collectives of checkpoints on the CPU.
        backends = f"cpu:gloo,{plan.device}:{backend}"
        # NCCL then splits groups.  With other devices torch could not create groups of gloo alone.
        bound = device if supports(plan.device, "NCCL") else None
        dist.init_process_group(backends, device_id=bound, **rendezvous)
    else:
        device = torch.device("cpu")
        torch.set_num_threads(plan.num_threads)
        keep_freed_memory()
        dist.init_process_group("gloo", **rendezvous)
    try:
        with fastest_attention(device, deterministic):
            yield Rank(dist.get_rank(), local_rank, dist.get_world_size(), device)
    finally:
        dist.destroy_process_group()


def collective_timeout(step_timeout: float | str) -> timedelta:
    """Return the time limit of collectives, above the limits of the watchdog.

    It is torch's default, or twice the limit outside of steps.  If steps have no limit, it is a
    week.
    """
    limit = 0.0 if isinstance(step_timeout, str) else step_timeout or 30_000.0
    return timedelta(seconds=max(1800.0, 20 * limit))


def enable_determinism() -> None:
    """Make operators give the same bits every time, or raise an error.

    Call this function before a GPU is used.  Uninitialized memory is not filled, because weft never
    reads it and filling costs time.
    """
    # Two workspaces of fixed size: NVIDIA's cuBLAS documentation, 'Results reproducibility'.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.deterministic = True


def fastest_attention(
    device: torch.device, deterministic: bool = False
) -> AbstractContextManager[None]:
    """Return a context in which attention without a mask uses the fastest kernel.

    PyTorch prefers FlashAttention 2, which was written for Ampere; from Hopper on cuDNN's kernel is
    faster.  A kernel that does not support an input passes it to the next.  FlashAttention is the
    kernel whose backward pass is deterministic.
    """
    if not supports(device.type, "choice of attention kernels"):
        return nullcontext()
    if deterministic:
        return sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH])
    if torch.get_device_module(device).get_device_capability(device) < (9, 0):
        return nullcontext()
    kernels = ("CUDNN_ATTENTION", "FLASH_ATTENTION", "EFFICIENT_ATTENTION", "MATH")
    order = [SDPBackend.__members__[name] for name in kernels]
    return sdpa_kernel(order, set_priority=True)


def keep_freed_memory() -> None:
    """Make glibc keep the memory that a step frees, for the next step.

    glibc returns blocks of some MiB, and the end of its heap, to the system as soon as they are
    free.  Allocating them again costs a page fault per 4 KiB, with FSDP up to a tenth of a step.
    The resident memory grows, its peak does not.  An accelerator's allocator keeps memory; other
    C libraries have no such option.
    """
    if mallopt := getattr(ctypes.CDLL(None), "mallopt", None):
        trim_threshold, mmap_threshold = -1, -3  # of <malloc.h>
        mallopt(trim_threshold, 2**31 - 1)
        mallopt(mmap_threshold, 32 << 20)  # the maximum


# --------------------------------------------------------------------------- the model


class Built(NamedTuple):
    """Model, training step and optimizer of this rank."""

    plan: Plan
    model_parts: list[nn.Module]  # the model, or one part for each of this rank's pipeline stages
    mesh: Mesh
    train_step: TrainStep
    optimizer: Optimizer
    lr_decay: Decay  # of the learning rate, by ``optim.schedule``

    @property
    def pp_group(self) -> dist.ProcessGroup | None:
        """The pipeline-parallel group; None without pipeline parallelism."""
        return self.mesh.get_group("pp") if self.plan.pp > 1 else None


def build(plan: Plan, rank: Rank, backend: Backend = DEVICE_BACKEND) -> Built:
    """Build the model, the optimizer and the training step of this rank.

    The initial weights are the same in every layout.

    Args:
        plan: of the run.
        rank: this process.
        backend: see `Backend`.
    """
    job = plan.job
    random.seed(plan.seed)
    torch.manual_seed(plan.seed)
    family = plan.family
    mesh = build_mesh(plan, backend.create_group)
    name_groups(axis_by_group_name(mesh))
    model_parts = build_model_parts(plan, mesh, family, backend)
    for part in model_parts:
        backend.allocate(part, rank.device, plan.cpu_offload)

    def get_init(name: str) -> Init:
        return family.get_init(name, plan.model)

    backend.init_params(
        chain(
            saved_parameters(model_parts),
            frozen_parameters(model_parts),
            persistent_buffers(model_parts),
        ),
        plan.seed,
        lambda name: adapter_init(name, plan.model, get_init),
    )
    optimizer = build_optimizer(
        trainable_parameters(model_parts),
        job.optim,
        lookup(plan.optimizer, OPTIMIZERS),
        lambda name: not is_change(name) and family.has_weight_decay(name),
        {
            param
            for part in model_parts
            for block in family.blocks(part)
            for param in block.parameters()
        },
        lambda name: lora_lr_factor(name, job.lora),
    )
    if hasattr(optimizer, "run_compiled"):
        optimizer.run_compiled = backend.run_compiled
    hooks = build_hooks(plan, model_parts, mesh, family, rank.device, optimizer)
    train_step = TrainStep(
        model_parts, family, plan, mesh, rank.device, hooks, backend.run_compiled
    )
    decay = lookup(job.optim.schedule, SCHEDULES)
    return Built(plan, model_parts, mesh, train_step, optimizer, decay)


def open_layer_stats(built: Built) -> LayerStats:
    """Return this rank's statistics of the steps of ``debug.layer_stats_steps``."""
    plan, model_parts = built.plan, built.model_parts
    pipeline, rank = plan.pipeline, built.mesh.coordinates["pp"]
    stages = [0] if pipeline is None else pipeline.stages_on_rank(rank)
    layers = [
        (stage, name_layers(part, set(plan.family.blocks(part))))
        for stage, part in zip(stages, model_parts, strict=True)
    ]
    path = plan.run_path / "statistics.jsonl"
    params = dict(trainable_parameters(model_parts))
    # Multi-token prediction looks up the tokens of several positions.
    for _, modules in layers if getattr(plan.model, "mtp_layers", 0) else []:
        modules.pop("embed_tokens", None)
    stats = LayerStats(plan.job.debug.layer_stats_steps, path, layers, params, plan.tokens_per_step)
    built.train_step.hooks.append(stats)
    return stats
