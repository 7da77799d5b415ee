"""A number for the contents of a tensor that is the same however the tensor is cut.

It is the sum, modulo 2**64, of every element's bits times an odd number that depends on the
element's place in the whole.  So shards have partial sums that add up, in any order and on any
device, to the whole's.  An odd factor has an inverse modulo 2**64: no change of one element goes
unseen.  Other changes can cancel (factors begin small, so in small tensors some exchanges do), but
hardly by chance.  It guards against broken hardware and software, and not against somebody who
means harm.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from weft.parallel.dtensor import iter_flat_indices

# Elements at a time: temporaries that stay in a core's caches, and that torch does not spread over
# threads, of which there may be several here; or that fill a GPU.
CHUNK = {"cpu": (1 << 15) - 1, "cuda": 1 << 24}

WIDTH = 1024  # of the rows that a vector is cut into

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@torch.no_grad()
def fingerprint(local: Tensor, offsets: Sequence[int], shape: Sequence[int]) -> Tensor:
    """The partial sum of ``local``, the box at ``offsets`` of a whole tensor of ``shape``.

    Returns:
        An int64 scalar on the device of ``local``; the sum over all boxes, which wraps, is the
        fingerprint of the whole.
    """
    bits = local.detach().contiguous().view(_BITS[local.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=local.device)
    if bits.numel() == 0:
        return total
    if bits.dim() <= 1:  # cut into rows, of which the last may be shorter
        bits, first = bits.view(-1), offsets[0] if bits.dim() else 0
        whole = len(bits) // WIDTH * WIDTH
        for rows, begin in ((bits[:whole].view(-1, WIDTH), 0), (bits[whole:].view(1, -1), whole)):
            if rows.numel():
                index = torch.arange(rows.shape[1], device=local.device) + first + begin
                total += _weighted_sum(rows, index, WIDTH)
        return total
    _, index = next(iter_flat_indices(bits[:1], offsets, shape, 1))
    index = index.expand(bits[:1].shape).flatten()
    return _weighted_sum(bits.flatten(1), index, math.prod(shape[1:]))


def _weighted_sum(rows_RC: Tensor, index_C: Tensor, step: int) -> Tensor:
    """The sum of every element times (2 * its place + 1), from sums of rows and of columns.

    Args:
        index_C: places of the first row's elements; those of each next row are ``step`` higher.
    """
    height, width = rows_RC.shape
    at_a_time = max(1, CHUNK.get(rows_RC.device.type, 1 << 20) // width)
    buffer = torch.empty(min(height, at_a_time), width, dtype=torch.int64, device=rows_RC.device)
    columns_C, sums_R = buffer.new_zeros(width), buffer.new_empty(height)
    for begin in range(0, height, at_a_time):
        block = rows_RC[begin : begin + at_a_time]
        part = buffer[: len(block)].copy_(block)
        columns_C += part.sum(0)
        torch.sum(part, 1, out=sums_R[begin : begin + at_a_time])
    number_R = torch.arange(height, device=rows_RC.device)
    return (columns_C * (2 * index_C + 1)).sum() + (sums_R * (2 * step * number_R)).sum()


def on_host(marks: Sequence[Tensor]) -> list[int]:
    """Fingerprints as numbers, after one wait for the GPU if any is there."""
    if not marks:
        return []
    gpu = next((mark.device for mark in marks if mark.device.type != "cpu"), marks[0].device)
    numbers: list[int] = torch.stack([mark.to(gpu) for mark in marks]).tolist()
    return numbers


def wrapped(value: int) -> int:
    """Modulo 2**64, as int64 has it."""
    return (value + (1 << 63)) % (1 << 64) - (1 << 63)
