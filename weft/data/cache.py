"""What all preparing has in common: progress, mistakes, the cache, and stores that are there.

In the cache, a store's folder is named by a hash of everything that decides its content, so a
changed file, tokenizer or setting is another store, and the same is not tokenised twice.
"""

from __future__ import annotations

import fcntl
import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from weft.data.store import (
    STORE_FILE,
    TOKENIZER_FILE,
    Manifest,
    Store,
    hash_json,
    is_store,
    open_store,
)
from weft.files import write_durably
from weft.job import DataSection, InvalidJob, Problem

# --------------------------------------------------------------------------- progress


@dataclass(frozen=True)
class Progress:
    """What a preparation is doing; ``done`` of ``total`` bytes, tokens or lines, and 0 of 0 where
    there is nothing to count."""

    message: str
    done: int = 0
    total: int = 0


Report = Callable[[Progress], None]


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
def noting(problems: list[Problem], mixture: bool = False) -> Iterator[None]:
    """Problems, for later; ``mixture``: those of a path are of one of a mixture's."""
    try:
        yield
    except InvalidJob as invalid:
        problems += [
            replace(found, key="data.mixture") if mixture and found.key == "data.path" else found
            for found in invalid.problems
        ]


def refuse(problems: Sequence[Problem]) -> None:
    """Raise InvalidJob with these problems, each once, if there are any."""
    if problems:
        raise InvalidJob({str(found): found for found in problems}.values())


# --------------------------------------------------------------------------- stores


def open_given(section: DataSection, tokenizer_hash: str | None) -> Store:
    """The store that the path is, which must be of the tokenizer that is given, if one is."""
    store = open_store(section.path)
    if tokenizer_hash not in (None, store.manifest.tokenizer_hash):
        rule = f"does not match the store {section.path}, which was prepared with another"
        remedy = f"use {store.path / TOKENIZER_FILE}"
        raise InvalidJob([Problem("data.tokenizer", section.tokenizer, rule, remedy)])
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
    if is_store(folder):
        return open_store(folder)
    with cache_problems(cache), locked(folder, report):
        if not is_store(folder):  # another process may have made it while this one waited
            manifest = asdict(build(folder))
            write_durably(folder / STORE_FILE, json.dumps(manifest, indent=1).encode())
    return open_store(folder)


@contextmanager
def locked(folder: Path, report: Report) -> Iterator[None]:
    """Hold the folder's lock, which the system frees should this process die."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as file:
        waiting = False
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if not waiting:
                    report(Progress("waiting for another process that prepares the same text"))
                waiting = True
                time.sleep(0.1)
        for stale in folder.glob("*.tmp"):  # of an attempt that was killed
            stale.unlink()
        yield


@contextmanager
def cache_problems(cache: Path) -> Iterator[None]:
    """What the operating system refuses inside is a problem of ``data.cache``."""
    try:
        yield
    except OSError as error:
        rule = f"cannot be written: {error.strerror or error}"
        remedy = "give --data.cache a folder that is writable and has room"
        raise InvalidJob([Problem("data.cache", str(cache), rule, remedy)]) from None
