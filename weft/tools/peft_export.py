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
from collections.abc import Collection, Iterator, Mapping
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
from weft.models.hf_fields import HFMapping, StackedExperts
from weft.models.hf_mapping import get_hf_mapping, param_shapes
from weft.parallel.lora import dequantize_matrix, quantize_matrix
from weft.plan.lora_plan import lora_scaling
from weft.plan.matrices import list_matrices
from weft.tools.hf_weights import split_name
from weft.tools.inference_model import CheckpointRef, find_base_checkpoint

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"


def open_merged(checkpoint: CheckpointRef, base: Path) -> dict[str, Weight]:
    """Open the base weights with the adapters merged."""
    weights, adapters = open_weights(base), open_weights(checkpoint.path)
    quantized: set[str] = set()
    if checkpoint.job.lora.quantize != "none":
        linear = list_matrices(checkpoint.config, checkpoint.family)
        quantized = {f"{matrix.name}.weight" for matrix in linear}
    return {
        name: Weight(
            weight.shape,
            partial(_merge, name, weight, adapters, checkpoint.job.lora, name in quantized),
        )
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
    has_adapter = f"{module}.lora_A.weight" in adapters
    if has_adapter:
        a, b = (_read_factor(adapters, module, which) for which in "AB")
    offset = first
    for rows in weight.read(first, stop):
        if is_quantized:
            rows = dequantize_matrix(quantize_matrix(rows, lora.quantize), torch.float32)
        if has_adapter:
            part = slice(offset, offset + len(rows))  # of the outputs, or of the experts
            update = b[part] @ (a[part] if a.dim() == 3 else a)
            rows = rows.float() + lora_scaling(lora) * update
        offset += len(rows)
        yield rows


def _read_factor(
    adapters: Mapping[str, Weight], module: str, which: str, expert: int | None = None
) -> Tensor:
    """Return A or B of a module, or of one of its experts."""
    weight = adapters[f"{module}.lora_{which}.weight"]
    if expert is None:
        return torch.cat([*weight.read()])
    return torch.cat([*weight.read(expert, expert + 1)])[0]


# --------------------------------------------------------------------------- PEFT


class _Target(NamedTuple):
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
        name = f"{self.path}.{self.parameter}".rstrip(".")
        return re.sub(r"^.*\.layers\.\d+\.", "", name)


def _list_targets(
    mapping: HFMapping, layers: Collection[str], shapes: Mapping[str, torch.Size]
) -> list[_Target]:
    """Return the targets of weft's layers with adapters."""
    has_experts = any(".experts." in name for name in shapes)
    fused = {part: name for name, parts in mapping.fused.items() for part in parts}
    targets: dict[_Target, None] = {}
    for name in layers:
        layer, module, _ = split_name(f"{name}.weight")
        parent, _, leaf = module.rpartition(".")
        parameter = ""
        parts: tuple[str, ...] = (name,)
        path = mapping.hf_name(name)
        if parent == "mlp.experts":
            # vLLM and PEFT need all three, or PEFT's conversion looks for the wrong wrapper.
            gate_up = tuple(f"{layer}{parent}.{part}_proj" for part in ("gate", "up"))
            if mapping.stacked is None and {*gate_up, f"{layer}{parent}.down_proj"} <= set(layers):
                for e in range(shapes[f"{name}.weight"][0]):
                    path = mapping.hf_name(f"{layer}{parent}.{e}.{leaf}")
                    targets[_Target(path, "", parts, e)] = None
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
        targets[_Target(path, parameter, parts)] = None
    return list(targets)


class _Pair(NamedTuple):
    """One target's matrices A and B as PEFT stores them.

    Attributes:
        a, b: the matrices.
        num_parts: number of weft's adapters in them.
    """

    a: Weight
    b: Weight
    num_parts: int


def _open_pair(
    target: _Target,
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


def _peft_weights(targets: Mapping[_Target, _Pair]) -> dict[str, Weight]:
    """Return the tensors of an adapter's file by name."""
    weights: dict[str, Weight] = {}
    paths = {target.path for target in targets if target.parameter == "down_proj"}
    for target, pair in targets.items():
        name = f"base_model.model.{target.path}"
        if target.parameter == "gate_up_proj" and target.path in paths:
            name += ".base_layer"  # PEFT wraps the module for down_proj last
        weights |= {f"{name}.lora_A.weight": pair.a, f"{name}.lora_B.weight": pair.b}
    return weights


def export_adapter(checkpoint: CheckpointRef, out: Path, dtype: torch.dtype) -> str:
    """Write the adapters of a LoRA run's checkpoint as a directory that PEFT loads.

    Args:
        checkpoint: a checkpoint of a LoRA run.
        out: a directory that does not exist; it appears when complete.
        dtype: dtype of the written matrices.

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
    adapters = {n: w for n, w in open_weights(checkpoint.path).items() if ".lora_" in n}
    layers = dict.fromkeys(name.rpartition(".lora_")[0] for name in adapters)
    targets = {
        target: _open_pair(target, adapters, shapes, mapping.stacked)
        for target in _list_targets(mapping, layers, shapes)
    }
    is_marked = mapping.stacked is not None and mapping.stacked.marked
    if is_marked and any(shapes[f"{name}.weight"][:-2] == (1,) for name in layers):
        rule = (
            f"adapts a single expert, whose transposed matrix in {mapping.name} PEFT cannot adapt"
        )
        remedy = "export without --adapter, with the adapters merged"
        raise InvalidConfig([ConfigError("--adapter", str(checkpoint.path), rule, remedy)])
    fused = {target.name: pair.num_parts for target, pair in targets.items() if pair.num_parts > 1}
    config: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": read_manifest(base).get("imported"),
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "use_rslora": lora.rank_stabilized,
        "target_modules": sorted(
            {target.name.rpartition(".")[2] for target in targets if not target.parameter}
        ),
        "target_parameters": sorted({target.name for target in targets if target.parameter})
        or None,
        # The scale of the output stays the same.
        "rank_pattern": {name: lora.rank * parts for name, parts in fused.items()},
        "alpha_pattern": {
            name: lora.alpha * (math.sqrt(parts) if lora.rank_stabilized else parts)
            for name, parts in fused.items()
        },
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
    weights = _peft_weights(targets)
    with publish_directory(out) as directory:
        num_bytes = write_weight_file(directory / WEIGHTS, weights, dtype)
        write_json(directory / CONFIG, config)  # last: this file makes the directory an adapter
    return f"{out}: {len(weights)} adapter tensors, {num_bytes:,} bytes, from {checkpoint.path}"
