"""Export checkpoints as Hugging Face directories.

`weft.conversion.hf_import` imports such directories.  All checks run before anything is written.
Then the weights are streamed into a directory that appears only when it is complete (in an object
store: file by file, with the file that makes it a model last).
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from weft.checkpoint.manifest import CheckpointError
from weft.checkpoint.safetensors import parse_json
from weft.checkpoint.weight_files import (
    UnrepresentableValue,
    Weight,
    open_weights,
    publish_directory,
    write_weight_files,
)
from weft.config.errors import MISSING, ConfigError, ConfigErrors, InvalidConfig, suggest
from weft.config.escaping import is_one_line
from weft.config.storage import (
    CorruptData,
    check_store_writable,
    create_file,
    is_remote,
)
from weft.conversion.export_proof import check_proof, prove_export
from weft.conversion.hf_weights import find_dropped_bias, list_hf_tensors, to_hf_weights
from weft.conversion.peft_export import export_adapter, open_merged
from weft.data.chat_template import find_own_template, remove_marks
from weft.data.document_tokens import (
    IMPORTED_DIR,
    find_affixes,
    json_with_start_tokens,
    load_document_tokens,
)
from weft.data.prepared_cache import Progress, Report
from weft.data.token_store import TEMPLATE_FILE
from weft.data.tokenizer import load_tokenizer
from weft.inference.generate import find_changed_start, load_chat_format
from weft.inference.inference_model import (
    CheckpointRef,
    drop_mtp,
    find_base_checkpoint,
    find_checkpoint,
    format_dropped_mtp,
    is_mtp_weight,
)
from weft.models import FAMILIES
from weft.models.hf_mapping import (
    IGNORED_FIELDS,
    MTP_FIELD,
    check_hf_config,
    from_hf_config,
    get_hf_mapping,
    param_shapes,
    simplify,
    text_config,
    to_hf_config,
)
from weft.preparation.job_checks import check_writable

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

# Files of the source that an imported run keeps in `SOURCE_DIR` for the export: chat template,
# special tokens, and older forms of the tokenizer, which converters for other formats read.
SOURCE_DIR = IMPORTED_DIR
COMPANION_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    # Templates by name, of which transformers takes this one for conversations with tools.
    "additional_chat_templates/tool_use.jinja",
    *("added_tokens.json", "vocab.json", "merges.txt", "tokenizer.model"),
)
MAX_FILE_BYTES = 100_000_000  # of any file except the weights


def check_out(errors: ConfigErrors, key: str, out: Path, num_bytes: int) -> None:
    """Check that a directory can be created, with space for ``num_bytes``."""
    if not is_remote(out) and not is_one_line(str(out)):
        rule = "has control characters, or bytes that are not UTF-8"
        errors.add(key, rule, "use another name", value=str(out))
    elif is_remote(out) and (unwritable := check_store_writable(key, str(out))):
        errors += unwritable
    elif path_exists(out):
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
    path: Path,
    out: Path,
    dtype: str,
    max_shard: str,
    report: Report,
    adapter: bool = False,
    prove: bool = False,
    step: int | str | None = None,
) -> str:
    """Write a checkpoint of any layout as a directory that transformers loads.

    Adapters of a LoRA run are merged into the weights.

    Args:
        path: a run directory, or one of its checkpoints.
        out: a directory that does not exist; it appears when complete.
        dtype: one of `DTYPES`; '': that of the imported model; float32 without one, and for
            adapters.
        max_shard: maximum size of a file, such as 5GB.
        report: called with the progress.
        adapter: write only the adapters, for PEFT.
        prove: compare the result with the run: see `weft.conversion.export_proof`.
        step: of a run directory: see `find_checkpoint`.

    Returns:
        A message for the user.

    Raises:
        InvalidConfig: with every reason why the export is impossible.
        CheckpointError: if the checkpoint is damaged.
        ProofFailed: if the export does not compute what the run computes.
    """
    errors = ConfigErrors()
    max_bytes = _parse_size(max_shard, errors)
    if dtype and dtype not in DTYPES:
        errors.add("--dtype", "is not a known dtype", suggest(dtype, DTYPES), value=dtype)
    checkpoint, special, num_bytes, dropped = None, None, 0, ""
    weights: dict[str, Weight] = {}
    source: dict[str, Any] = {}
    with errors.collect():
        checkpoint = find_checkpoint(path, step)
        source = _read_source_config(checkpoint, errors)
        if not dtype:
            known = str(source.get("dtype") or source.get("torch_dtype")).removeprefix("torch.")
            dtype = known if known in DTYPES and not adapter else "float32"
        if checkpoint.family.hf_mapping is None:
            rule, remedy = "has no counterpart in transformers", "set Family.hf_mapping"
            errors.add("model.kind", rule, remedy, value=checkpoint.job.model.kind)
        elif not adapter:
            if MTP_FIELD not in checkpoint.family.hf_mapping.all_fields:
                checkpoint, dropped = drop_mtp(checkpoint), format_dropped_mtp(checkpoint.config)
            errors += check_hf_config(checkpoint.family, checkpoint.config)
        special = _special_tokens(checkpoint, source)
        if prove:
            check_proof(checkpoint, adapter, errors)
    if checkpoint and not errors and not adapter:
        base = find_base_checkpoint(checkpoint)
        weights = open_merged(checkpoint, base) if base else open_weights(checkpoint.path)
        if dropped:
            weights = {n: w for n, w in weights.items() if not is_mtp_weight(n, checkpoint.config)}
        num_bytes = sum(
            tensor.shape.numel() * (tensor.dtype or DTYPES[dtype]).itemsize
            for tensor in list_hf_tensors(checkpoint.family, checkpoint.config).values()
        )
    if prove and is_remote(out):
        rule = "reads the exported files from a local directory"
        errors.add("--prove", rule, "export to one, and copy it to the store", value=MISSING)
    else:
        check_out(errors, "out", out, num_bytes)
    errors.raise_any()
    assert checkpoint is not None
    assert special is not None
    proof = partial(prove_export, checkpoint, out, DTYPES[dtype], adapter) if prove else None
    if adapter:
        companions = _companion_files(checkpoint, special)
        summary = export_adapter(
            checkpoint, out, DTYPES[dtype], lambda directory: _write_files(directory, companions)
        )
        return f"{summary}\n{proof()}" if proof else summary
    family = checkpoint.family
    _check_weights(checkpoint, weights)
    hf_weights = to_hf_weights(family, checkpoint.config, weights)
    progress = count_progress(f"exporting {checkpoint.path.name}", num_bytes, report)
    with publish_directory(out) as directory:
        try:
            files = write_weight_files(directory, hf_weights, DTYPES[dtype], max_bytes, progress)
        except UnrepresentableValue as error:
            errors.add(
                "--dtype", f"cannot be used: {error}", "use bfloat16 or float32", value=dtype
            )
            raise InvalidConfig(errors) from error
        config = _keep_fields(checkpoint, source, to_hf_config(family, checkpoint.config, dtype))
        companions = _companion_files(checkpoint, special)
        _write_files(directory, companions | {"config.json": _to_json(config | special.ids)})
    size = f"{files} file{'s' * (files > 1)}, {num_bytes:,} bytes of {dtype}"
    summary = f"{out}: {size}, from {checkpoint.path}{dropped}"
    return f"{summary}\n{proof()}" if proof else summary


def _check_weights(checkpoint: CheckpointRef, weights: dict[str, Weight]) -> None:
    """Check that a checkpoint has the weights of its model that transformers has."""
    expected = param_shapes(checkpoint.family, checkpoint.config)
    shapes = {name: weight.shape for name, weight in weights.items()}
    if shapes != expected:
        differing = sorted(shapes.items() ^ expected.items())[0][0]
        raise CheckpointError(
            f"{checkpoint.path}: does not match the model in {checkpoint.run_dir / 'job.toml'}: "
            f"{differing} differs"
        )
    if name := find_dropped_bias(checkpoint.family, checkpoint.config, weights):
        rule = f"changed {name}, which the model in transformers does not have"
        rate = checkpoint.config.balance_rate
        raise InvalidConfig([ConfigError("model.balance_rate", rate, rule, "train with 0")])


def count_progress(message: str, num_bytes: int, report: Report) -> Callable[[int], None]:
    """Return a function that reports the sum of the bytes with which it was called."""
    done = 0

    def add(written: int) -> None:
        nonlocal done
        done += written
        report(Progress(message, done, num_bytes))

    return add


STORE_REMEDY = "check the URL, and credentials, region and endpoint in ~/.aws or AWS_* variables"


def path_exists(path: Path) -> bool:
    """Return True if the path exists, even as a broken link.

    Raises:
        InvalidConfig: if an object store cannot be asked.
    """
    if not is_remote(path):
        return os.path.lexists(path)
    try:
        return path.exists()
    except Exception as error:  # of any type, from the store's package
        reason = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        rule = f"cannot be reached: {reason}"
        raise InvalidConfig([ConfigError(str(path), MISSING, rule, STORE_REMEDY)]) from error


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
    """Special tokens: fields of ``config.json``, names, and the ``tokenizer.json``.

    ``end_tokens`` are set if the run was trained to end answers with further tokens: all those at
    which ``weft generate --chat`` stops.  Then ``eos_token`` is the name of the new one.
    """

    ids: dict[str, Any]
    names: dict[str, str | None]
    tokenizer: bytes
    end_tokens: tuple[int, ...] = ()
    eos_token: str = ""


def _read_source_config(checkpoint: CheckpointRef, errors: ConfigErrors) -> dict[str, Any]:
    """Return the ``config.json`` that was imported; empty without an import."""
    path = checkpoint.run_dir / SOURCE_DIR / "config.json"
    tree = (read_json_object(path, errors) or {}) if path.parent.is_dir() else {}
    return text_config(tree, FAMILIES)


def _keep_fields(
    checkpoint: CheckpointRef, source: dict[str, Any], tree: dict[str, Any]
) -> dict[str, Any]:
    """Add the fields of the source that do not change what the model computes.

    Args:
        checkpoint: the model.
        source: the ``config.json`` that was imported.
        tree: the ``config.json`` of the checkpoint.
    """
    family, mapping = checkpoint.family, get_hf_mapping(checkpoint.family)
    ignored = (IGNORED_FIELDS | mapping.ignored_fields) - {"dtype", "torch_dtype"}
    ignored -= {"transformers_version"}
    tree = {name: value for name, value in source.items() if name in ignored} | tree
    for name in mapping.all_fields:
        changed = tree | {name: source.get(name)}
        is_other = changed[name] not in (None, tree[name])
        if is_other and from_hf_config(family, changed) == (simplify(checkpoint.config), []):
            tree = changed  # a field without effect, such as the width of layers that do not exist
    return tree


def _special_tokens(checkpoint: CheckpointRef, source: dict[str, Any]) -> _SpecialTokens:
    """Return the tokens that start and end a text, in transformers' format."""
    path = checkpoint.run_dir / "tokenizer.json"
    tokenizer, _ = load_tokenizer(path)
    tokens = load_document_tokens(tokenizer, path)
    data = path.read_bytes()
    ends: dict[str, Any] = {}
    end_tokens = sorted(tokens.end_tokens)
    if (checkpoint.run_dir / TEMPLATE_FILE).is_file():  # trained on conversations
        chat_format = load_chat_format(checkpoint, "auto")
        if learned := sorted(chat_format.end_tokens - tokens.end_tokens):
            end_tokens += learned
            ends = {"end_tokens": tuple(end_tokens)}
            ends["eos_token"] = tokenizer.id_to_token(learned[0])
    eos: Any = end_tokens if len(end_tokens) > 1 else end_tokens[0]
    ids = {"eos_token_id": eos}
    names = {"eos_token": tokenizer.id_to_token(tokens.separator)}
    start = find_changed_start(checkpoint, tokenizer, tokens)
    if start is not None:  # of the run's training
        data = json_with_start_tokens(data, tokenizer, start)
    if source:
        keys = ("bos_token_id", "eos_token_id", "pad_token_id")
        ids |= {
            key: source[key]
            for key in keys
            if key in source and not (key == "eos_token_id" and (ends or source[key] is None))
        }
        return _with_padding(_SpecialTokens(ids, names, data, **ends), checkpoint, end_tokens)
    token = (find_affixes(tokenizer).start or (tokens.separator,))[-1]
    bos = {"bos_token_id": token}
    names = {"bos_token": tokenizer.id_to_token(token)} | names
    special = _SpecialTokens(bos | ids, names, data, **ends)
    return _with_padding(special, checkpoint, end_tokens)


def _with_padding(
    special: _SpecialTokens, checkpoint: CheckpointRef, end_tokens: Sequence[int]
) -> _SpecialTokens:
    """Return special tokens with padding from which transformers tells the last token.

    It reads the score at the last token that is not ``pad_token_id``.  So padding with a token that
    ends an answer, a habit for models without a padding token, would move it.
    """
    if not checkpoint.has_score_head:
        return special
    tokenizer, _ = load_tokenizer(checkpoint.run_dir / "tokenizer.json")
    known = special.ids.get("pad_token_id")
    named = [known] if isinstance(known, int) else []
    file = checkpoint.run_dir / SOURCE_DIR / "tokenizer_config.json"
    given = parse_json(file.read_bytes()).get("pad_token") if file.is_file() else None
    name = given.get("content") if isinstance(given, dict) else given
    if isinstance(name, str) and (token := tokenizer.token_to_id(name)) is not None:
        named.append(token)
    others = {i: t.content for i, t in tokenizer.get_added_tokens_decoder().items() if t.special}
    for word in ("pad", "unk", "reserved", ""):
        named += [i for i, content in sorted(others.items()) if word in content.lower()]
    padding = next((token for token in named if token not in end_tokens), None)
    names = special.names
    if padding in others:  # another token would become a special one, and split texts
        names = names | {"pad_token": others[padding]}
    return special._replace(ids=special.ids | {"pad_token_id": padding}, names=names)


def _companion_files(checkpoint: CheckpointRef, special: _SpecialTokens) -> dict[str, bytes]:
    """Return the tokenizer, the chat template, and the files with special tokens."""
    generated: dict[str, dict[str, Any]] = {
        "generation_config.json": special.ids,
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            **special.names,
            "clean_up_tokenization_spaces": False,
            "model_max_length": checkpoint.config.max_seq_len,
        },
    }
    files = {"tokenizer.json": special.tokenizer}
    for name in COMPANION_FILES[1:]:
        if (source := checkpoint.run_dir / SOURCE_DIR / name).is_file():
            files[name] = source.read_bytes()
        elif name in generated:
            files[name] = _to_json(generated[name])
    files |= _chat_files(checkpoint, special)
    if special.end_tokens and b"eos_token" not in files[TEMPLATE_FILE]:  # it would render otherwise
        for name in ("tokenizer_config.json", "special_tokens_map.json"):
            if name in files:
                tree = parse_json(files[name]) | {"eos_token": special.eos_token}
                files[name] = _to_json(tree)
    if checkpoint.has_score_head:
        files.pop("generation_config.json", None)
        padding = {k: v for k, v in special.names.items() if k == "pad_token"}
        tree = parse_json(files["tokenizer_config.json"])
        files["tokenizer_config.json"] = _to_json(tree | padding)
    return files


def _chat_files(checkpoint: CheckpointRef, special: _SpecialTokens) -> dict[str, bytes]:
    """Return the chat template of a run, and the end tokens that it has learned.

    A template with generation blocks is only for training: other programs cannot read it, and it
    may render the history otherwise than the model's own, which is exported in its place.
    """
    if not (template := checkpoint.run_dir / TEMPLATE_FILE).is_file():
        return {}
    files = {TEMPLATE_FILE: template.read_bytes()}
    if (text := files[TEMPLATE_FILE].decode("utf-8")) != (plain := remove_marks(text)):
        own = find_own_template(checkpoint.run_dir / SOURCE_DIR)
        files[TEMPLATE_FILE] = (own or plain).encode()
    if special.end_tokens:
        name = "generation_config.json"
        source = checkpoint.run_dir / SOURCE_DIR / name
        tree = parse_json(source.read_bytes()) if source.is_file() else special.ids
        files[name] = _to_json(tree | {"eos_token_id": list(special.end_tokens)})
    return files


def _to_json(tree: dict[str, Any]) -> bytes:
    return json.dumps(tree, indent=2).encode() + b"\n"


def _write_files(directory: Path, files: Mapping[str, bytes]) -> None:
    for name, content in files.items():
        if not is_remote(directory):
            (directory / name).parent.mkdir(exist_ok=True)
        with create_file(directory / name) as file:
            file.write(content)


def read_json_object(path: Path, errors: ConfigErrors) -> dict[str, Any] | None:
    """Read a JSON object; on an error return None and append it to ``errors``."""
    try:
        return parse_json(read_small_file(path), allow_constants=True)
    except CorruptData as error:
        remedy = "every model on the Hub has one" if path.name == "config.json" else ""
        errors.add(path.name, f"{error} ({path.parent})", remedy or "download it again")
        return None


def read_small_file(path: Path) -> bytes:
    """Read a file of at most `MAX_FILE_BYTES`.

    Raises:
        CorruptData: it is missing, too large or cannot be read.
    """
    try:
        if not path.is_file():
            raise CorruptData("is not a file" if path_exists(path) else "does not exist")
        if path.stat().st_size > MAX_FILE_BYTES:
            raise CorruptData(f"has {path.stat().st_size:,} bytes, more than {MAX_FILE_BYTES:,}")
        return path.read_bytes()
    except OSError as error:
        raise CorruptData(f"cannot be read: {error.strerror}") from error
