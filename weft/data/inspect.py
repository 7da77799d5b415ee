"""What is in prepared data, for people: how much, how long documents are, and what they look like.

All of it is read from the tokens: a document is what lies before a separator.  Of text in few
files, whose ends are held out, a document is counted in both splits.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np

from weft.data.dataset import Dataset, Source
from weft.data.order import Ints
from weft.data.token_store import Store, TokenStream

CHUNK_TOKENS = 16 << 20
LONGEST = 3
SHOWN_TOKENS = 120  # of a sample
BAR = 40  # characters
QUANTILES = {
    "min": 0.0,
    "5%": 0.05,
    "25%": 0.25,
    "median": 0.5,
    "75%": 0.75,
    "95%": 0.95,
    "99%": 0.99,
    "max": 1.0,
}


def summary(text: Dataset) -> list[str]:
    """A table of the sources: documents, tokens and bytes of both splits."""
    rows: list[tuple[str, ...]] = [
        ("", "", "documents", "tokens", "share", "text bytes", "bytes/token")
    ]
    whole = sum(s.store.manifest.train.tokens for s in text.sources)
    for source in text.sources:
        manifest = source.store.manifest
        for name, split in (("train", manifest.train), ("held out", manifest.validation)):
            train = name == "train"
            rows.append(
                (
                    (source.name if text.shares else "") if train else "",
                    name,
                    f"{split.documents:,}",
                    f"{split.tokens:,}",
                    f"{split.tokens / max(whole, 1):.1%}" if train else "",
                    f"{split.bytes:,}" if split.bytes else "?",
                    f"{split.bytes / split.tokens:.2f}" if split.bytes else "?",
                )
            )
    if not text.shares:
        rows = [row[1:] for row in rows]
    names = len(rows[0]) - 5  # of words; the others are numbers
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = zip(row, widths, range(len(row)), strict=True)
        line = "  ".join(c.ljust(w) if n < names else c.rjust(w) for c, w, n in cells)
        lines.append(line.rstrip())
    for source in text.sources:
        lines += _left_out(source)
    if text.shares:
        told = ", ".join(f"{name} {share:.1%}" for name, share in text.shares.items())
        lines.append(f"a run sees: {told}")
    lines.append(f"tokenizer: {text.vocab_size:,} entries; prepared in {text.path}")
    return lines


def _left_out(source: Source) -> Iterator[str]:
    manifest = source.store.manifest
    for count, what in (
        (manifest.empty_documents, "empty documents were left out"),
        (manifest.skipped_files, "that are not UTF-8 were left out"),
        (manifest.replaced_files, "that are not UTF-8 had bytes replaced"),
    ):
        if count:
            name = Path(manifest.source).name
            yield f"{name}: {count:,} {what}"


def inspect(text: Dataset, samples: int) -> Iterator[str]:
    """Lines that tell all there is; ``samples`` documents of each source are shown."""
    yield from summary(text)
    for source in text.sources:
        yield ""
        if text.shares:
            yield f"== {source.name}"
        yield from _inspect(source.store, samples)


def _inspect(store: Store, samples: int) -> Iterator[str]:
    stream, separator = store.tokens("train"), store.manifest.separator
    lengths: dict[int, int] = {}
    longest: list[tuple[int, int]] = []  # of documents: tokens, and where they begin
    text = store.manifest.kind == "text"
    for begins, sizes in _documents(stream, separator) if text else [_conversations(store)]:
        for size, count in zip(*np.unique(sizes, return_counts=True), strict=True):
            lengths[int(size)] = lengths.get(int(size), 0) + int(count)
        some = np.argsort(sizes)[-LONGEST:]
        found = [*longest, *zip(sizes[some].tolist(), begins[some].tolist(), strict=True)]
        longest = heapq.nlargest(LONGEST, found)
    if not lengths:
        yield "the train text has no token that ends a document: it is one"
        yield from _sampled(store, stream, samples, separator)
        return
    values = np.array(sorted(lengths))
    counts = np.array([lengths[value] for value in values.tolist()])
    yield "tokens of a document in the train text:"
    yield "  " + "  ".join(
        f"{name} {_quantile(values, counts, share):,}" for name, share in QUANTILES.items()
    )
    yield from _histogram(values, counts)
    yield "longest documents:"
    tokenizer = store.tokenizer()
    for size, begin in longest:
        start = stream.window(np.array([begin]), min(size, 30))[0]
        yield f"  {size:,} tokens: {_one_line(tokenizer.decode(start.tolist()))[:80]}"
    if text:
        yield from _sampled(store, stream, samples, separator)
    else:
        yield from _learned(store, samples)


def _documents(stream: TokenStream, separator: int) -> Iterator[tuple[Ints, Ints]]:
    """Where documents begin, and how many tokens they have without separator: a chunk at a time."""
    begin = 0
    for first in range(0, len(stream), CHUNK_TOKENS):
        size = min(CHUNK_TOKENS, len(stream) - first)
        tokens = stream.window(np.array([first]), size)[0]
        ends = np.flatnonzero(tokens == separator) + first
        if len(ends):
            begins = np.concatenate(([begin], ends[:-1] + 1))
            yield begins, ends - begins
            begin = int(ends[-1]) + 1


def _conversations(store: Store) -> tuple[Ints, Ints]:
    """Where conversations begin, and how many tokens they have."""
    ends = store.index("train")[:, 0]
    begins = np.concatenate(([0], ends[:-1]))
    return begins, ends - begins


def _learned(store: Store, samples: int) -> Iterator[str]:
    """Evenly spaced conversations as they are trained on; what is learned is between [[ and ]]."""
    stream, learned, tokenizer = store.tokens("train"), store.learned("train"), store.tokenizer()
    assert learned is not None
    index = store.index("train")
    begins, sizes = _conversations(store)
    samples = min(samples, len(index))
    for number in range(samples):
        place = len(index) * number // samples
        at, size = begins[[place]], min(SHOWN_TOKENS, int(sizes[place]))
        tokens, mask = stream.window(at, size)[0], learned.window(at, size)[0]
        cuts = [0, *(np.flatnonzero(np.diff(mask)) + 1).tolist(), size]
        text = ""
        for begin, end in pairwise(cuts):
            piece = tokenizer.decode(tokens[begin:end].tolist(), skip_special_tokens=False)
            text += f"[[{piece}]]" if mask[begin] else piece
        _, file, line = index[place].tolist()
        yield f"-- {store.manifest.files[file]}:{line}"
        yield text


def _quantile(values: Ints, counts: Ints, share: float) -> int:
    place = np.searchsorted(np.cumsum(counts), share * counts.sum())
    return int(values[min(place, len(values) - 1)])


def _histogram(values: Ints, counts: Ints) -> Iterator[str]:
    """Documents by length, in powers of two."""
    bins = np.bincount(np.frexp(np.maximum(values, 1))[1] - 1, weights=counts).astype(np.int64)
    first = int(np.flatnonzero(bins)[0])
    width = len(f"{(1 << len(bins)) - 1:,}")
    for power, count in enumerate(bins.tolist()):
        if power < first:
            continue
        bar = "#" * -(-BAR * count // int(bins.max()))
        low, high = (1 << power) - (power == 0), (2 << power) - 1
        yield f"  {low:>{width},} - {high:>{width},}  {count:>12,}  {bar}".rstrip()


def _sampled(store: Store, stream: TokenStream, samples: int, separator: int) -> Iterator[str]:
    """Documents from evenly spaced places, from their beginning on."""
    tokenizer = store.tokenizer()
    for number in range(samples):
        place = len(stream) * number // samples
        begin = _next_begin(stream, place, separator) if number else 0
        [found] = stream.window(np.array([begin]), min(SHOWN_TOKENS, len(stream) - begin))
        tokens = found.tolist()
        if separator in tokens[1:]:
            tokens = tokens[: tokens.index(separator, 1)]
        yield f"-- from token {begin:,}"
        yield tokenizer.decode(tokens)


def _next_begin(stream: TokenStream, place: int, separator: int) -> int:
    """Where the next document begins, if it does soon."""
    tokens = stream.window(np.array([place]), min(CHUNK_TOKENS // 16, len(stream) - place))[0]
    ends = np.flatnonzero(tokens == separator)
    return place + int(ends[0]) + 1 if len(ends) and ends[0] + 1 < len(tokens) else place


def _one_line(text: str) -> str:
    return " ".join(text.split())
