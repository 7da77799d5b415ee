"""The loss, as a sum: it is divided once, by the valid tokens of the whole global batch.

A mean of means would weigh a token by the microbatch and rank that it happens to be in,
and would make the loss depend on the layout.

Logits are the largest thing in a step: of 8,192 tokens and Llama 3.1's vocabulary 4 GiB in float32,
and as much for their gradient.  `linear_cross_entropy_sum` computes them, the loss and the
gradients for some tokens at a time, so they are never there as a whole, and nothing is computed
twice.

Shapes in names: B rows, T tokens of a row, N = B T, D model width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from weft.data.loader import IGNORE


def cross_entropy_sum(logits_BTV: Tensor, targets_BT: Tensor) -> Tensor:
    """Summed cross-entropy in nats: a float32 scalar.

    Args:
        logits_BTV: any floating dtype; computed in float32.
        targets_BT: int64; IGNORE where there is no loss.
    """
    return F.cross_entropy(
        logits_BTV.float().flatten(0, 1), targets_BT.flatten(), ignore_index=IGNORE, reduction="sum"
    )


def valid_tokens(targets_BT: Tensor) -> Tensor:
    """Number of targets with a loss: an int64 scalar on their device."""
    return (targets_BT != IGNORE).sum()


CHUNK_BYTES = 512 << 20  # of float32 logits that are there at a time


def chunk_tokens(tokens: int, vocab_size: int) -> int:
    """For how many tokens to compute logits at a time, so that they stay below `CHUNK_BYTES`.

    Returns:
        ``tokens`` if all at once; else the largest power of two.
    """
    most = max(1, CHUNK_BYTES // (4 * vocab_size))
    return tokens if tokens <= most else 1 << (most.bit_length() - 1)


def linear_cross_entropy_sum(
    x_BTD: Tensor,
    weight_VD: Tensor,
    targets_BT: Tensor,
    loss_of: Callable[[Tensor, Tensor], Tensor],
    size: int,
) -> Tensor:
    """The loss of ``x @ weight.T``, of which only ``size`` tokens' logits are there at a time.

    Args:
        loss_of: the summed loss of logits ``[1, n, V]`` and targets ``[1, n]``.

    Returns:
        A float32 scalar.
    """
    loss = _Chunked.apply(  # type: ignore[no-untyped-call]
        x_BTD.flatten(0, 1), weight_VD, targets_BT.flatten(), loss_of, size
    )
    return cast(Tensor, loss)


class _Chunked(torch.autograd.Function):
    """Gradients are computed with the loss, while the logits are there, and scaled later."""

    @staticmethod
    def forward(
        ctx: Any, x_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, loss_of: Any, size: int
    ) -> Tensor:
        total = torch.zeros((), device=x_ND.device)
        wanted = ctx.needs_input_grad[0] or ctx.needs_input_grad[1]
        if not wanted:
            for x, targets in zip(
                torch.split(x_ND, size), torch.split(targets_N, size), strict=True
            ):
                total += loss_of(F.linear(x, weight_VD)[None], targets[None])
            return total
        grad_x_ND = torch.empty_like(x_ND)
        # In float32: a sum over many chunks.
        grad_weight_VD = torch.zeros_like(weight_VD, dtype=torch.float32)
        weight = weight_VD.detach().requires_grad_()
        parts = zip(
            torch.split(x_ND, size),
            torch.split(targets_N, size),
            torch.split(grad_x_ND, size),
            strict=True,
        )
        for x, targets, grad_x in parts:
            with torch.enable_grad():
                x = x.detach().requires_grad_()
                loss = loss_of(F.linear(x, weight)[None], targets[None])
            here, of_weight = torch.autograd.grad(loss, (x, weight))
            grad_x.copy_(here)
            grad_weight_VD += of_weight
            total += loss.detach()
        ctx.save_for_backward(grad_x_ND, grad_weight_VD)
        ctx.dtype = weight_VD.dtype
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        grad_x_ND, grad_weight_VD = ctx.saved_tensors
        return grad_x_ND * grad, (grad_weight_VD * grad).to(ctx.dtype), None, None, None
