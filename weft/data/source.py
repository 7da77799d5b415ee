"""Detect the kind of a data source from its name, without reading its content.

Content is read by `weft.data.text_files`, `weft.data.records`, `weft.data.foreign_tokens`,
`weft.data.hub` and `weft.data.user_source`.
"""

from __future__ import annotations

import glob
import os
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NoReturn

from weft.config.errors import ConfigError, InvalidConfig, truncate_list
from weft.config.files import check_url
from weft.data.hub import HUB_SCHEME, is_saved_dataset, parse_hub_url
from weft.data.source_files import (
    File,
    detect_format,
    is_glob,
    is_metadata_file,
    is_remote,
    list_remote_files,
    stat_local_file,
)
from weft.data.token_store import STORE_FILE, is_store
from weft.data.user_source import is_user_function, user_function_file

STDLIB = "python-stdlib"

_SKIPPED_DIRS = {"__pycache__"}
_SKIPPED_LIBRARY_DIRS = {
    "site-packages",
    "dist-packages",
    "test",
    "tests",
    "idle_test",
    "__pycache__",
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
        user_function_file(path)
        return SourceRef("own")
    source = _detect_remote(path) if is_remote(path) else _detect_local(path)
    if source.kind != "saved":
        _check_files(path, source.files)
    return source


def _detect_remote(url: str) -> SourceRef:
    if problems := check_url("data.path", url):
        raise InvalidConfig(problems)
    source = _classify_files(list_remote_files(url), is_glob(url))
    if source.kind == "text":
        content = "holds no files" if not source.files else "holds files of other formats"
        rule = f"{content}: {truncate_list([file.name for file in source.files])}".removesuffix(
            ": "
        )
        remedy = "give .jsonl, .jsonl.gz, .jsonl.zst or .parquet files, or a glob of these"
        raise InvalidConfig([ConfigError("data.path", url, rule, remedy)])
    if source.kind == "tokens":
        rule, remedy = "holds token files, which must be on a local disk", "copy it to a disk"
        raise InvalidConfig([ConfigError("data.path", url, rule, remedy)])
    return source


def _detect_local(path: str) -> SourceRef:
    root = Path(path).expanduser().absolute()
    if path == STDLIB:
        root = Path(sysconfig.get_path("stdlib"))
    try:
        if path == STDLIB:
            return SourceRef("text", tuple(_list_files(root, library=True)))
        if root.is_dir():
            return (
                SourceRef("saved")
                if is_saved_dataset(root)
                else _classify_files(_list_files(root), explicit=False)
            )
        if root.is_file():
            return _classify_files([stat_local_file(root, root.name)], explicit=True)
        if is_glob(path) and (matches := _glob_files(root)):
            return _classify_files(matches, explicit=True)
        megatron = root.with_name(root.name + ".bin")  # Megatron-LM takes names without suffix
        if megatron.is_file() and root.with_name(root.name + ".idx").is_file():
            return SourceRef("tokens", (stat_local_file(megatron, megatron.name),))
        root.stat()
    except OSError as error:
        location = "" if error.filename in (None, str(root)) else f" ({error.filename})"
        rule = f"cannot be read: {error.strerror}{location}"
        if isinstance(error, FileNotFoundError) and not location:
            rule = "matches no file" if is_glob(path) else "does not exist"
        raise InvalidConfig([ConfigError("data.path", path, rule, _PATH_REMEDY)]) from None
    raise InvalidConfig(
        [ConfigError("data.path", path, "is neither a file nor a directory", _PATH_REMEDY)]
    )


def _classify_files(files: Sequence[File], explicit: bool) -> SourceRef:
    """Return what the files are together.

    Args:
        files: the data files, with metadata of a directory.
        explicit: the user named the files, one by one or by a glob.
    """
    data_files = [
        file
        for file in files
        if len(files) == 1
        or not is_metadata_file(file.name)
        or (
            explicit and detect_format(file.name, explicit) is not None
        )  # the glob selects metadata names
    ]
    kinds = {detect_format(file.name, explicit) for file in data_files}
    if not kinds or None in kinds or ("tokens" in kinds and len(kinds) > 1):
        return SourceRef("text", tuple(files))
    return SourceRef("tokens" if kinds == {"tokens"} else "records", tuple(data_files))


def _check_files(path: str, files: Sequence[File]) -> None:
    unreadable = [
        file.name
        for file in files
        if not is_remote(file.path) and not os.access(file.path, os.R_OK)
    ]
    rule, remedy = "", _PATH_REMEDY
    if not files:
        rule = "is a directory without files (hidden files do not count)"
    elif unreadable:
        rule = f"cannot be read: {truncate_list(unreadable)}"
    elif not any(file.size_bytes for file in files):
        rule = "is empty" if len(files) == 1 else "holds only empty files"
        remedy = "give a path with text in it"
    if rule:
        raise InvalidConfig([ConfigError("data.path", path, rule, remedy)])


# --------------------------------------------------------------------------- local files


def _glob_files(pattern: Path) -> list[File]:
    """Return the matches of a glob, sorted by name relative to its fixed part."""
    root = pattern
    while is_glob(str(root)):
        root = root.parent
    paths = (Path(name) for name in glob.glob(str(pattern), recursive=True))
    files = [
        stat_local_file(path, path.relative_to(root).as_posix()) for path in paths if path.is_file()
    ]
    return sorted(files, key=lambda path: path.name)


def _list_files(root: Path, library: bool = False) -> list[File]:
    """Return the files below a directory, sorted by name."""
    files = [
        stat_local_file(file, file.relative_to(root).as_posix())
        for file in _walk_files(root, library)
    ]
    return sorted(files, key=lambda file: file.name)


def _walk_files(root: Path, library: bool) -> Iterator[Path]:
    """Yield regular files below ``root``; follow links, enter each directory once."""

    def fail(error: OSError) -> NoReturn:
        raise error

    seen = {_file_id(root)}
    for directory, names, files in os.walk(root, onerror=fail, followlinks=True):
        if _is_weft_output(files):
            names[:] = []
            continue
        subdirs = []
        for name in sorted(names):  # sorted: the name by which a directory
            if name.startswith(".") or name in (
                _SKIPPED_LIBRARY_DIRS if library else _SKIPPED_DIRS
            ):
                continue
            file_id = _file_id(Path(directory, name))
            if file_id not in seen:  # is entered must not depend on the file system
                seen.add(file_id)
                subdirs.append(name)
        names[:] = subdirs
        for name in files:
            file = Path(directory, name)
            if (
                not name.startswith(".")
                and (not library or file.suffix == ".py")
                and file.is_file()
            ):
                yield file


def _is_weft_output(files: Sequence[str]) -> bool:
    """Return True if files are those of a run or a store, not training data."""
    return "tokenizer.json" in files and ("job.toml" in files or STORE_FILE in files)


def _file_id(path: Path) -> tuple[int, int]:
    stat = path.stat()
    return stat.st_dev, stat.st_ino
