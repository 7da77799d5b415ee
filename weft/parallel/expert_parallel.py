"""Expert parallelism: ranks keep their experts, and tokens travel to them.

All data-parallel ranks need the same experts for different tokens.  FSDP alone gathers the experts
of each layer in full, though each token needs few of them.  Here, ``ep`` of the ranks that FSDP
shards over form a group, and each rank of the group *keeps* E / ep experts.  Tokens travel instead:
one all-to-all sends each token to the ranks of its experts, and another returns the results
(GShard, arXiv:2006.16668; DeepSpeed-MoE, arXiv:2201.05596).  No token is dropped: a rank receives
all rows routed to its experts, so a balanced router balances the ranks.

    ranks that shard parameters (dp_shard x cp) = edp x ep        e.g. 64 = 8 x 8
    attention, norms, router, shared experts     FSDP over all 64
    experts                                      sharded over ep, FSDP over the 8 of edp

The ranks of an ``ep`` group are neighbors, so tokens stay inside a node if ``ep`` fits into one.
Experts are FSDP units on the mesh axes ``dp_replicate, edp``.  Their parameters are DTensors on
``ep`` (and ``tp``), so checkpoints, gradient norm and initialization know each rank's shard.  An
expert's gradient needs no extra scale: the returning tokens of all ``ep`` ranks already sum it, and
FSDP sums over the other ranks.

The model is unchanged.  `Experts.forward` takes rows sorted by expert and a count per expert.  The
wrapper of this module exchanges rows with the group and sorts the received rows by *this rank's*
experts.

The host waits for the device once per layer, to read the row counts.  A traced program has no
counts and assumes perfect balance (`weft.models.layers.group_sizes`).

Shapes in names: R rows sorted by all E experts, P ranks of the group, L = E / P experts of a rank,
Q rows that a rank receives, D model width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard

from weft.models.layers import group_sizes, is_fake, run_function
from weft.models.moe import Experts, Permute
from weft.parallel.collectives import all_to_all_rows, exchange_rows
from weft.parallel.tensor_parallel import use_local_parameter


def apply_expert_parallel(layers: Iterable[Experts], mesh: DeviceMesh) -> None:
    """Shard experts (on the meta device) over the axis ``ep``, in place.

    Args:
        layers: experts, after `apply_tensor_parallel` if there is tensor parallelism.
        mesh: has the axes ``ep`` and ``tp``.
    """
    for experts in layers:
        for module in list(experts.modules()):
            for name, param in list(module.named_parameters(recurse=False)):
                _shard_expert_parameter(module, name, param, mesh)
        experts.forward = partial(_forward_with_all_to_all, experts.forward, mesh.get_group("ep"))  # type: ignore[method-assign]


def _shard_expert_parameter(module: nn.Module, name: str, full: Any, mesh: DeviceMesh) -> None:
    """Shard a parameter by experts over ``ep``; keep its sharding over ``tp``."""
    placements: list[Placement] = [Shard(0)]
    local, submesh = full.data, mesh["ep"]
    if isinstance(full, DTensor):
        placements += full.placements
        local, submesh = full.to_local().data, mesh["ep", "tp"]
    shard = local.chunk(mesh["ep"].size())[mesh.get_local_rank("ep")].contiguous()
    use_local_parameter(module, name, shard, submesh, placements, full.shape)


def _forward_with_all_to_all(
    forward: Callable[[Tensor, Tensor], Tensor],
    group: dist.ProcessGroup,
    rows_RD: Tensor,
    counts_E: Tensor,
) -> Tensor:
    """Apply the group's experts to this rank's rows; see `Experts.forward`."""
    size = group.size()
    experts_per_rank = [len(counts_E) // size] * size
    counts_PL = all_to_all_rows(experts_per_rank, experts_per_rank, counts_E, group).view(size, -1)
    sent, received = _split_sizes(counts_E.view(size, -1).sum(1), counts_PL.sum(1), len(rows_RD))
    rows_QD = exchange_rows(rows_RD, received, sent, group)
    # Received rows are sorted by rank, then by expert: P x L groups.  The ends of the groups give
    # each row's group, and so its expert.
    ends = counts_PL.flatten().cumsum(0)
    rows_Q = torch.arange(len(rows_QD), device=ends.device)
    expert_Q = torch.searchsorted(ends, rows_Q, right=True) % counts_PL.shape[1]
    order_Q = expert_Q.sort(stable=True).indices
    inverse_Q = torch.empty_like(order_Q).scatter_(0, order_Q, rows_Q)
    rows_QD = run_function(Permute, rows_QD, order_Q, inverse_Q)
    rows_QD = forward(rows_QD, counts_PL.sum(0))
    rows_QD = run_function(Permute, rows_QD, inverse_Q, order_Q)
    return exchange_rows(rows_QD, sent, received, group)


def _split_sizes(sent_P: Tensor, received_P: Tensor, rows: int) -> tuple[list[int], list[int]]:
    """Return the numbers of rows to send to and receive from each rank."""
    if is_fake(sent_P):
        return group_sizes(sent_P, rows), group_sizes(received_P, rows)
    sent, received = torch.stack((sent_P, received_P)).tolist()
    return sent, received
