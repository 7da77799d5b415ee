"""Encode text into token shards, and resume an interrupted preparation.

The text alone determines the content of each shard, so shards do not depend on each other.  weft
writes a shard to a temporary file, flushes and renames it, and then writes a *manifest entry*
(``train-00000.json``) with its hash.  The next attempt keeps the shards whose entry matches.
"""

from __future__ import annotations

import io
import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from weft.config.errors import ConfigError, InvalidConfig
from weft.config.files import expand_path, write_durably
from weft.config.schema import DataSection
from weft.data.document_tokens import (
    Affixes,
    StartToken,
    find_document_affixes,
    load_document_tokens,
)
from weft.data.prepared_cache import Report
from weft.data.shared_preparation import SharedWork, put_object
from weft.data.token_store import (
    SPLITS,
    Dtype,
    Shard,
    Split,
    TokenStream,
    hash_blocks,
    hash_tokens,
    map_shard,
    token_dtype,
)
from weft.data.tokenizer import load_tokenizer, required_vocab_size
from weft.data.workers import Advance
from weft.planning.vocabulary import NO_TOKENS, NewTokens

BATCH_BYTES = 4 << 20  # text per call of the tokenizer, which uses all cores
COUNT_TOKENS = 1 << 24  # per call of bincount
SUMMARIES_PER_READ = 64
CHUNK_BYTES = 1 << 17  # a batch of these uses all cores; far longer strings encode slowly

Tokens = NDArray[np.integer[Any]]


# --------------------------------------------------------------------------- corpus


class BuiltSplits(NamedTuple):
    """Both splits, the dtype of their tokens, and what else only conversations have.

    ``entropy_nats``: see `unigram_entropy_nats`, which computes it if it is None; ``files``: the
    names of the files that the index of conversations refers to; ``start_tokens``: those of the
    documents, if the encoder does not decide; ``notes``: sentences for the user.
    """

    train: Split
    validation: Split
    dtype: Dtype
    entropy_nats: float | None = None
    files: Sequence[str] = ()
    start_tokens: Sequence[int] | None = None
    notes: Sequence[str] = ()


class IncompleteTail(NamedTuple):
    """Numbers of files (or documents of larger files) that were not used unchanged.

    ``skipped`` are not UTF-8; ``replaced`` had invalid bytes replaced; ``empty`` have no text.
    """

    skipped: int = 0
    replaced: int = 0
    empty: int = 0


class Corpus(ABC):
    """Data at a path after one reading; the defaults are those without text."""

    @property
    @abstractmethod
    def cache_key(self) -> object:
        """Data that determines the store, except for settings, as JSON types."""

    @property
    def text_bytes(self) -> int:
        """Approximate bytes of text for training a tokenizer."""
        return 0

    @property
    def skip_counts(self) -> IncompleteTail:
        """Return how many files or documents were not used unchanged."""
        return IncompleteTail()

    def sample_texts(self, max_bytes: int) -> Iterator[str]:
        """Yield about ``max_bytes`` of the train text, for training a tokenizer."""
        return iter(())

    @abstractmethod
    def build(
        self, directory: Path, encoder: Encoder, report: Report, shared: SharedWork | None = None
    ) -> BuiltSplits:
        """Write all shards that ``directory`` does not have yet.

        Args:
            directory: the store; of ``shared`` work, in an object store.
            encoder: the tokenizer, whose file is on this machine.
            report: is called with the progress.
            shared: the work of several workers.
        """


def insufficient_data_error(section: DataSection, rule: str, has_train: bool) -> InvalidConfig:
    """Return the error for too little data for validation, or even for training."""
    missing = "left for the validation set" if has_train else "left for training"
    remedy = "give more text"
    if has_train:
        remedy += ", or set a larger data.validation_fraction (0: no validation set)"
    return InvalidConfig(
        [ConfigError("data.path", section.path, f"{rule}: none is {missing}", remedy)]
    )


# --------------------------------------------------------------------------- encoding


class Encoder(NamedTuple):
    """Tokenizer of a ``tokenizer.json``, and its properties that a store records.

    ``affixes`` surround a document; their start may begin with the separator of the document
    before it, which ``prefix`` omits.  ``new_tokens`` are not in the file.
    """

    file: Path
    tokenizer: Tokenizer
    hash: str
    separator: int
    vocab_size: int
    dtype: Dtype
    affixes: Affixes
    new_tokens: NewTokens

    @property
    def prefix(self) -> tuple[int, ...]:
        """Return the tokens to write before a document."""
        start = self.affixes.start
        while start[:1] == (self.separator,):
            start = start[1:]
        return start


def load_encoder(
    path: str | Path, start_token: StartToken = "auto", new_tokens: NewTokens = NO_TOKENS
) -> Encoder:
    """Load a ``tokenizer.json``.

    Args:
        path: the file.
        start_token: ``data.start_token``.
        new_tokens: tokens to add to it.

    Raises:
        InvalidConfig: the file cannot be read, or has no separator or no start token.
    """
    tokenizer, digest = load_tokenizer(path, new_tokens)
    entries, file = required_vocab_size(tokenizer), expand_path(path)
    tokens = load_document_tokens(tokenizer, path)
    affixes = find_document_affixes(tokenizer, path, start_token, tokens)
    return Encoder(
        *(file, tokenizer, digest, tokens.separator, entries, token_dtype(entries), affixes),
        new_tokens,
    )


def find_cut(data: bytes, begin: int, size: int) -> int:
    """Return where to cut ``data`` at most ``size`` bytes after ``begin``.

    The cut follows the last newline, or else does not split a character; ``data`` must be longer.
    """
    limit = begin + size
    newline = data.rfind(b"\n", begin, limit)
    if newline >= 0:
        return newline + 1
    cut = limit
    while cut > max(begin, limit - 3) and data[cut] & 0xC0 == 0x80:  # continuation byte
        cut -= 1
    return cut


def split_chunks(data: bytes) -> Iterator[tuple[int, int]]:
    """Yield byte ranges of a document that encode fast and split no character."""
    begin = 0
    while len(data) - begin > CHUNK_BYTES:
        end = find_cut(data, begin, CHUNK_BYTES)
        yield begin, end
        begin = end
    yield begin, len(data)


class TextChunk(NamedTuple):
    """Text to encode: a document or a part of it, with its start and end tokens.

    ``size_bytes`` is its size in the source; ``shard`` is its shard's number in `build_shards`.
    """

    text: str
    size_bytes: int
    ends_document: bool
    shard: int = 0
    starts_document: bool = True


def encode_chunks(
    chunks: Iterable[TextChunk], encoder: Encoder, advance: Advance
) -> Iterator[tuple[int, Tokens]]:
    """Yield shard number and tokens of each chunk, in order.

    Raises:
        InvalidConfig: the tokenizer cannot encode the text.
    """
    for batch in _batch_chunks(chunks):
        yield from zip([chunk.shard for chunk in batch], _encode_batch(batch, encoder), strict=True)
        advance(sum(chunk.size_bytes for chunk in batch))


def _encode_batch(batch: Sequence[TextChunk], encoder: Encoder) -> list[Tokens]:
    # Not in the generator, which would keep the large encodings of a batch during the next one.
    texts = [chunk.text for chunk in batch]
    try:
        encodings = encoder.tokenizer.encode_batch_fast(texts, add_special_tokens=False)
    except Exception as error:  # tokenizers raises bare Exceptions
        rule = f"cannot encode the text: {error}"
        remedy = "use a tokenizer that covers every text, such as a byte-level one"
        raise InvalidConfig([ConfigError("data.tokenizer", "(given)", rule, remedy)]) from error
    start, end = list(encoder.prefix), list(encoder.affixes.end)
    return [
        np.array(
            start * chunk.starts_document + encoding.ids + end * chunk.ends_document, encoder.dtype
        )
        for chunk, encoding in zip(batch, encodings, strict=True)
    ]


def _batch_chunks(chunks: Iterable[TextChunk]) -> Iterator[list[TextChunk]]:
    """Yield chunks in batches of about `BATCH_BYTES`."""
    batch: list[TextChunk] = []
    size = 0
    for chunk in chunks:
        batch.append(chunk)
        size += chunk.size_bytes
        if size >= BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


# --------------------------------------------------------------------------- files


def build_shards(
    files: Mapping[int, Path],
    size_bytes: int,
    chunks: Iterable[TextChunk],
    encoder: Encoder,
    advance: Advance,
    shared: SharedWork | None = None,
) -> dict[int, Shard]:
    """Encode chunks of text into shards, unless all are complete already.

    Args:
        files: file of each shard; each shard has a chunk.
        size_bytes: size of all chunks.
        chunks: text in the order of the tokens; not read if the shards are complete.
        encoder: the tokenizer.
        advance: is called with the bytes of text done since the last call.
        shared: the work of several workers, if the files are in an object store.
    """
    load = load_finished_shard if shared is None else load_shared_shard
    finished = {number: load(file, encoder) for number, file in files.items()}
    shards = {number: shard for number, shard in finished.items() if shard is not None}
    if len(shards) == len(files):
        advance(size_bytes)
        return shards
    tokens: dict[int, list[Tokens]] = {number: [] for number in files}
    for number, part in encode_chunks(chunks, encoder, advance):
        tokens[number].append(part)
    return {
        number: write_shard(file, np.concatenate(tokens[number]), encoder)
        if shared is None
        else put_shard(file, np.concatenate(tokens[number]), encoder, shared)
        for number, file in files.items()
    }


def describe_shard(file: Path, tokens: Tokens) -> Shard:
    """Return the entry of a shard file for the manifest."""
    blocks = hash_blocks(tokens.data)
    return Shard(file.name, len(tokens), tokens.nbytes, hash_tokens(tokens), block_xxh3=blocks)


def write_shard(file: Path, tokens: Tokens, encoder: Encoder) -> Shard:
    """Write tokens to a file, and then its manifest entry."""
    shard = describe_shard(file, tokens)
    write_durably(file, tokens.data)
    write_durably(file.with_suffix(".json"), _make_entry(shard, encoder))
    return shard


def load_finished_shard(file: Path, encoder: Encoder) -> Shard | None:
    """Return the shard that an earlier attempt completed in a file, if any."""
    try:
        entry = file.with_suffix(".json").read_bytes()
        shard = describe_shard(file, np.fromfile(file, encoder.dtype))
    except FileNotFoundError:
        return None
    return shard if entry == _make_entry(shard, encoder) else None


def _make_entry(shard: Shard, encoder: Encoder) -> bytes:
    return json.dumps(asdict(shard) | {"tokenizer": encoder.hash}).encode()


# --------------------------------------------------------------------------- object stores


def put_shard(file: Path, tokens: Tokens, encoder: Encoder, shared: SharedWork) -> Shard:
    """Put tokens, their summary, and then their manifest entry."""
    shard = describe_shard(file, tokens)
    put_object(file, tokens.tobytes())
    put_object(shared.summaries / file.name, _summarize(tokens, encoder.separator))
    put_object(file.with_suffix(".json"), _make_entry(shard, encoder))
    return shard


def load_shared_shard(file: Path, encoder: Encoder) -> Shard | None:
    """Return the shard that any worker has completed, if any; its tokens are not read."""
    try:
        entry = json.loads(file.with_suffix(".json").read_bytes())
    except FileNotFoundError:
        return None
    if entry.pop("tokenizer") != encoder.hash:  # put_object raises the error
        return None
    return Shard(**entry)


def _summarize(tokens: Tokens, separator: int) -> bytes:
    """Return the token counts and the ends of documents of a shard, compressed."""
    ids, counts = np.unique(tokens, return_counts=True)
    ends = np.flatnonzero(tokens == separator) + 1
    stream = io.BytesIO()
    np.savez_compressed(stream, ids=ids, counts=counts, ends=ends)
    return stream.getvalue()


def finish_shared_text(splits: BuiltSplits, encoder: Encoder, shared: SharedWork) -> BuiltSplits:
    """Put `Split.ends`, and add the entropy, from the summaries of all shards."""
    directory, frequency, written = shared.final.parent, np.zeros(encoder.vocab_size, np.int64), []
    for name, split in zip(SPLITS, splits[:2], strict=True):
        ends, begin = [np.empty(0, np.int64)], 0
        for shard, content in _read_summaries(split.shards, splits.dtype, encoder, shared):
            summary = np.load(io.BytesIO(content))
            if name == "train":
                frequency[summary["ids"]] += summary["counts"]
            ends.append(summary["ends"] + begin)
            begin += shard.tokens
        file, all_ends = directory / f"{name}.ends", np.concatenate(ends)
        put_object(file, all_ends.tobytes())
        written.append(replace(split, ends=describe_shard(file, all_ends)))
    return splits._replace(
        train=written[0], validation=written[1], entropy_nats=entropy_nats(frequency)
    )


def _read_summaries(
    shards: Sequence[Shard], dtype: Dtype, encoder: Encoder, shared: SharedWork
) -> Iterator[tuple[Shard, bytes]]:
    """Yield each shard and its summary, which follows from the tokens if it is lost."""
    directory: Any = shared.summaries
    for first in range(0, len(shards), SUMMARIES_PER_READ):
        batch = shards[first : first + SUMMARIES_PER_READ]
        paths = [(directory / shard.file).path for shard in batch]
        contents = directory.fs.cat(paths, on_error="omit")
        for shard, path in zip(batch, paths, strict=True):
            if path not in contents:
                tokens = np.frombuffer((shared.final.parent / shard.file).read_bytes(), dtype)
                contents[path] = _summarize(tokens, encoder.separator)
            yield shard, contents[path]


def write_document_ends(directory: Path, splits: BuiltSplits, separator: int) -> BuiltSplits:
    """Write `Split.ends` of text, so that packing documents need not read the tokens.

    External files are always on this machine: their documents are found when they are packed.
    """
    written = []
    for name, split in zip(SPLITS, splits[:2], strict=True):
        if any(shard.is_external for shard in split.shards):
            return splits
        shards = [map_shard(directory, splits.dtype, shard) for shard in split.shards]
        ends = TokenStream(shards).find_token(separator) + 1
        file = directory / f"{name}.ends"
        write_durably(file, ends.data)
        written.append(replace(split, ends=describe_shard(file, ends)))
    return splits._replace(train=written[0], validation=written[1])


# --------------------------------------------------------------------------- statistics


def unigram_entropy_nats(directory: Path, splits: BuiltSplits, vocab_size: int) -> float:
    """Return the loss of a unigram model on the train tokens."""
    frequency = np.zeros(vocab_size, np.int64)
    for shard in splits.train.shards:
        tokens = map_shard(directory, splits.dtype, shard)
        for begin in range(0, len(tokens), COUNT_TOKENS):  # bincount converts to int64
            chunk = tokens[begin : begin + COUNT_TOKENS]
            frequency += np.bincount(chunk, minlength=vocab_size)
    return entropy_nats(frequency)


def entropy_nats(frequency: NDArray[np.int64]) -> float:
    """Return -sum p ln p of the distribution given by counts."""
    p = frequency[frequency > 0] / frequency.sum()
    return float(-(p * np.log(p)).sum())
