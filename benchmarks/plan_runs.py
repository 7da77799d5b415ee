"""Compare predicted and measured memory and time on this machine.

    python benchmarks/plan_runs.py [--steps 12] [--json]

`weft train` trains each configuration on all devices of this machine (on CPUs, smaller and on two
ranks), in a separate directory, and the benchmark predicts the run from that directory.  The first
configuration calibrates the device.  The result is the error of the others, before and after
calibration.  The user's files are not changed.  A configuration that is predicted not to fit runs
nevertheless.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from datetime import date
from pathlib import Path
from typing import Any

import torch

LARGE = {
    "model.dim": 2048,
    "model.num_layers": 16,
    "model.num_heads": 16,
    "model.num_kv_heads": 8,
    "model.ffn_dim": 8192,
    "model.max_seq_len": 16384,
    "precision.compute_dtype": "bfloat16",
    "train.seq_len": 4096,
    "train.microbatch_size": 2,
}
ON_GPU: dict[str, dict[str, Any]] = {
    "eager": {},
    "microbatch 1": {"train.microbatch_size": 1},
    "microbatch 4": {"train.microbatch_size": 4},
    "selective activation_checkpoint": {
        "activation_checkpoint.mode": "selective",
        "train.microbatch_size": 4,
    },
    "full activation_checkpoint": {
        "activation_checkpoint.mode": "full",
        "train.microbatch_size": 8,
    },
    "rows of 16384": {
        "train.seq_len": 16384,
        "train.microbatch_size": 1,
        "activation_checkpoint.mode": "full",
    },
    "compiled": {"compile.enable": True},
    "compiled float8": {"compile.enable": True, "precision.float8": "tensorwise"},
    "8-bit states": {"optim.state_dtype": "8bit"},
    "32 narrow layers": {"model.dim": 1024, "model.ffn_dim": 4096, "model.num_layers": 32},
    "8 wide layers": {"model.dim": 4096, "model.num_heads": 32, "model.num_layers": 8},
}
SMALL = {
    "model.dim": 256,
    "model.num_layers": 4,
    "model.num_heads": 4,
    "model.num_kv_heads": 4,
    "model.ffn_dim": 1024,
    "model.max_seq_len": 1024,
    "train.seq_len": 256,
    "train.microbatch_size": 4,
}
ON_CPU: dict[str, dict[str, Any]] = {
    "four layers": {},
    "eight layers": {"model.num_layers": 8},
    "microbatch 1": {"train.microbatch_size": 1},
    "microbatch 8": {"train.microbatch_size": 8},
    "full activation_checkpoint": {"activation_checkpoint.mode": "full"},
    "selective activation_checkpoint": {"activation_checkpoint.mode": "selective"},
    "rows of 1024": {"train.seq_len": 1024, "train.microbatch_size": 1},
    "tensor parallel": {"parallel.tp": 2},
    "pipeline": {"parallel.pp": 2, "model.tied_embeddings": False},
    "wide": {"model.dim": 512, "model.ffn_dim": 2048, "model.num_heads": 8},
}


def measure(name: str, keys: dict[str, Any], directory: Path, steps: int) -> Path | str:
    """Return the directory of the finished run, or the error."""
    on_gpu = torch.cuda.is_available()
    base = LARGE if on_gpu else SMALL
    ranks = max(1, torch.cuda.device_count()) if on_gpu else 2
    keys = {**base, **keys}
    rows = 2 * keys["train.microbatch_size"] * ranks  # two microbatches per rank
    keys |= {"train.global_batch_size": rows, "train.steps": steps, "train.eval_interval": 0}
    keys |= {"monitor.log_interval": 1, "train.eval_sequences": rows, "run.nproc_per_node": ranks}
    keys |= {"checkpoint.interval": 0, "run.dir": directory / name.replace(" ", "-")}
    words = [f"--{key}={str(v).lower() if isinstance(v, bool) else v}" for key, v in keys.items()]
    command = [sys.executable, "-m", "weft", "train", "demo", "--force", *words]
    completed = subprocess.run(command, capture_output=True, text=True, check=False)
    if completed.returncode:
        return " ".join(completed.stderr.split()) or "it failed"
    return Path(keys["run.dir"])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        os.environ["XDG_CONFIG_HOME"] = f"{scratch}/config"
        rows, failed = run_all(Path(scratch), options.steps)
    rest = rows[1:]
    summary = {
        f"{kind}_median_error": statistics.median(abs(row[kind]) for row in rest)
        for kind in ("time_before", "time_after", "memory")
    }
    summary |= {
        f"{kind}_worst_error": max(abs(row[kind]) for row in rest)
        for kind in ("time_before", "time_after", "memory")
    }
    if options.json:
        print(json.dumps({"rows": rows, "failed": failed, **summary}, indent=2))
        return
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    print(f"{date.today()}, {device}, torch {torch.__version__}")
    print(f"{'':<18} {'s a step':>9} {'before':>8} {'after':>8}   {'GiB':>7} {'error':>8}")
    for row in rows:
        print(
            f"{row['name']:<18} {row['seconds']:>9.4g} {row['time_before']:>+8.1%} "
            f"{row['time_after']:>+8.1%}   {row['gib']:>7.2f} {row['memory']:>+8.1%}"
        )
    for name, reason in failed.items():
        print(f"{name:<18} {reason}")
    print(f"all but the first, median: {summary['time_before_median_error']:.1%} before, ", end="")
    print(f"{summary['time_after_median_error']:.1%} after, ", end="")
    print(f"memory {summary['memory_median_error']:.1%}; ", end="")
    print(f"worst: {summary['time_before_worst_error']:.1%}, ", end="")
    print(f"{summary['time_after_worst_error']:.1%}, {summary['memory_worst_error']:.1%}")


def run_all(scratch: Path, steps: int) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Return a row for each configuration that ran, and the errors of the others."""
    from weft.estimate.calibrate import calibrate, read_run, save_calibration

    runs, failed = {}, {}
    for name, keys in (ON_GPU if torch.cuda.is_available() else ON_CPU).items():
        print(f"\r\033[K{name}", end="", file=sys.stderr, flush=True)
        directory = measure(name, keys, scratch, steps)
        if isinstance(directory, str):
            failed[name] = directory
        else:
            runs[name] = read_run(directory)
    print("\r\033[K", end="", file=sys.stderr, flush=True)
    before = {name: calibrate(run) for name, run in runs.items()}
    save_calibration(next(iter(before.values())))
    after = {name: calibrate(run) for name, run in runs.items()}
    rows = [
        {
            "name": name,
            "seconds": run.seconds,
            "time_before": before[name].seconds_before / run.seconds - 1,
            "time_after": after[name].seconds_before / run.seconds - 1,
            "gib": run.memory_bytes / 2**30,
            "memory": before[name].predicted_memory_bytes / run.memory_bytes - 1,
        }
        for name, run in runs.items()
    ]
    return rows, failed


if __name__ == "__main__":
    main()
