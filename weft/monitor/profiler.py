"""Profile chosen steps with torch.profiler, and summarize their time by cause.

``profile.steps = "10-12"`` writes ``traces/step-10-12/rank-N.json.gz`` for each rank, a trace for
Perfetto with a range for each span (`weft.monitor.spans`), and the breakdown of all ranks to
``summary.json`` and ``summary.txt``.  A run that ends within these steps summarizes those that
it has; one that fails writes the traces only.

Profiling slows a step down, on a CPU by tens of percent: shares are more reliable than seconds.

`compute_breakdown` attributes the seconds of a step to causes.  A step consists of its phases
(`STEP`), as in a record's ``step_seconds``: evaluating, saving and logging are not part of it.
Each instant has one cause, the first that applies:

on a GPU  a kernel computes ("compute"); else a kernel communicates; else memory is copied to or
          from the host ("offload"); else nothing runs on the device, and the host waits for data
          ("data") or does something else ("host").
on a CPU  the main thread starts a collective or waits for one; or waits for data; or is in an
          operator of torch ("compute"); or in none ("host").

So the causes add up to the step, and communication counts only where computation does not hide it.
Its cause is the mesh axis along which the ranks of its process group differ, or "world" for several
axes.  NCCL's kernels carry their group.  Gloo's work does not: on CPUs a profile marks the
collectives that Python starts (`COLLECTIVE_PREFIX`), and functional collectives, which C++ starts,
are those of tensor parallelism, their only user in weft.

A rank that waits in a collective waits for the network or for a late rank.  In a pipeline most of
"pp" is the bubble.
"""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, record_function

from weft.config.accelerators import supports
from weft.config.axes import AXES, SHARD_AXES
from weft.config.files import replace_text, write_json
from weft.config.schema import ProfileSection, steps_of
from weft.monitor import spans
from weft.monitor.device_memory import read_prediction
from weft.monitor.faults import fault_point
from weft.monitor.step_timer import PHASES, enter_phase
from weft.parallel.private import dump_memory_snapshot, set_memory_history, wrap_collectives
from weft.planning.placement import rank_to_coordinates
from weft.planning.plan import Plan

STEP = ("sync", "data", "forward_backward", "update", "device")  # keys of `PHASES`
COLLECTIVE_PREFIX = "communication: "  # followed by the axis
WORLD = "world"

LABELS = {
    "compute": "compute",
    "pp": "exposed pp, with the bubble",
    "offload": "copies to and from the host",
    "data": "waiting for data",
    "host": "host overhead",
    WORLD: "exposed, several axes",
}

Interval = tuple[float, float]  # start and end, in microseconds
Event = Mapping[str, Any]


class Profiler:
    """Profiler of the steps of ``profile.steps``; its context ends a running profile.

    Args:
        section: the section ``[profile]``.
        plan: layout of the run.
        device: of this rank.
        log: receives warnings, and on rank 0 the summary.
    """

    def __init__(
        self,
        section: ProfileSection,
        plan: Plan,
        device: torch.device,
        log: Callable[[str], None],
    ) -> None:
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
        self._synchronize()
        if self._memory and supports(self._device.type, "memory snapshots"):
            set_memory_history(enabled=True)
        activities = [ProfilerActivity.CPU]
        if supports(self._device.type, "kernels in traces"):
            activities.append(ProfilerActivity.__members__[self._device.type.upper()])
        else:
            self._collective_ranges.enter_context(wrap_collectives(self._mark))
        self._profiler = profile(activities=activities, profile_memory=self._memory)
        self._profiler.start()
        spans.set_ranges(True)

    def _synchronize(self) -> None:
        if self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)

    def _mark(self, ranks: Sequence[int]) -> record_function:
        return record_function(COLLECTIVE_PREFIX + find_axis(ranks, self._plan))

    def _end(self) -> Path:
        """Write this rank's trace; return its path."""
        profiler, self._profiler = self._profiler, None
        assert profiler is not None
        self._synchronize()  # the last step includes its kernels
        spans.set_ranges(False)
        enter_phase("profile")  # ends the last phase's span before its range
        fault_point("profile")
        self._collective_ranges.close()
        profiler.stop()
        self._trace_dir.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(self._path))
        if self._memory and supports(self._device.type, "memory snapshots"):
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
    causes += sorted(present.difference(causes))  # predicted: axes of experts
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


# --------------------------------------------------------------------------- breakdown


def compute_breakdown(
    trace: Mapping[str, Any], axis_of: Callable[[Sequence[int]], str]
) -> tuple[int, dict[str, float]]:
    """Return the number of steps in a rank's trace, and their total seconds by cause.

    Args:
        trace: a trace of torch.profiler, with ranges named as in `PHASES`.
        axis_of: returns the mesh axis along which ranks differ.
    """
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    names = {PHASES[name].activity for name in STEP}
    ranges = [event for event in events if event.get("cat") == "user_annotation"]
    phases = [event for event in ranges if event["name"] in names]
    if (end := _abandoned_at(phases)) is not None:
        events, phases = ([e for e in each if float(e["ts"]) < end] for each in (events, phases))
    data = [event for event in phases if event["name"] == PHASES["data"].activity]
    on_gpu = any(event.get("cat") == "kernel" for event in events)
    if on_gpu:
        groups = trace.get("distributedInfo", {}).get("pg_config", [])
        ranks_of = {str(group["pg_name"]): group["ranks"] for group in groups}
        find_cause: Callable[[Event], str] = partial(_gpu_cause, ranks_of, axis_of)
    else:
        main = {event["tid"] for event in phases}
        events = [event for event in events if event["tid"] in main]
        find_cause = _cpu_cause
    causes: dict[str, list[Interval]] = {"data": list(map(event_interval, data))}
    for event in events:
        if cause := find_cause(event):
            causes.setdefault(cause, []).append(event_interval(event))
    axes = [cause for cause in causes if cause not in ("compute", "offload", "data")]
    order = ["compute", *axes, "offload", "data"] if on_gpu else [*axes, "data", "compute"]
    remaining = merge_intervals(event_interval(event) for event in phases)
    seconds: dict[str, float] = {}
    for cause in order:
        size, remaining = split_intervals(remaining, merge_intervals(causes.get(cause, [])))
        seconds[cause] = size / 1e6
    seconds["host"] = sum(end - start for start, end in remaining) / 1e6
    return len(data), seconds


def _abandoned_at(phases: Sequence[Event]) -> float | None:
    """Return the start of a last step that a stop abandoned before its update."""
    updates = [float(e["ts"]) for e in phases if e["name"] == PHASES["update"].activity]
    data = [float(e["ts"]) for e in phases if e["name"] == PHASES["data"].activity]
    later = [start for start in data if updates and start > max(updates)]
    return min(later, default=None)


def _gpu_cause(
    ranks_of: Mapping[str, Sequence[int]], axis_of: Callable[[Sequence[int]], str], event: Event
) -> str:
    """Return the cause of a kernel or copy, empty for other events."""
    name, kind, args = event["name"], event.get("cat"), event.get("args", {})
    if kind == "kernel" and name.startswith(("nccl", "rccl")):
        ranks = ranks_of.get(args.get("Process Group Name", ""))
        if ranks is None:  # text, without the middle of a long list
            text = str(args.get("Process Group Ranks", ""))
            ranks = [int(rank) for rank in re.findall(r"\d+", text)]
        return axis_of(ranks)
    if kind == "gpu_memcpy" and not ("DtoD" in name or "Device -> Device" in name):
        return "offload"
    return "compute" if kind in ("kernel", "gpu_memcpy", "gpu_memset") else ""


def _cpu_cause(event: Event) -> str:
    """Return the cause of a collective or operator, empty for other events."""
    name, kind = event["name"], event.get("cat")
    if kind == "user_annotation" and name.startswith(COLLECTIVE_PREFIX):
        return str(name.removeprefix(COLLECTIVE_PREFIX))
    if kind != "cpu_op":
        return ""
    if name.startswith("_c10d_functional::"):
        return "tp"
    # An autograd node may do anything; the operators in it have their own events.  Compiled code
    # has only the event of its region.
    is_operator = "::" in name and not name.startswith(("autograd::", "c10d::", "profiler::"))
    is_compiled = name.startswith(("Torch-Compiled Region", "## Call CompiledFxGraph"))
    return "compute" if is_operator or is_compiled else ""


def event_interval(event: Event) -> Interval:
    """Return the interval of an event."""
    start = float(event["ts"])
    return start, start + float(event["dur"])


def merge_intervals(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the union of intervals as sorted intervals that do not touch."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((start, end))
    return merged


def split_intervals(a: Sequence[Interval], b: Sequence[Interval]) -> tuple[float, list[Interval]]:
    """Return the size of ``a`` inside ``b``, and the rest of ``a``.

    Both are results of `merge_intervals`.
    """
    size, rest, index = 0.0, [], 0
    for start, end in a:
        while index < len(b) and b[index][1] <= start:
            index += 1
        current = index
        while current < len(b) and b[current][0] < end:
            first, last = max(start, b[current][0]), min(end, b[current][1])
            if start < first:
                rest.append((start, first))
            size += last - first
            start = last
            current += 1
        if start < end:
            rest.append((start, end))
    return size, rest


def find_axis(ranks: Sequence[int], plan: Plan) -> str:
    """Return the single mesh axis along which ranks differ; `WORLD` for several."""
    coordinates = [rank_to_coordinates(rank, plan.axis_sizes, plan.axis_order) for rank in ranks]
    axes = {axis for axis in AXES if len({each[axis] for each in coordinates}) > 1}
    if len(axes) > 1 and axes <= {*SHARD_AXES}:
        return "dp_shard"  # parameters are sharded over all of them
    return axes.pop() if len(axes) == 1 else WORLD
