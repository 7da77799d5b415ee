"""AdamW with moments of two bytes or one: against AdamW, over steps, checkpoints and layouts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.harness import run_ranks
from tests.small import newest_state, small_job, train_rank
from weft.job import InvalidJob, OptimSection
from weft.optim.lean import LeanAdamW, round_by
from weft.optim.optimizer import adamw, step_unless
from weft.plan.resolve import Machine, resolve

STATES = ("bfloat16", "8bit")


def optimizer_of(states: str, param: nn.Parameter, beta2: float = 0.95) -> Any:
    section = OptimSection(lr=1e-2, beta2=beta2, states=states)
    return adamw([{"params": [param], "weight_decay": 0.1, "matrices": True}], section)


def trained(states: str, steps: int, beta2: float = 0.95) -> tuple[nn.Parameter, Any]:
    """After some steps towards a target, with noise."""
    draw = torch.Generator().manual_seed(0)
    param = nn.Parameter(torch.randn(64, 128, generator=draw))
    target = torch.randn(64, 128, generator=draw)
    optimizer = optimizer_of(states, param, beta2)
    for _ in range(steps):
        param.grad = (param - target).detach() + 0.1 * torch.randn(64, 128, generator=draw)
        optimizer.step()
    return param, optimizer


@pytest.mark.parametrize("states", STATES)
def test_it_is_adamw_but_for_rounding(states: str) -> None:
    plain, _ = trained("float32", 30)
    lean, optimizer = trained(states, 30)
    assert isinstance(optimizer, LeanAdamW)
    start = torch.randn(64, 128, generator=torch.Generator().manual_seed(0))
    moved = (plain - start).norm()
    assert 0 < (lean - plain).norm() < (0.01 if states == "bfloat16" else 0.05) * moved


def test_moments_are_small() -> None:
    for states, size in (("bfloat16", 2.0), ("8bit", 1.0)):
        param, optimizer = trained(states, 1)
        state = optimizer.state[param]
        for key in ("exp_avg", "exp_avg_sq"):
            held = getattr(state[key], "codes", state[key])
            assert held.element_size() == size
            assert held.shape == param.shape


def test_rounding_by_chance_is_right_on_average() -> None:
    values = torch.randn(100) * 10.0 ** torch.randint(-20, 20, (100,))
    chance = torch.arange(0, 1 << 16, 16, dtype=torch.int32)
    mean = round_by(values[:, None].expand(-1, len(chance)).contiguous(), chance).double().mean(1)
    torch.testing.assert_close(mean, values.double(), rtol=2e-6, atol=0)
    exact = torch.tensor([0.0, -0.0, 1.5, -3.0, torch.inf, -torch.inf, torch.nan])
    kept = round_by(exact, torch.full((7,), 0xFFFF, dtype=torch.int32))
    every_bit = torch.tensor([2**31 - 1, -1], dtype=torch.int32)  # as CUDA writes NaN
    chance = torch.full((2,), 0xFFFF, dtype=torch.int32)
    assert round_by(every_bit.view(torch.float32), chance).isnan().all()
    assert kept.float().view(torch.int32).equal(exact.bfloat16().float().view(torch.int32))


def test_nearest_rounding_would_not_forget() -> None:
    """The reason for rounding by chance: large gradients long ago, small ones ever since."""
    param = nn.Parameter(torch.zeros(4096))
    optimizer = optimizer_of("bfloat16", param, beta2=0.999)
    nearest = torch.tensor(0.0, dtype=torch.bfloat16)
    exact = 0.0
    for step in range(3000):
        grad = 1.0 if step < 100 else 0.0
        param.grad = torch.full((4096,), grad)
        optimizer.step()
        nearest = (nearest.float() * 0.999 + grad * 0.001).bfloat16()
        exact = exact * 0.999 + grad * 0.001
    mean = optimizer.state[param]["exp_avg_sq"].float().mean().item()
    assert mean == pytest.approx(exact, rel=0.02)
    assert nearest.item() > 5 * exact


@pytest.mark.parametrize("states", STATES)
def test_a_bad_step_changes_no_bit(states: str) -> None:
    param, optimizer = trained(states, 3)

    def everything() -> list[Tensor]:
        state = optimizer.state[param]
        held = [
            getattr(value, part, None) for value in state.values() for part in ("codes", "scale")
        ]
        plain = [value for value in state.values() if not hasattr(value, "codes")]
        return [each.clone() for each in (param.detach(), *held, *plain) if each is not None]

    before = everything()
    param.grad = torch.full_like(param, torch.nan)
    step_unless(optimizer, torch.tensor(True))
    assert all(a.equal(b) for a, b in zip(everything(), before, strict=True))
    param.grad = torch.ones_like(param)
    step_unless(optimizer, torch.tensor(False))
    assert not param.equal(before[0])


@pytest.mark.parametrize("states", STATES)
def test_a_run_goes_on_from_its_checkpoint_bit_for_bit(
    states: str, tmp_path: Path, store_path: Path
) -> None:
    overrides = [
        ("optim.states", states),
        ("optim.decay_fraction", "0"),  # or the rate would hang on the number of steps
        ("model.dim", "64"),
        ("model.ffn_dim", "128"),
    ]

    def run(folder: Path, steps: int, ranks: int = 2) -> dict[str, Tensor]:
        here = [*overrides, ("train.steps", str(steps)), ("run.dir", str(folder))]
        run_ranks(train_rank, ranks, here, str(store_path))
        return newest_state(folder)

    whole = run(tmp_path / "whole", 6)
    run(tmp_path / "parts", 3)
    parts = run(tmp_path / "parts", 6)
    assert all(parts[name].equal(value) for name, value in whole.items())
    moments = [value for name, value in whole.items() if "exp_avg" in name]
    saved = torch.bfloat16 if states == "bfloat16" else torch.float32
    assert all(moment.dtype == saved for moment in moments)
    run(tmp_path / "parts", 8, ranks=1)  # and in another layout


def test_what_it_cannot_do_is_refused() -> None:
    job = small_job(("optim.states", "8bit"), ("optim.kind", "muon"))
    with pytest.raises(InvalidJob, match=r"optim.states = \"8bit\": is for adamw, not muon"):
        resolve(job, Machine("cpu", devices=2, world_size=1))


@pytest.mark.slow
@pytest.mark.parametrize("states", STATES)
def test_compiled_it_does_the_same(states: str) -> None:
    from weft.optim import lean

    plain, of_plain = trained(states, 3)
    update, lean._update = lean._update, lean._compiled()
    try:
        compiled, of_compiled = trained(states, 3)
    finally:
        lean._update = update
    torch.testing.assert_close(compiled, plain, rtol=1e-4, atol=1e-5)
    for key in ("exp_avg", "exp_avg_sq"):
        one, other = of_plain.state[plain][key], of_compiled.state[compiled][key]
        same = getattr(one, "codes", one) == getattr(other, "codes", other)
        assert same.float().mean() > 0.97


def step_with_a_part_of_nothing(states: str) -> list[float]:
    """One row over two ranks."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    part = nn.Linear(8, 1, bias=False)
    fully_shard(part, mesh=mesh)
    optimizer = optimizer_of(states, part.weight)
    part(torch.ones(1, 8)).sum().backward()
    step_unless(optimizer, torch.tensor(False))
    part.weight.grad = torch.full_like(part.weight, torch.nan)
    step_unless(optimizer, torch.tensor(True))
    return [float(state["step"]) for state in optimizer.state.values()]


@pytest.mark.parametrize("states", ["float32", *STATES])
def test_a_rank_without_a_part_counts_steps_as_well(states: str) -> None:
    assert run_ranks(step_with_a_part_of_nothing, 2, states) == [[1.0], [1.0]]


@pytest.mark.parametrize("states", STATES)
def test_a_run_goes_on_with_whole_moments(states: str, tmp_path: Path, store_path: Path) -> None:
    overrides = [("run.dir", str(tmp_path)), ("model.dim", "64"), ("model.ffn_dim", "128")]
    for steps, kind in (("2", states), ("4", "float32"), ("6", states)):
        here = [*overrides, ("train.steps", steps), ("optim.states", kind)]
        run_ranks(train_rank, 2, here, str(store_path))
        moments = {v.dtype for n, v in newest_state(tmp_path).items() if "exp_avg" in n}
        assert moments == {torch.bfloat16 if kind == "bfloat16" else torch.float32}
