"""Preparing a store: text tokenised once, safely.

Preparing may be killed at any moment: the next attempt keeps the shards that are whole
(`weft.data.token_shards`) and makes the rest.  ``store.json`` comes last.

Text comes in three kinds.  Of *text files* (`weft.data.text_files`) each is a document; they are
hashed whenever they seem changed, and encoded by the tokenizer's own threads.  Files of many
documents, *records* (`weft.data.documents`), may be large and far away: what they are is told by
name, size and time, and processes make their shards.  *Tokens* of others (`weft.data.foreign_tokens`) are
only checked, and read where they lie.  *Conversations* are for `weft.data.conversations`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from weft.config.errors import ConfigError
from weft.config.files import write_durably
from weft.config.schema import DataSection
from weft.data.conversations import prepare_conversations
from weft.data.dataset import Dataset, single, write_mixture
from weft.data.document_tokens import RECORD, record_of
from weft.data.documents import read_records
from weft.data.foreign_tokens import TokenFiles, read_headers
from weft.data.prepared_cache import (
    PREPARES,
    Progress,
    Report,
    cache_problems,
    locked,
    noting,
    open_given,
    prepared_once,
    refuse,
)
from weft.data.source import SourceRef, look
from weft.data.text_files import read_texts
from weft.data.token_shards import PIECE_BYTES, Reading, load_encoder, unigram_entropy_nats
from weft.data.token_store import FORMAT, TOKENIZER_FILE, Manifest, Store, hash_json, is_store
from weft.data.tokenizer import load_tokenizer, separator_id, train_tokenizer

SHARD_BYTES = 32 << 20  # of text; about 20 MB of tokens, which is also what is held at once
TRAINING_BYTES = 64 << 20  # of train text that a new tokenizer learns from


def prepare_text(section: DataSection, cache: Path, progress: Report | None = None) -> Dataset:
    """What ``section`` wants a run to train on, prepared now unless it was before.

    Args and errors, also of ``data.mixture`` and ``data.chat_template``: see `prepare` and
    `weft.data.conversations.prepare_conversations`.
    """
    if section.format != "text":
        return prepare_conversations(section, cache, progress)
    if not section.mixture:
        return single(prepare(section, cache, progress))
    report = progress or (lambda _: None)
    parts = [section.model_copy(update={"path": path}) for path in section.mixture]
    problems: list[ConfigError] = []
    given: _Given | None = None
    readings: list[Reading | None] = []
    for part in parts:
        with noting(problems, mixture=True):
            found, given = _find(part)
            readings.append(
                None if found is None else _read(part, found, cache, SHARD_BYTES, report)
            )
    refuse(problems)
    if given is None:
        given = _shared_tokenizer(section, readings, cache, report)
        parts = [part.model_copy(update={"tokenizer": str(given.file)}) for part in parts]
    stores = []
    for part, reading in zip(parts, readings, strict=True):
        with noting(problems, mixture=True):
            stores.append(
                open_given(part, given.hash, cache, report)
                if reading is None
                else _prepare(part, reading, given, cache, SHARD_BYTES, report)
            )
    refuse(problems)
    for path, store in zip(section.mixture, stores, strict=True):
        if store.manifest.separator != given.separator:
            rule = (
                f"is a store whose documents end with token {store.manifest.separator}, and those "
                f"of the other sources with token {given.separator}"
            )
            problems.append(
                ConfigError("data.mixture", path, rule, "prepare it again from its text")
            )
    refuse(problems)
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
    prepares what all have read, the others wait for it.

    Args:
        section: what the user chose.  If its path is a prepared store, that is opened as it is.
        cache: folder below which stores are kept.
        progress: called from time to time with what is going on.
        shard_bytes: text per shard, about; a record is not cut.

    Raises:
        InvalidConfig: problems of ``data.path``, ``data.tokenizer`` or ``data.cache_dir``.
        WeftError: a process that helped was killed.
    """
    report = progress or (lambda _: None)
    found, given = _find(section)
    if found is None:
        return open_given(section, given and given.hash, cache, report)
    reading = _read(section, found, cache, shard_bytes, report)
    return _prepare(section, reading, given, cache, shard_bytes, report)


class _Given(NamedTuple):
    """A tokenizer that is not trained on the text."""

    file: Path
    hash: str
    separator: int


def _find(section: DataSection) -> tuple[SourceRef | None, _Given | None]:
    """What there is at the path (None: a prepared store), and the tokenizer that the user gives.

    Raises:
        InvalidConfig: every problem of both.
    """
    found: SourceRef | None = None
    given: _Given | None = None
    problems: list[ConfigError] = []
    with noting(problems):
        found = None if is_store(section.path) else look(section.path)
    if section.tokenizer == "train":
        if found is not None and found.kind == "tokens":
            rule = f"must be the one that made the tokens in {section.path}"
            problems.append(ConfigError("data.tokenizer", "train", rule, "give its tokenizer.json"))
    else:
        with noting(problems):
            tokenizer, digest = load_tokenizer(section.tokenizer)
            separator = separator_id(tokenizer, section.tokenizer)
            given = _Given(Path(section.tokenizer).expanduser(), digest, separator)
    refuse(problems)
    return found, given


def _read(
    section: DataSection, found: SourceRef, cache: Path, shard_bytes: int, report: Report
) -> Reading:
    if found.kind == "text":
        return read_texts(section, found.files, cache, shard_bytes, report)
    if found.kind == "tokens":
        return TokenFiles(section, read_headers(found.files))
    return read_records(section, found, cache, shard_bytes, report)


def _prepare(
    section: DataSection,
    reading: Reading,
    given: _Given | None,
    cache: Path,
    shard_bytes: int,
    report: Report,
) -> Store:
    settings = [FORMAT, PIECE_BYTES, shard_bytes, section.validation_fraction, section.invalid_utf8]
    recipe = (
        [given.hash, given.separator] if given else ["train", section.vocab_size, TRAINING_BYTES]
    )
    content = [settings, recipe, reading.content]

    def build(folder: Path) -> Manifest:
        file = folder / TOKENIZER_FILE
        if given:
            write_durably(file, given.file.read_bytes())
            write_durably(folder / RECORD, record_of(given.separator, True).encode())
        else:
            _train(file, [reading], section.vocab_size, report)
        encoder = load_encoder(file)
        built = reading.build(folder, encoder, report)
        return Manifest(
            format=FORMAT,
            key=folder.name,
            source=section.path,
            dtype=built.dtype,
            vocab_size=encoder.vocab_size,
            separator=encoder.separator,
            tokenizer_hash=encoder.hash,
            unigram_entropy_nats=unigram_entropy_nats(folder, built, encoder.vocab_size),
            skipped_files=reading.odd.skipped,
            replaced_files=reading.odd.replaced,
            train=built.train,
            validation=built.validation,
            empty_documents=reading.odd.empty,
        )

    return prepared_once(cache, content, report, build)


# --------------------------------------------------------------------------- tokenizers


def _shared_tokenizer(
    section: DataSection, readings: Sequence[Reading | None], cache: Path, report: Report
) -> _Given:
    """A prepared store's, if the mixture has one; else one trained on all texts, unless it was
    before."""
    stores = [path for path in section.mixture if is_store(path)]
    if stores:
        file = Path(stores[0]).expanduser() / TOKENIZER_FILE
    else:
        texts = [reading for reading in readings if reading is not None]
        # The last two decide what of a text is trained on.
        settings = [
            section.vocab_size,
            TRAINING_BYTES,
            section.validation_fraction,
            section.invalid_utf8,
        ]
        key = hash_json([settings, [reading.content for reading in texts]])
        file = cache / "tokenizers" / key / TOKENIZER_FILE
        with cache_problems(cache), locked(file.parent, report, PREPARES):
            _train(file, texts, section.vocab_size, report)
    tokenizer, digest = load_tokenizer(file)
    return _Given(file, digest, separator_id(tokenizer, file))


def _train(file: Path, readings: Sequence[Reading], vocab_size: int, report: Report) -> None:
    """Write a tokenizer trained on ``TRAINING_BYTES`` of the train texts at most, the same share
    of each, unless an earlier attempt did."""
    if file.exists():
        return
    report(Progress("training the tokenizer"))
    total = max(1, sum(reading.text_bytes for reading in readings))
    texts = (
        text
        for reading in readings
        for text in reading.training_texts(TRAINING_BYTES * reading.text_bytes // total)
    )
    write_durably(file, train_tokenizer(texts, vocab_size).to_str(pretty=True).encode())
