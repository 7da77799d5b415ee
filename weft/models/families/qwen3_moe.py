"""Qwen3 with experts (arXiv:2505.09388): sizes from ``config.json`` of Qwen3-*-A*."""

from __future__ import annotations

from typing import Any

from weft.models.decoder_config import DecoderConfig
from weft.models.decoder_family import decoder_family
from weft.models.families.llama import TOY
from weft.models.hf_fields import ATTENTION_BIAS, HFLayers, HFMapping, same

_BASE: dict[str, Any] = {
    "qk_norm": "head",
    "head_dim": 128,
    "num_kv_heads": 4,
    "rope_theta": 1e6,
    "rope_scaling": "none",
    "norm_eps": 1e-6,
    "balance_rate": 0.0,
}
_QWEN3: dict[str, Any] = _BASE | {
    "num_experts": 128,
    "active_experts": 8,
    "vocab_size": 151936,
    "max_seq_len": 40960,
}
_TOY_EXPERTS: dict[str, Any] = {
    "head_dim": 48,
    "num_experts": 8,
    "active_experts": 2,
    "expert_dim": 128,
    "dense_layers": 1,
}

PRESETS: dict[str, DecoderConfig] = {
    "toy": DecoderConfig(**(_BASE | TOY | _TOY_EXPERTS)),
    "30b-a3b": DecoderConfig(**_QWEN3, num_layers=48, dim=2048, expert_dim=768),
    "235b-a22b": DecoderConfig(**_QWEN3, num_layers=94, dim=4096, num_heads=64, expert_dim=1536),
}

HF_MAPPING = HFMapping(
    name="Qwen3-MoE",
    architecture="Qwen3MoeForCausalLM",
    model_type="qwen3_moe",
    fields={
        "attention_bias": ATTENTION_BIAS,
        "moe_intermediate_size": same("expert_dim"),
        "num_experts": same("num_experts"),
        "num_experts_per_tok": same("active_experts"),
        "norm_topk_prob": same("renormalize"),
        "decoder_sparse_step": same("expert_interval"),
    },
    defaults={
        "attention_bias": False,
        "max_position_embeddings": 32768,
        "num_key_value_heads": 4,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": False,
        "decoder_sparse_step": 1,
    },
    constants={"qk_norm": "head", "balance_rate": 0.0},
    ignored_fields=frozenset({"max_window_layers"}),
    aliases={"num_local_experts": "num_experts"},
    layers=HFLayers("L", default_window=4096, has_types=False, switch=True),
    expert_layers="mlp_only_layers",
    names={"mlp.router": "mlp.gate"},
)
FAMILY = decoder_family(PRESETS, HF_MAPPING)
