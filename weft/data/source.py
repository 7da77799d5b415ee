"""Detect the kind of a data source from its name, without reading its content.

`weft.data.text_files`, `weft.data.records` and `weft.data.foreign_tokens` read the content.
"""

from __future__ import annotations

import glob
import inspect
import os
import re
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn

from xxhash import xxh3_128_hexdigest

from weft.config.errors import ConfigError, InvalidConfig, truncate_list
from weft.config.files import check_url
from weft.config.reader import lookup
from weft.data.source_files import (
    File,
    detect_format,
    is_glob,
    is_metadata_file,
    is_remote,
    list_remote_files,
    path_error,
    stat_local_file,
)
from weft.data.token_store import STORE_FILE, is_store

STDLIB = "python-stdlib"
HUB_SCHEME = "hf://"

_HUB_NAME = re.compile(r"(?P<name>/[^:@]+|[^:@]+)(:(?P<config>[^@]+))?(@(?P<split>.+))?")
_FUNCTION_NAME = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
_SKIPPED_DIRS = {"__pycache__"}
_SKIPPED_LIBRARY_DIRS = _SKIPPED_DIRS | {
    *("site-packages", "dist-packages", "test", "tests", "idle_test")
}
_PATH_REMEDY = f"give a readable file, a directory, a prepared store, or {STDLIB}"

Kind = Literal["text", "records", "tokens", "saved", "hub", "own"]


@dataclass(frozen=True)
class SourceRef:
    """Kind of a source; ``files``, sorted by name, of text, records or tokens."""

    kind: Kind
    files: tuple[File, ...] = ()


def check_path(path: str) -> list[ConfigError]:
    """Return the errors of ``data.path`` that are visible without reading any text."""
    if not is_store(path):
        try:
            detect_source(path)
        except InvalidConfig as invalid:
            return invalid.problems
    return []


def detect_source(path: str) -> SourceRef:
    """Detect the source at ``path``, which is not a prepared store.

    A directory or glob holds records (or tokens) if all its files do, except for metadata such as
    README.md.  Otherwise it is text, and each file is a document.

    Args:
        path: a file; a glob; a directory, of which all regular files that are not hidden count;
            a URL; the name of a function; or ``python-stdlib``, the library of the running Python
            without its tests.

    Raises:
        InvalidConfig: the source does not exist, is empty, or cannot be read.
    """
    if path.startswith(HUB_SCHEME):
        parse_hub_url(path)
        return SourceRef("hub")
    if is_user_function(path):
        load_user_function(path)
        return SourceRef("own")
    source = _detect_remote(path) if is_remote(path) else _detect_local(path)
    if source.kind != "saved":
        _check_files(path, source.files)
    return source


# --------------------------------------------------------------------------- hub and functions


def parse_hub_url(url: str) -> tuple[str, str | None, str]:
    """Return name, configuration and split of a hub URL.

    Raises:
        InvalidConfig: the URL is malformed.
    """
    match = _HUB_NAME.fullmatch(url.removeprefix(HUB_SCHEME))
    if match is None:
        remedy = "write it as hf://org/name, hf://org/name:config or hf://org/name:config@split"
        raise path_error(url, "is not the name of a dataset", remedy)
    return match["name"], match["config"], match["split"] or "train"


def is_user_function(path: str) -> bool:
    """Return True if a path is ``module:function``, and no file has this name.

    The function takes no arguments and returns rows, in the same order in every call: texts, or
    mappings with the fields that keys such as ``data.text_field`` name.
    """
    return _FUNCTION_NAME.fullmatch(path) is not None and not Path(path).exists()


def load_user_function(path: str) -> Any:
    """Import the function that ``path`` names.

    Raises:
        InvalidConfig: the function cannot be imported, or is not callable.
    """
    try:
        function: Any = lookup(path, {})
    except LookupError as error:
        remedy = "run in the directory of the module, or add it to PYTHONPATH"
        raise path_error(path, str(error), remedy) from error
    if not callable(function):
        raise path_error(path, "is not a function")
    return function


def user_function_file(path: str) -> File:
    """Return a function as a file, whose version is a hash of its source file.

    The version does not cover the data that the function reads.
    """
    function = load_user_function(path)
    try:
        source = inspect.getsourcefile(function)
    except TypeError:  # such as a partial or a builtin
        source = getattr(sys.modules[path.partition(":")[0]], "__file__", None)
    content = Path(source).read_bytes() if source else b""
    return File(path, path, 0, xxh3_128_hexdigest(content))


# --------------------------------------------------------------------------- files


def _detect_remote(url: str) -> SourceRef:
    if problems := check_url("data.path", url):
        raise InvalidConfig(problems)
    source = _classify_files(list_remote_files(url), is_glob(url))
    if source.kind == "text":
        content = "holds files of other formats: " if source.files else "holds no files"
        rule = content + truncate_list([file.name for file in source.files])
        remedy = "give .jsonl, .jsonl.gz, .jsonl.zst or .parquet files, or a glob of these"
        raise path_error(url, rule, remedy)
    if source.kind == "tokens":
        rule = "holds token files, which must be on a local disk"
        raise path_error(url, rule, "copy it to a disk")
    return source


def _detect_local(path: str) -> SourceRef:
    root = Path(path).expanduser().absolute()
    try:
        if path == STDLIB:
            library = Path(sysconfig.get_path("stdlib"))
            return SourceRef("text", _sort_files(library, _walk_files(library, True)))
        if root.is_dir():
            if _is_saved_dataset(root):
                return SourceRef("saved")
            return _classify_files(_sort_files(root, _walk_files(root)), explicit=False)
        if root.is_file():
            return _classify_files(_sort_files(root.parent, [root]), explicit=True)
        if is_glob(path) and (matches := _glob_files(root)):
            return _classify_files(matches, explicit=True)
        megatron = root.with_name(root.name + ".bin")  # Megatron-LM takes names without suffix
        if megatron.is_file() and root.with_name(root.name + ".idx").is_file():
            return SourceRef("tokens", _sort_files(root.parent, [megatron]))
        root.stat()
    except OSError as error:
        location = "" if error.filename in (None, str(root)) else f" ({error.filename})"
        rule = f"cannot be read: {error.strerror}{location}"
        if isinstance(error, FileNotFoundError) and not location:
            rule = "matches no file" if is_glob(path) else "does not exist"
        raise path_error(path, rule, _PATH_REMEDY) from None
    raise path_error(path, "is neither a file nor a directory", _PATH_REMEDY)


def _classify_files(files: Sequence[File], explicit: bool) -> SourceRef:
    """Return what the files are together.

    Args:
        files: the data files, with metadata of a directory.
        explicit: the user named the files, one by one or by a glob.
    """
    data_files, kinds = [], set()
    for file in files:
        kind = detect_format(file.name, explicit)
        is_selected = explicit and kind is not None  # a glob may select metadata names
        if len(files) == 1 or is_selected or not is_metadata_file(file.name):
            data_files.append(file)
            kinds.add(kind)
    if not kinds or None in kinds or ("tokens" in kinds and len(kinds) > 1):
        return SourceRef("text", tuple(files))
    return SourceRef("tokens" if kinds == {"tokens"} else "records", tuple(data_files))


def _check_files(path: str, files: Sequence[File]) -> None:
    local = [file for file in files if not is_remote(file.path)]
    unreadable = [file.name for file in local if not os.access(file.path, os.R_OK)]
    if not files:
        rule = "is a directory without files (hidden files do not count)"
        raise path_error(path, rule, _PATH_REMEDY)
    if unreadable:
        raise path_error(path, f"cannot be read: {truncate_list(unreadable)}", _PATH_REMEDY)
    if not any(file.size_bytes for file in files):
        rule = "is empty" if len(files) == 1 else "holds only empty files"
        raise path_error(path, rule, "give a path with text in it")


def _is_saved_dataset(directory: Path) -> bool:
    """Return True if ``save_to_disk`` wrote the directory (one or several splits)."""
    return (directory / "dataset_dict.json").is_file() or (
        (directory / "state.json").is_file() and (directory / "dataset_info.json").is_file()
    )


def _glob_files(pattern: Path) -> tuple[File, ...]:
    """Return the matches of a glob, sorted by name relative to its fixed part."""
    root = pattern
    while is_glob(str(root)):
        root = root.parent
    paths = map(Path, glob.glob(str(pattern), recursive=True))
    return _sort_files(root, (path for path in paths if path.is_file()))


def _sort_files(root: Path, paths: Iterable[Path]) -> tuple[File, ...]:
    """Return files with their names relative to ``root``, sorted by name."""
    files = (stat_local_file(path, path.relative_to(root).as_posix()) for path in paths)
    return tuple(sorted(files, key=lambda file: file.name))


def _walk_files(root: Path, is_library: bool = False) -> Iterator[Path]:
    """Yield regular files below ``root``; follow links, enter each directory once."""

    def fail(error: OSError) -> NoReturn:
        raise error

    skipped = _SKIPPED_LIBRARY_DIRS if is_library else _SKIPPED_DIRS
    seen = {_file_id(root)}
    for directory, names, files in os.walk(root, onerror=fail, followlinks=True):
        subdirs = []
        if _is_weft_output(files):
            files = []
            names.clear()
        # Sorted: the name by which a directory is entered must not depend on the file system.
        for name in sorted(names):
            if name.startswith(".") or name in skipped:
                continue
            file_id = _file_id(Path(directory, name))
            if file_id not in seen:
                seen.add(file_id)
                subdirs.append(name)
        names[:] = subdirs
        for file in (Path(directory, name) for name in files if not name.startswith(".")):
            if (not is_library or file.suffix == ".py") and file.is_file():
                yield file


def _is_weft_output(files: Sequence[str]) -> bool:
    """Return True if files are those of a run or a store, not training data."""
    return "tokenizer.json" in files and ("job.toml" in files or STORE_FILE in files)


def _file_id(path: Path) -> tuple[int, int]:
    stat = path.stat()
    return stat.st_dev, stat.st_ino
