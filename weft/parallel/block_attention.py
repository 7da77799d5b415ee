"""Blockwise attention of a rank's queries to all keys of a sequence.

A *block* pairs some of this rank's queries with some keys of one source.  A source is a rank of the
ring, or the all-gathered sequence (`weft.parallel.context_parallel`).  Attention over blocks of
keys is exact if each block returns its output and its log-sum-exp, the logarithm of the softmax's
denominator.  The outputs are averaged in float32 with the weights ``exp(lse_of_block -
lse_of_all)``.  The backward pass of a block is that of flash attention, with the output and
log-sum-exp of *all* blocks in place of the block's own.

Merging a block is a chain of ten operators.  With ``compile.enable`` it is one compiled function,
on a GPU a kernel for each output.  Blocks of documents, whose shapes change, share a graph.

Causality excludes some blocks, which are not in the list.  A mask is needed only at the edge of a
sliding window.

*Documents.*  A document is contiguous, so its queries in one chunk and its keys in an earlier chunk
are also a block without a mask, and inside one chunk it is causal.  The list follows from the
document ids, which are on the host: no rank waits for a device or for another rank.  Layers with
attention in chunks see each chunk as a document.  Without a kernel for many lengths each document
needs a kernel.

*Many lengths.*  Where the rule of `weft.models.varlen_attention` allows it, its kernel computes all
documents of a ring step or of the gathered sequence in one call: a `VarlenBlock`.  The kernel takes
tokens in a row, so parts without keys or without queries are between the documents.  There is a
second call where a document has several ranges of queries whose keys overlap.  Windows need no
scores in memory.

*Windows.*  Queries are split into tiles.  Some keys before a tile are visible to all its queries,
without a mask; a tile's own keys too, if it is not longer than the window.  The other blocks, and
all blocks of layers with a limit of the scores, have their scores in memory (`_explicit`): no
kernel with a log-sum-exp takes such a mask or limit on every device.

*Sinks* are a logit in the denominator, which joins the log-sum-exp after the last block.

*Operators.*  The public ``F.scaled_dot_product_attention`` neither returns the log-sum-exp nor has
such a backward, so this module calls private operators of PyTorch, as PyTorch's own ring attention
does (pytorch#122460).  A test compares their schemas, and no other module of weft may use them.

    used                                operator, after _scaled_dot_product_
    on CPU                              flash_attention_for_cpu
    where PyTorch prefers cuDNN         cudnn_attention
    in 16 bit, if 8 divides K <= 256    flash_attention
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

from collections.abc import Callable, Iterator
from itertools import accumulate, chain, cycle, groupby, pairwise, product
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend

from weft.models.attention import DEFAULT_OPTIONS, AttentionOptions
from weft.models.host_reads import document_starts
from weft.models.varlen_attention import (
    Lengths,
    Limits,
    attend_parts,
    attend_parts_backward,
    find_lengths,
)
from weft.parallel.compile import run_compiled
from weft.parallel.token_split import Split, TokenRanges

aten = torch.ops.aten
# Labels of `run_compiled`.
BLOCK, SUMS = "a block of attention", "sums over blocks of attention"


# --------------------------------------------------------------------------- the list of blocks


class AttentionBlock(NamedTuple):
    """Some of this rank's queries, and some keys of one source.

    Attributes:
        queries: slice of this rank's L tokens.
        keys: slice of the source's S tokens.
        causal: query i of the block attends to its keys 0 to i; else to all.
        sequence: slice of one sequence, of which these are tokens of a document; else of all.
        first: query i does not attend to the keys before key ``i + first``; None: no such limit.
    """

    queries: slice
    keys: slice
    causal: bool
    sequence: slice = slice(None)
    first: int | None = None

    @property
    def has_new_shape(self) -> bool:
        """Return True if blocks of other steps have other shapes, as the documents do."""
        return self.sequence != slice(None)


class VarlenBlock(NamedTuple):
    """Many pairs of queries and keys, which one kernel takes.

    Attributes:
        queries: slice of this rank's tokens of all sequences, in a row.
        keys: slice of the source's tokens of all sequences, in a row.
        lengths: of the pairs, and of the tokens between them, which attend to nothing.
        causal: see `weft.models.varlen_attention.Limits`.
        before: see there.
        starts: no query has an earlier block.
        has_gaps: some queries have no keys in the block.
    """

    queries: slice
    keys: slice
    lengths: Lengths
    causal: bool
    before: int
    starts: bool
    has_gaps: bool


# One list per source, of blocks of one kind.  The first `AttentionBlock` of each query is causal,
# and no other is.
BlocksBySource = list[list[AttentionBlock]]
VarlenBlocksBySource = list[list[VarlenBlock]]


def has_varlen_blocks(blocks: BlocksBySource | VarlenBlocksBySource) -> bool:
    """Return True if the blocks are a `VarlenBlock` each."""
    return isinstance(next(chain.from_iterable(blocks)), VarlenBlock)


class DocumentBlocks:
    """The blocks that a model gets instead of document ids.

    Compiled code and FSDP pass an object through.  With lists, Dynamo would guard on their contents
    and recompile for every pattern of documents.

    Args:
        boundaries: see `list_blocks`.
        rank: index of the rank, from 0.
        split: tokens of each rank.
        ring: see `list_blocks`.
        varlen: device for whose kernel for many lengths blocks are listed; None: no such blocks.
    """

    def __init__(
        self,
        boundaries: list[list[int]],
        rank: int,
        split: Split,
        ring: bool,
        varlen: torch.device | None = None,
    ) -> None:
        self.split = split
        self._boundaries, self._rank, self._ring, self._varlen = boundaries, rank, ring, varlen
        self._lists: dict[Any, BlocksBySource | VarlenBlocksBySource] = {}

    def select(self, options: AttentionOptions) -> BlocksBySource | VarlenBlocksBySource:
        """Return the blocks of layers with these options; the first call lists them."""
        limits = options.window, options.chunk, options.softcap > 0
        if limits not in self._lists:
            self._lists[limits] = self._list(*limits)
        return self._lists[limits]

    def _list(
        self, window: int, chunk: int, softcap: bool
    ) -> BlocksBySource | VarlenBlocksBySource:
        documents, window = apply_limits(self._boundaries, window, chunk)
        place = self._rank, self.split, self._ring
        # One document in each sequence has the kernels of fixed shapes, unless it has a window.
        if self._varlen is not None and (window or any(len(starts) > 2 for starts in documents)):
            return list_varlen_blocks(documents, *place, window, self._varlen)
        return list_blocks(self._boundaries, *place, window, chunk, softcap)


MAX_TILE = 512  # queries of a block whose scores are in memory


def list_blocks(
    boundaries: list[list[int]],
    rank: int,
    split: Split,
    ring: bool,
    window: int = 0,
    chunk: int = 0,
    softcap: bool = False,
) -> BlocksBySource:
    """Return a rank's blocks, without attention between documents or beyond a window.

    Args:
        boundaries: where each document of each sequence begins, then T.
        rank: index of the rank.
        split: tokens of each rank.
        ring: each rank is a source; else the only source is the full sequence.
        window: see `weft.models.attention.AttentionOptions`.
        chunk: see there; chunks are counted from the start of a document.
        softcap: all scores are in memory, so blocks have at most `MAX_TILE` queries.
    """
    num_tokens = boundaries[0][-1]
    sequences = [slice(i, i + 1) for i in range(len(boundaries))]
    if all(len(starts) == 2 for starts in boundaries):  # one document in each sequence
        boundaries, sequences = boundaries[:1], [slice(None)]
    boundaries, window = apply_limits(boundaries, window, chunk)
    # Larger blocks would need larger tiles.
    pair = _pair_indices if ring and not (window or softcap) else _pair
    blocks: BlocksBySource = [[] for _ in range(len(split[0]) if ring else 1)]
    for sequence, starts, ranks in zip(sequences, boundaries, cycle(split), strict=False):
        for document in pairwise(starts):
            own = _pieces_of(document, ranks[rank])
            sources = ranks if ring else [[(0, num_tokens)]]
            for of_source, ranges in zip(blocks, sources, strict=True):
                theirs = _pieces_of(document, ranges)
                for queries, keys, causal in pair(own, theirs):
                    for part in _split(queries, keys, causal, window or num_tokens, softcap):
                        some = _shift(part.queries, queries.offset)
                        seen = _shift(part.keys, keys.offset)
                        block = part._replace(queries=some, keys=seen, sequence=sequence)
                        of_source.append(block)
    for of_source in blocks:
        of_source.sort(key=lambda block: not block.causal)
    return blocks


def apply_limits(
    boundaries: list[list[int]], window: int, chunk: int
) -> tuple[list[list[int]], int]:
    """Return boundaries with a document for each chunk, and a window or 0.

    A window that hides no keys becomes 0.

    Args:
        boundaries: see `list_blocks`.
        window: see there.
        chunk: see there.
    """
    num_tokens = boundaries[0][-1]
    if 0 < chunk < num_tokens:
        boundaries = [
            [*chain.from_iterable(range(b, e, chunk) for b, e in pairwise(starts)), num_tokens]
            for starts in boundaries
        ]
    return boundaries, window if window < num_tokens else 0


class _Piece(NamedTuple):
    """Tokens of a document: positions, and ``offset`` from them to indices."""

    start: int
    stop: int
    offset: int = 0


Pairs = Iterator[tuple[_Piece, _Piece, bool]]  # queries, keys, and True if both are the same tokens


def _pieces_of(document: tuple[int, int], ranges: TokenRanges) -> list[_Piece]:
    """Return the pieces of a document among the tokens of a rank or source."""
    indices = accumulate((end - start for start, end in ranges), initial=0)
    pieces = (
        _Piece(max(start, document[0]), min(end, document[1]), index - start)
        for (start, end), index in zip(ranges, indices, strict=False)
    )
    return [piece for piece in pieces if piece.start < piece.stop]


def _pair(own: list[_Piece], theirs: list[_Piece]) -> Pairs:
    """Yield this rank's queries with the same and earlier tokens of a source."""
    for queries, keys in product(own, theirs):
        if keys.start <= queries.start < keys.stop:
            yield queries, keys._replace(start=queries.start, stop=queries.stop), True
        if keys.start < queries.start:
            yield queries, keys._replace(stop=min(keys.stop, queries.start)), False


def _pair_indices(own: list[_Piece], theirs: list[_Piece]) -> Pairs:
    """Yield fewer, larger blocks: without a window, only the order of tokens matters.

    Yields indices.  A rank's tokens of a document are neighbors in memory.
    """

    def count_earlier(queries: _Piece) -> int:
        return sum(keys.stop - keys.start for keys in theirs if keys.start < queries.start)

    def join(pieces: list[_Piece]) -> _Piece:
        start, stop = pieces[0].start + pieces[0].offset, pieces[-1].stop + pieces[-1].offset
        return _Piece(start, stop)

    for num_keys, group in groupby(own, count_earlier) if own != theirs else ():
        if num_keys:
            start = join(theirs).start
            yield join(list(group)), _Piece(start, start + num_keys), False
    if own and own == theirs:
        yield join(own), join(own), True


def _split(
    queries: _Piece, keys: _Piece, causal: bool, window: int, must_tile: bool
) -> Iterator[AttentionBlock]:
    """Yield blocks of positions, for keys that are the queries or come before them."""
    must_tile = must_tile or queries.stop - keys.start > window
    tile = MAX_TILE if must_tile else queries.stop - queries.start
    for start in range(queries.start, queries.stop, tile):
        stop, end = min(start + tile, queries.stop), start if causal else keys.stop
        own = slice(start, stop)
        if causal:
            yield AttentionBlock(
                own, own, True, first=1 - window if stop - start > window else None
            )
        full = min(max(keys.start, stop - window), end)  # the last query sees the keys from here
        if full < end:
            yield AttentionBlock(own, slice(full, end), causal=False)
        first = max(keys.start, start - window + 1)  # the first query sees the keys from here
        if first < full:
            some = slice(start, min(stop, full + window - 1))  # others see none of them
            yield AttentionBlock(some, slice(first, full), False, first=start - window + 1 - first)


def _shift(positions: slice, offset: int) -> slice:
    return slice(positions.start + offset, positions.stop + offset)


# --------------------------------------------------------------------------- blocks of many lengths


class _Part(NamedTuple):
    """Queries and keys of a document, with the limits of a `VarlenBlock`."""

    queries: slice
    keys: slice
    causal: bool
    before: int


def list_varlen_blocks(
    boundaries: list[list[int]],
    rank: int,
    split: Split,
    ring: bool,
    window: int,
    device: torch.device,
) -> VarlenBlocksBySource:
    """Return a rank's blocks; the first one starts all its queries.

    Args:
        boundaries: where each document of each sequence begins, then T; a chunk is a document.
        rank: index of the rank.
        split: tokens of each rank.
        ring: see `list_blocks`.
        window: see there.
        device: of the queries.
    """
    num_tokens, num_ranks = boundaries[0][-1], len(split[0])
    num_local = num_tokens // num_ranks
    num_keys = num_local if ring else num_tokens  # of a source
    pair = _pair_in_ring if ring else _pair_all
    parts: list[list[_Part]] = [[] for _ in range(num_ranks if ring else 1)]
    for index, (starts, ranks) in enumerate(zip(boundaries, cycle(split), strict=False)):
        for document in pairwise(starts):
            own = _pieces_of(document, ranks[rank])
            sources = ranks if ring else [[(0, num_tokens)]]
            for of_source, ranges in zip(parts, sources, strict=True):
                theirs = _pieces_of(document, ranges)
                for part in pair(own, theirs, window):
                    queries = _shift(part.queries, index * num_local)
                    keys = _shift(part.keys, index * num_keys)
                    of_source.append(part._replace(queries=queries, keys=keys))
    groups = [_group_parts(of_source) for of_source in parts]
    return _build_blocks(groups, rank if ring else 0, num_local * len(boundaries), device)


def _pair_all(own: list[_Piece], theirs: list[_Piece], window: int) -> Iterator[_Part]:
    """Yield pieces of queries with all their keys; the last are the same tokens."""
    for queries in own:
        start = max(theirs[0].start, queries.start - window + 1) if window else theirs[0].start
        keys = _shift(slice(start, queries.stop), theirs[0].offset)
        yield _Part(_indices(queries), keys, True, window - 1)


def _pair_in_ring(own: list[_Piece], theirs: list[_Piece], window: int) -> Iterator[_Part]:
    """Yield queries with the same tokens or earlier ones of a source."""
    for queries, keys, causal in _pair(own, theirs) if window else _pair_indices(own, theirs):
        if causal or not window:
            yield _Part(_indices(queries), _indices(keys), causal, window - 1 if causal else -1)
        else:
            yield from _pair_with_window(queries, keys, window)


def _pair_with_window(queries: _Piece, keys: _Piece, window: int) -> Iterator[_Part]:
    """Yield queries with keys before them, as far as a window reaches."""
    keys = keys._replace(start=max(keys.start, queries.start - window + 1))
    queries = queries._replace(stop=min(queries.stop, keys.stop + window - 1))
    # With a limit before the last key, the kernel also has one after it: as many as there are keys.
    # The last key of the first queries is too far before the keys if there are more queries.  These
    # queries see all keys, so they are a part without a window.
    if queries.stop - queries.start > keys.stop - keys.start:
        edge = min(keys.start + window, queries.stop)
        if queries.start < edge and keys.start < keys.stop:
            yield _Part(_indices(queries._replace(stop=edge)), _indices(keys), False, -1)
        queries = queries._replace(start=edge)
    if queries.start < queries.stop and keys.start < keys.stop:
        before = keys.stop - queries.stop + window - 1
        yield _Part(_indices(queries), _indices(keys), False, before)


def _indices(piece: _Piece) -> slice:
    return slice(piece.start + piece.offset, piece.stop + piece.offset)


def _group_parts(parts: list[_Part]) -> list[list[_Part]]:
    """Group parts that have equal limits, and queries and keys in order."""
    groups: list[list[_Part]] = []
    for part in sorted(parts, key=lambda part: not part.causal):
        for group in groups:
            last = group[-1]
            in_order = last.queries.stop <= part.queries.start and last.keys.stop <= part.keys.start
            if in_order and last[2:] == part[2:]:
                group.append(part)
                break
        else:
            groups.append([part])
    return groups


def _build_blocks(
    groups: list[list[list[_Part]]], first: int, num_queries: int, device: torch.device
) -> VarlenBlocksBySource:
    """Return a block of each group; the first of source ``first`` has all queries."""
    listed, sizes = [], []
    for source, of_source in enumerate(groups):
        for i, group in enumerate(of_source):
            starts = source == first and i == 0
            queries = slice(group[0].queries.start, group[-1].queries.stop)
            queries = slice(0, num_queries) if starts else queries
            keys = slice(group[0].keys.start, group[-1].keys.stop)
            listed.append((source, group[0], queries, keys, starts))
            sizes.append(_list_sizes(group, queries, keys))
    blocks: VarlenBlocksBySource = [[] for _ in groups]
    all_lengths = find_lengths(sizes, device)
    for (source, part, queries, keys, starts), numbers, lengths in zip(
        listed, sizes, all_lengths, strict=True
    ):
        has_gaps = any(q > 0 and k == 0 for q, k in numbers)
        blocks[source].append(
            VarlenBlock(queries, keys, lengths, part.causal, part.before, starts, has_gaps)
        )
    return blocks


def _list_sizes(group: list[_Part], queries: slice, keys: slice) -> list[tuple[int, int]]:
    """Return the numbers of queries and keys of parts and of the gaps between."""
    sizes, query, key = [], queries.start, keys.start
    for part in group:
        sizes += [(part.queries.start - query, 0), (0, part.keys.start - key)]
        query, key = part.queries.stop, part.keys.stop
        sizes.append((query - part.queries.start, key - part.keys.start))
    sizes.append((queries.stop - query, 0))
    return [each for each in sizes if any(each)]


def document_boundaries(documents_BT: Tensor) -> list[list[int]]:
    """Return where each document of each sequence begins, then T."""
    num_tokens, boundaries = documents_BT.shape[1], list[list[int]]()
    for start in document_starts(documents_BT):
        position = start % num_tokens
        if position == 0:
            boundaries.append([])
        boundaries[-1].append(position)
    return [[*starts, num_tokens] for starts in boundaries]


# --------------------------------------------------------------------------- all blocks


def accumulate_block(
    q_BLHK: Tensor,
    kv_ESGK: Tensor,
    block: AttentionBlock | VarlenBlock,
    out_BLHK: Tensor,
    lse_BHL: Tensor,
    compiled: bool,
    options: AttentionOptions = DEFAULT_OPTIONS,
) -> None:
    """Merge a block into ``out_BLHK`` and ``lse_BHL``, which are float32 or wider.

    For a `VarlenBlock`, queries, output and log-sum-exp have one sequence, of all tokens in a row.
    """
    if isinstance(block, VarlenBlock):
        _accumulate_varlen(q_BLHK, kv_ESGK, block, out_BLHK, lse_BHL, compiled, options)
        return
    index = block.sequence, block.queries
    k_BSGK, v_BSGK = _keys_and_values(kv_ESGK, block)
    new_BQHK, new_BHQ = attend_block(q_BLHK[index], k_BSGK, v_BSGK, block, options)
    out_BQHK, lse_BHQ = out_BLHK[index], lse_BHL[block.sequence, :, block.queries]
    if block.causal:  # the first of its queries
        out_BQHK.copy_(new_BQHK)
        lse_BHQ.copy_(new_BHQ)
    else:
        sums = out_BQHK, lse_BHQ, new_BQHK, new_BHQ
        run_compiled(SUMS, compiled, merge_block, *sums, dynamic=block.has_new_shape)


LOWEST = -1e30  # log-sum-exp of no keys: finite, so that no difference of two is NaN


def _accumulate_varlen(
    q_1NHK: Tensor,
    kv_ESGK: Tensor,
    block: VarlenBlock,
    out_1NHK: Tensor,
    lse_1HN: Tensor,
    compiled: bool,
    options: AttentionOptions,
) -> None:
    q_QHK, limits = q_1NHK[0, block.queries], _limits(block, q_1NHK, options)
    k_SGK, v_SGK = _rows(kv_ESGK, block)
    new_QHK, new_HQ = attend_parts(q_QHK, k_SGK, v_SGK, block.lengths, limits)
    if block.has_gaps:
        new_HQ = new_HQ.masked_fill(new_HQ.isinf(), LOWEST)
    out_1QHK, lse_1HQ = out_1NHK[:, block.queries], lse_1HN[:, :, block.queries]
    if block.starts:
        out_1QHK.copy_(new_QHK)
        lse_1HQ.copy_(new_HQ)
    else:
        sums = out_1QHK, lse_1HQ, new_QHK.unsqueeze(0), new_HQ.unsqueeze(0)
        run_compiled(SUMS, compiled, merge_block, *sums, dynamic=True)


def _rows(kv_ESGK: Tensor, block: VarlenBlock) -> Tensor:
    """Return keys and values of a block, or their gradients: ``[2, keys, G, K]``."""
    return torch.unflatten(kv_ESGK, 0, (2, -1)).flatten(1, 2)[:, block.keys]


def _limits(block: VarlenBlock, q: Tensor, options: AttentionOptions) -> Limits:
    return Limits(options.scale or q.shape[-1] ** -0.5, block.causal, block.before)


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
    block: AttentionBlock | VarlenBlock,
    sums: tuple[Tensor, Tensor],
    compiled: bool,
    options: AttentionOptions = DEFAULT_OPTIONS,
) -> None:
    """Add a block's gradients to ``sums``.

    Args:
        grad_BLHK: gradient of the output.
        saved: queries, and output and log-sum-exp over all blocks.
        kv_ESGK: keys and values of the block's source, concatenated in dim 0.
        block: queries and keys, as slices.
        sums: gradients of the queries, and of keys and values; float32, changed in place.
        compiled: True to compile the sums.
        options: scale and softcap of the layer.
    """
    (q_BLHK, out_BLHK, lse_BHL), (dq_BLHK, dkv_ESGK) = saved, sums
    if isinstance(block, VarlenBlock):
        own, limits = block.queries, _limits(block, q_BLHK, options)
        grad_QHK, q_QHK, out_QHK = (x[0, own] for x in (grad_BLHK, q_BLHK, out_BLHK))
        k_SGK, v_SGK = _rows(kv_ESGK, block)
        lse_HQ = lse_BHL[0, :, own].contiguous()
        tensors = grad_QHK, q_QHK, k_SGK, v_SGK, out_QHK, lse_HQ
        new = attend_parts_backward(*tensors, block.lengths, limits)
        add_gradients(dq_BLHK[0, own], _rows(dkv_ESGK, block), *new)
        return
    index = block.sequence, block.queries
    k_BSGK, v_BSGK = _keys_and_values(kv_ESGK, block)
    lse_BHQ = lse_BHL[block.sequence, :, block.queries]
    new = attend_block_backward(
        grad_BLHK[index], q_BLHK[index], k_BSGK, v_BSGK, out_BLHK[index], lse_BHQ, block, options
    )
    sum_BSGK = _keys_and_values(dkv_ESGK, block)
    # Compiled, it has as many kernels: only where the shapes are the same in all steps.
    compiled = compiled and not block.has_new_shape
    run_compiled(SUMS, compiled, add_gradients, dq_BLHK[index], sum_BSGK, *new)


def add_gradients(
    dq_BQHK: Tensor, dkv_2BSGK: Tensor, new_BQHK: Tensor, dk_BSGK: Tensor, dv_BSGK: Tensor
) -> None:
    """Add a block's gradients to those of other blocks, in place."""
    dq_BQHK += new_BQHK
    for sum_BSGK, new_BSGK in zip(dkv_2BSGK.unbind(), (dk_BSGK, dv_BSGK), strict=True):
        sum_BSGK += new_BSGK


def _keys_and_values(kv_ESGK: Tensor, block: AttentionBlock) -> Tensor:
    """Return keys and values of a block, or their gradients: ``[2, B, S, G, K]``."""
    return torch.unflatten(kv_ESGK, 0, (2, -1))[:, block.sequence, block.keys]


def empty_float32(x: Tensor) -> Tensor:
    """Return an uninitialized tensor of the shape of ``x``, in float32 or wider."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    return torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)


# --------------------------------------------------------------------------- one block


def attend_block(
    q_BQHK: Tensor,
    k_BSGK: Tensor,
    v_BSGK: Tensor,
    block: AttentionBlock,
    options: AttentionOptions = DEFAULT_OPTIONS,
) -> tuple[Tensor, Tensor]:
    """Compute attention of ``Q`` queries to ``S`` keys.

    Args:
        q_BQHK: floating point; any strides with a contiguous last dim.
        k_BSGK: as ``q_BQHK``, with its dtype; G divides H.
        v_BSGK: as ``k_BSGK``.
        block: says which keys a query attends to; ``causal`` requires Q = S.
        options: scale and softcap of the layer; the block has its window and chunk.

    Returns:
        The output ``[B, Q, H, K]`` in the dtype of the queries, and the log-sum-exp
        ``[B, H, Q]`` in float32 (float64 for float64).
    """
    q, k, v = (x.transpose(1, 2) for x in (q_BQHK, k_BSGK, v_BSGK))
    forward, _, mode = _choose_kernel(q, k, v, block, options)
    out, lse = forward(q, k, v, **mode)
    return out.transpose(1, 2), lse


def attend_block_backward(
    grad_BQHK: Tensor,
    q_BQHK: Tensor,
    k_BSGK: Tensor,
    v_BSGK: Tensor,
    out_BQHK: Tensor,
    lse_BHQ: Tensor,
    block: AttentionBlock,
    options: AttentionOptions = DEFAULT_OPTIONS,
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
        options: see `attend_block`.

    Returns:
        Gradients in the shapes and dtypes of queries, keys and values.
    """
    grad, q, k, v, out = (x.transpose(1, 2) for x in (grad_BQHK, q_BQHK, k_BSGK, v_BSGK, out_BQHK))
    _, backward, mode = _choose_kernel(q, k, v, block, options)
    dq, dk, dv = (x.transpose(1, 2) for x in backward(grad, q, k, v, out, lse_BHQ, **mode))
    return dq, dk, dv


Forward = Callable[..., tuple[Tensor, Tensor]]
Backward = Callable[..., tuple[Tensor, Tensor, Tensor]]


def _choose_kernel(
    q: Tensor, k: Tensor, v: Tensor, block: AttentionBlock, options: AttentionOptions
) -> tuple[Forward, Backward, dict[str, Any]]:
    """Return a kernel, its backward, and the keywords of both."""
    mode: dict[str, Any] = {
        "is_causal": block.causal,
        "scale": options.scale or q.shape[-1] ** -0.5,
    }
    if block.first is not None or options.softcap:
        limits = {"first": block.first, "softcap": options.softcap}
        return _explicit, _explicit_backward, mode | limits
    if q.device.type == "cpu":
        return _cpu, _cpu_backward, mode
    if q.dtype not in (torch.float16, torch.bfloat16) or q.shape[-1] % 8 or q.shape[-1] > 256:
        return _efficient, _efficient_backward, mode
    if not block.has_new_shape:
        # In the order of `weft.training.setup.fastest_attention`.
        choice = torch._fused_sdp_choice(q, k, v, is_causal=block.causal, enable_gqa=True)
        if choice == SDPBackend.CUDNN_ATTENTION.value:
            return _cudnn, _cudnn_backward, mode
    return _flash, _flash_backward, mode


# --------------------------------------------------------- kernels, in [B, heads, tokens, K]


def _cpu(q: Tensor, k: Tensor, v: Tensor, **mode: Any) -> tuple[Tensor, Tensor]:
    out, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, **mode)
    return out, lse


def _cpu_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, **mode: Any
) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, q, k, v, out, lse, 0.0, **mode
    )
    return dq, dk, dv


def _cudnn(q: Tensor, k: Tensor, v: Tensor, **mode: Any) -> tuple[Tensor, Tensor]:
    out, lse, *_ = aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, **mode)
    assert lse.is_contiguous(), "unset TORCH_CUDNN_SDPA_AVOID_RECOMPILE, which changes the layout"
    return out, lse.squeeze(-1)


def _cudnn_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, **mode: Any
) -> tuple[Tensor, Tensor, Tensor]:
    grad, out, lse = _contiguous(grad), _contiguous(out), lse.contiguous().unsqueeze(-1)
    unused, lengths = q.new_empty((), dtype=torch.int64), (q.shape[2], k.shape[2])
    dq, dk, dv = aten._scaled_dot_product_cudnn_attention_backward(
        grad, q, k, v, out, lse, unused, unused, None, None, None, *lengths, 0.0, **mode
    )
    return dq, dk, dv


def _flash(q: Tensor, k: Tensor, v: Tensor, **mode: Any) -> tuple[Tensor, Tensor]:
    out, lse, *_ = aten._scaled_dot_product_flash_attention(q, k, v, **mode)
    return out, lse


def _flash_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, **mode: Any
) -> tuple[Tensor, Tensor, Tensor]:
    # The operator reads the state of the random generator only with dropout.
    state, unused = q.new_empty(2, dtype=torch.uint64), q.new_empty((), dtype=torch.uint64)
    lse, lengths = lse.contiguous(), (q.shape[2], k.shape[2])
    mode |= {"philox_seed": state, "philox_offset": unused}
    dq, dk, dv = aten._scaled_dot_product_flash_attention_backward(
        grad, q, k, v, out, lse, None, None, *lengths, 0.0, **mode
    )
    return dq, dk, dv


def _efficient(q: Tensor, k: Tensor, v: Tensor, **mode: Any) -> tuple[Tensor, Tensor]:
    k, v = (_repeat_kv(x, q.shape[1]) for x in (k, v))
    out, lse, *_ = aten._scaled_dot_product_efficient_attention(q, k, v, None, True, **mode)
    return out, lse[..., : q.shape[2]]  # the operator pads it to a multiple of 32


def _efficient_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, **mode: Any
) -> tuple[Tensor, Tensor, Tensor]:
    groups, unused = k.shape[1], q.new_empty((), dtype=torch.int64)
    k, v = (_repeat_kv(x, q.shape[1]) for x in (k, v))
    # Padded as in forward: the kernel loads aligned rows, and expects inf after the queries.
    lse = F.pad(lse, (0, -q.shape[2] % 32), value=torch.inf)
    needs_grad = [True, True, True, False]
    dq, dk, dv, _ = aten._scaled_dot_product_efficient_attention_backward(
        grad, q, k, v, None, _contiguous(out), lse, unused, unused, 0.0, needs_grad, **mode
    )
    dk, dv = (x.unflatten(1, (groups, -1)).sum(2) for x in (dk, dv))
    return dq, dk, dv


def _explicit(q: Tensor, k: Tensor, v: Tensor, **mode: Any) -> tuple[Tensor, Tensor]:
    scores = _scores(q, k, **mode)
    lse = scores.logsumexp(-1)
    out = torch.einsum("bgrqs,bgsk->bgrqk", (scores - lse.unsqueeze(-1)).exp(), v.to(lse.dtype))
    return out.flatten(1, 2).to(q.dtype), lse.flatten(1, 2)


def _explicit_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, **mode: Any
) -> tuple[Tensor, Tensor, Tensor]:
    scores, dtype, softcap = _scores(q, k, **mode), q.dtype, mode["softcap"]
    k, v = k.to(lse.dtype), v.to(lse.dtype)
    grad, q, out, lse = (_group_heads(x.to(lse.dtype), k) for x in (grad, q, out, lse))
    weights = (scores - lse.unsqueeze(-1)).exp()
    dweights = torch.einsum("bgrqk,bgsk->bgrqs", grad, v)
    dscores = weights * (dweights - (grad * out).sum(-1, keepdim=True)) * mode["scale"]
    if softcap:
        dscores *= 1 - (scores.clamp(min=-softcap) / softcap).square()  # hidden scores are -inf
    dq = torch.einsum("bgrqs,bgsk->bgrqk", dscores, k).flatten(1, 2)
    dk, dv = (torch.einsum("bgrqs,bgrqk->bgsk", x, y) for x, y in ((dscores, q), (weights, grad)))
    return dq.to(dtype), dk.to(dtype), dv.to(dtype)


def _scores(
    q: Tensor, k: Tensor, is_causal: bool, scale: float, first: int | None, softcap: float
) -> Tensor:
    """Return the float32 scores ``[B, G, H / G, Q, S]``, -inf where hidden."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    q, k = _group_heads(q.to(dtype), k), k.to(dtype)
    scores = torch.einsum("bgrqk,bgsk->bgrqs", q, k) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    keys_S, queries_Q = (torch.arange(n, device=q.device) for n in (k.shape[2], q.shape[3]))
    distances_QS = keys_S - queries_Q.unsqueeze(1)
    if is_causal:
        scores = scores.masked_fill(distances_QS > 0, -torch.inf)
    if first is not None:
        scores = scores.masked_fill(distances_QS < first, -torch.inf)
    return scores


def _group_heads(x: Tensor, k: Tensor) -> Tensor:
    """Split the heads of queries into those that share a key head."""
    return torch.unflatten(x, 1, (k.shape[1], -1))


def _contiguous(x: Tensor) -> Tensor:
    """Return ``x`` contiguous as ``[B, tokens, heads, K]``, which some kernels assume."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def _repeat_kv(x: Tensor, num_heads: int) -> Tensor:
    """Repeat key or value heads for the query heads that share them."""
    return x if x.shape[1] == num_heads else x.repeat_interleave(num_heads // x.shape[1], dim=1)
