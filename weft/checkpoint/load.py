"""Checkpoints into live tensors of whatever layout, compared with what was saved.

Every rank works out which boxes of which shards it needs.  Of what several ranks hold copies of,
one reads, and sends it to the others.  Of what lies on the nodes each reads what it finds there,
and gets from others what its node has lost.  Then fingerprints are taken of live memory and added
up over the ranks: all come to the same verdict.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from weft.checkpoint.fingerprint import wrapped
from weft.checkpoint.local_save import read_local
from weft.checkpoint.manifest import (
    DamagedCheckpoint,
    files_of,
    from_rank_0,
    gathered,
    read_manifest,
)
from weft.checkpoint.shard_files import (
    Contents,
    Json,
    Wanted,
    consecutive,
    damaged_file,
    overlaps,
    parse_contents,
    read_shards,
)
from weft.checkpoint.state_dict import (
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
    widen,
)
from weft.checkpoint.storage import Damaged
from weft.monitor.faults import fault_point
from weft.parallel.dtensor import shard_offsets
from weft.parallel.quantize import store_float32, float32_buffer

# Dtypes of what optimizers keep, of different sizes: one cannot pass for another.
OPTIMIZER_DTYPES = (torch.float32, torch.bfloat16, torch.float64)

# Elements of the whole model that are read at a time in float32, to be rounded.
FROZEN_AT_ONCE = 1 << 28


def load(path: Path, parts: Sequence[nn.Module], optimizer: Optimizer | None) -> Json:
    """Load ``path`` in place, into any layout; every rank of the process group calls it.

    Without an optimizer only the parameters are read.  Works without a process group, too.

    Returns:
        The manifest.

    Raises:
        DamagedCheckpoint: if it does not hold what was saved; the parameters are undefined then.
        CheckpointError: if it is of another model, or cannot be read.
    """
    fault_point("load")
    manifest = _manifest_of(path)
    folder, contents = files_of(path, manifest, sizes=False)
    wrong = _fill(f"{path}: could not be loaded", folder, contents, parts, optimizer, whole=True)
    _refuse(path, folder, contents, wrong)
    return manifest


def _manifest_of(path: Path) -> Json:
    def read() -> Json:
        manifest = read_manifest(path)
        files_of(path, manifest)  # their sizes, by one rank
        return manifest

    return from_rank_0(read, f"{path}: could not be read")


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
    folder, contents = files_of(path, _manifest_of(path), sizes=False)
    failed = f"{path}: could not be loaded"
    params = {f"model.{name}": param for name, param in frozen_parameters(parts)}

    def all_there() -> None:
        if missing := params.keys() - contents.tensors.keys():
            raise ValueError(f"it is of another model: {min(missing)} is not in it")

    gathered(all_there, failed)
    sizes = {name: math.prod(entry.shape) for name, entry in contents.tensors.items()}
    for names in consecutive(sizes, FROZEN_AT_ONCE):  # the same on every rank
        some = contents._replace(tensors={name: contents.tensors[name] for name in names})
        state = {name: float32_buffer(params[name]) for name in names if name in params}
        wrong = _fill_state(failed, folder, some, parts, state, whole=True)
        _refuse(path, folder, contents, wrong)
        for name, numbers in state.items():
            store_float32(params[name], numbers)


def load_local(
    folder: Path, step: int, epoch: int, parts: Sequence[nn.Module], optimizer: Optimizer
) -> Json:
    """`load` what the nodes have kept of a step.

    Raises:
        DamagedCheckpoint: also if they do not have all of it any more.
    """
    fault_point("load")
    name = f"step {step} in {folder} of the nodes"
    failed = f"{name}: could not be loaded"
    found: list[tuple[Path, Json, Contents] | None] = []
    gathered(lambda: found.append(read_local(folder, step, epoch)), failed)
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
    wrong = _fill(failed, place, contents, parts, optimizer, whole=False)
    if wrong:
        raise DamagedCheckpoint(f"{name}: {wrong[0]} is not what was saved")
    return manifest


def _fill(
    failed: str,
    folder: Path,
    contents: Contents,
    parts: Sequence[nn.Module],
    optimizer: Optimizer | None,
    whole: bool,
) -> list[str]:
    """Load into live tensors, and compare.

    Args:
        failed: what an error means, for people.
        whole: whether all of it is in ``folder``: then each part is read by one rank; else by all
            that find it there.

    Returns:
        The tensors that are not what was saved.
    """
    state: State = model_state(parts)
    if optimizer is not None:
        for name, entry in contents.tensors.items():
            # Their bits would be taken for other numbers: this memory is made as the table says.
            if name.startswith("optim.") and entry.dtype not in OPTIMIZER_DTYPES:
                raise DamagedCheckpoint(f"{failed}: {name} is of dtype {entry.dtype}")
        saved = {
            name: (torch.Size(entry.shape), entry.dtype) for name, entry in contents.tensors.items()
        }
        allocate_optimizer_state(parts, optimizer, saved)
        state |= optimizer_state(parts, optimizer)
    wrong = _fill_state(failed, folder, contents, parts, state, whole)
    if adopt := getattr(optimizer, "adopt", None):
        adopt()
    elif optimizer is not None:
        widen(optimizer)
    return wrong


def _fill_state(
    failed: str,
    folder: Path,
    contents: Contents,
    parts: Sequence[nn.Module],
    state: State,
    whole: bool,
) -> list[str]:
    """`_fill` of these tensors."""
    copies = copies_of(parts, state)
    owned = {name for name in state if owns(name, copies[name])}
    marks: dict[str, int] = {}
    names = owned if whole else None
    gathered(lambda: _read(folder, contents, state, names, marks), failed)
    _spread(state, copies, marks)

    def all_there() -> None:  # or a tensor of zeros would have the right fingerprint
        if missing := state.keys() - marks.keys():
            raise Damaged(f"{min(missing)} is not there any more, or not as a whole")

    gathered(all_there, failed)
    return _other_than(contents, state, copies, owned, marks)


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
