"""Record one rank's training step as a list of events.

`OpRecorder` observes the operators of a rank, on real or fake tensors: their shapes, bytes and
collectives, and every allocation and free.  Memory is counted in storages, not tensors: a view
allocates nothing, and FSDP allocates and frees by resizing a storage.

Each event has an `OpLocation`: stage, action (forward, backward or half of one), microbatch and
block.  `weft.estimate.extrapolate` uses it to build a step of many blocks and microbatches from a
step of a few.
"""

from __future__ import annotations

import math
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from weft.config.errors import WeftError
from weft.estimate.private_trace import (
    find_group_name,
    has_wrapper,
    is_of_other_mode,
    observe_collective_waits,
    observe_sharding_propagation,
    observe_storage_resizes,
)

BlockIndex = tuple[int, int]
OUTSIDE_BLOCKS = -1  # index of a stage's modules outside blocks


class OpLocation(NamedTuple):
    """Location of an event in the step.

    ``kind``: F, B, I, W as in a pipeline schedule, or ``start``, ``end``, ``clip``, ``optimizer``.
    ``stage``: index among the stages of the rank.  ``ordinal``: number of earlier actions of the
    same stage and kind.  ``block``: stage and index of the running block (``is_in_block``), or else
    of the block whose storage is touched; `OUTSIDE_BLOCKS` is an index, too; None: no block.
    """

    stage: int
    kind: str
    ordinal: int
    block: BlockIndex | None = None
    is_in_block: bool = False


class OpCall(NamedTuple):
    """An operator that computed or communicated."""

    name: str
    flops: float
    shapes: tuple[tuple[int, ...], ...]  # of the input tensors
    reads: tuple[tuple[int, int], ...]  # (storage, bytes)
    writes: tuple[tuple[int, int], ...]
    group: str = ""  # process group of a collective
    causal: bool = False


class Event(NamedTuple):
    """A ``call``, or a change of ``storage`` by ``bytes`` (negative: freed)."""

    location: OpLocation
    storage: int = -1
    bytes: int = 0
    call: OpCall | None = None


@dataclass
class OpTrace:
    """Events and storages of one rank's step.

    ``initial_bytes``: storages that exist before the step, with their bytes.  ``storage_blocks``:
    block of each parameter and buffer.  ``input_microbatches``: microbatch of each input.
    ``optimizer_states``: those that exist before the step.  ``gradients``: of the parameters, after
    the last microbatch.  ``host_storages``: in host memory on every device.
    """

    events: list[Event]
    initial_bytes: dict[int, int]
    storage_blocks: dict[int, BlockIndex | None]
    input_microbatches: dict[int, int]
    optimizer_states: frozenset[int]
    gradients: frozenset[int]
    host_storages: frozenset[int]


# --------------------------------------------------------------------------- operators

# Operators that allocate or alias, but move no bytes.
NO_TRAFFIC_OPS = (
    "empty",
    "new_empty",
    "detach",
    "_local_scalar_dense",
    "wait_tensor",
    "_wrap_tensor_autograd",
    "lift_fresh",
    "is_same_size",
    "record_stream",
    "resize_",
)
# Collectives by operator, as `weft.estimate.cost` names them.
COLLECTIVES = {
    "allreduce_": "all_reduce",
    "all_reduce": "all_reduce",
    "all_reduce_": "all_reduce",
    "allreduce_coalesced_": "all_reduce",
    "_allgather_base_": "all_gather",
    "all_gather_into_tensor": "all_gather",
    "all_gather_into_tensor_out": "all_gather",
    "allgather_": "all_gather",
    "allgather_into_tensor_coalesced_": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_tensor": "reduce_scatter",
    "send": "send",
    "recv_": "recv",
    "alltoall_base_": "all_to_all",
    "alltoall_": "all_to_all",
    "all_to_all_single": "all_to_all",
    "broadcast_": "broadcast",
    "barrier": "barrier",
}
COLLECTIVE_NAMESPACES = ("c10d", "_c10d_functional")


def _op_flops(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> float:
    """Return the FLOPs of an operator; attention counts as not causal.

    A multiplication and an addition are two FLOPs.
    """
    packet = func.overloadpacket
    name = packet.__name__
    if name.startswith("flex_attention"):
        backward = "backward" in name
        query, value = (args[1], args[3]) if backward else (args[0], args[2])
        widths = (3, 2) if backward else (1, 1)  # backward computes the scores again
        width = widths[0] * query.shape[3] + widths[1] * value.shape[3]
        return float(2 * math.prod(query.shape[:2]) * args[-1] * width)
    if "attention" in name and "_for_cpu" in name:
        # PyTorch's FLOP registry lacks the CPU kernels; the arithmetic is the same.
        backward = "backward" in name
        query, key = args[1:3] if backward else args[:2]
        *batch, queries, width = query.shape
        num_matmuls = 5 if backward else 2  # backward computes the scores again
        return float(2 * num_matmuls * math.prod(batch) * queries * key.shape[-2] * width)
    formula = flop_registry.get(packet)
    return float(formula(*args, **kwargs, out_val=out)) if formula else 0.0


def is_causal(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return True if an attention operator applies a causal mask."""
    for position, argument in enumerate(func._schema.arguments):
        if argument.name == "is_causal":
            return bool(args[position] if position < len(args) else kwargs.get("is_causal", False))
    return False


def written_tensors(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """Return the tensors that an operator writes in place, by its schema.

    A fused optimizer writes the gradients only to unscale them.
    """
    tensors: list[Tensor] = []
    if func is torch.ops.c10d.allgather_into_tensor_coalesced_.default:
        return list(args[0])  # which its schema does not say
    for position, argument in enumerate(func._schema.arguments):
        if argument.name == "grads" and kwargs.get("grad_scale") is None:
            continue
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            tensors += [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
    return tensors


# --------------------------------------------------------------------------- recorder


class OpRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Dispatch mode that records operators and storages in `events`."""

    def __init__(
        self,
        mode: TorchDispatchMode | None = None,
        host_reads: Mapping[Any, Callable[..., Any]] | None = None,
    ) -> None:
        """Create a recorder.

        Args:
            mode: mode of the fake tensors to record; None: real tensors.
            host_reads: called in place of operators that read values.
        """
        super().__init__()  # type: ignore[no-untyped-call]
        self.mode, self._host_reads = mode, host_reads or {}
        self.host_storages: set[int] = set()
        self.location = OpLocation(0, "start", 0)
        self.events: list[Event] = []
        self.initial_bytes: dict[int, int] = {}
        self._ids: dict[int, int] = {}  # of live storages, by address
        self._sizes: list[int] = []  # by id
        self._blocks: list[BlockIndex | None] = []  # by id
        self._birth_events: dict[int, int] = {}  # index of the allocation, by id
        self._is_ignoring = False  # the running operators are not the step's
        self._repeated: dict[object, tuple[list[Event], list[int]]] = {}  # see `record_repeated`
        self._since: tuple[int, set[object]] = 0, set()
        self._is_recording = False

    # ------------------------------------------------------------------- storages

    def register(self, tensor: Tensor, block: BlockIndex | None = None) -> int:
        """Register a tensor that existed before; return the id of its storage."""
        storage = tensor.untyped_storage()
        storage_id = self._ids.get(storage._cdata)
        if storage_id is None:
            storage_id = self._assign_id(storage, block)
            self.initial_bytes[storage_id] = storage.nbytes()
        return storage_id

    def _assign_id(self, storage: torch.UntypedStorage, block: BlockIndex | None) -> int:
        address, storage_id = storage._cdata, len(self._sizes)
        self._ids[address] = storage_id
        self._sizes.append(storage.nbytes())
        self._blocks.append(block)
        weakref.finalize(storage, self._on_free, address, storage_id).atexit = False
        return storage_id

    def _on_free(self, address: int, storage_id: int) -> None:
        if self._ids.get(address) == storage_id:
            del self._ids[address]
        self._record_resize(storage_id, 0)

    def _record_resize(self, storage_id: int, size: int) -> None:
        change = size - self._sizes[storage_id]
        self._sizes[storage_id] = size
        if change and self._is_recording:
            self._append(self._blocks[storage_id], storage_id, change)

    def _append(
        self, block: BlockIndex | None, storage: int = -1, size: int = 0, call: Any = None
    ) -> None:
        """Append an event; outside blocks it belongs to the block of its storage."""
        location = self.location
        if location.block is None and block is not None:
            location = location._replace(block=block)
        self.events.append(Event(location, storage, size, call))

    def _on_resize(self, storage: torch.UntypedStorage, before: int) -> None:
        storage_id = self._ids.get(storage._cdata)
        if storage_id is None:
            storage_id = self._assign_id(storage, None)
            self.initial_bytes[storage_id] = self._sizes[storage_id] = before
        self._record_resize(storage_id, storage.nbytes())

    def _register_output(self, tensor: Tensor, block: BlockIndex | None) -> int:
        """Return the storage id of a tensor that an operator returned."""
        storage = tensor.untyped_storage()
        storage_id = self._ids.get(storage._cdata)
        if storage_id is None:
            block = block if self.location.block is None else self.location.block
            storage_id = self._assign_id(storage, block)
            if storage.nbytes():
                self._birth_events[storage_id] = len(self.events)
                self._append(block, storage_id, storage.nbytes())
        elif block is not None and self._blocks[storage_id] is None and self.location.block is None:
            self._assign_block(storage_id, block)
        elif storage.nbytes() != self._sizes[storage_id]:
            self._record_resize(storage_id, storage.nbytes())
        return storage_id

    def _assign_block(self, storage: int, block: BlockIndex) -> None:
        """Assign a block to a storage that was allocated outside blocks.

        The first write by a block decides.
        """
        birth = self._birth_events.get(storage)
        if birth is not None and self.events[birth].location[:3] == self.location[:3]:
            event = self.events[birth]
            self.events[birth] = event._replace(location=event.location._replace(block=block))
            self._blocks[storage] = block

    def _assign_list_blocks(self, tensor_lists: Sequence[Sequence[Tensor]]) -> None:
        """Assign blocks to the arguments of an operator on lists.

        A tensor belongs to the block of the weight at the same index.  AdamW, for example,
        allocates a step counter per weight.
        """
        for others in tensor_lists[1:]:
            if len(others) == len(tensor_lists[0]):
                for owner, other in zip(tensor_lists[0], others, strict=True):
                    block, storage_id = self._blocks[self.register(owner)], self.register(other)
                    if block is not None and self._blocks[storage_id] is None:
                        self._assign_block(storage_id, block)

    def _is_step_op(self, tensors: Iterable[Tensor]) -> bool:
        """Return True if the tensors belong to the step, not to shape inference."""
        if self._is_ignoring:
            return False
        for tensor in tensors:
            if tensor.device.type == "meta":
                return False
            if is_of_other_mode(tensor, self.mode):
                return False
        return True

    def record_updates(
        self, device: str, function: Callable[..., Any], params: Iterable[Any], *args: Any
    ) -> None:
        """Record an optimizer's update of each parameter, in the block of the parameter.

        On a GPU it is one kernel, which writes everything it reads except the gradient.  On a CPU
        it runs eagerly.
        """
        for tensors in params:
            param, grad, *others = tensors
            states = [leaf for leaf in tree_leaves(others) if isinstance(leaf, Tensor)]
            block = self._blocks[self.register(param)]
            if block is not None:
                for state in states:
                    if self._blocks[self.register(state)] is None:
                        self._assign_block(self.register(state), block)
            if device != "cpu":
                written = [(self.register(tensor), _bytes(tensor)) for tensor in (param, *states)]
                reads = ((self.register(grad), _bytes(grad)), *written)
                shapes = tuple(tuple(tensor.shape) for tensor in (param, grad, *states))
                self._append(block, call=OpCall("update", 0.0, shapes, reads, tuple(written)))
                continue
            self.location = self.location._replace(block=block)
            function([tensors], *args)
            self.location = self.location._replace(block=None)

    def record_kernel(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function and record it as one kernel, as torch.compile makes of it."""
        self._is_ignoring = True
        try:
            out = function(*args)
        finally:
            self._is_ignoring = False
        inputs, outputs = (
            [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
            for value in (args, out)
        )
        reads = tuple((self.register(tensor), _bytes(tensor)) for tensor in inputs)
        writes = tuple((self._register_output(tensor, None), _bytes(tensor)) for tensor in outputs)
        shapes = tuple(tuple(tensor.shape) for tensor in inputs)
        self._append(None, call=OpCall(function.__name__, 0.0, shapes, reads, writes))
        return out

    def record_repeated(self, function: Callable[..., None], *args: Any) -> None:
        """Record a function that changes tensors in place; call it once for each shape.

        Attention over blocks runs the same operators for thousands of blocks, whose slices differ
        only in their offsets.  The memory of a call is left out if an equal one came before, and
        other memory has not changed since.  Every call runs if some of its memory stays or is of
        earlier calls, as with selective recomputation, which keeps outputs of operators.
        """
        leaves = tree_leaves(args)
        ids = [self.register(leaf) for leaf in leaves if isinstance(leaf, Tensor)]
        aliases = tuple(map(ids.index, ids))
        key = function, aliases, tuple(map(_repeat_key, leaves))
        if self.mode is None or not self.location.is_in_block or key not in self._repeated:
            first = len(self.events)
            function(*args)
            events = self.events[first:]
            if _frees_what_it_allocates(events):
                self._repeated[key] = events, ids
            return
        end, recent = self._since
        if any(event.call is None for event in self.events[end:]):
            recent = set()
        events, recorded_ids = self._repeated[key]
        names = dict(zip(recorded_ids, ids, strict=True))
        for _, storage, size, call in events:
            if call is None and storage not in names:
                names[storage] = len(self._sizes)
                self._sizes.append(0)
                self._blocks.append(self.location.block)
            if call is not None:
                reads, writes = (
                    tuple((names[s], size) for s, size in used)
                    for used in (call.reads, call.writes)
                )
                self._append(None, call=call._replace(reads=reads, writes=writes))
            elif key not in recent:
                self._append(None, names[storage], size)
        self._since = len(self.events), recent | {key}

    # ------------------------------------------------------------------- operators

    def __enter__(self) -> Any:
        self._is_recording = True
        self._hooks = ExitStack()
        self._hooks.enter_context(observe_storage_resizes(self._on_resize))
        # Not the step's: DTensor's sharding propagation, and gloo's waits, which NCCL lacks.
        for ignored_region in (observe_sharding_propagation, observe_collective_waits):
            self._hooks.enter_context(ignored_region(partial(setattr, self, "_is_ignoring")))
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._hooks.close()
        self._is_recording = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if has_wrapper(types):
            return NotImplemented  # the wrapper calls operators on its inner tensors
        if self.mode is not None and func is torch.ops._c10d_functional.wait_tensor.default:
            return args[0]  # as on real tensors; the fake operator would copy
        if answer := self._host_reads.get(func):
            return answer(*args)
        kwargs = kwargs or {}
        if func.namespace == "prim":
            return func(*args, **kwargs)  # queries the device
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if not self._is_step_op(inputs):
            return func(*args, **kwargs)
        for tensor in inputs:
            self.register(tensor)
        out = func(*args, **kwargs)
        outputs = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        output_ids = {id(tensor) for tensor in outputs}
        outputs += [
            tensor for tensor in written_tensors(func, args, kwargs) if id(tensor) not in output_ids
        ]
        if not self._is_step_op(outputs):
            return out
        reads = [(self.register(tensor), _bytes(tensor)) for tensor in inputs]
        blocks = [self._blocks[storage] for storage, _ in reads]
        touched_blocks = {block for block in blocks if block is not None}
        owners = {block for block in touched_blocks if block[1] != OUTSIDE_BLOCKS} or touched_blocks
        block = owners.pop() if len(owners) == 1 else None
        if owners and self.location.kind == "W":
            # Weight gradients: the incoming gradient may belong to the next block.
            block = min(owners)
        # An operator on lists has an output per tensor of the first list.
        output_blocks = [block] * len(outputs)
        tensor_lists = [
            arg for arg in args if isinstance(arg, list | tuple) and _is_tensor_list(arg)
        ]
        if block is None and tensor_lists and len(tensor_lists[0]) == len(outputs):
            output_blocks = blocks[: len(outputs)]
        if self.location.block is None:
            self._assign_list_blocks(tensor_lists)
        pairs = zip(outputs, output_blocks, strict=True)
        writes = [(self._register_output(tensor, b), _bytes(tensor)) for tensor, b in pairs]
        self._record_call(block, func, args, kwargs, out, inputs, reads, writes)
        return out

    def _record_call(
        self,
        block: BlockIndex | None,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        out: Any,
        inputs: Sequence[Tensor],
        reads: Sequence[tuple[int, int]],
        writes: Sequence[tuple[int, int]],
    ) -> None:
        name = func.overloadpacket.__name__
        is_collective = func.namespace in COLLECTIVE_NAMESPACES
        if name.startswith(NO_TRAFFIC_OPS):
            return
        if is_collective:
            kind = COLLECTIVES.get(name)
            if kind is None:
                supported = ", ".join(sorted(set(COLLECTIVES.values())))
                raise WeftError(
                    f"cannot price the collective {name}: supported collectives are {supported}"
                )
            # Operators of c10d with two tensor arguments take the output first.
            call = OpCall(kind, 0.0, (), tuple(reads), tuple(writes), find_group_name(args))
        else:
            mutates = func._schema.is_mutable
            input_storages = {storage for storage, _ in reads}
            if not mutates and all(
                storage in input_storages or not self._sizes[storage] for storage, _ in writes
            ):
                return  # a view, or a wrapper that owns no memory
            shapes = tuple(tuple(tensor.shape) for tensor in inputs)
            flops = _op_flops(func, args, kwargs, out)
            causal = flops > 0 and is_causal(func, args, kwargs)
            call = OpCall(name, flops, shapes, tuple(reads), tuple(writes), "", causal)
        self._append(block, call=call)


def _frees_what_it_allocates(events: Iterable[Event]) -> bool:
    """Return True if no storage is larger or smaller after the events."""
    changes: Counter[int] = Counter()
    for event in events:
        changes[event.storage] += event.bytes
    return not any(changes.values())


def _repeat_key(leaf: Any) -> object:
    """Return what the operators of a call depend on: of a slice its length."""
    if isinstance(leaf, Tensor):
        return leaf.shape, leaf.stride(), leaf.dtype
    if isinstance(leaf, slice):
        return None if leaf.start is None else leaf.stop - leaf.start
    return leaf


def _is_tensor_list(values: Sequence[Any]) -> bool:
    return len(values) > 0 and all(isinstance(value, Tensor) for value in values)


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
