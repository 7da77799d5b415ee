"""Measure the trials of a comparison from their ``metrics.jsonl``.

Speed is the median step time after warm-up: the first tenth of the records after each start, and
at least one record, are excluded.  Losses are compared at the largest number of tokens that all
trials have trained on: the validation loss if all trials evaluated there, else the mean train loss
over the last tenth of those tokens.
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

WARM_UP = 0.1  # fraction of the records after a start
LOSS_WINDOW = 0.1  # fraction of the tokens so far that a train loss is averaged over
CURVE_POINTS = 10


@dataclass(frozen=True)
class Trial:
    """Measurements of one run; rates are of the median step, None without one."""

    variant: int
    repeat: int
    seed: int
    run_dir: str
    devices: int  # ranks
    num_params: int
    records: int  # number of records after warm-up
    warm_up: int  # number of records in warm-up
    step_seconds: float | None
    spread: float | None  # half of the interquartile range of step times, relative to the median
    tokens_per_second: float | None
    mfu: float | None
    memory_peak_gib: float  # largest of all ranks
    tokens: int

    @property
    def tokens_per_second_per_device(self) -> float | None:
        """Tokens per second, divided by the number of ranks."""
        return None if self.tokens_per_second is None else self.tokens_per_second / self.devices

    @property
    def device_hours(self) -> float | None:
        """Device-hours per billion tokens."""
        if self.tokens_per_second is None:
            return None
        return device_hours(self.devices, self.tokens_per_second)


def measure_trial(
    variant: int, repeat: int, seed: int, directory: Path, plan: Mapping[str, Any]
) -> Trial:
    """Measure a finished run.

    ``plan`` is the run's ``plan.json``.
    """
    with reading(directory / "metrics.jsonl"):
        return _measure(variant, repeat, seed, directory, plan)


def _measure(
    variant: int, repeat: int, seed: int, directory: Path, plan: Mapping[str, Any]
) -> Trial:
    records = read_records(directory / "metrics.jsonl")
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
        run_dir=str(directory),
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
    """Split records into those after warm-up and those of each start's warm-up.

    A new start changes the accumulated restart time.
    """
    warm: list[Record] = []
    cold: list[Record] = []
    for _, start in groupby(records, key=lambda record: record["time_breakdown"]["restarting"]):
        records_of_start = list(start)
        count = max(1, math.ceil(WARM_UP * len(records_of_start)))
        cold += records_of_start[:count]
        warm += records_of_start[count:]
    return warm, cold


def train_loss(records: Sequence[Record], tokens: float) -> float | None:
    """Return the mean loss over the last `LOSS_WINDOW` of the first ``tokens``.

    Without a record in that window, return the loss of the last record before it.
    """
    before = [r for r in records if r["tokens"] <= tokens and r["loss"] is not None]
    losses = [r["loss"] for r in before if r["tokens"] > (1 - LOSS_WINDOW) * tokens]
    losses = losses or [r["loss"] for r in before[-1:]]
    return fmean(losses) if losses else None


def validation_loss(records: Sequence[Record], tokens: float) -> float | None:
    """Return the validation loss after exactly ``tokens``, if there is one."""
    return next(
        (r["eval_loss"] for r in records if r["tokens"] == tokens and "eval_loss" in r), None
    )


@dataclass(frozen=True)
class TrialLosses:
    """Losses after ``tokens`` by (variant, repeat), in the objective's unit."""

    tokens: int
    kind: str  # validation or train
    final: dict[tuple[int, int], float]
    curve: list[tuple[float, dict[tuple[int, int], float]]]  # tokens, train losses


def collect_losses(trials: Sequence[Trial]) -> TrialLosses:
    """Collect the losses at the largest number of tokens that every trial has reached."""
    records = {
        (t.variant, t.repeat): read_records(Path(t.run_dir) / "metrics.jsonl") for t in trials
    }
    tokens = min(trial.tokens for trial in trials)

    def losses_at(tokens: float, loss: Callable[[Sequence[Record], float], float | None]) -> Any:
        values = {trial: loss(trial_records, tokens) for trial, trial_records in records.items()}
        return {trial: value for trial, value in values.items() if value is not None}

    validation = losses_at(tokens, validation_loss)
    is_complete = len(validation) == len(records)
    points = [tokens * (i + 1) / CURVE_POINTS for i in range(CURVE_POINTS)]
    return TrialLosses(
        tokens,
        "validation" if is_complete else "train",
        validation if is_complete else losses_at(tokens, train_loss),
        [(point, losses_at(point, train_loss)) for point in points],
    )


def mean_loss(losses: TrialLosses, variant: int) -> float | None:
    """Return the mean loss of a variant's trials; None without any."""
    values = [loss for (v, _), loss in losses.final.items() if v == variant]
    return fmean(values) if values else None
