"""ERNIE 4.5 with experts: sizes from ``config.json`` of ERNIE-4.5-21B-A3B."""

from __future__ import annotations

from typing import Any

from weft.models.decoder_config import DecoderConfig
from weft.models.decoder_family import decoder_family
from weft.models.families.llama import TOY
from weft.models.hf_fields import HFMapping, HFRope, same

_BASE: dict[str, Any] = {"rope_interleaved": True, "rope_scaling": "none", "tied_embeddings": True}
_TOY_EXPERTS: dict[str, Any] = {"num_experts": 8, "active_experts": 2, "expert_dim": 128}

PRESETS: dict[str, DecoderConfig] = {
    "toy": DecoderConfig(**(_BASE | TOY | _TOY_EXPERTS), shared_experts=1, dense_layers=1),
    "21b-a3b": DecoderConfig(
        **_BASE,
        num_layers=28,
        dim=2560,
        num_heads=20,
        num_kv_heads=4,
        ffn_dim=12288,
        num_experts=64,
        active_experts=6,
        expert_dim=1536,
        shared_experts=2,
        dense_layers=1,
        vocab_size=103424,
    ),
}

HF_MAPPING = HFMapping(
    name="ERNIE 4.5 MoE",
    architecture="Ernie4_5_MoeForCausalLM",
    score_class="",
    model_type="ernie4_5_moe",
    fields={
        "moe_intermediate_size": same("expert_dim"),
        "moe_num_experts": same("num_experts"),
        "moe_num_shared_experts": same("shared_experts"),
        "moe_k": same("active_experts"),
        "moe_layer_start_index": same("dense_layers"),
        "moe_layer_interval": same("expert_interval"),
    },
    defaults={
        "max_position_embeddings": 131072,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "moe_intermediate_size": 1536,
        "moe_num_experts": 64,
        "moe_num_shared_experts": 2,
        "moe_k": 6,
        "moe_layer_start_index": 1,
        "moe_layer_interval": 1,
    },
    constants={"rope_interleaved": True},
    fixed_fields={"moe_norm_min": 1e-12, "use_bias": False},
    rope=HFRope(theta=500000.0),
    expert_layers="moe_layer_end_index",
    names={"mlp.router": "mlp.gate"},
    expert_bias="mlp.moe_statics.e_score_correction_bias",
    expert_bias_rows=1,
    has_float32_router=True,
)
FAMILY = decoder_family(PRESETS, HF_MAPPING)
