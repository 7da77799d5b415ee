"""Benchmark of this node's devices and their links, in one process per device.

`measure_devices` starts the processes and waits for them, so that neither a crash nor a GPU that
hangs affects the caller, which needs neither torch nor a device.  `benchmarks/device.py` uses the
same functions to calibrate the planner.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weft.cluster.node_facts import DeviceMeasurements
from weft.cluster.nvidia_tests import run_all_reduce
from weft.cluster.rank_exit import exit_process
from weft.config.accelerators import GPU
from weft.monitor.nvml import GpuState, parse_state, query_gpus
from weft.monitor.process import PYTHON, die_with_parent, single_host_env

if TYPE_CHECKING:
    import torch
    from torch import Tensor

SHAPES = ((4096, 4096, 4096), (8192, 8192, 8192), (16384, 8192, 8192), (8192, 8192, 28672))
SMALL_SHAPES = ((1024, 1024, 1024), (2048, 1024, 4096), (512, 2048, 2048))
# Bytes of an all-reduce and of a copy between devices: enough to reach full speed.
ALL_REDUCE_BYTES, COPY_BYTES = {GPU: 1 << 29, "cpu": 1 << 24}, 1 << 28
BURST_SECONDS = 0.5  # of matmuls on a CPU: several time slices of the scheduler
LOAD_SECONDS = 1.0  # before the clocks are read


def measure_devices(
    device: str, ranks: int, threads: int, full: bool, timeout: float
) -> DeviceMeasurements:
    """Measure this node's devices with ``ranks`` processes of ``threads`` threads.

    Args:
        device: cpu, or the type of GPUs.
        ranks: number of processes; on GPUs, one per device.
        threads: OpenMP threads of each process.
        full: measure every pair of devices, and several matmul shapes.
        timeout: seconds until all processes are killed.
    """
    by_nccl_tests = run_all_reduce(ranks) if device == GPU and ranks > 1 else None
    environment = os.environ | single_host_env(device) | {"OMP_NUM_THREADS": str(threads)}
    environment |= {"TORCH_CPP_LOG_LEVEL": "ERROR"}
    with tempfile.TemporaryDirectory(prefix="weft-doctor-") as directory:
        arguments = {"kind": device, "size": ranks, "full": full, "timeout": timeout}
        arguments["all_reduce"] = by_nccl_tests is None
        processes = []
        for rank in range(ranks):
            argument = json.dumps(arguments | {"rank": rank, "store": f"{directory}/store"})
            command = [*PYTHON, "weft.cluster.device_benchmark", argument]
            with open(f"{directory}/{rank}", "wb") as log:
                processes.append(subprocess.Popen(command, stdout=log, stderr=log, env=environment))
        late = _wait(processes, timeout)
        logs = [Path(directory, str(rank)).read_text("utf-8", "replace") for rank in range(ranks)]
    for rank, process in enumerate(processes):
        if process.returncode and rank not in late:
            return DeviceMeasurements(device, error=f"process {rank}: {last_line(logs[rank])}")
    if late:
        names = ", ".join(map(str, late))
        error = f"no result within {timeout:.0f} s: process {names}"
        return DeviceMeasurements(device, error=error)
    results = [json.loads(last_line(text)) for text in logs]
    first = results[0]
    return DeviceMeasurements(
        device,
        nccl=tuple(first["nccl"]),
        flops=tuple(result["flops"] for result in results),
        bandwidth=tuple(result["bandwidth"] for result in results),
        same=tuple(result["same"] for result in results),
        busbw=by_nccl_tests[0] if by_nccl_tests else first["busbw"],
        right=by_nccl_tests[1] if by_nccl_tests else all(r["right"] for r in results),
        has_nccl_tests=by_nccl_tests is not None,
        pairs=tuple((a, b, rate) for a, b, rate in first["pairs"]),
        loaded=parse_state(first["loaded"]).gpus,
        cpu_share=tuple(r["cpu_share"] for r in results if r["cpu_share"] is not None),
    )


def _wait(processes: Sequence[subprocess.Popen[bytes]], timeout: float) -> list[int]:
    """Wait for all processes; return the ranks that it had to kill."""
    deadline = time.monotonic() + timeout
    try:
        while None in (codes := [process.poll() for process in processes]):
            if any(codes) or time.monotonic() > deadline:
                return [rank for rank, code in enumerate(codes) if code is None]
            time.sleep(0.02)
        return []
    finally:
        for process in processes:
            process.kill()
            with suppress(subprocess.TimeoutExpired):  # a driver may block it forever
                process.wait(5)


def last_line(text: str) -> str:
    """Return the last line that is not blank."""
    return next((line for line in reversed(text.splitlines()) if line.strip()), "no output")


# --------------------------------------------------------------------------- measurements


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
    import torch

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
    import torch

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
    import torch

    rates = []
    for m, k, n in shapes or (SMALL_SHAPES if device.type == "cpu" else SHAPES):
        run = prepare(torch.randn(m, k, device=device), torch.randn(n, k, device=device))
        rates.append(2 * m * k * n / median_seconds(run, device, min_seconds))
    return max(rates)


def memory_bandwidth(device: torch.device, min_seconds: float = 0.3) -> float:
    """Return the memory bandwidth in bytes/s, comparable to a data sheet."""
    import torch

    from weft.estimate.cost import STREAM_EFFICIENCY

    size = 2**27 if device.type == "cpu" else 2**30
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    seconds = median_seconds(lambda: target.copy_(source), device, min_seconds)
    return 2 * size / seconds / STREAM_EFFICIENCY


def is_deterministic(device: torch.device) -> bool:
    """Return True if repeated matmuls are bitwise equal."""
    import torch

    size = 256 if device.type == "cpu" else 4096
    a = torch.randn(size, size, device=device)
    first = a @ a
    return all(torch.equal(a @ a, first) for _ in range(10))


def benchmark_all_reduce(device: torch.device) -> tuple[float, bool]:
    """Return the bus bandwidth, 2 (n - 1) / n x bytes/s, and True if the sum is right."""
    import torch
    import torch.distributed as dist

    rank, size = dist.get_rank(), dist.get_world_size()
    x = torch.full((ALL_REDUCE_BYTES[device.type] // 4,), float(rank + 1), device=device)
    dist.all_reduce(x)
    right = bool((x == size * (size + 1) / 2).all())
    # Without a minimum time: the same number of calls on every rank.
    seconds = median_seconds(lambda: dist.all_reduce(x), device, 0.0)
    return 2 * (size - 1) / size * ALL_REDUCE_BYTES[device.type] / seconds, right


def benchmark_peer_copies(full: bool) -> Iterator[tuple[int, int, float]]:
    """Yield source, destination and bytes/s of copies between GPUs."""
    import torch

    count = torch.accelerator.device_count()
    memory = [torch.ones(COPY_BYTES, dtype=torch.uint8, device=f"{GPU}:{i}") for i in range(count)]
    for a in range(count):
        for b in range(count) if full else [(a + 1) % count]:
            if a != b:
                send = partial(memory[b].copy_, memory[a])
                yield a, b, COPY_BYTES / median_seconds(send, memory[a].device, 0.0)


def query_under_load(device: torch.device, should_query: bool) -> GpuState:
    """Load this device; return the state of all GPUs under load if ``should_query``."""
    import torch

    a = torch.randn(8192, 8192, device=device, dtype=torch.bfloat16)
    deadline, state = time.monotonic() + LOAD_SECONDS, GpuState()
    while time.monotonic() < deadline:
        for _ in range(50):
            a @ a
        if should_query and not state.gpus and time.monotonic() > deadline - LOAD_SECONDS / 2:
            state = query_gpus()
        torch.accelerator.synchronize(device)
    return state


def benchmark_rank(
    rank: int, size: int, kind: str, store: str, full: bool, timeout: float, all_reduce: bool
) -> Any:
    """Run the benchmark as one of ``size`` ranks; return the results as JSON values."""
    import torch
    import torch.distributed as dist

    is_gpu = kind == GPU
    device = torch.device(GPU, rank) if is_gpu else torch.device("cpu")
    if is_gpu:
        torch.accelerator.set_device_index(device)
    else:
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    dist.init_process_group(
        f"cpu:gloo,{GPU}:nccl" if is_gpu else "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=timeout),
    )

    def barrier() -> None:
        dist.all_reduce(torch.zeros(1))  # with gloo, which does not use the GPUs

    nccl: Callable[[], tuple[int, ...]] = torch.get_device_module(GPU).nccl.version
    min_seconds = 0.3 if is_gpu else 0.1
    shapes = () if full else (SHAPES[1] if is_gpu else SMALL_SHAPES[0],)
    barrier()
    flops, cpu_share = 0.0, None
    if is_gpu:
        flops = matmul_flops(device, shapes, min_seconds)
    else:
        for m, k, n in shapes or SMALL_SHAPES:
            run = prepare_matmul(torch.randn(m, k), torch.randn(n, k))
            seconds, share = time_cpu_burst(run, torch.get_num_threads(), BURST_SECONDS)
            flops, cpu_share = max(flops, 2 * m * k * n / seconds), min(cpu_share or 1.0, share)
    results: dict[str, Any] = {
        "nccl": nccl() if is_gpu else (),
        "flops": flops,
        "cpu_share": cpu_share,
        "bandwidth": memory_bandwidth(device, min_seconds),
        "same": is_deterministic(device),
        "loaded": asdict(query_under_load(device, rank == 0) if is_gpu else GpuState()),
    }
    barrier()
    results["pairs"] = list(benchmark_peer_copies(full)) if is_gpu and rank == 0 else []
    barrier()
    measures = size > 1 and all_reduce
    results["busbw"], results["right"] = benchmark_all_reduce(device) if measures else (0.0, True)
    barrier()
    return results


def main() -> None:
    """Run the benchmark as one rank, and print the results as the last line of output."""
    die_with_parent()
    print(json.dumps(benchmark_rank(**json.loads(sys.argv[1]))))
    exit_process(0)


if __name__ == "__main__":
    main()
