"""Everything that one rank does in a step, as a list of events.

A `MetricLogger` watches the operators that a rank runs, on real tensors or on fake ones alike: what
they multiply, read and write, what they say to other ranks, and when memory is taken and given
back.  Memory is storages, not tensors: a view takes none, and FSDP takes and gives back by
resizing a storage that stays.

Each event also knows *where* it happened: in which action of which stage (forward, backward or half
of one), in which of its microbatches, and in which block.  With that a step of many blocks and
microbatches is put together from one of a few (`weft.estimate.extrapolate`).
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass_type
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from weft.config.errors import WeftError
from weft.parallel.private_hooks import (
    wrap_pipeline_actions,
    find_group_name,
    is_in_backward,
    observe_collective_waits,
    observe_storage_resizes,
    observe_sharding_propagation,
)

Block = tuple[int, int]
AROUND = -1  # in the place of a block: what a stage has outside of blocks


class Where(NamedTuple):
    """``kind``: F, B, I, W as in a timetable, or ``start``, ``end``, ``clip``, ``optimizer``.

    ``stage``: its place among those of the rank.  ``turn``: how many actions of the kind it had
    before.  ``block``: of which stage, and its place among the stage's: the one that runs
    (``running``), or outside of them the one whose storage is touched (`AROUND` is one, too); None:
    no block's.
    """

    stage: int
    kind: str
    turn: int
    block: Block | None = None
    running: bool = False


class Call(NamedTuple):
    """An operator that computed or communicated."""

    name: str
    flops: float
    shapes: tuple[tuple[int, ...], ...]  # of the tensors that it takes
    reads: tuple[tuple[int, int], ...]  # (storage, bytes)
    writes: tuple[tuple[int, int], ...]
    group: str = ""  # that it communicates in
    causal: bool = False


class Event(NamedTuple):
    """``storage`` got or lost ``bytes`` (then they are negative), or ``call`` happened."""

    where: Where
    storage: int = -1
    bytes: int = 0
    call: Call | None = None


@dataclass
class OpTrace:
    """One rank's step.

    ``kept``: storages that were there before, with their bytes; ``owner``: of parameters and
    buffers, the block that they belong to; ``rows``: of input, the microbatch.  ``states``: of the
    optimizer, before the step.  ``gradients``: of the parameters, when all microbatches were done.
    ``host``: what waits in the host's memory, whatever the device is.
    """

    events: list[Event]
    kept: dict[int, int]
    owner: dict[int, Block | None]
    rows: dict[int, int]
    states: frozenset[int]
    gradients: frozenset[int]
    host: frozenset[int]


# --------------------------------------------------------------------------- operators

# What takes storage but moves nothing.
STILL = (
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
# Collectives by operator, as `weft.estimate.cost` calls them.
COLLECTIVES = {
    "allreduce_": "all_reduce",
    "all_reduce": "all_reduce",
    "all_reduce_": "all_reduce",
    "allreduce_coalesced_": "all_reduce",
    "_allgather_base_": "all_gather",
    "all_gather_into_tensor": "all_gather",
    "all_gather_into_tensor_out": "all_gather",
    "allgather_": "all_gather",
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
EXCHANGES = ("c10d", "_c10d_functional")


def _flops(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> float:
    """Of an operator, one multiplication and addition as two; attention's as if not causal."""
    packet = func.overloadpacket
    name = packet.__name__
    if "attention" in name and "_for_cpu" in name:
        # PyTorch's table has the kernels of GPUs only; the arithmetic is the same.
        backward = "backward" in name
        query, key = args[1:3] if backward else args[:2]
        *batch, rows, width = query.shape
        products = 5 if backward else 2  # backward computes the scores again
        return float(2 * products * math.prod(batch) * rows * key.shape[-2] * width)
    formula = flop_registry.get(packet)
    return float(formula(*args, **kwargs, out_val=out)) if formula else 0.0


def is_causal(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether an attention operator leaves out what lies in the future."""
    for place, argument in enumerate(func._schema.arguments):
        if argument.name == "is_causal":
            return bool(args[place] if place < len(args) else kwargs.get("is_causal", False))
    return False


def changed(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """The tensors that an operator writes into, by its schema."""
    found: list[Tensor] = []
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[place] if place < len(args) else kwargs.get(argument.name)
            found += [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
    return found


# --------------------------------------------------------------------------- the recorder


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records what happens inside of its context, in `events`."""

    def __init__(self, mode: FakeTensorMode | None) -> None:
        """``mode``: whose tensors are recorded; None: real ones."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.mode = mode
        self.where = Where(0, "start", 0)
        self.events: list[Event] = []
        self.kept: dict[int, int] = {}
        self._ids: dict[int, int] = {}  # of storages that are alive, by address
        self._sizes: list[int] = []  # by id
        self._blocks: list[Block | None] = []  # that they belong to
        self._born: dict[int, int] = {}  # of storages made in the step, the event
        self._away = False  # what happens now is none of the step's
        self._open = False

    # ------------------------------------------------------------------- storages

    def keep(self, tensor: Tensor, block: Block | None = None) -> int:
        """Note a tensor that was there before; returns its storage."""
        storage = tensor.untyped_storage()
        known = self._ids.get(storage._cdata)
        if known is None:
            known = self._name(storage, block)
            self.kept[known] = storage.nbytes()
        return known

    def _name(self, storage: torch.UntypedStorage, block: Block | None) -> int:
        address, number = storage._cdata, len(self._sizes)
        self._ids[address] = number
        self._sizes.append(storage.nbytes())
        self._blocks.append(block)
        weakref.finalize(storage, self._gone, address, number).atexit = False
        return number

    def _gone(self, address: int, number: int) -> None:
        if self._ids.get(address) == number:
            del self._ids[address]
        self._resized(number, 0)

    def _resized(self, number: int, size: int) -> None:
        change = size - self._sizes[number]
        self._sizes[number] = size
        if change and self._open:
            self._add(self._blocks[number], number, change)

    def _add(self, block: Block | None, storage: int = -1, size: int = 0, call: Any = None) -> None:
        """An event; outside of blocks it belongs to the block of what it touches."""
        where = self.where
        if where.block is None and block is not None:
            where = where._replace(block=block)
        self.events.append(Event(where, storage, size, call))

    def _resize(self, storage: torch.UntypedStorage, before: int) -> None:
        number = self._ids.get(storage._cdata)
        if number is None:
            number = self._name(storage, None)
            self.kept[number] = self._sizes[number] = before
        self._resized(number, storage.nbytes())

    def _made(self, tensor: Tensor, block: Block | None) -> int:
        """The storage of a tensor that an operator returned."""
        storage = tensor.untyped_storage()
        number = self._ids.get(storage._cdata)
        if number is None:
            block = block if self.where.block is None else self.where.block
            number = self._name(storage, block)
            if storage.nbytes():
                self._born[number] = len(self.events)
                self._add(block, number, storage.nbytes())
        elif block is not None and self._blocks[number] is None and self.where.block is None:
            self._adopt(number, block)
        elif storage.nbytes() != self._sizes[number]:
            self._resized(number, storage.nbytes())
        return number

    def _adopt(self, storage: int, block: Block) -> None:
        """What was made for no block and is first written from a block's is the block's, too."""
        born = self._born.get(storage)
        if born is not None and self.events[born].where[:3] == self.where[:3]:
            event = self.events[born]
            self.events[born] = event._replace(where=event.where._replace(block=block))
            self._blocks[storage] = block

    def _adopt_beside(self, lists: Sequence[Sequence[Tensor]]) -> None:
        """What an operator on lists takes beside a block's weight is the block's: AdamW counts the
        steps of each weight in a scalar that is made from nothing."""
        for beside in lists[1:]:
            if len(beside) == len(lists[0]):
                for owner, other in zip(lists[0], beside, strict=True):
                    block, number = self._blocks[self.keep(owner)], self.keep(other)
                    if block is not None and self._blocks[number] is None:
                        self._adopt(number, block)

    def _ours(self, tensors: Iterable[Tensor]) -> bool:
        """Whether these are the step's, and nobody's who only asks what would be."""
        if self._away:
            return False
        for tensor in tensors:
            if tensor.device.type == "meta":
                return False
            if isinstance(tensor, FakeTensor) and tensor.fake_mode is not self.mode:
                return False
        return True

    # ------------------------------------------------------------------- operators

    def __enter__(self) -> Any:
        self._open = True
        self._watching = ExitStack()
        self._watching.enter_context(observe_storage_resizes(self._resize))
        # Neither of these is the step's: what would be, and gloo's way to do what NCCL does alone.
        for others in (observe_sharding_propagation, observe_collective_waits):
            self._watching.enter_context(others(partial(setattr, self, "_away")))
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._watching.close()
        self._open = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if any(is_traceable_wrapper_subclass_type(kind) for kind in types if kind != FakeTensor):
            return NotImplemented  # it calls operators on what it wraps
        if self.mode is not None and func is torch.ops._c10d_functional.wait_tensor.default:
            return args[0]  # as it is on real tensors, while a fake one would be a copy
        kwargs = kwargs or {}
        if func.namespace == "prim":
            return func(*args, **kwargs)  # a question after its device
        taken = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if not self._ours(taken):
            return func(*args, **kwargs)
        for tensor in taken:
            self.keep(tensor)
        out = func(*args, **kwargs)
        made = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        known = {id(tensor) for tensor in made}
        made += [tensor for tensor in changed(func, args, kwargs) if id(tensor) not in known]
        if not self._ours(made):
            return out
        reads = [(self.keep(tensor), _bytes(tensor)) for tensor in taken]
        blocks = [self._blocks[storage] for storage, _ in reads]
        around = {block for block in blocks if block is not None}
        one = {block for block in around if block[1] != AROUND} or around
        block = one.pop() if len(one) == 1 else None
        if one and self.where.kind == "W":
            # Gradients of weights: the gradient that comes in may be of the block after.
            block = min(one)
        # An operator on lists makes for each of the first list.
        each = [block] * len(made)
        lists = [some for some in args if isinstance(some, list | tuple) and _are_tensors(some)]
        if block is None and lists and len(lists[0]) == len(made):
            each = blocks[: len(made)]
        if self.where.block is None:
            self._adopt_beside(lists)
        pairs = zip(made, each, strict=True)
        writes = [(self._made(tensor, b), _bytes(tensor)) for tensor, b in pairs]
        self._call(block, func, args, kwargs, out, taken, reads, writes)
        return out

    def _call(
        self,
        block: Block | None,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        out: Any,
        taken: Sequence[Tensor],
        reads: Sequence[tuple[int, int]],
        writes: Sequence[tuple[int, int]],
    ) -> None:
        name = func.overloadpacket.__name__
        exchange = func.namespace in EXCHANGES
        if name.startswith(STILL):
            return
        if exchange:
            kind = COLLECTIVES.get(name)
            if kind is None:
                known = ", ".join(sorted(set(COLLECTIVES.values())))
                raise WeftError(f"a plan cannot price the collective {name}; it can: {known}")
            # Of what c10d's operators take first is the output where there are two.
            call = Call(kind, 0.0, (), tuple(reads), tuple(writes), find_group_name(args))
        else:
            mutates = func._schema.is_mutable
            old = {storage for storage, _ in reads}
            if not mutates and all(storage in old for storage, _ in writes):
                return  # a view
            shapes = tuple(tuple(tensor.shape) for tensor in taken)
            flops = _flops(func, args, kwargs, out)
            causal = flops > 0 and is_causal(func, args, kwargs)
            call = Call(name, flops, shapes, tuple(reads), tuple(writes), "", causal)
        self._add(block, call=call)


def _are_tensors(some: Sequence[Any]) -> bool:
    return len(some) > 0 and all(isinstance(each, Tensor) for each in some)


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


# --------------------------------------------------------------------------- where things happen


@contextmanager
def placed(
    recorder: Recorder,
    parts: Sequence[nn.Module],
    blocks: Callable[[nn.Module], Sequence[nn.Module]],
    engine: Any,
    period: int = 1,
) -> Iterator[None]:
    """Inside, the recorder knows in which action and block of ``parts`` it is.

    Args:
        blocks: of a part, in the order of their use.
        period: so many blocks count as one.
        engine: of `weft.train.step`, whose stages and forward passes are watched.
    """
    handles = []
    for stage, part in enumerate(parts):
        handles += _mark_blocks(recorder, stage, blocks(part), period)
    counts: dict[tuple[int, str], int] = {}

    def begin(stage: int, kind: str, microbatch: int = 0) -> AbstractContextManager[None]:
        count = counts.get((stage, kind), 0)
        counts[stage, kind] = count + 1
        recorder.where = Where(stage, kind, count)
        return nullcontext()  # what follows, until the next one

    with ExitStack() as stack:
        for handle in handles:
            stack.callback(handle.remove)
        if engine.schedule is not None:
            stack.callback(wrap_pipeline_actions(engine.schedule, begin))
        else:
            forward = engine._forward

            def watched(batch: Any) -> Tensor:
                begin(0, "F")
                loss: Tensor = forward(batch)
                begin(0, "B")
                return loss

            engine._forward = watched
            stack.callback(setattr, engine, "_forward", forward)
        yield


def place_of(number: int, blocks: int, period: int) -> int:
    """Of a block among groups of ``period``; what is left over belongs to the last group."""
    return min(number // period, max(0, blocks // period - 1))


def _mark_blocks(
    recorder: Recorder, stage: int, blocks: Sequence[nn.Module], period: int
) -> list[Any]:
    """Hooks on the blocks of a part, in forward and in backward."""
    last = len(blocks) - 1

    def enter(place: int | None) -> None:
        block = None if place is None else (stage, place)
        recorder.where = recorder.where._replace(block=block, running=block is not None)

    def on_grad(place: int | None) -> Callable[[Tensor], None]:
        return lambda grad: enter(place)

    def before(number: int) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...]) -> None:
            if is_in_backward():
                return  # computed again
            enter(place_of(number, len(blocks), period))
            if number == 0 and args[0].requires_grad:
                args[0].register_hook(on_grad(None))

        return hook

    def after(number: int) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], out: Tensor) -> None:
            if is_in_backward():
                return
            if number == last:
                enter(None)  # between two blocks the first one is not over
            if out.requires_grad:
                out.register_hook(on_grad(place_of(number, len(blocks), period)))  # type: ignore[no-untyped-call]

        return hook

    handles: list[Any] = []
    for place, block in enumerate(blocks):
        handles.append(block.register_forward_pre_hook(before(place), prepend=True))
        # Before FSDP's, so that a block's backward pass begins before FSDP's begins.
        handles.append(block.register_forward_hook(after(place), prepend=True))
    return handles
