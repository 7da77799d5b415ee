"""The pages of docs/models/: their commands plan; their figures are the recorded predictions."""

from __future__ import annotations

import re
import shlex

import pytest

from benchmarks.model_pages import (
    PAGES,
    PAGES_DIR,
    command_of,
    index,
    page,
    predict,
    read_results,
)
from tests import pages
from weft.cli.main import build_parser
from weft.models import FAMILIES
from weft.planning.plan import Machine
from weft.planning.plan_text import plan_recipe

OFTEN = {"llama", "qwen3", "others"}  # pages whose commands the default suite plans
RECORD = read_results()
ROWS = [
    (model.title, row)
    for _, models in PAGES.values()
    for model in models
    for row in RECORD["rows"][model.title]
]


@pytest.mark.parametrize("name", PAGES)
def test_model_page_is_of_the_recorded_predictions(name: str) -> None:
    """``python benchmarks/model_pages.py --write`` updates a page."""
    assert (PAGES_DIR / f"{name}.md").read_text("utf-8") == page(name, RECORD)


def test_index_of_models_is_of_the_recorded_predictions() -> None:
    assert (PAGES_DIR / "index.md").read_text("utf-8") == index(RECORD)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name in OFTEN else pytest.mark.slow) for name in PAGES],
)
def test_model_page_commands_parse_and_plan(name: str) -> None:
    text = (PAGES_DIR / f"{name}.md").read_text("utf-8")
    commands = [command.line for command in pages.commands_of(text)]
    assert len(commands) >= len(PAGES[name][1])
    for command in commands:
        pages.check_parses(command)
    quoted = set(re.findall(r"^\|[^|]*\|[^|]*\| `([^`]+)` \|", text, re.MULTILINE))
    rows = [row for model in PAGES[name][1] for row in RECORD["rows"][model.title]]
    assert quoted == {command_of(row) for row in rows}
    for row in rows:
        words = shlex.split(f"plan {command_of(row)} --cluster {row['cluster']}")
        options = build_parser().parse_args(words)
        assert options.errors == []
        plan, machine = plan_recipe(
            options.recipe, options.overrides, [], options.cluster, lambda _: Machine("cpu", 1)
        )
        capacity = machine.memory_per_rank(plan.local_world_size)
        assert capacity is not None
        assert row["memory_gib"] <= capacity / 2**30
        assert plan.tokens_per_step / row["step_seconds"] == pytest.approx(
            row["tokens_per_second"], rel=0.01
        )


def test_model_pages_have_the_rows_that_people_look_for() -> None:
    assert all(
        model.preset in FAMILIES[model.kind].presets for _, ms in PAGES.values() for model in ms
    )
    found = {(title, row["way"], row["cluster"]) for title, row in ROWS}
    assert ("Qwen3 8B", "QLoRA", "1x1xRTX-4090") in found
    assert ("Qwen3 8B", "LoRA", "1x1xH100") in found
    assert ("Qwen3 8B", "full", "1x8xH100") in found
    assert ("Qwen3 30B-A3B", "LoRA", "1x8xH100") in found
    assert ("Qwen3 30B-A3B", "QLoRA", "1x1xH100") in found
    assert ("gpt-oss 20B", "LoRA", "1x1xH100") in found
    assert ("gpt-oss 120B", "LoRA", "1x8xH100") in found
    assert ("Qwen3 8B", "full", "1x1xH100") not in found  # 131 GB of states


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("index", range(0, len(ROWS), 7))
def test_model_page_row_is_what_the_planner_predicts(index: int) -> None:
    _, row = ROWS[index]
    result = predict(row["recipe"], row["overrides"], row["cluster"])
    assert result["memory_gib"] == pytest.approx(row["memory_gib"], rel=0.02)
    assert result["step_seconds"] == pytest.approx(row["step_seconds"], rel=0.02)
