"""Files of many documents: read once to know them, then cut into shards.

A *scan* reads a unit (see `weft.data.records`) once.  It finds every line that is no document,
and cuts the unit into *extents*: consecutive lines or rows with a bounded amount of text, each of
which becomes one shard of train tokens and one of held-out tokens.  So which document comes into
which shard is decided before anything is tokenised, shards can be made in any order by any
process, and one that is killed is made again from its extent.

*Held out* is a document by a hash of its text: whatever file it is in, whatever comes before it
or is added later, and all copies of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
from xxhash import xxh3_64_intdigest

from weft.config.errors import SHOWN, ConfigError, InvalidConfig, truncate_list
from weft.config.schema import DataSection
from weft.data.prepared_cache import (
    Progress,
    Report,
    cache_problems,
    counting,
    read_scans,
    write_scans,
)
from weft.data.records import Document, Fault, Invalid, Unit, documents, record_units
from weft.data.source import SourceRef
from weft.data.source_files import File, changed
from weft.data.token_shards import (
    Batches,
    Built,
    Encoder,
    IncompleteTail,
    Tokens,
    finished_shard,
    in_pieces,
    load_encoder,
    too_little,
    write_shard,
)
from weft.data.token_store import SPLITS, TOKENIZER_FILE, Shard, Split, hash_json
from weft.data.workers import Advance, parallel_map, processes_for

FORMAT = 2  # of a scan in the cache
TELL_BYTES = 4 << 20
MOST_SHARD_BYTES = 256 << 20  # of text, in sources that would have very many shards
SHARDS = 2048  # about, before they get larger: each is a file that every rank maps
# To read, or to encode: for less, starting processes takes longer than they save.
READ_ALONE_BYTES, ENCODE_ALONE_BYTES = 128 << 20, 8 << 20


@dataclass(frozen=True)
class Reader:
    """How documents are read, and which of them are held out."""

    field: str
    invalid: Invalid
    extent_bytes: int
    below: int  # hashes of held-out documents, of 2**64

    def held_out(self, data: bytes) -> bool:
        """Whether the document with this text is of the validation split."""
        return xxh3_64_intdigest(data) < self.below


@dataclass
class Extent:
    """Lines or rows up to and with number ``end``; documents and bytes of train and held-out."""

    end: int
    documents: list[int] = field(default_factory=lambda: [0, 0])
    text_bytes: list[int] = field(default_factory=lambda: [0, 0])


@dataclass
class Scan:
    """What one reading of a unit found."""

    extents: list[Extent] = field(default_factory=list)
    lines: int = 0
    empty: int = 0
    skipped: int = 0
    replaced: int = 0
    faults: list[Fault] = field(default_factory=list)  # the first ones
    num_faults: int = 0
    left_out: list[int] = field(default_factory=list)  # the first lines that are
    lowest: int = 1 << 64  # of the hashes

    def total(self, side: int) -> tuple[int, int]:
        """Documents and bytes of train (0) or held-out (1) text."""
        return (
            sum(extent.documents[side] for extent in self.extents),
            sum(extent.text_bytes[side] for extent in self.extents),
        )


# --------------------------------------------------------------------------- all of them


@dataclass(frozen=True)
class Records:
    """Files of documents that were read once: a `weft.data.token_shards.Reading`."""

    units: list[Unit]
    scans: list[Scan]
    reader: Reader

    @property
    def content(self) -> object:
        """What decides it, beside the settings."""
        files = {unit.file.path: unit.file for unit in self.units}
        return ["records", self.reader.field, *map(_identity, files.values())]

    @property
    def text_bytes(self) -> int:
        return sum(scan.total(side)[1] for scan in self.scans for side in (0, 1))

    @property
    def odd(self) -> IncompleteTail:
        return IncompleteTail(
            skipped=sum(scan.skipped for scan in self.scans),
            replaced=sum(scan.replaced for scan in self.scans),
            empty=sum(scan.empty for scan in self.scans),
        )

    @property
    def left_out(self) -> list[str]:
        """Where the first ones are that are empty or not UTF-8."""
        begins = _begins(self.units, self.scans)
        return [
            f"{unit.file.name}, {unit.counts} {begin + number}"
            for unit, scan, begin in zip(self.units, self.scans, begins, strict=True)
            for number in scan.left_out
        ]

    def training_texts(self, most_bytes: int) -> Iterator[str]:
        """At most so much train text (and one piece more of each unit), the same share of
        each unit from its beginning: what lies further on would have to be read for it."""
        total = sum(scan.total(0)[1] for scan in self.scans)
        for unit, scan in zip(self.units, self.scans, strict=True):
            left = scan.total(0)[1] * most_bytes / max(total, 1)
            for _, data in _numbered(unit, self.reader, 0):
                if left <= 0:
                    break
                if self.reader.held_out(data):
                    continue
                for begin, end in in_pieces(data):
                    if left > 0:
                        left -= end - begin
                        yield data[begin:end].decode()

    def build(self, folder: Path, encoder: Encoder, report: Report) -> Built:
        advance = counting(report, "tokenising", self.text_bytes)
        tasks = [
            _Task(folder, number, unit, scan, self.reader)
            for number, (unit, scan) in enumerate(zip(self.units, self.scans, strict=True))
            if scan.extents
        ]
        processes = processes_for(len(tasks), self.text_bytes, ENCODE_ALONE_BYTES)
        made = dict(parallel_map(_tokenise, tasks, advance, processes))
        splits = []
        for side in (0, 1):
            shards = [shard for place in range(len(tasks)) for shard in made[place][side]]
            counts = [scan.total(side) for scan in self.scans]
            num_documents, text_bytes = (sum(column) for column in zip(*counts, strict=True))
            num_tokens = sum(shard.tokens for shard in shards)
            splits.append(Split(num_documents, text_bytes, num_tokens, shards))
        return Built(splits[0], splits[1], encoder.dtype)


def read_records(
    section: DataSection, found: SourceRef, cache: Path, shard_bytes: int, report: Report
) -> Records:
    """Read every unit once, unless that was done before.

    Args:
        shard_bytes: of text in a shard, about; more where there would be very many.

    Raises:
        InvalidConfig: lines or rows are no documents, all that are at once; or there is too little.
    """
    if found.kind == "hub":
        report(Progress("asking the hub"))
    files_bytes = sum(file.size_bytes for file in found.files)
    extent_bytes = max(shard_bytes, min(files_bytes // SHARDS, MOST_SHARD_BYTES))
    units = record_units(section.path, found, extent_bytes, section.text_field)
    size = files_bytes or sum(unit.size_bytes for unit in units)
    # Of the text, where the total is known of the files only: no more than an estimate.
    advance = counting(report, "reading the documents", size)
    advance(0)
    reader = Reader(
        section.text_field,
        section.invalid_utf8,
        extent_bytes,
        int(section.validation_fraction * 2**64),
    )
    worth_bytes = READ_ALONE_BYTES if found.kind == "hub" else size  # there it is not known
    processes = processes_for(len(units), worth_bytes, READ_ALONE_BYTES)
    with cache_problems(cache):
        records = _scan_all(units, reader, section.path, cache, advance, processes)
    if not any(scan.total(0)[0] for scan in records.scans):
        rule = f"has too little text ({records.text_bytes} bytes)"
        raise too_little(section, rule, train=False)
    odd = records.odd
    if count := odd.empty + odd.skipped:
        which = "empty or not UTF-8" if odd.skipped else "empty"
        where = truncate_list(records.left_out, "; ", count)
        report(Progress(f"left out {count:,} that are {which}: {where}"))
    return records


def _scan_all(
    units: list[Unit],
    reader: Reader,
    path: str,
    cache: Path,
    advance: Advance,
    processes: int,
) -> Records:
    """Of every unit; large data are read for it only once.

    Args:
        path: what the user named, for messages.
        cache: folder below which scans are kept.
    """
    settings = [FORMAT, asdict(reader)]
    about = [settings, [[*_identity(u.file), u.kind, u.begin, u.end] for u in units]]
    known = cache / "scans" / f"{hash_json(about)}.json"
    if (tree := read_scans(known)) is not None:
        return Records(
            units,
            [_from_dict(parallel_map) for parallel_map in tree["scans"]],
            Reader(**tree["reader"]),
        )
    tasks = [_ScanTask(unit, reader) for unit in units]
    found = dict(parallel_map(_scan, tasks, advance, processes))
    scans = [found[place] for place in range(len(tasks))]
    _check_faults(units, scans, path)
    if not any(scan.extents for scan in scans):
        empty, skipped = sum(s.empty for s in scans), sum(s.skipped for s in scans)
        rule = "holds no documents" + (f" but {empty:,} empty ones" if empty else "")
        rule += f" but {skipped:,} that are not UTF-8" if skipped else ""
        remedy = "give text, or name the field that holds it in data.text_field"
        raise InvalidConfig([ConfigError("data.path", path, rule, remedy)])
    if any(scan.total(1)[0] for scan in scans):
        records = Records(units, scans, reader)
    else:
        # So few documents that none fell below: then it is the one with the lowest hash.
        lowest = min(scan.lowest for scan in scans)
        records = _scan_all(
            units, replace(reader, below=lowest + 1), path, cache, advance, processes
        )
    tree = {"reader": asdict(records.reader), "scans": [asdict(scan) for scan in records.scans]}
    write_scans(known, tree)
    return records


# --------------------------------------------------------------------------- scanning


class _ScanTask(NamedTuple):
    unit: Unit
    reader: Reader


def _scan(task: _ScanTask, advance: Advance) -> Scan:
    unit, reader = task
    scan, extent, untold = Scan(), Extent(0), 0
    for found in documents(unit, reader.field, reader.invalid):
        scan.lines = found.number
        if isinstance(found, Fault):
            scan.num_faults += 1
            if len(scan.faults) < SHOWN:
                scan.faults.append(found)
            continue
        data = found.data
        if not data or data.isspace():
            scan.skipped += data is None
            scan.empty += data is not None
            if len(scan.left_out) < SHOWN:
                scan.left_out.append(found.number)
        else:
            scan.replaced += found.replaced
            digest = xxh3_64_intdigest(data)
            scan.lowest = min(scan.lowest, digest)
            side = int(digest < reader.below)
            extent.end = found.number
            extent.documents[side] += 1
            extent.text_bytes[side] += len(data)
            untold += len(data)
            if sum(extent.text_bytes) >= reader.extent_bytes:
                scan.extents.append(extent)
                extent = Extent(0)
        if untold >= TELL_BYTES:
            advance(untold)
            untold = 0
    advance(untold)
    if extent.end:
        scan.extents.append(extent)
    return scan


def _identity(file: File) -> list[object]:
    return [file.name, file.size_bytes, file.version]


def _from_dict(tree: dict[str, object]) -> Scan:
    scan = Scan(**tree)  # type: ignore[arg-type]
    scan.extents = [Extent(**extent) for extent in scan.extents]  # type: ignore[arg-type]
    return scan


def _begins(units: Sequence[Unit], scans: Sequence[Scan]) -> Iterator[int]:
    """Lines or rows of a unit's file that come before it."""
    before: dict[str, int] = {}
    for unit, scan in zip(units, scans, strict=True):
        begin = before.get(unit.file.path, 0)
        before[unit.file.path] = begin + scan.lines
        yield begin


def _check_faults(units: Sequence[Unit], scans: Sequence[Scan], path: str) -> None:
    """Refuse what is no document, with the lines and rows as the files count them."""
    lines, count = [], 0
    ended: set[str] = set()  # files that could not be read further: what follows has no numbers
    for unit, scan, begin in zip(units, scans, _begins(units, scans), strict=True):
        if unit.file.path in ended:
            continue
        ended |= {unit.file.path for fault in scan.faults[-1:] if fault.last}
        count += scan.num_faults
        for fault in scan.faults:
            lines.append(f"{unit.file.name}, {unit.counts} {begin + fault.number}: {fault.what}")
    if not count:
        return
    what = "a line or row is" if count == 1 else f"{count:,} lines or rows are"
    rule = f"{what} no document:\n  " + truncate_list(lines, "\n  ", count)
    remedy = "repair them"
    if any("UTF-8" in line or "half a character" in line for line in lines):
        remedy += ", or use --data.invalid_utf8 skip or replace for those that are not UTF-8"
    if any("field" in line for line in lines):
        remedy += ", or name the field with the text in data.text_field (chats: data.format chat)"
    raise InvalidConfig([ConfigError("data.path", path, rule, remedy)])


# --------------------------------------------------------------------------- tokenising


class _Task(NamedTuple):
    """A unit to tokenise, by one process."""

    folder: Path
    number: int
    unit: Unit
    scan: Scan
    reader: Reader


def _tokenise(task: _Task, advance: Advance) -> tuple[list[Shard], list[Shard]]:
    """The shards of a unit, train and held-out, one of each from each extent that has any."""
    encoder = _known_encoder(task.folder / TOKENIZER_FILE)
    made: tuple[list[Shard], list[Shard]] = ([], [])
    source: Iterator[tuple[int, bytes]] | None = None
    begin = 0
    for index, extent in enumerate(task.scan.extents):
        files = [task.folder / f"{s}-{task.number:05d}-{index:05d}.bin" for s in SPLITS]
        wanted = [side for side in (0, 1) if extent.documents[side]]
        found = [finished_shard(files[side], encoder) for side in wanted]
        if None in found:
            source = source or _numbered(task.unit, task.reader, begin)
            tokens = _encode(extent, source, task, Batches(encoder, advance))
            found = [
                write_shard(files[side], np.concatenate(tokens[side]), encoder) for side in wanted
            ]
        else:
            source = None  # further on it is opened again, behind what is there
            advance(sum(extent.text_bytes))
        for side, shard in zip(wanted, found, strict=True):
            assert shard is not None
            made[side].append(shard)
        begin = extent.end
    return made


@lru_cache(1)
def _known_encoder(file: Path) -> Encoder:
    """Once in each process, however many units it has."""
    return load_encoder(file)


def _encode(
    extent: Extent, source: Iterator[tuple[int, bytes]], task: _Task, batches: Batches
) -> tuple[list[Tokens], list[Tokens]]:
    """The tokens of an extent in pieces, train and held-out."""
    out: tuple[list[Tokens], list[Tokens]] = ([], [])
    counted = Extent(extent.end)
    number = 0
    while number < extent.end:
        number, data = next(source, (extent.end + 1, b""))
        if number > extent.end:
            raise changed(task.unit.file)
        side = int(task.reader.held_out(data))
        counted.documents[side] += 1
        counted.text_bytes[side] += len(data)
        for begin, end in in_pieces(data):
            batches.add(data[begin:end].decode(), end - begin, end == len(data), out[side])
    batches.flush()
    if counted != extent:
        raise changed(task.unit.file)
    return out


def _numbered(unit: Unit, reader: Reader, after: int) -> Iterator[tuple[int, bytes]]:
    """The documents of a scanned unit that count, each with its line or row, from the one after
    number ``after`` on."""
    for found in documents(unit, reader.field, reader.invalid, after):
        if isinstance(found, Document) and found.data and not found.data.isspace():
            yield found.number, found.data
