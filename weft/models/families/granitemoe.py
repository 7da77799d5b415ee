"""Granite 3 with experts: sizes from ``config.json`` of granite-3.1-1b-a400m."""

from __future__ import annotations

from typing import Any

from weft.models.decoder_config import DecoderConfig
from weft.models.decoder_family import decoder_family
from weft.models.families.llama import TOY_EXPERTS
from weft.models.hf_fields import (
    ATTENTION_BIAS,
    HFMapping,
    StackedExperts,
    inverse_of,
    same,
)

_SCALES: dict[str, Any] = {
    "embedding_scale": 12.0,
    "residual_scale": 0.22,
    "attention_scale": 1 / 64,
    "logit_scale": 1 / 8,
}
_CONSTANTS: dict[str, Any] = {"score_selected": True, "balance_rate": 0.0}

PRESETS: dict[str, DecoderConfig] = {
    "toy": DecoderConfig(**TOY_EXPERTS, **_SCALES, **_CONSTANTS),
    "1b-a400m": DecoderConfig(
        **_CONSTANTS,
        **_SCALES | {"logit_scale": 1 / 6},
        num_layers=24,
        dim=1024,
        num_heads=16,
        num_experts=32,
        active_experts=8,
        expert_dim=512,
        rope_theta=1.5e6,
        rope_scaling="none",
        norm_eps=1e-6,
        vocab_size=49155,
        tied_embeddings=True,
    ),
}

HF_MAPPING = HFMapping(
    name="Granite MoE",
    architecture="GraniteMoeForCausalLM",
    score_class="",
    model_type="granitemoe",
    fields={
        "attention_bias": ATTENTION_BIAS,
        "embedding_multiplier": same("embedding_scale"),
        "residual_multiplier": same("residual_scale"),
        "attention_multiplier": same("attention_scale"),
        "logits_scaling": inverse_of("logit_scale"),
        "intermediate_size": same("expert_dim"),
        "num_local_experts": same("num_experts"),
        "num_experts_per_tok": same("active_experts"),
    },
    defaults={
        "attention_bias": False,
        "embedding_multiplier": 1.0,
        "residual_multiplier": 1.0,
        "attention_multiplier": 1.0,
        "logits_scaling": 1.0,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
    constants=_CONSTANTS,
    fixed_fields={},
    # Published files have the dropout of pretraining; weft trains without.
    ignored_fields=frozenset({"attention_dropout"}),
    names={"mlp.router": "block_sparse_moe.router.layer"},
    experts="block_sparse_moe.experts",
    stacked=StackedExperts(
        gate_up="block_sparse_moe.input_linear",
        down="block_sparse_moe.output_linear",
        suffixes=(".weight", ".bias"),
    ),
)
FAMILY = decoder_family(PRESETS, HF_MAPPING)
