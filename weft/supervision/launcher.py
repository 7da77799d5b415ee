"""Launch and restart the ranks of one node with torch's elastic agent."""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
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

from weft.config.accelerators import supports
from weft.config.exit_statuses import REQUEUE
from weft.config.schema import flatten
from weft.monitor.event_log import note_event
from weft.monitor.jsonl import last_logged_step
from weft.monitor.process import PYTHON, child_pids, handles_signal, single_host_env
from weft.monitor.signals import STOP_SIGNALS, TIME_LIMIT_SIGNAL
from weft.monitor.spot_notice import watch_spot_notices
from weft.monitor.xid_watch import watch_xids
from weft.planning.plan import Plan
from weft.preparation.environment import is_loopback
from weft.supervision.network_watch import enable_nccl_log, watch_network
from weft.supervision.rank_exit import log_path, read_error_reports
from weft.supervision.rendezvous import JOIN_TIMEOUT, RendezvousHandler, open_rendezvous

# A second signal within this time is a duplicate: a terminal signals the whole process group, and
# a wrapper (docker, uv run) forwards the signal that it received.
DUPLICATE_SIGNAL_SECONDS = 1.0
STOP_MESSAGE = (
    "\nCtrl-C: the ranks save a checkpoint and stop, after this step at the latest. A second "
    "Ctrl-C kills them at once, and loses the steps since the last checkpoint."
)


@dataclass(frozen=True)
class Failure:
    """Root cause of a failed run, not its consequences on other ranks."""

    rank: int
    kind: str  # the exception's class, or the signal's name
    message: str
    traceback: str
    log: Path
    is_expected: bool = False  # the message explains the failure; no traceback is needed
    transient: bool = True  # a restart may succeed
    where: str = ""  # 'in step 7', if known
    no_retry_reason: str = ""  # why there is no restart, unless `transient` explains it


class Requeue(Exception):
    """The run stopped for the given reason; the same command resumes it."""


def launch(
    plan: Plan,
    dataset_dir: Path,
    log: Callable[[str], object],
    on_restart: Callable[[Failure], object],
) -> Failure | None:
    """Run this node's ranks until the run ends, and restart them when necessary.

    This function alone decides what follows a crash, a kill, a node that joined or left
    (`weft.supervision.rendezvous`), or a stop signal.  It forwards a stop signal to the ranks,
    which save and end; a second signal kills them.  On several nodes, only the node that received
    the signal leaves; the others continue.

    Args:
        plan: the plan of the run, for all nodes.
        dataset_dir: the tokenized dataset.
        log: receives messages for the user.
        on_restart: receives each failure that is followed by a restart.

    Returns:
        None if the run succeeded.

    Raises:
        Requeue: if the run stopped and can resume.
        KeyboardInterrupt: after a second signal killed the ranks.
    """
    job = plan.job
    run_dir, is_multi_node = Path(plan.run_dir), plan.node_counts[-1] > 1
    endpoint = plan.rendezvous if is_multi_node else "localhost:0"
    configure_elastic_agent(plan, endpoint, run_dir)
    killed: set[int] = set()
    notices: list[str] = []  # that stop the run
    report = partial(report_notice, run_dir, partial(print, file=sys.stderr))
    other_children = child_pids()  # of the program that calls weft

    def kill_ranks() -> signal.Signals:
        # After a failure the other ranks hang, and torch waits 30 s for each after a SIGTERM.
        for child in child_pids() - other_children:
            killed.add(child)
            with suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        return signal.SIGKILL

    def stop_ranks() -> None:
        ranks = child_pids() - other_children
        arguments = (signal.SIGTERM, threading.Event(), other_children, ranks)
        threading.Thread(target=forward_signal, args=arguments, daemon=True).start()

    def stop_on_notice(text: str) -> None:
        notices.append(text)
        os.kill(os.getpid(), signal.SIGTERM)

    # Private in torch, but it has no public hook.
    multiprocessing._get_default_signal = kill_ranks
    shared_config = {
        key: value for key, value in flatten(job).items() if not key.startswith("run.")
    }
    shared_config |= {
        "run.nproc_per_node": plan.local_world_size,
        "run.nodes": list(plan.node_counts),
    }
    rendezvous = open_rendezvous(
        endpoint,
        run_dir.name,
        plan.node_counts,
        shared_config,
        kill_ranks=kill_ranks,
        stop_ranks=stop_ranks,
        log=log,
    )
    spec = build_worker_spec(plan, dataset_dir, rendezvous)
    limit = job.resilience.time_limit
    try:
        with (
            forward_signals(
                limit, lambda: is_multi_node and rendezvous.is_joining, log, other_children, notices
            ) as received,
            watch_spot_notices(job.resilience.spot_notice, report, stop_on_notice),
            watch_xids(plan.run_path, log),
        ):
            return _restart_until_end(plan, spec, rendezvous, received, killed, on_restart)
    except SignalException as error:
        raise KeyboardInterrupt from error
    except RendezvousConnectionError as error:
        raise Requeue(f"lost the rendezvous endpoint {endpoint}") from error
    except RendezvousTimeoutError as error:
        reason = f"fewer than {plan.node_counts[0]} nodes joined within {JOIN_TIMEOUT}"
        raise Requeue(reason) from error
    finally:
        rendezvous.leave()


def _restart_until_end(
    plan: Plan,
    spec: WorkerSpec,
    rendezvous: RendezvousHandler,
    received: Collection[int],
    killed: Collection[int],
    on_restart: Callable[[Failure], object],
) -> Failure | None:
    """Run this node's ranks until the run ends; return and raise as `launch`.

    Args:
        plan: the plan of the run.
        spec: how the ranks are started.
        rendezvous: where the nodes meet.
        received: stop signals; grows while the ranks run.
        killed: processes that the launcher killed itself; grows while the ranks run.
        on_restart: receives each failure that is followed by a restart.
    """
    is_multi_node, resilience = plan.node_counts[-1] > 1, plan.job.resilience
    failures: list[tuple[float, Failure]] = []
    while not (received and is_multi_node):
        watch = watch_network(plan.run_path, plan.local_world_size, rendezvous.log)
        with watch if is_multi_node else nullcontext():
            result = run_once(spec, rendezvous)
        if result is None:  # another node has ended the run
            remote = rendezvous.get_failure()
            return Failure(**(remote | {"log": Path(remote["log"])})) if remote else None
        if not result.is_failed():
            rendezvous.end_run(None)
            return None
        if any(failure.exitcode == REQUEUE for failure in result.failures.values()):
            if is_multi_node:
                continue
            break
        ranks = range(rendezvous.num_nodes * plan.local_world_size)
        failure = find_root_cause(
            plan.run_path, ranks, result.failures, killed, rendezvous.start_time
        )
        if failure is None:
            continue  # another node was lost
        failure = record_failure(failure, failures, resilience.max_restarts_per_hour)
        if failure.no_retry_reason or not failure.transient or received:
            if not received:
                rendezvous.end_run(asdict(failure) | {"log": str(failure.log)})
            return failure
        on_restart(failure)
    raise Requeue("stopped")


def report_notice(run_dir: Path, log: Callable[[str], object], text: str) -> None:
    """Log a notice about this node, and add it to the events."""
    text = f"node {socket.gethostname()}: {text}"
    log(f"weft: {text}")
    note_event(run_dir, "notice", last_logged_step(run_dir), text)


def configure_elastic_agent(plan: Plan, endpoint: str, run_dir: Path) -> None:
    """Set the environment of torch's agent and the ranks, and the agent's log file."""
    (run_dir / "logs").mkdir(parents=True, exist_ok=True)
    is_multi_node = plan.node_counts[-1] > 1
    host = f"-{socket.gethostname()}" if is_multi_node else ""
    _log_to(run_dir / "logs" / f"launcher{host}.log")
    os.environ.setdefault("OMP_NUM_THREADS", str(plan.num_threads))
    # All nodes have the same number of ranks, so they need not exchange it.
    os.environ["TORCH_ELASTIC_WORKER_IDENTICAL"] = "1"
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = "SIGHUP,SIGQUIT"
    if is_multi_node and supports(plan.device, "NCCL"):
        enable_nccl_log(run_dir, os.environ)
    if is_loopback(endpoint):
        for name, value in single_host_env(plan.device).items():
            os.environ.setdefault(name, value)


def build_worker_spec(plan: Plan, dataset_dir: Path, rendezvous: RendezvousHandler) -> WorkerSpec:
    """Return this node's WorkerSpec, without restarts, on which `launch` decides."""
    python, *rest = PYTHON
    return WorkerSpec(
        role="rank",
        local_world_size=plan.local_world_size,
        rdzv_handler=rendezvous,
        entrypoint=python,
        args=(*rest, "weft.supervision.worker", plan.run_dir, str(dataset_dir)),
        max_restarts=0,
        monitor_interval=0.1,
    )


def run_once(spec: WorkerSpec, rendezvous: RendezvousHandler) -> RunResult | None:
    """Join the rendezvous and run the ranks until they end; None if the run is over."""
    while True:
        # weft does not use torch's log directory.
        agent = LocalElasticAgent(spec, DefaultLogsSpecs(log_dir=os.devnull))
        try:
            result: RunResult | None = agent.run()
            return result
        except RendezvousClosedError:
            return None
        except DistError:
            if not rendezvous.is_multi_node:
                raise
            # A node left during the rendezvous: try again.


def record_failure(
    failure: Failure, history: list[tuple[float, Failure]], max_restarts: int
) -> Failure:
    """Append a failure to ``history``; set ``no_retry_reason`` to prevent a restart.

    ``history`` has the monotonic time of each failure.  ``max_restarts`` is the maximum number of
    restarts within one hour; 0 disables restarts.
    """
    now = time.monotonic()
    last = history[-1][1] if history else None
    history.append((now, failure))
    recent = sum(failed_at > now - 3600 for failed_at, _ in history)
    if last and failure.where and (failure.kind, failure.where) == (last.kind, last.where):
        reason = f"the restarted run failed again with {failure.kind} {failure.where}"
        return replace(failure, no_retry_reason=reason)
    if max_restarts and failure.transient and recent > max_restarts:
        reason = f"resilience.max_restarts_per_hour={max_restarts} restarts are used up"
        return replace(failure, no_retry_reason=reason)
    return failure if max_restarts else replace(failure, transient=False)


@contextmanager
def forward_signals(
    limit: float,
    is_waiting: Callable[[], bool],
    log: Callable[[str], object],
    other_children: Collection[int] = (),
    notices: Collection[str] = (),
) -> Iterator[list[int]]:
    """Forward the first stop signal to the ranks; the second signal kills them.

    The ranks always receive SIGTERM: SIGINT would end a Python process that has not installed its
    handlers yet.  Each rank has its own session, so Ctrl-C on a terminal does not reach it.  After
    the time limit they receive `TIME_LIMIT_SIGNAL`, because they complete a first step before they
    stop; a stop signal that follows counts as the first one.

    Args:
        limit: time limit in seconds; 0: none.
        is_waiting: returns True while no ranks are running.
        log: receives an explanation of Ctrl-C.
        other_children: child processes that are not ranks.
        notices: grows before this process sends itself SIGTERM because of a notice.  A scheduler's
            signal for the same reason may follow, and counts as the first one.

    Yields:
        The list of signals received.
    """
    received: list[int] = []
    first_time = 0.0  # of the first stop signal
    num_notices = 0
    is_over = threading.Event()
    requests = {number: threading.Event() for number in (signal.SIGTERM, TIME_LIMIT_SIGNAL)}

    def stop_ranks(number: signal.Signals) -> None:
        requests[number].wait()
        if not is_over.is_set():
            if number == signal.SIGTERM and signal.SIGINT in received:
                log(STOP_MESSAGE)
            forward_signal(number, is_over, other_children)

    def handle(number: int, frame: object) -> None:
        nonlocal first_time, num_notices
        if num_notices < len(notices):
            num_notices += 1
        elif first_time:
            if time.monotonic() < first_time + DUPLICATE_SIGNAL_SECONDS:
                return
            raise SignalException("a second signal", signal.SIGKILL)
        else:
            first_time = time.monotonic()  # first, because another signal may interrupt here
        received.append(number)
        if is_waiting():
            raise Requeue("stopped")
        requests[signal.SIGTERM].set()

    def handle_time_limit(number: int, frame: object) -> None:
        received.append(number)
        if is_waiting():
            raise Requeue("stopped after resilience.time_limit")
        requests[TIME_LIMIT_SIGNAL].set()

    def expire() -> None:
        if not received:
            os.kill(os.getpid(), TIME_LIMIT_SIGNAL)

    before = {number: signal.signal(number, handle) for number in STOP_SIGNALS}
    before[TIME_LIMIT_SIGNAL] = signal.signal(TIME_LIMIT_SIGNAL, handle_time_limit)
    timer = threading.Timer(limit, expire)
    timer.daemon = True
    if limit:
        timer.start()
    for each in requests:
        threading.Thread(target=stop_ranks, args=(each,), daemon=True).start()
    try:
        yield received
    finally:
        is_over.set()
        for event in requests.values():
            event.set()  # ends the thread
        timer.cancel()
        for number, handler in before.items():
            signal.signal(number, handler)


def forward_signal(
    number: signal.Signals,
    is_over: threading.Event,
    excluded: Collection[int],
    targets: Collection[int] | None = None,
) -> None:
    """Send a signal once to each child process, as soon as the child handles it.

    Args:
        number: the signal.
        is_over: set it to end the loop.
        excluded: children that receive no signal.
        targets: the children to signal; None: all, including children that start later.
    """
    done = set(excluded)
    while not is_over.is_set():
        pending = (child_pids() if targets is None else child_pids().intersection(targets)) - done
        for child in pending:
            if handles_signal(child, number):
                with suppress(ProcessLookupError):
                    os.kill(child, number)
                done.add(child)
        if targets is not None and not pending:
            return
        is_over.wait(0.05)


def find_root_cause(
    run_dir: Path,
    ranks: range,
    failures: Mapping[int, ProcessFailure],
    killed: Collection[int] = (),
    start_time: float = 0.0,
) -> Failure | None:
    """Return the first failure; None if the ranks of another node caused it.

    A rank that died without a report (a signal, the out-of-memory killer) explains the broken
    connections that its peers report.  Otherwise the earliest report is the root cause, because
    each rank writes its report as soon as it fails.

    Args:
        run_dir: has the error reports of the ranks below ``logs/``.
        ranks: ranks of all nodes.
        failures: failures that torch's agent saw on this node, by rank.
        killed: processes that weft killed after another rank failed.
        start_time: seconds since the epoch; older reports belong to an earlier attempt.
    """
    reports = [r for r in read_error_reports(run_dir, start_time) if r["rank"] in ranks]
    reported = {report["rank"] for report in reports}
    for rank, failure in sorted(failures.items()):
        if rank not in reported and failure.pid not in killed:
            if failure.exitcode < 0:
                kind = failure.signal_name()
                message = "the process was killed by a signal"
                if kind == "SIGKILL":
                    message += ", possibly because the node ran out of memory"
            else:
                kind, message = "exit", f"the process exited with status {failure.exitcode}"
            return Failure(rank, kind, message, "", log_path(run_dir, rank))
    if not reports:
        return None
    names = ("rank", "kind", "message", "traceback", "is_expected", "transient", "where")
    first = {name: reports[0][name] for name in names}
    return Failure(**first, log=log_path(run_dir, first["rank"]))


def _log_to(path: Path) -> None:
    """Send the messages of torch's elastic agent to a file instead of the terminal."""
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
