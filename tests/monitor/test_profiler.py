"""Profiles of real runs on gloo: files, timing, and detection of a planted wait."""

from __future__ import annotations

import gzip
import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tests.harness import RankError, run_ranks
from tests.small import Overrides, plan_here, small_job, this_rank, train_rank
from weft.config.errors import InvalidConfig
from weft.data.dataset import open_dataset
from weft.monitor import profiler as profiling
from weft.monitor.profiler import STEP, find_axis, format_table
from weft.monitor.spans import spans_path
from weft.monitor.step_timer import PHASES
from weft.planning.plan import Machine
from weft.planning.resolve import resolve
from weft.preparation.job_checks import prepare_job
from weft.training.loop import train

UNTIED = ("model.tied_embeddings", "false")
PIPELINE = [("parallel.pp", "2"), ("train.microbatch_size", "2"), UNTIED]


def run(directory: Path, store: Path, ranks: int, *overrides: tuple[str, str]) -> None:
    job: Overrides = [("train.steps", "4"), ("run.dir", str(directory)), *overrides]
    run_ranks(train_rank, ranks, job, str(store))


def summary_of(directory: Path, steps: str) -> dict[str, Any]:
    text: dict[str, Any] = json.loads((directory / f"traces/step-{steps}/summary.json").read_text())
    return text


def trace_of(directory: Path, steps: str, rank: int) -> list[dict[str, Any]]:
    with gzip.open(directory / f"traces/step-{steps}/rank-{rank}.json.gz", "rt") as file:
        result: list[dict[str, Any]] = json.load(file)["traceEvents"]
    return result


def slow(rank: int, site: str, passing: int) -> tuple[str, str]:
    fault = f'{{site = "{site}", kind = "slow", seconds = 1.0, rank = {rank}, passing = {passing}}}'
    return "resilience.faults", f"[{fault}]"


@pytest.mark.parametrize(
    ("overrides", "axis"),
    [
        ([("parallel.tp", "2")], "tp"),
        pytest.param([("parallel.cp", "2")], "cp", marks=pytest.mark.slow),
        (PIPELINE, "pp"),
        pytest.param(
            [*PIPELINE, ("model.num_layers", "4"), ("pipeline.schedule", "ZBVZeroBubble")],
            "pp",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_profile_late_rank_is_waited_for_on_the_shared_axis(
    overrides: Overrides, axis: str, store_path: Path, tmp_path: Path
) -> None:
    """The late rank sleeps; the other waits on the axis that they share."""
    late = 0 if axis == "pp" else 1  # the last stage waits for the first
    change = slow(late, "forward_backward", passing=3)
    run(tmp_path, store_path, 2, ("profile.steps", "3"), change, *overrides)
    summary = summary_of(tmp_path, "3-3")
    assert (summary["first_step"], summary["steps"]) == (3, 1)
    phases = {PHASES[name].activity for name in STEP}
    for rank, rank_summary in enumerate(summary["ranks"]):
        assert rank_summary["rank"] == rank
        seconds = rank_summary["seconds"]
        location = "host" if rank == late else axis
        assert seconds[location] > 0.6
        assert max(seconds, key=lambda name: seconds[name]) == location
        assert seconds["compute"] > 0
        step = [e["dur"] for e in trace_of(tmp_path, "3-3", rank) if e["name"] in phases]
        # The microseconds between two phases belong to neither.
        assert sum(seconds.values()) == pytest.approx(sum(step) / 1e6, rel=1e-6)


def test_profile_waits_are_attributed_to_each_axis(store_path: Path, tmp_path: Path) -> None:
    """Rank 3 has late data; rank 2 is in its shard group, rank 1 in its replica group."""
    layout = [("parallel.dp_replicate", "2"), ("parallel.dp_shard", "2")]
    change = slow(3, "step", passing=2)
    run(tmp_path, store_path, 4, ("profile.steps", "2"), change, *layout)
    of = [rank_summary["seconds"] for rank_summary in summary_of(tmp_path, "2-2")["ranks"]]
    assert of[3]["data"] >= 1.0
    # A busy machine adds waits everywhere; the second of late data stands out.
    assert of[2]["dp_shard"] > of[2]["dp_replicate"] + 0.5
    assert of[1]["dp_replicate"] > of[1]["dp_shard"] + 0.5
    assert of[3]["data"] > of[0]["data"] + 0.5
    text = (tmp_path / "traces/step-2-2/summary.txt").read_text()
    assert "exposed dp_replicate" in text


def test_profile_trace_has_the_spans(store_path: Path, tmp_path: Path) -> None:
    """Names and lengths of spans agree, also with an evaluation and a save."""
    all_overrides = [("train.eval_interval", "1"), ("checkpoint.interval", "1")]
    all_overrides += [("train.steps", "3"), ("train.eval_sequences", "2")]
    run(tmp_path, store_path, 2, ("profile.steps", "2-3"), *PIPELINE, *all_overrides)
    for rank in (0, 1):
        recorded = json.loads(spans_path(tmp_path, rank).read_text())
        spans = [
            event
            for event in recorded
            if event.get("args", {}).get("step") in (2, 3)
            and event["name"] != PHASES["profile"].activity
        ]
        names = {event["name"] for event in spans}
        assert {
            PHASES["evaluate"].activity,
            PHASES["checkpoint"].activity,
            "optimizer",
            f"{rank}B3",
        } <= names
        ranges = [e for e in trace_of(tmp_path, "2-3", rank) if e.get("cat") == "user_annotation"]
        observed = sorted(
            (e for e in ranges if e["name"] in names), key=lambda e: (e["ts"], -e["dur"])
        )
        recorded = sorted(spans, key=lambda e: (e["ts"], -e["dur"]))
        assert [e["name"] for e in observed] == [e["name"] for e in recorded]
    assert summary_of(tmp_path, "2-3")["steps"] == 2


def test_profile_memory_is_in_the_trace(store_path: Path, tmp_path: Path) -> None:
    run(tmp_path, store_path, 1, ("profile.steps", "2"), ("profile.memory", "true"))
    assert any(event["name"] == "[memory]" for event in trace_of(tmp_path, "2-2", 0))


def train_and_record_output(overrides: Overrides, store: str, output_path: str) -> None:
    job = small_job(*overrides)
    with open(output_path, "w", encoding="utf-8") as file:
        console = Console(file=file, width=10_000)
        train(plan_here(job), open_dataset(Path(store)), this_rank(), console)


def test_profile_stopped_run_is_resumed_without_a_second_profile(
    store_path: Path, tmp_path: Path
) -> None:
    """The first start is profiled; the resumed one begins later and is not."""
    output_path = tmp_path / "said"
    overrides = [("run.dir", str(tmp_path)), ("train.steps", "4"), ("profile.steps", "1-3")]
    limit = ("resilience.time_limit", "1e-6")
    run_ranks(train_and_record_output, 1, [*overrides, limit], str(store_path), str(output_path))
    assert summary_of(tmp_path, "1-3")["steps"] == 1
    text = (tmp_path / "traces/step-1-3/summary.txt").read_text()
    assert text.startswith("profile of steps 1 to 1")
    assert text in output_path.read_text()
    before = sorted((tmp_path / "traces/step-1-3").iterdir())
    run_ranks(train_and_record_output, 1, overrides, str(store_path), str(output_path))
    assert "profile" not in output_path.read_text()
    assert sorted((tmp_path / "traces/step-1-3").iterdir()) == before


def test_profile_failed_run_has_its_traces(store_path: Path, tmp_path: Path) -> None:
    change = ("resilience.faults", '[{site = "gradients", kind = "raise", passing = 3}]')
    with pytest.raises(RankError, match="injected fault"):
        run(tmp_path, store_path, 1, ("profile.steps", "2-4"), change)
    names = [event["name"] for event in trace_of(tmp_path, "2-4", 0)]
    assert names.count(PHASES["data"].activity) == 2
    assert names.count(PHASES["update"].activity) == 2
    assert not (tmp_path / "traces/step-2-4/summary.json").exists()


def test_profile_that_cannot_be_written_does_not_end_the_run(
    store_path: Path, tmp_path: Path
) -> None:
    (tmp_path / "traces").write_text("no folder")
    output_path = tmp_path / "said"
    overrides = [("run.dir", str(tmp_path)), ("train.steps", "3"), ("profile.steps", "2")]
    run_ranks(train_and_record_output, 1, overrides, str(store_path), str(output_path))
    assert "rank 0: no trace: [Errno 20] Not a directory" in output_path.read_text()


def train_on_a_full_disk(overrides: Overrides, store: str, output_path: str) -> None:
    """Truncate traces to 1,000 bytes; torch's profiler only logs such an error."""
    export = profiling.profile.export_chrome_trace

    def cut(self: Any, path: str) -> None:
        export(self, path)
        os.truncate(path, 1000)

    profiling.profile.export_chrome_trace = cut  # type: ignore[method-assign]
    train_and_record_output(overrides, store, output_path)


def test_profile_truncated_trace_does_not_end_the_run(store_path: Path, tmp_path: Path) -> None:
    output_path = tmp_path / "said"
    overrides = [("run.dir", str(tmp_path)), ("train.steps", "3"), ("profile.steps", "2")]
    run_ranks(train_on_a_full_disk, 1, overrides, str(store_path), str(output_path))
    assert "rank 0: no trace: " in output_path.read_text()
    assert not list((tmp_path / "traces/step-2-2").glob("rank-*"))


@pytest.mark.parametrize(
    ("value", "rule"),
    [
        ("ten", "must be steps such as 7 or 7,20-30. Steps to profile"),
        ("3-", "must be steps such as 7 or 7,20-30. Steps to profile"),
        ("-3", "must be steps such as 7 or 7,20-30. Steps to profile"),
        ("0-2", "must be steps from 1, the smaller of a range first. Steps to profile"),
        ("5-4", "must be steps from 1, the smaller of a range first. Steps to profile"),
        ("5,7", "has 2 ranges, and weft profiles one. Use one step or range, such as 10 or 10-12"),
        ("99-101", "exceeds the last step, train.steps=100. Use steps up to 100"),
        ("10-30", "has 21 steps: traces of over 20 are too large to read. Use 10-12"),
    ],
)
def test_profile_steps_invalid_ranges_are_refused(value: str, rule: str, tmp_path: Path) -> None:
    change = [("run.dir", str(tmp_path)), ("train.steps", "100"), ("profile.steps", value)]
    with pytest.raises(InvalidConfig) as caught:
        prepare_job("demo", change)
    (error,) = caught.value.errors
    assert error.key == "profile.steps"
    assert rule in str(error)


def test_axis_between_ranks_is_the_axis_in_which_they_differ() -> None:
    layout = [("parallel.pp", "2"), ("parallel.cp", "2"), ("parallel.tp", "2"), UNTIED]
    job = small_job(*layout, ("parallel.dp_shard", "2"), ("train.microbatch_size", "2"))
    plan = resolve(job, Machine("cpu", devices=2, world_size=16))
    result = {find_axis([0, other], plan) for other in range(1, 16)}
    assert result == {"pp", "dp_shard", "cp", "tp", "world"}
    assert find_axis([0, 2, 4, 6], plan) == "dp_shard"  # dp_shard and cp together shard a parameter
    assert find_axis(range(16), plan) == "world"


def test_profile_table_has_predicted_and_measured_times() -> None:
    elapsed = [(0, {"compute": 2.0, "pp": 1.0}), (1, {"compute": 1.0, "pp": 2.0, "data": 0.5})]
    expected = {"compute": 1.25, "bubble": 0.5, "pp": 0.25, "host": 0.0, "ep": 0.5}
    lines = format_table(elapsed, expected)
    rows = [line.rsplit(maxsplit=4) for line in lines[1:]]
    assert rows == [
        ["compute", "1.5000", "2.0000", "0", "1.2500"],
        ["exposed pp, with the bubble", "1.5000", "2.0000", "1", "0.7500"],
        ["waiting for data", "0.2500", "0.5000", "1", "-"],
        ["host overhead", "0.0000", "0.0000", "1", "0.0000"],
        ["exposed ep", "0.0000", "0.0000", "1", "0.5000"],  # measured as dp_shard
        ["total", "3.2500", "3.5000", "1", "2.5000"],
    ]
    assert math.isclose(sum(float(row[1]) for row in rows[:-1]), float(rows[-1][1]))
