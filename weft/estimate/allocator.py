"""Simulate PyTorch's CUDA caching allocator on a log of allocations.

A device runs out of reserved, not of live bytes.  The allocator requests *segments* from the
driver, splits them into blocks, and caches freed blocks; fragmentation wastes some of them.  Live
bytes of a step are 13 to 20 % below the memory that TorchTitan publishes.

The rules are those of ``c10/cuda/CUDACachingAllocator.cpp`` (PyTorch 2.13):

* Sizes are rounded up to 512 bytes.  Blocks up to 1 MiB come from the small pool, with segments of
  2 MiB.  Others come from the large pool: segments of 20 MiB for blocks below 10 MiB, and above
  that of the block's size, rounded up to 2 MiB.
* The allocator takes the smallest free block that is large enough.  It splits the block if the
  remainder is at least 512 bytes in the small pool, or more than 1 MiB in the large one.
* A freed block merges with free neighbors in its segment.
* When the device is full, the allocator first returns segments without live blocks to the driver.

Not simulated: streams (a stream does not reuse another's blocks; FSDP gathers on its own stream),
and expandable segments, which weft does not enable.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass, field

MIB = 2**20
MIN_BLOCK_SIZE = 512
SMALL_SIZE = MIB  # the largest block of the small pool
SMALL_BUFFER = 2 * MIB
LARGE_BUFFER = 20 * MIB
MIN_LARGE_ALLOC = 10 * MIB  # from here on a block has a segment of its size
ROUND_LARGE = 2 * MIB


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
    """Simulated allocator; ``peak`` is the maximum of ``reserved``."""

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
