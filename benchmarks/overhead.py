"""The trainer's own cost: weft against a bare PyTorch loop of the same operations.

    .venv/bin/python benchmarks/overhead.py [--steps 150] [--threads 1] [--section.key value ...]

Both train the same small Llama on the same text, with the same batches, optimizer, clipping and
schedule, in one process.  They take turns step by step, so that a machine whose speed drifts
slows both alike: weft's loop runs in a thread of its own that hands over each time it asks for
a batch.  Both compute the same, which is checked: the losses of the first steps must be equal to
rounding.  (Later they drift apart by it, as any two runs do whose sums are ordered otherwise.)
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import statistics
import tempfile
import threading
import time
from datetime import date
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from rich.console import Console

from weft.cli import split_overrides
from weft.data.loader import Batch, Loader, sample_index
from weft.data.prepare import prepare
from weft.data.store import Store
from weft.job import Job, read_job
from weft.models import load_family
from weft.parallel.init import init_params
from weft.plan.resolve import Machine, Plan, resolve
from weft.train import loop
from weft.train.setup import Rank

WARM_UP = 10


class Turns:
    """Two threads, of which one runs at a time."""

    def __init__(self) -> None:
        self.weft, self.bare = threading.Semaphore(0), threading.Semaphore(0)
        self.weft_seconds: list[float] = []
        self.bare_seconds: list[float] = []


def bare_loop(job: Job, plan: Plan, store: Store, turns: Turns) -> list[float]:
    """What one would write by hand."""
    torch.set_num_threads(plan.threads)
    family = load_family("llama")
    model = family.build(plan.model)
    named = list(model.named_parameters())
    init_params(named, job.train.seed, lambda name: family.init_of(name, plan.model))
    groups = [
        {"params": [p for n, p in named if family.decays(n)], "weight_decay": 0.1},
        {"params": [p for n, p in named if not family.decays(n)], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1.0, betas=(0.9, 0.95), fused=True)
    tokens = np.memmap(store.path / store.manifest.train.shards[0].file, np.uint16, "r")
    T, B, steps, warm = job.train.seq_len, job.train.global_batch, job.train.steps, 30
    windows = (len(tokens) - 1) // T
    losses = []
    for step in range(1, steps + 1):
        turns.bare.acquire()
        began = time.perf_counter()
        order = sample_index(np.arange((step - 1) * B, step * B), windows, job.train.seed)
        rows = np.stack([tokens[i * T : i * T + T + 1] for i in order]).astype(np.int64)
        inputs, targets = torch.from_numpy(rows[:, :-1]), torch.from_numpy(rows[:, 1:])
        logits = model(inputs)
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), job.optim.max_grad_norm)
        done = (step - warm) / (steps - warm)
        share = 0.05 + 0.95 * min(1.0, max(0.0, 1 - done) / 0.3)
        for group in optimizer.param_groups:
            group["lr"] = job.optim.lr * (step / warm if step <= warm else share)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        assert math.isfinite(norm.item())
        turns.bare_seconds.append(time.perf_counter() - began)
        turns.weft.release()
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--threads", type=int, default=1)
    options, rest = parser.parse_known_args()
    _, overrides = split_overrides(rest)

    turns = Turns()
    folder = tempfile.TemporaryDirectory()
    job, _, problems = read_job(
        "demo",
        [
            ("train.steps", str(options.steps)),
            ("run.dir", f"{folder.name}/run"),
            ("checkpoint.interval", "0"),
            ("train.eval_interval", "0"),
            *overrides,
        ],
    )
    assert not problems, problems
    plan = resolve(job, Machine("cpu", devices=options.threads, world_size=1))
    store = prepare(job.data, Path(folder.name))

    class TakingTurns(Loader):
        """weft's loader; a step of weft's lasts from one batch to the next."""

        began = 0.0

        def batch(self, consumed: int) -> list[Batch]:
            if consumed:
                turns.weft_seconds.append(time.perf_counter() - TakingTurns.began)
            turns.bare.release()
            turns.weft.acquire()
            TakingTurns.began = time.perf_counter()
            return super().batch(consumed)

    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "0", "GLOO_SOCKET_IFNAME": "lo"}
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    loop.Loader = TakingTurns  # type: ignore[misc]
    torch.set_num_threads(plan.threads)
    rank = Rank(0, 0, 1, torch.device("cpu"))

    def weft_loop() -> None:
        torch.set_num_threads(plan.threads)
        loop.train(job, plan, store, rank, Console(quiet=True))

    thread = threading.Thread(target=weft_loop)
    thread.start()
    bare_losses = bare_loop(job, plan, store, turns)
    thread.join()
    dist.destroy_process_group()

    lines = (Path(plan.run_dir) / "metrics.jsonl").read_text().splitlines()
    weft_losses = [json.loads(line)["loss"] for line in lines]
    apart = [abs(a - b) for a, b in zip(weft_losses, bare_losses, strict=True)]
    assert max(apart[:5]) < 1e-5, f"the two loops do not compute the same: {apart[:5]}"
    weft_seconds, bare_seconds = turns.weft_seconds[WARM_UP:], turns.bare_seconds[WARM_UP:-1]
    a, b = statistics.median(weft_seconds), statistics.median(bare_seconds)
    pairs = sorted(x / y for x, y in zip(weft_seconds, bare_seconds, strict=True))
    low, high = pairs[len(pairs) // 4], pairs[3 * len(pairs) // 4]
    print(f"{date.today()}  torch {torch.__version__}  python {platform.python_version()}")
    print(
        f"{plan.num_params / 1e6:.1f} M parameters, {plan.tokens_per_step} tokens a step, "
        f"{plan.threads} thread(s), {len(weft_seconds)} steps each after {WARM_UP}"
    )
    print(f"median step: weft {a * 1e3:.1f} ms, bare loop {b * 1e3:.1f} ms")
    print(
        f"ratio of medians {a / b:.3f}; pair by pair {statistics.median(pairs):.3f} "
        f"(quartiles {low:.3f} to {high:.3f})"
    )
    print(
        f"largest difference of a loss: {max(apart[:20]):.1e} in 20 steps, {max(apart):.1e} in all"
    )


if __name__ == "__main__":
    main()
