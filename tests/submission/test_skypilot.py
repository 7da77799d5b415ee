"""Tasks for SkyPilot; validation by its schemas needs its command ``sky``."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.submission.requests import fake_tool, format_errors, own_recipe, request
from weft.preparation.environment import detect_environment
from weft.submission import skypilot

LAUNCH = {"bucket": "s3://my-bucket"}
IMAGE = ("launch.image", "registry/weft:1")
SETUP = ("launch.setup", "source ~/venv/bin/activate")

REQUESTS = {
    "cpu": request(SETUP, launch=LAUNCH | {"cpus": "8+", "memory": "32", "disk": "100"}),
    "gpu": request(
        IMAGE,
        ("train.steps", "5"),
        launch=LAUNCH | {"region": "us-east-1"},
        nodes=(2, 2),
        devices=8,
    ),
    "spot": request(IMAGE, ("run.cluster", "1x1xL4"), launch=LAUNCH | {"spot": "true"}, devices=1),
}
needs_sky = pytest.mark.skipif(shutil.which("sky") is None, reason="needs SkyPilot's command sky")


def task(text: str) -> dict[str, Any]:
    return dict(yaml.safe_load(text))


@needs_sky
@pytest.mark.slow
@pytest.mark.parametrize("name", REQUESTS)
def test_task_is_valid_for_the_schemas(name: str) -> None:
    assert skypilot.find_errors(REQUESTS[name]) == []
    assert skypilot.check(skypilot.render(REQUESTS[name])) == []


@needs_sky
@pytest.mark.slow
def test_task_with_mistakes_is_refused_by_the_schemas() -> None:
    text = skypilot.render(REQUESTS["gpu"])
    for right, wrong in (
        ("num_nodes:", "number_of_nodes:"),
        ("- 75", "- 750"),
        ("MOUNT_CACHED", "MOUNT_SOMEHOW"),
    ):
        assert right in text
        assert skypilot.check(text.replace(right, wrong)), wrong


def test_check_without_sky_is_skipped(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert skypilot.check("anything") == []
    assert "not checked against SkyPilot's schemas" in capsys.readouterr().err


@pytest.mark.system
def test_check_with_a_wrapper_of_sky_is_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A wrapper whose first line names a shell cannot run the check."""
    fake_tool(tmp_path, monkeypatch, "sky", "")
    assert skypilot.check(skypilot.render(REQUESTS["gpu"])) == []
    assert "not checked against SkyPilot's schemas (/bin/sh" in capsys.readouterr().err


def test_task_has_the_requested_values() -> None:
    result = task(skypilot.render(REQUESTS["gpu"]))
    run = result.pop("run")
    assert result == {
        "name": "small-run",
        "num_nodes": 2,
        "resources": {
            "accelerators": "H100:8",
            "network_tier": "best",
            "infra": "aws/us-east-1",
            "image_id": "docker:registry/weft:1",
            "job_recovery": {"recover_on_exit_codes": [75]},
        },
        "file_mounts": {"/runs": {"source": "s3://my-bucket", "mode": "MOUNT_CACHED"}},
    }
    assert run == (
        "set -e\nexec weft train demo \\\n  --train.steps 5 \\\n  --run.cluster 2x8xH100 \\\n"
        "  --run.dir /runs/small-run \\\n  --checkpoint.dir s3://my-bucket/small-run/checkpoints\n"
    )
    assert task(skypilot.render(REQUESTS["spot"]))["resources"]["use_spot"] is True


def test_task_on_cpus_has_no_accelerators() -> None:
    result = task(skypilot.render(REQUESTS["cpu"]))
    resources = {"cpus": "8+", "memory": "32", "disk_size": 100}
    assert result["resources"] | resources == result["resources"]
    assert "accelerators" not in result["resources"]
    assert result["run"].startswith("set -e\nsource ~/venv/bin/activate\nexec weft train demo")


def test_task_remote_checkpoints_stay_there() -> None:
    launch_request = request(IMAGE, ("checkpoint.dir", "s3://other/x"), launch=LAUNCH)
    run = task(skypilot.render(launch_request))["run"]
    assert "--checkpoint.dir s3://other/x" in run
    assert "my-bucket" not in run


def test_task_carries_a_local_recipe(tmp_path: Path) -> None:
    """The node's shell writes the recipe to the path in the command."""
    result = task(skypilot.render(request(IMAGE, launch=LAUNCH, recipe=own_recipe(tmp_path))))
    home = tmp_path / "home"
    (home / "bin").mkdir(parents=True)
    weft = home / "bin/weft"
    weft.write_text('#!/bin/sh\ncat "$2"\n')
    weft.chmod(0o755)
    around = {"HOME": str(home), "PATH": f"{home}/bin:/usr/bin:/bin"}
    subprocess.run(["bash", "-c", result["setup"]], env=around, check=True)
    command = ["bash", "-c", result["run"]]
    completed = subprocess.run(command, env=around, capture_output=True, text=True, check=True)
    assert "steps = 7" in completed.stdout


def test_task_nodes_find_each_other() -> None:
    around = {
        "SKYPILOT_NODE_RANK": "1",
        "SKYPILOT_NODE_IPS": "10.0.0.4\n10.0.0.5",
        "SKYPILOT_NUM_NODES": "2",
        "SKYPILOT_NUM_GPUS_PER_NODE": "8",
    }
    environment = detect_environment(around)
    assert (environment.source, environment.nodes) == ("skypilot", "2")
    assert environment.rendezvous.startswith("10.0.0.4:")


def test_task_each_mistake_is_reported() -> None:
    launch_request = request(launch={"bucket": "gs://b", "memory": "big"}, nodes=(1, 2), devices=8)
    text = format_errors(skypilot.find_errors(launch_request))
    for part in ("bucket", "memory", "run.nodes", "launch.setup"):
        assert part in text


@pytest.mark.system
def test_submit_calls_sky(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = [
        {"job_id": 3, "job_name": "small-run", "status": "FAILED", "failure_reason": "old"},
        {"job_id": 11, "job_name": "small-run", "status": "RUNNING", "resources": "2x[H100:8]"},
        {"job_id": 12, "job_name": "other", "status": "PENDING"},
    ]
    (tmp_path / "queue").write_text(json.dumps(jobs))
    body = f"""case "$*" in *queue*) cat {tmp_path}/queue;; *logs*) echo line;; esac"""
    calls = fake_tool(tmp_path, monkeypatch, "sky", body)
    (tmp_path / "run.yaml").write_text(skypilot.render(REQUESTS["gpu"]))
    id = skypilot.submit(tmp_path / "run.yaml", REQUESTS["gpu"])
    assert skypilot.status(id) == "running: 2x[H100:8]"
    assert skypilot.status("other") == "waiting: pending"
    assert list(skypilot.logs(id, Path(), follow=False)) == ["line"]
    assert "last checkpoint" in skypilot.cancel(id)
    commands = calls.read_text().splitlines()
    assert commands[0] == f"jobs launch -y -d -n small-run {tmp_path}/run.yaml"
    assert commands[-2:] == [
        "jobs logs --no-follow --name small-run",
        "jobs cancel -y --name small-run",
    ]
