"""Mixtures of experts without a counterpart in transformers."""

from __future__ import annotations

from typing import Any

from weft.models.decoder_config import DecoderConfig
from weft.models.decoder_family import decoder_family

_BASE: dict[str, Any] = {"rope_scaling": "none", "norm_eps": 1e-6, "head_dim": 128}

PRESETS: dict[str, DecoderConfig] = {
    # For two CPU cores.
    "toy-moe": DecoderConfig(
        **_BASE
        | {
            "qk_norm": "head",
            "num_layers": 3,
            "dim": 128,
            "num_heads": 4,
            "num_kv_heads": 2,
            "head_dim": 32,
            "num_experts": 8,
            "active_experts": 2,
            "expert_dim": 128,
            "shared_experts": 1,
            "dense_layers": 1,
            "ffn_dim": 384,
            "vocab_size": 4096,
            "max_seq_len": 1024,
            "rope_theta": 10000.0,
            "tied_embeddings": True,
        }
    ),
    # arXiv:2505.09388, table 2, and the checkpoint's ``config.json``.
    "qwen3-30b-a3b": DecoderConfig(
        **_BASE,
        qk_norm="head",
        num_layers=48,
        dim=2048,
        num_kv_heads=4,
        num_experts=128,
        active_experts=8,
        expert_dim=768,
        ffn_dim=6144,
        vocab_size=151936,
        max_seq_len=40960,
        rope_theta=1e6,
    ),
    # The sizes of DeepSeek-V3 (arXiv:2412.19437, section 4.2), but with grouped-query attention.
    # The model therefore has 675 billion parameters, not 671, 41 of them active, not 37, and a
    # larger KV cache.
    "v3-like": DecoderConfig(
        **_BASE,
        num_layers=61,
        dim=7168,
        num_heads=128,
        num_kv_heads=8,
        num_experts=256,
        active_experts=8,
        expert_dim=2048,
        shared_experts=1,
        dense_layers=3,
        ffn_dim=18432,
        score="sigmoid",
        route_scale=2.5,
        vocab_size=129280,
        max_seq_len=4096,
        rope_theta=10000.0,
    ),
}
FAMILY = decoder_family(PRESETS)
