"""Convert weights between checkpoints and safetensors, a few rows at a time.

This module does not map names.  A tensor is an iterator of chunks of consecutive rows, about a
million elements each, so memory use does not grow with the model.
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

from weft.checkpoint.fingerprint import fingerprint, wrap_int64
from weft.checkpoint.manifest import (
    FORMAT,
    CheckpointError,
    DamagedCheckpoint,
    manifest_text,
    open_contents,
    read_manifest,
)
from weft.checkpoint.safetensors import (
    InvalidSafetensors,
    SafetensorsEntry,
    format_header,
    read_header,
)
from weft.checkpoint.shard_files import (
    Contents,
    find_damaged_file,
    find_overlaps,
    group_by_size,
    read_shards,
    tensor_bytes,
)
from weft.checkpoint.storage import CorruptData, create_file, is_remote, read_range, remove
from weft.config.errors import WeftError
from weft.config.files import sync_directory

ROW_CHUNK_ELEMENTS = 1 << 20  # elements of a tensor per chunk

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"

ReportBytes = Callable[[int], None]  # called with the number of bytes written
RowReader = Callable[[str], Iterator[Tensor]]  # weft's name of a weight -> chunks of rows


class UnrepresentableValue(WeftError):
    """A value is NaN or Inf, or exceeds the range of the target dtype."""


# --------------------------------------------------------------------------- files


def write_json(path: Path, tree: object) -> None:
    """Write a new JSON file."""
    with create_file(path) as file:
        file.write(json.dumps(tree, indent=2).encode() + b"\n")


@contextmanager
def publish_directory(final: Path) -> Iterator[Path]:
    """Yield a new directory that becomes ``final`` by one atomic rename.

    It is removed on error.  In an object store, ``final`` itself is yielded.  Directories of
    earlier attempts whose process was killed are removed; a live process holds a lock on its
    directory.

    Raises:
        WeftError: for errors of the file system.
    """
    if is_remote(final):
        try:
            yield final  # the caller writes the file that makes it a model last
        except BaseException as error:
            remove(final)
            if isinstance(error, OSError):
                raise WeftError(f"{final}: could not be written: {error}") from error
            raise
        return
    created = [directory for directory in final.parents if not directory.exists()]
    temporary = final.with_name(f".tmp-{final.name}-{uuid.uuid4().hex[:8]}")
    with ExitStack() as stack:
        try:
            final.parent.mkdir(parents=True, exist_ok=True)
            for leftover in final.parent.glob(f".tmp-{glob.escape(final.name)}-*"):
                with ExitStack() as lock:
                    if _try_lock(leftover, lock):
                        shutil.rmtree(leftover)
            temporary.mkdir()
            _try_lock(temporary, stack)
            yield temporary
            for child, _, _ in os.walk(temporary, topdown=False):
                sync_directory(Path(child))
            temporary.rename(final)
            sync_directory(final.parent)
        except BaseException as error:
            shutil.rmtree(temporary, ignore_errors=True)
            for directory in created:
                with suppress(OSError):
                    directory.rmdir()
            if isinstance(error, OSError):
                raise WeftError(f"{final}: could not be written: {error}") from error
            raise


def _try_lock(directory: Path, stack: ExitStack) -> bool:
    """Lock a directory until ``stack`` closes; return True if it was free."""
    handle = os.open(directory, os.O_RDONLY)
    stack.callback(os.close, handle)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


# --------------------------------------------------------------------------- from a checkpoint


class CheckpointWeights(NamedTuple):
    """Weights of a committed checkpoint, by name."""

    path: Path
    directory: Path  # of its files
    contents: Contents
    shapes: dict[str, torch.Size]


def open_checkpoint_weights(path: Path) -> CheckpointWeights:
    """Open the weights of a checkpoint of any layout.

    Raises:
        DamagedCheckpoint: if its manifest is damaged.
    """
    directory, contents = open_contents(path, read_manifest(path))
    shapes = {
        name.removeprefix("model."): torch.Size(entry.shape)
        for name, entry in contents.tensors.items()
        if name.startswith("model.")
    }
    return CheckpointWeights(path, directory, contents, shapes)


def write_safetensors(
    weights: CheckpointWeights,
    directory: Path,
    names: Mapping[str, str],
    dtype: torch.dtype,
    max_file_bytes: int,
    report: ReportBytes,
    read_rows: RowReader | None = None,
) -> int:
    """Write weights as safetensors: one file, or several and an index.

    Args:
        weights: checkpoint.
        directory: existing directory.
        names: name in the file -> weft's name, of every weight, in the order of the files.
        dtype: dtype to which the weights are rounded.
        max_file_bytes: maximum size of a file; a larger tensor gets its own file.
        report: called with the number of bytes written.
        read_rows: source of a weight's rows, if not the checkpoint.

    Returns:
        The number of files.

    Raises:
        DamagedCheckpoint: if a weight differs from what was saved.
        UnrepresentableValue: if a weight is not finite in ``dtype``.
    """
    sizes = {
        n: weights.shapes[weft_name].numel() * dtype.itemsize for n, weft_name in names.items()
    }
    groups = group_by_size(sizes, max_file_bytes)
    files = [f"model-{i:05}-of-{len(groups):05}.safetensors" for i in range(1, len(groups) + 1)]
    files = files if len(files) > 1 else [SINGLE]
    written = 0
    for name, group in zip(files, groups, strict=True):
        file_names = {hf_name: names[hf_name] for hf_name in group}
        rows = read_rows or partial(read_weight, weights)
        written += write_safetensors_file(
            directory / name, file_names, weights.shapes, dtype, rows, report, written
        )
    if len(files) > 1:
        counts = {"total_parameters": sum(s.numel() for s in weights.shapes.values())}
        weight_map = {n: file for file, group in zip(files, groups, strict=True) for n in group}
        total = {"total_size": sum(sizes.values())}
        write_json(directory / INDEX, {"metadata": counts | total, "weight_map": weight_map})
    return len(files)


def write_safetensors_file(
    path: Path,
    names: Mapping[str, str],
    shapes: Mapping[str, torch.Size],
    dtype: torch.dtype,
    read_rows: RowReader,
    report: ReportBytes = lambda written: None,
    bytes_before: int = 0,
) -> int:
    """Write one safetensors file.

    Args:
        path: new file.
        names: name in the file -> weft's name.
        shapes: shapes by weft's name.
        dtype: dtype to which the weights are rounded.
        read_rows: source of a weight's rows.
        report: called with the number of bytes written.
        bytes_before: bytes in previous files, for ``report``.

    Returns:
        The number of bytes of its tensors.

    Raises:
        UnrepresentableValue: if a weight is not finite in ``dtype``.
    """
    written, ordered = 0, sorted(names)  # as in the library
    with create_file(path) as file:
        file.write(format_header({hf_name: shapes[names[hf_name]] for hf_name in ordered}, dtype))
        for hf_name in ordered:
            for rows in read_rows(names[hf_name]):
                rounded = rows.to(dtype)
                if not rounded.isfinite().all():
                    dtype_name = str(dtype).removeprefix("torch.")
                    raise UnrepresentableValue(
                        f"{names[hf_name]} has values that {dtype_name} cannot represent"
                    )
                written += file.write(tensor_bytes(rounded))
                report(bytes_before + written)
    return written


def read_weight(weights: CheckpointWeights, name: str) -> Iterator[Tensor]:
    """Yield the rows of a weight from its shards, and verify them at the end.

    Raises:
        DamagedCheckpoint: after the last row, if they differ from what was saved.
    """
    entry, total = weights.contents.tensors[f"model.{name}"], 0
    try:
        for first, count in row_chunks(entry.shape):
            rows = torch.empty((count, *entry.shape[1:]), dtype=entry.dtype)
            offsets = [first, *[0] * (rows.dim() - 1)]
            read_shards(
                weights.directory, weights.contents, {name: [*find_overlaps(entry, offsets, rows)]}
            )
            total += int(fingerprint(rows, offsets, entry.shape))
            yield rows
    except CorruptData as error:
        raise DamagedCheckpoint(f"{weights.path}: {error}") from error
    except OSError as error:
        raise CheckpointError(f"{weights.path}: cannot be read: {error}") from error
    if wrap_int64(total) != entry.fingerprint:
        reason = (
            find_damaged_file(weights.directory, weights.contents)
            or f"{name} differs from what was saved"
        )
        raise DamagedCheckpoint(f"{weights.path}: {reason}")


def row_chunks(shape: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield (first row, number of rows) of the chunks of a tensor."""
    step = max(1, ROW_CHUNK_ELEMENTS // max(1, math.prod(shape[1:])))
    for first in range(0, shape[0], step):
        yield first, min(step, shape[0] - first)


# --------------------------------------------------------------------------- to a checkpoint


def read_safetensors_header(path: Path) -> dict[str, SafetensorsEntry]:
    """Read the header of a safetensors file.

    Raises:
        InvalidSafetensors: if the file is invalid or cannot be read.
    """
    try:
        if not path.is_file():  # opening a FIFO would block
            raise InvalidSafetensors("is not a regular file" if path.exists() else "does not exist")
        with path.open("rb") as file:
            return read_header(file, path.stat().st_size)
    except OSError as error:
        raise InvalidSafetensors(f"cannot be read: {error.strerror}") from error


def read_safetensors_tensor(path: Path, entry: SafetensorsEntry) -> Iterator[Tensor]:
    """Yield the rows of a tensor in a safetensors file, in the stored dtype.

    Raises:
        WeftError: if they cannot be read.
    """
    row_bytes = math.prod(entry.shape[1:]) * entry.dtype.itemsize
    try:
        for first, count in row_chunks(entry.shape):
            begin = entry.begin + first * row_bytes
            data = read_range(path, begin, begin + count * row_bytes)
            if len(data) < count * row_bytes:
                raise WeftError(f"{path}: the file was truncated while it was read")
            flat = torch.frombuffer(data, dtype=torch.uint8).view(entry.dtype)
            yield flat.view((count, *entry.shape[1:]))
    except OSError as error:
        raise WeftError(f"{path}: cannot be read: {error}") from error


def write_weights_checkpoint(
    path: Path,
    weights: Iterable[tuple[str, torch.Size, Iterator[Tensor]]],
    manifest: dict[str, Any],
    report: ReportBytes,
) -> None:
    """Write a checkpoint of weights only, in float32, into the new directory ``path``.

    Any layout can load it; the optimizer then starts without state.  The caller makes it visible.

    Args:
        path: new directory.
        weights: (weft's name, shape, chunks of rows).
        manifest: manifest without the table of contents.
        report: called with the number of bytes written.

    Raises:
        UnrepresentableValue: if a weight is not finite.
    """
    path.mkdir(parents=True)
    name, position, digest, tensors = "shard-00000.bin", 0, xxhash.xxh3_128(), {}
    with create_file(path / name) as file:
        for weight, shape, chunks in weights:
            begin, fingerprint_sum, first = position, 0, 0
            for chunk in chunks:
                rows = chunk.float()
                if not rows.isfinite().all():
                    raise UnrepresentableValue(f"{weight} contains NaN or Inf")
                fingerprint_sum += int(fingerprint(rows, (first, *[0] * (rows.dim() - 1)), shape))
                content = tensor_bytes(rows)
                file.write(content)
                digest.update(content)
                first, position = first + len(rows), position + len(content)
                report(position)
            tensors[f"model.{weight}"] = {
                "dtype": "float32",
                "shape": list(shape),
                "fingerprint": wrap_int64(fingerprint_sum),
                "shards": [[[0] * len(shape), list(shape), 0, begin]],
            }
    files = [{"name": name, "bytes": position, "xxh3": digest.hexdigest()}]
    full_manifest = manifest | {"format": FORMAT, "tensors": tensors, "files": files}
    with create_file(path / "manifest.json") as file:
        file.write(manifest_text(full_manifest).encode())
