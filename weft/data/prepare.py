"""Preparing a store: text tokenised once, safely.

Preparing may be killed at any moment.  What goes into each shard is decided beforehand, from the
text alone, so shards do not depend on each other; each is written beside its place, flushed and
renamed, and then gets a *receipt* (``train-00000.json``) with its hash.  The next attempt keeps
the shards whose receipt is true and makes the rest.  ``store.json`` comes last.

Text comes in three kinds.  Of *text files* (`weft.data.source`) each is a document; they are hashed
whenever they seem changed, and encoded by the tokenizer's own threads.  Files of many documents,
*records* (`weft.data.documents`), may be large and far away: what they are is told by name, size
and time, and processes make their shards.  *Tokens* of others (`weft.data.tokens`) are only
checked, and read where they lie.

In the cache, a store's folder is named by a hash of everything that decides its content, so a
changed file, tokenizer or setting is another store, and the same text is never tokenised twice.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer
from xxhash import xxh3_128_hexdigest

from weft.data.cache import Progress, Report, cache_problems, locked, noting, open_given
from weft.data.conversations import prepare_conversations
from weft.data.documents import Extent, Reader, Records, numbered, read_records
from weft.data.documents import Scan as UnitScan
from weft.data.files import changed
from weft.data.records import Unit, record_units
from weft.data.source import (
    PIECE_BYTES,
    STORE_FILE,
    Document,
    Fault,
    Found,
    Part,
    Scan,
    check_path,
    find_documents,
    in_pieces,
    is_store,
    keep_text,
    look,
    read_piece,
    scan,
    some,
    split,
)
from weft.data.store import (
    FORMAT,
    TOKENIZER_FILE,
    Dtype,
    Manifest,
    Shard,
    Split,
    SplitName,
    Store,
    hash_tokens,
    map_shard,
    open_store,
    write_file,
)
from weft.data.text import Source, Text, write_mixture
from weft.data.tokenizer import load_tokenizer, separator_id, train_tokenizer, vocab_entries
from weft.data.tokens import (
    Span,
    TokenFile,
    chunks,
    fits_in_place,
    in_place_dtype,
    read_headers,
    split_tokens,
)
from weft.data.workers import Advance, each
from weft.job import DataSection, InvalidJob, Problem

SHARD_BYTES = 32 << 20  # of text; about 20 MB of tokens, which is also what is held at once
BATCH_BYTES = 4 << 20  # of text encoded by one call, over all cores
TRAINING_BYTES = 64 << 20  # of train text that a new tokenizer learns from
MOST_SHARD_BYTES = 256 << 20  # of text, in sources that would have very many shards
SHARDS = 2048  # about, before they get larger: each is a file that every rank maps
# To read, or to encode: for less, starting processes takes longer than they save.
READ_ALONE_BYTES, ENCODE_ALONE_BYTES = 128 << 20, 8 << 20

Tokens = NDArray[np.unsignedinteger[Any]]


def prepare_text(section: DataSection, cache: Path, progress: Report | None = None) -> Text:
    """What ``section`` wants a run to train on, prepared now unless it was before.

    Args, and errors of ``data.mixture`` too: see `prepare`.
    """
    if section.format != "text":
        return prepare_conversations(section, cache, progress)
    if not section.mixture:
        store = prepare(section, cache, progress)
        return Text(store.path, (Source(store.path.name, 1.0, store),))
    report = progress or (lambda _: None)
    one_by_one = [section.model_copy(update={"path": path}) for path in section.mixture]
    problems: list[Problem] = []
    given, readings = None, []
    for one in one_by_one:
        with noting(problems):
            given = _given(one)
            readings.append(None if is_store(one.path) else _read(one, cache, SHARD_BYTES, report))
    if problems:
        raise InvalidJob({str(found): found for found in problems}.values())
    if given is None:
        found = [one.path for one in one_by_one if is_store(one.path)]
        file = (
            Path(found[0]) / TOKENIZER_FILE if found else _train(section, readings, cache, report)
        )
        one_by_one = [one.model_copy(update={"tokenizer": str(file)}) for one in one_by_one]
        given = load_tokenizer(file)
    stores = []
    for one, reading in zip(one_by_one, readings, strict=True):
        with noting(problems):
            stores.append(
                open_given(one, given[1])
                if reading is None
                else _prepare(one, reading, given, cache, SHARD_BYTES, report)
            )
    if problems:
        raise InvalidJob({str(found): found for found in problems}.values())
    with cache_problems(cache):
        return write_mixture(section.mixture, stores, cache / "mixtures")


def prepare(
    section: DataSection,
    cache: Path,
    progress: Report | None = None,
    *,
    shard_bytes: int = SHARD_BYTES,
) -> Store:
    """The store of the text at ``section.path``, prepared now unless it was before.

    Any number of processes may call this at once, on any machines that share ``cache``: one
    prepares, the others wait for it.

    Args:
        section: what the user chose.  If its path is a prepared store, that is opened as it is.
        cache: folder below which stores are kept.
        progress: called from time to time with what is going on.
        shard_bytes: text per shard, at most (by one piece).

    Raises:
        InvalidJob: problems of ``data.path``, ``data.tokenizer`` or ``data.cache``.
    """
    report = progress or (lambda _: None)
    given = _given(section)
    if is_store(section.path):
        return open_given(section, given[1] if given else None)
    reading = _read(section, cache, shard_bytes, report)
    return _prepare(section, reading, given, cache, shard_bytes, report)


Given = tuple[Tokenizer, str]  # a tokenizer and its hash


def _given(section: DataSection) -> Given | None:
    """The tokenizer that the user gives, if any; every problem of it and of the path at once."""
    problems = check_path(section.path)
    given: Given | None = None
    if not problems and section.tokenizer == "train" and _holds_tokens(section.path):
        rule = f"must be the one that made the tokens in {section.path}"
        problems.append(Problem("data.tokenizer", "train", rule, "give its tokenizer.json"))
    if section.tokenizer != "train":
        try:
            given = load_tokenizer(section.tokenizer)
            separator_id(given[0], section.tokenizer)
        except InvalidJob as invalid:
            problems += invalid.problems
    if problems:
        raise InvalidJob(problems)
    return given


def _holds_tokens(path: str) -> bool:
    return not is_store(path) and look(path).kind == "tokens"


class _Texts(NamedTuple):
    """Text files that were read once, and what of them is trained on and held out."""

    kept: list[Scan]
    train: list[Part]
    validation: list[Part]
    skipped: int
    replaced: int

    @property
    def content(self) -> list[tuple[str, str]]:
        return [(s.document.name, s.content_hash) for s in self.kept]

    @property
    def text_bytes(self) -> int:
        return _text_bytes(self.train)

    def training_texts(self, most_bytes: int) -> Iterator[str]:
        """At most so much of the train text, evenly spread over it."""
        total = _text_bytes(self.train)
        seen = taken = 0
        for part in self.train:
            for begin, end in part.pieces():
                seen += end - begin
                if (taken + end - begin) * total <= seen * most_bytes:
                    taken += end - begin
                    yield read_piece(part.scan, begin, end)


class _Tokens(NamedTuple):
    """Files of tokens, whose headers were read."""

    files: list[TokenFile]
    text_bytes: int = 0  # to train a tokenizer on
    skipped: int = 0
    replaced: int = 0

    @property
    def content(self) -> list[object]:
        files = [source.file for source in self.files]
        return ["tokens", [[f.path, f.size_bytes, f.version] for f in files]]

    def training_texts(self, most_bytes: int) -> Iterator[str]:
        """None: their tokenizer was given."""
        return iter(())


_Reading = _Texts | Records | _Tokens


def _read(section: DataSection, cache: Path, shard_bytes: int, report: Report) -> _Reading:
    found = look(section.path)
    if found.kind == "text":
        return _read_texts(section, cache, report)
    if found.kind == "tokens":
        return _Tokens(read_headers(found.files))
    return _read_records(section, found, cache, shard_bytes, report)


def _read_texts(section: DataSection, cache: Path, report: Report) -> _Texts:
    scans = _scan_all(section, cache, report)
    kept = keep_text(scans, section.invalid_utf8, section.path)
    train, validation = split(kept, section.holdout)
    if not train or not validation:
        raise _too_little(section, sum(s.text_bytes for s in kept), bool(train))
    faulty = [s.document.name for s in scans if s.fault and s.text_bytes]
    skipped = faulty if section.invalid_utf8 == "skip" else []
    if skipped:
        names = ", ".join(skipped[:3]) + (", ..." if len(skipped) > 3 else "")
        report(Progress(f"left out {len(skipped)} files that are not UTF-8 text: {names}"))
    return _Texts(kept, train, validation, len(skipped), len(faulty) - len(skipped))


def _too_little(section: DataSection, size: int, train: bool) -> InvalidJob:
    what = "left to hold out for evaluation" if train else "left to train on"
    remedy = "give more text" + (", or a larger data.holdout" if train else "")
    rule = f"has too little text ({size} bytes): nothing is {what}"
    return InvalidJob([Problem("data.path", section.path, rule, remedy)])


def _read_records(
    section: DataSection, found: Found, cache: Path, shard_bytes: int, report: Report
) -> Records:
    if found.kind == "hub":
        report(Progress("asking the hub"))
    files_bytes = sum(file.size_bytes for file in found.files)
    extent_bytes = max(shard_bytes, min(files_bytes // SHARDS, MOST_SHARD_BYTES))
    units = record_units(section.path, found, extent_bytes, section.field)
    size = files_bytes or sum(unit.size_bytes for unit in units)
    done = 0

    def advance(more: int) -> None:
        # Of the text, where the total is known of the files only: no more than an estimate.
        nonlocal done
        done += more
        report(Progress("reading the documents", min(done, size), size))

    advance(0)
    below = int(section.holdout * 2**64)
    reader = Reader(section.field, section.invalid_utf8, extent_bytes, below)
    processes = _processes(
        len(units), READ_ALONE_BYTES if found.kind == "hub" else size, READ_ALONE_BYTES
    )
    with cache_problems(cache):
        records = read_records(units, reader, section.path, cache, advance, processes)
    if not any(scan.total(0)[0] for scan in records.scans):
        raise _too_little(section, records.text_bytes, train=False)
    if count := records.empty + records.skipped:
        which = "empty or not UTF-8" if records.skipped else "empty"
        where = some(records.left_out, "; ", count)
        report(Progress(f"left out {count:,} that are {which}: {where}"))
    return records


def _processes(things: int, size: int, alone_bytes: int) -> int:
    """As many as there are cores, if there is enough to do."""
    return 1 if size < alone_bytes else max(1, min(things, _cores()))


def _cores() -> int:
    return len(os.sched_getaffinity(0))


def _train(
    section: DataSection, readings: Sequence[_Reading | None], cache: Path, report: Report
) -> Path:
    """A tokenizer for several texts, trained now unless it was before."""
    texts = [reading for reading in readings if reading is not None]
    content = [section.vocab_size, TRAINING_BYTES, [reading.content for reading in texts]]
    key = xxh3_128_hexdigest(json.dumps(content).encode())
    folder = cache / "tokenizers" / key
    with cache_problems(cache), locked(folder, report):
        _settle_encoder(folder, None, texts, section.vocab_size, report)
    return folder / TOKENIZER_FILE


def _prepare(
    section: DataSection,
    reading: _Reading,
    given: Given | None,
    cache: Path,
    shard_bytes: int,
    report: Report,
) -> Store:
    settings = [FORMAT, PIECE_BYTES, shard_bytes, section.holdout, section.invalid_utf8]
    recipe = given[1] if given else ["train", section.vocab_size, TRAINING_BYTES]
    key = xxh3_128_hexdigest(json.dumps([settings, recipe, reading.content]).encode())
    folder = cache / "stores" / key
    if is_store(folder):
        return open_store(folder)
    with cache_problems(cache), locked(folder, report):
        if not is_store(folder):  # another process may have made it while this one waited
            file = Path(section.tokenizer).expanduser() if given else None
            encoder = _settle_encoder(folder, file, [reading], section.vocab_size, report)
            if isinstance(reading, _Tokens):
                splits, encoder = _adopt(folder, encoder, reading.files, section.holdout, report)
            elif isinstance(reading, Records):
                splits = _build_records(folder, encoder, reading, report)
            else:
                parts = reading.train, reading.validation
                splits = _build(folder, encoder, *parts, shard_bytes, report)
            manifest = Manifest(
                format=FORMAT,
                key=key,
                source=section.path,
                dtype=encoder.dtype,
                vocab_size=encoder.vocab_size,
                separator=encoder.separator,
                tokenizer_hash=encoder.hash,
                unigram_entropy_nats=_unigram_entropy(folder, encoder, splits[0]),
                skipped_files=reading.skipped,
                replaced_files=reading.replaced,
                train=splits[0],
                validation=splits[1],
                empty_documents=reading.empty if isinstance(reading, Records) else 0,
            )
            write_file(folder / STORE_FILE, json.dumps(asdict(manifest), indent=1).encode())
    return open_store(folder)


def _scan_all(section: DataSection, cache: Path, report: Report) -> list[Scan]:
    """Of all files; what was read before is not read again while no file seems changed."""
    documents = [d for d in find_documents(section.path) if d.size_bytes]
    stats = [d.path.stat() for d in documents]
    seen = [
        [str(d.path), s.st_size, s.st_mtime_ns, s.st_ctime_ns]
        for d, s in zip(documents, stats, strict=True)
    ]
    about = [FORMAT, PIECE_BYTES, section.holdout, seen]
    known = cache / "scans" / f"{xxh3_128_hexdigest(json.dumps(about).encode())}.json"
    if known.is_file():
        rows = json.loads(known.read_bytes())
        return [_scan_of(d, *row) for d, row in zip(documents, rows, strict=True)]
    total, done = sum(d.size_bytes for d in documents), 0
    scans = []
    for document in documents:
        scans.append(scan(document, section.holdout))
        done += document.size_bytes
        report(Progress("reading the text", done, total))
    with cache_problems(cache):
        known.parent.mkdir(parents=True, exist_ok=True)
        rows = [
            [s.content_hash, s.cuts, s.tail, s.fault and asdict(s.fault), s.version] for s in scans
        ]
        write_file(known, json.dumps(rows).encode())
    return scans


def _scan_of(
    document: Document,
    content_hash: str,
    cuts: list[int],
    tail: int,
    fault: dict[str, Any] | None,
    version: list[int],
) -> Scan:
    found = Fault(**fault) if fault else None
    return Scan(document, content_hash, cuts, tail, found, (version[0], version[1]))


class _Encoder(NamedTuple):
    tokenizer: Tokenizer
    hash: str
    separator: int
    vocab_size: int
    dtype: Dtype


def _settle_encoder(
    folder: Path,
    given: Path | None,
    readings: Sequence[_Reading],
    vocab_size: int,
    report: Report,
) -> _Encoder:
    """Put the tokenizer into the store, unless an earlier attempt did, and load it from there."""
    file = folder / TOKENIZER_FILE
    if given:
        write_file(file, given.read_bytes())
    elif not file.exists():
        report(Progress("training the tokenizer"))
        trained = train_tokenizer(_training_texts(readings), vocab_size)
        write_file(file, trained.to_str(pretty=True).encode())
    return _encoder(file)


def _encoder(file: Path) -> _Encoder:
    tokenizer, digest = load_tokenizer(file)
    entries = vocab_entries(tokenizer)
    dtype: Dtype = "uint16" if entries <= 1 << 16 else "uint32"
    return _Encoder(tokenizer, digest, separator_id(tokenizer, str(file)), entries, dtype)


def _training_texts(readings: Sequence[_Reading]) -> Iterator[str]:
    """At most ``TRAINING_BYTES`` of the train texts, the same share of each."""
    total = sum(reading.text_bytes for reading in readings)
    for reading in readings:
        yield from reading.training_texts(TRAINING_BYTES * reading.text_bytes // max(total, 1))


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


def _build(
    folder: Path,
    encoder: _Encoder,
    train: Sequence[Part],
    validation: Sequence[Part],
    shard_bytes: int,
    report: Report,
) -> tuple[Split, Split]:
    """Make every shard that is not there yet."""
    total, done = sum(_text_bytes(parts) for parts in (train, validation)), 0

    def advance(size: int) -> None:
        nonlocal done
        done += size
        report(Progress("tokenising", done, total))

    def build(name: SplitName, parts: Sequence[Part]) -> Split:
        shards = []
        for index, pieces in enumerate(_shards(parts, shard_bytes)):
            file = folder / f"{name}-{index:05d}.bin"
            tokens = _finished(file, encoder)
            if tokens is None:
                tokens = _encode(encoder, pieces, advance)
                write_file(file, tokens.data)
                write_file(file.with_suffix(".json"), _receipt(file, encoder, tokens))
            else:
                advance(sum(piece.end - piece.begin for piece in pieces))
            shards.append(_describe(file, tokens))
        return Split(len(parts), _text_bytes(parts), sum(s.tokens for s in shards), shards)

    return build("train", train), build("validation", validation)


def _text_bytes(parts: Sequence[Part]) -> int:
    return sum(part.end - part.begin for part in parts)


def _encode(encoder: _Encoder, pieces: Sequence[_Piece], advance: Callable[[int], None]) -> Tokens:
    """The tokens of a shard.  Each piece is encoded on its own, whatever batch it falls into."""
    out: list[Tokens] = []
    batch: list[_Piece] = []
    size = 0
    for piece in pieces:
        batch.append(piece)
        size += piece.end - piece.begin
        if size < BATCH_BYTES and piece is not pieces[-1]:
            continue
        texts = [read_piece(p.scan, p.begin, p.end) for p in batch]
        ends = [p.last for p in batch]
        out += _encode_texts(encoder, texts, ends)
        advance(size)
        batch, size = [], 0
    return np.concatenate(out)


def _encode_texts(encoder: _Encoder, texts: list[str], ends: list[bool]) -> list[Tokens]:
    """The tokens of each piece of text, with the separator where it ends a document."""
    try:
        encodings = encoder.tokenizer.encode_batch_fast(texts, add_special_tokens=False)
    except Exception as error:  # tokenizers raises bare Exceptions
        rule = f"cannot encode the text: {error}"
        remedy = "use a tokenizer that covers every text, such as a byte-level one"
        raise InvalidJob([Problem("data.tokenizer", "(given)", rule, remedy)]) from error
    return [
        np.array(encoding.ids + [encoder.separator] * end, encoder.dtype)
        for encoding, end in zip(encodings, ends, strict=True)
    ]


# --------------------------------------------------------------------------- records


class _Task(NamedTuple):
    """A unit to tokenise, by one process."""

    folder: Path
    number: int
    unit: Unit
    scan: UnitScan
    reader: Reader


_SIDES: tuple[SplitName, SplitName] = ("train", "validation")


def _build_records(
    folder: Path, encoder: _Encoder, records: Records, report: Report
) -> tuple[Split, Split]:
    """Make every shard that is not there yet."""
    done, total = 0, records.text_bytes

    def advance(size: int) -> None:
        nonlocal done
        done += size
        report(Progress("tokenising", done, total))

    tasks = [
        _Task(folder, number, unit, scan, records.reader)
        for number, (unit, scan) in enumerate(zip(records.units, records.scans, strict=True))
        if scan.extents
    ]
    processes = _processes(len(tasks), total, ENCODE_ALONE_BYTES)
    threads = max(1, _cores() // processes)
    made = dict(each(_tokenise, tasks, advance, processes, threads))
    splits = []
    for side in (0, 1):
        shards = [shard for place in range(len(tasks)) for shard in made[place][side]]
        counts = [scan.total(side) for scan in records.scans]
        documents, text_bytes = (sum(column) for column in zip(*counts, strict=True))
        splits.append(Split(documents, text_bytes, sum(s.tokens for s in shards), shards))
    return splits[0], splits[1]


def _tokenise(task: _Task, advance: Advance) -> tuple[list[Shard], list[Shard]]:
    """The shards of a unit, train and held-out, one of each from each extent that has any."""
    encoder = _known_encoder(task.folder / TOKENIZER_FILE)
    made: tuple[list[Shard], list[Shard]] = ([], [])
    source: Iterator[tuple[int, bytes]] | None = None
    begin = 0
    for index, extent in enumerate(task.scan.extents):
        files = [task.folder / f"{s}-{task.number:05d}-{index:05d}.bin" for s in _SIDES]
        wanted = [side for side in (0, 1) if extent.documents[side]]
        found = {side: _finished(files[side], encoder) for side in wanted}
        if any(tokens is None for tokens in found.values()):
            source = source or numbered(task.unit, task.reader, begin)
            both = _encode_extent(encoder, task, extent, source, advance)
            for side in wanted:
                found[side] = both[side]
                write_file(files[side], both[side].data)
                receipt = _receipt(files[side], encoder, both[side])
                write_file(files[side].with_suffix(".json"), receipt)
        else:
            source = None  # further on it is opened again, behind what is there
            advance(sum(extent.text_bytes))
        for side in wanted:
            tokens = found[side]
            assert tokens is not None
            made[side].append(_describe(files[side], tokens))
        begin = extent.end
    return made


@lru_cache(1)
def _known_encoder(file: Path) -> _Encoder:
    return _encoder(file)


def _encode_extent(
    encoder: _Encoder,
    task: _Task,
    extent: Extent,
    source: Iterator[tuple[int, bytes]],
    advance: Advance,
) -> list[Tokens]:
    """The tokens of both splits; each piece is encoded on its own, whatever batch it falls into."""
    out: list[list[Tokens]] = [[], []]
    counted = Extent(extent.end)
    texts: list[str] = []
    ends: list[bool] = []
    sides: list[int] = []
    size = 0

    def encode() -> None:
        nonlocal size
        for side, tokens in zip(sides, _encode_texts(encoder, texts, ends), strict=True):
            out[side].append(tokens)
        advance(size)
        size = 0
        for column in (texts, ends, sides):
            column.clear()

    number = 0
    while number < extent.end:
        number, data = next(source, (extent.end + 1, b""))
        if number > extent.end:
            raise changed(task.unit.file)
        side = int(task.reader.held_out(data))
        counted.documents[side] += 1
        counted.text_bytes[side] += len(data)
        for begin, end in in_pieces(data):
            texts.append(data[begin:end].decode())
            ends.append(end == len(data))
            sides.append(side)
            size += end - begin
            if size >= BATCH_BYTES:
                encode()
    encode()
    if counted != extent:
        raise changed(task.unit.file)
    return [np.concatenate(of) if of else np.empty(0, encoder.dtype) for of in out]


# --------------------------------------------------------------------------- tokens of others


def _adopt(
    folder: Path, encoder: _Encoder, files: Sequence[TokenFile], holdout: float, report: Report
) -> tuple[tuple[Split, Split], _Encoder]:
    """Check every token of others' files, and copy those that cannot be read where they lie."""
    dtypes = {in_place_dtype(f) for f in files if fits_in_place(f, encoder.separator)}
    in_place = len(dtypes) == 1 and all(fits_in_place(f, encoder.separator) for f in files)
    dtype: Any = dtypes.pop() if in_place else encoder.dtype
    encoder = encoder._replace(dtype=dtype)
    spans = split_tokens(files, encoder.separator, holdout)
    total = sum(span.end - span.begin for side in spans for span in side)
    done = 0

    def advance(tokens: int) -> None:
        nonlocal done
        done += tokens
        report(Progress("checking the tokens" if in_place else "copying the tokens", done, total))

    def adopt(name: SplitName, side: Sequence[Span]) -> Split:
        shards, documents = [], 0
        for number, span in enumerate(side):
            for begin, tokens in chunks(span, None if in_place else encoder.separator):
                _check_vocabulary(span, begin, tokens, encoder)
                documents += int((tokens == encoder.separator).sum())
                advance(len(tokens))
                if in_place:
                    continue
                file = folder / f"{name}-{number:05d}-{begin:012d}.bin"
                copied = np.ascontiguousarray(tokens.astype(encoder.dtype))
                write_file(file, copied.data)
                shards.append(_describe(file, copied))
            if in_place:
                shards.append(_where_it_lies(span, encoder))
        return Split(documents, 0, sum(shard.tokens for shard in shards), shards)

    return (adopt("train", spans[0]), adopt("validation", spans[1])), encoder


def _where_it_lies(span: Span, encoder: _Encoder) -> Shard:
    width = np.dtype(encoder.dtype).itemsize
    count, begin = span.end - span.begin, span.source.begin + span.begin * width
    shard = Shard(str(Path(span.source.file.path).absolute()), count, count * width, "", begin)
    return replace(shard, xxh3=hash_tokens(map_shard(Path("/"), encoder.dtype, shard)))


def _check_vocabulary(span: Span, begin: int, tokens: Tokens, encoder: _Encoder) -> None:
    if not len(tokens) or (tokens.max() < encoder.vocab_size and tokens.min() >= 0):
        return
    place = int(np.flatnonzero((tokens >= encoder.vocab_size) | (tokens < 0))[0])
    rule = (
        f"has {encoder.vocab_size:,} entries, and token {begin + place:,} of "
        f"{span.source.file.name} is {int(tokens[place]):,}"
    )
    remedy = "give the tokenizer.json that the tokens were made with"
    raise InvalidJob([Problem("data.tokenizer", "(given)", rule, remedy)])


# --------------------------------------------------------------------------- statistics


def _unigram_entropy(folder: Path, encoder: _Encoder, train: Split) -> float:
    """Entropy of a train token in nats, -sum p ln p."""
    frequency = np.zeros(encoder.vocab_size, np.int64)
    for shard in train.shards:
        tokens = map_shard(folder, encoder.dtype, shard)
        frequency += np.bincount(tokens, minlength=encoder.vocab_size)
    p = frequency[frequency > 0] / frequency.sum()
    return float(-(p * np.log(p)).sum())


# --------------------------------------------------------------------------- files


def _describe(file: Path, tokens: Tokens) -> Shard:
    return Shard(file.name, len(tokens), tokens.nbytes, xxh3_128_hexdigest(tokens.data))


def _receipt(file: Path, encoder: _Encoder, tokens: Tokens) -> bytes:
    return json.dumps(asdict(_describe(file, tokens)) | {"tokenizer": encoder.hash}).encode()


def _finished(file: Path, encoder: _Encoder) -> Tokens | None:
    """The tokens of a shard that an earlier attempt completed, or None."""
    try:
        receipt = file.with_suffix(".json").read_bytes()
        tokens: Tokens = np.fromfile(file, encoder.dtype)
    except FileNotFoundError:
        return None
    return tokens if receipt == _receipt(file, encoder, tokens) else None
