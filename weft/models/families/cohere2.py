"""Command R7B and Command A: parallel blocks, and positions in local layers only.

Sizes from ``config.json`` of c4ai-command-r7b-12-2024 and c4ai-command-a-03-2025.
"""

from __future__ import annotations

from typing import Any

from weft.models.decoder_config import DecoderConfig
from weft.models.decoder_family import decoder_family
from weft.models.families.llama import TOY
from weft.models.hf_fields import ATTENTION_BIAS, HFLayers, HFMapping, same

_CONSTANTS: dict[str, Any] = {"norm": "layer", "parallel_block": True, "rope_interleaved": True}
_COMMAND: dict[str, Any] = _CONSTANTS | {
    "layer_pattern": "LLLG",
    "rope_pattern": "RRRN",
    "sliding_window": 4096,
    "rope_theta": 50000.0,
    "rope_scaling": "none",
    "logit_scale": 0.25,
    "vocab_size": 256000,
    "tied_embeddings": True,
}

PRESETS: dict[str, DecoderConfig] = {
    "toy": DecoderConfig(
        **_CONSTANTS,
        **TOY,
        layer_pattern="LLG",
        rope_pattern="RRN",
        sliding_window=256,
        rope_theta=50000.0,
        logit_scale=0.25,
    ),
    "command-r7b": DecoderConfig(**_COMMAND, max_seq_len=132096),
    "command-a": DecoderConfig(**_COMMAND, num_layers=64, dim=12288, num_heads=96, ffn_dim=36864),
}

HF_MAPPING = HFMapping(
    name="Cohere 2",
    architecture="Cohere2ForCausalLM",
    score_class="",
    model_type="cohere2",
    fields={
        "attention_bias": ATTENTION_BIAS,
        "rms_norm_eps": None,
        "layer_norm_eps": same("norm_eps"),
        "logit_scale": same("logit_scale"),
    },
    defaults={
        "attention_bias": False,
        "layer_norm_eps": 1e-5,
        "logit_scale": 0.0625,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
    },
    constants=_CONSTANTS,
    # The values of published files that transformers does not read.
    fixed_fields={
        "attention_dropout": 0.0,
        "order_of_interleaved_layers": "local_attn_first",
        "position_embedding_type": "rope_gptj",
        "rotary_pct": 1.0,
        "use_embedding_sharing": True,
        "use_gated_activation": True,
        "use_parallel_block": True,
        "use_parallel_embedding": False,
        "use_qk_norm": False,
    },
    ignored_fields=frozenset({"cache_implementation"}),
    layers=HFLayers("LLLG", default_window=4096),
    rope_layers="local",
)
FAMILY = decoder_family(PRESETS, HF_MAPPING)
