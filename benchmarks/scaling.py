"""Check that weft's overhead grows linearly with layers, ranks, parameters.

    .venv/bin/python benchmarks/scaling.py [--rounds 3]

Each case is one rank in a separate process, with torch's fake process group, whose collectives
return at once.  All tensors are real but small, and a step trains on one sequence of 8 tokens, so
that the time is that of the host.  The exponent of growth is fitted by least squares to the
logarithms of the three largest sizes, because constant costs dominate smaller sizes.

    start      planning, the mesh, the model on meta, sharding, initial weights
    step       a batch, forward and backward, clipping, AdamW, as in `weft.training.loop`
    own        the part of weft in a step: all but model and loss, autograd, and the optimizer
    record     the straggler check of a record, over all ranks
    memory     growth of the process's peak resident size since the imports

Times are processor times, and the minimum of all rounds, because the machine may be busy.  The exit
status is 1 if an exponent is above 1.1.  The exponent of a whole step is only reported: a model
that exceeds the processor's caches is slower in every training loop.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from weft.checkpoint.state_dict import trainable_parameters
from weft.config.reader import read_job
from weft.data.loader import Loader, Mixture, TokenChunks
from weft.data.token_store import TokenStream
from weft.monitor.anomaly import reduce_result
from weft.monitor.stragglers import StragglerDetector, gather_rows
from weft.optim.optimizer import clip_scale, compute_grad_norm, masked_step
from weft.planning.plan import Machine
from weft.planning.resolve import resolve
from weft.training.setup import Rank, build

LIMIT = 1.1  # largest exponent
SHARDS = 16  # the most ranks that shard a replica, so that shards do not become empty
SIZES: dict[str, list[dict[str, int]]] = {
    "layers": [{"layers": n} for n in (2, 4, 8, 16, 32, 64)],
    "ranks": [{"ranks": n} for n in (1, 4, 16, 64, 256, 1024, 4096, 16384)],
    "parameters": [{"dim": n} for n in (64, 128, 256, 512, 1024)],
}
COSTS = ("start", "step", "own", "record", "memory")


def peak_mib() -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) / 1024


def processor_ms(work: Callable[[], Any], times: int) -> float:
    elapsed = []
    for _ in range(times):
        start_time = time.process_time()
        work()
        elapsed.append(time.process_time() - start_time)
    return min(elapsed) * 1e3


def measure(layers: int = 4, ranks: int = 16, dim: int = 64) -> dict[str, float]:
    """Measure one case in this process."""
    torch.set_num_threads(1)
    imported = peak_mib()
    start_time = time.process_time()
    shards = min(ranks, SHARDS)
    overrides = {
        "model.num_layers": layers,
        "model.dim": dim,
        "model.num_heads": 4,
        "model.num_kv_heads": 2,
        "model.ffn_dim": 3 * dim,
        "model.vocab_size": 512,
        "data.vocab_size": 512,
        "train.seq_len": 8,
        "train.global_batch_size": ranks,
        "parallel.dp_shard": shards,
        "parallel.dp_replicate": ranks // shards,
        "run.dir": "/nonexistent",
    }
    job, _, errors = read_job("demo", [(key, str(value)) for key, value in overrides.items()])
    assert not errors, errors
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    plan = resolve(job, Machine("cpu", devices=1, world_size=ranks, local_world_size=1))
    _, parts, mesh, train_step, optimizer, *_ = build(plan, Rank(0, 0, ranks, torch.device("cpu")))
    start = (time.process_time() - start_time) * 1e3

    stream = TokenStream([np.zeros(8 << 20, np.uint16)])
    samples = Mixture([TokenChunks(stream, seq_len=8, packing="windows", separator=0)])
    loader = Loader(samples, 0, ranks, mesh.dp_rank, plan.dp_size, plan.microbatch_size)
    params = [param for _, param in trainable_parameters(parts)]
    elapsed = {"others": 0.0}

    def exclude_time(work: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            begin_time = time.process_time()
            try:
                return work(*args, **kwargs)
            finally:
                elapsed["others"] += time.process_time() - begin_time

        return timed

    torch.Tensor.backward = exclude_time(torch.Tensor.backward)  # type: ignore[method-assign]
    optimizer.step = exclude_time(optimizer.step)  # type: ignore[method-assign]
    train_step._forward = exclude_time(train_step._forward)  # type: ignore[method-assign]
    consumed = 0
    own: list[float] = []

    def step() -> None:
        nonlocal consumed
        begin_time, elapsed["others"] = time.process_time(), 0.0
        share = train_step.forward_backward(loader.get_microbatches(consumed))
        result = reduce_result(share, *compute_grad_norm(params))
        is_bad = ~result.loss_and_norm.isfinite().all()
        masked_step(optimizer, is_bad, clip_scale(result.grad_norm, 1.0))
        optimizer.zero_grad()
        consumed += ranks
        own.append(time.process_time() - begin_time - elapsed["others"])

    stragglers = StragglerDetector()

    def check_stragglers() -> None:
        table = gather_rows((0.1, 0.1, mesh.coordinates["pp"], mesh.coordinates["cp"], 1.0))
        stragglers.check(1, 1.0, [row[:4] for row in table], print)

    for _ in range(3):
        step()
    costs = {
        "start": start,
        "step": processor_ms(step, 9),
        "own": min(own) * 1e3,
        "record": processor_ms(check_stragglers, 5),
        "memory": peak_mib() - imported,
    }
    return costs | {"parameters": plan.num_params}


def exponent(sizes: list[float], costs: list[float]) -> float:
    """Return the exponents of growth at the three largest sizes."""
    x, y = ([math.log(value) for value in values[-3:]] for values in (sizes, costs))
    return statistics.linear_regression(x, y).slope


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--case", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case is not None:
        print(json.dumps(measure(**options.case)))
        os._exit(0)
    load = os.getloadavg()[0]
    print(f"{date.today()}  torch {torch.__version__}  Python {platform.python_version()}")
    print(f"load {load:.1f} of {os.cpu_count()} cores; ms of processor time, MiB")
    results: dict[str, dict[str, float]] = {}
    for _ in range(options.rounds):
        for case in (json.dumps(case) for cases in SIZES.values() for case in cases):
            command = [sys.executable, __file__, "--case", case]
            now = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
            results[case] = {key: min(now[key], results.get(case, now)[key]) for key in now}
    worst = 0.0
    for axis, cases in SIZES.items():
        print(f"\n{axis:>12}" + "".join(f"{cost:>10}" for cost in COSTS))
        rows = [results[json.dumps(case)] for case in cases]
        sizes = [
            row["parameters"] if axis == "parameters" else next(iter(case.values()))
            for case, row in zip(cases, rows, strict=True)
        ]
        for size, row in zip(sizes, rows, strict=True):
            print(f"{size:>12,.0f}" + "".join(f"{row[cost]:>10.2f}" for cost in COSTS))
        exponents = [exponent(sizes, [row[cost] for row in rows]) for cost in COSTS]
        print(f"{'exponent':>12}" + "".join(f"{value:>10.2f}" for value in exponents))
        verdicts = zip(COSTS, exponents, strict=True)
        worst = max(worst, *(value for cost, value in verdicts if cost != "step"))
    print(f"\nlargest exponent {worst:.2f}; at most {LIMIT} wanted")
    sys.exit(worst > LIMIT)


if __name__ == "__main__":
    main()
