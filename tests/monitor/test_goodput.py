"""Where the seconds went: each counted once, and what is done again is lost."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.harness import RankError, run_ranks
from tests.small import Overrides, records, train_rank
from weft.monitor.goodput import KINDS, Ledger, goodput


def test_ledger_steps_done_again_are_lost() -> None:
    def record(step: int, productive: float, at: float) -> dict[str, object]:
        return {
            "step": step,
            "time": at,
            "time_breakdown": {"productive": productive, "saving": 1.0},
        }

    now = time.time()
    before = [record(10, 50.0, now - 80), record(20, 100.0, now - 30)]
    ledger = Ledger(before[-1])
    ledger.back_to(before[-1], before[0])
    assert ledger.seconds["productive"] == 50.0
    assert ledger.seconds["lost"] == 50.0
    assert ledger.seconds["saving"] == 1.0
    assert ledger.seconds["restarting"] == pytest.approx(30, abs=1)
    assert goodput(ledger.seconds) == pytest.approx(50 / 131, abs=0.01)
    fresh = Ledger(None)
    fresh.back_to(None, None)
    assert set(fresh.seconds.values()) == {0.0}


STEPS: Overrides = [
    ("train.steps", "8"),
    ("train.eval_interval", "6"),
    ("checkpoint.interval", "4"),
    ("checkpoint.async_save", "false"),
    ("monitor.log_interval", "1"),
]


def test_ledger_killed_run_counts_each_cause_once(store_path: Path, tmp_path: Path) -> None:
    slow = [("checkpoint.shards", 1, 0.5), ("evaluate", 1, 0.75), ("load", 1, 1.0)]
    slow.append(("forward_backward", 6, 1.25))  # of step 6, which is done again
    faults = [
        f'{{site = "{site}", passing = {passing}, kind = "slow", seconds = {seconds}}}'
        for site, passing, seconds in slow
    ]
    faults.append('{site = "step", passing = 7, kind = "kill"}')
    overrides = [
        *STEPS,
        ("run.dir", str(tmp_path)),
        ("resilience.faults", f"[{', '.join(faults)}]"),
    ]
    began = time.time()
    with pytest.raises(RankError, match="SIGKILL"):
        run_ranks(train_rank, 2, overrides, str(store_path))
    time.sleep(1.5)
    run_ranks(train_rank, 2, overrides, str(store_path))
    last = records(tmp_path)[-1]
    seconds = last["time_breakdown"]
    assert list(seconds) == list(KINDS)
    # Each cause in its place, and all of them together all the time that there was.
    assert seconds["saving"] >= 0.5
    assert seconds["evaluating"] >= 0.75
    assert seconds["restoring"] >= 1.0
    assert seconds["restarting"] >= 1.5
    assert seconds["lost"] >= 1.25
    assert sum(seconds.values()) <= last["time"] - began
    assert sum(seconds.values()) >= 0.5 * (last["time"] - began)
