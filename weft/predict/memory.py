"""MEMORY: what is live on a rank over a step, what for, and what the allocator reserves for it.

A storage is counted as what it is used for:

    parameters      this rank's shards, and the buffers
    optimizer       its states
    gradients       what backward leaves behind: shards, or whole ones that add up over microbatches
    activations     what forward leaves behind for backward
    communication   gathered weights, and what collectives read and write
    temporaries     the rest: what is freed in the pass that made it

The step is a later one: what is still there at the end of the first, as the optimizer's states,
is there from the beginning.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from weft.predict.allocator import Allocator
from weft.predict.expand import Expansion, Segment
from weft.predict.record import Recording, Where

CATEGORIES = (
    "parameters",
    "gradients",
    "optimizer",
    "activations",
    "communication",
    "temporaries",
)


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank.

    ``live``: by category when most is live, ``at``: then.  ``reserved``: the most that the
    caching allocator holds; None where there is none.  ``timeline``: of a step, at the beginning
    and at the end of each pass and where they peak between.
    """

    live: dict[str, int]
    at: Where
    reserved: int | None
    timeline: tuple[tuple[Where, int], ...] = ()

    @property
    def peak(self) -> int:
        """What the device must have."""
        return self.reserved if self.reserved is not None else sum(self.live.values())


def categories(recording: Recording) -> dict[int, str]:
    """Of every storage of a recording, what it is used for."""
    born: dict[int, Where] = {}
    died: dict[int, Where] = {}
    resized: set[int] = set()
    exchanged: set[int] = set()
    for event in recording.events:
        if event.call is not None:
            if event.call.group:
                used = (*event.call.reads, *event.call.writes)
                exchanged |= {storage for storage, _ in used}
        elif event.bytes > 0:
            if event.storage in born:
                resized.add(event.storage)
            born.setdefault(event.storage, event.where)
            died.pop(event.storage, None)
        else:
            died[event.storage] = event.where
    found = {storage: "parameters" for storage in recording.kept}
    found |= {storage: "temporaries" for storage in recording.rows}
    found |= {storage: "optimizer" for storage in recording.states}
    for storage, where in born.items():
        end = died.get(storage)
        leaves = end is None or (end.stage, end.kind, end.count) != where[:3]
        if storage in recording.kept:
            continue
        if storage in resized:
            found[storage] = "communication"
        elif storage in recording.gradients:
            found[storage] = "gradients"
        elif where.kind == "optimizer" and end is None:
            found[storage] = "optimizer"
        elif where.kind == "F" and leaves:
            found[storage] = "activations"
        elif where.kind in ("B", "I", "W") and leaves and storage not in exchanged:
            found[storage] = "gradients" if where.kind != "I" else "activations"
        elif storage in exchanged or (where.kind == "start" and end is None):
            found[storage] = "communication"
        else:
            found[storage] = "temporaries"
    return found


def changes(
    expansion: Expansion, order: Sequence[Segment]
) -> tuple[dict[int, int], list[tuple[Where, int, int]]]:
    """What is there before a later step, and then what changes: where, storage, bytes."""
    before = dict(expansion.kept)
    log: list[tuple[Where, int, int]] = []
    sizes = dict(before)
    for where, storage, size, call in expansion.events(order):
        if call is None:
            log.append((where, storage, size))
            sizes[storage] = sizes.get(storage, 0) + size
    left = {s: size for s, size in sizes.items() if size > 0 and s not in before}
    waiting = set(left)
    later = []
    for where, storage, size in log:
        if storage in waiting and size == left[storage]:
            waiting.remove(storage)  # it has been there since the first step
            continue
        later.append((where, storage, size))
    for storage in waiting:
        del left[storage]
    return before | left, later


def memory_of(
    recording: Recording,
    expansion: Expansion,
    order: Sequence[Segment],
    caching: bool,
    capacity: int | None = None,
) -> Memory:
    """The memory of a later step of the whole.

    Args:
        caching: whether the device's memory has torch's caching allocator.
        capacity: of the device, in bytes: unused segments are given back when it is full.
    """
    before, log = changes(expansion, order)
    used_for = expansion.category_of(categories(recording))
    sums = dict.fromkeys(CATEGORIES, 0)
    for storage, size in before.items():
        sums[used_for.get(storage, "temporaries")] += size
    allocator = Allocator(capacity) if caching else None
    sizes = dict(before)
    if allocator is not None:
        for storage, size in before.items():
            allocator.allocate(storage, size)
    live = most = sum(sums.values())
    at, worst = Where(0, "start", 0), dict(sums)
    timeline: list[tuple[Where, int]] = [(at, live)]
    for where, storage, size in log:
        old = sizes.get(storage, 0)
        new = max(0, old + size)
        sizes[storage] = new
        if allocator is not None:
            if old:
                allocator.release(storage)
            if new:
                allocator.allocate(storage, new)
        sums[used_for.get(storage, "temporaries")] += new - old
        live += new - old
        if where[:3] != timeline[-1][0][:3]:
            timeline.append((where, live))
        elif live > timeline[-1][1]:
            timeline[-1] = (where, live)
        if live > most:
            most, at, worst = live, where, dict(sums)
    reserved = None if allocator is None else allocator.peak
    return Memory(worst, at, reserved, tuple(timeline))
