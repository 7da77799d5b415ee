"""Checkpoints: ``checkpoints/step-00000100``, whole or not there, and true or not taken.

*Commit.*  A checkpoint is written into a fresh hidden folder; ``manifest.json`` (step, position in
the data, layout, versions, what lies where, hashes of the files, fingerprints of the tensors, its
own hash) is added, everything is forced to the disk, and one rename makes it visible.  A folder of
that name is therefore always complete, is never written again, and 'the newest' is simply the
largest step.  In an object store, where nothing can be renamed, the manifest is what makes a
checkpoint visible: it is put last, and only if there is none.

*Verify.*  The fingerprint of a tensor is taken from live memory before it is copied anywhere, and
compared with what lies in live memory after loading, on whatever layout.  So everything in between
is covered, what was read is read once, and the price is a pass over memory.  All ranks come to the
same verdict.
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

from weft.checkpoint.fingerprint import fingerprint, on_host
from weft.checkpoint.local_save import local_folder, save_local
from weft.checkpoint.manifest import (
    FORMAT,
    NAME,
    CheckpointError,
    DamagedCheckpoint,
    Superseded,
    cause,
    checkpoint_path,
    checkpoint_step,
    checkpoints,
    committed,
    counts,
    from_rank_0,
    gathered,
    hold_lease,
    leases,
    manifest_text,
    own_rank,
    read_leases,
    read_manifest,
    take,
)
from weft.checkpoint.shard_files import Json, Staged, table_of_contents, write_shards
from weft.checkpoint.state_dict import (
    copies_of,
    local_part,
    model_state,
    optimizer_state,
    owns,
)
from weft.checkpoint.storage import create, is_remote, put_new, remove
from weft.config.files import sync_folder
from weft.monitor.faults import fault_point
from weft.monitor.heartbeat import beat
from weft.parallel.dtensor import shard_offsets

PAUSES = (1, 2, 4, 8, 15, 30)  # seconds between attempts at the last save of a run


class PeerGone(CheckpointError):
    """A rank has ended in the middle of a save: no other attempt can succeed."""


class CheckpointManager:
    """Saves the checkpoints of a run, one at a time.

    The state is copied while training waits, and then, in the background, written by each rank and
    committed by rank 0.  All ranks hear the same of how it went.
    """

    def __init__(
        self,
        folder: Path,
        keep: int,
        *,
        background: bool = False,
        local: str = "off",
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        """Every rank makes one.

        Args:
            folder: of all checkpoints of the run.
            keep: newest checkpoints that are kept; older ones are removed.
            background: whether training goes on while files are written.
            local: where this node keeps the newest state: see `weft.checkpoint.local_save`.
            say: told of failures.
        """
        self.folder, self.keep, self.background = folder, keep, background
        self.epoch = 0
        self._leases: dict[str, bytes] = {}  # when it took the run
        self._warnings: list[str] = []  # that were not told yet
        self.local: Path | None = None
        self._local = local
        self.blocking_seconds = 0.0  # of the last save
        self.write_seconds = 0.0  # of the last one that is done
        self._say = say
        self._failures = 0  # in a row
        self._error: CheckpointError | None = None  # of the last save
        self._untold: list[CheckpointError] = []
        self._thread: threading.Thread | None = None
        self._copies: dict[str, Tensor] = {}
        # What is said in the background must not come between what training says.
        alone = not dist.is_initialized() or dist.get_world_size() == 1
        self._group = dist.new_group(backend="gloo") if background and not alone else None

    def take(self, step: int) -> None:
        """Go on from ``step`` as the only one: see `weft.checkpoint.manifest.take`."""
        self.epoch = take(self.folder, step)
        failed = f"{self.folder}: could not be read"
        self._leases = from_rank_0(lambda: read_leases(self.folder), failed)
        self.local = local_folder(self._local, self.folder)

    def save(
        self,
        parts: Sequence[nn.Module],
        optimizer: Optimizer,
        manifest: Json,
        home: bool = True,
    ) -> None:
        """Copy the state and begin to write it as checkpoint of ``manifest["step"]``.

        Every rank calls it.  Waits for the one before, if need be.

        Args:
            home: whether into ``folder``, or on the nodes only.

        Raises:
            Superseded: if another process has taken over the run.
        """
        began = time.perf_counter()
        self.close()
        self._tell()
        fault_point("checkpoint")
        boxes, owned = self._stage(parts, optimizer)
        about = manifest | {"epoch": self.epoch}
        work = (boxes, owned, about, home)
        self._thread = threading.Thread(target=self._write, args=work, daemon=True)
        self._thread.start()
        if not self.background:
            self.close()
            if isinstance(self._error, Superseded):
                raise self._error
        self.blocking_seconds = time.perf_counter() - began

    def wait(self) -> None:
        """Until the last save is done.

        Raises:
            CheckpointError: on every rank, whichever failed.  Nothing half-written stays behind.
        """
        self.close()
        if self._error is not None:
            raise self._error
        if self.local is not None:  # it is at home now
            shutil.rmtree(self.local, ignore_errors=True)

    def save_last(self, parts: Sequence[nn.Module], optimizer: Optimizer, manifest: Json) -> None:
        """Save before the run ends; while that fails, try again after pauses of `PAUSES` seconds.

        Every rank calls it, and all try equally often: whichever rank failed, all have its error.

        Raises:
            CheckpointError: on every rank, with what is lost and what is left.
        """
        began = time.monotonic()
        for pause in (*PAUSES, None):
            self.save(parts, optimizer, manifest)
            try:
                return self.wait()
            except (Superseded, PeerGone):
                raise
            except CheckpointError as error:
                self._untold = []
                if pause is None:
                    lost = self._loss(manifest["step"], time.monotonic() - began, error)
                    raise CheckpointError(lost) from error
                self._say(f"{error}; trying again in {pause} s: it is the last save of the run")
            for _ in range(pause):
                beat("checkpoint")  # this is no hang
                time.sleep(1.0)

    def _loss(self, step: int, seconds: float, error: CheckpointError) -> str:
        """Return what to say when the last save has failed for good."""

        def newest() -> Path | None:
            return next(iter(checkpoints(self.folder)[::-1]), None)

        try:
            left = from_rank_0(newest, f"{self.folder}: could not be read")
            kept = "there is no checkpoint: all steps are lost"
            if left is not None:
                done = checkpoint_step(left)
                kept = f"steps {done + 1} to {step} are lost; the last good checkpoint is {left}"
        except CheckpointError as unreadable:
            kept = f"the steps since the last checkpoint are lost, and {unreadable}"
        tries = f"{len(PAUSES) + 1} attempts in {seconds:.0f} s"
        return (
            f"step {step}, the last of this start, could not be saved in {tries}: {error}; {kept}"
        )

    def close(self) -> None:
        """Let a save that is under way come to its end, whatever that is."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def busy(self) -> bool:
        """Whether a save is under way."""
        return self._thread is not None and self._thread.is_alive()

    def should_retry(self) -> bool:
        """Whether the last save has ended in an error, and is worth another try at once.

        Does not wait for it.  A failure is told, the first one in a row is tried again.

        Raises:
            Superseded: if the run is not this process's any more.
        """
        if self.busy():
            return False
        return self._tell() and self._error is not None and self._failures == 1

    def _tell(self) -> bool:
        """Tell failures that were not told yet; whether there were any."""
        warnings, self._warnings = self._warnings, []
        for warning in warnings:
            self._say(warning)
        untold, self._untold = self._untold, []
        for error in untold:
            if isinstance(error, Superseded):
                raise error
            self._say(f"{error}; going on without it")
        return bool(untold)

    def _stage(
        self, parts: Sequence[nn.Module], optimizer: Optimizer
    ) -> tuple[list[Staged], set[str]]:
        """This rank's boxes, copied so that training can go on, and the names of those that count.

        The others, copies that another rank has too, are only there if nodes keep them.
        """
        state = model_state(parts) | optimizer_state(parts, optimizer)
        copies = copies_of(parts, state)
        owned = {name for name in state if owns(name, copies[name])}
        boxes, marks = [], []
        for name, tensor in state.items():
            if name not in owned and self.local is None:
                continue
            local = local_part(tensor)
            if local.numel() == 0 and tensor.numel() > 0:
                continue  # others have it all
            offsets = shard_offsets(tensor)
            # Of the live tensor, before it is copied anywhere.
            counts_once = local if name in owned else local.new_empty(0)
            marks.append(fingerprint(counts_once, offsets, tensor.shape))
            boxes.append((name, tuple(tensor.shape), tuple(offsets), self._copy(name, local)))
        numbers = on_host(marks)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        staged = [
            Staged(name, shape, offsets, mark, copy)
            for (name, shape, offsets, copy), mark in zip(boxes, numbers, strict=True)
        ]
        # What every rank needs of every other, step counts, is small: together, it is one request.
        return sorted(staged, key=lambda box: box.content.nbytes), owned

    def _copy(self, name: str, live: Tensor) -> Tensor:
        """A copy on the CPU in memory that is used again by the next save."""
        if not self.background and live.device.type == "cpu":
            return live
        copy = self._copies.get(name)
        if copy is None or copy.shape != live.shape or copy.dtype != live.dtype:
            pinned = live.device.type == "cuda"
            copy = torch.empty(live.shape, dtype=live.dtype, pin_memory=pinned)
            self._copies[name] = copy
        return copy.copy_(live, non_blocking=True)

    def _write(self, boxes: list[Staged], owned: set[str], manifest: Json, home: bool) -> None:
        began, self._error = time.perf_counter(), None
        untold: list[CheckpointError] = []
        try:
            if self.local is not None:
                try:
                    save_local(self.local, boxes, owned, manifest, self._group)
                except CheckpointError as error:
                    untold.append(error)
            if home:
                mine = [box for box in boxes if box.name in owned]
                known = self._leases, self._warnings
                _write(self.folder, mine, manifest, self.keep, self._group, *known)
        except CheckpointError as error:
            self._error = error
        except Exception as error:
            self._error = PeerGone(f"step {manifest['step']}: {cause(error)}")
        self._failures = 0 if self._error is None else self._failures + 1
        self._untold = untold if self._error is None else [*untold, self._error]
        self.write_seconds = time.perf_counter() - began


def _write(
    folder: Path,
    boxes: list[Staged],
    manifest: Json,
    keep: int,
    group: Any,
    known: Mapping[str, bytes],
    warnings: list[str],
) -> None:
    """Write every rank's boxes; rank 0 commits.

    Args:
        known: the leases that this process knows: see `hold_lease`.
        warnings: gets those of `hold_lease`.
    """
    final = checkpoint_path(folder, manifest["step"])
    failed = f"{final}: could not be written"
    # One rank decides: another could already see what the first one does next.
    warning, temporary = from_rank_0(lambda: _begin(final, manifest["epoch"], known), failed, group)
    warnings += [warning] if warning else []
    if temporary is None:
        return
    try:
        written = gathered(lambda: _write_shards(temporary, boxes), failed, group)

        def commit() -> None:
            table = table_of_contents(each for each in written if each is not None)
            inside = {"inside": temporary.name} if is_remote(final) else {}
            try:
                _commit(temporary, final, manifest | {"format": FORMAT} | inside | table, known)
            except FileNotFoundError:
                hold_lease(folder, manifest["epoch"], known)  # a successor may have cleared it
                raise

        from_rank_0(commit, failed, group)
    except Exception:
        if own_rank() == 0:
            with suppress(OSError):
                remove(temporary)
        raise
    late = f"{final} is saved, but an older one could not be deleted"
    base = manifest.get("base")
    from_rank_0(lambda: _delete_old(folder, keep, base), late, group)
    fault_point("checkpoint.saved")


def _begin(final: Path, epoch: int, known: Mapping[str, bytes]) -> tuple[str, Path | None]:
    """Make a new folder to write into, unless the checkpoint is there; clear what others left.

    Returns:
        A warning of `hold_lease`, and the folder; None if the checkpoint is there already.

    Raises:
        Superseded: if somebody else has the run, whose unfinished checkpoint that may be.
    """
    home, unique = final.parent, uuid.uuid4().hex[:8]
    warning = hold_lease(home, epoch, known)
    if (final / "manifest.json").is_file() and counts(final, leases(home)):
        return warning, None
    if is_remote(final):
        for path in home.iterdir() if home.is_dir() else []:
            if NAME.fullmatch(path.name) and not any(p.is_file() for p in path.iterdir()):
                remove(path)
        return warning, final / unique
    home.mkdir(parents=True, exist_ok=True)
    for ours in (".tmp-step-*", ".tmp-lease-*"):
        for leftover in home.glob(ours):
            remove(leftover)
    temporary = final.with_name(f".tmp-{final.name}-{unique}")
    temporary.mkdir()
    return warning, temporary


def _write_shards(temporary: Path, boxes: list[Staged]) -> Json | None:
    fault_point("checkpoint.shards")
    if not boxes:
        return None
    name = f"shard-{own_rank():05}.bin"
    with create(temporary / name, sum(box.content.nbytes for box in boxes)) as file:
        written = write_shards(file, name, boxes)
        fault_point("checkpoint.written")
    return written


def _commit(temporary: Path, final: Path, manifest: Json, known: Mapping[str, bytes]) -> None:
    """Make ``temporary`` visible as ``final``, if the run is still this process's.

    The lease is read as late as possible: a process that was suspended while it saved must not
    replace what its successor has saved meanwhile.
    """
    fault_point("checkpoint.manifest")
    text = manifest_text(manifest).encode()
    if not is_remote(final):
        with create(temporary / "manifest.json") as file:
            file.write(text)
        sync_folder(temporary)
    fault_point("checkpoint.rename")
    if hold_lease(final.parent, manifest["epoch"], known):
        raise CheckpointError(f"{final.parent}: it was deleted while {final.name} was written")
    if (final / "manifest.json").exists() or (final.exists() and not is_remote(final)):
        # Of an abandoned branch, or without a manifest: no checkpoint any more.
        quarantine(final, "abandoned")
    if is_remote(final):
        put_new(final / "manifest.json", text)
        fault_point("checkpoint.renamed")
        return
    temporary.rename(final)
    fault_point("checkpoint.renamed")
    sync_folder(final.parent)


def _delete_old(folder: Path, keep: int, base: str | None = None) -> None:
    """Delete all but the newest ``keep``, and what is older than they are of abandoned branches.

    Args:
        base: the name of the one that has the weights which are not trained, and stays.
    """
    kept = checkpoints(folder)[-keep:]
    if not kept:
        return  # of a run that somebody else went on with, from before them all
    for old in committed(folder):
        if old in kept or old.name == base or checkpoint_step(old) > checkpoint_step(kept[-1]):
            continue
        # First out of sight, in one step: nothing half-deleted may look whole.
        fault_point("checkpoint.delete")
        if is_remote(old):
            (old / "manifest.json").unlink()
            hidden = old
        else:
            hidden = old.rename(old.with_name(f".tmp-{old.name}-deleted"))
        fault_point("checkpoint.deleting")
        remove(hidden)


def quarantined(folder: Path) -> list[Path]:
    """Return the checkpoints in ``folder`` that were renamed because they are damaged."""
    if not folder.is_dir():
        return []
    if is_remote(folder):
        steps = [path for path in folder.iterdir() if NAME.fullmatch(path.name)]
        found = [path for step in steps for path in step.glob("manifest.damaged-*.json")]
    else:
        found = list(folder.glob("damaged-step-*"))
    return sorted(found, key=str)


def give_up(folder: Path, step: int) -> None:
    """Rename what is damaged in ``folder`` after ``step``, so that it no longer counts as work.

    Only a person decides that: see `weft.cluster.start.rollback`.
    """
    for path in quarantined(folder):
        if is_remote(path):
            put_new(path.with_name(path.name.replace("damaged", "abandoned", 1)), path.read_bytes())
            path.unlink()
        else:
            path.rename(path.with_name(path.name.replace("damaged", "abandoned", 1)))
    for path in committed(folder):
        try:
            read_manifest(path)
        except DamagedCheckpoint:
            if checkpoint_step(path) > step:
                quarantine(path, "abandoned")


def quarantine(path: Path, why: str) -> None:
    """Rename a checkpoint that does not count, so that it is out of the way and not lost."""
    if is_remote(path):  # its manifest, without which it is none
        manifest = path / "manifest.json"
        put_new(path / f"manifest.{why}-{time.time_ns()}.json", manifest.read_bytes())
        manifest.unlink()
    else:
        path.rename(path.with_name(f"{why}-{path.name}-{time.time_ns()}"))
