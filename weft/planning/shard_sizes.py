"""Sizes of tensor-parallel shards; the number of ranks need not divide a size."""

from __future__ import annotations


def chunk_range(size: int, ranks: int, rank: int) -> range:
    """Return the indices of a rank's chunk of a dim, as in `torch.chunk`."""
    chunk = -(-size // ranks)
    return range(min(rank * chunk, size), min((rank + 1) * chunk, size))


def query_heads(num_heads: int, ranks: int, rank: int) -> range:
    """Return a rank's query heads; the first ranks have one more if they are uneven."""
    count, extra = divmod(num_heads, ranks)
    start = rank * count + min(rank, extra)
    return range(start, start + count + (rank < extra))


def key_heads(num_heads: int, num_kv_heads: int, ranks: int, rank: int) -> list[int]:
    """Return the key head of each group of equally many of a rank's query heads.

    If ranks split groups unevenly, the list has one key head per query head, with repetitions.
    """
    group = num_heads // num_kv_heads
    keys = [head // group for head in query_heads(num_heads, ranks, rank)]
    distinct = sorted(set(keys))
    is_even = len({keys.count(key) for key in distinct}) == 1
    return distinct if is_even else keys
