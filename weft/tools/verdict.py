"""What may be said of the trials of a comparison.

Judged is each variant against the first one that has trials, by their pairs (`weft.tools.
statistics`).  Three answers about speed: faster, slower, or that no difference was found, with what
it may still be.  Three about the loss: equivalent within a margin, different, or undecided.  One
pair has no interval, so nothing is claimed of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from weft.tools.statistics import (
    LEVEL,
    Interval,
    holm,
    interval,
    p_different,
    p_equivalent,
    pairs_needed,
)
from weft.tools.trials import Losses, Trial, usual_loss

Differences = tuple[float, ...]  # one of each pair


@dataclass(frozen=True)
class Claim:
    """A question about paired differences, and what the data answers."""

    differences: Differences
    interval: Interval | None  # None with fewer than two pairs
    p: float | None  # corrected for the number of comparisons; undecided: the smaller of two
    answer: str


@dataclass(frozen=True)
class ComparisonResult:
    """A variant against the baseline.

    ``speed``: logarithms of ratios of tokens/s, and ``per_device`` of tokens/s of a device, where
    their numbers differ; ``loss``: differences in nats, None where losses cannot be compared.
    ``more_pairs``: with which an undecided loss might be decided.
    """

    variant: int
    baseline: int
    pairs: int
    speed: Claim
    per_device: Claim | None
    loss: Claim | None
    margin_nats: float | None
    more_pairs: int | None


def judge(
    trials: Sequence[Trial],
    losses: Losses | None,
    margin: float,
    relative: bool,
    loss_apart: Sequence[int] = (),
) -> list[ComparisonResult]:
    """Each variant that has trials against the first of them.

    Args:
        losses: None if there are no trials.
        margin: of equivalence, in nats; if ``relative`` as a part of the baseline's mean loss.
        loss_apart: variants whose loss cannot be compared with the baseline's.
    """
    there = sorted({trial.variant for trial in trials})
    if losses is None or len(there) < 2:
        return []
    of = {(trial.variant, trial.repeat): trial for trial in trials}
    base, *others = there
    paired = {v: [r for (w, r) in sorted(of) if w == v and (base, r) in of] for v in others}

    def log_ratios(v: int, speed: Callable[[Trial], float | None]) -> Differences:
        both = [(speed(of[v, r]), speed(of[base, r])) for r in paired[v]]
        return tuple(math.log(ours / theirs) for ours, theirs in both if ours and theirs)

    final = losses.final
    apart = {
        v: tuple(final[v, r] - final[base, r] for r in paired[v] if {(v, r), (base, r)} <= {*final})
        for v in others
        if v not in loss_apart
    }
    devices = {trial.variant: trial.devices for trial in trials}
    scaled = [v for v in others if devices[v] != devices[base]]
    usual = usual_loss(losses, base)
    nats = margin * abs(usual or math.nan) if relative else margin
    speed = _speed_claims({v: log_ratios(v, lambda t: t.tokens_per_second) for v in others})
    per_device = _speed_claims(
        {v: log_ratios(v, lambda t: t.tokens_per_second_per_device) for v in scaled}
    )
    loss = _loss_claims(apart, nats)
    return [
        ComparisonResult(
            variant=v,
            baseline=base,
            pairs=len(paired[v]),
            speed=speed[v],
            per_device=per_device.get(v),
            loss=loss.get(v),
            margin_nats=nats if apart.get(v) else None,
            more_pairs=pairs_needed(apart[v], nats, LEVEL / len(apart))
            if v in loss and loss[v].answer == "undecided"
            else None,
        )
        for v in others
    ]


def _claims(
    differences: Mapping[int, Differences],
    tests: Sequence[Callable[[Differences], float]],
    claim: Callable[..., Claim],
) -> dict[int, Claim]:
    """A claim of each variant: from its differences, and what each test gives, corrected by Holm.

    Args:
        differences: of the pairs of each variant with the baseline.
    """
    able = {v: some for v, some in differences.items() if len(some) > 1}
    p_values = zip(*(holm([test(some) for some in able.values()]) for test in tests), strict=True)
    claims = {v: claim(able[v], *p) for v, p in zip(able, p_values, strict=True)}
    return {v: claims.get(v, Claim(d, None, None, "too few pairs")) for v, d in differences.items()}


def _speed_claims(differences: Mapping[int, Differences]) -> dict[int, Claim]:
    """Faster, slower, or none found."""

    def claim(some: Differences, p: float) -> Claim:
        found, answer = interval(some), "no difference found"
        if p < LEVEL:
            answer = "faster" if found.mean > 0 else "slower"
        elif found.low > 0 or found.high < 0:
            answer = "not claimed"  # for one comparison it would be
        return Claim(some, found, p, answer)

    return _claims(differences, [p_different], claim)


def _loss_claims(differences: Mapping[int, Differences], margin: float) -> dict[int, Claim]:
    """Equivalent, higher, lower, or undecided."""

    def claim(some: Differences, same: float, other: float) -> Claim:
        found = interval(some)
        if same < LEVEL:
            # The interval that belongs to two tests of 5 % each.
            return Claim(some, interval(some, 1 - 2 * LEVEL), same, "equivalent")
        if other < LEVEL:
            return Claim(some, found, other, "higher" if found.mean > 0 else "lower")
        return Claim(some, found, min(same, other), "undecided")

    return _claims(differences, [lambda some: p_equivalent(some, margin), p_different], claim)


# --------------------------------------------------------------------------- in words


def percent(part: float) -> str:
    """``0.0512`` -> ``'5.1 %'``."""
    value = 100 * abs(part)
    return f"{value:.1f} %" if value >= 0.1 or value == 0 else f"{value:.1g} %"


def speed_sentence(it: Claim, ours: str, base: str, what: str, comparisons: int, steps: str) -> str:
    """What may be said of the speed.

    Args:
        what: '' or ' per device'.
        comparisons: that were made at once.
        steps: how far steps of one run are apart, for people; '' if unknown.
    """
    pairs = len(it.differences)
    if it.interval is None:
        if not pairs:
            return f"the speed of {ours} cannot be compared: no pair of runs has both"
        one = math.expm1(it.differences[0])
        return (
            f"one run each: {ours}'s was {percent(one)} {_way(one)} than {base}'s{what}, which "
            f"is not told from noise{steps}; --repeat 3 or more gives an interval"
        )
    low, mean, high = (math.expm1(x) for x in (it.interval.low, it.interval.mean, it.interval.high))
    span = f"95 % interval, {pairs} pairs"
    if it.answer in ("faster", "slower"):
        ends = sorted((abs(low), abs(high)))
        return (
            f"{ours} is {percent(mean)} {it.answer} than {base}{what} "
            f"(95 % interval {percent(ends[0]).removesuffix(' %')} to {percent(ends[1])}, "
            f"{pairs} pairs)"
        )
    between = f"between {percent(low)} {_way(low)} and {percent(high)} {_way(high)} ({span})"
    if it.answer == "not claimed":
        return (
            f"whether {ours} is {_way(mean)} than {base}{what} is open: it is {between}, but with "
            f"{comparisons} comparisons at once chance gives as much too often (p = {it.p:.2f})"
        )
    return f"no difference in speed{what} was found: {ours} is {between} than {base}"


def _way(part: float) -> str:
    return "faster" if part > 0 else "slower"


def loss_sentence(
    judged: ComparisonResult, kind: str, ours: str, base: str, usual: float | None
) -> str:
    """What may be said of the losses.

    Args:
        kind: held-out or train.
        usual: the baseline's mean loss, of which differences are told as parts.
    """
    it = judged.loss
    if it is None:
        return "their losses cannot be compared: they are of other tokens or objectives"
    if not it.differences or usual is None or judged.margin_nats is None:
        return "there is no pair of losses"
    margin = percent(judged.margin_nats / usual)
    if it.interval is None:
        one = it.differences[0]
        return f"its {kind} loss was {_off(one, usual)} (one pair: no verdict)"
    low, high = it.interval.low, it.interval.high
    span = f"{_off(low, usual)} to {_off(high, usual)}"
    confidence = f"{it.interval.confidence:.0%}".replace("%", " %")
    if it.answer == "equivalent":
        return (
            f"{kind} losses are equivalent within {margin}: {ours}'s is {span} "
            f"({confidence} interval)"
        )
    if it.answer in ("higher", "lower"):
        return (
            f"{ours}'s {kind} loss is {it.answer}: {_off(it.interval.mean, usual)} "
            f"({confidence} interval {span})"
        )
    more = "more than 100 pairs, or a wider --margin, would be needed"
    if judged.more_pairs is not None:
        more = f"--repeat {judged.more_pairs} might decide"
    return (
        f"whether {kind} losses are equivalent within {margin} is undecided: {ours}'s is {span} "
        f"({confidence} interval); {more}"
    )


def _off(nats: float, usual: float) -> str:
    """``+0.3 %`` of the baseline's."""
    return f"{'-' if nats < 0 else '+'}{percent(nats / usual)}"


def percents(logarithms: Interval) -> list[float]:
    """Of ratios: low, mean and high."""
    return [100 * math.expm1(x) for x in (logarithms.low, logarithms.mean, logarithms.high)]


def to_dict(judged: ComparisonResult, labels: Sequence[str]) -> dict[str, Any]:
    """For machines: numbers as measured, and percent of tokens/s beside logarithms."""
    found = asdict(judged)
    found["variant"], found["baseline"] = labels[judged.variant], labels[judged.baseline]
    for name, claim in (("speed", judged.speed), ("per_device", judged.per_device)):
        if claim is not None and claim.interval is not None:
            found[name]["percent"] = percents(claim.interval)
    return found
