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
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import torch.distributed as dist
import xxhash
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from weft.checkpoint.shard_files import Contents, Json, check_files, parse_contents
from weft.checkpoint.storage import Damaged, is_remote, put_new, read_regular
from weft.config.errors import WeftError

FORMAT = 3

T = TypeVar("T")

NAME = re.compile(r"step-([0-9]{8,20})")
_LEASE = re.compile(r"lease-([0-9]{6,20})\.json")

# More is not read: of the largest models on some thousand ranks a manifest takes some 100 MB.
MANIFEST_BYTES, LEASE_BYTES = 1 << 30, 1 << 16


class CheckpointError(WeftError):
    """A checkpoint could not be written or read; the message says which and why."""


class DamagedCheckpoint(CheckpointError):
    """What a checkpoint holds is not what was saved; every rank has the same error."""


class Superseded(CheckpointError):
    """Another process has taken over the run: this one must not go on."""


# --------------------------------------------------------------------------- schema

Count = Annotated[int, Field(ge=0, lt=1 << 53)]  # exact in any reader's JSON
Epoch = Annotated[int, Field(ge=0, lt=10**9)]
Short = Annotated[str, Field(max_length=4096)]
Values = Annotated[list[float], Field(max_length=100_000)]


class _Schema(BaseModel):
    """No type is converted into another, and no number is NaN or infinite."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False, extra="ignore")


class WatchState(_Schema):
    """State of the anomaly detector: see `weft.monitor.anomaly`."""

    loss: Values = []
    gradient_norm: Values = Field(default=[], validation_alias="gradient norm")
    in_a_row: Count = 0


class ManifestHeader(_Schema):
    """Everything in a manifest but the table of contents, which `parse_contents` checks."""

    format: Literal[3]
    hash: str = Field(pattern="^[0-9a-f]{32}$")
    step: Count
    samples: Count
    epoch: Epoch = 0
    watch: WatchState = WatchState()
    base: str = Field("", pattern="^(step-[0-9]{8,20})?$")
    inside: str = Field("", pattern="^([0-9a-f]{8})?$")
    data: Short | None = None
    imported: Short | None = None
    mesh: dict[Short, Count] = {}
    weft: Short = ""
    torch: Short = ""
    files: list[Any]
    tensors: dict[str, Any]


class LeaseContent(_Schema):
    """A lease: the step that its owner went on from, and whether anything was saved by then."""

    step: Count
    saved: bool = True


def checked(schema: type[_Schema], values: object) -> None:
    """Raise ValueError if ``values`` break a schema, with the field, its value and the rule."""
    try:
        schema.model_validate(values)
    except ValidationError as error:
        found = []
        for each in error.errors(include_url=False):
            field = ".".join(map(str, each["loc"]))
            value = f"{field} = {each['input']!r:.60}: " if field else ""
            found.append(value + each["msg"])
        more = f"; and {len(found) - 3} more" if len(found) > 3 else ""
        raise ValueError("; ".join(found[:3]) + more) from error


def parse_json(text: bytes) -> Any:
    """Return the JSON value in a text.

    Raises:
        ValueError: if there is none: also for NaN, infinity, and what is nested too deep.
    """

    def refuse(name: str) -> None:
        raise ValueError(f"{name} is not a JSON number")

    try:
        return json.loads(text.decode(), parse_constant=refuse)
    except RecursionError as error:
        raise ValueError("it is nested too deep") from error


# --------------------------------------------------------------------------- listing


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
        epoch = int(read_manifest(path).get("epoch", 0))
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
    return [(epoch, lease.step) for epoch, lease in _leases(folder)]


def resumed_step(folder: Path) -> int:
    """Return the step that the newest lease went on from, if anything was saved by then; else 0.

    So many steps the run must have: unless there is a checkpoint, they are lost.
    """
    return next((each.step * each.saved for _, each in _leases(folder)[::-1]), 0)


def _leases(folder: Path) -> list[tuple[int, LeaseContent]]:
    if not folder.is_dir():
        return []
    found = []
    for path in folder.iterdir():
        if match := _LEASE.fullmatch(path.name):
            try:
                content = parse_json(read_regular(path, LEASE_BYTES))
                checked(LeaseContent, content)
            except (OSError, ValueError, Damaged) as error:
                rule = f"is damaged ({error}): the step that the run was resumed from is unknown"
                remedy = "if no other process trains the run, remove the file"
                raise CheckpointError(f"{path}: {rule}; {remedy}") from error
            found.append((int(match[1]), LeaseContent(**content)))
    return sorted(found, key=lambda each: each[0])


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
    saved = bool(committed(folder))
    about = {"step": step, "saved": saved, "host": socket.gethostname(), "process": os.getpid()}
    content = json.dumps(about | {"time": time.time()}).encode()
    while True:
        epoch = 1 + max((epoch for epoch, _ in leases(folder)), default=0)
        try:
            put_new(lease_path(folder, epoch), content)
        except FileExistsError:
            continue  # somebody else was quicker: the later one has the run
        return epoch


def read_leases(folder: Path) -> dict[str, bytes]:
    """Return the content of every lease in ``folder``, by file name."""
    names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    return {
        name: read_regular(folder / name, LEASE_BYTES) for name in names if _LEASE.fullmatch(name)
    }


def hold_lease(folder: Path, epoch: int, known: Mapping[str, bytes]) -> str:
    """Check that the run is still this process's, and put its lease back if it was deleted.

    Without the lease nobody would notice when a second process takes the run.

    Args:
        epoch: of this process; 0: it has taken nothing, and nothing is checked.
        known: `read_leases` when it took the run.

    Returns:
        A warning if the lease was gone; else nothing.

    Raises:
        Superseded: if another process has taken the run, also where the leases were deleted.
    """
    if epoch == 0:
        return ""
    for later, content in sorted(read_leases(folder).items(), reverse=True):
        if known.get(later) != content:
            text = content.decode(errors="replace")
            raise Superseded(f"another process has taken over the run: {later}: {text}")
    if lease_path(folder, epoch).is_file():
        return ""
    there = folder.is_dir()
    if not is_remote(folder):
        folder.mkdir(parents=True, exist_ok=True)
    for name, content in sorted(known.items()):
        try:
            put_new(folder / name, content)
        except FileExistsError:
            if read_regular(folder / name, LEASE_BYTES) != content:
                raise Superseded(f"another process has taken over the run: {name}") from None
    what = "the run's lease in it was" if there else "it was"
    return (
        f"{folder}: {what} deleted while the run was training; it is made again with the lease, "
        "but checkpoints that were deleted are lost"
    )


def lease_path(folder: Path, epoch: int) -> Path:
    """Return where the lease of an epoch lies."""
    return folder / f"lease-{epoch:06}.json"


def read_manifest(path: Path) -> Json:
    """The manifest of a committed checkpoint.

    Raises:
        DamagedCheckpoint: if it is not there, or not, to the byte, what was written.
        CheckpointError: if it cannot be read, which says nothing of what was written.
    """
    try:
        manifest = parse_manifest(read_regular(path / "manifest.json", MANIFEST_BYTES))
        if path.name != checkpoint_path(path, manifest["step"]).name:
            raise ValueError(f"step = {manifest['step']}: the directory is named {path.name}")
        return manifest
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from error
    except (FileNotFoundError, NotADirectoryError) as error:
        reason = f"its manifest.json is not there: {error.strerror or error}"
        raise DamagedCheckpoint(f"{path}: {reason}") from error
    except (ValueError, Damaged) as error:
        raise DamagedCheckpoint(f"{path}: its manifest.json is damaged: {error}") from error
    except OSError as error:
        raise CheckpointError(f"{path}: its manifest cannot be read: {cause(error)}") from error


def parse_manifest(text: bytes) -> Json:
    """Return a manifest from its text.

    Raises:
        ValueError: if it is not, to the byte, what was written, or breaks `ManifestHeader`.
        CheckpointError: if it is sound, and of another format.
    """
    manifest = parse_json(text)
    if not isinstance(manifest, dict):
        raise ValueError("it is not a JSON object")
    own = {name: value for name, value in manifest.items() if name != "hash"}
    try:
        as_written = manifest_text(own).encode()
    except RecursionError as error:
        raise ValueError("it is nested too deep") from error
    if text != as_written:
        raise ValueError("its hash is another")
    found = manifest.get("format")
    if type(found) is int and 0 < found != FORMAT:
        raise CheckpointError(f"is of format {found}, not {FORMAT}")
    checked(ManifestHeader, manifest)
    step, samples = manifest["step"], manifest["samples"]
    # Each step consumes a sequence or more, however the batch has changed.
    if samples < step or (step == 0 and samples > 0):
        raise ValueError(f"samples = {samples}: step {step} cannot have consumed so many or few")
    return manifest


def manifest_text(manifest: Json) -> str:
    """A manifest as it is written: in one possible way, with its own hash."""

    def text(values: Json) -> str:
        return json.dumps(values, sort_keys=True, separators=(",", ":"), allow_nan=False)

    return text(manifest | {"hash": xxhash.xxh3_128_hexdigest(text(manifest).encode())}) + "\n"


def files_of(path: Path, manifest: Json, sizes: bool = True) -> tuple[Path, Contents]:
    """The folder of a checkpoint's files, its own or one inside of it, and what lies in them.

    Args:
        sizes: compare the files' sizes, too: a request for each.

    Raises:
        DamagedCheckpoint: if its manifest makes no sense, or a file is not as long as it says.
    """
    folder = path / manifest["inside"] if manifest.get("inside") else path
    try:
        if folder != path and not is_remote(folder) and folder.is_symlink():
            raise Damaged(f"{folder.name} is a symbolic link, not a directory")
        contents = parse_contents(manifest)
        if sizes:
            check_files(folder, contents)
    except Damaged as error:
        raise DamagedCheckpoint(f"{path}: {error}") from error
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {cause(error)}") from error
    return folder, contents


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
