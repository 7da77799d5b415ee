"""Draw conclusions from the trials of a comparison, and phrase them.

Each variant is compared with the first one that has trials, by pairs of runs
(`weft.tools.statistics`).  The answer about speed is faster, slower, or no difference found, with
the interval that remains.  The answer about the loss is equivalent within a margin, different, or
undecided.  One pair has no interval, so there is no claim.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from weft.tools.statistics import (
    MAX_PAIRS,
    SIGNIFICANCE,
    Interval,
    confidence_interval,
    difference_p_value,
    equivalence_p_value,
    holm_adjust,
    pairs_needed,
)
from weft.tools.trials import Trial, TrialLosses, mean_loss

Differences = tuple[float, ...]  # one of each pair


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


def compare_variants(
    trials: Sequence[Trial],
    losses: TrialLosses | None,
    margin: float,
    relative: bool,
    other_losses: Sequence[int] = (),
) -> list[ComparisonResult]:
    """Compare each variant that has trials with the first of them.

    Args:
        trials: trials of all variants.
        losses: None without trials.
        margin: margin of equivalence, in nats or as a fraction.
        relative: ``margin`` is a fraction of the baseline's loss.
        other_losses: variants whose losses cannot be compared with the baseline's.
    """
    variants = sorted({trial.variant for trial in trials})
    if losses is None or len(variants) < 2:
        return []
    by_key = {(trial.variant, trial.repeat): trial for trial in trials}
    base, *others = variants
    repeats = {
        v: [r for (w, r) in sorted(by_key) if w == v and (base, r) in by_key] for v in others
    }

    def log_ratios(v: int, speed: Callable[[Trial], float | None]) -> Differences:
        pairs = [(speed(by_key[v, r]), speed(by_key[base, r])) for r in repeats[v]]
        return tuple(math.log(a / b) for a, b in pairs if a and b)

    final = losses.final
    loss_differences = {
        v: tuple(
            final[v, r] - final[base, r] for r in repeats[v] if {(v, r), (base, r)} <= {*final}
        )
        for v in others
        if v not in other_losses
    }
    devices = {trial.variant: trial.devices for trial in trials}
    scaled = [v for v in others if devices[v] != devices[base]]
    baseline_loss = mean_loss(losses, base)
    margin_nats = margin * abs(baseline_loss or math.nan) if relative else margin
    speed = _speed_claims({v: log_ratios(v, lambda t: t.tokens_per_second) for v in others})
    per_device = _speed_claims(
        {v: log_ratios(v, lambda t: t.tokens_per_second_per_device) for v in scaled}
    )
    loss = _loss_claims(loss_differences, margin_nats)
    return [
        ComparisonResult(
            variant=v,
            baseline=base,
            pairs=len(repeats[v]),
            speed=speed[v],
            per_device=per_device.get(v),
            loss=loss.get(v),
            margin_nats=margin_nats if loss_differences.get(v) else None,
            more_pairs=pairs_needed(
                loss_differences[v], margin_nats, SIGNIFICANCE / len(loss_differences)
            )
            if v in loss and loss[v].answer == "undecided"
            else None,
        )
        for v in others
    ]


def _make_claims(
    differences: Mapping[int, Differences],
    tests: Sequence[Callable[[Differences], float]],
    make_claim: Callable[..., Claim],
) -> dict[int, Claim]:
    """Make a claim about each variant from corrected p-values of tests.

    Args:
        differences: of each variant from the baseline, one per pair.
        tests: each returns a p-value of one variant's differences.
        make_claim: called with the differences and the corrected p-value of each test.
    """
    testable = {v: values for v, values in differences.items() if len(values) > 1}
    p_values = zip(
        *(holm_adjust([test(values) for values in testable.values()]) for test in tests),
        strict=True,
    )
    claims = {v: make_claim(testable[v], *p) for v, p in zip(testable, p_values, strict=True)}
    return {v: claims.get(v, Claim(d, None, None, "too few pairs")) for v, d in differences.items()}


def _speed_claims(differences: Mapping[int, Differences]) -> dict[int, Claim]:
    """Claim that each variant is faster, slower, or that no difference was found."""

    def make_claim(values: Differences, p: float) -> Claim:
        interval, answer = confidence_interval(values), "no difference found"
        if p < SIGNIFICANCE:
            answer = "faster" if interval.mean > 0 else "slower"
        elif interval.low > 0 or interval.high < 0:
            answer = "not claimed"  # significant only without Holm's correction
        return Claim(values, interval, p, answer)

    return _make_claims(differences, [difference_p_value], make_claim)


def _loss_claims(differences: Mapping[int, Differences], margin: float) -> dict[int, Claim]:
    """Claim that each loss is equivalent, higher, lower, or undecided."""

    def make_claim(values: Differences, p_equivalent: float, p_different: float) -> Claim:
        interval = confidence_interval(values)
        if p_equivalent < SIGNIFICANCE:
            # The interval of two one-sided tests of 5 % each.
            interval = confidence_interval(values, 1 - 2 * SIGNIFICANCE)
            return Claim(values, interval, p_equivalent, "equivalent")
        if p_different < SIGNIFICANCE:
            return Claim(values, interval, p_different, "higher" if interval.mean > 0 else "lower")
        return Claim(values, interval, min(p_equivalent, p_different), "undecided")

    return _make_claims(
        differences,
        [lambda values: equivalence_p_value(values, margin), difference_p_value],
        make_claim,
    )


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
            f"{baseline}'s{unit}, which is within noise{steps}; "
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
        return f"its {kind} loss was {change} (one pair: no verdict)"
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
