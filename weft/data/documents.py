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

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import NamedTuple

from xxhash import xxh3_64_intdigest, xxh3_128_hexdigest

from weft.data.files import File
from weft.data.records import Document, Fault, Invalid, Unit, documents
from weft.data.source import SHOWN, in_pieces, some
from weft.data.store import write_file
from weft.data.workers import Advance, each
from weft.job import InvalidJob, Problem

FORMAT = 2
TELL_BYTES = 4 << 20


@dataclass(frozen=True)
class Reader:
    """How documents are read, and which of them are held out."""

    field: str
    invalid: Invalid
    extent_bytes: int
    below: int  # hashes of held-out documents, of 2**64

    def held_out(self, data: bytes) -> bool:
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


# --------------------------------------------------------------------------- reading


@dataclass(frozen=True)
class Records:
    """Files of documents that were read once."""

    units: list[Unit]
    scans: list[Scan]
    reader: Reader

    @property
    def content(self) -> list[object]:
        """What decides it, beside the settings."""
        files = {unit.file.path: unit.file for unit in self.units}
        return ["records", self.reader.field, *map(_identity, files.values())]

    @property
    def text_bytes(self) -> int:
        return sum(scan.total(side)[1] for scan in self.scans for side in (0, 1))

    @property
    def replaced(self) -> int:
        return sum(scan.replaced for scan in self.scans)

    @property
    def empty(self) -> int:
        return sum(scan.empty for scan in self.scans)

    @property
    def skipped(self) -> int:
        return sum(scan.skipped for scan in self.scans)

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
            for data in texts(unit, self.reader, 0):
                if left <= 0:
                    break
                if self.reader.held_out(data):
                    continue
                for begin, end in in_pieces(data):
                    if left > 0:
                        left -= end - begin
                        yield data[begin:end].decode()


def texts(unit: Unit, reader: Reader, after: int) -> Iterator[bytes]:
    """The documents of a scanned unit that count, from the line or row after ``after`` on."""
    for _, data in numbered(unit, reader, after):
        yield data


def numbered(unit: Unit, reader: Reader, after: int) -> Iterator[tuple[int, bytes]]:
    """As `texts`, with the line or row of each."""
    for found in documents(unit, reader.field, reader.invalid, after):
        if isinstance(found, Document) and found.data and not found.data.isspace():
            yield found.number, found.data


def read_records(
    units: Sequence[Unit],
    reader: Reader,
    path: str,
    cache: Path,
    advance: Advance,
    processes: int,
) -> Records:
    """Scan every unit, unless that was done before.

    Args:
        path: what the user named, for messages.
        cache: folder below which scans are kept: large data are read for them only once.

    Raises:
        InvalidJob: lines or rows are no documents, all that are at once; or none is one.
    """
    settings = [FORMAT, asdict(reader)]
    about = [settings, [[*_identity(u.file), u.kind, u.begin, u.end] for u in units]]
    known = cache / "scans" / f"{xxh3_128_hexdigest(json.dumps(about).encode())}.json"
    if known.exists():
        tree = json.loads(known.read_bytes())
        return Records(
            list(units), [_from_dict(each) for each in tree["scans"]], Reader(**tree["reader"])
        )
    tasks = [_ScanTask(unit, reader) for unit in units]
    found = dict(each(_scan, tasks, advance, min(processes, len(tasks))))
    scans = [found[place] for place in range(len(tasks))]
    _check_faults(units, scans, path)
    if not any(scan.extents for scan in scans):
        empty, skipped = sum(s.empty for s in scans), sum(s.skipped for s in scans)
        rule = "holds no documents" + (f" but {empty:,} empty ones" if empty else "")
        rule += f" but {skipped:,} that are not UTF-8" if skipped else ""
        remedy = "give text, or name the field that holds it in data.field"
        raise InvalidJob([Problem("data.path", path, rule, remedy)])
    if not any(scan.total(1)[0] for scan in scans):
        # So few documents that none fell below: then it is the one with the lowest hash.
        lowest = min(scan.lowest for scan in scans)
        held = Reader(reader.field, reader.invalid, reader.extent_bytes, lowest + 1)
        records = read_records(units, held, path, cache, advance, processes)
    else:
        records = Records(list(units), scans, reader)
    known.parent.mkdir(parents=True, exist_ok=True)
    tree = {"reader": asdict(records.reader), "scans": [asdict(scan) for scan in records.scans]}
    write_file(known, json.dumps(tree).encode())
    return records


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
    rule = f"{what} no document:\n  " + some(lines, "\n  ", count)
    remedy = "repair them"
    if any("UTF-8" in line or "half a character" in line for line in lines):
        remedy += ", or use --data.invalid_utf8 skip or replace for those that are not UTF-8"
    if any("field" in line for line in lines):
        remedy += ", or name the field with the text in data.field"
    raise InvalidJob([Problem("data.path", path, rule, remedy)])
