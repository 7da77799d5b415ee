"""debug.deterministic refuses nondeterministic operators; runs are equal bit for bit."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from tests.harness import run_ranks
from tests.layouts import parse
from tests.small import Overrides, losses, train_rank
from weft.training.setup import enable_determinism


def put(deterministic: bool) -> str:
    """Write to an element twice, which depends on the order; return the error."""
    if deterministic:
        enable_determinism()
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
        assert not torch.utils.deterministic.fill_uninitialized_memory
    try:
        torch.zeros(3).put_(torch.tensor([0, 0]), torch.ones(2))
    except RuntimeError as error:
        return str(error)
    return ""


def test_deterministic_operator_without_order_is_refused() -> None:
    assert run_ranks(put, 1, False) == [""]
    assert "does not have a deterministic implementation" in run_ranks(put, 1, True)[0]


def train_twice(overrides: Overrides, store: str, directory: str) -> None:
    enable_determinism()
    for name in ("a", "b"):
        train_rank([*overrides, ("run.dir", f"{directory}/{name}")], store)


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [
        "dp_shard2 tp2 activation_checkpoint.mode=selective",
        "pp2 pipeline.schedule=ZBVZeroBubble model.tied_embeddings=false model.num_layers=4",
        "cp2 cp_method=ulysses optim.name=muon",
    ],
)
def test_deterministic_two_runs_are_equal_bit_for_bit(
    layout: str, store_path: Path, tmp_path: Path
) -> None:
    ranks, overrides = parse(
        f"{layout} data.packing=documents train.steps=4 train.microbatch_size=1"
    )
    run_ranks(train_twice, ranks, overrides, str(store_path), str(tmp_path))
    assert losses(tmp_path / "a") == losses(tmp_path / "b")
