"""Variants of a recipe, each trained several times, as real runs.

What makes a comparison fair is the order.  Repeat 1 runs the variants first to last, repeat 2 last
to first, and so on: whatever drifts, a machine that warms up or other people's work, hurts all
alike.  Repeat r adds r - 1 to every variant's seed (where seeds vary, a multiple of that, so that
none comes twice): the runs of one repeat have the same order of samples, and the same initial
weights where their models are the same.  They are a pair, and what they share cancels in their
difference (`weft.tools.verdict`).

A trial is ``weft train`` in a process of its own, in a run's folder below the comparison's.  What
is to be known of it is in that folder; ``comparison.json`` adds how the trial ended.  So a
comparison can be interrupted anywhere: the same command leaves finished trials alone and goes on
with the one that was cut off.
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

from weft.checkpoint.manifest import checkpoints
from weft.config.errors import ConfigError
from weft.config.files import replace_text, write_json
from weft.monitor.process import PYTHON, die_with_parent
from weft.monitor.signals import STOP_SIGNALS
from weft.monitor.terminal import duration
from weft.tools.comparison_dir import (
    COMPARISON,
    TrialResult,
    log_of,
    open_comparison,
    recipe_path,
    seed_of,
    stored,
    trial_folder,
)
from weft.tools.comparison_page import write_page
from weft.tools.comparison_result import Result, Settings, finished, result_of
from weft.tools.variants import Variant
from weft.train.run_dir import owning


def compare(
    folder: Path,
    variants: Sequence[Variant],
    settings: Settings,
    say: Callable[[str], object],
) -> tuple[Result, int]:
    """Run what is missing of a comparison, and judge all of it.

    Args:
        say: told what is going on, in lines.

    Returns:
        What there is to say, which is in the folder, too, and how many stop signals came.

    Raises:
        InvalidConfig: if the folder holds anything else, or another process compares in it.
    """
    open_comparison(folder, variants)  # before anything is written into a folder of others
    rule = "another process is comparing in this folder"
    taken = ConfigError("--out", str(folder), rule, "wait for it")
    with owning(folder, taken), Stopping() as stopping:
        before, looks = open_comparison(folder, variants)
        ended = finished(folder, variants, before)  # what failed is tried again
        most = max((each.repeat for each in ended), default=0)
        settings = replace(settings, repeats=max(most, settings.repeats))

        def note(looks: Sequence[int]) -> Result:
            result = result_of(folder, variants, ended, settings)
            if len(looks) > 1:
                result.notes.append(
                    f"the verdict was looked at {len(looks)} times, after "
                    f"{', '.join(map(str, looks))} trials: to add runs until something is found "
                    "makes false claims likelier"
                )
            document = result.document | stored(variants, ended, looks)
            write_json(folder / COMPARISON, document, indent=2)
            return result

        note(looks)
        run_trials(folder, variants, ended, settings.repeats, say, lambda: note(looks), stopping)
        if ended and len(ended) not in looks:  # nothing new is learnt from looking twice
            looks.append(len(ended))
        result = note(looks)
        write_page(folder, result, say)
        return result, stopping.came


class Stopping:
    """Inside, stop signals and Ctrl-C are counted, and leave it to the trial how to end."""

    def __init__(self) -> None:
        self.came = 0

    def __enter__(self) -> Stopping:
        self._before = {number: signal.signal(number, self._count) for number in STOP_SIGNALS}
        return self

    def asked(self) -> bool:
        """Whether to stop."""
        return self.came > 0

    def _count(self, number: int, frame: object) -> None:
        self.came += 1

    def __exit__(self, *reason: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)


def order(variants: Sequence[int], repeats: int) -> list[tuple[int, int]]:
    """(repeat, variant) of all trials: first to last, then last to first, and so on."""
    return [
        (repeat, variant)
        for repeat in range(1, repeats + 1)
        for variant in (variants if repeat % 2 else reversed(variants))
    ]


def run_trials(
    folder: Path,
    variants: Sequence[Variant],
    ended: list[TrialResult],
    repeats: int,
    say: Callable[[str], object],
    note: Callable[[], object],
    stopping: Stopping,
) -> None:
    """Run every trial that is not finished, until all are or a signal comes.

    A variant that fails is not tried again in this call, but in the next one.

    Args:
        ended: the finished trials; those that end here are added.
        note: called after each of them.
    """
    able = [place for place, variant in enumerate(variants) if variant.plan is not None]
    recipes = {place: recipe_path(folder, place, variants[place].label) for place in able}
    for place, path in recipes.items():
        text = tomli_w.dumps(variants[place].job.model_dump(mode="json"))
        told = f"{variants[place].label!a}, of the recipe {variants[place].recipe!a}"
        replace_text(path, f"# A variant that weft compares: {told}.\n\n{text}")
    trials = order(able, repeats)
    done = {(each.repeat, each.variant) for each in ended}
    failed: set[int] = set()
    for number, (repeat, variant) in enumerate(trials, 1):
        if (repeat, variant) in done or variant in failed:
            continue
        if stopping.asked():
            return
        label = variants[variant].label
        missing = [v for r, v in trials[number - 1 :] if (r, v) not in done and v not in failed]
        say(f"trial {number} of {len(trials)}: {label}, repeat {repeat}{time_left(missing, ended)}")
        run = trial_folder(folder, variant, label, repeat)
        if not checkpoints(run / "checkpoints"):
            shutil.rmtree(run, ignore_errors=True)  # of one that was cut off: nothing to go on from
        seed = seed_of(variants, variant, repeat)
        status, reason, seconds = train(recipes[variant], run, seed, stopping)
        if stopping.asked() and status:
            return  # unfinished, but not by its own fault
        ended.append(TrialResult(variant, repeat, status, reason, seconds))
        if status:
            failed.add(variant)
            say(f"  failed: {reason}")
        note()


def time_left(trials: Sequence[int], ended: Sequence[TrialResult]) -> str:
    """What the trials of these variants will take, by those that are done; '' if none is."""
    done = [each for each in ended if each.status == 0]
    if not done:
        return ""
    own = {v: [e.seconds for e in done if e.variant == v] for v in set(trials)}
    seconds = [fmean(own[v] or [e.seconds for e in done]) for v in trials]
    return f", about {duration(sum(seconds))} left"


def train(recipe: Path, run: Path, seed: int, stopping: Stopping) -> tuple[int, str, float]:
    """One ``weft train``; its exit status, why it failed, and the seconds that it took.

    A signal goes on to it: it finishes its step and saves, or ends at once at the second one.
    """
    command = [*PYTHON, "weft.cli", "train", str(recipe)]
    command += ["--run.dir", str(run.absolute()), "--train.seed", str(seed)]
    began, sent = time.monotonic(), 0
    with log_of(run).open("ab") as log:
        at = log.tell()
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C is for this process to pass on
            preexec_fn=partial(die_with_parent, os.getpid()),
        )
        while process.poll() is None:
            if sent < stopping.came:
                process.send_signal(signal.SIGTERM)
                sent += 1
            time.sleep(0.05)
    said = log_of(run).read_bytes()[at:].decode("utf-8", "replace")
    status = process.returncode
    return status, why(status, said) if status else "", time.monotonic() - began


def why(status: int, said: str) -> str:
    """A failed trial in a few words: its own last complaint, without traceback."""
    lines = said.splitlines()
    told = [i for i, line in enumerate(lines) if line.startswith("weft: ")]
    if not told:
        name = f"signal {signal.Signals(-status).name}" if status < 0 else f"status {status}"
        return " ".join([f"ended with {name}", *lines[-1:]])
    first = lines[told[-1]].removeprefix("weft: ")
    if "nothing was started:" in first:
        return "; ".join(line.strip() for line in lines[told[-1] + 1 :])
    return first
