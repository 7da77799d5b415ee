"""EXAONE 4.0 (arXiv:2507.11407): norms after layers, positions in local ones."""

from __future__ import annotations

from typing import Any

from weft.models.decoder_config import DecoderConfig
from weft.models.decoder_family import decoder_family
from weft.models.families.llama import TOY
from weft.models.hf_fields import HFLayers, HFMapping

_CONSTANTS: dict[str, Any] = {"norm_position": "post", "qk_norm": "head"}

PRESETS: dict[str, DecoderConfig] = {
    "toy": DecoderConfig(
        **_CONSTANTS, **TOY, layer_pattern="LLG", rope_pattern="RRN", sliding_window=256
    ),
}

HF_MAPPING = HFMapping(
    name="EXAONE 4",
    architecture="Exaone4ForCausalLM",
    model_type="exaone4",
    defaults={"num_key_value_heads": 32, "rms_norm_eps": 1e-5},
    constants=_CONSTANTS,
    layers=HFLayers("LLLG", default_window=4096),
    rope_layers="hybrid",
    names={
        "attention_output_norm": "post_attention_layernorm",
        "mlp_output_norm": "post_feedforward_layernorm",
    },
)
FAMILY = decoder_family(PRESETS, HF_MAPPING)
