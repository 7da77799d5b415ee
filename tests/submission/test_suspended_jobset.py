"""A JobSet that Kueue suspends, and starts again: its pods save, and the run resumes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.s3 import free_ports
from tests.submission.requests import request
from weft.submission import kubernetes


def start_pods(text: str, run_dir: Path, port: int) -> list[subprocess.Popen[str]]:
    """Start the command of a manifest as the pods of a JobSet, on loopback."""
    documents = {each["kind"]: each for each in yaml.safe_load_all(text)}
    spec: dict[str, Any] = documents["JobSet"]["spec"]
    assert spec["suspend"] is True  # until Kueue admits the job
    [job] = spec["replicatedJobs"]
    [container] = job["template"]["spec"]["template"]["spec"]["containers"]
    words = [word.replace("/runs/small-run", str(run_dir)) for word in container["command"]]
    pods = []
    for rank in range(job["template"]["spec"]["completions"]):
        variables = {item["name"]: item.get("value", str(rank)) for item in container["env"]}
        variables |= {"PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": str(port)}
        pods.append(
            subprocess.Popen(
                [sys.executable, "-m", *words],
                env=os.environ | variables | {"KUBERNETES_SERVICE_HOST": "10.0.0.1"},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    return pods


def read_steps(run_dir: Path) -> list[int]:
    """Return the steps with a loss that the run has recorded."""
    records = run_dir / "metrics.jsonl"
    lines = records.read_text().split("\n")[:-1] if records.is_file() else []
    return [record["step"] for record in map(json.loads, lines) if "loss" in record]


def wait_for_step(run_dir: Path, step: int, seconds: float = 120) -> None:
    """Wait until the run has recorded a step."""
    end = time.monotonic() + seconds
    while step not in read_steps(run_dir):
        assert time.monotonic() < end, f"the run did not reach step {step}"
        time.sleep(0.2)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_jobset_suspended_by_kueue_saves_and_resumes(tmp_path: Path) -> None:
    keys = [("launch.image", "registry/weft:1"), ("run.device", "cpu"), ("train.steps", "60")]
    keys += [("train.seq_len", "64"), ("train.global_batch_size", "8"), ("run.nproc_per_node", "1")]
    keys += [("checkpoint.interval", "0"), ("data.cache_dir", str(tmp_path / "cache"))]
    launch = {"mounts": "/runs=pvc:shared", "kind": "jobset", "queue": "team"}
    text = kubernetes.render(request(*keys, launch=launch, nodes=(2, 2)))
    run_dir = tmp_path / "run"
    pods = start_pods(text, run_dir, free_ports(1)[0])
    try:
        wait_for_step(run_dir, 5)
        for pod in pods:  # the controller of Jobs deletes the pods of a suspended job
            pod.send_signal(signal.SIGTERM)
        outputs = [pod.communicate(timeout=120)[0] for pod in pods]
        assert [pod.returncode for pod in pods] == [75, 75], "\n".join(outputs)
        [saved] = list((run_dir / "checkpoints").glob("step-*"))
        pods = start_pods(text, run_dir, free_ports(1)[0])
        outputs = [pod.communicate(timeout=180)[0] for pod in pods]
        assert [pod.returncode for pod in pods] == [0, 0], "\n".join(outputs)
    finally:
        for pod in pods:
            pod.kill()
    assert read_steps(run_dir) == list(range(1, 61))
    assert 5 <= int(saved.name.rpartition("-")[2]) < 60
