"""Preparing a store of conversations: tokenised once, with what of them is learned.

The lines (or rows) are read twice.  The first time every one is looked at, so that all that is
wrong with the files is known within seconds, and the held-out conversations are chosen: those with
the lowest hashes, so that one more line hardly changes the choice, and copies stay on the same
side.  The second time they are written by the template, tokenised and appended to the files of
their split.  ``store.json`` comes last; what a killed attempt leaves is no store, and is removed by
the next.
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
    CANNOT_BE_CUT,
    COLUMNS,
    CUT_REMEDY,
    Encoded,
    Example,
    Malformed,
    Template,
    Writer,
    load_template,
    parse,
)
from weft.data.dataset import Dataset, single, write_mixture
from weft.data.document_tokens import RECORD, record_of
from weft.data.prepared_cache import (
    Progress,
    Report,
    cache_problems,
    counting,
    noting,
    open_given,
    prepared_once,
    refuse,
)
from weft.data.records import Fault, Unit, lines, record_units
from weft.data.source import SourceRef, look
from weft.data.source_files import changed
from weft.data.token_shards import entropy_nats
from weft.data.token_store import (
    FORMAT,
    SPLITS,
    TEMPLATE_FILE,
    TOKENIZER_FILE,
    TOKENS_FILE,
    Manifest,
    Shard,
    Split,
    SplitName,
    Store,
    is_store,
    token_dtype,
)
from weft.data.tokenizer import separator_id, vocab_entries

BATCH_LINES = 1024  # written by the template, and then tokenised over all cores
WHOLE = 1 << 62  # bytes of a unit: files are not cut
LAYOUT = 2  # of the files of a store, in the name of its folder


def prepare_conversations(
    section: DataSection, cache: Path, progress: Report | None = None
) -> Dataset:
    """What ``section`` wants a run to train on, prepared now unless it was before.

    Of a mixture, sources may also be prepared stores of the same tokenizer, of text, too.

    Raises:
        InvalidConfig: every problem of the tokenizer and the template at once; then every line that is
            no conversation; then every one that the template cannot write.
    """
    report = progress or (lambda _: None)
    writer = _writer(section)
    if not section.mixture:
        return single(_store(section, writer, cache, report))
    problems: list[ConfigError] = []
    stores = []
    for path in section.mixture:
        with noting(problems, mixture=True):
            one = section.model_copy(update={"path": path})
            stores.append(_store(one, writer, cache, report))
    refuse(problems)
    with cache_problems(cache):
        return write_mixture(section.mixture, stores, cache / "mixtures")


def check_chat(section: DataSection) -> list[ConfigError]:
    """What is wrong with tokenizer, template and files, found without reading conversations."""
    if section.format == "text":
        return []
    problems: list[ConfigError] = []
    with noting(problems):
        _writer(section)
    for path in section.mixture or [section.path]:
        with noting(problems, mixture=bool(section.mixture)):
            if not is_store(path):
                _look(path)
    return problems


def _writer(section: DataSection) -> Writer:
    key, path = "data.tokenizer", section.tokenizer
    if path == "train":
        rule = "is for text; conversations need one that has the tokens of a chat template"
        remedy = "give the tokenizer.json of the model, with its chat template beside it"
        raise InvalidConfig([ConfigError(key, path, rule, remedy)])
    template: Template | None = None
    problems: list[ConfigError] = []
    with noting(problems):
        template = load_template(section)
    with noting(problems):
        writer = Writer(path, template or Template({}, {}, ""))
        separator_id(writer.tokenizer, path)
    refuse(problems)
    return writer


def _look(path: str) -> SourceRef:
    """What there is at a path, which must be of lines or rows."""
    found = look(path)
    if found.kind in ("text", "tokens"):
        rule = "holds no conversations, or other files beside them"
        remedy = "give .jsonl, .jsonl.gz, .jsonl.zst, .parquet or .arrow, a glob of such, or hf://"
        raise InvalidConfig([ConfigError("data.path", path, rule, remedy)])
    return found


def _store(section: DataSection, writer: Writer, cache: Path, report: Report) -> Store:
    path = section.path
    if is_store(path):
        store = open_given(section, writer.hash, cache, report)
        if (section.format == "preferences") != (store.manifest.kind == "preferences"):
            rule = f"is a store of {store.manifest.kind}, not of {section.format}"
            raise InvalidConfig([ConfigError("data.path", path, rule, "use another data.format")])
        return store
    units = record_units(path, _look(path), WHOLE, None)
    survey = _survey(units, section, report)
    template = [dict(writer.template.sources), dict(writer.template.special)]
    separator = separator_id(writer.tokenizer, section.tokenizer)
    settings = [
        FORMAT,
        LAYOUT,
        section.format,
        section.validation_fraction,
        writer.hash,
        template,
        separator,
    ]

    def build(folder: Path) -> Manifest:
        return _build(folder, units, survey, section, writer, report)

    return prepared_once(cache, [settings, survey.content], report, build)


class _Survey(NamedTuple):
    """What the first reading found: names and contents; the hash of each line."""

    content: list[object]
    hashes: NDArray[np.uint64]
    held: np.uint64  # from this hash downwards a line is held out


def _survey(units: list[Unit], section: DataSection, report: Report) -> _Survey:
    total_bytes = sum(unit.size_bytes for unit in units)
    advance = counting(report, "reading the conversations", total_bytes)
    preferences = section.format == "preferences"
    wrong = _Wrong(section.path, "no preference" if preferences else "no conversation")
    hashes = array("Q")
    for unit in units:
        for number, line in lines(unit, COLUMNS):
            if isinstance(line, Fault):
                wrong.add(unit, number, line.what)
                continue
            hashes.append(xxh3_64_intdigest(line.strip()))
            try:
                parse(line, preferences)
            except Malformed as error:
                wrong.add(unit, number, str(error))
        advance(unit.size_bytes)
    wrong.raise_any("mend or remove these lines")
    every = np.array(hashes, np.uint64)
    distinct = np.unique(every)
    if len(distinct) < 2:
        rule = "has fewer than two conversations: one to train on, and one to hold out"
        raise InvalidConfig([ConfigError("data.path", section.path, rule, "give more")])
    held = distinct[
        min(len(distinct) - 1, math.ceil(section.validation_fraction * len(distinct))) - 1
    ]
    content: list[object] = [[_name(unit) for unit in units], xxh3_128_hexdigest(every.data)]
    return _Survey(content, every, held)


def _name(unit: Unit) -> str:
    """Of a unit, of which a file is one, and a data set on the hub has several."""
    parts = unit.kind == "hub" and unit.end > 1
    return f"{unit.file.name}, part {unit.begin}" if parts else unit.file.name


class _Wrong:
    """Lines that something is wrong with: the first few, and how many there are."""

    def __init__(self, path: str, what: str) -> None:
        self.path, self.what = path, what
        self.count, self.shown = 0, list[str]()

    def add(self, unit: Unit, number: int, why: str) -> None:
        self.count += 1
        if len(self.shown) < SHOWN:
            self.shown.append(f"{_name(unit)}:{number}: {why}")

    def raise_any(self, remedy: str) -> None:
        if not self.count:
            return
        count = "a line is" if self.count == 1 else f"{self.count} lines are"
        rule = f"{count} {self.what}:\n  " + truncate_list(self.shown, "\n  ", self.count)
        raise InvalidConfig([ConfigError("data.path", self.path, rule, remedy)])


# --------------------------------------------------------------------------- building


class _Line(NamedTuple):
    unit: int
    number: int
    hash: np.uint64
    examples: list[Example]


def _lines(units: list[Unit], survey: _Survey, preferences: bool) -> Iterator[_Line]:
    """Every line again.

    Raises:
        InvalidConfig: a file is no longer what it was.
    """
    place = 0
    for index, unit in enumerate(units):
        for number, line in lines(unit, COLUMNS):
            known = survey.hashes[place : place + 1].tolist()
            if isinstance(line, Fault) or known != [xxh3_64_intdigest(line.strip())]:
                raise changed(unit.file)
            yield _Line(index, number, survey.hashes[place], parse(line, preferences))
            place += 1
    if place != len(survey.hashes):
        raise changed(units[-1].file)


class _Column:
    """A file of numbers that is written piece by piece, and has its name only when it is whole."""

    def __init__(self, path: Path, dtype: str) -> None:
        self._path, self._dtype = path, dtype
        self._temporary = path.with_name(path.name + ".tmp")
        self._file = self._temporary.open("wb")
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
        os.replace(self._temporary, self._path)
        return Shard(self._path.name, self.size, size, self._hash.hexdigest())

    def close(self) -> None:
        """Nothing is left of what was not finished."""
        self._file.close()
        self._temporary.unlink(missing_ok=True)


class _SplitFiles:
    """The files of one split while they are written."""

    def __init__(self, folder: Path, name: SplitName, dtype: str, stack: ExitStack) -> None:
        self.tokens = _Column(folder / f"{name}-00000.bin", dtype)
        self.learned = _Column(folder / f"{name}-00000.learned", "uint8")
        self.index = _Column(folder / f"{name}-00000.documents", "int64")
        self.bytes = 0
        for column in (self.tokens, self.learned, self.index):
            stack.callback(column.close)

    def append(self, line: _Line, text: str, encoded: Encoded) -> None:
        self.tokens.append(encoded.tokens)
        self.learned.append(encoded.learned)
        self.index.append(np.array([self.tokens.size, line.unit, line.number]))
        self.bytes += len(text.encode("utf-8", "replace"))

    def finish(self) -> Split:
        documents = self.index.size // 3
        shards = [self.tokens.finish()]
        columns = (self.learned.finish(), self.index.finish())
        return Split(documents, self.bytes, self.tokens.size, shards, *columns)


def _build(
    folder: Path,
    units: list[Unit],
    survey: _Survey,
    section: DataSection,
    writer: Writer,
    report: Report,
) -> Manifest:
    entries = vocab_entries(writer.tokenizer)
    dtype = token_dtype(entries)
    frequency = np.zeros(entries, np.int64)
    wrong = _Wrong(section.path, "not to be written as tokens")
    uncut = False
    with ExitStack() as stack:
        train, validation = (_SplitFiles(folder, name, dtype, stack) for name in SPLITS)
        batch: list[tuple[_Line, list[tuple[str, list[range]]]]] = []

        def flush() -> None:
            encoded = iter(writer.encode([each for _, written in batch for each in written]))
            for line, written in batch:
                found = [next(encoded) for _ in written]
                if not all(each.learned[1:].any() for each in found):
                    wrong.add(units[line.unit], line.number, "no token of the assistant's is there")
                    continue
                split = validation if line.hash <= survey.held else train
                for (text, _), each in zip(written, found, strict=True):
                    split.append(line, text, each)
                    if split is train:
                        tokens = each.tokens[1:][each.learned[1:]]
                        frequency[:] += np.bincount(tokens, minlength=entries)
            batch.clear()

        for place, line in enumerate(_lines(units, survey, section.format == "preferences"), 1):
            try:
                batch.append((line, [writer.write(example) for example in line.examples]))
            except Malformed as error:
                uncut |= str(error).startswith(CANNOT_BE_CUT)
                wrong.add(units[line.unit], line.number, str(error))
            if len(batch) == BATCH_LINES:
                flush()
                report(Progress("tokenising the conversations", place, len(survey.hashes)))
        flush()
        remedy = (
            CUT_REMEDY if uncut else f"mend these lines, or the template {writer.template.place}"
        )
        wrong.raise_any(remedy)
        write_durably(folder / TOKENIZER_FILE, Path(section.tokenizer).expanduser().read_bytes())
        write_durably(folder / TEMPLATE_FILE, writer.template.sources["default"].encode())
        separator = separator_id(writer.tokenizer, section.tokenizer)
        write_durably(folder / RECORD, record_of(separator, False).encode())
        write_durably(folder / TOKENS_FILE, json.dumps(dict(writer.template.special)).encode())
        return Manifest(
            format=FORMAT,
            key=folder.name,
            source=section.path,
            dtype=dtype,
            vocab_size=entries,
            separator=separator,
            tokenizer_hash=writer.hash,
            unigram_entropy_nats=entropy_nats(frequency),
            skipped_files=0,
            replaced_files=0,
            train=train.finish(),
            validation=validation.finish(),
            kind=section.format,
            files=[_name(unit) for unit in units],
        )
