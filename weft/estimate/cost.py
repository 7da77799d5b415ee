"""Step time on a cluster, from a description of the work in a step.

The work is data: matmuls by shape, attention, bytes moved by memory-bound kernels, collectives by
kind, bytes and group, and a pipeline schedule.  It comes from a trace (`weft.estimate.trace`) or
from arithmetic (`weft.estimate.analytic`); both are priced here by the same rules.

* A matmul takes its arithmetic at the best rate of the device, or its memory traffic, whichever is
  longer.  Idle cores in the last wave of tiles and the ramp of each tile's loop over k lower
  the rate.
* Attention runs at the kernel's rate, which needs long sequences.
* All other operators take bytes over memory bandwidth.
* Each kernel costs the host one launch.  A layer takes the host's time if that is longer.
* A collective is a ring: (g - 1)/g of the bytes at the bus bandwidth, plus latency by hops.  A
  group inside a node uses its link.  A group across nodes uses the network adapters of its ranks
  in a node; the other adapters serve the groups of the other ranks at the same time.
* An all-to-all is no ring: each rank sends what is for other nodes through its own adapter, and
  what is for its node over the link meanwhile (NVIDIA/nccl-tests#267).
* Prefetched collectives (FSDP) hide behind the layer's compute, up to the length of that compute.
  They slow it by `CONTENTION` of their time, because both need memory bandwidth and cores.
* A pipeline is simulated: an action starts when its rank is free and its inputs have arrived.  Two
  passes that overlap take less time: see `weft.estimate.pair_time`.

No constant is fitted to published results.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from weft.estimate.pair_time import Chunk, paired_seconds
from weft.planning.devices import Device, find_device
from weft.planning.pipeline_schedule import Action, Dependency, PipelineSchedule, execution_order
from weft.planning.plan import Machine, Plan

# Fraction of a data sheet's bandwidth that streaming kernels reach (STREAM, copies: 0.8 to 0.92).
STREAM_EFFICIENCY = 0.85
# Rows and columns of a matmul's tile, and the steps of k that its ramp costs.
TILE = (128, 256)
TILE_RAMP = 384
# Number of keys at which an attention kernel reaches half its rate.
ATTENTION_RAMP = 512
# Seconds that a kernel costs the device beyond its work.
KERNEL_GAP = 2e-6
# Fraction of a hidden collective's time by which it slows the compute that hides it.
CONTENTION = 0.15
# Fraction of a tensor-parallel exchange that the matmul fused with it hides.
ASYNC_TP_OVERLAP = 0.5
# Seconds of a collective beyond its hops: launch and skew between ranks.
COLLECTIVE_LAUNCH = 15e-6
# Bytes/s between a device and host memory on one package (NVLink-C2C of Grace, two devices per
# host: 225e9 each way by the data sheet, of which 0.9 arrive).
HOST_LINK_BANDWIDTH = 200e9

Precision = Literal["bf16", "float8", "float4", "float32"]
# FlashAttention 2, and the kernel made for the device.
AttentionKernel = Literal["flash", "attention"]
CollectiveKind = Literal[
    "all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast", "send"
]
Overlap = Literal["exposed", "async", "ring", "prefetch", "pair"]


# --------------------------------------------------------------------------- work


class Matmul(NamedTuple):
    """``times`` products of (m, k) by (k, n), or of ``groups`` of them in one kernel."""

    m: float
    k: float
    n: float
    times: float = 1
    precision: Precision = "bf16"
    groups: int = 1


class Attention(NamedTuple):
    """FLOPs that the kernel computes; ``keys``: the most keys of one query."""

    flops: float
    keys: float
    head_dim: int
    backward: bool = False
    kernel: AttentionKernel = "flash"


class Collective(NamedTuple):
    """A collective on this rank.

    ``bytes``: size of the gathered, or not yet reduced, tensor; of an all-to-all, of what a rank
    sends, itself included.  ``stride``: distance between
    neighbors of the group, in ranks.  A send has two ranks; on axis "offload" the peer is host
    memory.
    """

    kind: CollectiveKind
    bytes: float
    axis: str
    ranks: int
    stride: int = 1
    overlap: Overlap = "exposed"
    times: float = 1


@dataclass(frozen=True)
class Work:
    """Work of a rank that never waits for other work, such as a layer's forward.

    ``chunks``: the same work in parts, cut after each collective that another pass may hide.
    """

    matmuls: tuple[Matmul, ...] = ()
    attention: tuple[Attention, ...] = ()
    traffic_bytes: float = 0.0
    kernels: float = 0.0  # launched by the host
    collectives: tuple[Collective, ...] = ()
    chunks: tuple[Work, ...] = ()

    def __add__(self, other: Work) -> Work:
        return Work(
            self.matmuls + other.matmuls,
            self.attention + other.attention,
            self.traffic_bytes + other.traffic_bytes,
            self.kernels + other.kernels,
            self.collectives + other.collectives,
            self.chunks + other.chunks,
        )

    @property
    def flops(self) -> float:
        """FLOPs of matmuls and attention."""
        matmul_flops = sum(2 * op.m * op.k * op.n * op.times * op.groups for op in self.matmuls)
        return matmul_flops + sum(op.flops for op in self.attention)


# Works in sequence, each with its number of repetitions.
WorkList = tuple[tuple[Work, int], ...]


@dataclass(frozen=True)
class StageWork:
    """Work of one stage for one microbatch.

    ``param_gather`` and ``grad_reduce`` happen once per step, hidden behind one microbatch.
    ``forward`` has the passes of `forward_passes`.
    """

    forward: WorkList
    backward: WorkList
    param_gather: WorkList = ()  # gathers weights, behind the first forward
    grad_reduce: WorkList = ()  # reduces gradients, behind the last backward


def forward_passes(plan: Plan) -> int:
    """Return the forward passes of a microbatch: KTO also computes swapped answers."""
    return 2 if plan.objective == "kto" else 1


@dataclass(frozen=True)
class Step:
    """A training step; without ``pipeline_schedule`` one stage runs all microbatches.

    ``pairs``: forward passes that overlap with a backward pass, each with that pass.
    """

    stages: tuple[StageWork, ...]
    microbatches: int
    tokens: float  # of all ranks
    optimizer_work: Work = field(
        default_factory=Work
    )  # clipping and optimizer, of the fullest rank
    pipeline_schedule: PipelineSchedule | None = None
    p2p: Collective | None = None
    pairs: Mapping[Action, Action] = field(default_factory=dict)


# --------------------------------------------------------------------------- price


@dataclass(frozen=True)
class Hardware:
    """The devices of a run, with their links."""

    device: Device
    devices: int  # of one node

    @property
    def linked_devices(self) -> int:
        """Devices that are linked without the network: a node's, or a rack's."""
        return max(self.devices, self.device.link.domain)


class Seconds(dict[str, float]):
    """Seconds of a rank by cause: compute, host, bubble, communication by axis."""

    def __missing__(self, name: str) -> float:
        return 0.0

    def total(self) -> float:
        """Return the sum over all causes."""
        return sum(self.values())

    def add(self, other: Seconds, times: float = 1.0) -> Seconds:
        """Add ``times`` times the seconds of ``other`` in place; return self."""
        for name, seconds in other.items():
            self[name] += seconds * times
        return self


def matmul_seconds(op: Matmul, device: Device) -> float:
    """Return the seconds of ``op.times`` products in sequence."""
    if min(op.m, op.k, op.n) <= 0:
        return 0.0
    width = {"bf16": 2, "float8": 1, "float4": 0.5, "float32": 4}[op.precision]
    tiles = op.groups * math.ceil(op.m / TILE[0]) * math.ceil(op.n / TILE[1])
    # Libraries split the last wave (stream-K), at some cost.
    waves = tiles / device.cores
    utilization = waves / math.ceil(waves) if waves < 1 else waves / (waves + 0.5 * (-waves % 1))
    efficiency = device.sustained * max(utilization, 0.1) * op.k / (op.k + TILE_RAMP)
    compute = 2 * op.m * op.k * op.n / (device.flops(op.precision) * efficiency)
    traffic = width * (op.m * op.k + op.k * op.n) + max(width, 2) * op.m * op.n
    compute, traffic = compute * op.groups, traffic * op.groups
    return op.times * (max(compute, traffic / (STREAM_EFFICIENCY * device.bandwidth)) + KERNEL_GAP)


def attention_seconds(op: Attention, device: Device) -> float:
    """Return the seconds of one kernel call, forward or backward."""
    rates = device.attention if op.kernel == "attention" else device.flash
    rate = rates[op.backward] * op.keys / (op.keys + ATTENTION_RAMP)
    rate *= float(min(1.0, op.head_dim / 128) ** 0.4)  # heads of 128 suit it best
    return op.flops / rate


def ranks_by_node(ranks: int, stride: int, hardware: Hardware) -> tuple[int, int]:
    """Return the ranks of a group in each node, and its nodes; a linked rack is one."""
    local = max(1, min(ranks, hardware.linked_devices // max(1, stride)))
    return local, math.ceil(ranks / local)


def adapter_speed(local: int, nodes: int, stride: int, hardware: Hardware) -> float:
    """Return bytes/s of one network adapter while all groups of this kind communicate."""
    all_nodes = nodes * max(1, stride * local // hardware.linked_devices)
    return hardware.device.network.busbw(all_nodes)


def ring_speed(ranks: int, stride: int, hardware: Hardware) -> tuple[float, float]:
    """Return bytes/s of a rank in a ring, and the latency of one round in seconds."""
    link, network = hardware.device.link, hardware.device.network
    local, nodes = ranks_by_node(ranks, stride, hardware)
    # Trees replace rings of many ranks where latency dominates.
    network_hops, local_hops = (min(n, 8 * math.log2(n + 1)) for n in (nodes - 1, ranks - nodes))
    latency = network_hops * network.latency + local_hops * link.latency
    if nodes == 1:
        return link.bandwidth, latency
    node_bandwidth = local * adapter_speed(local, nodes, stride, hardware)
    return (min(link.bandwidth, node_bandwidth) if local > 1 else node_bandwidth), latency


def collective_seconds(op: Collective, hardware: Hardware) -> float:
    """Return the seconds of ``op.times`` collectives in sequence, without overlap."""
    if op.ranks <= 1 or op.bytes <= 0:
        return 0.0
    speed, latency = ring_speed(op.ranks, op.stride, hardware)
    if op.axis == "offload":
        speed, latency = HOST_LINK_BANDWIDTH, 0.0
    if op.kind in ("send", "broadcast"):
        return op.times * (op.bytes / speed + latency + COLLECTIVE_LAUNCH)
    if op.kind == "all_to_all":
        transfer = _exchange_seconds(op, hardware)
    else:
        transfer = op.bytes * (op.ranks - 1) / op.ranks / speed
    rounds = 2 if op.kind == "all_reduce" else 1
    return op.times * (rounds * (transfer + latency) + COLLECTIVE_LAUNCH)


def _exchange_seconds(op: Collective, hardware: Hardware) -> float:
    """Return the seconds in which the bytes of an all-to-all leave a rank."""
    local, nodes = ranks_by_node(op.ranks, op.stride, hardware)
    seconds = op.bytes * (local - 1) / op.ranks / hardware.device.link.bandwidth
    if nodes > 1:
        speed = adapter_speed(local, nodes, op.stride, hardware)
        seconds = max(seconds, op.bytes * (op.ranks - local) / op.ranks / speed)
    return seconds


def work_seconds(work: Work, hardware: Hardware) -> Seconds:
    """Return the seconds of a work by cause, with its prefetches hidden."""
    device = hardware.device
    attention = sum(attention_seconds(op, device) for op in work.attention)
    compute = attention + sum(matmul_seconds(op, device) for op in work.matmuls)
    compute += (
        work.traffic_bytes / (STREAM_EFFICIENCY * device.bandwidth) + work.kernels * KERNEL_GAP
    )
    compute /= device.software
    spent = Seconds(compute=compute)
    prefetched = Seconds()
    for op in work.collectives:
        seconds = collective_seconds(op, hardware)
        if op.overlap == "prefetch":
            prefetched[op.axis] += seconds
        elif op.overlap == "ring":
            spent[op.axis] += max(CONTENTION * seconds, seconds - attention)
        else:
            # A hidden collective slows the compute that hides it.
            exposed_fraction = (
                1 - ASYNC_TP_OVERLAP + CONTENTION * ASYNC_TP_OVERLAP if op.overlap == "async" else 1
            )
            spent[op.axis] += seconds * exposed_fraction
    hidden = prefetched.total()
    busy = spent.total() + CONTENTION * hidden
    for axis, seconds in prefetched.items():
        # Exposed: the time beyond the layer's, and the time by which it slows the layer.
        fraction = seconds / hidden if hidden else 0
        spent[axis] += fraction * max(CONTENTION * hidden, hidden - (busy - CONTENTION * hidden))
    host = work.kernels * device.launch / device.software
    if host > spent.total():
        spent["host"] += host - spent.total()
    return spent


def pass_seconds(works: WorkList, hardware: Hardware) -> Seconds:
    """Return the seconds of repeated works in sequence."""
    total = Seconds()
    for work, count in works:
        total.add(work_seconds(work, hardware), count)
    return total


class Span(NamedTuple):
    """An action of a pipeline rank; times in seconds from the start of the first."""

    rank: int
    stage: int
    kind: str
    microbatch: int
    start: float
    end: float


def pass_chunks(works: WorkList, hardware: Hardware) -> list[Chunk]:
    """Return the parts of a pass between exchanges that another pass may hide."""
    chunks: list[Chunk] = []
    for work, count in works:
        parts = [
            sum(collective_seconds(op, hardware) for op in part.collectives if op.overlap == "pair")
            for part in work.chunks
        ]
        alone = [
            work_seconds(part, hardware).total() - exchange
            for part, exchange in zip(work.chunks, parts, strict=True)
        ]
        # Parts hide less of what is prefetched than the entire work, so use their proportions.
        compute = work_seconds(work, hardware).total() - sum(parts)
        scale = compute / sum(alone) if sum(alone) else 0.0
        once = [Chunk(part * scale, ex) for part, ex in zip(alone, parts, strict=True)]
        chunks += (once or [Chunk(compute, 0.0)]) * count
    return chunks


def hidden_seconds(step: Step, hardware: Hardware) -> dict[tuple[int, int], float]:
    """Return the seconds by which each pair of passes is shorter than its passes.

    The key has the stages of the forward and of the backward pass.
    """
    hidden = {}
    for forward, backward in {(f.stage, b.stage) for f, b in step.pairs.items()}:
        passes = (
            pass_chunks(step.stages[forward].forward, hardware),
            pass_chunks(step.stages[backward].backward, hardware),
        )
        alone = sum(chunk.compute + chunk.exchange for part in passes for chunk in part)
        seconds = alone - paired_seconds(*passes)
        hidden[forward, backward] = seconds * (1 - CONTENTION)
    return hidden


def simulate_pipeline(
    schedule: PipelineSchedule,
    seconds: dict[tuple[int, str], float],
    p2p_seconds: float,
    pairs: Mapping[Action, Action] | None = None,
    hidden: Mapping[tuple[int, int], float] | None = None,
) -> tuple[Span, ...]:
    """Return the start and end of every action of a pipeline.

    Args:
        schedule: actions of each pipeline rank, in order.
        seconds: duration of an action, by stage and kind.
        p2p_seconds: from the end of an action until its result reaches the next rank.
        pairs: see `Step`.  A pair sends its results when both passes have ended.
        hidden: see `hidden_seconds`.

    Raises:
        ValueError: if actions wait for each other in a cycle.
    """
    pairs, hidden = pairs or {}, hidden or {}
    durations: dict[Action, float] = {}
    remaining: dict[Action, float] = {}  # from the end of an action until it sends
    for forward, backward in pairs.items():
        full = seconds[forward.stage, "F"] + seconds[backward.stage, "B"]
        scale = 1 - hidden.get((forward.stage, backward.stage), 0.0) / full if full else 1.0
        durations[forward] = seconds[forward.stage, "F"] * scale
        durations[backward] = remaining[forward] = seconds[backward.stage, "B"] * scale
    rank_of_stage = {action.stage: rank for rank, order in schedule.items() for action in order}
    end_times: dict[Dependency, float] = {}
    clock = dict.fromkeys(schedule, 0.0)
    spans: list[Span] = []
    for rank, action, dependencies in execution_order(schedule, pairs):
        stage, kind, m = action
        start = clock[rank]
        if action not in durations or action in remaining:  # the backward pass of a pair follows
            for dependency in dependencies:
                start = max(
                    start,
                    end_times[dependency]
                    + (p2p_seconds if rank_of_stage[dependency[0]] != rank else 0.0),
                )
        clock[rank] = start + durations.get(action, seconds[stage, kind])
        end = clock[rank] + remaining.get(action, 0.0)
        end_times[stage, "B" if kind == "I" else kind, m] = end
        spans.append(Span(rank, stage, kind, m, start, clock[rank]))
    if len(spans) < sum(map(len, schedule.values())):
        raise ValueError("the schedule never ends: its actions wait for each other")
    return tuple(spans)


def pipeline_spans(step: Step, hardware: Hardware) -> tuple[Span, ...]:
    """Return the start and end of the actions of a step with a pipeline."""
    forward = [pass_seconds(stage.forward, hardware) for stage in step.stages]
    backward = [pass_seconds(stage.backward, hardware) for stage in step.stages]
    return _simulate_step(step, forward, backward, hardware)


def _simulate_step(
    step: Step, forward: Sequence[Seconds], backward: Sequence[Seconds], hardware: Hardware
) -> tuple[Span, ...]:
    assert step.pipeline_schedule is not None
    seconds_of = {(s, "F"): part.total() for s, part in enumerate(forward)}
    seconds_of |= {(s, "B"): part.total() for s, part in enumerate(backward)}
    # Input gradients and weight gradients take equally long.
    seconds_of |= {(s, kind): seconds_of[s, "B"] / 2 for s in range(len(backward)) for kind in "IW"}
    p2p_seconds = collective_seconds(step.p2p, hardware) if step.p2p else 0.0
    hidden = hidden_seconds(step, hardware)
    return simulate_pipeline(step.pipeline_schedule, seconds_of, p2p_seconds, step.pairs, hidden)


def step_seconds(step: Step, hardware: Hardware) -> Seconds:
    """Return the seconds of a step on its slowest rank, by cause."""
    forward = [pass_seconds(stage.forward, hardware) for stage in step.stages]
    backward = [pass_seconds(stage.backward, hardware) for stage in step.stages]
    spent = Seconds()
    if step.pipeline_schedule is None:
        for part in (*forward, *backward):
            spent.add(part, step.microbatches)
        stages_by_rank: Iterable[Sequence[int]] = [range(len(step.stages))]
    else:
        end = max(span.end for span in _simulate_step(step, forward, backward, hardware))
        busy_by_rank: dict[int, Seconds] = {}
        hidden = hidden_seconds(step, hardware)
        for rank, order in step.pipeline_schedule.items():
            busy_by_rank[rank] = Seconds()
            for (s, kind), count in Counter((a.stage, a.kind) for a in order).items():
                part = forward[s] if kind == "F" else backward[s]
                busy_by_rank[rank].add(part, count * (0.5 if kind in "IW" else 1.0))
            for action in step.pairs.keys() & set(order):
                busy_by_rank[rank]["ep"] -= hidden[action.stage, step.pairs[action].stage]
        slowest = max(busy_by_rank.values(), key=Seconds.total)
        spent.add(slowest)
        spent["bubble"] += end - slowest.total()
        stages_by_rank = [
            sorted({a.stage for a in order}) for order in step.pipeline_schedule.values()
        ]
    spent.add(_exposed_sync(step, stages_by_rank, forward, backward, hardware))
    return spent.add(work_seconds(step.optimizer_work, hardware))


def _exposed_sync(
    step: Step,
    stages_by_rank: Iterable[Sequence[int]],
    forward: Sequence[Seconds],
    backward: Sequence[Seconds],
    hardware: Hardware,
) -> Seconds:
    """Return the exposed seconds of once-per-step collectives on the worst rank."""
    worst = Seconds()
    for stages in stages_by_rank:
        exposed = Seconds()
        for field_name, passes in (("param_gather", forward), ("grad_reduce", backward)):
            cover = sum(passes[s].total() for s in stages)
            hidden = Seconds()
            for s in stages:
                for work, count in getattr(step.stages[s], field_name):
                    for op in work.collectives:
                        duration = collective_seconds(op, hardware) * count
                        (hidden if op.overlap == "prefetch" else exposed)[op.axis] += duration
                    exposed["compute"] += (
                        count * work.traffic_bytes / (STREAM_EFFICIENCY * hardware.device.bandwidth)
                    )
            total = hidden.total()
            for axis, duration in hidden.items():
                exposed[axis] += (
                    duration / total * max(CONTENTION * total, total - cover) if total else 0
                )
        if exposed.total() > worst.total():
            worst = exposed
    return worst


def device_spec(plan: Plan, machine: Machine) -> Device | None:
    """Return the machine's device; None for a CPU that was not calibrated."""
    device = find_device(machine)
    measured = device is not None and device.calibrated
    return device if plan.device != "cpu" or measured else None


def build_hardware(plan: Plan, device: Device) -> Hardware:
    """Return the devices and links of a plan."""
    return Hardware(device, plan.local_world_size)


def attention_kernel(plan: Plan, device: Device) -> AttentionKernel:
    """Return the attention kernel of a plan; documents need FlashAttention 2."""
    has_own = device.capability >= (9, 0) and not plan.job.data.keeps_documents
    return "attention" if has_own else "flash"
