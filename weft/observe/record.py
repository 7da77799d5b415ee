"""What a step reports: pure formulas, and the record that the sinks write."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from typing import Any, Self


def tokens_per_second(tokens: int, seconds: float) -> float:
    """Tokens of the whole job per second."""
    return tokens / seconds


def tflops_per_device(tokens: int, seconds: float, devices: int, flops_per_token: float) -> float:
    """Model TFLOP/s of one device: the arithmetic that the model needs, without recomputation.

    As in the PaLM paper's appendix B (Chowdhery et al., 2022): attention is counted without the
    causal discount.
    """
    return tokens * flops_per_token / seconds / devices / 1e12


def mfu(tflops: float, peak_flops: float | None) -> float | None:
    """Model FLOPs utilisation in [0, 1]: None where the device's peak is unknown."""
    return None if peak_flops is None else tflops * 1e12 / peak_flops


@dataclass(frozen=True)
class StepRecord:
    """One logged step.  Rates and times are means over the steps since the last record."""

    step: int
    loss: float  # nats per token, over the whole global batch
    grad_norm: float  # before clipping
    lr: float
    tokens: int  # trained on since the run began
    step_seconds: float
    data_seconds: float  # of step_seconds, waiting for data
    tokens_per_second: float
    tokens_per_second_per_device: float
    tflops_per_device: float
    mfu: float | None
    memory_peak_gib: float  # so far, of the fullest rank: see `weft.observe.memory`
    time: float  # seconds since the epoch
    seconds: dict[str, float]  # of the run, over all its starts: see `weft.observe.ledger`
    eval_loss: float | None = None  # nats per token of the held-out text, where it was evaluated
    # Steps since the last record that were skipped, taken back, or computed twice.
    anomalies: list[dict[str, Any]] | None = None
    slow_rank: int | None = None  # which slows all others down, where there is one ...
    slow_ratio: float | None = None  # ... and how many times as long it needs
    expected_memory_gib: float | None = None  # what the planner said of memory_peak_gib ...
    expected_step_seconds: float | None = None  # ... and of step_seconds

    @classmethod
    def of(
        cls,
        *,
        tokens_per_step: int,
        times: tuple[float, float],
        devices: int,
        flops_per_token: float,
        peak_flops: float | None,
        **values: Any,
    ) -> Self:
        """The record of a step that took ``times`` = (seconds, of which waiting for data)."""
        seconds, data_seconds = times
        rate = tokens_per_second(tokens_per_step, seconds)
        tflops = tflops_per_device(tokens_per_step, seconds, devices, flops_per_token)
        return cls(
            step_seconds=seconds,
            data_seconds=data_seconds,
            tokens_per_second=rate,
            tokens_per_second_per_device=rate / devices,
            tflops_per_device=tflops,
            mfu=mfu(tflops, peak_flops),
            time=time.time(),
            **values,
        )

    def to_dict(self) -> dict[str, Any]:
        """All keys; those that have a default only where they have a value.

        Of a skipped step loss and gradient norm may be no numbers, which JSON cannot write: null.
        """
        optional = {field.name for field in fields(self) if field.default is None}
        record = {k: v for k, v in asdict(self).items() if k not in optional or v is not None}
        for name in ("loss", "grad_norm"):
            if not math.isfinite(record[name]):
                record[name] = None
        return record


class Clock:
    """Seconds per step, since it was last restarted."""

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        self._began = time.perf_counter()
        self._thread = time.thread_time()
        self._data = self._device = 0.0
        self._steps = 0

    @contextmanager
    def waiting_for_data(self) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self._data += time.perf_counter() - began

    @contextmanager
    def waiting_for_device(self) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self._device += time.perf_counter() - began

    def count_step(self) -> None:
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
