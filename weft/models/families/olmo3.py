"""OLMo 3: OLMo 2 with windows in three of four layers."""

from __future__ import annotations

from typing import Any

from weft.models.decoder_config import DecoderConfig
from weft.models.decoder_family import decoder_family
from weft.models.families.llama import TOY
from weft.models.hf_fields import ATTENTION_BIAS, HFLayers, HFMapping, HFRope

_BASE: dict[str, Any] = {
    "norm_position": "post",
    "qk_norm": "all_heads",
    "rope_scaling": "none",
    "norm_eps": 1e-6,
}

PRESETS: dict[str, DecoderConfig] = {
    "toy": DecoderConfig(**(_BASE | TOY), layer_pattern="LLG", sliding_window=256),
}

HF_MAPPING = HFMapping(
    name="OLMo 3",
    architecture="Olmo3ForCausalLM",
    model_type="olmo3",
    fields={"attention_bias": ATTENTION_BIAS},
    defaults={"attention_bias": False, "rms_norm_eps": 1e-5},
    constants={"norm_position": "post", "qk_norm": "all_heads"},
    layers=HFLayers("LLLG", default_window=4096),
    rope=HFRope(theta=500000.0, local_theta=500000.0),
    names={
        "attention_output_norm": "post_attention_layernorm",
        "mlp_output_norm": "post_feedforward_layernorm",
    },
)
FAMILY = decoder_family(PRESETS, HF_MAPPING)
