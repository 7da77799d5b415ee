"""On a signal to launcher or ranks, the run finishes the step and saves."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
import torch.distributed.elastic.multiprocessing.api as multiprocessing

from tests.commands import ONE_RANK, WEFT, Started, run_joined, run_weft
from tests.monitor.test_spot_notice import INTERRUPTION, TERMINATE, FakeMetadata
from tests.small import losses, newest_state, records
from tests.supervision.test_launcher import TORCHRUN, reference_run, run, start_and_wait, wait_for
from weft.checkpoint.manifest import checkpoint_step, list_checkpoints
from weft.config.exit_statuses import FAILED, REQUEUE
from weft.monitor import spot_notice
from weft.monitor.process import process_status
from weft.supervision import start

pytestmark = pytest.mark.timeout(400, method="signal")  # so that fixtures tidy up

SLOW = ["--checkpoint.interval", "0"]  # save on a signal only
ENDLESS = [*SLOW, "--train.steps", "100000"]


def start_and_wait_for_step(command: list[str], directory: Path, step: int) -> Started:
    """Start a run in ``directory``, forked, and return once it has recorded ``step``."""
    process = Started(command, directory)
    wait_for(directory / "run", step)
    return process


def workers(process: subprocess.Popen[str] | Started) -> list[int]:
    """Return the process ids of a run's ranks, in order."""
    all_ranks = (int(path.name) for path in Path("/proc").glob("[0-9]*"))
    result = [pid for pid in all_ranks if process_status(pid).get("PPid") == str(process.pid)]

    def rank(pid: int) -> tuple[int, int]:
        pairs = Path(f"/proc/{pid}/environ").read_text().split("\0")
        # Ranks that are forked keep the environment of the harness there, but start in order.
        values = dict(pair.split("=", 1) for pair in pairs if "=" in pair)
        return int(values.get("RANK", 0)), pid

    return sorted(result, key=rank)


TO: dict[str, Callable[[Started], list[int]]] = {
    "the launcher": lambda process: [process.pid],
    "one rank": lambda process: workers(process)[-1:],
    "all of them": lambda process: [process.pid, *workers(process)],
}


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_signal_in_a_finalizer_ends_before_the_ranks_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python ignores the exception of the handler there."""

    class Finalized:
        def __del__(self) -> None:
            signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(start, "stop_requested", threading.Event())
    before = signal.signal(signal.SIGTERM, start.handle_stop_signal)
    try:
        start.end_if_stopped()
        Finalized()
        with pytest.raises(SystemExit) as caught:
            start.end_if_stopped()
    finally:
        signal.signal(signal.SIGTERM, before)
    assert caught.value.code == REQUEUE


def test_stop_signal_whose_exception_a_library_replaces_ends_the_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As pydantic does while it builds a schema."""
    monkeypatch.setattr(start, "stop_requested", threading.Event())

    @start.handle_stop_errors()
    def run_library() -> None:
        try:
            signal.raise_signal(signal.SIGTERM)
        except SystemExit as error:
            raise ValueError("a schema cannot be built") from error

    before = signal.signal(signal.SIGTERM, start.handle_stop_signal)
    try:
        with pytest.raises(SystemExit) as caught:
            run_library()
    finally:
        signal.signal(signal.SIGTERM, before)
    assert caught.value.code == REQUEUE


@pytest.mark.system
@pytest.mark.parametrize(
    ("number", "to", "extra"),
    [
        pytest.param(signal.SIGTERM, "one rank", ONE_RANK, marks=pytest.mark.slow),
        pytest.param(signal.SIGTERM, "one rank", [], marks=pytest.mark.slow),
        pytest.param(signal.SIGTERM, "the launcher", [], marks=pytest.mark.slow),
        pytest.param(signal.SIGTERM, "all of them", [], marks=pytest.mark.slow),
        pytest.param(signal.SIGUSR1, "the launcher", [], marks=pytest.mark.slow),
    ],
)
def test_signal_in_training_saves_and_asks_for_requeue(
    number: signal.Signals, to: str, extra: list[str], arguments: list[str], tmp_path: Path
) -> None:
    process = start_and_wait_for_step([*arguments, *ENDLESS, *extra], tmp_path, 5)
    for pid in TO[to](process):
        os.kill(pid, number)
    assert process.wait(timeout=60) == REQUEUE
    output = process.stdout + process.stderr
    (saved,) = list_checkpoints(tmp_path / "run/checkpoints")
    assert "Traceback" not in output
    assert records(tmp_path / "run")[-1]["step"] == checkpoint_step(saved)


@pytest.mark.system
def test_ctrl_c_from_a_terminal_saves_and_prints_the_command_to_resume(
    arguments: list[str], tmp_path: Path
) -> None:
    """A terminal signals every process of the group, and a wrapper may repeat it."""
    process = start_and_wait_for_step([*arguments, *ONE_RANK, *ENDLESS], tmp_path, 5)
    os.killpg(process.pid, signal.SIGINT)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=60) == REQUEUE
    output = process.stdout + process.stderr
    (saved,) = list_checkpoints(tmp_path / "run/checkpoints")
    assert records(tmp_path / "run")[-1]["step"] == checkpoint_step(saved) >= 5
    assert "Traceback" not in output
    assert "Ctrl-C: the ranks save a checkpoint and stop" in output
    assert f"stopped; run the same command to resume from {saved}" in output
    assert "\n  weft train demo --model.num_layers 2" in output


@pytest.mark.system
def test_spot_notice_saves_and_resumes_bit_for_bit(
    arguments: list[str], store_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A scheduler's SIGTERM for the same reason does not count as a second signal."""
    monkeypatch.setattr(spot_notice, "POLL_SECONDS", 0.2)
    command = [*arguments, *ONE_RANK, *SLOW, "--train.steps", "20"]
    wait = '[{site = "step", passing = 7, kind = "slow", seconds = 4}]'
    with FakeMetadata() as server:
        server.header = ("X-aws-ec2-metadata-token", "secret")
        variable = {"AWS_EC2_METADATA_SERVICE_ENDPOINT": server.url}
        process = Started([*command, "--resilience.faults", wait], tmp_path, **variable)
        wait_for(tmp_path / "run", 6)
        server.texts[INTERRUPTION] = TERMINATE
        events = tmp_path / "run/events.jsonl"
        while "spot instance" not in events.read_text():
            assert process.poll() is None
            time.sleep(0.05)
        time.sleep(1.2)  # a signal within a second is a duplicate in any case
        with suppress(ProcessLookupError):  # it may have saved and ended by now
            process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == REQUEUE, process.stderr
        server.shutdown()
    notice = "AWS will terminate this spot instance at 2026-11-29T08:22:00Z"
    assert f"{notice}: the run saves and stops" in process.stderr
    (saved,) = list_checkpoints(tmp_path / "run/checkpoints")
    assert 6 <= checkpoint_step(saved) == records(tmp_path / "run")[-1]["step"] < 20
    assert run_weft(command, tmp_path).returncode == 0
    full = reference_run(command, tmp_path, store_path)
    assert losses(tmp_path / "run") == losses(full)
    a, b = newest_state(tmp_path / "run"), newest_state(full)
    assert all(a[name].equal(b[name]) for name in b)


@pytest.mark.slow
def test_spot_notice_to_one_node_leader_stops_all_ranks(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under torchrun the first rank of a node asks, and all ranks stop after the same step."""
    monkeypatch.setattr(spot_notice, "POLL_SECONDS", 0.2)
    with FakeMetadata() as server:
        server.texts[INTERRUPTION] = TERMINATE
        variable = {"AWS_EC2_METADATA_SERVICE_ENDPOINT": server.url}
        statuses, out = run_joined([*arguments, *ENDLESS], tmp_path, 2, **variable)
        server.shutdown()
    assert statuses == [REQUEUE, REQUEUE], out
    assert "AWS will terminate this spot instance" in out
    for path in list_checkpoints(tmp_path / "run/checkpoints"):
        assert records(tmp_path / "run")[-1]["step"] == checkpoint_step(path)


@pytest.mark.slow
@pytest.mark.system
def test_time_limit_stops_and_resumes_bit_for_bit(
    arguments: list[str], store_path: Path, tmp_path: Path
) -> None:
    limited = [*arguments, *ONE_RANK, *SLOW, "--train.steps", "4", "--optim.schedule", "linear"]
    completed = run_weft([*limited, "--resilience.time_limit", "0.001"], tmp_path)
    assert completed.returncode == REQUEUE, completed.stderr
    # The limit is over before the first step, which is completed: each start makes progress.
    assert "resilience.time_limit: saved step 1 " in completed.stdout
    assert "stopped; run the same command to resume from" in completed.stdout
    assert "SIG" not in completed.stdout
    statuses, out = run_joined(limited, tmp_path, 1)
    assert statuses == [0], out
    full = reference_run(limited, tmp_path, store_path)
    assert losses(tmp_path / "run") == losses(full)
    a, b = newest_state(tmp_path / "run"), newest_state(full)
    assert all(a[name].equal(b[name]) for name in b)


@pytest.mark.slow
@pytest.mark.system
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_second_signal_kills_a_suspended_rank_at_once(
    number: signal.Signals, arguments: list[str], tmp_path: Path
) -> None:
    """torch would wait 30 s."""
    process = start_and_wait_for_step([*arguments, *ONE_RANK, *ENDLESS], tmp_path, 3)
    os.kill(workers(process)[0], signal.SIGSTOP)
    process.send_signal(number)
    time.sleep(1.5)
    assert process.poll() is None
    process.send_signal(number)
    assert process.wait(timeout=20) == 130


TERM, INT = signal.SIGTERM, signal.SIGINT
TIMES = (0.0, 0.3, 1.0, 2.0, 3.0, 4.0)


@pytest.mark.system
@pytest.mark.parametrize(
    ("seconds", "number"),
    [
        (1.5, TERM),
        (1.5, INT),
        *((seconds, number) for seconds in TIMES for number in (TERM, INT)),
    ],
)
@pytest.mark.slow
def test_signal_before_the_first_step_ends_a_run_that_can_restart(
    seconds: float,
    number: signal.Signals,
    arguments: list[str],
    tmp_path: Path,
) -> None:
    """Text is being prepared, while ranks import torch and connect."""
    arguments = [*arguments, *ONE_RANK, *SLOW]
    command = [*arguments, "--train.steps", "100000"]
    process = Started(command, tmp_path)
    ready = time.monotonic() + 120
    while not int(process_status(process.pid)["SigCgt"], 16) >> (signal.SIGTERM - 1) & 1:
        assert time.monotonic() < ready
        time.sleep(0.05)
    time.sleep(seconds)
    os.killpg(process.pid, number)
    assert process.wait(timeout=90) == REQUEUE, process.stderr
    assert "Traceback" not in process.stdout + process.stderr
    statuses, out = run_joined([*arguments, "--train.steps", "6"], tmp_path, 1)
    assert statuses == [0], out


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_to_torchrun_saves_the_step(
    number: signal.Signals,
    arguments: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    command = [*TORCHRUN, "-m", "weft", *arguments[len(WEFT) :], *SLOW]
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    process = start_and_wait(
        [*command, "--train.steps", "100000"], tmp_path, 5, start_new_session=True
    )
    os.killpg(process.pid, number)
    assert process.wait(timeout=60) == FAILED
    (saved,) = list_checkpoints(tmp_path / "run/checkpoints")
    assert records(tmp_path / "run")[-1]["step"] == checkpoint_step(saved)
    text = (tmp_path / "log").read_text()
    assert f"stopped; run the same command to resume from {saved}" in text


@pytest.mark.slow
def test_time_limit_inside_torchrun_stops_with_status_1(
    arguments: list[str], tmp_path: Path
) -> None:
    """torchrun's status is 1 until all steps are done; its report names the cause."""
    command = ["-m", "weft", *arguments[len(WEFT) :], *SLOW]
    limited = [*command, "--resilience.time_limit", "0.001"]
    completed = run([*TORCHRUN, *limited], tmp_path, GLOO_SOCKET_IFNAME="lo")
    assert completed.returncode == FAILED
    (saved,) = list_checkpoints(tmp_path / "run/checkpoints")
    assert f"stopped; run the same command to resume from {saved}" in completed.stdout
    assert (
        completed.stderr.count("saved a checkpoint and stopped; run the same command to resume")
        == 2
    )
    assert completed.stderr.count(f"exitcode  : {REQUEUE}") == 2
    completed = run([*TORCHRUN, *command], tmp_path, GLOO_SOCKET_IFNAME="lo")
    assert completed.returncode == 0, completed.stderr
    assert records(tmp_path / "run")[-1]["step"] == 20
    # With restarts, torchrun would not let the ranks end.
    completed = run([*TORCHRUN, "--max-restarts=1", *limited], tmp_path, GLOO_SOCKET_IFNAME="lo")
    assert completed.returncode == FAILED
    assert "resilience.time_limit=0.001 makes torchrun restart the ranks" in completed.stderr


def test_torch_agent_gets_its_signal_from_the_private_function() -> None:
    """torch's agent calls this function to choose the signal for the remaining ranks."""
    assert callable(multiprocessing._get_default_signal)
    names = multiprocessing.PContext.close.__code__.co_names
    assert "_get_default_signal" in names
