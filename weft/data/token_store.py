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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import TypeAdapter, ValidationError
from tokenizers import Tokenizer
from xxhash import xxh3_128_hexdigest

from weft.config.errors import ConfigError, InvalidConfig
from weft.data.tokenizer import load_tokenizer

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
    def splits(self) -> tuple[Split, Split]:
        """The train and the validation split."""
        return self.manifest.train, self.manifest.validation

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


def open_store(path: str | Path) -> Store:
    """Open a prepared store, after comparing the sizes of its files with its ``store.json``.

    The content is compared by `weft.data.prepared_cache.open_verified`.

    Args:
        path: the store's folder.

    Raises:
        InvalidConfig: one problem for each file that is missing, damaged or replaced.
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
    try:
        if load_tokenizer(folder / TOKENIZER_FILE)[1] != manifest.tokenizer_hash:
            wrong.append("tokenizer.json is not the one that it was prepared with")
    except InvalidConfig as invalid:
        wrong += [f"tokenizer.json {problem.rule}" for problem in invalid.problems]
    if wrong:
        raise InvalidConfig([damaged(folder, rule) for rule in wrong])
    return Store(folder, manifest)


def _read_manifest(folder: Path) -> Manifest:
    try:
        data = (folder / STORE_FILE).read_bytes()
        found = json.loads(data).get("format")
        if found != FORMAT:
            raise InvalidConfig([damaged(folder, f"is a store of format {found}, not {FORMAT}")])
        manifest = TypeAdapter(Manifest).validate_json(data)
        if wrong := list(_contradictions(manifest)):
            raise InvalidConfig([damaged(folder, f"{STORE_FILE}: {rule}") for rule in wrong])
        return manifest
    except OSError as error:
        rule = f"{STORE_FILE} cannot be read: {error.strerror}"
    except (ValidationError, ValueError, AttributeError, RecursionError):
        rule = f"{STORE_FILE} is not what weft wrote"
    raise InvalidConfig([damaged(folder, rule)])


def _contradictions(manifest: Manifest) -> Iterator[str]:
    """Yield a sentence for each number or name of a manifest that cannot be right."""
    if not 0 <= manifest.separator < manifest.vocab_size:
        yield (
            f"separator {manifest.separator} is outside the vocabulary of "
            f"{manifest.vocab_size} entries"
        )
    for name in SPLITS:
        split: Split = getattr(manifest, name)
        if split.tokens != sum(shard.tokens for shard in split.shards):
            yield f"{name}.tokens is {split.tokens}, and its shards do not add up to that"
        if split.documents < 0 or split.bytes < 0:
            yield f"{name} has a negative number of documents or bytes"
        if (split.learned is None) != (split.index is None) or (
            (split.index is None) != (manifest.kind == "text")
        ):
            yield f"{name} does not have the files of a store of kind {manifest.kind}"
        if split.learned is not None and split.learned.tokens != split.tokens:
            yield f"{name}.learned has {split.learned.tokens} entries for {split.tokens} tokens"
        if split.index is not None and split.index.tokens != 3 * split.documents:
            yield f"{name}.index has {split.index.tokens} numbers for {split.documents} documents"
        for shard in split.files:
            dtype = {id(split.learned): "uint8", id(split.index): "int64"}.get(id(shard))
            width = np.dtype(dtype or manifest.dtype).itemsize
            if min(shard.tokens, shard.begin) < 0 or shard.size_bytes != shard.tokens * width:
                yield (
                    f"{shard.file!r} has {shard.tokens} entries from byte {shard.begin} in "
                    f"{shard.size_bytes} bytes"
                )
            # A store's own file lies in its folder, and what is somebody else's has a whole path.
            if not shard.foreign and (
                Path(shard.file).name != shard.file or shard.begin or "\0" in shard.file
            ):
                yield f"{shard.file!r} is not the name of a file in the store's folder"


DATA_REMEDY = "delete the folder and prepare the text again"


def damaged(folder: Path, rule: str, remedy: str = DATA_REMEDY) -> ConfigError:
    """Return the problem of a store that is not what was prepared."""
    return ConfigError("data.path", str(folder), rule, remedy)
