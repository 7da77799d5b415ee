"""Qwen3, dense (arXiv:2505.09388): sizes from ``config.json``."""

from __future__ import annotations

from typing import Any

from weft.models.decoder_config import DecoderConfig
from weft.models.decoder_family import decoder_family
from weft.models.families.llama import TOY
from weft.models.hf_fields import ATTENTION_BIAS, HFLayers, HFMapping

_BASE: dict[str, Any] = {
    "qk_norm": "head",
    "rope_theta": 1e6,
    "rope_scaling": "none",
    "norm_eps": 1e-6,
}


def _qwen3(**sizes: Any) -> DecoderConfig:
    common = {"num_layers": 36, "head_dim": 128, "vocab_size": 151936, "max_seq_len": 40960}
    return DecoderConfig(**(_BASE | common | sizes))


PRESETS: dict[str, DecoderConfig] = {
    "toy": DecoderConfig(**(_BASE | TOY), head_dim=48),
    # As published.
    "0.6b": _qwen3(num_layers=28, dim=1024, num_heads=16, ffn_dim=3072, tied_embeddings=True),
    "1.7b": _qwen3(
        num_layers=28, dim=2048, num_heads=16, head_dim=0, ffn_dim=6144, tied_embeddings=True
    ),
    "4b": _qwen3(dim=2560, ffn_dim=9728, tied_embeddings=True),
    "8b": _qwen3(head_dim=0, ffn_dim=12288),
    "14b": _qwen3(num_layers=40, dim=5120, num_heads=40, head_dim=0, ffn_dim=17408),
    "32b": _qwen3(num_layers=64, dim=5120, num_heads=64, ffn_dim=25600),
}

HF_MAPPING = HFMapping(
    name="Qwen3",
    architecture="Qwen3ForCausalLM",
    model_type="qwen3",
    fields={"attention_bias": ATTENTION_BIAS},
    defaults={
        "attention_bias": False,
        "head_dim": 128,
        "max_position_embeddings": 32768,
        "num_key_value_heads": 32,
    },
    constants={"qk_norm": "head"},
    layers=HFLayers("max_window_layers", default_window=4096, switch=True),
)
FAMILY = decoder_family(PRESETS, HF_MAPPING)
