"""Nemotron-4 and Minitron (arXiv:2407.14679): sizes of Minitron-4B."""

from __future__ import annotations

from typing import Any

from weft.models.decoder_config import DecoderConfig
from weft.models.decoder_family import decoder_family
from weft.models.families.llama import TOY
from weft.models.hf_fields import ATTENTION_BIAS, HFMapping, HFRope, same

_CONSTANTS: dict[str, Any] = {
    "norm": "layer",
    "norm_offset": True,
    "norm_bias": True,
    "gated": False,
}
_BASE: dict[str, Any] = _CONSTANTS | {
    "activation": "relu2",
    "rope_theta": 10000.0,
    "rope_scaling": "none",
    "rope_fraction": 0.5,
}

PRESETS: dict[str, DecoderConfig] = {
    "toy": DecoderConfig(**(_BASE | TOY | {"tied_embeddings": False}), head_dim=48),
    "minitron-4b": DecoderConfig(
        **_BASE,
        dim=3072,
        num_heads=24,
        ffn_dim=9216,
        vocab_size=256000,
        max_seq_len=4096,
    ),
}

HF_MAPPING = HFMapping(
    name="Nemotron",
    architecture="NemotronForCausalLM",
    model_type="nemotron",
    fields={
        "attention_bias": ATTENTION_BIAS,
        "mlp_bias": same("ffn_bias"),
        "rms_norm_eps": None,
        "norm_eps": same("norm_eps"),
    },
    defaults={
        "attention_bias": False,
        "mlp_bias": False,
        "hidden_act": "relu2",
        "max_position_embeddings": 4096,
        "norm_eps": 1e-5,
    },
    constants=_CONSTANTS,
    rope=HFRope(fraction=0.5),
)
FAMILY = decoder_family(PRESETS, HF_MAPPING)
