"""EXPAND: a step of many blocks and microbatches, from the recording of one of a few.

All blocks of a stage but those at its ends are alike, and so are all microbatches but the first
ones and the last one.  What a *middle* one does, and what it refers to in its own block and in
those around it, is taken from the recording and repeated.  Four blocks and four microbatches are
mostly enough: the ends, and two middle ones that are compared with each other.  The comparison
tells two things.  If they differ, blocks are not alike, and nothing is extrapolated (`NotAlike`).
And a storage that both touch is shared by all, while otherwise each touches its own.

    recorded blocks            0   1   2   3
    forward of n blocks        0   1   2   2   2 ... 2   3        2 is repeated, and like 1
    backward                   3   2   1   1   1 ... 1   0        1 is repeated, and like 2
    m microbatches             0   1   2   2   2 ... 2   3        2 is repeated, and like 1

A repetition has storages of its own.  What happens while no block runs (clipping, the optimizer,
the end of a pass) belongs to the block whose storage it touches.  It is repeated for all blocks if
it happens to both middle ones; otherwise it is an end's.

In a pipeline the actions come in the order of the timetable, whatever their order was in the
recording.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

from weft.predict.record import Block, Call, Event, Recording, Where

ACTIONS = ("F", "B", "I", "W")
BUFFER = "buffer"  # in the place of an action: made for each microbatch before the first one
DOWNWARD = ("B", "I")  # go through the blocks from the last to the first

Segment = tuple[int, str, int]  # stage, kind, count
KEPT: Segment = (0, "kept", 0)


class NotAlike(ValueError):
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
    """``blocks``: of each stage of the rank; ``microbatches``: of a step."""

    blocks: tuple[int, ...]
    microbatches: int


class Expansion:
    """The whole step.

    ``kept``: storages that are there before it, with their bytes; `events`: what changes of that;
    `works`: what is computed and exchanged.
    """

    def __init__(self, recording: Recording, recorded: Sizes, whole: Sizes) -> None:
        """
        Raises:
            NotAlike: if blocks or microbatches that should be alike are not.
        """
        self._recording, self._recorded, self.whole = recording, recorded, whole
        self._names: dict[int, Name] = {}
        self._segments: dict[Segment, list[Event]] = defaultdict(list)
        self._ids: dict[Name, int] = {}
        self._name_all(recording)
        self._shared_by_blocks: set[int] = set()  # storages
        self._shared_by_microbatches: set[int] = set()
        self._ends: set[int] = set()  # ids of events that are not repeated
        self._compare()
        self._kept_to_the_end = self._find_kept()
        self._runs: dict[Segment, list[tuple[Block | None, bool, list[Event]]]] = {}
        self._calls: dict[Segment, dict[tuple[Block | None, bool], list[tuple[int, Call]]]] = {}
        for place, event in enumerate(recording.events):
            if event.call is not None:
                of = self._calls.setdefault(event.where[:3], {})
                key = event.where.block, id(event) in self._ends
                of.setdefault(key, []).append((place, event.call))
        self.kept = {
            real: size
            for storage, size in recording.kept.items()
            for real in self._all(self._names[storage])
        }

    def segment(self, segment: Segment) -> Iterator[Event]:
        """What is allocated and freed in a recorded action."""
        return self._segment(segment, segment[2])

    def of(self, whole: Sizes) -> Expansion:
        """The same recording as another whole."""
        return Expansion(self._recording, self._recorded, whole)

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
        yield from self._segment((0, "start", 0), 0)
        for stage, kind, count in order:
            yield from self._segment(self.source((stage, kind, count)), count)
        for kind in ("clip", "optimizer", "end"):
            yield from self._segment((0, kind, 0), 0)

    def segments(self) -> Iterator[Segment]:
        """Those that were recorded."""
        yield from self._segments

    def works(self, segment: Segment) -> Iterator[tuple[list[tuple[int, Call]], int]]:
        """The calls of a recorded segment with their places in the recording, in groups, and how
        often each group is done."""
        _, kind, _ = segment
        for (block, is_end), calls in self._calls.get(segment, {}).items():
            yield calls, 1 if is_end else len(self._blocks(block, kind))

    def repeats(self, storage: int) -> int:
        """How many storages of the whole's blocks a recorded one stands for."""
        name = self._names.get(storage)
        return 1 if name is None else len(self._blocks(name.block, "F"))

    # ------------------------------------------------------------------- names

    def _name_all(self, recording: Recording) -> None:
        counts: Counter[tuple[Segment, Block | None, int]] = Counter()

        def name(storage: int, segment: Segment, block: Block | None, size: int) -> None:
            key = segment, block, size
            self._names[storage] = Name(*key, counts[key])
            counts[key] += 1

        for storage, size in recording.kept.items():
            kept = (0, BUFFER, recording.rows[storage]) if storage in recording.rows else KEPT
            name(storage, kept, recording.owner.get(storage), size)
        for storage, size, microbatch in self._buffers(recording.events):
            name(storage, (0, BUFFER, microbatch), None, size)
        for event in recording.events:
            stage, kind, count, block, _ = event.where
            if event.call is None and event.storage not in self._names:
                name(event.storage, (stage, kind, count), block, event.bytes)
            self._segments[stage, kind, count].append(event)
        for storage, known in self._names.items():
            total = counts[known[:3]]
            self._names[storage] = known._replace(number=total - 1 - known.number)

    def _buffers(self, events: Sequence[Event]) -> Iterator[tuple[int, int, int]]:
        """Those that a pipeline makes at the start to receive in: storage, bytes, microbatch.

        A stage makes one for each microbatch, one after the other.
        """
        made = [e for e in events if e.where.kind == "start" and e.call is None and e.bytes > 0]
        for (block, size), run in groupby(made, lambda event: (event.where.block, event.bytes)):
            alike, each = list(run), self._recorded.microbatches
            if block is None and each > 1 and len(alike) % each == 0:
                for place, event in enumerate(alike):
                    yield event.storage, size, place % each

    def _id(self, name: Name) -> int:
        return self._ids.setdefault(name, len(self._ids))

    def _all(self, name: Name) -> list[int]:
        """Every storage of the whole that a recorded one stands for."""
        (stage, kind, count), block, size, number = name
        counts = self._counts(count) if kind in (*ACTIONS, BUFFER) else [count]
        return [
            self._id(Name((stage, kind, c), b, size, number))
            for c in counts
            for b in self._blocks(block, "F")
        ]

    # ------------------------------------------------------------------- comparing

    def _compare(self) -> None:
        """Are the middle ones alike, and which storages do they share?"""
        for segment, events in self._segments.items():
            stage, kind, count = segment
            for s, recorded in enumerate(self._recorded.blocks):
                if recorded < self.whole.blocks[s]:
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
                raise NotAlike(f"{segment}: {_does(a)} and {_does(b)}")
            if a.call is None and a.storage == b.storage:
                shared.add(a.storage)
        if len(first) != len(second):
            raise NotAlike(f"{segment}: {len(first)} and {len(second)} events")

    # ------------------------------------------------------------------- places

    def _blocks(self, block: Block | None, kind: str) -> list[Block | None]:
        """The blocks of the whole that a recorded one stands for, in the order of their use."""
        if block is None:
            return [None]
        stage, place = block
        recorded, whole = self._recorded.blocks[stage], self.whole.blocks[stage]
        if recorded == whole:
            return [block]
        if kind in DOWNWARD:  # the same seen from the other end
            mirrored = _stands_for(recorded - 1 - place, recorded, whole)
            return [(stage, whole - 1 - real) for real in mirrored]
        return [(stage, real) for real in _stands_for(place, recorded, whole)]

    def _from_end(self, block: Block, kind: str) -> Block:
        """An end's block by its distance from where the pass has ended."""
        stage, place = block
        if kind in DOWNWARD:
            return block
        return stage, self.whole.blocks[stage] - self._recorded.blocks[stage] + place

    def _counts(self, count: int) -> list[int]:
        """The microbatches that a recorded one stands for."""
        return list(_stands_for(count, self._recorded.microbatches, self.whole.microbatches))

    def source(self, segment: Segment) -> Segment:
        """The recorded action that one is like."""
        stage, kind, count = segment
        recorded, whole = self._recorded.microbatches, self.whole.microbatches
        if recorded == whole:
            return segment
        return stage, kind, max(min(count, _last_middle(recorded)), count - whole + recorded)

    # ------------------------------------------------------------------- repeating

    def _segment(self, segment: Segment, count: int) -> Iterator[Event]:
        stage, kind, _ = segment
        if segment not in self._runs:
            events = [event for event in self._segments.get(segment, []) if event.call is None]
            grouped = groupby(events, lambda e: (e.where.block, id(e) in self._ends))
            self._runs[segment] = [(*key, list(run)) for key, run in grouped]
        for block, is_end, run in self._runs[segment]:
            reals: list[Block | None]
            if block is not None and is_end:
                reals = [self._from_end(block, kind)]
            else:
                reals = self._blocks(block, kind)
            for real in reals:
                wheres = [Where(stage, kind, count, real, running) for running in (False, True)]
                for event in run:
                    where = wheres[event.where.running]
                    for storage in self._touched(event, real, count):
                        yield Event(where, storage, event.bytes)

    def _touched(self, event: Event, block: Block | None, count: int) -> list[int]:
        """The storages of an event that happens in ``block`` and the microbatch ``count``.

        One, but outside of actions those of all microbatches that it stands for.
        """
        (stage, kind, its_count), its_block, size, number = self._names[event.storage]
        here = event.where
        if its_block is not None and block is not None and here.block is not None:
            away = its_block[1] - here.block[1]
            if here.block[0] != its_block[0] or event.storage in self._shared_by_blocks:
                its_block = self._blocks(its_block, "F")[-1]
            else:
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
        return [self._id(Name((stage, kind, c), its_block, size, number)) for c in counts]


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
