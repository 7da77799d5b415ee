"""A trace as `weft.estimate.cost` prices it.

Matrix products, attention and collectives are taken as they were called.  Everything else moves
bytes.  Eager, each operator reads what it takes and writes what it makes.  Compiled, operators
between two products, attentions or collectives are one kernel: it reads what comes from outside of
it and writes what is read outside of it, or stays.  Blocks are compiled, and nothing else is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import repeat

from weft.estimate.cost import (
    Attention,
    Collective,
    Kernel,
    Matmul,
    Overlap,
    StageWork,
    Work,
    Works,
)
from weft.estimate.extrapolate import Segment
from weft.estimate.op_recorder import Call, Event
from weft.estimate.trace import Trace, exchanged_bytes

# The place of the first factor.
PRODUCTS = {"mm": 0, "addmm": 1, "bmm": 0, "baddbmm": 1, "_scaled_mm": 0, "_grouped_mm": 0}
KINDS = {
    "all_gather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "all_reduce": "all_reduce",
    "all_to_all": "all_gather",  # as much to each of the others
    "send": "send",
    "broadcast": "send",
}
# Kernels that the host of a compiled block launches for what it fuses between two barriers.
FUSED_KERNELS = 1
# FSDP's copies into and out of its buffers happen outside of what is compiled.
OUTSIDE = ("chunk_cat", "split_with_sizes_copy", "all_gather_copy_in")
# Of the first step only.
MAKES_STATES = ("zeros", "zeros_like")


@dataclass(frozen=True)
class Setting:
    """What a trace on the CPU does not tell; ``overlaps``: how each axis's collectives hide.

    ``fused_optimizer``: the optimizer's many operators on a weight are one kernel, as torchao
    compiles them.
    """

    compiled: bool
    fused_optimizer: bool
    kernel: Kernel
    overlaps: dict[str, Overlap]


class Pricer:
    """The works of a trace's segments."""

    def __init__(self, trace: Trace, setting: Setting, same: Pricer | None = None) -> None:
        """``same``: of another trace of the same recording."""
        self.trace, self.setting = trace, setting
        self.bytes: list[float]
        self.kernels: list[int]
        self.bytes, self.kernels = (same.bytes, same.kernels) if same else self._swept()

    # ------------------------------------------------------------------- what is swept

    def _swept(self) -> tuple[list[float], list[int]]:
        """Of every event of the recording, the bytes that it moves and the kernels it launches."""
        events = self.trace.recording.events
        moved, kernels = [0.0] * len(events), [0] * len(events)
        region, regions = 0, [0] * len(events)
        before: object = None
        readers: dict[int, set[int]] = {}
        for place, event in enumerate(events):
            if (call := event.call) is None:
                continue
            alone = self._is_eager(event) or _is_barrier(call)
            region += alone or event.where != before
            regions[place], before = region, event.where
            for storage, _ in call.reads:
                readers.setdefault(storage, set()).add(region)
            region += alone
        gone = {e.storage for e in events if e.call is None and e.bytes < 0}
        seen: set[tuple[int, int]] = set()
        launched: set[int] = set()
        for place, event in enumerate(events):
            if (call := event.call) is None:
                continue
            if self._is_eager(event):
                kernels[place] = 1
                if not _is_barrier(call):
                    moved[place] = sum(size for _, size in (*call.reads, *call.writes))
                continue
            here = regions[place]
            if here not in launched:
                launched.add(here)
                kernels[place] = FUSED_KERNELS
            if _is_barrier(call):
                continue
            for storage, size in call.reads:
                if (here, storage) not in seen:
                    seen.add((here, storage))
                    moved[place] += size
            for storage, size in call.writes:
                if (here, storage) in seen:
                    continue
                seen.add((here, storage))
                if storage not in gone or readers.get(storage, set()) - {here}:
                    moved[place] += size
        return moved, kernels

    def _is_eager(self, event: Event) -> bool:
        """Whether an operator is none of a compiled block's: head, loss and optimizer, too."""
        return not (self.setting.compiled and event.where.running) or (
            event.call is not None and event.call.name in OUTSIDE
        )

    # ------------------------------------------------------------------- segments

    def of(self, segment: Segment) -> Works:
        return tuple(
            (self._work(calls), times) for calls, times in self.trace.expansion.works(segment)
        )

    def _work(self, calls: Iterable[tuple[int, Call]]) -> Work:
        matmuls, attention, collectives = [], [], []
        swept = kernels = 0.0
        for place, call in calls:
            swept += self.bytes[place]
            kernels += self.kernels[place]
            if call.name in PRODUCTS:
                matmuls.append(product(call))
            elif "attention" in call.name:
                attention.append(attention_of(call, self.setting.kernel))
            elif call.group:
                op = self._collective(call)
                if op is not None:
                    collectives.append(op)
        return Work(tuple(matmuls), tuple(attention), swept, kernels, tuple(collectives))

    def _collective(self, call: Call) -> Collective | None:
        axis, ranks, stride = self.trace.groups[call.group]
        kind = KINDS.get(call.name)
        if kind is None or axis == "pp":
            return None  # receiving is somebody's sending; hops are priced with the timetable
        overlap = self.setting.overlaps.get(axis, "exposed")
        if overlap == "prefetch" and call.name == "all_reduce" and exchanged_bytes(call) < 1024:
            overlap = "exposed"  # a count, not gradients
        if kind == "send":
            ranks = 2
        return Collective(kind, exchanged_bytes(call), axis, ranks, stride, overlap)  # type: ignore[arg-type]

    def stage(self, stage: int) -> StageWork:
        """Of a middle microbatch; what the first and the last do beyond it is its step's."""
        counts = self.trace.expansion.counts(stage)
        forward = self.of((stage, "F", _steady(counts["F"], first=True)))
        backward: Works = ()
        after: Works = ()
        for kind in "BIW":
            if kind in counts:
                steady = _steady(counts[kind], first=False)
                works = self.of((stage, kind, steady))
                backward += works
                after += _beyond(self.of((stage, kind, max(counts[kind]))), works)
        before = _beyond(self.of((stage, "F", 0)), forward)
        return StageWork(forward, backward, before, after)

    def once(self) -> Work:
        """Clipping and the optimizer, of all blocks."""
        total = Work()
        for kind in ("clip", "optimizer"):
            for all_calls, times in self.trace.expansion.works((0, kind, 0)):
                calls = [each for each in all_calls if each[1].name not in MAKES_STATES]
                if kind == "optimizer" and self.setting.fused_optimizer:
                    part = self._one_kernel_a_weight(calls)
                else:
                    part = replace(self._work(calls), swept_bytes=self._of_lists(calls) / times)
                total = sum(repeat(part, times), total)
        return total

    def _of_lists(self, calls: Iterable[tuple[int, Call]]) -> float:
        """Bytes that operators move in one call for all blocks' weights."""
        repeats = self.trace.expansion.repeats
        return sum(
            size * repeats(storage)
            for _, call in calls
            if not _is_barrier(call)
            for storage, size in (*call.reads, *call.writes)
        )

    def _one_kernel_a_weight(self, calls: Iterable[tuple[int, Call]]) -> Work:
        """What stays is read once and written once."""
        recording = self.trace.recording
        gone = {event.storage for event in recording.events if event.bytes < 0}
        reads = {s: size for _, call in calls for s, size in call.reads if s not in gone}
        writes = {s: size for _, call in calls for s, size in call.writes if s not in gone}
        weights = len(writes.keys() & recording.owner.keys())
        return Work(swept_bytes=sum(reads.values()) + sum(writes.values()), kernels=weights)


def _steady(counts: list[int], first: bool) -> int:
    """The microbatch that most are like: neither the first, which gathers, nor the last."""
    if len(counts) == 1:
        return 0
    return 1 if first or len(counts) > 2 else 0


def _beyond(more: Works, less: Works) -> Works:
    """The collectives that one has and the other has not, and with them the difference of bytes."""
    counts: Counter[Collective] = Counter()
    swept = 0.0
    for sign, works in ((1, more), (-1, less)):
        for work, times in works:
            swept += sign * times * work.swept_bytes
            for op in work.collectives:
                counts[op] += sign * times
    extra = tuple((Work(collectives=(op,)), n) for op, n in counts.items() if n > 0)
    return (*extra, (Work(swept_bytes=max(0.0, swept)), 1)) if extra else ()


def _is_barrier(call: Call) -> bool:
    return call.name in PRODUCTS or "attention" in call.name or bool(call.group)


def product(call: Call) -> Matmul:
    """A matrix product of two matrices, or of several pairs."""
    first = PRODUCTS[call.name]
    a, b = call.shapes[first], call.shapes[first + 1]
    if call.name == "_grouped_mm":
        return _grouped(a, b, call.shapes[2][0])
    groups = a[0] if len(a) == 3 else 1
    precision = "float8" if call.name == "_scaled_mm" else "bf16"
    return Matmul(a[-2], a[-1], b[-1], 1, precision, groups)  # type: ignore[arg-type]


def _grouped(a: tuple[int, ...], b: tuple[int, ...], groups: int) -> Matmul:
    """Of groups of rows, each with a matrix of its own; or of groups of columns and rows, which
    make a matrix each.  Groups are taken as equally large."""
    if len(b) == 3:
        return Matmul(a[0] / groups, a[1], b[2], groups=groups)
    return Matmul(a[0], a[1] / groups, b[1], groups=groups)


def attention_of(call: Call, kernel: Kernel) -> Attention:
    """Half of the square is computed where the future is left out."""
    backward = "backward" in call.name
    query, key = call.shapes[1:3] if backward else call.shapes[:2]
    flops = call.flops / (2 if call.causal else 1)
    return Attention(flops, key[-2], query[-1], backward, kernel)
