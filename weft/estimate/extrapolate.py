"""Extrapolate a step of many blocks and microbatches from a recorded one.

All blocks of a stage except those at its ends are alike, and so are all microbatches except the
first and last ones.  The extrapolation repeats a *middle* one, with its references to its own
storages and those of neighboring blocks.  Four blocks and four microbatches usually suffice: the
ends, and two middle ones to compare.  The comparison shows two facts.  If the two differ, nothing
is extrapolated (`HeterogeneousLayers`).  A storage that both touch is shared by all; any other
storage belongs to one block.

    recorded blocks            0   1   2   3
    forward of n blocks        0   1   2   2   2 ... 2   3        repeats 2, which is like 1
    backward                   3   2   1   1   1 ... 1   0        repeats 1, which is like 2
    m microbatches             0   1   2   2   2 ... 2   3        repeats 2, which is like 1

Each repetition has its own storages.  An event outside running blocks (clipping, the optimizer, the
end of a pass) belongs to the block whose storage it touches.  It is repeated for all blocks if
both middle blocks have it; otherwise it belongs to an end.

In a pipeline, actions follow the order of the schedule, not of the recording.  The stages of a rank
may be combined from stages that were recorded together.  An event in the pass of one stage may
belong to another stage, such as a gather for the next pass or the release of a message.  It then
moves to that stage's next pass, or to the end.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, takewhile
from typing import NamedTuple

from weft.estimate.op_recorder import OUTSIDE_BLOCKS, BlockIndex, Event, OpCall, OpLocation, OpTrace

ACTIONS = ("F", "B", "I", "W")
BUFFER = "buffer"  # instead of an action: allocated per microbatch before the first one
AFTER_ACTIONS = ("clip", "optimizer", "end")
REVERSED_KINDS = ("B", "I")  # run the blocks from last to first
REDUCTIONS = ("reduce_scatter", "all_reduce")

Segment = tuple[int, str, int]  # stage, kind, count
INITIAL: Segment = (0, "kept", 0)
NO_STAGE = -1  # instead of a stage: belongs to the rank


class HeterogeneousLayers(ValueError):
    """Middle blocks or microbatches differ."""


class StorageName(NamedTuple):
    """Identity of a storage: segment and block that allocated it, size and index.

    The index counts from the end, because the first block of a pass may allocate more at its
    beginning.
    """

    segment: Segment
    block: BlockIndex | None
    bytes: int
    index_from_end: int


@dataclass(frozen=True)
class StepSize:
    """Blocks of each stage of a rank, and microbatches of a step.

    ``source_stages``: recorded stage for each stage; empty: the one at the same index.
    """

    blocks: tuple[int, ...]
    microbatches: int
    source_stages: tuple[int, ...] = ()


class Extrapolation:
    """The extrapolated step of a rank.

    ``initial_bytes``: storages that exist before the step, with their bytes.
    """

    def __init__(self, op_trace: OpTrace, recorded: StepSize, target: StepSize) -> None:
        """Extrapolate a trace.

        Args:
            op_trace: one recorded step of a rank.
            recorded: blocks and microbatches of the trace.
            target: blocks and microbatches of the step.

        Raises:
            HeterogeneousLayers: if blocks or microbatches that should be alike differ.
        """
        self._op_trace, self._recorded_size, self.target_size = op_trace, recorded, target
        self._source_stages = target.source_stages or tuple(range(len(recorded.blocks)))
        self._storage_names: dict[int, StorageName] = {}
        self._segments: dict[Segment, list[Event]] = defaultdict(list)
        self._target_ids_by_name: dict[StorageName, int] = {}
        self._name_storages(op_trace)
        self._split_segments(op_trace.events)
        self._block_shared: set[int] = set()  # storages
        self._microbatch_shared: set[int] = set()
        self._end_events: set[int] = set()  # ids of events that are not repeated
        self._compare_repeated()
        self._late_freed = self._find_late_freed()
        self._runs: dict[Segment, list[tuple[BlockIndex | None, bool, list[Event]]]] = {}
        self.initial_bytes = {
            target_id: size
            for storage, size in op_trace.initial_bytes.items()
            for target_id in self._target_ids(self._storage_names[storage])
        }

    def segment_events(self, segment: Segment) -> Iterator[Event]:
        """Yield allocations and frees of a segment of the target step."""
        stage, kind, ordinal = segment
        source_segment = self.source_segment(segment)
        if source_segment not in self._runs:
            events = [
                event for event in self._segments.get(source_segment, []) if event.call is None
            ]
            grouped = groupby(events, lambda e: (e.location.block, id(e) in self._end_events))
            self._runs[source_segment] = [(*key, list(run)) for key, run in grouped]
        for block, is_end, run in self._runs[source_segment]:
            for target_stage in self._stages_of_block(block, segment):
                for target_block in self._event_blocks(block, kind, target_stage, is_end):
                    locations = [
                        OpLocation(stage, kind, ordinal, target_block, running)
                        for running in (False, True)
                    ]
                    for event in run:
                        event_location = locations[event.location.is_in_block]
                        for storage in self._touched_storages(
                            event, target_block, target_stage, ordinal
                        ):
                            yield Event(event_location, storage, event.bytes)

    def expand_categories(self, storages: dict[int, str]) -> dict[int, str]:
        """Return the categories of target storages, from those of recorded ones."""
        return {
            target_id: category
            for storage, category in storages.items()
            if storage in self._storage_names
            for target_id in self._target_ids(self._storage_names[storage])
        }

    def events(self, order: Sequence[Segment]) -> Iterator[Event]:
        """Yield all allocations and frees of the target step.

        Args:
            order: the actions of the step.
        """
        for segment in ((0, "start", 0), *order, *((0, kind, 0) for kind in AFTER_ACTIONS)):
            yield from self.segment_events(segment)

    def recorded_ordinals(self, stage: int) -> dict[str, list[int]]:
        """Return the recorded actions for a target stage, by kind."""
        ordinals_by_kind: dict[str, list[int]] = {}
        for recorded, kind, ordinal in self._segments:
            if kind in ACTIONS and recorded == self._source_stages[stage]:
                ordinals_by_kind.setdefault(kind, []).append(ordinal)
        return ordinals_by_kind

    def segment_calls(self, segment: Segment) -> Iterator[tuple[list[OpCall], int, bool]]:
        """Yield groups of calls, their repetitions, and True for those of blocks.

        Reductions that are in flight when backward begins its first block are in the group of that
        block, which overlaps with them.

        Args:
            segment: with a target stage and a recorded ordinal.
        """
        stage, kind, ordinal = segment
        source_segment = (self._source_stages[stage], kind, ordinal) if kind in ACTIONS else segment
        events = self._segments.get(source_segment, [])
        first_block = next((e.location.block for e in events if e.location.is_in_block), None)
        in_flight = _find_in_flight(events) if kind in REVERSED_KINDS and first_block else set()
        groups: dict[tuple[BlockIndex | None, bool], list[OpCall]] = defaultdict(list)
        for event in events:
            if event.call is not None:
                block = event.location.block
                if block == (source_segment[0], OUTSIDE_BLOCKS) and kind in ACTIONS:
                    block = None
                if block is None and id(event) in in_flight:
                    block = first_block
                groups[block, id(event) in self._end_events].append(event.call)
        for (block, is_end), calls in groups.items():
            target_stages = self._stages_of_block(block, segment)
            times = sum(
                len(self._event_blocks(block, kind, stage_index, is_end))
                for stage_index in target_stages
            )
            if times:
                yield calls, times, block is not None

    def count_copies(self, storage: int) -> int:
        """Return the number of blocks' storages that a recorded storage stands for."""
        name = self._storage_names.get(storage)
        if name is None:
            return 1
        return sum(
            len(self._target_blocks(name.block, "F", target_stage))
            for target_stage in self._stages_of_storage(name)
        )

    # ------------------------------------------------------------------- names

    def _name_storages(self, op_trace: OpTrace) -> None:
        counts: Counter[tuple[Segment, BlockIndex | None, int]] = Counter()

        def name(storage: int, segment: Segment, block: BlockIndex | None, size: int) -> None:
            if block is not None and segment[1] in ACTIONS:
                segment = block[0], *segment[1:]  # another stage may have gathered it
            key = segment, block, size
            self._storage_names[storage] = StorageName(*key, counts[key])
            counts[key] += 1

        for storage, size in op_trace.initial_bytes.items():
            microbatch_index = op_trace.input_microbatches.get(storage)
            segment_of_storage = (
                INITIAL if microbatch_index is None else (NO_STAGE, BUFFER, microbatch_index)
            )
            name(storage, segment_of_storage, op_trace.storage_blocks.get(storage), size)
        for storage, size, microbatch, stage in self._find_buffers(op_trace.events):
            name(storage, (stage, BUFFER, microbatch), None, size)
        for event in op_trace.events:
            stage, kind, ordinal, block, _ = event.location
            if event.call is None and event.storage not in self._storage_names:
                name(event.storage, (stage, kind, ordinal), block, event.bytes)
        for storage, storage_name in self._storage_names.items():
            total = counts[storage_name[:3]]
            self._storage_names[storage] = storage_name._replace(
                index_from_end=total - 1 - storage_name.index_from_end
            )

    def _split_segments(self, events: Sequence[Event]) -> None:
        """Split the events into segments."""
        is_recombined = self._source_stages != tuple(range(len(self._recorded_size.blocks)))
        pending: dict[int, list[Event]] = defaultdict(list)  # for a stage's next action
        for event in events:
            segment = event.location[:3]
            stage = self._stage_of_event(event)
            if is_recombined and _is_in_action(event) and stage != event.location.stage:
                is_free = event.call is None and event.bytes < 0
                if stage != NO_STAGE or is_free:
                    pending[stage].append(event)
                    continue
            if _is_in_action(event) or segment[1] in AFTER_ACTIONS:
                for pending_stage in (
                    (event.location.stage,) if _is_in_action(event) else tuple(pending)
                ):
                    for other in pending.pop(pending_stage, ()):
                        # To the start of the action, outside running blocks.
                        location = OpLocation(*segment, other.location.block)
                        self._segments[segment].append(other._replace(location=location))
            self._segments[segment].append(event)

    def _stage_of_event(self, event: Event) -> int:
        """Return the recorded stage that an event belongs to."""
        if event.location.block is not None:
            return event.location.block[0]
        if event.call is not None:
            return event.location.stage
        return _storage_stage(self._storage_names[event.storage])

    def _find_buffers(self, events: Sequence[Event]) -> Iterator[tuple[int, int, int, int]]:
        """Yield per-microbatch storages that are allocated at the start and stay.

        Shards of the inputs are an example.  Yield storage, bytes, microbatch, and the stage if
        only one uses it.  The microbatch is that of the actions which use the storage, or else of
        the inputs that it was computed from.  Without either, a run of equal sizes has one storage
        per microbatch.
        """
        num_microbatches = self._recorded_size.microbatches
        if num_microbatches == 1:
            return
        stages: dict[int, set[int]] = defaultdict(set)  # by storage
        users: dict[int, set[int]] = defaultdict(set)  # microbatches
        sources: dict[int, set[int]] = defaultdict(set)  # microbatches
        for storage, microbatch in self._op_trace.input_microbatches.items():
            sources[storage].add(microbatch)
        for location, _, _, call in events:
            if call is None or call.name == "recv":  # received in an earlier action
                continue
            if location.kind == "start":
                inputs = set[int]().union(*(sources[storage] for storage, _ in call.reads))
                for storage, _ in call.writes:
                    sources[storage] |= inputs
            elif location.kind in ACTIONS:
                for storage, _ in (*call.reads, *call.writes):
                    stages[storage].add(location.stage)
                    users[storage].add(location.ordinal)
        start = [e for e in events if e.location.kind == "start" and e.call is None]
        skipped = {event.storage for event in start if event.bytes < 0}
        skipped |= self._op_trace.initial_bytes.keys()
        unused = []
        for event in start:
            if event.storage in skipped or event.location.block is not None:
                continue
            microbatches = users[event.storage] or sources[event.storage]
            if not microbatches:
                unused.append(event)
            elif len(microbatches) == 1:  # otherwise the step's, such as a count of tokens
                if sources[event.storage] or len(stages[event.storage]) != 1:
                    stages[event.storage] = {NO_STAGE}  # every rank has its shards of the inputs
                yield event.storage, event.bytes, min(microbatches), min(stages[event.storage])
        for size, run in groupby(unused, lambda event: event.bytes):
            storages = [event.storage for event in run]
            if len(storages) % num_microbatches == 0:
                for index, storage in enumerate(storages):
                    yield storage, size, index % num_microbatches, NO_STAGE

    def _assign_id(self, name: StorageName) -> int:
        return self._target_ids_by_name.setdefault(name, len(self._target_ids_by_name))

    def _target_ids(self, name: StorageName) -> list[int]:
        """Return the ids of all target storages that a recorded one stands for."""
        _, kind, ordinal = name.segment
        ordinals = self._target_ordinals(ordinal) if kind in (*ACTIONS, BUFFER) else [ordinal]
        return [
            self._assign_id(_target_name(name, target_stage, target_ordinal, target_block))
            for target_stage in self._stages_of_storage(name)
            for target_ordinal in ordinals
            for target_block in self._target_blocks(name.block, "F", target_stage)
        ]

    # ------------------------------------------------------------------- comparison

    def _compare_repeated(self) -> None:
        """Check that the middle blocks and microbatches are alike; find shared storages."""
        for segment, events in self._segments.items():
            stage, kind, ordinal = segment
            for s, recorded in enumerate(self._recorded_size.blocks):
                if any(
                    recorded < self.target_size.blocks[target_stage]
                    for target_stage in self._target_stages(s)
                ):
                    self._compare_blocks(segment, s, events)
            recorded = self._recorded_size.microbatches
            if recorded < self.target_size.microbatches and ordinal == _repeated_index(recorded):
                previous = self._segments.get((stage, kind, ordinal - 1), [])
                self._check_alike(previous, events, self._microbatch_shared, segment)

    def _compare_blocks(self, segment: Segment, stage: int, events: list[Event]) -> None:
        recorded = self._recorded_size.blocks[stage]
        last = _repeated_index(recorded)
        mirrored = recorded - 1 - last
        pair = (mirrored, mirrored + 1) if segment[1] in REVERSED_KINDS else (last - 1, last)
        first, second = (
            [e for e in events if e.location.block == (stage, index) and e.location.is_in_block]
            for index in pair
        )
        self._check_alike(first, second, self._block_shared, segment)
        # Outside running blocks, only events that both blocks have are repeated.
        outside = [
            [e for e in events if e.location.block == (stage, index) and not e.location.is_in_block]
            for index in pair
        ]
        signature_counts = [Counter(map(_signature, block_events)) for block_events in outside]
        common = signature_counts[0] & signature_counts[1]
        for block_events in outside:
            remaining = common.copy()
            for event in block_events:
                remaining[_signature(event)] -= 1
                if remaining[_signature(event)] < 0:
                    self._end_events.add(id(event))

    def _find_late_freed(self) -> set[int]:
        """Return per-microbatch storages that the last microbatch frees for all.

        Messages are an example: a schedule waits for them at its end.
        """
        recorded = self._recorded_size.microbatches
        if recorded == self.target_size.microbatches:
            return set()
        last_freed: dict[int, int] = {}  # ordinal of each storage's last free
        for event in self._op_trace.events:
            if event.call is None and event.bytes < 0 and event.location.kind in ACTIONS:
                last_freed[event.storage] = event.location.ordinal
        storage_by_name = {name: storage for storage, name in self._storage_names.items()}
        late_freed = set()
        for storage, name in self._storage_names.items():
            stage, kind, ordinal = name.segment
            if kind in ACTIONS and ordinal == _repeated_index(recorded):
                previous = storage_by_name.get(name._replace(segment=(stage, kind, ordinal - 1)))
                freed_ordinals = {
                    last_freed.get(storage),
                    last_freed.get(previous) if previous is not None else None,
                }
                if previous is not None and freed_ordinals == {recorded - 1}:
                    late_freed |= {storage, previous}
        return late_freed

    def _check_alike(
        self, first: list[Event], second: list[Event], shared: set[int], segment: Segment
    ) -> None:
        for a, b in zip(first, second, strict=False):
            if _signature(a) != _signature(b):
                raise HeterogeneousLayers(f"{segment}: {_signature(a)} and {_signature(b)}")
            if a.call is None and a.storage == b.storage:
                shared.add(a.storage)
        if len(first) != len(second):
            raise HeterogeneousLayers(f"{segment}: {len(first)} and {len(second)} events")

    # ------------------------------------------------------------------- correspondence

    def _target_stages(self, stage: int) -> list[int]:
        """Return the target stages that a recorded stage stands for."""
        return [
            target_stage
            for target_stage, source_stage in enumerate(self._source_stages)
            if source_stage == stage
        ]

    def _stages_of_storage(self, name: StorageName) -> list[int]:
        stage = _storage_stage(name)
        return [NO_STAGE] if stage == NO_STAGE else self._target_stages(stage)

    def _stages_of_block(self, block: BlockIndex | None, segment: Segment) -> list[int]:
        """Return the target stages of the events of a recorded block."""
        if block is None:
            return [segment[0] if segment[1] in ACTIONS else NO_STAGE]
        target_stages = self._target_stages(block[0])
        return (
            [segment[0]] if segment[1] in ACTIONS and segment[0] in target_stages else target_stages
        )

    def _target_blocks(
        self, block: BlockIndex | None, kind: str, stage: int
    ) -> list[BlockIndex | None]:
        """Return the target blocks that a recorded one stands for, in execution order."""
        if block is None:
            return [None]
        index = block[1]
        recorded, target = self._recorded_size.blocks[block[0]], self.target_size.blocks[stage]
        if recorded == target or index == OUTSIDE_BLOCKS:
            return [(stage, index)]
        if kind in REVERSED_KINDS:  # count from the other end
            mirrored = _target_indices(recorded - 1 - index, recorded, target)
            return [(stage, target - 1 - target_index) for target_index in mirrored]
        return [(stage, target_index) for target_index in _target_indices(index, recorded, target)]

    def _event_blocks(
        self, block: BlockIndex | None, kind: str, stage: int, is_end: bool
    ) -> list[BlockIndex | None]:
        """Return `_target_blocks`; for an end event, the block at the same end."""
        if block is None or not is_end:
            return self._target_blocks(block, kind, stage)
        index = block[1]
        if kind not in REVERSED_KINDS:
            index += self.target_size.blocks[stage] - self._recorded_size.blocks[block[0]]
        return [(stage, index)]

    def _target_ordinals(self, ordinal: int) -> list[int]:
        """Return the microbatches that a recorded one stands for."""
        return list(
            _target_indices(
                ordinal, self._recorded_size.microbatches, self.target_size.microbatches
            )
        )

    def source_segment(self, segment: Segment) -> Segment:
        """Return the recorded segment that a target segment repeats."""
        stage, kind, ordinal = segment
        if kind not in ACTIONS:
            return segment
        recorded, target = self._recorded_size.microbatches, self.target_size.microbatches
        if recorded < target:
            ordinal = max(min(ordinal, _repeated_index(recorded)), ordinal - target + recorded)
        return self._source_stages[stage], kind, ordinal

    # ------------------------------------------------------------------- repetition

    def _touched_storages(
        self, event: Event, block: BlockIndex | None, stage: int, ordinal: int
    ) -> list[int]:
        """Return the target storages of an event.

        Within actions it is one storage; outside, one for each microbatch that it stands for.

        Args:
            event: recorded event.
            block: target block of the event.
            stage: target stage of the event.
            ordinal: target microbatch of the event.
        """
        name = self._storage_names[event.storage]
        (_, kind, storage_ordinal), storage_block, _, _ = name
        event_location, storage_stage = event.location, _storage_stage(name)
        event_stage = (
            event_location.block[0] if event_location.block is not None else event_location.stage
        )
        is_same_stage = stage != NO_STAGE and storage_stage == event_stage
        stages = [stage] if is_same_stage else self._stages_of_storage(name)
        if not stages:  # a stage that only the recording has
            return []
        if storage_block is not None and block is not None and event_location.block is not None:
            offset = storage_block[1] - event_location.block[1]
            if not is_same_stage or event.storage in self._block_shared:
                storage_block = self._target_blocks(storage_block, "F", stages[-1])[-1]
            elif OUTSIDE_BLOCKS not in (storage_block[1], event_location.block[1]):
                storage_block = (block[0], block[1] + offset)
        ordinals = [storage_ordinal]
        if kind in (*ACTIONS, BUFFER):
            offset = storage_ordinal - event_location.ordinal
            is_last_microbatch = event_location.ordinal == self._recorded_size.microbatches - 1
            if event_location.kind not in ACTIONS or (
                is_last_microbatch and event.storage in self._late_freed
            ):
                ordinals = self._target_ordinals(storage_ordinal)
            elif event.storage in self._microbatch_shared or abs(offset) > 2:
                ordinals = self._target_ordinals(storage_ordinal)[-1:]
            else:
                ordinals = [ordinal + offset]
        return [
            self._assign_id(_target_name(name, target_stage, target_ordinal, storage_block))
            for target_stage in stages
            for target_ordinal in ordinals
        ]


def _find_in_flight(events: Sequence[Event]) -> set[int]:
    """Return the ids of reductions between the last product before a block and it."""
    in_flight: set[int] = set()
    for event in takewhile(lambda event: not event.location.is_in_block, events):
        if event.call is not None and event.call.flops:
            in_flight.clear()
        elif event.call is not None and event.call.name in REDUCTIONS:
            in_flight.add(id(event))
    return in_flight


def _is_in_action(event: Event) -> bool:
    return event.location.kind in ACTIONS


def _storage_stage(name: StorageName) -> int:
    """Return the recorded stage of a storage."""
    (stage, kind, _), block, _, _ = name
    if block is not None:
        return block[0]
    return stage if kind in (*ACTIONS, BUFFER) else NO_STAGE


def _target_name(
    name: StorageName, stage: int, ordinal: int, block: BlockIndex | None
) -> StorageName:
    """Return the name of a target storage."""
    (_, kind, _), _, size, index_from_end = name
    if block is not None:
        block = stage, block[1]
    return StorageName((max(stage, 0), kind, ordinal), block, size, index_from_end)


def _repeated_index(recorded: int) -> int:
    """Return the index that is repeated, the last one of the middle."""
    return recorded - 1 - (recorded - 2) // 2


def _target_indices(index: int, recorded: int, target: int) -> Sequence[int]:
    """Return the target indices that a recorded index stands for."""
    repeated, added = _repeated_index(recorded), target - recorded
    if index == repeated:
        return range(index, index + added + 1)
    return [index + added * (index > repeated)]


def _signature(event: Event) -> tuple[object, ...]:
    """Return an event without location and storage, for comparison."""
    call = event.call
    return (event.bytes,) if call is None else (call.name, call.shapes, call.group, call.flops)
