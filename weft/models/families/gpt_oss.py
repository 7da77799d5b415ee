"""gpt-oss (arXiv:2508.10925): sizes from ``config.json`` of gpt-oss-20b and -120b."""

from __future__ import annotations

from typing import Any

from weft.models.decoder_config import DecoderConfig
from weft.models.decoder_family import decoder_family
from weft.models.families.llama import TOY_EXPERTS
from weft.models.hf_fields import (
    ATTENTION_BIAS,
    HFLayers,
    HFMapping,
    HFRope,
    StackedExperts,
    same,
)
from weft.models.hf_rope import yarn_magnitude

_CONSTANTS: dict[str, Any] = {
    "attention_sinks": True,
    "router_bias": True,
    "expert_biases": True,
    "score_selected": True,
    "balance_rate": 0.0,
}
_BASE: dict[str, Any] = _CONSTANTS | {
    "qkv_bias": True,
    "out_bias": True,
    "layer_pattern": "LG",
    "expert_limit": 7.0,
}
_YARN: dict[str, Any] = {
    "rope_theta": 150000.0,
    "rope_scaling": "yarn",
    "rope_factor": 32.0,
    "rope_original_context": 4096,
    "rope_truncate": False,
    "rope_magnitude": yarn_magnitude(32.0),
}


def _gpt_oss(**sizes: Any) -> DecoderConfig:
    common = {"dim": 2880, "num_heads": 64, "head_dim": 64, "active_experts": 4}
    common |= {"expert_dim": 2880, "vocab_size": 201088, "sliding_window": 128}
    return DecoderConfig(**(_BASE | _YARN | common | sizes))


PRESETS: dict[str, DecoderConfig] = {
    "toy": DecoderConfig(
        **(_BASE | TOY_EXPERTS | {"tied_embeddings": False}), sliding_window=128, head_dim=48
    ),
    "20b": _gpt_oss(num_layers=24, num_experts=32),
    "120b": _gpt_oss(num_layers=36, num_experts=128),
}

HF_MAPPING = HFMapping(
    name="gpt-oss",
    architecture="GptOssForCausalLM",
    model_type="gpt_oss",
    fields={
        "attention_bias": ATTENTION_BIAS,
        "intermediate_size": same("expert_dim"),
        "num_local_experts": same("num_experts"),
        "num_experts_per_tok": same("active_experts"),
        "swiglu_limit": same("expert_limit"),
    },
    defaults={
        "attention_bias": True,
        "head_dim": 64,
        "max_position_embeddings": 131072,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "num_local_experts": 128,
        "num_experts_per_tok": 4,
        "swiglu_limit": 7.0,
    },
    constants=_CONSTANTS,
    fixed_fields={"attention_dropout": 0.0, "swiglu_alpha": 1.702},
    # Names of the same values in published files.
    ignored_fields=frozenset({"experts_per_token", "initial_context_length"}),
    layers=HFLayers("LG", default_window=128),
    rope=HFRope(
        theta=150000.0,
        scaling={
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
    ),
    names={"self_attn.sinks.weight": "self_attn.sinks"},
    stacked=StackedExperts(
        gate_up="mlp.experts.gate_up_proj",
        down="mlp.experts.down_proj",
        transposed=True,
        interleaved=True,
        marked=True,
    ),
    quantization="mxfp4",
)
FAMILY = decoder_family(PRESETS, HF_MAPPING)
