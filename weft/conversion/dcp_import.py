"""Convert checkpoints of ``torch.distributed`` to Hugging Face directories.

Names are Hugging Face's, or those of Meta's Llama, which TorchTitan uses.  Meta's rotary positions
rotate neighboring elements of a head, Hugging Face's rotate element j with j + half of the width;
the rows of queries and keys are permuted accordingly.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from weft.checkpoint.distributed_checkpoint import METADATA, DistributedCheckpoint
from weft.checkpoint.safetensors import lay_out_file
from weft.config.errors import ConfigErrors, InvalidConfig
from weft.config.storage import CorruptData
from weft.conversion.hf_convert import COMPANION_FILES, read_json_object
from weft.planning.model_config import INDEX_FILE

MAX_FILE_BYTES = 4 << 30
# Meta's names -> Hugging Face's, as TorchTitan's Llama3StateDictAdapter has them.  Later versions
# of TorchTitan call some modules otherwise.
META_NAMES = {
    r"tok_embeddings\.weight": "model.embed_tokens.weight",
    r"layers\.(\d+)\.attention\.(?:qkv_linear\.)?w([qkv])\.weight": (
        r"model.layers.\1.self_attn.\2_proj.weight"
    ),
    r"layers\.(\d+)\.attention\.wo\.weight": r"model.layers.\1.self_attn.o_proj.weight",
    r"layers\.(\d+)\.feed_forward\.w1\.weight": r"model.layers.\1.mlp.gate_proj.weight",
    r"layers\.(\d+)\.feed_forward\.w2\.weight": r"model.layers.\1.mlp.down_proj.weight",
    r"layers\.(\d+)\.feed_forward\.w3\.weight": r"model.layers.\1.mlp.up_proj.weight",
    r"layers\.(\d+)\.attention_norm\.weight": r"model.layers.\1.input_layernorm.weight",
    r"layers\.(\d+)\.ffn_norm\.weight": r"model.layers.\1.post_attention_layernorm.weight",
    r"norm\.weight": "model.norm.weight",
    r"(?:output|lm_head)\.weight": "lm_head.weight",
}
EMBEDDINGS = ("tok_embeddings.weight", "model.embed_tokens.weight")
# Entries of a training state that are not weights.
STATE = re.compile(r"^(optim\w*|lr_scheduler\w*|train_state|dataloader|rng\w*|scheduler)\b")
REMEDY = (
    "export the model to Hugging Face's format with the program that wrote it (TorchTitan: "
    "checkpoint.last_save_in_hf), and import that directory"
)


def convert_checkpoint(source: Path, assets: Path | None, out: Path) -> None:
    """Write a Hugging Face directory with the weights of a distributed checkpoint.

    Args:
        source: directory of ``torch.distributed.checkpoint``.
        assets: directory with the model's ``config.json`` and ``tokenizer.json``; None: ``source``.
        out: an empty directory.

    Raises:
        InvalidConfig: the checkpoint cannot be converted.
    """
    errors = ConfigErrors()
    assets = source if assets is None else assets
    if not (assets / "config.json").is_file():
        rule = "is a directory of torch.distributed.checkpoint, which does not say how many heads "
        rule += f"and which positions the model has, and {assets} has no config.json"
        remedy = "name a directory with the model's config.json and tokenizer.json: --assets "
        remedy += "DIRECTORY, such as TorchTitan's model.hf_assets_path"
        errors.add("MODEL", rule, remedy, value=str(source))
        raise InvalidConfig(errors)
    config = read_json_object(assets / "config.json", errors)
    errors.raise_any()
    assert config is not None
    try:
        checkpoint = DistributedCheckpoint(source)
        names = rename(checkpoint, config, source)
        _write(out, _tensors(checkpoint, names, config, source))
    except CorruptData as error:
        errors.add(METADATA, f"{error} ({source})", "save the checkpoint again")
        raise InvalidConfig(errors) from error
    for name in {*COMPANION_FILES, "config.json", "tokenizer.json"}:
        if (assets / name).is_file():
            shutil.copyfile(assets / name, out / name)


def rename(
    checkpoint: DistributedCheckpoint, config: dict[str, Any], source: Path
) -> dict[str, str]:
    """Return the Hugging Face name of each weight by its name in the checkpoint.

    Raises:
        InvalidConfig: the names are of an unknown model.
    """
    errors = ConfigErrors()
    weights = [name for name in checkpoint if not STATE.match(name)]
    found = ((name, each) for name in weights for each in EMBEDDINGS if name.endswith(each))
    name, embedding = next(found, ("", ""))
    shown = ", ".join(weights[:5]) or "no tensors"
    if not name:
        rule = f"has no weights of a language model that weft knows: it has {shown}"
        errors.add("MODEL", rule, REMEDY, value=str(source))
        raise InvalidConfig(errors)
    prefix = name.removesuffix(embedding)
    inside = {name: name.removeprefix(prefix) for name in weights if name.startswith(prefix)}
    inside = {name: short for name, short in inside.items() if not STATE.match(short)}
    if embedding == EMBEDDINGS[1]:
        return inside
    if config.get("model_type") != "llama":
        rule = "has the names of Meta's Llama, but the config.json is of the type "
        rule += f"{config.get('model_type')!r}, whose names there weft does not know"
        errors.add("MODEL", rule, REMEDY, value=str(source))
        raise InvalidConfig(errors)
    names, unknown = {}, []
    for name, short in inside.items():
        matches = (re.fullmatch(pattern, short) for pattern in META_NAMES)
        new = next(
            (m.expand(to) for m, to in zip(matches, META_NAMES.values(), strict=True) if m), ""
        )
        if new:
            names[name] = new
        elif not short.endswith(("freqs_cis", "rope.cache")):  # follow from the configuration
            unknown.append(short)
    if unknown:
        rule = f"has weights that Llama does not have: {', '.join(sorted(unknown)[:5])}"
        errors.add("MODEL", rule, REMEDY, value=str(source))
        raise InvalidConfig(errors)
    return names


def _tensors(
    checkpoint: DistributedCheckpoint, names: dict[str, str], config: dict[str, Any], source: Path
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the weights as Hugging Face has them: names, and order of rows."""
    heads = {"q": config.get("num_attention_heads")}
    heads["k"] = config.get("num_key_value_heads") or heads["q"]
    for name, new in names.items():
        if new == "lm_head.weight" and config.get("tie_word_embeddings"):
            continue  # the table of the embedding
        tensor = checkpoint[name]
        meta = re.search(r"attention\.(?:qkv_linear\.)?w([qk])\.weight$", name)
        if meta:
            number = heads[meta[1]]
            if not isinstance(number, int) or number < 1 or len(tensor) % (2 * number):
                errors = ConfigErrors()
                rule = f"has {new} with {len(tensor)} rows, which {number} heads do not divide"
                errors.add("MODEL", rule, "give the model's own config.json", value=str(source))
                raise InvalidConfig(errors)
            tensor = permute_rows(tensor, number)
        yield new, tensor.contiguous()


def permute_rows(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Reorder rows of ``[heads * K, D]`` from Meta's rotary order to HF's."""
    rows, columns = weight.shape
    pairs = weight.view(heads, rows // heads // 2, 2, columns)
    return pairs.transpose(1, 2).reshape(rows, columns)


def _write(out: Path, tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
    """Write safetensors of limited size, with their index."""
    index: dict[str, str] = {}
    part: dict[str, torch.Tensor] = {}
    number = size = 0

    def flush() -> None:
        nonlocal part, number, size
        number += 1
        file = f"model-{number:05}.safetensors"
        # Aligned: wider dtypes first.
        part = dict(sorted(part.items(), key=lambda item: -item[1].dtype.itemsize))
        layout = lay_out_file({name: (t.dtype, t.shape) for name, t in part.items()}, {})
        with (out / file).open("xb") as stream:
            layout.write(stream, part.values())
        index.update(dict.fromkeys(part, file))
        part, size = {}, 0

    for name, tensor in tensors:
        part[name] = tensor
        size += tensor.nbytes
        if size >= MAX_FILE_BYTES:
            flush()
    if part:
        flush()
    (out / INDEX_FILE).write_text(json.dumps({"metadata": {}, "weight_map": index}))
