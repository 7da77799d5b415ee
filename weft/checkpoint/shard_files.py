"""The bytes of a checkpoint: a raw file from each rank, and a table of contents in JSON.

A file holds the elements of one shard after the other, row by row, in the machine's byte order
(little-endian on all that PyTorch supports).  The table says which box of which tensor lies where;
so any layout can pick from it the boxes that it needs.  It is data, numbers and names, checked
before they are believed, and never a program as a pickle is.

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
from weft.checkpoint.fingerprint import wrapped
from weft.checkpoint.storage import Damaged, read_pieces, read_range, regular_size, room

Json = dict[str, Any]

FILE_NAME = re.compile(r"shard-[0-9]{5,9}\.bin")
HASH = re.compile("[0-9a-f]{32}")
LARGEST = (1 << 63) - 1  # number of a file's bytes, or of a tensor's elements
# By torch's names.
DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in safetensors.DTYPES.values()}

READ_BYTES = 16 << 20  # from here on a request serves one box only
WASTE = 0.05  # of a request, at most, that is read for nothing
READERS = min(4, len(os.sched_getaffinity(0)))  # requests at a time


def raw(tensor: Tensor) -> memoryview:
    """The elements of a tensor on the CPU as bytes, sharing memory if it is contiguous."""
    flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
    return memoryview(flat.numpy())  # type: ignore[arg-type]


def consecutive(sizes: Mapping[str, int], most: int) -> list[list[str]]:
    """Names in groups, in their order: sizes that add up to at most ``most``, or a single one."""
    groups: list[list[str]] = []
    filled = 0
    for name, size in sizes.items():
        if not groups or filled + size > most:
            groups.append([])
            filled = 0
        groups[-1].append(name)
        filled += size
    return groups


# --------------------------------------------------------------------------- writing


class Staged(NamedTuple):
    """A box of a tensor, as it was when the checkpoint was taken."""

    name: str
    shape: tuple[int, ...]  # of the whole tensor
    offsets: tuple[int, ...]
    fingerprint: int  # partial sum, of the live tensor
    content: Tensor  # on the CPU


def write_shards(file: IO[bytes], name: str, boxes: Iterable[Staged]) -> Json:
    """Write boxes one after the other; what is to be known of them, for `table_of_contents`."""
    position, digest, shards = 0, xxhash.xxh3_128(), []
    for box in boxes:
        content = raw(box.content)
        file.write(content)
        digest.update(content)
        dtype = str(box.content.dtype).removeprefix("torch.")
        place = [list(box.offsets), list(box.content.shape), position]
        shards.append([box.name, dtype, list(box.shape), box.fingerprint, place])
        position += len(content)
    return {"file": {"name": name, "bytes": position, "xxh3": digest.hexdigest()}, "shards": shards}


def table_of_contents(written: Iterable[Json]) -> Json:
    """What the ranks have written, as the manifest has it.

    Raises:
        Damaged: if it does not make up whole tensors.
    """
    tensors: Json = {}
    files: list[Json] = []
    for rank in written:
        for name, dtype, shape, mark, (offsets, sizes, position) in rank["shards"]:
            entry = tensors.setdefault(
                name, {"dtype": dtype, "shape": shape, "fingerprint": 0, "shards": []}
            )
            entry["fingerprint"] = wrapped(entry["fingerprint"] + mark)
            entry["shards"].append([offsets, sizes, len(files), position])
        files.append(rank["file"])
    contents = {"tensors": tensors, "files": files}
    parse_contents(contents)
    return contents


# --------------------------------------------------------------------------- reading


class Shard(NamedTuple):
    """A box of a tensor, and where it lies."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    dtype: torch.dtype
    file: str
    position: int


class Entry(NamedTuple):
    """A tensor in a checkpoint."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    fingerprint: int
    shards: list[Shard]


class Contents(NamedTuple):
    """A table of contents that makes sense."""

    tensors: dict[str, Entry]
    files: dict[str, tuple[int, str]]  # bytes, hash

    def without_shards(self) -> Contents:
        """Its tensors, of which nothing lies anywhere."""
        bare = {name: entry._replace(shards=[]) for name, entry in self.tensors.items()}
        return Contents(bare, {})


def parse_contents(manifest: Json, whole: bool = True) -> Contents:
    """The table of contents in a manifest.

    Args:
        whole: whether there must be all shards of every tensor.

    Raises:
        Damaged: if it is none: names that leave the folder, shards outside of their files, shards
            that do not make up their tensor.
    """
    try:
        files = {each["name"]: (each["bytes"], each["xxh3"]) for each in manifest["files"]}
        names, filled = list(files), dict.fromkeys(files, 0)
        _check(all(FILE_NAME.fullmatch(name) for name in names), "a file name that is none")
        for name, (size, mark) in files.items():
            _check(type(size) is int and 0 <= size <= LARGEST, f"the bytes of {name}: {size!r:.50}")
            _check(HASH.fullmatch(mark) is not None, f"the xxh3 of {name}: {mark!r:.50}")
        _check(len(names) == len(manifest["files"]), "a file that is there twice")
        tensors = {}
        for name, entry in manifest["tensors"].items():
            dtype, shape = DTYPES[entry["dtype"]], tuple(entry["shape"])
            whole_shape = all(type(n) is int and n >= 0 for n in shape)
            _check(whole_shape and math.prod(n for n in shape if n) <= LARGEST, f"shape of {name}")
            mark = entry["fingerprint"]
            _check(type(mark) is int and -(1 << 63) <= mark < 1 << 63, f"fingerprint of {name}")
            shards, elements = [], 0
            for offsets, sizes, file, position in entry["shards"]:
                numbers = [*offsets, *sizes, file, position]
                _check(all(type(n) is int and n >= 0 for n in numbers), f"a shard of {name}")
                fits = all(o + n <= m for o, n, m in zip(offsets, sizes, shape, strict=True))
                size = math.prod(sizes) * dtype.itemsize
                _check(fits and position + size <= files[names[file]][0], f"a shard of {name}")
                filled[names[file]] += size
                place = Shard(tuple(offsets), tuple(sizes), dtype, names[file], position)
                shards.append(place)
                elements += math.prod(sizes)
            _check(not whole or elements == math.prod(shape), f"the shards of {name}")
            tensors[name] = Entry(dtype, shape, mark, shards)
        for name, (size, _) in files.items():  # else a small file could ask for any memory
            _check(filled[name] <= size, f"shards of {name} that overlap")
        return Contents(tensors, files)
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise Damaged(
            f"its table of contents: {type(error).__name__}: {str(error)[:200]}"
        ) from error


def _check(right: bool, what: str) -> None:
    if not right:
        raise ValueError(what)


class Wanted(NamedTuple):
    """What one shard has of a box that is to be filled."""

    shard: Shard
    begin: tuple[int, ...]  # of the overlap, in the shard
    target: Tensor  # the part of the box that it fills

    def rows(self) -> tuple[int, int]:
        """First byte in the file, and the one after the last: the rows are read whole."""
        sizes, itemsize = self.shard.sizes, self.shard.dtype.itemsize
        row = math.prod(sizes[1:]) * itemsize
        first, rows = (self.begin[0], self.target.shape[0]) if sizes else (0, 1)
        start = self.shard.position + first * row
        return start, start + rows * row

    def direct(self) -> memoryview | None:
        """The memory that those rows go into as they are; None if they must be cut or moved."""
        target, shard = self.target, self.shard
        whole = target.shape[1:] == shard.sizes[1:]
        plain = target.device.type == "cpu" and target.dtype == shard.dtype
        return raw(target) if whole and plain and target.is_contiguous() else None

    def fill(self, content: memoryview) -> None:
        """From the bytes of those rows."""
        shape = (-1, *self.shard.sizes[1:]) if self.shard.sizes else ()
        rows = torch.frombuffer(content, dtype=self.shard.dtype).view(shape)
        for dim in range(1, rows.dim()):
            rows = rows.narrow(dim, self.begin[dim], self.target.shape[dim])
        self.target.copy_(rows)


def overlaps(entry: Entry, offsets: Sequence[int], box: Tensor) -> Iterator[Wanted]:
    """What each shard of a tensor has of ``box``, which begins at ``offsets`` of the whole."""
    for shard in entry.shards:
        begin = [max(a, b) for a, b in zip(offsets, shard.offsets, strict=True)]
        end = [
            min(a + m, b + n)
            for a, m, b, n in zip(offsets, box.shape, shard.offsets, shard.sizes, strict=True)
        ]
        if any(b >= e for b, e in zip(begin, end, strict=True)):
            continue
        target = box
        for dim, (b, e, o) in enumerate(zip(begin, end, offsets, strict=True)):
            target = target.narrow(dim, b - o, e - b)
        inside = tuple(b - o for b, o in zip(begin, shard.offsets, strict=True))
        yield Wanted(shard, inside, target)


class Request(NamedTuple):
    """What is read of a file at once."""

    file: str
    serves: list[tuple[str, Wanted]]


def joined(file: str, wanted: Iterable[tuple[str, Wanted]]) -> Iterator[Request]:
    """What is wanted of a file in few requests, with hardly anything read for nothing."""
    begin = end = useful = 0
    serves: list[tuple[str, Wanted]] = []
    for name, each in sorted(wanted, key=lambda pair: pair[1].rows()):
        start, stop = each.rows()
        more = max(0, stop - max(start, end))
        whole = max(stop, end) - begin
        if serves and (whole > READ_BYTES or useful + more < (1 - WASTE) * whole):
            yield Request(file, serves)
            serves = []
        if not serves:
            begin, useful, more, end = start, 0, stop - start, start
        serves.append((name, each))
        end, useful = max(end, stop), useful + more
    if serves:
        yield Request(file, serves)


def read_shards(
    folder: Path,
    contents: Contents,
    wanted: Mapping[str, Sequence[Wanted]],
    complete: Callable[[str], None] = lambda name: None,
) -> None:
    """Fill what is wanted: each byte is read once, neighbours in one request, some at a time.

    Args:
        wanted: of each tensor.
        complete: called with a tensor's name when all of it is there, in the thread that read the
            last of it, while others read on.

    Raises:
        Damaged: if a file is not there, or not as long as it should be.
        OSError: if it cannot be read.
    """
    by_file: dict[str, list[tuple[str, Wanted]]] = {}
    for name, some in wanted.items():
        for each in some:
            by_file.setdefault(each.shard.file, []).append((name, each))
    requests: list[Request] = []
    for file, pairs in by_file.items():
        try:
            size, expected = regular_size(folder / file), contents.files[file][0]
        except FileNotFoundError as error:
            raise Damaged(f"{file}: {error.strerror or error}") from error
        if size != expected:
            raise Damaged(f"{file} has {size:,} bytes, not {expected:,}")
        requests += joined(file, pairs)
    missing, lock = {name: len(some) for name, some in wanted.items()}, Lock()

    def serve(request: Request) -> None:
        file, serves = request
        targets = [each.direct() for _, each in serves]
        spans = [each.rows() for _, each in serves]
        pieces = [
            (start, room(stop - start) if target is None else target)
            for (start, stop), target in zip(spans, targets, strict=True)
        ]
        if lacking := read_pieces(folder / file, pieces):
            raise Damaged(f"{file} ends {lacking} bytes too early")
        for (name, each), target, (_, content) in zip(serves, targets, pieces, strict=True):
            if target is None:
                each.fill(content)
            with lock:
                missing[name] -= 1
                last = missing[name] == 0
            if last:
                complete(name)

    with ThreadPoolExecutor(READERS) as pool:
        for _ in pool.map(serve, requests):
            pass


def check_files(folder: Path, contents: Contents) -> None:
    """Check that the files are as long as the table of contents says; reads none of them.

    So whoever makes room for what the table promises makes room for what is there.

    Raises:
        Damaged: if one is not there, not regular, or of another size.
        OSError: if that cannot be known.
    """
    for name, (expected, _) in contents.files.items():
        try:
            size = regular_size(folder / name)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise Damaged(f"{name}: {error.strerror or error}") from error
        if size != expected:
            raise Damaged(f"{name} has {size:,} bytes, not {expected:,}")


def damaged_file(folder: Path, contents: Contents) -> str:
    """The first file that is not as it was written, for people; empty if all are."""
    for name, (size, expected) in contents.files.items():
        digest, read = xxhash.xxh3_128(), 0
        try:
            found = regular_size(folder / name)
            while read < size == found:
                block = read_range(folder / name, read, min(read + READ_BYTES, size))
                digest.update(block)
                read += len(block)
        except Damaged as error:
            return str(error)
        except OSError as error:
            return f"{name}: {error.strerror or error}"
        if found != size:
            return f"{name} has {found:,} bytes, not {size:,}"
        if digest.hexdigest() != expected:
            return f"{name} is not what was written: its hash is another"
    return ""
