"""`weft recipe from`: configurations of other programs, in their form and with their keys."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from weft.cli.main import main
from weft.config.errors import InvalidConfig
from weft.config.peer_configs import load_peer_configs
from weft.config.peer_names import load_peer_names
from weft.config.reader import read_job
from weft.config.schema import keys
from weft.conversion.recipe_translation import Translation, translate_file, write_recipe
from weft.models.decoder_config import DecoderConfig
from weft.planning.plan import Machine, Plan
from weft.planning.plan_text import plan_recipe

TITAN = """
[job]
dump_folder = "./outputs"
[model]
name = "llama3"
flavor = "8B"
hf_assets_path = "./assets/hf/Llama-3.1-8B"
converters = ["float8"]
[optimizer]
name = "AdamW"
lr = 3e-4
[lr_scheduler]
warmup_steps = 200
decay_ratio = 0.5
[training]
local_batch_size = 2
seq_len = 8192
steps = 1000
dataset = "c4"
[parallelism]
data_parallel_shard_degree = -1
tensor_parallel_degree = 4
enable_async_tensor_parallel = true
context_parallel_degree = 2
context_parallel_rotate_method = "alltoall"
[checkpoint]
enable = true
interval = 500
async_mode = "async"
[activation_checkpoint]
mode = "selective"
selective_ac_option = "op"
[compile]
enable = true
[quantize.linear.float8]
recipe_name = "rowwise"
filter_fqns = ["output", "attention.wk"]
[validation]
enable = true
freq = 50
steps = 10
local_batch_size = 4
[fault_tolerance]
enable = true
"""
MEGATRON = """\
#!/bin/bash
GPUS_PER_NODE=8
NNODES=${SLURM_NNODES:-"4"}
TP=2
DATA=$1
DISTRIBUTED=(--nproc_per_node $GPUS_PER_NODE --nnodes $NNODES --master_port 6000)
MODEL=(
    --num-layers 24   # a comment
    --hidden-size 2048
    --num-attention-heads 16
    --group-query-attention
    --num-query-groups 4
    --seq-length 4096
    --max-position-embeddings 8192
    --position-embedding-type rope
    --rotary-base 500000
    --swiglu
    --normalization RMSNorm
    --disable-bias-linear
    --untie-embeddings-and-output-weights
    --attention-dropout 0.0
    --hidden-dropout 0.1
    --vocab-size 32000
)
TRAIN="--micro-batch-size 1 --global-batch-size 256 \\
    --train-samples 256000 --lr 3e-4 --min-lr 3e-5 --lr-decay-style cosine \\
    --lr-warmup-fraction 0.01 --bf16 --exit-duration-in-mins 230"
torchrun ${DISTRIBUTED[@]} pretrain_gpt.py ${MODEL[@]} $TRAIN \\
    --tensor-model-parallel-size $TP --pipeline-model-parallel-size 4 --sequence-parallel \\
    --num-layers-per-virtual-pipeline-stage 3 --use-distributed-optimizer \\
    --data-path $DATA --split 949,50,1 --eval-iters 10 --eval-interval 1000 \\
    --rampup-batch-size 16 16 9
"""
AXOLOTL = """\
base_model: MODEL
adapter: qlora
lora_r: 32
lora_alpha: 16
lora_dropout: 0.05
lora_target_linear: true
datasets:
  - path: org/chats
    type: chat_template
    name: english
    split: train
  - path: org/more
    type: alpaca
sequence_len: 2048
sample_packing: true
gradient_accumulation_steps: 4
micro_batch_size: 2
num_epochs: 2
optimizer: paged_adamw_8bit
lr_scheduler: cosine
learning_rate: 2e-5
warmup_ratio: 0.1
val_set_size: 0.1
bf16: auto
gradient_checkpointing: true
saves_per_epoch: 1
special_tokens:
  pad_token: "<|end|>"
wandb_project:
early_stopping_patience: 3
"""
DPO = {
    "model_name_or_path": "MODEL",
    "dataset_name": "org/pairs",
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 8,
    "learning_rate": 5e-7,
    "lr_scheduler_type": "cosine_with_min_lr",
    "lr_scheduler_kwargs": {"min_lr": 5e-8},
    "warmup_ratio": 0.05,
    "max_steps": 400,
    "beta": 0.2,
    "loss_type": ["hinge"],
    "max_length": 512,
    "bf16": True,
    "eval_strategy": "steps",
    "eval_steps": 0.25,
    "hub_model_id": "me/mine",
    "report_to": ["wandb", "codecarbon"],
}


DEEPSPEED: dict[str, Any] = {
    "train_batch_size": 64,
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 4,
    "gradient_clipping": 0.5,
    "steps_per_print": 1e2,
    "bf16": {"enabled": True},
    "fp16": {"enabled": False, "loss_scale": 0},
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "offload_param": {"device": "none"},
        "reduce_bucket_size": 5e8,
        "stage3_param_persistence_threshold": 1e5,
        "zero_quantized_weights": True,
    },
    "optimizer": {
        "type": "Adam",
        "params": {"lr": 2e-4, "betas": [0.9, 0.98], "eps": 1e-9, "weight_decay": 0.05},
    },
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {"warmup_max_lr": 3e-4, "warmup_num_steps": 40, "total_num_steps": 500},
    },
    "activation_checkpointing": {"partition_activations": True, "cpu_checkpointing": True},
    "wandb": {"enabled": True, "project": "mine"},
}


def translate(directory: Path, name: str, text: str, cluster: Any = None) -> Translation:
    file = directory / name
    file.write_text(text)
    return translate_file(file, cluster)


def no_machine(_: object) -> Machine:
    raise AssertionError("the recipe names its cluster")


def plan(directory: Path, translation: Translation) -> Plan:
    file = directory / "out.toml"
    file.write_text(write_recipe(translation, "x"))
    return plan_recipe(str(file), [], [], None, no_machine)[0]


def keys_of(translation: Translation, *names: str) -> tuple[Any, ...]:
    return tuple(translation.recipe.get(name) for name in names)


def test_torchtitan_values_are_converted_and_planned(tmp_path: Path) -> None:
    found = translate(tmp_path, "a.toml", TITAN, (8, 8, "H100"))
    # 64 ranks, of which 4 x 2 share a sequence: 8 shares of 2.
    batch = ("train.global_batch_size", "train.microbatch_size", "run.cluster")
    assert keys_of(found, *batch) == (16, 2, "8x8xH100")
    assert keys_of(found, "model.kind", "model.preset") == ("llama", "8b")
    # Decay over half of 1000 steps, of the 800 after warm-up; to 0, the default there.
    schedule = ("optim.schedule", "optim.decay_fraction", "optim.min_lr_ratio")
    assert keys_of(found, *schedule) == ("wsd", 0.625, 0.0)
    layout = ("parallel.tp", "parallel.async_tp", "parallel.cp", "parallel.cp_method")
    assert keys_of(found, *layout) == (4, True, 2, "ring")
    assert keys_of(found, "activation_checkpoint.mode") == ("selective",)
    assert "activation_checkpoint.every_n_layers" not in found.recipe
    float8 = ("precision.float8", "precision.float8_exclude")
    assert keys_of(found, *float8) == ("rowwise", ["*self_attn.k_proj*"])
    assert keys_of(found, "checkpoint.interval", "checkpoint.async_save") == (500, True)
    assert keys_of(found, "train.eval_interval", "train.eval_sequences") == (50, 10 * 4 * 8)
    assert keys_of(found, "data.path") == ("hf://allenai/c4:en",)
    lacking = " ".join(found.unsupported)
    assert "fault_tolerance.enable" in lacking
    assert "model.hf_assets_path" in lacking
    assert plan(tmp_path, found).world_size == 64


def test_torchtitan_defaults_are_those_of_torchtitan(tmp_path: Path) -> None:
    """A file without them trains with its program's defaults, not with weft's."""
    text = "[training]\nsteps = 100\n[lr_scheduler]\nwarmup_steps = 10\n[model]\nflavor = '8B'\n"
    found = translate(tmp_path, "a.toml", text)
    names = ("optim.lr", "optim.schedule", "optim.min_lr_ratio", "train.seq_len")
    assert keys_of(found, *names) == (8e-4, "linear", 0.0, 2048)
    # selective_ac_option is "2": every second block, completely.
    recompute = ("activation_checkpoint.mode", "activation_checkpoint.every_n_layers")
    assert keys_of(found, *recompute) == ("full", 2)
    assert keys_of(found, "checkpoint.interval") == (0,)
    assert any("does not name" in note for note in found.notes)


@pytest.mark.parametrize(
    ("layout", "cluster", "batch"),
    [
        ("data_parallel_shard_degree = 4\ndata_parallel_replicate_degree = 2", "1x8xH100", 16),
        ("data_parallel_shard_degree = 8\npipeline_parallel_degree = 4", "4x8xH100", 16),
        ("expert_parallel_degree = 16", "2x8xH100", 32),
    ],
)
def test_torchtitan_ranks_follow_from_degrees(
    tmp_path: Path, layout: str, cluster: str, batch: int
) -> None:
    text = (
        f"[training]\nlocal_batch_size = 2\n[job]\n[model]\nflavor = '8B'\n[parallelism]\n{layout}"
    )
    found = translate(tmp_path, "a.toml", text)
    assert keys_of(found, "run.cluster", "train.global_batch_size") == (cluster, batch)


def test_torchtitan_old_names_are_known(tmp_path: Path) -> None:
    text = """
[training]
batch_size = 3
compile = true
seed = 7
[float8]
filter_fqns = ["output"]
[checkpoint]
enable_checkpoint = true
interval = 20
[lr_scheduler]
lr_min = 0.1
[model]
flavor = "70B"
[metrics]
"""
    found = translate(tmp_path, "a.toml", text, (1, 2, "H100"))
    names = ("train.global_batch_size", "compile.enable", "train.seed", "checkpoint.interval")
    assert keys_of(found, *names) == (6, True, 7, 20)
    assert keys_of(found, "optim.min_lr_ratio", "model.preset") == (0.1, "70b")


def test_torchtitan_unknown_model_is_left_to_the_user(tmp_path: Path) -> None:
    """A recipe must never train another model than the file's."""
    text = "[training]\n[parallelism]\n[model]\nname = 'mine'\nflavor = 'XL'\n"
    found = translate(tmp_path, "a.toml", text)
    with pytest.raises(InvalidConfig, match=r"model\.path"):
        plan(tmp_path, found)
    with pytest.raises(InvalidConfig, match="not a language model"):
        translate(tmp_path, "b.toml", text.replace("mine", "flux"))


def test_weight_decay_of_other_programs_includes_embeddings(tmp_path: Path) -> None:
    """weft's weight decay leaves out norms and embeddings; the recipe names what they decay."""
    found = translate(tmp_path, "a.toml", TITAN, (8, 8, "H100"))
    assert found.recipe["optim.groups"] == [{"params": ["*"], "weight_decay": 0.1}]
    assert plan(tmp_path, found).job.optim.groups[0].params == ("*",)
    embeddings = [{"params": ["embed_tokens.*"], "weight_decay": 0.01}]
    assert translate(tmp_path, "a.sh", MEGATRON).recipe["optim.groups"] == embeddings
    full = SMALL_AXOLOTL + "weight_decay: 0.01\n"
    assert translate(tmp_path, "a.yaml", full).recipe["optim.groups"] == embeddings
    assert "optim.groups" not in translate(tmp_path, "b.yaml", SMALL_AXOLOTL).recipe
    adapter = translate(tmp_path, "c.yaml", full + "adapter: lora\n")
    assert "optim.groups" not in adapter.recipe


@pytest.mark.parametrize(
    ("model", "seq_len", "expected"),
    [
        ("name = 'qwen3'\nflavor = '30B-A3B'", 4096, {"model.balance_rate": 0.001}),
        ("name = 'qwen3'\nflavor = '235B-A22B'", 4096, {"model.rope_theta": 5e6}),
        ("name = 'gpt_oss'\nflavor = '20b'", 4096, {"model.balance_rate": 0.001}),
        (
            "name = 'deepseek_v3'\nflavor = '671B'",
            4096,
            {
                "model.norm_eps": 1e-5,
                "model.rope_scaling": "none",
                "model.attention_scale": 0.0,
                "data.packing": "documents",
            },
        ),
        ("name = 'deepseek_v3'\nflavor = '671B'", 8192, {"model.rope_scaling": None}),
        (
            "name = 'llama4'\nflavor = '17bx16e_irope'",
            4096,
            {"model.rope_pattern": "NRRR", "model.layer_pattern": "GLLL", "model.qk_norm": "none"},
        ),
    ],
)
def test_torchtitan_model_is_torchtitans_not_the_published_one(
    tmp_path: Path, model: str, seq_len: int, expected: dict[str, Any]
) -> None:
    text = f"[training]\nseq_len = {seq_len}\nlocal_batch_size = 1\n[job]\n[model]\n{model}\n"
    found = translate(tmp_path, "a.toml", text, (32, 8, "H200"))
    assert {name: found.recipe.get(name) for name in expected} == expected
    assert read_written(tmp_path, found)[2] == []


def test_torchtitan_number_of_microbatches_is_not_their_size(tmp_path: Path) -> None:
    text = "[job]\n[model]\nflavor = '8B'\n[training]\nbatch_size = 8\n[experimental]\n"
    text += "pipeline_parallel_degree = 2\npipeline_parallel_microbatches = 4\n"
    found = translate(tmp_path, "a.toml", text, (1, 8, "H100"))
    assert keys_of(found, "train.microbatch_size") == (2,)


def test_megatron_script_values_are_converted_and_planned(tmp_path: Path) -> None:
    found = translate(tmp_path, "train.sh", MEGATRON)
    assert keys_of(found, "run.cluster", "train.global_batch_size") == ("4x8xH100", 256)
    assert keys_of(found, "train.steps", "optim.warmup_steps") == (1000, 10)
    assert found.recipe["optim.min_lr_ratio"] == pytest.approx(0.1)
    sizes = ("num_layers", "dim", "num_heads", "num_kv_heads", "ffn_dim", "max_seq_len")
    # int(2048 * 4 * 2 / 3) rounded down to a multiple of 64.
    expected = (24, 2048, 16, 4, 5440, 8192)
    assert keys_of(found, *(f"model.{name}" for name in sizes)) == expected
    layout = (
        "parallel.tp",
        "parallel.pp",
        "parallel.sequence_parallel",
        "pipeline.stages_per_rank",
    )
    assert keys_of(found, *layout) == (2, 4, True, 2)
    others = ("optim.beta2", "train.eval_sequences", "resilience.time_limit", "train.seed")
    assert keys_of(found, *others) == (0.999, 2560, 13800.0, 1234)
    assert keys_of(found, "data.validation_fraction", "precision.compute_dtype") == (
        0.05,
        "bfloat16",
    )
    lacking = " ".join(found.unsupported)
    assert all(name in lacking for name in ("--rampup", "--hidden-dropout", "--data-path"))
    assert "--attention-dropout" in found.ignored
    planned = plan(tmp_path, found)
    assert planned.world_size == 32
    assert planned.model.rope_theta == 500000.0
    assert not planned.model.tied_embeddings


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("", {"kind": "starcoder2", "norm": "layer", "gated": False, "ffn_dim": 4096}),
        ("--squared-relu --apply-layernorm-1p", {"kind": "nemotron", "activation": "relu2"}),
        ("--normalization RMSNorm --qk-layernorm", {"kind": "qwen3", "qk_norm": "head"}),
        (
            "--normalization RMSNorm --swiglu --num-experts 8 --moe-ffn-hidden-size 512 "
            "--moe-router-topk 2 --moe-layer-freq ([0]*1+[1]*11)",
            {"kind": "mixtral", "expert_dim": 512, "active_experts": 2, "dense_layers": 1},
        ),
    ],
)
def test_megatron_model_flags_choose_fields(
    tmp_path: Path, flags: str, expected: dict[str, Any]
) -> None:
    text = "--num-layers 12 --hidden-size 1024 --num-attention-heads 16 --seq-length 512 "
    text += f"--position-embedding-type rope --global-batch-size 8 --vocab-size 1000 {flags}"
    found = translate(tmp_path, "args.txt", text)
    assert {name: found.recipe[f"model.{name}"] for name in expected} == expected
    plan(tmp_path, found)


SMALL_MEGATRON = (
    "--num-layers 12 --hidden-size 1024 --num-attention-heads 16 --seq-length 512 --lr 1e-3 "
    "--position-embedding-type rope --global-batch-size 8 --vocab-size 1000 --train-iters 100 "
)
RMS = "--normalization RMSNorm --swiglu --disable-bias-linear "


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("", {"sliding_window": 0, "activation": "gelu_tanh", "tied_embeddings": True}),
        ("--no-bias-gelu-fusion", {"activation": "gelu"}),
        ("--squared-relu", {"rope_fraction": 1.0, "norm_offset": False, "head_dim": 0}),
        (RMS + "--qk-layernorm", {"head_dim": 0, "ffn_dim": 2688}),
        (RMS + "--qk-layernorm --num-experts 8", {"dense_layers": 0, "balance_rate": 0.0}),
        (RMS + "--multi-latent-attention --qk-layernorm", {"num_experts": 0}),
        (
            RMS + "--multi-latent-attention --qk-layernorm --num-experts 8",
            {"dense_layers": 0, "route_scale": 1.0, "expert_groups": 1, "shared_experts": 0},
        ),
        (RMS + "--group-query-attention", {"num_kv_heads": 1}),
        ("--normalization RMSNorm --swiglu --num-experts 8", {"expert_biases": True}),
    ],
)
def test_megatron_model_without_flags_has_the_defaults_of_megatron(
    tmp_path: Path, flags: str, expected: dict[str, Any]
) -> None:
    """Nothing of the small preset of the nearest family is left in the model."""
    found = translate(tmp_path, "args.txt", SMALL_MEGATRON + flags)
    model = plan(tmp_path, found).model.model_dump()
    assert {name: model[name] for name in expected} == expected
    assert model["sliding_window"] == 0
    assert model["route_scale"] == 1.0


@pytest.mark.parametrize(
    ("flags", "name"),
    [
        ("", "--hidden-dropout (default) = 0.1"),
        ("", "--attention-dropout (default) = 0.1"),
        ("--lr-decay-style WSD --lr-wsd-decay-iters 9", "--lr-wsd-decay-style (default)"),
        ("--lr-decay-style WSD --lr-wsd-decay-iters 9 --lr-decay-iters 90", "--lr-decay-iters"),
        ("--softmax-type off-by-one", "--softmax-type"),
        ("--window-size (128,0) --window-attn-skip-freq [1,1,0]", "--window-size"),
        (RMS + "--num-experts 8 --moe-layer-freq 2", "--moe-layer-freq = 2"),
        (RMS + "--num-experts 8 --moe-layer-freq ([0]*1+[1]*5+[0]*1+[1]*5)", "--moe-layer-freq"),
        (
            RMS + "--num-experts 8 --moe-ffn-hidden-size 512 "
            "--moe-shared-expert-intermediate-size 700",
            "--moe-shared-expert-intermediate-size = 700",
        ),
        (RMS + "--multi-latent-attention", "--qk-layernorm"),
        ("--normalization RMSNorm --disable-bias-linear --num-experts 8", "--swiglu"),
        ("--load /other/run --save /this/run", "--load"),
        ("--optimizer muon", "--muon-extra-scale-factor"),
        ("--optimizer muon", "--muon-nesterov"),
        ("--init-method-std 0.01", "--init-method-std"),
    ],
)
def test_megatron_value_that_weft_cannot_take_is_listed(
    tmp_path: Path, flags: str, name: str
) -> None:
    found = translate(tmp_path, "args.txt", SMALL_MEGATRON + flags)
    assert any(entry.startswith(name) for entry in found.unsupported)


def test_megatron_load_of_the_own_directory_resumes(tmp_path: Path) -> None:
    found = translate(tmp_path, "args.txt", SMALL_MEGATRON + "--load /a --save /a")
    assert "--load" in found.ignored


def test_megatron_samples_without_a_global_batch_are_listed(tmp_path: Path) -> None:
    text = "--num-layers 2 --hidden-size 64 --num-attention-heads 2 --train-samples 100 "
    found = translate(tmp_path, "args.txt", text + "--lr-warmup-samples 10")
    lacking = " ".join(found.unsupported)
    assert "--train-samples" in lacking
    assert "--lr-warmup-samples" in lacking
    assert found.recipe["optim.min_lr_ratio"] == 0.0


def test_megatron_muon_with_the_update_of_weft_is_translated(tmp_path: Path) -> None:
    flags = "--optimizer muon --muon-nesterov --muon-extra-scale-factor 0.2 --init-method-std 0.02"
    found = translate(tmp_path, "args.txt", SMALL_MEGATRON + flags)
    assert keys_of(found, "optim.name", "optim.momentum") == ("muon", 0.9)
    assert {name.partition(" ")[0] for name in found.unsupported} == {
        "--hidden-dropout",
        "--attention-dropout",
    }


def test_megatron_data_without_a_split_have_the_split_of_megatron(tmp_path: Path) -> None:
    found = translate(tmp_path, "args.txt", SMALL_MEGATRON + "--data-path a_text_document")
    assert keys_of(found, "data.validation_fraction") == (0.03,)


def test_megatron_mtp_has_the_weight_of_megatron(tmp_path: Path) -> None:
    found = translate(tmp_path, "args.txt", SMALL_MEGATRON + "--mtp-num-layers 1")
    assert keys_of(found, "train.mtp_weight", "model.mtp_layers") == (0.1, 1)


def test_axolotl_values_are_converted(tmp_path: Path) -> None:
    found = translate(tmp_path, "a.yaml", AXOLOTL, (1, 4, "H100"))
    names = ("train.global_batch_size", "train.microbatch_size", "train.epochs", "train.seq_len")
    assert keys_of(found, *names) == (32, 2, 2.0, 2048)
    lora = ("lora.rank", "lora.alpha", "lora.quantize", "lora.targets", "lora.dropout")
    assert keys_of(found, *lora) == (32, 16, "nf4", [], 0.05)
    optim = ("optim.lr", "optim.state_dtype", "optim.schedule", "optim.weight_decay", "optim.beta2")
    assert keys_of(found, *optim) == (2e-5, "8bit", "cosine", 0.0, 0.999)
    mixture = {"hf://org/chats:english": 1.0, "hf://org/more": 1.0}
    assert keys_of(found, "data.mixture", "data.format") == (mixture, "chat")
    assert keys_of(found, "train.early_stopping") == (3,)
    job, _, errors = read_written(tmp_path, found)
    assert errors == []
    assert job.data.mixture == mixture
    assert job.model.path == "MODEL"


@pytest.mark.parametrize("name", ["neftune_noise_alpha", "noisy_embedding_alpha"])
def test_axolotl_noise_of_embeddings_is_translated(tmp_path: Path, name: str) -> None:
    found = translate(tmp_path, "a.yaml", f"{SMALL_AXOLOTL}{name}: 5\n")
    assert keys_of(found, "train.neftune_alpha") == (5,)
    assert not any("noise" in n or "noisy" in n for n in [*found.unsupported, *found.ignored])


def test_trainer_label_smoothing_and_noise_are_translated(tmp_path: Path) -> None:
    tree = {"label_smoothing_factor": 0.1, "neftune_noise_alpha": 5.0}
    found = translate(tmp_path, "a.json", json.dumps(SFT | tree))
    assert keys_of(found, "train.label_smoothing", "train.neftune_alpha") == (0.1, 5.0)
    found = translate(tmp_path, "a.json", json.dumps(SFT | {"neftune_noise_alpha": None}))
    assert "train.neftune_alpha" not in found.recipe
    found = translate(tmp_path, "a.json", json.dumps(DPO | tree))
    assert keys_of(found, "train.neftune_alpha") == (5.0,)
    assert "label_smoothing_factor" in found.ignored
    assert "train.label_smoothing" not in found.recipe


def test_trl_dpo_values_are_converted(tmp_path: Path) -> None:
    found = translate(tmp_path, "a.json", json.dumps(DPO))
    names = (
        "train.objective",
        "train.preference_beta",
        "data.format",
        "data.path",
        "train.seq_len",
    )
    assert keys_of(found, *names) == ("dpo", 0.2, "preferences", "hf://org/pairs", 512)
    steps = ("train.steps", "train.global_batch_size", "optim.warmup_steps", "train.eval_interval")
    assert keys_of(found, *steps) == (400, 16, 20, 100)
    assert found.recipe["optim.min_lr_ratio"] == pytest.approx(0.1)
    assert keys_of(found, "monitor.trackers") == (["wandb"],)
    assert any("loss_type" in name for name in found.unsupported)
    assert read_written(tmp_path, found)[2] == []


def test_training_arguments_as_saved_are_translated(tmp_path: Path) -> None:
    """The JSON has every field, most of them null or with the default."""
    transformers = pytest.importorskip("transformers")
    arguments = transformers.TrainingArguments(str(tmp_path), use_cpu=True, learning_rate=1e-4)
    found = translate(tmp_path, "a.json", arguments.to_json_string())
    assert found.unsupported == {}
    assert keys_of(found, "optim.lr", "optim.schedule", "train.epochs") == (1e-4, "linear", 3.0)


SFT = {
    "model_name_or_path": "a/b",
    "dataset_name": "a/c",
    "per_device_train_batch_size": 2,
    "num_train_epochs": 1,
    "max_length": 512,
}


@pytest.mark.parametrize(
    ("tree", "expected"),
    [
        (SFT, {"optim.lr": 2e-5, "precision.compute_dtype": "bfloat16"}),
        (SFT, {"activation_checkpoint.mode": "full", "train.seq_len": 512}),
        (SFT | {"beta": 0.1}, {"optim.lr": 1e-6}),
        (SFT | {"bf16": False}, {"precision.compute_dtype": "float32"}),
        (SFT | {"bf16": None}, {"precision.compute_dtype": "bfloat16"}),
        (
            SFT | {"use_peft": True},
            {
                "lora.rank": 16,
                "lora.alpha": 32,
                "lora.dropout": 0.05,
                "lora.targets": ["q_proj", "v_proj"],
            },
        ),
        (SFT | {"dataset_text_field": "text"}, {"data.packing": "best_fit"}),
        (
            SFT | {"parallelism_config": {"sp_size": 2, "dp_shard_size": 4}},
            {"parallel.cp": 2, "parallel.cp_method": "ulysses", "train.global_batch_size": 8},
        ),
        # A ratio of steps is rounded up there.
        (SFT | {"max_steps": 101, "warmup_ratio": 0.05}, {"optim.warmup_steps": 6}),
        (SFT, {"monitor.log_interval": 10}),
        (SFT | {"logging_steps": 7}, {"monitor.log_interval": 7}),
    ],
)
def test_trl_defaults_are_those_of_trl(
    tmp_path: Path, tree: dict[str, Any], expected: dict[str, Any]
) -> None:
    found = translate(tmp_path, "a.json", json.dumps(tree))
    assert {name: found.recipe.get(name) for name in expected} == expected
    assert read_written(tmp_path, found)[2] == []


def test_trl_loss_on_all_turns_is_noted(tmp_path: Path) -> None:
    found = translate(tmp_path, "a.json", json.dumps(SFT))
    assert any("assistant_only_loss" in note for note in found.notes)
    found = translate(tmp_path, "a.json", json.dumps(SFT | {"assistant_only_loss": True}))
    assert not any("assistant_only_loss" in note for note in found.notes)


PAIR_DATA = {"model_name_or_path": "a/b", "dataset_name": "a/c", "max_length": 512, "max_steps": 9}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"beta": 0.2, "loss_type": "ipo"}, {"objective": "ipo", "preference_beta": 0.2}),
        (
            {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.3], "beta": 0.1},
            {"objective": "dpo", "sft_weight": 0.3},
        ),
        (
            {"beta": 0.1, "rpo_alpha": 0.5, "label_smoothing": 0.1},
            {"objective": "dpo", "sft_weight": 0.5, "preference_label_smoothing": 0.1},
        ),
        (
            {"loss_type": "simpo", "cpo_alpha": 0.0, "simpo_gamma": 1.2, "beta": 2.5},
            {
                "objective": "simpo",
                "sft_weight": 0.0,
                "simpo_gamma": 1.2,
                "preference_beta": 2.5,
            },
        ),
        ({"loss_type": "kto", "beta": 0.2}, {"objective": "kto", "preference_beta": 0.2}),
        (
            {"desirable_weight": 1.5, "undesirable_weight": 0.5},
            {"objective": "kto", "desirable_weight": 1.5, "undesirable_weight": 0.5},
        ),
        # The defaults of CPOConfig.
        (
            {"loss_type": "simpo", "simpo_gamma": 0.7},
            {"objective": "simpo", "sft_weight": 1.0, "preference_beta": 0.1},
        ),
    ],
)
def test_trl_objective_is_translated(
    tmp_path: Path, options: dict[str, Any], expected: dict[str, Any]
) -> None:
    found = translate(tmp_path, "a.json", json.dumps(PAIR_DATA | options))
    keys = {f"train.{name}": value for name, value in expected.items()}
    assert {key: found.recipe.get(key) for key in keys} == keys
    data = "unpaired" if expected["objective"] == "kto" else "preferences"
    assert keys_of(found, "data.format", "optim.lr") == (data, 1e-6)
    assert found.unsupported == {}
    assert read_written(tmp_path, found)[2] == []


@pytest.mark.parametrize(
    ("module", "kind", "expected"),
    [
        ("trl.experimental.orpo", "ORPO", "orpo"),
        ("trl.experimental.cpo", "CPO", "simpo"),
        ("trl", "KTO", "kto"),
        ("trl", "DPO", "dpo"),
    ],
)
def test_trl_config_as_saved_is_translated(
    tmp_path: Path, module: str, kind: str, expected: str
) -> None:
    """The JSON has every field, so that ORPO differs from DPO."""
    options = {"loss_type": "simpo"} if kind == "CPO" else {}
    config = getattr(pytest.importorskip(module), f"{kind}Config")(
        str(tmp_path), use_cpu=True, bf16=False, beta=0.4, max_steps=9, **options
    )
    found = translate(tmp_path, "a.json", config.to_json_string())
    names = ("train.objective", "train.preference_beta", "data.format")
    data = "unpaired" if kind == "KTO" else "preferences"
    assert keys_of(found, *names) == (expected, 0.4, data)
    assert found.unsupported == {}


def test_trl_reward_config_as_saved_is_translated(tmp_path: Path) -> None:
    trl = pytest.importorskip("trl")
    config = trl.RewardConfig(str(tmp_path), use_cpu=True, bf16=False, max_steps=9)
    found = translate(tmp_path, "a.json", config.to_json_string())
    names = ("train.objective", "data.format", "data.overlong", "optim.lr")
    assert keys_of(found, *names) == ("reward", "preferences", "skip", 1e-4)
    assert "train.reward_center_coef" not in found.recipe
    assert found.unsupported == {}
    options = {"center_rewards_coefficient": 0.01}
    found = translate(tmp_path, "b.json", json.dumps(PAIR_DATA | options))
    assert found.recipe["train.reward_center_coef"] == 0.01
    assert read_written(tmp_path, found)[2] == []


def test_axolotl_reward_model_is_translated(tmp_path: Path) -> None:
    lines = [
        *("reward_model: true", "num_labels: 1", "center_rewards_coefficient: 0.01"),
        "model_type: AutoModelForSequenceClassification",
        "datasets: [{path: x/y, type: bradley_terry.chat_template}]",
    ]
    kept = [line for line in SMALL_AXOLOTL.splitlines() if not line.startswith("datasets")]
    found = translate(tmp_path, "a.yaml", "\n".join([*kept, *lines]))
    names = ("train.objective", "data.format", "train.reward_center_coef", "data.path")
    assert keys_of(found, *names) == ("reward", "preferences", 0.01, "hf://x/y")
    assert {key.partition(" ")[0] for key in found.unsupported} <= {
        "saves_per_epoch",
        "warmup_ratio",
    }


def test_trl_beta_alone_notes_that_orpo_has_it_too(tmp_path: Path) -> None:
    found = translate(tmp_path, "a.json", json.dumps(PAIR_DATA | {"beta": 0.1}))
    assert found.recipe["train.objective"] == "dpo"
    assert any("train.objective = orpo" in note for note in found.notes)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"rl": "ipo", "rl_beta": 0.2}, {"objective": "ipo", "preference_beta": 0.2}),
        (
            {"rl": "dpo", "rpo_alpha": 0.5, "dpo_label_smoothing": 0.1},
            {"objective": "dpo", "sft_weight": 0.5, "preference_label_smoothing": 0.1},
        ),
        ({"rl": "orpo", "orpo_alpha": 0.3}, {"objective": "orpo", "preference_beta": 0.3}),
        (
            {"rl": "simpo", "simpo_gamma": 0.8, "rl_beta": 2.0},
            {
                "objective": "simpo",
                "simpo_gamma": 0.8,
                "preference_beta": 2.0,
                "sft_weight": 1.0,
            },
        ),
        (
            {"rl": "kto", "rl_beta": 0.3, "kto_undesirable_weight": 0.2},
            {"objective": "kto", "preference_beta": 0.3, "undesirable_weight": 0.2},
        ),
        (
            {"rl": "simpo", "cpo_alpha": 0.0},
            {"preference_beta": 0.1, "sft_weight": 0.0},
        ),
    ],
)
def test_axolotl_objective_is_translated(
    tmp_path: Path, options: dict[str, Any], expected: dict[str, Any]
) -> None:
    tree = {"base_model": "a/b", "datasets": [{"path": "a/c", "type": "chat_template.default"}]}
    found = translate(
        tmp_path, "a.yaml", json.dumps(tree | options | {"max_steps": 9, "save_steps": 9})
    )
    keys = {f"train.{name}": value for name, value in expected.items()}
    assert {key: found.recipe.get(key) for key in keys} == keys
    data = "unpaired" if options["rl"] == "kto" else "preferences"
    assert found.recipe["data.format"] == data
    assert found.unsupported == {}
    assert read_written(tmp_path, found)[2] == []


@pytest.mark.parametrize(
    "options",
    [
        {"num_generations": 4},
        {"desirable_weight": 4, "loss_type": "apo_zero_unpaired"},
        {"cpo_alpha": 4, "loss_type": "sigmoid"},
    ],
)
def test_trl_trainer_with_another_loss_is_refused(tmp_path: Path, options: dict[str, Any]) -> None:
    """GRPO and CPO have beta, too, and are no DPO."""
    with pytest.raises(InvalidConfig, match=[*options][-1]):
        translate(tmp_path, "a.json", json.dumps(SFT | {"beta": 0.1} | options))


def test_wsd_of_transformers_decays_after_warmup(tmp_path: Path) -> None:
    options = {"num_decay_steps": 30, "min_lr_ratio": 0.05, "decay_type": "linear"}
    tree = SFT | {"lr_scheduler_type": "warmup_stable_decay", "max_steps": 110, "warmup_steps": 10}
    found = translate(tmp_path, "a.json", json.dumps(tree | {"lr_scheduler_kwargs": options}))
    names = ("optim.schedule", "optim.decay_fraction", "optim.min_lr_ratio", "optim.warmup_steps")
    assert keys_of(found, *names) == ("wsd", 0.3, 0.05, 10)
    assert found.unsupported == {}
    # Its decay is a cosine by default.
    del options["decay_type"]
    found = translate(tmp_path, "a.json", json.dumps(tree | {"lr_scheduler_kwargs": options}))
    assert any("decay_type = cosine" in name for name in found.unsupported)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("lr_scheduler_kwargs", {"num_cycles": 2}),
        ("router_aux_loss_coef", 0.01),
        ("completion_only_loss", False),
        ("max_length", None),
        ("datasets", [{"path": "a/b", "data_files": "x.json"}]),
    ],
)
def test_trainer_value_that_weft_cannot_take_is_listed(
    tmp_path: Path, name: str, value: Any
) -> None:
    tree = SFT | {"lr_scheduler_type": "cosine", name: value}
    found = translate(tmp_path, "a.json", json.dumps(tree))
    assert any(entry.startswith(name) for entry in found.unsupported)
    assert "model.router_aux_loss_coef" not in found.recipe


def test_config_json_becomes_the_model_section(tmp_path: Path) -> None:
    tree = {"model_type": "llama", "hidden_size": 256, "intermediate_size": 640}
    tree["architectures"] = ["LlamaForCausalLM"]
    tree |= {"num_hidden_layers": 4, "num_attention_heads": 8, "vocab_size": 1000}
    found = translate(tmp_path, "config.json", json.dumps(tree))
    job = read_written(tmp_path, found)[0]
    assert job.model.kind == "llama"
    assert {**job.model.overrides()}.items() >= {
        "dim": 256,
        "num_layers": 4,
        "num_kv_heads": 8,
    }.items()


def read_written(directory: Path, found: Translation) -> Any:
    (directory / "out.toml").write_text(write_recipe(found, "x"))
    return read_job(str(directory / "out.toml"))


def test_every_key_has_a_source_in_a_comment(tmp_path: Path) -> None:
    for name, text in (("a.toml", TITAN), ("a.sh", MEGATRON), ("a.yaml", AXOLOTL)):
        written = write_recipe(translate(tmp_path, name, text), name)
        lines = [line for line in written.splitlines() if re.match(r"\w+ = ", line)]
        assert len(lines) > 15
        assert [line for line in lines if not re.search(r" # \S", line)] == []
        tomllib.loads(written)


# ----------------------------------------------------------------------- tables


def test_tables_name_keys_and_names_that_exist() -> None:
    tables, names = load_peer_configs(), load_peer_names()
    every = {*keys(), *(f"model.{name}" for name in DecoderConfig.model_fields)}
    assert set(names) <= every
    for program, table in tables.items():
        own = table.get("extends", program)
        known = {entry[own] for entry in names.values() if own in entry}
        assert set(table["same"]) - known == set(), program
        assert set(table["keys"].values()) <= every
        assert set(table["values"]) <= every
        assert set(table["harmless"]) <= set(table["unsupported"]), program
        both = set(table["ignored"]) & set(table["unsupported"])
        assert both == set(), program


def test_tables_of_torchtitan_models_name_presets() -> None:
    from weft.models import FAMILIES

    models = load_peer_configs()["torchtitan"]["models"]
    for program, flavors in models.items():
        for flavor, found in flavors.items():
            if program != "fields":
                kind, _, preset = found.partition("/")
                assert preset in FAMILIES[kind].presets, flavor


# ----------------------------------------------------------------------- commands


def test_recipe_from_writes_a_recipe_and_a_list(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.toml").write_text(TITAN)
    out = tmp_path / "mine.toml"
    options = ["recipe", "from", str(tmp_path / "a.toml"), "--cluster", "8x8xH100", "-o", str(out)]
    assert main(options) == 0
    shown = capsys.readouterr()
    assert "not translated: fault_tolerance.enable" in shown.err
    assert f"next: weft plan {out}" in shown.err
    assert 'cluster = "8x8xH100"' in out.read_text()


@pytest.mark.parametrize(
    ("name", "text", "program"),
    [
        ("a.toml", TITAN, "a TorchTitan configuration"),
        ("a.yaml", AXOLOTL, "an axolotl configuration"),
        ("a.sh", MEGATRON, "a Megatron-LM configuration"),
        ("a.json", json.dumps(DPO), "a Hugging Face configuration"),
    ],
)
@pytest.mark.parametrize("command", ["train", "plan"])
def test_command_of_a_foreign_file_names_the_translation(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    command: str,
    name: str,
    text: str,
    program: str,
) -> None:
    (tmp_path / name).write_text(text)
    assert main([command, str(tmp_path / name)]) == 2
    shown = capsys.readouterr().err
    assert "1 problem" in shown
    assert f"is {program}. Translate it: weft recipe from {tmp_path / name}" in shown


def test_section_of_torchtitan_names_weft_keys(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.toml").write_text("[lr_scheduler]\nwarmup_steps = 3\n")
    assert main(["plan", str(tmp_path / "a.toml")]) == 2
    assert "warmup_steps is optim.warmup_steps" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        ("args.bin", "x", "is a pickle"),
        ("train.py", "x = 1", "is a Python program"),
        ("a.toml", "[data]\nx = 1", "is not a configuration of a program"),
        ("a.yaml", "a: [", "cannot be read as YAML"),
        ("a.json", "[1]", "is not a configuration of a program"),
        ("a.txt", "hello", "is not a configuration of a program"),
    ],
)
def test_recipe_from_another_file_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, text: str, reason: str
) -> None:
    (tmp_path / name).write_text(text)
    assert main(["recipe", "from", str(tmp_path / name)]) == 2
    assert reason in capsys.readouterr().err


def test_selective_ac_option_is_not_every_n_layers(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "demo", "--activation_checkpoint.selective_ac_option", "op"]
    assert main(words) == 2
    assert "activation_checkpoint.mode = selective" in capsys.readouterr().err


SMALL_AXOLOTL = """
base_model: a/b
micro_batch_size: 2
gradient_accumulation_steps: 4
datasets: [{path: x/y, type: alpaca}]
sequence_len: 2048
"""


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ("", {"precision.compute_dtype": "auto", "train.seq_len": 2048}),
        ("fp16: true", {"precision.compute_dtype": "bfloat16"}),
        # 3 % of the steps, at most 100, and as an integer.
        ("max_steps: 1000", {"optim.warmup_steps": 30}),
        ("max_steps: 9000", {"optim.warmup_steps": 100}),
        ("max_steps: 1000\nwarmup_steps: 0", {"optim.warmup_steps": 0}),
        ("max_steps: 99\nwarmup_ratio: 0.05", {"optim.warmup_steps": 4}),
        ("max_steps: 9000\nwarmup_ratio: 0.05", {"optim.warmup_steps": 450}),
        ("weight_decay:\nadam_beta2:\nseed:", {"optim.weight_decay": 0.0, "train.seed": 42}),
        ("adam_beta2:", {"optim.beta2": 0.999}),
        # The other schedules have no such minimum.
        ("lr_scheduler: linear\ncosine_min_lr_ratio: 0.1", {"optim.min_lr_ratio": 0.0}),
        ("cosine_min_lr_ratio: 0.1", {"optim.min_lr_ratio": 0.1}),
    ],
)
def test_axolotl_defaults_are_those_of_axolotl(
    tmp_path: Path, lines: str, expected: dict[str, Any]
) -> None:
    found = translate(tmp_path, "a.yaml", SMALL_AXOLOTL + lines)
    assert {name: found.recipe.get(name) for name in expected} == expected


def test_axolotl_new_tokens_and_trained_tables_are_translated(tmp_path: Path) -> None:
    lines = """tokens: ["<tool>"]
special_tokens:
  additional_special_tokens: ["<|im_start|>", "<|im_end|>"]
resize_token_embeddings_to_32x: true
adapter: lora
lora_modules_to_save: [embed_tokens, lm_head]
"""
    found = translate(tmp_path, "a.yaml", SMALL_AXOLOTL + lines)
    assert found.recipe["data.add_tokens"] == ["<tool>"]
    assert found.recipe["data.add_special_tokens"] == ["<|im_start|>", "<|im_end|>"]
    assert found.recipe["lora.modules_to_save"] == ["embed_tokens", "lm_head"]
    assert not [name for name in found.unsupported if "token" in name or "modules" in name]
    assert "resize_token_embeddings_to_32x" in found.ignored
    other = translate(tmp_path, "b.yaml", SMALL_AXOLOTL + lines.replace("lm_head", "q_proj"))
    assert "lora.modules_to_save" not in other.recipe
    assert any("modules_to_save" in name for name in other.unsupported)


def test_axolotl_notes_what_trains_on_other_tokens(tmp_path: Path) -> None:
    notes = " ".join(translate(tmp_path, "a.yaml", SMALL_AXOLOTL).notes)
    assert "### Instruction" in notes
    assert "holds out 5%" in notes
    assert "counts conversations" in notes


def test_axolotl_options_of_a_dataset_with_the_values_of_weft_are_fine(tmp_path: Path) -> None:
    options = "field_messages: messages, roles_to_train: [assistant], train_on_eos: turn"
    text = SMALL_AXOLOTL.replace("type: alpaca", f"type: chat_template, {options}")
    found = translate(tmp_path, "a.yaml", text)
    assert not any(name.startswith("datasets") for name in found.unsupported)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ("type: sharegpt", {}),
        ("type: chat_template, field_messages: conversations, message_field_role: from", {}),
        (
            "type: chat_template, field_messages: dialog, "
            "message_property_mappings: {role: speaker, content: said}, "
            "roles: {user: [human, client], assistant: [gpt, agent]}",
            {
                "data.fields": {"messages": "dialog", "role": "speaker", "content": "said"},
                "data.roles": {"client": "user", "agent": "assistant"},
            },
        ),
        (
            "type: {field_instruction: q, field_output: a, field_system: system}",
            {"data.fields": {"prompt": "q", "response": "a"}},
        ),
    ],
)
def test_axolotl_names_of_rows_are_fields_and_roles(
    options: str, expected: dict[str, Any], tmp_path: Path
) -> None:
    text = SMALL_AXOLOTL.replace("type: alpaca", options)
    found = translate(tmp_path, "a.yaml", text)
    assert not any(name.startswith("datasets") for name in found.unsupported)
    names = ("data.fields", "data.roles")
    assert {n: found.recipe[n] for n in names if n in found.recipe} == expected
    assert read_written(tmp_path, found)[2] == []


def test_axolotl_length_without_sequence_len_is_512(tmp_path: Path) -> None:
    text = SMALL_AXOLOTL.replace("sequence_len: 2048", "")
    assert keys_of(translate(tmp_path, "a.yaml", text), "train.seq_len") == (512,)


@pytest.mark.parametrize(
    "line",
    [
        "chat_template: chatml",
        "special_tokens: {eos_token: x}",
        "peft_layers_to_transform: [0, 1]",
        "lora_rank_pattern: {q_proj: 4}",
        "default_system_message: Be kind.",
        "s2_attention: true",
        "datasets: [{path: x/y, type: chat_template, roles_to_train: [user]}]",
        "datasets: [{path: x/y, data_files: [a.json], type: alpaca}]",
        "datasets: [{path: x/y, type: alpaca}, {path: x/z, type: completion}]",
    ],
)
def test_axolotl_value_that_weft_cannot_take_is_listed(tmp_path: Path, line: str) -> None:
    name = line.partition(":")[0]
    kept = [text for text in SMALL_AXOLOTL.splitlines() if not text.startswith(f"{name}:")]
    found = translate(tmp_path, "a.yaml", "\n".join([*kept, "adapter: lora", line]))
    assert any(entry.startswith(name) for entry in found.unsupported)


@pytest.mark.parametrize("line", ["rl: grpo", "process_reward_model: true"])
def test_axolotl_with_another_loss_is_refused(tmp_path: Path, line: str) -> None:
    with pytest.raises(InvalidConfig, match="a loss that weft does not have"):
        translate(tmp_path, "a.yaml", SMALL_AXOLOTL + line)


def test_axolotl_files_of_a_dataset_are_all_read(tmp_path: Path) -> None:
    text = SMALL_AXOLOTL.replace(
        "{path: x/y, type: alpaca}", "{path: json, data_files: [./a.json, ./b.json], type: alpaca}"
    )
    found = translate(tmp_path, "a.yaml", text)
    assert list(found.recipe["data.mixture"]) == ["./a.json", "./b.json"]
    assert any("counts conversations" in note for note in found.notes)


@pytest.mark.parametrize(
    "line",
    [
        "micro_batch_size: no-number",
        "gradient_accumulation_steps: [1]",
        "num_epochs: many",
        "save_steps: .inf",
        "datasets: 3",
        "plugins: 3",
        "lora_target_modules: [null]",
        "warmup_steps: .nan",
    ],
)
def test_value_of_a_wrong_type_is_listed_as_not_translated(line: str, tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    name = line.partition(":")[0]
    kept = [text for text in SMALL_AXOLOTL.splitlines() if not text.startswith(f"{name}:")]
    file.write_text("\n".join([*kept, "adapter: lora", line]))
    translation = translate_file(file)
    assert any(entry.startswith(f"{name} = ") for entry in translation.unsupported)
    tomllib.loads(write_recipe(translation, file.name))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("a0: &a0 [x]\n", "it has more than 100,000 values"),
        ("a: &a [*a]\n", "it is nested too deeply"),
    ],
)
def test_yaml_of_hostile_aliases_is_refused(text: str, reason: str, tmp_path: Path) -> None:
    if "a0" in text:
        text += "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 12))
    file = tmp_path / "config.yaml"
    file.write_text(SMALL_AXOLOTL + text)
    with pytest.raises(InvalidConfig, match=reason):
        translate_file(file)


def test_name_with_a_newline_adds_no_line_to_the_recipe(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    paths = {"id": "a/b\n[run]\nname = 1"}
    tree = {"per_device_train_batch_size": 2, "learning_rate": 1e-4, "output_dir": "x"}
    tree |= {"gradient_accumulation_steps": 2, "num_train_epochs": 1, "lr_scheduler_type": "linear"}
    file.write_text(json.dumps(tree | {"x\n[run]": 1, "datasets": [paths]}))
    recipe = tomllib.loads(write_recipe(translate_file(file), "a\n[b]"))
    assert "name" not in recipe["run"]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"load_best_model_at_end": True}, ("eval_loss", None)),
        ({"load_best_model_at_end": False, "metric_for_best_model": "loss"}, (None, None)),
        (
            {"load_best_model_at_end": True, "metric_for_best_model": "eval_rewards/accuracies"},
            ("reward_accuracy", None),
        ),
        (
            {
                "load_best_model_at_end": True,
                "metric_for_best_model": "eval_loss",
                "greater_is_better": False,
            },
            ("eval_loss", None),
        ),
        (
            {
                "load_best_model_at_end": True,
                "metric_for_best_model": "rewards/rejected",
                "greater_is_better": False,
            },
            ("reward_rejected", None),
        ),
        (  # in transformers, higher is better for all names but those of losses
            {"load_best_model_at_end": True, "metric_for_best_model": "rewards/rejected"},
            ("reward_rejected", "max"),
        ),
    ],
)
def test_best_model_of_transformers_is_converted(
    fields: dict[str, Any], expected: tuple[str | None, str | None], tmp_path: Path
) -> None:
    found = translate(tmp_path, "a.json", json.dumps(DPO | fields))
    assert (found.recipe.get("checkpoint.best"), found.recipe.get("checkpoint.best_mode")) == (
        expected
    )
    assert not [name for name in found.unsupported if "best" in name]


def test_best_model_of_an_unknown_metric_is_unsupported(tmp_path: Path) -> None:
    fields = {"load_best_model_at_end": True, "metric_for_best_model": "accuracy"}
    found = translate(tmp_path, "a.json", json.dumps(DPO | fields))
    assert found.recipe.get("checkpoint.best") is None
    assert any("metric_for_best_model" in name for name in found.unsupported)


def deepspeed(directory: Path, changes: dict[str, Any], cluster: Any = None) -> Translation:
    return translate(directory, "ds.json", json.dumps(DEEPSPEED | changes), cluster)


def test_deepspeed_values_are_converted_and_planned(tmp_path: Path) -> None:
    found = deepspeed(tmp_path, {})
    assert keys_of(found, "run.cluster", "train.global_batch_size", "train.microbatch_size") == (
        *("1x8xH100", 64, 2),
    )
    assert keys_of(found, "optim.name", "optim.beta2", "optim.eps", "optim.weight_decay") == (
        *("adamw", 0.98, 1e-9, 0.05),
    )
    # The schedule's peak replaces the learning rate of the optimizer, and it decays to 0.
    assert keys_of(found, "optim.lr", "optim.schedule", "optim.min_lr_ratio") == (3e-4, "linear", 0)
    assert keys_of(found, "optim.warmup_steps", "train.steps", "optim.max_grad_norm") == (
        *(40, 500, 0.5),
    )
    assert keys_of(found, "parallel.cpu_offload", "parallel.param_persistence_threshold") == (
        *(True, 100_000),
    )
    assert keys_of(found, "activation_checkpoint.mode", "activation_checkpoint.offload") == (
        *("full", True),
    )
    assert keys_of(found, "monitor.trackers", "monitor.log_interval") == (["wandb"], 100)
    assert found.recipe["precision.compute_dtype"] == "bfloat16"
    lacking = " ".join(found.unsupported)
    assert "zero_quantized_weights" in lacking
    assert "warmup_type = log" in lacking  # the default of DeepSpeed
    assert len(found.unsupported) == 2
    found.recipe["model.path"] = ""
    assert plan(tmp_path, found).dp_shard == 8


@pytest.mark.parametrize(
    ("stage", "expected"),
    [
        (0, (None, None, 1, 8)),
        (1, ("never", "step", None, None)),
        (2, ("never", "microbatch", None, None)),
        (3, ("always", "microbatch", None, None)),
    ],
)
def test_deepspeed_stage_is_a_layout(
    tmp_path: Path, stage: int, expected: tuple[object, ...]
) -> None:
    found = deepspeed(tmp_path, {"zero_optimization": {"stage": stage}})
    names = ("reshard_after_forward", "gradient_sync", "dp_shard", "dp_replicate")
    assert keys_of(found, *(f"parallel.{name}" for name in names)) == expected
    found.recipe["model.path"] = ""
    assert plan(tmp_path, found).world_size == 8


def test_deepspeed_groups_and_degrees_are_converted(tmp_path: Path) -> None:
    zero = {"stage": 3, "zero_hpz_partition_size": 4}
    found = deepspeed(tmp_path, {"zero_optimization": zero, "sequence_parallel_size": 2})
    assert keys_of(found, "parallel.reshard_after_forward", "parallel.cp_method") == (
        *(4, "ulysses"),
    )
    assert found.recipe["run.cluster"] == "2x8xH100"  # 8 data-parallel ranks x 2
    zero = {"stage": 3, "mics_shard_size": 4}
    found = deepspeed(tmp_path, {"zero_optimization": zero}, (2, 8, "H100"))
    assert keys_of(found, "parallel.dp_shard", "parallel.dp_replicate") == (4, 4)


def test_deepspeed_auto_values_are_left_to_the_trainer(tmp_path: Path) -> None:
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    changes: dict[str, Any] = dict.fromkeys((*names, "gradient_clipping"), "auto")
    changes |= {"bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto"}}
    changes["optimizer"] = {
        "type": "AdamW",
        "params": dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto"),
    }
    params = ("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "warmup_type")
    changes["scheduler"] = {"type": "WarmupLR", "params": dict.fromkeys(params, "auto")}
    found = deepspeed(tmp_path, changes)
    absent = ("optim.lr", "optim.beta1", "optim.weight_decay", "optim.warmup_steps")
    absent += ("precision.compute_dtype", "train.global_batch_size", "optim.max_grad_norm")
    assert keys_of(found, *absent) == (None,) * len(absent)
    assert [name for name in found.unsupported if "auto" in name] == []
    assert any('14 values are "auto"' in note for note in found.notes)


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"fp16": {"enabled": True, "initial_scale_power": 16}, "bf16": {}}, "fp16.enabled"),
        ({"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}}, "device = nvme"),
        ({"optimizer": {"type": "OneBitAdam", "params": {"lr": 1e-3}}}, "OneBitAdam"),
        ({"optimizer": {"type": "Adam", "params": {"adam_w_mode": False}}}, "adam_w_mode"),
        ({"scheduler": {"type": "OneCycle", "params": {"cycle_min_lr": 1e-5}}}, "OneCycle"),
        ({"curriculum_learning": {"enabled": True}}, "curriculum_learning"),
        ({"train_batch_size": "many"}, "train_batch_size"),
        ({"zero_optimization": {"stage": "three"}}, "zero_optimization.stage"),
        ({"zero_optimization": {"stage": 4}}, "zero_optimization.stage"),
        ({"zero_optimization": True}, "zero_optimization"),
        ({"optimizer": {"type": "AdamW", "params": {"betas": 0.9}}}, "betas"),
        ({"pipeline": {"stages": "auto", "partition": "best"}}, "pipeline.partition"),
    ],
)
def test_deepspeed_value_that_weft_cannot_take_is_listed(
    tmp_path: Path, changes: dict[str, Any], name: str
) -> None:
    found = deepspeed(tmp_path, changes)
    assert any(name in entry for entry in found.unsupported), found.unsupported


def test_smp_parameters_are_converted_and_planned(tmp_path: Path) -> None:
    parameters = {
        "hybrid_shard_degree": 8,
        "tensor_parallel_degree": 2,
        "context_parallel_degree": 2,
        "expert_parallel_degree": 1,
        "sm_activation_offloading": True,
        "activation_loading_horizon": 3,
        "fsdp_cache_flush_warnings": True,
        "random_seed": 12345,
    }
    wrapped: dict[str, Any] = {"modelparallel": {"enabled": True, "parameters": parameters}}
    estimator = {"torch_distributed": {"enabled": True}, "smdistributed": wrapped}
    for tree in (parameters, {"distribution": estimator}, estimator):
        found = translate(tmp_path, "smp.json", json.dumps(tree), (4, 8, "H100"))
        degrees = ("dp_replicate", "dp_shard", "cp", "tp")
        assert keys_of(found, *(f"parallel.{each}" for each in degrees)) == (2, 4, 2, 2)
        names = ("mode", "offload", "offload_prefetch")
        values = ("full", True, 2)
        assert keys_of(found, *(f"activation_checkpoint.{name}" for name in names)) == values
        assert found.unsupported == {}
        found.recipe["model.path"] = ""
        assert plan(tmp_path, found).world_size == 32


def test_smp_without_a_shard_degree_shards_over_all_ranks(tmp_path: Path) -> None:
    found = translate(tmp_path, "smp.json", '{"hybrid_shard_degree": 0}')
    assert keys_of(found, "parallel.dp_shard", "run.cluster") == ("auto", "1x8xH100")
    assert any("--cluster" in note for note in found.notes)
    assert "activation_checkpoint.mode" not in found.recipe


def test_smp_degrees_that_do_not_divide_the_cluster_are_refused(tmp_path: Path) -> None:
    text = '{"hybrid_shard_degree": 8, "tensor_parallel_degree": 3}'
    with pytest.raises(InvalidConfig, match="not divisible"):
        translate(tmp_path, "smp.json", text, (2, 8, "H100"))
