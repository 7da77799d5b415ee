"""Trace one rank's training step with fake tensors and a fake process group.

PyTorch's fake process group completes every collective at once, and fake tensors have shapes but no
memory.  With both, a laptop builds, shards and runs the step of one of 16,384 ranks by the code
that trains.  Values and time are left out.

`weft.estimate.stand_ins` lists what differs from training.

Fake tensors are on the CPU, because a PyTorch build without CUDA cannot run autograd on fake CUDA
tensors.  `tests/fake_cuda` can, with a small library that needs a compiler.
"""

from __future__ import annotations

import math
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import set_checkpoint_early_stop

from weft.checkpoint.state_dict import trainable_parameters
from weft.config.axes import EXPERT_AXES, PARAMETER_AXES
from weft.data.loader import Batch
from weft.estimate.extrapolate import Extrapolation, HeterogeneousLayers, Segment, StepSize
from weft.estimate.op_locations import (
    locate_received,
    register_storages,
    track_locations,
)
from weft.estimate.op_recorder import Event, OpCall, OpLocation, OpRecorder, OpTrace
from weft.estimate.private_trace import fake_process_group, local_tensor, new_fake_mode
from weft.estimate.small_plan import (
    find_layer_pattern,
    fold_stages,
    make_traceable,
    reshards_stages,
    shrink_plan,
    use_sequential_schedule,
)
from weft.estimate.stand_ins import HOST_READS, trace_backend
from weft.estimate.trace_cache import load_or_compute
from weft.estimate.traced_float8 import trace_mxfp8_casts
from weft.models import Family
from weft.optim.optimizer import clip_scale, compute_grad_norm, masked_step
from weft.parallel.mesh import Mesh
from weft.parallel.private import get_group_ranks
from weft.planning.pipeline_schedule import (
    Action,
    PipelineSchedule,
    max_pending_backwards,
    planned_schedule,
    stage_indices,
)
from weft.planning.placement import coordinates_to_rank
from weft.planning.plan import Plan
from weft.training.run import manual_gc
from weft.training.setup import Built, Rank, build

# Groups of blocks per stage (None: all) and microbatches to record; the next pair if one does not
# suffice.
RECORDED_COUNTS: tuple[tuple[int | None, int], ...] = ((4, 4), (6, 6), (None, 6))
# Microbatches per pipeline rank after which the peak of memory does not grow.
STEADY_MICROBATCHES = 5


@contextmanager
def fake_world(rank: int, world_size: int, keep_sent: bool = True) -> Iterator[OpRecorder]:
    """Act as ``rank`` of ``world_size`` ranks in a fake process group.

    If ``keep_sent``, messages hold their tensors until the schedule waits for them.

    Yields:
        A recorder of the step of one rank, with fake tensors.
    """
    with fake_process_group(rank, world_size, keep_sent):
        yield OpRecorder(new_fake_mode(), HOST_READS)


def build_fake(plan: Plan, recorder: OpRecorder, compiled: bool = False) -> tuple[Built, Plan]:
    """Build this rank with fake parameters by `weft.training.setup.build`.

    Args:
        plan: of the rank; of its device.
        recorder: from `fake_world`; records the step.
        compiled: torch.compile is enabled in the run.

    Returns:
        The built rank, and the plan with the CPU as its device.
    """
    backend = trace_backend(recorder, plan.device, compiled)
    plan = replace(plan, device="cpu")
    rank = Rank(dist.get_rank(), 0, dist.get_world_size(), torch.device("cpu"))
    return build(plan, rank, backend), plan


def record_step(
    built: Built,
    plan: Plan,
    recorder: OpRecorder | None = None,
    group_size: int = 1,
) -> OpTrace:
    """Record one step: all microbatches, gradient clipping and the optimizer.

    Args:
        built: model, optimizer and mesh of the rank.
        plan: plan of the rank.
        recorder: of `build_fake`; None: tensors are real, and all ranks run together.
        group_size: number of blocks that count as one.
    """
    get_blocks = partial(_main_blocks, plan.family)
    recorder = recorder or OpRecorder()
    params = [param for _, param in trainable_parameters(built.model_parts)]
    stages = built.mesh.get_group("pp") if plan.pp > 1 else None
    with recorder.mode or nullcontext():
        storage_blocks = register_storages(recorder, built.model_parts, get_blocks, group_size)
        optimizer_states = frozenset(
            recorder.register(local_tensor(value))
            for state in built.optimizer.state.values()
            for value in state.values()
            if isinstance(value, Tensor)
        )
        batches = empty_batches(plan)
        input_microbatches = {
            recorder.register(column): microbatch
            for microbatch, batch in enumerate(batches)
            for column in batch
            if column is not None
        }
        with (
            manual_gc(collects=False),  # as in training, cycles stay alive
            recorder,
        ):
            with track_locations(
                recorder, built.model_parts, get_blocks, built.train_step, group_size
            ):
                step_loss = built.train_step.forward_backward(batches)
            recorder.location = OpLocation(0, "clip", 0)
            norm, _ = compute_grad_norm(params, stages)
            grads = [param.grad for param in params]
            assert all(grad is not None for grad in grads)
            gradients = frozenset(
                recorder.register(local_tensor(g)) for g in grads if g is not None
            )
            del grads
            recorder.location = OpLocation(0, "optimizer", 0)
            scale = clip_scale(norm, plan.job.optim.max_grad_norm)
            masked_step(built.optimizer, torch.tensor(False), scale)
            for hook in built.train_step.hooks:
                hook.update(torch.tensor(False))
            recorder.location = OpLocation(0, "end", 0)
            built.optimizer.zero_grad()
    assert step_loss.shape == norm.shape == ()
    return OpTrace(
        locate_received(recorder.events),
        recorder.initial_bytes,
        storage_blocks,
        input_microbatches,
        optimizer_states,
        gradients,
        frozenset(recorder.host_storages),
    )


def _main_blocks(family: Family, part: nn.Module) -> list[nn.Module]:
    """Return the blocks; layers of multi-token prediction count as the head."""
    return [block for block in family.blocks(part) if not getattr(block, "is_mtp", False)]


def empty_batches(plan: Plan) -> list[Batch]:
    """Return the microbatches of a step, filled with zeros."""
    job = plan.job
    num_sequences, batches = plan.local_batch_size, []
    for _ in range(plan.num_microbatches):
        tokens = torch.zeros(
            (min(num_sequences, plan.microbatch_size), plan.seq_len), dtype=torch.int64
        )
        document_columns = (
            (tokens.clone(), tokens.clone()) if job.data.keeps_documents else (None, None)
        )
        batch = Batch(tokens, tokens.clone(), *document_columns)
        if plan.numbers_tokens:
            batch = batch._replace(token_ids_BT=tokens.clone())
        if job.train.neftune_alpha and job.data.keeps_documents:
            batch = batch._replace(lengths_BT=torch.ones_like(tokens))
        if job.data.compares_answers:
            batch = batch._replace(references_BP2=torch.zeros(len(tokens), 1, 2))
        if job.data.format == "unpaired":
            # With a baseline: `forward_passes` counts the pass that computes it.
            labels = torch.zeros(len(tokens), 1, dtype=torch.int64)
            batch = batch._replace(labels_BP=labels, baseline_B=torch.zeros(len(tokens)))
        batches.append(batch)
        num_sequences -= plan.microbatch_size
    return batches


def axis_groups(mesh: Mesh) -> dict[str, dist.ProcessGroup]:
    """Return the process groups of a rank by axis.

    ``dp_shard``, or with ``train.world_size_invariant`` ``dp_replicate``, includes ``cp``.
    """
    groups = {axis: mesh.get_group(axis) for axis in PARAMETER_AXES}
    if mesh.expert_mesh is not None:
        own = [axis for axis in EXPERT_AXES if axis not in PARAMETER_AXES]
        groups |= {axis: mesh.expert_mesh.get_group(axis) for axis in own}
        replicas = mesh.expert_mesh.get_group("dp_replicate")
        if groups["efsdp"].size() == 1 and replicas is not groups["dp_replicate"]:
            groups["efsdp"] = replicas  # train.world_size_invariant
    return groups | ({"cp": mesh.cp_group} if mesh.cp_group else {})


# --------------------------------------------------------------------------- trace of a plan


class CommGroup(NamedTuple):
    """Ranks that communicate on a mesh axis; ``stride``: between neighbors."""

    axis: str
    num_ranks: int
    stride: int


@dataclass(frozen=True)
class RankTrace:
    """The traced step of one rank of a plan.

    ``short_actions``: the first and last of ``actions``, with the same peak of microbatches in
    flight. ``comm_groups``: process groups by name.
    """

    rank: int
    op_trace: OpTrace
    extrapolation: Extrapolation
    actions: tuple[Segment, ...]
    short_actions: tuple[Segment, ...]
    comm_groups: dict[str, CommGroup]

    def events(self) -> Iterator[Event]:
        """Yield the events of the step; see `Extrapolation.events`."""
        return self.extrapolation.events(self.actions)

    def shortened(self) -> RankTrace:
        """Return the trace without the repeated middle of the step."""
        return replace(self, actions=self.short_actions)

    def count_segments(self) -> Counter[Segment]:
        """Count the segments of the step, as `Extrapolation.segment_calls` takes them."""
        once: list[Segment] = [(0, kind, 0) for kind in ("start", "clip", "optimizer", "end")]
        sources = map(self.extrapolation.source_segment, self.actions)
        actions = ((s[0], *source[1:]) for s, source in zip(self.actions, sources, strict=True))
        return Counter([*once, *actions])


def trace_ranks(plan: Plan, cached: bool = False) -> list[RankTrace]:
    """Trace the first rank of each pipeline rank; one rank without a pipeline.

    ``cached``: keep recordings on disk; see `weft.estimate.trace_cache`.

    The trace runs a step of few blocks and microbatches and extrapolates it.  Blocks of a pattern
    (`find_layer_pattern`) form groups, which are alike.  Ranks of several stages are combined from
    recorded stages of each kind (see `fold_stages`).  Other ranks share a recording if they differ
    only in the number of blocks.  If groups differ, more of them run, then all blocks, then all
    microbatches.  All blocks run if the optimizer does not treat parameters one by one: Muon
    exchanges the matrices of all blocks at once.
    """
    if reshards_stages(plan):
        return _trace_ranks(plan, plan, 1, cached)
    first, period = find_layer_pattern(plan)
    group_size = math.lcm(plan.activation_checkpoint.period, period)
    for num_groups, num_microbatches in RECORDED_COUNTS:
        max_groups = None
        if num_groups and plan.optimizer == "adamw":
            max_groups = num_groups + 2 * -(-first // group_size)  # the middle follows the first
        try:
            small_plan = shrink_plan(plan, max_groups, group_size, num_microbatches)
            return _trace_ranks(plan, small_plan, group_size, cached)
        except HeterogeneousLayers:
            continue
    return _trace_ranks(plan, plan, 1, cached)


def _trace_ranks(plan: Plan, small_plan: Plan, group_size: int, cached: bool) -> list[RankTrace]:
    recordings: dict[object, tuple[OpTrace, StepSize, dict[str, CommGroup]]] = {}
    extrapolations: dict[tuple[object, StepSize], Extrapolation] = {}
    rank_traces = []
    folded = fold_stages(small_plan)
    short_plan = plan
    if plan.pipeline is None or not plan.pipeline.has_schedule_file:
        short_plan = replace(
            plan, num_microbatches=min(plan.num_microbatches, STEADY_MICROBATCHES * plan.pp)
        )
    for pp in range(plan.pp):
        rank = coordinates_to_rank({"pp": pp}, plan.axis_sizes, plan.axis_order)
        target_size = step_size(plan, pp, group_size)
        if folded is not None and plan.pipeline is not None:
            key, recorded_plan, recorded_pp = None, folded[0], 0
            target_size = replace(
                target_size,
                source_stages=tuple(folded[1][s] for s in plan.pipeline.stages_on_rank(pp)),
            )
        else:
            key, recorded_plan, recorded_pp = stage_signature(small_plan, pp), small_plan, pp
        if key not in recordings:
            numbers = recorded_pp, group_size
            record = partial(record_rank, plan, recorded_plan, *numbers)
            recordings[key] = (
                load_or_compute(record, (plan, recorded_plan), *numbers) if cached else record()
            )
        op_trace, recorded_size, comm_groups = recordings[key]
        if (key, target_size) not in extrapolations:  # equal ranks share one
            extrapolation = Extrapolation(op_trace, recorded_size, target_size)
            extrapolations[key, target_size] = extrapolation
        extrapolation = extrapolations[key, target_size]
        actions = list(rank_actions(plan, pp))
        short_actions = drop_middle(actions, list(rank_actions(short_plan, pp)), plan, short_plan)
        rank_traces.append(
            RankTrace(
                rank, op_trace, extrapolation, tuple(actions), tuple(short_actions), comm_groups
            )
        )
    return rank_traces


def drop_middle(
    actions: list[Segment], short_actions: list[Segment], plan: Plan, short_plan: Plan
) -> list[Segment]:
    """Return the actions of a step without its repeated middle.

    Return all actions if the short step has fewer microbatches in flight.
    """
    if max_pending_backwards(short_actions) != max_pending_backwards(actions):
        return actions
    num_kept, num_dropped = (
        short_plan.num_microbatches,
        plan.num_microbatches - short_plan.num_microbatches,
    )
    return [
        (s, kind, count + num_dropped * (2 * count >= num_kept)) for s, kind, count in short_actions
    ]


def record_rank(
    plan: Plan, small_plan: Plan, pp: int, group_size: int
) -> tuple[OpTrace, StepSize, dict[str, CommGroup]]:
    """Record the step of ``small_plan``; return it with its size and process groups."""
    rank = coordinates_to_rank({"pp": pp}, plan.axis_sizes, plan.axis_order)
    # Other schedules free a message soon, but the recorded one is another: that of
    # `use_sequential_schedule`.
    keep_sent = plan.pipeline is None or plan.schedule_name == "GPipe"
    world = fake_world(rank, plan.world_size, keep_sent)
    casts = trace_mxfp8_casts(plan.float8 == "mxfp8" and not plan.float8_emulated)
    with world as recorder, casts, tempfile.TemporaryDirectory() as directory:
        has_fewer_microbatches = small_plan.num_microbatches < plan.num_microbatches
        if (
            small_plan.pipeline is not None
            and plan.pipeline is not None
            and (
                has_fewer_microbatches
                or small_plan.pipeline.stage_ranks != plan.pipeline.stage_ranks
                or has_mixed_backward(planned_schedule(plan))
            )
        ):
            small_plan = use_sequential_schedule(
                small_plan, "W" in action_kinds(planned_schedule(plan)), Path(directory)
            )
        small_plan = make_traceable(small_plan, plan.device)
        built, small_plan = build_fake(small_plan, recorder, plan.is_compiled)
        section = plan.activation_checkpoint
        if plan.is_compiled and plan.cp > 1 and section.mode == "selective" and not section.offload:
            _keep_attention_inputs(built.model_parts)
        # A compiled part of a block cannot stop in the middle of its recomputation.
        with set_checkpoint_early_stop(not (plan.is_compiled and plan.has_graph_breaks)):
            op_trace = record_step(built, small_plan, recorder, group_size)
        comm_groups = find_comm_groups(op_trace, built.mesh)
    return op_trace, step_size(small_plan, pp, group_size), comm_groups


def _keep_attention_inputs(model_parts: list[nn.Module]) -> None:
    """Let attention save its inputs: it runs between two parts of a compiled block."""

    def run(attend: Callable[..., Tensor], *args: Any) -> Tensor:
        # Detached, because an output that its own operator saves would keep the graph alive.
        with torch.autograd.graph.saved_tensors_hooks(Tensor.detach, lambda x: x):
            return attend(*args)

    modules: list[Any] = [module for part in model_parts for module in part.modules()]
    for module in modules:
        if hasattr(module, "attend"):
            module.attend = partial(run, module.attend)


def stage_signature(plan: Plan, pp: int) -> object:
    """Return the key that pipeline ranks with the same work share."""
    if plan.pipeline is None:
        return None
    kind, last = plan.family.layer_kind, plan.model.num_layers + 1
    return tuple(
        (
            stage.num_blocks,
            tuple(kind(plan.model, unit - 1) for unit in stage.units if 0 < unit < last and kind),
            0 in stage.units,
            last in stage.units,
        )
        for stage in plan.pipeline.stages_by_rank[pp]
    )


def step_size(plan: Plan, pp: int, group_size: int) -> StepSize:
    """Return the block groups of each stage of a pipeline rank, and microbatches."""
    if plan.pipeline is None:
        counts = [plan.model.num_layers]
    else:
        counts = [stage.num_blocks for stage in plan.pipeline.stages_by_rank[pp]]
    return StepSize(tuple(max(1, count // group_size) for count in counts), plan.num_microbatches)


def rank_actions(plan: Plan, pp: int) -> dict[Segment, Action]:
    """Return the actions of a pipeline rank in order.

    Keys: stage index, kind, number of earlier actions of that kind.  Values: the schedule's action,
    of which the key may be a half.
    """
    schedule = planned_schedule(plan)
    is_mixed = has_mixed_backward(schedule)
    stages = stage_indices(schedule[pp])
    counts: Counter[tuple[int, str]] = Counter()
    actions: dict[Segment, Action] = {}
    for action in schedule[pp]:
        stage_index = stages.index(action.stage)
        for action_kind in "IW" if is_mixed and action.kind == "B" else action.kind:
            actions[stage_index, action_kind, counts[stage_index, action_kind]] = action
            counts[stage_index, action_kind] += 1
    return actions


def has_mixed_backward(schedule: PipelineSchedule) -> bool:
    """Return True if only some backward passes are split; the trace splits all then."""
    return {"B", "W"} <= action_kinds(schedule)


def action_kinds(schedule: PipelineSchedule) -> set[str]:
    """Return the kinds of actions of a schedule: F, B, I, W."""
    return {action.kind for order in schedule.values() for action in order}


# --------------------------------------------------------------------------- communication


def find_comm_groups(op_trace: OpTrace, mesh: Mesh) -> dict[str, CommGroup]:
    """Return the process groups of a trace by name.

    A subgroup of an axis's group belongs to that axis.
    """
    axis_to_group = axis_groups(mesh)
    axis_by_name = {str(group.group_name): axis for axis, group in axis_to_group.items()}
    axis_ranks = {
        axis: set(dist.get_process_group_ranks(group)) for axis, group in axis_to_group.items()
    }
    names = {event.call.group for event in op_trace.events if event.call is not None}
    comm_groups = {}
    for name in names - {""}:
        ranks = get_group_ranks(name)
        containing = [axis for axis, all_ranks in axis_ranks.items() if all_ranks.issuperset(ranks)]
        axis = min(containing, key=lambda axis: len(axis_ranks[axis]), default="world")
        axis = axis_by_name.get(name, axis)  # two axes may have the same ranks
        stride = ranks[1] - ranks[0] if len(ranks) > 1 else 1
        comm_groups[name] = CommGroup(axis, len(ranks), stride)
    return comm_groups


def collective_bytes(call: OpCall) -> int:
    """Return the size of a collective's gathered, or not yet reduced, tensor."""
    if call.name == "all_gather":  # into one tensor or several
        return sum(size for _, size in call.writes)
    return max((size for _, size in (*call.reads, *call.writes)), default=0)
