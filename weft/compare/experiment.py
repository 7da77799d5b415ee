"""EXPERIMENT: variants of a recipe, each trained several times, as real runs.

What makes a comparison fair is the order.  Repeat 1 runs the variants first to last, repeat 2 last
to first, and so on: whatever drifts, a machine that warms up or other people's work, hurts all
alike.  Repeat r adds r - 1 to every variant's seed, so that the runs of one repeat have the same
order of samples, and the same initial weights where their models are the same: they are a pair, and
what they share cancels in their difference (`weft.compare.judge`).

A trial is ``weft train`` in a process of its own, in a run's folder below the comparison's.  What
is to be known of it is in that folder; ``comparison.json`` adds how the trial ended.  So a
comparison can be interrupted anywhere: the same command leaves finished trials alone and goes on
with the one that was cut off.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product
from math import inf, prod
from pathlib import Path
from typing import Any

import tomli_w

from weft.checkpoint.manifest import checkpoints
from weft.compare.ranks import die_with_parent
from weft.job import MISSING, InvalidJob, Job, Problem, flatten, read_job
from weft.observe.files import replace_text
from weft.observe.terminal import duration
from weft.plan.resolve import Plan
from weft.resilience.signals import STOP_SIGNALS
from weft.train.check import prepare_job
from weft.train.setup import joined

Overrides = list[tuple[str, str]]

COMPARISON = "comparison.json"  # in a comparison's folder
SEEDS = 2**32
# Of a trial: where it lies and what it adds up to is the comparison's to say.
OWN = ("run.dir", "checkpoint.dir")
# Work beside training, left out unless asked for.
SPARED = [("checkpoint.interval", "0"), ("observe.report", "false")]
MOST_LABEL = 32  # characters of a value in a label


@dataclass(frozen=True)
class Variant:
    """One of what is compared.  ``plan``: None if it cannot be, for the reasons in ``problems``."""

    label: str
    recipe: str
    job: Job  # as far as it could be read
    plan: Plan | None
    problems: tuple[Problem, ...] = ()

    def identity(self) -> dict[str, Any]:
        """What must be the same for results to count for it."""
        job = {key: value for key, value in flatten(self.job).items() if key not in OWN}
        return dict(json.loads(json.dumps({"label": self.label, "job": job}, default=str)))


@dataclass(frozen=True)
class Ended:
    """How a trial ended."""

    variant: int
    repeat: int  # from 1
    status: int  # of the process; negative: the signal that killed it
    reason: str  # of a failure
    seconds: float


# --------------------------------------------------------------------------- variants


def parse_vary(text: str, problems: list[Problem]) -> list[tuple[str, list[str]]]:
    """``parallel.tp=1,2`` as the key and its values; a mistake is added to ``problems`` instead."""
    key, equals, values = text.partition("=")
    key = key.removeprefix("--").replace("-", "_")
    found = split_values(values)
    if not equals or not all(found):
        rule, remedy = "is no key with values", "write --vary section.key=VALUE,VALUE"
        problems.append(Problem("--vary", text, rule, remedy))
        return []
    if len(set(found)) < len(found):
        problems.append(Problem("--vary", text, "names a value twice", "leave one out"))
        return []
    return [(key, found)]


def split_values(text: str) -> list[str]:
    """Parts between commas that are outside of brackets and quotes.

    Quotes round a whole part only protect its commas, and go.
    """
    parts, depth, quote = [""], 0, ""
    for letter in text:
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "\"'" and (depth > 0 or not parts[-1].strip()):
            quote = letter
        else:
            depth += (letter in "[{") - (letter in "]}")
            if letter == "," and depth <= 0:
                parts.append("")
                continue
        parts[-1] += letter
    stripped = [part.strip() for part in parts]
    return [re.sub(r"""^(["'])([^"']*)\1$""", r"\2", part) for part in stripped]


def parse_margin(text: str, problems: list[Problem]) -> tuple[float, bool]:
    """``0.5%`` of the loss, or nats; whether it is a part.  A mistake is added to ``problems``."""
    number, relative = text.removesuffix("%"), text.endswith("%")
    value = _number("--margin", number, problems, "0.5% of the loss, or 0.01 nats")
    return (value / 100 if relative else value), relative


def parse_price(text: str | None, problems: list[Problem]) -> float | None:
    """Of a device's hour, if given."""
    return None if text is None else _number("--price", text, problems, "a device's hour: 2.5")


def _number(name: str, text: str, problems: list[Problem], example: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value < inf:
        problems.append(Problem(name, text, "is no number above 0", f"write {example}"))
    return value


def read_variants(
    recipes: Sequence[str],
    vary: Sequence[tuple[str, Sequence[str]]],
    overrides: Overrides,
    problems: Iterable[Problem],
    read: Callable[[str, Overrides], tuple[Job, Plan]],
) -> list[Variant]:
    """Every recipe with every combination of values.

    Args:
        vary: keys, each with its values.
        overrides: of all variants.
        problems: what was wrong with the command line already.
        read: makes the job and its plan of a recipe and overrides, or raises InvalidJob.

    Raises:
        InvalidJob: if there is only one, or none of them can be; a variant that cannot be beside
            one that can is told of in its row.
    """
    problems = list(problems)
    varied = [key for key, _ in vary]
    for key in dict.fromkeys(varied):
        if varied.count(key) > 1 or any(key == name for name, _ in overrides):
            rule, remedy = "is varied and set, or varied twice", "write it once, with all values"
            problems.append(Problem(key, MISSING, rule, remedy))
    for name in OWN:
        if any(key == name for key, _ in [*vary, *overrides]):
            rule = "each trial has a folder of its own below the comparison's"
            problems.append(Problem(name, MISSING, rule, "use --out FOLDER"))
    if len(recipes) * prod(len(values) for _, values in vary) < 2 and not problems:
        remedy = "name another recipe, or --vary section.key=VALUE,VALUE"
        problems.append(Problem("RECIPE", MISSING, "is alone: there is nothing to compare", remedy))
    variants: list[Variant] = []
    names = _names(recipes)
    keys = _names_of_keys(varied)
    for recipe, name in zip(recipes, names, strict=True):
        for values in product(*(values for _, values in vary)):
            parts = [f"{k}={_cut(value)}" for k, value in zip(keys, values, strict=True)]
            label = ", ".join([*([name] if len(recipes) > 1 else []), *parts])
            same = sum(re.sub(r" \(\d+\)$", "", v.label) == label for v in variants)
            label += f" ({same + 1})" if same else ""
            own = [(key, value) for (key, _), value in zip(vary, values, strict=True)]
            job, _, unknown = read_job(recipe, [*overrides, *own])
            if missing := [each for each in unknown if each.key in ("recipe", "extends")]:
                problems += missing
                continue
            try:
                job, plan = read(recipe, [*overrides, *own])
                variants.append(Variant(label, recipe, job, plan))
            except InvalidJob as error:
                variants.append(Variant(label, recipe, job, None, tuple(error.problems)))
    if variants and all(variant.plan is None for variant in variants):
        problems += [problem for variant in variants for problem in variant.problems]
    if problems:
        raise InvalidJob({str(problem): problem for problem in problems}.values())
    return variants


def prepare(out: str, recipe: str, overrides: Overrides) -> tuple[Job, Plan]:
    """A variant to be trained on this machine, all of it checked but what only starting it tells.

    Checkpoints and reports of each run cost time that is not compared: there are none, but for the
    last checkpoint, unless asked for.

    Args:
        out: where the comparison's folder will be.

    Raises:
        InvalidJob: with every reason why it cannot be.
    """
    if joined():
        rule = "says that this is a rank, but weft compare starts runs of its own"
        raise InvalidJob([Problem("WORLD_SIZE", MISSING, rule, "start it outside of torchrun")])
    own = [("checkpoint.dir", "auto"), ("run.dir", f"{out}/trial")]
    try:
        job, _, plan = prepare_job(recipe, [*SPARED, *overrides, *own])
    except InvalidJob as error:
        told = (
            replace(p, key="--out", value=out) if p.key == "run.dir" else p for p in error.problems
        )
        raise InvalidJob(told) from error
    if plan.node_counts[-1] > 1:
        rule = "a comparison trains on one machine"
        raise InvalidJob([Problem("run.nodes", job.run.nodes, rule, "use 1")])
    return job, plan


def _names(recipes: Sequence[str]) -> list[str]:
    """Short ones, if they are different."""
    short = [Path(recipe).stem for recipe in recipes]
    return short if len(set(short)) == len(set(recipes)) else list(recipes)


def _names_of_keys(keys: Sequence[str]) -> list[str]:
    """``parallel.tp`` is tp, ``remat.kind`` is remat; whole where that says too little."""
    parts = [key.partition(".") for key in keys]
    short = [s if last in ("kind", "enable") else last or s for s, _, last in parts]
    return [a if short.count(a) == 1 else key for a, key in zip(short, keys, strict=True)]


def _cut(value: str) -> str:
    return value if len(value) <= MOST_LABEL else f"{value[: MOST_LABEL - 3]}..."


# --------------------------------------------------------------------------- the folder


def default_folder(variants: Sequence[Variant]) -> Path:
    """``runs/compare-<recipes>-<hash of what is compared>``."""
    names = "-".join(dict.fromkeys(Path(variant.recipe).stem for variant in variants))[:40]
    text = json.dumps([variant.identity() for variant in variants], sort_keys=True)
    return Path("runs") / f"compare-{names}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"


def recipe_path(folder: Path, place: int, label: str) -> Path:
    """Where a variant's whole job lies: a file that trains it by itself, too."""
    slug = re.sub(r"[^A-Za-z0-9.]+", "-", label).strip("-.")[:60]
    return folder / f"{place + 1}-{slug}.toml"


def trial_folder(folder: Path, place: int, label: str, repeat: int) -> Path:
    """Where a trial's run lies.  Its name tells what it is, for reports."""
    recipe = recipe_path(folder, place, label)
    return recipe.with_name(f"{recipe.stem}-repeat-{repeat}")


def log_of(run: Path) -> Path:
    """What a trial printed."""
    return run.with_name(f"{run.name}.log")


def seed_of(variants: Sequence[Variant], variant: int, repeat: int) -> int:
    """Of a trial.  Where seeds are what is compared, no two trials share one."""
    seeds = [v.job.train.seed for v in variants]
    return (seeds[variant] + (repeat - 1) * (max(seeds) - min(seeds) + 1)) % SEEDS


def open_comparison(folder: Path, variants: Sequence[Variant]) -> tuple[list[Ended], list[int]]:
    """The trials of the comparison in ``folder`` that have ended, and after how many of them
    people looked at the verdict; none if it is new.

    Raises:
        InvalidJob: if the folder holds anything else.
    """
    path = folder / COMPARISON
    if not path.is_file():
        if folder.exists() and any(entry.name != ".lock" for entry in folder.iterdir()):
            rule = "is neither empty nor a comparison's folder"
            raise InvalidJob([Problem("--out", str(folder), rule, "use another folder")])
        return [], []
    found = json.loads(path.read_text("utf-8"))
    ours, theirs = [v.identity() for v in variants], found.get("compared")
    if theirs is None:
        rule = "holds a comparison that was only planned"
        raise InvalidJob([Problem("--out", str(folder), rule, "use another folder")])
    if ours != theirs:
        what = _difference(ours, theirs)
        rule = f"holds another comparison: {what}"
        raise InvalidJob([Problem("--out", str(folder), rule, "use another folder")])
    return [Ended(**ended) for ended in found["ended"]], found["looks"]


def _difference(ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> str:
    labels, before = ([each["label"] for each in some] for some in (ours, theirs))
    if labels != before:
        return f"of {'; '.join(before)}"
    for mine, other in zip(ours, theirs, strict=True):
        for key in {**mine["job"], **other["job"]}:
            now, then = (each["job"].get(key, MISSING) for each in (mine, other))
            if now != then:
                return f"{key} of {mine['label']} was {then}, and is {now}"
    raise AssertionError("equal after all")


# --------------------------------------------------------------------------- running


def order(variants: Sequence[int], repeats: int) -> list[tuple[int, int]]:
    """(repeat, variant) of all trials: first to last, then last to first, and so on."""
    return [
        (repeat, variant)
        for repeat in range(1, repeats + 1)
        for variant in (variants if repeat % 2 else reversed(variants))
    ]


class Stopping:
    """Inside, stop signals and Ctrl-C are counted, and leave it to the trial how to end."""

    def __init__(self) -> None:
        self.came = 0

    def __enter__(self) -> Stopping:
        self._before = {
            number: signal.signal(number, self._count) for number in (*STOP_SIGNALS, signal.SIGINT)
        }
        return self

    def asked(self) -> bool:
        """Whether to stop."""
        return self.came > 0

    def _count(self, number: int, frame: object) -> None:
        self.came += 1

    def __exit__(self, *reason: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)


def run_trials(
    folder: Path,
    variants: Sequence[Variant],
    ended: list[Ended],
    repeats: int,
    say: Callable[[str], object],
    note: Callable[[], object],
    stopping: Stopping,
) -> None:
    """Run every trial that is not finished, until all are or a signal comes.

    A variant that fails is not tried again in this call, but in the next one.

    Args:
        ended: how trials ended, which grows.
        note: called whenever it has.
    """
    able = [place for place, variant in enumerate(variants) if variant.plan is not None]
    recipes = {place: recipe_path(folder, place, variants[place].label) for place in able}
    for place, path in recipes.items():
        text = tomli_w.dumps(variants[place].job.model_dump(mode="json"))
        told = f"{variants[place].label!a}, of the recipe {variants[place].recipe!a}"
        replace_text(path, f"# A variant that weft compares: {told}.\n\n{text}")
    trials = order(able, repeats)
    done = {(each.repeat, each.variant) for each in ended if each.status == 0}
    failed: set[int] = set()
    for number, (repeat, variant) in enumerate(trials, 1):
        if (repeat, variant) in done or variant in failed:
            continue
        if stopping.asked():
            return
        label = variants[variant].label
        open_ = [v for r, v in trials[number - 1 :] if (r, v) not in done and v not in failed]
        left = time_left(open_, ended)
        say(f"trial {number} of {len(trials)}: {label}, repeat {repeat}{left}")
        seed = seed_of(variants, variant, repeat)
        run = trial_folder(folder, variant, label, repeat)
        if not checkpoints(run / "checkpoints"):
            shutil.rmtree(run, ignore_errors=True)  # of one that was cut off: nothing to go on from
        one = train(recipes[variant], run, seed, stopping)
        if stopping.asked() and one[0]:
            return  # unfinished, but not by its own fault
        ended[:] = [e for e in ended if (e.repeat, e.variant) != (repeat, variant)]
        ended.append(Ended(variant, repeat, *one))
        if ended[-1].status:
            failed.add(variant)
            say(f"  failed: {ended[-1].reason}")
        note()


def time_left(trials: Sequence[int], ended: Sequence[Ended]) -> str:
    """What the trials of these variants will take, by those that are done."""
    seconds = [
        [e.seconds for e in ended if e.status == 0 and e.variant == v]
        or [e.seconds for e in ended if e.status == 0]
        for v in trials
    ]
    if not all(seconds):
        return ""
    return f", about {duration(sum(sum(some) / len(some) for some in seconds))} left"


def train(recipe: Path, run: Path, seed: int, stopping: Stopping) -> tuple[int, str, float]:
    """One ``weft train``; its exit status, why it failed, and the seconds that it took.

    A signal goes on to it: it finishes its step and saves, or ends at once at the second one.
    """
    command = [sys.executable, "-P", "-m", "weft.cli", "train", str(recipe)]
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


def stored(
    variants: Sequence[Variant], ended: Sequence[Ended], looks: Sequence[int]
) -> dict[str, Any]:
    """What `open_comparison` reads again."""
    return {
        "compared": [variant.identity() for variant in variants],
        "ended": [asdict(each) for each in ended],
        "looks": list(looks),
    }
