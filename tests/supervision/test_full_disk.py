"""A full disk at the end of a run: the commands that weft prints lead back to its state."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.commands import ONE_RANK, WEFT, Started, run_weft
from tests.small import losses, newest_state
from weft.checkpoint.final_save import RECORD_FILE
from weft.checkpoint.manifest import checkpoint_step, list_checkpoints
from weft.config.exit_statuses import FAILED, INTERRUPTED
from weft.config.reader import read_job

pytestmark = [
    pytest.mark.timeout(400, method="signal"),  # so that fixtures tidy up
    pytest.mark.slow,
    pytest.mark.system,
    pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount a small disk to fill"),
]
SIZE = 1_500 * 1024  # bytes of the disk


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[Path]:
    """Mount a small disk with a file `ballast` that leaves too little room for a checkpoint."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={SIZE}", "tmpfs", str(disk)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("this container may not mount")
    (disk / "ballast").write_bytes(bytes(SIZE - 200 * 1024))
    try:
        yield disk
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def printed_command(text: str) -> list[str]:
    found = re.search(r"To continue from it: weft (.* --checkpoint.dir \S+)", text)
    assert found, text
    return [*WEFT, *shlex.split(found[1])]


def command_on(disk: Path, arguments: list[str], *more: str) -> list[str]:
    keys = ["--checkpoint.dir", str(disk / "saved"), "--checkpoint.interval", "0"]
    return [*arguments, *ONE_RANK, "--optim.schedule", "linear", *keys, *more]


def wait_for_text(process: Started, text: str) -> None:
    deadline = time.monotonic() + 120
    while text not in process.stdout + process.stderr:
        assert process.poll() is None, process.stdout + process.stderr
        assert time.monotonic() < deadline, process.stdout + process.stderr
        time.sleep(0.1)


def check_equal_to_undisturbed(arguments: list[str], run: Path, place: Path) -> None:
    """Compare the losses and the last state with those of a run on another disk."""
    home = run.parent / "straight"
    home.mkdir()
    command = command_on(home, arguments)
    assert run_weft([*command, "--run.dir", str(home / "run")], run.parent).returncode == 0
    assert losses(run) == losses(home / "run")
    (run / "checkpoints").symlink_to(place)
    (home / "run/checkpoints").symlink_to(home / "saved")
    ours, theirs = newest_state(run), newest_state(home / "run")
    assert all(ours[name].equal(theirs[name]) for name in theirs)


def test_full_disk_that_gets_room_again_takes_the_last_save(
    arguments: list[str], full_disk: Path, tmp_path: Path
) -> None:
    process = Started(command_on(full_disk, arguments), tmp_path)
    wait_for_text(process, "weft retries the final save of the run in 4 s")
    (full_disk / "ballast").unlink()
    assert process.wait(timeout=60) == 0
    assert [checkpoint_step(path) for path in list_checkpoints(full_disk / "saved")] == [20]
    assert re.search(r"The save needs [\d,]+ bytes in \S+/disk/saved, and [\d,]+", process.stdout)
    assert not list((tmp_path / "run").glob("checkpoints*"))


def test_full_disk_at_the_end_of_all_steps_names_a_command_that_keeps_them(
    arguments: list[str], full_disk: Path, tmp_path: Path
) -> None:
    short = ("--checkpoint.final_save_timeout", "2")
    failed = run_weft(command_on(full_disk, arguments, *short), tmp_path)
    assert failed.returncode == FAILED
    assert "Traceback" not in failed.stdout + failed.stderr
    command = printed_command(failed.stderr)
    (place,) = (tmp_path / "run").glob("checkpoints-step-00000020-*")

    again = run_weft(command_on(full_disk, arguments, *short, "--train.steps", "20"), tmp_path)
    assert f"warning: the last start could not save in {full_disk}/saved. Step 20" in again.stdout
    assert again.returncode == FAILED

    followed = run_weft(command, tmp_path)
    assert followed.returncode == 0, followed.stderr
    assert "is complete at step 20: nothing to do" in followed.stdout
    job, _, _ = read_job(str(tmp_path / "run/job.toml"))
    assert job.checkpoint.dir == str(place)  # where every command finds it from now on
    evaluated = run_weft([*WEFT, "evaluate", "run"], tmp_path)
    assert evaluated.returncode == 0, evaluated.stderr
    check_equal_to_undisturbed(arguments, tmp_path / "run", place)


def test_full_disk_at_a_stop_saves_elsewhere_and_the_printed_command_continues(
    arguments: list[str], full_disk: Path, tmp_path: Path
) -> None:
    slow = '[{site = "step", kind = "slow", seconds = 0.5, passing = 8, times = 9}]'
    process = Started(command_on(full_disk, arguments, "--resilience.faults", slow), tmp_path)
    wait_for_text(process, "step 8")
    process.send_signal(signal.SIGTERM)
    wait_for_text(process, "a second signal ends the run at once")
    assert (tmp_path / "run" / RECORD_FILE).exists()
    time.sleep(1.5)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=60) == INTERRUPTED
    command = printed_command(process.stderr)  # also the last line names it
    (place,) = (tmp_path / "run").glob("checkpoints-step-*")
    assert 8 <= checkpoint_step(list_checkpoints(place)[-1]) < 20
    followed = run_weft([*command, "--resilience.faults", "[]"], tmp_path)
    assert followed.returncode == 0, followed.stdout + followed.stderr
    assert f"resuming from {place}/step-0000" in followed.stdout
    check_equal_to_undisturbed(arguments, tmp_path / "run", place)
