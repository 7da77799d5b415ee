"""Blockwise attention of a rank's queries to all keys of a sequence.

A *block* pairs some of this rank's queries with some keys of one source.  A source is a rank of the
ring, or the all-gathered sequence (`weft.parallel.context_parallel`).  Attention over blocks of
keys is exact if each block returns its output and its log-sum-exp, the logarithm of the softmax's
denominator.  The outputs are averaged in float32 with the weights ``exp(lse_of_block -
lse_of_all)``.  The backward pass of a block is that of flash attention, with the output and
log-sum-exp of *all* blocks in place of the block's own.

Causality excludes some blocks, which are not in the list, and only document boundaries need masks.
The list depends only on numbers that every rank knows.

*Documents.*  Ranks must know which tokens of other ranks are in the same document.  They gather the
document ids once per forward pass, in the model's ``mask``.  Its result drops blocks that span two
documents, keeps the fast kernel for blocks inside one document, and masks all others.

*Operators.*  The public ``F.scaled_dot_product_attention`` neither returns the log-sum-exp nor has
such a backward, so this module calls private operators of PyTorch, as PyTorch's own ring attention
does (pytorch#122460).  A test compares their schemas, and no other module of weft may use them.

    device   block                      operator, after _scaled_dot_product_
    cpu      any                        flash_attention_for_cpu
    cuda     no mask, 16 bit, K % 8=0   flash_attention: supports grouped queries
    cuda     other                      efficient_attention: bias in the dtype of the queries,
                                        rows padded to 16, one key head per query head

The CUDA half follows the schemas, the meta kernels (which a test runs) and their C++ sources
(ATen/native/transformers/cuda).  It was never run on a GPU.

Shapes in names: B sequences, L tokens of this rank, S tokens of a source (in a block: the keys of
the block), Q queries of a block, H query heads, G key/value heads (query head h reads head
``h // (H / G)``), K head dim.  E = 2 B: keys, then values.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from weft.models.layers import is_fake

aten = torch.ops.aten


# --------------------------------------------------------------------------- the list of blocks


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


def chunks_of_rank(cp_rank: int, cp_size: int, load_balance: bool) -> list[int]:
    """Return the sequence chunks of a rank.

    A sequence has ``2 * cp_size`` chunks, or ``cp_size`` without load balance.
    """
    return [cp_rank, 2 * cp_size - 1 - cp_rank] if load_balance else [cp_rank]


class AttentionBlock(NamedTuple):
    """Some of this rank's queries, and some keys of one source.

    Attributes:
        queries: slice of this rank's L tokens.
        keys: slice of the source's S tokens.
        causal: query i of the block attends to its keys 0 to i; else to all.
        mask: if not None, replaces ``causal``.
    """

    queries: slice
    keys: slice
    causal: bool
    mask: BlockMask | None = None


# One list per source.  In the first block of a query, the query attends at least to its own key, so
# its log-sum-exp is finite from then on.
BlocksBySource = list[list[AttentionBlock]]


class DocumentBlocks:
    """The blocks that ``mask`` passes to ``attend``.

    Compiled code between the two passes an object through.  With lists, Dynamo would guard on their
    contents and recompile for every pattern of documents.
    """

    def __init__(self, blocks: BlocksBySource) -> None:
        self.blocks = blocks


def ring_blocks(rank: int, size: int, num_local: int, load_balance: bool) -> BlocksBySource:
    """Return a rank's blocks if each rank of the ring is a source of L tokens.

    Raises:
        ValueError: if a rank cannot have two equal chunks.
    """
    half = _chunk_size(num_local, size, load_balance)
    both, first, second = slice(0, num_local), slice(0, half), slice(half, num_local)

    def blocks_of(source: int) -> list[AttentionBlock]:
        if source == rank:
            # One block for both chunks: the second follows the first, as in a sequence.
            return [AttentionBlock(both, both, causal=True)]
        if source < rank:
            # Its first chunk is before both of ours, its second chunk after both.
            return [AttentionBlock(both, first if load_balance else both, causal=False)]
        # Its chunks are between ours.
        return [AttentionBlock(second, both, causal=False)] if load_balance else []

    return [blocks_of(source) for source in range(size)]


def allgather_blocks(rank: int, size: int, num_local: int, load_balance: bool) -> BlocksBySource:
    """Return a rank's blocks if the only source is the full sequence, in order.

    Raises:
        ValueError: if a rank cannot have two equal chunks.
    """
    width = _chunk_size(num_local, size, load_balance)
    blocks = []
    for i, chunk in enumerate(chunks_of_rank(rank, size, load_balance)):
        queries, start = slice(i * width, (i + 1) * width), chunk * width
        blocks.append(AttentionBlock(queries, slice(start, start + width), causal=True))
        if start:
            blocks.append(AttentionBlock(queries, slice(0, start), causal=False))
    return [blocks]


def _chunk_size(num_local: int, size: int, load_balance: bool) -> int:
    if load_balance and num_local % 2:
        raise ValueError(
            f"{num_local} tokens per rank cannot be split into two equal chunks; make "
            f"train.seq_len a multiple of {2 * size}, or set parallel.cp_load_balance=false"
        )
    return num_local // 2 if load_balance else num_local


def restrict_to_documents(
    blocks: BlocksBySource, own_BL: Tensor, sources: list[Tensor]
) -> BlocksBySource:
    """Return ``blocks`` without attention between documents.

    Args:
        blocks: blocks of this rank's queries, by source of the keys.
        own_BL: integer document ids of this rank's tokens.
        sources: document ids of each source's tokens, ``[B, S]``.
    """
    flat = [(source, block) for source, of_source in enumerate(blocks) for block in of_source]
    same = [
        own_BL[:, block.queries, None] == sources[source][:, None, block.keys]
        for source, block in flat
    ]
    if is_fake(own_BL):  # no values: assume the worst case, a mask for every block
        any_and_all = [(True, False)] * len(flat)
    else:
        # One transfer for all blocks, because on a GPU the host waits for the device.
        flags = torch.stack([torch.stack((x.any(), x.all())) for x in same])
        any_and_all = [(bool(any_same), bool(all_same)) for any_same, all_same in flags.tolist()]
    restricted: BlocksBySource = [[] for _ in blocks]
    for (source, block), same_BQS, (any_same, all_same) in zip(
        flat, same, any_and_all, strict=True
    ):
        if all_same:
            restricted[source].append(block)
        elif any_same:
            allowed_BQS = same_BQS.tril() if block.causal else same_BQS
            mask = build_block_mask(allowed_BQS)
            restricted[source].append(block._replace(causal=False, mask=mask))
    return restricted


# --------------------------------------------------------------------------- all blocks


def accumulate_block(
    q_BLHK: Tensor, kv_ESGK: Tensor, block: AttentionBlock, out_BLHK: Tensor, lse_BHL: Tensor
) -> None:
    """Merge a block into ``out_BLHK`` and ``lse_BHL`` (float32, initially 0 and -inf)."""
    queries, keys = block.queries, block.keys
    k_BSGK, v_BSGK = kv_ESGK[:, keys].chunk(2)
    new_BQHK, new_BHQ = attend_block(q_BLHK[:, queries], k_BSGK, v_BSGK, block)
    old_BHQ = lse_BHL[:, :, queries]
    sum_BHQ = torch.logaddexp(old_BHQ, new_BHQ)

    def weight(lse_BHQ: Tensor) -> Tensor:
        return (lse_BHQ - sum_BHQ).exp().transpose(1, 2).unsqueeze(-1)

    out_BLHK[:, queries].mul_(weight(old_BHQ)).add_(new_BQHK * weight(new_BHQ))
    old_BHQ.copy_(sum_BHQ)


def accumulate_block_grad(
    grad_BLHK: Tensor,
    saved: tuple[Tensor, Tensor, Tensor],
    kv_ESGK: Tensor,
    block: AttentionBlock,
    dq_BLHK: Tensor,
    dkv_ESGK: Tensor,
) -> None:
    """Add a block's gradients to ``dq_BLHK`` and ``dkv_ESGK`` (float32).

    Args:
        grad_BLHK: gradient of the output.
        saved: queries, and output and log-sum-exp over all blocks.
        kv_ESGK: keys and values of the block's source, concatenated in dim 0.
        block: queries and keys, as slices, and the mask.
        dq_BLHK: float32 sum for the queries; changed in place.
        dkv_ESGK: float32 sum for keys and values; changed in place.
    """
    q_BLHK, out_BLHK, lse_BHL = saved
    queries, keys = block.queries, block.keys
    k_BSGK, v_BSGK = kv_ESGK[:, keys].chunk(2)
    dq_BQHK, dk_BSGK, dv_BSGK = attend_block_backward(
        grad_BLHK[:, queries],
        q_BLHK[:, queries],
        k_BSGK,
        v_BSGK,
        out_BLHK[:, queries],
        lse_BHL[:, :, queries],
        block,
    )
    dq_BLHK[:, queries] += dq_BQHK
    for sum_BSGK, grad_BSGK in zip(dkv_ESGK[:, keys].chunk(2), (dk_BSGK, dv_BSGK), strict=True):
        sum_BSGK += grad_BSGK


def zeros_float32(x: Tensor) -> Tensor:
    """Return zeros of the shape of ``x``, in float32 or wider."""
    return torch.zeros_like(
        x, dtype=torch.promote_types(x.dtype, torch.float32), memory_format=torch.contiguous_format
    )


def init_output_and_lse(q_BLHK: Tensor) -> tuple[Tensor, Tensor]:
    """Return output and log-sum-exp before the first block: 0 and -inf."""
    out_BLHK = zeros_float32(q_BLHK)
    batch, num_local, num_heads, _ = q_BLHK.shape
    return out_BLHK, out_BLHK.new_full((batch, num_heads, num_local), -torch.inf)


# --------------------------------------------------------------------------- one block


def attend_block(
    q_BQHK: Tensor, k_BSGK: Tensor, v_BSGK: Tensor, block: AttentionBlock
) -> tuple[Tensor, Tensor]:
    """Compute attention of ``Q`` queries to ``S`` keys.

    Args:
        q_BQHK: floating point; any strides with a contiguous last dim.
        k_BSGK: as ``q_BQHK``, with its dtype; G divides H.
        v_BSGK: as ``k_BSGK``.
        block: says which keys a query attends to; ``causal`` requires Q = S, and no mask.

    Returns:
        The output ``[B, Q, H, K]`` in the dtype of the queries, and the log-sum-exp
        ``[B, H, Q]`` in float32 (float64 for float64).  For queries without a key they are 0 and
        -inf; the CPU operator itself returns 0 and 0.
    """
    causal, mask = block.causal, block.mask
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
    block: AttentionBlock,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute a block's contribution to the gradients of queries, keys and values.

    Args:
        grad_BQHK: gradient of the output over all blocks.
        q_BQHK: see `attend_block`.
        k_BSGK: see `attend_block`.
        v_BSGK: see `attend_block`.
        out_BQHK: output over all blocks.
        lse_BHQ: log-sum-exp over all blocks; finite.
        block: see `attend_block`.

    Returns:
        Gradients in the shapes and dtypes of queries, keys and values.
    """
    causal, mask = block.causal, block.mask
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
