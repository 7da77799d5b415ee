"""How fast this node's devices compute and speak with each other, measured by a process for each.

`measure` starts the processes and waits; none of its faults, and no GPU that hangs, is the
caller's, which needs neither torch nor a device.  `benchmarks/device.py` measures more, for the
planner, by the same functions.
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
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weft.cluster.node_facts import Measured
from weft.cluster.probes import nvidia
from weft.cluster.rank_exit import leave
from weft.monitor.process import PYTHON, die_with_parent, on_one_host

if TYPE_CHECKING:
    import torch
    from torch import Tensor

SHAPES = ((4096, 4096, 4096), (8192, 8192, 8192), (16384, 8192, 8192), (8192, 8192, 28672))
SMALL_SHAPES = ((1024, 1024, 1024), (2048, 1024, 4096), (512, 2048, 2048))
# Bytes that are summed over ranks, and that a device sends to another: enough for their full speed.
REDUCED, SENT = {"cuda": 1 << 29, "cpu": 1 << 24}, 1 << 28
BURST_SECONDS = 0.5  # of products on a CPU: several turns of a scheduler, whoever else computes
BUSY_SECONDS = 1.0  # under load, before clocks are looked at


def measure(device: str, ranks: int, threads: int, full: bool, limit: float) -> Measured:
    """Measure this node's devices, in so many processes of so many threads.

    Args:
        device: cpu or cuda.
        full: every pair of devices, and several shapes of products.
        limit: seconds until all is ended.
    """
    environment = os.environ | on_one_host(device) | {"OMP_NUM_THREADS": str(threads)}
    environment |= {"TORCH_CPP_LOG_LEVEL": "ERROR"}
    with tempfile.TemporaryDirectory(prefix="weft-doctor-") as folder:
        asked = {"kind": device, "size": ranks, "full": full, "limit": limit}
        processes = []
        for rank in range(ranks):
            one = json.dumps(asked | {"rank": rank, "store": f"{folder}/store"})
            command = [*PYTHON, "weft.cluster.device_benchmark", one]
            with open(f"{folder}/{rank}", "wb") as log:
                processes.append(subprocess.Popen(command, stdout=log, stderr=log, env=environment))
        late = _wait(processes, limit)
        told = [Path(folder, str(rank)).read_text("utf-8", "replace") for rank in range(ranks)]
    for rank, process in enumerate(processes):
        if process.returncode and rank not in late:
            return Measured(device, error=f"process {rank}: {last_line(told[rank])}")
    if late:
        who = ", ".join(map(str, late))
        return Measured(device, error=f"not done within {limit:.0f} s: process {who}")
    found = [json.loads(last_line(text)) for text in told]
    first = found[0]
    return Measured(
        device,
        nccl=tuple(first["nccl"]),
        flops=tuple(one["flops"] for one in found),
        bandwidth=tuple(one["bandwidth"] for one in found),
        same=tuple(one["same"] for one in found),
        busbw=first["busbw"],
        right=all(one["right"] for one in found),
        pairs=tuple((a, b, rate) for a, b, rate in first["pairs"]),
        clocks=first["clocks"],
        cpu_share=tuple(one["cpu_share"] for one in found if one["cpu_share"] is not None),
    )


def _wait(processes: Sequence[subprocess.Popen[bytes]], limit: float) -> list[int]:
    """Until all have ended; who had not when one failed, or in time, and was killed."""
    deadline = time.monotonic() + limit
    try:
        while None in (codes := [process.poll() for process in processes]):
            if any(codes) or time.monotonic() > deadline:
                return [rank for rank, code in enumerate(codes) if code is None]
            time.sleep(0.02)
        return []
    finally:
        for process in processes:
            process.kill()
            with suppress(subprocess.TimeoutExpired):  # a driver may hold it for ever
                process.wait(5)


def last_line(text: str) -> str:
    """The last line that says something."""
    return next((line for line in reversed(text.splitlines()) if line.strip()), "no word")


# --------------------------------------------------------------------------- in a process


def median_seconds(run: Callable[[], object], device: torch.device, least: float = 0.3) -> float:
    """Of one call: the median over as many as take ``least`` seconds, and at least five."""
    import torch

    def one() -> float:
        began = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - began

    one(), one()
    took: list[float] = []
    while sum(took) < least or len(took) < 5:
        took.append(one())
    return statistics.median(took)


def best_burst(run: Callable[[], object], threads: int, least: float) -> tuple[float, float]:
    """Call ``run`` on the CPU for ``least`` seconds, at least five times.

    Returns:
        Seconds of the fastest call, which other processes have disturbed least, and the share of
        processor time that all calls got of what ``threads`` threads could use: 1 on an idle
        machine, for a thread that waits for another one spins.
    """
    run(), run()
    took: list[float] = []
    began, used = time.perf_counter(), time.process_time()
    while sum(took) < least or len(took) < 5:
        start = time.perf_counter()
        run()
        took.append(time.perf_counter() - start)
    whole, used = time.perf_counter() - began, time.process_time() - used
    return min(took), min(1.0, used / (whole * threads))


def in_bf16(a: Tensor, b: Tensor) -> Callable[[], object]:
    """Their product, in the usual precision: on a CPU float32."""
    import torch

    dtype = torch.bfloat16 if a.is_cuda else torch.float32
    return partial(torch.matmul, a.to(dtype), b.to(dtype).t())


def product_flops(
    device: torch.device,
    shapes: Sequence[tuple[int, int, int]] = (),
    least: float = 0.3,
    prepare: Callable[[Tensor, Tensor], Callable[[], object]] = in_bf16,
) -> float:
    """FLOP/s of the fastest of some products.

    Args:
        shapes: m, k, n of each: m x k by k x n; none: several large ones.
        least: seconds to spend on each.
        prepare: from (m, k) and (n, k) in float32 makes what computes the product.
    """
    import torch

    rates = []
    for m, k, n in shapes or (SHAPES if device.type == "cuda" else SMALL_SHAPES):
        run = prepare(torch.randn(m, k, device=device), torch.randn(n, k, device=device))
        rates.append(2 * m * k * n / median_seconds(run, device, least))
    return max(rates)


def bandwidth(device: torch.device, least: float = 0.3) -> float:
    """Bytes/s of the device's memory, as a data sheet would say."""
    import torch

    from weft.estimate.cost import STREAMED

    size = 2**30 if device.type == "cuda" else 2**27
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size / median_seconds(lambda: target.copy_(source), device, least) / STREAMED


def repeats(device: torch.device) -> bool:
    """Whether a product comes out the same to the bit every time; else the device is faulty."""
    import torch

    size = 4096 if device.type == "cuda" else 256
    a = torch.randn(size, size, device=device)
    first = a @ a
    return all(torch.equal(a @ a, first) for _ in range(10))


def all_reduce(device: torch.device) -> tuple[float, bool]:
    """Bus bandwidth, 2 (n - 1) / n of the bytes over the seconds, and whether the sum is right."""
    import torch
    import torch.distributed as dist

    rank, size = dist.get_rank(), dist.get_world_size()
    x = torch.full((REDUCED[device.type] // 4,), float(rank + 1), device=device)
    dist.all_reduce(x)
    right = bool((x == size * (size + 1) / 2).all())
    seconds = median_seconds(lambda: dist.all_reduce(x), device, 0.0)  # as often in every rank
    return 2 * (size - 1) / size * REDUCED[device.type] / seconds, right


def copies(full: bool) -> Iterator[tuple[int, int, float]]:
    """Bytes/s between GPUs, of each to the next, or of every pair."""
    import torch

    count = torch.cuda.device_count()
    memory = [torch.ones(SENT, dtype=torch.uint8, device=f"cuda:{i}") for i in range(count)]
    for a in range(count):
        for b in range(count) if full else [(a + 1) % count]:
            if a != b:
                send = partial(memory[b].copy_, memory[a])
                yield a, b, SENT / median_seconds(send, memory[a].device, 0.0)


def clocks_under_load(device: torch.device, look: bool) -> str:
    """What nvidia-smi says while this device, as all others, computes."""
    import torch

    a = torch.randn(8192, 8192, device=device, dtype=torch.bfloat16)
    until, said = time.monotonic() + BUSY_SECONDS, ""
    while time.monotonic() < until:
        for _ in range(50):
            a @ a
        if look and not said and time.monotonic() > until - BUSY_SECONDS / 2:
            said = nvidia()
        torch.cuda.synchronize(device)
    return said


def be_measured(rank: int, size: int, kind: str, store: str, full: bool, limit: float) -> Any:
    """What one process finds, as JSON values."""
    import torch
    import torch.distributed as dist

    on_gpu = kind == "cuda"
    device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if on_gpu else "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=limit),
    )

    def together() -> None:
        dist.all_reduce(torch.zeros(1))  # by gloo, which leaves GPUs alone

    nccl: Callable[[], tuple[int, ...]] = torch.cuda.nccl.version
    least = 0.3 if on_gpu else 0.1
    shapes = () if full else (SHAPES[1] if on_gpu else SMALL_SHAPES[0],)
    together()
    flops, cpu_share = 0.0, None
    if on_gpu:
        flops = product_flops(device, shapes, least)
    else:
        for m, k, n in shapes or SMALL_SHAPES:
            run = in_bf16(torch.randn(m, k), torch.randn(n, k))
            seconds, share = best_burst(run, torch.get_num_threads(), BURST_SECONDS)
            flops, cpu_share = max(flops, 2 * m * k * n / seconds), min(cpu_share or 1.0, share)
    found: dict[str, Any] = {
        "nccl": nccl() if on_gpu else (),
        "flops": flops,
        "cpu_share": cpu_share,
        "bandwidth": bandwidth(device, least),
        "same": repeats(device),
        "clocks": clocks_under_load(device, rank == 0) if on_gpu else "",
    }
    together()
    found["pairs"] = list(copies(full)) if on_gpu and rank == 0 else []
    together()
    found["busbw"], found["right"] = all_reduce(device) if size > 1 else (0.0, True)
    together()
    return found


def main() -> None:
    """Print what is found as the last line."""
    die_with_parent()
    print(json.dumps(be_measured(**json.loads(sys.argv[1]))))
    leave(0)


if __name__ == "__main__":
    main()
