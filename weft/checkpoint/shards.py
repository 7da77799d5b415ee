"""The bytes of a checkpoint: a raw file from each rank, and a table of contents in JSON.

torch's distributed checkpoint decides who writes and who reads what, under any two layouts.  Its
own file format is not used: its table of contents is a pickle, which is a program; no content
is checked when it is read; and a reader fetches whole archives.  Here a file holds the elements of
one shard after the other, row by row, in the machine's byte order (little-endian on all that
PyTorch supports), and the table is data: numbers and names, checked before they are believed.

    "tensors": {NAME: {"dtype": "float32", "shape": [512, 32], "fingerprint": -81...,
                       "shards": [[[0, 0], [256, 32], FILE, POSITION], ...]}}
    "files": [{"name": "shard-00000.bin", "bytes": 65536, "xxh3": "9f..."}]

A shard is (offsets, sizes, index of its file, first byte).
"""

from __future__ import annotations

import math
import os
import re
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
)
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from weft.checkpoint.fingerprint import fingerprint, wrapped
from weft.resilience.faults import at

Json = dict[str, Any]

FILE_NAME = re.compile(r"shard-\d{5,}\.bin")
DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float64,
        torch.float32,
        torch.bfloat16,
        torch.float16,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint8,
        torch.bool,
    )
}


class Damaged(Exception):
    """What a checkpoint holds is not what was written."""


class Stored(NamedTuple):
    """Where a shard was written, and the file once it was closed."""

    file: str
    position: int
    fingerprint: int
    file_bytes: int
    file_hash: str


def raw(tensor: Tensor) -> memoryview:
    """The elements of a tensor on the CPU as bytes, sharing memory if it is contiguous."""
    flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
    return memoryview(flat.numpy())  # type: ignore[arg-type]


# --------------------------------------------------------------------------- writing


class ShardWriter(StorageWriter):
    """Writes this rank's shards into one file of a new folder, forced to the disk.

    After the save ``contents`` on rank 0 is the table of contents.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.contents: Json = {}

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        pass

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        if is_coordinator:
            self.folder.mkdir(parents=True)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        rank = dist.get_rank() if dist.is_initialized() else 0
        path = self.folder / f"shard-{rank:05}.bin"
        written: list[tuple[MetadataIndex, int, int, Tensor]] = []
        position, digest = 0, xxhash.xxh3_128()
        at("checkpoint.shards")
        if plan.items:
            with path.open("xb") as file:
                for item in plan.items:
                    live, about = planner.resolve_data(item), item.tensor_data
                    assert isinstance(live, Tensor), "only tensors are saved"
                    assert about is not None
                    # Of the live tensor, before it is copied anywhere.
                    mark = fingerprint(live, about.chunk.offsets, about.size)
                    content = raw(live.cpu())
                    file.write(content)
                    digest.update(content)
                    written.append((item.index, position, len(content), mark))
                    position += len(content)
                at("checkpoint.written")
                file.flush()
                os.fsync(file.fileno())
        results = [
            WriteResult(index, size, Stored(path.name, at, int(mark), position, digest.hexdigest()))
            for index, at, size, mark in written
        ]
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        stored = {result.index: result.storage_data for rank in results for result in rank}
        names = sorted({place.file for place in stored.values()})
        by_name = {place.file: place for place in stored.values()}
        tensors: Json = {}
        for name, entry in metadata.state_dict_metadata.items():
            assert isinstance(entry, TensorStorageMetadata)
            places = [stored[MetadataIndex(name, chunk.offsets)] for chunk in entry.chunks]
            tensors[name] = {
                "dtype": str(entry.properties.dtype).removeprefix("torch."),
                "shape": list(entry.size),
                "fingerprint": wrapped(sum(place.fingerprint for place in places)),
                "shards": [
                    [list(c.offsets), list(c.sizes), names.index(place.file), place.position]
                    for c, place in zip(entry.chunks, places, strict=True)
                ],
            }
        self.contents = {
            "tensors": tensors,
            "files": [
                {"name": n, "bytes": by_name[n].file_bytes, "xxh3": by_name[n].file_hash}
                for n in names
            ],
        }

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True


# --------------------------------------------------------------------------- reading


class Shard(NamedTuple):
    """Where a shard lies."""

    file: str
    position: int
    sizes: tuple[int, ...]
    dtype: torch.dtype


class Contents(NamedTuple):
    """A table of contents that makes sense."""

    tensors: dict[str, TensorStorageMetadata]
    shards: dict[MetadataIndex, Shard]
    fingerprints: dict[str, int]
    files: dict[str, tuple[int, str]]  # bytes, hash


def parse_contents(manifest: Json) -> Contents:
    """The table of contents in a manifest.

    Raises:
        Damaged: if it is none: names that leave the folder, shards outside of their files, shards
            that do not make up their tensor.
    """
    try:
        files = {each["name"]: (each["bytes"], each["xxh3"]) for each in manifest["files"]}
        names = list(files)
        _check(all(FILE_NAME.fullmatch(name) for name in names), "a file name that is none")
        tensors, shards, marks = {}, {}, {}
        for name, entry in manifest["tensors"].items():
            dtype, shape = DTYPES[entry["dtype"]], tuple(entry["shape"])
            _check(all(type(n) is int and n >= 0 for n in shape), f"a shape of {name}")
            marks[name] = entry["fingerprint"]
            _check(type(marks[name]) is int and -(1 << 63) <= marks[name] < 1 << 63, "a number")
            chunks, elements = [], 0
            for offsets, sizes, file, position in entry["shards"]:
                numbers = [*offsets, *sizes, file, position]
                _check(all(type(n) is int and n >= 0 for n in numbers), f"a shard of {name}")
                fits = all(o + n <= m for o, n, m in zip(offsets, sizes, shape, strict=True))
                end = position + math.prod(sizes) * dtype.itemsize
                _check(fits and end <= files[names[file]][0], f"a shard of {name}")
                chunk = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
                chunks.append(chunk)
                place = Shard(names[file], position, tuple(sizes), dtype)
                shards[MetadataIndex(name, chunk.offsets)] = place
                elements += math.prod(sizes)
            _check(elements == math.prod(shape), f"the shards of {name}")
            properties = TensorProperties(dtype=dtype)
            tensors[name] = TensorStorageMetadata(properties, torch.Size(shape), chunks)
        return Contents(tensors, shards, marks, files)
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise Damaged(f"its table of contents: {type(error).__name__}: {error}") from error


def _check(right: bool, what: str) -> None:
    if not right:
        raise ValueError(what)


class ShardReader(StorageReader):
    """Reads what a rank needs of a checkpoint's files: whole rows, in order, nothing twice."""

    def __init__(self, folder: Path, contents: Contents) -> None:
        self.folder, self.contents = folder, contents

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        pass

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return Metadata(dict(self.contents.tensors))

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        pass

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        by_file: dict[str, list[tuple[int, ReadItem, Shard]]] = {}
        for item in plan.items:
            shard = self.contents.shards[item.storage_index]
            by_file.setdefault(shard.file, []).append((shard.position, item, shard))
        for name, items in by_file.items():
            with (self.folder / name).open("rb") as file:
                size, expected = os.fstat(file.fileno()).st_size, self.contents.files[name][0]
                if size != expected:
                    raise Damaged(f"{name} has {size:,} bytes, not {expected:,}")
                for _, item, shard in sorted(items, key=lambda each: each[0]):
                    part = read_part(file, shard, item.storage_offsets, item.lengths)
                    target = planner.resolve_tensor(item).detach()
                    target.copy_(part)
                    planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True


def read_part(file: BinaryIO, shard: Shard, offsets: torch.Size, lengths: torch.Size) -> Tensor:
    """A box of a shard: the rows that it lies in are read whole."""
    first, rows = (offsets[0], lengths[0]) if lengths else (0, 1)
    row = math.prod(shard.sizes[1:])
    size = rows * row * shard.dtype.itemsize
    buffer = torch.empty(size, dtype=torch.uint8)
    file.seek(shard.position + first * row * shard.dtype.itemsize)
    view = memoryview(buffer.numpy())  # type: ignore[arg-type]
    got = 0
    while got < size:
        count = file.readinto(view[got:])  # type: ignore[attr-defined]
        if not count:
            raise Damaged(f"{shard.file} ends {size - got} bytes too early")
        got += count
    tensor = buffer.view(shard.dtype).view((rows, *shard.sizes[1:]) if lengths else ())
    for dim, (offset, length) in enumerate(zip(offsets[1:], lengths[1:], strict=True), 1):
        tensor = tensor.narrow(dim, offset, length)
    return tensor


def damaged_file(folder: Path, contents: Contents) -> str:
    """The first file that is not as it was written, for people; empty if all are."""
    for name, (size, expected) in contents.files.items():
        try:
            digest, found = xxhash.xxh3_128(), 0
            with (folder / name).open("rb") as file:
                while block := file.read(1 << 22):
                    digest.update(block)
                    found += len(block)
        except OSError as error:
            return f"{name}: {error.strerror}"
        if found != size:
            return f"{name} has {found:,} bytes, not {size:,}"
        if digest.hexdigest() != expected:
            return f"{name} is not what was written: its hash is another"
    return ""
