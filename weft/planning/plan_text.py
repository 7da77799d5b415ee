"""Format a Plan for people: the output of ``weft plan``.

This module derives no degrees, batches or stages: it shows those of the Plan that the trainer will
consume.  `weft.estimate` predicts memory and time; the first estimate of memory here decides if
that prediction is needed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from weft.config.axes import DEGREES, SHARD_AXES
from weft.config.errors import ConfigError, ConfigErrors, InvalidConfig
from weft.config.reader import read_job, recipe_title
from weft.config.schema import Job, RunSection
from weft.planning.degrees import NPROC, RANKS
from weft.planning.devices import Cluster, parse_cluster
from weft.planning.lora_plan import plan_cost
from weft.planning.model_config import Adopt, adopt_model, model_name
from weft.planning.plan import Machine, Plan
from weft.planning.rank_map import format_rank_map
from weft.planning.relayout import follow_batch, follow_ranks, format_degrees, nearest_layouts
from weft.planning.resolve import resolve
from weft.planning.sharding import estimate_rank_bytes, expert_split, state_bytes_per_param
from weft.planning.stages import format_stage_table

# Keys that another number of ranks makes wrong.
LAYOUT_KEYS = {f"parallel.{name}" for name in DEGREES}
BATCH_KEYS = {"train.global_batch_size", "train.microbatch_size"}
# A longer table shows only the first and the last stages.
MAX_STAGES_SHOWN = 24


def plan_recipe(
    recipe: str,
    overrides: Sequence[tuple[str, str]],
    cli_errors: Sequence[ConfigError],
    cluster: str | None,
    detect_machine: Callable[[RunSection], Machine],
    any_layout: bool = False,
    adopt: Adopt = adopt_model,
    keeps_batch: bool = False,
) -> tuple[Plan, Machine]:
    """Read a recipe and plan it for a cluster, without reading any data.

    If ``cluster`` has another number of ranks than the recipe is for, ``parallel.dp_shard``
    follows it, and the global batch becomes the nearest that divides, unless the user set them.

    Args:
        recipe: see `read_job`.
        overrides: see `read_job`.
        cli_errors: errors that the command line already has.
        cluster: ``NODESxDEVICESxNAME``, or ``local``; None: the recipe's ``run.cluster``.
        detect_machine: returns this machine, by ``run.device``.
        any_layout: if the recipe's degrees do not fit the cluster, plan the nearest layout; keep
            the global batch.
        adopt: see `resolve`.
        keeps_batch: refuse ranks that do not divide the recipe's global batch.

    Raises:
        InvalidConfig: with every reason why there is no plan.
    """
    job, base, errors = read_job(recipe, overrides, cli_errors)
    errors.raise_any("recipe", "extends")  # without a recipe there are only defaults to check
    plan_errors = ConfigErrors()
    key, text = ("--cluster", cluster) if cluster else ("run.cluster", job.run.cluster)
    is_local = text == "local"
    notes: list[str] = []
    with errors.collect():
        if is_local:
            machine = detect_machine(job.run)
        else:
            parsed = parse_cluster(text, key)
            machine, notes = cluster_machine(parsed), parsed.describe_assumptions(text)
            if job.run.device not in ("auto", "cpu", machine.device):
                rule = f"is not the device type of {key}={text}, which is {machine.device}"
                remedy = f"use auto or {machine.device}"
                raise InvalidConfig([ConfigError("run.device", job.run.device, rule, remedy)])
        if cluster and machine.world_size is not None:
            chosen = {name for name, _ in overrides}
            job, note = follow_ranks(job, chosen, machine.world_size)
            notes += [note] if note else []
        with plan_errors.collect():
            plan = resolve(job, machine, recipe, base, adopt)
        keeps_batch |= is_local or any_layout or "train.global_batch_size" in dict(overrides)
        is_batch_wrong = plan_errors and {error.key for error in plan_errors} <= BATCH_KEYS
        if is_batch_wrong and not keeps_batch and (followed := follow_batch(job, machine)):
            batch = job.train.global_batch_size, followed.train.global_batch_size
            notes.append("train.global_batch_size={} becomes {}, for these ranks".format(*batch))
            plan = resolve(followed, machine, recipe, base, adopt)
            plan_errors = ConfigErrors()
        if any_layout and {error.key for error in plan_errors} <= LAYOUT_KEYS:
            for nearest in nearest_layouts(job, machine, 1) if plan_errors else []:
                plan = resolve(nearest, machine, recipe, base, adopt)
                plan_errors = ConfigErrors()
        # On a cluster, the cluster sets the number of ranks.
        adapted = (
            plan_errors if is_local else _adapt_to_cluster(plan_errors, job, machine, keeps_batch)
        )
        errors.add_independent(adapted)
    errors.raise_any()
    return replace(plan, warnings=(*notes, *plan.warnings)), machine


def _adapt_to_cluster(
    errors: Sequence[ConfigError], job: Job, machine: Machine, keeps_batch: bool
) -> list[ConfigError]:
    """Return the errors with remedies for a cluster, and layouts for its ranks."""
    adapted = list(errors)
    for ranks in (RANKS, NPROC):
        adapted = [
            replace(error, remedy=error.remedy.replace(ranks, "a --cluster of "))
            for error in adapted
        ]
    layout_errors = [error for error in adapted if keeps_batch or error.key not in BATCH_KEYS]
    if layout_errors and {error.key for error in layout_errors} <= LAYOUT_KEYS:
        nearest = nearest_layouts(job, machine, keeps_batch=keeps_batch)
        layouts = [format_degrees(near.parallel, job.parallel) for near in nearest]
        if layouts:
            listed = "".join(f"\n  {layout}" for layout in layouts)
            adapted, last = layout_errors, layout_errors[-1]
            remedy = f"{last.remedy}. These layouts are possible:{listed}"
            adapted[-1] = replace(last, remedy=remedy)
    return adapted


def cluster_machine(cluster: Cluster) -> Machine:
    """Return the machine of one node of a cluster, with a rank on each device."""
    return Machine(
        device=cluster.device.type,
        devices=cluster.devices_per_node,
        device_name=cluster.device_name,
        world_size=cluster.world_size,
        local_world_size=cluster.devices_per_node,
        memory_bytes=cluster.memory_bytes,
        capability=cluster.device.capability,
        peer_access=cluster.device.link.peer_access,
    )


# --------------------------------------------------------------------------- summary


def describe_plan(plan: Plan, machine: Machine, recipe: str) -> str:
    """Format the plan as one screen of text."""
    rows = [
        ("model", _describe_model(plan)),
        ("layout", _describe_layout(plan)),
        ("batch", _describe_batch(plan)),
        ("", _describe_microbatches(plan)),
        ("precision", f"{plan.compute_dtype}, gradients reduced in {plan.reduce_dtype}"),
        *([("float8", describe_float8(plan))] if plan.float8 != "none" else []),
        *([("peak", _describe_peak(plan))] if plan.peak_flops else []),
        ("sharding", _describe_sharding(plan)),
        ("recompute", plan.activation_checkpoint.describe()),
    ]
    if plan.pipeline is not None:
        rows.append(("pipeline", _describe_pipeline(plan)))
    lines = [f"{recipe_title(recipe)} on {describe_machine(plan, machine)}"]
    lines += [f"  {name:<10} {text}" for name, text in rows]
    if plan.pipeline is not None:
        lines += ["", *format_stages(plan)]
    lines += [f"warning: {warning}" for warning in plan.warnings]
    return "\n".join(lines)


def run_title(plan: Plan, recipe: str) -> str:
    """Return the names of model and recipe; of a ``job.toml`` the name of its run."""
    name, model = recipe_title(recipe), model_name(plan.job.model.path)
    return plan.run_path.name if name == "job" else f"{model} {name}" if model else name


def describe_machine(plan: Plan, machine: Machine) -> str:
    """Format the hardware of a plan, such as ``64 nodes of 8 H100``."""
    nodes = math.ceil(plan.world_size / plan.local_world_size)
    local = plan.local_world_size
    unit = f"CPU process{'es' * (local > 1)}" if plan.device == "cpu" else machine.device_name
    return f"{nodes:,} nodes of {local} {unit}" if nodes > 1 else f"{local} {unit}"


def _describe_model(plan: Plan) -> str:
    job = plan.job
    name, fields = job.model.full_name, job.model.overrides()
    if job.model.path:
        name, fields = f"{model_name(job.model.path)} ({job.model.kind})", {}
    changes = ", ".join(f"{field} {value}" for field, value in fields.items())
    text = f"{name}{f' with {changes}' if changes else ''}: {plan.num_params:,} parameters"
    if plan.num_trainable_params < plan.num_params:
        reason = f"LoRA of rank {plan.lora_rank}" if plan.lora_rank else "lr_mult=0 freezes others"
        text += f", of which {plan.num_trainable_params:,} are trainable ({reason})"
    if plan.num_active_params < plan.num_params:
        text += f", {plan.num_active_params:,} of them active per token"
    return text


def _describe_layout(plan: Plan) -> str:
    axes = [
        f"{axis} {plan.axis_sizes[axis]}" for axis in plan.axis_order if plan.axis_sizes[axis] > 1
    ]
    if not axes:
        return "one rank"
    order = f", outermost first ({plan.mesh_order})" if len(axes) > 1 else ""
    return f"{' x '.join(axes)} = {plan.world_size:,} ranks{order}"


def _describe_batch(plan: Plan) -> str:
    epochs = plan.job.train.epochs
    steps = f"; train.epochs={epochs:g} and the data decide the number of steps"
    return (
        f"{plan.global_batch_size:,} sequences of {plan.seq_len:,} tokens: "
        f"{plan.tokens_per_step:,} tokens per step{steps * bool(epochs)}"
    )


def _describe_microbatches(plan: Plan) -> str:
    owner = f"each of {plan.dp_size:,} data-parallel ranks" if plan.dp_size > 1 else "every rank"
    count = f"{plan.local_batch_size:,} sequence{'s' * (plan.local_batch_size > 1)} for {owner}"
    if plan.num_microbatches == 1:
        return f"{count}, at once"
    size = plan.microbatch_size
    last = plan.local_batch_size - size * (plan.num_microbatches - 1)
    uneven = f" (the last of {last})" if last != size else ""
    return f"{count}, in {plan.num_microbatches:,} microbatches of {size}{uneven}"


def describe_float8(plan: Plan) -> str:
    """Format the float8 recipe and the number of its matrices."""
    text = f"{plan.float8}, {plan.num_float8_matrices:,} matrices"
    if plan.num_float8_stacks:
        text += f" ({plan.num_float8_stacks:,} stacks of experts)"
    text += ", gathered in float8" if plan.float8_all_gather and plan.world_size > 1 else ""
    return text + (", emulated" if plan.float8_emulated else "")


def _describe_peak(plan: Plan) -> str:
    assert plan.peak_flops is not None
    text = f"{plan.peak_flops / 1e12:,.0f} TFLOP/s per device, dense {plan.peak_dtype}"
    return f"{text}: the basis of MFU" + (", also with float8" if plan.float8 != "none" else "")


def _describe_sharding(plan: Plan) -> str:
    fsdp_size, experts = plan.fsdp_size, ""
    if plan.ep > 1 or plan.etp < plan.tp:
        efsdp = max(1, fsdp_size * plan.tp // plan.etp // plan.ep)
        without_tp = " without TP" * (plan.etp < plan.tp)
        experts = f", experts{without_tp} over {plan.ep} (ep) x {efsdp:,}"
    if fsdp_size == 1:
        text = f"none: every rank holds its part of the model unsharded{experts}"
        return text + "; gradients are added in a fixed order" * plan.world_size_invariant
    reshard = plan.reshard_after_forward
    if isinstance(reshard, bool):
        gathered = "freed after forward" if reshard else "kept for the step"
    else:
        gathered = f"resharded over {reshard} ranks after forward"
    product = " x ".join(f"{axis} {plan.axis_sizes[axis]}" for axis in SHARD_AXES)
    product = f" ({product})" if fsdp_size > plan.dp_shard else ""
    text = f"parameters over {fsdp_size:,} ranks{product}"
    text += f"{experts}, gathered parameters {gathered}"
    if plan.num_microbatches == 1:
        return text
    return f"{text}; gradients reduced once per {plan.gradient_sync}"


def _describe_pipeline(plan: Plan) -> str:
    assert plan.pipeline is not None
    num_stages = len(plan.pipeline.stages)
    return f"{plan.schedule_name}, {num_stages} stages on {plan.pp} ranks"


# --------------------------------------------------------------------------- memory


def estimate_memory_bytes(plan: Plan) -> float | None:
    """Estimate the bytes on the fullest rank; None if the family has no units."""
    cost = plan_cost(plan)
    if not cost.units:
        return None
    compute_bytes = 2 if plan.compute_dtype == "bfloat16" else 4
    bytes_per_param = state_bytes_per_param(
        plan.job,
        cost,
        plan.fsdp_size,
        has_unsharded_params=plan.reshard_after_forward is False,
        has_unsharded_gradients=plan.gradient_sync == "step" and plan.num_microbatches > 1,
        compute_bytes=compute_bytes,
        ep=expert_split(plan),
    )
    stages_by_rank = plan.pipeline.stages_by_rank if plan.pipeline else []
    stage_bytes = [math.fsum(stage.memory_bytes for stage in stages) for stages in stages_by_rank]
    # The stages of a pipeline count state and activations: only gathered parameters are missing.
    return max(stage_bytes, default=0.0) + estimate_rank_bytes(
        cost.units,
        tp=plan.tp,
        pp=1,
        tokens=0 if stage_bytes else plan.microbatch_size * plan.seq_len // plan.sequence_shards,
        in_flight=1,
        bytes_per_param=0.0 if stage_bytes else bytes_per_param,
        compute_bytes=compute_bytes,
        ep=expert_split(plan),
    )


# --------------------------------------------------------------------------- pipeline and ranks


def format_stages(plan: Plan) -> list[str]:
    """Format the pipeline stages as a table; abbreviate a long table in the middle."""
    pipeline = plan.pipeline
    assert pipeline is not None
    lines = format_stage_table(pipeline.stages, pipeline.stage_ranks)
    count = len(pipeline.stages)
    if count > MAX_STAGES_SHOWN:
        half = MAX_STAGES_SHOWN // 2
        lines[1 + half : 1 + count - half] = [f"... {count - 2 * half} more ..."]
    return lines


def format_placement(plan: Plan) -> str:
    """Format the map of ranks over nodes, with the units of each pipeline rank."""
    stage_names = plan.pipeline.stage_names if plan.pipeline else None
    return format_rank_map(plan.axis_sizes, plan.local_world_size, stage_names, plan.axis_order)
