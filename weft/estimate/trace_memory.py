"""Live and reserved memory of a rank over a step, by category.

    parameters      this rank's shards, and buffers
    optimizer       optimizer states
    gradients       left by backward: shards, or unsharded ones that accumulate over microbatches
    activations     left by forward for backward
    communication   gathered weights, inputs and outputs of collectives
    temporaries     the rest: freed in the action that allocated them

The step is not the first one: storages that remain at its end, such as optimizer states, exist from
its beginning.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Container, Iterator
from dataclasses import dataclass, field, replace

from weft.estimate.extrapolate import Segment
from weft.estimate.op_recorder import Event, OpLocation, OpTrace
from weft.estimate.trace import RankTrace

CATEGORIES = (
    "parameters",
    "gradients",
    "optimizer",
    "activations",
    "communication",
    "temporaries",
)

GATHER_OPS = ("split_with_sizes_copy", "all_gather_copy_in")  # FSDP's
HOST_CATEGORIES = ("parameters", "gradients", "optimizer")  # with parallel.cpu_offload
# Sizes of the caching allocator.
MIB = 2**20
MIN_BLOCK_SIZE = 512
SMALL_SIZE = MIB  # the largest block of the small pool
SMALL_BUFFER = 2 * MIB
LARGE_BUFFER = 20 * MIB
MIN_LARGE_ALLOC = 10 * MIB  # from here on a block has a segment of its size
ROUND_LARGE = 2 * MIB

# Resident over live bytes with malloc on a CPU: six runs had 1.09 to 1.52 (docs/planner.md).
MALLOC_RATIO = 1.2


@dataclass(frozen=True)
class RankMemory:
    """Memory of one rank in bytes.

    ``live_bytes``: by category at the peak; ``reserved``: the most that the allocator holds;
    ``timeline``: peak of each action.
    """

    live_bytes: dict[str, int]
    peak_location: OpLocation
    reserved: int
    timeline: tuple[tuple[OpLocation, int], ...] = ()


def categorize_storages(op_trace: OpTrace) -> dict[int, str]:
    """Return the category of every storage of a trace."""
    births: dict[int, OpLocation] = {}
    deaths: dict[int, OpLocation] = {}
    gathered: set[int] = set()
    communicated: set[int] = set()
    cast_sources: dict[int, int] = {}  # source of a copy in another dtype
    for event in op_trace.events:
        if event.call is not None:
            if event.call.name == "_to_copy":
                cast_sources.setdefault(event.call.writes[0][0], event.call.reads[0][0])
            if event.call.group:
                used = (*event.call.reads, *event.call.writes)
                communicated |= {storage for storage, _ in used}
            elif event.call.name in GATHER_OPS or _copies_weight(
                event, op_trace.storage_blocks, cast_sources
            ):
                gathered |= {storage for storage, _ in event.call.writes}
        elif event.bytes > 0:
            if event.storage in births:
                gathered.add(event.storage)  # FSDP resizes the storages that it gathers again
            births.setdefault(event.storage, event.location)
            deaths.pop(event.storage, None)
        else:
            deaths[event.storage] = event.location
    categories = dict.fromkeys(op_trace.initial_bytes, "parameters")
    categories |= dict.fromkeys(op_trace.input_microbatches, "temporaries")
    categories |= dict.fromkeys(op_trace.optimizer_states, "optimizer")
    for storage, birth in births.items():
        death = deaths.get(storage)
        outlives_action = death is None or death[:3] != birth[:3]
        if storage in op_trace.initial_bytes:
            continue
        if storage in op_trace.host_storages:
            categories[storage] = "host"
            continue
        if storage in gathered:
            categories[storage] = "communication"
        elif storage in op_trace.gradients:
            categories[storage] = "gradients"
        elif birth.kind == "optimizer" and death is None:
            categories[storage] = "optimizer"
        elif birth.kind == "F" and outlives_action:
            categories[storage] = "activations"
        elif birth.kind == "I" and death is not None and death.kind == "W":
            # Kept for the other half of a backward pass, or gradients that later ones add to.
            is_kept = death.ordinal == birth.ordinal
            categories[storage] = "activations" if is_kept else "gradients"
        elif birth.kind in ("B", "W") and outlives_action and storage not in communicated:
            categories[storage] = "gradients"
        elif storage in communicated or (birth.kind == "start" and death is None):
            categories[storage] = "communication"
        else:
            categories[storage] = "temporaries"
    return categories


def _copies_weight(event: Event, weights: Container[int], cast_sources: dict[int, int]) -> bool:
    """Return True if FSDP copies, and usually casts, an unsharded weight."""
    call, location = event.call, event.location
    if call is None or call.name not in ("_to_copy", "copy_") or location.kind == "optimizer":
        return False
    source = call.reads[-1][0]
    return not location.is_in_block and cast_sources.get(source, source) in weights


def steady_state_step(trace: RankTrace) -> tuple[dict[int, int], list[Event]]:
    """Return the initial storages of a later step with their bytes, and its changes."""
    initial, events = trace.extrapolation.initial_bytes, list(trace.events())
    sizes = Counter(initial)
    for event in events:
        sizes[event.storage] += event.bytes
    # Storages that remain have existed since the first step.
    persistent = {s: size for s, size in sizes.items() if size > 0 and s not in initial}
    pending, changes = dict(persistent), []
    for event in events:
        if pending.get(event.storage) == event.bytes:
            del pending[event.storage]
        else:
            changes.append(event)
    for storage in pending:  # grew in several events
        del persistent[storage]
    return initial | persistent, changes


def simulate_memory(
    trace: RankTrace, caching: bool, capacity: int | None = None, params_on_host: bool = False
) -> RankMemory:
    """Return the memory of a later step of one rank.

    Args:
        trace: recorded step of the rank, extrapolated to the full step.
        caching: the device has PyTorch's caching allocator.
        capacity: of the device, in bytes; beyond it the allocator releases unused segments.
        params_on_host: parameters, gradients and optimizer states are in host memory.
    """
    initial, changes = steady_state_step(trace)
    start = OpLocation(0, "start", 0)
    changes = [*(Event(start, storage, size) for storage, size in initial.items()), *changes]
    category_of = trace.extrapolation.expand_categories(categorize_storages(trace.op_trace))
    # On a CPU, host memory is the device's memory.
    host_categories = ("host", *(HOST_CATEGORIES if params_on_host else ())) if caching else ()
    off_device = {s for s, name in category_of.items() if name in host_categories}
    category_of = {s: "activations" if name == "host" else name for s, name in category_of.items()}
    allocator = CachingAllocator(capacity) if caching else None
    sizes: dict[int, int] = {}
    live_by_category = dict.fromkeys(CATEGORIES, 0)
    live = peak_live = 0
    peak_location, peak_by_category = start, live_by_category
    timeline: list[tuple[OpLocation, int]] = [(start, 0)]
    for location, storage, size, _ in changes:
        if storage in off_device:
            continue
        old = sizes.get(storage, 0)
        new = sizes[storage] = max(0, old + size)
        if allocator is not None:
            if old:
                allocator.free(storage)
            if new:
                allocator.allocate(storage, new)
        live_by_category[category_of.get(storage, "temporaries")] += new - old
        live += new - old
        if location[:3] != timeline[-1][0][:3]:
            timeline.append((location, live))
        elif live > timeline[-1][1]:
            timeline[-1] = (location, live)
        if live > peak_live:
            peak_live, peak_location, peak_by_category = live, location, dict(live_by_category)
    reserved = int(MALLOC_RATIO * peak_live) if allocator is None else allocator.peak
    return RankMemory(peak_by_category, peak_location, reserved, tuple(timeline))


def add_paired_passes(memory: RankMemory, trace: RankTrace) -> RankMemory:
    """Add the temporaries of a forward pass to the peak of the backward passes.

    An upper bound for passes that take turns: see `weft.parallel.pass_overlap`.
    """
    forward = max(
        (peak - max(0, total) for (_, kind, _), total, peak in _segment_sums(trace) if kind == "F"),
        default=0,
    )
    backward = max((peak for location, peak in memory.timeline if location.kind in "BI"), default=0)
    added = max(0, backward + forward - sum(memory.live_bytes.values()))
    live = memory.live_bytes | {"temporaries": memory.live_bytes["temporaries"] + added}
    return replace(memory, live_bytes=live, reserved=memory.reserved + added)


def peak_live_bytes(trace: RankTrace) -> int:
    """Return the peak of live bytes in the passes of a later step."""
    live = sum(trace.extrapolation.initial_bytes.values())
    for kind in ("start", "optimizer"):  # buffers and optimizer states that stay
        live += sum(event.bytes for event in trace.extrapolation.segment_events((0, kind, 0)))
    peak = live
    for _, total, peak_in_segment in _segment_sums(trace):
        peak = max(peak, live + peak_in_segment)
        live += total
    return peak


def _segment_sums(trace: RankTrace) -> Iterator[tuple[Segment, int, int]]:
    """Yield each pass, the bytes that it leaves, and its peak above its start."""
    segment_sums: dict[Segment, tuple[int, int]] = {}
    for segment in trace.actions:
        source = (segment[0], *trace.extrapolation.source_segment(segment)[1:])
        if source not in segment_sums:
            total = peak = 0
            for event in trace.extrapolation.segment_events(segment):
                total += event.bytes
                peak = max(peak, total)
            segment_sums[source] = total, peak
        yield segment, *segment_sums[source]


# --------------------------------------------------------------------------- allocator


@dataclass(slots=True)
class _Block:
    start: int
    size: int
    free: bool = False
    prev: _Block | None = field(default=None, repr=False)
    next: _Block | None = field(default=None, repr=False)


class _Pool:
    """Blocks of one size class; free ones sorted by (size, start)."""

    def __init__(self, small: bool) -> None:
        self.small = small
        self.reserved = 0
        self.end = 0  # of the addresses in use
        self.free_list: list[tuple[int, int]] = []
        self.free_by_start: dict[int, _Block] = {}  # free blocks by start
        self.segments: dict[int, int] = {}  # sizes by start

    def allocate(self, size: int) -> _Block:
        index = bisect_left(self.free_list, (size, 0))
        if index < len(self.free_list):
            _, start = self.free_list.pop(index)
            block = self.free_by_start.pop(start)
        else:
            block = self._allocate_segment(size)
        remaining = block.size - size
        if remaining >= MIN_BLOCK_SIZE if self.small else remaining > SMALL_SIZE:
            remainder = _Block(block.start + size, remaining, True, block, block.next)
            if block.next:
                block.next.prev = remainder
            block.next, block.size = remainder, size
            self._add_free(remainder)
        block.free = False
        return block

    def free_block(self, block: _Block) -> None:
        for neighbor in (block.prev, block.next):
            if neighbor is not None and neighbor.free:
                self._remove_free(neighbor)
                first, second = (neighbor, block) if neighbor is block.prev else (block, neighbor)
                first.size += second.size
                first.next = second.next
                if second.next:
                    second.next.prev = first
                block = first
        self._add_free(block)

    def release_unused(self) -> None:
        """Return segments without live blocks to the driver."""
        for start, size in list(self.segments.items()):
            block = self.free_by_start.get(start)
            if block is not None and block.size == size:
                self._remove_free(block)
                del self.segments[start]
                self.reserved -= size

    def _allocate_segment(self, size: int) -> _Block:
        segment_size = size
        if self.small:
            segment_size = SMALL_BUFFER
        elif size < MIN_LARGE_ALLOC:
            segment_size = LARGE_BUFFER
        else:
            segment_size = -(-size // ROUND_LARGE) * ROUND_LARGE
        block = _Block(self.end, segment_size)
        self.segments[self.end] = segment_size
        self.end += segment_size
        self.reserved += segment_size
        return block

    def _add_free(self, block: _Block) -> None:
        block.free = True
        self.free_by_start[block.start] = block
        insort(self.free_list, (block.size, block.start))

    def _remove_free(self, block: _Block) -> None:
        del self.free_by_start[block.start]
        self.free_list.pop(bisect_left(self.free_list, (block.size, block.start)))


class CachingAllocator:
    """Simulated CUDA allocator of PyTorch; ``peak``: maximum of ``reserved``.

    A device runs out of reserved, not of live bytes.  The allocator requests *segments* from the
    driver, splits them into blocks, and caches freed blocks; fragmentation wastes some of them.
    Live bytes of a step are 13 to 20 % below the memory that TorchTitan publishes.

    The rules are those of ``c10/cuda/CUDACachingAllocator.cpp`` (PyTorch 2.13):

    * Sizes are rounded up to 512 bytes.  Blocks up to 1 MiB come from the small pool, with segments
      of 2 MiB.  Others come from the large pool: segments of 20 MiB for blocks below 10 MiB, and
      above that of the block's size, rounded up to 2 MiB.
    * The allocator takes the smallest free block that is large enough.  It splits the block if the
      remainder is at least 512 bytes in the small pool, or more than 1 MiB in the large one.
    * A freed block merges with free neighbors in its segment.
    * When the device is full, the allocator first returns segments without live blocks to the
      driver.

    Not simulated: streams (a stream does not reuse another's blocks; FSDP gathers on its own
    stream), and expandable segments, which weft enables except with symmetric memory and which
    reserve less: with them the peak is an upper bound.
    """

    def __init__(self, capacity: int | None = None) -> None:
        """Create an allocator.

        Args:
            capacity: bytes of the device; beyond it unused segments are released; None: never.
        """
        self.capacity = capacity
        self.small, self.large = (_Pool(small) for small in (True, False))
        self.blocks: dict[int, tuple[_Pool, _Block]] = {}
        self.peak = 0

    @property
    def reserved(self) -> int:
        """Bytes of all segments, used or not."""
        return self.small.reserved + self.large.reserved

    def allocate(self, storage: int, size: int) -> None:
        """Allocate ``size`` bytes for a storage, in a cached or new segment."""
        size = max(MIN_BLOCK_SIZE, -(-size // MIN_BLOCK_SIZE) * MIN_BLOCK_SIZE)
        pool = self.small if size <= SMALL_SIZE else self.large
        before = self.reserved
        block = pool.allocate(size)
        if self.capacity is not None and before < self.reserved > self.capacity:
            for cached_pool in (self.small, self.large):
                cached_pool.release_unused()
        self.blocks[storage] = pool, block
        self.peak = max(self.peak, self.reserved)

    def free(self, storage: int) -> None:
        """Return the block of a storage to its pool."""
        pool, block = self.blocks.pop(storage)
        pool.free_block(block)
