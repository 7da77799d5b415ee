"""What the runs of a comparison measured.

Of each trial, from its ``metrics.jsonl``: the median seconds of a step after warm-up (of each start
the first tenth of its records, and at least one, is left out), what follows from that, memory, and
the loss.  Losses are taken where all trials have seen as many tokens, the most that each of them
has: held out, if all were evaluated there, else the mean over the last tenth of those tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from statistics import fmean, median, quantiles
from typing import Any

from weft.config.files import reading
from weft.monitor.jsonl import read_records
from weft.monitor.step_record import device_hours

Record = Mapping[str, Any]

WARM_UP = 0.1  # of the records of a start
WINDOW = 0.1  # of the tokens so far, over which a train loss is a mean
CURVE = 10  # points of a loss curve


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
    def tokens_per_second_per_device(self) -> float | None:
        return None if self.tokens_per_second is None else self.tokens_per_second / self.devices

    @property
    def device_hours(self) -> float | None:
        """Of a billion tokens."""
        if self.tokens_per_second is None:
            return None
        return device_hours(self.devices, self.tokens_per_second)


def measure_trial(
    variant: int, repeat: int, seed: int, folder: Path, plan: Mapping[str, Any]
) -> Trial:
    """What a finished run measured.

    Args:
        plan: the run's ``plan.json``.
    """
    with reading(folder / "metrics.jsonl"):
        return _measure(variant, repeat, seed, folder, plan)


def _measure(variant: int, repeat: int, seed: int, folder: Path, plan: Mapping[str, Any]) -> Trial:
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
    for _, start in groupby(records, key=lambda record: record["time_breakdown"]["restarting"]):
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
    """Of all trials, by (variant, repeat), after ``tokens``: nats per token, or the objective's."""

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
