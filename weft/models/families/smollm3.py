"""SmolLM3: Llama without positions in every fourth layer."""

from __future__ import annotations

from typing import Any

from weft.models.decoder_config import DecoderConfig
from weft.models.decoder_family import decoder_family
from weft.models.families.llama import TOY
from weft.models.hf_fields import ATTENTION_BIAS, HFLayers, HFMapping, HFRope, same

_BASE: dict[str, Any] = {
    "rope_theta": 5e6,
    "rope_scaling": "none",
    "norm_eps": 1e-6,
    "tied_embeddings": True,
}

PRESETS: dict[str, DecoderConfig] = {
    "toy": DecoderConfig(**(_BASE | TOY), rope_pattern="RRN"),
    "3b": DecoderConfig(
        **_BASE,
        num_layers=36,
        dim=2048,
        num_heads=16,
        num_kv_heads=4,
        ffn_dim=11008,
        max_seq_len=65536,
        rope_pattern="RRRN",
    ),
}

HF_MAPPING = HFMapping(
    name="SmolLM3",
    architecture="SmolLM3ForCausalLM",
    model_type="smollm3",
    fields={"attention_bias": ATTENTION_BIAS, "mlp_bias": same("ffn_bias")},
    defaults={
        "attention_bias": False,
        "mlp_bias": False,
        "max_position_embeddings": 32768,
        "num_key_value_heads": 4,
        "tie_word_embeddings": True,
    },
    ignored_fields=frozenset({"max_window_layers"}),
    layers=HFLayers("no_rope", switch=True),
    rope=HFRope(theta=2e6),
    rope_layers="no_rope_layers",
)
FAMILY = decoder_family(PRESETS, HF_MAPPING)
