"""Run a test's function on several gloo ranks, quickly and with full cleanup.

    def total(start):                       # at the top level of the test's module
        x = torch.tensor(start + dist.get_rank())
        dist.all_reduce(x)
        return x.item()

    def test_total():
        assert run_ranks(total, 2, 10) == [21, 21]

Starting interpreters that import torch costs seconds per test.  So one *server*, a fresh
interpreter, imports torch and weft once per session, and forks the ranks of every world with
`weft.supervision.local_ranks.run_ranks`, which takes some hundredths of a second.  That module has
the rules for failures, timeouts and deaths of ranks.  Forking is safe only while the server has a
single thread: it runs no tensor operation, makes no process group, and refuses to fork if a thread
appears.

    test process --(socket: request, reply)--> server --(fork; a pipe each)--> rank 0, 1, ...

Arguments and results are pickled.  The server never unpickles either, because that would import
test modules and their imports into it.

*Cleanup.*  After every world the server kills all processes that the ranks started: it is a
subreaper, so it adopts orphans of any session.  The server looks every second whether the test
process still exists; if not, it kills the ranks and ends.  If the server is killed, the ranks get
the kernel's parent-death signal.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib
import importlib.util
import logging
import os
import pickle
import pkgutil
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
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")

ROOT = Path(__file__).resolve().parent.parent
OUTPUT_CHARS = 8000  # of each rank, the last of what it printed
# Packages of weft that are imported once for all ranks.
PRELOADED_PACKAGES = (
    *("models", "parallel", "data", "optim", "training", "preparation", "inference"),
    *("conversion", "reporting", "verification", "comparison"),
)
MAX_LOG_LINES = 200  # of a traceback or of the output of a failed rank
SETTLE_SECONDS = 5.0  # for the server to kill the ranks and exit
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
    directory, environment and ``sys.path``, and an initialized default group.

    Args:
        function: defined at the top level of an importable module.
        world_size: number of ranks.
        args, kwargs: must pickle.
        timeout: seconds until the world is killed.

    Returns:
        The results of all ranks, by rank.  They must pickle.

    Raises:
        RankError: with the traceback and output of the first rank that failed, or every
            rank's stack after the timeout.
        ValueError: if a rank cannot find ``function`` by name.
    """
    sys.audit("tests.world", function)
    request = make_request(function, world_size, timeout, args, kwargs)
    reply = _server().ask(request, timeout)
    if "error" in reply:
        raise RankError(reply["error"], reply["rank"])
    for rank, (_, text) in enumerate(reply["results"]):
        if text:  # pytest shows it if the test fails later on
            print(f"--- rank {rank} printed ---\n{text}")
    return [pickle.loads(result) for result, _ in reply["results"]]


def make_request(
    function: Callable[..., Any],
    world_size: int,
    timeout: float,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> dict[str, Any]:
    """Return the server's request for a world; see `run_ranks`."""
    module, name = function.__module__, function.__qualname__
    if "<" in name or module == "__main__":
        raise ValueError(f"{module}.{name}: a rank's function must be at a module's top level")
    return {
        "world_size": world_size,
        "timeout": timeout,
        "call": pickle.dumps((module, name, args, kwargs)),
        "path": list(sys.path),
        "directory": os.getcwd(),
        "environment": dict(os.environ),
    }


class _Server:
    """The server, as seen by the test process."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        self.directory = tempfile.mkdtemp(prefix="weft-ranks-")
        with theirs:
            arguments = [str(theirs.fileno()), self.directory, str(os.getpid())]
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
        limit = timeout + SETTLE_SECONDS + 10
        try:
            self.connection.send_bytes(pickle.dumps(request))
            if not self.connection.poll(limit if self.started else limit + START_SECONDS):
                raise RuntimeError("the rank server does not answer")
            reply: dict[str, Any] = pickle.loads(self.connection.recv_bytes())
        except (EOFError, OSError) as error:
            status = self.close()
            raise RuntimeError(f"the rank server died (exit status {status})") from error
        except BaseException:
            self.close()  # also on Ctrl-C
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
        self.process.terminate()
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


def _serve(client: Connection) -> None:
    """Answer requests until the test process closes its end."""
    _import_modules()
    elapsed = 0.0
    while True:
        try:
            request = pickle.loads(client.recv_bytes())
        except EOFError:
            return
        reply = _run_world(request)
        before, elapsed = elapsed, processor_seconds()
        client.send_bytes(pickle.dumps(reply | {"seconds": elapsed - before}))


def processor_seconds() -> float:
    """Return the processor time of this process and of its ended descendants."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def _import_modules() -> None:
    """Import what ranks need, once for all of them: torch, and weft up to its tools."""
    logging.disable(logging.WARNING)  # torchao warns about kernels for other hardware
    with contextlib.suppress(ModuleNotFoundError):  # not every PyTorch has it
        importlib.import_module("torch.profiler._cupti_monitor")  # the first step imports it
    for name in (
        "encodings.utf_8_sig",
        "numpy",
        "numpy.ma",  # by the first np.unique
        "pytest",
        "rich._emoji_codes",  # by the first text in a terminal
        "torch",
        "torch._dynamo",  # imported by the first optimizer otherwise
        "torch._inductor.compile_fx",  # by the first compiled function
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
        "tests.layouts",
        "tests.small",
        *(
            module.name
            for directory in PRELOADED_PACKAGES
            for module in pkgutil.walk_packages(
                [str(ROOT / "weft" / directory)], f"weft.{directory}."
            )
        ),
    ):
        if name != "weft.inference.lm_eval_model" or importlib.util.find_spec("lm_eval"):
            importlib.import_module(name)
    importlib.import_module("weft.data.token_store").manifest_adapter()
    logging.disable(logging.NOTSET)
    gc.freeze()  # else a collection in a rank would copy every page of these modules


def _run_world(request: dict[str, Any]) -> dict[str, Any]:
    """Fork a world, wait for its ranks, and kill all processes that remain."""
    from weft.supervision import local_ranks

    threads = len(os.listdir("/proc/self/task"))
    if threads != 1:
        return {"error": f"the rank server has {threads} threads: a fork may hang", "rank": None}
    local_ranks.MAX_LOG_LINES = MAX_LOG_LINES
    try:
        size, timeout = request["world_size"], request["timeout"]
        return {"results": local_ranks.run_ranks(_call, size, request, timeout=timeout)}
    except local_ranks.RanksFailed as error:
        return {"error": str(error), "rank": error.rank}
    finally:
        _kill_children()


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


def _call(request: dict[str, Any]) -> tuple[bytes, str]:
    """Call the test's function in a rank; return its pickled result, and what it printed."""
    import numpy
    import torch
    import torch.distributed as dist

    from weft.config.errors import WeftError

    log = Path(os.readlink("/proc/self/fd/1"))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ |= request["environment"] | {"GLOO_SOCKET_IFNAME": "lo"}
    os.chdir(request["directory"])
    sys.path[:] = request["path"]
    random.seed(0)
    numpy.random.seed(0)
    torch.manual_seed(0)
    module, name, args, kwargs = pickle.loads(request["call"])
    function: Any = importlib.import_module(module)
    for part in name.split("."):
        function = getattr(function, part)
    # A function may destroy the group at once: gloo fails in ranks that have not yet connected.
    dist.barrier()
    try:
        result = pickle.dumps(function(*args, **kwargs))
    except WeftError as error:  # which `weft.supervision.local_ranks` shows without a traceback
        raise RuntimeError("".join(traceback.format_exception(error))) from None
    sys.stdout.flush()
    return result, log.read_text(errors="replace")[-OUTPUT_CHARS:].strip()


_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h


def _main() -> None:
    """Run the server: arguments are its socket, its directory and the test process."""
    socket_number, directory, parent = sys.argv[1:]

    def stop(number: int, frame: object) -> None:
        if number == signal.SIGTERM or os.getppid() != int(parent):
            raise SystemExit(0)

    signal.signal(signal.SIGTERM, stop)
    # Not the kernel's parent-death signal: it comes when the thread ends that started the server.
    signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, 1.0, 1.0)  # a fork does not inherit it
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    tempfile.tempdir = directory
    try:
        _serve(Connection(int(socket_number)))
    finally:
        _kill_children()
        # The test process also removes the directory: either process may be killed.
        shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    _main()
