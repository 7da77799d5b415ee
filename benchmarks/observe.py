"""Measure the cost of monitoring as a ratio of step times.

    .venv/bin/python benchmarks/observe.py [--steps 400] [--workers 2]

Two runs differ by more than the cost of a record.  So the benchmark compares one run with itself:
`weft train demo` records every second step, to metrics.jsonl, the terminal, TensorBoard, Weights &
Biases (offline), MLflow (SQLite) and the report, with the gradient norms of all layers.  The
benchmark measures:

    in the step      ratio of a recorded step's time to the mean of the two steps around it: the
                     mean of the logarithms of all ratios, with Student's interval
    beside the step  CPU seconds of the trackers' threads and processes as a share of wall-clock
                     time, as if every step were recorded.  This is the cost if no core is free
                     for them.  If a core is free, the cost is the part of this time in which they
                     hold Python's interpreter lock
    spans            number of spans in a step, times the seconds to record and write one span

Step times are those of the spans of rank 0.  ``--workers`` is the number of ranks.
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
import threading
import time
from datetime import date
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch

from weft.comparison.verdict import confidence_interval
from weft.config.schema import Job
from weft.monitor.spans import SpanWriter, span, spans_path
from weft.monitor.step_record import StepRecord
from weft.monitor.step_timer import PHASES
from weft.records.span_reader import read_spans

WARM = 40  # warm-up steps, which are not measured
TICKS = os.sysconf("SC_CLK_TCK")


def cpu_seconds(stat: Path) -> float:
    """Return user and system seconds of a process or thread from /proc; 0 if it ended."""
    try:
        after_name = stat.read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(after_name[11]) + int(after_name[12])) / TICKS


def trackers_seconds() -> float:
    """Return CPU seconds of the trackers' threads and processes."""
    other_threads = [thread.native_id for thread in threading.enumerate()]
    stat_files = [
        Path(f"/proc/self/task/{other}/stat") for other in other_threads if other != os.getpid()
    ]
    theirs = [
        path / "stat"
        for path in Path("/proc").glob("[0-9]*")
        if b"wandb" in cmdline(path) and path.name != str(os.getpid())
    ]
    return sum(map(cpu_seconds, [*stat_files, *theirs]))


def cmdline(process: Path) -> bytes:
    try:
        return (process / "cmdline").read_bytes().partition(b"\0")[0]
    except OSError:
        return b""


class Meter:
    """A sink that measures the other trackers, which are open until it closes."""

    def __init__(self, directory: Path, job: Job, resumed_step: int) -> None:
        self.path = directory / "meter.json"
        self.start: tuple[int, float, float] | None = None

    def write(self, record: StepRecord) -> None:
        self.step = record.step
        if self.start is None and record.step >= WARM:
            self.start = record.step, time.time(), trackers_seconds()

    def close(self) -> None:
        assert self.start is not None
        step, wall, cpu = self.start
        result = {
            "steps": self.step - step,
            "wall_seconds": time.time() - wall,
            "cpu_seconds": trackers_seconds() - cpu,
        }
        self.path.write_text(json.dumps(result))


def train(directory: Path, steps: int, workers: int) -> None:
    keys = {
        "run.dir": str(directory),
        "run.nproc_per_node": str(workers),
        "train.steps": str(steps),
        "train.eval_sequences": "1",
        "checkpoint.interval": "0",
        "monitor.log_interval": "2",
        "monitor.layer_grad_norms": "true",
        "monitor.trackers": "tensorboard,wandb,mlflow,observe:Meter",
    }
    words = [word for key, value in keys.items() for word in (f"--{key}", value)]
    environment = os.environ | {"WANDB_MODE": "offline", "PYTHONPATH": str(Path(__file__).parent)}
    environment.pop("MLFLOW_TRACKING_URI", None)
    command = [sys.executable, "-m", "weft", "train", "demo", *words]
    subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL)


def step_seconds(events: list[dict[str, Any]]) -> dict[int, float]:
    """Return seconds by step, from its wait for data to that of the next step."""
    start_time = {
        e["args"]["step"]: e["ts"] for e in events if e["name"] == PHASES["data"].activity
    }
    return {
        a: (start_time[b] - start_time[a]) / 1e6
        for a, b in pairwise(sorted(start_time))
        if b == a + 1
    }


def span_seconds(directory: Path, count: int = 20000) -> float:
    """Return the seconds that recording and writing one span takes."""
    spans = SpanWriter(spans_path(directory, 0), 0)
    start_time = time.perf_counter()
    for _ in range(count):
        with span("a span"):
            pass
    spans.close()
    return (time.perf_counter() - start_time) / count


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    print(f"{date.today()}, torch {torch.__version__}, Python {platform.python_version()}, CPU")
    with tempfile.TemporaryDirectory() as path:
        directory = Path(path) / "run"
        train(directory, options.steps, options.workers)
        events = read_spans(directory, 0)
        meter = json.loads((directory / "meter.json").read_text())
        one = span_seconds(Path(path) / "other")
    seconds = step_seconds(events)
    logs = [
        math.log(seconds[step] / fmean((seconds[step - 1], seconds[step + 1])))
        for step in range(WARM, options.steps, 2)
        if {step - 1, step, step + 1} <= seconds.keys()
    ]
    result = confidence_interval(logs)
    low, mean, high = (math.exp(x) for x in (result.low, result.mean, result.high))
    usual = median(seconds[step] for step in seconds if step > WARM)
    print(
        f"a step takes {1000 * usual:.1f} ms on {options.workers} ranks; {len(logs)} were recorded"
    )
    print(f"in the step      {mean:.4f}, 95 % {low:.4f} to {high:.4f}")
    share = 2 * meter["cpu_seconds"] / meter["wall_seconds"]  # every second step is recorded
    print(f"beside the step  {1 + share / (os.cpu_count() or 1):.4f} at most")
    many = sum(e["args"].get("step", 0) > WARM for e in events) / len(
        [s for s in seconds if s > WARM]
    )
    print(
        f"spans            {1 + many * one / usual:.5f}: {many:.0f} a step, {1e6 * one:.1f} us each"
    )


if __name__ == "__main__":
    main()
