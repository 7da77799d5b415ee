"""Charts of a report, and the data from which ``report.js`` draws them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from weft.monitor.step_timer import KINDS
from weft.records.run_reader import ROUTINE_KINDS, TEXT_KIND, Floats, RunEvent, RunReader
from weft.reporting.chart_points import (
    MAX_POINTS,
    CurvePoints,
    interpolate_axes,
    points_per_curve,
    to_json,
)
from weft.reporting.heat_maps import LAYER_METRICS, MIN_ROWS, heat_maps
from weft.reporting.page import Part, Section, text_part

MAX_EVENTS = 200  # events of a run

NATS = "nats per token"
PAIR_UNIT = "nats per pair"
LOSS_UNITS = {  # by ``train.objective``
    "next_token": NATS,
    "dpo": PAIR_UNIT,
    "simpo": PAIR_UNIT,
    "reward": PAIR_UNIT,
    "ipo": "squared error per pair",
    "kto": "loss per answer",
    "orpo": "nats per token of chosen answers + nats per pair",
}
# Heading and unit of each chart, by the heading of its section.  A name that ends with "/" or "."
# stands for all metrics with this prefix.
CHARTS = {
    "Training": {
        "loss": ("Loss", NATS),
        "loss/": ("Loss by source", NATS),
        "eval_loss/": ("Validation loss by source", NATS),
        "grad_norm": ("Gradient norm", "before clipping"),
        "lr": ("Learning rate", ""),
        "metrics.": ("Metrics of the objective", "mean since the last record"),
        "eval_metrics.": ("Validation metrics of the objective", "mean over the samples"),
        "moe_max_load": ("Load of the most loaded expert", "times the mean, in the worst layer"),
        "router_aux_loss": ("Load-balance loss of routers", "mean of the layers; 1: equal loads"),
        "router_z_loss": ("Z-loss of routers", "mean of the layers"),
        "max_attention_logit": ("Largest attention logit", "of all layers and heads"),
    },
    "Speed": {
        "speed": ("Throughput", "tokens per second"),
        "mfu": ("Model FLOPs utilization", "MFU"),
        "step_seconds": ("Step time", "seconds, mean since the last record"),
        "step_breakdown": ("Step time by activity", "seconds, stacked"),
        "data_seconds": ("Waiting for data", "seconds per step"),
        "time_breakdown": ("Time of the run by kind", "seconds, stacked"),
        "ranks.compute_seconds.": ("Compute time over the ranks", "seconds per step"),
        "ranks.data_seconds.": ("Waiting for data over the ranks", "seconds per step"),
    },
    "Memory": {
        "memory": ("Memory of the fullest rank", "GiB, peak so far"),
        "ranks.memory_peak_gib.": ("Memory over the ranks", "GiB, peak so far"),
    },
    "System": {
        "system_gpu": ("GPU utilization", "% of the time, over the GPUs of the node"),
        "system_gpu_memory": ("GPU memory", "GiB, fullest GPU of the node"),
        "system_gpu_power": ("GPU power", "watts, all GPUs of the node"),
        "system_gpu_temperature": ("GPU temperature", "°C, hottest GPU of the node"),
        "system_cpu": ("Processor", "% of all cores of the node"),
        "system_memory": ("Host memory", "GiB used on the node"),
        "system_disk": ("Disk", "MB/s, all disks of the node"),
        "system_free": ("Free disk space", "GiB, file system of the run"),
        "system_network": ("Network", "MB/s, all interfaces but loopback"),
    },
    "Layers": LAYER_METRICS,
}
STACKED = {"step_breakdown", "time_breakdown"}
WIDE = {"loss"}
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
    *((name, name, "", "") for name in ("moe_max_load", "router_aux_loss", "router_z_loss")),
    ("max_attention_logit", "max_attention_logit", "", ""),
    ("system_gpu", "system.gpu_percent", "mean", ""),
    ("system_gpu", "system.gpu_percent_min", "least busy GPU", ""),
    ("system_gpu_memory", "system.gpu_memory_gib", "", "exact"),
    ("system_gpu_power", "system.gpu_power_w", "", ""),
    ("system_gpu_temperature", "system.gpu_temperature", "", ""),
    ("system_cpu", "system.cpu_percent", "", ""),
    ("system_memory", "system.memory_gib", "used", "exact"),
    ("system_memory", "system.memory_total_gib", "total", "dash"),
    ("system_disk", "system.disk_read_mb_s", "read", ""),
    ("system_disk", "system.disk_write_mb_s", "write", ""),
    ("system_free", "system.disk_free_gib", "", "exact"),
    ("system_network", "system.net_in_mb_s", "received", ""),
    ("system_network", "system.net_out_mb_s", "sent", ""),
]


def select_events(events: Sequence[RunEvent]) -> list[RunEvent]:
    """Select at most `MAX_EVENTS` events; drop routine first, then the middle.

    Another section has the generated text.
    """
    events = [event for event in events if event.kind != TEXT_KIND]
    if len(events) > MAX_EVENTS:
        events = [event for event in events if event.kind not in ROUTINE_KINDS] or events
    if len(events) > MAX_EVENTS:
        events = events[: MAX_EVENTS // 2] + events[-MAX_EVENTS // 2 :]
    return events


def run_column(run: RunReader, name: str) -> Floats:
    """Return a column of the records, or of the samples of the node (``system.``)."""
    if name.startswith("system."):
        return run.read_system().get(name, np.zeros(0))
    return run.column(name)


def build_charts(runs: Sequence[RunReader]) -> list[dict[str, Any]]:
    """Return the charts for which a run has values; stacked ones only for one run."""
    metrics = dict.fromkeys(
        name
        for run in runs
        for name, values in (run.columns | (run.read_system() if len(run) else {})).items()
        if np.isfinite(values).any()
    )
    if {"step_seconds", "data_seconds"} <= metrics.keys():
        metrics["rest_seconds"] = None
    omitted = STACKED if len(runs) > 1 else {"data_seconds"}
    for prefix in LAYER_METRICS:
        if sum(name.startswith(prefix) for name in metrics) >= MIN_ROWS:
            omitted = omitted | {prefix}  # a heat map
    objectives = [str(run.job.get("train", {}).get("objective", "next_token")) for run in runs]
    return [
        {
            "id": re.sub(r"\W", "-", name),
            "group": group,
            "heading": heading,
            "unit": loss_unit(objectives) if unit == NATS else unit,
            "stack": name in STACKED,
            "format": "%" if name == "mfu" else "",
            "curves": curves,
        }
        for group, charts in CHARTS.items()
        for name, (heading, unit) in charts.items()
        if name not in omitted and (curves := list(chart_curves(name, metrics)))
    ]


def chart_curves(chart: str, metrics: Iterable[str]) -> Iterator[tuple[str, str, str]]:
    """Yield the curves of a chart: metric, label and style."""
    if chart[-1] not in "/.":
        known = {*metrics}
        yield from (curve[1:] for curve in CURVES if curve[0] == chart and curve[1] in known)
        return
    for name in metrics:
        label = name.removeprefix(chart)
        # The rank of the maximum is not a curve.
        if label != name and not (chart.startswith("ranks.") and label == "rank"):
            yield name, label, ""


def loss_unit(objectives: Iterable[str]) -> str:
    """Return the unit of losses with these values of ``train.objective``."""
    units = dict.fromkeys(LOSS_UNITS.get(name, f"loss of {name}") for name in objectives)
    return ", ".join(units) or NATS


def chart_sections(
    runs: Sequence[RunReader],
    names: Sequence[str],
    charts: Sequence[Mapping[str, Any]],
    maps: Sequence[Mapping[str, Any]],
) -> Iterator[Section]:
    """Yield a section for each group of charts, with a figure for each chart."""
    for group in CHARTS:
        figures = [
            {
                **{key: chart[key] for key in ("id", "heading", "unit")},
                "description": describe_chart(runs, names, chart),
                "is_wide": chart["id"] in WIDE,
            }
            for chart in charts
            if chart["group"] == group
        ]
        if group == "Layers":
            figures += [
                {
                    **{key: each[key] for key in ("id", "heading", "unit")},
                    "description": f"{len(each['names'])} rows, color by size",
                    "is_wide": True,
                }
                for each in maps
            ]
        if figures:
            parts: list[Part] = [{"kind": "charts", "figures": figures}]
            if group == "Training":
                parts += [text_part(note, "faint") for note in chart_notes(runs, names)]
            yield {"heading": group, "parts": parts}


def chart_notes(runs: Sequence[RunReader], names: Sequence[str]) -> Iterator[str]:
    """Yield how to use and read the charts."""
    yield (
        "Drag over a chart to zoom all of them, double-click to reset. Click a name to hide its "
        "curve. With the keyboard: Tab to a chart, arrow keys read its values, + and - zoom."
    )
    if any(run.read_events() for run in runs):
        yield "Triangles on the axis are events, gray if routine, else red with a line."
    for name, run in zip(names, runs, strict=True):
        if len(run) > MAX_POINTS:
            yield (
                f"{name}: a curve has at most {MAX_POINTS:,} points for {len(run):,} records, the "
                "minimum and maximum of each interval; smoothing uses the means of the intervals."
            )


def describe_chart(
    runs: Sequence[RunReader], names: Sequence[str], chart: Mapping[str, Any]
) -> str:
    """Describe the first curve of each run, for screen readers."""
    descriptions = []
    for run, name in zip(runs, names, strict=True):
        values = run_column(run, chart["curves"][0][0])
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

    Each run has ``grids``, the positions of drawn records on each axis; ``curves``, which name
    their grid; and ``events``.  See `weft.reporting.chart_points`.
    """
    unit, seconds = choose_time_unit(runs)
    num_points = points_per_curve(len(runs) * sum(len(chart["curves"]) for chart in charts))
    data = [
        _run_data(run, name, charts, seconds, num_points)
        for run, name in zip(runs, names, strict=True)
    ]
    return {
        "runs": data,
        "charts": charts,
        "maps": run_maps(runs),
        "time_unit": unit,
        "smooth": default_smoothing(max(map(len, runs))),
    }


def default_smoothing(num_records: int) -> float:
    """Return the initial weight of the smoothing; means of bins need less."""
    return 0.0 if num_records <= 200 else 0.8 if num_records <= MAX_POINTS else 0.5


def run_maps(runs: Sequence[RunReader]) -> list[dict[str, Any]]:
    """Return the heat maps of a single run; several runs have none."""
    if len(runs) != 1 or not len(runs[0]):
        return []
    axes = run_axes(runs[0], start_time(runs[0]), choose_time_unit(runs)[1])
    return [*heat_maps(runs[0], axes)]


def start_time(run: RunReader) -> float:
    """Return the seconds since the epoch at which a run began; 0 if unknown."""
    times = run.column("time")
    return float(
        min([*times[np.isfinite(times)][:1], *(e.time for e in run.read_events()[:1])], default=0.0)
    )


def run_axes(run: RunReader, begin: float, unit_seconds: float) -> dict[str, Floats]:
    """Return the positions of a run's records on each axis."""
    step, tokens, time = (run.column(key) for key in ("step", "tokens", "time"))
    return {"step": step, "token": tokens, "time": (time - begin) / unit_seconds}


def _run_data(
    run: RunReader,
    name: str,
    charts: Sequence[Mapping[str, Any]],
    unit_seconds: float,
    num_points: int,
) -> dict[str, Any]:
    """Return the data of one run: see `chart_data`."""
    events, begin = select_events(run.read_events()), start_time(run)
    axes = run_axes(run, begin, unit_seconds)
    system = run.read_system()
    samples = system.get("system.time", np.zeros(0))
    system_axes = interpolate_axes(axes, run.column("time"), samples)
    system_axes["time"] = (samples - begin) / unit_seconds
    points = CurvePoints(num_points)
    for chart in charts:
        keys = [key for key, _, _ in chart["curves"]]
        for group in [keys] if chart["stack"] else [[key] for key in keys]:
            is_system = group[0].startswith("system.")
            columns = {key: run_column(run, key) for key in group}
            points.add(system_axes if is_system else axes, columns)
    event_steps = np.array([event.step for event in events], np.float64)
    tokens = np.interp(event_steps, axes["step"], axes["token"]) if len(run) else event_steps
    return {
        "name": name,
        "grids": points.grids,
        "curves": points.curves,
        "events": [
            {
                "step": event.step,
                "token": token,
                "time": (event.time - begin) / unit_seconds,
                "routine": event.kind in ROUTINE_KINDS,
                "text": f"{event.kind}: {event.text}",
            }
            for event, token in zip(events, to_json(tokens), strict=True)
        ],
    }
