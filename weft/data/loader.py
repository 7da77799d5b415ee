"""Microbatches of any global batch, for any rank.

*Samples.*  A sample is one sequence of a batch.  Sample ``w`` of a token stream is the window of
tokens [w T, w T + T + 1), where T is ``seq_len``; neighbors share one token, the last target of one
and the first input of the next.  There are (tokens - 1) // T samples; the remaining tokens are
never read.  A window may begin inside a document; ``packing="documents"`` still keeps attention and
loss inside each document.  Conversations, and documents with ``packing="best_fit"``, are packed
into sequences without splitting (`weft.data.packing`).

*Order.*  A run must resume exactly on any number of ranks.  A loader that keeps state per rank or
per worker (positions, shuffle buffers, generators) makes that hard: the states of 8 ranks do not
define what 6 ranks should read next.  So the only state is one integer, ``consumed``: the samples
that all ranks have trained on.  A *position* is the index of a sample in the order of the run.

*One source.*  Position ``c`` belongs to epoch c // N, where N is the number of samples.  Each epoch
visits every sample once, in another order.  A shuffled list would take O(N) memory per process and
O(N) time per start.  Instead the order is a permutation that can be evaluated at any position: a
Feistel network, as in block ciphers, keyed by seed and epoch.  It permutes 0 .. 4^h - 1 for some h.
To permute 0 .. N - 1, it is applied again while the result is outside (*cycle walking*), fewer than
four times on average.

*A mixture.*  The positions form rounds of `ROUND_SIZE`, all with the same assignment of positions
to sources.  Each source has its share of a round, spread as evenly as the multiples of the golden
ratio, so that no batch has many more samples of a source than another.  The position decides the
source and how many of its samples came before; that count decides the sample.  So the order within
a source does not depend on the mixture.

*Two levels.*  With ``data.shuffle_span_gib`` the order of a source is that of `SpanShuffle`, which
needs a small part of the tokens at a time.  It is a permutation of the samples, too.

*Ranks.*  The global batch at ``consumed`` is the samples at positions consumed .. consumed + GB - 1
of that order.  The loader then divides it over ranks and microbatches, so neither the number of
ranks nor the microbatch size changes what a step trains on.

Shapes: B sequences of a microbatch, T tokens of a sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from operator import itemgetter
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any, Literal, NamedTuple, Protocol, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import pad

from weft.config.errors import WeftError
from weft.config.schema import DataSection
from weft.data.dataset import Dataset
from weft.data.packing import PackedSequences, SwappedAnswers, pack_split, swap_answers
from weft.data.remote_tokens import (
    TRAIN,
    WAIT_SECONDS,
    Block,
    ReaderClient,
    RemoteColumn,
    beat_if_waiting,
)
from weft.data.token_store import Ints, SplitName, Store, TokenStream

LOOKUP_POSITIONS = 512  # positions per lookup
# Steps whose blocks of a store in a bucket a rank names in advance: enough to hide the latency of
# the requests, and few enough that a small cache holds their blocks.
MIN_NAMED_STEPS, MAX_NAMED_STEPS = 16, 64
IGNORE_INDEX = -100  # target without loss, as in torch's cross_entropy

Packing = Literal["windows", "documents"]

# --------------------------------------------------------------------------- order

Words = NDArray[np.uint64]

_ROUNDS = 8
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def sample_index(positions: Ints, num_samples: int, seed: int) -> Ints:
    """Return the sample at each position of a run with one source.

    Args:
        positions: int64 (n,), the number of samples before.
        num_samples: samples in the source, 1 to 2**40.
        seed: a non-negative integer.

    Returns:
        int64 (n,) in 0 .. num_samples - 1; over each epoch, a permutation.
    """
    if not 1 <= num_samples <= 1 << 40:
        raise ValueError(f"num_samples = {num_samples} must be from 1 to 2**40")
    epoch, offset = np.divmod(np.asarray(positions, np.int64), num_samples)
    return _permute(offset, num_samples, _epoch_keys(epoch, seed))


def _epoch_keys(epoch: Ints, seed: int) -> Words:
    """Return the key of the permutation of each epoch."""
    start = np.array([seed % (1 << 64)], np.uint64)
    return _mix(_mix(start) + epoch.astype(np.uint64) * _GOLDEN)


def _permute(values: Ints, size: int, keys: Words) -> Ints:
    """Permute 0 .. size - 1 by each value's key."""
    half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
    index = _feistel(values.astype(np.uint64), keys, half_bits)
    while len(outside := np.flatnonzero(index >= size)):
        index[outside] = _feistel(index[outside], keys[outside], half_bits)
    return index.astype(np.int64)


NUM_STREAMS = 64  # groups that are read at a time, over all nodes
CHUNK_BYTES = 64 << 20  # many blocks of a store, because a chunk needs all of those at its ends


class SpanShuffle(NamedTuple):
    """Shuffle chunks of neighboring samples, then samples in groups of chunks.

    An epoch permutes the chunks.  ``group_chunks`` consecutive ones are a group, whose samples are
    permuted.  Position p takes the next sample of stream p mod `NUM_STREAMS`, and a stream reads
    one group after the other.  So a rank that trains on some streams needs few groups at a time,
    and ranks with other streams need others.

    The size of a chunk divides the samples evenly, into groups of at most ``group_samples``.  The
    few remaining samples, less than one per chunk, end the epoch.
    """

    group_samples: int
    group_chunks: int

    def sample_index(self, positions: Ints, num_samples: int, seed: int) -> Ints:
        """Return the sample at each position: see `sample_index`."""
        epoch, offset = np.divmod(np.asarray(positions, np.int64), num_samples)
        keys = _epoch_keys(epoch, seed)
        num_rows = -(-num_samples // (self.group_samples * NUM_STREAMS))
        num_chunks = num_rows * NUM_STREAMS * self.group_chunks
        chunk_samples = num_samples // num_chunks
        group_size, body = chunk_samples * self.group_chunks, chunk_samples * num_chunks
        index = offset.copy()
        if len(last := np.flatnonzero(offset >= body)):
            index[last] = body + _permute(offset[last] - body, num_samples - body, keys[last])
        if len(first := np.flatnonzero(offset < body)):
            row, place = np.divmod(offset[first] // NUM_STREAMS, group_size)
            group = row * NUM_STREAMS + offset[first] % NUM_STREAMS
            group_keys = _mix(keys[first] + (group + 2).astype(np.uint64) * _GOLDEN)
            place = _permute(place, group_size, group_keys)
            chunk, rest = np.divmod(group * group_size + place, chunk_samples)
            chunk = _permute(chunk, num_chunks, _mix(keys[first]))
            index[first] = chunk * chunk_samples + rest
        return index

    def group_samples_of(self, positions: Ints, num_samples: int, seed: int) -> tuple[Ints, int]:
        """Return the first samples of the chunks in positions' groups, and their size."""
        positions = np.asarray(positions, np.int64)
        num_rows = -(-num_samples // (self.group_samples * NUM_STREAMS))
        num_chunks = num_rows * NUM_STREAMS * self.group_chunks
        chunk_samples = num_samples // num_chunks
        group_size = chunk_samples * self.group_chunks
        epoch, offset = np.divmod(positions, num_samples)
        is_first = offset < chunk_samples * num_chunks
        epoch, offset = epoch[is_first], offset[is_first]
        group = offset // NUM_STREAMS // max(1, group_size) * NUM_STREAMS + offset % NUM_STREAMS
        _, unique = np.unique(epoch << 40 | group, return_index=True)
        unique.sort()  # in the order of first use
        chunks = group[unique, None] * self.group_chunks + np.arange(self.group_chunks)
        keys = np.repeat(_mix(_epoch_keys(epoch[unique], seed)), self.group_chunks)
        return _permute(chunks.ravel(), num_chunks, keys) * chunk_samples, chunk_samples


def span_shuffle(span_bytes: int, sample_bytes: int) -> SpanShuffle | None:
    """Return the shuffle within ``span_bytes`` of tokens; None for 0."""
    if not span_bytes:
        return None
    group_bytes = span_bytes // NUM_STREAMS
    return SpanShuffle(max(1, group_bytes // sample_bytes), -(-group_bytes // CHUNK_BYTES) or 1)


def _feistel(value: Words, keys: Words, half_bits: int) -> Words:
    """Permute 0 .. 4**half_bits - 1 with a Feistel network, one key per value."""
    bits, low = np.uint64(half_bits), np.uint64((1 << half_bits) - 1)
    left, right = value >> bits, value & low
    for number in range(_ROUNDS):
        noise = _mix(_mix(keys + np.uint64(number + 1)) + right)
        left, right = right, left ^ (noise & low)
    return (left << bits) | right


def _mix(value: Words) -> Words:
    """Apply the splitmix64 step: every input bit affects every output bit."""
    value = value + _GOLDEN
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))


ROUND_SIZE = 10_007  # a prime, so that no batch size divides it
_GOLDEN_STEP = 6_185  # about ROUND_SIZE over the golden ratio


class MixtureSampler:
    """Assignment of a run's positions to the sources of a mixture.

    Args:
        shares: one per source, summing to one; rounded to multiples of 1 / `ROUND_SIZE`.

    Raises:
        ValueError: there are more sources than positions in a round, or a share is not positive.
    """

    def __init__(self, shares: Sequence[float]) -> None:
        self.counts = apportion(shares, ROUND_SIZE)
        spread = np.arange(ROUND_SIZE, dtype=np.int64) * _GOLDEN_STEP % ROUND_SIZE
        self._sources = np.searchsorted(np.cumsum(self.counts), spread, side="right")
        self._num_before = np.empty(ROUND_SIZE, np.int64)
        for source, count in enumerate(self.counts):
            self._num_before[self._sources == source] = np.arange(count)

    def assign(self, positions: Ints) -> tuple[Ints, Ints]:
        """Return the source of each position, and its samples before that position.

        Args:
            positions: int64 (n,).

        Returns:
            Two int64 (n,).
        """
        rounds, offset = np.divmod(np.asarray(positions, np.int64), ROUND_SIZE)
        sources = self._sources[offset]
        return sources, rounds * self.counts[sources] + self._num_before[offset]


def apportion(shares: Sequence[float], total: int) -> Ints:
    """Divide ``total`` items by ``shares``, at least one each.

    Returns int64 counts that sum to ``total``.

    Raises:
        ValueError: there are too few items, or a share is not positive.
    """
    exact = np.asarray(shares, np.float64)
    if len(exact) > total or not (exact > 0).all():
        raise ValueError(f"{total} items cannot be divided by the shares {list(shares)}")
    exact = exact / exact.sum() * total
    counts = np.maximum(1, np.floor(exact)).astype(np.int64)
    while (missing := total - int(counts.sum())) != 0:
        # Correct the counts that are furthest from their share.
        deficit = (exact - counts) * np.sign(missing)
        deficit[(counts == 1) & (missing < 0)] = -np.inf
        largest = np.argsort(-deficit, kind="stable")[: abs(missing)]
        counts[largest[np.isfinite(deficit[largest])]] += np.sign(missing)
    result: Ints = counts
    return result


# --------------------------------------------------------------------------- samples


class Batch(NamedTuple):
    """Sequences: int64 (B, T) tensors, except ``sources_B``, int64 (B,).

    ``targets_BT`` is the next token, or IGNORE_INDEX.  ``documents_BT`` numbers the documents of
    each sequence from 0, ``positions_BT`` counts from 0 inside each; a separator belongs to the
    document that it ends, or to the next one if documents begin with it.  Both are None with
    ``packing="windows"``.  ``sources_B``, the source of each sequence, is None without a mixture.
    `Pairs` and `LabeledAnswers` set ``references_BP2``, float32, and the latter ``labels_BP`` and
    ``swapped_B4T``.  ``baseline_B``, float32, is that of the global batch, for each sequence: see
    `weft.training.loss.Objective`.  `with_later` sets ``later_BTK``.
    ``token_ids_BT`` numbers the tokens of a run from 0: see `Loader`.  ``weights_BT``, float32, are
    factors of the targets' losses; None: 1.  ``lengths_BT`` is the number of tokens of each token's
    document; None: not computed, or the sequence is one document.
    """

    tokens_BT: torch.Tensor
    targets_BT: torch.Tensor
    documents_BT: torch.Tensor | None
    positions_BT: torch.Tensor | None
    sources_B: torch.Tensor | None = None
    references_BP2: torch.Tensor | None = None
    token_ids_BT: torch.Tensor | None = None
    later_BTK: torch.Tensor | None = None
    weights_BT: torch.Tensor | None = None
    lengths_BT: torch.Tensor | None = None
    labels_BP: torch.Tensor | None = None
    swapped_B4T: torch.Tensor | None = None
    baseline_B: torch.Tensor | None = None

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> Batch:
        """Return the batch with ``function`` applied to each tensor."""
        return Batch._make(tensor if tensor is None else function(tensor) for tensor in self)

    def map_tokens(self, function: Callable[[torch.Tensor], torch.Tensor]) -> Batch:
        """Apply ``function`` to the tensors with a value of each token, except documents."""
        names = ("tokens_BT", "targets_BT", "weights_BT", "positions_BT", "later_BTK")
        columns = {name: getattr(self, name) for name in (*names, "token_ids_BT", "lengths_BT")}
        return self._replace(
            **{name: function(column) for name, column in columns.items() if column is not None}
        )

    def remove_targets(self, sequences: slice) -> None:
        """Replace the targets of sequences by IGNORE_INDEX."""
        self.targets_BT[sequences] = IGNORE_INDEX
        if self.swapped_B4T is not None:
            self.swapped_B4T[sequences, 1] = IGNORE_INDEX

    def with_swapped_answers(self) -> Batch:
        """Return the batch with answers to other prompts: see `LabeledAnswers`."""
        assert self.swapped_B4T is not None
        columns = (column.contiguous() for column in self.swapped_B4T.unbind(1))
        names = ("tokens_BT", "targets_BT", "documents_BT", "positions_BT")
        return self._replace(swapped_B4T=None, **dict(zip(names, columns, strict=True)))

    def with_later(self, count: int) -> Batch:
        """Return the batch with the tokens and targets 1 to ``count`` (K) positions later.

        The targets, with their weights, follow those of the batch: ((1 + K) B, T).  Beyond the
        sequence tokens are 0, and targets IGNORE_INDEX, as in other documents.
        """

        def later(column_BT: torch.Tensor, fill: float) -> torch.Tensor:
            return pad(column_BT, (0, count), value=fill)[:, 1:].unfold(1, count, 1)

        targets_BTK = later(self.targets_BT, IGNORE_INDEX)
        if self.documents_BT is not None:
            is_other_BTK = later(self.documents_BT, -1) != self.documents_BT[..., None]
            targets_BTK = targets_BTK.masked_fill(is_other_BTK.to(targets_BTK.device), IGNORE_INDEX)
        targets_BT = torch.cat((self.targets_BT, *targets_BTK.unbind(2)))
        weights_BT = self.weights_BT
        if weights_BT is not None:
            weights_BT = torch.cat((weights_BT, *later(weights_BT, 0.0).unbind(2)))
        return self._replace(
            targets_BT=targets_BT, weights_BT=weights_BT, later_BTK=later(self.tokens_BT, 0)
        )


class Samples(Protocol):
    """Map-style dataset of sequences of one length."""

    def __len__(self) -> int: ...

    def get_batch(self, indices: Ints) -> Batch:
        """Return the samples of these indices, int64 (n,), each below ``len(self)``."""
        ...


@dataclass(frozen=True)
class TokenChunks:
    """A token stream, split into windows.

    Args:
        stream: if it is shorter than a window, it is padded, without targets.
        seq_len: tokens per sample, T.
        packing: ``documents`` keeps attention (by ``documents_BT``) and loss inside a document.
        separator: id of the token that ends a document.
        starts_at_separator: a document begins with the separator that ends the one before it.
        shuffle: order of a run; None: all samples are shuffled together.
    """

    stream: TokenStream
    seq_len: int
    packing: Packing
    separator: int
    starts_at_separator: bool = False
    shuffle: SpanShuffle | None = None

    def __len__(self) -> int:
        return max(min(1, len(self.stream)), (len(self.stream) - 1) // self.seq_len)

    def get_batch(self, indices: Ints) -> Batch:
        """Return windows of the stream; see `Samples.get_batch`."""
        length = min(self.seq_len + 1, len(self.stream))
        windows = self.stream.read_windows(indices * self.seq_len, length)
        if missing := self.seq_len + 1 - length:
            windows = np.pad(windows, ((0, 0), (0, missing)), constant_values=self.separator)
        batch = _make_batch(windows, self.packing, self.separator, self.starts_at_separator)
        if missing:
            batch.targets_BT[:, -missing:] = IGNORE_INDEX
        return batch


@dataclass(frozen=True)
class PackedDocuments:
    """Sequences of whole documents; attention and loss stay inside each document.

    The rest of a sequence is padded with the separator, as one more document without targets.

    Args:
        stream: the tokens of the documents.
        loss_mask: 1 where a token is a target, else 0; None: all tokens are.
        separator: any token.
        weights: factors of the losses of the stream's tokens as targets; None: 1.
        scores: the last token of a document is an input, too, and the only one with a target: of
            these sequences a model computes a score at each target, whose value has no meaning.
    """

    stream: TokenStream
    loss_mask: TokenStream | None
    packed: PackedSequences
    seq_len: int
    separator: int
    weights: NDArray[np.float32] | RemoteColumn | None = None
    scores: bool = False

    def __len__(self) -> int:
        return len(self.packed)

    def get_batch(self, indices: Ints) -> Batch:
        """Return packed documents; see `Samples.get_batch`."""
        shape = (len(indices), self.seq_len)
        tokens, targets = np.full(shape, self.separator), np.full(shape, IGNORE_INDEX)
        documents, positions = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
        weights = None if self.weights is None else np.ones(shape, np.float32)
        packed = self.packed
        for row, sample in enumerate(indices.tolist()):
            end = 0
            document_ids = packed.documents_of(sample)
            for index, document in enumerate(document_ids.tolist()):
                start, length = packed.starts[document : document + 1], packed.lengths[document]
                span = slice(end, end + int(length))
                if self.scores:
                    [tokens[row, span]] = self.stream.read_windows(start, int(length))
                    targets[row, span.stop - 1] = tokens[row, span.stop - 1]
                else:
                    [window] = self.stream.read_windows(start, int(length) + 1)
                    tokens[row, span], targets[row, span] = window[:-1], window[1:]
                    if self.loss_mask is not None:
                        [mask] = self.loss_mask.read_windows(start, len(window))
                        targets[row, span][mask[1:] == 0] = IGNORE_INDEX
                if self.weights is not None and weights is not None:
                    begin = int(start[0]) + 1
                    weights[row, span] = self.weights[begin : begin + int(length)]
                documents[row, span] = index
                positions[row, span] = np.arange(length)
                end = span.stop
            documents[row, end:] = len(document_ids)
            positions[row, end:] = np.arange(self.seq_len - end)
        batch = Batch(*map(torch.from_numpy, (tokens, targets, documents, positions)))
        return batch._replace(weights_BT=None if weights is None else torch.from_numpy(weights))


@dataclass(frozen=True)
class Pairs:
    """Preference pairs, several per sequence.

    Documents 2p and 2p + 1 of a sequence are its pair p, the chosen answer first.  Both include
    the prompt.  Ranks, microbatches and stages never separate the two of a pair.

    Args:
        references: log-probabilities of both answers of each pair of the store under the initial
            model, in nats, float32 (pairs, 2); None: not computed yet.
        width: the most pairs of a sequence, of any source of a mixture.
    """

    packed: PackedDocuments
    references: torch.Tensor | None = None
    width: int = 1

    def __len__(self) -> int:
        return len(self.packed)

    @property
    def num_groups(self) -> int:
        """Pairs of the store, also those that are too long for a sequence."""
        return len(self.packed.packed.starts) // 2

    def get_batch(self, indices: Ints) -> Batch:
        """Return sequences of pairs; unknown reference log-probabilities are 0."""
        batch, packed = self.packed.get_batch(indices), self.packed.packed
        references_BP2 = torch.zeros(len(indices), self.width, 2)
        if self.references is None:
            return batch._replace(references_BP2=references_BP2)
        references_BP2 = references_BP2.to(self.references.dtype)
        for row, sample in enumerate(indices.tolist()):
            documents = packed.documents_of(sample)
            pairs = torch.from_numpy(documents[::2] // 2)
            references_BP2[row, : len(pairs)] = self.references[pairs]
        return batch._replace(references_BP2=references_BP2)


@dataclass(frozen=True)
class LabeledAnswers:
    """Answers with labels, several per sequence.

    Document p of a sequence is its answer p.  ``labels_BP`` is 1 for good ones.  ``swapped_B4T`` is
    a sequence with the same prompts and answers to other prompts: its tokens, targets, documents
    and positions.  Longer ones are cut.

    Args:
        packed: the answers.
        labels: 1 for each good answer of the store, else 0.
        swapped: the other answers.
        references: log-probabilities of each answer of the store and of the other answer under the
            initial model, in nats, float32 (answers, 2); None: not computed yet.
        width: the most answers of a sequence, of any source of a mixture.
    """

    packed: PackedDocuments
    labels: NDArray[np.uint8]
    swapped: SwappedAnswers
    references: torch.Tensor | None = None
    width: int = 1

    def __len__(self) -> int:
        return len(self.packed)

    @property
    def num_groups(self) -> int:
        """Answers of the store, also those that are too long for a sequence."""
        return len(self.labels)

    def get_batch(self, indices: Ints) -> Batch:
        """Return sequences of answers; unknown reference log-probabilities are 0."""
        batch, packed = self.packed.get_batch(indices), self.packed.packed
        dtype = torch.float32 if self.references is None else self.references.dtype
        references_BP2 = torch.zeros(len(indices), self.width, 2, dtype=dtype)
        labels_BP = torch.zeros(len(indices), self.width, dtype=torch.int64)
        swapped_B4T = torch.empty(len(indices), 4, self.packed.seq_len, dtype=torch.int64)
        for row, sample in enumerate(indices.tolist()):
            documents = packed.documents_of(sample)
            labels_BP[row, : len(documents)] = torch.from_numpy(self.labels[documents])
            if self.references is not None:
                known = self.references[torch.from_numpy(documents)]
                references_BP2[row, : len(documents)] = known
            swapped_B4T[row] = torch.from_numpy(self._swap(documents))
        return batch._replace(
            references_BP2=references_BP2, labels_BP=labels_BP, swapped_B4T=swapped_B4T
        )

    def _swap(self, documents: Ints) -> Ints:
        """Return a sequence of these prompts with the other answers, int64 (4, T)."""
        packed, seq_len = self.packed, self.packed.seq_len
        assert packed.loss_mask is not None
        starts, lengths = packed.packed.starts, packed.packed.lengths + 1
        columns = np.zeros((4, seq_len), np.int64)
        columns[0], columns[1] = packed.separator, IGNORE_INDEX
        end = 0
        for place, document in enumerate(documents.tolist()):
            partner = int(self.swapped.partners[document])
            num_prompt, begin = self.swapped.prompt_lengths[[document, partner]].tolist()
            num_answer = int(lengths[partner]) - begin
            [prompt] = packed.stream.read_windows(starts[[document]], num_prompt)
            [answer] = packed.stream.read_windows(starts[[partner]] + begin, num_answer)
            [mask] = packed.loss_mask.read_windows(starts[[partner]] + begin, num_answer)
            window = np.concatenate((prompt, answer))[: seq_len + 1]
            targets = np.where(mask == 0, IGNORE_INDEX, answer)
            targets = np.concatenate((np.full(num_prompt, IGNORE_INDEX), targets))
            span = slice(end, end + len(window) - 1)
            columns[0, span], columns[1, span] = window[:-1], targets[1 : len(window)]
            columns[2, span], columns[3, span] = place, np.arange(len(window) - 1)
            end = span.stop
        columns[2, end:], columns[3, end:] = len(documents), np.arange(seq_len - end)
        return columns


AnswerGroups = Pairs | LabeledAnswers  # what an objective with references compares


@dataclass(frozen=True)
class Mixture:
    """Sources of samples, and the share of each in the run; shares sum to one.

    ``has_weights``: every batch has weights, because some source has them.
    """

    sources: Sequence[Samples]
    shares: Sequence[float] = (1.0,)
    has_weights: bool = False

    def announce(
        self,
        purpose: str,
        sources: Ints,
        indices: Ints,
        groups: Sequence[tuple[int, Ints, int]] = (),
    ) -> None:
        """Name the samples of the next steps to the readers of stores in buckets.

        Args:
            purpose: `weft.data.remote_tokens.TRAIN`, or another, which comes after it.
            sources: int64 (steps, n), in the order of the steps.
            indices: of the same shape.
            groups: more samples that are read later: the source, and the first ones and the number
                of neighboring ones.
        """
        blocks: dict[ReaderClient, list[Block]] = {}
        for sources_N, indices_N in zip(sources, indices, strict=True):
            for source, samples in enumerate(self.sources):
                for client, part in _list_blocks(samples, indices_N[sources_N == source]):
                    blocks.setdefault(client, []).extend(part)
        for source, firsts, count in groups:
            samples = self.sources[source]
            if isinstance(samples, TokenChunks) and (reader := samples.stream.client) is not None:
                spans = firsts * samples.seq_len, np.full(len(firsts), count * samples.seq_len)
                blocks.setdefault(reader, []).extend(samples.stream.list_blocks(*spans))
        for client, named in blocks.items():
            client.announce(purpose, named)

    @cached_property
    def is_remote(self) -> bool:
        """Return True if a source is in a bucket."""
        return any(
            stream.client for samples in self.sources for stream, _, _ in list_spans(samples, _NONE)
        )

    def get_batch(self, sources: Ints, indices: Ints) -> Batch:
        """Return samples by source and index, both int64 (n,)."""
        if len(self.sources) == 1:
            return self._get_samples(0, indices)
        order = np.argsort(sources, kind="stable")
        batches = [
            self._get_samples(source, indices[sources == source])
            for source in range(len(self.sources))
            if (sources == source).any()
        ]
        inverse = torch.from_numpy(np.argsort(order, kind="stable"))
        columns = zip(*batches, strict=True)
        merged = (None if c[0] is None else torch.cat(c)[inverse] for c in columns)
        return Batch._make(merged)._replace(sources_B=torch.from_numpy(sources))

    def _get_samples(self, source: int, indices: Ints) -> Batch:
        if self.is_remote:
            for client, blocks in _list_blocks(self.sources[source], indices):
                client.ensure(blocks)  # together, where the samples read them one after the other
        batch = self.sources[source].get_batch(indices)
        if self.has_weights and batch.weights_BT is None:
            return batch._replace(weights_BT=torch.ones(batch.tokens_BT.shape))
        return batch


_NONE: Ints = np.empty(0, np.int64)


def list_spans(samples: Samples, indices: Ints) -> list[tuple[TokenStream, Ints, Ints]]:
    """Return the streams that samples read, with starts and lengths of what they read."""
    if isinstance(samples, AnswerGroups):
        samples = samples.packed
    if isinstance(samples, TokenChunks):
        starts = indices * samples.seq_len
        return [(samples.stream, starts, np.full(len(starts), samples.seq_len + 1))]
    if not isinstance(samples, PackedDocuments):
        return []
    packed = samples.packed
    documents = np.concatenate([_NONE, *map(packed.documents_of, indices.tolist())])
    streams = [samples.stream, samples.loss_mask]
    if isinstance(samples.weights, RemoteColumn):
        streams.append(TokenStream([samples.weights]))
    starts, lengths = packed.starts[documents], packed.lengths[documents] + 1
    return [(stream, starts, lengths) for stream in streams if stream is not None]


def _shuffle_of(samples: Samples) -> SpanShuffle | None:
    return samples.shuffle if isinstance(samples, TokenChunks) else None


def _list_blocks(samples: Samples, indices: Ints) -> Iterator[tuple[ReaderClient, list[Block]]]:
    """Yield the readers of samples of a store in a bucket, and the blocks to read."""
    for stream, starts, lengths in list_spans(samples, indices):
        if (client := stream.client) is not None:
            yield client, stream.list_blocks(starts, lengths)


def build_mixture(
    dataset: Dataset,
    split: SplitName,
    seq_len: int,
    section: DataSection,
    seed: int,
    scores: bool = False,
) -> Mixture:
    """Return the samples of ``train`` or ``validation``.

    Args:
        dataset: its sources become the sources of the mixture.
        split: train or validation.
        seq_len: tokens per sample.
        section: decides the packing.
        seed: decides which documents share a sequence.
        scores: see `PackedDocuments`.
    """
    sources = [
        _build_samples(source.store, name, seq_len, section, seed, scores)
        for source, name in dataset.parts(split)
    ]
    # A split may have no group that fits.
    widths = [
        int(np.diff(s.packed.packed.offsets).max(initial=0)) // (2 if isinstance(s, Pairs) else 1)
        for s in sources
        if isinstance(s, AnswerGroups)
    ]
    width = max(widths, default=0)
    sources = [replace(s, width=width) if isinstance(s, AnswerGroups) else s for s in sources]
    parts = dataset.parts(split)
    has_weights = any(source.store.weights(name) is not None for source, name in parts)
    return Mixture(sources, [source.share for source, _ in parts], has_weights)


def _build_samples(
    store: Store, split: SplitName, seq_len: int, section: DataSection, seed: int, scores: bool
) -> Samples:
    stream, separator = store.tokens(split), store.manifest.separator
    if stream.client is not None:
        stream.client.start_reader()
    if store.manifest.kind == "text" and section.packing != "best_fit":
        packing: Packing = "documents" if section.keeps_documents else "windows"
        begins = store.manifest.starts_at_separator
        span = int(section.shuffle_span_gib * (1 << 30))
        shuffle = span_shuffle(span, seq_len * np.dtype(store.manifest.dtype).itemsize)
        return TokenChunks(stream, seq_len, packing, separator, begins, shuffle)
    has_scores = scores and store.manifest.kind != "text"
    sequences = pack_split(store, split, seq_len, section, seed, has_scores)
    loss_mask, weights = store.loss_mask(split), None if has_scores else store.weights(split)
    packed = PackedDocuments(stream, loss_mask, sequences, seq_len, separator, weights, has_scores)
    if store.manifest.kind == "unpaired":
        return LabeledAnswers(packed, store.labels(split), swap_answers(store, split))
    return Pairs(packed) if store.manifest.kind == "preferences" else packed


# --------------------------------------------------------------------------- batches


@dataclass(frozen=True)
class Loader:
    """Microbatches of this rank, for any global batch.

    Args:
        mixture: the train samples.
        seed: decides the order.
        global_batch_size: sequences per step, over all ranks.
        dp_rank, dp_size: data-parallel rank and number of ranks.
        microbatch_size: sequences per Batch.
        is_strided: rank r has the sequences r, r + dp_size, ... of a global batch, so that
            microbatch m of all ranks together does not depend on ``dp_size``.  Otherwise, with
            `SpanShuffle`, a rank has sequences of neighboring streams.
        numbers_tokens: set ``token_ids_BT``, which do not depend on the layout.
        measures_documents: set ``lengths_BT``.
        num_samples: of the whole run, beyond which no block is named; None: unknown.

    Raises:
        ValueError: ``dp_size`` does not divide ``global_batch_size``.
    """

    mixture: Mixture
    seed: int
    global_batch_size: int
    dp_rank: int
    dp_size: int
    microbatch_size: int
    is_strided: bool = False
    numbers_tokens: bool = False
    measures_documents: bool = False
    num_samples: int | None = None
    _sampler: MixtureSampler = field(init=False, compare=False)
    _cached_samples: dict[tuple[int, int, int], Ints] = field(
        default_factory=dict, init=False, compare=False
    )
    _has_streams: bool = field(init=False, compare=False)
    # First position, part and steps of the last announcement: see `_announce`.
    _announced: list[tuple[int, tuple[int, int], int]] = field(
        default_factory=list, init=False, compare=False
    )

    def __post_init__(self) -> None:
        if self.global_batch_size % self.dp_size:
            raise ValueError(
                f"global_batch_size = {self.global_batch_size} is not divisible by "
                f"dp_size = {self.dp_size}"
            )
        object.__setattr__(self, "_sampler", MixtureSampler(self.mixture.shares))  # frozen
        has_streams = any(_shuffle_of(samples) for samples in self.mixture.sources)
        object.__setattr__(self, "_has_streams", has_streams)

    def get_microbatches(
        self, consumed: int, replica_group: int = 0, num_groups: int = 1
    ) -> list[Batch]:
        """Return this rank's microbatches of the global batch at ``consumed``.

        The global batch is the ``global_batch_size`` samples from position ``consumed`` on.  Rank r
        has the contiguous slice [r GB / dp, (r + 1) GB / dp), split into consecutive microbatches;
        the last may be smaller.  Concatenated over ranks, the batches are the global batch in
        order, for any ``dp_size`` and ``microbatch_size``.  With ``is_strided`` they are in the
        order of rank 0's first, rank 1's first, and so on.

        With several replica groups this holds inside each group's slice.  Slices may differ by
        ``dp_size`` sequences; a group without sequences gets one without targets.
        """
        sequences_per_rank = self.global_batch_size // self.dp_size
        begin, end = (
            sequences_per_rank * n // num_groups for n in (replica_group, replica_group + 1)
        )
        num_sequences = max(1, end - begin)
        step = 1 if self.is_strided else num_sequences
        part = begin * self.dp_size + self.dp_rank * step, num_sequences
        if self.mixture.is_remote:
            self._announce(consumed, part)
        batch = self.mixture.get_batch(*self._samples(consumed, part))
        if begin == end:
            batch.remove_targets(slice(None))
        if self.numbers_tokens:
            num_tokens = batch.tokens_BT.shape[1]
            sequences_B = torch.from_numpy(self._positions(consumed, part, 1)[0])
            ids_BT = sequences_B.unsqueeze(1) * num_tokens + torch.arange(num_tokens)
            batch = batch._replace(token_ids_BT=ids_BT)
        if self.measures_documents and batch.documents_BT is not None:
            batch = batch._replace(lengths_BT=document_lengths(batch.documents_BT))
        if num_sequences <= self.microbatch_size:
            return [batch]
        starts = range(0, num_sequences, self.microbatch_size)
        microbatches = (slice(start, start + self.microbatch_size) for start in starts)
        return [batch.map(itemgetter(microbatch)) for microbatch in microbatches]

    def _positions(self, consumed: int, part: tuple[int, int], num_steps: int) -> Ints:
        """Return the positions of this rank in the next steps: int64 (steps, n).

        ``part`` is the first sequence of this rank in a global batch, and the number n of its
        sequences, without the order of streams.
        """
        steps = consumed + self.global_batch_size * np.arange(num_steps)[:, None]
        stride = self.dp_size if self.is_strided else 1
        sequences = part[0] + stride * np.arange(part[1])
        if not self._has_streams or self.is_strided:
            return steps + sequences
        positions = steps + np.arange(self.global_batch_size)
        order = np.argsort(self._find_streams(positions), axis=1, kind="stable")
        mine: Ints = np.take_along_axis(positions, order[:, sequences], axis=1)
        return mine

    def _find_streams(self, positions: Ints) -> Ints:
        """Return the stream of each position: see `SpanShuffle`."""
        sources, num_before = self._sampler.assign(positions)
        sizes = np.array([len(samples) for samples in self.mixture.sources])
        streams: Ints = num_before % sizes[sources] % NUM_STREAMS
        return streams

    def _announce(self, consumed: int, part: tuple[int, int]) -> None:
        """Name the blocks of this and the next steps, unless most are named already."""
        num_steps = max(MIN_NAMED_STEPS, min(MAX_NAMED_STEPS, LOOKUP_POSITIONS // part[1]))
        for position, named_part, steps in self._announced:
            num_since, rest = divmod(consumed - position, self.global_batch_size)
            if not rest and named_part == part and 0 <= num_since < max(1, steps // 2):
                return
        if self.num_samples is not None:
            remaining = -(-(self.num_samples - consumed) // self.global_batch_size)
            num_steps = max(1, min(num_steps, remaining))
        positions = self._positions(consumed, part, num_steps)
        located = self._find_samples(positions.ravel()).reshape(2, num_steps, part[1])
        groups = self._find_groups(positions.ravel()) if self._has_streams else []
        self.mixture.announce(TRAIN, located[0], located[1], groups)
        self._announced[:] = [(consumed, part, num_steps)]

    def _find_groups(self, positions: Ints) -> list[tuple[int, Ints, int]]:
        """Return source, first samples and size of the chunks in the groups of positions."""
        sources, num_before = self._sampler.assign(positions)
        groups = []
        for source, samples in enumerate(self.mixture.sources):
            if (shuffle := _shuffle_of(samples)) is not None:
                mine = num_before[sources == source]
                groups.append((source, *shuffle.group_samples_of(mine, len(samples), self.seed)))
        return groups

    def _samples(self, consumed: int, part: tuple[int, int]) -> Ints:
        """Return source and index of this rank's sequences: int64 (2, n)."""
        samples = self._cached_samples.get((consumed, *part))
        if samples is None:
            # Also for the next steps: numpy takes about as long for many positions as for few.
            num_steps = max(1, LOOKUP_POSITIONS // part[1])
            positions = self._positions(consumed, part, num_steps)
            located = self._find_samples(positions.ravel()).reshape(2, num_steps, part[1])
            self._cached_samples.clear()
            for step in range(num_steps):
                key = (consumed + step * self.global_batch_size, *part)
                self._cached_samples[key] = located[:, step]
            samples = located[:, 0]
        return samples

    def _find_samples(self, positions: Ints) -> Ints:
        """Return source and index of the samples at positions, int64 (n,): (2, n)."""
        sources, num_before = self._sampler.assign(positions)
        indices = np.empty_like(num_before)
        for source, samples_of_source in enumerate(self.mixture.sources):
            selected = sources == source
            shuffle = _shuffle_of(samples_of_source)
            find = sample_index if shuffle is None else shuffle.sample_index
            indices[selected] = find(num_before[selected], len(samples_of_source), self.seed)
        return np.stack((sources, indices))


def document_lengths(documents_BT: torch.Tensor) -> torch.Tensor:
    """Return the number of tokens of each token's document, int64 (B, T)."""
    counts_BT = torch.zeros_like(documents_BT)
    counts_BT.scatter_add_(1, documents_BT, torch.ones_like(documents_BT))
    return counts_BT.gather(1, documents_BT)


class Prefetcher:
    """Prefetch batches of a loader, on a GPU during the current step.

    A thread prepares batches in pinned memory.  The requested position alone decides the result: a
    batch, or an error, prepared for another position (before a rewind or a change of the replica
    groups) is dropped.  On a CPU, which would do both, prefetching costs more than it saves; there
    the caller's thread prepares each batch.
    """

    def __init__(self, loader: Loader, device: torch.device, use_thread: bool) -> None:
        self._loader, self._device = loader, device
        self._requests: SimpleQueue[Any] = SimpleQueue()
        self._results: SimpleQueue[Any] = SimpleQueue()  # (request, batches or exception)
        self._pending = False
        self._thread = Thread(target=self._prefetch_loop, name="weft-data", daemon=True)
        if use_thread:
            self._thread.start()

    def get_microbatches(self, consumed: int, replica_group: int, num_groups: int) -> list[Batch]:
        """Return the same as `Loader.get_microbatches`."""
        request = (consumed, replica_group, num_groups)
        prepared, result = None, None
        if self._pending:
            prepared, result = self._wait_for_result()
            self._pending = False
        if prepared != request:
            result = self._loader.get_microbatches(*request)
        elif isinstance(result, Exception):
            raise result
        if self._thread.is_alive():
            self._requests.put(
                (consumed + self._loader.global_batch_size, replica_group, num_groups)
            )
            self._pending = True
        return cast(list[Batch], result)

    def _wait_for_result(self) -> Any:
        while True:
            with suppress(Empty):
                return self._results.get(timeout=WAIT_SECONDS)
            beat_if_waiting()  # the thread waits for bytes, and this one has the heartbeat

    def _prefetch_loop(self) -> None:
        on_accelerator = self._device.type != "cpu"
        if on_accelerator:
            torch.accelerator.set_device_index(self._device)  # per thread
        for request in iter(self._requests.get, None):
            try:
                result: Any = self._loader.get_microbatches(*request)
                if on_accelerator:
                    result = [batch.map(torch.Tensor.pin_memory) for batch in result]
            except Exception as error:
                result = error
            self._results.put((request, result))

    def close(self) -> None:
        """Stop the thread."""
        self._requests.put(None)
        if self._thread.is_alive():
            self._thread.join(10.0)  # a hung disk must not block the exit


def evaluation_batches(
    mixture: Mixture, num_sequences: int, dp_rank: int, dp_size: int, microbatch_size: int
) -> Iterator[Batch]:
    """Yield this rank's part of ``num_sequences`` validation samples, always the same.

    Each source has its share of the samples, at least one, spread evenly over the source.

    All ranks yield the same number of batches of one shape, because collectives need all ranks.  To
    that end, sequences with only IGNORE_INDEX targets are appended.  Rank r has the r-th contiguous
    slice.
    """
    counts = apportion(mixture.shares, max(num_sequences, len(mixture.sources)))
    sources, indices = [], []
    for source, (samples_of_source, limit) in enumerate(
        zip(mixture.sources, counts.tolist(), strict=True)
    ):
        count = min(limit, len(samples_of_source))
        sources.append(np.full(count, source))
        indices.append(np.arange(count) * len(samples_of_source) // count)
    selected = np.stack((np.concatenate(sources), np.concatenate(indices)))
    if not selected.size:
        raise WeftError("the validation set has no sequence: use a larger data.validation_fraction")
    per_rank = -(-selected.shape[1] // dp_size)
    batch_size = min(microbatch_size, per_rank)
    per_rank = -(-per_rank // batch_size) * batch_size
    if mixture.is_remote:
        mine = selected[:, dp_rank * per_rank : (dp_rank + 1) * per_rank]
        mixture.announce("evaluate", *mine[:, None])
    for first in range(dp_rank * per_rank, (dp_rank + 1) * per_rank, batch_size):
        part = selected[:, first : first + batch_size]
        missing = batch_size - part.shape[1]
        padded = np.concatenate((part, np.repeat(selected[:, :1], missing, axis=1)), axis=1)
        batch = mixture.get_batch(*padded)
        if missing:
            batch.remove_targets(slice(-missing, None))
        yield batch


def _make_batch(
    windows: Ints, packing: Packing, separator: int, starts_at_separator: bool = False
) -> Batch:
    """Split windows of T + 1 tokens into inputs and targets."""
    tokens, targets = windows[:, :-1].copy(), windows[:, 1:].copy()
    if packing == "windows":
        return Batch(torch.from_numpy(tokens), torch.from_numpy(targets), None, None)
    ends = np.flatnonzero(tokens == separator)
    starts = ends
    if not starts_at_separator:
        targets.reshape(-1)[ends] = IGNORE_INDEX  # the target would begin another document
        starts = ends[ends < tokens.size - 1] + 1
    # Vectorized over documents, which are fewer than tokens.
    length = tokens.shape[1]
    starts = np.union1d(np.arange(0, tokens.size, length), starts)
    sizes = np.diff(starts, append=tokens.size)
    numbers = np.arange(len(starts)) - np.searchsorted(starts, starts // length * length)
    documents = np.repeat(numbers, sizes).reshape(tokens.shape)
    positions = (np.arange(tokens.size) - np.repeat(starts, sizes)).reshape(tokens.shape)
    return Batch(*map(torch.from_numpy, (tokens, targets, documents, positions)))
