"""Describe prepared data for people: amounts, lengths, packing and samples.

All is computed from the tokens: a document is the text before a separator.  If the validation set
consists of tails of files, both splits count these documents.
"""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from itertools import pairwise
from pathlib import Path

import numpy as np

from weft.config.formatting import format_columns
from weft.config.schema import DataSection
from weft.data.dataset import Dataset
from weft.data.packing import pack_split
from weft.data.token_store import Ints, Split, Store

NUM_LONGEST = 3
SHOWN_TOKENS, PAGE_TOKENS = 120, 8192  # per sample, in the terminal and on a page
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
        title = source.name if dataset.shares else ""
        share = f"{manifest.train.tokens / max(total_tokens, 1):.1%}"
        rows.append((title, "train", *_count(manifest.train, share)))
        if dataset.validation is None and manifest.validation.tokens:
            rows.append(("", "validation", *_count(manifest.validation)))
    if dataset.validation is not None:
        name = dataset.validation.name if dataset.shares else ""
        rows.append((name, "validation", *_count(dataset.validation.store.manifest.train)))
    if not dataset.shares:
        rows = [row[1:] for row in rows]
    num_text_columns = len(rows[0]) - 5
    lines = format_columns(rows[0], rows[1:], left=range(num_text_columns))
    for store in dataset.stores:
        lines += _report_skipped(store)
        lines += [f"{Path(store.manifest.source).name}: {note}" for note in store.manifest.notes]
    lines += dataset.notes
    if not dataset.has_validation:
        lines.append("no validation set")
    if dataset.shares:
        shares = ", ".join(f"{name} {share:.1%}" for name, share in dataset.shares.items())
        lines.append(f"training mixture: {shares}")
    # A store in a bucket has its URL, which is the data.path of other machines.
    place = dataset.path if dataset.shares or dataset.validation else dataset.stores[0].url
    lines.append(f"tokenizer: {dataset.vocab_size:,} entries; prepared in {place or dataset.path}")
    return lines


def _count(split: Split, share: str = "") -> tuple[str, ...]:
    """Return the numbers of a split in the table of `summarize_dataset`."""
    return (
        f"{split.documents:,}",
        f"{split.tokens:,}",
        share,
        f"{split.bytes:,}" if split.bytes else "?",
        f"{split.bytes / split.tokens:.2f}" if split.bytes else "?",
    )


def _report_skipped(store: Store) -> Iterator[str]:
    manifest = store.manifest
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
    stream = store.tokens("train")
    is_text = store.manifest.kind == "text"
    ends = store.document_ends("train") - 1 if is_text else store.index("train")[:, 0]
    begins = np.concatenate(([0], ends[:-1] + is_text))[: len(ends)]  # after the separator
    sizes = ends - begins
    if len(ends):
        yield "tokens per document in the train text:"
        quantiles = np.quantile(sizes, list(QUANTILES.values()), method="inverted_cdf")
        yield "  " + "  ".join(
            f"{name} {size:,}" for name, size in zip(QUANTILES, quantiles.tolist(), strict=True)
        )
        yield from _histogram(sizes)
        yield "longest documents:"
        tokenizer = store.tokenizer()
        for document in np.argsort(sizes, kind="stable")[: -NUM_LONGEST - 1 : -1].tolist():
            size = int(sizes[document])
            start = stream.read_windows(begins[[document]], min(size, 30))[0]
            text = " ".join(tokenizer.decode(start.tolist()).split())
            yield f"  {size:,} tokens: {text[:80]}"
    else:
        yield "the train text has no separator: it is one document"
    if is_text:
        yield from _show_documents(store, begins, num_samples)
    else:
        yield from _show_conversations(store, num_samples)


def _show_documents(store: Store, begins: Ints, num_samples: int) -> Iterator[str]:
    """Yield the first document at each of evenly spaced positions."""
    stream, tokenizer = store.tokens("train"), store.tokenizer()
    for number in range(num_samples):
        position = len(stream) * number // num_samples
        later = begins[begins > position] if number else [0]
        begin = int(later[0]) if len(later) else position
        [window] = stream.read_windows(np.array([begin]), min(SHOWN_TOKENS, len(stream) - begin))
        tokens = window.tolist()
        if store.manifest.separator in tokens[1:]:
            tokens = tokens[: tokens.index(store.manifest.separator, 1)]
        yield f"-- from token {begin:,}"
        yield tokenizer.decode(tokens)


def _show_conversations(store: Store, num_samples: int) -> Iterator[str]:
    """Yield evenly spaced conversations, with trained tokens between [[ and ]].

    A weight other than 1 follows the text: [[text]]*0.5.  The place of an answer with a label says
    whether it is good or bad.
    """
    for where, chunks in _sample_conversations(store, num_samples, SHOWN_TOKENS):
        yield f"-- {where}"
        yield "".join(
            f"[[{text}]]{'' if weight == 1 else f'*{weight:.4g}'}" if weight else text
            for text, weight in chunks
        )


def _sample_conversations(
    store: Store, num_samples: int, limit: int
) -> Iterator[tuple[str, list[tuple[str, float]]]]:
    """Yield the place of conversations, and their text in parts with their weights."""
    index = store.index("train")
    begins = np.concatenate(([0], index[:-1, 0]))
    sizes = index[:, 0] - begins
    stream, loss_mask = store.tokens("train"), store.loss_mask("train")
    weights = store.weights("train")
    assert loss_mask is not None
    tokenizer = store.tokenizer()
    num_samples = min(num_samples, len(index))
    for number in range(num_samples):
        position = len(index) * number // num_samples
        start, size = begins[[position]], min(limit, int(sizes[position]))
        tokens, mask = stream.read_windows(start, size)[0], loss_mask.read_windows(start, size)[0]
        factors = mask if weights is None else weights[int(start[0]) : int(start[0]) + size]
        cuts = [0, *(np.flatnonzero(np.diff(factors)) + 1).tolist(), size]
        chunks = [
            (
                tokenizer.decode(tokens[begin:end].tolist(), skip_special_tokens=False),
                float(factors[begin]),
            )
            for begin, end in pairwise(cuts)
        ]
        _, file, line = index[position].tolist()
        label = ""
        if store.manifest.kind == "unpaired":
            label = " (good)" if store.labels("train")[position] else " (bad)"
        yield f"{store.manifest.files[file]}:{line}{label}", chunks


def make_page(dataset: Dataset, num_samples: int) -> str:
    """Return evenly spaced conversations as HTML, with the trained text marked."""
    blocks = []
    for source in dataset.sources:
        store = source.store
        is_text = store.manifest.kind == "text"
        if is_text or not len(store.index("train")):
            continue
        for where, chunks in _sample_conversations(store, num_samples, PAGE_TOKENS):
            parts = (
                f"<mark{'' if weight == 1 else f' title={weight:.4g}'}>{escape(text)}</mark>"
                if weight
                else escape(text)
                for text, weight in chunks
            )
            blocks.append(f"<h2>{escape(where)}</h2>\n<pre>{''.join(parts)}</pre>")
    style = (
        "body{font:16px/1.5 system-ui,sans-serif;margin:2em auto;max-width:60em;padding:0 1em;"
        "color-scheme:light dark}pre{white-space:pre-wrap;overflow-wrap:anywhere}"
        "mark{background:#9fd8a8;color:#000}h2{font-size:1em}"
    )
    title = escape(dataset.sources[0].name)
    body = "\n".join(blocks) or "<p>Text: every token is trained.</p>"
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{style}</style>\n'
        f"<h1>{title}</h1>\n<p>The model is trained on the marked text.</p>\n{body}\n</html>\n"
    )


def _histogram(sizes: Ints) -> Iterator[str]:
    """Yield documents by length, in powers of two."""
    bins = np.bincount(np.frexp(np.maximum(sizes, 1))[1] - 1)
    first = int(np.flatnonzero(bins)[0])
    width = len(f"{(1 << len(bins)) - 1:,}")
    for power, count in enumerate(bins.tolist()[first:], first):
        bar = "#" * -(-BAR_WIDTH * count // int(bins.max()))
        low, high = (1 << power) - (power == 0), (2 << power) - 1
        yield f"  {low:>{width},} - {high:>{width},}  {count:>12,}  {bar}".rstrip()


def _count_conversations(store: Store, num_examples: int) -> str:
    """Return the number of conversations, and of examples if these are more."""
    if store.manifest.kind != "chat":
        return ""
    num_lines = len(np.unique(store.index("train")[:, 1:], axis=0))
    if num_lines == num_examples:
        return f"{num_lines:,} conversations"
    return f"{num_lines:,} conversations, as {num_examples:,} examples of one turn,"


def describe_packing(
    store: Store, seq_len: int, section: DataSection, seed: int, scores: bool = False
) -> str:
    """Return one line that describes how the train split is packed.

    ``scores``: a model computes a score of each conversation.
    """
    packed, split = pack_split(store, "train", seq_len, section, seed, scores), store.manifest.train
    num_documents = len(packed.lengths) if store.manifest.kind == "text" else split.documents
    content = {
        "text": f"{num_documents:,} chunks of {split.tokens:,} tokens",
        "chat": f"{_count_conversations(store, num_documents)} of {split.tokens:,} tokens",
        "preferences": f"{num_documents // 2:,} pairs of {split.tokens:,} tokens",
        "unpaired": f"{num_documents:,} labeled answers of {split.tokens:,} tokens",
    }[store.manifest.kind]
    loss_mask = store.loss_mask("train")
    if loss_mask is not None and not scores:
        content += (
            f", of which {loss_mask.count_nonzero() / max(1, split.tokens):.0%} are trained on"
        )
    fill = packed.fill_fraction(seq_len)
    line = f"{content}, in {len(packed):,} sequences of {seq_len:,}, {fill:.1%} full"
    counts = [(packed.num_truncated, "truncated"), (packed.num_skipped, "skipped")]
    dropped = "".join(f"; {count:,} too long and {action}" for count, action in counts if count)
    return line + dropped
