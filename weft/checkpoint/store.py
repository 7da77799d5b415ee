"""Checkpoints on disk: ``checkpoints/step-00000100``, whole or not there, and true or not taken.

*Commit.*  A checkpoint is written into a fresh hidden folder; ``manifest.json`` (step, position in
the data, layout, versions, what lies where, hashes of the files, fingerprints of the tensors, its
own hash) is added, everything is forced to the disk, and one rename makes it visible.  A folder of
that name is therefore always complete, is never written again, and 'the newest' is simply the
largest step.

*Verify.*  The fingerprint of a tensor is taken from live memory before it is copied anywhere, and
compared with what lies in live memory after loading, on whatever layout.  So everything in between
is covered, what was read is read once, and the price is a pass over memory.  All ranks come to the
same verdict.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import time
import uuid
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.state_dict_loader import load as load_sharded
from torch.distributed.checkpoint.state_dict_saver import save as save_sharded
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from weft.checkpoint.fingerprint import fingerprint
from weft.checkpoint.shards import (
    Damaged,
    ShardReader,
    ShardWriter,
    damaged_file,
    parse_contents,
)
from weft.checkpoint.state import (
    State,
    allocate_optimizer_state,
    model_state,
    named_parameters,
    optimizer_state,
)
from weft.job import WeftError
from weft.parallel.init import shard_offsets
from weft.resilience.faults import at

FORMAT = 2

_NAME = re.compile(r"step-(\d{8,})")


class CheckpointError(WeftError):
    """A checkpoint could not be written or read; the message says which and why."""


class DamagedCheckpoint(CheckpointError):
    """What a checkpoint holds is not what was saved; every rank has the same error."""


def checkpoint_path(folder: Path, step: int) -> Path:
    return folder / f"step-{step:08}"


def checkpoint_step(path: Path) -> int:
    """The step of a checkpoint, from its name."""
    return int(path.name.removeprefix("step-"))


def checkpoints(folder: Path) -> list[Path]:
    """Committed checkpoints in ``folder``, oldest first; whether they are sound `load` tells."""
    if not folder.is_dir():
        return []
    found = [
        (int(match[1]), path) for path in folder.iterdir() if (match := _NAME.fullmatch(path.name))
    ]
    return [path for _, path in sorted(found)]


def read_manifest(path: Path) -> dict[str, Any]:
    """The manifest of a committed checkpoint.

    Raises:
        DamagedCheckpoint: if it is not, to the byte, what was written.
    """
    try:
        text = (path / "manifest.json").read_text("utf-8")
        manifest: dict[str, Any] = json.loads(text)
        if manifest.get("format") != FORMAT:
            raise CheckpointError(f"{path}: is of format {manifest.get('format')}, not {FORMAT}")
        if text != manifest_text({name: v for name, v in manifest.items() if name != "hash"}):
            raise ValueError("its hash is another")
    except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
        reason = f"its manifest is damaged: {type(error).__name__}: {error}"
        raise DamagedCheckpoint(f"{path}: {reason}") from error
    return manifest


def manifest_text(manifest: dict[str, Any]) -> str:
    """A manifest as it is written: in one possible way, with its own hash."""

    def text(values: dict[str, Any]) -> str:
        return json.dumps(values, sort_keys=True, separators=(",", ":"))

    return text(manifest | {"hash": xxhash.xxh3_128_hexdigest(text(manifest).encode())}) + "\n"


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
    at("checkpoint")
    # One rank decides: another could already see what the first one does next.
    temporary, exists = _from_rank_0(lambda: _begin(final))
    if exists:
        return final
    try:
        writer = ShardWriter(temporary)
        planner = DefaultSavePlanner(flatten_state_dict=False)
        state = model_state(parts) | optimizer_state(parts, optimizer)
        save_sharded(state, storage_writer=writer, planner=planner)
    except (Exception, CheckpointException) as error:
        if _rank() == 0:
            shutil.rmtree(temporary, ignore_errors=True)
        raise CheckpointError(f"{final}: could not be written: {_cause(error)}") from error
    whole = manifest | {"format": FORMAT} | writer.contents
    failure = _from_rank_0(lambda: _commit(temporary, final, whole))
    if failure:
        raise CheckpointError(f"{final}: could not be written: {failure}")
    failure = _from_rank_0(lambda: _delete(checkpoints(folder)[:-keep]))
    if failure:
        raise CheckpointError(f"{final} is saved, but an older one could not be deleted: {failure}")
    at("checkpoint.saved")
    return final


def _begin(final: Path) -> tuple[Path, bool]:
    """A new folder's name, and whether the checkpoint is there already; clears what others left."""
    for leftover in final.parent.glob(".tmp-*"):
        shutil.rmtree(leftover, ignore_errors=True)
    temporary = final.with_name(f".tmp-{final.name}-{uuid.uuid4().hex[:8]}")
    return temporary, (final / "manifest.json").is_file()


def _commit(temporary: Path, final: Path, manifest: dict[str, Any]) -> str | None:
    """Make ``temporary`` visible as ``final``; the reason if that failed."""
    try:
        at("checkpoint.manifest")
        with (temporary / "manifest.json").open("w", encoding="utf-8") as file:
            file.write(manifest_text(manifest))
            file.flush()
            os.fsync(file.fileno())
        _sync_folder(temporary)
        if final.exists():  # without a manifest: no checkpoint any more, whatever happened to it
            set_aside(final)
        at("checkpoint.rename")
        temporary.rename(final)
        at("checkpoint.renamed")
        _sync_folder(final.parent)
    except OSError as error:
        shutil.rmtree(temporary, ignore_errors=True)
        return str(error)
    return None


def _delete(doomed: list[Path]) -> str | None:
    """Delete checkpoints; the reason if that failed."""
    try:
        for old in doomed:
            # First out of sight, in one step: nothing half-deleted may look whole.
            at("checkpoint.delete")
            hidden = old.rename(old.with_name(f".tmp-{old.name}-deleted"))
            at("checkpoint.deleting")
            shutil.rmtree(hidden)
    except OSError as error:
        return str(error)
    return None


def set_aside(path: Path) -> Path:
    """Rename a damaged checkpoint, so that it is out of the way and not lost."""
    return path.rename(path.with_name(f"damaged-{path.name}-{time.time_ns()}"))


def abandon(folder: Path, after_step: int) -> None:
    """Take the checkpoints later than a step out of sight: the run goes another way from there.

    Every rank calls it; it returns on all of them when it is done.
    """

    def rename() -> None:
        for path in checkpoints(folder):
            if checkpoint_step(path) > after_step:
                path.rename(path.with_name(f"abandoned-{path.name}-{time.time_ns()}"))

    _from_rank_0(rename)


def load(path: Path, parts: Sequence[nn.Module], optimizer: Optimizer | None) -> dict[str, Any]:
    """Load ``path`` in place, into any layout; every rank of the process group calls it.

    Without an optimizer only the parameters are read.  Works without a process group, too.

    Returns:
        The manifest.

    Raises:
        DamagedCheckpoint: if it does not hold what was saved; the parameters are undefined then.
        CheckpointError: if it is of another model, or cannot be read.
    """
    at("load")
    manifest: dict[str, Any]
    manifest, unreadable = _from_rank_0(lambda: _manifest_or_error(path))
    if unreadable is not None:
        raise unreadable
    try:
        contents = parse_contents(manifest)  # every rank has the same one to judge
    except Damaged as error:
        raise DamagedCheckpoint(f"{path}: {error}") from error
    try:
        state: State = model_state(parts)
        if optimizer is not None:
            saved = {name: (e.size, e.properties.dtype) for name, e in contents.tensors.items()}
            allocate_optimizer_state(parts, optimizer, saved)
            state |= optimizer_state(parts, optimizer)
        with torch.no_grad(), warnings.catch_warnings():
            # That there is no process group is meant.
            warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
            load_sharded(
                state,
                storage_reader=ShardReader(path, contents),
                planner=DefaultLoadPlanner(flatten_state_dict=False),
                no_dist=not dist.is_initialized(),
            )
    except (Exception, CheckpointException) as error:
        cause = _first(error)
        kind = (
            DamagedCheckpoint if isinstance(cause, Damaged | FileNotFoundError) else CheckpointError
        )
        raise kind(f"{path}: could not be loaded: {_cause(error)}") from error
    wrong = _other_than(contents.fingerprints, state, dict(named_parameters(parts)))
    if wrong:
        named = _from_rank_0(lambda: damaged_file(path, contents))
        reason = named or f"{wrong[0]} is not what was saved, though its file is as it was written"
        raise DamagedCheckpoint(f"{path}: {reason}")
    return manifest


def _manifest_or_error(path: Path) -> tuple[dict[str, Any], CheckpointError | None]:
    try:
        return read_manifest(path), None
    except CheckpointError as error:
        return {}, error


def _other_than(
    expected: dict[str, int], state: State, params: dict[str, nn.Parameter]
) -> list[str]:
    """The tensors whose fingerprint, over all ranks, is not the expected one."""
    device = next(iter(params.values())).device if params else torch.device("cpu")
    names = list(expected)
    # What no rank loaded (the optimizer's, where only the model is wanted) is not judged.
    sums = torch.zeros((2, len(names)), dtype=torch.int64, device=device)
    for i, name in enumerate(names):
        tensor = state.get(name)
        if tensor is None:
            continue
        sums[1, i] = 1
        kind, _, rest = name.partition(".")
        if _counts(tensor, params[rest if kind == "model" else rest.rpartition(".")[0]]):
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            sums[0, i] = fingerprint(local, shard_offsets(tensor), tensor.shape)
    if dist.is_initialized():
        dist.all_reduce(sums)
    found, loaded = sums.tolist()
    return [
        name
        for name, mark, there in zip(names, found, loaded, strict=True)
        if there and mark != expected[name]
    ]


def _counts(tensor: torch.Tensor, param: nn.Parameter) -> bool:
    """Whether this rank's part of a tensor is the first of its copies."""
    whole = param if isinstance(param, DTensor) else None
    if isinstance(tensor, DTensor):
        mesh = tensor.device_mesh
        copies = [axis for axis, p in enumerate(tensor.placements) if p.is_replicate()]
    elif whole is not None:
        mesh = whole.device_mesh
        copies = list(range(mesh.ndim))
    else:
        return True
    return all(mesh.get_local_rank(axis) == 0 for axis in copies)


def _first(error: BaseException) -> BaseException:
    """What went wrong first: torch wraps the ranks' own exceptions.

    Its wrapper is a BaseException: ``except Exception`` would let it pass.
    """
    if isinstance(error, CheckpointException) and error.failures:
        _, (wrapped, _) = min(error.failures.items())
        return wrapped
    return error


def _cause(error: BaseException) -> str:
    rank = ""
    if isinstance(error, CheckpointException) and error.failures:
        rank = f"rank {min(error.failures)}: "
    first = _first(error)
    return f"{rank}{type(first).__name__}: {first}"


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
