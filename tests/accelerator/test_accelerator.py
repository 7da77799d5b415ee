"""weft on a device of another package, ``hostdev``, gives the results of a CPU."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.accelerator.device import NAME, ROOT, entry_point
from weft.comparison.diff import compare_runs

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

MODEL = "--model.num_layers=2 --model.dim=32 --model.num_heads=4 --model.num_kv_heads=2"
SMALL = f"{MODEL} --data.vocab_size=512 --train.seq_len=32 --train.eval_sequences=6"
RUN = "--train.steps=4 --train.eval_interval=2 --monitor.report=false"
CHECKPOINTS = "--checkpoint.interval=1 --checkpoint.keep_latest=4"
FLOAT32 = "--precision.compute_dtype=float32 --debug.layer_stats_steps=1"


class Device:
    """A machine with two ``hostdev`` devices."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.environment = os.environ | entry_point(directory / "packages")
        self.environment |= {"OMP_NUM_THREADS": "1"}

    def weft(self, *arguments: str, status: int = 0) -> str:
        """Run a command of weft; return its output, or its errors if it fails."""
        done = subprocess.run(
            [sys.executable, "-m", "weft", *arguments],
            cwd=ROOT,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == status, done.stdout + done.stderr
        return done.stderr if status else done.stdout

    def train(self, name: str, device: str, *options: str) -> Path:
        """Train the demo; return the run directory."""
        run_dir = self.directory / name
        words = f"{SMALL} {RUN} {CHECKPOINTS} {FLOAT32} --run.dir={run_dir}".split()
        # A restart must not hide a failure.
        words += [f"--run.device={device}", "--resilience.max_restarts_per_hour=0"]
        self.weft("train", "demo", *words, *options)
        return run_dir


@pytest.fixture(scope="module")
def device(tmp_path_factory: pytest.TempPathFactory) -> Device:
    return Device(tmp_path_factory.mktemp("device"))


@pytest.fixture(scope="module")
def on_cpu(device: Device) -> Path:
    return device.train("cpu", "cpu", "--run.nproc_per_node=1")


@pytest.fixture(scope="module")
def on_device(device: Device) -> Path:
    return device.train("device", "auto", "--run.nproc_per_node=1")  # finds the device


def tensors(run_dir: Path, step: int) -> dict[str, torch.Tensor]:
    """Return all tensors of a checkpoint of one rank."""
    return load_file(run_dir / f"checkpoints/step-{step:08}/shard-00000.safetensors")


def test_train_on_the_device_has_the_gradients_and_losses_of_a_cpu(
    on_cpu: Path, on_device: Path
) -> None:
    plan = json.loads((on_device / "plan.json").read_text())
    environment = json.loads((on_device / "environment.json").read_text())
    assert plan["device"] == NAME
    assert environment["devices"] == ["Host Device", "Host Device"]
    assert environment["memory_gib"] == 16
    assert compare_runs(on_cpu, on_device, 1e-4).part is None
    expected, found = tensors(on_cpu, 1), tensors(on_device, 1)
    assert expected.keys() == found.keys()
    moments = {name: value for name, value in expected.items() if name.endswith(".exp_avg")}
    assert moments
    for name, value in moments.items():  # after one step a multiple of the gradient
        largest = float(value.abs().max())
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-5 * largest, msg=name)


@pytest.mark.parametrize(
    "layout",
    [
        "--parallel.dp_shard=2",
        "--parallel.tp=2",
        "--parallel.pp=2",
        "--parallel.cp=2 --parallel.cp_method=ulysses",
    ],
)
def test_two_devices_have_the_gradients_and_losses_of_a_cpu(
    device: Device, on_cpu: Path, layout: str
) -> None:
    options = ("--run.nproc_per_node=2", *layout.split())
    run_dir = device.train("-".join(layout.split()).replace("--", ""), NAME, *options)
    assert compare_runs(on_cpu, run_dir, 1e-4).part is None


@pytest.mark.parametrize(
    "technique",
    [
        "--parallel.cpu_offload=true",
        "--activation_checkpoint.mode=full --activation_checkpoint.offload=true",
        "--profile.steps=2 --profile.memory=true --checkpoint.async_save=true",
    ],
)
def test_techniques_that_copy_to_the_host_change_nothing(
    device: Device, on_cpu: Path, technique: str
) -> None:
    name = technique.split("=")[0].strip("-")
    run_dir = device.train(name, NAME, "--run.nproc_per_node=1", *technique.split())
    assert compare_runs(on_cpu, run_dir, 1e-4).part is None
    if "profile" in technique:
        assert list(run_dir.glob("traces/step-2-2/*.json*"))


def test_resume_on_the_device_and_on_the_cpu_continues_exactly(
    device: Device, on_device: Path, on_cpu: Path
) -> None:
    for name, kind in (("resumed", NAME), ("moved", "cpu")):
        run_dir = device.directory / name
        shutil.copytree(on_device, run_dir)
        for step in (3, 4):
            shutil.rmtree(run_dir / f"checkpoints/step-{step:08}")
        device.train(name, kind, "--run.nproc_per_node=1")
        found, expected = tensors(run_dir, 4), tensors(on_device, 4)
        for key, value in expected.items():
            exact = name == "resumed"
            tolerances = {"rtol": 0, "atol": 0} if exact else {"rtol": 1e-3, "atol": 1e-6}
            torch.testing.assert_close(found[key], value, **tolerances, msg=key)


def test_generate_on_the_device_writes_the_text_of_a_cpu(
    device: Device, on_device: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("generate", str(on_device), "the", "--temperature=0", "--max-tokens=8", "--json")
    text = device.weft(*words)
    monkeypatch.setitem(device.environment, "HOSTDEV_COUNT", "0")
    assert json.loads(text) == json.loads(device.weft(*words))


@pytest.mark.parametrize(
    ("option", "message"),
    [
        (
            "--compile.enable=true",
            "compile.enable=true is not supported on the device type hostdev",
        ),
        ("--precision.float8=rowwise", 'precision.float8="rowwise" is not supported on the device'),
        ("--parallel.symmetric_memory=true", "needs GPUs that can read each other's memory"),
        ("--run.device=xpu", 'run.device="xpu" is not a device of this machine'),
    ],
)
def test_what_the_device_lacks_is_refused_with_the_reason(
    device: Device, option: str, message: str
) -> None:
    words = ("train", "demo", "--run.nproc_per_node=1", "--run.device", NAME, option, "--dry-run")
    assert message in device.weft(*words, status=2).replace("\n", " ")


def test_no_device_is_found_without_one(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(device.environment, "HOSTDEV_COUNT", "0")
    text = device.weft("train", "demo", "--run.device", NAME, "--dry-run", status=2)
    assert f'run.device="{NAME}" is not a device of this machine' in text
