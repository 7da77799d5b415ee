"""Blockwise attention of a rank's queries to all keys of a sequence.

A *block* pairs some of this rank's queries with some keys of one source.  A source is a rank of the
ring, or the all-gathered sequence (`weft.parallel.context_parallel`).  Attention over blocks of
keys is exact if each block returns its output and its log-sum-exp, the logarithm of the softmax's
denominator.  The outputs are averaged in float32 with the weights ``exp(lse_of_block -
lse_of_all)``.  The backward pass of a block is that of flash attention, with the output and
log-sum-exp of *all* blocks in place of the block's own.

Causality excludes some blocks, which are not in the list.  No block needs a mask.

*Documents.*  A document is contiguous, so its queries in one chunk and its keys in an earlier chunk
are also a block without a mask, and inside one chunk it is causal.  The list follows from the
document ids, which are on the host: no rank waits for a device or for another rank.  Each document
needs a kernel.  *Ulysses* needs one for all, and is the better method for short documents.

*Operators.*  The public ``F.scaled_dot_product_attention`` neither returns the log-sum-exp nor has
such a backward, so this module calls private operators of PyTorch, as PyTorch's own ring attention
does (pytorch#122460).  A test compares their schemas, and no other module of weft may use them.

    used                                operator, after _scaled_dot_product_
    on CPU                              flash_attention_for_cpu
    where PyTorch prefers cuDNN         cudnn_attention
    in 16 bit, if K is divisible by 8   flash_attention
    else                                efficient_attention: one key head per query head

cuDNN prepares a plan for each new shape, which takes tens of milliseconds (pytorch#191576).  Blocks
of documents have other shapes in every step, so they use flash.  Some versions choose the plan of a
backward pass without regard to the strides of output and gradient (ATen/native/cudnn/MHA.cpp), so
both always have the same layout (pytorch#176915).

The CUDA half follows the schemas, the meta kernels (which a test runs) and their C++ sources
(ATen/native/transformers/cuda, ATen/native/cudnn).  It was never run on a GPU.

Shapes in names: B sequences, T tokens of a sequence, L tokens of this rank, S tokens of a source
(in a block: the keys of the block), Q queries of a block, H query heads, G key/value heads (query
head h reads head ``h // (H / G)``), K head dim.  E = 2 B: keys, then values.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise, product
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend

from weft.models.layers import is_fake
from weft.parallel.compile import run_compiled

aten = torch.ops.aten


# --------------------------------------------------------------------------- the list of blocks


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
        sequence: slice of one sequence, of which these are tokens of a document; else of all.
    """

    queries: slice
    keys: slice
    causal: bool
    sequence: slice = slice(None)


# One list per source.  The first block of each query is causal, and no other block is.
BlocksBySource = list[list[AttentionBlock]]


class DocumentBlocks:
    """The blocks that a model gets instead of document ids.

    Compiled code and FSDP pass an object through.  With lists, Dynamo would guard on their contents
    and recompile for every pattern of documents.
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


def document_blocks(
    documents_BT: Tensor, rank: int, size: int, load_balance: bool, ring: bool
) -> BlocksBySource:
    """Return `ring_blocks` or `allgather_blocks` without attention between documents.

    Args:
        documents_BT: ids of full sequences, on the host; a document is a run of equal ids.
        rank: index of the rank.
        size: number of ranks.
        load_balance: see `chunks_of_rank`.
        ring: each rank is a source; else the only source is the full sequence.
    """
    boundaries = _document_boundaries(documents_BT)
    num_local = documents_BT.shape[1] // size
    if all(len(starts) == 2 for starts in boundaries):  # one document in each sequence
        return (ring_blocks if ring else allgather_blocks)(rank, size, num_local, load_balance)
    width = _chunk_size(num_local, size, load_balance)
    chunks = [chunks_of_rank(source, size, load_balance) for source in range(size)]
    blocks: BlocksBySource = [[] for _ in range(size if ring else 1)]
    for i, chunk in enumerate(chunks[rank]):
        start, end = chunk * width, (chunk + 1) * width
        # Keys that are not later: begin and end in the sequence, and index of the first.
        keys = [[(0, start, 0), (start, end, start)]]
        if ring:
            keys = [
                [(c * width, (c + 1) * width, j * width) for j, c in enumerate(each) if c <= chunk]
                for each in chunks
            ]
        for sequence, starts in enumerate(boundaries):
            documents = [(b, e) for b, e in pairwise(starts) if b < end and e > start]
            for (b, e), (of_source, ranges) in product(documents, zip(blocks, keys, strict=True)):
                queries = _intersect(b, e, start, end, i * width)
                for first, last, index in ranges:
                    if max(b, first) < min(e, last):
                        block = AttentionBlock(
                            queries,
                            _intersect(b, e, first, last, index),
                            causal=first == start,
                            sequence=slice(sequence, sequence + 1),
                        )
                        of_source.append(block)
    for of_source in blocks:
        of_source.sort(key=lambda block: not block.causal)
    return blocks


def _intersect(begin: int, end: int, first: int, last: int, index: int) -> slice:
    """Return a document's slice of the tokens from ``first`` to ``last``.

    The token at position ``first`` has ``index``.
    """
    return slice(max(begin, first) - first + index, min(end, last) - first + index)


def _document_boundaries(documents_BT: Tensor) -> list[list[int]]:
    """Return where each document of each sequence begins, then T."""
    num_tokens = documents_BT.shape[1]
    if is_fake(documents_BT):  # no values: assume one document, which is most work
        return [[0, num_tokens]] * len(documents_BT)
    return [
        [0, *(np.flatnonzero(ids[1:] != ids[:-1]) + 1).tolist(), num_tokens]
        for ids in documents_BT.numpy()
    ]


# --------------------------------------------------------------------------- all blocks


def accumulate_block(
    q_BLHK: Tensor,
    kv_ESGK: Tensor,
    block: AttentionBlock,
    out_BLHK: Tensor,
    lse_BHL: Tensor,
    compiled: bool,
) -> None:
    """Merge a block into ``out_BLHK`` and ``lse_BHL``, which are float32 or wider."""
    index = block.sequence, block.queries
    k_BSGK, v_BSGK = _keys_and_values(kv_ESGK, block)
    new_BQHK, new_BHQ = attend_block(q_BLHK[index], k_BSGK, v_BSGK, block)
    out_BQHK, lse_BHQ = out_BLHK[index], lse_BHL[block.sequence, :, block.queries]
    if block.causal:  # the first of its queries
        out_BQHK.copy_(new_BQHK)
        lse_BHQ.copy_(new_BHQ)
    else:
        _sum(merge_block, block, compiled, out_BQHK, lse_BHQ, new_BQHK, new_BHQ)


def merge_block(out_BQHK: Tensor, lse_BHQ: Tensor, new_BQHK: Tensor, new_BHQ: Tensor) -> None:
    """Merge a block's output and log-sum-exp into those of earlier blocks, in place."""
    sum_BHQ = torch.logaddexp(lse_BHQ, new_BHQ)

    def weight(lse_BHQ: Tensor) -> Tensor:
        return (lse_BHQ - sum_BHQ).exp().transpose(1, 2).unsqueeze(-1)

    out_BQHK.mul_(weight(lse_BHQ)).add_(new_BQHK * weight(new_BHQ))
    lse_BHQ.copy_(sum_BHQ)


def accumulate_block_grad(
    grad_BLHK: Tensor,
    saved: tuple[Tensor, Tensor, Tensor],
    kv_ESGK: Tensor,
    block: AttentionBlock,
    sums: tuple[Tensor, Tensor],
    compiled: bool,
) -> None:
    """Add a block's gradients to ``sums``.

    Args:
        grad_BLHK: gradient of the output.
        saved: queries, and output and log-sum-exp over all blocks.
        kv_ESGK: keys and values of the block's source, concatenated in dim 0.
        block: queries and keys, as slices.
        sums: gradients of the queries, and of keys and values; float32, changed in place.
        compiled: True to compile the sums, if their shapes are the same in all steps.
    """
    (q_BLHK, out_BLHK, lse_BHL), (dq_BLHK, dkv_ESGK) = saved, sums
    index = block.sequence, block.queries
    k_BSGK, v_BSGK = _keys_and_values(kv_ESGK, block)
    lse_BHQ = lse_BHL[block.sequence, :, block.queries]
    new = attend_block_backward(
        grad_BLHK[index], q_BLHK[index], k_BSGK, v_BSGK, out_BLHK[index], lse_BHQ, block
    )
    sum_BSGK = _keys_and_values(dkv_ESGK, block)
    _sum(add_gradients, block, compiled, dq_BLHK[index], sum_BSGK, *new)


def add_gradients(
    dq_BQHK: Tensor, dkv_2BSGK: Tensor, new_BQHK: Tensor, dk_BSGK: Tensor, dv_BSGK: Tensor
) -> None:
    """Add a block's gradients to those of other blocks, in place."""
    dq_BQHK += new_BQHK
    for sum_BSGK, new_BSGK in zip(dkv_2BSGK.unbind(), (dk_BSGK, dv_BSGK), strict=True):
        sum_BSGK += new_BSGK


def _sum(
    function: Callable[..., None], block: AttentionBlock, compiled: bool, *args: Tensor
) -> None:
    """Call a function, compiled unless the blocks of each step have other shapes."""
    compiled = compiled and block.sequence == slice(None)
    run_compiled("sums over blocks of attention", compiled, function, *args)


def _keys_and_values(kv_ESGK: Tensor, block: AttentionBlock) -> Tensor:
    """Return keys and values of a block, or their gradients: ``[2, B, S, G, K]``."""
    return torch.unflatten(kv_ESGK, 0, (2, -1))[:, block.sequence, block.keys]


def empty_float32(x: Tensor) -> Tensor:
    """Return an uninitialized tensor of the shape of ``x``, in float32 or wider."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    return torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)


# --------------------------------------------------------------------------- one block


def attend_block(
    q_BQHK: Tensor, k_BSGK: Tensor, v_BSGK: Tensor, block: AttentionBlock
) -> tuple[Tensor, Tensor]:
    """Compute attention of ``Q`` queries to ``S`` keys.

    Args:
        q_BQHK: floating point; any strides with a contiguous last dim.
        k_BSGK: as ``q_BQHK``, with its dtype; G divides H.
        v_BSGK: as ``k_BSGK``.
        block: says which keys a query attends to; ``causal`` requires Q = S.

    Returns:
        The output ``[B, Q, H, K]`` in the dtype of the queries, and the log-sum-exp
        ``[B, H, Q]`` in float32 (float64 for float64).
    """
    q, k, v = (x.transpose(1, 2) for x in (q_BQHK, k_BSGK, v_BSGK))
    forward, _ = _choose_kernel(q, k, v, block)
    out, lse = forward(q, k, v, block.causal)
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
        lse_BHQ: log-sum-exp over all blocks.
        block: see `attend_block`.

    Returns:
        Gradients in the shapes and dtypes of queries, keys and values.
    """
    grad, q, k, v, out = (x.transpose(1, 2) for x in (grad_BQHK, q_BQHK, k_BSGK, v_BSGK, out_BQHK))
    _, backward = _choose_kernel(q, k, v, block)
    dq, dk, dv = (x.transpose(1, 2) for x in backward(grad, q, k, v, out, lse_BHQ, block.causal))
    return dq, dk, dv


Forward = Callable[[Tensor, Tensor, Tensor, bool], tuple[Tensor, Tensor]]
Backward = Callable[..., tuple[Tensor, Tensor, Tensor]]


def _choose_kernel(
    q: Tensor, k: Tensor, v: Tensor, block: AttentionBlock
) -> tuple[Forward, Backward]:
    if q.device.type == "cpu":
        return _cpu, _cpu_backward
    if q.dtype not in (torch.float16, torch.bfloat16) or q.shape[-1] % 8:
        return _efficient, _efficient_backward
    if block.sequence == slice(None):
        # In the order of `weft.train.setup.fastest_attention`.
        choice = torch._fused_sdp_choice(q, k, v, is_causal=block.causal, enable_gqa=True)
        if choice == SDPBackend.CUDNN_ATTENTION.value:
            return _cudnn, _cudnn_backward
    return _flash, _flash_backward


# --------------------------------------------------------- kernels, in [B, heads, tokens, K]


def _cpu(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    out, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, is_causal=causal)
    return out, lse


def _cpu_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, q, k, v, out, lse, 0.0, causal
    )
    return dq, dk, dv


def _cudnn(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    out, lse, *_ = aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, causal)
    assert lse.is_contiguous(), "unset TORCH_CUDNN_SDPA_AVOID_RECOMPILE, which changes the layout"
    return out, lse.squeeze(-1)


def _cudnn_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    grad, out, lse = _contiguous(grad), _contiguous(out), lse.contiguous().unsqueeze(-1)
    unused, lengths = q.new_empty((), dtype=torch.int64), (q.shape[2], k.shape[2])
    dq, dk, dv = aten._scaled_dot_product_cudnn_attention_backward(
        grad, q, k, v, out, lse, unused, unused, None, None, None, *lengths, 0.0, causal
    )
    return dq, dk, dv


def _flash(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    out, lse, *_ = aten._scaled_dot_product_flash_attention(q, k, v, is_causal=causal)
    return out, lse


def _flash_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    # The operator reads the state of the random generator only with dropout.
    state, unused = q.new_empty(2, dtype=torch.uint64), q.new_empty((), dtype=torch.uint64)
    lse, lengths = lse.contiguous(), (q.shape[2], k.shape[2])
    dq, dk, dv = aten._scaled_dot_product_flash_attention_backward(
        grad, q, k, v, out, lse, None, None, *lengths, 0.0, causal, state, unused
    )
    return dq, dk, dv


def _efficient(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    k, v = (_repeat_kv(x, q.shape[1]) for x in (k, v))
    out, lse, *_ = aten._scaled_dot_product_efficient_attention(
        q, k, v, None, True, is_causal=causal
    )
    return out, lse[..., : q.shape[2]]  # the operator pads it to a multiple of 32


def _efficient_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    groups, unused = k.shape[1], q.new_empty((), dtype=torch.int64)
    k, v = (_repeat_kv(x, q.shape[1]) for x in (k, v))
    # Padded as in forward: the kernel loads aligned rows, and expects inf after the queries.
    lse = F.pad(lse, (0, -q.shape[2] % 32), value=torch.inf)
    needs_grad = [True, True, True, False]
    dq, dk, dv, _ = aten._scaled_dot_product_efficient_attention_backward(
        grad, q, k, v, None, _contiguous(out), lse, unused, unused, 0.0, needs_grad, causal
    )
    dk, dv = (x.unflatten(1, (groups, -1)).sum(2) for x in (dk, dv))
    return dq, dk, dv


def _contiguous(x: Tensor) -> Tensor:
    """Return ``x`` contiguous as ``[B, tokens, heads, K]``, which some kernels assume."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def _repeat_kv(x: Tensor, num_heads: int) -> Tensor:
    """Repeat key or value heads for the query heads that share them."""
    return x if x.shape[1] == num_heads else x.repeat_interleave(num_heads // x.shape[1], dim=1)
