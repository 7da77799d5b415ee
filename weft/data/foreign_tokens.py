"""Stores of tokens that others made, used as they lie.

*Megatron-LM* keeps a corpus as ``NAME.bin``, tokens and nothing else, and ``NAME.idx``, version 1::

    9 bytes "MMIDIDX\\0\\0", uint64 version, uint8 type of a token, uint64 S sequences, uint64 D
    int32[S] tokens of each sequence, int64[S] where each begins (byte of the .bin)
    int64[D] the first sequence of each document, and behind the last one

*llm.c* writes 256 int32 (magic 20240520 with 16-bit tokens, or 20240801 with 32-bit ones; version;
number of tokens), then the tokens.  *nanoGPT* writes 16-bit tokens and nothing else.

Where tokens are of 16 or 32 bits, end to end, and their documents end with the separator, a store
of weft's is made that names these files instead of having its own: nothing is copied.  Else (such
as from Megatron-LM without ``--append-eod``) they are copied, with what is missing.  Files with
``val`` in their names are held out, or else the end of each file, from the end of a document on.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weft.config.errors import ConfigError, InvalidConfig
from weft.config.files import write_durably
from weft.config.schema import DataSection
from weft.data.order import Ints
from weft.data.prepared_cache import Report, counting
from weft.data.source_files import File
from weft.data.token_shards import Built, Encoder, IncompleteTail, describe, too_little
from weft.data.token_store import (
    SPLITS,
    Dtype,
    Shard,
    Split,
    SplitName,
    hash_tokens,
    map_shard,
)
from weft.data.workers import Advance

CHUNK_TOKENS = 16 << 20  # looked at or copied at a time

_MEGATRON = b"MMIDIDX\x00\x00"
_MEGATRON_TYPES = {
    1: "uint8",
    2: "int8",
    3: "int16",
    4: "int32",
    5: "int64",
    6: "float64",
    7: "float32",
    8: "uint16",
}
_LLM_C = {20240520: "uint16", 20240801: "uint32"}
_HEADER_BYTES = 1024
# What may be read where it lies, and as what: no token is negative.
_IN_PLACE: dict[str, Dtype] = {"uint16": "uint16", "uint32": "uint32", "int32": "uint32"}


@dataclass(frozen=True)
class TokenFile:
    """Tokens in a file, from byte ``begin`` on; ``ends`` is where documents end, if that is
    written down, as numbers of tokens, and ``pieces`` where sequences begin, if not end to end."""

    file: File
    dtype: str
    begin: int
    tokens: int
    ends: Ints | None = None
    pieces: tuple[Ints, Ints] | None = None  # where each sequence begins, and its size, in tokens

    def map(self) -> NDArray[Any]:
        """All that follows the header, mapped into memory."""
        if not self.file.size_bytes:
            return np.empty(0, self.dtype)
        count = (self.file.size_bytes - self.begin) // np.dtype(self.dtype).itemsize
        return np.asarray(np.memmap(self.file.path, self.dtype, "r", self.begin, (count,)))


@dataclass(frozen=True)
class Span:
    """Tokens ``begin:end`` of a file that are all of one split."""

    source: TokenFile
    begin: int
    end: int


@dataclass(frozen=True)
class TokenFiles:
    """Tokens of others, of which the headers were read: a `weft.data.token_shards.Reading`."""

    section: DataSection
    files: list[TokenFile]
    text_bytes: int = 0  # their tokenizer is given, and learns nothing
    odd: IncompleteTail = field(default_factory=IncompleteTail)

    @property
    def content(self) -> object:
        files = [source.file for source in self.files]
        return ["tokens", [[file.path, file.size_bytes, file.version] for file in files]]

    def training_texts(self, most_bytes: int) -> Iterator[str]:
        return iter(())

    def build(self, folder: Path, encoder: Encoder, report: Report) -> Built:
        """Check every token, and copy those that cannot be read where they lie."""
        dtypes = {dtype_in_place(source, encoder.separator) for source in self.files}
        dtype = dtypes.pop() if len(dtypes) == 1 else None
        train, validation = split_tokens(
            self.files, encoder.separator, self.section.validation_fraction
        )
        total = sum(span.end - span.begin for span in (*train, *validation))
        if not train or not validation:
            raise too_little(self.section, f"has too few tokens ({total})", bool(train))
        message = "copying the tokens" if dtype is None else "checking the tokens"
        advance = counting(report, message, total)
        splits = [
            _build_split(folder, name, spans, dtype, encoder, advance)
            for name, spans in zip(SPLITS, (train, validation), strict=True)
        ]
        return Built(splits[0], splits[1], dtype or encoder.dtype)


def _build_split(
    folder: Path,
    name: SplitName,
    spans: Sequence[Span],
    dtype: Dtype | None,
    encoder: Encoder,
    advance: Advance,
) -> Split:
    """``dtype``: as what tokens are read where they lie; None: they are copied."""
    shards: list[Shard] = []
    documents = 0
    for number, span in enumerate(spans):
        for begin, tokens in chunks(span, encoder.separator if dtype is None else None):
            _check_vocabulary(span, begin, tokens, encoder)
            documents += int((tokens == encoder.separator).sum())
            advance(len(tokens))
            if dtype is None:
                file = folder / f"{name}-{number:05d}-{begin:012d}.bin"
                copied = np.ascontiguousarray(tokens.astype(encoder.dtype))
                write_durably(file, copied.data)
                shards.append(describe(file, copied))
        if dtype is not None:
            shards.append(_where_it_lies(span, dtype))
    return Split(documents, 0, sum(shard.tokens for shard in shards), shards)


def _check_vocabulary(span: Span, begin: int, tokens: NDArray[Any], encoder: Encoder) -> None:
    if tokens.max() < encoder.vocab_size and tokens.min() >= 0:
        return
    place = int(np.flatnonzero((tokens >= encoder.vocab_size) | (tokens < 0))[0])
    rule = (
        f"has {encoder.vocab_size:,} entries, and token {begin + place:,} of "
        f"{span.source.file.name} is {int(tokens[place]):,}"
    )
    remedy = "give the tokenizer.json that the tokens were made with"
    raise InvalidConfig([ConfigError("data.tokenizer", "(given)", rule, remedy)])


def _where_it_lies(span: Span, dtype: Dtype) -> Shard:
    width = np.dtype(dtype).itemsize
    count, begin = span.end - span.begin, span.source.begin + span.begin * width
    shard = Shard(str(Path(span.source.file.path).absolute()), count, count * width, "", begin)
    return replace(shard, xxh3=hash_tokens(map_shard(Path("/"), dtype, shard)))


# --------------------------------------------------------------------------- headers


def read_headers(files: Sequence[File]) -> list[TokenFile]:
    """What each file says that it holds.

    Raises:
        InvalidConfig: with every file that is not what its name or header says.
    """
    found, problems = [], []
    for file in files:
        try:
            index = Path(file.path).with_suffix(".idx")
            read = _megatron(file, index) if index.is_file() else _plain(file)
            if read.tokens:
                found.append(read)
        except InvalidConfig as invalid:
            problems += invalid.problems
        except OSError as error:
            problems += _wrong(file, f"cannot be read: {error.strerror}").problems
    if problems:
        raise InvalidConfig(problems)
    if not found:
        raise _wrong(files[0], "holds no tokens")
    return found


def _megatron(file: File, index: Path) -> TokenFile:
    data = memoryview(index.read_bytes())
    size = 9 + 8 + 1 + 8 + 8
    if bytes(data[:9]) != _MEGATRON or len(data) < size:
        raise _wrong(file, f"{index.name} is not an index of Megatron-LM's (it begins otherwise)")
    version, code, sequences, documents = struct.unpack("<QBQQ", data[9:size])
    if version != 1:
        raise _wrong(file, f"{index.name} has version {version}, not 1")
    dtype = _MEGATRON_TYPES.get(code)
    if dtype is None or dtype.startswith("float"):
        raise _wrong(file, f"{index.name} says that tokens are of type {code}: {dtype}")
    if len(data) < size + 12 * sequences + 8 * documents:
        raise _wrong(file, f"{index.name} is cut off")
    sizes = np.frombuffer(data, "<i4", sequences, size).astype(np.int64)
    pointers = np.frombuffer(data, "<i8", sequences, size + 4 * sequences)
    firsts = np.frombuffer(data, "<i8", documents, size + 12 * sequences)
    width = np.dtype(dtype).itemsize
    ends = pointers + sizes * width
    if len(sizes) and (sizes.min() < 0 or pointers.min() < 0 or ends.max() > file.size_bytes):
        rule = f"{index.name} names tokens up to byte {ends.max()}, it has {file.size_bytes}"
        raise _wrong(file, rule)
    behind = np.cumsum(sizes)
    total = int(behind[-1]) if len(behind) else 0
    if documents and (firsts.min() < 0 or firsts.max() > sequences or (np.diff(firsts) < 0).any()):
        raise _wrong(file, f"{index.name} has documents of sequences that are not there")
    borders = np.unique(np.concatenate(([0], behind))[firsts])
    in_order = np.array_equal(pointers, (behind - sizes) * width)
    pieces = None if in_order else (pointers // width, sizes)
    return TokenFile(file, dtype, 0, total, borders[borders > 0], pieces)


def _plain(file: File) -> TokenFile:
    """Of llm.c, if it begins so, or of nanoGPT."""
    with open(file.path, "rb") as stream:
        header = np.frombuffer(stream.read(_HEADER_BYTES).ljust(_HEADER_BYTES, b"\0"), "<i4")
    if (dtype := _LLM_C.get(int(header[0]))) and file.size_bytes >= _HEADER_BYTES:
        tokens = int(header[2])
        missing = _HEADER_BYTES + tokens * np.dtype(dtype).itemsize - file.size_bytes
        if missing:
            what = "lacks" if missing > 0 else "has too many"
            rule = f"{what} {abs(missing)} bytes of the {tokens} tokens that its header tells"
            raise _wrong(file, rule)
        return TokenFile(file, dtype, _HEADER_BYTES, tokens)
    if file.size_bytes % 2:
        rule = "has no header of llm.c's and no .idx beside it, and is not of 16-bit tokens either"
        raise _wrong(file, rule)
    return TokenFile(file, "uint16", 0, file.size_bytes // 2)


def _wrong(file: File, rule: str) -> InvalidConfig:
    remedy = "give the .bin of Megatron-LM (with its .idx), llm.c or nanoGPT"
    return InvalidConfig([ConfigError("data.path", file.path, rule, remedy)])


# --------------------------------------------------------------------------- splitting


def split_tokens(
    sources: Sequence[TokenFile], separator: int, validation_fraction: float
) -> tuple[list[Span], list[Span]]:
    """Train and held-out tokens: by the files' names, or the end of each."""
    named = ["val" in Path(source.file.name).name.lower() for source in sources]
    if any(named) and not all(named):
        cuts = [0 if held else source.tokens for source, held in zip(sources, named, strict=True)]
    else:
        cuts = [_cut(source, separator, validation_fraction) for source in sources]
    pairs = list(zip(sources, cuts, strict=True))
    train = [Span(source, 0, cut) for source, cut in pairs if cut]
    return train, [Span(source, cut, source.tokens) for source, cut in pairs if cut < source.tokens]


def _cut(source: TokenFile, separator: int, validation_fraction: float) -> int:
    """The end of a document near the place from which ``validation_fraction`` of the tokens are left."""
    wanted = source.tokens - int(source.tokens * validation_fraction)
    if source.ends is not None:
        below = source.ends[(source.ends <= wanted)]
        return int(below[-1]) if len(below) else min(wanted, source.tokens - 1)
    # Not too far before it: a text without separators is cut where it is.
    first = max(0, wanted - max(1, source.tokens - wanted))
    ends = np.flatnonzero(source.map()[first:wanted] == separator)
    return first + int(ends[-1]) + 1 if len(ends) else min(wanted, source.tokens - 1)


# --------------------------------------------------------------------------- reading


def dtype_in_place(source: TokenFile, separator: int) -> Dtype | None:
    """As what weft can read the tokens where they lie; None: it cannot."""
    if source.pieces is not None:
        return None
    if source.ends is not None and (source.map()[source.ends - 1] != separator).any():
        return None
    return _IN_PLACE.get(source.dtype)


def chunks(span: Span, separator: int | None) -> Iterator[tuple[int, NDArray[Any]]]:
    """The tokens of a span and where in the file each chunk of them begins, bounded in size.

    Args:
        separator: is put behind each document that lacks it; None: nothing is.
    """
    source, mapped = span.source, span.source.map()
    for begin in range(span.begin, span.end, CHUNK_TOKENS):
        end = min(span.end, begin + CHUNK_TOKENS)
        found = mapped[begin:end] if source.pieces is None else _gathered(source, begin, end)
        if separator is not None and source.ends is not None:
            low, high = np.searchsorted(source.ends, [begin, end], side="right")
            ends = source.ends[low:high] - begin
            found = np.insert(found, ends[found[ends - 1] != separator], separator)
        yield begin, found


def _gathered(source: TokenFile, begin: int, end: int) -> NDArray[Any]:
    """Tokens ``begin:end`` of sequences that do not lie one after the other."""
    assert source.pieces is not None
    starts, sizes = source.pieces
    mapped, behind = source.map(), np.cumsum(sizes)
    first = int(np.searchsorted(behind, begin, side="right"))
    last = int(np.searchsorted(behind, end, side="left"))
    parts = []
    for n in range(first, last + 1):
        at = int(behind[n] - sizes[n])
        low, high = max(begin, at) - at, min(end, int(behind[n])) - at
        parts.append(mapped[starts[n] + low : starts[n] + high])
    return np.concatenate(parts)
