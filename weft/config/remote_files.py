"""Copy small files, or a model, from an object store to this machine, once.

``model.path``, ``lora.path``, ``data.tokenizer`` and ``data.chat_template`` may be in a bucket, so
that a job needs no file system that the submitting machine and the nodes share.  A directory of the
store becomes a directory below the user's cache.  A file is copied again only if its size or its
ETag has changed, and it appears under its name when it is complete, so processes may copy at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from xxhash import xxh3_64_hexdigest

from weft.config.errors import ConfigError, InvalidConfig, WeftError
from weft.config.files import describe_cause, read_json, user_cache_dir, write_json
from weft.config.locks import hold_lock
from weft.config.storage import open_directory

VERSIONS_FILE = ".versions.json"  # name -> size and ETag of each copied file


def cached_directory(url: str) -> Path:
    """Return the directory of this machine for the files of a URL."""
    name = url.rstrip("/").rpartition("/")[2]
    return user_cache_dir() / "files" / xxh3_64_hexdigest(url.rstrip("/").encode()) / name


def fetch_files(url: str, patterns: Sequence[str], key: str) -> Path:
    """Copy the files of a directory in a store; return the directory of the copies.

    Args:
        url: the directory, such as ``s3://bucket/models/llama``.
        patterns: of file names, without subdirectories.
        key: that has the URL, for errors.

    Raises:
        InvalidConfig: if the store cannot be read, or has no such files.
    """
    target, rule = cached_directory(url), ""
    remedy = "check the address and the credentials: AWS's own variables, files or roles"
    try:
        source: Any = open_directory(url)
        entries = source.fs.ls(source.path, detail=True)
        files = {
            name: entry
            for entry in entries
            if entry["type"] == "file" and (name := entry["name"].rpartition("/")[2])
            if any(fnmatch(name, pattern) for pattern in patterns)
        }
        if files:
            stored = {entry["name"].rpartition("/")[2] for entry in entries}
            with hold_lock(target / ".lock", lambda: None):
                _copy_files(source.fs, files, stored, target)
            return target
        rule = f"has none of the files {', '.join(patterns)}"
    except FileNotFoundError:
        rule = "does not exist"
    except WeftError as error:
        rule, remedy = f"cannot be read: {error}", ""
    except Exception as error:  # of the store's client
        rule = f"cannot be read: {describe_cause(error)}"
    raise InvalidConfig([ConfigError(key, url, rule, remedy)])


def _copy_files(store: Any, files: dict[str, Any], stored: set[str], target: Path) -> None:
    """Copy files that have changed, and remove the copies of those that are gone.

    Args:
        store: file system of the store.
        files: entries of the files to copy by name.
        stored: names of all files in the directory of the store.
        target: directory of the copies.
    """
    try:
        versions = read_json(target / VERSIONS_FILE)
    except WeftError:
        versions = {}
    for name in set(versions) - stored:
        (target / name).unlink(missing_ok=True)
        del versions[name]
    for name, entry in files.items():
        version = [entry.get("size"), str(entry.get("ETag") or entry.get("etag") or "")]
        if versions.get(name) == version and (target / name).is_file():
            continue
        temporary = target / f".{name}.tmp"
        store.get_file(entry["name"], str(temporary))
        temporary.replace(target / name)
        versions[name] = version
        write_json(target / VERSIONS_FILE, versions)


def fetch_beside(url: str, patterns: Sequence[str], key: str) -> Path:
    """Copy a file of a store, and the files beside it that match; return the copy.

    Raises:
        InvalidConfig: if the store has no such file, or cannot be read.
    """
    directory, _, name = url.rpartition("/")
    file = fetch_files(directory, [name, *patterns], key) / name
    if not file.is_file():
        raise InvalidConfig([ConfigError(key, url, "does not exist", "check the address")])
    return file
