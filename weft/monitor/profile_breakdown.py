"""Attribute the seconds of a profiled step to causes, from a torch.profiler trace.

A step consists of its phases (`STEP`), as in a record's ``step_seconds``: evaluating, saving and
logging are not part of it.  Each instant has one cause, the first that applies:

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

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from weft.monitor.step_timer import PHASES
from weft.plan.placement import AXES, rank_to_coordinates
from weft.plan.plan import Plan

STEP = ("sync", "data", "forward_backward", "update", "device")  # keys of `PHASES`
COLLECTIVE_PREFIX = "communication: "  # followed by the axis
WORLD = "world"

Interval = tuple[float, float]  # start and end, in microseconds
Event = Mapping[str, Any]


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
    data_events = [event for event in phases if event["name"] == PHASES["data"].activity]
    data = [event_interval(event) for event in data_events]
    if any(event.get("cat") == "kernel" for event in events):
        causes = [*_gpu_causes(trace, events, axis_of), ("data", data)]
    else:
        main = {event["tid"] for event in phases}
        calls, compute = _cpu_causes([event for event in events if event["tid"] in main])
        causes = [*calls, ("data", data), ("compute", compute)]
    remaining = merge_intervals(event_interval(event) for event in phases)
    seconds: dict[str, float] = {}
    for name, intervals in causes:
        size, remaining = split_intervals(remaining, merge_intervals(intervals))
        seconds[name] = seconds.get(name, 0.0) + size / 1e6
    seconds["host"] = sum(end - start for start, end in remaining) / 1e6
    return len(data_events), seconds


def _gpu_causes(
    trace: Mapping[str, Any], events: Iterable[Event], axis_of: Callable[[Sequence[int]], str]
) -> list[tuple[str, list[Interval]]]:
    groups = trace.get("distributedInfo", {}).get("pg_config", [])
    ranks_of = {str(group["pg_name"]): group["ranks"] for group in groups}
    compute: list[Interval] = []
    copies: list[Interval] = []
    axes: dict[str, list[Interval]] = {}
    for event in events:
        name, kind, args = event["name"], event.get("cat"), event.get("args", {})
        if kind == "kernel" and name.startswith(("nccl", "rccl")):
            ranks = ranks_of.get(args.get("Process Group Name", ""))
            if ranks is None:  # text, without the middle of a long list
                ranks = re.findall(r"\d+", str(args.get("Process Group Ranks", "")))
            axis = axis_of([int(rank) for rank in ranks])
            axes.setdefault(axis, []).append(event_interval(event))
        elif kind == "gpu_memcpy" and not ("DtoD" in name or "Device -> Device" in name):
            copies.append(event_interval(event))
        elif kind in ("kernel", "gpu_memcpy", "gpu_memset"):
            compute.append(event_interval(event))
    return [("compute", compute), *axes.items(), ("offload", copies)]


def _cpu_causes(events: Iterable[Event]) -> tuple[list[tuple[str, list[Interval]]], list[Interval]]:
    """Return the communication of the main thread by axis, and its computation."""
    axes: dict[str, list[Interval]] = {}
    compute: list[Interval] = []
    for event in events:
        name, kind = event["name"], event.get("cat")
        if kind == "user_annotation" and name.startswith(COLLECTIVE_PREFIX):
            axis = name.removeprefix(COLLECTIVE_PREFIX)
            axes.setdefault(axis, []).append(event_interval(event))
        elif kind != "cpu_op":
            continue
        elif name.startswith("_c10d_functional::"):
            axes.setdefault("tp", []).append(event_interval(event))
        # An autograd node may do anything; the operators in it have their own events.  Compiled
        # code has only the event of its region.
        elif ("::" in name and not name.startswith(("autograd::", "c10d::", "profiler::"))) or (
            name.startswith(("Torch-Compiled Region", "## Call CompiledFxGraph"))
        ):
            compute.append(event_interval(event))
    return list(axes.items()), compute


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
    if axes == {"dp_shard", "cp"}:
        return "dp_shard"  # parameters are sharded over both
    return axes.pop() if len(axes) == 1 else WORLD
