"""Run a function on several ranks of this machine.

`run_ranks` forks gloo ranks from this process; `run_on_all_ranks` starts the current command once
per rank, for commands that may use GPUs.

Starting an interpreter that imports torch takes seconds per rank; a fork takes hundredths.  A fork
is safe while this process has not used a GPU (its driver does not survive a fork) and each rank
keeps to one thread, as the workers of torch's DataLoader do.  Ranks see no GPU.

A rank that fails sends its error and then waits, with its connections open, until all ranks are
killed.  So its peers see no broken connection, and the reported error is the cause.  A rank that
is killed does break its connections, so this module checks for dead ranks before it reports an
error.  At the time limit every rank dumps its stack.  The ranks die with this process.
"""

from __future__ import annotations

import faulthandler
import importlib
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist

from weft.config.accelerators import WITHOUT_GPUS
from weft.config.errors import WeftError
from weft.monitor.process import PYTHON, die_with_parent, single_host_env
from weft.planning.plan import Plan
from weft.training.machine import is_launched_rank
from weft.training.setup import Rank, connect

T = TypeVar("T")

DEATH_SECONDS = 0.2  # until the parent sees the death of a rank whose peer has failed
STACK_SECONDS = 2.0  # for the ranks to dump their stacks at the time limit
MAX_LOG_LINES = 12  # of a traceback or a stack
CRASH_LINES = 4  # before it, of what C++ wrote

# Modules that the parent imports once for all ranks.
PRELOADED_MODULES = ("torch._dynamo", "torch.distributed.pipelining", "torch.distributed.fsdp")


class RanksFailed(WeftError):
    """A rank raised, died or timed out; the message names rank and cause.

    Attributes:
        rank: the rank that failed first; None if the ranks ran out of time.
    """

    def __init__(self, message: str, rank: int | None = None) -> None:
        super().__init__(message)
        self.rank = rank


class RanksTimedOut(RanksFailed):
    """The ranks did not end in time; the message has every rank's stack."""


@dataclass
class _Rank:
    process: ForkProcess
    pipe: Connection
    log: Path
    result: Any = None
    done: bool = False
    error: tuple[float, str] | None = None  # time and message

    def receive(self) -> None:
        """Receive the rank's message, if it has sent one."""
        with suppress(EOFError, OSError):  # the rank died; see `exit_code`
            if not self.done and self.error is None and self.pipe.poll():
                kind, *rest = self.pipe.recv()
                if kind == "result":
                    self.result, self.done = pickle.loads(rest[0]), True
                else:
                    self.error = (rest[0], rest[1])

    @property
    def exit_code(self) -> int | None:
        """Exit code of a rank that ended without a message."""
        return None if self.done or self.error else self.process.exitcode


def preload_modules() -> None:
    """Import the modules that every rank needs, before the fork."""
    for name in PRELOADED_MODULES:
        importlib.import_module(name)


def run_ranks(
    function: Callable[..., T], world_size: int, *args: Any, timeout: float = 600
) -> list[T]:
    """Call ``function(*args)`` on every rank of a new gloo process group.

    Args:
        function: called on every rank; the forked processes inherit it, so it need not pickle.
        *args: inherited, too.
        world_size: number of ranks.
        timeout: seconds until all are killed.

    Returns:
        The return values by rank; they must pickle.

    Raises:
        RanksFailed: with the error of the rank that failed first.
    """
    accelerator = torch.accelerator.current_accelerator()
    if accelerator and torch.get_device_module(accelerator).is_initialized():
        raise WeftError(
            "this process has used a GPU and cannot fork ranks; run weft as a command instead"
        )
    preload_modules()
    context = multiprocessing.get_context("fork")
    deadline = time.monotonic() + timeout
    ranks: list[_Rank] = []
    with tempfile.TemporaryDirectory(prefix="weft-ranks-") as directory:
        try:
            for rank in range(world_size):
                parent_pipe, child_pipe = context.Pipe()
                log = Path(directory) / f"rank-{rank}.log"
                process = context.Process(
                    target=_rank_main,
                    args=(rank, world_size, child_pipe, log, timeout, os.getpid(), function, args),
                )
                with warnings.catch_warnings():
                    # Python 3.12 warns of threads, such as those of numpy's linear algebra.
                    warnings.simplefilter("ignore", DeprecationWarning)
                    process.start()
                child_pipe.close()
                ranks.append(_Rank(process, parent_pipe, log))
            _wait_for_results(ranks, deadline, timeout)
            return [rank.result for rank in ranks]
        finally:
            for handle in ranks:
                handle.process.kill()
            for handle in ranks:
                handle.process.join()
                handle.process.close()
                handle.pipe.close()


def run_on_all_ranks(plan: Plan, arguments: Sequence[str], run: Callable[[Rank], None]) -> int:
    """Call ``run`` on every rank of the plan; return the exit status.

    This process is a rank if the plan has one rank, or if a launcher started it.  Otherwise
    torchrun starts ``weft ARGUMENTS`` (the current command) once per rank.
    """
    if plan.world_size == 1 or is_launched_rank():
        if is_launched_rank():
            die_with_parent()  # torchrun starts each rank in a new session
        with connect(plan) as rank:
            run(rank)
        return 0
    environment = (
        {"OMP_NUM_THREADS": str(plan.num_threads)} | single_host_env(plan.device) | os.environ
    )
    agent = [*PYTHON, "torch.distributed.run", "--standalone", "--no-python"]
    command = [
        *agent,
        "--nproc-per-node",
        str(plan.world_size),
        *PYTHON,
        "weft",
        *arguments,
    ]
    # If this process is killed, torchrun dies with it, and then its ranks.
    result = subprocess.run(command, env=environment, check=False, preexec_fn=die_with_parent)
    return result.returncode


def _wait_for_results(ranks: list[_Rank], deadline: float, timeout: float) -> None:
    """Wait for every result.

    Raises:
        RanksFailed: for the first cause.
    """
    while not all(rank.done for rank in ranks):
        remaining = deadline + STACK_SECONDS - time.monotonic()
        if remaining <= 0:
            raise RanksTimedOut(_timeout_message(ranks, timeout))
        wait([rank.pipe for rank in ranks if not rank.done], min(remaining, 1.0))
        for rank in ranks:
            rank.receive()
        if any(rank.error or rank.exit_code is not None for rank in ranks):
            time.sleep(DEATH_SECONDS)
            for rank in ranks:
                rank.receive()
            raise _first_failure(ranks)


def _first_failure(ranks: list[_Rank]) -> RanksFailed:
    for number, rank in enumerate(ranks):
        if rank.exit_code is not None:
            code = rank.exit_code
            cause = (
                f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with {code}"
            )
            message = f"rank {number} of {len(ranks)} {cause}" + _format_log(rank.log)
            return RanksFailed(message, number)
    (_, text), number = min((rank.error, n) for n, rank in enumerate(ranks) if rank.error)
    return RanksFailed(f"rank {number} of {len(ranks)} failed: {text}", number)


def _timeout_message(ranks: list[_Rank], timeout: float) -> str:
    """Return the stack of each rank that did not end in time."""
    lines = [f"the {len(ranks)} ranks did not end within {timeout:g} s"]
    for number, rank in enumerate(ranks):
        if not rank.done:
            lines.append(f"  rank {number}, innermost call first:{_format_log(rank.log)}")
    return "\n".join(lines)


def _format_log(log: Path) -> str:
    """Format the innermost calls of a rank's stack dump, or else its last lines.

    If the rank crashed, start with the message of the library that ended it, and show the thread
    that crashed: the dump has it first.
    """
    lines = log.read_text("utf-8", "replace").splitlines()
    stacks = [i + 1 for i, line in enumerate(lines) if "most recent call first" in line]
    crash = [i for i, line in enumerate(lines) if line.startswith("Fatal Python error")]
    if crash and stacks:
        message = [line for line in lines[: crash[0]] if line][-CRASH_LINES:]
        shown = [*message, lines[crash[0]]]
        shown += lines[next(i for i in stacks if i > crash[0]) :][:MAX_LOG_LINES]
    else:
        shown = lines[stacks[-1] :][:MAX_LOG_LINES] if stacks else lines[-MAX_LOG_LINES:]
    return "".join(f"\n  | {line}" for line in shown)


# --------------------------------------------------------------------------- in a rank


def _rank_main(
    rank: int,
    world_size: int,
    pipe: Connection,
    log: Path,
    timeout: float,
    parent: int,
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> NoReturn:
    """Run the function in a forked rank, send its result, and wait to be killed."""
    try:
        die_with_parent(parent)
        os.setsid()  # a signal that a rank sends to its group must not reach the others
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        log_file = open(log, "w", encoding="utf-8")  # noqa: SIM115 - while the process lives
        os.dup2(log_file.fileno(), 1)
        os.dup2(log_file.fileno(), 2)
        sys.stdout, sys.stderr = (os.fdopen(n, "w", 1, "utf-8", closefd=False) for n in (1, 2))
        faulthandler.enable(log_file)
        faulthandler.dump_traceback_later(timeout, file=log_file)
        os.environ |= WITHOUT_GPUS | single_host_env("cpu")
        torch.set_num_threads(1)
        message: tuple[Any, ...]
        try:
            dist.init_process_group(
                "gloo",
                init_method=f"file://{log.parent}/store",
                rank=rank,
                world_size=world_size,
                # Longer than the limit, so that a hang ends with every rank's stack.
                timeout=timedelta(seconds=timeout + 60),
            )
            message = ("result", pickle.dumps(function(*args)))
        except BaseException as error:
            output = "" if isinstance(error, WeftError) else _format_log(log)
            message = ("error", time.monotonic(), _format_error(error) + output)
        pipe.send(message)
        pipe.poll(None)  # until the parent kills this rank
    finally:
        os._exit(1)


def _format_error(error: BaseException) -> str:
    """Format an error; unless it is a WeftError, append its traceback's end."""
    notes = getattr(error, "__notes__", [])
    text = f"{error}" + (f" ({', '.join(notes)})" if notes else "")
    if isinstance(error, WeftError):
        return text
    lines = "".join(traceback.format_exception(error)).rstrip().splitlines()[-MAX_LOG_LINES:]
    return f"{type(error).__name__}: {text}" + "".join(f"\n  | {line}" for line in lines)
