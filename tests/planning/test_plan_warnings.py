"""Every key has an effect in every job, or a warning if it has none."""

from __future__ import annotations

import pytest

from tests.small import sized_recipes
from weft.config.keys import parse_condition
from weft.config.reader import read_job
from weft.planning.devices import parse_cluster
from weft.planning.needs import FACTS, key_facts, list_keys, list_settings
from weft.planning.plan import Machine, Plan
from weft.planning.plan_text import cluster_machine
from weft.planning.resolve import resolve, resolve_nodes

PAIRS = "data.format=preferences"
PLAIN = "train.steps=1000 train.global_batch_size=16 model.num_layers=8"
H100 = cluster_machine(parse_cluster("2x8xH100"))
ONE_H100 = cluster_machine(parse_cluster("1x1xH100"))

# key=value; overrides and ranks with which the key has no effect; overrides and ranks with which it
# has one.
# fmt: off
EXPERTS = "model.kind=moe model.preset=toy-moe parallel.ep=2"
MOE = "model.kind=moe model.preset=toy-moe"
COMPILED = "compile.enable=true"
HEAD, LONGROPE = "model.head_dim=4", "model.rope_scaling=longrope"
LONG = "model.rope_short_factors=[1,1] model.rope_long_factors=[1,1] model.head_dim=4"
EXPERT_KEYS = [
    ("active_experts=1", ""), ("expert_dim=32", ""), ("shared_experts=1", ""),
    ("dense_layers=1", ""), ("expert_interval=2", ""), ("score=sigmoid", ""),
    ("score_selected=true", ""), ("renormalize=false", ""), ("route_scale=2", ""),
    ("expert_groups=2", ""), ("active_groups=2", "model.expert_groups=2"),
    ("scaled_expert_inputs=true", ""), ("router_bias=true", ""), ("expert_biases=true", ""),
    ("expert_limit=2", ""), ("router_aux_loss_coef=0.1", ""), ("router_z_loss_coef=0.1", ""),
]
CASES = [
    ("run.nproc_per_node=2", "", Machine("cpu", 4, world_size=4), "", 2),
    ("run.nodes=2", "", Machine("cpu", 4, world_size=4, local_world_size=4),
     "", Machine("cpu", 4, world_size=4, local_world_size=2)),
    ("run.rendezvous=a:1", "", 1, "run.nodes=1:1", 1),
    ("data.text_field=content", "data.format=chat", 1, "", 1),
    ("data.packing=documents", "data.format=chat", 1, "", 1),
    ("data.start_token=false", "data.format=chat", 1, "", 1),
    ("data.add_special_tokens=<|x|>", "", 1, "data.format=chat", 1),
    ("data.shuffle_span_gib=1", "data.packing=best_fit", 1, "data.packing=documents", 1),
    ("data.shuffle_span_gib=1", "data.format=chat", 1, "", 1),
    ("data.node_cache_dir=/nvme", "", 1, "data.cache_dir=s3://b/tokens", 1),
    ("data.node_cache_gib=100", "", 1, "data.path=s3://b/tokens", 1),
    ("data.overlong=skip", "", 1, "data.format=chat", 1),
    ("data.chat_template=x.jinja", "", 1, "data.format=chat", 1),
    ("data.chat_template_args=a=b", "", 1, "data.format=chat", 1),
    ("data.train_turns=last", "", 1, "data.format=chat", 1),
    ("data.train_empty_reasoning=false", "", 1, "data.format=chat", 1),
    ("data.fields=prompt=q", "", 1, "data.format=chat", 1),
    ("data.roles=client=user", "", 1, "data.format=chat", 1),
    ("data.validation_fraction=0.1", "data.validation_path=x.jsonl", 1, "", 1),
    ("train.eval_interval=5",
     "data.validation_fraction=0 train.eval_sequences=64 monitor.eval_prompts=[]", 1, "", 1),
    ("train.eval_sequences=5",
     "data.validation_fraction=0 train.eval_interval=0 monitor.eval_prompts=[]", 1, "", 1),
    ("monitor.eval_prompts=a",
     "data.validation_fraction=0 train.eval_interval=0 train.eval_sequences=64", 1,
     "data.validation_path=x.jsonl", 1),
    ("data.vocab_size=600", "data.tokenizer=tokenizer.json", 1, "", 1),
    ("train.preference_beta=0.2", "", 1, "train.objective=dpo data.format=preferences", 1),
    ("train.preference_beta=0.2", "", 1, "train.objective=mine:loss", 1),
    ("train.preference_label_smoothing=0.1", f"{PAIRS} train.objective=ipo", 1,
     f"{PAIRS} train.objective=simpo", 1),
    ("train.sft_weight=0.1", f"{PAIRS} train.objective=orpo", 1, f"{PAIRS} train.objective=ipo", 1),
    ("train.desirable_weight=2", f"{PAIRS} train.objective=dpo", 1,
     "data.format=unpaired train.objective=kto", 1),
    ("train.undesirable_weight=2", f"{PAIRS} train.objective=dpo", 1,
     "data.format=unpaired train.objective=kto", 1),
    ("train.simpo_gamma=1", f"{PAIRS} train.objective=dpo", 1,
     f"{PAIRS} train.objective=simpo", 1),
    ("train.reward_center_coef=0.2", "", 1, "train.objective=reward data.format=preferences", 1),
    ("lora.alpha=32", "", 1, "lora.rank=4", 1),
    ("lora.rank_stabilized=true", "", 1, "lora.rank=4", 1),
    ("lora.dropout=0.1", "lora.rank=4 lora.targets=embed_tokens", 1, "lora.rank=4", 1),
    ("lora.lr_ratio=2", "lora.rank=4 lora.targets=embed_tokens", 1,
     "lora.rank=4 lora.targets=lm_head model.tied_embeddings=false", 1),
    ("optim.momentum=0.9", "", 1, "optim.name=muon", 1),
    ("optim.momentum=0.9", "", 1, "optim.name=mine:build", 1),
    ("optim.precondition_interval=5", "optim.name=muon", 1, "optim.name=soap", 1),
    ("optim.max_precondition_dim=99", "", 1, "optim.name=soap", 1),
    ("optim.decay_fraction=0.5", "optim.schedule=cosine", 1, "", 1),
    ("optim.min_lr_ratio=0.5", "optim.decay_fraction=0", 1, "", 1),
    ("pipeline.schedule=GPipe", "", 2, "parallel.pp=2 model.tied_embeddings=false", 2),
    ("parallel.sequence_parallel=false", "", 2, "parallel.tp=2", 2),
    ("parallel.cp_method=allgather", "", 2, "parallel.cp=2", 2),
    ("parallel.cp_load_balance=false", "", 2, "parallel.cp=2", 2),
    ("parallel.mesh_order=replica-outer", "parallel.dp_replicate=2", 2,
     "parallel.dp_replicate=2 parallel.pp=2 model.tied_embeddings=false", 4),
    ("parallel.ep_dispatch=padded", "", 2, f"{EXPERTS} precision.compute_dtype=bfloat16", 2),
    ("parallel.ep_capacity_factor=3.0", EXPERTS, 2,
     f"{EXPERTS} parallel.ep_dispatch=padded precision.compute_dtype=bfloat16", 2),
    ("parallel.ep_chunks=2", "", 2, EXPERTS, 2),
    ("parallel.reshard_after_forward=never", "", 1, "", 2),
    ("parallel.gradient_sync=microbatch", "", 2, "train.microbatch_size=2", 2),
    ("parallel.gradient_sync=microbatch", "train.microbatch_size=2", 1, "train.microbatch_size=2",
     2),
    ("train.early_stopping=2", "train.eval_interval=0", 1, "train.eval_interval=5", 1),
    ("train.early_stopping_delta=0.1", "train.eval_interval=5", 1, "train.early_stopping=2", 1),
    ("checkpoint.best=eval_loss", "train.eval_interval=0", 1, "train.eval_interval=5", 1),
    ("checkpoint.best_mode=min", "train.eval_interval=5", 1, "checkpoint.best=eval_loss", 1),
    ("parallel.hierarchical_gather=true", "", 8, "", H100),
    ("parallel.symmetric_memory=true", "", ONE_H100, "", H100),
    ("parallel.fsdp_prefetch=2", "", 1, "", 2),
    ("parallel.fsdp_prefetch=2", "train.world_size_invariant=true", 2, "", 2),
    ("parallel.param_persistence_threshold=9", "parallel.reshard_after_forward=never", 2, "", 2),
    ("pipeline.stages_per_rank=2", "", 2,
     "parallel.pp=2 pipeline.schedule=Interleaved1F1B model.tied_embeddings=false", 2),
    ("pipeline.balance=memory", "", 2, "parallel.pp=2 model.tied_embeddings=false", 2),
    ("pipeline.balance=memory",
     "parallel.pp=2 pipeline.layers_per_stage=4,4 model.tied_embeddings=false", 2,
     "parallel.pp=2 model.tied_embeddings=false", 2),
    ("precision.reduce_dtype=bfloat16", "", 1, "", 2),
    ("precision.float8_small=true", "", 1,
     "precision.float8=rowwise precision.compute_dtype=bfloat16", 1),
    ("precision.float8_exclude=*.o_proj", "", 1,
     "precision.float8=rowwise precision.float8_small=true precision.compute_dtype=bfloat16", 1),
    ("activation_checkpoint.every_n_layers=2", "", 1, "activation_checkpoint.mode=full", 1),
    ("activation_checkpoint.recompute_every_n_matmuls=3", "activation_checkpoint.mode=full", 1,
     "activation_checkpoint.mode=selective", 1),
    ("activation_checkpoint.memory_budget=0.2", "activation_checkpoint.mode=full", 1,
     "activation_checkpoint.mode=budget", 1),
    ("activation_checkpoint.offload_prefetch=2", "", 1, "activation_checkpoint.offload=true", 1),
    ("compile.cache_dir=x", "", 1, "compile.enable=true", 1),
    ("compile.cuda_graphs=true", "", 1, "", ONE_H100),
    ("checkpoint.mtbf_hours=2", "", 1, "checkpoint.interval=auto", 1),
    ("checkpoint.local_interval=5", "", 1, "checkpoint.local_dir=/dev/shm", 1),
    ("resilience.max_anomalies=5", "", 1, "resilience.on_anomaly=skip", 1),
    ("resilience.spike_threshold=5", "", 1, "resilience.on_anomaly=skip", 1),
    ("resilience.spike_window=64", "", 1, "resilience.on_anomaly=rewind", 1),
    ("resilience.replica_check=5", "", 1, "", 2),
    ("profile.memory=true", "", 1, "profile.steps=5", 1),
    ("monitor.router_metrics=true", "", 1, "model.kind=moe model.preset=toy-moe", 1),
    ("train.mtp_weight=0.1", "", 1, "model.mtp_layers=1", 1),
    ("pipeline.defer_weight_gradients=false", "parallel.pp=2", 2,
     "parallel.pp=2 pipeline.schedule=ZBVZeroBubble", 2),
    ("pipeline.defer_weight_gradients=false", "parallel.pp=2 pipeline.schedule=ZBVZeroBubble "
     "train.world_size_invariant=true", 2, "parallel.pp=2 pipeline.schedule=DualPipeV", 2),
    ("pipeline.overlap_dispatch=false", "", 1, "model.kind=moe model.preset=toy-moe parallel.pp=2 "
     "parallel.dp_shard=2 parallel.ep=2 pipeline.schedule=DualPipeV", 4),
    ("parallel.etp=1", "parallel.tp=2", 2, "model.kind=moe model.preset=toy-moe parallel.tp=2", 2),
    ("parallel.async_tp=true", "", ONE_H100, f"parallel.tp=2 {COMPILED}", H100),
    ("parallel.cp_load_balance=documents", "parallel.cp=2", 2,
     "parallel.cp=2 data.packing=documents", 2),
    ("parallel.cp_load_balance=false", "parallel.cp=2 parallel.cp_method=ulysses", 2,
     "parallel.cp=2", 2),
    ("pipeline.layers_per_stage=4,4", "", 2, "parallel.pp=2 model.tied_embeddings=false", 2),
    ("lora.targets=q_proj", "", 1, "lora.rank=4", 1),
    ("lora.modules_to_save=embed_tokens", "", 1, "lora.rank=4", 1),
    ("lora.trainable_tokens=3", "", 1, "lora.rank=4", 1),
    ("lora.trainable_tokens=3", "lora.rank=4 lora.targets=embed_tokens", 1, "lora.rank=4", 1),
    ("lora.quantize=int8", "", 1, "lora.rank=4", 1),
    ("lora.dora=true", "", 1, "lora.rank=4", 1),
    ("lora.dropout=0.1", "", 1, "lora.rank=4", 1),
    ("optim.qk_clip_threshold=50", "model.attention_softcap=30", 1, "", 1),
    ("model.sliding_window=5", "", 1, "model.layer_pattern=LG", 1),
    ("model.attention_chunk=5", "", 1, "model.layer_pattern=LG", 1),
    ("model.rope_local_theta=300", "", 1, "model.layer_pattern=LG model.sliding_window=5", 1),
    ("model.temperature_interval=4", "", 1, "model.rope_pattern=RN", 1),
    ("model.temperature_scale=0.2", "", 1,
     "model.rope_pattern=RN model.temperature_interval=4", 1),
    ("model.q_rank=8", "", 1, "model.kv_rank=8 model.rope_head_dim=8 model.num_kv_heads=6", 1),
    ("model.rope_head_dim=8", "", 1, "model.kv_rank=8 model.num_kv_heads=6", 1),
    ("model.rope_factor=2", "model.rope_scaling=none", 1, "model.rope_scaling=linear", 1),
    ("model.rope_low_freq_factor=2", "model.rope_scaling=yarn", 1, "model.rope_scaling=llama3", 1),
    ("model.rope_high_freq_factor=5", "model.rope_scaling=yarn", 1, "model.rope_scaling=llama3",
     1),
    ("model.rope_original_context=64", "model.rope_scaling=linear", 1, "model.rope_scaling=yarn",
     1),
    ("model.rope_beta_fast=16", "model.rope_scaling=linear", 1, "model.rope_scaling=yarn", 1),
    ("model.rope_beta_slow=2", "model.rope_scaling=linear", 1, "model.rope_scaling=yarn", 1),
    ("model.rope_truncate=false", "model.rope_scaling=linear", 1, "model.rope_scaling=yarn", 1),
    ("model.rope_magnitude=2", "model.rope_scaling=linear", 1, "model.rope_scaling=yarn", 1),
    ("model.rope_short_factors=[1,1]", HEAD, 1, f"{LONGROPE} {LONG}", 1),
    ("model.rope_long_factors=[1,1]", HEAD, 1, f"{LONGROPE} {LONG}", 1),
    ("model.norm_bias=true", "", 1, "model.norm=layer", 1),
    ("model.router_aux_loss_scope=global", MOE, 1, f"{MOE} model.router_aux_loss_coef=0.1", 1),
    ("model.balance_rate=0.01", f"{MOE} lora.rank=4", 1, MOE, 1),
    *((f"model.{pair}", "", 1, f"{MOE} {more}", 1) for pair, more in EXPERT_KEYS),
]
# fmt: on


def planned(text: str, machine: Machine | int) -> Plan:
    pairs = [(key, value) for key, _, value in (word.partition("=") for word in text.split())]
    job, _, errors = read_job("demo", pairs)
    assert errors == []
    if isinstance(machine, int):
        machine = Machine("cpu", 8, world_size=machine)
    return resolve(job, machine)


@pytest.mark.parametrize(("key", "idle", "small_machine", "acting", "many"), CASES)
def test_key_without_effect_is_warned_of_and_one_with_effect_is_not(
    key: str, idle: str, small_machine: Machine | int, acting: str, many: Machine | int
) -> None:
    (warning,) = [
        w for w in planned(f"{PLAIN} {idle} {key}", small_machine).warnings if "no effect" in w
    ]
    assert warning.startswith(f"{key.partition('=')[0]}=")
    assert " has no effect" in warning
    assert warning.endswith(".")
    assert "no effect" not in "\n".join(planned(f"{PLAIN} {acting} {key}", many).warnings)


def test_balance_that_cannot_be_exported_is_warned_of() -> None:
    text = "will refuse the model"
    for kind, preset, more, is_warned in (
        ("mixtral", "toy", "model.balance_rate=0.001", True),
        ("mixtral", "toy", "model.balance_rate=0", False),
        ("mixtral", "toy", "model.balance_rate=0.001 lora.rank=2", False),
        ("deepseek_v3", "toy", "model.balance_rate=0.001", False),
        ("moe", "toy-moe", "model.balance_rate=0.001", False),  # transformers has no such model
        ("llama", "toy", "", False),
    ):
        plan = planned(f"train.steps=9 model.kind={kind} model.preset={preset} {more}", 1)
        assert any(text in each for each in plan.warnings) == is_warned, (kind, more)


def test_every_condition_has_a_case() -> None:
    conditional = {key for key in list_keys() if key_facts(key).needs}
    assert {case[0].partition("=")[0] for case in CASES} == conditional


@pytest.mark.parametrize("key", [key for key in list_keys() if key_facts(key).needs])
def test_conditions_name_keys_and_facts(key: str) -> None:
    facts = key_facts(key)
    for condition in (facts.needs, *(facts.tries or {}).values()):
        for term in parse_condition(condition):
            assert term.name in (list_keys() if term.sign else FACTS)
            assert all(each.name in list_keys() for each in list_settings(term))


@pytest.mark.parametrize(
    ("group", "text"),
    [
        ('{params=["*o_proj*"], lr_mult=0, beta1=0.5}', "beta1=0.5"),
        ('{params=["*o_proj*"], momentum=0.5}', "momentum=0.5"),
        ('{params=["*norm*"], optimizer="adamw"}', 'optimizer="adamw"'),
        ('{params=["*o_proj*"], beta2=0.5}', ""),
    ],
)
def test_option_of_a_group_without_effect_is_warned_of(group: str, text: str) -> None:
    groups = f'[{group}, {{params=["*"], lr_mult=2}}]'
    job, _, errors = read_job("demo", [("optim.groups", groups)])
    assert errors == []
    warnings = [w for w in resolve(job, Machine("cpu", 1)).warnings if "no effect" in w]
    assert len(warnings) == bool(text)
    assert all(w.startswith(text.replace('"', "")) for w in warnings)


@pytest.mark.parametrize("recipe", [name for name in sized_recipes() if "405b" not in name])
def test_shipped_recipe_has_no_key_without_effect_and_reaches_its_learning_rate(
    recipe: str,
) -> None:
    job, base, errors = read_job(recipe)
    assert errors == []
    cluster = parse_cluster("3x8xcpu" if job.run.cluster == "local" else job.run.cluster)
    host = Machine("cpu", 24) if recipe == "three-servers-small" else Machine("cpu", 2)
    machine = host if job.run.cluster == "local" else cluster_machine(cluster)
    warnings = resolve(job, machine, recipe, base).warnings
    assert not [w for w in warnings if "no effect" in w or "warm-up" in w]


@pytest.mark.parametrize("layout", ["", "parallel.pp=2 pipeline.schedule=GPipe"])
def test_microbatch_larger_than_the_share_of_a_rank_is_the_share(layout: str) -> None:
    text = f"{PLAIN} model.tied_embeddings=false {layout}"
    plan = planned(f"{text} train.microbatch_size=32", 2)
    (warning,) = plan.warnings
    assert plan.microbatch_size == plan.local_batch_size
    local = 16 if layout else 8
    assert warning == (
        f"train.microbatch_size=32 exceeds the {local} sequences of each rank, so a microbatch has "
        f"{local}. Use train.microbatch_size={local}, or auto."
    )
    assert planned(f"{text} train.microbatch_size={local}", 2).warnings == ()


def test_explicit_default_gives_no_warning() -> None:
    assert planned(f"{PLAIN} lora.alpha=16 optim.momentum=0.95", 1).warnings == ()


def test_rendezvous_without_nodes_is_warned_of_where_nodes_are_resolved() -> None:
    """Without run.nodes, every node would train a separate copy."""
    job, _, _ = read_job("demo", [("run.rendezvous", "a:29400")])
    (warning,) = resolve_nodes(job, Machine("cpu", 2)).warnings
    assert "Set run.nodes" in warning


@pytest.mark.parametrize("nodes", ["2:", "x", "1:2:3"])
def test_unreadable_nodes_give_no_warning(nodes: str) -> None:
    assert planned(f"{PLAIN} run.nodes={nodes}", 1).warnings == ()


@pytest.mark.parametrize(
    ("warm", "steps", "message"),
    [
        (100, 50, "the learning rate ends at 0.001, below its peak of optim.lr=0.002"),
        (50, 50, "reaches its peak in the last step and never decays"),
        (49, 50, ""),
        (0, 1, ""),
    ],
)
def test_warm_up_that_leaves_no_steps_is_warned_of(warm: int, steps: int, message: str) -> None:
    warnings = planned(f"optim.warmup_steps={warm} train.steps={steps}", 1).warnings
    assert len(warnings) == bool(message)
    assert message in "".join(warnings)
    assert "Use optim.warmup_steps=" in "".join(warnings) or not message


@pytest.mark.parametrize(
    ("float8", "expected"),
    [
        ("tensorwise precision.float8_small=true", []),
        # Key and value projections of the 8B are too small to gain.
        ("tensorwise", ["k_proj, v_proj: of the layers with this input only some are in float8"]),
        ("rowwise", ["only one scale per tensor can be applied before a gather"]),
    ],
)
def test_gather_that_async_tp_cannot_overlap_is_warned_of(float8: str, expected: list[str]) -> None:
    words = f"parallel.tp=2 parallel.async_tp=true precision.float8={float8}".split()
    job, _, errors = read_job(
        "paper/llama3-8b-compile",
        [(key, value) for key, _, value in (w.partition("=") for w in words)],
    )
    assert errors == []
    plan = resolve(job, H100)
    warnings = [w for w in plan.warnings if "does not overlap the gather" in w]
    assert len(warnings) == len(expected)
    assert all(part in w for part, w in zip(expected, warnings, strict=True))
