"""Kill a run at random moments, and resume it on another number of ranks.

With `train.world_size_invariant` the weights do not depend on the number of ranks. So the
result must be bit-equal to an uninterrupted run of one process.
"""

from __future__ import annotations

import hashlib
import os
import random
import signal
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.harness import RankError, run_ranks
from tests.small import Overrides, newest_state, records, this_rank, train_rank
from weft.checkpoint.manifest import checkpoint_step, list_checkpoints, read_manifest
from weft.data.loader import Batch, Loader
from weft.training import run

STEPS = 40
JOB: Overrides = [
    ("model.num_layers", "1"),
    ("train.steps", str(STEPS)),
    ("train.global_batch_size", "6"),
    ("checkpoint.interval", "2"),
    ("monitor.log_interval", "1"),
]
CANONICAL = ("train.world_size_invariant", "true")


def train_until_killed(
    overrides: Overrides, store: str, doomed: list[int], seconds: float, observed: str
) -> None:
    """Train; kill the ranks ``doomed`` after ``seconds``."""
    rank = this_rank().rank
    if rank in doomed:
        timer = threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGKILL))
        timer.daemon = True
        timer.start()
    note_batches(observed)
    train_rank(overrides, store)


def note_batches(path: str) -> None:
    """Record position and hash of each sequence that this rank trains on."""

    class Noting(Loader):
        def get_microbatches(self, consumed: int, *groups: int) -> list[Batch]:
            batches = super().get_microbatches(consumed, *groups)
            rows = torch.cat([batch.tokens_BT for batch in batches])
            stride, first = 1, consumed + self.dp_rank * len(rows)
            if self.is_strided:
                stride, first = self.dp_size, consumed + self.dp_rank
            with open(path, "a", encoding="utf-8") as file:
                for index, row in enumerate(rows):
                    position = first + index * stride
                    file.write(f"{position} {hashlib.sha1(np.asarray(row)).hexdigest()}\n")
            return batches

    run.Loader = Noting  # type: ignore[misc]


def read_notes(path: Path) -> dict[int, set[str]]:
    """Return the recorded hashes by position in the data."""
    positions: dict[int, set[str]] = {}
    for line in path.read_text().splitlines():
        position, digest = line.split()
        positions.setdefault(int(position), set()).add(digest)
    return positions


@pytest.fixture(scope="module")
def reference_run(store_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("undisturbed")
    overrides = [*JOB, CANONICAL, ("run.dir", str(directory / "run"))]
    call = (overrides, str(store_path), [], 0.0, str(directory / "seen"))
    run_ranks(train_until_killed, 1, *call)
    return directory


def check(directory: Path, reference_run: Path) -> None:
    state, expected = newest_state(directory / "run"), newest_state(reference_run / "run")
    assert all(state[name].equal(tensor) for name, tensor in expected.items())
    ours, theirs = records(directory / "run"), records(reference_run / "run")
    assert [r["step"] for r in ours] == list(range(1, STEPS + 1))
    assert [(r["tokens"], r["loss"]) for r in ours] == [(r["tokens"], r["loss"]) for r in theirs]
    # Each position had the same sample as in the undisturbed run, in every start.
    assert read_notes(directory / "seen") == read_notes(reference_run / "seen")
    # A kill after the last commit may leave an old checkpoint half deleted, until the next save.
    leftovers = (directory / "run/checkpoints").glob(".tmp-*")
    assert not [path for path in leftovers if not path.name.endswith("-deleted")]


def chaos(source: random.Random, kills: int, directory: Path, store: Path) -> int:
    """Train under random kills; return the number of starts."""
    overrides = [*JOB, CANONICAL, ("run.dir", str(directory / "run"))]
    newest = starts = 0
    while newest < STEPS:
        starts += 1
        ranks = source.choice([1, 2, 3])
        doomed = source.choice([[source.randrange(ranks)], list(range(ranks))])
        seconds = source.uniform(0.0, 1.5) if starts <= kills else 1e9
        mode = [
            ("checkpoint.async_save", source.choice(["true", "false"])),
            ("checkpoint.local_dir", source.choice(["off", str(directory / "node")])),
            ("checkpoint.local_interval", "1"),
        ]
        call = ([*overrides, *mode], str(store), doomed, seconds, str(directory / "seen"))
        try:
            run_ranks(train_until_killed, ranks, *call, timeout=120)
        except RankError as error:
            if "SIGKILL" not in str(error):
                raise
        result = list_checkpoints(directory / "run/checkpoints")
        now = checkpoint_step(result[-1]) if result else 0
        assert now >= newest, "a committed checkpoint was lost"
        assert all(read_manifest(path)["samples"] == 6 * checkpoint_step(path) for path in result)
        newest = now
    return starts


@pytest.mark.slow
def test_train_killed_at_random_ends_with_the_same_bits(
    store_path: Path, tmp_path: Path, reference_run: Path
) -> None:
    assert chaos(random.Random(1), 6, tmp_path, store_path) > 4
    check(tmp_path, reference_run)


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_train_hundred_kills_end_with_the_same_bits(
    store_path: Path, tmp_path: Path, reference_run: Path
) -> None:
    source, kills, runs = random.Random(2), 0, 0
    while kills < 100:
        directory = tmp_path / f"{runs}"
        directory.mkdir()
        kills += chaos(source, 100, directory, store_path) - 1
        runs += 1
        check(directory, reference_run)
    print(f"{kills} kills in {runs} runs")


@pytest.mark.slow
@pytest.mark.parametrize("mode", [[CANONICAL], []], ids=["canonical", "usual"])
def test_train_changing_number_of_ranks_reads_the_same_samples(
    mode: Any, store_path: Path, tmp_path: Path
) -> None:
    """4 -> 2 -> 3 ranks: the same batches in the same order, and equal bits."""
    job = [*JOB, *mode, ("train.steps", "9"), ("train.global_batch_size", "12")]
    job.append(("checkpoint.interval", "1"))
    single, changing = tmp_path / "alone", tmp_path / "changing"
    for directory in (single, changing):
        directory.mkdir()
    call = (
        [*job, ("run.dir", str(single / "run"))],
        str(store_path),
        [],
        0.0,
        str(single / "seen"),
    )
    run_ranks(train_until_killed, 1, *call)
    for part, ranks in enumerate((4, 2, 3)):
        # Each start but the last fails before its fourth step.
        faults = ['{site = "step", passing = 4, kind = "raise"}'] * min(part + 1, 2)
        subset = [*job, ("run.dir", str(changing / "run"))]
        subset.append(("resilience.faults", f"[{', '.join(faults)}]"))
        call = (subset, str(store_path), [], 0.0, str(changing / "seen"))
        if part == 2:
            run_ranks(train_until_killed, ranks, *call)
        else:
            with pytest.raises(RankError, match="injected fault at step"):
                run_ranks(train_until_killed, ranks, *call)
            assert (
                checkpoint_step(list_checkpoints(changing / "run/checkpoints")[-1]) == 3 * part + 3
            )
    assert read_notes(changing / "seen") == read_notes(single / "seen")
    assert set(read_notes(single / "seen")) == set(range(9 * 12))
    ours, theirs = records(changing / "run"), records(single / "run")
    assert [r["tokens"] for r in ours] == [r["tokens"] for r in theirs]
    if mode:
        state, expected = newest_state(changing / "run"), newest_state(single / "run")
        assert all(state[name].equal(tensor) for name, tensor in expected.items())
        assert [r["loss"] for r in ours] == [r["loss"] for r in theirs]
    else:
        assert [r["loss"] for r in ours] == pytest.approx([r["loss"] for r in theirs], rel=1e-4)
