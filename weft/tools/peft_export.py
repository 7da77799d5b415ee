"""Export the adapters of a LoRA run for PEFT, or merge them into the weights.

A checkpoint of such a run has the adapters and names the checkpoint of step 0, which has the base
weights.  A quantized run merges into the quantized weights, which it was trained with.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

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
from weft.models.hf_mapping import get_hf_mapping
from weft.parallel.lora import dequantize_matrix, quantize_matrix
from weft.plan.lora_plan import lora_scaling
from weft.plan.matrices import list_matrices
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
    a_name, b_name = (f"{module}.lora_{which}.weight" for which in "AB")
    has_adapter = a_name in adapters
    if has_adapter:
        a_RI, b_OR = (torch.cat([*adapters[n].read()]) for n in (a_name, b_name))
    offset = first
    for rows in weight.read(first, stop):
        if is_quantized:
            rows = dequantize_matrix(quantize_matrix(rows, lora.quantize), torch.float32)
        if has_adapter:
            rows = rows.float() + lora_scaling(lora) * (b_OR[offset : offset + len(rows)] @ a_RI)
        offset += len(rows)
        yield rows


def export_adapter(checkpoint: CheckpointRef, out: Path, dtype: torch.dtype) -> str:
    """Write the adapters of a LoRA run's checkpoint as a directory that PEFT loads.

    Args:
        checkpoint: a checkpoint of a LoRA run.
        out: a directory that does not exist; it appears when complete.
        dtype: dtype of the written matrices.

    Returns:
        A message for the user.

    Raises:
        InvalidConfig: if there are no adapters.
        CheckpointError: if the checkpoint is damaged.
    """
    base = find_base_checkpoint(checkpoint)
    if base is None:
        rule = "has no adapters: its run trains all weights, or has not trained yet"
        raise InvalidConfig(
            [ConfigError("--adapter", str(checkpoint.path), rule, "export without --adapter")]
        )
    adapters, lora = open_weights(checkpoint.path), checkpoint.job.lora
    mapping = get_hf_mapping(checkpoint.family)
    hf_name = mapping.hf_name
    fused = {part for parts in mapping.fused.values() for part in parts}
    for name in adapters:
        module = ".".join(name.split(".")[2:-2])
        if module in fused:
            rule = f"adapts {module}, which {mapping.name} of transformers fuses with others"
            remedy = "export without --adapter, with the adapters merged"
            raise InvalidConfig([ConfigError("--adapter", str(checkpoint.path), rule, remedy)])
    weights = {f"base_model.model.{hf_name(name)}": w for name, w in adapters.items()}
    config: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": read_manifest(base).get("imported"),
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "use_rslora": lora.rank_stabilized,
        "target_modules": sorted({name.split(".")[-3] for name in weights}),
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
    with publish_directory(out) as directory:
        num_bytes = write_weight_file(directory / WEIGHTS, weights, dtype)
        write_json(directory / CONFIG, config)  # last: this file makes the directory an adapter
    return f"{out}: {len(weights)} adapter tensors, {num_bytes:,} bytes, from {checkpoint.path}"
