"""Train each variant of a comparison several times, as real runs.

A fair order makes a comparison fair.  Repeat 1 runs the variants first to last, repeat 2 last to
first, and so on, so a drift (a machine that warms up, other people's load) affects all variants
alike.  Repeat r adds r - 1 to every variant's seed (a multiple of that if the seeds differ, so that
no seed repeats).  The runs of one repeat have the same order of samples and, for equal models, the
same initial weights.  They are a pair, and what they share cancels in their difference
(`weft.tools.verdict`).

A trial is one ``weft train`` process with a run directory below the comparison's.  That directory
holds its records; ``comparison.json`` adds the outcome.  An interrupted comparison resumes with the
same command: it keeps finished trials and resumes the interrupted one.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import fmean

import tomli_w

from weft.checkpoint.manifest import list_checkpoints
from weft.config.errors import ConfigError
from weft.config.files import replace_text, write_json
from weft.monitor.process import PYTHON, die_with_parent
from weft.monitor.signals import STOP_SIGNALS
from weft.monitor.terminal import format_duration
from weft.tools.comparison_dir import (
    COMPARISON,
    TrialResult,
    comparison_record,
    log_path,
    open_comparison,
    recipe_path,
    trial_dir,
    trial_seed,
)
from weft.tools.comparison_result import (
    ComparisonSettings,
    ComparisonSummary,
    completed_trials,
    summarize_comparison,
)
from weft.tools.report.comparison_page import write_page
from weft.tools.variants import Variant
from weft.train.run_dir import lock_directory


def compare(
    directory: Path,
    variants: Sequence[Variant],
    settings: ComparisonSettings,
    log: Callable[[str], object],
) -> tuple[ComparisonSummary, int]:
    """Run the missing trials of a comparison, and summarize all trials.

    Args:
        directory: directory of the comparison; created if necessary.
        variants: variants to compare; the first one is the baseline.
        settings: number of repeats, margin of equivalence, and price.
        log: called with lines of progress.

    Returns:
        The summary, which is also in the directory, and the number of stop signals received.

    Raises:
        InvalidConfig: if the directory holds other files, or another process uses it.
    """
    open_comparison(directory, variants)  # check before anything is written
    rule = "is in use by another comparison"
    in_use = ConfigError("--out", str(directory), rule, "wait for it")
    with lock_directory(directory, in_use), StopSignals() as signals:
        previous, looks = open_comparison(directory, variants)
        results = completed_trials(directory, variants, previous)  # failed trials run again
        repeats = max((result.repeat for result in results), default=0)
        settings = replace(settings, repeats=max(repeats, settings.repeats))

        def save(looks: Sequence[int]) -> ComparisonSummary:
            summary = summarize_comparison(directory, variants, results, settings)
            if len(looks) > 1:
                summary.notes.append(
                    f"{len(looks)} verdicts were given, after {', '.join(map(str, looks))} "
                    "trials: adding runs until a difference is found makes false claims likelier"
                )
            document = summary.document | comparison_record(variants, results, looks)
            write_json(directory / COMPARISON, document, indent=2)
            return summary

        save(looks)
        run_trials(
            directory, variants, results, settings.repeats, log, lambda: save(looks), signals
        )
        if results and len(results) not in looks:  # the same trials are no new verdict
            looks.append(len(results))
        summary = save(looks)
        write_page(directory, summary, log)
        return summary, signals.count


class StopSignals:
    """A context that counts stop signals, which the current trial handles."""

    def __init__(self) -> None:
        self.count = 0

    def __enter__(self) -> StopSignals:
        self._handlers = {number: signal.signal(number, self._count) for number in STOP_SIGNALS}
        return self

    def should_stop(self) -> bool:
        """Return True if a signal was received."""
        return self.count > 0

    def _count(self, number: int, frame: object) -> None:
        self.count += 1

    def __exit__(self, *reason: object) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)


def trial_order(variants: Sequence[int], repeats: int) -> list[tuple[int, int]]:
    """Return (repeat, variant) of all trials, in alternating directions."""
    return [
        (repeat, variant)
        for repeat in range(1, repeats + 1)
        for variant in (variants if repeat % 2 else reversed(variants))
    ]


def run_trials(
    directory: Path,
    variants: Sequence[Variant],
    results: list[TrialResult],
    repeats: int,
    log: Callable[[str], object],
    save: Callable[[], object],
    signals: StopSignals,
) -> None:
    """Run all unfinished trials, until a stop signal arrives.

    A variant that fails does not run again in this call; the next call retries it.

    Args:
        directory: directory of the comparison.
        variants: all variants; those without a plan do not run.
        results: of the finished trials; this function appends new ones.
        repeats: number of runs of each variant.
        log: called with lines of progress.
        save: called after each trial.
        signals: counts received stop signals.
    """
    runnable = [index for index, variant in enumerate(variants) if variant.plan is not None]
    recipes = {index: recipe_path(directory, index, variants[index].label) for index in runnable}
    for index, path in recipes.items():
        text = tomli_w.dumps(variants[index].job.model_dump(mode="json"))
        name = f"{variants[index].label!a}, of the recipe {variants[index].recipe!a}"
        replace_text(path, f"# A variant that weft compares: {name}.\n\n{text}")
    trials = trial_order(runnable, repeats)
    done = {(result.repeat, result.variant) for result in results}
    failed: set[int] = set()
    for number, (repeat, variant) in enumerate(trials, 1):
        if (repeat, variant) in done or variant in failed:
            continue
        if signals.should_stop():
            return
        label = variants[variant].label
        missing = [v for r, v in trials[number - 1 :] if (r, v) not in done and v not in failed]
        left = format_time_left(missing, results)
        log(f"trial {number} of {len(trials)}: {label}, repeat {repeat}{left}")
        run = trial_dir(directory, variant, label, repeat)
        if not list_checkpoints(run / "checkpoints"):
            shutil.rmtree(run, ignore_errors=True)  # interrupted before its first checkpoint
        seed = trial_seed(variants, variant, repeat)
        status, reason, seconds = run_trial(recipes[variant], run, seed, signals)
        if signals.should_stop() and status:
            return  # interrupted, not failed
        results.append(TrialResult(variant, repeat, status, reason, seconds))
        if status:
            failed.add(variant)
            log(f"  failed: {reason}")
        save()


def format_time_left(variants: Sequence[int], results: Sequence[TrialResult]) -> str:
    """Format the estimated time of missing trials; '' if no trial has finished."""
    finished = [result for result in results if result.status == 0]
    if not finished:
        return ""
    by_variant = {v: [r.seconds for r in finished if r.variant == v] for v in set(variants)}
    seconds = [fmean(by_variant[v] or [r.seconds for r in finished]) for v in variants]
    return f", about {format_duration(sum(seconds))} left"


def run_trial(recipe: Path, run: Path, seed: int, signals: StopSignals) -> tuple[int, str, float]:
    """Run ``weft train``; return exit status, reason of a failure, and seconds.

    Stop signals are forwarded: at the first one ``weft train`` finishes its step and saves, at the
    second one it ends at once.
    """
    command = [*PYTHON, "weft.cli", "train", str(recipe)]
    command += ["--run.dir", str(run.absolute()), "--train.seed", str(seed)]
    started, num_sent = time.monotonic(), 0
    with log_path(run).open("ab") as log_file:
        offset = log_file.tell()
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log_file,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # this process forwards Ctrl-C
            preexec_fn=partial(die_with_parent, os.getpid()),
        )
        while process.poll() is None:
            if num_sent < signals.count:
                process.send_signal(signal.SIGTERM)
                num_sent += 1
            time.sleep(0.05)
    output = log_path(run).read_bytes()[offset:].decode("utf-8", "replace")
    status = process.returncode
    reason = failure_reason(status, output) if status else ""
    return status, reason, time.monotonic() - started


def failure_reason(status: int, output: str) -> str:
    """Return the last error message of a failed trial, without its traceback."""
    lines = output.splitlines()
    errors = [i for i, line in enumerate(lines) if line.startswith("weft: ")]
    if not errors:
        name = f"signal {signal.Signals(-status).name}" if status < 0 else f"status {status}"
        return " ".join([f"ended with {name}", *lines[-1:]])
    message = lines[errors[-1]].removeprefix("weft: ")
    if "nothing was started:" in message:
        return " ".join(line.strip() for line in lines[errors[-1] + 1 :])
    return message
