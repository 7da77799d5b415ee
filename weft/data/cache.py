"""What all preparing has in common: its progress, its cache, and stores that are there already."""

from __future__ import annotations

import fcntl
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from weft.data.store import TOKENIZER_FILE, Store, open_store
from weft.job import DataSection, InvalidJob, Problem


@dataclass(frozen=True)
class Progress:
    """What a preparation is doing; ``total_bytes`` is 0 where there is nothing to count."""

    message: str
    done_bytes: int = 0
    total_bytes: int = 0


Report = Callable[[Progress], None]


@contextmanager
def noting(problems: list[Problem]) -> Iterator[None]:
    """Problems, for later; those of a path are then of a mixture's."""
    try:
        yield
    except InvalidJob as invalid:
        problems += [
            replace(found, key="data.mixture") if found.key == "data.path" else found
            for found in invalid.problems
        ]


def open_given(section: DataSection, tokenizer_hash: str | None) -> Store:
    """The store that the path is, which must be of the tokenizer that is given, if one is."""
    store = open_store(section.path)
    if tokenizer_hash not in (None, store.manifest.tokenizer_hash):
        rule = f"does not match the store {section.path}, which was prepared with another"
        remedy = f"use {store.path / TOKENIZER_FILE}"
        raise InvalidJob([Problem("data.tokenizer", section.tokenizer, rule, remedy)])
    return store


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
    try:
        yield
    except OSError as error:
        rule = f"cannot be written: {error.strerror or error}"
        remedy = "give --data.cache a folder that is writable and has room"
        raise InvalidJob([Problem("data.cache", str(cache), rule, remedy)]) from None
