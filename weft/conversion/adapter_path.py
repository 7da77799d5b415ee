"""Resolve ``lora.path``: the adapter to train further, and its base model.

As with ``model.path``, a run that has started does not read it again.
"""

from __future__ import annotations

from pathlib import Path

from weft.config.errors import ConfigError, ConfigErrors, InvalidConfig
from weft.config.schema import ADAPTER_KEYS, Job, LoraSection, ModelSection, replace
from weft.config.storage import open_directory
from weft.conversion.hf_convert import path_exists
from weft.conversion.hf_import import store_errors
from weft.conversion.peft_config import CONFIG, read_peft_config
from weft.conversion.peft_import import count_rows, open_adapter
from weft.models import Family, load_family
from weft.models.hf_mapping import TRAINING_KEYS
from weft.planning.model_config import (
    REQUIRED,
    adopt_model,
    is_complete,
    is_same_path,
    locate_model,
    read_imported,
    resolve_section,
    with_rows,
)
from weft.planning.tokenizer_conversion import fetch_data_files

REMEDY = "give a directory with adapter_config.json and adapter_model.safetensors, or org/name"


def is_adapter(directory: Path) -> bool:
    """Return True if a directory has an adapter, and no model."""
    return path_exists(directory / CONFIG) and not path_exists(directory / "config.json")


def locate_adapter(path: str, key: str = "lora.path") -> Path:
    """Return the directory of an adapter; download it if it is a name on the Hub.

    Args:
        path: a directory, or org/name.
        key: that has the value ``path``, for errors.

    Raises:
        InvalidConfig: there is no adapter.
    """
    directory = locate_model(path, with_weights=True, key=key)
    if path_exists(directory / CONFIG):
        return directory
    rule, remedy = f"has no {CONFIG}", REMEDY
    if path_exists(directory / "job.toml"):
        rule = "is a weft run, not an adapter"
        remedy = "write its adapter first: weft export RUN DIRECTORY --adapter"
    raise InvalidConfig([ConfigError(key, path, rule, remedy)])


def read_base(directory: Path, key: str) -> str:
    """Return the base model that an adapter names, for the key ``key``.

    Raises:
        InvalidConfig: if the adapter names none, or cannot be read.
    """
    errors = ConfigErrors()
    peft = read_peft_config(directory, errors)
    if peft is not None and not peft.base:
        rule, remedy = "is not set, and the adapter names no base model", "name the base model"
        errors.add(key, rule, remedy)
    errors.raise_any()
    assert peft is not None
    return peft.base


def locate_import(source: Path, base: str) -> tuple[Path, Path | None]:
    """Return the directories of model and adapter that ``weft import`` imports.

    Args:
        source: directory of a model, or of an adapter; it may be in an object store.
        base: the base model of an adapter: a directory, URL or name; '': that which it names.

    Raises:
        InvalidConfig: if there is no base model, or an object store cannot be read.
    """
    with store_errors(source):
        has_adapter = is_adapter(source)
        if has_adapter and not base:
            base = read_base(source, "--base")
    if not has_adapter:
        if base:
            rule, remedy = "has no effect: MODEL is not the directory of an adapter", "remove it"
            raise InvalidConfig([ConfigError("--base", base, rule, remedy)])
        return source, None
    if "://" in base and not base.startswith("hf://"):
        return open_directory(base), source
    return locate_model(base, with_weights=True, key="--base"), source


def adopt_paths(job: Job, recipe: Job, run_dir: Path) -> tuple[Job, list[ConfigError]]:
    """Return the job with what its paths name, and its files on this machine."""
    try:
        job = job.model_copy(update={"data": fetch_data_files(job.data)})
    except InvalidConfig as error:
        return job, error.errors
    adopt = adopt_adapter if job.lora.path else adopt_model
    return adopt(job, recipe, run_dir)


def adopt_adapter(job: Job, recipe: Job, run_dir: Path) -> tuple[Job, list[ConfigError]]:
    """Return the job with model and adapters of ``lora.path``, as `adopt_model` does.

    Without ``model.path``, the model is the base model that the adapter names.
    """
    lora, errors = job.lora, ConfigErrors(job)
    saved = read_imported(run_dir)
    if saved is not None and is_same_path(lora.path, saved.lora.path):
        adopted, new_errors = adopt_model(job, recipe, run_dir)
        return _with_keys(adopted, recipe, saved.lora, new_errors)
    if lora.path == recipe.lora.path and lora.rank and is_complete(job.model):
        return adopt_model(job, recipe, run_dir)  # as in a job.toml
    adopted = job
    with errors.collect():
        directory = locate_adapter(lora.path)
        if job.model.path in ("", REQUIRED):
            adopted = _with_base(job, recipe, read_base(directory, "model.path"))
    if errors:
        return job, errors
    adopted, new_errors = adopt_model(adopted, recipe, run_dir)
    if new_errors:
        return job, new_errors
    adopted = _with_vocabulary(adopted, directory, takes_tokenizer=job.data.trains_tokenizer)
    config, new_errors = resolve_section(adopted.model)
    if config is None:
        return job, new_errors
    adapter = open_adapter(directory, _family(adopted.model, config), config, errors)
    if adapter is None:
        return job, errors
    read = adapter.lora_section(lora.path, adopted.lora)
    return _with_keys(adopted, recipe, read, errors)


def _with_vocabulary(job: Job, adapter: Path, takes_tokenizer: bool) -> Job:
    """Return the job with the rows and the tokenizer of an adapter of a resized model.

    Args:
        job: with the base model.
        adapter: directory of the adapter.
        takes_tokenizer: the user names no tokenizer.
    """
    rows, file = count_rows(adapter), adapter / "tokenizer.json"
    own = job.model.overrides().get("vocab_size")
    if not isinstance(own, int) or rows <= own:
        return job
    if takes_tokenizer and file.is_file():
        job = replace(job, data={"tokenizer": str(file.absolute())})
    return job.model_copy(update={"model": with_rows(job.model, rows)})


def _with_base(job: Job, recipe: Job, base: str) -> Job:
    """Return the job with the base model in place of the recipe's model."""
    if job.model != recipe.model:  # keys of the user's, which `adopt_model` checks
        return replace(job, model={"path": base})
    training = {k: v for k, v in job.model.overrides().items() if k in TRAINING_KEYS}
    section = ModelSection.model_validate({"path": base, **training})
    return job.model_copy(update={"model": section})


def _with_keys(
    job: Job, recipe: Job, read: LoraSection, errors: list[ConfigError]
) -> tuple[Job, list[ConfigError]]:
    """Return the job with the keys of an adapter; append contradictions."""
    found = ConfigErrors(job)
    for name in ADAPTER_KEYS:
        value, expected = getattr(job.lora, name), getattr(read, name)
        given = recipe.lora if recipe.lora.path != job.lora.path else LoraSection()
        if value not in (expected, getattr(given, name)):
            rule = "cannot be set beside lora.path, which decides it"
            found.add(f"lora.{name}", rule, "remove one of the two", ("lora.path",))
    if errors or found:
        return job, [*errors, *found]
    names = (*ADAPTER_KEYS, "modules_to_save", "trainable_tokens")
    return replace(job, lora={name: getattr(read, name) for name in names}), []


def _family(section: ModelSection, config: object) -> Family:
    return load_family(section.kind).of(config)
