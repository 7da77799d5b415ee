"""The charts of a report: which there are, and what ``report.js`` draws of which runs."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

import numpy as np

from weft.monitor.goodput import KINDS
from weft.monitor.html import Section
from weft.monitor.run_reader import ROUTINE, Floats, Mark, RunReader, fewer

MOST_POINTS = 2000  # of a curve
MOST_MARKS = 400  # of a run

# What the seconds of a run went into, in the colours of `weft.estimate.charts`.
COLOURS = dict(
    zip(KINDS, ["#7ac27a", "#70a6f0", "#8cd2dc", "#c49ee6", "#eed25c", "#f096be"], strict=True)
)
NATS = "nats per token"
# Charts that records may have: heading and unit.
CHARTS = {
    "loss": ("Loss", NATS),
    "speed": ("Speed", "tokens per second"),
    "mfu": ("Model FLOPs utilisation", "%"),
    "grad_norm": ("Gradient norm", "before clipping"),
    "lr": ("Learning rate", ""),
    "step_seconds": ("Seconds of a step", "mean since the last record"),
    "memory": ("Memory of the fullest rank", "GiB, most so far"),
    "parts": ("Parts of a step", "seconds, stacked"),
    "ledger": ("What the run's time went into", "seconds since it began, stacked"),
    "data_seconds": ("Waiting for data", "seconds of a step"),
    "moe_max_load": ("Load of the most loaded expert", "times the mean, in the worst layer"),
}
STACKED = {"parts", "ledger"}
# Numbers whose names begin alike, together a chart.
GROUPED = {
    "grad_norm/": ("Gradient norm by group", "before clipping"),
    "loss/": ("Loss by source", NATS),
    "eval_loss/": ("Held-out loss by source", NATS),
    "metrics.": ("Metrics of the objective", "mean since the last record"),
    "eval_metrics.": ("Validation metrics of the objective", "mean of the samples"),
    "ranks.memory_peak_gib.": ("Memory over the ranks", "GiB, most so far"),
    "ranks.compute_seconds.": ("Computing over the ranks", "seconds of a step"),
    "ranks.data_seconds.": ("Waiting for data over the ranks", "seconds of a step"),
}
# Of each chart of `CHARTS` the curves: name in the record, label, and style (``exact`` is not
# smoothed), or the colour of its area.
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
    ("parts", "rest_seconds", "computing and communication", "#7ac27a"),
    ("parts", "data_seconds", "waiting for data", "#f09c58"),
    *(("ledger", f"time_breakdown.{kind}", kind, colour) for kind, colour in COLOURS.items()),
    ("data_seconds", "data_seconds", "", ""),
    ("moe_max_load", "moe_max_load", "", ""),
]


def kept(marks: Sequence[Mark]) -> list[Mark]:
    """As many as a page bears: routine goes first, then what is neither first nor last."""
    marks = list(marks)
    if len(marks) > MOST_MARKS:
        marks = [mark for mark in marks if mark.kind not in ROUTINE] or marks
    if len(marks) > MOST_MARKS:
        marks = marks[: MOST_MARKS // 2] + marks[-MOST_MARKS // 2 :]
    return marks


def charts_of(runs: Sequence[RunReader]) -> list[dict[str, Any]]:
    """The charts for which a run has numbers; of several runs those with areas are left out."""
    there = {
        name for run in runs for name, values in run.columns.items() if np.isfinite(values).any()
    }
    if {"step_seconds", "data_seconds"} <= there:
        there.add("rest_seconds")
    grouped = [
        (group, name, label, "")
        for group in GROUPED
        for name in sorted(there)
        if (label := name.removeprefix(group)) != name
        and not (group.startswith("ranks.") and label == "rank")  # whose the most is
    ]
    leave_out = STACKED if len(runs) > 1 else {"data_seconds"}
    objectives = [str(run.job.get("train", {}).get("objective", "next_token")) for run in runs]
    charts = []
    for name, (heading, unit) in (CHARTS | GROUPED).items():
        curves = [
            (key, plain(label), style)
            for chart, key, label, style in (*CURVES, *grouped)
            if chart == name and key in there
        ]
        if curves and name not in leave_out:
            charts.append(
                {
                    "id": re.sub(r"\W", "-", name),
                    "heading": heading,
                    "unit": loss_unit(objectives) if unit == NATS else unit,
                    "stack": name in STACKED,
                    "format": ".1%" if name == "mfu" else "",
                    "curves": curves,
                }
            )
    return charts


def loss_unit(objectives: Iterable[str]) -> str:
    """What losses of these ``train.objective`` are in."""
    names = dict.fromkeys(objectives)
    return NATS if set(names) <= {"next_token"} else f"of {', '.join(names)}"


def curves_section(
    runs: Sequence[RunReader], names: Sequence[str], charts: Sequence[Mapping[str, Any]]
) -> list[Section]:
    """Controls, and a place for each chart with what it shows in words."""
    time_unit = time_unit_of(runs)[0]
    figures = []
    for chart in charts:
        described = described_by(runs, names, chart)
        whole = ' class="whole"' * (chart["id"] == "loss")
        unit = f" <span>{escape(chart['unit'])}</span>" * bool(chart["unit"])
        figures.append(
            f'<figure{whole} aria-label="{escape(chart["heading"] + ": " + described)}">'
            f"<figcaption>{escape(chart['heading'])}{unit}</figcaption>"
            f'<div class="chart" id="chart-{chart["id"]}"></div></figure>'
        )
    notes = [
        f"{escape(name)}: of {len(run):,} records a curve has about {MOST_POINTS:,} points, "
        "of every few the least and the most; smoothing goes by their means."
        for name, run in zip(names, runs, strict=True)
        if len(run) > MOST_POINTS
    ]
    if any(run.marks() for run in runs):
        notes.append(
            "Triangles on the axis are events: grey is routine, red is trouble; the pointer tells."
        )
    controls = (
        '<div class="controls">'
        '<label>along <select id="axis"><option value="step">steps</option>'
        '<option value="token">tokens</option>'
        f'<option value="time">{time_unit}</option></select></label>'
        "<label>smoothing "
        '<input id="smooth" type="range" min="0" max="0.99" step="0.01" value="0"/> '
        '<output id="weight" for="smooth">0</output></label>'
        '<label><input id="log" type="checkbox"/> logarithmic</label></div>'
    )
    said = "".join(f'<p class="faint">{note}</p>' for note in notes)
    no_script = "<noscript><p>The curves need JavaScript; the rest does not.</p></noscript>"
    charts_html = f'<div class="charts">{"".join(figures)}</div>'
    return [("Curves", "\n".join([controls, no_script, charts_html, said]))]


def described_by(runs: Sequence[RunReader], names: Sequence[str], chart: Mapping[str, Any]) -> str:
    """The chart's first curve of each run in words, for those who do not see it."""
    told = []
    for run, name in zip(runs, names, strict=True):
        values = run.column(chart["curves"][0][0])
        values = values[np.isfinite(values)]
        if len(values):
            text = f"from {values[0]:.4g} to {values[-1]:.4g}, least {values.min():.4g}, "
            told.append(f"{name * (len(runs) > 1)} {text}most {values.max():.4g}".strip())
    return "; ".join(told)


def time_unit_of(runs: Iterable[RunReader]) -> tuple[str, float]:
    """Its name, and its seconds."""
    longest = max((float(np.ptp(run.column("time"))) for run in runs if len(run)), default=0.0)
    return ("hours", 3600.0) if longest > 7200 else ("minutes", 60.0)


def data_of(
    runs: Sequence[RunReader], names: Sequence[str], charts: Sequence[Mapping[str, Any]]
) -> str:
    """What report.js draws, as JSON that may stand in a script element.

    Of each run: ``x``, of the records that are drawn their places on each axis; ``curves``, of each
    ``y``, the index ``at`` of each of its points among these records (none: all of them), and their
    ``mean`` where a point stands for others; ``marks``.
    """
    unit, seconds = time_unit_of(runs)
    keys = list(dict.fromkeys(key for chart in charts for key, _, _ in chart["curves"]))
    drawn = [_drawn(run, name, keys, seconds) for run, name in zip(runs, names, strict=True)]
    text = json.dumps({"runs": drawn, "charts": charts, "time_unit": unit}, allow_nan=False)
    return text.replace("<", "\\u003c")


def _drawn(run: RunReader, name: str, keys: Sequence[str], unit_seconds: float) -> dict[str, Any]:
    """Of one run, see `data_of`."""
    marks = kept(run.marks())
    step, tokens, time = (run.column(key) for key in ("step", "tokens", "time"))
    began = min([*time[np.isfinite(time)][:1], *(mark.time for mark in marks[:1])], default=0.0)
    picked = {}
    for key in keys:
        values = run.column(key)
        indices, mean = fewer(values, MOST_POINTS)
        if len(indices):
            picked[key] = (indices, values[indices], mean)
    every = np.unique(np.concatenate([np.zeros(0, np.intp), *(at for at, _, _ in picked.values())]))
    curves: dict[str, dict[str, Any]] = {}
    for key, (indices, values, mean) in picked.items():
        curves[key] = {"y": values.tolist()}
        if len(indices) < len(every):
            curves[key]["at"] = np.searchsorted(every, indices).tolist()
        if mean is not None:
            curves[key]["mean"] = [float(f"{value:.6g}") for value in mean]
    x = {"step": step, "token": tokens, "time": (time - began) / unit_seconds}
    of_steps = np.array([mark.step for mark in marks], np.float64)
    of_tokens = np.interp(of_steps, step, tokens) if len(run) else of_steps
    return {
        "name": plain(name),
        "x": {axis: finite(values[every]) for axis, values in x.items()},
        "curves": curves,
        "marks": [
            {
                "step": mark.step,
                "token": token,
                "time": (mark.time - began) / unit_seconds,
                "routine": mark.kind in ROUTINE,
                "text": plain(f"{mark.kind}: {mark.text}"),
            }
            for mark, token in zip(marks, finite(of_tokens), strict=True)
        ],
    }


def plain(text: str) -> str:
    """Text that plotly shows as it is."""
    return escape(text, quote=False)


def finite(values: Floats) -> list[float | None]:
    """As JSON can have them."""
    return [value if np.isfinite(value) else None for value in values.tolist()]
