"""Weights from a checkpoint into safetensors and back, a few rows at a time.

Nothing here knows whose names they are.  A tensor is an iterator of its consecutive rows, about a
million elements each: what is in memory does not grow with the model.
"""

from __future__ import annotations

import fcntl
import glob
import json
import math
import os
import shutil
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import xxhash
from torch import Tensor

from weft.checkpoint.fingerprint import fingerprint, wrapped
from weft.checkpoint.manifest import (
    FORMAT,
    CheckpointError,
    DamagedCheckpoint,
    files_of,
    manifest_text,
    read_manifest,
)
from weft.checkpoint.safetensors import Entry, Malformed, read_table, table
from weft.checkpoint.shard_files import (
    Contents,
    consecutive,
    damaged_file,
    overlaps,
    raw,
    read_shards,
)
from weft.checkpoint.storage import Damaged, create, is_remote, read_range, remove
from weft.config.errors import WeftError
from weft.config.files import sync_folder

BLOCK = 1 << 20  # elements of a tensor that are in memory at a time

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"

Report = Callable[[int], None]  # told how many bytes have been written
Rows = Callable[[str], Iterator[Tensor]]  # the consecutive rows of a weight, by our name


class CannotHold(WeftError):
    """A value that the wanted dtype has not, or that is no number."""


# --------------------------------------------------------------------------- files


def write_json(path: Path, tree: object) -> None:
    """Write a new file of JSON, for people and programs."""
    with create(path) as file:
        file.write(json.dumps(tree, indent=2).encode() + b"\n")


@contextmanager
def publishing(final: Path) -> Iterator[Path]:
    """A new folder that becomes ``final`` by one rename, or is removed if anything goes wrong.

    In an object store it is ``final`` from the beginning.

    What a killed process left of an earlier attempt is removed, too: whoever is at work holds a
    lock on its folder.

    Raises:
        WeftError: for what the disk refuses.
    """
    if is_remote(final):
        try:
            yield final  # what makes it a model for others is written last
        except BaseException as error:
            remove(final)
            if isinstance(error, OSError):
                raise WeftError(f"{final}: could not be written: {error}") from error
            raise
        return
    made = [folder for folder in final.parents if not folder.exists()]
    temporary = final.with_name(f".tmp-{final.name}-{uuid.uuid4().hex[:8]}")
    with ExitStack() as stack:
        try:
            final.parent.mkdir(parents=True, exist_ok=True)
            for leftover in final.parent.glob(f".tmp-{glob.escape(final.name)}-*"):
                with ExitStack() as briefly:
                    if _lock(leftover, briefly):
                        shutil.rmtree(leftover)
            temporary.mkdir()
            _lock(temporary, stack)
            yield temporary
            for inner, _, _ in os.walk(temporary, topdown=False):
                sync_folder(Path(inner))
            temporary.rename(final)
            sync_folder(final.parent)
        except BaseException as error:
            shutil.rmtree(temporary, ignore_errors=True)
            for folder in made:
                with suppress(OSError):
                    folder.rmdir()
            if isinstance(error, OSError):
                raise WeftError(f"{final}: could not be written: {error}") from error
            raise


def _lock(folder: Path, stack: ExitStack) -> bool:
    """Lock a folder until ``stack`` ends; whether it was free."""
    handle = os.open(folder, os.O_RDONLY)
    stack.callback(os.close, handle)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


# --------------------------------------------------------------------------- out of a checkpoint


class Model(NamedTuple):
    """The weights in a committed checkpoint, by name."""

    path: Path
    folder: Path  # of its files
    contents: Contents
    shapes: dict[str, torch.Size]


def open_model(path: Path) -> Model:
    """The weights of a checkpoint of any layout.

    Raises:
        DamagedCheckpoint: if its manifest is damaged.
    """
    folder, contents = files_of(path, read_manifest(path))
    shapes = {
        name.removeprefix("model."): torch.Size(entry.shape)
        for name, entry in contents.tensors.items()
        if name.startswith("model.")
    }
    return Model(path, folder, contents, shapes)


def write_weights(
    model: Model,
    folder: Path,
    names: Mapping[str, str],
    dtype: torch.dtype,
    max_shard: int,
    report: Report,
    read: Rows | None = None,
) -> int:
    """Write weights as safetensors: one file, or several and an index.

    Args:
        names: theirs -> ours, of every weight, in the order in which they fill the files.
        dtype: what the weights are rounded to.
        max_shard: bytes of a file; a tensor that is larger gets a file of its own.
        read: the rows of a weight, if not those in ``model``.

    Returns:
        How many files.

    Raises:
        DamagedCheckpoint: if a weight is not what was saved.
        CannotHold: if a weight is not finite in ``dtype``.
    """
    sizes = {n: model.shapes[ours].numel() * dtype.itemsize for n, ours in names.items()}
    shards = consecutive(sizes, max_shard)
    files = [f"model-{i:05}-of-{len(shards):05}.safetensors" for i in range(1, len(shards) + 1)]
    files = files if len(files) > 1 else [SINGLE]
    done = 0
    for name, shard in zip(files, shards, strict=True):
        some = {theirs: names[theirs] for theirs in shard}
        rows = read or partial(read_weight, model)
        done += write_tensors(folder / name, some, model.shapes, dtype, rows, report, done)
    if len(files) > 1:
        counts = {"total_parameters": sum(s.numel() for s in model.shapes.values())}
        where = {n: file for file, shard in zip(files, shards, strict=True) for n in shard}
        total = {"total_size": sum(sizes.values())}
        write_json(folder / INDEX, {"metadata": counts | total, "weight_map": where})
    return len(files)


def write_tensors(
    path: Path,
    names: Mapping[str, str],
    shapes: Mapping[str, torch.Size],
    dtype: torch.dtype,
    read: Rows,
    report: Report = lambda done: None,
    before: int = 0,
) -> int:
    """Write one file of safetensors.

    Args:
        names: theirs -> ours.
        shapes: by our names.
        before: bytes that were written into other files, for the report.

    Returns:
        The bytes of what is in it.

    Raises:
        CannotHold: if a weight is not finite in ``dtype``.
    """
    done, ordered = 0, sorted(names)  # as the library has them
    with create(path) as file:
        file.write(table({theirs: shapes[names[theirs]] for theirs in ordered}, dtype))
        for theirs in ordered:
            for rows in read(names[theirs]):
                rounded = rows.to(dtype)
                if not rounded.isfinite().all():
                    kind = str(dtype).removeprefix("torch.")
                    raise CannotHold(f"{names[theirs]} has values that {kind} cannot hold")
                done += file.write(raw(rounded))
                report(before + done)
    return done


def read_weight(model: Model, name: str) -> Iterator[Tensor]:
    """The rows of a weight, put together from wherever they lie, and verified at the end.

    Raises:
        DamagedCheckpoint: after the last row, if they are not what was saved.
    """
    entry, mark = model.contents.tensors[f"model.{name}"], 0
    try:
        for first, count in blocks(entry.shape):
            rows = torch.empty((count, *entry.shape[1:]), dtype=entry.dtype)
            offsets = [first, *[0] * (rows.dim() - 1)]
            read_shards(model.folder, model.contents, {name: [*overlaps(entry, offsets, rows)]})
            mark += int(fingerprint(rows, offsets, entry.shape))
            yield rows
    except Damaged as error:
        raise DamagedCheckpoint(f"{model.path}: {error}") from error
    except OSError as error:
        raise CheckpointError(f"{model.path}: cannot be read: {error}") from error
    if wrapped(mark) != entry.fingerprint:
        reason = damaged_file(model.folder, model.contents) or f"{name} is not what was saved"
        raise DamagedCheckpoint(f"{model.path}: {reason}")


def blocks(shape: Sequence[int]) -> Iterator[tuple[int, int]]:
    """(first row, rows) of the parts that a tensor is read in."""
    step = max(1, BLOCK // max(1, math.prod(shape[1:])))
    for first in range(0, shape[0], step):
        yield first, min(step, shape[0] - first)


# --------------------------------------------------------------------------- into a checkpoint


def open_weights(path: Path) -> dict[str, Entry]:
    """The tensors of a safetensors file.

    Raises:
        Malformed: if it is none, or cannot be read.
    """
    try:
        if not path.is_file():  # opening a pipe would wait for ever
            raise Malformed("is no file" if path.exists() else "does not exist")
        with path.open("rb") as file:
            return read_table(file, path.stat().st_size)
    except OSError as error:
        raise Malformed(f"cannot be read: {error.strerror}") from error


def read_tensor(path: Path, entry: Entry) -> Iterator[Tensor]:
    """The rows of a tensor in a safetensors file, as they are stored.

    Raises:
        WeftError: if they cannot be read.
    """
    row = math.prod(entry.shape[1:]) * entry.dtype.itemsize
    try:
        for first, count in blocks(entry.shape):
            begin = entry.begin + first * row
            data = read_range(path, begin, begin + count * row)
            if len(data) < count * row:
                raise WeftError(f"{path}: has become shorter while it was read")
            flat = torch.frombuffer(data, dtype=torch.uint8).view(entry.dtype)
            yield flat.view((count, *entry.shape[1:]))
    except OSError as error:
        raise WeftError(f"{path}: cannot be read: {error}") from error


def write_model(
    path: Path,
    weights: Iterable[tuple[str, torch.Size, Iterator[Tensor]]],
    manifest: dict[str, Any],
    report: Report,
) -> None:
    """Write a checkpoint of weights alone, in float32, into the new folder ``path``.

    Any layout loads it, and an optimizer begins anew.  It is the caller who makes it visible.

    Args:
        weights: (our name, shape, rows).

    Raises:
        CannotHold: if a weight is not finite.
    """
    path.mkdir(parents=True)
    name, position, digest, tensors = "shard-00000.bin", 0, xxhash.xxh3_128(), {}
    with create(path / name) as file:
        for weight, shape, parts in weights:
            begin, mark, first = position, 0, 0
            for part in parts:
                rows = part.float()
                if not rows.isfinite().all():
                    raise CannotHold(f"{weight} has values that are not finite")
                mark += int(fingerprint(rows, (first, *[0] * (rows.dim() - 1)), shape))
                content = raw(rows)
                file.write(content)
                digest.update(content)
                first, position = first + len(rows), position + len(content)
                report(position)
            tensors[f"model.{weight}"] = {
                "dtype": "float32",
                "shape": list(shape),
                "fingerprint": wrapped(mark),
                "shards": [[[0] * len(shape), list(shape), 0, begin]],
            }
    files = [{"name": name, "bytes": position, "xxh3": digest.hexdigest()}]
    whole = manifest | {"format": FORMAT, "tensors": tensors, "files": files}
    with create(path / "manifest.json") as file:
        file.write(manifest_text(whole).encode())
