"""Measure the cost of checkpoints: blocked training time and share of disk speed.

    .venv/bin/python benchmarks/checkpoint.py [--megabytes 100] [--rounds 5] [--steps 4]

One process trains a small Llama whose state (parameters and both AdamW moments) has about this
size.  Each round runs a few steps of each kind, so that a drift of the machine's speed affects all
kinds alike:

    nothing      no checkpoint
    background   an async save: training waits only for a copy
    waiting      a synchronous save: training waits until the checkpoint is on the disk
    the disk     plain writes of the same bytes into preallocated space, with fsync; plain reads

Saving computes fingerprints and loading verifies them, as in a run.  Written files are dropped from
the page cache before both reads, so that reads measure the disk.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import tempfile
import time
from datetime import date
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from weft.checkpoint.load import load_checkpoint
from weft.checkpoint.manager import CheckpointManager
from weft.checkpoint.manifest import checkpoint_path
from weft.checkpoint.state_dict import trainable_parameters
from weft.config.reader import read_job
from weft.data.loader import Batch
from weft.planning.plan import Machine
from weft.planning.resolve import resolve
from weft.training.setup import Built, Rank, build

BLOCK = 16 << 20


def build_model(megabytes: int) -> tuple[Built, int]:
    """Return a model whose state has about this size, and its number of bytes."""
    dim = max(64, int((megabytes * 2**20 / 12 / 8 / 12.5) ** 0.5) // 64 * 64)
    overrides = {
        "model.num_layers": "8",
        "model.dim": str(dim),
        "model.num_heads": str(dim // 64),
        "model.num_kv_heads": str(dim // 64),
        "model.ffn_dim": str(dim * 8 // 3 // 64 * 64),
        "model.vocab_size": "1024",
        "data.vocab_size": "1024",
        "train.seq_len": "256",
        "train.global_batch_size": "2",
        "run.dir": "/nonexistent",
    }
    job, _, errors = read_job("demo", list(overrides.items()))
    assert not errors, errors
    plan = resolve(job, Machine("cpu", devices=len(os.sched_getaffinity(0)), world_size=1))
    torch.set_num_threads(plan.num_threads)
    built = build(plan, Rank(0, 0, 1, torch.device("cpu")))
    return built, 12 * plan.num_params


def step(built: Built) -> float:
    """Run one optimizer step; return its seconds."""
    start_time = time.perf_counter()
    tokens_BT = torch.randint(0, 1024, (2, 256))
    built.train_step.forward_backward([Batch(tokens_BT, tokens_BT, None, None)])
    built.optimizer.step()
    built.optimizer.zero_grad()
    return time.perf_counter() - start_time


def drop_page_cache(directory: Path) -> None:
    """Drop the files of a directory from the page cache."""
    for path in directory.rglob("*"):
        if path.is_file():
            handle = os.open(path, os.O_RDONLY)
            os.fsync(handle)
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(handle)


def plain_write(path: Path, size: int) -> float:
    block = os.urandom(BLOCK)
    start_time = time.perf_counter()
    with path.open("wb", buffering=0) as file:
        os.posix_fallocate(file.fileno(), 0, size)
        for _ in range(size // BLOCK):
            file.write(block)
        os.fsync(file.fileno())
    return time.perf_counter() - start_time


def plain_read(path: Path) -> float:
    start_time = time.perf_counter()
    size = path.stat().st_size
    memory = memoryview(np.empty(size, np.uint8).data)  # a new buffer, as in a load
    with path.open("rb", buffering=0) as file:
        for at in range(0, size, BLOCK):
            file.readinto(memory[at : at + BLOCK])
    return time.perf_counter() - start_time


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=4, help="of each kind in a round")
    parser.add_argument("--folder", type=Path, default=Path("runs"), help="on the disk in question")
    options = parser.parse_args()
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="0", RANK="0", WORLD_SIZE="1")
    dist.init_process_group("gloo", init_method="tcp://localhost:0", rank=0, world_size=1)
    built, size = build_model(options.megabytes)
    options.folder.mkdir(parents=True, exist_ok=True)
    home = Path(tempfile.mkdtemp(prefix="weft-checkpoint-", dir=options.folder))
    savers = {
        kind: CheckpointManager(home / kind, 1, async_save=kind == "background")
        for kind in ("background", "waiting")
    }
    seconds: dict[str, list[float]] = {}

    def record(name: str, value: float) -> None:
        seconds.setdefault(name, []).append(value)

    try:
        for _ in range(3):
            step(built)
        for round_ in range(options.rounds + 1):
            for _ in range(options.steps):
                record("step", step(built))
            for kind, saver in list(savers.items())[:: 1 if round_ % 2 else -1]:
                os.sync()  # flush writes of other processes
                start_time = time.perf_counter()
                saver.save(
                    built.model_parts, built.optimizer, {"step": round_ + 1, "samples": round_ + 1}
                )
                stall = time.perf_counter() - start_time
                steps = 0
                while (saver._thread and saver._thread.is_alive()) or steps < options.steps:
                    value = step(built)
                    if saver._thread and saver._thread.is_alive():
                        record("step beside a save", value)
                    steps += 1
                saver.wait()
                if round_:  # the first round allocates memory
                    record(f"{kind}: stall", stall)
                    record(f"{kind}: write", saver.write_seconds)
            # Like a save, remove the old file once the new one exists.
            os.sync()
            before, plain = home / f"plain-{round_ - 1}", home / f"plain-{round_}"
            wrote = plain_write(plain, size)
            before.unlink(missing_ok=True)
            drop_page_cache(home)
            read = plain_read(plain)
            path = checkpoint_path(home / "waiting", round_ + 1)
            start_time = time.perf_counter()
            load_checkpoint(path, built.model_parts, built.optimizer)
            if round_:
                record("disk: write", wrote)
                record("disk: read", read * size / (size // BLOCK * BLOCK))
                record("load", time.perf_counter() - start_time)
    finally:
        shutil.rmtree(home)
        dist.destroy_process_group()

    middle = {name: statistics.median(values) for name, values in seconds.items()}

    def share(part: str, full: str) -> float:
        pairs = zip(seconds[part], seconds[full], strict=True)
        return statistics.median(p / w for p, w in pairs)

    params = sum(param.numel() for _, param in trainable_parameters(built.model_parts))
    print(f"{date.today()}  torch {torch.__version__}  Python {platform.python_version()}")
    print(
        f"{params / 1e6:.1f} M parameters, {size / 2**20:.0f} MiB a checkpoint, "
        f"{options.rounds} rounds, medians; pairs of one round where two are compared"
    )
    print(f"a step                        {middle['step']:.3f} s")
    for kind in savers:
        stall = middle[f"{kind}: stall"]
        print(f"stall, {kind:<22} {stall:.3f} s   {stall / middle['step']:.2f} steps")
    print(f"background / waiting          {share('background: stall', 'waiting: stall'):.3f}")
    if "step beside a save" in middle:
        print(f"a step beside a save / a step {middle['step beside a save'] / middle['step']:.2f}")
    for name, ours, disk in (
        ("write", "waiting: write", "disk: write"),
        ("read and verify", "load", "disk: read"),
    ):
        print(
            f"{name:<16} {size / 2**20 / middle[ours]:7.0f} MiB/s   "
            f"the disk {size / 2**20 / middle[disk]:7.0f} MiB/s   share {share(disk, ours):.2f}"
        )
    print(json.dumps({name: round(value, 5) for name, value in middle.items()}))


if __name__ == "__main__":
    main()
