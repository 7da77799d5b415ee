"""Profile chosen steps with torch.profiler, and summarize their time by cause.

``profile.steps = "10-12"`` writes ``traces/step-10-12/rank-N.json.gz`` for each rank, a trace for
Perfetto with a range for each span (`weft.monitor.spans`), and the `profile_breakdown` of all ranks
to ``summary.json`` and ``summary.txt``.  A run that ends within these steps summarizes those that
it has; one that fails writes the traces only.

Profiling slows a step down, on a CPU by tens of percent: shares are more reliable than seconds.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, record_function

from weft.config.files import replace_text, write_json
from weft.config.schema import steps_of
from weft.monitor import spans
from weft.monitor.device_memory import read_prediction
from weft.monitor.faults import fault_point
from weft.monitor.profile_breakdown import COLLECTIVE_PREFIX, WORLD, compute_breakdown, find_axis
from weft.monitor.step_timer import enter_phase
from weft.parallel.private import dump_memory_snapshot, set_memory_history, wrap_collectives
from weft.plan.placement import AXES
from weft.plan.plan import Plan

LABELS = {
    "compute": "compute",
    "pp": "exposed pp, with the bubble",
    "offload": "copies to and from the host",
    "data": "waiting for data",
    "host": "host overhead",
    WORLD: "exposed, several axes",
}


class Profiler:
    """Profiler of the steps of ``profile.steps``; its context ends a running profile.

    ``log`` receives warnings, and on rank 0 the summary.
    """

    def __init__(self, plan: Plan, device: torch.device, log: Callable[[str], None]) -> None:
        section = plan.job.profile
        self._steps = next(iter(steps_of(section.steps)), range(0))
        self._memory, self._plan, self._device, self._log = section.memory, plan, device, log
        self._run_dir = plan.run_path
        if self._steps:
            self._trace_dir = self._run_dir / "traces" / f"step-{self._steps[0]}-{self._steps[-1]}"
            self._path = self._trace_dir / f"rank-{dist.get_rank()}.json.gz"
        self._rank = dist.get_rank()
        self._profiler: profile | None = None
        self._is_done = False  # once per process, also after a rewind
        self._collective_ranges = ExitStack()

    def advance(self, step: int) -> None:
        """Begin or end the profile if that is due before ``step``; ending is a collective."""
        if self._profiler is None:
            if not self._is_done and step in self._steps[:1]:
                self._begin()
        elif step not in self._steps:
            self._finish()

    def _finish(self) -> None:
        result: dict[str, Any] = {"rank": self._rank}
        try:
            result |= self._read_trace(self._end())
        except (OSError, ValueError, EOFError) as error:
            # A full disk must not end a run; torch reports a failed export in its log only.
            with suppress(OSError):
                self._path.unlink()
            result["error"] = str(error)
        results: list[dict[str, Any]] = [{}] * dist.get_world_size()
        dist.all_gather_object(results, result)
        if self._rank == 0:
            self._summarize(results)

    def _begin(self) -> None:
        enter_phase("profile")
        fault_point("profile")
        self._is_done = True
        on_gpu = self._device.type == "cuda"
        if on_gpu:
            torch.cuda.synchronize(self._device)
            if self._memory:
                set_memory_history(enabled=True)
        else:
            self._collective_ranges.enter_context(wrap_collectives(self._mark))
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
        self._profiler = profile(activities=activities, profile_memory=self._memory)
        self._profiler.start()
        spans.set_ranges(True)

    def _mark(self, ranks: Sequence[int]) -> record_function:
        return record_function(COLLECTIVE_PREFIX + find_axis(ranks, self._plan))

    def _end(self) -> Path:
        """Write this rank's trace; return its path."""
        profiler, self._profiler = self._profiler, None
        assert profiler is not None
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # the last step includes its kernels
        spans.set_ranges(False)
        enter_phase("profile")  # ends the last phase's span before its range
        fault_point("profile")
        self._collective_ranges.close()
        profiler.stop()
        self._trace_dir.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(self._path))
        if self._device.type == "cuda" and self._memory:
            try:
                dump_memory_snapshot(self._trace_dir / f"rank-{self._rank}.memory.pickle")
            finally:
                set_memory_history(enabled=False)
        return self._path

    def _read_trace(self, path: Path) -> dict[str, Any]:
        with gzip.open(path, "rt", encoding="utf-8") as file:
            trace = json.load(file)
        steps, seconds = compute_breakdown(trace, lambda ranks: find_axis(ranks, self._plan))
        return {"steps": steps, "seconds": {n: s / max(1, steps) for n, s in seconds.items()}}

    def _summarize(self, results: Sequence[Mapping[str, Any]]) -> None:
        """Write and log the results of all ranks."""
        seconds = [(result["rank"], result["seconds"]) for result in results if "seconds" in result]
        steps = max((result.get("steps", 0) for result in results), default=0)
        predicted = read_prediction(self._run_dir).get("seconds")
        lines = [f"rank {r['rank']}: no trace: {r['error']}" for r in results if "error" in r]
        if seconds:
            lines += format_table(seconds, predicted)
        first = self._steps[0]
        head = f"profile of steps {first} to {first + steps - 1}: seconds of a step by cause"
        text = "\n".join([head, "", *lines, "", f"traces: {self._trace_dir}"])
        summary = {"first_step": first, "steps": steps, "ranks": results, "predicted": predicted}
        try:
            write_json(self._trace_dir / "summary.json", summary, indent=2)
            replace_text(self._trace_dir / "summary.txt", text + "\n")
        except OSError as error:
            self._log(f"warning: {error}")
        self._log(text)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self._profiler is None:
            return
        if error is None:
            self._finish()
            return
        try:
            self._end()
        except Exception as another:
            error.add_note(f"the profile could not be written: {another}")


def format_table(
    ranks: Sequence[tuple[int, Mapping[str, float]]], predicted: Mapping[str, float] | None
) -> list[str]:
    """Format a step's seconds by cause: mean and maximum over ranks, and predicted.

    Args:
        ranks: for each rank its number, and its seconds of a step.
        predicted: see `weft.estimate.memory_check.RunPrediction`.
    """
    expected = dict(predicted or {})
    if "bubble" in expected:
        expected["pp"] = expected.pop("bubble") + expected.get("pp", 0.0)
    present = {name for _, seconds in ranks for name in seconds} | set(expected)
    causes = ["compute", *AXES, WORLD, "offload", "data", "host"]
    rows = [(LABELS.get(name, f"exposed {name}"), name) for name in causes if name in present]
    width = max(len(label) for label, _ in rows)
    column = f"{'predicted':>12}" if expected else ""
    lines = [f"{'':{width}}{'mean':>10}{'max':>10}{'on rank':>9}{column}"]
    for label, name in [*rows, ("total", "")]:
        values = [
            (seconds.get(name, 0.0) if name else sum(seconds.values()), rank)
            for rank, seconds in ranks
        ]
        maximum, rank = max(values)
        mean = sum(value for value, _ in values) / len(values)
        value = expected.get(name) if name else sum(expected.values())
        column = "" if not expected else f"{'-':>12}" if value is None else f"{value:12.4f}"
        lines.append(f"{label:{width}}{mean:10.4f}{maximum:10.4f}{rank:9}{column}")
    return lines
