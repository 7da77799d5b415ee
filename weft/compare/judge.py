"""JUDGE: what the trials of a comparison measured, and what may be said of it.

Measured of each trial, from its ``metrics.jsonl``: the median seconds of a step after warm-up (of
each start the first tenth of its records, and at least one, is left out), what follows from that,
memory, and the loss.  Losses are taken where all trials have seen as many tokens, the most that
each of them has: held out, if all were evaluated there, else the mean over the last tenth of those
tokens.

Judged is each variant against the first one that has trials, by their pairs (`weft.compare.
statistics`).  Three answers about speed: faster, slower, or that no difference was found, with what
it may still be.  Three about the loss: equivalent within a margin, different, or undecided.  One
pair has no interval, so nothing is claimed of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from statistics import fmean, median, quantiles
from typing import Any

from weft.compare.statistics import (
    LEVEL,
    Interval,
    holm,
    interval,
    p_different,
    p_equivalent,
    pairs_needed,
)
from weft.observe.files import read_records
from weft.observe.record import device_hours

Record = Mapping[str, Any]

WARM_UP = 0.1  # of the records of a start
WINDOW = 0.1  # of the tokens so far, over which a train loss is a mean
CURVE = 10  # points of a loss curve
# Of the text: between models of other tokens, nats per token mean something else.
OF_THE_TEXT = ("data.path", "data.mixture", "data.tokenizer", "data.vocab_size", "data.holdout")


@dataclass(frozen=True)
class Trial:
    """What one run measured.  Rates are of the median step, None without a step after warm-up."""

    variant: int
    repeat: int
    seed: int
    folder: str
    devices: int  # ranks
    num_params: int
    records: int  # that count for the speed ...
    warm_up: int  # ... and that do not
    step_seconds: float | None
    spread: float | None  # of step_seconds inside of the run: half of the middle half, as a part
    tokens_per_second: float | None
    mfu: float | None
    memory_peak_gib: float  # the fullest rank's
    tokens: int

    @property
    def device_hours(self) -> float | None:
        """Of a billion tokens."""
        if self.tokens_per_second is None:
            return None
        return device_hours(self.devices, self.tokens_per_second)


@dataclass(frozen=True)
class Claim:
    """A question about paired differences, and what the data answers."""

    differences: tuple[float, ...]
    interval: Interval | None  # None with fewer than two pairs
    p: float | None  # corrected for the number of comparisons
    answer: str


@dataclass(frozen=True)
class Judged:
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


# --------------------------------------------------------------------------- measuring


def measure(variant: int, repeat: int, seed: int, folder: Path, plan: Mapping[str, Any]) -> Trial:
    """What a finished run measured.

    Args:
        plan: the run's ``plan.json``.
    """
    records = read_records(folder / "metrics.jsonl")
    warm, cold = split_warm_up(records)
    seconds = [record["step_seconds"] for record in warm]
    step = median(seconds) if seconds else None
    rates = [record["mfu"] for record in warm if record["mfu"] is not None]
    spread = None
    if len(seconds) >= 4:
        low, _, high = quantiles(seconds, n=4)
        spread = (high - low) / 2 / median(seconds)
    return Trial(
        variant=variant,
        repeat=repeat,
        seed=seed,
        folder=str(folder),
        devices=plan["world_size"],
        num_params=plan["num_params"],
        records=len(warm),
        warm_up=len(cold),
        step_seconds=step,
        spread=spread,
        tokens_per_second=None if step is None else plan["tokens_per_step"] / step,
        mfu=median(rates) if rates else None,
        memory_peak_gib=max(record["memory_peak_gib"] for record in records),
        tokens=records[-1]["tokens"],
    )


def split_warm_up(records: Sequence[Record]) -> tuple[list[Record], list[Record]]:
    """The records that count for the speed, and those of each start's warm-up.

    Another start shows in the time that restarting has taken so far.
    """
    warm: list[Record] = []
    cold: list[Record] = []
    for _, start in groupby(records, key=lambda record: record["seconds"]["restarting"]):
        some = list(start)
        first = max(1, math.ceil(WARM_UP * len(some)))
        cold += some[:first]
        warm += some[first:]
    return warm, cold


def train_loss(records: Sequence[Record], tokens: float) -> float | None:
    """Mean over the last `WINDOW` of the first ``tokens``, or of the last record before them."""
    before = [r for r in records if r["tokens"] <= tokens and r["loss"] is not None]
    some = [r["loss"] for r in before if r["tokens"] > (1 - WINDOW) * tokens]
    some = some or [r["loss"] for r in before[-1:]]
    return fmean(some) if some else None


def held_out_loss(records: Sequence[Record], tokens: float) -> float | None:
    """Where it was evaluated after exactly so many."""
    return next(
        (r["eval_loss"] for r in records if r["tokens"] == tokens and "eval_loss" in r), None
    )


@dataclass(frozen=True)
class Losses:
    """Of all trials, by (variant, repeat), in nats per token after ``tokens``."""

    tokens: int
    kind: str  # held-out or train
    final: dict[tuple[int, int], float]
    curve: list[tuple[float, dict[tuple[int, int], float]]]  # tokens, and train losses there


def losses_of(trials: Sequence[Trial]) -> Losses:
    """Losses after as many tokens as every trial has seen."""
    records = {
        (t.variant, t.repeat): read_records(Path(t.folder) / "metrics.jsonl") for t in trials
    }
    tokens = min(trial.tokens for trial in trials)

    def at(many: float, loss: Callable[[Sequence[Record], float], float | None]) -> Any:
        found = {place: loss(some, many) for place, some in records.items()}
        return {place: value for place, value in found.items() if value is not None}

    held_out = at(tokens, held_out_loss)
    whole = len(held_out) == len(records)
    points = [tokens * (i + 1) / CURVE for i in range(CURVE)]
    return Losses(
        tokens,
        "held-out" if whole else "train",
        held_out if whole else at(tokens, train_loss),
        [(many, at(many, train_loss)) for many in points],
    )


def usual_loss(losses: Losses, variant: int) -> float | None:
    """Mean over its trials; None if none of them has recorded any."""
    some = [loss for (v, _), loss in losses.final.items() if v == variant]
    return fmean(some) if some else None


# --------------------------------------------------------------------------- judging


def judge(
    trials: Sequence[Trial],
    losses: Losses | None,
    margin: float,
    relative: bool,
    loss_apart: Sequence[int] = (),
) -> list[Judged]:
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
    paired = {
        v: [r for (variant, r) in sorted(of) if variant == v and (base, r) in of] for v in others
    }

    def log_ratios(v: int, each: Callable[[Trial], float | None]) -> tuple[float, ...]:
        both = [(each(of[v, r]), each(of[base, r])) for r in paired[v]]
        return tuple(math.log(ours / theirs) for ours, theirs in both if ours and theirs)

    devices = {v: next(t.devices for t in trials if t.variant == v) for v in there}
    speeds = _speed_claims([log_ratios(v, lambda t: t.tokens_per_second) for v in others])
    scaled = [v for v in others if devices[v] != devices[base]]
    of_device = _speed_claims(
        [
            log_ratios(v, lambda t: t.tokens_per_second and t.tokens_per_second / t.devices)
            for v in scaled
        ]
    )
    final = losses.final
    apart = {
        v: tuple(final[v, r] - final[base, r] for r in paired[v] if {(v, r), (base, r)} <= {*final})
        for v in others
        if v not in loss_apart
    }
    usual = usual_loss(losses, base)
    nats = margin * (usual or math.nan) if relative else margin
    loss_claims = dict(zip(apart, _loss_claims(list(apart.values()), nats), strict=True))
    return [
        Judged(
            variant=v,
            baseline=base,
            pairs=len(paired[v]),
            speed=speed,
            per_device=dict(zip(scaled, of_device, strict=True)).get(v),
            loss=(loss := loss_claims.get(v)),
            margin_nats=nats if loss is not None and loss.differences else None,
            more_pairs=pairs_needed(loss.differences, nats)
            if loss is not None and loss.answer == "undecided" and loss.interval is not None
            else None,
        )
        for v, speed in zip(others, speeds, strict=True)
    ]


Family = Sequence[float]  # differences of the pairs of one comparison


def _claims(
    families: Sequence[Family],
    tests: Sequence[Callable[[Family], float]],
    answer: Callable[..., Claim],
) -> list[Claim]:
    """A claim for each family: of its differences and its p-values, corrected for their number."""
    able = [family for family in families if len(family) > 1]
    corrected = zip(*(holm([test(family) for family in able]) for test in tests), strict=True)
    return [
        answer(family, *next(corrected))
        if len(family) > 1
        else Claim(tuple(family), None, None, "too few pairs")
        for family in families
    ]


def _speed_claims(families: Sequence[Family]) -> list[Claim]:
    """Faster, slower, or none found."""

    def answer(family: Family, p: float) -> Claim:
        found, said = interval(family), "no difference found"
        if p < LEVEL:
            said = "faster" if found.mean > 0 else "slower"
        elif found.low > 0 or found.high < 0:
            said = "not claimed"  # for one comparison it would be
        return Claim(tuple(family), found, p, said)

    return _claims(families, [p_different], answer)


def _loss_claims(families: Sequence[Family], margin: float) -> list[Claim]:
    """Equivalent, higher, lower, or undecided."""

    def answer(family: Family, same: float, other: float) -> Claim:
        found = interval(family)
        if same < LEVEL:
            # The interval that belongs to two tests of 5 % each.
            return Claim(tuple(family), interval(family, 1 - 2 * LEVEL), same, "equivalent")
        if other < LEVEL:
            said = "higher" if found.mean > 0 else "lower"
            return Claim(tuple(family), found, other, said)
        return Claim(tuple(family), found, min(same, other), "undecided")

    return _claims(families, [lambda family: p_equivalent(family, margin), p_different], answer)


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


def loss_sentence(judged: Judged, kind: str, ours: str, base: str, usual: float | None) -> str:
    """What may be said of the losses.

    Args:
        kind: held-out or train.
        usual: the baseline's mean loss, of which differences are told as parts.
    """
    it = judged.loss
    if it is None:
        return "their losses cannot be compared: they count other tokens"
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


def to_dict(judged: Judged, labels: Sequence[str]) -> dict[str, Any]:
    """For machines: numbers as measured, and percent of tokens/s beside logarithms."""
    found = asdict(judged)
    found["variant"], found["baseline"] = labels[judged.variant], labels[judged.baseline]
    for name in ("speed", "per_device"):
        claim: Claim | None = getattr(judged, name)
        if claim is not None and claim.interval is not None:
            ends = (claim.interval.low, claim.interval.mean, claim.interval.high)
            found[name]["percent"] = [100 * math.expm1(end) for end in ends]
    return found
