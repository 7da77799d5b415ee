"""Datasets of Hugging Face: streamed from the hub, or saved with save_to_disk."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from weft.config.errors import ConfigError, InvalidConfig, capitalize, suggest
from weft.data.source_files import File, unreadable_error

HUB_SCHEME = "hf://"
ROWS_PER_READ = 1000

_NAME = re.compile(r"(?P<name>/[^:@]+|[^:@]+)(:(?P<config>[^@]+))?(@(?P<split>.+))?")


def is_saved_dataset(path: Path) -> bool:
    """Return True if ``save_to_disk`` wrote the directory (one or several splits)."""
    return (path / "dataset_dict.json").is_file() or (
        (path / "state.json").is_file() and (path / "dataset_info.json").is_file()
    )


def _import_datasets(path: str) -> Any:
    try:
        import datasets
    except ImportError as error:
        rule, remedy = f"needs {error.name}, which is not installed", "run pip install 'weft[data]'"
        raise InvalidConfig([ConfigError("data.path", path, rule, remedy)]) from error
    datasets.disable_progress_bars()
    return datasets


# --------------------------------------------------------------------------- saved datasets


def open_saved_dataset(path: str, column: str | None) -> tuple[File, int]:
    """Open a saved dataset; return it as a file, and its number of rows.

    Raises:
        InvalidConfig: the dataset cannot be read, has several splits, or lacks ``column``.
    """
    directory = Path(path).expanduser().absolute()
    splits = [f.name for f in sorted(directory.iterdir()) if (f / "state.json").is_file()]
    if (directory / "dataset_dict.json").is_file():
        if len(splits) != 1:
            rule = f"has several splits: {', '.join(splits)}"
            remedy = f"give the path of one split, such as {directory / (splits or ['train'])[0]}"
            raise InvalidConfig([ConfigError("data.path", path, rule, remedy)])
        directory /= splits[0]
    dataset = _load_saved(str(directory))
    _check_column(path, column, dataset.column_names)
    files = [Path(file["filename"]).stat() for file in dataset.cache_files]
    size = sum(stat.st_size for stat in files)
    version = f"{dataset._fingerprint} {[stat.st_mtime_ns for stat in files]}"
    return File(directory.name, str(directory), size, version), len(dataset)


@cache
def _load_saved(directory: str) -> Any:
    try:
        return _import_datasets(directory).load_from_disk(directory)
    except (OSError, ValueError, KeyError) as error:
        rule = f"cannot be read as a saved dataset: {error}"
        raise InvalidConfig([ConfigError("data.path", directory, rule, "save it again")]) from error


def read_saved_rows(file: File, columns: Sequence[str], begin: int, end: int) -> Iterator[Any]:
    """Yield rows ``begin:end`` as pyarrow tables, with the columns that exist."""
    dataset = _load_saved(file.path)
    names = [name for name in dataset.column_names if name in columns]
    rows = dataset.select_columns(names).with_format("arrow")
    try:
        for first in range(begin, end, ROWS_PER_READ):
            yield rows[first : min(end, first + ROWS_PER_READ)]
    except OSError as error:
        raise unreadable_error(file, error) from error


# --------------------------------------------------------------------------- hub


def open_hub_dataset(url: str, column: str | None) -> tuple[File, int]:
    """Open a dataset on the hub; return it as a file, and its number of shards.

    Args:
        url: ``hf://org/name[:config][@split]``; the default split is train.
        column: required column; None: not yet known.

    Raises:
        InvalidConfig: the dataset, configuration, split or column does not exist.
    """
    stream = _open_stream(url, revision := _fetch_revision(url))
    if stream.column_names is not None:
        _check_column(url, column, stream.column_names)
    return File(url.removeprefix(HUB_SCHEME), url, 0, revision), stream.num_shards


def parse_hub_url(url: str) -> tuple[str, str | None, str]:
    """Return name, configuration and split of a hub URL.

    Raises:
        InvalidConfig: the URL is malformed.
    """
    match = _NAME.fullmatch(url.removeprefix(HUB_SCHEME))
    if match is None:
        remedy = "write it as hf://org/name, hf://org/name:config or hf://org/name:config@split"
        raise InvalidConfig([ConfigError("data.path", url, "is not the name of a dataset", remedy)])
    return match["name"], match["config"], match["split"] or "train"


def _fetch_revision(url: str) -> str:
    """Return the current commit of a dataset; empty for a local directory."""
    name, _, _ = parse_hub_url(url)
    if Path(name).is_absolute():
        return ""
    from huggingface_hub import HfApi

    try:
        return str(HfApi().dataset_info(name).sha)
    except Exception as error:  # any type
        raise _hub_error(url, error) from error


def _open_stream(url: str, revision: str) -> Any:
    name, config, split = parse_hub_url(url)
    datasets = _import_datasets(url)
    try:
        return datasets.load_dataset(
            name, config, split=split, streaming=True, revision=revision or None
        )
    except Exception as error:  # any type, of the dataset builder
        raise _hub_error(url, error) from error


def _hub_error(url: str, error: Exception) -> InvalidConfig:
    reason = " ".join(str(error).split())[:300]
    rule = f"cannot be opened: {type(error).__name__}: {reason}"
    remedy = "check name, configuration (:config), split (@split), network and HF_TOKEN"
    return InvalidConfig([ConfigError("data.path", url, rule, remedy)])


def _check_column(path: str, column: str | None, names: list[str]) -> None:
    if column is not None and column not in names:
        rule = f"has no column {column!r}"
        suggestion = capitalize(suggest(column, names))
        remedy = f"set data.text_field to the column that holds the text. {suggestion}"
        raise InvalidConfig([ConfigError("data.path", path, rule, remedy)])


def read_hub_rows(
    file: File, columns: Sequence[str], shard_index: int, num_shards: int, skip_rows: int
) -> Iterator[dict[str, Any]]:
    """Yield rows of a shard after ``skip_rows``, with the columns that exist."""
    stream = _open_stream(file.path, file.version)
    if stream.column_names is not None:  # so that nothing else is decoded
        stream = stream.select_columns([name for name in stream.column_names if name in columns])
    if num_shards > 1:
        stream = stream.shard(num_shards=num_shards, index=shard_index)
    try:
        for row in stream.skip(skip_rows):
            yield {name: row[name] for name in columns if name in row}
    except Exception as error:  # any type, of network or decoder
        raise _hub_error(file.path, error) from error
