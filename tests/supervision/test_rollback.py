"""`weft rollback`: a run resumes from an earlier step, on a separate branch."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.commands import Finished, run_joined
from tests.small import newest_state, records
from weft.checkpoint.manifest import checkpoint_step, list_checkpoints
from weft.cli.checkpoint_commands import roll_back
from weft.cli.main import main
from weft.config.errors import InvalidConfig

pytestmark = pytest.mark.timeout(400, method="signal")  # so that fixtures tidy up


def steps_of(directory: Path) -> list[int]:
    return [checkpoint_step(path) for path in list_checkpoints(directory / "run/checkpoints")]


@pytest.mark.system
def test_rollback_and_train_again_ends_with_the_same_bits(
    finished: Finished,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    shutil.copytree(finished.directory, tmp_path, dirs_exist_ok=True)
    assert steps_of(tmp_path) == [5, 10, 15, 20]
    before = newest_state(tmp_path / "run")

    with pytest.raises(InvalidConfig, match=r"Use one of \[0, 5, 10, 15, 20\]"):
        roll_back(tmp_path / "run", 7)
    monkeypatch.chdir(tmp_path)
    assert main(["rollback", "run", "10"]) == 0
    output = capsys.readouterr().out
    assert "resume from" in output
    assert "dropped the checkpoints of steps [15, 20]" in output
    assert steps_of(tmp_path) == [5, 10]

    statuses, out = run_joined(finished.command, tmp_path, 2)
    assert statuses == [0, 0], out
    assert out.count("tokens/s") == 10  # only the steps after 10
    assert steps_of(tmp_path) == [5, 10, 15, 20]
    assert [record["step"] for record in records(tmp_path / "run")] == list(range(1, 21))
    after = newest_state(tmp_path / "run")
    assert all(after[name].equal(tensor) for name, tensor in before.items())


def test_rollback_directory_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match="is not a run directory"):
        roll_back(tmp_path / "nothing", 7)
