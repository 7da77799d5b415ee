"""Compare steps with and without overlap of the exchange of tokens, on four ranks of one CPU.

    python benchmarks/pass_overlap.py [--rounds 20]

DualPipeV over two pipeline ranks, experts over two.  Both steps alternate within one run, in the
same processes, each with its own model.  The numbers are of rank 0: wall time of a step, from the
start of the slowest rank to the end of the slowest, and processor time of the process; medians
with quartiles, and the median of the ratios of a round.  Four ranks on fewer cores keep the cores
busy while rows travel, so that there is nothing to hide; what remains is the price of the switches.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import tempfile
import time
from datetime import date
from pathlib import Path

import torch
import torch.distributed as dist

from tests.harness import run_ranks
from tests.small import Overrides, loader_of, plan_here, small_job, this_rank
from weft.config.schema import DataSection
from weft.data.prepare import prepare_store
from weft.training.setup import build

ROOT = Path(__file__).parent.parent
JOB: Overrides = [
    ("model.kind", "moe"),
    ("model.preset", "toy-moe"),
    ("model.num_layers", "8"),
    ("model.dim", "256"),
    ("model.num_heads", "4"),
    ("model.head_dim", "64"),
    ("model.expert_dim", "256"),
    ("model.num_experts", "8"),
    ("model.dense_layers", "0"),
    ("model.tied_embeddings", "false"),
    ("model.max_seq_len", "256"),
    ("train.seq_len", "256"),
    ("train.microbatch_size", "1"),
    ("train.global_batch_size", "16"),
    ("parallel.pp", "2"),
    ("parallel.dp_shard", "2"),
    ("parallel.ep", "2"),
    ("pipeline.schedule", "DualPipeV"),
]


def measure(rounds: int, store: str) -> dict[str, list[tuple[float, float]]]:
    """Return wall and processor time of each step, with ("true") and without overlap."""
    torch.set_num_threads(1)
    steps = {}
    for enable in ("true", "false"):
        job = small_job(*JOB, ("pipeline.overlap_dispatch", enable))
        plan = plan_here(job)
        built = build(plan, this_rank())
        batches = loader_of(job, plan, store, built.mesh).get_microbatches(0)
        steps[enable] = built, batches
    seconds: dict[str, list[tuple[float, float]]] = {enable: [] for enable in steps}
    for index in range(rounds + 2):
        for enable in (*steps,) if index % 2 else (*reversed(steps),):
            built, batches = steps[enable]
            dist.barrier()
            wall, processor = time.perf_counter(), time.process_time()
            built.train_step.forward_backward(batches)
            processor = time.process_time() - processor
            dist.barrier()
            if index >= 2:  # warmed up
                seconds[enable].append((time.perf_counter() - wall, processor))
            built.optimizer.zero_grad()
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20)
    rounds = parser.parse_args().rounds
    with tempfile.TemporaryDirectory() as directory:
        text = Path(directory, "text")
        text.mkdir()
        (text / "docs.txt").write_text(
            "".join(p.read_text("utf-8") for p in ROOT.glob("docs/*.md"))
        )
        section = DataSection(path=str(text), vocab_size=512)
        store = prepare_store(section, Path(directory, "cache")).path
        first, *_ = run_ranks(measure, 4, rounds, str(store), timeout=3600)
    print(f"{date.today()}, torch {torch.__version__}, Python {platform.python_version()}")
    for column, name in enumerate(("wall time", "processor time of rank 0")):
        values = {enable: [pair[column] for pair in pairs] for enable, pairs in first.items()}
        for enable, label in (("true", "with overlap"), ("false", "without")):
            low, middle, high = (1e3 * q for q in statistics.quantiles(values[enable]))
            print(f"{name}, {label}: {middle:.0f} ms ({low:.0f} to {high:.0f})")
        ratios = [a / b for a, b in zip(values["true"], values["false"], strict=True)]
        low, middle, high = statistics.quantiles(ratios)
        print(f"  with / without: {middle:.3f} ({low:.3f} to {high:.3f})")


if __name__ == "__main__":
    from benchmarks import pass_overlap  # ranks import their function by name

    pass_overlap.main()
