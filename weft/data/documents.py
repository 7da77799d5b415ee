"""Files with many documents: scan them once, then encode them into shards.

A *scan* reads a fragment (see `weft.data.fragments`) once.  It finds every invalid line, and
divides the fragment into *row groups*: consecutive lines or rows with a bounded amount of text.
Each row group becomes one shard of train tokens and one of validation tokens.  (Row groups of
Parquet files are different.)  So the assignment of documents to shards is fixed before
tokenization, any process can encode any shard, and an interrupted shard is encoded again from its
row group.

A hash of its text assigns a document to train or validation, so neither other documents nor later
files change the assignment, and all copies are in the same split.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import NamedTuple

from pydantic import TypeAdapter
from xxhash import xxh3_64_intdigest

from weft.config.errors import SHOWN, truncate_list
from weft.config.schema import DataSection
from weft.data.fragments import FileFragment, list_fragments
from weft.data.prepared_cache import Progress, Report, progress_counter
from weft.data.records import Document, Invalid, InvalidRecord, read_documents
from weft.data.shared_preparation import SharedWork, load_or_scan, map_units
from weft.data.source import SourceRef, changed_error, path_error
from weft.data.token_shards import (
    BuiltSplits,
    Corpus,
    Encoder,
    IncompleteTail,
    TextChunk,
    build_shards,
    insufficient_data_error,
    load_encoder,
    split_chunks,
)
from weft.data.token_store import SPLITS, Shard, Split
from weft.data.workers import Advance, choose_num_processes

FORMAT = 3  # of cached scans
REPORT_BYTES = 4 << 20
MAX_SHARD_BYTES = 256 << 20  # of text, in very large sources
TARGET_SHARDS = 2048  # beyond this, shards get larger: every rank maps each file
# Below these, starting processes takes longer than they save.
MIN_PARALLEL_READ_BYTES, MIN_PARALLEL_ENCODE_BYTES = 128 << 20, 8 << 20


@dataclass(frozen=True)
class RecordReader:
    """Settings for reading documents and for the validation split."""

    field: str
    invalid: Invalid
    row_group_bytes: int
    validation_threshold: int  # hashes of validation documents are smaller; 0: none

    def is_validation(self, data: bytes) -> bool:
        """Return True if the document with this text is in the validation split."""
        return xxh3_64_intdigest(data) < self.validation_threshold

    def read_texts(self, fragment: FileFragment) -> Iterator[tuple[int, bytes]]:
        """Yield number and text of the valid documents of a fragment."""
        for record in read_documents(fragment, self.field, self.invalid):
            if isinstance(record, Document) and record.data and not record.data.isspace():
                yield record.number, record.data


@dataclass
class RowGroup:
    """Lines or rows up to and including number ``end``; documents and bytes per split."""

    end: int
    documents: list[int] = field(default_factory=lambda: [0, 0])
    text_bytes: list[int] = field(default_factory=lambda: [0, 0])

    def add(self, number: int, split_index: int, size_bytes: int) -> None:
        """Count a document of the train (0) or validation (1) split."""
        self.end = number
        self.documents[split_index] += 1
        self.text_bytes[split_index] += size_bytes


@dataclass
class RecordScan:
    """Result of scanning a fragment; the lists of records hold only the first few."""

    row_groups: list[RowGroup] = field(default_factory=list)
    lines: int = 0
    empty: int = 0
    skipped: int = 0
    replaced: int = 0
    invalid_records: list[InvalidRecord] = field(default_factory=list)
    num_invalid: int = 0
    omitted_rows: list[int] = field(default_factory=list)
    lowest_hash: int = 1 << 64

    def total(self, split_index: int) -> tuple[int, int]:
        """Return documents and bytes of the train (0) or validation (1) text."""
        return (
            sum(group.documents[split_index] for group in self.row_groups),
            sum(group.text_bytes[split_index] for group in self.row_groups),
        )


# --------------------------------------------------------------------------- corpus


@dataclass(frozen=True)
class RecordCorpus(Corpus):
    """Scanned files of documents."""

    fragments: list[FileFragment]
    scans: list[RecordScan]
    reader: RecordReader

    @property
    def cache_key(self) -> object:
        """Files and field that determine the store, as JSON types."""
        files = {fragment.file.path: fragment.file for fragment in self.fragments}
        return ["records", self.reader.field, *(file.identity for file in files.values())]

    @property
    def text_bytes(self) -> int:
        """Bytes of text in both splits."""
        return sum(scan.total(split_index)[1] for scan in self.scans for split_index in (0, 1))

    @property
    def skip_counts(self) -> IncompleteTail:
        """Number of documents that were not used unchanged."""
        return IncompleteTail(
            skipped=sum(scan.skipped for scan in self.scans),
            replaced=sum(scan.replaced for scan in self.scans),
            empty=sum(scan.empty for scan in self.scans),
        )

    def sample_texts(self, max_bytes: int) -> Iterator[str]:
        """Yield at most ``max_bytes`` of train text (plus one chunk per fragment).

        Every fragment gives the same fraction, from its beginning, because later text must be read
        to skip it.
        """
        total = sum(scan.total(0)[1] for scan in self.scans)
        for fragment, scan in zip(self.fragments, self.scans, strict=True):
            remaining = scan.total(0)[1] * max_bytes / max(total, 1)
            for _, data in self.reader.read_texts(fragment):
                if remaining <= 0:
                    break
                if self.reader.is_validation(data):
                    continue
                for begin, end in split_chunks(data):
                    if remaining > 0:
                        remaining -= end - begin
                        yield data[begin:end].decode()

    def build(
        self, directory: Path, encoder: Encoder, report: Report, shared: SharedWork | None = None
    ) -> BuiltSplits:
        """Tokenize the fragments in parallel, and write their shards."""
        advance = progress_counter(report, "tokenizing", self.text_bytes)
        tasks = [
            _TokenizeTask(
                *(directory, encoder.file, number, fragment, scan.row_groups, self.reader, shared)
            )
            for number, (fragment, scan) in enumerate(zip(self.fragments, self.scans, strict=True))
            if scan.row_groups
        ]
        num_processes = choose_num_processes(len(tasks), self.text_bytes, MIN_PARALLEL_ENCODE_BYTES)
        sizes = [sum(sum(group.text_bytes) for group in task.row_groups) for task in tasks]
        shards_by_task = map_units(
            *(shared, "tokens", _tokenize, tasks, sizes),
            *(tuple[list[Shard], list[Shard]], advance, num_processes),
        )
        splits = []
        for split_index in (0, 1):
            shards = [shard for both in shards_by_task for shard in both[split_index]]
            counts = [scan.total(split_index) for scan in self.scans]
            num_documents, text_bytes = (sum(column) for column in zip(*counts, strict=True))
            num_tokens = sum(shard.tokens for shard in shards)
            splits.append(Split(num_documents, text_bytes, num_tokens, shards))
        return BuiltSplits(splits[0], splits[1], encoder.dtype)


def read_record_corpus(
    section: DataSection, source: SourceRef, cache: Path, shard_bytes: int, report: Report
) -> RecordCorpus:
    """Scan every fragment, unless cached scans exist.

    ``shard_bytes`` is the approximate text per shard; very large sources get larger shards.

    Raises:
        InvalidConfig: lines or rows are not documents (all are listed), or there is too little
            text.
    """
    if source.kind == "hub":
        report(Progress("querying the hub"))
    files_bytes = sum(file.size_bytes for file in source.files)
    reader = RecordReader(
        section.text_field,
        section.invalid_utf8,
        max(shard_bytes, min(files_bytes // TARGET_SHARDS, MAX_SHARD_BYTES)),
        int(section.validation_fraction * 2**64),
    )
    fragments = list_fragments(section.path, source, reader.row_group_bytes, reader.field)
    size = files_bytes or sum(fragment.size_bytes for fragment in fragments)
    # Counts text, but the total is the size of the files: an estimate.
    advance = progress_counter(report, "reading the documents", size)
    advance(0)
    # The hub reports no size.
    read_bytes = MIN_PARALLEL_READ_BYTES if source.kind == "hub" else size
    num_processes = choose_num_processes(len(fragments), read_bytes, MIN_PARALLEL_READ_BYTES)
    key = [FORMAT, vars(reader), [(*f.file.identity, f.kind, f.begin, f.end) for f in fragments]]
    corpus = load_or_scan(
        cache,
        key,
        TypeAdapter(RecordCorpus),
        partial(_scan_fragments, fragments, reader, section.path, advance, num_processes),
        section.path,
        report,
    )
    corpus = replace(corpus, fragments=fragments)  # their paths on this machine
    if not any(scan.total(0)[0] for scan in corpus.scans):
        if sum(scan.total(1)[0] for scan in corpus.scans) == 1:
            rule = "has one document, which is the validation set, so none is left for training"
            remedy = "split it into several, or give its text as a .txt file, which weft splits"
            raise path_error(section.path, rule, remedy)
        rule = f"has too little text ({corpus.text_bytes} bytes)"
        raise insufficient_data_error(section, rule, has_train=False)
    skip_counts = corpus.skip_counts
    if count := skip_counts.empty + skip_counts.skipped:
        reason = "empty or not UTF-8" if skip_counts.skipped else "empty"
        rows = [
            f"{fragment.file.name}, {fragment.record_noun} {number}"
            for fragment, scan in zip(fragments, corpus.scans, strict=True)
            for number in scan.omitted_rows
        ]
        shown = truncate_list(rows, "; ", count)
        report(Progress(f"skipped {count:,} documents that are {reason}: {shown}"))
    return corpus


# --------------------------------------------------------------------------- scanning


def _scan_fragments(
    fragments: list[FileFragment],
    reader: RecordReader,
    path: str,
    advance: Advance,
    num_processes: int,
    shared: SharedWork | None,
) -> RecordCorpus:
    """Scan every fragment in parallel; ``path`` is ``data.path``, for messages."""
    scan, stage = partial(_scan_fragment, reader), f"scan-{reader.validation_threshold}"
    sizes = [fragment.size_bytes for fragment in fragments]
    scans = map_units(shared, stage, scan, fragments, sizes, RecordScan, advance, num_processes)
    _number_by_file(fragments, scans)
    _check_invalid_records(fragments, scans, path)
    if not any(scan.row_groups for scan in scans):
        empty, skipped = sum(s.empty for s in scans), sum(s.skipped for s in scans)
        rule = "holds no documents" + (f" except {empty:,} empty ones" if empty else "")
        rule += f" except {skipped:,} that are not UTF-8" if skipped else ""
        remedy = "give text, or set data.text_field to the field that holds it"
        raise path_error(path, rule, remedy)
    if not reader.validation_threshold or any(scan.total(1)[0] for scan in scans):
        return RecordCorpus(fragments, scans, reader)
    # With few documents, none may be selected; then select the one with the lowest hash.
    threshold = min(scan.lowest_hash for scan in scans) + 1
    reader = replace(reader, validation_threshold=threshold)
    return _scan_fragments(fragments, reader, path, advance, num_processes, shared)


def _scan_fragment(reader: RecordReader, fragment: FileFragment, advance: Advance) -> RecordScan:
    scan, group, unreported = RecordScan(), RowGroup(0), 0
    for record in read_documents(fragment, reader.field, reader.invalid):
        scan.lines = record.number
        if isinstance(record, InvalidRecord):
            scan.num_invalid += 1
            if len(scan.invalid_records) < SHOWN:
                scan.invalid_records.append(record)
            continue
        data = record.data
        if not data or data.isspace():
            scan.skipped += data is None
            scan.empty += data is not None
            if len(scan.omitted_rows) < SHOWN:
                scan.omitted_rows.append(record.number)
            continue
        scan.replaced += record.has_replacements
        digest = xxh3_64_intdigest(data)
        scan.lowest_hash = min(scan.lowest_hash, digest)
        group.add(record.number, int(digest < reader.validation_threshold), len(data))
        if sum(group.text_bytes) >= reader.row_group_bytes:
            scan.row_groups.append(group)
            group = RowGroup(0)
        unreported += len(data)
        if unreported >= REPORT_BYTES:
            advance(unreported)
            unreported = 0
    advance(unreported)
    if group.end:
        scan.row_groups.append(group)
    return scan


def _number_by_file(fragments: Sequence[FileFragment], scans: Sequence[RecordScan]) -> None:
    """Renumber listed lines or rows: as in their files, not as in their fragments."""
    num_before = Counter[str]()
    for fragment, scan in zip(fragments, scans, strict=True):
        before = num_before[fragment.file.path]
        scan.invalid_records = [
            record._replace(number=before + record.number) for record in scan.invalid_records
        ]
        scan.omitted_rows = [before + number for number in scan.omitted_rows]
        num_before[fragment.file.path] += scan.lines


def _check_invalid_records(
    fragments: Sequence[FileFragment], scans: Sequence[RecordScan], path: str
) -> None:
    """Reject invalid records."""
    lines, count = [], 0
    fatal_files: set[str] = set()  # later line numbers in these files are unknown
    for fragment, scan in zip(fragments, scans, strict=True):
        if fragment.file.path in fatal_files:
            continue
        count += scan.num_invalid
        for record in scan.invalid_records:
            location = f"{fragment.file.name}, {fragment.record_noun} {record.number}"
            lines.append(f"{location}: {record.reason}")
        if any(record.is_fatal for record in scan.invalid_records[-1:]):
            fatal_files.add(fragment.file.path)
    if not count:
        return
    rule = "has a line or row that is not a document"
    if count > 1:
        rule = f"has {count:,} lines or rows that are not documents"
    remedy = "repair them"
    if any("UTF-8" in line or "half a character" in line for line in lines):
        remedy += ", or set data.invalid_utf8=skip or replace for text that is not UTF-8"
    if any("field" in line for line in lines) and 2 * count > sum(scan.lines for scan in scans):
        records = [record for scan in scans for record in scan.invalid_records]
        remedy = f"{_field_remedy(lines, records)}, or {remedy}"
    raise path_error(path, f"{rule}:\n  " + truncate_list(lines, "\n  ", count), remedy)


def _field_remedy(lines: Sequence[str], records: Sequence[InvalidRecord]) -> str:
    """Return the keys that read rows without the field of text."""
    formats = {found for line in lines for found in re.findall(r"use --data.format (\w+)", line)}
    if formats:
        name = formats.pop() if len(formats) == 1 else "chat"
        objective = {"preferences": "dpo", "unpaired": "kto"}.get(name)
        return f"use data.format={name}" + (
            f" and train.objective={objective}" if objective else ""
        )
    names = set.intersection(*(set(record.text_fields) for record in records))
    if not names:
        return "set data.text_field to the field with the text"
    return "use " + " or ".join(f"data.text_field={name}" for name in sorted(names))


# --------------------------------------------------------------------------- tokenizing


class _TokenizeTask(NamedTuple):
    """Fragment that one process tokenizes."""

    directory: Path
    tokenizer: Path
    fragment_index: int
    fragment: FileFragment
    row_groups: list[RowGroup]
    reader: RecordReader
    shared: SharedWork | None


def _tokenize(task: _TokenizeTask, advance: Advance) -> tuple[list[Shard], list[Shard]]:
    """Return train and validation shards, one of each per row group with documents."""
    encoder = _load_encoder_once(task.tokenizer)
    shards: tuple[list[Shard], list[Shard]] = ([], [])
    documents = task.reader.read_texts(task.fragment)
    begin = 0
    for number, group in enumerate(task.row_groups):
        suffix = f"{task.fragment_index:05d}-{number:05d}.bin"
        files = {
            index: task.directory / f"{name}-{suffix}"
            for index, name in enumerate(SPLITS)
            if group.documents[index]
        }
        chunks = _read_row_group(task, documents, begin, group)
        size = sum(group.text_bytes)
        built = build_shards(files, size, chunks, encoder, advance, task.shared)
        for index, shard in built.items():
            shards[index].append(shard)
        begin = group.end
    return shards


@lru_cache(1)
def _load_encoder_once(file: Path) -> Encoder:
    """Load the tokenizer once per process."""
    return load_encoder(file)


def _read_row_group(
    task: _TokenizeTask, documents: Iterator[tuple[int, bytes]], begin: int, group: RowGroup
) -> Iterator[TextChunk]:
    """Yield the text of a row group, whose documents follow row ``begin``.

    Raises:
        InvalidConfig: the file has changed since the scan.
    """
    actual = RowGroup(begin)
    while actual.end < group.end:
        number, data = next(documents, (group.end + 1, b""))
        if number <= begin:  # in a group whose shards are complete
            continue
        split_index = int(task.reader.is_validation(data))
        actual.add(number, split_index, len(data))
        if number > group.end or actual.documents[split_index] > group.documents[split_index]:
            raise changed_error(task.fragment.file)
        for first, end in split_chunks(data):
            text = data[first:end].decode()
            yield TextChunk(text, end - first, end == len(data), split_index, first == 0)
    if actual != group:
        raise changed_error(task.fragment.file)
