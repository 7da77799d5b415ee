"""A fault at every site of a save, on either rank: nothing is lost, and nothing is left."""

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
from weft.checkpoint.manifest import checkpoint_step, checkpoints
from weft.data.text import open_text
from weft.job import InvalidJob, read_job
from weft.resilience.faults import SITES
from weft.train.check import prepare_job
from weft.train.loop import train

# Two checkpoints are kept, so the third save deletes one.
STEPS: Overrides = [("train.steps", "8"), ("checkpoint.interval", "2")]
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
def undisturbed(store_path: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("undisturbed")
    run_ranks(train_rank, 2, [*STEPS, ("run.dir", str(folder))], str(store_path))
    return newest_state(folder)


def check_end(folder: Path, undisturbed: dict[str, torch.Tensor]) -> None:
    state = newest_state(folder)
    assert all(state[name].equal(tensor) for name, tensor in undisturbed.items())
    names = sorted(os.listdir(folder / "checkpoints"))
    assert [name for name in names if not name.startswith("lease-")] == [
        "step-00000006",
        "step-00000008",
    ]


@pytest.mark.parametrize("background", ["true", pytest.param("false", marks=pytest.mark.slow)])
@pytest.mark.parametrize(("site", "rank"), PLACES)
def test_killed_while_saving(
    site: str,
    rank: int,
    background: str,
    store_path: Path,
    tmp_path: Path,
    undisturbed: dict[str, Any],
) -> None:
    # The third save is the first one with something to delete.
    passing = 1 if "delet" in site else 3
    overrides = [
        *STEPS,
        ("run.dir", str(tmp_path)),
        ("checkpoint.background", background),
        *fault(site=site, rank=rank, passing=passing),
    ]
    with pytest.raises(RankError, match=f"rank {rank} of 2 .*SIGKILL"):
        run_ranks(train_rank, 2, overrides, str(store_path))
    # Step 4 had been committed; step 6 is there as soon as it is visible.
    newest = checkpoint_step(checkpoints(tmp_path / "checkpoints")[-1])
    seen = ["checkpoint.renamed", "checkpoint.delete", "checkpoint.deleting", "checkpoint.saved"]
    assert newest == (6 if site in seen else 4)
    run_ranks(train_rank, 2, overrides, str(store_path))
    check_end(tmp_path, undisturbed)


def train_and_listen(overrides: Overrides, store: str, said: str) -> None:
    """What is shown goes to a file."""
    job = small_job(*overrides)
    with open(f"{said}-{this_rank().rank}", "w", encoding="utf-8") as file:
        console = Console(file=file, width=10_000)
        train(job, plan_here(job), open_text(Path(store)), this_rank(), console)


@pytest.mark.parametrize(
    ("site", "rank", "error"),
    [
        *((s, rank, "ENOSPC") for s, rank in PLACES if s not in ("checkpoint", "checkpoint.saved")),
        ("checkpoint.written", 1, "EIO"),
        ("checkpoint.rename", 0, "EDQUOT"),
    ],
)
def test_a_save_that_fails_is_told_and_the_run_goes_on(
    site: str, rank: int, error: str, store_path: Path, tmp_path: Path, undisturbed: dict[str, Any]
) -> None:
    passing = 1 if "delet" in site else 3
    change = fault(site=site, rank=rank, passing=passing, kind="error", error=error)
    folder = tmp_path / "run"
    overrides = [*STEPS, ("run.dir", str(folder)), *change]
    run_ranks(train_and_listen, 2, overrides, str(store_path), str(tmp_path / "said"))
    said = (tmp_path / "said-0").read_text()
    assert os.strerror(getattr(errno, error)) in said
    assert "going on without it" in said
    assert "warning" not in (tmp_path / "said-1").read_text()
    state = newest_state(folder)
    assert all(state[name].equal(tensor) for name, tensor in undisturbed.items())
    assert not [name for name in os.listdir(folder / "checkpoints") if name.startswith(".tmp")]


def test_last_save_one_failed_write_is_tried_again(store_path: Path, tmp_path: Path) -> None:
    change = fault(site="checkpoint.written", rank=1, passing=4, kind="error")
    run_ranks(train_rank, 2, [*STEPS, ("run.dir", str(tmp_path)), *change], str(store_path))
    assert checkpoints(tmp_path / "checkpoints")[-1].name == "step-00000008"


def test_corrupt_gradients_are_noticed(store_path: Path, tmp_path: Path) -> None:
    change = fault(site="gradients", rank=1, passing=2, kind="corrupt", factor=1e45)
    overrides = [*STEPS, ("run.dir", str(tmp_path)), ("observe.log_interval", "1")]
    with pytest.raises(RankError, match="the gradient norm is"):
        run_ranks(train_rank, 2, [*overrides, *change], str(store_path))


def test_a_mistake_in_a_fault() -> None:
    with pytest.raises(InvalidJob) as caught:
        prepare_job("demo", fault(site="checkpoint.renam"))
    assert "checkpoint.rename" in str(caught.value)
    with pytest.raises(InvalidJob, match="has no tensors for a fault of kind flip"):
        prepare_job("demo", fault(site="step", kind="flip"))
    _, _, problems = read_job("demo", fault(site="step", kind="explode", rank=-1))
    assert [problem.key for problem in problems] == ["resilience.faults"]
    assert "'kill'" in problems[0].rule
