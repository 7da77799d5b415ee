"""Draw conclusions from the trials of a comparison, and phrase them.

Each variant is compared with the first one that has trials.  A *pair* is the two runs of a repeat;
its difference is one value of the sample.  The differences are assumed independent and roughly
normal.  The unit of replication is the run: the steps of one run share the machine's state and
predict little about the next run.  Student's t, from SciPy, gives intervals and p-values.

*Different* and *equivalent* are two questions: a difference that was not found may still exist.
Two one-sided tests show equivalence (Schuirmann, J. Pharmacokinet. Biopharm. 15, 1987): the
difference is above minus the margin, and below the margin.  Holm's procedure (Scand. J. Stat. 6,
1979) corrects several claims, so that the probability of any false claim stays 5 %.

The answer about speed is faster, slower, or no difference found, with the interval that remains.
The answer about the loss is equivalent within a margin, different, or undecided.  One pair has no
interval, so there is no claim.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from operator import attrgetter
from statistics import fmean, stdev
from typing import Any

import numpy as np

from weft.comparison.trials import Trial
from weft.config.errors import WeftError

SIGNIFICANCE = 0.05  # probability of a false claim
POWER = 0.8  # probability of a claim that `pairs_needed` aims for
MAX_PAIRS = 100  # upper limit of `pairs_needed`

TOO_FEW = "too few pairs"  # the answer without an interval

Differences = tuple[float, ...]  # one of each pair


@dataclass(frozen=True)
class Interval:
    """Confidence interval of the mean difference."""

    mean: float
    low: float
    high: float
    confidence: float


@dataclass(frozen=True)
class Claim:
    """The answer to a question about paired differences."""

    differences: Differences
    interval: Interval | None  # None with fewer than two pairs
    p: float | None  # corrected by Holm's procedure; undecided: the smaller of two
    answer: str


@dataclass(frozen=True)
class ComparisonResult:
    """Comparison of a variant with the baseline.

    Attributes:
        speed: logarithms of ratios of tokens/s.
        per_device: the same of tokens/s per device; None with equal numbers of devices.
        loss: differences in nats; None if the losses cannot be compared.
        margin_nats: margin of equivalence; None without pairs of losses.
        more_pairs: pairs that might decide an undecided loss.
    """

    variant: int
    baseline: int
    pairs: int
    speed: Claim
    per_device: Claim | None
    loss: Claim | None
    margin_nats: float | None
    more_pairs: int | None


# --------------------------------------------------------------------------- statistics


def import_student_t() -> Any:
    """Return Student's t distribution of SciPy, whose import takes a second.

    Raises:
        WeftError: if SciPy is not installed.
    """
    try:
        from scipy.stats import t  # type: ignore[import-untyped]
    except ImportError as error:
        raise WeftError("comparing runs needs SciPy: pip install 'weft[compare]'") from error
    return t


def _mean_and_error(differences: Sequence[float]) -> tuple[float, float]:
    """Return the mean of two or more differences, and its standard error."""
    return fmean(differences), stdev(differences) / math.sqrt(len(differences))


def confidence_interval(
    differences: Sequence[float], confidence: float = 1 - SIGNIFICANCE
) -> Interval:
    """Return Student's confidence interval of the mean of two or more differences."""
    mean, error = _mean_and_error(differences)
    half = error * float(import_student_t().isf((1 - confidence) / 2, len(differences) - 1))
    return Interval(mean, mean - half, mean + half, confidence)


def difference_p_value(differences: Sequence[float]) -> float:
    """Return the p-value of the two-sided t test of a zero mean."""
    mean, error = _mean_and_error(differences)
    if error == 0:  # deterministic losses
        return 1.0 if mean == 0 else 0.0
    return 2 * float(import_student_t().sf(abs(mean) / error, len(differences) - 1))


def equivalence_p_value(differences: Sequence[float], margin: float) -> float:
    """Return the p-value of two one-sided tests that the mean is within ``margin``."""
    mean, error = _mean_and_error(differences)
    gap = margin - abs(mean)  # the nearer bound has the larger p-value of the two tests
    if error == 0:
        return 0.0 if gap > 0 else 1.0
    return float(import_student_t().sf(gap / error, len(differences) - 1))


def holm_adjust(p_values: Sequence[float]) -> list[float]:
    """Return p-values corrected by Holm's procedure, to compare with `SIGNIFICANCE`."""
    adjusted, lower_bound = [0.0] * len(p_values), 0.0
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
    t, mean, spread = import_student_t(), abs(fmean(differences)), stdev(differences)
    counts = np.arange(len(differences) + 1, MAX_PAIRS + 1)
    if spread == 0 or not counts.size:
        return None  # more equal pairs change nothing
    df, error = counts - 1, spread / np.sqrt(counts)
    one_sided, two_sided = t.isf(level, df), t.isf(level / 2, df)
    below = t.cdf((margin - mean) / error - one_sided, df)
    above = t.cdf((margin + mean) / error - one_sided, df)
    power = np.maximum(below + above - 1, t.cdf(mean / error - two_sided, df))
    enough = counts[power >= POWER]
    return int(enough[0]) if enough.size else None


# --------------------------------------------------------------------------- claims


def compare_variants(
    trials: Sequence[Trial], margin: float, relative: bool, other_losses: Sequence[int] = ()
) -> list[ComparisonResult]:
    """Compare each variant that has trials with the first of them.

    Args:
        trials: trials of all variants.
        margin: margin of equivalence, in nats or as a fraction.
        relative: ``margin`` is a fraction of the baseline's loss.
        other_losses: variants whose losses cannot be compared with the baseline's.
    """
    by_variant: dict[int, dict[int, Trial]] = {}
    for trial in sorted(trials, key=attrgetter("variant", "repeat")):
        by_variant.setdefault(trial.variant, {})[trial.repeat] = trial
    if len(by_variant) < 2:
        return []
    base, *others = by_variant
    base_trials = by_variant[base]
    pairs = {
        v: [(trial, base_trials[r]) for r, trial in by_variant[v].items() if r in base_trials]
        for v in others
    }
    devices = {v: next(iter(by_variant[v].values())).devices for v in by_variant}

    def log_ratios(v: int, speed: Callable[[Trial], float | None]) -> Differences:
        return tuple(math.log(a / b) for x, y in pairs[v] if (a := speed(x)) and (b := speed(y)))

    losses = {
        v: tuple(x.loss - y.loss for x, y in pairs[v] if not (x.loss is None or y.loss is None))
        for v in others
        if v not in other_losses
    }
    baseline_loss = mean_loss(base_trials.values())
    margin_nats = margin * abs(baseline_loss or math.nan) if relative else margin
    speed = _speed_claims({v: log_ratios(v, attrgetter("tokens_per_second")) for v in others})
    per_device = _speed_claims(
        {
            v: log_ratios(v, attrgetter("tokens_per_second_per_device"))
            for v in others
            if devices[v] != devices[base]
        }
    )
    loss = _loss_claims(losses, margin_nats)
    return [
        ComparisonResult(
            variant=v,
            baseline=base,
            pairs=len(pairs[v]),
            speed=speed[v],
            per_device=per_device.get(v),
            loss=loss.get(v),
            margin_nats=margin_nats if losses.get(v) else None,
            more_pairs=pairs_needed(losses[v], margin_nats, SIGNIFICANCE / len(losses))
            if v in loss and loss[v].answer == "undecided"
            else None,
        )
        for v in others
    ]


def mean_loss(trials: Iterable[Trial]) -> float | None:
    """Return the mean loss of trials; None if none has a loss."""
    losses = [trial.loss for trial in trials if trial.loss is not None]
    return fmean(losses) if losses else None


def _corrected_p_values(
    differences: Mapping[int, Differences], test: Callable[[Differences], float]
) -> dict[int, float]:
    """Return the corrected p-value of each variant with two or more pairs."""
    testable = {v: values for v, values in differences.items() if len(values) > 1}
    return dict(zip(testable, holm_adjust(list(map(test, testable.values()))), strict=True))


def _speed_claims(differences: Mapping[int, Differences]) -> dict[int, Claim]:
    """Claim that each variant is faster, slower, or that no difference was found."""
    p_values = _corrected_p_values(differences, difference_p_value)
    claims = {v: Claim(values, None, None, TOO_FEW) for v, values in differences.items()}
    for v, p in p_values.items():
        interval, answer = confidence_interval(differences[v]), "no difference found"
        if p < SIGNIFICANCE:
            answer = "faster" if interval.mean > 0 else "slower"
        elif interval.low > 0 or interval.high < 0:
            answer = "not claimed"  # significant only without Holm's correction
        claims[v] = Claim(differences[v], interval, p, answer)
    return claims


def _loss_claims(differences: Mapping[int, Differences], margin: float) -> dict[int, Claim]:
    """Claim that each loss is equivalent, higher, lower, or undecided."""
    equivalent = _corrected_p_values(differences, partial(equivalence_p_value, margin=margin))
    different = _corrected_p_values(differences, difference_p_value)
    claims = {v: Claim(values, None, None, TOO_FEW) for v, values in differences.items()}
    for v, p in equivalent.items():
        interval, answer = confidence_interval(differences[v]), "undecided"
        if p < SIGNIFICANCE:
            # The interval of two one-sided tests of 5 % each.
            interval = confidence_interval(differences[v], 1 - 2 * SIGNIFICANCE)
            answer = "equivalent"
        elif different[v] < SIGNIFICANCE:
            p, answer = different[v], "higher" if interval.mean > 0 else "lower"
        else:
            p = min(p, different[v])
        claims[v] = Claim(differences[v], interval, p, answer)
    return claims


# --------------------------------------------------------------------------- sentences


def percent(fraction: float) -> str:
    """Format a fraction without its sign: ``0.0512`` -> ``'5.1 %'``."""
    value = 100 * abs(fraction)
    return f"{value:.1f} %" if value >= 0.1 or value == 0 else f"{value:.1g} %"


def speed_sentence(
    claim: Claim, name: str, baseline: str, unit: str, num_comparisons: int, steps: str
) -> str:
    """Phrase the claim about the speed of variant ``name``.

    Args:
        claim: the claim to phrase.
        name: name of the variant.
        baseline: name of the baseline.
        unit: '' or ' per device'.
        num_comparisons: number of p-values that were corrected together.
        steps: a phrase for the spread of step times within a run; '' if unknown.
    """
    num_pairs = len(claim.differences)
    if claim.interval is None:
        if not num_pairs:
            return f"the speed of {name} cannot be compared: no repeat has a run of both variants"
        change = math.expm1(claim.differences[0])
        return (
            f"one run each: {name}'s was {percent(change)} {_direction(change)} than "
            f"{baseline}'s{unit}{steps}; one pair proves nothing, "
            "--repeat 3 or more gives an interval"
        )
    interval = claim.interval
    low, mean, high = (math.expm1(x) for x in (interval.low, interval.mean, interval.high))
    if claim.answer in ("faster", "slower"):
        smaller, larger = sorted((abs(low), abs(high)))
        return (
            f"{name} is {percent(mean)} {claim.answer} than {baseline}{unit} "
            f"(95 % interval {percent(smaller).removesuffix(' %')} to {percent(larger)}, "
            f"{num_pairs} pairs)"
        )
    between = (
        f"between {percent(low)} {_direction(low)} and {percent(high)} {_direction(high)} "
        f"than {baseline} (95 % interval, {num_pairs} pairs)"
    )
    if claim.answer == "not claimed":
        return (
            f"{name} may be {_direction(mean)} than {baseline}{unit}, but this is not significant "
            f"among {num_comparisons} comparisons (p = {claim.p:.2f}): it is {between}"
        )
    return f"no difference in speed{unit} was found: {name} is {between}"


def _direction(change: float) -> str:
    return "faster" if change > 0 else "slower"


def loss_sentence(
    result: ComparisonResult, kind: str, name: str, baseline: str, baseline_loss: float | None
) -> str:
    """Phrase the claim about the loss of variant ``name``.

    Args:
        result: has the claim to phrase.
        kind: validation or train.
        name: name of the variant.
        baseline: name of the baseline.
        baseline_loss: the baseline's mean loss, in nats; differences are fractions of it.
    """
    claim = result.loss
    if claim is None:
        return "the losses cannot be compared: they are of different data or objectives"
    if not claim.differences or baseline_loss is None or result.margin_nats is None:
        return "the losses cannot be compared: no repeat has a loss of both variants"
    margin = percent(result.margin_nats / baseline_loss)
    if claim.interval is None:
        change = _format_change(claim.differences[0], baseline_loss)
        return f"{name}'s {kind} loss was {change} (one pair: no verdict)"
    low, mean, high = (
        _format_change(x, baseline_loss)
        for x in (claim.interval.low, claim.interval.mean, claim.interval.high)
    )
    confidence = f"{claim.interval.confidence:.0%}".replace("%", " %")
    if claim.answer == "equivalent":
        return (
            f"{kind} losses are equivalent within {margin}: {name}'s is {low} to {high} "
            f"({confidence} interval)"
        )
    if claim.answer in ("higher", "lower"):
        return (
            f"{name}'s {kind} loss is {claim.answer}: {mean} "
            f"({confidence} interval {low} to {high})"
        )
    remedy = f"more than {MAX_PAIRS} pairs, or a wider --margin, would be needed"
    if result.more_pairs is not None:
        remedy = f"--repeat {result.more_pairs} might decide"
    return (
        f"the {kind} losses are neither equivalent within {margin} nor different: {name}'s is "
        f"{low} to {high} ({confidence} interval); {remedy}"
    )


def _format_change(nats: float, baseline_loss: float) -> str:
    """Format a difference as ``+0.3 %`` of the baseline's loss."""
    return f"{'-' if nats < 0 else '+'}{percent(nats / baseline_loss)}"


def percents(log_ratios: Interval) -> list[float]:
    """Convert an interval of log ratios to percent: low, mean and high."""
    return [100 * math.expm1(x) for x in (log_ratios.low, log_ratios.mean, log_ratios.high)]


def to_dict(result: ComparisonResult, labels: Sequence[str]) -> dict[str, Any]:
    """Return the JSON record: labels for numbers, and percent beside log ratios."""
    record = asdict(result)
    record["variant"], record["baseline"] = labels[result.variant], labels[result.baseline]
    for name, claim in (("speed", result.speed), ("per_device", result.per_device)):
        if claim is not None and claim.interval is not None:
            record[name]["percent"] = percents(claim.interval)
    return record
