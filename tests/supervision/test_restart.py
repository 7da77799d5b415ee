"""A rank dies: all ranks restart and end with the same bits as an undisturbed run."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.commands import ONE_RANK, WEFT, run_weft
from tests.harness import run_ranks
from tests.monitor.test_webhook import SECRET, Receiver
from tests.small import losses, newest_state, records, train_rank
from tests.supervision.test_launcher import TORCHRUN, run, start_and_wait, wait_for
from tests.supervision.test_signals import workers
from weft.supervision.launcher import Failure, record_failure

pytestmark = pytest.mark.timeout(400, method="signal")  # so that fixtures tidy up

STEPS = ["--train.steps", "60"]
KILLS = (
    '[{kind = "kill", rank = 1, passing = 15}, {kind = "kill", rank = 0, passing = 7},'
    ' {kind = "kill", rank = 1, passing = 12}]'
)


def check_against_reference(directory: Path, store: Path, steps: int = 60, ranks: int = 2) -> None:
    straight = directory / "straight"
    overrides = [("run.dir", str(straight)), ("train.steps", str(steps))]
    run_ranks(train_rank, ranks, overrides, str(store))
    assert losses(directory / "run") == losses(straight)
    ours, theirs = newest_state(directory / "run"), newest_state(straight)
    assert all(ours[name].equal(theirs[name]) for name in theirs)


def count_starts(directory: Path) -> int:
    """Return the number of starts of rank 0, from its log."""
    return (directory / "run/logs/rank-0.log").read_text().count("--- ")


def check_restarted(
    completed: subprocess.CompletedProcess[str], directory: Path, rank: int
) -> None:
    """Check that the killed rank is reported and that the run restarted once, from step 10."""
    assert completed.returncode == 0, completed.stderr
    assert f"rank {rank} failed: SIGKILL: the process was killed by a signal" in completed.stderr
    assert f"restarting from {directory}/run/checkpoints/step-00000010" in completed.stderr
    assert "Traceback" not in completed.stderr
    assert count_starts(directory) == 2


@pytest.mark.system
def test_restart_killed_rank_ends_with_the_same_bits(
    arguments: list[str], store_path: Path, tmp_path: Path
) -> None:
    """The launcher posts the events, and no file or output has the URL."""
    # A synchronous save ends before the rank dies; an async save might not.
    kill = ["--resilience.faults", '[{kind = "kill", passing = 12}]']
    command = [*arguments, *ONE_RANK, "--checkpoint.async_save", "false", *kill]
    command += ["--monitor.webhook", "env:HOOK"]
    with Receiver() as receiver:
        completed = run_weft(command, tmp_path, timeout=100, HOOK=receiver.url)
        receiver.shutdown()
    check_restarted(completed, tmp_path, rank=0)
    check_against_reference(tmp_path, store_path, 20, ranks=1)
    details = [message["detail"] for message in receiver.messages]
    assert details == [
        "started on 1 rank",
        "rank 0 failed: SIGKILL: the process was killed by a signal, possibly because the node ran "
        "out of memory",
        "resumed from step 10 on 1 rank",
        "all 20 steps are done",
    ]
    assert SECRET not in completed.stdout + completed.stderr
    for path in tmp_path.rglob("*"):
        assert not path.is_file() or SECRET.encode() not in path.read_bytes(), path


@pytest.mark.slow
def test_restart_rank_killed_beside_a_suspended_one_ends_with_the_same_bits(
    arguments: list[str], store_path: Path, tmp_path: Path
) -> None:
    """The suspended rank is killed at once; torch would wait 30 s."""
    faults = (
        '[{kind = "stop", rank = 0, passing = 12},'
        ' {kind = "slow", rank = 1, passing = 12, seconds = 0.5},'
        ' {kind = "kill", rank = 1, passing = 12}]'
    )
    # A synchronous save ends before the rank dies; an async save might not.
    command = [*arguments, "--checkpoint.async_save", "false", "--resilience.faults", faults]
    completed = run_weft(command, tmp_path, timeout=100)
    check_restarted(completed, tmp_path, rank=1)
    second_run, before = (
        records(tmp_path / "run")[11]["time"],
        records(tmp_path / "run")[10]["time"],
    )
    assert second_run - before < 60
    check_against_reference(tmp_path, store_path, 20)


@pytest.mark.slow
def test_restart_third_death_uses_up_the_budget(
    arguments: list[str], store_path: Path, tmp_path: Path
) -> None:
    """The budget is two restarts; the third death ends the run."""
    command = [
        *arguments,
        *STEPS,
        "--resilience.faults",
        KILLS,
        "--resilience.max_restarts_per_hour",
        "2",
    ]
    completed = run(command, tmp_path, timeout=200)
    assert completed.returncode == 1
    assert completed.stderr.count("failed: SIGKILL") == 3
    assert completed.stderr.count("restarting from") == 2
    last = completed.stderr[completed.stderr.rindex("weft: rank") :]
    assert last.startswith("weft: rank 1 failed: SIGKILL")
    assert "not restarted: resilience.max_restarts_per_hour=2 restarts are used up" in last
    assert f"resume from {tmp_path}/run/checkpoints" in last
    assert run(command, tmp_path).returncode == 0
    check_against_reference(tmp_path, store_path)


@pytest.mark.slow
def test_restart_runtime_error_is_retried_once(
    arguments: list[str], store_path: Path, tmp_path: Path
) -> None:
    fault = '[{kind = "raise", rank = 1, passing = 15}]'
    completed = run([*arguments, *STEPS, "--resilience.faults", fault], tmp_path, timeout=200)
    assert completed.returncode == 0, completed.stderr
    assert "rank 1 failed: RuntimeError: injected fault at step" in completed.stderr
    assert "restarting from" in completed.stderr
    check_against_reference(tmp_path, store_path)


def failure(kind: str = "SIGKILL", location: str = "", transient: bool = True) -> Failure:
    return Failure(0, kind, "message", "", Path("log"), transient=transient, where=location)


def test_judge_failures_allows_restarts_within_the_budget() -> None:
    hopeful = record_failure(failure(), [], 3)
    assert hopeful.transient
    assert not hopeful.no_retry_reason
    assert not record_failure(failure(), [], 0).transient
    assert not record_failure(failure(transient=False), [], 3).transient
    # The same error twice in a row is not transient; another error or place may be.
    before = [(time.monotonic(), failure("RuntimeError", "in step 7"))]
    assert record_failure(failure("RuntimeError", "in step 7"), before[:], 3).no_retry_reason
    assert not record_failure(failure("RuntimeError", "in step 8"), before[:], 3).no_retry_reason
    assert not record_failure(failure("OSError", "in step 7"), before[:], 3).no_retry_reason
    # After an hour the budget is full again.
    for age, used_up in ((0, True), (3500, True), (3700, False)):
        past = [(time.monotonic() - age, failure()) for _ in range(3)]
        assert bool(record_failure(failure(), past, 3).no_retry_reason) == used_up


@pytest.mark.slow
def test_restart_by_torchrun_ends_with_the_same_bits(
    arguments: list[str], store_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torchrun's restarts work too, if its stale store is disabled."""
    command = [
        *TORCHRUN,
        "--max-restarts=1",
        "-m",
        "weft",
        *arguments[len(WEFT) :],
        *STEPS,
    ]
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    process = start_and_wait(command, tmp_path, 12)
    os.kill(workers(process)[1], signal.SIGKILL)
    assert process.wait(timeout=150) == 0
    wait_for(tmp_path / "run", 60)
    check_against_reference(tmp_path, store_path)
