"""Context-parallel attention equals one process's."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import partial
from itertools import pairwise, product
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend
from torch.testing._internal.distributed import fake_pg  # noqa: F401 (makes the backend "fake")
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from benchmarks import cp_balance
from tests.harness import run_ranks
from weft.models import attention
from weft.models.attention import AttentionOptions
from weft.models.decoder import Decoder
from weft.models.decoder_config import DecoderConfig
from weft.parallel import block_attention as ops
from weft.parallel.block_attention import BlocksBySource, list_blocks
from weft.parallel.compile import compile_function
from weft.parallel.context_parallel import (
    CPMethod,
    apply_context_parallel,
    shard_documents,
    split_of,
)
from weft.parallel.token_split import (
    LoadBalance,
    Split,
    shard_sequence,
    split_documents,
    split_sequences,
    token_costs,
    unshard_sequence,
)

METHODS: list[CPMethod] = ["ring", "allgather", "ulysses"]
CPU = torch.device("cpu")

# --------------------------------------------------------------------------- sequence sharding


def token_order(split: Split, sequence: int = 0) -> list[Tensor]:
    """Return each rank's tokens of a sequence, in order."""
    ranks = split[sequence % len(split)]
    return [torch.cat([torch.arange(*ends) for ends in ranges]) for ranges in ranks]


def slice_of(x_BT: Tensor, rank: int, size: int, balance: bool) -> Tensor:
    """Return a rank's tokens, if they do not depend on documents."""
    return shard_sequence(x_BT, split_one(x_BT.shape[1], size, balance))[rank]


def split_one(num_tokens: int, size: int, balance: LoadBalance) -> Split:
    """Return the tokens of each rank of sequences of one document."""
    return split_sequences([[0, num_tokens]], size, balance)


@pytest.mark.parametrize("balance", [False, True])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_shard_sequence_every_token_has_one_rank(size: int, balance: bool) -> None:
    split = split_one(12 * size, size, balance)
    order_CL = torch.stack(token_order(split))
    assert order_CL.shape == (size, 12)
    assert order_CL.flatten().sort().values.tolist() == list(range(12 * size))
    x_BT = torch.randn(2, 12 * size, 3)
    x_CBL = shard_sequence(x_BT, split)
    assert x_CBL.is_contiguous()
    assert all(torch.equal(x_CBL[rank], x_BT[:, order_CL[rank]]) for rank in range(size))
    assert torch.equal(unshard_sequence(x_CBL, split), x_BT)


def test_shard_sequence_splits_may_repeat() -> None:
    """Sequences i and i + 3 have the split of sequence i."""
    boundaries = ops.document_boundaries(random_documents(2, 16, batch_size=3))
    split = split_sequences(boundaries, 2, "documents", ((0, 0, 1),))
    orders = [torch.stack(token_order(split, i)) for i in range(3)]
    assert not orders[0].equal(orders[1])
    x_BT = torch.randn(6, 16)
    x_CBL = shard_sequence(x_BT, split)
    for i in range(6):
        assert torch.equal(x_CBL[:, i], x_BT[i, orders[i % 3]])
    assert torch.equal(unshard_sequence(x_CBL, split), x_BT)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_shard_sequence_balanced_ranks_have_equal_work(size: int) -> None:
    """A query at position p has p + 1 keys."""
    work = [(each + 1).sum() for each in token_order(split_one(24 * size, size, True))]
    assert len(set(map(int, work))) == 1
    unbalanced = token_order(split_one(24 * size, size, False))
    assert (unbalanced[-1] + 1).sum() > 2 * (unbalanced[0] + 1).sum()


@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_split_sequences_one_document_is_split_by_head_and_tail(size: int) -> None:
    """Into 2 C chunks, of which the two in the middle are neighbors."""
    (ranks,) = split_one(24 * size, size, True)
    for rank, ranges in enumerate(ranks[:-1]):
        assert ranges == [(12 * c, 12 * c + 12) for c in (rank, 2 * size - 1 - rank)]
    assert ranks[-1] == [(12 * size - 12, 12 * size + 12)]


def test_split_documents_ranks_have_equal_tokens_and_cost() -> None:
    """For any documents and limits, and with few ranges of tokens."""
    generator = random.Random(0)
    for _ in range(60):
        size = generator.choice([2, 3, 4, 8])
        num_tokens = size * generator.randint(40, 200)
        cuts = generator.sample(range(1, num_tokens), generator.randint(0, 30))
        limits = generator.choice([[(0, 0, 1)], [(0, 0, 2), (17, 0, 1)], [(0, 25, 3), (0, 0, 1)]])
        starts = [0, *sorted(cuts), num_tokens]
        split = split_documents(tuple(starts), size, tuple(limits))
        assert [sum(e - s for s, e in ranges) for ranges in split] == [num_tokens // size] * size
        tokens = torch.cat(token_order([split]))
        assert tokens.sort().values.tolist() == list(range(num_tokens))
        costs_T = token_costs(starts, limits)
        costs = [sum(int(costs_T[s:e].sum()) for s, e in ranges) for ranges in split]
        # Every arc has the mean cost of the rest, to half the cost of a token.
        assert max(costs) - min(costs) <= 2 * costs_T.max()
        assert sum(map(len, split)) <= 2 * size


@pytest.mark.parametrize("seed", [0, 1])
def test_split_documents_of_a_text_ranks_have_equal_work(seed: int) -> None:
    """Lengths as in a text, packed; blocks of attention as they are computed."""
    generator = random.Random(seed)
    lengths = [int(generator.lognormvariate(7.0, 1.2)) + 1 for _ in range(400)]
    sequences = list(cp_balance.pack(lengths, 8192))[:24]
    (head_tail, _, ring, *_), (mean, worst, ring_of_documents, *_) = (
        cp_balance.measure(sequences, 4, balance) for balance in BALANCES[1:]
    )
    assert head_tail > 1.3
    assert mean <= worst < 1.01
    assert ring_of_documents < 0.9 * ring


def test_token_costs_are_the_visible_keys() -> None:
    documents = random_documents(5, 40, batch_size=1)
    (starts,) = ops.document_boundaries(documents)
    expected = 0
    for window, chunk, num_layers in (limits := [(0, 0, 3), (4, 0, 2), (0, 6, 1)]):
        mask = attention.document_mask(documents, window, chunk)
        assert isinstance(mask, Tensor)
        expected += num_layers * mask[0, 0].sum(1)
    assert token_costs(starts, limits).tolist() == expected.tolist()


def area(blocks: BlocksBySource) -> int:
    """Return the number of query-key pairs that the kernels compute."""
    sizes = [
        (b.queries.stop - b.queries.start, b.keys.stop - b.keys.start, b.causal)
        for listed in blocks
        for b in listed
    ]
    return sum(q * (q + 1) // 2 if causal else q * s for q, s, causal in sizes)


@pytest.mark.parametrize("balance", [False, True])
@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("method", ["ring", "allgather"])
def test_blocks_of_one_document_are_balanced_and_few(method: str, size: int, balance: bool) -> None:
    """No query-key pair above the diagonal is computed, and the work is balanced."""
    split = split_one(8 * size, size, balance)
    areas = []
    for rank in range(size):
        blocks = list_blocks([[0, 8 * size]], rank, split, method == "ring")
        areas.append(area(blocks))
        if method == "ring":  # one kernel for each source with earlier keys
            assert [len(of) for of in blocks] == [int(balance or r <= rank) for r in range(size)]
    assert sum(areas) == 8 * size * (8 * size + 1) // 2
    assert (len(set(areas)) == 1) == balance


def visible_pairs(queries: Tensor, keys: Tensor, block: ops.AttentionBlock) -> Tensor:
    """Return 1 where a query sees a key."""
    distances = torch.arange(len(keys)) - torch.arange(len(queries)).unsqueeze(1)
    pairs = torch.ones_like(distances)
    if block.causal:
        pairs[distances > 0] = 0
    if block.first is not None:
        pairs[distances < block.first] = 0
    return pairs


# Window, chunk, softcap.
LIMITS = [(0, 0, False), (0, 0, True), (3, 0, False), (10, 0, False), (18, 0, True), (0, 5, False)]


@pytest.mark.parametrize("balance", [False, True, "documents"])
@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("method", ["ring", "allgather"])
def test_document_blocks_cover_the_document_mask_once(
    method: CPMethod, size: int, balance: LoadBalance, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every visible pair is in one block, no other pair is, and a causal block comes first."""
    num_tokens = 8 * size
    ring, num_masked = method == "ring", 0
    for seed, rank in product(range(30), range(size)):
        window, chunk, softcap = LIMITS[seed % len(LIMITS)]
        monkeypatch.setattr(ops, "MAX_TILE", (2, 5, 512)[seed % 3])
        documents = random_documents(seed, num_tokens, batch_size=3)
        seen_BTT = torch.zeros(3, num_tokens, num_tokens, dtype=torch.int64)
        boundaries = ops.document_boundaries(documents)
        split = split_sequences(boundaries, size, balance, ((window, chunk, 1),))
        listed = ops.DocumentBlocks(boundaries, rank, split, ring)
        blocks = listed.select(AttentionOptions(window=window, chunk=chunk, softcap=softcap))
        orders = [token_order(listed.split, i) for i in range(3)]
        visited = torch.zeros(3, num_tokens, dtype=torch.bool)
        ordered = range(rank, rank - size, -1) if ring else [0]
        for source in ordered:
            for block in blocks[source]:
                for i in range(3)[block.sequence]:
                    queries = orders[i][rank][block.queries]
                    keys = (orders[i][source] if ring else torch.arange(num_tokens))[block.keys]
                    assert visited[i, queries].all() != block.causal
                    visited[i, queries] = True
                    pairs = visible_pairs(queries, keys, block)
                    assert pairs.any(1).all()  # a softmax of nothing is NaN
                    assert pairs.any(0).all()
                    seen_BTT[i, queries.unsqueeze(1), keys] += pairs
                    assert not softcap or len(queries) <= ops.MAX_TILE
        expected = attention.document_mask(documents, window, chunk)
        assert isinstance(expected, Tensor)
        for i in range(3):
            own = orders[i][rank]
            assert torch.equal(seen_BTT[i, own], expected[i, 0, own].long())
        num_masked += int((documents[:, 1:] != documents[:, :-1]).any())
    assert num_masked > 20 * size


def test_document_blocks_beyond_a_window_are_not_listed() -> None:
    """The work is that of the window, not of the sequence."""
    for ring in (False, True):
        split = split_one(64_000, 4, False)
        blocks = list_blocks([[0, 64_000]], 3, split, ring, window=1000)
        area = sum(
            (b.queries.stop - b.queries.start) * (b.keys.stop - b.keys.start)
            for listed in blocks
            for b in listed
        )
        assert 16_000 * 1000 < area < 16_000 * 1600
        assert [bool(listed) for listed in blocks] == (
            [False, False, True, True] if ring else [True]
        )


def test_shard_sequence_uneven_sequence_is_refused() -> None:
    with pytest.raises(ValueError, match=r"do not divide 14 tokens"):
        split_one(14, 4, True)
    assert slice_of(torch.zeros(1, 12), 0, 4, balance=False).shape == (1, 3)


# --------------------------------------------------------------------------- one block


class OperatorRecorder(TorchDispatchMode):
    """Records operators, and the size of the largest result."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.names.append(str(func))
        sizes = [x.numel() for x in tree_leaves(result) if isinstance(x, Tensor)]
        self.largest = max(self.largest, *sizes, 0)
        return result


@pytest.mark.parametrize(
    ("operator", "dtype", "sequence"),
    [
        ("cudnn", torch.bfloat16, slice(None)),
        ("flash", torch.bfloat16, slice(0, 1)),
        ("efficient", torch.float32, slice(None)),
    ],
)
@pytest.mark.parametrize("causal", [False, True])
def test_cuda_attention_operators_take_our_arguments(
    operator: str,
    dtype: torch.dtype,
    sequence: slice,
    causal: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On the meta device: all that can be tested without a GPU."""
    cudnn = SDPBackend.CUDNN_ATTENTION.value
    monkeypatch.setattr(torch, "_fused_sdp_choice", lambda *tensors, **options: cudnn)

    def meta(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    num_keys = 6 if causal else 10
    q, k, v = meta(2, 6, 4, 8), meta(2, num_keys, 2, 8), meta(2, num_keys, 2, 8)
    block = ops.AttentionBlock(slice(6), slice(num_keys), causal, sequence)
    with OperatorRecorder() as operators:
        out, lse = ops.attend_block(q, k, v, block)
        assert (out.shape, out.dtype) == (q.shape, dtype)
        assert (lse.shape, lse.dtype) == ((2, 4, 6), torch.float32)
        grads = ops.attend_block_backward(meta(*q.shape), q, k, v, out, lse, block)
    assert [(x.shape, x.dtype) for x in grads] == [(x.shape, dtype) for x in (q, k, v)]
    name = f"aten._scaled_dot_product_{operator}_attention"
    attention = [name for name in operators.names if "attention" in name]
    assert attention == [f"{name}.default", f"{name}_backward.default"]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("softcap", "first"), [(0.0, -2), (0.7, None), (0.7, -1)])
def test_explicit_block_equals_autograd(softcap: float, first: int | None, causal: bool) -> None:
    """Output, log-sum-exp and gradients, with two query heads per key head."""
    torch.manual_seed(5)
    num_keys = 5 if causal else 7
    q, k, v, grad = (
        torch.randn(2, n, heads, 4, dtype=torch.float64)
        for n, heads in ((5, 4), (num_keys, 2), (num_keys, 2), (5, 4))
    )
    options = AttentionOptions(scale=0.9, softcap=softcap)
    block = ops.AttentionBlock(slice(5), slice(num_keys), causal, first=first)
    out, lse = ops.attend_block(q, k, v, block, options)
    grads = ops.attend_block_backward(grad, q, k, v, out, lse, block, options)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    wide_k, wide_v = (x.repeat_interleave(2, dim=2) for x in leaves[1:])
    scores = torch.einsum("bqhk,bshk->bhqs", leaves[0], wide_k) * 0.9
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    is_hidden = visible_pairs(torch.arange(5), torch.arange(num_keys), block) == 0
    scores = scores.masked_fill(is_hidden, -torch.inf)
    expected = torch.einsum("bhqs,bshk->bqhk", scores.softmax(-1), wide_v)
    torch.testing.assert_close(out, expected.detach())
    torch.testing.assert_close(lse, scores.logsumexp(-1).detach())
    torch.testing.assert_close(grads, torch.autograd.grad(expected, leaves, grad))


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiled_sums_of_blocks_equal_eager_ones(
    backend: str, dynamic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slices of larger tensors, as in attention, of two lengths."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    torch.manual_seed(3)
    for length in (5, 9):
        out, lse = torch.randn(2, 12, 4, 8), torch.randn(2, 4, 12)
        dkv = torch.randn(2, 2, 12, 2, 8)
        new = [torch.randn(2, length, n, 8).bfloat16() for n in (4, 4, 2, 2)]
        new_lse = torch.randn(2, 4, length)
        results = []
        for compiled in (False, True):
            sums = [x.clone() for x in (out, lse, dkv)]
            functions: list[Any] = [ops.merge_block, ops.add_gradients]
            if compiled:
                functions = [compile_function.__wrapped__(f, dynamic) for f in functions]
            merge, add = functions
            part = sums[0][:, 2 : 2 + length]
            merge(part, sums[1][..., 2 : 2 + length], new[0], new_lse)
            add(part, sums[2][:, :, 1 : 1 + length], *new[1:])
            results.append(sums)
        torch.testing.assert_close(*results)
        assert not torch.equal(results[0][2], dkv)


def test_merge_of_documents_has_one_graph_for_all_shapes() -> None:
    """Two, because a block of one query has other strides."""
    graphs = CompileCounter()
    merge = torch.compile(ops.merge_block, dynamic=True, backend=graphs)
    generator = random.Random(1)
    for length in [5, 1, 8, *(generator.randint(2, 256) for _ in range(30))]:
        out, lse = torch.randn(2, 512, 8, 16), torch.randn(2, 8, 512)
        start, row = generator.randint(0, 255), slice(generator.randint(0, 1), None)
        part = slice(start, start + length)
        new, new_lse = torch.randn(1, 8, length, 16).transpose(1, 2), torch.randn(1, 8, length)
        row = slice(row.start, row.start + 1)
        merge(out[row, part], lse[row, :, part], new, new_lse)
    assert graphs.frame_count == 2


# --------------------------------------------------------------------------- attention


def lengths(num_tokens: int, *cuts: int) -> Tensor:
    """Return document ids of a sequence with boundaries at ``cuts``."""
    sizes = [end - start for start, end in pairwise([0, *cuts, num_tokens])]
    return torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))


def documents_of(kind: str, num_tokens: int) -> Tensor | None:
    """Return ids for two sequences: one document, many short ones, a mixture, or a random one."""
    if kind.startswith("random"):
        return random_documents(int(kind.split()[1]), num_tokens)
    one, many = lengths(num_tokens), torch.arange(num_tokens) // 3
    long = lengths(num_tokens, 3, num_tokens // 2 - 1)
    rows = {"none": None, "one": [one, one], "many": [many, many], "mixed": [long, many]}[kind]
    return None if rows is None else torch.stack(rows)


def random_documents(seed: int, num_tokens: int, batch_size: int = 2) -> Tensor:
    """Return ids of up to seven documents in each sequence; every other one has the same id."""
    generator = torch.Generator().manual_seed(seed)
    cuts = torch.randint(num_tokens, (batch_size, seed % 7), generator=generator)
    starts = torch.zeros(batch_size, num_tokens, dtype=torch.int64).scatter(1, cuts, 1)
    return starts.cumsum(1) % 2  # a document is a run of equal ids


class AttentionModel(nn.Module):
    """The smallest model that `apply_context_parallel` accepts."""

    def __init__(self) -> None:
        super().__init__()
        self.attend: Any = attention.attend
        self.mask: Any = attention.document_mask

    def forward(self, *qkv: Tensor, documents: Any) -> Tensor:
        mask = None if documents is None else self.mask(documents)
        out: Tensor = self.attend(*qkv, mask)
        return out


def random_qkv(heads: int, groups: int, num_tokens: int, dtype: torch.dtype) -> list[Tensor]:
    """Full queries, keys, values and output gradient; the same on every rank."""
    torch.manual_seed(1)
    counts = (heads, groups, groups, heads)
    return [torch.randn(2, num_tokens, n, 8).to(dtype) for n in counts]


def with_gradients(model: nn.Module, tensors: list[Tensor], documents: Any) -> list[Tensor]:
    *qkv, grad = tensors
    leaves = [x.detach().clone().requires_grad_() for x in qkv]
    out = model(*leaves, documents=documents)
    out.backward(grad)
    return [out.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


KINDS = ["none", "one", "many", "mixed", *(f"random {seed}" for seed in range(1, 9))]
BOTH = [False, True]
BALANCES: list[LoadBalance] = [False, True, "documents"]


def attention_errors(
    methods: list[CPMethod],
    balances: Sequence[LoadBalance],
    dtype: torch.dtype = torch.float32,
    heads: int = 4,
    groups: int = 2,
) -> dict[str, list[float]]:
    """Return the largest relative error of output and gradients, by case."""
    rank, size = dist.get_rank(), dist.get_world_size()
    group = dist.new_group()
    exact = torch.promote_types(dtype, torch.float32)
    tensors = random_qkv(heads, groups, 24, dtype)
    errors = {}
    for kind, balance in product(KINDS, balances):
        documents = documents_of(kind, 24)
        expected = with_gradients(AttentionModel(), [x.to(exact) for x in tensors], documents)
        for method in methods:
            if balance == "documents" and (documents is None or method == "ulysses"):
                continue
            model, local_documents = AttentionModel(), None
            if documents is not None:
                local_documents = shard_documents(documents, method, rank, size, balance, CPU)
            split = split_of(local_documents, 24, size, balance)
            local = [shard_sequence(x, split)[rank] for x in tensors]
            apply_context_parallel(model, group, method, balance, compiled=False)
            result = with_gradients(model, local, local_documents)
            assert [x.shape for x in result] == [x.shape for x in local[:1] + local[:3]]
            assert {x.dtype for x in result} == {dtype}
            errors[f"{method}, balance {balance}, {kind}"] = [
                ((x - shard_sequence(y, split)[rank]).abs().max() / y.abs().max()).item()
                for x, y in zip(result, expected, strict=True)
            ]
    return errors


def check_errors(results: list[dict[str, list[float]]], limit: float) -> None:
    for rank, errors in enumerate(results):
        for case, result in errors.items():
            assert max(result) < limit, f"rank {rank}, {case}: {result}"


@pytest.mark.parametrize("ranks", [2, 4])
def test_context_parallel_attention_equals_one_process(ranks: int) -> None:
    check_errors(run_ranks(attention_errors, ranks, METHODS, BALANCES), 2e-6)


# Query heads, key heads, ranks: as many groups as heads, one group, groups that ranks share.
@pytest.mark.parametrize(
    ("heads", "groups", "ranks"),
    [pytest.param(4, 4, 2, marks=pytest.mark.slow), (4, 1, 2), (6, 2, 3), (6, 3, 2)],
)
def test_context_parallel_any_head_grouping_equals_one_process_in_float64(
    heads: int, groups: int, ranks: int
) -> None:
    args = (METHODS, [True], torch.float64, heads, groups)
    check_errors(run_ranks(attention_errors, ranks, *args), 1e-14)


def test_context_parallel_bfloat16_error_is_of_rounding() -> None:
    """Compare with float32 on equal inputs, so only inner rounding differs."""
    check_errors(run_ranks(attention_errors, 2, METHODS, [True], torch.bfloat16), 1.5e-2)


def largest_tensors(num_tokens: list[int]) -> dict[CPMethod, list[int]]:
    methods: list[CPMethod] = ["ring", "allgather"]
    group, result = dist.new_group(), {}
    for method in methods:
        model = AttentionModel()
        apply_context_parallel(model, group, method, True, compiled=False)
        result[method] = []
        for num, has_documents in product(num_tokens, BOTH):
            tensors = [torch.randn(1, num // group.size(), 2, 4) for _ in range(4)]
            with OperatorRecorder() as operators:
                documents = None
                if has_documents:
                    ids = torch.arange(num).unsqueeze(0) // 100
                    documents = shard_documents(ids, method, group.rank(), group.size(), True, CPU)
                with_gradients(model, tensors, documents)
            result[method].append(operators.largest)
    return result


def test_context_parallel_makes_no_mask() -> None:
    """Saved and communicated tensors grow linearly with the sequence, also with documents."""
    (results, _) = run_ranks(largest_tensors, 2, [128, 1024])
    for *small, large, large_with_documents in results.values():
        assert large == large_with_documents == 8 * small[0] == 8 * small[1]
        assert large < 512 * 512


def refusals() -> list[str]:
    group, messages = dist.new_group(), []
    for attempt in (without_attention, with_odd_heads):
        with pytest.raises(ValueError) as caught:  # noqa: PT011 (the caller checks the message)
            attempt(group)
        messages.append(str(caught.value))
    return messages


def without_attention(group: dist.ProcessGroup) -> None:
    apply_context_parallel(nn.Linear(2, 2), group, "ring", True, compiled=False)


def with_odd_heads(group: dist.ProcessGroup) -> None:
    model = AttentionModel()
    apply_context_parallel(model, group, "ulysses", False, compiled=False)
    q, k = torch.randn(1, 4, 3, 8), torch.randn(1, 4, 1, 8)
    model(q, k, k, documents=None)


def test_apply_context_parallel_unsupported_model_is_refused() -> None:
    (unreachable, uneven), _ = run_ranks(refusals, 2)
    assert "`attend`" in unreachable
    assert "2 context-parallel ranks do not divide 3 query heads" in uneven


# --------------------------------------------------------------------------- model


def small_model(**keys: Any) -> Decoder:
    """Build a model whose attention is far from uniform."""
    torch.manual_seed(2)
    shape = {"num_layers": 2, "dim": 32, "num_heads": 4, "num_kv_heads": 2, "ffn_dim": 64}
    limits = {"vocab_size": 96, "max_seq_len": 64, "rope_scaling": "none"}
    model = Decoder(DecoderConfig.model_validate(shape | limits | keys))
    for name, parameter in model.named_parameters():
        if "self_attn" in name:
            nn.init.normal_(parameter, 0.0, 1.0 if "sinks" in name else 0.3)
    return model


def loss_and_gradients(
    model: Decoder, tokens: Tensor, targets: Tensor, documents: Any, positions: Tensor
) -> tuple[float, dict[str, Tensor]]:
    model.zero_grad()
    logits = model(tokens, documents, positions)
    loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    loss.backward()
    grads = {name: param.grad for name, param in model.named_parameters() if param.grad is not None}
    return loss.item(), grads


def local_part(split: Split, rank: int, x_BT: Tensor) -> Tensor:
    """Return the rank's part of full sequences."""
    return shard_sequence(x_BT, split)[rank]


def model_errors(
    methods: list[CPMethod],
    balances: Sequence[LoadBalance],
    kinds: list[str],
    num_groups: int = 1,
    max_tile: int = ops.MAX_TILE,
    **keys: Any,
) -> dict[str, list[float]]:
    """Return relative errors by case: of the loss, and the largest of logits and gradients.

    With several groups, each group has other sequences, and blocks are recomputed.
    """
    ops.MAX_TILE = max_tile  # this process ends after the function
    rank, size = dist.get_rank(), dist.get_world_size() // num_groups
    index = rank // size
    groups = [dist.new_group(list(range(i * size, (i + 1) * size))) for i in range(num_groups)]
    group = groups[index]
    errors = {}
    for kind in kinds:
        torch.manual_seed(index)
        tokens, targets = torch.randint(96, (2, 2, 32)).unbind()
        documents = documents_of(kind, 32)
        positions = torch.arange(32).expand(2, -1)
        if documents is not None:  # positions start from 0 in each document
            same = documents.unsqueeze(2) == documents.unsqueeze(1)
            positions = positions - same.int().argmax(-1)
        one = small_model(**keys)
        loss, expected = loss_and_gradients(one, tokens, targets, documents, positions)
        with torch.no_grad():
            logits = one(tokens, documents, positions)
        for method, balance in product(methods, balances):
            if balance == "documents" and (documents is None or method == "ulysses"):
                continue
            many = small_model(**keys)
            apply_context_parallel(many, group, method, balance, compiled=False)
            if num_groups > 1:
                for block in many.layers.values():
                    block.forward = partial(checkpoint, block.forward, use_reentrant=False)
            local: Any = None
            if documents is not None:
                args = method, group.rank(), size, balance, CPU, many.config
                local = shard_documents(documents, *args)
            split = split_of(local, 32, size, balance)
            part = partial(local_part, split, group.rank())
            local_loss, grads = loss_and_gradients(
                many, part(tokens), part(targets), local, part(positions)
            )
            total = torch.tensor(local_loss, dtype=torch.float64)
            dist.all_reduce(total, group=group)
            assert grads.keys() == expected.keys()
            for grad in grads.values():
                dist.all_reduce(grad, group=group)
            with torch.no_grad():
                local_logits = many(part(tokens), local, part(positions))
            pairs = [(local_logits, part(logits)), *((grads[n], g) for n, g in expected.items())]
            errors[f"{method}, balance {balance}, {kind}"] = [
                abs(total.item() / loss - 1),
                *(((x - y).abs().max() / y.abs().max()).item() for x, y in pairs),
            ]
    return errors


@pytest.mark.slow  # the tests above cover attention, `COVERED` in tests/layouts.py models
@pytest.mark.parametrize("ranks", [2, 4])
def test_context_parallel_model_equals_one_process(ranks: int) -> None:
    check_errors(
        run_ranks(model_errors, ranks, METHODS, BALANCES, KINDS[:5], tied_embeddings=ranks == 2),
        5e-6,
    )


def test_context_parallel_two_groups_with_recomputation_equal_one_process() -> None:
    kinds = ["none", "mixed"]
    check_errors(run_ranks(model_errors, 4, METHODS, BALANCES[1:], kinds, num_groups=2), 5e-6)


LOCAL = {"layer_pattern": "LG"}
WINDOW = LOCAL | {"sliding_window": 5}
WIDE_WINDOW = LOCAL | {"sliding_window": 20}
CHUNK = LOCAL | {"attention_chunk": 6, "rope_pattern": "RN", "temperature_interval": 4}
SOFTCAP = {"attention_softcap": 2.0}
SINKS = {"attention_sinks": True}
# Values are narrower than keys, or wider.
LATENT = {
    "kv_rank": 12,
    "q_rank": 10,
    "num_kv_heads": 4,
    "head_dim": 16,
    "rope_head_dim": 6,
    "value_head_dim": 8,
}
WIDE_VALUES = LATENT | {"value_head_dim": 20}
LENGTHS = {"rope_scaling": "dynamic", "rope_factor": 4.0, "rope_original_context": 24}
FEATURES: dict[str, dict[str, Any]] = {
    "window": WINDOW,
    "window across ranks": WIDE_WINDOW,
    "chunks": CHUNK,
    "softcap": SOFTCAP,
    "sinks": SINKS,
    "scale": {"attention_scale": 0.6},
    "latent": LATENT,
    "wide values": WIDE_VALUES,
    "dynamic": LENGTHS,
}


def random_combination(seed: int) -> tuple[int, list[str], dict[str, Any]]:
    """Draw the number of ranks, documents, and keys of some features."""
    generator = random.Random(seed)
    names = generator.sample(sorted(FEATURES), generator.randint(1, 4))
    keys: dict[str, Any] = {}
    for name in names:
        keys |= FEATURES[name]
    if "sliding_window" in keys and "attention_chunk" in keys:
        del keys["attention_chunk"]
    if "kv_rank" in keys:  # a latent vector has no sinks and needs positions
        keys = {key: keys[key] for key in keys if key not in ("attention_sinks", "rope_pattern")}
    kinds = ["none", generator.choice(KINDS[1:])]
    keys["max_tile"] = generator.choice([3, 7, ops.MAX_TILE])
    return generator.choice([2, 2, 4]), kinds, keys


@pytest.mark.parametrize(
    "keys",
    [WINDOW | SINKS, WIDE_WINDOW | SOFTCAP, CHUNK | SINKS | LENGTHS, LATENT],
    ids=["window with sinks", "wide window with softcap", "chunks", "latent"],
)
def test_context_parallel_attention_options_equal_one_process(keys: dict[str, Any]) -> None:
    args = (METHODS, BALANCES[1:], ["none", "mixed"])
    check_errors(run_ranks(model_errors, 2, *args, max_tile=4, **keys), 5e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", FEATURES)
def test_context_parallel_each_feature_equals_one_process(name: str) -> None:
    args = (METHODS, BALANCES, KINDS[:5])
    check_errors(run_ranks(model_errors, 4, *args, **FEATURES[name]), 5e-6)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
def test_context_parallel_random_features_equal_one_process(seed: int) -> None:
    ranks, kinds, keys = random_combination(seed)
    check_errors(run_ranks(model_errors, ranks, METHODS, BALANCES, kinds, **keys), 5e-6)


# --------------------------------------------------------------------------- graphs, collectives


def trace_collectives() -> dict[str, dict[str, int]]:
    """Return the collectives of one forward and backward pass with fake tensors."""
    group = dist.new_group(backend="fake")
    results = {}
    for method, documents in product(METHODS, BOTH):
        model = small_model()
        apply_context_parallel(model, group, method, True, compiled=False)
        tokens = torch.zeros(2, 16, dtype=torch.int64)
        ids = shard_documents(tokens, method, group.rank(), 2, True, CPU) if documents else None
        with FakeTensorMode(allow_non_fake_inputs=True), OperatorRecorder() as operators:
            model(tokens[:, :8], ids, tokens[:, :8]).sum().backward()
        names = [name.split(".")[1] for name in operators.names if name.startswith("c10d.")]
        results[f"{method}, documents {documents}"] = {name: names.count(name) for name in names}
    return results


def test_context_parallel_fake_tensors_have_expected_collectives() -> None:
    """Two layers on two ranks."""
    (results, _) = run_ranks(trace_collectives, 2)
    assert results == {
        # Forward: one ring step.  Backward: that step again, and gradients around the ring.
        "ring, documents False": {"send": 2 * (1 + 1 + 2), "recv_": 2 * (1 + 1 + 2)},
        "ring, documents True": {"send": 8, "recv_": 8},
        "allgather, documents False": {"_allgather_base_": 2 * 2, "_reduce_scatter_base_": 2},
        "allgather, documents True": {"_allgather_base_": 4, "_reduce_scatter_base_": 2},
        "ulysses, documents False": {"alltoall_base_": 2 * 4},
        "ulysses, documents True": {"alltoall_base_": 8},
    }


def compiled_graphs() -> tuple[list[int], float]:
    """Return the number of graphs after each of three steps, and the last error."""
    from torch._dynamo.utils import counters

    rank, size = dist.get_rank(), dist.get_world_size()
    one, many = small_model(), small_model()
    apply_context_parallel(many, dist.new_group(), "ring", True, compiled=True)
    for block in many.layers.values():
        block.compile(backend="eager")
    graphs = []
    for kind in ("mixed", "many", "one"):
        tokens, documents = torch.randint(96, (2, 32)), documents_of(kind, 32)
        assert documents is not None
        positions = torch.arange(32).expand(2, -1)
        _, expected = loss_and_gradients(one, tokens, tokens, documents, positions)
        tokens, positions = (slice_of(x, rank, size, True) for x in (tokens, positions))
        blocks = shard_documents(documents, "ring", rank, size, True, CPU)
        _, grads = loss_and_gradients(many, tokens, tokens, blocks, positions)
        graphs.append(counters["stats"]["unique_graphs"])
    for grad in grads.values():
        dist.all_reduce(grad)
    error = max((grads[name] - grad).abs().max().item() for name, grad in expected.items())
    return graphs, error


def test_context_parallel_blocks_are_compiled_once_for_all_documents() -> None:
    for graphs, error in run_ranks(compiled_graphs, 2):
        assert graphs[0] > 0
        assert graphs == graphs[:1] * 3
        assert error < 1e-4
