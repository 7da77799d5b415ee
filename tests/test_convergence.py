"""The convergence benchmark: its limits, its table, and all its runs over few steps."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.convergence import FLOAT8, RUNS, SAFETY, compare, draw, limits_of

ROOT = Path(__file__).parent.parent
EXACT = [8.0, 7.0, 6.0, 5.0]


def losses_with(name: str, apart: float) -> dict[str, list[float]]:
    """Return losses of all runs; those of one differ in the third step."""
    losses = {each: list(EXACT) for each in RUNS}
    losses["one process, microbatches of 1"][1] += 1e-5
    losses["one process, bfloat16"][0] += 1e-3
    losses[name][2] += apart
    return losses


def test_limits_of_convergence_are_the_largest_differences_so_far() -> None:
    limits = limits_of(losses_with("FSDP 2", 0.0))
    first, *later = limits["rounding"]
    assert first < 1e-5
    assert later == pytest.approx([SAFETY * 1e-5 + first] * 3)
    assert limits["float8"] == pytest.approx([FLOAT8 * 1e-3 + first] * 4)


@pytest.mark.parametrize(
    ("name", "apart", "is_within"),
    [
        ("FSDP 2", 5e-5, True),
        ("FSDP 2, CP 2", 2e-4, False),
        ("FSDP 2, TP 2, PP 2, float8", 0.03, True),
        ("FSDP 2, TP 2, CP 2, PP 2, float8", 0.04, False),
        ("FSDP 2", float("nan"), False),
    ],
)
def test_run_above_its_limit_is_named(name: str, apart: float, is_within: bool) -> None:
    lines = list(compare(losses_with(name, apart)))
    assert (lines[-1] == "all runs are within their limits") is is_within
    assert any(line.startswith(f"{name}: ") for line in lines) is not is_within
    assert len([line for line in lines if line.startswith("| ")]) == 1 + len(RUNS)


def test_picture_has_a_curve_for_each_run_and_limit() -> None:
    picture = draw(losses_with("FSDP 2", 1e-5))
    shown = 1 + sum(bool(run.limit) for run in RUNS.values())
    assert picture.count("<polyline") == shown + (shown - 1) + 2


@pytest.mark.slow
@pytest.mark.system
@pytest.mark.timeout(3600)
def test_runs_of_thirty_steps_are_within_their_limits(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "convergence.py"), "--steps", "30"]
    command += ["--directory", str(tmp_path), "--picture", str(tmp_path / "picture.svg")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all runs are within their limits" in done.stdout
