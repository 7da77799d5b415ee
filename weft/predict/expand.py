"""EXPAND: a step of many blocks and microbatches, from the recording of one of a few.

All blocks of a stage but the ends are alike, and so are all microbatches but the first and the
last ones: what a *middle* one does and what it refers to, in its own block and in the one before,
is written down once and then repeated.  Four blocks and four microbatches are enough: two at the
ends, and two middle ones which are compared with each other.  The comparison tells two things.
Where they differ, blocks are not alike, and nothing is extrapolated (`NotAlike`).  And where both
refer to *the same* storage it is shared by all, while otherwise each refers to its own.

    recorded blocks            0   1   2   3
    forward of n blocks        0   1   2   2   2 ... 2   3        2 is repeated
    backward                   3   2   1   1   1 ... 1   0        1 is repeated
    microbatches of m          0   1   2   2   2 ... 2   3        2 is repeated

A repetition has storages of its own.  Outside of blocks (clipping, the optimizer, the end of the
step) an event belongs to the block whose storage it touches, and is repeated with its neighbours
of that block.

In a pipeline the actions come in the order of the timetable, whatever their order was in the
recording.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

from weft.predict.record import Block, Call, Event, Recording, Where

# Recorded are at most so many blocks of a stage, and microbatches.
RECORDED = 4
ENDS = 2  # of them that are compared: 1 and 2

Segment = tuple[int, str, int]  # stage, kind, count


class NotAlike(ValueError):
    """Middle blocks or microbatches do different things."""


class Name(NamedTuple):
    """A storage: the ``number``-th that began in a segment and block."""

    segment: Segment
    block: Block | None
    number: int


@dataclass(frozen=True)
class Sizes:
    """``blocks``: of each stage; ``microbatches``: of a step."""

    blocks: tuple[int, ...]
    microbatches: int


def expand(
    recording: Recording, recorded: Sizes, whole: Sizes, order: Sequence[Segment]
) -> Iterator[Event]:
    """The events of the whole step; storages are numbered anew.

    Args:
        recorded, whole: what was recorded, and what is wanted.
        order: the actions of the whole step: stage, kind, count.

    Raises:
        NotAlike: if blocks or microbatches that should be alike are not.
    """
    return _Expansion(recording, recorded, whole).events(order)


class _Expansion:
    def __init__(self, recording: Recording, recorded: Sizes, whole: Sizes) -> None:
        self.recorded, self.whole = recorded, whole
        self.names: dict[int, Name] = {}
        self.segments: dict[Segment, list[Event]] = {}
        self.ids: dict[Name, int] = {}
        self.kept: dict[int, int] = {}
        counts: dict[tuple[Segment, Block | None], int] = {}

        def name(storage: int, segment: Segment, block: Block | None) -> None:
            number = counts.get((segment, block), 0)
            counts[segment, block] = number + 1
            self.names[storage] = Name(segment, block, number)

        for storage in recording.kept:
            name(storage, (0, "kept", 0), recording.owner.get(storage))
        for event in _buffers(recording.events, recorded.microbatches):
            stage, kind, count, block = event.where
            segment = (stage, kind, count)
            if event.call is None and event.storage not in self.names:
                name(event.storage, segment, block)
            self.segments.setdefault(segment, []).append(event)
        self._twins: dict[int, tuple[bool, bool]] = {}  # of events by id: block, count are shared
        self._compare()
        for storage, size in recording.kept.items():
            for real in self._all(self.names[storage]):
                self.kept[real] = size

    # ------------------------------------------------------------------- comparing

    def _compare(self) -> None:
        """Are the middle ones alike, and which storages do they share?"""
        self.shared_block: set[int] = set()  # ids of events
        self.shared_count: set[int] = set()
        for segment, events in self.segments.items():
            stage, kind, count = segment
            for s, blocks in enumerate(self.recorded.blocks):
                if blocks < self.whole.blocks[s]:
                    first, second = (
                        [e for e in events if e.where.block == (s, place)] for place in (1, 2)
                    )
                    self._align(first, second, self.shared_block, segment)
            if count == 2 and self.recorded.microbatches < self.whole.microbatches:
                twin = self.segments.get((stage, kind, 1), [])
                self._align(twin, events, self.shared_count, segment)

    def _align(
        self, first: list[Event], second: list[Event], shared: set[int], segment: Segment
    ) -> None:
        if len(first) != len(second):
            raise NotAlike(f"{segment}: {len(first)} and {len(second)} events")
        for a, b in zip(first, second, strict=True):
            if a.bytes != b.bytes or _kind(a.call) != _kind(b.call):
                raise NotAlike(f"{segment}: {_told(a)} and {_told(b)}")
            if a.call is None and a.storage == b.storage:
                shared |= {id(a), id(b)}

    # ------------------------------------------------------------------- naming

    def _blocks(self, block: Block | None, kind: str = "F") -> list[Block | None]:
        """The blocks of the whole that a recorded one stands for, in the order of their use."""
        if block is None:
            return [None]
        stage, place = block
        recorded, whole = self.recorded.blocks[stage], self.whole.blocks[stage]
        if recorded == whole:
            return [block]
        if kind in ("B", "I"):
            places = {0: [0], 1: [*range(whole - 3, 0, -1)], 2: [whole - 2], 3: [whole - 1]}
        else:
            places = {0: [0], 1: [1], 2: [*range(2, whole - 1)], 3: [whole - 1]}
        return [(stage, real) for real in places[place]]

    def _counts(self, count: int) -> list[int]:
        """The microbatches that a recorded one stands for."""
        if self.recorded.microbatches == self.whole.microbatches:
            return [count]
        last = self.whole.microbatches - 1
        return {0: [0], 1: [1], 2: [*range(2, last)], 3: [last]}[count]

    def _all(self, name: Name) -> list[int]:
        """Every storage of the whole that a recorded one stands for."""
        (stage, kind, count), block, number = name
        return [
            self._id(Name((stage, kind, c), b, number))
            for c in self._counts(count)
            for b in self._blocks(block)
        ]

    def _id(self, name: Name) -> int:
        return self.ids.setdefault(name, len(self.ids))

    def _real(self, event: Event, block: Block | None, count: int) -> int:
        """The storage of an event that happens in ``block`` of the microbatch ``count``."""
        (stage, kind, its_count), its_block, number = self.names[event.storage]
        if its_block is not None:
            here = event.where.block
            away = its_block[1] - here[1] if here and here[0] == its_block[0] else None
            if id(event) in self.shared_block or away is None or abs(away) > 1:
                its_block = self._blocks(its_block)[-1]
            else:
                assert block is not None
                its_block = (block[0], block[1] + away)
        if kind in ("F", "B", "I", "W"):
            away = its_count - event.where.count
            inside = event.where.kind in ("F", "B", "I", "W")
            if id(event) in self.shared_count or not inside or abs(away) > 1:
                its_count = self._counts(its_count)[-1]
            else:
                its_count = count + away
        return self._id(Name((stage, kind, its_count), its_block, number))

    # ------------------------------------------------------------------- repeating

    def events(self, order: Sequence[Segment]) -> Iterator[Event]:
        yield from self._segment((0, "start", 0), 0)
        for stage, kind, count in order:
            yield from self._segment((stage, kind, self._source(count)), count)
        for kind in ("clip", "optimizer", "end"):
            yield from self._segment((0, kind, 0), 0)

    def _source(self, count: int) -> int:
        if self.recorded.microbatches == self.whole.microbatches:
            return count
        last = self.whole.microbatches - 1
        return 3 if count == last else min(count, 2)

    def _segment(self, segment: Segment, count: int) -> Iterator[Event]:
        stage, kind, _ = segment
        for block, run in groupby(self.segments.get(segment, []), lambda e: e.where.block):
            events = list(run)
            for real in self._blocks(block, kind):
                where = Where(stage, kind, count, real)
                for event in events:
                    if event.call is not None:
                        yield Event(where, call=event.call)
                        continue
                    for storage in self._touched(event, real, count):
                        yield Event(where, storage, event.bytes)

    def _touched(self, event: Event, block: Block | None, count: int) -> list[int]:
        """One storage, but outside of microbatches those of all that it stands for."""
        (stage, kind, its_count), its_block, number = self.names[event.storage]
        inside = event.where.kind in ("F", "B", "I", "W")
        if inside or kind not in ("F", "B", "I", "W"):
            return [self._real(event, block, count)]
        assert block == its_block or block is not None
        return [self._id(Name((stage, kind, c), block, number)) for c in self._counts(its_count)]


def _buffers(events: Sequence[Event], microbatches: int) -> list[Event]:
    """The events, with one buffer for each microbatch made at the start as of that microbatch."""
    return list(events)


def _kind(call: Call | None) -> tuple[object, ...] | None:
    return None if call is None else (call.name, call.shapes, call.group, call.flops)


def _told(event: Event) -> str:
    what = f"{event.bytes} bytes" if event.call is None else f"{event.call.name}"
    return f"{what} in {event.where}"
