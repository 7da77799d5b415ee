"""Context-parallel attention of documents by the kernel for many lengths equals a float64 mask."""

from __future__ import annotations

import random
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.flash_reference import FlashReference
from tests.harness import run_ranks
from weft.models import varlen_attention
from weft.models.attention import AttentionOptions
from weft.models.decoder_config import DecoderConfig
from weft.parallel.block_attention import DocumentBlocks
from weft.parallel.context_parallel import apply_context_parallel, shard_documents
from weft.parallel.token_split import LoadBalance, Split, shard_sequence, split_sequences

CPU = torch.device("cpu")


class Case(NamedTuple):
    """A random combination."""

    ids_BT: Tensor
    method: Any
    balance: LoadBalance
    key_heads: int
    value_dim: int
    window: int
    chunk: int
    has_sinks: bool
    scale: float | None


def draw_case(seed: int, size: int) -> Case:
    rng = random.Random(seed)
    num_tokens = 2 * size * rng.randint(1, 12)
    rows = []
    for _ in range(rng.choice([1, 1, 2, 3])):
        count = min(rng.choice([0, 1, 2, 5, num_tokens]), num_tokens - 1)
        cuts = sorted(rng.sample(range(1, num_tokens), count))
        rows.append([sum(position >= cut for cut in cuts) % 2 for position in range(num_tokens)])
    limits = rng.choice([(0, 0), (0, 0), (1, 0), (2, 0), (rng.randint(3, 20), 0), (0, 5)])
    return Case(
        torch.tensor(rows),
        rng.choice(["ring", "allgather"]),
        rng.choice([False, True, "documents"]),
        rng.choice([1, 2, 4]),
        rng.choice([8, 6]),
        *limits,
        rng.random() < 0.4,
        rng.choice([None, 0.7]),
    )


def attend_with_mask(q: Tensor, k: Tensor, v: Tensor, sinks_H: Tensor | None, case: Case) -> Tensor:
    """Compute attention pair by pair, with all scores in memory."""
    ids_BT = case.ids_BT
    changes_BT = torch.zeros_like(ids_BT)
    changes_BT[:, 1:] = ids_BT[:, 1:] != ids_BT[:, :-1]
    document_BT = changes_BT.cumsum(1)
    starts_BT = (document_BT.unsqueeze(2) == document_BT.unsqueeze(1)).int().argmax(2)
    positions_T = torch.arange(ids_BT.shape[1])
    place_BT = positions_T - starts_BT  # in the document
    distance_TT = positions_T.unsqueeze(1) - positions_T
    visible_BTT = (document_BT.unsqueeze(2) == document_BT.unsqueeze(1)) & (distance_TT >= 0)
    if case.window:
        visible_BTT &= distance_TT < case.window
    if case.chunk:
        chunk_BT = place_BT // case.chunk
        visible_BTT &= chunk_BT.unsqueeze(2) == chunk_BT.unsqueeze(1)
    k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], dim=2) for x in (k, v))
    scores = torch.einsum("bqhk,bshk->bhqs", q, k) * (case.scale or q.shape[3] ** -0.5)
    scores = scores.masked_fill(~visible_BTT.unsqueeze(1), -torch.inf)
    if sinks_H is not None:
        sinks = sinks_H.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat((scores, sinks), dim=3)
    weights = scores.softmax(3)[..., : k.shape[1]]
    return torch.einsum("bhqs,bshv->bqhv", weights, v)


class Layer(nn.Module):
    """What `apply_context_parallel` changes."""

    attend: Any = None


def errors_of(seed: int) -> tuple[float, Case, int]:
    """Return the largest error of output and gradients, and the calls of the kernel."""
    rank, size = dist.get_rank(), dist.get_world_size()
    group, reference = dist.group.WORLD, FlashReference()
    assert group is not None
    varlen_attention.aten = reference  # type: ignore[assignment]
    case, generator = draw_case(seed, size), torch.Generator().manual_seed(seed)
    shape = case.ids_BT.shape
    full = [
        torch.randn(*shape, *heads, dtype=torch.float64, generator=generator)
        for heads in ((4, 8), (case.key_heads, 8), (case.key_heads, case.value_dim))
    ]
    upstream = torch.randn(*shape, 4, case.value_dim, dtype=torch.float64, generator=generator)
    sinks_H = torch.randn(4, dtype=torch.float64, generator=generator) if case.has_sinks else None

    def compute(attend: Any, tensors: list[Tensor], upstream: Tensor) -> list[Tensor]:
        leaves = [x.clone().requires_grad_() for x in tensors]
        sinks = None if sinks_H is None else sinks_H.clone().requires_grad_()
        out = attend(*leaves, sinks)
        inputs = leaves if sinks is None else [*leaves, sinks]
        return [out.detach(), *torch.autograd.grad(out, inputs, upstream)]

    expected = compute(lambda *x: attend_with_mask(*x, case), full, upstream)
    layer, options = Layer(), AttentionOptions(case.scale, 0.0, case.window, case.chunk)
    apply_context_parallel(layer, group, case.method, case.balance, compiled=False)
    model = DecoderConfig(
        num_layers=1, sliding_window=case.window, attention_chunk=case.chunk, layer_pattern="L"
    )
    documents = shard_documents(
        case.ids_BT, case.method, rank, size, case.balance, CPU, model, varlen=True
    )
    assert isinstance(documents, DocumentBlocks)
    local = compute(
        lambda q, k, v, sinks: layer.attend(q, k, v, documents, options._replace(sinks_H=sinks)),
        [shard_sequence(x, documents.split)[rank] for x in full],
        shard_sequence(upstream, documents.split)[rank],
    )
    if sinks_H is not None:  # a parameter, whose gradient the ranks sum
        dist.all_reduce(local[4])
    parts = [shard_sequence(x, documents.split)[rank] for x in expected[:4]] + expected[4:]
    worst = max(float((x - y).abs().max()) for x, y in zip(local, parts, strict=True))
    assert reference.calls["forward"] == reference.calls["backward"]
    return worst, case, reference.calls["forward"]


def all_errors(seeds: range) -> list[tuple[float, Case, int]]:
    return [errors_of(seed) for seed in seeds]


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("seeds", [range(10), pytest.param(range(10, 300), marks=pytest.mark.slow)])
def test_varlen_blocks_equal_float64_for_random_documents_windows_and_sinks(
    size: int, seeds: range
) -> None:
    for results in run_ranks(all_errors, size, seeds, timeout=600):
        for seed, (error, case, calls) in zip(seeds, results, strict=True):
            assert error < 1e-12, f"seed {seed}: {case}"
            has_limit = case.window > 0 or (case.ids_BT != case.ids_BT[:, :1]).any()
            assert calls > 0 or not has_limit or case.window >= case.ids_BT.shape[1]


def count_blocks(
    boundaries: list[list[int]], split: Split, ring: bool, **options: Any
) -> list[Any]:
    """Return the blocks of each rank and source, with and without the kernel."""
    size = len(split[0])
    return [
        [
            [len(of_source) for of_source in documents.select(AttentionOptions(**options))]
            for rank in range(size)
            for documents in [DocumentBlocks(boundaries, rank, split, ring, device)]
        ]
        for device in (None, CPU)
    ]


# Two sequences of 11 and 10 documents.
BOUNDARIES = [[*range(0, 96, 9), 96], [*range(0, 96, 10), 96]]


@pytest.mark.parametrize(
    ("method", "options", "before", "after"),
    [
        # By rank, then by source.  Rank 0 has both ends: twelve documents, or parts of them, of
        # which the second sequence's last chunk begins within one.
        ("ring", {}, [[12, 1], [2, 12]], [[1, 1], [1, 1]]),
        ("ring", {"window": 4}, [[12, 1], [3, 12]], [[1, 2], [1, 1]]),
        ("ring", {"chunk": 4}, [[31, 1], [1, 32]], [[1, 1], [1, 1]]),
        ("allgather", {}, [[13], [14]], [[1], [1]]),
        ("allgather", {"window": 4}, [[13], [15]], [[1], [1]]),
        ("allgather", {"chunk": 4}, [[32], [33]], [[1], [1]]),
    ],
)
def test_varlen_blocks_take_all_documents_of_a_source(
    method: str, options: dict[str, int], before: Any, after: Any
) -> None:
    split = split_sequences(BOUNDARIES, 2, True)
    assert count_blocks(BOUNDARIES, split, method == "ring", **options) == [before, after]
