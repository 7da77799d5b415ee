"""Activation memory: what a block keeps for its backward pass, and what it computes again.

Autograd keeps of a forward pass whatever the backward pass will read.  For long rows that is most
of the memory.  Four ways to keep less of a block, all with the same gradients to the bit, because
what is computed again is computed again in the same way:

    none        everything is kept
    full        its input only (Chen et al., arXiv:1604.06174): one more forward pass
    selective   also what is dear to compute and small to keep: attention, what was reduced over
                ranks, and matrix products but for every n-th of them
    budget      also what saves most time for its bytes, up to a share of what ``none`` keeps

``every = n`` does so to each n-th block only.  *Offload* is apart from all that: what is kept
moves to the host's memory after a block's forward pass, and comes back, some blocks ahead, before
its backward pass; of all but ``none`` that is the inputs of the blocks.

Recomputation itself is torch's (`torch.utils.checkpoint`, not reentrant); here is only the choice.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from weft.config.schema import ActivationCheckpointSection
from weft.parallel.dtensor import to_local
from weft.parallel.private import set_activation_memory_budget

# Operators by name, as some exist on some devices or with some packages only.
MATMULS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::_scaled_mm", "aten::_grouped_mm")
ATTENTION = (
    "aten::_scaled_dot_product_",
    "aten::_flash_attention",
    "aten::_efficient_attention",
    "flex_attention",
)
COLLECTIVES = ("_c10d_functional::", "c10d_functional::", "weft::")

# Of these, what is done again: what is gathered is as large as all ranks' parts together, and to
# wait for what is there takes no time.
GATHERS = ("all_gather_into_tensor", "wait_tensor")

# Floating-point operations in the time that moves a byte: of an H100 in bfloat16, 989 TFLOP/s and
# 3.35 TB/s (NVIDIA H100 SXM data sheet).  Only the order of operators hangs on it.
FLOPS_PER_BYTE = 295
COLLECTIVE_COST = 8  # how much slower a byte comes from another GPU: 450 GB/s of NVLink, same source

# Whether the n-th call (from 0) of an operator of that name in a block is kept.
SavePolicy = Callable[[str, int], bool]


def apply_activation_checkpoint(
    blocks: Sequence[nn.Module], activation_checkpoint: ActivationCheckpointSection, compiled: bool
) -> None:
    """Make each block keep what ``activation_checkpoint`` says, in place; before it is compiled or sharded.

    Args:
        blocks: in the order of their use.
        compiled: whether they will be; then the compiler chooses what a budget pays for.
    """
    if compiled:
        set_activation_memory_budget(
            activation_checkpoint.memory_budget if activation_checkpoint.mode == "budget" else 1.0
        )
        if activation_checkpoint.mode == "budget":
            return
    if activation_checkpoint.mode == "none" or (
        activation_checkpoint.mode == "budget" and activation_checkpoint.memory_budget == 1
    ):
        return
    first: Any = None
    how: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}  # no dropout
    if activation_checkpoint.mode == "selective":
        how["context_fn"] = partial(
            _selective_contexts, partial(_should_save, activation_checkpoint.recompute_every_n_matmuls)
        )
    elif activation_checkpoint.mode == "budget":
        budget = MemoryBudget(activation_checkpoint.memory_budget)
        how["context_fn"], first = partial(_selective_contexts, budget.keeps), budget.trace_first_call

    # One method for all blocks: so the compiler sees that they are alike, and compiles once.
    def forward(self: Any, *args: Any) -> Any:
        once = type(self).forward
        if first is not None and (done := first(once, self, args)):
            return done[0]
        return checkpoint(once, self, *args, **how)

    for block in blocks[:: activation_checkpoint.every_n_layers]:
        block.forward = MethodType(forward, block)


def _should_save(products: int, name: str, call: int) -> bool:
    if name.startswith(MATMULS):
        return products == 0 or (call + 1) % products != 0
    return name.startswith(ATTENTION) or (name.startswith(COLLECTIVES) and not name.endswith(GATHERS))


def _selective_contexts(keep: SavePolicy) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    # torch 2.11 asks in the forward pass and when it is done again: each counts for itself.
    calls: Counter[tuple[bool, str]] = Counter()

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        name = op.name()
        call = calls[context.is_recompute, name]
        calls[context.is_recompute, name] += 1
        kept = keep(name, call)
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)  # type: ignore[no-untyped-call,no-any-return]


def is_parameter(tensor: Tensor) -> bool:
    """Or a view of one, or one in float8."""
    if _is_wrapper(tensor):
        return True
    owner = tensor if tensor._base is None else tensor._base
    return owner.is_leaf and owner.requires_grad


def frozen_param_storages(block: nn.Module) -> set[int]:
    """Of the parameters that are not trained: by itself a tensor does not tell that it is one."""
    frozen = (to_local(param.data) for param in block.parameters() if not param.requires_grad)
    return {param.untyped_storage()._cdata for param in frozen}


# --------------------------------------------------------------------------- a budget


class _OpCost(NamedTuple):
    """A call of an operator that makes something new."""

    key: tuple[str, int]  # its name, and which call of it in the block
    bytes: int  # of what it makes
    work: float  # in the time that moves a byte


class MemoryBudget:
    """Which operators' results are kept, chosen from what the first block does when first called.

    All blocks are alike.  Whatever is not kept is computed again from what is, so each operator
    saves its own work and no other's: a knapsack, filled by work saved per byte.
    """

    def __init__(self, share: float) -> None:
        """``share``: of the bytes that are kept without recomputation."""
        self._share = share
        self._kept: set[tuple[str, int]] | None = None

    def keeps(self, name: str, call: int) -> bool:
        """As `SavePolicy`; nothing before the choice."""
        return (name, call) in (self._kept or ())

    def trace_first_call(self, forward: Any, block: nn.Module, args: tuple[Any, ...]) -> Any:
        """Watch the first call, choose, and return (what comes of it,); None from then on."""
        if self._kept is not None or not torch.is_grad_enabled():
            return None
        given = {arg.untyped_storage()._cdata for arg in args if isinstance(arg, Tensor)}
        given |= frozen_param_storages(block)
        saved: dict[int, int] = {}

        def note(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if not is_parameter(tensor) and storage._cdata not in given:
                saved[storage._cdata] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor), _OpTracer() as ops:
            out = forward(block, *args)
        room = self._share * sum(saved.values())
        self._kept = set()
        for op in sorted(ops.made.values(), key=lambda op: op.bytes / max(op.work, 1)):
            if op.bytes <= room:
                room -= op.bytes
                self._kept.add(op.key)
        return (out,)


class _OpTracer(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes every operator whose result could be kept."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.made: dict[int, _OpCost] = {}  # by the storage of the result
        self._calls: Counter[str] = Counter()
        self._alive: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self._alive.append(out)  # so that no place in memory is used twice
        name = func.name()
        key = name, self._calls[name]
        self._calls[name] += 1
        read = list(_plain_tensors(tree_leaves((args, kwargs))))
        here = {x.untyped_storage()._cdata for x in read}
        if func._schema.is_mutable:
            for place in here:  # what is kept must not change
                self.made.pop(place, None)
            return out
        results = list(_plain_tensors(tree_leaves(out)))
        new = [x for x in results if x.untyped_storage()._cdata not in here]
        if new:
            size = sum(x.nbytes for x in new)
            work = size + sum(x.nbytes for x in read)
            if name.startswith(COLLECTIVES):
                work *= COLLECTIVE_COST
            op = _OpCost(key, size, max(work, _count_flops(name, read, results[0]) / FLOPS_PER_BYTE))
            self.made[new[0].untyped_storage()._cdata] = op
        return out


def _is_wrapper(value: object) -> bool:
    return bool(is_traceable_wrapper_subclass(value))


def _plain_tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    """The tensors among ``values``, of one with a scale its parts."""
    for value in values:
        if _is_wrapper(value):
            yield from _plain_tensors(getattr(value, name) for name in value.__tensor_flatten__()[0])
        elif isinstance(value, Tensor):
            yield value


def _count_flops(name: str, read: list[Tensor], out: Tensor) -> float:
    """Of a matrix product or causal attention; 0 for what is bound by memory."""
    if name.startswith(MATMULS):
        return 2.0 * out.numel() * next(x for x in read if x.dim() == out.dim()).shape[-1]
    if name.startswith(ATTENTION):  # [B, H, T, K]: half of two products with all keys
        return 2.0 * out.numel() * read[1].shape[-2]
    return 0.0
