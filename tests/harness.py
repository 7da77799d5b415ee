"""Run a test's function on several gloo ranks, quickly and with full cleanup.

    def total(start):                       # at the top level of the test's module
        x = torch.tensor(start + dist.get_rank())
        dist.all_reduce(x)
        return x.item()

    def test_total():
        assert run_ranks(total, 2, 10) == [21, 21]

Starting interpreters that import torch costs seconds per test. So one *server*, a fresh
interpreter, imports torch and weft once per session and forks the ranks of every world, which
takes some hundredths of a second. Forking is safe only while the server has a single thread: it
runs no tensor operation, makes no process group, and refuses to fork if a thread appears.

    test process --(socket: request, reply)--> server --(fork; a pipe each)--> rank 0, 1, ...

Arguments and results are pickled. The server never unpickles either, because that would import
test modules and their imports into it.

*Failures.* A rank that raises reports its traceback and then waits, with its connections open,
until the server kills the whole world: its peers see no reset connection, and the shown error is
the cause. A rank that dies silently (signal, ``os._exit``) does reset them, so the server checks
for a silent death before it believes a peer's exception. At the timeout the server takes every
rank's Python stack, then kills all of them.

*Cleanup.* After every world the server kills the ranks and all processes that they started: it
is a subreaper, so it adopts orphans of any session. The server ends when its socket closes, after
any end of the test process. If the server is killed, the ranks get the kernel's parent-death
signal.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import gc
import importlib
import logging
import os
import pickle
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NoReturn, TypeVar

T = TypeVar("T")

ROOT = Path(__file__).resolve().parent.parent
OUTPUT_CHARS = 8000  # of each rank, the last of what it printed
STACK_SECONDS = 1.0  # for the ranks to write their stacks after a timeout
SILENT_SECONDS = 0.2  # until a rank's death is visible after a peer has failed
SETTLE_SECONDS = 5.0  # for the ranks to destroy their group and exit
START_SECONDS = 120.0  # for the server to import torch on a busy machine


class RankError(Exception):
    """A world failed.

    Attributes:
        rank: the rank that failed first; None if the world as a whole ran out of time.
    """

    def __init__(self, message: str, rank: int | None) -> None:
        super().__init__(message)
        self.rank = rank


# --------------------------------------------------------------------------- test process


def run_ranks(
    function: Callable[..., T], world_size: int, *args: Any, timeout: float = 60, **kwargs: Any
) -> list[T]:
    """Call ``function(*args, **kwargs)`` on every rank of a new gloo process group.

    Each rank is a separate process with one thread, equal seeds, the caller's working
    directory, environment and ``sys.path``, and an initialized default group. The group is
    destroyed afterwards.

    Args:
        function: defined at the top level of an importable module.
        world_size: number of ranks.
        args, kwargs: must pickle.
        timeout: seconds until the world is killed.

    Returns:
        The results of all ranks, by rank. They must pickle.

    Raises:
        RankError: with the traceback and output of the first rank that failed, or every
            rank's stack after the timeout.
        ValueError: if a rank cannot find ``function`` by name.
    """
    sys.audit("tests.world", function)
    module, name = function.__module__, function.__qualname__
    if "<" in name or module == "__main__":
        raise ValueError(f"{module}.{name}: a rank's function must be at a module's top level")
    request = {
        "world_size": world_size,
        "timeout": timeout,
        "call": pickle.dumps((module, name, args, kwargs)),
        "path": list(sys.path),
        "folder": os.getcwd(),
        "environment": dict(os.environ),
    }
    reply = _server().ask(request, timeout)
    if reply["error"]:
        raise RankError(reply["error"], reply["rank"])
    for rank, text in enumerate(reply["outputs"]):
        if text:  # pytest shows it if the test fails later on
            print(f"--- rank {rank} printed ---\n{text}")
    return [pickle.loads(result) for result in reply["results"]]


class _Server:
    """The server, as seen by the test process."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        self.directory = tempfile.mkdtemp(prefix="weft-ranks-")
        with theirs:
            arguments = [str(theirs.fileno()), self.directory]
            command = [sys.executable, "-m", "tests.harness", *arguments]
            # No thread pools: they must not exist before a fork.
            single_thread = {
                "OMP_NUM_THREADS": "1",
                "MKL_NUM_THREADS": "1",
                "OPENBLAS_NUM_THREADS": "1",
            }
            self.process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=os.environ | single_thread,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                # Only the test process handles signals from the terminal.
                start_new_session=True,
            )
        self.connection = Connection(ours.detach())
        self.started = False

    def ask(self, request: dict[str, Any], timeout: float) -> dict[str, Any]:
        limit = timeout + STACK_SECONDS + SETTLE_SECONDS + 10
        try:
            self.connection.send_bytes(pickle.dumps(request))
            if not self.connection.poll(limit if self.started else limit + START_SECONDS):
                raise RuntimeError("the rank server does not answer")
            reply: dict[str, Any] = pickle.loads(self.connection.recv_bytes())
        except (EOFError, OSError) as error:
            status = self.close()
            raise RuntimeError(f"the rank server died (exit status {status})") from error
        except BaseException:
            self.close()  # also on Ctrl-C: when the socket closes, the server kills the world
            raise
        self.started = True
        global world_seconds
        world_seconds += reply["seconds"]
        return reply

    def close(self) -> int:
        """Stop the server and all its processes; return the exit status of the server."""
        global _current
        _current = None
        self.connection.close()
        try:
            return self.process.wait(SETTLE_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()
        finally:
            shutil.rmtree(self.directory, ignore_errors=True)


_current: _Server | None = None
world_seconds = 0.0  # processor time of every world so far, and of the server


def _server() -> _Server:
    global _current
    if _current is None:
        _current = _Server()
        atexit.register(_current.close)
    return _current


# --------------------------------------------------------------------------- server


@dataclass
class _Rank:
    """A rank, as seen by the server."""

    pid: int
    pipe: Connection
    log: Path
    stacks: Path
    result: bytes | None = None
    error: tuple[float, str, str] | None = None  # when, one line, traceback
    death: int | None = None  # exit code as in subprocess: negative for a signal
    reaped: bool = False

    def receive(self) -> None:
        """Receive the rank's message, if the rank has sent one."""
        try:
            # A large result blocks the server until the rank has written it. A dead rank
            # closes the pipe, so the server does not hang.
            if self.result is None and self.error is None and self.pipe.poll():
                kind, *rest = pickle.loads(self.pipe.recv_bytes())
                if kind == "result":
                    (self.result,) = rest
                else:
                    self.error = (rest[0], rest[1], rest[2])
        except (EOFError, OSError):
            pass  # the rank died; reap() detects that

    def reap(self) -> bool:
        """Return True if the rank has ended."""
        if not self.reaped:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.reaped = True
                self.death = os.waitstatus_to_exitcode(status)
        return self.reaped

    def died_silently(self) -> bool:
        if not self.reap():
            return False
        self.receive()  # the rank may have sent its message before it died
        return self.result is None and self.error is None

    def stack(self) -> str:
        return self.stacks.read_text(errors="replace").strip()

    def output(self) -> str:
        return self.log.read_text(errors="replace")[-OUTPUT_CHARS:].strip()


def _serve(client: Connection, directory: Path) -> None:
    """Answer requests until the test process closes its end."""
    _import_modules()
    elapsed = 0.0
    while True:
        try:
            request = pickle.loads(client.recv_bytes())
        except EOFError:
            return
        with tempfile.TemporaryDirectory(dir=directory) as world:
            reply = _run_world(client, Path(world), request)
        before, elapsed = elapsed, processor_seconds()
        client.send_bytes(pickle.dumps(reply | {"seconds": elapsed - before}))


def processor_seconds() -> float:
    """Return the processor time of this process and of its ended descendants."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def _import_modules() -> None:
    """Import the modules that ranks need: torch, and the training modules of weft."""
    logging.disable(logging.WARNING)  # torchao warns about kernels for other hardware
    for name in (
        "numpy",
        "pytest",
        "torch",
        "torch._dynamo",  # imported by the first optimizer otherwise
        "torch.distributed",
        "torch.distributed.algorithms._checkpoint.checkpoint_wrapper",
        "torch.distributed.checkpoint",
        "torch.distributed.checkpoint.state_dict",
        "torch.distributed.device_mesh",
        "torch.distributed.fsdp",
        "torch.distributed.pipelining",
        "torch.distributed.tensor",
        "torch.distributed.tensor.parallel",
        "torchao.float8",
        "tests.fake",
        "tests.small",
    ):
        importlib.import_module(name)
    logging.disable(logging.NOTSET)
    gc.freeze()  # else a collection in a rank would copy every page of these modules


def _run_world(client: Connection, directory: Path, request: dict[str, Any]) -> dict[str, Any]:
    """Fork a world, wait for its ranks, and kill all that remain."""
    threads = len(os.listdir("/proc/self/task"))
    if threads != 1:
        return {"error": f"the rank server has {threads} threads: a fork may hang", "rank": None}
    deadline = time.monotonic() + request["timeout"]
    ranks: list[_Rank] = []
    try:
        for rank in range(request["world_size"]):
            ranks.append(_fork(rank, client, directory, request))
        error, rank_at_fault = _await(ranks, client, deadline, request["timeout"])
        if not error:
            _settle(ranks)
    finally:
        _kill_children()
        for item in ranks:
            item.pipe.close()
    return {
        "error": error,
        "rank": rank_at_fault,
        "results": [rank.result for rank in ranks],
        "outputs": [rank.output() for rank in ranks],
    }


def _fork(rank: int, client: Connection, directory: Path, request: dict[str, Any]) -> _Rank:
    ours, theirs = Pipe()
    log, stacks = directory / f"rank-{rank}.log", directory / f"rank-{rank}.stacks"
    log.touch()
    stacks.touch()
    server = os.getpid()
    pid = os.fork()
    if pid == 0:
        try:
            client.close()
            ours.close()
            _die_with_parent(signal.SIGKILL)
            if os.getppid() == server:  # else the server died before the signal was set
                _be_rank(rank, theirs, directory, log, stacks, request)
        finally:
            os._exit(1)
    theirs.close()
    return _Rank(pid, ours, log, stacks)


def _await(
    ranks: list[_Rank], client: Connection, deadline: float, timeout: float
) -> tuple[str, int | None]:
    """Wait for every result; return the error, empty if there is none, and its rank."""
    while any(rank.result is None for rank in ranks):
        remaining = deadline - time.monotonic()
        if remaining <= 0:
            return _timed_out(ranks, timeout), None
        open_pipes = [rank.pipe for rank in ranks if rank.result is None and not rank.reaped]
        # Poll for deaths: the children of a dead rank can hold its pipe open.
        ready = wait([*open_pipes, client], min(remaining, 0.05))
        if client in ready:
            raise SystemExit("the test process is gone")
        for rank in ranks:
            rank.receive()
        if any(rank.error for rank in ranks):
            time.sleep(SILENT_SECONDS)
        silent = [number for number, rank in enumerate(ranks) if rank.died_silently()]
        if silent:
            return _died(ranks, silent[0]), silent[0]
        failed = [(rank.error, number) for number, rank in enumerate(ranks) if rank.error]
        if failed:
            (_, line, trace), number = min(failed)
            head = f"rank {number} of {len(ranks)} failed: {line}\n\n{trace}"
            return head + _outputs(ranks, [number]), number
    return "", None


def _died(ranks: list[_Rank], number: int) -> str:
    code = ranks[number].death or 0
    description = (
        f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with {code}"
    )
    head = f"rank {number} of {len(ranks)} {description} before its function returned\n"
    return head + _outputs(ranks, [number])


def _timed_out(ranks: list[_Rank], timeout: float) -> str:
    """Return the error of a timeout, with every rank's stack."""
    late = [number for number, rank in enumerate(ranks) if rank.result is None]
    for number in late:
        with contextlib.suppress(ProcessLookupError):
            os.kill(ranks[number].pid, signal.SIGUSR1)
    end = time.monotonic() + STACK_SECONDS
    # faulthandler writes line by line; the interpreter's own frame ends a stack.
    while time.monotonic() < end and not all(
        "_run_module_as_main" in ranks[number].stack() for number in late
    ):
        time.sleep(0.02)
    parts = [f"{len(ranks)} ranks did not finish within {timeout:g} s\n"]
    for number, rank in enumerate(ranks):
        frames = rank.stack().splitlines()
        shown_frames = [line for line in frames if __file__ not in line and "<frozen" not in line]
        stack = "\n".join(shown_frames) if frames else "gave no stack"
        parts.append(f"--- rank {number}: {stack if number in late else 'had finished'}\n")
    return "\n".join(parts) + _outputs(ranks, range(len(ranks)))


def _outputs(ranks: list[_Rank], numbers: Any) -> str:
    outputs = [(number, ranks[number].output()) for number in numbers]
    return "".join(f"\n--- rank {number} printed ---\n{text}\n" for number, text in outputs if text)


def _settle(ranks: list[_Rank]) -> None:
    """Send all ranks the signal to exit, and wait until they have exited."""
    for rank in ranks:
        with contextlib.suppress(OSError):
            rank.pipe.send_bytes(b"go")
    end = time.monotonic() + SETTLE_SECONDS
    while not all(rank.reap() for rank in ranks) and time.monotonic() < end:
        time.sleep(0.002)


def _kill_children() -> None:
    """Kill all descendants of this process."""
    children = Path(f"/proc/self/task/{os.getpid()}/children")
    while True:
        try:
            reaped, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if not reaped:
            for pid in children.read_text().split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            time.sleep(0.002)


# --------------------------------------------------------------------------- rank


def _be_rank(
    rank: int, pipe: Connection, directory: Path, log: Path, stacks: Path, request: dict[str, Any]
) -> NoReturn:
    """Run the function in a rank, send the result, and exit."""
    os.setsid()  # a signal that the rank sends to its group must not reach other ranks
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with open(log, "wb") as sink:
        os.dup2(sink.fileno(), 1)
        os.dup2(sink.fileno(), 2)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    faulthandler.enable()
    stack_file = open(stacks, "w")  # noqa: SIM115 - for as long as the process lives
    faulthandler.register(signal.SIGUSR1, stack_file, all_threads=True)
    message: tuple[Any, ...]
    try:
        message = ("result", _call(rank, directory, request))
    except BaseException as error:  # SystemExit is a failure, too
        line = traceback.format_exception_only(error)[-1].strip()
        # Omit the first frame, which is this function.
        error.__traceback__ = error.__traceback__ and error.__traceback__.tb_next
        message = ("error", time.monotonic(), line, "".join(traceback.format_exception(error)))
    sys.stdout.flush()
    sys.stderr.flush()
    pipe.send_bytes(pickle.dumps(message))
    pipe.recv_bytes()  # until all ranks have finished; after an error the server kills the rank
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()
    os._exit(0)


def _call(rank: int, directory: Path, request: dict[str, Any]) -> bytes:
    """Call the function in an initialized process group; return its pickled result."""
    import numpy
    import torch
    import torch.distributed as dist

    os.environ.clear()
    os.environ |= request["environment"] | {"GLOO_SOCKET_IFNAME": "lo"}
    os.chdir(request["folder"])
    sys.path[:] = request["path"]
    torch.set_num_threads(1)
    random.seed(0)
    numpy.random.seed(0)
    torch.manual_seed(0)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{directory}/store",
        rank=rank,
        world_size=request["world_size"],
        # Longer than the world's timeout, so that a hang ends with every rank's stack.
        timeout=timedelta(seconds=request["timeout"] + 1),
    )
    module, name, args, kwargs = pickle.loads(request["call"])
    function: Any = importlib.import_module(module)
    for part in name.split("."):
        function = getattr(function, part)
    return pickle.dumps(function(*args, **kwargs))


# --------------------------------------------------------------------------- processes

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h


def _die_with_parent(signum: signal.Signals) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signum, 0, 0, 0)


def _adopt_orphans() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


if __name__ == "__main__":
    _adopt_orphans()
    try:
        _serve(Connection(int(sys.argv[1])), Path(sys.argv[2]))
    finally:
        # The test process also removes the directory: either process may be killed.
        shutil.rmtree(sys.argv[2], ignore_errors=True)
