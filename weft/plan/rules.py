"""Rules about what may stand together in a job, and on what it may run; layouts have their own.

Like those of `weft.plan.layout` they are judged before anything is allocated; each names the key,
its value, the rule and a remedy.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from weft.config.errors import ConfigError
from weft.config.schema import Job, steps_of
from weft.models import Family
from weft.plan.layout import DEGREE_KEYS, ParallelDims, divisors, format_choices
from weft.plan.placement import MESH_ORDERS, crosses_nodes

MAX_PROFILED_STEPS = 20  # steps


def check_sections(job: Job, family: Family, degrees: ParallelDims) -> Iterator[ConfigError]:
    """What the sections of a job forbid each other, whatever it runs on."""
    yield from _check_replica_groups(job, degrees)
    yield from _check_optimizer(job)
    yield from _check_activation_checkpoint(job)
    yield from _check_experts(job, family)
    yield from _check_objective(job, degrees)
    yield from _check_profile(job)
    yield from _check_debug(job)


def check_data(job: Job, model: Any) -> Iterator[ConfigError]:
    """What a model must have room for."""
    if job.train.seq_len > model.max_seq_len:
        yield ConfigError(
            "train.seq_len",
            job.train.seq_len,
            f"exceeds max_seq_len = {model.max_seq_len} of {job.model.kind}-{job.model.preset}",
            f"use at most {model.max_seq_len}, or --model.max_seq_len {job.train.seq_len}",
            ("model.preset", "model.max_seq_len"),
        )
    if job.data.tokenizer == "train" and job.data.vocab_size > model.vocab_size:
        yield ConfigError(
            "data.vocab_size",
            job.data.vocab_size,
            f"exceeds vocab_size = {model.vocab_size} of {job.model.kind}-{job.model.preset}",
            f"use at most {model.vocab_size}, or --model.vocab_size {job.data.vocab_size}",
            ("model.preset", "model.vocab_size"),
        )


def check_batch(job: Job, degrees: ParallelDims) -> list[ConfigError]:
    """The global batch over the ranks, and the microbatch within a rank."""
    train, dp = job.train, degrees.dp
    depends = ("run.nproc_per_node", *DEGREE_KEYS)
    local, rest = divmod(train.global_batch_size, dp)
    if rest or not local:
        near = [n for n in (local * dp, (local + 1) * dp) if n]
        unit = dp if isinstance(job.parallel.dp_shard, int) else job.parallel.dp_replicate
        others = degrees.world // dp
        worlds = [n * others for n in divisors(train.global_batch_size, dp) if n % unit == 0]
        rule = f"does not divide over the {dp} data-parallel ranks"
        remedy = f"use {format_choices(near)}" + (
            f", or run.nproc_per_node = {format_choices(worlds)}" if worlds else ""
        )
        return [
            ConfigError("train.global_batch_size", train.global_batch_size, rule, remedy, depends)
        ]
    if train.microbatch_size != "auto" and train.microbatch_size > local:
        rule = f"exceeds the {local} sequence{'s' * (local > 1)} of each rank"
        remedy = f"use at most {local}, or auto"
        depends = ("train.global_batch_size", *depends)
        return [ConfigError("train.microbatch_size", train.microbatch_size, rule, remedy, depends)]
    return []


def check_full_microbatches(job: Job, family: Family, local: int, microbatch: int) -> Iterator[ConfigError]:
    """A pipeline's microbatches all have as many rows: the last is filled up with copies, which
    would count in the experts' loads."""
    if family.routed is not None and local % microbatch:
        rule = f"does not divide the {local} sequences of each rank of a pipeline with experts"
        remedy = f"use {format_choices(divisors(local))}"
        depends = ("train.global_batch_size", *DEGREE_KEYS)
        yield ConfigError("train.microbatch_size", microbatch, rule, remedy, depends)


def check_device(
    job: Job, device: str, peer_access: bool, degrees: ParallelDims, local_world: int
) -> Iterator[ConfigError]:
    """What only some hardware can do.

    Args:
        device: cpu or cuda.
        peer_access: devices of a node reach each other's memory.
        local_world: ranks of a node.
    """
    key, order = "parallel.async_tp", MESH_ORDERS[job.parallel.mesh_order]
    kind, keeps = job.activation_checkpoint.mode, job.data.keeps_documents
    chooses = kind in ("selective", "budget") and not job.compile.enable
    if device == "cuda" and keeps and chooses:
        # FlexAttention is not compiled where operators are chosen one by one.
        rule = "would compute all scores of attention within documents (data.packing)"
        remedy = "use compile.enable true, or activation_checkpoint.mode full"
        yield ConfigError(
            "activation_checkpoint.mode",
            kind,
            rule,
            remedy,
            ("data.packing", "data.format", "compile.enable"),
        )
    if job.parallel.symmetric_memory:
        name, other = "parallel.symmetric_memory", "parallel.hierarchical_gather"
        if not peer_access:
            rule, remedy = "needs GPUs that reach each other's memory", "use false here"
            yield ConfigError(name, True, rule, remedy, ("run.device",))
        elif job.parallel.hierarchical_gather:
            yield ConfigError(name, True, f"has no part in {other}", "use one of them", (other,))
    if not job.parallel.async_tp:
        return
    if not peer_access:
        rule = "needs GPUs that reach each other's memory (SymmetricMemory over NVLink)"
        yield ConfigError(key, True, rule, "use parallel.async_tp false here", ("run.device",))
    elif crosses_nodes("tp", degrees.sizes, local_world, order):
        rule = f"works inside a node, and tp = {degrees.tp} crosses nodes of {local_world} ranks"
        yield ConfigError(key, True, rule, f"use parallel.tp {local_world} or less", DEGREE_KEYS)


def check_world_size_invariant(job: Job, degrees: ParallelDims, compute: str) -> Iterator[ConfigError]:
    """What has no order of the global batch that every number of ranks shares."""
    if not job.train.world_size_invariant:
        return
    rule, key = "has only data-parallel ranks, in float32", "train.world_size_invariant"
    for axis in ("tp", "pp", "cp"):
        if getattr(degrees, axis) > 1:
            yield ConfigError(
                key, True, rule, f"use parallel.{axis} 1, or train.world_size_invariant false"
            )
    if compute != "float32":
        yield ConfigError(
            key,
            True,
            rule,
            "use precision.compute_dtype float32, or train.world_size_invariant false",
        )
    if job.parallel.cpu_offload:
        yield ConfigError(key, True, rule, "use parallel.cpu_offload false")
    if job.train.microbatch_size not in ("auto", 1):
        yield ConfigError(
            "train.microbatch_size", job.train.microbatch_size, "is 1 in canonical order", "use 1"
        )


def _check_replica_groups(job: Job, degrees: ParallelDims) -> Iterator[ConfigError]:
    """What a replica group cannot do."""
    key, value = "resilience.lighthouse", job.resilience.lighthouse
    if value == "none":
        return
    if not re.fullmatch(r"(\[[0-9a-fA-F:]+\]|[^:/\[\]\s]+):\d{1,5}", value):
        yield ConfigError(key, value, "is no HOST:PORT", "use that of torchft_lighthouse, or none")
    rule = "is not possible in a replica group (resilience.lighthouse)"
    if degrees.pp > 1:  # its schedule has a fixed number of microbatches
        yield ConfigError("parallel.pp", degrees.pp, rule, "use parallel.pp 1", (key,))
    if job.train.world_size_invariant:
        yield ConfigError(
            "train.world_size_invariant", True, rule, "use train.world_size_invariant false", (key,)
        )
    if job.resilience.on_anomaly != "stop":
        yield ConfigError(
            "resilience.on_anomaly", job.resilience.on_anomaly, rule, "use stop", (key,)
        )
    if job.train.objective == "dpo":  # its references lie in each group's own folder
        yield ConfigError("train.objective", "dpo", rule, "use one group, lighthouse none", (key,))
    if job.checkpoint.dir == "auto":
        remedy = "use a folder that all groups share"
        yield ConfigError("checkpoint.dir", "auto", "is each replica group's own", remedy, (key,))


def _check_optimizer(job: Job) -> Iterator[ConfigError]:
    """What small moments cannot have."""
    key, value = "optim.state_dtype", job.optim.state_dtype
    if value == "float32":
        return
    if job.optim.name != "adamw":
        rule = f"is for adamw, not {job.optim.name}"
        yield ConfigError(key, value, rule, "use float32", ("optim.name",))
    if value == "8bit" and job.resilience.lighthouse != "none":
        rule = "is not possible in a replica group (resilience.lighthouse)"
        yield ConfigError(key, value, rule, "use bfloat16", ("resilience.lighthouse",))


def _check_activation_checkpoint(job: Job) -> Iterator[ConfigError]:
    """The compiler has one budget for all blocks."""
    if (
        job.activation_checkpoint.mode == "budget"
        and job.compile.enable
        and job.activation_checkpoint.every_n_layers > 1
    ):
        rule = "is not heeded where the compiler chooses what a budget keeps"
        depends = ("activation_checkpoint.mode", "compile.enable")
        yield ConfigError(
            "activation_checkpoint.every_n_layers",
            job.activation_checkpoint.every_n_layers,
            rule,
            "use 1",
            depends,
        )


def _check_experts(job: Job, family: Family) -> Iterator[ConfigError]:
    """What experts cannot have."""
    if family.routed is None:
        return
    if job.optim.name == "muon":
        rule = "is for matrices, and experts are stacks of them"
        yield ConfigError("optim.name", "muon", rule, "use adamw", ("model.kind",))
    if job.lora.rank:
        rule = "is not for a mixture of experts: adapters are for plain linear layers"
        yield ConfigError("lora.rank", job.lora.rank, rule, "use 0", ("model.kind",))
    if (recipe := job.precision.float8) != "none":
        rule = "is not for a mixture of experts: grouped products, most of its work, would stay"
        rule += " in bfloat16"
        yield ConfigError("precision.float8", recipe, rule, "use none", ("model.kind",))


def _check_objective(job: Job, degrees: ParallelDims) -> Iterator[ConfigError]:
    """What an objective needs of data and layout."""
    key, objective = "train.objective", job.train.objective
    preferences = job.data.format == "preferences"
    if objective == "dpo" and not preferences:
        rule, remedy = "learns from preferences", "use data.format preferences"
        yield ConfigError(key, objective, rule, remedy, ("data.format",))
    if objective == "next_token" and preferences:
        rule = "would learn rejected answers, too"
        yield ConfigError(key, objective, rule, "use dpo, or data.format chat", ("data.format",))
    if objective != "next_token" and degrees.cp > 1:
        rule = "looks at whole rows, which parallel.cp cuts over ranks"
        yield ConfigError(key, objective, rule, "use parallel.cp 1", ("parallel.cp",))


def _check_profile(job: Job) -> Iterator[ConfigError]:
    """Which steps cannot be profiled."""
    key, value, last = "profile.steps", job.profile.steps, job.train.steps
    chosen = steps_of(value)
    steps = chosen[0] if chosen else range(0)
    if len(chosen) > 1:
        yield ConfigError(key, value, "is more than one range of steps", "use 10, or 10-12")
    elif steps and steps[-1] > last:
        rule = f"ends after the run, which has train.steps = {last}"
        yield ConfigError(key, value, rule, f"use {last} or less", ("train.steps",))
    elif len(steps) > MAX_PROFILED_STEPS:
        rule = f"has {len(steps)} steps: traces of more than {MAX_PROFILED_STEPS} are too large to read"
        yield ConfigError(key, value, rule, f"use {steps[0]}-{steps[0] + 2}")


def _check_debug(job: Job) -> Iterator[ConfigError]:
    """What would not hold, or tell nothing."""
    key, group = "debug.layer_stats_steps", "resilience.lighthouse"
    rule = "is not possible in a replica group (resilience.lighthouse)"
    chosen = steps_of(job.debug.layer_stats_steps)
    if chosen and job.resilience.lighthouse != "none":
        yield ConfigError(key, job.debug.layer_stats_steps, rule, "use one group", (group,))
    if chosen and min(steps[0] for steps in chosen) > job.train.steps:
        rule = f"begins after the last step, train.steps = {job.train.steps}"
        yield ConfigError(
            key, job.debug.layer_stats_steps, rule, "choose an earlier one", ("train.steps",)
        )
    if job.debug.deterministic:
        key, remedy = "debug.deterministic", "use false, or a run that stays as it is"
        rule = "does not hold where ranks come and go"
        for other, value in ((group, job.resilience.lighthouse), ("run.nodes", job.run.nodes)):
            if value != "none" and (other == group or ":" in str(value)):
                yield ConfigError(key, True, f"{rule}: {other} = {value}", remedy, (other,))
    if job.debug.autograd_anomaly and job.compile.enable:
        key, rule = "debug.autograd_anomaly", "cannot look into a compiled backward pass"
        yield ConfigError(key, True, rule, "use compile.enable false", ("compile.enable",))
    if job.debug.autograd_anomaly and job.parallel.tp > 1:
        # Its look at a DTensor, which gradients of weights are there, is not implemented.
        key, rule = "debug.autograd_anomaly", "cannot look at gradients that are cut by parallel.tp"
        remedy = "use parallel.tp 1, or --debug.layer_stats_steps"
        yield ConfigError(key, True, rule, remedy, ("parallel.tp",))
