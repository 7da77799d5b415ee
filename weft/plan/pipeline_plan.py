"""The pipeline of a plan: its schedule, its microbatches and its stages."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weft.config.errors import ConfigError
from weft.config.schema import Job
from weft.models import Family
from weft.plan.layout import ParallelDims, format_choices
from weft.plan.pipeline_schedule import (
    SCHEDULES,
    PipelineSchedule,
    ScheduleSpec,
    find_schedule,
    max_in_flight,
    is_schedule_file,
    num_scheduled_microbatches,
    stage_index_to_rank,
    read_schedule_csv,
    build_schedule,
)
from weft.plan.stages import Stage, check_layers_per_stage, split_into_stages

# With as many microbatches as this many times the ranks, or more, less than a fifth is bubble.
MIN_MICROBATCHES_PER_RANK = 4
MAX_AUTO_MICROBATCH_SIZE = 4096  # of a microbatch that is looked at unasked


@dataclass(frozen=True)
class PipelinePlan:
    """``schedule``: a name of `SCHEDULES`, or the path of a CSV file."""

    schedule: str
    stages: tuple[Stage, ...]
    ranks: tuple[int, ...]  # of each stage, the rank of the pipeline that holds it
    in_flight: tuple[int, ...]  # of each stage, the most microbatches whose activations it keeps

    def stages_of(self, rank: int) -> list[int]:
        """The stages of one rank of the pipeline, in order."""
        return [stage for stage, home in enumerate(self.ranks) if home == rank]

    @property
    def held(self) -> list[list[Stage]]:
        """The stages of each rank of the pipeline."""
        ranks = range(max(self.ranks) + 1)
        return [[self.stages[stage] for stage in self.stages_of(rank)] for rank in ranks]

    @property
    def names(self) -> list[str]:
        """What each rank of the pipeline holds, as ``layers 0-3; layers 16-19``."""
        return ["; ".join(stage.name for stage in mine) for mine in self.held]


def count_microbatches(local_batch: int, microbatch: int) -> int:
    """Forward passes of one rank; the last may have fewer rows."""
    return -(-local_batch // microbatch)


def resolve_pipeline(
    job: Job,
    model: Any,
    family: Family,
    degrees: ParallelDims,
    local_batch: int,
    bytes_per_param: float,
    compute_bytes: int,
) -> tuple[PipelinePlan | None, int, list[ConfigError]]:
    """The pipeline and the rows of a microbatch.

    Args:
        local_batch: rows of one rank in a step.
        bytes_per_param: state that a rank holds for each parameter of its stages.
        compute_bytes: of one activation.

    Returns:
        The pipeline (None with problems), rows per microbatch, problems.
    """
    pp = degrees.pp
    problems = list(_check_model(job, model, family, pp))
    schedule, table, found = _load_schedule(job, pp)
    problems += found
    if found:
        return None, 1, problems
    per_rank, found = _resolve_stages_per_rank(job, schedule, table, pp)
    problems += found
    num_stages = pp * per_rank if table is None else len(stage_index_to_rank(table))
    microbatch, found = _resolve_microbatch_size(job, schedule, table, local_batch, pp, num_stages)
    problems += found
    units = family.units(model, job.train.seq_len) if family.units else []
    problems += _check_stage_count(job, len(units) - 2, num_stages) if units else []
    if problems:
        return None, microbatch, problems

    if table is None:
        assert schedule is not None
        count = count_microbatches(local_batch, microbatch)
        table = build_schedule(schedule.name, pp, per_rank, count)
    flying = max_in_flight(table)
    # Tensor parallelism divides every unit alike; activations also by the context.
    tokens = microbatch * job.train.seq_len / (degrees.cp * degrees.tp)
    stages = split_into_stages(
        units,
        in_flight=flying,
        bytes_per_param=bytes_per_param / degrees.tp,
        tokens_per_microbatch=tokens * compute_bytes / 2,
        objective=job.pipeline.balance,
        layers=job.pipeline.layers_per_stage,
    )
    name = schedule.name if schedule else job.pipeline.schedule
    plan = PipelinePlan(name, tuple(stages), tuple(stage_index_to_rank(table)), tuple(flying))
    return plan, microbatch, []


def _check_model(job: Job, model: Any, family: Family, pp: int) -> list[ConfigError]:
    if family.units is None or family.keep is None:
        rule = f"the family {job.model.kind} cannot be cut into stages"
        return [ConfigError("parallel.pp", pp, rule, "use 1, or give its Family units and keep")]
    if getattr(model, "tied_embeddings", False):
        rule = (
            "a tied embedding would be torn apart: look-up in the first stage, product in the last"
        )
        remedy = "use 1, or --model.tied_embeddings false"
        return [
            ConfigError("parallel.pp", pp, rule, remedy, ("model.tied_embeddings", "model.preset"))
        ]
    return []


def _load_schedule(job: Job, pp: int) -> tuple[ScheduleSpec | None, PipelineSchedule | None, list[ConfigError]]:
    name = job.pipeline.schedule
    if is_schedule_file(name):
        read = read_schedule_csv(Path(name), pp)
        return (None, None, [read]) if isinstance(read, ConfigError) else (None, read, [])
    found = find_schedule(name)
    return (None, None, [found]) if isinstance(found, ConfigError) else (found, None, [])


def _resolve_stages_per_rank(
    job: Job, schedule: ScheduleSpec | None, table: PipelineSchedule | None, pp: int
) -> tuple[int, list[ConfigError]]:
    """Stages of one rank, and what is wrong with what was asked."""
    key, asked = "pipeline.stages_per_rank", job.pipeline.stages_per_rank
    problems = []
    splits = (
        schedule.splits_backward
        if schedule
        else any(a.kind == "I" for order in (table or {}).values() for a in order)
    )
    whole = [s.name for s in SCHEDULES.values() if not s.splits_backward]
    activation_checkpoint = job.activation_checkpoint.mode
    for cannot, what, key_of, value in (
        (job.compile.enable, "torch.compile", "compile.enable", "false"),
        (
            activation_checkpoint in ("selective", "budget"),
            f"activation_checkpoint.mode {activation_checkpoint}",
            "activation_checkpoint.mode",
            "none",
        ),
    ):
        if splits and cannot:
            rule = f"computes gradients of inputs and weights apart, which {what} cannot"
            remedy = f"use {key_of} {value}, or {', '.join(whole[:-1])} or {whole[-1]}"
            name = job.pipeline.schedule
            problems.append(ConfigError("pipeline.schedule", name, rule, remedy, (key_of,)))
    if schedule is None:
        if asked != "auto":
            problems.append(ConfigError(key, asked, "is told by the schedule's file", "use auto"))
        return 1, problems
    if asked == "auto":
        return schedule.stages_per_rank or 2, problems
    if schedule.stages_per_rank not in (None, asked):
        rule = f"{schedule.name} has {schedule.stages_per_rank}"
        remedy = "use auto, or another pipeline.schedule"
        problems.append(ConfigError(key, asked, rule, remedy, ("pipeline.schedule",)))
        return schedule.stages_per_rank or 2, problems
    if schedule.stages_per_rank is None and asked == 1:
        rule = f"{schedule.name} interleaves several"
        remedy = "use 2 or more, or pipeline.schedule 1F1B"
        problems.append(ConfigError(key, asked, rule, remedy, ("pipeline.schedule",)))
    return asked, problems


def _resolve_microbatch_size(
    job: Job,
    schedule: ScheduleSpec | None,
    table: PipelineSchedule | None,
    local_batch: int,
    pp: int,
    num_stages: int,
) -> tuple[int, list[ConfigError]]:
    """Rows of a microbatch, and why the schedule cannot run so many of them."""
    asked = job.train.microbatch_size
    depends = ("train.global_batch_size", "parallel.pp", "parallel.dp_shard", "pipeline.schedule")

    def allowed(count: int) -> bool:
        if table is not None:
            return count == num_scheduled_microbatches(table)
        return schedule is not None and schedule.allows(count, pp, num_stages)

    sizes = {*range(1, min(local_batch, MAX_AUTO_MICROBATCH_SIZE) + 1)}
    if isinstance(asked, int) and asked <= local_batch:
        sizes.add(asked)
    by_size = {size: count_microbatches(local_batch, size) for size in sorted(sizes)}
    good = [size for size, count in by_size.items() if allowed(count)]
    even = [size for size in good if local_batch % size == 0]
    if asked == "auto":
        plenty = [size for size in even if by_size[size] >= MIN_MICROBATCHES_PER_RANK * pp]
        if good:
            return (plenty or even[:1] or good[:1])[-1], []
    elif asked in good:
        return asked, []
    elif asked > local_batch:
        return 1, []  # told by the rule that all layouts share
    count = by_size[asked] if isinstance(asked, int) else local_batch
    dp = job.train.global_batch_size // local_batch
    if table is not None:
        enough = num_scheduled_microbatches(table)
        rule = f"gives {count} microbatches, the schedule's file has {enough}"
    else:
        assert schedule is not None
        rule = f"gives {count} microbatches; {schedule.name} needs {schedule.rule(pp, num_stages)}"
        enough = num_stages
    more = "or a multiple of it" if table is not None else "or more"
    remedy = (
        f"use {format_choices(good)}"
        if good
        else f"use train.global_batch_size {enough * dp} {more}"
    )
    return 1, [ConfigError("train.microbatch_size", asked, rule, remedy, depends)]


def _check_stage_count(job: Job, blocks: int, num_stages: int) -> list[ConfigError]:
    if job.pipeline.layers_per_stage:
        return check_layers_per_stage(job.pipeline.layers_per_stage, num_stages, blocks)
    if num_stages <= blocks + 2:
        return []
    depends = ("parallel.pp", "model.num_layers", "model.preset")
    rule = f"makes {num_stages} stages of a model of {blocks} layers"
    remedy = f"use at most {max(1, (blocks + 2) * job.parallel.pp // num_stages)}"
    return [ConfigError("parallel.pp", job.parallel.pp, rule, remedy, depends)]


def activation_checkpoint_warnings(
    job: Job, model: Any, family: Family, pipeline: PipelinePlan | None
) -> list[str]:
    """What makes recomputation dearer than it need be, and offload idle."""
    warnings, ahead, most = [], job.activation_checkpoint.offload_prefetch, 0
    if pipeline:
        most, there = max(stage.blocks for stage in pipeline.stages), "no stage has"
    elif family.units:
        most, there = len(family.units(model, job.train.seq_len)) - 2, "there are no"
    if job.activation_checkpoint.offload and 0 < most <= ahead:
        remedy = (
            f"use activation_checkpoint.offload_prefetch {most - 1} or less"
            if most > 1
            else "use activation_checkpoint.offload false"
        )
        warnings.append(
            f"activation_checkpoint.offload = true moves nothing: the last {ahead} blocks stay (activation_checkpoint.offload_prefetch), and "
            f"{there} more than {most}; {remedy}"
        )
    schedule = SCHEDULES.get(pipeline.schedule) if pipeline else None
    if schedule and schedule.splits_backward and job.activation_checkpoint.mode == "full":
        warnings.append(
            f"activation_checkpoint.mode = full with {schedule.name}: a block is computed again for the gradients "
            "of its input and once more for those of each of its weights; another schedule is "
            "faster"
        )
    return warnings
