"""The simulated allocator, and categories of traced storages."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from tests.layouts import parse
from tests.small import small_job
from weft.estimate.trace import trace_ranks
from weft.estimate.trace_memory import (
    MIB,
    CachingAllocator,
    add_paired_passes,
    simulate_memory,
)
from weft.planning.plan import Machine
from weft.planning.resolve import resolve


def allocate(*sizes: int) -> CachingAllocator:
    """Return an allocator that has allocated these sizes for storages 0, 1, 2 ..."""
    allocator = CachingAllocator()
    for storage, size in enumerate(sizes):
        allocator.allocate(storage, size)
    return allocator


def addresses(allocator: CachingAllocator) -> dict[int, tuple[int, int]]:
    """Return the first and last address of the block of each live storage."""
    return {s: (b.start, b.start + b.size) for s, (_, b) in allocator.blocks.items()}


# --------------------------------------------------------------------------- reserved memory


@pytest.mark.parametrize(
    ("size", "reserved"),
    [
        (1, 2 * MIB),  # small: a segment of 2 MiB
        (MIB, 2 * MIB),
        (MIB + 1, 20 * MIB),  # large: a segment of 20 MiB
        (10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB),  # from 10 MiB: a separate segment, rounded up to 2 MiB
        (10 * MIB + 1, 12 * MIB),
        (100 * MIB + 3, 102 * MIB),
    ],
)
def test_segment_size_follows_the_pool(size: int, reserved: int) -> None:
    assert allocate(size).reserved == reserved


@pytest.mark.parametrize(("size", "taken"), [(1, 512), (512, 512), (513, 1024), (MIB - 1, MIB)])
def test_sizes_are_rounded_up_to_512_bytes(size: int, taken: int) -> None:
    start, end = addresses(allocate(size))[0]
    assert end - start == taken


def test_rounded_size_selects_the_pool() -> None:
    """10 MiB - 1 is rounded up to 10 MiB, which has its own segment."""
    assert allocate(10 * MIB - 1).reserved == 10 * MIB


def test_pools_do_not_share_segments() -> None:
    """A large segment has no small blocks, and a small segment no large ones."""
    assert allocate(2 * MIB, 512).reserved == 22 * MIB
    assert allocate(512, 2 * MIB).reserved == 22 * MIB


# --------------------------------------------------------------------------- splitting


def test_small_blocks_share_a_segment_to_the_last_512_bytes() -> None:
    allocator = allocate(*[512] * 4096)
    assert allocator.reserved == 2 * MIB
    allocator.allocate(4096, 1)
    assert allocator.reserved == 4 * MIB


def test_large_block_is_split_if_more_than_a_mebibyte_remains() -> None:
    allocator = allocate(9 * MIB, 9 * MIB)  # 2 of 20 MiB remain
    assert addresses(allocator) == {0: (0, 9 * MIB), 1: (9 * MIB, 18 * MIB)}
    allocator.allocate(2, 2 * MIB)
    assert allocator.reserved == 20 * MIB


def test_large_block_is_not_split_if_a_mebibyte_remains() -> None:
    allocator = allocate(9 * MIB, 5 * MIB, 5 * MIB)  # the third block includes the last MiB
    assert addresses(allocator)[2] == (14 * MIB, 20 * MIB)
    allocator.allocate(3, 2 * MIB)
    assert allocator.reserved == 40 * MIB


def test_block_with_its_own_segment_is_not_split() -> None:
    assert addresses(allocate(30 * MIB + MIB))[0] == (0, 32 * MIB)


# --------------------------------------------------------------------------- reuse


def test_freed_block_is_reused() -> None:
    allocator = allocate(50 * MIB)
    allocator.free(0)
    assert allocator.reserved == 50 * MIB  # the segment is not returned to the driver
    allocator.allocate(1, 50 * MIB)
    assert allocator.reserved == allocator.peak == 50 * MIB


def test_smallest_sufficient_free_block_is_used() -> None:
    allocator = allocate(60 * MIB, 40 * MIB, 50 * MIB)
    for storage in range(3):
        allocator.free(storage)
    allocator.allocate(3, 38 * MIB)
    assert addresses(allocator)[3] == (60 * MIB, 98 * MIB)  # in the segment of 40 MiB


def test_equal_free_blocks_the_lowest_is_used() -> None:
    allocator = allocate(40 * MIB, 40 * MIB)
    allocator.free(1)
    allocator.free(0)
    allocator.allocate(2, 40 * MIB)
    assert addresses(allocator)[2] == (0, 40 * MIB)


def test_free_neighbors_are_merged() -> None:
    """In any order of freeing, three blocks of a segment merge into one."""
    for order in ((0, 1, 2), (0, 2, 1), (1, 0, 2), (2, 1, 0), (1, 2, 0), (2, 0, 1)):
        allocator = allocate(6 * MIB, 6 * MIB, 6 * MIB)
        for storage in order:
            allocator.free(storage)
        allocator.allocate(3, 9 * MIB + 512)
        allocator.allocate(4, 9 * MIB + 512)
        assert allocator.reserved == 20 * MIB, order


def test_free_blocks_around_a_live_one_are_not_merged() -> None:
    allocator = allocate(6 * MIB, 6 * MIB, 6 * MIB)
    allocator.free(0)
    allocator.free(2)
    allocator.allocate(3, 9 * MIB)  # 6 and 8 MiB are free: each is too small
    assert allocator.reserved == 40 * MIB


def test_segments_are_not_merged() -> None:
    allocator = allocate(10 * MIB, 10 * MIB)
    allocator.free(0)
    allocator.free(1)
    allocator.allocate(2, 12 * MIB)
    assert allocator.reserved == 32 * MIB


# --------------------------------------------------------------------------- a full device


def test_full_device_releases_unused_segments() -> None:
    """A free segment of 40 MiB is too small for 60 MiB; a full device releases it."""
    for capacity, reserved in ((None, 100 * MIB), (100 * MIB, 100 * MIB), (99 * MIB, 60 * MIB)):
        allocator = CachingAllocator(capacity)
        allocator.allocate(0, 40 * MIB)
        allocator.free(0)
        allocator.allocate(1, 60 * MIB)
        assert allocator.reserved == reserved
        assert allocator.peak == reserved


def test_segment_in_use_is_not_released() -> None:
    allocator = CachingAllocator(50 * MIB)
    for storage, size in enumerate((6 * MIB, 6 * MIB, 512)):
        allocator.allocate(storage, size)
    allocator.free(0)
    allocator.free(2)  # now the segment of 2 MiB is empty
    allocator.allocate(3, 40 * MIB)
    assert allocator.reserved == 60 * MIB  # more than the capacity shows an out-of-memory error
    allocator.free(1)
    allocator.free(3)
    allocator.allocate(4, 100 * MIB)
    assert allocator.reserved == 100 * MIB


def test_peak_is_recorded() -> None:
    allocator = CachingAllocator(80 * MIB)
    for storage in range(3):
        allocator.allocate(storage, 30 * MIB)
    allocator.free(0)
    allocator.free(1)
    allocator.allocate(3, 40 * MIB)
    assert (allocator.reserved, allocator.peak) == (70 * MIB, 90 * MIB)


# --------------------------------------------------------------------------- random requests


@pytest.mark.parametrize("seed", range(6))
def test_allocator_random_requests_keep_its_invariants(seed: int) -> None:
    """Blocks never overlap, fit their requests, lie in segments, and merge when freed."""
    draw = random.Random(seed)
    capacity = draw.choice([None, 300 * MIB])
    allocator, requested = CachingAllocator(capacity), dict[int, int]()
    for storage in range(1500):
        size = int(2 ** draw.uniform(0, 25))
        allocator.allocate(storage, size)
        requested[storage] = size
        while requested and draw.random() < len(requested) / 60:
            missing = draw.choice(list(requested))
            del requested[missing]
            allocator.free(missing)
        assert sum(requested.values()) <= allocator.reserved <= allocator.peak
        by_pool: dict[int, list[tuple[int, int]]] = {}
        for number, (pool, block) in allocator.blocks.items():
            assert block.size >= requested[number]
            by_pool.setdefault(id(pool), []).append((block.start, block.start + block.size))
        for spans in by_pool.values():
            spans.sort()
            assert all(a[1] <= b[0] for a, b in pairwise(spans))
    for storage in requested:
        allocator.free(storage)
    for pool in (allocator.small, allocator.large):
        assert {start: size for size, start in pool.free_list} == pool.segments
        assert sum(pool.segments.values()) == pool.reserved


# --------------------------------------------------------------------------- categories


@pytest.mark.parametrize(
    "schedule", [pytest.param("Interleaved1F1B", marks=pytest.mark.slow), "ZBVZeroBubble"]
)
def test_memory_accumulated_gradients_are_categorized_as_gradients(schedule: str) -> None:
    """Accumulated gradients are unsharded float32, with split backward passes too.

    With two shards they take as many bytes as both moments of a shard.
    """
    ranks, overrides = parse(
        f"dp_shard2 tp2 pp2 pipeline.schedule={schedule} precision.compute_dtype=bfloat16"
        " gradient_sync=step model.num_layers=6 train.microbatch_size=1 train.global_batch_size=8"
    )
    job = small_job(*overrides, ("model.tied_embeddings", "false"))
    plan = resolve(job, Machine("cpu", devices=2, world_size=ranks))
    for trace in trace_ranks(plan):
        live = simulate_memory(trace, caching=False).live_bytes
        # bfloat16 gradients of the latest microbatch are live too.
        assert 0.95 <= live["gradients"] / live["optimizer"] <= 1.5


@pytest.mark.slow
def test_memory_of_paired_passes_has_the_temporaries_of_both() -> None:
    """A forward pass adds at most what it allocates and frees; its activations stay."""
    ranks, overrides = parse(
        "dp_shard2 pp2 ep=2 pipeline.schedule=DualPipeV model.kind=moe model.preset=toy-moe "
        "train.microbatch_size=1 train.global_batch_size=8"
    )
    plan = resolve(small_job(*overrides), Machine("cpu", devices=2, world_size=ranks))
    assert plan.overlaps_dispatch
    for trace in trace_ranks(plan):
        alone = simulate_memory(trace, caching=False)
        paired = add_paired_passes(alone, trace)
        added = paired.live_bytes["temporaries"] - alone.live_bytes["temporaries"]
        events = trace.extrapolation.segment_events((0, "F", 0))
        freed = -sum(min(0, event.bytes) for event in events)
        assert 0 < added <= freed
        assert paired.reserved == alone.reserved + added
