"""Save the last state of a run, elsewhere if its directory cannot take it.

The state exists only in memory, so the run does not end while a save may still succeed: it tries
again for ``checkpoint.final_save_timeout`` seconds.  Then it saves into a new directory below the
first of these places that has room and that all ranks see: the run directory,
``checkpoint.local_dir``, the temporary directory, ``/dev/shm``.  After a stop signal there may be
only 30 seconds, so it does this after the first failure, and keeps trying.

The new directory is an ordinary directory of checkpoints with the leases of the run, so the run
resumes from it with ``--checkpoint.dir``.  A file in the run directory names it, for messages.
"""

from __future__ import annotations

import json
import math
import shlex
import shutil
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import chain, repeat
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from weft.checkpoint.manager import CheckpointManager, PeerLost
from weft.checkpoint.manifest import (
    CheckpointError,
    LeaseLost,
    checkpoint_path,
    checkpoint_step,
    gather_to_rank_0,
    list_checkpoints,
    run_on_rank_0,
)
from weft.checkpoint.owner import write_owner
from weft.checkpoint.shard_files import Json
from weft.config.files import replace_text
from weft.config.host_limits import read_memory_sizes
from weft.config.mounts import existing_parent, find_mount
from weft.config.schema import CheckpointSection
from weft.config.storage import is_remote
from weft.monitor.step_timer import enter_phase
from weft.monitor.terminal import format_duration

RETRY_DELAYS = (1, 2, 4, 8, 15, 30, 60)  # seconds between attempts; the last one repeats
RECORD_FILE = "saved-elsewhere.json"  # in the run directory: {"directory": PATH, "step": STEP}
MEMORY_DIR = Path("/dev/shm")


class FinalSave:
    """The last save before a run ends; every rank creates and runs it."""

    def __init__(
        self,
        checkpoints: CheckpointManager,
        state: tuple[Sequence[nn.Module], Optimizer, Json],
        section: CheckpointSection,
        run_dir: Path,
        should_stop: Callable[[], bool],
        log: Callable[[str], None],
    ) -> None:
        """Create the save.

        Args:
            checkpoints: manager of the run's checkpoints.
            state: the model parts, the optimizer, and the manifest without its table of contents.
            section: the section ``[checkpoint]``.
            run_dir: the run directory.
            should_stop: returns True if all ranks stop; a collective.
            log: receives warnings.
        """
        self._checkpoints, self._state = checkpoints, state
        self._section, self._run_dir = section, run_dir.absolute()
        self._should_stop, self._log = should_stop, log
        self._lease, self._step = checkpoints.lease, int(state[2]["step"])
        self._place: Path | None = None  # where the state is saved instead
        self._refusals: list[str] = []  # why it could not be saved in other places

    def run(self) -> None:
        """Save, and retry if that fails; a collective.

        Raises:
            CheckpointError: on every rank, when ``checkpoint.final_save_timeout`` is over: with
                the directory of the state, or the steps that are lost.
        """
        began = time.monotonic()
        for attempt, delay in enumerate(chain(RETRY_DELAYS, repeat(RETRY_DELAYS[-1])), 1):
            try:
                self._checkpoints.save(*self._state)
                self._checkpoints.wait()
            except (LeaseLost, PeerLost):
                raise
            except CheckpointError as error:
                failure = error
                self._checkpoints.discard_errors()
            else:
                return self._delete_place()
            seconds = run_on_rank_0(lambda: time.monotonic() - began, "the clock")
            left = self._section.final_save_timeout - seconds
            text = f"{failure}. {self._describe_space()}"
            if left <= 0:
                if self._place is None:
                    self._save_elsewhere()
                attempts = f"{attempt} attempt{'s' * (attempt > 1)} in {seconds:.0f} s"
                text = f"the final save at step {self._step} failed in {attempts}: {text}"
                raise CheckpointError(f"{text}. {self._outcome()}") from failure
            wait = math.ceil(min(delay, left))
            self._log(
                f"{text}. weft retries the final save of the run in {wait} s, and for "
                f"{format_duration(left)} in all (checkpoint.final_save_timeout)"
            )
            self._wait(wait)

    def _wait(self, seconds: int) -> None:
        """Wait; if all ranks stop, save elsewhere, because there may be little time."""
        has_tried = self._place is not None
        for second in range(seconds + 1):
            if not has_tried and self._should_stop():
                has_tried = True
                self._save_elsewhere()
                more = "weft keeps trying; a second signal ends the run at once"
                self._log(f"{self._outcome()}. {self._lease.directory}: {more}")
            if second < seconds:
                enter_phase("checkpoint")  # a heartbeat: this is not a hang
                time.sleep(1.0)

    def _save_elsewhere(self) -> None:
        """Save into a new directory in the first place that has room."""
        self._refusals, num_bytes = [], self._count_bytes()
        # Rank 0 decides: nodes may have different temporary directories.
        for place in run_on_rank_0(lambda: [*self._list_places()], "the places could not be found"):
            try:
                self._save_into(place, num_bytes)
            except (LeaseLost, PeerLost):
                raise
            except CheckpointError as error:
                self._refusals.append(str(error))
            else:
                self._place = place
                return

    def _list_places(self) -> Iterator[Path]:
        """Yield new directories below the places where the state may be saved."""
        suffix = f"step-{self._step:08}-{uuid.uuid4().hex[:8]}"
        yield self._run_dir / f"checkpoints-{suffix}"
        roots = [Path(tempfile.gettempdir()), MEMORY_DIR]
        if self._section.saves_locally:
            roots.insert(0, Path(self._section.local_dir))
        for root in dict.fromkeys(root.absolute() for root in roots):
            yield root / f"weft-{self._run_dir.name}-{suffix}"

    def _save_into(self, place: Path, num_bytes: int) -> None:
        """Create a directory of checkpoints and save into it; a collective.

        Raises:
            CheckpointError: on every rank; the directory is then deleted.
        """
        context = f"{place}: cannot be used"

        def check_visible() -> None:
            if not place.is_dir():
                raise OSError("this rank does not see the directory: it is on another node")

        try:
            run_on_rank_0(lambda: self._create(place, num_bytes), context)
            gather_to_rank_0(check_visible, context)
            self._checkpoints.save_into(place, *self._state)
            run_on_rank_0(lambda: self._write_record(place), context)
        except PeerLost:
            raise
        except CheckpointError:
            self._checkpoints.discard_errors()
            run_on_rank_0(lambda: shutil.rmtree(place, ignore_errors=True), context)
            raise

    def _create(self, place: Path, num_bytes: int) -> None:
        """Create a directory with the leases of the run, and its checkpoint of step 0."""
        if place.parent == MEMORY_DIR and not MEMORY_DIR.is_dir():
            raise OSError("there is no such directory on this machine")
        free = free_bytes(place)
        if free is not None and free < num_bytes:
            raise OSError(f"{num_bytes:,} bytes are needed, {free:,} are free")
        place.parent.mkdir(parents=True, exist_ok=True)
        # Other users may read the temporary directory.
        place.mkdir(mode=0o777 if place.parent == self._run_dir else 0o700)
        for name, content in self._lease.known.items():
            (place / name).write_bytes(content)
        write_owner(place, self._run_dir)
        if base := self._state[2].get("base"):
            source = checkpoint_path(self._lease.directory, checkpoint_step(Path(base)))
            if is_remote(source):
                copy_tree(source, place / base)
            else:  # of all the weights; they may be large
                (place / base).symlink_to(source.absolute(), target_is_directory=True)

    def _write_record(self, place: Path) -> None:
        record = json.dumps({"directory": str(place), "step": self._step}) + "\n"
        with suppress(OSError):  # only messages need it; this disk may be the full one
            replace_text(self._run_dir / RECORD_FILE, record)

    def _delete_place(self) -> None:
        """Delete the state that was saved elsewhere: the checkpoint directory has it now."""
        place, self._place = self._place, None

        def delete() -> None:
            if place is not None:
                shutil.rmtree(place, ignore_errors=True)
            if (self._run_dir / RECORD_FILE).exists():
                (self._run_dir / RECORD_FILE).unlink()

        run_on_rank_0(delete, f"{self._run_dir}: {RECORD_FILE} cannot be deleted")

    def _count_bytes(self) -> int:
        """Return the bytes of the checkpoint, over all ranks; a collective."""
        total = torch.tensor(self._checkpoints.staged_bytes, dtype=torch.int64)
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.all_reduce(total)
        return int(total)

    def _describe_space(self) -> str:
        """Describe the bytes that the save needs, and those that are free; a collective."""
        directory, num_bytes = self._lease.directory, self._count_bytes()
        free = run_on_rank_0(lambda: free_bytes(directory), f"{directory}")
        known = "" if free is None else f", and {free:,} bytes are free"
        return f"The save needs {num_bytes:,} bytes in {directory}{known}"

    def _outcome(self) -> str:
        """Describe where the state is, or what is lost; a collective."""
        if self._place is not None:
            return describe_place(self._run_dir, self._place, self._step)
        directory = self._lease.directory
        try:
            paths = run_on_rank_0(
                lambda: list_checkpoints(directory), f"{directory}: could not be read"
            )
            lost = "There is no checkpoint, so all steps are lost"
            if paths:
                first = checkpoint_step(paths[-1]) + 1
                lost = f"Steps {first} to {self._step} are lost; the last checkpoint is {paths[-1]}"
        except CheckpointError as unreadable:
            lost = f"The steps since the last checkpoint are lost, and {unreadable}"
        return f"No other place can take the state: {'; '.join(self._refusals)}. {lost}"


def describe_place(run_dir: Path, place: Path, step: int) -> str:
    """Say where a state is saved and how to resume from it."""
    command = shlex.join(["weft", "train", str(run_dir), "--checkpoint.dir", str(place)])
    text = f"Step {step} is saved in {place}. To continue from it: {command}"
    if place.parent != run_dir:
        text += " (the directory may be deleted when the job or the node ends: copy it before)"
    return text


def read_place(run_dir: Path, home: Path, step: int) -> str:
    """Describe a state that was saved elsewhere, if it is newer than the checkpoints.

    Args:
        run_dir: the run directory.
        home: the directory of the run's checkpoints.
        step: step of its newest checkpoint; 0: none.

    Returns:
        Empty without such a state.
    """
    try:
        record = json.loads((run_dir / RECORD_FILE).read_text("utf-8"))
        place, saved = Path(record["directory"]), int(record["step"])
        if saved <= step or place == home or not checkpoint_path(place, saved).is_dir():
            return ""
    except (OSError, ValueError, KeyError, TypeError):
        return ""
    return describe_place(run_dir.absolute(), place, saved)


def free_bytes(directory: Path) -> int | None:
    """Return the free bytes of a directory, which need not exist; None: unknown."""
    if is_remote(directory):
        return None
    directory = directory.absolute()
    try:
        free = shutil.disk_usage(existing_parent(directory)).free
        if find_mount(directory).kind in ("tmpfs", "ramfs"):
            free = min(free, read_memory_sizes()["MemAvailable"])
    except (OSError, KeyError):
        return None
    return free


def copy_tree(source: Path, target: Path) -> None:
    """Copy the objects of a store below ``source`` into a directory."""
    for path in source.rglob("*"):
        if path.is_file():
            file = target / str(path)[len(str(source)) :].strip("/")
            file.parent.mkdir(parents=True, exist_ok=True)
            with path.open("rb") as reader, file.open("wb") as writer:
                shutil.copyfileobj(reader, writer)
