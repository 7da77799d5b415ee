"""One rank of a world that is not there, on tensors that are not there.

torch's fake process group answers every collective at once with nothing, and fake tensors have
shapes but no memory.  Under both, the very code that trains on 16,384 GPUs builds, shards and
runs a step of one rank on a laptop; what is left out are values and time.

Three things need help, and are helped here only:

* Parameters are made by weft's own code on the meta device, as always, but their memory must be
  fake: FSDP looks at the mesh's real tensor while it shards, so only ``allocate`` sees fake ones.
* Initial weights are computed on values.  They are skipped.
* A pipeline of torch 2.13 first asks round whether every stage knows its shapes, and reads the
  answer from a tensor.  Here each stage is asked by itself, and has to say yes.  In torch 2.11
  stages greet their neighbours instead; that is left out, so that both are counted alike.

Fake tensors are on the CPU: a build of PyTorch without CUDA cannot fake cuda tensors.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.pipelining import PipelineStage, schedules
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from weft.checkpoint.state import named_parameters
from weft.data.loader import Batch
from weft.job import Job
from weft.optim.optimizer import clip_grad_norm
from weft.parallel.mesh import PARAMETER_AXES, Mesh
from weft.plan.resolve import Plan
from weft.train import setup
from weft.train.setup import Built, Rank, build


@contextmanager
def fake_world(rank: int, world_size: int) -> Iterator[FakeTensorMode]:
    """Be ``rank`` of ``world_size``; inside, `build_fake` makes a model and `counted_step` runs it.

    Yields:
        The mode under which tensors are fake, not yet entered.
    """
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        with ExitStack() as stack:
            if hasattr(schedules._PipelineSchedule, "_warmup_p2p"):
                stack.enter_context(
                    patch.object(schedules._PipelineSchedule, "_warmup_p2p", _shapes_are_known)
                )
            else:
                stack.enter_context(
                    patch.object(PipelineStage, "_get_init_p2p_neighbors_ops", lambda stage: [])
                )
            yield FakeTensorMode(allow_non_fake_inputs=True)
    finally:
        dist.destroy_process_group()
        forget_meshes()


def forget_meshes() -> None:
    """Make DTensor forget the meshes that it has seen.

    It takes equal meshes for the same, and would communicate in the process groups of the first.
    """
    _clear_sharding_prop_cache()  # type: ignore[no-untyped-call]


def _shapes_are_known(schedule: Any, stages: list[Any], has_backward: bool, p2p_done: bool) -> None:
    """In the place of a vote over the pipeline."""
    modes: Any = schedules
    for stage in stages:
        assert not modes.InferenceMode.needs_dynamic(stage._user_meta, has_backward)
        stage._inference_mode = modes.InferenceMode.STATIC


def build_fake(job: Job, plan: Plan, mode: FakeTensorMode) -> tuple[Built, Plan]:
    """`weft.train.setup.build` of this rank with fake parameters.

    Returns:
        What is trained, and the plan with the CPU in the place of its device.
    """
    plan = replace(plan, device="cpu")
    rank = Rank(dist.get_rank(), 0, dist.get_world_size(), torch.device("cpu"))
    real: Callable[..., None] = setup.allocate

    def allocate(*args: Any) -> None:
        with mode:
            real(*args)

    with patch.object(setup, "allocate", allocate), patch.object(setup, "init_params", _leave):
        return build(job, plan, rank), plan


def _leave(*args: Any) -> None:
    """The weights as they are."""


def counted_step(
    built: Built, job: Job, plan: Plan, mode: AbstractContextManager[Any]
) -> list[Collectives]:
    """One step of training: all microbatches forward and backward, clipping, the optimizer.

    Args:
        mode: under which tensors are fake; with ``nullcontext()`` a real rank does the same.

    Returns:
        The collectives of these three parts.
    """
    seen = [Collectives(), Collectives(), Collectives()]
    with mode:
        rows = torch.zeros((plan.microbatch, job.train.seq_len), dtype=torch.int64)
        batches = [Batch(rows, rows.clone(), None, None) for _ in range(plan.accumulation)]
        with seen[0]:
            loss = built.engine.forward_backward(batches)
        params = [param for _, param in named_parameters(built.parts)]
        stages = built.mesh.group("pp") if plan.pp > 1 else None
        with seen[1]:
            norm = clip_grad_norm(params, job.optim.max_grad_norm, stages)
        assert all(param.grad is not None for param in params)
        with seen[2]:
            built.optimizer.step()
        built.optimizer.zero_grad()
    assert loss.shape == norm.shape == ()
    return seen


# What is counted, by the operator's name; the others do not communicate.
KINDS = {
    "allreduce_": "all_reduce",
    "all_reduce": "all_reduce",
    "_allgather_base_": "all_gather",
    "all_gather_into_tensor": "all_gather",
    "allgather_": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_tensor": "reduce_scatter",
    "send": "send",
    "recv_": "recv",
    "alltoall_base_": "all_to_all",
}
SILENT = ("wait_tensor", "_wrap_tensor_autograd")


class Collectives(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the collectives inside of its context, by kind and process group."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts: Counter[tuple[str, str]] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = func.__name__.partition(".")[0]
        if func.namespace in ("c10d", "_c10d_functional") and name not in SILENT:
            self.counts[KINDS[name], _group_name(args)] += 1
        return func(*args, **(kwargs or {}))

    def by_axis(self, mesh: Mesh) -> dict[str, int]:
        """``{"all_gather tp": 20}``; a group that is none of the mesh's fails."""
        axes = {str(group.group_name): axis for axis, group in axis_groups(mesh).items()}
        return {f"{kind} {axes[group]}": n for (kind, group), n in sorted(self.counts.items())}


def axis_groups(mesh: Mesh) -> dict[str, dist.ProcessGroup]:
    """The process groups of a rank: ``dp_shard`` is that of the parameters, with ``cp`` in it."""
    groups = {axis: mesh.group(axis) for axis in PARAMETER_AXES}
    return groups | ({"cp": mesh.context} if mesh.context else {})


def _group_name(args: tuple[Any, ...]) -> str:
    """Of the group in a collective's arguments: an object, or its name after the other text."""
    for arg in args:
        if isinstance(arg, torch.ScriptObject) and "ProcessGroup" in str(arg._type()):
            return str(dist.ProcessGroup.unbox(arg).group_name)
    return str([arg for arg in args if isinstance(arg, str)][-1])
