"""How long a training step takes on a cluster, from what is done in it.

What is done is data: matrix products by shape, attention, bytes swept by memory-bound kernels,
collectives by kind, bytes and group, and a pipeline's timetable.  It may come from a trace of the
real step or from arithmetic (`weft.estimate.analytic`); the price is the same.

* A matrix product takes as long as its arithmetic at the rate that the device reaches for the best
  shape, or its memory traffic, whichever is longer.  A shape is worse than the best one by the
  cores that idle in the last wave of tiles and by the start and end of every tile's loop over k.
* Attention runs at the kernel's rate, and reaches it only where sequences are long.
* Everything else is bytes over memory bandwidth.
* A kernel costs the host its launch.  Where the host needs longer for a layer than the device, the
  layer takes the host's time.
* A collective is a ring: (g - 1)/g of the bytes at the bus bandwidth, and latency by its hops.  A
  group inside a node uses its link.  One across nodes uses the adapters of its ranks in a node; the
  other ranks' adapters belong to the groups of those ranks, which do the same at the same time.
* What is prefetched (FSDP) hides behind the layer's compute up to that compute's length, but takes
  `CONTENTION` of its own time from it, for both need the memory and some cores.
* A pipeline is its timetable, run: an action starts when its rank is free and its inputs are there.

The constants stand below, or beside their use.  None is fitted to a row of a table of results.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from weft.plan.devices import Device, Network
from weft.plan.pipeline_schedule import Dependency, PipelineSchedule, execution_order

# Of a data sheet's memory bandwidth, what streaming kernels reach (STREAM and copies: 0.8 to 0.92).
STREAMED = 0.85
# Rows, columns of a tile of a matrix product, and the steps of k that its start and end cost.
TILE = (128, 256)
TILE_RAMP = 384
# Keys at which an attention kernel reaches half its rate.
ATTENTION_RAMP = 512
# Seconds that a kernel costs the device beyond its work.
KERNEL_GAP = 2e-6
# Part of a hidden collective's time by which it slows what hides it.
CONTENTION = 0.15
# Part of tensor-parallel communication that asynchronous (decomposed) products hide.
ASYNC_HIDES = 0.75
# Seconds of a collective beside its hops: launch, and the ranks' arrival.
COLLECTIVE_START = 15e-6
# Bytes/s between a device and the memory of a host on the same package (NVLink-C2C of Grace, two
# devices a host: 225e9 each way by the data sheet, of which 0.9 arrive).
HOST_LINK = 200e9

Precision = Literal["bf16", "float8", "float4"]
# FlashAttention as first published, its second edition, and what is made for the device.
Kernel = Literal["flash1", "flash", "attention"]
Overlap = Literal["exposed", "async", "ring", "prefetch"]


# --------------------------------------------------------------------------- what is done


class Matmul(NamedTuple):
    """``times`` products of (m, k) by (k, n); or of ``groups`` of them, in one kernel."""

    m: float
    k: float
    n: float
    times: int = 1
    precision: Precision = "bf16"
    groups: int = 1


class Attention(NamedTuple):
    """FLOPs of what the kernel really computes; ``keys``: of one query, at most."""

    flops: float
    keys: float
    head_dim: int
    backward: bool = False
    kernel: Kernel = "flash"


class Collective(NamedTuple):
    """One on this rank: ``bytes`` are the gathered, or the not yet reduced, tensor's.

    ``stride``: between neighbours of the group, in ranks.  A send has two ranks; on axis "offload"
    the other one is the host's memory.
    """

    kind: Literal["all_gather", "reduce_scatter", "all_reduce", "send"]
    bytes: float
    axis: str
    ranks: int
    stride: int = 1
    overlap: Overlap = "exposed"
    times: float = 1


@dataclass(frozen=True)
class Work:
    """What a rank does, without a wait for other work: a layer's forward, an optimizer's step."""

    matmuls: tuple[Matmul, ...] = ()
    attention: tuple[Attention, ...] = ()
    swept_bytes: float = 0.0
    kernels: float = 0.0  # launched by the host
    collectives: tuple[Collective, ...] = ()

    def __add__(self, other: Work) -> Work:
        return Work(
            self.matmuls + other.matmuls,
            self.attention + other.attention,
            self.swept_bytes + other.swept_bytes,
            self.kernels + other.kernels,
            self.collectives + other.collectives,
        )

    @property
    def flops(self) -> float:
        products = sum(2 * op.m * op.k * op.n * op.times * op.groups for op in self.matmuls)
        return products + sum(op.flops for op in self.attention)


# Works one after the other, each with how often.
Works = tuple[tuple[Work, int], ...]


@dataclass(frozen=True)
class StageWork:
    """Of one microbatch; the synchronisations are of a step, hidden behind one microbatch."""

    forward: Works
    backward: Works
    before: Works = ()  # gathers weights, behind the first forward
    after: Works = ()  # reduces gradients, behind the last backward


@dataclass(frozen=True)
class Step:
    """``timetable``: of several stages; without one a single stage runs all microbatches."""

    stages: tuple[StageWork, ...]
    microbatches: int
    tokens: float  # of all ranks
    once: Work = field(default_factory=Work)  # clipping and optimizer, of the fullest rank
    pipeline_schedule: PipelineSchedule | None = None
    hop: Collective | None = None


# --------------------------------------------------------------------------- what it costs


@dataclass(frozen=True)
class Hardware:
    """``software``: of the predicted speed, the part that this software reaches; 1: not known."""

    device: Device
    devices: int  # of one node
    network: Network
    software: float = 1.0


class Seconds(dict[str, float]):
    """Of a rank, by what they are spent on: compute, host, bubble, communication by its axis."""

    def __missing__(self, name: str) -> float:
        return 0.0

    def total(self) -> float:
        return sum(self.values())

    def add(self, other: Seconds, times: float = 1.0) -> Seconds:
        for name, seconds in other.items():
            self[name] += seconds * times
        return self


def matmul_seconds(op: Matmul, device: Device) -> float:
    """Of ``op.times`` products one after the other."""
    if min(op.m, op.k, op.n) <= 0:
        return 0.0
    width = {"bf16": 2, "float8": 1, "float4": 0.5}[op.precision]
    tiles = op.groups * math.ceil(op.m / TILE[0]) * math.ceil(op.n / TILE[1])
    # Libraries split what leaves cores idle, at some cost: the last wave is never quite empty.
    waves = tiles / device.cores
    filled = waves / math.ceil(waves) if waves < 1 else waves / (waves + 0.5 * (-waves % 1))
    efficiency = device.sustained * max(filled, 0.1) * op.k / (op.k + TILE_RAMP)
    arithmetic = 2 * op.m * op.k * op.n / (device.flops(op.precision) * efficiency)
    moved = width * (op.m * op.k + op.k * op.n) + 2 * op.m * op.n
    arithmetic, moved = arithmetic * op.groups, moved * op.groups
    return op.times * (max(arithmetic, moved / (STREAMED * device.bandwidth)) + KERNEL_GAP)


def attention_seconds(op: Attention, device: Device) -> float:
    """Of one call of the kernel, forward or backward."""
    rates = device.attention if op.kernel == "attention" else device.flash
    # "2x faster than FlashAttention": FlashAttention-2's paper.
    rate = rates[op.backward] * (0.5 if op.kernel == "flash1" else 1.0)
    rate *= op.keys / (op.keys + ATTENTION_RAMP)
    if op.kernel != "flash1":  # made for heads of 64; later ones are best at 128
        rate *= min(1.0, op.head_dim / 128) ** 0.4
    return op.flops / rate


def bus(ranks: int, stride: int, hardware: Hardware) -> tuple[float, float]:
    """Bytes/s of one rank in a ring, and the seconds of a message once around it."""
    link, network = hardware.device.link, hardware.network
    node = max(hardware.devices, link.domain)
    local = max(1, min(ranks, node // max(1, stride)))
    nodes = math.ceil(ranks / local)
    # Where latency would rule, rings of many ranks are replaced by trees.
    hops, inside = (min(n, 8 * math.log2(n + 1)) for n in (nodes - 1, ranks - nodes))
    latency = hops * network.latency + inside * link.latency
    if nodes == 1:
        return link.bandwidth, latency
    across = local * network.busbw(nodes * max(1, stride * local // node))
    return (min(link.bandwidth, across) if local > 1 else across), latency


def collective_seconds(op: Collective, hardware: Hardware) -> float:
    """Of ``op.times`` collectives one after the other, with nothing to hide behind."""
    if op.ranks <= 1 or op.bytes <= 0:
        return 0.0
    speed, latency = bus(op.ranks, op.stride, hardware)
    if op.axis == "offload":
        speed, latency = HOST_LINK, 0.0
    if op.kind == "send":
        return op.times * (op.bytes / speed + latency + COLLECTIVE_START)
    rounds = 2 if op.kind == "all_reduce" else 1
    moved = op.bytes * (op.ranks - 1) / op.ranks / speed
    return op.times * (rounds * (moved + latency) + COLLECTIVE_START)


def work_seconds(work: Work, hardware: Hardware) -> Seconds:
    """A work's seconds by what they are spent on; its prefetches hidden as far as they can."""
    device = hardware.device
    attention = sum(attention_seconds(op, device) for op in work.attention)
    compute = attention + sum(matmul_seconds(op, device) for op in work.matmuls)
    compute += work.swept_bytes / (STREAMED * device.bandwidth) + work.kernels * KERNEL_GAP
    compute /= hardware.software
    spent = Seconds(compute=compute)
    prefetched = Seconds()
    for op in work.collectives:
        seconds = collective_seconds(op, hardware)
        if op.overlap == "prefetch":
            prefetched[op.axis] += seconds
        elif op.overlap == "ring":
            spent[op.axis] += max(CONTENTION * seconds, seconds - attention)
        else:
            # What is hidden slows what hides it.
            part = 1 - ASYNC_HIDES + CONTENTION * ASYNC_HIDES if op.overlap == "async" else 1
            spent[op.axis] += seconds * part
    hidden = prefetched.total()
    busy = spent.total() + CONTENTION * hidden
    for axis, seconds in prefetched.items():
        # Exposed is what is longer than the layer, and what it slows the layer by.
        share = seconds / hidden if hidden else 0
        spent[axis] += share * max(CONTENTION * hidden, hidden - (busy - CONTENTION * hidden))
    host = work.kernels * device.launch / hardware.software
    if host > spent.total():
        spent["host"] += host - spent.total()
    return spent


def pass_seconds(works: Works, hardware: Hardware) -> Seconds:
    """Of works one after the other, each as often as it says."""
    total = Seconds()
    for work, count in works:
        total.add(work_seconds(work, hardware), count)
    return total


class Span(NamedTuple):
    """An action of a rank of a pipeline, in seconds from the beginning of the first one."""

    rank: int
    stage: int
    kind: str
    microbatch: int
    start: float
    end: float


def spans(
    timetable: PipelineSchedule, seconds: dict[tuple[int, str], float], hop: float
) -> tuple[Span, ...]:
    """When the actions of a pipeline start and end, those of each rank in order.

    Args:
        seconds: of an action by its stage and kind.
        hop: from the end of a stage's action to where the next stage, on another rank, has it.

    Raises:
        ValueError: where actions wait for each other forever.
    """
    home = {action.stage: rank for rank, order in timetable.items() for action in order}
    ended: dict[Dependency, float] = {}
    clock = dict.fromkeys(timetable, 0.0)
    found: list[Span] = []
    for rank, (stage, kind, m), needs in execution_order(timetable):
        start = clock[rank]
        for need in needs:
            start = max(start, ended[need] + (hop if home[need[0]] != rank else 0.0))
        clock[rank] = start + seconds[stage, kind]
        ended[stage, "B" if kind == "I" else kind, m] = clock[rank]
        found.append(Span(rank, stage, kind, m, start, clock[rank]))
    if len(found) < sum(map(len, timetable.values())):
        raise ValueError("the timetable never ends: its actions wait for each other")
    return tuple(found)


def pipeline_spans(step: Step, hardware: Hardware) -> tuple[Span, ...]:
    """When the actions of a step with a timetable start and end."""
    forward = [pass_seconds(stage.forward, hardware) for stage in step.stages]
    backward = [pass_seconds(stage.backward, hardware) for stage in step.stages]
    return _spans_of(step, forward, backward, hardware)


def _spans_of(
    step: Step, forward: Sequence[Seconds], backward: Sequence[Seconds], hardware: Hardware
) -> tuple[Span, ...]:
    assert step.pipeline_schedule is not None
    seconds_of = {(s, "F"): part.total() for s, part in enumerate(forward)}
    seconds_of |= {(s, "B"): part.total() for s, part in enumerate(backward)}
    # Gradients of inputs and of weights take as long as each other.
    seconds_of |= {(s, kind): seconds_of[s, "B"] / 2 for s in range(len(backward)) for kind in "IW"}
    hop = collective_seconds(step.hop, hardware) if step.hop else 0.0
    return spans(step.pipeline_schedule, seconds_of, hop)


def step_seconds(step: Step, hardware: Hardware) -> Seconds:
    """A step's seconds on its slowest rank, by what they are spent on."""
    forward = [pass_seconds(stage.forward, hardware) for stage in step.stages]
    backward = [pass_seconds(stage.backward, hardware) for stage in step.stages]
    spent = Seconds()
    if step.pipeline_schedule is None:
        for part in (*forward, *backward):
            spent.add(part, step.microbatches)
        ranks: Iterable[Sequence[int]] = [range(len(step.stages))]
    else:
        end = max(span.end for span in _spans_of(step, forward, backward, hardware))
        busy: dict[int, Seconds] = {}
        for rank, order in step.pipeline_schedule.items():
            busy[rank] = Seconds()
            for (s, kind), count in Counter((a.stage, a.kind) for a in order).items():
                part = forward[s] if kind == "F" else backward[s]
                busy[rank].add(part, count * (0.5 if kind in "IW" else 1.0))
        worst = max(busy.values(), key=Seconds.total)
        spent.add(worst)
        spent["bubble"] += end - worst.total()
        ranks = [sorted({a.stage for a in order}) for order in step.pipeline_schedule.values()]
    spent.add(_sync(step, ranks, forward, backward, hardware))
    return spent.add(work_seconds(step.once, hardware))


def _sync(
    step: Step,
    ranks: Iterable[Sequence[int]],
    forward: Sequence[Seconds],
    backward: Sequence[Seconds],
    hardware: Hardware,
) -> Seconds:
    """Once a step: what a microbatch's compute does not hide, on the rank where that is most."""
    worst = Seconds()
    for stages in ranks:
        mine = Seconds()
        for name, behind in (("before", forward), ("after", backward)):
            cover = sum(behind[s].total() for s in stages)
            hidden = Seconds()
            for s in stages:
                for work, count in getattr(step.stages[s], name):
                    for op in work.collectives:
                        taken = collective_seconds(op, hardware) * count
                        (hidden if op.overlap == "prefetch" else mine)[op.axis] += taken
                    mine["compute"] += (
                        count * work.swept_bytes / (STREAMED * hardware.device.bandwidth)
                    )
            total = hidden.total()
            for axis, taken in hidden.items():
                mine[axis] += taken / total * max(CONTENTION * total, total - cover) if total else 0
        if mine.total() > worst.total():
            worst = mine
    return worst
