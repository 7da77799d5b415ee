"""Qwen3, dense: Llama with normalized queries and keys.

Sizes are from ``config.json`` of Qwen/Qwen3-0.6B to Qwen/Qwen3-32B on the Hub; the technical report
is arXiv:2505.09388.
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from weft.config.schema import Positive, key
from weft.models import llama
from weft.models.family import FIXED_FIELDS, HFMapping
from weft.models.llama import TOY, DecoderConfig, PositiveFloat


class Qwen3Config(DecoderConfig):
    """Configuration of a Qwen3; defaults: Qwen3 8B."""

    qk_norm: ClassVar[bool] = True
    num_layers: Positive = key(36, "transformer blocks")
    head_dim: Positive = key(128, "width of one head; need not be dim / num_heads")
    ffn_dim: Positive = key(12288, "inner width of the feed-forward layer")
    vocab_size: Positive = key(151936, "token ids")
    max_seq_len: Positive = key(40960, "maximum sequence length, in tokens")
    rope_theta: PositiveFloat = key(1e6, "base of the rotary wavelengths")
    norm_eps: PositiveFloat = key(1e-6, "added to the mean square in RMSNorm")


PRESETS: dict[str, Qwen3Config] = {
    "toy": Qwen3Config(**TOY, head_dim=48, tied_embeddings=True),
    # As published.
    "0.6b": Qwen3Config(num_layers=28, dim=1024, num_heads=16, ffn_dim=3072, tied_embeddings=True),
    "1.7b": Qwen3Config(num_layers=28, dim=2048, num_heads=16, ffn_dim=6144, tied_embeddings=True),
    "4b": Qwen3Config(dim=2560, ffn_dim=9728, tied_embeddings=True),
    "8b": Qwen3Config(),
    "14b": Qwen3Config(num_layers=40, dim=5120, num_heads=40, ffn_dim=17408),
    "32b": Qwen3Config(num_layers=64, dim=5120, num_heads=64, ffn_dim=25600),
}


HF_MAPPING = HFMapping(
    name="Qwen3",
    architecture="Qwen3ForCausalLM",
    model_type="qwen3",
    defaults={"head_dim": 128, "max_position_embeddings": 32768, "num_key_value_heads": 32},
    fixed_fields={**FIXED_FIELDS, "use_sliding_window": False},
    ignored_fields=frozenset({"sliding_window", "max_window_layers"}),  # of an unused feature
)


FAMILY = replace(llama.FAMILY, config=Qwen3Config, presets=PRESETS, hf_mapping=HF_MAPPING)
