"""Keys that are accepted and do nothing: the plan warns of those that a job has set.

A value that the layout, the optimizer or another key leaves without effect is no error: recipes are
shared and overridden.  But whoever has set ``lora.alpha`` and sees no adapters should be told so.
`EFFECT_RULES` says of each key when it acts; `ALWAYS_EFFECTIVE` lists the keys that always do, or that something else
than training reads.  What is refused elsewhere (`weft.plan.layout`, `weft.plan.rules`) stands in
`ALWAYS_EFFECTIVE`, too: it never gets as far as a warning.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from weft.config.schema import Job, flatten
from weft.plan.layout import ParallelDims

DEFAULTS = flatten(Job())


@dataclass(frozen=True)
class KeyContext:
    """What decides whether a key acts.

    Args:
        nodes, local_world: machines, and ranks of each.
        node_shards: ranks of a shard group on one node; None if that differs.
        accumulation: microbatches of a rank in a step.
        reshard: whether, and over how many ranks, parameters are freed after forward.
        compute: dtype of forward and backward.
    """

    job: Job
    degrees: ParallelDims
    nodes: int
    local_world: int
    node_shards: int | None
    accumulation: int
    reshard: bool | int
    compute: str

    @property
    def shards(self) -> int:
        """Ranks over which parameters are sharded; 1 where every rank has them whole."""
        return 1 if self.job.train.world_size_invariant else self.degrees.shards

    @property
    def is_wrapped(self) -> bool:
        """Return True if FSDP gathers and reduces: not of a plain model on one rank."""
        plain = self.degrees.world == 1 and self.compute == "float32"
        return not self.job.train.world_size_invariant and (
            not plain or self.job.parallel.cpu_offload
        )


@dataclass(frozen=True)
class EffectRule:
    """When a key acts, and what to say where it does not."""

    acts: Callable[[KeyContext], bool]
    why: str
    remedy: str


def _is_user_defined(name: str) -> bool:
    """Return True for ``module:function`` of the user's own, which may read every key."""
    return ":" in name


def _pipeline(why: str = "there is no pipeline (parallel.pp is 1)") -> EffectRule:
    return EffectRule(lambda s: s.degrees.pp > 1, why, "Set parallel.pp above 1, or leave it out")


_CONTEXT = EffectRule(
    lambda s: s.degrees.cp > 1,
    "there is no context parallelism (parallel.cp is 1)",
    "Set parallel.cp above 1, or leave it out",
)
_SHARDED = EffectRule(
    lambda s: s.shards > 1,
    "no parameters are sharded (parallel.dp_shard x parallel.cp is 1, or train.world_size_invariant is true)",
    "Set parallel.dp_shard above 1, or leave it out",
)
_LORA = EffectRule(
    lambda s: s.job.lora.rank > 0,
    "there are no adapters (lora.rank is 0)",
    "Set lora.rank, or leave it out",
)
_FLOAT8 = EffectRule(
    lambda s: s.job.precision.float8 != "none",
    "nothing is multiplied in float8 (precision.float8 is none)",
    "Set precision.float8, or leave it out",
)
_SPIKES = EffectRule(
    lambda s: s.job.resilience.on_anomaly != "stop",
    "spikes are not watched for (resilience.on_anomaly is stop)",
    "Set resilience.on_anomaly to skip or rewind, or leave it out",
)
_TEXT = EffectRule(
    lambda s: s.job.data.format == "text",
    "the data are not plain text (data.format)",
    "Leave it out",
)
_CONVERSATIONS = EffectRule(
    lambda s: s.job.data.format != "text",
    "the data are no conversations (data.format is text)",
    "Set data.format to chat or preferences, or leave it out",
)

EFFECT_RULES: dict[str, EffectRule] = {
    "run.nproc_per_node": EffectRule(
        lambda s: s.job.run.nproc_per_node in ("auto", s.local_world),
        "a launcher, or the cluster that is planned for, has decided how many ranks a node has",
        "Leave it out",
    ),
    "run.nodes": EffectRule(
        lambda s: _is_node_count_allowed(s.job.run.nodes, s.nodes),
        "a launcher, or the cluster that is planned for, has another number of nodes",
        "Leave it out",
    ),
    "run.rendezvous": EffectRule(
        lambda s: s.nodes > 1 or s.job.run.nodes != "auto",
        "the run has one node",
        "Set run.nodes to the number of nodes that start this command, or leave it out",
    ),
    "data.text_field": _TEXT,
    "data.packing": _TEXT,
    "data.overlong": _CONVERSATIONS,
    "data.chat_template": _CONVERSATIONS,
    "data.vocab_size": EffectRule(
        lambda s: s.job.data.tokenizer == "train",
        "the tokenizer is read from a file (data.tokenizer) and not trained",
        "Leave it out",
    ),
    "train.dpo_beta": EffectRule(
        lambda s: s.job.train.objective == "dpo" or _is_user_defined(s.job.train.objective),
        "the objective is not dpo (train.objective)",
        "Set train.objective to dpo, or leave it out",
    ),
    "lora.alpha": _LORA,
    "lora.rank_stabilized": _LORA,
    "optim.momentum": EffectRule(
        lambda s: s.job.optim.name == "muon" or _is_user_defined(s.job.optim.name),
        "the optimizer has no momentum of that kind: adamw has optim.beta1 (optim.name)",
        "Set optim.name to muon, or leave it out",
    ),
    "optim.decay_fraction": EffectRule(
        lambda s: s.job.optim.schedule == "wsd" or _is_user_defined(s.job.optim.schedule),
        "only wsd has a phase of decay of its own length (optim.schedule)",
        "Set optim.schedule to wsd, or leave it out",
    ),
    "optim.min_lr_ratio": EffectRule(
        lambda s: s.job.optim.schedule != "wsd" or s.job.optim.decay_fraction > 0,
        "the learning rate does not decay (optim.decay_fraction is 0)",
        "Set optim.decay_fraction above 0, or leave it out",
    ),
    "pipeline.schedule": _pipeline(),
    "parallel.sequence_parallel": EffectRule(
        lambda s: s.degrees.tp > 1,
        "there is no tensor parallelism (parallel.tp is 1)",
        "Set parallel.tp above 1, or leave it out",
    ),
    "parallel.cp_method": _CONTEXT,
    "parallel.cp_load_balance": _CONTEXT,
    "parallel.mesh_order": EffectRule(
        lambda s: s.degrees.pp > 1 and s.degrees.dp_replicate > 1,
        "the two orders differ only where a pipeline has replicas",
        "Set parallel.pp and parallel.dp_replicate above 1, or leave it out",
    ),
    "parallel.reshard_after_forward": EffectRule(
        lambda s: s.shards > 1 or (s.is_wrapped and s.compute != "float32"),
        "nothing is gathered: no parameters are sharded",
        "Set parallel.dp_shard above 1, or leave it out",
    ),
    "parallel.gradient_sync": EffectRule(
        lambda s: s.accumulation > 1 and s.degrees.shards * s.degrees.dp_replicate > 1,
        "a step reduces its gradients once: it has one microbatch, or one rank to reduce over",
        "Set a smaller train.microbatch_size, or leave it out",
    ),
    "parallel.hierarchical_gather": EffectRule(
        lambda s: s.shards > 1 and s.node_shards is not None and 1 < s.node_shards < s.shards,
        "no shard group has several ranks on each of several nodes",
        "Leave it out, or shard over more ranks than a node has",
    ),
    "parallel.symmetric_memory": _SHARDED,
    "parallel.fsdp_prefetch": _SHARDED,
    "parallel.param_persistence_threshold": EffectRule(
        lambda s: s.shards > 1 and s.reshard is not False,
        "all parameters stay gathered, or none are sharded (parallel.reshard_after_forward)",
        "Set parallel.reshard_after_forward to always, or leave it out",
    ),
    "pipeline.stages_per_rank": _pipeline(),
    "pipeline.layers_per_stage": _pipeline(),
    "pipeline.balance": EffectRule(
        lambda s: s.degrees.pp > 1 and not s.job.pipeline.layers_per_stage,
        "there is no pipeline (parallel.pp is 1), or pipeline.layers_per_stage cuts it",
        "Set parallel.pp above 1 without pipeline.layers_per_stage, or leave it out",
    ),
    "precision.reduce_dtype": EffectRule(
        lambda s: s.is_wrapped,
        "no gradients are reduced: one rank in float32, or train.world_size_invariant",
        "Leave it out",
    ),
    "precision.float8_exclude": _FLOAT8,
    "precision.float8_small": _FLOAT8,
    "activation_checkpoint.every_n_layers": EffectRule(
        lambda s: s.job.activation_checkpoint.mode != "none",
        "nothing is computed again (activation_checkpoint.mode is none)",
        "Set activation_checkpoint.mode, or leave it out",
    ),
    "activation_checkpoint.recompute_every_n_matmuls": EffectRule(
        lambda s: s.job.activation_checkpoint.mode == "selective",
        "only selective recomputation counts products (activation_checkpoint.mode)",
        "Set activation_checkpoint.mode to selective, or leave it out",
    ),
    "activation_checkpoint.memory_budget": EffectRule(
        lambda s: s.job.activation_checkpoint.mode == "budget",
        "recomputation has no budget (activation_checkpoint.mode)",
        "Set activation_checkpoint.mode to budget, or leave it out",
    ),
    "activation_checkpoint.offload_prefetch": EffectRule(
        lambda s: s.job.activation_checkpoint.offload,
        "no activations are offloaded (activation_checkpoint.offload is false)",
        "Set activation_checkpoint.offload to true, or leave it out",
    ),
    "compile.cache_dir": EffectRule(
        lambda s: s.job.compile.enable,
        "nothing is compiled (compile.enable is false)",
        "Set compile.enable to true, or leave it out",
    ),
    "checkpoint.mtbf_hours": EffectRule(
        lambda s: s.job.checkpoint.interval == "auto",
        "the interval between checkpoints is a number (checkpoint.interval)",
        "Set checkpoint.interval to auto, or leave it out",
    ),
    "checkpoint.local_interval": EffectRule(
        lambda s: s.job.checkpoint.local_dir != "off",
        "nodes keep no state of their own (checkpoint.local_dir is off)",
        "Set checkpoint.local_dir to a directory, or leave it out",
    ),
    "resilience.max_anomalies": _SPIKES,
    "resilience.spike_threshold": _SPIKES,
    "resilience.spike_window": _SPIKES,
    "resilience.replica_check": EffectRule(
        lambda s: s.degrees.world > 1 or s.job.resilience.lighthouse != "none",
        "one rank has no replica to compare with",
        "Leave it out",
    ),
    "profile.memory": EffectRule(
        lambda s: bool(s.job.profile.steps),
        "no steps are profiled (profile.steps is empty)",
        "Set profile.steps, or leave it out",
    ),
}

# Keys that act in every job; those of [launch] and run.cluster are read by other commands.
# Refused where they would do nothing: parallel.async_tp, lora.targets, lora.quantize, optim.state_dtype.
ALWAYS_EFFECTIVE = frozenset(
    f"{section}.{name}"
    for section, names in {
        "run": "dir device cluster",
        "model": "kind preset",
        "data": "path mixture format tokenizer validation_fraction invalid_utf8 cache_dir",
        "train": "steps seed seq_len global_batch_size microbatch_size world_size_invariant objective "
        "eval_interval eval_sequences",
        "lora": "rank targets quantize",
        "optim": "name state_dtype lr beta1 beta2 eps weight_decay max_grad_norm schedule "
        "warmup_steps",
        "parallel": "dp_replicate dp_shard tp pp cp ep async_tp cpu_offload",
        "precision": "compute_dtype float8",
        "activation_checkpoint": "mode offload",
        "compile": "enable",
        "checkpoint": "interval async_save dir keep_latest local_dir",
        "resilience": "time_limit on_anomaly step_timeout preflight max_restarts_per_hour lighthouse "
        "faults",
        "monitor": "log_interval trackers layer_grad_norms report spans",
        "profile": "steps",
        "debug": "layer_stats_steps deterministic autograd_anomaly",
        "launch": "time_limit image setup options",
    }.items()
    for name in names.split()
)


def unused_key_warnings(setting: KeyContext) -> Iterator[str]:
    """Name every key that the job has set to something else than its default, and that does
    nothing there."""
    values = flatten(setting.job)
    for key, effect in EFFECT_RULES.items():
        if values[key] != DEFAULTS[key] and not effect.acts(setting):
            yield f"{key}={format_value(values[key])} has no effect: {effect.why}. {effect.remedy}."


def warmup_warnings(job: Job) -> Iterator[str]:
    """Say that a run ends before its learning rate has come up, or before it has come down."""
    warm, steps, optim = job.optim.warmup_steps, job.train.steps, job.optim
    head = f"optim.warmup_steps={warm} leaves no step of train.steps={steps} after warm-up"
    remedy = f"Use optim.warmup_steps {steps // 10} or so, or more steps."
    if warm > steps:
        most = optim.lr * steps / warm
        yield (
            f"{head}: the learning rate ends at {most:.3g}, below its peak of optim.lr={optim.lr:g}"
            f", and never decays. {remedy}"
        )
    elif warm == steps:
        yield f"{head}: the learning rate reaches its peak in the last step and never decays. " + (
            remedy
        )


def format_value(value: Any) -> str:
    """A value as a command line or recipe has it."""
    return value if isinstance(value, str) else json.dumps(value)


def _is_node_count_allowed(asked: int | str, nodes: int) -> bool:
    """Return True if ``run.nodes`` has ``nodes`` in its range, or is no range at all."""
    found = re.fullmatch(r"(\d+)(?::(\d+))?", str(asked))
    return found is None or int(found[1]) <= nodes <= int(found[2] or found[1])
