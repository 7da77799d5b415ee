"""Mistral, dense, without a sliding window.

The module is Llama's with its own head dimension.  Sizes are from ``config.json`` of
mistralai/Mistral-7B-v0.3 on the Hub, the model of arXiv:2310.06825 with a larger vocabulary and no
window.  Sliding-window attention is not implemented, because context parallelism would have to
support it too.  A model with a window is imported only if no sequence is longer than the window.
"""

from __future__ import annotations

from dataclasses import replace

from weft.config.schema import Positive, key
from weft.models import llama
from weft.models.family import FIXED_FIELDS, HFMapping
from weft.models.llama import TOY, DecoderConfig, PositiveFloat


class MistralConfig(DecoderConfig):
    """Configuration of a Mistral; defaults: Mistral 7B v0.3."""

    head_dim: Positive = key(128, "width of one head; need not be dim / num_heads")
    vocab_size: Positive = key(32768, "token ids")
    max_seq_len: Positive = key(32768, "maximum sequence length, in tokens")
    rope_theta: PositiveFloat = key(1e6, "base of the rotary wavelengths")


PRESETS: dict[str, MistralConfig] = {
    "toy": MistralConfig(**TOY, head_dim=48),
    "7b-v0.3": MistralConfig(),
}

HF_MAPPING = HFMapping(
    name="Mistral",
    architecture="MistralForCausalLM",
    model_type="mistral",
    defaults={"max_position_embeddings": 131072, "num_key_value_heads": 8},
    fixed_fields={
        name: value for name, value in FIXED_FIELDS.items() if not name.endswith("_bias")
    },
    default_sliding_window=4096,
)


FAMILY = replace(llama.FAMILY, config=MistralConfig, presets=PRESETS, hf_mapping=HF_MAPPING)
