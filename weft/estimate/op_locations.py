"""Locations of recorded operators: the running action and block."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

from torch import Tensor, nn

from weft.estimate.op_recorder import OUTSIDE_BLOCKS, BlockIndex, Event, OpLocation, OpRecorder
from weft.estimate.private_trace import local_tensor
from weft.parallel.private import is_in_backward, wrap_pipeline_actions


@contextmanager
def track_locations(
    recorder: OpRecorder,
    model_parts: Sequence[nn.Module],
    get_blocks: Callable[[nn.Module], Sequence[nn.Module]],
    engine: Any,
    group_size: int = 1,
) -> Iterator[None]:
    """Set the recorder's location to the running action and block.

    Args:
        recorder: gets the locations.
        model_parts: one module per stage of the rank.
        get_blocks: returns the blocks of a model part in execution order.
        engine: a `weft.training.step.TrainStep`.
        group_size: number of blocks that count as one.
    """
    handles = []
    for stage, model_part in enumerate(model_parts):
        handles += _hook_blocks(recorder, stage, get_blocks(model_part), group_size)
    counts: dict[tuple[int, str], int] = {}

    def begin(stage: int, kind: str, microbatch: int = 0) -> AbstractContextManager[None]:
        count = counts.get((stage, kind), 0)
        counts[stage, kind] = count + 1
        recorder.location = OpLocation(stage, kind, count)
        return nullcontext()  # the location holds until the next action

    with ExitStack() as stack:
        for handle in handles:
            stack.callback(handle.remove)
        if engine.schedule is not None:
            stack.callback(wrap_pipeline_actions(engine.schedule, begin))
        else:
            forward = engine._forward

            def forward_with_location(batch: Any) -> Tensor:
                begin(0, "F")
                loss: Tensor = forward(batch)
                begin(0, "B")
                return loss

            engine._forward = forward_with_location
            stack.callback(setattr, engine, "_forward", forward)
        yield


def locate_received(events: Sequence[Event]) -> list[Event]:
    """Move the allocation of each received message to the action that uses it.

    A recording, which runs one microbatch after the other, receives at the end of other actions
    than the schedule of the run.
    """
    received: set[int] = set()
    users: dict[int, OpLocation] = {}
    for location, _, _, call in events:
        storages = {s for s, _ in (*call.reads, *call.writes)} if call is not None else set()
        if call is not None and call.name == "recv":
            received |= storages
        else:
            for storage in storages & received:
                users.setdefault(storage, OpLocation(*location[:3]))
    located = []
    for event in events:
        user = users.get(event.storage)
        is_allocation = event.bytes > 0 and not event.location.is_in_block
        if user is not None and is_allocation and user[:3] != event.location[:3]:
            event = event._replace(location=user)
        located.append(event)
    return located


def group_index(index: int, num_blocks: int, group_size: int) -> int:
    """Return the index of a block's group; the last group takes the remainder."""
    return min(index // group_size, max(0, num_blocks // group_size - 1))


def _hook_blocks(
    recorder: OpRecorder, stage: int, blocks: Sequence[nn.Module], group_size: int
) -> list[Any]:
    """Register forward and backward hooks on the blocks of a model part."""
    last = len(blocks) - 1

    def enter(group: int | None) -> None:
        block = None if group is None else (stage, group)
        recorder.location = recorder.location._replace(block=block, is_in_block=block is not None)

    def on_grad(group: int | None) -> Callable[[Tensor], None]:
        return lambda grad: enter(group)

    def before(index: int) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...]) -> None:
            if is_in_backward():
                return  # recomputation
            enter(group_index(index, len(blocks), group_size))
            if index == 0 and args[0].requires_grad:
                args[0].register_hook(on_grad(None))

        return hook

    def after(index: int) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], out: Tensor) -> None:
            if is_in_backward():
                return
            if index == last:
                enter(None)  # between two blocks the first still counts as running
            if out.requires_grad:
                out.register_hook(on_grad(group_index(index, len(blocks), group_size)))  # type: ignore[no-untyped-call]

        return hook

    handles: list[Any] = []
    for group, block in enumerate(blocks):
        handles.append(block.register_forward_pre_hook(before(group), prepend=True))
        # Before FSDP's hooks, so that a block's backward begins before FSDP's pre-backward.
        handles.append(block.register_forward_hook(after(group), prepend=True))
    return handles


def register_storages(
    recorder: OpRecorder,
    model_parts: Sequence[nn.Module],
    get_blocks: Callable[[nn.Module], list[nn.Module]],
    group_size: int,
) -> dict[int, BlockIndex | None]:
    """Register parameters and buffers; return the block of each of their storages."""
    storage_blocks: dict[int, BlockIndex | None] = {}
    for stage, model_part in enumerate(model_parts):
        blocks = get_blocks(model_part)
        block_of_param = {
            id(param): (stage, group_index(number, len(blocks), group_size))
            for number, block in enumerate(blocks)
            for param in block.parameters()
        }
        for tensor in (*model_part.parameters(), *model_part.buffers()):
            index = block_of_param.get(id(tensor), (stage, OUTSIDE_BLOCKS))
            storage_blocks[recorder.register(local_tensor(tensor), index)] = index
    return storage_blocks
