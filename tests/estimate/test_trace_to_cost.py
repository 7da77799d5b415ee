"""Prices of traced operations."""

from __future__ import annotations

import pytest

from weft.config.reader import read_job
from weft.estimate.trace import trace_ranks
from weft.estimate.trace_to_cost import TracePricer
from weft.plan.devices import get_device, parse_cluster
from weft.plan.plan_text import cluster_machine
from weft.plan.resolve import resolve

# Bytes per parameter of both moments of matrices in blocks. 8bit also has two bytes per 32 numbers;
# with it, moments of other parameters are float32.
MOMENT_BYTES = {"float32": 8.0, "bfloat16": 4.0, "8bit": 2 + 2 / 32}


@pytest.mark.parametrize("states", ["float32", "bfloat16", "8bit"])
def test_pricer_optimizer_reads_and_writes_each_state_once(states: str) -> None:
    """Memory traffic of update and clipping equals a formula, for any number of operators."""
    keys = [("model.num_layers", "8"), ("train.seq_len", "1024"), ("optim.state_dtype", states)]
    job, _, errors = read_job("llama3-8b", [*keys, ("train.global_batch_size", "2")])
    cluster = parse_cluster("1x2xH100")
    assert not errors
    plan = resolve(job, cluster_machine(cluster))
    pricer = TracePricer(trace_ranks(plan)[0], plan, get_device("H100"))
    matrices = 8 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336) / plan.num_params
    moments = matrices * MOMENT_BYTES[states] + (1 - matrices) * (
        4.0 if states == "bfloat16" else 8
    )
    clip = 4 + 8  # the norm reads the gradient; scaling reads and writes it
    update = 4 + 4 + moments + 4 + moments  # reads weight, gradient and moments; writes all but one
    swept = pricer.price_optimizer().traffic_bytes / (plan.num_params / 2)
    assert swept == pytest.approx(clip + update, rel=1e-3)
