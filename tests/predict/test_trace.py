"""A fake rank does exactly what a real one does: FLOPs, collectives, bytes, memory."""

from __future__ import annotations

from typing import Any

import pytest

from tests.harness import run_ranks
from tests.parallel.test_layouts import parse
from tests.small import Overrides, plan_here, small_job, this_rank
from weft.parallel.private import forget_meshes
from weft.plan.timetable import SCHEDULES
from weft.predict.trace import build_fake, fake_world, peak_bytes, record_step, traffic
from weft.train.setup import build

BASE: Overrides = [
    ("model.num_layers", "4"),
    ("model.tied_embeddings", "false"),
    ("train.microbatch", "1"),
]
# Of four ranks: every pair of axes, every schedule, and what else changes what a rank does.
LAYOUTS = [
    "dp_shard4",
    "tp4 model.num_kv_heads=4",
    "cp4",
    "dp_shard2 dp_replicate2",
    "dp_shard2 tp2",
    "dp_shard2 pp2",
    "dp_shard2 cp2",
    "dp_replicate2 tp2",
    "dp_replicate2 pp2",
    "dp_replicate2 cp2",
    "tp2 pp2",
    "tp2 cp2",
    "pp2 cp2",
    "pp4",
    *(f"dp_shard2 pp2 schedule={schedule}" for schedule in SCHEDULES),
    "cp4 context=allgather",
    "cp2 dp_shard2 context=ulysses",
    "dp_shard4 reshard_after_forward=never",
    "dp_shard4 reshard_after_forward=2",
    "dp_shard2 dp_replicate2 gradient_sync=microbatch",
    "dp_shard2 pp2 gradient_sync=microbatch",
    "dp_shard2 tp2 sequence_parallel=false",
    "dp_shard4 remat.kind=full",
    "dp_shard4 remat.kind=selective",
    "dp_shard2 tp2 remat.kind=full",
    "tp2 pp2 remat.kind=selective",
    "dp_shard4 precision.compute=bfloat16",
    "dp_shard4 optim.states=bfloat16",
    "dp_shard2 tp2 optim.kind=muon",
    "dp_shard4 train.microbatch=2 train.global_batch=20",
    "dp_shard4 data.packing=documents",
]


def told(layout: str, overrides: Overrides, mode: Any = None) -> dict[str, Any]:
    """What this rank does in its second step, in which nothing is set up any more."""
    job = small_job(*BASE, *overrides)
    plan = plan_here(job)
    if mode is None:
        built = build(job, plan, this_rank())
    else:
        built, plan = build_fake(job, plan, mode)
    record_step(built, job, plan, mode)
    recording = record_step(built, job, plan, mode)
    flops: dict[str, float] = {}
    for event in recording.events:
        if event.call is not None and event.call.flops:
            flops[event.call.name] = flops.get(event.call.name, 0.0) + event.call.flops
    return {
        "flops": flops,
        "traffic": traffic(recording, built.mesh),
        "peak": peak_bytes(recording),
    }


def real_ranks(layouts: list[str]) -> dict[str, dict[str, Any]]:
    found = {}
    for layout in layouts:
        found[layout] = told(layout, parse(layout)[1])
        forget_meshes()
    return found


@pytest.fixture(scope="module")
def real() -> list[dict[str, dict[str, Any]]]:
    return run_ranks(real_ranks, 4, LAYOUTS, timeout=300)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_fake_rank_does_what_a_real_one_does(
    layout: str, real: list[dict[str, dict[str, Any]]]
) -> None:
    for rank, of_layouts in enumerate(real):
        with fake_world(rank, 4) as mode:
            seen = told(layout, parse(layout)[1], mode)
        expected = of_layouts[layout]
        assert seen["flops"] == expected["flops"]
        assert seen["traffic"] == expected["traffic"]
        assert seen["peak"] == pytest.approx(expected["peak"], rel=0.03)
