"""GLM-4-0414: dense, with norms before and after each part of a block."""

from __future__ import annotations

from typing import Any

from weft.models.decoder_config import DecoderConfig
from weft.models.decoder_family import decoder_family
from weft.models.families.llama import TOY
from weft.models.hf_fields import HFMapping, HFRope, same

_CONSTANTS: dict[str, Any] = {"norm_position": "both", "rope_interleaved": True}
_BASE: dict[str, Any] = _CONSTANTS | {"rope_theta": 10000.0, "rope_fraction": 0.5, "qkv_bias": True}

PRESETS: dict[str, DecoderConfig] = {
    "toy": DecoderConfig(**(_BASE | TOY | {"tied_embeddings": False}), head_dim=48),
}

HF_MAPPING = HFMapping(
    name="GLM-4",
    architecture="Glm4ForCausalLM",
    model_type="glm4",
    fields={"attention_bias": same("qkv_bias")},
    defaults={
        "attention_bias": True,
        "head_dim": 128,
        "max_position_embeddings": 131072,
        "num_key_value_heads": 2,
        "rms_norm_eps": 0.00000015625,
    },
    constants=_CONSTANTS,
    rope=HFRope(fraction=0.5),
    names={
        "attention_output_norm": "post_self_attn_layernorm",
        "mlp_output_norm": "post_mlp_layernorm",
    },
    fused={"mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj")},
)
FAMILY = decoder_family(PRESETS, HF_MAPPING)
