"""Verify the tokens of a store: content hashes, and ids within the vocabulary.

Undetected damage trains a wrong model: a flipped bit is another token, and an id outside the
vocabulary is an index error deep inside the model.  `weft.data.prepared_cache` decides when to
verify a store, and caches the result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import BinaryIO, NamedTuple

import numpy as np
from xxhash import xxh3_128

from weft.config.errors import ConfigError
from weft.data.token_store import DATA_REMEDY, Shard, Split, Store, damaged_store_error
from weft.data.workers import num_cores

READ_BYTES = 1 << 20  # per read: fits into the CPU cache between hash and maximum
MAX_THREADS = 8  # xxhash and NumPy release the GIL


class FileCheck(NamedTuple):
    """Result for one file; ``damage`` is a sentence, or empty."""

    file: str
    size_bytes: int
    damage: str
    remedy: str


def check_files(store: Store, advance: Callable[[int], None]) -> Iterator[FileCheck]:
    """Yield the result for each file of a store, in the manifest's order.

    Args:
        store: an open store; its manifest names the files.
        advance: is called with the bytes read since the last call.
    """
    manifest = store.manifest
    tasks = [
        (split, shard) for split in (manifest.train, manifest.validation) for shard in split.files
    ]

    def check(task: tuple[Split, Shard]) -> FileCheck:
        return _check_file(store, *task, advance)

    with ThreadPoolExecutor(min(MAX_THREADS, num_cores())) as pool:
        yield from pool.map(check, tasks)


def find_damage(store: Store, advance: Callable[[int], None]) -> list[ConfigError]:
    """Return an error for each file of a store that differs from what was prepared."""
    checks = check_files(store, advance)
    return [
        damaged_store_error(store.path, f"{check.file} {check.damage}", check.remedy)
        for check in checks
        if check.damage
    ]


def _check_file(
    store: Store, split: Split, shard: Shard, advance: Callable[[int], None]
) -> FileCheck:
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
    return FileCheck(shard.file, shard.size_bytes, damage, remedy)


def _hash_shard(
    store: Store, shard: Shard, holds_tokens: bool, advance: Callable[[int], None]
) -> tuple[str, str]:
    """Return the content hash, and a sentence about the first invalid id."""
    hasher, invalid_id, position = xxh3_128(), "", 0
    vocab_size, dtype = store.manifest.vocab_size, np.dtype(store.manifest.dtype)
    with (store.path / shard.file).open("rb", buffering=0) as file:
        file.seek(shard.begin)
        for block in _read_blocks(file, shard.size_bytes):
            hasher.update(block)
            if holds_tokens and not invalid_id:
                ids = np.frombuffer(block[: len(block) // dtype.itemsize * dtype.itemsize], dtype)
                if len(ids) and (largest := int(ids.max())) >= vocab_size:
                    first = position // dtype.itemsize + int(np.argmax(ids >= vocab_size))
                    invalid_id = (
                        f"holds token id {largest:,} (the first such id is token {first:,} of the "
                        f"file); the vocabulary has {vocab_size:,} entries"
                    )
            position += len(block)
            advance(len(block))
    return hasher.hexdigest(), invalid_id


def _read_blocks(file: BinaryIO, size: int) -> Iterator[memoryview]:
    """Yield up to ``size`` bytes of a file through one buffer."""
    buffer = memoryview(bytearray(READ_BYTES))
    while size:
        wanted, filled = min(size, READ_BYTES), 0
        while filled < wanted and (count := file.readinto(buffer[filled:wanted])):  # type: ignore[attr-defined]
            filled += count
        yield buffer[:filled]
        size = size - filled if filled == wanted else 0


def _check_index(store: Store, split: Split, shard: Shard) -> str:
    """Return the damage of the conversation index of a split."""
    rows = np.fromfile(store.path / shard.file, np.int64).reshape(-1, 3)
    ends, files = rows[:, 0], rows[:, 1]
    if len(ends) and ((np.diff(ends, prepend=0) <= 0).any() or ends[-1] != split.tokens):
        return f"does not partition the {split.tokens:,} tokens into conversations"
    if len(files) and (files.min() < 0 or files.max() >= len(store.manifest.files)):
        return f"refers to a file that is not among the {len(store.manifest.files)} in store.json"
    return ""
