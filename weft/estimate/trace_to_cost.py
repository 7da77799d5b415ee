"""Convert a trace to the work that `weft.estimate.cost` prices.

Matmuls, attention and collectives are taken as called.  All other operators move bytes.  An eager
operator reads its inputs and writes its outputs.  In a compiled block, the operators between two
matmuls, attentions or collectives are one kernel.  It reads inputs from outside, and writes outputs
that are read outside or stay allocated.

Asynchronous tensor parallelism overlaps an exchange with a matmul only if the two are neighbors:
the matmul reads what is gathered, or writes what is scattered, and only copies lie between them.
`find_fused_exchanges` finds these in the trace, and all others are exposed.  What inductor's pass
really fuses is counted in docs/gpu-steps.md.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import repeat
from typing import get_args

from weft.config.axes import FSDP_AXES
from weft.estimate.cost import (
    Attention,
    AttentionKernel,
    Collective,
    CollectiveKind,
    Matmul,
    Overlap,
    Precision,
    StageWork,
    Step,
    Work,
    WorkList,
    attention_kernel,
    forward_passes,
)
from weft.estimate.extrapolate import Segment
from weft.estimate.op_recorder import Event, OpCall
from weft.estimate.trace import RankTrace, collective_bytes
from weft.planning.devices import Device
from weft.planning.pipeline_schedule import find_pairs, planned_schedule
from weft.planning.plan import Plan

# Index of the first factor among the inputs.
MATMUL_OPS = {"mm": 0, "addmm": 1, "bmm": 0, "baddbmm": 1, "_scaled_mm": 0, "_grouped_mm": 0}
MATMUL_OPS |= {"scaled_grouped_mm": 0}
# The sender pays for a receive.
COLLECTIVE_KINDS: tuple[CollectiveKind, ...] = get_args(CollectiveKind)
# Kernels that a compiled block launches for the operators between two barriers.
FUSED_KERNELS = 1
# The largest magnitude of what a float8 cast scales: the cast reads the matrix again.
CAST_REDUCTION = "amax"
# A compiled cast with a transposed store reads 2 bytes and writes 1 at 0.65 TB/s on an H100, where
# others reach 2.1 (pytorch/pytorch#149982): as if it wrote 7 bytes.
TRANSPOSED_STORE = 7
# FSDP's copies into and out of its buffers run outside compiled blocks.
EAGER_OPS = ("chunk_cat", "split_with_sizes_copy", "all_gather_copy_in")
# Operators that only copy between a tensor-parallel exchange and its matmul.
COPY_OPS = ("cat", "clone")
# Only the first step runs these.
STATE_INIT_OPS = ("zeros", "zeros_like")


class TracePricer:
    """Converts the segments of a rank's trace to works on a device."""

    def __init__(
        self, trace: RankTrace, plan: Plan, device: Device, shared: TracePricer | None = None
    ) -> None:
        """Create a pricer; ``shared`` is that of another rank with the same `OpTrace`."""
        self.trace, self.kernel = trace, attention_kernel(plan, device)
        self.is_compiled, self.forward_passes = plan.is_compiled, forward_passes(plan)
        self.num_experts = getattr(plan.model, "num_experts", 0)
        self.overlaps: dict[str, Overlap] = {
            **dict.fromkeys(FSDP_AXES, "prefetch"),
            "cp": "ring" if plan.parallel.cp_method == "ring" else "exposed",
            "ep": "pair" if plan.overlaps_dispatch else "exposed",
        }  # experts (ep) wait for tokens, and the next operators for experts: see `work`
        parallel = plan.parallel
        self.in_float32 = plan.float8_emulated or plan.compute_dtype == "float32"
        self.num_chunks = parallel.ep_chunks if plan.ep > 1 else 1
        self.padding = min(parallel.ep_padding, plan.ep * self.num_chunks) if plan.ep > 1 else 1.0
        # By the ``id`` of calls, which live as long as the trace.
        self.fused = find_fused_exchanges(trace.op_trace.events) if plan.async_tp else set()
        self.costs: dict[int, tuple[float, int]]
        self.costs = shared.costs if shared else self._price_calls()

    # ------------------------------------------------------------------- traffic

    def _price_calls(self) -> dict[int, tuple[float, int]]:
        """Return bytes moved and kernels launched by every call, by its ``id``."""
        events = self.trace.op_trace.events
        regions: list[tuple[Event, OpCall, int]] = []
        region, previous = 0, None
        readers: dict[int, set[int]] = defaultdict(set)
        used: set[int] = set()
        for event in events:
            if (call := event.call) is None:
                continue
            is_barrier = self._is_eager(event) or _is_barrier(call)
            region += is_barrier or event.location != previous
            regions.append((event, call, region))
            previous = event.location
            for storage, _ in call.reads:
                readers[storage].add(region)
            used |= {storage for storage, _ in (*call.reads, *call.writes)}
            region += is_barrier or call.name == CAST_REDUCTION
        allocated = {e.storage for e in events if e.call is None and e.bytes > 0}
        freed = {e.storage for e in events if e.call is None and e.bytes < 0}
        # Temporaries without events, see `OpRecorder.record_repeated`; some are never read.
        freed |= used - allocated - self.trace.op_trace.initial_bytes.keys()
        seen: set[tuple[int, int]] = set()
        launched: set[int] = set()
        costs: dict[int, tuple[float, int]] = {}
        for event, call, current in regions:
            moved = 0.0
            if self._is_eager(event):
                if not _is_barrier(call):
                    moved = sum(size for _, size in (*call.reads, *call.writes))
                costs[id(call)] = moved, 1
                continue
            kernels = 0 if current in launched else FUSED_KERNELS
            launched.add(current)
            if not _is_barrier(call):
                for storage, size in call.reads:
                    if (current, storage) not in seen:
                        moved += size
                    seen.add((current, storage))
                for storage, size in call.writes:
                    is_kept = storage not in freed or readers[storage] - {current}
                    if (current, storage) not in seen and is_kept:
                        moved += size * (TRANSPOSED_STORE if _is_transposed_cast(call) else 1)
                    seen.add((current, storage))
            costs[id(call)] = moved, kernels
        return costs

    def _is_eager(self, event: Event) -> bool:
        """Return True if the operator is not in a compiled block."""
        return not (self.is_compiled and event.location.is_in_block) or (
            event.call is not None and event.call.name in EAGER_OPS
        )

    # ------------------------------------------------------------------- segments

    def price_segment(self, segment: Segment) -> WorkList:
        """Return the works of a segment."""
        return tuple(
            (replace(self.work(calls, in_block), chunks=self.chunks(calls)), times)
            for calls, times, in_block in self.trace.extrapolation.segment_calls(segment)
        )

    def chunks(self, calls: Sequence[OpCall]) -> tuple[Work, ...]:
        """Return the work of calls in parts that end with an exchange; () without any."""
        ends = [
            index + 1
            for index, call in enumerate(calls)
            if call.group and (op := self._collective(call)) is not None and op.overlap == "pair"
        ]
        bounds = [0, *ends, len(calls)] if ends else []
        return tuple(self.work(calls[a:b]) for a, b in itertools.pairwise(bounds))

    def work(self, calls: Iterable[OpCall], in_block: bool = True) -> Work:
        """Return the work of calls; FSDP overlaps its collectives with those of a block."""
        matmuls, attention, collectives = [], [], []
        traffic = kernels = 0.0
        for call in calls:
            moved, launched = self.costs[id(call)]
            traffic += moved
            kernels += launched
            if call.name in MATMUL_OPS:
                matmuls.append(to_matmul(call, self.num_chunks, self.padding, self.in_float32))
            elif "attention" in call.name:
                attention.append(to_attention(call, self.kernel))
            elif call.group:
                op = self._collective(call)
                if op is not None and op.axis == "ep" and self._exchanges_rows(call):
                    # Only the first chunk's tokens and the last chunk's results are waited for.
                    exposed = op.times / self.num_chunks
                    hidden = op._replace(times=op.times - exposed, overlap="prefetch")
                    collectives += [op._replace(times=exposed), *([hidden] if hidden.times else [])]
                elif op is not None:
                    is_exposed = op.overlap == "prefetch" and not in_block
                    collectives.append(op._replace(overlap="exposed") if is_exposed else op)
        return Work(tuple(matmuls), tuple(attention), traffic, kernels, tuple(collectives))

    def _collective(self, call: OpCall) -> Collective | None:
        axis, ranks, stride = self.trace.comm_groups[call.group]
        kind = next((known for known in COLLECTIVE_KINDS if known == call.name), None)
        # The schedule prices p2p.  A pipeline's ranks also sum norms, and the gradients of tied
        # embeddings.
        is_message = kind in ("send", "broadcast")
        if kind is None or (axis == "pp" and (is_message or collective_bytes(call) < 1024)):
            return None
        overlap = self.overlaps.get(axis, "exposed")
        if axis == "tp" and id(call) in self.fused:
            overlap = "async"
        if overlap == "prefetch" and call.name == "all_reduce" and collective_bytes(call) < 1024:
            overlap = "exposed"  # a token count, not gradients
        if overlap == "pair" and not self._exchanges_rows(call):
            overlap = "exposed"
        if kind == "send":
            ranks = 2
        return Collective(kind, collective_bytes(call), axis, ranks, stride, overlap)

    def _exchanges_rows(self, call: OpCall) -> bool:
        """Return False for counts of rows, int64 per expert: the host waits for them."""
        return call.name == "all_to_all" and collective_bytes(call) > 8 * self.num_experts

    def price_stage(self, stage: int) -> StageWork:
        """Return the work of a stage for a middle microbatch.

        Additional work of the first and last microbatches counts once per step.
        """
        counts = self.trace.extrapolation.recorded_ordinals(stage)
        forward = self.price_segment((stage, "F", _steady_index(counts["F"], first=True)))
        backward: WorkList = ()
        grad_reduce: WorkList = ()
        for kind in "BIW":
            if kind in counts:
                steady = _steady_index(counts[kind], first=False)
                works = self.price_segment((stage, kind, steady))
                backward += works
                grad_reduce += _extra_collectives(
                    self.price_segment((stage, kind, max(counts[kind]))), works
                )
        param_gather = _extra_collectives(self.price_segment((stage, "F", 0)), forward)
        return StageWork(forward * self.forward_passes, backward, param_gather, grad_reduce)

    def price_optimizer(self) -> Work:
        """Return the work of clipping and the optimizer, for all blocks."""
        total = Work()
        for kind in ("clip", "optimizer"):
            for all_calls, times, _ in self.trace.extrapolation.segment_calls((0, kind, 0)):
                calls = [call for call in all_calls if call.name not in STATE_INIT_OPS]
                traffic = self._list_traffic(calls) / times
                work = replace(self.work(calls), traffic_bytes=traffic)
                total = sum(repeat(work, times), total)
        return total

    def _list_traffic(self, calls: Iterable[OpCall]) -> float:
        """Return the bytes that operators on lists of weights move, for all blocks."""
        repeats = self.trace.extrapolation.count_copies
        return sum(
            size * repeats(storage)
            for call in calls
            if not _is_barrier(call)
            for storage, size in (*call.reads, *call.writes)
        )


def _steady_index(counts: list[int], first: bool) -> int:
    """Return the index of a typical microbatch: neither the first nor the last."""
    if len(counts) == 1:
        return 0
    return 1 if first or len(counts) > 2 else 0


def _extra_collectives(full: WorkList, baseline: WorkList) -> WorkList:
    """Return the collectives that only ``full`` has, and the additional bytes."""
    counts: Counter[Collective] = Counter()
    traffic = 0.0
    for sign, works in ((1, full), (-1, baseline)):
        for work, times in works:
            traffic += sign * times * work.traffic_bytes
            for op in work.collectives:
                counts[op] += sign * times
    extra = tuple((Work(collectives=(op,)), n) for op, n in counts.items() if n > 0)
    return (*extra, (Work(traffic_bytes=max(0.0, traffic)), 1)) if extra else ()


def find_fused_exchanges(events: Iterable[Event]) -> set[int]:
    """Return the ids of the gathers and scatters that a matmul can overlap."""
    fused: set[int] = set()
    gathers: dict[int, OpCall] = {}  # by storage that holds what was gathered
    products: set[int] = set()  # storages that hold a product
    for call in (event.call for event in events if event.call is not None):
        read, written = (
            [storage for storage, _ in storages] for storages in (call.reads, call.writes)
        )
        is_matmul, is_copy = call.name in MATMUL_OPS, call.name in COPY_OPS
        if is_matmul:
            gathered = gathers.get(read[MATMUL_OPS[call.name]])
            fused |= set() if gathered is None else {id(gathered)}
        elif call.name == "reduce_scatter" and products.issuperset(read):
            fused.add(id(call))
        source = call if call.name == "all_gather" else is_copy and gathers.get(read[0])
        is_product = is_matmul or (is_copy and products.issuperset(read))
        for storage in written:
            gathers.pop(storage, None)
            products.discard(storage)
            if source:
                gathers[storage] = source
            if is_product:
                products.add(storage)
    return fused


def _is_transposed_cast(call: OpCall) -> bool:
    """Return True for a copy that stores a float8 matrix, one byte per number."""
    return call.name == "contiguous" and call.writes[0][1] == math.prod(call.shapes[0])


def _is_barrier(call: OpCall) -> bool:
    return call.name in MATMUL_OPS or "attention" in call.name or bool(call.group)


def to_matmul(
    call: OpCall, num_chunks: int = 1, padding: float = 1.0, in_float32: bool = False
) -> Matmul:
    """Convert a call to a matmul, single or batched.

    Args:
        call: the call.
        num_chunks: grouped GEMMs have rows in one of so many parts of their groups.
        padding: rows of a grouped GEMM, over those that it multiplies.
        in_float32: the products with float32 results are in float32 without TF32.
    """
    first = MATMUL_OPS[call.name]
    a, b = call.shapes[first], call.shapes[first + 1]
    precision: Precision = "float8" if "scaled" in call.name else "bf16"
    if "grouped" in call.name:
        return _grouped_matmul(a, b, call.shapes[-1][0] // num_chunks, padding, precision)
    groups = a[0] if len(a) == 3 else 1
    if in_float32 and call.writes[0][1] == 4 * groups * a[-2] * b[-1]:
        precision = "float32"
    return Matmul(a[-2], a[-1], b[-1], 1, precision, groups)


def _grouped_matmul(
    a: tuple[int, ...], b: tuple[int, ...], groups: int, padding: float, precision: Precision
) -> Matmul:
    """Return a grouped matmul with equally large groups; see `to_matmul`.

    Either rows are grouped, with a matrix per group, or the contracted dimension is.
    """
    if len(b) == 3:
        return Matmul(a[0] / padding / groups, a[1], b[2], 1, precision, groups)
    return Matmul(a[0], a[1] / padding / groups, b[1], 1, precision, groups)


def to_attention(call: OpCall, kernel: AttentionKernel) -> Attention:
    """Convert a call to attention; a causal mask halves the FLOPs.

    FlexAttention is taken to be as fast as FlashAttention 2, which was not measured.
    """
    backward = "backward" in call.name
    query, key = call.shapes[1:3] if backward else call.shapes[:2]
    flops = call.flops / (2 if call.causal else 1)
    uses_flex = call.name.startswith(("flex_attention", "max_attention"))
    kernel = "flash" if uses_flex else kernel
    return Attention(flops, key[-2], query[-1], backward, kernel)


# --------------------------------------------------------------------------- step


def build_step(plan: Plan, rank_traces: Sequence[RankTrace], device: Device) -> Step:
    """Convert traces to the step that `weft.estimate.cost` prices."""
    pricers: dict[int, TracePricer] = {}
    works = {}
    optimizer_work = Work()
    for pp, trace in enumerate(rank_traces):
        # Ranks that share a trace differ only in the number of blocks.
        pricer = TracePricer(trace, plan, device, pricers.get(id(trace.op_trace)))
        pricers.setdefault(id(trace.op_trace), pricer)
        stage_indices = [0] if plan.pipeline is None else plan.pipeline.stages_on_rank(pp)
        for stage, stage_index in enumerate(stage_indices):
            works[stage_index] = pricer.price_stage(stage)
        rank_work = pricer.price_optimizer()
        optimizer_work = max(optimizer_work, rank_work, key=lambda work: work.traffic_bytes)
    schedule, p2p = (
        (planned_schedule(plan), find_p2p(rank_traces)) if plan.pipeline else (None, None)
    )
    stages = tuple(works[stage_index] for stage_index in sorted(works))
    return Step(
        stages,
        plan.num_microbatches,
        plan.tokens_per_step,
        optimizer_work,
        schedule,
        p2p,
        find_pairs(plan),
    )


def find_p2p(rank_traces: Iterable[RankTrace]) -> Collective | None:
    """Return the message that a pipeline stage sends to the next."""
    for trace in rank_traces:
        for event in trace.op_trace.events:
            call = event.call
            if call is not None and call.name == "send":
                axis, _, stride = trace.comm_groups[call.group]
                if axis == "pp":
                    return Collective("send", collective_bytes(call), axis, 2, stride)
    return None
