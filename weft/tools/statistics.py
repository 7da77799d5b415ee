"""Statistics of paired runs: confidence intervals, tests, pairs needed.

The functions take *paired differences*: per repeat, the value of a variant minus that of the
baseline.  The differences are assumed independent and roughly normal.  The unit of replication is
the run: the steps of one run share the machine's state and predict little about the next run.
Student's t gives the intervals ("Student", Biometrika 6, 1908).

*Different* and *equivalent* are two questions: a difference that was not found may still exist.
Two one-sided tests show equivalence (Schuirmann, J. Pharmacokinet. Biopharm. 15, 1987): the
difference is above minus the margin, and below the margin.  Holm's procedure (Scand. J. Stat. 6,
1979) corrects several claims, so that the probability of any false claim stays 5 %.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

SIGNIFICANCE = 0.05  # probability of a false claim
POWER = 0.8  # probability of a claim that `pairs_needed` aims for
MAX_PAIRS = 100  # upper limit of `pairs_needed`


@dataclass(frozen=True)
class Interval:
    """Confidence interval of the mean difference."""

    mean: float
    low: float
    high: float
    confidence: float


def t_central_probability(t: float, df: int) -> float:
    """Return P(|T| <= t) of Student's t.

    Source: Abramowitz and Stegun, 26.7.3 (odd df) and 26.7.4 (even df).

    Args:
        t: at least 0.
        df: degrees of freedom, at least 1.
    """
    angle = math.atan2(t, math.sqrt(df))
    sine, cosine = math.sin(angle), math.cos(angle)
    odd = df % 2
    term, total = (cosine, 0.0) if odd else (1.0, 0.0)
    for power in range(odd, df - 1, 2):
        total += term
        term *= cosine**2 * (power + 1) / (power + 2)
    return 2 / math.pi * (angle + sine * total) if odd else sine * total


def t_survival(t: float, df: int) -> float:
    """Return P(T > t)."""
    tail = (1 - t_central_probability(abs(t), df)) / 2
    return tail if t >= 0 else 1 - tail


def t_quantile(p: float, df: int) -> float:
    """Return the quantile of Student's t for 0.5 <= p < 1, by bisection."""
    low, high = 0.0, 1.0
    while 1 - t_survival(high, df) < p:
        high *= 2
    for _ in range(200):
        middle = (low + high) / 2
        if middle in (low, high):
            break
        low, high = (middle, high) if 1 - t_survival(middle, df) < p else (low, middle)
    return high


def confidence_interval(
    differences: Sequence[float], confidence: float = 1 - SIGNIFICANCE
) -> Interval:
    """Return the confidence interval of the mean of two or more differences."""
    mean, error, df = _summary(differences)
    half = t_quantile((1 + confidence) / 2, df) * error
    return Interval(mean, mean - half, mean + half, confidence)


def difference_p_value(differences: Sequence[float]) -> float:
    """Return the p-value of the two-sided t test of a zero mean."""
    mean, error, df = _summary(differences)
    if error == 0:
        return 1.0 if mean == 0 else 0.0
    return 2 * t_survival(abs(mean) / error, df)


def equivalence_p_value(differences: Sequence[float], margin: float) -> float:
    """Return the p-value of two one-sided tests that the mean is within ``margin``."""
    mean, error, df = _summary(differences)
    gap = margin - abs(mean)  # the nearer bound has the larger p-value of the two tests
    if error == 0:
        return 0.0 if gap > 0 else 1.0
    return t_survival(gap / error, df)


def holm_adjust(p_values: Sequence[float]) -> list[float]:
    """Return p-values corrected by Holm's procedure, to compare with `SIGNIFICANCE`."""
    adjusted = [0.0] * len(p_values)
    lower_bound = 0.0
    for rank, index in enumerate(sorted(range(len(p_values)), key=lambda i: p_values[i])):
        lower_bound = max(lower_bound, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = lower_bound
    return adjusted


def pairs_needed(
    differences: Sequence[float], margin: float, level: float = SIGNIFICANCE
) -> int | None:
    """Estimate the number of pairs for a claim, equivalent or different.

    The power of both tests follows Julious (Stat. Med. 23, 2004): of a difference
    F(|d| / e - t[1-a/2]), and of two one-sided tests F((m - d) / e - t[1-a]) +
    F((m + d) / e - t[1-a]) - 1, for a mean d with standard error e = s / sqrt(n) and a margin m.
    F is Student's distribution in place of the noncentral one.  d and s are estimated from few
    pairs, so the result is an indication.

    Args:
        differences: one difference per present pair; at least two.
        margin: margin of equivalence, in the unit of ``differences``.
        level: significance level of each test; for several comparisons, `SIGNIFICANCE` divided by
            their number, the first level of Holm's procedure.

    Returns:
        More than the present pairs, at most `MAX_PAIRS`; None if `MAX_PAIRS` are not enough.
    """
    mean, spread = abs(fmean(differences)), stdev(differences)
    if spread == 0:
        return None  # more equal pairs change nothing
    for count in range(len(differences) + 1, MAX_PAIRS + 1):
        df, error = count - 1, spread / math.sqrt(count)
        one_sided, two_sided = t_quantile(1 - level, df), t_quantile(1 - level / 2, df)
        below = t_survival(one_sided - (margin - mean) / error, df)
        above = t_survival(one_sided - (margin + mean) / error, df)
        different = t_survival(two_sided - mean / error, df)
        if max(below + above - 1, different) >= POWER:
            return count
    return None


def _summary(differences: Sequence[float]) -> tuple[float, float, int]:
    """Return the mean, its standard error, and the degrees of freedom."""
    count = len(differences)
    return fmean(differences), stdev(differences) / math.sqrt(count), count - 1
