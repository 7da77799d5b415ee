"""Context parallelism: the ranks of a group split the tokens of every sequence.

Except for attention, a transformer computes each token separately, so a rank that holds a slice of
each sequence runs the model unchanged.  This module replaces the model's attention by one that uses
the keys and values of all ranks.  Forward and backward equal one process's, to rounding.

*Load balance.*  A causal query attends to all tokens before it.  With contiguous slices the last
rank has nearly twice the average work, and all others wait.  With ``load_balance`` a sequence is
split into 2 C chunks for C ranks, as in Llama 3.  Rank r holds chunks r and 2 C - 1 - r, one early
and one late, so all ranks have equal work.  Striped attention (arXiv:2311.09431) balances too, by
assigning tokens round-robin.  But attention between contiguous chunks of two ranks is either full
or empty, and needs no mask.

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
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from weft.models.layers import run_function
from weft.parallel.block_attention import (
    BlocksBySource,
    DocumentBlocks,
    accumulate_block,
    accumulate_block_grad,
    allgather_blocks,
    chunks_of_rank,
    document_blocks,
    empty_float32,
    ring_blocks,
)
from weft.parallel.collectives import with_adjoint
from weft.parallel.private import all_gather, reduce_scatter

CPMethod = Literal["ring", "allgather", "ulysses"]
Attend = Callable[[Tensor, Tensor, Tensor, Any], Tensor]


def apply_context_parallel(
    model: nn.Module,
    group: dist.ProcessGroup,
    method: CPMethod,
    load_balance: bool,
    *,
    compiled: bool,
) -> None:
    """Replace the model's attention by attention over all ranks of ``group``.

    Afterwards every rank calls the model on its own tokens of each sequence (`shard_sequence`) and
    passes *their positions*, which a rank cannot infer from its tokens, and `shard_documents`.

    The function replaces the attribute ``attend`` of each submodule that has one: a function
    ``attend(q_BLHK, k_BLGK, v_BLGK, mask)`` that returns ``[B, L, H, K]``.  *ring* and *allgather*
    compute plain causal attention, as `weft.models.layers.attend`; *ulysses* calls the replaced
    function.  ``model.mask``, if it exists, takes what `shard_documents` returns.  Only ``attend``
    uses its result.

    Ranks must run the same forward and backward passes in the same order.  All communication is on
    ``group``, so groups do not wait for each other.

    Args:
        model: changed in place.
        group: the C context-parallel ranks.
        method: ring, allgather or ulysses; see the module docstring.
        load_balance: give each rank two chunks of the sequence with equal total work.
        compiled: True if the model, or a part of it, is compiled later.  False saves the half
            second of importing the compiler.

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
            "parallelism cannot replace its attention: see weft.models.layers.Attention"
        )

    for module in attentions:
        if method == "ulysses":
            attend: Any = partial(attend_ulysses, module.attend, group, load_balance)
        else:
            attend = partial(attend_blockwise, method, group, load_balance, compiled)
        if compiled:
            # Dynamo cannot trace the communication; it compiles the code around it.
            disable: Any = torch.compiler.disable
            attend = disable(attend, reason="communicates asynchronously")
        module.attend = attend
    if method != "ulysses" and hasattr(model, "mask"):
        decoder: Any = model
        decoder.mask = lambda blocks: blocks


# --------------------------------------------------------------------------- slices


def shard_sequence(x_BT: Tensor, cp_rank: int, cp_size: int, load_balance: bool) -> Tensor:
    """Return one rank's tokens of each sequence.

    Args:
        x_BT: ``[B, T, ...]``: tokens, targets, document ids, positions or activations.
        cp_rank: index of the rank, from 0.
        cp_size: number of ranks, C.
        load_balance: see `apply_context_parallel`.

    Returns:
        ``[B, T / cp_size, ...]``, contiguous.

    Raises:
        ValueError: if the sequence does not split evenly.
    """
    num_chunks = 2 * cp_size if load_balance else cp_size
    if x_BT.shape[1] % num_chunks:
        raise ValueError(
            f"sequences of {x_BT.shape[1]} tokens do not split into {num_chunks} equal chunks for "
            f"{cp_size} context-parallel ranks; make train.seq_len a multiple of {num_chunks}"
        )
    chunks = x_BT.chunk(num_chunks, dim=1)
    return torch.cat([chunks[i] for i in chunks_of_rank(cp_rank, cp_size, load_balance)], dim=1)


def shard_documents(
    documents_BT: Tensor,
    method: CPMethod,
    cp_rank: int,
    cp_size: int,
    load_balance: bool,
    device: torch.device,
) -> Any:
    """Return the argument for a model's document ids on one rank.

    Args:
        documents_BT: ids of full sequences, on the host; a document is a run of equal ids.
        method: see `apply_context_parallel`.
        cp_rank: index of the rank, from 0.
        cp_size: number of ranks.
        load_balance: see `apply_context_parallel`.
        device: device of the model.
    """
    if cp_size == 1 or method == "ulysses":
        return documents_BT.to(device, non_blocking=True)
    is_ring = method == "ring"
    return DocumentBlocks(document_blocks(documents_BT, cp_rank, cp_size, load_balance, is_ring))


def unshard_sequence(x_CBL: Tensor, load_balance: bool) -> Tensor:
    """Undo `shard_sequence`: ``[C, B, L, ...]`` of all ranks to ``[B, T, ...]``."""
    if not load_balance:
        return torch.cat(x_CBL.unbind(), dim=1)
    heads, tails = x_CBL.chunk(2, dim=2)
    return torch.cat([*heads.unbind(), *reversed(tails.unbind())], dim=1)


# --------------------------------------------------------------------------- ring


class RingShift:
    """A pending send to the next rank, and receive from the previous rank."""

    def __init__(self, x: Tensor, group: dist.ProcessGroup) -> None:
        rank, size = group.rank(), group.size()
        self.sent = x  # must stay alive and unchanged until it is sent
        self.received = torch.empty_like(x)
        self.works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, x, group=group, group_peer=(rank + 1) % size),
                dist.P2POp(dist.irecv, self.received, group=group, group_peer=(rank - 1) % size),
            ]
        )

    def wait(self) -> Tensor:
        """Return the received tensor; the sent one may be overwritten now."""
        for work in self.works:
            work.wait()
        return self.received


class RingExchange:
    """At step i a rank has the keys and values of the rank i steps before it."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group

    def iter_sources(self, kv_ELGK: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Yield each source's index, keys and values; the next ones travel meanwhile."""
        rank, size = self.group.rank(), self.group.size()
        for step in range(size):
            kv_shift = RingShift(kv_ELGK, self.group) if step < size - 1 else None
            yield (rank - step) % size, kv_ELGK
            if kv_shift:
                kv_ELGK = kv_shift.wait()

    def reduce_gradients(self, gradients: Iterable[Tensor]) -> Tensor:
        """Shift each source's sum of gradients after its keys and values; return our own."""
        grad_shift: RingShift | None = None
        for dkv_ELGK in gradients:
            # Add the previous ranks' sum of the same gradient, which arrived meanwhile.
            if grad_shift:
                dkv_ELGK += grad_shift.wait()
            grad_shift = RingShift(dkv_ELGK, self.group)
        assert grad_shift
        # After a full round this is the gradient of this rank's own keys and values.
        return grad_shift.wait()


# --------------------------------------------------------------------------- allgather


def all_gather_stacked(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """All-gather tensors to ``[C, ...]``, without autograd."""
    gathered = x.new_empty((group.size(), *x.shape))
    # gloo concatenates along dim 0, and cannot stack.
    all_gather(gathered.flatten(0, 1), x.contiguous(), group=group)
    return gathered


class AllGatherExchange:
    """All ranks have all keys and values, which backward gathers again."""

    def __init__(self, group: dist.ProcessGroup, load_balance: bool) -> None:
        self.group, self.load_balance = group, load_balance

    def iter_sources(self, kv_ELGK: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Yield the only source: keys and values of full sequences."""
        yield 0, unshard_sequence(all_gather_stacked(kv_ELGK, self.group), self.load_balance)

    def reduce_gradients(self, gradients: Iterable[Tensor]) -> Tensor:
        """Return the gradients of this rank's tokens, summed in float32."""
        (dkv_ETGK,), size = gradients, self.group.size()
        chunks_CELGK = torch.stack(
            [shard_sequence(dkv_ETGK, rank, size, self.load_balance) for rank in range(size)]
        )
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
        blocks: BlocksBySource,
        exchange: RingExchange | AllGatherExchange,
        compiled: bool,
    ) -> Tensor:
        """Merge the attention to each block."""
        out_BLHK = empty_float32(q_BLHK)
        batch_size, num_local, num_heads, _ = q_BLHK.shape
        lse_BHL = out_BLHK.new_empty(batch_size, num_heads, num_local)
        for source, kv_ESGK in exchange.iter_sources(torch.cat((k_BLGK, v_BLGK))):
            for block in blocks[source]:
                accumulate_block(q_BLHK, kv_ESGK, block, out_BLHK, lse_BHL, compiled)
        out_BLHK = out_BLHK.to(q_BLHK.dtype)
        ctx.save_for_backward(q_BLHK, k_BLGK, v_BLGK, out_BLHK, lse_BHL)
        ctx.blocks, ctx.exchange, ctx.compiled = blocks, exchange, compiled
        return out_BLHK

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BLHK: Tensor) -> tuple[Tensor | None, ...]:
        """Receive keys and values again; sum their gradients over the ranks."""
        q_BLHK, k_BLGK, v_BLGK, *saved = ctx.saved_tensors
        dq_BLHK = empty_float32(q_BLHK).zero_()
        grad_BLHK = grad_BLHK.contiguous()

        def iter_gradients() -> Iterator[Tensor]:
            for source, kv_ESGK in ctx.exchange.iter_sources(torch.cat((k_BLGK, v_BLGK))):
                dkv_ESGK = empty_float32(kv_ESGK).zero_()
                sums = dq_BLHK, dkv_ESGK
                for block in ctx.blocks[source]:
                    accumulate_block_grad(
                        grad_BLHK, (q_BLHK, *saved), kv_ESGK, block, sums, ctx.compiled
                    )
                yield dkv_ESGK

        dkv_ELGK = ctx.exchange.reduce_gradients(iter_gradients())
        dk_BLGK, dv_BLGK = dkv_ELGK.to(k_BLGK.dtype).chunk(2)
        return dq_BLHK.to(q_BLHK.dtype), dk_BLGK, dv_BLGK, None, None, None


def attend_blockwise(
    method: CPMethod,
    group: dist.ProcessGroup,
    load_balance: bool,
    compiled: bool,
    q_BLHK: Tensor,
    k_BLGK: Tensor,
    v_BLGK: Tensor,
    mask: DocumentBlocks | None,
) -> Tensor:
    """Compute *ring* or *allgather* attention; see `apply_context_parallel`."""
    is_ring, qkv = method == "ring", (q_BLHK, k_BLGK, v_BLGK)
    if mask is not None:
        blocks = mask.blocks
    else:
        blocks_of_rank = ring_blocks if is_ring else allgather_blocks
        blocks = blocks_of_rank(group.rank(), group.size(), q_BLHK.shape[1], load_balance)
    exchange = RingExchange(group) if is_ring else AllGatherExchange(group, load_balance)
    compiled = compiled and q_BLHK.is_cuda  # on CPU, compilation costs more than it saves
    return run_function(BlockwiseAttention, *qkv, blocks, exchange, compiled)


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
    load_balance: bool,
    q_BLHK: Tensor,
    k_BLGK: Tensor,
    v_BLGK: Tensor,
    mask: Any,
) -> Tensor:
    """Compute *ulysses* attention; see `apply_context_parallel`.

    Raises:
        ValueError: if the ranks cannot share the query heads evenly.
    """
    size, num_heads, num_kv_heads = group.size(), q_BLHK.shape[2], k_BLGK.shape[2]
    if num_heads % size:
        raise ValueError(
            f"{size} context-parallel ranks do not divide {num_heads} query heads; use another "
            f"parallel.cp, or set parallel.cp_method to ring or allgather"
        )
    # The fewest copies that give all ranks the same number of heads, and the heads that the
    # rank's queries attend to.
    copies = math.lcm(num_kv_heads, size) // num_kv_heads
    if copies > 1:
        k_BLGK, v_BLGK = (x.repeat_interleave(copies, dim=2) for x in (k_BLGK, v_BLGK))
    heads = (q_BLHK, k_BLGK, v_BLGK)
    # One all-to-all for all three: each rank gets its share of the heads of each.
    heads_CBLhK = torch.stack(
        [
            torch.cat(chunks, dim=2)
            for chunks in zip(*(x.chunk(size, dim=2) for x in heads), strict=True)
        ]
    )
    heads_BThK = unshard_sequence(exchange_chunks(heads_CBLhK, group), load_balance)
    q_BThK, k_BTgK, v_BTgK = torch.split(heads_BThK, [x.shape[2] // size for x in heads], dim=2)
    out_BThK = attend(q_BThK, k_BTgK, v_BTgK, mask)
    out_CBLhK = torch.stack(
        [shard_sequence(out_BThK, rank, size, load_balance) for rank in range(size)]
    )
    out_CBLhK = exchange_chunks(out_CBLhK, group)
    return out_CBLhK.movedim(0, 2).flatten(2, 3)
