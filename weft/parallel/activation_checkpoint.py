"""Activation checkpointing: save or recompute a block's activations.

For long sequences, saved activations take most of the memory.  Each mode saves less of a block, and
all give bitwise equal gradients, because recomputation repeats the same operators:

    none        save all
    full        save the input only (Chen et al., arXiv:1604.06174): one more forward pass
    selective   also save results that are costly to compute and small: attention, reduced results
                of collectives, and all matmuls but every n-th
    budget      also save what avoids most work per byte, up to a share of the bytes of ``none``

*budget* saves the results of the same collectives as *selective*.  Ranks can have different numbers
of tokens of experts, and of columns of weights, but must repeat the same collectives.

``every_n_layers = n`` applies the mode to every n-th block only.  Offload is a separate option: see
`weft.parallel.activation_offload`.

The recomputation itself is torch's (`torch.utils.checkpoint`, not reentrant).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from weft.config.schema import ActivationCheckpointSection
from weft.parallel.dtensor import is_wrapper, plain_tensors, to_local
from weft.parallel.private import select_saved_results, set_activation_memory_budget

# Operators by name, because some exist only on some devices or with some packages.
MATMULS = (
    *("aten::mm", "aten::addmm", "aten::bmm", "aten::_scaled_mm", "aten::_grouped_mm"),
    "weft::scaled_grouped_mm",
)
ATTENTION = (
    "aten::_scaled_dot_product_",
    "aten::_flash_attention",
    "aten::_efficient_attention",
    "flex_attention",
)
COLLECTIVES = ("_c10d_functional::", "c10d_functional::")

# Collectives that *selective* repeats: a gathered tensor is as large as the shards of all ranks
# together, and waiting for a finished collective takes no time.
GATHERS = ("all_gather_into_tensor", "wait_tensor")

# Floating-point operations in the time that moves one byte: of an H100 in bfloat16, 989 TFLOP/s and
# 3.35 TB/s (NVIDIA H100 SXM data sheet).  Only the ranking of operators depends on it.
FLOPS_PER_BYTE = 295
# Cost of a byte from another GPU, relative to memory: 450 GB/s of NVLink, same source.
COLLECTIVE_COST = 8

# Return True to save the result of the n-th call (from 0) of the operator of that name in a block.
SavePolicy = Callable[[str, int], bool]


def apply_activation_checkpoint(
    blocks: Sequence[nn.Module], section: ActivationCheckpointSection, compiled: bool
) -> None:
    """Checkpoint the activations of each block, in place.

    Call it before the blocks are sharded.  If a block is one graph of torch.compile, call it before
    the block is compiled; if the graph breaks, after that: see `weft.parallel.apply`.

    Args:
        blocks: in the order of their use.
        section: the section ``[activation_checkpoint]``.
        compiled: True if the blocks are compiled; then the compiler implements *budget*.
    """
    if compiled:
        set_activation_memory_budget(section.memory_budget if section.mode == "budget" else 1.0)
        if section.mode == "budget":
            return
    if section.mode == "none" or (section.mode == "budget" and section.memory_budget == 1):
        return
    budgets: dict[Any, MemoryBudget] = {}  # by kind of block
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}  # no dropout
    if section.mode == "selective":
        policy = partial(_should_save, section.recompute_every_n_matmuls)
        options["context_fn"] = partial(_selective_contexts, policy)
    elif section.mode == "budget":
        for block in blocks:
            budget = budgets.setdefault(_block_kind(block), MemoryBudget(section.memory_budget))
            vars(block)["memory_budget"] = budget

    # One function for all blocks, so that the compiler sees that they are alike, and compiles once.
    def forward(self: Any, *args: Any) -> Any:
        original = type(self).forward
        if not budgets:
            return checkpoint(original, self, *args, **options)
        if traced := self.memory_budget.trace_first_call(original, self, args):
            return traced[0]
        contexts = partial(_selective_contexts, self.memory_budget.should_save)
        return checkpoint(original, self, *args, context_fn=contexts, **options)

    for block in blocks[:: section.every_n_layers]:
        if compiled_forward := vars(block).get("forward"):
            block.forward = partial(checkpoint, compiled_forward, **options)
        else:
            block.forward = MethodType(forward, block)


def selective_compile_options(
    blocks: Sequence[nn.Module], section: ActivationCheckpointSection
) -> dict[nn.Module, dict[str, Any]]:
    """Return options of torch.compile for blocks whose graph breaks.

    And for their submodules.  The compiler then implements *selective* in each part of the graph.
    What runs between the parts saves what its backward pass needs.  Empty for other modes.
    """
    if section.mode != "selective":
        return {}
    set_activation_memory_budget(1.0)
    every_n = section.recompute_every_n_matmuls

    def policy() -> Callable[[str], bool]:
        calls: Counter[str] = Counter()
        return lambda name: _should_save(every_n, name, _count(calls, name))

    cache_key = f"{Path(__file__).read_text('utf-8')} {every_n}"
    options = select_saved_results(policy, cache_key)
    selected = blocks[:: section.every_n_layers]
    return {module: options for block in selected for module in block.modules()}


def _block_kind(block: nn.Module) -> object:
    """Return a key that is equal for blocks that call the same operators."""
    return getattr(block, "kind", None), tuple(name for name, _ in block.named_parameters())


def _should_save(every_n_matmuls: int, name: str, call: int) -> bool:
    if name.startswith(MATMULS):
        return every_n_matmuls == 0 or (call + 1) % every_n_matmuls != 0
    return name.startswith(ATTENTION) or _is_reduction(name)


def _is_reduction(name: str) -> bool:
    return name.startswith(COLLECTIVES) and not name.endswith(GATHERS)


def _selective_contexts(
    should_save: SavePolicy,
) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    # torch 2.11 asks the policy in forward and again in recomputation, so count them separately.
    calls: Counter[object] = Counter()

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        save = should_save(op.name(), _count(calls, (context.is_recompute, op.name())))
        return CheckpointPolicy.MUST_SAVE if save else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)  # type: ignore[no-untyped-call,no-any-return]


def _count(calls: Counter[Any], key: Any) -> int:
    """Count a call; return the number of calls before it."""
    calls[key] += 1
    return calls[key] - 1


def param_storages(block: nn.Module) -> set[int]:
    """Return the storages of a block's parameters, except wrappers (float8)."""
    params = (to_local(param.data) for param in block.parameters())
    return {param.untyped_storage()._cdata for param in params if not is_wrapper(param)}


# --------------------------------------------------------------------------- memory budget


class _OpCost(NamedTuple):
    """A call of an operator that returns a new tensor."""

    key: tuple[str, int]  # operator name, and index of the call in the block
    bytes: int  # of the result
    work: float  # in units of the time that moves one byte


class MemoryBudget:
    """A `SavePolicy` that is chosen from the first call of the first block of a kind.

    Unsaved results are recomputed from saved ones, so saving a result avoids exactly the work of
    its operator: a knapsack, filled greedily by work per byte.
    """

    def __init__(self, share: float) -> None:
        """Limit saved bytes to ``share``, 0 to 1, of those without checkpointing."""
        self._share = share
        self._saved: set[tuple[str, int]] | None = None

    def should_save(self, name: str, call: int) -> bool:
        """Implement `SavePolicy`; False before the choice."""
        return (name, call) in (self._saved or ())

    def trace_first_call(self, forward: Any, block: nn.Module, args: tuple[Any, ...]) -> Any:
        """Trace the first call and choose; return ``(output,)``, None later."""
        if self._saved is not None or not torch.is_grad_enabled():
            return None
        inputs = {arg.untyped_storage()._cdata for arg in args if isinstance(arg, Tensor)}
        inputs |= param_storages(block)
        saved_bytes: dict[int, int] = {}

        def record(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if not is_wrapper(tensor) and storage._cdata not in inputs:
                saved_bytes[storage._cdata] = storage.nbytes()
            return tensor

        hooks = torch.autograd.graph.saved_tensors_hooks(record, lambda tensor: tensor)
        with hooks, _OpTracer() as tracer:
            out = forward(block, *args)
        budget = self._share * sum(saved_bytes.values())
        ops = sorted(tracer.ops.values(), key=lambda op: op.bytes / max(op.work, 1))
        # Ranks can have different numbers of rows and columns, so sizes must not decide about
        # collectives: ranks that repeated different ones would wait for each other.
        reductions = [op for op in ops if self._share and _is_reduction(op.key[0])]
        budget -= sum(op.bytes for op in reductions)
        self._saved = {op.key for op in reductions}
        for op in ops:
            if op.bytes <= budget and not op.key[0].startswith(COLLECTIVES):
                budget -= op.bytes
                self._saved.add(op.key)
        return (out,)


class _OpTracer(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A dispatch mode that records every operator whose result can be saved."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ops: dict[int, _OpCost] = {}  # by the storage of the result
        self._calls: Counter[str] = Counter()
        self._alive: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self._alive.append(out)  # so that no two tensors have the same address
        name = func.name()
        key = name, _count(self._calls, name)
        inputs = list(plain_tensors(tree_leaves((args, kwargs))))
        input_storages = {x.untyped_storage()._cdata for x in inputs}
        if func._schema.is_mutable:
            for storage in input_storages:  # a saved tensor must not change
                self.ops.pop(storage, None)
            return out
        results = list(plain_tensors(tree_leaves(out)))
        new = [x for x in results if x.untyped_storage()._cdata not in input_storages]
        if new:
            size = sum(x.nbytes for x in new)
            work = float(size + sum(x.nbytes for x in inputs))
            if name.startswith(COLLECTIVES):
                work *= COLLECTIVE_COST
            work = max(work, _count_flops(name, inputs, results[0]) / FLOPS_PER_BYTE)
            self.ops[new[0].untyped_storage()._cdata] = _OpCost(key, size, work)
        return out


def _count_flops(name: str, inputs: list[Tensor], out: Tensor) -> float:
    """Count FLOPs of matmuls and causal attention; 0 for memory-bound operators."""
    if name.startswith(MATMULS):
        return 2.0 * out.numel() * next(x for x in inputs if x.dim() == out.dim()).shape[-1]
    if name.startswith(ATTENTION):  # [B, H, T, K]: half of two matmuls with all keys
        return 2.0 * out.numel() * inputs[1].shape[-2]
    return 0.0
