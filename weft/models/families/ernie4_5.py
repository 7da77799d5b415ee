"""ERNIE 4.5, dense: sizes from ``config.json`` of ERNIE-4.5-0.3B."""

from __future__ import annotations

from typing import Any

from weft.models.decoder_config import DecoderConfig
from weft.models.decoder_family import decoder_family
from weft.models.families.llama import TOY
from weft.models.hf_fields import HFMapping, HFRope, same

_BASE: dict[str, Any] = {"rope_interleaved": True, "rope_scaling": "none", "tied_embeddings": True}

PRESETS: dict[str, DecoderConfig] = {
    "toy": DecoderConfig(**(_BASE | TOY), head_dim=48),
    "0.3b": DecoderConfig(
        **_BASE,
        num_layers=18,
        dim=1024,
        num_heads=16,
        num_kv_heads=2,
        head_dim=128,
        ffn_dim=3072,
        vocab_size=103424,
    ),
}

HF_MAPPING = HFMapping(
    name="ERNIE 4.5",
    architecture="Ernie4_5ForCausalLM",
    score_class="",
    model_type="ernie4_5",
    fields={"use_bias": same("qkv_bias", "out_bias", "ffn_bias")},
    defaults={
        "use_bias": False,
        "head_dim": 128,
        "max_position_embeddings": 131072,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
    },
    constants={"rope_interleaved": True},
    fixed_fields={},
    rope=HFRope(theta=500000.0),
)
FAMILY = decoder_family(PRESETS, HF_MAPPING)
