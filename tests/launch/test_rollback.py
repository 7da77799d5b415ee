"""`weft rollback`: a run goes on from an earlier step, on a branch of its own."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.launch.test_local import ONE_RANK
from tests.small import newest_state, records
from weft.checkpoint.manifest import checkpoint_step, checkpoints
from weft.cli import main
from weft.job import InvalidJob
from weft.launch.start import rollback

pytestmark = pytest.mark.timeout(400, method="signal")  # so that fixtures tidy up


def run(command: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=150, check=False
    )


def steps_of(folder: Path) -> list[int]:
    return [checkpoint_step(path) for path in checkpoints(folder / "run/checkpoints")]


def test_back_and_forth(
    arguments: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    command = [*arguments, *ONE_RANK, "--checkpoint.interval", "5", "--checkpoint.keep", "9"]
    assert run(command, tmp_path).returncode == 0
    assert steps_of(tmp_path) == [5, 10, 15, 20]
    before = newest_state(tmp_path / "run")

    with pytest.raises(InvalidJob, match=r"use one of \[0, 5, 10, 15, 20\]"):
        rollback(tmp_path / "run", 7)
    monkeypatch.chdir(tmp_path)
    assert main(["rollback", "run", "10"]) == 0
    said = capsys.readouterr().out
    assert "goes on from" in said
    assert "no longer: [15, 20]" in said
    assert steps_of(tmp_path) == [5, 10]

    done = run(command, tmp_path)
    assert done.returncode == 0, done.stderr
    assert "going on from" in done.stdout
    assert "step-00000010" in done.stdout
    assert steps_of(tmp_path) == [5, 10, 15, 20]
    assert [record["step"] for record in records(tmp_path / "run")] == list(range(1, 21))
    after = newest_state(tmp_path / "run")
    assert all(after[name].equal(tensor) for name, tensor in before.items())


def test_what_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(InvalidJob, match="is not the folder of a run"):
        rollback(tmp_path / "nothing", 7)
