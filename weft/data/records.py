"""Documents out of files that hold many: lines of JSON, rows of Parquet, Arrow and data sets.

A *unit* is a stretch of a file that a process can open and read by itself: a range of bytes of
plain lines, some row groups of Parquet, some rows of a data set, or all of a compressed file.
Reading one gives its documents in order, each with the line or row that it came from, counted
from 1 inside the unit; where a line is no document, there is a `Fault` in its place, so that one
reading finds all of them.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, BinaryIO, Literal, NamedTuple

from weft.config.errors import ConfigError, InvalidConfig, suggest
from weft.data.hub import hub_rows, hub_set, saved_rows, saved_set
from weft.data.source import SourceRef
from weft.data.source_files import (
    CutOff,
    File,
    decompressed,
    format_of,
    is_compressed,
    most_content,
    open_file,
    unreadable,
)
from weft.data.user_source import own_rows, own_set

LINE_BYTES = 256 << 20  # a longer line is none: it would be held whole, and several times over
ROWS_BYTES = 4 << 20  # of rows of Parquet that are decoded at a time, about

Kind = Literal["jsonl", "parquet", "arrow", "disk", "hub", "own"]
Invalid = Literal["error", "replace", "skip"]


@dataclass(frozen=True)
class Unit:
    """A stretch of a file: ``begin`` to ``end`` are bytes of plain lines, and else row groups,
    rows or parts; ``size_bytes`` is about what there is to read."""

    file: File
    kind: Kind
    begin: int
    end: int
    size_bytes: int

    @property
    def counts(self) -> str:
        return "line" if self.kind == "jsonl" else "row"


class Fault(NamedTuple):
    """Why a line or row is no document; ``last`` if nothing can be read after it."""

    number: int
    what: str
    last: bool = False


class Document(NamedTuple):
    """The text of a line or row in UTF-8, and whether something in it had to be replaced.

    None: it was not UTF-8 and is to be left out.
    """

    number: int
    data: bytes | None
    replaced: bool = False


# --------------------------------------------------------------------------- units


def units_of(file: File, kind: Kind, size: int) -> list[Unit]:
    """A file in units of about ``size`` bytes, as far as it can be cut.

    Raises:
        InvalidConfig: it cannot be opened, or is not what its name says.
    """
    if kind == "parquet":
        return _row_groups(file, size)
    if kind == "jsonl" and not is_compressed(file.name):
        borders = [*range(0, file.size_bytes, size), file.size_bytes]
        return [Unit(file, kind, begin, end, end - begin) for begin, end in pairwise(borders)]
    return [Unit(file, kind, 0, 0, file.size_bytes)]


def kind_of(file: File) -> Kind:
    """Of a file that is named, or lies in a folder of records."""
    found = format_of(file.name, alone=True)
    assert found is not None
    assert found != "tokens"
    return found


def record_units(path: str, found: SourceRef, size: int, field: str | None) -> list[Unit]:
    """What lies at a path, in units of about ``size`` bytes as far as it can be cut.

    Args:
        field: the column that data sets must have; None: it is not known yet.

    Raises:
        InvalidConfig: what cannot be opened, or is not what its name says, or lacks the column.
    """
    if found.kind == "saved":
        file, rows = saved_set(path, field)
        step = max(1, rows * size // max(file.size_bytes, 1))
        return [
            Unit(file, "disk", begin, end, file.size_bytes * (end - begin) // rows)
            for begin, end in pairwise([*range(0, rows, step), rows])
        ]
    if found.kind == "hub":
        file, parts = hub_set(path, field)
        return [Unit(file, "hub", part, parts, 0) for part in range(parts)]
    if found.kind == "own":
        return [Unit(own_set(path), "own", 0, 0, 0)]
    units: list[Unit] = []
    problems: list[ConfigError] = []
    for file in found.files:
        try:
            units += units_of(file, kind_of(file), size)
        except InvalidConfig as invalid:
            problems += invalid.problems
    if problems:
        raise InvalidConfig(problems)
    return units


def _row_groups(file: File, size: int) -> list[Unit]:
    units = []
    with open_file(file) as stream:
        about = _parquet(file, stream).metadata
        _check_footer(file, about)
        begin = held = 0
        for group in range(about.num_row_groups):
            held += about.row_group(group).total_byte_size
            if held >= size or group == about.num_row_groups - 1:
                units.append(Unit(file, "parquet", begin, group + 1, held))
                begin, held = group + 1, 0
    return units


# --------------------------------------------------------------------------- reading


def documents(
    unit: Unit, field: str, invalid: Invalid, after: int = 0
) -> Iterator[Document | Fault]:
    """What a unit holds, from the line or row after number ``after`` on.

    Raises:
        InvalidConfig: the file cannot be read, is not what its name says, or lacks the field.
    """
    if unit.kind == "jsonl":
        with open_file(unit.file) as stream:
            for number, line in _lines(unit, stream, after):
                if isinstance(line, Fault):
                    yield line
                elif line.isspace():
                    yield Document(number, b"")
                else:
                    yield _document(number, line, field, invalid)
        return
    number = after
    for data in _rows(unit, field, after):
        number += 1
        yield _row(number, data, invalid)


def lines(unit: Unit, columns: Sequence[str]) -> Iterator[tuple[int, bytes | Fault]]:
    """Every line that is not blank; of rows the ``columns`` that they have, as a line of JSON.

    Raises:
        InvalidConfig: the file cannot be read, or is not what its name says.
    """
    if unit.kind == "jsonl":
        with open_file(unit.file) as stream:
            for number, line in _lines(unit, stream, 0):
                if isinstance(line, Fault) or not line.isspace():
                    yield number, line
        return
    rows: Iterable[dict[str, Any]] = (
        _mappings(unit, columns, 0)
        if unit.kind in ("hub", "own")
        else (row for table in _tables(unit, columns, 0) for row in table.to_pylist())
    )
    for number, row in enumerate(rows, 1):
        try:
            yield number, json.dumps(row, ensure_ascii=False).encode("utf-8", "surrogatepass")
        except TypeError as error:
            yield number, Fault(number, f"is no JSON: {error}")


def _lines(
    unit: Unit, stream: BinaryIO, after: int
) -> Iterator[tuple[int, bytes]] | Iterator[tuple[int, Fault]]:
    """Lines that begin in the unit, with their numbers.

    Raises:
        InvalidConfig: the disk, or the store, fails while they are read.
    """
    whole = is_compressed(unit.file.name)
    number, place = 0, unit.begin
    try:
        if whole:
            stream = decompressed(stream, unit.file.name, unit.file.size_bytes)
        elif unit.begin:
            stream.seek(unit.begin - 1)
            place -= 1
            while place < unit.end:  # the rest of a line that begins before the unit
                part = stream.readline(LINE_BYTES)
                place += len(part)
                if not part or part.endswith(b"\n"):
                    break
        while whole or place < unit.end:
            line, size = _read_line(stream)
            if not size:
                break
            if place == 0 and line.startswith(codecs.BOM_UTF8):
                line = line[3:]
            if place == 0 and line.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
                yield 1, Fault(1, "the file is UTF-16, not UTF-8", last=True)
                return
            number += 1
            place += size
            if size > LINE_BYTES:
                what = f"is longer than {LINE_BYTES >> 20} MiB; is each document a line?"
                yield number, Fault(number, what, last=True)
                return
            if number > after:
                yield number, line
    except CutOff as error:
        yield number + 1, Fault(number + 1, str(error), last=True)
    except OSError as error:
        raise unreadable(unit.file, error) from error


def _read_line(stream: BinaryIO) -> tuple[bytes, int]:
    """Return the next line and its size; nothing of a line that is longer than `LINE_BYTES`."""
    parts: list[bytes] = []
    size = 0
    while size <= LINE_BYTES:
        part = stream.readline(min(LINE_BYTES + 1 - size, 1 << 20))
        parts.append(part)
        size += len(part)
        if not part or part.endswith(b"\n"):
            return (parts[0] if len(parts) == 1 else b"".join(parts)), size
    return b"", size


_decode = json.JSONDecoder().decode


def _document(number: int, line: bytes, field: str, invalid: Invalid) -> Document | Fault:
    replaced = False
    try:
        text = line.decode()
    except UnicodeDecodeError as error:
        if invalid == "skip":
            return Document(number, None)
        if invalid == "error":
            return Fault(number, f"byte {error.start}: not UTF-8")
        text, replaced = line.decode("utf-8", "replace"), True
    try:
        found = _decode(text)
    except json.JSONDecodeError as error:
        return Fault(number, f"is not JSON: {error.msg} at character {error.pos + 1}")
    except (ValueError, RecursionError) as error:
        return Fault(number, f"is not JSON: {error}")
    if not isinstance(found, dict):
        return Fault(number, f"is {_type(found)}, not an object with a field {field!r}")
    if field not in found:
        return Fault(number, f"has no field {field!r}; {_fields(field, found)}")
    value = found[field]
    if value is None:
        return Document(number, b"")
    if not isinstance(value, str):
        return Fault(number, f"the field {field!r} is {_type(value)}, not text")
    try:
        return Document(number, value.encode(), replaced)
    except UnicodeEncodeError as error:  # half a pair of \uD800 and its like
        if invalid == "skip":
            return Document(number, None)
        if invalid == "error":
            what = f"character {error.start} of the field {field!r} is half a character"
            return Fault(number, what)
        repaired = value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        return Document(number, repaired.encode(), True)


def _row(number: int, data: bytes | None, invalid: Invalid) -> Document | Fault:
    if not data:
        return Document(number, b"")
    try:
        data.decode()
    except UnicodeDecodeError as error:
        if invalid == "skip":
            return Document(number, None)
        if invalid == "error":
            return Fault(number, f"byte {error.start}: not UTF-8")
        return Document(number, data.decode("utf-8", "replace").encode(), True)
    return Document(number, data)


def _type(value: object) -> str:
    names = {dict: "an object", list: "a list", str: "text", bool: "true or false"}
    return names.get(type(value), "null" if value is None else "a number")


def _fields(field: str, found: dict[str, Any]) -> str:
    near = suggest(field, found)
    return near if near.startswith("did") else f"it has {', '.join(list(found)[:8]) or 'none'}"


# --------------------------------------------------------------------------- rows


def _rows(unit: Unit, field: str, after: int) -> Iterator[bytes | None]:
    """The fields of rows after the first ``after`` ones."""
    if unit.kind not in ("hub", "own"):
        for table in _tables(unit, [field], after):
            yield from _values(table.column(field), unit, field)
        return
    part = f" of part {unit.begin}" if unit.kind == "hub" else ""
    for number, row in enumerate(_mappings(unit, [field], after), after + 1):
        text = row.get(field)
        if text is not None and not isinstance(text, str):
            raise _wrong(unit.file, f"row {number}{part}: the column {field!r} is no text")
        yield None if text is None else text.encode("utf-8", "surrogatepass")


def _mappings(unit: Unit, columns: Sequence[str], after: int) -> Iterator[dict[str, Any]]:
    """Rows, which come one by one, with those of the columns that they have."""
    if unit.kind == "hub":
        return hub_rows(unit.file, columns, unit.begin, unit.end, after)
    return own_rows(unit.file, columns, after)


def _tables(unit: Unit, columns: Sequence[str], after: int) -> Iterator[Any]:
    """Rows as pyarrow's tables, or batches, with those of the columns that there are."""
    if unit.kind == "disk":
        yield from saved_rows(unit.file, columns, unit.begin + after, unit.end)
        return
    with open_file(unit.file) as stream:
        read = _parquet_tables if unit.kind == "parquet" else _arrow_tables
        for table in _limited(unit, read(unit, stream, columns)):
            if after < len(table):
                yield table.slice(after)
            after = max(0, after - len(table))


def _limited(unit: Unit, tables: Iterable[Any]) -> Iterator[Any]:
    """Yield tables until they hold more than a file of that size may.

    Raises:
        InvalidConfig: they do.
    """
    import pyarrow.compute as pc

    most = most_content(unit.file.size_bytes)
    left = most
    for table in tables:
        for column in table.columns:
            lengths = _lengths(column)
            if lengths is None:
                left -= column.nbytes
            else:
                indices = getattr(column, "indices", None)
                every = lengths if indices is None else lengths.take(indices)
                left -= pc.sum(every).as_py() or 0
        if left < 0:
            rule = f"holds more than {most:,} bytes in {unit.file.size_bytes:,} bytes of file"
            raise _wrong(unit.file, f"{rule}: a decompression bomb")
        yield table


def _values(column: Any, unit: Unit, field: str) -> Iterator[bytes | None]:
    """A column of text (pyarrow's array, chunked or not) as bytes."""
    import pyarrow as pa

    kind = column.type.value_type if pa.types.is_dictionary(column.type) else column.type
    texts = (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view)
    if not any(is_text(kind) for is_text in texts):
        raise _wrong(unit.file, f"the column {field!r} holds {kind}, not text")
    if kind != column.type:
        column = column.cast(kind)
    # As bytes: whether they are UTF-8 is for invalid_utf8 to judge, not for Python to fail at.
    yield from column.cast(pa.large_binary()).to_pylist()


def _check_footer(file: File, about: Any) -> None:
    """Refuse a Parquet file whose columns are declared as far larger than they are stored.

    Raises:
        InvalidConfig: a size is negative, or more than `most_content` of what is stored.
    """
    for group in range(about.num_row_groups):
        row_group = about.row_group(group)
        sizes = [row_group.num_rows, row_group.total_byte_size]
        for number in range(row_group.num_columns):
            column = row_group.column(number)
            stored, content = column.total_compressed_size, column.total_uncompressed_size
            sizes += [stored, content]
            if content > most_content(min(stored, file.size_bytes)):
                rule = (
                    f"row group {group + 1} declares {content:,} bytes of {column.path_in_schema} "
                    f"in {stored:,} stored bytes: a decompression bomb"
                )
                raise _wrong(file, rule)
        if min(sizes) < 0:
            raise _wrong(file, f"is damaged: row group {group + 1} has a negative size")


def _parquet(file: File, stream: BinaryIO, columns: Sequence[str] = ()) -> Any:
    pa = _pyarrow(file)
    import pyarrow.parquet as pq

    try:
        about = pq.read_metadata(stream)
        plain = {about.schema.column(place).path for place in range(about.num_columns)}
        # A text that comes again and again is held once.
        repeated = [name for name in columns if name in plain]
        return pq.ParquetFile(stream, metadata=about, read_dictionary=repeated)
    except (pa.ArrowException, OSError) as error:
        raise _wrong(file, f"is not a Parquet file: {error}") from error


def _parquet_tables(unit: Unit, stream: BinaryIO, columns: Sequence[str]) -> Iterator[Any]:
    import pyarrow as pa

    parquet = _parquet(unit.file, stream, columns)
    present = _present(unit.file, columns, parquet.schema_arrow.names)
    groups = range(unit.begin, unit.end)
    rows = sum(parquet.metadata.row_group(group).num_rows for group in groups)
    at_once = max(1, min(4096, ROWS_BYTES * rows // max(1, unit.size_bytes)))
    try:
        batches = parquet.iter_batches(at_once, row_groups=list(groups), columns=present)
        yield from _in_slices(batches)
    except (pa.ArrowException, OSError) as error:
        raise _wrong(unit.file, f"is damaged: {error}") from error


def _in_slices(batches: Iterable[Any]) -> Iterator[Any]:
    """Yield batches in slices that take some megabytes as Python's objects, or have one row.

    Raises:
        pyarrow.ArrowException: offsets or indices point outside of a batch.
    """
    import pyarrow.compute as pc

    for batch in batches:
        longest = 1
        for column in batch.columns:
            _validate(column)
            lengths = _lengths(column)
            if lengths is not None:
                longest = max(longest, pc.max(lengths).as_py() or 0)
        rows = max(1, ROWS_BYTES // longest)
        for first in range(0, len(batch), rows):
            yield batch.slice(first, rows)


def _validate(column: Any) -> None:
    """Check the offsets and indices of an array; texts may be of any bytes."""
    import pyarrow as pa

    plain = {pa.string(): pa.binary(), pa.large_string(): pa.large_binary()}
    if pa.types.is_dictionary(column.type):
        _validate(column.dictionary)
        if column.dictionary.type in plain:
            texts = column.dictionary.view(plain[column.dictionary.type])
            column = pa.DictionaryArray.from_arrays(column.indices, texts, safe=False)
    elif column.type in plain:
        column = column.view(plain[column.type])
    column.validate(full=True)


def _lengths(column: Any) -> Any:
    """Return bytes of each text of an array, or of its dictionary; None: it holds no texts."""
    import pyarrow as pa
    import pyarrow.compute as pc

    values = getattr(column, "dictionary", column)
    texts = (pa.string(), pa.large_string(), pa.binary(), pa.large_binary())
    return pc.binary_length(values) if values.type in texts else None


def _arrow_tables(unit: Unit, stream: BinaryIO, columns: Sequence[str]) -> Iterator[Any]:
    """Of a file (also called Feather), or of a stream, which is what `datasets` writes."""
    pa = _pyarrow(unit.file)
    try:
        try:
            file = pa.ipc.open_file(stream)
            present = _present(unit.file, columns, file.schema.names)
            for index in range(file.num_record_batches):
                yield from _in_slices([file.get_batch(index).select(present)])
        except pa.ArrowInvalid:
            stream.seek(0)
            reader = pa.ipc.open_stream(stream)
            present = _present(unit.file, columns, reader.schema.names)
            for batch in reader:
                yield from _in_slices([batch.select(present)])
    except (pa.ArrowException, OSError) as error:
        raise _wrong(unit.file, f"is not an Arrow file, or damaged: {error}") from error


def _present(file: File, columns: Sequence[str], names: Sequence[str]) -> list[str]:
    """The columns that a file has; one at least."""
    present = [column for column in columns if column in names]
    if not present:
        wanted = " or ".join(map(repr, columns))
        raise _wrong(file, f"has no column {wanted}; {_fields(columns[0], dict.fromkeys(names))}")
    return present


def _pyarrow(file: File) -> Any:
    try:
        import pyarrow as pa

        return pa
    except ImportError as error:
        rule, remedy = "needs pyarrow, which is not installed", "pip install 'weft[data]'"
        raise InvalidConfig([ConfigError("data.path", file.path, rule, remedy)]) from error


def _wrong(file: File, rule: str) -> InvalidConfig:
    remedy = (
        "name the column with the text in data.text_field" if "column" in rule else "replace it"
    )
    return InvalidConfig([ConfigError("data.path", file.path, rule, remedy)])
