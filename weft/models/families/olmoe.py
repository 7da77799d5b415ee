"""OLMoE (arXiv:2409.02060): sizes from ``config.json`` of OLMoE-1B-7B-0924."""

from __future__ import annotations

from typing import Any

from weft.models.decoder_config import DecoderConfig
from weft.models.decoder_family import decoder_family
from weft.models.families.llama import TOY_EXPERTS
from weft.models.hf_fields import ATTENTION_BIAS, HFMapping, same

_BASE: dict[str, Any] = {
    "qk_norm": "all_heads",
    "rope_theta": 10000.0,
    "rope_scaling": "none",
    "renormalize": False,
    "balance_rate": 0.0,
}

PRESETS: dict[str, DecoderConfig] = {
    "toy": DecoderConfig(**(_BASE | TOY_EXPERTS)),
    "1b-7b": DecoderConfig(
        **_BASE,
        num_layers=16,
        dim=2048,
        num_heads=16,
        num_kv_heads=16,
        num_experts=64,
        active_experts=8,
        expert_dim=1024,
        vocab_size=50304,
        max_seq_len=4096,
    ),
}

HF_MAPPING = HFMapping(
    name="OLMoE",
    architecture="OlmoeForCausalLM",
    score_class="",
    model_type="olmoe",
    fields={
        "attention_bias": ATTENTION_BIAS,
        "head_dim": None,
        "intermediate_size": same("expert_dim"),
        "num_experts": same("num_experts"),
        "num_experts_per_tok": same("active_experts"),
        "norm_topk_prob": same("renormalize"),
    },
    defaults={
        "attention_bias": False,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "norm_topk_prob": False,
    },
    constants={"qk_norm": "all_heads", "balance_rate": 0.0},
    fixed_fields={"attention_dropout": 0.0, "clip_qkv": None},
    names={"mlp.router": "mlp.gate"},
)
FAMILY = decoder_family(PRESETS, HF_MAPPING)
