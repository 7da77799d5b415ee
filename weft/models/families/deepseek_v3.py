"""DeepSeek-V3 and R1 (arXiv:2412.19437): sizes from their ``config.json``."""

from __future__ import annotations

from typing import Any

from weft.models.decoder_config import DecoderConfig
from weft.models.decoder_family import decoder_family
from weft.models.families.llama import TOY
from weft.models.hf_fields import (
    ATTENTION_BIAS,
    DEEPSEEK_EXPERTS,
    HFMapping,
    HFRope,
    optional,
    same,
)
from weft.models.hf_rope import yarn_magnitude

_BASE: dict[str, Any] = {
    "score": "sigmoid",
    "rope_interleaved": True,
    "rope_theta": 10000.0,
    "norm_eps": 1e-6,
    "shared_experts": 1,
}

PRESETS: dict[str, DecoderConfig] = {
    "toy": DecoderConfig(
        **(_BASE | TOY | {"num_kv_heads": 6, "tied_embeddings": False}),
        head_dim=48,
        rope_head_dim=16,
        value_head_dim=32,
        kv_rank=64,
        q_rank=96,
        num_experts=8,
        active_experts=2,
        expert_dim=128,
        dense_layers=1,
        expert_groups=4,
        active_groups=2,
        route_scale=2.5,
    ),
    "671b": DecoderConfig(
        **_BASE,
        num_layers=61,
        dim=7168,
        num_heads=128,
        num_kv_heads=128,
        head_dim=192,
        rope_head_dim=64,
        value_head_dim=128,
        kv_rank=512,
        q_rank=1536,
        attention_scale=192**-0.5 * yarn_magnitude(40.0) * yarn_magnitude(40.0),
        rope_scaling="yarn",
        rope_factor=40.0,
        rope_original_context=4096,
        ffn_dim=18432,
        num_experts=256,
        active_experts=8,
        expert_dim=2048,
        dense_layers=3,
        expert_groups=8,
        active_groups=4,
        route_scale=2.5,
        vocab_size=129280,
        max_seq_len=163840,
    ),
}

HF_MAPPING = HFMapping(
    name="DeepSeek-V3",
    architecture="DeepseekV3ForCausalLM",
    model_type="deepseek_v3",
    fields={
        "attention_bias": ATTENTION_BIAS,
        "head_dim": None,
        "qk_rope_head_dim": same("rope_head_dim"),
        "v_head_dim": same("value_head_dim"),
        "kv_lora_rank": same("kv_rank"),
        "q_lora_rank": optional("q_rank"),
        "rope_interleave": same("rope_interleaved"),
        **DEEPSEEK_EXPERTS,
        "num_nextn_predict_layers": same("mtp_layers"),
    },
    defaults={
        "num_nextn_predict_layers": 1,
        "attention_bias": False,
        "max_position_embeddings": 4096,
        "num_key_value_heads": 128,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "kv_lora_rank": 512,
        "q_lora_rank": 1536,
        "rope_interleave": True,
        "moe_intermediate_size": 2048,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "n_group": 8,
        "topk_group": 4,
        "first_k_dense_replace": 3,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
    },
    constants={"score": "sigmoid"},
    fixed_fields={
        "attention_dropout": 0.0,
        "rms_norm_eps": 1e-6,  # the norms of latent vectors have this one in any model
        **{"moe_layer_freq": 1, "ep_size": 1},  # of the authors' code, as the next two
        **{"scoring_func": "sigmoid", "topk_method": "noaux_tc"},
    },
    ignored_fields=frozenset({"aux_loss_alpha", "seq_aux"}),
    rope=HFRope(scales_attention=True),
    has_latent_attention=True,
    names={"mlp.router": "mlp.gate"},
    expert_bias="mlp.gate.e_score_correction_bias",
)
FAMILY = decoder_family(PRESETS, HF_MAPPING)
