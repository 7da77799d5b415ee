"""Statistics against published examples and on simulated differences."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest

from weft.comparison.verdict import (
    SIGNIFICANCE,
    confidence_interval,
    difference_p_value,
    equivalence_p_value,
    holm_adjust,
    pairs_needed,
)


def test_t_test_students_example_has_published_value() -> None:
    """The data are Cushny and Peebles' hours of sleep, from Student's paper of 1908."""
    hours = [1.2, 2.4, 1.3, 1.3, 0.0, 1.0, 1.8, 0.8, 4.6, 1.4]
    result = confidence_interval(hours)
    assert result.mean == pytest.approx(1.58)
    assert (result.low, result.high) == pytest.approx((0.700, 2.460), abs=1e-3)
    assert difference_p_value(hours) == pytest.approx(0.00283, abs=1e-5)


def test_holm_adjusted_values_equal_published_example() -> None:
    assert holm_adjust([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm_adjust([0.4, 0.9]) == pytest.approx([0.8, 0.9])
    assert holm_adjust([0.02]) == [0.02]


def test_equal_differences_have_p_of_zero_or_one() -> None:
    """Deterministic losses may differ by the same in every pair, or not at all."""
    assert difference_p_value([0.0, 0.0]) == 1
    assert difference_p_value([0.25, 0.25]) == 0
    assert equivalence_p_value([0.0, 0.0], 0.1) == 0
    assert equivalence_p_value([0.25, 0.25], 0.1) == 1
    assert confidence_interval([0.25, 0.25]).low == confidence_interval([0.25, 0.25]).high == 0.25


def test_equivalence_holds_if_90_percent_interval_is_inside_margin() -> None:
    subset = [0.011, -0.004, 0.006, 0.009]
    result = confidence_interval(subset, 0.9)
    at = max(abs(result.low), abs(result.high))
    assert equivalence_p_value(subset, at) == pytest.approx(SIGNIFICANCE)
    assert (
        equivalence_p_value(subset, at * 1.01)
        < SIGNIFICANCE
        < equivalence_p_value(subset, at * 0.99)
    )


# --------------------------------------------------------------------------- simulated


SIMULATED = 2000


def is_within(hits: int, p: float, sigmas: float = 3.5) -> bool:
    """Return True if a count out of `SIMULATED` agrees with a probability."""
    return abs(hits - SIMULATED * p) < sigmas * math.sqrt(SIMULATED * p * (1 - p))


@pytest.mark.parametrize("pairs", [2, 3, 6])
def test_interval_coverage_and_false_claims_are_nominal(pairs: int) -> None:
    """95 % of the intervals contain the true value; 5 % of the tests give false claims."""
    noise = np.random.default_rng(pairs).normal(0.02, 0.3, (SIMULATED, pairs))
    inside = false = wrongly_equivalent = 0
    for row in noise.tolist():
        result = confidence_interval(row)
        inside += result.low <= 0.02 <= result.high
        false += difference_p_value([x - 0.02 for x in row]) < SIGNIFICANCE
        # The true difference lies on the margin, so a claim of equivalence is false.
        wrongly_equivalent += equivalence_p_value([x + 0.98 for x in row], 1.0) < SIGNIFICANCE
    assert is_within(inside, 0.95)
    assert is_within(false, 0.05)
    assert is_within(wrongly_equivalent, 0.05)


def test_holm_false_claims_among_three_comparisons_are_limited() -> None:
    """Without the correction 14 % of comparisons of equal variants would name a winner."""
    noise = np.random.default_rng(1).normal(0, 0.1, (SIMULATED, 3, 6)).tolist()
    result = [[difference_p_value(row) for row in rows] for rows in noise]
    assert is_within(sum(min(holm_adjust(p)) < SIGNIFICANCE for p in result), 0.05)
    assert sum(min(p) < SIGNIFICANCE for p in result) > 0.11 * SIMULATED


@pytest.mark.parametrize(
    ("mean", "margin", "least", "most"),
    [
        (0.8, 0.5, 0.76, 0.87),  # clearly no equivalence
        (0.0, 1.0, 0.79, 0.92),  # clearly no difference
        (0.0, 1.4, 0.79, 0.92),
        (0.3, 1.0, 0.76, 0.87),  # nearer to one bound than to the other
    ],
)
def test_pairs_needed_give_the_requested_power(
    mean: float, margin: float, least: float, most: float
) -> None:
    """With `pairs_needed` pairs, 80 % of the simulated comparisons give a claim.

    The first case claims a difference, the others equivalence.  One more pair adds up to 8 % to the
    power, because pairs are few.
    """
    template = np.array([-1.0, 1.0, -1.0, 1.0])
    needed = pairs_needed((mean + template / template.std(ddof=1)).tolist(), margin)
    assert needed is not None
    result = np.random.default_rng(2).normal(mean, 1.0, (SIMULATED, needed)).tolist()
    p = [
        equivalence_p_value(row, margin) if mean < margin else difference_p_value(row)
        for row in result
    ]
    assert least < sum(item < SIGNIFICANCE for item in p) / SIMULATED < most


def test_pairs_needed_grow_with_comparisons() -> None:
    """The number of pairs gives the power at Holm's first level."""
    pilot = [-0.9, 0.8, -0.7, 0.9]
    single, of_four = pairs_needed(pilot, 1.0), pairs_needed(pilot, 1.0, SIGNIFICANCE / 4)
    assert single is not None
    assert of_four is not None
    assert of_four > single


def test_pairs_needed_grow_with_noise() -> None:
    counts = [pairs_needed([-s, s, -s, s], 1.0) for s in (0.1, 0.5, 1.0, 2.0)]
    assert all(a is not None and b is not None and a <= b for a, b in pairwise(counts))
    assert pairs_needed([-50.0, 50.0], 0.001) is None
    assert pairs_needed([0.5, 0.5], 0.1) is None
    assert pairs_needed([0.5, -0.5, 0.1], 0.6) > 3  # type: ignore[operator]
