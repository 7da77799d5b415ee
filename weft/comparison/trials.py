"""Runs of a comparison: their files, seeds and measurements.

A trial is a real run of one variant.  Speed is the median step time after warm-up: the first tenth
of the records after each start, and at least one record, are excluded.  Losses are compared at the
largest number of tokens that all trials have trained on: the validation loss if all trials
evaluated there, else the mean train loss over the last tenth of those tokens.
"""

from __future__ import annotations

import math
import os
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from statistics import fmean, median, quantiles
from typing import Any

from weft.comparison.variants import Variant
from weft.config.axes import AXES
from weft.config.files import read_json, reading
from weft.config.formatting import display_path
from weft.monitor.step_record import device_hours
from weft.records.jsonl_reader import read_records
from weft.records.run_cost import LAUNCH_FILE
from weft.verification.verify import format_layout

Record = Mapping[str, Any]

NUM_SEEDS = 2**32
WARM_UP = 0.1  # fraction of the records after a start
LOSS_WINDOW = 0.1  # fraction of the tokens so far that a train loss is averaged over
CURVE_POINTS = 10


@dataclass(frozen=True)
class TrialResult:
    """The outcome of a trial."""

    variant: int
    repeat: int  # from 1
    status: int  # exit status; negative: the signal that killed the process
    reason: str  # of a failure
    seconds: float


@dataclass(frozen=True)
class Trial:
    """Measurements of one run; rates are of the median step, None without one."""

    variant: int
    repeat: int
    seed: int
    run_dir: str
    layout: str
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
    loss: float | None = None  # see `TrialLosses`

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


@dataclass(frozen=True)
class TrialLosses:
    """The losses that are compared, in the objective's unit."""

    tokens: int  # number of tokens that all trials have trained on
    kind: str  # validation or train
    curve: list[tuple[float, list[float | None]]]  # tokens; train losses of the trials


# --------------------------------------------------------------------------- files and seeds


def recipe_path(directory: Path, index: int, label: str) -> Path:
    """Return the path of a variant's complete job, which ``weft train`` accepts."""
    slug = re.sub(r"[^A-Za-z0-9.]+", "-", label).strip("-.")[:60]
    return directory / f"{index + 1}-{slug}.toml"


def trial_dir(directory: Path, index: int, label: str, repeat: int) -> Path:
    """Return the run directory of a trial; reports show its name."""
    recipe = recipe_path(directory, index, label)
    return recipe.with_name(f"{recipe.stem}-repeat-{repeat}")


def log_path(run: Path) -> Path:
    """Return the path of a trial's output."""
    return run.with_name(f"{run.name}.log")


def describe_log(run: Path) -> str:
    """Return where the output of a trial is: a file, or the command that prints it."""
    file = log_path(run)
    if (record := read_launch_record(run)) and not file.exists():
        file = run / record["log"] if record.get("log") else file
        if not file.exists():
            return f"see 'weft job status {shlex.quote(display_path(run))}'"
    return f"log: {display_path(Path(os.path.normpath(file)))}"


def read_launch_record(run: Path) -> dict[str, Any]:
    """Return the record of a trial that was submitted to a cluster; empty without one."""
    return read_json(run / LAUNCH_FILE)


def trial_seed(variants: Sequence[Variant], variant: int, repeat: int) -> int:
    """Return a trial's seed, unique (modulo 2^32) if the variants' seeds differ."""
    seeds = [v.job.train.seed for v in variants]
    return (seeds[variant] + (repeat - 1) * (max(seeds) - min(seeds) + 1)) % NUM_SEEDS


# --------------------------------------------------------------------------- measurements


def measure_trial(variant: int, repeat: int, seed: int, directory: Path) -> Trial:
    """Measure a finished run."""
    plan = read_json(directory / "plan.json")
    with reading(directory / "metrics.jsonl"):
        records = read_records(directory / "metrics.jsonl")
        warm, cold = split_warm_up(records)
        seconds = [record["step_seconds"] for record in warm]
        step = median(seconds) if seconds else None
        rates = [record["mfu"] for record in warm if record["mfu"] is not None]
        spread = None
        if step is not None and len(seconds) >= 4:
            low, _, high = quantiles(seconds, n=4)
            spread = (high - low) / 2 / step
        return Trial(
            variant=variant,
            repeat=repeat,
            seed=seed,
            run_dir=str(directory),
            layout=format_layout({axis: plan[axis] for axis in AXES}),
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


def measure_losses(trials: Sequence[Trial]) -> tuple[list[Trial], TrialLosses]:
    """Return the trials with their losses after the tokens that all have seen."""
    runs = [read_records(Path(trial.run_dir) / "metrics.jsonl") for trial in trials]
    tokens = min(trial.tokens for trial in trials)

    def losses_at(
        tokens: float, loss: Callable[[Sequence[Record], float], float | None]
    ) -> list[float | None]:
        return [loss(records, tokens) for records in runs]

    kind, losses = "validation", losses_at(tokens, validation_loss)
    if None in losses:
        kind, losses = "train", losses_at(tokens, train_loss)
    points = [tokens * (i + 1) / CURVE_POINTS for i in range(CURVE_POINTS)]
    curve = [(point, losses_at(point, train_loss)) for point in points]
    with_losses = [replace(trial, loss=x) for trial, x in zip(trials, losses, strict=True)]
    return with_losses, TrialLosses(tokens, kind, curve)
