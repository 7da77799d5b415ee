"""Some steps under torch.profiler, and a summary of what their seconds went into.

``profile.steps = "10-12"`` leaves ``traces/step-10-12/rank-N.json.gz`` for each rank, which
Perfetto opens, with a range for each span (`weft.monitor.spans`); and ``summary.json`` and
``summary.txt``, what `weft.monitor.profile_breakdown` makes of all of them.  A run that ends within
these steps leaves what it has; one that fails leaves the traces.

Profiling slows a step down, on a CPU by tens of percents: shares tell more than seconds.
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
from weft.config.schema import Job, steps_of
from weft.monitor import profile_breakdown as breakdown
from weft.monitor import spans
from weft.monitor.device_memory import expected_of
from weft.monitor.faults import fault_point as reach
from weft.parallel.private_hooks import dump_memory_snapshot, set_memory_history, wrap_collectives
from weft.plan.placement import AXES
from weft.plan.resolve import Plan

NAMES = {
    "compute": "computing",
    "pp": "waiting for other stages (pp)",
    "offload": "copies from and to the host",
    "data": "waiting for data",
    "host": "host: nothing computes",
    breakdown.WORLD: "exposed, over several axes",
}


class Profile:
    """The profile of a run, if it has one; a context, whose end ends a profile that is going on."""

    def __init__(
        self, job: Job, plan: Plan, device: torch.device, say: Callable[[str], None]
    ) -> None:
        self._steps = next(iter(steps_of(job.profile.steps)), range(0))
        self._memory, self._plan, self._device, self._say = job.profile.memory, plan, device, say
        self._run = Path(plan.run_dir)
        if self._steps:
            self._folder = self._run / "traces" / f"step-{self._steps[0]}-{self._steps[-1]}"
            self._path = self._folder / f"rank-{dist.get_rank()}.json.gz"
        self._rank = dist.get_rank()
        self._profiler: profile | None = None
        self._taken = False  # once in a process, also if the run goes back
        self._marking = ExitStack()

    def turns(self, step: int) -> bool:
        """Whether before ``step`` a profile begins, or ends; `turn` does it."""
        if self._profiler is None:
            return not self._taken and step in self._steps[:1]
        return step not in self._steps

    def turn(self) -> None:
        """Begin, or end.  Every rank calls it."""
        if self._profiler is None:
            self._begin()
            return
        told: dict[str, Any] = {"rank": self._rank}
        try:
            told |= self._told(self._end())
        except (OSError, ValueError, EOFError) as error:
            # A full disk is no reason to lose a run; of the trace torch tells it in its log only.
            with suppress(OSError):
                self._path.unlink()
            told["error"] = str(error)
        every: list[dict[str, Any]] = [{}] * dist.get_world_size()
        dist.all_gather_object(every, told)
        if self._rank == 0:
            self._summarize(every)

    def _begin(self) -> None:
        reach("profile")
        self._taken = True
        on_gpu = self._device.type == "cuda"
        if on_gpu:
            torch.cuda.synchronize(self._device)
            if self._memory:
                set_memory_history(enabled=True)
        else:
            self._marking.enter_context(wrap_collectives(self._mark))
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
        self._profiler = profile(activities=activities, profile_memory=self._memory)
        self._profiler.start()
        spans.set_ranges(True)

    def _mark(self, ranks: Sequence[int]) -> record_function:
        return record_function(breakdown.COLLECTIVE + breakdown.axis_between(ranks, self._plan))

    def _end(self) -> Path:
        """Write this rank's trace; its path."""
        profiler, self._profiler = self._profiler, None
        assert profiler is not None
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # what the last step asked for belongs to it
        spans.set_ranges(False)
        reach("profile")  # the last phase ends, and its range
        self._marking.close()
        profiler.stop()
        self._folder.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(self._path))
        if self._device.type == "cuda" and self._memory:
            try:
                dump_memory_snapshot(self._folder / f"rank-{self._rank}.memory.pickle")
            finally:
                set_memory_history(enabled=False)
        return self._path

    def _told(self, path: Path) -> dict[str, Any]:
        with gzip.open(path, "rt", encoding="utf-8") as file:
            trace = json.load(file)
        steps, seconds = breakdown.breakdown(
            trace, lambda ranks: breakdown.axis_between(ranks, self._plan)
        )
        return {"steps": steps, "seconds": {n: s / max(1, steps) for n, s in seconds.items()}}

    def _summarize(self, told: Sequence[Mapping[str, Any]]) -> None:
        """Write what all ranks found, and tell it."""
        spent = [(of["rank"], of["seconds"]) for of in told if "seconds" in of]
        steps = max((of.get("steps", 0) for of in told), default=0)
        expected = expected_of(self._run).get("seconds")
        lines = [f"rank {of['rank']}: no trace: {of['error']}" for of in told if "error" in of]
        if spent:
            lines += table(spent, expected)
        first = self._steps[0]
        head = f"profile of steps {first} to {first + steps - 1}: where the seconds of a step went"
        text = "\n".join([head, "", *lines, "", f"traces: {self._folder}"])
        summary = {"first_step": first, "steps": steps, "ranks": told, "expected": expected}
        try:
            write_json(self._folder / "summary.json", summary, indent=2)
            replace_text(self._folder / "summary.txt", text + "\n")
        except OSError as error:
            self._say(f"warning: {error}")
        self._say(text)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self._profiler is None:
            return
        if error is None:
            self.turn()
            return
        try:
            self._end()
        except Exception as another:
            error.add_note(f"the profile could not be written: {another}")


def table(
    spent: Sequence[tuple[int, Mapping[str, float]]], expected: Mapping[str, float] | None
) -> list[str]:
    """The seconds of a step by cause: the mean of the ranks, the most, and what was expected.

    Args:
        spent: by rank; every rank's are a step.
        expected: see `weft.estimate.memory_check.RunPrediction`.
    """
    wanted = dict(expected or {})
    if "bubble" in wanted:
        wanted["pp"] = wanted.pop("bubble") + wanted.get("pp", 0.0)
    found = {name for _, seconds in spent for name in seconds} | set(wanted)
    known = ["compute", *AXES, breakdown.WORLD, "offload", "data", "host"]
    rows = [(NAMES.get(name, f"exposed {name}"), name) for name in known if name in found]
    wide = max(len(label) for label, _ in rows)
    beside = f"{'expected':>12}" if wanted else ""
    lines = [f"{'':{wide}}{'mean':>10}{'most':>10}{'on rank':>9}{beside}"]
    for label, name in [*rows, ("a step", "")]:
        of = [
            (seconds.get(name, 0.0) if name else sum(seconds.values()), r) for r, seconds in spent
        ]
        most, rank = max(of)
        mean = sum(value for value, _ in of) / len(of)
        value = wanted.get(name) if name else sum(wanted.values())
        beside = "" if not wanted else f"{'-':>12}" if value is None else f"{value:12.4f}"
        lines.append(f"{label:{wide}}{mean:10.4f}{most:10.4f}{rank:9}{beside}")
    return lines
