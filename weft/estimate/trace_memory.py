"""What is live on a rank over a step, what for, and what the allocator reserves for it.

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

from collections.abc import Container, Sequence
from dataclasses import dataclass

from weft.estimate.allocator import Allocator
from weft.estimate.extrapolate import Segment
from weft.estimate.op_recorder import Event, OpTrace, Where
from weft.estimate.trace import Trace

CATEGORIES = (
    "parameters",
    "gradients",
    "optimizer",
    "activations",
    "communication",
    "temporaries",
)

GATHERED = ("split_with_sizes_copy", "all_gather_copy_in")  # FSDP's
ON_HOST = ("parameters", "gradients", "optimizer")  # with parallel.cpu_offload
# On a CPU, of what lives, what malloc keeps for it: six runs had 1.09 to 1.52 (docs/planner.md).
MALLOC = 1.2


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank.

    ``live``: by category when most is live, ``at``: then.  ``reserved``: the most that the
    allocator holds.  ``timeline``: of a step, where each pass has most, and how much.
    """

    live: dict[str, int]
    at: Where
    reserved: int
    timeline: tuple[tuple[Where, int], ...] = ()


def categories(recording: OpTrace) -> dict[int, str]:
    """Of every storage of a recording, what it is used for."""
    born: dict[int, Where] = {}
    died: dict[int, Where] = {}
    gathered: set[int] = set()
    exchanged: set[int] = set()
    made_from: dict[int, int] = {}  # of what is a copy in another dtype
    for event in recording.events:
        if event.call is not None:
            if event.call.name == "_to_copy":
                made_from.setdefault(event.call.writes[0][0], event.call.reads[0][0])
            if event.call.group:
                used = (*event.call.reads, *event.call.writes)
                exchanged |= {storage for storage, _ in used}
            elif event.call.name in GATHERED or _copies_weight(event, recording.owner, made_from):
                gathered |= {storage for storage, _ in event.call.writes}
        elif event.bytes > 0:
            if event.storage in born:
                gathered.add(event.storage)  # what FSDP frees and needs again keeps its storage
            born.setdefault(event.storage, event.where)
            died.pop(event.storage, None)
        else:
            died[event.storage] = event.where
    found = dict.fromkeys(recording.kept, "parameters")
    found |= dict.fromkeys(recording.rows, "temporaries")
    found |= dict.fromkeys(recording.states, "optimizer")
    for storage, where in born.items():
        end = died.get(storage)
        leaves = end is None or end[:3] != where[:3]
        if storage in recording.kept:
            continue
        if storage in recording.host:
            found[storage] = "host"
            continue
        if storage in gathered:
            found[storage] = "communication"
        elif storage in recording.gradients:
            found[storage] = "gradients"
        elif where.kind == "optimizer" and end is None:
            found[storage] = "optimizer"
        elif where.kind == "F" and leaves:
            found[storage] = "activations"
        elif where.kind == "I" and end is not None and end.kind == "W":
            # What the other half needs; but gradients of the microbatch before are copied to add up
            # in float32 when the next one's backward begins.
            source = born.get(made_from.get(storage, -1))
            adds_up = source is not None and source.kind == "W"
            found[storage] = "gradients" if adds_up else "activations"
        elif where.kind in ("B", "W") and leaves and storage not in exchanged:
            found[storage] = "gradients"
        elif storage in exchanged or (where.kind == "start" and end is None):
            found[storage] = "communication"
        else:
            found[storage] = "temporaries"
    return found


def _copies_weight(event: Event, weights: Container[int], made_from: dict[int, int]) -> bool:
    """Whether FSDP copies a weight that is not sharded, mostly cast, into what is computed with."""
    call, where = event.call, event.where
    if call is None or call.name not in ("_to_copy", "copy_") or where.kind == "optimizer":
        return False
    source = call.reads[-1][0]
    return not where.running and made_from.get(source, source) in weights


def later_step(trace: Trace) -> tuple[dict[int, int], list[tuple[Where, int, int]]]:
    """What is there before a step that is not the first, and then what changes: where, storage,
    bytes."""
    before = dict(trace.expansion.kept)
    sizes = dict(before)
    log: list[tuple[Where, int, int]] = []
    for where, storage, size, _ in trace.events():
        log.append((where, storage, size))
        sizes[storage] = sizes.get(storage, 0) + size
    # What is left has been there since the first step, and is not made again.
    left = {s: size for s, size in sizes.items() if size > 0 and s not in before}
    later = []
    waiting = dict(left)
    for change in log:
        if waiting.get(change[1]) == change[2]:
            del waiting[change[1]]
        else:
            later.append(change)
    for storage in waiting:  # it grew in several steps
        del left[storage]
    return before | left, later


def memory_of(
    trace: Trace, caching: bool, capacity: int | None = None, on_host: bool = False
) -> Memory:
    """The memory of a later step of one rank.

    Args:
        caching: whether the device's memory has torch's caching allocator.
        capacity: of the device, in bytes: unused segments are given back when it is full.
        on_host: parameters, gradients and the optimizer are not on a device with memory of its own.
    """
    before, log = later_step(trace)
    used_for = trace.expansion.category_of(categories(trace.recording))
    # Where the device is a CPU the host's memory is its own.
    elsewhere = ("host", *(ON_HOST if on_host else ())) if caching else ()
    away = {s for s, what in used_for.items() if what in elsewhere}
    used_for = {s: "activations" if what == "host" else what for s, what in used_for.items()}
    before = {s: size for s, size in before.items() if s not in away}
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
        if storage in away:
            continue
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
    reserved = int(MALLOC * most) if allocator is None else allocator.peak
    return Memory(worst, at, reserved, tuple(timeline))


def fullest(
    of_ranks: Sequence[Trace],
    live: Sequence[int],
    caching: bool,
    capacity: int | None,
    on_host: bool,
) -> tuple[int, Memory]:
    """The place of the rank that needs most, and what it needs.

    Args:
        live: `live_peak` of each.
        caching, capacity, on_host: see `memory_of`.
    """
    place = max(range(len(live)), key=lambda rank: live[rank])
    return place, memory_of(of_ranks[place].shortened(), caching, capacity, on_host)


def live_peak(trace: Trace) -> int:
    """The most bytes that are live in the passes of a later step, from what each of the recorded
    ones adds."""
    sums: dict[tuple[int, Segment], tuple[int, int]] = {}
    live = sum(trace.expansion.kept.values())
    for kind in ("start", "optimizer"):  # buffers and states that stay
        live += sum(event.bytes for event in trace.expansion.segment((0, kind, 0)))
    peak = live
    for segment in trace.order:
        source = segment[0], trace.expansion.source(segment)
        if source not in sums:
            total = high = 0
            for event in trace.expansion.segment(segment):
                total += event.bytes
                high = max(high, total)
            sums[source] = total, high
        total, high = sums[source]
        peak = max(peak, live + high)
        live += total
    return peak
