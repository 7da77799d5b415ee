"""Microbatches of any global batch, for any rank.

*Samples.*  A sample is one row of a batch.  Sample ``w`` of a token stream is the fixed window of
tokens [w T, w T + T + 1), where T is ``seq_len``; neighbours share a token, which is one's last
target and the other's first input.  There are (tokens - 1) // T samples; what is left over at the
end is never read.  A window may begin in the middle of a document; with ``packing="documents"``
attention and loss still stay inside one.  Conversations, and documents with ``packing="best_fit"``,
are put whole into rows instead (`weft.data.packing`).

*Ranks.*  The global batch at ``consumed`` is the samples at places consumed .. consumed + GB - 1
of the run's order, which `weft.data.order` tells.  Only then is it cut, first over ranks and then
into microbatches, so neither number of ranks nor microbatch size can change what a step trains on.

Shapes: B rows of a microbatch, T tokens of a row.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue
from threading import Thread
from typing import Any, Literal, NamedTuple, Protocol, cast

import numpy as np
import torch

from weft.config.errors import ConfigError, WeftError
from weft.config.schema import DataSection
from weft.data.dataset import Dataset
from weft.data.order import Ints, MixtureSampler, parts, sample_index
from weft.data.packing import Rows, pack
from weft.data.token_store import SplitName, Store, TokenStream

AT_ONCE = 512  # places whose samples are looked up at a time
IGNORE = -100  # a target without loss; what torch's cross_entropy ignores by default

Packing = Literal["windows", "documents"]

# --------------------------------------------------------------------------- samples


class Batch(NamedTuple):
    """Rows of samples: int64 (B, T), but ``sources_B``, which is (B,).

    ``targets_BT`` is the next token, or IGNORE.  ``documents_BT`` numbers the documents of each
    row from 0, and ``positions_BT`` counts from 0 inside each; the separator belongs to the
    document that it ends.  Both are there only where documents are kept apart, and ``sources_B``,
    the number of each row's source, only in a mixture.  ``references_B2``, float32, is there where
    rows are pairs of answers: see `Pairs`.
    """

    tokens_BT: torch.Tensor
    targets_BT: torch.Tensor
    documents_BT: torch.Tensor | None
    positions_BT: torch.Tensor | None
    sources_B: torch.Tensor | None = None
    references_B2: torch.Tensor | None = None


class Samples(Protocol):
    """A source of samples, all of one length."""

    def __len__(self) -> int: ...

    def rows(self, samples: Ints) -> Batch:
        """The samples of these numbers, int64 (n,), each from 0 to ``len(self) - 1``."""
        ...


@dataclass(frozen=True)
class TokenChunks:
    """A stream of tokens, cut into windows.

    Args:
        stream: at least one token.  If it is shorter than one window, that is filled up, with
            IGNORE for targets.
        seq_len: tokens per sample, T.
        packing: ``documents`` keeps attention (by ``documents_BT``) and loss inside a document.
        separator: id of the token that ends a document.
    """

    stream: TokenStream
    seq_len: int
    packing: Packing
    separator: int

    def __len__(self) -> int:
        return max(1, (len(self.stream) - 1) // self.seq_len)

    def rows(self, samples: Ints) -> Batch:
        length = min(self.seq_len + 1, len(self.stream))
        found = self.stream.window(samples * self.seq_len, length)
        if missing := self.seq_len + 1 - length:
            found = np.pad(found, ((0, 0), (0, missing)), constant_values=self.separator)
        batch = _batch(found, self.packing, self.separator)
        if missing:
            batch.targets_BT[:, -missing:] = IGNORE
        return batch


@dataclass(frozen=True)
class Packed:
    """Rows of whole documents, each of which attention and loss stay inside.

    What is left of a row is filled with the separator, as one more document, without targets.

    Args:
        stream: the tokens of the documents.
        learned: 1 where a token is a target, else 0; None: all are.
        separator: any token.
    """

    stream: TokenStream
    learned: TokenStream | None
    packed: Rows
    seq_len: int
    separator: int

    def __len__(self) -> int:
        return len(self.packed)

    def rows(self, samples: Ints) -> Batch:
        shape = (len(samples), self.seq_len)
        tokens, targets = np.full(shape, self.separator), np.full(shape, IGNORE)
        documents, positions = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
        packed = self.packed
        for row, sample in enumerate(samples.tolist()):
            at = 0
            members = packed.order[packed.firsts[sample] : packed.firsts[sample + 1]]
            for number, document in enumerate(members.tolist()):
                begin, places = packed.begins[document : document + 1], packed.lengths[document]
                [found] = self.stream.window(begin, int(places) + 1)
                here = slice(at, at + len(found) - 1)
                tokens[row, here], targets[row, here] = found[:-1], found[1:]
                if self.learned is not None:
                    [learned] = self.learned.window(begin, len(found))
                    targets[row, here][learned[1:] == 0] = IGNORE
                documents[row, here] = number
                positions[row, here] = np.arange(len(found) - 1)
                at = here.stop
            documents[row, at:] = len(members)
            positions[row, at:] = np.arange(self.seq_len - at)
        return Batch(*map(torch.from_numpy, (tokens, targets, documents, positions)))


@dataclass(frozen=True)
class Pairs:
    """Preferences: document 0 of each row is the chosen answer with its prompt, 1 the rejected one.

    So whatever cuts a global batch, into ranks, microbatches or stages, keeps a pair together.

    Args:
        references: log-probability of both answers under the initial model, in nats, float32
            (pairs, 2); None where it is not known yet.
    """

    packed: Packed
    references: torch.Tensor | None = None

    def __len__(self) -> int:
        return len(self.packed)

    def rows(self, samples: Ints) -> Batch:
        batch = self.packed.rows(samples)
        if self.references is None:
            return batch
        return batch._replace(references_B2=self.references[torch.from_numpy(samples)])


@dataclass(frozen=True)
class Mixture:
    """Sources of samples, and the share that each has in what a run sees, summing to one."""

    sources: Sequence[Samples]
    shares: Sequence[float] = (1.0,)

    def rows(self, sources: Ints, samples: Ints) -> Batch:
        """Samples by source and number, both int64 (n,)."""
        if len(self.sources) == 1:
            return self.sources[0].rows(samples)
        order = np.argsort(sources, kind="stable")
        found = [
            self.sources[source].rows(samples[sources == source])
            for source in range(len(self.sources))
            if (sources == source).any()
        ]
        back = torch.from_numpy(np.argsort(order, kind="stable"))
        columns = zip(*found, strict=True)
        together = (None if c[0] is None else torch.cat(c)[back] for c in columns)
        return Batch._make(together)._replace(sources_B=torch.from_numpy(sources))


def samples_of(
    text: Dataset, split: SplitName, seq_len: int, section: DataSection, seed: int
) -> Mixture:
    """The samples of ``train`` or ``validation``.

    Args:
        section: how they are packed.
        seed: decides which documents share a row.
    """
    sources = [_samples(source.store, split, seq_len, section, seed) for source in text.sources]
    return Mixture(sources, [source.share for source in text.sources])


def _samples(
    store: Store, split: SplitName, seq_len: int, section: DataSection, seed: int
) -> Samples:
    stream, separator = store.tokens(split), store.manifest.separator
    if store.manifest.kind == "text" and section.packing != "best_fit":
        packing: Packing = "documents" if section.keeps_documents else "windows"
        return TokenChunks(stream, seq_len, packing, separator)
    rows = pack(store, split, seq_len, section, seed)
    packed = Packed(stream, store.learned(split), rows, seq_len, separator)
    return Pairs(packed) if store.manifest.kind == "preferences" else packed


def check_length(tokens: int, seq_len: int, what: str = "the train text") -> list[ConfigError]:
    """Whether a train text of so many tokens has at least one sample."""
    if tokens > seq_len:
        return []
    rule = f"{what} has {tokens} tokens, one sequence takes {seq_len + 1}"
    fewer = f"use at most {tokens - 1}, or " if tokens > 1 else ""
    return [ConfigError("train.seq_len", seq_len, rule, f"{fewer}give more text")]


# --------------------------------------------------------------------------- batches


@dataclass(frozen=True)
class Loader:
    """This rank's microbatches of any global batch.

    Args:
        mixture: the train samples.
        seed: decides the order.
        global_batch: samples per step over all ranks.
        dp_rank, dp_size: this rank among those that read different samples.
        microbatch: rows per Batch.

    Raises:
        ValueError: ranks do not divide the global batch.
    """

    mixture: Mixture
    seed: int
    global_batch: int
    dp_rank: int
    dp_size: int
    microbatch: int
    _turns: MixtureSampler = field(init=False, compare=False)
    _known: dict[tuple[int, int], Ints] = field(default_factory=dict, init=False, compare=False)

    def __post_init__(self) -> None:
        if self.global_batch % self.dp_size:
            raise ValueError(
                f"global_batch = {self.global_batch} is not a multiple of dp_size = {self.dp_size}"
            )
        object.__setattr__(self, "_turns", MixtureSampler(self.mixture.shares))  # frozen

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
        rows = self.mixture.rows(*self._samples(first, share))
        if begin == end:
            rows.targets_BT.fill_(IGNORE)
        starts = range(0, share, self.microbatch)
        return [_slice(rows, start, start + self.microbatch) for start in starts]

    def _samples(self, first: int, share: int) -> Ints:
        """Source and number of the samples at places ``first .. first + share - 1``: (2, share)."""
        found = self._known.get((first, share))
        if found is None:
            # For the steps to come as well: numpy takes about as long for many as for a few.
            firsts = first + self.global_batch * np.arange(max(1, AT_ONCE // share))
            places = (firsts[:, None] + np.arange(share)).ravel()
            every = self._locate(places).reshape(2, -1, share)
            self._known.clear()
            for place, each in zip(firsts.tolist(), every.transpose(1, 0, 2), strict=True):
                self._known[place, share] = each
            found = every[:, 0]
        return found

    def _locate(self, places: Ints) -> Ints:
        """Source and number of the samples at places of the run, int64 (n,): int64 (2, n)."""
        sources, before = self._turns.at(places)
        samples = np.empty_like(before)
        for source, of in enumerate(self.mixture.sources):
            here = sources == source
            samples[here] = sample_index(before[here], len(of), self.seed)
        return np.stack((sources, samples))


class Prefetcher:
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
    mixture: Mixture, sequences: int, dp_rank: int, dp_size: int, microbatch: int
) -> Iterator[Batch]:
    """This rank's share of ``sequences`` held-out samples (or all there are), always the same.

    Each source has its share of them, but one at least, spread evenly over it: its documents may
    differ from one end to the other.

    Every rank yields the same number of batches, of one shape, since collectives need all ranks:
    rows are added at the end, with every target IGNORE, until that is so.  Rank r has the r-th
    contiguous slice.
    """
    wanted = parts(mixture.shares, max(sequences, len(mixture.sources)))
    sources, samples = [], []
    for source, (of, most) in enumerate(zip(mixture.sources, wanted.tolist(), strict=True)):
        count = min(most, len(of))
        sources.append(np.full(count, source))
        samples.append(np.arange(count) * len(of) // count)
    chosen = np.stack((np.concatenate(sources), np.concatenate(samples)))
    if not chosen.size:
        raise WeftError("the held-out text has no row: use a larger data.validation_fraction")
    share = -(-chosen.shape[1] // dp_size)
    rows_per_batch = min(microbatch, share)
    share = -(-share // rows_per_batch) * rows_per_batch
    for first in range(dp_rank * share, (dp_rank + 1) * share, rows_per_batch):
        here = chosen[:, first : first + rows_per_batch]
        missing = rows_per_batch - here.shape[1]
        filled = np.concatenate((here, np.repeat(chosen[:, :1], missing, axis=1)), axis=1)
        batch = mixture.rows(*filled)
        if missing:
            batch.targets_BT[-missing:] = IGNORE
        yield batch


def _slice(rows: Batch, first: int, end: int) -> Batch:
    return Batch._make(column if column is None else column[first:end] for column in rows)


def _pinned(batch: Batch) -> Batch:
    return Batch._make(part if part is None else part.pin_memory() for part in batch)


def _batch(rows: Ints, packing: Packing, separator: int) -> Batch:
    """Rows of T + 1 tokens as inputs and targets."""
    tokens, targets = rows[:, :-1].copy(), rows[:, 1:].copy()
    if packing == "windows":
        return Batch(torch.from_numpy(tokens), torch.from_numpy(targets), None, None)
    ends = np.flatnonzero(tokens == separator)
    targets.reshape(-1)[ends] = IGNORE  # it would be the first token of another document
    # By documents, which are few, and not by tokens: as quick as it gets in numpy.
    length = tokens.shape[1]
    starts = np.union1d(np.arange(0, tokens.size, length), ends[ends < tokens.size - 1] + 1)
    sizes = np.diff(starts, append=tokens.size)
    numbers = np.arange(len(starts)) - np.searchsorted(starts, starts // length * length)
    documents = np.repeat(numbers, sizes).reshape(tokens.shape)
    positions = (np.arange(tokens.size) - np.repeat(starts, sizes)).reshape(tokens.shape)
    return Batch(*map(torch.from_numpy, (tokens, targets, documents, positions)))
