"""Keys that are accepted and do nothing: the plan warns of those that a job has set.

A value that the layout, the optimizer or another key leaves without effect is no error: recipes are
shared and overridden.  But whoever has set ``lora.alpha`` and sees no adapters should be told so.
`ACTS` says of each key when it acts; `ALWAYS` lists the keys that always do, or that something else
than training reads.  What is refused elsewhere (`weft.plan.layout`, `weft.plan.rules`) stands in
`ALWAYS`, too: it never gets as far as a warning.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from weft.job import Job, flatten
from weft.plan.layout import Degrees

DEFAULTS = flatten(Job())


@dataclass(frozen=True)
class Setting:
    """What decides whether a key acts.

    Args:
        nodes, local_world: machines, and ranks of each.
        node_shards: ranks of a shard group on one node; None if that differs.
        accumulation: microbatches of a rank in a step.
        reshard: whether, and over how many ranks, parameters are freed after forward.
        compute: dtype of forward and backward.
    """

    job: Job
    degrees: Degrees
    nodes: int
    local_world: int
    node_shards: int | None
    accumulation: int
    reshard: bool | int
    compute: str

    @property
    def shards(self) -> int:
        """Ranks over which parameters are sharded; 1 where every rank has them whole."""
        return 1 if self.job.train.canonical else self.degrees.shards

    @property
    def is_wrapped(self) -> bool:
        """Return True if FSDP gathers and reduces: not of a plain model on one rank."""
        plain = self.degrees.world == 1 and self.compute == "float32"
        return not self.job.train.canonical and (not plain or self.job.parallel.cpu_offload)


@dataclass(frozen=True)
class Effect:
    """When a key acts, and what to say where it does not."""

    acts: Callable[[Setting], bool]
    why: str
    remedy: str


def _own(name: str) -> bool:
    """Return True for ``module:function`` of the user's own, which may read every key."""
    return ":" in name


def _pipeline(why: str = "there is no pipeline (parallel.pp is 1)") -> Effect:
    return Effect(lambda s: s.degrees.pp > 1, why, "Set parallel.pp above 1, or leave it out")


_CONTEXT = Effect(
    lambda s: s.degrees.cp > 1,
    "there is no context parallelism (parallel.cp is 1)",
    "Set parallel.cp above 1, or leave it out",
)
_SHARDED = Effect(
    lambda s: s.shards > 1,
    "no parameters are sharded (parallel.dp_shard x parallel.cp is 1, or train.canonical is true)",
    "Set parallel.dp_shard above 1, or leave it out",
)
_LORA = Effect(
    lambda s: s.job.lora.rank > 0,
    "there are no adapters (lora.rank is 0)",
    "Set lora.rank, or leave it out",
)
_FLOAT8 = Effect(
    lambda s: s.job.precision.float8 != "none",
    "nothing is multiplied in float8 (precision.float8 is none)",
    "Set precision.float8, or leave it out",
)
_SPIKES = Effect(
    lambda s: s.job.resilience.anomaly != "stop",
    "spikes are not watched for (resilience.anomaly is stop)",
    "Set resilience.anomaly to skip or rewind, or leave it out",
)
_TEXT = Effect(
    lambda s: s.job.data.format == "text",
    "the data are not plain text (data.format)",
    "Leave it out",
)
_CONVERSATIONS = Effect(
    lambda s: s.job.data.format != "text",
    "the data are no conversations (data.format is text)",
    "Set data.format to chat or preferences, or leave it out",
)

ACTS: dict[str, Effect] = {
    "run.workers": Effect(
        lambda s: s.job.run.workers in ("auto", s.local_world),
        "a launcher, or the cluster that is planned for, has decided how many ranks a node has",
        "Leave it out",
    ),
    "run.nodes": Effect(
        lambda s: _allows(s.job.run.nodes, s.nodes),
        "a launcher, or the cluster that is planned for, has another number of nodes",
        "Leave it out",
    ),
    "run.rendezvous": Effect(
        lambda s: s.nodes > 1 or s.job.run.nodes != "auto",
        "the run has one node",
        "Set run.nodes to the number of nodes that start this command, or leave it out",
    ),
    "data.field": _TEXT,
    "data.packing": _TEXT,
    "data.too_long": _CONVERSATIONS,
    "data.chat_template": _CONVERSATIONS,
    "data.vocab_size": Effect(
        lambda s: s.job.data.tokenizer == "train",
        "the tokenizer is read from a file (data.tokenizer) and not trained",
        "Leave it out",
    ),
    "train.dpo_beta": Effect(
        lambda s: s.job.train.objective == "dpo" or _own(s.job.train.objective),
        "the objective is not dpo (train.objective)",
        "Set train.objective to dpo, or leave it out",
    ),
    "lora.alpha": _LORA,
    "lora.rank_stabilized": _LORA,
    "optim.momentum": Effect(
        lambda s: s.job.optim.kind == "muon" or _own(s.job.optim.kind),
        "the optimizer has no momentum of that kind: adamw has optim.beta1 (optim.kind)",
        "Set optim.kind to muon, or leave it out",
    ),
    "optim.decay_fraction": Effect(
        lambda s: s.job.optim.schedule == "wsd" or _own(s.job.optim.schedule),
        "only wsd has a phase of decay of its own length (optim.schedule)",
        "Set optim.schedule to wsd, or leave it out",
    ),
    "optim.min_lr_ratio": Effect(
        lambda s: s.job.optim.schedule != "wsd" or s.job.optim.decay_fraction > 0,
        "the learning rate does not decay (optim.decay_fraction is 0)",
        "Set optim.decay_fraction above 0, or leave it out",
    ),
    "parallel.schedule": _pipeline(),
    "parallel.sequence_parallel": Effect(
        lambda s: s.degrees.tp > 1,
        "there is no tensor parallelism (parallel.tp is 1)",
        "Set parallel.tp above 1, or leave it out",
    ),
    "parallel.context": _CONTEXT,
    "parallel.context_balance": _CONTEXT,
    "parallel.placement": Effect(
        lambda s: s.degrees.pp > 1 and s.degrees.dp_replicate > 1,
        "the two orders differ only where a pipeline has replicas",
        "Set parallel.pp and parallel.dp_replicate above 1, or leave it out",
    ),
    "parallel.reshard_after_forward": Effect(
        lambda s: s.shards > 1 or (s.is_wrapped and s.compute != "float32"),
        "nothing is gathered: no parameters are sharded",
        "Set parallel.dp_shard above 1, or leave it out",
    ),
    "parallel.gradient_sync": Effect(
        lambda s: s.accumulation > 1 and s.degrees.shards * s.degrees.dp_replicate > 1,
        "a step reduces its gradients once: it has one microbatch, or one rank to reduce over",
        "Set a smaller train.microbatch, or leave it out",
    ),
    "parallel.hierarchical_gather": Effect(
        lambda s: s.shards > 1 and s.node_shards is not None and 1 < s.node_shards < s.shards,
        "no shard group has several ranks on each of several nodes",
        "Leave it out, or shard over more ranks than a node has",
    ),
    "parallel.symmetric_memory": _SHARDED,
    "parallel.prefetch": _SHARDED,
    "parallel.persist_below": Effect(
        lambda s: s.shards > 1 and s.reshard is not False,
        "all parameters stay gathered, or none are sharded (parallel.reshard_after_forward)",
        "Set parallel.reshard_after_forward to always, or leave it out",
    ),
    "pipeline.stages_per_rank": _pipeline(),
    "pipeline.layers": _pipeline(),
    "pipeline.optimize": Effect(
        lambda s: s.degrees.pp > 1 and not s.job.pipeline.layers,
        "there is no pipeline (parallel.pp is 1), or pipeline.layers cuts it",
        "Set parallel.pp above 1 without pipeline.layers, or leave it out",
    ),
    "precision.reduce": Effect(
        lambda s: s.is_wrapped,
        "no gradients are reduced: one rank in float32, or train.canonical",
        "Leave it out",
    ),
    "precision.float8_skip": _FLOAT8,
    "precision.float8_small": _FLOAT8,
    "remat.every": Effect(
        lambda s: s.job.remat.kind != "none",
        "nothing is computed again (remat.kind is none)",
        "Set remat.kind, or leave it out",
    ),
    "remat.products": Effect(
        lambda s: s.job.remat.kind == "selective",
        "only selective recomputation counts products (remat.kind)",
        "Set remat.kind to selective, or leave it out",
    ),
    "remat.budget": Effect(
        lambda s: s.job.remat.kind == "budget",
        "recomputation has no budget (remat.kind)",
        "Set remat.kind to budget, or leave it out",
    ),
    "remat.ahead": Effect(
        lambda s: s.job.remat.offload,
        "no activations are offloaded (remat.offload is false)",
        "Set remat.offload to true, or leave it out",
    ),
    "compile.cache": Effect(
        lambda s: s.job.compile.enable,
        "nothing is compiled (compile.enable is false)",
        "Set compile.enable to true, or leave it out",
    ),
    "checkpoint.mtbf_hours": Effect(
        lambda s: s.job.checkpoint.interval == "auto",
        "the interval between checkpoints is a number (checkpoint.interval)",
        "Set checkpoint.interval to auto, or leave it out",
    ),
    "checkpoint.local_interval": Effect(
        lambda s: s.job.checkpoint.local != "off",
        "nodes keep no state of their own (checkpoint.local is off)",
        "Set checkpoint.local to a directory, or leave it out",
    ),
    "resilience.anomaly_limit": _SPIKES,
    "resilience.spike_threshold": _SPIKES,
    "resilience.spike_window": _SPIKES,
    "resilience.replica_check": Effect(
        lambda s: s.degrees.world > 1 or s.job.resilience.lighthouse != "none",
        "one rank has no replica to compare with",
        "Leave it out",
    ),
    "profile.memory": Effect(
        lambda s: bool(s.job.profile.steps),
        "no steps are profiled (profile.steps is empty)",
        "Set profile.steps, or leave it out",
    ),
}

# Keys that act in every job; those of [launch] and run.cluster are read by other commands.
# Refused where they would do nothing: parallel.async_tp, lora.targets, lora.quantize, optim.states.
ALWAYS = frozenset(
    f"{section}.{name}"
    for section, names in {
        "run": "dir device cluster",
        "model": "kind preset",
        "data": "path mixture format tokenizer holdout invalid_utf8 cache",
        "train": "steps seed seq_len global_batch microbatch canonical objective eval_interval "
        "eval_sequences",
        "lora": "rank targets quantize",
        "optim": "kind states lr beta1 beta2 eps weight_decay max_grad_norm schedule warmup_steps",
        "parallel": "dp_replicate dp_shard tp pp cp ep async_tp cpu_offload",
        "precision": "compute float8",
        "remat": "kind offload",
        "compile": "enable",
        "checkpoint": "interval background dir keep local",
        "resilience": "time_limit anomaly step_timeout preflight restarts lighthouse faults",
        "observe": "log_interval sinks grad_norms report spans",
        "profile": "steps",
        "debug": "statistics deterministic autograd_anomaly",
        "launch": "time image setup options",
    }.items()
    for name in names.split()
)


def effect_warnings(setting: Setting) -> Iterator[str]:
    """Name every key that the job has set to something else than its default, and that does
    nothing there."""
    values = flatten(setting.job)
    for key, effect in ACTS.items():
        if values[key] != DEFAULTS[key] and not effect.acts(setting):
            yield f"{key}={shown(values[key])} has no effect: {effect.why}. {effect.remedy}."


def schedule_warnings(job: Job) -> Iterator[str]:
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


def shown(value: Any) -> str:
    """A value as a command line or recipe has it."""
    return value if isinstance(value, str) else json.dumps(value)


def _allows(asked: int | str, nodes: int) -> bool:
    """Return True if ``run.nodes`` has ``nodes`` in its range, or is no range at all."""
    found = re.fullmatch(r"(\d+)(?::(\d+))?", str(asked))
    return found is None or int(found[1]) <= nodes <= int(found[2] or found[1])
