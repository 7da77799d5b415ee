"""On a stop signal to one rank, in any phase, all ranks save the step and exit."""

from __future__ import annotations

import os
import re
import signal
import statistics
import threading
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tests.harness import run_ranks
from tests.small import (
    Overrides,
    newest_state,
    plan_here,
    records,
    small_job,
    this_rank,
    train_rank,
    untimed_records,
)
from tests.stop_drill import drill, print_stops
from weft.checkpoint.manifest import checkpoint_step, list_checkpoints
from weft.data.dataset import open_dataset
from weft.monitor.signals import listen
from weft.records.run_reader import read_event_log
from weft.training import loop
from weft.training.loop import train
from weft.training.step import TrainStep

STEPS: Overrides = [
    ("model.num_layers", "1"),
    ("train.steps", "12"),
    ("train.eval_interval", "3"),
    ("checkpoint.interval", "4"),
    ("monitor.log_interval", "1"),
]


def train_with_a_signal(overrides: Overrides, store: str, number: int, run: str) -> bool:
    """Train with weft's handlers; the last rank gets a signal at the fault site."""
    listen()
    job = small_job(*overrides)
    rank = this_rank()
    if number and rank.rank == rank.world_size - 1:

        def send() -> None:
            while not Path(run, "logs/fault-0.happened").exists():
                time.sleep(0.01)
            os.kill(os.getpid(), number)

        threading.Thread(target=send, daemon=True).start()
    return train(plan_here(job), open_dataset(Path(store)), rank, Console(quiet=True))


@pytest.fixture(scope="module")
def reference_run(store_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("undisturbed")
    run_ranks(train_rank, 2, [*STEPS, ("run.dir", str(directory))], str(store_path))
    return directory


def assert_equal_runs(directory: Path, reference: Path) -> None:
    """Assert equal bits of weights and optimizer, and records that differ only in timings."""
    state, expected = newest_state(directory), newest_state(reference)
    assert state.keys() == expected.keys()
    assert all(state[name].equal(tensor) for name, tensor in expected.items())
    assert untimed_records(directory) == untimed_records(reference)


TERM, USR1, INT = int(signal.SIGTERM), int(signal.SIGUSR1), int(signal.SIGINT)
ALRM = int(signal.SIGALRM)


@pytest.mark.parametrize(
    ("site", "passing", "last", "number"),
    [
        ("step", 1, 2, TERM),
        ("checkpoint.shards", 1, 8, USR1),
        # The launcher's time limit: it counts after the first step of a start.
        ("step", 1, 2, ALRM),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [
                ("step", 6, 7, USR1),
                ("gradients", 6, 7, INT),
                ("evaluate", 2, 7, INT),
                ("checkpoint", 1, 5, USR1),
                ("checkpoint.shards", 1, 8, INT),
            ]
        ),
    ],
)
def test_signal_in_a_phase_saves_and_resumes_bit_for_bit(
    site: str,
    passing: int,
    last: int,
    number: int,
    store_path: Path,
    tmp_path: Path,
    reference_run: Path,
) -> None:
    fault = f'[{{site = "{site}", passing = {passing}, kind = "slow", seconds = 0.5, rank = 1}}]'
    overrides = [*STEPS, ("run.dir", str(tmp_path)), ("resilience.faults", fault)]
    call = (overrides, str(store_path), number, str(tmp_path))
    assert run_ranks(train_with_a_signal, 2, *call) == [False, False]
    saved = checkpoint_step(list_checkpoints(tmp_path / "checkpoints")[-1])
    assert saved == records(tmp_path)[-1]["step"]
    assert saved <= last
    if site == "checkpoint.shards":
        stop = read_event_log(tmp_path)[0][-1]["text"]
        assert "s until the checkpoint before was written, " in stop
    if number == ALRM:
        assert saved >= 1
        stops = [event["text"] for event in read_event_log(tmp_path)[0] if event["kind"] == "stop"]
        assert stops[0].startswith("resilience.time_limit: saved step ")
    # The resumed run equals an undisturbed one.
    call = (overrides, str(store_path), 0, str(tmp_path))
    assert run_ranks(train_with_a_signal, 2, *call) == [True, True]
    assert_equal_runs(tmp_path, reference_run)


def test_signal_while_loading_saves_and_resumes_bit_for_bit(
    store_path: Path, tmp_path: Path, reference_run: Path
) -> None:
    part = [*STEPS, ("run.dir", str(tmp_path))]
    fail = ("resilience.faults", '[{site = "step", passing = 7, kind = "raise"}]')
    with pytest.raises(Exception, match="injected fault"):
        run_ranks(train_rank, 2, [*part, fail], str(store_path))
    for marker in (tmp_path / "logs").glob("*.happened"):
        marker.unlink()
    slow = ("resilience.faults", '[{site = "load", kind = "slow", seconds = 0.5, rank = 1}]')
    call = ([*part, slow], str(store_path), int(signal.SIGTERM), str(tmp_path))
    assert run_ranks(train_with_a_signal, 2, *call) == [False, False]
    assert checkpoint_step(list_checkpoints(tmp_path / "checkpoints")[-1]) == 4
    assert run_ranks(train_with_a_signal, 2, part, str(store_path), 0, "") == [True, True]
    state, expected = newest_state(tmp_path), newest_state(reference_run)
    assert all(state[name].equal(tensor) for name, tensor in expected.items())


ACCUMULATION = [("train.microbatch_size", "1")]  # four microbatches on each rank
MANY = [("train.eval_sequences", "40"), *ACCUMULATION]
TIMES = (
    r"([0-3]\.\d\d) s after the request: \d\.\d\d s until all ranks stopped, "
    r"(\d\.\d\d s until the checkpoint before was written, )?\d\.\d\d s to save"
)
BAD_STEP = [("resilience.on_anomaly", "skip")]
OVERFLOW = [
    ("model.dense_layers", "0"),
    ("model.kind", "moe"),
    ("model.preset", "toy-moe"),
    ("model.head_dim", "16"),
    ("model.num_experts", "4"),
    ("model.expert_dim", "24"),
    ("parallel.ep", "2"),
    ("parallel.ep_dispatch", "padded"),
    ("parallel.ep_capacity_factor", "1"),
]
SLOW_STEP = '{site = "%s", passing = %d, kind = "slow", seconds = 0.5, rank = 1}'


@pytest.mark.parametrize(
    ("site", "passing", "keys", "saved"),
    [
        # The ranks ask before the signal, after the first forward pass, and after the second one.
        pytest.param("step", 6, ACCUMULATION, 5, id="accumulation"),
        pytest.param("evaluate", 2, MANY, 6, id="evaluation"),
        pytest.param("gradients", 6, BAD_STEP, 5, id="second computation of a bad step"),
        *(
            pytest.param(*case, marks=pytest.mark.slow, id=name)
            for name, case in {
                "one microbatch": ("step", 6, [], 6),
                "backward": ("gradients", 6, [], 6),
                "pipeline": ("step", 6, [("parallel.pp", "2"), ("model.num_layers", "2")], 6),
                "ZeRO-3": ("step", 6, [*ACCUMULATION, ("parallel.gradient_sync", "step")], 5),
                "tp": ("step", 6, [*ACCUMULATION, ("parallel.tp", "2")], 5),
                "replicas": ("step", 6, [*ACCUMULATION, ("parallel.dp_replicate", "2")], 5),
                "bad step of a pipeline": (
                    "gradients",
                    6,
                    [*BAD_STEP, ("parallel.pp", "2"), ("model.num_layers", "2")],
                    5,
                ),
                # Each of the first two steps has four microbatches, all of which it computes twice.
                "experts whose rows do not fit": (
                    "microbatch",
                    13,
                    [*ACCUMULATION, *OVERFLOW],
                    1,
                ),
                "final evaluation": ("evaluate", 4, MANY, 12),
                "synchronous save": ("evaluate", 2, [*MANY, ("checkpoint.async_save", "false")], 6),
            }.items()
        ),
    ],
)
def test_stop_abandons_what_the_save_does_not_need(
    site: str, passing: int, keys: Overrides, saved: int, store_path: Path, tmp_path: Path
) -> None:
    """It saves the last complete step, and the resumed run equals an undisturbed one."""
    job, run = [*STEPS, *keys], tmp_path / "run"
    faults = [SLOW_STEP % (site, passing)]
    if BAD_STEP[0] in keys:
        faults.append('{site = "gradients", passing = 6, kind = "nan"}')
    faulty = [*job, ("run.dir", str(run)), ("resilience.faults", f"[{', '.join(faults)}]")]
    assert run_ranks(train_with_a_signal, 2, faulty, str(store_path), TERM, str(run)) == [False] * 2
    assert checkpoint_step(list_checkpoints(run / "checkpoints")[-1]) == saved
    last = records(run)[-1]
    assert (last["step"], last.get("eval_skipped", False)) == (saved, saved % 3 == 0)
    (stop,) = [event["text"] for event in read_event_log(run)[0] if event["kind"] == "stop"]
    assert re.fullmatch(rf"SIGTERM: saved step {saved} {TIMES}", stop)
    assert run_ranks(train_with_a_signal, 2, faulty, str(store_path), 0, str(run)) == [True, True]
    reference = tmp_path / "reference"
    run_ranks(train_rank, 2, [*job, ("run.dir", str(reference))], str(store_path))
    assert_equal_runs(run, reference)


def test_stop_during_a_wait_for_another_rank_counts_the_wait(
    store_path: Path, tmp_path: Path
) -> None:
    """Python calls the handler of the last rank only when rank 0 has computed."""
    fault = '[{site = "microbatch", passing = 6, kind = "slow", seconds = 1.0}]'
    job = [*STEPS, ("run.dir", str(tmp_path)), ("resilience.faults", fault)]
    call = (job, str(store_path), TERM, str(tmp_path))
    assert run_ranks(train_with_a_signal, 2, *call) == [False, False]
    (stop,) = [event["text"] for event in read_event_log(tmp_path)[0] if event["kind"] == "stop"]
    times = re.search(TIMES, stop)
    assert times is not None
    assert float(times[1]) > 0.7


def generate_after_a_signal(overrides: Overrides, store: str, sends: bool) -> bool:
    """Train with a generation of eval prompts, during which the last rank gets a signal."""
    listen()
    rank = this_rank()

    def generate(train_step: TrainStep, check_stop: Callable[[], None]) -> list[str]:
        if sends and rank.rank == rank.world_size - 1:
            os.kill(os.getpid(), TERM)
        for _ in range(3):
            check_stop()
        assert not sends, "the generation continues after a stop"
        return ["a prompt and its continuation"]

    plan = plan_here(small_job(*overrides))
    return train(plan, open_dataset(Path(store)), rank, Console(quiet=True), generate)


def test_stop_abandons_a_generation_which_the_next_start_makes_up_for(
    store_path: Path, tmp_path: Path, reference_run: Path
) -> None:
    call = [*STEPS, ("run.dir", str(tmp_path))], str(store_path)
    assert run_ranks(generate_after_a_signal, 2, *call, True) == [False, False]
    assert records(tmp_path)[-1]["eval_skipped"] is True
    assert checkpoint_step(list_checkpoints(tmp_path / "checkpoints")[-1]) == 3
    # A second stop, before the evaluation is complete, changes nothing.
    assert run_ranks(generate_after_a_signal, 2, *call, True) == [False, False]
    assert records(tmp_path)[-1]["eval_skipped"] is True
    assert run_ranks(generate_after_a_signal, 2, *call, False) == [True, True]
    steps = [
        event["step"] for event in read_event_log(tmp_path)[0] if event["kind"] == "generation"
    ]
    assert steps == [3, 6, 9, 12]
    assert_equal_runs(tmp_path, reference_run)


def compare_replicas_with_a_signal(overrides: Overrides, store: str) -> bool:
    """Train; the last rank gets a signal in the third comparison of replicas."""
    listen()
    job, rank, calls = small_job(*overrides), this_rank(), count(1)
    compare = loop.compare_replicas

    def compare_with_a_signal(*args: Any) -> None:
        if next(calls) == 3 and rank.rank == rank.world_size - 1:
            os.kill(os.getpid(), TERM)
        compare(*args)

    loop.compare_replicas = compare_with_a_signal
    return train(plan_here(job), open_dataset(Path(store)), rank, Console(quiet=True))


def test_stop_in_a_comparison_of_replicas_saves_that_step(store_path: Path, tmp_path: Path) -> None:
    job = [*STEPS, ("parallel.dp_replicate", "2"), ("resilience.replica_check", "3")]
    run, reference = tmp_path / "run", tmp_path / "reference"
    here = [*job, ("run.dir", str(run))]
    assert run_ranks(compare_replicas_with_a_signal, 2, here, str(store_path)) == [False, False]
    # Replicas are compared after steps 3 and 6, and before the save of step 4.
    assert checkpoint_step(list_checkpoints(run / "checkpoints")[-1]) == 6
    (stop,) = [event["text"] for event in read_event_log(run)[0] if event["kind"] == "stop"]
    assert re.fullmatch(rf"SIGTERM: saved step 6 {TIMES}", stop)
    assert run_ranks(train_rank, 2, here, str(store_path)) == [None, None]
    run_ranks(train_rank, 2, [*job, ("run.dir", str(reference))], str(store_path))
    assert_equal_runs(run, reference)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_signal_while_compiling_saves(store_path: Path, tmp_path: Path) -> None:
    fault = '[{site = "step", kind = "slow", seconds = 0.01, rank = 1}]'
    overrides = [*STEPS, ("run.dir", str(tmp_path)), ("compile.enable", "true")]
    overrides.append(("resilience.faults", fault))
    call = (overrides, str(store_path), int(signal.SIGTERM), str(tmp_path))
    assert run_ranks(train_with_a_signal, 2, *call, timeout=240) == [False, False]
    assert checkpoint_step(list_checkpoints(tmp_path / "checkpoints")[-1]) <= 2


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_stop_drill_ends_in_the_state_of_an_undisturbed_run(tmp_path: Path) -> None:
    """Random kills and stops of runs that evaluate and generate: see `tests.stop_drill`."""
    stops = drill(12, seed=2, home=tmp_path)
    print_stops(stops)
    steps = [stop.steps for stop in stops]
    assert statistics.median(steps) < 1  # single stops depend on the machine
