"""Cache of prepared stores, and the progress and errors of preparation.

A store's directory in the cache is named by a hash of all that determines its content.  So a
changed file, tokenizer or setting gives another store, and equal inputs are tokenized once.
"""

from __future__ import annotations

import fcntl
import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from xxhash import xxh3_64_hexdigest

from weft.config.errors import ConfigError, InvalidConfig
from weft.config.files import write_durably
from weft.config.schema import DataSection
from weft.data.integrity import find_damage
from weft.data.token_store import (
    FORMAT,
    STORE_FILE,
    TOKENIZER_FILE,
    Manifest,
    Store,
    hash_json,
    is_store,
    open_store,
)

# --------------------------------------------------------------------------- progress


@dataclass(frozen=True)
class Progress:
    """Progress of a preparation: ``done`` of ``total`` bytes, tokens or lines.

    Both are 0 if nothing is counted.
    """

    message: str
    done: int = 0
    total: int = 0


Report = Callable[[Progress], None]

WAITING_MESSAGE = "waiting for another process that prepares the same data"
VERIFYING_MESSAGE = "waiting for another process that verifies the data"
MIN_REPORT_BYTES = 1 << 28  # smaller stores are verified without progress reports


def progress_counter(report: Report, message: str, total: int) -> Callable[[int], None]:
    """Return a function that adds to the progress and reports it.

    ``total`` may be an estimate; reported progress never exceeds it.
    """
    done = 0

    def advance(count: int) -> None:
        nonlocal done
        done += count
        report(Progress(message, min(done, total), total))

    return advance


# --------------------------------------------------------------------------- errors


@contextmanager
def collect_errors(problems: list[ConfigError], mixture: bool = False) -> Iterator[None]:
    """Append errors to ``problems``; ``mixture``: report data.path as data.mixture."""
    try:
        yield
    except InvalidConfig as invalid:
        problems += [
            replace(problem, key="data.mixture")
            if mixture and problem.key == "data.path"
            else problem
            for problem in invalid.problems
        ]


def raise_errors(problems: Sequence[ConfigError]) -> None:
    """Raise InvalidConfig with these errors, without duplicates, if there are any."""
    if problems:
        raise InvalidConfig({str(problem): problem for problem in problems}.values())


# --------------------------------------------------------------------------- stores


def open_given_store(
    section: DataSection, tokenizer_hash: str | None, cache: Path, report: Report
) -> Store:
    """Open the store at ``data.path``, and compare its tokenizer with the given one."""
    store = open_verified_store(section.path, cache, report)
    if tokenizer_hash not in (None, store.manifest.tokenizer_hash):
        rule = f"does not match the store {section.path}, which was prepared with another tokenizer"
        remedy = f"use {store.path / TOKENIZER_FILE}"
        raise InvalidConfig([ConfigError("data.tokenizer", section.tokenizer, rule, remedy)])
    return store


def build_once(
    cache: Path, content: object, report: Report, build: Callable[[Path], Manifest]
) -> Store:
    """Return the store for ``content`` below ``cache``; build it if it does not exist.

    Args:
        cache: directory of prepared data; the store goes below ``stores/``.
        content: all that determines the store; must be JSON-serializable.
        report: called while another process builds the store.
        build: writes the files of a store, except ``store.json``, into a directory.
    """
    directory = cache / "stores" / hash_json(content)
    if not is_store(directory):
        with convert_cache_errors(cache), lock_directory(directory, report, WAITING_MESSAGE):
            if not is_store(directory):  # another process may have built it meanwhile
                manifest = asdict(build(directory))
                write_durably(directory / STORE_FILE, json.dumps(manifest, indent=1).encode())
                # The hashes are of the tokens just written: no need to read them again.
                store = open_store(directory)
                verified_file = _verified_file(store, cache)
                with lock_directory(verified_file.parent, report, VERIFYING_MESSAGE):
                    _mark_verified(verified_file, store)
    return open_verified_store(directory, cache, report)


def open_verified_store(
    path: str | Path, cache: Path, report: Report, force: bool = False
) -> Store:
    """Open a store and verify every byte, unless it was verified before.

    A file below ``cache`` records the result for path, size, modification time and inode of every
    file; a store that changes is read again.  One process reads the store, others wait.

    Args:
        path: directory of the store.
        cache: directory of prepared data; the result goes below ``verified/``.
        report: is called with the progress through a large store.
        force: ignore the recorded result.

    Raises:
        InvalidConfig: one error for each file that is missing, damaged, or has ids outside the
            vocabulary.
    """
    store = open_store(path)
    verified_file = _verified_file(store, cache)
    if not force and verified_file.is_file():
        return store
    with ExitStack() as stack:
        is_cached = True
        try:
            stack.enter_context(lock_directory(verified_file.parent, report, VERIFYING_MESSAGE))
        except OSError as error:  # the cache is not writable
            is_cached = False
            reason = f"{cache} cannot be written: {error.strerror or error}"
            report(Progress(f"verifying {store.path} at every start, because {reason}"))
        if not force and verified_file.is_file():  # written while this process waited
            return store
        if is_cached:
            verified_file.unlink(missing_ok=True)
        size = sum(s.size_bytes for split in store.splits for s in split.files)
        progress = report if size >= MIN_REPORT_BYTES else lambda progress: None
        raise_errors(
            find_damage(store, progress_counter(progress, f"verifying {store.path}", size))
        )
        if is_cached:
            _mark_verified(verified_file, store)
    return store


def _verified_file(store: Store, cache: Path) -> Path:
    """Return the file that records a verified store in its current state."""
    files: list[list[object]] = []
    for split in store.splits:
        for shard in split.files:
            file = store.path / shard.file
            stat = file.stat()
            state = [stat.st_size, stat.st_mtime_ns, stat.st_ino]
            files.append([str(file.absolute()), *state, shard.begin, shard.size_bytes, shard.xxh3])
    manifest = store.manifest
    name = hash_json([FORMAT, manifest.dtype, manifest.vocab_size, files])
    return cache / "verified" / name / "verified.json"


def _mark_verified(verified_file: Path, store: Store) -> None:
    write_durably(verified_file, json.dumps({"store": str(store.path)}).encode())


def write_scans(path: Path, value: Any) -> None:
    """Write the results of scanning text as JSON, preceded by its hash."""
    text = json.dumps(value).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    write_durably(path, xxh3_64_hexdigest(text).encode() + b"\n" + text)


def read_scans(path: Path) -> Any:
    """Return what `write_scans` wrote; None if it is missing or damaged."""
    if not path.is_file():
        return None
    digest, _, text = path.read_bytes().partition(b"\n")
    return json.loads(text) if digest == xxh3_64_hexdigest(text).encode() else None


@contextmanager
def lock_directory(directory: Path, report: Report, waiting: str) -> Iterator[None]:
    """Hold the lock of a directory; the system releases it if this process dies.

    ``waiting`` is reported while another process holds the lock.
    """
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / "lock").open("w") as file:
        reported = False
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if not reported:
                    report(Progress(waiting))
                reported = True
                time.sleep(0.1)
        for stale in directory.glob("*.tmp"):  # from a killed attempt
            stale.unlink()
        yield


@contextmanager
def convert_cache_errors(cache: Path) -> Iterator[None]:
    """Convert an OSError inside into an error of ``data.cache_dir``."""
    try:
        yield
    except OSError as error:
        rule = f"cannot be written: {error.strerror or error}"
        remedy = "set data.cache_dir to a writable directory with enough space"
        raise InvalidConfig([ConfigError("data.cache_dir", str(cache), rule, remedy)]) from None
