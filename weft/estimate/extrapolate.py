"""A step of many blocks and microbatches, from the recording of one of a few.

All blocks of a stage but those at its ends are alike, and so are all microbatches but the first
ones and the last one.  What a *middle* one does, and what it refers to in its own block and in
those around it, is taken from the recording and repeated.  Four blocks and four microbatches are
mostly enough: the ends, and two middle ones that are compared with each other.  The comparison
tells two things.  If they differ, blocks are not alike, and nothing is extrapolated (`HeterogeneousLayers`).
And a storage that both touch is shared by all, while otherwise each touches its own.

    recorded blocks            0   1   2   3
    forward of n blocks        0   1   2   2   2 ... 2   3        2 is repeated, and like 1
    backward                   3   2   1   1   1 ... 1   0        1 is repeated, and like 2
    m microbatches             0   1   2   2   2 ... 2   3        2 is repeated, and like 1

A repetition has storages of its own.  What happens while no block runs (clipping, the optimizer,
the end of a pass) belongs to the block whose storage it touches.  It is repeated for all blocks if
it happens to both middle ones; otherwise it is an end's.

In a pipeline the actions come in the order of the timetable, whatever their order was in the
recording.  Nor need the stages of a rank be the recorded ones: it is put together from stages that
were recorded together, each taken as often as it is needed.  What happens in the passes of one to
what is another's (weights that are gathered for the next pass, messages that are let go at the end)
then goes to that stage's next pass, or to the end.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

from weft.estimate.op_recorder import AROUND, Block, Call, Event, OpTrace, Where

ACTIONS = ("F", "B", "I", "W")
BUFFER = "buffer"  # in the place of an action: made for each microbatch before the first one
AFTER = ("clip", "optimizer", "end")
DOWNWARD = ("B", "I")  # go through the blocks from the last to the first

Segment = tuple[int, str, int]  # stage, kind, count
KEPT: Segment = (0, "kept", 0)
NO_STAGE = -1  # in the place of a stage: of the rank


class HeterogeneousLayers(ValueError):
    """Middle blocks or microbatches do different things."""


class Name(NamedTuple):
    """A storage: the ``number``-th of its size, from the end, that began in a segment and block.

    From the end, for the first block of a pass does what the others do, and something before it.
    """

    segment: Segment
    block: Block | None
    bytes: int
    number: int


@dataclass(frozen=True)
class Sizes:
    """``blocks``: of each stage of the rank; ``microbatches``: of a step; ``like``: the recorded
    stage that each is like, mostly the one at its place."""

    blocks: tuple[int, ...]
    microbatches: int
    like: tuple[int, ...] = ()


class Expansion:
    """The whole step.

    ``kept``: storages that are there before it, with their bytes; `events`: what changes of that;
    `works`: what is computed and exchanged.
    """

    def __init__(self, recording: OpTrace, recorded: Sizes, whole: Sizes) -> None:
        """
        Raises:
            NotAlike: if blocks or microbatches that should be alike are not.
        """
        self._recording, self._recorded, self.whole = recording, recorded, whole
        self._like = whole.like or tuple(range(len(recorded.blocks)))
        self._names: dict[int, Name] = {}
        self._segments: dict[Segment, list[Event]] = defaultdict(list)
        self._ids: dict[Name, int] = {}
        self._name_all(recording)
        self._place = {id(event): place for place, event in enumerate(recording.events)}
        self._divide(recording.events)
        self._shared_by_blocks: set[int] = set()  # storages
        self._shared_by_microbatches: set[int] = set()
        self._ends: set[int] = set()  # ids of events that are not repeated
        self._compare()
        self._kept_to_the_end = self._find_kept()
        self._runs: dict[Segment, list[tuple[Block | None, bool, list[Event]]]] = {}
        self._calls: dict[Segment, dict[tuple[Block | None, bool], list[tuple[int, Call]]]] = {}
        for segment, events in self._segments.items():
            for event in events:
                if event.call is not None:
                    of, block = self._calls.setdefault(segment, {}), event.where.block
                    if block == (segment[0], AROUND) and segment[1] in ACTIONS:
                        block = None
                    key = block, id(event) in self._ends
                    of.setdefault(key, []).append((self._place[id(event)], event.call))
        self.kept = {
            real: size
            for storage, size in recording.kept.items()
            for real in self._all(self._names[storage])
        }

    def segment(self, segment: Segment) -> Iterator[Event]:
        """What is allocated and freed in an action of the whole step, or in ``start``, ``clip``,
        ``optimizer`` or ``end``."""
        stage, kind, count = segment
        source = self.source(segment)
        if source not in self._runs:
            events = [event for event in self._segments.get(source, []) if event.call is None]
            grouped = groupby(events, lambda e: (e.where.block, id(e) in self._ends))
            self._runs[source] = [(*key, list(run)) for key, run in grouped]
        for block, is_end, run in self._runs[source]:
            for place in self._stages(block, segment):
                for real in self._reals(block, kind, place, is_end):
                    wheres = [Where(stage, kind, count, real, running) for running in (False, True)]
                    for event in run:
                        where = wheres[event.where.running]
                        for storage in self._touched(event, real, place, count):
                            yield Event(where, storage, event.bytes)

    def category_of(self, storages: dict[int, str]) -> dict[int, str]:
        """What is told of recorded storages, of those of the whole that they stand for."""
        return {
            real: told
            for storage, told in storages.items()
            if storage in self._names
            for real in self._all(self._names[storage])
        }

    def events(self, order: Sequence[Segment]) -> Iterator[Event]:
        """All that is allocated and freed, with the ids of the whole's storages.

        Args:
            order: the actions of the whole step: stage, kind, count.
        """
        for segment in ((0, "start", 0), *order, *((0, kind, 0) for kind in AFTER)):
            yield from self.segment(segment)

    def counts(self, stage: int) -> dict[str, list[int]]:
        """Of a stage of the whole, by kind the recorded actions that it is like."""
        found: dict[str, list[int]] = {}
        for recorded, kind, count in self._segments:
            if kind in ACTIONS and recorded == self._like[stage]:
                found.setdefault(kind, []).append(count)
        return found

    def works(self, segment: Segment) -> Iterator[tuple[list[tuple[int, Call]], int]]:
        """The calls of a segment with their places in the recording, in groups, and how often each
        group is done.

        Args:
            segment: of the whole by its stage, but of the recording by its count.
        """
        stage, kind, count = segment
        source = (self._like[stage], kind, count) if kind in ACTIONS else segment
        for (block, is_end), calls in self._calls.get(source, {}).items():
            places = self._stages(block, segment)
            times = sum(len(self._reals(block, kind, place, is_end)) for place in places)
            if times:
                yield calls, times

    def repeats(self, storage: int) -> int:
        """How many storages of the whole's blocks a recorded one stands for."""
        name = self._names.get(storage)
        if name is None:
            return 1
        return sum(len(self._blocks(name.block, "F", place)) for place in self._places_of(name))

    # ------------------------------------------------------------------- names

    def _name_all(self, recording: OpTrace) -> None:
        counts: Counter[tuple[Segment, Block | None, int]] = Counter()

        def name(storage: int, segment: Segment, block: Block | None, size: int) -> None:
            if block is not None and segment[1] in ACTIONS:
                segment = block[0], *segment[1:]  # wherever it was gathered
            key = segment, block, size
            self._names[storage] = Name(*key, counts[key])
            counts[key] += 1

        for storage, size in recording.kept.items():
            row = recording.rows.get(storage)
            kept = KEPT if row is None else (NO_STAGE, BUFFER, row)
            name(storage, kept, recording.owner.get(storage), size)
        for storage, size, microbatch, stage in self._buffers(recording.events):
            name(storage, (stage, BUFFER, microbatch), None, size)
        for event in recording.events:
            stage, kind, count, block, _ = event.where
            if event.call is None and event.storage not in self._names:
                name(event.storage, (stage, kind, count), block, event.bytes)
        for storage, known in self._names.items():
            total = counts[known[:3]]
            self._names[storage] = known._replace(number=total - 1 - known.number)

    def _divide(self, events: Sequence[Event]) -> None:
        """Into segments."""
        composed = self._like != tuple(range(len(self._recorded.blocks)))
        waiting: dict[int, list[Event]] = defaultdict(list)  # for a stage's next action
        for event in events:
            segment = event.where[:3]
            stage = self._stage_of_event(event)
            if composed and _in_action(event) and stage != event.where.stage:
                freed = event.call is None and event.bytes < 0
                if stage != NO_STAGE or freed:
                    waiting[stage].append(event)
                    continue
            if _in_action(event) or segment[1] in AFTER:
                for its in (event.where.stage,) if _in_action(event) else tuple(waiting):
                    for other in waiting.pop(its, ()):
                        self._segments[segment].append(self._moved(other, event.where))
            self._segments[segment].append(event)

    def _moved(self, event: Event, there: Where) -> Event:
        """It happens before what happens there, while no block runs."""
        where = Where(there.stage, there.kind, there.turn, event.where.block)
        moved = event._replace(where=where)
        self._place[id(moved)] = self._place[id(event)]
        return moved

    def _stage_of_event(self, event: Event) -> int:
        """The recorded stage that it belongs to, wherever it happens."""
        if event.where.block is not None:
            return event.where.block[0]
        if event.call is not None:
            return event.where.stage
        return _stage_of(self._names[event.storage])

    def _buffers(self, events: Sequence[Event]) -> Iterator[tuple[int, int, int, int]]:
        """What is made at the start for each microbatch and stays, as a pipeline's buffers to
        receive in: storage, bytes, microbatch, and the stage that receives.

        Either one run of storages of a size is one microbatch's, or a run has one for each.
        """
        each = self._recorded.microbatches
        used: dict[int, int] = {}
        for event in events:
            if event.call is not None and _in_action(event):
                for storage, _ in (*event.call.reads, *event.call.writes):
                    used.setdefault(storage, event.where.stage)
        start = [e for e in events if e.where.kind == "start" and e.call is None]
        freed = {event.storage for event in start if event.bytes < 0}
        made = [event for event in start if event.bytes > 0]
        runs: dict[tuple[Block | None, int], list[list[Event]]] = defaultdict(list)
        for key, run in groupby(made, lambda event: (event.where.block, event.bytes)):
            runs[key].append(list(run))
        for (block, size), alike in runs.items():
            if block is not None or each == 1:
                continue
            for number, of_size in enumerate(alike):
                for place, event in enumerate(of_size):
                    if len(of_size) % each == 0:
                        microbatch = place % each
                    elif len(alike) == each:
                        microbatch = number
                    else:
                        break
                    if event.storage not in freed:
                        stage = used.get(event.storage, NO_STAGE)
                        yield event.storage, size, microbatch, stage

    def _id(self, name: Name) -> int:
        return self._ids.setdefault(name, len(self._ids))

    def _all(self, name: Name) -> list[int]:
        """Every storage of the whole that a recorded one stands for."""
        _, kind, count = name.segment
        counts = self._counts(count) if kind in (*ACTIONS, BUFFER) else [count]
        return [
            self._id(_at(name, place, c, b))
            for place in self._places_of(name)
            for c in counts
            for b in self._blocks(name.block, "F", place)
        ]

    # ------------------------------------------------------------------- comparing

    def _compare(self) -> None:
        """Are the middle ones alike, and which storages do they share?"""
        for segment, events in self._segments.items():
            stage, kind, count = segment
            for s, recorded in enumerate(self._recorded.blocks):
                if any(recorded < self.whole.blocks[place] for place in self._places(s)):
                    self._compare_blocks(segment, s, events)
            recorded = self._recorded.microbatches
            if recorded < self.whole.microbatches and count == _last_middle(recorded):
                twin = self._segments.get((stage, kind, count - 1), [])
                self._align(twin, events, self._shared_by_microbatches, segment)

    def _compare_blocks(self, segment: Segment, stage: int, events: list[Event]) -> None:
        recorded = self._recorded.blocks[stage]
        last = _last_middle(recorded)
        lead = recorded - 1 - last
        twins = (lead, lead + 1) if segment[1] in DOWNWARD else (last - 1, last)
        first, second = (
            [e for e in events if e.where.block == (stage, place) and e.where.running]
            for place in twins
        )
        self._align(first, second, self._shared_by_blocks, segment)
        # Around the running blocks only what happens to both is repeated.
        around = [
            [e for e in events if e.where.block == (stage, place) and not e.where.running]
            for place in twins
        ]
        counts = [Counter(map(_does, some)) for some in around]
        both = counts[0] & counts[1]
        for some in around:
            left = both.copy()
            for event in some:
                left[_does(event)] -= 1
                if left[_does(event)] < 0:
                    self._ends.add(id(event))

    def _find_kept(self) -> set[int]:
        """Storages of microbatches that are all let go in the last one's actions, as messages are
        that a schedule waits for when it is through."""
        recorded = self._recorded.microbatches
        if recorded == self.whole.microbatches:
            return set()
        freed: dict[int, int] = {}  # the turn in which a storage was freed last
        for event in self._recording.events:
            if event.call is None and event.bytes < 0 and event.where.kind in ACTIONS:
                freed[event.storage] = event.where.turn
        of_name = {name: storage for storage, name in self._names.items()}
        found = set()
        for storage, name in self._names.items():
            stage, kind, count = name.segment
            if kind in ACTIONS and count == _last_middle(recorded):
                twin = of_name.get(name._replace(segment=(stage, kind, count - 1)))
                both = {freed.get(storage), freed.get(twin) if twin is not None else None}
                if twin is not None and both == {recorded - 1}:
                    found |= {storage, twin}
        return found

    def _align(
        self, first: list[Event], second: list[Event], shared: set[int], segment: Segment
    ) -> None:
        for a, b in zip(first, second, strict=False):
            if _does(a) != _does(b):
                raise HeterogeneousLayers(f"{segment}: {_does(a)} and {_does(b)}")
            if a.call is None and a.storage == b.storage:
                shared.add(a.storage)
        if len(first) != len(second):
            raise HeterogeneousLayers(f"{segment}: {len(first)} and {len(second)} events")

    # ------------------------------------------------------------------- places

    def _places(self, stage: int) -> list[int]:
        """The stages of the whole that are like a recorded one."""
        return [place for place, like in enumerate(self._like) if like == stage]

    def _places_of(self, name: Name) -> list[int]:
        stage = _stage_of(name)
        return [NO_STAGE] if stage == NO_STAGE else self._places(stage)

    def _stages(self, block: Block | None, segment: Segment) -> list[int]:
        """The stages of the whole to which happens in a segment what was recorded of a block."""
        if block is None:
            return [segment[0] if segment[1] in ACTIONS else NO_STAGE]
        there = self._places(block[0])
        return [segment[0]] if segment[1] in ACTIONS and segment[0] in there else there

    def _blocks(self, block: Block | None, kind: str, stage: int) -> list[Block | None]:
        """The blocks of a stage of the whole that a recorded one stands for, in the order of their
        use."""
        if block is None:
            return [None]
        place = block[1]
        recorded, whole = self._recorded.blocks[block[0]], self.whole.blocks[stage]
        if recorded == whole or place == AROUND:
            return [(stage, place)]
        if kind in DOWNWARD:  # the same seen from the other end
            mirrored = _stands_for(recorded - 1 - place, recorded, whole)
            return [(stage, whole - 1 - real) for real in mirrored]
        return [(stage, real) for real in _stands_for(place, recorded, whole)]

    def _reals(
        self, block: Block | None, kind: str, stage: int, is_end: bool
    ) -> list[Block | None]:
        """`_blocks`, but an end's is one: by its distance from where the pass has ended."""
        if block is None or not is_end:
            return self._blocks(block, kind, stage)
        place = block[1]
        if kind not in DOWNWARD:
            place += self.whole.blocks[stage] - self._recorded.blocks[block[0]]
        return [(stage, place)]

    def _counts(self, count: int) -> list[int]:
        """The microbatches that a recorded one stands for."""
        return list(_stands_for(count, self._recorded.microbatches, self.whole.microbatches))

    def source(self, segment: Segment) -> Segment:
        """The recorded action that one is like."""
        stage, kind, count = segment
        if kind not in ACTIONS:
            return segment
        recorded, whole = self._recorded.microbatches, self.whole.microbatches
        if recorded < whole:
            count = max(min(count, _last_middle(recorded)), count - whole + recorded)
        return self._like[stage], kind, count

    # ------------------------------------------------------------------- repeating

    def _touched(self, event: Event, block: Block | None, stage: int, count: int) -> list[int]:
        """The storages of an event that happens in ``block`` of ``stage`` of the whole, and in the
        microbatch ``count``.

        One, but outside of actions those of all microbatches that it stands for.
        """
        name = self._names[event.storage]
        (_, kind, its_count), its_block, _, _ = name
        here, its_stage = event.where, _stage_of(name)
        ours = here.block[0] if here.block is not None else here.stage
        same = stage != NO_STAGE and its_stage == ours
        stages = [stage] if same else self._places_of(name)
        if its_block is not None and block is not None and here.block is not None:
            away = its_block[1] - here.block[1]
            if not same or event.storage in self._shared_by_blocks:
                its_block = self._blocks(its_block, "F", stages[-1])[-1]
            elif AROUND not in (its_block[1], here.block[1]):
                its_block = (block[0], block[1] + away)
        counts = [its_count]
        if kind in (*ACTIONS, BUFFER):
            away = its_count - here.turn
            at_end = here.turn == self._recorded.microbatches - 1
            if here.kind not in ACTIONS or (at_end and event.storage in self._kept_to_the_end):
                counts = self._counts(its_count)
            elif event.storage in self._shared_by_microbatches or abs(away) > 2:
                counts = self._counts(its_count)[-1:]
            else:
                counts = [count + away]
        return [self._id(_at(name, place, c, its_block)) for place in stages for c in counts]


def _in_action(event: Event) -> bool:
    return event.where.kind in ACTIONS


def _stage_of(name: Name) -> int:
    """The recorded stage that a storage is of."""
    (stage, kind, _), block, _, _ = name
    if block is not None:
        return block[0]
    return stage if kind in (*ACTIONS, BUFFER) else NO_STAGE


def _at(name: Name, stage: int, count: int, block: Block | None) -> Name:
    """A storage of the whole, by a recorded one's name."""
    (_, kind, _), _, size, number = name
    if block is not None:
        block = stage, block[1]
    return Name((max(stage, 0), kind, count), block, size, number)


def _last_middle(recorded: int) -> int:
    """Of so many, the one that is repeated: there are as many before the middle as after it."""
    return recorded - 1 - (recorded - 2) // 2


def _stands_for(place: int, recorded: int, whole: int) -> Sequence[int]:
    """The places of the whole that a recorded one stands for."""
    middle, more = _last_middle(recorded), whole - recorded
    if place == middle:
        return range(place, place + more + 1)
    return [place + more * (place > middle)]


def _does(event: Event) -> tuple[object, ...]:
    """What happens, but for where and to which storage."""
    call = event.call
    return (event.bytes,) if call is None else (call.name, call.shapes, call.group, call.flops)
