"""Describe prepared data for people: amounts, document lengths and samples.

All is computed from the tokens: a document is the text before a separator.  If the validation set
consists of tails of files, both splits count these documents.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np

from weft.config.escaping import format_columns
from weft.data.dataset import Dataset, Source
from weft.data.order import Ints
from weft.data.token_store import Store, TokenStream

CHUNK_TOKENS = 16 << 20
NUM_LONGEST = 3
SHOWN_TOKENS = 120  # per sample
BAR_WIDTH = 40  # characters
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


def summarize_dataset(dataset: Dataset) -> list[str]:
    """Return a table of the sources: documents, tokens and bytes of both splits."""
    rows: list[tuple[str, ...]] = [
        ("", "", "documents", "tokens", "share", "text bytes", "bytes/token")
    ]
    total_tokens = sum(source.store.manifest.train.tokens for source in dataset.sources)
    for source in dataset.sources:
        manifest = source.store.manifest
        for name, split in (("train", manifest.train), ("validation", manifest.validation)):
            is_train = name == "train"
            rows.append(
                (
                    (source.name if dataset.shares else "") if is_train else "",
                    name,
                    f"{split.documents:,}",
                    f"{split.tokens:,}",
                    f"{split.tokens / max(total_tokens, 1):.1%}" if is_train else "",
                    f"{split.bytes:,}" if split.bytes else "?",
                    f"{split.bytes / split.tokens:.2f}" if split.bytes else "?",
                )
            )
    if not dataset.shares:
        rows = [row[1:] for row in rows]
    num_text_columns = len(rows[0]) - 5
    lines = format_columns(rows[0], rows[1:], left=range(num_text_columns))
    for source in dataset.sources:
        lines += _report_skipped(source)
    if dataset.shares:
        shares = ", ".join(f"{name} {share:.1%}" for name, share in dataset.shares.items())
        lines.append(f"training mixture: {shares}")
    lines.append(f"tokenizer: {dataset.vocab_size:,} entries; prepared in {dataset.path}")
    return lines


def _report_skipped(source: Source) -> Iterator[str]:
    manifest = source.store.manifest
    for count, message in (
        (manifest.empty_documents, "empty documents were skipped"),
        (manifest.skipped_files, "that are not UTF-8 were skipped"),
        (manifest.replaced_files, "that are not UTF-8 had bytes replaced"),
    ):
        if count:
            name = Path(manifest.source).name
            yield f"{name}: {count:,} {message}"


def inspect_dataset(dataset: Dataset, num_samples: int) -> Iterator[str]:
    """Yield a complete description, with ``num_samples`` documents of each source."""
    yield from summarize_dataset(dataset)
    for source in dataset.sources:
        yield ""
        if dataset.shares:
            yield f"== {source.name}"
        yield from _inspect_store(source.store, num_samples)


def _inspect_store(store: Store, num_samples: int) -> Iterator[str]:
    stream, separator = store.tokens("train"), store.manifest.separator
    lengths: dict[int, int] = {}
    longest: list[tuple[int, int]] = []  # (tokens, start) of documents
    is_text = store.manifest.kind == "text"
    for begins, sizes in (
        _iterate_documents(stream, separator) if is_text else [_locate_conversations(store)]
    ):
        for size, count in zip(*np.unique(sizes, return_counts=True), strict=True):
            lengths[int(size)] = lengths.get(int(size), 0) + int(count)
        indices = np.argsort(sizes)[-NUM_LONGEST:]
        candidates = [
            *longest,
            *zip(sizes[indices].tolist(), begins[indices].tolist(), strict=True),
        ]
        longest = heapq.nlargest(NUM_LONGEST, candidates)
    if not lengths:
        yield "the train text has no separator: it is one document"
        yield from _show_documents(store, stream, num_samples, separator)
        return
    values = np.array(sorted(lengths))
    counts = np.array([lengths[value] for value in values.tolist()])
    yield "tokens per document in the train text:"
    yield "  " + "  ".join(
        f"{name} {_quantile(values, counts, fraction):,}" for name, fraction in QUANTILES.items()
    )
    yield from _histogram(values, counts)
    yield "longest documents:"
    tokenizer = store.tokenizer()
    for size, begin in longest:
        start = stream.read_windows(np.array([begin]), min(size, 30))[0]
        yield f"  {size:,} tokens: {_join_lines(tokenizer.decode(start.tolist()))[:80]}"
    if is_text:
        yield from _show_documents(store, stream, num_samples, separator)
    else:
        yield from _show_conversations(store, num_samples)


def _iterate_documents(stream: TokenStream, separator: int) -> Iterator[tuple[Ints, Ints]]:
    """Yield starts and token counts (without separator) of documents, in chunks."""
    begin = 0
    for first in range(0, len(stream), CHUNK_TOKENS):
        size = min(CHUNK_TOKENS, len(stream) - first)
        tokens = stream.read_windows(np.array([first]), size)[0]
        ends = np.flatnonzero(tokens == separator) + first
        if len(ends):
            begins = np.concatenate(([begin], ends[:-1] + 1))
            yield begins, ends - begins
            begin = int(ends[-1]) + 1


def _locate_conversations(store: Store) -> tuple[Ints, Ints]:
    """Return starts and token counts of conversations."""
    ends = store.index("train")[:, 0]
    begins = np.concatenate(([0], ends[:-1]))
    return begins, ends - begins


def _show_conversations(store: Store, num_samples: int) -> Iterator[str]:
    """Yield evenly spaced conversations, with trained tokens between [[ and ]]."""
    stream, loss_mask, tokenizer = (
        store.tokens("train"),
        store.loss_mask("train"),
        store.tokenizer(),
    )
    assert loss_mask is not None
    index = store.index("train")
    begins, sizes = _locate_conversations(store)
    num_samples = min(num_samples, len(index))
    for number in range(num_samples):
        position = len(index) * number // num_samples
        start, size = begins[[position]], min(SHOWN_TOKENS, int(sizes[position]))
        tokens, mask = stream.read_windows(start, size)[0], loss_mask.read_windows(start, size)[0]
        cuts = [0, *(np.flatnonzero(np.diff(mask)) + 1).tolist(), size]
        text = ""
        for begin, end in pairwise(cuts):
            chunk = tokenizer.decode(tokens[begin:end].tolist(), skip_special_tokens=False)
            text += f"[[{chunk}]]" if mask[begin] else chunk
        _, file, line = index[position].tolist()
        yield f"-- {store.manifest.files[file]}:{line}"
        yield text


def _quantile(values: Ints, counts: Ints, fraction: float) -> int:
    index = np.searchsorted(np.cumsum(counts), fraction * counts.sum())
    return int(values[min(index, len(values) - 1)])


def _histogram(values: Ints, counts: Ints) -> Iterator[str]:
    """Yield documents by length, in powers of two."""
    bins = np.bincount(np.frexp(np.maximum(values, 1))[1] - 1, weights=counts).astype(np.int64)
    first = int(np.flatnonzero(bins)[0])
    width = len(f"{(1 << len(bins)) - 1:,}")
    for power, count in enumerate(bins.tolist()):
        if power < first:
            continue
        bar = "#" * -(-BAR_WIDTH * count // int(bins.max()))
        low, high = (1 << power) - (power == 0), (2 << power) - 1
        yield f"  {low:>{width},} - {high:>{width},}  {count:>12,}  {bar}".rstrip()


def _show_documents(
    store: Store, stream: TokenStream, num_samples: int, separator: int
) -> Iterator[str]:
    """Yield documents at evenly spaced positions, from their start."""
    tokenizer = store.tokenizer()
    for number in range(num_samples):
        position = len(stream) * number // num_samples
        begin = _find_document_start(stream, position, separator) if number else 0
        [window] = stream.read_windows(np.array([begin]), min(SHOWN_TOKENS, len(stream) - begin))
        tokens = window.tolist()
        if separator in tokens[1:]:
            tokens = tokens[: tokens.index(separator, 1)]
        yield f"-- from token {begin:,}"
        yield tokenizer.decode(tokens)


def _find_document_start(stream: TokenStream, position: int, separator: int) -> int:
    """Return the start of the next document, or ``position`` if none is near."""
    tokens = stream.read_windows(
        np.array([position]), min(CHUNK_TOKENS // 16, len(stream) - position)
    )[0]
    ends = np.flatnonzero(tokens == separator)
    return position + int(ends[0]) + 1 if len(ends) and ends[0] + 1 < len(tokens) else position


def _join_lines(text: str) -> str:
    return " ".join(text.split())
