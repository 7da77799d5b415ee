"""Start the ranks of one host through torch's elastic agent, and again after a failure."""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch.distributed.elastic.multiprocessing.api as multiprocessing
from torch.distributed import DistError
from torch.distributed.elastic.agent.server.api import RunResult, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousTimeoutError,
)

from weft.cluster import REQUEUE
from weft.cluster.rank_exit import log_path, read_reports, status
from weft.cluster.rendezvous import JOIN, RendezvousHandler, open_rendezvous
from weft.config.schema import Job, flatten
from weft.monitor.process import PYTHON, on_one_host
from weft.monitor.signals import STOP_SIGNALS
from weft.plan.resolve import Plan
from weft.train.environment import is_loopback

# A signal so soon after the first is the same one: a terminal sends it to a whole process group,
# and a wrapper (docker, uv run) passes its own on as well.
SAME_SECONDS = 1.0
STOPPING = (
    "\nCtrl-C: the ranks finish the step and save. Again: they end at once, and the steps since "
    "the last checkpoint are lost."
)


@dataclass(frozen=True)
class Failure:
    """Why ranks ended: the first cause, not what followed from it on other ranks."""

    rank: int
    kind: str  # the exception's class, or the signal's name
    message: str
    traceback: str
    log: Path
    foreseen: bool = False  # the message says it all
    transient: bool = True  # another attempt may fare better
    where: str = ""  # 'in step 7', where that is known
    hopeless: str = ""  # why there is no other attempt, where that needs saying


class Requeue(Exception):
    """The run is to be gone on with by the same command, for the reason that it says."""


def launch(
    job: Job,
    plan: Plan,
    store: Path,
    say: Callable[[str], object],
    tell: Callable[[Failure], object],
) -> Failure | None:
    """Run this host's ranks of ``plan`` until the run ends, however often they must start again.

    Whatever ends the ranks comes back to one place, here: a crash, a kill, a node that came or
    went (`weft.cluster.rendezvous`), a stop signal.  That goes on to the ranks, which finish the step and
    save; a second one kills them.  The node of several that got it leaves, the others go on.

    Args:
        say: told what people may want to know.
        tell: told of a failure that is followed by another attempt.

    Returns:
        None if all ended well.

    Raises:
        Stopped: see above.
        KeyboardInterrupt: after the ranks were killed, on a second signal or Ctrl-C.
    """
    folder, several = Path(plan.run_dir), plan.node_counts[-1] > 1
    endpoint = plan.rendezvous if several else "localhost:0"
    prepare_for_torch(plan, endpoint, folder)
    killed: set[int] = set()
    others = children()  # of the program that calls weft

    def kill() -> signal.Signals:
        """What is left after a failure hangs, or soon will: torch gives it 30 s after a SIGTERM."""
        for child in children() - others:
            killed.add(child)
            with suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        return signal.SIGKILL

    def save() -> None:
        arguments = (signal.SIGTERM, threading.Event(), others, children() - others)
        threading.Thread(target=pass_on, args=arguments, daemon=True).start()

    # Private, and the only way to it.
    multiprocessing._get_default_signal = kill
    same = {key: value for key, value in flatten(job).items() if not key.startswith("run.")}
    same |= {"run.nproc_per_node": plan.local_world_size, "run.nodes": list(plan.node_counts)}
    meeting = open_rendezvous(
        endpoint, folder.name, plan.node_counts, same, kill=kill, save=save, say=say
    )
    spec = worker_spec(plan, store, meeting)
    failures: list[tuple[float, Failure]] = []
    limit = job.resilience.time_limit
    try:
        with passing_on_signals(limit, lambda: several and meeting.joining, say, others) as came:
            while not (came and several):
                result = run_once(spec, meeting)
                if result is None:
                    return ended_elsewhere(meeting)
                if not result.is_failed():
                    meeting.end(None)
                    return None
                if any(failure.exitcode == REQUEUE for failure in result.failures.values()):
                    if several:
                        continue
                    break
                ranks = range(meeting.nodes * plan.local_world_size)
                failure = first_cause(folder, ranks, result.failures, killed, meeting.began)
                if failure is None:
                    continue  # another node has gone
                failure = judge(failure, failures, job.resilience.max_restarts_per_hour)
                if failure.hopeless or not failure.transient or came:
                    if not came:
                        meeting.end(asdict(failure) | {"log": str(failure.log)})
                    return failure
                tell(failure)
    except SignalException as error:
        raise KeyboardInterrupt from error
    except RendezvousConnectionError as error:
        raise Requeue(f"the meeting place of the nodes, {endpoint}, is gone") from error
    except RendezvousTimeoutError as error:
        rule = f"fewer than {plan.node_counts[0]} nodes came within {JOIN}"
        raise Requeue(rule) from error
    finally:
        meeting.leave()
    raise Requeue("stopped and saved")


def prepare_for_torch(plan: Plan, endpoint: str, folder: Path) -> None:
    """What torch's agent and the ranks take from the environment, and where the agent logs."""
    (folder / "logs").mkdir(parents=True, exist_ok=True)
    several = plan.node_counts[-1] > 1
    host = f"-{socket.gethostname()}" if several else ""
    _log_to(folder / "logs" / f"launcher{host}.log")
    os.environ.setdefault("OMP_NUM_THREADS", str(plan.threads))
    # All nodes have as many ranks: they need not tell each other how many.
    os.environ["TORCH_ELASTIC_WORKER_IDENTICAL"] = "1"
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = "SIGHUP,SIGQUIT"
    if is_loopback(endpoint):
        for name, value in on_one_host(plan.device).items():
            os.environ.setdefault(name, value)


def worker_spec(plan: Plan, store: Path, meeting: RendezvousHandler) -> WorkerSpec:
    """This host's ranks, as torch's agent starts them: once, for what is next is decided here."""
    python, *rest = PYTHON
    return WorkerSpec(
        role="rank",
        local_world_size=plan.local_world_size,
        rdzv_handler=meeting,
        entrypoint=python,
        args=(*rest, "weft.cluster.worker", plan.run_dir, str(store)),
        max_restarts=0,
        monitor_interval=0.1,
    )


def run_once(spec: WorkerSpec, meeting: RendezvousHandler) -> RunResult | None:
    """Meet the other nodes and run the ranks until they end; None if the run is over."""
    while True:
        # torch's own folder of logs is not used.
        agent = LocalElasticAgent(spec, DefaultLogsSpecs(log_dir=os.devnull))
        try:
            result: RunResult | None = agent.run()
            return result
        except RendezvousClosedError:
            return None
        except DistError:
            if not meeting.several:
                raise
            # A node went away while they met: once more.


def ended_elsewhere(meeting: RendezvousHandler) -> Failure | None:
    """Why another node has ended the run; None if it ended well."""
    found = meeting.verdict()
    return None if found is None else Failure(**(found | {"log": Path(found["log"])}))


def judge(failure: Failure, before: list[tuple[float, Failure]], most: int) -> Failure:
    """Note a failure among those ``before``; its ``hopeless`` says what speaks against a restart.

    Args:
        most: restarts within an hour.
    """
    now = time.monotonic()
    last = before[-1][1] if before else None
    before.append((now, failure))
    recent = sum(when > now - 3600 for when, _ in before)
    if last and failure.where and (failure.kind, failure.where) == (last.kind, last.where):
        return replace(failure, hopeless="the same as last time, at the same place")
    if most and failure.transient and recent > most:
        hopeless = f"the {most} restarts an hour of resilience.max_restarts_per_hour are used up"
        return replace(failure, hopeless=hopeless)
    return failure if most else replace(failure, transient=False)


@contextmanager
def passing_on_signals(
    limit: float,
    waiting: Callable[[], bool],
    say: Callable[[str], object],
    others: Collection[int] = (),
) -> Iterator[list[int]]:
    """Inside, the first stop signal goes on to the ranks, and the second one kills them.

    Ranks get SIGTERM, whatever came: a Python process that has not set its handlers yet would end
    at SIGINT.  They have sessions of their own, so Ctrl-C on a terminal does not reach them.

    Args:
        limit: seconds after which the first comes of itself; 0: never.
        waiting: whether there are no ranks to wait for.
        say: called with what Ctrl-C does.
        others: children that are no ranks.

    Yields:
        The stop signals that came.
    """
    came: list[int] = []
    first = 0.0  # when the first came
    asked, over = threading.Event(), threading.Event()

    def stop_ranks() -> None:
        asked.wait()
        if not over.is_set():
            if came[0] == signal.SIGINT:
                say(STOPPING)
            pass_on(signal.SIGTERM, over, others)

    def handle(number: int, frame: object) -> None:
        nonlocal first
        if came:
            if time.monotonic() < first + SAME_SECONDS:
                return
            raise SignalException("a second signal", signal.SIGKILL)
        first = time.monotonic()  # before the next line: another signal may come between them
        came.append(number)
        if waiting():
            raise Requeue("stopped")
        asked.set()

    def expire() -> None:
        if not came:
            os.kill(os.getpid(), signal.SIGTERM)

    before = {number: signal.signal(number, handle) for number in STOP_SIGNALS}
    timer = threading.Timer(limit, expire)
    timer.daemon = True
    if limit:
        timer.start()
    threading.Thread(target=stop_ranks, daemon=True).start()
    try:
        yield came
    finally:
        over.set()
        asked.set()  # ends the thread
        timer.cancel()
        for number, handler in before.items():
            signal.signal(number, handler)


def pass_on(
    number: int,
    over: threading.Event,
    others: Collection[int],
    among: Collection[int] | None = None,
) -> None:
    """Send a signal once to every child of this process, as soon as it would not kill it.

    Args:
        over: ends it.
        others: get none.
        among: only to these; without it also to children that come later.
    """
    told = set(others)
    while not over.wait(0.05):
        left = (children() if among is None else children().intersection(among)) - told
        for child in left:
            if catches(child, number):
                with suppress(ProcessLookupError):
                    os.kill(child, number)
                told.add(child)
        if among is not None and not left:
            return


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
    folder: Path,
    ranks: range,
    failures: Mapping[int, ProcessFailure],
    killed: Collection[int] = (),
    began: float = 0.0,
) -> Failure | None:
    """The failure that came first; None if ranks only ended because those of another node did.

    A rank that died without a word (a signal, the out-of-memory killer) explains the broken
    connections that its peers report; otherwise the earliest report does, written by each rank at
    the moment of its own error.

    Args:
        ranks: of all nodes.
        failures: by rank, what torch's agent saw on this node.
        killed: processes that were ended because another had failed.
        began: seconds since the epoch; reports from before are of an earlier attempt.
    """
    reports = [report for report in read_reports(folder, began) if report["rank"] in ranks]
    reported = {report["rank"] for report in reports}
    for rank, failure in sorted(failures.items()):
        if rank not in reported and failure.pid not in killed:
            if failure.exitcode < 0:
                kind = failure.signal_name()
                message = "the process was killed by a signal"
                if kind == "SIGKILL":
                    message += ", perhaps for want of memory"
            else:
                kind, message = "exit", f"the process ended with status {failure.exitcode}"
            return Failure(rank, kind, message, "", log_path(folder, rank))
    if not reports:
        return None
    first = reports[0]
    return Failure(
        rank=first["rank"],
        kind=first["kind"],
        message=first["message"],
        traceback=first["traceback"],
        log=log_path(folder, first["rank"]),
        foreseen=first["foreseen"],
        transient=first["transient"],
        where=first["where"],
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
