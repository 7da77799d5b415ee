"""Pipeline schedules of torch, and valid and invalid CSV files."""

from __future__ import annotations

import itertools
import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.pipelining.schedules import get_schedule_class

from tests.harness import run_ranks
from tests.small import plan_here, small_job, this_rank
from weft.config.errors import InvalidConfig
from weft.data.loader import Batch
from weft.planning import private_order
from weft.planning.pipeline_schedule import (
    SCHEDULES,
    Action,
    PipelineSchedule,
    _torch_order,
    build_schedule,
    execution_order,
    find_schedule,
    join_halves,
    max_in_flight,
    read_schedule_csv,
    stage_index_to_rank,
)
from weft.training.setup import build


def format_csv(schedule: PipelineSchedule) -> str:
    rows = [
        [f"{a.stage}{a.kind}{a.microbatch}" for a in schedule[rank]] for rank in sorted(schedule)
    ]
    return "".join(",".join(row) + "\n" for row in rows)


def stages_per_rank(name: str) -> int:
    return SCHEDULES[name].stages_per_rank or 2


# --------------------------------------------------------------------------- schedules by name


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("pp", [2, 3, 4])
def test_schedule_microbatches_that_a_schedule_excludes_are_refused(name: str, pp: int) -> None:
    """`ScheduleSpec.supports` agrees with torch on the numbers of microbatches."""
    per_rank = stages_per_rank(name)
    for microbatches in range(1, 4 * pp + 1):
        try:
            schedule = build_schedule(name, pp, per_rank, microbatches)
            actions = [action for order in schedule.values() for action in order]
            full = len({(a.stage, a.microbatch) for a in actions if a.kind == "F"})
            possible = full == pp * per_rank * microbatches
        except (ValueError, AssertionError):
            possible = False
        allowed = SCHEDULES[name].supports(microbatches, pp, pp * per_rank)
        if name == "1F1B":  # TrainStep refuses it, not the schedule
            assert allowed == (microbatches >= pp)
        else:
            assert allowed == possible, (pp, microbatches)


@pytest.mark.parametrize("name", SCHEDULES)
def test_stages_have_the_ranks_of_the_schedule(name: str) -> None:
    pp, per_rank = 3, stages_per_rank(name)
    ranks = stage_index_to_rank(build_schedule(name, pp, per_rank, 6))
    loop = [*range(pp)] * per_rank
    in_a_v = name in ("ZBVZeroBubble", "DualPipeV")
    assert ranks == ([0, 1, 2, 2, 1, 0] if in_a_v else loop)


def test_schedule_order_is_torchs_and_is_built_in_linear_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names = [name for name in SCHEDULES if name not in ("GPipe", "1F1B")]
    fast = [_torch_order(name, 2, 2, 4) for name in names]
    assert get_schedule_class("ZBVZeroBubble")._prepare_schedule_with_comms
    monkeypatch.setattr(private_order, "load_order_class", get_schedule_class)
    assert fast == [_torch_order(name, 2, 2, 4) for name in names]
    monkeypatch.undo()
    start = time.process_time()
    _torch_order("DualPipeV", 2, 2, 4000)  # a minute with the collectives
    assert time.process_time() - start < 5


def test_max_in_flight_of_simple_schedules() -> None:
    assert max_in_flight(build_schedule("GPipe", 3, 1, 5)) == [5, 5, 5]
    assert max_in_flight(build_schedule("1F1B", 3, 1, 5)) == [3, 2, 1]
    assert max_in_flight(build_schedule("LoopedBFS", 2, 2, 5)) == [5, 5, 5, 5]


def test_max_in_flight_half_a_backward_frees_nothing() -> None:
    order = [Action(0, kind, m) for kind, m in [("F", 0), ("I", 0), ("F", 1), ("W", 0)]]  # type: ignore[arg-type]
    assert max_in_flight({0: order}) == [2]


def test_join_halves_frees_activations_with_the_input_half() -> None:
    schedule = build_schedule("InterleavedZeroBubble", 4, 2, 8)
    joined = join_halves(schedule)
    assert {action.kind for order in joined.values() for action in order} == {"F", "B"}
    assert len(list(execution_order(joined))) == sum(map(len, joined.values())) == 2 * 8 * 8
    assert max_in_flight(schedule) == [8, 8, 8, 8, 4, 4, 4, 4]
    assert max_in_flight(joined) == [8, 7, 6, 5, 4, 3, 2, 1]


def measure_in_flight(name: str) -> dict[int, tuple[int, int]]:
    """Return measured and planned peak of in-flight microbatches, per stage of this rank."""
    job = small_job(
        ("parallel.pp", "2"),
        ("pipeline.schedule", name),
        ("model.num_layers", "4"),
        ("model.tied_embeddings", "false"),
        ("train.microbatch_size", "1"),
    )
    plan = plan_here(job)
    assert plan.pipeline is not None
    built = build(plan, this_rank())
    schedule: Any = built.train_step.schedule
    stages = getattr(schedule, "_stages", None) or [schedule._stage]
    most: dict[int, int] = {}

    def watch(stage: Any) -> None:
        now = 0
        forward, backward = stage.forward_one_chunk, stage.backward_one_chunk
        weight = stage.backward_weight_one_chunk

        def forward_and_count(*args: Any, **kwargs: Any) -> Any:
            nonlocal now
            now += 1
            most[stage.stage_index] = max(most.get(stage.stage_index, 0), now)
            return forward(*args, **kwargs)

        def backward_and_count(*args: Any, **kwargs: Any) -> Any:
            nonlocal now
            now -= kwargs.get("full_backward", True)
            return backward(*args, **kwargs)

        def weight_and_count(*args: Any, **kwargs: Any) -> Any:
            nonlocal now
            now -= 1
            return weight(*args, **kwargs)

        stage.forward_one_chunk, stage.backward_one_chunk = forward_and_count, backward_and_count
        stage.backward_weight_one_chunk = weight_and_count

    for stage in stages:
        watch(stage)
    rows = torch.zeros((1, job.train.seq_len), dtype=torch.int64)
    built.train_step.forward_backward([Batch(rows, rows, None, None)] * plan.num_microbatches)
    return {stage: (measured, plan.pipeline.in_flight[stage]) for stage, measured in most.items()}


@pytest.mark.parametrize("name", SCHEDULES)
def test_max_in_flight_equals_the_measured_peak(name: str) -> None:
    result = {
        stage: pair
        for rank in run_ranks(measure_in_flight, 2, name)
        for stage, pair in rank.items()
    }
    assert sorted(result) == [*range(2 * stages_per_rank(name))]
    assert all(measured == planned for measured, planned in result.values()), result


def test_schedule_unknown_name_is_refused() -> None:
    assert find_schedule("interleaved1f1b", 2).name == "Interleaved1F1B"
    with pytest.raises(InvalidConfig, match="1F1B"):
        find_schedule("1f1p", 2)


# --------------------------------------------------------------------------- files


@pytest.mark.parametrize(("name", "pp"), list(itertools.product(SCHEDULES, [2, 3])))
def test_schedule_written_to_a_file_is_the_same(name: str, pp: int, tmp_path: Path) -> None:
    schedule = build_schedule(name, pp, stages_per_rank(name), 2 * pp)
    path = tmp_path / "mine.csv"
    path.write_text(format_csv(schedule))
    assert read_schedule_csv(path, pp) == schedule


FLAWS = [
    ("0F0,0B0\n", 2, "has 1 lines for parallel.pp=2"),
    ("0F0,0B0\n1F0,1X0\n", 2, "has an invalid action '1X0' in line 2"),
    ("0F0,0B0\n2F0,2B0\n", 2, "has stages [0, 2], which are not numbered from 0 without gaps"),
    ("0F0,0B0\n0F1,0B1\n", 2, "has stage 0 on ranks [0, 1]"),
    ("0F0,0B0,1F0,1B0\n,\n", 2, "has a rank without a stage"),
    ("0F0,0F1,0B0\n1F0,1F1,1B0,1B1\n", 2, "once forward and once backward"),
    ("0F0,0B0,0B0\n1F0,1B0\n", 2, "once forward and once backward"),
    ("0F0,0F0,0B0\n1F0,1B0\n", 2, "once forward and once backward"),
    ("0F0,0I0\n1F0,1B0\n", 2, "once forward and once backward"),
    ("0F0,0B0,0I0,0W0\n1F0,1B0\n", 2, "once forward and once backward"),
    ("0F0,0F2,0B0,0B2\n1F0,1F2,1B0,1B2\n", 2, "once forward and once backward"),
    ("0F0,0B0\n1B0,1F0\n", 2, "deadlocks"),
    ("0B0,0F0\n1F0,1B0\n", 2, "deadlocks"),
    ("0F0,0W0,0I0\n1F0,1B0\n", 2, "deadlocks"),
    ("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n", 2, "deadlocks"),
    ("", 2, "has 0 lines"),
]


@pytest.mark.parametrize(("text", "pp", "rule"), FLAWS)
def test_schedule_file_that_is_not_a_schedule_is_refused(
    text: str, pp: int, rule: str, tmp_path: Path
) -> None:
    path = tmp_path / "mine.csv"
    path.write_text(text)
    with pytest.raises(InvalidConfig, match=re.escape(rule)):
        read_schedule_csv(path, pp)


def test_schedule_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / "binary.csv").write_bytes(b"\xff\xfe\x00")
    for path in (tmp_path, tmp_path / "none.csv", tmp_path / "binary.csv"):
        with pytest.raises(InvalidConfig, match="cannot be read"):
            read_schedule_csv(path, 2)
