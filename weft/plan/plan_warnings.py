"""Warn about keys that a job sets and that have no effect, or waste time.

Recipes are shared and overridden, so a value without effect is not an error.  But a user who sets
``lora.alpha`` without ``lora.rank`` needs a warning.  `EFFECT_RULES` gives the condition under
which each key has an effect.  The test lists the other keys: those that always have an
effect, those that another command reads, and those that `weft.plan.rules` rejects where they have
no effect.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from weft.config.errors import capitalize
from weft.config.formatting import format_value
from weft.config.schema import PAIR_OBJECTIVES, Job, PrecisionSection, flatten
from weft.config.storage import is_bucket_url
from weft.plan.degrees import divisors, format_choices
from weft.plan.dispatch_rules import has_fixed_buffers
from weft.plan.lora_plan import adapts_blocks, outer_targets, plan_cost
from weft.plan.matrices import find_float8_matrices, list_matrices, tensor_parallel_spec
from weft.plan.pipeline_schedule import SCHEDULES
from weft.plan.placement import (
    AXES,
    Sizes,
    count_ranks,
    group_array,
    max_nodes_per_group,
    nodes_per_group,
)
from weft.plan.plan import Plan

DEFAULTS = flatten(Job())


@dataclass(frozen=True)
class EffectRule:
    """The condition under which a key has an effect, and the warning if it has none.

    ``remedy``: change that gives it an effect, which may depend on the plan; empty: only its
    removal helps.
    """

    has_effect: Callable[[Plan], bool]
    reason: str
    remedy: str | Callable[[Plan], str] = ""

    def describe_remedy(self, plan: Plan) -> str:
        """Return the change that gives the key an effect in this plan; may be empty."""
        return self.remedy if isinstance(self.remedy, str) else self.remedy(plan)


def _is_user_defined(name: str) -> bool:
    """Return True for a user's ``module:function``, which may read every key."""
    return ":" in name


_EVALUATIONS = EffectRule(
    lambda plan: plan.job.train.eval_interval > 0 and plan.job.data.has_validation,
    "the run evaluates only at its end (train.eval_interval=0), or has no validation set "
    "(data.validation_fraction=0)",
    "Set train.eval_interval, and data.validation_path",
)
_PIPELINE = EffectRule(
    lambda plan: plan.pp > 1, "there is no pipeline (parallel.pp=1)", "Set parallel.pp above 1"
)
_CONTEXT_PARALLEL = EffectRule(
    lambda plan: plan.cp > 1,
    "there is no context parallelism (parallel.cp=1)",
    "Set parallel.cp above 1",
)
_EXPERT_PARALLEL = EffectRule(
    lambda plan: plan.ep > 1,
    "there is no expert parallelism (parallel.ep=1)",
    lambda plan: "" if plan.family.moe_layers is None else "Set parallel.ep above 1",
)
_SHARDED = EffectRule(
    lambda plan: plan.fsdp_size > 1,
    "no parameters are sharded (parallel.dp_shard x parallel.cp is 1, or "
    "train.world_size_invariant is true)",
    "Set parallel.dp_shard above 1",
)
_LORA = EffectRule(
    lambda plan: plan.lora_rank > 0, "there are no adapters (lora.rank=0)", "Set lora.rank"
)
_FLOAT8 = EffectRule(
    lambda plan: plan.float8 != "none",
    "no matrix is multiplied in float8 (precision.float8=none)",
    "Set precision.float8",
)
_SPIKES = EffectRule(
    lambda plan: plan.job.resilience.on_anomaly != "stop",
    "weft does not detect spikes (resilience.on_anomaly=stop)",
    "Set resilience.on_anomaly to skip or rewind",
)
_TEXT = EffectRule(
    lambda plan: plan.job.data.is_text,
    "the data are not plain text (data.format is chat or preferences)",
)
_BUCKET = EffectRule(
    lambda plan: any(
        is_bucket_url(path)
        for path in (*plan.job.data.sources, plan.job.data.validation_path, plan.job.data.cache_dir)
    ),
    "neither the data nor data.cache_dir are in a bucket",
    "Set data.cache_dir=s3://BUCKET/PATH",
)
_CHAT = EffectRule(
    lambda plan: not plan.job.data.is_text,
    "the data are not conversations (data.format=text)",
    "Set data.format=chat, or data.format=preferences and train.objective=dpo or reward",
)


_VALIDATION = EffectRule(
    lambda plan: plan.job.data.has_validation,
    "there is no validation set, so nothing is evaluated (data.validation_fraction=0)",
    "Set data.validation_path",
)


def _of_objectives(*names: str, format: str = "preferences") -> EffectRule:
    """Return the rule of a key that these values of ``train.objective`` read."""
    return EffectRule(
        lambda plan: plan.objective in names or _is_user_defined(plan.objective),
        f"the objective is not {' or '.join(names)} (train.objective)",
        f"Set train.objective={names[0]} and data.format={format}",
    )


def _stages_remedy(plan: Plan) -> str:
    """Return the change that gives ``pipeline.stages_per_rank`` an effect."""
    section = plan.job.pipeline
    spec = SCHEDULES.get(section.schedule)
    if spec is None or spec.stages_per_rank in (None, section.stages_per_rank):
        return "Set parallel.pp above 1"
    return "Set pipeline.schedule=Interleaved1F1B and parallel.pp above 1"


EFFECT_RULES: dict[str, EffectRule] = {
    "run.nproc_per_node": EffectRule(
        lambda plan: plan.job.run.nproc_per_node in ("auto", plan.local_world_size),
        "the launcher or the planned cluster sets the number of ranks per node",
    ),
    "run.nodes": EffectRule(
        lambda plan: _is_node_count_allowed(plan.job.run.nodes_text, plan.node_counts[-1]),
        "the launcher or the planned cluster has another number of nodes",
    ),
    "run.rendezvous": EffectRule(
        lambda plan: plan.node_counts[-1] > 1 or plan.job.run.nodes != "auto",
        "the run has one node",
        "Set run.nodes to the number of nodes that start this command",
    ),
    "data.text_field": _TEXT,
    "data.packing": _TEXT,
    "data.start_token": _TEXT,
    "data.add_special_tokens": replace(
        _CHAT, reason="text is encoded to tokens of data.add_tokens only (data.format=text)"
    ),
    "data.shuffle_span_gib": EffectRule(
        lambda plan: plan.job.data.is_text and plan.job.data.packing != "best_fit",
        "sequences of whole documents (data.packing=best_fit, conversations) need all tokens",
        "Set data.packing=documents, with text",
    ),
    "data.node_cache_dir": _BUCKET,
    "data.node_cache_gib": _BUCKET,
    "data.overlong": _CHAT,
    "data.chat_template": _CHAT,
    "data.chat_template_args": _CHAT,
    "data.train_turns": _CHAT,
    "data.train_empty_reasoning": _CHAT,
    "data.fields": _CHAT,
    "data.roles": _CHAT,
    "data.validation_fraction": EffectRule(
        lambda plan: not plan.job.data.validation_path,
        "the validation set is data.validation_path",
    ),
    "train.eval_interval": _VALIDATION,
    "train.eval_sequences": _VALIDATION,
    "monitor.eval_prompts": _VALIDATION,
    "data.vocab_size": EffectRule(
        lambda plan: plan.job.data.trains_tokenizer,
        "weft reads the tokenizer from a file (data.tokenizer) and does not train one",
    ),
    "train.preference_beta": _of_objectives(*PAIR_OBJECTIVES, "kto"),
    "train.desirable_weight": _of_objectives("kto", format="unpaired"),
    "train.undesirable_weight": _of_objectives("kto", format="unpaired"),
    "train.preference_label_smoothing": _of_objectives("dpo", "simpo"),
    "train.sft_weight": _of_objectives("dpo", "ipo", "simpo"),
    "train.simpo_gamma": _of_objectives("simpo"),
    "train.reward_center_coef": _of_objectives("reward"),
    "train.early_stopping": _EVALUATIONS,
    "train.early_stopping_delta": EffectRule(
        lambda plan: plan.job.train.early_stopping > 0,
        "the run does not stop early (train.early_stopping=0)",
        "Set train.early_stopping=3, a number of evaluations",
    ),
    "checkpoint.best": _EVALUATIONS,
    "checkpoint.best_mode": EffectRule(
        lambda plan: plan.job.checkpoint.best != "off",
        "there is no metric (checkpoint.best=off)",
        "Set checkpoint.best=eval_loss",
    ),
    "lora.alpha": _LORA,
    "lora.rank_stabilized": _LORA,
    "lora.dropout": EffectRule(
        adapts_blocks,
        "adapters of the embedding and the head have no dropout (lora.targets)",
        "Add layers of the blocks to lora.targets",
    ),
    "lora.lr_ratio": EffectRule(
        lambda plan: (
            plan.job.lora.dora
            or adapts_blocks(plan)
            or any(m.name == "lm_head" for m in outer_targets(plan.model, plan.job.lora))
        ),
        "the adapter of the embedding has one learning rate (lora.targets)",
        "Add other layers to lora.targets",
    ),
    "optim.momentum": EffectRule(
        lambda plan: plan.optimizer == "muon" or _is_user_defined(plan.optimizer),
        "the optimizer has no momentum (optim.name is adamw, which has optim.beta1)",
        "Set optim.name=muon",
    ),
    "optim.decay_fraction": EffectRule(
        lambda plan: plan.job.optim.schedule == "wsd" or _is_user_defined(plan.job.optim.schedule),
        "only the wsd schedule has a decay phase (optim.schedule)",
        "Set optim.schedule=wsd",
    ),
    "optim.min_lr_ratio": EffectRule(
        lambda plan: plan.job.optim.schedule != "wsd" or plan.job.optim.decay_fraction > 0,
        "the learning rate does not decay (optim.decay_fraction=0)",
        "Set optim.decay_fraction above 0",
    ),
    "pipeline.schedule": _PIPELINE,
    "parallel.sequence_parallel": EffectRule(
        lambda plan: plan.tp > 1,
        "there is no tensor parallelism (parallel.tp=1)",
        "Set parallel.tp above 1",
    ),
    "parallel.etp": EffectRule(
        lambda plan: plan.etp < plan.tp,
        "it equals parallel.tp, or the model has no experts",
    ),
    "parallel.cp_method": _CONTEXT_PARALLEL,
    "parallel.cp_load_balance": _CONTEXT_PARALLEL,
    "parallel.mesh_order": EffectRule(
        lambda plan: plan.pp > 1 and plan.dp_replicate > 1,
        "the two orders differ only if a pipeline has replicas",
        "Set parallel.pp and parallel.dp_replicate above 1",
    ),
    "train.mtp_weight": EffectRule(
        lambda plan: getattr(plan.model, "mtp_layers", 0) > 0,
        "the model has no layers of multi-token prediction (model.mtp_layers=0)",
        "Set model.mtp_layers",
    ),
    "parallel.ep_dispatch": _EXPERT_PARALLEL,
    "parallel.ep_capacity_factor": EffectRule(
        has_fixed_buffers,
        "no buffers of experts have a fixed size",
        lambda plan: (
            ""
            if plan.family.moe_layers is None
            else "Set parallel.ep_dispatch=padded and parallel.ep above 1"
        ),
    ),
    "parallel.ep_chunks": _EXPERT_PARALLEL,
    "parallel.reshard_after_forward": EffectRule(
        lambda plan: (
            plan.fsdp_size > 1
            or plan.etp < plan.tp  # FSDP shards whole experts over tp
            or (plan.uses_fsdp and plan.compute_dtype != "float32")
        ),
        "no parameters are sharded, so none are gathered",
        "Set parallel.dp_shard above 1",
    ),
    "parallel.gradient_sync": EffectRule(
        lambda plan: (
            not plan.world_size_invariant and min(plan.num_microbatches, plan.dp_size * plan.cp) > 1
        ),
        "a step reduces gradients once: it has one microbatch, or one rank to reduce over; or "
        "train.world_size_invariant reduces those of each sequence",
        "Set a smaller train.microbatch_size",
    ),
    "parallel.hierarchical_gather": EffectRule(
        lambda plan: (
            plan.fsdp_size > 1
            and plan.shard_ranks_per_node is not None
            and 1 < plan.shard_ranks_per_node < plan.fsdp_size
        ),
        "no shard group has several ranks on each of several nodes (parallel.dp_shard)",
        "Shard over more ranks than a node has",
    ),
    "parallel.symmetric_memory": _SHARDED,
    "parallel.fsdp_prefetch": _SHARDED,
    "parallel.param_persistence_threshold": EffectRule(
        lambda plan: plan.fsdp_size > 1 and plan.reshard_after_forward is not False,
        "all parameters stay gathered, or none are sharded (parallel.reshard_after_forward)",
        "Set parallel.reshard_after_forward=always",
    ),
    "pipeline.stages_per_rank": replace(_PIPELINE, remedy=_stages_remedy),
    "pipeline.layers_per_stage": _PIPELINE,
    "pipeline.balance": EffectRule(
        lambda plan: plan.pp > 1 and not plan.job.pipeline.layers_per_stage,
        "there is no pipeline (parallel.pp=1), or pipeline.layers_per_stage sets its stages",
        "Set parallel.pp above 1 without pipeline.layers_per_stage",
    ),
    "pipeline.defer_weight_gradients": EffectRule(
        lambda plan: (
            plan.pipeline is not None
            and plan.pipeline.splits_backward
            and not plan.world_size_invariant
        ),
        "no schedule (pipeline.schedule) computes weight gradients later than input gradients, or "
        "train.world_size_invariant does not allow it",
        "Set pipeline.schedule=ZBVZeroBubble, InterleavedZeroBubble or DualPipeV",
    ),
    "pipeline.overlap_exchanges": EffectRule(
        lambda plan: plan.can_overlap_exchanges,
        "only DualPipeV (pipeline.schedule) pairs passes that could overlap the exchange of "
        "experts (parallel.ep above 1), by parallel.ep_dispatch=alltoall or padded",
    ),
    "precision.reduce_dtype": EffectRule(
        lambda plan: plan.uses_fsdp and not plan.world_size_invariant,
        "the run has one rank, or adds gradients in float32 (train.world_size_invariant)",
    ),
    "precision.float8_exclude": _FLOAT8,
    "precision.float8_small": _FLOAT8,
    "activation_checkpoint.every_n_layers": EffectRule(
        lambda plan: plan.activation_checkpoint != "none",
        "no activations are recomputed (activation_checkpoint.mode=none)",
        "Set activation_checkpoint.mode",
    ),
    "activation_checkpoint.recompute_every_n_matmuls": EffectRule(
        lambda plan: plan.activation_checkpoint == "selective",
        "only selective recomputation counts matrix products (activation_checkpoint.mode)",
        "Set activation_checkpoint.mode=selective",
    ),
    "activation_checkpoint.memory_budget": EffectRule(
        lambda plan: plan.activation_checkpoint == "budget",
        "recomputation has no budget (activation_checkpoint.mode)",
        "Set activation_checkpoint.mode=budget",
    ),
    "activation_checkpoint.offload_prefetch": EffectRule(
        lambda plan: plan.job.activation_checkpoint.offload,
        "no activations are offloaded (activation_checkpoint.offload=false)",
        "Set activation_checkpoint.offload=true",
    ),
    "compile.cache_dir": EffectRule(
        lambda plan: plan.is_compiled,
        "the model is not compiled (compile.enable=false)",
        "Set compile.enable=true",
    ),
    "compile.cuda_graphs": EffectRule(
        lambda plan: plan.cuda_graphs, "the device is no GPU (run.device)", "Use a GPU"
    ),
    "checkpoint.mtbf_hours": EffectRule(
        lambda plan: plan.job.checkpoint.interval == "auto",
        "the interval between checkpoints is fixed (checkpoint.interval)",
        "Set checkpoint.interval=auto",
    ),
    "checkpoint.local_interval": EffectRule(
        lambda plan: plan.job.checkpoint.saves_locally,
        "there are no node-local checkpoints (checkpoint.local_dir=off)",
        "Set checkpoint.local_dir to a directory",
    ),
    "resilience.max_anomalies": _SPIKES,
    "resilience.spike_threshold": _SPIKES,
    "resilience.spike_window": _SPIKES,
    "resilience.replica_check": EffectRule(
        lambda plan: plan.world_size > 1 or plan.job.resilience.has_replica_groups,
        "a run on one rank has no replica to compare",
    ),
    "monitor.router_metrics": EffectRule(
        lambda plan: plan.family.moe_layers is not None,
        "the model has no experts",
        "Set monitor.router_metrics=false",
    ),
    "profile.memory": EffectRule(
        lambda plan: bool(plan.job.profile.steps),
        "no steps are profiled (profile.steps is empty)",
        "Set profile.steps",
    ),
}


def unused_key_warnings(plan: Plan, recipe: Job) -> Iterator[str]:
    """Yield a warning for every key that is not at its default and has no effect.

    Args:
        plan: the plan.
        recipe: the recipe without overrides: a key that it sets cannot be removed on the command
            line.
    """
    values, from_recipe = flatten(plan.job), flatten(recipe)
    for key, rule in EFFECT_RULES.items():
        value, default = values[key], DEFAULTS[key]
        if value != default and not rule.has_effect(plan):
            remedies = [rule.describe_remedy(plan), "remove the key"]
            if from_recipe[key] != default:
                remedies[1] = f"use {key}={format_value(default)}, the default"
            remedy = capitalize(", or ".join(filter(None, remedies)))
            yield f"{key}={format_value(value)} has no effect: {rule.reason}. {remedy}."
    rate = plan.job.model.overrides().get("balance_rate")
    if rate and plan.lora_rank and not plan.job.model.path:
        yield (
            f"model.balance_rate={rate} has no effect: the router is frozen (lora.rank). "
            "Use model.balance_rate=0."
        )


def warmup_warnings(plan: Plan) -> Iterator[str]:
    """Yield a warning if warm-up takes all steps."""
    steps, optim = plan.num_steps, plan.job.optim
    warmup = optim.num_warmup_steps(steps)
    problem = f"optim.warmup_steps={warmup} leaves no step of train.steps={steps} after warm-up"
    remedy = "Use optim.warmup_steps=auto, or more steps."
    if not steps:
        return  # train.epochs and the data decide
    if warmup > steps:
        last_lr = optim.lr * steps / warmup
        yield (
            f"{problem}: the learning rate ends at {last_lr:.3g}, below its peak of "
            f"optim.lr={optim.lr:g}, and never decays. {remedy}"
        )
    elif warmup == steps:
        yield (
            f"{problem}: the learning rate reaches its peak in the last step and never decays. "
            f"{remedy}"
        )


def microbatch_warnings(plan: Plan) -> Iterator[str]:
    """Yield a warning if a microbatch has fewer sequences than the job asks for."""
    size, local = plan.job.train.microbatch_size, plan.local_batch_size
    if size != "auto" and size > local:
        yield (
            f"train.microbatch_size={size} exceeds the {local} sequence{'s' * (local > 1)} of each "
            f"rank, so a microbatch has {local}. Use train.microbatch_size={local}, or auto."
        )


def component_warnings(plan: Plan) -> Iterator[str]:
    """Yield a sentence about the keys that act on a user's own optimizer or schedule."""
    optim = plan.job.optim
    warmup = optim.num_warmup_steps(plan.num_steps)
    if _is_user_defined(optim.schedule) and warmup:
        yield (
            f"optim.schedule={optim.schedule} decides the learning rate only after {warmup} steps "
            f"of linear warm-up (optim.warmup_steps={optim.warmup_steps}). Use "
            "optim.warmup_steps=0 to decide it in every step."
        )
    if not _is_user_defined(optim.name):
        return
    acting = []
    if optim.weight_decay:
        acting.append(f"weight_decay={optim.weight_decay:g} in its parameter groups")
    if optim.max_grad_norm:
        acting.append(f"gradients clipped to optim.max_grad_norm={optim.max_grad_norm:g}")
    if acting:
        yield (
            f"optim.name={optim.name} gets {' and '.join(acting)}, from the recipe or the "
            "defaults. Set these keys to 0 for none."
        )


def activation_checkpoint_warnings(plan: Plan) -> Iterator[str]:
    """Yield warnings about wasted recomputation and about offload that moves nothing."""
    section = plan.job.activation_checkpoint
    if section.offload:
        stages = plan.pipeline.stages if plan.pipeline else ()
        owner = "the largest stage" if stages else "the model"
        num_blocks = max((s.num_blocks for s in stages), default=len(plan_cost(plan).units) - 2)
        remedy = (
            f"Use activation_checkpoint.offload_prefetch={num_blocks - 1} or less"
            if num_blocks > 1
            else "Use activation_checkpoint.offload=false"
        )
        if 0 < num_blocks <= section.offload_prefetch:
            yield (
                "activation_checkpoint.offload=true offloads nothing: the last "
                f"activation_checkpoint.offload_prefetch={section.offload_prefetch} blocks stay on "
                f"the device, and {owner} has {num_blocks}. {remedy}."
            )


def pipeline_warnings(plan: Plan) -> Iterator[str]:
    """Yield a warning if a schedule with deferred weight gradients cannot defer them."""
    if plan.world_size_invariant and plan.pipeline is not None and plan.pipeline.splits_backward:
        yield (
            f"pipeline.schedule={plan.schedule_name} fills no gaps of the schedule: with "
            "train.world_size_invariant=true the gradients of a microbatch are complete before "
            "those of the next. Use 1F1B or Interleaved1F1B."
        )


def float8_warnings(plan: Plan) -> Iterator[str]:
    """Yield warnings about choices that cost the speed of float8."""
    if plan.float8 == "none":
        return
    key, section = f"precision.float8={plan.float8}", plan.job.precision
    if plan.device != "cpu" and plan.float8_emulated:
        yield (
            f"{key} is emulated on this GPU, which does not support it: its products run in "
            "float32, several times slower than in bfloat16. Set precision.float8=none, unless "
            "you measure the effect on the loss."
        )
    elif plan.device != "cpu" and not plan.is_compiled:
        yield (
            f"{key} without compile.enable runs scaling and casting as separate kernels, which "
            "may cost more than the products gain. Set compile.enable=true."
        )
    if plan.family.moe_layers is not None and not plan.num_float8_stacks:
        yield (
            f"{key} converts no matrix of the experts, which do most of the work: their sizes do "
            "not allow it, they are too small to gain, or precision.float8_exclude names them."
            + ("" if section.float8_small else " Set precision.float8_small=true for small ones.")
        )
    if plan.lora_rank:
        # The adapters read the input in high precision, and no weight has a gradient.
        if plan.float8 == "rowwise_with_gw_hp":
            yield (
                f"{key} keeps the gradients of weights in high precision, but with lora.rank the "
                "float8 matrices are frozen and have none. Use precision.float8=rowwise."
            )
        return
    if plan.async_tp and plan.float8 != "tensorwise":
        yield (
            f"{key} with parallel.async_tp=true does not overlap the gathers of tensor "
            "parallelism: only one scale per tensor can be applied before a gather. Use "
            "precision.float8=tensorwise."
        )
    elif plan.async_tp and (mixed := _mixed_neighbors(plan, section)):
        names = [name for name, is_converted in mixed.items() if not is_converted]
        others = [f"*.{name}" for name, is_converted in mixed.items() if is_converted]
        excluded = ",".join([*section.float8_exclude, *others])
        remedy = f"precision.float8_exclude={excluded}"
        small = section.model_copy(update={"float8_small": True})
        if not _mixed_neighbors(plan, small):
            remedy = f"precision.float8_small=true, or {remedy}"
        yield (
            f"{key} with parallel.async_tp=true does not overlap the gather before "
            f"{', '.join(names)}: of the layers with this input only some are in float8, so the "
            f"ranks gather it in high precision. Set {remedy}."
        )
    if plan.splits_backward:
        yield (
            f"{key} with pipeline.schedule={plan.schedule_name} fills few gaps of the schedule: a "
            "float8 layer computes the gradients of its input and its weight together, so only "
            "those of other layers can be deferred. Another schedule may be faster."
        )


def _mixed_neighbors(plan: Plan, section: PrecisionSection) -> dict[str, bool]:
    """Return the layers that share their input, if only some of them are in float8.

    Args:
        plan: has the model.
        section: decides which layers are in float8.

    Returns:
        The name of each layer, and whether it is in float8.
    """
    family = plan.family
    selected = {m.name for m in find_float8_matrices(section, plan.model, family, plan.tp)}
    readers: dict[str, dict[str, bool]] = {}  # of each input, by the name of the parent
    for matrix in list_matrices(plan.model, family, plan.tp):
        parent, _, name = matrix.name.rpartition(".")
        if tensor_parallel_spec(matrix.name, family).weight == "column":
            readers.setdefault(parent, {})[name] = matrix.name in selected
    mixed: dict[str, bool] = {}
    for names in readers.values():
        if len(set(names.values())) == 2:
            mixed |= names
    return mixed


def _is_node_count_allowed(nodes: str, num_nodes: int) -> bool:
    """Return True if ``run.nodes`` includes ``num_nodes`` or is not a number or range."""
    match = re.fullmatch(r"(\d+)(?::(\d+))?", nodes)
    return match is None or int(match[1]) <= num_nodes <= int(match[2] or match[1])


def placement_warnings(
    sizes: Sizes, local_world_size: int, order: Sequence[str] = AXES
) -> list[str]:
    """Return warnings about a placement that is certain to be slow.

    Every axis except tp may cross nodes, and in a large run must.
    """
    warnings = []
    world_size, tp = count_ranks(sizes), sizes.get("tp", 1)
    if (num_nodes := max_nodes_per_group("tp", sizes, local_world_size, order)) > 1:
        groups = group_array("tp", sizes, order)
        group = groups[nodes_per_group(groups, local_world_size).argmax()]
        warnings.append(
            f"parallel.tp={tp}: the group of ranks {group.min()}-{group.max()} spans {num_nodes} "
            f"nodes of {local_world_size} ranks. Tensor parallelism communicates several times in "
            "every layer, with nothing to compute meanwhile. Use a degree that divides the ranks "
            f"of a node: {format_choices(divisors(local_world_size))}."
        )
    if world_size > local_world_size and (remainder := world_size % local_world_size):
        warnings.append(
            f"{world_size} ranks do not fill nodes of {local_world_size}: the last node has "
            f"{remainder}, and groups do not align with nodes. Use a multiple of "
            f"{local_world_size} ranks."
        )
    return warnings
