"""Device hours of runs whose records and events are written by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from weft.records.run_cost import compute_cost, device_seconds
from weft.records.run_reader import RunReader

LONG_AGO = 1.7e9


class WrittenRun:
    """A run directory; times are seconds after `LONG_AGO`."""

    def __init__(self, directory: Path, device: str = "cuda", price: float = 0.0) -> None:
        self.directory, self.step, self.loading = directory, 0, 0.0
        launch = f"[launch]\nprice_per_gpu_hour = {price}\n" if price else ""
        (directory / "job.toml").write_text(f"[train]\nsteps = 100\n{launch}")
        plan = {"device": device, "local_world_size": 8, "num_steps": 100}
        (directory / "plan.json").write_text(json.dumps(plan))

    def append(self, name: str, **values: object) -> None:
        with (self.directory / name).open("a") as file:
            file.write(json.dumps(values) + "\n")

    def event(self, time: float, kind: str, text: str) -> None:
        self.append("events.jsonl", time=LONG_AGO + time, step=self.step, kind=kind, text=text)

    def start(self, time: float, ranks: int, loading: float = 0.0) -> None:
        self.loading += loading
        self.event(time, "start", f"resumed from step {self.step} on {ranks} ranks")

    def record(self, time: float) -> None:
        self.step += 1
        breakdown = {"productive": 1.0, "restoring": self.loading}
        self.append(
            "metrics.jsonl",
            step=self.step,
            loss=1.0,
            step_seconds=1.0,
            time=LONG_AGO + time,
            time_breakdown=breakdown,
        )

    def seconds(self, now: float = 1e6) -> float:
        return device_seconds(RunReader(self.directory), LONG_AGO + now)


def test_elastic_run_counts_each_start_with_its_ranks_and_no_queue(tmp_path: Path) -> None:
    run = WrittenRun(tmp_path)
    run.start(100, ranks=16, loading=40)
    run.record(200)
    run.event(300, "stop", "SIGTERM: saved step 1")
    assert run.seconds() == pytest.approx(16 * 240)
    run.start(5000, ranks=8, loading=30)  # after a queue
    run.record(5100)
    run.event(5200, "end", "all 100 steps are done")
    assert run.seconds() == pytest.approx(16 * 240 + 8 * 230)


def test_restart_by_the_launcher_counts_the_time_between(tmp_path: Path) -> None:
    """Also a start whose records a later start has dropped."""
    run = WrittenRun(tmp_path)
    run.start(100, ranks=8)
    run.event(400, "restart", "rank 3 failed")
    run.start(460, ranks=8, loading=20)
    run.record(500)
    assert run.seconds() == pytest.approx(8 * 400)
    run.event(600, "restart", "rank 3 failed")
    run.start(600 + 7200, ranks=8)  # the launcher has died, and the job was submitted again
    run.event(7900, "stop", "SIGTERM")
    assert run.seconds() == pytest.approx(8 * 500 + 8 * 100)


def test_lost_node_counts_the_samples_of_the_others_once(tmp_path: Path) -> None:
    run = WrittenRun(tmp_path)
    run.start(0, ranks=16)
    run.record(100)
    for time in range(0, 160, 20):  # the launcher samples until the ranks of 8 start again
        run.append("system.jsonl", time=LONG_AGO + time)
    run.start(150, ranks=8, loading=50)
    run.record(250)
    assert run.seconds() == pytest.approx(16 * 140 + 8 * 110)


def test_running_run_counts_until_now(tmp_path: Path) -> None:
    run = WrittenRun(tmp_path)
    assert run.seconds() == 0
    run.start(0, ranks=4)
    run.record(100)
    assert run.seconds(now=130) == pytest.approx(4 * 130)


def test_cost_has_the_price_of_the_submission(tmp_path: Path) -> None:
    run = WrittenRun(tmp_path, price=2.0)
    run.start(0, ranks=16)
    run.event(360_000, "stop", "SIGTERM")
    now = LONG_AGO + 1e6
    assert str(compute_cost(RunReader(tmp_path), now)) == "3,200 (1,600 GPU-hours at 2)"
    (tmp_path / "launch.json").write_text('{"price_per_gpu_hour": 2.5}')
    assert str(compute_cost(RunReader(tmp_path), now)) == "4,000 (1,600 GPU-hours at 2.5)"
    for path in tmp_path.iterdir():
        path.unlink()
    run = WrittenRun(tmp_path, device="cpu")
    run.start(0, ranks=16)
    run.event(1800, "stop", "SIGTERM")
    assert str(compute_cost(RunReader(tmp_path), now)) == "1.00 node-hours"
