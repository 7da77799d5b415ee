"""Resolve the model section of a job to the configuration of its family.

With ``model.path`` the section is that of another model: `adopt_model` reads it, and only it.  The
weights are imported by ``weft train``, or by ``weft import``, once
(`weft.conversion.model_import`).
"""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from weft.config.errors import ConfigError, ConfigErrors, InvalidConfig, suggest
from weft.config.files import expand_path, open_regular
from weft.config.keys import Section
from weft.config.reader import check_section, read_job
from weft.config.remote_files import fetch_beside, fetch_files
from weft.config.schema import CHANGEABLE_KEYS, POSITION_KEYS, Job, ModelSection, replace
from weft.config.storage import is_bucket_url
from weft.models import FAMILIES, load_family
from weft.models.hf_mapping import (
    SCORE_HEAD,
    TRAINING_KEYS,
    check_hf_config,
    detect_family,
    from_hf_config,
    text_config,
)
from weft.planning.tokenizer_conversion import SMALL_FILES, with_tokenizer
from weft.planning.vocabulary import count_entries, find_growth

REQUIRED = "required"  # ``model.path`` of the recipes that train any model
PATH_REMEDY = (
    "give a directory with config.json, safetensors and tokenizer.json, also at s3://, org/name of "
    "the Hugging Face Hub, or the directory of a weft run"
)
HUB_NAME = re.compile(r"(hf://)?[\w.-]+/[\w.-]+", re.ASCII)
WEIGHT_FILES = ("*.safetensors",)
SINGLE_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"
MAX_CONFIG_BYTES, MAX_INDEX_BYTES = 1 << 20, 100 << 20
NO_MTP = {"mtp_layers": 0}  # may be set beside model.path, as `CHANGEABLE_KEYS` may
BESIDE_PATH = {**NO_MTP, "score_head": True}


def resolve_model(
    kind: str, preset: str, overrides: Mapping[str, Any]
) -> tuple[Section | None, list[ConfigError]]:
    """Resolve a preset of a family with some fields changed.

    Args:
        kind: see `load_family`.
        preset: name of a preset of the family.
        overrides: field name to value, with TOML's types, validated strictly.

    Returns:
        The configuration, or None if there are errors, and all errors: unknown names, wrong types
        and impossible values, each keyed ``model.<field>``.
    """
    try:
        family = load_family(kind)
    except InvalidConfig as invalid_config:
        return None, invalid_config.errors
    errors = ConfigErrors()
    base = family.presets.get(preset)
    if base is None:
        remedy = suggest(preset, family.presets)
        errors.add("model.preset", "is not a known preset", remedy, value=preset)
    # Each field is validated alone first, so that one bad value does not hide the others.
    fields = base.model_dump() if base else {}
    invalid = [
        error
        for error in check_section(family.config, "model", {**fields, **overrides})
        # Without a base, fields without a default are missing, which is not a user error.
        if error.key.removeprefix("model.") in overrides
    ]
    errors += invalid
    if base is None:
        return None, errors
    invalid_keys = {error.key for error in invalid}
    valid = {
        name: value for name, value in overrides.items() if f"model.{name}" not in invalid_keys
    }
    config = family.config.model_validate_json(json.dumps(fields | valid), strict=True)
    conflicts = [error for error in family.check(config) if error.key not in invalid_keys]
    invalid_keys |= {error.key for error in conflicts}
    errors += [error for error in conflicts if invalid_keys.isdisjoint(error.depends)]
    return (None if errors else config), errors


def resolve_section(section: ModelSection) -> tuple[Section | None, list[ConfigError]]:
    """Resolve the model of a job: see `resolve_model`."""
    return resolve_model(section.kind, section.preset, section.overrides())


def expand_preset(job: Job) -> Job:
    """Return the job with every field of its model written out.

    Two jobs with the same model then have the same keys, even if one is imported and has no preset.
    The job is returned unchanged if its model is unknown.
    """
    config, _ = resolve_section(job.model)
    if config is None:
        return job
    first = next(iter(load_family(job.model.kind).presets))
    return replace(job, model={"preset": first, **config.model_dump(mode="json")})


# (job, recipe without overrides, run directory) -> the job with the model of its paths, and errors.
Adopt = Callable[[Job, Job, Path], tuple[Job, list[ConfigError]]]


def adopt_model(job: Job, recipe: Job, run_dir: Path) -> tuple[Job, list[ConfigError]]:
    """Return the job with the model of ``model.path``, or of its imported run.

    It also gets the tokenizer, unless it names one.  A run that has started does not read
    ``model.path`` again.

    Args:
        job: the user's choices.
        recipe: the recipe without overrides.
        run_dir: the run directory.

    Returns:
        The job, unchanged after an error, and all errors.
    """
    adopted, errors = _read_path(job, recipe, run_dir)
    return (job, errors) if errors else (add_score_head(adopted), errors)


def _locate_config(section: ModelSection) -> Path:
    """Return the directory of ``model.path``, or of ``model.config``.

    Raises:
        InvalidConfig: there is no such model, or no such file.
    """
    if not section.config or expand_path(section.path).is_dir():
        return locate_model(section.path)
    file = expand_path(section.config)
    if is_bucket_url(section.config):
        file = fetch_beside(section.config, SMALL_FILES, "model.config")
    if file.is_dir():
        file /= "config.json"
    if file.name != "config.json" or not file.is_file():
        rule, remedy = "is not a file config.json", "give the config.json of model.path"
        raise InvalidConfig([ConfigError("model.config", section.config, rule, remedy)])
    return file.parent


def add_score_head(job: Job) -> Job:
    """Return the job with a score head of the model, if it trains one.

    A model family without score heads is an error of `weft.planning.rules`.
    """
    section = job.model
    if job.train.objective != "reward" and not section.overrides().get("score_head"):
        return job
    tied = ModelSection.model_validate(section.model_dump() | {"score_head": False})
    config, _ = resolve_section(tied)  # which reports errors later
    if config is None:
        return job
    is_tied = getattr(config, "tied_embeddings", False)
    changes: dict[str, dict[str, Any]] = {"model": SCORE_HEAD if is_tied else {"score_head": True}}
    saved = job.lora.modules_to_save
    if job.lora.has_adapters and "score" not in saved:  # frozen, its values would stay random
        changes["lora"] = {"modules_to_save": (*saved, "score")}
    return replace(job, **changes)


def _read_path(job: Job, recipe: Job, run_dir: Path) -> tuple[Job, list[ConfigError]]:
    """Return the job with the model of ``model.path``: see `adopt_model`."""
    section, errors = job.model, ConfigErrors()
    new_ids: tuple[int, ...] = ()
    saved = read_imported(run_dir)
    is_named = section.path not in ("", REQUIRED)
    if saved is not None and (
        is_same_path(section.path, saved.model.path) if is_named else section == recipe.model
    ):
        new_ids = saved.lora.token_ids or _find_new_ids(run_dir)
        given = section.overrides()  # a change is an error of `weft.preparation.job_checks`
        changed = {k: v for k, v in given.items() if is_named and k in CHANGEABLE_KEYS}
        section, directory = (
            ModelSection.model_validate(saved.model.model_dump() | changed),
            run_dir,
        )
    elif section.path == REQUIRED:
        errors.add("model.path", "is not set", PATH_REMEDY, value="")
        return job, errors
    elif not is_named:
        return job, errors
    else:
        fields = {k: v for k, v in section.overrides().items() if k not in TRAINING_KEYS}
        kept = {k: v for k, v in fields.items() if k in CHANGEABLE_KEYS or BESIDE_PATH.get(k) == v}
        is_whole = fields != kept and is_complete(section)
        for name in () if is_whole else fields.keys() - kept.keys():
            rule = "cannot be set beside model.path, which decides it"
            remedy = "remove it"
            if name in NO_MTP:
                remedy = "remove it, or use 0 to leave out what predicts several tokens"
            errors.add(f"model.{name}", rule, remedy, value=fields[name])
        if errors:
            return job, errors
        with errors.collect():
            directory = _locate_config(section)
            if not is_whole:
                read = _read_model(directory, section.path)
                section = ModelSection.model_validate(read.model_dump() | kept)
                errors += check_positions(section, read)
                if isinstance(rows := read.overrides().get("vocab_size"), int):
                    chosen = kept.get("vocab_size")
                    growth = find_growth(job.data, rows, chosen, directory, errors)
                    section, new_ids = with_rows(section, growth.rows), growth.new_ids
    if errors:
        return job, errors
    training = {k: v for k, v in job.model.overrides().items() if k in TRAINING_KEYS}
    changes: dict[str, dict[str, Any]] = {"model": section.model_dump() | training}
    if job.lora.trainable_tokens == "auto" and (job.lora.rank or job.lora.path) and new_ids:
        changes["lora"] = {"trainable_tokens": new_ids}
    if job.data.trains_tokenizer:
        changes["data"] = {"tokenizer": str(directory.absolute() / "tokenizer.json")}
    return replace(job, **changes), errors


def take_tokenizer(job: Job) -> Job:
    """Return a job with the tokenizer of ``model.path``, unless it names one.

    Raises:
        InvalidConfig: there is no such model.
    """
    if job.model.path in ("", REQUIRED) or not job.data.trains_tokenizer:
        return job
    file = locate_model(job.model.path).absolute() / "tokenizer.json"
    return replace(job, data={"tokenizer": str(file)})


def _find_new_ids(run_dir: Path) -> tuple[int, ...]:
    """Return the ids for which an import has added rows, by the run's files."""
    try:
        with open_regular(run_dir / "huggingface" / "config.json") as content:
            tree = text_config(json.loads(content.read()), FAMILIES)
        with open_regular(run_dir / "tokenizer.json") as content:
            entries, _ = count_entries(content.read())
    except Exception:  # imported from a run; other checks report a damaged file
        return ()
    rows = tree.get("vocab_size")
    return tuple(range(rows, entries)) if isinstance(rows, int) else ()


def with_rows(section: ModelSection, rows: int) -> ModelSection:
    """Return a model with another number of rows in its embedding and head."""
    return ModelSection.model_validate(section.model_dump() | {"vocab_size": rows})


def check_positions(section: ModelSection, read: ModelSection) -> list[ConfigError]:
    """Return an error for each key of positions that the model's family does not have.

    Args:
        section: the model with the user's keys.
        read: the model as it was read.
    """
    config, problems = resolve_section(section)
    before, after = read.overrides(), section.overrides()
    changed = [k for k in POSITION_KEYS if k in after and before.get(k) != after[k]]
    if config is None or problems or not changed:
        return []  # `resolve_section` reports them later
    family = load_family(section.kind)
    if family.hf_mapping is None or not (found := check_hf_config(family, config)):
        return []
    rule = f"cannot be changed so in this model, because {found[0].key} {found[0].rule}"
    errors = ConfigErrors()
    for name in changed:
        errors.add(f"model.{name}", rule, "remove it", value=after[name])
    return errors


def read_imported(run_dir: Path) -> Job | None:
    """Return the job of a run whose weights are imported; None if it is no such run."""
    try:
        if not (run_dir / "job.toml").is_file():
            return None
    except OSError:  # `check_writable` reports it
        return None
    job, _, errors = read_job(str(run_dir / "job.toml"))
    return None if errors or not job.model.path else job


def is_same_path(ours: str, theirs: str) -> bool:
    """Return True if a name means a saved ``model.path``, which may be gone."""
    return theirs in (ours, os.path.abspath(expand_path(ours)))


def is_complete(section: ModelSection) -> bool:
    """Return True if the section has every field, as in a ``job.toml``."""
    config, errors = resolve_section(section)
    return not errors and config is not None and {*config.model_dump()} <= {*section.overrides()}


def model_name(path: str) -> str:
    """Return the short name of ``model.path``; empty without one."""
    parts = Path(path.rstrip("/")).parts
    if "snapshots" in parts[-2:-1] and len(parts) > 2:  # the Hub's cache: models--org--name
        return parts[-3].rpartition("--")[2]
    return parts[-1] if parts and path != REQUIRED else ""


def shown_name(section: ModelSection) -> str:
    """Return the name of a model for messages: of ``path``, or its family and preset."""
    return model_name(section.path) or section.full_name


def locate_model(path: str, with_weights: bool = False, key: str = "model.path") -> Path:
    """Return the directory of a model; download it from a bucket or the Hub.

    Args:
        path: a directory, a URL of an object store, or org/name.
        with_weights: download the weights, too, not only the configuration and the tokenizer.
        key: that has the value ``path``, for errors.

    Raises:
        InvalidConfig: there is no such directory, or the Hub cannot be reached.
    """
    patterns = [*SMALL_FILES, *(WEIGHT_FILES if with_weights else ())]
    if is_bucket_url(path):
        return with_tokenizer(fetch_files(path, patterns, key), key, path)
    local, name = expand_path(path), path.removeprefix("hf://")
    rule = "is not a directory" if local.exists() else "does not exist"
    if local.is_dir():
        return with_tokenizer(local, key, path)
    if local.exists() or not HUB_NAME.fullmatch(path):
        raise InvalidConfig([ConfigError(key, path, rule, PATH_REMEDY)])
    remedy = (
        "check the name; if the model is private or gated, accept its terms and set HF_TOKEN. "
        f"Without network, run on another machine: hf download {name} --local-dir DIRECTORY. "
        "Then use that directory"
    )
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.utils.tqdm import disable_progress_bars
    except ImportError as error:
        rule = "is no directory, and a model of the Hub needs huggingface_hub"
        remedy = f"run pip install huggingface_hub, or {remedy}"
        raise InvalidConfig([ConfigError(key, path, rule, remedy)]) from error
    disable_progress_bars()
    reason = ""
    for is_offline in (True, False):  # the cache first
        try:
            found = snapshot_download(name, allow_patterns=patterns, local_files_only=is_offline)
        except Exception as error:  # of the network, or of the Hub
            reason = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        else:
            if _has_files(Path(found), with_weights):
                return with_tokenizer(Path(found), key, path)
            reason = "the Hub has no config.json and safetensors of it"
    rule = f"is no directory, and cannot be downloaded from the Hub: {reason}"
    raise InvalidConfig([ConfigError(key, path, rule, remedy)])


def _has_files(directory: Path, with_weights: bool) -> bool:
    """Return True if a snapshot is complete; a download may have been interrupted."""
    names = ["config.json"]
    if (directory / "adapter_config.json").is_file() and not (directory / names[0]).is_file():
        return (directory / "adapter_model.safetensors").is_file() or not with_weights
    index = directory / INDEX_FILE
    if with_weights and index.is_file():
        names += set(json.loads(index.read_text("utf-8")).get("weight_map", {}).values())
    elif with_weights:
        names.append(SINGLE_FILE)
    return all((directory / name).is_file() for name in names)


def _read_model(directory: Path, path: str) -> ModelSection:
    """Return the section of a Hugging Face directory or of a weft run.

    Raises:
        InvalidConfig: the model is unknown, or a file cannot be read.
    """
    if (directory / "job.toml").is_file():
        job, _, errors = read_job(str(directory / "job.toml"))
        errors.raise_any()
        _, problems = resolve_section(job.model)
        if problems:
            raise InvalidConfig(problems)
        return expand_preset(job).model.model_copy(update={"path": path})
    file, rule = directory / "config.json", ""
    try:
        if file.stat().st_size > MAX_CONFIG_BYTES:
            raise ValueError(f"it is larger than {MAX_CONFIG_BYTES:,} bytes")
        with open_regular(file) as content:
            tree = json.loads(content.read())
    except FileNotFoundError:
        rule = "has neither config.json nor job.toml"
    except (OSError, ValueError, RecursionError) as error:
        rule = f"has a config.json that cannot be read: {error}"
    else:
        rule = "" if isinstance(tree, dict) else "has a config.json that is not an object"
    if rule:
        remedy = PATH_REMEDY
        if (directory / ".metadata").is_file():
            rule = "is a directory of torch.distributed.checkpoint"
            command = f"weft import {shlex.quote(path)} RUN_DIRECTORY --assets DIRECTORY"
            remedy = f"import it once: {command}, with the directory of the model's config.json. "
            remedy += "Then give that run directory"
        raise InvalidConfig([ConfigError("model.path", path, rule, remedy)])
    tree = text_config(tree, FAMILIES)
    kind, problems = detect_family(tree, FAMILIES)
    if kind is not None:
        config, problems = from_hf_config(FAMILIES[kind], tree)
    if kind is None or problems:
        raise InvalidConfig(problems)
    if getattr(config, "mtp_layers", 0) and not any(
        (directory / name).is_file() for name in (INDEX_FILE, SINGLE_FILE)
    ):  # on the Hub, in one small file
        directory = locate_model(path, with_weights=True)
    return model_section(kind, keep_mtp_layers(directory, config), path)


def keep_mtp_layers(directory: Path, config: Any) -> Any:
    """Return a configuration with the multi-token prediction that the files have.

    transformers drops the layers when it saves a model, but not their number in ``config.json``.
    """
    first = f"model.layers.{getattr(config, 'num_layers', 0)}."
    if not getattr(config, "mtp_layers", 0) or any(
        name.startswith(first) for name in _tensor_names(directory)
    ):
        return config
    return config.model_copy(update=NO_MTP)


def _tensor_names(directory: Path) -> list[str]:
    """Return the names of the tensors in a directory; none if a file is damaged."""
    single = directory / SINGLE_FILE
    try:
        if not single.is_file():
            return list(json.loads((directory / INDEX_FILE).read_bytes())["weight_map"])
        with single.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            return list(json.loads(file.read(min(size, MAX_INDEX_BYTES))))
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return []  # the import reports it


def model_section(kind: str, config: Any, path: str) -> ModelSection:
    """Return the section of a configuration, with all of its fields."""
    preset = next(iter(load_family(kind).presets))
    return ModelSection.model_validate(
        {"path": path, "kind": kind, "preset": preset, **config.model_dump(mode="json")}
    )
