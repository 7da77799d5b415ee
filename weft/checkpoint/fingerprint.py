"""Fingerprint of a tensor's contents that does not depend on its sharding.

The fingerprint is the sum, modulo 2**64, of every element's bits times an odd number that depends
on the element's position in the unsharded tensor.  Partial sums of shards therefore add up to the
full sum, in any order and on any device.  An odd factor has an inverse modulo 2**64, so every
change of a single element is detected.  Several changes can cancel, but hardly by chance.  Factors
begin small, so in small tensors some swaps of elements cancel.  The fingerprint protects against
faulty hardware and software, not against deliberate changes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from weft.parallel.dtensor import iter_flat_indices

# Elements per chunk.  CPU: temporaries stay in a core's cache and below the size at which torch
# uses several threads, because several threads may be here at once.  GPU: enough to fill it.
CHUNK = {"cpu": (1 << 15) - 1, "cuda": 1 << 24}

WIDTH = 1024  # row length into which a vector is reshaped

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@torch.no_grad()
def fingerprint(local: Tensor, offsets: Sequence[int], shape: Sequence[int]) -> Tensor:
    """Return the partial sum of ``local``, a shard of a tensor of ``shape``.

    Args:
        local: shard.
        offsets: position of the shard in the unsharded tensor.
        shape: unsharded shape.

    Returns:
        An int64 scalar on the device of ``local``; the wrapping sum over all shards is the
        fingerprint of the tensor.
    """
    bits = local.detach().contiguous().view(_BITS[local.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=local.device)
    if bits.numel() == 0:
        return total
    if bits.dim() <= 1:  # split into rows; the last may be shorter
        bits, first = bits.view(-1), offsets[0] if bits.dim() else 0
        full_rows = len(bits) // WIDTH * WIDTH
        for rows, begin in (
            (bits[:full_rows].view(-1, WIDTH), 0),
            (bits[full_rows:].view(1, -1), full_rows),
        ):
            if rows.numel():
                index = torch.arange(rows.shape[1], device=local.device) + first + begin
                total += _weighted_sum(rows, index, WIDTH)
        return total
    _, index = next(iter_flat_indices(bits[:1], offsets, shape, 1))
    index = index.expand(bits[:1].shape).flatten()
    return _weighted_sum(bits.flatten(1), index, math.prod(shape[1:]))


def _weighted_sum(rows_RC: Tensor, index_C: Tensor, step: int) -> Tensor:
    """Return the sum of every element times (2 * position + 1).

    The sum is computed from sums of rows and of columns.

    Args:
        rows_RC: elements as integers.
        index_C: positions of the first row's elements.
        step: difference of positions between rows.
    """
    height, width = rows_RC.shape
    rows_per_chunk = max(1, CHUNK.get(rows_RC.device.type, 1 << 20) // width)
    buffer = torch.empty(
        min(height, rows_per_chunk), width, dtype=torch.int64, device=rows_RC.device
    )
    columns_C, sums_R = buffer.new_zeros(width), buffer.new_empty(height)
    for begin in range(0, height, rows_per_chunk):
        chunk = rows_RC[begin : begin + rows_per_chunk]
        values = buffer[: len(chunk)].copy_(chunk)
        columns_C += values.sum(0)
        torch.sum(values, 1, out=sums_R[begin : begin + rows_per_chunk])
    row_R = torch.arange(height, device=rows_RC.device)
    return (columns_C * (2 * index_C + 1)).sum() + (sums_R * (2 * step * row_R)).sum()


def fingerprints_to_host(fingerprints: Sequence[Tensor]) -> list[int]:
    """Return fingerprints as integers, with at most one GPU synchronization."""
    if not fingerprints:
        return []
    gpu = next(
        (fingerprint.device for fingerprint in fingerprints if fingerprint.device.type != "cpu"),
        fingerprints[0].device,
    )
    numbers: list[int] = torch.stack([fingerprint.to(gpu) for fingerprint in fingerprints]).tolist()
    return numbers


def wrap_int64(value: int) -> int:
    """Wrap an integer modulo 2**64 to the range of int64."""
    return (value + (1 << 63)) % (1 << 64) - (1 << 63)
