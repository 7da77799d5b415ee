"""Gemma 3, text models (arXiv:2503.19786): sizes from their ``config.json``.

The vocabulary of 4b, 12b and 27b has 64 more entries, of the images that weft does not read.
"""

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
    HFRope,
    inverse_root_of,
    optional,
)

_CONSTANTS: dict[str, Any] = {"norm_position": "both", "norm_offset": True, "qk_norm": "head"}
_BASE: dict[str, Any] = _CONSTANTS | {
    "activation": "gelu_tanh",
    "layer_pattern": "LLLLLG",
    "sliding_window": 512,
    "rope_theta": 1e6,
    "rope_local_theta": 10000.0,
    "rope_scaling": "none",
    "norm_eps": 1e-6,
}


_LONG: dict[str, Any] = {
    "vocab_size": 262208,
    "max_seq_len": 131072,
    "sliding_window": 1024,
    "rope_scaling": "linear",
    "rope_factor": 8.0,
}


def _gemma3(**sizes: Any) -> DecoderConfig:
    common = {"num_heads": 4, "num_kv_heads": 1, "head_dim": 256, "vocab_size": 262144}
    common |= {"max_seq_len": 32768, "tied_embeddings": True}
    return DecoderConfig(**(_BASE | common | sizes), embedding_scale=sizes["dim"] ** 0.5)


PRESETS: dict[str, DecoderConfig] = {
    "toy": _gemma3(**(TOY | {"layer_pattern": "LLG", "sliding_window": 256, "head_dim": 48})),
    "270m": _gemma3(num_layers=18, dim=640, ffn_dim=2048),
    "1b": _gemma3(num_layers=26, dim=1152, ffn_dim=6912),
    "4b": _gemma3(**_LONG, num_layers=34, dim=2560, num_heads=8, num_kv_heads=4, ffn_dim=10240),
    "12b": _gemma3(**_LONG, num_layers=48, dim=3840, num_heads=16, num_kv_heads=8, ffn_dim=15360),
    "27b": _gemma3(
        **_LONG,
        num_layers=62,
        dim=5376,
        num_heads=32,
        num_kv_heads=16,
        head_dim=128,
        ffn_dim=21504,
        attention_scale=168**-0.5,
    ),
}

HF_MAPPING = HFMapping(
    name="Gemma 3",
    architecture="Gemma3ForCausalLM",
    score_class="Gemma3TextForSequenceClassification",
    model_type="gemma3_text",
    fields={
        "hidden_act": None,
        "hidden_activation": ACTIVATION,
        "attention_bias": ATTENTION_BIAS,
        "query_pre_attn_scalar": inverse_root_of("attention_scale"),
        "final_logit_softcapping": optional("logit_softcap"),
    },
    defaults={
        "hidden_activation": "gelu_pytorch_tanh",
        "attention_bias": False,
        "query_pre_attn_scalar": 256,
        "head_dim": 256,
        # Published files of multi-modal models name only what differs from transformers' class.
        "vocab_size": 262208,
        "num_attention_heads": 8,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 131072,
        "num_key_value_heads": 4,
        "tie_word_embeddings": True,
    },
    constants=_CONSTANTS,
    fixed_fields={
        "attention_dropout": 0.0,
        "attn_logit_softcapping": None,  # transformers ignores it
        "use_bidirectional_attention": False,
    },
    ignored_fields=frozenset({"cache_implementation", "hidden_act"}),  # of older files
    layers=HFLayers("LLLLLG", default_window=4096),
    rope=HFRope(theta=1e6, local_theta=10000.0, local_field="rope_local_base_freq"),
    scales_embeddings=True,
    names={
        "attention_output_norm": "post_attention_layernorm",
        "post_attention_layernorm": "pre_feedforward_layernorm",
        "mlp_output_norm": "post_feedforward_layernorm",
    },
)
FAMILY = decoder_family(PRESETS, HF_MAPPING)
