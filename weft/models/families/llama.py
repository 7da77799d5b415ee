"""Llama 1 to 3 (arXiv:2407.21783), and small decoders for one GPU."""

from __future__ import annotations

from typing import Any

from weft.models.decoder_config import DecoderConfig
from weft.models.decoder_family import decoder_family
from weft.models.hf_fields import ATTENTION_BIAS, HFMapping, same

# Sizes of the preset "toy" of each family, for two CPU cores.
TOY: dict[str, Any] = {"num_layers": 3, "dim": 192, "num_heads": 6, "num_kv_heads": 2}
TOY |= {"ffn_dim": 512, "vocab_size": 4096, "max_seq_len": 1024, "rope_scaling": "none"}
TOY |= {"tied_embeddings": True}
# And of families in which all layers have experts.
TOY_EXPERTS: dict[str, Any] = {name: TOY[name] for name in TOY if name != "ffn_dim"}
TOY_EXPERTS |= {"num_experts": 8, "active_experts": 2, "expert_dim": 128}


def _small(**sizes: Any) -> DecoderConfig:
    """Return a configuration with as many key-value heads as query heads."""
    return DecoderConfig(
        num_kv_heads=sizes["num_heads"],
        max_seq_len=2048,
        rope_theta=10000.0,
        rope_scaling="none",
        tied_embeddings=True,
        **sizes,
    )


_LLAMA32: dict[str, Any] = {"ffn_dim": 8192, "rope_factor": 32.0, "tied_embeddings": True}

PRESETS: dict[str, DecoderConfig] = {
    "toy": DecoderConfig(**TOY, rope_theta=10000.0),
    # For one GPU: two shapes of GPT-2 and GPT-3 (arXiv:2005.14165, table 2.1), with a gated
    # feed-forward of the same size, and a smaller one for stories.
    "30m": _small(num_layers=8, dim=512, num_heads=8, ffn_dim=1408, vocab_size=8192),
    "124m": _small(num_layers=12, dim=768, num_heads=12, ffn_dim=2048, vocab_size=50304),
    "350m": _small(num_layers=24, dim=1024, num_heads=16, ffn_dim=2688, vocab_size=50304),
    # Llama 3.2 and 3.1 (their config.json).  70b is also Llama 3.3.
    "1b": DecoderConfig(num_layers=16, dim=2048, **_LLAMA32),
    "3b": DecoderConfig(num_layers=28, dim=3072, num_heads=24, **_LLAMA32),
    "8b": DecoderConfig(),
    "70b": DecoderConfig(num_layers=80, dim=8192, num_heads=64, ffn_dim=28672),
    "405b": DecoderConfig(num_layers=126, dim=16384, num_heads=128, ffn_dim=53248),
}

HF_MAPPING = HFMapping(
    name="Llama",
    architecture="LlamaForCausalLM",
    model_type="llama",
    fields={"attention_bias": ATTENTION_BIAS, "mlp_bias": same("ffn_bias")},
    defaults={"attention_bias": False, "mlp_bias": False},
)
FAMILY = decoder_family(PRESETS, HF_MAPPING)
