"""Rules about parallel layouts, combinations of keys, and hardware support.

weft checks every rule before it allocates anything, so that no rank of five hundred fails with a
shape error.  Each function adds its errors to ``errors``, the collector of the whole job.
"""

from __future__ import annotations

import itertools
import math
import re
from typing import Any

from weft.config.accelerators import Technique, supported_devices, supports
from weft.config.axes import SHARD_AXES
from weft.config.errors import ConfigErrors
from weft.config.files import parse_address
from weft.config.schema import (
    MIN_VOCAB_SIZE,
    MOST,
    PAIR_OBJECTIVES,
    REFERENCE_OBJECTIVES,
    Job,
    steps_of,
)
from weft.models import Family, load_family
from weft.models.decoder_config import DecoderConfig
from weft.models.varlen_attention import AttentionNeeds, find_obstacles
from weft.planning.degrees import (
    ParallelDims,
    divisors,
    format_choices,
    format_ranks,
    nearest_divisors,
    possible_degrees,
)
from weft.planning.model_config import check_positions, shown_name
from weft.planning.placement import DEGREE_KEYS, MESH_ORDERS, crosses_nodes
from weft.planning.shard_sizes import chunk_range, query_heads

MAX_PROFILED_STEPS = 20
MAX_TP = 64  # that remedies name
SHARD_TEXT = " x ".join(SHARD_AXES)


def check_sections(errors: ConfigErrors, job: Job, model: Any, degrees: ParallelDims) -> None:
    """Check keys that conflict with each other on every machine."""
    _check_replica_groups(errors, job, degrees)
    _check_activation_checkpoint(errors, job)
    _check_objective(errors, job)
    _check_score_head(errors, job, model)
    _check_mtp(errors, job, model)
    _check_neftune(errors, job)
    if job.train.epochs and job.train.steps != "auto":
        rule = f"and train.steps={job.train.steps} both set the length of the run"
        errors.add("train.epochs", rule, "set one of them")
    _check_profile(errors, job)
    _check_debug(errors, job)


def check_data(errors: ConfigErrors, job: Job, model: Any) -> None:
    """Check that sequences and vocabulary do not exceed the model's."""
    name, unit = shown_name(job.model), _length_unit(job)
    if job.train.seq_len > model.max_seq_len:
        longer = job.model.model_copy(update={"max_seq_len": job.train.seq_len})
        is_possible = not job.model.path or not check_positions(longer, job.model)
        longest = model.max_seq_len // unit * unit or model.max_seq_len
        errors.add(
            "train.seq_len",
            f"exceeds max_seq_len={model.max_seq_len} of {name}",
            f"use at most {longest}"
            + (f", or --model.max_seq_len {job.train.seq_len}" if is_possible else ""),
            ("model.preset", "model.max_seq_len"),
        )
    if job.data.trains_tokenizer and job.data.vocab_size > model.vocab_size:
        smaller = f"at most {model.vocab_size}, or " if model.vocab_size >= MIN_VOCAB_SIZE else ""
        errors.add(
            "data.vocab_size",
            f"exceeds vocab_size={model.vocab_size} of {name}",
            f"use {smaller}--model.vocab_size {job.data.vocab_size}",
            ("model.preset", "model.vocab_size"),
        )


def _length_unit(job: Job, experts_without_tp: bool = False) -> int:
    """Return the divisor of ``train.seq_len`` that the degrees of the job require."""
    parallel = job.parallel
    shards = parallel.tp if parallel.sequence_parallel or experts_without_tp else 1
    return parallel.cp * shards


def _length_remedy(job: Job, model: Any, unit: int) -> str:
    """Return the nearest lengths that the model and the layout take, as a remedy."""
    limit = getattr(model, "max_seq_len", job.train.seq_len)
    choices = [n for n in nearest_divisors(job.train.seq_len, unit) if n <= limit]
    if choices:
        return f"use {format_choices(choices)}"
    return f"use {limit // unit * unit}" if limit >= unit else "use smaller degrees"


def check_batch(errors: ConfigErrors, job: Job, degrees: ParallelDims, num_nodes: int = 1) -> bool:
    """Check the global batch size; return True if valid."""
    train, dp_size = job.train, degrees.dp_size
    depends = ("run.nproc_per_node", *DEGREE_KEYS)
    local, remainder = divmod(train.global_batch_size, dp_size)
    if remainder or not local:
        batch_sizes = [n for n in (local * dp_size, (local + 1) * dp_size) if n]
        unit = dp_size if isinstance(job.parallel.dp_shard, int) else job.parallel.dp_replicate
        other_ranks = degrees.world_size // dp_size
        world_sizes = [
            n * other_ranks for n in divisors(train.global_batch_size, dp_size) if n % unit == 0
        ]
        remedy = f"use {format_choices(batch_sizes)}" + (
            f", or {format_ranks(world_sizes, num_nodes)}" if world_sizes else ""
        )
        rule = f"is not divisible by {dp_size} data-parallel ranks"
        errors.add("train.global_batch_size", rule, remedy, depends)
        return False
    return True


def check_full_microbatches(
    errors: ConfigErrors, family: Family, local_batch_size: int, microbatch_size: int
) -> None:
    """Check that no pipeline would pad a microbatch of a mixture of experts.

    A pipeline pads with copies of sequences, which would count in the load of the experts.
    """
    if family.moe_layers is not None and local_batch_size % microbatch_size:
        errors.add(
            "train.microbatch_size",
            f"does not divide the {local_batch_size} sequences of each rank, which a pipeline of "
            "a mixture of experts requires",
            f"use {format_choices(divisors(local_batch_size))}",
            ("train.global_batch_size", *DEGREE_KEYS),
            value=microbatch_size,
        )


def check_device(
    errors: ConfigErrors,
    job: Job,
    device: str,
    peer_access: bool,
    degrees: ParallelDims,
    local_world_size: int,
    uses_flex: bool,
) -> None:
    """Check that the hardware supports the keys.

    Args:
        errors: receives the errors.
        job: keys of the run.
        device: type of the devices.
        peer_access: True if the devices of a node can read each other's memory.
        degrees: degrees of all axes.
        local_world_size: ranks per node.
        uses_flex: see `uses_flex_attention`.
    """
    _check_techniques(errors, job, device, degrees)
    mode = job.activation_checkpoint.mode
    wraps_operators = mode in ("selective", "budget") and not job.compile.enable
    if supports(device, "FlexAttention") and wraps_operators and uses_flex:
        # Selective checkpointing runs FlexAttention uncompiled.
        errors.add(
            "activation_checkpoint.mode",
            "without torch.compile would materialize all attention scores, because the attention "
            "has packed documents, a window, a limit or sinks",
            "use compile.enable=true, or activation_checkpoint.mode=full",
            ("data.packing", "data.format", "compile.enable"),
        )
    if job.parallel.symmetric_memory:
        key, other = "parallel.symmetric_memory", "parallel.hierarchical_gather"
        if not peer_access:
            rule = "needs GPUs that can read each other's memory"
            errors.add(key, rule, "use false on this machine", ("run.device",))
        elif job.parallel.hierarchical_gather:
            errors.add(key, f"does not support {other}", "enable only one of them", (other,))
    if not job.parallel.async_tp or degrees.tp == 1:
        return
    key, order = "parallel.async_tp", MESH_ORDERS[job.parallel.mesh_order]
    if not peer_access:
        rule = "needs GPUs that can read each other's memory (SymmetricMemory over NVLink)"
        errors.add(key, rule, "use false on this machine", ("run.device",))
    elif crosses_nodes("tp", degrees.axis_sizes, local_world_size, order):
        rule = f"works inside a node, but tp={degrees.tp} crosses nodes of {local_world_size} ranks"
        errors.add(key, rule, f"use parallel.tp={local_world_size} or less", DEGREE_KEYS)


def check_world_size_invariant(errors: ConfigErrors, job: Job) -> None:
    """Check that each forward pass has one sequence."""
    key = "train.world_size_invariant"
    if job.train.world_size_invariant and job.train.microbatch_size not in ("auto", 1):
        rule = f"must be 1 with {key}"
        errors.add("train.microbatch_size", rule, "use 1 or auto", (key,))


def check_addresses(errors: ConfigErrors, job: Job) -> None:
    """Check that addresses are HOST:PORT, and secrets references."""
    address = job.monitor.prometheus
    if address != "off" and parse_address(address) is None:
        remedy = "use 127.0.0.1:9400, an address of the node and a port, or off"
        errors.add("monitor.prometheus", "is not HOST:PORT", remedy)
    value = job.monitor.webhook
    if value == "off" or re.fullmatch(r"env:[A-Za-z_]\w*", value):
        return
    scheme = value.partition("://")[0] if "://" in value else ""
    rule = "is not env:NAME: the URL of a webhook is a secret, which job.toml and logs would show"
    remedy = "export WEFT_WEBHOOK with the URL, and use env:WEFT_WEBHOOK, or off"
    errors.add("monitor.webhook", rule, remedy, value=f"{scheme[:5]}..." if scheme else "...")


def _check_techniques(errors: ConfigErrors, job: Job, device: str, degrees: ParallelDims) -> None:
    """Record each technique of the job that weft does not have on the device type."""
    is_blockwise = degrees.cp > 1 and job.parallel.cp_method != "ulysses"
    uses: tuple[tuple[bool, Technique, str, str], ...] = (
        (job.compile.enable, "compilation", "compile.enable", "false"),
        (job.precision.float8 != "none", "float8", "precision.float8", "none"),
        (is_blockwise, "blocks of attention", "parallel.cp_method", "ulysses"),
        (job.resilience.has_replica_groups, "replica groups", "resilience.lighthouse", "none"),
    )
    for is_used, technique, key, other in uses:
        if is_used and not supports(device, technique):
            devices = " and ".join(supported_devices(technique))
            rule = f"is not supported on the device type {device}, only on {devices}"
            errors.add(key, rule, f"use {other}", ("run.device", "run.cluster"))


def _check_replica_groups(errors: ConfigErrors, job: Job, degrees: ParallelDims) -> None:
    key, value = "resilience.lighthouse", job.resilience.lighthouse
    if value == "none":
        return
    if parse_address(value) is None:
        remedy = "use the address that torchft_lighthouse listens on, or none"
        errors.add(key, "is not HOST:PORT", remedy)
    rule = "is not supported with replica groups (resilience.lighthouse)"
    if degrees.pp > 1:  # a pipeline schedule has a fixed number of microbatches
        errors.add("parallel.pp", rule, "use parallel.pp=1", (key,))
    if job.train.world_size_invariant:
        order = f"{rule}: the number of groups changes the order in which they add their sums"
        remedy = "use train.world_size_invariant=false"
        errors.add("train.world_size_invariant", order, remedy, (key,))
    if job.resilience.on_anomaly != "stop":
        errors.add("resilience.on_anomaly", rule, "use stop", (key,))
    if (
        job.train.objective in REFERENCE_OBJECTIVES
    ):  # the log-probabilities are in the run directory
        errors.add("train.objective", rule, "use resilience.lighthouse=none", (key,))
    if job.checkpoint.is_in_run_dir:
        rule = "gives each replica group its own checkpoints (resilience.lighthouse)"
        errors.add("checkpoint.dir", rule, "use a directory that all groups share", (key,))


def uses_flex_attention(job: Job, model: Any, cp: int, varlen_documents: bool) -> bool:
    """Return True if GPUs use FlexAttention: see `weft.models.attention.attend`."""
    if varlen_documents or (cp > 1 and job.parallel.cp_method != "ulysses"):
        return False
    is_decoder = isinstance(model, DecoderConfig)
    return job.data.keeps_documents or (
        is_decoder and not model.has_plain_attention(job.train.seq_len)
    )


def uses_varlen(job: Job, model: Any, compute_dtype: str, capability: tuple[int, int]) -> bool:
    """Return True if `weft.models.varlen_attention` attends within documents."""
    if not (job.data.keeps_documents and isinstance(model, DecoderConfig)):
        return False
    records_logits = job.optim.qk_clip_threshold > 0 or job.monitor.attention_logits
    return not find_obstacles(AttentionNeeds(model, compute_dtype, capability, records_logits))


def _check_activation_checkpoint(errors: ConfigErrors, job: Job) -> None:
    is_budget = job.compile.enable and job.activation_checkpoint.mode == "budget"
    if is_budget and job.activation_checkpoint.every_n_layers > 1:
        key, rule = (
            "every_n_layers",
            "is not possible: the compiler applies one budget to all blocks",
        )
        depends = ("activation_checkpoint.mode", "compile.enable")
        errors.add(f"activation_checkpoint.{key}", rule, "use 1", depends)


def _check_objective(errors: ConfigErrors, job: Job) -> None:
    key, objective = "train.objective", job.train.objective
    has_preferences, is_unpaired = job.data.has_preferences, job.data.format == "unpaired"
    if job.train.compares_pairs and not (has_preferences or is_unpaired):
        errors.add(key, "needs preference data", "use data.format=preferences", ("data.format",))
    if objective == "kto" and not is_unpaired:
        rule = "needs answers with a label"
        remedy = "use data.format=unpaired, which also reads pairs, as two answers each"
        errors.add(key, rule, remedy, ("data.format",))
    if is_unpaired and (objective == "next_token" or job.train.compares_pairs):
        rule = "does not read the labels of answers (data.format=unpaired)"
        remedy = "use kto, or data.format=preferences"
        if objective == "next_token":
            rule = "would also train on bad answers (data.format=unpaired)"
            remedy = "use kto, or data.format=chat"
        errors.add(key, rule, remedy, ("data.format",))
    elif objective == "next_token" and has_preferences:
        rule = "would also train on rejected answers"
        remedy = f"use {', '.join(PAIR_OBJECTIVES)}, reward, or data.format=chat"
        errors.add(key, rule, remedy, ("data.format",))
    for name, changes in (
        ("label_smoothing", "spreads the target of a token"),
        ("z_loss_coef", "is a loss of each target"),
    ):
        if getattr(job.train, name) and objective != "next_token":
            rule = f"{changes}, but train.objective={objective} compares others"
            if ":" in objective:
                rule = (
                    f"changes the loss of next_token, but train.objective={objective} has its own"
                )
            errors.add(f"train.{name}", rule, "use 0, or next_token", (key,))


def _check_score_head(errors: ConfigErrors, job: Job, model: Any) -> None:
    """Check that objective and model both compute scores, or neither.

    `weft.preparation.job_checks` checks a user's objective.
    """
    key, objective, kind = "train.objective", job.train.objective, job.model.kind
    has_scores = getattr(model, "score_head", False)
    if objective == "reward" and not has_scores:
        rule = f"needs a score head, which the model family {kind} does not have"
        errors.add(key, rule, "use a model family of weft", ("model.kind",))
    if objective != "reward" and ":" not in objective and has_scores:
        rule = f"needs logits, but {shown_name(job.model)} has a score head (model.score_head)"
        remedy = "use train.objective=reward, or the model without its score head"
        errors.add(key, rule, remedy, ("model.path", "model.score_head"))


def _check_neftune(errors: ConfigErrors, job: Job) -> None:
    if job.train.neftune_alpha and load_family(job.model.kind).set_embedding_noise is None:
        rule = f"is not supported by the model family {job.model.kind}"
        remedy = "use 0, or define Family.set_embedding_noise"
        errors.add("train.neftune_alpha", rule, remedy, ("model.kind",))


def _check_mtp(errors: ConfigErrors, job: Job, model: Any) -> None:
    key, layers = "model.mtp_layers", getattr(model, "mtp_layers", 0)
    if layers and job.train.objective != "next_token":
        rule = f"predicts tokens, but train.objective={job.train.objective} does not"
        remedy = "use 0, which leaves these layers out, or train.objective=next_token"
        errors.add(key, rule, remedy, ("train.objective",), value=layers)
    elif layers >= job.train.seq_len:
        rule = f"predicts beyond sequences of train.seq_len={job.train.seq_len} tokens"
        remedy = f"use at most {job.train.seq_len - 1}"
        errors.add(key, rule, remedy, ("train.seq_len",), value=layers)


def _check_profile(errors: ConfigErrors, job: Job) -> None:
    key, last_step = "profile.steps", job.train.known_steps or MOST
    ranges = steps_of(job.profile.steps)
    steps = ranges[0] if ranges else range(0)
    if len(ranges) > 1:
        rule = f"has {len(ranges)} ranges, and weft profiles one"
        errors.add(key, rule, "use one step or range, such as 10 or 10-12")
    elif steps and steps[-1] > last_step:
        rule = f"exceeds the last step, train.steps={last_step}"
        errors.add(key, rule, f"use steps up to {last_step}", ("train.steps",))
    elif len(steps) > MAX_PROFILED_STEPS:
        rule = f"has {len(steps)} steps: traces of over {MAX_PROFILED_STEPS} are too large to read"
        errors.add(key, rule, f"use {steps[0]}-{steps[0] + 2}")


def _check_debug(errors: ConfigErrors, job: Job) -> None:
    lighthouse, key = "resilience.lighthouse", "debug.layer_stats_steps"
    ranges = steps_of(job.debug.layer_stats_steps)
    if ranges and job.resilience.has_replica_groups:
        rule = "is not supported with replica groups (resilience.lighthouse)"
        errors.add(key, rule, "use resilience.lighthouse=none", (lighthouse,))
    if ranges and min(steps[0] for steps in ranges) > (last_step := job.train.known_steps or MOST):
        rule = f"begins after the last step, train.steps={last_step}"
        errors.add(key, rule, "use an earlier step", ("train.steps",))
    if job.debug.deterministic:
        key, rule = "debug.deterministic", "needs a fixed number of ranks"
        if job.resilience.has_replica_groups:
            reason = f"{rule}, but {lighthouse}={job.resilience.lighthouse}"
            errors.add(key, reason, f"use false, or {lighthouse} none", (lighthouse,))
        if ":" in job.run.nodes_text:
            reason = f"{rule}, but run.nodes={job.run.nodes_text}"
            errors.add(key, reason, "use false, or one value of run.nodes", ("run.nodes",))
    key = "debug.autograd_anomaly"
    if job.debug.autograd_anomaly and job.compile.enable:
        rule = "cannot inspect a compiled backward pass"
        errors.add(key, rule, "use compile.enable=false", ("compile.enable",))
    for axis in ("tp", "ep"):
        if job.debug.autograd_anomaly and getattr(job.parallel, axis) > 1:
            # torch's anomaly mode does not support gradients that are DTensors.
            axis_key = f"parallel.{axis}"
            rule = f"cannot inspect gradients that {axis_key} shards"
            remedy = f"use {axis_key}=1, or false (debug.layer_stats_steps also finds NaN)"
            errors.add(key, rule, remedy, (axis_key,))


# --------------------------------------------------------------------------- layout


def check_layout(
    errors: ConfigErrors,
    job: Job,
    model: Any,
    family: Family,
    degrees: ParallelDims,
    fixed_ranks: int | None,
) -> None:
    """Check the layout of a model, except pipelines.

    ``fixed_ranks``: ranks of the run, if they do not follow from the degrees; for remedies.
    """
    _check_tensor_parallel(errors, job, model, family, degrees, fixed_ranks)
    _check_context_parallel(errors, job, model, degrees)
    _check_sharding(errors, job, degrees)
    _check_expert_parallel(errors, job, model, family, degrees)


def _check_tensor_parallel(
    errors: ConfigErrors,
    job: Job,
    model: Any,
    family: Family,
    degrees: ParallelDims,
    fixed_ranks: int | None,
) -> None:
    tp, key, name = degrees.tp, "parallel.tp", shown_name(job.model)
    if job.parallel.async_tp and tp > 1:
        _check_async_tp(errors, job)
    if job.parallel.etp not in ("tp", 1, tp):
        errors.add("parallel.etp", f"is neither 1 nor tp={tp}", "use 1 or tp", (key,))
    if tp == 1:
        return
    if not family.sharding:
        rule = f"is not supported by the model family {job.model.kind}, which has no SHARDING table"
        errors.add(key, rule, "use 1, or define Family.sharding")
        return
    sizes = {field: getattr(model, field) for field in family.tp_divided_fields}
    for field, size in sizes.items():
        if size % tp:
            rule = f"does not divide {field}={size} of {name}"
            valid = divisors(math.gcd(*sizes.values()))
            remedy = _tp_remedy(degrees, fixed_ranks, valid, format_choices(valid))
            errors.add(key, rule, remedy, (f"model.{field}", "model.preset"))
    is_whole = degrees.experts_without_tp and family.moe_layers is not None
    if is_whole and not family.sharding_without_expert_tp:
        rule = f"is not supported by the model family {job.model.kind}"
        errors.add("parallel.etp", rule, "use tp, or define Family.sharding_without_expert_tp")
    is_split = not is_whole or getattr(model, "shared_experts", False)
    for field in ("num_heads", "ffn_dim", *["expert_dim"] * bool(is_split), "vocab_size"):
        size = getattr(model, field, tp)
        cut = query_heads if field == "num_heads" else chunk_range
        if field not in sizes and not cut(size, tp, tp - 1):
            rule = f"leaves a rank without a part of {field}={size} of {name}"
            valid = [n for n in range(1, MAX_TP + 1) if cut(size, n, n - 1)]
            limit = sum(n == i for i, n in enumerate(valid, 1))  # up to which all are valid
            remedy = _tp_remedy(degrees, fixed_ranks, valid, f"at most {limit}")
            errors.add(key, rule, remedy, (f"model.{field}", "model.preset"))
    local_seq_len = job.train.seq_len // degrees.sequence_shards
    causes = {"sequence parallelism": "sequence_parallel=false", "experts without TP": "etp=tp"}
    is_cause = job.parallel.sequence_parallel, is_whole
    causes = dict(itertools.compress(causes.items(), is_cause))
    if causes and local_seq_len % tp:
        rule = f"is not divisible by tp={tp} ranks of {' and '.join(causes)}" + (
            f" within each of cp={degrees.cp} ranks" if degrees.cp > 1 else ""
        )
        remedy = f"{_length_remedy(job, model, tp * degrees.sequence_shards)}, or " + " and ".join(
            f"parallel.{c}" for c in causes.values()
        )
        errors.add("train.seq_len", rule, remedy, ("parallel.tp", "parallel.cp", "parallel.etp"))


def _tp_remedy(
    degrees: ParallelDims, fixed_ranks: int | None, valid: list[int], allowed: str
) -> str:
    """Return what to use instead of a tp that the model does not allow.

    Args:
        degrees: with the invalid tp.
        fixed_ranks: ranks that the degrees must divide; None: they follow from the degrees.
        valid: values that the model allows.
        allowed: the same in words.
    """
    if fixed_ranks is None:
        return f"use {allowed}"
    possible = possible_degrees("tp", degrees, fixed_ranks, degrees.tp)
    if not possible:  # the ranks are an error of their own
        return f"use smaller degrees, and tp of {allowed}"
    return f"use {format_choices([n for n in possible if n in valid])}"


def _check_async_tp(errors: ConfigErrors, job: Job) -> None:
    key = "parallel.async_tp"
    if not job.compile.enable:
        rule = "needs torch.compile, which overlaps the communication of tensor parallelism"
        errors.add(key, rule, "use compile.enable=true", ("compile.enable",))
    if not job.parallel.sequence_parallel:
        rule = "overlaps the all-gathers and reduce-scatters of sequence parallelism, which is off"
        errors.add(key, rule, "use parallel.sequence_parallel=true")


def _check_context_parallel(
    errors: ConfigErrors, job: Job, model: Any, degrees: ParallelDims
) -> None:
    cp, key, seq_len = degrees.cp, "parallel.cp", job.train.seq_len
    if cp == 1:
        return
    if not hasattr(model, "num_heads"):
        rule = f"needs num_heads, which the model family {job.model.kind} does not define"
        errors.add(key, rule, "use 1")
        return
    if seq_len % cp:
        remedy = _length_remedy(job, model, _length_unit(job, degrees.experts_without_tp))
        errors.add("train.seq_len", f"is not divisible by cp={cp} ranks", remedy, (key,))
    if job.parallel.cp_method == "ulysses":
        # Of all tensor-parallel ranks: two numbers that differ by one have no common divisor.
        valid = divisors(1 if model.num_heads % degrees.tp else model.num_heads // degrees.tp)
        if cp not in valid:
            per_rank = f" / tp={degrees.tp}" if degrees.tp > 1 else ""
            rule = f"does not divide num_heads={model.num_heads}{per_rank} (ulysses)"
            remedy = f"use {format_choices(valid)}, or parallel.cp_method=ring"
            errors.add(key, rule, remedy, ("parallel.tp", "model.num_heads"))


def _check_sharding(errors: ConfigErrors, job: Job, degrees: ParallelDims) -> None:
    parallel, fsdp_size = job.parallel, degrees.fsdp_size
    key, reshard = "parallel.reshard_after_forward", parallel.reshard_after_forward
    if isinstance(reshard, int) and fsdp_size % reshard:
        rule = f"does not divide the {fsdp_size} ranks of a shard group ({SHARD_TEXT})"
        remedy = f"use {format_choices(divisors(fsdp_size))}, always or never"
        errors.add(key, rule, remedy, DEGREE_KEYS)
    if parallel.dp_shard == "fit" and parallel.dp_replicate > 1:
        rule = "conflicts with parallel.dp_shard=fit, which chooses the number of replicas"
        errors.add("parallel.dp_replicate", rule, "remove the key")


def _check_expert_parallel(
    errors: ConfigErrors, job: Job, model: Any, family: Family, degrees: ParallelDims
) -> None:
    key, ep, parallel = "parallel.ep", degrees.ep, job.parallel
    if ep == 1:
        return
    if family.moe_layers is None:
        rule = f"needs experts, which the model family {job.model.kind} does not have"
        remedy = "use 1" if job.model.path else "use 1, or --model.kind moe"
        if job.model.kind == "moe":
            rule = "needs experts, but model.num_experts is 0"
            remedy = "use 1, or model.num_experts above 0"
        errors.add(key, rule, remedy, ("model.kind", "model.num_experts"))
        return
    num_experts, per_shard = model.num_experts, degrees.tp // degrees.etp
    ranks, axes = degrees.fsdp_size * per_shard, SHARD_TEXT + " x tp" * (per_shard > 1)
    valid = [n for n in divisors(ranks) if num_experts % n == 0]
    if ep not in valid:
        rule = f"does not divide the {ranks} ranks of a shard group ({axes})"
        if ranks % ep == 0:
            rule = f"does not divide the {num_experts} experts"
        depends = (*DEGREE_KEYS, "parallel.etp", "model.num_experts")
        errors.add(key, rule, f"use {format_choices(valid)}", depends)
    reshard = parallel.reshard_after_forward
    if isinstance(reshard, int) and reshard * per_shard % ep and ep % (reshard * per_shard):
        rule = f"times tp={per_shard} " * (per_shard > 1)
        rule += f"is neither a multiple nor a divisor of ep={ep}, so its ranks split a group of ep"
        sizes = [(n, n * per_shard) for n in divisors(degrees.fsdp_size)]
        groups = [n for n, size in sizes if size % ep == 0 or ep % size == 0]
        remedy = f"use {format_choices(groups)}, always or never"
        errors.add("parallel.reshard_after_forward", rule, remedy, (key,))
