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

Calls of a block can run different operators, such as exchanges of tokens with padded and with
exact sizes.  So *budget* saves by operator and shapes, not by the index of an operator in a call.

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
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.checkpoint import (
    SAC_IGNORED_OPS,
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from weft.config.schema import ActivationCheckpointSection
from weft.parallel.dtensor import is_wrapper, plain_tensors, to_local
from weft.parallel.private import (
    detach_with_version,
    select_saved_results,
    set_activation_memory_budget,
)

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
    "weft::flex_attention",  # of a trace
    "weft::varlen_attention",
)
COLLECTIVES = ("_c10d_functional::", "c10d_functional::")
# Operators that read no values of their inputs, so that there is no work to avoid.
CREATIONS = tuple(
    f"aten::{name}"
    for name in ("new_", "empty", "zeros", "ones", "full", "arange", "scalar_tensor", "eye")
)

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
        if self.memory_budget.saved is None:  # the first call has no gradients: nothing is saved
            return original(self, *args)
        contexts = self.memory_budget.make_contexts
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


# Operator name, and dtypes and shapes of the result and the inputs.  A *similar* kind has other
# numbers of rows: instead of shapes it has the number of dims and the last size.
OpKind = tuple[Any, ...]


class _OpCost(NamedTuple):
    """A call of an operator that returns a new tensor."""

    kind: OpKind
    similar: OpKind
    bytes: int  # of the result
    work: float  # in units of the time that moves one byte


class MemoryBudget:
    """The results that blocks of a kind save: how many of each kind of result.

    They are chosen from the first call.  Unsaved results are recomputed from saved ones, so saving
    a result avoids exactly the work of its operator: a knapsack, filled greedily by work per byte.

    Results of a kind cost the same, so each call saves the first ones.  A call whose operators
    differ from those of the first call saves what they have in common.

    Attributes:
        saved: number of results by kind; 0 for a kind that is not saved.
        saves_reductions: each call saves the results of reducing collectives.
    """

    def __init__(self, share: float) -> None:
        """Limit saved bytes to ``share``, 0 to 1, of those without checkpointing."""
        self._share = share
        self.saved: Counter[OpKind] | None = None
        # Ranks can have different numbers of rows and columns, so sizes must not decide about
        # collectives: ranks that repeated different ones would wait for each other.
        self.saves_reductions = share > 0
        self._similar: Counter[OpKind] = Counter()
        self._names: set[str] = set()

    def make_contexts(self) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        """Return the contexts of a call and of its recomputation."""
        results: dict[Any, list[Any]] = {}
        return _SaveResults(self, results), _ReplayResults(results)

    def select(self) -> Callable[[str, Any, Any], bool]:
        """Return a function that decides for one call, operator by operator.

        Its arguments are the name of the operator, its result and its inputs.
        """
        assert self.saved is not None
        known, saved, similar = self.saved.keys(), Counter(self.saved), Counter(self._similar)

        def should_save(name: str, out: Any, inputs: Any) -> bool:
            if name.startswith(COLLECTIVES):
                return self.saves_reductions and _is_reduction(name)
            if name not in self._names:
                return False
            results, tensors = plain_tensors(tree_leaves(out)), plain_tensors(tree_leaves(inputs))
            kind, like = _kinds_of(name, list(results), list(tensors))
            if (saved[kind] if kind in known else similar[like]) <= 0:
                return False
            saved[kind] -= 1
            similar[like] -= 1
            return True

        return should_save

    def trace_first_call(self, forward: Any, block: nn.Module, args: tuple[Any, ...]) -> Any:
        """Trace the first call and choose; return ``(output,)``, None later."""
        if self.saved is not None or not torch.is_grad_enabled():
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
        if self.saves_reductions:
            budget -= sum(op.bytes for op in ops if _is_reduction(op.kind[0]))
        self.saved = Counter()
        for op in ops:
            if not op.kind[0].startswith(COLLECTIVES):
                is_saved = op.bytes <= budget and op.kind not in tracer.mutated
                budget -= op.bytes * is_saved
                self.saved[op.kind] += is_saved
                self._similar[op.similar] += is_saved
        self._names = {kind[0] for kind, number in self.saved.items() if number}
        return (out,)


def _kinds_of(name: str, results: list[Tensor], inputs: list[Tensor]) -> tuple[OpKind, OpKind]:
    tensors = results + inputs
    kind = [(tensor.dtype, tensor.shape) for tensor in tensors]
    similar = [(dtype, len(shape), shape[-1:]) for dtype, shape in kind]
    return (name, *kind), (name, *similar)


class _SaveResults(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A dispatch mode that saves the selected results of a call of a block.

    Args:
        budget: selects them.
        results: gets the results of each operator, in the order of its calls; None: not saved.
    """

    supports_higher_order_operators = True

    def __init__(self, budget: MemoryBudget, results: dict[Any, list[Any]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._should_save, self._results = budget.select(), results

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let compiled functions run compiled."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func not in SAC_IGNORED_OPS:
            saved = None
            is_mutable = getattr(func, "_schema", None) is not None and func._schema.is_mutable
            if not is_mutable and self._should_save(func.name(), out, (args, kwargs)):
                saved = tree_map(_Saved, out)
            self._results.setdefault(func, []).append(saved)
        return out


class _ReplayResults(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A dispatch mode that returns a call's saved results in its recomputation.

    An operator runs again if its result was not saved, or was modified in place since then.
    """

    supports_higher_order_operators = True

    def __init__(self, results: dict[Any, list[Any]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._results = results
        self._calls: Counter[Any] = Counter()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let compiled functions run compiled."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in SAC_IGNORED_OPS:
            results, index = self._results.get(func, []), _count(self._calls, func)
            saved = results[index] if index < len(results) else None
            if saved is not None:
                results[index] = None  # free the memory as soon as backward has used it
                if all(leaf.is_unmodified() for leaf in tree_leaves(saved)):
                    return tree_map(lambda leaf: leaf.value, saved)
        return func(*args, **(kwargs or {}))


class _Saved:
    """A saved value, and the version of a tensor, which in-place operators increase."""

    def __init__(self, value: Any) -> None:
        is_tensor = isinstance(value, Tensor)
        # Detached: else the graph that holds this object would hold itself.
        self.value = detach_with_version(value) if is_tensor else value
        self._version = value._version if is_tensor else 0

    def is_unmodified(self) -> bool:
        """Return True if no operator has modified the tensor since it was saved."""
        return not isinstance(self.value, Tensor) or self.value._version == self._version


class _OpTracer(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A dispatch mode that records every operator whose result can be saved.

    Attributes:
        ops: by the storage of the result.
        mutated: kinds of results that a later operator modifies in place.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ops: dict[int, _OpCost] = {}
        self.mutated: set[OpKind] = set()
        self._alive: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self._alive.append(out)  # so that no two tensors have the same address
        name = func.name()
        inputs = list(plain_tensors(tree_leaves((args, kwargs))))
        input_storages = {x.untyped_storage()._cdata for x in inputs}
        if written := _written_tensors(func, args, kwargs or {}):
            for tensor in written:
                if op := self.ops.pop(tensor.untyped_storage()._cdata, None):
                    self.mutated.add(op.kind)
            return out
        results = list(plain_tensors(tree_leaves(out)))
        new = [x for x in results if x.untyped_storage()._cdata not in input_storages]
        if new and not name.startswith(CREATIONS):
            size = sum(x.nbytes for x in new)
            work = float(size + sum(x.nbytes for x in inputs))
            if name.startswith(COLLECTIVES):
                work *= COLLECTIVE_COST
            work = max(work, _count_flops(name, inputs, results[0]) / FLOPS_PER_BYTE)
            kinds = _kinds_of(name, results, inputs)
            self.ops[new[0].untyped_storage()._cdata] = _OpCost(*kinds, size, work)
        return out


def _written_tensors(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Tensor]:
    """Return the inputs that an operator modifies in place."""
    schema = getattr(func, "_schema", None)
    if schema is None or not schema.is_mutable:  # a higher-order operator has no schema
        return []
    names = [argument.name for argument in schema.arguments]
    values = dict(zip(names, args, strict=False)) | kwargs
    written = [a.name for a in schema.arguments if a.alias_info and a.alias_info.is_write]
    return list(plain_tensors(tree_leaves([values.get(name) for name in written])))


def _count_flops(name: str, inputs: list[Tensor], out: Tensor) -> float:
    """Count FLOPs of matmuls and causal attention; 0 for memory-bound operators."""
    if name.startswith(MATMULS):
        return 2.0 * out.numel() * next(x for x in inputs if x.dim() == out.dim()).shape[-1]
    if name.startswith(ATTENTION):  # [B, H, T, K] or [N, H, K]: half of two matmuls with all keys
        keys = inputs[1]
        return 2.0 * out.numel() * keys.shape[-2 if keys.dim() == 4 else 0]
    return 0.0
