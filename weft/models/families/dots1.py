"""dots.llm1 (arXiv:2506.05767): Qwen3's attention with DeepSeek-V3's experts."""

from __future__ import annotations

from typing import Any

from weft.models.decoder_config import DecoderConfig
from weft.models.decoder_family import decoder_family
from weft.models.families.llama import TOY
from weft.models.hf_fields import ATTENTION_BIAS, DEEPSEEK_EXPERTS, HFLayers, HFMapping

_BASE: dict[str, Any] = {"qk_norm": "head", "score": "sigmoid", "shared_experts": 2}

PRESETS: dict[str, DecoderConfig] = {
    "toy": DecoderConfig(
        **_BASE, **TOY, num_experts=8, expert_dim=128, dense_layers=1, route_scale=2.5
    ),
}

HF_MAPPING = HFMapping(
    name="dots.llm1",
    architecture="Dots1ForCausalLM",
    score_class="",
    model_type="dots1",
    fields={
        "attention_bias": ATTENTION_BIAS,
        **DEEPSEEK_EXPERTS,
    },
    defaults={
        "attention_bias": False,
        "num_key_value_heads": 32,
        "max_window_layers": 62,
        "moe_intermediate_size": 1408,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 0,
        "norm_topk_prob": False,
        "routed_scaling_factor": 1.0,
    },
    constants={"qk_norm": "head", "score": "sigmoid"},
    aliases={"num_local_experts": "n_routed_experts"},
    layers=HFLayers("max_window_layers", default_window=4096),
    names={"mlp.router": "mlp.gate"},
    expert_bias="mlp.gate.e_score_correction_bias",
)
FAMILY = decoder_family(PRESETS, HF_MAPPING)
