"""Export the adapters of a LoRA run for PEFT, or merge them into the weights.

A checkpoint of such a run has the adapters and names the checkpoint of step 0, which has the base
weights.  A quantized run merges into the quantized weights, which it was trained with.

PEFT adapts the modules of transformers 5.  Some of them hold several of weft's matrices, row after
row or in turn: fused projections, and the gate and up projections of experts.  One pair of A and B
adapts all rows of such a module.  Its A has the rows of all A, and its B is block-diagonal, so it
computes the same with a multiple of the rank.  A matrix without an adapter gets rows of zeros in B.

Experts are parameters ``[E, ...]`` of one module.  For models whose files have a matrix per expert,
PEFT converts adapters with the names of the files, if all three matrices of the experts have them.
vLLM reads these names, too.  Other adapters have the format of PEFT's ``ParamWrapper`` (0.21).  It
wraps the module once per parameter, so ``base_layer`` in a name means the inner wrapper.  It
flattens A to ``[E * rank, inputs]`` and B to ``[outputs, rank * E]``.  For a class without
``is_transposed`` PEFT takes parameters for ``[E, outputs, inputs]``.  Llama 4 stores ``[E, inputs,
outputs]`` without that mark.  There A and B change places, because the transpose of B A is a
product of their transposes.

With these conversions PEFT drops dense layers named ``gate_proj``, ``up_proj`` or ``down_proj``,
which it takes for experts.  So in a model with experts these layers are named as parameters, too.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from weft.checkpoint.manifest import read_manifest
from weft.checkpoint.weight_files import (
    Weight,
    open_weights,
    publish_directory,
    write_json,
    write_weight_file,
)
from weft.config.errors import ConfigError, InvalidConfig
from weft.config.schema import LoraSection
from weft.conversion.hf_weights import split_name
from weft.inference.inference_model import (
    CheckpointRef,
    find_base_checkpoint,
    format_dropped_mtp,
    is_mtp_weight,
)
from weft.models.family import Family
from weft.models.hf_fields import HFMapping, StackedExperts
from weft.models.hf_mapping import get_hf_mapping, param_shapes
from weft.parallel.lora import row_squares
from weft.parallel.quantized import dequantize_matrix, quantize_matrix
from weft.planning.lora_plan import TABLES, lora_scaling
from weft.planning.matrices import list_matrices

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
PREFIX = "base_model.model."  # of the names of transformers
ROWS = ".lora_rows.weight"  # end of the names of trained rows
ROWS_SUFFIX = ".token_adapter.trainable_tokens_delta"  # in PEFT, which stores the changed rows


def open_merged(
    checkpoint: CheckpointRef, base: Path, without_adapters: bool = False
) -> dict[str, Weight]:
    """Open the weights of a run, by default with the adapters merged."""
    trained = open_weights(checkpoint.path)
    # Tables that were trained in full take the place of those of the base.
    weights = {n: w for n, w in {**open_weights(base), **trained}.items() if ".lora_" not in n}
    adapters = {} if without_adapters else trained
    return merge_adapters(
        weights, adapters, checkpoint.job.lora, checkpoint.family, checkpoint.config
    )


def merge_adapters(
    weights: Mapping[str, Weight],
    adapters: Mapping[str, Weight],
    lora: LoraSection,
    family: Family,
    config: Any,
) -> dict[str, Weight]:
    """Return the weights that a LoRA run computes with.

    Args:
        weights: weights of the base model, by name.
        adapters: adapters by name; empty: only quantize the weights as the run does.
        lora: the section ``[lora]``.
        family: the model family.
        config: its configuration.
    """
    quantized: set[str] = set()
    if lora.quantize != "none":
        quantized = {f"{matrix.name}.weight" for matrix in list_matrices(config, family)}
    return {
        name: Weight(weight.shape, partial(_merge, name, weight, adapters, lora, name in quantized))
        for name, weight in weights.items()
    }


def _merge(
    name: str,
    weight: Weight,
    adapters: Mapping[str, Weight],
    lora: LoraSection,
    is_quantized: bool,
    first: int = 0,
    stop: int | None = None,
) -> Iterator[Tensor]:
    module = name.removesuffix(".weight")
    is_embedding = f"{module}.lora_embedding_A.weight" in adapters
    has_adapter = is_embedding or f"{module}.lora_A.weight" in adapters
    scaling, columns = lora_scaling(lora), None
    change = adapters.get(f"{module}{ROWS}")
    change_ND = None if change is None else torch.cat([*change.read()]).float()
    if has_adapter:
        magnitude = read_magnitude(adapters, module)
    if is_embedding:
        b, a = _read_factor(adapters, module, "embedding_A"), _read_embedding_b(adapters, module)
        if magnitude is not None:
            table = torch.cat([rows.float() for rows in weight.read()])
            before, after = row_squares(table.t(), b.t(), a.t(), scaling).sqrt()
            magnitude, columns = None, (before + magnitude) / after
    elif has_adapter:
        a, b = (_read_factor(adapters, module, which) for which in "AB")
    offset = first
    for rows in weight.read() if stop is None else weight.read(first, stop):
        if is_quantized:
            rows = dequantize_matrix(quantize_matrix(rows, lora.quantize), torch.float32)
        if has_adapter:
            part = slice(offset, offset + len(rows))  # of the outputs, or of the experts
            factors = (a[part] if a.dim() == 3 else a), b[part]
            merged = rows.float() + scaling * factors[1] @ factors[0]
            if magnitude is not None:
                before, after = row_squares(rows.float(), *factors, scaling).sqrt()
                merged *= ((before + magnitude[part]) / after).unsqueeze(-1)
            rows = merged if columns is None else merged * columns
        if change_ND is not None:
            rows = _change_rows(rows, offset, lora.token_ids, change_ND)
        offset += len(rows)
        yield rows


def _change_rows(rows: Tensor, first: int, ids: Sequence[int], change_ND: Tensor) -> Tensor:
    """Return rows, which begin at id ``first``, with the changes of some tokens."""
    inside = [i for i, token in enumerate(ids) if first <= token < first + len(rows)]
    index = torch.tensor([ids[i] - first for i in inside], dtype=torch.int64)
    return rows.float().index_add(0, index, change_ND[inside]) if inside else rows


def _read_factor(
    adapters: Mapping[str, Weight], module: str, which: str, expert: int | None = None
) -> Tensor:
    """Return A or B of a module, or of one of its experts."""
    weight = adapters[f"{module}.lora_{which}.weight"]
    if expert is None:
        return torch.cat([*weight.read()])
    return torch.cat([*weight.read(expert, expert + 1)])[0]


def _read_embedding_b(adapters: Mapping[str, Weight], module: str) -> Tensor:
    """Return B of an embedding, transposed: ``[rank, D]``."""
    return _read_factor(adapters, module, "embedding_B").t()


def read_magnitude(adapters: Mapping[str, Weight], module: str) -> Tensor | None:
    """Return the changes of a matrix's magnitudes (DoRA), or None."""
    weight = adapters.get(f"{module}.lora_magnitude.weight")
    return None if weight is None else torch.cat([*weight.read()])


def row_lengths(weight: Weight) -> Tensor:
    """Return the magnitude of each row of a matrix."""
    return torch.cat([rows.float().norm(dim=-1) for rows in weight.read()])


def column_lengths(weight: Weight) -> Tensor:
    """Return the length of each column of a matrix."""
    table = torch.cat([rows.float() for rows in weight.read()])
    lengths: Tensor = torch.linalg.vector_norm(table, dim=0)
    return lengths


# --------------------------------------------------------------------------- PEFT


class Target(NamedTuple):
    """Module or parameter of transformers that PEFT adapts with one pair of matrices.

    Attributes:
        path: name of the module.
        parameter: name of the parameter; "": PEFT adapts the module.
        parts: weft's layers in it, in order.
        expert: index of the only expert of these layers in it; None: all.
    """

    path: str
    parameter: str
    parts: tuple[str, ...]
    expert: int | None = None

    @property
    def name(self) -> str:
        """The end of the name that selects it, without the layer."""
        return re.sub(r"^.*\.layers\.\d+\.", "", self.full_name)

    @property
    def full_name(self) -> str:
        """The name of the parameter, or of the module."""
        return f"{self.path}.{self.parameter}".rstrip(".")


def list_targets(
    mapping: HFMapping, layers: Collection[str], shapes: Mapping[str, torch.Size]
) -> list[Target]:
    """Return the targets of weft's layers with adapters."""
    has_experts = any(".experts." in name for name in shapes)
    fused = {part: name for name, parts in mapping.fused.items() for part in parts}
    targets: dict[Target, None] = {}
    for name in layers:
        layer, module, _ = split_name(f"{name}.weight")
        parent, _, leaf = module.rpartition(".")
        parameter = ""
        parts: tuple[str, ...] = (name,)
        path = mapping.hf_name(f"{name}.weight").removesuffix(".weight")
        if parent == "mlp.experts":
            # vLLM and PEFT need all three, or PEFT's conversion looks for the wrong wrapper.
            gate_up = tuple(f"{layer}{parent}.{part}_proj" for part in ("gate", "up"))
            if mapping.stacked is None and {*gate_up, f"{layer}{parent}.down_proj"} <= set(layers):
                for e in range(shapes[f"{name}.weight"][0]):
                    path = mapping.hf_name(f"{layer}{parent}.{e}.{leaf}")
                    targets[Target(path, "", parts, e)] = None
                continue
            path = f"model.{layer}{mapping.experts}"
            parameter = leaf
            if leaf != "down_proj":
                parameter, parts = "gate_up_proj", gate_up
        elif module in fused:
            path = mapping.hf_name(layer + fused[module])
            parts = tuple(layer + part for part in mapping.fused[fused[module]])
        elif has_experts and parent.startswith("mlp"):
            parameter = "weight"
        targets[Target(path, parameter, parts)] = None
    return list(targets)


class _Pair(NamedTuple):
    """One target's matrices A and B as PEFT stores them.

    Attributes:
        a, b: the matrices.
        num_parts: number of weft's adapters in them.
        magnitude: lengths of the rows (DoRA), or None.
    """

    a: Weight
    b: Weight
    num_parts: int
    magnitude: Weight | None = None


def _open_pair(
    target: Target,
    adapters: Mapping[str, Weight],
    shapes: Mapping[str, torch.Size],
    layout: StackedExperts | None,
) -> _Pair:
    """Open the matrices of a target.

    Args:
        target: what they adapt.
        adapters: weft's adapters, by name.
        shapes: of weft's weights, by name.
        layout: of stacked experts.
    """
    adapted = [part for part in target.parts if f"{part}.lora_A.weight" in adapters]
    read_one = partial(_read_factor, adapters, expert=target.expert)
    sizes = [shapes[f"{part}.weight"] for part in target.parts]
    if target.expert is not None:
        sizes = [size[1:] for size in sizes]
    *experts, _, inputs = sizes[0]
    outputs = sum(size[-2] for size in sizes)
    rank = adapters[f"{adapted[0]}.lora_A.weight"].shape[-2]
    layout = layout if experts else None
    is_swapped = layout is not None and layout.transposed and not layout.marked

    def read(which: str) -> Iterator[Tensor]:
        if (which == "A") != is_swapped:
            value = torch.cat([read_one(part, "A") for part in adapted], dim=-2)
        else:
            rows = [torch.zeros(*size[:-1], rank * len(adapted)) for size in sizes]
            for i, part in enumerate(adapted):
                block = rows[target.parts.index(part)][..., i * rank : (i + 1) * rank]
                block.copy_(read_one(part, "B"))
            value = torch.cat(rows, dim=-2)
            if layout is not None and layout.interleaved and len(rows) > 1:
                value = torch.stack(rows, dim=-2).flatten(-3, -2)
        value = value.mT if is_swapped else value
        if experts:
            value = value.flatten(0, 1) if which == "A" else value.permute(1, 2, 0).flatten(1)
        yield value.contiguous()

    if is_swapped:
        inputs, outputs = outputs, inputs
    width = len(adapted) * rank * math.prod(experts)
    a = Weight(torch.Size((width, inputs)), partial(read, "A"))
    b = Weight(torch.Size((outputs, width)), partial(read, "B"))
    return _Pair(a, b, len(adapted))


def _open_magnitude(
    target: Target, adapters: Mapping[str, Weight], base: Mapping[str, Weight]
) -> Weight:
    """Open the lengths of a target's rows; without an adapter, of its weight.

    Args:
        target: what the adapters adapt.
        adapters: weft's adapters, by name.
        base: the weights that they were trained with, by name.
    """
    weights = [base[f"{part}.weight"] for part in target.parts]

    def read() -> Iterator[Tensor]:
        for part, weight in zip(target.parts, weights, strict=True):
            lengths = row_lengths(weight)
            magnitude = read_magnitude(adapters, part)
            yield lengths if magnitude is None else lengths + magnitude

    return Weight(torch.Size((sum(weight.shape[0] for weight in weights),)), read)


def _peft_weights(targets: Mapping[Target, _Pair]) -> dict[str, Weight]:
    """Return the tensors of an adapter's file by name."""
    weights: dict[str, Weight] = {}
    paths = {target.path for target in targets if target.parameter == "down_proj"}
    for target, pair in targets.items():
        name = f"{PREFIX}{target.path}"
        if target.parameter == "gate_up_proj" and target.path in paths:
            name += ".base_layer"  # PEFT wraps the module for down_proj last
        weights |= {f"{name}.lora_A.weight": pair.a, f"{name}.lora_B.weight": pair.b}
        if pair.magnitude is not None:
            weights[f"{name}.lora_magnitude_vector"] = pair.magnitude
    return weights


def _embedding_weights(
    adapters: Mapping[str, Weight], base: Mapping[str, Weight], hf_name: str, is_tied: bool
) -> dict[str, Weight]:
    """Return the tensors of the adapters of the embedding and of a tied head.

    Args:
        adapters: weft's adapters, by name.
        base: the weights that they were trained with, by name.
        hf_name: name of the embedding in transformers.
        is_tied: the head shares the embedding's table.
    """
    module = "embed_tokens"
    if f"{module}.lora_embedding_A.weight" not in adapters:
        return {}
    ids, rank = adapters[f"{module}.lora_embedding_A.weight"].shape
    width = adapters[f"{module}.lora_embedding_B.weight"].shape[0]

    def read(which: str, transposed: bool) -> Iterator[Tensor]:
        value = _read_factor(adapters, module, f"embedding_{which}")
        yield (value.t() if transposed else value).contiguous()

    def read_lengths() -> Iterator[Tensor]:
        change = read_magnitude(adapters, module)
        assert change is not None
        yield column_lengths(base[f"{module}.weight"]) + change

    name = f"{PREFIX}{hf_name}"
    weights = {
        f"{name}.lora_embedding_A": Weight(torch.Size((rank, ids)), partial(read, "A", True)),
        f"{name}.lora_embedding_B": Weight(torch.Size((width, rank)), partial(read, "B", False)),
    }
    if f"{module}.lora_magnitude.weight" in adapters:
        weights[f"{name}.lora_magnitude_vector"] = Weight(torch.Size((width,)), read_lengths)
    if is_tied:  # as PEFT writes it
        head = f"{PREFIX}lm_head"
        weights |= {
            f"{head}.lora_A.weight": Weight(torch.Size((rank, width)), partial(read, "B", True)),
            f"{head}.lora_B.weight": Weight(torch.Size((ids, rank)), partial(read, "A", False)),
        }
    return weights


def _table_weights(
    trained_with: Mapping[str, Weight],
    adapters: Mapping[str, Weight],
    lora: LoraSection,
    mapping: HFMapping,
) -> tuple[dict[str, Weight], dict[str, Any]]:
    """Return the tensors of trained tables and rows, and fields of the configuration.

    Args:
        trained_with: weights that adapters were trained with, with trained tables.
        adapters: weft's adapters, by name.
        lora: the section ``[lora]``.
        mapping: of the model.
    """
    weights: dict[str, Weight] = {}
    indices: dict[str, list[int]] = {}
    for table in ("embed_tokens", "score") if "score" in lora.modules_to_save else TABLES:
        hf_name, weight = mapping.hf_name(f"{table}.weight"), trained_with.get(f"{table}.weight")
        if weight is None:
            if TABLES[0] in lora.modules_to_save:  # a tied head, which PEFT stores once more
                weights[f"{PREFIX}{hf_name}"] = trained_with[f"{TABLES[0]}.weight"]
            continue
        if table in lora.modules_to_save:
            weights[f"{PREFIX}{hf_name}"] = weight
        if (change := adapters.get(f"{table}{ROWS}")) is not None:
            module = hf_name.removesuffix(".weight")
            read = partial(_read_token_rows, weight, change, lora.token_ids)
            weights[f"{PREFIX}{module}{ROWS_SUFFIX}"] = Weight(change.shape, read)
            indices[module.rpartition(".")[2]] = list(lora.token_ids)
    return weights, {"trainable_token_indices": indices} if indices else {}


def _read_token_rows(table: Weight, change: Weight, ids: Sequence[int]) -> Iterator[Tensor]:
    rows = torch.cat([rows.float() for token in ids for rows in table.read(token, token + 1)])
    yield rows + torch.cat([*change.read()])


def _select(
    targets: Collection[Target], every: Collection[Target], are_parameters: bool
) -> set[str]:
    """Return the names that select modules, or parameters, in PEFT.

    A name is the end that modules share, unless it would select others, without adapters, too.
    """
    chosen = [target for target in targets if bool(target.parameter) == are_parameters]

    def short(target: Target) -> str:
        return target.name if are_parameters else target.path.rpartition(".")[2]

    others = {f".{target.full_name}" for target in every}
    others -= {f".{target.full_name}" for target in targets}
    is_unique = {
        end: not any(n.endswith(f".{end}") for n in others) for end in {*map(short, chosen)}
    }
    return {
        short(target) if target.expert is not None or is_unique[short(target)] else target.full_name
        for target in chosen
    }


def _peft_config(
    lora: LoraSection,
    targets: Mapping[Target, _Pair],
    every: Collection[Target],
    has_embedding: bool,
    is_tied: bool,
    saved: Collection[str],
) -> dict[str, Any]:
    """Return PEFT's configuration, without the name of the base model.

    Args:
        lora: the section ``[lora]``.
        targets: what the adapters adapt, without the embedding.
        every: what adapters of the model could adapt.
        has_embedding: the embedding has an adapter.
        is_tied: the head shares it.
        saved: names of weights of the base model in the file.
    """
    embedding = ["embed_tokens"] if has_embedding else []
    modules = {name.removeprefix(PREFIX).rpartition(".")[0] for name in saved}
    parts_by_name: dict[str, set[int]] = {}
    for target, pair in targets.items():
        parts_by_name.setdefault(target.name, set()).add(pair.num_parts)
    fused = {
        target.name if len(parts_by_name[target.name]) == 1 else target.full_name: pair.num_parts
        for target, pair in targets.items()
        if pair.num_parts > 1
    }
    return {
        "peft_type": "LORA",
        "task_type": "SEQ_CLS" if "score" in lora.modules_to_save else "CAUSAL_LM",
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "use_rslora": lora.rank_stabilized,
        "use_dora": lora.dora,
        "target_modules": sorted({*_select(targets, every, False), *embedding}),
        "ensure_weight_tying": is_tied,
        "target_parameters": sorted(_select(targets, every, True)) or None,
        # The scale of the output stays the same.
        "rank_pattern": {name: lora.rank * parts for name, parts in fused.items()},
        "alpha_pattern": {
            name: lora.alpha * (math.sqrt(parts) if lora.rank_stabilized else parts)
            for name, parts in fused.items()
        },
        "modules_to_save": sorted(
            name.rpartition(".")[2] for name in modules if not name.endswith(".base_layer")
        )
        or None,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }


def export_adapter(
    checkpoint: CheckpointRef,
    out: Path,
    dtype: torch.dtype,
    write_companions: Callable[[Path], None] = lambda directory: None,
) -> str:
    """Write the adapters of a LoRA run's checkpoint as a directory that PEFT loads.

    Args:
        checkpoint: a checkpoint of a LoRA run.
        out: a directory that does not exist; it appears when complete.
        dtype: dtype of the written matrices.
        write_companions: writes further files into the directory.

    Returns:
        A message for the user.

    Raises:
        InvalidConfig: if there are no adapters, or PEFT cannot express them.
        CheckpointError: if the checkpoint is damaged.
    """
    base, family, lora = find_base_checkpoint(checkpoint), checkpoint.family, checkpoint.job.lora
    if base is None:
        rule = "has no adapters: its run trains all weights, or has not trained yet"
        raise InvalidConfig(
            [ConfigError("--adapter", str(checkpoint.path), rule, "export without --adapter")]
        )
    mapping, shapes = get_hf_mapping(family), param_shapes(family, checkpoint.config)
    # transformers has no layers of multi-token prediction that PEFT could adapt.
    adapters = {
        name: weight
        for name, weight in open_weights(checkpoint.path).items()
        if ".lora_" in name and not is_mtp_weight(name, checkpoint.config)
    }
    layers = dict.fromkeys(n.rpartition(".lora_")[0] for n in adapters if not n.endswith(ROWS))
    has_embedding = layers.pop("embed_tokens", "") is None
    is_tied = has_embedding and checkpoint.config.tied_embeddings
    trained_with = open_merged(checkpoint, base, without_adapters=True)
    targets = {
        target: _open_pair(target, adapters, shapes, mapping.stacked)
        for target in list_targets(mapping, layers, shapes)
    }
    if lora.dora:
        wrapped = [t.name for t in targets if t.parameter or t.expert is not None]
        if wrapped:
            rule = f"adapts {wrapped[0]} with lora.dora, which PEFT does not support in this model"
            remedy = "export without --adapter, with the adapters merged"
            raise InvalidConfig([ConfigError("--adapter", str(checkpoint.path), rule, remedy)])
        targets = {
            target: pair._replace(magnitude=_open_magnitude(target, adapters, trained_with))
            for target, pair in targets.items()
        }
    is_marked = mapping.stacked is not None and mapping.stacked.marked
    if is_marked and any(shapes[f"{name}.weight"][:-2] == (1,) for name in layers):
        rule = (
            f"adapts a single expert, whose transposed matrix in {mapping.name} PEFT cannot adapt"
        )
        remedy = "export without --adapter, with the adapters merged"
        raise InvalidConfig([ConfigError("--adapter", str(checkpoint.path), rule, remedy)])
    manifest = read_manifest(base)
    saved: dict[str, str] = manifest.get("saved", {})  # of `weft.conversion.peft_import`
    matrices = [each.name for each in list_matrices(checkpoint.config, checkpoint.family)]
    every = list_targets(
        mapping, [n for n in matrices if not is_mtp_weight(n, checkpoint.config)], shapes
    )
    tables, fields = _table_weights(trained_with, adapters, lora, mapping)
    names = [*saved, *(name for name in tables if not name.endswith(ROWS_SUFFIX))]
    is_tied |= checkpoint.config.tied_embeddings and bool(lora.modules_to_save)
    config = _peft_config(lora, targets, every, has_embedding, is_tied, names) | fields
    config["base_model_name_or_path"] = manifest.get("imported")
    weights = _peft_weights(targets)
    embedding_name = mapping.hf_name("embed_tokens")
    weights |= _embedding_weights(adapters, trained_with, embedding_name, is_tied)
    weights |= {name: trained_with[ours] for name, ours in saved.items()} | tables
    with publish_directory(out) as directory:
        num_bytes = write_weight_file(directory / WEIGHTS, weights, dtype)
        write_companions(directory)
        write_json(directory / CONFIG, config)  # last: this file makes the directory an adapter
    dropped = format_dropped_mtp(checkpoint.config)
    size = f"{len(weights)} adapter tensors, {num_bytes:,} bytes"
    hint = ""
    if (Path(config["base_model_name_or_path"] or "") / "job.toml").is_file():
        hint = "; PEFT cannot read their base, a run: export it, too, and give PEFT that directory"
    return f"{out}: {size}, from {checkpoint.path}{dropped}{hint}"
