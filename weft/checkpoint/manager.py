"""Save checkpoints: decide when, copy the state, and write it in the background.

*Schedule.*  With one failure every M seconds on average, a checkpoint that blocks training for C
seconds, and one checkpoint every t seconds, the fraction of time lost is about C / t (saving) +
t / (2 M) (repeated after a failure).  It is minimal at t = sqrt(2 C M): J. W. Young, "A first order
approximation to the optimum checkpoint interval", CACM 17 (1974).  J. T. Daly's higher-order
estimate (FGCS 22, 2006) differs by less than C while C is far below M.  Only the blocking time C
counts: an asynchronous write costs no training time, but two writes cannot overlap.

*Verify.*  The fingerprint of a tensor is compared with live memory after loading, on any layout.
It therefore covers everything in between, and needs no second read.  It costs one pass over memory:
on a GPU over the live tensor before the copy, on a CPU over the copy, in the thread that writes.
All ranks reach the same verdict.

`weft.checkpoint.commit` makes a checkpoint visible atomically.
"""

from __future__ import annotations

import math
import shutil
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from weft.checkpoint.best import BestMetric, find_best
from weft.checkpoint.commit import write_checkpoint
from weft.checkpoint.fingerprint import fingerprint
from weft.checkpoint.local_save import local_run_dir, save_local
from weft.checkpoint.manifest import (
    CheckpointError,
    Lease,
    LeaseLost,
    acquire_lease,
    format_error,
    list_checkpoints,
    read_leases,
    run_on_rank_0,
)
from weft.checkpoint.shard_files import Json, StagedShard
from weft.checkpoint.state_dict import (
    checkpoint_tensors,
    find_replica_axes,
    is_owner,
    local_values,
)
from weft.config.schema import CheckpointSection
from weft.monitor.faults import fault_point
from weft.monitor.heartbeat import SAVE_GROUP
from weft.monitor.step_timer import enter_phase
from weft.parallel.dtensor import shard_offsets

FIRST_SAVE_STEPS = 10  # steps before the first save, whose cost sets the interval


def young_interval(cost_seconds: float, mtbf_seconds: float) -> float:
    """Return the seconds between checkpoints that minimize lost time."""
    return math.sqrt(2 * cost_seconds * mtbf_seconds)


class CheckpointSchedule:
    """Decides after which steps to save."""

    def __init__(self, section: CheckpointSection, step: int, log: Callable[[str], None]) -> None:
        self._mtbf_seconds = section.mtbf_hours * 3600
        self._interval = section.interval
        self._local_interval = section.local_interval if section.saves_locally else 0
        self._next, self._steps_between = step + FIRST_SAVE_STEPS, FIRST_SAVE_STEPS
        self._log = log

    def is_due(self, step: int) -> bool:
        """Return True if the run saves after ``step``; the same on every rank."""
        if self._interval == "auto":
            return step >= self._next
        return self._interval > 0 and step % self._interval == 0

    def is_local_due(self, step: int) -> bool:
        """Return True if nodes save after ``step``: see `weft.checkpoint.local_save`."""
        return self._local_interval > 0 and step % self._local_interval == 0

    def record_save(
        self, step: int, blocking_seconds: float, write_seconds: float, step_seconds: float
    ) -> None:
        """Update the automatic interval after a save; every rank calls it.

        Args:
            step: step of the save.
            blocking_seconds: time for which the save blocked training.
            write_seconds: time of the previous asynchronous write; 0 if there was none.
            step_seconds: time of a step.
        """
        if self._interval != "auto":
            return
        slowest = torch.tensor([blocking_seconds, write_seconds, step_seconds], dtype=torch.float64)
        if dist.get_world_size() > 1:
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
        blocking, write, step_time = slowest.tolist()
        steps_between = max(
            1, math.ceil(max(young_interval(blocking, self._mtbf_seconds), write) / step_time)
        )
        if not 0.5 < steps_between / self._steps_between < 2:
            self._log(
                f"checkpoint.interval=auto: a save blocks training for {blocking:.2g} s; saving "
                f"every {steps_between} steps"
            )
            self._steps_between = steps_between
        self._next = step + steps_between


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
        run_files: Mapping[str, str] | None = None,
        best: BestMetric | None = None,
        log: Callable[[str], None] = lambda text: None,
    ) -> None:
        """Create the manager; every rank calls this function.

        Args:
            directory: directory of the run's checkpoints.
            keep_latest: number of newest checkpoints to keep; older ones are deleted.
            async_save: write files while training continues.
            local_dir: directory of local checkpoints: see `weft.checkpoint.local_save`.
            run_files: fingerprints of the run's files: see `weft.checkpoint.run_fingerprints`.
            best: metric whose best checkpoint is kept, too; None: no checkpoint is.
            log: receives warnings and errors.
        """
        self._run_files = dict(run_files or {})
        self.keep_latest, self.async_save, self._best = keep_latest, async_save, best
        self.lease = Lease(directory)
        self.run_dir: Path | None = None
        self._local_dir = local_dir
        self.blocking_seconds = 0.0  # of the last save
        self.waited_seconds = 0.0  # of the last save, for the one before; 0: it was complete
        self.write_seconds = 0.0  # of the last completed save
        self.staged_bytes = 0  # of this rank in the last save
        self._log = log
        self._failures = 0  # consecutive
        self._error: CheckpointError | None = None  # of the last save
        self._evaluation: Mapping[str, float] = {}  # in the last persistent save
        self._problems: list[str | CheckpointError] = []  # warnings and errors, not logged yet
        self._thread: threading.Thread | None = None
        self._buffers: dict[str, Tensor] = {}
        # The writing thread needs its own group: its collectives must not mix with training's.
        is_single = not dist.is_initialized() or dist.get_world_size() == 1
        self._group = None
        if async_save and not is_single:
            self._group = dist.new_group(backend="gloo", group_desc=SAVE_GROUP)

    def acquire_lease(self, step: int) -> None:
        """Acquire the run's lease at ``step`` and prepare local checkpoints."""
        directory = self.lease.directory
        epoch = acquire_lease(directory, step)
        failed = f"{directory}: could not be read"
        known = run_on_rank_0(lambda: read_leases(directory), failed)
        self.lease = Lease(directory, epoch, known)
        self.run_dir = local_run_dir(self._local_dir, directory)

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
        is_waiting = self.is_saving()
        self.close()
        self.waited_seconds = time.perf_counter() - began if is_waiting else 0.0
        self._report_problems()
        fault_point("checkpoint")
        shards = self._stage_shards(model_parts, optimizer)
        self.staged_bytes = sum(shard.num_bytes for shard in shards if shard.is_owned)
        own = {"epoch": self.lease.epoch, "run_files": self._run_files}
        args = (shards, manifest | own, persistent)
        if persistent:
            self._evaluation = manifest.get("evaluation", {})
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

    def save_into(
        self,
        directory: Path,
        model_parts: Sequence[nn.Module],
        optimizer: Optimizer,
        manifest: Json,
    ) -> None:
        """Save once into another directory, which has the leases of the run, and wait.

        Every rank calls this function.

        Raises:
            CheckpointError: as `wait`.
        """
        own = self.lease, self.run_dir
        self.lease, self.run_dir = self.lease._replace(directory=directory), None
        try:
            self.save(model_parts, optimizer, manifest)
            self.wait()
        finally:
            self.lease, self.run_dir = own

    def is_best(self, evaluation: Mapping[str, float]) -> bool:
        """Return True if no checkpoint has a better evaluation; a collective.

        Also True if they cannot be read: then one checkpoint too many is saved.
        """
        best, directory = self._best, self.lease.directory
        if best is None or (value := evaluation.get(best.name)) is None:
            return False

        def compare() -> bool:
            # Of the last save, which may still be running.
            newest = None if self._error else self._evaluation.get(best.name)
            if newest is not None and not best.is_better(value, newest):
                return False
            try:
                found = find_best(list_checkpoints(directory), best)
            except (CheckpointError, OSError):
                return True
            return found is None or best.is_better(value, found[1])

        return run_on_rank_0(compare, f"{directory}: could not be read")

    def discard_errors(self) -> None:
        """Forget the errors that are not logged yet, because the caller reports them."""
        self._problems = [each for each in self._problems if isinstance(each, str)]

    def close(self) -> None:
        """Wait until a running save ends, successfully or not."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def release_copies(self) -> None:
        """Wait until a running save ends, and free its copies: loading needs memory."""
        self.close()
        self._buffers.clear()

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
        problems, self._problems = self._problems, []
        for problem in problems:
            if isinstance(problem, LeaseLost):
                raise problem
            effect = "; training continues without this checkpoint"
            self._log(problem if isinstance(problem, str) else f"{problem}{effect}")
        return any(isinstance(problem, CheckpointError) for problem in problems)

    def _stage_shards(
        self, model_parts: Sequence[nn.Module], optimizer: Optimizer
    ) -> list[StagedShard]:
        """Copy this rank's shards.

        Replicas that another rank owns are included only for local checkpoints.
        """
        state = checkpoint_tensors(model_parts, optimizer)
        axes = find_replica_axes(model_parts, state)
        shards, sums = [], dict[str, Tensor]()
        for name, tensor in state.items():
            owned = is_owner(name, axes[name])
            if not owned and self.run_dir is None:
                continue
            local = local_values(tensor)
            if local.numel() == 0 and tensor.numel() > 0:
                continue  # other ranks hold all of it
            shape, offsets = tuple(tensor.shape), tuple(shard_offsets(tensor))
            # A GPU is fast, and the copy is verified too; on a CPU training would wait.
            if owned and local.device.type != "cpu":
                sums[name] = fingerprint(local, offsets, shape)
            rows = [self._copy_to_host(name, local)]
            box = (name, local.dtype, shape, offsets, tuple(local.shape))
            shards.append(StagedShard(*box, rows, owned))
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()
        if sums:  # read at once: the thread would wait for training's kernels, for each again
            numbers = dict(zip(sums, torch.stack(list(sums.values())).tolist(), strict=True))
            shards = [shard._replace(fingerprint=numbers.get(shard.name)) for shard in shards]
        # Wide dtypes first, for alignment.  All ranks read small tensors such as step counts;
        # stored together they are one request.
        return sorted(shards, key=lambda shard: (-shard.dtype.itemsize, shard.num_bytes))

    def _copy_to_host(self, name: str, live: Tensor) -> Tensor:
        """Copy a tensor to CPU memory that is reused by the next save."""
        if not self.async_save and live.device.type == "cpu":
            return live
        buffer = self._buffers.get(name)
        if buffer is None or buffer.shape != live.shape or buffer.dtype != live.dtype:
            pinned = live.device.type != "cpu"
            buffer = torch.empty(live.shape, dtype=live.dtype, pin_memory=pinned)
            self._buffers[name] = buffer
        return buffer.copy_(live, non_blocking=True)

    def _write(self, shards: list[StagedShard], manifest: Json, persistent: bool) -> None:
        began, self._error = time.perf_counter(), None
        try:
            if self.run_dir is not None:
                try:
                    save_local(self.run_dir, shards, manifest, self._group)
                except CheckpointError as error:
                    self._problems.append(error)
            if persistent:
                write_checkpoint(
                    self.lease,
                    [shard for shard in shards if shard.is_owned],
                    manifest,
                    self.keep_latest,
                    self._group,
                    self._problems.append,
                    self._best,
                )
        except CheckpointError as error:
            self._error = error
        except Exception as error:
            self._error = PeerLost(f"step {manifest['step']}: {format_error(error)}")
        self._failures = 0 if self._error is None else self._failures + 1
        if self._error is not None:
            self._problems.append(self._error)
        self.write_seconds = time.perf_counter() - began
