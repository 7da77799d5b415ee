"""Gemma 2 (arXiv:2408.00118): sizes from ``config.json`` of gemma-2-*."""

from __future__ import annotations

from typing import Any

from weft.models.decoder_config import DecoderConfig
from weft.models.decoder_family import decoder_family
from weft.models.families.llama import TOY
from weft.models.hf_fields import (
    ACTIVATION,
    ATTENTION_BIAS,
    HFLayers,
    HFMapping,
    inverse_root_of,
    optional,
)

_CONSTANTS: dict[str, Any] = {"norm_position": "both", "norm_offset": True}
_BASE: dict[str, Any] = _CONSTANTS | {
    "activation": "gelu_tanh",
    "layer_pattern": "LG",
    "sliding_window": 4096,
    "attention_softcap": 50.0,
    "logit_softcap": 30.0,
    "rope_theta": 10000.0,
    "rope_scaling": "none",
    "norm_eps": 1e-6,
}


def _gemma2(**sizes: Any) -> DecoderConfig:
    common = {"vocab_size": 256000, "max_seq_len": 8192, "tied_embeddings": True}
    return DecoderConfig(**(_BASE | common | sizes), embedding_scale=sizes["dim"] ** 0.5)


PRESETS: dict[str, DecoderConfig] = {
    "toy": _gemma2(**(TOY | {"sliding_window": 256, "head_dim": 48})),
    "2b": _gemma2(num_layers=26, dim=2304, num_heads=8, num_kv_heads=4, head_dim=256, ffn_dim=9216),
    "9b": _gemma2(
        num_layers=42, dim=3584, num_heads=16, num_kv_heads=8, head_dim=256, ffn_dim=14336
    ),
    "27b": _gemma2(
        num_layers=46,
        dim=4608,
        num_heads=32,
        num_kv_heads=16,
        head_dim=128,
        ffn_dim=36864,
        attention_scale=144**-0.5,
    ),
}

HF_MAPPING = HFMapping(
    name="Gemma 2",
    architecture="Gemma2ForCausalLM",
    model_type="gemma2",
    fields={
        "hidden_act": None,
        "hidden_activation": ACTIVATION,
        "attention_bias": ATTENTION_BIAS,
        "query_pre_attn_scalar": inverse_root_of("attention_scale"),
        "attn_logit_softcapping": optional("attention_softcap"),
        "final_logit_softcapping": optional("logit_softcap"),
    },
    defaults={
        "hidden_activation": "gelu_pytorch_tanh",
        "attention_bias": False,
        "query_pre_attn_scalar": 256,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "head_dim": 256,
        "max_position_embeddings": 8192,
        "num_key_value_heads": 4,
        "tie_word_embeddings": True,
    },
    constants=_CONSTANTS,
    fixed_fields={"attention_dropout": 0.0, "use_bidirectional_attention": None},
    ignored_fields=frozenset({"cache_implementation", "hidden_act"}),  # of older files
    layers=HFLayers("LG", default_window=4096),
    scales_embeddings=True,
    names={
        "attention_output_norm": "post_attention_layernorm",
        "post_attention_layernorm": "pre_feedforward_layernorm",
        "mlp_output_norm": "post_feedforward_layernorm",
    },
)
FAMILY = decoder_family(PRESETS, HF_MAPPING)
