"""Benchmark of this node's devices and their links, in one process per device.

`measure_devices` starts the processes and waits for them, so that neither a crash nor a GPU that
hangs affects the caller, which needs neither torch nor a device.
"""

from __future__ import annotations

import json
import os
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

from weft.config.accelerators import GPU
from weft.doctor.node_facts import DeviceMeasurements
from weft.doctor.nvidia_tests import run_all_reduce
from weft.monitor.nvml import GpuState, parse_state, query_gpus
from weft.monitor.process import PYTHON, die_with_parent, exit_process, single_host_env

if TYPE_CHECKING:
    import torch

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
            command = [*PYTHON, "weft.doctor.device_benchmark", argument]
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

    from weft.estimate.device_speed import median_seconds

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

    from weft.estimate.device_speed import median_seconds

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

    from weft.estimate import device_speed

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
    all_shapes = device_speed.SHAPES if is_gpu else device_speed.SMALL_SHAPES
    shapes = all_shapes if full else all_shapes[:1]
    barrier()
    flops, cpu_share = 0.0, None
    if is_gpu:
        flops = device_speed.matmul_flops(device, shapes, min_seconds)
    else:
        for m, k, n in shapes:
            run = device_speed.prepare_matmul(torch.randn(m, k), torch.randn(n, k))
            threads = torch.get_num_threads()
            seconds, share = device_speed.time_cpu_burst(run, threads, BURST_SECONDS)
            flops, cpu_share = max(flops, 2 * m * k * n / seconds), min(cpu_share or 1.0, share)
    results: dict[str, Any] = {
        "nccl": nccl() if is_gpu else (),
        "flops": flops,
        "cpu_share": cpu_share,
        "bandwidth": device_speed.memory_bandwidth(device, min_seconds),
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
