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

import math
import re
import shutil
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from weft.checkpoint.fingerprint import fingerprint, on_host, wrapped
from weft.checkpoint.local import keep_local, local_folder, read_local
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
    leases,
    manifest_text,
    own_rank,
    read_manifest,
    take,
)
from weft.checkpoint.shards import (
    Contents,
    Damaged,
    Json,
    Staged,
    Wanted,
    damaged_file,
    overlaps,
    parse_contents,
    read_shards,
    table_of_contents,
    write_shards,
)
from weft.checkpoint.state import (
    Copies,
    State,
    allocate_optimizer_state,
    copies_of,
    frozen_parameters,
    local_part,
    mark_of,
    model_state,
    optimizer_state,
    owns,
)
from weft.checkpoint.storage import create, is_remote, put_new, remove, sync_folder
from weft.parallel.init import shard_offsets
from weft.parallel.quantize import keep_numbers, numbers_of
from weft.resilience.faults import at

# Elements of the whole model that are read at a time in float32, to be rounded.
FROZEN_AT_ONCE = 1 << 28

# --------------------------------------------------------------------------- saving


class Saver:
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
            local: where this node keeps the newest state: see `weft.checkpoint.local`.
            say: told of failures.
        """
        self.folder, self.keep, self.background = folder, keep, background
        self.epoch = 0
        self.local: Path | None = None
        self._local = local
        self.stall_seconds = 0.0  # of the last save
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
        """
        began = time.perf_counter()
        self._join()
        self._tell()
        at("checkpoint")
        boxes, owned = self._stage(parts, optimizer)
        about = manifest | {"epoch": self.epoch}
        work = (boxes, owned, about, home)
        self._thread = threading.Thread(target=self._write, args=work, daemon=True)
        self._thread.start()
        if not self.background:
            self._join()
        self.stall_seconds = time.perf_counter() - began

    def wait(self) -> None:
        """Until the last save is done.

        Raises:
            CheckpointError: on every rank, whichever failed.  Nothing half-written stays behind.
        """
        self._join()
        if self._error is not None:
            raise self._error
        if self.local is not None:  # it is at home now
            shutil.rmtree(self.local, ignore_errors=True)

    def close(self) -> None:
        """Let a save that is under way come to its end, whatever that is."""
        self._join()

    def busy(self) -> bool:
        """Whether a save is under way."""
        return self._thread is not None and self._thread.is_alive()

    def wants_again(self) -> bool:
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
        untold, self._untold = self._untold, []
        for error in untold:
            if isinstance(error, Superseded):
                raise error
            self._say(f"warning: {error}; going on without it")
        return bool(untold)

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None

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
                    keep_local(self.local, boxes, owned, manifest, self._group)
                except CheckpointError as error:
                    untold.append(error)
            if home:
                mine = [box for box in boxes if box.name in owned]
                _write(self.folder, mine, manifest, self.keep, self._group)
        except CheckpointError as error:
            self._error = error
        except Exception as error:  # a peer is gone
            self._error = CheckpointError(f"step {manifest['step']}: {cause(error)}")
        self._failures = 0 if self._error is None else self._failures + 1
        self._untold = untold if self._error is None else [*untold, self._error]
        self.write_seconds = time.perf_counter() - began


def save(
    folder: Path, parts: Sequence[nn.Module], optimizer: Optimizer, manifest: Json, keep: int
) -> Path:
    """Save one checkpoint and wait for it; see `Saver`, whose errors it raises."""
    saver = Saver(folder, keep)
    saver.save(parts, optimizer, manifest)
    saver.wait()
    return checkpoint_path(folder, manifest["step"])


def _write(folder: Path, boxes: list[Staged], manifest: Json, keep: int, group: Any) -> None:
    """Every rank writes its boxes; rank 0 commits."""
    final = checkpoint_path(folder, manifest["step"])
    failed = f"{final}: could not be written"
    # One rank decides: another could already see what the first one does next.
    temporary = from_rank_0(lambda: _begin(final, manifest["epoch"]), failed, group)
    if temporary is None:
        return
    try:
        written = gathered(lambda: _write_shards(temporary, boxes), failed, group)

        def commit() -> None:
            table = table_of_contents(each for each in written if each is not None)
            inside = {"inside": temporary.name} if is_remote(final) else {}
            _commit(temporary, final, manifest | {"format": FORMAT} | inside | table)

        from_rank_0(commit, failed, group)
    except Exception:
        if own_rank() == 0:
            with suppress(OSError):
                remove(temporary)
        raise
    late = f"{final} is saved, but an older one could not be deleted"
    base = manifest.get("base")
    from_rank_0(lambda: _delete_old(folder, keep, base), late, group)
    at("checkpoint.saved")


def _begin(final: Path, epoch: int) -> Path | None:
    """A new folder to write into, None if the checkpoint is there already; clears what others left.

    Raises:
        Superseded: if somebody else has the run, whose unfinished checkpoint that may be.
    """
    home, unique = final.parent, uuid.uuid4().hex[:8]
    _look_at_leases(home, epoch)
    if (final / "manifest.json").is_file() and counts(final, leases(home)):
        return None
    if is_remote(final):
        for path in home.iterdir() if home.is_dir() else []:
            if NAME.fullmatch(path.name) and not any(p.is_file() for p in path.iterdir()):
                remove(path)
        return final / unique
    home.mkdir(parents=True, exist_ok=True)
    for leftover in home.glob(".tmp-*"):
        remove(leftover)
    temporary = final.with_name(f".tmp-{final.name}-{unique}")
    temporary.mkdir()
    return temporary


def _look_at_leases(home: Path, epoch: int) -> None:
    """Raise `Superseded` if a later epoch than this one has the run; an epoch of 0 is nobody's."""
    newest = max((taken for taken, _ in leases(home)), default=0)
    if newest > epoch > 0:
        said = (home / f"lease-{newest:06}.json").read_text("utf-8")
        raise Superseded(f"another process has taken over the run: {said}")


def _write_shards(temporary: Path, boxes: list[Staged]) -> Json | None:
    at("checkpoint.shards")
    if not boxes:
        return None
    name = f"shard-{own_rank():05}.bin"
    with create(temporary / name, sum(box.content.nbytes for box in boxes)) as file:
        written = write_shards(file, name, boxes)
        at("checkpoint.written")
    return written


def _commit(temporary: Path, final: Path, manifest: Json) -> None:
    """Make ``temporary`` visible as ``final``."""
    _look_at_leases(final.parent, manifest["epoch"])
    at("checkpoint.manifest")
    text = manifest_text(manifest).encode()
    if (final / "manifest.json").exists() or (final.exists() and not is_remote(final)):
        # Of an abandoned branch, or without a manifest: no checkpoint any more.
        set_aside(final, "abandoned")
    if is_remote(final):
        at("checkpoint.rename")
        put_new(final / "manifest.json", text)
        at("checkpoint.renamed")
        return
    with create(temporary / "manifest.json") as file:
        file.write(text)
    sync_folder(temporary)
    at("checkpoint.rename")
    temporary.rename(final)
    at("checkpoint.renamed")
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
        at("checkpoint.delete")
        if is_remote(old):
            (old / "manifest.json").unlink()
            hidden = old
        else:
            hidden = old.rename(old.with_name(f".tmp-{old.name}-deleted"))
        at("checkpoint.deleting")
        remove(hidden)


def set_aside(path: Path, why: str) -> None:
    """Rename a checkpoint that does not count, so that it is out of the way and not lost."""
    if is_remote(path):  # its manifest, without which it is none
        manifest = path / "manifest.json"
        put_new(path / f"manifest.{why}-{time.time_ns()}.json", manifest.read_bytes())
        manifest.unlink()
    else:
        path.rename(path.with_name(f"{why}-{path.name}-{time.time_ns()}"))


# --------------------------------------------------------------------------- loading


def load(path: Path, parts: Sequence[nn.Module], optimizer: Optimizer | None) -> Json:
    """Load ``path`` in place, into any layout; every rank of the process group calls it.

    Without an optimizer only the parameters are read.  Works without a process group, too.

    Returns:
        The manifest.

    Raises:
        DamagedCheckpoint: if it does not hold what was saved; the parameters are undefined then.
        CheckpointError: if it is of another model, or cannot be read.
    """
    at("load")
    manifest, contents = _open(path)
    folder = folder_of_shards(path, manifest)
    wrong = _fill(path, folder, contents, parts, optimizer, whole=True)
    _refuse(path, folder, contents, wrong)
    return manifest


def _open(path: Path) -> tuple[Json, Contents]:
    manifest = from_rank_0(lambda: read_manifest(path), f"{path}: could not be read")
    try:
        return manifest, parse_contents(manifest)  # every rank has the same one to judge
    except Damaged as error:
        raise DamagedCheckpoint(f"{path}: {error}") from error


def _refuse(path: Path, folder: Path, contents: Contents, wrong: list[str]) -> None:
    """Raise if any tensor is not what was saved."""
    if wrong:
        named = from_rank_0(lambda: damaged_file(folder, contents), f"{path}: could not be read")
        reason = named or f"{wrong[0]} is not what was saved, though its file is as it was written"
        raise DamagedCheckpoint(f"{path}: {reason}")


def load_frozen(path: Path, parts: Sequence[nn.Module]) -> None:
    """Load the parameters that are not trained from a checkpoint of the whole model.

    Every rank calls it.  Some tensors at a time are read in float32, compared with what was saved,
    and rounded to what they are kept in.

    Raises:
        DamagedCheckpoint, CheckpointError: as `load`.
    """
    manifest, contents = _open(path)
    folder = folder_of_shards(path, manifest)
    params = {f"model.{name}": param for name, param in frozen_parameters(parts)}

    def all_there() -> None:
        if missing := params.keys() - contents.tensors.keys():
            raise ValueError(f"it is of another model: {min(missing)} is not in it")

    _together(path, all_there)
    for names in _some_at_a_time(contents):
        some = contents._replace(tensors={name: contents.tensors[name] for name in names})
        state = {name: numbers_of(params[name]) for name in names if name in params}
        wrong = _fill_state(path, folder, some, state, copies_of(parts, state), whole=True)
        _refuse(path, folder, contents, wrong)
        for name, numbers in state.items():
            keep_numbers(params[name], numbers)


def _some_at_a_time(contents: Contents) -> Iterator[list[str]]:
    """The names of all tensors in groups of so many elements, the same on every rank."""
    names: list[str] = []
    elements = 0
    for name, entry in contents.tensors.items():
        if names and elements + math.prod(entry.shape) > FROZEN_AT_ONCE:
            yield names
            names, elements = [], 0
        names.append(name)
        elements += math.prod(entry.shape)
    if names:
        yield names


def load_local(
    folder: Path, step: int, epoch: int, parts: Sequence[nn.Module], optimizer: Optimizer
) -> Json:
    """`load` what the nodes have kept of a step.

    Raises:
        DamagedCheckpoint: also if they do not have all of it any more.
    """
    at("load")
    name = f"step {step} in {folder} of the nodes"
    found: list[tuple[Path, Json, Contents] | None] = []
    _together(name, lambda: found.append(read_local(folder, step, epoch)))
    everywhere = [found[0] is not None]
    if dist.is_initialized():
        everywhere *= dist.get_world_size()
        dist.all_gather_object(everywhere, found[0] is not None)
    if True not in everywhere:
        raise DamagedCheckpoint(f"{name}: no node has it any more")
    source = everywhere.index(True)
    manifest = from_rank_0(lambda: found[0][1] if found[0] else {}, name, source=source)
    place, contents = folder, parse_contents(manifest, whole=False).without_shards()
    if found[0] is not None:
        place, _, contents = found[0]
    wrong = _fill(name, place, contents, parts, optimizer, whole=False)
    if wrong:
        raise DamagedCheckpoint(f"{name}: {wrong[0]} is not what was saved")
    return manifest


def _fill(
    what: object,
    folder: Path,
    contents: Contents,
    parts: Sequence[nn.Module],
    optimizer: Optimizer | None,
    whole: bool,
) -> list[str]:
    """Load into live tensors, and compare.

    Args:
        whole: whether all of it is in ``folder``: then each part is read by one rank; else by all
            that find it there.

    Returns:
        The tensors that are not what was saved.
    """
    state: State = model_state(parts)
    if optimizer is not None:
        saved = {
            name: (torch.Size(entry.shape), entry.dtype) for name, entry in contents.tensors.items()
        }
        allocate_optimizer_state(parts, optimizer, saved)
        state |= optimizer_state(parts, optimizer)
    wrong = _fill_state(what, folder, contents, state, copies_of(parts, state), whole)
    if adopt := getattr(optimizer, "adopt", None):
        adopt()
    return wrong


def _fill_state(
    what: object,
    folder: Path,
    contents: Contents,
    state: State,
    copies: dict[str, list[Copies]],
    whole: bool,
) -> list[str]:
    """`_fill` of these tensors."""
    owned = {name for name in state if owns(name, copies[name])}
    marks: dict[str, int] = {}
    _together(what, lambda: _read(folder, contents, state, owned if whole else None, marks))
    _spread(state, copies, marks)

    def all_there() -> None:  # or a tensor of zeros would have the right fingerprint
        if missing := state.keys() - marks.keys():
            raise Damaged(f"{min(missing)} is not there any more, or not as a whole")

    _together(what, all_there)
    return _other_than(contents, state, copies, owned, marks)


def folder_of_shards(path: Path, manifest: Json) -> Path:
    """Where the files of a checkpoint lie: beside its manifest, or in a folder of their own."""
    inside = str(manifest.get("inside", ""))
    if inside and not re.fullmatch("[0-9a-f]{8}", inside):
        raise DamagedCheckpoint(f"{path}: a folder that is none: {inside!r}")
    return path / inside if inside else path


def _read(
    folder: Path, contents: Contents, state: State, names: set[str] | None, marks: dict[str, int]
) -> None:
    """Fill this rank's part of some tensors, and take the fingerprints of what is there then.

    Args:
        names: of those tensors; None: of all whose part is in the table.
    """
    wanted: dict[str, list[Wanted]] = {}
    problems = []
    for name, tensor in state.items():
        entry = contents.tensors.get(name)
        if entry is None:
            problems.append(f"{name} is not in it")
        elif entry.shape != tuple(tensor.shape):
            problems.append(f"{name} has shape {entry.shape} in it, not {tuple(tensor.shape)}")
        elif names is None or name in names:
            part = local_part(tensor)
            pieces = list(overlaps(entry, shard_offsets(tensor), part))
            if part.numel() == 0:
                marks[name] = 0
            elif sum(each.target.numel() for each in pieces) == part.numel():
                wanted[name] = pieces
    if problems:
        more = f"; and {len(problems) - 1} more" if len(problems) > 1 else ""
        raise ValueError(f"it is of another model: {problems[0]}{more}")

    def complete(name: str) -> None:  # of live memory, where it has just come from the disk
        marks[name] = int(mark_of(state[name]))

    read_shards(folder, contents, wanted, complete)


def _spread(state: State, copies: dict[str, list[Copies]], marks: dict[str, int]) -> None:
    """Send what one rank has to those that hold copies of it, along one axis after the other.

    Args:
        marks: fingerprints of what this rank has; those of what it got are added.
    """
    for depth in range(max((len(each) for each in copies.values()), default=0)):
        groups: dict[Any, list[str]] = {}
        for name, each in copies.items():
            if depth < len(each) and each[depth].size > 1:
                groups.setdefault(each[depth].group, []).append(name)
        for group, names in groups.items():
            have = torch.tensor([name in marks for name in names], dtype=torch.uint8)
            every = [torch.empty_like(have) for _ in range(dist.get_world_size(group))]
            dist.all_gather(every, have, group=group)
            for name, held in zip(names, torch.stack(every, 1).tolist(), strict=True):
                if not any(held) or all(held):
                    continue
                part = local_part(state[name])
                sent = part.contiguous()
                dist.broadcast(sent, group=group, group_src=held.index(1))
                if name not in marks:
                    if sent is not part:
                        part.copy_(sent)
                    marks[name] = int(mark_of(state[name]))


def _together(path: object, work: Callable[[], None]) -> None:
    """Do something on every rank; if it fails on any, all raise the same."""
    failure: tuple[str, str] | None = None
    try:
        work()
    except (Damaged, FileNotFoundError) as error:
        failure = "damaged", cause(error)
    except Exception as error:
        failure = "failed", cause(error)
    found = [failure]
    if dist.is_initialized():
        found = [None] * dist.get_world_size()
        dist.all_gather_object(found, failure)
    for rank, each in enumerate(found):
        if each is not None:
            kind, why = each
            error_kind = DamagedCheckpoint if kind == "damaged" else CheckpointError
            raise error_kind(f"{path}: could not be loaded: rank {rank}: {why}")


def _other_than(
    contents: Contents,
    state: State,
    copies: dict[str, list[Copies]],
    owned: set[str],
    marks: dict[str, int],
) -> list[str]:
    """The tensors of which a copy does not have the fingerprint that was saved."""
    # Of those that count once, of all copies, and how many there are: one is wrong, or others are.
    # What no rank loaded (the optimizer's, where only the model is wanted) is not judged.
    rows = []
    for name in contents.tensors:
        mark, many = marks.get(name, 0), math.prod(each.size for each in copies.get(name, ()))
        rows.append([mark * (name in owned), mark, name in state, many * (name in state)])
    sums = torch.tensor(rows).T.contiguous()
    if dist.is_initialized():
        dist.all_reduce(sums)
    wrong = []
    for (name, entry), once, each, ranks, held in zip(
        contents.tensors.items(), *sums.tolist(), strict=True
    ):
        every = wrapped(entry.fingerprint * (held // max(ranks, 1)))
        if ranks and (once, each) != (entry.fingerprint, every):
            wrong.append(name)
    return wrong
