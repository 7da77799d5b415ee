"""Collectives with gradients, which forward passes use between local tensors.

The backward pass of a collective is another one: of an all-gather, a reduce-scatter of the partial
gradients.  `_Collective` takes both as functions, so that one autograd function serves all.  They
are functional collectives, which torch.compile traces and can overlap with matmuls; the public ones
would break its graph.  torch 2.13's have gradients too, but 2.11's have none.

Shapes in names: B sequences, T tokens of a sequence, D model width.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from weft.models.layers import run_function

Collective = Callable[[Tensor, dist.ProcessGroup], Tensor]

c10d_functional = torch.ops._c10d_functional


class _Collective(torch.autograd.Function):
    """Apply ``collective``; in backward, ``adjoint``."""

    @staticmethod
    def forward(
        collective: Collective, adjoint: Collective, x: Tensor, group: dist.ProcessGroup
    ) -> Tensor:
        return collective(x, group)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        _, ctx.adjoint, _, ctx.group = inputs

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, Tensor, None]:
        return None, None, ctx.adjoint(grad, ctx.group), None


def with_adjoint(collective: Collective, adjoint: Collective) -> Collective:
    """Return ``collective`` with ``adjoint`` as its backward pass."""
    return partial(run_function, _Collective, collective, adjoint)


# --------------------------------------------------------------------------- without gradients


def _identity(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    return x.view_as(x)


def all_gather_slices(x_BTD: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the sequence of all ranks' slices."""
    size = group.size()
    stacked = c10d_functional.all_gather_into_tensor(x_BTD.contiguous(), size, group.group_name)
    return torch.cat(c10d_functional.wait_tensor(stacked).chunk(size), dim=1)


def reduce_scatter_sequence(x_BTD: Tensor, name: str, size: int) -> Tensor:
    """Sum over the ranks of the group of that name; return this rank's slice."""
    stacked = torch.cat(x_BTD.chunk(size, dim=1))
    out = c10d_functional.reduce_scatter_tensor(stacked, "sum", size, name)
    return c10d_functional.wait_tensor(out)  # type: ignore[no-any-return]


def _reduce_scatter(x_BTD: Tensor, group: dist.ProcessGroup) -> Tensor:
    return reduce_scatter_sequence(x_BTD, group.group_name, group.size())


def _own_slice(x_BTD: Tensor, group: dist.ProcessGroup) -> Tensor:
    return x_BTD.chunk(group.size(), dim=1)[group.rank()]


def _all_reduce(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    total = c10d_functional.all_reduce(x.contiguous(), "sum", group.group_name)
    return c10d_functional.wait_tensor(total)  # type: ignore[no-any-return]


# --------------------------------------------------------------------------- with gradients

# All-gather a sequence; reduce-scatter partial sums over the sequence.
gather_sequence = with_adjoint(all_gather_slices, _reduce_scatter)
scatter_sequence = with_adjoint(_reduce_scatter, all_gather_slices)

# All-gather a sequence from which every rank computes the same, so that no gradients are summed.
gather_sequence_values = with_adjoint(all_gather_slices, _own_slice)

# Identity whose gradients are summed; sum of partial results.
copy_to_ranks = with_adjoint(_identity, _all_reduce)
sum_over_ranks = with_adjoint(_all_reduce, _identity)

# Sum that every rank uses for a part of the result, so that gradients are summed too.
all_reduce = with_adjoint(_all_reduce, _all_reduce)
