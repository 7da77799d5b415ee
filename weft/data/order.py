"""Order of the samples: a pure function of seed and position.

A run must resume exactly on any number of ranks.  A loader that keeps state per rank or per worker
(positions, shuffle buffers, generators) makes that hard: the states of 8 ranks do not define what 6
ranks should read next.  So the only state is one integer, ``consumed``: the samples that all ranks
have trained on.  A *position* is the index of a sample in the order of the run.

*One source.*  Position ``c`` belongs to epoch c // N, where N is the number of samples.  Each epoch
visits every sample once, in another order.  A shuffled list would take O(N) memory per process and
O(N) time per start.  Instead the order is a permutation that can be evaluated at any position: a
Feistel network, as in block ciphers, keyed by seed and epoch.  It permutes 0 .. 4^h - 1 for some h.
To permute 0 .. N - 1, it is applied again while the result is outside (*cycle walking*), fewer than
four times on average.

*A mixture.*  The positions form rounds of `ROUND_SIZE`, all with the same assignment of positions
to sources.  Each source has its share of a round, spread as evenly as the multiples of the golden
ratio, so that no batch has many more samples of a source than another.  The position decides the
source and how many of its samples came before; that count decides the sample.  So the order within
a source does not depend on the mixture.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Words = NDArray[np.uint64]

_ROUNDS = 8
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def sample_index(positions: Ints, num_samples: int, seed: int) -> Ints:
    """Return the sample at each position of a run with one source.

    Args:
        positions: int64 (n,), the number of samples before.
        num_samples: samples in the source, 1 to 2**40.
        seed: a non-negative integer.

    Returns:
        int64 (n,) in 0 .. num_samples - 1; over each epoch, a permutation.
    """
    if not 1 <= num_samples <= 1 << 40:
        raise ValueError(f"num_samples = {num_samples} must be from 1 to 2**40")
    epoch, offset = np.divmod(np.asarray(positions, np.int64), num_samples)
    start = np.array([seed % (1 << 64)], np.uint64)
    keys = _mix(_mix(start) + epoch.astype(np.uint64) * _GOLDEN)
    half_bits = max(1, ((num_samples - 1).bit_length() + 1) // 2)
    index = _feistel(offset.astype(np.uint64), keys, half_bits)
    while len(outside := np.flatnonzero(index >= num_samples)):
        index[outside] = _feistel(index[outside], keys[outside], half_bits)
    return index.astype(np.int64)


def _feistel(value: Words, keys: Words, half_bits: int) -> Words:
    """Permute 0 .. 4**half_bits - 1 with a Feistel network, one key per value."""
    bits, low = np.uint64(half_bits), np.uint64((1 << half_bits) - 1)
    left, right = value >> bits, value & low
    for number in range(_ROUNDS):
        noise = _mix(_mix(keys + np.uint64(number + 1)) + right)
        left, right = right, left ^ (noise & low)
    return (left << bits) | right


def _mix(value: Words) -> Words:
    """Apply the splitmix64 step: every input bit affects every output bit."""
    value = value + _GOLDEN
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))


ROUND_SIZE = 10_007  # a prime, so that no batch size divides it
_GOLDEN_STEP = 6_185  # about ROUND_SIZE over the golden ratio


class MixtureSampler:
    """Assignment of a run's positions to the sources of a mixture.

    Args:
        shares: one per source, summing to one; rounded to multiples of 1 / `ROUND_SIZE`.

    Raises:
        ValueError: there are more sources than positions in a round, or a share is not positive.
    """

    def __init__(self, shares: Sequence[float]) -> None:
        self.counts = apportion(shares, ROUND_SIZE)
        spread = np.arange(ROUND_SIZE, dtype=np.int64) * _GOLDEN_STEP % ROUND_SIZE
        self._sources = np.searchsorted(np.cumsum(self.counts), spread, side="right")
        self._num_before = np.empty(ROUND_SIZE, np.int64)
        for source, count in enumerate(self.counts):
            self._num_before[self._sources == source] = np.arange(count)

    def assign(self, positions: Ints) -> tuple[Ints, Ints]:
        """Return the source of each position, and its samples before that position.

        Args:
            positions: int64 (n,).

        Returns:
            Two int64 (n,).
        """
        rounds, offset = np.divmod(np.asarray(positions, np.int64), ROUND_SIZE)
        sources = self._sources[offset]
        return sources, rounds * self.counts[sources] + self._num_before[offset]


def apportion(shares: Sequence[float], total: int) -> Ints:
    """Divide ``total`` items by ``shares``, at least one each.

    Returns int64 counts that sum to ``total``.

    Raises:
        ValueError: there are too few items, or a share is not positive.
    """
    exact = np.asarray(shares, np.float64)
    if len(exact) > total or not (exact > 0).all():
        raise ValueError(f"{total} items cannot be divided by the shares {list(shares)}")
    exact = exact / exact.sum() * total
    counts = np.maximum(1, np.floor(exact)).astype(np.int64)
    while (missing := total - int(counts.sum())) != 0:
        # Correct the counts that are furthest from their share.
        deficit = (exact - counts) * np.sign(missing)
        deficit[(counts == 1) & (missing < 0)] = -np.inf
        largest = np.argsort(-deficit, kind="stable")[: abs(missing)]
        counts[largest[np.isfinite(deficit[largest])]] += np.sign(missing)
    result: Ints = counts
    return result
