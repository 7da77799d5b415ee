"""Experts without tensor parallelism: each rank of ``tp`` routes its own tokens.

Tensor parallelism splits the width of each expert, and the products of narrow experts become thin:
a width of 768 (Qwen3-30B-A3B) over 4 ranks is 192.  With ``parallel.etp=1`` experts stay whole, as
with Megatron-LM's ``--expert-tensor-parallel-size 1``.  So that the ranks of ``tp`` do not repeat
each other's work, each routes its part of a sequence.  For experts they are like more data-parallel
ranks:

    ranks with different tokens (dp_shard x cp x tp) = efsdp x ep        e.g. 64 = 8 x 8
    attention, norms, router, shared experts     as ever: tp, and FSDP over dp_shard x cp
    experts                                      sharded over ep, FSDP over efsdp

``ep`` groups are neighbors, first those of a tensor-parallel group.  With sequence parallelism a
rank has its slice of the sequence anyway, and a layer with experts gathers nothing.  Without, it
takes its slice of the layer's input, and gathers the outputs.  Shared experts remain split by
width.

*Gradients.*  FSDP sums those of an expert over ``efsdp``, and so over tokens of all ranks.  Those
of the router are partial sums over ``tp``.  Its loss and the load of experts count each token once.

Shapes in names: B sequences, T tokens of a sequence on this context-parallel rank, S = T / tp.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from weft.models.moe import MoE
from weft.parallel.collectives import all_gather_slices, all_reduce, with_adjoint


def split_tokens(layers: Iterable[MoE], group: dist.ProcessGroup, sequence_parallel: bool) -> None:
    """Let each rank route its own tokens, in place; after context parallelism.

    Args:
        layers: layers with experts.
        group: the tensor-parallel ranks.
        sequence_parallel: the input of a layer is this rank's slice, not the sequence.
    """
    for layer in layers:
        router: Any = layer.router
        router.sum_over_shards = partial(_sum_over_shards, router.sum_over_shards, group)
        router.sequence_shards *= group.size()
        layer.token_keys = partial(_slice_keys, layer.token_keys, group)
        if not sequence_parallel:
            layer.route = partial(_route_slice, layer.route, group)  # type: ignore[method-assign]


def _sum_over_shards(
    sum_over_others: Callable[[Tensor], Tensor] | None, group: dist.ProcessGroup, x: Tensor
) -> Tensor:
    return all_reduce(x if sum_over_others is None else sum_over_others(x), group)


def _route_slice(
    route: Callable[..., tuple[Tensor, ...]],
    group: dist.ProcessGroup,
    x_BTD: Tensor,
    *beside: tuple[nn.Module, Tensor],
) -> tuple[Tensor, ...]:
    """Route this rank's slice of a sequence that all ranks have; return all outputs."""
    x_BSD = with_adjoint(_slice, all_gather_slices)(x_BTD, group)
    out_BSD, *others = route(x_BSD, *beside)
    return with_adjoint(all_gather_slices, _slice)(out_BSD, group), *others


def _slice_keys(
    token_keys: Callable[[], Iterable[Tensor]], group: dist.ProcessGroup
) -> list[Tensor]:
    return [_slice(each_BT, group) for each_BT in token_keys()]


def _slice(x_BTD: Tensor, group: dist.ProcessGroup) -> Tensor:
    return x_BTD.chunk(group.size(), dim=1)[group.rank()].contiguous()
