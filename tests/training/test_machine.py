"""Detection of the hardware, in other processes: a fake NVML shows GPUs that PyTorch cannot use."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests import fake_nvml
from weft.config.exit_statuses import FAILED
from weft.training.machine import explain_unused_gpus, find_accelerator

CLONE = Path(__file__).parents[2]
OLD_DRIVER = "driver 535.104.05\ncuda 12020\n"

Beside = tuple[subprocess.CompletedProcess[str], Path]

pytestmark = [
    pytest.mark.skipif(find_accelerator() is not None, reason="PyTorch has an accelerator"),
    pytest.mark.timeout(300),
]


def run_python(nvml_dir: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run Python on a machine with eight GPUs and an old driver."""
    environment = os.environ | fake_nvml.environment(nvml_dir, OLD_DRIVER) | variables
    environment["PYTHONPATH"] = str(CLONE)
    return subprocess.run(
        [sys.executable, *words], env=environment, capture_output=True, text=True, check=False
    )


EXPLAIN = """\
import os, runpy, sys
import torch
from weft.training.machine import explain_unused_gpus
build = torch.version.cuda
for os.environ["CUDA_VISIBLE_DEVICES"] in ("0", "", "NoDevFiles"):
    for torch.version.cuda in (None, "13.0", "12.6"):
        print(explain_unused_gpus())
torch.version.cuda = build
del os.environ["CUDA_VISIBLE_DEVICES"]
sys.stdout.flush()
runpy.run_module("benchmarks.gpu_check", run_name="__main__")
"""


@pytest.fixture(scope="module")
def beside_gpus(
    tmp_path_factory: pytest.TempPathFactory,
) -> Beside:
    """Run all that follows in one interpreter; return its output and the path of a run."""
    if shutil.which("gcc") is None:
        pytest.skip("needs gcc")
    directory = tmp_path_factory.mktemp("nvml")
    fake_nvml.build_library(directory)
    out = directory / "out"
    return run_python(directory, "-c", EXPLAIN, "--run.dir", str(out)), out


@pytest.mark.system
def test_explain_unused_gpus_names_the_build_of_torch_or_the_driver(beside_gpus: Beside) -> None:
    no_cuda, too_old, other = beside_gpus[0].stdout.splitlines()[:3]
    assert no_cuda.startswith("PyTorch cannot use the 8 GPUs of this machine: torch 2.")
    assert "is a build without CUDA; install a torch with CUDA" in no_cuda
    assert "driver 535.104.05 supports CUDA 12.2, and torch is for 13.0; install a newer" in too_old
    assert other.endswith("it finds none; weft doctor checks them")


@pytest.mark.system
def test_explain_unused_gpus_says_nothing_of_hidden_or_absent_gpus(beside_gpus: Beside) -> None:
    assert beside_gpus[0].stdout.split("\n", 3)[3] == "\n" * 6
    assert explain_unused_gpus() == ""


@pytest.mark.system
def test_gpu_check_of_gpus_that_pytorch_cannot_use_is_refused(beside_gpus: Beside) -> None:
    """It would rehearse its stages on the CPU for hours."""
    refused, out = beside_gpus
    assert refused.returncode == FAILED
    assert refused.stderr.startswith("PyTorch cannot use the 8 GPUs of this machine: ")
    assert "--run.device cpu runs the stages on the CPU" in refused.stderr
    assert not out.exists()


@pytest.mark.slow
@pytest.mark.parametrize("device", ["auto", "cpu"])
def test_train_on_a_cpu_beside_unused_gpus_warns(
    device: str, nvml_dir: Path, tmp_path: Path
) -> None:
    words = ["-m", "weft", "train", "demo", "--train.steps", "1", "--run.device", device]
    done = run_python(nvml_dir, *words, "--run.dir", str(tmp_path / "run"))
    assert done.returncode == 0, done.stdout + done.stderr
    expected = 1 if device == "auto" else 0
    assert done.stdout.count("warning: PyTorch cannot use the 8 GPUs of this machine") == expected
