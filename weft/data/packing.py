"""Which documents go into which row, so that none is cut and little is padding.

*Best fit, decreasing*: the longest document first, each into the row that it fills best, or else
into a new one.  That is at most 11/9 of the fewest rows there can be, and a few (Johnson et al.,
SIAM J. Comput. 3, 1974), and of thousands of documents nearly all rows are full (Ding et al.,
arXiv:2404.10830, who train on documents packed so).

The row that a document fills best is the one with the least room that is enough.  One number,
``rooms``, has bit r set where some row has room for exactly r tokens; shifted right by a document's
length, its lowest bit is what is wanted.  So a document costs a few operations on T bits, whatever
the number of rows: a million conversations take seconds.

A document of n tokens takes n - 1 places: its last token is a target, and never an input.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from weft.config.errors import SHOWN, ConfigError, truncate_list
from weft.config.schema import DataSection
from weft.data.order import Ints
from weft.data.token_store import SPLITS, SplitName, Store


@dataclass(frozen=True)
class Rows:
    """Rows of whole documents.

    Attributes:
        begins, lengths: the first token of each document that is used, and its places: int64 (n,).
        order, firsts: row r has the documents ``order[firsts[r] : firsts[r + 1]]``.
        skipped, cut: documents that were too long, and left out or cut.
    """

    begins: Ints
    lengths: Ints
    order: Ints
    firsts: Ints
    skipped: int = 0
    cut: int = 0

    def __len__(self) -> int:
        return len(self.firsts) - 1

    def full(self, seq_len: int) -> float:
        """The share of all places that is taken."""
        return float(self.lengths[self.order].sum()) / max(1, len(self) * seq_len)


def best_fit(lengths: Ints, capacity: int, seed: int) -> tuple[Ints, Ints]:
    """Documents, by number, in rows of ``capacity``: ``order`` and ``firsts`` of `Rows`.

    Args:
        lengths: of the documents, int64 (n,), from 1 to ``capacity``.
        seed: decides which of several documents of one length goes where.
    """
    shuffled = np.random.default_rng([seed, len(lengths)]).permutation(len(lengths))
    longest_first = shuffled[np.argsort(-lengths[shuffled], kind="stable")]
    with_room: list[list[int]] = [[] for _ in range(capacity + 1)]  # rows by the room they have
    rooms = 0
    row_of = np.empty(len(lengths), np.int64)
    rows = 0
    for document, length in zip(
        longest_first.tolist(), lengths[longest_first].tolist(), strict=True
    ):
        if fitting := rooms >> length:
            room = length + (fitting & -fitting).bit_length() - 1
            row = with_room[room].pop()
            if not with_room[room]:
                rooms ^= 1 << room
        else:
            room, row = capacity, rows
            rows += 1
        if left := room - length:
            with_room[left].append(row)
            rooms |= 1 << left
        row_of[document] = row
    order = longest_first[np.argsort(row_of[longest_first], kind="stable")]
    return order, np.searchsorted(row_of[order], np.arange(rows + 1))


def pack(store: Store, split: SplitName, seq_len: int, section: DataSection, seed: int) -> Rows:
    """The rows of a split; of preferences one for each pair, chosen first.

    What is too long for a row is left out, or cut at its end, as ``data.overlong`` says (text is
    cut in pieces); so is what has nothing left to learn.
    """
    if store.manifest.kind == "text":
        begins, lengths = _pieces(store, split, seq_len)
        return Rows(begins, lengths, *best_fit(lengths, seq_len, seed))
    begins, lengths, used = _used(store, split, seq_len, section)
    skipped = int((~used).sum())
    if store.manifest.kind == "preferences":
        documents = (2 * np.flatnonzero(used)[:, None] + np.arange(2)).ravel()
        return Rows(begins, lengths, documents, np.arange(0, len(documents) + 1, 2), skipped)
    begins, lengths = begins[used], lengths[used]
    cut = int((lengths > seq_len).sum())
    lengths = np.minimum(lengths, seq_len)
    return Rows(begins, lengths, *best_fit(lengths, seq_len, seed), skipped, cut)


def _used(
    store: Store, split: SplitName, seq_len: int, section: DataSection
) -> tuple[Ints, Ints, NDArray[np.bool_]]:
    """Where conversations begin, the places that they would take, and which (of preferences, which
    pairs) are not left out."""
    ends = store.index(split)[:, 0]
    begins = np.concatenate(([0], ends))[:-1].astype(np.int64)
    lengths = ends - begins - 1
    if store.manifest.kind == "preferences":
        return begins, lengths, lengths.reshape(-1, 2).sum(1) <= seq_len
    used = lengths <= seq_len
    if section.overlong == "truncate":
        learned = store.learned(split)
        assert learned is not None
        for document in np.flatnonzero(~used).tolist():
            seen = learned.window(begins[document : document + 1], seq_len + 1)[0, 1:]
            used[document] = seen.any()
    return begins, lengths, used


def _pieces(store: Store, split: SplitName, seq_len: int) -> tuple[Ints, Ints]:
    """Documents of a text, from separator to separator; long ones in pieces of whole rows.

    What comes after the last separator, in tokens that others made, is a document, too: llm.c puts
    separators before documents.
    """
    stream = store.tokens(split)
    ends = stream.find(store.manifest.separator) + 1
    if len(stream) > (ends[-1] if len(ends) else 0):
        ends = np.append(ends, len(stream))
    begins = np.concatenate(([0], ends))[:-1].astype(np.int64)
    lengths = ends - begins - 1
    pieces = -(-lengths // seq_len)  # none of a document that is only its separator
    number = np.arange(pieces.sum()) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    begins = np.repeat(begins, pieces) + number * seq_len
    return begins, np.minimum(np.repeat(lengths, pieces) - number * seq_len, seq_len)


# --------------------------------------------------------------------------- what is said of it


def check_conversations(store: Store, seq_len: int, section: DataSection) -> list[ConfigError]:
    """What is wrong with conversations: a store of another kind than ``data.format``, those that
    are too long, by file and line, and splits of which nothing is left; of text nothing."""
    kind, names = store.manifest.kind, store.manifest.files
    if kind == "text":
        return []
    if section.format == "text":
        rule = f"is not what the store {store.path} holds"
        return [ConfigError("data.format", "text", rule, f"use {kind}")]
    if kind == "preferences" and section.overlong == "truncate":
        rule = "cannot be: of two answers of which one is cut, none is preferred"
        return [ConfigError("data.overlong", "truncate", rule, "use error or skip")]
    what = "pairs" if kind == "preferences" else "conversations"
    found = []
    for split in SPLITS:
        index = store.index(split)
        places = np.diff(index[:, 0], prepend=0) - 1
        if kind == "preferences":
            index, places = index[::2], places.reshape(-1, 2).sum(1)
        here = np.flatnonzero(places > seq_len)
        found += [(*index[i, 1:].tolist(), int(places[i])) for i in here]
    if found and section.overlong == "error":
        found.sort()
        lines = [f"{names[file]}:{line}: {size} tokens" for file, line, size in found[:SHOWN]]
        longest = max(size for _, _, size in found)
        rule = f"is shorter than {len(found)} {what}:\n  " + truncate_list(
            lines, "\n  ", len(found)
        )
        cut = "" if kind == "preferences" else ", or truncate"
        remedy = f"use {longest}, or --data.overlong skip{cut}"
        return [ConfigError("train.seq_len", seq_len, rule, remedy)]
    for split in SPLITS:
        _, _, used = _used(store, split, seq_len, section)
        if not used.any():
            rule = f"all {len(used)} {what} of the {split} split are longer than a row"
            return [ConfigError("train.seq_len", seq_len, rule, "use a larger one")]
    return []


def packing_line(store: Store, seq_len: int, section: DataSection, seed: int) -> str:
    """What packing comes to, for people: of the train split."""
    rows, split = pack(store, "train", seq_len, section, seed), store.manifest.train
    number = len(rows.lengths) if store.manifest.kind == "text" else split.documents
    what = {
        "text": f"{number:,} pieces of {split.tokens:,} tokens",
        "chat": f"{number:,} conversations of {split.tokens:,} tokens",
        "preferences": f"{number // 2:,} pairs of {split.tokens:,} tokens",
    }[store.manifest.kind]
    learned = store.learned("train")
    if learned is not None:
        what += f", of which {learned.count_nonzero() / max(1, split.tokens):.0%} are learned"
    line = f"{what}, in {len(rows):,} rows of {seq_len:,}, {rows.full(seq_len):.1%} full"
    told = [(rows.cut, "cut at their end"), (rows.skipped, "left out")]
    told_text = "".join(f"; {count:,} too long and {how}" for count, how in told if count)
    return line + told_text
