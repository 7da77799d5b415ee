"""What comes of a LoRA run: its adapters as PEFT has them, or merged into the weights.

A checkpoint of such a run has the adapters, and names the one of step 0, which has the weights.
What is merged is what was trained: where the base is quantised, that is the quantised one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from weft.checkpoint.manifest import read_manifest
from weft.checkpoint.weight_files import (
    Model,
    open_model,
    publishing,
    read_weight,
    write_json,
    write_tensors,
)
from weft.config.errors import ConfigError, InvalidConfig
from weft.config.schema import LoraSection
from weft.models import load_family
from weft.models.hf_mapping import counterpart
from weft.parallel.quantize import quantize_matrix, dequantize_matrix
from weft.plan.lora_plan import lora_scaling
from weft.plan.matrices import list_matrices
from weft.tools.inference_model import CheckpointRef, base_of

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"


def merging(found: CheckpointRef, base: Path) -> tuple[Model, Callable[[str], Iterator[Tensor]]]:
    """The base, and the rows of each of its weights with the adapter of that name in it."""
    weights, adapters = open_model(base), open_model(found.path)
    quantized: set[str] = set()
    if found.job.lora.quantize != "none":
        linear = list_matrices(found.config, load_family(found.job.model.kind))
        quantized = {f"{matrix.name}.weight" for matrix in linear}
    return weights, partial(_merged, weights, adapters, found.job.lora, quantized)


def _merged(
    weights: Model, adapters: Model, lora: LoraSection, quantized: set[str], name: str
) -> Iterator[Tensor]:
    module = name.removesuffix(".weight")
    a_name, b_name = (f"{module}.lora_{which}.weight" for which in "AB")
    adapted = a_name in adapters.shapes
    if adapted:
        a_RI, b_OR = (torch.cat([*read_weight(adapters, n)]) for n in (a_name, b_name))
    first = 0
    for rows in read_weight(weights, name):
        if name in quantized:
            rows = dequantize_matrix(quantize_matrix(rows, lora.quantize), torch.float32)
        if adapted:
            rows = rows.float() + lora_scaling(lora) * (b_OR[first : first + len(rows)] @ a_RI)
        first += len(rows)
        yield rows


def export_adapter(found: CheckpointRef, out: Path, dtype: torch.dtype) -> str:
    """Write the adapters of a LoRA run's checkpoint as a folder that PEFT loads.

    Args:
        out: a folder that does not exist yet; it appears whole.

    Returns:
        What was done, for people.

    Raises:
        InvalidConfig: if there are none.
        CheckpointError: if the checkpoint is damaged.
    """
    base = base_of(found)
    if base is None:
        rule = "has no adapters: its run trains all weights, or has not trained yet"
        raise InvalidConfig([ConfigError("--adapter", str(found.path), rule, "export without it")])
    adapters, lora = open_model(found.path), found.job.lora
    their_name = counterpart(load_family(found.job.model.kind)).hf_name
    names = {f"base_model.model.{their_name(name)}": name for name in adapters.shapes}
    config: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": read_manifest(base).get("imported"),
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "use_rslora": lora.rank_stabilized,
        "target_modules": sorted({name.split(".")[-3] for name in adapters.shapes}),
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
    with publishing(out) as folder:
        written = write_tensors(
            folder / WEIGHTS, names, adapters.shapes, dtype, partial(read_weight, adapters)
        )
        write_json(folder / CONFIG, config)  # last: it makes the folder an adapter
    return f"{out}: {len(names)} tensors of adapters, {written:,} bytes, from {found.path}"
