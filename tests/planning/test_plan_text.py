"""Text of `weft plan`, and the shipped recipes on their clusters."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from weft.config.errors import InvalidConfig
from weft.config.files import write_json
from weft.config.reader import read_job, recipe_names
from weft.config.schema import Job, RunSection
from weft.models import FAMILIES
from weft.models.hf_mapping import SCORE_HEAD, to_hf_config
from weft.planning.model_config import resolve_model
from weft.planning.plan import Machine, Plan
from weft.planning.plan_text import (
    describe_plan,
    estimate_memory_bytes,
    format_placement,
    format_stages,
    plan_recipe,
    run_title,
)

GIB = 2**30
LAPTOP = Machine("cpu", devices=2, memory_bytes=16 * GIB)


def planned(
    recipe: str, *overrides: tuple[str, str], cluster: str | None = None
) -> tuple[Job, Plan, Machine]:
    plan, machine = plan_recipe(recipe, overrides, [], cluster, lambda device: LAPTOP)
    return plan.job, plan, machine


def screen(recipe: str, *overrides: tuple[str, str], cluster: str | None = None) -> list[str]:
    _, plan, machine = planned(recipe, *overrides, cluster=cluster)
    return describe_plan(plan, machine, recipe).splitlines()


# --------------------------------------------------------------------------- recipes

# Published values: ranks, tp, cp, pp, data-parallel ranks, sequences and tokens per step.
PUBLISHED = {
    "llama3-8b": (128, 1, 1, 1, 128, 512, 8192),
    "llama3-8b-8gpu": (8, 1, 1, 1, 8, 16, 8192),
    "llama3-70b": (256, 1, 1, 1, 256, 512, 8192),
    "llama3-405b": (512, 4, 1, 1, 128, 256, 8192),
    "llama3-405b-131k": (512, 8, 4, 1, 16, 16, 131072),
    "paper/llama3-8b": (128, 1, 1, 1, 128, 512, 8192),
    "paper/llama3-8b-compile": (128, 1, 1, 1, 128, 512, 8192),
    "paper/llama3-8b-float8": (128, 1, 1, 1, 128, 512, 8192),
    "paper/llama3-8b-8gpu": (8, 1, 1, 1, 8, 16, 8192),
    "paper/llama3-8b-8gpu-compile": (8, 1, 1, 1, 8, 16, 8192),
    "paper/llama3-8b-8gpu-float8": (8, 1, 1, 1, 8, 16, 8192),
    "paper/llama3-70b": (256, 8, 1, 1, 32, 512, 8192),
    "paper/llama3-70b-float8": (256, 8, 1, 1, 32, 512, 8192),
    "paper/llama3-70b-async-tp": (256, 8, 1, 1, 32, 512, 8192),
    "paper/llama3-405b": (512, 8, 1, 8, 8, 256, 8192),
    "paper/llama3-405b-float8": (512, 8, 1, 8, 8, 256, 8192),
    "paper/llama3-405b-1f1b": (512, 8, 1, 8, 8, 256, 8192),
    "paper/llama3-405b-4d-32k": (512, 8, 1, 8, 8, 64, 32768),
    "paper/llama3-405b-4d-65k": (512, 8, 2, 8, 4, 32, 65536),
    "paper/llama3-405b-4d-131k": (512, 8, 4, 8, 2, 16, 131072),
    "paper/llama3-405b-4d-262k": (512, 8, 8, 8, 1, 8, 262144),
    "paper/llama3-405b-16k": (16384, 8, 1, 16, 128, 16 * 128, 8192),
    "paper/llama3-405b-128k": (16384, 8, 16, 16, 8, 16 * 8, 131072),
    "three-servers": (96, 4, 1, 6, 4, 512, 8192),
}
PARAMETERS = {"8b": 8_030_261_248, "70b": 70_553_706_496, "405b": 405_853_388_800}


@pytest.mark.parametrize("recipe", PUBLISHED)
def test_plan_recipe_on_its_cluster_has_the_published_layout(recipe: str) -> None:
    job, plan, machine = planned(recipe)
    result = (plan.world_size, plan.tp, plan.cp, plan.pp, plan.dp_size)
    assert (*result, job.train.global_batch_size, job.train.seq_len) == PUBLISHED[recipe]
    assert plan.local_world_size == machine.devices == 8
    assert plan.num_params == PARAMETERS[job.model.preset]
    assert plan.compute_dtype == "bfloat16"
    assert plan.warnings == ()
    rates = {"8b": 3e-4, "70b": 1.5e-4, "405b": 8e-5}  # Llama 3, table 3
    assert (job.optim.lr, job.optim.schedule) == (rates[job.model.preset], "cosine")


def test_plan_mics_recipes_have_the_published_replicas() -> None:
    """Replicas have 128 ranks as in BloombergGPT; a layer has 12 * dim**2 parameters."""
    plan = planned("mics-50b")[1]
    assert (plan.world_size, plan.dp_replicate, plan.dp_shard) == (512, 4, 128)
    assert plan.num_params == pytest.approx(70 * 12 * 7680**2 + 2 * 131072 * 7680, rel=1e-3)
    plan = planned("mics-1t")[1]
    assert (plan.world_size, plan.dp_replicate, plan.dp_shard, plan.tp) == (1024, 2, 128, 4)
    assert plan.num_params == pytest.approx(1.057e12, rel=3e-3)


def test_plan_fine_tuning_recipe_is_for_one_server() -> None:
    job, plan, _ = planned("llama3-8b-finetune")
    assert (plan.world_size, plan.dp_shard) == (8, 8)
    assert job.optim.lr < planned("paper/llama3-8b")[0].optim.lr / 10
    assert job.data.packing == "documents"


def test_plan_lora_recipes_train_adapters_of_the_same_model() -> None:
    full, lora, qlora = (planned(f"llama3-8b-{kind}")[1] for kind in ("finetune", "lora", "qlora"))
    assert lora.model == qlora.model == full.model
    assert lora.num_trainable_params == qlora.num_trainable_params < full.num_trainable_params / 100
    assert 0.6 < lora.flops_per_token / full.flops_per_token < 0.8
    assert (lora.world_size, qlora.world_size) == (8, 1)


@pytest.mark.parametrize(
    ("recipe", "tokens", "world_size"),
    [
        ("stories-30m", 458_752_000, 1),
        ("llama-124m", 20 * 123_587_328, 1),
        ("llama-350m", 20 * 350_405_632, 8),
        ("llama3-1b", 20 * 1_235_814_400, 8),
        ("llama3-3b", 20 * 3_212_749_824, 16),
    ],
)
def test_plan_small_recipes_have_twenty_tokens_per_parameter(
    recipe: str, tokens: int, world_size: int
) -> None:
    """The one for stories has an epoch of its text."""
    _, plan, _ = planned(recipe)
    assert plan.num_steps * plan.tokens_per_step == pytest.approx(tokens, rel=0.03)
    assert plan.world_size == world_size


# Recipes that tune a published model: family, preset, ranks.
TUNED = {
    "llama3-1b-finetune": ("llama", "1b", 1),
    "llama3-3b-finetune": ("llama", "3b", 1),
    "llama3-3b-lora": ("llama", "3b", 1),
    "llama3-70b-lora": ("llama", "70b", 8),
    "qwen3-0.6b-finetune": ("qwen3", "0.6b", 1),
    "qwen3-4b-finetune": ("qwen3", "4b", 1),
    "qwen3-4b-lora": ("qwen3", "4b", 1),
    "qwen3-8b-finetune": ("qwen3", "8b", 8),
    "qwen3-8b-lora": ("qwen3", "8b", 1),
    "qwen3-14b-finetune": ("qwen3", "14b", 8),
    "qwen3-14b-lora": ("qwen3", "14b", 1),
    "qwen3-32b-finetune": ("qwen3", "32b", 16),
    "qwen3-32b-lora": ("qwen3", "32b", 8),
    "qwen3-30b-a3b-finetune": ("qwen3_moe", "30b-a3b", 16),
    "qwen3-30b-a3b-lora": ("qwen3_moe", "30b-a3b", 8),
    "gemma3-4b-lora": ("gemma3", "4b", 1),
    "gemma3-12b-finetune": ("gemma3", "12b", 8),
    "gemma3-27b-lora": ("gemma3", "27b", 8),
    "gpt-oss-20b-finetune": ("gpt_oss", "20b", 8),
    "gpt-oss-20b-lora": ("gpt_oss", "20b", 1),
    "gpt-oss-120b-finetune": ("gpt_oss", "120b", 64),
    "gpt-oss-120b-lora": ("gpt_oss", "120b", 8),
    "deepseek-v3-671b-lora": ("deepseek_v3", "671b", 32),
}
# And those that pre-train the shape of a published model.
SHAPED = {
    "qwen3-235b-a22b": ("qwen3_moe", "235b-a22b", 256),
    "deepseek-v3-671b": ("deepseek_v3", "671b", 2048),
    "olmo2-7b": ("olmo2", "7b", 128),
    "olmo3-7b": ("olmo3", "7b", 128),
}


@pytest.mark.parametrize("recipe", TUNED | SHAPED)
def test_plan_recipe_of_a_published_model_is_for_its_gpus(recipe: str) -> None:
    job, plan, _ = planned(recipe)
    section = job.model
    assert (section.kind, section.preset, plan.world_size) == (TUNED | SHAPED)[recipe]
    trained = plan.num_trainable_params / plan.num_params
    most = 0.03 if plan.model.num_experts else 0.01  # each expert has adapters
    assert trained < most if recipe.endswith("-lora") else trained == 1
    assert plan.warnings == ()
    if recipe in TUNED:  # model.path is accepted only beside a preset without other keys
        assert not section.overrides()
        assert job.data.format == "chat"


def test_every_recipe_is_tested() -> None:
    rest = {"demo", "three-servers-small", "mics-50b", "mics-1t"}
    rest |= {"moe-demo", "qwen3-30b-a3b", "stories-30m", "llama-124m", "llama-350m"}
    rest |= {"llama3-1b", "llama3-3b"}
    tuned = {"llama3-8b-finetune", "llama3-8b-chat", "llama3-8b-lora", "llama3-8b-qlora"}
    expected = {*PUBLISHED, *rest, *tuned, *TUNED, *SHAPED, *ANY_MODEL}
    assert expected == set(recipe_names())


@pytest.mark.parametrize(
    ("recipe", "title", "directory"),
    [
        ("paper/llama3-8b-8gpu", "paper/llama3-8b-8gpu", "paper-llama3-8b-8gpu"),
        ("llama3-8b-8gpu", "llama3-8b-8gpu", "llama3-8b-8gpu"),
        ("qwen3-0.6b-finetune", "qwen3-0.6b-finetune", "qwen3-0.6b-finetune"),
    ],
)
def test_plan_recipe_with_a_slash_or_a_dot_has_its_full_name(
    recipe: str, title: str, directory: str
) -> None:
    """Else two recipes would share a run directory."""
    _, plan, machine = planned(recipe)
    assert Path(plan.run_dir) == Path.cwd() / "runs" / directory
    assert describe_plan(plan, machine, recipe).startswith(f"{title} on ")
    assert run_title(plan, recipe) == title


def test_read_recipe_extends_one_with_a_slash(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('extends = "paper/llama3-8b-8gpu"\n')
    job, _, errors = read_job(str(path))
    assert errors == []
    assert job == read_job("paper/llama3-8b-8gpu")[0]


ANY_MODEL = ("chat", "dpo", "lora", "pretrain", "qlora", "reward")


@pytest.mark.parametrize("recipe", ANY_MODEL)
def test_plan_recipe_of_any_model_takes_the_model_of_the_path(recipe: str, tmp_path: Path) -> None:
    """It reads config.json only: there are neither weights nor a tokenizer."""
    config = resolve_model("qwen3", "0.6b", {"max_seq_len": 512})[0]
    family = FAMILIES["qwen3"]
    path = tmp_path / "org" / "Tiny-Qwen"
    path.mkdir(parents=True)
    write_json(path / "config.json", to_hf_config(family, config, "bfloat16"))

    def plan(*overrides: tuple[str, str]) -> Plan:
        return plan_recipe(recipe, overrides, [], None, lambda device: Machine("cpu", 2))[0]

    made = plan(("model.path", str(path)))
    if recipe == "reward":
        config = config.model_copy(update=SCORE_HEAD)
    assert (made.model, made.job.model.kind, made.seq_len) == (config, "qwen3", 512)
    assert made.job.data.tokenizer == str(path / "tokenizer.json")
    assert made.run_path.name == f"Tiny-Qwen-{recipe}"
    assert made.num_steps == 0
    assert [w for w in made.warnings if "no effect" in w or "warm-up" in w] == []
    assert (made.lora_rank, made.job.lora.quantize) == {
        "lora": (16, "none"),
        "qlora": (16, "nf4"),
    }.get(recipe, (0, "none"))
    text = describe_plan(made, Machine("cpu", 2), recipe)
    assert "Tiny-Qwen (qwen3): " in text
    assert "the data decide the number of steps" in text
    steps = plan(("model.path", str(path)), ("train.steps", "7"), ("train.seq_len", "256"))
    assert (steps.num_steps, steps.seq_len) == (7, 256)
    for overrides, key in (
        ([], "model.path"),
        ([("model.path", str(path / "no"))], "model.path"),
        ([("model.path", str(path)), ("model.num_layers", "2")], "model.num_layers"),
        ([("model.path", str(path)), ("train.seq_len", "513")], "train.seq_len"),
    ):
        with pytest.raises(InvalidConfig) as caught:
            plan(*overrides)
        assert [error.key for error in caught.value.errors] == [key]


@pytest.mark.parametrize("nodes", [1, 16, 32])
def test_plan_8b_shards_over_all_servers(nodes: int) -> None:
    plan = planned("paper/llama3-8b", cluster=f"{nodes}x8xH100")[1]
    assert plan.dp_shard == plan.world_size == 8 * nodes


def test_plan_16k_replicas_fit_into_a_pod() -> None:
    """A replica is 2,048 neighboring ranks, and 16 ranks shard its state."""
    for recipe in ("paper/llama3-405b-16k", "paper/llama3-405b-128k"):
        plan = planned(recipe)[1]
        assert plan.axis_order[0] == "dp_replicate"
        assert plan.world_size // plan.dp_replicate == 2048
        assert plan.dp_shard * plan.cp == 16
        assert plan.pipeline is not None
        assert [stage.num_blocks for stage in plan.pipeline.stages] == [0, *[1] * 126, 0]


def test_plan_three_servers_small_has_the_layout_of_three_servers() -> None:
    """The small recipe has the layout of the large one, with one replica."""
    large, small = planned("three-servers")[1], planned("three-servers-small")[1]
    assert large.axis_sizes == small.axis_sizes | {"dp_replicate": 4}
    assert (small.world_size, small.device) == (24, "cpu")
    axes = [
        axis for axis in large.axis_order if axis != "dp_replicate"
    ]  # the small recipe has one replica
    assert [axis for axis in small.axis_order if axis != "dp_replicate"] == axes
    assert small.num_params < 2e6


# --------------------------------------------------------------------------- summary


def test_describe_plan_of_405b_has_layout_and_stages() -> None:
    lines = screen("paper/llama3-405b")
    text = "\n".join(lines)
    assert lines[0] == "paper/llama3-405b on 64 nodes of 8 H100"
    for expected in (
        "model      llama-405b: 405,853,388,800 parameters",
        "pp 8 x dp_shard 8 x tp 8 = 512 ranks, outermost first (pipeline-outer)",
        "256 sequences of 8,192 tokens: 2,097,152 tokens per step",
        "32 sequences for each of 8 data-parallel ranks, in 32 microbatches of 1",
        "Interleaved1F1B, 16 stages on 8 ranks",
        "parameters over 8 ranks, gathered parameters kept for the step",
        "   15     7  layers 119-125 + head ",
        "slowest rank: 1, 1.1% above the mean",
    ):
        assert expected in text, expected
    assert not any(line.startswith("warning") for line in lines)
    assert max(map(len, lines)) < 110


@pytest.mark.parametrize(
    ("recipe", "overrides", "message"),
    [
        ("paper/llama3-8b", [("parallel.dp_shard", "128")], "dp_shard 128 = 128 ranks\n"),
        (
            "paper/llama3-8b",
            [("train.microbatch_size", "3")],
            "2 microbatches of 3 (the last of 1)\n",
        ),
        (
            "paper/llama3-8b",
            [("train.microbatch_size", "auto")],
            "4 sequences for each of 128 data-parallel ",
        ),
        ("paper/llama3-8b", [("train.microbatch_size", "auto")], "ranks, at once\n"),
        (
            "paper/llama3-8b",
            [("parallel.reshard_after_forward", "8")],
            "resharded over 8 ranks after forward",
        ),
        (
            "paper/llama3-8b",
            [],
            "gathered parameters freed after forward; gradients reduced once per microbatch\n",
        ),
        ("paper/llama3-8b", [("model.dim", "2048")], "llama-8b with dim 2048: "),
        ("paper/llama3-405b-128k", [], "parameters over 16 ranks (dp_shard 1 x cp 16)"),
        ("three-servers", [], "none: every rank holds its part of the model unsharded\n"),
        ("three-servers-small", [], "three-servers-small on 24 CPU processes\n"),
        ("demo", [("run.nproc_per_node", "1")], "demo on 1 CPU process\n"),
        ("demo", [("run.nproc_per_node", "1")], "layout     one rank\n"),
        ("demo", [], "recompute  nothing (no activation checkpointing)\n"),
        ("demo", [("activation_checkpoint.mode", "full")], "recompute  every block (full)\n"),
        (
            "demo",
            [
                ("activation_checkpoint.mode", "selective"),
                ("activation_checkpoint.every_n_layers", "2"),
                ("activation_checkpoint.offload", "true"),
            ],
            "cheap operators and 1 of 2 matmuls of 1 of 2 blocks (selective); saved activations",
        ),
        ("demo", [("run.nproc_per_node", "1")], "8 sequences for every rank, at once\n"),
    ],
)
def test_describe_plan_lines_follow_the_keys(
    recipe: str, overrides: list[tuple[str, str]], message: str
) -> None:
    assert message in "\n".join(screen(recipe, *overrides)) + "\n"


def test_warnings_are_shown() -> None:
    lines = screen("paper/llama3-70b", ("parallel.tp", "16"), ("parallel.dp_shard", "16"))
    (warning,) = [line for line in lines if line.startswith("warning: ")]
    assert "parallel.tp=16: the group of ranks 0-15 spans 2 nodes of 8" in warning


def test_describe_plan_long_table_omits_the_middle() -> None:
    lines = screen("paper/llama3-405b-16k")
    assert any(re.fullmatch(r"\.\.\. 104 more \.\.\.", line) for line in lines)
    stages = [int(m[1]) for line in lines if (m := re.match(r" +(\d+) +\d+  \S+", line))]
    assert stages[:24] == [*range(12), *range(116, 128)]
    assert any(line.startswith("  15  15, 31, 47,") for line in lines)


# --------------------------------------------------------------------------- memory


def test_memory_bytes_are_those_counted_by_hand() -> None:
    """Compare a fully sharded layout with a sum of sizes."""
    _job, plan, _ = planned("paper/llama3-70b", ("train.microbatch_size", "1"))
    dim, kv, ffn, vocab, tokens = 8192, 1024, 28672, 128256, 8192
    states = 16 * PARAMETERS["70b"] / 256
    block = 2 * dim * dim + 2 * dim * kv + 3 * dim * ffn + 2 * dim
    gathered = 4 * 2 * max(block, vocab * dim + dim) / 8
    of_block = 16 * dim + 6 * dim + 4 * kv + 8 * ffn
    activations = (2 * dim + 80 * of_block + 8 * dim + 10 * vocab) / 8 * tokens
    assert estimate_memory_bytes(plan) == pytest.approx(states + gathered + activations, rel=1e-6)


def test_memory_of_a_pipeline_is_its_fullest_rank() -> None:
    """The prediction is the fullest rank's stages plus the weights gathered at once."""
    _job, plan, _ = planned("paper/llama3-405b")
    assert plan.pipeline is not None
    stages = plan.pipeline.stages
    loop = [[stages[rank], stages[rank + 8]] for rank in range(8)]
    fullest = max(sum(stage.memory_bytes for stage in local) for local in loop) / GIB
    result = estimate_memory_bytes(plan)
    assert result is not None
    block = 2 * 16384**2 + 2 * 16384 * 1024 + 3 * 16384 * 53248 + 2 * 16384
    assert result / GIB == pytest.approx(fullest + 4 * 2 * block / 8 / GIB, abs=0.01)


def test_memory_unsharded_gradients_take_four_bytes_per_parameter() -> None:
    """Accumulation over microbatches takes four bytes per parameter on every rank."""
    by_sync = {
        sync: estimate_memory_bytes(planned("paper/llama3-8b", ("parallel.gradient_sync", sync))[1])
        for sync in ("microbatch", "step")
    }
    assert by_sync["step"] - by_sync["microbatch"] == 4 * PARAMETERS["8b"]  # type: ignore[operator]


# --------------------------------------------------------------------------- rank map


def test_rank_map_of_three_servers() -> None:
    text = format_placement(planned("three-servers")[1])
    lines = text.splitlines()
    assert lines[:2] == [
        "96 ranks on 12 nodes of 8",
        "outermost first: dp_replicate 4 x pp 6 x tp 4",
    ]
    # Each node of the first replica, with its two tensor-parallel groups and their stages.
    assert [line.split(None, 6) for line in lines[4:6]] == [
        ["0", "0-3", "0", "0", "[0-3]", "embed_tokens", "+ layers 0-11"],
        ["4-7", "0", "1", "[4-7]", "layers", "12-25"],
    ]
    assert lines[8].split()[:5] == ["2", "16-19", "0", "4", "[16-19]"]
    assert lines[9].endswith("layers 68-79 + head")
    assert "dp_replicate + 1 every 3 nodes" in text


def test_rank_map_without_a_pipeline() -> None:
    assert "units" not in format_placement(planned("paper/llama3-70b")[1])


# --------------------------------------------------------------------------- other schedules


def test_stage_lines_v_schedule_has_both_ends_on_a_rank() -> None:
    plan = planned("paper/llama3-405b", ("pipeline.schedule", "ZBVZeroBubble"))[1]
    lines = format_stages(plan)
    assert [line.split()[:2] for line in lines[7:11]] == [
        ["6", "6"],
        ["7", "7"],
        ["8", "7"],
        ["9", "6"],
    ]


def test_stage_lines_schedule_file_places_its_stages(tmp_path: Path) -> None:
    """The file assigns two stages to rank 0 and one to rank 1."""
    order = tmp_path / "order.csv"
    order.write_text("0F0,2F0,2B0,0B0\n1F0,1B0\n")
    sizes = [("train.global_batch_size", "4"), ("parallel.pp", "2"), ("parallel.tp", "2")]
    plan = planned(
        "three-servers-small",
        *sizes,
        ("pipeline.schedule", str(order)),
        ("train.microbatch_size", "4"),
        ("pipeline.layers_per_stage", "[4, 4, 4]"),
    )[1]
    lines = format_stages(plan)
    assert [line.split()[:2] for line in lines[1:4]] == [["0", "0"], ["1", "1"], ["2", "0"]]
    assert lines[1].split()[2] == "embed_tokens"
    assert [line.split()[:3] for line in lines[7:9]] == [["0", "0,", "2"], ["1", "1", "4"]]
    assert format_placement(plan).count("embed_tokens + layers 0-3; layers 8-11 + head") == 1


# --------------------------------------------------------------------------- errors


def errors(recipe: str, *overrides: tuple[str, str], cluster: str | None = None) -> list[str]:
    with pytest.raises(InvalidConfig) as caught:
        planned(recipe, *overrides, cluster=cluster)
    return [str(error) for error in caught.value.errors]


def test_plan_recipe_cluster_that_does_not_divide_is_refused() -> None:
    (line,) = errors("paper/llama3-405b", ("parallel.dp_shard", "8"), cluster="8x8xH100")
    assert line.startswith("parallel.dp_shard=8 times tp=8, pp=8 is not equal to the 64 ranks")
    assert "Use 1, or auto, or a --cluster of 512. These layouts are possible:" in line


def test_plan_recipe_other_cluster_changes_dp_shard() -> None:
    _, plan, machine = planned("paper/llama3-405b", cluster="8x8xH100")
    assert (plan.dp_shard, plan.tp, plan.pp, machine.world_size) == (1, 8, 8, 64)
    note = "parallel.dp_shard=8 becomes 1: the recipe is for 512 ranks, not 64"
    assert plan.warnings[0] == note
    _, plan, _ = planned("paper/llama3-405b", cluster="64x8xH100")
    assert note not in plan.warnings


def test_plan_recipe_replicas_that_do_not_divide_become_one() -> None:
    _, plan, _ = planned("three-servers", cluster="3x8xH200")
    assert (plan.dp_replicate, plan.dp_shard, plan.world_size) == (1, 1, 24)
    assert "parallel.dp_replicate=4 becomes 1" in plan.warnings[0]


def test_plan_recipe_degrees_that_do_not_divide_list_layouts_that_do() -> None:
    (line,) = errors("paper/llama3-405b", cluster="4x8xH100")
    assert line.startswith("parallel.tp=8 times pp=8 (64 in all) does not divide the 32 ranks.")
    head, *layouts = line.split("\n  ")
    assert head.endswith("These layouts are possible:")
    assert layouts[0] == "--parallel.pp 4 --parallel.tp 8 --parallel.dp_shard auto"
    assert len(layouts) == 3
    for layout in layouts:
        words = layout.replace("--", "").split()
        pairs = zip(words[::2], words[1::2], strict=True)
        _, plan, _ = planned("paper/llama3-405b", *pairs, cluster="4x8xH100")
        assert plan.world_size == 32


def test_plan_recipe_any_layout_starts_a_search_on_every_cluster() -> None:
    plan, _ = plan_recipe(
        "paper/llama3-405b", [], [], "4x8xH100", lambda run: LAPTOP, any_layout=True
    )
    assert (plan.pp, plan.tp, plan.dp_shard) == (4, 8, 1)


def test_plan_recipe_bad_cluster_and_other_mistakes_are_reported_together(tmp_path: Path) -> None:
    first, second = errors("paper/llama3-8b", ("optim.lr", "x"), cluster="1x8xH101")
    assert first.startswith("optim.lr")
    assert second.startswith("--cluster=\"1x8xH101\" has an unknown device 'H101'")
    recipe = tmp_path / "mine.toml"
    recipe.write_text('extends = "paper/llama3-8b"\n[run]\ncluster = "8"\n')
    (line,) = errors(str(recipe))
    assert line.startswith('run.cluster="8" is not a cluster')


def test_plan_recipe_local_cluster_is_this_machine() -> None:
    requested = []

    def local_machine(section: RunSection) -> Machine:
        requested.append(section.device)
        return LAPTOP

    plan, machine = plan_recipe(
        "paper/llama3-8b", [("run.device", "cpu")], [], "local", local_machine
    )
    assert (requested, machine, plan.world_size) == (["cpu"], LAPTOP, 2)


def test_plan_recipe_errors_caused_by_another_are_not_reported() -> None:
    (line,) = errors("paper/llama3-8b", ("train.global_batch_size", "0"), cluster="3x8xH100")
    assert line.startswith("train.global_batch_size=0 must be at least 1")


def test_plan_to_json_has_every_field() -> None:
    tree = json.loads(planned("paper/llama3-405b")[1].to_json())
    assert tree["pp"] == 8
    assert len(tree["pipeline"]["stages"]) == 16
