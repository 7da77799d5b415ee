"""Export checkpoints to and import models from Hugging Face directories.

All checks run before anything is written.  Then the weights are streamed into a directory that
appears only when it is complete (in an object store: file by file, with the file that makes it a
model last).  Imported data is never executed: only safetensors are read, and no code of a model is
run.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

import weft
from weft.checkpoint.manifest import CheckpointError, checkpoint_path
from weft.checkpoint.safetensors import NAMES, parse_json
from weft.checkpoint.shard_files import Contents, read_file_contents
from weft.checkpoint.storage import CorruptData, create_file, is_remote
from weft.checkpoint.weight_files import (
    INDEX,
    SINGLE,
    UnrepresentableValue,
    Weight,
    open_weight,
    open_weights,
    publish_directory,
    write_json,
    write_weight_files,
    write_weights_checkpoint,
)
from weft.config.errors import ConfigError, ConfigErrors, InvalidConfig, suggest
from weft.config.files import replace_bytes, replace_text
from weft.config.schema import Job, ModelSection, replace, to_toml
from weft.data.document_tokens import (
    IMPORTED_DIR,
    find_document_tokens,
    json_with_start_token,
    load_document_tokens,
)
from weft.data.prepared_cache import Progress, Report
from weft.data.token_store import TEMPLATE_FILE
from weft.data.tokenizer import has_excess_padding, load_tokenizer, required_vocab_size
from weft.models import FAMILIES, Family
from weft.models.hf_mapping import (
    detect_family,
    from_hf_config,
    get_hf_mapping,
    param_shapes,
    printable,
    to_hf_config,
)
from weft.plan.model_config import model_section
from weft.tools.inference_model import CheckpointRef, find_base_checkpoint, find_checkpoint
from weft.tools.peft_export import export_adapter, open_merged
from weft.train.job_checks import check_writable

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

# Files of the source that an imported run keeps in `SOURCE_DIR` for the export: chat template and
# special tokens.
SOURCE_DIR = IMPORTED_DIR
COMPANION_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
)
MAX_FILE_BYTES = 100_000_000  # of any file except the weights

# A plain file name: no directory, no parent directory, not hidden.
FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*\.safetensors")
PICKLES = re.compile(r".*\.(bin|pt|pth|ckpt|pkl)")
# Rotary tables of old checkpoints, which follow from the configuration.
DERIVED = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")
MAX_PROBLEMS = 5

SAFETENSORS_REMEDY = "if you trust its source, load it with transformers and call save_pretrained()"


def _check_out(errors: ConfigErrors, key: str, out: Path, num_bytes: int) -> None:
    """Check that a directory can be created, with space for ``num_bytes``."""
    if path_exists(out):
        errors.add(key, "exists already", "name a new directory", value=str(out))
    elif not is_remote(out):
        unwritable = check_writable(key, str(out))
        errors += unwritable
        above = next(parent for parent in out.parents if parent.exists())
        if not unwritable and (free := shutil.disk_usage(above).free) < num_bytes:
            rule = f"needs {num_bytes:,} bytes, but its disk has only {free:,} free"
            errors.add(key, rule, "use another disk, or free space", value=str(out))


# --------------------------------------------------------------------------- export


def export_checkpoint(
    path: Path, out: Path, dtype: str, max_shard: str, report: Report, adapter: bool = False
) -> str:
    """Write a checkpoint of any layout as a directory that transformers loads.

    Adapters of a LoRA run are merged into the weights.

    Args:
        path: a run directory, or one of its checkpoints.
        out: a directory that does not exist; it appears when complete.
        dtype: one of `DTYPES`.
        max_shard: maximum size of a file, such as 5GB.
        report: called with the progress.
        adapter: write only the adapters, for PEFT.

    Returns:
        A message for the user.

    Raises:
        InvalidConfig: with every reason why the export is impossible.
        CheckpointError: if the checkpoint is damaged.
    """
    errors = ConfigErrors()
    max_bytes = _parse_size(max_shard, errors)
    if dtype not in DTYPES:
        errors.add("--dtype", "is not a known dtype", suggest(dtype, DTYPES), value=dtype)
    checkpoint, special, num_bytes = None, None, 0
    weights: dict[str, Weight] = {}
    with errors.collect():
        checkpoint = find_checkpoint(path)
        if checkpoint.family.hf_mapping is None:
            rule, remedy = "has no counterpart in transformers", "set Family.hf_mapping"
            errors.add("model.kind", rule, remedy, value=checkpoint.job.model.kind)
        special = _special_tokens(checkpoint, errors)
    if checkpoint and not errors and not adapter:
        base = find_base_checkpoint(checkpoint)
        weights = open_merged(checkpoint, base) if base else open_weights(checkpoint.path)
        num_bytes = sum(w.shape.numel() for w in weights.values()) * DTYPES[dtype].itemsize
    _check_out(errors, "out", out, num_bytes)
    errors.raise_any()
    assert checkpoint is not None
    assert special is not None
    if adapter:
        return export_adapter(checkpoint, out, DTYPES[dtype])
    family = checkpoint.family
    expected = param_shapes(family, checkpoint.config)
    shapes = {name: weight.shape for name, weight in weights.items()}
    if shapes != expected:
        differing = sorted(shapes.items() ^ expected.items())[0][0]
        raise CheckpointError(
            f"{checkpoint.path}: does not match the model in {checkpoint.run_dir / 'job.toml'}: "
            f"{differing} differs"
        )
    hf_name = get_hf_mapping(family).hf_name
    hf_weights = {hf_name(name): weights[name] for name in expected}
    progress = _count_progress(f"exporting {checkpoint.path.name}", num_bytes, report)
    with publish_directory(out) as directory:
        try:
            files = write_weight_files(directory, hf_weights, DTYPES[dtype], max_bytes, progress)
        except UnrepresentableValue as error:
            errors.add(
                "--dtype", f"cannot be used: {error}", "use bfloat16 or float32", value=dtype
            )
            raise InvalidConfig(errors) from error
        config = to_hf_config(family, checkpoint.config, dtype)
        _write_companions(directory, checkpoint, config, special)
    size = f"{files} file{'s' * (files > 1)}, {num_bytes:,} bytes of {dtype}"
    return f"{out}: {size}, from {checkpoint.path}"


def _count_progress(message: str, num_bytes: int, report: Report) -> Callable[[int], None]:
    """Return a function that reports the sum of the bytes with which it was called."""
    done = 0

    def add(written: int) -> None:
        nonlocal done
        done += written
        report(Progress(message, done, num_bytes))

    return add


def path_exists(path: Path) -> bool:
    """Return True if the path exists, even as a broken link."""
    return path.exists() if is_remote(path) else os.path.lexists(path)


def _parse_size(text: str, errors: ConfigErrors) -> int:
    """Parse a size such as 5GB or 500 MB; return bytes."""
    match = re.fullmatch(r"([1-9]\d{0,14}) ?([KMGT]?)B?", text.upper(), re.ASCII)
    if not match:
        remedy = "write it as 5GB, 500MB or a number of bytes"
        errors.add("--max-shard", "is not a size", remedy, value=text)
        return 1
    size: int = int(match[1]) * 1000 ** " KMGT".index(match[2] or " ")
    return size


class _SpecialTokens(NamedTuple):
    """Special tokens: fields of ``config.json``, names, and the ``tokenizer.json``."""

    ids: dict[str, Any]
    names: dict[str, str | None]
    tokenizer: bytes


def _special_tokens(checkpoint: CheckpointRef, errors: ConfigErrors) -> _SpecialTokens:
    """Return the tokens that start and end a text, in transformers' format."""
    path = checkpoint.run_dir / "tokenizer.json"
    tokenizer, _ = load_tokenizer(path)
    tokens = load_document_tokens(tokenizer, path)
    data = path.read_bytes()
    end_tokens = sorted(tokens.end_tokens)
    eos: Any = end_tokens if len(end_tokens) > 1 else end_tokens[0]
    ids = {"eos_token_id": eos}
    names = {"eos_token": tokenizer.id_to_token(tokens.separator)}
    if (checkpoint.run_dir / SOURCE_DIR).is_dir():
        source_config = _read_json(checkpoint.run_dir / SOURCE_DIR / "config.json", errors) or {}
        if source_config.get("eos_token_id") is None:
            source_config.pop("eos_token_id", None)
        keys = ("bos_token_id", "eos_token_id", "pad_token_id")
        ids |= {key: source_config[key] for key in keys if key in source_config}
        return _SpecialTokens(ids, names, data)
    starts = tokens.starts_documents
    if starts or (starts is None and checkpoint.job.data.is_text):
        # In training, a separator preceded every document.
        data = json_with_start_token(data, tokenizer, tokens.separator)
    bos = {"bos_token_id": tokens.separator}
    return _SpecialTokens(bos | ids, {"bos_token": names["eos_token"]} | names, data)


def _write_companions(
    directory: Path, checkpoint: CheckpointRef, config: dict[str, Any], special: _SpecialTokens
) -> None:
    """Write ``config.json``, the tokenizer, and the files with special tokens."""
    with create_file(directory / "tokenizer.json") as file:
        file.write(special.tokenizer)
    write_json(directory / "config.json", config | special.ids)
    generated: dict[str, dict[str, Any]] = {
        "generation_config.json": special.ids,
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            **special.names,
            "clean_up_tokenization_spaces": False,
            "model_max_length": checkpoint.config.max_seq_len,
        },
    }
    tuned = (checkpoint.run_dir / TEMPLATE_FILE).is_file()
    for name in COMPANION_FILES[1:]:
        if name == TEMPLATE_FILE and tuned:  # the template of its fine-tuning
            _copy(checkpoint.run_dir / name, directory / name)
        elif (checkpoint.run_dir / SOURCE_DIR / name).is_file():
            _copy(checkpoint.run_dir / SOURCE_DIR / name, directory / name)
        elif name in generated:
            write_json(directory / name, generated[name])


def _copy(path: Path, to: Path) -> None:
    with create_file(to) as file:
        file.write(path.read_bytes())


# --------------------------------------------------------------------------- import


class ModelSource(NamedTuple):
    """A model to import, whose files are valid.

    Attributes:
        name: its name, for messages.
        section: the section ``model`` of a run that trains it.
        weights: weights by weft's name.
        num_bytes: their size in float32.
        dtypes: their dtypes in the files.
        files: other files of the run directory, and where their content is.
        note: a remark for the user, or ''.
    """

    name: str
    section: ModelSection
    weights: dict[str, Weight]
    num_bytes: int
    dtypes: list[str]
    files: dict[str, Path]
    note: str

    @property
    def summary(self) -> str:
        """Number of weights and their conversion."""
        dtypes = ", ".join(self.dtypes)
        return f"{self.num_bytes // 4:,} weights, converted from {dtypes} to float32"


def import_model(source: Path, run_dir: Path, report: Report, force: bool = False) -> str:
    """Import a Hugging Face directory as a run with a checkpoint of step 0.

    Args:
        source: a directory with ``config.json``, safetensors and ``tokenizer.json``.
        run_dir: a directory that does not exist; it appears when complete.
        report: called with the progress.
        force: accept a tokenizer that is far smaller than the model's vocabulary.

    Returns:
        A message for the user.

    Raises:
        InvalidConfig: with every reason why the import is impossible.
    """
    errors = ConfigErrors()
    model = open_hf_source(source, str(source), force, errors)
    _check_out(errors, "run_dir", run_dir, 0 if model is None else model.num_bytes)
    errors.raise_any()
    assert model is not None
    job = replace(
        Job(),
        run={"dir": str(run_dir)},
        model=model.section.model_dump(),
        data={"tokenizer": str(run_dir / "tokenizer.json")},
        train={"seq_len": min(1024, model.section.overrides()["max_seq_len"])},
    )
    with publish_directory(run_dir) as directory:
        write_imported(directory, directory / "checkpoints", model, job, report)
    summary = f"{run_dir}: {model.summary}"
    return f"{summary}\n{model.note}" if model.note else summary


def write_imported(run_dir: Path, home: Path, model: ModelSource, job: Job, report: Report) -> None:
    """Write tokenizer, companion files, ``job.toml`` and, last, the checkpoint of step 0.

    It may be interrupted and repeated: a run without the checkpoint is not imported.

    Args:
        run_dir: the run directory.
        home: directory of its checkpoints.
        model: the model.
        job: content of ``job.toml``.
        report: called with the progress.

    Raises:
        InvalidConfig: if a weight is not finite.
    """
    manifest = {
        "step": 0,
        "samples": 0,
        "mesh": {},
        "weft": weft.__version__,
        "torch": torch.__version__,
        "imported": model.section.path,
    }
    for name, path in model.files.items():
        (run_dir / name).parent.mkdir(parents=True, exist_ok=True)
        replace_bytes(run_dir / name, path.read_bytes())
    replace_text(run_dir / "job.toml", to_toml(job, model.section.path, job))
    progress = _count_progress(f"importing {model.name}", model.num_bytes, report)
    with publish_directory(checkpoint_path(home, 0)) as directory:
        try:
            write_weights_checkpoint(directory, model.weights, manifest, progress)
        except UnrepresentableValue as error:
            rule = f"cannot be imported: {error}"
            raise InvalidConfig([ConfigError("model.path", model.section.path, rule)]) from error


def open_hf_source(
    source: Path, path: str, force: bool, errors: ConfigErrors
) -> ModelSource | None:
    """Check the files of a Hugging Face directory; on an error append it and return None.

    Args:
        source: the directory.
        path: its ``model.path``.
        force: accept a tokenizer that is far smaller than the model's vocabulary.
        errors: receives every reason why the import is impossible.
    """
    if not source.is_dir():
        rule = "is not a directory" if source.exists() else "does not exist"
        errors.add("directory", rule, "give a model's directory", value=str(source))
        return None
    kind, config = _read_config(source / "config.json", errors)
    model = None if config is None else (FAMILIES[kind], config)
    contents = _read_contents(source, model, errors)
    note = _check_tokenizer(source / "tokenizer.json", config, force, errors)
    companions = [name for name in COMPANION_FILES if path_exists(source / name)]
    for name in companions[1:]:
        _check_companion(source / name, errors)
    if model is None or errors:
        return None
    shapes, hf_name = param_shapes(*model), get_hf_mapping(model[0]).hf_name
    files = {f"{SOURCE_DIR}/{name}": source / name for name in companions}
    return ModelSource(
        source.name,
        model_section(kind, config, path),
        {name: open_weight(contents, hf_name(name)) for name in shapes},
        4 * sum(shape.numel() for shape in shapes.values()),
        sorted({NAMES[contents.tensors[hf_name(name)].dtype] for name in shapes}),
        {"tokenizer.json": source / "tokenizer.json", **files},
        note,
    )


def _read_config(path: Path, errors: ConfigErrors) -> tuple[str, Any]:
    """Return the family and the model's configuration, which is None after an error."""
    kind, config = None, None
    tree = _read_json(path, errors)
    if tree is not None:
        kind, config_errors = detect_family(tree, FAMILIES)
        if kind is not None:
            config, config_errors = from_hf_config(FAMILIES[kind], tree)
        errors += config_errors
    return kind or "", config


def _read_json(path: Path, errors: ConfigErrors) -> dict[str, Any] | None:
    """Read a JSON object; on an error return None and append it to ``errors``."""
    try:
        return parse_json(_read_small(path))
    except CorruptData as error:
        remedy = "every model on the Hub has one" if path.name == "config.json" else ""
        errors.add(path.name, str(error), remedy or "download it again")
        return None


def _read_small(path: Path) -> bytes:
    try:
        if not path.is_file():
            raise CorruptData("is not a file" if path_exists(path) else "does not exist")
        if path.stat().st_size > MAX_FILE_BYTES:
            raise CorruptData(f"has {path.stat().st_size:,} bytes, more than {MAX_FILE_BYTES:,}")
        return path.read_bytes()
    except OSError as error:
        raise CorruptData(f"cannot be read: {error.strerror}") from error


def _check_companion(path: Path, errors: ConfigErrors) -> None:
    if path.suffix != ".json":
        try:
            _read_small(path)
        except CorruptData as error:
            errors.add(path.name, str(error), "download it again, or remove it")
        return
    tree = _read_json(path, errors)
    if tree and "auto_map" in tree:
        rule = "names code to run, which weft neither runs nor exports"
        errors.add(f"{path.name} auto_map", rule, "remove the field")


def _check_tokenizer(path: Path, config: Any, force: bool, errors: ConfigErrors) -> str:
    """Return a note if the files disagree about the token that ends a text."""
    try:
        _read_small(path)
        tokenizer, _ = load_tokenizer(path)
        note = find_document_tokens(tokenizer, [path.parent], str(path)).note
    except CorruptData as error:
        remedy = "AutoTokenizer.from_pretrained(DIRECTORY).save_pretrained(DIRECTORY) writes one"
        errors.add(path.name, str(error), remedy)
    except InvalidConfig as error:  # `_check_companion` reports unreadable companion files
        errors += [p for p in error.errors if p.key not in COMPANION_FILES]
    else:
        size = required_vocab_size(tokenizer)
        if config and size > config.vocab_size:
            rule = f"has {size} entries, but model.vocab_size is {config.vocab_size}"
            errors.add(path.name, rule, "use the tokenizer of this model")
        elif config and not force and has_excess_padding(size, config.vocab_size):
            rule = (
                f"has {size} entries, but the model {config.vocab_size}: more than padding explains"
            )
            remedy = "use the model's own tokenizer, or --force if this is it"
            errors.add(path.name, rule, remedy)
        return note
    return ""


def _read_contents(
    source: Path, model: tuple[Family, Any] | None, errors: ConfigErrors
) -> Contents:
    """Return the tensors in the files of a model; append errors to ``errors``."""
    contents = Contents(source, {}, {})
    if path_exists(source / SINGLE):
        index, files = None, [SINGLE]
    elif path_exists(source / INDEX):
        tree = _read_json(source / INDEX, errors)
        if tree is None:
            return contents
        index = tree.get("weight_map")
        key = f"{INDEX} weight_map"
        if not isinstance(index, dict) or not all(isinstance(v, str) for v in index.values()):
            errors.add(key, "must map every tensor to a file", "download it again")
            return contents
        files = sorted(set(index.values()))
        bad_names = [name for name in files if not FILE_NAME.fullmatch(name)]
        for name in bad_names[:MAX_PROBLEMS]:
            rule = "is not the plain name of a .safetensors file next to the index"
            errors.add(key, rule, "do not use it", value=printable(name))
        if bad_names:
            return contents
    else:
        pickles = sorted(p.name for p in source.iterdir() if PICKLES.fullmatch(p.name))
        rule, remedy = "does not exist, nor does its index", "download the weights"
        if pickles:
            rule = f"does not exist, only the pickle {printable(pickles[0])}, which may run code"
            remedy = SAFETENSORS_REMEDY
        errors.add(SINGLE, rule, remedy)
        return contents

    found = ConfigErrors()
    files_of: dict[str, str] = {}  # the file of each tensor
    for name in files:
        try:
            own = read_file_contents(source / name)
        except CorruptData as error:
            found.add(name, str(error), "download it again")
            continue
        for tensor in own.tensors:
            if tensor in files_of:
                rule = f"has {printable(tensor)}, which is also in {files_of[tensor]}"
                found.add(name, rule, "do not use it")
            files_of[tensor] = name
        contents.tensors.update(own.tensors)
        contents.files.update(own.files)
    if not found:
        if index not in (None, files_of):
            rule = "does not match the tensors in the files"
            found.add(INDEX, rule, "download index and files again")
        if model is not None:
            _check_shapes(contents, *model, found)
    errors += found[:MAX_PROBLEMS]
    if len(found) > MAX_PROBLEMS:
        errors.add("weights", f"have {len(found) - MAX_PROBLEMS} more problems")
    return contents


def _check_shapes(contents: Contents, family: Family, config: Any, errors: ConfigErrors) -> None:
    """Check that the files have exactly the model's tensors, with its shapes."""
    tensors = contents.tensors
    if config.num_layers > len(tensors):
        rule = f"needs more tensors than the {len(tensors)} in the files"
        key = "config.json num_hidden_layers"
        errors.add(key, rule, "download both again", value=config.num_layers)
        return
    mapping = get_hf_mapping(family)
    shapes = {mapping.hf_name(n): tuple(s) for n, s in param_shapes(family, config).items()}
    for name in tensors.keys() - shapes.keys():
        remedy = "use weights and config.json of one model"
        if name == "lm_head.weight":
            remedy = "set tie_word_embeddings to false in config.json if it is not the embedding"
        if not DERIVED.fullmatch(name):
            errors.add(printable(name), f"is not a weight of this {mapping.name}", remedy)
    for name, shape in shapes.items():
        if name not in tensors:
            errors.add(name, "is in none of the files", "download them again")
            continue
        tensor = tensors[name]
        if tensor.shape != shape:
            file = tensor.shards[0].file
            rule = f"has shape {list(tensor.shape)} in {file}, not {list(shape)}"
            errors.add(name, rule, "use weights and config.json of one model")
        if tensor.dtype not in DTYPES.values():
            rule = f"is {NAMES[tensor.dtype]}, which is quantized or does not fit in float32"
            errors.add(name, rule, "save it as F32, BF16 or F16")
