"""Categories of traced storages."""

from __future__ import annotations

import pytest

from tests.layouts import parse
from tests.small import small_job
from weft.estimate.trace import trace_ranks
from weft.estimate.trace_memory import simulate_memory
from weft.plan.plan import Machine
from weft.plan.resolve import resolve


@pytest.mark.parametrize(
    "schedule", [pytest.param("Interleaved1F1B", marks=pytest.mark.slow), "ZBVZeroBubble"]
)
def test_memory_accumulated_gradients_are_categorized_as_gradients(schedule: str) -> None:
    """Accumulated gradients are unsharded float32, with split backward passes too.

    With two shards they take as many bytes as both moments of a shard.
    """
    ranks, overrides = parse(
        f"dp_shard2 tp2 pp2 pipeline.schedule={schedule} precision.compute_dtype=bfloat16"
        " gradient_sync=step model.num_layers=6 train.microbatch_size=1 train.global_batch_size=8"
    )
    job = small_job(*overrides, ("model.tied_embeddings", "false"))
    plan = resolve(job, Machine("cpu", devices=2, world_size=ranks))
    for trace in trace_ranks(plan):
        live = simulate_memory(trace, caching=False).live_bytes
        # bfloat16 gradients of the latest microbatch are live too.
        assert 0.95 <= live["gradients"] / live["optimizer"] <= 1.5
