"""Write weights as safetensors or as a checkpoint, a few rows at a time.

This module does not map names.  A tensor is an iterator of chunks of consecutive rows, about a
million elements each, so memory use does not grow with the model.
"""

from __future__ import annotations

import glob
import json
import math
import os
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from weft.checkpoint.fingerprint import fingerprint, wrap_int64
from weft.checkpoint.manifest import (
    FORMAT,
    DamagedCheckpoint,
    checkpoint_errors,
    manifest_text,
    open_contents,
    read_manifest,
)
from weft.checkpoint.safetensors import lay_out_file
from weft.checkpoint.shard_files import (
    Contents,
    StagedShard,
    build_contents,
    check_files,
    find_damaged_file,
    find_overlaps,
    group_by_size,
    read_shards,
    shard_name,
    write_shards,
)
from weft.config.errors import WeftError
from weft.config.files import sync_directory
from weft.config.locks import LocksMissing, try_lock
from weft.config.storage import create_file, is_remote, remove
from weft.optim.weight_average import averaged_name

ROW_CHUNK_ELEMENTS = 1 << 20  # elements of a tensor per chunk

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"

ReportBytes = Callable[[int], None]  # called with the number of bytes just written


class UnrepresentableValue(WeftError):
    """A value is NaN or Inf, or exceeds the range of the target dtype."""


class Weight(NamedTuple):
    """Tensor whose rows are read when they are written.

    Attributes:
        shape: of the tensor.
        read: yields chunks of rows: all, or those from its first argument to before its second,
            which a tensor of a checkpoint or of safetensors supports.
        dtype: dtype in safetensors; None: that of the other weights.
    """

    shape: torch.Size
    read: Callable[..., Iterator[Tensor]]
    dtype: torch.dtype | None = None


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
    """Lock a directory until ``stack`` closes; return True if it was free.

    Without locks, another process may be writing to it.
    """
    handle = os.open(directory, os.O_RDONLY)
    stack.callback(os.close, handle)
    with suppress(LocksMissing):
        return try_lock(handle)
    return False


# --------------------------------------------------------------------------- reading


def open_weights(path: Path) -> dict[str, Weight]:
    """Open the weights of a checkpoint of any layout, by their names in the model.

    They are those of ``optim.ema_decay``, if the run averages its weights.

    Raises:
        DamagedCheckpoint: if its manifest or a file is damaged.
    """
    contents = open_contents(path, read_manifest(path))
    with checkpoint_errors(path):
        check_files(contents)
    return {
        name.removeprefix("model."): open_weight(contents, averaged_name(contents.tensors, name))
        for name in contents.tensors
        if name.startswith("model.")
    }


def open_weight(contents: Contents, name: str) -> Weight:
    """Return a tensor of a checkpoint or of safetensors files."""
    shape = torch.Size(contents.tensors[name].shape)
    return Weight(shape, RowReader(contents, name))


class RowReader:
    """Reads the rows of a tensor, and verifies them if their fingerprint is known.

    Rows that are read in several calls are verified when all have been read once.
    """

    def __init__(self, contents: Contents, name: str) -> None:
        self.contents, self.name = contents, name
        self.num_rows = self.total = 0

    def __call__(self, first: int = 0, stop: int | None = None) -> Iterator[Tensor]:
        """Yield the rows from ``first`` to before ``stop``.

        Raises:
            DamagedCheckpoint: after the last row, if the tensor differs from what was saved.
        """
        contents, entry = self.contents, self.contents.tensors[self.name]
        if first == 0 and stop in (None, entry.shape[0]):
            self.num_rows = self.total = 0
        stop = entry.shape[0] if stop is None else stop
        for begin, count in _row_chunks((stop - first, *entry.shape[1:])):
            rows = torch.empty((count, *entry.shape[1:]), dtype=entry.dtype)
            offsets = [first + begin, *[0] * (rows.dim() - 1)]
            with checkpoint_errors(contents.path):
                read_shards(contents, {self.name: [*find_overlaps(entry, offsets, rows)]})
            if entry.fingerprint is not None:
                self.total += int(fingerprint(rows, offsets, entry.shape))
            self.num_rows += count
            yield rows
        if self.num_rows < entry.shape[0]:
            return
        total, self.num_rows, self.total = self.total, 0, 0
        if entry.fingerprint not in (None, wrap_int64(total)):
            reason = find_damaged_file(contents) or f"{self.name} differs from what was saved"
            raise DamagedCheckpoint(f"{contents.path}: {reason}")


def _row_chunks(shape: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield (first row, number of rows) of the chunks of a tensor."""
    step = max(1, ROW_CHUNK_ELEMENTS // max(1, math.prod(shape[1:])))
    for first in range(0, shape[0], step):
        yield first, min(step, shape[0] - first)


# --------------------------------------------------------------------------- writing


def write_weight_files(
    directory: Path,
    weights: Mapping[str, Weight],
    dtype: torch.dtype,
    max_file_bytes: int,
    report: ReportBytes,
) -> int:
    """Write weights as safetensors: one file, or several and an index.

    Args:
        directory: existing directory.
        weights: every weight, in the order of the files.
        dtype: dtype to which the weights are rounded.
        max_file_bytes: maximum size of a file; a larger tensor gets its own file.
        report: called with the number of bytes just written.

    Returns:
        The number of files.

    Raises:
        DamagedCheckpoint: if a weight differs from what was saved.
        UnrepresentableValue: if a weight is not finite in ``dtype``.
    """
    sizes = {n: w.shape.numel() * (w.dtype or dtype).itemsize for n, w in weights.items()}
    groups = group_by_size(sizes, max_file_bytes)
    files = [f"model-{i:05}-of-{len(groups):05}.safetensors" for i in range(1, len(groups) + 1)]
    files = files if len(files) > 1 else [SINGLE]
    for file, group in zip(files, groups, strict=True):
        write_weight_file(directory / file, {n: weights[n] for n in group}, dtype, report)
    if len(files) > 1:
        counts = {"total_parameters": sum(w.shape.numel() for w in weights.values())}
        weight_map = {n: file for file, group in zip(files, groups, strict=True) for n in group}
        total = {"total_size": sum(sizes.values())}
        write_json(directory / INDEX, {"metadata": counts | total, "weight_map": weight_map})
    return len(files)


def write_weight_file(
    path: Path,
    weights: Mapping[str, Weight],
    dtype: torch.dtype,
    report: ReportBytes = lambda written: None,
) -> int:
    """Write one safetensors file; return the number of bytes of its tensors.

    Args:
        path: new file.
        weights: weights by name in the file.
        dtype: dtype to which the weights are rounded.
        report: called with the number of bytes just written.

    Raises:
        UnrepresentableValue: if a weight is not finite in ``dtype``.
    """
    ordered = {name: weights[name] for name in sorted(weights)}  # as in the library
    layout = lay_out_file({name: (w.dtype or dtype, w.shape) for name, w in ordered.items()}, {})
    with create_file(path, layout.num_bytes) as file:
        layout.write(
            file, chain(*(_round_rows(name, w, dtype, report) for name, w in ordered.items()))
        )
    return layout.num_bytes - len(layout.header)


def _round_rows(
    name: str, weight: Weight, dtype: torch.dtype, report: ReportBytes
) -> Iterator[Tensor]:
    """Yield the rows of a weight in ``dtype``; report each chunk once it is written."""
    for rows in weight.read():
        rounded = rows.to(weight.dtype or dtype)
        if not rounded.isfinite().all():
            dtype_name = str(dtype).removeprefix("torch.")
            cause = f"has values that {dtype_name} cannot represent"
            raise UnrepresentableValue(
                f"{name} {cause if rows.isfinite().all() else 'contains NaN or Inf'}"
            )
        yield rounded
        report(rounded.nbytes)


def write_weights_checkpoint(
    path: Path, weights: Mapping[str, Weight], manifest: dict[str, Any], report: ReportBytes
) -> None:
    """Write a checkpoint of weights only, in float32, into the new directory ``path``.

    Any layout can load it; the optimizer then starts without state.  The caller makes it visible.

    Args:
        path: new or empty directory.
        weights: weights by weft's name.
        manifest: manifest without the table of contents.
        report: called with the number of bytes just written.

    Raises:
        UnrepresentableValue: if a weight is not finite.
    """
    path.mkdir(parents=True, exist_ok=True)
    shards = []
    for name, weight in weights.items():
        shape = tuple(weight.shape)
        rows = _round_rows(name, weight, torch.float32, report)
        box = (shape, (0,) * len(shape), shape)
        shards.append(StagedShard(f"model.{name}", torch.float32, *box, rows))
    table = build_contents([write_shards(path / shard_name(0), shards)])
    with create_file(path / "manifest.json") as file:
        file.write(manifest_text(manifest | {"format": FORMAT} | table).encode())
