"""Local shards of DTensors: their offsets, flat indices and norms.

Importing ``torch.distributed.tensor`` takes a third of the time to import torch (2.13, with sympy).
A launcher has no DTensor, so no module that it imports may import that package; `is_dtensor` is
the check to use instead.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from weft.planning.shard_sizes import chunk_range

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Placement

NORM_CHUNK = 1 << 12  # elements


def is_dtensor(tensor: Tensor) -> TypeGuard[DTensor]:
    """Return True for a DTensor, which exists only once its package is imported."""
    package = sys.modules.get("torch.distributed.tensor")
    return package is not None and isinstance(tensor, package.DTensor)


def is_quantized(tensor: Tensor) -> bool:
    """Return True for 8-bit moments and torchao's quantized tensors."""
    return type(tensor) is not Tensor and hasattr(tensor, "codes")


def to_local(tensor: Tensor) -> Tensor:
    """Return a DTensor's local shard, sharing memory; other tensors as is."""
    return tensor.to_local() if is_dtensor(tensor) else tensor


def is_wrapper(value: object) -> bool:
    """Return True for a tensor that consists of others, such as a DTensor."""
    return bool(is_traceable_wrapper_subclass(value))


def plain_tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    """Yield the tensors in ``values``; of a wrapper, its inner tensors."""
    for value in values:
        if is_wrapper(value):
            yield from plain_tensors(getattr(value, name) for name in value.__tensor_flatten__()[0])
        elif isinstance(value, Tensor):
            yield value


def num_shards(tensor: Tensor, dim: int) -> int:
    """Return the number of shards of a dim."""
    if not is_dtensor(tensor):
        return 1
    mesh = tensor.device_mesh
    return math.prod(mesh.size(i) for i, p in enumerate(tensor.placements) if p.is_shard(dim))


def l2_norms(tensors: Sequence[Tensor]) -> Tensor:
    """Return the L2 norm of each tensor: float32 ``[N]`` on their device.

    On a CPU, torch sums the squares of a float32 tensor in a few float32 accumulators: the norm of
    4 million random numbers is off by 8e-5, of 100 million by 1e-2 (torch 2.13).  So this function
    sums long CPU tensors in chunks.
    """
    is_cpu = tensors[0].device.type == "cpu"
    parts = [
        _norms_of_chunks(tensor) if is_cpu and tensor.numel() > NORM_CHUNK else tensor
        for tensor in tensors
    ]
    return torch.stack(torch._foreach_norm(parts, dtype=torch.float32))


def _norms_of_chunks(tensor: Tensor) -> Tensor:
    norm = partial(torch.linalg.vector_norm, dim=1, dtype=torch.float32)
    cut = tensor.numel() // NORM_CHUNK * NORM_CHUNK
    if cut == tensor.numel():
        norms: Tensor = norm(tensor.reshape(-1, NORM_CHUNK))
        return norms
    flat = tensor.reshape(-1)
    return torch.cat((norm(flat[:cut].view(-1, NORM_CHUNK)), norm(flat[cut:].view(1, -1))))


def from_local(
    local: Tensor, mesh: DeviceMesh, placements: Sequence[Placement], shape: Sequence[int]
) -> DTensor:
    """Return a DTensor of global ``shape``, without communication."""
    from torch.distributed.tensor import DTensor

    full = torch.empty(shape, device="meta")
    return DTensor.from_local(
        local, mesh, placements, run_check=False, shape=full.shape, stride=full.stride()
    )


def shard_like(param: Tensor, local: Tensor, shape: Sequence[int] | None = None) -> Tensor:
    """Return ``local`` as a shard of a tensor that is sharded like ``param``."""
    if not is_dtensor(param):
        return local
    return from_local(local, param.device_mesh, param.placements, shape or param.shape)


def shard_offsets(param: torch.Tensor) -> list[int]:
    """Return the start of this rank's shard in the full parameter, per dim."""
    return shard_bounds(param)[0]


def shard_bounds(
    param: torch.Tensor, coordinate: Sequence[int] | None = None
) -> tuple[list[int], list[int]]:
    """Return offsets and sizes of a shard in the full parameter, per dim.

    Args:
        param: any tensor; one that is no DTensor is a shard of all.
        coordinate: index of the shard's rank in the mesh, per axis; None: of this rank.
    """
    offsets, sizes = [0] * param.dim(), list(param.shape)
    if not is_dtensor(param):
        return offsets, sizes
    mesh = param.device_mesh
    coordinate = mesh.get_coordinate() if coordinate is None else coordinate
    assert coordinate is not None, "this rank is not in the parameter's mesh"
    axes = [a for a, placement in enumerate(param.placements) if not placement.is_replicate()]
    # FSDP makes a strided shard of a dim that tensor parallelism has sharded before.  So strided
    # axes apply last, although they are to the left in the mesh.
    for axis in sorted(axes, key=lambda axis: _is_strided(param.placements[axis])):
        placement: Any = param.placements[axis]
        # Other placements need other arithmetic: fail rather than guess.
        assert type(placement).__name__ == "Shard" or _is_strided(placement), (
            f"unsupported placement {placement}"
        )
        dim = placement.dim
        chunk = chunk_range(sizes[dim], mesh.size(axis), coordinate[axis])
        offsets[dim] += chunk.start
        sizes[dim] = len(chunk)
    return offsets, sizes


def _is_strided(placement: Any) -> bool:
    """Return True for FSDP's placement on a dim that is sharded twice."""
    return type(placement).__name__ == "_StridedShard"


def iter_flat_indices(
    local: torch.Tensor, offsets: Sequence[int], shape: Sequence[int], max_elements: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield chunks of a shard with the flat indices of their elements.

    Args:
        local: the shard, at ``offsets`` in a full tensor of ``shape``.
        offsets: first index of the shard in each dim of the full tensor.
        shape: shape of the full tensor.
        max_elements: size of a chunk (at least one row).

    Yields:
        A view of some rows, and int64 indices in the full tensor that broadcast to it.
    """
    if local.numel() == 0:
        return
    rows = max(1, max_elements // math.prod(local.shape[1:]))
    for begin in range(0, local.shape[0] if local.dim() else 1, rows):
        chunk = local[begin : begin + rows] if local.dim() else local
        first = [offset + begin * (dim == 0) for dim, offset in enumerate(offsets)]
        yield chunk, flat_indices(chunk.shape, first, shape, local.device)


def flat_indices(
    sizes: Sequence[int], offsets: Sequence[int], shape: Sequence[int], device: torch.device
) -> torch.Tensor:
    """Return the flat indices, in a tensor of ``shape``, of a part at ``offsets``.

    They are int64 and broadcast to ``sizes``.
    """
    index, stride = torch.zeros((), dtype=torch.int64, device=device), 1
    for dim in reversed(range(len(sizes))):
        steps = torch.arange(offsets[dim], offsets[dim] + sizes[dim], device=device) * stride
        index = index + steps.view([-1 if d == dim else 1 for d in range(len(sizes))])
        stride *= shape[dim]
    return index
