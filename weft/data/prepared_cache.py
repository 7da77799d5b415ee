"""What all preparing has in common: progress, mistakes, the cache, and stores that are there.

In the cache, a store's folder is named by a hash of everything that decides its content, so a
changed file, tokenizer or setting is another store, and the same is not tokenised twice.
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
    """What a preparation is doing; ``done`` of ``total`` bytes, tokens or lines, and 0 of 0 where
    there is nothing to count."""

    message: str
    done: int = 0
    total: int = 0


Report = Callable[[Progress], None]

PREPARES = "waiting for another process that prepares the same text"
REPORTED_BYTES = 1 << 28  # of a store whose check is worth a line of progress


def counting(report: Report, message: str, total: int) -> Callable[[int], None]:
    """A function that is called with what has been done since, and reports how far that is.

    ``total`` may be an estimate: no more than that is ever reported.
    """
    done = 0

    def advance(more: int) -> None:
        nonlocal done
        done += more
        report(Progress(message, min(done, total), total))

    return advance


# --------------------------------------------------------------------------- mistakes


@contextmanager
def noting(problems: list[ConfigError], mixture: bool = False) -> Iterator[None]:
    """Problems, for later; ``mixture``: those of a path are of one of a mixture's."""
    try:
        yield
    except InvalidConfig as invalid:
        problems += [
            replace(found, key="data.mixture") if mixture and found.key == "data.path" else found
            for found in invalid.problems
        ]


def refuse(problems: Sequence[ConfigError]) -> None:
    """Raise InvalidConfig with these problems, each once, if there are any."""
    if problems:
        raise InvalidConfig({str(found): found for found in problems}.values())


# --------------------------------------------------------------------------- stores


def open_given(
    section: DataSection, tokenizer_hash: str | None, cache: Path, report: Report
) -> Store:
    """The store that the path is, which must be of the tokenizer that is given, if one is."""
    store = open_verified(section.path, cache, report)
    if tokenizer_hash not in (None, store.manifest.tokenizer_hash):
        rule = f"does not match the store {section.path}, which was prepared with another"
        remedy = f"use {store.path / TOKENIZER_FILE}"
        raise InvalidConfig([ConfigError("data.tokenizer", section.tokenizer, rule, remedy)])
    return store


def prepared_once(
    cache: Path, content: object, report: Report, build: Callable[[Path], Manifest]
) -> Store:
    """The store below ``cache`` that ``content`` decides, built now unless it was before.

    Args:
        content: what JSON can write.
        build: makes all of a store in a folder but ``store.json``, which comes last.
    """
    folder = cache / "stores" / hash_json(content)
    if not is_store(folder):
        with cache_problems(cache), locked(folder, report, PREPARES):
            if not is_store(folder):  # another process may have made it while this one waited
                manifest = asdict(build(folder))
                write_durably(folder / STORE_FILE, json.dumps(manifest, indent=1).encode())
                # The hashes are of the tokens themselves: to read them now would read the same.
                store = open_store(folder)
                _remember(_memory(store, cache), store)
    return open_verified(folder, cache, report)


def open_verified(path: str | Path, cache: Path, report: Report, anew: bool = False) -> Store:
    """Open a store and compare every byte with its manifest, unless that was done before.

    The result is remembered below ``cache`` for path, size, modification time and inode of every
    file: a store that changes is read again.  One process reads it, others wait.

    Args:
        report: is called with the progress through a large store.
        anew: ignore what is remembered.

    Raises:
        InvalidConfig: one problem for each file that is missing, damaged, or does not fit the
            vocabulary.
    """
    store = open_store(path)
    memory = _memory(store, cache)
    if not anew and memory.is_file():
        return store
    with ExitStack() as stack:
        remembered = True
        try:
            lock = locked(memory.parent, report, "waiting for another process that checks the data")
            stack.enter_context(lock)
        except OSError as error:  # of a cache that cannot be written
            remembered = False
            why = f"{cache} cannot be written: {error.strerror or error}"
            report(Progress(f"checking {store.path} at every start, because {why}"))
        if not anew and memory.is_file():  # written while this process waited
            return store
        if remembered:
            memory.unlink(missing_ok=True)
        size = sum(s.size_bytes for split in store.splits for s in split.files)
        shown = report if size >= REPORTED_BYTES else lambda progress: None
        refuse(find_damage(store, counting(shown, f"checking {store.path}", size)))
        if remembered:
            _remember(memory, store)
    return store


def _memory(store: Store, cache: Path) -> Path:
    """The file that says that a store was checked, in the state that its files are in now."""
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


def _remember(memory: Path, store: Store) -> None:
    memory.parent.mkdir(parents=True, exist_ok=True)
    write_durably(memory, json.dumps({"store": str(store.path)}).encode())


def write_scans(path: Path, value: Any) -> None:
    """Keep what reading the text has found, as JSON behind its hash."""
    text = json.dumps(value).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    write_durably(path, xxh3_64_hexdigest(text).encode() + b"\n" + text)


def read_scans(path: Path) -> Any:
    """Return what `write_scans` has written; None if there is nothing, or if it is damaged."""
    if not path.is_file():
        return None
    digest, _, text = path.read_bytes().partition(b"\n")
    return json.loads(text) if digest == xxh3_64_hexdigest(text).encode() else None


@contextmanager
def locked(folder: Path, report: Report, waiting: str) -> Iterator[None]:
    """Hold the folder's lock, which the system frees should this process die.

    Args:
        waiting: what to report while another process holds it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as file:
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
        for stale in folder.glob("*.tmp"):  # of an attempt that was killed
            stale.unlink()
        yield


@contextmanager
def cache_problems(cache: Path) -> Iterator[None]:
    """What the operating system refuses inside is a problem of ``data.cache_dir``."""
    try:
        yield
    except OSError as error:
        rule = f"cannot be written: {error.strerror or error}"
        remedy = "give --data.cache_dir a folder that is writable and has room"
        raise InvalidConfig([ConfigError("data.cache_dir", str(cache), rule, remedy)]) from None
