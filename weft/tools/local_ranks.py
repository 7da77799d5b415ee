"""Run a function on several gloo ranks of this machine, forked from this process.

Starting an interpreter that imports torch takes seconds a rank; a fork takes hundredths.  It is
sound as long as this process has not used a GPU (its driver does not survive a fork) and the ranks
keep to one thread each, as the worker processes of torch's own DataLoader do.  Ranks see no GPU.

A rank that fails says why and then stands still, with its connections open, until all are killed:
so its peers see no broken connection, and what is shown is the cause.  A rank that dies without a
word does break them, so a silent death is looked for before a peer's error is believed.  At the
time limit every rank writes where it stands.  However this process ends, the ranks end with it.
"""

from __future__ import annotations

import faulthandler
import importlib
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist

from weft.config.errors import WeftError
from weft.monitor.process import die_with_parent, on_one_host

T = TypeVar("T")

SILENT_SECONDS = 0.2  # for a death to become visible after a peer noticed it
STACK_SECONDS = 2.0  # for the ranks to write their stacks at the time limit
LAST_LINES = 12  # of a traceback or a stack

# Imported once here instead of once in each rank.
HEAVY = ("torch._dynamo", "torch.distributed.pipelining", "torch.distributed.fsdp")


class RanksFailed(WeftError):
    """A rank raised, died or did not end in time; the message tells which and why."""


class RanksTimedOut(RanksFailed):
    """The ranks did not end in time; the message has every rank's stack."""


@dataclass
class _Rank:
    process: ForkProcess
    pipe: Connection
    log: Path
    result: Any = None
    done: bool = False
    error: tuple[float, str] | None = None  # when, and what to say

    def receive(self) -> None:
        """Take the rank's message if there is one."""
        with suppress(EOFError, OSError):  # it died: `exitcode` tells
            if not self.done and self.error is None and self.pipe.poll():
                kind, *rest = self.pipe.recv()
                if kind == "result":
                    self.result, self.done = pickle.loads(rest[0]), True
                else:
                    self.error = (rest[0], rest[1])

    @property
    def death(self) -> int | None:
        """The exit code of a rank that ended without a message."""
        return None if self.done or self.error else self.process.exitcode


def import_heavy() -> None:
    """Import what every rank needs, so that it is there after a fork."""
    for name in HEAVY:
        importlib.import_module(name)


def run_ranks(
    function: Callable[..., T], world_size: int, *args: Any, timeout: float = 600
) -> list[T]:
    """Call ``function(*args)`` on every rank of a new gloo process group.

    Args:
        timeout: seconds until all are killed.

    Returns:
        What each rank returned, by rank; it must pickle.

    Raises:
        RanksFailed: with the error of the rank that failed first.
    """
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        raise WeftError("this process has used a GPU and cannot be forked; run it as a command")
    import_heavy()
    context = multiprocessing.get_context("fork")
    deadline = time.monotonic() + timeout
    ranks: list[_Rank] = []
    with tempfile.TemporaryDirectory(prefix="weft-ranks-") as folder:
        try:
            for rank in range(world_size):
                ours, theirs = context.Pipe()
                log = Path(folder) / f"rank-{rank}.log"
                process = context.Process(
                    target=_be_rank,
                    args=(rank, world_size, theirs, log, timeout, os.getpid(), function, args),
                )
                with warnings.catch_warnings():
                    # Python 3.12 warns of threads, such as those of numpy's linear algebra.
                    warnings.simplefilter("ignore", DeprecationWarning)
                    process.start()
                theirs.close()
                ranks.append(_Rank(process, ours, log))
            _await(ranks, deadline, timeout)
            return [rank.result for rank in ranks]
        finally:
            for each in ranks:
                each.process.kill()
            for each in ranks:
                each.process.join()
                each.process.close()
                each.pipe.close()


def _await(ranks: list[_Rank], deadline: float, timeout: float) -> None:
    """Wait for every result.

    Raises:
        RanksFailed: for the first cause.
    """
    while not all(rank.done for rank in ranks):
        remaining = deadline + STACK_SECONDS - time.monotonic()
        if remaining <= 0:
            raise RanksTimedOut(_late(ranks, timeout))
        wait([rank.pipe for rank in ranks if not rank.done], min(remaining, 1.0))
        for rank in ranks:
            rank.receive()
        if any(rank.error or rank.death is not None for rank in ranks):
            time.sleep(SILENT_SECONDS)
            for rank in ranks:
                rank.receive()
            raise RanksFailed(_cause(ranks))


def _cause(ranks: list[_Rank]) -> str:
    for number, rank in enumerate(ranks):
        if rank.death is not None:
            code = rank.death
            how = (
                f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with {code}"
            )
            return f"rank {number} of {len(ranks)} {how}" + _indented(rank.log)
    (_, text), number = min((rank.error, n) for n, rank in enumerate(ranks) if rank.error)
    return f"rank {number} of {len(ranks)} failed: {text}"


def _late(ranks: list[_Rank], timeout: float) -> str:
    """Where each rank stands that did not end in time."""
    lines = [f"the {len(ranks)} ranks did not end within {timeout:g} s"]
    for number, rank in enumerate(ranks):
        if not rank.done:
            lines.append(f"  rank {number} stands at (innermost call first):{_indented(rank.log)}")
    return "\n".join(lines)


def _indented(log: Path) -> str:
    """The first or last lines of what a rank wrote: of a stack the first, which are innermost."""
    lines = log.read_text("utf-8", "replace").splitlines()
    stack = [i for i, line in enumerate(lines) if "most recent call first" in line]
    shown = lines[stack[-1] + 1 :][:LAST_LINES] if stack else lines[-LAST_LINES:]
    return "".join(f"\n  | {line}" for line in shown)


# --------------------------------------------------------------------------- in a rank


def _be_rank(
    rank: int,
    world_size: int,
    pipe: Connection,
    log: Path,
    timeout: float,
    parent: int,
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> NoReturn:
    """Everything that a rank does; never returns."""
    try:
        die_with_parent(parent)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that started us
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        sink = open(log, "w", buffering=1, encoding="utf-8")  # noqa: SIM115 - while it lives
        os.dup2(sink.fileno(), 1)
        os.dup2(sink.fileno(), 2)
        sys.stdout = sys.stderr = sink
        faulthandler.enable(sink)
        faulthandler.dump_traceback_later(timeout, file=sink)
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        os.environ |= on_one_host("cpu")
        torch.set_num_threads(1)
        message: tuple[Any, ...]
        try:
            dist.init_process_group(
                "gloo",
                init_method=f"file://{log.parent}/store",
                rank=rank,
                world_size=world_size,
                # Longer than the limit: what should be seen after a hang is every rank's stack.
                timeout=timedelta(seconds=timeout + 60),
            )
            message = ("result", pickle.dumps(function(*args)))
        except BaseException as error:
            message = ("error", time.monotonic(), _told(error))
        pipe.send(message)
        pipe.poll(None)  # until all are killed
    finally:
        os._exit(1)


def _told(error: BaseException) -> str:
    """One line of what went wrong, with the end of the traceback unless it was foreseen."""
    notes = getattr(error, "__notes__", [])
    text = f"{error}" + (f" ({', '.join(notes)})" if notes else "")
    if isinstance(error, WeftError):
        return text
    lines = "".join(traceback.format_exception(error)).rstrip().splitlines()[-LAST_LINES:]
    return f"{type(error).__name__}: {text}" + "".join(f"\n  | {line}" for line in lines)
