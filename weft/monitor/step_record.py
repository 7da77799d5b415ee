"""Record of a logged step, and the formulas of its metrics."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, fields
from typing import Any, Self

from weft.config.files import only_finite
from weft.monitor.step_timer import StepTimes, goodput


def tflops_per_device(tokens: int, seconds: float, devices: int, flops_per_token: float) -> float:
    """Return the model TFLOP/s of one device, without recomputation.

    The model's operations are counted as in appendix B of the PaLM paper (Chowdhery et al., 2022):
    attention without the causal discount.

    Args:
        tokens: tokens of a step, over all devices.
        seconds: time of a step.
        devices: number of devices.
        flops_per_token: FLOPs of forward and backward for one token.
    """
    return tokens * flops_per_token / seconds / devices / 1e12


def device_hours(devices: int, tokens_per_second: float) -> float:
    """Return the device hours per billion tokens, at the tokens/s of all devices."""
    return devices / tokens_per_second * 1e9 / 3600


def mfu(tflops: float, peak_flops: float | None) -> float | None:
    """Return the model FLOPs utilization in [0, 1]; None if the peak is unknown.

    Args:
        tflops: model TFLOP/s of one device.
        peak_flops: dense peak FLOP/s of the device.
    """
    return None if peak_flops is None else tflops * 1e12 / peak_flops


def rank_stats(table: Sequence[Sequence[float]]) -> dict[str, dict[str, float]] | None:
    """Return minimum, median, maximum and slowest or fullest rank of several metrics.

    Args:
        table: a row for each rank: seconds of waiting for data, seconds of computing (on a GPU of
            the fixed work of `weft.monitor.stragglers.Probe`), other columns, peak memory in GiB.

    Returns:
        For each metric ``min``, ``median``, ``max``, and the ``rank`` of the maximum; None for a
        single rank.
    """
    if len(table) == 1:
        return None
    data, compute, *_, memory = zip(*table, strict=True)
    columns = {"data_seconds": data, "compute_seconds": compute, "memory_peak_gib": memory}
    return {
        name: {
            "min": min(values),
            "median": statistics.median(values),
            "max": max(values),
            "rank": values.index(max(values)),
        }
        for name, values in columns.items()
    }


@dataclass(frozen=True)
class StepRecord:
    """Metrics of one logged step.

    Rates and times are means over the steps since the last record.
    """

    step: int  # optimizer steps since the run began
    # Training loss over the global batch, in nats per token (preferences: pair); the perplexity is
    # exp(loss).
    loss: float
    grad_norm: float  # global L2 norm of the gradients, before clipping
    lr: float  # learning rate of the step
    tokens: int  # tokens since the run began, with padding and skipped sequences
    step_seconds: float  # wall-clock time of a step
    data_seconds: float  # seconds of step_seconds that waited for data
    tokens_per_second: float  # tokens of a step over step_seconds, all devices together
    tokens_per_second_per_device: float  # tokens_per_second over the number of devices
    tflops_per_device: float  # model TFLOP/s without recomputation: see `tflops_per_device`
    mfu: float | None  # model FLOPs utilization: fraction of the dense peak; None if unknown
    mfu_causal: float | None  # MFU with only the half of attention that a causal mask needs
    memory_peak_gib: float  # peak so far on the fullest rank: see `weft.monitor.device_memory`
    time: float  # seconds since the epoch
    time_breakdown: dict[str, float]  # seconds of the run, by `step_timer.KINDS`
    goodput: float  # productive fraction of time_breakdown
    eval_loss: float | None = None  # validation loss, in the unit of the loss
    # Steps since the last record that were skipped, rewound or computed twice.
    anomalies: list[dict[str, Any]] | None = None
    straggler_rank: int | None = None  # rank that slows down all others
    straggler_slowdown: float | None = None  # step time with the straggler over the time without
    predicted_memory_gib: float | None = None  # the planner's memory_peak_gib
    predicted_step_seconds: float | None = None  # the planner's step_seconds
    # Minimum, median, maximum and its rank, of several metrics: see `rank_stats`.
    ranks: dict[str, dict[str, float]] | None = None
    layer_grad_norms: dict[str, float] | None = None  # L2 norm of each layer, before clipping
    moe_max_load: float | None = None  # tokens of the most loaded expert over the mean, worst layer
    moe_overflows: int | None = None  # steps since the last record computed again with exact sizes
    # Of routers: the means of their losses over the layers, which are not part of ``loss``, and
    # each metric of each layer: see `ROUTER_METRICS`.
    router_metrics: dict[str, float] | None = None
    # Largest attention logit of the step, after scale and softcap: see `weft.optim.qk_clip`.
    attention_logits: dict[str, float] | None = None
    loss_by_source: dict[str, float] | None = None  # mean of each source since the last record
    eval_loss_by_source: dict[str, float] | None = None  # validation loss of each source
    # Further values of the objective, means since the last record.
    metrics: dict[str, float] | None = None
    eval_metrics: dict[str, float] | None = None  # the same on the validation set
    best_loss: float | None = None  # lowest smoothed loss so far: see `DivergenceDetector`
    diverged_since: int | None = None  # step at which the run diverged
    # True: an evaluation was due, and a stop skipped it; the next start makes up for it.
    eval_skipped: bool | None = None

    @classmethod
    def create(
        cls,
        *,
        tokens_per_step: int,
        times: StepTimes,
        devices: int,
        flops_per_token: float,
        causal_flops_per_token: float,
        peak_flops: float | None,
        **values: Any,
    ) -> Self:
        """Create the record of a step.

        Args:
            tokens_per_step: tokens of the global batch.
            times: mean times of a step.
            devices: number of devices.
            flops_per_token: model FLOPs for one token.
            causal_flops_per_token: the same, with the causal discount.
            peak_flops: dense peak FLOP/s of a device, if known.
            values: the other fields.
        """
        seconds = times.step
        rate = tokens_per_step / seconds
        tflops, causal = (
            tflops_per_device(tokens_per_step, seconds, devices, flops)
            for flops in (flops_per_token, causal_flops_per_token)
        )
        return cls(
            step_seconds=seconds,
            data_seconds=times.data,
            tokens_per_second=rate,
            tokens_per_second_per_device=rate / devices,
            tflops_per_device=tflops,
            mfu=mfu(tflops, peak_flops),
            mfu_causal=mfu(causal, peak_flops),
            goodput=goodput(values["time_breakdown"]),
            time=time.time(),
            **values,
        )

    @classmethod
    def is_complete(cls, values: Mapping[str, Any]) -> bool:
        """Return True if `from_dict` can read the values."""
        return all(field.name in values for field in fields(cls) if field.default is MISSING)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Return a record from `to_dict`, without the values of `KEY_PREFIXES`."""
        names = {field.name for field in fields(cls)}
        return cls(**{name: value for name, value in values.items() if name in names})

    def to_dict(self) -> dict[str, Any]:
        """Return the record as JSON values, without optional fields that are None.

        NaN and Inf, which a skipped step can have, become None.
        """
        optional = {field.name for field in fields(self) if field.default is None}
        record = {k: v for k, v in asdict(self).items() if k not in optional or v is not None}
        for name, prefix in KEY_PREFIXES.items():
            record |= {f"{prefix}/{key}": value for key, value in record.pop(name, {}).items()}
        record |= record.pop("router_metrics", {}) | record.pop("attention_logits", {})
        return dict(only_finite(record))


# Fields whose values become separate keys: ``loss/<source>``, ``grad_norm/<layer>``.
KEY_PREFIXES = {
    "loss_by_source": "loss",
    "eval_loss_by_source": "eval_loss",
    "layer_grad_norms": "grad_norm",
}

# Of each layer with experts: load of the most loaded expert over the mean; load-balance loss (1:
# equal loads) and z-loss, see `weft.models.moe`; entropy of the probabilities in nats; fraction of
# tokens whose experts the load-balance bias changed.
ROUTER_METRICS = (
    *("moe_max_load", "router_aux_loss", "router_z_loss", "router_entropy", "router_bias_effect"),
)

# Names of keys in trackers, grouped as users expect; a nested value appends its own name.
TRACKER_NAMES = {
    "loss": "train/loss",
    "grad_norm": "train/grad_norm",
    "lr": "train/lr",
    "tokens": "train/tokens",
    "eval_loss": "eval/loss",
    "step_seconds": "time/step_seconds",
    "data_seconds": "time/data_seconds",
    "goodput": "time/goodput",
    "tokens_per_second": "speed/tokens_per_second",
    "tokens_per_second_per_device": "speed/tokens_per_second_per_device",
    "tflops_per_device": "speed/tflops_per_device",
    "mfu": "speed/mfu",
    "mfu_causal": "speed/mfu_causal",
    "memory_peak_gib": "memory/peak_gib",
    "ranks": "ranks",
    "metrics": "train",
    "eval_metrics": "eval",
    "loss/": "train/loss/",
    "eval_loss/": "eval/loss/",
    "grad_norm/": "grad_norm/",
    "moe_overflows": "train/moe_overflows",
    **{name: f"train/{name}" for name in (*ROUTER_METRICS, "max_attention_logit")},
    **{f"{name}/": f"{name}/" for name in (*ROUTER_METRICS, "max_attention_logit")},
}


def to_scalars(record: StepRecord) -> dict[str, float]:
    """Return the finite values of a record by their `TRACKER_NAMES`."""
    scalars: dict[str, float] = {}
    for key, value in record.to_dict().items():
        head, slash, rest = key.partition("/")
        if name := TRACKER_NAMES.get(head + slash):
            scalars |= _flatten(name + rest, value)
    return scalars


def _flatten(name: str, value: Any) -> Iterator[tuple[str, float]]:
    if isinstance(value, dict):
        for key, nested in value.items():
            yield from _flatten(f"{name}/{key}", nested)
    elif value is not None:
        yield name, value
