"""Step time and memory of many layouts, from a few traced blocks.

`weft.estimate.trace` records a step of each pipeline rank of a plan, which takes seconds.  Most
layouts of a search share their blocks: degrees of data parallelism, the pipeline, its schedule and
the number of microbatches decide how often a block runs and what FSDP moves, not what is inside.
A `Piece` is what one rank computes in the embedding, in each kind of block, and in the head, for
one microbatch.  It is recorded once for all layouts with equal tensor, context and expert
parallelism, recomputation and precision, on the fewest ranks that have these axes and FSDP:

    layers    0 .. first-1   irregular first blocks, each recorded
              then a pattern of `period` blocks, recorded three times; the middle one counts, since
              the ends gather earlier or free later

Work and bytes of a microbatch are linear in its sequences: larger microbatches than two follow from
pieces of one and two.  `PieceEstimate` composes the step of a plan: FSDP's collectives with the
plan's ranks, stages, schedule, and memory by the order of passes.  It takes milliseconds.  What it
leaves out against a full trace is in the ends of a step and in the allocator: in twelve shipped
recipes 1.3 % of the time at most, and up to a fifth of the memory.  Two with DualPipeV are 2.3 and
5.4 % too slow, and up to 38 % too large in live memory.  The update of Muon and SOAP, which
exchange matrices, is scaled by parameters only, and too small.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from weft.config.axes import FSDP_AXES
from weft.config.schema import replace as replace_sections
from weft.estimate.analytic import RESERVED_RATIO, peak_activations, split_layers
from weft.estimate.cost import (
    Collective,
    Hardware,
    Matmul,
    Seconds,
    StageWork,
    Step,
    Work,
    WorkList,
    collective_seconds,
    forward_passes,
    step_seconds,
    work_seconds,
)
from weft.estimate.extrapolate import Extrapolation
from weft.estimate.op_recorder import OUTSIDE_BLOCKS, Event, OpCall
from weft.estimate.small_plan import find_layer_pattern
from weft.estimate.trace import RankTrace, record_rank
from weft.estimate.trace_cache import load_or_compute
from weft.estimate.trace_memory import categorize_storages
from weft.estimate.trace_to_cost import EAGER_OPS, TracePricer
from weft.models.decoder_config import DecoderConfig
from weft.planning.devices import Device
from weft.planning.lora_plan import TrainingCost, plan_cost
from weft.planning.pipeline_schedule import (
    Action,
    PipelineSchedule,
    build_schedule,
    find_pairs,
    join_halves,
    planned_schedule,
    single_stage_schedule,
    stage_indices,
)
from weft.planning.plan import Plan
from weft.planning.sharding import expert_split, state_bytes_per_param
from weft.training.loss import chunk_tokens

Unit = str | int  # embedding, head, or a layer by its index
EMBEDDING, HEAD = "embedding", "head"
# Copies of a pattern of blocks that are recorded, of which the middle one counts.  Activations that
# are offloaded stay on the device during the next blocks.
COPIES, OFFLOAD_COPIES = 3, 5
# Tokens per rank above which a floor is recorded with context parallelism: the recorder runs each
# chunk of the loss.
LONGEST_RECORDED = 16384


class UnitWork(NamedTuple):
    """Work of one rank in a unit of the model, for one microbatch.

    ``saved``: bytes from forward to backward.  ``forward_peak``, ``backward_peak``: bytes that are
    neither states nor saved activations while it runs: gathered weights, messages, temporaries.
    """

    forward: Work = Work()
    backward: Work = Work()
    saved: float = 0.0
    forward_peak: float = 0.0
    backward_peak: float = 0.0


@dataclass(frozen=True)
class Piece:
    """The units of a model on one rank, with ``copies`` of the pattern.

    ``optimizer``: clipping and update, of ``optimizer_params`` parameters on the rank.
    """

    units: dict[Unit, UnitWork]
    first: int
    period: int
    copies: int
    optimizer: Work
    optimizer_params: float

    def kind(self, layer: int) -> int:
        """Return the recorded layer that stands for a layer."""
        if layer < self.first:
            return layer
        place = (layer - self.first) % self.period
        middle = self.first + (self.copies // 2) * self.period + place
        return middle if middle in self.units else layer  # few layers are all recorded


# --------------------------------------------------------------------------- recording


def piece_plan(plan: Plan, num_sequences: int) -> Plan:
    """Return the smallest plan whose blocks do the work of a plan's blocks.

    It has no pipeline and no replicas, and two ranks that shard the weights, so that FSDP is there.
    """
    inner = plan.cp * (plan.tp if plan.etp == 1 else 1)  # of the ranks that ep splits
    dp_shard = 2
    if plan.ep > 1:
        dp_shard = max(1, 2 * plan.ep // inner) if 2 * plan.ep % inner == 0 else 2 * plan.ep
    if plan.fsdp_size == 1 and plan.ep == 1:
        dp_shard = 1
    first, period = find_layer_pattern(plan)
    layers = min(plan.model.num_layers, first + num_copies(plan) * period)
    parallel = {"pp": 1, "dp_replicate": 1, "dp_shard": dp_shard, "reshard_after_forward": "always"}
    job = replace_sections(
        plan.job,
        parallel=parallel,
        pipeline={"layers_per_stage": (), "stages_per_rank": "auto"},
        train={"microbatch_size": num_sequences},
    )
    world_size = dp_shard * plan.cp * plan.tp
    return replace(
        plan,
        job=job,
        pp=1,
        dp_replicate=1,
        dp_shard=dp_shard,
        pipeline=None,
        world_size=world_size,
        local_world_size=world_size,
        node_counts=(1,),
        num_microbatches=1,
        local_batch_size=num_sequences,
        microbatch_size=num_sequences,
        global_batch_size=num_sequences * dp_shard,
        tokens_per_step=num_sequences * dp_shard * plan.seq_len,
        reshard_after_forward=dp_shard * plan.cp > 1,
        gradient_sync="microbatch",
        model=plan.model.model_copy(update={"num_layers": layers}),
        warnings=(),
    )


def num_copies(plan: Plan) -> int:
    """Return how often a pattern of blocks is recorded."""
    return OFFLOAD_COPIES if plan.activation_checkpoint.offload else COPIES


def record_piece(plan: Plan, device: Device, num_sequences: int, cached: bool) -> Piece:
    """Trace the blocks of a plan for a microbatch of some sequences."""
    small = piece_plan(plan, num_sequences)

    def record() -> RankTrace:
        op_trace, size, groups = record_rank(small, small, 0, 1)
        whole = Extrapolation(op_trace, size, size)
        return RankTrace(0, op_trace, whole, (), (), groups)

    trace = load_or_compute(record, (small,), "piece") if cached else record()
    pricer = TracePricer(trace, plan, device)
    first, period = find_layer_pattern(plan)
    layers, copies = small.model.num_layers, num_copies(plan)
    start = first + copies // 2 * period
    middle = range(start, min(layers, start + period))
    located = _locate_events(trace.op_trace.events, middle)
    calls: dict[tuple[str, Unit], list[OpCall]] = defaultdict(list)
    for event, unit in located:
        if event.call is not None:
            calls[event.location.kind, unit].append(event.call)
    bytes_by_unit = _measure_memory(located, categorize_storages(trace.op_trace))
    units: dict[Unit, UnitWork] = {}
    for unit in (EMBEDDING, *range(layers), HEAD):
        forward, backward = (_work(pricer, calls[kind, unit]) for kind in "FB")
        units[unit] = UnitWork(forward, backward, *bytes_by_unit[unit])
    cost = plan_cost(small)
    local = cost.trainable_params / small.tp / max(1, small.fsdp_size)
    return Piece(units, first, period, copies, pricer.price_optimizer(), local)


def _locate_events(events: Sequence[Event], middle: Collection[int]) -> list[tuple[Event, Unit]]:
    """Return the events of passes with their units.

    Outside of running blocks, an event that touches a block belongs to it if the blocks of
    ``middle`` have such events there, too, as scales of all weights before the first block.  Others
    belong to the embedding or the head.
    """
    located: list[tuple[Event, Unit, int | None]] = []
    seen: set[str] = set()  # kinds of passes in which a block has run
    repeated: set[object] = set()
    for event in events:
        kind, block = event.location.kind, event.location.block
        if kind not in ("F", "B"):
            continue
        index = None if block is None or block[1] == OUTSIDE_BLOCKS else block[1]
        if event.location.is_in_block and index is not None:
            seen.add(kind)
            located.append((event, index, None))
            continue
        end: Unit = HEAD if (kind in seen) == (kind == "F") else EMBEDDING
        if index in middle:
            repeated.add((kind, end, _name(event)))
        located.append((event, end, index))
    return [
        (
            event,
            unit
            if index is None or (event.location.kind, unit, _name(event)) not in repeated
            else index,
        )
        for event, unit, index in located
    ]


def _name(event: Event) -> object:
    """Return what an event of another block has in common."""
    return event.bytes if event.call is None else (event.call.name, event.call.shapes)


def _work(pricer: TracePricer, calls: Sequence[OpCall]) -> Work:
    """Return the work of calls without FSDP's copies, which its collectives imply."""
    own = [call for call in calls if call.name not in EAGER_OPS]
    return replace(pricer.work(own), chunks=pricer.chunks(own))


def _measure_memory(
    located: Iterable[tuple[Event, Unit]], categories: Mapping[int, str]
) -> dict[Unit, tuple[float, float, float]]:
    """Return bytes saved by each unit, and the peaks of its passes; see `UnitWork`."""
    saved: Counter[Unit] = Counter()
    peaks: Counter[tuple[str, Unit]] = Counter()
    live = 0
    for event, unit in located:
        if event.call is not None:
            continue
        category = categories.get(event.storage, "temporaries")
        if category == "activations":
            saved[unit] += event.bytes if event.location.kind == "F" else 0
        elif category in ("communication", "temporaries"):
            live += event.bytes
            key = event.location.kind, unit
            peaks[key] = max(peaks[key], live)
    units = {unit for _, unit in peaks} | saved.keys()
    result = {unit: (saved[unit], peaks["F", unit], peaks["B", unit]) for unit in units}
    return defaultdict(lambda: (0.0, 0.0, 0.0), result)


# --------------------------------------------------------------------------- microbatches


def interpolate(one: Piece, two: Piece, size: float) -> Piece:
    """Return the piece of ``size`` times ``one``'s sequences; ``two`` has twice them."""
    between = _interpolator(size)
    units = {
        unit: UnitWork(
            _interpolate_work(a.forward, two.units[unit].forward, size),
            _interpolate_work(a.backward, two.units[unit].backward, size),
            *(between(x, y) for x, y in zip(a[2:], two.units[unit][2:], strict=True)),
        )
        for unit, a in one.units.items()
    }
    return replace(one, units=units)


def _interpolator(size: float) -> Callable[[float, float], float]:
    return lambda a, b: a + (b - a) * (size - 1)


def _interpolate_work(one: Work, two: Work, size: float) -> Work:
    """Return a work whose sizes are linear in the microbatch."""
    between = _interpolator(size)
    pairs = (one.matmuls, two.matmuls), (one.attention, two.attention)
    if any(len(a) != len(b) for a, b in (*pairs, (one.collectives, two.collectives))):
        return _repeat(two, size / 2)  # more chunks of the same size, as in the loss

    def matmul(x: Matmul, y: Matmul) -> Matmul:
        return x._replace(m=between(x.m, y.m), k=between(x.k, y.k), n=between(x.n, y.n))

    return Work(
        tuple(map(matmul, one.matmuls, two.matmuls)),
        tuple(
            x._replace(flops=between(x.flops, y.flops))
            for x, y in zip(one.attention, two.attention, strict=True)
        ),
        between(one.traffic_bytes, two.traffic_bytes),
        between(one.kernels, two.kernels),
        tuple(
            x._replace(bytes=between(x.bytes, y.bytes))
            for x, y in zip(one.collectives, two.collectives, strict=True)
        ),
        tuple(_interpolate_work(x, y, size) for x, y in zip(one.chunks, two.chunks, strict=False)),
    )


def _repeat(work: Work, times: float) -> Work:
    """Return a work whose operators run so many times."""
    return Work(
        tuple(op._replace(times=op.times * times) for op in work.matmuls),
        tuple(op._replace(flops=op.flops * times) for op in work.attention),
        work.traffic_bytes * times,
        work.kernels * times,
        tuple(op._replace(times=op.times * times) for op in work.collectives),
    )


# --------------------------------------------------------------------------- recomputation


def keeps_activations(plan: Plan) -> Plan:
    """Return a plan without full recomputation, which is arithmetic; else the plan."""
    section = plan.activation_checkpoint
    if section.mode != "full" or section.every_n_layers > 1 or section.offload:
        return plan
    job = replace_sections(plan.job, activation_checkpoint={"mode": "none"})
    return replace(plan, job=job)


def recompute(piece: Piece, input_bytes: float, stops_early: bool) -> Piece:
    """Return the piece whose blocks keep their inputs and run forward again.

    ``stops_early``: the last product, which backward does not need, does not run again.
    """
    units: dict[Unit, UnitWork] = {}
    for name, unit in piece.units.items():
        if isinstance(name, str):
            units[name] = unit
            continue
        # The gather before backward serves the forward pass, too.
        own = tuple(op for op in unit.forward.collectives if op.axis not in FSDP_AXES)
        again = replace(unit.forward, collectives=own)
        if stops_early:
            sums = bool(own) and own[-1].axis == "tp"
            again = replace(again, matmuls=again.matmuls[:-1], collectives=own[: len(own) - sums])
        backward = again + unit.backward
        backward = replace(backward, chunks=unit.forward.chunks + unit.backward.chunks)
        peak = max(unit.forward_peak, unit.backward_peak + unit.saved - input_bytes)
        units[name] = unit._replace(
            backward=backward, saved=min(unit.saved, input_bytes), backward_peak=peak
        )
    return replace(piece, units=units)


# --------------------------------------------------------------------------- layouts


def supports_pieces(plan: Plan) -> bool:
    """Return True for weft's decoders with a schedule that has a name."""
    has_schedule_file = plan.pipeline is not None and plan.pipeline.has_schedule_file
    is_decoder = isinstance(plan.model, DecoderConfig)
    return is_decoder and not has_schedule_file and not plan.world_size_invariant


def has_chunks(plan: Plan, size: int) -> bool:
    """Return True if the loss of ``size`` sequences is computed in chunks."""
    tokens = size * plan.seq_len // plan.cp
    return chunk_tokens(tokens, plan.model.vocab_size // plan.tp, plan.is_compiled) < tokens


class PassSeconds(NamedTuple):
    """Seconds of a microbatch without exchanges: on the device, and of the host.

    Each of the blocks forward, and of all units in both passes.
    """

    forward: float
    both: float
    host_forward: float
    host_both: float


def _recorded_cp(plan: Plan) -> int:
    """Return the ranks per sequence with which a floor is recorded."""
    return max(1, plan.seq_len // LONGEST_RECORDED)


class Pieces:
    """Estimates of plans on one device; records pieces as plans need them."""

    def __init__(self, device: Device, cached: bool = False) -> None:
        """Begin without pieces; ``cached``: keep recordings on disk."""
        self.device, self.cached = device, cached
        self._pieces: dict[object, Piece] = {}
        self._costs: dict[object, TrainingCost] = {}
        self._floors: dict[object, tuple[PassSeconds, PassSeconds]] = {}

    def estimate(self, plan: Plan) -> PieceEstimate:
        """Return the estimate of a plan.

        Raises:
            ValueError: if the schedule does not allow the numbers.
        """
        return PieceEstimate(plan, self.piece(plan), self.cost(plan))

    def floor_seconds(self, plan: Plan, hardware: Hardware) -> float:
        """Return what a step takes at least.

        It is the largest of FSDP's exchanges, of the time in which the host launches kernels, and
        of everything else: products, traffic, exchanges of tensor and expert parallelism.  It needs
        two recordings for all layouts in one precision: of one rank per sequence, without
        recomputation.  More ranks for each sequence do the same work in smaller products.
        """
        key = plan.float8, plan.compile, plan.lora, plan.model, plan.seq_len, plan.objective
        if key not in self._floors:
            self._floors[key] = self._find_floor(plan, hardware)
        one, two = self._floors[key]
        size, recomputes = plan.microbatch_size, plan.activation_checkpoint.mode == "full"
        forward, both, launch_forward, launch = (
            a + max(0.0, b - a) * (size - 1) for a, b in zip(one, two, strict=True)
        )
        cp = _recorded_cp(plan)  # ranks of a sequence in the recording
        seconds = cp * (both + forward * recomputes) / (plan.tp * plan.cp)
        seconds += size * self._exchange_seconds(plan, hardware) / plan.cp
        busy = float(plan.num_microbatches)
        if plan.pp > 1 and not plan.splits_backward:  # the pipeline fills and drains
            busy += (plan.pp - 1) / plan.stages_per_rank
        host = (launch + launch_forward * recomputes) * plan.num_microbatches / plan.pp
        return max(seconds * busy / plan.pp, host, self._sharding_seconds(plan, hardware))

    def _exchange_seconds(self, plan: Plan, hardware: Hardware) -> float:
        """Return what the exchanges of a sequence's tokens take at least.

        With tensor parallelism, attention and feed-forward each gather and reduce their tokens,
        forward and backward.  Experts get and return them.
        """
        size = 2 * plan.seq_len * plan.model.dim
        layers = plan.model.num_layers
        seconds = 0.0
        if plan.tp > 1 and not plan.async_tp:
            op = Collective("all_gather", size, "tp", plan.tp)
            seconds += 8 * layers * _transfer_seconds(op, hardware)
        hides = plan.overlaps_dispatch or plan.parallel.ep_chunks > 1
        if plan.ep > 1 and not hides:
            split = plan.tp if plan.sequence_parallel else 1
            sent = size * plan.model.active_experts / split
            stride = 1 if plan.etp == 1 else plan.tp
            op = Collective("all_to_all", sent, "ep", plan.ep, stride)
            seconds += 4 * plan.model.num_moe_layers * _transfer_seconds(op, hardware)
        return seconds

    def _sharding_seconds(self, plan: Plan, hardware: Hardware) -> float:
        """Return what FSDP's exchanges of a step take at least."""
        if plan.fsdp_size == 1:
            return 0.0
        cost = self.cost(plan)
        trained = cost.trainable_params / cost.num_params
        experts = cost.expert_params if trained == 1 else 0.0
        params = cost.num_params - experts * (1 - 1 / expert_split(plan))
        params /= plan.tp * plan.pp
        width = 1 if plan.float8_all_gather else 2
        gather = Collective("all_gather", width * params, "dp_shard", plan.fsdp_size, plan.tp)
        reduction = gather._replace(kind="reduce_scatter", bytes=2 * params * trained)
        once = plan.reshard_after_forward is False
        gathers = 1 if once else 2 * plan.num_microbatches
        reductions = 1 if once or plan.gradient_sync == "step" else plan.num_microbatches
        stride, size = plan.tp * plan.fsdp_size, reduction.bytes / plan.fsdp_size
        replicas = Collective("all_reduce", size, "dp_replicate", plan.dp_replicate, stride)
        seconds = sum(_transfer_seconds(op, hardware) for op in (reduction, replicas))
        return gathers * _transfer_seconds(gather, hardware) + reductions * seconds

    def _find_floor(self, plan: Plan, hardware: Hardware) -> tuple[PassSeconds, PassSeconds]:
        """Return the seconds of one and of two sequences without tp and ep."""
        cp = _recorded_cp(plan)
        parallel = {"tp": 1, "cp": cp, "ep": 1, "etp": "tp", "async_tp": False, "dp_shard": "auto"}
        job = replace_sections(
            plan.job,
            parallel=parallel,
            activation_checkpoint={"mode": "none", "offload": False},
            train={"microbatch_size": 1},
        )
        whole = replace(plan, job=job, tp=1, cp=cp, ep=1, dp_shard=2)
        one, two = (self._compute_seconds(whole, size, hardware) for size in (1, 2))
        return one, two

    def _compute_seconds(self, plan: Plan, size: int, hardware: Hardware) -> PassSeconds:
        """Return the seconds of a microbatch of some sequences."""
        piece = self._recorded(plan, size)
        counts = Counter[Unit](map(piece.kind, range(plan.model.num_layers)))
        forward, both = Seconds(), Seconds()
        for name, times in [*counts.items(), (EMBEDDING, 1), (HEAD, 1)]:
            unit = piece.units[name]
            for work in (unit.forward, unit.backward):
                spent = work_seconds(replace(work, collectives=()), hardware)
                host = spent.pop("host", 0.0)
                parts = Seconds(compute=spent.total(), host=host + spent.total() if host else 0.0)
                both.add(parts, times)
                if work is unit.forward and not isinstance(name, str):
                    forward.add(parts, times)
        return PassSeconds(forward["compute"], both["compute"], forward["host"], both["host"])

    def cost(self, plan: Plan) -> TrainingCost:
        """Return the `plan_cost` of a plan."""
        key = plan.seq_len, plan.lora, plan.frozen_params
        if key not in self._costs:
            self._costs[key] = plan_cost(plan)
        return self._costs[key]

    def state_bytes(self, plan: Plan) -> float:
        """Return the bytes of a rank's weights, gradients and moments; no recording."""
        cost = self.cost(plan)
        return cost.num_params / (plan.tp * plan.pp) * state_bytes_of(plan, cost)

    def piece(self, plan: Plan) -> Piece:
        """Return the piece of a plan's blocks."""
        kept = keeps_activations(plan)
        piece = self._sized(kept)
        if kept is plan:
            return piece
        split = plan.cp * (plan.tp if plan.sequence_parallel else 1)
        width = 4 if plan.compute_dtype == "float32" else 2
        size = width * plan.microbatch_size * plan.seq_len * plan.model.dim / split
        # A product of experts, or in float8, saves its inputs only after it has run.
        saves_first = not plan.model.num_experts and plan.float8 == "none"
        stops_early = saves_first and not (plan.is_compiled and plan.has_graph_breaks)
        return recompute(piece, size, stops_early)

    def _sized(self, plan: Plan) -> Piece:
        """Return the piece of a plan, recorded or interpolated from smaller ones.

        Sizes whose loss is computed in as many chunks have the same operators.
        """
        size = plan.microbatch_size
        like = [n for n in (1, 2, 4) if has_chunks(plan, n) == has_chunks(plan, size)]
        if size <= 2 or not like or 2 * like[0] >= size:
            return self._recorded(plan, size)
        key = self._key(plan), size
        if key not in self._pieces:
            one, two = self._recorded(plan, like[0]), self._recorded(plan, 2 * like[0])
            self._pieces[key] = interpolate(one, two, size / like[0])
        return self._pieces[key]

    def _recorded(self, plan: Plan, size: int) -> Piece:
        key = self._key(plan), size
        if key not in self._pieces:
            self._pieces[key] = record_piece(plan, self.device, size, self.cached)
        return self._pieces[key]

    def _key(self, plan: Plan) -> object:
        small = piece_plan(plan, 1)
        sections = (small.parallel, small.activation_checkpoint, small.compile, small.precision)
        others = small.lora, small.job.optim, small.dp_shard, plan.overlaps_dispatch
        return (*sections, *others, small.model, plan.seq_len, plan.objective)


class PieceEstimate:
    """Time and memory of a plan, composed of a piece.

    Attributes:
        zero: 0 replicates the weights; 2 gathers them once per step; 3 in every microbatch.
    """

    def __init__(self, plan: Plan, piece: Piece, cost: TrainingCost) -> None:
        """Compose the step of a plan."""
        self.plan, self.piece, self.cost = plan, piece, cost
        shards = plan.fsdp_size
        self.zero = 0 if shards == 1 else 2 if plan.reshard_after_forward is False else 3

    # ------------------------------------------------------------------- stages

    @cached_property
    def schedule(self) -> PipelineSchedule:
        """The pipeline schedule; without a pipeline, of at most two microbatches."""
        plan = self.plan
        if plan.pp == 1:
            return single_stage_schedule(min(2, plan.num_microbatches))
        if plan.pipeline is not None and plan.pipeline.stage_ranks:
            return planned_schedule(plan)
        name, stages = plan.schedule_name, plan.stages_per_rank
        schedule = build_schedule(name, plan.pp, stages, plan.num_microbatches)
        return schedule if plan.splits_backward else join_halves(schedule)

    @cached_property
    def stages(self) -> list[list[Unit]]:
        """The units of each stage: embedding, layers by their index, head."""
        plan = self.plan
        last = plan.model.num_layers
        if plan.pipeline is not None and plan.pipeline.stage_ranks:
            names: list[Unit] = [EMBEDDING, *range(last), HEAD]
            return [[names[unit] for unit in stage.units] for stage in plan.pipeline.stages]
        counts = split_layers(last, plan.pp * plan.stages_per_rank)
        result: list[list[Unit]] = []
        start = 0
        for count in counts:
            result.append(list(range(start, start + count)))
            start += count
        result[0].insert(0, EMBEDDING)
        result[-1].append(HEAD)
        return result

    def unit(self, name: Unit) -> UnitWork:
        """Return the work of a unit."""
        return self.piece.units[name if isinstance(name, str) else self.piece.kind(name)]

    # ------------------------------------------------------------------- time

    def step_seconds(self, hardware: Hardware) -> Seconds:
        """Return the seconds of a step by cause."""
        return step_seconds(self.step(), hardware)

    def step(self) -> Step:
        """Return the work of a training step."""
        plan = self.plan
        works = tuple(self._stage_work(units) for units in self.stages)
        works = tuple(replace(w, forward=w.forward * forward_passes(plan)) for w in works)
        common = (works, plan.num_microbatches, plan.tokens_per_step, self._optimizer_work())
        if plan.pp == 1:
            return Step(*common)
        stride = plan.tp * plan.dp_cp_size
        split = plan.cp * (plan.tp if plan.sequence_parallel else 1)
        size = 2 * plan.microbatch_size * plan.seq_len * plan.model.dim / split
        p2p = Collective("send", size, "pp", 2, stride)
        return Step(*common, self.schedule, p2p, find_pairs(plan))

    def _optimizer_work(self) -> Work:
        """Return clipping and update, of the rank with the most parameters."""
        params = max(self._rank_params(order) for order in self.schedule.values())
        shards = max(1, self.plan.fsdp_size)
        trained = self.cost.trainable_params / max(1, self.cost.num_params)
        local = params * min(1.0, trained) / shards
        ratio = local / max(1.0, self.piece.optimizer_params)
        return _repeat(self.piece.optimizer, ratio)

    def _stage_work(self, units: Sequence[Unit]) -> StageWork:
        counts = Counter(u if isinstance(u, str) else self.piece.kind(u) for u in units)
        forward: list[tuple[Work, int]] = []
        backward: list[tuple[Work, int]] = []
        gathers: Counter[Collective] = Counter()
        reductions: Counter[Collective] = Counter()
        syncs_once = self.plan.gradient_sync == "step" or self.zero < 3
        accumulates = syncs_once and self.plan.num_microbatches > 1
        for name, times in counts.items():
            unit = self.piece.units[name]
            for work, passes in ((unit.forward, forward), (unit.backward, backward)):
                own, moved = self._retarget(work)
                kept = []
                traffic = own.traffic_bytes
                for op in moved:
                    is_gather = op.kind == "all_gather"
                    if is_gather and self.zero < 3:
                        if passes is forward:
                            gathers[op] += times
                    elif not is_gather and syncs_once:
                        reductions[op] += times
                        # Reads a gradient in bfloat16, and adds it to the sum in float32.
                        traffic += 1.5 * op.bytes * (accumulates and op.kind == "reduce_scatter")
                    else:
                        kept.append(op)
                traffic += 2 * sum(op.bytes for op in kept)  # into and out of FSDP's buffers
                collectives = (*own.collectives, *kept)
                passes.append((replace(own, traffic_bytes=traffic, collectives=collectives), times))
        return StageWork(
            tuple(forward), tuple(backward), _sync_works(gathers), _sync_works(reductions)
        )

    def _retarget(self, work: Work) -> tuple[Work, list[Collective]]:
        """Return a work without FSDP's collectives, and those with the plan's ranks."""
        plan = self.plan
        own = tuple(op for op in work.collectives if op.axis not in FSDP_AXES)
        moved: list[Collective] = []
        for op in work.collectives:
            if op.axis not in FSDP_AXES or op.bytes < 1024:
                continue
            ranks, stride = plan.fsdp_size, plan.tp
            if op.axis == "efsdp":
                split = plan.ep * (plan.etp if plan.etp > 1 else 1)
                ranks = max(1, plan.fsdp_size * plan.tp // split)
                stride = split
            if self.zero:
                moved.append(op._replace(ranks=ranks, stride=stride))
            if op.kind == "reduce_scatter" and plan.dp_replicate > 1:
                stride = plan.tp * plan.fsdp_size
                replicas = op._replace(
                    kind="all_reduce",
                    bytes=op.bytes / ranks,
                    axis="dp_replicate",
                    ranks=plan.dp_replicate,
                    stride=stride,
                )
                moved.append(replicas)
        return replace(work, collectives=own), moved

    # ------------------------------------------------------------------- memory

    def _rank_params(self, order: list[Action]) -> float:
        """Return the parameters of a pipeline rank, of one tensor-parallel rank."""
        names = [EMBEDDING, *range(self.plan.model.num_layers), HEAD]
        sizes = {name: unit.params for name, unit in zip(names, self.cost.units, strict=True)}
        local = {unit for stage in stage_indices(order) for unit in self.stages[stage]}
        return sum(sizes[unit] for unit in local) / self.plan.tp

    def live_bytes(self) -> float:
        """Return the live bytes of the fullest rank."""
        return max(sum(self._rank_bytes(order)) for order in self.schedule.values())

    def memory_bytes(self) -> float:
        """Return the bytes of the fullest rank, as the allocator reserves them."""
        ratio = RESERVED_RATIO if self.plan.device != "cpu" else 1.0
        ranks = (self._rank_bytes(order) for order in self.schedule.values())
        return max(states + ratio * growing for states, growing in ranks)

    def _rank_bytes(self, order: list[Action]) -> tuple[float, float]:
        """Return the bytes of states, and those that come and go, at the peak of a rank."""
        states = self._rank_params(order) * state_bytes_of(self.plan, self.cost)
        saved = [sum(self.unit(name).saved for name in units) for units in self.stages]
        activations, _ = peak_activations(order, saved, [0.0] * len(saved))
        growing = max(
            self._peak_in_stage(self.stages[s], activations) for s in stage_indices(order)
        )
        return states, growing

    def _peak_in_stage(self, units: Sequence[Unit], activations: float) -> float:
        """Return the most bytes of activations and temporaries while a stage runs.

        Args:
            units: of the stage, in order.
            activations: of the rank, when all units have run forward.
        """
        later, peak = 0.0, 0.0
        for name in reversed(units):  # activations of later units are not there yet, or gone
            unit = self.unit(name)
            alive = activations - later
            peak = max(peak, alive + unit.backward_peak, alive - unit.saved + unit.forward_peak)
            later += unit.saved
        if self.plan.overlaps_dispatch:  # see `trace_memory.add_paired_passes`
            peak += max(self.unit(name).forward_peak for name in units)
        return peak


def state_bytes_of(plan: Plan, cost: TrainingCost) -> float:
    """Return the bytes of states per parameter of a pipeline and tensor-parallel rank."""
    shards = plan.fsdp_size
    return state_bytes_per_param(
        plan.job,
        cost,
        shards,
        has_unsharded_params=shards > 1 and plan.reshard_after_forward is False,
        has_unsharded_gradients=plan.gradient_sync == "step" and plan.num_microbatches > 1,
        compute_bytes=4 if plan.compute_dtype == "float32" else 2,
        ep=expert_split(plan),
    )


def _transfer_seconds(op: Collective, hardware: Hardware) -> float:
    """Return the seconds of a collective without its latency."""
    return collective_seconds(op, hardware) - collective_seconds(op._replace(bytes=1), hardware)


def _sync_works(collectives: Counter[Collective]) -> WorkList:
    """Return collectives that run once per step, with FSDP's copies."""
    return tuple(
        (Work(traffic_bytes=2 * op.bytes, collectives=(op,)), times)
        for op, times in collectives.items()
    )
