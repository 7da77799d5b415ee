"""Runs whose documents the kernel for many lengths computes equal those with a mask."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.flash_reference import use_flash_reference
from tests.harness import run_ranks
from tests.layouts import parse
from tests.small import Overrides, records, train_rank
from tests.training.test_layouts import MODEL

LIMITS: Overrides = [("model.sliding_window", "5"), ("model.layer_pattern", "LG")]


def train_varlen(overrides: Overrides, store: str) -> dict[str, int]:
    """Train a rank; return the calls of the kernel."""
    reference = use_flash_reference()
    train_rank(overrides, store)
    return reference.calls


def results(directory: Path) -> list[tuple[float, ...]]:
    return [(r["loss"], r["grad_norm"], r.get("eval_loss", 0.0)) for r in records(directory)]


@pytest.fixture(scope="module")
def masked(store_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("masked")
    run_ranks(train_rank, 1, MODEL + LIMITS + [("run.dir", str(directory))], str(store_path))
    return directory


@pytest.mark.parametrize(
    "layout",
    [
        "",
        "cp2 cp_method=ulysses",
        "cp2",
        pytest.param("cp2 cp_method=ulysses tp2", marks=pytest.mark.slow),
        pytest.param("cp2 cp_method=allgather cp_load_balance=documents", marks=pytest.mark.slow),
        pytest.param("pp2", marks=pytest.mark.slow),
        pytest.param("dp_shard2 activation_checkpoint.mode=full", marks=pytest.mark.slow),
    ],
)
def test_run_with_varlen_attention_equals_one_with_a_mask(
    layout: str, masked: Path, store_path: Path, tmp_path: Path
) -> None:
    ranks, overrides = parse(layout)
    overrides = MODEL + LIMITS + overrides + [("run.dir", str(tmp_path))]
    calls = run_ranks(train_varlen, ranks, overrides, str(store_path), timeout=180)
    assert all(count["forward"] > count["backward"] > 0 for count in calls)  # an evaluation
    for ours, theirs in zip(results(tmp_path), results(masked), strict=True):
        assert ours == pytest.approx(theirs, rel=2e-5)
