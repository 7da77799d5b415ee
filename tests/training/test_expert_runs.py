"""Mixtures of experts trained by weft's command equal a loop around transformers."""

from __future__ import annotations

import pytest

from benchmarks.expert_runs import LIMIT, MODELS, measure

SOME = ("dp_replicate 2, dp_shard 2, ep 2", "cp 2 (ring), ep 2", "pp 2 (zero bubble)")


@pytest.mark.slow
@pytest.mark.system
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("kind", MODELS)
def test_losses_of_twenty_steps_equal_transformers(kind: str) -> None:
    """``benchmarks/expert_runs.py`` takes 50 steps in all layouts."""
    table = measure([kind], list(SOME), steps=20)
    assert set(table) == set(SOME)
    for layout, row in table.items():
        assert row[kind] <= LIMIT, layout
