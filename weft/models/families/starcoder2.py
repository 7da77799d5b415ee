"""StarCoder2 (arXiv:2402.19173): LayerNorm, biases everywhere, and no gate."""

from __future__ import annotations

from typing import Any

from weft.models.decoder_config import DecoderConfig
from weft.models.decoder_family import decoder_family
from weft.models.families.llama import TOY
from weft.models.hf_fields import HFLayers, HFMapping, same

_CONSTANTS: dict[str, Any] = {"norm": "layer", "norm_bias": True, "gated": False}
_BIASES = ("qkv_bias", "out_bias", "ffn_bias")
_BASE: dict[str, Any] = _CONSTANTS | dict.fromkeys(_BIASES, True)

PRESETS: dict[str, DecoderConfig] = {
    "toy": DecoderConfig(
        **_BASE,
        **TOY,
        activation="gelu_tanh",
        layer_pattern="L",
        sliding_window=256,
    ),
}

HF_MAPPING = HFMapping(
    name="StarCoder2",
    architecture="Starcoder2ForCausalLM",
    model_type="starcoder2",
    fields={"use_bias": same(*_BIASES), "rms_norm_eps": None, "norm_epsilon": same("norm_eps")},
    defaults={
        "use_bias": True,
        "hidden_act": "gelu_pytorch_tanh",
        "max_position_embeddings": 4096,
        "norm_epsilon": 1e-5,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
    },
    constants=_CONSTANTS,
    fixed_fields={"attention_dropout": 0.0, "embedding_dropout": 0.0, "residual_dropout": 0.0},
    layers=HFLayers("L", has_types=False),
    names={"mlp.up_proj": "mlp.c_fc", "mlp.down_proj": "mlp.c_proj"},
)
FAMILY = decoder_family(PRESETS, HF_MAPPING)
