"""OLMo 3: OLMo 2 with windows in three of four layers.

Sizes from ``config.json`` of Olmo-3.1-32B-Instruct, and of 7B as maxtext has them.  The presets
have the context of the published models, which the last stage of pre-training extends from 8,192
tokens by YaRN.  Before it, ``rope_scaling`` is none.
"""

from __future__ import annotations

from typing import Any

from weft.models.decoder_config import DecoderConfig
from weft.models.decoder_family import decoder_family
from weft.models.families.llama import TOY
from weft.models.hf_fields import ATTENTION_BIAS, HFLayers, HFMapping, HFRope
from weft.models.hf_rope import yarn_magnitude

_BASE: dict[str, Any] = {
    "norm_position": "post",
    "qk_norm": "all_heads",
    "rope_scaling": "none",
    "norm_eps": 1e-6,
}
_OLMO3: dict[str, Any] = _BASE | {
    "vocab_size": 100278,
    "max_seq_len": 65536,
    "layer_pattern": "LLLG",
    "sliding_window": 4096,
    "rope_local_theta": 500000.0,
    "rope_scaling": "yarn",
    "rope_magnitude": yarn_magnitude(8.0),
}

PRESETS: dict[str, DecoderConfig] = {
    "toy": DecoderConfig(**(_BASE | TOY), layer_pattern="LLG", sliding_window=256),
    "7b": DecoderConfig(**_OLMO3, num_kv_heads=32, ffn_dim=11008),
    "32b": DecoderConfig(**_OLMO3, num_layers=64, dim=5120, num_heads=40, ffn_dim=27648),
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
