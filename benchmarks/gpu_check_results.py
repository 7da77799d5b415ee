"""Results of the stages of the GPU check, read from the files of their runs.

A file may be missing, cut short or damaged, because its run was killed: then a value is missing,
and nothing is raised but `WeftError`.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from weft.config.errors import WeftError
from weft.config.files import read_json, reading
from weft.doctor.device_checks import find_device_spec
from weft.doctor.node_facts import Directory, Facts
from weft.estimate.cost import STREAM_EFFICIENCY
from weft.monitor.profiler import LABELS
from weft.planning.devices import GIB
from weft.records.jsonl_reader import is_number
from weft.records.run_reader import RunReader

LOSS_RECORDS = 50  # at the end of a run, whose losses are averaged
TRAINED_BYTES = 12  # per parameter in a checkpoint: the parameter and two moments, in float32


@dataclass(frozen=True)
class Row:
    """A measured quantity, and the value that was planned for it; None: unknown."""

    quantity: str
    measured: float | None
    planned: float | None = None


@dataclass(frozen=True)
class StageResult:
    """The result of a stage.

    Attributes:
        status: passed, failed, timed out, skipped, interrupted, or not run.
        reason: why it did not pass.
        seconds: wall-clock time, with the start of its processes.
        size: keys of the model; only runs of the same model are compared.
        keys: other keys that distinguish the stage.
        command: the complete command; ``$DIRECTORY`` is a temporary directory.
        output: the last lines of a stage that did not pass.
    """

    name: str
    status: str
    reason: str = ""
    seconds: float = 0.0
    rows: tuple[Row, ...] = ()
    size: str = ""
    keys: str = ""
    command: str = ""
    output: str = ""


def divide(a: float | None, b: float | None) -> float | None:
    """Return a / b; None if either is unknown, or the result is not finite."""
    return None if a is None or not b else finite(a / b)


def finite(value: float) -> float | None:
    """Return the value; None if it is NaN or Inf."""
    return value if math.isfinite(value) else None


def number(values: object, *names: str) -> float | None:
    """Return the finite number at a path in nested JSON objects, or None."""
    for name in names:
        values = values.get(name) if isinstance(values, Mapping) else None
    return float(values) if is_number(values) else None  # type: ignore[arg-type]


def scale(value: float | None, factor: float) -> float | None:
    """Return value x factor; None if it is unknown."""
    return None if value is None else finite(value * factor)


# --------------------------------------------------------------------------- runs


def read_speed(run_dir: Path, plan: Mapping[str, Any], disk: Directory) -> list[Row]:
    """Return speed, memory and the time of a profiled step by cause.

    Args:
        run_dir: directory of the run.
        plan: output of ``weft plan --json`` for the run.
        disk: not used.
    """
    run = RunReader(run_dir)
    rate, memory = "tokens_per_second_per_device", number(plan, "peak_memory_gib")
    if memory is not None and plan.get("device") == "cuda":
        # A run records what PyTorch's allocator holds.
        memory -= number(plan, "memory_gib", "outside") or 0.0
    return [
        Row("tokens/s per device", run.steady_median(rate), number(plan, rate)),
        Row("MFU, %", scale(run.steady_median("mfu"), 100), scale(number(plan, "mfu"), 100)),
        Row("memory, GiB", run.last("memory_peak_gib"), memory),
        *read_profile(run_dir, plan),
    ]


def read_profile(run_dir: Path, plan: Mapping[str, Any]) -> list[Row]:
    """Return the profiled milliseconds of a step by cause, mean over ranks."""
    rows = []
    for path in sorted(run_dir.glob("traces/*/summary.json"))[:1]:
        with suppress(WeftError), reading(path):
            results = [rank["seconds"] for rank in read_json(path)["ranks"] if "seconds" in rank]
            for cause in dict.fromkeys(name for seconds in results for name in seconds):
                found = [number(seconds, cause) or 0.0 for seconds in results]
                label = LABELS.get(cause, f"exposed communication of {cause}")
                planned = scale(number(plan, "seconds", cause), 1e3)
                rows.append(Row(f"{label}, ms", 1e3 * fmean(found), planned))
    return rows


def read_checkpoints(run_dir: Path, plan: Mapping[str, Any], disk: Directory) -> list[Row]:
    """Return how long the shortest save blocked training, and a checkpoint's size.

    The first save also allocates memory, and a run waits for its last one.
    The planned time of a synchronous save is that of its bytes at the measured speed of the disk.
    """
    run = RunReader(run_dir)
    pattern = r"blocked training for ([\d.]+(?:e[-+]?\d+)?) s"
    texts = [event.text for event in run.read_events() if event.kind == "checkpoint"]
    seconds = [float(found[1]) for text in texts if (found := re.search(pattern, text))]
    newest = max(run_dir.glob("checkpoints/step-*"), default=None)
    size = sum(path.stat().st_size for path in newest.iterdir()) if newest else None
    waits = run.job.get("checkpoint", {}).get("async_save") is False
    return [
        Row(
            "seconds blocked by a save",
            min(seconds, default=None),
            divide(size, disk.write) if waits else None,
        ),
        Row(
            "checkpoint, GiB",
            scale(size, 1 / GIB),
            scale(number(plan, "num_params"), TRAINED_BYTES / GIB),
        ),
    ]


def read_resume(run_dir: Path, plan: Mapping[str, Any], disk: Directory) -> list[Row]:
    """Return the seconds that the last start took to build the model and to load."""
    run = RunReader(run_dir)
    starts, seconds = (run.column(f"time_breakdown.{kind}") for kind in ("restarting", "restoring"))
    resumed = any(event.text.startswith("resumed from step") for event in run.read_events())
    before = seconds[starts != starts[-1]] if len(starts) else seconds
    value = finite(float(seconds[-1] - before[-1])) if resumed and len(before) else None
    return [Row("seconds to build and load", value)]


def read_loss(run_dir: Path, plan: Mapping[str, Any], disk: Directory) -> list[Row]:
    """Return the mean training loss of the last records, if it is finite."""
    losses = read_losses(run_dir)[-LOSS_RECORDS:]
    return [Row(f"loss, mean of {LOSS_RECORDS} steps", finite(fmean(losses)) if losses else None)]


def read_losses(run_dir: Path) -> list[float]:
    """Return the training loss of every record."""
    losses: list[float] = RunReader(run_dir).column("loss").tolist()
    return losses


def read_first_losses(run_dir: Path, plan: Mapping[str, Any], disk: Directory) -> list[Row]:
    """Return the loss of the last record, which `compare_losses` compares with others."""
    return [Row("loss of the last step", RunReader(run_dir).last("loss"))]


def read_hang(run_dir: Path, plan: Mapping[str, Any], disk: Directory) -> list[Row]:
    """Return the number of the rank that the watchdog found stopped, from the log of the run."""
    text = run_dir.with_suffix(".log").read_text("utf-8", "replace")
    found = re.search(r"rank (\d{1,9}) is missing: it is stopped \(SIGSTOP\)", text)
    return [Row("rank named as stopped", float(found[1]) if found else None)]


def compare_losses(
    losses: Sequence[float], expected: Sequence[float], window: int = 1
) -> float | None:
    """Return the largest relative difference of the mean losses of windows.

    Args:
        losses: of each step.
        expected: of the run to compare with.
        window: steps of a mean; a rest is not compared.

    Returns:
        None if a loss is NaN or Inf, or there are fewer than in the other run.
    """
    if len(losses) < len(expected) or len(expected) < window:
        return None
    differences = []
    for start in range(0, len(expected) - window + 1, window):
        mean, other = (fmean(values[start : start + window]) for values in (losses, expected))
        difference = divide(abs(mean - other), abs(other))
        if difference is None:
            return None
        differences.append(difference)
    return max(differences)


# --------------------------------------------------------------------------- tests and devices


def read_test_counts(output: str) -> dict[str, int]:
    """Return the numbers of tests by outcome, from the output of pytest in several processes.

    They are those of its last line, or of the tests that ended before it was killed.
    """
    ended = re.findall(
        r"^\[gw\d{1,4}\] \[ *\d{1,3}%\] (PASSED|FAILED|SKIPPED|ERROR) ", output, re.M
    )
    counts: dict[str, int] = Counter(name.lower() for name in ended)
    for line in output.splitlines():
        found = re.findall(r"(\d{1,9}) (passed|failed|skipped|errors?)\b", line)
        if found and re.search(r" in [\d.]+s", line):
            counts = {name.removesuffix("s"): int(count) for count, name in found}
    return counts


def device_rows(facts: Facts) -> list[Row]:
    """Return the speeds of the slowest device and of the all-reduce.

    The planned speeds are those of the planner's table.  A CPU has none, because other processes
    share it.
    """
    results = facts.measured
    device = find_device_spec(facts) if facts.device == "cuda" else None
    flops, memory, link = (
        (device.flops("bf16"), device.bandwidth, device.link.bandwidth) if device else [None] * 3
    )
    stream = 1e-9 * STREAM_EFFICIENCY  # what a copy reaches of a data sheet's bandwidth
    slowest, narrowest = (min(x, default=None) for x in (results.flops, results.bandwidth))
    return [
        Row("matmul, TFLOP/s", scale(slowest, 1e-12), scale(flops, 1e-12)),
        Row("copy, GB/s", scale(narrowest, stream), scale(memory, stream)),
        Row("all-reduce, GB/s per device", scale(results.busbw or None, 1e-9), scale(link, 1e-9)),
    ]
