"""Which sample comes when: a pure function of the seed and of how many samples went before.

The problem.  A run must resume exactly, on any number of ranks, however many it had before.  A
loader that keeps state per rank or per worker (positions, buffers of a shuffle, generators) makes
that hard: the states of 8 ranks do not tell what 6 ranks should read next.  So there is no state
but one integer, ``consumed``: how many samples the run has trained on, over all ranks.

*One source.*  The sample at place ``c`` of the run belongs to epoch c // N, where N is the number
of samples, and each epoch visits every sample once, in an order of its own.  A shuffled list would
take O(N) memory in every process and O(N) time at each start.  Instead the order is a permutation
that can be evaluated anywhere: a Feistel network, the construction of block ciphers, keyed by seed
and epoch.  It permutes 0 .. 4^h - 1 for some h; to permute 0 .. N - 1 it is applied again as long
as the result falls outside (*cycle walking*), which takes less than four rounds on average.

*A mixture.*  Places take turns between the sources, in rounds of `ROUND` that are all alike: each
source has its share of a round's places, spread as evenly as the multiples of the golden ratio,
so that no batch has many more samples of a source than another.  The place decides the source and
how many of its samples came before, and that the sample, as if there were no other source: a
source is read in the same order, every sample once in each of its own epochs, whatever it is
mixed with.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Words = NDArray[np.uint64]

_ROUNDS = 8
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def sample_index(consumed: Ints, num_windows: int, seed: int) -> Ints:
    """The windows that come at the given places of the run.

    Args:
        consumed: places, int64 (n,): how many samples come before.
        num_windows: windows in the stream, 1 to 2**40.
        seed: a non-negative integer.

    Returns:
        int64 (n,) in 0 .. num_windows - 1.  Over each epoch, of ``num_windows`` places, this is a
        permutation, another one in each epoch.
    """
    if not 1 <= num_windows <= 1 << 40:
        raise ValueError(f"num_windows = {num_windows} must be from 1 to 2**40")
    epoch, place = np.divmod(np.asarray(consumed, np.int64), num_windows)
    start = np.array([seed % (1 << 64)], np.uint64)
    keys = _mix(_mix(start) + epoch.astype(np.uint64) * _GOLDEN)
    half_bits = max(1, ((num_windows - 1).bit_length() + 1) // 2)
    index = _feistel(place.astype(np.uint64), keys, half_bits)
    while len(outside := np.flatnonzero(index >= num_windows)):
        index[outside] = _feistel(index[outside], keys[outside], half_bits)
    return index.astype(np.int64)


def _feistel(value: Words, keys: Words, half_bits: int) -> Words:
    """A permutation of 0 .. 4**half_bits - 1 for each key."""
    bits, low = np.uint64(half_bits), np.uint64((1 << half_bits) - 1)
    left, right = value >> bits, value & low
    for number in range(_ROUNDS):
        noise = _mix(_mix(keys + np.uint64(number + 1)) + right)
        left, right = right, left ^ (noise & low)
    return (left << bits) | right


def _mix(value: Words) -> Words:
    """The splitmix64 step: every bit of the input reaches every bit of the output."""
    value = value + _GOLDEN
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))


ROUND = 10_007  # places of a round: a prime, so that no batch size keeps step with it
_GOLDEN_STEP = 6_185  # about ROUND over the golden ratio


class MixtureSampler:
    """How the places of a run are shared between sources.

    Args:
        shares: of each source, summing to one; taken to the nearest of `ROUND` parts, but each
            source has one at least.

    Raises:
        ValueError: there are more sources than places in a round, or a share is not positive.
    """

    def __init__(self, shares: Sequence[float]) -> None:
        self.counts = parts(shares, ROUND)
        spread = np.arange(ROUND, dtype=np.int64) * _GOLDEN_STEP % ROUND
        self._owner = np.searchsorted(np.cumsum(self.counts), spread, side="right")
        self._before = np.empty(ROUND, np.int64)
        for source, count in enumerate(self.counts):
            self._before[self._owner == source] = np.arange(count)

    def at(self, places: Ints) -> tuple[Ints, Ints]:
        """Whose turn it is at each place, and how many turns the same source had before.

        Args:
            places: int64 (n,).

        Returns:
            Two int64 (n,).
        """
        rounds, place = np.divmod(np.asarray(places, np.int64), ROUND)
        owner = self._owner[place]
        return owner, rounds * self.counts[owner] + self._before[place]


def parts(shares: Sequence[float], whole: int) -> Ints:
    """``whole`` things dealt out by ``shares``, one at least to each: int64, summing to ``whole``.

    Raises:
        ValueError: there are too few, or a share is not positive.
    """
    wanted = np.asarray(shares, np.float64)
    if len(wanted) > whole or not (wanted > 0).all():
        raise ValueError(f"{whole} cannot be dealt out by the shares {list(shares)}")
    wanted = wanted / wanted.sum() * whole
    counts = np.maximum(1, np.floor(wanted)).astype(np.int64)
    while (missing := whole - int(counts.sum())) != 0:
        # To those that are furthest below their share, or from those furthest above.
        short = (wanted - counts) * np.sign(missing)
        short[(counts == 1) & (missing < 0)] = -np.inf
        some = np.argsort(-short, kind="stable")[: abs(missing)]
        counts[some[np.isfinite(short[some])]] += np.sign(missing)
    found: Ints = counts
    return found
