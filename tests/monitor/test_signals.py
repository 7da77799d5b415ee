"""On a stop signal to one rank, in any phase, all ranks save the step and exit."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

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
)
from weft.checkpoint.manifest import checkpoint_step, list_checkpoints
from weft.data.dataset import open_dataset
from weft.monitor.signals import listen
from weft.train.loop import train

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


TERM, USR1, INT = int(signal.SIGTERM), int(signal.SIGUSR1), int(signal.SIGINT)


@pytest.mark.parametrize(
    ("site", "passing", "last", "number"),
    [
        ("step", 1, 2, TERM),
        ("checkpoint.shards", 1, 8, USR1),
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
    # The resumed run equals an undisturbed one.
    call = (overrides, str(store_path), 0, str(tmp_path))
    assert run_ranks(train_with_a_signal, 2, *call) == [True, True]
    state, expected = newest_state(tmp_path), newest_state(reference_run)
    assert all(state[name].equal(tensor) for name, tensor in expected.items())


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
    assert checkpoint_step(list_checkpoints(tmp_path / "checkpoints")[-1]) == 5
    assert run_ranks(train_with_a_signal, 2, part, str(store_path), 0, "") == [True, True]
    state, expected = newest_state(tmp_path), newest_state(reference_run)
    assert all(state[name].equal(tensor) for name, tensor in expected.items())


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_signal_while_compiling_saves(store_path: Path, tmp_path: Path) -> None:
    fault = '[{site = "step", kind = "slow", seconds = 0.01, rank = 1}]'
    overrides = [*STEPS, ("run.dir", str(tmp_path)), ("compile.enable", "true")]
    overrides.append(("resilience.faults", fault))
    call = (overrides, str(store_path), int(signal.SIGTERM), str(tmp_path))
    assert run_ranks(train_with_a_signal, 2, *call, timeout=240) == [False, False]
    assert checkpoint_step(list_checkpoints(tmp_path / "checkpoints")[-1]) <= 2
