"""Data sets of Hugging Face's `datasets`: from the hub as a stream, and folders of save_to_disk."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from weft.config.errors import ConfigError, InvalidConfig, suggest
from weft.data.source_files import File, unreadable

HUB = "hf://"
ROWS = 1000  # of a saved data set that are decoded at a time

_NAME = re.compile(r"(?P<name>/[^:@]+|[^:@]+)(:(?P<config>[^@]+))?(@(?P<split>.+))?")


def is_saved(path: Path) -> bool:
    """Whether a folder is what ``save_to_disk`` writes: a data set, or several splits of one."""
    return (path / "dataset_dict.json").is_file() or (
        (path / "state.json").is_file() and (path / "dataset_info.json").is_file()
    )


def _datasets(path: str) -> Any:
    try:
        import datasets
    except ImportError as error:
        rule, remedy = f"needs {error.name}, which is not installed", "pip install 'weft[data]'"
        raise InvalidConfig([ConfigError("data.path", path, rule, remedy)]) from error
    datasets.disable_progress_bars()
    return datasets


# --------------------------------------------------------------------------- saved ones


def saved_set(path: str, field: str | None) -> tuple[File, int]:
    """A data set that was saved, and its number of rows.

    Raises:
        InvalidConfig: it cannot be read, has several splits, or lacks the column ``field``.
    """
    folder = Path(path).expanduser().absolute()
    splits = [f.name for f in sorted(folder.iterdir()) if (f / "state.json").is_file()]
    if (folder / "dataset_dict.json").is_file():
        if len(splits) != 1:
            rule = f"has several splits: {', '.join(splits)}"
            remedy = f"give one of them, such as {folder / (splits or ['train'])[0]}"
            raise InvalidConfig([ConfigError("data.path", path, rule, remedy)])
        folder /= splits[0]
    found = _loaded(str(folder))
    _check_field(path, field, found.column_names)
    files = [Path(each["filename"]).stat() for each in found.cache_files]
    size = sum(stat.st_size for stat in files)
    version = f"{found._fingerprint} {[stat.st_mtime_ns for stat in files]}"
    return File(folder.name, str(folder), size, version), len(found)


@cache
def _loaded(folder: str) -> Any:
    try:
        return _datasets(folder).load_from_disk(folder)
    except (OSError, ValueError, KeyError) as error:
        rule = f"cannot be read as a saved data set: {error}"
        raise InvalidConfig([ConfigError("data.path", folder, rule, "save it again")]) from error


def saved_rows(file: File, columns: Sequence[str], begin: int, end: int) -> Iterator[Any]:
    """Those of the columns that there are, of rows ``begin:end``, as pyarrow's tables."""
    found = _loaded(file.path)
    present = [name for name in found.column_names if name in columns]
    rows = found.select_columns(present).with_format("arrow")
    try:
        for first in range(begin, end, ROWS):
            yield rows[first : min(end, first + ROWS)]
    except OSError as error:
        raise unreadable(file, error) from error


# --------------------------------------------------------------------------- on the hub


def hub_set(url: str, field: str | None) -> tuple[File, int]:
    """A data set on the hub, and in how many parts it can be read.

    Args:
        url: ``hf://org/name[:config][@split]``; the split is train by itself.

    Raises:
        InvalidConfig: there is no such data set, configuration or split, or it lacks the column.
    """
    stream = _stream(url, revision := _revision(url))
    if stream.column_names is not None:
        _check_field(url, field, stream.column_names)
    return File(url.removeprefix(HUB), url, 0, revision), stream.num_shards


def parse_url(url: str) -> tuple[str, str | None, str]:
    """Name, configuration and split of a data set; see `hub_set`.

    Raises:
        InvalidConfig: it is no such URL.
    """
    found = _NAME.fullmatch(url.removeprefix(HUB))
    if found is None:
        remedy = "write it as hf://org/name, hf://org/name:config or hf://org/name:config@split"
        raise InvalidConfig([ConfigError("data.path", url, "is no data set's name", remedy)])
    return found["name"], found["config"], found["split"] or "train"


def _revision(url: str) -> str:
    """The commit that the data set is at now; of a local folder nothing."""
    name, _, _ = parse_url(url)
    if Path(name).is_absolute():
        return ""
    from huggingface_hub import HfApi

    try:
        return str(HfApi().dataset_info(name).sha)
    except Exception as error:  # of requests, of the hub, of names
        raise _unreachable(url, error) from error


def _stream(url: str, revision: str) -> Any:
    name, config, split = parse_url(url)
    datasets = _datasets(url)
    try:
        return datasets.load_dataset(
            name, config, split=split, streaming=True, revision=revision or None
        )
    except Exception as error:  # whatever its builders raise
        raise _unreachable(url, error) from error


def _unreachable(url: str, error: Exception) -> InvalidConfig:
    told = " ".join(str(error).split())[:300]
    rule = f"cannot be opened: {type(error).__name__}: {told}"
    remedy = "check name, configuration (:config), split (@split), network and HF_TOKEN"
    return InvalidConfig([ConfigError("data.path", url, rule, remedy)])


def _check_field(path: str, field: str | None, names: list[str]) -> None:
    if field is not None and field not in names:
        rule = f"has no column {field!r}; {suggest(field, names)}"
        remedy = "name the column with the text in data.text_field"
        raise InvalidConfig([ConfigError("data.path", path, rule, remedy)])


def hub_rows(
    file: File, columns: Sequence[str], part: int, parts: int, after: int
) -> Iterator[dict[str, Any]]:
    """Those of the columns that there are, of the rows of one part of a data set, after the first
    ``after`` ones."""
    stream = _stream(file.path, file.version)
    if stream.column_names is not None:  # decodes nothing else
        stream = stream.select_columns([name for name in stream.column_names if name in columns])
    if parts > 1:
        stream = stream.shard(num_shards=parts, index=part)
    try:
        for row in stream.skip(after):
            yield {name: row[name] for name in columns if name in row}
    except Exception as error:  # of the network, or of what decodes the files
        raise _unreachable(file.path, error) from error
