"""Context parallelism: the ranks of a group split the tokens of every sequence.

Except for attention, a transformer computes each token separately, so a rank that holds a slice of
each sequence runs the model unchanged.  This module replaces the model's attention by one that uses
the keys and values of all ranks.  Forward and backward equal one process's, to rounding.

`weft.parallel.token_split` says which tokens a rank has, so that all ranks have equal work.

*Methods*, for different machines:

- ``ring`` (Liu et al., arXiv:2310.01889; zigzag with load balance): each step sends keys and values
  to the next rank while it computes attention to those of the step before.  Point-to-point; hidden
  behind the computation if that takes long enough; needs the memory of two slices.  Backward sends
  them around the ring again, followed by their gradients.
- ``allgather`` (Llama 3, arXiv:2407.21783, section 3.3.2): one all-gather, then attention to the
  full sequence.  Not hidden, but one collective instead of C - 1 messages, and fewer, larger
  kernels.  Saves only this rank's slice for backward, which gathers again, then reduce-scatters the
  gradients.
- ``ulysses`` (Jacobs et al., arXiv:2309.14509): an all-to-all trades tokens for heads.  Each rank
  computes full sequences for some of the heads, with the model's own attention.  Traffic per rank
  shrinks with C, while that of the other methods is constant.  But it also moves queries and
  outputs, which is more traffic with few key heads and few ranks.  C must divide the number of
  query heads.

*ring* and *allgather* compute the same blocks of attention: see `weft.parallel.block_attention`.

Shapes in names: B sequences, T tokens of a sequence, C ranks of the group, L = T / C tokens of this
rank, H query heads, G key/value heads, h and g a rank's share of them, K head dim.  E = 2 B: keys,
then values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from functools import cache, partial
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from weft.config.schema import ParallelSection
from weft.models.attention import DEFAULT_OPTIONS, Attend, AttentionOptions
from weft.models.layers import run_function
from weft.models.varlen_attention import PackedDocuments
from weft.parallel.block_attention import (
    BLOCK,
    BlocksBySource,
    DocumentBlocks,
    VarlenBlocksBySource,
    accumulate_block,
    accumulate_block_grad,
    document_boundaries,
    empty_float32,
    has_varlen_blocks,
    merge_block,
)
from weft.parallel.collectives import all_reduce, with_adjoint
from weft.parallel.compile import RunCompiled, run_compiled
from weft.parallel.private import all_gather, reduce_scatter
from weft.parallel.token_split import (
    LoadBalance,
    Split,
    layer_limits,
    shard_sequence,
    split_sequences,
    unshard_sequence,
)

CPMethod = Literal["ring", "allgather", "ulysses"]


def apply_context_parallel(
    model: nn.Module,
    group: dist.ProcessGroup,
    method: CPMethod,
    load_balance: LoadBalance,
    *,
    compiled: bool,
    run_compiled: RunCompiled = run_compiled,
) -> None:
    """Replace the model's attention by attention over all ranks of ``group``.

    Afterwards every rank calls the model on its own tokens of each sequence (`shard_sequence`) and
    passes *their positions*, which a rank cannot infer from its tokens, and `shard_documents`.

    The function replaces the attribute ``attend`` of each submodule that has one: a function
    ``attend(q_BLHK, k_BLGK, v_BLGV, mask, options)`` that returns ``[B, L, H, V]``.  *ring* and
    *allgather* compute the same as `weft.models.attention.attend`; *ulysses* calls the replaced
    function.  ``model.mask``, if it exists, takes what `shard_documents` returns.  Only ``attend``
    uses its result.  ``model.sequence_shards`` becomes the number of ranks.

    Ranks must run the same forward and backward passes in the same order.  All communication is on
    ``group``, so groups do not wait for each other.

    Args:
        model: changed in place.
        group: the C context-parallel ranks.
        method: ring, allgather or ulysses; see the module docstring.
        load_balance: see `weft.parallel.token_split`.
        compiled: True if the model, or a part of it, is compiled later.  False saves the half
            second of importing the compiler.
        run_compiled: runs attention to a block.

    Raises:
        ValueError: if the model has neither attribute.  Later, ``attend`` raises it if a sequence
            does not split evenly, or C does not divide the number of query heads (*ulysses*).
    """
    if group.size() == 1:
        return
    attentions: list[Any] = [module for module in model.modules() if hasattr(module, "attend")]
    # A pipeline stage without attention still has a mask.
    if not attentions and not hasattr(model, "mask"):
        raise ValueError(
            f"{type(model).__name__} has no submodule with an attribute `attend`, so context "
            "parallelism cannot replace its attention: see weft.models.attention.Attention"
        )

    for module in attentions:
        if method == "ulysses":
            attend: Any = partial(attend_ulysses, module.attend, group, load_balance)
        else:
            attend = partial(attend_blockwise, method, group, load_balance, compiled, run_compiled)
        if compiled:
            # Dynamo cannot trace the communication; it compiles the code around it.
            disable: Any = torch.compiler.disable
            attend = disable(attend, reason="communicates asynchronously")
        module.attend = attend
    routers: list[Any] = [m for m in model.modules() if hasattr(m, "sum_over_shards")]
    for router in routers:
        router.sum_over_shards = lambda x: all_reduce(x, group)
        router.sequence_shards = group.size()
    if hasattr(model, "mask"):
        decoder: Any = model
        decoder.mask = partial(_local_mask, decoder.mask if method == "ulysses" else None)
        decoder.sequence_shards = group.size()


def _local_mask(mask: Callable[..., Any] | None, documents: Any, *args: Any) -> Any:
    """Return the mask of full sequences; None if ``attend`` must make it."""
    return documents if mask is None or documents is None else mask(documents, *args)


# --------------------------------------------------------------------------- slices


class TokenShards:
    """A rank's tokens of the sequences of a batch.

    Args:
        section: the section ``[parallel]``.
        rank: index of the rank, from 0.
        size: number of ranks, C.
        device: device of the model.
        model: its configuration, for the limits of its layers; None: they have none.
        varlen: see ``Plan.varlen_documents``.
    """

    def __init__(
        self,
        section: ParallelSection,
        rank: int,
        size: int,
        device: torch.device,
        model: Any = None,
        varlen: bool = False,
    ) -> None:
        self._method, self._load_balance = section.cp_method, section.cp_split
        self._rank, self._size, self._device = rank, size, device
        self._model, self._varlen = model, varlen

    def shard(self, batch: Any) -> tuple[Any, Split]:
        """Return this rank's part of a batch, and the tokens of every rank.

        The `weft.data.loader.Batch` has full sequences, with ids of documents on the host.  They
        become what `shard_documents` returns.  Without context parallelism there is no split.
        """
        split: Split = []
        documents = batch.documents_BT
        if documents is not None:
            documents = shard_documents(
                documents,
                self._method,
                self._rank,
                self._size,
                self._load_balance,
                self._device,
                self._model,
                self._varlen,
            )
        if self._size > 1:
            num_tokens = batch.tokens_BT.shape[1]
            split = split_of(documents, num_tokens, self._size, self._load_balance)
            batch = batch.map_tokens(lambda x_BT: shard_sequence(x_BT, split)[self._rank])
        return batch._replace(documents_BT=documents), split


def shard_documents(
    documents_BT: Tensor,
    method: CPMethod,
    cp_rank: int,
    cp_size: int,
    load_balance: LoadBalance,
    device: torch.device,
    model: Any = None,
    varlen: bool = False,
) -> Any:
    """Return the argument for a model's document ids on one rank.

    Args:
        documents_BT: ids of full sequences, on the host; a document is a run of equal ids.
        method: see `apply_context_parallel`.
        cp_rank: index of the rank, from 0.
        cp_size: number of ranks.
        load_balance: see `apply_context_parallel`.
        device: device of the model.
        model: its configuration, for the limits of its layers; None: they have none.
        varlen: see ``Plan.varlen_documents``.
    """
    if cp_size == 1 or method == "ulysses":
        ids_BT = documents_BT.to(device, non_blocking=True)
        if not varlen:
            return ids_BT
        return PackedDocuments(ids_BT, document_boundaries(documents_BT), model.attention_chunk)
    boundaries = document_boundaries(documents_BT)
    split = split_sequences(boundaries, cp_size, load_balance, layer_limits(model))
    kernel = device if varlen else None
    return DocumentBlocks(boundaries, cp_rank, split, method == "ring", kernel)


def split_of(documents: Any, num_tokens: int, size: int, load_balance: LoadBalance) -> Split:
    """Return the tokens of each rank, for the result of `shard_documents` or None."""
    if isinstance(documents, DocumentBlocks):
        return documents.split
    return split_sequences([[0, num_tokens]], size, load_balance)


def gather_values(x_BL: Tensor, group: dist.ProcessGroup, split: Split) -> Tensor:
    """Return a value of each token of full sequences, ``[B, T]``, on every rank.

    Every rank computes the same from the result, so backward takes each rank's slice: no sum.
    """
    return with_adjoint(
        lambda x_BL, group: unshard_sequence(all_gather_stacked(x_BL, group), split),
        lambda grad_BT, group: shard_sequence(grad_BT, split)[group.rank()],
    )(x_BL, group)


# --------------------------------------------------------------------------- ring


def ring_shift(x: Tensor, group: dist.ProcessGroup) -> Callable[[], Tensor]:
    """Send to the next rank; return a wait for the tensor of the previous rank."""
    rank, size, received = group.rank(), group.size(), torch.empty_like(x)
    works = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, x, group=group, group_peer=(rank + 1) % size),
            dist.P2POp(dist.irecv, received, group=group, group_peer=(rank - 1) % size),
        ]
    )

    def wait(sent: Tensor = x) -> Tensor:
        del sent  # until now it had to stay alive and unchanged
        for work in works:
            work.wait()
        return received

    return wait


class RingExchange:
    """At step i a rank has the keys and values of the rank i steps before it."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group

    def iter_sources(self, kv_ELGK: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Yield each source's index, keys and values; the next ones travel meanwhile."""
        rank, size = self.group.rank(), self.group.size()
        for step in range(size):
            wait = ring_shift(kv_ELGK, self.group) if step < size - 1 else None
            yield (rank - step) % size, kv_ELGK
            if wait:
                kv_ELGK = wait()

    def reduce_gradients(self, gradients: Iterable[Tensor]) -> Tensor:
        """Shift each source's sum of gradients after its keys and values; return our own."""
        wait: Callable[[], Tensor] | None = None
        for dkv_ELGK in gradients:
            # Add the previous ranks' sum of the same gradient, which arrived meanwhile.
            if wait:
                dkv_ELGK += wait()
            wait = ring_shift(dkv_ELGK, self.group)
        assert wait
        # After a full round this is the gradient of this rank's own keys and values.
        return wait()


# --------------------------------------------------------------------------- allgather


def all_gather_stacked(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """All-gather tensors to ``[C, ...]``, without autograd."""
    gathered = x.new_empty((group.size(), *x.shape))
    # gloo concatenates along dim 0, and cannot stack.
    all_gather(gathered.flatten(0, 1), x.contiguous(), group=group)
    return gathered


class AllGatherExchange:
    """All ranks have all keys and values, which backward gathers again."""

    def __init__(self, group: dist.ProcessGroup, split: Split) -> None:
        self.group, self.split = group, split

    def iter_sources(self, kv_ELGK: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Yield the only source: keys and values of full sequences."""
        yield 0, unshard_sequence(all_gather_stacked(kv_ELGK, self.group), self.split)

    def reduce_gradients(self, gradients: Iterable[Tensor]) -> Tensor:
        """Return the gradients of this rank's tokens, summed in float32."""
        (dkv_ETGK,) = gradients
        chunks_CELGK = shard_sequence(dkv_ETGK, self.split)
        dkv_ELGK = torch.empty_like(chunks_CELGK[0])
        reduce_scatter(dkv_ELGK, chunks_CELGK.flatten(0, 1), group=self.group)
        return dkv_ELGK


# --------------------------------------------------------------------------- ring and allgather


class BlockwiseAttention(torch.autograd.Function):
    """Attention of this rank's queries to all keys, source by source."""

    @staticmethod
    def forward(
        ctx: Any,
        q_BLHK: Tensor,
        k_BLGK: Tensor,
        v_BLGK: Tensor,
        sinks_H: Tensor | None,
        blocks: BlocksBySource | VarlenBlocksBySource,
        exchange: RingExchange | AllGatherExchange,
        compiled: bool,
        options: AttentionOptions,
        run_compiled: RunCompiled,
    ) -> Tensor:
        """Merge the attention to each block."""
        record_logits, options = options.record_logits, options._replace(record_logits=None)
        out_BLHK = empty_float32(q_BLHK)
        batch_size, num_local, num_heads, _ = q_BLHK.shape
        lse_BHL = out_BLHK.new_empty(batch_size, num_heads, num_local)
        for source, kv_ESGK in exchange.iter_sources(torch.cat((k_BLGK, v_BLGK))):
            for block in blocks[source]:
                if record_logits is not None:
                    record_logits.record_block(q_BLHK, kv_ESGK, block)
                run_compiled(
                    *(BLOCK, False, accumulate_block, q_BLHK, kv_ESGK, block, out_BLHK, lse_BHL),
                    *(compiled, options),
                )
        if sinks_H is not None:  # a key whose value is 0
            sinks_H1 = sinks_H.to(lse_BHL.dtype).unsqueeze(1)
            merge_block(out_BLHK, lse_BHL, torch.zeros_like(out_BLHK[:, :, :, :1]), sinks_H1)
        out_BLHK = out_BLHK.to(q_BLHK.dtype)
        ctx.save_for_backward(q_BLHK, k_BLGK, v_BLGK, sinks_H, out_BLHK, lse_BHL)
        ctx.blocks, ctx.exchange, ctx.compiled, ctx.options = blocks, exchange, compiled, options
        ctx.run_compiled = run_compiled
        return out_BLHK

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BLHK: Tensor) -> tuple[Tensor | None, ...]:
        """Receive keys and values again; sum their gradients over the ranks."""
        q_BLHK, k_BLGK, v_BLGK, sinks_H, out_BLHK, lse_BHL = ctx.saved_tensors
        dq_BLHK = empty_float32(q_BLHK).zero_()
        grad_BLHK, saved = grad_BLHK.contiguous(), (q_BLHK, out_BLHK, lse_BHL)

        def iter_gradients() -> Iterator[Tensor]:
            for source, kv_ESGK in ctx.exchange.iter_sources(torch.cat((k_BLGK, v_BLGK))):
                dkv_ESGK = empty_float32(kv_ESGK).zero_()
                sums = dq_BLHK, dkv_ESGK
                for block in ctx.blocks[source]:
                    ctx.run_compiled(
                        *(BLOCK, False, accumulate_block_grad, grad_BLHK, saved, kv_ESGK, block),
                        *(sums, ctx.compiled, ctx.options),
                    )
                yield dkv_ESGK

        dkv_ELGK = ctx.exchange.reduce_gradients(iter_gradients())
        dk_BLGK, dv_BLGK = dkv_ELGK.to(k_BLGK.dtype).chunk(2)
        dsinks_H = None
        if sinks_H is not None:
            share_BHL = (sinks_H.to(lse_BHL.dtype).unsqueeze(1) - lse_BHL).exp()
            products_BLH = (grad_BLHK * out_BLHK).sum(-1, dtype=lse_BHL.dtype)
            dsinks_H = -torch.einsum("bhl,blh->h", share_BHL, products_BLH).to(sinks_H.dtype)
        return dq_BLHK.to(q_BLHK.dtype), dk_BLGK, dv_BLGK, dsinks_H, *(None,) * 5


@cache
def _one_document(
    num_tokens: int, rank: int, size: int, load_balance: LoadBalance, ring: bool
) -> DocumentBlocks:
    boundaries = [[0, num_tokens]]
    return DocumentBlocks(boundaries, rank, split_sequences(boundaries, size, load_balance), ring)


def attend_blockwise(
    method: CPMethod,
    group: dist.ProcessGroup,
    load_balance: LoadBalance,
    compiled: bool,
    run_compiled: RunCompiled,
    q_BLHK: Tensor,
    k_BLGK: Tensor,
    v_BLGV: Tensor,
    mask: DocumentBlocks | None,
    options: AttentionOptions = DEFAULT_OPTIONS,
) -> Tensor:
    """Compute *ring* or *allgather* attention; see `apply_context_parallel`."""
    is_ring, sinks_H, value_dim = method == "ring", options.sinks_H, v_BLGV.shape[-1]
    scale = options.scale or q_BLHK.shape[-1] ** -0.5
    record_logits = options.record_logits if torch.is_grad_enabled() else None
    options = options._replace(sinks_H=None, scale=scale, record_logits=record_logits)
    rank, size = group.rank(), group.size()
    mask = mask or _one_document(q_BLHK.shape[1] * size, rank, size, load_balance, is_ring)
    exchange = RingExchange(group) if is_ring else AllGatherExchange(group, mask.split)
    compiled = (
        compiled and q_BLHK.device.type != "cpu"
    )  # on CPU, compilation costs more than it saves
    q, k, v = _pad_heads(q_BLHK, k_BLGK, v_BLGV)
    blocks = mask.select(options)
    if has_varlen_blocks(blocks):  # all tokens in a row
        q = q.flatten(0, 1).unsqueeze(0)
    arguments = blocks, exchange, compiled, options, run_compiled
    out = run_function(BlockwiseAttention, q, k, v, sinks_H, *arguments)
    return _narrow(out.view(*q_BLHK.shape[:3], -1), value_dim)


def _pad_heads(*heads: Tensor) -> list[Tensor]:
    """Pad heads with zeros to one width: values may be narrower than keys."""
    width = max(x.shape[-1] for x in heads)
    return [F.pad(x, (0, width - x.shape[-1])) if x.shape[-1] < width else x for x in heads]


def _narrow(x: Tensor, width: int) -> Tensor:
    return x[..., :width] if width < x.shape[-1] else x


# --------------------------------------------------------------------------- ulysses


def swap_chunks(x_C: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Swap chunk s of rank r and chunk r of rank s, in dim 0; its own inverse."""
    received = torch.empty_like(x_C, memory_format=torch.contiguous_format)
    dist.all_to_all_single(received, x_C.contiguous(), group=group)
    return received


exchange_chunks = with_adjoint(swap_chunks, swap_chunks)


def attend_ulysses(
    attend: Attend,
    group: dist.ProcessGroup,
    load_balance: LoadBalance,
    q_BLHK: Tensor,
    k_BLGK: Tensor,
    v_BLGV: Tensor,
    mask: Any,
    options: AttentionOptions = DEFAULT_OPTIONS,
) -> Tensor:
    """Compute *ulysses* attention; see `apply_context_parallel`.

    Raises:
        ValueError: if the ranks cannot share the query heads evenly.
    """
    size, num_heads, num_kv_heads = group.size(), q_BLHK.shape[2], k_BLGK.shape[2]
    if num_heads % size:
        raise ValueError(f"{size} context-parallel ranks do not divide {num_heads} query heads")
    # The fewest copies that give all ranks the same number of heads, and the heads that the
    # rank's queries attend to.
    copies = math.lcm(num_kv_heads, size) // num_kv_heads
    if copies > 1:
        k_BLGK, v_BLGV = (x.repeat_interleave(copies, dim=2) for x in (k_BLGK, v_BLGV))
    heads = _pad_heads(q_BLHK, k_BLGK, v_BLGV)
    # One all-to-all for all three: each rank gets its share of the heads of each.
    heads_CBLhK = torch.stack(
        [
            torch.cat(chunks, dim=2)
            for chunks in zip(*(x.chunk(size, dim=2) for x in heads), strict=True)
        ]
    )
    split = split_of(None, q_BLHK.shape[1] * size, size, load_balance)
    heads_BThK = unshard_sequence(exchange_chunks(heads_CBLhK, group), split)
    parts = torch.split(heads_BThK, [x.shape[2] // size for x in heads], dim=2)
    q_BThK, k_BTgK, v_BTgV = (
        _narrow(part, x.shape[-1]) for part, x in zip(parts, (q_BLHK, k_BLGK, v_BLGV), strict=True)
    )
    if options.sinks_H is not None:
        options = options._replace(sinks_H=options.sinks_H.chunk(size)[group.rank()])
    out_BThV = attend(q_BThK, k_BTgK, v_BTgV, mask, options)
    out_CBLhV = exchange_chunks(shard_sequence(out_BThV, split), group)
    return out_CBLhV.movedim(0, 2).flatten(2, 3)
