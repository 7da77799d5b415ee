"""Measure the FLOP/s and the bandwidth of a device, as the planner defines them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from weft.estimate.cost import STREAM_EFFICIENCY

SHAPES = ((8192, 8192, 8192), (4096, 4096, 4096), (16384, 8192, 8192), (8192, 8192, 28672))
SMALL_SHAPES = ((1024, 1024, 1024), (2048, 1024, 4096), (512, 2048, 2048))


def time_calls(run: Callable[[], object], min_seconds: float) -> list[float]:
    """Return the seconds of at least five calls, after two calls to warm up."""
    durations: list[float] = []
    run(), run()
    while sum(durations) < min_seconds or len(durations) < 5:
        start = time.perf_counter()
        run()
        durations.append(time.perf_counter() - start)
    return durations


def median_seconds(
    run: Callable[[], object], device: torch.device, min_seconds: float = 0.3
) -> float:
    """Return the median seconds per call, over at least five calls."""

    def run_to_end() -> None:
        run()
        torch.accelerator.synchronize(device)

    return statistics.median(time_calls(run if device.type == "cpu" else run_to_end, min_seconds))


def time_cpu_burst(
    run: Callable[[], object], threads: int, min_seconds: float
) -> tuple[float, float]:
    """Call ``run`` on the CPU for ``min_seconds``, at least five times.

    Returns:
        Seconds of the fastest call, which other processes disturbed least; and the fraction of the
        CPU time of ``threads`` threads that the calls used.  It is 1 on an idle machine, because
        threads spin while they wait for each other.
    """
    run()  # starts the threads
    burst_start, cpu_seconds = time.perf_counter(), time.process_time()
    fastest = min(time_calls(run, min_seconds))
    seconds, cpu_seconds = time.perf_counter() - burst_start, time.process_time() - cpu_seconds
    return fastest, min(1.0, cpu_seconds / (seconds * threads))


def prepare_matmul(a: Tensor, b: Tensor) -> Callable[[], object]:
    """Return a function that computes a @ b.T, in bfloat16 (GPU) or float32 (CPU)."""
    dtype = torch.float32 if a.device.type == "cpu" else torch.bfloat16
    return partial(torch.matmul, a.to(dtype), b.to(dtype).t())


def matmul_flops(
    device: torch.device,
    shapes: Sequence[tuple[int, int, int]] = (),
    min_seconds: float = 0.3,
    prepare: Callable[[Tensor, Tensor], Callable[[], object]] = prepare_matmul,
) -> float:
    """Return the FLOP/s of the fastest of several matmuls.

    Args:
        device: device of the operands.
        shapes: (m, k, n) of each matmul, m x k by k x n; default: several large ones.
        min_seconds: seconds to spend on each.
        prepare: given float32 tensors (m, k) and (n, k), returns a function that multiplies them.
    """
    rates = []
    for m, k, n in shapes or (SMALL_SHAPES if device.type == "cpu" else SHAPES):
        run = prepare(torch.randn(m, k, device=device), torch.randn(n, k, device=device))
        rates.append(2 * m * k * n / median_seconds(run, device, min_seconds))
    return max(rates)


def memory_bandwidth(device: torch.device, min_seconds: float = 0.3) -> float:
    """Return the memory bandwidth in bytes/s, comparable to a data sheet."""
    size = 2**27 if device.type == "cpu" else 2**30
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    seconds = median_seconds(lambda: target.copy_(source), device, min_seconds)
    return 2 * size / seconds / STREAM_EFFICIENCY
