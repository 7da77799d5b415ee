"""Head of a report: the result in a sentence, tiles, and a table of runs."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from weft.config.axes import DEGREES
from weft.config.formatting import format_count
from weft.config.schema import ParallelSection
from weft.monitor.terminal import format_duration
from weft.records.run_cost import compute_cost
from weft.records.run_reader import Floats, RunReader
from weft.reporting.chart_points import bin_means, bin_starts
from weft.reporting.page import Part, text_part

NUM_SPARK_POINTS = 48
OVERFIT_RATIO = 1.01  # last validation loss over the lowest one


class Tile(NamedTuple):
    """A number of a run."""

    key: str
    label: str
    text: str
    note: str = ""
    spark: str = ""  # points of a small curve, in a box of 100 x 24
    value: float | None = None  # to sort and to compare runs


# --------------------------------------------------------------------------- sentences


def headline(run: RunReader, state: str, reason: str) -> str:
    """Return the result of a run in one or two sentences; empty without records."""
    if not len(run):
        return ""
    step, losses = run.last("step") or 0.0, _finite(run.column("loss"))
    text = f"{step:,.0f} of {run.steps:,} steps are done." if run.steps else f"{step:,.0f} steps."
    if len(losses):
        first, last = losses[0], float(np.mean(losses[-min(20, max(1, len(losses) // 10)) :]))
        verb = "fell" if last < first else "rose"
        text = f"The loss {verb} from {first:.3f} to {last:.3f} in {step:,.0f} steps"
        text += f" ({format_count(int(run.last('tokens') or 0))} tokens)."
    note = validation_note(run)
    if (best := run.best_event()) is not None:
        note += f" The checkpoint of step {best.step:,} has {best.text}."
    problem = f"{state.capitalize()}: {reason}. " if reason and state != "running" else ""
    if run.divergence():
        problem = f"{run.divergence().capitalize()}. "
    return f"{problem}{text} {note}".strip()


def validation_note(run: RunReader) -> str:
    """Return a sentence about the validation loss; empty without evaluations."""
    steps, values = run.column("step"), run.column("eval_loss")
    known = np.isfinite(values)
    if not known.any():
        return ""
    steps, values = steps[known], values[known]
    best = int(np.argmin(values))
    if values[-1] > OVERFIT_RATIO * values[best]:
        return (
            f"The validation loss was lowest at step {steps[best]:,.0f} ({values[best]:.3f}) and "
            f"has risen to {values[-1]:.3f}."
        )
    return f"The validation loss is {values[-1]:.3f}."


def runs_headline(runs: Sequence[RunReader], names: Sequence[str]) -> str:
    """Return which of several runs has the lowest loss, and which is the fastest."""
    sentences = []
    for key in ("eval_loss", "loss"):
        losses = {
            name: value
            for run, name in zip(runs, names, strict=True)
            if (value := _recent(run, key)) is not None
        }
        if len(losses) > 1:
            best, worst = min(losses, key=losses.__getitem__), max(losses, key=losses.__getitem__)
            label = "validation loss" if key == "eval_loss" else "loss"
            sentences.append(
                f"{best} has the lowest {label}, {losses[best]:.3f} (highest: {losses[worst]:.3f}, "
                f"{worst})."
            )
            break
    speeds = {
        name: value
        for run, name in zip(runs, names, strict=True)
        if (value := run.steady_median("tokens_per_second")) is not None
    }
    if len(speeds) > 1:
        fastest = max(speeds, key=speeds.__getitem__)
        sentences.append(f"{fastest} is the fastest, {speeds[fastest]:,.0f} tokens/s.")
    return " ".join(sentences)


def _recent(run: RunReader, key: str) -> float | None:
    """Return the last validation loss, or the mean of the last losses."""
    values = _finite(run.column(key))
    if not len(values):
        return None
    count = 1 if key == "eval_loss" else min(20, max(1, len(values) // 10))
    return float(values[-count:].mean())


def describe_setup(run: RunReader) -> str:
    """Return model, layout and software of a run in one line."""
    plan, environment = run.plan, run.environment
    facts = []
    model = run.job.get("model", {})
    if isinstance(count := plan.get("num_params"), int):
        name = " ".join(str(model[key]) for key in ("kind", "preset") if model.get(key))
        facts.append(f"{name}, {format_count(count)} parameters".removeprefix(", "))
    devices = environment.get("devices")
    if isinstance(ranks := plan.get("world_size"), int):
        device = devices[0] if isinstance(devices, list) and devices else plan.get("device", "")
        name = device.get("name", "") if isinstance(device, dict) else device
        degrees = [name for name in ParallelSection.model_fields if name in DEGREES]
        axes = [f"{axis} {plan[axis]}" for axis in degrees if (plan.get(axis) or 1) != 1]
        facts.append(
            f"{ranks} rank{'s' * (ranks != 1)} on {str(name).upper() if name == 'cpu' else name}"
            + f" ({', '.join(axes)})" * bool(axes)
        )
    if plan.get("compute_dtype"):
        facts.append(str(plan["compute_dtype"]))
    facts += [f"{name} {environment[name]}" for name in ("torch", "weft") if environment.get(name)]
    return " · ".join(facts)


# --------------------------------------------------------------------------- numbers


def run_tiles(run: RunReader, state: str) -> Iterator[Tile]:
    """Yield the most important numbers that a run has."""
    if not len(run):
        return
    step = run.last("step") or 0.0
    tokens = f"{format_count(int(run.last('tokens') or 0))} tokens"
    of_steps = f" of {run.steps:,}" * bool(run.steps)
    yield Tile("step", "step", f"{step:,.0f}{of_steps}", tokens, value=step)
    for key, read, label, text in (
        ("loss", run.last, "loss", "{:.4f}"),
        ("eval_loss", run.last, "validation loss", "{:.4f}"),
        ("tokens_per_second", run.steady_median, "tokens/s", "{:,.0f}"),
        ("mfu", run.steady_median, "MFU", "{:.1%}"),
        ("step_seconds", run.steady_median, "step time", "{:.3g} s"),
        ("memory_peak_gib", run.last, "peak memory", "{:.2f} GiB"),
    ):
        if (value := read(key)) is not None:
            spark = spark_points(run.column(key)) if key != "memory_peak_gib" else ""
            yield Tile(key, label, text.format(value), tile_note(run, key), spark, value)
    if (value := run.goodput()) is not None:
        elapsed = format_duration(sum(run.time_breakdown().values()))
        yield Tile("goodput", "goodput", f"{value:.1%}", f"of {elapsed}", value=value)
    cost = compute_cost(run, time.time())
    if cost.hours and (cost.price or cost.unit == "GPU-hours"):
        text = str(cost._replace(price=0.0)).removesuffix(f" {cost.unit}")
        note = f"cost {cost.hours * cost.price:,.2f} at {cost.price:g}" if cost.price else ""
        yield Tile("hours", cost.unit, text, note, value=cost.hours)
    seconds = run.steady_median("step_seconds")
    if state == "running" and run.steps and seconds is not None:
        left = (run.steps - step) * seconds / max(0.05, run.goodput() or 1.0)
        yield Tile("left", "estimated time left", format_duration(left), value=left)


def tile_note(run: RunReader, key: str) -> str:
    """Return what puts a number in perspective."""
    values = run.column(key)
    finite = np.flatnonzero(np.isfinite(values))
    if key in ("loss", "eval_loss") and len(finite) > 1:
        best = finite[np.argmin(values[finite])]
        return f"lowest {values[best]:.4f}, step {run.column('step')[best]:,.0f}"
    if key == "tokens_per_second":
        per_device = run.steady_median("tokens_per_second_per_device")
        return "" if per_device is None else f"{per_device:,.0f} per device"
    predicted = run.last(
        {"step_seconds": "predicted_step_seconds", "memory_peak_gib": "predicted_memory_gib"}.get(
            key, ""
        )
    )
    if predicted is not None:
        return f"predicted {predicted:.3g}"
    return "of the fullest rank" if key == "memory_peak_gib" else ""


def spark_points(values: Floats) -> str:
    """Return a small curve as points of an SVG polyline in a box of 100 x 24."""
    finite = _finite(values)
    if len(finite) < 3:
        return ""
    means = bin_means(finite, bin_starts(len(finite), NUM_SPARK_POINTS))
    low, high = float(means.min()), float(means.max())
    heights = (means - low) / (high - low) if high > low else np.full(len(means), 0.5)
    xs = np.linspace(0, 100, len(means)) if len(means) > 1 else np.zeros(1)
    return " ".join(f"{x:.4g},{23 - 22 * y:.3g}" for x, y in zip(xs, heights, strict=True))


def _finite(values: Floats) -> Floats:
    return values[np.isfinite(values)]


# --------------------------------------------------------------------------- parts


def summary_parts(
    runs: Sequence[RunReader], names: Sequence[str], states: Sequence[tuple[str, str]]
) -> list[Part]:
    """Return the state and numbers of one run as tiles, of several as a table."""
    if len(runs) > 1:
        text = runs_headline(runs, names)
        return [*([text_part(text, "lead")] if text else []), runs_table(runs, names, states)]
    run, (state, reason) = runs[0], states[0]
    parts: list[Part] = [{"kind": "state", "state": state, "reason": reason}]
    if text := headline(run, state, reason):
        parts.append(text_part(text, "lead"))
    if setup := describe_setup(run):
        parts.append(text_part(setup, "faint"))
    tiles = [tile._asdict() for tile in run_tiles(run, state)]
    return [*parts, {"kind": "tiles", "tiles": tiles}] if tiles else parts


def runs_table(
    runs: Sequence[RunReader], names: Sequence[str], states: Sequence[tuple[str, str]]
) -> Part:
    """Return a table of runs, to sort them and to hide them in all charts."""
    tiles = [
        {tile.key: tile for tile in run_tiles(run, state)}
        for run, (state, _) in zip(runs, states, strict=True)
    ]
    labels = {key: tile.label for each in tiles for key, tile in each.items()}
    best = {
        key: best
        for key, choose in (
            *(("loss", min), ("eval_loss", min), ("step_seconds", min), ("memory_peak_gib", min)),
            *(("tokens_per_second", max), ("mfu", max), ("goodput", max)),
        )
        if len(
            {
                *(
                    values := [
                        v for each in tiles if key in each and (v := each[key].value) is not None
                    ]
                )
            }
        )
        > 1
        and values.count(best := choose(values)) == 1
    }
    rows: list[dict[str, Any]] = []
    for run, name, (state, _), each in zip(runs, names, states, tiles, strict=True):
        cells = [
            {
                "text": each[key].text if key in each else "",
                "value": each[key].value if key in each else None,
                "is_best": key in each and key in best and each[key].value == best[key],
            }
            for key in labels
        ]
        diverged = ", diverged" * bool(run.divergence())
        rows.append({"name": name, "state": state, "note": diverged, "cells": cells})
    return {"kind": "runs", "labels": [*labels.values()], "rows": rows}
