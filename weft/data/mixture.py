"""Write the dataset of several prepared stores: a mixture, a validation set."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from xxhash import xxh3_64_intdigest, xxh3_128_hexdigest

from weft.config.files import write_durably
from weft.data.dataset import MIXTURE_FILE, Dataset, open_dataset
from weft.data.prepared_cache import Progress, Report
from weft.data.token_store import TOKENIZER_FILE, Store

MAX_COMPARED_TOKENS = 1 << 30  # of training data; more are not compared with the validation set


def write_dataset(
    weights: Mapping[str, float],
    stores: Sequence[Store],
    parent_dir: Path,
    validation: Store | None = None,
    report: Report = lambda _: None,
) -> Dataset:
    """Write a dataset of prepared stores below ``parent_dir``.

    Args:
        weights: positive weights by path, of any sum.
        stores: in the order of ``weights``, all of one tokenizer.
        parent_dir: the dataset gets a directory in it, named by its content.
        validation: the store of ``data.validation_path``; its documents that are also training data
            are counted, once.
        report: receives progress.
    """
    total = sum(weights.values())
    content: dict[str, Any] = {
        "sources": [
            {"name": name, "share": weight / total, "store": str(store.path.absolute())}
            for name, weight, store in zip(
                derive_source_names(list(weights)), weights.values(), stores, strict=True
            )
        ]
    }
    if validation is not None:
        name = derive_source_names([validation.manifest.source])[0]
        store = str(validation.path.absolute())
        content["validation"] = {"name": name, "share": 1.0, "store": store}
        # A store that is prepared again in the same directory is another one.
        content["compared"] = [store.fingerprint for store in (*stores, validation)]
    directory = parent_dir / xxh3_128_hexdigest(json.dumps(content).encode())
    if not (directory / MIXTURE_FILE).exists():
        directory.mkdir(parents=True, exist_ok=True)
        content.pop("compared", None)
        if validation is not None:
            content["notes"] = list(describe_overlap(stores, validation, report))
        data = json.dumps(content, indent=1).encode()
        write_durably(directory / TOKENIZER_FILE, (stores[0].path / TOKENIZER_FILE).read_bytes())
        write_durably(directory / MIXTURE_FILE, data)
    return open_dataset(directory)


def describe_overlap(stores: Sequence[Store], validation: Store, report: Report) -> Iterator[str]:
    """Yield a sentence if documents of the validation set are also training data.

    Documents (conversations, pairs) of equal tokens are counted.  Large training data, and those in
    a bucket, are not read.
    """
    if sum(store.manifest.train.tokens for store in stores) > MAX_COMPARED_TOKENS:
        return
    if any(store.url for store in stores):  # each node would read all of the bucket first
        return
    report(Progress("comparing the validation set with the training data"))
    seen = {digest for store in stores for digest in _hash_documents(store)}
    digests = list(_hash_documents(validation))
    if count := sum(digest in seen for digest in digests):
        noun = {"text": "documents", "chat": "conversations", "preferences": "pairs"}
        noun |= {"unpaired": "answers"}
        yield (
            f"{count:,} of {len(digests):,} {noun[validation.manifest.kind]} of "
            "data.validation_path are also training data, so the validation loss is too low. "
            "Remove them from one of the two."
        )


def _hash_documents(store: Store) -> Iterator[int]:
    """Yield a hash of the tokens of each document, conversation or pair."""
    stream, manifest = store.tokens("train"), store.manifest
    if manifest.kind == "text":
        ends = store.document_ends("train")
        if len(stream) > (ends[-1] if len(ends) else 0):
            ends = np.append(ends, len(stream))
    else:
        is_paired = manifest.kind == "preferences"  # chosen, rejected, chosen, ...
        ends = store.index("train")[is_paired :: 1 + is_paired, 0]
    begin = 0
    for end in ends.tolist():
        # The tokens of both stores may have different widths.
        [tokens] = stream.read_windows(np.array([begin]), end - begin)
        yield xxh3_64_intdigest(tokens.data)
        begin = end


def derive_source_names(paths: Sequence[str]) -> list[str]:
    """Return a short name per path: its stem, or the full path if ambiguous."""
    short = [Path(path.rstrip("/")).name.partition(".")[0] or path for path in paths]
    return [
        name if short.count(name) == 1 else path for name, path in zip(short, paths, strict=True)
    ]
