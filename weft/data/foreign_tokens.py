r"""Stores of tokens that other software encoded, used in place.

*Megatron-LM* stores a corpus as ``NAME.bin``, tokens without header, and ``NAME.idx``, version 1::

    9 bytes "MMIDIDX\0\0", uint64 version, uint8 token type, uint64 S sequences, uint64 D
    int32[S] tokens of each sequence, int64[S] start of each sequence (byte of the .bin)
    int64[D] first sequence of each document; the last entry is the end

*llm.c* writes 256 int32 (magic 20240520 with 16-bit tokens, or 20240801 with 32-bit tokens;
version; number of tokens), then the tokens.  *nanoGPT* writes 16-bit tokens without header.

If tokens have 16 or 32 bits and are contiguous, and documents end with the separator, weft writes a
store that refers to these files and copies nothing.  Otherwise (such as Megatron-LM without
``--append-eod``), weft copies the tokens and adds the separators.  It also copies them into an
object store, where machines without these files read them.  Files with ``val`` in their
names are the validation set; without such files, it is the end of each file, from a document
boundary.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weft.config.errors import ConfigError, InvalidConfig, truncate_list
from weft.config.files import write_durably
from weft.config.schema import DataSection
from weft.data.document_tokens import find_named_start, format_tokens
from weft.data.prepared_cache import Report, collect_errors, progress_counter, raise_errors
from weft.data.shared_preparation import SharedWork, map_units
from weft.data.source import File, path_error
from weft.data.token_shards import (
    BuiltSplits,
    Corpus,
    Encoder,
    describe_shard,
    insufficient_data_error,
    put_shard,
)
from weft.data.token_store import (
    SPLITS,
    Dtype,
    Ints,
    Shard,
    Split,
    SplitName,
    hash_tokens,
    map_shard,
)
from weft.data.workers import Advance, ignore_progress

CHUNK_TOKENS = 16 << 20  # per read
START_TOKENS = 1 << 20  # of each file, in which weft looks for start tokens

_MEGATRON = b"MMIDIDX\x00\x00"
_MEGATRON_TYPES = dict(
    enumerate(["uint8", "int8", "int16", "int32", "int64", "float64", "float32", "uint16"], start=1)
)
_LLM_C = {20240520: "uint16", 20240801: "uint32"}
_HEADER_BYTES = 1024
# Dtypes that can be used in place, and as which: no token is negative.
_IN_PLACE_DTYPES: dict[str, Dtype] = {"uint16": "uint16", "uint32": "uint32", "int32": "uint32"}


@dataclass(frozen=True)
class TokenFile:
    """Token file; tokens follow byte ``begin``.

    Attributes:
        document_ends: ends of documents, in tokens, if an index records them.
        sequences: starts and lengths of sequences, in tokens, if they are not contiguous.
    """

    file: File
    dtype: str
    begin: int
    tokens: int
    document_ends: Ints | None = None
    sequences: tuple[Ints, Ints] | None = None

    def map_tokens(self) -> NDArray[Any]:
        """Map everything after the header into memory."""
        if not self.file.size_bytes:
            return np.empty(0, self.dtype)
        count = (self.file.size_bytes - self.begin) // np.dtype(self.dtype).itemsize
        return np.asarray(np.memmap(self.file.path, self.dtype, "r", self.begin, (count,)))


@dataclass(frozen=True)
class Span:
    """Tokens ``begin:end`` of a file, all in one split."""

    source: TokenFile
    begin: int
    end: int


@dataclass(frozen=True)
class TokenCorpus(Corpus):
    """Token files with known headers."""

    section: DataSection
    files: list[TokenFile]

    @property
    def cache_key(self) -> object:
        """Files that determine the store, as JSON types."""
        files = [source.file for source in self.files]
        return ["tokens", [[file.path, file.size_bytes, file.version] for file in files]]

    def build(
        self, directory: Path, encoder: Encoder, report: Report, shared: SharedWork | None = None
    ) -> BuiltSplits:
        """Validate every token, and copy those that cannot be used in place.

        One worker copies all of them into an object store.
        """
        if shared is not None:

            def copy(_: None, advance: Advance) -> BuiltSplits:
                return self._build(directory, encoder, report, shared)

            return map_units(shared, "tokens", copy, [None], [0], BuiltSplits, ignore_progress, 1)[
                0
            ]
        return self._build(directory, encoder, report, None)

    def _build(
        self, directory: Path, encoder: Encoder, report: Report, shared: SharedWork | None
    ) -> BuiltSplits:
        dtypes = {find_in_place_dtype(source, encoder.separator) for source in self.files}
        dtype = dtypes.pop() if len(dtypes) == 1 and shared is None else None
        fraction = self.section.validation_fraction
        train, validation = split_tokens(self.files, encoder.separator, fraction)
        if fraction == 0 and validation:
            names = truncate_list([span.source.file.name for span in validation])
            rule = f"has files of validation tokens ({names}), but all of it would be trained"
            remedy = "name the training files by a pattern, such as 'train*.bin'"
            raise path_error(self.section.path, rule, remedy)
        total = sum(span.end - span.begin for span in (*train, *validation))
        if not train or not (validation or self.section.validation_fraction == 0):
            rule = f"has too few tokens ({total})"
            raise insufficient_data_error(self.section, rule, bool(train))
        message = "copying the tokens" if dtype is None else "checking the tokens"
        advance = progress_counter(report, message, total)
        splits = [
            _build_split(directory, name, spans, dtype, encoder, advance, shared)
            for name, spans in zip(SPLITS, (train, validation), strict=True)
        ]
        start, note = _check_start_tokens(train, encoder, self.section)
        return BuiltSplits(
            splits[0],
            splits[1],
            dtype or encoder.dtype,
            start_tokens=start,
            notes=[note] if note else [],
        )


def _build_split(
    directory: Path,
    name: SplitName,
    spans: Sequence[Span],
    dtype: Dtype | None,
    encoder: Encoder,
    advance: Advance,
    shared: SharedWork | None,
) -> Split:
    """Build the shards; with ``dtype``, of tokens in place, else of copies."""
    shards: list[Shard] = []
    documents = 0
    for index, span in enumerate(spans):
        for begin, tokens in read_chunks(span, encoder.separator if dtype is None else None):
            _check_vocabulary(span, begin, tokens, encoder)
            documents += int((tokens == encoder.separator).sum())
            advance(len(tokens))
            if dtype is None:
                file = directory / f"{name}-{index:05d}-{begin:012d}.bin"
                copied = np.ascontiguousarray(tokens.astype(encoder.dtype))
                if shared is not None:
                    shards.append(put_shard(file, copied, encoder, shared))
                    continue
                write_durably(file, copied.data)
                shards.append(describe_shard(file, copied))
        if dtype is not None:
            shards.append(_external_shard(span, dtype))
    return Split(documents, 0, sum(shard.tokens for shard in shards), shards)


def _check_vocabulary(span: Span, begin: int, tokens: NDArray[Any], encoder: Encoder) -> None:
    if tokens.max() < encoder.vocab_size and tokens.min() >= 0:
        return
    index = int(np.flatnonzero((tokens >= encoder.vocab_size) | (tokens < 0))[0])
    rule = (
        f"has {encoder.vocab_size:,} entries, and token {begin + index:,} of "
        f"{span.source.file.name} is {int(tokens[index]):,}"
    )
    remedy = "give the tokenizer.json that encoded the tokens"
    raise InvalidConfig([ConfigError("data.tokenizer", "(given)", rule, remedy)])


def _external_shard(span: Span, dtype: Dtype) -> Shard:
    width = np.dtype(dtype).itemsize
    count, begin = span.end - span.begin, span.source.begin + span.begin * width
    shard = Shard(str(Path(span.source.file.path).absolute()), count, count * width, "", begin)
    return replace(shard, xxh3=hash_tokens(map_shard(Path("/"), dtype, shard)))


def _check_start_tokens(
    spans: Sequence[Span], encoder: Encoder, section: DataSection
) -> tuple[tuple[int, ...], str]:
    """Return the start tokens of documents, and how they differ from the tokenizer's.

    Other software has written them, so weft only looks at the beginning of each file.
    """
    named = encoder.prefix or find_named_start(encoder.tokenizer, encoder.file)
    if named[:1] in ((), (encoder.separator,)):
        return encoder.affixes.start, ""
    num_documents = num_started = 0
    for span in spans:
        beginning = replace(span, end=min(span.end, span.begin + START_TOKENS))
        for _, tokens in read_chunks(beginning, encoder.separator):
            starts = np.append(0, np.flatnonzero(tokens[:-1] == encoder.separator) + 1)
            num_documents += len(starts)
            num_started += int((tokens[starts] == named[0]).sum())
    has_start = 2 * num_started > num_documents
    if has_start == bool(encoder.prefix):
        return encoder.affixes.start, ""
    verb = "begin" if has_start else "do not begin"
    name = format_tokens(encoder.tokenizer, named)
    rule = "the tokenizer"
    if section.start_token != "auto":
        rule = f"data.start_token={str(section.start_token).lower()}"
    note = (
        f"the documents {verb} with {name}, unlike those of {rule}; weft trains tokens of other "
        "software as they are: prepare them from text to change that"
    )
    return (named if has_start else ()), note


# --------------------------------------------------------------------------- headers


def read_headers(files: Sequence[File]) -> list[TokenFile]:
    """Read the header or index of each file.

    Raises:
        InvalidConfig: one error for each file whose name or header is wrong.
    """
    token_files: list[TokenFile] = []
    errors: list[ConfigError] = []
    for file in files:
        with collect_errors(errors):
            try:
                index = Path(file.path).with_suffix(".idx")
                is_megatron = index.is_file()
                token_files.append(
                    _read_megatron_header(file, index) if is_megatron else _read_plain_header(file)
                )
            except OSError as error:
                raise _file_error(file, f"cannot be read: {error.strerror}") from error
    raise_errors(errors)
    if token_files := [token_file for token_file in token_files if token_file.tokens]:
        return token_files
    raise _file_error(files[0], "holds no tokens")


def _read_megatron_header(file: File, index: Path) -> TokenFile:
    prefix = f"cannot be read: {index.name}"
    data = memoryview(index.read_bytes())
    header_size = 9 + 8 + 1 + 8 + 8
    if bytes(data[:9]) != _MEGATRON or len(data) < header_size:
        raise _file_error(file, f"{prefix} is not an index of Megatron-LM (wrong magic bytes)")
    version, type_code, num_sequences, num_documents = struct.unpack("<QBQQ", data[9:header_size])
    if version != 1:
        raise _file_error(file, f"{prefix} has version {version}, not 1")
    dtype = _MEGATRON_TYPES.get(type_code)
    if dtype is None or dtype.startswith("float"):
        rule = f"{prefix} declares the unsupported token type {type_code} ({dtype})"
        raise _file_error(file, rule)
    if len(data) < header_size + 12 * num_sequences + 8 * num_documents:
        raise _file_error(file, f"{prefix} is truncated")
    sizes = np.frombuffer(data, "<i4", num_sequences, header_size).astype(np.int64)
    pointers = np.frombuffer(data, "<i8", num_sequences, header_size + 4 * num_sequences)
    first_sequences = np.frombuffer(data, "<i8", num_documents, header_size + 12 * num_sequences)
    width = np.dtype(dtype).itemsize
    ends = pointers + sizes * width
    if len(sizes) and (sizes.min() < 0 or pointers.min() < 0 or ends.max() > file.size_bytes):
        rule = f"{prefix} refers to byte {ends.max()}, but the file has {file.size_bytes} bytes"
        raise _file_error(file, rule)
    sequence_ends = np.cumsum(sizes)
    total = int(sequence_ends[-1]) if len(sequence_ends) else 0
    if num_documents and (
        first_sequences.min() < 0
        or first_sequences.max() > num_sequences
        or (np.diff(first_sequences) < 0).any()
    ):
        raise _file_error(file, f"{prefix} has documents with sequences that do not exist")
    boundaries = np.unique(np.concatenate(([0], sequence_ends))[first_sequences])
    is_contiguous = np.array_equal(pointers, (sequence_ends - sizes) * width)
    sequences = None if is_contiguous else (pointers // width, sizes)
    return TokenFile(file, dtype, 0, total, boundaries[boundaries > 0], sequences)


def _read_plain_header(file: File) -> TokenFile:
    """Read a file of llm.c, recognized by its magic number, or of nanoGPT."""
    with open(file.path, "rb") as stream:
        header = np.frombuffer(stream.read(_HEADER_BYTES).ljust(_HEADER_BYTES, b"\0"), "<i4")
    if (dtype := _LLM_C.get(int(header[0]))) and file.size_bytes >= _HEADER_BYTES:
        tokens = int(header[2])
        missing = _HEADER_BYTES + tokens * np.dtype(dtype).itemsize - file.size_bytes
        if missing:
            verb = "lacks" if missing > 0 else "has too many"
            rule = f"{verb} {abs(missing)} bytes for the {tokens} tokens in its header"
            raise _file_error(file, rule)
        return TokenFile(file, dtype, _HEADER_BYTES, tokens)
    if file.size_bytes % 2:
        rule = "has neither a header of llm.c nor an .idx file, and an odd number of bytes"
        raise _file_error(file, rule)
    return TokenFile(file, "uint16", 0, file.size_bytes // 2)


def _file_error(file: File, rule: str) -> InvalidConfig:
    remedy = "give the .bin of Megatron-LM (with its .idx), llm.c or nanoGPT"
    return path_error(file.path, rule, remedy)


# --------------------------------------------------------------------------- splitting


def split_tokens(
    sources: Sequence[TokenFile], separator: int, validation_fraction: float
) -> tuple[list[Span], list[Span]]:
    """Return train and validation spans, by file names or at the end of each file."""
    is_validation = ["val" in Path(source.file.name).name.lower() for source in sources]
    if any(is_validation) and not all(is_validation):
        pairs = zip(sources, is_validation, strict=True)
        cuts = [0 if validation else source.tokens for source, validation in pairs]
    else:
        cuts = [_find_cut(source, separator, validation_fraction) for source in sources]
    train = [Span(source, 0, cut) for source, cut in zip(sources, cuts, strict=True)]
    validation = [Span(span.source, span.end, span.source.tokens) for span in train]
    return [span for span in train if span.end], [
        span for span in validation if span.begin < span.end
    ]


def _find_cut(source: TokenFile, separator: int, validation_fraction: float) -> int:
    """Return a document end near the start of the validation part."""
    target = source.tokens - int(source.tokens * validation_fraction)
    if validation_fraction == 0:
        return target
    if source.document_ends is not None:
        candidates = source.document_ends[source.document_ends <= target]
        return int(candidates[-1]) if len(candidates) else min(target, source.tokens - 1)
    # Search a limited range: tokens without separators are cut at the target.
    first = max(0, target - max(1, source.tokens - target))
    ends = np.flatnonzero(source.map_tokens()[first:target] == separator)
    return first + int(ends[-1]) + 1 if len(ends) else min(target, source.tokens - 1)


# --------------------------------------------------------------------------- reading


def find_in_place_dtype(source: TokenFile, separator: int) -> Dtype | None:
    """Return the dtype for using the tokens in place; None: they must be copied."""
    if source.sequences is not None:
        return None
    if (
        source.document_ends is not None
        and (source.map_tokens()[source.document_ends - 1] != separator).any()
    ):
        return None
    return _IN_PLACE_DTYPES.get(source.dtype)


def read_chunks(span: Span, separator: int | None) -> Iterator[tuple[int, NDArray[Any]]]:
    """Yield ``(begin, tokens)`` chunks of a span, bounded in size.

    Args:
        span: tokens of one file.
        separator: inserted after documents that lack it; None: insert nothing.
    """
    source, mapped = span.source, span.source.map_tokens()
    for begin in range(span.begin, span.end, CHUNK_TOKENS):
        end = min(span.end, begin + CHUNK_TOKENS)
        tokens = (
            mapped[begin:end] if source.sequences is None else _gather_sequences(source, begin, end)
        )
        if separator is not None and source.document_ends is not None:
            low, high = np.searchsorted(source.document_ends, [begin, end], side="right")
            ends = source.document_ends[low:high] - begin
            tokens = np.insert(tokens, ends[tokens[ends - 1] != separator], separator)
        yield begin, tokens


def _gather_sequences(source: TokenFile, begin: int, end: int) -> NDArray[Any]:
    """Return tokens ``begin:end`` of sequences that are not contiguous."""
    assert source.sequences is not None
    starts, sizes = source.sequences
    mapped, sequence_ends = source.map_tokens(), np.cumsum(sizes)
    first = int(np.searchsorted(sequence_ends, begin, side="right"))
    last = int(np.searchsorted(sequence_ends, end, side="left"))
    chunks = []
    for index in range(first, last + 1):
        offset = int(sequence_ends[index] - sizes[index])
        low, high = max(begin, offset) - offset, min(end, int(sequence_ends[index])) - offset
        chunks.append(mapped[starts[index] + low : starts[index] + high])
    return np.concatenate(chunks)
