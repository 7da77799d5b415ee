"""Shard files: one safetensors file per rank, and a table of contents in JSON.

The header of a shard file says which part of its tensor each entry is, as the checkpoints of
`torch.distributed.checkpoint` do, so any tool can open the file:

    "__metadata__": {"format": "pt", "DCP_VERSION": "1.0", "DCP_SHARDING_INFO":
                     '{NAME: {"saved_offsets": [256, 0], "global_shape": [512, 32]}, ...}'}

The manifest has the table of contents of all files, so a reader needs no other header to find the
shards that its layout needs.  Header and table are data, which weft validates, and not a program
like a pickle.

    "tensors": {NAME: {"dtype": "F32", "shape": [512, 32], "fingerprint": -81...,
                       "shards": [[[0, 0], [256, 32], FILE, POSITION], ...]}}
    "files": [{"name": "shard-00000.safetensors", "bytes": 65536, "xxh3": "9f...",
               "header_bytes": 1024, "header_xxh3": "c4..."}]

A shard is (offsets, sizes, index of its file, first byte).
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple

import torch
import xxhash
from torch import Tensor

from weft.checkpoint.fingerprint import fingerprint, wrap_int64
from weft.checkpoint.safetensors import (
    DTYPES,
    MAX_HEADER_BYTES,
    NAMES,
    StoredTensor,
    lay_out_file,
    parse_header,
    tensor_bytes,
)
from weft.config.storage import (
    CorruptData,
    allocate_buffer,
    create_file,
    read_chunks,
    read_range,
    regular_file_size,
)

Json = dict[str, Any]

FILE_NAME = re.compile(r"shard-[0-9]{5,9}\.safetensors")
HASH = re.compile("[0-9a-f]{32}")
MAX_SIZE = (1 << 63) - 1  # bytes of a file, or elements of a tensor

READ_BYTES = 16 << 20  # a request above this size serves one shard only
MAX_READ_WASTE = 0.05  # maximum unused fraction of a request
NUM_READERS = min(4, len(os.sched_getaffinity(0)))  # parallel requests


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


def shard_name(rank: int) -> str:
    """Return the name of a rank's file."""
    return f"shard-{rank:05}.safetensors"


class StagedShard(NamedTuple):
    """Shard of a tensor that will be written."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]  # of the unsharded tensor
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    rows: Iterable[Tensor]  # all of it on the CPU, or consecutive rows
    is_owned: bool = True  # False: another rank's replica counts
    fingerprint: int | None = None  # partial sum; None: computed while writing

    @property
    def num_bytes(self) -> int:
        """Return the size of the shard."""
        return math.prod(self.sizes) * self.dtype.itemsize


def write_shards(path: Path, shards: Sequence[StagedShard], durable: bool = True) -> Json:
    """Write shards into a new file; return their entries for `build_contents`.

    Args:
        path: file that does not exist.
        shards: shards of different tensors, in the order of the file.
        durable: wait for the disk.
    """
    boxes = {
        shard.name: {"saved_offsets": shard.offsets, "global_shape": shard.shape}
        for shard in shards
    }
    layout = lay_out_file(
        {shard.name: (shard.dtype, shard.sizes) for shard in shards},
        {"DCP_VERSION": "1.0", "DCP_SHARDING_INFO": json.dumps(boxes)},
    )
    fingerprints: list[int] = []

    def read_rows() -> Iterator[Tensor]:
        for shard in shards:
            partial_sum, offsets = 0, list(shard.offsets)
            for rows in shard.rows:
                if shard.is_owned and shard.fingerprint is None:
                    partial_sum += int(fingerprint(rows, offsets, shard.shape))
                yield rows
                if offsets:
                    offsets[0] += len(rows)
            fingerprints.append(partial_sum if shard.fingerprint is None else shard.fingerprint)

    with create_file(path, layout.num_bytes, durable) as file:
        digest = layout.write(file, read_rows())
    entries = [
        [
            shard.name,
            NAMES[shard.dtype],
            list(shard.shape),
            partial_sum,
            [list(shard.offsets), list(shard.sizes), layout.tensors[shard.name].begin],
        ]
        for shard, partial_sum in zip(shards, fingerprints, strict=True)
    ]
    file_entry = {
        "name": path.name,
        "bytes": layout.num_bytes,
        "xxh3": digest,
        "header_bytes": len(layout.header),
        "header_xxh3": xxhash.xxh3_128_hexdigest(layout.header),
    }
    return {"file": file_entry, "shards": entries}


def build_contents(entries_by_rank: Iterable[Json]) -> Json:
    """Merge the ranks' entries into the manifest's table of contents.

    Raises:
        CorruptData: if the shards do not cover every tensor.
    """
    tensors: Json = {}
    files: list[Json] = []
    for rank in entries_by_rank:
        for name, dtype, shape, partial_sum, (offsets, sizes, position) in rank["shards"]:
            entry = tensors.setdefault(
                name, {"dtype": dtype, "shape": shape, "fingerprint": 0, "shards": []}
            )
            entry["fingerprint"] = wrap_int64(entry["fingerprint"] + partial_sum)
            entry["shards"].append([offsets, sizes, len(files), position])
        files.append(rank["file"])
    contents = {"tensors": tensors, "files": files}
    parse_contents(contents, Path())
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
    fingerprint: int | None  # None: unknown
    shards: list[Shard]


class StoredFile(NamedTuple):
    """File of tensors, and its hashes if weft wrote it."""

    path: Path
    num_bytes: int
    digest: str = ""
    header_bytes: int = 0
    header_digest: str = ""

    def check_size(self) -> None:
        """Check the size on disk.

        Raises:
            CorruptData: if the file is missing, not regular, or of another size.
            OSError: if the size cannot be read.
        """
        name = self.path.name
        try:
            size = regular_file_size(self.path)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise CorruptData(f"{name}: {error.strerror or error}") from error
        if size != self.num_bytes:
            raise CorruptData(f"{name} has {size:,} bytes, not {self.num_bytes:,}")


class Contents(NamedTuple):
    """Validated table of contents of a checkpoint, or of safetensors files."""

    path: Path  # named in errors
    tensors: dict[str, TensorEntry]
    files: dict[str, StoredFile]  # by name


def parse_contents(manifest: Json, path: Path, require_all_shards: bool = True) -> Contents:
    """Parse and validate a manifest's table of contents.

    Args:
        manifest: manifest.
        path: directory of the manifest.
        require_all_shards: True if every tensor must be complete.

    Raises:
        CorruptData: if the table is invalid: file names outside the directory, shards outside their
            files, or shards that do not cover their tensor.
    """
    directory = path / manifest["inside"] if manifest.get("inside") else path
    try:
        files = {file["name"]: _parse_file(file, directory) for file in manifest["files"]}
        _check(len(files) == len(manifest["files"]), "a repeated file name")
        names, used_bytes = list(files), dict.fromkeys(files, 0)
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
                stored, size = files[names[file]], math.prod(sizes) * dtype.itemsize
                is_inside = stored.header_bytes <= position <= stored.num_bytes - size
                _check(fits and is_inside, f"a shard of {name}")
                used_bytes[names[file]] += size
                shard = Shard(tuple(offsets), tuple(sizes), dtype, names[file], position)
                shards.append(shard)
                elements += math.prod(sizes)
            _check(not require_all_shards or elements == math.prod(shape), f"the shards of {name}")
            tensors[name] = TensorEntry(dtype, shape, digest, shards)
        for name, stored in files.items():  # a small file must not cause a huge allocation
            _check(used_bytes[name] <= stored.num_bytes, f"overlapping shards in {name}")
        return Contents(path, tensors, files)
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise CorruptData(
            f"its table of contents: {type(error).__name__}: {str(error)[:200]}"
        ) from error


def _parse_file(entry: Json, directory: Path) -> StoredFile:
    name, sizes = entry["name"], (entry["header_bytes"], entry["bytes"])
    _check(FILE_NAME.fullmatch(name) is not None, "an invalid file name")
    is_valid = all(type(size) is int for size in sizes) and 8 <= sizes[0] <= sizes[1] <= MAX_SIZE
    _check(is_valid and sizes[0] <= MAX_HEADER_BYTES, f"the bytes of {name}: {sizes!r:.50}")
    hashes = entry["xxh3"], entry["header_xxh3"]
    _check(all(map(HASH.fullmatch, hashes)), f"the xxh3 of {name}: {hashes!r:.50}")
    return StoredFile(directory / name, sizes[1], hashes[0], sizes[0], hashes[1])


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


def coalesce_reads(reads: Iterable[tuple[str, ShardRead]]) -> Iterator[list[tuple[str, ShardRead]]]:
    """Merge the reads of a file into few contiguous requests with little waste."""
    begin = end = useful = 0
    merged: list[tuple[str, ShardRead]] = []
    for name, read in sorted(reads, key=lambda pair: pair[1].byte_range()):
        start, stop = read.byte_range()
        added = max(0, stop - max(start, end))
        span = max(stop, end) - begin
        if merged and (span > READ_BYTES or useful + added < (1 - MAX_READ_WASTE) * span):
            yield merged
            merged = []
        if not merged:
            begin, useful, added, end = start, 0, stop - start, start
        merged.append((name, read))
        end, useful = max(end, stop), useful + added
    if merged:
        yield merged


def read_shards(
    contents: Contents,
    reads: Mapping[str, Sequence[ShardRead]],
    on_complete: Callable[[str], None] = lambda name: None,
) -> None:
    """Fill the targets of all reads: each byte is read once, with parallel requests.

    Args:
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
    requests: list[list[tuple[str, ShardRead]]] = []
    for file, file_reads in by_file.items():
        contents.files[file].check_size()
        requests += coalesce_reads(file_reads)
    remaining, lock = {name: len(tensor_reads) for name, tensor_reads in reads.items()}, Lock()

    def run(request: list[tuple[str, ShardRead]]) -> None:
        file = contents.files[request[0][1].shard.file].path
        targets = [read.direct_buffer() for _, read in request]
        ranges = [read.byte_range() for _, read in request]
        chunks = [
            (start, allocate_buffer(stop - start) if target is None else target)
            for (start, stop), target in zip(ranges, targets, strict=True)
        ]
        if missing_bytes := read_chunks(file, chunks):
            raise CorruptData(f"{file.name} is {missing_bytes} bytes too short")
        for (name, read), target, (_, content) in zip(request, targets, chunks, strict=True):
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


def check_files(contents: Contents, rank: int = 0, num_ranks: int = 1) -> None:
    """Check sizes and headers of the files; each of several ranks checks some of them.

    Memory that is then allocated by the table is bounded by the size of the files.

    Raises:
        CorruptData: if a file is missing, not regular, of another size, or has another header; or
            if the table gives a tensor another position or shape than the header of its file.
        OSError: if a file cannot be read.
    """
    files = list(contents.files)[rank::num_ranks]
    shards: dict[str, dict[str, StoredTensor]] = {name: {} for name in files}
    for name, tensor in contents.tensors.items():
        for shard in tensor.shards:
            if shard.file in shards:
                stored = StoredTensor(shard.dtype, shard.sizes, shard.position)
                shards[shard.file][name] = stored

    def check(file: StoredFile) -> None:
        file.check_size()
        name, header = file.path.name, bytes(read_range(file.path, 0, file.header_bytes))
        if xxhash.xxh3_128_hexdigest(header) != file.header_digest:
            raise CorruptData(
                f"{name} differs from what was written: the hash of its header does not match"
            )
        if parse_header(header[8:], file.num_bytes) != shards[name]:
            raise CorruptData(f"{name} has other tensors than its table of contents")

    with ThreadPoolExecutor(NUM_READERS) as pool:
        for _ in pool.map(check, (contents.files[name] for name in files)):
            pass


def find_damaged_file(contents: Contents) -> str:
    """Describe the first file that differs from what was written; "" if none does."""
    for name, file in contents.files.items():
        digest = xxhash.xxh3_128()
        try:
            file.check_size()
            for start in range(0, file.num_bytes, READ_BYTES):
                stop = min(start + READ_BYTES, file.num_bytes)
                digest.update(read_range(file.path, start, stop))
        except CorruptData as error:
            return str(error)
        except OSError as error:
            return f"{name}: {error.strerror or error}"
        if digest.hexdigest() != file.digest:
            return f"{name} differs from what was written: its hash does not match"
    return ""
