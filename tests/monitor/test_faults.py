"""A fault at every site of a save, on either rank, loses no state and leaves no files."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from tests.harness import RankError, run_ranks
from tests.small import Overrides, newest_state, plan_here, small_job, this_rank, train_rank
from weft.checkpoint.manifest import checkpoint_step, list_checkpoints
from weft.config.errors import InvalidConfig
from weft.config.reader import read_job
from weft.data.dataset import open_dataset
from weft.monitor.faults import SITES
from weft.preparation.job_checks import prepare_job
from weft.training.loop import train

# The run keeps two checkpoints, so the third save deletes one.
ONE_LAYER = ("model.num_layers", "1")
STEPS: Overrides = [ONE_LAYER, ("train.steps", "8"), ("checkpoint.interval", "2")]
SAVING = [site for site in SITES if site.startswith("checkpoint")]
BY_RANK_0 = ["manifest", "rename", "renamed", "delete", "deleting"]
PLACES = [
    (site, rank)
    for site in SAVING
    for rank in (0, 1)
    if not (rank and site.rpartition(".")[2] in BY_RANK_0)
]


def fault(**fields: Any) -> Overrides:
    pairs = ", ".join(f"{k} = {v!r}".replace("'", '"') for k, v in fields.items())
    return [("resilience.faults", f"[{{{pairs}}}]")]


@pytest.fixture(scope="module")
def reference_run(store_path: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    directory = tmp_path_factory.mktemp("undisturbed")
    run_ranks(train_rank, 2, [*STEPS, ("run.dir", str(directory))], str(store_path))
    return newest_state(directory)


def check_end(directory: Path, reference_run: dict[str, torch.Tensor], steps: int) -> None:
    state = newest_state(directory)
    assert all(state[name].equal(tensor) for name, tensor in reference_run.items())
    names = sorted(os.listdir(directory / "checkpoints"))
    assert [name for name in names if not name.startswith("lease-")] == [
        f"step-{steps - 2:08}",
        f"step-{steps:08}",
    ]


# Sites before, during and after the rename that publishes a checkpoint.
KILLED_OFTEN = [
    ("checkpoint.shards", 1),
    ("checkpoint.rename", 0),
    ("checkpoint.renamed", 0),
    ("checkpoint.deleting", 0),
]
VISIBLE = ["checkpoint.renamed", "checkpoint.delete", "checkpoint.deleting", "checkpoint.saved"]


@pytest.mark.parametrize(
    ("positions", "background"),
    [
        (KILLED_OFTEN, "true"),
        *(pytest.param(PLACES, tensor, marks=pytest.mark.slow) for tensor in ("true", "false")),
    ],
    ids=["often-background", "all-background", "all-foreground"],
)
def test_save_killed_at_one_site_after_another_resumes_bit_for_bit(
    positions: list[tuple[str, int]], background: str, store_path: Path, tmp_path: Path
) -> None:
    """Each start resumes from the state that the last one left, and dies at the next site."""
    # Two checkpoints exist before the first kill, so that each save deletes one.
    steps = 4 + 2 * sum(site in VISIBLE for site, _ in positions) + 2
    job: Overrides = [*STEPS, ("train.steps", f"{steps}")]
    job += [("checkpoint.async_save", background)]
    straight, run_dir = tmp_path / "straight", tmp_path / "run"
    run_ranks(train_rank, 2, [*job, ("run.dir", str(straight))], str(store_path))
    expected = 4
    for number, (site, rank) in enumerate(positions):
        # The first start dies in its third save, which is the first that deletes a checkpoint.
        first = 1 if "delet" in site else 3
        change = fault(site=site, rank=rank, passing=1 if number else first)
        overrides = [*job, ("run.dir", str(run_dir)), *change]
        with pytest.raises(RankError, match=f"rank {rank} of 2 .*SIGKILL"):
            run_ranks(train_rank, 2, overrides, str(store_path))
        # After these sites the checkpoint is visible.
        expected += 2 * (site in VISIBLE)
        newest = checkpoint_step(list_checkpoints(run_dir / "checkpoints")[-1])
        assert newest == expected, site
        (run_dir / "logs/fault-0.happened").unlink()
    run_ranks(train_rank, 2, [*job, ("run.dir", str(run_dir))], str(store_path))
    check_end(run_dir, newest_state(straight), steps)


def train_and_record_output(overrides: Overrides, store: str, output_path: str) -> None:
    """Train, with the output in a file."""
    job = small_job(*overrides)
    with open(f"{output_path}-{this_rank().rank}", "w", encoding="utf-8") as file:
        console = Console(file=file, width=10_000)
        train(plan_here(job), open_dataset(Path(store)), this_rank(), console)


@pytest.mark.parametrize(
    ("site", "rank", "error"),
    [
        ("checkpoint.rename", 0, "EDQUOT"),
        ("checkpoint.deleting", 0, "ENOSPC"),
        pytest.param("checkpoint.written", 1, "EIO", marks=pytest.mark.slow),
        *(
            pytest.param(site, rank, "ENOSPC", marks=pytest.mark.slow)
            for site, rank in PLACES
            if site not in ("checkpoint", "checkpoint.saved", "checkpoint.deleting")
        ),
    ],
)
def test_save_failure_is_reported_and_training_continues(
    site: str,
    rank: int,
    error: str,
    store_path: Path,
    tmp_path: Path,
    reference_run: dict[str, Any],
) -> None:
    passing = 1 if "delet" in site else 3
    change = fault(site=site, rank=rank, passing=passing, kind="error", error=error)
    run_dir = tmp_path / "run"
    overrides = [*STEPS, ("run.dir", str(run_dir)), *change]
    run_ranks(train_and_record_output, 2, overrides, str(store_path), str(tmp_path / "said"))
    text = (tmp_path / "said-0").read_text()
    assert os.strerror(getattr(errno, error)) in text
    assert "training continues without this checkpoint" in text
    assert "warning" not in (tmp_path / "said-1").read_text()
    state = newest_state(run_dir)
    assert all(state[name].equal(tensor) for name, tensor in reference_run.items())
    assert not [name for name in os.listdir(run_dir / "checkpoints") if name.startswith(".tmp")]


def test_last_save_failed_write_is_retried(store_path: Path, tmp_path: Path) -> None:
    change = fault(site="checkpoint.written", rank=1, passing=4, kind="error")
    run_ranks(train_rank, 2, [*STEPS, ("run.dir", str(tmp_path)), *change], str(store_path))
    assert list_checkpoints(tmp_path / "checkpoints")[-1].name == "step-00000008"


def test_train_corrupt_gradients_stop_the_run(store_path: Path, tmp_path: Path) -> None:
    change = fault(site="gradients", rank=1, passing=2, kind="corrupt", factor=1e45)
    overrides = [*STEPS, ("run.dir", str(tmp_path)), ("monitor.log_interval", "1")]
    with pytest.raises(RankError, match="the gradient norm is"):
        run_ranks(train_rank, 2, [*overrides, *change], str(store_path))


def test_prepare_job_impossible_faults_are_refused() -> None:
    with pytest.raises(InvalidConfig) as caught:
        prepare_job("demo", fault(site="checkpoint.renam"))
    assert "checkpoint.rename" in str(caught.value)
    with pytest.raises(InvalidConfig, match="has no tensors for kind flip"):
        prepare_job("demo", fault(site="step", kind="flip"))
    _, _, errors = read_job("demo", fault(site="step", kind="explode", rank=-1))
    assert [error.key for error in errors] == ["resilience.faults"]
    assert "'kill'" in errors[0].rule
