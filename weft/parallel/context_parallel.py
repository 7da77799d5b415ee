"""Context parallelism: the tokens of every row are spread over the ranks of a group.

Everything in a transformer but attention looks at one token at a time, so a rank that holds
a slice of each row runs the model as it is.  Attention looks at all tokens before a token.
This file replaces the model's attention by one that sees the other ranks' keys and values,
and computes what one process would, forward and backward, to rounding.

*Who holds what.*  Causal attention costs a query as many products as there are tokens before
it.  With contiguous slices the last rank has nearly twice the average work and all wait for
it.  With ``balance`` a row is cut in 2 C pieces for C ranks, and rank r holds piece r and
piece 2 C - 1 - r, as in Llama 3: an early and a late one, and every rank has the same work.
Striped attention (arXiv:2311.09431) balances, too, by dealing tokens out one by one; but
between contiguous pieces of two ranks attention is all or nothing, and needs no mask.

*Three ways*, for different machines:

- ``ring`` (Liu et al., arXiv:2310.01889; with balance also known as zigzag): keys and values
  go round, one rank further each step, while attention to those of the step before is
  computed.  Point to point, hidden behind the computation if that is long enough; the memory
  of two slices.  Backward sends them round again, and their gradients after them.
- ``allgather`` (Llama 3, arXiv:2407.21783, section 3.3.2): one collective, then attention to
  the whole row.  Not hidden, but one exchange in place of C - 1, and fewer, larger kernels.
  Only this rank's slice is kept for backward, which gathers again, then reduce-scatters the
  gradients.
- ``ulysses`` (Jacobs et al., arXiv:2309.14509): an all-to-all trades tokens for heads, and each
  rank computes whole rows for a share of the heads, with the model's own attention, whatever
  that is.  A rank's traffic shrinks with C, where that of the others stays; but queries and
  outputs travel, too, so with few key heads and few ranks it is more.  C must divide the
  number of query heads.

The first two are the same computation, attention of some of this rank's queries to some of the keys
that it sees, block after block: see `weft.parallel.block_attention`.

Shapes in names: B rows, T tokens of a row, C ranks of the group, L = T / C tokens of this
rank, H query heads, G key/value heads, h and g a rank's share of them, K width of one head.
E = 2 B: rows of keys, then rows of values.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from weft.parallel.block_attention import (
    BlocksBySource,
    DocumentBlocks,
    zeros_float32,
    accumulate_block,
    accumulate_block_backward,
    allgather_blocks,
    init_output_and_lse,
    chunks_of_rank,
    ring_blocks,
    restrict_to_documents,
)
from weft.parallel.private import all_gather, reduce_scatter, run_function

CPMethod = Literal["ring", "allgather", "ulysses"]
Attend = Callable[[Tensor, Tensor, Tensor, Any], Tensor]
MakeMask = Callable[[Tensor], Any]


def apply_context_parallel(
    model: nn.Module,
    group: dist.ProcessGroup,
    method: CPMethod,
    balance: bool,
    *,
    compiled: bool,
) -> None:
    """Give ``model`` attention over all ranks of ``group``, in place.

    Afterwards every rank calls the model on its own tokens of each row, as `shard_sequence` takes them,
    *with their positions*: a rank cannot tell them from its tokens.

    Each submodule with an attribute ``attend``, called as ``attend(q_BLHK, k_BLGK, v_BLGK,
    mask)`` and returning ``[B, L, H, K]``, gets another.  *ring* and *allgather* compute plain
    causal attention, that of `weft.models.layers.attend`; *ulysses* calls the one that was
    there.  ``model.mask``, where there is one, is called with this rank's documents
    ``[B, L]``; from now on it asks the other ranks for theirs.  What it returns is only for
    ``attend``.

    Ranks must run the same forwards and backwards in the same order.  Communication is on
    ``group`` only, so groups do not wait for each other.

    Args:
        compiled: whether the model, or a part of it, may be compiled later.  False saves the
            half second of importing the compiler.

    Raises:
        ValueError: if the model has neither attribute.  And later, by ``attend``: if a row
            cannot be cut evenly, or C does not divide the number of query heads (*ulysses*).
    """
    if group.size() == 1:
        return
    attending = [module for module in model.modules() if hasattr(module, "attend")]
    # A pipeline stage may have no attention, but it still has a mask.
    if not attending and not hasattr(model, "mask"):
        raise ValueError(
            f"{type(model).__name__} has no submodule with an attribute `attend`, so context "
            "parallelism cannot reach its attention: see weft.models.layers.Attention"
        )

    functions: dict[str, tuple[Callable[..., Tensor], Callable[..., Any]]] = {
        "ring": (attend_ring, mask_ring),
        "allgather": (attend_allgather, mask_allgather),
        "ulysses": (attend_ulysses, mask_ulysses),
    }
    attend, mask = functions[method]

    def replace(module: nn.Module, name: str, function: Callable[..., Any]) -> None:
        function = partial(function, getattr(module, name), group, balance)
        if compiled:
            # Dynamo cannot follow the communication.  What is around it is compiled all the same.
            disable: Any = torch.compiler.disable
            function = disable(function, reason="communicates asynchronously")
        setattr(module, name, function)

    for module in attending:
        replace(module, "attend", attend)
    if hasattr(model, "mask"):
        replace(model, "mask", mask)


# --------------------------------------------------------------------------- who holds what


def shard_sequence(x_BT: Tensor, cp_rank: int, cp_size: int, balance: bool) -> Tensor:
    """One rank's tokens of each row.

    Args:
        x_BT: ``[B, T, ...]``: tokens, targets, documents, positions, activations.

    Returns:
        ``[B, T / cp_size, ...]``, contiguous.

    Raises:
        ValueError: if the row cannot be cut evenly.
    """
    num_pieces = 2 * cp_size if balance else cp_size
    if x_BT.shape[1] % num_pieces:
        raise ValueError(
            f"rows of {x_BT.shape[1]} tokens cannot be cut in {num_pieces} equal pieces for "
            f"{cp_size} ranks; make train.seq_len a multiple of {num_pieces}"
        )
    pieces = x_BT.chunk(num_pieces, dim=1)
    return torch.cat([pieces[i] for i in chunks_of_rank(cp_rank, cp_size, balance)], dim=1)


def unshard_sequence(x_CBL: Tensor, balance: bool) -> Tensor:
    """Whole rows ``[B, T, ...]`` of what all ranks hold, ``[C, B, L, ...]``: undoes `shard_sequence`."""
    if not balance:
        return torch.cat(x_CBL.unbind(), dim=1)
    heads, tails = x_CBL.chunk(2, dim=2)
    return torch.cat([*heads.unbind(), *reversed(tails.unbind())], dim=1)


# --------------------------------------------------------------------------- ring


class RingShift:
    """A tensor on its way to the next rank, and the one that comes from the rank before."""

    def __init__(self, x: Tensor, group: dist.ProcessGroup) -> None:
        rank, size = group.rank(), group.size()
        self.sent = x  # kept, and not to be written, until it has left
        self.received = torch.empty_like(x)
        self.works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, x, group=group, group_peer=(rank + 1) % size),
                dist.P2POp(dist.irecv, self.received, group=group, group_peer=(rank - 1) % size),
            ]
        )

    def wait(self) -> Tensor:
        """The tensor from the rank before; the one that was sent may be written now."""
        for work in self.works:
            work.wait()
        return self.received


class RingAttention(torch.autograd.Function):
    """At step i a rank has the keys and values of the rank i places before it."""

    @staticmethod
    def forward(
        ctx: Any,
        q_BLHK: Tensor,
        k_BLGK: Tensor,
        v_BLGK: Tensor,
        blocks: BlocksBySource,
        group: dist.ProcessGroup,
    ) -> Tensor:
        rank, size = group.rank(), group.size()
        out_BLHK, lse_BHL = init_output_and_lse(q_BLHK)
        kv_ELGK = torch.cat((k_BLGK, v_BLGK))
        for step in range(size):
            coming = RingShift(kv_ELGK, group) if step < size - 1 else None
            for block in blocks[(rank - step) % size]:
                accumulate_block(q_BLHK, kv_ELGK, block, out_BLHK, lse_BHL)
            if coming:
                kv_ELGK = coming.wait()
        out_BLHK = out_BLHK.to(q_BLHK.dtype)
        ctx.save_for_backward(q_BLHK, k_BLGK, v_BLGK, out_BLHK, lse_BHL)
        ctx.blocks, ctx.group = blocks, group
        return out_BLHK

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BLHK: Tensor) -> tuple[Tensor | None, ...]:
        q_BLHK, k_BLGK, v_BLGK, *whole = ctx.saved_tensors
        rank, size = ctx.group.rank(), ctx.group.size()
        dq_BLHK = zeros_float32(q_BLHK)
        kv_ELGK = torch.cat((k_BLGK, v_BLGK))
        grad_BLHK = grad_BLHK.contiguous()
        coming_gradient: RingShift | None = None
        for step in range(size):
            coming = RingShift(kv_ELGK, ctx.group) if step < size - 1 else None
            dkv_ELGK = zeros_float32(kv_ELGK)
            for block in ctx.blocks[(rank - step) % size]:
                accumulate_block_backward(grad_BLHK, (q_BLHK, *whole), kv_ELGK, block, dq_BLHK, dkv_ELGK)
            # What the ranks before had to add to the same gradient travelled meanwhile.
            if coming_gradient:
                dkv_ELGK += coming_gradient.wait()
            coming_gradient = RingShift(dkv_ELGK, ctx.group)
            if coming:
                kv_ELGK = coming.wait()
        assert coming_gradient
        # Once round: this rank's own.
        dk_BLGK, dv_BLGK = coming_gradient.wait().to(k_BLGK.dtype).chunk(2)
        return dq_BLHK.to(q_BLHK.dtype), dk_BLGK, dv_BLGK, None, None


def attend_ring(
    _: Attend,
    group: dist.ProcessGroup,
    balance: bool,
    q_BLHK: Tensor,
    k_BLGK: Tensor,
    v_BLGK: Tensor,
    mask: DocumentBlocks | None,
) -> Tensor:
    """The *ring* ``attend``; see `apply_context_parallel`."""
    if mask is None:
        blocks = ring_blocks(group.rank(), group.size(), q_BLHK.shape[1], balance)
    else:
        blocks = mask.blocks
    return run_function(RingAttention, q_BLHK, k_BLGK, v_BLGK, blocks, group)


def mask_ring(
    _: MakeMask, group: dist.ProcessGroup, balance: bool, documents_BL: Tensor
) -> DocumentBlocks:
    """The blocks of `attend_ring`, within documents."""
    blocks = ring_blocks(group.rank(), group.size(), documents_BL.shape[1], balance)
    return DocumentBlocks(restrict_to_documents(blocks, documents_BL, list(all_gather_stacked(documents_BL, group))))


# --------------------------------------------------------------------------- allgather


def all_gather_stacked(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """``[C, ...]``: the tensors of all ranks, without a gradient."""
    gathered = x.new_empty((group.size(), *x.shape))
    # gloo wants one after the other in the first dim, not a dim of their own.
    all_gather(gathered.flatten(0, 1), x.contiguous(), group=group)
    return gathered


def all_gather_kv(k_BLGK: Tensor, v_BLGK: Tensor, group: dist.ProcessGroup, balance: bool) -> Tensor:
    """Keys and values of whole rows, ``[2 B, T, G, K]``."""
    return unshard_sequence(all_gather_stacked(torch.cat((k_BLGK, v_BLGK)), group), balance)


class AllGatherAttention(torch.autograd.Function):
    """Gathers keys and values anew in backward, rather than keep whole rows of every layer."""

    @staticmethod
    def forward(
        ctx: Any,
        q_BLHK: Tensor,
        k_BLGK: Tensor,
        v_BLGK: Tensor,
        blocks: BlocksBySource,
        group: dist.ProcessGroup,
        balance: bool,
    ) -> Tensor:
        out_BLHK, lse_BHL = init_output_and_lse(q_BLHK)
        kv_ETGK = all_gather_kv(k_BLGK, v_BLGK, group, balance)
        for block in blocks[0]:
            accumulate_block(q_BLHK, kv_ETGK, block, out_BLHK, lse_BHL)
        out_BLHK = out_BLHK.to(q_BLHK.dtype)
        ctx.save_for_backward(q_BLHK, k_BLGK, v_BLGK, out_BLHK, lse_BHL)
        ctx.blocks, ctx.group, ctx.balance = blocks, group, balance
        return out_BLHK

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BLHK: Tensor) -> tuple[Tensor | None, ...]:
        q_BLHK, k_BLGK, v_BLGK, *whole = ctx.saved_tensors
        size = ctx.group.size()
        kv_ETGK = all_gather_kv(k_BLGK, v_BLGK, ctx.group, ctx.balance)
        dq_BLHK, dkv_ETGK = zeros_float32(q_BLHK), zeros_float32(kv_ETGK)
        grad_BLHK = grad_BLHK.contiguous()
        for block in ctx.blocks[0]:
            accumulate_block_backward(grad_BLHK, (q_BLHK, *whole), kv_ETGK, block, dq_BLHK, dkv_ETGK)
        # To each rank what belongs to its tokens, added up in float32.
        parts_CELGK = torch.stack([shard_sequence(dkv_ETGK, rank, size, ctx.balance) for rank in range(size)])
        dkv_ELGK = torch.empty_like(parts_CELGK[0])
        reduce_scatter(dkv_ELGK, parts_CELGK.flatten(0, 1), group=ctx.group)
        dk_BLGK, dv_BLGK = dkv_ELGK.to(k_BLGK.dtype).chunk(2)
        return dq_BLHK.to(q_BLHK.dtype), dk_BLGK, dv_BLGK, None, None, None


def attend_allgather(
    _: Attend,
    group: dist.ProcessGroup,
    balance: bool,
    q_BLHK: Tensor,
    k_BLGK: Tensor,
    v_BLGK: Tensor,
    mask: DocumentBlocks | None,
) -> Tensor:
    """The *allgather* ``attend``; see `apply_context_parallel`."""
    if mask is None:
        blocks = allgather_blocks(group.rank(), group.size(), q_BLHK.shape[1], balance)
    else:
        blocks = mask.blocks
    return run_function(AllGatherAttention, q_BLHK, k_BLGK, v_BLGK, blocks, group, balance)


def mask_allgather(
    _: MakeMask, group: dist.ProcessGroup, balance: bool, documents_BL: Tensor
) -> DocumentBlocks:
    """The blocks of `attend_allgather`, within documents."""
    blocks = allgather_blocks(group.rank(), group.size(), documents_BL.shape[1], balance)
    rows_BT = unshard_sequence(all_gather_stacked(documents_BL, group), balance)
    return DocumentBlocks(restrict_to_documents(blocks, documents_BL, [rows_BT]))


# --------------------------------------------------------------------------- ulysses


class AllToAll(torch.autograd.Function):
    """Part s of rank r becomes part r of rank s: its own inverse, so its own backward."""

    @staticmethod
    def forward(ctx: Any, x_C: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        received = torch.empty_like(x_C, memory_format=torch.contiguous_format)
        dist.all_to_all_single(received, x_C.contiguous(), group=group)
        return received

    @staticmethod
    def backward(ctx: Any, grad_C: Tensor) -> tuple[Tensor, None]:
        return run_function(AllToAll, grad_C, ctx.group), None


def attend_ulysses(
    attend: Attend,
    group: dist.ProcessGroup,
    balance: bool,
    q_BLHK: Tensor,
    k_BLGK: Tensor,
    v_BLGK: Tensor,
    mask: Any,
) -> Tensor:
    """The *ulysses* ``attend``; see `apply_context_parallel`.

    Raises:
        ValueError: if the ranks cannot share the query heads evenly.
    """
    size, num_heads, num_kv_heads = group.size(), q_BLHK.shape[2], k_BLGK.shape[2]
    if num_heads % size:
        raise ValueError(
            f"{size} context-parallel ranks cannot share {num_heads} query heads evenly; use "
            f"another parallel.cp, or parallel.cp_method ring or allgather"
        )
    # As few copies as give every rank equally many, and the ones that its queries read.
    copies = math.lcm(num_kv_heads, size) // num_kv_heads
    if copies > 1:
        k_BLGK, v_BLGK = (x.repeat_interleave(copies, dim=2) for x in (k_BLGK, v_BLGK))
    heads = (q_BLHK, k_BLGK, v_BLGK)
    # One message for all three: to each rank its share of the heads of each.
    shares_CBLhK = torch.stack(
        [
            torch.cat(parts, dim=2)
            for parts in zip(*(x.chunk(size, dim=2) for x in heads), strict=True)
        ]
    )
    rows_BThK = unshard_sequence(run_function(AllToAll, shares_CBLhK, group), balance)
    q_BThK, k_BTgK, v_BTgK = torch.split(rows_BThK, [x.shape[2] // size for x in heads], dim=2)
    out_BThK = attend(q_BThK, k_BTgK, v_BTgK, mask)
    out_CBLhK = torch.stack([shard_sequence(out_BThK, rank, size, balance) for rank in range(size)])
    heads_CBLhK = run_function(AllToAll, out_CBLhK, group)
    return heads_CBLhK.movedim(0, 2).flatten(2, 3)


def mask_ulysses(
    mask: MakeMask, group: dist.ProcessGroup, balance: bool, documents_BL: Tensor
) -> Any:
    """The model's own mask, of whole rows."""
    return mask(unshard_sequence(all_gather_stacked(documents_BL, group), balance))
