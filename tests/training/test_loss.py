"""The loss in chunks of logits equals the loss of full logits."""

from __future__ import annotations

import random
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.harness import run_ranks
from tests.layouts import one_process, parse, size
from tests.parallel.test_layouts import MODEL, TOLERANCE
from tests.small import Overrides, gradients, merged
from weft.data.loader import IGNORE_INDEX
from weft.training import loss
from weft.training.loss import chunk_tokens, cross_entropy, linear_cross_entropy


def random_example(random: random.Random, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Return inputs and weight of an output layer, and targets, of random shapes and sizes."""
    torch.manual_seed(random.randrange(1 << 30))
    shape = random.randint(1, 3), random.randint(1, 9)
    dim, vocab_size = random.randint(1, 24), random.randint(2, 90)
    x = (torch.randn(*shape, dim) * 10 ** random.uniform(-1, 1)).to(dtype).requires_grad_()
    weight = torch.randn(vocab_size, dim).to(dtype).requires_grad_()
    targets = torch.randint(0, vocab_size, shape)
    targets[torch.rand(shape) < random.choice([0.0, 0.3, 1.0])] = IGNORE_INDEX
    return x, weight, targets


def check_loss(seed: int, compiled: bool) -> None:
    """Compare losses and gradients of a random example with `F.cross_entropy` in float64."""
    draw = random.Random(seed)
    dtype = draw.choice([torch.float32, torch.bfloat16, torch.float16])
    x, weight, targets = random_example(draw, dtype)
    smoothing, z_loss_coef = draw.choice([0.0, 0.1, 0.7]), draw.choice([0.0, 1e-4, 0.1])
    # The logits of the dtype, exactly; their gradients go back through the same products.
    logits = F.linear(x, weight).detach().double().requires_grad_()
    losses = F.cross_entropy(
        logits.flatten(0, 1),
        targets.flatten(),
        ignore_index=IGNORE_INDEX,
        reduction="none",
        label_smoothing=smoothing,
    ).view_as(targets)
    # The z-loss has a gradient, and no value.
    z_losses = z_loss_coef * logits.logsumexp(-1) ** 2 * (targets != IGNORE_INDEX)
    losses = losses + z_losses - z_losses.detach()
    weights = torch.randn(targets.shape)
    (expected,) = torch.autograd.grad((losses * weights).sum(), logits, retain_graph=True)
    ours = F.linear(x, weight).detach().requires_grad_()
    loss_fn = partial(
        cross_entropy,
        group=None,
        compiled=compiled,
        label_smoothing=smoothing,
        vocab_size=None,
        z_loss_coef=z_loss_coef,
    )
    ours_BT = loss_fn(ours, targets)
    (gradient,) = torch.autograd.grad((ours_BT * weights).sum(), ours)
    assert ours_BT.dtype == torch.float32
    assert gradient.dtype == dtype
    torch.testing.assert_close(ours_BT.double(), losses, rtol=1e-5, atol=1e-5)
    rounding = 2 * torch.finfo(dtype).eps
    torch.testing.assert_close(gradient.double(), expected, rtol=rounding, atol=2e-7)
    # In chunks, with gradients of input and weight.
    scales = draw.choice([None, torch.rand(targets.shape)])
    total, of_tokens = linear_cross_entropy(
        x, weight, targets, loss_fn, draw.randint(1, 12), scales
    )
    torch.testing.assert_close(of_tokens.double(), losses, rtol=1e-4, atol=1e-4)
    (of_logits,) = torch.autograd.grad(
        (losses if scales is None else losses * scales).sum(), logits
    )
    whole = (
        of_logits @ weight.double(),
        of_logits.flatten(0, 1).T @ x.double().flatten(0, 1),
    )
    for result, reference in zip(torch.autograd.grad(total, (x, weight)), whole, strict=True):
        size = reference.abs().max().item()
        atol = 8 * torch.finfo(dtype).eps * size + 1e-6
        torch.testing.assert_close(result.double(), reference, rtol=rounding, atol=atol)


@pytest.mark.parametrize("seed", range(40))
def test_loss_and_gradients_equal_float64(seed: int) -> None:
    check_loss(seed, compiled=False)


@pytest.mark.slow  # each shape is compiled
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", range(100, 112))
def test_compiled_loss_and_gradients_equal_float64(seed: int) -> None:
    check_loss(seed, compiled=True)


@pytest.mark.parametrize("smoothing", [0.1, 0.5])
def test_label_smoothing_equals_pytorch_and_transformers(smoothing: float) -> None:
    from transformers.trainer_pt_utils import LabelSmoother

    torch.manual_seed(0)
    logits = (3 * torch.randn(2, 40, 500)).requires_grad_()
    targets = torch.randint(0, 500, (2, 40))
    targets[torch.rand(targets.shape) < 0.3] = IGNORE_INDEX
    count = (targets != IGNORE_INDEX).sum()
    results = []
    for value in (
        cross_entropy(logits, targets, label_smoothing=smoothing).sum() / count,
        F.cross_entropy(logits.flatten(0, 1), targets.flatten(), label_smoothing=smoothing),
        LabelSmoother(smoothing)({"logits": logits}, targets),
    ):
        (gradient,) = torch.autograd.grad(value, logits)
        results.append((value.detach(), gradient / gradient.abs().max()))
    for value, gradient in results[1:]:
        torch.testing.assert_close(results[0][0], value, rtol=1e-6, atol=0)
        torch.testing.assert_close(results[0][1], gradient, rtol=0, atol=1e-6)


def large_allocations(
    compiled: bool, tokens: int, vocab_size: int, dtype: torch.dtype = torch.bfloat16
) -> dict[int, int]:
    """Count the allocations of at least a byte per logit, by their bytes per logit."""
    logits = torch.randn(1, tokens, vocab_size).to(dtype).requires_grad_()
    targets = torch.randint(0, vocab_size, (1, tokens))
    cross_entropy(logits, targets, None, compiled).sum().backward()  # compiles
    logits.grad = None
    with torch.profiler.profile(profile_memory=True) as profile:
        cross_entropy(logits, targets, None, compiled).sum().backward()
    kineto: Any = profile.profiler
    sizes = [e.nbytes() for e in kineto.kineto_results.events() if e.name() == "[memory]"]
    numel = logits.numel()
    return Counter(size // numel for size in sizes if size >= numel)


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_loss_allocates_few_tensors_of_the_size_of_logits(compiled: bool) -> None:
    """The gradient has two bytes per logit; only uncompiled passes need four, for a moment."""
    # Of each pass: the exponentials, and a CPU's cast of the logits, which a GPU does without.
    expected = {2: 1} if compiled else {4: 4, 2: 1}
    assert large_allocations(compiled, 96, 5000) == expected


def test_float32_loss_allocates_one_tensor_of_the_size_of_logits() -> None:
    """The exponentials become the gradient, in place."""
    assert large_allocations(False, 96, 5000, torch.float32) == {4: 1}


def test_float32_loss_refuses_a_second_backward_pass() -> None:
    """The first one has overwritten what forward saved."""
    logits = torch.randn(1, 8, 50, requires_grad=True)
    loss = cross_entropy(logits, torch.randint(0, 50, (1, 8))).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [1, 7, 12, 64])
def test_linear_cross_entropy_in_chunks_equals_whole_logits(size: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = torch.randn(3, 8, 16).to(dtype).requires_grad_()
    weight = torch.randn(50, 16).to(dtype).requires_grad_()
    targets = torch.randint(0, 50, (3, 8))
    targets[0, :5] = IGNORE_INDEX
    tensor = cross_entropy(F.linear(x, weight), targets)
    plain = tensor.sum() / 7
    expected = torch.autograd.grad(plain, (x, weight))
    total, of_tokens = linear_cross_entropy(x, weight, targets, cross_entropy, size)
    ours = total / 7
    result = torch.autograd.grad(ours, (x, weight))
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(ours, plain, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(of_tokens, tensor.detach(), rtol=1e-5, atol=1e-5)
    for a, b in zip(result, expected, strict=True):
        assert a.dtype == dtype
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)
    with torch.no_grad():
        second_run, of_tokens = linear_cross_entropy(x, weight, targets, cross_entropy, size)
    torch.testing.assert_close(second_run / 7, plain.detach(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(of_tokens, tensor.detach(), rtol=1e-5, atol=1e-5)


def test_chunk_tokens_fit_the_limit() -> None:
    for compiled in (False, True):
        assert chunk_tokens(1000, 4096, compiled) == 1000
        assert chunk_tokens(8192, 128256, compiled) == (2048 if compiled else 1024)
        assert chunk_tokens(8192, 128256 // 8, compiled) == 8192
        assert chunk_tokens(10, 1 << 40, compiled) == 1


def seven_at_a_time(job: Overrides, store: str) -> dict[str, Any]:
    """Return gradients of a loss that computes logits of at most 8 tokens at a time."""
    loss.CHUNK_BYTES = 4 * 512 * 8
    observed = []
    full = loss._compute_chunks

    def record(x: torch.Tensor, *rest: Any) -> Any:
        observed.append(len(x) > rest[3])
        return full(x, *rest)

    loss._compute_chunks = record
    return gradients(job, store) | {"chunked": any(observed)}


@pytest.mark.parametrize(
    "layout",
    [
        "model.tied_embeddings=true",
        "tp2",
        "cp2",
        pytest.param("", marks=pytest.mark.slow),
        pytest.param("dp_shard2", marks=pytest.mark.slow),
        pytest.param("pp2", marks=pytest.mark.slow),
        pytest.param("tp2 sequence_parallel=false", marks=pytest.mark.slow),
        pytest.param("dp_shard2 model.tied_embeddings=true", marks=pytest.mark.slow),
        pytest.param("dp_shard2 reshard_after_forward=always", marks=pytest.mark.slow),
        pytest.param("dp_shard2 tp2 model.tied_embeddings=true", marks=pytest.mark.slow),
        "pp2 pipeline.schedule=ZBVZeroBubble",
        pytest.param("pp2 pipeline.schedule=DualPipeV dp_shard2", marks=pytest.mark.slow),
    ],
)
def test_linear_cross_entropy_layouts_gradients_equal_one_process(
    layout: str, store_path: Path
) -> None:
    ranks, overrides = parse(layout)
    tied = [override for override in overrides if override[0] == "model.tied_embeddings"]
    model = [*MODEL, *size(layout)]
    (one,) = one_process(str(store_path), [model + tied])
    many = run_ranks(seven_at_a_time, ranks, model + overrides, str(store_path), timeout=120)
    assert any(entry["chunked"] for entry in many)
    for item in merged(many):
        assert item["loss"] == pytest.approx(one["loss"], rel=TOLERANCE)
        for name, grad in one["grads"].items():
            error = (item["grads"][name] - grad).abs().max() / grad.abs().max()
            assert error < TOLERANCE, name
