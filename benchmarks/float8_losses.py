"""Compare the losses of compiled float8 training with bfloat16 on a CPU, where float8 is emulated.

    python -m benchmarks.float8_losses DIRECTORY [--experts] [--steps 300]     in a clone

Runs the loss stages of the GPU check on their CPU model, one after the other, and prints a table of
the mean losses of 50 steps.  A run whose directory is complete is not repeated.  With fewer steps
than 50 it shows that all runs train; their limit means little.

The limit of a float8 run is derived from bfloat16 runs that differ in nothing that should matter:
those of other seeds have other initial weights and another order of the data.  The limit is the
largest relative difference of any two of them, in any window.  Another bfloat16 run has the same
seed, but is not compiled, so it rounds at other places.  Its difference is what little rounding
does.  The exit status is 1 if a float8 run exceeds the limit, or has a NaN.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from itertools import combinations
from pathlib import Path
from statistics import fmean

from benchmarks.gpu_check import run_command, weft_command
from benchmarks.gpu_check_results import read_losses
from benchmarks.gpu_check_stages import loss_stage, parse_keys, resolve_keys
from weft.monitor.process import PYTHON

WINDOW = 50
SEEDS = ("bf16-seed1", "bf16-seed2")
RUNS = {  # name: precision, further keys
    "bf16": ("none", ""),
    "rowwise": ("rowwise", ""),
    "tensorwise": ("tensorwise", ""),
    "mxfp8": ("mxfp8", ""),
    "bf16-seed1": ("none", "train.seed=1"),
    "bf16-seed2": ("none", "train.seed=2"),
    "bf16-eager": ("none", "compile.enable=false"),
}
EXPERT_RUNS = ("bf16", "tensorwise", "bf16-seed1", "bf16-eager")


def run_weft(name: str, directory: Path, experts: bool, num_steps: int) -> list[float]:
    """Train unless it is done; return the loss of every step.

    Raises:
        SystemExit: if the run fails.
    """
    precision, further = RUNS[name]
    stage = loss_stage(precision, experts)
    keys = resolve_keys(stage, stage.cpu_sizes[0], 1) | parse_keys(further)
    run_dir = directory / (f"experts-{name}" if experts else name)
    keys |= {
        "run.dir": str(run_dir),
        "run.device": "cpu",
        "train.steps": str(num_steps),
        "data.cache_dir": str(directory / "data"),
        "compile.cache_dir": str(directory / "compiled"),
        # Where other programs use all cores, a step may take minutes.
        "resilience.step_timeout": "0",
    }
    losses = read_losses(run_dir) if (run_dir / "metrics.jsonl").exists() else []
    if len(losses) < num_steps:
        start, log = time.monotonic(), run_dir.with_suffix(".log")
        directory.mkdir(parents=True, exist_ok=True)
        command = [*PYTHON, *weft_command("train", stage.recipe, keys)]
        if status := run_command(command, log, math.inf):
            raise SystemExit(f"{name} failed with exit status {status}: see {log}")
        print(f"{name}: {time.monotonic() - start:.0f} s", file=sys.stderr)
        losses = read_losses(run_dir)
    return losses[:num_steps]


def largest(pairs: list[tuple[float, float]]) -> float:
    """Return the largest relative difference of pairs; NaN if one is NaN."""
    values = [abs(a - b) / min(a, b) for a, b in pairs]
    return math.nan if any(map(math.isnan, values)) else max(values)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--experts", action="store_true", help="a small mixture of experts")
    parser.add_argument("--steps", type=int, default=300, help="of each run; default: 300")
    options = parser.parse_args()
    names = EXPERT_RUNS if options.experts else tuple(RUNS)
    starts = range(0, options.steps, WINDOW)
    runs: dict[str, list[float]] = {}
    for name in names:
        losses = run_weft(name, options.directory, options.experts, options.steps)
        runs[name] = [fmean(losses[start : start + WINDOW]) for start in starts]
    seeds = [runs[name] for name in ("bf16", *SEEDS) if name in runs]
    tested = [name for name in names if RUNS[name][0] != "none"]
    print(f"| steps | loss, bfloat16 | seeds | not compiled | {' | '.join(tested)} |")
    print("|---|" + "---|" * (3 + len(tested)))
    spreads: list[float] = []
    differences: list[float] = []
    for index, start in enumerate(starts):
        base = runs["bf16"][index]
        spreads.append(largest([(a[index], b[index]) for a, b in combinations(seeds, 2)]))
        eager, *found = ((runs[name][index] - base) / base for name in ("bf16-eager", *tested))
        differences += map(abs, found)
        steps = f"{start + 1} to {min(start + WINDOW, options.steps)}"
        cells = " | ".join(f"{value:+.2%}" for value in found)
        print(f"| {steps} | {base:.4f} | {spreads[-1]:.2%} | {eager:+.2%} | {cells} |")
    limit = max(spreads)
    print(f"limit {limit:.2%}, largest difference {max(differences):.2%}")
    return 0 if all(value <= limit for value in differences) else 1


if __name__ == "__main__":
    sys.exit(main())
