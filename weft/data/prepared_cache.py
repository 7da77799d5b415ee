"""Cache of prepared stores, and the progress and errors of preparation.

A store's directory in the cache is named by a hash of all that determines its content.  So a
changed file, tokenizer or setting gives another store, and equal inputs are tokenized once.

weft *verifies* a store, its content hashes and token ids, once for each state of its files.
Undetected damage trains a wrong model: a flipped bit is another token, and an id outside the
vocabulary is an index error deep inside the model.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from pydantic import TypeAdapter
from xxhash import xxh3_64_hexdigest, xxh3_128

from weft.config.errors import ConfigError, InvalidConfig
from weft.config.files import write_durably
from weft.config.locks import NO_LOCKS_REMEDY, LocksMissing, hold_lock
from weft.data.remote_tokens import open_object
from weft.data.token_store import (
    DATA_REMEDY,
    FORMAT,
    STORE_FILE,
    Manifest,
    Shard,
    Split,
    Store,
    damaged_store_error,
    hash_json,
    is_store,
    open_store,
)
from weft.data.workers import num_cores

T = TypeVar("T")

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
READ_BYTES = 1 << 20  # per read: fits into the CPU cache between hash and maximum
MAX_THREADS = 8  # xxhash and NumPy release the GIL


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
def collect_errors(errors: list[ConfigError], key: str = "data.path") -> Iterator[None]:
    """Append errors to ``errors``; ``key`` is the key that named the source."""
    try:
        yield
    except InvalidConfig as invalid:
        errors += [
            replace(error, key=key) if error.key == "data.path" else error
            for error in invalid.errors
        ]


def raise_errors(errors: Sequence[ConfigError]) -> None:
    """Raise InvalidConfig with these errors, without duplicates, if there are any."""
    if errors:
        raise InvalidConfig({str(error): error for error in errors}.values())


# --------------------------------------------------------------------------- stores


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
        with convert_cache_errors(cache), lock_prepared(directory, report, WAITING_MESSAGE):
            if not is_store(directory):  # another process may have built it meanwhile
                write_durably(directory / STORE_FILE, format_manifest(build(directory)))
                # The hashes are of the tokens just written: no need to read them again.
                store = open_store(directory)
                verified_file = _verified_file(store, cache)
                with lock_prepared(verified_file.parent, report, VERIFYING_MESSAGE):
                    _mark_verified(verified_file, store)
    return open_verified_store(directory, cache, report)


def format_manifest(manifest: Manifest) -> bytes:
    """Return the content of ``store.json``."""
    return json.dumps(asdict(manifest), indent=1).encode()


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
    if store.url:  # the reader compares each part with its hash
        if force:
            _verify_files(store, report)
        return store
    verified_file = _verified_file(store, cache)
    if not force and verified_file.is_file():
        return store
    with ExitStack() as stack:
        is_cached = True
        try:
            stack.enter_context(lock_prepared(verified_file.parent, report, VERIFYING_MESSAGE))
        except OSError as error:  # the cache is not writable
            is_cached = False
            reason = f"{cache} cannot be written: {error.strerror or error}"
            report(Progress(f"verifying {store.path} at every start, because {reason}"))
        if not force and verified_file.is_file():  # written while this process waited
            return store
        if is_cached:
            verified_file.unlink(missing_ok=True)
        _verify_files(store, report)
        if is_cached:
            _mark_verified(verified_file, store)
    return store


def _verify_files(store: Store, report: Report) -> None:
    size = sum(s.size_bytes for split in store.splits for s in split.files)
    progress = report if size >= MIN_REPORT_BYTES else lambda progress: None
    advance = progress_counter(progress, f"verifying {store.url or store.path}", size)
    tasks = [(store, split, shard, advance) for split in store.splits for shard in split.files]
    with ThreadPoolExecutor(min(MAX_THREADS, num_cores())) as pool:
        raise_errors(list(filter(None, pool.map(_check_file, *zip(*tasks, strict=True)))))


def _verified_file(store: Store, cache: Path) -> Path:
    """Return the file that records a verified store in its current state."""
    files: list[list[object]] = []
    for shard in (shard for split in store.splits for shard in split.files):
        file = store.path / shard.file
        stat = file.stat()
        state = [stat.st_size, stat.st_mtime_ns, stat.st_ino]
        files.append([str(file.absolute()), *state, shard.begin, shard.size_bytes, shard.xxh3])
    manifest = store.manifest
    name = hash_json([FORMAT, manifest.dtype, manifest.vocab_size, files])
    return cache / "verified" / name / "verified.json"


def _mark_verified(verified_file: Path, store: Store) -> None:
    write_durably(verified_file, json.dumps({"store": str(store.path)}).encode())


def _check_file(
    store: Store, split: Split, shard: Shard, advance: Callable[[int], None]
) -> ConfigError | None:
    """Return an error if a file of a store differs from what was prepared."""
    damage, remedy = "", DATA_REMEDY
    if shard.is_external:
        remedy = f"restore {shard.file}; if it was changed on purpose, prepare the data again"
    try:
        digest, invalid_id = _hash_shard(store, shard, shard in split.shards, advance)
        if digest != shard.xxh3:
            damage = f"is damaged: its content hash is {digest}, store.json has {shard.xxh3}"
        elif invalid_id:
            damage = invalid_id
            remedy = "prepare the data again with the tokenizer that encoded the tokens"
        elif shard == split.index:
            damage = _check_index(store, split, shard)
    except OSError as error:
        damage = f"cannot be read: {error.strerror or error}"
    location = store.url or store.path
    return damaged_store_error(location, f"{shard.file} {damage}", remedy) if damage else None


def _hash_shard(
    store: Store, shard: Shard, holds_tokens: bool, advance: Callable[[int], None]
) -> tuple[str, str]:
    """Return the content hash, and a sentence about the first invalid id."""
    hasher, invalid_id, position = xxh3_128(), "", 0
    vocab_size, dtype = store.manifest.vocab_size, np.dtype(store.manifest.dtype)
    buffer = memoryview(bytearray(min(READ_BYTES, max(1, shard.size_bytes))))
    path = store.path / shard.file
    with open_object(f"{store.url}/{shard.file}") if store.url else path.open("rb") as file:
        file.seek(shard.begin)
        while count := file.readinto(buffer[: shard.size_bytes - position]):
            block = buffer[:count]
            hasher.update(block)
            if holds_tokens and not invalid_id:
                ids = np.frombuffer(block[: count // dtype.itemsize * dtype.itemsize], dtype)
                if len(ids) and (largest := int(ids.max())) >= vocab_size:
                    first = position // dtype.itemsize + int(np.argmax(ids >= vocab_size))
                    invalid_id = (
                        f"holds token id {largest:,} (the first such id is token {first:,} of the "
                        f"file); the vocabulary has {vocab_size:,} entries"
                    )
            position += count
            advance(count)
    return hasher.hexdigest(), invalid_id


def _check_index(store: Store, split: Split, shard: Shard) -> str:
    """Return the damage of the conversation index of a split."""
    rows = np.asarray(store.map_all(shard, "int64")).reshape(-1, 3)
    ends, files = rows[:, 0], rows[:, 1]
    if len(ends) and ((np.diff(ends, prepend=0) <= 0).any() or ends[-1] != split.tokens):
        return f"does not partition the {split.tokens:,} tokens into conversations"
    if len(files) and (files.min() < 0 or files.max() >= len(store.manifest.files)):
        return f"refers to a file that is not among the {len(store.manifest.files)} in store.json"
    return ""


# --------------------------------------------------------------------------- scans and locks


def format_scans(value: Any) -> bytes:
    """Return the results of scanning text as JSON, preceded by its hash."""
    text = json.dumps(value).encode()
    return xxh3_64_hexdigest(text).encode() + b"\n" + text


def write_scans(path: Path, value: Any) -> None:
    """Write the results of scanning text; see `format_scans`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_durably(path, format_scans(value))


def read_scans(path: Path) -> Any:
    """Return what `format_scans` formatted; None if it is missing or damaged."""
    if not path.is_file():
        return None
    digest, _, text = path.read_bytes().partition(b"\n")
    return json.loads(text) if digest == xxh3_64_hexdigest(text).encode() else None


def load_or_scan(cache: Path, key: object, adapter: TypeAdapter[T], scan: Callable[[], T]) -> T:
    """Return the cached result of scanning a source, or scan it and cache the result.

    Args:
        cache: directory of prepared data; the result goes below ``scans/``.
        key: all that determines the result, as JSON types.
        adapter: converts the result to JSON and back.
        scan: reads the source.
    """
    file = cache / "scans" / f"{hash_json(key)}.json"
    with convert_cache_errors(cache):
        if (tree := read_scans(file)) is not None:
            return adapter.validate_python(tree)
    result = scan()
    with convert_cache_errors(cache):
        write_scans(file, adapter.dump_python(result, mode="json"))
    return result


@contextmanager
def lock_prepared(directory: Path, report: Report, waiting: str) -> Iterator[None]:
    """Hold the lock of a directory of prepared data, and remove temporary files.

    ``waiting`` is reported while another process holds the lock.
    """
    with hold_lock(directory / "lock", lambda: report(Progress(waiting))):
        for stale in directory.glob("*.tmp"):  # from a killed attempt
            stale.unlink()
        yield


@contextmanager
def convert_cache_errors(cache: Path, key: str = "data.cache_dir") -> Iterator[None]:
    """Convert an OSError inside into an error of ``key``."""
    try:
        yield
    except OSError as error:
        rule = f"cannot be written: {error.strerror or error}"
        remedy = f"set {key} to a writable directory with enough space"
        if isinstance(error, LocksMissing):
            rule, remedy = error.rule, NO_LOCKS_REMEDY
        raise InvalidConfig([ConfigError(key, str(cache), rule, remedy)]) from None
