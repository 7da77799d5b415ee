"""Measure each activation checkpointing mode: peak memory and step time.

One process runs on CUDA if available, else on the CPU, where torch's MemTracker tracks the bytes
that operators allocate and free.  The table also has the planner's prediction.  Each round runs
every mode; times are medians of ratios within a round.

    .venv/bin/python benchmarks/memory.py [--layers 8] [--seq_len 1024] [--rounds 5] [--compile]
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import time
from dataclasses import replace
from datetime import date

import torch
import torch.distributed as dist
from torch.distributed._tools.mem_tracker import MemTracker

from weft.config.reader import read_job
from weft.config.schema import RunSection
from weft.data.loader import Batch
from weft.estimate.forecast import forecast
from weft.planning.plan import Machine, Plan
from weft.planning.resolve import resolve
from weft.training.machine import detect_machine
from weft.training.setup import Built, Rank, build

VARIANTS = {
    "none": {},
    "full": {"activation_checkpoint.mode": "full"},
    "full, every 2nd block": {
        "activation_checkpoint.mode": "full",
        "activation_checkpoint.every_n_layers": "2",
    },
    "selective": {"activation_checkpoint.mode": "selective"},
    "selective, all products": {
        "activation_checkpoint.mode": "selective",
        "activation_checkpoint.recompute_every_n_matmuls": "0",
    },
    "budget 0.25": {
        "activation_checkpoint.mode": "budget",
        "activation_checkpoint.memory_budget": "0.25",
    },
    "budget 0.5": {
        "activation_checkpoint.mode": "budget",
        "activation_checkpoint.memory_budget": "0.5",
    },
    "budget 0.75": {
        "activation_checkpoint.mode": "budget",
        "activation_checkpoint.memory_budget": "0.75",
    },
    "offload": {"activation_checkpoint.offload": "true"},
    "full, offload": {
        "activation_checkpoint.mode": "full",
        "activation_checkpoint.offload": "true",
    },
}


def planned(options: argparse.Namespace, variant: dict[str, str]) -> tuple[Plan, Machine]:
    overrides = {
        "model.preset": options.preset,
        "model.num_layers": str(options.layers),
        "train.seq_len": str(options.seq_len),
        "train.global_batch_size": str(options.rows),
        "train.microbatch_size": str(options.rows),
        "compile.enable": str(options.compile).lower(),
        "run.dir": "/nonexistent",
        **variant,
    }
    job, _, errors = read_job("demo", list(overrides.items()))
    assert not errors, errors
    machine = replace(detect_machine(RunSection()), world_size=1, local_world_size=1)
    return resolve(job, machine), machine


def predicted(options: argparse.Namespace, variant: dict[str, str]) -> float:
    """Return the planner's prediction of `peak` in MiB, for eager blocks."""
    return sum(forecast(*planned(options, variant), None).memory.live_bytes.values()) / 2**20


def build_one(options: argparse.Namespace, variant: dict[str, str]) -> tuple[Built, torch.device]:
    plan, _ = planned(options, variant)
    device = torch.device(plan.device)
    torch.set_num_threads(plan.num_threads)
    return build(plan, Rank(0, 0, 1, device)), device


def step(built: Built, tokens_BT: torch.Tensor) -> float:
    start_time = time.perf_counter()
    built.train_step.forward_backward([Batch(tokens_BT, tokens_BT, None, None)])
    built.optimizer.step()
    built.optimizer.zero_grad()
    if tokens_BT.device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start_time


def peak(built: Built, tokens_BT: torch.Tensor) -> float:
    """Return the peak of a step in MiB, parameters and optimizer states included."""
    if tokens_BT.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        step(built, tokens_BT)
        return torch.cuda.max_memory_allocated() / 2**20
    tracker = MemTracker()
    tracker.track_external(*built.model_parts, built.optimizer)
    with tracker:
        step(built, tokens_BT)
    return float(tracker.get_tracker_snapshot("peak")[tokens_BT.device]["Total"]) / 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--preset", default="toy")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--seq_len", type=int, default=1024)
    parser.add_argument("--rows", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--compile", action="store_true")
    options = parser.parse_args()
    predictions = {name: predicted(options, case) for name, case in VARIANTS.items()}
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    os.environ.update(RANK="0", WORLD_SIZE="1")
    dist.init_process_group(backend, init_method="tcp://localhost:0", rank=0, world_size=1)
    peaks: dict[str, float] = {}
    seconds: dict[str, list[float]] = {name: [] for name in VARIANTS}
    params = 0
    for round_ in range(options.rounds):
        for name, variant in VARIANTS.items():  # one model at a time is in memory
            built, device = build_one(options, variant)
            params = sum(p.numel() for part in built.model_parts for p in part.parameters())
            tokens_BT = torch.randint(0, 512, (options.rows, options.seq_len), device=device)
            step(built, tokens_BT)  # warm up: compile, choose, allocate
            if round_ == 0:
                peaks[name] = peak(built, tokens_BT)
            seconds[name].append(statistics.median(step(built, tokens_BT) for _ in range(3)))
            del built
    dist.destroy_process_group()
    device_name = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    print(
        f"{date.today()}  torch {torch.__version__}  Python {platform.python_version()}  "
        f"{device_name}"
    )
    print(
        f"{params / 1e6:.1f} M parameters, {options.layers} blocks, {options.rows} rows of "
        f"{options.seq_len} tokens{', compiled' if options.compile else ''}"
    )
    print(f"{'':<26}{'peak MiB':>10}{'of none':>9}{'predicted':>10}{'s a step':>10}{'of none':>9}")
    for name in VARIANTS:
        times = statistics.median(seconds[name])
        pairs = zip(seconds[name], seconds["none"], strict=True)
        share = statistics.median(a / b for a, b in pairs)
        print(
            f"{name:<26}{peaks[name]:>10.0f}{peaks[name] / peaks['none']:>9.2f}"
            f"{predictions[name]:>10.0f}"
            f"{times:>10.3f}{share:>9.2f}"
        )


if __name__ == "__main__":
    main()
