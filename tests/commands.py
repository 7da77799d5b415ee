"""Start a small `weft train` command in two ways, and check that no process remains.

Importing torch takes seconds. So weft's command runs in a new process only where a test
checks its start or death; otherwise the harness forks it (`Started`, `run_weft`,
`run_joined`) with torch imported, and the command forks its ranks (`ForkingPopen`). The
processes have the same parents, sessions and signals in both ways.
"""

from __future__ import annotations

import faulthandler
import gc
import importlib
import json
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
import warnings
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import pytest
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.subprocess_handler import (
    subprocess_handler as elastic_handler,
)

from tests.conftest import make_once
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
def finished(text_dir: Path, shared_dir: Path) -> Finished:
    """Run `weft train` on ``text.py`` as a user starts it, once for all workers."""
    directory = shared_dir / "finished"
    words = ["--data.path", "text.py", "--data.cache_dir", "cache"]
    words += ["--checkpoint.interval", "5", "--checkpoint.keep_latest", "9"]
    command = [*small_command(directory), *words]

    def run(record_dir: Path) -> None:
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir()
        shutil.copy(text_dir / "ast.py", directory / "text.py")
        completed = subprocess.run(
            command, cwd=directory, timeout=200, capture_output=True, text=True, check=False
        )
        assert not processes_in(directory)
        record = {"returncode": completed.returncode}
        record |= {"stdout": completed.stdout, "stderr": completed.stderr}
        (record_dir / "record.json").write_text(json.dumps(record))

    # The run is not made in a directory that is renamed later: it may know its path.
    record_dir = make_once(shared_dir / "finished-record", run)
    record = json.loads((record_dir / "record.json").read_text())
    return Finished(directory, command, subprocess.CompletedProcess(command, **record))


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


# Modules of weft that a command starts as `python -m MODULE` and that import torch.
FORKED_MODULES = {
    "weft": "weft.__main__",
    "weft.api": "weft.api.__main__",
    "weft.supervision.worker": "weft.supervision.worker",
}


class ForkingPopen(subprocess.Popen[Any]):
    """`subprocess.Popen` that forks this process instead of starting weft in an interpreter.

    The child has what `subprocess.Popen` would give it: session, directory, environment, default
    signal handlers, and of the open files only the three standard ones.
    """

    def _execute_child(
        self,
        args: Any,
        executable: Any,
        preexec_fn: Callable[[], object] | None,
        close_fds: bool,
        pass_fds: Any,
        cwd: str | None,
        env: dict[str, str] | None,
        startupinfo: Any,
        creationflags: Any,
        shell: bool,
        p2cread: int,
        p2cwrite: int,
        c2pread: int,
        c2pwrite: int,
        errread: int,
        errwrite: int,
        restore_signals: bool,
        gid: Any,
        gids: Any,
        uid: Any,
        umask: Any,
        start_new_session: bool,
        process_group: Any,
    ) -> None:
        words = [] if shell or isinstance(args, str | bytes) else [*map(str, args)]
        words = [word for word in words[:3] if word != "-P"] + words[3:]
        is_forked = words[:2] == WEFT[:2] and words[2:3] != [] and words[2] in FORKED_MODULES
        if not is_forked:
            super()._execute_child(  # type: ignore[misc]
                *(args, executable, preexec_fn, close_fds, pass_fds, cwd, env, startupinfo),
                *(creationflags, shell, p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite),
                *(restore_signals, gid, gids, uid, umask, start_new_session, process_group),
            )
            return
        for stream in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__):
            if stream is not None:
                stream.flush()  # or the child would write the same text again
        # No signal may reach the handlers of this process in the child.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            with warnings.catch_warnings():
                # Python 3.12 warns of threads.  Those of a launcher hold no lock of a rank.
                warnings.simplefilter("ignore", DeprecationWarning)
                self.pid = os.fork()
            if self.pid == 0:
                try:
                    _reset_signals(mask)
                    if cwd is not None:
                        os.chdir(cwd)
                    if start_new_session:
                        os.setsid()
                    if preexec_fn is not None:
                        preexec_fn()
                    _set_files((p2cread, c2pwrite, errwrite), pass_fds)
                    _run_module(words[2], words[3:], env)
                finally:
                    traceback.print_exc()
                    os._exit(1)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        self._child_created = True
        self._close_pipe_fds(  # type: ignore[attr-defined]
            p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite
        )


def fork_commands() -> None:
    """Let this process, a rank of the harness, fork weft's commands and ranks from now on."""
    subprocess.Popen = ForkingPopen  # type: ignore[misc]
    elastic_handler.Popen = ForkingPopen
    # Its thread is missing in forked processes, which would wait for it.
    faulthandler.cancel_dump_traceback_later()


def _reset_signals(mask: set[signal.Signals]) -> None:
    """Give this forked process the signal handlers of a new interpreter, and a signal mask."""
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in signal.valid_signals():
        with suppress(RuntimeError):  # it handles fatal signals in another way
            faulthandler.unregister(number)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _set_files(standard: tuple[int, int, int], kept: Collection[int]) -> None:
    """Set the standard files of this forked process, unless -1; discard all but ``kept``."""
    gc.freeze()  # objects of the parent must not close files that this process opens
    duplicates = [(fd, target) for target, fd in enumerate(standard) if fd != -1]
    duplicates = [(os.dup(fd), target) for fd, target in duplicates]
    for fd, target in duplicates:
        os.dup2(fd, target)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for fd in map(int, os.listdir("/proc/self/fd")):
        # Their numbers stay in use: objects of the parent would close other files.
        if fd > 2 and fd not in kept:
            with suppress(OSError):  # the one of the listed directory
                if not os.get_inheritable(fd):
                    os.dup2(nowhere, fd, inheritable=False)


def _run_module(name: str, words: list[str], env: dict[str, str] | None) -> NoReturn:
    """Do what ``python -m NAME WORDS`` does, and end this process."""
    if env is not None:
        os.environ.clear()
        os.environ |= env
    sys.argv[:] = [name, *words]
    sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__  # type: ignore[assignment]
    status: Any = 1
    try:
        status = importlib.import_module(FORKED_MODULES[name]).main()
    except SystemExit as error:
        status = error.code
    except BaseException:
        traceback.print_exc()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):
            stream.flush()
    os._exit(int(status or 0))


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
    fork_commands()
    del os.environ["GLOO_SOCKET_IFNAME"]  # that of the harness: the launcher has to choose it
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
    fork_commands()
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
