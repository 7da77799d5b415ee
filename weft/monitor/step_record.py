"""What a step reports: pure formulas, and the record that the sinks write."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from typing import Any, Self

from weft.config.files import only_finite
from weft.monitor.goodput import goodput


def tflops_per_device(tokens: int, seconds: float, devices: int, flops_per_token: float) -> float:
    """Model TFLOP/s of one device: the arithmetic that the model needs, without recomputation.

    As in the PaLM paper's appendix B (Chowdhery et al., 2022): attention is counted without the
    causal discount.
    """
    return tokens * flops_per_token / seconds / devices / 1e12


def device_hours(devices: int, tokens_per_second: float) -> float:
    """What a billion tokens cost, at so many of the whole job per second."""
    return devices / tokens_per_second * 1e9 / 3600


def mfu(tflops: float, peak_flops: float | None) -> float | None:
    """Model FLOPs utilisation in [0, 1]: None where the device's peak is unknown."""
    return None if peak_flops is None else tflops * 1e12 / peak_flops


def rank_stats(table: Sequence[Sequence[float]]) -> dict[str, dict[str, float]] | None:
    """In what ranks differ: the least, the median and the most of each, and whose the most is.

    Args:
        table: a row for each rank: seconds for its data, those of computing (on a GPU of a fixed
            piece of it), anything, and last its peak memory in GiB.

    Returns:
        None where there is one rank only.
    """
    if len(table) == 1:
        return None
    data, compute, *_, memory = zip(*table, strict=True)
    columns = {"data_seconds": data, "compute_seconds": compute, "memory_peak_gib": memory}
    return {
        name: {
            "least": min(values),
            "median": statistics.median(values),
            "most": max(values),
            "rank": values.index(max(values)),
        }
        for name, values in columns.items()
    }


@dataclass(frozen=True)
class StepRecord:
    """One logged step.  Rates and times are means over the steps since the last record."""

    step: int
    loss: float  # nats per token (of dpo, per pair), over the whole global batch
    grad_norm: float  # before clipping
    lr: float
    tokens: int  # consumed since the run began: of rows that were trained on, filled up or skipped
    step_seconds: float
    data_seconds: float  # of step_seconds, waiting for data
    tokens_per_second: float
    tokens_per_second_per_device: float
    tflops_per_device: float
    mfu: float | None
    mfu_causal: float | None  # the same, of attention only the half that a causal mask needs
    memory_peak_gib: float  # so far, of the fullest rank: see `weft.monitor.device_memory`
    time: float  # seconds since the epoch
    time_breakdown: dict[str, float]  # seconds of the whole run by kind: see `weft.monitor.goodput`
    goodput: float  # productive fraction of time_breakdown
    eval_loss: float | None = None  # of the validation set, in the loss's unit, where evaluated
    # Steps since the last record that were skipped, taken back, or computed twice.
    anomalies: list[dict[str, Any]] | None = None
    straggler_rank: int | None = None  # which slows all others down, where there is one ...
    straggler_slowdown: float | None = None  # ... and how many times as long it needs
    predicted_memory_gib: float | None = None  # what the planner said of memory_peak_gib ...
    predicted_step_seconds: float | None = None  # ... and of step_seconds
    # Of several ranks what they need and have, see `rank_stats`.
    ranks: dict[str, dict[str, float]] | None = None
    layer_grad_norms: dict[str, float] | None = None  # of each layer, before clipping; if asked for
    # Of a mixture of experts: tokens of the most loaded expert over the mean, in the worst layer.
    moe_max_load: float | None = None
    # Of a mixture the loss of each source: mean since the last record, and of its validation set.
    source_losses: dict[str, float] | None = None
    source_eval_losses: dict[str, float] | None = None
    # What else the objective tells: mean since the last record, and of the validation set.
    metrics: dict[str, float] | None = None
    eval_metrics: dict[str, float] | None = None
    best_loss: float | None = None  # the lowest so far: see `DivergenceDetector`
    diverged_since: int | None = None  # the step, if the run has diverged

    @classmethod
    def of(
        cls,
        *,
        tokens_per_step: int,
        times: tuple[float, float],
        devices: int,
        flops_per_token: float,
        causal_flops_per_token: float,
        peak_flops: float | None,
        **values: Any,
    ) -> Self:
        """The record of a step that took ``times`` = (seconds, of which waiting for data)."""
        seconds, data_seconds = times
        rate = tokens_per_step / seconds
        tflops, causal = (
            tflops_per_device(tokens_per_step, seconds, devices, flops)
            for flops in (flops_per_token, causal_flops_per_token)
        )
        return cls(
            step_seconds=seconds,
            data_seconds=data_seconds,
            tokens_per_second=rate,
            tokens_per_second_per_device=rate / devices,
            tflops_per_device=tflops,
            mfu=mfu(tflops, peak_flops),
            mfu_causal=mfu(causal, peak_flops),
            goodput=goodput(values["time_breakdown"]),
            time=time.time(),
            **values,
        )

    def to_dict(self) -> dict[str, Any]:
        """All keys; those that have a default only where they have a value.

        Of a skipped step loss and gradient norm may be no numbers, which JSON cannot write: null.
        """
        optional = {field.name for field in fields(self) if field.default is None}
        record = {k: v for k, v in asdict(self).items() if k not in optional or v is not None}
        for name, prefix in FLAT.items():
            record |= {f"{prefix}/{key}": value for key, value in record.pop(name, {}).items()}
        return dict(only_finite(record))


# Fields with a number per source or layer, which become one key each: ``loss/<source>``.
FLAT = {
    "source_losses": "loss",
    "source_eval_losses": "eval_loss",
    "layer_grad_norms": "grad_norm",
}

# What of a record trackers plot, under names that their users expect; numbers in a dict get its
# name and theirs.
NAMES = {
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
    "moe_max_load": "train/moe_max_load",
    "ranks": "ranks",
    "metrics": "train",
    "eval_metrics": "eval",
    "loss/": "train/loss/",
    "eval_loss/": "eval/loss/",
    "grad_norm/": "grad_norm/",
}


def scalars(record: StepRecord) -> dict[str, float]:
    """The numbers of a record by the names of `NAMES`; those without a value are left out."""
    found: dict[str, float] = {}
    for key, value in record.to_dict().items():
        head, slash, inner = key.partition("/")
        if name := NAMES.get(head + slash):
            found |= _flat(name + inner, value)
    return found


def _flat(name: str, value: Any) -> Iterator[tuple[str, float]]:
    if isinstance(value, dict):
        for key, each in value.items():
            yield from _flat(f"{name}/{key}", each)
    elif value is not None:
        yield name, value


class Clock:
    """Seconds per step, since it was last restarted.

    `read` and `own` are asked after a step was counted.
    """

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """What was before does not count."""
        self._began = time.perf_counter()
        self._thread = time.thread_time()
        self._data = self._device = 0.0
        self._steps = 0

    @contextmanager
    def waiting_for_data(self) -> Iterator[None]:
        """Inside, the host waits for rows."""
        began = time.perf_counter()
        yield
        self._data += time.perf_counter() - began

    @contextmanager
    def waiting_for_device(self) -> Iterator[None]:
        """Inside, the host waits for what it has asked the device for."""
        began = time.perf_counter()
        yield
        self._device += time.perf_counter() - began

    def count_step(self) -> None:
        """A step is done."""
        self._steps += 1

    def read(self) -> tuple[float, float]:
        """Mean seconds of a step, and of those the seconds spent waiting for data."""
        total = time.perf_counter() - self._began
        return total / self._steps, self._data / self._steps

    def own(self) -> tuple[float, float]:
        """Mean seconds of a step in which this rank kept the others waiting: for data, that its
        device did not hide, and computing on the CPU."""
        data = max(0.0, self._data - self._device)
        return data / self._steps, (time.thread_time() - self._thread) / self._steps
