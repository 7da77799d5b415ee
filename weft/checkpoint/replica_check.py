"""Do the ranks that hold copies of a tensor hold the same?

Copies are computed with equal numbers in equal ways, so they differ only if something is broken:
most likely hardware that errs without a word (silent data corruption).  What differs would be saved
or not, by the accident of which copy is written, and gradients of different weights would be added
up.  Each rank takes the fingerprints of what it holds, a pass over memory, and exchanges 8 bytes
with the ranks that should hold the same; only if those differ, the fingerprints of every tensor.

What has no copy cannot be compared: sharded over all ranks (``dp_shard`` alone), only buffers and
step counts have one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import chain

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from weft.checkpoint.fingerprint import on_host
from weft.checkpoint.state_dict import copies_of, mark_of, model_state, optimizer_state
from weft.config.errors import WeftError


class ReplicasDiffer(WeftError):
    """Ranks that should hold the same do not; the message tells which rank and which tensor."""


def compare_replicas(parts: Sequence[nn.Module], optimizer: Optimizer) -> None:
    """Compare parameters, buffers and optimizer state along every axis that has copies of them.

    Every rank calls it.

    Raises:
        ReplicasDiffer: on the ranks of a group that differs.
    """
    state = model_state(parts) | optimizer_state(parts, optimizer)
    copied: dict[dist.ProcessGroup | None, list[str]] = {}
    for name, axes in copies_of(parts, state).items():
        for copies in axes:
            if copies.size > 1:
                copied.setdefault(copies.group, []).append(name)
    names = list(dict.fromkeys(chain(*copied.values())))
    marks = dict(zip(names, on_host([mark_of(state[name]) for name in names]), strict=True))
    for group, some in copied.items():
        mine = torch.tensor([marks[name] for name in some])
        if len(set(_gather(mine.sum(0, keepdim=True), group))) > 1:
            ranks = dist.get_process_group_ranks(group)
            raise ReplicasDiffer(_describe(some, _gather(mine, group), ranks))


def _gather(numbers: Tensor, group: dist.ProcessGroup | None) -> list[tuple[int, ...]]:
    """The numbers of every rank, in the order of the group."""
    every = [torch.empty_like(numbers) for _ in range(dist.get_world_size(group))]
    dist.all_gather(every, numbers, group=group)
    return [tuple(each.tolist()) for each in every]


def _describe(names: list[str], marks: list[tuple[int, ...]], ranks: list[int]) -> str:
    """Which ranks hold something else than most do, and the first tensor that differs.

    Args:
        marks: of each rank, one for each name.
    """
    (most, count), (other, _), *_ = Counter(marks).most_common()
    differing = [name for name, a, b in zip(names, most, other, strict=True) if a != b]
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
