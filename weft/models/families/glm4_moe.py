"""GLM-4.5 and GLM-4.5-Air (arXiv:2508.06471): sizes from ``config.json``."""

from __future__ import annotations

from typing import Any

from weft.models.decoder_config import DecoderConfig
from weft.models.decoder_family import decoder_family
from weft.models.families.llama import TOY
from weft.models.hf_fields import DEEPSEEK_EXPERTS, HFMapping, HFRope, choice, same

_BASE: dict[str, Any] = {
    "score": "sigmoid",
    "rope_scaling": "none",
    "rope_fraction": 0.5,
    "qkv_bias": True,
    "shared_experts": 1,
}
_GLM45: dict[str, Any] = _BASE | {
    "num_heads": 96,
    "head_dim": 128,
    "active_experts": 8,
    "rope_theta": 1e6,
    "vocab_size": 151552,
}

PRESETS: dict[str, DecoderConfig] = {
    "toy": DecoderConfig(
        **(_BASE | TOY | {"tied_embeddings": False}),
        head_dim=48,
        num_experts=8,
        active_experts=2,
        expert_dim=128,
        dense_layers=1,
    ),
    "106b-a12b": DecoderConfig(
        **_GLM45,
        num_layers=46,
        ffn_dim=10944,
        num_experts=128,
        expert_dim=1408,
        dense_layers=1,
    ),
    "355b-a32b": DecoderConfig(
        **_GLM45,
        num_layers=92,
        dim=5120,
        qk_norm="head",
        ffn_dim=12288,
        num_experts=160,
        expert_dim=1536,
        dense_layers=3,
        route_scale=2.5,
    ),
}

HF_MAPPING = HFMapping(
    name="GLM-4.5",
    architecture="Glm4MoeForCausalLM",
    score_class="",
    model_type="glm4_moe",
    fields={
        "attention_bias": same("qkv_bias"),
        "use_qk_norm": choice("qk_norm", {True: "head", False: "none"}),
        **DEEPSEEK_EXPERTS,
        "num_nextn_predict_layers": same("mtp_layers"),
    },
    defaults={
        "num_nextn_predict_layers": 1,
        "attention_bias": False,
        "max_position_embeddings": 131072,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "use_qk_norm": False,
        "moe_intermediate_size": 1408,
        "n_routed_experts": 128,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
    },
    constants={"score": "sigmoid"},
    rope=HFRope(fraction=0.5),
    names={"mlp.router": "mlp.gate"},
    expert_bias="mlp.gate.e_score_correction_bias",
)
FAMILY = decoder_family(PRESETS, HF_MAPPING)
