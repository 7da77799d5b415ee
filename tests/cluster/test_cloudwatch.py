"""The regular expressions for CloudWatch read each logged number, and nothing else."""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.test_sagemaker_entry import (
    SMALL_HYPERPARAMETERS,
    as_container,
    configure,
    wait_for_all,
)
from tests.monitor.test_step_record import record
from tests.small import records
from weft.cluster.cloudwatch import metric_definitions
from weft.config.schema import Job, TrainSection
from weft.monitor.terminal import STEP_LINE, Terminal, quiet_console

OBJECTIVES = ("next_token", "dpo", "orpo")


def read_metrics(text: str, objective: str = "next_token") -> dict[str, list[float]]:
    """Read a job's output as SageMaker does: each line is an event, the first group a value."""
    values: dict[str, list[float]] = {}
    for definition in metric_definitions(Job(train=TrainSection(objective=objective))):
        for line in text.splitlines():
            if match := re.search(definition["Regex"], line):
                values.setdefault(definition["Name"], []).append(float(match[1]))
    return values


def test_definitions_fit_the_limits_of_sagemaker() -> None:
    for objective in OBJECTIVES:
        definitions = metric_definitions(Job(train=TrainSection(objective=objective)))
        assert len({item["Name"] for item in definitions}) == len(definitions) <= 40
        assert all(len(item["Name"]) <= 255 for item in definitions)
        assert all(len(item["Regex"]) <= 500 for item in definitions)
        assert all(re.compile(item["Regex"]).groups == 1 for item in definitions)
    assert len(definitions) == STEP_LINE.count("{") + 2 + 5


def test_expressions_read_the_lines_of_a_run() -> None:
    """Also numbers that a CPU does not have, and the metrics of an objective."""
    out = io.StringIO()
    sink = Terminal(quiet_console(out), steps=10, resumed_step=0)
    rewards = {"reward_margin": -0.25, "reward_accuracy": 0.5}
    first = record(1, metrics=rewards)
    second = record(2, peak_flops=None, eval_loss=3.5, loss=float("nan"), grad_norm=float("inf"))
    sink.write(first)
    sink.write(second)
    assert read_metrics(out.getvalue(), "dpo") == {
        "step": [1, 2],
        "loss": [first.loss],
        "tokens_per_second": [first.tokens_per_second, second.tokens_per_second],
        "mfu": [first.mfu],
        "grad_norm": [first.grad_norm],
        "lr": [first.lr, second.lr],
        "memory_peak_gib": [first.memory_peak_gib, second.memory_peak_gib],
        "goodput": pytest.approx([first.goodput, second.goodput], abs=5e-4),
        "reward_margin": [-0.25],
        "reward_accuracy": [0.5],
        "eval_loss": [3.5],
    }


@pytest.mark.slow
@pytest.mark.timeout(600, method="signal")
def test_expressions_read_the_output_of_a_container(tmp_path: Path, store_path: Path) -> None:
    """Every number equals that of metrics.jsonl, and no other line of the output has one."""
    parameters: dict[str, Any] = SMALL_HYPERPARAMETERS | {
        "data.path": str(store_path),
        "run.nproc_per_node": 1,
        "monitor.log_interval": 1,
        "train.eval_interval": 10,
        "monitor.eval_prompts": ["loss 1.0 tokens/s", "step 3"],
        "monitor.trackers": ["tensorboard"],
    }
    configure(tmp_path, "algo-1", ["algo-1"], parameters)
    [(status, output)] = wait_for_all([as_container(tmp_path)], 500)
    assert status == 0, output
    logged = records(tmp_path / "checkpoints")
    values = read_metrics(output)
    assert values.pop("eval_loss") == [
        round(row["eval_loss"], 4) for row in logged if row.get("eval_loss") is not None
    ]
    assert len(logged) == 20
    assert set(values) == {
        *("step", "loss", "tokens_per_second", "grad_norm", "lr", "memory_peak_gib", "goodput"),
    }
    formats = dict(re.findall(r"\{(\w+):([^}]*)\}", STEP_LINE)) | {"step": ""}
    for name, read in values.items():
        expected = [float(f"{row[name]:{formats[name]}}") for row in logged]
        assert read == expected, name
    assert list((tmp_path / "checkpoints/tensorboard").glob("events.out.*"))
