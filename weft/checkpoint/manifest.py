"""What checkpoints of a run there are, and which of them count.

Every start of a run, and every return to an earlier step, takes the run anew: it writes
``lease-NNNNNN.json``, of which there can be only one of a number (its *epoch*), with the step that
it goes on from.  A checkpoint carries the epoch of its writer, and counts only if no later epoch
went on from an earlier step.  So a writer that has lost the run, asleep or cut off until then, can
neither bring back an abandoned branch nor come between; and the newest is never of one.
"""

from __future__ import annotations

import json
import os
import re
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist
import xxhash

from weft.checkpoint.shards import Contents, Damaged, Json, parse_contents
from weft.checkpoint.storage import is_remote, put_new
from weft.job import WeftError

FORMAT = 3

T = TypeVar("T")

NAME = re.compile(r"step-(\d{8,})")
_LEASE = re.compile(r"lease-(\d{6,})\.json")


class CheckpointError(WeftError):
    """A checkpoint could not be written or read; the message says which and why."""


class DamagedCheckpoint(CheckpointError):
    """What a checkpoint holds is not what was saved; every rank has the same error."""


class Superseded(CheckpointError):
    """Another process has taken over the run: this one must not go on."""


def checkpoint_path(folder: Path, step: int) -> Path:
    """Where the checkpoint of a step lies, or will."""
    return folder / f"step-{step:08}"


def checkpoint_step(path: Path) -> int:
    """The step of a checkpoint, from its name."""
    return int(path.name.removeprefix("step-"))


def checkpoints(folder: Path) -> list[Path]:
    """Committed checkpoints in ``folder``, oldest first; whether they are sound `load` tells.

    Those of an abandoned branch are not among them.
    """
    taken = leases(folder)
    return [path for path in committed(folder) if counts(path, taken)]


def committed(folder: Path) -> list[Path]:
    """Committed checkpoints in ``folder``, oldest first, those of abandoned branches, too."""
    if not folder.is_dir():
        return []
    found = [
        (int(match[1]), path) for path in folder.iterdir() if (match := NAME.fullmatch(path.name))
    ]
    if is_remote(folder):  # without a manifest it is not there yet, or no more
        found = [(step, path) for step, path in found if (path / "manifest.json").exists()]
    return [path for _, path in sorted(found, key=lambda each: each[0])]


def counts(path: Path, taken: list[tuple[int, int]]) -> bool:
    """Whether no later epoch than a checkpoint's own went on from an earlier step."""
    if not taken:
        return True
    try:
        epoch = read_manifest(path).get("epoch", 0)
    except CheckpointError:
        return True  # whoever loads it will hear of it
    return continues(checkpoint_step(path), epoch, taken)


def continues(step: int, epoch: int, taken: list[tuple[int, int]]) -> bool:
    """Whether no epoch after ``epoch`` went on from before ``step``."""
    return all(later <= epoch or begin >= step for later, begin in taken)


def leases(folder: Path) -> list[tuple[int, int]]:
    """(epoch, step that it went on from) of everybody who took the run, oldest first.

    Raises:
        CheckpointError: if one cannot be read.
    """
    if not folder.is_dir():
        return []
    found = []
    for path in folder.iterdir():
        if match := _LEASE.fullmatch(path.name):
            try:
                found.append((int(match[1]), int(json.loads(path.read_text("utf-8"))["step"])))
            except (OSError, ValueError, KeyError, TypeError) as error:
                rule = "is damaged: from which step the run was gone on with cannot be told"
                remedy = "if no other process trains it, remove the file"
                raise CheckpointError(f"{path}: {rule}; {remedy}") from error
    return sorted(found)


def take(folder: Path, step: int) -> int:
    """Go on from ``step`` as the only one: later checkpoints of others do not count any more.

    Every rank calls it.

    Returns:
        The epoch.
    """
    return from_rank_0(lambda: _take(folder, step), f"{folder}: could not be taken")


def _take(folder: Path, step: int) -> int:
    if not is_remote(folder):
        folder.mkdir(parents=True, exist_ok=True)
    about = {"step": step, "host": socket.gethostname(), "process": os.getpid()}
    content = json.dumps(about | {"time": time.time()}).encode()
    while True:
        epoch = 1 + max((epoch for epoch, _ in leases(folder)), default=0)
        try:
            put_new(folder / f"lease-{epoch:06}.json", content)
        except FileExistsError:
            continue  # somebody else was quicker: the later one has the run
        return epoch


def read_manifest(path: Path) -> Json:
    """The manifest of a committed checkpoint.

    Raises:
        DamagedCheckpoint: if it is not there, or not, to the byte, what was written.
        CheckpointError: if it cannot be read, which says nothing of what was written.
    """
    try:
        return parse_manifest((path / "manifest.json").read_text("utf-8"))
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from error
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError, ValueError) as error:
        reason = f"its manifest is damaged: {cause(error)}"
        raise DamagedCheckpoint(f"{path}: {reason}") from error
    except OSError as error:
        raise CheckpointError(f"{path}: its manifest cannot be read: {cause(error)}") from error


def parse_manifest(text: str) -> Json:
    """A manifest from its text.

    Raises:
        ValueError: if it is not, to the byte, what was written.
        CheckpointError: if it is of another format.
    """
    try:
        manifest: Json = json.loads(text)
        if manifest.get("format") != FORMAT:
            raise CheckpointError(f"is of format {manifest.get('format')}, not {FORMAT}")
        if text != manifest_text({name: v for name, v in manifest.items() if name != "hash"}):
            raise ValueError("its hash is another")
    except (TypeError, AttributeError, RecursionError) as error:
        raise ValueError(cause(error)) from error
    return manifest


def manifest_text(manifest: Json) -> str:
    """A manifest as it is written: in one possible way, with its own hash."""

    def text(values: Json) -> str:
        return json.dumps(values, sort_keys=True, separators=(",", ":"))

    return text(manifest | {"hash": xxhash.xxh3_128_hexdigest(text(manifest).encode())}) + "\n"


def files_of(path: Path, manifest: Json) -> tuple[Path, Contents]:
    """The folder of a checkpoint's files, its own or one inside of it, and what lies in them.

    Raises:
        DamagedCheckpoint: if its manifest makes no sense.
    """
    inside = str(manifest.get("inside", ""))
    try:
        if inside and not re.fullmatch("[0-9a-f]{8}", inside):
            raise Damaged(f"a folder that is none: {inside!r}")
        return path / inside if inside else path, parse_contents(manifest)
    except Damaged as error:
        raise DamagedCheckpoint(f"{path}: {error}") from error


# --------------------------------------------------------------------------- one for all


def cause(error: BaseException) -> str:
    """What an error is and says, in a line."""
    return f"{type(error).__name__}: {error}"


def own_rank() -> int:
    """This process's rank; 0 without a process group."""
    return dist.get_rank() if dist.is_initialized() else 0


def from_rank_0(compute: Callable[[], T], failed: str, group: Any = None, *, source: int = 0) -> T:
    """What ``compute()`` returns on rank 0, on every rank; so with its error.

    Args:
        failed: what an error means, for people.
        source: another rank in the place of rank 0.

    Raises:
        CheckpointError: on every rank, if ``compute`` raised anything: that, or in the words of
            ``failed``.
    """
    answer: list[Any] = [None, None]
    if own_rank() == source:
        try:
            answer[0] = compute()
        except CheckpointError as error:
            answer[1] = error
        except Exception as error:
            answer[1] = CheckpointError(f"{failed}: {cause(error)}")
    if dist.is_initialized():
        dist.broadcast_object_list(answer, src=source, group=group)
    result, failure = answer
    if failure is not None:
        raise failure
    return result  # type: ignore[no-any-return]


def gathered(work: Callable[[], T], failed: str, group: Any = None) -> list[T]:
    """Do something on every rank; what came of it, in the order of the ranks, on rank 0.

    Args:
        failed: what an error means, for people.

    Raises:
        DamagedCheckpoint, CheckpointError: on every rank, if any failed: the first one's error,
            and whether that was `Damaged`.
    """
    mine: tuple[Any, CheckpointError | None]
    try:
        mine = work(), None
    except Exception as error:
        kind = DamagedCheckpoint if isinstance(error, Damaged) else CheckpointError
        mine = None, kind(f"{failed}: rank {own_rank()}: {cause(error)}")
    ranks: list[Any] = [mine]
    if dist.is_initialized():
        ranks = ranks * dist.get_world_size(group)
        dist.gather_object(mine, ranks if own_rank() == 0 else None, group=group, group_dst=0)

    def all_right() -> None:
        for _, error in ranks:
            if error is not None:
                raise error

    from_rank_0(all_right, failed, group)
    return [value for value, _ in ranks]
