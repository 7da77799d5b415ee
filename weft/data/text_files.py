"""Text files, each a document: whether they are text, what of them is held out, and their shards.

A *scan* reads a document once, in blocks, and keeps what the later steps need: a hash of its
content, the first place where it is not text, and where it can be cut.  A *piece* is a range of
bytes between two cuts, small enough to hold and never ending inside a character, so that a file of
any size is tokenised in bounded memory.  A *part* is the range of a document that belongs to one
split: the whole, its beginning, or its tail.  A shard is made of pieces, of one document or many.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import BinaryIO, Literal, NamedTuple

import numpy as np
from xxhash import xxh3_64_hexdigest, xxh3_128

from weft.config.errors import ConfigError, InvalidConfig, truncate_list
from weft.config.schema import DataSection
from weft.data.prepared_cache import (
    Progress,
    Report,
    cache_problems,
    counting,
    read_scans,
    write_scans,
)
from weft.data.source_files import File, changed, open_file, unreadable
from weft.data.token_shards import (
    PIECE_BYTES,
    Batches,
    Built,
    Encoder,
    IncompleteTail,
    Tokens,
    cut_at,
    finished_shard,
    too_little,
    write_shard,
)
from weft.data.token_store import SPLITS, Split, SplitName, hash_json
from weft.data.workers import Advance

FORMAT = 2  # of a scan in the cache
BLOCK_BYTES = 1 << 20
WHOLE_DOCUMENTS = 20  # from this many on, whole documents are held out instead of tails


@dataclass(frozen=True)
class Fault:
    """The first byte of a document that is not text; ``line`` counts from 1."""

    offset: int
    line: int
    what: str


@dataclass(frozen=True)
class Scan:
    """What one reading of a document found.

    ``cuts`` are ascending byte offsets; pieces lie between neighbours, and the first cut comes
    after a byte order mark.  ``tail`` is the offset from which the document is held out when
    tails are.
    """

    file: File
    content_hash: str
    cuts: list[int]
    tail: int
    fault: Fault | None

    @property
    def text_bytes(self) -> int:
        return self.cuts[-1] - self.cuts[0]


@dataclass(frozen=True)
class Part:
    """The bytes ``begin:end`` of a document, all of one split."""

    scan: Scan
    begin: int
    end: int

    @property
    def text_bytes(self) -> int:
        return self.end - self.begin

    def pieces(self) -> Iterator[tuple[int, int]]:
        """Consecutive byte ranges that make up the part; none ends inside a character."""
        for begin, end in pairwise(self.scan.cuts):
            if begin < self.end and end > self.begin:
                yield max(begin, self.begin), min(end, self.end)


# --------------------------------------------------------------------------- all of them


@dataclass(frozen=True)
class Texts:
    """Text files that were read once: a `weft.data.token_shards.Reading`."""

    kept: list[Scan]
    train: list[Part]
    validation: list[Part]
    odd: IncompleteTail  # an empty file is no document, and counts for none
    shard_bytes: int

    @property
    def content(self) -> object:
        return [(scan.file.name, scan.content_hash) for scan in self.kept]

    @property
    def text_bytes(self) -> int:
        return sum(part.text_bytes for part in self.train)

    def training_texts(self, most_bytes: int) -> Iterator[str]:
        """At most so much of the train text, evenly spread over it."""
        total = self.text_bytes
        seen = taken = 0
        for part in self.train:
            for begin, end in part.pieces():
                seen += end - begin
                if (taken + end - begin) * total <= seen * most_bytes:
                    taken += end - begin
                    yield read_piece(part.scan, begin, end)

    def build(self, folder: Path, encoder: Encoder, report: Report) -> Built:
        total = sum(part.text_bytes for part in (*self.train, *self.validation))
        advance = counting(report, "tokenising", total)
        train, validation = (
            _build_split(folder, name, parts, self.shard_bytes, encoder, advance)
            for name, parts in zip(SPLITS, (self.train, self.validation), strict=True)
        )
        return Built(train, validation, encoder.dtype)


def read_texts(
    section: DataSection, files: Sequence[File], cache: Path, shard_bytes: int, report: Report
) -> Texts:
    """Read every file once, unless that was done before.

    Args:
        shard_bytes: of text in a shard, at most (by one piece).

    Raises:
        InvalidConfig: a file cannot be read, or is no text, or there is too little of it.
    """
    scans = _scan_all(files, section.validation_fraction, cache, report)
    kept = keep_text(scans, section.invalid_utf8, section.path)
    train, validation = split(kept, section.validation_fraction)
    if not train or not validation:
        size = sum(scan.text_bytes for scan in kept)
        raise too_little(section, f"has too little text ({size} bytes)", bool(train))
    faulty = [scan.file.name for scan in scans if scan.fault and scan.text_bytes]
    skipped = faulty if section.invalid_utf8 == "skip" else []
    if skipped:
        names = ", ".join(skipped[:3]) + (", ..." if len(skipped) > 3 else "")
        report(Progress(f"left out {len(skipped)} files that are not UTF-8 text: {names}"))
    odd = IncompleteTail(len(skipped), len(faulty) - len(skipped))
    return Texts(kept, train, validation, odd, shard_bytes)


def _scan_all(
    files: Sequence[File], validation_fraction: float, cache: Path, report: Report
) -> list[Scan]:
    """Of all files; what was read before is not read again while no file seems changed."""
    files = [file for file in files if file.size_bytes]
    seen = []
    for file in files:
        try:  # the inode's time is changed by whoever sets the other one back, too
            changed_ns = Path(file.path).stat().st_ctime_ns
        except OSError as error:
            raise unreadable(file, error) from error
        seen.append([file.path, file.size_bytes, file.version, changed_ns])
    known = cache / "scans" / f"{hash_json([FORMAT, PIECE_BYTES, validation_fraction, seen])}.json"
    if (rows := read_scans(known)) is not None:
        return [
            Scan(file, content_hash, cuts, tail, Fault(**fault) if fault else None)
            for file, (content_hash, cuts, tail, fault) in zip(files, rows, strict=True)
        ]
    advance = counting(report, "reading the text", sum(file.size_bytes for file in files))
    scans = []
    for file in files:
        scans.append(scan(file, validation_fraction))
        advance(file.size_bytes)
    rows = [[s.content_hash, s.cuts, s.tail, s.fault and asdict(s.fault)] for s in scans]
    with cache_problems(cache):
        write_scans(known, rows)
    return scans


# --------------------------------------------------------------------------- scanning


def scan(file: File, validation_fraction: float) -> Scan:
    """Read a document once, in blocks.

    Args:
        file: what to read.
        validation_fraction: share of the document that its tail should have.

    Raises:
        InvalidConfig: the file cannot be read.
    """
    content, text = xxh3_128(), _TextCheck()
    size = 0
    cuts: list[int] = []
    pending = b""  # the bytes since the last cut
    with open_file(file) as stream:
        try:
            while block := stream.read(BLOCK_BYTES):
                if not cuts:
                    cuts.append(3 if block.startswith(codecs.BOM_UTF8) else 0)
                    pending = block[cuts[0] :]
                else:
                    pending += block
                content.update(block)
                text.feed(block, size)
                size += len(block)
                while len(pending) > PIECE_BYTES:
                    cut = cut_at(pending, 0, PIECE_BYTES)
                    cuts.append(cuts[-1] + cut)
                    pending = pending[cut:]
            text.feed(b"", size, final=True)
            cuts = cuts or [0]
            if pending:
                cuts.append(size)
            tail = _tail(stream, cuts[0], size, validation_fraction)
        except OSError as error:
            raise unreadable(file, error) from error
    return Scan(file, content.hexdigest(), cuts, tail, text.fault)


class _TextCheck:
    """Finds the first byte that is not UTF-8 text, over blocks that may cut characters."""

    def __init__(self) -> None:
        self.fault: Fault | None = None
        self._decoder = codecs.getincrementaldecoder("utf-8")()
        self._newlines = 0

    def feed(self, block: bytes, position: int, final: bool = False) -> None:
        if self.fault:
            return
        offset, what = None, ""
        undecoded = len(self._decoder.getstate()[0])
        try:
            self._decoder.decode(block, final)
        except UnicodeDecodeError as error:
            offset = position - undecoded + error.start
            what = "UTF-16 byte order mark" if _is_utf16(error.object, offset) else "not UTF-8"
        # UTF-8 allows NUL, but no text has it: this is a binary file.
        nul = block.find(0)
        if nul >= 0 and (offset is None or position + nul < offset):
            offset, what = position + nul, "NUL, as in a binary file"
        if offset is not None:
            line = self._newlines + block.count(b"\n", 0, max(0, offset - position)) + 1
            self.fault = Fault(offset, line, what)
        self._newlines += block.count(b"\n")


def _is_utf16(data: bytes, offset: int) -> bool:
    return offset == 0 and data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))


def _tail(file: BinaryIO, begin: int, size: int, validation_fraction: float) -> int:
    """Offset at which the last ``validation_fraction`` of the text begins: at most twice that, by lines."""
    held = int((size - begin) * validation_fraction)
    if held <= 0:
        return size
    mark = size - held
    low = max(begin, mark - max(4, min(held, BLOCK_BYTES)))  # 4: the longest character
    file.seek(low)
    return low + cut_at(file.read(mark - low + 1), 0, mark - low)


def keep_text(
    scans: Sequence[Scan], invalid_utf8: Literal["error", "replace", "skip"], path: str
) -> list[Scan]:
    """The scans to go on with: those that hold text, and under ``replace`` the faulty ones too.

    Raises:
        InvalidConfig: under ``error``, one problem that lists the files that are not text.
    """
    scans = [scan for scan in scans if scan.text_bytes]
    faulty = [(scan.file.name, scan.fault) for scan in scans if scan.fault]
    if not faulty or invalid_utf8 == "replace":
        return scans
    if invalid_utf8 == "skip":
        return [scan for scan in scans if not scan.fault]
    lines = [f"{name}: byte {f.offset}, line {f.line}: {f.what}" for name, f in faulty]
    count = "a file is" if len(faulty) == 1 else f"{len(faulty)} files are"
    raise InvalidConfig(
        [
            ConfigError(
                "data.path",
                path,
                f"{count} not UTF-8 text:\n  " + truncate_list(lines, "\n  "),
                "use --data.invalid_utf8 skip to leave out such files (best for binary ones), "
                "--data.invalid_utf8 replace to put U+FFFD for the bad bytes, "
                "or give a path that holds only text",
            )
        ]
    )


def read_piece(scan: Scan, begin: int, end: int) -> str:
    """The text of bytes ``begin:end`` as they stand (newlines untouched), bad bytes as U+FFFD.

    Raises:
        InvalidConfig: the file cannot be read, or is no longer the one that was scanned.
    """
    with open_file(scan.file) as stream:
        try:
            stream.seek(begin)
            data = stream.read(end - begin)
        except OSError as error:
            raise unreadable(scan.file, error) from error
    if len(data) != end - begin:
        raise changed(scan.file)
    return data.decode("utf-8", "replace").replace("\0", "\ufffd")


# --------------------------------------------------------------------------- holding out


def split(scans: Sequence[Scan], validation_fraction: float) -> tuple[list[Part], list[Part]]:
    """Train and validation parts, without a byte in both.  A pure function of its arguments.

    From ``WHOLE_DOCUMENTS`` documents on, whole documents are held out, chosen by a hash of
    their names (so that one more document hardly changes the choice); copies of the same
    content stay on the same side.  With fewer documents, or where whole ones cannot make up
    about ``validation_fraction`` of the bytes, the tail of each is held out.
    """
    held = _whole_documents(scans, validation_fraction)
    train, validation = [], []
    for scan in scans:
        begin, end = scan.cuts[0], scan.cuts[-1]
        middle = scan.tail if not held else begin if scan.content_hash in held else end
        train.append(Part(scan, begin, middle))
        validation.append(Part(scan, middle, end))
    return [p for p in train if p.begin < p.end], [p for p in validation if p.begin < p.end]


def _whole_documents(scans: Sequence[Scan], validation_fraction: float) -> set[str]:
    """Content hashes of the documents to hold out whole; empty to hold out tails."""
    if len(scans) < WHOLE_DOCUMENTS:
        return set()
    bytes_by_content: dict[str, int] = {}
    for scan in sorted(scans, key=lambda s: (xxh3_64_hexdigest(s.file.name.encode()), s.file.name)):
        known = bytes_by_content.get(scan.content_hash, 0)
        bytes_by_content[scan.content_hash] = known + scan.text_bytes
    wanted = validation_fraction * sum(bytes_by_content.values())
    held: set[str] = set()
    held_bytes = 0
    for content, size in bytes_by_content.items():
        # One huge document must not become the validation text.
        if held_bytes < wanted and held_bytes + size <= 1.5 * wanted:
            held.add(content)
            held_bytes += size
    return held if held_bytes >= 0.5 * wanted else set()


# --------------------------------------------------------------------------- shards


class _Piece(NamedTuple):
    scan: Scan
    begin: int
    end: int
    last: bool  # of its part, so that the separator comes after it


def _shards(parts: Sequence[Part], shard_bytes: int) -> Iterator[list[_Piece]]:
    """The pieces of each shard, in order."""
    shard: list[_Piece] = []
    size = 0
    for part in parts:
        for begin, end in part.pieces():
            if shard and size + end - begin > shard_bytes:
                yield shard
                shard, size = [], 0
            shard.append(_Piece(part.scan, begin, end, end == part.end))
            size += end - begin
    yield shard


def _build_split(
    folder: Path,
    name: SplitName,
    parts: Sequence[Part],
    shard_bytes: int,
    encoder: Encoder,
    advance: Advance,
) -> Split:
    shards = []
    for index, pieces in enumerate(_shards(parts, shard_bytes)):
        file = folder / f"{name}-{index:05d}.bin"
        if shard := finished_shard(file, encoder):
            advance(sum(piece.end - piece.begin for piece in pieces))
        else:
            tokens: list[Tokens] = []
            batches = Batches(encoder, advance)
            for scan, begin, end, last in pieces:
                batches.add(read_piece(scan, begin, end), end - begin, last, tokens)
            batches.flush()
            shard = write_shard(file, np.concatenate(tokens), encoder)
        shards.append(shard)
    text_bytes = sum(part.text_bytes for part in parts)
    return Split(len(parts), text_bytes, sum(shard.tokens for shard in shards), shards)
