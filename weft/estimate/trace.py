"""A step of one rank of a world that is not there, on tensors that are not there.

torch's fake process group answers every collective at once with nothing, and fake tensors have
shapes but no memory.  Under both, the very code that trains on 16,384 GPUs builds, shards and
runs a step of one rank on a laptop; what is left out are values and time.

Two things need help, and are helped here only:

* Parameters are made by weft's own code on the meta device, as always, but their memory must be
  fake: FSDP looks at the mesh's real tensor while it shards, so only ``allocate`` sees fake ones.
* Initial weights are computed on values.  They are skipped.

Fake tensors are on the CPU: a build of PyTorch without CUDA cannot fake cuda tensors.
"""

from __future__ import annotations

import itertools
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor

from weft.checkpoint.state_dict import named_parameters
from weft.config.schema import Job
from weft.config.schema import replace as replace_sections
from weft.data.loader import Batch
from weft.estimate.extrapolate import Expansion, HeterogeneousLayers, Segment, Sizes
from weft.estimate.op_recorder import (
    AROUND,
    Block,
    Call,
    Event,
    OpTrace,
    Recorder,
    Where,
    place_of,
    placed,
)
from weft.models import load_family
from weft.optim.optimizer import clip_grad_norm
from weft.parallel.activation_offload import OffloadedTensor
from weft.parallel.mesh import PARAMETER_AXES, Mesh
from weft.parallel.private_hooks import fake_process_group, get_group_ranks
from weft.plan.pipeline_schedule import Action, PipelineSchedule, is_schedule_file, max_pending_backwards, stage_indices
from weft.plan.placement import coordinates_to_rank
from weft.plan.resolve import Plan
from weft.plan.stages import Stage
from weft.train import setup
from weft.train.loop import rare_garbage
from weft.train.setup import Built, Rank, build

# Blocks of a stage, and microbatches, that tell of all others; more where these do not.
RECORDED = (4, 6)
# Microbatches for each rank of the pipeline after which no memory is needed that was not before.
ENOUGH = 5


@contextmanager
def fake_world(rank: int, world_size: int, keep_sent: bool = True) -> Iterator[FakeTensorMode]:
    """Be ``rank`` of ``world_size``; inside, `build_fake` makes a model.

    Args:
        keep_sent: messages hold what they send until the schedule lets go of them.

    Yields:
        The mode under which tensors are fake, not yet entered.
    """
    with fake_process_group(rank, world_size, keep_sent):
        yield FakeTensorMode(allow_non_fake_inputs=True)


def build_fake(job: Job, plan: Plan, mode: FakeTensorMode) -> tuple[Built, Plan]:
    """`weft.train.setup.build` of this rank with fake parameters.

    Returns:
        What is trained, and the plan with the CPU in the place of its device.
    """
    plan = replace(plan, device="cpu")
    rank = Rank(dist.get_rank(), 0, dist.get_world_size(), torch.device("cpu"))
    real: Callable[..., None] = setup.allocate

    def allocate(*args: Any) -> None:
        with mode:
            real(*args)

    with patch.object(setup, "allocate", allocate), patch.object(setup, "init_params", _leave):
        return build(job, plan, rank), plan


def _leave(*args: Any) -> None:
    """The weights as they are."""


def record_step(
    built: Built, job: Job, plan: Plan, mode: FakeTensorMode | None = None, period: int = 1
) -> OpTrace:
    """One step of training: all microbatches forward and backward, clipping, the optimizer.

    Args:
        mode: under which tensors are fake; None: they are real, and the ranks run it together.
        period: so many blocks count as one.
    """
    family = load_family(job.model.kind)
    recorder = Recorder(mode)
    params = [param for _, param in named_parameters(built.parts)]
    stages = built.mesh.group("pp") if plan.pp > 1 else None
    with mode or nullcontext():
        owner: dict[int, Block | None] = {}
        for stage, part in enumerate(built.parts):
            blocks = family.blocks(part)
            places = {
                id(param): (stage, place_of(number, len(blocks), period))
                for number, block in enumerate(blocks)
                for param in block.parameters()
            }
            for tensor in (*part.parameters(), *part.buffers()):
                place = places.get(id(tensor), (stage, AROUND))
                owner[recorder.keep(local(tensor), place)] = place
        states = frozenset(
            recorder.keep(local(value))
            for state in built.optimizer.state.values()
            for value in state.values()
            if isinstance(value, Tensor)
        )
        batches = no_rows(job, plan)
        rows = {
            recorder.keep(column): number
            for number, batch in enumerate(batches)
            for column in batch
            if column is not None
        }
        host: set[int] = set()

        def noted(tensor: Tensor, pin: bool) -> Tensor:
            copy = to_host(tensor, pin)
            host.add(recorder.keep(copy))
            return copy

        to_host = OffloadedTensor.empty_on_host
        noting = patch.object(OffloadedTensor, "on_host", staticmethod(noted))
        with rare_garbage(), recorder, noting:  # as in training, what is in a cycle stays
            with placed(recorder, built.parts, family.blocks, built.engine, period):
                loss = built.engine.forward_backward(batches)
            recorder.where = Where(0, "clip", 0)
            norm = clip_grad_norm(params, job.optim.max_grad_norm, stages)
            grads = [param.grad for param in params]
            assert all(grad is not None for grad in grads)
            gradients = frozenset(recorder.keep(local(g)) for g in grads if g is not None)
            del grads
            recorder.where = Where(0, "optimizer", 0)
            built.optimizer.step()
            recorder.where = Where(0, "end", 0)
            built.optimizer.zero_grad()
    assert loss.shape == norm.shape == ()
    kept = recorder.events, recorder.kept, owner, rows, states, gradients, frozenset(host)
    return OpTrace(*kept)


def no_rows(job: Job, plan: Plan) -> list[Batch]:
    """Microbatches without text."""
    left, batches = plan.local_batch, []
    for _ in range(plan.accumulation):
        rows = torch.zeros((min(left, plan.microbatch), job.train.seq_len), dtype=torch.int64)
        more = (rows.clone(), rows.clone()) if job.data.keeps_documents else (None, None)
        batch = Batch(rows, rows.clone(), *more)
        if job.data.format == "preferences":
            batch = batch._replace(references_B2=torch.zeros(len(rows), 2))
        batches.append(batch)
        left -= plan.microbatch
    return batches


def local(tensor: Tensor) -> Tensor:
    """What this rank holds of it."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def axis_groups(mesh: Mesh) -> dict[str, dist.ProcessGroup]:
    """The process groups of a rank: ``dp_shard`` is that of the parameters, with ``cp`` in it."""
    groups = {axis: mesh.group(axis) for axis in PARAMETER_AXES}
    if mesh.experts is not None:
        groups |= {axis: mesh.experts.get_group(axis) for axis in ("edp", "ep")}
    return groups | ({"cp": mesh.context} if mesh.context else {})


# --------------------------------------------------------------------------- one rank of a plan


class Group(NamedTuple):
    """Ranks that communicate: on which axis of the mesh, how many, how far neighbours are apart."""

    axis: str
    ranks: int
    stride: int


@dataclass(frozen=True)
class Trace:
    """What one rank does in a step of a plan.

    ``order``: its actions; ``short``: of them the first and last ones, which keep as much at once
    as all; ``groups``: the process groups in which it communicates, by name.
    """

    rank: int
    recording: OpTrace
    expansion: Expansion
    order: tuple[Segment, ...]
    short: tuple[Segment, ...]
    groups: dict[str, Group]

    def events(self) -> Iterator[Event]:
        """See `Expansion.events`."""
        return self.expansion.events(self.order)

    def shortened(self) -> Trace:
        """The step without what repeats itself in the middle."""
        return replace(self, order=self.short)

    def segment_counts(self) -> Counter[Segment]:
        """How often each segment happens in the whole step, as `Expansion.works` takes them."""
        once: list[Segment] = [(0, kind, 0) for kind in ("start", "clip", "optimizer", "end")]
        sources = map(self.expansion.source, self.order)
        order = ((s[0], *source[1:]) for s, source in zip(self.order, sources, strict=True))
        return Counter([*once, *order])


def traces(job: Job, plan: Plan) -> list[Trace]:
    """Of each rank of the pipeline (one where there is none) what the first of its ranks does.

    A step of few blocks and microbatches is run, and repeated to the whole.  Ranks of several
    stages are put together from stages of each kind (see `fold`); others share a recording if they
    differ only in how many blocks their stages have.  Where blocks are not alike more are run.  All
    are, if the optimizer is not known to go through parameters one by one: Muon exchanges the
    matrices of all blocks at once, and deals them out.
    """
    period = (
        job.activation_checkpoint.every_n_layers if job.activation_checkpoint.mode != "none" else 1
    )
    if frees_stages(plan):
        return _traces(job, plan, plan, 1)
    for few in RECORDED:
        try:
            small = fewer(plan, few, period, all_blocks=job.optim.name != "adamw")
            return _traces(job, plan, small, period)
        except HeterogeneousLayers:
            continue
    return _traces(job, plan, plan, 1)


def frees_stages(plan: Plan) -> bool:
    """Whether torch's runtime frees and gathers whole stages by what comes next in the order."""
    if plan.pipeline is None or plan.reshard_after_forward is False:
        return False
    return max(Counter(plan.pipeline.ranks).values()) > 3 and plan.dp_shard * plan.cp > 1


def _traces(job: Job, plan: Plan, small: Plan, period: int) -> list[Trace]:
    known: dict[object, tuple[OpTrace, Sizes, dict[str, Group]]] = {}
    found = []
    folded = fold(job, small)
    short_plan = plan
    if plan.pipeline is None or not is_schedule_file(plan.pipeline.schedule):
        short_plan = replace(plan, accumulation=min(plan.accumulation, ENOUGH * plan.pp))
    for pp in range(plan.pp):
        rank = coordinates_to_rank(dict.fromkeys(plan.sizes, 0) | {"pp": pp}, plan.sizes, plan.order)
        whole = sizes_of(plan, pp, period)
        if folded is not None and plan.pipeline is not None:
            key, shown, at = None, folded[0], 0
            whole = replace(whole, like=tuple(folded[1][s] for s in plan.pipeline.stages_of(pp)))
        else:
            key, shown, at = units_of(small, pp), small, pp
        if key not in known:
            known[key] = record_rank(job, plan, shown, at, period)
        recording, recorded, its_groups = known[key]
        expansion = Expansion(recording, recorded, whole)
        order = list(actions_of(plan, pp))
        short = without_middle(order, list(actions_of(short_plan, pp)), plan, short_plan)
        found.append(Trace(rank, recording, expansion, tuple(order), tuple(short), its_groups))
    return found


def without_middle(
    order: list[Segment], short: list[Segment], plan: Plan, short_plan: Plan
) -> list[Segment]:
    """The order of fewer microbatches as that of a step's first and last ones; but the whole order
    if the short one keeps fewer at once."""
    if max_pending_backwards(short) != max_pending_backwards(order):
        return order
    few, left_out = short_plan.accumulation, plan.accumulation - short_plan.accumulation
    return [(s, kind, count + left_out * (2 * count >= few)) for s, kind, count in short]


def fold(job: Job, plan: Plan) -> tuple[Plan, list[int]] | None:
    """A plan whose first rank has a stage of each kind, and of each stage of ``plan`` its kind.

    Kinds are the first, the last, and those between by how many blocks they have; the other ranks
    have what must be between them.  None where ranks have one stage each, where neighbours are on
    the same rank, or where a stage's work depends on what others are there.
    """
    pipeline = plan.pipeline
    if pipeline is None or len(pipeline.stages) == plan.pp or job.optim.name != "adamw":
        return None
    if any(a == b for a, b in itertools.pairwise(pipeline.ranks)) or frees_stages(plan):
        return None
    kinds: dict[object, int] = {}
    stages: list[Stage] = []
    like, first, last = [], 0, plan.model.num_layers + 1
    for stage in pipeline.stages:
        ends = (0 in stage.units) + (last in stage.units)
        kind = stage.blocks, 0 in stage.units, last in stage.units
        like.append(kinds.setdefault(kind, len(kinds)))
        if like[-1] * plan.pp < len(stages):
            continue  # there is one
        while len(stages) % plan.pp:
            stages.append(replace(stage, first=first, end=first + 1, blocks=1))
            first += 1
        stages.append(replace(stage, first=first, end=first + stage.blocks + ends))
        first = stages[-1].end
    ranks = tuple(place % plan.pp for place in range(len(stages)))
    few = (plan.accumulation,) * len(stages)
    pipeline = replace(pipeline, stages=tuple(stages), ranks=ranks, in_flight=few)
    model = plan.model.model_copy(update={"num_layers": first - 2})
    folded = replace(plan, pipeline=pipeline, model=model)
    return None if frees_stages(folded) else (folded, like)


def record_rank(
    job: Job, plan: Plan, small: Plan, pp: int, period: int
) -> tuple[OpTrace, Sizes, dict[str, Group]]:
    """The step of ``small``, what it has of blocks and microbatches, and the process groups."""
    job = traceable(job, plan)
    rank = coordinates_to_rank(dict.fromkeys(plan.sizes, 0) | {"pp": pp}, plan.sizes, plan.order)
    # 1F1B waits for a message before it sends the next, but the order that is recorded in its place
    # would hold all to the end.
    keep = plan.pipeline is None or plan.pipeline.schedule != "1F1B"
    world = fake_world(rank, plan.world_size, keep)
    with world as mode, tempfile.TemporaryDirectory() as folder:
        fewer_microbatches = small.accumulation < plan.accumulation
        if (
            small.pipeline is not None
            and plan.pipeline is not None
            and (
                fewer_microbatches
                or small.pipeline.ranks != plan.pipeline.ranks
                or mixed(plan.pipeline_schedule)
            )
        ):
            small = with_any_order(small, "W" in kinds_of(plan.pipeline_schedule), Path(folder))
        built, small = build_fake(job, small, mode)
        recording = record_step(built, job, small, mode, period)
        found = groups_of(recording, built.mesh)
    return recording, sizes_of(small, pp, period), found


def traceable(job: Job, plan: Plan) -> Job:
    """The job with what cannot be traced on fake tensors replaced by what does the same.

    A compiled block does what the eager one does.  On GPUs documents are kept apart inside of the
    attention kernel, which takes no more memory for it.
    """
    changes: dict[str, dict[str, object]] = {"compile": {"enable": False}}
    changes["parallel"] = {"async_tp": False, "symmetric_memory": False}
    if plan.device == "cuda":
        changes["data"] = {"packing": "windows"}
        if job.data.format == "chat":
            changes["data"]["format"] = "text"
    return replace_sections(job, **changes)


def units_of(plan: Plan, pp: int) -> object:
    """What ranks of the pipeline must have in common to do the same."""
    if plan.pipeline is None:
        return None
    last = plan.model.num_layers + 1
    stages = plan.pipeline.held[pp]
    return tuple((stage.blocks, 0 in stage.units, last in stage.units) for stage in stages)


def sizes_of(plan: Plan, pp: int, period: int) -> Sizes:
    """Groups of ``period`` blocks of each stage of a rank of the pipeline, and microbatches."""
    if plan.pipeline is None:
        counts = [plan.model.num_layers]
    else:
        counts = [stage.blocks for stage in plan.pipeline.held[pp]]
    return Sizes(tuple(max(1, count // period) for count in counts), plan.accumulation)


def fewer(plan: Plan, few: int, period: int, all_blocks: bool) -> Plan:
    """The plan with at most ``few`` groups of blocks in a stage, and microbatches.

    Groups of blocks that are left over go with the last one.

    Args:
        all_blocks: only microbatches become fewer.
    """
    if not hasattr(plan.model, "num_layers"):
        return plan  # a family of the user's, which counts its blocks in some other way

    def least(blocks: int) -> int:
        return blocks if all_blocks else min(blocks, few * period + blocks % period)

    microbatches = min(plan.accumulation, few)
    rows = plan.local_batch - (plan.accumulation - microbatches) * plan.microbatch
    plan = replace(plan, accumulation=microbatches, local_batch=rows)
    if plan.pipeline is None:
        layers = least(plan.model.num_layers)
    else:
        stages, first, last = [], 0, plan.model.num_layers + 1
        for stage in plan.pipeline.stages:
            blocks = least(stage.blocks)
            end = first + blocks + (0 in stage.units) + (last in stage.units)
            stages.append(replace(stage, first=first, end=end, blocks=blocks))
            first = end
        layers = first - 2
        plan = replace(plan, pipeline=replace(plan.pipeline, stages=tuple(stages)))
    return replace(plan, model=plan.model.model_copy(update={"num_layers": layers}))


def with_any_order(plan: Plan, halves: bool, folder: Path) -> Plan:
    """The plan with a schedule that may have few microbatches: they go one after the other.

    Args:
        halves: whether backward passes are.
        folder: for the schedule's file.
    """
    pipeline = plan.pipeline
    assert pipeline is not None
    if len(set(pipeline.ranks)) == len(pipeline.stages) and not is_schedule_file(pipeline.schedule):
        return replace(plan, pipeline=replace(pipeline, schedule="GPipe"))
    rows = []
    for rank in range(plan.pp):
        stages = pipeline.stages_of(rank)
        cells = []
        for microbatch in range(plan.accumulation):
            cells += [f"{stage}F{microbatch}" for stage in stages]
            for stage in reversed(stages):
                kinds = "IW" if halves else "B"
                cells += [f"{stage}{kind}{microbatch}" for kind in kinds]
        rows.append(",".join(cells))
    path = folder / "order.csv"
    path.write_text("\n".join(rows) + "\n")
    return replace(plan, pipeline=replace(pipeline, schedule=str(path)))


def actions_of(plan: Plan, pp: int) -> dict[Segment, Action]:
    """What a rank of the pipeline does, in order: place of the stage, kind, how many before it; and
    the timetable's action that this is, or is a half of."""
    table = plan.pipeline_schedule
    both = mixed(table)
    mine = stage_indices(table[pp])
    counts: Counter[tuple[int, str]] = Counter()
    found: dict[Segment, Action] = {}
    for action in table[pp]:
        place = mine.index(action.stage)
        for part in "IW" if both and action.kind == "B" else action.kind:
            found[place, part, counts[place, part]] = action
            counts[place, part] += 1
    return found


def mixed(table: PipelineSchedule) -> bool:
    """Whether some backward passes are whole and some in halves, as all are recorded then."""
    return {"B", "W"} <= kinds_of(table)


def kinds_of(table: PipelineSchedule) -> set[str]:
    """The kinds of actions of a timetable: F, B, and others of split backward passes."""
    return {action.kind for order in table.values() for action in order}


# --------------------------------------------------------------------------- sums


def groups_of(recording: OpTrace, mesh: Mesh) -> dict[str, Group]:
    """The process groups of a recording; what is only a part of an axis's group is of that axis."""
    known = axis_groups(mesh)
    named = {str(group.group_name): axis for axis, group in known.items()}
    axes = {axis: set(dist.get_process_group_ranks(group)) for axis, group in known.items()}
    names = {event.call.group for event in recording.events if event.call is not None}
    found = {}
    for name in names - {""}:
        ranks = get_group_ranks(name)
        around = [axis for axis, whole in axes.items() if whole.issuperset(ranks)]
        axis = min(around, key=lambda axis: len(axes[axis]), default="world")
        axis = named.get(name, axis)  # the ranks of two axes may be the same
        stride = ranks[1] - ranks[0] if len(ranks) > 1 else 1
        found[name] = Group(axis, len(ranks), stride)
    return found


def exchanged_bytes(call: Call) -> int:
    """Of a collective: the gathered, or the not yet reduced, tensor's."""
    return max((size for _, size in (*call.reads, *call.writes)), default=0)
