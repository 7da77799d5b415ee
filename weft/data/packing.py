"""Pack whole documents into sequences with little padding.

*Best-fit decreasing*: the longest document first, each into the sequence that it fills best, or
else into a new one.  This needs at most 11/9 of the optimal number of sequences plus a constant
(Johnson et al., SIAM J. Comput. 3, 1974).  With thousands of documents nearly all sequences are
full (Ding et al., arXiv:2404.10830).

The sequence that a document fills best has the least sufficient space.  One integer, ``spaces``,
has bit r set if a sequence has space for exactly r tokens; shifted right by the document's length,
its lowest bit is the wanted space.  Documents of one length are placed together, so a million of
them take a second at most.

A document of n tokens has length n - 1: its last token is a target, and never an input.  A score is
read at the last token, which then is an input, too: length n (``scores``).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from weft.config.schema import DataSection
from weft.data.token_store import Ints, SplitName, Store


@dataclass(frozen=True)
class PackedSequences:
    """Sequences of whole documents.

    Attributes:
        starts, lengths: first token and number of input tokens of each document, int64 (n,).
        document_order, offsets: see `documents_of`.
        num_skipped, num_truncated: documents too long for a sequence, dropped or truncated.
    """

    starts: Ints
    lengths: Ints
    document_order: Ints
    offsets: Ints
    num_skipped: int = 0
    num_truncated: int = 0

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def documents_of(self, sequence: int) -> Ints:
        """Return the documents of a sequence, in order."""
        return self.document_order[self.offsets[sequence] : self.offsets[sequence + 1]]

    def fill_fraction(self, seq_len: int) -> float:
        """Return the fraction of all positions that hold document tokens."""
        return float(self.lengths[self.document_order].sum()) / max(1, len(self) * seq_len)


def pack_best_fit(lengths: Ints, capacity: int, seed: int) -> tuple[Ints, Ints]:
    """Pack documents: return ``document_order`` and ``offsets`` of `PackedSequences`.

    Args:
        lengths: int64 (n,), each from 1 to ``capacity``.
        capacity: tokens per sequence.
        seed: shuffles documents of equal length.
    """
    shuffled = np.random.default_rng([seed, len(lengths)]).permutation(len(lengths))
    longest_first = shuffled[np.argsort(-lengths[shuffled], kind="stable")]
    sequences_by_space: list[list[int]] = [[] for _ in range(capacity + 1)]
    spaces = 0
    sequence_of = np.empty(len(lengths), np.int64)
    num_sequences = begin = 0
    sizes, counts = np.unique(lengths, return_counts=True)
    for length, count in zip(sizes[::-1].tolist(), counts[::-1].tolist(), strict=True):
        end = begin + count
        while begin < end:
            fitting = spaces >> length
            space = length + (fitting & -fitting).bit_length() - 1 if fitting else capacity
            # No sequence has less space that suffices, so documents of this length fill one.
            per_sequence = space // length
            wanted = -(-(end - begin) // per_sequence)
            if fitting:
                with_space = sequences_by_space[space]
                used = with_space[: -wanted - 1 : -1]  # the last first
                del with_space[-wanted:]
                if not with_space:
                    spaces ^= 1 << space
            else:
                used = list(range(num_sequences, num_sequences + wanted))
                num_sequences += wanted
            placed = min(end - begin, len(used) * per_sequence)
            sequences = np.repeat(np.array(used), per_sequence)[:placed]
            sequence_of[longest_first[begin : begin + placed]] = sequences
            begin += placed
            num_full, rest = divmod(placed, per_sequence)
            for filled, remaining in (
                (used[:num_full], space - per_sequence * length),
                (used[num_full:], space - rest * length),
            ):
                if filled and remaining:
                    sequences_by_space[remaining] += filled
                    spaces |= 1 << remaining
    order = longest_first[np.argsort(sequence_of[longest_first], kind="stable")]
    return order, np.searchsorted(sequence_of[order], np.arange(num_sequences + 1))


def pack_split(
    store: Store,
    split: SplitName,
    seq_len: int,
    section: DataSection,
    seed: int,
    scores: bool = False,
) -> PackedSequences:
    """Pack a split; pairs of preferences stay together, chosen answer first.

    A labeled answer and the one that its prompt has in `SwappedAnswers` take the same place of two
    sequences, so it has room for the longer one.

    ``scores``: the last token of a conversation is an input, too.
    ``data.overlong`` decides whether longer conversations are dropped or truncated, and those left
    without a trained token are dropped.  Longer documents of text are split into chunks.
    """
    if store.manifest.kind == "text":
        starts, lengths = _chunk_documents(store, split, seq_len)
        return PackedSequences(starts, lengths, *pack_best_fit(lengths, seq_len, seed))
    starts, lengths, is_used = select_conversations(store, split, seq_len, section, scores)
    num_skipped = int((~is_used).sum())
    if store.manifest.kind == "preferences":
        pairs = np.flatnonzero(is_used)
        order, offsets = pack_best_fit(lengths.reshape(-1, 2).sum(1)[pairs], seq_len, seed)
        documents = (2 * pairs[order][:, None] + np.arange(2)).ravel()
        return PackedSequences(starts, lengths, documents, 2 * offsets, num_skipped)
    if store.manifest.kind == "unpaired":
        swapped = swap_answers(store, split).lengths(lengths)
        answers = np.flatnonzero(is_used)
        needed = np.minimum(np.maximum(lengths, swapped), seq_len)[answers]
        order, offsets = pack_best_fit(needed, seq_len, seed)
        return PackedSequences(starts, lengths, answers[order], offsets, num_skipped)
    starts, lengths = starts[is_used], lengths[is_used]
    num_truncated = int((lengths > seq_len).sum())
    lengths = np.minimum(lengths, seq_len)
    return PackedSequences(
        starts, lengths, *pack_best_fit(lengths, seq_len, seed), num_skipped, num_truncated
    )


@dataclass(frozen=True)
class SwappedAnswers:
    """Each prompt of a split with an answer to another prompt.

    KTO estimates a divergence with them.

    Attributes:
        partners: the document whose answer each document's prompt gets, int64 (n,).
        prompt_lengths: tokens before the answer of each document, int64 (n,).
    """

    partners: Ints
    prompt_lengths: Ints

    def lengths(self, lengths: Ints) -> Ints:
        """Return the input tokens with the other answers, by those with their own."""
        answers = lengths - self.prompt_lengths
        swapped: Ints = self.prompt_lengths + answers[self.partners]
        return swapped


def swap_answers(store: Store, split: SplitName) -> SwappedAnswers:
    """Give each prompt the answer of the line before it.

    The first prompt has that of the last line.  Two answers of a line have the same prompt.  They
    get the two of the line before.
    """
    index, loss_mask = store.index(split), store.loss_mask(split)
    assert loss_mask is not None
    ends = index[:, 0]
    starts = np.concatenate(([0], ends))[:-1].astype(np.int64)
    trained = loss_mask.find_token(1)
    # The first token of a document is no target.
    prompt_lengths = trained[np.searchsorted(trained, starts + 1)] - starts
    is_first = np.append(True, (index[1:, 1:] != index[:-1, 1:]).any(1))[: len(index)]
    firsts = np.flatnonzero(is_first)
    line_of, sizes = np.cumsum(is_first) - 1, np.diff(firsts, append=len(index))
    before = (line_of - 1) % len(firsts)
    place = np.minimum(np.arange(len(index)) - firsts[line_of], sizes[before] - 1)
    return SwappedAnswers(firsts[before] + place, prompt_lengths)


def select_conversations(
    store: Store, split: SplitName, seq_len: int, section: DataSection, scores: bool = False
) -> tuple[Ints, Ints, NDArray[np.bool_]]:
    """Return starts and lengths of conversations, and which ones or pairs to use.

    ``scores``: the last token of a conversation is an input, too.
    """
    ends = store.index(split)[:, 0]
    starts = np.concatenate(([0], ends))[:-1].astype(np.int64)
    lengths = ends - starts - (not scores)
    if store.manifest.kind == "preferences":
        return starts, lengths, lengths.reshape(-1, 2).sum(1) <= seq_len
    is_used = lengths <= seq_len
    if section.overlong == "truncate":
        loss_mask = store.loss_mask(split)
        assert loss_mask is not None
        for document in np.flatnonzero(~is_used).tolist():
            mask = loss_mask.read_windows(starts[document : document + 1], seq_len + 1)[0, 1:]
            is_used[document] = mask.any()
    return starts, lengths, is_used


def _chunk_documents(store: Store, split: SplitName, seq_len: int) -> tuple[Ints, Ints]:
    """Split text at separators, and long documents into chunks of ``seq_len`` tokens.

    Tokens after the last separator are a document, too: llm.c puts separators before documents.
    Documents may begin with the separator before them: see `Manifest.starts_at_separator`.
    """
    ends, num_tokens = store.document_ends(split), store.split(split).tokens
    if num_tokens > (ends[-1] if len(ends) else 0):
        ends = np.append(ends, num_tokens)
    starts = np.concatenate(([0], ends))[:-1].astype(np.int64)
    if store.manifest.starts_at_separator:
        starts[1:] -= 1
    lengths = ends - starts - 1
    num_chunks = -(-lengths // seq_len)  # zero for a document that is only its separator
    chunk = np.arange(num_chunks.sum()) - np.repeat(np.cumsum(num_chunks) - num_chunks, num_chunks)
    starts = np.repeat(starts, num_chunks) + chunk * seq_len
    return starts, np.minimum(np.repeat(lengths, num_chunks) - chunk * seq_len, seq_len)
