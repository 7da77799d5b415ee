"""Every command uses the run directory that the user names, copied or moved as it may be."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tarfile
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.commands import ONE_RANK, WEFT, Finished, run_weft, train_in_one_rank
from tests.small import records
from weft.checkpoint.manifest import checkpoint_step, list_checkpoints
from weft.checkpoint.owner import owner_errors, write_owner
from weft.cli.main import main
from weft.config.reader import read_job
from weft.config.run_paths import portable
from weft.config.schema import flatten
from weft.config.writer import to_toml
from weft.preparation.job_checks import prepare_job

pytestmark = pytest.mark.timeout(400, method="signal")  # so that fixtures tidy up

BRANCH_KEYS = [*ONE_RANK, "--train.steps", "12", "--optim.lr", "1e-4"]


def contents(directory: Path) -> dict[str, str]:
    """Return the hash of every file, by path."""
    return {
        str(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }


def copied(run: Path, home: Path) -> str:
    shutil.copytree(run, home / "copy")
    return "copy"


def moved(run: Path, home: Path) -> str:
    shutil.copytree(run, home / "first")
    (home / "elsewhere").mkdir()
    (home / "first").rename(home / "elsewhere/second")
    return "elsewhere/second/"


def restored(run: Path, home: Path) -> str:
    with tarfile.open(home / "run.tar", "w") as archive:
        archive.add(run, "archived")
    with tarfile.open(home / "run.tar") as archive:
        archive.extractall(home / "restored", filter="data")
    return str(home / "restored/archived")


def linked(run: Path, home: Path) -> str:
    shutil.copytree(run, home / "target")
    (home / "link").symlink_to("target")
    return "link"


def under_a_linked_parent(run: Path, home: Path) -> str:
    shutil.copytree(run, home / "disk/runs/a")
    (home / "mount").symlink_to(home / "disk", target_is_directory=True)
    return str(home / "mount/runs/a")


def through_dots(run: Path, home: Path) -> str:
    shutil.copytree(run, home / "a")
    return f"../{home.name}/./a"


def by_its_job_file(run: Path, home: Path) -> str:
    shutil.copytree(run, home / "a")
    return "a/job.toml"


FORMS = [
    copied,
    moved,
    restored,
    linked,
    under_a_linked_parent,
    through_dots,
    by_its_job_file,
]


@pytest.fixture(params=FORMS, ids=lambda form: form.__name__)
def named(
    request: pytest.FixtureRequest,
    finished: Finished,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> str:
    """The name of a run directory in the working directory."""
    form: Callable[[Path, Path], str] = request.param
    monkeypatch.chdir(tmp_path)
    return form(finished.directory / "run", tmp_path)


def directory_of(named: str) -> Path:
    return Path(named.removesuffix("job.toml"))


def newest_step(run: Path) -> int:
    return checkpoint_step(list_checkpoints(run / "checkpoints")[-1])


@pytest.mark.system
def test_command_uses_the_run_directory_that_was_named(
    named: str, finished: Finished, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    original, run = contents(finished.directory), directory_of(named)
    _, plan = prepare_job(named, [("train.steps", "22")])
    assert plan.run_path.samefile(run)
    assert main(["plan", named, "--json"]) == 0
    assert Path(json.loads(capsys.readouterr().out)["run_dir"]).samefile(run)

    command = ["launch", named, "--on", "slurm", "--run.device", "cpu", "--dry-run"]
    assert main([*command, "--nodes", "1"]) == 0
    script = capsys.readouterr().out
    assert f"--run.dir {plan.run_dir}" in script
    assert f"--output={plan.run_dir}" in script

    (run / "report.html").unlink(missing_ok=True)
    assert main(["report", named]) == 0
    assert (run / "report.html").is_file()
    assert main(["generate", named, "--max-tokens", "1", "--prompt", "x"]) == 0
    assert main(["hang", named]) == 0
    assert main(["diff", named, str(finished.directory / "run")]) == 0
    capsys.readouterr()
    assert main(["export", named, "out"]) == 0
    assert "step-00000020" in capsys.readouterr().out
    assert main(["rollback", named, "10"]) == 0
    assert newest_step(run) == 10
    _, plan = prepare_job(named, [("train.steps", "22")])
    assert newest_step(plan.run_path) == 10
    assert contents(finished.directory) == original


@pytest.mark.slow
def test_train_resumes_in_the_directory_that_was_named(named: str, finished: Finished) -> None:
    original, run = contents(finished.directory), directory_of(named)
    done = run_weft([*WEFT, "train", named, "--train.steps", "22"], Path.cwd())
    assert done.returncode == 0, done.stdout + done.stderr
    assert "resuming from" in done.stdout
    assert newest_step(run) == 22
    assert contents(finished.directory) == original


@pytest.mark.system
def test_train_copy_that_was_rolled_back_leaves_the_original_untouched(
    finished: Finished, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(finished.directory / "run", tmp_path / "runs/a")
    shutil.copytree(tmp_path / "runs/a", tmp_path / "runs/b")
    original = contents(tmp_path / "runs/a")
    monkeypatch.chdir(tmp_path)
    assert main(["rollback", "runs/b", "10"]) == 0
    done = run_weft([*WEFT, "train", "runs/b", *BRANCH_KEYS], tmp_path)
    assert done.returncode == 0, done.stderr
    newest = tmp_path / "runs/b/checkpoints/step-00000010"
    change = "optim.lr 0.002 -> 0.0001"
    assert f"resuming from {newest}" in done.stdout
    assert change in done.stdout
    assert [record["step"] for record in records(tmp_path / "runs/b")] == [*range(1, 13)]
    assert newest_step(tmp_path / "runs/b") == 12
    assert contents(tmp_path / "runs/a") == original
    head = (tmp_path / "runs/b/job.toml").read_text().partition("\n\n")[0]
    assert "started from the recipe 'demo'" in head  # and not from its own directory
    assert "# optim.lr: 0.002 -> 0.0001" in head


@pytest.mark.system
def test_copy_does_not_share_a_checkpoint_directory_with_its_original(
    finished: Finished,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(finished.directory / "run", "runs/a")
    (tmp_path / "runs/a/checkpoints").rename(tmp_path / "disk")
    keys = ["--checkpoint.dir", "disk", "--train.steps", "21"]
    train_in_one_rank(["runs/a", *ONE_RANK, *keys], tmp_path)
    shutil.copytree("runs/a", "runs/b")
    (tmp_path / "runs/c").mkdir()
    original = contents(tmp_path)

    for command in (
        ["train", "runs/b", "--train.steps", "22"],
        ["train", "runs/a", "--run.dir", "runs/c"],
        ["rollback", "runs/b", "10"],
    ):
        assert main(command) == 2
        error = capsys.readouterr().err
        found = f'checkpoint.dir="{tmp_path}/disk" has the checkpoints of the run in'
        assert f"{found} {tmp_path}/runs/a, which this run would delete" in error
        assert f"cp -r {tmp_path}/disk NEW" in error
    assert contents(tmp_path) == original

    shutil.copytree("disk", "disk-b")
    text = (tmp_path / "runs/b/job.toml").read_text()
    (tmp_path / "runs/b/job.toml").write_text(text.replace(f"{tmp_path}/disk", "./../../disk-b"))
    assert main(["rollback", "runs/b", "10"]) == 0
    _, plan = prepare_job("runs/b", [])
    assert plan.job.checkpoint.dir == f"{tmp_path}/disk-b"
    shutil.rmtree("runs/b")
    os.rename("runs/a", "runs/moved")  # it keeps its checkpoints
    _, plan = prepare_job("runs/moved", [("train.steps", "22")])
    assert plan.job.checkpoint.dir == f"{tmp_path}/disk"


def test_paths_in_the_run_directory_are_stored_relative_to_it(tmp_path: Path) -> None:
    pairs = {
        "run.dir": f"{tmp_path}/a",
        "checkpoint.dir": f"{tmp_path}/a/own",
        "data.path": f"{tmp_path}/a/text.txt",
        "data.tokenizer": f"{tmp_path}/a/tokenizer.json",
        "data.cache_dir": f"{tmp_path}/ab/cache",
    }
    job, base, errors = read_job("demo", [*pairs.items()])
    assert errors == []
    for name in ("a", "b"):
        run = tmp_path / name
        run.mkdir()
        (run / "job.toml").write_text(to_toml(portable(job, tmp_path / "a"), "demo", base))
    values = tomllib.loads((tmp_path / "b/job.toml").read_text())
    assert (values["run"]["dir"], values["checkpoint"]["dir"]) == ("auto", "./own")
    assert read_job(str(tmp_path / "a"))[0] == job
    moved = flatten(read_job(str(tmp_path / "b"))[0])
    assert {key: moved[key] for key in pairs} == {
        key: path.replace(f"{tmp_path}/a/", f"{tmp_path}/b/") for key, path in pairs.items()
    } | {"run.dir": f"{tmp_path}/b"}

    other, _, _ = read_job(str(tmp_path / "b"), [("run.dir", f"{tmp_path}/c")])
    assert (other.run.dir, other.checkpoint.dir) == (f"{tmp_path}/c", f"{tmp_path}/c/own")
    assert other.data.path == f"{tmp_path}/b/text.txt"
    (tmp_path / "mine.toml").write_text('extends = "b"\n')  # another run of the same job
    mine, _, errors = read_job(str(tmp_path / "mine.toml"))
    assert (mine.run.dir, mine.checkpoint.dir, errors) == ("auto", "auto", [])
    assert mine.data.path == f"{tmp_path}/b/text.txt"


def test_recipe_of_the_name_job_is_no_run(tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text("[train]\nsteps = 3\n")
    assert read_job(str(tmp_path))[0].run.dir == "auto"
    (tmp_path / "metrics.jsonl").touch()  # a run, whose user has shortened the file
    assert read_job(str(tmp_path))[0].run.dir == str(tmp_path)


def test_run_stores_no_absolute_path_of_its_own_directory(finished: Finished) -> None:
    run = finished.directory / "run"
    found = {
        str(path.relative_to(run))
        for path in run.rglob("*")
        if path.is_file() and os.fsencode(run) in path.read_bytes()
    }
    assert found == set()


def test_nodes_with_run_directories_of_their_own_share_checkpoints(tmp_path: Path) -> None:
    one, two, copied, home = (tmp_path / name for name in ("one", "two", "copied", "disk"))
    for run_dir in (one, two):
        run_dir.mkdir()
        (run_dir / "job.toml").write_text(f'[checkpoint]\ndir = "{home}"\n')
    write_owner(home, one, has_nodes=True)
    owner = (home / "run.json").read_text()
    assert owner_errors(home, two, has_nodes=True) == []
    write_owner(home, two, has_nodes=True)
    assert (home / "run.json").read_text() == owner
    shutil.copytree(one, copied)
    assert owner_errors(home, copied, has_nodes=True)
    assert owner_errors(home, two)  # of another run
    one.rename(tmp_path / "moved")
    assert owner_errors(home, tmp_path / "moved", has_nodes=True) == []
