"""Start the ranks of one host through torch's elastic launcher, and tell how they ended."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from weft.launch.worker import error_path, log_path
from weft.plan.resolve import Plan


@dataclass(frozen=True)
class Failure:
    """Why a run ended: the first cause, not what followed from it on other ranks."""

    rank: int
    kind: str  # the exception's class, or the signal's name
    message: str
    traceback: str
    log: Path
    foreseen: bool = False  # the message says it all


def launch(plan: Plan, store: Path) -> Failure | None:
    """Run every rank of ``plan`` on this host and wait for them.

    Returns:
        None if all ended well.

    Raises:
        KeyboardInterrupt: after the ranks were stopped, on Ctrl-C or SIGTERM.
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
    )
    # -P: a file of the user's that is called like a module must not come before that module.
    command = [sys.executable, "-P", "-m", "weft.launch.worker", str(folder), str(store)]
    try:
        elastic_launch(config, command[0])(*command[1:])
    except ChildFailedError as error:
        return first_cause(folder, plan.world_size, error)
    except SignalException as error:
        raise KeyboardInterrupt from error
    return None


def first_cause(folder: Path, world_size: int, error: ChildFailedError) -> Failure:
    """The failure that came first.

    A rank that died without a word (a signal, the out-of-memory killer) explains the broken
    connections that its peers report; otherwise the earliest report does, written by each rank at
    the moment of its own error.
    """
    reports: list[dict[str, Any]] = []
    for rank in range(world_size):
        path = error_path(folder, rank)
        if path.is_file():
            reports.append(json.loads(path.read_text("utf-8")))
    reported = {report["rank"] for report in reports}
    for rank, failure in sorted(error.failures.items()):
        stopped = failure.exitcode == -signal.SIGTERM  # by the agent, after another rank's failure
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
