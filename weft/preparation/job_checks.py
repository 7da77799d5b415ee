"""Check a job before it starts: files, names, directories, and its earlier run.

`weft.planning` has the rules about layouts; this module has the checks that need the file system.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import math
import os
import shlex
import tempfile
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import replace as changed
from pathlib import Path

from weft.checkpoint.manifest import (
    CheckpointError,
    DamagedCheckpoint,
    checkpoint_step,
    list_checkpoints,
    read_manifest,
)
from weft.checkpoint.owner import owner_errors
from weft.checkpoint.run_fingerprints import check_run_files
from weft.config.errors import MISSING, ConfigError, ConfigErrors, InvalidConfig, lookup, suggest
from weft.config.files import check_url, expand_path
from weft.config.formatting import format_count, format_value
from weft.config.locks import NO_LOCKS_REMEDY, LocksMissing, try_lock
from weft.config.mounts import check_mount
from weft.config.reader import read_job
from weft.config.run_paths import JOB_FILE
from weft.config.schema import (
    ADAPTER_KEYS,
    CheckpointSection,
    DataSection,
    Job,
    difference,
    replace,
)
from weft.config.storage import check_store_writable, is_bucket_url, open_directory
from weft.data.conversations import check_conversations
from weft.data.dataset import Dataset
from weft.data.document_tokens import read_start_tokens
from weft.data.loader import build_mixture
from weft.data.prepare import check_chat
from weft.data.source import STDLIB, STORIES, check_path, is_user_function
from weft.data.tokenizer import load_tokenizer, required_vocab_size
from weft.monitor.faults import SITES
from weft.monitor.trackers import SINKS
from weft.optim.optimizer import OPTIMIZERS, SCHEDULES
from weft.parallel.dispatchers import DISPATCHERS
from weft.planning.model_config import (
    HUB_NAME,
    REQUIRED,
    Adopt,
    adopt_model,
    expand_preset,
    read_imported,
)
from weft.planning.needs import key_facts
from weft.planning.plan import Plan, is_schedule_file
from weft.planning.plan_warnings import warmup_warnings
from weft.planning.resolve import resolve_nodes
from weft.planning.vocabulary import new_tokens
from weft.preparation.environment import apply_environment, is_agent_rank, is_log_node
from weft.training.loss import OBJECTIVES, build_objective
from weft.training.machine import detect_machine, is_launched_rank
from weft.training.run_dir import MAX_EPOCHS
from weft.training.state import checkpoint_dir

# Directories that only one process may write to.
LOCKED_DIRECTORIES = ("run.dir", "data.cache_dir", "data.node_cache_dir")
# Trackers whose package weft does not install.
TRACKERS = ("wandb", "mlflow")


# Parameters from which a model needs data and a tokenizer of the user's: the text that weft finds
# or makes itself has a few million tokens.
LARGE_MODEL = 100_000_000


def prepare_job(
    recipe: str,
    overrides: list[tuple[str, str]],
    cli_errors: Iterable[ConfigError] = (),
    adopt: Adopt = adopt_model,
) -> tuple[Job, Plan]:
    """Read, check and plan a job.

    Args:
        recipe: name or path of the recipe.
        overrides: keys and values of the command line.
        cli_errors: errors that the command line already has.
        adopt: see `weft.planning.resolve.resolve`.

    Returns:
        The recipe without the overrides; the plan, whose job has absolute paths and the final
        ``run.dir``.

    Raises:
        InvalidConfig: with every mistake in the recipe, the overrides, the plan and the files.
    """
    job, base, errors = read_job(recipe, overrides, cli_errors)
    errors.raise_any("recipe", "extends")  # without a recipe there are only defaults to check
    job, base = absolute_paths(job), absolute_paths(base)
    plan = None
    later = ConfigErrors(job)
    with later.collect():
        # Before the machine, which counts ranks: this makes a process of srun or mpirun a rank.
        planned = apply_environment(job)
        plan = resolve_nodes(planned, detect_machine(job.run), recipe, base, adopt)
    if plan is not None:  # with the model of model.path
        model, lora = plan.job.model.model_dump(), plan.lora.model_dump()
        data = {"tokenizer": plan.job.data.tokenizer}
        job = replace(job, model=model, lora=lora, data=data, train={"seq_len": plan.seq_len})
        base = replace(base, model=model | {"path": base.model.path})
        if job.lora.path:
            base = replace(base, lora={name: lora[name] for name in ADAPTER_KEYS})
    _check_files(later, job)
    _check_tokenizer(later, job.data, plan)
    if plan is not None:
        later += check_data_is_named(plan)
        job = replace(job, run={"dir": plan.run_dir})
    later += check_logins(job)
    _check_restarts(later, job.resilience.time_limit)
    is_reachable = _check_checkpoint_dir(later, job.checkpoint.dir)
    is_unknown = bool(job.model.path) and job.data.trains_tokenizer  # the model cannot be read
    if is_unknown:
        later[:] = [error for error in later if error.key != "data.tokenizer"]
    elif job.run.dir != "auto" and "://" not in job.run.dir:
        has_nodes = plan is not None and plan.world_size > plan.local_world_size
        later += _check_run_dir(job, is_reachable, has_nodes)
    # Leave out errors that only follow from a reported one.
    errors.add_independent({str(error): error for error in later}.values())
    if errors or plan is None:
        raise InvalidConfig(errors)
    return base, dataclasses.replace(plan, job=job)


def check_data_is_named(plan: Plan) -> ConfigErrors:
    """Return errors if a large model would train on weft's own text or tokenizer."""
    data, errors = plan.job.data, ConfigErrors(plan.job)
    if plan.num_params < LARGE_MODEL:
        return errors
    size = f"{format_count(plan.num_params)} parameters"
    if data.path in (STDLIB, STORIES) and not data.mixture:
        rule = f"is a text of about 10 MB for trials, too little for a model of {size}"
        errors.add("data.path", rule, "name your data: a file, a directory, or hf://NAME")
    if data.tokenizer == "train" and 2 * data.vocab_size < plan.model.vocab_size:
        rule = f"would train a tokenizer of {data.vocab_size:,} tokens, but the model has "
        rule += f"{plan.model.vocab_size:,}"
        errors.add("data.tokenizer", rule, "use the path of the model's tokenizer.json")
    return errors


def absolute_paths(job: Job) -> Job:
    """Make paths absolute, so that job.toml means the same in any directory."""

    def full(value: str, word: str) -> str:
        if value == word or "://" in value:
            return value
        return str(expand_path(value).absolute())

    def data(value: str) -> str:
        return value if is_user_function(value) else full(value, STDLIB)

    def model_path(value: str) -> str:
        is_local = value != REQUIRED and expand_path(value).exists()
        is_name = value == REQUIRED or HUB_NAME.fullmatch(value)
        return full(value, "") if is_local or not is_name else value

    schedule = job.pipeline.schedule
    return replace(
        job,
        run={"dir": full(job.run.dir, "auto")},
        model={"path": model_path(job.model.path)},
        lora={"path": model_path(job.lora.path)},
        data={
            "path": data(job.data.path),
            "mixture": {data(path): weight for path, weight in job.data.mixture.items()},
            "validation_path": job.data.validation_path and data(job.data.validation_path),
            "tokenizer": full(job.data.tokenizer, "train"),
            "chat_template": full(job.data.chat_template, "auto"),
            "cache_dir": full(job.data.cache_dir, "auto"),
            "node_cache_dir": full(job.data.node_cache_dir, "auto"),
        },
        checkpoint={
            "dir": full(job.checkpoint.dir, "auto"),
            "local_dir": full(job.checkpoint.local_dir, "off"),
        },
        pipeline={"schedule": full(schedule, "" if is_schedule_file(schedule) else schedule)},
    )


def _check_files(errors: ConfigErrors, job: Job) -> None:
    data = job.data
    if not data.is_mixture:
        errors += check_path(data.path)
    elif data.path != STDLIB:
        remedy = "list all sources in data.mixture, or set one data.path"
        errors.add("data.path", "is ignored if data.mixture is set", remedy)
    for path in data.mixture:
        errors += [changed(error, key="data.mixture") for error in check_path(path)]
    if data.validation_path:
        found = check_path(data.validation_path)
        errors += [changed(error, key="data.validation_path") for error in found]
        if data.validation_path in data.sources:
            rule = "is also training data, so the validation loss would mean nothing"
            errors.add("data.validation_path", rule, "name other data, or remove it")
    errors += check_chat(data)
    for name in ("cache_dir", "node_cache_dir"):
        value = getattr(data, name)
        if value != "auto" and "://" not in value:
            errors += check_writable(f"data.{name}", value)
    if "://" in data.cache_dir:
        errors += check_bucket_url("data.cache_dir", data.cache_dir)
    if job.compile.enable:
        compile_cache = str(expand_path(job.compile.cache_dir))
        errors += check_writable("compile.cache_dir", compile_cache)
    if job.checkpoint.saves_locally:
        errors += check_writable("checkpoint.local_dir", job.checkpoint.local_dir)
    for key, value in (
        ("run.dir", job.run.dir),
        ("data.node_cache_dir", data.node_cache_dir),
        ("checkpoint.local_dir", job.checkpoint.local_dir),
    ):
        if "://" in value:
            remedy = "use a local directory; checkpoint.dir and data.cache_dir may be s3://"
            errors.add(key, "is not a directory", remedy)
    errors += check_names(job)


def _check_tokenizer(errors: ConfigErrors, data: DataSection, plan: Plan | None) -> None:
    """Check ``data.tokenizer``, and the vocabulary if there is a plan."""
    value = data.tokenizer
    if data.trains_tokenizer:
        return
    if found := check_tokenizer_run(value):
        errors += found
        return
    with errors.collect():
        tokenizer, _ = load_tokenizer(value, new_tokens(data))
        if plan is not None:
            _check_vocabulary(errors, plan, required_vocab_size(tokenizer))


def check_tokenizer_run(tokenizer: str) -> list[ConfigError]:
    """Check the files beside a tokenizer, if it is that of a run with checkpoints."""
    run_dir = expand_path(tokenizer).parent
    if not (run_dir / JOB_FILE).is_file():
        return []
    job, _, errors = read_job(str(run_dir / JOB_FILE))
    home = run_dir if errors else checkpoint_dir(job.checkpoint, run_dir)
    with suppress(CheckpointError):  # loading reports it
        for newest in list_checkpoints(home)[-1:]:
            return check_run_files(newest, run_dir, job, to_train=True)
    return []


def _check_restarts(errors: ConfigErrors, limit: float) -> None:
    """Refuse a time limit that a launcher would answer by a restart.

    torchrun and the agent of HyperPod take every status but 0 for a failure, and 0 means that all
    steps are done.
    """
    if limit and is_launched_rank() and int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")):
        launcher = "torchrun"
        remedy = "use torchrun --max-restarts 0, or start the ranks with weft train"
        if is_agent_rank(os.environ):
            launcher = "the operator of HyperPod"
            remedy = "use 0, and runPolicy.activeDeadlineSeconds of the HyperPodPyTorchJob"
        rule = f"makes {launcher} restart the ranks when they have saved and exited"
        errors.add("resilience.time_limit", rule, remedy)


def _check_checkpoint_dir(errors: ConfigErrors, value: str) -> bool:
    """Check ``checkpoint.dir``; return True if it can be used."""
    key, num_errors = "checkpoint.dir", len(errors)
    if "://" not in value:
        errors += check_writable(key, value) if value != "auto" else []
    elif url_errors := [*check_url(key, value), *check_store_writable(key, value)]:
        errors += url_errors
    else:
        try:
            open_directory(value).exists()
        except InvalidConfig as invalid:
            errors.add(key, invalid.errors[0].rule, invalid.errors[0].remedy)
        except Exception as error:  # the client of the object store may raise anything
            rule = f"cannot be reached: {type(error).__name__}: {error}"
            errors.add(key, rule, "check AWS_ENDPOINT_URL, AWS_PROFILE and ~/.aws")
    return len(errors) == num_errors


def check_names(job: Job) -> ConfigErrors:
    """Check that every optimizer, schedule, objective, tracker and fault site exists."""
    errors = ConfigErrors(job)
    if job.resilience.has_replica_groups and importlib.util.find_spec("torchft") is None:
        errors.add("resilience.lighthouse", "needs torchft", "run pip install 'weft[torchft]'")
    if job.precision.float8 != "none" and importlib.util.find_spec("torchao") is None:
        errors.add("precision.float8", "needs torchao", "run pip install 'weft[torchao]'")
    key = "monitor.trackers"
    for name in TRACKERS:
        if name in job.monitor.trackers and importlib.util.find_spec(name) is None:
            errors.add(key, f"needs {name}", f"run pip install 'weft[{name}]'", value=name)
    key = "resilience.faults"
    for fault in job.resilience.faults:
        if fault.site not in SITES:
            remedy = suggest(fault.site, SITES)
            errors.add(key, "is not a fault site", remedy, value=fault.site)
        elif fault.kind in ("corrupt", "nan", "flip") and fault.site != "gradients":
            rule = f"has no tensors for kind {fault.kind}"
            errors.add(key, rule, "use site gradients", value=fault.site)
    named: list[tuple[str, str, Mapping[str, object]]] = [
        ("optim.name", job.optim.name, OPTIMIZERS),
        ("optim.schedule", job.optim.schedule, SCHEDULES),
        ("train.objective", job.train.objective, OBJECTIVES),
        ("parallel.ep_dispatch", job.parallel.ep_dispatch, DISPATCHERS),
        *(("monitor.trackers", sink, SINKS) for sink in job.monitor.trackers),
    ]
    for key, value, table in named:
        try:
            lookup(value, table)
        except LookupError as error:
            errors.add(key, str(error), suggest(value, table), value=value)
    if "train.objective" not in [error.key for error in errors]:
        if ":" in job.train.objective:
            _check_objective(errors, job)
        if job.checkpoint.best not in ("off", "eval_loss"):
            _check_best_metric(errors, job)
    return errors


def check_logins(job: Job) -> ConfigErrors:
    """Check that Weights & Biases has a login, before a new run tokenizes its data.

    A run that has started continues without: its login may have expired.
    """
    errors = ConfigErrors(job)
    if job.run.dir != "auto" and os.path.exists(Path(job.run.dir) / "metrics.jsonl"):
        return errors
    is_offline = os.environ.get("WANDB_MODE", "online") not in ("online", "run", "shared")
    if "wandb" not in job.monitor.trackers or is_offline or not is_log_node(os.environ):
        return errors
    try:
        import wandb

        has_login = bool(wandb.api.api_key)
    except Exception:  # of any type, from wandb: its start decides
        return errors
    if not has_login:
        remedy = "run wandb login, or set WANDB_MODE=offline, which writes into run.dir"
        errors.add("monitor.trackers", "needs a login", remedy, value="wandb")
    return errors


def _check_objective(errors: ConfigErrors, job: Job) -> None:
    """Check an objective of the user's, which need not be a function that works."""
    key, on = "train.objective", "resilience.lighthouse"
    try:
        objective = build_objective(job.train.objective, job.train)
        needs_references, takes_scores = objective.needs_references, objective.takes_scores
    except Exception as error:  # of any type, from the user's module
        rule = f"does not return an Objective: {type(error).__name__}: {error}"
        errors.add(key, rule, "return a weft.training.loss.Objective from it")
        return
    if takes_scores != bool(job.model.overrides().get("score_head")):
        value = format_value(takes_scores)
        rule = f"takes {'scores' if takes_scores else 'cross-entropies'}, not what the model has"
        errors.add(key, rule, f"use model.score_head={value}", ("model.score_head",))
    if needs_references and not job.data.compares_answers:
        rule = "needs references, which only preference data have"
        errors.add(key, rule, "use data.format=preferences or unpaired", ("data.format",))
    if objective.baseline is not None and job.data.format != "unpaired":
        rule = "needs a baseline of swapped answers, which only unpaired answers have"
        errors.add(key, rule, "use data.format=unpaired", ("data.format",))
    if needs_references and job.resilience.has_replica_groups:
        rule = f"needs references, which replica groups ({on}) do not support"
        errors.add(key, rule, f"use {on}=none", (on,))


def _check_best_metric(errors: ConfigErrors, job: Job) -> None:
    """Check that the objective has the metric of ``checkpoint.best``."""
    name = job.checkpoint.best
    if name.startswith("mtp_loss/") or "train.objective" in [error.key for error in errors]:
        return
    known = ("off", "eval_loss", *build_objective(job.train.objective, job.train).metrics)
    if name not in known:
        rule = f"is not a metric of the validation set with train.objective={job.train.objective}"
        errors.add("checkpoint.best", rule, suggest(name, known), ("train.objective",))


def _check_vocabulary(errors: ConfigErrors, plan: Plan, entries: int) -> None:
    if entries > plan.model.vocab_size:
        rule = f"has {entries} entries, but model.vocab_size is {plan.model.vocab_size}"
        remedy = f"use --model.vocab_size {-(-entries // 128) * 128}, or another tokenizer"
        if plan.job.model.path and read_imported(plan.run_path):
            remedy = "use another run.dir, to which the model is imported again with more rows"
        errors.add("data.tokenizer", rule, remedy, value=plan.job.data.tokenizer)


def check_bucket_url(key: str, url: str) -> list[ConfigError]:
    """Return the errors of a URL that names a directory in a bucket."""
    if errors := [*check_url(key, url), *check_store_writable(key, url)]:
        return errors
    if is_bucket_url(url) and url.partition("://")[2].strip("/"):
        return []
    rule, remedy = "is not the URL of a directory in a bucket", "use s3://BUCKET/PATH, or a disk"
    return [ConfigError(key, url, rule, remedy)]


def check_writable(key: str, value: str) -> list[ConfigError]:
    """Check that a path can be written and locked, by a file in its nearest parent."""
    try:
        with suppress(FileNotFoundError, NotADirectoryError):
            os.lstat(value)  # a name that is too long is seen here
        above = next(path for path in (Path(value), *Path(value).parents) if os.path.lexists(path))
        if errors := check_mount(key, value):
            return errors
        with tempfile.TemporaryFile(dir=above) as file:
            if key in LOCKED_DIRECTORIES:
                try_lock(file.fileno())
    except LocksMissing as error:
        return [ConfigError(key, value, error.rule, NO_LOCKS_REMEDY)]
    except OSError as error:
        rule = f"cannot be written: {error.strerror}: {error.filename or value}"
        return [ConfigError(key, value, rule, "use another directory")]
    return []


def _check_run_dir(job: Job, has_checkpoint_dir: bool, has_nodes: bool) -> list[ConfigError]:
    """Check that the run directory is writable, and that a run in it is this run."""
    folder, errors = Path(job.run.dir), ConfigErrors(job)
    errors += check_writable("run.dir", job.run.dir)
    if errors or not has_checkpoint_dir:
        return errors
    before, home = folder / "job.toml", checkpoint_dir(job.checkpoint, folder)
    if not job.resilience.has_replica_groups:  # whose run directories share the checkpoints
        errors += owner_errors(home, folder, has_nodes)
        if errors:
            return errors
    if not (found := list_checkpoints(home)):
        here = list_checkpoints(checkpoint_dir(CheckpointSection(), folder))
        if here and before.is_file():  # else the run would start from random weights
            rule = f"has no checkpoint of the run; they are in {here[0].parent}"
            errors.add("checkpoint.dir", rule, "copy them to checkpoint.dir, or remove the key")
        return errors
    if not before.is_file() and job.resilience.has_replica_groups:
        return errors  # the checkpoints are another replica group's
    if not before.is_file():
        rule = "has checkpoints but no job.toml, so they may belong to another run"
        errors.add("run.dir", rule, "use another run.dir, or restore job.toml")
        return errors
    old, _, job_errors = read_job(str(before))
    if job_errors:
        rule = f"has a damaged job.toml: {changed(job_errors[0], remedy='')}"
        errors.add("run.dir", rule, "use another run.dir, or repair the file")
        return errors
    with suppress(CheckpointError):  # loading reports it
        errors += check_run_files(found[-1], folder, old, to_train=True)
    if any(str(before) in error.rule for error in errors):
        return errors  # the file has other keys than the run, so no comparison is right
    kinds, fixed = {"fixed", "weights"}, {"optim.groups"}
    if not checkpoint_step(found[-1]):  # imported weights; later the data have a fingerprint
        kinds, fixed = {"weights"}, {"optim.groups", "data.tokenizer"}
    if old.lora.path:  # imported adapters, and changes of the lengths of quantized rows
        kept = (
            "path",
            *ADAPTER_KEYS,
            "modules_to_save",
            "trainable_tokens",
            *(["quantize"] if old.lora.dora else []),
        )
        fixed |= {f"lora.{name}" for name in kept}
    changes = difference(expand_preset(job), expand_preset(old))
    if "model.kind" in changes:  # then the other keys of the model follow from it
        changes = {
            k: v for k, v in changes.items() if k == "model.kind" or not k.startswith("model.")
        }
    else:  # a model with other errors has only the keys that the user set
        changes = {k: v for k, v in changes.items() if v[0] is not MISSING}
    if "lora.path" in changes:  # then other keys of the section may only follow from it
        changes = {
            k: v for k, v in changes.items() if k == "lora.path" or not k.startswith("lora.")
        }
    for name, (ours, theirs) in changes.items():
        is_same = name == "model.path" and "" in (ours, theirs)  # the other keys decide
        if name == "optim.groups":  # AdamW's state of a matrix is not Muon's
            owners = [
                [(each["params"], each["optimizer"]) for each in groups]
                for groups in (ours, theirs)
            ]
            is_same = owners[0] == owners[1] or "adamw" not in str(owners)
        if (name in fixed or key_facts(name).on_resume in kinds) and not is_same:
            value = format_value("" if theirs is MISSING else theirs)
            rule = f"differs from the run in {folder}, which was started with {value or 'none'}"
            remedy = f"use another run.dir, or {name}={value}"
            if name == "model.kind" or theirs is MISSING:
                command = shlex.join(["weft", "train", str(folder)])
                remedy = f"use another run.dir, or {command}, which has the keys of the run"
            errors.add(name, rule, remedy, value=ours)
    return errors


def describe_changes(run_dir: Path, job: Job) -> str:
    """Describe keys that changed since the last start: '; optim.lr 0.003 -> 0.001'."""
    if not (run_dir / "job.toml").is_file():
        return ""
    old, _, _ = read_job(str(run_dir / "job.toml"))
    changes = difference(expand_preset(job), expand_preset(old))
    changes.pop("run.dir", None)  # another spelling of the same directory
    return "".join(f"; {name} {before} -> {now}" for name, (now, before) in changes.items())


def check_length(tokens: int, seq_len: int, noun: str) -> list[ConfigError]:
    """Return an error if the train text is shorter than one sample."""
    if tokens > seq_len:
        return []
    rule = f"needs a text of at least {seq_len + 1} tokens; {noun} has {tokens} tokens"
    fewer = f"use at most {tokens - 1}, or " if tokens > 1 else ""
    return [ConfigError("train.seq_len", seq_len, rule, f"{fewer}give more text")]


def check_text(plan: Plan, text: Dataset) -> None:
    """Check that the data fits the model, and is the data of the newest checkpoint.

    Raises:
        InvalidConfig: if the data has no full sequence, if the vocabulary of the model is too
            small, or if the newest checkpoint was trained on other data.
    """
    job = plan.job
    errors = ConfigErrors(job)
    _check_vocabulary(errors, plan, text.vocab_size)
    for source in text.sources:
        what = f"the training set of {source.name}" if job.data.is_mixture else "the training set"
        tokens = source.store.manifest.train.tokens
        if source.store.manifest.kind == "text":
            errors += check_length(tokens, plan.seq_len, what)
        errors += check_conversations(
            source.store, plan.seq_len, job.data, scores=plan.has_score_head
        )
    if text.validation is not None:
        errors += check_conversations(
            text.validation.store, plan.seq_len, job.data, "validation", plan.has_score_head
        )
    for path in reversed(list_checkpoints(checkpoint_dir(job.checkpoint, Path(plan.run_dir)))):
        try:
            data = read_manifest(path).get("data")
        except DamagedCheckpoint:
            continue  # loading reports it
        if data is None:  # imported weights have no fingerprint of data
            break
        if error := _check_start_tokens(plan, text, path):
            errors.append(error)
        elif data != text.fingerprint:
            rule = f"is not the data that {path} was trained on, or has changed since"
            key = "mixture" if job.data.is_mixture else "path"
            errors.add(f"data.{key}", rule, "use another run.dir")
        break
    errors.raise_any()


def _check_start_tokens(plan: Plan, text: Dataset, checkpoint: Path) -> ConfigError | None:
    """Return an error if documents begin otherwise than in a checkpoint's training."""
    data = plan.job.data
    old, new = read_start_tokens(plan.run_path), text.start_tokens
    if old is None or new is None:
        return None
    if not data.keeps_documents:  # the separator before a document is there in any case
        old, new = ([t for t in start if t != text.separator] for start in (old, new))
    if old == new:
        return None
    verb = "puts a start token" if new else "puts no start token"
    rule = f"{verb} before each document, unlike the training of {checkpoint}"
    remedy = f"use {'auto or true' if old else 'false'}, or another run.dir"
    return ConfigError("data.start_token", data.start_token, rule, remedy)


def _read_progress(plan: Plan) -> tuple[int, int]:
    """Return the steps and sequences of the newest checkpoint; zeros if there is none."""
    for path in reversed(list_checkpoints(checkpoint_dir(plan.job.checkpoint, plan.run_path))):
        with suppress(DamagedCheckpoint):  # loading reports it
            manifest = read_manifest(path)
            return manifest["step"], manifest["samples"]
    return 0, 0


# A run of fewer steps hardly changes a model.
FEW_STEPS = 20


def plan_with_data(plan: Plan, dataset: Dataset) -> Plan:
    """Return the plan with the steps of ``train.epochs``.

    With ``train.epochs``, a global batch of more sequences than the training set is made smaller,
    if the layout allows it.  A resumed run may have another global batch than before.
    """
    train = plan.job.train
    if plan.num_steps:
        return plan
    mixture = build_mixture(
        dataset, "train", plan.seq_len, plan.job.data, plan.seed, plan.has_score_head
    )
    count, notes = sum(map(len, mixture.sources)), []
    if (size := plan.global_batch_size) > count:
        smaller, new_size = None, count // plan.dp_size * plan.dp_size
        with ConfigErrors().collect():
            job = replace(plan.job, train={"global_batch_size": max(1, new_size)})
            smaller = resolve_nodes(apply_environment(job), detect_machine(job.run))
        plan = smaller or plan
        action = "each step repeats some"
        if smaller:
            action = f"it is now {plan.global_batch_size}"
            if plan.dp_size > 1:
                action += f", a multiple of the {plan.dp_size} data-parallel ranks"
        notes = [
            f"train.global_batch_size={size} exceeds the {count:,} sequences of the training set: "
            f"{action}"
        ]
    step, samples = _read_progress(plan)
    remaining = max(0.0, train.epochs * count - samples)
    num_steps = max(1, step + math.ceil(remaining / plan.global_batch_size))
    epochs = num_steps * plan.global_batch_size / count
    if epochs > 1.1 * train.epochs and not step:
        notes.append(
            f"train.epochs={train.epochs:g} becomes {epochs:.1f} epochs: {num_steps} whole steps "
            f"of {plan.global_batch_size} sequences, of which the training set has {count:,}. Use "
            "a train.global_batch_size that divides them better."
        )
    if num_steps < FEW_STEPS:
        # More epochs than these cause a warning, too.
        more = "more epochs, or " if train.epochs < MAX_EPOCHS else ""
        notes.append(
            f"train.epochs={train.epochs:g} is only {num_steps} step{'s' * (num_steps > 1)} of "
            f"{plan.global_batch_size} sequences. Use {more}a smaller "
            "train.global_batch_size or train.seq_len."
        )
    plan = changed(plan, num_steps=num_steps)
    return changed(plan, warnings=(*plan.warnings, *notes, *warmup_warnings(plan)))
