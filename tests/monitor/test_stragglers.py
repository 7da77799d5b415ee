"""A slow rank is named within a few records; a run without one names no rank."""

from __future__ import annotations

import random
import statistics
import time
from pathlib import Path

import pytest
import torch

from tests.harness import run_ranks
from tests.monitor.test_faults import fault, train_and_record_output
from tests.small import Overrides, records, train_rank
from weft.monitor.stragglers import StragglerDetector, find_slowest


@pytest.mark.parametrize(
    ("step_seconds", "table", "rank", "ratio", "reason"),
    [
        # With two ranks, the median of the others is the other rank.
        (3.0, [[2.0, 1.0], [0.0, 1.0]], 0, 3.0, "waiting for data"),
        (1.0, [[0.0, 1.0], [0.0, 3.0]], 1, 3.0, "computing"),
        # Another pipeline stage has more work.
        (1.0, [[0.0, 1.0, 0], [0.0, 1.1, 0], [0.0, 3.0, 1], [0.0, 3.0, 1]], 1, 1.1, "computing"),
        (1.0, [[0.0, 5.0]], None, 1.0, ""),
        (1.0, [[0.0, 0.0], [0.0, 0.0]], None, 1.0, ""),
    ],
)
def test_slowest_of_a_table_is_named_with_the_reason(
    step_seconds: float, table: list[list[float]], rank: int | None, ratio: float, reason: str
) -> None:
    result = find_slowest(step_seconds, table)
    assert result[0] == rank
    assert result[1] == pytest.approx(ratio)
    assert reason in result[2]


def test_slowest_of_many_equals_each_compared_with_its_peers() -> None:
    """The result equals a comparison of all peers, and is fast for thousands of ranks."""
    rng = random.Random(0)
    for size in (2, 3, 8, 41):
        table = [[rng.choice((0.0, rng.random())), rng.random(), i % 3] for i in range(size)]
        ratios = {}
        for rank, (data, compute, position) in enumerate(table):
            peers = [row for n, row in enumerate(table) if n != rank and row[2] == position]
            if peers:
                extra = data - statistics.median(row[0] for row in peers)
                usual = statistics.median(row[1] for row in peers)
                ratios[rank] = max(3.0 / (3.0 - extra), compute / usual)
        rank, ratio, _ = find_slowest(3.0, table)
        expected = max([1.0, *ratios.values()])
        assert ratio == pytest.approx(expected)
        assert rank is None or ratios[rank] == pytest.approx(expected)
    start_time = time.process_time()
    find_slowest(3.0, [[rng.random(), rng.random(), 0] for _ in range(16384)])
    assert (
        time.process_time() - start_time < 5
    )  # comparing all pairs of ranks would take more than a minute


def test_slow_rank_in_three_records_over_ten_steps_is_named_once() -> None:
    """One slow record, or three in a few steps, name no rank; a fast one begins anew."""
    detector, said = StragglerDetector(), list[str]()
    slow, even = [[2.0, 1.0], [0.0, 1.0]], [[0.0, 1.0], [0.0, 1.0]]
    tables = {1: slow, 2: slow, 3: slow, 4: even, 5: slow, 10: slow, 15: slow, 20: slow, 21: even}
    named = [
        step for step, t in tables.items() if detector.check(step, 3.0, t, said.append)[0] == 0
    ]
    assert named == [15, 20]
    assert said == ["rank 0 is slow: waiting for data makes steps 3.0 times as long"]


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_slow_rank_is_named_once_within_four_records(
    ranks: int, store_path: Path, tmp_path: Path
) -> None:
    """One rank takes 0.4 s longer for a step, and is named once within 4 records.

    Steps take 20 ms, or ten times as long on a busy machine, where a shorter delay may not count.
    On such a machine the same rank may have been the slowest of the records before, too.
    """
    change = fault(site="step", kind="slow", rank=1, passing=11, times=1000, seconds=0.4)
    overrides: Overrides = [
        ("train.steps", "30"),
        ("train.global_batch_size", "6"),
        ("monitor.log_interval", "5"),
        ("run.dir", str(tmp_path / "run")),
        *change,
    ]
    run_ranks(train_and_record_output, ranks, overrides, str(store_path), str(tmp_path / "said"))
    text = (tmp_path / "said-0").read_text()
    assert text.count("warning: rank 1 is slow: waiting for data makes steps") == 1
    named = {
        r["step"]: r["straggler_rank"] for r in records(tmp_path / "run") if "straggler_rank" in r
    }
    assert set(named.values()) == {1}
    assert min(named) <= 30
    assert max(named) == 30
    for record in records(tmp_path / "run"):
        data = record["ranks"]["data_seconds"]
        assert data["rank"] == 1 or record["step"] <= 10
        assert data["min"] <= data["median"] <= data["max"]


def train_with_little_threads(overrides: Overrides, store: str) -> None:
    torch.set_num_threads(1)
    train_rank(overrides, store)


@pytest.mark.parametrize(
    ("ranks", "steps"),
    [(2, 50), *(pytest.param(ranks, 200, marks=pytest.mark.slow) for ranks in (2, 3))],
)
def test_slow_rank_in_clean_steps_none_is_named(
    ranks: int, steps: int, store_path: Path, tmp_path: Path
) -> None:
    overrides: Overrides = [
        ("train.steps", str(steps)),
        ("train.global_batch_size", "6"),
        ("monitor.log_interval", "2"),
        ("run.dir", str(tmp_path)),
    ]
    run_ranks(train_with_little_threads, ranks, overrides, str(store_path))
    assert [r for r in records(tmp_path) if "straggler_rank" in r] == []
