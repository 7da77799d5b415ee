"""Import a Hugging Face directory as a run with a checkpoint of step 0.

All files are checked before anything is written.  Imported data is never executed: only
safetensors are read, and no code of a model is run.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from weft.checkpoint.manifest import checkpoint_path
from weft.checkpoint.run_fingerprints import fingerprint_run
from weft.checkpoint.safetensors import NAMES
from weft.checkpoint.safetensors_reader import read_file_contents
from weft.checkpoint.shard_files import Contents
from weft.checkpoint.weight_files import (
    INDEX,
    SINGLE,
    UnrepresentableValue,
    Weight,
    publish_directory,
    write_weights_checkpoint,
)
from weft.config.errors import ConfigError, ConfigErrors, InvalidConfig, WeftError
from weft.config.files import replace_bytes, replace_text
from weft.config.run_paths import portable
from weft.config.schema import Job, LoraSection, ModelSection, replace
from weft.config.storage import CorruptData, is_remote
from weft.config.writer import to_toml
from weft.conversion.hf_convert import (
    COMPANION_FILES,
    DTYPES,
    SOURCE_DIR,
    STORE_REMEDY,
    check_out,
    count_progress,
    path_exists,
    read_json_object,
    read_small_file,
)
from weft.conversion.hf_weights import (
    find_differing_copy,
    find_scale,
    list_hf_tensors,
    list_quantized,
    open_hf_weights,
    scale_blocks,
)
from weft.conversion.peft_import import Adapter, count_rows, open_adapter
from weft.conversion.vocabulary_growth import grow_weights, list_added_tokens
from weft.data.document_tokens import find_document_tokens
from weft.data.prepared_cache import Report
from weft.data.tokenizer import has_excess_padding, load_tokenizer, required_vocab_size
from weft.models import FAMILIES, Family, load_family
from weft.models.hf_mapping import (
    detect_family,
    from_hf_config,
    get_hf_mapping,
    param_shapes,
    printable,
    text_config,
)
from weft.planning.model_config import keep_mtp_layers, model_section, resolve_section, with_rows
from weft.planning.vocabulary import MAX_GROWTH, NewTokens, add_tokens, count_entries, round_rows
from weft.version import __version__

# A plain file name: no directory, no parent directory, not hidden.
FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*\.safetensors")
PICKLES = re.compile(r".*\.(bin|pt|pth|ckpt|pkl)")
# Rotary tables of old checkpoints, which follow from the configuration.
DERIVED = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")
MAX_PROBLEMS = 5
SAFETENSORS_REMEDY = "if you trust its source, load it with transformers and call save_pretrained()"


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
        manifest: entries that the manifest of the checkpoint gets.
        new_tokens: tokens that the tokenizer gets; None: its files are copied as they are.
    """

    name: str
    section: ModelSection
    weights: dict[str, Weight]
    num_bytes: int
    dtypes: list[str]
    files: dict[str, Path]
    note: str
    manifest: Mapping[str, Any] = MappingProxyType({})
    new_tokens: NewTokens | None = None

    @property
    def summary(self) -> str:
        """Number of weights and their conversion."""
        dtypes = ", ".join(self.dtypes)
        return f"{self.num_bytes // 4:,} weights, converted from {dtypes} to float32"


def import_model(
    source: Path,
    run_dir: Path,
    report: Report,
    force: bool = False,
    with_mtp: bool = True,
    adapter: Path | None = None,
    path: str = "",
) -> str:
    """Import a Hugging Face directory as a run with a checkpoint of step 0.

    Args:
        source: a directory with ``config.json``, safetensors and ``tokenizer.json``.
        run_dir: a directory that does not exist; it appears when complete.
        report: called with the progress.
        force: accept a tokenizer that is far smaller than the model's vocabulary.
        with_mtp: import the layers of multi-token prediction.
        adapter: directory of an adapter of this model, to train it further.
        path: the ``model.path`` of the run; '': ``source``.

    Returns:
        A message for the user.

    Raises:
        InvalidConfig: with every reason why the import is impossible.
    """
    errors = ConfigErrors()
    with store_errors(source):
        model = open_hf_source(source, path or str(source), force, errors, with_mtp)
    if model is not None:
        rows, saved = model.section.overrides()["vocab_size"], 0
        if adapter is not None:
            saved, file = count_rows(adapter), adapter / "tokenizer.json"
            if saved > rows and path_exists(file):
                model = model._replace(files={**model.files, "tokenizer.json": file})
        entries, _ = count_entries(model.files["tokenizer.json"].read_bytes())
        if (needed := round_rows(entries, max(rows, saved))) > MAX_GROWTH * rows:
            rule = f"has {entries} entries, but model.vocab_size is {rows}"
            errors.add("tokenizer.json", rule, "use the tokenizer of this model")
        model = grow_source(model, with_rows(model.section, needed))
    lora = LoraSection()
    if model is not None and adapter is not None:
        config, _ = resolve_section(model.section)
        with store_errors(adapter):
            opened = open_adapter(adapter, FAMILIES[model.section.kind].of(config), config, errors)
        if opened is not None:
            lora = opened.lora_section(str(adapter))
            model = add_adapter(model, opened, lora)
    check_out(errors, "run_dir", run_dir, 0 if model is None else model.num_bytes)
    errors.raise_any()
    assert model is not None
    job = replace(
        Job(),
        run={"dir": str(run_dir)},
        model=model.section.model_dump(),
        lora=lora.model_dump(),
        data={"tokenizer": str(run_dir / "tokenizer.json")},
        train={"seq_len": min(1024, model.section.overrides()["max_seq_len"])},
    )
    if model.section.overrides().get("score_head"):
        job = replace(job, data={"format": "preferences"}, train={"objective": "reward"})
    with store_errors(source), publish_directory(run_dir) as directory:
        write_imported(directory, directory / "checkpoints", model, job, report)
    summary = f"{run_dir}: {model.summary}"
    return f"{summary}\n{model.note}" if model.note else summary


def grow_source(model: ModelSource, section: ModelSection) -> ModelSource:
    """Return a model with the rows of another section, and a remark about them.

    It has the same family and sizes, apart from the number of rows.
    """
    before, after = (resolve_section(each)[0] for each in (model.section, section))
    if before is None or after is None:
        return model
    family = load_family(section.kind)
    old, new = (param_shapes(family.of(config), config) for config in (before, after))
    grown = [name.removesuffix(".weight") for name in new if new[name] != old.get(name)]
    if not grown:
        return model._replace(section=section)
    counts = [next(iter(old[f"{grown[0]}.weight"])), next(iter(new[f"{grown[0]}.weight"]))]
    note = f"{' and '.join(grown)}: {counts[0]:,} rows become {counts[1]:,}; the new ones are the "
    note += "mean of the others"
    more = sum(new[f"{name}.weight"].numel() - old[f"{name}.weight"].numel() for name in grown)
    return model._replace(
        section=section,
        weights=grow_weights(model.weights, new),
        num_bytes=model.num_bytes + 4 * more,
        note="\n".join(filter(None, (model.note, note))),
        new_tokens=model.new_tokens or NewTokens(),
    )


def add_adapter(model: ModelSource, adapter: Adapter, lora: LoraSection) -> ModelSource:
    """Return the source of a run that trains the adapter of ``lora.path``."""
    config, _ = resolve_section(model.section)
    weights = adapter.apply(model.weights, lora, FAMILIES[model.section.kind].of(config), config)
    added = [name for name in weights if name not in model.weights]
    note = f"{len(added)} tensors of the adapter {lora.path}, of rank {lora.rank}"
    for kind in ("frozen", "trained further"):
        tables = {f"{name}.weight" for name in lora.modules_to_save}
        names = [name for name in adapter.saved if (name in tables) == (kind != "frozen")]
        note += f", which also replaces {', '.join(names)} ({kind})" * bool(names)
    return model._replace(
        weights=weights,
        num_bytes=model.num_bytes + 4 * sum(weights[name].shape.numel() for name in added),
        note=f"{model.note}\n{note}" if model.note else note,
        manifest={"base": checkpoint_path(Path(), 0).name, "saved": adapter.saved_names},
    )


def write_imported(run_dir: Path, home: Path, model: ModelSource, job: Job, report: Report) -> None:
    """Write the files of an imported run and, last, its checkpoint of step 0.

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
        "weft": __version__,
        "torch": torch.__version__,
        "imported": model.section.path,
        **model.manifest,
    }
    for name, content in _read_files(model):
        (run_dir / name).parent.mkdir(parents=True, exist_ok=True)
        replace_bytes(run_dir / name, content)
    manifest["run_files"] = fingerprint_run(run_dir, job, has_trained=False)
    # ``run_dir`` may be a temporary directory, which gets the name ``run.dir`` when it is complete.
    job = portable(job, Path(job.run.dir))
    replace_text(run_dir / "job.toml", to_toml(job, model.section.path, job))
    progress = count_progress(f"importing {model.name}", model.num_bytes, report)
    with publish_directory(checkpoint_path(home, 0)) as directory:
        try:
            write_weights_checkpoint(directory, model.weights, manifest, progress)
        except UnrepresentableValue as error:
            rule = f"cannot be imported: {error}"
            key, value = "model.path", model.section.path
            if ".lora_" in str(error):
                key, value = "lora.path", job.lora.path
            raise InvalidConfig([ConfigError(key, value, rule)]) from error


def _read_files(model: ModelSource) -> Iterator[tuple[str, bytes]]:
    """Yield the files of the run directory, with the new tokens."""
    tokenizer = model.files["tokenizer.json"].read_bytes()
    if model.new_tokens is not None:
        tokenizer = add_tokens(tokenizer, model.new_tokens)
    for name, path in model.files.items():
        content = tokenizer if name == "tokenizer.json" else path.read_bytes()
        if model.new_tokens is not None:
            content = list_added_tokens(name.rpartition("/")[2], content, tokenizer)
        yield name, content


def open_hf_source(
    source: Path, path: str, force: bool, errors: ConfigErrors, with_mtp: bool = True
) -> ModelSource | None:
    """Open a Hugging Face directory; on an error append it and return None.

    Args:
        source: the directory.
        path: its ``model.path``.
        force: accept a tokenizer that is far smaller than the model's vocabulary.
        errors: receives every reason why the import is impossible.
        with_mtp: import the layers of multi-token prediction.
    """
    if not _is_directory(source, errors):
        return None
    kind, config = _read_config(source, errors)
    read_layers = getattr(config, "mtp_layers", 0)
    if config is not None and not with_mtp:
        config = config.model_copy(update={"mtp_layers": 0})
    model = None if config is None else (FAMILIES[kind], config)
    contents = _read_contents(source, model, errors, () if with_mtp else range(read_layers))
    note = _check_tokenizer(source / "tokenizer.json", config, force, errors)
    companions = [name for name in COMPANION_FILES if path_exists(source / name)]
    for name in companions[1:]:
        _check_companion(source / name, errors)
    if model is None or errors:
        return None
    shapes = param_shapes(*model)
    if read_layers:
        kept = f"are {'imported' if with_mtp else 'not imported'}"
        mtp_note = f"layers of multi-token prediction (model.mtp_layers={read_layers}) {kept}"
        note = f"{note}\n{mtp_note}" if note else mtp_note
    tree = read_json_object(source / "config.json", errors) or {}
    notes = [note, *_describe_training(text_config(tree, FAMILIES), model[1])]
    if text_config(tree, FAMILIES) is not tree:
        notes.append(f"the text model of {tree.get('model_type')}: its other parts are left out")
    note = "\n".join(filter(None, notes))
    files = {f"{SOURCE_DIR}/{name}": source / name for name in companions}
    return ModelSource(
        source.name,
        model_section(kind, config, path),
        open_hf_weights(*model, contents),
        4 * sum(shape.numel() for shape in shapes.values()),
        sorted({NAMES[tensor.dtype] for tensor in contents.tensors.values()}),
        {"tokenizer.json": source / "tokenizer.json", **files},
        note,
    )


def open_hf_model(
    source: Path, errors: ConfigErrors
) -> tuple[Family, Any, dict[str, Weight]] | None:
    """Open the model of a Hugging Face directory, without its tokenizer.

    Args:
        source: the directory.
        errors: receives every reason why the model cannot be read.

    Returns:
        Family, configuration, and weights by weft's name; None after an error.
    """
    if not _is_directory(source, errors):
        return None
    kind, config = _read_config(source, errors)
    model = None if config is None else (FAMILIES[kind], config)
    contents = _read_contents(source, model, errors)
    if model is None or errors:
        return None
    return *model, open_hf_weights(*model, contents)


@contextmanager
def store_errors(source: Path) -> Iterator[None]:
    """Convert the errors of an object store's client, which are of many types.

    Raises:
        InvalidConfig: instead of these errors.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, WeftError) or not is_remote(source):
            raise
        rule = f"cannot be read: {type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        raise InvalidConfig([ConfigError("directory", str(source), rule, STORE_REMEDY)]) from error


def _is_directory(source: Path, errors: ConfigErrors) -> bool:
    """Return True if the model's directory exists; append an error otherwise."""
    if source.is_dir():
        return True
    rule, remedy = "does not exist", "give a model's directory"
    if source.exists():
        rule = "is not a directory"
    elif is_remote(source):
        bucket = source.path.partition("/")[0]  # type: ignore[attr-defined]
        has_bucket = source.fs.exists(bucket)  # type: ignore[attr-defined]
        rule = "has no files" if has_bucket else f"is in the bucket {bucket}, which does not exist"
        remedy = STORE_REMEDY
    errors.add("directory", rule, remedy, value=str(source))
    return False


def _read_config(source: Path, errors: ConfigErrors) -> tuple[str, Any]:
    """Return the family and the model's configuration, which is None after an error."""
    kind, config = None, None
    tree = read_json_object(source / "config.json", errors)
    if tree is not None:
        tree = text_config(tree, FAMILIES)
        kind, config_errors = detect_family(tree, FAMILIES)
        if kind is not None:
            config, config_errors = from_hf_config(FAMILIES[kind], tree)
        errors += config_errors
    return kind or "", config and keep_mtp_layers(source, config)


# Fields of ``config.json`` that ask for something in training that weft does not do.
UNAPPLIED_FIELDS = {
    "attention_dropout": "weft trains the model without dropout",
    "residual_dropout": "weft trains the model without dropout",
    "aux_loss_alpha": "model.router_aux_loss_coef is such a loss",
}


def _describe_training(tree: dict[str, Any], config: Any) -> Iterator[str]:
    """Yield how training departs from a ``config.json``, or from transformers'."""
    for name, reason in UNAPPLIED_FIELDS.items():
        if tree.get(name):
            yield f"{name}={tree[name]} in config.json is not applied: {reason}"
    ends, padding = tree.get("eos_token_id"), tree.get("pad_token_id")
    pads_with_end = padding is not None and padding in (ends if isinstance(ends, list) else [ends])
    if pads_with_end and getattr(config, "score_head", False):
        yield (
            f"pad_token_id={padding} is an end token: transformers reads the score of this model "
            "before it, if an answer ends in it; weft reads it at the end token"
        )
    rate = getattr(config, "balance_rate", 0.0)
    if rate and getattr(config, "num_experts", 0):
        yield (
            f"each step moves the load-balance biases of the routers by model.balance_rate={rate:g}"
            ", except with LoRA; set it to 0 to keep them, as transformers does"
        )


def _check_companion(path: Path, errors: ConfigErrors) -> None:
    if path.suffix != ".json":
        try:
            read_small_file(path)
        except CorruptData as error:
            errors.add(path.name, str(error), "download it again, or remove it")
        return
    tree = read_json_object(path, errors)
    if tree and "auto_map" in tree:
        rule = "names code to run, which weft neither runs nor exports"
        errors.add(f"{path.name} auto_map", rule, "remove the field")


def _check_tokenizer(path: Path, config: Any, force: bool, errors: ConfigErrors) -> str:
    """Return a note if the files disagree about the token that ends a text."""
    try:
        read_small_file(path)
        tokenizer, _ = load_tokenizer(path)
        note = find_document_tokens(tokenizer, [path.parent], str(path)).note
    except CorruptData as error:
        remedy = "AutoTokenizer.from_pretrained(DIRECTORY).save_pretrained(DIRECTORY) writes one"
        errors.add(path.name, str(error), remedy)
    except InvalidConfig as error:  # `_check_companion` reports unreadable companion files
        errors += [p for p in error.errors if p.key not in COMPANION_FILES]
    else:
        size = required_vocab_size(tokenizer)
        if config and not force and has_excess_padding(size, config.vocab_size):
            rule = (
                f"has {size} entries, but the model {config.vocab_size}: more than padding explains"
            )
            remedy = "use the model's own tokenizer, or --force if this is it"
            errors.add(path.name, rule, remedy)
        return note
    return ""


def _read_contents(
    source: Path,
    model: tuple[Family, Any] | None,
    errors: ConfigErrors,
    skipped: Sequence[int] = (),
) -> Contents:
    """Return the tensors in the files of a model; append errors to ``errors``.

    ``skipped``: layers after the model's own that it leaves out.
    """
    contents = Contents(source, {}, {})
    if path_exists(source / SINGLE):
        index, files = None, [SINGLE]
    elif path_exists(source / INDEX):
        tree = read_json_object(source / INDEX, errors)
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
        _select_text_model(contents)
        if model is not None:
            _check_shapes(contents, *model, found, skipped)
    errors += found[:MAX_PROBLEMS]
    if len(found) > MAX_PROBLEMS:
        errors.add("weights", f"have {len(found) - MAX_PROBLEMS} more problems")
    return contents


# Names of the text model in files of multi-modal models, and of their other parts.
TEXT_PREFIXES = {
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "model.language_model.": "model.",
}
OTHER_PARTS = re.compile(
    r"(model\.)?(vision_tower|vision_model|visual|multi_modal_projector|audio_tower|embed_vision"
    r"|embed_audio|multimodal_projector)\."
)


def _select_text_model(contents: Contents) -> None:
    """Leave the text model of a multi-modal one, under its own names."""
    if not any(name.startswith(tuple(TEXT_PREFIXES)) for name in contents.tensors):
        return
    tensors = dict(contents.tensors)
    contents.tensors.clear()
    for name, entry in tensors.items():
        if not OTHER_PARTS.match(name):
            prefix = next((each for each in TEXT_PREFIXES if name.startswith(each)), "")
            contents.tensors[TEXT_PREFIXES.get(prefix, "") + name.removeprefix(prefix)] = entry


def _check_shapes(
    contents: Contents, family: Family, config: Any, errors: ConfigErrors, skipped: Sequence[int]
) -> None:
    """Check that the files have exactly the model's tensors, with its shapes."""
    tensors, mapping = contents.tensors, get_hf_mapping(family)
    experts = config.num_moe_layers * config.num_experts if mapping.stacked is None else 0
    if config.num_layers + experts > len(tensors):
        rule = f"needs more tensors than the {len(tensors)} in the files"
        key = "config.json num_hidden_layers"
        errors.add(key, rule, "download both again", value=config.num_layers)
        return
    expected = list_hf_tensors(family, config)
    head = "lm_head.weight"
    for own in [t for t in expected.values() if t[1:3] == (("embed_tokens.weight",), "whole")]:
        # Some programs save a tied head, too.
        expected.setdefault(head, own._replace(kind="copy"))
    quantized = list_quantized(expected, mapping, contents)
    shapes = {name: tuple(t.shape) for name, t in expected.items() if name not in quantized}
    for name, (blocks, scales) in quantized.items():
        shapes |= {f"{name}_blocks": tuple(blocks), f"{name}_scales": tuple(scales)}
    packed = {f"{name}_{kind}" for name in quantized for kind in ("blocks", "scales")}
    prefixes = tuple(f"model.layers.{config.num_layers + i}." for i in skipped)
    scale_names = {scale for name in tensors if (scale := find_scale(contents, name))}
    # Scales of inputs are those of a server; weft computes in the dtype of training.
    scale_names |= {name for name in tensors if name.endswith((".input_scale", ".input_scale_inv"))}
    for name in tensors.keys() - shapes.keys() - scale_names:
        remedy = "use weights and config.json of one model"
        if not DERIVED.fullmatch(name) and not name.startswith(prefixes):
            errors.add(printable(name), f"is not a weight of this {mapping.name}", remedy)
    for name, shape in shapes.items():
        if name not in tensors:
            if name not in expected or expected[name].kind != "copy":
                remedy = "download them again"
                if name == head:  # alone, it is no accident
                    remedy = "set tie_word_embeddings to true in config.json, so that the model "
                    remedy += "uses its embedding, or download the files again"
                errors.add(name, "is in none of the files", remedy)
            continue
        tensor = tensors[name]
        if tensor.shape != shape:
            file = tensor.shards[0].file
            rule = f"has shape {list(tensor.shape)} in {file}, not {list(shape)}"
            errors.add(name, rule, "use weights and config.json of one model")
        if name in packed and tensor.dtype != torch.uint8:
            rule = f"is {NAMES[tensor.dtype]}, not U8, the dtype of packed MXFP4"
            errors.add(name, rule, "download it again")
        elif (scale := find_scale(contents, name)) is not None:
            if scale_blocks(tensor.shape, tensors[scale].shape) is None:
                rule = f"has shape {list(tensors[scale].shape)}, which does not fit {name}, "
                errors.add(scale, f"{rule}of shape {list(tensor.shape)}", "download it again")
        elif name not in packed and tensor.dtype not in DTYPES.values():
            rule = f"is {NAMES[tensor.dtype]}, which is quantized or does not fit in float32"
            errors.add(name, rule, "save it as F32, BF16 or F16")
    if not errors and (pair := find_differing_copy(expected, contents)):
        rule = f"differs from {pair[1]}, which layers of multi-token prediction share in weft"
        remedy = "leave out these layers: --model.mtp_layers 0, or weft import --no-mtp"
        if pair[0] == head:
            rule = f"differs from {pair[1]}, but config.json ties them"
            remedy = "set tie_word_embeddings to false in config.json"
        errors.add(pair[0], rule, remedy)
