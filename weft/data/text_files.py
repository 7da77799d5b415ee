"""Text files, each of which is one document: validate, split and encode them.

A *scan* reads a document once, in blocks, and records a hash, the first invalid byte, and the
possible cuts.  A *chunk* is a byte range between two cuts, small enough for memory and without
split characters, so that memory is bounded for files of any size.  A *part* is the range of a
document in one split: all of it, its beginning, or its tail.  A shard is a sequence of chunks.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import BinaryIO, Literal

from pydantic import TypeAdapter
from xxhash import xxh3_64_hexdigest, xxh3_128

from weft.config.errors import truncate_list
from weft.config.schema import DataSection
from weft.data.prepared_cache import Progress, Report, progress_counter
from weft.data.shared_preparation import SharedWork, load_or_scan, map_units
from weft.data.source import File, changed_error, open_file, path_error, unreadable_error
from weft.data.token_shards import (
    CHUNK_BYTES,
    BuiltSplits,
    Corpus,
    Encoder,
    IncompleteTail,
    TextChunk,
    build_shards,
    find_cut,
    insufficient_data_error,
)
from weft.data.token_store import SPLITS, Shard, Split, SplitName
from weft.data.workers import Advance

FORMAT = 3  # of cached scans
BLOCK_BYTES = 1 << 20
MIN_WHOLE_DOCUMENTS = 20  # with fewer, the validation set consists of tails


@dataclass(frozen=True)
class InvalidText:
    """First byte of a document that is not text; ``line`` counts from 1."""

    offset: int
    line: int
    reason: str


@dataclass(frozen=True)
class TextScan:
    """Result of scanning a document.

    ``cuts`` are ascending byte offsets that delimit chunks; the first follows a byte order mark.
    ``tail_start`` is the offset of the part for validation, if the validation set consists of
    tails.
    """

    file: File
    content_hash: str
    cuts: list[int]
    tail_start: int
    error: InvalidText | None

    @property
    def text_bytes(self) -> int:
        """Bytes of text, without a byte order mark."""
        return self.cuts[-1] - self.cuts[0]


@dataclass(frozen=True)
class DocumentPart:
    """Bytes ``begin:end`` of a document, all in one split."""

    scan: TextScan
    begin: int
    end: int

    @property
    def text_bytes(self) -> int:
        """Bytes of text in the part."""
        return self.end - self.begin

    def chunks(self) -> Iterator[tuple[int, int]]:
        """Yield consecutive byte ranges of the part, without split characters."""
        for begin, end in pairwise(self.scan.cuts):
            if begin < self.end and end > self.begin:
                yield max(begin, self.begin), min(end, self.end)


# --------------------------------------------------------------------------- corpus


@dataclass(frozen=True)
class TextCorpus(Corpus):
    """Scanned text files, and how many were skipped or repaired."""

    scans: list[TextScan]
    train: list[DocumentPart]
    validation: list[DocumentPart]
    num_skipped: int
    num_replaced: int
    shard_bytes: int

    @property
    def cache_key(self) -> object:
        """Names and content hashes of the files, as JSON types."""
        return [(scan.file.name, scan.content_hash) for scan in self.scans]

    @property
    def text_bytes(self) -> int:
        """Bytes of the train text."""
        return sum(part.text_bytes for part in self.train)

    @property
    def skip_counts(self) -> IncompleteTail:
        """Number of files that were not used unchanged, without empty files."""
        return IncompleteTail(self.num_skipped, self.num_replaced)

    def sample_texts(self, max_bytes: int) -> Iterator[str]:
        """Yield at most ``max_bytes`` of the train text, evenly spread."""
        total = self.text_bytes
        seen = taken = 0
        for part in self.train:
            for begin, end in part.chunks():
                seen += end - begin
                if (taken + end - begin) * total <= seen * max_bytes:
                    taken += end - begin
                    yield read_chunk(part.scan, begin, end)

    def build(
        self, directory: Path, encoder: Encoder, report: Report, shared: SharedWork | None = None
    ) -> BuiltSplits:
        """Tokenize both splits, and write their shards."""
        splits = dict(zip(SPLITS, (self.train, self.validation), strict=True))
        tasks = [
            (name, directory / f"{name}-{index:05d}.bin", group)
            for name, parts in splits.items()
            for index, group in enumerate(_group_chunks(parts, self.shard_bytes) if parts else ())
        ]
        sizes = [sum(end - begin for _, begin, end in group) for _, _, group in tasks]
        advance = progress_counter(report, "tokenizing", sum(sizes))

        def build(task: tuple[SplitName, Path, _Chunks], advance: Advance) -> Shard:
            return _build_shard(*task[1:], encoder, advance, shared)

        # One process: the tokenizer's threads use all cores.
        shards = map_units(shared, "tokens", build, tasks, sizes, Shard, advance, num_processes=1)
        built = [
            Split(
                len(parts),
                sum(part.text_bytes for part in parts),
                sum(shard.tokens for shard in own),
                own,
            )
            for name, parts in splits.items()
            for own in [[s for s, task in zip(shards, tasks, strict=True) if task[0] == name]]
        ]
        return BuiltSplits(built[0], built[1], encoder.dtype)


def read_text_corpus(
    section: DataSection, files: Sequence[File], cache: Path, shard_bytes: int, report: Report
) -> TextCorpus:
    """Scan every file, unless cached scans exist.

    A shard has at most ``shard_bytes`` of text, plus one chunk.

    Raises:
        InvalidConfig: a file cannot be read or is not text, or there is too little text.
    """
    scans = _scan_files(files, section, cache, report)
    valid = select_text(scans, section.invalid_utf8, section.path)
    train, validation = split_documents(valid, section.validation_fraction)
    if not train or not (validation or section.validation_fraction == 0):
        size = sum(scan.text_bytes for scan in valid)
        raise insufficient_data_error(section, f"has too little text ({size} bytes)", bool(train))
    invalid = [scan.file.name for scan in scans if scan.error and scan.text_bytes]
    skipped = invalid if section.invalid_utf8 == "skip" else []
    if skipped:
        names = ", ".join(skipped[:3]) + (", ..." if len(skipped) > 3 else "")
        report(Progress(f"skipped {len(skipped)} files that are not UTF-8 text: {names}"))
    num_replaced = len(invalid) - len(skipped)
    return TextCorpus(valid, train, validation, len(skipped), num_replaced, shard_bytes)


def _scan_files(
    files: Sequence[File], section: DataSection, cache: Path, report: Report
) -> list[TextScan]:
    """Scan all files, or load cached scans if no file has changed."""
    files = [file for file in files if file.size_bytes]
    states = []
    for file in files:
        try:  # ctime also changes if a program resets mtime
            changed_ns = Path(file.path).stat().st_ctime_ns
        except OSError as error:
            raise unreadable_error(file, error) from error
        states.append([file.path, *file.identity, changed_ns])

    sizes = [file.size_bytes for file in files]
    advance = progress_counter(report, "reading the text", sum(sizes))

    def scan(file: File, advance: Advance) -> TextScan:
        return scan_file(file, section.validation_fraction, advance)

    def scan_files(shared: SharedWork | None) -> list[TextScan]:
        return map_units(shared, "scan", scan, files, sizes, TextScan, advance, num_processes=1)

    key = [FORMAT, CHUNK_BYTES, section.validation_fraction, states]
    adapter = TypeAdapter(list[TextScan])
    return load_or_scan(cache, key, adapter, scan_files, section.path, report)


# --------------------------------------------------------------------------- scanning


def scan_file(file: File, validation_fraction: float, advance: Advance) -> TextScan:
    """Read a document once, in blocks.

    Args:
        file: a file of ``data.path``.
        validation_fraction: fraction of the document in its tail.
        advance: is called with the bytes read since the last call.

    Raises:
        InvalidConfig: the file cannot be read.
    """
    hasher = xxh3_128()
    pending, error = b"", None
    size = num_newlines = 0
    with open_file(file) as stream:
        try:
            cuts = [3 if stream.read(3) == codecs.BOM_UTF8 else 0]
            stream.seek(0)
            while block := stream.read(BLOCK_BYTES):
                pending += block if size else block[cuts[0] :]
                hasher.update(block)
                size += len(block)
                advance(len(block))
                is_end = size == file.size_bytes
                while len(pending) > CHUNK_BYTES or (is_end and pending):
                    cut = len(pending)
                    if cut > CHUNK_BYTES:
                        cut = find_cut(pending, 0, CHUNK_BYTES)
                    chunk, pending = pending[:cut], pending[cut:]
                    error = error or _find_invalid_byte(chunk, cuts[-1], num_newlines)
                    num_newlines += chunk.count(b"\n")
                    cuts.append(cuts[-1] + cut)
            tail_start = _find_tail(stream, cuts[0], size, validation_fraction)
        except OSError as failure:
            raise unreadable_error(file, failure) from failure
    if pending or size != file.size_bytes:
        raise changed_error(file)
    return TextScan(file, hasher.hexdigest(), cuts, tail_start, error)


def _find_invalid_byte(chunk: bytes, begin: int, num_newlines: int) -> InvalidText | None:
    """Return the first byte that is not UTF-8 text in a chunk from byte ``begin``."""
    # UTF-8 allows NUL, but only binary files contain it.
    offset, reason = chunk.find(0), "NUL, as in a binary file"
    try:
        chunk.decode()
    except UnicodeDecodeError as error:
        if offset < 0 or error.start < offset:
            is_utf16 = chunk.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
            offset, reason = error.start, "not UTF-8"
            if is_utf16 and begin == offset == 0:
                reason = "UTF-16 byte order mark"
    if offset < 0:
        return None
    return InvalidText(begin + offset, num_newlines + chunk.count(b"\n", 0, offset) + 1, reason)


def _find_tail(file: BinaryIO, begin: int, size: int, validation_fraction: float) -> int:
    """Return the offset of the last ``validation_fraction`` of the text.

    The cut is at a line if that makes the tail at most twice as long.
    """
    tail_bytes = int((size - begin) * validation_fraction)
    if tail_bytes <= 0:
        return size
    mark = size - tail_bytes
    low = max(begin, mark - max(4, min(tail_bytes, BLOCK_BYTES)))  # 4: longest UTF-8 character
    file.seek(low)
    return low + find_cut(file.read(mark - low + 1), 0, mark - low)


def select_text(
    scans: Sequence[TextScan], invalid_utf8: Literal["error", "replace", "skip"], path: str
) -> list[TextScan]:
    """Return the scans that contain text, valid or to be repaired.

    Raises:
        InvalidConfig: with ``error``, one error that lists the files that are not text.
    """
    scans = [scan for scan in scans if scan.text_bytes]
    invalid = [(scan.file.name, scan.error) for scan in scans if scan.error]
    if not invalid or invalid_utf8 == "replace":
        return scans
    if invalid_utf8 == "skip":
        return [scan for scan in scans if not scan.error]
    lines = [
        f"{name}: byte {error.offset}, line {error.line}: {error.reason}" for name, error in invalid
    ]
    count = "has a file that is" if len(invalid) == 1 else f"has {len(invalid)} files that are"
    raise path_error(
        path,
        f"{count} not UTF-8 text:\n  " + truncate_list(lines, "\n  "),
        "set data.invalid_utf8=skip to skip such files (best for binary files), "
        "data.invalid_utf8=replace to replace invalid bytes by U+FFFD, "
        "or give a path with only text",
    )


def read_chunk(scan: TextScan, begin: int, end: int) -> str:
    """Return the text of bytes ``begin:end``, with invalid bytes as U+FFFD.

    Raises:
        InvalidConfig: the file cannot be read, or changed after the scan.
    """
    with open_file(scan.file) as stream:
        try:
            stream.seek(begin)
            data = stream.read(end - begin)
        except OSError as error:
            raise unreadable_error(scan.file, error) from error
    if len(data) != end - begin:
        raise changed_error(scan.file)
    return data.decode("utf-8", "replace").replace("\0", "\ufffd")


# --------------------------------------------------------------------------- validation split


def split_documents(
    scans: Sequence[TextScan], validation_fraction: float
) -> tuple[list[DocumentPart], list[DocumentPart]]:
    """Return disjoint train and validation parts; a pure function of its arguments.

    From ``MIN_WHOLE_DOCUMENTS`` documents on, the validation set consists of whole documents,
    selected by a hash of their names (one more document hardly changes the selection).  Copies of
    the same content are in the same split.  With fewer documents, or if whole documents cannot make
    up about ``validation_fraction`` of the bytes, it consists of the tail of each document.
    """
    validation_hashes = _select_validation_documents(scans, validation_fraction)
    train, validation = [], []
    for scan in scans:
        begin, end = scan.cuts[0], scan.cuts[-1]
        cut = scan.tail_start
        if validation_hashes:
            cut = begin if scan.content_hash in validation_hashes else end
        if begin < cut:
            train.append(DocumentPart(scan, begin, cut))
        if cut < end:
            validation.append(DocumentPart(scan, cut, end))
    return train, validation


def _select_validation_documents(scans: Sequence[TextScan], validation_fraction: float) -> set[str]:
    """Return the content hashes of validation documents; empty: use tails."""
    if len(scans) < MIN_WHOLE_DOCUMENTS:
        return set()
    bytes_by_content: dict[str, int] = {}
    for scan in sorted(scans, key=lambda s: (xxh3_64_hexdigest(s.file.name.encode()), s.file.name)):
        size = bytes_by_content.get(scan.content_hash, 0)
        bytes_by_content[scan.content_hash] = size + scan.text_bytes
    target_bytes = validation_fraction * sum(bytes_by_content.values())
    selected: set[str] = set()
    selected_bytes = 0
    for content, size in bytes_by_content.items():
        # One huge document must not become the validation set.
        if selected_bytes < target_bytes and selected_bytes + size <= 1.5 * target_bytes:
            selected.add(content)
            selected_bytes += size
    return selected if selected_bytes >= 0.5 * target_bytes else set()


# --------------------------------------------------------------------------- shards


_Chunks = list[tuple[DocumentPart, int, int]]  # part, begin and end


def _group_chunks(parts: Sequence[DocumentPart], shard_bytes: int) -> Iterator[_Chunks]:
    """Yield the chunks of each shard, in order."""
    shard: _Chunks = []
    size = 0
    for part in parts:
        for begin, end in part.chunks():
            if shard and size + end - begin > shard_bytes:
                yield shard
                shard, size = [], 0
            shard.append((part, begin, end))
            size += end - begin
    yield shard


def _build_shard(
    file: Path, group: _Chunks, encoder: Encoder, advance: Advance, shared: SharedWork | None
) -> Shard:
    texts = (
        TextChunk(
            read_chunk(part.scan, begin, end),
            end - begin,
            ends_document=end == part.end,
            starts_document=begin == part.scan.cuts[0],
        )
        for part, begin, end in group
    )
    size = sum(end - begin for _, begin, end in group)
    return build_shards({0: file}, size, texts, encoder, advance, shared)[0]
