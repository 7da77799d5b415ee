"""Metrics of a run under the names and units of Prometheus and OpenTelemetry.

The name of a key of metrics.jsonl (`weft.monitor.step_record`) or system.jsonl
(`weft.monitor.system_sampler`) is ``weft_KEY``, or ``weft_node_KEY``, in a base unit: seconds,
bytes, ratios.  The parts of a nested key are points with a label.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

# Suffixes of keys: that of the name, the unit by UCUM, and the factor from weft's unit.
UNITS = {
    "_gib": ("_bytes", "By", 2.0**30),
    "_mb_s": ("_bytes_per_second", "By/s", 1e6),
    "_percent": ("_ratio", "1", 0.01),
    "_percent_min": ("_min_ratio", "1", 0.01),
    "_power_w": ("_power_watts", "W", 1.0),
    "_temperature": ("_temperature_celsius", "Cel", 1.0),
    "_seconds": ("_seconds", "s", 1.0),
}
NAMES = {  # where the key does not say enough
    "time": "record_timestamp_seconds",
    "time_breakdown": "run_seconds",
    "metrics": "train_metric",
    "eval_metrics": "eval_metric",
    "diverged_since": "diverged_since_step",
}
LABELS = {
    "time_breakdown": "kind",
    "metrics": "name",
    "eval_metrics": "name",
    "loss/": "source",
    "eval_loss/": "source",
    "grad_norm/": "layer",
    "max_attention_logit/": "layer",
    "moe_max_load/": "layer",
    "router_aux_loss/": "layer",
    "router_z_loss/": "layer",
    "router_entropy/": "layer",
    "router_bias_effect/": "layer",
    "rank/": "stat",
}
RECORD_HELP = {
    "step": "Completed optimizer steps. A rewind lowers it.",
    "loss": "Training loss of the last logged step.",
    "grad_norm": "Global gradient norm before clipping.",
    "lr": "Learning rate.",
    "tokens": "Tokens since the run began. A rewind lowers it.",
    "step_seconds": "Mean time of a step.",
    "data_seconds": "Part of the time of a step that waits for data.",
    "tokens_per_second": "Tokens per second of all devices.",
    "tokens_per_second_per_device": "Tokens per second of one device.",
    "tflops_per_device": "Model TFLOP/s of one device, without recomputation.",
    "mfu": "Model FLOPs utilization, a fraction of the dense peak.",
    "mfu_causal": "MFU with only the half of attention that a causal mask needs.",
    "memory_peak_gib": "Peak memory of the fullest rank.",
    "time": "Unix time at which the last step was logged.",
    "time_breakdown": "Seconds of the run over all its starts.",
    "goodput": "Productive fraction of the seconds of the run.",
    "eval_loss": "Validation loss, if the last logged step evaluated.",
    "straggler_rank": "Rank that slows down all others.",
    "straggler_slowdown": "Step time with the straggler over the time without.",
    "predicted_memory_gib": "Peak memory that the planner predicts.",
    "predicted_step_seconds": "Time of a step that the planner predicts.",
    "moe_max_load": "Load of the most loaded expert over the mean, in the worst layer.",
    "moe_overflows": "Steps since the last record that were computed again with exact sizes.",
    "router_aux_loss": "Load-balance loss of the routers.",
    "router_z_loss": "z-loss of the routers.",
    "max_attention_logit": "Largest attention logit of the step.",
    "metrics": "Further values of the objective in training.",
    "eval_metrics": "Further values of the objective on the validation set.",
    "best_loss": "Lowest smoothed loss so far.",
    "diverged_since": "Step at which the run diverged.",
    "loss/": "Loss of a source of the data.",
    "eval_loss/": "Validation loss of a source of the data.",
    "grad_norm/": "Gradient norm of a layer before clipping.",
    "max_attention_logit/": "Largest attention logit of a layer.",
    "moe_max_load/": "Load of the most loaded expert of a layer over the mean.",
    "router_aux_loss/": "Load-balance loss of a layer.",
    "router_z_loss/": "z-loss of a layer.",
    "router_entropy/": "Entropy of the probabilities of a router in nats.",
    "router_bias_effect/": "Fraction of tokens whose experts the load-balance bias changed.",
    # The parts of ``ranks``: minimum, median and maximum.
    "rank/data_seconds": "Part of the time of a step that a rank waits for data.",
    "rank/compute_seconds": "Time of fixed work on a rank.",
    "rank/memory_peak_gib": "Peak memory of a rank.",
}
NODE_HELP = {
    "cpu_percent": "Use of all cores of the node.",
    "memory_gib": "Used memory of the node.",
    "memory_total_gib": "Memory of the node.",
    "disk_free_gib": "Free space of the file system of the run directory.",
    "disk_read_mb_s": "Reads of all disks of the node.",
    "disk_write_mb_s": "Writes of all disks of the node.",
    "net_in_mb_s": "Received by all network interfaces but loopback.",
    "net_out_mb_s": "Sent by all network interfaces but loopback.",
    "gpu_percent": "Mean utilization of the GPUs of the node.",
    "gpu_percent_min": "Lowest utilization of a GPU of the node.",
    "gpu_memory_gib": "Used memory of the fullest GPU of the node.",
    "gpu_power_w": "Power of all GPUs of the node.",
    "gpu_temperature": "Temperature of the hottest GPU of the node.",
}


class Metric(NamedTuple):
    """A metric with its present values.

    ``unit``: by UCUM; 1: none.  ``points``: labels and values.
    """

    name: str
    help: str
    unit: str
    points: Sequence[tuple[Mapping[str, str], float]]
    is_counter: bool = False


def export_record(record: Mapping[str, Any]) -> list[Metric]:
    """Return the metrics of a record from `weft.monitor.step_record`."""
    values = dict(record)
    for name, stats in (values.pop("ranks", None) or {}).items():
        values[f"rank/{name}"] = {key: stats[key] for key in ("min", "median", "max")}
    return list(_export(values, RECORD_HELP, "weft_"))


def export_sample(sample: Mapping[str, float]) -> list[Metric]:
    """Return the metrics of a node: see `weft.monitor.system_sampler`."""
    return list(_export(sample, NODE_HELP, "weft_node_"))


def exported_name(key: str, prefix: str = "weft_") -> tuple[str, str, float]:
    """Return the name of a key, its unit, and the factor to this unit.

    ``PREFIX/`` becomes ``LABEL_PREFIX``, and ``rank/NAME`` ``rank_NAME``.
    """
    head, slash, rest = key.partition("/")
    name = NAMES.get(key, key)
    if slash:
        name = f"{head}_{rest}" if rest else f"{LABELS[key]}_{head}"
    for suffix, (replacement, unit, factor) in UNITS.items():
        if name.endswith(suffix):
            return prefix + name.removesuffix(suffix) + replacement, unit, factor
    return prefix + name, "1", 1.0


def _export(values: Mapping[str, Any], helps: Mapping[str, str], prefix: str) -> Iterator[Metric]:
    points: dict[str, list[tuple[Mapping[str, str], float]]] = {}
    for key, value in values.items():
        head, slash, rest = key.partition("/")
        known = key if key in helps else head + slash
        if known not in helps:
            continue
        label = LABELS.get(known) or LABELS.get(head + slash, "")
        factor = exported_name(known, prefix)[2]
        parts = value if isinstance(value, Mapping) else {rest: value}
        points.setdefault(known, []).extend(
            ({label: name} if label else {}, float(number) * factor)
            for name, number in parts.items()
            if isinstance(number, int | float) and math.isfinite(number)
        )
    for known, each in points.items():
        if each:
            name, unit, _ = exported_name(known, prefix)
            yield Metric(name, helps[known], unit, each)
