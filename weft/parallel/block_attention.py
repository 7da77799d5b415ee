"""Blockwise attention of a rank's queries to all keys of a sequence.

A *block* pairs some of this rank's queries with some keys of one source.  A source is a rank of the
ring, or the all-gathered sequence (`weft.parallel.context_parallel`).  Blocks are merged through
their log-sum-exp in float32 (`weft.parallel.attention_ops`).  Causality excludes some blocks, which
are not in the list, and only document boundaries need masks.  The list depends only on numbers that
every rank knows.

*Documents.*  Ranks must know which tokens of other ranks are in the same document.  They gather the
document ids once per forward pass, in the model's ``mask``.  Its result drops blocks that span two
documents, keeps the fast kernel for blocks inside one document, and masks all others.

Shapes in names: B sequences, L tokens of this rank, S tokens of a source (in a block: the keys of
the block), Q queries of a block, H query heads, G key/value heads, K head dim.  E = 2 B: keys, then
values.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from weft.parallel.attention_ops import (
    BlockMask,
    attend_block,
    attend_block_backward,
    build_block_mask,
)
from weft.parallel.private import is_fake


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


def accumulate_block(
    q_BLHK: Tensor, kv_ESGK: Tensor, block: AttentionBlock, out_BLHK: Tensor, lse_BHL: Tensor
) -> None:
    """Merge a block into ``out_BLHK`` and ``lse_BHL`` (float32, initially 0 and -inf)."""
    queries, keys = block.queries, block.keys
    k_BSGK, v_BSGK = kv_ESGK[:, keys].chunk(2)
    new_BQHK, new_BHQ = attend_block(q_BLHK[:, queries], k_BSGK, v_BSGK, block.causal, block.mask)
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
        block.causal,
        block.mask,
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
