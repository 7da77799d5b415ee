"""Conversations: lines or rows, rendered and tokenized once, with a loss mask.

weft reads the lines twice.  The first reading validates every line, so that all errors are known
within seconds, and selects the validation set: the lines with the lowest hashes.  So one more line
hardly changes the selection, and copies are in the same split.  The second reading renders,
tokenizes and appends each line to the files of its split; after an interruption it starts again.

Both are done by fragments of the files.  In an object store they are the units of the workers, each
of which puts its part of each file; one worker then appends the parts.
"""

from __future__ import annotations

import json
import math
import os
from array import array
from base64 import b64decode, b64encode
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import TypeAdapter
from xxhash import xxh3_64, xxh3_64_intdigest, xxh3_128, xxh3_128_hexdigest

from weft.config.errors import SHOWN, ConfigError, truncate_list
from weft.config.files import write_durably
from weft.config.schema import DataSection
from weft.config.storage import is_remote
from weft.data.chat import ChatEncoder, EncodedConversation
from weft.data.chat_rows import (
    Example,
    InvalidConversation,
    RowFormat,
    parse_line,
    parse_row,
    read_row,
)
from weft.data.chat_turns import INSEPARABLE_TURNS, TURNS_REMEDY, Rendered
from weft.data.document_tokens import find_separator
from weft.data.fragments import FileFragment, list_fragments, list_unread_columns
from weft.data.packing import select_conversations
from weft.data.prepared_cache import Report, progress_counter
from weft.data.records import InvalidRecord, read_lines
from weft.data.row_audit import Findings, RowAudit
from weft.data.shared_preparation import SharedWork, load_or_scan, map_units, put_object
from weft.data.source import SourceRef, changed_error, path_error
from weft.data.token_shards import COUNT_TOKENS, BuiltSplits, Corpus, Encoder, entropy_nats
from weft.data.token_store import (
    BLOCK_BYTES,
    FORMAT,
    SPLITS,
    TEMPLATE_FILE,
    TOKENIZER_CONFIG_FILE,
    Shard,
    Split,
    SplitName,
    Store,
    map_shard,
)
from weft.data.workers import Advance, ignore_progress

BATCH_LINES = 1024  # rendered, then tokenized together on all cores
FRAGMENT_BYTES = 32 << 20
LAYOUT_VERSION = 5  # of a store's files, and of how lines are read; part of its cache key


class Lines(NamedTuple):
    """Lines of a fragment.

    Attributes:
        file_number: of its file in `ConversationCorpus.names`.
        num_before: lines of the file before the fragment.
        hashes: of each line that is not blank, uint64 (lines,).
    """

    fragment: FileFragment
    file_number: int
    num_before: int
    hashes: NDArray[np.uint64]


@dataclass(frozen=True)
class ConversationCorpus(Corpus):
    """Validated conversations.

    Attributes:
        names: of the files.
        lines: of each fragment.
        validation_threshold: lines with hashes up to it are in the validation set; -1: none.
        has_weights: a line has a weight that is neither 0 nor 1.
    """

    section: DataSection
    chat: ChatEncoder
    names: list[str]
    lines: list[Lines]
    validation_threshold: int
    has_weights: bool

    @property
    def hashes(self) -> NDArray[np.uint64]:
        """Hash of each line, uint64 (lines,)."""
        return np.concatenate([each.hashes for each in self.lines])

    @property
    def cache_key(self) -> object:
        """Files, lines, template and settings that determine the store, as JSON types."""
        template = [dict(self.chat.template.sources), dict(self.chat.template.special_tokens)]
        settings = [
            FORMAT,
            LAYOUT_VERSION,
            self.section.format,
            self.section.validation_fraction,
            self.chat.hash,
            template,
            find_separator(self.chat.tokenizer, self.section.tokenizer),
            sorted(self.chat.end_tokens),
            *(self.section.chat_template_args, self.section.train_turns),
            *(self.section.train_empty_reasoning, self.section.fields, self.section.roles),
        ]
        return [settings, [self.names, xxh3_128_hexdigest(self.hashes.data)]]

    def build(
        self, directory: Path, encoder: Encoder, report: Report, shared: SharedWork | None = None
    ) -> BuiltSplits:
        """Render and tokenize every line; reject those that give no trained token."""
        sizes = [each.fragment.size_bytes for each in self.lines]
        advance = progress_counter(report, "tokenizing the conversations", sum(sizes))
        if shared is None:
            with self._open_files(directory, encoder) as files:
                encoded = [self._encode(lines, files, advance) for lines in self.lines]
                return self._finish(directory, files, encoded, encoder)
        directory_of_parts = shared.directory / "parts"

        def encode(number: int, advance: Advance) -> EncodedPart:
            with (
                TemporaryDirectory(prefix="weft-prepare-") as scratch,
                self._open_files(Path(scratch), encoder) as files,
            ):
                part = self._encode(self.lines[number], files, advance)
                part.splits = [each.finish() for each in files]
                for file in Path(scratch).iterdir():
                    put_object(directory_of_parts / f"{number:06d}-{file.name}", file.read_bytes())
            return part

        def merge(parts: list[EncodedPart], advance: Advance) -> BuiltSplits:
            with (
                TemporaryDirectory(prefix="weft-prepare-") as scratch,
                self._open_files(Path(scratch), encoder) as files,
            ):
                for number, part in enumerate(parts):
                    for split_files, split in zip(files, part.splits, strict=True):
                        split_files.append_part(directory_of_parts, f"{number:06d}-", split)
                built = self._finish(Path(scratch), files, parts, encoder)
                for file in sorted(Path(scratch).iterdir()):
                    put_object(directory / file.name, file.read_bytes())
            return built

        numbers = range(len(self.lines))
        parts = map_units(shared, "tokens", encode, numbers, sizes, EncodedPart, advance, 1)
        [built] = map_units(shared, "merge", merge, [parts], [0], BuiltSplits, ignore_progress, 1)
        return built

    @contextmanager
    def _open_files(self, directory: Path, encoder: Encoder) -> Iterator[list[_SplitFiles]]:
        with ExitStack() as stack:
            yield [
                _SplitFiles(directory, name, encoder.dtype, self.section, self.has_weights, stack)
                for name in SPLITS
            ]

    def _encode(self, lines: Lines, files: Sequence[_SplitFiles], advance: Advance) -> EncodedPart:
        """Append the lines of a fragment to the files of their split."""
        part, audit = EncodedPart(), RowAudit(self.chat)
        for line, rendered, encoded, label in self._encode_lines(lines, part, audit, advance):
            is_validation = line.hash <= self.validation_threshold
            files[is_validation].append(line, rendered.text, encoded, label)
        part.findings = audit.found
        return part

    def _finish(
        self,
        directory: Path,
        files: Sequence[_SplitFiles],
        parts: Sequence[EncodedPart],
        encoder: Encoder,
    ) -> BuiltSplits:
        """Finish the files in a local directory, to which all lines have been appended.

        Raises:
            InvalidConfig: lines are invalid.
        """
        audit, form = RowAudit(self.chat), row_format(self.section)
        for fragment in {each.fragment.file: each.fragment for each in self.lines}.values():
            audit.add_columns(list_unread_columns(fragment, form.columns), fragment.file.name)
        invalid_lines = _InvalidLines()
        for part in parts:
            invalid_lines.extend(part.invalid_lines)
            audit.found.extend(part.findings)
        template = self.chat.template
        is_inseparable = any(INSEPARABLE_TURNS in line for line in invalid_lines.shown)
        remedy = f"repair these lines, or the template {template.path}"
        remedy = TURNS_REMEDY if is_inseparable else remedy
        description = "not renderable as tokens"
        invalid_lines.raise_any(self.section.path, description, description, remedy)
        write_durably(directory / TEMPLATE_FILE, template.sources["default"].encode())
        special = json.dumps(dict(template.special_tokens))
        write_durably(directory / TOKENIZER_CONFIG_FILE, special.encode())
        train, validation = (each.finish() for each in files)
        hashes = self.hashes
        return BuiltSplits(
            train,
            validation,
            encoder.dtype,
            entropy_nats(_count_trained(directory, train, encoder)),
            self.names,
            notes=audit.notes(len(hashes) - len(np.unique(hashes))),
        )

    def _encode_lines(
        self, lines: Lines, part: EncodedPart, audit: RowAudit, advance: Advance
    ) -> Iterator[tuple[_RenderedLine, Rendered, EncodedConversation, bool | None]]:
        """Yield each example with its line, text and label; omit lines that are invalid."""
        rendered_lines = self._render_lines(lines, part, audit)
        size, count, done = lines.fragment.size_bytes, 0, 0
        while batch := list(islice(rendered_lines, BATCH_LINES)):
            encoded = iter(self.chat.encode([each for line in batch for each in line.rendered]))
            for line in batch:
                conversations = [next(encoded) for _ in line.rendered]
                where = self._locate(line)
                reason = ""
                if not all(each.loss_mask[1:].any() for each in conversations):
                    reason = "the rendered text has no assistant token"
                elif self.section.has_preferences and _has_equal(conversations):
                    reason = "chosen and rejected are equal after the chat template"
                if reason:
                    part.invalid_lines.add(where, reason)
                    continue
                for rendered, each, label in zip(
                    line.rendered, conversations, line.labels, strict=True
                ):
                    audit.add(rendered, each, where)
                    yield line, rendered, each, label
            count += len(batch)
            advance(size * count // len(lines.hashes) - done)
            done = size * count // len(lines.hashes)
            batch.clear()  # before the next one is read

    def _locate(self, line: _RenderedLine) -> str:
        return f"{self.names[line.file_number]}:{line.number}"

    def _render_lines(
        self, lines: Lines, part: EncodedPart, audit: RowAudit
    ) -> Iterator[_RenderedLine]:
        """Read every line again, and render its conversations; no texts: it is invalid.

        Raises:
            InvalidConfig: a file has changed.
        """
        hashes = map(int, lines.hashes)
        form = row_format(self.section)
        for number, data in _read_conversations(lines.fragment, form):
            digest = next(hashes, -1)
            if isinstance(data, InvalidRecord) or digest != xxh3_64_intdigest(data.strip()):
                raise changed_error(lines.fragment.file)
            line = _RenderedLine(lines.file_number, lines.num_before + number, digest, [], [])
            where = self._locate(line)
            try:
                row = read_row(data, form)
                examples = parse_row(row)
                audit.add_row(row, examples, where)
                for example in examples:
                    audit.check(example, where)
                    rendered = self._render(example)
                    line.rendered.extend(rendered)
                    line.labels.extend([example.label] * len(rendered))
            except InvalidConversation as error:
                part.invalid_lines.add(where, str(error))
                line.rendered.clear()
                line.labels.clear()
            yield line
        if next(hashes, -1) >= 0:
            raise changed_error(lines.fragment.file)

    def _render(self, example: Example) -> list[Rendered]:
        """Render an example: as one text, or as one per trained turn.

        Raises:
            InvalidConversation: the template refuses it, or it would separate a preference.
        """
        rendered = self.chat.render(example)
        if len(rendered) > 1 and self.section.compares_answers:
            rule = "has an answer of several turns, which the chat template renders one by one"
            raise InvalidConversation(f"{rule}; data.train_turns=last compares the last one")
        return rendered


def _has_equal(conversations: list[EncodedConversation]) -> bool:
    return len({each.tokens.tobytes() for each in conversations}) < len(conversations)


def row_format(section: DataSection) -> RowFormat:
    """Return how to read the rows of a source."""
    is_unpaired = section.format == "unpaired"
    return RowFormat(section.has_preferences, section.fields, section.roles, is_unpaired)


class _RenderedLine(NamedTuple):
    file_number: int
    number: int
    hash: int
    rendered: list[Rendered]
    labels: list[bool | None]


@dataclass
class EncodedPart:
    """Result of encoding the lines of a fragment; ``splits`` are those of shared work."""

    invalid_lines: _InvalidLines = field(default_factory=lambda: _InvalidLines())
    findings: Findings = field(default_factory=Findings)
    splits: list[Split] = field(default_factory=list)


@dataclass
class ConversationScan:
    """Result of validating the lines of a fragment.

    ``hashes``: of each line that is not blank, uint64 as base64; ``has_weights``: see
    `ConversationCorpus`; ``is_fatal``: the numbers of later lines of the file are unknown.
    """

    hashes: str = ""
    num_lines: int = 0
    has_weights: bool = False
    is_fatal: bool = False
    invalid_lines: _InvalidLines = field(default_factory=lambda: _InvalidLines())


def read_conversation_corpus(
    section: DataSection, source: SourceRef, chat: ChatEncoder, cache: Path, report: Report
) -> ConversationCorpus:
    """Validate and hash every line.

    The result is cached only if ``cache`` is in an object store.

    Raises:
        InvalidConfig: lines are not conversations (all are listed), or there are too few.
    """
    fragments = list_fragments(section.path, source, FRAGMENT_BYTES, None)
    sizes = [fragment.size_bytes for fragment in fragments]
    advance = progress_counter(report, "reading the conversations", sum(sizes))
    form = row_format(section)

    def scan_fragment(fragment: FileFragment, advance: Advance) -> ConversationScan:
        return _scan_fragment(fragment, form, advance)

    def scan(shared: SharedWork | None) -> list[ConversationScan]:
        return map_units(
            *(shared, "scan", scan_fragment, fragments, sizes, ConversationScan, advance), 1
        )

    if is_remote(cache):
        identity = [[*each.file.identity, each.begin, each.end] for each in fragments]
        key = [LAYOUT_VERSION, asdict(form), identity]
        adapter = TypeAdapter(list[ConversationScan])
        scans = load_or_scan(cache, key, adapter, scan, section.path, report)
    else:
        scans = scan(None)
    names = list(dict.fromkeys(map(_fragment_name, fragments)))
    lines, invalid_lines, num_lines, fatal = [], _InvalidLines(), Counter[str](), set[str]()
    for fragment, each in zip(fragments, scans, strict=True):
        name = _fragment_name(fragment)
        if name in fatal:
            continue
        invalid_lines.extend(each.invalid_lines, f"{name}:", num_lines[name])
        hashes = np.frombuffer(b64decode(each.hashes), np.uint64)
        lines.append(Lines(fragment, names.index(name), num_lines[name], hashes))
        num_lines[name] += each.num_lines
        if each.is_fatal:
            fatal.add(name)
    nouns = {"preferences": "preference", "unpaired": "labeled answer"}
    noun = nouns.get(section.format, "conversation")
    remedy = "repair or remove these lines"
    invalid_lines.raise_any(section.path, f"not a {noun}", f"not {noun}s", remedy)
    has_weights = any(each.has_weights for each in scans)
    corpus = ConversationCorpus(section, chat, names, lines, -1, has_weights)
    distinct = np.unique(corpus.hashes) if lines else np.empty(0, np.uint64)
    if not len(distinct):
        raise path_error(section.path, "has no conversation", "give rows of conversations")
    if section.validation_fraction == 0:
        return corpus
    if len(distinct) < 2:
        rule = "has fewer than two conversations: one for training, one for validation"
        remedy = "give more conversations, or data.validation_path, or data.validation_fraction=0"
        raise path_error(section.path, rule, remedy)
    num_validation = math.ceil(section.validation_fraction * len(distinct))
    threshold = distinct[min(len(distinct) - 1, num_validation) - 1]
    return replace(corpus, validation_threshold=int(threshold))


def _scan_fragment(fragment: FileFragment, form: RowFormat, advance: Advance) -> ConversationScan:
    scan, hashes = ConversationScan(), array("Q")
    for number, line in read_lines(fragment, form.columns):
        scan.num_lines = number
        if isinstance(line, InvalidRecord):
            scan.invalid_lines.add(f"{number}", line.reason)
            scan.is_fatal |= line.is_fatal
        elif not line.isspace():
            hashes.append(xxh3_64_intdigest(line.strip()))
            try:
                examples = parse_line(line, form)
                scan.has_weights |= any(example.has_fractions for example in examples)
            except InvalidConversation as error:
                scan.invalid_lines.add(f"{number}", str(error))
    advance(fragment.size_bytes)
    scan.hashes = b64encode(hashes).decode()
    return scan


def _read_conversations(
    fragment: FileFragment, form: RowFormat
) -> Iterator[tuple[int, bytes | InvalidRecord]]:
    """Yield the lines that are not blank, with their numbers in the fragment."""
    for number, line in read_lines(fragment, form.columns):
        if isinstance(line, InvalidRecord) or not line.isspace():
            yield number, line


def _fragment_name(fragment: FileFragment) -> str:
    """Return the name of a file, or of one of several shards on the hub."""
    is_shard = fragment.kind == "hub" and fragment.end > 1
    return f"{fragment.file.name}, shard {fragment.begin}" if is_shard else fragment.file.name


@dataclass
class _InvalidLines:
    """Invalid lines: the first few reasons, each with its first line and their number."""

    count: int = 0
    num_others: int = 0
    first_lines: dict[str, str] = field(default_factory=dict)  # by reason
    counts: dict[str, int] = field(default_factory=dict)

    def add(self, where: str, reason: str, count: int = 1) -> None:
        self.count += count
        if reason not in self.first_lines and len(self.first_lines) == SHOWN:
            self.num_others += count
            return
        self.first_lines.setdefault(reason, where)
        self.counts[reason] = self.counts.get(reason, 0) + count

    def extend(self, other: _InvalidLines, prefix: str = "", num_before: int = 0) -> None:
        """Add invalid lines; with a prefix, theirs are numbers in a fragment."""
        for reason, line in other.first_lines.items():
            where = f"{prefix}{num_before + int(line)}" if prefix else line
            self.add(where, reason, other.counts[reason])
        self.count += other.num_others
        self.num_others += other.num_others

    @property
    def shown(self) -> list[str]:
        """A line of the first few reasons."""
        lines = []
        for reason, where in self.first_lines.items():
            more = self.counts[reason] - 1
            lines.append(f"{where}: {reason}" + (f" ({more} more such lines)" if more else ""))
        return lines

    def raise_any(self, path: str, description: str, plural: str, remedy: str) -> None:
        if self.count:
            rule = f"has {self.count} lines that are {plural}"
            if self.count == 1:
                rule = f"has a line that is {description}"
            lines = truncate_list(self.shown, "\n  ", len(self.first_lines) + self.num_others)
            raise path_error(path, f"{rule}:\n  {lines}", remedy)


# --------------------------------------------------------------------------- files


class _ColumnFile:
    """File of numbers, written in chunks, and renamed to its final name when complete."""

    def __init__(self, path: Path, dtype: str) -> None:
        self._path, self.dtype = path, dtype
        self._temporary_path = path.with_name(path.name + ".tmp")
        self._file = self._temporary_path.open("wb")
        self._hash, self.size = xxh3_128(), 0
        self._blocks, self._block, self._block_size = "", xxh3_64(), 0

    def append(self, values: NDArray[Any]) -> None:
        data = np.ascontiguousarray(values, self.dtype).reshape(-1).data.cast("B")
        self._file.write(data)
        self._hash.update(data)
        while len(data):
            part = data[: BLOCK_BYTES - self._block_size]
            self._block.update(part)
            self._block_size += len(part)
            data = data[len(part) :]
            if self._block_size == BLOCK_BYTES:
                self._finish_block()
        self.size += values.size

    def _finish_block(self) -> None:
        self._blocks += self._block.hexdigest()
        self._block, self._block_size = xxh3_64(), 0

    def finish(self) -> Shard:
        self._file.flush()
        os.fsync(self._file.fileno())
        size = self._file.tell()
        self._file.close()
        os.replace(self._temporary_path, self._path)
        if self._block_size:
            self._finish_block()
        digest = self._hash.hexdigest()
        return Shard(self._path.name, self.size, size, digest, block_xxh3=self._blocks)

    def close(self) -> None:
        """Delete the file if it was not finished."""
        self._file.close()
        self._temporary_path.unlink(missing_ok=True)


class _SplitFiles:
    """Files of a split while they are written."""

    def __init__(
        self,
        directory: Path,
        name: SplitName,
        dtype: str,
        section: DataSection,
        has_weights: bool,
        stack: ExitStack,
    ) -> None:
        self.tokens = _ColumnFile(directory / f"{name}-00000.bin", dtype)
        self.loss_mask = _ColumnFile(directory / f"{name}-00000.learned", "uint8")
        self.index = _ColumnFile(directory / f"{name}-00000.documents", "int64")
        self.weights = (
            _ColumnFile(directory / f"{name}-00000.weights", "float32") if has_weights else None
        )
        self.labels = (
            _ColumnFile(directory / f"{name}-00000.labels", "uint8")
            if section.format == "unpaired"
            else None
        )
        self.bytes = 0
        columns = (self.tokens, self.loss_mask, self.index, self.weights, self.labels)
        for column in filter(None, columns):
            stack.callback(column.close)

    def append(
        self, line: _RenderedLine, text: str, encoded: EncodedConversation, label: bool | None
    ) -> None:
        self.tokens.append(encoded.tokens)
        self.loss_mask.append(encoded.loss_mask)
        if self.weights is not None:
            self.weights.append(encoded.weights)
        if self.labels is not None:
            self.labels.append(np.array([bool(label)]))
        self.index.append(np.array([self.tokens.size, line.file_number, line.number]))
        self.bytes += len(text.encode("utf-8", "replace"))

    def append_part(self, directory: Path, prefix: str, split: Split) -> None:
        """Append the files of a part, whose names in a directory have a prefix."""

        def read(shard: Shard | None, dtype: str) -> NDArray[Any]:
            assert shard is not None
            return np.frombuffer((directory / f"{prefix}{shard.file}").read_bytes(), dtype)

        index = read(split.index, "int64").reshape(-1, 3)
        self.index.append(index + np.array([self.tokens.size, 0, 0]))
        self.tokens.append(read(split.shards[0], self.tokens.dtype))
        self.loss_mask.append(read(split.learned, "uint8"))
        if self.weights is not None:
            self.weights.append(read(split.weights, "float32"))
        if self.labels is not None:
            self.labels.append(read(split.labels, "uint8"))
        self.bytes += split.bytes

    def finish(self) -> Split:
        documents = self.index.size // 3
        shards = [self.tokens.finish()]
        weights = None if self.weights is None else self.weights.finish()
        labels = None if self.labels is None else self.labels.finish()
        columns = (self.loss_mask.finish(), self.index.finish(), weights, labels)
        return Split(documents, self.bytes, self.tokens.size, shards, *columns)


def _count_trained(directory: Path, split: Split, encoder: Encoder) -> NDArray[np.int64]:
    """Return how often each token is trained, int64 (vocab_size,)."""
    assert split.learned is not None
    assert split.index is not None
    tokens = map_shard(directory, encoder.dtype, split.shards[0])
    loss_mask = map_shard(directory, "uint8", split.learned)
    ends = map_shard(directory, "int64", split.index).reshape(-1, 3)[:, 0]
    frequency = np.zeros(encoder.vocab_size, np.int64)
    for begin in range(0, len(tokens), COUNT_TOKENS):
        is_trained = loss_mask[begin : begin + COUNT_TOKENS] > 0
        # The first token of a conversation is no target.
        firsts = np.append(0, ends)[np.searchsorted(np.append(0, ends), begin) :] - begin
        is_trained[firsts[firsts < len(is_trained)]] = False
        chunk = tokens[begin : begin + COUNT_TOKENS][is_trained]
        frequency += np.bincount(chunk, minlength=len(frequency))
    return frequency


def check_conversations(
    store: Store,
    seq_len: int,
    section: DataSection,
    use: SplitName = "train",
    scores: bool = False,
) -> list[ConfigError]:
    """Return the errors of a store of conversations; an empty list for text.

    Errors are a ``data.format`` other than the store's, conversations longer than ``train.seq_len``
    (by file and line), and splits without a usable conversation.  ``use`` is the split of the run
    that has the train split of the store.  ``scores``: the last token of a conversation is an
    input, too.
    """
    kind, names = store.manifest.kind, store.manifest.files
    if kind == "text":
        return []
    if section.is_text:
        rule = f"does not match the store {store.path}, which holds {kind}"
        return [ConfigError("data.format", "text", rule, f"use {kind}")]
    if kind in ("preferences", "unpaired") and section.overlong == "truncate":
        rule = "is not supported for preferences: a truncated answer cannot be compared"
        return [ConfigError("data.overlong", "truncate", rule, "use error or skip")]
    noun = {"preferences": "pairs", "unpaired": "answers"}.get(kind, "conversations")
    overlong = []
    for split in SPLITS:
        index = store.index(split)
        lengths = np.diff(index[:, 0], prepend=0) - (not scores)
        if kind == "preferences":
            index, lengths = index[::2], lengths.reshape(-1, 2).sum(1)
        too_long = np.flatnonzero(lengths > seq_len)
        overlong += [(*index[i, 1:].tolist(), int(lengths[i])) for i in too_long]
    if overlong and section.overlong == "error":
        overlong.sort()
        lines = [f"{names[file]}:{line}: {size} tokens" for file, line, size in overlong[:SHOWN]]
        longest = max(size for _, _, size in overlong)
        rule = f"is shorter than {len(overlong)} {noun}:\n  " + truncate_list(
            lines, "\n  ", len(overlong)
        )
        truncate = " or truncate" if kind == "chat" else ""
        remedy = f"use {longest}, or set data.overlong=skip{truncate}"
        return [ConfigError("train.seq_len", seq_len, rule, remedy)]
    for split in SPLITS:
        _, _, is_used = select_conversations(store, split, seq_len, section, scores)
        if not is_used.any() and (len(is_used) or split == "train"):
            name = use if split == "train" else split
            rule = f"is shorter than all {len(is_used)} {noun} of the {name} split"
            return [ConfigError("train.seq_len", seq_len, rule, "use a larger value")]
    return []
