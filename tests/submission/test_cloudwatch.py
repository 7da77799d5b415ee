"""The regular expressions for CloudWatch read each logged number, and nothing else."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.monitor.test_step_record import record
from tests.small import records
from tests.submission.requests import request
from tests.submission.test_sagemaker import IMAGE, LAUNCH
from tests.submission.test_sagemaker_entry import (
    SMALL_HYPERPARAMETERS,
    as_container,
    configure,
    wait_for_all,
)
from weft.cli.main import main
from weft.config.exit_statuses import FAILED, USAGE_ERROR
from weft.config.schema import Job, TrainSection
from weft.monitor.cloudwatch import metric_definitions
from weft.monitor.terminal import STEP_LINE, Terminal, quiet_console
from weft.submission import sagemaker
from weft.submission.sagemaker import objective_metrics

OBJECTIVES = ("next_token", "dpo", "orpo")


def definitions_of(objective: str) -> list[dict[str, str]]:
    return metric_definitions(objective_metrics(Job(train=TrainSection(objective=objective))))


def read_metrics(text: str, objective: str = "next_token") -> dict[str, list[float]]:
    """Read a job's output as SageMaker does: each line is an event, the first group a value."""
    values: dict[str, list[float]] = {}
    for definition in definitions_of(objective):
        for line in text.splitlines():
            if match := re.search(definition["Regex"], line):
                values.setdefault(definition["Name"], []).append(float(match[1]))
    return values


def test_definitions_fit_the_limits_of_sagemaker() -> None:
    for objective in OBJECTIVES:
        definitions = definitions_of(objective)
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


def test_dashboard_of_a_submitted_job_has_every_metric(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arn = "arn:aws:sagemaker:us-west-2:123456789012:training-job/mine-261129-120000"
    (tmp_path / "launch.json").write_text(json.dumps({"on": "sagemaker", "id": arn}))
    assert main(["job", "dashboard", str(tmp_path)]) == FAILED
    assert "launch-request.json is not the request of a training job" in capsys.readouterr().err
    job = request(launch=LAUNCH | {"image": IMAGE[1]}, nodes=(2, 2), devices=8)
    (tmp_path / "launch-request.json").write_text(sagemaker.render(job))
    assert main(["job", "dashboard", str(tmp_path)]) == 0
    widgets = json.loads(capsys.readouterr().out)["widgets"]
    places = {(widget["x"], widget["y"]) for widget in widgets}
    assert len(places) == len(widgets)
    rows = []
    for widget in widgets:
        assert widget["x"] + widget["width"] <= 24
        properties = widget["properties"]
        assert (properties["region"], properties["period"]) == ("us-west-2", 60)
        rows += properties["metrics"]
    name = "mine-261129-120000"
    own = {row[1] for row in rows if row[2:] == ["TrainingJobName", name]}
    assert own == {item["Name"] for item in metric_definitions(objective_metrics(job.job))}
    hosts = {row[3] for row in rows if row[1:3] == ["GPUUtilization", "Host"]}
    assert hosts == {f"{name}/algo-1", f"{name}/algo-2"}
    assert {row[0] for row in rows} == {"/aws/sagemaker/TrainingJobs"}


def test_dashboard_of_another_cluster_names_prometheus(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "launch.json").write_text('{"on": "slurm", "id": "7"}')
    assert main(["job", "dashboard", str(tmp_path)]) == USAGE_ERROR
    assert "--monitor.prometheus" in capsys.readouterr().err
