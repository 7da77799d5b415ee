"""`weft train` as users start it: its processes, faults and restarts."""

from __future__ import annotations

import io
import os
import shlex
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from tests.commands import (
    ONE_RANK,
    WEFT,
    Finished,
    processes_in,
    run_joined,
    run_weft,
    run_weft_in_child,
)
from tests.harness import run_ranks
from tests.small import losses, newest_state, records, train_rank
from weft.checkpoint.manifest import list_checkpoints
from weft.cli.main import main
from weft.config.exit_statuses import USAGE_ERROR
from weft.supervision.launcher import Failure, find_root_cause
from weft.supervision.rank_exit import write_error

# Each test starts several commands, which take long on a busy machine.
pytestmark = pytest.mark.timeout(400, method="signal")  # so that fixtures tidy up


def run(command: list[str], directory: Path, timeout: float = 200, **environment: str):
    return subprocess.run(
        command,
        cwd=directory,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def test_train_whole_run_shows_records_and_can_be_used(
    finished: Finished, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    completed = finished.done
    assert completed.returncode == 0, completed.stderr
    assert completed.stderr == ""
    out = completed.stdout
    assert "35.0 K parameters, 2 CPU ranks (dp_shard 2), 256 tokens per step" in out
    assert out.count("tokens/s") == 20  # rank 0 alone prints a line per step without a terminal
    assert "validation loss" in out
    assert "unigram" in out
    assert "next:  weft chat run\n       weft evaluate run\n" in out
    shutil.copytree(finished.directory, tmp_path, dirs_exist_ok=True)
    run_dir = tmp_path / "run"
    assert {path.name for path in run_dir.iterdir()} == {
        ".lock",
        "checkpoints",
        "document_tokens.json",
        "environment.json",
        "events.jsonl",
        "job.toml",
        "logs",
        "metrics.jsonl",
        "plan.json",
        "spans",
        "tokenizer.json",
    }
    assert {path.name for path in (run_dir / "logs").iterdir()} == {
        "launcher.log",
        "rank-0.log",
        "rank-1.log",
        f"ranks-{socket.gethostname()}.json",
    }
    assert sorted(os.listdir(tmp_path)) == ["cache", "run", "text.py"]  # and no other files

    (run_dir / "metrics.jsonl").unlink()
    half_deleted = run_dir / "checkpoints" / ".tmp-step-00000010-deleted"
    half_deleted.mkdir()  # by a process that was killed
    job = (run_dir / "job.toml").read_text()
    changes = ["--train.steps", "10", "--optim.lr", "0.5"]  # nothing is trained with them
    second_run = run_weft([*finished.command, *changes], tmp_path)
    assert (second_run.returncode, second_run.stderr) == (0, "")
    assert "is complete at step 20" in second_run.stdout
    assert (run_dir / "job.toml").read_text() == job
    assert not half_deleted.exists()

    prompt = ["--prompt", "import ", "--max-tokens", "20"]
    text = run_weft([*WEFT, "generate", "run", *prompt], tmp_path)
    assert text.returncode == 0, text.stderr
    assert text.stdout.startswith("import ")
    assert len(text.stdout) > len("import \n")
    newest = str(list_checkpoints(run_dir / "checkpoints")[-1])
    capsys.readouterr()
    assert main(["generate", newest, *prompt]) == 0
    assert capsys.readouterr().out == text.stdout


@pytest.mark.slow
def test_train_job_file_in_another_launcher_repeats_the_run(
    finished: Finished, tmp_path: Path
) -> None:
    """job.toml starts the same run in another directory, in ranks of another launcher."""
    shutil.copytree(finished.directory, tmp_path, dirs_exist_ok=True)
    command = [*WEFT, "train", "run/job.toml", "--run.dir", "copy"]
    statuses, out = run_joined(command, tmp_path, 2)
    assert statuses == [0, 0], out
    assert out.count("tokens/s") == 20
    assert (tmp_path / "copy/job.toml").exists()
    assert losses(tmp_path / "copy") == losses(tmp_path / "run")
    ours, theirs = newest_state(tmp_path / "run"), newest_state(tmp_path / "copy")
    assert all(ours[name].equal(theirs[name]) for name in theirs)


@pytest.mark.system
def test_train_another_text_in_the_same_directory_is_refused(
    finished: Finished, text_dir: Path, tmp_path: Path
) -> None:
    """A run resumes on its text only, and a refusal changes no file."""
    shutil.copytree(finished.directory, tmp_path, dirs_exist_ok=True)
    before = {p: p.read_bytes() for p in (tmp_path / "run").rglob("*") if p.is_file()}
    shutil.copy(text_dir / "bdb.py", tmp_path / "text.py")
    completed = run_weft([*finished.command, "--train.steps", "25"], tmp_path)
    assert completed.returncode == 2
    assert "is not the data that" in completed.stderr
    assert before == {p: p.read_bytes() for p in (tmp_path / "run").rglob("*") if p.is_file()}


def wait_for(directory: Path, step: int) -> None:
    """Wait until the run in ``directory`` has recorded ``step``."""
    deadline = time.monotonic() + 120
    while not (directory / "metrics.jsonl").exists() or len(losses(directory)) < step:
        assert time.monotonic() < deadline, f"step {step} did not come"
        time.sleep(0.05)


TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]


def reference_run(arguments: list[str], directory: Path, store: Path) -> Path:
    """Run the training of a command in as many ranks, without the command."""
    words = arguments[len(WEFT) + 2 :]
    pairs = {
        key.removeprefix("--"): value for key, value in zip(words[::2], words[1::2], strict=True)
    }
    straight = directory / "straight"
    overrides = [*pairs.items(), ("run.dir", str(straight))]
    run_ranks(train_rank, int(pairs["run.nproc_per_node"]), overrides, str(store), timeout=120)
    return straight


def start_and_wait(
    command: list[str], directory: Path, step: int, start_new_session: bool = False
) -> subprocess.Popen[str]:
    """Start a run in ``directory`` and return once it has recorded ``step``."""
    log = (directory / "log").open("w")
    process = subprocess.Popen(
        command,
        cwd=directory,
        stdout=log,
        stderr=log,
        text=True,
        start_new_session=start_new_session,
    )
    wait_for(directory / "run", step)
    return process


LONG = ["--train.steps", "60", "--checkpoint.interval", "15", "--optim.warmup_steps", "20"]
WAITS = '[{site = "step", passing = 32, kind = "slow", seconds = 1000}]'


@pytest.mark.slow
def test_train_killed_launcher_resumes_bit_for_bit(
    arguments: list[str], store_path: Path, tmp_path: Path
) -> None:
    """A rank ends when its launcher is killed; until then no other process may train."""
    usual = [*arguments, *ONE_RANK, *LONG]
    command = [*usual, "--resilience.max_restarts_per_hour", "0", "--resilience.faults", WAITS]
    process = start_and_wait(command, tmp_path, 31)
    second = run_weft(command, tmp_path)
    assert second.returncode == 2
    assert "is in use by another training process" in second.stderr
    assert process.poll() is None
    process.kill()
    process.wait(timeout=60)
    deadline = time.monotonic() + 10
    while processes_in(tmp_path):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert len(losses(tmp_path / "run")) == 31

    second_run = run_weft([*command, "--checkpoint.keep_latest", "5"], tmp_path)
    assert second_run.returncode == 0, second_run.stderr
    assert "resuming from" in second_run.stdout
    assert "; checkpoint.keep_latest 2 -> 5\n" in second_run.stdout
    straight = reference_run(usual, tmp_path, store_path)
    assert losses(tmp_path / "run") == losses(straight)
    ours, theirs = newest_state(tmp_path / "run"), newest_state(straight)
    assert all(ours[name].equal(theirs[name]) for name in theirs)


BROKEN = """
from weft.optim.optimizer import build_adamw

def build(groups, optim):
    optimizer = build_adamw(groups, optim)
    steps = []
    def step(*args, **kwargs):
        steps.append(1)
        if len(steps) == 7:
            raise ZeroDivisionError("a planted fault")
    optimizer.register_step_pre_hook(step)
    return optimizer
"""


def run_beside_a_child(*call: Any) -> tuple[int, bool]:
    """Run weft's command in this rank; return its status, and if another child still runs."""
    with subprocess.Popen(["sleep", "60"]) as child:
        status = run_weft_in_child(*call)
        is_alive = child.poll() is None
        child.kill()
    return status, is_alive


def test_train_exception_in_a_rank_is_shown_and_not_retried(
    arguments: list[str], tmp_path: Path
) -> None:
    """The launcher leaves another child of its program alone."""
    (tmp_path / "broken.py").write_text(BROKEN)
    command = [*arguments[len(WEFT) :], *ONE_RANK]
    command += ["--optim.name", "broken:build", "--checkpoint.interval", "5"]
    output = tmp_path / "output"
    output.mkdir()
    call = (command, str(tmp_path), str(output), {}, 0, True)
    assert run_ranks(run_beside_a_child, 1, *call, timeout=200) == [(1, True)]
    error = (output / "2").read_text()
    lines = error.splitlines()
    assert lines[0] == "weft: rank 0 failed: ZeroDivisionError: a planted fault (in step 7)"
    assert sum("Traceback" in line for line in lines) <= 1
    assert len(lines) < 20
    assert f"log: {tmp_path}/run/logs/rank-0.log" in error
    assert f"resume from {tmp_path}/run/checkpoints/step-00000005" in error
    log = (tmp_path / "run/logs/rank-0.log").read_text()
    assert "ZeroDivisionError" in log
    assert log.count("--- ") == 1  # a bug is not retried


def failed(statuses: dict[int, int]) -> dict[int, ProcessFailure]:
    """Return the cause reported by torch's agent for these exit statuses."""
    return {
        rank: ProcessFailure(local_rank=rank, pid=100 + rank, exitcode=status, error_file="")
        for rank, status in statuses.items()
    }


def cause_of(directory: Path, *arguments: Any, **extra: Any) -> Failure:
    cause = find_root_cause(directory, *arguments, **extra)
    assert cause is not None
    return cause


def test_first_cause_of_several_failures_is_the_earliest(tmp_path: Path) -> None:
    """The cause is the same for any order and subset of failed ranks."""
    (tmp_path / "logs").mkdir()
    write_error(tmp_path, 1, ZeroDivisionError("planted"), io.StringIO())
    write_error(tmp_path, 0, RuntimeError("connection reset by peer"), io.StringIO())
    for observed in ({0: 1}, {1: 1}, {0: 1, 1: 1}):
        cause = cause_of(tmp_path, range(2), failed(observed))
        assert (cause.rank, cause.kind, cause.message) == (1, "ZeroDivisionError", "planted")
        assert cause.log == tmp_path / "logs/rank-1.log"
    # A rank killed by a signal is the cause of errors on other ranks.
    cause = cause_of(tmp_path, range(3), failed({0: 1, 2: -9}))
    assert (cause.rank, cause.kind) == (2, "SIGKILL")
    # A SIGKILL from the agent is not a cause.
    cause = cause_of(tmp_path, range(4), failed({2: -9, 3: -6}), killed={102})
    assert (cause.rank, cause.kind) == (3, "SIGABRT")
    assert cause_of(tmp_path, range(3), failed({2: -9}), killed={102}).kind == "ZeroDivisionError"
    # Records of an earlier attempt are ignored.
    assert find_root_cause(tmp_path, range(3), failed({2: -9}), {102}, time.time() + 1) is None
    cause = cause_of(tmp_path, range(3), failed({0: 1, 2: 7}))
    assert (cause.rank, cause.message) == (2, "the process exited with status 7")


@pytest.mark.slow
@pytest.mark.system
def test_train_closed_output_pipe_the_run_completes(arguments: list[str], tmp_path: Path) -> None:
    """A closed terminal does not end the run; log files have all output."""
    command = [*arguments, *ONE_RANK, "--train.steps", "6"]
    completed = run_weft(command, tmp_path, reader=False)
    assert "Traceback" not in completed.stderr
    assert len(losses(tmp_path / "run")) == 6
    assert list_checkpoints(tmp_path / "run/checkpoints")[-1].name == "step-00000006"


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["| head -1", ">/dev/full", ">&-"])
def test_train_unwritable_output_the_run_completes(
    mode: str, arguments: list[str], tmp_path: Path
) -> None:
    run(["bash", "-c", f"{shlex.join([*arguments, *ONE_RANK])} {mode}"], tmp_path)
    assert len(losses(tmp_path / "run")) == 20
    assert list_checkpoints(tmp_path / "run/checkpoints")[-1].name == "step-00000020"


@pytest.mark.slow
def test_train_inside_torchrun_equals_an_undisturbed_run(
    arguments: list[str], store_path: Path, tmp_path: Path
) -> None:
    """The command joins the ranks that torchrun has started."""
    command = [*TORCHRUN, "-m", "weft", *arguments[len(WEFT) :]]
    completed = run(command, tmp_path, GLOO_SOCKET_IFNAME="lo")
    assert completed.returncode == 0, completed.stderr
    assert completed.stdout.count("tokens/s") == 20
    ours = reference_run(arguments, tmp_path, store_path)
    assert losses(tmp_path / "run") == losses(ours)
    a, b = newest_state(tmp_path / "run"), newest_state(ours)
    assert all(a[name].equal(b[name]) for name in a)
    assert records(tmp_path / "run")[-1]["step"] == 20


def test_train_bad_text_in_joined_ranks_ends_each_with_the_cause(
    arguments: list[str], tmp_path: Path
) -> None:
    """The text is invalid, which weft detects only while reading it."""
    (tmp_path / "bad.txt").write_bytes(b"fine\n" * 100 + b"\xff\n")
    command = [*arguments, "--data.path", "bad.txt", "--data.cache_dir", "cache"]
    statuses, out = run_joined(command, tmp_path, 2)
    assert statuses == [USAGE_ERROR, USAGE_ERROR]
    assert "line 101: not UTF-8" in out
    assert not (tmp_path / "run/metrics.jsonl").exists()
