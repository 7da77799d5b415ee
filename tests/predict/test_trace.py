"""A fake rank does what a real one does, and a step is what its extrapolation says."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch.distributed as dist

from tests.harness import run_ranks
from tests.parallel.test_layouts import parse
from tests.small import Overrides, plan_here, small_job, this_rank
from weft.checkpoint.state import named_parameters
from weft.job import Job
from weft.optim.optimizer import clip_grad_norm
from weft.parallel.private import forget_meshes
from weft.plan.resolve import Machine, Plan, resolve
from weft.plan.timetable import SCHEDULES
from weft.predict import trace as tracing
from weft.predict.expand import Expansion, NotAlike
from weft.predict.forecast import exchanges_of
from weft.predict.memory import live_peak, memory_of
from weft.predict.trace import (
    Trace,
    build_fake,
    fake_world,
    no_rows,
    peak_bytes,
    record_step,
    traces,
    traffic,
)
from weft.train.setup import Built, build

BASE: Overrides = [
    ("model.num_layers", "4"),
    ("model.tied_embeddings", "false"),
    ("train.microbatch", "1"),
]
# Of four ranks: every axis, kinds of schedules, and what else changes what a rank does.
LAYOUTS = [
    "dp_shard4",
    "dp_shard2 dp_replicate2 gradient_sync=microbatch",
    "dp_shard2 tp2 remat.kind=full",
    "dp_shard2 pp2 gradient_sync=microbatch",
    "dp_replicate2 cp2",
    "tp2 pp2",
    "dp_shard2 pp2 schedule=ZBVZeroBubble",
    "dp_shard4 remat.kind=selective precision.compute=bfloat16",
    "dp_shard4 reshard_after_forward=never",
]
# Every other pair of axes, every other schedule, and the rest of what can be chosen.
MORE_LAYOUTS = [
    "tp4 model.num_kv_heads=4",
    "cp4",
    "dp_shard2 dp_replicate2",
    "dp_shard2 tp2",
    "dp_shard2 pp2",
    "dp_shard2 cp2",
    "dp_replicate2 tp2",
    "dp_replicate2 pp2",
    "tp2 cp2",
    "pp2 cp2",
    "pp4",
    *(f"dp_shard2 pp2 schedule={schedule}" for schedule in SCHEDULES),
    "cp4 context=allgather",
    "cp2 dp_shard2 context=ulysses",
    "dp_shard4 reshard_after_forward=2",
    "dp_shard2 tp2 sequence_parallel=false",
    "dp_shard4 remat.kind=full",
    "dp_shard4 remat.kind=selective",
    "tp2 pp2 remat.kind=selective",
    "dp_shard4 precision.compute=bfloat16",
    "dp_shard4 optim.states=bfloat16",
    "dp_shard2 tp2 optim.kind=muon",
    "dp_shard4 train.microbatch=2 train.global_batch=20",
    "dp_shard4 data.packing=documents",
]
# Peaks that are farther off than 3 %, and why is not known: messages of a real pipeline that are
# not waited for yet hold what they send.
FARTHER = {
    "dp_shard2 pp2 schedule=Interleaved1F1B": 0.04,
    "tp2 pp2 remat.kind=selective": 0.10,
}
Told = dict[str, dict[str, Any]]


def told(overrides: Overrides, mode: Any = None) -> dict[str, Any]:
    """What this rank does in its second step, in which nothing is set up any more."""
    job = small_job(*BASE, *overrides)
    plan = plan_here(job)
    if mode is None:
        built = build(job, plan, this_rank())
    else:
        built, plan = build_fake(job, plan, mode)
    with mode or nullcontext():
        step(built, job, plan)
    if dist.get_rank() not in (0, 3):  # the ends of every axis are looked at
        step(built, job, plan)
        return {}
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


def step(built: Built, job: Job, plan: Plan) -> None:
    """Without a look at it."""
    built.engine.forward_backward(no_rows(job, plan))
    stages = built.mesh.group("pp") if plan.pp > 1 else None
    params = [param for _, param in named_parameters(built.parts)]
    clip_grad_norm(params, job.optim.max_grad_norm, stages)
    built.optimizer.step()
    built.optimizer.zero_grad()


def real_ranks(layouts: list[str]) -> Told:
    found = {}
    for layout in layouts:
        found[layout] = told(parse(layout)[1])
        forget_meshes()
    return found


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "layouts", [LAYOUTS, pytest.param(MORE_LAYOUTS, marks=pytest.mark.slow)], ids=["some", "more"]
)
def test_fake_ranks_do_what_real_ranks_do(layouts: list[str]) -> None:
    real = run_ranks(real_ranks, 4, layouts, timeout=600)
    wrong = []
    for layout in layouts:
        for rank in (0, 3):
            with fake_world(rank, 4) as mode:
                seen = told(parse(layout)[1], mode)
            expected = real[rank][layout]
            exact = all(seen[what] == expected[what] for what in ("flops", "traffic"))
            near = pytest.approx(expected["peak"], rel=FARTHER.get(layout, 0.03))
            if not exact or seen["peak"] != near:
                wrong.append((layout, rank, seen, expected))
    assert not wrong


# --------------------------------------------------------------------------- many from a few

# Blocks, microbatches, layout.
LARGER = [
    (9, 6, "dp_shard2"),
    (9, 6, "tp2"),
    (9, 1, "dp_shard2 remat.kind=selective"),
    (12, 6, "dp_shard2 pp2"),
    (20, 8, "pp2 schedule=Interleaved1F1B precision.compute=bfloat16"),
    (7, 1, "cp2 context=allgather"),
]
MORE = [
    (4, 7, "dp_shard2"),
    (9, 6, "tp2 cp2"),
    (11, 6, "dp_shard2 remat.kind=full remat.every=2"),
    (9, 6, "dp_shard2 precision.compute=bfloat16 remat.kind=budget"),
    (9, 6, "dp_shard2 reshard_after_forward=never gradient_sync=step"),
    (9, 6, "dp_shard2 dp_replicate2 gradient_sync=microbatch"),
    (9, 2, "dp_shard2 remat.kind=full remat.offload=true"),
    (12, 7, "dp_shard2 pp2 gradient_sync=microbatch"),
    (20, 8, "dp_shard2 pp2 schedule=Interleaved1F1B"),
    (20, 8, "dp_shard2 pp2 schedule=ZBVZeroBubble precision.compute=bfloat16"),
    (20, 8, "pp2 schedule=DualPipeV"),
]


def planned(layout: str, blocks: int, microbatches: int) -> tuple[Job, Plan]:
    ranks, overrides = parse(layout)
    machine = Machine("cpu", devices=2, world_size=ranks)
    more: Overrides = [*BASE, *overrides, ("model.num_layers", str(blocks))]
    rows = resolve(small_job(*more), machine).dp_size * microbatches
    job = small_job(*more, ("train.global_batch", str(rows)))
    return job, resolve(job, machine)


def traced_whole(job: Job, plan: Plan, monkeypatch: pytest.MonkeyPatch) -> list[Trace]:
    with monkeypatch.context() as patch:
        patch.setattr(tracing, "fewer", lambda plan, few, period: plan)
        return traces(job, plan)


def flops_of(trace: Trace) -> float:
    return sum(event.call.flops for event in trace.events() if event.call is not None)


@pytest.mark.parametrize(
    ("blocks", "microbatches", "layout"),
    [*LARGER, *(pytest.param(*each, marks=pytest.mark.slow) for each in MORE)],
)
def test_an_extrapolated_step_is_the_whole_step(
    blocks: int, microbatches: int, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FLOPs, exchanges and live bytes are exact; but a pipeline's actions have another order in
    the recording, and what a message holds until it is waited for may be let go one action on."""
    job, plan = planned(layout, blocks, microbatches)
    few = traces(job, plan)
    for ours, whole in zip(few, traced_whole(job, plan, monkeypatch), strict=True):
        assert len(ours.recording.events) < len(whole.recording.events)
        assert flops_of(ours) == flops_of(whole)
        assert exchanges_of(ours, None) == exchanges_of(whole, None)
        late = 0.01 if plan.pp > 1 else 0.0
        assert live_peak(ours) == pytest.approx(live_peak(whole), rel=late)
        a, b = memory_of(ours, caching=False), memory_of(whole, caching=False)
        assert a.peak == pytest.approx(b.peak, rel=0.01)
        for name, size in b.live.items():
            assert a.live[name] == pytest.approx(size, rel=0.003, abs=8192), name


def test_blocks_that_differ_are_not_extrapolated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then all are run: the result is the same."""
    job, plan = planned("dp_shard2", 9, 1)
    expected = live_peak(traces(job, plan)[0])
    real: Any = Expansion
    seen = []

    def refuse(recording: Any, recorded: Any, whole: Any) -> Any:
        seen.append(recorded.blocks)
        if recorded != whole:
            raise NotAlike("for once")
        return real(recording, recorded, whole)

    monkeypatch.setattr(tracing, "Expansion", refuse)
    assert live_peak(traces(job, plan)[0]) == expected
    assert seen == [(4,), (6,), (9,)]
