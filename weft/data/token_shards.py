"""Text to shards of tokens, of which an interrupted preparation finds again what is whole.

What goes into each shard is decided beforehand, from the text alone, so shards do not depend on
each other.  Each is written beside its place, flushed and renamed, and then gets a *receipt*
(``train-00000.json``) with its hash.  The next attempt keeps those whose receipt is true.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from weft.config.errors import ConfigError, InvalidConfig
from weft.config.files import write_durably
from weft.config.schema import DataSection
from weft.data.prepared_cache import Report
from weft.data.token_store import Dtype, Shard, Split, hash_tokens, map_shard, token_dtype
from weft.data.tokenizer import load_tokenizer, separator_id, vocab_entries
from weft.data.workers import Advance

BATCH_BYTES = 4 << 20  # of text encoded by one call, over all cores
COUNTED = 1 << 24  # tokens at a time
PIECE_BYTES = 1 << 17  # a batch of these keeps every core busy; far longer strings encode slowly

Tokens = NDArray[np.unsignedinteger[Any]]


# --------------------------------------------------------------------------- what is prepared


class Built(NamedTuple):
    """Both splits, and the dtype of their tokens."""

    train: Split
    validation: Split
    dtype: Dtype


class IncompleteTail(NamedTuple):
    """How many files, or documents where a file has many, were not taken as they are.

    ``skipped`` ones are not UTF-8 and were left out; of ``replaced`` ones the bad bytes were
    replaced; ``empty`` ones have no text and were left out.
    """

    skipped: int = 0
    replaced: int = 0
    empty: int = 0


class Reading(Protocol):
    """What lies at a path, read (or looked at) once."""

    @property
    def content(self) -> object:
        """What decides the store beside the settings, in JSON's types."""
        ...

    @property
    def text_bytes(self) -> int:
        """About how much text there is to learn a tokenizer from."""
        ...

    @property
    def odd(self) -> IncompleteTail: ...

    def training_texts(self, most_bytes: int) -> Iterator[str]:
        """About ``most_bytes`` of the train text, for a tokenizer to learn from."""
        ...

    def build(self, folder: Path, encoder: Encoder, report: Report) -> Built:
        """Make every shard that is not in ``folder`` yet."""
        ...


def too_little(section: DataSection, rule: str, train: bool) -> InvalidConfig:
    """Nothing is left to hold out, or (not ``train``) even to train on."""
    what = "left to hold out for evaluation" if train else "left to train on"
    remedy = "give more text" + (", or a larger data.validation_fraction" if train else "")
    return InvalidConfig(
        [ConfigError("data.path", section.path, f"{rule}: nothing is {what}", remedy)]
    )


# --------------------------------------------------------------------------- encoding


class Encoder(NamedTuple):
    """A tokenizer, and what a store tells of it."""

    tokenizer: Tokenizer
    hash: str
    separator: int
    vocab_size: int
    dtype: Dtype


def load_encoder(file: Path) -> Encoder:
    """That of a ``tokenizer.json``.

    Raises:
        InvalidConfig: it cannot be read, or has no separator.
    """
    tokenizer, digest = load_tokenizer(file)
    entries = vocab_entries(tokenizer)
    separator = separator_id(tokenizer, file)
    return Encoder(tokenizer, digest, separator, entries, token_dtype(entries))


def cut_at(data: bytes, begin: int, size: int) -> int:
    """Where to cut ``data``, which is longer, at most ``size`` bytes behind ``begin``: after the
    last newline, or at a character."""
    limit = begin + size
    newline = data.rfind(b"\n", begin, limit)
    if newline >= 0:
        return newline + 1
    cut = limit
    while cut > max(begin, limit - 3) and data[cut] & 0xC0 == 0x80:  # a continuation byte
        cut -= 1
    return cut


def in_pieces(data: bytes) -> Iterator[tuple[int, int]]:
    """A document in ranges that are quick to encode; none ends inside a character."""
    begin = 0
    while len(data) - begin > PIECE_BYTES:
        end = cut_at(data, begin, PIECE_BYTES)
        yield begin, end
        begin = end
    yield begin, len(data)


class Batches:
    """Encodes pieces of text, many by one call; each on its own, whatever batch it falls into."""

    def __init__(self, encoder: Encoder, advance: Advance) -> None:
        self._encoder, self._advance = encoder, advance
        self._pieces: list[tuple[str, bool, list[Tokens]]] = []
        self._size_bytes = 0

    def add(self, text: str, size_bytes: int, last: bool, to: list[Tokens]) -> None:
        """Have the tokens of a piece appended to ``to``, at the latest by `flush`.

        Args:
            last: it ends a document, so that the separator comes after it.

        Raises:
            InvalidConfig: the tokenizer cannot encode it.
        """
        self._pieces.append((text, last, to))
        self._size_bytes += size_bytes
        if self._size_bytes >= BATCH_BYTES:
            self.flush()

    def flush(self) -> None:
        """Encode what was added and is not encoded yet."""
        tokenizer, separator = self._encoder.tokenizer, self._encoder.separator
        texts = [text for text, _, _ in self._pieces]
        try:
            encodings = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        except Exception as error:  # tokenizers raises bare Exceptions
            rule = f"cannot encode the text: {error}"
            remedy = "use a tokenizer that covers every text, such as a byte-level one"
            raise InvalidConfig([ConfigError("data.tokenizer", "(given)", rule, remedy)]) from error
        for (_, last, to), encoding in zip(self._pieces, encodings, strict=True):
            to.append(np.array(encoding.ids + [separator] * last, self._encoder.dtype))
        self._pieces.clear()
        self._advance(self._size_bytes)
        self._size_bytes = 0


# --------------------------------------------------------------------------- files


def describe(file: Path, tokens: Tokens) -> Shard:
    """A file of the store that holds these tokens and nothing else."""
    return Shard(file.name, len(tokens), tokens.nbytes, hash_tokens(tokens))


def write_shard(file: Path, tokens: Tokens, encoder: Encoder) -> Shard:
    """Tokens into a file, and then its receipt."""
    shard = describe(file, tokens)
    write_durably(file, tokens.data)
    write_durably(file.with_suffix(".json"), _receipt(shard, encoder))
    return shard


def finished_shard(file: Path, encoder: Encoder) -> Shard | None:
    """The shard that an earlier attempt has completed in a file; None: none has."""
    try:
        receipt = file.with_suffix(".json").read_bytes()
        shard = describe(file, np.fromfile(file, encoder.dtype))
    except FileNotFoundError:
        return None
    return shard if receipt == _receipt(shard, encoder) else None


def _receipt(shard: Shard, encoder: Encoder) -> bytes:
    return json.dumps(asdict(shard) | {"tokenizer": encoder.hash}).encode()


# --------------------------------------------------------------------------- statistics


def unigram_entropy_nats(folder: Path, built: Built, vocab_size: int) -> float:
    """Entropy of a train token: the loss of knowing only the tokens' frequencies."""
    frequency = np.zeros(vocab_size, np.int64)
    for shard in built.train.shards:
        tokens = map_shard(folder, built.dtype, shard)
        for begin in range(0, len(tokens), COUNTED):  # counting makes 64 bits of each
            piece = tokens[begin : begin + COUNTED]
            frequency += np.bincount(piece, minlength=vocab_size)
    return entropy_nats(frequency)


def entropy_nats(frequency: NDArray[np.int64]) -> float:
    """-sum p ln p of a distribution that is given by counts."""
    p = frequency[frequency > 0] / frequency.sum()
    return float(-(p * np.log(p)).sum())
