"""Spans of real runs on several ranks, and the span file alone."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.harness import RankError, run_ranks
from tests.small import Overrides, train_rank
from weft.monitor import spans
from weft.monitor.spans import SpanWriter, action, flush_spans, span, spans_path
from weft.monitor.step_timer import PHASES, StepTimer, enter_phase
from weft.planning.pipeline_schedule import build_schedule
from weft.records.span_reader import read_spans

STEPS = [("train.steps", "3"), ("monitor.log_interval", "1")]


def run(directory: Path, store: Path, ranks: int, *overrides: tuple[str, str]) -> None:
    job: Overrides = [*STEPS, ("run.dir", str(directory)), *overrides]
    run_ranks(train_rank, ranks, job, str(store))


def check_nesting(events: list[dict[str, Any]]) -> None:
    """Check that two spans are nested or disjoint."""
    open_ends: list[int] = []
    for event in sorted(events, key=lambda event: (event["ts"], -event["dur"])):
        while open_ends and open_ends[-1] <= event["ts"]:
            open_ends.pop()
        end = event["ts"] + event["dur"]
        assert not open_ends or end <= open_ends[-1], event
        open_ends.append(end)


def fault(**fields: Any) -> tuple[str, str]:
    pairs = ", ".join(f"{k} = {v!r}".replace("'", '"') for k, v in fields.items())
    return "resilience.faults", f"[{{{pairs}}}]"


@pytest.mark.parametrize(
    ("schedule", "stages"),
    [
        ("1F1B", 2),
        pytest.param("Interleaved1F1B", 4, marks=pytest.mark.slow),
        ("ZBVZeroBubble", 4),
    ],
)
def test_spans_of_a_pipeline_are_its_schedule(
    schedule: str, stages: int, store_path: Path, tmp_path: Path
) -> None:
    run(
        tmp_path,
        store_path,
        2,
        ("parallel.pp", "2"),
        ("pipeline.schedule", schedule),
        ("train.microbatch_size", "2"),
        ("model.num_layers", "4"),
        ("model.tied_embeddings", "false"),
        ("train.eval_interval", "1"),
    )
    for rank, order in build_schedule(schedule, 2, stages // 2, 4).items():
        events = read_spans(tmp_path, rank)
        check_nesting(events)
        assert {event["pid"] for event in events} == {rank}
        counts: Counter[tuple[int, int, str, int]] = Counter()
        for event in events:
            args = event["args"]
            if "stage" in args:
                stage, kind, microbatch = args["stage"], args["kind"], args["microbatch"]
                assert event["name"] == f"{stage}{kind}{microbatch}"
                counts[args["step"], stage, kind, microbatch] += 1
        expected = Counter((step, *act) for step in (1, 2, 3) for act in order)
        assert counts == expected


def test_spans_without_a_pipeline_continue_over_two_starts(
    store_path: Path, tmp_path: Path
) -> None:
    extra = [
        ("train.microbatch_size", "2"),
        ("train.eval_interval", "1"),
        ("checkpoint.interval", "1"),
    ]
    run(tmp_path, store_path, 2, *extra)
    first = read_spans(tmp_path, 1)
    run(tmp_path, store_path, 2, *extra, ("train.steps", "5"))
    events = read_spans(tmp_path, 1)
    assert events[: len(first)] == first
    check_nesting(events)
    names = ("start", "load", "data", "forward_backward", "update", "device", "log")
    phases = {PHASES[name].activity for name in (*names, "evaluate", "checkpoint")}
    inside = {"loss", "gradient norm", "optimizer"}
    passes = {f"0{kind}{microbatch}" for kind in "FB" for microbatch in range(2)}
    assert {event["name"] for event in events} == phases | inside | passes
    steps = Counter(event["args"]["step"] for event in events if event["name"] == "0F1")
    assert steps == dict.fromkeys(range(1, 6), 1)


def test_spans_failed_or_killed_rank_leaves_complete_files(
    store_path: Path, tmp_path: Path
) -> None:
    for kind, last in (("raise", "forward and backward"), ("kill", "waiting for data")):
        directory = tmp_path / kind
        change = fault(site="gradients", passing=2, kind=kind)
        with pytest.raises(RankError):
            run(directory, store_path, 1, change)
        text = json.loads(spans_path(directory, 0).read_text())[-1]
        # A killed rank loses its spans since its last record.
        assert text["args"]["step"] == (2 if kind == "raise" else 1)
        assert text["name"] == PHASES["update"].activity
        assert last in {event["name"] for event in read_spans(directory, 0)}


def test_spans_disabled_leave_no_files(store_path: Path, tmp_path: Path) -> None:
    run(tmp_path, store_path, 1, ("monitor.spans", "false"))
    assert not (tmp_path / "spans").exists()


def note_many(path: Path, count: int) -> None:
    timer = StepTimer(None, SpanWriter(path, 3))
    for number in range(count):
        enter_phase("data", step=number + 1)
        with action(1, "F", number):
            pass
        flush_spans()
    timer.close()


def test_spans_full_file_is_renamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spans, "FILE_BYTES", 4000)
    path = spans_path(tmp_path, 3)
    note_many(path, 10)
    assert not path.with_suffix(".old.json").exists()
    note_many(path, 100)
    for item in (path, path.with_suffix(".old.json")):
        assert item.stat().st_size < 5000
        json.loads(item.read_text())
    names = [event["name"] for event in read_spans(tmp_path, 3) if "stage" in event["args"]]
    assert names == [f"1F{number}" for number in range(100 - len(names), 100)]
    assert len(names) > 8


def test_spans_torn_file_is_renamed(tmp_path: Path) -> None:
    path = spans_path(tmp_path, 3)
    note_many(path, 2)
    full = read_spans(tmp_path, 3)
    torn = path.read_bytes()[:-20]
    path.write_bytes(torn)
    assert read_spans(tmp_path, 3) == full[:-1]
    note_many(path, 1)
    assert path.with_suffix(".old.json").read_bytes() == torn
    assert len(json.loads(path.read_text())) > 2


def test_spans_background_thread_has_no_phase(tmp_path: Path) -> None:
    timer = StepTimer(None, SpanWriter(spans_path(tmp_path, 0), 0))
    enter_phase("data", step=1)
    thread = threading.Thread(target=enter_phase, args=("checkpoint",))
    thread.start()
    thread.join()
    timer.close()
    assert [event["name"] for event in read_spans(tmp_path, 0)] == [
        PHASES["start"].activity,
        PHASES["data"].activity,
    ]


def test_spans_of_another_thread_have_their_own_track(tmp_path: Path) -> None:
    timer = StepTimer(None, SpanWriter(spans_path(tmp_path, 0), 0))
    enter_phase("forward_backward", step=1)

    def run_backward() -> None:
        with action(1, "B", 0):
            pass

    with action(0, "F", 4):
        thread = threading.Thread(target=run_backward)
        thread.start()
        thread.join()
    timer.close()
    tracks = {event["name"]: event["tid"] for event in read_spans(tmp_path, 0)}
    assert (tracks["0F4"], tracks["1B0"]) == (0, 1)


def test_spans_unwritable_file_is_reported(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    timer = StepTimer(None, SpanWriter(spans_path(tmp_path, 0), 0))
    (tmp_path / "spans").write_bytes(b"")  # a file prevents the directory
    enter_phase("data", step=1)
    flush_spans()
    timer.close()
    out = capfd.readouterr().out
    assert f"{spans_path(tmp_path, 0)} cannot be written: file exists" in out
    assert "2 records are lost" in out


def test_span_takes_microseconds(tmp_path: Path) -> None:
    """A span takes microseconds, writing included; the limit allows for a busy machine."""
    count = 20_000
    timer = StepTimer(None, SpanWriter(spans_path(tmp_path, 0), 0))
    start_time = time.process_time()
    for number in range(count):
        with span("loss", microbatch=number):
            pass
    timer.close()
    assert (time.process_time() - start_time) / count < 2e-4
