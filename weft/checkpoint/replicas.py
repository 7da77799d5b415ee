"""Do the ranks that hold copies of a tensor hold the same?

Copies are computed with equal numbers in equal ways, so they differ only if something is broken:
most likely hardware that errs without a word (silent data corruption).  What differs would be saved
or not, by the accident of which copy is written, and gradients of different weights would be added
up.  Each rank takes the fingerprints of what it holds, a pass over memory, and exchanges 8 bytes
with the ranks that should hold the same; only if those differ, the fingerprints of every tensor.

What has no copy cannot be compared: sharded over all ranks (``dp_shard`` alone), nothing has one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from weft.checkpoint.fingerprint import fingerprint
from weft.checkpoint.state import (
    beside,
    local_part,
    model_state,
    named_buffers,
    named_parameters,
    optimizer_state,
)
from weft.job import WeftError
from weft.parallel.init import shard_offsets


class ReplicasDiffer(WeftError):
    """Ranks that should hold the same do not; the message tells which rank and which tensor."""


def compare_replicas(parts: Sequence[nn.Module], optimizer: Optimizer) -> None:
    """Compare parameters, buffers and optimizer state along every axis that has copies of them.

    Every rank calls it.

    Raises:
        ReplicasDiffer: on the ranks of a group that differs.
    """
    copied: dict[tuple[DeviceMesh, int], dict[str, Tensor]] = {}
    for name, tensor in (model_state(parts) | optimizer_state(parts, optimizer)).items():
        if isinstance(tensor, DTensor):
            for axis, placement in enumerate(tensor.placements):
                if placement.is_replicate() and tensor.device_mesh.size(axis) > 1:
                    copied.setdefault((tensor.device_mesh, axis), {})[name] = tensor
    params = dict(named_parameters(parts))
    for name, buffer in named_buffers(parts):
        if isinstance(param := beside(name, params), DTensor):
            for axis in range(param.device_mesh.ndim):
                if param.device_mesh.size(axis) > 1:
                    copied.setdefault((param.device_mesh, axis), {})[f"model.{name}"] = buffer
    marks: dict[str, Tensor] = {}
    for (mesh, axis), tensors in copied.items():
        for name, tensor in tensors.items():
            if name not in marks:
                marks[name] = fingerprint(local_part(tensor), shard_offsets(tensor), tensor.shape)
        mine, group = torch.stack([marks[name] for name in tensors]), mesh.get_group(axis)
        if len(set(_gather(mine.sum(), group))) > 1:
            ranks = dist.get_process_group_ranks(group)
            raise ReplicasDiffer(_describe(list(tensors), _gather(mine, group), ranks))


def _gather(value: Tensor, group: dist.ProcessGroup) -> list[bytes]:
    """The bytes of every rank's int64 tensor, in the order of the group."""
    every = [torch.empty_like(value) for _ in range(group.size())]
    dist.all_gather(every, value, group=group)
    return [each.cpu().numpy().tobytes() for each in every]


def _describe(names: list[str], marks: list[bytes], ranks: list[int]) -> str:
    """Which ranks hold something else than most do, and the first tensor that differs.

    Args:
        marks: of each rank, 8 bytes for each name.
    """
    (most, count), *others = Counter(marks).most_common()
    reference = others[0][0] if others else most
    spans = [slice(8 * i, 8 * i + 8) for i in range(len(names))]
    differing = [name for name, at in zip(names, spans, strict=True) if most[at] != reference[at]]
    if 2 * count > len(ranks):
        wrong = [rank for rank, mark in zip(ranks, marks, strict=True) if mark != most]
        who = f"rank {', '.join(map(str, wrong))} differs from the other replicas"
    else:
        who = f"one of ranks {', '.join(map(str, ranks))} differs from its replica"
    more = f" and {len(differing) - 1} more tensors" if len(differing) > 1 else ""
    return (
        f"{who} in {differing[0]}{more}: most likely its hardware errs without telling; nothing of "
        "this step was saved: take it out, and start again from the last checkpoint"
    )
