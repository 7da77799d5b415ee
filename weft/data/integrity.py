"""Compare prepared tokens with their manifest: content hashes, and ids with the vocabulary.

Damage that nobody notices trains a wrong model: a flipped bit in a file of tokens is another token,
and an id outside the vocabulary is an index error deep inside the model.  `weft.data.prepared_cache` decides
when a store is checked, and remembers the result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import BinaryIO, NamedTuple

import numpy as np
from xxhash import xxh3_128

from weft.config.errors import ConfigError
from weft.data.token_store import DATA_REMEDY, Shard, Split, Store, damaged
from weft.data.workers import num_cores

READ_BYTES = 1 << 20  # at a time: stays in a processor's cache from the hash to the maximum
MOST_THREADS = 8  # that read: xxhash and NumPy release the interpreter's lock


class FileCheck(NamedTuple):
    """The result for one file: the damage in a sentence, or an empty text."""

    file: str
    size_bytes: int
    damage: str
    remedy: str


def check_files(store: Store, advance: Callable[[int], None]) -> Iterator[FileCheck]:
    """Read every file of a store and compare it with the manifest, in the manifest's order.

    Args:
        advance: is called with the number of bytes that were read since.
    """
    manifest = store.manifest
    tasks = [
        (split, shard) for split in (manifest.train, manifest.validation) for shard in split.files
    ]

    def check(task: tuple[Split, Shard]) -> FileCheck:
        return _check_file(store, *task, advance)

    with ThreadPoolExecutor(min(MOST_THREADS, num_cores())) as pool:
        yield from pool.map(check, tasks)


def find_damage(store: Store, advance: Callable[[int], None]) -> list[ConfigError]:
    """Return a problem for each file of a store that is not what was prepared."""
    checks = check_files(store, advance)
    return [damaged(store.path, f"{c.file} {c.damage}", c.remedy) for c in checks if c.damage]


def _check_file(
    store: Store, split: Split, shard: Shard, advance: Callable[[int], None]
) -> FileCheck:
    damage, remedy = "", DATA_REMEDY
    if shard.foreign:
        remedy = f"restore {shard.file}; if it was changed on purpose, prepare the data again"
    try:
        digest, outside = _read(store, shard, shard in split.shards, advance)
        if digest != shard.xxh3:
            damage = f"is damaged: its content hash is {digest}, store.json has {shard.xxh3}"
        elif outside:
            damage = outside
            remedy = "prepare the data again with the tokenizer that made the tokens"
        elif shard == split.index:
            damage = _check_index(store, split, shard)
    except OSError as error:
        damage = f"cannot be read: {error.strerror or error}"
    return FileCheck(shard.file, shard.size_bytes, damage, remedy)


def _read(
    store: Store, shard: Shard, holds_tokens: bool, advance: Callable[[int], None]
) -> tuple[str, str]:
    """Return the content hash, and a sentence about the first id outside the vocabulary."""
    content, outside, position = xxh3_128(), "", 0
    vocab_size, dtype = store.manifest.vocab_size, np.dtype(store.manifest.dtype)
    with (store.path / shard.file).open("rb", buffering=0) as file:
        file.seek(shard.begin)
        for block in _blocks(file, shard.size_bytes):
            content.update(block)
            if holds_tokens and not outside:
                ids = np.frombuffer(block[: len(block) // dtype.itemsize * dtype.itemsize], dtype)
                if len(ids) and (largest := int(ids.max())) >= vocab_size:
                    first = position // dtype.itemsize + int(np.argmax(ids >= vocab_size))
                    outside = (
                        f"holds token id {largest:,} (the first such id is token {first:,} of the "
                        f"file); the vocabulary has {vocab_size:,} entries"
                    )
            position += len(block)
            advance(len(block))
    return content.hexdigest(), outside


def _blocks(file: BinaryIO, size: int) -> Iterator[memoryview]:
    """Yield up to ``size`` bytes of a file through one buffer."""
    buffer = memoryview(bytearray(READ_BYTES))
    while size:
        wanted, filled = min(size, READ_BYTES), 0
        while filled < wanted and (count := file.readinto(buffer[filled:wanted])):  # type: ignore[attr-defined]
            filled += count
        yield buffer[:filled]
        size = size - filled if filled == wanted else 0


def _check_index(store: Store, split: Split, shard: Shard) -> str:
    """Return what is wrong with the table of conversations of a split."""
    rows = np.fromfile(store.path / shard.file, np.int64).reshape(-1, 3)
    ends, files = rows[:, 0], rows[:, 1]
    if len(ends) and ((np.diff(ends, prepend=0) <= 0).any() or ends[-1] != split.tokens):
        return f"does not divide the {split.tokens:,} tokens into conversations"
    if len(files) and (files.min() < 0 or files.max() >= len(store.manifest.files)):
        return f"names a file that is not one of the {len(store.manifest.files)} in store.json"
    return ""
