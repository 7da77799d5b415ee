"""What PyTorch's caching allocator reserves for a log of allocations.

Live bytes are not what a device runs out of.  torch asks the driver for *segments*, cuts blocks
from them, and keeps what is freed for later; what lies free in pieces that are too small is lost.
The live bytes of a step are 13 to 20 % below what TorchTitan publishes of it.

The rules are those of ``c10/cuda/CUDACachingAllocator.cpp`` (torch 2.13):

* Sizes are rounded up to 512 bytes.  Up to 1 MiB a block comes from the small pool, whose segments
  have 2 MiB; others from the large pool: segments of 20 MiB for blocks below 10 MiB, and above of
  the size itself, rounded up to 2 MiB.
* The smallest free block that is large enough is taken.  It is cut in two if in the small pool at
  least 512 bytes remain, in the large one more than 1 MiB.
* A block that is freed grows together with free neighbours of its segment.
* When the device is full, segments without a live block go back to the driver first.

Left out: streams (blocks of another stream are not reused; FSDP's gathers run on one of their own),
and expandable segments, which weft's trainer does not ask for.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass, field

MIB = 2**20
ROUND = 512
SMALL = MIB  # the largest block of the small pool
SMALL_SEGMENT = 2 * MIB
LARGE_SEGMENT = 20 * MIB
OWN_SEGMENT = 10 * MIB  # from here on a block has a segment of its size
PAGE = 2 * MIB


@dataclass(slots=True)
class _Block:
    start: int
    size: int
    free: bool = False
    before: _Block | None = field(default=None, repr=False)
    after: _Block | None = field(default=None, repr=False)


class _Pool:
    """Blocks of one pool; free ones by (size, start)."""

    def __init__(self, small: bool) -> None:
        self.small = small
        self.reserved = 0
        self.end = 0  # of the addresses in use
        self.free: list[tuple[int, int]] = []
        self.at: dict[int, _Block] = {}  # free blocks by start
        self.segments: dict[int, int] = {}  # sizes by start

    def take(self, size: int) -> _Block:
        place = bisect_left(self.free, (size, 0))
        if place < len(self.free):
            _, start = self.free.pop(place)
            block = self.at.pop(start)
        else:
            block = self._grow(size)
        left = block.size - size
        if left >= ROUND if self.small else left > SMALL:
            rest = _Block(block.start + size, left, True, block, block.after)
            if block.after:
                block.after.before = rest
            block.after, block.size = rest, size
            self._release(rest)
        block.free = False
        return block

    def give(self, block: _Block) -> None:
        for other in (block.before, block.after):
            if other is not None and other.free:
                self._unlist(other)
                first, second = (other, block) if other is block.before else (block, other)
                first.size += second.size
                first.after = second.after
                if second.after:
                    second.after.before = first
                block = first
        self._release(block)

    def drop_unused(self) -> None:
        """Segments without a live block go back."""
        for start, size in list(self.segments.items()):
            block = self.at.get(start)
            if block is not None and block.size == size:
                self._unlist(block)
                del self.segments[start]
                self.reserved -= size

    def _grow(self, size: int) -> _Block:
        whole = size
        if self.small:
            whole = SMALL_SEGMENT
        elif size < OWN_SEGMENT:
            whole = LARGE_SEGMENT
        else:
            whole = -(-size // PAGE) * PAGE
        block = _Block(self.end, whole)
        self.segments[self.end] = whole
        self.end += whole
        self.reserved += whole
        return block

    def _release(self, block: _Block) -> None:
        block.free = True
        self.at[block.start] = block
        insort(self.free, (block.size, block.start))

    def _unlist(self, block: _Block) -> None:
        del self.at[block.start]
        self.free.pop(bisect_left(self.free, (block.size, block.start)))


class Allocator:
    """Takes and gives blocks; ``reserved`` is what the device sees, ``peak`` the most of it."""

    def __init__(self, capacity: int | None = None) -> None:
        """``capacity``: bytes, from which on unused segments are given back; None: never."""
        self.capacity = capacity
        self.small, self.large = (_Pool(small) for small in (True, False))
        self.blocks: dict[int, tuple[_Pool, _Block]] = {}
        self.peak = 0

    @property
    def reserved(self) -> int:
        return self.small.reserved + self.large.reserved

    def allocate(self, storage: int, size: int) -> None:
        size = max(ROUND, -(-size // ROUND) * ROUND)
        pool = self.small if size <= SMALL else self.large
        before = self.reserved
        block = pool.take(size)
        if self.capacity is not None and before < self.reserved > self.capacity:
            for each in (self.small, self.large):
                each.drop_unused()
        self.blocks[storage] = pool, block
        self.peak = max(self.peak, self.reserved)

    def release(self, storage: int) -> None:
        pool, block = self.blocks.pop(storage)
        pool.give(block)
