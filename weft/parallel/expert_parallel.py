"""Expert parallelism: ranks that share out the experts, and send each other tokens.

Every data-parallel rank has its own tokens, and all have the same experts: sharded by FSDP they are
gathered whole, layer by layer, though each token needs few of them.  Here ``ep`` of the ranks that
FSDP shards parameters over form a group, in which each keeps E / ep experts *in place*.  Tokens
travel instead: one all-to-all takes each to the rank of each of its experts, and one brings back
what came of it (GShard, arXiv:2006.16668; DeepSpeed-MoE, arXiv:2201.05596).  A rank receives as
many rows as its experts were chosen for, so a balanced router makes balanced ranks, and none is
dropped.

    ranks that share parameters (dp_shard x cp) = edp x ep        e.g. 64 = 8 x 8
    attention, norms, router, shared experts     FSDP over all 64
    experts                                      cut over ep, FSDP over the 8 of edp

Groups of ``ep`` are neighbours, so that tokens travel inside a node where ``ep`` fits into one.
Experts are FSDP units of their own, on the mesh's axes ``dp_replicate, edp``; as parameters they
are DTensors on ``ep`` (and ``tp``), so checkpoints, gradient norm and initial weights know what a
rank holds.  The gradient of an expert needs no other scale than any: what comes back with the
tokens of all ``ep`` ranks is already their sum, and FSDP sums over the others.

The model knows nothing of it.  `Experts.forward` is given rows in the order of their experts and
the number of each; what is put in front of it exchanges rows with the group and puts those that
came into the order of *this rank's* experts.

The host waits once a layer, for the numbers of rows.  In a traced program there are none to wait
for, and perfect balance is assumed (`weft.models.layers.sizes_of`).

Shapes: R rows in the order of all E experts, P ranks of the group, L = E / P experts of a rank, Q
rows that it receives, D model width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard

from weft.models.layers import sizes_of
from weft.models.moe import Experts, Permute
from weft.parallel.dtensor import from_local
from weft.parallel.private import is_fake, run_function, c10d_functional

# Axes on which FSDP does not gather an expert's weights.
EXPERT_WEIGHT_AXES = {"ep", "tp"}


def apply_expert_parallel(layers: Iterable[Experts], mesh: DeviceMesh) -> None:
    """Cut experts (on the meta device) over the axis ``ep`` of ``mesh``, in place.

    Args:
        layers: after tensor parallelism, if there is any.
        mesh: with the axes ``ep`` and ``tp``.
    """
    for experts in layers:
        for module in list(experts.children()):
            _shard_expert_weight(module, mesh)
        experts.forward = partial(_forward_with_all_to_all, experts.forward, mesh.get_group("ep"))  # type: ignore[method-assign]


def _shard_expert_weight(module: nn.Module, mesh: DeviceMesh) -> None:
    """The module's weight: cut over ``ep`` by experts, and as it was over ``tp``."""
    whole: Any = module._parameters["weight"]
    placements: list[Placement] = [Shard(0)]
    local, cut_over = whole.data, mesh["ep"]
    if isinstance(whole, DTensor):
        placements += whole.placements
        local, cut_over = whole.to_local().data, mesh["ep", "tp"]
    mine = local.chunk(mesh["ep"].size())[mesh.get_local_rank("ep")].contiguous()
    param = from_local(mine, cut_over, placements, whole.shape)
    # Of a class that tensor parallelism has exchanged, the one before: `weight` is told here.
    kind = type(module) if not isinstance(whole, DTensor) else type(module).__mro__[1]
    module.__class__ = type(kind.__name__, (kind,), {"weight": property(_local_weight)})
    module.register_parameter("weight", nn.Parameter(param, requires_grad=whole.requires_grad))


def _local_weight(self: Any) -> Tensor:
    param = self._parameters["weight"]
    if isinstance(param, DTensor) and set(param.device_mesh.mesh_dim_names or ()) <= EXPERT_WEIGHT_AXES:
        return param.to_local()
    return cast(Tensor, param)  # sharded by FSDP: not gathered for computing


def _forward_with_all_to_all(
    forward: Callable[[Tensor, Tensor], Tensor],
    group: dist.ProcessGroup,
    rows_RD: Tensor,
    counts_E: Tensor,
) -> Tensor:
    """What experts, of which this rank has some, make of rows: see `Experts.forward`."""
    size = group.size()
    each = [len(counts_E) // size] * size
    counts_PL = _all_to_all(counts_E, each, each, group).view(size, -1)
    sent, received = _split_sizes(counts_E.view(size, -1).sum(1), counts_PL.sum(1), len(rows_RD))
    rows_QD = run_function(_AllToAll, rows_RD, received, sent, group)
    # They come by rank, and for each by expert; a row's place among the P x L groups is found from
    # where those end.
    ends = counts_PL.flatten().cumsum(0)
    rows_Q = torch.arange(len(rows_QD), device=ends.device)
    expert_Q = torch.searchsorted(ends, rows_Q, right=True) % counts_PL.shape[1]
    order_Q = expert_Q.sort(stable=True).indices
    place_Q = torch.empty_like(order_Q).scatter_(0, order_Q, rows_Q)
    rows_QD = run_function(Permute, rows_QD, order_Q, place_Q)
    rows_QD = forward(rows_QD, counts_PL.sum(0))
    rows_QD = run_function(Permute, rows_QD, place_Q, order_Q)
    return run_function(_AllToAll, rows_QD, sent, received, group)


def _split_sizes(sent_P: Tensor, received_P: Tensor, rows: int) -> tuple[list[int], list[int]]:
    """Rows that go to each rank and come from it, on the host."""
    if is_fake(sent_P):
        return sizes_of(sent_P, rows), sizes_of(received_P, rows)
    sent, received = torch.stack((sent_P, received_P)).tolist()
    return sent, received


def _all_to_all(
    x: Tensor, received: list[int], sent: list[int], group: dist.ProcessGroup
) -> Tensor:
    """Rows from and to each rank, so many."""
    out = c10d_functional.all_to_all_single(x.contiguous(), received, sent, group.group_name)
    return cast(Tensor, c10d_functional.wait_tensor(out))


class _AllToAll(torch.autograd.Function):
    """Rows to the ranks of a group; gradients back to where the rows came from."""

    @staticmethod
    def forward(
        ctx: Any, x_RD: Tensor, received: list[int], sent: list[int], group: dist.ProcessGroup
    ) -> Tensor:
        ctx.sizes, ctx.group = (received, sent), group
        return _all_to_all(x_RD, received, sent, group)

    @staticmethod
    def backward(ctx: Any, grad_QD: Tensor) -> tuple[Tensor, None, None, None]:
        received, sent = ctx.sizes
        return _all_to_all(grad_QD, sent, received, ctx.group), None, None, None
