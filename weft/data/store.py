"""A store: text that was tokenised once, in files that every run maps into memory.

A store is a folder, made by ``weft.data.prepare``::

    tokenizer.json          the tokenizer that made it
    train-00000.bin ...     token ids, uint16 or uint32, nothing else; every document (or its
    validation-00000.bin    part of the split) ends with the separator
    train-00000.json ...    receipts, which only an interrupted preparation reads; shards of files
                            with many documents have two numbers, the unit's and the extent's
    store.json              what is above: sizes, hashes, counts.  Without it, it is no store.

Of conversations (``weft.data.conversations``) it has more files::

    chat_template.jinja     what wrote them as text
    train-00000.learned     for each token whether it is learned, uint8
    train-00000.documents   for each conversation where its tokens end, the number of its file, and
                            its line there: int64 (n, 3)
"""

from __future__ import annotations

import json
import os
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import TypeAdapter, ValidationError
from tokenizers import Tokenizer
from xxhash import xxh3_128_hexdigest

from weft.data.tokenizer import load_tokenizer
from weft.job import InvalidJob, Problem

FORMAT = 1
STORE_FILE = "store.json"
TOKENIZER_FILE = "tokenizer.json"
TEMPLATE_FILE = "chat_template.jinja"
TOKENS_FILE = "tokenizer_config.json"  # what the template calls bos_token and so on

Dtype = Literal["uint16", "uint32"]
SplitName = Literal["train", "validation"]
SPLITS: tuple[SplitName, SplitName] = ("train", "validation")
Kind = Literal["text", "chat", "preferences"]  # the last: chosen, rejected, chosen, rejected, ...


class TokenStream:
    """The tokens of one split, end to end, over however many shards."""

    def __init__(self, shards: Sequence[NDArray[Any]]) -> None:
        # Plain array views of the maps: slicing an np.memmap costs microseconds.
        self._shards = [np.asarray(shard) for shard in shards]
        self._begins = np.cumsum([0, *(len(shard) for shard in shards)]).tolist()

    def __len__(self) -> int:
        return int(self._begins[-1])

    def window(self, starts: NDArray[np.int64], length: int) -> NDArray[np.int64]:
        """Tokens ``start : start + length`` for each start: int64, (len(starts), length).

        Raises:
            IndexError: a window reaches outside the stream.
        """
        if len(starts) and (starts.min() < 0 or starts.max() + length > len(self)):
            raise IndexError(f"a window of {length} tokens reaches outside 0..{len(self)}")
        out = np.empty((len(starts), length), np.int64)
        # Copying row by row from a map is several times faster than indexing by every position.
        for row, start in zip(out, starts.tolist(), strict=True):
            shard, filled = bisect_right(self._begins, start) - 1, 0
            while filled < length:
                begin = start + filled - self._begins[shard]
                part = self._shards[shard][begin : begin + length - filled]
                row[filled : filled + len(part)] = part
                filled, shard = filled + len(part), shard + 1
        return out

    def find(self, token: int) -> NDArray[np.int64]:
        """Where ``token`` stands."""
        found = [
            begin + np.flatnonzero(shard == token)
            for begin, shard in zip(self._begins, self._shards, strict=False)
        ]
        return np.concatenate(found) if found else np.empty(0, np.int64)

    def count_nonzero(self) -> int:
        """How many are not 0: of `Store.learned`, how many tokens are learned."""
        return sum(int(np.count_nonzero(shard)) for shard in self._shards)


@dataclass(frozen=True)
class Shard:
    """Tokens in a file of the store, or, by its absolute path, in a file of somebody else's, from
    byte ``begin`` on."""

    file: str
    tokens: int
    size_bytes: int
    xxh3: str
    begin: int = 0

    @property
    def foreign(self) -> bool:
        return Path(self.file).is_absolute()


@dataclass(frozen=True)
class Split:
    """One split: ``bytes`` counts its text (0: not known), ``tokens`` the separators too.

    Only of conversations: which tokens are ``learned``, and an ``index`` of the conversations.
    """

    documents: int
    bytes: int
    tokens: int
    shards: list[Shard]
    learned: Shard | None = None
    index: Shard | None = None

    @property
    def files(self) -> list[Shard]:
        return [*self.shards, *filter(None, (self.learned, self.index))]


@dataclass(frozen=True)
class Manifest:
    """What ``store.json`` holds."""

    format: int
    key: str
    source: str
    dtype: Dtype
    vocab_size: int
    separator: int
    tokenizer_hash: str
    unigram_entropy_nats: float  # of the train tokens: the loss of knowing only their frequencies
    skipped_files: int  # or documents, where a file has many
    replaced_files: int
    train: Split
    validation: Split
    empty_documents: int = 0
    kind: Kind = "text"
    files: list[str] = field(default_factory=list)  # of conversations, by number


@dataclass(frozen=True)
class Store:
    """An opened store; see ``open_store``."""

    path: Path
    manifest: Manifest

    def tokens(self, name: SplitName) -> TokenStream:
        """The tokens of ``train`` or ``validation``, mapped into memory."""
        part: Split = getattr(self.manifest, name)
        return TokenStream([map_shard(self.path, self.manifest.dtype, s) for s in part.shards])

    def learned(self, name: SplitName) -> TokenStream | None:
        """1 for each token that is learned, else 0; None: all are."""
        part: Split = getattr(self.manifest, name)
        if part.learned is None:
            return None
        return TokenStream([map_shard(self.path, "uint8", part.learned)])

    def index(self, name: SplitName) -> NDArray[np.int64]:
        """Of conversations: where the tokens of each end, the number of its file, and its line."""
        part: Split = getattr(self.manifest, name)
        assert part.index is not None, f"{self.path} holds no conversations"
        return map_shard(self.path, "int64", part.index).reshape(-1, 3)

    def tokenizer(self) -> Tokenizer:
        """The tokenizer that made the tokens, read anew."""
        return load_tokenizer(self.path / TOKENIZER_FILE)[0]

    @property
    def fingerprint(self) -> str:
        """Identifies the content (tokens of both splits, tokenizer), wherever the store lies."""
        m = self.manifest
        hashes = [[shard.xxh3 for shard in part.files] for part in (m.train, m.validation)]
        return hash_json([m.format, m.dtype, m.separator, m.tokenizer_hash, hashes])


def token_dtype(vocab_size: int) -> Dtype:
    """The smaller dtype that holds every token id below ``vocab_size``."""
    return "uint16" if vocab_size <= 1 << 16 else "uint32"


def map_shard(folder: Path, dtype: str, shard: Shard) -> NDArray[Any]:
    """A shard's tokens, ``dtype`` (tokens,), mapped into memory."""
    if not shard.size_bytes:  # an empty file cannot be mapped
        return np.empty(0, dtype)
    return np.memmap(folder / shard.file, dtype, "r", shard.begin, (shard.tokens,))


def hash_tokens(tokens: NDArray[Any]) -> str:
    """The xxh3_128 of the tokens' bytes in hexadecimal."""
    return xxh3_128_hexdigest(tokens.data) if len(tokens) else xxh3_128_hexdigest(b"")


def hash_json(value: object) -> str:
    """The xxh3_128 of what JSON writes for ``value`` in hexadecimal: a name for what it decides."""
    return xxh3_128_hexdigest(json.dumps(value).encode())


# --------------------------------------------------------------------------- opening


def is_store(path: str | Path) -> bool:
    """Whether the folder ``path`` is a prepared store (complete, as store.json comes last).

    A text folder may have a file of that name, too; it has none of a store's others.
    """
    folder = os.path.expanduser(path)
    found = [
        os.path.isfile(os.path.join(folder, name))
        for name in (STORE_FILE, TOKENIZER_FILE, "train-00000.bin")
    ]
    return found[0] and any(found[1:])


def open_store(path: str | Path, *, check_content: bool = False) -> Store:
    """Open a prepared store, after comparing its files with its ``store.json``.

    Args:
        path: the store's folder.
        check_content: compare the hash of every shard too, not only its size (reads them all).

    Raises:
        InvalidJob: one problem for each file that is missing, damaged or replaced.
    """
    folder = Path(path).expanduser()
    manifest = _read_manifest(folder)
    wrong = []
    for shard in [*manifest.train.files, *manifest.validation.files]:
        file = folder / shard.file
        if not file.is_file():
            wrong.append(f"{shard.file} is missing")
        elif (size := file.stat().st_size) != shard.size_bytes and not (
            shard.foreign and size >= shard.begin + shard.size_bytes
        ):
            wrong.append(f"{shard.file} has {size} bytes, not {shard.size_bytes}")
        elif check_content and _content_hash(folder, shard) != shard.xxh3:
            wrong.append(f"{shard.file} has other content than it was prepared with")
    try:
        if load_tokenizer(folder / TOKENIZER_FILE)[1] != manifest.tokenizer_hash:
            wrong.append("tokenizer.json is not the one that it was prepared with")
    except InvalidJob as invalid:
        wrong += [f"tokenizer.json {problem.rule}" for problem in invalid.problems]
    if wrong:
        raise InvalidJob([_damaged(folder, rule) for rule in wrong])
    return Store(folder, manifest)


def _content_hash(folder: Path, shard: Shard) -> str:
    return hash_tokens(map_shard(folder, "uint8", replace(shard, tokens=shard.size_bytes)))


def _read_manifest(folder: Path) -> Manifest:
    try:
        data = (folder / STORE_FILE).read_bytes()
        found = json.loads(data).get("format")
        if found != FORMAT:
            raise InvalidJob([_damaged(folder, f"is a store of format {found}, not {FORMAT}")])
        return TypeAdapter(Manifest).validate_json(data)
    except OSError as error:
        rule = f"{STORE_FILE} cannot be read: {error.strerror}"
    except (ValidationError, ValueError, AttributeError):
        rule = f"{STORE_FILE} is not what weft wrote"
    raise InvalidJob([_damaged(folder, rule)])


def _damaged(folder: Path, rule: str) -> Problem:
    return Problem("data.path", str(folder), rule, "delete the folder and prepare the text again")
