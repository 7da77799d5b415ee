"""Train the same small Llama in the layouts of TorchTitan's convergence test, and compare losses.

    python benchmarks/convergence.py [--steps 3000] [--directory runs/convergence]
        [--picture FILE] [--key model.dim=192]

TorchTitan (arXiv:2410.06511, and its notes on convergence) trains Llama 3 8B for 3,000
steps in four layouts: FSDP 8; FSDP 8 x CP 8; FSDP 8 x TP 2 x PP 2; FSDP 8 x TP 2 x CP 2 x PP 2.
The last two are in float8 and interleaved.  Here each axis has two ranks, the model is a demo of
four layers on the CPU, and float8 is emulated.  All runs have the same initial weights, data and
order, so their losses are compared at the same step.  Not here: torch.compile and asynchronous
tensor parallelism, which overlaps on GPUs only.

*Limits.*  Each is measured, in runs of one process:

- A layout in float32 computes the same sums in another order.  So do microbatches of 1 and 4
  instead of 2 in one process.  Differences of rounding grow with the steps.  The largest difference
  between these runs so far, times `SAFETY`, is the limit of a step.
- Float8 rounds to 3 bits (e4m3) and gradients to 2 (e5m2), bfloat16 to 7: the unit of rounding is
  up to 32 times as large.  While errors are small, their effect on the loss is linear.  So the
  limit of the float8 runs is the largest difference of one bfloat16 run so far, times 32.

A run above its limit at any step fails the script.  Runs are kept in the directory: the
same command with more steps, or after an interruption, continues only those that are not complete.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import date
from importlib import import_module
from itertools import accumulate, combinations
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
sys.path.insert(1, str(ROOT / "docs" / "course"))

SAFETY = 8.0  # the maximum of many differences is estimated from three runs
FLOAT8 = 32.0  # unit of rounding of e5m2 over that of bfloat16: 2^-3 / 2^-8
ROUNDING = 4e-6  # eight units of float32 for a loss of 8: before differences of runs grow
COLORS = ("#57606a", "#0b5cad", "#1a7f37", "#c2570c", "#8250df", "#cf222e", "#b08800")

WITHIN = "all runs are within their limits"

Losses = list[float]

# A small demo: four layers, for two stages on each of two pipeline ranks.
BASE: dict[str, object] = {
    "run.device": "cpu",
    "model.num_layers": 4,
    "model.dim": 64,
    "model.num_heads": 4,
    "model.num_kv_heads": 2,
    "model.ffn_dim": 192,
    "train.seq_len": 32,
    "train.global_batch_size": 4,
    "train.eval_interval": 0,
    "optim.lr": 1e-3,
    "optim.decay_fraction": 0,
    "checkpoint.interval": 500,
    "checkpoint.keep_latest": 1,
    "monitor.log_interval": 1,
    "precision.compute_dtype": "float32",
}
THREE: dict[str, object] = {
    "parallel.dp_shard": 2,
    "parallel.tp": 2,
    "parallel.pp": 2,
    "pipeline.schedule": "Interleaved1F1B",
    "train.microbatch_size": 1,
}
FP8: dict[str, object] = {"precision.float8": "tensorwise", "precision.float8_small": True}


@dataclass(frozen=True)
class Run:
    """One run: its ranks, its keys, and the limit that its losses have."""

    ranks: int
    keys: dict[str, object]
    limit: str = ""  # rounding, float8, or none: the run defines a limit


RUNS = {
    "one process": Run(1, {"train.microbatch_size": 2}),
    "one process, microbatches of 1": Run(1, {"train.microbatch_size": 1}),
    "one process, microbatches of 4": Run(1, {"train.microbatch_size": 4}),
    "one process, bfloat16": Run(
        1, {"train.microbatch_size": 2, "precision.compute_dtype": "bfloat16"}
    ),
    "one process, float8": Run(1, {"train.microbatch_size": 2} | FP8, "float8"),
    "FSDP 2": Run(2, {"parallel.dp_shard": 2}, "rounding"),
    "FSDP 2, CP 2": Run(4, {"parallel.dp_shard": 2, "parallel.cp": 2}, "rounding"),
    "FSDP 2, TP 2, PP 2": Run(8, THREE, "rounding"),
    "FSDP 2, TP 2, PP 2, float8": Run(8, THREE | FP8, "float8"),
    "FSDP 2, TP 2, CP 2, PP 2": Run(16, THREE | {"parallel.cp": 2}, "rounding"),
    "FSDP 2, TP 2, CP 2, PP 2, float8": Run(16, THREE | {"parallel.cp": 2} | FP8, "float8"),
}
REFERENCE, BFLOAT16 = "one process", "one process, bfloat16"
ORDERS = [name for name in RUNS if name.startswith("one process") and not RUNS[name].limit][:3]


# --------------------------------------------------------------------------- runs


def train(name: str, options: argparse.Namespace) -> None:
    """Train one run up to the steps, or continue it."""
    directory = run_directory(name, options.directory)
    if len(read_losses(directory)) >= options.steps:
        return
    run = RUNS[name]
    # The learning rate does not depend on the steps, so that a run can be continued.
    keys = BASE | {"optim.warmup_steps": 10} | run.keys | dict(options.key)
    keys |= {"run.dir": directory, "run.nproc_per_node": run.ranks, "train.steps": options.steps}
    words = [word for key, value in keys.items() for word in (f"--{key}", str(value))]
    command = [sys.executable, "-m", "weft", "train", "demo", *words]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    directory.parent.mkdir(parents=True, exist_ok=True)
    start = time.monotonic()
    with (directory.parent / f"{directory.name}.log").open("w") as log:
        code = subprocess.call(command, stdout=log, stderr=log, env=environment)
    if code:
        sys.exit(f"{name}: exit status {code}, see {directory}.log")
    print(f"{name}: {options.steps} steps, {time.monotonic() - start:.0f} s", flush=True)


def run_directory(name: str, parent: Path) -> Path:
    return parent / name.replace(",", "").replace(" ", "-").lower()


def read_losses(directory: Path) -> Losses:
    """Return the loss of each step; empty if there is no run."""
    file = directory / "metrics.jsonl"
    records = map(json.loads, file.read_text().splitlines()) if file.exists() else ()
    losses = {record["step"]: record["loss"] for record in records if "loss" in record}
    return [losses[step] for step in sorted(losses)]


# --------------------------------------------------------------------------- limits


def differences(a: Losses, b: Losses) -> Losses:
    return [abs(x - y) for x, y in zip(a, b, strict=False)]


def limits_of(losses: dict[str, Losses]) -> dict[str, Losses]:
    """Return the limit of each step: of layouts in float32, and of float8."""
    pairs = [differences(losses[a], losses[b]) for a, b in combinations(ORDERS, 2)]
    spread = [max(values) for values in zip(*pairs, strict=True)]
    halves = differences(losses[BFLOAT16], losses[REFERENCE])
    return {
        "rounding": [SAFETY * value + ROUNDING for value in accumulate(spread, max)],
        "float8": [FLOAT8 * value + ROUNDING for value in accumulate(halves, max)],
    }


def compare(losses: dict[str, Losses]) -> Iterator[str]:
    """Yield the table, and then a sentence for each run above its limit."""
    limits, reference = limits_of(losses), losses[REFERENCE]
    tenth = max(1, len(reference) // 10)
    yield f"| {'run':32} | ranks | last tenth | largest difference (step) | of its limit, at most |"
    yield "|---|---|---|---|---|"
    faults = []
    for name, run in RUNS.items():
        values = losses[name]
        apart = differences(values, reference)
        largest = max(range(len(apart)), key=apart.__getitem__)
        share = ""
        if not all(map(math.isfinite, values)):
            faults.append(f"{name}: a loss is NaN or Inf")
        elif run.limit:
            shares = [a / b for a, b in zip(apart, limits[run.limit], strict=True)]
            step = max(range(len(shares)), key=shares.__getitem__)
            share = f"{shares[step]:.2f} (step {step + 1})"
            if shares[step] > 1:
                limit = limits[run.limit][step]
                faults.append(f"{name}: step {step + 1} differs by {apart[step]:.2e} > {limit:.2e}")
        mean = sum(values[-tenth:]) / tenth
        yield (
            f"| {name:32} | {run.ranks} | {mean:.4f} | {apart[largest]:.1e} ({largest + 1}) "
            f"| {share} |"
        )
    yield from faults or [WITHIN]


# --------------------------------------------------------------------------- picture


def draw(losses: dict[str, Losses]) -> str:
    """Return the picture: the losses, and below them their differences from one process."""
    pictures: Any = import_module("pictures")  # of docs/course
    text, left, right = pictures.text, float(pictures.LEFT), float(pictures.WIDTH - 20)
    shown = [name for name in RUNS if name == REFERENCE or RUNS[name].limit]
    limits, reference = limits_of(losses), losses[REFERENCE]
    count = len(reference)
    lines = list[str]()

    def across(step: int) -> float:
        return left + (right - left) * step / max(1, count - 1)

    def curve(values: Losses, height: Callable[[float], float], color: str, dash: str = "") -> None:
        stride = max(1, count // 600)
        points = " ".join(
            f"{across(i):.1f},{height(values[i]):.1f}" for i in range(0, len(values), stride)
        )
        style = f"stroke:{color};stroke-width:1.5" + (f";stroke-dasharray:{dash}" if dash else "")
        lines.append(f'<polyline style="{style}" points="{points}"/>')

    def panel(top: float, ticks: Sequence[tuple[float, str]], title: str) -> None:
        lines.append(text(left, top - 12, title))
        lines.append(f'<path d="M{left:g} {top}V{top + 200}H{right:g}"/>')
        lines.extend(text(left - 8, y + 4, label, "soft", "end") for y, label in ticks)

    every = [value for name in shown for value in losses[name]]
    low, high = math.floor(min(every)), math.ceil(max(every))

    def loss_height(value: float) -> float:
        return 40 + 200 * (high - value) / (high - low)

    panel(40, [(loss_height(v), str(v)) for v in range(low, high + 1)], "loss, nats per token")
    first, last = -8.0, 1.0

    def difference_height(value: float) -> float:
        place = (last - math.log10(max(value, 10**first))) / (last - first)
        return 290 + 200 * min(1.0, max(0.0, place))

    ticks = [(difference_height(10.0**n), f"1e{n}") for n in range(int(first), int(last) + 1, 3)]
    panel(290, ticks, "difference from one process; dashed: limits (float8 above, float32 below)")
    for index, name in enumerate(shown):
        color = COLORS[index % len(COLORS)]
        dash = "2 3" if "float8" in name else ""
        curve(losses[name], loss_height, color, dash)
        if name != REFERENCE:
            curve(differences(losses[name], reference), difference_height, color, dash)
        y = 530 + 18 * (index // 2)
        x = left + 360 * (index % 2)
        style = f"stroke:{color};stroke-width:2" + (f";stroke-dasharray:{dash}" if dash else "")
        lines.append(f'<path style="{style}" d="M{x} {y - 4}h24"/>')
        lines.append(text(x + 32, y, name, "soft"))
    for limit in limits.values():
        curve(limit, difference_height, "#8c959f", "6 4")
    lines.append(text(right, 506, f"step {count}", "soft", "end"))
    title = f"Losses of {len(shown)} runs over {count} steps, and their differences"
    picture: str = pictures.svg(540 + 18 * ((len(shown) + 1) // 2), lines, title)
    return picture


def main() -> None:
    """Train all runs, compare them, and draw the picture."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--steps", type=int, default=3000)
    add("--directory", type=Path, default=ROOT / "runs" / "convergence")
    add("--picture", type=Path, help="write the picture here")
    add("--key", action="append", default=[], type=lambda pair: tuple(pair.split("=", 1)),
        metavar="KEY=VALUE", help="a key of all runs")  # fmt: skip
    add("--compare-only", action="store_true", help="of the steps that all runs have")
    options = parser.parse_args()
    for name in () if options.compare_only else RUNS:
        train(name, options)
    losses = {name: read_losses(run_directory(name, options.directory)) for name in RUNS}
    count = min(options.steps, *map(len, losses.values()))
    if count < 1:
        sys.exit("a run has no losses yet")
    losses = {name: values[:count] for name, values in losses.items()}
    version, python = torch.__version__, platform.python_version()
    print(f"{date.today()}, torch {version}, Python {python}, {count} steps")
    lines = list(compare(losses))
    print("\n".join(lines))
    if options.picture:
        options.picture.write_text(draw(losses), "utf-8")
    if lines[-1] != WITHIN:
        sys.exit(1)


if __name__ == "__main__":
    main()
