"""Attention of some queries to some keys, with its log-sum-exp: PyTorch's private operators.

Attention over keys that come in blocks is exact if each block's output comes with the
logarithm of its softmax's denominator: the outputs are then averaged with weights
``exp(lse_of_block - lse_of_all)``.  And backward of one block is ordinary flash attention's
backward with the output and log-sum-exp of *all* blocks in place of its own.  The public
``F.scaled_dot_product_attention`` hides the log-sum-exp and offers no such backward, so this
file calls the operators below it.  They are private, and a test compares their schemas:
nothing else in weft may depend on them.

    device   block                      operator, after _scaled_dot_product_
    cpu      any                        flash_attention_for_cpu
    cuda     no mask, 16 bit, K % 8=0   flash_attention: grouped queries as they are
    cuda     other                      efficient_attention: bias in the dtype of the queries,
                                        rows padded to 16, one key head for each query head

The CUDA half is written from the schemas, the meta kernels (which a test runs) and the C++
sources behind them (ATen/native/transformers/cuda).  It was never run on a GPU.

Shapes in names: B rows, Q queries and S keys of a block, H query heads, G key/value heads
(query head h reads head ``h // (H / G)``), K width of one head.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

aten = torch.ops.aten


class BlockMask(NamedTuple):
    """Which query of a block may look at which key, and which may look at none.

    Attributes:
        allowed_B1QS: bool.
        blind_B1Q: bool, queries with no key in this block.
    """

    allowed_B1QS: Tensor
    blind_B1Q: Tensor


def build_block_mask(allowed_BQS: Tensor) -> BlockMask:
    """The `BlockMask` of a bool ``[B, Q, S]``."""
    return BlockMask(allowed_BQS.unsqueeze(1), ~allowed_BQS.any(dim=-1).unsqueeze(1))


def attend_block(
    q_BQHK: Tensor, k_BSGK: Tensor, v_BSGK: Tensor, causal: bool, mask: BlockMask | None
) -> tuple[Tensor, Tensor]:
    """Attention of ``Q`` queries to ``S`` keys and nothing else.

    Args:
        q_BQHK, k_BSGK, v_BSGK: of one dtype; any strides with the last dim contiguous.
        causal: query i sees keys 0 to i; needs Q = S, and no mask.
        mask: None: every query sees every key, unless ``causal``.

    Returns:
        The output ``[B, Q, H, K]`` in the dtype of the queries, and the log-sum-exp
        ``[B, H, Q]`` in float32 (float64 for float64).  Where the mask allows no key they are
        0 and -inf, whatever the operator has to say: the CPU's says 0 and 0.
    """
    q, k, v = (x.transpose(1, 2) for x in (q_BQHK, k_BSGK, v_BSGK))
    if q.device.type == "cpu":
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, is_causal=causal, attn_mask=None if mask is None else _bias(mask, q)
        )
    elif _can_use_flash(q, mask):
        out, lse = _cuda_flash(q, k, v, causal)
    else:
        out, lse = _cuda_efficient(q, k, v, causal, mask)
    if mask is not None:
        out = out.masked_fill(mask.blind_B1Q.unsqueeze(-1), 0)
        lse = lse.masked_fill(mask.blind_B1Q, -torch.inf)
    return out.transpose(1, 2), lse


def attend_block_backward(
    grad_BQHK: Tensor,
    q_BQHK: Tensor,
    k_BSGK: Tensor,
    v_BSGK: Tensor,
    out_BQHK: Tensor,
    lse_BHQ: Tensor,
    causal: bool,
    mask: BlockMask | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """What one block adds to the gradients of its queries, keys and values.

    Args:
        grad_BQHK: gradient of the output over all blocks.
        q_BQHK, k_BSGK, v_BSGK, causal, mask: as in `attend_block`.
        out_BQHK, lse_BHQ: over all blocks; the latter finite.

    Returns:
        Gradients in the shapes and dtype of queries, keys and values.
    """
    grad, q, k, v, out = (x.transpose(1, 2) for x in (grad_BQHK, q_BQHK, k_BSGK, v_BSGK, out_BQHK))
    if q.device.type == "cpu":
        bias = None if mask is None else _bias(mask, q)
        grads = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k, v, out, lse_BHQ, 0.0, causal, attn_mask=bias
        )
    elif _can_use_flash(q, mask):
        grads = _cuda_flash_backward(grad, q, k, v, out, lse_BHQ, causal)
    else:
        grads = _cuda_efficient_backward(grad, q, k, v, out, lse_BHQ, causal, mask)
    dq, dk, dv = (x.transpose(1, 2) for x in grads)
    return dq, dk, dv


def _bias(mask: BlockMask, q: Tensor, align: int = 1) -> Tensor:
    """0 where allowed and -inf elsewhere, ``[B, 1, Q, S]``, with rows ``align`` elements apart."""
    num_keys = mask.allowed_B1QS.shape[-1]
    padded = F.pad(mask.allowed_B1QS, (0, -num_keys % align))
    return torch.where(padded, q.new_zeros(()), q.new_full((), -torch.inf))[..., :num_keys]


# ------------------------------------------------------------------ CUDA, in [B, heads, tokens, K]


def _can_use_flash(q: Tensor, mask: BlockMask | None) -> bool:
    return mask is None and q.dtype in (torch.float16, torch.bfloat16) and q.shape[-1] % 8 == 0


def _cuda_flash(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    out, lse, *_ = aten._scaled_dot_product_flash_attention(q, k, v, is_causal=causal)
    return out, lse


def _cuda_flash_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    # The states of the random generator are read where there is dropout, only.
    state, unused = q.new_empty(2, dtype=torch.uint64), q.new_empty((), dtype=torch.uint64)
    dq, dk, dv = aten._scaled_dot_product_flash_attention_backward(
        grad,
        q,
        k,
        v,
        out,
        lse.contiguous(),
        None,
        None,
        q.shape[2],
        k.shape[2],
        0.0,
        causal,
        state,
        unused,
    )
    return dq, dk, dv


def _cuda_efficient(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, mask: BlockMask | None
) -> tuple[Tensor, Tensor]:
    k, v = (_repeat_kv(x, q.shape[1]) for x in (k, v))
    out, lse, *_ = aten._scaled_dot_product_efficient_attention(
        q, k, v, _cuda_bias(mask, q), True, is_causal=causal
    )
    return out, lse[..., : q.shape[2]]  # it comes padded to a multiple of 32


def _cuda_efficient_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    causal: bool,
    mask: BlockMask | None,
) -> tuple[Tensor, Tensor, Tensor]:
    groups = k.shape[1]
    k, v = (_repeat_kv(x, q.shape[1]) for x in (k, v))
    unused = q.new_empty((), dtype=torch.int64)
    dq, dk, dv, _ = aten._scaled_dot_product_efficient_attention_backward(
        grad,
        q,
        k,
        v,
        _cuda_bias(mask, q),
        # Contiguous as [B, tokens, heads, K]: the kernel takes the stride of a token for granted.
        out.transpose(1, 2).contiguous().transpose(1, 2),
        # As forward pads it: the kernel loads aligned rows, and wants inf behind the queries.
        F.pad(lse, (0, -q.shape[2] % 32), value=torch.inf),
        unused,
        unused,
        0.0,
        [True, True, True, False],
        causal,
    )
    dk, dv = (x.unflatten(1, (groups, -1)).sum(2) for x in (dk, dv))
    return dq, dk, dv


def _repeat_kv(x: Tensor, num_heads: int) -> Tensor:
    """Key or value heads, repeated for the query heads that share them."""
    return x if x.shape[1] == num_heads else x.repeat_interleave(num_heads // x.shape[1], dim=1)


def _cuda_bias(mask: BlockMask | None, q: Tensor) -> Tensor | None:
    if mask is None:
        return None
    bias = _bias(mask, q, align=16)
    return bias.expand(-1, q.shape[1], -1, -1)
