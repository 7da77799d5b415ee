"""What there is at a path: text, files of many documents, tokens of others, a data set, a store.

It is told by names, before anything is read.  What is in them is for `weft.data.text_files`,
`weft.data.records`, `weft.data.foreign_tokens`, `weft.data.hub` and `weft.data.user_source`.
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
from weft.data.hub import HUB, is_saved, parse_url
from weft.data.source_files import (
    File,
    format_of,
    is_card,
    is_glob,
    is_remote,
    local_file,
    remote_files,
)
from weft.data.token_store import STORE_FILE, is_store
from weft.data.user_source import is_own, own_set

STDLIB = "python-stdlib"

_NOT_TEXT = {"__pycache__"}
_NOT_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
_PATH_REMEDY = f"give a readable file, a folder, a prepared store, or {STDLIB}"

Kind = Literal["text", "records", "tokens", "saved", "hub", "own"]


@dataclass(frozen=True)
class SourceRef:
    """What there is at a path; ``files``, in the order of their names, are those of text, records
    and tokens."""

    kind: Kind
    files: tuple[File, ...] = ()


def check_path(path: str) -> list[ConfigError]:
    """What is wrong with ``data.path``, found without reading any text; empty when nothing is."""
    if not is_store(path):
        try:
            look(path)
        except InvalidConfig as invalid:
            return invalid.problems
    return []


def look(path: str) -> SourceRef:
    """What there is at ``path``, which is no prepared store.

    A folder or a glob is of records (or of tokens) if all its files are, but for those that only
    describe them, such as README.md.  Otherwise it is text, each file a document.

    Args:
        path: a file, a glob, a folder, of which every regular file counts that is not hidden, a
            URL, a function's name, or ``python-stdlib``: the library of the running Python, without
            its tests.

    Raises:
        InvalidConfig: there is no such place, or nothing in it, or it cannot be read.
    """
    if path.startswith(HUB):
        parse_url(path)
        return SourceRef("hub")
    if is_own(path):
        own_set(path)
        return SourceRef("own")
    found = _look_there(path) if is_remote(path) else _look_here(path)
    if found.kind != "saved":
        _check_files(path, found.files)
    return found


def _look_there(url: str) -> SourceRef:
    if problems := check_url("data.path", url):
        raise InvalidConfig(problems)
    found = _sort_out(remote_files(url), is_glob(url))
    if found.kind == "text":
        many = "holds no files" if not found.files else "holds other files than documents"
        rule = f"{many}: {truncate_list([file.name for file in found.files])}".removesuffix(": ")
        remedy = "give .jsonl, .jsonl.gz, .jsonl.zst or .parquet files, or a glob of such"
        raise InvalidConfig([ConfigError("data.path", url, rule, remedy)])
    if found.kind == "tokens":
        rule, remedy = "is mapped into memory, which takes a disk", "copy it to one"
        raise InvalidConfig([ConfigError("data.path", url, rule, remedy)])
    return found


def _look_here(path: str) -> SourceRef:
    root = Path(path).expanduser().absolute()
    if path == STDLIB:
        root = Path(sysconfig.get_path("stdlib"))
    try:
        if path == STDLIB:
            return SourceRef("text", tuple(_below(root, library=True)))
        if root.is_dir():
            return SourceRef("saved") if is_saved(root) else _sort_out(_below(root), alone=False)
        if root.is_file():
            return _sort_out([local_file(root, root.name)], alone=True)
        if is_glob(path) and (matches := _matches(root)):
            return _sort_out(matches, alone=True)
        megatron = root.with_name(root.name + ".bin")  # its tools take the name without ending
        if megatron.is_file() and root.with_name(root.name + ".idx").is_file():
            return SourceRef("tokens", (local_file(megatron, megatron.name),))
        root.stat()
    except OSError as error:
        where = "" if error.filename in (None, str(root)) else f" ({error.filename})"
        rule = f"cannot be read: {error.strerror}{where}"
        if isinstance(error, FileNotFoundError) and not where:
            rule = "matches no file" if is_glob(path) else "does not exist"
        raise InvalidConfig([ConfigError("data.path", path, rule, _PATH_REMEDY)]) from None
    raise InvalidConfig(
        [ConfigError("data.path", path, "is neither a file nor a folder", _PATH_REMEDY)]
    )


def _sort_out(files: Sequence[File], alone: bool) -> SourceRef:
    """What files are together; ``alone``: they were named, one by one or by a glob."""
    told = [
        file
        for file in files
        if len(files) == 1
        or not is_card(file.name)
        or (alone and format_of(file.name, alone) is not None)  # the glob asks for just such files
    ]
    kinds = {format_of(file.name, alone) for file in told}
    if not kinds or None in kinds or ("tokens" in kinds and len(kinds) > 1):
        return SourceRef("text", tuple(files))
    return SourceRef("tokens" if kinds == {"tokens"} else "records", tuple(told))


def _check_files(path: str, files: Sequence[File]) -> None:
    unreadable = [
        file.name
        for file in files
        if not is_remote(file.path) and not os.access(file.path, os.R_OK)
    ]
    rule, remedy = "", _PATH_REMEDY
    if not files:
        rule = "is a folder without files (hidden ones do not count)"
    elif unreadable:
        rule = f"cannot be read: {truncate_list(unreadable)}"
    elif not any(file.size_bytes for file in files):
        rule = "is empty" if len(files) == 1 else "holds only empty files"
        remedy = "give a path with text in it"
    if rule:
        raise InvalidConfig([ConfigError("data.path", path, rule, remedy)])


# --------------------------------------------------------------------------- files on a disk


def _matches(pattern: Path) -> list[File]:
    """The files that a glob matches, their names below its fixed part, in order."""
    fixed = pattern
    while is_glob(str(fixed)):
        fixed = fixed.parent
    found = (Path(name) for name in glob.glob(str(pattern), recursive=True))
    files = [
        local_file(file, file.relative_to(fixed).as_posix()) for file in found if file.is_file()
    ]
    return sorted(files, key=lambda file: file.name)


def _below(root: Path, library: bool = False) -> list[File]:
    """The files below a folder, in the order of their names."""
    files = [local_file(file, file.relative_to(root).as_posix()) for file in _walk(root, library)]
    return sorted(files, key=lambda file: file.name)


def _walk(root: Path, library: bool) -> Iterator[Path]:
    """Regular files below ``root``.  Links to folders are followed, each folder only once."""

    def fail(error: OSError) -> NoReturn:
        raise error

    seen = {_identity(root)}
    for folder, names, files in os.walk(root, onerror=fail, followlinks=True):
        if _made_by_weft(files):
            names[:] = []
            continue
        entered = []
        for name in sorted(names):  # sorted, so that it never depends on the file system ...
            if name.startswith(".") or name in (_NOT_LIBRARY if library else _NOT_TEXT):
                continue
            identity = _identity(Path(folder, name))
            if identity not in seen:  # ... by which of two names a folder is reached
                seen.add(identity)
                entered.append(name)
        names[:] = entered
        for name in files:
            file = Path(folder, name)
            if (
                not name.startswith(".")
                and (not library or file.suffix == ".py")
                and file.is_file()
            ):
                yield file


def _made_by_weft(files: Sequence[str]) -> bool:
    """A run's folder or a store below the text is not text: a run would train on its own logs."""
    return "tokenizer.json" in files and ("job.toml" in files or STORE_FILE in files)


def _identity(path: Path) -> tuple[int, int]:
    stat = path.stat()
    return stat.st_dev, stat.st_ino
