"""Predict memory, step time and its breakdown for a plan.

`forecast` traces every pipeline rank.  Memory is that of the fullest rank, time that of the
slowest.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from weft.config.accelerators import GPU
from weft.estimate.cost import (
    Seconds,
    Span,
    build_hardware,
    pipeline_spans,
    step_seconds,
)
from weft.estimate.error_ranges import (
    ErrorRange,
    find_error_range,
    group_label,
    group_of_plan,
    load_error_ranges,
)
from weft.estimate.trace import RankTrace, collective_bytes, trace_ranks
from weft.estimate.trace_cache import load_or_compute
from weft.estimate.trace_memory import (
    RankMemory,
    add_paired_passes,
    peak_live_bytes,
    simulate_memory,
)
from weft.estimate.trace_to_cost import build_step
from weft.estimate.whole_run import predict_whole_run
from weft.planning.devices import GIB, Device
from weft.planning.plan import Machine, Plan

# Outside PyTorch's allocator.  GPU: the CUDA context (0.5 GiB) and NCCL's buffers; CPU: the
# interpreter with PyTorch.
OUTSIDE_ALLOCATOR, OUTSIDE_CPU_ALLOCATOR = int(1.25 * GIB), int(0.4 * GIB)
# On more nodes, networks of different clusters are not comparable; see docs/planner.md.
KNOWN_NODES = 32


@dataclass(frozen=True)
class AxisCommunication:
    """Communication of one rank per step along one mesh axis."""

    collectives: int
    bytes: int
    exposed_seconds: float


@dataclass(frozen=True)
class Forecast:
    """The predicted memory and speed of a plan.

    ``memory``: of the fullest rank, ``rank``; ``live_peaks``: peak of live bytes of each pipeline
    rank; ``capacity_bytes``: memory of one device, None if unknown; ``time_breakdown``: seconds of
    the slowest rank by cause, None for an unknown device; ``error_range``: of its time;
    ``timeline``: actions of the pipeline, None without a pipeline or a time.
    """

    plan: Plan
    memory: RankMemory
    rank: int
    live_peaks: tuple[int, ...]
    capacity_bytes: int | None
    outside_bytes: int
    time_breakdown: Seconds | None
    communication: dict[str, AxisCommunication]
    error_range: ErrorRange
    caveats: tuple[str, ...]
    timeline: tuple[Span, ...] | None = None

    @property
    def error(self) -> float:
        """Relative error of the time: the larger side of its range."""
        return self.error_range.error

    @property
    def needed_bytes(self) -> int:
        """Bytes that the device must have."""
        return self.memory.reserved + self.outside_bytes

    @property
    def recorded_bytes(self) -> int:
        """Bytes that a run records: on a GPU reserved by PyTorch, on a CPU resident."""
        return self.memory.reserved + (self.outside_bytes if self.plan.device == "cpu" else 0)

    @property
    def fits(self) -> bool | None:
        """True if the fullest rank fits on its device; None if the memory is unknown."""
        return None if self.capacity_bytes is None else self.needed_bytes <= self.capacity_bytes

    @property
    def step_seconds(self) -> float | None:
        """Seconds of a step on the slowest rank; None for an unknown device."""
        return None if self.time_breakdown is None else self.time_breakdown.total()

    @property
    def run_seconds(self) -> float | None:
        """Seconds of all steps, without start, evaluation and checkpoints.

        None if the time of a step is unknown, or epochs of unread data decide the number of steps.
        """
        if self.step_seconds is None or not self.plan.num_steps:
            return None
        return self.step_seconds * self.plan.num_steps

    @property
    def device_hours(self) -> float | None:
        """Hours of all steps, times the number of devices."""
        return None if self.run_seconds is None else self.run_seconds / 3600 * self.plan.world_size

    @property
    def tokens_per_second_per_device(self) -> float | None:
        """Tokens per second, divided by the number of ranks."""
        if self.step_seconds is None:
            return None
        return self.plan.tokens_per_step / self.step_seconds / self.plan.world_size

    @property
    def mfu(self) -> float | None:
        """Model FLOP/s divided by the device's peak; None if either is unknown."""
        speed, peak = self.tokens_per_second_per_device, self.plan.peak_flops
        if speed is None or peak is None:
            return None
        return speed * self.plan.flops_per_token / peak

    @property
    def bubble_fraction(self) -> float | None:
        """Fraction of the step in which the slowest rank waits for stages."""
        if self.time_breakdown is None:
            return None
        return self.time_breakdown["bubble"] / self.time_breakdown.total()

    def gib_by_category(self) -> dict[str, float]:
        """Return GiB of the fullest rank at its peak, by category.

        ``allocator``: reserved beyond the live bytes; ``outside``: outside the allocator.
        """
        categories = {name: size / GIB for name, size in self.memory.live_bytes.items()}
        categories["allocator"] = (
            self.memory.reserved - sum(self.memory.live_bytes.values())
        ) / GIB
        return categories | {"outside": self.outside_bytes / GIB}

    @property
    def bottlenecks(self) -> list[str]:
        """Lines on missing memory, the largest causes of time, and caveats."""
        lines = []
        if self.fits is False:
            largest = max(self.gib_by_category().items(), key=lambda part: part[1])
            assert self.capacity_bytes is not None
            needed, capacity = self.needed_bytes / GIB, self.capacity_bytes / GIB
            name, size = largest
            lines.append(f"memory: {needed:.1f} GiB of {capacity:.1f}, {size:.1f} of it for {name}")
        if self.time_breakdown is not None:
            total = self.time_breakdown.total()
            parts = sorted(self.time_breakdown.items(), key=lambda part: -part[1])
            lines += [
                f"{part / total:.0%} {cause_label(n)}" for n, part in parts if part > 0.05 * total
            ]
        return [*lines, *self.caveats]

    def to_dict(self) -> dict[str, Any]:
        """Return the forecast as JSON types."""
        return {
            "fits": self.fits,
            "peak_memory_gib": self.needed_bytes / GIB,
            "memory_gib": self.gib_by_category(),
            "capacity_gib": None if self.capacity_bytes is None else self.capacity_bytes / GIB,
            "fullest_rank": self.rank,
            "live_gib_of_pipeline_ranks": [size / GIB for size in self.live_peaks],
            "step_seconds": self.step_seconds,
            "run_seconds": self.run_seconds,
            "device_hours": self.device_hours,
            "seconds": None if self.time_breakdown is None else dict(self.time_breakdown),
            "error": self.error,
            "step_seconds_range": None
            if self.step_seconds is None
            else [self.step_seconds * factor for factor in self.error_range],
            "tokens_per_second_per_device": self.tokens_per_second_per_device,
            "mfu": self.mfu,
            "bubble_fraction": self.bubble_fraction,
            "communication": {
                axis: {
                    "collectives": traffic.collectives,
                    "gib": traffic.bytes / GIB,
                    "exposed_seconds": traffic.exposed_seconds,
                }
                for axis, traffic in self.communication.items()
            },
            "limits": self.bottlenecks,
        }


def cause_label(cause: str) -> str:
    """Return the label of a cause of time, for people."""
    labels = {"compute": "compute", "host": "host overhead", "bubble": "pipeline bubble"}
    return labels.get(cause, f"exposed {cause}")


def forecast(plan: Plan, machine: Machine, device: Device | None, cached: bool = False) -> Forecast:
    """Trace a plan and price it.

    Args:
        plan: the plan of the run.
        machine: target machine.
        device: its device; None: predict only memory.
        cached: keep traces on disk for the next prediction.
    """
    if not cached:
        return price_traces(plan, machine, device, trace_ranks(plan))
    prediction = load_or_compute(
        lambda: price_traces(plan, machine, device, trace_ranks(plan, cached)),
        (plan,),
        machine,
        device,
    )
    return replace(prediction, plan=plan)


def price_traces(
    plan: Plan, machine: Machine, device: Device | None, rank_traces: Sequence[RankTrace]
) -> Forecast:
    """Return the `forecast` of a traced plan."""
    on_gpu = plan.device != "cpu"
    capacity = machine.memory_per_rank(plan.local_world_size)
    outside = OUTSIDE_ALLOCATOR if on_gpu else OUTSIDE_CPU_ALLOCATOR
    allocator_capacity = None if capacity is None else capacity - outside
    live = tuple(peak_live_bytes(trace) for trace in rank_traces)
    index = live.index(max(live))
    memory = simulate_memory(
        rank_traces[index].shortened(), on_gpu, allocator_capacity, plan.cpu_offload
    )
    if plan.overlaps_dispatch:
        memory = add_paired_passes(memory, rank_traces[index])
    time_breakdown = timeline = None
    if device is not None:
        hardware = build_hardware(plan, device)
        step = build_step(plan, rank_traces, device)
        time_breakdown = step_seconds(step, hardware)
        timeline = pipeline_spans(step, hardware) if step.pipeline_schedule else None
    caveats = find_caveats(plan, device)
    return Forecast(
        plan,
        memory,
        rank_traces[index].rank,
        live,
        capacity,
        outside,
        time_breakdown,
        communication_by_axis(rank_traces[index], time_breakdown),
        find_error_range(plan, device, count_nodes(plan, device) > KNOWN_NODES),
        caveats,
        timeline,
    )


def find_caveats(plan: Plan, device: Device | None) -> tuple[str, ...]:
    """Return reasons for low confidence in a predicted time."""
    caveats = []
    if device is not None and plan.device == "cpu":
        caveats.append("the error of predicted times on CPUs was not measured")
    if device is not None and device.type not in ("cpu", GPU) and not device.calibrated:
        caveats.append(
            f"the figures of {device.name} are data sheets'; weft never ran there, so the error "
            "was not measured"
        )
    group = group_of_plan(plan)
    if device is not None and group != "dense":
        low, high = load_error_ranges()[group]
        caveats.append(
            f"nine of ten published runs with {group_label(group)} took {low:.2f} to {high:.2f} "
            "times the predicted time"
        )
    if device is not None and plan.num_active_params < plan.num_params:
        caveats.append("experts are assumed to be perfectly balanced")
    nodes = count_nodes(plan, device)
    if nodes > KNOWN_NODES:
        caveats.append(f"the network was not measured on {nodes} nodes")
    return tuple(f"low confidence: {caveat}" for caveat in caveats)


def count_nodes(plan: Plan, device: Device | None) -> int:
    """Return the nodes of a plan; a linked rack is one."""
    return plan.world_size // (build_hardware(plan, device).linked_devices if device else 1)


def communication_by_axis(
    trace: RankTrace, seconds: Seconds | None
) -> dict[str, AxisCommunication]:
    """Return the communication of a rank by mesh axis."""
    totals: dict[str, tuple[int, int]] = {}
    for segment, times in trace.count_segments().items():
        for calls, repeats, _ in trace.extrapolation.segment_calls(segment):
            for call in calls:
                if call.group:
                    axis = trace.comm_groups[call.group].axis
                    num_collectives, size = totals.get(axis, (0, 0))
                    count = times * repeats
                    totals[axis] = num_collectives + count, size + count * collective_bytes(call)
    exposed = seconds or Seconds()
    return {axis: AxisCommunication(*total, exposed[axis]) for axis, total in totals.items()}


def forecast_to_json(
    plan: Plan, prediction: Forecast, price: float | None = None, mtbf: float | None = None
) -> str:
    """Return a plan and its forecast as one JSON object.

    Args:
        plan: the plan.
        prediction: its forecast.
        price: of a device hour.
        mtbf: mean seconds between failures of the whole job.
    """
    hours = prediction.device_hours
    cost = {} if price is None or hours is None else {"cost": hours * price}
    run = predict_whole_run(prediction.plan, prediction.step_seconds, prediction.error_range, mtbf)
    whole_run = {"whole_run": None if run is None else run.to_dict(price)}
    values = json.loads(plan.to_json()) | prediction.to_dict() | cost | whole_run
    return json.dumps(values, indent=2)
