"""What ``weft train`` does around the ranks: prepare, run, and tell how it went."""

from __future__ import annotations

import os
import shlex
import signal
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from functools import partial
from math import nan
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch.distributed as dist
from rich.console import Console

import weft
from weft.checkpoint.manager import give_up
from weft.checkpoint.manifest import (
    CheckpointError,
    checkpoint_step,
    checkpoints,
    read_manifest,
    take,
)
from weft.cluster import FAILED, HUNG, INTERRUPTED, MISTAKE, REQUEUE, SICK
from weft.cluster.doctor import preflight
from weft.cluster.launcher import Failure, Requeue, launch
from weft.cluster.preparing import cache_folder, showing
from weft.cluster.rank_exit import leave, log_path, redirect, tell_torchrun, write_error
from weft.cluster.watchdog import watch
from weft.config.errors import ConfigError, InvalidConfig
from weft.config.files import replace_bytes, replace_text
from weft.config.reader import read_job
from weft.config.schema import Job, difference, to_toml
from weft.data.dataset import Dataset, open_text
from weft.data.document_tokens import IMPORTED, RECORD, record_of
from weft.data.loader import samples_of
from weft.data.packing import packing_line
from weft.data.prepare import prepare_text
from weft.data.source import STDLIB
from weft.data.token_store import TEMPLATE_FILE, TOKENS_FILE
from weft.data.tokenizer import padded_beyond
from weft.estimate.memory_check import Expected, expect, note
from weft.estimate.report_sections import sections
from weft.models import spelled_out
from weft.monitor.anomaly import divergence_of
from weft.monitor.event_log import note_event
from weft.monitor.goodput import goodput
from weft.monitor.jsonl import read_tail
from weft.monitor.run_reader import RunReader, job_of
from weft.monitor.run_report import FILE, LATER, report_page
from weft.monitor.signals import STOP_SIGNALS, listen
from weft.monitor.terminal import duration, quiet_console, shown
from weft.plan.placement import AXES
from weft.plan.plan_text import describe_float8, format_stages
from weft.plan.resolve import Plan
from weft.train.epochs import epoch_warnings, epochs_of
from weft.train.job_checks import check_text
from weft.train.loop import train
from weft.train.run_dir import owning, unwritable
from weft.train.setup import Rank, connect, detect_machine
from weft.train.state import checkpoint_dir

# Seconds of a run after which its end may take some more, and the ranks of a pipeline, each of
# which takes about one, that are traced then.
WORTH_A_FORECAST, MOST_TRACED = 60.0, 4


class UnhealthyNode(Exception):
    """This node cannot go on training; what is wrong has been said."""


def start(job: Job, base: Job, plan: Plan, recipe: str, console: Console, force: bool) -> int:
    """Prepare the text, start this host's ranks, and report; returns the exit status.

    Args:
        force: although the run will not fit in memory.
    """
    folder = Path(plan.run_dir)
    for number in STOP_SIGNALS:  # until there are ranks that can save
        signal.signal(number, stop_now)

    def say(text: str) -> None:
        console.print(text, soft_wrap=True)

    def fit() -> bool:
        aloud = quiet_console(sys.stdout)  # each node for itself
        return preflight(job, folder, partial(aloud.print, soft_wrap=True))

    def tell(failure: Failure) -> None:
        show_restart(failure, home, folder)
        if job.resilience.preflight and not fit():
            raise UnhealthyNode  # what failed may be the node

    if job.resilience.preflight and not fit():
        return SICK
    expected, doubt = expect(job, plan, detect_machine(job.run.device), force)
    text = prepared(job, plan, console)
    owned = owning(folder, training_in(folder), shared=plan.node_counts[-1] > 1)
    with owned, reporting(folder, job, plan, console):
        describe(plan, recipe, console, expected, doubt)
        describe_text(job, plan, text, console)
        changes = changes_since(folder, job)
        open_run(folder, job, base, recipe, text, expected)
        home = checkpoint_dir(job.checkpoint.dir, folder)
        done = checkpoints(home)[-1:]
        step = last_intact_step(done)
        if step < job.train.steps:
            if done:
                console.print(f"going on from {done[0]}{changes}", soft_wrap=True)
            try:
                failure = launch(job, plan, text.path, say, tell)
            except UnhealthyNode:
                return SICK
            except Requeue as reason:
                console.print(f"{reason}; {resume_hint(checkpoints(home))}", soft_wrap=True)
                console.print(resume_command(), soft_wrap=True, markup=False, highlight=False)
                return REQUEUE
            except KeyboardInterrupt:
                note_event(folder, "stop", last_step(folder), "interrupted")
                print(f"\ninterrupted; {resume_hint(checkpoints(home))}", file=sys.stderr)
                print(resume_command(), file=sys.stderr)
                return INTERRUPTED
            finally:
                console.show_cursor(True)  # a killed progress line leaves it hidden
            if failure is not None:
                return show_failure(failure, home, folder)
        else:
            said = f"{folder} is complete at step {step}: nothing to do"
            console.print(f"{said}; for more, raise --train.steps", soft_wrap=True)
        show_end(folder, recipe, job, plan, text, console)
    return 0


def stop_now(number: int, frame: object) -> NoReturn:
    """Handle a stop signal while there are no ranks that could save: end with status 75."""
    # Not print: the signal may have come in the middle of one.
    os.write(2, b"\nstopped; no step was under way, the same command starts again\n")
    sys.exit(REQUEUE)


def resume_command() -> str:
    """Return the command that is running, as it is typed, indented."""
    words = shlex.join(["weft", *sys.argv[1:]])
    return f"  {words}" if words.isprintable() else "  weft train ..."


@contextmanager
def reporting(folder: Path, job: Job, plan: Plan, console: Console) -> Iterator[None]:
    """However its ranks have ended, the page is whole: with what the planner says, if that takes a
    few seconds only and the run was long enough for somebody to wait for them."""
    yield
    if not job.monitor.report or not (folder / FILE).exists():
        return  # why there is none, the first rank has said
    try:
        run = RunReader(folder)
        short = sum(run.seconds().values()) < WORTH_A_FORECAST
        later = [LATER] if short or plan.pp > MOST_TRACED else sections([run])
        replace_bytes(folder / FILE, report_page([run], later=later, running=False))
    except Exception as error:  # a page is no reason for a run to have failed
        console.print(f"no new {FILE}: {type(error).__name__}: {error}", soft_wrap=True)
    else:
        console.print(f"report: {shown(folder / FILE)}", soft_wrap=True)


def training_in(folder: Path) -> ConfigError:
    """What to say to a second process that would train in a run's folder."""
    rule = "another process is training in this folder"
    return ConfigError("run.dir", str(folder), rule, "wait for it, or use another --run.dir")


def rollback(folder: Path, step: int) -> str:
    """Let the run in ``folder`` go on from an earlier step; what is to be said of it.

    Raises:
        InvalidConfig: if it is no run, has no such checkpoint, or is being trained.
    """
    job = job_of(folder)
    home = checkpoint_dir(job.checkpoint.dir, folder)
    with owning(folder, training_in(folder)):
        there = [checkpoint_step(path) for path in checkpoints(home)]
        if step not in [0, *there]:
            rule = "no checkpoint of that step counts"
            raise InvalidConfig([ConfigError("step", step, rule, f"use one of {[0, *there]}")])
        give_up(home, step)
        take(home, step)
    return f"{resume_hint(checkpoints(home))}; no longer: {[s for s in there if s > step]}"


def join(job: Job, base: Job, plan: Plan, recipe: str, force: bool) -> NoReturn:
    """Be one rank under a launcher that is already there, and end the process.

    Args:
        force: although the run will not fit in memory.
    """
    folder = Path(plan.run_dir)
    rank = int(os.environ["RANK"])
    listen()
    terminal = redirect(folder, rank)
    console = quiet_console(terminal, quiet=rank != 0)
    first = os.environ.get("LOCAL_RANK", "0") == "0"
    if (
        job.resilience.preflight
        and first
        and not preflight(job, folder, partial(print, file=terminal))
    ):
        why = f"this node is not fit to train: see {folder / 'logs'}"
        tell_torchrun(os.environ.get("TORCHELASTIC_ERROR_FILE"), why, why)
        terminal.flush()
        leave(SICK)
    try:
        with ExitStack() as stack:
            if rank == 0:  # before there is a process group, for tracing makes another one
                expected, doubt = expect(job, plan, detect_machine(job.run.device), force)
            ranks = stack.enter_context(connect(plan, job.debug.deterministic))
            text = prepared_on_this_host(job, plan, console, ranks)
            if rank == 0:
                stack.enter_context(owning(folder, training_in(folder)))
                describe(plan, recipe, console, expected, doubt)
                describe_text(job, plan, text, console)
                open_run(folder, job, base, recipe, text, expected)
            dist.barrier()
            watch(job, folder, ranks)
            whole = train(job, plan, text, ranks, console)
            dist.barrier()  # a launcher kills the others as soon as one leaves before the end
            if rank == 0 and not whole:
                newest = resume_hint(checkpoints(checkpoint_dir(job.checkpoint.dir, folder)))
                console.print(f"stopped and saved; {newest}", soft_wrap=True)
            elif rank == 0:
                show_end(folder, recipe, job, plan, text, console)
            if not whole:
                why = "stopped and saved; the same command goes on"
                tell_torchrun(os.environ.get("TORCHELASTIC_ERROR_FILE"), why, why)
    except BaseException as error:
        write_error(folder, rank, error, terminal)
        mistake = isinstance(error, InvalidConfig)
        if rank == 0 or not mistake:  # of a mistake every rank says the same
            kind = type(error).__name__
            print(f"weft: rank {rank} failed: {kind}: {error}", file=terminal)
            print(f"  log: {log_path(folder, rank)}", file=terminal, flush=True)
        leave(MISTAKE if mistake else FAILED)
    leave(0 if whole else REQUEUE)


def prepared_on_this_host(job: Job, plan: Plan, console: Console, rank: Rank) -> Dataset:
    """The text; one rank of each host prepares it while the others wait, however long it takes."""
    patient = dist.new_group(backend="gloo", timeout=timedelta(days=7))
    path, problems = "", []
    if rank.local_rank == 0:
        try:
            path = str(prepared(job, plan, console).path)
        except InvalidConfig as error:
            problems = error.problems
    answers: list[Any] = [None] * rank.world_size
    dist.all_gather_object(answers, (path, problems), group=patient)
    found = [problem for _, problems in answers for problem in problems]
    if found:
        raise InvalidConfig({str(problem): problem for problem in found}.values())
    # A launcher numbers the ranks of one host consecutively.
    return open_text(Path(answers[rank.rank - rank.local_rank][0]))


def prepared(job: Job, plan: Plan, console: Console) -> Dataset:
    """The tokenised text of the job, prepared now if it is not there yet."""
    with showing(console) as show:
        text = prepare_text(job.data, cache_folder(job.data), show)
    check_text(job, plan, text)
    return text


def open_run(
    folder: Path, job: Job, base: Job, recipe: str, text: Dataset, expected: Expected | None
) -> None:
    """Write into the run's folder what makes it stand alone, the job and the tokenizer, and what
    was expected of it."""
    path = folder / "job.toml"
    try:
        # A run that is started from its own job.toml keeps the differences noted there.
        itself = Path(recipe).exists() and path.exists() and path.samefile(recipe)
        if job != base or not itself:
            replace_text(path, to_toml(job, recipe, base))
        tokenizer = (text.path / "tokenizer.json").read_text("utf-8")
        replace_text(folder / "tokenizer.json", tokenizer)
        of_text = any(source.store.manifest.kind == "text" for source in text.sources)
        starts = of_text and not (folder / IMPORTED).is_dir()  # else its own tokenizer decides
        replace_text(folder / RECORD, record_of(text.separator, starts))
        for source in text.sources:
            for name in (TEMPLATE_FILE, TOKENS_FILE):
                if (file := source.store.path / name).is_file():
                    replace_text(folder / name, file.read_text("utf-8"))
        note(expected, folder)
    except OSError as error:
        raise unwritable(folder, error) from error


def changes_since(folder: Path, job: Job) -> str:
    """What this start of a run changes, for people: '; optim.lr 0.003 -> 0.001'."""
    if not (folder / "job.toml").is_file():
        return ""
    old, _, _ = read_job(str(folder / "job.toml"))
    changes = difference(spelled_out(job), spelled_out(old))
    return "".join(f"; {name} {theirs} -> {ours}" for name, (ours, theirs) in changes.items())


# --------------------------------------------------------------------------- what is said


def describe(
    plan: Plan, recipe: str, console: Console, expected: Expected | None, doubt: str
) -> None:
    """What is about to run: a line, the stages of a pipeline, and what to be warned of."""
    device, counts = "GPU" if plan.device == "cuda" else "CPU", plan.node_counts
    layout = [f"{axis} {size}" for axis in (*AXES, "ep") if (size := getattr(plan, axis)) > 1]
    some = plan.trained_params < plan.num_params
    console.print(
        f"weft {weft.__version__}  {Path(recipe).stem}: {scaled(plan.num_params)} parameters, "
        f"{f'{scaled(plan.trained_params)} of them trained, ' if some else ''}"
        f"{plan.world_size} {device} rank{'s' * (plan.world_size > 1)}"
        f"{f' on {counts[0]} to {counts[-1]} nodes' if len(counts) > 1 else ''}"
        f"{' (' + ', '.join(layout) + ')' if layout else ''}, "
        f"{plan.tokens_per_step:,} tokens a step, {plan.compute_dtype}"
        f"{f' and float8 ({describe_float8(plan)})' if plan.float8 != 'none' else ''}",
        soft_wrap=True,
    )
    if plan.peak_flops is not None:
        peak = f"{plan.peak_flops / 1e12:,.0f} TFLOP/s, the device's dense {plan.peak_dtype} peak"
        console.print(f"MFU is relative to {peak}", soft_wrap=True)
    if plan.pipeline is not None:
        console.print("\n".join(format_stages(plan)), soft_wrap=True)
    if expected is not None:
        console.print(f"expected: {expected}", soft_wrap=True)
    for warning in filter(None, (*plan.warnings, doubt)):
        console.print(f"warning: {warning}", soft_wrap=True)


def describe_text(job: Job, plan: Plan, text: Dataset, console: Console) -> None:
    """What of the model's vocabulary is never seen; the sources of a mixture, how often the run
    sees each, and how what is packed fills rows."""
    entries = text.vocab_size
    if padded_beyond(entries, plan.model.vocab_size):
        rule = f"{entries:,} of the model's {plan.model.vocab_size:,} entries"
        line = f"warning: the tokenizer has {rule}: the others are never trained"
        console.print(line, soft_wrap=True)
    samples = samples_of(text, "train", job.train.seq_len, job.data, job.train.seed)
    seen = epochs_of(job, text, samples)
    for source, (name, count, epochs) in zip(text.sources, seen, strict=True):
        manifest = source.store.manifest
        line = f"{name}: {manifest.train.tokens:,} tokens, {count:,} sequences of "
        line += f"{job.train.seq_len:,}, seen {epochs:,.1f} times"
        share = f"  {source.share:6.1%}  " if text.shares else ""
        console.print(f"{share}{line}", soft_wrap=True)
        if manifest.kind != "text" or job.data.packing == "best_fit":
            line = packing_line(source.store, job.train.seq_len, job.data, job.train.seed)
            console.print(f"{Path(manifest.source).name}: {line}", soft_wrap=True)
    for warning in epoch_warnings(job, text, samples):
        console.print(f"warning: {warning}", soft_wrap=True)


def scaled(count: int) -> str:
    """``2_023_488`` -> ``'2.0 M'``."""
    for power, letter in ((12, "T"), (9, "B"), (6, "M"), (3, "K")):
        if count >= 10**power:
            return f"{count / 10**power:.1f} {letter}"
    return str(count)


def show_end(
    folder: Path, recipe: str, job: Job, plan: Plan, text: Dataset, console: Console
) -> None:
    """How the run ended, where it lies, and what to try next."""
    run = RunReader(folder)
    if not len(run):
        return  # somebody has removed them
    # A skipped step has no loss to count.
    losses = run.column("loss")[np.isfinite(run.column("loss"))]
    newest = losses[-20:] if len(losses) else np.array([nan])
    of_tokens = job.train.objective == "next_token"
    unit = "in nats per token" if of_tokens else f"of {job.train.objective}"
    lines = [
        f"\ntrained {job.train.steps} steps, {run.last('tokens') or 0:,.0f} tokens, in "
        f"{duration(float(np.ptp(run.column('time'))))}; losses {unit}:",
        f"  train    {newest.mean():.3f}   mean of the last {len(newest)} records",
    ]
    if (step := run.last("step") or 0) < job.train.steps:
        lines.insert(1, f"metrics.jsonl ends at step {step:.0f}, and so do these numbers:")
    if (held_out := run.last("eval_loss")) is not None:
        lines.append(f"  held out {held_out:.3f}   on text that it was not trained on")
    if of_tokens:
        guess = "what guessing by the tokens' frequencies alone would give"
        lines.append(f"  unigram  {text.unigram_entropy_nats:.3f}   {guess}")
    last = read_tail(folder / "metrics.jsonl").last
    if diverged := divergence_of(last, job.train.objective, plan.model.vocab_size):
        lines.append(str(diverged))
    if run.last("seconds.restarting"):  # it took more than one start
        kinds = run.seconds()
        longest = ", ".join(f"{kind} {duration(s)}" for kind, s in kinds.items() if s >= 1)
        lines.append(f"goodput {goodput(kinds):.1%} of all its starts: {longest}")
    if (memory := run.last("predicted_memory_gib")) is not None:
        usual = float(np.nanmedian(run.column("step_seconds")[int(len(run) > 1) :]))
        beside = f"memory {run.last('memory_peak_gib') or nan:.1f} GiB"
        beside += f" (expected {memory:.1f}), {usual:.3g} s a step"
        if (seconds := run.last("predicted_step_seconds")) is not None:
            beside += f" (expected {seconds:.3g})"
        lines.append(beside)
    here = shlex.quote(shown(folder))
    lines.append(f"the run lies in {shown(folder)}")
    if job.data.path == STDLIB and not job.data.mixture:
        name = recipe if not recipe.endswith(".toml") else "demo"
        lines += [
            f"next:  weft generate {here} --prompt 'class '",
            f"       weft train {name} --data.path FILE_OR_FOLDER      your own text",
        ]
    else:
        lines.append(f"next:  weft generate {here}")
        if of_tokens:
            lines.append(f"       weft evaluate {here}")
    lines.append("       weft train --help                          every key")
    console.print("\n".join(lines), soft_wrap=True)


def last_step(folder: Path) -> int:
    """Of the last record; 0 if there is none."""
    last = read_tail(folder / "metrics.jsonl").last
    return 0 if last is None else int(last["step"])


def last_intact_step(newest: list[Path]) -> int:
    """Return the step of the newest checkpoint, 0 if there is none or its manifest is damaged."""
    try:
        return int(read_manifest(newest[0])["step"]) if newest else 0
    except CheckpointError:
        return 0  # the ranks say so when they load it


def show_restart(failure: Failure, home: Path, folder: Path) -> None:
    """One rank's own error, when the ranks start again; its traceback is in the log."""
    print(f"weft: {what_failed(failure)}", file=sys.stderr)
    note_event(folder, "restart", last_step(folder), what_failed(failure))
    newest = checkpoints(home)[-1:]
    where = f"from {newest[0]}" if newest else "from the beginning: no checkpoint was saved yet"
    print(f"  log: {failure.log}\n  starting again {where}", file=sys.stderr)


def what_failed(failure: Failure) -> str:
    """One line: who, and why."""
    if failure.kind == "Hang":
        return f"the run hangs: {failure.message}"
    return f"rank {failure.rank} failed: {failure.kind}: {failure.message}"


def show_failure(failure: Failure, home: Path, folder: Path) -> int:
    """One rank's own error, and how to go on; returns the exit status."""
    print(f"weft: {what_failed(failure)}", file=sys.stderr)
    hangs = failure.kind == "Hang"
    note_event(folder, "hang" if hangs else "failure", last_step(folder), what_failed(failure))
    if failure.kind == "InvalidConfig":
        return MISTAKE
    if failure.traceback and not failure.foreseen:
        for line in failure.traceback.rstrip().splitlines()[-12:]:
            print(f"  | {line}", file=sys.stderr)
    print(f"  log: {failure.log}", file=sys.stderr)
    if failure.hopeless:
        print(f"  not started again: {failure.hopeless}", file=sys.stderr)
    if not failure.foreseen or failure.kind != "CheckpointError":  # that says itself what to do
        print(f"  {resume_hint(checkpoints(home))}", file=sys.stderr)
    return HUNG if hangs else FAILED


def resume_hint(found: list[Path]) -> str:
    """What the same command will do next, given the checkpoints that there are."""
    where = f"goes on from {found[-1]}" if found else "starts again: there is no checkpoint"
    return f"the same command {where}"
