"""Llama 4, text models: sizes from ``config.json`` of Llama-4-*-Instruct."""

from __future__ import annotations

from typing import Any

from weft.models.decoder_config import DecoderConfig
from weft.models.decoder_family import decoder_family
from weft.models.families.llama import TOY
from weft.models.hf_fields import (
    ATTENTION_BIAS,
    HFLayers,
    HFMapping,
    HFRope,
    StackedExperts,
    choice,
    same,
)

_CONSTANTS: dict[str, Any] = {
    "rope_interleaved": True,
    "score": "sigmoid",
    "renormalize": False,
    "scaled_expert_inputs": True,
    "shared_experts": 1,
    "balance_rate": 0.0,
}
_TEMPERATURE: dict[str, Any] = {"temperature_interval": 8192, "temperature_scale": 0.1}
_LLAMA4: dict[str, Any] = _CONSTANTS | _TEMPERATURE
_LLAMA4 |= {
    "num_layers": 48,
    "dim": 5120,
    "num_heads": 40,
    "active_experts": 1,
    "expert_dim": 8192,
    "layer_pattern": "LLLG",
    "rope_pattern": "RRRN",
    "attention_chunk": 8192,
    "vocab_size": 202048,
}

PRESETS: dict[str, DecoderConfig] = {
    "toy": DecoderConfig(
        **(_CONSTANTS | _TEMPERATURE | TOY | {"tied_embeddings": False}),
        head_dim=48,
        qk_norm="unit",
        layer_pattern="LLG",
        rope_pattern="RRN",
        attention_chunk=256,
        num_experts=8,
        active_experts=1,
        expert_dim=128,
        expert_interval=2,
    ),
    "scout": DecoderConfig(
        **_LLAMA4,
        qk_norm="unit",
        num_experts=16,
        rope_factor=16.0,
        rope_high_freq_factor=1.0,
        max_seq_len=10485760,
    ),
    "maverick": DecoderConfig(
        **_LLAMA4,
        ffn_dim=16384,
        num_experts=128,
        expert_interval=2,
        rope_scaling="none",
        max_seq_len=1048576,
    ),
}

HF_MAPPING = HFMapping(
    name="Llama 4",
    architecture="Llama4ForCausalLM",
    score_class="",
    model_type="llama4_text",
    fields={
        "attention_bias": ATTENTION_BIAS,
        "use_qk_norm": choice("qk_norm", {True: "unit", False: "none"}),
        "intermediate_size": same("expert_dim"),
        "intermediate_size_mlp": same("ffn_dim"),
        "num_local_experts": same("num_experts"),
        "num_experts_per_tok": same("active_experts"),
        "interleave_moe_layer_step": same("expert_interval"),
        "floor_scale": same("temperature_interval"),
        "attn_scale": same("temperature_scale"),
    },
    defaults={
        "attention_bias": False,
        "head_dim": 128,
        "max_position_embeddings": 131072,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "use_qk_norm": True,
        "intermediate_size_mlp": 16384,
        "num_local_experts": 16,
        "num_experts_per_tok": 1,
        "interleave_moe_layer_step": 1,
        "floor_scale": 8192,
        "attn_scale": 0.1,
    },
    constants=_CONSTANTS,
    fixed_fields={"attention_dropout": 0.0, "router_jitter_noise": 0.0},
    switches={"attn_temperature_tuning": "temperature_interval"},
    layers=HFLayers(
        "rope",
        window=("attention_chunk_size", "attention_chunk"),
        default_window=8192,
        local="chunked_attention",
    ),
    rope=HFRope(theta=500000.0),
    rope_layers="no_rope_layers",
    expert_layers="moe_layers",
    names={"mlp": "feed_forward", "mlp.shared_experts": "feed_forward.shared_expert"},
    experts="feed_forward.experts",
    stacked=StackedExperts(
        gate_up="feed_forward.experts.gate_up_proj",
        down="feed_forward.experts.down_proj",
        transposed=True,
    ),
)
FAMILY = decoder_family(PRESETS, HF_MAPPING)
