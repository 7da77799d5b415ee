"""Does a plan fit, how fast is it, and what takes its time?

Every rank of the pipeline is traced; memory is the fullest one's, time the slowest one's.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from weft.config.schema import Job
from weft.estimate.cost import (
    Collective,
    Hardware,
    Overlap,
    Seconds,
    Span,
    Step,
    Work,
    pipeline_spans,
    step_seconds,
)
from weft.estimate.trace import Trace, exchanged_bytes, traces
from weft.estimate.trace_memory import Memory, fullest, live_peak
from weft.estimate.trace_to_cost import Pricer, Setting
from weft.plan.devices import GIB, Device
from weft.plan.resolve import Machine, Plan

# On a GPU outside of torch's allocator: the CUDA context (0.5 GiB) and NCCL's buffers.  On a CPU
# the interpreter with torch.
OUTSIDE = {"cuda": int(1.25 * GIB), "cpu": int(0.4 * GIB)}
# Of a step's predicted time, the error that nine of ten published runs stay within; see
# docs/planner.md.
ERROR, CALIBRATED_ERROR, LOW_CONFIDENCE_ERROR = 0.25, 0.17, 0.5
CONTEXT_ERROR = 1.1  # TorchTitan's three runs of 405B with context parallelism: 51, 65 and 106 %
# Over more nodes another cluster's network tells nothing of this one; see docs/planner.md.
KNOWN_NODES = 32


@dataclass(frozen=True)
class Exchange:
    """Of one rank in a step, along one axis."""

    collectives: int
    bytes: int
    exposed_seconds: float


@dataclass(frozen=True)
class Forecast:
    """What is predicted of a plan.

    ``capacity``: bytes of one device, None where unknown; ``memory`` is the fullest rank's, which
    is ``rank``; ``live``: the most that lives on each rank of the pipeline.  ``seconds``: of the
    slowest rank by what they are spent on; None without a known device.  ``error``: of the time, up
    and down, as a fraction.  ``timeline``: when the actions of a pipeline run; None without one, or
    without ``seconds``.
    """

    plan: Plan
    memory: Memory
    rank: int
    live: tuple[int, ...]
    capacity: int | None
    outside: int
    seconds: Seconds | None
    exchanges: dict[str, Exchange]
    error: float
    doubts: tuple[str, ...]
    timeline: tuple[Span, ...] | None = None

    @property
    def needed(self) -> int:
        """Bytes that the device must have."""
        return self.memory.reserved + self.outside

    @property
    def measured(self) -> int:
        """Bytes that a run's record has for it: on a GPU what torch has reserved, on a CPU what is
        resident."""
        return self.memory.reserved + (self.outside if self.plan.device == "cpu" else 0)

    @property
    def fits(self) -> bool | None:
        return None if self.capacity is None else self.needed <= self.capacity

    @property
    def step_seconds(self) -> float | None:
        return None if self.seconds is None else self.seconds.total()

    @property
    def tokens_per_second_per_device(self) -> float | None:
        if self.step_seconds is None:
            return None
        return self.plan.tokens_per_step / self.step_seconds / self.plan.world_size

    @property
    def mfu(self) -> float | None:
        speed, peak = self.tokens_per_second_per_device, self.plan.peak_flops
        if speed is None or peak is None:
            return None
        return speed * self.plan.flops_per_token / peak

    @property
    def bubble_fraction(self) -> float | None:
        if self.seconds is None:
            return None
        return self.seconds["bubble"] / self.seconds.total()

    def by_category(self) -> dict[str, float]:
        """GiB on the fullest rank, when most is live; what the allocator holds beyond, and what
        lies outside of it."""
        found = {name: size / GIB for name, size in self.memory.live.items()}
        found["allocator"] = (self.memory.reserved - sum(self.memory.live.values())) / GIB
        return found | {"outside": self.outside / GIB}

    @property
    def limits(self) -> list[str]:
        """What keeps it from fitting, what its time goes into, and what is doubtful."""
        found = []
        if self.fits is False:
            most = max(self.by_category().items(), key=lambda part: part[1])
            assert self.capacity is not None
            needed, there = self.needed / GIB, self.capacity / GIB
            found.append(
                f"memory: {needed:.1f} GiB of {there:.1f}, {most[1]:.1f} of it for {most[0]}"
            )
        if self.seconds is not None:
            total = self.seconds.total()
            parts = sorted(self.seconds.items(), key=lambda part: -part[1])
            found += [
                f"{part / total:.0%} {name_of(n)}" for n, part in parts if part > 0.05 * total
            ]
        return [*found, *self.doubts]

    def to_dict(self) -> dict[str, Any]:
        return {
            "fits": self.fits,
            "peak_memory_gib": self.needed / GIB,
            "memory_gib": self.by_category(),
            "capacity_gib": None if self.capacity is None else self.capacity / GIB,
            "fullest_rank": self.rank,
            "live_gib_of_pipeline_ranks": [size / GIB for size in self.live],
            "step_seconds": self.step_seconds,
            "seconds": None if self.seconds is None else dict(self.seconds),
            "error": self.error,
            "tokens_per_second_per_device": self.tokens_per_second_per_device,
            "mfu": self.mfu,
            "bubble_fraction": self.bubble_fraction,
            "communication": {
                axis: {
                    "collectives": exchange.collectives,
                    "gib": exchange.bytes / GIB,
                    "exposed_seconds": exchange.exposed_seconds,
                }
                for axis, exchange in self.exchanges.items()
            },
            "limits": self.limits,
        }


def device_of(plan: Plan, machine: Machine) -> Device | None:
    """What is known of the machine's devices; of a CPU nothing that was not measured."""
    device = machine.spec
    measured = device is not None and device.calibrated
    return device if plan.device == "cuda" or measured else None


def name_of(spent: str) -> str:
    """What seconds are spent on, for people."""
    others = {"compute": "computing", "host": "waiting for the host", "bubble": "pipeline bubble"}
    return others.get(spent, f"exposed {spent}")


def forecast(job: Job, plan: Plan, machine: Machine, device: Device | None) -> Forecast:
    """Trace a plan and price it.

    Args:
        machine: that the plan is for.
        device: what is known of it; None: only memory is predicted.
    """
    return priced(job, plan, machine, device, traces(job, plan))


def priced(
    job: Job, plan: Plan, machine: Machine, device: Device | None, of_ranks: Sequence[Trace]
) -> Forecast:
    """What `forecast` says of a plan that is traced already."""
    on_gpu = plan.device == "cuda"
    capacity = machine.memory_of_rank(plan.local_world_size)
    outside = OUTSIDE[plan.device]
    room = None if capacity is None else capacity - outside
    live = tuple(live_peak(trace) for trace in of_ranks)
    place, memory = fullest(of_ranks, live, on_gpu, room, job.parallel.cpu_offload)
    seconds = timeline = None
    if device is not None:
        hardware = hardware_of(plan, device)
        step = step_of(job, plan, of_ranks, device)
        seconds = step_seconds(step, hardware)
        timeline = pipeline_spans(step, hardware) if step.pipeline_schedule else None
    doubts = doubts_of(plan, device)
    error = CALIBRATED_ERROR if device is not None and device.calibrated else ERROR
    if doubts:
        error = max(error, CONTEXT_ERROR if plan.cp > 1 else LOW_CONFIDENCE_ERROR)
    return Forecast(
        plan,
        memory,
        of_ranks[place].rank,
        live,
        capacity,
        outside,
        seconds,
        exchanges_of(of_ranks[place], seconds),
        error,
        doubts,
        timeline,
    )


def hardware_of(plan: Plan, device: Device) -> Hardware:
    """What the arithmetic of a step needs to know of the plan's devices and links."""
    return Hardware(device, plan.local_world_size, device.network, device.software)


def doubts_of(plan: Plan, device: Device | None) -> tuple[str, ...]:
    """Why a prediction of time is of low confidence."""
    doubts = []
    if device is not None and plan.device == "cpu":
        doubts.append("how well times on CPUs are predicted was not measured")
    if device is not None and plan.cp > 1:
        doubts.append("context parallelism was predicted up to 106 % too fast")
    if device is not None and plan.num_active_params < plan.num_params:
        doubts.append("mixtures of experts were not measured, and are taken as perfectly balanced")
    nodes = plan.world_size // max(1, plan.local_world_size)
    if device is not None and nodes > KNOWN_NODES:
        doubts.append(f"the network was not measured over {nodes} nodes")
    return tuple(f"low confidence: {doubt}" for doubt in doubts)


# --------------------------------------------------------------------------- time


def setting_of(job: Job, plan: Plan, device: Device) -> Setting:
    """What the CPU does not tell: how communication hides, and which kernels run."""
    ring = job.parallel.cp_method == "ring"
    overlaps: dict[str, Overlap] = {
        "dp_shard": "prefetch",
        "dp_replicate": "prefetch",
        "edp": "prefetch",
        "ep": "exposed",  # tokens wait for experts, and what comes after for tokens
        "tp": "async" if job.parallel.async_tp else "exposed",
        "cp": "ring" if ring else "exposed",
    }
    documents = job.data.keeps_documents
    fast = device.capability >= (9, 0) and not documents
    fused_optimizer = job.optim.state_dtype != "float32"
    return Setting(job.compile.enable, fused_optimizer, "attention" if fast else "flash", overlaps)


def step_of(job: Job, plan: Plan, of_ranks: Sequence[Trace], device: Device) -> Step:
    """The plan's step as `weft.estimate.cost` prices it."""
    setting = setting_of(job, plan, device)
    pricers: dict[int, Pricer] = {}
    works = {}
    once = Work()
    for pp, trace in enumerate(of_ranks):
        # Ranks that share a recording differ in the number of blocks only.
        pricer = Pricer(trace, setting, pricers.get(id(trace.recording)))
        pricers.setdefault(id(trace.recording), pricer)
        mine = [0] if plan.pipeline is None else plan.pipeline.stages_of(pp)
        for stage, number in enumerate(mine):
            works[number] = pricer.stage(stage)
        of_rank = pricer.once()
        once = max(once, of_rank, key=lambda work: work.swept_bytes)
    table, hop = (plan.pipeline_schedule, hop_of(of_ranks)) if plan.pipeline else (None, None)
    stages = tuple(works[number] for number in sorted(works))
    return Step(stages, plan.accumulation, plan.tokens_per_step, once, table, hop)


def hop_of(of_ranks: Iterable[Trace]) -> Collective | None:
    """What a stage hands to the next."""
    for trace in of_ranks:
        for event in trace.recording.events:
            call = event.call
            if call is not None and call.name == "send":
                axis, _, stride = trace.groups[call.group]
                if axis == "pp":
                    return Collective("send", exchanged_bytes(call), axis, 2, stride)
    return None


def exchanges_of(trace: Trace, seconds: Seconds | None) -> dict[str, Exchange]:
    """Collectives of one rank by axis."""
    found: dict[str, tuple[int, int]] = {}
    for segment, times in trace.segment_counts().items():
        for calls, repeats in trace.expansion.works(segment):
            for _, call in calls:
                if call.group:
                    axis = trace.groups[call.group].axis
                    number, size = found.get(axis, (0, 0))
                    often = times * repeats
                    found[axis] = number + often, size + often * exchanged_bytes(call)
    exposed = seconds or Seconds()
    return {axis: Exchange(*sums, exposed[axis]) for axis, sums in found.items()}


def to_json(plan: Plan, seen: Forecast) -> str:
    """The plan and what is predicted of it, in one object."""
    return json.dumps(json.loads(plan.to_json()) | seen.to_dict(), indent=2)
