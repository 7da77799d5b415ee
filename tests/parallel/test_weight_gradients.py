"""Deferred weight gradients equal those of autograd, and are computed in the second half."""

from __future__ import annotations

import random
import weakref
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.harness import run_ranks
from tests.small import plan_here, small_job, this_rank
from weft.estimate.trace import record_step
from weft.models.layers import grouped_linear, weight_gradient
from weft.models.moe import ExpertLinear
from weft.parallel.activation_checkpoint import _selective_contexts, _should_save
from weft.parallel.weight_gradients import (
    WeightGradients,
    add_inputs_to_compiled_block,
    defer_weight_gradients,
)
from weft.training.setup import build


class Block(nn.Module):
    """A gated layer with biases, a frozen matrix, and maybe experts; shared by no other."""

    def __init__(self, dim: int, experts: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.gate = nn.Linear(dim, 3 * dim)
        self.up = nn.Linear(dim, 3 * dim, bias=False)
        self.frozen = nn.Linear(3 * dim, 3 * dim).requires_grad_(False)
        self.down = nn.Linear(3 * dim, dim)
        self.experts = ExpertLinear(experts, dim, dim, bias=True) if experts else None

    def forward(self, x_BTD: Tensor) -> Tensor:
        h_BTD = self.norm(x_BTD)
        x_BTD = x_BTD + self.down(self.frozen(F.silu(self.gate(h_BTD)) * self.up(h_BTD)))
        if self.experts is not None:
            rows_RD = x_BTD.flatten(0, 1)
            counts_E = torch.zeros(self.experts.num_experts, dtype=torch.int64)
            counts_E[0], counts_E[-1] = len(rows_RD) - 3, 3
            x_BTD = x_BTD + self.experts(rows_RD, counts_E).view_as(x_BTD)
        return x_BTD


def wrap(block: nn.Module, mode: str) -> None:
    if mode in ("full", "selective"):
        options: dict[str, Any] = {"use_reentrant": False}
        if mode == "selective":
            options["context_fn"] = partial(_selective_contexts, partial(_should_save, 0))
        block.forward = partial(checkpoint, block.forward, **options)
    if mode == "compiled":
        block.forward = torch.compile(block.forward, fullgraph=True, backend="aot_eager")
        add_inputs_to_compiled_block(block)


MODES = ["none", "full", "selective", "compiled"]


@pytest.mark.parametrize("mode", MODES)
def test_deferred_gradients_equal_those_of_autograd(mode: str) -> None:
    torch.manual_seed(MODES.index(mode))
    draw = random.Random(mode)
    dim = 8 * draw.randint(1, 4)
    experts = 0 if mode == "compiled" else draw.randint(2, 4)
    model = nn.Sequential(*(Block(dim, experts) for _ in range(3)))
    inputs = [torch.randn(2, draw.randint(3, 6), dim) for _ in range(3)]
    if mode == "compiled":  # a pipeline's microbatches have one shape
        inputs = [torch.randn(2, 5, dim) for _ in range(3)]
    weights = [
        module.weight
        for module in model.modules()
        if isinstance(module, nn.Linear | ExpertLinear) and module.weight.requires_grad
    ]

    def expected() -> tuple[list[Tensor], list[Tensor]]:
        xs = [x.clone().requires_grad_() for x in inputs]
        model.zero_grad()
        for x in xs:
            model(x).square().sum().backward()
        grads = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        return grads, [x.grad for x in xs]  # type: ignore[misc]

    wanted = expected()
    defer_weight_gradients(model)
    for block in model:
        wrap(block, mode)
    gradients: WeightGradients = model.weight_gradients  # type: ignore[assignment]
    torch.testing.assert_close(expected(), wanted)  # a full backward pass defers nothing
    assert not gradients.pending

    model.zero_grad()
    xs = [x.clone().requires_grad_() for x in inputs]
    halves = []
    gradients.is_deferred = True
    for x in xs:
        model(x).square().sum().backward()
        halves.append(gradients.collect())
    assert all(weight.grad is None for weight in weights)
    torch.testing.assert_close([x.grad for x in xs], wanted[1])
    for compute in halves[::-1]:
        compute()
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    torch.testing.assert_close(grads, wanted[0])


@pytest.mark.parametrize("mode", ["none", "full"])
def test_deferred_backward_keeps_only_the_factors(mode: str) -> None:
    """Activations that no weight gradient needs are freed after the first half."""
    model = Block(16, 0)
    defer_weight_gradients(model)
    wrap(model, mode)
    gradients: Any = model.weight_gradients
    gradients.is_deferred = True
    # Neither FSDP nor a pipeline supports an output that is a view.
    assert not model.gate(torch.randn(3, 16))._is_view()
    saved: list[weakref.ref[Any]] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(weakref.ref(tensor.untyped_storage()))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(torch.randn(4, 6, 16, requires_grad=True)).square().sum().backward()
    params = {p.untyped_storage().data_ptr() for p in model.parameters()}
    alive = {s.data_ptr() for ref in saved if (s := ref()) is not None} - params
    factors = [f for _, gradient in gradients.pending for f in gradient.args[:2]]
    assert len(factors) == 6  # three trained matrices
    assert alive <= {factor.untyped_storage().data_ptr() for factor in factors}
    compute = gradients.collect()
    refs = [weakref.ref(factor) for factor in factors]
    del factors
    compute()
    assert not any(ref() for ref in refs)


def test_anomaly_mode_defers_nothing() -> None:
    """Anomaly mode would not find NaN in the second half."""
    model = Block(8, 0)
    defer_weight_gradients(model)
    gradients: Any = model.weight_gradients
    gradients.is_deferred = True
    with torch.autograd.set_detect_anomaly(True):
        model(torch.randn(1, 2, 8)).sum().backward()
    assert not gradients.pending
    assert model.gate.weight.grad is not None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weight_gradient_of_groups_equals_autograd(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    counts_E = torch.tensor([3, 0, 5, 1])
    x_RD = torch.randn(9, 16).to(dtype)
    weight_EFD = torch.randn(4, 24, 16).to(dtype).requires_grad_()
    grad_RF = torch.randn(9, 24).to(dtype)
    (expected,) = torch.autograd.grad(
        grouped_linear(x_RD, weight_EFD, counts_E), weight_EFD, grad_RF
    )
    torch.testing.assert_close(weight_gradient(x_RD, grad_RF, counts_E), expected)


def check_accumulation(module: nn.Module, compute: Any, *args: Any, **options: Any) -> None:
    """Check that weight gradients do not add up in bfloat16, which has 8 bits."""
    compute(*args, **options)
    grads = [param.grad for param in module.parameters()]
    assert options["last_backward"] or not any(grad is not None for grad in grads)


def work_by_half(*overrides: tuple[str, str]) -> tuple[dict[str, float], float]:
    """Return the FLOPs of a step by kind of action, and those of all weight gradients."""
    job = small_job(
        ("parallel.pp", "2"),
        ("model.num_layers", "4"),
        ("model.tied_embeddings", "false"),
        ("train.microbatch_size", "1"),
        ("pipeline.layers_per_stage", "[1,1,1,1]"),
        ("precision.compute_dtype", "bfloat16"),
        *overrides,
    )
    plan = plan_here(job)
    built = build(plan, this_rank())
    for stage in built.train_step.schedule._stages:
        stage.backward_weight_one_chunk = partial(
            check_accumulation, stage.submod, stage.backward_weight_one_chunk
        )
    flops: dict[str, float] = dict.fromkeys("FBIW", 0.0)
    for location, _, _, call in record_step(built, plan, None).events:
        if call is not None and location.kind in flops:
            flops[location.kind] += call.flops
    layers = [m for part in built.model_parts for m in part.modules() if isinstance(m, nn.Linear)]
    rows = plan.num_microbatches * plan.seq_len
    # FSDP shards dim 0 over one rank.
    return flops, 2.0 * rows * sum(layer.in_features * layer.out_features for layer in layers)


@pytest.mark.parametrize(
    "mode",
    [
        "none",
        pytest.param("full", marks=pytest.mark.slow),
        pytest.param("selective", marks=pytest.mark.slow),
    ],
)
def test_weight_products_run_in_the_second_half(mode: str) -> None:
    schedule = ("pipeline.schedule", "ZBVZeroBubble")
    for flops, products in run_ranks(
        work_by_half, 2, schedule, ("activation_checkpoint.mode", mode)
    ):
        assert flops["W"] == products
        assert flops["F"] < 1.3 * products  # attention is a small part of it
        recomputed = 0.4 if mode == "full" else 0
        assert 1 + recomputed <= flops["I"] / products <= 2.2 + 2 * recomputed
        assert flops["B"] == 0


@pytest.mark.slow
def test_full_backward_passes_of_a_mixed_schedule_defer_nothing() -> None:
    schedule = ("pipeline.schedule", "DualPipeV")
    for flops, products in run_ranks(work_by_half, 2, schedule):
        assert 0 < flops["W"] < products
        assert flops["B"] > products - flops["W"]
