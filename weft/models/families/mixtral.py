"""Mixtral (arXiv:2401.04088): sizes from ``config.json`` of Mixtral-8x*-v0.1."""

from __future__ import annotations

from typing import Any

from weft.models.decoder_config import DecoderConfig
from weft.models.decoder_family import decoder_family
from weft.models.families.llama import TOY_EXPERTS
from weft.models.hf_fields import HFLayers, HFMapping, HFRope, same

_BASE: dict[str, Any] = {
    "rope_theta": 1e6,
    "rope_scaling": "none",
    "num_experts": 8,
    "active_experts": 2,
    "balance_rate": 0.0,
}

PRESETS: dict[str, DecoderConfig] = {
    "toy": DecoderConfig(**(_BASE | TOY_EXPERTS)),
    "8x7b": DecoderConfig(**_BASE, expert_dim=14336, vocab_size=32000, max_seq_len=32768),
    "8x22b": DecoderConfig(
        **_BASE,
        num_layers=56,
        dim=6144,
        num_heads=48,
        expert_dim=16384,
        vocab_size=32768,
        max_seq_len=65536,
    ),
}

HF_MAPPING = HFMapping(
    name="Mixtral",
    architecture="MixtralForCausalLM",
    model_type="mixtral",
    fields={
        "intermediate_size": same("expert_dim"),
        "num_local_experts": same("num_experts"),
        "num_experts_per_tok": same("active_experts"),
    },
    defaults={
        "max_position_embeddings": 131072,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
    constants={"balance_rate": 0.0},
    fixed_fields={"attention_dropout": 0.0, "router_jitter_noise": 0.0},
    layers=HFLayers("L", has_types=False),
    rope=HFRope(theta=1e6),
    names={
        "mlp.router": "block_sparse_moe.gate",
        "mlp.experts": "block_sparse_moe.experts",
        "gate_proj": "w1",
        "up_proj": "w3",
        "down_proj": "w2",
    },
)
FAMILY = decoder_family(PRESETS, HF_MAPPING)
