"""What is wrong with a job, as far as it can be known before anything starts."""

from __future__ import annotations

import importlib
import importlib.util
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace as changed
from pathlib import Path

from weft.checkpoint.manifest import (
    DamagedCheckpoint,
    checkpoint_step,
    checkpoints,
    read_manifest,
)
from weft.checkpoint.storage import open_folder
from weft.config.errors import ConfigError, InvalidConfig, suggest
from weft.config.files import check_url
from weft.config.reader import lookup, read_job
from weft.config.schema import Job, difference, replace
from weft.data.conversations import check_chat
from weft.data.dataset import Dataset
from weft.data.loader import check_length
from weft.data.packing import check_conversations
from weft.data.source import STDLIB, check_path
from weft.data.tokenizer import load_tokenizer, vocab_entries
from weft.data.user_source import is_own
from weft.models import spelled_out
from weft.monitor.faults import SITES
from weft.monitor.trackers import SINKS
from weft.optim.optimizer import OPTIMIZERS
from weft.optim.schedule import SCHEDULES
from weft.plan.pipeline_schedule import is_schedule_file
from weft.plan.resolve import Plan, resolve_nodes
from weft.train.environment import apply_environment
from weft.train.objectives import OBJECTIVES
from weft.train.setup import detect_machine, joined
from weft.train.state import checkpoint_dir

# Keys that a run cannot change half-way: its weights, or its place in the data, hang on them.
FIXED = (
    "model.",
    "lora.",
    "train.seed",
    "train.seq_len",
    "train.objective",
    "data.format",
    "data.packing",
    "data.overlong",
    "optim.name",
)
# Before the first step of a run on imported weights, only what those hang on.
FIXED_AT_0 = ("model.", "data.tokenizer")
# What sinks need that weft does not bring.
TRACKERS = ("wandb", "mlflow")


def prepare_job(
    recipe: str, overrides: list[tuple[str, str]], problems: Iterable[ConfigError] = ()
) -> tuple[Job, Job, Plan]:
    """Read, check and plan a job.

    Args:
        recipe, overrides: see `read_job`.
        problems: what was wrong with the command line already.

    Returns:
        The job with absolute paths and its final ``run.dir``; the recipe without the overrides;
        the plan.

    Raises:
        InvalidConfig: with every mistake in the recipe, the overrides, the plan and the files.
    """
    job, base, found = read_job(recipe, overrides)
    problems = [*problems, *found]
    if any(problem.key in ("recipe", "extends") for problem in problems):
        raise InvalidConfig(problems)  # the rest would judge defaults that nobody chose
    job, base = _complete(job), _complete(base)
    bad = {problem.key for problem in problems}
    plan = None
    later: list[ConfigError] = []
    try:
        plan = resolve_nodes(apply_environment(job), detect_machine(job.run.device), recipe, base)
    except InvalidConfig as error:
        later += error.problems
    later += {str(found): found for found in _check_files(job, plan)}.values()
    if plan is not None:
        job = replace(job, run={"dir": plan.run_dir})
    later += _check_restarts(job.resilience.time_limit)
    unreachable = list(_check_home(job.checkpoint.dir))
    later += unreachable
    if job.run.dir != "auto" and "://" not in job.run.dir:
        later += _check_run_dir(job, bool(unreachable))
    # What only echoes a mistake that is already listed is left out.
    problems += [p for p in later if p.key not in bad and not bad.intersection(p.depends)]
    if problems or plan is None:
        raise InvalidConfig(problems)
    return job, base, plan


def _complete(job: Job) -> Job:
    """Paths made absolute, so that job.toml means the same from any folder."""

    def full(value: str, word: str) -> str:
        if value == word or "://" in value:
            return value
        try:
            return str(Path(value).expanduser().absolute())
        except RuntimeError:  # ~name of nobody: an ordinary name, then
            return str(Path(value).absolute())

    def data(value: str) -> str:
        return value if is_own(value) else full(value, STDLIB)

    schedule = job.pipeline.schedule
    return replace(
        job,
        run={"dir": full(job.run.dir, "auto")},
        data={
            "path": data(job.data.path),
            "mixture": {data(path): weight for path, weight in job.data.mixture.items()},
            "tokenizer": full(job.data.tokenizer, "train"),
            "chat_template": full(job.data.chat_template, "auto"),
            "cache_dir": full(job.data.cache_dir, "auto"),
        },
        checkpoint={
            "dir": full(job.checkpoint.dir, "auto"),
            "local_dir": full(job.checkpoint.local_dir, "off"),
        },
        pipeline={"schedule": full(schedule, "" if is_schedule_file(schedule) else schedule)},
    )


def _check_files(job: Job, plan: Plan | None) -> Iterator[ConfigError]:
    if not job.data.mixture:
        yield from check_path(job.data.path)
    elif job.data.path != STDLIB:
        remedy = "name all texts in data.mixture, or one in data.path"
        yield ConfigError("data.path", job.data.path, "is not read beside data.mixture", remedy)
    for path in job.data.mixture:
        yield from (changed(p, key="data.mixture") for p in check_path(path))
    yield from check_chat(job.data)
    if job.data.cache_dir != "auto":
        yield from check_writable("data.cache_dir", job.data.cache_dir)
    if job.compile.enable:
        yield from check_writable(
            "compile.cache_dir", str(Path(job.compile.cache_dir).expanduser())
        )
    if job.checkpoint.local_dir != "off":
        yield from check_writable("checkpoint.local_dir", job.checkpoint.local_dir)
    for key, value in (
        ("run.dir", job.run.dir),
        ("data.cache_dir", job.data.cache_dir),
        ("checkpoint.local_dir", job.checkpoint.local_dir),
    ):
        if "://" in value:
            remedy = "use a folder; only checkpoint.dir may be s3://bucket/prefix"
            yield ConfigError(key, value, "is no folder", remedy)
    if job.data.tokenizer != "train":
        try:
            tokenizer, _ = load_tokenizer(job.data.tokenizer)
        except InvalidConfig as error:
            yield from error.problems
        else:
            if plan is not None:
                yield from _check_vocabulary(job, plan, vocab_entries(tokenizer))
    yield from check_names(job)


def _check_restarts(limit: float) -> Iterator[ConfigError]:
    """For torchrun every status but 0 is a failure, and 'saved' must not be 0, which means done."""
    if limit and joined() and int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")):
        rule = "torchrun would start the ranks again as soon as they have saved and ended"
        remedy = "use torchrun --max-restarts 0, or let weft train start the ranks"
        yield ConfigError("resilience.time_limit", limit, rule, remedy)


def _check_home(value: str) -> Iterator[ConfigError]:
    key = "checkpoint.dir"
    if "://" not in value:
        if value != "auto":
            yield from check_writable(key, value)
    elif problems := check_url(key, value):
        yield from problems
    else:
        try:
            open_folder(value).exists()
        except Exception as error:  # whatever the client of the store raises
            rule = f"cannot be reached: {type(error).__name__}: {error}"
            yield ConfigError(key, value, rule, "see AWS_ENDPOINT_URL, AWS_PROFILE, ~/.aws")


def check_names(job: Job) -> Iterator[ConfigError]:
    """Does everything exist that the job calls by name?  Of files only modules are looked at."""
    if job.resilience.lighthouse != "none" and importlib.util.find_spec("torchft") is None:
        rule, remedy = "needs torchft", "pip install 'weft[torchft]'"
        yield ConfigError("resilience.lighthouse", job.resilience.lighthouse, rule, remedy)
    if importlib.util.find_spec("torchao") is None:
        rule, remedy = "needs torchao", "pip install 'weft[torchao]'"
        if (recipe := job.precision.float8) != "none":
            yield ConfigError("precision.float8", recipe, rule, remedy)
    for name in TRACKERS:
        if name in job.monitor.trackers and importlib.util.find_spec(name) is None:
            yield ConfigError(
                "monitor.trackers", name, f"needs {name}", f"pip install 'weft[{name}]'"
            )
    for fault in job.resilience.faults:
        if fault.site not in SITES:
            rule, remedy = f"no site is called {fault.site!r}", suggest(fault.site, SITES)
            yield ConfigError("resilience.faults", fault.site, rule, remedy)
        elif fault.kind in ("corrupt", "nan", "flip") and fault.site != "gradients":
            rule = f"has no tensors for a fault of kind {fault.kind}"
            yield ConfigError("resilience.faults", fault.site, rule, "use site gradients")
    named: list[tuple[str, str, Mapping[str, object]]] = [
        ("optim.name", job.optim.name, OPTIMIZERS),
        ("optim.schedule", job.optim.schedule, SCHEDULES),
        ("train.objective", job.train.objective, OBJECTIVES),
        *(("monitor.trackers", sink, SINKS) for sink in job.monitor.trackers),
    ]
    for name, value, table in named:
        try:
            lookup(value, table)
        except LookupError as error:
            yield ConfigError(name, value, str(error), suggest(value, table))


def _check_vocabulary(job: Job, plan: Plan, entries: int) -> Iterator[ConfigError]:
    if entries > plan.model.vocab_size:
        rule = f"has {entries} entries, more than vocab_size = {plan.model.vocab_size} of the model"
        remedy = f"use --model.vocab_size {-(-entries // 128) * 128}, or another tokenizer"
        yield ConfigError("data.tokenizer", job.data.tokenizer, rule, remedy)


def check_writable(key: str, value: str) -> Iterator[ConfigError]:
    """Nothing is made: the probe, which is never visible, goes into the folder above."""
    try:
        with suppress(FileNotFoundError, NotADirectoryError):
            os.lstat(value)  # a name that is too long is seen here
        above = next(path for path in (Path(value), *Path(value).parents) if os.path.lexists(path))
        tempfile.TemporaryFile(dir=above).close()
    except OSError as error:
        rule = f"cannot be written: {error.strerror}: {error.filename or value}"
        yield ConfigError(key, value, rule, "use another folder")


def _check_run_dir(job: Job, unreachable: bool) -> Iterator[ConfigError]:
    """Is the run's folder writable, and is the run in it, whose checkpoints may be, the same?"""
    folder = Path(job.run.dir)
    wrong = list(check_writable("run.dir", job.run.dir))
    yield from wrong
    before = folder / "job.toml"
    if wrong or unreachable:
        return
    if not (found := checkpoints(checkpoint_dir(job.checkpoint.dir, folder))):
        here = checkpoints(checkpoint_dir("auto", folder))
        if here and before.is_file():  # imported, or moved: it would start from random weights
            rule = f"has none of the run's checkpoints, which are in {here[0].parent}"
            remedy = "copy them there first, or leave checkpoint.dir out"
            yield ConfigError("checkpoint.dir", job.checkpoint.dir, rule, remedy)
        return
    if not before.is_file() and job.resilience.lighthouse != "none":
        return  # they are another replica group's
    if not before.is_file():
        rule = "holds checkpoints but no job.toml: whether they are this run's cannot be told"
        yield ConfigError(
            "run.dir", job.run.dir, rule, "use another --run.dir, or put the file back"
        )
        return
    old, _, problems = read_job(str(before))
    if problems:
        rule = f"holds a run whose job.toml is damaged ({problems[0]})"
        yield ConfigError("run.dir", job.run.dir, rule, "use another --run.dir, or mend the file")
        return
    fixed = FIXED if checkpoint_step(found[-1]) else FIXED_AT_0
    for name, (ours, theirs) in difference(spelled_out(job), spelled_out(old)).items():
        if name.startswith(fixed):
            rule = f"the run in {folder} was started with {theirs}"
            remedy = "use another --run.dir, or the value that it was started with"
            yield ConfigError(name, ours, rule, remedy)


def check_text(job: Job, plan: Plan, text: Dataset) -> None:
    """The text must fit the model, and be the one that the run has been trained on so far.

    Raises:
        InvalidConfig: if the text has no whole sequence, the model too few entries, or the newest
            checkpoint another text.
    """
    problems = list(_check_vocabulary(job, plan, text.vocab_size))
    for source in text.sources:
        what = f"the train text of {source.name}" if job.data.mixture else "the train text"
        tokens = source.store.manifest.train.tokens
        if source.store.manifest.kind == "text":
            problems += check_length(tokens, job.train.seq_len, what)
        problems += check_conversations(source.store, job.train.seq_len, job.data)
    for path in reversed(checkpoints(checkpoint_dir(job.checkpoint.dir, Path(plan.run_dir)))):
        try:
            data = read_manifest(path).get("data")
        except DamagedCheckpoint:
            continue  # loading will tell
        if data not in (None, text.fingerprint):  # imported weights have seen no text of ours
            rule = f"is not, or no longer, the text that {path} was trained on"
            key = "mixture" if job.data.mixture else "path"
            value = getattr(job.data, key)
            problems.append(ConfigError(f"data.{key}", value, rule, "use another --run.dir"))
        break
    if problems:
        raise InvalidConfig(problems)
