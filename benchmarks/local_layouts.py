"""Compare one process, two FSDP ranks and two replicas on the CPU of this machine.

    python benchmarks/local_layouts.py [--recipe demo] [--ranks 2] [--rounds 5] [--steps 30]

All layouts train the same recipe at the same global batch size.  Each round starts every layout
once, in random order, as ``weft train`` in its own run directory.  A layout's speed is the median
of its steps' ``step_seconds`` after the first ten.  The table has the median over the rounds, the
ratio to one process in the same round (median, minimum and maximum), and the processor time of a
step.  ``run.nproc_per_node = auto`` follows this table (`weft.planning.resolve`).
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import resource
import statistics
import subprocess
import sys
import tempfile
from datetime import date
from pathlib import Path

import torch

SKIPPED_STEPS = 10


def main() -> None:
    """Run the rounds and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--recipe", default="demo")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("keys", nargs="*", metavar="--KEY VALUE", help="keys for every layout")
    options, keys = parser.parse_known_args()
    ranks = str(options.ranks)
    layouts = {
        "one process": ["--run.nproc_per_node", "1"],
        f"dp_shard {ranks}": ["--parallel.dp_shard", ranks],
        f"dp_replicate {ranks}": ["--parallel.dp_replicate", ranks, "--parallel.dp_shard", "1"],
    }
    seconds: dict[str, list[float]] = {name: [] for name in layouts}
    cpu_seconds: dict[str, list[float]] = {name: [] for name in layouts}
    for _ in range(options.rounds):
        for name in random.sample(list(layouts), len(layouts)):
            wall, cpu = measure(options.recipe, options.steps, [*layouts[name], *keys])
            seconds[name].append(wall)
            cpu_seconds[name].append(cpu)
    print(f"{date.today()}, torch {torch.__version__}, Python {platform.python_version()}")
    print(f"{'layout':16}{'s/step':>9}{'ratio to one process':>30}{'cpu s/run':>11}")
    for name, values in seconds.items():
        ratios = [value / one for value, one in zip(values, seconds["one process"], strict=True)]
        spread = f"{statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})"
        cpu = statistics.median(cpu_seconds[name])
        print(f"{name:16}{statistics.median(values):9.4f}{spread:>30}{cpu:11.1f}")


def measure(recipe: str, steps: int, overrides: list[str]) -> tuple[float, float]:
    """Train once; return the median seconds of a step and the processor seconds of the run."""
    with tempfile.TemporaryDirectory() as directory:
        run_dir = Path(directory) / "run"
        fixed = ["--run.device", "cpu", "--checkpoint.interval", "0", "--monitor.log_interval", "1"]
        command = [sys.executable, "-m", "weft", "train", recipe, *overrides, *fixed]
        command += ["--run.dir", str(run_dir), "--train.steps", str(steps)]
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        records = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
        times = [record["step_seconds"] for record in records if "step_seconds" in record]
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return statistics.median(times[SKIPPED_STEPS:]), cpu


if __name__ == "__main__":
    main()
