"""Freeze a model and give it adapters.

A `LoraLinear` replaces a linear layer and keeps its ``weight``.  A and B are its submodules
`lora_A` and `lora_B`, the names of PEFT.  So FSDP, checkpoints and the optimizer see ordinary
parameters.

*Experts.*  The experts of a layer hold one stack of matrices (`weft.models.moe.ExpertLinear`), and
so do their adapters: A is ``[experts, rank, inputs]``, B is ``[experts, outputs, rank]``.  Two
grouped GEMMs apply them, so expert parallelism shards A and B like the experts.  The router is
frozen, and so is its load-balance bias: nothing would train the router to follow a moving bias, and
an exported adapter has no place for it.

*Tensor parallel.*  If W is sharded by outputs, A is replicated and B is sharded like W.  If W is
sharded by inputs, A is sharded like W and B is replicated.  This adds no collective: the all-reduce
after a *row* matmul is linear in the partial outputs, and the input of a *column* matmul is
complete.  The gradient of the replicated factor is a partial sum on each rank: *partial_grad*
(`weft.models.family.TensorParallelSpec`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from weft.config.schema import LoraSection
from weft.models.family import Init, TensorParallelSpec
from weft.models.layers import linear
from weft.parallel.lora.adapted_layers import FrozenLinear, LoraExpertLinear, LoraLinear
from weft.parallel.lora.dora import DoraExpertLinear, DoraLinear
from weft.parallel.lora.embedding import LoraEmbedding
from weft.parallel.lora.token_rows import add_token_rows
from weft.parallel.quantized import quantized_linear
from weft.planning.lora_plan import QUANT_BLOCK_BYTES, QUANT_BLOCK_SIZE, TABLES, is_target
from weft.planning.matrices import find_linear_layers
from weft.planning.plan import Plan

ADAPTER_INIT = {
    "lora_A": Init("fan_in"),
    "lora_B": Init("zeros"),
    "lora_magnitude": Init("zeros"),  # of `weft.parallel.lora.dora`
    "lora_rows": Init("zeros"),  # of `weft.parallel.lora.token_rows`
    "lora_embedding_A": Init("zeros"),  # of `weft.parallel.lora.embedding`
    "lora_embedding_B": Init("truncated_normal", 1.0),
}


def add_adapters(
    model: nn.Module,
    blocks: list[nn.Module],
    plan: Plan,
    float8_names: Sequence[str],
    sharding: Mapping[str, TensorParallelSpec],
) -> Mapping[str, TensorParallelSpec]:
    """Apply LoRA as planned; return the extended table ``sharding``.

    ``float8_names``: layers whose frozen matrices are multiplied in float8.
    """
    linears: dict[str, FrozenLinear] = {}
    if float8_names:
        from weft.parallel.float8 import frozen_float8_linear

        product = frozen_float8_linear(plan.float8, plan.float8_emulated)
        linears = dict.fromkeys(float8_names, product)
    apply_lora(model, blocks, plan.lora, getattr(torch, plan.compute_dtype), linears)
    return add_adapter_sharding(sharding)


def apply_lora(
    model: nn.Module,
    blocks: list[nn.Module],
    section: LoraSection,
    dtype: torch.dtype,
    linears: Mapping[str, FrozenLinear] = MappingProxyType({}),
) -> None:
    """Freeze ``model`` in place and add adapters, before tensor parallelism.

    Args:
        model: the full model or a pipeline stage.
        blocks: modules of ``model``.
        section: the section ``[lora]``.
        dtype: compute dtype, which frozen weights get.
        linears: products with the frozen weights, by module name; default: as stored.
    """
    layers = find_linear_layers(model, blocks)
    outer = {name: layer for name in section.targets if (layer := model._modules.get(name))}
    layers |= {name: layer for name, layer in outer.items() if isinstance(layer, nn.Linear)}
    quantized = set(layers.values()) - set(outer.values()) if section.quantize != "none" else set()
    saved = [model._modules.get(name) for name in section.modules_to_save]
    for module in model.modules():
        if module in saved:
            continue
        for name, param in module.named_parameters(recurse=False):
            frozen = param.data.to(dtype)
            if module in quantized and name == "weight":
                *rows, inputs = param.shape
                shape = *rows, inputs // QUANT_BLOCK_SIZE, QUANT_BLOCK_BYTES[section.quantize]
                frozen = torch.empty(shape, dtype=torch.uint8, device=param.device)
            module.register_parameter(name, nn.Parameter(frozen, requires_grad=False))
    if section.token_ids:
        others = {*section.targets, *section.modules_to_save}
        add_token_rows(model, [n for n in TABLES if n not in others], section.token_ids)
    in_blocks: FrozenLinear = linear
    if quantized:
        in_blocks = quantized_linear
    for name in outer.keys() - layers.keys():
        embedding: Any = outer[name]
        model.set_submodule(name, LoraEmbedding(embedding, section))
    for name, layer in layers.items():
        product = linear if name in outer else in_blocks
        target = section if is_target(name, section) else None
        kind = LoraLinear if isinstance(layer, nn.Linear) else LoraExpertLinear
        if section.dora and target is not None:
            kind = DoraLinear if isinstance(layer, nn.Linear) else DoraExpertLinear
        model.set_submodule(name, kind(layer, target, linears.get(name, product)))


def add_adapter_sharding(table: Mapping[str, TensorParallelSpec]) -> dict[str, TensorParallelSpec]:
    """Return a family's SHARDING, extended by that of the adapters."""
    extended = dict(table)
    partial_grad = TensorParallelSpec("partial_grad")
    for pattern, spec in table.items():
        split = TensorParallelSpec(spec.weight, heads=spec.heads)
        a = partial_grad if spec.weight == "column" else split
        b = partial_grad if spec.weight in ("row", "vocabulary") else split
        names = {"lora_A": a, "lora_B": b, "lora_magnitude": b}
        names |= {"lora_embedding_A": a, "lora_embedding_B": b}
        names["lora_rows"] = partial_grad
        extended |= {f"{pattern}.{name}": spec for name, spec in names.items()}
    return extended


def adapter_init(name: str, model: Any, get_init: Callable[[str], Init]) -> Init:
    """Return a parameter's initialization; ``get_init`` serves the base ``model``."""
    module = name.split(".")[-2] if "." in name else name
    if module == "lora_embedding_B" and model.tied_embeddings:  # of the head, as A there
        return Init("truncated_normal", (3 * model.dim) ** -0.5)
    return ADAPTER_INIT[module] if module in ADAPTER_INIT else get_init(name)
