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

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor

from weft.models import attention
from weft.models.attention import MASK_BLOCK, AttentionOptions, Mask
from weft.models.varlen_attention import DocumentOffsets
from weft.parallel import activation_checkpoint


@contextmanager
def trace_gpu_attention(device: str) -> Iterator[None]:
    """Trace the attention of a run on ``device``."""
    with ExitStack() as stack:
        if device != "cpu":
            policy = (*activation_checkpoint.ATTENTION, "weft::flex_attention")
            stack.enter_context(patch.object(activation_checkpoint, "ATTENTION", policy))
            stack.enter_context(patch.object(attention, "has_flex_attention", lambda _: True))
            traced = partial(_attend_flex, attention._attend_flex)
            stack.enter_context(patch.object(attention, "_attend_flex", traced))
            traced = partial(_attend_documents, traced)
            stack.enter_context(patch.object(attention, "_attend_documents", traced))
            traced = partial(_attend_causal, F.scaled_dot_product_attention)
            stack.enter_context(patch.object(F, "scaled_dot_product_attention", traced))
        yield


def _attend_causal(
    original: Any, q_BHTK: Tensor, k_BGTK: Tensor, v_BGTV: Tensor, **options: Any
) -> Tensor:
    """Call the original function, unless no kernel of a CPU has these shapes."""
    if not options["is_causal"] or q_BHTK.shape[3] == v_BGTV.shape[3]:
        return original(q_BHTK, k_BGTK, v_BGTV, **options)  # type: ignore[no-any-return]
    pairs = visited_pairs(q_BHTK.shape[2])
    return torch.ops.weft.flex_attention(q_BHTK, k_BGTK, v_BGTV, pairs)[0]  # type: ignore[no-any-return]


def _attend_flex(
    original: Any,
    q_BHTK: Tensor,
    k_BGTK: Tensor,
    v_BGTV: Tensor,
    mask: Mask,
    options: AttentionOptions,
) -> Any:
    """Call the original function with a traced kernel."""
    pairs = visited_pairs(q_BHTK.shape[2], options.window, options.chunk)

    def kernel(*qkv: Tensor, return_lse: bool = False, **_: Any) -> Any:
        out_BHTV, lse_BHT = torch.ops.weft.flex_attention(*qkv, pairs)
        return (out_BHTV, lse_BHT) if return_lse else out_BHTV

    with patch.object(attention, "_compiled_flex_attention", lambda: kernel):
        return original(q_BHTK, k_BGTK, v_BGTV, mask, options)


def _attend_documents(
    attend_flex: Any,
    q_BTHK: Tensor,
    k_BTGK: Tensor,
    v_BTGV: Tensor,
    _: DocumentOffsets,
    options: AttentionOptions,
) -> Tensor:
    """Return attention by the operator of the trace; each sequence is one document."""
    heads = (x.transpose(1, 2) for x in (q_BTHK, k_BTGK, v_BTGV))
    out_BHTV: Tensor = attend_flex(*heads, None, options)
    return out_BHTV.transpose(1, 2)


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
