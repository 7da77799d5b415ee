"""Mistral, dense (arXiv:2310.06825).

Sizes from ``config.json`` of Mistral-7B, Mistral-Nemo-Base-2407 and Mistral-Small-3.1-24B.
"""

from __future__ import annotations

from typing import Any

from weft.models.decoder_config import DecoderConfig
from weft.models.decoder_family import decoder_family
from weft.models.families.llama import TOY
from weft.models.hf_fields import HFLayers, HFMapping

_BASE: dict[str, Any] = {"rope_theta": 1e6, "rope_scaling": "none", "max_seq_len": 32768}
_LARGE: dict[str, Any] = _BASE | {
    "num_layers": 40,
    "dim": 5120,
    "head_dim": 128,
    "vocab_size": 131072,
    "max_seq_len": 131072,
}

PRESETS: dict[str, DecoderConfig] = {
    "toy": DecoderConfig(**(_BASE | TOY | {"tied_embeddings": False}), head_dim=48),
    "7b-v0.1": DecoderConfig(
        **(_BASE | {"rope_theta": 10000.0}),
        vocab_size=32000,
        layer_pattern="L",
        sliding_window=4096,
    ),
    "7b-v0.3": DecoderConfig(**_BASE, vocab_size=32768),
    "nemo-12b": DecoderConfig(**_LARGE | {"max_seq_len": 128000}, ffn_dim=14336),
    "small-24b": DecoderConfig(**_LARGE | {"rope_theta": 1e9}, ffn_dim=32768),
}

HF_MAPPING = HFMapping(
    name="Mistral",
    architecture="MistralForCausalLM",
    model_type="mistral",
    defaults={"max_position_embeddings": 131072, "num_key_value_heads": 8},
    layers=HFLayers("L", default_window=4096, has_types=False),
)
FAMILY = decoder_family(PRESETS, HF_MAPPING)
