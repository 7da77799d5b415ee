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
from weft.models.decoder_config import DecoderConfig
from weft.plan.plan import Machine, Plan
from weft.plan.plan_text import plan_recipe
from weft.tools.recipe_translation import Translation, translate_file, write_recipe

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
    "loss_type": ["ipo"],
    "max_length": 512,
    "bf16": True,
    "eval_strategy": "steps",
    "eval_steps": 0.25,
    "hub_model_id": "me/mine",
    "report_to": ["wandb", "codecarbon"],
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


def test_torchtitan_weight_decay_remedy_decays_all_weights(tmp_path: Path) -> None:
    found = translate(tmp_path, "a.toml", TITAN, (8, 8, "H100"))
    (note,) = [note for note in found.notes if "decays all weights" in note]
    assert 'params = ["*"] and weight_decay = 0.1' in note
    group = '\n[[optim.groups]]\nparams = ["*"]\nweight_decay = 0.1\n'
    (tmp_path / "b.toml").write_text(write_recipe(found, "x") + group)
    planned, _ = plan_recipe(str(tmp_path / "b.toml"), [], [], None, no_machine)
    assert planned.job.optim.groups[0].weight_decay == 0.1


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
    assert any("early_stopping_patience" in name for name in found.unsupported)
    job, _, errors = read_written(tmp_path, found)
    assert errors == []
    assert job.data.mixture == mixture
    assert job.model.path == "MODEL"


def test_trl_dpo_values_are_converted(tmp_path: Path) -> None:
    found = translate(tmp_path, "a.json", json.dumps(DPO))
    names = ("train.objective", "train.dpo_beta", "data.format", "data.path", "train.seq_len")
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
        known = {entry[program] for entry in names.values() if program in entry}
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
