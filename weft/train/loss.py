"""The loss, as a sum: it is divided once, by the valid tokens of the whole global batch.

A mean of means would weigh a token by the microbatch and rank that it happens to be in,
and would make the loss depend on the layout.

Logits are the largest thing in a step: of 8,192 tokens and Llama 3.1's vocabulary 4 GiB in float32,
and as much for their gradient.  `linear_cross_entropy` computes them, the loss and the
gradients for some tokens at a time, so they are never there as a whole, and nothing is computed
twice.

Shapes in names: B rows, T tokens of a row, N = B T, D model width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from weft.data.loader import IGNORE_INDEX


def cross_entropy(logits_BTV: Tensor, targets_BT: Tensor) -> Tensor:
    """Cross-entropy of each token in nats: float32 (B, T), 0 where there is no loss.

    Args:
        logits_BTV: any floating dtype; computed in float32.
        targets_BT: int64; IGNORE_INDEX where there is no loss.
    """
    losses_N = F.cross_entropy(
        logits_BTV.float().flatten(0, 1),
        targets_BT.flatten(),
        ignore_index=IGNORE_INDEX,
        reduction="none",
    )
    return losses_N.view_as(targets_BT)


CHUNK_BYTES = 512 << 20  # of float32 logits that are there at a time


def chunk_tokens(tokens: int, vocab_size: int) -> int:
    """For how many tokens to compute logits at a time, so that they stay below `CHUNK_BYTES`.

    Returns:
        ``tokens`` if all at once; else the largest power of two.
    """
    most = max(1, CHUNK_BYTES // (4 * vocab_size))
    return tokens if tokens <= most else 1 << (most.bit_length() - 1)


def linear_cross_entropy(
    x_BTD: Tensor,
    weight_VD: Tensor,
    targets_BT: Tensor,
    loss_of: Callable[[Tensor, Tensor], Tensor],
    size: int,
) -> tuple[Tensor, Tensor]:
    """The loss of ``x @ weight.T``, of which only ``size`` tokens' logits are there at a time.

    Args:
        loss_of: the loss of each token, ``[1, n]``, of logits ``[1, n, V]`` and targets ``[1, n]``.

    Returns:
        The sum, a float32 scalar; and the loss of each token, float32 (B, T), which no gradient
        goes through.
    """
    x_ND, targets_N = x_BTD.flatten(0, 1), targets_BT.flatten()
    wanted = torch.is_grad_enabled() and (x_ND.requires_grad or weight_VD.requires_grad)
    losses_N = torch.empty(len(targets_N), device=x_ND.device)
    gradients = _in_chunks(x_ND, weight_VD, targets_N, loss_of, size, wanted, losses_N)
    total, losses_BT = losses_N.sum(), losses_N.view_as(targets_BT)
    if not wanted:
        return total, losses_BT
    # Two, so that a schedule which computes gradients of inputs and of weights apart can part them:
    # torch 2.11 cannot where they meet in a function of somebody else's.
    of_x, *of_weight = gradients
    total = _Known.apply(total, x_ND, of_x)  # type: ignore[no-untyped-call]
    for gradient in of_weight:
        zero = torch.zeros_like(losses_N[0])
        total = total + _Known.apply(zero, weight_VD, gradient)  # type: ignore[no-untyped-call]
    return total, losses_BT


@torch.no_grad()
def _in_chunks(
    x_ND: Tensor,
    weight_VD: Tensor,
    targets_N: Tensor,
    loss_of: Any,
    size: int,
    wanted: bool,
    losses_N: Tensor,
) -> list[Tensor]:
    """Writes ``losses_N``; if they are ``wanted`` returns the gradients of their sum, computed
    while the logits are there: of ``x_ND``, and of the weight unless it is frozen."""
    columns = (x_ND, targets_N, losses_N)
    parts = zip(*(torch.split(column, size) for column in columns), strict=True)
    if not wanted:
        for x, targets, losses in parts:
            losses.copy_(loss_of(F.linear(x, weight_VD)[None], targets[None])[0])
        return []
    grad_x_ND = torch.empty_like(x_ND)
    # In float32: a sum over many chunks.
    sums = [torch.zeros_like(weight_VD, dtype=torch.float32)] * weight_VD.requires_grad
    weight = weight_VD.detach().requires_grad_(weight_VD.requires_grad)
    for (x, targets, losses), grad_x in zip(parts, torch.split(grad_x_ND, size), strict=True):
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            found = loss_of(F.linear(x, weight)[None], targets[None])[0]
            loss = found.sum()
        here, *of_weight = torch.autograd.grad(loss, (x, *[weight] * len(sums)))
        grad_x.copy_(here)
        for total, gradient in zip(sums, of_weight, strict=True):
            total += gradient
        losses.copy_(found.detach())
    return [grad_x_ND, *sums]


class _Known(torch.autograd.Function):
    """A scalar whose gradient is known."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, tensor: Tensor, gradient: Tensor) -> Tensor:
        ctx.save_for_backward(gradient)
        ctx.dtype = tensor.dtype
        return value

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (gradient,) = ctx.saved_tensors
        return None, (gradient * grad).to(ctx.dtype), None
