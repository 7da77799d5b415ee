"""What observing a run costs: step time with it, relative to a silent run's.

    .venv/bin/python benchmarks/observe.py [--rounds 8] [--steps 60] [--workers 2]

Real runs of `weft train demo`, a round of each kind after the other, in another order each time, so
that a machine whose speed drifts slows all alike:

    silent    a record of the first step and of the last, no spans
    records   a record of every step with the norms of all layers, into metrics.jsonl, TensorBoard,
              Weights & Biases (offline) and MLflow (SQLite), and the report
    spans     as silent, with the spans of every rank
    all       as records, with the spans

Seconds a step are taken between the first record and the last.  Every round gives one ratio for
each kind; the interval is Student's for the mean of their logarithms.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import subprocess
import sys
import tempfile
from datetime import date
from pathlib import Path
from statistics import median

import torch

from weft.compare.statistics import interval

EVERYTHING = {
    "observe.log_interval": "1",
    "observe.grad_norms": "true",
    "observe.sinks": "tensorboard,wandb,mlflow",
    "observe.report": "true",
}
NOTHING = {"observe.sinks": "", "observe.report": "false"}
KINDS = {
    "silent": NOTHING | {"observe.spans": "false"},
    "records": EVERYTHING | {"observe.spans": "false"},
    "spans": NOTHING | {"observe.spans": "true"},
    "all": EVERYTHING | {"observe.spans": "true"},
}


def step_seconds(kind: str, folder: Path, steps: int, workers: int) -> float:
    """Of a run in ``folder``."""
    keys = {
        "run.dir": str(folder),
        "run.workers": str(workers),
        "train.steps": str(steps),
        "train.eval_sequences": "1",
        "checkpoint.interval": "0",
        "observe.log_interval": str(steps),
    } | KINDS[kind]
    words = [word for key, value in keys.items() for word in (f"--{key}", value)]
    environment = os.environ | {"WANDB_MODE": "offline"}
    environment.pop("MLFLOW_TRACKING_URI", None)
    command = [sys.executable, "-m", "weft.cli", "train", "demo", *words]
    subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL)
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    first, last = json.loads(lines[0]), json.loads(lines[-1])
    held_out = last["seconds"]["evaluating"]  # comes before the last record is written
    return float((last["time"] - first["time"] - held_out) / (last["step"] - first["step"]))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    print(f"{date.today()}, torch {torch.__version__}, Python {platform.python_version()}, CPU")
    kinds, logs = list(KINDS), {kind: list[float]() for kind in KINDS if kind != "silent"}
    with tempfile.TemporaryDirectory() as place:
        for turn in range(-1, options.rounds):
            order = kinds[turn % len(kinds) :] + kinds[: turn % len(kinds)]
            seconds = {
                kind: step_seconds(
                    kind, Path(place) / f"{turn}-{kind}", options.steps, options.workers
                )
                for kind in order
            }
            if turn < 0:
                continue  # warms the caches
            for kind in logs:
                logs[kind].append(math.log(seconds[kind] / seconds["silent"]))
            print(
                *(f"{kind} {1000 * seconds[kind]:.1f} ms" for kind in kinds), sep="  ", flush=True
            )
    for kind, values in logs.items():
        found = interval(values)
        low, mean, high = (math.exp(x) for x in (found.low, found.mean, found.high))
        middle = math.exp(median(values))
        print(f"{kind:8} median {middle:.4f}  mean {mean:.4f}, 95 % {low:.4f} to {high:.4f}")


if __name__ == "__main__":
    main()
