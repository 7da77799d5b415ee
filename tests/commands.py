"""Start a small `weft train` command in two ways, and check that no process remains.

Importing torch takes seconds. So weft's command runs in a new process only where a test
checks its start or death; otherwise the harness forks it (`Started`, `run_weft`,
`run_joined`) with torch imported. The command starts the same ranks in both ways.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import pytest
import torch.distributed as dist

from tests.harness import run_ranks
from tests.small import SMALL, records, train_rank
from weft.cli.main import main

WEFT = [sys.executable, "-m", "weft"]
ONE_RANK = ["--run.nproc_per_node", "1"]  # for tests of the launcher, which need no second rank
_worlds: list[threading.Thread] = []  # threads of `Started` whose command may still run


@pytest.fixture
def arguments(store_path: Path, tmp_path: Path) -> list[str]:
    """The arguments of `weft train` for the small model on two ranks, in `run`."""
    return small_command(store_path)


def small_command(store: Path) -> list[str]:
    pairs = [
        *SMALL,
        ("run.dir", "run"),
        ("run.nproc_per_node", "2"),
        ("data.path", str(store)),
        ("checkpoint.interval", "10"),
    ]
    return [*WEFT, "train", "demo", *(word for key, value in pairs for word in (f"--{key}", value))]


# An optimizer with slow steps until the file "hurry" exists: a test has to act before the run
# ends.
SLEEPY = """
import os, time
from weft.optim.optimizer import build_adamw

def build(groups, optim):
    optimizer = build_adamw(groups, optim)
    def step(*args, **kwargs):
        if not os.path.exists("hurry"):
            time.sleep(0.5)
    optimizer.register_step_pre_hook(step)
    return optimizer
"""


class Finished(NamedTuple):
    """A run of two ranks, of which tests make copies."""

    directory: Path  # the working directory of the command
    command: list[str]
    done: subprocess.CompletedProcess[str]


@pytest.fixture(scope="session")
def finished(text_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """Run `weft train` on ``text.py`` as a user starts it."""
    directory = tmp_path_factory.mktemp("finished")
    shutil.copy(text_dir / "ast.py", directory / "text.py")
    words = ["--data.path", "text.py", "--data.cache_dir", "cache"]
    words += ["--checkpoint.interval", "5", "--checkpoint.keep_latest", "9"]
    command = [*small_command(directory), *words]
    completed = subprocess.run(
        command, cwd=directory, timeout=200, capture_output=True, text=True, check=False
    )
    assert not processes_in(directory)
    return Finished(directory, command, completed)


@pytest.fixture(autouse=True)
def no_processes_left(tmp_path: Path) -> Iterator[None]:
    yield
    deadline = time.monotonic() + 10
    while remaining := processes_in(tmp_path):
        if time.monotonic() > deadline:
            for process in remaining:  # also if the test failed
                with suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
            for world in _worlds:
                world.join(30)
            pytest.fail(f"left behind: {remaining}")
        time.sleep(0.1)


def processes_in(directory: Path) -> dict[int, str]:
    """Return ids and command lines of processes that run in ``directory``."""
    results = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if (entry / "cwd").resolve() == directory:
                    line = (entry / "cmdline").read_text().replace("\0", " ")
                    results[int(entry.name)] = line
            except OSError:
                continue  # the process has ended, or is another user's
    return {process: line for process, line in results.items() if line}


# --------------------------------------------------------------------------- in forked processes


class Started:
    """weft's command in a process forked by the harness, like `subprocess.Popen`.

    The command runs in ``directory``, and its output is in files next to it.

    Args:
        cores: number of cores for the command and its ranks; 0: all.
        reader: read all standard output; False: close the pipe after the first line.

    Attributes:
        pid: process id of the command, which leads a session.
    """

    def __init__(
        self,
        command: list[str],
        directory: Path,
        cores: int = 0,
        reader: bool = True,
        **environment: str,
    ) -> None:
        assert command[: len(WEFT)] == WEFT
        self.output_dir = directory.with_name(f"{directory.name}.said")
        self.output_dir.mkdir(exist_ok=True)
        for file in self.output_dir.iterdir():
            file.unlink()
        self._statuses: list[int] = []
        self._error: BaseException | None = None
        call = (
            command[len(WEFT) :],
            str(directory),
            str(self.output_dir),
            environment,
            cores,
            reader,
        )
        self._world = threading.Thread(target=self._run, args=call, daemon=True)
        self._world.start()
        _worlds.append(self._world)
        while not (self.output_dir / "pid").exists():
            assert self._world.is_alive(), self._error
            time.sleep(0.01)
        self.pid = int((self.output_dir / "pid").read_text())

    def _run(self, *call: object) -> None:
        try:
            self._statuses = run_ranks(run_weft_in_child, 1, *call, timeout=200)
        except BaseException as error:
            self._error = error

    @property
    def stdout(self) -> str:
        return (self.output_dir / "1").read_text() if (self.output_dir / "1").exists() else ""

    @property
    def stderr(self) -> str:
        return (self.output_dir / "2").read_text()

    def poll(self) -> int | None:
        return None if self._world.is_alive() else self.wait(0)

    def wait(self, timeout: float) -> int:
        self._world.join(timeout)
        if self._world.is_alive():
            raise subprocess.TimeoutExpired("weft", timeout)
        if self._error is not None:
            raise self._error
        return self._statuses[0]

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)


def run_weft(
    command: list[str],
    directory: Path,
    timeout: float = 200,
    cores: int = 0,
    reader: bool = True,
    **environment: str,
) -> subprocess.CompletedProcess[str]:
    """Run weft's command to its end in a process that the harness forks."""
    completed = Started(command, directory, cores, reader, **environment)
    status = completed.wait(timeout)
    return subprocess.CompletedProcess(command, status, completed.stdout, completed.stderr)


def run_weft_in_child(
    words: list[str],
    directory: str,
    output_path: str,
    environment: dict[str, str],
    cores: int,
    reader: bool,
) -> int:
    """Run weft's command in this rank; return its status once its processes have ended."""
    dist.destroy_process_group()
    os.chdir(directory)
    if cores:
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:cores])
    known_pids = processes_in(Path.cwd()).keys() | {os.getpid()}
    out = Path(output_path, "1")
    if not reader:
        out = Path(output_path, "pipe")
        os.mkfifo(out)
        threading.Thread(target=read_one_line, args=(out,), daemon=True).start()
    status = _call_main(words, out, Path(output_path, "2"), environment, Path(output_path, "pid"))
    for number in (signal.SIGINT, signal.SIGTERM):  # the command has ended: they come too late
        signal.signal(number, signal.SIG_IGN)
    deadline = time.monotonic() + 10
    while remaining := processes_in(Path.cwd()).keys() - known_pids:
        assert time.monotonic() < deadline, f"left behind: {remaining}"
        time.sleep(0.05)
    return status


def read_one_line(pipe: Path) -> None:
    """Read one line and close the pipe, like ``head -1``."""
    with pipe.open("rb") as end:
        end.readline()


def run_joined(
    command: list[str], directory: Path, ranks: int, **environment: str
) -> tuple[list[int], str]:
    """Run weft's command in ranks with the environment variables of torchrun.

    Returns:
        Their exit statuses, and their output.
    """
    output = directory.with_name(f"{directory.name}.said")
    output.mkdir(exist_ok=True)
    port = free_port()
    call = (command[len(WEFT) :], str(directory), str(output), environment, port)
    statuses = run_ranks(run_joined_in_child, ranks, *call, timeout=300)
    return statuses, "".join((output / f"{rank}").read_text() for rank in range(ranks))


def train_in_one_rank(words: list[str], directory: Path) -> str:
    """Run ``weft train`` with these words as its own only rank; return the output.

    No interpreter starts, so this is for tests that are about the run and not about its launch.
    """
    statuses, output = run_joined([*WEFT, "train", *words], directory, 1)
    assert statuses == [0], output
    return output


def free_port() -> int:
    """Return a free port that no outgoing connection uses in the meantime."""
    choose = random.SystemRandom()
    while True:
        port = choose.randrange(20_000, 30_000)  # below Linux's range for outgoing connections
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


def run_joined_in_child(
    words: list[str], directory: str, output_path: str, environment: dict[str, str], port: int
) -> int:
    """Run weft's command as a rank in a child process."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    os.chdir(directory)
    variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    variables |= {"MASTER_PORT": port, "OMP_NUM_THREADS": 1}
    environment = {key: str(value) for key, value in variables.items()} | environment
    file = Path(output_path, f"{rank}")
    process = os.fork()
    if process == 0:
        _call_main(words, file, file, environment | {"MASTER_ADDR": "127.0.0.1"}, None)
        os._exit(99)  # the command returned instead of exiting
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def _call_main(
    words: list[str], out: Path, err: Path, environment: dict[str, str], pid: Path | None
) -> int:
    for number, path in ((1, out), (2, err)):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, number)
        os.close(file)
    os.environ |= environment
    sys.argv[:] = ["weft", *words]
    if pid is not None:
        part = pid.with_suffix(".part")
        part.write_text(str(os.getpid()))
        part.rename(pid)
    try:
        status = main()
    except SystemExit as error:
        status = error.code  # type: ignore[assignment]
    except BaseException:
        traceback.print_exc()
        status = 1
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):  # the reader may have closed the pipe
            stream.flush()
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for number in (1, 2):  # discard output that remains in buffers
        os.dup2(nowhere, number)
    return int(status or 0)


def check_against_reference(directory: Path, store: Path, steps: int) -> None:
    """Check that each step is recorded once, with the losses of one process."""
    straight = directory / "straight"
    overrides = [("run.dir", str(straight)), ("train.steps", str(steps))]
    run_ranks(train_rank, 1, overrides, str(store), timeout=200)
    ours, theirs = records(directory / "run"), records(straight)
    assert [record["step"] for record in ours] == [record["step"] for record in theirs]
    for a, b in zip(ours, theirs, strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=2e-4), f"step {a['step']}"
        assert a["tokens"] == b["tokens"]
