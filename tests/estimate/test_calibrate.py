"""Calibration fits one value of a device, and records its source."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.small import SMALL, Overrides
from weft.config.errors import InvalidConfig
from weft.config.reader import read_job
from weft.config.schema import Job
from weft.config.writer import to_toml
from weft.estimate.calibrate import calibrate, read_run, render_calibration, save_calibration
from weft.estimate.cost import device_spec
from weft.estimate.forecast import forecast
from weft.planning.devices import (
    CPU_DEVICE,
    get_device,
    load_clusters,
    parse_cluster,
    user_cluster_files,
)
from weft.planning.plan import Machine, Plan
from weft.planning.plan_text import cluster_machine
from weft.planning.resolve import resolve
from weft.training.run_dir import write_plan

WEFT = [sys.executable, "-m", "weft"]


@pytest.fixture(autouse=True)
def own_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    load_clusters.cache_clear()
    yield
    load_clusters.cache_clear()


def h100(*overrides: tuple[str, str], recipe: str = "paper/llama3-8b") -> tuple[Job, Plan, Machine]:
    job, _, errors = read_job(recipe, list(overrides))
    assert not errors
    cluster = parse_cluster("1x8xH100")
    machine = replace(cluster_machine(cluster), device_name="NVIDIA H100 80GB HBM3")
    return job, resolve(job, machine), machine


def finished(directory: Path, job: Job, plan: Plan, seconds: list[float], **extra: Any) -> Path:
    """Return the directory of a run with these step times."""
    write_plan(directory, plan)
    (directory / "job.toml").write_text(to_toml(job, "paper/llama3-8b", job))
    environment = json.loads((directory / "environment.json").read_text())
    environment["devices"] = ["NVIDIA H100 80GB HBM3"] * 8
    (directory / "environment.json").write_text(json.dumps(environment | extra))
    records = [
        {
            "step": step,
            "step_seconds": each + 0.5,
            "data_seconds": 0.5,
            "memory_peak_gib": 40.0,
            "time_breakdown": {"restarting": 0.0},
        }
        for step, each in enumerate(seconds, 1)
    ]
    (directory / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    return directory


FEW: Overrides = [
    ("model.num_layers", "2"),
    ("train.seq_len", "2048"),
    ("train.microbatch_size", "4"),
]
FEW += [("train.global_batch_size", "32"), ("compile.enable", "true")]


def test_calibrate_slow_run_fits_the_software_factor(tmp_path: Path) -> None:
    """Calibration reproduces the run's time, and scales other layouts alike."""
    job, plan, machine = h100(*FEW)
    before = forecast(plan, machine, device_spec(plan, machine))
    assert before.step_seconds is not None
    assert before.time_breakdown is not None
    expected = 1.3 * before.step_seconds
    run = finished(
        tmp_path / "run", job, plan, [90.0, 80.0, expected, 0.9 * expected, 1.1 * expected]
    )
    result = calibrate(read_run(run))
    assert (result.device, result.parameter) == ("H100", "software")
    assert result.seconds_before == pytest.approx(before.step_seconds)
    assert result.seconds_after == pytest.approx(expected, rel=1e-6)
    hidden = before.time_breakdown.total() - before.time_breakdown["compute"]
    # Operations other than compute are as fast as before.
    assert result.value == pytest.approx(
        before.time_breakdown["compute"] / (expected - hidden), rel=0.02
    )
    path = save_calibration(result)
    assert path == user_cluster_files()[1]
    after = forecast(plan, machine, device_spec(plan, machine))
    assert after.step_seconds == pytest.approx(expected, rel=1e-3)
    assert after.error < before.error
    h200 = replace(machine, device_name="NVIDIA H200", memory_bytes=None)
    known = device_spec(plan, h200)
    assert known is not None
    assert (known.software, known.calibrated) == (1.0, "")
    # Each calibration fits again, and reports the error of the last one.
    recalibrated = calibrate(read_run(run))
    assert recalibrated.seconds_before == pytest.approx(expected, rel=1e-3)
    assert recalibrated.value == pytest.approx(result.value)
    output = render_calibration(recalibrated, path)
    assert str(run) in output
    assert f"software = {result.value:.4g}" in output
    assert "40.00 GiB measured" in output


def test_calibrate_host_bound_run_fits_the_launch_time(tmp_path: Path) -> None:
    tiny: Overrides = [("model.dim", "512"), ("model.num_heads", "8"), ("model.ffn_dim", "1024")]
    tiny += [("model.num_kv_heads", "8"), ("model.vocab_size", "4096"), ("data.vocab_size", "4096")]
    rows: Overrides = [("train.seq_len", "128"), ("train.global_batch_size", "8")]
    job, plan, machine = h100(*tiny, *rows, ("model.num_layers", "2"), ("compile.enable", "false"))
    before = forecast(plan, machine, device_spec(plan, machine))
    assert before.step_seconds is not None
    run = finished(tmp_path / "run", job, plan, [2 * before.step_seconds] * 9)
    result = calibrate(read_run(run))
    assert result.parameter == "launch"
    assert 1.5 * 12e-6 < result.value < 6 * 12e-6
    assert result.seconds_after == pytest.approx(result.run.seconds, rel=1e-6)


def test_save_calibration_preserves_other_entries(tmp_path: Path) -> None:
    job, plan, _machine = h100(*FEW)
    file = user_cluster_files()[1]
    file.parent.mkdir(parents=True)
    file.write_text('[devices.A10G]\nsoftware = 0.5\ncalibrated = "mine"\n')
    run = finished(tmp_path / "run", job, plan, [0.7] * 6)
    save_calibration(calibrate(read_run(run)))
    assert get_device("A10G").software == 0.5
    assert get_device("H100").calibrated.startswith(str(run))
    assert list(file.parent.iterdir()) == [file]


def test_calibrate_unusable_run_is_refused(tmp_path: Path) -> None:
    def error(directory: Path) -> str:
        with pytest.raises(InvalidConfig) as caught:
            calibrate(read_run(directory))
        return str(caught.value.errors[0])

    job, plan, _ = h100(*FEW)
    assert "is not a run directory" in error(tmp_path)
    short = finished(tmp_path / "short", job, plan, [1.0, 1.0, 1.0])
    assert "has 1 records after the first 2" in error(short)
    unknown = finished(tmp_path / "unknown", job, plan, [1.0] * 9, devices=["Abacus"])
    assert "ran on 'Abacus', a device of unknown speed" in error(unknown)
    fast = finished(tmp_path / "fast", job, plan, [1e-9] * 9)
    assert "any value of software predicts at least" in error(fast)
    slow = finished(tmp_path / "slow", job, plan, [1e9] * 9)
    assert "any value of software predicts at most" in error(slow)
    assert not user_cluster_files()[1].exists()


@pytest.mark.slow
def test_calibrate_real_run_predicts_times_of_this_cpu(tmp_path: Path, store_path: Path) -> None:
    """Without calibration no time is predicted for CPUs; with it this run's is."""
    pairs = [
        *SMALL,
        ("run.dir", "run"),
        ("run.nproc_per_node", "1"),
        ("data.path", str(store_path)),
    ]
    words = [f"--{key}={value}" for key, value in [*pairs, ("monitor.log_interval", "1")]]

    def weft(*arguments: str) -> str:
        completed = subprocess.run(
            [*WEFT, *arguments], cwd=tmp_path, capture_output=True, text=True, timeout=300
        )
        assert completed.returncode == 0, completed.stderr
        return completed.stdout

    plan = ["plan", "demo", "--cluster", "1x2xCPU", *words, "--json"]
    assert json.loads(weft(*plan))["step_seconds"] is None
    weft("train", "demo", *words)
    result = json.loads(weft("plan", "--calibrate", "run", "--json"))
    assert result["device"] == CPU_DEVICE
    assert result["step_seconds_after"] == pytest.approx(result["measured_step_seconds"], rel=1e-6)
    prediction = json.loads(weft(*plan))
    assert prediction["step_seconds"] > 0
    assert any("CPU" in limit for limit in prediction["limits"])
