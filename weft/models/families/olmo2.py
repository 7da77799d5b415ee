"""OLMo 2 (arXiv:2501.00656): sizes from ``config.json`` of OLMo-2-*."""

from __future__ import annotations

from typing import Any

from weft.models.decoder_config import DecoderConfig
from weft.models.decoder_family import decoder_family
from weft.models.families.llama import TOY
from weft.models.hf_fields import ATTENTION_BIAS, HFMapping

_BASE: dict[str, Any] = {
    "norm_position": "post",
    "qk_norm": "all_heads",
    "rope_scaling": "none",
    "norm_eps": 1e-6,
}
_OLMO2: dict[str, Any] = _BASE | {"vocab_size": 100352, "max_seq_len": 4096}

PRESETS: dict[str, DecoderConfig] = {
    "toy": DecoderConfig(**(_BASE | TOY)),
    "1b": DecoderConfig(
        **_OLMO2, num_layers=16, dim=2048, num_heads=16, num_kv_heads=16, ffn_dim=8192
    ),
    "7b": DecoderConfig(**_OLMO2, num_kv_heads=32, ffn_dim=11008),
    "13b": DecoderConfig(
        **_OLMO2, num_layers=40, dim=5120, num_heads=40, num_kv_heads=40, ffn_dim=13824
    ),
    "32b": DecoderConfig(**_OLMO2, num_layers=64, dim=5120, num_heads=40, ffn_dim=27648),
}

HF_MAPPING = HFMapping(
    name="OLMo 2",
    architecture="Olmo2ForCausalLM",
    model_type="olmo2",
    fields={"attention_bias": ATTENTION_BIAS},
    defaults={"attention_bias": False, "rms_norm_eps": 1e-5},
    constants={"norm_position": "post", "qk_norm": "all_heads"},
    names={
        "attention_output_norm": "post_attention_layernorm",
        "mlp_output_norm": "post_feedforward_layernorm",
    },
)
FAMILY = decoder_family(PRESETS, HF_MAPPING)
