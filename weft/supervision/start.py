"""Implement ``weft train``: prepare the data, launch the ranks, print results."""

from __future__ import annotations

import os
import shlex
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import NoReturn

import torch.distributed as dist
from rich.console import Console

from weft.checkpoint.final_save import read_place
from weft.checkpoint.lustre import create_checkpoint_dir
from weft.checkpoint.manifest import list_checkpoints
from weft.config.errors import ConfigErrors, InvalidConfig
from weft.config.exit_statuses import FAILED, HUNG, INTERRUPTED, REQUEUE, UNHEALTHY, USAGE_ERROR
from weft.config.files import expand_path
from weft.config.locks import lock_directory, run_dir_in_use
from weft.config.schema import Job
from weft.conversion.hf_import import ModelSource
from weft.conversion.model_import import import_on_rank_0, import_source, open_source
from weft.doctor.doctor import preflight
from weft.estimate.memory_check import predict_run
from weft.monitor.device_memory import RunPrediction
from weft.monitor.event_log import note_event
from weft.monitor.jsonl import last_logged_step, read_tail
from weft.monitor.prometheus import serve_metrics
from weft.monitor.signals import STOP_SIGNALS, any_rank_received, listen, request_stop
from weft.monitor.spot_notice import watch_spot_notices
from weft.monitor.terminal import quiet_console
from weft.monitor.webhook import post_events, read_webhook_url
from weft.planning.plan import Plan
from weft.preparation.environment import is_agent_rank
from weft.preparation.job_checks import plan_with_data
from weft.preparation.run_data import hydrate_start, load_dataset, load_dataset_on_host
from weft.preparation.run_files import intact_checkpoint_step, write_run_files
from weft.reporting.run_report import report_pages, write_final_report
from weft.reporting.run_summary import print_dataset, print_plan, print_results
from weft.supervision.launcher import Failure, Requeue, launch, report_notice
from weft.supervision.network_watch import name_known_failures, watch_launched_ranks
from weft.supervision.rank_exit import (
    TrainingFailed,
    log_path,
    redirect_output,
    write_error,
    write_torchrun_error,
)
from weft.supervision.requeue import record_final_failure, record_start
from weft.supervision.watchdog import start_watchdog
from weft.training.early_stopping import read_early_stop
from weft.training.machine import detect_machine
from weft.training.state import checkpoint_dir

stop_requested = threading.Event()  # by a signal that arrived before the ranks started


class UnhealthyNode(Exception):
    """This node cannot continue to train; the preflight check has printed the reason."""


@contextmanager
def handle_stop_errors() -> Iterator[None]:
    """End the process if an exception arrives after a stop signal.

    A library may replace the SystemExit of the handler: pydantic turns it into a SchemaError.
    """
    try:
        yield
    except Exception:
        end_if_stopped()
        raise


@handle_stop_errors()
def start_training(base: Job, plan: Plan, recipe: str, console: Console, force: bool) -> int:
    """Prepare the data, train on this node's ranks, and print the results.

    Each node serves metrics at ``monitor.prometheus``; the node that logs also posts the events to
    ``monitor.webhook``.

    Args:
        base: the recipe without overrides, for the differences in ``job.toml``.
        plan: the plan of the run, for all nodes.
        recipe: name or path of the recipe.
        console: receives messages for the user.
        force: start even if the predicted memory, or the tokenizer of model.path, does not fit.

    Returns:
        The exit status, if the run ended without a failure.

    Raises:
        TrainingFailed: if a rank failed or hung.
    """
    url = ""
    with suppress(InvalidConfig):  # `check_start` reports it
        url = "" if console.quiet else read_webhook_url(plan.job.monitor.webhook, os.environ)
    address, has_run = plan.job.monitor.prometheus, not console.quiet
    log = quiet_console(sys.stdout).print  # every node prints its own
    with (
        serve_metrics(address, plan.run_path, has_run, log),
        post_events(url, plan.run_path, console.print),
    ):
        return train_node(base, plan, recipe, console, force)


def train_node(base: Job, plan: Plan, recipe: str, console: Console, force: bool) -> int:
    """Do what `start_training` does, but post no events."""
    job, run_dir = plan.job, plan.run_path
    stop_requested.clear()
    for number in STOP_SIGNALS:  # until there are ranks that can save
        signal.signal(number, handle_stop_signal)

    def is_healthy() -> bool:
        # Every node prints its own findings.
        return preflight(job, run_dir, quiet_console(sys.stdout).print)

    def on_restart(failure: Failure) -> None:
        print_restart(failure, home, run_dir)
        if job.resilience.preflight and not is_healthy():
            raise UnhealthyNode  # the node may have caused the failure

    if job.resilience.preflight and not is_healthy():
        return UNHEALTHY
    hydrate_start(plan, console)
    prediction, warning, source = check_start(plan, force)
    dataset = load_dataset(plan, console)
    plan = plan_with_data(plan, dataset)
    lock = lock_directory(run_dir, run_dir_in_use(run_dir), shared=plan.node_counts[-1] > 1)
    error: TrainingFailed | None = None
    with lock, report_pages(plan, console):
        print_plan(plan, recipe, console, prediction, warning)
        print_dataset(plan, dataset, console)
        home = checkpoint_dir(job.checkpoint, run_dir)
        create_checkpoint_dir(home, console.print)
        plan = import_source(plan, source, console)
        job = plan.job
        changes = write_run_files(plan, base, recipe, dataset, prediction)
        newest = list_checkpoints(home)[-1:]
        step = intact_checkpoint_step(newest)
        record_start(run_dir, step)
        if elsewhere := read_place(run_dir, home, step):
            console.print(f"warning: the last start could not save in {home}. {elsewhere}")
        early_stop = read_early_stop(home, job)
        is_complete = step >= plan.num_steps or early_stop
        if not is_complete or lacks_evaluation(run_dir, step):
            if newest:
                resuming = f"resuming from {newest[0]}{changes}"
                console.print(resuming if step else f"starting from {newest[0]}")
            end_if_stopped()
            try:
                failure = launch(plan, dataset.path, console.print, on_restart)
            except UnhealthyNode:
                return UNHEALTHY
            except Requeue as reason:
                console.print(f"{reason}; {resume_hint(home, run_dir)}")
                console.print(resume_command())
                return REQUEUE
            except KeyboardInterrupt:
                note_event(run_dir, "stop", last_logged_step(run_dir), "interrupted")
                print(f"\ninterrupted; {resume_hint(home, run_dir)}", file=sys.stderr)
                print(resume_command(), file=sys.stderr)
                return INTERRUPTED
            finally:
                console.show_cursor(True)  # a killed progress line leaves it hidden
            if failure is not None:
                error = explain_failure(failure, home, run_dir)
        else:
            message = f"{run_dir} is complete at step {step}"
            remedy = "raise train.steps or train.epochs"
            if step < plan.num_steps:
                message += f": stopped early: {early_stop}"
                remedy = "raise train.early_stopping, or set it to 0"
            console.print(f"{message}: nothing to do; to train longer, {remedy}")
        if error is None:
            print_results(plan, recipe, dataset, console)
    if error is not None:
        raise error  # after the report, which shows it
    return 0


def check_start(
    plan: Plan, force: bool, download: bool = True
) -> tuple[RunPrediction | None, str, ModelSource | None]:
    """Make the checks of a start that need no tokens; write nothing.

    Args:
        plan: the plan of the run.
        force: see `start_training`.
        download: also open a model of the Hub, whose weights this downloads.

    Returns:
        The predicted memory and time, a warning or "", and the model to import.

    Raises:
        InvalidConfig: with every reason why the run cannot start.
    """
    errors, path = ConfigErrors(plan.job), plan.job.model.path
    prediction, warning, source = None, "", None
    with errors.collect():
        prediction, warning = predict_run(plan, detect_machine(plan.job.run), force)
    with errors.collect():
        read_webhook_url(plan.job.monitor.webhook, os.environ)
    with errors.collect():
        if download or not path or expand_path(path).is_dir():
            source = open_source(plan, force)
    errors.raise_any()
    return prediction, warning, source


def handle_stop_signal(number: int, frame: object) -> NoReturn:
    """Handle a stop signal while no ranks are running: end with status 75."""
    # Not print: the signal may have interrupted a call of print.
    os.write(2, b"\nstopped before the first step; run the same command to start again\n")
    stop_requested.set()
    sys.exit(REQUEUE)


def end_if_stopped() -> None:
    """End the process if it has received a stop signal.

    Python ignores an exception in a finalizer, and a signal may arrive in one.
    """
    if stop_requested.is_set():
        sys.exit(REQUEUE)


def resume_command() -> str:
    """Return the current command as the user typed it, indented."""
    words = shlex.join(["weft", *sys.argv[1:]])
    return f"  {words}" if words.isprintable() else "  weft train ..."


def train_rank(base: Job, plan: Plan, recipe: str, force: bool) -> int:
    """Train as one rank that an external launcher started; return the exit status.

    From then on the output of this process goes to the rank's log.

    The elastic agent of HyperPod ends the ranks by SIGUSR1 before it starts them on another number
    of nodes.  They save then, and end with status 0, because any other status is a fault for it.
    It reads the output of the first rank of each node, so that each of them prints the steps.

    The arguments are those of `start_training`.

    Raises:
        Exception: of any type, after its report for the launcher is written.
    """
    # A launcher, which does not train, imports neither.
    from weft.inference.eval_text import prompt_generator
    from weft.training.loop import train
    from weft.training.setup import connect

    job = plan.job
    run_dir = plan.run_path
    rank = int(os.environ["RANK"])
    listen()
    terminal = redirect_output(run_dir, rank)
    console = quiet_console(terminal, quiet=rank != 0)
    is_leader = os.environ.get("LOCAL_RANK", "0") == "0"  # of this node
    has_agent = is_agent_rank(os.environ)
    shows_steps = rank == 0 or (has_agent and is_leader)
    log = partial(print, file=terminal)
    if job.resilience.preflight and is_leader and not preflight(job, run_dir, log):
        reason = f"this node is unhealthy and does not train; see {run_dir / 'logs'}"
        write_torchrun_error(os.environ.get("TORCHELASTIC_ERROR_FILE"), reason, reason)
        terminal.flush()
        return UNHEALTHY
    try:
        with ExitStack() as stack:
            if is_leader:
                address, has_run = job.monitor.prometheus, rank == 0
                stack.enter_context(serve_metrics(address, run_dir, has_run, log))
            if rank == 0:
                url = read_webhook_url(job.monitor.webhook, os.environ)
                stack.enter_context(post_events(url, run_dir, log))
            if rank == 0:  # before the process group exists, because tracing creates another one
                prediction, warning = predict_run(plan, detect_machine(job.run), force)
            stack.enter_context(watch_launched_ranks(run_dir, plan.device, console.print, log))
            ranks = stack.enter_context(connect(plan, job.debug.deterministic))
            # Preparation and import may take long.
            group = dist.new_group(backend="gloo", timeout=timedelta(days=7))
            hydrate_start(plan, console)
            dataset = load_dataset_on_host(plan, console, ranks, group)
            if rank == 0:
                create_checkpoint_dir(checkpoint_dir(job.checkpoint, run_dir), console.print)
            plan = import_on_rank_0(plan_with_data(plan, dataset), console, group, force)
            if rank == 0:
                stack.enter_context(lock_directory(run_dir, run_dir_in_use(run_dir)))
                print_plan(plan, recipe, console, prediction, warning)
                print_dataset(plan, dataset, console)
                write_run_files(plan, base, recipe, dataset, prediction)
            dist.barrier()
            start_watchdog(job, run_dir, ranks)
            if is_leader:
                report = partial(report_notice, run_dir, log)
                setting = job.resilience.spot_notice
                stack.enter_context(watch_spot_notices(setting, report, request_stop))
            progress = quiet_console(terminal, quiet=not shows_steps)
            is_complete = train(plan, dataset, ranks, progress, prompt_generator(plan))
            is_rescaled = (
                not is_complete and has_agent and any_rank_received(signal.SIGUSR1)  # collective
            )
            dist.barrier()  # a launcher kills all ranks as soon as one exits early
            if rank == 0 and not is_complete:
                hint = resume_hint(checkpoint_dir(job.checkpoint, run_dir), run_dir)
                console.print(f"stopped; {hint}")
            elif rank == 0:
                print_results(plan, recipe, dataset, console)
            if rank == 0 and job.monitor.report:
                write_final_report(plan, console)
            if not (is_complete or is_rescaled):
                reason = "saved a checkpoint and stopped; run the same command to resume"
                write_torchrun_error(os.environ.get("TORCHELASTIC_ERROR_FILE"), reason, reason)
    except BaseException as error:
        write_error(run_dir, rank, error, terminal)
        if rank == 0 or not isinstance(error, InvalidConfig):  # every rank has the same ones
            kind = type(error).__name__
            print(f"weft: rank {rank} failed: {kind}: {error}", file=terminal)
            print(f"  log: {log_path(run_dir, rank)}", file=terminal, flush=True)
        raise
    return 0 if is_complete or is_rescaled else REQUEUE


# --------------------------------------------------------------------------- failures


def lacks_evaluation(run_dir: Path, step: int) -> bool:
    """Return True if a stop skipped an evaluation after ``step``, the newest of a run."""
    last = read_tail(run_dir / "metrics.jsonl").last or {}
    return last.get("step") == step and last.get("eval_skipped") is True


def print_restart(failure: Failure, home: Path, run_dir: Path) -> None:
    """Print and record the root cause of a failure after which the ranks restart."""
    print(f"weft: {describe_failure(failure)}", file=sys.stderr)
    note_event(run_dir, "restart", last_logged_step(run_dir), describe_failure(failure))
    newest = list_checkpoints(home)[-1:]
    origin = f"from {newest[0]}" if newest else "from the beginning: there is no checkpoint yet"
    lines = [*name_known_failures(failure.log, failure.message), f"log: {failure.log}"]
    print("".join(f"  {x}\n" for x in (*lines, f"restarting {origin}")), end="", file=sys.stderr)


def describe_failure(failure: Failure) -> str:
    """Describe a failure in one line: the rank and the error."""
    if failure.kind == "Hang":
        return f"the run hangs: {failure.message}"
    return f"rank {failure.rank} failed: {failure.kind}: {failure.message}"


def explain_failure(failure: Failure, home: Path, run_dir: Path) -> TrainingFailed:
    """Record the root cause; return the error with the log and how to resume."""
    message = describe_failure(failure)
    is_hang = failure.kind == "Hang"
    note_event(run_dir, "hang" if is_hang else "failure", last_logged_step(run_dir), message)
    if not failure.transient:
        record_final_failure(run_dir, message)
    if failure.kind == "InvalidConfig":
        return TrainingFailed(message, USAGE_ERROR, failure.log)
    lines = [message]
    if failure.traceback and not failure.is_expected:
        lines += [f"  | {line}" for line in failure.traceback.rstrip().splitlines()[-12:]]
    lines += [f"  {line}" for line in name_known_failures(failure.log, message)]
    lines.append(f"  log: {failure.log}")
    if failure.no_retry_reason:
        lines.append(f"  not restarted: {failure.no_retry_reason}")
    if not failure.is_expected or failure.kind != "CheckpointError":  # its message has the remedy
        lines.append(f"  {resume_hint(home, run_dir)}")
    return TrainingFailed("\n".join(lines), HUNG if is_hang else FAILED, failure.log)


def resume_hint(home: Path, run_dir: Path) -> str:
    """Return the instruction to resume from the newest checkpoint, or to start again."""
    checkpoints = list_checkpoints(home)
    if elsewhere := read_place(run_dir, home, intact_checkpoint_step(checkpoints[-1:])):
        return elsewhere
    if checkpoints:
        return f"run the same command to resume from {checkpoints[-1]}"
    return "no step was complete, so there is no checkpoint: run the same command to start again"
