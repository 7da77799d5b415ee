"""What the seconds of a profiled step went into, out of a torch.profiler trace.

A step is its phases (`STEP`), as in a record's ``step_seconds``: evaluating, saving and telling
are no part of it.  Each instant of it has one cause, the first of these that holds:

on a GPU  a kernel computes; else one communicates; else memory is copied from or to the host
          ("offload"); else nothing runs there, and the host waits for data ("data") or does
          something else ("host").
on a CPU  the main thread is in a collective or waits for one; or for data; or in an operator of
          torch's ("compute"); or in none ("host").

So the parts add up to the step.  Communication that computing hides does not appear; it is what is
exposed that costs time.  It is told by the axis of the mesh along which the ranks of its process
group differ, "world" where that are several.  A GPU's kernels of NCCL carry their group.  What gloo
does carries none: there a profile marks the collectives that Python starts (`COLLECTIVE`), and the
functional ones, which C++ starts, are those of tensor parallelism, as nothing else in weft uses
them.

A rank that waits in a collective may wait for the network, or for another rank that comes late.  In
a pipeline most of what is told as "pp" is its bubble.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from weft.monitor.faults import ACTIVITIES
from weft.plan.placement import AXES, rank_to_coordinates
from weft.plan.resolve import Plan

STEP = ("quorum", "step", "forward_backward", "gradients", "record")  # sites, see `ACTIVITIES`
COLLECTIVE = "communication: "  # and the axis
WORLD = "world"

Interval = tuple[float, float]
Event = Mapping[str, Any]


def breakdown(
    trace: Mapping[str, Any], axis_of: Callable[[Sequence[int]], str]
) -> tuple[int, dict[str, float]]:
    """How many steps are in a rank's trace, and the seconds of all of them by cause.

    Args:
        trace: as torch.profiler writes it, with ranges named as in `ACTIVITIES`.
        axis_of: the axis of the mesh along which these ranks differ.
    """
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    phases = {ACTIVITIES[site] for site in STEP}
    ranges = [event for event in events if event.get("cat") == "user_annotation"]
    mine = [event for event in ranges if event["name"] in phases]
    steps = sum(event["name"] == ACTIVITIES["step"] for event in mine)
    data = [interval(event) for event in mine if event["name"] == ACTIVITIES["step"]]
    if any(event.get("cat") == "kernel" for event in events):
        layers = [*_on_gpu(trace, events, axis_of), ("data", data)]
    else:
        main = {event["tid"] for event in mine}
        calls, computing = _on_cpu([event for event in events if event["tid"] in main])
        layers = [*calls, ("data", data), ("compute", computing)]
    left = union(interval(event) for event in mine)
    seconds: dict[str, float] = {}
    for name, intervals in layers:
        taken, left = claim(left, union(intervals))
        seconds[name] = seconds.get(name, 0.0) + taken / 1e6
    seconds["host"] = sum(end - start for start, end in left) / 1e6
    return steps, seconds


def _on_gpu(
    trace: Mapping[str, Any], events: Iterable[Event], axis_of: Callable[[Sequence[int]], str]
) -> list[tuple[str, list[Interval]]]:
    groups = trace.get("distributedInfo", {}).get("pg_config", [])
    ranks_of = {str(group["pg_name"]): group["ranks"] for group in groups}
    computing: list[Interval] = []
    copying: list[Interval] = []
    axes: dict[str, list[Interval]] = {}
    for event in events:
        name, kind, args = event["name"], event.get("cat"), event.get("args", {})
        if kind == "kernel" and name.startswith(("nccl", "rccl")):
            ranks = ranks_of.get(args.get("Process Group Name", ""))
            if ranks is None:  # as text, the middle of a long list left out
                ranks = re.findall(r"\d+", str(args.get("Process Group Ranks", "")))
            axis = axis_of([int(rank) for rank in ranks])
            axes.setdefault(axis, []).append(interval(event))
        elif kind == "gpu_memcpy" and not ("DtoD" in name or "Device -> Device" in name):
            copying.append(interval(event))
        elif kind in ("kernel", "gpu_memcpy", "gpu_memset"):
            computing.append(interval(event))
    return [("compute", computing), *axes.items(), ("offload", copying)]


def _on_cpu(events: Iterable[Event]) -> tuple[list[tuple[str, list[Interval]]], list[Interval]]:
    """Of the main thread: communication by axis, and computing."""
    axes: dict[str, list[Interval]] = {}
    computing: list[Interval] = []
    for event in events:
        name, kind = event["name"], event.get("cat")
        if kind == "user_annotation" and name.startswith(COLLECTIVE):
            axes.setdefault(name.removeprefix(COLLECTIVE), []).append(interval(event))
        elif kind != "cpu_op":
            continue
        elif name.startswith("_c10d_functional::"):
            axes.setdefault("tp", []).append(interval(event))
        # What autograd calls may be anything; the operators in it have events of their own.  What
        # is compiled has only the region's.
        elif ("::" in name and not name.startswith(("autograd::", "c10d::", "profiler::"))) or (
            name.startswith(("Torch-Compiled Region", "## Call CompiledFxGraph"))
        ):
            computing.append(interval(event))
    return list(axes.items()), computing


def interval(event: Event) -> Interval:
    """When it began and ended, in microseconds."""
    start = float(event["ts"])
    return start, start + float(event["dur"])


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same instants in intervals that do not touch, in order."""
    found: list[Interval] = []
    for start, end in sorted(intervals):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((start, end))
    return found


def claim(left: Sequence[Interval], wanted: Sequence[Interval]) -> tuple[float, list[Interval]]:
    """How much of ``left`` lies in ``wanted``, and what of it does not; both as of `union`."""
    taken, rest, at = 0.0, [], 0
    for start, end in left:
        while at < len(wanted) and wanted[at][1] <= start:
            at += 1
        here = at
        while here < len(wanted) and wanted[here][0] < end:
            first, last = max(start, wanted[here][0]), min(end, wanted[here][1])
            if start < first:
                rest.append((start, first))
            taken += last - first
            start = last
            here += 1
        if start < end:
            rest.append((start, end))
    return taken, rest


def axis_between(ranks: Sequence[int], plan: Plan) -> str:
    """The axis of the mesh along which ``ranks`` differ; `WORLD` if there is not just one."""
    places = [rank_to_coordinates(rank, plan.axis_sizes, plan.axis_order) for rank in ranks]
    axes = {axis for axis in AXES if len({place[axis] for place in places}) > 1}
    if axes == {"dp_shard", "cp"}:
        return "dp_shard"  # to parameters the ranks of a sequence are shards
    return axes.pop() if len(axes) == 1 else WORLD
