"""Shard files: one binary file per rank, and a table of contents in JSON.

A file holds the elements of shards one after another, row-major, in the machine's byte order
(little-endian on all platforms of PyTorch).  The table gives the file and position of every shard,
so any layout can read the shards that it needs.  The table is data, which weft validates, and not a
program like a pickle.

    "tensors": {NAME: {"dtype": "float32", "shape": [512, 32], "fingerprint": -81...,
                       "shards": [[[0, 0], [256, 32], FILE, POSITION], ...]}}
    "files": [{"name": "shard-00000.bin", "bytes": 65536, "xxh3": "9f..."}]

A shard is (offsets, sizes, index of its file, first byte).
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Lock
from typing import IO, Any, NamedTuple

import torch
import xxhash
from torch import Tensor

from weft.checkpoint import safetensors
from weft.checkpoint.fingerprint import wrap_int64
from weft.checkpoint.storage import (
    CorruptData,
    allocate_buffer,
    read_chunks,
    read_range,
    regular_file_size,
)

Json = dict[str, Any]

FILE_NAME = re.compile(r"shard-[0-9]{5,9}\.bin")
HASH = re.compile("[0-9a-f]{32}")
MAX_SIZE = (1 << 63) - 1  # bytes of a file, or elements of a tensor
# Keyed by torch's names.
DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in safetensors.DTYPES.values()}

READ_BYTES = 16 << 20  # a request above this size serves one shard only
MAX_READ_WASTE = 0.05  # maximum unused fraction of a request
NUM_READERS = min(4, len(os.sched_getaffinity(0)))  # parallel requests


def tensor_bytes(tensor: Tensor) -> memoryview:
    """Return a CPU tensor's elements as bytes; shares memory if it is contiguous."""
    flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
    return memoryview(flat.numpy())  # type: ignore[arg-type]


def group_by_size(sizes: Mapping[str, int], max_size: int) -> list[list[str]]:
    """Split names, in order, into groups of total size at most ``max_size``.

    A larger item gets its own group.
    """
    groups: list[list[str]] = []
    group_size = 0
    for name, size in sizes.items():
        if not groups or group_size + size > max_size:
            groups.append([])
            group_size = 0
        groups[-1].append(name)
        group_size += size
    return groups


# --------------------------------------------------------------------------- writing


class StagedShard(NamedTuple):
    """Shard of a tensor, copied for a checkpoint."""

    name: str
    shape: tuple[int, ...]  # of the unsharded tensor
    offsets: tuple[int, ...]
    fingerprint: int  # partial sum, computed from the live tensor
    content: Tensor  # on the CPU


def write_shards(file: IO[bytes], name: str, shards: Iterable[StagedShard]) -> Json:
    """Write shards one after another; return their entries for `build_contents`."""
    position, digest, entries = 0, xxhash.xxh3_128(), []
    for shard in shards:
        content = tensor_bytes(shard.content)
        file.write(content)
        digest.update(content)
        dtype = str(shard.content.dtype).removeprefix("torch.")
        location = [list(shard.offsets), list(shard.content.shape), position]
        entries.append([shard.name, dtype, list(shard.shape), shard.fingerprint, location])
        position += len(content)
    return {
        "file": {"name": name, "bytes": position, "xxh3": digest.hexdigest()},
        "shards": entries,
    }


def build_contents(entries_by_rank: Iterable[Json]) -> Json:
    """Merge the ranks' entries into the manifest's table of contents.

    Raises:
        CorruptData: if the shards do not cover every tensor.
    """
    tensors: Json = {}
    files: list[Json] = []
    for rank in entries_by_rank:
        for name, dtype, shape, fingerprint, (offsets, sizes, position) in rank["shards"]:
            entry = tensors.setdefault(
                name, {"dtype": dtype, "shape": shape, "fingerprint": 0, "shards": []}
            )
            entry["fingerprint"] = wrap_int64(entry["fingerprint"] + fingerprint)
            entry["shards"].append([offsets, sizes, len(files), position])
        files.append(rank["file"])
    contents = {"tensors": tensors, "files": files}
    parse_contents(contents)
    return contents


# --------------------------------------------------------------------------- reading


class Shard(NamedTuple):
    """Shard of a tensor and its position in a file."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    dtype: torch.dtype
    file: str
    position: int


class TensorEntry(NamedTuple):
    """Tensor in a checkpoint."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    fingerprint: int
    shards: list[Shard]


class Contents(NamedTuple):
    """Validated table of contents."""

    tensors: dict[str, TensorEntry]
    files: dict[str, tuple[int, str]]  # (bytes, hash) by name

    def without_shards(self) -> Contents:
        """Return the same tensors without any shards."""
        tensors = {name: entry._replace(shards=[]) for name, entry in self.tensors.items()}
        return Contents(tensors, {})


def parse_contents(manifest: Json, require_all_shards: bool = True) -> Contents:
    """Parse and validate a manifest's table of contents.

    Args:
        manifest: manifest.
        require_all_shards: True if every tensor must be complete.

    Raises:
        CorruptData: if the table is invalid: file names outside the directory, shards outside their
            files, or shards that do not cover their tensor.
    """
    try:
        files = {file["name"]: (file["bytes"], file["xxh3"]) for file in manifest["files"]}
        names, used_bytes = list(files), dict.fromkeys(files, 0)
        _check(all(FILE_NAME.fullmatch(name) for name in names), "an invalid file name")
        for name, (size, digest) in files.items():
            _check(
                type(size) is int and 0 <= size <= MAX_SIZE, f"the bytes of {name}: {size!r:.50}"
            )
            _check(HASH.fullmatch(digest) is not None, f"the xxh3 of {name}: {digest!r:.50}")
        _check(len(names) == len(manifest["files"]), "a repeated file name")
        tensors = {}
        for name, entry in manifest["tensors"].items():
            dtype, shape = DTYPES[entry["dtype"]], tuple(entry["shape"])
            is_shape = all(type(n) is int and n >= 0 for n in shape)
            _check(is_shape and math.prod(n for n in shape if n) <= MAX_SIZE, f"shape of {name}")
            digest = entry["fingerprint"]
            _check(type(digest) is int and -(1 << 63) <= digest < 1 << 63, f"fingerprint of {name}")
            shards, elements = [], 0
            for offsets, sizes, file, position in entry["shards"]:
                numbers = [*offsets, *sizes, file, position]
                _check(all(type(n) is int and n >= 0 for n in numbers), f"a shard of {name}")
                fits = all(o + n <= m for o, n, m in zip(offsets, sizes, shape, strict=True))
                size = math.prod(sizes) * dtype.itemsize
                _check(fits and position + size <= files[names[file]][0], f"a shard of {name}")
                used_bytes[names[file]] += size
                shard = Shard(tuple(offsets), tuple(sizes), dtype, names[file], position)
                shards.append(shard)
                elements += math.prod(sizes)
            _check(not require_all_shards or elements == math.prod(shape), f"the shards of {name}")
            tensors[name] = TensorEntry(dtype, shape, digest, shards)
        for name, (size, _) in files.items():  # a small file must not cause a huge allocation
            _check(used_bytes[name] <= size, f"overlapping shards in {name}")
        return Contents(tensors, files)
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise CorruptData(
            f"its table of contents: {type(error).__name__}: {str(error)[:200]}"
        ) from error


def _check(is_valid: bool, message: str) -> None:
    if not is_valid:
        raise ValueError(message)


class ShardRead(NamedTuple):
    """Overlap of one shard with a tensor that is to be filled."""

    shard: Shard
    begin: tuple[int, ...]  # first index of the overlap in the shard
    target: Tensor  # view that the overlap fills

    def byte_range(self) -> tuple[int, int]:
        """Return the first byte in the file and the end; full rows are read."""
        sizes, itemsize = self.shard.sizes, self.shard.dtype.itemsize
        row_bytes = math.prod(sizes[1:]) * itemsize
        first, rows = (self.begin[0], self.target.shape[0]) if sizes else (0, 1)
        start = self.shard.position + first * row_bytes
        return start, start + rows * row_bytes

    def direct_buffer(self) -> memoryview | None:
        """Return the target's memory if the bytes fit without conversion, else None."""
        target, shard = self.target, self.shard
        is_full_width = target.shape[1:] == shard.sizes[1:]
        is_plain = target.device.type == "cpu" and target.dtype == shard.dtype
        return (
            tensor_bytes(target) if is_full_width and is_plain and target.is_contiguous() else None
        )

    def copy_from(self, content: memoryview) -> None:
        """Fill the target from the bytes of those rows."""
        shape = (-1, *self.shard.sizes[1:]) if self.shard.sizes else ()
        rows = torch.frombuffer(content, dtype=self.shard.dtype).view(shape)
        for dim in range(1, rows.dim()):
            rows = rows.narrow(dim, self.begin[dim], self.target.shape[dim])
        self.target.copy_(rows)


def find_overlaps(
    entry: TensorEntry, offsets: Sequence[int], target: Tensor
) -> Iterator[ShardRead]:
    """Yield the overlap of each shard with ``target``, which begins at ``offsets``."""
    for shard in entry.shards:
        begin = [max(a, b) for a, b in zip(offsets, shard.offsets, strict=True)]
        end = [
            min(a + m, b + n)
            for a, m, b, n in zip(offsets, target.shape, shard.offsets, shard.sizes, strict=True)
        ]
        if any(b >= e for b, e in zip(begin, end, strict=True)):
            continue
        view = target
        for dim, (b, e, o) in enumerate(zip(begin, end, offsets, strict=True)):
            view = view.narrow(dim, b - o, e - b)
        begin_in_shard = tuple(b - o for b, o in zip(begin, shard.offsets, strict=True))
        yield ShardRead(shard, begin_in_shard, view)


class ReadRequest(NamedTuple):
    """One contiguous read from a file."""

    file: str
    reads: list[tuple[str, ShardRead]]


def coalesce_reads(file: str, reads: Iterable[tuple[str, ShardRead]]) -> Iterator[ReadRequest]:
    """Merge the reads of a file into few requests with little waste."""
    begin = end = useful = 0
    merged: list[tuple[str, ShardRead]] = []
    for name, read in sorted(reads, key=lambda pair: pair[1].byte_range()):
        start, stop = read.byte_range()
        added = max(0, stop - max(start, end))
        span = max(stop, end) - begin
        if merged and (span > READ_BYTES or useful + added < (1 - MAX_READ_WASTE) * span):
            yield ReadRequest(file, merged)
            merged = []
        if not merged:
            begin, useful, added, end = start, 0, stop - start, start
        merged.append((name, read))
        end, useful = max(end, stop), useful + added
    if merged:
        yield ReadRequest(file, merged)


def read_shards(
    directory: Path,
    contents: Contents,
    reads: Mapping[str, Sequence[ShardRead]],
    on_complete: Callable[[str], None] = lambda name: None,
) -> None:
    """Fill the targets of all reads: each byte is read once, with parallel requests.

    Args:
        directory: directory of the files.
        contents: table of contents.
        reads: reads by tensor.
        on_complete: called with a tensor's name when all of it is read, in the thread that read the
            last part, while other threads continue.

    Raises:
        CorruptData: if a file is missing or has another size.
        OSError: if a file cannot be read.
    """
    by_file: dict[str, list[tuple[str, ShardRead]]] = {}
    for name, tensor_reads in reads.items():
        for read in tensor_reads:
            by_file.setdefault(read.shard.file, []).append((name, read))
    requests: list[ReadRequest] = []
    for file, file_reads in by_file.items():
        try:
            size, expected = regular_file_size(directory / file), contents.files[file][0]
        except FileNotFoundError as error:
            raise CorruptData(f"{file}: {error.strerror or error}") from error
        if size != expected:
            raise CorruptData(f"{file} has {size:,} bytes, not {expected:,}")
        requests += coalesce_reads(file, file_reads)
    remaining, lock = {name: len(tensor_reads) for name, tensor_reads in reads.items()}, Lock()

    def run(request: ReadRequest) -> None:
        file, request_reads = request
        targets = [read.direct_buffer() for _, read in request_reads]
        ranges = [read.byte_range() for _, read in request_reads]
        chunks = [
            (start, allocate_buffer(stop - start) if target is None else target)
            for (start, stop), target in zip(ranges, targets, strict=True)
        ]
        if missing_bytes := read_chunks(directory / file, chunks):
            raise CorruptData(f"{file} is {missing_bytes} bytes too short")
        for (name, read), target, (_, content) in zip(request_reads, targets, chunks, strict=True):
            if target is None:
                read.copy_from(content)
            with lock:
                remaining[name] -= 1
                is_last = remaining[name] == 0
            if is_last:
                on_complete(name)

    with ThreadPoolExecutor(NUM_READERS) as pool:
        for _ in pool.map(run, requests):
            pass


def check_files(directory: Path, contents: Contents) -> None:
    """Check the files' sizes against the table of contents, without reading them.

    Memory that is then allocated by the table is bounded by the size of the files.

    Raises:
        CorruptData: if a file is missing, not regular, or of another size.
        OSError: if the size cannot be read.
    """
    for name, (expected, _) in contents.files.items():
        try:
            size = regular_file_size(directory / name)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise CorruptData(f"{name}: {error.strerror or error}") from error
        if size != expected:
            raise CorruptData(f"{name} has {size:,} bytes, not {expected:,}")


def find_damaged_file(directory: Path, contents: Contents) -> str:
    """Describe the first file that differs from what was written; "" if none does."""
    for name, (size, expected) in contents.files.items():
        digest, read = xxhash.xxh3_128(), 0
        try:
            actual_size = regular_file_size(directory / name)
            while read < size == actual_size:
                block = read_range(directory / name, read, min(read + READ_BYTES, size))
                digest.update(block)
                read += len(block)
        except CorruptData as error:
            return str(error)
        except OSError as error:
            return f"{name}: {error.strerror or error}"
        if actual_size != size:
            return f"{name} has {actual_size:,} bytes, not {size:,}"
        if digest.hexdigest() != expected:
            return f"{name} differs from what was written: its hash does not match"
    return ""
