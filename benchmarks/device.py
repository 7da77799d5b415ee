"""Measure this machine for the planner: compute, memory, launches and links.

    python benchmarks/device.py                                  one device
    torchrun --nproc-per-node 8 benchmarks/device.py --write     with the links of a node

The benchmark prints an entry for `weft/planning/clusters.toml`, next to the values of that table.
``--write`` appends the entry to the user's clusters.toml, which every plan reads; an existing entry
is not changed.  On a CPU, matmuls are float32, with as many threads as a rank of `weft train`.

    achieved    FLOP/s of the best of several large matmuls, median of repetitions
    flash       causal attention, 8,192 keys (1,024 on a CPU), heads of 128, forward and backward
    bandwidth   bytes/s read and written by a copy, divided by 0.85: the value of a data sheet
    launch      host seconds of a small kernel while the device is busy
    link        bus bandwidth and latency of all-gathers over all ranks
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import tomli_w
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from weft.estimate.device_speed import matmul_flops, median_seconds, memory_bandwidth
from weft.planning.devices import (
    CPU_DEVICE,
    GIB,
    Device,
    get_device,
    match_device,
    user_cluster_files,
)


def in_float8(a: Tensor, b: Tensor) -> Callable[[], Tensor]:
    """Return a float8 matmul of (m, k) and (n, k), with a scale for each matrix."""
    one = torch.ones((), device=a.device)
    a8, b8 = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn).t()
    options: dict[str, Any] = {"scale_a": one, "scale_b": one, "out_dtype": torch.bfloat16}
    return partial(torch._scaled_mm, a8, b8, use_fast_accum=True, **options)


def attention(device: torch.device) -> tuple[float, float]:
    """Return FLOP/s of causal attention, forward and backward."""
    on_gpu = device.type == "cuda"
    length, heads, dtype = (8192, 32, torch.bfloat16) if on_gpu else (1024, 4, torch.float32)
    q, k, v = (
        torch.randn(1, heads, length, 128, device=device, dtype=dtype, requires_grad=True)
        for _ in range(3)
    )
    flops = 2 * 2 * heads * length * length * 128 / 2  # two matmuls, halved by the causal mask

    def forward() -> Tensor:
        return scaled_dot_product_attention(q, k, v, is_causal=True)

    out = forward()
    grad = torch.randn_like(out)
    backward = median_seconds(
        lambda: torch.autograd.grad(out, (q, k, v), grad, retain_graph=True), device
    )
    return flops / median_seconds(forward, device), 2.5 * flops / backward


def launch(device: torch.device) -> float:
    """Return host seconds of a small kernel that autograd records on a busy device."""
    x = torch.ones(64, device=device, requires_grad=True)
    count = 500
    seconds = []
    for _ in range(9):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            torch.cuda._sleep(int(2e8))  # keep the device busy, so that the host never waits
        start_time = time.perf_counter()
        y = x
        for _ in range(count):
            y = y * 1.0001
        seconds.append((time.perf_counter() - start_time) / count)
    return statistics.median(seconds)


def links(device: torch.device) -> dict[str, float]:
    """Measure all-gathers: bytes/s per rank, and seconds per hop."""
    ranks = dist.get_world_size()

    def gather(size: int) -> float:
        local = torch.ones(size // ranks, dtype=torch.uint8, device=device)
        full = torch.empty(size // ranks * ranks, dtype=torch.uint8, device=device)
        dist.barrier()
        return median_seconds(lambda: dist.all_gather_into_tensor(full, local), device, 0.0)

    large = 2**30 if device.type == "cuda" else 2**26
    small, big = gather(1024 * ranks), gather(large)
    return {
        "bandwidth": float(f"{large * (ranks - 1) / ranks / max(big - small, 1e-9):.4g}"),
        "latency": float(f"{max(small / (ranks - 1), 1e-7):.3g}"),
    }


def measure(device: torch.device) -> dict[str, Any]:
    """Return the entry of the device."""
    forward, backward = attention(device)
    achieved = {"bf16": matmul_flops(device)}
    if device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9):
        achieved["float8"] = matmul_flops(device, prepare=in_float8)
    entry: dict[str, Any] = {
        "achieved": {name: float(f"{rate:.4g}") for name, rate in achieved.items()},
        "bandwidth": float(f"{memory_bandwidth(device):.4g}"),
        "flash": [float(f"{forward:.4g}"), float(f"{backward:.4g}")],
        "launch": float(f"{launch(device):.3g}"),
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        entry |= {
            "memory_gib": round(properties.total_memory / GIB, 1),
            "cores": properties.multi_processor_count,
            "capability": list(torch.cuda.get_device_capability(device)),
        }
    return entry


def keep_known_values(entry: dict[str, Any], known: Device) -> Iterator[str]:
    """Yield the lines of the measured entry, followed by the values of the table."""
    for key, value in entry.items():
        if key in ("like", "link"):
            continue
        remote = getattr(known, key)
        if key == "achieved":
            for name, rate in value.items():
                yield f"  achieved {name:<10} {rate:>10.4g}   {known.flops(name):>10.4g}"
        elif isinstance(value, list):
            pairs = zip(value, remote, strict=True)
            yield f"  {key:<19} " + ", ".join(f"{a:.4g} ({b:.4g})" for a, b in pairs)
        else:
            yield f"  {key:<19} {value:>10.4g}   {remote:>10.4g}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", action="store_true", help="append to the user's clusters.toml")
    parser.add_argument("--name", help="of the device (default: as it is known, or its driver's)")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    on_gpu = torch.cuda.is_available()
    local = int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device("cuda", local) if on_gpu else torch.device("cpu")
    several = int(os.environ.get("WORLD_SIZE", "1")) > 1
    if on_gpu:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(
            max(1, len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
        )
    if several:
        dist.init_process_group("nccl" if on_gpu else "gloo")
    driver = torch.cuda.get_device_name(device) if on_gpu else CPU_DEVICE
    known = match_device(driver) if on_gpu else get_device(CPU_DEVICE)
    name = options.name or (known.name if known else driver.removeprefix("NVIDIA "))
    entry = measure(device)
    tables: dict[str, Any] = {"devices": {name: entry}}
    if known is not None and name != known.name:
        entry["like"] = known.name
    if several:
        entry["link"] = f"measured of {name}"
        tables["links"] = {entry["link"]: links(device)}
        dist.barrier()
        dist.destroy_process_group()
    elif known is None:
        entry["link"] = "pcie4"  # until a run with torchrun measures it
    if int(os.environ.get("RANK", "0")) > 0:
        return
    if options.json:
        print(json.dumps(tables, indent=2))
    else:
        print(f"{driver}, torch {torch.__version__}: measured, and in the planner's table")
        for line in keep_known_values(entry, known) if known else ():
            print(line)
        print(f"\n{tomli_w.dumps(tables)}")
    if options.write:
        path = user_cluster_files()[0]
        old = path.read_text("utf-8") if path.is_file() else ""
        if f'[devices."{name}"]' in old or f"[devices.{name}]" in old:
            raise SystemExit(f"{path} has an entry of {name} already: change it by hand")
        path.parent.mkdir(parents=True, exist_ok=True)
        created = (
            f"\n# benchmarks/device.py, {time.strftime('%Y-%m-%d')}, torch {torch.__version__}\n"
        )
        path.write_text(old + created + tomli_w.dumps(tables), "utf-8")
        if not options.json:
            print(f"written to {path}")


if __name__ == "__main__":
    main()
