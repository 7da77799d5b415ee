"""Checkpoints on disk: ``checkpoints/step-00000100``, whole or not there.

torch's distributed checkpoint shards and reshards the bytes; the commit is ours.  A
checkpoint is written into a fresh hidden folder, then ``manifest.json`` (step, position
in the data, layout, versions) is added, everything is forced to the disk, and one rename
makes it visible.  A folder of that name is therefore always complete, is never written
again, and 'the newest' is simply the largest step.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import uuid
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as load_sharded
from torch.distributed.checkpoint.state_dict_saver import save as save_sharded
from torch.optim import Optimizer

from weft.checkpoint.state import State, allocate_optimizer_state, model_state, optimizer_state
from weft.job import WeftError

ASIDE = "move it away to go on from the checkpoint before it"

_NAME = re.compile(r"step-(\d{8,})")


class CheckpointError(WeftError):
    """A checkpoint could not be written or read; the message says which and why."""


def checkpoint_path(folder: Path, step: int) -> Path:
    return folder / f"step-{step:08}"


def checkpoints(folder: Path) -> list[Path]:
    """Committed checkpoints in ``folder``, oldest first."""
    if not folder.is_dir():
        return []
    found = [
        (int(match[1]), path) for path in folder.iterdir() if (match := _NAME.fullmatch(path.name))
    ]
    return [path for _, path in sorted(found) if (path / "manifest.json").is_file()]


def read_manifest(path: Path) -> dict[str, Any]:
    """The manifest of a committed checkpoint."""
    try:
        manifest: dict[str, Any] = json.loads((path / "manifest.json").read_text("utf-8"))
        if not isinstance(manifest["step"], int):
            raise TypeError(f"step = {manifest['step']!r}")
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = f"its manifest cannot be read: {type(error).__name__}: {error}"
        raise CheckpointError(f"{path}: {reason}; {ASIDE}") from error
    return manifest


def save(
    folder: Path,
    parts: Sequence[nn.Module],
    optimizer: Optimizer,
    manifest: dict[str, Any],
    keep: int,
) -> Path:
    """Write and commit the checkpoint of ``manifest["step"]``; every rank calls it.

    Args:
        folder: of all checkpoints of the run.
        parts: of the model, on this rank.
        manifest: JSON values; ``step`` is required.
        keep: newest checkpoints that are kept; older ones are removed.

    Raises:
        CheckpointError: on every rank, whichever failed.  Nothing half-written stays behind.
    """
    final = checkpoint_path(folder, manifest["step"])
    # One rank decides: another could already see what the first one does next.
    temporary, exists = _from_rank_0(
        lambda: (folder / f".tmp-{final.name}-{uuid.uuid4().hex[:8]}", final in checkpoints(folder))
    )
    if exists:
        return final
    try:
        if _rank() == 0:
            for leftover in folder.glob(".tmp-*"):
                shutil.rmtree(leftover, ignore_errors=True)
        # One thread: with more, a failed write is reported as a success (pytorch#191391).
        writer = FileSystemWriter(temporary, thread_count=1, sync_files=True)
        state = model_state(parts) | optimizer_state(parts, optimizer)
        save_sharded(state, storage_writer=writer)
    except (Exception, CheckpointException) as error:
        if _rank() == 0:
            shutil.rmtree(temporary, ignore_errors=True)
        raise CheckpointError(f"{final}: could not be written: {_cause(error)}") from error
    failure = _from_rank_0(lambda: _commit(temporary, final, manifest, keep))
    if failure:
        raise CheckpointError(f"{final}: could not be written: {failure}")
    return final


def _commit(temporary: Path, final: Path, manifest: dict[str, Any], keep: int) -> str | None:
    """Make ``temporary`` visible as ``final``; the reason if that failed."""
    try:
        with (temporary / "manifest.json").open("w", encoding="utf-8") as file:
            json.dump(manifest, file, indent=2)
            file.flush()
            os.fsync(file.fileno())
        _sync_folder(temporary)
        if final.exists():  # without a manifest: no checkpoint any more, whatever happened to it
            final.rename(final.with_name(f".tmp-{final.name}-damaged"))
        temporary.rename(final)
        _sync_folder(final.parent)
        for old in checkpoints(final.parent)[:-keep]:
            # First out of sight, in one step: nothing half-deleted may look whole.
            doomed = old.with_name(f".tmp-{old.name}-deleted")
            old.rename(doomed)
            shutil.rmtree(doomed)
    except OSError as error:
        shutil.rmtree(temporary, ignore_errors=True)
        return str(error)
    return None


def load(path: Path, parts: Sequence[nn.Module], optimizer: Optimizer | None) -> None:
    """Load ``path`` in place, into any layout; every rank of the process group calls it.

    Without an optimizer only the parameters are read.  Works without a process group, too.
    """
    reader = FileSystemReader(path)
    try:
        state: State = model_state(parts)
        if optimizer is not None:
            entries = reader.read_metadata().state_dict_metadata
            saved = {
                name: (entry.size, entry.properties.dtype)
                for name, entry in entries.items()
                if isinstance(entry, TensorStorageMetadata)
            }
            allocate_optimizer_state(parts, optimizer, saved)
            state |= optimizer_state(parts, optimizer)
        with torch.no_grad(), warnings.catch_warnings():
            # That there is no process group is meant.
            warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
            load_sharded(state, storage_reader=reader, no_dist=not dist.is_initialized())
    except (Exception, CheckpointException) as error:
        raise CheckpointError(f"{path}: could not be loaded: {_cause(error)}; {ASIDE}") from error


def _cause(error: BaseException) -> str:
    """The text of what went wrong first: torch wraps the ranks' own exceptions.

    Its wrapper is a BaseException: ``except Exception`` would let it pass.
    """
    if isinstance(error, CheckpointException) and error.failures:
        rank, (wrapped, _) = min(error.failures.items())
        return f"rank {rank}: {type(wrapped).__name__}: {wrapped}"
    return f"{type(error).__name__}: {error}"


def _sync_folder(path: Path) -> None:
    """Force a folder's entries to the disk: a rename is durable only then."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _from_rank_0(compute: Any) -> Any:
    """What ``compute()`` returns on rank 0, on every rank."""
    result = [compute() if _rank() == 0 else None]
    if dist.is_initialized():
        dist.broadcast_object_list(result, src=0)
    return result[0]
