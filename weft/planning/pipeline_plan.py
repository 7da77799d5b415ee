"""Resolve the pipeline of a plan: its schedule, microbatch size and stages."""

from __future__ import annotations

from typing import Any

import torch

from weft.config.errors import ConfigErrors, InvalidConfig
from weft.config.schema import Job
from weft.models import Family
from weft.planning.degrees import ParallelDims, format_choices, possible_degrees
from weft.planning.lora_plan import TrainingCost, list_tables
from weft.planning.matrices import list_matrices
from weft.planning.optim_rules import find_frozen_params, trainable_names
from weft.planning.pipeline_schedule import (
    ScheduleSpec,
    build_schedule,
    find_schedule,
    join_halves,
    max_in_flight,
    num_scheduled_microbatches,
    stage_index_to_rank,
)
from weft.planning.plan import PipelinePlan, Stage, uses_embedding_twice
from weft.planning.stages import check_layers_per_stage, split_into_stages

# With at least this many microbatches per rank, the bubble is below a fifth of the step.
MIN_MICROBATCHES_PER_RANK = 4
MAX_AUTO_MICROBATCH_SIZE = 4096


def count_microbatches(local_batch_size: int, microbatch_size: int) -> int:
    """Return the forward passes of one rank; the last may have fewer sequences."""
    return -(-local_batch_size // microbatch_size)


def resolve_pipeline(
    errors: ConfigErrors,
    job: Job,
    model: Any,
    family: Family,
    cost: TrainingCost,
    degrees: ParallelDims,
    local_batch_size: int,
    bytes_per_param: float,
    compute_bytes: int,
    fixed_ranks: int | None = None,
) -> tuple[PipelinePlan | None, int]:
    """Resolve the pipeline and its microbatch size.

    Args:
        errors: receives the errors.
        job: keys of the run.
        model: the family's configuration.
        family: the model family.
        cost: of the model.
        degrees: degrees of all axes.
        local_batch_size: sequences of one rank in a step.
        bytes_per_param: bytes of state on a rank per parameter of its stages.
        compute_bytes: bytes of one activation.
        fixed_ranks: ranks of the run, if they do not follow from the degrees; for remedies.

    Returns:
        The pipeline (None if it has errors), and the microbatch size.
    """
    pp, num_errors = degrees.pp, len(errors)
    _check_model(errors, job, model, family)
    try:
        spec = find_schedule(job.pipeline.schedule, pp)
    except InvalidConfig as error:
        errors += error.errors
        return None, 1
    stages_per_rank = _resolve_stages_per_rank(errors, job, spec)
    num_stages = pp * stages_per_rank
    if spec.actions is not None:
        num_stages = len(stage_index_to_rank(spec.actions))
    microbatch_size = _resolve_microbatch_size(errors, job, spec, local_batch_size, pp, num_stages)
    if cost.units:
        _check_stage_count(errors, job, degrees, len(cost.units) - 2, num_stages, fixed_ranks)
    if len(errors) > num_errors:
        return None, microbatch_size

    num_microbatches = count_microbatches(local_batch_size, microbatch_size)
    schedule = spec.actions or build_schedule(spec.name, pp, stages_per_rank, num_microbatches)
    defers = job.pipeline.defer_weight_gradients and not job.train.world_size_invariant
    in_flight = max_in_flight(schedule if defers else join_halves(schedule))
    # tp divides the parameters and activations of every unit equally; cp divides activations.
    tokens = microbatch_size * cost.seq_len / (degrees.sequence_shards * degrees.tp)
    units = cost.units
    if uses_embedding_twice(model):  # the last stage has a copy of the table
        first, *blocks, last = units
        units = [first, *blocks, last._replace(params=last.params + first.params)]
    stages = split_into_stages(
        units,
        in_flight=in_flight,
        bytes_per_param=bytes_per_param / degrees.tp,
        tokens_per_microbatch=tokens * compute_bytes / 2,
        objective=job.pipeline.balance,
        layers_per_stage=job.pipeline.layers_per_stage,
    )
    ranks = tuple(stage_index_to_rank(schedule))
    pipeline = PipelinePlan(spec.name, tuple(stages), ranks, tuple(in_flight), spec.splits_backward)
    return pipeline, microbatch_size


def _check_model(errors: ConfigErrors, job: Job, model: Any, family: Family) -> None:
    if family.unit_costs is None or family.prune_to_stage is None:
        rule = f"is not supported by the model family {job.model.kind}, which has no stages"
        remedy = "use 1, or define Family.unit_costs and Family.prune_to_stage"
        errors.add("parallel.pp", rule, remedy)
    elif uses_embedding_twice(model) and family.tied_parameter is None:
        rule = f"is not supported for tied embeddings by the model family {job.model.kind}"
        remedy = "use 1, --model.tied_embeddings false, or define Family.tied_parameter"
        errors.add("parallel.pp", rule, remedy, ("model.tied_embeddings", "model.preset"))


def _resolve_stages_per_rank(errors: ConfigErrors, job: Job, spec: ScheduleSpec) -> int:
    """Return the stages of each rank; check the keys of the schedule."""
    key, requested = "pipeline.stages_per_rank", job.pipeline.stages_per_rank
    if spec.actions is not None:
        if requested != "auto":
            errors.add(key, "is set by the CSV file of pipeline.schedule", "use auto")
        return 1
    if requested == "auto":
        return spec.stages_per_rank or 2
    if spec.stages_per_rank not in (None, requested):
        rule = f"conflicts with {spec.name}, which has {spec.stages_per_rank}"
        errors.add(key, rule, "use auto, or another pipeline.schedule", ("pipeline.schedule",))
        return spec.stages_per_rank or 2
    return requested


def _resolve_microbatch_size(
    errors: ConfigErrors,
    job: Job,
    spec: ScheduleSpec,
    local_batch_size: int,
    pp: int,
    num_stages: int,
) -> int:
    """Return the microbatch size; if the schedule rejects it, add an error, return 1."""
    requested = 1 if job.train.world_size_invariant else job.train.microbatch_size
    if isinstance(requested, int):
        requested = min(requested, local_batch_size)
    depends = ("train.global_batch_size", "parallel.pp", "parallel.dp_shard", "pipeline.schedule")

    sizes: set[int] = {*range(1, min(local_batch_size, MAX_AUTO_MICROBATCH_SIZE) + 1)}
    if isinstance(requested, int):
        sizes.add(requested)
    counts = {size: count_microbatches(local_batch_size, size) for size in sorted(sizes)}
    valid = [size for size, count in counts.items() if spec.supports(count, pp, num_stages)]
    even = [size for size in valid if local_batch_size % size == 0]
    if requested == "auto":
        efficient = [size for size in even if counts[size] >= MIN_MICROBATCHES_PER_RANK * pp]
        if valid:
            return (efficient or even[:1] or valid[:1])[-1]
    elif requested in valid:
        return requested
    count = counts[requested] if isinstance(requested, int) else local_batch_size
    dp_size = job.train.global_batch_size // local_batch_size
    if spec.actions is not None:
        minimum, more = num_scheduled_microbatches(spec.actions), "or a multiple of it"
        rule = f"gives {count} microbatches, but the CSV file of the schedule has {minimum}"
    else:
        minimum, more = num_stages, "or more"
        rule = (
            f"gives {count} microbatches, but {spec.name} needs {spec.requirement(pp, num_stages)}"
        )
    remedy = (
        f"use {format_choices(valid)}"
        if valid
        else f"use train.global_batch_size={minimum * dp_size} {more}"
    )
    errors.add("train.microbatch_size", rule, remedy, depends)
    return 1


def _check_stage_count(
    errors: ConfigErrors,
    job: Job,
    degrees: ParallelDims,
    num_blocks: int,
    num_stages: int,
    fixed_ranks: int | None,
) -> None:
    if job.pipeline.layers_per_stage:
        errors += check_layers_per_stage(job.pipeline.layers_per_stage, num_stages, num_blocks)
    elif num_stages > num_blocks + 2:
        rule = f"needs {num_stages} stages, but the model has only {num_blocks} layers"
        limit = max(1, (num_blocks + 2) * job.parallel.pp // num_stages)
        remedy = f"use at most {limit}"
        if fixed_ranks is not None:
            remedy = f"use {format_choices(possible_degrees('pp', degrees, fixed_ranks, limit))}"
        errors.add("parallel.pp", rule, remedy, ("model.num_layers", "model.preset"))


def check_trained_stages(
    errors: ConfigErrors, job: Job, pipeline: PipelinePlan, model: Any, family: Family
) -> None:
    """Check that every rank of a pipeline has a trainable parameter.

    torch computes gradients of the first stage's output, so that stage needs a trainable
    parameter.  Every rank has an optimizer, which needs a parameter.
    """
    has_adapters = bool(job.lora.rank)
    key = "pipeline.layers_per_stage"
    remedy = f"give it at least one block with {'an adapter' if has_adapters else 'one'}"
    if not job.pipeline.layers_per_stage:
        key, remedy = "parallel.pp", "use 1, or more layers"
    trained = [stage for stage in pipeline.stages if _is_trained(job, stage, model, family)]
    for rank, stages in enumerate(pipeline.stages_by_rank):
        is_first = pipeline.stages[0] in stages
        if not any(stage in trained for stage in (pipeline.stages[:1] if is_first else stages)):
            name = "the first stage" if is_first else f"pipeline rank {rank}"
            rule = (
                f"leaves {name} without {'an adapter' if has_adapters else 'a parameter'} to train"
            )
            errors.add(key, rule, remedy, ("lora.targets", "optim.groups"))


def _is_trained(job: Job, stage: Stage, model: Any, family: Family) -> bool:
    """Return True if a stage has a parameter that is trained."""
    frozen = set(find_frozen_params(job, model, family))
    if job.lora.rank:
        names = trainable_names(job, model, family).keys() - frozen
        layers = {name.partition(".lora_")[0].removesuffix(".weight") for name in names}
        adapted = [*list_matrices(model, family), *list_tables(model)]
        units = {matrix.block + 1 for matrix in adapted if matrix.name in layers}
        return not units.isdisjoint(stage.units)
    with torch.device("meta"):
        module = family.build(model)
    assert family.prune_to_stage is not None
    family.prune_to_stage(module, range(stage.first_unit, stage.end_unit))
    return any(name not in frozen for name, _ in module.named_parameters())
