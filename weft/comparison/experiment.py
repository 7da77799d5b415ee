"""Train each variant of a comparison several times, as real runs.

A fair order makes a comparison fair.  Repeat 1 runs the variants first to last, repeat 2 last to
first, and so on, so a drift (a machine that warms up, other people's load) affects all variants
alike.  Repeat r adds r - 1 to every variant's seed (a multiple of that if the seeds differ, so that
no seed repeats).  The runs of one repeat have the same order of samples and, for equal models, the
same initial weights.  They are a pair, and what they share cancels in their difference
(`weft.comparison.verdict`).

A trial is one ``weft train`` process with a run directory below the comparison's.  That directory
holds its records; ``comparison.json`` adds the outcome.  An interrupted comparison resumes with the
same command: it keeps finished trials and resumes the interrupted one.

`collect` reads what the trials in a directory have done, whoever has started them: the jobs of a
cluster (`weft.submission.comparison_jobs`) have no process that waits for all of them.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from itertools import takewhile
from pathlib import Path
from statistics import fmean
from typing import Any

import tomli_w

from weft.checkpoint.manifest import list_checkpoints
from weft.comparison.comparison_page import write_page
from weft.comparison.comparison_result import (
    ComparisonSettings,
    ComparisonSummary,
    completed_trials,
)
from weft.comparison.trials import (
    TrialResult,
    describe_log,
    log_path,
    read_launch_record,
    recipe_path,
    trial_dir,
    trial_seed,
)
from weft.comparison.variants import Variant
from weft.comparison.verdict import import_student_t
from weft.config.errors import MISSING, ConfigError, InvalidConfig, WeftError
from weft.config.files import read_json, reading, replace_text, write_json
from weft.config.locks import lock_directory
from weft.config.reader import recipe_slug
from weft.config.schema import Job
from weft.monitor.process import PYTHON, die_with_parent
from weft.monitor.signals import STOP_SIGNALS
from weft.monitor.terminal import format_duration
from weft.records.run_reader import FAILURE_KINDS, RunReader, is_run_dir

COMPARISON = "comparison.json"
FAILED = 1  # status of a trial whose process nobody has waited for


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
        WeftError: if SciPy is not installed.
    """
    import_student_t()  # fail before the first trial, not after the last
    open_comparison(directory, variants)  # check before anything is written
    rule = "is in use by another comparison"
    in_use = ConfigError("--out", str(directory), rule, "wait for it")
    with lock_directory(directory, in_use), StopSignals() as signals:
        previous, looks = open_comparison(directory, variants)
        results = completed_trials(directory, variants, previous)  # failed trials run again
        repeats = max((result.repeat for result in results), default=0)
        settings = replace(settings, repeats=max(repeats, settings.repeats))

        def save() -> ComparisonSummary:
            return save_comparison(directory, variants, results, settings, looks)

        save()
        write_recipes(directory, variants)
        for repeat, variant in missing_trials(variants, results, settings.repeats, log):
            result = run_trial(directory, variants, variant, repeat, signals)
            if signals.count and result.status:
                break  # interrupted, not failed
            results.append(result)
            if result.status:
                log(f"  failed: {result.reason}")
            save()
            if signals.count:
                break
        _note_look(directory, variants, results, looks)
        summary = save()
        write_page(directory, summary, log)
        return summary, signals.count


def _note_look(
    directory: Path, variants: Sequence[Variant], results: Sequence[TrialResult], looks: list[int]
) -> None:
    """Add the number of finished trials to those after which a verdict was given."""
    count = len(completed_trials(directory, variants, results))
    if count and count not in looks:  # the same trials are no new verdict
        looks.append(count)


class StopSignals:
    """A context that counts stop signals, which the current trial handles."""

    def __init__(self) -> None:
        self.count = 0

    def __enter__(self) -> StopSignals:
        self._handlers = {number: signal.signal(number, self._count) for number in STOP_SIGNALS}
        return self

    def _count(self, number: int, frame: object) -> None:
        self.count += 1

    def __exit__(self, *reason: object) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)


# --------------------------------------------------------------------------- directory


def collect(
    directory: Path, changes: Mapping[str, Any], log: Callable[[str], object]
) -> ComparisonSummary:
    """Summarize the trials that have ended so far; train and plan nothing.

    Args:
        directory: directory of the comparison, which describes its variants.
        changes: fields of `ComparisonSettings` that differ from the recorded settings.
        log: called with lines about the page.

    Raises:
        InvalidConfig: if the directory has no comparison of runs, or another process uses it.
        WeftError: if SciPy is not installed, or a file is damaged.
    """
    import_student_t()
    load_comparison(directory)  # check before a lock is created
    rule = "is in use by another weft compare"
    in_use = ConfigError("DIR", str(directory), rule, "wait until it has ended")
    with lock_directory(directory, in_use):
        variants, recorded, settings, looks = load_comparison(directory)
        settings = replace(settings, **changes)
        results, unfinished = collect_results(directory, variants, recorded, settings.repeats)
        _note_look(directory, variants, results, looks)
        summary = save_comparison(directory, variants, results, settings, looks, unfinished)
        write_page(directory, summary, log)
        return summary


def load_comparison(
    directory: Path,
) -> tuple[list[Variant], list[TrialResult], ComparisonSettings, list[int]]:
    """Read the variants, results, settings and looks of a comparison.

    Raises:
        InvalidConfig: if the directory has no comparison of runs.
        WeftError: if ``comparison.json`` is damaged.
    """
    record = read_json(directory / COMPARISON)
    if "compared" not in record:
        rule = "holds a comparison made with --plan-only" if record else f"has no {COMPARISON}"
        remedy = "name the directory of a comparison of runs"
        raise InvalidConfig([ConfigError("DIR", str(directory), rule, remedy)])
    with reading(directory / COMPARISON):
        variants = []
        for identity, variant in zip(record["compared"], record["variants"], strict=True):
            tree: dict[str, dict[str, Any]] = {}
            for key, value in identity["job"].items():
                section, _, name = key.partition(".")
                tree.setdefault(section, {})[name] = value
            job, errors = Job.model_validate(tree), tuple(map(str, variant["errors"]))
            variants.append(Variant(identity["label"], variant["recipe"], job, None, errors))
        results = [TrialResult(**result) for result in record["ended"]]
        settings = ComparisonSettings(**record["settings"])
        return variants, results, settings, [*map(int, record["looks"])]


def collect_results(
    directory: Path, variants: Sequence[Variant], recorded: Sequence[TrialResult], repeats: int
) -> tuple[list[TrialResult], list[str]]:
    """Return the results of ended trials, and a line for each other trial."""
    results, unfinished = completed_trials(directory, variants, recorded), []
    failed = {(result.repeat, result.variant): result for result in recorded if result.status}
    known = {(result.repeat, result.variant) for result in results}
    for repeat, index in trial_order(_valid_indices(variants), repeats):
        if (repeat, index) in known:
            continue
        label = variants[index].label
        run = trial_dir(directory, index, label, repeat)
        state, reason, seconds, progress = inspect_trial(run)
        if state == "finished":
            results.append(TrialResult(index, repeat, 0, "", seconds))
        elif (repeat, index) in failed and not read_launch_record(run):
            results.append(failed[repeat, index])
        elif state == "failed":
            results.append(TrialResult(index, repeat, FAILED, reason, seconds))
        else:
            unfinished.append(f"{label}: repeat {repeat} {progress}; {describe_log(run)}")
    return results, unfinished


def inspect_trial(run: Path) -> tuple[str, str, float, str]:
    """Return a trial's state, why it failed, its seconds and its progress.

    The state is finished, failed or unfinished.  A trial has finished when it has written its last
    evaluation and checkpoint.
    """
    if not is_run_dir(run):  # a mistake is found before the run writes files
        record = read_launch_record(run)
        file = run / record["log"] if record.get("log") else log_path(run)
        output = file.read_text("utf-8", "replace") if file.is_file() else ""
        if "\nweft: " in f"\n{output}":
            return "failed", failure_reason(FAILED, output), 0.0, ""
        return "unfinished", "", 0.0, "has not started"
    reader = RunReader(run)
    events, step = reader.read_events(), int(reader.last("step") or 0)
    times = [*reader.column("time"), *(event.time for event in events)]
    seconds = float(max(times) - min(times)) if times else 0.0
    if any(event.kind == "end" and event.step == step for event in events):
        return "finished", "", seconds, ""
    last = [event for event in events if event.kind in FAILURE_KINDS | {"start", "stop"}][-1:]
    if last and last[0].kind in FAILURE_KINDS:
        return "failed", last[0].text.partition("\n")[0], seconds, ""
    return "unfinished", "", seconds, f"has not finished: step {step:,} of {reader.steps:,}"


def is_finished(run: Path) -> bool:
    """Return True if the trial in this run directory has done all its steps."""
    return inspect_trial(run)[0] == "finished"


def default_dir(variants: Sequence[Variant]) -> Path:
    """Return ``runs/compare-<recipes>-<hash of the variants>``."""
    names = "-".join(dict.fromkeys(recipe_slug(variant.recipe) for variant in variants))[:40]
    names = "-".join(dict.fromkeys(recipe_slug(variant.recipe) for variant in variants))[:22]
    text = json.dumps([variant.identity() for variant in variants], sort_keys=True)
    return Path("runs") / f"compare-{names}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"


def read_comparison(directory: Path) -> dict[str, Any] | None:
    """Read ``comparison.json``; return None if the directory is empty or missing.

    Raises:
        InvalidConfig: if the directory holds other files.
    """
    path = directory / COMPARISON
    if not directory.exists() or (
        directory.is_dir()
        and not path.exists()
        and all(entry.name == ".lock" for entry in directory.iterdir())
    ):
        return None
    try:
        record = read_json(path)
    except WeftError:
        record = {}
    if not record:
        raise invalid_out(directory, "is neither empty nor the directory of a comparison")
    return record


def invalid_out(directory: Path, rule: str) -> InvalidConfig:
    """Return the error for a directory that --out cannot use."""
    return InvalidConfig([ConfigError("--out", str(directory), rule, "use another directory")])


def open_comparison(
    directory: Path, variants: Sequence[Variant]
) -> tuple[list[TrialResult], list[int]]:
    """Read the results of a comparison's trials; empty if the comparison is new.

    Returns:
        The results, and the numbers of trials after which earlier calls gave a verdict.

    Raises:
        InvalidConfig: if the directory holds other files or another comparison.
    """
    record = read_comparison(directory)
    if record is None:
        return [], []
    if "compared" not in record:
        raise invalid_out(directory, "holds a comparison made with --plan-only")
    current, previous = [v.identity() for v in variants], record["compared"]
    with reading(directory / COMPARISON):
        if current != previous:
            difference = _describe_difference(current, previous)
            raise invalid_out(directory, f"holds another comparison: {difference}")
        results = [TrialResult(**result) for result in record["ended"]]
        return results, [*map(int, record["looks"])]


def save_comparison(
    directory: Path,
    variants: Sequence[Variant],
    results: Sequence[TrialResult],
    settings: ComparisonSettings,
    looks: Sequence[int] = (),
    unfinished: Sequence[str] = (),
) -> ComparisonSummary:
    """Summarize a comparison, and write the summary to ``comparison.json``."""
    summary = ComparisonSummary(directory, variants, results, settings, looks, unfinished)
    document = summary.to_dict() | comparison_record(variants, results, looks)
    write_json(directory / COMPARISON, document, indent=2)
    return summary


def comparison_record(
    variants: Sequence[Variant], results: Sequence[TrialResult], looks: Sequence[int]
) -> dict[str, Any]:
    """Return the part of ``comparison.json`` that `open_comparison` reads."""
    return {
        "compared": [variant.identity() for variant in variants],
        "ended": [asdict(result) for result in results],
        "looks": list(looks),
    }


def _describe_difference(current: list[dict[str, Any]], previous: list[dict[str, Any]]) -> str:
    labels, previous_labels = ([v["label"] for v in variants] for variants in (current, previous))
    if labels != previous_labels:
        return f"of {'; '.join(previous_labels)}"
    for new, old in zip(current, previous, strict=True):
        for key in {**new["job"], **old["job"]}:
            value, old_value = (variant["job"].get(key, MISSING) for variant in (new, old))
            if value != old_value:
                return f"{key} of {new['label']} was {old_value}, and is {value}"
    raise AssertionError("the variants are equal")


# --------------------------------------------------------------------------- trials


def _valid_indices(variants: Sequence[Variant]) -> list[int]:
    return [index for index, variant in enumerate(variants) if variant.is_valid]


def trial_order(variants: Sequence[int], repeats: int) -> list[tuple[int, int]]:
    """Return (repeat, variant) of all trials, in alternating directions."""
    return [
        (repeat, variant)
        for repeat in range(1, repeats + 1)
        for variant in (variants if repeat % 2 else reversed(variants))
    ]


def missing_trials(
    variants: Sequence[Variant],
    results: Sequence[TrialResult],
    repeats: int,
    log: Callable[[str], object],
) -> Iterator[tuple[int, int]]:
    """Yield (repeat, variant) of each trial that has no result when its turn comes.

    A variant that failed is skipped; the next call of `compare` retries it.
    """
    runnable = _valid_indices(variants)
    trials = trial_order(runnable, repeats)
    for number, trial in enumerate(trials, 1):
        done = {(result.repeat, result.variant) for result in results}
        failed = {result.variant for result in results if result.status}
        missing = [t for t in trials[number - 1 :] if t not in done and t[1] not in failed]
        if trial in missing:
            repeat, variant = trial
            left = format_time_left([v for _, v in missing], results)
            label = variants[variant].label
            log(f"trial {number} of {len(trials)}: {label}, repeat {repeat}{left}")
            yield trial


def format_time_left(variants: Sequence[int], results: Sequence[TrialResult]) -> str:
    """Format the estimated time of missing trials; '' if no trial has finished."""
    finished = [result for result in results if result.status == 0]
    if not finished:
        return ""
    by_variant = {v: [r.seconds for r in finished if r.variant == v] for v in set(variants)}
    seconds = [fmean(by_variant[v] or [r.seconds for r in finished]) for v in variants]
    return f", about {format_duration(sum(seconds))} left"


def write_recipes(directory: Path, variants: Sequence[Variant]) -> None:
    """Write the complete job of each variant that can run."""
    for index, variant in enumerate(variants):
        if variant.is_valid:
            text = tomli_w.dumps(variant.job.model_dump(mode="json"))
            name = f"{variant.label!a}, of the recipe {variant.recipe!a}"
            path = recipe_path(directory, index, variant.label)
            replace_text(path, f"# A variant that weft compares: {name}.\n\n{text}")


def run_trial(
    directory: Path, variants: Sequence[Variant], variant: int, repeat: int, signals: StopSignals
) -> TrialResult:
    """Run ``weft train`` in its own process; resume an interrupted run.

    Stop signals are forwarded: at the first one ``weft train`` finishes its step and saves, at the
    second one it ends at once.
    """
    label = variants[variant].label
    run = trial_dir(directory, variant, label, repeat)
    if not list_checkpoints(run / "checkpoints"):
        shutil.rmtree(run, ignore_errors=True)  # interrupted before its first checkpoint
    recipe, seed = recipe_path(directory, variant, label), trial_seed(variants, variant, repeat)
    command = [*PYTHON, "weft", "train", str(recipe)]
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
    return TrialResult(variant, repeat, status, reason, time.monotonic() - started)


def failure_reason(status: int, output: str) -> str:
    """Return the last error message of a failed trial, without its traceback."""
    lines = output.splitlines()
    # A batch script says with which status weft has exited; weft has said why.
    errors = [i for i, line in enumerate(lines) if re.match("weft: (?!exit status )", line)]
    if not errors:
        name = f"signal {signal.Signals(-status).name}" if status < 0 else f"status {status}"
        return " ".join([f"ended with {name}", *lines[-1:]])
    message = lines[errors[-1]].removeprefix("weft: ")
    if "nothing was started:" in message:
        rest = takewhile(lambda line: line.startswith(" "), lines[errors[-1] + 1 :])
        return " ".join(line.strip() for line in rest)
    return message
