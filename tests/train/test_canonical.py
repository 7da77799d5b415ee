"""World-size-invariant training: the same bits on any number of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.harness import run_ranks
from tests.small import Overrides, gradients, losses, newest_state, small_job, train_rank
from weft.config.errors import InvalidConfig
from weft.plan.plan import Machine
from weft.plan.resolve import resolve

STEPS: Overrides = [
    ("train.steps", "4"),
    ("train.global_batch_size", "12"),
    ("train.world_size_invariant", "true"),
    ("monitor.log_interval", "1"),
]


@pytest.fixture(scope="module")
def one_rank_run(store_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("alone")
    run_ranks(train_rank, 1, [*STEPS, ("run.dir", str(directory))], str(store_path))
    return directory


@pytest.mark.parametrize(
    ("ranks", "extra"),
    [
        pytest.param(2, [], marks=pytest.mark.slow),
        (3, [("data.packing", "windows")]),
        (4, [("parallel.dp_replicate", "2")]),
        pytest.param(6, [("parallel.dp_replicate", "6")], marks=pytest.mark.slow),
    ],
)
def test_canonical_any_number_of_ranks_gives_the_same_bits(
    ranks: int, extra: Overrides, store_path: Path, tmp_path: Path, one_rank_run: Path
) -> None:
    overrides = [*STEPS, ("run.dir", str(tmp_path)), *extra]
    run_ranks(train_rank, ranks, overrides, str(store_path))
    expected, state = newest_state(one_rank_run), newest_state(tmp_path)
    assert expected.keys() == state.keys()
    assert all(state[name].equal(tensor) for name, tensor in expected.items())
    assert losses(tmp_path) == losses(one_rank_run)


def test_canonical_gradients_equal_usual_order_to_rounding(store_path: Path) -> None:
    """Gradients differ in some bits, else the mode would be useless."""
    (usual,) = run_ranks(gradients, 1, [STEPS[1]], str(store_path))
    (ordered,) = run_ranks(gradients, 1, STEPS[1:3], str(store_path))
    assert ordered["loss"] == pytest.approx(usual["loss"], rel=1e-6)
    assert ordered["norm"] == pytest.approx(usual["norm"], rel=1e-5)
    for name, grad in usual["grads"].items():
        torch.testing.assert_close(ordered["grads"][name], grad, rtol=1e-4, atol=1e-7)
    assert any(not ordered["grads"][name].equal(grad) for name, grad in usual["grads"].items())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("parallel.tp", "2"), "Use parallel.tp=1"),
        (("parallel.pp", "2"), "Use parallel.pp=1"),
        (("precision.compute_dtype", "bfloat16"), "Use precision.compute_dtype=float32"),
        (("parallel.cpu_offload", "true"), "Use parallel.cpu_offload=false"),
        (("train.microbatch_size", "3"), "must be 1 with train.world_size_invariant"),
    ],
)
def test_canonical_unsupported_keys_are_refused(change: tuple[str, str], message: str) -> None:
    job: Any = small_job(*STEPS, ("run.dir", "/nonexistent"), change)
    with pytest.raises(InvalidConfig, match=message):
        resolve(job, Machine("cpu", devices=2, world_size=4))
