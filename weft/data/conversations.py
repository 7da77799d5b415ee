"""Prepare a store of conversations: tokenized once, with a loss mask.

weft reads the lines (or rows) twice.  The first reading validates every line, so that all errors
are known within seconds, and selects the validation set: the lines with the lowest hashes.  So one
more line hardly changes the selection, and copies are in the same split.  The second reading
renders, tokenizes and appends each line to the files of its split.  ``store.json`` is written last;
the next attempt removes the files of a killed one.
"""

from __future__ import annotations

import json
import math
import os
from array import array
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest, xxh3_128, xxh3_128_hexdigest

from weft.config.errors import SHOWN, ConfigError, InvalidConfig, truncate_list
from weft.config.files import write_durably
from weft.config.schema import DataSection
from weft.data.chat import (
    COLUMNS,
    INSEPARABLE_TURNS,
    TURNS_REMEDY,
    ChatEncoder,
    ChatTemplate,
    EncodedConversation,
    Example,
    InvalidConversation,
    load_chat_template,
    parse_line,
)
from weft.data.dataset import Dataset, dataset_from_store, write_mixture
from weft.data.document_tokens import RECORD_FILE, format_record
from weft.data.prepared_cache import (
    Progress,
    Report,
    build_once,
    collect_errors,
    convert_cache_errors,
    open_given_store,
    progress_counter,
    raise_errors,
)
from weft.data.records import FileFragment, InvalidRecord, list_fragments, read_lines
from weft.data.source import SourceRef, detect_source
from weft.data.source_files import changed_error
from weft.data.token_shards import entropy_nats
from weft.data.token_store import (
    FORMAT,
    SPLITS,
    TEMPLATE_FILE,
    TOKENIZER_CONFIG_FILE,
    TOKENIZER_FILE,
    Manifest,
    Shard,
    Split,
    SplitName,
    Store,
    is_store,
    token_dtype,
)
from weft.data.tokenizer import find_separator, required_vocab_size

BATCH_LINES = 1024  # rendered, then tokenized together on all cores
UNSPLIT_BYTES = 1 << 62  # fragment size: files are not split
LAYOUT_VERSION = 2  # of the files of a store; part of its cache key


def prepare_conversations(
    section: DataSection, cache: Path, progress: Report | None = None
) -> Dataset:
    """Return the dataset that ``section`` selects; prepare it if it does not exist.

    Sources of a mixture may also be prepared stores of the same tokenizer, including text.

    Raises:
        InvalidConfig: all errors of tokenizer and template; then of all lines; then of all
            lines that the template cannot render.
    """
    report = progress or (lambda _: None)
    encoder = _load_chat_encoder(section)
    if not section.is_mixture:
        return dataset_from_store(_prepare_store(section, encoder, cache, report))
    problems: list[ConfigError] = []
    stores = []
    for path in section.mixture:
        with collect_errors(problems, mixture=True):
            source_section = section.model_copy(update={"path": path})
            stores.append(_prepare_store(source_section, encoder, cache, report))
    raise_errors(problems)
    with convert_cache_errors(cache):
        return write_mixture(section.mixture, stores, cache / "mixtures")


def check_chat(section: DataSection) -> list[ConfigError]:
    """Return the errors of tokenizer, template and files, without reading lines."""
    if section.is_text:
        return []
    problems: list[ConfigError] = []
    with collect_errors(problems):
        _load_chat_encoder(section)
    for path in section.sources:
        with collect_errors(problems, mixture=section.is_mixture):
            if not is_store(path):
                _detect_conversations(path)
    return problems


def _load_chat_encoder(section: DataSection) -> ChatEncoder:
    key, path = "data.tokenizer", section.tokenizer
    if path == "train":
        rule = "is only for text; conversations need the tokens of a chat template"
        remedy = "give the tokenizer.json of a model, with its chat template in the same directory"
        raise InvalidConfig([ConfigError(key, path, rule, remedy)])
    template: ChatTemplate | None = None
    problems: list[ConfigError] = []
    with collect_errors(problems):
        template = load_chat_template(section)
    with collect_errors(problems):
        encoder = ChatEncoder(path, template or ChatTemplate({}, {}, ""))
        find_separator(encoder.tokenizer, path)
    raise_errors(problems)
    return encoder


def _detect_conversations(path: str) -> SourceRef:
    """Return the source at a path, which must have lines or rows."""
    source = detect_source(path)
    if source.kind in ("text", "tokens"):
        rule = "holds no conversations, or also other files"
        remedy = "give .jsonl, .jsonl.gz, .jsonl.zst, .parquet or .arrow, a glob of these, or hf://"
        raise InvalidConfig([ConfigError("data.path", path, rule, remedy)])
    return source


def _prepare_store(
    section: DataSection, encoder: ChatEncoder, cache: Path, report: Report
) -> Store:
    path = section.path
    if is_store(path):
        store = open_given_store(section, encoder.hash, cache, report)
        if section.has_preferences != (store.manifest.kind == "preferences"):
            rule = f"is a store of {store.manifest.kind}, not of {section.format}"
            raise InvalidConfig(
                [ConfigError("data.path", path, rule, f"set data.format={store.manifest.kind}")]
            )
        return store
    fragments = list_fragments(path, _detect_conversations(path), UNSPLIT_BYTES, None)
    survey = _survey(fragments, section, report)
    template = [dict(encoder.template.sources), dict(encoder.template.special_tokens)]
    separator = find_separator(encoder.tokenizer, section.tokenizer)
    settings = [
        FORMAT,
        LAYOUT_VERSION,
        section.format,
        section.validation_fraction,
        encoder.hash,
        template,
        separator,
    ]

    def build(directory: Path) -> Manifest:
        return _build_store(directory, fragments, survey, section, encoder, report)

    return build_once(cache, [settings, survey.cache_key], report, build)


class _Survey(NamedTuple):
    """Result of the first reading: the source's cache key, and the hash of each line."""

    cache_key: list[object]
    hashes: NDArray[np.uint64]
    validation_threshold: np.uint64  # lines with hashes up to it are validation


def _survey(fragments: list[FileFragment], section: DataSection, report: Report) -> _Survey:
    total_bytes = sum(fragment.size_bytes for fragment in fragments)
    advance = progress_counter(report, "reading the conversations", total_bytes)
    preferences = section.has_preferences
    what = "preference" if preferences else "conversation"
    invalid_lines = _InvalidLines(section.path, f"not a {what}", f"not {what}s")
    hashes = array("Q")
    for fragment in fragments:
        for number, line in read_lines(fragment, COLUMNS):
            if isinstance(line, InvalidRecord):
                invalid_lines.add(fragment, number, line.reason)
                continue
            hashes.append(xxh3_64_intdigest(line.strip()))
            try:
                parse_line(line, preferences)
            except InvalidConversation as error:
                invalid_lines.add(fragment, number, str(error))
        advance(fragment.size_bytes)
    invalid_lines.raise_any("repair or remove these lines")
    line_hashes = np.array(hashes, np.uint64)
    distinct = np.unique(line_hashes)
    if len(distinct) < 2:
        rule = "has fewer than two conversations: one for training, one for validation"
        raise InvalidConfig(
            [ConfigError("data.path", section.path, rule, "give more conversations")]
        )
    threshold = distinct[
        min(len(distinct) - 1, math.ceil(section.validation_fraction * len(distinct))) - 1
    ]
    cache_key: list[object] = [
        [_fragment_name(fragment) for fragment in fragments],
        xxh3_128_hexdigest(line_hashes.data),
    ]
    return _Survey(cache_key, line_hashes, threshold)


def _fragment_name(fragment: FileFragment) -> str:
    """Return the name of a file, or of one of several shards on the hub."""
    is_shard = fragment.kind == "hub" and fragment.end > 1
    return f"{fragment.file.name}, shard {fragment.begin}" if is_shard else fragment.file.name


class _InvalidLines:
    """Invalid lines: the first few, and their number."""

    def __init__(self, path: str, description: str, plural: str) -> None:
        self.path, self.description, self.plural = path, description, plural
        self.count, self.shown = 0, list[str]()

    def add(self, fragment: FileFragment, number: int, reason: str) -> None:
        self.count += 1
        if len(self.shown) < SHOWN:
            self.shown.append(f"{_fragment_name(fragment)}:{number}: {reason}")

    def raise_any(self, remedy: str) -> None:
        if not self.count:
            return
        rule = (
            f"has a line that is {self.description}:\n  "
            if self.count == 1
            else f"has {self.count} lines that are {self.plural}:\n  "
        ) + truncate_list(self.shown, "\n  ", self.count)
        raise InvalidConfig([ConfigError("data.path", self.path, rule, remedy)])


# --------------------------------------------------------------------------- build


class _Line(NamedTuple):
    fragment_index: int
    number: int
    hash: np.uint64
    examples: list[Example]


def _reread_lines(
    fragments: list[FileFragment], survey: _Survey, preferences: bool
) -> Iterator[_Line]:
    """Yield every line again.

    Raises:
        InvalidConfig: a file has changed.
    """
    position = 0
    for index, fragment in enumerate(fragments):
        for number, line in read_lines(fragment, COLUMNS):
            expected = survey.hashes[position : position + 1].tolist()
            if isinstance(line, InvalidRecord) or expected != [xxh3_64_intdigest(line.strip())]:
                raise changed_error(fragment.file)
            yield _Line(index, number, survey.hashes[position], parse_line(line, preferences))
            position += 1
    if position != len(survey.hashes):
        raise changed_error(fragments[-1].file)


class _ColumnFile:
    """File of numbers, written in chunks, and renamed to its final name when complete."""

    def __init__(self, path: Path, dtype: str) -> None:
        self._path, self._dtype = path, dtype
        self._temporary_path = path.with_name(path.name + ".tmp")
        self._file = self._temporary_path.open("wb")
        self._hash, self.size = xxh3_128(), 0

    def append(self, values: NDArray[Any]) -> None:
        data = np.ascontiguousarray(values, self._dtype).data.cast("B")
        self._file.write(data)
        self._hash.update(data)
        self.size += values.size

    def finish(self) -> Shard:
        self._file.flush()
        os.fsync(self._file.fileno())
        size = self._file.tell()
        self._file.close()
        os.replace(self._temporary_path, self._path)
        return Shard(self._path.name, self.size, size, self._hash.hexdigest())

    def close(self) -> None:
        """Delete the file if it was not finished."""
        self._file.close()
        self._temporary_path.unlink(missing_ok=True)


class _SplitFiles:
    """Files of a split while they are written."""

    def __init__(self, directory: Path, name: SplitName, dtype: str, stack: ExitStack) -> None:
        self.tokens = _ColumnFile(directory / f"{name}-00000.bin", dtype)
        self.loss_mask = _ColumnFile(directory / f"{name}-00000.learned", "uint8")
        self.index = _ColumnFile(directory / f"{name}-00000.documents", "int64")
        self.bytes = 0
        for column in (self.tokens, self.loss_mask, self.index):
            stack.callback(column.close)

    def append(self, line: _Line, text: str, encoded: EncodedConversation) -> None:
        self.tokens.append(encoded.tokens)
        self.loss_mask.append(encoded.loss_mask)
        self.index.append(np.array([self.tokens.size, line.fragment_index, line.number]))
        self.bytes += len(text.encode("utf-8", "replace"))

    def finish(self) -> Split:
        documents = self.index.size // 3
        shards = [self.tokens.finish()]
        columns = (self.loss_mask.finish(), self.index.finish())
        return Split(documents, self.bytes, self.tokens.size, shards, *columns)


def _build_store(
    directory: Path,
    fragments: list[FileFragment],
    survey: _Survey,
    section: DataSection,
    encoder: ChatEncoder,
    report: Report,
) -> Manifest:
    entries = required_vocab_size(encoder.tokenizer)
    dtype = token_dtype(entries)
    frequency = np.zeros(entries, np.int64)
    invalid_lines = _InvalidLines(section.path, *["not renderable as tokens"] * 2)
    has_inseparable_turns = False
    with ExitStack() as stack:
        train, validation = (_SplitFiles(directory, name, dtype, stack) for name in SPLITS)
        batch: list[tuple[_Line, list[tuple[str, list[range]]]]] = []

        def flush() -> None:
            encoded = iter(
                encoder.encode([conversation for _, rendered in batch for conversation in rendered])
            )
            for line, rendered in batch:
                conversations = [next(encoded) for _ in rendered]
                if not all(conversation.loss_mask[1:].any() for conversation in conversations):
                    invalid_lines.add(
                        fragments[line.fragment_index],
                        line.number,
                        "the rendered text has no assistant token",
                    )
                    continue
                split = validation if line.hash <= survey.validation_threshold else train
                for (text, _), conversation in zip(rendered, conversations, strict=True):
                    split.append(line, text, conversation)
                    if split is train:
                        tokens = conversation.tokens[1:][conversation.loss_mask[1:]]
                        frequency[:] += np.bincount(tokens, minlength=entries)
            batch.clear()

        for count, line in enumerate(_reread_lines(fragments, survey, section.has_preferences), 1):
            try:
                batch.append(
                    (line, [encoder.render_with_spans(example) for example in line.examples])
                )
            except InvalidConversation as error:
                has_inseparable_turns |= str(error).startswith(INSEPARABLE_TURNS)
                invalid_lines.add(fragments[line.fragment_index], line.number, str(error))
            if len(batch) == BATCH_LINES:
                flush()
                report(Progress("tokenizing the conversations", count, len(survey.hashes)))
        flush()
        remedy = (
            TURNS_REMEDY
            if has_inseparable_turns
            else f"repair these lines, or the template {encoder.template.path}"
        )
        invalid_lines.raise_any(remedy)
        write_durably(directory / TOKENIZER_FILE, section.tokenizer_path.read_bytes())
        write_durably(directory / TEMPLATE_FILE, encoder.template.sources["default"].encode())
        separator = find_separator(encoder.tokenizer, section.tokenizer)
        write_durably(directory / RECORD_FILE, format_record(separator, False).encode())
        write_durably(
            directory / TOKENIZER_CONFIG_FILE,
            json.dumps(dict(encoder.template.special_tokens)).encode(),
        )
        return Manifest(
            format=FORMAT,
            key=directory.name,
            source=section.path,
            dtype=dtype,
            vocab_size=entries,
            separator=separator,
            tokenizer_hash=encoder.hash,
            unigram_entropy_nats=entropy_nats(frequency),
            skipped_files=0,
            replaced_files=0,
            train=train.finish(),
            validation=validation.finish(),
            kind=section.format,
            files=[_fragment_name(fragment) for fragment in fragments],
        )
