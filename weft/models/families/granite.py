"""Granite 3, dense: Llama with a factor for each kind of activation.

Sizes from ``config.json`` of granite-3.1-*-base.
"""

from __future__ import annotations

from typing import Any

from weft.models.decoder_config import DecoderConfig
from weft.models.decoder_family import decoder_family
from weft.models.families.llama import TOY
from weft.models.hf_fields import ATTENTION_BIAS, HFMapping, inverse_of, same

_SCALES: dict[str, Any] = {
    "embedding_scale": 12.0,
    "residual_scale": 0.22,
    "attention_scale": 1 / 64,
    "logit_scale": 1 / 8,
}

_GRANITE31: dict[str, Any] = _SCALES | {
    "num_layers": 40,
    "rope_scaling": "none",
    "vocab_size": 49152,
    "tied_embeddings": True,
}

PRESETS: dict[str, DecoderConfig] = {
    "toy": DecoderConfig(**TOY, **_SCALES),
    "2b": DecoderConfig(**_GRANITE31, dim=2048, ffn_dim=8192, rope_theta=5e6),
    "8b": DecoderConfig(
        **_GRANITE31 | {"attention_scale": 1 / 128, "logit_scale": 1 / 16},
        ffn_dim=12800,
        rope_theta=1e7,
    ),
}

HF_MAPPING = HFMapping(
    name="Granite",
    architecture="GraniteForCausalLM",
    score_class="",
    model_type="granite",
    fields={
        "attention_bias": ATTENTION_BIAS,
        "embedding_multiplier": same("embedding_scale"),
        "residual_multiplier": same("residual_scale"),
        "attention_multiplier": same("attention_scale"),
        "logits_scaling": inverse_of("logit_scale"),
        "mlp_bias": same("ffn_bias"),
    },
    defaults={
        "attention_bias": False,
        "embedding_multiplier": 1.0,
        "residual_multiplier": 1.0,
        "attention_multiplier": 1.0,
        "logits_scaling": 1.0,
        "mlp_bias": False,
    },
    fixed_fields={},
    # Published files have the dropout of pretraining; weft trains without.
    ignored_fields=frozenset({"attention_dropout"}),
)
FAMILY = decoder_family(PRESETS, HF_MAPPING)
