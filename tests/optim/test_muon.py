"""Muon compared with its formula, and sharded compared with one rank."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.harness import run_ranks
from tests.small import full_tensor, newest_state, plan_here, small_job, this_rank, train_rank
from weft.checkpoint.state_dict import trainable_parameters
from weft.config.schema import OptimSection
from weft.optim.muon import _MatrixExchange, build_muon, orthogonalize
from weft.optim.optimizer import masked_step, set_learning_rate
from weft.train.setup import build

MUON = OptimSection(name="muon", lr=0.02, weight_decay=0.1, momentum=0.9)


def test_orthogonal_stack_is_each_of_its_matrices() -> None:
    stack = torch.randn(3, 8, 20)
    expected = torch.stack([orthogonalize(matrix) for matrix in stack])
    torch.testing.assert_close(orthogonalize(stack), expected)
    torch.testing.assert_close(orthogonalize(stack.mT), expected.mT)


@pytest.mark.parametrize("shape", [(16, 48), (48, 16), (24, 40)])
def test_orthogonal_singular_values_become_about_one(shape: tuple[int, int]) -> None:
    matrix = torch.randn(*shape)
    u, _, v = torch.linalg.svd(matrix, full_matrices=False)
    result = orthogonalize(matrix)
    assert result.shape == shape
    values = torch.linalg.svdvals(result)
    assert values.min() > 0.3  # the iteration is least accurate for the smallest value
    assert values.max() < 1.3
    along = torch.diagonal(u.T @ result @ v.T)  # the singular vectors do not change
    torch.testing.assert_close(along.sort().values, values.sort().values, rtol=1e-3, atol=1e-3)
    assert orthogonalize(torch.zeros(shape)).abs().max() == 0


@pytest.mark.parametrize("is_stack", [False, True])
def test_muon_matrices_take_muon_steps_the_rest_adamw(is_stack: bool) -> None:
    shape = (3, 8, 12) if is_stack else (8, 12)
    matrix, table = nn.Parameter(torch.randn(shape)), nn.Parameter(torch.randn(8, 12))
    groups: list[dict[str, Any]] = [
        {"params": [matrix], "weight_decay": 0.1, "matrices": True},
        {"params": [table], "weight_decay": 0.0, "matrices": False},
    ]
    optimizer = build_muon(groups, MUON)
    copy = nn.Parameter(table.detach().clone())
    reference = torch.optim.AdamW([copy], lr=0.02, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)
    expected, momentum = matrix.detach().clone(), torch.zeros(shape)
    for step in range(4):
        lr = 0.02 / (step + 1)
        set_learning_rate(optimizer, lr)
        set_learning_rate(reference, lr)
        matrix.grad, table.grad = torch.randn(shape), torch.randn(8, 12)
        copy.grad = table.grad.clone()
        momentum = 0.9 * momentum + 0.1 * matrix.grad
        update = orthogonalize(0.9 * momentum + 0.1 * matrix.grad)
        expected = expected * (1 - lr * 0.1) - lr * 0.2 * math.sqrt(12) * update
        optimizer.step()
        reference.step()
    torch.testing.assert_close(matrix.detach(), expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(table, copy)


def test_muon_biases_of_experts_are_no_matrices() -> None:
    (groups,) = run_ranks(group_names, 1)
    matrices, others = groups
    assert any(".experts." in name for name in matrices)
    assert all(name.startswith("layers.") and name.endswith("weight") for name in matrices)
    assert any(".experts." in name for name in others)
    assert all("proj.weight" not in name for name in others)


def group_names() -> tuple[set[str], set[str]]:
    built = build(plan_here(small_job(("optim.name", "muon"), *EXPERTS)), this_rank())
    names: tuple[set[str], set[str]] = set(), set()
    for group in built.optimizer.param_groups:
        names[not group["matrices"]].update(group["names"])
    return names


def test_muon_bad_step_changes_no_bit() -> None:
    matrix = nn.Parameter(torch.randn(8, 12))
    optimizer = build_muon([{"params": [matrix], "weight_decay": 0.1, "matrices": True}], MUON)
    matrix.grad = torch.randn(8, 12)
    masked_step(optimizer, torch.tensor(False))
    before = matrix.detach().clone(), optimizer.state[matrix]["momentum_buffer"].clone()
    matrix.grad = torch.full((8, 12), torch.nan)
    masked_step(optimizer, torch.tensor(True))
    assert matrix.equal(before[0])
    assert optimizer.state[matrix]["momentum_buffer"].equal(before[1])


EXPERTS = [
    ("model.kind", "moe"),
    ("model.preset", "toy-moe"),
    ("model.num_layers", "2"),
    ("model.num_experts", "4"),
    ("model.expert_dim", "24"),
    ("model.expert_biases", "true"),
]
LAYOUTS = {
    "FSDP over 3, uneven": (3, [("train.global_batch_size", "6"), ("parallel.dp_shard", "3")]),
    "replicas": (4, [("parallel.dp_replicate", "2"), ("parallel.dp_shard", "2")]),
    "tensor parallel": (2, [("parallel.tp", "2")]),
    "fewer heads than ranks": (4, [("parallel.tp", "4")]),
    "FSDP and tensor parallel": (4, [("parallel.tp", "2"), ("parallel.dp_shard", "2")]),
    "all of them": (
        8,
        [("parallel.tp", "2"), ("parallel.dp_shard", "2"), ("parallel.dp_replicate", "2")],
    ),
    "experts, FSDP over 3": (
        3,
        [*EXPERTS, ("train.global_batch_size", "6"), ("parallel.dp_shard", "3")],
    ),
    "expert parallel": (4, [*EXPERTS, ("parallel.dp_shard", "4"), ("parallel.ep", "2")]),
    "experts, tensor parallel": (
        4,
        [*EXPERTS, ("parallel.dp_shard", "2"), ("parallel.ep", "2"), ("parallel.tp", "2")],
    ),
    "more ranks than experts": (
        4,
        [*EXPERTS, ("model.num_experts", "2"), ("parallel.dp_shard", "4")],
    ),
    "a pipeline": (2, [("parallel.pp", "2")]),
    "FSDP in a pipeline": (4, [("parallel.pp", "2"), ("parallel.dp_shard", "2")]),
}


def update_of(overrides: list[tuple[str, str]]) -> dict[str, Any]:
    """Return this rank's full parameters after two steps with given gradients."""
    job = small_job(("optim.name", "muon"), ("model.tied_embeddings", "false"), *overrides)
    built = build(plan_here(job), this_rank())
    params = dict(trainable_parameters(built.model_parts))
    for seed in (1, 2):
        for name, param in params.items():
            draw = torch.Generator().manual_seed(seed + sum(name.encode()))
            grad = torch.randn(param.shape, generator=draw)
            param.grad = make_param(param, grad)
        built.optimizer.step()
    exchanges: list[_MatrixExchange] = built.optimizer._exchanges  # type: ignore[attr-defined]
    return {
        "params": {name: full_tensor(param).detach().clone() for name, param in params.items()},
        "work": sum(len(exchange.owned) for exchange in exchanges),
        "matrices": sum(len(exchange.params) for exchange in exchanges),
    }


def make_param(param: Any, grad: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard of an unsharded gradient."""
    if not hasattr(param, "placements"):
        return grad
    from weft.parallel.dtensor import shard_offsets

    part = grad
    shape = param.to_local().shape
    for dim, (offset, size) in enumerate(zip(shard_offsets(param), shape, strict=True)):
        part = part.narrow(dim, offset, size)
    return type(param).from_local(
        part.clone(),
        param.device_mesh,
        param.placements,
        run_check=False,
        shape=param.shape,
        stride=param.stride(),
    )


# Slow: other layouts combine the first three, and the last one takes seconds.
RARELY = {
    "all of them",
    "tensor parallel",
    "a pipeline",
    "fewer heads than ranks",
    "experts, FSDP over 3",
    "more ranks than experts",
    "expert parallel",
}


@pytest.mark.parametrize(
    "layout",
    [pytest.param(name, marks=[pytest.mark.slow] if name in RARELY else []) for name in LAYOUTS],
)
def test_muon_layout_takes_the_step_of_one_rank(layout: str) -> None:
    ranks, overrides = LAYOUTS[layout]
    batch = [override for override in overrides if override[0].startswith(("train", "model"))]
    (single,) = run_ranks(update_of, 1, batch)
    many = run_ranks(update_of, ranks, overrides)
    updates_seen = {}
    for rank in many:
        for name, value in rank["params"].items():
            torch.testing.assert_close(value, single["params"][name], rtol=2e-4, atol=2e-6)
            updates_seen[name] = True
    assert updates_seen.keys() == single["params"].keys()
    # The ranks share the work: no rank computes all matrices.
    if "dp_shard" in str(overrides) or "tp" in str(overrides):
        assert all(rank["work"] < rank["matrices"] for rank in many if rank["matrices"])


def test_muon_run_resumes_in_another_layout(tmp_path: Path, store_path: Path) -> None:
    common = [
        ("optim.name", "muon"),
        ("optim.lr", "0.01"),
        ("optim.decay_fraction", "0"),
        ("run.dir", str(tmp_path)),
    ]
    run_ranks(train_rank, 2, [*common, ("train.steps", "6")], str(store_path))
    state = newest_state(tmp_path)
    assert any(name.endswith("_proj.weight.momentum_buffer") for name in state)
    assert any(name.endswith("embed_tokens.weight.exp_avg") for name in state)
    extra = [*common, ("train.steps", "8"), ("parallel.tp", "2"), ("parallel.dp_shard", "1")]
    run_ranks(train_rank, 2, extra, str(store_path))
