"""StepTimer: every second counts once, and repeated steps are lost."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from tests.harness import RankError, run_ranks
from tests.small import Overrides, records, train_rank
from weft.monitor.spans import SpanWriter
from weft.monitor.step_timer import KINDS, StepTimer, enter_phase, goodput


def new_timer(last_record: dict[str, object] | None = None) -> StepTimer:
    return StepTimer(last_record, SpanWriter(None, 0))


def test_step_timer_repeated_steps_are_lost() -> None:
    def record(step: int, productive: float, at: float) -> dict[str, object]:
        breakdown = {"productive": productive, "saving": 1.0}
        return {"step": step, "time": at, "time_breakdown": breakdown}

    now = time.time()
    before = [record(10, 50.0, now - 80), record(20, 100.0, now - 30)]
    timer = new_timer(before[-1])
    timer.rewind(10, before[-1], before[0])
    seconds = timer.time_breakdown()
    assert timer.completed_step == 10
    assert seconds["productive"] == 50.0
    assert seconds["lost"] == 50.0
    assert seconds["saving"] == 1.0
    assert seconds["restarting"] == pytest.approx(30, abs=1)
    assert goodput(seconds) == pytest.approx(50 / 131, abs=0.01)
    timer.close()
    fresh = new_timer()
    fresh.rewind(0, None, None)
    seconds = fresh.time_breakdown()
    assert 0 <= seconds.pop("restoring") < 1
    assert set(seconds.values()) == {0.0}
    fresh.close()


def test_step_timer_seconds_go_to_their_phase() -> None:
    timer = new_timer()
    for step in (1, 2):
        enter_phase("data", step=step)
        time.sleep(0.02)
        enter_phase("forward_backward")
        time.sleep(0.04)
        enter_phase("device")
        time.sleep(0.01)
        timer.complete_step(step)
    enter_phase("log")
    time.sleep(0.05)
    times = timer.measure()
    assert 0.07 <= times.step < 0.12
    assert 0.02 <= times.data < 0.04
    assert times.stall == pytest.approx(times.data - 0.01, abs=0.008)
    assert 0 <= times.cpu < 0.03
    seconds = timer.time_breakdown()
    assert seconds["productive"] == pytest.approx(2 * times.step, abs=0.01)
    assert 0.05 <= seconds["saving"] < 0.1
    # The next interval starts at zero; a rewind turns its seconds into lost time.
    enter_phase("data", step=3)
    time.sleep(0.02)
    timer.rewind(2, None, None)
    lost = timer.time_breakdown()
    assert lost["lost"] >= 0.02
    assert lost["productive"] == pytest.approx(seconds["productive"], abs=0.01)
    timer.close()


def test_step_timer_ignores_other_threads() -> None:
    timer = new_timer()
    enter_phase("data", step=1)
    thread = threading.Thread(target=enter_phase, args=("checkpoint",))
    thread.start()
    thread.join()
    time.sleep(0.02)
    assert timer.time_breakdown()["saving"] == 0
    assert timer.time_breakdown()["productive"] >= 0.02
    timer.close()


STEPS: Overrides = [
    ("train.steps", "8"),
    ("train.eval_interval", "6"),
    ("checkpoint.interval", "4"),
    ("checkpoint.async_save", "false"),
    ("monitor.log_interval", "1"),
]


def test_step_timer_killed_run_counts_each_cause_once(store_path: Path, tmp_path: Path) -> None:
    slow = [("checkpoint.shards", 1, 0.5), ("evaluate", 1, 0.75), ("load", 1, 1.0)]
    slow.append(("forward_backward", 6, 1.25))  # in step 6, which is repeated
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
    start_time = time.time()
    with pytest.raises(RankError, match="SIGKILL"):
        run_ranks(train_rank, 2, overrides, str(store_path))
    time.sleep(1.5)
    run_ranks(train_rank, 2, overrides, str(store_path))
    first, last = records(tmp_path)[0], records(tmp_path)[-1]
    seconds = last["time_breakdown"]
    assert list(seconds) == list(KINDS)
    # Each cause has its seconds, and their sum is the total time.
    assert seconds["saving"] >= 0.5
    assert seconds["evaluating"] >= 0.75
    assert seconds["restoring"] >= 1.0
    assert seconds["restarting"] >= 1.5
    assert seconds["lost"] >= 1.25
    assert sum(seconds.values()) <= last["time"] - start_time
    # The start of the first processes is no part of the run.
    assert sum(seconds.values()) >= 0.5 * (last["time"] - first["time"])
