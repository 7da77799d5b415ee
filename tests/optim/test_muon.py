"""Muon compared with its formula, and sharded compared with one rank."""

from __future__ import annotations

import functools
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
from weft.optim.matrix_exchange import MatrixExchange
from weft.optim.muon import orthogonalize
from weft.optim.optimizer import build_muon, masked_step, set_learning_rate
from weft.training.setup import build

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


GROUPS = (
    '[{params=["*.v_proj.*", "*gate*"], lr_mult=3, momentum=0.5}, {params=["layers.0.*norm*"], '
    'weight_decay=0.5, beta1=0.3}, {params=["*.o_proj.weight"], optimizer="adamw", lr_mult=0.1}]'
)


def update_of(overrides: list[tuple[str, str]]) -> dict[str, Any]:
    """Return this rank's full parameters after two steps with given gradients."""
    common = [("optim.name", "muon"), ("optim.groups", GROUPS), ("model.tied_embeddings", "false")]
    built = build(plan_here(small_job(*common, *overrides)), this_rank())
    params = dict(trainable_parameters(built.model_parts))
    for seed in (1, 2):
        for name, param in params.items():
            draw = torch.Generator().manual_seed(seed + sum(name.encode()))
            grad = torch.randn(param.shape, generator=draw)
            param.grad = make_param(param, grad)
        set_learning_rate(built.optimizer, 3e-4)
        built.optimizer.step()
    exchanges: list[MatrixExchange] = built.optimizer._exchanges  # type: ignore[attr-defined]
    names = {param: name for name, param in params.items()}
    shared = [exchange for exchange in exchanges if exchange.group is not None]
    return {
        "params": {name: full_tensor(param).detach().clone() for name, param in params.items()},
        "work": [(names[e.params[m.param]], m.item) for e in shared for m in e.parts.owned],
        "matrices": sum(shape[0] for e in shared for shape in e.shapes),
        "numel": sum(math.prod(shape) for e in shared for shape in e.shapes),
        "sent": sum(m.part_numel(e.parts.rank) for e in shared for m in e.parts.sent),
        "pp": built.mesh.coordinates["pp"],
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


def is_rare(layout: str, states: str) -> bool:
    if states == "float32":
        return layout in RARELY
    return (layout, states) != ("FSDP and tensor parallel", "8bit")


@functools.cache
def update_of_one_rank(overrides: tuple[tuple[str, str], ...]) -> dict[str, Any]:
    (result,) = run_ranks(update_of, 1, list(overrides))
    return result


@pytest.mark.parametrize(
    ("layout", "states"),
    [
        pytest.param(name, states, marks=[pytest.mark.slow] if is_rare(name, states) else [])
        for name in LAYOUTS
        for states in ("float32", "bfloat16", "8bit")
    ],
)
def test_muon_layout_takes_the_step_of_one_rank(layout: str, states: str) -> None:
    ranks, overrides = LAYOUTS[layout]
    # Blocks are not cut; else their ranges would differ.
    wide = [("model.dim", "64"), ("model.ffn_dim", "128"), ("model.expert_dim", "64")]
    sizes = [] if states == "float32" else [*wide, ("model.head_dim", "32")]
    if not any(key == "model.expert_dim" for key, _ in overrides):
        sizes = [size for size in sizes if size[0] != "model.expert_dim"]
    overrides = [*overrides, *sizes, ("optim.state_dtype", states)]
    batch = [override for override in overrides if not override[0].startswith("parallel")]
    single = update_of_one_rank(tuple(batch))
    many = run_ranks(update_of, ranks, overrides)
    updates_seen = {}
    for rank in many:
        for name, value in rank["params"].items():
            torch.testing.assert_close(value, single["params"][name], rtol=2e-4, atol=2e-6)
            updates_seen[name] = True
    assert updates_seen.keys() == single["params"].keys()
    # The ranks, also replicas, share the work: each matrix is sent once, and has one owner.
    for stage in {rank["pp"] for rank in many}:
        of_stage = [rank for rank in many if rank["pp"] == stage]
        work = [matrix for rank in of_stage for matrix in rank["work"]]
        assert len(work) == len(set(work)) == of_stage[0]["matrices"]
        assert sum(rank["sent"] for rank in of_stage) == of_stage[0]["numel"]


class Formula:
    """Muon of one matrix from its stored momentum, and AdamW, in float64."""

    def __init__(self, lr: float, decay: float, momentum: float) -> None:
        self.lr, self.decay, self.momentum = lr, decay, momentum

    def step(
        self, param: torch.Tensor, grad: torch.Tensor, stored: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the new parameter, and the momentum before rounding."""
        momentum = self.momentum * stored.double() + (1 - self.momentum) * grad.double()
        nesterov = self.momentum * momentum + (1 - self.momentum) * grad.double()
        update = 0.2 * math.sqrt(max(param.shape[-2:])) * orthogonalize(nesterov)
        return param.double() * (1 - self.lr * self.decay) - self.lr * update, momentum


@pytest.mark.parametrize("states", ["bfloat16", "8bit"])
def test_muon_low_precision_step_is_the_formula_with_a_rounded_momentum(states: str) -> None:
    """Random shapes, stacks, rates, decays, clipping and skipped steps."""
    for seed in range(6):
        draw = torch.Generator().manual_seed(seed)
        rows, columns = (int(n) for n in torch.randint(4, 70, (2,), generator=draw))
        shape = (3, rows, columns) if seed % 2 else (rows, columns)
        lr, decay, momentum = (float(x) for x in 0.9 * torch.rand(3, generator=draw))
        param = nn.Parameter(torch.randn(shape, generator=draw))
        group = {"params": [param], "names": ["w"], "weight_decay": decay, "matrices": True}
        section = OptimSection(name="muon", lr=lr, momentum=momentum, state_dtype=states)
        optimizer: Any = build_muon([group], section)
        formula, stored = Formula(lr, decay, momentum), torch.zeros(shape)
        for step in range(5):
            before = param.detach().clone()
            grad = torch.randn(shape, generator=draw) * 10.0 ** (step - 2)
            param.grad = 4.0 * grad
            masked_step(optimizer, torch.tensor(step == 2), torch.tensor(4.0))
            buffer = optimizer.state[param]["momentum_buffer"]
            now = buffer.float() if states == "bfloat16" else buffer.dequantize()
            if step == 2:
                assert param.equal(before)
                assert now.equal(stored)
                continue
            expected, exact = formula.step(before, grad, stored)
            torch.testing.assert_close(param.double(), expected, rtol=2e-3, atol=2e-4 * lr)
            near = 2**-7 * exact.abs() if states == "bfloat16" else 0.026 * exact.abs().amax()
            assert ((now - exact).abs() <= near).all()
            assert not now.equal(exact.float())
            stored = now.clone()


def test_muon_low_precision_momentum_rounds_by_a_hash_of_name_and_step() -> None:
    """Two names round differently, the same name alike; the mean is unbiased."""
    grad, stored = torch.full((64, 64), 1.001), {}
    for name in ("a", "a", "b"):
        param = nn.Parameter(torch.zeros(64, 64))
        group = {"params": [param], "names": [name], "weight_decay": 0.0, "matrices": True}
        optimizer: Any = build_muon(
            [group], OptimSection(name="muon", momentum=0.0, state_dtype="bfloat16")
        )
        param.grad = grad
        optimizer.step()
        value = optimizer.state[param]["momentum_buffer"].float()
        assert value.equal(stored.setdefault(name, value))
        assert value.mean().item() == pytest.approx(1.001, rel=1e-4)
    assert not stored["a"].equal(stored["b"])


@pytest.mark.parametrize("states", ["8bit", pytest.param("float32", marks=pytest.mark.slow)])
def test_muon_run_resumes_in_another_layout(states: str, tmp_path: Path, store_path: Path) -> None:
    common = [
        ("optim.name", "muon"),
        ("optim.lr", "0.01"),
        ("optim.groups", GROUPS),
        ("optim.decay_fraction", "0"),
        ("run.dir", str(tmp_path)),
    ]
    first = [*common, ("train.steps", "6"), ("optim.state_dtype", states)]
    run_ranks(train_rank, 2, first, str(store_path))
    state = newest_state(tmp_path)
    assert any(name.endswith("q_proj.weight.momentum_buffer") for name in state)
    assert any(name.endswith("embed_tokens.weight.exp_avg") for name in state)
    assert any(name.endswith("o_proj.weight.exp_avg") for name in state)
    extra = [*common, ("train.steps", "8"), ("parallel.tp", "2"), ("parallel.dp_shard", "1")]
    other = "float32" if states == "8bit" else "bfloat16"
    run_ranks(train_rank, 2, [*extra, ("optim.state_dtype", other)], str(store_path))
    saved = {value.dtype for name, value in newest_state(tmp_path).items() if "_buffer" in name}
    assert saved == {getattr(torch, other)}
