"""Prices of traced operations."""

from __future__ import annotations

import pytest

from weft.config.reader import read_job
from weft.estimate.forecast import pricing_options
from weft.estimate.trace import trace_ranks
from weft.estimate.trace_to_cost import TracePricer
from weft.plan.devices import Cluster, get_device, parse_cluster
from weft.plan.plan_text import cluster_machine
from weft.plan.resolve import resolve


@pytest.mark.parametrize(
    ("states", "least", "most"),
    [
        # Weight, gradient and moments are read, weight and moments written; clipping goes over
        # gradients, too.
        ("float32", 28, 48),
        pytest.param("bfloat16", 20, 40, marks=pytest.mark.slow),
        ("8bit", 16, 36),
    ],
)
def test_pricer_optimizer_reads_and_writes_each_state_once(
    states: str, least: float, most: float
) -> None:
    """The optimizer reads each parameter, for any number of operators in its update."""
    keys = [("model.num_layers", "8"), ("train.seq_len", "1024"), ("optim.state_dtype", states)]
    job, _, problems = read_job("llama3-8b", [*keys, ("train.global_batch_size", "2")])
    cluster = parse_cluster("1x2xH100")
    assert not problems
    assert isinstance(cluster, Cluster)
    plan = resolve(job, cluster_machine(cluster))
    pricer = TracePricer(trace_ranks(plan)[0], pricing_options(plan, get_device("H100")))
    swept = pricer.price_optimizer().traffic_bytes / (plan.num_params / 2)
    assert least <= swept <= most
