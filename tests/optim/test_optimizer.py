"""Parameter groups, the fused AdamW, and schedules."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import nn

from weft.config.schema import OptimSection
from weft.models import llama
from weft.optim.optimizer import (
    SCHEDULES,
    build_adamw,
    build_optimizer,
    clip_grad_norm,
    compute_grad_norm,
    learning_rate,
    masked_step,
    set_learning_rate,
)
from weft.parallel.private import set_found_inf

OPTIM = OptimSection(lr=1e-2, warmup_steps=10, min_lr_ratio=0.1, decay_fraction=0.25)


def test_optimizer_gains_and_embeddings_have_no_weight_decay() -> None:
    model = llama.Llama(llama.PRESETS["toy"].model_copy(update={"tied_embeddings": False}))
    inside = {param for block in llama.blocks(model) for param in block.parameters()}
    optimizer = build_optimizer(
        model.named_parameters(), OPTIM, build_adamw, llama.has_weight_decay, inside
    )
    names = {param: name for name, param in model.named_parameters()}
    result = {
        (group["weight_decay"], group["matrices"]): {names[param] for param in group["params"]}
        for group in optimizer.param_groups
    }
    assert len(result) == len(optimizer.param_groups) == 3
    assert sum(len(group) for group in result.values()) == len(names)
    assert all(name.endswith("_proj.weight") for name in result[0.1, True])
    assert result[0.1, False] == {"lm_head.weight"}
    assert "embed_tokens.weight" in result[0.0, False]


def test_optimizer_step_equals_adamw() -> None:
    """The formula has decoupled weight decay and bias correction."""
    model = nn.Linear(5, 7, bias=False)
    optimizer = build_optimizer(model.named_parameters(), OPTIM, build_adamw, lambda name: True, ())
    w = model.weight.detach().double().clone()
    m, v = torch.zeros_like(w), torch.zeros_like(w)
    for step in range(1, 6):
        lr = learning_rate(step, 20, OPTIM, SCHEDULES["wsd"])
        grad = torch.randn(7, 5)
        model.weight.grad = grad.clone()
        set_learning_rate(optimizer, lr)
        optimizer.step()
        m = OPTIM.beta1 * m + (1 - OPTIM.beta1) * grad
        v = OPTIM.beta2 * v + (1 - OPTIM.beta2) * grad.double() ** 2
        update = (m / (1 - OPTIM.beta1**step)) / ((v / (1 - OPTIM.beta2**step)).sqrt() + OPTIM.eps)
        w = w - lr * OPTIM.weight_decay * w - lr * update
    torch.testing.assert_close(model.weight.detach().double(), w, rtol=1e-5, atol=1e-6)


def test_clip_grad_norm_small_gradients_are_unchanged() -> None:
    param = nn.Parameter(torch.zeros(4))
    param.grad = torch.tensor([3.0, 0.0, 4.0, 0.0])
    assert clip_grad_norm([param, nn.Parameter(torch.zeros(2))], 10.0).item() == 5.0
    assert param.grad.tolist() == [3.0, 0.0, 4.0, 0.0]
    assert clip_grad_norm([param], 1.0).item() == 5.0
    torch.testing.assert_close(param.grad, torch.tensor([0.6, 0.0, 0.8, 0.0]))


def test_clip_grad_norm_zero_returns_the_norm_and_changes_nothing() -> None:
    param = nn.Parameter(torch.zeros(2))
    param.grad = torch.tensor([3e9, 4e9])
    assert clip_grad_norm([param], 0.0).item() == pytest.approx(5e9)
    assert param.grad.tolist() == [3e9, 4e9]


@pytest.mark.parametrize(("steps", "warmup"), [(5, 0), (60, 6), (1000, 100), (9000, 100)])
def test_learning_rate_auto_warmup_is_a_tenth_of_the_steps(steps: int, warmup: int) -> None:
    auto = OptimSection(schedule="linear")
    fixed = OptimSection(schedule="linear", warmup_steps=warmup)
    for step in (1, max(1, warmup), steps):
        rates = [learning_rate(step, steps, optim, SCHEDULES["linear"]) for optim in (auto, fixed)]
        assert rates[0] == rates[1]


def test_grad_norm_of_frozen_part_is_on_its_device() -> None:
    """Else the reduction over stages would use another backend, or hang."""
    frozen = nn.Parameter(torch.empty(4, device="meta"), requires_grad=False)
    assert [norm.device.type for norm in compute_grad_norm([frozen])] == ["meta", "meta"]
    assert [norm.item() for norm in compute_grad_norm([])] == [0.0, 0.0]


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
@pytest.mark.parametrize("fused", [True, False], ids=["on the device", "by the host"])
def test_optimizer_bad_step_changes_no_bit(kind: Any, fused: bool) -> None:
    param = nn.Parameter(torch.randn(50))
    optimizer = kind([param], lr=0.1, fused=fused, weight_decay=0.1)
    no, yes = torch.tensor(False), torch.tensor(True)
    assert set_found_inf(optimizer, no) == fused
    param.grad = torch.randn(50)
    masked_step(optimizer, no)
    everything = {"param": param.detach(), **optimizer.state[param]}
    before = {name: value.clone() for name, value in everything.items() if value is not None}
    param.grad = torch.full((50,), torch.nan)
    masked_step(optimizer, yes)
    assert all(everything[name].equal(value) for name, value in before.items())
    param.grad = torch.randn(50)
    masked_step(optimizer, no)
    assert not param.equal(before["param"])


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(("warmup", "steps"), [(0, 100), (10, 100), (10, 11), (50, 20), (0, 1)])
def test_learning_rate_rises_then_falls(name: str, warmup: int, steps: int) -> None:
    optim = OPTIM.model_copy(update={"warmup_steps": warmup})
    rates = [learning_rate(step, steps, optim, SCHEDULES[name]) for step in range(1, steps + 1)]
    assert all(0 < rate <= optim.lr * (1 + 1e-12) for rate in rates)
    rising, falling = rates[:warmup], rates[max(0, warmup - 1) :]
    assert all(a < b for a, b in itertools.pairwise(rising))
    assert all(a >= b for a, b in itertools.pairwise(falling))
    if steps > warmup:
        assert rates[-1] == pytest.approx(optim.lr * optim.min_lr_ratio)
    if 0 < warmup <= steps:
        assert rates[warmup - 1] == pytest.approx(optim.lr)


def test_learning_rate_schedules_have_their_shapes() -> None:
    def middle(name: str) -> float:
        optim = OPTIM.model_copy(update={"min_lr_ratio": 0.0})
        return learning_rate(10 + 45, 100, optim, SCHEDULES[name]) / optim.lr

    assert middle("wsd") == 1.0
    assert middle("linear") == pytest.approx(0.5)
    assert middle("cosine") == pytest.approx(0.5)
    quarter = learning_rate(10 + 22, 98, OPTIM, SCHEDULES["cosine"]) / OPTIM.lr
    assert quarter == pytest.approx(0.1 + 0.9 * 0.85355, rel=1e-4)
    late = learning_rate(100 - 9, 100, OPTIM, SCHEDULES["wsd"]) / OPTIM.lr
    assert late == pytest.approx(0.1 + 0.9 * 0.1 / 0.25)
