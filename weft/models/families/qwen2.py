"""Qwen2 and Qwen2.5, dense (arXiv:2412.15115): sizes of Qwen2.5-*."""

from __future__ import annotations

from typing import Any

from weft.models.decoder_config import DecoderConfig
from weft.models.decoder_family import decoder_family
from weft.models.families.llama import TOY
from weft.models.hf_fields import HFLayers, HFMapping

_BASE: dict[str, Any] = {
    "qkv_bias": True,
    "rope_theta": 1e6,
    "rope_scaling": "none",
    "norm_eps": 1e-6,
}


_LARGE: dict[str, Any] = {"vocab_size": 152064, "max_seq_len": 131072, "norm_eps": 1e-5}


def _qwen25(**sizes: Any) -> DecoderConfig:
    return DecoderConfig(**(_BASE | {"vocab_size": 151936, "max_seq_len": 32768} | sizes))


PRESETS: dict[str, DecoderConfig] = {
    "toy": DecoderConfig(**(_BASE | TOY)),
    "0.5b": _qwen25(
        num_layers=24, dim=896, num_heads=14, num_kv_heads=2, ffn_dim=4864, tied_embeddings=True
    ),
    "1.5b": _qwen25(
        num_layers=28,
        dim=1536,
        num_heads=12,
        num_kv_heads=2,
        ffn_dim=8960,
        max_seq_len=131072,
        tied_embeddings=True,
    ),
    "3b": _qwen25(
        num_layers=36, dim=2048, num_heads=16, num_kv_heads=2, ffn_dim=11008, tied_embeddings=True
    ),
    "7b": _qwen25(
        **_LARGE | {"norm_eps": 1e-6},
        num_layers=28,
        dim=3584,
        num_heads=28,
        num_kv_heads=4,
        ffn_dim=18944,
    ),
    "14b": _qwen25(**_LARGE, num_layers=48, dim=5120, num_heads=40, ffn_dim=13824),
    "32b": _qwen25(**_LARGE, num_layers=64, dim=5120, num_heads=40, ffn_dim=27648),
    "72b": _qwen25(**_LARGE, num_layers=80, dim=8192, num_heads=64, ffn_dim=29568),
}

HF_MAPPING = HFMapping(
    name="Qwen2",
    architecture="Qwen2ForCausalLM",
    model_type="qwen2",
    defaults={"max_position_embeddings": 32768, "num_key_value_heads": 32},
    constants={"qkv_bias": True},
    layers=HFLayers("max_window_layers", default_window=4096, switch=True),
)
FAMILY = decoder_family(PRESETS, HF_MAPPING)
