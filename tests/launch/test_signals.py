"""Signals to the launcher, a rank or all: the step is finished and saved, the status tells."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch.distributed.elastic.multiprocessing.api as multiprocessing

from tests.launch.conftest import WEFT
from tests.launch.test_local import ONE_RANK, TORCHRUN, run, start_and_wait, undisturbed
from tests.small import losses, newest_state, records
from weft.checkpoint.manifest import checkpoint_step, checkpoints
from weft.launch import FAILED, REQUEUE
from weft.launch.local import status

pytestmark = pytest.mark.timeout(400, method="signal")  # so that fixtures tidy up

SLOW = ["--checkpoint.interval", "0"]  # nothing is saved but on the signal


def workers(process: subprocess.Popen[str]) -> list[int]:
    """The ranks of a run, in order."""
    everyone = (int(path.name) for path in Path("/proc").glob("[0-9]*"))
    found = [pid for pid in everyone if status(pid).get("PPid") == str(process.pid)]

    def rank(pid: int) -> int:
        pairs = Path(f"/proc/{pid}/environ").read_text().split("\0")
        return int(dict(pair.split("=", 1) for pair in pairs if "=" in pair)["RANK"])

    return sorted(found, key=rank)


TO: dict[str, Callable[[subprocess.Popen[str]], list[int]]] = {
    "the launcher": lambda process: [process.pid],
    "one rank": lambda process: workers(process)[1:],
    "all of them": lambda process: [process.pid, *workers(process)],
}


@pytest.mark.parametrize(
    ("number", "to"),
    [
        (signal.SIGTERM, "the launcher"),
        (signal.SIGTERM, "one rank"),
        pytest.param(signal.SIGTERM, "all of them", marks=pytest.mark.slow),
        pytest.param(signal.SIGUSR1, "the launcher", marks=pytest.mark.slow),
    ],
)
def test_saved_and_to_be_queued_again(
    number: signal.Signals,
    to: str,
    arguments: list[str],
    tmp_path: Path,
) -> None:
    process = start_and_wait([*arguments, *SLOW, "--train.steps", "100000"], tmp_path, 5)
    for pid in TO[to](process):
        os.kill(pid, number)
    assert process.wait(timeout=60) == REQUEUE
    said = (tmp_path / "log").read_text()
    (saved,) = checkpoints(tmp_path / "run/checkpoints")
    assert "Traceback" not in said
    assert records(tmp_path / "run")[-1]["step"] == checkpoint_step(saved)


def test_ctrl_c_from_a_terminal_saves_and_says_how_to_resume(
    arguments: list[str], tmp_path: Path
) -> None:
    """A terminal sends it to every process of the group, and a wrapper may pass it on as well."""
    process = start_and_wait(
        [*arguments, *SLOW, "--train.steps", "100000"], tmp_path, 5, start_new_session=True
    )
    os.killpg(process.pid, signal.SIGINT)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=60) == REQUEUE
    said = (tmp_path / "log").read_text()
    (saved,) = checkpoints(tmp_path / "run/checkpoints")
    assert records(tmp_path / "run")[-1]["step"] == checkpoint_step(saved) >= 5
    assert "Traceback" not in said
    assert "Ctrl-C: the ranks finish the step and save" in said
    assert f"stopped and saved; the same command goes on from {saved}" in said
    assert "\n  weft train demo --model.num_layers 2" in said


def test_the_time_limit(arguments: list[str], store_path: Path, tmp_path: Path) -> None:
    """Stopped and gone on with, it ends with the bits of a run that was not."""
    limited = [*arguments, *ONE_RANK, *SLOW, "--train.steps", "2", "--optim.schedule", "linear"]
    for turn in range(20):
        done = run([*limited, "--resilience.time_limit", "0.001"], tmp_path)
        if turn and done.returncode == 0:
            break
        assert done.returncode == REQUEUE, done.stderr
        assert "stopped and saved; the same command goes on from" in done.stdout
    assert "going on from" in done.stdout
    whole = undisturbed(limited, tmp_path, store_path)
    assert losses(tmp_path / "run") == losses(whole)
    a, b = newest_state(tmp_path / "run"), newest_state(whole)
    assert all(a[name].equal(b[name]) for name in b)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_kills(
    number: signal.Signals, arguments: list[str], tmp_path: Path
) -> None:
    """Also a rank that stands still, at once and not after half a minute."""
    process = start_and_wait([*arguments, *SLOW, "--train.steps", "100000"], tmp_path, 3)
    os.kill(workers(process)[1], signal.SIGSTOP)
    process.send_signal(number)
    time.sleep(1.5)
    assert process.poll() is None
    process.send_signal(number)
    assert process.wait(timeout=20) == 130


def test_a_dead_rank_ends_one_that_stands_still(
    arguments: list[str],
    tmp_path: Path,
) -> None:
    process = start_and_wait(
        [*arguments, *SLOW, "--train.steps", "100000", "--resilience.restarts", "0"], tmp_path, 3
    )
    first, second = workers(process)
    os.kill(first, signal.SIGSTOP)
    os.kill(second, signal.SIGKILL)
    assert process.wait(timeout=20) == 1
    said = (tmp_path / "log").read_text()
    assert "rank 1 failed: SIGKILL" in said
    assert "Traceback" not in said


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize(
    "seconds",
    [1.5, *(pytest.param(s, marks=pytest.mark.slow) for s in (0.0, 0.3, 1.0, 2.0, 3.0, 4.0))],
)
def test_before_the_first_step(
    seconds: float,
    number: signal.Signals,
    arguments: list[str],
    tmp_path: Path,
) -> None:
    """While Python starts, text is prepared, torch is imported, ranks meet."""
    arguments = [*arguments, *ONE_RANK, *SLOW]
    command = [*arguments, "--train.steps", "100000"]
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(
            command, cwd=tmp_path, stdout=log, stderr=log, text=True, start_new_session=True
        )
        ready = time.monotonic() + 120
        while "SigCgt" in (text := Path(f"/proc/{process.pid}/status").read_text()):
            caught = next(line for line in text.splitlines() if line.startswith("SigCgt"))
            if int(caught.split()[1], 16) >> (signal.SIGTERM - 1) & 1:
                break
            assert time.monotonic() < ready
        time.sleep(seconds)
        os.killpg(process.pid, number)
        assert process.wait(timeout=90) == REQUEUE, (tmp_path / "log").read_text()
    assert "Traceback" not in (tmp_path / "log").read_text()
    done = run([*arguments, "--train.steps", "6"], tmp_path)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)]
)
def test_inside_torchrun(
    number: signal.Signals,
    arguments: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    command = [*TORCHRUN, "-m", "weft.cli", *arguments[len(WEFT) :], *SLOW]
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    process = start_and_wait(
        [*command, "--train.steps", "100000"], tmp_path, 5, start_new_session=True
    )
    os.killpg(process.pid, number)
    assert process.wait(timeout=60) == FAILED
    (saved,) = checkpoints(tmp_path / "run/checkpoints")
    assert records(tmp_path / "run")[-1]["step"] == checkpoint_step(saved)
    said = (tmp_path / "log").read_text()
    assert f"stopped and saved; the same command goes on from {saved}" in said


@pytest.mark.slow
def test_the_time_limit_inside_torchrun(arguments: list[str], tmp_path: Path) -> None:
    """Its status is 1 until all steps are done, and its report says what happened."""
    command = ["-m", "weft.cli", *arguments[len(WEFT) :], *SLOW]
    limited = [*command, "--resilience.time_limit", "0.001"]
    done = run([*TORCHRUN, *limited], tmp_path, GLOO_SOCKET_IFNAME="lo")
    assert done.returncode == FAILED
    (saved,) = checkpoints(tmp_path / "run/checkpoints")
    assert f"stopped and saved; the same command goes on from {saved}" in done.stdout
    assert done.stderr.count("stopped and saved; the same command goes on") == 2
    assert done.stderr.count(f"exitcode  : {REQUEUE}") == 2
    done = run([*TORCHRUN, *command], tmp_path, GLOO_SOCKET_IFNAME="lo")
    assert done.returncode == 0, done.stderr
    assert records(tmp_path / "run")[-1]["step"] == 20
    # It would not let them end.
    done = run([*TORCHRUN, "--max-restarts=1", *limited], tmp_path, GLOO_SOCKET_IFNAME="lo")
    assert done.returncode == FAILED
    assert "resilience.time_limit = 0.001: torchrun would start the ranks again" in done.stderr


def test_what_is_private() -> None:
    """torch's agent asks this function for the signal that ends the ranks beside a failed one."""
    assert callable(multiprocessing._get_default_signal)
    names = multiprocessing.PContext.close.__code__.co_names
    assert "_get_default_signal" in names
