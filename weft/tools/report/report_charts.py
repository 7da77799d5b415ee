"""Charts of a report, and the data from which ``report.js`` draws their curves."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weft.monitor.run_reader import ROUTINE_KINDS, Floats, RunEvent, RunReader, downsample
from weft.monitor.step_timer import KINDS
from weft.tools.report.page import Part, Section, text_part

MAX_POINTS = 2000  # points of a curve
MAX_EVENTS = 400  # events of a run

NATS = "nats per token"
LOSS_UNITS = {"next_token": NATS, "dpo": "nats per pair"}  # by ``train.objective``
# Heading and unit of each chart.
CHARTS = {
    "loss": ("Loss", NATS),
    "speed": ("Speed", "tokens per second"),
    "mfu": ("Model FLOPs utilization", "%"),
    "grad_norm": ("Gradient norm", "before clipping"),
    "lr": ("Learning rate", ""),
    "step_seconds": ("Step time", "seconds, mean since the last record"),
    "memory": ("Memory of the fullest rank", "GiB, peak so far"),
    "step_breakdown": ("Step time by activity", "seconds, stacked"),
    "time_breakdown": ("Time of the run by kind", "seconds, stacked"),
    "data_seconds": ("Waiting for data", "seconds per step"),
    "moe_max_load": ("Load of the most loaded expert", "times the mean, in the worst layer"),
}
STACKED = {"step_breakdown", "time_breakdown"}
# Heading and unit of the charts that have all metrics with a prefix.
GROUPED = {
    "grad_norm/": ("Gradient norm by layer", "before clipping"),
    "loss/": ("Loss by source", NATS),
    "eval_loss/": ("Validation loss by source", NATS),
    "metrics.": ("Metrics of the objective", "mean since the last record"),
    "eval_metrics.": ("Validation metrics of the objective", "mean over the samples"),
    "ranks.memory_peak_gib.": ("Memory over the ranks", "GiB, peak so far"),
    "ranks.compute_seconds.": ("Compute time over the ranks", "seconds per step"),
    "ranks.data_seconds.": ("Waiting for data over the ranks", "seconds per step"),
}
# Curves of `CHARTS`: chart, metric, label, and style (``exact``: not smoothed).
CURVES = [
    ("loss", "loss", "train", ""),
    ("loss", "eval_loss", "validation", "dots"),
    ("speed", "tokens_per_second", "", ""),
    ("mfu", "mfu", "MFU", ""),
    ("mfu", "mfu_causal", "attention counted as causal", ""),
    ("grad_norm", "grad_norm", "", ""),
    ("lr", "lr", "", "exact"),
    ("step_seconds", "step_seconds", "measured", ""),
    ("step_seconds", "predicted_step_seconds", "predicted", "dash"),
    ("memory", "memory_peak_gib", "measured", "exact"),
    ("memory", "predicted_memory_gib", "predicted", "dash"),
    ("step_breakdown", "rest_seconds", "computing and communication", ""),
    ("step_breakdown", "data_seconds", "waiting for data", ""),
    *(("time_breakdown", f"time_breakdown.{kind}", kind, "") for kind in KINDS),
    ("data_seconds", "data_seconds", "", ""),
    ("moe_max_load", "moe_max_load", "", ""),
]


def select_events(events: Sequence[RunEvent]) -> list[RunEvent]:
    """Select at most `MAX_EVENTS` events; drop routine first, then the middle."""
    events = list(events)
    if len(events) > MAX_EVENTS:
        events = [event for event in events if event.kind not in ROUTINE_KINDS] or events
    if len(events) > MAX_EVENTS:
        events = events[: MAX_EVENTS // 2] + events[-MAX_EVENTS // 2 :]
    return events


def build_charts(runs: Sequence[RunReader]) -> list[dict[str, Any]]:
    """Return the charts for which a run has values; stacked ones only for one run."""
    metrics = {
        name for run in runs for name, values in run.columns.items() if np.isfinite(values).any()
    }
    if {"step_seconds", "data_seconds"} <= metrics:
        metrics.add("rest_seconds")
    grouped = [
        (group, name, label, "")
        for group in GROUPED
        for name in sorted(metrics)
        if (label := name.removeprefix(group)) != name
        and not (group.startswith("ranks.") and label == "rank")  # the rank of the maximum
    ]
    omitted = STACKED if len(runs) > 1 else {"data_seconds"}
    objectives = [str(run.job.get("train", {}).get("objective", "next_token")) for run in runs]
    charts = []
    for name, (heading, unit) in (CHARTS | GROUPED).items():
        curves = [
            (key, label, style)
            for chart, key, label, style in (*CURVES, *grouped)
            if chart == name and key in metrics
        ]
        if curves and name not in omitted:
            charts.append(
                {
                    "id": re.sub(r"\W", "-", name),
                    "heading": heading,
                    "unit": loss_unit(objectives) if unit == NATS else unit,
                    "stack": name in STACKED,
                    "format": "%" if name == "mfu" else "",
                    "curves": curves,
                }
            )
    return charts


def loss_unit(objectives: Iterable[str]) -> str:
    """Return the unit of losses with these values of ``train.objective``."""
    units = dict.fromkeys(LOSS_UNITS.get(name, f"loss of {name}") for name in objectives)
    return ", ".join(units) or NATS


def curves_section(
    runs: Sequence[RunReader], names: Sequence[str], charts: Sequence[Mapping[str, Any]]
) -> Section:
    """Return the section of the curves: controls, a figure for each chart, and notes."""
    figures = [
        {
            "id": chart["id"],
            "heading": chart["heading"],
            "unit": chart["unit"],
            "description": describe_chart(runs, names, chart),
            "is_wide": chart["id"] == "loss",
        }
        for chart in charts
    ]
    curves: Part = {"kind": "curves", "time_unit": choose_time_unit(runs)[0], "figures": figures}
    notes = [
        f"{name}: a curve has about {MAX_POINTS:,} points for {len(run):,} records, the "
        "minimum and maximum of each interval; smoothing uses the means of the intervals."
        for name, run in zip(names, runs, strict=True)
        if len(run) > MAX_POINTS
    ]
    if any(run.read_events() for run in runs):
        notes.append(
            "Triangles on the axis are events, gray if routine, else red; hover for details."
        )
    return {"heading": "Curves", "parts": [curves, *(text_part(note, "faint") for note in notes)]}


def describe_chart(
    runs: Sequence[RunReader], names: Sequence[str], chart: Mapping[str, Any]
) -> str:
    """Describe the first curve of each run, for screen readers."""
    descriptions = []
    for run, name in zip(runs, names, strict=True):
        values = run.column(chart["curves"][0][0])
        values = values[np.isfinite(values)]
        if len(values):
            text = f"from {values[0]:.4g} to {values[-1]:.4g}, minimum {values.min():.4g}, "
            text += f"maximum {values.max():.4g}"
            descriptions.append(f"{name * (len(runs) > 1)} {text}".strip())
    return "; ".join(descriptions)


def choose_time_unit(runs: Iterable[RunReader]) -> tuple[str, float]:
    """Return the name and the seconds of the unit of the time axis."""
    longest = max((float(np.ptp(run.column("time"))) for run in runs if len(run)), default=0.0)
    return ("hours", 3600.0) if longest > 7200 else ("minutes", 60.0)


def chart_data(
    runs: Sequence[RunReader], names: Sequence[str], charts: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Return the data of report.js.

    Each run has ``x``, the positions of the drawn records on each axis; ``curves``; and ``events``.
    A curve has ``y``; the ``indices`` of its points among the drawn records, unless it has all of
    them; and ``means`` for smoothing, if its points were selected (`downsample`).
    """
    unit, seconds = choose_time_unit(runs)
    data = [_run_data(run, name, charts, seconds) for run, name in zip(runs, names, strict=True)]
    return {"runs": data, "charts": charts, "time_unit": unit}


def _run_data(
    run: RunReader, name: str, charts: Sequence[Mapping[str, Any]], unit_seconds: float
) -> dict[str, Any]:
    """Return the data of one run: see `chart_data`."""
    events = select_events(run.read_events())
    step, tokens, time = (run.column(key) for key in ("step", "tokens", "time"))
    start_time = min([*time[np.isfinite(time)][:1], *(e.time for e in events[:1])], default=0.0)
    points = _select_points(run, charts)
    drawn = np.unique(np.concatenate([np.zeros(0, np.intp), *(i for i, _ in points.values())]))
    curves: dict[str, dict[str, Any]] = {}
    for key, (indices, means) in points.items():
        curves[key] = {"y": to_json(run.column(key)[indices])}
        if len(indices) < len(drawn):
            curves[key]["indices"] = np.searchsorted(drawn, indices).tolist()
        if means is not None:
            curves[key]["means"] = [float(f"{value:.6g}") for value in means]
    x = {"step": step, "token": tokens, "time": (time - start_time) / unit_seconds}
    event_steps = np.array([event.step for event in events], np.float64)
    event_tokens = np.interp(event_steps, step, tokens) if len(run) else event_steps
    return {
        "name": name,
        "x": {axis: to_json(values[drawn]) for axis, values in x.items()},
        "curves": curves,
        "events": [
            {
                "step": event.step,
                "token": token,
                "time": (event.time - start_time) / unit_seconds,
                "routine": event.kind in ROUTINE_KINDS,
                "text": f"{event.kind}: {event.text}",
            }
            for event, token in zip(events, to_json(event_tokens), strict=True)
        ],
    }


def _select_points(
    run: RunReader, charts: Sequence[Mapping[str, Any]]
) -> dict[str, tuple[NDArray[np.intp], Floats | None]]:
    """Return for each curve the records to draw and their means: see `downsample`.

    The curves of a stack share the records of their sum, because they are drawn as sums.
    """
    points: dict[str, tuple[NDArray[np.intp], Floats | None]] = {}
    for chart in charts:
        keys = [key for key, _, _ in chart["curves"]]
        groups = [keys] if chart["stack"] else [[key] for key in keys]
        for group in groups:
            columns = [run.column(key) for key in group]
            total = np.sum([np.nan_to_num(column, nan=0.0) for column in columns], axis=0)
            total[np.all([~np.isfinite(column) for column in columns], axis=0)] = np.nan
            indices, means = downsample(total, MAX_POINTS)
            if len(indices):
                points |= dict.fromkeys(group, (indices, None if chart["stack"] else means))
    return points


def to_json(values: Floats) -> list[float | None]:
    """Return values as JSON values; NaN and Inf become None."""
    return [value if np.isfinite(value) else None for value in values.tolist()]
