"""Arcee's AFM-4.5B: Llama with a square of ReLU and no gate in feed-forward."""

from __future__ import annotations

from typing import Any

from weft.models.decoder_config import DecoderConfig
from weft.models.decoder_family import decoder_family
from weft.models.families.llama import TOY
from weft.models.hf_fields import ATTENTION_BIAS, HFMapping, same

_BASE: dict[str, Any] = {"gated": False, "activation": "relu2", "rope_theta": 10000.0}

PRESETS: dict[str, DecoderConfig] = {"toy": DecoderConfig(**(_BASE | TOY))}

HF_MAPPING = HFMapping(
    name="Arcee",
    architecture="ArceeForCausalLM",
    model_type="arcee",
    fields={"attention_bias": ATTENTION_BIAS, "mlp_bias": same("ffn_bias")},
    defaults={
        "attention_bias": False,
        "mlp_bias": False,
        "hidden_act": "relu2",
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
    },
    constants={"gated": False},
)
FAMILY = decoder_family(PRESETS, HF_MAPPING)
