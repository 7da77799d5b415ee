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
from math import nan
from pathlib import Path
from typing import NoReturn

import numpy as np
import torch.distributed as dist
from rich.console import Console

from weft.checkpoint.best import find_best, get_best_metric, select_checkpoint
from weft.checkpoint.final_save import read_place
from weft.checkpoint.manifest import checkpoint_step, list_checkpoints
from weft.checkpoint.owner import owner_errors
from weft.checkpoint.rollback import drop_later_checkpoints
from weft.cluster import FAILED, HUNG, INTERRUPTED, REQUEUE, UNHEALTHY, USAGE_ERROR
from weft.cluster.doctor import preflight
from weft.cluster.launcher import Failure, Requeue, launch, report_notice
from weft.cluster.lustre import create_checkpoint_dir
from weft.cluster.network_watch import name_accidents, watch_launched_ranks
from weft.cluster.rank_exit import (
    TrainingFailed,
    log_path,
    redirect_output,
    write_error,
    write_torchrun_error,
)
from weft.cluster.requeue import record_final_failure, record_start
from weft.cluster.run_data import hydrate_start, load_dataset, load_dataset_on_host
from weft.cluster.run_files import intact_checkpoint_step, write_run_files
from weft.cluster.watchdog import start_watchdog
from weft.config.accelerators import GPU
from weft.config.errors import ConfigError, ConfigErrors, InvalidConfig
from weft.config.files import expand_path, replace_bytes
from weft.config.formatting import display_path, format_count
from weft.config.locks import lock_directory
from weft.config.reader import recipe_names
from weft.config.schema import Job
from weft.data.dataset import Dataset
from weft.data.inspect import describe_packing
from weft.data.loader import build_mixture
from weft.data.source import STDLIB, STORIES
from weft.data.tokenizer import has_excess_padding
from weft.estimate.memory_check import RunPrediction, predict_run
from weft.monitor.anomaly import divergence_of
from weft.monitor.event_log import note_event
from weft.monitor.jsonl import last_logged_step, read_tail
from weft.monitor.prometheus import serve_metrics
from weft.monitor.run_reader import RunReader, read_run_job
from weft.monitor.signals import STOP_SIGNALS, any_rank_received, listen, request_stop
from weft.monitor.spot_notice import watch_spot_notices
from weft.monitor.step_timer import goodput
from weft.monitor.terminal import format_duration, quiet_console
from weft.monitor.webhook import post_events, read_webhook_url
from weft.plan.placement import AXES
from weft.plan.plan import Plan
from weft.plan.plan_text import describe_float8, format_stages, run_title
from weft.tools.hf_import import ModelSource
from weft.tools.model_import import import_on_rank_0, import_source, open_source
from weft.tools.report.page import REPORT_FILE
from weft.tools.report.run_report import (
    PREDICTION_NOTE,
    LiveReport,
    report_page,
    unwritten_message,
)
from weft.train.early_stopping import read_early_stop
from weft.train.environment import is_agent_rank
from weft.train.job_checks import plan_with_data
from weft.train.machine import detect_machine
from weft.train.run_dir import count_epochs, epoch_warnings
from weft.train.state import checkpoint_dir
from weft.version import __version__

# The final report traces the pipeline stages, about one second each.  It does so only after runs of
# at least this many seconds, with at most this many stages.
MIN_FORECAST_SECONDS, MAX_TRACED_STAGES = 60.0, 4
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
    handle_stop_signals()  # until there are ranks that can save

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


def handle_stop_signals() -> None:
    """Handle all stop signals with `handle_stop_signal`."""
    stop_requested.clear()
    for number in STOP_SIGNALS:
        signal.signal(number, handle_stop_signal)


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


@contextmanager
def report_pages(plan: Plan, console: Console) -> Iterator[None]:
    """Keep the report page up to date while ranks train, and write the final one."""
    if not plan.job.monitor.report or console.quiet:  # only the node that logs writes it
        yield
        return
    with LiveReport(plan.run_path, console.print) as live:
        yield
    write_final_report(plan, console, has_warned=live.has_warned)


def write_final_report(plan: Plan, console: Console, has_warned: bool = False) -> None:
    """Write the report page after the ranks have ended, however they ended.

    The page includes the planner's predictions if they are cheap compared with the run.

    Args:
        plan: the plan of the run.
        console: receives the path of the page, or a warning.
        has_warned: True if a warning that the page cannot be written has been printed.
    """
    run_dir = plan.run_path
    if not (run_dir / "metrics.jsonl").exists():
        return
    try:
        run = RunReader(run_dir)
        short = sum(run.time_breakdown().values()) < MIN_FORECAST_SECONDS
        appendix = [PREDICTION_NOTE]
        if not short and plan.pp <= MAX_TRACED_STAGES:
            from weft.tools.report.report_sections import prediction_sections

            appendix = prediction_sections([run])
        replace_bytes(run_dir / REPORT_FILE, report_page([run], appendix=appendix, running=False))
    except Exception as error:  # a missing page must not fail the run
        if not has_warned:
            console.print(unwritten_message(run_dir, error))
    else:
        console.print(f"report: {display_path(run_dir / REPORT_FILE)}")


def run_dir_in_use(run_dir: Path) -> ConfigError:
    """Return the error for a second process that would train in a run directory."""
    rule = "is in use by another training process"
    return ConfigError("run.dir", str(run_dir), rule, "wait for it, or use another --run.dir")


def rollback(run_dir: Path, step: int | str) -> str:
    """Make a run resume from an earlier step, or its best one; return a message.

    Raises:
        InvalidConfig: if it is not a run, has no such checkpoint, is being trained, or has its
            checkpoints in the directory of another run.
    """
    job = read_run_job(run_dir)
    home = checkpoint_dir(job.checkpoint, run_dir)
    if errors := owner_errors(home, run_dir):
        raise InvalidConfig(errors)
    with lock_directory(run_dir, run_dir_in_use(run_dir)):
        if isinstance(step, str):
            best = select_checkpoint(list_checkpoints(home), step, job.checkpoint)
            step = checkpoint_step(best)
        dropped = drop_later_checkpoints(home, step)
    newest = list_checkpoints(home)[-1:]
    target = f"to resume from {newest[0]}" if newest else "to start from step 1"
    command = f"weft train {shlex.quote(display_path(run_dir))}"
    return f"dropped the checkpoints of steps {dropped}; run {command} {target}"


def train_rank(base: Job, plan: Plan, recipe: str, force: bool) -> int:
    """Train as one rank that an external launcher started; return the exit status.

    From then on the output of this process goes to the rank's log.

    The elastic agent of HyperPod ends the ranks by SIGUSR1 before it starts them on another number
    of nodes.  They save then, and end with status 0, because any other status is a fault for it.
    It reads the output of the first rank of each node, so that each of them prints the steps.

    Args:
        base: see `start_training`.
        plan: see `start_training`.
        recipe: see `start_training`.
        force: start even if the predicted memory, or the tokenizer of model.path, does not fit.

    Raises:
        Exception: of any type, after its report for the launcher is written.
    """
    # A launcher, which does not train, imports neither.
    from weft.tools.eval_text import prompt_generator
    from weft.train.loop import train
    from weft.train.setup import connect

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


# --------------------------------------------------------------------------- printed output


def print_plan(
    plan: Plan, recipe: str, console: Console, prediction: RunPrediction | None, warning: str
) -> None:
    """Print the plan of a run: a summary line, its pipeline stages, and warnings."""
    device = {"cpu": "CPU", GPU: "GPU"}.get(plan.device, plan.device)
    counts = plan.node_counts
    layout = [f"{axis} {size}" for axis in (*AXES, "ep") if (size := getattr(plan, axis)) > 1]
    has_frozen = plan.num_trainable_params < plan.num_params
    console.print(
        f"weft {__version__}  {run_title(plan, recipe)}: "
        f"{format_count(plan.num_params)} parameters, "
        f"{f'{format_count(plan.num_trainable_params)} of them trained, ' if has_frozen else ''}"
        f"{plan.world_size} {device} rank{'s' * (plan.world_size > 1)}"
        f"{f' on {counts[0]} to {counts[-1]} nodes' if len(counts) > 1 else ''}"
        f"{' (' + ', '.join(layout) + ')' if layout else ''}, "
        f"{plan.tokens_per_step:,} tokens per step, {plan.compute_dtype}"
        f"{f' and float8 ({describe_float8(plan)})' if plan.float8 != 'none' else ''}"
    )
    if plan.peak_flops is not None:
        peak = f"{plan.peak_flops / 1e12:,.0f} TFLOP/s, the device's dense {plan.peak_dtype} peak"
        console.print(f"MFU is relative to {peak}")
    if plan.pipeline is not None:
        console.print("\n".join(format_stages(plan)))
    if prediction is not None:
        console.print(f"predicted: {prediction}")
    for text in filter(None, (*plan.warnings, warning)):
        console.print(f"warning: {text}")


def print_dataset(plan: Plan, dataset: Dataset, console: Console) -> None:
    """Print the data sources with their epochs and packing, and warnings."""
    job = plan.job
    entries = dataset.vocab_size
    # A tokenizer that weft trains has fewer entries than it may have if the text has few words.
    if not job.data.trains_tokenizer and has_excess_padding(entries, plan.model.vocab_size):
        fraction = f"{entries:,} of the model's {plan.model.vocab_size:,} vocabulary entries"
        rest = "the other entries are never trained"
        console.print(f"warning: the tokenizer uses {fraction}; {rest}")
    scores = plan.has_score_head
    samples = build_mixture(dataset, "train", plan.seq_len, job.data, plan.seed, scores)
    usage = count_epochs(plan, dataset, samples)
    for store in dataset.stores:
        for note in store.manifest.notes:
            console.print(f"warning: {Path(store.manifest.source).name}: {note}")
    for note in dataset.notes:
        console.print(f"warning: {note}")
    for source, (name, count, epochs) in zip(dataset.sources, usage, strict=True):
        manifest = source.store.manifest
        line = f"{name}: {manifest.train.tokens:,} tokens, {count:,} sequences of "
        line += f"{plan.seq_len:,}, {epochs:,.1f} epochs in {plan.num_steps:,} steps"
        share = f"  {source.share:6.1%}  " if dataset.shares else ""
        console.print(f"{share}{line}")
        if manifest.kind != "text" or job.data.packing == "best_fit":
            line = describe_packing(source.store, plan.seq_len, job.data, plan.seed, scores)
            console.print(f"{Path(manifest.source).name}: {line}")
    if not job.data.has_validation or not dataset.has_validation:
        reason = (
            "the prepared data have none"
            if job.data.has_validation
            else "data.validation_fraction=0"
        )
        console.print(f"no validation set ({reason}): nothing is evaluated")
    elif dataset.validation is not None:
        validation = build_mixture(dataset, "validation", plan.seq_len, job.data, plan.seed, scores)
        manifest = dataset.validation.store.manifest
        line = f"{manifest.train.tokens:,} tokens, {len(validation.sources[0]):,} sequences"
        console.print(f"validation set {Path(manifest.source).name}: {line}")
    for warning in epoch_warnings(plan, dataset, samples):
        console.print(f"warning: {warning}")


def print_results(plan: Plan, recipe: str, dataset: Dataset, console: Console) -> None:
    """Print losses, speed and memory of a finished run, and the next commands."""
    job, run_dir = plan.job, plan.run_path
    run = RunReader(run_dir)
    if not len(run):
        return  # the records have been removed
    # A skipped step has no loss.
    losses = run.column("loss")[np.isfinite(run.column("loss"))]
    newest = losses[-20:] if len(losses) else np.array([nan])
    is_next_token = plan.objective == "next_token"
    num_steps = int(run.last("step") or 0)
    home = checkpoint_dir(job.checkpoint, run_dir)
    if not read_early_stop(home, job):
        num_steps = max(plan.num_steps, num_steps)  # complete before this start
    unit = "in nats per token" if is_next_token else f"of {plan.objective}"
    lines = [
        f"\ntrained {num_steps} steps, {run.last('tokens') or 0:,.0f} tokens, in "
        f"{format_duration(float(np.ptp(run.column('time'))))}; losses {unit}:",
        f"  train      {newest.mean():.3f}   mean of the last {len(newest)} records",
    ]
    if (step := run.last("step") or 0) < num_steps:
        lines.insert(1, f"metrics.jsonl ends at step {step:.0f}, so these numbers end there:")
    if (eval_loss := run.last("eval_loss")) is not None:
        lines.append(f"  validation {eval_loss:.3f}   on the validation set")
    if job.checkpoint.best != "off":
        metric = get_best_metric(job.checkpoint)
        if (best := find_best(list_checkpoints(home), metric)) is not None:
            note = f"best {metric.name}, of step {checkpoint_step(best[0])} (--step best)"
            lines.append(f"  best       {best[1]:.3f}   {note}")
    if is_next_token:
        note = "baseline: loss of predicting tokens by their frequency"
        lines.append(f"  unigram    {dataset.unigram_entropy_nats:.3f}   {note}")
    last = read_tail(run_dir / "metrics.jsonl").last
    if diverged := divergence_of(last, plan.objective, plan.model.vocab_size):
        lines.append(str(diverged))
    if run.last("time_breakdown.restarting"):  # the run was started more than once
        kinds = run.time_breakdown()
        longest = ", ".join(f"{kind} {format_duration(s)}" for kind, s in kinds.items() if s >= 1)
        lines.append(f"goodput {goodput(kinds):.1%} over all starts: {longest}")
    if (memory := run.last("predicted_memory_gib")) is not None:
        median = float(np.nanmedian(run.column("step_seconds")[int(len(run) > 1) :]))
        line = f"memory {run.last('memory_peak_gib') or nan:.1f} GiB"
        line += f" (predicted {memory:.1f}), {median:.3g} s per step"
        if (seconds := run.last("predicted_step_seconds")) is not None:
            line += f" (predicted {seconds:.3g})"
        lines.append(line)
    run_argument = shlex.quote(display_path(run_dir))
    lines.append(f"run directory: {display_path(run_dir)}")
    next_command = "evaluate" if plan.has_score_head else "chat"
    lines.append(f"next:  weft {next_command} {run_argument}")
    own_text = " --data.path FILE_OR_DIRECTORY"
    if job.data.path in (STORIES, STDLIB) and not job.data.is_mixture:
        name = recipe if recipe in recipe_names() else "demo"
        lines.append(f"       weft train {name}{own_text}   # your own text")
    elif is_next_token:
        has_validation = dataset.has_validation and job.data.has_validation
        lines.append(f"       weft evaluate {run_argument}{'' if has_validation else own_text}")
    lines.append(f"       weft report {run_argument} --serve                     # in a browser")
    console.print("\n".join(lines))


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
    lines = [*name_accidents(failure.log, failure.message), f"log: {failure.log}"]
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
    lines += [f"  {line}" for line in name_accidents(failure.log, message)]
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
