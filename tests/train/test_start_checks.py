"""The checks of a start: by ``--dry-run``, of logins, and of variables left over in a shell."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from tests.small import small_job
from weft.cli.main import main
from weft.config.errors import InvalidConfig
from weft.train.environment import detect_environment
from weft.train.job_checks import check_logins

VARIABLES = {
    "RANK": "0",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "0",
    "MASTER_ADDR": "node1",
    "MASTER_PORT": "29500",
}


def test_dry_run_refuses_a_model_that_does_not_fit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("one two three. " * 2000)
    sizes = {"num_layers": 400, "dim": 16384, "num_heads": 128, "vocab_size": 4096}
    words = [word for key, value in sizes.items() for word in (f"--model.{key}", str(value))]
    words += ["--data.path", str(text)]
    run = tmp_path / "run"
    assert main(["train", "demo", *words, "--run.dir", str(run), "--dry-run"]) == 2
    assert "memory does not fit" in capsys.readouterr().err
    assert not run.exists()


def test_check_logins_wandb_without_login_names_what_works(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    job = small_job(("monitor.trackers", "wandb"))
    [error] = check_logins(job)
    assert "WANDB_MODE=offline" in error.remedy
    assert "wandb login" in error.remedy
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert check_logins(job) == []


@pytest.mark.parametrize("count", range(1, 5))
def test_environment_one_of_rank_and_world_size_is_answered_by_unset(count: int) -> None:
    for names in itertools.combinations(VARIABLES, count):
        if len({"RANK", "WORLD_SIZE"}.intersection(names)) != 1:
            continue
        environment = {name: VARIABLES[name] for name in names}
        with pytest.raises(InvalidConfig) as caught:
            detect_environment(environment)
        [error] = caught.value.errors
        assert error.key in names
        command, unset, *left_over = error.remedy.split()
        assert (command, unset) == ("run", "unset")
        rest = {name: value for name, value in environment.items() if name not in left_over}
        assert detect_environment(rest).source == "host"
