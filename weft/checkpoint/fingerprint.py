"""A number for the contents of a tensor that is the same however the tensor is cut.

It is the sum, modulo 2**64, of every element's bits times an odd number that depends on the
element's place in the whole.  So shards have partial sums that add up, in any order and on any
device, to the whole's.  An odd factor has an inverse modulo 2**64: no change of one element goes
unseen, nor does an exchange of two; any other change is missed by chance once in 2**64.  It guards
against broken hardware and software, and not against somebody who means harm.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from weft.parallel.init import flat_index

# Elements at a time: temporaries that stay in a core's caches, and that torch does not spread over
# threads, of which there may be several here; or that fill a GPU.
CHUNK = {"cpu": 1 << 15, "cuda": 1 << 24}

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@torch.no_grad()
def fingerprint(local: Tensor, offsets: Sequence[int], shape: Sequence[int]) -> Tensor:
    """The partial sum of ``local``, the box at ``offsets`` of a whole tensor of ``shape``.

    Returns:
        An int64 scalar on the device of ``local``; the sum over all boxes, which wraps, is the
        fingerprint of the whole.
    """
    total = torch.zeros((), dtype=torch.int64, device=local.device)
    bits = local.detach().contiguous().view(_BITS[local.element_size()])
    if bits.numel() == 0:
        return total
    if bits.dim() == 0:
        bits, offsets, shape = bits.view(1), [0], [1]
    rows = max(1, CHUNK.get(local.device.type, 1 << 20) // math.prod(bits.shape[1:]))
    _, index = next(flat_index(bits[:rows], offsets, shape, bits.numel()))
    odd = (2 * index + 1).expand(bits[:rows].shape).contiguous()
    buffer = torch.empty_like(odd)
    for begin in range(0, len(bits), rows):
        block = bits[begin : begin + rows]
        part = buffer[: len(block)].copy_(block)
        # Further down all places are higher by the same number.
        total += part.sum() * wrapped(2 * begin * math.prod(shape[1:]))
        total += part.mul_(odd[: len(part)]).sum()
    return total


def wrapped(value: int) -> int:
    """Modulo 2**64, as int64 has it."""
    return (value + (1 << 63)) % (1 << 64) - (1 << 63)
