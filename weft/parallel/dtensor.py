"""What a rank holds of a tensor that is spread over ranks, and where that lies in the whole."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard

from weft.parallel.private import is_strided_shard

NORM_CHUNK = 1 << 12  # elements


def to_local(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor, sharing memory; any other tensor as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def l2_norms(tensors: Sequence[Tensor]) -> Tensor:
    """Return the L2 norm of each tensor: float32 ``[N]`` on their device.

    On a CPU, torch adds the squares of a float32 tensor up in a few float32 numbers: the norm of 4
    million random numbers is off by 8e-5, of 100 million by 1e-2 (torch 2.13).  So long tensors are
    summed in pieces there.
    """
    if tensors[0].device.type != "cpu":
        return torch.stack(torch._foreach_norm(list(tensors), dtype=torch.float32))
    return torch.stack([_norm_on_cpu(tensor) for tensor in tensors])


def _norm_on_cpu(tensor: Tensor) -> Tensor:
    flat = tensor.reshape(-1)
    cut = len(flat) // NORM_CHUNK * NORM_CHUNK
    if cut == 0:
        return _norm_of_rows(flat)
    pieces = (flat[:cut].view(-1, NORM_CHUNK), flat[cut:].view(1, -1))
    return _norm_of_rows(torch.cat([_norm_of_rows(rows) for rows in pieces]))


def _norm_of_rows(x: Tensor) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(x, dim=-1, dtype=torch.float32)
    return norm


def from_local(
    local: Tensor, mesh: DeviceMesh, placements: Sequence[Placement], shape: Sequence[int]
) -> DTensor:
    """The DTensor of ``shape`` of which ``local`` is this rank's part; nothing is exchanged."""
    whole = torch.empty(shape, device="meta")
    return DTensor.from_local(
        local, mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )


def shard_offsets(param: torch.Tensor) -> list[int]:
    """Where this rank's shard begins in the whole parameter, one number per dim."""
    offsets = [0] * param.dim()
    if not isinstance(param, DTensor):
        return offsets
    sizes = list(param.shape)
    mesh = param.device_mesh
    coordinate = mesh.get_coordinate()
    assert coordinate is not None, "this rank is outside of the parameter's mesh"
    axes = [a for a, placement in enumerate(param.placements) if not placement.is_replicate()]
    # A strided shard is FSDP's cut of what tensor parallelism has cut before on the same dim,
    # although its axis stands to the left: it comes after the others.
    for axis in sorted(axes, key=lambda axis: is_strided_shard(param.placements[axis])):
        placement: Any = param.placements[axis]
        # Other layouts need their own arithmetic: refuse rather than guess.
        assert type(placement) is Shard or is_strided_shard(placement), f"no rule for {placement}"
        dim = placement.dim
        chunk = -(-sizes[dim] // mesh.size(axis))  # as torch.chunk cuts
        begin = min(coordinate[axis] * chunk, sizes[dim])
        offsets[dim] += begin
        sizes[dim] = min(chunk, sizes[dim] - begin)
    return offsets


def iter_flat_indices(
    local: torch.Tensor, offsets: Sequence[int], shape: Sequence[int], elements: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """``local``, the box at ``offsets`` of a whole of ``shape``, in parts of so many elements.

    Yields:
        A view of some rows, and the places of its elements in the whole, row by row: int64, of a
        shape that broadcasts to it.
    """
    if local.numel() == 0:
        return
    rows = max(1, elements // math.prod(local.shape[1:]))
    for begin in range(0, local.shape[0] if local.dim() else 1, rows):
        part = local[begin : begin + rows] if local.dim() else local
        index = torch.zeros((), dtype=torch.int64, device=local.device)
        stride = 1
        for dim in reversed(range(part.dim())):
            first = offsets[dim] + (begin if dim == 0 else 0)
            along = torch.arange(first, first + part.shape[dim], device=local.device) * stride
            index = index + along.view([-1 if d == dim else 1 for d in range(part.dim())])
            stride *= shape[dim]
        yield part, index
