"""Layer gradient norms are equal in every layout, and add up to the total norm."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from tests.harness import run_ranks
from tests.small import Overrides, records, train_rank, values_under

LAYOUTS: dict[str, tuple[int, Overrides]] = {
    "one": (1, []),
    "shard": (2, []),
    "replicate": (2, [("parallel.dp_replicate", "2")]),
    "hsdp": (4, [("parallel.dp_replicate", "2")]),
    "tp": (2, [("parallel.tp", "2")]),
    "tp and shard": (4, [("parallel.tp", "2")]),
    "pp": (2, [("parallel.pp", "2"), ("train.microbatch_size", "2")]),
    "cp": (2, [("parallel.cp", "2")]),
    "canonical": (2, [("train.world_size_invariant", "true"), ("train.microbatch_size", "1")]),
}

# Other layouts have the same axes.
CONTAINED = ("shard", "hsdp", "tp")


def norms(layout: str, store: Path, directory: Path) -> list[dict[str, float]]:
    ranks, overrides = LAYOUTS[layout]
    job: Overrides = [
        ("run.dir", str(directory)),
        ("train.steps", "4"),
        ("monitor.layer_grad_norms", "true"),
        ("monitor.log_interval", "2"),
        ("model.tied_embeddings", "false"),
        *overrides,
    ]
    run_ranks(train_rank, ranks, job, str(store))
    rows = records(directory)
    assert [record["step"] for record in rows] == [1, 2, 4]
    for record in rows:
        full = math.sqrt(sum(norm**2 for norm in values_under(record, "grad_norm").values()))
        assert full == pytest.approx(record["grad_norm"], rel=1e-5)
    return [values_under(record, "grad_norm") for record in rows]


@pytest.fixture(scope="module")
def one_rank_norms(
    store_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, float]]:
    return norms("one", store_path, tmp_path_factory.mktemp("one"))


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(name, marks=[pytest.mark.slow] if name in CONTAINED else [])
        for name in LAYOUTS
        if name != "one"
    ],
)
def test_every_layout_has_the_same_norms(
    layout: str, one_rank_norms: list[dict[str, float]], store_path: Path, tmp_path: Path
) -> None:
    assert list(one_rank_norms[0]) == ["embed_tokens", "layers.0", "layers.1", "norm", "lm_head"]
    for ours, theirs in zip(norms(layout, store_path, tmp_path), one_rank_norms, strict=True):
        assert list(ours) == list(theirs)
        for name, norm in theirs.items():
            assert ours[name] == pytest.approx(norm, rel=1e-4), name
