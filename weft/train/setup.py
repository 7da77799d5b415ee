"""From a Plan to live objects: ranks, devices, model and optimizer.

Who a process is among others is asked here, in `weft.train.environment`, `weft.train.job_checks`
and by the launchers only.
"""

from __future__ import annotations

import ctypes
import os
import platform
import random
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.optim import Optimizer

from weft.checkpoint.state_dict import frozen_parameters, persistent_buffers, trainable_parameters
from weft.config.errors import ConfigError, InvalidConfig
from weft.config.reader import lookup
from weft.config.schema import Job
from weft.models import load_family
from weft.models.family import Init
from weft.monitor.heartbeat import name_groups
from weft.monitor.layer_stats import LayerStats, layers_of
from weft.optim.optimizer import OPTIMIZERS, build_optimizer
from weft.optim.schedule import SCHEDULES, Decay
from weft.parallel.apply import build_model_parts
from weft.parallel.initialization import init_params
from weft.parallel.lora import adapter_init
from weft.parallel.mesh import Mesh, axis_by_group_name, build_mesh
from weft.parallel.private import create_tcp_store
from weft.parallel.private_hooks import configure_flight_recorder
from weft.plan.resolve import Machine, Plan
from weft.train.step import TrainStep

# --------------------------------------------------------------------------- before anything starts


def joined() -> bool:
    """Whether a launcher (torchrun and its like) has already made this process a rank."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def detect_machine(device: str) -> Machine:
    """What there is to run on; ``device`` is the value of ``run.device``.

    Raises:
        InvalidConfig: if cuda is asked for and there is none.
    """
    gpus = torch.cuda.device_count()
    if device == "cuda" and gpus == 0:
        rule = "no CUDA device is visible"
        raise InvalidConfig([ConfigError("run.device", device, rule, "use cpu, or auto")])
    use_cuda = gpus > 0 and device != "cpu"
    return Machine(
        device="cuda" if use_cuda else "cpu",
        devices=gpus if use_cuda else len(os.sched_getaffinity(0)),
        device_name=torch.cuda.get_device_name(0) if use_cuda else platform.processor(),
        world_size=int(os.environ["WORLD_SIZE"]) if joined() else None,
        local_world_size=int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if joined() else None,
        memory_bytes=torch.cuda.get_device_properties(0).total_memory
        if use_cuda
        else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        peer_access=use_cuda
        and all(torch.cuda.can_device_access_peer(0, other) for other in range(1, gpus)),
        capability=_capability() if use_cuda else (0, 0),
    )


def _capability() -> tuple[int, int]:
    found = torch.cuda.get_device_capability(0)
    # AMD counts otherwise: its 9.4 (MI300) is the first with float8.
    return (0, 0) if torch.version.hip and found < (9, 4) else found


# --------------------------------------------------------------------------- the ranks


@dataclass(frozen=True)
class Rank:
    """This process among the others."""

    rank: int
    local_rank: int
    world_size: int
    device: torch.device


def _meeting() -> dict[str, Any]:
    """Where the ranks meet, as arguments of init_process_group; empty: as torch does it."""
    if not joined():
        alone: Any = dist
        return {"store": alone.HashStore(), "rank": 0, "world_size": 1}
    host, port = os.environ.get("MASTER_ADDR", ""), int(os.environ.get("MASTER_PORT", "0"))
    if not port or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return {}  # the launcher has a store
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = create_tcp_store(host, port, rank == 0, size)
    return {"store": store, "rank": rank, "world_size": size}


@contextmanager
def connect(plan: Plan, deterministic: bool = False) -> Iterator[Rank]:
    """Join the process group (of one, if need be) and leave it at the end.

    Args:
        deterministic: whether all that is computed inside is the same to the bit every time.
    """
    if deterministic:
        be_deterministic()
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    meeting = _meeting()
    configure_flight_recorder(str(Path(plan.run_dir).absolute() / "logs" / "flight-rank-"))
    if plan.device == "cuda":
        # A scheduler may show each rank nothing but its own GPU.
        device = torch.device("cuda", local_rank if torch.cuda.device_count() > 1 else 0)
        torch.cuda.set_device(device)
        # gloo beside NCCL: what ranks tell each other about checkpoints needs no GPU.
        dist.init_process_group("cpu:gloo,cuda:nccl", device_id=device, **meeting)
    else:
        device = torch.device("cpu")
        torch.set_num_threads(plan.num_threads)
        keep_freed_memory()
        dist.init_process_group("gloo", **meeting)
    try:
        with fastest_attention(device, deterministic):
            yield Rank(dist.get_rank(), local_rank, dist.get_world_size(), device)
    finally:
        dist.destroy_process_group()


def be_deterministic() -> None:
    """Let operators give the same bits every time, or raise where they cannot; before CUDA starts.

    What is not initialised is not filled: nothing of weft's reads it, and it costs time.
    """
    # Two buffers of a size that does not depend on timing: NVIDIA's cuBLAS documentation, 'Results
    # reproducibility'.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.deterministic = True


def fastest_attention(
    device: torch.device, deterministic: bool = False
) -> AbstractContextManager[None]:
    """In this context attention without a mask takes the fastest kernel that is there.

    By itself PyTorch prefers FlashAttention 2, which was written for Ampere; from Hopper on
    cuDNN's is faster.  What a kernel cannot do goes to the next.  Of those with a backward pass
    that gives the same bits every time, FlashAttention is.
    """
    if deterministic and device.type == "cuda":
        return sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH])
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < (9, 0):
        return nullcontext()
    kernels = ("CUDNN_ATTENTION", "FLASH_ATTENTION", "EFFICIENT_ATTENTION", "MATH")
    order = [SDPBackend.__members__[name] for name in kernels]
    return sdpa_kernel(order, set_priority=True)


def keep_freed_memory() -> None:
    """Let the C library keep what a step frees: the next one needs it again.

    glibc gives blocks of some MiB, and the end of its heap, back to the system as soon as they are
    free, and to have them again costs a page fault for every 4 KiB: with FSDP up to a tenth of a
    step.  Only the kernel's count of what is resident is larger for it, not its peak.  CUDA has an
    allocator of torch's own, which does so anyway; other C libraries have no such switch.
    """
    if mallopt := getattr(ctypes.CDLL(None), "mallopt", None):
        trim_threshold, mmap_threshold = -1, -3  # of <malloc.h>
        mallopt(trim_threshold, 2**31 - 1)
        mallopt(mmap_threshold, 32 << 20)  # the most that it takes


# --------------------------------------------------------------------------- what is trained


class Built(NamedTuple):
    """What this rank trains."""

    parts: list[nn.Module]  # of the model: one, or one for each of its pipeline stages
    mesh: Mesh
    engine: TrainStep
    optimizer: Optimizer
    decay: Decay


def build(job: Job, plan: Plan, rank: Rank) -> Built:
    """Model, optimizer and learning-rate decay of this rank.

    The initial weights are the same in every layout.
    """
    random.seed(job.train.seed)
    torch.manual_seed(job.train.seed)
    family = load_family(job.model.kind)
    mesh = build_mesh(plan)
    name_groups(axis_by_group_name(mesh))
    parts = build_model_parts(job, plan, mesh, family)
    for part in parts:
        allocate(part, rank.device, job.parallel.cpu_offload)

    def own(name: str) -> Init:
        return family.get_init(name, plan.model)

    init_params(
        chain(trainable_parameters(parts), frozen_parameters(parts), persistent_buffers(parts)),
        job.train.seed,
        lambda name: adapter_init(name, own),
    )
    optimizer = build_optimizer(
        trainable_parameters(parts),
        job.optim,
        lookup(job.optim.name, OPTIMIZERS),
        family.has_weight_decay,
        {param for part in parts for block in family.blocks(part) for param in block.parameters()},
    )
    engine = TrainStep(parts, family, job, plan, mesh, rank.device)
    return Built(parts, mesh, engine, optimizer, lookup(job.optim.schedule, SCHEDULES))


def allocate(part: nn.Module, device: torch.device, cpu_offload: bool) -> None:
    """Give the parameters of a part on the meta device their memory, uninitialised."""
    part.to_empty(device="cpu" if cpu_offload else device)
    if cpu_offload:  # parameters travel to the device when they are used, buffers stay there
        for module in part.modules():
            for name, buffer in module.named_buffers(recurse=False):
                setattr(module, name, buffer.to(device))


def open_statistics(job: Job, plan: Plan, mesh: Mesh, parts: list[nn.Module]) -> LayerStats:
    """This rank's statistics of the steps of ``debug.layer_stats_steps``."""
    blocks = load_family(job.model.kind).blocks
    stages = (
        plan.pipeline.stages_on_rank(mesh.coordinates["pp"]) if plan.pipeline is not None else [0]
    )
    layers = [
        (stage, layers_of(part, set(blocks(part))))
        for stage, part in zip(stages, parts, strict=True)
    ]
    path = Path(plan.run_dir) / "statistics.jsonl"
    params = dict(trainable_parameters(parts))
    return LayerStats(job.debug.layer_stats_steps, path, layers, params, plan.tokens_per_step)
