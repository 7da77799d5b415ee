"""Seed-OSS: sizes from ``config.json`` of Seed-OSS-36B."""

from __future__ import annotations

from typing import Any

from weft.models.decoder_config import DecoderConfig
from weft.models.decoder_family import decoder_family
from weft.models.families.llama import TOY
from weft.models.hf_fields import HFMapping, same

_BASE: dict[str, Any] = {
    "qkv_bias": True,
    "rope_theta": 1e7,
    "rope_scaling": "none",
    "norm_eps": 1e-6,
}

PRESETS: dict[str, DecoderConfig] = {
    "toy": DecoderConfig(**(_BASE | TOY | {"tied_embeddings": False}), head_dim=48),
    "36b": DecoderConfig(
        **_BASE,
        num_layers=64,
        dim=5120,
        num_heads=80,
        head_dim=128,
        ffn_dim=27648,
        vocab_size=155136,
        max_seq_len=524288,
    ),
}

HF_MAPPING = HFMapping(
    name="Seed-OSS",
    architecture="SeedOssForCausalLM",
    model_type="seed_oss",
    fields={
        "attention_bias": same("qkv_bias"),
        "attention_out_bias": same("out_bias"),
        "mlp_bias": same("ffn_bias"),
    },
    defaults={
        "attention_bias": True,
        "attention_out_bias": False,
        "mlp_bias": False,
        "head_dim": 128,
        "max_position_embeddings": 524288,
        "num_key_value_heads": 8,
    },
    fixed_fields={},
    # Published files have the dropout of pretraining; weft trains without.
    ignored_fields=frozenset({"attention_dropout", "residual_dropout"}),
)
FAMILY = decoder_family(PRESETS, HF_MAPPING)
