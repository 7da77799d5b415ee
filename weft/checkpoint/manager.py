"""Save checkpoints: ``step-00000100``, committed atomically and verified.

*Commit.*  Ranks write a checkpoint into a new hidden directory.  Rank 0 adds ``manifest.json``
(step, data position, layout, versions, table of contents, hashes of files, fingerprints of tensors,
its own hash), syncs everything to disk, and makes the checkpoint visible by one rename.  A
directory of that name is therefore always complete and never written again, and the newest
checkpoint is the one with the largest step.  In an object store, which has no rename, the manifest
makes a checkpoint visible: it is put last, and only if none exists.

*Verify.*  A tensor's fingerprint is computed from live memory before any copy, and compared with
live memory after loading, on any layout.  It therefore covers everything in between, needs no
second read, and costs one pass over memory.  All ranks reach the same verdict.
"""

from __future__ import annotations

import shutil
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from weft.checkpoint.fingerprint import fingerprint, fingerprints_to_host
from weft.checkpoint.local_save import local_run_dir, save_local
from weft.checkpoint.manifest import (
    FORMAT,
    STEP_NAME,
    CheckpointError,
    DamagedCheckpoint,
    LeaseLost,
    acquire_lease,
    checkpoint_path,
    checkpoint_step,
    format_error,
    gather_to_rank_0,
    get_rank,
    hold_lease,
    is_current,
    list_checkpoints,
    list_committed,
    list_leases,
    manifest_text,
    read_leases,
    read_manifest,
    run_on_rank_0,
)
from weft.checkpoint.save_schedule import CheckpointSchedule
from weft.checkpoint.shard_files import Json, StagedShard, build_contents, write_shards
from weft.checkpoint.state_dict import (
    find_replica_axes,
    is_owner,
    local_values,
    model_state,
    optimizer_state,
)
from weft.checkpoint.storage import create_file, is_remote, put_if_absent, remove
from weft.config.files import sync_directory
from weft.monitor.faults import fault_point
from weft.monitor.heartbeat import SAVE_GROUP
from weft.monitor.step_timer import enter_phase
from weft.parallel.dtensor import shard_offsets

RETRY_DELAYS = (1, 2, 4, 8, 15, 30)  # seconds between attempts at the final save of a run


class PeerLost(CheckpointError):
    """A rank exited during a save, so no other attempt can succeed."""


class CheckpointManager:
    """Saves the checkpoints of a run, one at a time.

    The state is copied while training waits.  Each rank then writes its shards, in the background
    if ``async_save`` is set, and rank 0 commits.  All ranks get the same result.
    """

    def __init__(
        self,
        directory: Path,
        keep_latest: int,
        *,
        async_save: bool = False,
        local_dir: str = "off",
        log: Callable[[str], None] = lambda text: None,
        schedule: CheckpointSchedule | None = None,
    ) -> None:
        """Create the manager; every rank calls this function.

        Args:
            directory: directory of the run's checkpoints.
            keep_latest: number of newest checkpoints to keep; older ones are deleted.
            async_save: write files while training continues.
            local_dir: directory of local checkpoints: see `weft.checkpoint.local_save`.
            log: receives warnings and errors.
            schedule: decides when to save; None: the caller decides.
        """
        self._schedule = schedule
        self.directory, self.keep_latest, self.async_save = directory, keep_latest, async_save
        self.epoch = 0
        self._leases: dict[str, bytes] = {}  # when this process acquired the lease
        self._warnings: list[str] = []  # not logged yet
        self.run_dir: Path | None = None
        self._local_dir = local_dir
        self.blocking_seconds = 0.0  # of the last save
        self.write_seconds = 0.0  # of the last completed save
        self._log = log
        self._failures = 0  # consecutive
        self._error: CheckpointError | None = None  # of the last save
        self._unreported: list[CheckpointError] = []
        self._thread: threading.Thread | None = None
        self._buffers: dict[str, Tensor] = {}
        # The writing thread needs its own group: its collectives must not mix with training's.
        is_single = not dist.is_initialized() or dist.get_world_size() == 1
        self._group = None
        if async_save and not is_single:
            self._group = dist.new_group(backend="gloo", group_desc=SAVE_GROUP)

    def acquire_lease(self, step: int) -> None:
        """Acquire the run's lease at ``step`` and prepare local checkpoints."""
        self.epoch = acquire_lease(self.directory, step)
        failed = f"{self.directory}: could not be read"
        self._leases = run_on_rank_0(lambda: read_leases(self.directory), failed)
        self.run_dir = local_run_dir(self._local_dir, self.directory)

    def is_due(self, step: int) -> bool:
        """Return True if the run saves after ``step``; the same on every rank."""
        return self._schedule is not None and self._schedule.is_due(step)

    def is_local_due(self, step: int) -> bool:
        """Return True if the nodes save after ``step``: see `weft.checkpoint.local_save`."""
        return self._schedule is not None and self._schedule.is_local_due(step)

    def save_step(
        self,
        model_parts: Sequence[nn.Module],
        optimizer: Optimizer,
        manifest: Json,
        *,
        persistent: bool,
        is_final: bool,
        step_seconds: float,
    ) -> None:
        """Save a step of a run, and let the automatic interval learn from the cost.

        Every rank calls this function.

        Args:
            model_parts: this rank's parts of the model.
            optimizer: the optimizer.
            manifest: manifest without the table of contents.
            persistent: True: save into ``directory``; False: save a local checkpoint only.
            is_final: the run ends with this save, which is therefore retried and waited for.
            step_seconds: mean time of a step.

        Raises:
            CheckpointError: if the final save fails, or if another process has the lease.
        """
        if is_final:
            self.save_final(model_parts, optimizer, manifest)
        else:
            self.save(model_parts, optimizer, manifest, persistent)
        if persistent and self._schedule is not None:
            self._schedule.record_save(
                manifest["step"], self.blocking_seconds, self.write_seconds, step_seconds
            )

    def save(
        self,
        model_parts: Sequence[nn.Module],
        optimizer: Optimizer,
        manifest: Json,
        persistent: bool = True,
    ) -> None:
        """Copy the state and start to write it as checkpoint of ``manifest["step"]``.

        Every rank calls this function.  It waits for the previous save.

        Args:
            model_parts: this rank's parts of the model.
            optimizer: optimizer.
            manifest: manifest without the table of contents.
            persistent: True: save into ``directory``; False: save a local checkpoint only.

        Raises:
            LeaseLost: if another process has acquired the lease.
        """
        began = time.perf_counter()
        enter_phase("checkpoint")
        self.close()
        self._report_problems()
        fault_point("checkpoint")
        shards, owned = self._stage_shards(model_parts, optimizer)
        header = manifest | {"epoch": self.epoch}
        args = (shards, owned, header, persistent)
        self._thread = threading.Thread(target=self._write, args=args, daemon=True)
        self._thread.start()
        if not self.async_save:
            self.close()
            if isinstance(self._error, LeaseLost):
                raise self._error
        self.blocking_seconds = time.perf_counter() - began

    def wait(self) -> None:
        """Wait for the last save.

        Raises:
            CheckpointError: on every rank, if any rank failed; partial files are deleted.
        """
        self.close()
        if self._error is not None:
            raise self._error
        if self.run_dir is not None:  # the persistent checkpoint replaces it
            shutil.rmtree(self.run_dir, ignore_errors=True)

    def save_final(
        self, model_parts: Sequence[nn.Module], optimizer: Optimizer, manifest: Json
    ) -> None:
        """Save before the run ends, with a retry after each delay in `RETRY_DELAYS`.

        Every rank calls this function, and all ranks attempt equally often, because all get the
        same error.

        Raises:
            CheckpointError: on every rank, with the steps that are lost and the last checkpoint.
        """
        began = time.monotonic()
        for delay in (*RETRY_DELAYS, None):
            self.save(model_parts, optimizer, manifest)
            try:
                return self.wait()
            except (LeaseLost, PeerLost):
                raise
            except CheckpointError as error:
                self._unreported = []
                if delay is None:
                    message = self._describe_loss(manifest["step"], time.monotonic() - began, error)
                    raise CheckpointError(message) from error
                self._log(f"{error}; retrying the final save of the run in {delay} s")
            for _ in range(delay):
                enter_phase("checkpoint")  # a heartbeat: this is not a hang
                time.sleep(1.0)

    def _describe_loss(self, step: int, seconds: float, error: CheckpointError) -> str:
        """Return the message for a final save that failed."""

        def newest() -> Path | None:
            return next(iter(list_checkpoints(self.directory)[::-1]), None)

        try:
            last = run_on_rank_0(newest, f"{self.directory}: could not be read")
            lost = "there is no checkpoint, so all steps are lost"
            if last is not None:
                last_step = checkpoint_step(last)
                lost = f"steps {last_step + 1} to {step} are lost; the last checkpoint is {last}"
        except CheckpointError as unreadable:
            lost = f"the steps since the last checkpoint are lost, and {unreadable}"
        attempts = f"{len(RETRY_DELAYS) + 1} attempts in {seconds:.0f} s"
        return f"the final save at step {step} failed in {attempts}: {error}; {lost}"

    def close(self) -> None:
        """Wait until a running save ends, successfully or not."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def is_saving(self) -> bool:
        """Return True if a save is running."""
        return self._thread is not None and self._thread.is_alive()

    def should_retry(self) -> bool:
        """Return True if the last save failed and should be retried at once.

        Does not wait for a running save.  Every failure is logged; the first of consecutive
        failures is retried.

        Raises:
            LeaseLost: if another process has acquired the lease.
        """
        if self.is_saving():
            return False
        return self._report_problems() and self._error is not None and self._failures == 1

    def _report_problems(self) -> bool:
        """Log new warnings and errors; return True if there was an error."""
        warnings, self._warnings = self._warnings, []
        for warning in warnings:
            self._log(warning)
        errors, self._unreported = self._unreported, []
        for error in errors:
            if isinstance(error, LeaseLost):
                raise error
            self._log(f"{error}; training continues without this checkpoint")
        return bool(errors)

    def _stage_shards(
        self, model_parts: Sequence[nn.Module], optimizer: Optimizer
    ) -> tuple[list[StagedShard], set[str]]:
        """Copy this rank's shards; return them and the names of the owned tensors.

        Replicas that another rank owns are included only for local checkpoints.
        """
        state = model_state(model_parts) | optimizer_state(model_parts, optimizer)
        axes = find_replica_axes(model_parts, state)
        owned = {name for name in state if is_owner(name, axes[name])}
        shards, fingerprints = [], []
        for name, tensor in state.items():
            if name not in owned and self.run_dir is None:
                continue
            local = local_values(tensor)
            if local.numel() == 0 and tensor.numel() > 0:
                continue  # other ranks hold all of it
            offsets = shard_offsets(tensor)
            # From the live tensor, before any copy.
            owned_values = local if name in owned else local.new_empty(0)
            fingerprints.append(fingerprint(owned_values, offsets, tensor.shape))
            shards.append(
                (name, tuple(tensor.shape), tuple(offsets), self._copy_to_host(name, local))
            )
        values = fingerprints_to_host(fingerprints)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        staged = [
            StagedShard(name, shape, offsets, value, content)
            for (name, shape, offsets, content), value in zip(shards, values, strict=True)
        ]
        # All ranks read small tensors such as step counts; stored together they are one request.
        return sorted(staged, key=lambda shard: shard.content.nbytes), owned

    def _copy_to_host(self, name: str, live: Tensor) -> Tensor:
        """Copy a tensor to CPU memory that is reused by the next save."""
        if not self.async_save and live.device.type == "cpu":
            return live
        buffer = self._buffers.get(name)
        if buffer is None or buffer.shape != live.shape or buffer.dtype != live.dtype:
            pinned = live.device.type == "cuda"
            buffer = torch.empty(live.shape, dtype=live.dtype, pin_memory=pinned)
            self._buffers[name] = buffer
        return buffer.copy_(live, non_blocking=True)

    def _write(
        self, shards: list[StagedShard], owned: set[str], manifest: Json, persistent: bool
    ) -> None:
        began, self._error = time.perf_counter(), None
        errors: list[CheckpointError] = []
        try:
            if self.run_dir is not None:
                try:
                    save_local(self.run_dir, shards, owned, manifest, self._group)
                except CheckpointError as error:
                    errors.append(error)
            if persistent:
                owned_shards = [shard for shard in shards if shard.name in owned]
                _write(
                    self.directory,
                    owned_shards,
                    manifest,
                    self.keep_latest,
                    self._group,
                    self._leases,
                    self._warnings,
                )
        except CheckpointError as error:
            self._error = error
        except Exception as error:
            self._error = PeerLost(f"step {manifest['step']}: {format_error(error)}")
        self._failures = 0 if self._error is None else self._failures + 1
        self._unreported = errors if self._error is None else [*errors, self._error]
        self.write_seconds = time.perf_counter() - began


def _write(
    directory: Path,
    shards: list[StagedShard],
    manifest: Json,
    keep_latest: int,
    group: Any,
    known_leases: Mapping[str, bytes],
    warnings: list[str],
) -> None:
    """Write every rank's shards; rank 0 commits.

    Args:
        directory: directory of the run's checkpoints.
        shards: this rank's shards.
        manifest: manifest without the table of contents.
        keep_latest: number of checkpoints to keep.
        group: process group; None: all ranks.
        known_leases: see `hold_lease`.
        warnings: receives the warnings of `hold_lease`.
    """
    final = checkpoint_path(directory, manifest["step"])
    context = f"{final}: could not be written"
    # Rank 0 decides alone: other ranks could already see the result of its next step.
    warning, temporary = run_on_rank_0(
        lambda: _prepare_directory(final, manifest["epoch"], known_leases), context, group
    )
    warnings += [warning] if warning else []
    if temporary is None:
        return
    try:
        entries = gather_to_rank_0(lambda: _write_shards(temporary, shards), context, group)

        def commit() -> None:
            table = build_contents(
                rank_entries for rank_entries in entries if rank_entries is not None
            )
            location = {"inside": temporary.name} if is_remote(final) else {}
            try:
                _commit(
                    temporary, final, manifest | {"format": FORMAT} | location | table, known_leases
                )
            except FileNotFoundError:  # a new owner may have deleted it
                hold_lease(directory, manifest["epoch"], known_leases)
                raise

        run_on_rank_0(commit, context, group)
    except Exception:
        if get_rank() == 0:
            with suppress(OSError):
                remove(temporary)
        raise
    delete_context = f"{final} is saved, but an older checkpoint could not be deleted"
    base = manifest.get("base")
    run_on_rank_0(lambda: _delete_old(directory, keep_latest, base), delete_context, group)
    fault_point("checkpoint.saved")


def _prepare_directory(
    final: Path, epoch: int, known_leases: Mapping[str, bytes]
) -> tuple[str, Path | None]:
    """Create a new directory for a checkpoint's files, and delete leftovers.

    Returns:
        A warning of `hold_lease`, and the directory; None if the checkpoint is already committed.

    Raises:
        LeaseLost: if another process owns the lease, because leftovers may be its files.
    """
    directory, suffix = final.parent, uuid.uuid4().hex[:8]
    warning = hold_lease(directory, epoch, known_leases)
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


def _write_shards(temporary: Path, shards: list[StagedShard]) -> Json | None:
    fault_point("checkpoint.shards")
    if not shards:
        return None
    name = f"shard-{get_rank():05}.bin"
    with create_file(temporary / name, sum(shard.content.nbytes for shard in shards)) as file:
        entries = write_shards(file, name, shards)
        fault_point("checkpoint.written")
    return entries


def _commit(
    temporary: Path, final: Path, manifest: Json, known_leases: Mapping[str, bytes]
) -> None:
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
    if hold_lease(final.parent, manifest["epoch"], known_leases):
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


def _delete_old(directory: Path, keep_latest: int, base: str | None = None) -> None:
    """Delete all but the newest checkpoints, and older ones of abandoned branches.

    Args:
        directory: directory of the run's checkpoints.
        keep_latest: number of checkpoints to keep.
        base: name of the checkpoint with the frozen parameters, which is kept.
    """
    latest = list_checkpoints(directory)[-keep_latest:]
    if not latest:
        return  # another process resumed the run from before all of them
    for old in list_committed(directory):
        if old in latest or old.name == base or checkpoint_step(old) > checkpoint_step(latest[-1]):
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


def abandon_damaged(directory: Path, step: int) -> None:
    """Rename damaged checkpoints after ``step``, so that they do not count.

    Only a user decides this: see `weft.cluster.start.rollback`.
    """
    for path in list_quarantined(directory):
        if is_remote(path):
            put_if_absent(
                path.with_name(path.name.replace("damaged", "abandoned", 1)), path.read_bytes()
            )
            path.unlink()
        else:
            path.rename(path.with_name(path.name.replace("damaged", "abandoned", 1)))
    for path in list_committed(directory):
        try:
            read_manifest(path)
        except DamagedCheckpoint:
            if checkpoint_step(path) > step:
                quarantine(path, "abandoned")


def quarantine(path: Path, reason: str) -> None:
    """Rename a checkpoint that is not current, without deleting it."""
    if is_remote(path):  # a checkpoint without a manifest is not committed
        manifest = path / "manifest.json"
        put_if_absent(path / f"manifest.{reason}-{time.time_ns()}.json", manifest.read_bytes())
        manifest.unlink()
    else:
        path.rename(path.with_name(f"{reason}-{path.name}-{time.time_ns()}"))
