"""Read documents from JSON Lines, Parquet and Arrow files, and from datasets.

A *fragment* is a part of a file that one process can open and read: a byte range of plain lines,
Parquet row groups, rows of a dataset, or a complete compressed file.  Reading a fragment yields its
documents in order, each with its line or row, counted from 1 inside the fragment.  An invalid line
yields an `InvalidRecord`, so that one reading finds all of them.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, BinaryIO, Literal, NamedTuple

from weft.config.errors import ConfigError, InvalidConfig, suggest
from weft.data.hub import open_hub_dataset, open_saved_dataset, read_hub_rows, read_saved_rows
from weft.data.source import SourceRef
from weft.data.source_files import (
    DecompressionError,
    File,
    decompress_stream,
    detect_format,
    is_compressed,
    max_content_bytes,
    open_file,
    unreadable_error,
)
from weft.data.user_source import read_user_rows, user_function_file

MAX_LINE_BYTES = 256 << 20  # a longer line would need several times its size in memory
DECODE_BYTES = 4 << 20  # approximate size of rows that are decoded together

Kind = Literal["jsonl", "parquet", "arrow", "disk", "hub", "own"]
Invalid = Literal["error", "replace", "skip"]


@dataclass(frozen=True)
class FileFragment:
    """Part of a file that one process reads.

    ``begin`` and ``end`` are bytes of plain lines, or row groups, rows or shards; ``size_bytes`` is
    approximate.
    """

    file: File
    kind: Kind
    begin: int
    end: int
    size_bytes: int

    @property
    def record_noun(self) -> str:
        """Noun for one document of the file, for messages."""
        return "line" if self.kind == "jsonl" else "row"


class InvalidRecord(NamedTuple):
    """Reason why a line or row is not a document; if fatal, reading stops."""

    number: int
    reason: str
    is_fatal: bool = False


class Document(NamedTuple):
    """UTF-8 text of a line or row; None if it is not UTF-8 and must be skipped."""

    number: int
    data: bytes | None
    has_replacements: bool = False


# --------------------------------------------------------------------------- fragments


def split_file(file: File, kind: Kind, size: int) -> list[FileFragment]:
    """Split a file into fragments of about ``size`` bytes, if its format allows.

    Raises:
        InvalidConfig: the file cannot be opened, or does not match its suffix.
    """
    if kind == "parquet":
        return _split_parquet(file, size)
    if kind == "jsonl" and not is_compressed(file.name):
        offsets = [*range(0, file.size_bytes, size), file.size_bytes]
        return [
            FileFragment(file, kind, begin, end, end - begin) for begin, end in pairwise(offsets)
        ]
    return [FileFragment(file, kind, 0, 0, file.size_bytes)]


def detect_kind(file: File) -> Kind:
    """Return the kind of a file of records."""
    kind = detect_format(file.name, explicit=True)
    assert kind is not None
    assert kind != "tokens"
    return kind


def list_fragments(
    path: str, source: SourceRef, size: int, column: str | None
) -> list[FileFragment]:
    """Split a source into fragments of about ``size`` bytes, if its format allows.

    Args:
        path: ``data.path``.
        source: the files at the path.
        size: bytes of a fragment; a format that cannot be split gives one per file.
        column: required column of datasets; None: not yet known.

    Raises:
        InvalidConfig: a file cannot be opened, does not match its suffix, or lacks the column.
    """
    if source.kind == "saved":
        file, rows = open_saved_dataset(path, column)
        rows_per_fragment = max(1, rows * size // max(file.size_bytes, 1))
        return [
            FileFragment(file, "disk", begin, end, file.size_bytes * (end - begin) // rows)
            for begin, end in pairwise([*range(0, rows, rows_per_fragment), rows])
        ]
    if source.kind == "hub":
        file, num_shards = open_hub_dataset(path, column)
        return [
            FileFragment(file, "hub", shard_index, num_shards, 0)
            for shard_index in range(num_shards)
        ]
    if source.kind == "own":
        return [FileFragment(user_function_file(path), "own", 0, 0, 0)]
    fragments: list[FileFragment] = []
    problems: list[ConfigError] = []
    for file in source.files:
        try:
            fragments += split_file(file, detect_kind(file), size)
        except InvalidConfig as invalid:
            problems += invalid.problems
    if problems:
        raise InvalidConfig(problems)
    return fragments


def _split_parquet(file: File, size: int) -> list[FileFragment]:
    fragments = []
    with open_file(file) as stream:
        metadata = _open_parquet(file, stream).metadata
        _check_footer(file, metadata)
        begin = size_bytes = 0
        for group in range(metadata.num_row_groups):
            size_bytes += metadata.row_group(group).total_byte_size
            if size_bytes >= size or group == metadata.num_row_groups - 1:
                fragments.append(FileFragment(file, "parquet", begin, group + 1, size_bytes))
                begin, size_bytes = group + 1, 0
    return fragments


# --------------------------------------------------------------------------- reading


def read_documents(
    fragment: FileFragment, field: str, invalid: Invalid, skip_rows: int = 0
) -> Iterator[Document | InvalidRecord]:
    """Yield the documents of a fragment after the first ``skip_rows`` lines or rows.

    Raises:
        InvalidConfig: the file cannot be read, does not match its suffix, or lacks the field.
    """
    if fragment.kind == "jsonl":
        with open_file(fragment.file) as stream:
            for number, line in _read_lines(fragment, stream, skip_rows):
                if isinstance(line, InvalidRecord):
                    yield line
                elif line.isspace():
                    yield Document(number, b"")
                else:
                    yield _parse_document(number, line, field, invalid)
        return
    number = skip_rows
    for data in _read_rows(fragment, field, skip_rows):
        number += 1
        yield _row_to_document(number, data, invalid)


def read_lines(
    fragment: FileFragment, columns: Sequence[str]
) -> Iterator[tuple[int, bytes | InvalidRecord]]:
    """Yield every line that is not blank; of rows, the existing ``columns`` as JSON.

    Raises:
        InvalidConfig: the file cannot be read, or does not match its suffix.
    """
    if fragment.kind == "jsonl":
        with open_file(fragment.file) as stream:
            for number, line in _read_lines(fragment, stream, 0):
                if isinstance(line, InvalidRecord) or not line.isspace():
                    yield number, line
        return
    rows: Iterable[dict[str, Any]] = (
        _read_mappings(fragment, columns, 0)
        if fragment.kind in ("hub", "own")
        else (row for table in _read_tables(fragment, columns, 0) for row in table.to_pylist())
    )
    for number, row in enumerate(rows, 1):
        try:
            yield number, json.dumps(row, ensure_ascii=False).encode("utf-8", "surrogatepass")
        except TypeError as error:
            yield number, InvalidRecord(number, f"is not JSON-serializable: {error}")


def _read_lines(
    fragment: FileFragment, stream: BinaryIO, skip_rows: int
) -> Iterator[tuple[int, bytes]] | Iterator[tuple[int, InvalidRecord]]:
    """Yield the lines that begin in the fragment, with their numbers.

    Raises:
        InvalidConfig: reading fails.
    """
    compressed = is_compressed(fragment.file.name)
    number, offset = 0, fragment.begin
    try:
        if compressed:
            stream = decompress_stream(stream, fragment.file.name, fragment.file.size_bytes)
        elif fragment.begin:
            stream.seek(fragment.begin - 1)
            offset -= 1
            while offset < fragment.end:  # a line that begins before the fragment
                data = stream.readline(MAX_LINE_BYTES)
                offset += len(data)
                if not data or data.endswith(b"\n"):
                    break
        while compressed or offset < fragment.end:
            line, size = _read_line(stream)
            if not size:
                break
            if offset == 0 and line.startswith(codecs.BOM_UTF8):
                line = line[3:]
            if offset == 0 and line.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
                yield 1, InvalidRecord(1, "the file is UTF-16, not UTF-8", is_fatal=True)
                return
            number += 1
            offset += size
            if size > MAX_LINE_BYTES:
                reason = f"is longer than {MAX_LINE_BYTES >> 20} MiB; use one line per document"
                yield number, InvalidRecord(number, reason, is_fatal=True)
                return
            if number > skip_rows:
                yield number, line
    except DecompressionError as error:
        yield number + 1, InvalidRecord(number + 1, str(error), is_fatal=True)
    except OSError as error:
        raise unreadable_error(fragment.file, error) from error


def _read_line(stream: BinaryIO) -> tuple[bytes, int]:
    """Return the next line and its size; no text if it exceeds `MAX_LINE_BYTES`."""
    parts: list[bytes] = []
    size = 0
    while size <= MAX_LINE_BYTES:
        part = stream.readline(min(MAX_LINE_BYTES + 1 - size, 1 << 20))
        parts.append(part)
        size += len(part)
        if not part or part.endswith(b"\n"):
            return (parts[0] if len(parts) == 1 else b"".join(parts)), size
    return b"", size


_decode = json.JSONDecoder().decode


def _parse_document(
    number: int, line: bytes, field: str, invalid: Invalid
) -> Document | InvalidRecord:
    replaced = False
    try:
        text = line.decode()
    except UnicodeDecodeError as error:
        if invalid == "skip":
            return Document(number, None)
        if invalid == "error":
            return InvalidRecord(number, f"byte {error.start}: not UTF-8")
        text, replaced = line.decode("utf-8", "replace"), True
    try:
        record = _decode(text)
    except json.JSONDecodeError as error:
        return InvalidRecord(number, f"is not JSON: {error.msg} at character {error.pos + 1}")
    except (ValueError, RecursionError) as error:
        return InvalidRecord(number, f"is not JSON: {error}")
    if not isinstance(record, dict):
        return InvalidRecord(
            number, f"is {_describe_type(record)}, not an object with a field {field!r}"
        )
    if field not in record:
        return InvalidRecord(number, f"has no field {field!r}; {_describe_fields(field, record)}")
    value = record[field]
    if value is None:
        return Document(number, b"")
    if not isinstance(value, str):
        return InvalidRecord(number, f"the field {field!r} is {_describe_type(value)}, not text")
    try:
        return Document(number, value.encode(), replaced)
    except UnicodeEncodeError as error:  # a lone surrogate
        if invalid == "skip":
            return Document(number, None)
        if invalid == "error":
            reason = f"character {error.start} of the field {field!r} is half a character"
            return InvalidRecord(number, reason)
        repaired = value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        return Document(number, repaired.encode(), True)


def _row_to_document(number: int, data: bytes | None, invalid: Invalid) -> Document | InvalidRecord:
    if not data:
        return Document(number, b"")
    try:
        data.decode()
    except UnicodeDecodeError as error:
        if invalid == "skip":
            return Document(number, None)
        if invalid == "error":
            return InvalidRecord(number, f"byte {error.start}: not UTF-8")
        return Document(number, data.decode("utf-8", "replace").encode(), True)
    return Document(number, data)


def _describe_type(value: object) -> str:
    names = {dict: "an object", list: "a list", str: "text", bool: "true or false"}
    return names.get(type(value), "null" if value is None else "a number")


def _describe_fields(field: str, record: dict[str, Any]) -> str:
    suggestion = suggest(field, record)
    return (
        suggestion
        if suggestion.startswith("did")
        else f"it has {', '.join(list(record)[:8]) or 'none'}"
    )


# --------------------------------------------------------------------------- rows


def _read_rows(fragment: FileFragment, field: str, skip_rows: int) -> Iterator[bytes | None]:
    """Yield the field of each row after the first ``skip_rows``."""
    if fragment.kind not in ("hub", "own"):
        for table in _read_tables(fragment, [field], skip_rows):
            yield from _column_to_bytes(table.column(field), fragment, field)
        return
    location = f" of shard {fragment.begin}" if fragment.kind == "hub" else ""
    for number, row in enumerate(_read_mappings(fragment, [field], skip_rows), skip_rows + 1):
        text = row.get(field)
        if text is not None and not isinstance(text, str):
            rule = f"has no text in the column {field!r} of row {number}{location}"
            raise _path_error(fragment.file, rule)
        yield None if text is None else text.encode("utf-8", "surrogatepass")


def _read_mappings(
    fragment: FileFragment, columns: Sequence[str], skip_rows: int
) -> Iterator[dict[str, Any]]:
    """Yield rows one by one, with the columns that exist."""
    if fragment.kind == "hub":
        return read_hub_rows(fragment.file, columns, fragment.begin, fragment.end, skip_rows)
    return read_user_rows(fragment.file, columns, skip_rows)


def _read_tables(fragment: FileFragment, columns: Sequence[str], skip_rows: int) -> Iterator[Any]:
    """Yield rows as pyarrow tables or batches, with the columns that exist."""
    if fragment.kind == "disk":
        yield from read_saved_rows(fragment.file, columns, fragment.begin + skip_rows, fragment.end)
        return
    with open_file(fragment.file) as stream:
        read = _read_parquet if fragment.kind == "parquet" else _read_arrow
        for table in _limit_tables(fragment, read(fragment, stream, columns)):
            if skip_rows < len(table):
                yield table.slice(skip_rows)
            skip_rows = max(0, skip_rows - len(table))


def _limit_tables(fragment: FileFragment, tables: Iterable[Any]) -> Iterator[Any]:
    """Yield tables, up to the limit for a file of that size.

    Raises:
        InvalidConfig: the tables exceed `max_content_bytes`.
    """
    import pyarrow.compute as pc

    limit = max_content_bytes(fragment.file.size_bytes)
    remaining = limit
    for table in tables:
        for column in table.columns:
            lengths = _text_lengths(column)
            if lengths is None:
                remaining -= column.nbytes
            else:
                indices = getattr(column, "indices", None)
                sizes = lengths if indices is None else lengths.take(indices)
                remaining -= pc.sum(sizes).as_py() or 0
        if remaining < 0:
            rule = f"holds more than {limit:,} bytes in {fragment.file.size_bytes:,} bytes of file"
            raise _path_error(fragment.file, f"{rule}: a decompression bomb")
        yield table


def _column_to_bytes(column: Any, fragment: FileFragment, field: str) -> Iterator[bytes | None]:
    """Yield a text column (a pyarrow array, chunked or not) as bytes."""
    import pyarrow as pa

    text_type = column.type.value_type if pa.types.is_dictionary(column.type) else column.type
    is_text_type = (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view)
    if not any(is_type(text_type) for is_type in is_text_type):
        raise _path_error(fragment.file, f"has {text_type} in the column {field!r}, not text")
    if text_type != column.type:
        column = column.cast(text_type)
    # Bytes, because data.invalid_utf8 decides about invalid UTF-8.
    yield from column.cast(pa.large_binary()).to_pylist()


def _check_footer(file: File, metadata: Any) -> None:
    """Reject a Parquet file that declares columns far larger than their stored size.

    Raises:
        InvalidConfig: a size is negative, or exceeds `max_content_bytes` of the stored size.
    """
    for group in range(metadata.num_row_groups):
        row_group = metadata.row_group(group)
        sizes = [row_group.num_rows, row_group.total_byte_size]
        for number in range(row_group.num_columns):
            column = row_group.column(number)
            stored, content = column.total_compressed_size, column.total_uncompressed_size
            sizes += [stored, content]
            if content > max_content_bytes(min(stored, file.size_bytes)):
                rule = (
                    f"declares {content:,} bytes of {column.path_in_schema} in {stored:,} stored "
                    f"bytes (row group {group + 1}): a decompression bomb"
                )
                raise _path_error(file, rule)
        if min(sizes) < 0:
            raise _path_error(file, f"is damaged: row group {group + 1} has a negative size")


def _open_parquet(file: File, stream: BinaryIO, columns: Sequence[str] = ()) -> Any:
    pa = _import_pyarrow(file)
    import pyarrow.parquet as pq

    try:
        metadata = pq.read_metadata(stream)
        leaf_columns = {metadata.schema.column(index).path for index in range(metadata.num_columns)}
        # Repeated texts are stored once.
        text_columns = [name for name in columns if name in leaf_columns]
        return pq.ParquetFile(stream, metadata=metadata, read_dictionary=text_columns)
    except (pa.ArrowException, OSError) as error:
        raise _path_error(file, f"is not a Parquet file: {error}") from error


def _read_parquet(
    fragment: FileFragment, stream: BinaryIO, columns: Sequence[str]
) -> Iterator[Any]:
    import pyarrow as pa

    parquet = _open_parquet(fragment.file, stream, columns)
    names = _select_columns(fragment.file, columns, parquet.schema_arrow.names)
    groups = range(fragment.begin, fragment.end)
    rows = sum(parquet.metadata.row_group(group).num_rows for group in groups)
    batch_rows = max(1, min(4096, DECODE_BYTES * rows // max(1, fragment.size_bytes)))
    try:
        batches = parquet.iter_batches(batch_rows, row_groups=list(groups), columns=names)
        yield from _slice_batches(batches)
    except (pa.ArrowException, OSError) as error:
        raise _path_error(fragment.file, f"is damaged: {error}") from error


def _slice_batches(batches: Iterable[Any]) -> Iterator[Any]:
    """Yield batches in slices of a few megabytes (as Python objects), or one row.

    Raises:
        pyarrow.ArrowException: offsets or indices point outside a batch.
    """
    import pyarrow.compute as pc

    for batch in batches:
        longest = 1
        for column in batch.columns:
            _validate_column(column)
            lengths = _text_lengths(column)
            if lengths is not None:
                longest = max(longest, pc.max(lengths).as_py() or 0)
        rows = max(1, DECODE_BYTES // longest)
        for first in range(0, len(batch), rows):
            yield batch.slice(first, rows)


def _validate_column(column: Any) -> None:
    """Validate offsets and indices of an array, but not the encoding of its texts."""
    import pyarrow as pa

    plain = {pa.string(): pa.binary(), pa.large_string(): pa.large_binary()}
    if pa.types.is_dictionary(column.type):
        _validate_column(column.dictionary)
        if column.dictionary.type in plain:
            texts = column.dictionary.view(plain[column.dictionary.type])
            column = pa.DictionaryArray.from_arrays(column.indices, texts, safe=False)
    elif column.type in plain:
        column = column.view(plain[column.type])
    column.validate(full=True)


def _text_lengths(column: Any) -> Any:
    """Return the bytes of each text of an array or its dictionary; None: no texts."""
    import pyarrow as pa
    import pyarrow.compute as pc

    values = getattr(column, "dictionary", column)
    texts = (pa.string(), pa.large_string(), pa.binary(), pa.large_binary())
    return pc.binary_length(values) if values.type in texts else None


def _read_arrow(fragment: FileFragment, stream: BinaryIO, columns: Sequence[str]) -> Iterator[Any]:
    """Read a file (Feather), or a stream, which is the format of `datasets`."""
    pa = _import_pyarrow(fragment.file)
    try:
        try:
            file = pa.ipc.open_file(stream)
            names = _select_columns(fragment.file, columns, file.schema.names)
            for index in range(file.num_record_batches):
                yield from _slice_batches([file.get_batch(index).select(names)])
        except pa.ArrowInvalid:
            stream.seek(0)
            reader = pa.ipc.open_stream(stream)
            names = _select_columns(fragment.file, columns, reader.schema.names)
            for batch in reader:
                yield from _slice_batches([batch.select(names)])
    except (pa.ArrowException, OSError) as error:
        raise _path_error(fragment.file, f"is not an Arrow file, or damaged: {error}") from error


def _select_columns(file: File, columns: Sequence[str], names: Sequence[str]) -> list[str]:
    """Return the columns that exist in a file, at least one."""
    existing = [column for column in columns if column in names]
    if not existing:
        options = " or ".join(map(repr, columns))
        raise _path_error(
            file, f"has no column {options}; {_describe_fields(columns[0], dict.fromkeys(names))}"
        )
    return existing


def _import_pyarrow(file: File) -> Any:
    try:
        import pyarrow as pa

        return pa
    except ImportError as error:
        rule, remedy = "needs pyarrow, which is not installed", "run pip install 'weft[data]'"
        raise InvalidConfig([ConfigError("data.path", file.path, rule, remedy)]) from error


def _path_error(file: File, rule: str) -> InvalidConfig:
    remedy = (
        "set data.text_field to the column that holds the text"
        if "column" in rule
        else "replace it"
    )
    return InvalidConfig([ConfigError("data.path", file.path, rule, remedy)])
