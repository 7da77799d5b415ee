"""Token store: text tokenized once, in files that every run maps into memory.

A store is a directory that ``weft.data.prepare`` writes::

    tokenizer.json          the tokenizer that encoded the text
    train-00000.bin ...     token ids, uint16 or uint32, without a header; every document (or its
    validation-00000.bin    part of the split) ends with the separator
    train-00000.json ...    manifest entries, which only an interrupted preparation reads; shards of
                            files with many documents have two numbers: fragment and row group
    train.ends              ends of the documents of text in tokens, after each separator; int64
    store.json              the manifest: sizes, hashes, counts; written last

A store of conversations (``weft.data.conversations``) has more files::

    chat_template.jinja     the template that rendered them
    train-00000.learned     loss mask: 1 for each token that is trained on, else 0; uint8
    train-00000.documents   per conversation: the end of its tokens, the number of its file, and
                            its line in that file; int64 (n, 3)
    train-00000.weights     factor of each token's loss; float32; only if one is not 0 or 1
    train-00000.labels      1 for each good answer, else 0; uint8; only of unpaired answers
"""

from __future__ import annotations

import json
import os
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import TypeAdapter, ValidationError
from tokenizers import Tokenizer
from xxhash import xxh3_64_hexdigest, xxh3_128_hexdigest

from weft.config.errors import ConfigError, InvalidConfig
from weft.config.files import expand_path, read_json, write_durably, write_json
from weft.config.locks import hold_lock
from weft.config.storage import is_bucket_url
from weft.data.document_tokens import RECORD_FILE
from weft.data.remote_tokens import (
    GONE,
    NO_CACHE,
    Block,
    CacheLocation,
    ReaderClient,
    RemoteColumn,
    RemoteFile,
    copy_file,
    fetch_failed,
    read_object,
    read_objects,
)
from weft.data.tokenizer import load_tokenizer

FORMAT = 1
BLOCK_BYTES = 1 << 20  # with its own hash, so that a part of a file can be checked
STORE_FILE = "store.json"
TOKENIZER_FILE = "tokenizer.json"
TEMPLATE_FILE = "chat_template.jinja"
TOKENIZER_CONFIG_FILE = "tokenizer_config.json"  # bos_token and so on, for the template
# In a copy of the small files of a store in a bucket: its URL, and the cache of its blocks.
REMOTE_FILE = "remote.json"

Ints = NDArray[np.int64]
Dtype = Literal["uint16", "uint32"]
SplitName = Literal["train", "validation"]
SPLITS: tuple[SplitName, SplitName] = ("train", "validation")
# preferences: chosen, rejected, chosen, ...; unpaired: answers, each with a label.
Kind = Literal["text", "chat", "preferences", "unpaired"]


class TokenStream:
    """Tokens of one split, concatenated over all shards."""

    def __init__(self, shards: Sequence[NDArray[Any] | RemoteColumn]) -> None:
        # Plain array views: slicing an np.memmap costs microseconds.
        self._shards = [
            shard if isinstance(shard, RemoteColumn) else np.asarray(shard) for shard in shards
        ]
        self._remote = next((s for s in self._shards if isinstance(s, RemoteColumn)), None)
        self._begins = np.cumsum([0, *(len(shard) for shard in shards)]).tolist()
        self._columns = [shard for shard in self._shards if isinstance(shard, RemoteColumn)]
        num_blocks = (column.file.num_blocks if len(column) else 0 for column in self._columns)
        self._first_blocks = np.cumsum([0, *num_blocks]).tolist()

    def __len__(self) -> int:
        return int(self._begins[-1])

    def read_windows(self, starts: NDArray[np.int64], length: int) -> NDArray[np.int64]:
        """Return ``length`` tokens from each start: int64, (len(starts), length).

        Raises:
            IndexError: a window reaches outside the stream.
        """
        if len(starts) and (starts.min() < 0 or starts.max() + length > len(self)):
            raise IndexError(f"a window of {length} tokens reaches outside 0..{len(self)}")
        if self._columns:
            return self._read_remote_windows(starts, length)
        out = np.empty((len(starts), length), np.int64)
        # Copying each window is several times faster than indexing every position.
        for row, start in zip(out, starts.tolist(), strict=True):
            shard, filled = bisect_right(self._begins, start) - 1, 0
            while filled < length:
                begin = start + filled - self._begins[shard]
                part = self._shards[shard][begin : begin + length - filled]
                row[filled : filled + len(part)] = part
                filled, shard = filled + len(part), shard + 1
        return out

    def _read_remote_windows(self, starts: Ints, length: int) -> Ints:
        """Return windows of a store in a bucket; the file of each block is opened once."""
        parts: dict[Block, list[tuple[int, int, int, int]]] = {}
        columns: dict[Block, RemoteColumn] = {}
        for row, start in enumerate(starts.tolist()):
            filled = 0
            while filled < length:
                shard = bisect_right(self._begins, start + filled) - 1
                column, offset = self._columns[shard], start + filled - self._begins[shard]
                number, begin = divmod(offset, column.block_length)
                count = min(length - filled, column.block_length - begin, column.length - offset)
                block = (column.file.key, number)
                parts.setdefault(block, []).append((row, filled, begin, count))
                columns[block] = column
                filled += count
        for column in set(columns.values()):
            client = column.client  # knows the file from now on
        client.ensure(parts)
        out = np.empty((len(starts), length), np.int64)
        for block, places in parts.items():
            column = columns[block]
            size = column.dtype.itemsize
            ranges = [(begin * size, (begin + count) * size) for _, _, begin, count in places]
            contents = client.read(block, ranges)
            for (row, filled, _, count), content in zip(places, contents, strict=True):
                out[row, filled : filled + count] = np.frombuffer(content, column.dtype)
        return out

    @property
    def client(self) -> ReaderClient | None:
        """Return the reader of a store in a bucket."""
        return None if self._remote is None else self._remote.client

    def list_blocks(self, starts: Ints, lengths: Ints) -> list[Block]:
        """Return the distinct blocks of windows of a store in a bucket, in order."""
        starts, lengths = starts[lengths > 0], lengths[lengths > 0]
        if self._remote is None or not len(starts):
            return []
        # Blocks are numbered over all files; a window needs those from its first to its last.
        first = self._number_blocks(starts)
        counts = self._number_blocks(starts + lengths - 1) - first + 1
        number = np.arange(counts.sum()) + np.repeat(first - np.cumsum(counts) + counts, counts)
        _, places = np.unique(number, return_index=True)
        blocks = []
        for each in number[np.sort(places)].tolist():
            shard = bisect_right(self._first_blocks, each) - 1
            column = self._columns[shard]
            _ = column.client  # knows the file from now on
            blocks.append((column.file.key, each - self._first_blocks[shard]))
        return blocks

    def _number_blocks(self, positions: Ints) -> Ints:
        """Return the block of each token, counted over all files, int64 (n,)."""
        shards = np.searchsorted(self._begins, positions, side="right") - 1
        offsets = positions - np.array(self._begins)[shards]
        widths = np.array([column.block_length for column in self._columns])
        blocks: Ints = np.array(self._first_blocks)[shards] + offsets // widths[shards]
        return blocks

    def find_token(self, token: int) -> NDArray[np.int64]:
        """Return the positions of ``token``, int64."""
        positions = [
            begin + np.flatnonzero(np.asarray(shard) == token)
            for begin, shard in zip(self._begins, self._shards, strict=False)
        ]
        return np.concatenate(positions) if positions else np.empty(0, np.int64)

    def count_nonzero(self) -> int:
        """Return the number of entries other than 0; in a loss mask, trained tokens."""
        return sum(int(np.count_nonzero(np.asarray(shard))) for shard in self._shards)


@dataclass(frozen=True)
class Shard:
    """Token file of the store; with an absolute path, an external file.

    ``begin`` is the offset of the tokens in bytes.  ``block_xxh3`` has 16 digits, the xxh3_64, for
    each block of `Manifest.block_bytes` of the file; empty in stores of earlier versions, and of
    external files.
    """

    file: str
    tokens: int
    size_bytes: int
    xxh3: str
    begin: int = 0
    block_xxh3: str = ""

    @property
    def is_external(self) -> bool:
        """True if the file is not in the store's directory."""
        return Path(self.file).is_absolute()


@dataclass(frozen=True)
class Split:
    """Train or validation split.

    ``bytes`` counts its text (0: unknown); ``tokens`` includes the separators.  A split of
    conversations also has a loss mask (``learned``) and an ``index`` of conversations, and
    ``weights`` of tokens, if one of them is not 0 or 1.  Unpaired answers have ``labels``.  Text
    may have ``ends`` of documents, which follow from the tokens.
    """

    documents: int
    bytes: int
    tokens: int
    shards: list[Shard]
    learned: Shard | None = None
    index: Shard | None = None
    weights: Shard | None = None
    labels: Shard | None = None
    ends: Shard | None = None

    @property
    def content(self) -> list[Shard]:
        """Files that determine what is trained: tokens, loss mask, index, weights, labels."""
        columns = (self.learned, self.index, self.weights, self.labels)
        return [*self.shards, *filter(None, columns)]

    @property
    def files(self) -> list[Shard]:
        """All files of the split."""
        return [*self.content, *filter(None, [self.ends])]


@dataclass(frozen=True)
class Manifest:
    """Content of ``store.json``, whose keys are these field names."""

    format: int
    key: str
    source: str
    dtype: Dtype
    vocab_size: int
    separator: int
    tokenizer_hash: str
    unigram_entropy_nats: float  # loss of a unigram model on the train tokens
    skipped_files: int  # documents, if a file holds many
    replaced_files: int
    train: Split
    validation: Split
    empty_documents: int = 0
    kind: Kind = "text"
    files: list[str] = field(default_factory=list)  # of conversations; the index refers to them
    start_tokens: list[int] = field(default_factory=list)  # of documents; see document_tokens
    notes: list[str] = field(default_factory=list)  # for the user, at every start
    block_bytes: int = BLOCK_BYTES  # see Shard

    @property
    def starts_at_separator(self) -> bool:
        """Return True if a document begins with the separator of the one before it."""
        return self.start_tokens[:1] == [self.separator]


@dataclass(frozen=True)
class Store:
    """An open store; see `open_store`.

    ``url`` is that of a store in a bucket, whose large files `column` reads through ``location``;
    ``path`` then has the small ones.
    """

    path: Path
    manifest: Manifest
    url: str = ""
    location: CacheLocation = NO_CACHE

    def column(self, shard: Shard, dtype: str) -> NDArray[Any] | RemoteColumn:
        """Return the numbers of a file, mapped or read from the bucket in parts."""
        if not self.url:
            return map_shard(self.path, dtype, shard)
        return RemoteColumn(self.remote_file(shard), dtype, self.location)

    def remote_file(self, shard: Shard) -> RemoteFile:
        """Return a file of a store in a bucket."""
        url, width = f"{self.url}/{shard.file}", self.manifest.block_bytes
        return RemoteFile(url, shard.size_bytes, shard.xxh3, width, shard.block_xxh3)

    def map_all(self, shard: Shard, dtype: str) -> NDArray[Any]:
        """Map a file into memory; one in a bucket is copied to the node first."""
        file = self.path / shard.file
        if self.url and not file.is_file():
            with hold_lock(self.path / "lock", lambda: None):
                if not file.is_file():
                    copy_file(self.remote_file(shard), file)
        return map_shard(self.path, dtype, shard)

    def split(self, name: SplitName) -> Split:
        """Return the entry of a split in the manifest."""
        return self.manifest.train if name == "train" else self.manifest.validation

    def tokens(self, name: SplitName) -> TokenStream:
        """Return the tokens of a split, mapped into memory."""
        shards = self.split(name).shards
        return TokenStream([self.column(shard, self.manifest.dtype) for shard in shards])

    def loss_mask(self, name: SplitName) -> TokenStream | None:
        """Return 1 for each token that is trained on, else 0; None: all tokens are."""
        split = self.split(name)
        if split.learned is None:
            return None
        return TokenStream([self.column(split.learned, "uint8")])

    def weights(self, name: SplitName) -> NDArray[np.float32] | RemoteColumn | None:
        """Return the factor of each token's loss; None: 1 for all that are trained on."""
        split = self.split(name)
        if split.weights is None:
            return None
        column = self.column(split.weights, "float32")
        return column if isinstance(column, RemoteColumn) else np.asarray(column)

    def labels(self, name: SplitName) -> NDArray[np.uint8]:
        """Return 1 for each good answer of a split, else 0: uint8 (documents,)."""
        split: Split = getattr(self.manifest, name)
        assert split.labels is not None, f"{self.path} holds no labels"
        return np.asarray(self.map_all(split.labels, "uint8"))

    def index(self, name: SplitName) -> NDArray[np.int64]:
        """Return the token end, file number and line of each conversation: int64 (n, 3)."""
        split = self.split(name)
        assert split.index is not None, f"{self.path} holds no conversations"
        return self.map_all(split.index, "int64").reshape(-1, 3)

    def document_ends(self, name: SplitName) -> NDArray[np.int64]:
        """Return the position after each separator of a split of text, int64 (n,)."""
        split = self.split(name)
        if split.ends is not None:
            return np.asarray(self.map_all(split.ends, "int64"))
        return self.tokens(name).find_token(self.manifest.separator) + 1

    def tokenizer(self) -> Tokenizer:
        """Load the tokenizer that encoded the text."""
        return load_tokenizer(self.path / TOKENIZER_FILE)[0]

    @property
    def splits(self) -> tuple[Split, Split]:
        """Return the train and the validation split."""
        return self.manifest.train, self.manifest.validation

    @property
    def fingerprint(self) -> str:
        """Return a hash of tokens and tokenizer that does not depend on the path."""
        m = self.manifest
        hashes = [[shard.xxh3 for shard in split.content] for split in self.splits]
        return hash_json([m.format, m.dtype, m.separator, m.tokenizer_hash, hashes])


def token_dtype(vocab_size: int) -> Dtype:
    """Return the smaller dtype that holds every token id below ``vocab_size``."""
    return "uint16" if vocab_size <= 1 << 16 else "uint32"


def map_shard(directory: Path, dtype: str, shard: Shard) -> NDArray[Any]:
    """Map a shard's tokens into memory, ``dtype`` (tokens,)."""
    if not shard.size_bytes:  # an empty file cannot be mapped
        return np.empty(0, dtype)
    return np.memmap(directory / shard.file, dtype, "r", shard.begin, (shard.tokens,))


def hash_tokens(tokens: NDArray[Any]) -> str:
    """Return the xxh3_128 of the tokens' bytes in hexadecimal."""
    return xxh3_128_hexdigest(tokens.data) if len(tokens) else xxh3_128_hexdigest(b"")


def hash_blocks(data: bytes | memoryview[Any], block_bytes: int = BLOCK_BYTES) -> str:
    """Return the xxh3_64 of each block of a file's bytes: see `Shard`."""
    view = memoryview(data).cast("B") if len(data) else memoryview(b"")
    starts = range(0, len(view), block_bytes)
    return "".join(xxh3_64_hexdigest(view[start : start + block_bytes]) for start in starts)


def hash_json(value: object) -> str:
    """Return the xxh3_128 of ``value`` as JSON, in hexadecimal."""
    return xxh3_128_hexdigest(json.dumps(value).encode())


# --------------------------------------------------------------------------- opening


def is_store(path: str | Path) -> bool:
    """Return True if ``path`` is a complete prepared store.

    A directory of text may also have a ``store.json``, but not the other files of a store.
    """
    if is_bucket_url(str(path)):
        return _has_object(f"{path}/{STORE_FILE}")
    directory = os.path.expanduser(path)
    exists = [
        os.path.isfile(os.path.join(directory, name))
        for name in (STORE_FILE, TOKENIZER_FILE, "train-00000.bin")
    ]
    return exists[0] and any(exists[1:])


def open_store(path: str | Path) -> Store:
    """Open a prepared store after comparing its file sizes with its ``store.json``.

    `weft.data.prepared_cache.open_verified_store` also compares the content.

    Raises:
        InvalidConfig: one error for each file that is missing, damaged or replaced.
    """
    directory = expand_path(path)
    manifest = _read_manifest(directory)
    errors: list[str] = []
    remote = read_json(directory / REMOTE_FILE)
    files = [*manifest.train.files, *manifest.validation.files]
    if remote:  # the reader compares each part of a file with its hash
        files = []
    for shard in files:
        file = directory / shard.file
        if not file.is_file():
            errors.append(f"{shard.file} is missing")
        elif (size := file.stat().st_size) != shard.size_bytes and not (
            shard.is_external and size >= shard.begin + shard.size_bytes
        ):
            errors.append(f"{shard.file} has {size} bytes, not {shard.size_bytes}")
    try:
        if load_tokenizer(directory / TOKENIZER_FILE)[1] != manifest.tokenizer_hash:
            errors.append("tokenizer.json is not the one that the store was prepared with")
    except InvalidConfig as invalid:
        errors += [f"tokenizer.json {error.rule}" for error in invalid.errors]
    if errors:
        raise InvalidConfig([damaged_store_error(directory, rule) for rule in errors])
    if remote:
        return Store(directory, manifest, remote["url"], CacheLocation(*remote["location"]))
    return Store(directory, manifest)


def _has_object(url: str) -> bool:
    """Return True if an object can be read; `detect_source` reports why it cannot."""
    try:
        read_object(url, 0, 1, patience=20.0)
    except (FileNotFoundError, InvalidConfig):
        return False
    return True


def copy_small_files(url: str, parent: Path, location: CacheLocation) -> Path:
    """Copy the small files of a store in a bucket, and leave its tokens there.

    Args:
        url: directory of ``store.json``.
        parent: the copies get a directory in it, named by URL and content.
        location: cache for blocks of the large files.

    Returns:
        The directory, which `open_store` accepts.

    Raises:
        InvalidConfig: a file cannot be read, or the store needs files of another machine.
        OSError: the copies cannot be written.
    """
    url = url.rstrip("/")
    names = [STORE_FILE, TOKENIZER_FILE, RECORD_FILE, TEMPLATE_FILE, TOKENIZER_CONFIG_FILE]
    contents = dict(zip(names, read_objects([f"{url}/{name}" for name in names]), strict=True))
    for name in (STORE_FILE, TOKENIZER_FILE):  # not every store has the others
        if contents[name] is None:
            raise fetch_failed(f"{url}/{name}", GONE)
    manifest_data = contents[STORE_FILE] or b""
    directory = parent / hash_json([url, xxh3_128_hexdigest(manifest_data)])
    remote = {"url": url, "location": list(location)}
    with hold_lock(directory / "lock", lambda: None):
        if read_json(directory / REMOTE_FILE) != remote:
            write_durably(directory / STORE_FILE, manifest_data)
            files = [
                file
                for split in Store(directory, _read_manifest(directory)).splits
                for file in split.files
            ]
            if external := [file.file for file in files if file.is_external]:
                rule = f"needs files that are not in the bucket, such as {external[0]}"
                remedy = "prepare the data from text, or use a store on a disk of all nodes"
                raise InvalidConfig([ConfigError("data.path", url, rule, remedy)])
            for name in names[1:]:
                if (content := contents[name]) is not None:
                    write_durably(directory / name, content)
            write_json(directory / REMOTE_FILE, remote)  # last
    return directory


@cache
def manifest_adapter() -> TypeAdapter[Manifest]:
    """Return the reader of manifests, which takes hundredths of a second to build."""
    return TypeAdapter(Manifest)


def _read_manifest(directory: Path) -> Manifest:
    try:
        data = (directory / STORE_FILE).read_bytes()
        version = json.loads(data).get("format")
        if version != FORMAT:
            raise InvalidConfig(
                [damaged_store_error(directory, f"it has format {version}, not {FORMAT}")]
            )
        manifest = manifest_adapter().validate_json(data)
        if errors := list(_find_contradictions(manifest)):
            raise InvalidConfig(
                [damaged_store_error(directory, f"{STORE_FILE}: {rule}") for rule in errors]
            )
        return manifest
    except OSError as error:
        rule = f"{STORE_FILE} cannot be read: {error.strerror}"
    except (ValidationError, ValueError, AttributeError, RecursionError):
        rule = f"{STORE_FILE} was not written by weft, or is damaged"
    raise InvalidConfig([damaged_store_error(directory, rule)])


def _find_contradictions(manifest: Manifest) -> Iterator[str]:
    """Yield a sentence for each value of a manifest that cannot be right."""
    if not 0 <= manifest.separator < manifest.vocab_size:
        yield (
            f"separator {manifest.separator} is outside the vocabulary of "
            f"{manifest.vocab_size} entries"
        )
    if manifest.block_bytes < 1:
        yield f"block_bytes is {manifest.block_bytes}"
    for name in SPLITS:
        split: Split = getattr(manifest, name)
        if split.tokens != sum(shard.tokens for shard in split.shards):
            yield f"{name}.tokens is {split.tokens}, not the sum over its shards"
        if split.documents < 0 or split.bytes < 0:
            yield f"{name} has a negative number of documents or bytes"
        if (split.learned is None) != (split.index is None) or (
            (split.index is None) != (manifest.kind == "text")
        ):
            yield f"{name} does not have the files of a store of kind {manifest.kind}"
        if split.learned is not None and split.learned.tokens != split.tokens:
            yield f"{name}.learned has {split.learned.tokens} entries for {split.tokens} tokens"
        if split.weights is not None and (
            split.learned is None or split.weights.tokens != split.tokens
        ):
            yield f"{name}.weights has {split.weights.tokens} entries for {split.tokens} tokens"
        if (split.labels is None) == (manifest.kind == "unpaired"):
            yield f"{name} does not have the labels of a store of kind {manifest.kind}"
        if split.labels is not None and split.labels.tokens != split.documents:
            yield f"{name}.labels has {split.labels.tokens} entries for {split.documents} documents"
        if split.ends is not None and split.ends.tokens > split.tokens:
            yield f"{name}.ends has {split.ends.tokens} entries for {split.tokens} tokens"
        if split.index is not None and split.index.tokens != 3 * split.documents:
            yield f"{name}.index has {split.index.tokens} numbers for {split.documents} documents"
        for shard in split.files:
            dtypes = {
                id(split.learned): "uint8",
                id(split.index): "int64",
                id(split.weights): "float32",
                id(split.labels): "uint8",
                id(split.ends): "int64",
            }
            dtype = dtypes.get(id(shard))
            width = np.dtype(dtype or manifest.dtype).itemsize
            if min(shard.tokens, shard.begin) < 0 or shard.size_bytes != shard.tokens * width:
                yield (
                    f"{shard.file!r} has {shard.tokens} entries from byte {shard.begin} in "
                    f"{shard.size_bytes} bytes"
                )
            blocks = -(-shard.size_bytes // max(1, manifest.block_bytes))
            if shard.block_xxh3 and len(shard.block_xxh3) != 16 * blocks:
                yield f"{shard.file!r} has no hash for each of its {blocks} blocks"
            # Files of the store have a bare name; external files have an absolute path.
            if not shard.is_external and (
                Path(shard.file).name != shard.file or shard.begin or "\0" in shard.file
            ):
                yield f"{shard.file!r} is not the name of a file in the store's directory"


DATA_REMEDY = "delete the directory and prepare the data again"


def damaged_store_error(directory: str | Path, rule: str, remedy: str = DATA_REMEDY) -> ConfigError:
    """Return the error for a store that differs from what was prepared.

    ``rule`` is a sentence.
    """
    return ConfigError("data.path", str(directory), f"cannot be used: {rule}", remedy)
