"""The checks of a start: by ``--dry-run``, of logins, and of variables left over in a shell."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

import pytest

from tests.commands import train_in_one_rank
from tests.small import small_job
from weft.cli.main import main
from weft.config.errors import InvalidConfig
from weft.preparation.environment import detect_environment
from weft.preparation.job_checks import check_logins, prepare_job

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


def forget_wandb_login(monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("NETRC", str(home / "netrc"))
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)


def test_check_logins_wandb_without_login_names_what_works(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    forget_wandb_login(monkeypatch, tmp_path)
    job = small_job(("monitor.trackers", "wandb"))
    [error] = check_logins(job)
    assert "WANDB_MODE=offline" in error.remedy
    assert "wandb login" in error.remedy
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert check_logins(job) == []


def test_check_logins_of_a_run_that_has_started_is_skipped(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    forget_wandb_login(monkeypatch, tmp_path)
    text, run = tmp_path / "text.txt", tmp_path / "run"
    text.write_text("one two three. " * 2000)
    words = ["demo", "--data.path", str(text), "--run.dir", str(run), "--train.steps"]
    own = ["--monitor.report", "false", "--run.nproc_per_node", "1"]
    wandb = ["--monitor.trackers", "wandb", "--dry-run"]
    assert main(["train", *words, "1", *own, *wandb]) == 2  # a new run needs the login
    train_in_one_rank([*words, "1", *own, "--monitor.trackers", ""], tmp_path)
    assert main(["train", *words, "2", *own, *wandb]) == 0


OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "0",
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
SLURM = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "n[1-2]",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
}


@pytest.mark.parametrize(
    "variables", [VARIABLES, OPEN_MPI, SLURM], ids=["torchrun", "mpi", "slurm"]
)
def test_environment_left_over_variables_are_answered_by_an_unset_that_works(
    variables: dict[str, str],
) -> None:
    refusals = 0
    for count in range(1, len(variables)):
        for names in itertools.combinations(variables, count):
            environment = {name: variables[name] for name in names}
            try:
                detect_environment(environment)
            except InvalidConfig as invalid:
                [error] = invalid.errors
            else:
                continue
            refusals += 1
            assert error.key in (*names, "MASTER_ADDR")
            _, unset, left_over = error.remedy.partition("run unset ")
            assert unset, error
            rest = {
                name: value for name, value in environment.items() if name not in left_over.split()
            }
            assert detect_environment(rest).source == "host"
    assert refusals > 7


def test_environment_incomplete_torchrun_variables_are_named() -> None:
    for names in (("RANK",), ("WORLD_SIZE",), ("RANK", "WORLD_SIZE"), ("RANK", "MASTER_ADDR")):
        with pytest.raises(InvalidConfig) as caught:
            detect_environment({name: VARIABLES[name] for name in names})
        [error] = caught.value.errors
        assert error.remedy == f"run unset {' '.join(names)}"
        assert all(n in error.rule for n in ("MASTER_PORT", "WORLD_SIZE") if n not in names)


@pytest.mark.parametrize(
    ("variables", "ranks"),
    [(VARIABLES, (8, 1)), (OPEN_MPI, (8, 2)), (SLURM, (4, 2))],
    ids=["torchrun", "mpi", "slurm"],
)
def test_prepare_job_in_a_rank_plans_the_ranks_of_its_launcher(
    variables: dict[str, str], ranks: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    here = dict(os.environ) | {"MASTER_ADDR": "localhost", "MASTER_PORT": "29500"} | variables
    monkeypatch.setattr(os, "environ", here)
    sizes = [("run.device", "cpu"), ("train.global_batch_size", "8")]
    _, plan = prepare_job("demo", sizes)
    assert (plan.world_size, plan.local_world_size) == ranks
