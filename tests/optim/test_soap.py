"""SOAP compared with its formula, and sharded compared with one rank."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.harness import run_ranks
from tests.optim.test_muon import EXPERTS, LAYOUTS, RARELY, make_param
from tests.small import (
    full_tensor,
    losses,
    newest_state,
    plan_here,
    small_job,
    this_rank,
    train_rank,
)
from weft.checkpoint.state_dict import optimizer_state, trainable_parameters
from weft.config.schema import OptimSection
from weft.optim.optimizer import build_soap, masked_step, set_learning_rate
from weft.optim.soap import DAMPING, FLAT_STATE, SQUARE
from weft.planning.lora_plan import plan_cost
from weft.planning.sharding import soap_bytes_per_param
from weft.training.setup import build


class Formula:
    """SOAP of one matrix in float64: arXiv:2409.11321, algorithm 3, from the identity."""

    def __init__(self, param: Tensor, section: OptimSection) -> None:
        self.param, self.section, self.step_number = param.double(), section, 0
        self.momentum = torch.zeros_like(self.param)
        self.square = torch.zeros_like(self.param)
        self.rows, self.columns = (torch.eye(n, dtype=torch.float64) for n in param.shape)
        self.row_mean, self.column_mean = (0 * basis for basis in (self.rows, self.columns))

    def step(self, grad: Tensor) -> None:
        """Do a step in place."""
        section, grad = self.section, grad.double()
        self.step_number += 1
        self.momentum = section.beta1 * self.momentum + (1 - section.beta1) * grad
        turned = self.rows.T @ grad @ self.columns
        self.square = section.beta2 * self.square + (1 - section.beta2) * turned**2
        first = self.rows.T @ self.momentum @ self.columns / (1 - section.beta1**self.step_number)
        root = (self.square / (1 - section.beta2**self.step_number)).sqrt()
        update = self.rows @ (first / (root + section.eps)) @ self.columns.T
        self.param = self.param * (1 - section.lr * section.weight_decay) - section.lr * update
        self.row_mean = section.beta2 * self.row_mean + (1 - section.beta2) * grad @ grad.T
        self.column_mean = section.beta2 * self.column_mean + (1 - section.beta2) * grad.T @ grad
        if (self.step_number - 1) % section.precondition_interval == 0:
            if len(self.rows) <= section.max_precondition_dim:
                self.rows = self.renew(self.row_mean, self.rows)
            if len(self.columns) <= section.max_precondition_dim:
                self.columns = self.renew(self.column_mean, self.columns)

    @staticmethod
    def renew(mean: Tensor, basis: Tensor) -> Tensor:
        """Return the orthogonal factor of a damped mean times a basis, by Gram-Schmidt."""
        damped = mean + DAMPING * mean.trace() / len(mean) * torch.eye(len(mean)).double()
        columns: list[Tensor] = []
        for column in (damped @ basis).T:
            for _ in range(2):
                for other in columns:
                    column = column - (other @ column) * other
            columns.append(column / column.norm())
        return torch.stack(columns, 1)


@pytest.mark.parametrize("seed", range(6))
def test_soap_step_is_the_formula(seed: int) -> None:
    """Random shapes, stacks, rates, intervals, limits, clipping and skipped steps."""
    draw = torch.Generator().manual_seed(seed)
    rows, columns, interval = (int(n) for n in torch.randint(3, 20, (3,), generator=draw))
    lr, decay, beta1, beta2 = (float(x) for x in 0.9 * torch.rand(4, generator=draw))
    section = OptimSection(
        name="soap",
        lr=lr,
        weight_decay=decay,
        beta1=beta1,
        beta2=beta2,
        precondition_interval=interval % 4 + 1,
        max_precondition_dim=(10000, 12)[seed % 2],
    )
    num_items = 3 if seed % 3 == 0 else 1
    shape = (num_items, rows, columns)
    param = nn.Parameter(torch.randn(shape if num_items > 1 else shape[1:], generator=draw))
    group = {"params": [param], "names": ["w"], "weight_decay": decay, "matrices": True}
    optimizer: Any = build_soap([group], section)
    formulas = [Formula(item, section) for item in param.detach().reshape(shape)]
    for step in range(10):
        grad = torch.randn(shape, generator=draw) * torch.logspace(-1, 1, columns)
        param.grad = 4.0 * grad.view_as(param)
        before = {k: v.clone() for k, v in optimizer.state[param].items()} | {"": param.clone()}
        masked_step(optimizer, torch.tensor(step in (0, 3)), torch.tensor(4.0))
        if step in (0, 3):
            after = {**optimizer.state[param], "": param}
            assert all(value.equal(before[key]) for key, value in after.items() if key in before)
            continue
        for formula, item in zip(formulas, grad, strict=True):
            formula.step(item)
        expected = torch.stack([formula.param for formula in formulas]).view_as(param)
        torch.testing.assert_close(param.detach().double(), expected, rtol=1e-4, atol=1e-2 * lr)


def test_soap_is_faster_than_adamw_where_directions_are_rotated() -> None:
    """A quadratic whose axes are no coordinates, and noise of the size of its curvature."""
    last = {}
    for is_soap in (True, False):
        draw = torch.Generator().manual_seed(0)
        left, right = (torch.linalg.qr(torch.randn(24, 24, generator=draw)).Q for _ in range(2))
        curvature = torch.logspace(-2, 2, 24).unsqueeze(1) * torch.logspace(-1, 1, 24)
        param = nn.Parameter(left @ torch.randn(24, 24, generator=draw) @ right.T)
        group = {"params": [param], "names": ["w"], "weight_decay": 0.0, "matrices": is_soap}
        optimizer: Any = build_soap([group], OptimSection(name="soap", lr=0.03))
        for step in range(300):
            set_learning_rate(optimizer, 0.03 * (1 - step / 300))
            distance = left.T @ param.detach() @ right
            last[is_soap] = float((curvature * distance**2).sum())
            noise = curvature.sqrt() * torch.randn(24, 24, generator=draw)
            param.grad = left @ (curvature * distance + noise) @ right.T
            optimizer.step()
    assert last[True] < 0.6 * last[False]


def state_after_steps(overrides: list[tuple[str, str]]) -> dict[str, Any]:
    """Return this rank's full parameters and state after four steps with given gradients."""
    common = [
        ("optim.name", "soap"),
        ("optim.precondition_interval", "2"),
        ("optim.max_precondition_dim", "40"),
        ("optim.groups", '[{params=["*.o_proj.weight"], optimizer="adamw"}]'),
        ("model.tied_embeddings", "false"),
    ]
    built = build(plan_here(small_job(*common, *overrides)), this_rank())
    params = dict(trainable_parameters(built.model_parts))
    for seed in (1, 2, 3, 4):
        for name, param in params.items():
            draw = torch.Generator().manual_seed(seed + sum(name.encode()))
            param.grad = make_param(param, torch.randn(param.shape, generator=draw))
        set_learning_rate(built.optimizer, 3e-4)
        built.optimizer.step()
    state = optimizer_state(built.model_parts, built.optimizer)
    flat = {name: value for name, value in state.items() if name.endswith(FLAT_STATE)}
    return {
        "params": {name: full_tensor(param).detach().clone() for name, param in params.items()},
        "state": {name: full_tensor(value).clone() for name, value in state.items()},
        "held": sum(getattr(each, "_local_tensor", each).numel() for each in flat.values()),
        "numel": sum(each.numel() for each in flat.values()),
    }


AS_MUON = {"replicas", "FSDP in a pipeline"}


@functools.cache
def state_of_one_rank(overrides: tuple[tuple[str, str], ...]) -> dict[str, Any]:
    (result,) = run_ranks(state_after_steps, 1, list(overrides))
    return result


@pytest.mark.parametrize(
    "layout",
    [
        # Muon's tests of these layouts have the same exchange of matrices.
        pytest.param(name, marks=[pytest.mark.slow] if name in {*RARELY, *AS_MUON} else [])
        for name in LAYOUTS
    ],
)
def test_soap_layout_takes_the_steps_of_one_rank(layout: str) -> None:
    ranks, overrides = LAYOUTS[layout]
    batch = [override for override in overrides if not override[0].startswith("parallel")]
    single = state_of_one_rank(tuple(batch))
    many = run_ranks(state_after_steps, ranks, overrides)
    seen: dict[str, set[str]] = {"params": set(), "state": set()}
    for rank in many:
        for kind, names in seen.items():
            for name, value in rank[kind].items():
                torch.testing.assert_close(value, single[kind][name], rtol=1e-3, atol=1e-5)
                names.add(name)
    for kind, names in seen.items():
        assert names == single[kind].keys()
    # The flat state of a matrix is spread over the ranks that hold it.
    replicas = int(dict(overrides).get("parallel.dp_replicate", 1))
    shares = 1 if "pipeline" in layout else ranks // replicas
    if shares > 1 and not any(word in layout for word in ("expert", "fewer heads")):
        assert max(rank["held"] for rank in many) < 1.1 * single["numel"] / shares


@pytest.mark.parametrize("model", [[], EXPERTS])
def test_planned_bytes_of_the_state_are_those_of_a_run(model: list[tuple[str, str]]) -> None:
    keys = [("optim.name", "soap"), ("optim.max_precondition_dim", "40"), *model]
    ((held, planned),) = run_ranks(state_of_matrices, 1, keys)
    # Routers are small, and no matrices of the plan's costs; the trace has them.
    assert held == pytest.approx(planned, rel=0.05 if model else 1e-6)


def state_of_matrices(keys: list[tuple[str, str]]) -> tuple[float, float]:
    """Return the bytes of flat state per element of the matrices, held and planned."""
    plan = plan_here(small_job(*keys))
    built = build(plan, this_rank())
    for _, param in trainable_parameters(built.model_parts):
        param.grad = torch.zeros_like(param)
    built.optimizer.step()
    states = {p: s for p, s in built.optimizer.state.items() if FLAT_STATE[0] in s}
    num_bytes = sum(4 * state[key].numel() for state in states.values() for key in FLAT_STATE)
    held = num_bytes / sum(param.numel() for param in states)
    return held, soap_bytes_per_param(plan.job.optim, plan_cost(plan))


def test_soap_run_resumes_in_another_layout(tmp_path: Path, store_path: Path) -> None:
    common = [
        ("optim.name", "soap"),
        ("optim.lr", "0.003"),
        ("optim.precondition_interval", "2"),
        ("optim.decay_fraction", "0"),
    ]
    for directory, first in (("once", "4"), ("twice", "3")):
        run = [*common, ("run.dir", str(tmp_path / directory)), ("train.steps", first)]
        run_ranks(train_rank, 2, run, str(store_path))
    state = newest_state(tmp_path / "twice")
    assert any(name.endswith(f"q_proj.weight.{SQUARE}") for name in state)
    assert any(name.endswith("embed_tokens.weight.exp_avg") for name in state)
    again = [*common, ("run.dir", str(tmp_path / "twice")), ("train.steps", "4")]
    layout = [("parallel.tp", "2"), ("parallel.dp_shard", "1")]
    run_ranks(train_rank, 2, [*again, *layout], str(store_path))
    assert losses(tmp_path / "twice") == pytest.approx(losses(tmp_path / "once"), rel=1e-4)
    once, twice = (newest_state(tmp_path / each) for each in ("once", "twice"))
    assert once.keys() == twice.keys()
    for name, value in once.items():
        torch.testing.assert_close(twice[name], value, rtol=1e-2, atol=1e-3)
