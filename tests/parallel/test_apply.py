"""Every data-parallel layout computes one process's losses and gradients."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from tests.harness import run_ranks
from tests.parallel.sharded import assert_equal
from tests.small import gradients, loader_of, plan_here, small_job, this_rank
from weft.training.setup import build

LAYOUTS = [
    # ranks, replicas, microbatch, packing
    (1, 1, "2", "windows"),
    *(
        pytest.param(*layout, marks=pytest.mark.slow)  # see `COVERED` of tests/layouts.py
        for layout in (
            (2, 1, "2", "documents"),
            (4, 2, "auto", "documents"),
            (2, 1, "auto", "windows"),
            (2, 2, "1", "documents"),
            (4, 1, "1", "documents"),
            (4, 4, "1", "windows"),
        )
    ),
]


@pytest.mark.parametrize(("ranks", "replicas", "microbatch", "packing"), LAYOUTS)
def test_data_parallel_gradients_equal_one_process(
    ranks: int, replicas: int, microbatch: str, packing: str, store_path: Path
) -> None:
    data = [("data.packing", packing)]
    (one,) = run_ranks(gradients, 1, data, str(store_path))
    layout = [("parallel.dp_replicate", str(replicas)), ("train.microbatch_size", microbatch)]
    for many in run_ranks(gradients, ranks, data + layout, str(store_path)):
        assert many["loss"] == pytest.approx(one["loss"], rel=1e-6)
        assert many["norm"] == pytest.approx(one["norm"], rel=1e-5)
        assert_equal(many, one, 1e-5)


def test_grad_norm_is_that_of_all_gradients(store_path: Path) -> None:
    (one,) = run_ranks(gradients, 1, [], str(store_path))
    norm = torch.stack([grad.norm() for grad in one["grads"].values()]).norm()
    assert one["norm"] == pytest.approx(norm.item(), rel=1e-5)


def count_reductions(overrides: list[tuple[str, str]], store: str) -> list[str]:
    """Return the gradient collectives of one global batch."""
    job = small_job(*overrides)
    plan = plan_here(job)
    built = build(plan, this_rank())
    batches = loader_of(job, plan, store, built.mesh).get_microbatches(0)
    with torch.profiler.profile() as profile:
        built.train_step.forward_backward(batches)
    return [
        event.name
        for event in profile.events()
        if event.name in ("gloo:reduce_scatter", "gloo:all_reduce")
        or event.name.startswith(("c10d::_reduce_scatter", "c10d::allreduce_"))
    ]


def test_accumulation_gradients_are_reduced_once(store_path: Path) -> None:
    """Four microbatches communicate as many gradients as one microbatch."""
    (subset, _), (many, _) = (
        run_ranks(count_reductions, 2, [("train.microbatch_size", size)], str(store_path))
        for size in ("4", "1")
    )
    scatters = [name for name in subset if "reduce_scatter" in name]
    assert len(scatters) == 3  # two blocks and the root
    assert sorted(subset) == sorted(many)


def loss_without_targets(overrides: list[tuple[str, str]], store: str) -> float:
    """Return the loss of a batch without targets."""
    job = small_job(*overrides)
    plan = plan_here(job)
    built = build(plan, this_rank())
    batches = loader_of(job, plan, store, built.mesh).get_microbatches(0)
    empty = [
        batch._replace(targets_BT=torch.full_like(batch.targets_BT, -100)) for batch in batches
    ]
    return built.train_step.forward_backward(empty).item()


def test_forward_backward_batch_without_targets_loss_is_zero(store_path: Path) -> None:
    assert run_ranks(loss_without_targets, 2, [], str(store_path)) == [0.0, 0.0]


def train_bfloat16(overrides: list[tuple[str, str]], store: str) -> tuple[float, str, str]:
    job = small_job(("precision.compute_dtype", "bfloat16"), *overrides)
    plan = plan_here(job)
    built = build(plan, this_rank())
    dtypes: list[torch.dtype] = []
    (model,) = built.model_parts
    model.layers["0"].register_forward_hook(lambda *a: dtypes.append(a[2].dtype))
    loss = built.train_step.forward_backward(
        loader_of(job, plan, store, built.mesh).get_microbatches(0)
    )
    dist.all_reduce(loss)
    param = model.norm.weight
    assert isinstance(param, DTensor) == (dist.get_world_size() > 1)
    assert param.grad is not None
    return loss.item(), str(dtypes[0]), str((param.dtype, param.grad.dtype))


@pytest.mark.parametrize("ranks", [1, 2])
def test_bfloat16_computes_low_and_keeps_parameters_in_float32(
    ranks: int, store_path: Path
) -> None:
    (exact,) = run_ranks(gradients, 1, [], str(store_path))
    for loss, compute_dtype, param_dtypes in run_ranks(train_bfloat16, ranks, [], str(store_path)):
        assert compute_dtype == "torch.bfloat16"
        assert param_dtypes == "(torch.float32, torch.float32)"
        assert loss == pytest.approx(exact["loss"], rel=5e-3)
        assert loss != exact["loss"]
