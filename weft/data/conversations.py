"""Conversations: lines or rows, rendered and tokenized once, with a loss mask.

weft reads the lines twice.  The first reading validates every line, so that all errors are known
within seconds, and selects the validation set: the lines with the lowest hashes.  So one more line
hardly changes the selection, and copies are in the same split.  The second reading renders,
tokenizes and appends each line to the files of its split; after an interruption it starts again.
"""

from __future__ import annotations

import json
import math
import os
from array import array
from base64 import b64decode, b64encode
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
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
from weft.data.prepared_cache import Progress, Report, progress_counter
from weft.data.records import InvalidRecord, read_lines
from weft.data.row_audit import RowAudit
from weft.data.shared_preparation import SharedWork, load_or_scan, map_units
from weft.data.source import SourceRef, changed_error, path_error
from weft.data.token_shards import BuiltSplits, Corpus, Encoder, entropy_nats
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
)
from weft.data.workers import Advance

BATCH_LINES = 1024  # rendered, then tokenized together on all cores
UNSPLIT_BYTES = 1 << 62  # fragment size: files are not split
LAYOUT_VERSION = 5  # of a store's files, and of how lines are read; part of its cache key


@dataclass(frozen=True)
class ConversationCorpus(Corpus):
    """Validated conversations.

    Attributes:
        hashes: hash of each line, uint64 (lines,).
        validation_threshold: lines with hashes up to it are in the validation set; -1: none.
        has_weights: a line has a weight that is neither 0 nor 1.
    """

    section: DataSection
    chat: ChatEncoder
    fragments: list[FileFragment]
    hashes: NDArray[np.uint64]
    validation_threshold: int
    has_weights: bool

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
        names = [_fragment_name(fragment) for fragment in self.fragments]
        return [settings, [names, xxh3_128_hexdigest(self.hashes.data)]]

    def build(
        self, directory: Path, encoder: Encoder, report: Report, shared: SharedWork | None = None
    ) -> BuiltSplits:
        """Render and tokenize every line; reject those that give no trained token."""
        frequency = np.zeros(encoder.vocab_size, np.int64)
        audit, form = RowAudit(self.chat), row_format(self.section)
        for fragment in {each.file: each for each in self.fragments}.values():
            audit.add_columns(list_unread_columns(fragment, form.columns), fragment.file.name)
        invalid_lines = _InvalidLines()
        with ExitStack() as stack:
            train, validation = (
                _SplitFiles(directory, name, encoder.dtype, self.section, self.has_weights, stack)
                for name in SPLITS
            )
            for line, rendered, encoded, label in self._encode_lines(invalid_lines, audit, report):
                is_validation = line.hash <= self.validation_threshold
                split = validation if is_validation else train
                split.append(line, rendered.text, encoded, label)
                if not is_validation:
                    trained = encoded.tokens[1:][encoded.loss_mask[1:]]
                    frequency += np.bincount(trained, minlength=len(frequency))
            template = self.chat.template
            is_inseparable = any(INSEPARABLE_TURNS in line for line in invalid_lines.shown)
            remedy = f"repair these lines, or the template {template.path}"
            remedy = TURNS_REMEDY if is_inseparable else remedy
            description = "not renderable as tokens"
            invalid_lines.raise_any(self.section.path, description, description, remedy)
            write_durably(directory / TEMPLATE_FILE, template.sources["default"].encode())
            special = json.dumps(dict(template.special_tokens))
            write_durably(directory / TOKENIZER_CONFIG_FILE, special.encode())
            names = [_fragment_name(fragment) for fragment in self.fragments]
            return BuiltSplits(
                train.finish(),
                validation.finish(),
                encoder.dtype,
                entropy_nats(frequency),
                names,
                notes=audit.notes(len(self.hashes) - len(np.unique(self.hashes))),
            )

    def _encode_lines(
        self, invalid_lines: _InvalidLines, audit: RowAudit, report: Report
    ) -> Iterator[tuple[_RenderedLine, Rendered, EncodedConversation, bool | None]]:
        """Yield each example with its line, text and label; omit lines that are invalid."""
        lines = self._render_lines(invalid_lines, audit)
        count = 0
        while batch := list(islice(lines, BATCH_LINES)):
            count += len(batch)
            report(Progress("tokenizing the conversations", count, len(self.hashes)))
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
                    invalid_lines.add(where, reason)
                    continue
                for rendered, each, label in zip(
                    line.rendered, conversations, line.labels, strict=True
                ):
                    audit.add(rendered, each, where)
                    yield line, rendered, each, label
            batch.clear()  # before the next one is read

    def _locate(self, line: _RenderedLine) -> str:
        return f"{_fragment_name(self.fragments[line.fragment_index])}:{line.number}"

    def _render_lines(
        self, invalid_lines: _InvalidLines, audit: RowAudit
    ) -> Iterator[_RenderedLine]:
        """Read every line again, and render its conversations; no texts: it is invalid.

        Raises:
            InvalidConfig: a file has changed.
        """
        hashes = map(int, self.hashes)
        form = row_format(self.section)
        for index, fragment in enumerate(self.fragments):
            for number, data in read_lines(fragment, form.columns):
                digest = next(hashes, -1)
                if isinstance(data, InvalidRecord) or digest != xxh3_64_intdigest(data.strip()):
                    raise changed_error(fragment.file)
                line = _RenderedLine(index, number, digest, [], [])
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
                    invalid_lines.add(where, str(error))
                    line.rendered.clear()
                    line.labels.clear()
                yield line
        if next(hashes, -1) >= 0:
            raise changed_error(self.fragments[-1].file)

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
    fragment_index: int
    number: int
    hash: int
    rendered: list[Rendered]
    labels: list[bool | None]


@dataclass
class ConversationScan:
    """Result of validating the lines of a fragment.

    ``hashes``: of each line, uint64 as base64; ``has_weights``: see `ConversationCorpus`.
    """

    hashes: str
    has_weights: bool
    invalid_lines: _InvalidLines


def read_conversation_corpus(
    section: DataSection, source: SourceRef, chat: ChatEncoder, cache: Path, report: Report
) -> ConversationCorpus:
    """Validate and hash every line.

    The result is cached only if ``cache`` is in an object store.

    Raises:
        InvalidConfig: lines are not conversations (all are listed), or there are too few.
    """
    fragments = list_fragments(section.path, source, UNSPLIT_BYTES, None)
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
    invalid_lines = _InvalidLines()
    for each in scans:
        invalid_lines.extend(each.invalid_lines)
    nouns = {"preferences": "preference", "unpaired": "labeled answer"}
    noun = nouns.get(section.format, "conversation")
    remedy = "repair or remove these lines"
    invalid_lines.raise_any(section.path, f"not a {noun}", f"not {noun}s", remedy)
    has_weights = any(each.has_weights for each in scans)
    line_hashes = np.frombuffer(b"".join(b64decode(each.hashes) for each in scans), np.uint64)
    distinct = np.unique(line_hashes)
    if not len(distinct):
        raise path_error(section.path, "has no conversation", "give rows of conversations")
    if section.validation_fraction == 0:
        return ConversationCorpus(section, chat, fragments, line_hashes, -1, has_weights)
    if len(distinct) < 2:
        rule = "has fewer than two conversations: one for training, one for validation"
        remedy = "give more conversations, or data.validation_path, or data.validation_fraction=0"
        raise path_error(section.path, rule, remedy)
    num_validation = math.ceil(section.validation_fraction * len(distinct))
    threshold = distinct[min(len(distinct) - 1, num_validation) - 1]
    return ConversationCorpus(section, chat, fragments, line_hashes, int(threshold), has_weights)


def _scan_fragment(fragment: FileFragment, form: RowFormat, advance: Advance) -> ConversationScan:
    hashes, has_weights, invalid_lines = array("Q"), False, _InvalidLines()
    for number, line in read_lines(fragment, form.columns):
        where = f"{_fragment_name(fragment)}:{number}"
        if isinstance(line, InvalidRecord):
            invalid_lines.add(where, line.reason)
            continue
        hashes.append(xxh3_64_intdigest(line.strip()))
        try:
            examples = parse_line(line, form)
            has_weights |= any(example.has_fractions for example in examples)
        except InvalidConversation as error:
            invalid_lines.add(where, str(error))
    advance(fragment.size_bytes)
    return ConversationScan(b64encode(hashes).decode(), has_weights, invalid_lines)


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

    def extend(self, other: _InvalidLines) -> None:
        for reason, where in other.first_lines.items():
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
        self._path, self._dtype = path, dtype
        self._temporary_path = path.with_name(path.name + ".tmp")
        self._file = self._temporary_path.open("wb")
        self._hash, self.size = xxh3_128(), 0
        self._blocks, self._block, self._block_size = "", xxh3_64(), 0

    def append(self, values: NDArray[Any]) -> None:
        data = np.ascontiguousarray(values, self._dtype).data.cast("B")
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
        self.index.append(np.array([self.tokens.size, line.fragment_index, line.number]))
        self.bytes += len(text.encode("utf-8", "replace"))

    def finish(self) -> Split:
        documents = self.index.size // 3
        shards = [self.tokens.finish()]
        weights = None if self.weights is None else self.weights.finish()
        labels = None if self.labels is None else self.labels.finish()
        columns = (self.loss_mask.finish(), self.index.finish(), weights, labels)
        return Split(documents, self.bytes, self.tokens.size, shards, *columns)


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
