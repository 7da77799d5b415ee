"""Phi-3 and Phi-4, dense (arXiv:2404.14219): sizes from their ``config.json``."""

from __future__ import annotations

from typing import Any

from weft.models.decoder_config import DecoderConfig
from weft.models.decoder_family import decoder_family
from weft.models.families.llama import TOY
from weft.models.hf_fields import HFLayers, HFMapping, HFRope

_BASE: dict[str, Any] = {"rope_theta": 10000.0, "rope_scaling": "none"}

PRESETS: dict[str, DecoderConfig] = {
    "toy": DecoderConfig(**(_BASE | TOY | {"tied_embeddings": False})),
    "3-mini-4k": DecoderConfig(
        **_BASE,
        dim=3072,
        num_kv_heads=32,
        ffn_dim=8192,
        vocab_size=32064,
        max_seq_len=4096,
        layer_pattern="L",
        sliding_window=2047,
    ),
    "4": DecoderConfig(
        **(_BASE | {"rope_theta": 250000.0}),
        num_layers=40,
        dim=5120,
        num_heads=40,
        num_kv_heads=10,
        ffn_dim=17920,
        vocab_size=100352,
        max_seq_len=16384,
    ),
}

HF_MAPPING = HFMapping(
    name="Phi-3",
    architecture="Phi3ForCausalLM",
    model_type="phi3",
    defaults={
        "max_position_embeddings": 4096,
        "original_max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
    },
    fixed_fields={
        "attention_bias": False,
        "attention_dropout": 0.0,
        "embd_pdrop": 0.0,
        "resid_pdrop": 0.0,
    },
    layers=HFLayers("L", has_types=False),
    rope=HFRope(
        fraction=1.0,
        kinds=("longrope",),
        aliases={"su": "longrope", "yarn": "longrope"},
        has_original_field=True,
    ),
    fused={
        "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
    },
)
FAMILY = decoder_family(PRESETS, HF_MAPPING)
