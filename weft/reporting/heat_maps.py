"""Heat maps of a run: gradient norms by layer, and layer statistics."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from weft.config.errors import WeftError
from weft.records.jsonl_reader import read_records
from weft.records.run_reader import Floats, RunReader
from weft.reporting.chart_points import heat_map

MIN_ROWS = 8  # layers; fewer are curves
MAX_ROWS = 320  # tensors; more are not readable
# Heading and unit of each metric of layers, by the prefix of its columns.
LAYER_METRICS = {
    "grad_norm/": ("Gradient norm by layer", "before clipping"),
    "max_attention_logit/": ("Largest attention logit by layer", "of all heads"),
    "moe_max_load/": ("Load of the most loaded expert by layer", "times the mean"),
    "router_aux_loss/": ("Load-balance loss by layer", "1: equal loads"),
    "router_z_loss/": ("Router z-loss by layer", "mean square of the logsumexp of the logits"),
    "router_entropy/": ("Entropy of the router by layer", "nats"),
    "router_bias_effect/": (
        "Effect of the load-balance bias by layer",
        "fraction of tokens whose experts it changed",
    ),
}
# Heading of the statistics of each kind of tensor.
KIND_HEADINGS = {
    "activation": "RMS of each layer's output",
    "gradient": "RMS of each gradient",
    "parameter": "RMS of each parameter",
}


def heat_maps(run: RunReader, axes: Mapping[str, Floats]) -> Iterator[dict[str, Any]]:
    """Yield the heat maps of a run.

    Args:
        run: the run.
        axes: positions of its records on each axis.
    """
    for prefix, (heading, unit) in LAYER_METRICS.items():
        columns = {
            name.removeprefix(prefix): values
            for name, values in run.columns.items()
            if name.startswith(prefix)
        }
        if len(columns) >= MIN_ROWS:
            rows = dict([*columns.items()][:MAX_ROWS])
            yield heat_map(f"map-{prefix[:-1]}", heading, unit, axes, rows)
    yield from statistics_maps(run, axes)


def statistics_maps(run: RunReader, axes: Mapping[str, Floats]) -> Iterator[dict[str, Any]]:
    """Yield a map of the RMS of each kind of tensor; NaN and Inf are marked."""
    try:
        records = read_records(run.run_dir / "statistics.jsonl")
    except WeftError:
        return
    tables: dict[str, dict[str, dict[int, float]]] = {kind: {} for kind in KIND_HEADINGS}
    for row in records:
        kind, name, rms = row.get("kind"), row.get("name"), row.get("rms")
        if not (isinstance(kind, str) and isinstance(name, str)):
            continue
        if kind in tables and isinstance(rms, float):
            value = math.inf if row.get("nonfinite") else rms
            tables[kind].setdefault(name, {})[row["step"]] = value
    for kind, table in tables.items():
        if not table:
            continue
        steps = sorted({step for values in table.values() for step in values})
        moments = np.array(steps, np.float64)
        columns = {
            name: np.interp(moments, axes["step"], axis) if name != "step" else moments
            for name, axis in axes.items()
        }
        rows = {
            name: np.array([values.get(step, math.nan) for step in steps])
            for name, values in [*table.items()][:MAX_ROWS]
        }
        note = f", the first {MAX_ROWS} of {len(table):,}" * (len(table) > MAX_ROWS)
        unit = f"in the steps of debug.layer_stats_steps{note}"
        yield heat_map(f"map-{kind}", KIND_HEADINGS[kind], unit, columns, rows)
