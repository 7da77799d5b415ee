"""Start the ranks of one host through torch's elastic launcher, and tell how they ended."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed.elastic.multiprocessing.api as multiprocessing
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from weft.launch import REQUEUE
from weft.launch.worker import error_path, log_path, status
from weft.plan.resolve import Plan
from weft.resilience.signals import STOP_SIGNALS


@dataclass(frozen=True)
class Failure:
    """Why a run ended: the first cause, not what followed from it on other ranks."""

    rank: int
    kind: str  # the exception's class, or the signal's name
    message: str
    traceback: str
    log: Path
    foreseen: bool = False  # the message says it all


class Stopped(Exception):
    """The ranks have saved and left before the end, because they were asked to."""


def launch(plan: Plan, store: Path) -> Failure | None:
    """Run every rank of ``plan`` on this host and wait for them.

    A stop signal goes on to the ranks, which finish the step and save; a second one kills them.

    Returns:
        None if all ended well.

    Raises:
        Stopped: see above.
        KeyboardInterrupt: after the ranks were killed, on Ctrl-C or a second signal.
    """
    folder = Path(plan.run_dir)
    (folder / "logs").mkdir(parents=True, exist_ok=True)
    for stale in (folder / "logs").glob("rank-*.error.json"):
        stale.unlink()
    _log_to(folder / "logs" / "launcher.log")
    os.environ.setdefault("OMP_NUM_THREADS", str(plan.threads))
    # With torch's default every restart meets the addresses of the dead incarnation.
    os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    if plan.device == "cpu" and sys.platform == "linux":
        # One host: do not depend on what its name resolves to.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=plan.world_size,
        run_id=f"weft-{os.getpid()}",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        local_addr="localhost",
        max_restarts=0,
        monitor_interval=0.1,
        signals_to_handle="SIGINT,SIGHUP,SIGQUIT",
    )
    killed: set[int] = set()

    def kill() -> signal.Signals:
        """What is left after a failure hangs, or soon will: torch gives it 30 s after a SIGTERM."""
        killed.update(children())
        return signal.SIGKILL

    # Private, and the only way to it.
    multiprocessing._get_default_signal = kill
    # -P: a file of the user's that is called like a module must not come before that module.
    command = [sys.executable, "-P", "-m", "weft.launch.worker", str(folder), str(store)]
    try:
        with passing_on_signals():
            elastic_launch(config, command[0])(*command[1:])
    except ChildFailedError as error:
        if any(failure.exitcode == REQUEUE for failure in error.failures.values()):
            raise Stopped from error
        return first_cause(folder, plan.world_size, error, killed)
    except SignalException as error:
        raise KeyboardInterrupt from error
    return None


@contextmanager
def passing_on_signals() -> Iterator[None]:
    """Inside, the first stop signal goes on to the ranks, and the second one kills them."""
    came: list[int] = []
    over = threading.Event()

    def handle(number: int, frame: object) -> None:
        if came:
            raise SignalException("a second signal", signal.SIGKILL)
        came.append(number)
        threading.Thread(target=pass_on, args=(number, over), daemon=True).start()

    before = {number: signal.signal(number, handle) for number in STOP_SIGNALS}
    try:
        yield
    finally:
        over.set()
        for number, handler in before.items():
            signal.signal(number, handler)


def pass_on(number: int, over: threading.Event) -> None:
    """Send a signal once to every child of this process, as soon as it would not kill it."""
    told: set[int] = set()
    while not over.wait(0.05):
        for child in children() - told:
            if catches(child, number):
                with suppress(ProcessLookupError):
                    os.kill(child, number)
                told.add(child)


def children() -> set[int]:
    """The process ids of this process's children that have not ended."""
    mine = str(os.getpid())
    if sys.platform.startswith("linux"):
        processes = (int(path.name) for path in Path("/proc").glob("[0-9]*"))
        found = {process for process in processes if status(process).get("PPid") == mine}
    else:
        listed = subprocess.run(["pgrep", "-P", mine], capture_output=True, text=True, check=False)
        found = {int(line) for line in listed.stdout.split()}
    alive = set()
    for child in found:
        with suppress(ChildProcessError):  # somebody has waited for it meanwhile
            if os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                alive.add(child)
    return alive


def catches(child: int, number: int) -> bool:
    """Whether a process has a handler for a signal; where that cannot be told, it has."""
    if not sys.platform.startswith("linux"):
        return True
    return bool(int(status(child).get("SigCgt", "0"), 16) >> (number - 1) & 1)


def first_cause(
    folder: Path, world_size: int, error: ChildFailedError, killed: Collection[int] = ()
) -> Failure:
    """The failure that came first.

    A rank that died without a word (a signal, the out-of-memory killer) explains the broken
    connections that its peers report; otherwise the earliest report does, written by each rank at
    the moment of its own error.

    Args:
        killed: processes that were ended because another had failed.
    """
    reports: list[dict[str, Any]] = []
    for rank in range(world_size):
        path = error_path(folder, rank)
        if path.is_file():
            reports.append(json.loads(path.read_text("utf-8")))
    reported = {report["rank"] for report in reports}
    for rank, failure in sorted(error.failures.items()):
        stopped = failure.pid in killed  # by the agent, after another rank's failure
        if rank not in reported and not (stopped and (reports or len(error.failures) > 1)):
            if failure.exitcode < 0:
                kind = failure.signal_name()
                message = "the process was killed by a signal"
                if kind == "SIGKILL":
                    message += ", perhaps for want of memory"
            else:
                kind, message = "exit", f"the process ended with status {failure.exitcode}"
            return Failure(rank, kind, message, "", log_path(folder, rank))
    first = min(reports, key=lambda report: float(report["time"]))
    return Failure(
        rank=first["rank"],
        kind=first["kind"],
        message=first["message"],
        traceback=first["traceback"],
        log=log_path(folder, first["rank"]),
        foreseen=first["foreseen"],
    )


def _log_to(path: Path) -> None:
    """Send the elastic launcher's own messages to a file: the terminal shows what weft says."""
    handler = logging.FileHandler(path)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s %(message)s"))
    logger = logging.getLogger("torch.distributed.elastic")
    logger.handlers = [handler]
    logger.propagate = False
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed.elastic."):
            child = logging.getLogger(name)
            child.handlers = []
            child.propagate = True
