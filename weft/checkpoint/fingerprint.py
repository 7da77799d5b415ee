"""Fingerprint of a tensor's contents that does not depend on its sharding.

The fingerprint is the sum, modulo 2**64, of every element's bits times an odd number that depends
on the element's position in the unsharded tensor.  Partial sums of shards therefore add up to the
full sum, in any order and on any device.  An odd factor has an inverse modulo 2**64, so every
change of a single element is detected.  Several changes can cancel, but hardly by chance.  Factors
begin small, so in small tensors some swaps of elements cancel.  The fingerprint protects against
faulty hardware and software, not against deliberate changes.

Fingerprints also compare replicas.  Replicas compute equal values in the same way, so they differ
only through a fault, most likely in hardware.  A checkpoint would then depend on which replica
writes it, and gradients of different weights would be summed.  Tensors without replicas cannot be
compared: with ``dp_shard`` alone, only buffers and step counts have replicas.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from itertools import chain

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from weft.checkpoint.state_dict import checkpoint_tensors, find_replica_axes, local_values
from weft.config.errors import WeftError
from weft.parallel.dtensor import iter_flat_indices, shard_offsets
from weft.parallel.private import to_group_device

# Elements per chunk.  CPU: temporaries stay in a core's cache and below the size at which torch
# uses several threads, because several threads may be here at once.  GPU: enough to fill it.
CHUNK, CPU_CHUNK = 1 << 24, (1 << 15) - 1

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
    size = CPU_CHUNK if rows_RC.device.type == "cpu" else CHUNK
    rows_per_chunk = max(1, size // width)
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


def local_fingerprint(tensor: Tensor) -> Tensor:
    """Return the fingerprint of this rank's shard of a tensor."""
    return fingerprint(local_values(tensor), shard_offsets(tensor), tensor.shape)


def wrap_int64(value: int) -> int:
    """Wrap an integer modulo 2**64 to the range of int64."""
    return (value + (1 << 63)) % (1 << 64) - (1 << 63)


# --------------------------------------------------------------------------- replicas


class ReplicaMismatch(WeftError):
    """Replicas differ; the message names the rank and the tensor."""


def compare_replicas(model_parts: Sequence[nn.Module], optimizer: Optimizer) -> None:
    """Compare parameters, buffers and optimizer state with all replicas.

    Every rank calls this function, computes fingerprints of its tensors, one pass over memory, and
    exchanges 8 bytes with the ranks that hold replicas.  Only on a mismatch do they exchange the
    fingerprint of every tensor.

    Raises:
        ReplicaMismatch: on the ranks of a group that differs.
    """
    state = checkpoint_tensors(model_parts, optimizer)
    names_by_group: dict[dist.ProcessGroup | None, list[str]] = {}
    for name, axes in find_replica_axes(model_parts, state).items():
        for axis in axes:
            if axis.size > 1:
                names_by_group.setdefault(axis.group, []).append(name)
    names = list(dict.fromkeys(chain(*names_by_group.values())))
    values = [local_fingerprint(state[name]) for name in names]
    cpu = torch.device("cpu")
    device = next((value.device for value in values if value.device != cpu), cpu)
    # At most one synchronization with a GPU.
    numbers = torch.stack([value.to(device) for value in values]).tolist() if values else []
    fingerprints = dict(zip(names, numbers, strict=True))
    for group, group_names in names_by_group.items():
        own = torch.tensor([fingerprints[name] for name in group_names])
        if len(set(gather_numbers(own.sum(0, keepdim=True), group))) > 1:
            ranks = dist.get_process_group_ranks(group)
            raise ReplicaMismatch(_format_mismatch(group_names, gather_numbers(own, group), ranks))


def gather_numbers(numbers: Tensor, group: dist.ProcessGroup | None) -> list[tuple[int, ...]]:
    """Return the numbers of every rank, in the order of the group; a collective."""
    numbers = to_group_device(numbers, group)
    gathered = [torch.empty_like(numbers) for _ in range(dist.get_world_size(group))]
    dist.all_gather(gathered, numbers, group=group)
    return [tuple(rank_numbers) for rank_numbers in torch.stack(gathered).tolist()]


def _format_mismatch(
    names: list[str], fingerprints: list[tuple[int, ...]], ranks: list[int]
) -> str:
    """Name the ranks that differ from the majority, and the first tensor that differs.

    Args:
        names: tensors.
        fingerprints: per rank, one per name.
        ranks: global ranks of the group.
    """
    (majority, count), (minority, _), *_ = Counter(fingerprints).most_common()
    differing = [name for name, a, b in zip(names, majority, minority, strict=True) if a != b]
    if 2 * count > len(ranks):
        outliers = [
            rank for rank, values in zip(ranks, fingerprints, strict=True) if values != majority
        ]
        who = f"rank {', '.join(map(str, outliers))} differs from the other replicas"
    else:
        who = f"one of ranks {', '.join(map(str, ranks))} differs from its replica"
    others = f" and {len(differing) - 1} more tensors" if len(differing) > 1 else ""
    return (
        f"{who} in {differing[0]}{others}; silent data corruption in hardware is likely. This step "
        "was not saved. Remove the node, and resume from the last checkpoint"
    )
