"""Comparison of replicas, to detect silent data corruption.

Replicas compute equal values in the same way, so they differ only through a fault, most likely in
hardware.  A checkpoint would then depend on which replica writes it, and gradients of different
weights would be summed.  Each rank computes fingerprints of its tensors, one pass over memory, and
exchanges 8 bytes with the ranks that hold replicas.  Only on a mismatch do they exchange the
fingerprint of every tensor.

Tensors without replicas cannot be compared: with ``dp_shard`` alone, only buffers and step counts
have replicas.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import chain

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from weft.checkpoint.fingerprint import fingerprints_to_host
from weft.checkpoint.state_dict import (
    find_replica_axes,
    local_fingerprint,
    model_state,
    optimizer_state,
)
from weft.config.errors import WeftError


class ReplicaMismatch(WeftError):
    """Replicas differ; the message names the rank and the tensor."""


def compare_replicas(model_parts: Sequence[nn.Module], optimizer: Optimizer) -> None:
    """Compare parameters, buffers and optimizer state with all replicas.

    Every rank calls this function.

    Raises:
        ReplicaMismatch: on the ranks of a group that differs.
    """
    state = model_state(model_parts) | optimizer_state(model_parts, optimizer)
    names_by_group: dict[dist.ProcessGroup | None, list[str]] = {}
    for name, axes in find_replica_axes(model_parts, state).items():
        for axis in axes:
            if axis.size > 1:
                names_by_group.setdefault(axis.group, []).append(name)
    names = list(dict.fromkeys(chain(*names_by_group.values())))
    fingerprints = dict(
        zip(
            names,
            fingerprints_to_host([local_fingerprint(state[name]) for name in names]),
            strict=True,
        )
    )
    for group, group_names in names_by_group.items():
        own = torch.tensor([fingerprints[name] for name in group_names])
        if len(set(_all_gather(own.sum(0, keepdim=True), group))) > 1:
            ranks = dist.get_process_group_ranks(group)
            raise ReplicaMismatch(_format_mismatch(group_names, _all_gather(own, group), ranks))


def _all_gather(numbers: Tensor, group: dist.ProcessGroup | None) -> list[tuple[int, ...]]:
    """Return the numbers of every rank, in the order of the group."""
    gathered = [torch.empty_like(numbers) for _ in range(dist.get_world_size(group))]
    dist.all_gather(gathered, numbers, group=group)
    return [tuple(rank_numbers.tolist()) for rank_numbers in gathered]


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
            rank
            for rank, fingerprint in zip(ranks, fingerprints, strict=True)
            if fingerprint != majority
        ]
        who = f"rank {', '.join(map(str, outliers))} differs from the other replicas"
    else:
        who = f"one of ranks {', '.join(map(str, ranks))} differs from its replica"
    others = f" and {len(differing) - 1} more tensors" if len(differing) > 1 else ""
    return (
        f"{who} in {differing[0]}{others}; silent data corruption in hardware is likely. This step "
        "was not saved. Remove the node, and resume from the last checkpoint"
    )
