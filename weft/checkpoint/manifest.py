"""Committed checkpoints, their manifests, and leases that fence old writers.

Every start of a run, and every rollback, acquires a lease: it writes ``lease-NNNNNN.json`` with the
step from which the run resumes.  Only one lease can have a number, its *epoch*.  A checkpoint
carries the epoch of its writer, and is current only if no later epoch resumed from an earlier
step.  A writer that was suspended or partitioned is therefore fenced: it can neither restore an
abandoned branch nor interfere, and the newest checkpoint is always current.
"""

from __future__ import annotations

import json
import os
import pickle
import re
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

import torch.distributed as dist
import xxhash
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from weft.checkpoint.safetensors import parse_json
from weft.checkpoint.shard_files import Contents, Json, parse_contents
from weft.config.errors import WeftError
from weft.config.storage import CorruptData, is_remote, put_if_absent, read_regular_file

FORMAT = 4

T = TypeVar("T")

STEP_NAME = re.compile(r"step-([0-9]{8,20})")
_LEASE_NAME = re.compile(r"lease-[0-9]{6,20}\.json")

# Size limits.  A manifest of the largest models on thousands of ranks takes about 100 MB.
MANIFEST_BYTES, LEASE_BYTES = 1 << 30, 1 << 16


class CheckpointError(WeftError):
    """A checkpoint could not be written or read; the message gives the reason."""


class DamagedCheckpoint(CheckpointError):
    """A checkpoint's contents differ from what was saved; raised on every rank."""


class LeaseLost(CheckpointError):
    """Another process has acquired the run's lease, so this process must stop."""


# --------------------------------------------------------------------------- schema

Count = Annotated[int, Field(ge=0, lt=1 << 53)]  # exact in any reader's JSON
Epoch = Annotated[int, Field(ge=0, lt=10**9)]
ShortText = Annotated[str, Field(max_length=4096)]
FloatList = Annotated[list[float], Field(max_length=100_000)]


class _Schema(BaseModel):
    """Strict schema: no type conversion, no NaN, no infinity."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False, extra="ignore")


class AnomalyState(_Schema):
    """State of the anomaly detector: see `weft.monitor.anomaly`."""

    loss: FloatList = []
    gradient_norm: FloatList = Field(default=[], validation_alias="gradient norm")
    in_a_row: Count = 0


class DivergenceState(_Schema):
    """State of the divergence detector: see `weft.monitor.anomaly`."""

    best: float | None = None
    newest: FloatList = []
    since: Count | None = None
    count: Count = 0
    records: Count = 0
    reported: bool = False


class EarlyStoppingState(_Schema):
    """State of early stopping: see `weft.training.early_stopping`."""

    metric: ShortText
    is_higher_better: bool
    best: float
    step: Count
    count: Count


class ManifestHeader(_Schema):
    """Manifest without the table of contents, which `parse_contents` checks."""

    format: Literal[4]
    hash: str = Field(pattern="^[0-9a-f]{32}$")
    step: Count
    samples: Count
    epoch: Epoch = 0
    anomaly_state: AnomalyState = AnomalyState()
    divergence_state: DivergenceState = DivergenceState()
    evaluation: dict[ShortText, float] = {}  # metrics of the validation set, if it was evaluated
    early_stopping: EarlyStoppingState | None = None
    base: str = Field("", pattern="^(step-[0-9]{8,20})?$")
    inside: str = Field("", pattern="^([0-9a-f]{8})?$")
    data: ShortText | None = None
    imported: ShortText | None = None
    frozen: list[ShortText] = []  # parameters without optimizer state
    mesh: dict[ShortText, Count] = {}
    run_files: dict[ShortText, ShortText] = {}  # see `weft.checkpoint.run_fingerprints`
    weft: ShortText = ""
    torch: ShortText = ""
    files: list[Any]
    tensors: dict[str, Any]


class LeaseContent(_Schema):
    """Lease: the step from which its owner resumed, and if a checkpoint existed then."""

    step: Count
    saved: bool = True


def validate_schema(schema: type[_Schema], values: object) -> None:
    """Validate ``values``.

    Raises:
        ValueError: with field, value and rule of up to three violations.
    """
    try:
        schema.model_validate(values)
    except ValidationError as error:
        problems = []
        for item in error.errors(include_url=False):
            field = ".".join(map(str, item["loc"]))
            value = f"{field} = {item['input']!r:.60}: " if field else ""
            problems.append(value + item["msg"])
        more = f"; and {len(problems) - 3} more" if len(problems) > 3 else ""
        raise ValueError("; ".join(problems[:3]) + more) from error


# --------------------------------------------------------------------------- listing


def checkpoint_path(directory: Path, step: int) -> Path:
    """Return the path of a step's checkpoint, which need not exist."""
    return directory / f"step-{step:08}"


def checkpoint_step(path: Path) -> int:
    """Return the step of a checkpoint, from its name."""
    return int(path.name.removeprefix("step-"))


def list_checkpoints(directory: Path) -> list[Path]:
    """Return the current checkpoints in ``directory``, oldest first.

    Only `weft.checkpoint.load` verifies their contents.  Abandoned branches are excluded.
    """
    leases = list_leases(directory)
    return [path for path in list_committed(directory) if is_current(path, leases)]


def list_committed(directory: Path) -> list[Path]:
    """Return all committed checkpoints in ``directory``, oldest first.

    Abandoned branches are included.
    """
    if not directory.is_dir():
        return []
    steps = [
        (int(match[1]), path)
        for path in directory.iterdir()
        if (match := STEP_NAME.fullmatch(path.name))
    ]
    if is_remote(directory):  # without a manifest it is not committed, or deleted
        steps = [(step, path) for step, path in steps if (path / "manifest.json").exists()]
    return [path for _, path in sorted(steps, key=lambda step_and_path: step_and_path[0])]


def is_current(path: Path, leases: list[tuple[int, int]]) -> bool:
    """Return True if no epoch after a checkpoint's own resumed from an earlier step."""
    if not leases:
        return True
    try:
        epoch = int(read_manifest(path).get("epoch", 0))
    except CheckpointError:
        return True  # loading it will raise the error
    return is_on_current_branch(checkpoint_step(path), epoch, leases)


def is_on_current_branch(step: int, epoch: int, leases: list[tuple[int, int]]) -> bool:
    """Return True if no epoch after ``epoch`` resumed from before ``step``."""
    return all(later <= epoch or resumed_from >= step for later, resumed_from in leases)


def list_leases(directory: Path) -> list[tuple[int, int]]:
    """Return (epoch, step from which it resumed) of every lease, oldest first.

    Raises:
        CheckpointError: if a lease cannot be read.
    """
    return [(epoch, lease.step) for epoch, lease in _read_lease_contents(directory)]


def resumed_step(directory: Path) -> int:
    """Return the step from which the newest lease resumed; 0 without a checkpoint.

    If no checkpoint of that step or a later one exists, these steps are lost.
    """
    return next((lease.step * lease.saved for _, lease in _read_lease_contents(directory)[::-1]), 0)


def _read_lease_contents(directory: Path) -> list[tuple[int, LeaseContent]]:
    leases = []
    for path in _list_lease_files(directory):
        try:
            content = parse_json(read_regular_file(path, LEASE_BYTES))
            validate_schema(LeaseContent, content)
        except (OSError, ValueError, CorruptData) as error:
            raise CheckpointError(
                f"{path}: the lease is damaged ({error}), so the step from which the run "
                "resumed is unknown; if no other process trains the run, remove the file"
            ) from error
        leases.append((int(path.stem.removeprefix("lease-")), LeaseContent(**content)))
    return sorted(leases, key=lambda epoch_and_lease: epoch_and_lease[0])


def _list_lease_files(directory: Path) -> list[Path]:
    paths = directory.iterdir() if directory.is_dir() else []
    return [path for path in paths if _LEASE_NAME.fullmatch(path.name)]


def acquire_lease(directory: Path, step: int) -> int:
    """Acquire the run's lease at ``step``, which fences all earlier owners.

    Checkpoints that they write later are not current.  Every rank calls this function.

    Returns:
        The epoch.
    """
    return run_on_rank_0(
        lambda: _acquire_lease(directory, step), f"{directory}: the lease could not be acquired"
    )


def _acquire_lease(directory: Path, step: int) -> int:
    if not is_remote(directory):
        directory.mkdir(parents=True, exist_ok=True)
    has_checkpoint = bool(list_committed(directory))
    lease = {
        "step": step,
        "saved": has_checkpoint,
        "host": socket.gethostname(),
        "process": os.getpid(),
    }
    content = json.dumps(lease | {"time": time.time()}).encode()
    while True:
        epoch = 1 + max((epoch for epoch, _ in list_leases(directory)), default=0)
        try:
            put_if_absent(lease_path(directory, epoch), content)
        except FileExistsError:
            continue  # another process was faster; the later lease wins
        return epoch


def read_leases(directory: Path) -> dict[str, bytes]:
    """Return the content of every lease in ``directory``, by file name."""
    return {
        path.name: read_regular_file(path, LEASE_BYTES) for path in _list_lease_files(directory)
    }


class Lease(NamedTuple):
    """Right of this process to write the checkpoints in a directory.

    Attributes:
        directory: directory of the checkpoints.
        epoch: epoch of this process; 0: it has no lease, and nothing is checked.
        known: result of `read_leases` when the lease was acquired.
    """

    directory: Path
    epoch: int = 0
    known: Mapping[str, bytes] = {}

    def hold(self) -> str:
        """Check that this process still owns the lease; restore it if it was deleted.

        Without the lease file, no process would notice a second owner.

        Returns:
            A warning if the lease was deleted, else "".

        Raises:
            LeaseLost: if another process has acquired the lease, even if leases were deleted.
        """
        if self.epoch == 0:
            return ""
        directory = self.directory
        for name, content in sorted(read_leases(directory).items(), reverse=True):
            if self.known.get(name) != content:
                text = content.decode(errors="replace")
                raise LeaseLost(f"another process has acquired the run's lease: {name}: {text}")
        if lease_path(directory, self.epoch).is_file():
            return ""
        directory_exists = directory.is_dir()
        if not is_remote(directory):
            directory.mkdir(parents=True, exist_ok=True)
        for name, content in sorted(self.known.items()):
            try:
                put_if_absent(directory / name, content)
            except FileExistsError:
                if read_regular_file(directory / name, LEASE_BYTES) != content:
                    raise LeaseLost(
                        f"another process has acquired the run's lease: {name}"
                    ) from None
        deleted = "the run's lease in it was" if directory_exists else "the directory was"
        return (
            f"{directory}: {deleted} deleted while the run was training; weft restored the lease, "
            "but deleted checkpoints are lost"
        )


def lease_path(directory: Path, epoch: int) -> Path:
    """Return the path of an epoch's lease."""
    return directory / f"lease-{epoch:06}.json"


def read_manifest(path: Path) -> Json:
    """Read the manifest of a committed checkpoint.

    Raises:
        DamagedCheckpoint: if it does not exist, or differs from what was written.
        CheckpointError: if it cannot be read, so its state is unknown.
    """
    try:
        manifest = parse_manifest(read_regular_file(path / "manifest.json", MANIFEST_BYTES))
        if path.name != checkpoint_path(path, manifest["step"]).name:
            raise ValueError(f"step = {manifest['step']}, but the directory is named {path.name}")
        return manifest
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from error
    except (FileNotFoundError, NotADirectoryError) as error:
        reason = f"manifest.json is missing: {error.strerror or error}"
        raise DamagedCheckpoint(f"{path}: {reason}") from error
    except (ValueError, CorruptData) as error:
        raise DamagedCheckpoint(f"{path}: manifest.json is damaged: {error}") from error
    except OSError as error:
        raise CheckpointError(
            f"{path}: manifest.json cannot be read: {format_error(error)}"
        ) from error


def parse_manifest(text: bytes) -> Json:
    """Parse a manifest and verify its hash.

    Raises:
        ValueError: if it differs from what was written, or violates `ManifestHeader`.
        CorruptData: if it is not a JSON object.
        CheckpointError: if it is intact but has another format.
    """
    manifest = parse_json(text)
    without_hash = {name: value for name, value in manifest.items() if name != "hash"}
    try:
        canonical = manifest_text(without_hash).encode()
        pickle.dumps(manifest)  # as rank 0 sends it to the others
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    if text != canonical:
        raise ValueError("its hash does not match")
    format_number = manifest.get("format")
    if type(format_number) is int and 0 < format_number != FORMAT:
        raise CheckpointError(
            f"the format is {format_number}, not {FORMAT}: another version of weft wrote it"
        )
    validate_schema(ManifestHeader, manifest)
    step, samples = manifest["step"], manifest["samples"]
    # Each step consumes at least one sequence, even if the batch size changed.
    if samples < step or (step == 0 and samples > 0):
        raise ValueError(f"samples = {samples} is impossible at step {step}")
    return manifest


def manifest_text(manifest: Json) -> str:
    """Format a manifest with its own hash; the text is canonical."""

    def dump(values: Json) -> str:
        return json.dumps(values, sort_keys=True, separators=(",", ":"), allow_nan=False)

    return dump(manifest | {"hash": xxhash.xxh3_128_hexdigest(dump(manifest).encode())}) + "\n"


def open_contents(path: Path, manifest: Json) -> Contents:
    """Return the table of contents of a checkpoint.

    Raises:
        DamagedCheckpoint: if the manifest is invalid.
        CheckpointError: if the directory cannot be read.
    """
    with checkpoint_errors(path):
        inside = manifest.get("inside")
        if inside and not is_remote(path) and (path / inside).is_symlink():
            raise CorruptData(f"{inside} is a symbolic link, not a directory")
        return parse_contents(manifest, path)


@contextmanager
def checkpoint_errors(path: Path) -> Iterator[None]:
    """Convert errors of reading a checkpoint's files.

    Raises:
        DamagedCheckpoint: instead of CorruptData.
        CheckpointError: instead of OSError.
    """
    try:
        yield
    except CorruptData as error:
        raise DamagedCheckpoint(f"{path}: {error}") from error
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {format_error(error)}") from error


# --------------------------------------------------------------------------- collectives


def format_error(error: BaseException) -> str:
    """Format an error's type and message in a line."""
    return f"{type(error).__name__}: {error}"


def get_rank() -> int:
    """Return this process's rank; 0 without a process group."""
    return dist.get_rank() if dist.is_initialized() else 0


def run_on_rank_0(compute: Callable[[], T], context: str, group: Any = None, *, rank: int = 0) -> T:
    """Run ``compute`` on rank 0 and broadcast its result, or its error, to all ranks.

    Args:
        compute: function without arguments.
        context: prefix of an error's message.
        group: process group; None: all ranks.
        rank: rank that runs ``compute``.

    Raises:
        CheckpointError: on every rank, if ``compute`` raised an exception.
    """
    outcome: list[Any] = [None, None]
    if get_rank() == rank:
        try:
            outcome[0] = compute()
        except CheckpointError as error:
            outcome[1] = error
        except Exception as error:
            outcome[1] = CheckpointError(f"{context}: {format_error(error)}")
    if dist.is_initialized():
        dist.broadcast_object_list(outcome, src=rank, group=group)
    result, failure = outcome
    if failure is not None:
        raise failure
    return result  # type: ignore[no-any-return]


def gather_to_rank_0(work: Callable[[], T], context: str, group: Any = None) -> list[T]:
    """Run ``work`` on every rank and gather the results, by rank, on rank 0.

    Args:
        work: function without arguments.
        context: prefix of an error's message.
        group: process group; None: all ranks.

    Raises:
        DamagedCheckpoint: on every rank, if the first error was `CorruptData`.
        CheckpointError: on every rank, if any rank failed.
    """
    outcome: tuple[Any, CheckpointError | None]
    try:
        outcome = work(), None
    except Exception as error:
        error_type = DamagedCheckpoint if isinstance(error, CorruptData) else CheckpointError
        outcome = None, error_type(f"{context}: rank {get_rank()}: {format_error(error)}")
    outcomes: list[Any] = [outcome]
    if dist.is_initialized():
        outcomes = outcomes * dist.get_world_size(group)
        dist.gather_object(outcome, outcomes if get_rank() == 0 else None, group=group, group_dst=0)

    def raise_first() -> None:
        for _, error in outcomes:
            if error is not None:
                raise error

    run_on_rank_0(raise_first, context, group)
    return [value for value, _ in outcomes]
