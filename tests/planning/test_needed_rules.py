"""Every rule of the planner is needed: without it, the job that it refuses fails.

Each entry of the tables below is the smallest job that one rule refuses.  A test ignores this rule,
and runs the job on one to four ranks.  It must fail, compute other gradients than one process, or,
for a key that the rule calls useless, compute exactly what the job computes without the key.
`NOT_RUN` has a reason for each rule that cannot be tested so.  The tables have every rule.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.optim import SGD

from tests.harness import RankError, run_ranks
from tests.layouts import parse
from tests.small import Overrides, gradients, merged, small_job, train_rank
from weft.config.errors import ConfigError, ConfigErrors, InvalidConfig
from weft.config.keys import Section, key
from weft.config.reader import read_job
from weft.models import FAMILIES, Family
from weft.models.family import Init
from weft.planning.pipeline_schedule import ScheduleSpec
from weft.planning.plan import Machine
from weft.planning.resolve import resolve_nodes

# The modules with rules about a job and its layout.
MODULES = (
    "weft.models.decoder_rules",
    "weft.planning.cuda_graph_rules",
    "weft.planning.degrees",
    "weft.planning.dispatch_rules",
    "weft.planning.optim_rules",
    "weft.planning.pipeline_plan",
    "weft.planning.precision_rules",
    "weft.planning.resolve",
    "weft.planning.rules",
    "weft.planning.sharding",
    "weft.planning.stages",
)
TEXT = "model.num_layers=4 model.tied_embeddings=false data.packing=windows"
MOE = "model.kind=moe model.preset=toy-moe model.num_layers=4"
LATENT = f"{TEXT} model.kv_rank=8 model.rope_head_dim=4 model.num_kv_heads=4"
GROUPS = f"{MOE} model.num_experts=8"
FLOAT8 = "precision.float8=tensorwise precision.float8_small=true"
Q_PROJ = 'lora.rank=4 lora.targets=["q_proj"]'
# A user's family without the optional entries, and one without a tied parameter.
_LLAMA = FAMILIES["llama"]
PLAIN = dataclasses.replace(_LLAMA, sharding={}, unit_costs=None, choose_entries=None)
UNTIED = dataclasses.replace(_LLAMA, tied_parameter=None, choose_entries=None)
DIVIDED = dataclasses.replace(_LLAMA, tp_divided_fields=("ffn_dim",), choose_entries=None)
_MOE = FAMILIES["moe"]
NO_WHOLE = dataclasses.replace(
    _MOE.of(_MOE.presets["toy-moe"]), sharding_without_expert_tp={}, choose_entries=None
)
HERE = "tests.planning.test_needed_rules"
REWARD = "train.objective=reward data.format=preferences"


class BigramConfig(Section):
    vocab_size: int = key(512, "token ids")
    max_seq_len: int = key(64, "longest sequence")


NO_HEADS = Family(
    config=BigramConfig,
    presets={"one": BigramConfig()},
    build=lambda config: nn.Sequential(nn.Embedding(config.vocab_size, config.vocab_size)),
    check=lambda _: [],
    blocks=lambda _: [],
    get_init=lambda *_: Init("truncated_normal", 0.1),
    has_weight_decay=lambda _: False,
    num_params=lambda config: config.vocab_size**2,
    flops_per_token=lambda *_: 1.0,
)


def build_sgd(groups: Any, _: Any) -> SGD:
    return SGD(groups, lr=0.1)


class Refused(NamedTuple):
    """A job that a rule refuses.

    Attributes:
        key: of the error.
        rule: a part of the error's rule.
        base: words of a job that is accepted, on one process.
        words: layout and keys that the rule refuses in addition.
    """

    key: str
    rule: str
    base: str
    words: str

    def __str__(self) -> str:
        return f"{self.key} {self.rule} [{self.words}]".replace("/", "|")


# The job fails, or its gradients are not those of one process.
FAILS = [
    Refused("train.seq_len", "divisible by cp=2", f"{TEXT} train.seq_len=31", "cp2"),
    Refused("train.seq_len", "divisible by tp=2", f"{TEXT} train.seq_len=31", "tp2"),
    Refused("train.seq_len", "exceeds max_seq_len", TEXT, "model.max_seq_len=16"),
    Refused("data.vocab_size", "exceeds vocab_size", TEXT, "model.vocab_size=300"),
    Refused(
        "train.global_batch_size",
        "is not divisible",
        f"{TEXT} train.global_batch_size=5",
        "dp_shard2",
    ),
    Refused(
        "train.microbatch_size",
        "does not divide the 5",
        f"{MOE} model.router_aux_loss_coef=0.1 train.global_batch_size=5",
        "pp2 train.microbatch_size=2",
    ),
    Refused(
        "parallel.tp",
        "part of num_heads",
        f"{TEXT} model.num_heads=2 model.num_kv_heads=1 model.head_dim=8",
        "tp4",
    ),
    Refused(
        "parallel.cp",
        "does not divide num_heads",
        f"{TEXT} model.num_heads=3 model.num_kv_heads=1 model.head_dim=8",
        "cp2 cp_method=ulysses",
    ),
    Refused(
        "parallel.reshard_after_forward",
        "does not divide",
        TEXT,
        "dp_shard4 reshard_after_forward=3",
    ),
    Refused("parallel.ep", "does not divide the 2 ranks", MOE, "dp_shard2 ep=3"),
    Refused("parallel.ep_chunks", "does not divide", MOE, "dp_shard2 ep=2 ep_chunks=3"),
    Refused(
        "parallel.pp",
        "needs 4 stages",
        f"{TEXT} model.num_layers=1",
        "pp2 pipeline.schedule=LoopedBFS",
    ),
    Refused("pipeline.layers_per_stage", "lists 1", TEXT, "pp2 pipeline.layers_per_stage=[4]"),
    Refused("lora.targets", "shares the table", "", 'lora.rank=4 lora.targets=["lm_head"]'),
    Refused(
        "lora.trainable_tokens", "is not below", f"{TEXT} {Q_PROJ}", "lora.trainable_tokens=[600]"
    ),
    Refused("lora.quantize", "needs blocks of 64", f"{TEXT} {Q_PROJ}", "lora.quantize=nf4"),
    Refused(
        "pipeline.layers_per_stage",
        "leaves the first stage",
        f"{TEXT} {Q_PROJ}",
        "pp2 pipeline.layers_per_stage=[0,4]",
    ),
    Refused("model.num_heads", "makes head_dim=9 odd", TEXT, "model.dim=36"),
    Refused("model.head_dim", "is odd", TEXT, "model.head_dim=7"),
    Refused("model.rope_head_dim", "is odd", LATENT, "model.rope_head_dim=3"),
    Refused("model.num_kv_heads", "does not divide", TEXT, "model.num_kv_heads=3"),
    Refused(
        "model.rope_long_factors",
        "has 2 numbers",
        TEXT,
        "model.rope_scaling=longrope model.rope_short_factors=[1,1,1,1] "
        "model.rope_long_factors=[1,1] model.rope_original_context=16",
    ),
    Refused("model.rope_pattern", "cannot have layers", LATENT, "model.rope_pattern=RN"),
    Refused("model.expert_groups", "does not divide", GROUPS, "model.expert_groups=3"),
    Refused(
        "model.active_groups", "exceeds", GROUPS, "model.expert_groups=2 model.active_groups=3"
    ),
]
# The job trains three steps and fails.
TRAINING_FAILS = [
    Refused(
        "debug.autograd_anomaly", "parallel.tp shards", TEXT, "tp2 debug.autograd_anomaly=true"
    ),
    Refused(
        "debug.autograd_anomaly",
        "parallel.ep shards",
        MOE,
        "dp_shard2 ep=2 debug.autograd_anomaly=true",
    ),
    Refused("train.objective", "needs preference", TEXT, "train.objective=dpo"),
    Refused("train.objective", "needs answers with a label", TEXT, "train.objective=kto"),
]
# Without the rule, the key changes nothing: the user would not notice the mistake.
NO_EFFECT = [
    Refused(
        "train.microbatch_size",
        "must be 1",
        f"{TEXT} train.world_size_invariant=true",
        "dp_shard2 train.microbatch_size=2",
    ),
    Refused("pipeline.stages_per_rank", "which has 1", TEXT, "pp2 pipeline.stages_per_rank=2"),
    Refused("parallel.etp", "is neither 1", MOE, "tp2 etp=4"),
    Refused("parallel.ep", "needs experts", TEXT, "dp_shard2 ep=2"),
    Refused(
        "activation_checkpoint.every_n_layers",
        "is not possible",
        TEXT,
        "compile.enable=true activation_checkpoint.mode=budget "
        "activation_checkpoint.every_n_layers=2",
    ),
    Refused("precision.float8", "needs a matrix", f"{TEXT} model.dim=36 model.head_dim=6", FLOAT8),
    Refused("precision.float8", "converts none", TEXT, "precision.float8=tensorwise"),
    Refused(
        "precision.float8_exclude",
        "matches none",
        f"{TEXT} {FLOAT8}",
        'precision.float8_exclude=["nonsense"]',
    ),
    Refused(
        "lora.targets",
        "is neither a linear",
        f"{TEXT} {Q_PROJ}",
        'lora.targets=["q_proj","nonsense"]',
    ),
    Refused(
        "optim.groups",
        "freezes every trainable",
        TEXT,
        'optim.groups=[{params=["*"],lr_mult=0}]',
    ),
    Refused(
        "lora.modules_to_save",
        "shares the table",
        f"model.tied_embeddings=true {Q_PROJ}",
        'lora.modules_to_save=["lm_head"]',
    ),
    Refused("optim.groups", "matches no trainable", TEXT, 'optim.groups=[{params=["nonsense"]}]'),
    Refused("model.layer_pattern", "local layers without", TEXT, "model.layer_pattern=LG"),
    Refused(
        "model.attention_chunk",
        "cannot be set with",
        f"{TEXT} model.layer_pattern=LG model.attention_chunk=8",
        "model.sliding_window=16",
    ),
    Refused("model.num_kv_heads", "must equal", LATENT, "model.num_kv_heads=2"),
    Refused("model.qk_norm", "cannot be used", LATENT, "model.qk_norm=head"),
    Refused("model.attention_sinks", "cannot be used", LATENT, "model.attention_sinks=true"),
    Refused("model.value_head_dim", "must be 0", TEXT, "model.value_head_dim=6"),
]
# The planner warns that the key has no effect: it changes no gradient.
WARNED = [
    *(
        Refused(key, "", TEXT, words)
        for key, words in {
            "pipeline.layers_per_stage": "pipeline.layers_per_stage=[4]",
            "parallel.async_tp": "dp_shard2 async_tp=true",
            "lora.dropout": "lora.dropout=0.5",
            "lora.dora": "lora.dora=true",
            "lora.quantize": "lora.quantize=int8",
            "lora.targets": 'lora.targets=["q_proj"]',
            "lora.modules_to_save": 'lora.modules_to_save=["lm_head"]',
            "lora.trainable_tokens": "lora.trainable_tokens=[1]",
            "optim.groups": 'optim.groups=[{params=["*norm*"],momentum=0.5}]',
        }.items()
    ),
    Refused("parallel.cp_load_balance", "", TEXT, "cp2 cp_load_balance=documents"),
    Refused(
        "parallel.cp_load_balance",
        "",
        f"{TEXT} data.packing=documents model.num_heads=4",
        "cp2 cp_method=ulysses cp_load_balance=documents",
    ),
    Refused(
        "optim.qk_clip_threshold",
        "",
        f"{TEXT} model.attention_softcap=5",
        "optim.qk_clip_threshold=10",
    ),
    Refused(
        "lora.trainable_tokens",
        "",
        f'{TEXT} {Q_PROJ} lora.modules_to_save=["embed_tokens","lm_head"]',
        "lora.trainable_tokens=[1]",
    ),
    *(
        Refused(f"model.{name}", "", TEXT, f"model.{name}={value}")
        for name, value in {
            "sliding_window": 8,
            "attention_chunk": 8,
            "rope_local_theta": 1000,
            "temperature_interval": 8,
            "norm_bias": "true",
            "q_rank": 8,
            "rope_head_dim": 4,
            "shared_experts": 1,
            "dense_layers": 1,
            "router_bias": "true",
            "expert_biases": "true",
            "expert_limit": 7,
            "router_aux_loss_coef": 0.1,
            "router_z_loss_coef": 0.1,
            "router_aux_loss_scope": "global",
        }.items()
    ),
]
GPU = "weft on a CPU does not run the kernel that has this limit"
TORCHFT = "torchft is not a dependency of the tests"
USER = "a user's family without the entry has no code to run"
OTHER = "the code has no such degree: the layout cannot be built"
MEANING = "the code runs, but no model or job is defined so"
MANY = "18 ranks fail: reshard_after_forward=4 does not divide the 9 ranks of a shard group"
NEVER = "the job has a value that it never uses: a later step, a second range, a second length"
LESS = "the job runs, and reports less than the key promises"
SECRET = "the run would show the secret"
CUDA = Machine("cuda", 8, "NVIDIA H100 80GB HBM3", peer_access=True, capability=(9, 0))
OTHER_DEVICE = Machine("hostdev", 2, "Host Device")
PCIE = dataclasses.replace(CUDA, peer_access=False)
LIGHT = "resilience.lighthouse=h:1 checkpoint.dir=/shared/c"


class NotRun(NamedTuple):
    """A job that a rule refuses, and why no test runs it without the rule."""

    key: str
    rule: str
    words: str
    reason: str
    machine: Machine | None = None

    def __str__(self) -> str:
        return f"{self.key} {self.rule} [{self.words}]".replace("/", "|")


COMPILED = "compile.enable=true"
GRAPHS = "compile.cuda_graphs=true"
NOT_RUN = [
    # weft.planning.degrees, weft.planning.resolve
    NotRun("monitor.prometheus", "is not HOST:PORT", "monitor.prometheus=9400", MEANING),
    NotRun("monitor.webhook", "is not env:NAME", "monitor.webhook=https://a/b", SECRET),
    NotRun(
        "parallel.tp",
        "does not divide the 3 ranks",
        "tp2 dp_shard=auto",
        OTHER,
        Machine("cpu", 2, world_size=3),
    ),
    NotRun(
        "parallel.dp_shard", "is not equal to", "dp_shard=2", OTHER, Machine("cpu", 2, world_size=3)
    ),
    NotRun(
        "run.nproc_per_node",
        "exceeds the 64",
        "run.nproc_per_node=65",
        "65 processes do not fit into memory",
        Machine("cpu", 2),
    ),
    NotRun(
        "parallel.dp_shard",
        "needs 128 ranks",
        "dp_shard=128",
        "128 processes do not fit into memory",
        Machine("cpu", 2),
    ),
    NotRun("run.nodes", "is neither a number", "run.nodes=many", OTHER, Machine("cpu", 2)),
    NotRun("run.rendezvous", "names no rendezvous", "run.nodes=2", OTHER, Machine("cpu", 2)),
    # weft.planning.sharding
    NotRun(
        "parallel.dp_shard",
        "memory of the device is unknown",
        "dp_shard=fit",
        OTHER,
        Machine("cpu", 2, world_size=2),
    ),
    NotRun(
        "parallel.dp_shard",
        "GiB per rank",
        "dp_shard=fit",
        "it would run out of memory",
        Machine("cpu", 2, world_size=2, memory_bytes=2**16),
    ),
    NotRun("parallel.dp_replicate", "conflicts with", "dp_replicate2 dp_shard=fit", MEANING),
    # weft.planning.rules: hardware
    NotRun(
        "activation_checkpoint.mode",
        "materialize all",
        "activation_checkpoint.mode=selective model.attention_softcap=30",
        GPU,
        CUDA,
    ),
    *(
        NotRun(key, "is not supported on the device type hostdev", words, GPU, OTHER_DEVICE)
        for key, words in (
            ("compile.enable", COMPILED),
            ("precision.float8", FLOAT8),
            ("parallel.cp_method", "cp2 cp_method=ring"),
            ("resilience.lighthouse", LIGHT),
        )
    ),
    NotRun("parallel.symmetric_memory", "needs GPUs", "dp_shard2 symmetric_memory=true", GPU),
    NotRun(
        "parallel.symmetric_memory",
        "does not support",
        "dp_shard8 symmetric_memory=true hierarchical_gather=true",
        GPU,
        CUDA,
    ),
    NotRun(
        "parallel.async_tp",
        "needs GPUs",
        f"tp8 async_tp=true {COMPILED} model.num_heads=8 train.seq_len=32",
        GPU,
        PCIE,
    ),
    NotRun(
        "parallel.async_tp",
        "works inside a node",
        f"tp8 async_tp=true {COMPILED} model.num_heads=8 run.nodes=2 run.nproc_per_node=4 "
        "run.rendezvous=h:1",
        GPU,
        dataclasses.replace(CUDA, devices=4),
    ),
    NotRun(
        "parallel.async_tp", "needs torch.compile", "tp8 async_tp=true model.num_heads=8", GPU, CUDA
    ),
    NotRun(
        "parallel.async_tp",
        "which is off",
        f"tp8 async_tp=true {COMPILED} sequence_parallel=false model.num_heads=8",
        GPU,
        CUDA,
    ),
    # weft.planning.cuda_graph_rules
    *(
        NotRun("compile.cuda_graphs", f"does not support {rule}", f"{GRAPHS} {words}", GPU, CUDA)
        for rule, words in (
            ("parallel.pp", "pp8 model.num_layers=8"),
            ("parallel.ep_dispatch", f"{MOE} dp_shard8 ep=2 ep_dispatch=alltoall"),
            ("precision.compute_dtype", f"{MOE} dp_shard8 precision.compute_dtype=float32"),
            ("parallel.cp_method", "dp_shard4 cp2 data.packing=documents"),
            ("parallel.async_tp", f"tp8 async_tp=true {COMPILED} model.num_heads=8"),
            ("parallel.symmetric_memory", "dp_shard8 symmetric_memory=true"),
            ("parallel.cpu_offload", "dp_shard8 cpu_offload=true"),
            ("activation_checkpoint.offload", "dp_shard8 activation_checkpoint.offload=true"),
            ("debug.layer_stats_steps", "dp_shard8 debug.layer_stats_steps=1"),
            ("debug.autograd_anomaly", "dp_shard8 debug.autograd_anomaly=true"),
        )
    ),
    # weft.planning.rules: replica groups
    NotRun(
        "resilience.lighthouse",
        "is not HOST:PORT",
        "resilience.lighthouse=here checkpoint.dir=/c",
        TORCHFT,
    ),
    NotRun("parallel.pp", "is not supported with replica", f"pp2 {LIGHT}", TORCHFT),
    NotRun(
        "train.world_size_invariant",
        "changes the order",
        f"{LIGHT} train.world_size_invariant=true",
        TORCHFT,
    ),
    NotRun(
        "resilience.on_anomaly",
        "is not supported with replica",
        f"{LIGHT} resilience.on_anomaly=skip",
        TORCHFT,
    ),
    NotRun(
        "train.objective",
        "is not supported with replica",
        f"{LIGHT} train.objective=dpo data.format=preferences",
        TORCHFT,
    ),
    NotRun("checkpoint.dir", "gives each replica group", "resilience.lighthouse=h:1", TORCHFT),
    NotRun(
        "debug.layer_stats_steps",
        "is not supported with replica",
        f"{LIGHT} debug.layer_stats_steps=2",
        TORCHFT,
    ),
    NotRun(
        "debug.deterministic",
        "but resilience.lighthouse",
        f"{LIGHT} debug.deterministic=true",
        TORCHFT,
    ),
    NotRun(
        "debug.deterministic",
        "but run.nodes",
        "debug.deterministic=true run.nodes=1:2",
        "it is a promise of equal runs",
    ),
    # weft.planning.rules: meaning of keys
    NotRun("train.objective", "would also train on rejected", "data.format=preferences", MEANING),
    NotRun("train.objective", "would also train on bad", "data.format=unpaired", MEANING),
    NotRun(
        "train.objective",
        "does not read the labels",
        "data.format=unpaired train.objective=dpo",
        MEANING,
    ),
    NotRun(
        "model.mtp_layers",
        "predicts tokens",
        "model.mtp_layers=1 train.objective=dpo data.format=preferences",
        MEANING,
    ),
    NotRun(
        "train.label_smoothing",
        "spreads the target",
        "train.label_smoothing=0.1 train.objective=dpo data.format=preferences",
        MEANING,
    ),
    NotRun(
        "train.z_loss_coef",
        "is a loss of each target",
        "train.z_loss_coef=0.1 train.objective=dpo data.format=preferences",
        MEANING,
    ),
    NotRun(
        "train.neftune_alpha",
        "is not supported by the model family",
        f"train.neftune_alpha=5 model.kind={HERE}:NO_HEADS model.preset=one",
        USER,
    ),
    NotRun("train.objective", "needs logits", "model.score_head=true", MEANING),
    NotRun(
        "train.objective",
        "needs a score head",
        f"{REWARD} model.kind={HERE}:NO_HEADS model.preset=one",
        USER,
    ),
    NotRun("model.mtp_layers", "predicts beyond", "model.mtp_layers=32", NEVER),
    NotRun("train.epochs", "both set", "train.epochs=1", NEVER),
    NotRun("profile.steps", "has 2 ranges", "profile.steps=1,3", NEVER),
    NotRun("profile.steps", "exceeds the last", "profile.steps=30", NEVER),
    NotRun("profile.steps", "too large to read", "train.steps=100 profile.steps=1-40", LESS),
    NotRun("debug.layer_stats_steps", "begins after", "debug.layer_stats_steps=30", NEVER),
    NotRun(
        "debug.autograd_anomaly",
        "a compiled backward",
        f"debug.autograd_anomaly=true {COMPILED}",
        LESS,
    ),
    # weft.planning.rules: layouts
    NotRun(
        "parallel.tp",
        "has no SHARDING table",
        f"tp2 model.kind={HERE}:PLAIN model.preset=toy",
        USER,
    ),
    NotRun(
        "parallel.tp",
        "does not divide ffn_dim=64",
        f"tp3 model.kind={HERE}:DIVIDED model.preset=toy train.seq_len=30",
        USER,
    ),
    NotRun(
        "parallel.etp",
        "is not supported by",
        f"tp2 etp=1 model.kind={HERE}:NO_WHOLE model.preset=toy-moe",
        USER,
    ),
    NotRun(
        "parallel.cp", "needs num_heads", f"cp2 model.kind={HERE}:NO_HEADS model.preset=one", USER
    ),
    NotRun(
        "parallel.reshard_after_forward",
        "neither a multiple",
        f"{MOE} model.num_experts=12 train.global_batch_size=6 dp_shard6 ep=3 "
        "reshard_after_forward=2",
        MANY,
    ),
    # weft.planning.optim_rules, weft.planning.precision_rules
    NotRun(
        "optim.state_dtype",
        "is only for",
        f"optim.name={HERE}:build_sgd optim.state_dtype=bfloat16",
        "the planner would count its memory",
    ),
    NotRun(
        "monitor.attention_logits",
        "needs the attention",
        f"model.kind={HERE}:NO_HEADS model.preset=one monitor.attention_logits=true",
        USER,
    ),
    NotRun(
        "optim.qk_clip_threshold",
        "a norm of queries",
        "model.qk_norm=head optim.qk_clip_threshold=1",
        "the weights shrink, and the logits do not",
    ),
    NotRun(
        "optim.qk_clip_threshold",
        "which LoRA freezes",
        "lora.rank=4 optim.qk_clip_threshold=1",
        MEANING,
    ),
    NotRun(
        "optim.qk_clip_threshold",
        "lr_mult=0 freezes",
        'optim.groups=[{params=["*.k_proj.*"],lr_mult=0}] optim.qk_clip_threshold=1',
        MEANING,
    ),
    NotRun(
        "precision.float8",
        "produces bfloat16",
        f"{FLOAT8} precision.compute_dtype=float32",
        GPU,
        CUDA,
    ),
    NotRun("train.seq_len", "not a multiple of 16", f"{FLOAT8} train.seq_len=24", GPU),
    NotRun(
        "lora.rank",
        "needs nn.Linear",
        f"lora.rank=4 model.kind={HERE}:NO_HEADS model.preset=one",
        USER,
    ),
    NotRun(
        "lora.trainable_tokens",
        "needs the tables",
        f"lora.rank=4 lora.trainable_tokens=[1] model.kind={HERE}:NO_HEADS model.preset=one",
        USER,
    ),
    NotRun(
        "lora.dora",
        "has magnitudes of columns",
        'model.tied_embeddings=true lora.rank=4 lora.dora=true lora.targets=["embed_tokens"]',
        "a merged table cannot have two magnitudes",
    ),
    NotRun(
        "lora.modules_to_save",
        "is also in",
        'lora.rank=4 lora.targets=["embed_tokens"] lora.modules_to_save=["embed_tokens"]',
        "an adapter of a trained table is a second name for a part of it",
    ),
    # weft.planning.pipeline_plan
    NotRun(
        "parallel.pp", "which has no stages", f"pp2 model.kind={HERE}:PLAIN model.preset=toy", USER
    ),
    NotRun(
        "parallel.pp",
        "for tied embeddings",
        f"pp2 model.kind={HERE}:UNTIED model.preset=toy model.tied_embeddings=true",
        USER,
    ),
    NotRun(
        "pipeline.stages_per_rank",
        "is set by the CSV",
        "pp2 pipeline.schedule={csv} train.microbatch_size=4 pipeline.stages_per_rank=2",
        NEVER,
    ),
    # weft.models.decoder_rules
    NotRun(
        "model.rope_fraction",
        "not an even number",
        "model.head_dim=6 model.rope_fraction=0.5",
        MEANING,
    ),
    NotRun(
        "model.rope_high_freq_factor",
        "is less than",
        "model.rope_scaling=llama3 model.rope_high_freq_factor=0.5",
        MEANING,
    ),
    NotRun(
        "model.rope_head_dim",
        "must be between",
        "model.kv_rank=8 model.num_kv_heads=4 model.rope_head_dim=8",
        MEANING,
    ),
    NotRun("model.active_experts", "exceeds", f"{GROUPS} model.active_experts=9", OTHER),
    NotRun("model.dense_layers", "leaves no layer", f"{MOE} model.dense_layers=4", MEANING),
    NotRun(
        "model.active_groups",
        "has fewer experts",
        f"{GROUPS} model.expert_groups=4 model.active_experts=3",
        MEANING,
    ),
    NotRun(
        "model.score_selected",
        "cannot be used with",
        f"{GROUPS} model.expert_groups=4 model.active_groups=2 model.score_selected=true",
        MEANING,
    ),
]


# --------------------------------------------------------------------------- one rule less


class Ignored(NamedTuple):
    error: ConfigError
    source: tuple[str, int]  # module and line of the rule


@contextmanager
def without_rule(key: str, rule: str) -> Iterator[list[Ignored]]:
    """Ignore the errors of one rule; yield them."""
    ignored: list[Ignored] = []
    append = ConfigErrors.append

    def skip(self: ConfigErrors, error: ConfigError) -> None:
        if error.key != key or rule not in error.rule:
            append(self, error)
            return
        frame: FrameType | None = sys._getframe(1)  # ConfigErrors.add
        while frame is not None and frame.f_globals["__name__"] == ConfigErrors.__module__:
            frame = frame.f_back
        assert frame is not None
        ignored.append(Ignored(error, (frame.f_globals["__name__"], frame.f_lineno)))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ConfigErrors, "append", skip)
        yield ignored


def run_without(kind: str, key: str, rule: str, words: Overrides, store: str, folder: str) -> Any:
    """Run a job without a rule; return its gradients, or the other errors of the plan."""
    with without_rule(key, rule):
        try:
            if kind == "train":
                train_rank([*words, ("run.dir", folder), ("train.steps", "3")], store)
                return None
            return gradients(words, store)
        except InvalidConfig as error:
            return f"another rule refuses the job: {error}"


def distance(case: Refused, store: Path, folder: Path, kind: str = "gradients") -> float:
    """Return the largest relative difference of a gradient from one process, without the rule.

    Raises:
        RankError: if a rank fails.
    """
    ranks, words = parse(case.words)
    base = parse(case.base)[1]
    run = kind, case.key, case.rule, [*base, *words], str(store), str(folder)
    results = run_ranks(run_without, ranks, *run, timeout=120)
    assert not isinstance(results[0], str), results[0]
    if kind == "train":
        return 0.0
    (one,) = run_ranks(gradients, 1, base, str(store))
    worst = 0.0
    for many in merged(results):
        if many["grads"].keys() != one["grads"].keys():
            return torch.inf
        for name, grad in one["grads"].items():
            other = many["grads"][name]
            if other.shape != grad.shape:
                return torch.inf
            worst = max(worst, float((other - grad).abs().max() / grad.abs().max().clamp(min=1e-9)))
    return worst


def mark(cases: list[Refused], quick: tuple[str, ...]) -> list[Any]:
    """Return test parameters: the cases of the keys ``quick`` are in the default suite."""
    slow = [pytest.mark.slow]
    return [pytest.param(c, id=str(c), marks=[] if c.key in quick else slow) for c in cases]


@pytest.mark.parametrize("case", mark(FAILS, ("train.seq_len",)))
def test_job_without_its_rule_fails(case: Refused, store_path: Path, tmp_path: Path) -> None:
    with suppress(RankError):
        assert distance(case, store_path, tmp_path) > 1e-2


@pytest.mark.parametrize("case", mark(TRAINING_FAILS, ("debug.autograd_anomaly",)))
def test_training_without_its_rule_fails(case: Refused, store_path: Path, tmp_path: Path) -> None:
    with pytest.raises(RankError):
        distance(case, store_path, tmp_path, "train")


@pytest.mark.parametrize("case", mark(NO_EFFECT, ("parallel.etp",)))
def test_key_without_its_rule_has_no_effect(
    case: Refused, store_path: Path, tmp_path: Path
) -> None:
    assert distance(case, store_path, tmp_path) < 1e-5


@pytest.mark.parametrize("case", mark(WARNED, ("parallel.cp_load_balance",)))
def test_key_that_the_planner_warns_of_has_no_effect(
    case: Refused, store_path: Path, tmp_path: Path
) -> None:
    ranks, words = parse(f"{case.base} {case.words}")
    plan = resolve_nodes(small_job(*words), Machine("cpu", 2, world_size=ranks))
    assert any("no effect" in warning for warning in plan.warnings)
    assert distance(case, store_path, tmp_path) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1F1B", "DualPipeV", "Interleaved1F1B"])
def test_pipeline_with_microbatches_that_its_schedule_refuses_fails(
    schedule: str, store_path: Path
) -> None:
    """`_resolve_microbatch_size` chooses other sizes, so its condition is replaced."""
    words = f"pp2 pipeline.schedule={schedule} train.microbatch_size=1 train.global_batch_size="
    ranks, overrides = parse(words + ("5" if schedule == "Interleaved1F1B" else "1"))
    with pytest.raises(RankError):
        run_ranks(run_any_count, ranks, [*parse(TEXT)[1], *overrides], str(store_path))


def run_any_count(words: Overrides, store: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ScheduleSpec, "supports", lambda *_: True)
        gradients(words, store)


# --------------------------------------------------------------------------- all rules


def refuse(key: str, rule: str, words: str, machine: Machine | None) -> set[tuple[str, int]]:
    """Return the lines of the rule that refuses a job."""
    ranks, overrides = parse(words)
    if "NO_HEADS" in words:
        sizes = [("data.vocab_size", "512"), ("train.seq_len", "32")]
        job, _, errors = read_job("demo", [*sizes, *overrides])
        assert not errors, errors
    else:
        job = small_job(*overrides)
    machine = machine or Machine("cpu", 2, world_size=ranks)
    if machine.device != "cpu" and job.run.nodes == "auto":
        machine = dataclasses.replace(machine, world_size=ranks)
    with without_rule(key, rule) as ignored, suppress(Exception):
        resolve_nodes(job, machine)
    return {each.source for each in ignored}


def list_rules() -> set[tuple[str, int, int]]:
    """Return the modules and lines of all rules."""
    rules = set()
    for name in MODULES:
        for node in ast.walk(ast.parse(inspect.getsource(importlib.import_module(name)))):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "errors.add":
                rules.add((name, node.lineno, node.end_lineno or node.lineno))
    return rules


def test_tables_have_every_rule(tmp_path: Path) -> None:
    csv = tmp_path / "order.csv"
    csv.write_text("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n")
    tested: set[tuple[str, int]] = set()
    cases = [
        (c.key, c.rule, f"{c.base} {c.words}", None) for c in [*FAILS, *TRAINING_FAILS, *NO_EFFECT]
    ]
    for case in NOT_RUN:
        base = "" if "NO_HEADS" in case.words else f"{TEXT} "
        words = base + case.words.replace("{csv}", str(csv))
        cases.append((case.key, case.rule, words, case.machine))
    for schedule in ("1F1B", "order.csv"):
        path = str(csv) if schedule.endswith("csv") else schedule
        words = f"pp2 pipeline.schedule={path} train.microbatch_size=8"
        cases.append(("train.microbatch_size", "gives 1 microbatches", f"{TEXT} {words}", None))
    unused = []
    for case in cases:
        lines = refuse(*case)
        tested |= lines
        if not lines:
            unused.append(case)
    assert not unused, unused
    missing = [
        rule
        for rule in sorted(list_rules())
        if not any(name == rule[0] and rule[1] <= line <= rule[2] for name, line in tested)
    ]
    assert not missing, missing
