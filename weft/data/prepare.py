"""Preparing a store: text tokenised once, safely.

Preparing may be killed at any moment.  What goes into each shard is decided beforehand, from the
text alone, so shards do not depend on each other; each is written beside its place, flushed and
renamed, and then gets a *receipt* (``train-00000.json``) with its hash.  The next attempt keeps
the shards whose receipt is true and makes the rest.  ``store.json`` comes last.

In the cache, a store's folder is named by a hash of everything that decides its content, so a
changed file, tokenizer or setting is another store, and the same text is never tokenised twice.
"""

from __future__ import annotations

import fcntl
import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer
from xxhash import xxh3_128_hexdigest

from weft.data.source import (
    PIECE_BYTES,
    STORE_FILE,
    Part,
    Scan,
    check_path,
    find_documents,
    is_store,
    keep_text,
    read_piece,
    scan,
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
    map_shard,
    open_store,
    write_file,
)
from weft.data.text import Source, Text, write_mixture
from weft.data.tokenizer import load_tokenizer, separator_id, train_tokenizer, vocab_entries
from weft.job import DataSection, InvalidJob, Problem

SHARD_BYTES = 32 << 20  # of text; about 20 MB of tokens, which is also what is held at once
BATCH_BYTES = 4 << 20  # of text encoded by one call, over all cores
TRAINING_BYTES = 64 << 20  # of train text that a new tokenizer learns from

Tokens = NDArray[np.unsignedinteger[Any]]


@dataclass(frozen=True)
class Progress:
    """What a preparation is doing; ``total_bytes`` is 0 where there is nothing to count."""

    message: str
    done_bytes: int = 0
    total_bytes: int = 0


Report = Callable[[Progress], None]


def prepare_text(section: DataSection, cache: Path, progress: Report | None = None) -> Text:
    """What ``section`` wants a run to train on, prepared now unless it was before.

    Args, and errors of ``data.mixture`` too: see `prepare`.
    """
    if section.format != "text":
        from weft.data.conversations import prepare_conversations

        return prepare_conversations(section, cache, progress)
    if not section.mixture:
        store = prepare(section, cache, progress)
        return Text(store.path, (Source(store.path.name, 1.0, store),))
    report = progress or (lambda _: None)
    one_by_one = [section.model_copy(update={"path": path}) for path in section.mixture]
    problems: list[Problem] = []
    given, readings = None, []
    for one in one_by_one:
        with _noting(problems):
            given = _given(one)
            readings.append(None if is_store(one.path) else _read(one, report))
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
        with _noting(problems):
            stores.append(
                _open_given(one, given)
                if reading is None
                else _prepare(one, reading, given, cache, SHARD_BYTES, report)
            )
    if problems:
        raise InvalidJob({str(found): found for found in problems}.values())
    with _cache_problems(cache):
        return write_mixture(section.mixture, stores, cache / "mixtures")


@contextmanager
def _noting(problems: list[Problem]) -> Iterator[None]:
    """Problems of a source of a mixture, for later."""
    try:
        yield
    except InvalidJob as invalid:
        problems += [
            replace(found, key="data.mixture") if found.key == "data.path" else found
            for found in invalid.problems
        ]


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
        return _open_given(section, given)
    return _prepare(section, _read(section, report), given, cache, shard_bytes, report)


Given = tuple[Tokenizer, str]  # a tokenizer and its hash


def _given(section: DataSection) -> Given | None:
    """The tokenizer that the user gives, if any; every problem of it and of the path at once."""
    problems = check_path(section.path)
    given: Given | None = None
    if section.tokenizer != "train":
        try:
            given = load_tokenizer(section.tokenizer)
            separator_id(given[0], section.tokenizer)
        except InvalidJob as invalid:
            problems += invalid.problems
    if problems:
        raise InvalidJob(problems)
    return given


class _Reading(NamedTuple):
    """A text that was read once, and what of it is trained on and held out."""

    kept: list[Scan]
    train: list[Part]
    validation: list[Part]
    skipped_files: int
    replaced_files: int

    @property
    def content(self) -> list[tuple[str, str]]:
        return [(s.document.name, s.content_hash) for s in self.kept]


def _read(section: DataSection, report: Report) -> _Reading:
    scans = _scan_all(section, report)
    kept = keep_text(scans, section.invalid_utf8, section.path)
    train, validation = split(kept, section.holdout)
    if not train or not validation:
        what = "left to train on" if not train else "left to hold out for evaluation"
        remedy = "give more text" + (", or a larger data.holdout" if train else "")
        rule = f"has too little text ({sum(s.text_bytes for s in kept)} bytes): nothing is {what}"
        raise InvalidJob([Problem("data.path", section.path, rule, remedy)])
    faulty = [s.document.name for s in scans if s.fault and s.text_bytes]
    skipped = faulty if section.invalid_utf8 == "skip" else []
    if skipped:
        names = ", ".join(skipped[:3]) + (", ..." if len(skipped) > 3 else "")
        report(Progress(f"left out {len(skipped)} files that are not UTF-8 text: {names}"))
    return _Reading(kept, train, validation, len(skipped), len(faulty) - len(skipped))


def _train(
    section: DataSection, readings: Sequence[_Reading | None], cache: Path, report: Report
) -> Path:
    """A tokenizer for several texts, trained now unless it was before."""
    texts = [reading for reading in readings if reading is not None]
    content = [section.vocab_size, TRAINING_BYTES, [reading.content for reading in texts]]
    key = xxh3_128_hexdigest(json.dumps(content).encode())
    folder = cache / "tokenizers" / key
    train = [part for reading in texts for part in reading.train]
    with _cache_problems(cache), _lock(folder, report):
        _settle_encoder(folder, None, train, section.vocab_size, report)
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
    with _cache_problems(cache), _lock(folder, report):
        if not is_store(folder):  # another process may have made it while this one waited
            file = Path(section.tokenizer).expanduser() if given else None
            train, validation = reading.train, reading.validation
            encoder = _settle_encoder(folder, file, train, section.vocab_size, report)
            splits = _build(folder, encoder, train, validation, shard_bytes, report)
            manifest = Manifest(
                format=FORMAT,
                key=key,
                source=section.path,
                dtype=encoder.dtype,
                vocab_size=encoder.vocab_size,
                separator=encoder.separator,
                tokenizer_hash=encoder.hash,
                unigram_entropy_nats=_unigram_entropy(folder, encoder, splits[0]),
                skipped_files=reading.skipped_files,
                replaced_files=reading.replaced_files,
                train=splits[0],
                validation=splits[1],
            )
            write_file(folder / STORE_FILE, json.dumps(asdict(manifest), indent=1).encode())
    return open_store(folder)


def _open_given(section: DataSection, given: Given | None) -> Store:
    store = open_store(section.path)
    if given and given[1] != store.manifest.tokenizer_hash:
        rule = f"does not match the store {section.path}, which was prepared with another"
        remedy = f"leave data.tokenizer out, or use {store.path / TOKENIZER_FILE}"
        raise InvalidJob([Problem("data.tokenizer", section.tokenizer, rule, remedy)])
    return store


def _scan_all(section: DataSection, report: Report) -> list[Scan]:
    documents = [d for d in find_documents(section.path) if d.size_bytes]
    total, done = sum(d.size_bytes for d in documents), 0
    scans = []
    for document in documents:
        scans.append(scan(document, section.holdout))
        done += document.size_bytes
        report(Progress("reading the text", done, total))
    return scans


class _Encoder(NamedTuple):
    tokenizer: Tokenizer
    hash: str
    separator: int
    vocab_size: int
    dtype: Dtype


def _settle_encoder(
    folder: Path, given: Path | None, train: Sequence[Part], vocab_size: int, report: Report
) -> _Encoder:
    """Put the tokenizer into the store, unless an earlier attempt did, and load it from there."""
    file = folder / TOKENIZER_FILE
    if given:
        write_file(file, given.read_bytes())
    elif not file.exists():
        report(Progress("training the tokenizer"))
        trained = train_tokenizer(_training_texts(train), vocab_size)
        write_file(file, trained.to_str(pretty=True).encode())
    tokenizer, digest = load_tokenizer(file)
    entries = vocab_entries(tokenizer)
    dtype: Dtype = "uint16" if entries <= 1 << 16 else "uint32"
    return _Encoder(tokenizer, digest, separator_id(tokenizer, str(file)), entries, dtype)


def _training_texts(train: Sequence[Part]) -> Iterator[str]:
    """At most ``TRAINING_BYTES`` of the train text, evenly spread over it."""
    total = _text_bytes(train)
    seen = taken = 0
    for part in train:
        for begin, end in part.pieces():
            seen += end - begin
            if (taken + end - begin) * total <= seen * TRAINING_BYTES:
                taken += end - begin
                yield read_piece(part.scan, begin, end)


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
        try:
            encodings = encoder.tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        except Exception as error:  # tokenizers raises bare Exceptions
            rule = f"cannot encode the text: {error}"
            remedy = "use a tokenizer that covers every text, such as a byte-level one"
            raise InvalidJob([Problem("data.tokenizer", "(given)", rule, remedy)]) from error
        for p, encoding in zip(batch, encodings, strict=True):
            end = [encoder.separator] if p.last else []
            out.append(np.array(encoding.ids + end, encoder.dtype))
        advance(size)
        batch, size = [], 0
    return np.concatenate(out)


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


@contextmanager
def _lock(folder: Path, report: Report) -> Iterator[None]:
    """Hold the folder's lock, which the system frees should this process die."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as file:
        waiting = False
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if not waiting:
                    report(Progress("waiting for another process that prepares the same text"))
                waiting = True
                time.sleep(0.1)
        for stale in folder.glob("*.tmp"):  # of an attempt that was killed
            stale.unlink()
        yield


@contextmanager
def _cache_problems(cache: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        rule = f"cannot be written: {error.strerror or error}"
        remedy = "give --data.cache a folder that is writable and has room"
        raise InvalidJob([Problem("data.cache", str(cache), rule, remedy)]) from None
