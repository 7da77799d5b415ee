"""Rules about the keys of a decoder: each names the key and a remedy that works."""

from __future__ import annotations

from typing import Any

import pytest

from weft.planning.model_config import resolve_model

LATENT = {"kv_rank": 32, "num_kv_heads": 6, "head_dim": 32, "rope_head_dim": 16}
EXPERTS = {"num_experts": 8, "expert_dim": 64}


@pytest.mark.parametrize(
    ("fields", "key", "mend"),
    [
        ({"layer_pattern": "LG"}, "layer_pattern", {"sliding_window": 9}),
        ({"value_head_dim": 16}, "value_head_dim", LATENT),
        (LATENT | {"num_kv_heads": 2}, "num_kv_heads", {"num_kv_heads": 6}),
        (LATENT | {"rope_pattern": "RN"}, "rope_pattern", {"rope_pattern": "R"}),
        (LATENT | {"qk_norm": "head"}, "qk_norm", {"qk_norm": "none"}),
        (LATENT | {"attention_sinks": True}, "attention_sinks", {"attention_sinks": False}),
        (LATENT | {"rope_head_dim": 32}, "rope_head_dim", {"rope_head_dim": 16}),
        ({"rope_fraction": 0.1}, "rope_fraction", {"rope_fraction": 0.5}),
        ({"rope_scaling": "longrope"}, "rope_short_factors", {"rope_scaling": "yarn"}),
        (EXPERTS | {"expert_groups": 3}, "expert_groups", {"expert_groups": 4}),
        (EXPERTS | {"active_groups": 2}, "active_groups", {"expert_groups": 2}),
        (EXPERTS | {"dense_layers": 3}, "dense_layers", {"dense_layers": 2}),
        (EXPERTS | {"expert_interval": 4}, "dense_layers", {"expert_interval": 3}),
        (
            EXPERTS | {"expert_groups": 8, "active_groups": 1, "active_experts": 2},
            "active_groups",
            {"active_groups": 2},
        ),
        (
            EXPERTS | {"expert_groups": 2, "score_selected": True},
            "score_selected",
            {"score_selected": False},
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_decoder_impossible_keys_are_refused_with_a_remedy(
    fields: dict[str, Any], key: str, mend: dict[str, Any]
) -> None:
    config, errors = resolve_model("llama", "toy", fields)
    assert config is None
    assert f"model.{key}" in [error.key for error in errors]
    assert all(error.remedy for error in errors)
    config, errors = resolve_model("llama", "toy", fields | mend)
    assert errors == []
    assert config is not None
