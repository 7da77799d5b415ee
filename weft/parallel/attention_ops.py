"""Attention of a block of queries to a block of keys, with its log-sum-exp.

Attention over blocks of keys is exact if each block returns its output and its log-sum-exp, the
logarithm of the softmax's denominator.  The outputs are then averaged with the weights
``exp(lse_of_block - lse_of_all)``.  The backward pass of a block is that of flash attention, with
the output and log-sum-exp of *all* blocks in place of the block's own.

The public ``F.scaled_dot_product_attention`` neither returns the log-sum-exp nor has such a
backward, so this module calls private operators of PyTorch.  A test compares their schemas, and no
other module of weft may use them.

    device   block                      operator, after _scaled_dot_product_
    cpu      any                        flash_attention_for_cpu
    cuda     no mask, 16 bit, K % 8=0   flash_attention: supports grouped queries
    cuda     other                      efficient_attention: bias in the dtype of the queries,
                                        rows padded to 16, one key head per query head

The CUDA half follows the schemas, the meta kernels (which a test runs) and their C++ sources
(ATen/native/transformers/cuda).  It was never run on a GPU.

Shapes in names: B sequences, Q queries and S keys of a block, H query heads, G key/value heads
(query head h reads head ``h // (H / G)``), K head dim.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

aten = torch.ops.aten


class BlockMask(NamedTuple):
    """The attention mask of one block.

    Attributes:
        allowed_B1QS: bool, True if the query may attend to the key.
        no_keys_B1Q: bool, True for queries without a key in this block.
    """

    allowed_B1QS: Tensor
    no_keys_B1Q: Tensor


def build_block_mask(allowed_BQS: Tensor) -> BlockMask:
    """Build the `BlockMask` of a bool tensor ``[B, Q, S]``."""
    return BlockMask(allowed_BQS.unsqueeze(1), ~allowed_BQS.any(dim=-1).unsqueeze(1))


def attend_block(
    q_BQHK: Tensor, k_BSGK: Tensor, v_BSGK: Tensor, causal: bool, mask: BlockMask | None
) -> tuple[Tensor, Tensor]:
    """Compute attention of ``Q`` queries to ``S`` keys.

    Args:
        q_BQHK: floating point; any strides with a contiguous last dim.
        k_BSGK: as ``q_BQHK``, with its dtype; G divides H.
        v_BSGK: as ``k_BSGK``.
        causal: query i attends to keys 0 to i; requires Q = S, and no mask.
        mask: None: every query attends to every key, unless ``causal``.

    Returns:
        The output ``[B, Q, H, K]`` in the dtype of the queries, and the log-sum-exp
        ``[B, H, Q]`` in float32 (float64 for float64).  For queries without a key they are 0 and
        -inf; the CPU operator itself returns 0 and 0.
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
        out = out.masked_fill(mask.no_keys_B1Q.unsqueeze(-1), 0)
        lse = lse.masked_fill(mask.no_keys_B1Q, -torch.inf)
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
    """Compute a block's contribution to the gradients of queries, keys and values.

    Args:
        grad_BQHK: gradient of the output over all blocks.
        q_BQHK: see `attend_block`.
        k_BSGK: see `attend_block`.
        v_BSGK: see `attend_block`.
        out_BQHK: output over all blocks.
        lse_BHQ: log-sum-exp over all blocks; finite.
        causal: see `attend_block`.
        mask: see `attend_block`.

    Returns:
        Gradients in the shapes and dtypes of queries, keys and values.
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
    """Return ``[B, 1, Q, S]``, 0 or -inf, with row strides divisible by ``align``."""
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
    # The operator reads the state of the random generator only with dropout.
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
    return out, lse[..., : q.shape[2]]  # the operator pads it to a multiple of 32


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
        # Contiguous as [B, tokens, heads, K]: the kernel assumes this stride of a token.
        out.transpose(1, 2).contiguous().transpose(1, 2),
        # Padded as in forward: the kernel loads aligned rows, and expects inf after the queries.
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
    """Repeat key or value heads for the query heads that share them."""
    return x if x.shape[1] == num_heads else x.repeat_interleave(num_heads // x.shape[1], dim=1)


def _cuda_bias(mask: BlockMask | None, q: Tensor) -> Tensor | None:
    if mask is None:
        return None
    bias = _bias(mask, q, align=16)
    return bias.expand(-1, q.shape[1], -1, -1)
