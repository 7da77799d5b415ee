"""What ``weft plan`` shows: a Plan for people, made without a GPU and without starting anything.

Nothing is derived here a second time: degrees, batches and stages are the Plan's, which the
trainer will consume.  Memory and time are for `weft.estimate` to tell; here is only a first estimate
of memory, by `weft.plan.memory_formula`, for whether that is needed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from weft.config.errors import ConfigError, InvalidConfig
from weft.config.reader import read_job
from weft.config.schema import Job
from weft.models import load_family
from weft.plan.devices import CPU_DEVICE, Cluster, parse_cluster
from weft.plan.memory_formula import estimate_rank_bytes, state_bytes_per_param
from weft.plan.placement import format_rank_map
from weft.plan.resolve import Machine, Plan, resolve
from weft.plan.stages import format_stage_table

# A table of more stages than these shows the first and the last ones only.
MAX_STAGES_SHOWN = 24


def plan_recipe(
    recipe: str,
    overrides: Sequence[tuple[str, str]],
    problems: Sequence[ConfigError],
    cluster: str | None,
    here: Callable[[str], Machine],
) -> tuple[Job, Plan, Machine]:
    """Read a recipe and plan it for a cluster.  The user's text is not looked at.

    Args:
        recipe, overrides: see `read_job`.
        problems: what was wrong with the command line already.
        cluster: ``NODESxDEVICESxNAME``, or ``local``; None: what the recipe says.
        here: this machine, from the value of ``run.device``.

    Raises:
        InvalidConfig: with every reason why there is no plan.
    """
    job, base, found = read_job(recipe, overrides)
    problems = [*problems, *found]
    if any(problem.key in ("recipe", "extends") for problem in problems):
        raise InvalidConfig(problems)  # the rest would judge defaults that nobody chose
    key, text = ("--cluster", cluster) if cluster else ("run.cluster", job.run.cluster)
    parsed = None if text == "local" else parse_cluster(text, key)
    if isinstance(parsed, ConfigError):
        raise InvalidConfig([*problems, parsed])
    machine = here(job.run.device) if parsed is None else cluster_machine(parsed)
    bad = {problem.key for problem in problems}
    try:
        plan = resolve(job, machine, recipe, base)
    except InvalidConfig as error:
        # What only echoes a mistake that is already listed is left out.
        later = [p for p in error.problems if p.key not in bad and not bad & set(p.depends)]
        if parsed is not None:  # nobody starts workers: the number of ranks is the cluster's
            later = [_adapt_remedy_to_cluster(problem) for problem in later]
        raise InvalidConfig([*problems, *later]) from error
    if problems:
        raise InvalidConfig(problems)
    return job, plan, machine


def _adapt_remedy_to_cluster(problem: ConfigError) -> ConfigError:
    return replace(problem, remedy=problem.remedy.replace("run.nproc_per_node =", "a --cluster of"))


def cluster_machine(cluster: Cluster) -> Machine:
    """The cluster as seen from one of its nodes, with a rank on each device."""
    return Machine(
        device="cpu" if cluster.device_name == CPU_DEVICE else "cuda",
        devices=cluster.devices,
        device_name=cluster.device_name,
        world_size=cluster.ranks,
        local_world_size=cluster.devices,
        memory_bytes=cluster.memory_bytes,
        capability=cluster.device.capability,
        peer_access=cluster.device.link.peer_access,
    )


# --------------------------------------------------------------------------- the screen


def describe_plan(job: Job, plan: Plan, machine: Machine, recipe: str) -> str:
    """The plan on one screen."""
    rows = [
        ("model", _describe_model(job, plan)),
        ("layout", _describe_layout(plan)),
        ("batch", _describe_batch(job, plan)),
        ("", _describe_microbatches(plan)),
        ("precision", f"{plan.compute_dtype}, gradients reduced in {plan.reduce_dtype}"),
        *([("float8", describe_float8(plan))] if plan.float8 != "none" else []),
        *([("peak", _describe_peak(plan))] if plan.peak_flops else []),
        ("sharding", _describe_sharding(plan)),
    ]
    if plan.pipeline is not None:
        rows.append(("pipeline", _describe_pipeline(plan)))
    lines = [f"{Path(recipe).stem} on {describe_machine(plan, machine)}"]
    lines += [f"  {name:<10} {text}" for name, text in rows]
    if plan.pipeline is not None:
        lines += ["", *format_stages(plan)]
    lines += [f"warning: {warning}" for warning in plan.warnings]
    return "\n".join(lines)


def describe_machine(plan: Plan, machine: Machine) -> str:
    """What a plan runs on, for people."""
    nodes = math.ceil(plan.world_size / plan.local_world_size)
    local = plan.local_world_size
    what = machine.device_name if plan.device == "cuda" else f"CPU process{'es' * (local > 1)}"
    return f"{nodes:,} nodes of {local} {what}" if nodes > 1 else f"{local} {what}"


def _describe_model(job: Job, plan: Plan) -> str:
    name = f"{job.model.kind}-{job.model.preset}"
    changes = ", ".join(f"{field} {value}" for field, value in job.model.overrides().items())
    text = f"{name}{f' with {changes}' if changes else ''}: {plan.num_params:,} parameters"
    if plan.trained_params < plan.num_params:
        text += f", of which {plan.trained_params:,} are trained (LoRA of rank {job.lora.rank})"
    if plan.num_active_params < plan.num_params:
        text += f", {plan.num_active_params:,} of them active for a token"
    return text


def _describe_layout(plan: Plan) -> str:
    axes = [f"{axis} {plan.sizes[axis]}" for axis in plan.order if plan.sizes[axis] > 1]
    if not axes:
        return "one rank"
    order = f", outermost first ({plan.placement})" if len(axes) > 1 else ""
    return f"{' x '.join(axes)} = {plan.world_size:,} ranks{order}"


def _describe_batch(job: Job, plan: Plan) -> str:
    return (
        f"{job.train.global_batch_size:,} sequences of {job.train.seq_len:,} tokens: "
        f"{plan.tokens_per_step:,} tokens a step"
    )


def _describe_microbatches(plan: Plan) -> str:
    """How a rank goes through its sequences."""
    of = f"each of {plan.dp_size:,} data-parallel ranks" if plan.dp_size > 1 else "every rank"
    count = f"{plan.local_batch:,} sequence{'s' * (plan.local_batch > 1)}"
    if plan.accumulation == 1:
        return f"{count} for {of}, at once"
    last = plan.local_batch - plan.microbatch * (plan.accumulation - 1)
    uneven = f" (the last of {last})" if last != plan.microbatch else ""
    return f"{count} for {of}, in {plan.accumulation:,} microbatches of {plan.microbatch}{uneven}"


def describe_float8(plan: Plan) -> str:
    """How much of the model is multiplied in float8, and how."""
    text = f"{plan.float8}, {plan.float8_matrices:,} matrices"
    text += ", gathered in float8" if plan.float8_gather and plan.world_size > 1 else ""
    return text + (", emulated" if plan.float8_emulated else "")


def _describe_peak(plan: Plan) -> str:
    assert plan.peak_flops is not None
    text = (
        f"{plan.peak_flops / 1e12:,.0f} TFLOP/s a device, dense {plan.peak_dtype}: MFU is of that"
    )
    return text + (", with float8, too" if plan.float8 != "none" else "")


def _describe_sharding(plan: Plan) -> str:
    shards = plan.dp_shard * plan.cp
    if shards == 1:
        return "none: every rank has its part of the model whole"
    kept = {True: "freed after forward", False: "kept over the step"}
    to = plan.reshard_after_forward
    freed = kept[to] if isinstance(to, bool) else f"left over {to} ranks after forward"
    including = f" (dp_shard {plan.dp_shard} x cp {plan.cp})" if plan.cp > 1 else ""
    over = f"{shards:,} ranks{including}"
    if plan.ep > 1:
        over += f", experts over {plan.ep} (ep) x {shards // plan.ep:,}"
    gathered = f"parameters over {over}, gathered ones {freed}"
    if plan.accumulation == 1:
        return gathered
    return f"{gathered}; gradients reduced each {plan.gradient_sync}"


def _describe_pipeline(plan: Plan) -> str:
    assert plan.pipeline is not None
    stages = len(plan.pipeline.stages)
    return f"{plan.pipeline.schedule}, {stages} stages on {plan.pp} ranks"


# --------------------------------------------------------------------------- memory


def estimate_memory_bytes(job: Job, plan: Plan) -> float | None:
    """What the fullest rank holds, roughly; None if the model's family does not tell."""
    family = load_family(job.model.kind)
    if family.units is None:
        return None
    compute_bytes = 2 if plan.compute_dtype == "bfloat16" else 4
    per_param = state_bytes_per_param(
        job,
        plan.model,
        family,
        plan.dp_shard * plan.cp,
        kept_gathered=plan.reshard_after_forward is False,
        kept_gradients=plan.gradient_sync == "step" and plan.accumulation > 1,
        compute_bytes=compute_bytes,
    )
    held = plan.pipeline.held if plan.pipeline else []
    of_stages = [math.fsum(stage.memory_bytes for stage in mine) for mine in held]
    # In a pipeline the stages tell their own: what is left is what is gathered at once.
    return max(of_stages, default=0.0) + estimate_rank_bytes(
        family.units(plan.model, job.train.seq_len),
        tp=plan.tp,
        pp=1,
        tokens=0 if of_stages else plan.microbatch * job.train.seq_len // plan.cp,
        in_flight=1,
        per_param=0.0 if of_stages else per_param,
        compute_bytes=compute_bytes,
        ep=plan.ep,
    )


# --------------------------------------------------------------------------- the pipeline


def format_stages(plan: Plan) -> list[str]:
    """The stages of a plan's pipeline as a table, long ones cut in the middle."""
    pipeline = plan.pipeline
    assert pipeline is not None
    lines = format_stage_table(pipeline.stages, pipeline.ranks)
    count = len(pipeline.stages)
    if count > MAX_STAGES_SHOWN:
        half = MAX_STAGES_SHOWN // 2
        lines[1 + half : 1 + count - half] = [f"... {count - 2 * half} more ..."]
    return lines


def format_placement(plan: Plan) -> str:
    """Which rank is where, with the units of each pipeline rank."""
    names = plan.pipeline.names if plan.pipeline else None
    return format_rank_map(plan.sizes, plan.local_world_size, names, plan.order)
