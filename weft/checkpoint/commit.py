"""Commit checkpoints atomically, quarantine damaged ones, and delete old ones.

Ranks write a checkpoint into a new hidden directory.  Rank 0 adds ``manifest.json`` (step, data
position, layout, versions, table of contents, hashes of files, fingerprints of tensors, its own
hash), syncs everything to disk, and makes the checkpoint visible by one rename.  A directory of
that name is therefore always complete and never written again, and the newest checkpoint is the one
with the largest step.  In an object store, which has no rename, the manifest makes a checkpoint
visible: it is put last, and only if none exists.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from weft.checkpoint.best import BestMetric, find_best
from weft.checkpoint.manifest import (
    FORMAT,
    STEP_NAME,
    CheckpointError,
    Lease,
    checkpoint_path,
    checkpoint_step,
    gather_to_rank_0,
    get_rank,
    is_current,
    list_checkpoints,
    list_committed,
    list_leases,
    manifest_text,
    run_on_rank_0,
)
from weft.checkpoint.shard_files import Json, StagedShard, build_contents, shard_name, write_shards
from weft.config.files import sync_directory
from weft.config.storage import create_file, is_remote, put_if_absent, remove
from weft.monitor.faults import fault_point


def write_checkpoint(
    lease: Lease,
    shards: list[StagedShard],
    manifest: Json,
    keep_latest: int,
    group: Any,
    warn: Callable[[str], None],
    best: BestMetric | None = None,
) -> None:
    """Write every rank's shards; rank 0 commits and deletes old checkpoints.

    Args:
        lease: lease of the directory of the run's checkpoints.
        shards: this rank's shards.
        manifest: manifest without the table of contents.
        keep_latest: number of checkpoints to keep.
        group: process group; None: all ranks.
        warn: receives the warning of `Lease.hold`.
        best: metric whose best checkpoint is kept, too.
    """
    final = checkpoint_path(lease.directory, manifest["step"])
    context = f"{final}: could not be written"
    # Rank 0 decides alone: other ranks could already see the result of its next step.
    warning, temporary = run_on_rank_0(lambda: _prepare_directory(final, lease), context, group)
    if warning:
        warn(warning)
    if temporary is None:
        return
    try:
        entries = gather_to_rank_0(lambda: _write_rank_shards(temporary, shards), context, group)

        def commit() -> None:
            table = build_contents(entry for entry in entries if entry is not None)
            location = {"inside": temporary.name} if is_remote(final) else {}
            try:
                _commit(temporary, final, manifest | {"format": FORMAT} | location | table, lease)
            except FileNotFoundError:  # a new owner may have deleted it
                lease.hold()
                raise

        run_on_rank_0(commit, context, group)
    except Exception:
        if get_rank() == 0:
            with suppress(OSError):
                remove(temporary)
        raise
    delete_context = f"{final} is saved, but an older checkpoint could not be deleted"
    base = manifest.get("base")
    run_on_rank_0(
        lambda: delete_old(lease.directory, keep_latest, base, best), delete_context, group
    )
    fault_point("checkpoint.saved")


def _prepare_directory(final: Path, lease: Lease) -> tuple[str, Path | None]:
    """Create a new directory for a checkpoint's files, and delete leftovers.

    Returns:
        The warning of `Lease.hold`, and the directory; None if the checkpoint is already committed.

    Raises:
        LeaseLost: if another process owns the lease, because leftovers may be its files.
    """
    directory, suffix = final.parent, uuid.uuid4().hex[:8]
    warning = lease.hold()
    if (final / "manifest.json").is_file() and is_current(final, list_leases(directory)):
        return warning, None
    if is_remote(final):
        for path in directory.iterdir() if directory.is_dir() else []:
            if STEP_NAME.fullmatch(path.name) and not any(p.is_file() for p in path.iterdir()):
                remove(path)
        return warning, final / suffix
    directory.mkdir(parents=True, exist_ok=True)
    for pattern in (".tmp-step-*", ".tmp-lease-*"):
        for leftover in directory.glob(pattern):
            remove(leftover)
    temporary = final.with_name(f".tmp-{final.name}-{suffix}")
    temporary.mkdir()
    return warning, temporary


def _write_rank_shards(temporary: Path, shards: list[StagedShard]) -> Json | None:
    fault_point("checkpoint.shards")
    if not shards:
        return None
    entries = write_shards(temporary / shard_name(get_rank()), shards)
    fault_point("checkpoint.written")
    return entries


def _commit(temporary: Path, final: Path, manifest: Json, lease: Lease) -> None:
    """Make ``temporary`` visible as ``final``, if this process still owns the lease.

    The lease is read as late as possible: a process that was suspended during the save must not
    replace its successor's checkpoint.
    """
    fault_point("checkpoint.manifest")
    text = manifest_text(manifest).encode()
    if not is_remote(final):
        with create_file(temporary / "manifest.json") as file:
            file.write(text)
        sync_directory(temporary)
    fault_point("checkpoint.rename")
    if lease.hold():
        raise CheckpointError(f"{final.parent}: deleted while {final.name} was being written")
    if (final / "manifest.json").exists() or (final.exists() and not is_remote(final)):
        # It is of an abandoned branch, or lacks a manifest, so it is not a current checkpoint.
        quarantine(final, "abandoned")
    if is_remote(final):
        put_if_absent(final / "manifest.json", text)
        fault_point("checkpoint.renamed")
        return
    temporary.rename(final)
    fault_point("checkpoint.renamed")
    sync_directory(final.parent)


def delete_old(
    directory: Path, keep_latest: int, base: str | None = None, best: BestMetric | None = None
) -> None:
    """Delete all but the newest checkpoints, and older ones of abandoned branches.

    Args:
        directory: directory of the run's checkpoints.
        keep_latest: number of checkpoints to keep.
        base: name of the checkpoint with the frozen parameters, which is kept.
        best: metric whose best checkpoint is kept, too.
    """
    current = list_checkpoints(directory)
    latest = current[-keep_latest:]
    if not latest:
        return  # another process resumed the run from before all of them
    kept = {*latest}
    if best is not None and (found := find_best(current, best)) is not None:
        kept.add(found[0])
    for old in list_committed(directory):
        if old in kept or old.name == base or checkpoint_step(old) > checkpoint_step(latest[-1]):
            continue
        # Hide it atomically first: a partly deleted checkpoint must not look complete.
        fault_point("checkpoint.delete")
        if is_remote(old):
            (old / "manifest.json").unlink()
            hidden = old
        else:
            hidden = old.rename(old.with_name(f".tmp-{old.name}-deleted"))
        fault_point("checkpoint.deleting")
        remove(hidden)


def list_quarantined(directory: Path) -> list[Path]:
    """Return the checkpoints in ``directory`` that were renamed as damaged."""
    if not directory.is_dir():
        return []
    if is_remote(directory):
        steps = [path for path in directory.iterdir() if STEP_NAME.fullmatch(path.name)]
        found = [path for step in steps for path in step.glob("manifest.damaged-*.json")]
    else:
        found = list(directory.glob("damaged-step-*"))
    return sorted(found, key=str)


def quarantine(path: Path, reason: str) -> None:
    """Rename a checkpoint that is not current, without deleting it."""
    if is_remote(path):  # a checkpoint without a manifest is not committed
        manifest = path / "manifest.json"
        put_if_absent(path / f"manifest.{reason}-{time.time_ns()}.json", manifest.read_bytes())
        manifest.unlink()
    else:
        path.rename(path.with_name(f"{reason}-{path.name}-{time.time_ns()}"))
