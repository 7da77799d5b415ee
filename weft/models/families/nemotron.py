"""Nemotron-4 (arXiv:2402.16819, arXiv:2406.11704) and Minitron (arXiv:2407.14679)."""

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
_NEMOTRON: dict[str, Any] = _BASE | {"vocab_size": 256000, "max_seq_len": 4096}

PRESETS: dict[str, DecoderConfig] = {
    "toy": DecoderConfig(**(_BASE | TOY | {"tied_embeddings": False}), head_dim=48),
    # Sizes of NeMo (nemo/collections/llm/gpt/model/nemotron.py).
    "minitron-4b": DecoderConfig(**_NEMOTRON, dim=3072, num_heads=24, ffn_dim=9216),
    "15b": DecoderConfig(**_NEMOTRON, dim=6144, num_heads=48, ffn_dim=24576),
    "340b": DecoderConfig(**_NEMOTRON, num_layers=96, dim=18432, num_heads=96, ffn_dim=73728),
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
