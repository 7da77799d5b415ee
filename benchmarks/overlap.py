"""Measure the share of collective time hidden behind compute, from a trace.

Ranks of one machine train a small Llama under FSDP2, on CPU with gloo or on CUDA with NCCL.
torch.profiler traces one step of rank 0.  The hidden share is the fraction of the time with at
least one collective in which compute runs too: a matmul on CPU, any other kernel on CUDA.

    .venv/bin/python benchmarks/overlap.py [--ranks 2] [--layers 6] [--dim 512]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import socket
import statistics
import tempfile
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn
from torch.profiler import ProfilerActivity, profile

from weft.config.reader import read_job
from weft.config.schema import RunSection
from weft.data.loader import Batch
from weft.plan.resolve import resolve
from weft.train.machine import detect_machine
from weft.train.setup import Rank, build

VARIANTS = {
    "always (ZeRO-3)": {},
    "always, 2 blocks ahead": {"parallel.fsdp_prefetch": "2"},
    "never (ZeRO-2)": {"parallel.reshard_after_forward": "never"},
}
STEPS = 5

Spans = list[tuple[float, float]]


def main() -> None:
    parser = argparse.ArgumentParser(description="What of the collectives is hidden?")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--dim", type=int, default=512)
    options = parser.parse_args()
    kind = torch.cuda.get_device_name(0) if torch.cuda.is_available() else platform.processor()
    print(f"{date.today()}, torch {torch.__version__}, {options.ranks} ranks, {kind}")
    print("| reshard_after_forward | step ms | collectives ms | hidden |\n|---|---|---|---|")
    for name, variant in VARIANTS.items():
        with tempfile.NamedTemporaryFile("r", suffix=".json") as result:
            spawn(_rank, (options, variant, _free_port(), result.name), options.ranks)
            step, exchanging, hidden = json.loads(result.read())
        print(f"| {name} | {step:.0f} | {exchanging:.0f} | {hidden:.0%} |", flush=True)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def _rank(
    rank: int, options: argparse.Namespace, variant: dict[str, str], port: int, result: str
) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    overrides = {
        "model.num_layers": str(options.layers),
        "model.dim": str(options.dim),
        "model.num_heads": "8",
        "model.num_kv_heads": "4",
        "model.ffn_dim": str(3 * options.dim),
        "train.seq_len": "256",
        "train.global_batch_size": str(2 * options.ranks),
        "run.dir": "/nonexistent",
        **variant,
    }
    job, _, errors = read_job("demo", list(overrides.items()))
    assert not errors, errors
    machine = replace(
        detect_machine(RunSection()), world_size=options.ranks, local_world_size=options.ranks
    )
    plan = resolve(job, machine)
    device = torch.device("cuda", rank) if plan.device == "cuda" else torch.device("cpu")
    if plan.device == "cuda":
        torch.cuda.set_device(device)
    torch.set_num_threads(plan.num_threads)
    backend = "cpu:gloo,cuda:nccl" if plan.device == "cuda" else "gloo"
    dist.init_process_group(backend, rank=rank, world_size=options.ranks)
    built = build(plan, Rank(rank, rank, options.ranks, device))
    tokens = torch.randint(0, 4096, (2, 256), device=device)
    batch = Batch(tokens, tokens, None, None)

    def step() -> None:
        built.train_step.forward_backward([batch])
        built.optimizer.step()
        built.optimizer.zero_grad()

    for _ in range(2):
        step()
    activities = [ProfilerActivity.CPU]
    if plan.device == "cuda":
        activities.append(ProfilerActivity.CUDA)
    results = []
    for _ in range(STEPS):
        dist.barrier()
        with profile(activities=activities) as trace:
            step()
            if plan.device == "cuda":
                torch.cuda.synchronize()
        with tempfile.TemporaryDirectory() as directory:
            path = Path(directory, "trace.json")
            trace.export_chrome_trace(str(path))
            results.append(_read(json.loads(path.read_text()), plan.device == "cuda"))
    if rank == 0:
        Path(result).write_text(
            json.dumps([statistics.median(x) for x in zip(*results, strict=True)])
        )
    dist.destroy_process_group()


def _read(trace: dict[str, Any], cuda: bool) -> tuple[float, float, float]:
    """Return milliseconds of the step and of collectives, and the hidden share."""
    events = [e for e in trace["traceEvents"] if e.get("ph") == "X"]
    if cuda:
        kernels = [e for e in events if e.get("cat") == "kernel"]
        exchanges = _union(e for e in kernels if "nccl" in e["name"].lower())
        products = _union(e for e in kernels if "nccl" not in e["name"].lower())
    else:
        exchanges = _union(e for e in events if e["name"].startswith("gloo:"))
        products = _union(e for e in events if e["name"] in ("aten::mm", "aten::addmm"))
    everything = _union(e for e in events if e.get("cat") in ("cpu_op", "kernel"))
    hidden = sum(
        max(0.0, min(end, other_end) - max(begin, other_begin))
        for begin, end in exchanges
        for other_begin, other_end in products
    )
    total = sum(end - begin for begin, end in exchanges)
    step = everything[-1][1] - everything[0][0]
    return step / 1000, total / 1000, hidden / total


def _union(events: Any) -> Spans:
    """Return the intervals in which at least one event is active."""
    spans: Spans = []
    for begin, end in sorted((e["ts"], e["ts"] + e["dur"]) for e in events):
        if spans and begin <= spans[-1][1]:
            spans[-1] = (spans[-1][0], max(end, spans[-1][1]))
        else:
            spans.append((begin, end))
    return spans


if __name__ == "__main__":
    main()
