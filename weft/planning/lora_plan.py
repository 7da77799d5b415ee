"""LoRA (arXiv:2106.09685): adapted matrices, trainable parameters and FLOPs.

The plan counts and validates with this module; `weft.parallel.lora` builds the adapters with it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection
from typing import Any, NamedTuple

import torch

from weft.config.schema import LoraSection
from weft.models import Family
from weft.models.decoder_config import DecoderConfig
from weft.models.family import UnitCost
from weft.planning.matrices import Matrix, list_matrices
from weft.planning.plan import Plan

BLOCK_NAME = re.compile(r"layers\.(\d+)\.")
TABLES = ("embed_tokens", "lm_head")
QUANT_BLOCK_SIZE = 64  # neighbors in a row of a quantized matrix that share a scale
# Bytes of a block and its scale: see `weft.parallel.quantized`.
QUANT_BLOCK_BYTES = {"nf4": 32 + 4, "int8": 64 + 4}


def is_target(name: str, section: LoraSection) -> bool:
    """Return True if the linear layer of that name gets an adapter.

    A target is the end of a name, as in PEFT: ``up_proj``, or ``experts.up_proj`` only for experts.
    By default, these are all layers of the blocks.
    """
    ends = tuple(f".{target}" for target in section.targets)
    return not ends or f".{name}".endswith(ends)


def outer_targets(model: Any, section: LoraSection) -> list[Matrix]:
    """Return the adapted layers outside of the blocks, which ``lora.targets`` names.

    ``model`` is a family's configuration.
    """
    return [layer for layer in list_tables(model) if layer.name in section.targets]


def saved_tables(model: Any, section: LoraSection) -> list[Matrix]:
    """Return the embedding and the head that ``lora.modules_to_save`` trains in full."""
    tables = list_tables(model)
    if getattr(model, "score_head", False):
        tables.append(Matrix("score", 1, model.dim, block=model.num_layers))
    return [table for table in tables if table.name in section.modules_to_save]


def row_tables(model: Any, section: LoraSection) -> list[Matrix]:
    """Return the tables of which ``lora.trainable_tokens`` trains rows."""
    others = {*section.targets, *section.modules_to_save}
    return [t for t in list_tables(model) if section.token_ids and t.name not in others]


def list_tables(model: Any) -> list[Matrix]:
    """Return embedding and head, unless it is tied; an embedding's inputs are the ids."""
    if not isinstance(model, DecoderConfig):
        return []
    tables = [Matrix("embed_tokens", model.dim, model.vocab_size, block=-1)]
    if not (model.tied_embeddings or model.score_head):
        tables.append(Matrix("lm_head", model.vocab_size, model.dim, block=model.num_layers))
    return tables


def adapts_blocks(plan: Plan) -> bool:
    """Return True if a layer of the blocks gets an adapter."""
    matrices = list_matrices(plan.model, plan.family)
    return any(is_target(matrix.name, plan.lora) for matrix in matrices)


def lora_scaling(section: LoraSection) -> float:
    """Return the factor of the adapters' output (rsLoRA: arXiv:2312.03732)."""
    rank = section.rank
    return section.alpha / (math.sqrt(rank) if section.rank_stabilized else rank)


def lora_lr_factor(name: str, section: LoraSection) -> float:
    """Return the factor of a parameter's learning rate (LoRA+: arXiv:2402.12354).

    It is that of B, and as in PEFT of DoRA's vectors; 1 for other parameters.
    """
    module = name.split(".")[-2:-1]
    return section.lr_ratio if module in (["lora_B"], ["lora_magnitude"]) else 1.0


def is_change(name: str) -> bool:
    """Return True for a change of frozen weights, which has no weight decay.

    Those are the vectors of DoRA, and rows of ``lora.trainable_tokens``.
    """
    return name.endswith((".lora_magnitude.weight", ".lora_rows.weight"))


class TrainingCost(NamedTuple):
    """Trainable parameters, and the cost of a token: forward and backward."""

    seq_len: int
    units: list[UnitCost]  # of the unsharded model; empty if its family defines none
    matrices: list[Matrix]  # of the blocks; with adapters, those that are adapted
    lora_rank: int  # 0: all weights are trained
    num_params: int  # without adapters
    active_params: int  # that one token uses, with adapters
    trainable_params: int
    expert_params: int  # part of the trainable ones that expert parallelism shards
    quantized_params: int
    saved_params: int  # part of the trainable ones that is not in adapters: trained tables
    flops_per_token: float
    causal_flops_per_token: float  # counts only the attention scores below the causal mask


def training_cost(
    section: LoraSection,
    model: Any,
    family: Family,
    seq_len: int,
    frozen_params: Collection[str] = (),
) -> TrainingCost:
    """Count the trainable parameters of a model and the FLOPs per token.

    A trainable weight costs 6 FLOPs per token: forward, gradient of the input, gradient of the
    weight.  A frozen weight costs 4, or 2 in blocks below the first trained parameter.  Attention
    scores have no weights and cost the same.  Of experts and their adapters, the active ones count.
    The count ignores that the input of the first block needs no gradient.

    ``model`` is the family's configuration.  A LoRA rank of 0 means that weights are trained: all
    but ``frozen_params``, names of the full model (with LoRA, of adapters).
    """
    # A token attends to half of its sequence on average.
    full, causal = (family.flops_per_token(model, n) for n in (seq_len, (seq_len + 1) // 2))
    units = family.unit_costs(model, seq_len) if family.unit_costs else []
    num_params = family.num_params(model)
    num_active = (family.num_active_params or family.num_params)(model)
    matrices = list_matrices(model, family)
    adapted = [m for m in matrices if not section.rank or is_target(m.name, section)]
    common = (seq_len, units, adapted, section.rank, num_params)
    if not section.rank:
        experts = sum(unit.expert_params for unit in units)
        left, left_experts, *spared = _count_frozen(model, family, frozen_params, seq_len)
        counts = (num_active, num_params - left, experts - left_experts, 0, 0)
        return TrainingCost(*common, *counts, full - spared[0], causal - spared[1])
    trained = experts = active = quantized = 0
    outer = outer_targets(model, section)
    if section.quantize != "none":
        quantized = sum(m.out_features * m.in_features * (m.experts or 1) for m in matrices)
    for name, outputs, inputs, num_experts, _ in [*matrices, *outer]:
        sizes = {"A": section.rank * inputs, "B": section.rank * outputs}
        sizes["magnitude"] = outputs * section.dora
        params = sum(sizes.values()) * is_target(name, section)
        kind = "embedding_" if name == "embed_tokens" else ""
        held = sum(
            size
            for each, size in sizes.items()
            if f"{name}.lora_{kind if each in 'AB' else ''}{each}.weight" in frozen_params
        )
        trained += (params - held) * (num_experts or 1)
        experts += (params - held) * num_experts
        params -= section.rank * inputs * (name == "embed_tokens")  # a lookup
        active += params * (model.active_experts if num_experts else 1)
    saved, rows = saved_tables(model, section), row_tables(model, section)
    saved = [table for table in saved if f"{table.name}.weight" not in frozen_params]
    rows = [table for table in rows if f"{table.name}.lora_rows.weight" not in frozen_params]
    num_saved = sum(table.out_features * table.in_features for table in saved)
    trained += num_saved + len(section.token_ids) * model.dim * len(rows) if saved or rows else 0
    is_head = {"lm_head", "score", *["embed_tokens"] * getattr(model, "tied_embeddings", False)}
    if any(table.name in is_head for table in rows):
        active += len(section.token_ids) * model.dim
    # At sequence length 0 the model's FLOPs are 6 per weight, without attention.
    change = 6.0 * active - family.flops_per_token(model, 0) / 3
    change += 2.0 * sum(t.out_features * t.in_features for t in saved if t.name in is_head)
    counts = (num_active + active, trained, experts, quantized, num_saved)
    return TrainingCost(*common, *counts, full + change, causal + change)


def _count_frozen(
    model: Any, family: Family, frozen_params: Collection[str], seq_len: int
) -> tuple[int, int, float, float]:
    """Count frozen parameters, those of experts, and the FLOPs that they save.

    A frozen weight has no product for its gradient.  The blocks below the first trained parameter
    have no backward pass at all.  The FLOPs are per token, with all and with causal scores.
    """
    if not frozen_params:
        return 0, 0, 0.0, 0.0
    with torch.device("meta"):
        sizes = {name: param.numel() for name, param in family.build(model).named_parameters()}
    matrices = {f"{matrix.name}.weight": matrix for matrix in list_matrices(model, family)}
    trained = sizes.keys() - set(frozen_params)
    lower = 0  # blocks without a backward pass
    if "embed_tokens.weight" in sizes and "embed_tokens.weight" not in trained:
        blocks = [int(match[1]) for name in trained if (match := BLOCK_NAME.match(name))]
        lower = min(blocks, default=0)
    # A tied head multiplies by the embedding.
    head = "lm_head.weight" if "lm_head.weight" in sizes else "embed_tokens.weight"
    count = experts = products = 0
    for name in frozen_params:
        count += sizes[name]
        if (matrix := matrices.get(name)) is not None:
            experts += sizes[name] * bool(matrix.experts)
            active = model.active_experts if matrix.experts else 1
            products += matrix.out_features * matrix.in_features * active * (matrix.block >= lower)
        elif name == head:
            products += sizes[name]
    saved = []
    for length in (seq_len, (seq_len + 1) // 2):
        units = family.unit_costs(model, length) if family.unit_costs and lower else []
        backward = sum(2 / 3 * unit.flops_per_token for unit in units[1 : 1 + lower])
        saved.append(2.0 * products + backward)
    return count, experts, saved[0], saved[1]


def plan_cost(plan: Plan) -> TrainingCost:
    """Return the `training_cost` of a plan."""
    return training_cost(plan.lora, plan.model, plan.family, plan.seq_len, plan.frozen_params)
