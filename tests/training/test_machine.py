"""Detection of the hardware, in other processes: a fake NVML shows GPUs that PyTorch cannot use."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from textwrap import indent

import pytest

from tests import fake_nvml
from weft.config.exit_statuses import FAILED
from weft.training.machine import explain_unused_gpus, find_accelerator

CLONE = Path(__file__).parents[2]
OLD_DRIVER = "driver 535.104.05\ncuda 12020\n"

pytestmark = pytest.mark.skipif(find_accelerator() is not None, reason="PyTorch has an accelerator")


def run_python(nvml_dir: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run Python on a machine with eight GPUs and an old driver."""
    environment = os.environ | fake_nvml.environment(nvml_dir, OLD_DRIVER) | variables
    environment["PYTHONPATH"] = str(CLONE)
    return subprocess.run(
        [sys.executable, *words], env=environment, capture_output=True, text=True, check=False
    )


EXPLAIN = """\
import torch
from weft.training.machine import explain_unused_gpus
for torch.version.cuda in (None, "13.0", "12.6"):
    print(explain_unused_gpus())
"""
HIDDEN = f"""\
import os
for os.environ["CUDA_VISIBLE_DEVICES"] in ("", "NoDevFiles"):
{indent(EXPLAIN, "    ")}
"""


@pytest.mark.system
def test_explain_unused_gpus_names_the_build_of_torch_or_the_driver(nvml_dir: Path) -> None:
    no_cuda, too_old, other = run_python(nvml_dir, "-c", EXPLAIN).stdout.splitlines()
    assert no_cuda.startswith("PyTorch cannot use the 8 GPUs of this machine: torch 2.")
    assert "is a build without CUDA; install a torch with CUDA" in no_cuda
    assert "driver 535.104.05 supports CUDA 12.2, and torch is for 13.0; install a newer" in too_old
    assert other.endswith("it finds none; weft doctor checks them")


@pytest.mark.system
def test_explain_unused_gpus_says_nothing_of_hidden_or_absent_gpus(nvml_dir: Path) -> None:
    assert run_python(nvml_dir, "-c", HIDDEN).stdout == "\n" * 6
    assert explain_unused_gpus() == ""


@pytest.mark.system
def test_gpu_check_of_gpus_that_pytorch_cannot_use_is_refused(
    nvml_dir: Path, tmp_path: Path
) -> None:
    """It would rehearse its stages on the CPU for hours."""
    words = ["-m", "benchmarks.gpu_check", "--run.dir", str(tmp_path / "out")]
    refused = run_python(nvml_dir, *words)
    assert refused.returncode == FAILED
    assert refused.stdout == ""
    assert refused.stderr.startswith("PyTorch cannot use the 8 GPUs of this machine: ")
    assert "--run.device cpu runs the stages on the CPU" in refused.stderr
    assert not (tmp_path / "out").exists()


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
