"""The loss in chunks of logits equals the loss of full logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.harness import run_ranks
from tests.layouts import one_process, parse, size
from tests.parallel.test_layouts import MODEL, TOLERANCE
from tests.small import Overrides, gradients, merged
from weft.data.loader import IGNORE_INDEX
from weft.train import loss
from weft.train.loss import chunk_tokens, cross_entropy, linear_cross_entropy


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
    assert chunk_tokens(1000, 4096) == 1000
    assert chunk_tokens(8192, 128256) == 1024
    assert chunk_tokens(8192, 128256 // 8) == 8192
    assert chunk_tokens(10, 1 << 40) == 1


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
