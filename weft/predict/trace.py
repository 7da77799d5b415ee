"""TRACE: a step of one rank of a world that is not there, on tensors that are not there.

torch's fake process group answers every collective at once with nothing, and fake tensors have
shapes but no memory.  Under both, the very code that trains on 16,384 GPUs builds, shards and
runs a step of one rank on a laptop; what is left out are values and time.

Two things need help, and are helped here only:

* Parameters are made by weft's own code on the meta device, as always, but their memory must be
  fake: FSDP looks at the mesh's real tensor while it shards, so only ``allocate`` sees fake ones.
* Initial weights are computed on values.  They are skipped.

Fake tensors are on the CPU: a build of PyTorch without CUDA cannot fake cuda tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor

from weft.checkpoint.state import named_parameters
from weft.data.loader import Batch
from weft.job import Job
from weft.models import load_family
from weft.optim.optimizer import clip_grad_norm
from weft.parallel.mesh import PARAMETER_AXES, Mesh
from weft.parallel.private import fake_process_group
from weft.plan.resolve import Plan
from weft.predict.record import Call, Recorder, Recording, Where, placed
from weft.train import setup
from weft.train.setup import Built, Rank, build


@contextmanager
def fake_world(rank: int, world_size: int) -> Iterator[FakeTensorMode]:
    """Be ``rank`` of ``world_size``; inside, `build_fake` makes a model.

    Yields:
        The mode under which tensors are fake, not yet entered.
    """
    with fake_process_group(rank, world_size):
        yield FakeTensorMode(allow_non_fake_inputs=True)


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


def record_step(
    built: Built, job: Job, plan: Plan, mode: FakeTensorMode | None = None
) -> Recording:
    """One step of training: all microbatches forward and backward, clipping, the optimizer.

    Args:
        mode: under which tensors are fake; None: they are real, and the ranks run it together.
    """
    family = load_family(job.model.kind)
    recorder = Recorder(mode)
    params = [param for _, param in named_parameters(built.parts)]
    stages = built.mesh.group("pp") if plan.pp > 1 else None
    with mode or nullcontext():
        owner = {}
        for stage, part in enumerate(built.parts):
            places = {
                id(param): (stage, place)
                for place, block in enumerate(family.blocks(part))
                for param in block.parameters()
            }
            for tensor in (*part.parameters(), *part.buffers()):
                place = places.get(id(tensor))
                owner[recorder.keep(local(tensor), place)] = place
        for state in built.optimizer.state.values():
            for value in state.values():
                if isinstance(value, Tensor):
                    recorder.keep(local(value))
        batches = no_rows(job, plan)
        with recorder:
            with placed(recorder, built.parts, family.blocks, built.engine):
                loss = built.engine.forward_backward(batches)
            recorder.where = Where(0, "clip", 0, None)
            norm = clip_grad_norm(params, job.optim.max_grad_norm, stages)
            grads = [param.grad for param in params]
            assert all(grad is not None for grad in grads)
            gradients = frozenset(recorder.keep(local(g)) for g in grads if g is not None)
            del grads
            recorder.where = Where(0, "optimizer", 0, None)
            built.optimizer.step()
            recorder.where = Where(0, "end", 0, None)
            built.optimizer.zero_grad()
    assert loss.shape == norm.shape == ()
    return Recording(recorder.events, recorder.kept, owner, gradients)


def no_rows(job: Job, plan: Plan) -> list[Batch]:
    """Microbatches without text."""
    left, batches = plan.local_batch, []
    for _ in range(plan.accumulation):
        rows = torch.zeros((min(left, plan.microbatch), job.train.seq_len), dtype=torch.int64)
        packed = job.data.packing == "documents"
        more = (rows.clone(), rows.clone()) if packed else (None, None)
        batches.append(Batch(rows, rows.clone(), *more))
        left -= plan.microbatch
    return batches


def local(tensor: Tensor) -> Tensor:
    """What this rank holds of it."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def axis_groups(mesh: Mesh) -> dict[str, dist.ProcessGroup]:
    """The process groups of a rank: ``dp_shard`` is that of the parameters, with ``cp`` in it."""
    groups = {axis: mesh.group(axis) for axis in PARAMETER_AXES}
    return groups | ({"cp": mesh.context} if mesh.context else {})


def traffic(recording: Recording, mesh: Mesh) -> dict[str, tuple[int, int]]:
    """``{"all_gather tp": (20, 81920)}``: collectives and their bytes, by kind and axis."""
    axes = {str(group.group_name): axis for axis, group in axis_groups(mesh).items()}
    found: dict[str, tuple[int, int]] = {}
    for event in recording.events:
        if event.call is not None and event.call.group:
            key = f"{event.call.name} {axes[event.call.group]}"
            number, size = found.get(key, (0, 0))
            found[key] = number + 1, size + exchanged_bytes(event.call)
    return found


def exchanged_bytes(call: Call) -> int:
    """Of a collective: the gathered, or the not yet reduced, tensor's."""
    return max((size for _, size in (*call.reads, *call.writes)), default=0)


def peak_bytes(recording: Recording) -> int:
    """The most bytes of live storages at once."""
    live = peak = sum(recording.kept.values())
    for event in recording.events:
        live += event.bytes
        peak = max(peak, live)
    return peak
