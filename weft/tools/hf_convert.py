"""``weft export`` and ``weft import``: a checkpoint as a Hugging Face folder, and the other way.

Everything that can be known is checked before anything is written; then the weights are streamed
into a folder that becomes visible whole (in an object store: file by file, what makes it a model
last).  What comes from elsewhere is numbers and names, never a
program: only safetensors are read, and no code that came with a model is run.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

import weft
from weft.checkpoint.manifest import CheckpointError, checkpoint_path
from weft.checkpoint.safetensors import NAMES, Entry, Malformed, parse_json
from weft.checkpoint.storage import create, is_remote
from weft.checkpoint.weight_files import (
    INDEX,
    SINGLE,
    CannotHold,
    open_model,
    open_weights,
    publishing,
    read_tensor,
    write_json,
    write_model,
    write_weights,
)
from weft.config.errors import MISSING, ConfigError, InvalidConfig, suggest
from weft.config.schema import Job, replace, to_toml
from weft.data.document_tokens import (
    IMPORTED,
    find_document_tokens,
    tokens_beside,
    with_start,
)
from weft.data.prepared_cache import Progress, Report
from weft.data.token_store import TEMPLATE_FILE
from weft.data.tokenizer import load_tokenizer, padded_beyond, vocab_entries
from weft.models import FAMILIES, Family, load_family
from weft.models.hf_mapping import counterpart, from_config, kind_of, shapes, shown, to_config
from weft.tools.inference_model import CheckpointRef, base_of, find_checkpoint
from weft.tools.peft_export import export_adapter, merging
from weft.train.job_checks import check_writable

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

# What an imported run keeps of its source, in the folder `SOURCE`, for the export: how a
# conversation is written as text, and which tokens begin and end.  weft itself reads none of it.
SOURCE = IMPORTED
KEPT = (
    "config.json",
    "generation_config.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
)
MOST_BYTES = 100_000_000  # of any file but the weights

# A plain file's name: no folder, none above, nothing hidden.
FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*\.safetensors")
PICKLES = re.compile(r".*\.(bin|pt|pth|ckpt|pkl)")
# Rotary tables, which old checkpoints hold beside the weights; they follow from the configuration.
DERIVED = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")
SHOWN = 5

AS_SAFETENSORS = (
    "where you trust its source, load it with transformers and save_pretrained() it again"
)


# --------------------------------------------------------------------------- out


def export_checkpoint(
    path: Path, out: Path, dtype: str, max_shard: str, report: Report, adapter: bool = False
) -> str:
    """Write a checkpoint of any layout as a folder that transformers loads.

    Adapters of a LoRA run are merged into the weights.

    Args:
        path: a run's folder, or one of its checkpoints.
        out: a folder that does not exist yet; it appears whole.
        dtype: one of `DTYPES`.
        max_shard: size of a file, such as 5GB.
        report: told how far it is.
        adapter: write only the adapters, for PEFT.

    Returns:
        What was done, for people.

    Raises:
        InvalidConfig: with every reason why it cannot be.
        CheckpointError: if the checkpoint is damaged.
    """
    most, problems = _size(max_shard)
    if dtype not in DTYPES:
        problems.append(ConfigError("--dtype", dtype, "no such dtype", suggest(dtype, DTYPES)))
    try:
        found: CheckpointRef | None = find_checkpoint(path)
    except InvalidConfig as error:
        found = None
        problems += error.problems
    family = load_family(found.job.model.kind) if found else None
    if found and family and family.huggingface is None:
        rule, remedy = "has no counterpart in transformers", "give the family one: huggingface"
        problems.append(ConfigError("model.kind", found.job.model.kind, rule, remedy))
    special: _Tokens | None = None
    if found:
        try:
            special = _special_tokens(found, problems)
        except InvalidConfig as error:
            problems += error.problems
    if found and adapter:
        problems += _check_out("out", out, 0)
        if not problems:
            return export_adapter(found, out, DTYPES[dtype])
    model, read = None, None
    if found and not problems:
        base, model = base_of(found), open_model(found.path)
        if base is not None:
            model, read = merging(found, base)
    needed = 0
    if model and dtype in DTYPES:
        needed = sum(s.numel() for s in model.shapes.values()) * DTYPES[dtype].itemsize
    problems += _check_out("out", out, needed)
    if problems or found is None or model is None or family is None or special is None:
        raise InvalidConfig(problems)
    expected = shapes(family, found.config)
    if model.shapes != expected:
        differing = sorted(model.shapes.items() ^ expected.items())[0][0]
        raise CheckpointError(
            f"{found.path}: is not of the model in {found.run / 'job.toml'}: {differing} differs"
        )
    message = f"exporting {found.path.name}"
    with publishing(out) as folder:
        names = {counterpart(family).hf_name(name): name for name in expected}
        try:
            files = write_weights(
                model,
                folder,
                names,
                DTYPES[dtype],
                most,
                lambda done: report(Progress(message, done, needed)),
                read,
            )
        except CannotHold as error:
            remedy = "use bfloat16 or float32, if the run is sound"
            raise InvalidConfig([ConfigError("--dtype", dtype, str(error), remedy)]) from error
        _write_companions(folder, found, to_config(family, found.config, dtype), special)
    return f"{out}: {files} file{'s' * (files > 1)}, {needed:,} bytes of {dtype}, from {found.path}"


def there(path: Path) -> bool:
    """Whether there is anything of that name, if only a link to nowhere."""
    return path.exists() if is_remote(path) else os.path.lexists(path)


def _size(text: str) -> tuple[int, list[ConfigError]]:
    """Bytes of a size such as 5GB or 500 MB."""
    match = re.fullmatch(r"([1-9]\d{0,14}) ?([KMGT]?)B?", text.upper(), re.ASCII)
    if not match:
        remedy = "write it as 5GB, 500MB or a number of bytes"
        return 1, [ConfigError("--max-shard", text, "is no size", remedy)]
    return int(match[1]) * 1000 ** " KMGT".index(match[2] or " "), []


def _check_out(key: str, out: Path, needed: int) -> Iterator[ConfigError]:
    if there(out):
        yield ConfigError(key, str(out), "exists already", "name a folder that is to be made")
        return
    if is_remote(out):
        return
    unwritable = list(check_writable(key, str(out)))
    yield from unwritable
    if not unwritable:
        above = next(folder for folder in out.parents if folder.exists())
        free = shutil.disk_usage(above).free
        if free < needed:
            rule = f"needs {needed:,} bytes, and its disk has {free:,} free"
            yield ConfigError(key, str(out), rule, "use another disk, or make room")


class _Tokens(NamedTuple):
    """The fields of ``config.json``, the special tokens by name, and the ``tokenizer.json``."""

    ids: dict[str, Any]
    names: dict[str, str | None]
    tokenizer: bytes


def _special_tokens(found: CheckpointRef, problems: list[ConfigError]) -> _Tokens:
    """The tokens that begin and end a text, as transformers wants to know them."""
    path = found.run / "tokenizer.json"
    tokenizer, _ = load_tokenizer(path)
    tokens = tokens_beside(tokenizer, path)
    data = path.read_bytes()
    last = sorted(tokens.ends)
    ids: dict[str, Any] = {"eos_token_id": last if len(last) > 1 else last[0]}
    names = {"eos_token": tokenizer.id_to_token(tokens.separator)}
    if (found.run / SOURCE).is_dir():
        kept = _read_json(found.run / SOURCE / "config.json", problems) or {}
        if kept.get("eos_token_id") is None:
            kept.pop("eos_token_id", None)
        known = ("bos_token_id", "eos_token_id", "pad_token_id")
        return _Tokens(ids | {n: kept[n] for n in known if n in kept}, names, data)
    starts = tokens.starts_documents
    if starts or (starts is None and found.job.data.format == "text"):
        # A document begins after a separator: that is how the model has seen it.
        data = with_start(data, tokenizer, tokens.separator)
    first = {"bos_token_id": tokens.separator}
    return _Tokens(first | ids, {"bos_token": names["eos_token"]} | names, data)


def _write_companions(
    folder: Path, found: CheckpointRef, config: dict[str, Any], special: _Tokens
) -> None:
    """``config.json``, the tokenizer, and what tells transformers which tokens are special."""
    with create(folder / "tokenizer.json") as file:
        file.write(special.tokenizer)
    write_json(folder / "config.json", config | special.ids)
    made: dict[str, dict[str, Any]] = {
        "generation_config.json": special.ids,
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            **special.names,
            "clean_up_tokenization_spaces": False,
            "model_max_length": found.config.max_seq_len,
        },
    }
    tuned = (found.run / TEMPLATE_FILE).is_file()
    for name in KEPT[1:]:
        if name == TEMPLATE_FILE and tuned:  # what it was tuned with
            _copy(found.run / name, folder / name)
        elif (found.run / SOURCE / name).is_file():
            _copy(found.run / SOURCE / name, folder / name)
        elif name in made:
            write_json(folder / name, made[name])


def _copy(path: Path, to: Path) -> None:
    with create(to) as file:
        file.write(path.read_bytes())


# --------------------------------------------------------------------------- in


def import_model(source: Path, run_dir: Path, report: Report, force: bool = False) -> str:
    """Make a run of a Hugging Face folder: its weights are the checkpoint of step 0.

    Args:
        source: a folder with ``config.json``, safetensors and ``tokenizer.json``.
        run_dir: a folder that does not exist yet; it appears whole.
        report: told how far it is.
        force: also with a tokenizer that is far smaller than the model's vocabulary.

    Returns:
        What was done, for people.

    Raises:
        InvalidConfig: with every reason why it cannot be.
    """
    if not source.is_dir():
        rule = "is no folder" if source.exists() else "does not exist"
        raise InvalidConfig([ConfigError("folder", str(source), rule, "give a model's folder")])
    problems: list[ConfigError] = []
    config, kind = None, None
    tree = _read_json(source / "config.json", problems)
    if tree is not None:
        kind, found = kind_of(tree, FAMILIES)
        if kind is not None:
            config, found = from_config(FAMILIES[kind], tree)
        problems += found
    model = None if kind is None or config is None else (FAMILIES[kind], config)
    weights = _read_weights(source, model, problems)
    note = _check_tokenizer(source / "tokenizer.json", config, force, problems)
    kept = [name for name in KEPT if there(source / name)]
    for name in kept[1:]:
        _check_kept(source / name, problems)
    expected = {} if model is None or problems else shapes(*model)
    needed = 4 * sum(shape.numel() for shape in expected.values())
    problems += _check_out("run_dir", run_dir, needed)
    if problems or model is None or config is None:
        raise InvalidConfig(problems)
    their_name = counterpart(model[0]).hf_name

    job = replace(
        Job(),
        run={"dir": str(run_dir)},
        model={"kind": kind, "preset": next(iter(model[0].presets)), **config.model_dump()},
        data={"tokenizer": str(run_dir / "tokenizer.json")},
        train={"seq_len": min(1024, config.max_seq_len)},
    )
    manifest = {
        "step": 0,
        "samples": 0,
        "mesh": {},
        "weft": weft.__version__,
        "torch": torch.__version__,
        "imported": str(source),
    }
    # A cache of models has links where the files of a model are.
    entries = {name: weights[their_name(name)] for name in expected}
    parts = (
        (name, expected[name], read_tensor(path.resolve(), entry))
        for name, (path, entry) in entries.items()
    )
    message = f"importing {source.name}"
    with publishing(run_dir) as folder:
        try:
            write_model(
                checkpoint_path(folder / "checkpoints", 0),
                parts,
                manifest,
                lambda done: report(Progress(message, done, needed)),
            )
        except CannotHold as error:
            raise InvalidConfig([ConfigError("folder", str(source), str(error))]) from error
        (folder / SOURCE).mkdir()
        for name, place in [(n, f"{SOURCE}/{n}") for n in kept] + [("tokenizer.json",) * 2]:
            _copy(source / name, folder / place)
        with create(folder / "job.toml") as file:
            file.write(to_toml(job, str(source), job).encode())
    dtypes = sorted({NAMES[weights[their_name(name)][1].dtype] for name in expected})
    said = f"{run_dir}: {needed // 4:,} weights, {', '.join(dtypes)} there and float32 here"
    return f"{said}\n{note}" if note else said


def _read_json(path: Path, problems: list[ConfigError]) -> dict[str, Any] | None:
    """A JSON object; None if there is none, and a problem that says why."""
    try:
        return parse_json(_read_small(path))
    except Malformed as error:
        remedy = "every model's folder on the Hub has one" if path.name == "config.json" else ""
        problems.append(ConfigError(path.name, MISSING, str(error), remedy or "fetch it again"))
        return None


def _read_small(path: Path) -> bytes:
    try:
        if not path.is_file():
            raise Malformed("is no file" if there(path) else "does not exist")
        if path.stat().st_size > MOST_BYTES:
            raise Malformed(f"has {path.stat().st_size:,} bytes, which cannot be right")
        return path.read_bytes()
    except OSError as error:
        raise Malformed(f"cannot be read: {error.strerror}") from error


def _check_kept(path: Path, problems: list[ConfigError]) -> None:
    if path.suffix != ".json":
        try:
            _read_small(path)
        except Malformed as error:
            problems.append(
                ConfigError(path.name, MISSING, str(error), "fetch it again, or remove it")
            )
        return
    tree = _read_json(path, problems)
    if tree and "auto_map" in tree:
        rule = "names code to run, which weft never does and does not pass on"
        problems.append(ConfigError(f"{path.name} auto_map", MISSING, rule, "take the field out"))


def _check_tokenizer(path: Path, config: Any, force: bool, problems: list[ConfigError]) -> str:
    """Return what the files say differently about the end of a text, for people."""
    try:
        _read_small(path)
        tokenizer, _ = load_tokenizer(path)
        note = find_document_tokens(tokenizer, [path.parent], str(path)).note
    except Malformed as error:
        remedy = "AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER) writes one"
        problems.append(ConfigError(path.name, MISSING, str(error), remedy))
    except InvalidConfig as error:  # that a file of these is unreadable is reported with the others
        problems += [each for each in error.problems if each.key not in KEPT]
    else:
        entries = vocab_entries(tokenizer)
        if config and entries > config.vocab_size:
            rule = f"has {entries} entries, more than vocab_size = {config.vocab_size}"
            problems.append(ConfigError(path.name, MISSING, rule, "it is another model's"))
        elif config and not force and padded_beyond(entries, config.vocab_size):
            rule = f"has {entries} entries, and the model {config.vocab_size}: more than padding"
            remedy = "put the model's own there, or say --force if this is the one"
            problems.append(ConfigError(path.name, MISSING, rule, remedy))
        return note
    return ""


def _read_weights(
    source: Path, model: tuple[Family, Any] | None, problems: list[ConfigError]
) -> dict[str, tuple[Path, Entry]]:
    """Where each tensor lies, by their name; `problems` gets all that is wrong with any."""
    if there(source / SINGLE):
        index, files = None, [SINGLE]
    elif there(source / INDEX):
        tree = _read_json(source / INDEX, problems)
        if tree is None:
            return {}
        index = tree.get("weight_map")
        if not isinstance(index, dict) or not all(isinstance(v, str) for v in index.values()):
            rule = "must say for every tensor in which file it is"
            problems.append(ConfigError(f"{INDEX} weight_map", MISSING, rule, "fetch it again"))
            return {}
        files = sorted(set(index.values()))
        outside = [name for name in files if not FILE_NAME.fullmatch(name)]
        if outside:
            rule = "is not the plain name of a .safetensors file beside the index"
            key = f"{INDEX} weight_map"
            problems += [ConfigError(key, shown(n), rule, "do not use it") for n in outside[:SHOWN]]
            return {}
    else:
        pickles = sorted(p.name for p in source.iterdir() if PICKLES.fullmatch(p.name))
        if pickles:
            rule = f"does not exist, only {shown(pickles[0])}: a pickle, which is a program"
            problems.append(ConfigError(SINGLE, MISSING, rule, AS_SAFETENSORS))
        else:
            rule, remedy = "does not exist, nor does its index", "fetch the weights, too"
            problems.append(ConfigError(SINGLE, MISSING, rule, remedy))
        return {}

    found: dict[str, tuple[Path, Entry]] = {}
    wrong: list[ConfigError] = []
    for name in files:
        try:
            for tensor, entry in open_weights(source / name).items():
                if tensor in found:
                    rule = f"has {shown(tensor)}, which {found[tensor][0].name} has, too"
                    wrong.append(ConfigError(name, MISSING, rule, "do not use it"))
                found[tensor] = (source / name, entry)
        except Malformed as error:
            wrong.append(ConfigError(name, MISSING, str(error), "fetch it again"))
    if not wrong:
        if index is not None and index != {n: path.name for n, (path, _) in found.items()}:
            rule = "does not say what the files hold"
            wrong.append(ConfigError(INDEX, MISSING, rule, "fetch index and files again"))
        if model is not None:
            wrong += _check_weights(found, *model)
    problems += wrong[:SHOWN]
    if len(wrong) > SHOWN:
        problems.append(
            ConfigError("weights", MISSING, f"{len(wrong) - SHOWN} more problems", "as above")
        )
    return found


def _check_weights(
    found: dict[str, tuple[Path, Entry]], family: Family, config: Any
) -> Iterator[ConfigError]:
    """Are they the model's: all, no others, of its shapes?"""
    if config.num_layers > len(found):
        rule = f"the files hold {len(found)} tensors, fewer than that many layers have"
        yield ConfigError(
            "config.json num_hidden_layers", config.num_layers, rule, "fetch both again"
        )
        return
    theirs = counterpart(family)
    expected = {theirs.hf_name(n): tuple(shape) for n, shape in shapes(family, config).items()}
    for name in found.keys() - expected.keys():
        if not DERIVED.fullmatch(name):
            remedy = "it is another model"
            if name == "lm_head.weight":
                remedy = (
                    "set tie_word_embeddings to false in config.json if it is not the embedding"
                )
            yield ConfigError(shown(name), MISSING, f"is no weight of this {theirs.name}", remedy)
    for name, shape in expected.items():
        if name not in found:
            yield ConfigError(name, MISSING, "is in none of the files", "fetch them again")
            continue
        file, entry = found[name]
        if entry.shape != shape:
            rule = f"is of shape {list(entry.shape)} in {file.name}, not {list(shape)}"
            yield ConfigError(name, MISSING, rule, "weights and config.json are of two models")
        if entry.dtype not in DTYPES.values():
            rule = f"is {NAMES[entry.dtype]}, which float32 does not hold or which is quantised"
            yield ConfigError(name, MISSING, rule, "save it as F32, BF16 or F16")
