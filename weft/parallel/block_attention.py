"""Attention of a rank's queries to all keys of a row, in blocks: the arithmetic of two ways.

A *block* is some of this rank's queries and some of the keys that one source has for them: a
rank of the ring, or the gathered row (`weft.parallel.context_parallel`).  The results of blocks are merged
through their log-sum-exp in float32 (`weft.parallel.attention_ops`).  Blocks that causality
excludes are not in the list, no block has a mask unless documents need one, and the list is a
function of numbers that every rank knows.

*Documents.*  Which tokens share a document has to be known across ranks.  It is found once per
forward pass, where the model makes its mask, and goes to the blocks in the mask's place: a
block across documents is left out, a block within one keeps its fast kernel, and only what
is left is masked.

Shapes in names: B rows, L tokens of this rank, S tokens of a source of keys (in a block: those that
it takes), Q queries of a block, H query heads, G key/value heads, K width of one head.  E = 2 B:
rows of keys, then rows of values.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from weft.parallel.attention_ops import BlockMask, attend_block, attend_block_backward, build_block_mask
from weft.parallel.private import is_fake


def chunks_of_rank(cp_rank: int, cp_size: int, balance: bool) -> list[int]:
    """The pieces of a row that a rank holds, out of ``2 * cp_size``, or ``cp_size`` unbalanced."""
    return [cp_rank, 2 * cp_size - 1 - cp_rank] if balance else [cp_rank]


class AttentionBlock(NamedTuple):
    """Some of this rank's queries, and some of the keys that one source has for them.

    Attributes:
        queries: of this rank's L tokens.
        keys: of the source's S tokens.
        causal: query i of the block sees its keys 0 to i; otherwise it sees all of them.
        mask: where given, it alone says who sees what.
    """

    queries: slice
    keys: slice
    causal: bool
    mask: BlockMask | None = None


# By source.  In the first block that a query is in, it sees at least itself: from then on its
# log-sum-exp is finite.
BlocksBySource = list[list[AttentionBlock]]


class DocumentBlocks:
    """What ``mask`` hands to ``attend``.

    An object, which compiled code in between passes on as it is.  Into lists it would look,
    and be compiled anew for every pattern of documents.
    """

    def __init__(self, blocks: BlocksBySource) -> None:
        self.blocks = blocks


def ring_blocks(rank: int, size: int, num_local: int, balance: bool) -> BlocksBySource:
    """The blocks of one rank where each rank of the ring is a source, with its L tokens.

    Raises:
        ValueError: if a rank cannot have two equal pieces.
    """
    half = _chunk_size(num_local, size, balance)
    everything, first, second = slice(0, num_local), slice(0, half), slice(half, num_local)

    def of(source: int) -> list[AttentionBlock]:
        if source == rank:
            # Both pieces at once: the second is later than the first, as in a row.
            return [AttentionBlock(everything, everything, causal=True)]
        if source < rank:
            # Its first piece is earlier than both of ours, its second later than both.
            return [AttentionBlock(everything, first if balance else everything, causal=False)]
        # Its pieces lie between ours.
        return [AttentionBlock(second, everything, causal=False)] if balance else []

    return [of(source) for source in range(size)]


def allgather_blocks(rank: int, size: int, num_local: int, balance: bool) -> BlocksBySource:
    """The blocks of one rank where the only source is the whole row, in order.

    Raises:
        ValueError: if a rank cannot have two equal pieces.
    """
    width = _chunk_size(num_local, size, balance)
    blocks = []
    for i, piece in enumerate(chunks_of_rank(rank, size, balance)):
        queries, start = slice(i * width, (i + 1) * width), piece * width
        blocks.append(AttentionBlock(queries, slice(start, start + width), causal=True))
        if start:
            blocks.append(AttentionBlock(queries, slice(0, start), causal=False))
    return [blocks]


def _chunk_size(num_local: int, size: int, balance: bool) -> int:
    if balance and num_local % 2:
        raise ValueError(
            f"{num_local} tokens per rank cannot be cut in a head and a tail; make train.seq_len "
            f"a multiple of {2 * size}, or parallel.cp_load_balance false"
        )
    return num_local // 2 if balance else num_local


def restrict_to_documents(blocks: BlocksBySource, own_BL: Tensor, sources: list[Tensor]) -> BlocksBySource:
    """``blocks`` confined to documents.

    Args:
        own_BL: integers, the documents of this rank's tokens.
        sources: ``[B, S]`` each, those of the sources' tokens.
    """
    flat = [(source, block) for source, listed in enumerate(blocks) for block in listed]
    same = [
        own_BL[:, block.queries, None] == sources[source][:, None, block.keys]
        for source, block in flat
    ]
    if is_fake(own_BL):  # nobody knows; suppose the worst
        found = [(True, False)] * len(flat)
    else:
        # Asked for all blocks at once, because on a GPU it waits for the device.
        flags = torch.stack([torch.stack((x.any(), x.all())) for x in same])
        found = [(bool(some), bool(every)) for some, every in flags.tolist()]
    confined: BlocksBySource = [[] for _ in blocks]
    for (source, block), same_BQS, (some, every) in zip(flat, same, found, strict=True):
        if every:
            confined[source].append(block)
        elif some:
            allowed_BQS = same_BQS.tril() if block.causal else same_BQS
            mask = build_block_mask(allowed_BQS)
            confined[source].append(block._replace(causal=False, mask=mask))
    return confined


def accumulate_block(
    q_BLHK: Tensor, kv_ESGK: Tensor, block: AttentionBlock, out_BLHK: Tensor, lse_BHL: Tensor
) -> None:
    """Merge a block into ``out_BLHK`` and ``lse_BHL`` (float32, at the start 0 and -inf)."""
    queries, keys = block.queries, block.keys
    k_BSGK, v_BSGK = kv_ESGK[:, keys].chunk(2)
    new_BQHK, new_BHQ = attend_block(q_BLHK[:, queries], k_BSGK, v_BSGK, block.causal, block.mask)
    old_BHQ = lse_BHL[:, :, queries]
    sum_BHQ = torch.logaddexp(old_BHQ, new_BHQ)

    def weight(lse_BHQ: Tensor) -> Tensor:
        return (lse_BHQ - sum_BHQ).exp().transpose(1, 2).unsqueeze(-1)

    out_BLHK[:, queries].mul_(weight(old_BHQ)).add_(new_BQHK * weight(new_BHQ))
    old_BHQ.copy_(sum_BHQ)


def accumulate_block_backward(
    grad_BLHK: Tensor,
    saved: tuple[Tensor, Tensor, Tensor],
    kv_ESGK: Tensor,
    block: AttentionBlock,
    dq_BLHK: Tensor,
    dkv_ESGK: Tensor,
) -> None:
    """Add a block's share to ``dq_BLHK`` and ``dkv_ESGK`` (float32).

    ``saved``: queries, output and log-sum-exp over all blocks.
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
    for total_BSGK, part_BSGK in zip(dkv_ESGK[:, keys].chunk(2), (dk_BSGK, dv_BSGK), strict=True):
        total_BSGK += part_BSGK


def zeros_float32(x: Tensor) -> Tensor:
    """An accumulator of the shape of ``x``, in float32 at least."""
    return torch.zeros_like(
        x, dtype=torch.promote_types(x.dtype, torch.float32), memory_format=torch.contiguous_format
    )


def init_output_and_lse(q_BLHK: Tensor) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp before the first block."""
    out_BLHK = zeros_float32(q_BLHK)
    num_rows, num_local, num_heads, _ = q_BLHK.shape
    return out_BLHK, out_BLHK.new_full((num_rows, num_heads, num_local), -torch.inf)
