from __future__ import annotations

import threading
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from weft.data.loader import (
    IGNORE_INDEX,
    Batch,
    Loader,
    Mixture,
    Packing,
    Prefetcher,
    SpanShuffle,
    TokenChunks,
    evaluation_batches,
    sample_index,
)
from weft.data.token_store import TokenStream
from weft.preparation.job_checks import check_length

SEPARATOR = 0
PACKINGS: list[Packing] = ["windows", "documents"]


@pytest.mark.parametrize("num_samples", [1, 5, 63, 64, 1000, 1537, 12_345])
@pytest.mark.parametrize("shuffle", [(1, 1), (3, 2), (8, 1), (2, 5), (100, 3)])
def test_span_shuffle_is_a_permutation_of_each_epoch(
    num_samples: int, shuffle: tuple[int, int]
) -> None:
    order = SpanShuffle(*shuffle)
    positions = np.arange(2 * num_samples)
    found = order.sample_index(positions, num_samples, 7)
    for epoch in found.reshape(2, num_samples):
        np.testing.assert_array_equal(np.sort(epoch), np.arange(num_samples))
    if num_samples > 63:
        assert not np.array_equal(*found.reshape(2, num_samples))
    alone = [order.sample_index(positions[n : n + 1], num_samples, 7)[0] for n in positions[::97]]
    np.testing.assert_array_equal(found[::97], alone)


def test_span_shuffle_reads_few_chunks_at_a_time() -> None:
    order, num_samples = SpanShuffle(32, 4), 64 * 28 * 6 + 265
    found = order.sample_index(np.arange(num_samples), num_samples, 3)
    chunks: set[int] = set()
    body = found[: 64 * 28 * 6].reshape(6, 28, 64).transpose(0, 2, 1).reshape(-1, 28)
    for row in body:  # what one stream reads before its next group
        group = set((row // 7).tolist())
        assert len(group) == 4
        assert group.isdisjoint(chunks)
        chunks |= group
    assert len({row.max() - row.min() for row in body}) > 100  # no neighbors in the file
    assert not np.array_equal(body[0] % 7, body[1] % 7)
    assert found[64 * 28 * 6 :].min() == 64 * 28 * 6


def test_span_shuffle_global_batches_do_not_depend_on_the_ranks() -> None:
    samples = TokenChunks(make_stream(64 * 300 + 1), 4, "windows", 0, shuffle=SpanShuffle(6, 3))
    mixture = Mixture([samples, replace(samples, seq_len=4, shuffle=None)], [0.7, 0.3])
    expected: list[Any] = []
    for dp_size in (1, 2, 3, 4, 12):
        batches = []
        for step in (0, 1, 5, 900):
            ranks = [
                loader.get_microbatches(120 * step)
                for loader in (
                    Loader(mixture, 1, 120, rank, dp_size, 7, numbers_tokens=True)
                    for rank in range(dp_size)
                )
            ]
            parts = [batch for rank in ranks for batch in rank]
            rows = torch.cat([torch.cat((b.token_ids_BT, b.tokens_BT), 1) for b in parts])
            batches.append(rows[rows[:, 0].argsort()])
        expected = expected or batches
        for ours, theirs in zip(batches, expected, strict=True):
            assert torch.equal(ours, theirs)


def make_stream(tokens: int, seed: int = 0) -> TokenStream:
    """Return a stream whose tokens equal their position, except separators (a fifth)."""
    ids = np.arange(1, tokens + 1, dtype=np.uint32)
    ids[np.random.default_rng(seed).random(tokens) < 0.2] = SEPARATOR
    return TokenStream(np.split(ids, [tokens // 3, tokens // 2]))


def flat(stream: TokenStream) -> NDArray[np.int64]:
    return stream.read_windows(np.array([0]), len(stream))[0]


def loader(stream: TokenStream, **changes: object) -> Loader:
    settings: dict[str, object] = {
        "seq_len": 8,
        "seed": 1,
        "packing": "documents",
        "global_batch_size": 24,
        "dp_rank": 0,
        "dp_size": 1,
        "microbatch_size": 24,
    }
    settings |= changes
    samples = TokenChunks(stream, settings.pop("seq_len"), settings.pop("packing"), SEPARATOR)  # type: ignore[arg-type]
    return Loader(Mixture([samples]), **settings)  # type: ignore[arg-type]


def join(batches: list[Batch]) -> list[torch.Tensor | None]:
    return [None if c[0] is None else torch.cat(c) for c in zip(*batches, strict=True)]  # type: ignore[arg-type]


def equal(a: list[torch.Tensor | None], b: list[torch.Tensor | None]) -> bool:
    pairs = zip(a, b, strict=True)
    return all(x is y is None or (x is not None and y is not None and x.equal(y)) for x, y in pairs)


# ------------------------------------------------------------------ order


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 7, 16, 17, 97, 1000, 1024, 1025, 10007])
def test_each_epoch_is_a_permutation(n: int) -> None:
    for epoch in range(4):
        positions = np.arange(epoch * n, (epoch + 1) * n)
        assert sorted(sample_index(positions, n, seed=3).tolist()) == list(range(n))


@pytest.mark.parametrize("n", [16, 97, 1024, 10007])
def test_epochs_and_seeds_differ_and_none_is_the_identity(n: int) -> None:
    orders = [
        tuple(sample_index(np.arange(epoch * n, (epoch + 1) * n), n, seed).tolist())
        for epoch in range(20)
        for seed in (0, 1, 2, 2**64 - 1)
    ]
    assert len(set(orders)) == len(orders)
    assert tuple(range(n)) not in orders


@pytest.mark.parametrize("n", [2, 3, 4])
def test_order_of_tiny_epochs_takes_each_permutation(n: int) -> None:
    positions = np.arange(400 * n)
    orders = {tuple(o) for o in sample_index(positions, n, 0).reshape(-1, n).tolist()}
    assert len(orders) == {2: 2, 3: 6, 4: 24}[n]


def test_order_looks_random() -> None:
    n = 4000
    order = sample_index(np.arange(n), n, 0)
    assert abs(np.corrcoef(np.arange(n), order)[0, 1]) < 0.06
    assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 0.06
    assert (order == np.arange(n)).sum() < 10
    # The positions of one chunk are spread evenly over the epochs.
    landings = sample_index(np.arange(1000) * 64, 64, 0)
    assert np.bincount(landings, minlength=64).max() < 40


def test_sample_index_depends_on_the_position_alone() -> None:
    n = 101
    positions = np.random.default_rng(0).integers(0, 5 * n, 300)
    together = sample_index(positions, n, 5)
    single = [int(sample_index(np.array([position]), n, 5)[0]) for position in positions]
    assert together.tolist() == single
    assert sample_index(positions[::-1], n, 5).tolist() == single[::-1]


@pytest.mark.parametrize("n", [2**40, 2**40 - 87, 2**39 + 1])
def test_order_of_huge_epochs_is_a_permutation(n: int) -> None:
    positions = np.concatenate([np.arange(5000), n - 5000 + np.arange(5000)])
    index = sample_index(positions, n, 0)
    assert index.min() >= 0
    assert index.max() < n
    assert len(np.unique(index)) == len(index)
    assert index.max() > n * 0.99


def test_order_for_a_seed_is_frozen() -> None:
    # Runs resume by this order, so it may never change.
    assert sample_index(np.arange(8), 10, 0).tolist() == FROZEN
    with pytest.raises(ValueError, match="num_samples"):
        sample_index(np.arange(3), 0, 0)


FROZEN = [1, 4, 8, 6, 5, 0, 9, 3]


# ------------------------------------------------------------------ batches


def test_an_epoch_reads_every_window_once() -> None:
    stream = make_stream(24 * 8 * 4 + 1)
    data = loader(stream, packing="windows")
    assert len(data.mixture.sources[0]) == 96
    rows = torch.cat([data.get_microbatches(c)[0].tokens_BT for c in range(0, 96, 24)]).numpy()
    expected = flat(stream)[:-1].reshape(96, 8)
    assert sorted(map(tuple, rows)) == sorted(map(tuple, expected))


@pytest.mark.parametrize("packing", PACKINGS)
def test_global_batch_is_the_same_on_any_layout(packing: Packing) -> None:
    stream = make_stream(700)
    for consumed in (0, 24, 7, 80, 1000):  # 87 windows: some batches cross epochs
        full = join(loader(stream, packing=packing).get_microbatches(consumed))
        assert full[0] is not None
        assert full[0].shape == (24, 8)
        for dp_size, microbatch in ((1, 5 - 1), (2, 12), (3, 2), (4, 3), (24, 1)):
            ranks = [
                loader(
                    stream, packing=packing, dp_rank=r, dp_size=dp_size, microbatch_size=microbatch
                ).get_microbatches(consumed)
                for r in range(dp_size)
            ]
            assert all(b.tokens_BT.shape == (microbatch, 8) for rank in ranks for b in rank)
            assert equal(join([b for rank in ranks for b in rank]), full)


@pytest.mark.parametrize("dp_size", [1, 2, 12])
@pytest.mark.parametrize("groups", [1, 2, 3, 5])
def test_replica_groups_share_a_global_batch(dp_size: int, groups: int) -> None:
    """Groups may have unequal shares; a group without rows has a batch without targets."""
    stream = make_stream(700)
    for consumed in (0, 80):
        full = join(loader(stream).get_microbatches(consumed))
        parts = []
        for group in range(groups):
            ranks = [
                loader(stream, dp_rank=r, dp_size=dp_size, microbatch_size=2).get_microbatches(
                    consumed, group, groups
                )
                for r in range(dp_size)
            ]
            assert len({len(batches) for batches in ranks}) == 1, "ranks of a group work in step"
            for batches in ranks:
                if 24 // dp_size * (group + 1) // groups == 24 // dp_size * group // groups:
                    assert len(batches) == 1
                    assert (batches[0].targets_BT == IGNORE_INDEX).all()
                else:
                    parts += batches
        assert equal(join(parts), full)


def test_batches_depend_on_consumed_alone() -> None:
    stream = make_stream(700)
    data = loader(stream)
    first = join(data.get_microbatches(48))
    data.get_microbatches(0)
    assert equal(join(data.get_microbatches(48)), first)
    # Batches of 12 read the same samples as batches of 24.
    halves = loader(stream, global_batch_size=12, microbatch_size=12)
    assert equal(join(halves.get_microbatches(48) + halves.get_microbatches(60)), first)
    assert not equal(join(loader(stream, seed=2).get_microbatches(48)), first)


def test_windows_predict_the_next_token() -> None:
    [batch] = loader(make_stream(700), packing="windows").get_microbatches(0)
    assert batch.documents_BT is batch.positions_BT is None
    assert batch.tokens_BT.dtype == batch.targets_BT.dtype == torch.int64
    assert batch.targets_BT[:, :-1].equal(batch.tokens_BT[:, 1:])
    assert not (batch.targets_BT == IGNORE_INDEX).any()
    # Tokens other than separators equal their position, so the last target is checked too.
    last, target = batch.tokens_BT[:, -1], batch.targets_BT[:, -1]
    known = (last != SEPARATOR) & (target != SEPARATOR)
    assert known.any()
    assert target[known].equal(last[known] + 1)


def by_hand(row: list[int]) -> tuple[list[int], list[int], list[int]]:
    """Compute targets, documents and positions of T + 1 tokens, one token at a time."""
    targets, documents, positions = [], [], []
    document = position = 0
    for token, following in pairwise(row):
        documents.append(document)
        positions.append(position)
        if token == SEPARATOR:
            targets.append(IGNORE_INDEX)
            document, position = document + 1, 0
        else:
            targets.append(following)
            position += 1
    return targets, documents, positions


def test_documents_of_a_row_are_separate() -> None:
    stream = make_stream(2000)
    data = loader(stream, packing="documents", seq_len=16)
    ids = flat(stream)
    for consumed in range(0, 120, 24):
        [batch] = data.get_microbatches(consumed)
        positions = sample_index(
            np.arange(consumed, consumed + 24), len(data.mixture.sources[0]), data.seed
        )
        for i, position in enumerate(positions.tolist()):
            row = ids[position * 16 : position * 16 + 17].tolist()
            assert batch.tokens_BT[i].tolist() == row[:-1]
            assert batch.documents_BT is not None
            assert batch.positions_BT is not None
            result = [
                t[i].tolist() for t in (batch.targets_BT, batch.documents_BT, batch.positions_BT)
            ]
            assert result == list(by_hand(row))


def test_check_length_short_text_is_a_problem_of_seq_len() -> None:
    assert check_length(9, 8, "the train text") == []
    [error] = check_length(8, 8, "the train text")
    assert error.key == "train.seq_len"
    assert "8 tokens" in error.rule
    assert "at most 7" in error.remedy


def test_loader_dp_size_that_does_not_divide_the_batch_is_refused() -> None:
    with pytest.raises(ValueError, match="dp_size"):
        loader(make_stream(700), dp_size=5, microbatch_size=1)


# ------------------------------------------------------------------ evaluation


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("sequences", [1, 5, 12, 1000])
@pytest.mark.parametrize(("dp_size", "microbatch"), [(1, 100), (1, 3), (3, 2), (4, 1), (8, 4)])
def test_evaluation_counts_each_window_once(
    packing: Packing, sequences: int, dp_size: int, microbatch: int
) -> None:
    stream = make_stream(13 * 8 + 5)
    validation = Mixture([TokenChunks(stream, 8, packing, SEPARATOR)])
    per_rank = [
        list(evaluation_batches(validation, sequences, r, dp_size, microbatch))
        for r in range(dp_size)
    ]
    assert len({tuple(b.tokens_BT.shape for b in rank) for rank in per_rank}) == 1
    assert per_rank[0][0].tokens_BT.shape[0] <= microbatch
    together = join([batch for rank in per_rank for batch in rank])
    ids = flat(stream)
    windows = min(sequences, 13)
    spread = [w * 13 // windows for w in range(windows)]
    expected = torch.tensor([ids[w * 8 : w * 8 + 9].tolist() for w in spread])
    tokens, targets = together[0], together[1]
    assert tokens is not None
    assert targets is not None
    assert tokens[:windows].equal(expected[:, :-1])
    target = expected[:, 1:].clone()
    if packing == "documents":
        target[expected[:, :-1] == SEPARATOR] = IGNORE_INDEX
    assert targets[:windows].equal(target)
    assert (targets[windows:] == IGNORE_INDEX).all()
    assert (together[2] is None) == (packing == "windows")


@pytest.mark.parametrize("packing", PACKINGS)
def test_short_validation_text_is_one_padded_row(packing: Packing) -> None:
    stream = TokenStream([np.array([5, 6, 7, SEPARATOR], np.uint16)])
    validation = Mixture([TokenChunks(stream, 8, packing, SEPARATOR)])
    counted = 0
    for rank in range(2):
        [batch] = evaluation_batches(validation, 64, rank, 2, 4)
        assert batch.tokens_BT.shape == (1, 8)
        if rank == 0:
            assert batch.tokens_BT[0, :4].tolist() == [5, 6, 7, SEPARATOR]
            assert batch.targets_BT[0, :3].tolist() == [6, 7, SEPARATOR]
        counted += int((batch.targets_BT != IGNORE_INDEX).sum())
    assert counted == 3


# ------------------------------------------------------------------ prefetching


class RecordingLoader(Loader):
    """Record the thread that makes each batch, and fail at the batch of sample 72."""

    def get_microbatches(self, *position: int) -> list[Batch]:
        CALLS.append((position, threading.current_thread().name))
        if position[0] == 72:
            raise OSError("no such page")
        return super().get_microbatches(*position)


CALLS: list[tuple[tuple[int, ...], str]] = []
MAIN = threading.current_thread().name


def prefetch(stream: TokenStream) -> tuple[Prefetcher, Loader]:
    CALLS.clear()
    plain: Any = loader(stream)
    same = {name: getattr(plain, name) for name in plain.__match_args__}
    return Prefetcher(RecordingLoader(**same), torch.device("cpu"), use_thread=True), plain


def test_prefetcher_returns_the_requested_batches() -> None:
    """Requests are in order, out of order and of replica groups; a thread prefetches the next."""
    ahead, plain = prefetch(make_stream(3000))
    requested = [
        (0, 0, 1),
        (24, 0, 1),
        (48, 0, 1),
        (240, 0, 1),
        (264, 1, 2),
        (288, 1, 2),
        (0, 0, 1),
    ]
    for position in requested:
        assert equal(
            join(ahead.get_microbatches(*position)), join(plain.get_microbatches(*position))
        )
    ahead.close()
    by_main = [location for location, thread in CALLS if thread == MAIN]
    assert by_main == [(0, 0, 1), (240, 0, 1), (264, 1, 2), (0, 0, 1)]
    by_thread = [location for location, thread in CALLS if thread == "weft-data"]
    assert by_thread == [(consumed + 24, *groups) for consumed, *groups in requested]


def test_prefetcher_error_is_raised_when_the_batch_is_requested() -> None:
    ahead, plain = prefetch(make_stream(3000))
    ahead.get_microbatches(48, 0, 1)  # meanwhile the prefetch of 72 fails
    assert equal(
        join(ahead.get_microbatches(0, 0, 1)), join(plain.get_microbatches(0))
    )  # the failed batch is not requested
    ahead.get_microbatches(48, 0, 1)
    with pytest.raises(OSError, match="no such page"):
        ahead.get_microbatches(72, 0, 1)
    assert equal(join(ahead.get_microbatches(96, 0, 1)), join(plain.get_microbatches(96)))
    ahead.close()


def test_prefetcher_close_leaves_no_thread() -> None:
    def threads() -> list[str]:
        return [thread.name for thread in threading.enumerate() if thread.name == "weft-data"]

    ahead, _ = prefetch(make_stream(3000))
    ahead.get_microbatches(0, 0, 1)
    assert threads() == ["weft-data"]
    ahead.close()
    assert threads() == []
    Prefetcher(loader(make_stream(3000)), torch.device("cpu"), use_thread=False).close()
    assert threads() == []


def test_batch_does_not_depend_on_earlier_lookups() -> None:
    """The sampler computes positions for many steps at a time."""
    stream = make_stream(3000)
    for changes in (
        {},
        {"dp_rank": 1, "dp_size": 4},
        {"global_batch_size": 1100, "microbatch_size": 1100},
    ):
        used, size = loader(stream, **changes), changes.get("global_batch_size", 24)
        for consumed in [*range(0, 25 * size, size), 7, 7 + size, 5 * size]:
            fresh = loader(stream, **changes)
            for groups in ((), (1, 3)):
                assert equal(
                    join(used.get_microbatches(consumed, *groups)),
                    join(fresh.get_microbatches(consumed, *groups)),
                )
