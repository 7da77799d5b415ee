"""Read documents and conversations from the lines and rows of a source.

Reading a fragment yields its records in order, each with its line or row, counted from 1 inside the
fragment.  An invalid line yields an `InvalidRecord`, so that one reading finds all of them.
"""

from __future__ import annotations

import codecs
import csv
import io
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, BinaryIO, Literal, NamedTuple

from weft.data.fragments import (
    FileFragment,
    describe_fields,
    find_field,
    read_tables,
    read_text_column,
    read_user_rows,
    table_error,
)
from weft.data.source import (
    DecompressionError,
    decompress_stream,
    is_compressed,
    is_table_text,
    open_file,
    unreadable_error,
)

MAX_LINE_BYTES = 256 << 20  # a longer line would need several times its size in memory

Invalid = Literal["error", "replace", "skip"]


class InvalidRecord(NamedTuple):
    """Reason why a line or row is not a document; if fatal, reading stops.

    ``text_fields``: the fields with text of a row without the wanted one.
    """

    number: int
    reason: str
    is_fatal: bool = False
    text_fields: tuple[str, ...] = ()


class Document(NamedTuple):
    """UTF-8 text of a line or row; None if it is not UTF-8 and must be skipped."""

    number: int
    data: bytes | None
    has_replacements: bool = False


def read_documents(
    fragment: FileFragment, field: str, invalid: Invalid
) -> Iterator[Document | InvalidRecord]:
    """Yield the documents of a fragment.

    Raises:
        InvalidConfig: the file cannot be read, does not match its suffix, or lacks the field.
    """
    if fragment.kind == "jsonl":
        for number, line in _read_lines(fragment):
            if isinstance(line, InvalidRecord):
                yield line
            elif line.isspace():
                yield Document(number, b"")
            else:
                yield _parse_document(number, line, field, invalid)
        return
    read = _read_user_texts if fragment.kind == "own" else read_text_column
    for number, data in enumerate(read(fragment, field), 1):
        yield _row_to_document(number, data, invalid)


def read_lines(
    fragment: FileFragment, columns: Sequence[str]
) -> Iterator[tuple[int, bytes | InvalidRecord]]:
    """Yield every line, also blank ones; of rows, the existing ``columns`` as JSON.

    Raises:
        InvalidConfig: the file cannot be read, or does not match its suffix.
    """
    if fragment.kind == "jsonl":
        yield from _read_lines(fragment)
        return
    rows: Iterable[dict[str, Any] | UnicodeDecodeError] = (
        read_user_rows(fragment.file, columns)
        if fragment.kind == "own"
        else _read_table_rows(fragment, columns)
    )
    for number, row in enumerate(rows, 1):
        try:
            if isinstance(row, UnicodeDecodeError):
                yield number, InvalidRecord(number, f"is not UTF-8 (byte {row.start} of a text)")
            else:
                yield number, json.dumps(row, ensure_ascii=False).encode("utf-8", "surrogatepass")
        except TypeError as error:
            yield number, InvalidRecord(number, f"is not JSON-serializable: {error}")


def _read_table_rows(
    fragment: FileFragment, columns: Sequence[str]
) -> Iterator[dict[str, Any] | UnicodeDecodeError]:
    """Yield rows with the columns that exist; an error: a text is not UTF-8."""
    for table in read_tables(fragment, columns):
        try:
            yield from map(drop_nulls, table.to_pylist())
        except UnicodeDecodeError:
            for number in range(len(table)):
                try:
                    yield from map(drop_nulls, table.slice(number, 1).to_pylist())
                except UnicodeDecodeError as error:
                    yield error


def drop_nulls(value: Any) -> Any:
    """Return a row of a table without the fields of null, at every level.

    A struct of a table has the fields of all rows, so that most of them are null in a row.
    """
    if isinstance(value, dict):
        return {name: drop_nulls(each) for name, each in value.items() if each is not None}
    if isinstance(value, list):
        return [drop_nulls(each) for each in value]
    return value


# --------------------------------------------------------------------------- lines


def _read_lines(fragment: FileFragment) -> Iterator[tuple[int, bytes | InvalidRecord]]:
    """Yield the lines that begin in the fragment, with their numbers.

    Raises:
        InvalidConfig: reading fails.
    """
    compressed = is_compressed(fragment.file.name)
    number, offset = 0, fragment.begin
    with open_file(fragment.file) as stream:
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
            if is_table_text(fragment.file.name):
                rows = _read_table_text(stream, fragment.file.name.lower())
                if rows is not None:
                    yield from rows
                    return
            while compressed or offset < fragment.end:
                line, size = _read_line(stream)
                if not size:
                    break
                number += 1
                if offset == 0 and line.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
                    yield 1, InvalidRecord(1, "the file is UTF-16, not UTF-8", is_fatal=True)
                    return
                if offset == 0:
                    line = line.removeprefix(codecs.BOM_UTF8)
                offset += size
                if size > MAX_LINE_BYTES:
                    reason = f"is longer than {MAX_LINE_BYTES >> 20} MiB; use one line per document"
                    yield number, InvalidRecord(number, reason, is_fatal=True)
                    return
                yield number, line
        except DecompressionError as error:
            yield number + 1, InvalidRecord(number + 1, str(error), is_fatal=True)
        except OSError as error:
            raise unreadable_error(fragment.file, error) from error


def _read_table_text(
    stream: BinaryIO, name: str
) -> Iterator[tuple[int, bytes | InvalidRecord]] | None:
    """Return the rows of an array or of CSV as lines of JSON; None: they are lines.

    Rows of an array are numbered from 1; those of CSV have the number of their line.
    """
    if re.search(r"\.json\b", name):
        start = stream.peek(64).removeprefix(codecs.BOM_UTF8).lstrip()  # type: ignore[attr-defined]
        return _read_array(stream) if start.startswith(b"[") else None
    return _read_csv(stream, "\t" if ".tsv" in name else ",")


def _read_array(stream: BinaryIO) -> Iterator[tuple[int, bytes | InvalidRecord]]:
    """Yield the elements of a JSON array, decoded one by one."""
    number = 1
    try:
        text = stream.read().decode("utf-8-sig")
        decoder, space = json.JSONDecoder(), re.compile(r"[\s,]*")
        begin = space.match(text, text.index("[") + 1).end()  # type: ignore[union-attr]
        while text[begin : begin + 1] not in ("]", ""):
            _, end = decoder.raw_decode(text, begin)
            element = text[begin:end].encode("utf-8", "surrogatepass")
            yield number, element.replace(b"\n", b" ").replace(b"\r", b" ")
            begin = space.match(text, end).end()  # type: ignore[union-attr]
            number += 1
        if not text[begin:]:
            yield number, InvalidRecord(number, "the array has no end", is_fatal=True)
    except UnicodeDecodeError as error:
        yield number, InvalidRecord(number, f"byte {error.start}: not UTF-8", is_fatal=True)
    except (ValueError, RecursionError) as error:
        yield number, InvalidRecord(number, f"is not JSON: {error}", is_fatal=True)


def _read_csv(stream: BinaryIO, delimiter: str) -> Iterator[tuple[int, bytes | InvalidRecord]]:
    """Yield the rows of a table with a header, as objects."""
    csv.field_size_limit(MAX_LINE_BYTES)
    reader = csv.DictReader(
        io.TextIOWrapper(stream, "utf-8-sig", newline=""), delimiter=delimiter, strict=True
    )
    number = 1
    try:
        for row in reader:
            number = reader.line_num
            if None in row or None in row.values():
                rule = (
                    f"has another number of fields than the header ({len(reader.fieldnames or [])})"
                )
                yield number, InvalidRecord(number, rule)
            else:
                yield number, json.dumps(row, ensure_ascii=False).encode("utf-8", "surrogatepass")
    except UnicodeDecodeError as error:
        yield number, InvalidRecord(number, f"byte {error.start}: not UTF-8", is_fatal=True)
    except csv.Error as error:
        yield number + 1, InvalidRecord(number + 1, f"is not CSV: {error}", is_fatal=True)


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


def _text_fields(record: Mapping[str, Any]) -> Iterator[str]:
    """Yield the fields with text, and those one level below: ``doc.text``."""
    for name, value in record.items():
        inner = value if isinstance(value, dict) else {}
        yield from [name] if isinstance(value, str) else []
        yield from (f"{name}.{each}" for each, text in inner.items() if isinstance(text, str))


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
    try:
        value = find_field(record, field)
    except KeyError:
        reason = f"has no field {field!r}; {describe_fields(field, record)}"
        return InvalidRecord(number, reason, text_fields=tuple(_text_fields(record)))
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


def _describe_type(value: object) -> str:
    names = {dict: "an object", list: "a list", str: "text", bool: "true or false"}
    return names.get(type(value), "null" if value is None else "a number")


# --------------------------------------------------------------------------- rows


def _read_user_texts(fragment: FileFragment, field: str) -> Iterator[bytes | None]:
    for number, row in enumerate(read_user_rows(fragment.file, [field]), 1):
        text = row[field]
        if text is not None and not isinstance(text, str):
            raise table_error(fragment.file, f"has no text in the column {field!r} of row {number}")
        yield None if text is None else text.encode("utf-8", "surrogatepass")


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
