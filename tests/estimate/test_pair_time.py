"""Predicted time of passes that overlap, against the engine's turns and bounds."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.config.reader import read_job
from weft.estimate.cost import (
    CONTENTION,
    Collective,
    Hardware,
    StageWork,
    Step,
    Work,
    collective_seconds,
    hidden_seconds,
    pass_chunks,
    pass_seconds,
    pipeline_spans,
    simulate_pipeline,
    step_seconds,
)
from weft.estimate.pair_time import Chunk, paired_seconds
from weft.estimate.trace import trace_ranks
from weft.estimate.trace_to_cost import build_step
from weft.parallel.expert_dispatch import during_exchange
from weft.parallel.pass_overlap import run_in_turns
from weft.planning.devices import get_device, parse_cluster
from weft.planning.pipeline_schedule import Action, find_pairs
from weft.planning.plan import Plan
from weft.planning.plan_text import cluster_machine
from weft.planning.resolve import resolve


class Clock:
    """A device and a link that two passes share, without a real clock."""

    def __init__(self) -> None:
        self.device = self.link = 0.0

    def hand_over(self) -> None:
        for call in during_exchange:
            call()

    def run(self, chunks: list[Chunk]) -> None:
        """Act as a pass: compute, start an exchange, hand over, wait."""
        for compute, exchange in chunks:
            self.device += compute
            if exchange:
                self.link = arrived = max(self.link, self.device) + exchange
                self.hand_over()
                self.device = max(self.device, arrived)


CHUNKS = st.lists(
    st.builds(Chunk, st.sampled_from((0.25, 1, 2, 6)), st.sampled_from((0.5, 1, 3, 8))), max_size=6
)


@settings(max_examples=100, derandomize=True, database=None, deadline=None)
@given(forward=CHUNKS, backward=CHUNKS, last=st.sampled_from((0.25, 1, 2, 6)))
def test_paired_seconds_equals_the_turns_of_the_engine(
    forward: list[Chunk], backward: list[Chunk], last: float
) -> None:
    forward, backward = [*forward, Chunk(last, 0)], [*backward, Chunk(last, 0)]
    clock = Clock()

    def run_forward() -> None:
        if not any(exchange for _, exchange in forward):  # as `overlap_passes`
            clock.hand_over()
        clock.run(forward)

    run_in_turns(run_forward, partial(clock.run, backward))
    seconds = paired_seconds(forward, backward)
    assert seconds == max(clock.device, clock.link)
    chunks = [*forward, *backward]
    compute, exchange = (sum(values) for values in zip(*chunks, strict=True))
    assert max(compute, exchange) <= seconds <= compute + exchange


H100 = Hardware(get_device("H100"), 8)
EXCHANGE = Collective("all_gather", 2**28, "ep", 8, 1, "pair")
LAYER = Work(traffic_bytes=2**33, collectives=(EXCHANGE,) * 2)
HALF = Work(traffic_bytes=2**32, collectives=(EXCHANGE,))
STAGE = StageWork(
    ((replace(LAYER, chunks=(HALF, HALF, Work())), 3),),
    (
        (
            replace(
                LAYER, traffic_bytes=2**34, chunks=(HALF, HALF, replace(LAYER, collectives=()))
            ),
            3,
        ),
    ),
)
# One rank with two stages, of which passes are paired.
ORDER = [Action(0, "F", 0), Action(1, "F", 0), Action(0, "F", 1), Action(1, "B", 0)]
ORDER += [Action(1, "F", 1), Action(0, "B", 0), Action(1, "B", 1), Action(0, "B", 1)]
PAIRS = {ORDER[2]: ORDER[3], ORDER[4]: ORDER[5]}


def step_of(pairs: dict[Action, Action]) -> Step:
    return Step((STAGE, STAGE), 2, 1.0, pipeline_schedule={0: ORDER}, pairs=pairs)


def test_pairs_hide_exchanges_and_nothing_else() -> None:
    alone, paired = step_seconds(step_of({}), H100), step_seconds(step_of(PAIRS), H100)
    hidden = hidden_seconds(step_of(PAIRS), H100)
    assert hidden.keys() == {(0, 1), (1, 0)}
    exchange = collective_seconds(EXCHANGE, H100)
    # All twelve exchanges but the last are hidden: computation is longer.
    assert exchange < pass_chunks(STAGE.forward, H100)[0].compute
    assert hidden[0, 1] == pytest.approx(11 * exchange * (1 - CONTENTION))
    assert alone["ep"] - paired["ep"] == pytest.approx(sum(hidden.values()))
    assert alone.total() - paired.total() == pytest.approx(sum(hidden.values()))
    assert {k: v for k, v in alone.items() if k != "ep"} == pytest.approx(
        {k: v for k, v in paired.items() if k != "ep"}
    )
    spans = pipeline_spans(step_of(PAIRS), H100)
    assert max(span.end for span in spans) == pytest.approx(paired.total())
    assert all(b.start == pytest.approx(a.end) for a, b in itertools.pairwise(spans))


def test_chunks_of_a_pass_take_its_time() -> None:
    chunks = pass_chunks(STAGE.backward, H100)
    assert len(chunks) == 9
    total = sum(chunk.compute + chunk.exchange for chunk in chunks)
    assert total == pytest.approx(pass_seconds(STAGE.backward, H100).total())


def test_pair_starts_with_both_inputs_and_sends_both_results_at_its_end() -> None:
    schedule = {0: [Action(0, "F", 0), Action(0, "F", 1), Action(0, "B", 0), Action(0, "B", 1)]}
    schedule[1] = [Action(1, "F", 0), Action(1, "B", 0), Action(1, "F", 1), Action(1, "B", 1)]
    seconds = {(s, kind): 1.0 for s in (0, 1) for kind in "FB"}
    spans = simulate_pipeline(
        schedule, seconds, 0.0, {schedule[0][1]: schedule[0][2]}, {(0, 0): 0.5}
    )
    starts = {span[1:4]: (span.start, span.end) for span in spans}
    assert starts[0, "F", 1] == (3.0, 3.75)  # when the gradient arrives, not at 1
    assert starts[0, "B", 0] == (3.75, 4.5)
    assert starts[1, "F", 1] == (4.5, 5.5)  # when the pair ends


def moe_plan(*extra: tuple[str, str]) -> Plan:
    keys = [("model.num_layers", "8"), ("parallel.pp", "2"), ("parallel.ep", "8")]
    keys += [("train.global_batch_size", "256"), ("train.microbatch_size", "1")]
    keys += [("pipeline.schedule", "DualPipeV"), ("run.cluster", "2x8xH100"), *extra]
    job, _, errors = read_job("qwen3-30b-a3b", keys)
    assert not errors
    return resolve(job, cluster_machine(parse_cluster("2x8xH100")))


@pytest.mark.slow
def test_overlap_of_a_traced_plan_shortens_its_step() -> None:
    plan, without = moe_plan(), moe_plan(("pipeline.overlap_dispatch", "false"))
    assert plan.overlaps_dispatch
    assert find_pairs(plan)
    assert not without.overlaps_dispatch
    assert not find_pairs(without)
    traces, device = trace_ranks(plan), get_device("H100")
    steps = [build_step(each, traces, device) for each in (plan, without)]
    paired, alone = (step_seconds(step, H100) for step in steps)
    assert 0 < paired["ep"] < alone["ep"]
    assert paired.total() < alone.total()
    assert paired["compute"] == pytest.approx(alone["compute"])
    # A layer has two exchanges of rows, and in its backward pass two more of the recomputation.
    # The counts of rows are not among them.
    stage, exchanges = steps[0].stages[1], 0.0
    assert plan.pipeline is not None
    num_layers = plan.pipeline.stages[1].num_blocks
    for works, per_layer in ((stage.forward, 2), (stage.backward, 4)):
        chunks = pass_chunks(works, H100)
        assert sum(chunk.exchange > 0 for chunk in chunks) == per_layer * num_layers
        total = sum(chunk.compute + chunk.exchange for chunk in chunks)
        assert total == pytest.approx(pass_seconds(works, H100).total())
        exchanges += sum(chunk.exchange for chunk in chunks)
    # The forward pass ends when half of the backward pass has no partner yet.
    assert 0.5 < hidden_seconds(steps[0], H100)[1, 2] / exchanges < 0.7
