"""Divide a source into fragments, and read the rows of tables.

A *fragment* is a part of a source that one process can open and read: a byte range of plain lines,
Parquet row groups, rows of a saved dataset, a shard of a dataset on the hub, or a complete file.
`weft.data.records` reads lines.  Rows of Parquet, Arrow and `datasets` are tables of pyarrow; only
a user's function yields rows one by one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO, Literal

from weft.config.errors import ConfigError, InvalidConfig, suggest
from weft.config.files import expand_path
from weft.data.prepared_cache import collect_errors, raise_errors
from weft.data.source import (
    HUB_SCHEME,
    File,
    SourceRef,
    detect_format,
    is_compressed,
    is_table_text,
    load_user_function,
    max_content_bytes,
    open_file,
    parse_hub_url,
    path_error,
    unreadable_error,
    user_function_file,
)

DECODE_BYTES = 4 << 20  # approximate size of rows that are decoded together
ROWS_PER_READ = 1000  # of a dataset

Kind = Literal["jsonl", "parquet", "arrow", "saved", "hub", "own"]


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


def list_fragments(
    path: str, source: SourceRef, size: int, column: str | None
) -> list[FileFragment]:
    """Divide a source into fragments of about ``size`` bytes, if its format allows.

    Args:
        path: ``data.path``.
        source: the files at the path.
        size: bytes of a fragment; a format that cannot be divided gives one per file.
        column: required column of datasets; None: not yet known.

    Raises:
        InvalidConfig: a file cannot be opened, does not match its suffix, or lacks the column.
    """
    if source.kind == "saved":
        return _divide_saved_dataset(path, size, column)
    if source.kind == "hub":
        return _divide_hub_dataset(path, column)
    if source.kind == "own":
        return [FileFragment(user_function_file(path), "own", 0, 0, 0)]
    fragments: list[FileFragment] = []
    errors: list[ConfigError] = []
    for file in source.files:
        with collect_errors(errors):
            fragments += divide_file(file, size)
    raise_errors(errors)
    return fragments


def divide_file(file: File, size: int) -> list[FileFragment]:
    """Divide a file of lines or rows into fragments of about ``size`` bytes.

    Raises:
        InvalidConfig: the file cannot be opened, or does not match its suffix.
    """
    kind = detect_format(file.name, explicit=True)
    assert kind in ("jsonl", "parquet", "arrow")
    if kind == "parquet":
        return _divide_parquet(file, size)
    if kind == "jsonl" and not is_compressed(file.name) and not is_table_text(file.name):
        offsets = [*range(0, file.size_bytes, size), file.size_bytes]
        return [
            FileFragment(file, kind, begin, end, end - begin) for begin, end in pairwise(offsets)
        ]
    end = 0 if is_compressed(file.name) or kind == "arrow" else file.size_bytes
    return [FileFragment(file, kind, 0, end, file.size_bytes)]


def read_tables(fragment: FileFragment, columns: Sequence[str]) -> Iterator[Any]:
    """Yield the rows as pyarrow tables or batches, with the columns that exist.

    Raises:
        InvalidConfig: the file cannot be read, is damaged, or has none of the columns.
    """
    if fragment.kind in ("saved", "hub"):
        yield from _read_dataset(fragment, columns)
        return
    with open_file(fragment.file) as stream:
        read = _read_parquet if fragment.kind == "parquet" else _read_arrow
        yield from read(fragment, stream, columns)


def list_unread_columns(fragment: FileFragment, columns: Sequence[str]) -> list[str]:
    """Return the columns of a table that `read_tables` does not read, from its schema.

    Args:
        fragment: of a table; lines and rows of a function have no schema: none.
        columns: the columns to read.

    Raises:
        InvalidConfig: the file cannot be read, or is damaged.
    """
    file, names = fragment.file, list[str]()
    if fragment.kind == "saved":
        names = _load_saved(file.path).column_names
    elif fragment.kind == "hub":
        names = _open_stream(file).column_names or []
    elif fragment.kind in ("parquet", "arrow"):
        with open_file(file) as stream:
            if fragment.kind == "parquet":
                names = _open_parquet(file, stream).schema_arrow.names
            else:
                names = _open_arrow(file, stream)[0].names
    read = {_find_column(column, names) for column in columns}
    return [name for name in names if name not in read]


# Fields of conversations and of preferences, and the ``data.format`` that reads them.
CHAT_FIELDS = (
    ({"chosen", "rejected"}, "preferences"),
    ({"prompt", "completion", "label"}, "unpaired"),
    ({"messages"}, "chat"),
    ({"conversations"}, "chat"),
    ({"prompt", "completion"}, "chat"),
    ({"prompt", "response"}, "chat"),
    ({"instruction", "output"}, "chat"),
)


def describe_fields(field: str, names: Iterable[str]) -> str:
    """Return what ``field`` may stand for, or the names that exist."""
    names = list(names)
    for fields, name in CHAT_FIELDS:
        if fields <= {*names} and field not in fields:
            return f"it has {' and '.join(sorted(fields))}: use --data.format {name}"
    suggestion = suggest(field, names)
    if suggestion.startswith("did"):
        return suggestion
    return f"it has {', '.join(names[:8]) or 'none'}"


def table_error(file: File, rule: str) -> InvalidConfig:
    """Return the error for a file without the expected rows or columns."""
    is_column = "column" in rule
    remedy = "set data.text_field to the column that holds the text" if is_column else "replace it"
    return path_error(file.path, rule, remedy)


def find_field(row: Mapping[str, Any], field: str) -> Any:
    """Return a field of a row; ``a.b`` is the field b of the object a.

    A field with the exact name comes first; a field of null is null.

    Raises:
        KeyError: there is no such field.
    """
    if field in row or "." not in field:
        return row[field]
    value: Any = row
    for part in field.split("."):
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise KeyError(field)
        value = value[part]
    return value


def _find_column(column: str, names: Sequence[str]) -> str:
    """Return the name of the column that holds a field such as ``a.b``."""
    return column if column in names else column.partition(".")[0]


def _select_columns(file: File, columns: Sequence[str], names: Sequence[str]) -> list[str]:
    """Return the columns that exist in a file, at least one."""
    existing = [name for column in columns if (name := _find_column(column, names)) in names]
    if not existing:
        options = " or ".join(map(repr, columns))
        raise table_error(file, f"has no column {options}; {describe_fields(columns[0], names)}")
    return existing


# --------------------------------------------------------------------------- Parquet and Arrow


def _import_pyarrow(file: File) -> Any:
    try:
        import pyarrow as pa

        return pa
    except ImportError as error:
        rule, remedy = "needs pyarrow, which is not installed", "run pip install 'weft[data]'"
        raise path_error(file.path, rule, remedy) from error


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
        raise table_error(file, f"is not a Parquet file: {error}") from error


def _divide_parquet(file: File, size: int) -> list[FileFragment]:
    """Divide a Parquet file between row groups, after checking its declared sizes.

    Raises:
        InvalidConfig: a size is negative, or exceeds `max_content_bytes` of the stored size.
    """
    fragments = []
    with open_file(file) as stream:
        metadata = _open_parquet(file, stream).metadata
    begin = size_bytes = 0
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        declared = [group.num_rows, group.total_byte_size]
        for column in map(group.column, range(group.num_columns)):
            stored, content = column.total_compressed_size, column.total_uncompressed_size
            declared += [stored, content]
            if content > max_content_bytes(min(stored, file.size_bytes)):
                rule = (
                    f"declares {content:,} bytes of {column.path_in_schema} in {stored:,} stored "
                    f"bytes (row group {number + 1}): a decompression bomb"
                )
                raise table_error(file, rule)
        if min(declared) < 0:
            raise table_error(file, f"is damaged: row group {number + 1} has a negative size")
        size_bytes += group.total_byte_size
        if size_bytes >= size or number == metadata.num_row_groups - 1:
            fragments.append(FileFragment(file, "parquet", begin, number + 1, size_bytes))
            begin, size_bytes = number + 1, 0
    return fragments


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
        yield from _slice_batches(fragment.file, batches)
    except (pa.ArrowException, OSError) as error:
        raise table_error(fragment.file, f"is damaged: {error}") from error


def _read_arrow(fragment: FileFragment, stream: BinaryIO, columns: Sequence[str]) -> Iterator[Any]:
    file, pa = fragment.file, _import_pyarrow(fragment.file)
    schema, batches = _open_arrow(file, stream)
    names = _select_columns(file, columns, schema.names)
    try:
        yield from _slice_batches(file, (batch.select(names) for batch in batches))
    except (pa.ArrowException, OSError) as error:
        raise table_error(file, f"is not an Arrow file, or damaged: {error}") from error


def _open_arrow(file: File, stream: BinaryIO) -> tuple[Any, Iterable[Any]]:
    """Return schema and batches of a file (Feather), or of a stream (`datasets`)."""
    pa = _import_pyarrow(file)
    try:
        try:
            reader = pa.ipc.open_file(stream)
            return reader.schema, map(reader.get_batch, range(reader.num_record_batches))
        except pa.ArrowInvalid:
            stream.seek(0)
            reader = pa.ipc.open_stream(stream)
            return reader.schema, reader
    except (pa.ArrowException, OSError) as error:
        raise table_error(file, f"is not an Arrow file, or damaged: {error}") from error


def _slice_batches(file: File, batches: Iterable[Any]) -> Iterator[Any]:
    """Yield valid batches in slices of a few megabytes as Python objects.

    Raises:
        pyarrow.ArrowException: offsets or indices point outside a batch.
        InvalidConfig: the batches exceed `max_content_bytes`.
    """
    import pyarrow.compute as pc

    limit = remaining = max_content_bytes(file.size_bytes)
    for batch in batches:
        longest = 1
        for column in batch.columns:
            sizes = _text_sizes(column)
            if sizes is None:
                remaining -= column.nbytes
            else:
                remaining -= pc.sum(sizes).as_py() or 0
                longest = max(longest, pc.max(sizes).as_py() or 0)
        if remaining < 0:
            rule = f"holds more than {limit:,} bytes in {file.size_bytes:,} bytes of file"
            raise table_error(file, f"{rule}: a decompression bomb")
        rows = max(1, DECODE_BYTES // longest)
        for first in range(0, len(batch), rows):
            yield batch.slice(first, rows)


def _text_sizes(column: Any) -> Any:
    """Validate a column; return the sizes of its texts in bytes, or None.

    The encoding of the texts is not validated.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    plain = {
        **dict.fromkeys((pa.string(), pa.binary()), pa.binary()),
        **dict.fromkeys((pa.large_string(), pa.large_binary()), pa.large_binary()),
    }
    indices = column.indices if pa.types.is_dictionary(column.type) else None
    values = column if indices is None else column.dictionary
    holds_texts = values.type in plain
    if holds_texts:
        values = values.view(plain[values.type])
    values.validate(full=True)
    if indices is not None:
        pa.DictionaryArray.from_arrays(indices, values, safe=False).validate(full=True)
    if not holds_texts:
        return None
    sizes = pc.binary_length(values)
    return sizes if indices is None else sizes.take(indices)


def read_text_column(fragment: FileFragment, name: str) -> Iterator[bytes | None]:
    """Yield a column of texts as bytes: ``data.invalid_utf8`` decides about UTF-8.

    Raises:
        InvalidConfig: the column does not exist or holds no texts, or the file cannot be read.
    """
    pa = _import_pyarrow(fragment.file)
    for table in read_tables(fragment, [name]):
        column = _read_field(fragment.file, table, name)
        text_type = column.type.value_type if pa.types.is_dictionary(column.type) else column.type
        is_text_type = (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view)
        if not any(is_type(text_type) for is_type in is_text_type):
            rule = f"has {text_type} in the column {name!r}, not text"
            if pa.types.is_struct(text_type) and text_type.num_fields:
                rule += f"; {name}.{text_type.field(0).name} is a field of it"
            raise table_error(fragment.file, rule)
        yield from column.cast(text_type).cast(pa.large_binary()).to_pylist()


def _read_field(file: File, table: Any, name: str) -> Any:
    """Return a column, or the field of a struct that a name such as ``a.b`` means."""
    if name in table.schema.names:
        return table.column(name)
    import pyarrow as pa
    import pyarrow.compute as pc

    column_name, *fields = name.split(".")
    column = table.column(column_name)
    for field in fields:
        is_struct = pa.types.is_struct(column.type)
        if not is_struct or column.type.get_field_index(field) < 0:
            raise table_error(file, f"has no column {name!r}; {column_name} is {column.type}")
        column = pc.struct_field(column, field)
    return column


# --------------------------------------------------------------------------- datasets


def _import_datasets(path: str) -> Any:
    try:
        import datasets
    except ImportError as error:
        rule, remedy = f"needs {error.name}, which is not installed", "run pip install 'weft[data]'"
        raise path_error(path, rule, remedy) from error
    datasets.disable_progress_bars()
    return datasets


def _divide_saved_dataset(path: str, size: int, column: str | None) -> list[FileFragment]:
    directory = expand_path(path).absolute()
    if (directory / "dataset_dict.json").is_file():
        splits = [f.name for f in sorted(directory.iterdir()) if (f / "state.json").is_file()]
        if len(splits) != 1:
            rule = f"has several splits: {', '.join(splits)}"
            first = "train" if "train" in splits or not splits else splits[0]
            remedy = f"give the path of one split, such as {directory / first}"
            if others := [name for name in splits if name != first]:
                remedy += (
                    f", and another one as data.validation_path, such as {directory / others[0]}"
                )
            raise path_error(path, rule, remedy)
        directory /= splits[0]
    dataset = _load_saved(str(directory))
    stats = [Path(file["filename"]).stat() for file in dataset.cache_files]
    version = f"{dataset._fingerprint} {[stat.st_mtime_ns for stat in stats]}"
    file = File(directory.name, str(directory), sum(stat.st_size for stat in stats), version)
    if column is not None:
        _select_columns(file, [column], dataset.column_names)
    rows = len(dataset)
    rows_per_fragment = max(1, rows * size // max(file.size_bytes, 1))
    return [
        FileFragment(file, "saved", begin, end, file.size_bytes * (end - begin) // rows)
        for begin, end in pairwise([*range(0, rows, rows_per_fragment), rows])
    ]


@cache
def _load_saved(directory: str) -> Any:
    try:
        return _import_datasets(directory).load_from_disk(directory)
    except (OSError, ValueError, KeyError) as error:
        raise path_error(
            directory, f"cannot be read as a saved dataset: {error}", "save it again"
        ) from error


def _divide_hub_dataset(url: str, column: str | None) -> list[FileFragment]:
    """Return one fragment per shard; the version is the current commit of the dataset."""
    name, _, _ = parse_hub_url(url)
    revision = ""  # of a local directory
    if not Path(name).is_absolute():
        from huggingface_hub import HfApi

        try:
            revision = str(HfApi().dataset_info(name).sha)
        except Exception as error:  # any type
            raise _hub_error(url, error) from error
    file = File(url.removeprefix(HUB_SCHEME), url, 0, revision)
    stream = _open_stream(file)
    if column is not None and stream.column_names is not None:
        _select_columns(file, [column], stream.column_names)
    return [FileFragment(file, "hub", n, stream.num_shards, 0) for n in range(stream.num_shards)]


def _open_stream(file: File) -> Any:
    name, config, split = parse_hub_url(file.path)
    datasets = _import_datasets(file.path)
    try:
        return datasets.load_dataset(
            name, config, split=split, streaming=True, revision=file.version or None
        )
    except Exception as error:  # any type, of the dataset builder
        raise _hub_error(file.path, error) from error


def _hub_error(url: str, error: Exception) -> InvalidConfig:
    reason = " ".join(str(error).split())[:300]
    rule = f"cannot be opened: {type(error).__name__}: {reason}"
    remedy = "check name, configuration (:config), split (@split), network and HF_TOKEN"
    return path_error(url, rule, remedy)


def _read_dataset(fragment: FileFragment, columns: Sequence[str]) -> Iterator[Any]:
    file = fragment.file
    if fragment.kind == "saved":
        data = _load_saved(file.path)
        names = data.column_names  # the order of the columns
        data = data.select(range(fragment.begin, fragment.end))
    else:
        data, names = _open_stream(file), columns
        if fragment.end > 1:
            data = data.shard(num_shards=fragment.end, index=fragment.begin)
    if data.column_names is not None:  # so that nothing else is decoded
        existing = _select_columns(file, columns, data.column_names)
        data = data.select_columns([name for name in names if name in existing])
    try:
        for table in data.with_format("arrow").iter(batch_size=ROWS_PER_READ):
            existing = _select_columns(file, columns, table.column_names)
            yield table.select([name for name in names if name in existing])
    except InvalidConfig:
        raise
    except Exception as error:  # any type, of network, decoder or disk
        raise (
            _hub_error(file.path, error)
            if fragment.kind == "hub"
            else unreadable_error(file, error)
        ) from error


# --------------------------------------------------------------------------- a user's function


def read_user_rows(file: File, columns: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yield the rows of a function, with the columns that exist.

    Raises:
        InvalidConfig: the function raises, or a row is neither text nor a mapping.
    """
    number = 0
    try:
        rows: Iterable[Any] = load_user_function(file.path)()
        for number, row in enumerate(rows, 1):
            if isinstance(row, str):
                yield {columns[0]: row}
                continue
            if not isinstance(row, Mapping):
                rule = f"yields a {type(row).__name__} as row {number}, neither text nor a mapping"
                raise path_error(file.path, rule)
            present = {}
            for name in columns:
                with suppress(KeyError):
                    present[name] = find_field(row, name)
            if not present:
                rule = f"yields row {number} without a field {' or '.join(map(repr, columns))}"
                raise path_error(file.path, rule, suggest(columns[0], list(row)))
            yield present
    except InvalidConfig:
        raise
    except Exception as error:  # any type
        rule = f"raises after row {number}: {type(error).__name__}: {error}"
        raise path_error(file.path, rule, "fix the function") from error
