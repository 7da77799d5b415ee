"""Every shipped recipe on odd clusters: a plan, or a message whose remedy leads to one."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from tests.remedies import ASSIGNMENT, proposed_changes
from weft.cli.main import main
from weft.config.errors import ConfigError, InvalidConfig
from weft.config.reader import recipe_names
from weft.planning.plan import Machine, Plan
from weft.planning.plan_text import plan_recipe

CLUSTERS = (
    *("1xRTX-4090", "2xA100", "3xH100", "6xMI300X", "7xL40S", "72xGB200", "5x8xB200", "7x8xH100"),
    *("12x6xA100", "16x4xGB200", "18x4xGB300", "1000x8xH200", "1024x8xH100"),
)
NEEDS_MODEL = ("chat", "dpo", "lora", "pretrain", "qlora", "reward")
MODEL = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
ROUNDS = 6


def plan_on(recipe: str, cluster: str, changes: dict[str, str]) -> Plan:
    machine = Machine("cpu", devices=1)
    return plan_recipe(recipe, [*changes.items()], (), cluster, lambda run: machine)[0]


def follow(error: ConfigError) -> dict[str, str]:
    """Return the first change that a message proposes."""
    _, _, layouts = error.remedy.partition("These layouts are possible:")
    if layouts:
        words = layouts.split("\n")[1].replace("--", "").split()
        return dict(zip(words[::2], words[1::2], strict=True))
    named = [dict([pair]) for pair in ASSIGNMENT.findall(error.remedy)]
    change = next(iter([*proposed_changes(error), *named]), {})
    return {key: value for key, value in change.items() if value is not None}


def check(recipe: str, cluster: str, given: dict[str, str]) -> None:
    """Plan a recipe; follow the first remedy of each message until there is a plan."""
    changes = dict(given)
    trail = []
    for _ in range(ROUNDS):
        try:
            plan = plan_on(recipe, cluster, changes)
        except InvalidConfig as refused:
            trail += [str(error) for error in refused.errors]
            advised = {key: value for e in refused.errors for key, value in follow(e).items()}
            assert advised.items() - changes.items(), (recipe, cluster, trail)
            changes |= advised
        else:
            assert plan.world_size == plan.dp_size * plan.pp * plan.cp * plan.tp
            assert plan.global_batch_size % plan.dp_size == 0
            return
    raise AssertionError((recipe, cluster, trail))


@pytest.fixture
def given(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    return {"model.path": str(tmp_path)}


@pytest.mark.parametrize(
    ("recipe", "cluster"),
    [
        ("paper/llama3-405b-128k", "3xH100"),
        ("paper/llama3-70b-float8", "6xMI300X"),
        ("qwen3-30b-a3b-finetune", "6xMI300X"),
        ("chat", "72xGB200"),
    ],
)
def test_odd_cluster_has_a_plan_or_a_remedy_that_works(
    recipe: str, cluster: str, given: dict[str, str]
) -> None:
    check(recipe, cluster, given if recipe in NEEDS_MODEL else {})


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_odd_clusters_of_all_recipes_have_a_plan_or_a_remedy_that_works(
    given: dict[str, str],
) -> None:
    pairs = [(recipe, cluster) for recipe in recipe_names() for cluster in CLUSTERS]
    for recipe, cluster in random.sample(pairs, 150):
        check(recipe, cluster, given if recipe in NEEDS_MODEL else {})


def test_odd_cluster_changes_the_batch_unless_it_is_set() -> None:
    plan = plan_on("llama3-8b", "3xH100", {})
    assert plan.global_batch_size == 510
    assert "train.global_batch_size=512 becomes 510, for these ranks" in plan.warnings
    with pytest.raises(InvalidConfig, match="not divisible by 3 data-parallel ranks"):
        plan_on("llama3-8b", "3xH100", {"train.global_batch_size": "512"})
    with pytest.raises(InvalidConfig, match="not divisible by 3 data-parallel ranks"):
        plan_recipe("llama3-8b", [], (), "3xH100", lambda run: Machine("cpu"), any_layout=True)


def test_comparison_keeps_the_batch_on_odd_clusters(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--vary", "train.microbatch_size=1,2", "--plan-only", "--cluster", "3xH100"]
    assert main(["compare", "llama3-8b", *words]) == 2
    assert "is not divisible by 3 data-parallel ranks" in capsys.readouterr().err


def test_layouts_of_a_message_have_the_degrees_that_become_one() -> None:
    with pytest.raises(InvalidConfig) as refused:
        plan_on("mics-1t", "H100", {})
    text = refused.value.errors[-1].remedy
    assert text.endswith("possible:\n  --parallel.tp 1 --parallel.dp_shard auto")
