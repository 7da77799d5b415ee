"""Mistral, dense, without a sliding window: Llama's module with heads of a width of its own.

Sizes are those of ``config.json`` of mistralai/Mistral-7B-v0.3 on the Hub (the model of
arXiv:2310.06825 with a larger vocabulary and no window).  Attention in a window is not
implemented: context parallelism, whose ranks each know a part of the keys, would have to know it,
too.  A model that has one is imported only where no row is longer than it.
"""

from __future__ import annotations

from dataclasses import replace

from weft.config.schema import Positive, key
from weft.models import llama
from weft.models.family import ONLY, HFMapping
from weft.models.llama import DecoderConfig, PositiveFloat


class MistralConfig(DecoderConfig):
    """Shape of a Mistral; the defaults are those of Mistral 7B v0.3."""

    head_dim: Positive = key(128, "width of one head, whatever dim / num_heads is")
    vocab_size: Positive = key(32768, "token ids")
    max_seq_len: Positive = key(32768, "longest row, in tokens")
    rope_theta: PositiveFloat = key(1e6, "base of the rotary wavelengths")


PRESETS: dict[str, MistralConfig] = {
    # For two CPU cores.
    "toy": MistralConfig(
        num_layers=3,
        dim=192,
        num_heads=6,
        num_kv_heads=2,
        head_dim=48,
        ffn_dim=512,
        vocab_size=4096,
        max_seq_len=1024,
    ),
    "7b-v0.3": MistralConfig(),
}

HUGGINGFACE = HFMapping(
    name="Mistral",
    architecture="MistralForCausalLM",
    model_type="mistral",
    defaults={"max_position_embeddings": 131072, "num_key_value_heads": 8},
    only={name: value for name, value in ONLY.items() if not name.endswith("_bias")},
    window=4096,
)


FAMILY = replace(llama.FAMILY, config=MistralConfig, presets=PRESETS, huggingface=HUGGINGFACE)
