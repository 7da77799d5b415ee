"""Attention of a GPU in a trace.

On a GPU, FlexAttention computes windows, chunks, limits of the scores and sinks, and
`weft.models.varlen_attention` documents.  A trace runs on
fake CPU tensors, where the same layers would have a mask and all scores in memory.  So the trace
takes the path of a GPU, with an operator in place of the kernel: it has the shapes, and the FLOPs
of the blocks of 128 queries and 128 keys that the kernel visits.  Causal attention whose values are
narrower than its keys (MLA) takes the same path: the kernels of a GPU compute it, that of a CPU
does not.

Shapes in names as in `weft.models.attention`.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from weft.models.attention import MASK_BLOCK, AttentionKernels, AttentionOptions, attend_flex
from weft.models.varlen_attention import DocumentOffsets


def _attend_plain(q_BHTK: Tensor, k_BGTK: Tensor, v_BGTV: Tensor, **options: Any) -> Tensor:
    """Compute attention as usual, unless no kernel of a CPU has these shapes."""
    if not options["is_causal"] or q_BHTK.shape[3] == v_BGTV.shape[3]:
        return F.scaled_dot_product_attention(q_BHTK, k_BGTK, v_BGTV, **options)
    pairs = visited_pairs(q_BHTK.shape[2])
    return torch.ops.weft.flex_attention(q_BHTK, k_BGTK, v_BGTV, pairs)[0]  # type: ignore[no-any-return]


def _attend_flex(
    q_BHTK: Tensor,
    k_BGTK: Tensor,
    v_BGTV: Tensor,
    _: Any,
    options: AttentionOptions,
    return_lse: bool = False,
    **arguments: Any,
) -> Any:
    pairs = visited_pairs(q_BHTK.shape[2], options.window, options.chunk)
    out_BHTV, lse_BHT = torch.ops.weft.flex_attention(q_BHTK, k_BGTK, v_BGTV, pairs)
    return (out_BHTV, lse_BHT) if return_lse else out_BHTV


def _attend_documents(
    q_BTHK: Tensor,
    k_BTGK: Tensor,
    v_BTGV: Tensor,
    _: DocumentOffsets,
    options: AttentionOptions,
) -> Tensor:
    """Return attention by the operator of the trace; each sequence is one document."""
    q_BHTK, k_BGTK, v_BGTV = (x.transpose(1, 2) for x in (q_BTHK, k_BTGK, v_BTGV))
    out_BHTV = attend_flex(q_BHTK, k_BGTK, v_BGTV, None, options, GPU_KERNELS)
    return out_BHTV.transpose(1, 2)


GPU_KERNELS = AttentionKernels(
    has_flex=lambda x: True,
    plain=_attend_plain,
    flex=_attend_flex,
    documents=_attend_documents,
)


@cache
def visited_pairs(num_tokens: int, window: int = 0, chunk: int = 0) -> int:
    """Return the pairs of query and key in the blocks that a kernel visits.

    Args:
        num_tokens: of a sequence, which is one document.
        window: see `AttentionOptions`.
        chunk: see `AttentionOptions`.
    """
    num_blocks = 0
    for index, start in enumerate(range(0, num_tokens, MASK_BLOCK)):
        first = start // chunk * chunk if chunk else 0
        first = max(first, start - window + 1) if window else first
        num_blocks += index + 1 - first // MASK_BLOCK
    return num_blocks * MASK_BLOCK**2


# --------------------------------------------------------------------------- operators


@torch.library.custom_op("weft::flex_attention", mutates_args=())
def _flex_attention(
    q_BHTK: Tensor, k_BGTK: Tensor, v_BGTV: Tensor, pairs: int
) -> tuple[Tensor, Tensor]:
    raise NotImplementedError("has no values")


@torch.library.custom_op("weft::flex_attention_backward", mutates_args=())
def _flex_attention_backward(
    grad_BHTV: Tensor,
    q_BHTK: Tensor,
    k_BGTK: Tensor,
    v_BGTV: Tensor,
    out_BHTV: Tensor,
    lse_BHT: Tensor,
    pairs: int,
) -> tuple[Tensor, Tensor, Tensor]:
    raise NotImplementedError("has no values")


@_flex_attention.register_fake
def _(q_BHTK: Tensor, k_BGTK: Tensor, v_BGTV: Tensor, pairs: int) -> tuple[Tensor, Tensor]:
    rows_BHT = q_BHTK.shape[:3]
    return q_BHTK.new_empty(*rows_BHT, v_BGTV.shape[3]), q_BHTK.new_empty(rows_BHT).float()


@_flex_attention_backward.register_fake
def _(_grad: Tensor, *args: Any) -> tuple[Tensor, ...]:
    return tuple(torch.empty_like(x) for x in args[:3])


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *qkv, ctx.pairs = inputs
    ctx.save_for_backward(*qkv, *output)


def _backward(ctx: Any, grad_BHTV: Tensor, _: Tensor) -> tuple[Any, ...]:
    grads = torch.ops.weft.flex_attention_backward(grad_BHTV, *ctx.saved_tensors, ctx.pairs)
    return *grads, None


_flex_attention.register_autograd(_backward, setup_context=_save)
