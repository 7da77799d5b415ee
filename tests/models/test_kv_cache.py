"""Incremental decoding equals the forward pass of full sequences."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from weft.models.decoder import Decoder, blocks
from weft.models.decoder_config import DecoderConfig
from weft.models.decoder_rules import check
from weft.models.kv_cache import use_kv_cache

SHAPE = {"num_layers": 2, "dim": 32, "num_heads": 4, "num_kv_heads": 2, "ffn_dim": 64}
SHAPE |= {"vocab_size": 96, "max_seq_len": 32}
LATENT = {"kv_rank": 12, "num_kv_heads": 4, "head_dim": 16, "rope_head_dim": 6}
FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"layer_pattern": "LG", "sliding_window": 5},
    "chunks": {"layer_pattern": "LG", "attention_chunk": 6},
    "sinks": {"attention_sinks": True, "layer_pattern": "GL", "sliding_window": 7},
    "softcap": {"attention_softcap": 1.5, "attention_scale": 0.6},
    "query scale": {"rope_pattern": "RN", "temperature_interval": 4},
    "latent": LATENT | {"value_head_dim": 8},
    "latent with window": LATENT | {"q_rank": 10, "layer_pattern": "L", "sliding_window": 4},
}


@pytest.mark.parametrize("name", FEATURES)
def test_cached_steps_equal_the_full_forward(name: str) -> None:
    """Sequences of different lengths, one new token each in a step, then several."""
    torch.manual_seed(0)
    config = DecoderConfig.model_validate(SHAPE | {"rope_scaling": "none"} | FEATURES[name])
    assert check(config) == []
    model = Decoder(config)
    for parameter in model.parameters():
        nn.init.normal_(parameter, 0.0, 0.4)
    tokens = torch.randint(96, (3, 24))
    lengths, rows = torch.tensor([4, 9, 1]), torch.arange(3)
    places = torch.arange(24).expand(3, -1)
    with torch.no_grad(), use_kv_cache(blocks(model), 24) as cache:
        assert cache is not None
        cache.set_positions(places[:, :9], reset=True)
        first = model(tokens[:, :9], None, places[:, :9])
        steps = []
        for step in range(12):
            positions = (lengths + step).unsqueeze(1)
            cache.set_positions(positions, reset=False)
            steps.append(model(tokens.gather(1, positions), None, positions)[:, 0])
        positions = lengths.unsqueeze(1) + 12 + torch.arange(3)
        cache.set_positions(positions, reset=False)
        last = model(tokens.gather(1, positions), None, positions)
    with torch.no_grad():
        expected = model(tokens)
    tolerance: dict[str, Any] = {"atol": 1e-5 * expected.abs().max().item(), "rtol": 1e-5}
    torch.testing.assert_close(first, expected[:, :9], **tolerance)
    for step, logits in enumerate(steps):
        torch.testing.assert_close(logits, expected[rows, lengths + step], **tolerance)
    torch.testing.assert_close(last, expected[rows.unsqueeze(1), positions], **tolerance)
