"""Check a job before it starts: files, names, directories, and its earlier run.

`weft.plan` has the rules about layouts; this module has the checks that need the file system.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace as changed
from itertools import chain
from pathlib import Path

from weft.checkpoint.manifest import (
    DamagedCheckpoint,
    checkpoint_step,
    list_checkpoints,
    read_manifest,
)
from weft.checkpoint.storage import open_directory
from weft.config.errors import ConfigError, InvalidConfig, lookup, suggest
from weft.config.files import check_url
from weft.config.reader import read_job
from weft.config.schema import CheckpointSection, Job, difference, replace
from weft.data.dataset import Dataset
from weft.data.loader import check_length
from weft.data.packing import check_conversations
from weft.data.prepare import check_chat
from weft.data.source import STDLIB, check_path, is_user_function
from weft.data.tokenizer import load_tokenizer, required_vocab_size
from weft.models import expand_preset
from weft.monitor.faults import SITES
from weft.monitor.trackers import SINKS
from weft.optim.optimizer import OPTIMIZERS, SCHEDULES
from weft.plan.pipeline_schedule import is_schedule_file
from weft.plan.plan import Plan
from weft.plan.resolve import resolve_nodes
from weft.train.environment import apply_environment
from weft.train.loss import OBJECTIVES
from weft.train.machine import detect_machine, is_launched_rank
from weft.train.state import checkpoint_dir

# Keys that a run cannot change: its weights or its data order depend on them.
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
# Keys that imported weights depend on, before the first step.
FIXED_AT_0 = ("model.", "data.tokenizer")
# Trackers whose package weft does not install.
TRACKERS = ("wandb", "mlflow")


def prepare_job(
    recipe: str, overrides: list[tuple[str, str]], problems: Iterable[ConfigError] = ()
) -> tuple[Job, Plan]:
    """Read, check and plan a job.

    Args:
        recipe: name or path of the recipe.
        overrides: keys and values of the command line.
        problems: errors that the command line already has.

    Returns:
        The recipe without the overrides; the plan, whose job has absolute paths and the final
        ``run.dir``.

    Raises:
        InvalidConfig: with every mistake in the recipe, the overrides, the plan and the files.
    """
    job, base, read_problems = read_job(recipe, overrides)
    problems = [*problems, *read_problems]
    if any(problem.key in ("recipe", "extends") for problem in problems):
        raise InvalidConfig(problems)  # other checks would judge defaults
    job, base = _absolute_paths(job), _absolute_paths(base)
    bad = {problem.key for problem in problems}
    plan = None
    later: list[ConfigError] = []
    try:
        plan = resolve_nodes(apply_environment(job), detect_machine(job.run), recipe, base)
    except InvalidConfig as error:
        later += error.problems
    found = chain(_check_files(job), _check_tokenizer(job.data.tokenizer, plan))
    later += {str(problem): problem for problem in found}.values()
    if plan is not None:
        job = replace(job, run={"dir": plan.run_dir})
    later += _check_restarts(job.resilience.time_limit)
    unreachable = list(_check_checkpoint_dir(job.checkpoint.dir))
    later += unreachable
    if job.run.dir != "auto" and "://" not in job.run.dir:
        later += _check_run_dir(job, bool(unreachable))
    # Leave out errors that only follow from a reported one.
    problems += [p for p in later if p.key not in bad and not bad.intersection(p.depends)]
    if problems or plan is None:
        raise InvalidConfig(problems)
    return base, dataclasses.replace(plan, job=job)


def _absolute_paths(job: Job) -> Job:
    """Make paths absolute, so that job.toml means the same in any directory."""

    def full(value: str, word: str) -> str:
        if value == word or "://" in value:
            return value
        try:
            return str(Path(value).expanduser().absolute())
        except RuntimeError:  # ~name without such a user: an ordinary name
            return str(Path(value).absolute())

    def data(value: str) -> str:
        return value if is_user_function(value) else full(value, STDLIB)

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


def _check_files(job: Job) -> Iterator[ConfigError]:
    if not job.data.is_mixture:
        yield from check_path(job.data.path)
    elif job.data.path != STDLIB:
        remedy = "list all sources in data.mixture, or set one data.path"
        yield ConfigError("data.path", job.data.path, "is ignored if data.mixture is set", remedy)
    for path in job.data.mixture:
        yield from (changed(p, key="data.mixture") for p in check_path(path))
    yield from check_chat(job.data)
    if job.data.cache_dir != "auto":
        yield from check_writable("data.cache_dir", job.data.cache_dir)
    if job.compile.enable:
        yield from check_writable(
            "compile.cache_dir", str(Path(job.compile.cache_dir).expanduser())
        )
    if job.checkpoint.saves_locally:
        yield from check_writable("checkpoint.local_dir", job.checkpoint.local_dir)
    for key, value in (
        ("run.dir", job.run.dir),
        ("data.cache_dir", job.data.cache_dir),
        ("checkpoint.local_dir", job.checkpoint.local_dir),
    ):
        if "://" in value:
            remedy = "use a local directory; only checkpoint.dir may be s3://bucket/prefix"
            yield ConfigError(key, value, "is not a directory", remedy)
    yield from check_names(job)


def _check_tokenizer(value: str, plan: Plan | None) -> Iterator[ConfigError]:
    """Yield errors of ``data.tokenizer``, and of the vocabulary if there is a plan."""
    if value == "train":
        return
    try:
        tokenizer, _ = load_tokenizer(value)
    except InvalidConfig as error:
        yield from error.problems
    else:
        if plan is not None:
            yield from _check_vocabulary(plan, required_vocab_size(tokenizer))


def _check_restarts(limit: float) -> Iterator[ConfigError]:
    """Refuse a time limit that torchrun would answer by a restart.

    torchrun takes every status but 0 for a failure, and 0 means that all steps are done.
    """
    if limit and is_launched_rank() and int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")):
        rule = "makes torchrun restart the ranks when they have saved and exited"
        remedy = "use torchrun --max-restarts 0, or start the ranks with weft train"
        yield ConfigError("resilience.time_limit", limit, rule, remedy)


def _check_checkpoint_dir(value: str) -> Iterator[ConfigError]:
    key = "checkpoint.dir"
    if "://" not in value:
        if value != "auto":
            yield from check_writable(key, value)
    elif problems := check_url(key, value):
        yield from problems
    else:
        try:
            open_directory(value).exists()
        except Exception as error:  # the client of the object store may raise anything
            rule = f"cannot be reached: {type(error).__name__}: {error}"
            yield ConfigError(key, value, rule, "check AWS_ENDPOINT_URL, AWS_PROFILE and ~/.aws")


def check_names(job: Job) -> Iterator[ConfigError]:
    """Check that every optimizer, schedule, objective, tracker and fault site exists."""
    if job.resilience.has_replica_groups and importlib.util.find_spec("torchft") is None:
        rule, remedy = "needs torchft", "run pip install 'weft[torchft]'"
        yield ConfigError("resilience.lighthouse", job.resilience.lighthouse, rule, remedy)
    if importlib.util.find_spec("torchao") is None:
        rule, remedy = "needs torchao", "run pip install 'weft[torchao]'"
        if (recipe := job.precision.float8) != "none":
            yield ConfigError("precision.float8", recipe, rule, remedy)
    for name in TRACKERS:
        if name in job.monitor.trackers and importlib.util.find_spec(name) is None:
            yield ConfigError(
                "monitor.trackers", name, f"needs {name}", f"run pip install 'weft[{name}]'"
            )
    for fault in job.resilience.faults:
        if fault.site not in SITES:
            rule, remedy = "is not a fault site", suggest(fault.site, SITES)
            yield ConfigError("resilience.faults", fault.site, rule, remedy)
        elif fault.kind in ("corrupt", "nan", "flip") and fault.site != "gradients":
            rule = f"has no tensors for kind {fault.kind}"
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


def _check_vocabulary(plan: Plan, entries: int) -> Iterator[ConfigError]:
    job = plan.job
    if entries > plan.model.vocab_size:
        rule = f"has {entries} entries, but model.vocab_size is {plan.model.vocab_size}"
        remedy = f"use --model.vocab_size {-(-entries // 128) * 128}, or another tokenizer"
        yield ConfigError("data.tokenizer", job.data.tokenizer, rule, remedy)


def check_writable(key: str, value: str) -> Iterator[ConfigError]:
    """Check that a path can be written, with a hidden file in its nearest parent."""
    try:
        with suppress(FileNotFoundError, NotADirectoryError):
            os.lstat(value)  # a name that is too long is seen here
        above = next(path for path in (Path(value), *Path(value).parents) if os.path.lexists(path))
        tempfile.TemporaryFile(dir=above).close()
    except OSError as error:
        rule = f"cannot be written: {error.strerror}: {error.filename or value}"
        yield ConfigError(key, value, rule, "use another directory")


def _check_run_dir(job: Job, unreachable: bool) -> Iterator[ConfigError]:
    """Check that the run directory is writable, and that a run in it is this run."""
    folder = Path(job.run.dir)
    wrong = list(check_writable("run.dir", job.run.dir))
    yield from wrong
    before = folder / "job.toml"
    if wrong or unreachable:
        return
    if not (found := list_checkpoints(checkpoint_dir(job.checkpoint, folder))):
        here = list_checkpoints(checkpoint_dir(CheckpointSection(), folder))
        if here and before.is_file():  # else the run would start from random weights
            rule = f"has no checkpoint of the run; they are in {here[0].parent}"
            remedy = "copy them to checkpoint.dir, or remove the key"
            yield ConfigError("checkpoint.dir", job.checkpoint.dir, rule, remedy)
        return
    if not before.is_file() and job.resilience.has_replica_groups:
        return  # the checkpoints are another replica group's
    if not before.is_file():
        rule = "has checkpoints but no job.toml, so they may belong to another run"
        yield ConfigError("run.dir", job.run.dir, rule, "use another run.dir, or restore job.toml")
        return
    old, _, problems = read_job(str(before))
    if problems:
        rule = f"has a damaged job.toml: {changed(problems[0], remedy='')}"
        yield ConfigError("run.dir", job.run.dir, rule, "use another run.dir, or repair the file")
        return
    fixed = FIXED if checkpoint_step(found[-1]) else FIXED_AT_0
    for name, (ours, theirs) in difference(expand_preset(job), expand_preset(old)).items():
        if name.startswith(fixed):
            rule = f"differs from the run in {folder}, which was started with {theirs}"
            remedy = f"use another run.dir, or {name}={theirs}"
            yield ConfigError(name, ours, rule, remedy)


def check_text(plan: Plan, text: Dataset) -> None:
    """Check that the data fits the model, and is the data of the newest checkpoint.

    Raises:
        InvalidConfig: if the data has no full sequence, if the vocabulary of the model is too
            small, or if the newest checkpoint was trained on other data.
    """
    job = plan.job
    problems = list(_check_vocabulary(plan, text.vocab_size))
    for source in text.sources:
        what = f"the training set of {source.name}" if job.data.is_mixture else "the training set"
        tokens = source.store.manifest.train.tokens
        if source.store.manifest.kind == "text":
            problems += check_length(tokens, plan.seq_len, what)
        problems += check_conversations(source.store, plan.seq_len, job.data)
    for path in reversed(list_checkpoints(checkpoint_dir(job.checkpoint, Path(plan.run_dir)))):
        try:
            data = read_manifest(path).get("data")
        except DamagedCheckpoint:
            continue  # loading reports it
        if data not in (None, text.fingerprint):  # imported weights have no fingerprint of data
            rule = f"is not the data that {path} was trained on, or has changed since"
            key = "mixture" if job.data.is_mixture else "path"
            value = getattr(job.data, key)
            problems.append(ConfigError(f"data.{key}", value, rule, "use another run.dir"))
        break
    if problems:
        raise InvalidConfig(problems)
