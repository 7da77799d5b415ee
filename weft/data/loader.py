"""Which tokens come when: a pure function of the seed and of how many samples went before.

The problem.  A run must resume exactly, on any number of ranks, however many it had before.  A
loader that keeps state per rank or per worker (positions, buffers of a shuffle, generators) makes
that hard: the states of 8 ranks do not tell what 6 ranks should read next.  So there is no state
but one integer, ``consumed``: how many samples the run has trained on, over all ranks.

*Samples.*  Sample ``w`` is the fixed window of tokens [w T, w T + T + 1) of the train stream,
where T is ``seq_len``; neighbours share a token, which is one's last target and the other's first
input.  There are N = (tokens - 1) // T samples; what is left over at the end is never read.

*Order.*  The sample at place ``c`` of the run belongs to epoch c // N, and each epoch visits every
sample once, in an order of its own.  A shuffled list would take O(N) memory in every process and
O(N) time at each start.  Instead the order is a permutation that can be evaluated anywhere: a
Feistel network, the construction of block ciphers, keyed by seed and epoch.  It permutes
0 .. 4^h - 1 for some h; to permute 0 .. N - 1 it is applied again as long as the result falls
outside (*cycle walking*), which takes less than four rounds on average.

*Ranks.*  The global batch at ``consumed`` is the samples at places consumed .. consumed + GB - 1,
in that order.  Only then is it cut, first over ranks and then into microbatches, so neither
number of ranks nor microbatch size can change what a step trains on.

Left out: mixing sources by weight, and packing documents whole.  A window may begin in the middle
of a document; with ``packing="documents"`` attention and loss still stay inside one.

Shapes: B rows of a microbatch, T tokens of a row.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from queue import SimpleQueue
from threading import Thread
from typing import Any, Literal, NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray

from weft.data.store import TokenStream
from weft.job import InvalidJob, Problem

AT_ONCE = 512  # places whose samples are looked up at a time
IGNORE = -100  # a target without loss; what torch's cross_entropy ignores by default

Ints = NDArray[np.int64]
Words = NDArray[np.uint64]
Packing = Literal["windows", "documents"]

# --------------------------------------------------------------------------- order

_ROUNDS = 8
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def sample_index(consumed: Ints, num_windows: int, seed: int) -> Ints:
    """The windows that come at the given places of the run.

    Args:
        consumed: places, int64 (n,): how many samples come before.
        num_windows: windows in the stream, 1 to 2**40.
        seed: a non-negative integer.

    Returns:
        int64 (n,) in 0 .. num_windows - 1.  Over each epoch, of ``num_windows`` places, this is a
        permutation, another one in each epoch.
    """
    if not 1 <= num_windows <= 1 << 40:
        raise ValueError(f"num_windows = {num_windows} must be from 1 to 2**40")
    epoch, place = np.divmod(np.asarray(consumed, np.int64), num_windows)
    start = np.array([seed % (1 << 64)], np.uint64)
    keys = _mix(_mix(start) + epoch.astype(np.uint64) * _GOLDEN)
    half_bits = max(1, ((num_windows - 1).bit_length() + 1) // 2)
    index = _feistel(place.astype(np.uint64), keys, half_bits)
    while len(outside := np.flatnonzero(index >= num_windows)):
        index[outside] = _feistel(index[outside], keys[outside], half_bits)
    return index.astype(np.int64)


def _feistel(value: Words, keys: Words, half_bits: int) -> Words:
    """A permutation of 0 .. 4**half_bits - 1 for each key."""
    bits, low = np.uint64(half_bits), np.uint64((1 << half_bits) - 1)
    left, right = value >> bits, value & low
    for number in range(_ROUNDS):
        noise = _mix(_mix(keys + np.uint64(number + 1)) + right)
        left, right = right, left ^ (noise & low)
    return (left << bits) | right


def _mix(value: Words) -> Words:
    """The splitmix64 step: every bit of the input reaches every bit of the output."""
    value = value + _GOLDEN
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))


# --------------------------------------------------------------------------- batches


class Batch(NamedTuple):
    """One microbatch.  All int64 (B, T); the last two only with ``packing="documents"``.

    ``targets_BT`` is the next token, or IGNORE.  ``documents_BT`` numbers the documents of each
    row from 0, and ``positions_BT`` counts from 0 inside each; the separator belongs to the
    document that it ends.
    """

    tokens_BT: torch.Tensor
    targets_BT: torch.Tensor
    documents_BT: torch.Tensor | None
    positions_BT: torch.Tensor | None


def check_length(tokens: int, seq_len: int) -> list[Problem]:
    """Whether a train text of so many tokens has at least one sample."""
    if tokens > seq_len:
        return []
    rule = f"the train text has {tokens} tokens, one sequence takes {seq_len + 1}"
    fewer = f"use at most {tokens - 1}, or " if tokens > 1 else ""
    return [Problem("train.seq_len", seq_len, rule, f"{fewer}give more text")]


@dataclass(frozen=True)
class Loader:
    """This rank's microbatches of any global batch.

    Args:
        stream: the train tokens.
        seq_len: tokens per sample, T.
        seed: decides the order.
        packing: ``documents`` keeps attention (by ``documents_BT``) and loss inside a document.
        separator: id of the token that ends a document.
        global_batch: samples per step over all ranks.
        dp_rank, dp_size: this rank among those that read different samples.
        microbatch: rows per Batch.

    Raises:
        InvalidJob: the stream is shorter than one sample.
        ValueError: ranks do not divide the global batch.
    """

    stream: TokenStream
    seq_len: int
    seed: int
    packing: Packing
    separator: int
    global_batch: int
    dp_rank: int
    dp_size: int
    microbatch: int
    _known: dict[tuple[int, int], Ints] = field(default_factory=dict, init=False, compare=False)

    def __post_init__(self) -> None:
        if problems := check_length(len(self.stream), self.seq_len):
            raise InvalidJob(problems)
        if self.global_batch % self.dp_size:
            raise ValueError(
                f"global_batch = {self.global_batch} is not a multiple of dp_size = {self.dp_size}"
            )

    @property
    def num_windows(self) -> int:
        """Samples of one epoch."""
        return (len(self.stream) - 1) // self.seq_len

    def batch(self, consumed: int, group: int = 0, groups: int = 1) -> list[Batch]:
        """This rank's microbatches of the global batch that begins at sample ``consumed``.

        The global batch is the samples at places ``consumed .. consumed + global_batch - 1``.
        Rank r has the contiguous slice [r GB / dp, (r + 1) GB / dp) of it, cut into consecutive
        microbatches, of which the last may have fewer rows: all ranks' batches one after the
        other are the global batch, in order, whatever ``dp_size`` and ``microbatch`` are.

        With several replica groups this is so inside of each group's slice, which may differ by
        ``dp_size`` rows from another's; where there are too few, a group has a row without targets.
        """
        rows_per_rank = self.global_batch // self.dp_size
        begin, end = (rows_per_rank * n // groups for n in (group, group + 1))
        share = max(1, end - begin)
        first = consumed + begin * self.dp_size + self.dp_rank * share
        rows = self.stream.window(self._starts(first, share), self.seq_len + 1)
        batches = [
            _batch(rows[i : i + self.microbatch], self.packing, self.separator)
            for i in range(0, share, self.microbatch)
        ]
        if begin == end:
            batches[0].targets_BT.fill_(IGNORE)
        return batches

    def _starts(self, first: int, share: int) -> Ints:
        """Where in the stream the samples at places ``first .. first + share - 1`` begin."""
        starts = self._known.get((first, share))
        if starts is None:
            # For the steps to come as well: numpy takes about as long for many as for a few.
            firsts = first + self.global_batch * np.arange(max(1, AT_ONCE // share))
            places = (firsts[:, None] + np.arange(share)).ravel()
            found = sample_index(places, self.num_windows, self.seed) * self.seq_len
            rows = found.reshape(-1, share)
            self._known.clear()
            keys = [(n, share) for n in firsts.tolist()]
            self._known.update(zip(keys, rows, strict=True))
            starts = rows[0]
        return starts


class Ahead:
    """A loader's batches, for a GPU each made while the one before it is computed on.

    A thread makes them, in pinned memory.  Only the position that is asked for decides what comes:
    a batch made for another one, before a rewind or a change of the replica groups, is dropped, and
    so is an error in making it.  On a CPU, whose cores have to do both, handing over costs more
    than it saves: there a batch is made when it is asked for.
    """

    def __init__(self, loader: Loader, device: torch.device, threaded: bool) -> None:
        self._loader, self._device = loader, device
        self._asked: SimpleQueue[Any] = SimpleQueue()
        self._made: SimpleQueue[Any] = SimpleQueue()  # (place, batches or why there are none)
        self._pending = False
        self._thread = Thread(target=self._work, name="weft-data", daemon=True)
        if threaded:
            self._thread.start()

    def batch(self, consumed: int, group: int, groups: int) -> list[Batch]:
        """As of `Loader`."""
        asked = (consumed, group, groups)
        place, made = None, None
        if self._pending:
            place, made = self._made.get()
            self._pending = False
        if place != asked:
            made = self._loader.batch(*asked)
        elif isinstance(made, Exception):
            raise made
        if self._thread.is_alive():
            self._asked.put((consumed + self._loader.global_batch, group, groups))
            self._pending = True
        return cast(list[Batch], made)

    def _work(self) -> None:
        on_gpu = self._device.type == "cuda"
        if on_gpu:
            torch.cuda.set_device(self._device)  # of this thread
        for place in iter(self._asked.get, None):
            try:
                made: Any = self._loader.batch(*place)
                if on_gpu:
                    made = [_pinned(batch) for batch in made]
            except Exception as error:
                made = error
            self._made.put((place, made))

    def close(self) -> None:
        """End the thread."""
        self._asked.put(None)
        if self._thread.is_alive():
            self._thread.join(10.0)  # a disk that hangs must not keep a process that is to end


def evaluation_batches(
    stream: TokenStream,
    seq_len: int,
    packing: Packing,
    separator: int,
    sequences: int,
    dp_rank: int,
    dp_size: int,
    microbatch: int,
) -> Iterator[Batch]:
    """This rank's share of ``sequences`` windows (or all there are), the same ones every time.

    They are spread evenly over the stream, whose documents may differ from one end to the other.

    Every rank yields the same number of batches, of one shape, since collectives need all ranks:
    rows are added at the end, with every target IGNORE, until that is so.  Rank r has the r-th
    contiguous slice.  A stream that is shorter than one window gives one row, padded likewise.
    """
    length = seq_len + 1
    available = max(1, (len(stream) - 1) // seq_len)
    windows = min(sequences, available)
    share = -(-windows // dp_size)
    rows_per_batch = min(microbatch, share)
    share = -(-share // rows_per_batch) * rows_per_batch
    for first in range(dp_rank * share, (dp_rank + 1) * share, rows_per_batch):
        rows = np.full((rows_per_batch, length), separator, np.int64)
        valid = np.zeros(rows_per_batch, np.int64)  # targets of each row
        present = np.arange(first, min(first + rows_per_batch, windows), dtype=np.int64)
        tokens = min(length, len(stream))
        starts = present * available // windows * seq_len
        rows[: len(present), :tokens] = stream.window(starts, tokens)
        valid[: len(present)] = tokens - 1
        batch = _batch(rows, packing, separator)
        padding_BT = torch.arange(seq_len) >= torch.from_numpy(valid)[:, None]
        yield batch._replace(targets_BT=batch.targets_BT.masked_fill(padding_BT, IGNORE))


def _pinned(batch: Batch) -> Batch:
    return Batch._make(part if part is None else part.pin_memory() for part in batch)


def _batch(rows: Ints, packing: Packing, separator: int) -> Batch:
    """Rows of T + 1 tokens as inputs and targets."""
    tokens, targets = rows[:, :-1].copy(), rows[:, 1:].copy()
    if packing == "windows":
        return Batch(torch.from_numpy(tokens), torch.from_numpy(targets), None, None)
    ends = tokens == separator
    targets[ends] = IGNORE  # it would be the first token of another document
    documents = np.cumsum(ends, axis=1) - ends
    begins = np.zeros_like(tokens)
    begins[:, 1:] = np.where(ends[:, :-1], np.arange(1, tokens.shape[1]), 0)
    positions = np.arange(tokens.shape[1]) - np.maximum.accumulate(begins, axis=1)
    return Batch(*map(torch.from_numpy, (tokens, targets, documents, positions)))
