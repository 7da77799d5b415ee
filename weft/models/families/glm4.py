"""GLM-4-0414: dense, with norms before and after each part of a block.

Sizes of 9b are transformers' defaults, those of 32b the metadata of GLM-4-32B-0414 in llama.cpp.
"""

from __future__ import annotations

from typing import Any

from weft.models.decoder_config import DecoderConfig
from weft.models.decoder_family import decoder_family
from weft.models.families.llama import TOY
from weft.models.hf_fields import HFMapping, HFRope, same

_CONSTANTS: dict[str, Any] = {"norm_position": "both", "rope_interleaved": True}
_BASE: dict[str, Any] = _CONSTANTS | {"rope_theta": 10000.0, "rope_fraction": 0.5, "qkv_bias": True}
_GLM4: dict[str, Any] = _BASE | {
    "num_kv_heads": 2,
    "rope_scaling": "none",
    "vocab_size": 151552,
    "max_seq_len": 32768,
}

PRESETS: dict[str, DecoderConfig] = {
    "toy": DecoderConfig(**(_BASE | TOY | {"tied_embeddings": False}), head_dim=48),
    "9b": DecoderConfig(**_GLM4, num_layers=40, ffn_dim=13696),
    "32b": DecoderConfig(
        **_GLM4 | {"qkv_bias": False},
        num_layers=61,
        dim=6144,
        num_heads=48,
        ffn_dim=23040,
    ),
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
