"""What differences between paired runs prove: intervals, tests, and how many more pairs it takes.

Pure functions of *paired differences*: one number for each repeat, of a variant minus of the
baseline in the same repeat.  They are taken to be independent and roughly normal; the unit of
replication is the run, for the steps of one run share its machine's mood and say little of the
next run's.  Student's t then gives the intervals ("Student", Biometrika 6, 1908).

Whether something is *different* and whether it is *equivalent* are two questions: not to have found
a difference is no proof that there is none.  Equivalence is shown by two one-sided tests
(Schuirmann, J. Pharmacokinet. Biopharm. 15, 1987): the difference is above minus the margin, and
below the margin.  Several claims at once are corrected by Holm's procedure (Scand. J. Stat. 6,
1979), so that the chance of one false claim among all stays 5 %.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

LEVEL = 0.05  # chance of a false claim
POWER = 0.8  # with which `pairs_needed` wants a claim to be made
MOST_PAIRS = 100  # that `pairs_needed` tries


@dataclass(frozen=True)
class Interval:
    """Where the true mean of the differences lies, with probability ``confidence``."""

    mean: float
    low: float
    high: float
    confidence: float


def t_within(t: float, df: int) -> float:
    """P(|T| <= t) of Student's t: Abramowitz and Stegun, 26.7.3 (odd df) and 26.7.4 (even).

    Args:
        t: from 0.
        df: degrees of freedom, from 1.
    """
    angle = math.atan2(t, math.sqrt(df))
    sine, cosine = math.sin(angle), math.cos(angle)
    odd = df % 2
    term, total = (cosine, 0.0) if odd else (1.0, 0.0)
    for power in range(odd, df - 1, 2):
        total += term
        term *= cosine**2 * (power + 1) / (power + 2)
    return 2 / math.pi * (angle + sine * total) if odd else sine * total


def t_above(t: float, df: int) -> float:
    """P(T > t)."""
    tail = (1 - t_within(abs(t), df)) / 2
    return tail if t >= 0 else 1 - tail


def t_quantile(p: float, df: int) -> float:
    """The t below which T lies with probability ``p``, 0.5 <= p < 1; by bisection."""
    low, high = 0.0, 1.0
    while 1 - t_above(high, df) < p:
        high *= 2
    for _ in range(200):
        middle = (low + high) / 2
        if middle in (low, high):
            break
        low, high = (middle, high) if 1 - t_above(middle, df) < p else (low, middle)
    return high


def interval(differences: Sequence[float], confidence: float = 1 - LEVEL) -> Interval:
    """Of the mean of two or more differences."""
    mean, error, df = _summary(differences)
    half = t_quantile((1 + confidence) / 2, df) * error
    return Interval(mean, mean - half, mean + half, confidence)


def p_different(differences: Sequence[float]) -> float:
    """Two-sided: how often chance alone would bring a mean as far from 0 as this one."""
    mean, error, df = _summary(differences)
    if error == 0:
        return 1.0 if mean == 0 else 0.0
    return 2 * t_above(abs(mean) / error, df)


def p_equivalent(differences: Sequence[float], margin: float) -> float:
    """How often a true difference of ``margin`` or more would look as small as this one."""
    mean, error, df = _summary(differences)
    gap = margin - abs(mean)  # to the nearer bound: of the two tests its p-value is the larger
    if error == 0:
        return 0.0 if gap > 0 else 1.0
    return t_above(gap / error, df)


def holm(p_values: Sequence[float]) -> list[float]:
    """P-values that may each be held against `LEVEL` although there are several of them."""
    adjusted = [0.0] * len(p_values)
    least = 0.0
    for rank, place in enumerate(sorted(range(len(p_values)), key=lambda i: p_values[i])):
        least = max(least, min(1.0, (len(p_values) - rank) * p_values[place]))
        adjusted[place] = least
    return adjusted


def pairs_needed(differences: Sequence[float], margin: float, level: float = LEVEL) -> int | None:
    """Pairs with which a claim, equivalent or different, is likely if nothing else changes.

    The power of both tests is as Julious has it (Stat. Med. 23, 2004): of a difference
    F(|d| / e - t[1-a/2]), and of two one-sided tests F((m - d) / e - t[1-a]) +
    F((m + d) / e - t[1-a]) - 1, for a mean d with standard error e = s / sqrt(n) and a margin m.
    F is Student's distribution in place of the noncentral one.  What d and s are is known from
    few pairs only, so it is an indication.

    Args:
        level: of each test; of several comparisons their part of `LEVEL`, with which Holm's
            procedure begins.

    Returns:
        More than there are, and at most `MOST_PAIRS`; None if those would not do either.
    """
    mean, spread = abs(fmean(differences)), stdev(differences)
    if spread == 0:
        return None  # more of the same would say the same
    for count in range(len(differences) + 1, MOST_PAIRS + 1):
        df, error = count - 1, spread / math.sqrt(count)
        one_sided, two_sided = t_quantile(1 - level, df), t_quantile(1 - level / 2, df)
        below = t_above(one_sided - (margin - mean) / error, df)
        above = t_above(one_sided - (margin + mean) / error, df)
        different = t_above(two_sided - mean / error, df)
        if max(below + above - 1, different) >= POWER:
            return count
    return None


def _summary(differences: Sequence[float]) -> tuple[float, float, int]:
    """Mean, its standard error, degrees of freedom."""
    count = len(differences)
    return fmean(differences), stdev(differences) / math.sqrt(count), count - 1
