"""Load checkpoints into live tensors of any layout, and verify them.

Every rank computes the shards that it needs.  Of several replicas, one rank reads and broadcasts.
For local checkpoints, each rank reads its node's files and receives what its node has lost.  Then
the fingerprints of live memory are computed and summed over ranks, so all ranks reach the same
verdict.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from weft.checkpoint.fingerprint import gather_numbers, local_fingerprint, wrap_int64
from weft.checkpoint.local_save import local_step_dir, read_local
from weft.checkpoint.manifest import (
    DamagedCheckpoint,
    gather_to_rank_0,
    get_rank,
    open_contents,
    read_manifest,
    run_on_rank_0,
)
from weft.checkpoint.shard_files import (
    Contents,
    Json,
    ShardRead,
    check_files,
    find_damaged_file,
    find_overlaps,
    group_by_size,
    parse_contents,
    read_shards,
)
from weft.checkpoint.state_dict import (
    ReplicaAxis,
    StateDict,
    allocate_optimizer_state,
    find_replica_axes,
    frozen_parameters,
    is_owner,
    local_values,
    model_state,
    optimizer_state,
    persistent_buffers,
    trainable_parameters,
    upcast_moments,
)
from weft.config.storage import CorruptData
from weft.monitor.faults import fault_point
from weft.monitor.step_timer import enter_phase
from weft.optim.weight_average import averaged_name
from weft.parallel.dtensor import shard_offsets
from weft.parallel.initialization import float32_buffer, store_float32
from weft.parallel.private import to_group_device

# Dtypes of optimizer state.  Their sizes differ, so none can be mistaken for another.
OPTIMIZER_DTYPES = (torch.float32, torch.bfloat16, torch.float64)

# Elements that are read at a time in float32 before rounding.
FROZEN_CHUNK = 1 << 28


def load_checkpoint(
    path: Path, model_parts: Sequence[nn.Module], optimizer: Optimizer | None
) -> Json:
    """Load ``path`` in place, into any layout; every rank calls this function.

    Works without a process group too.

    Args:
        path: committed checkpoint.
        model_parts: this rank's parts of the model.
        optimizer: None: load only the parameters, as their average if there is one.

    Returns:
        The manifest.

    Raises:
        DamagedCheckpoint: if the contents differ from what was saved; parameters are then
            undefined.
        CheckpointError: if the checkpoint is of another model or cannot be read.
    """
    enter_phase("load")
    fault_point("load")
    manifest, contents = _open_checkpoint(path)
    frozen = manifest.get("frozen", [])
    mismatches = _load_tensors(contents, model_parts, optimizer, frozen, is_complete=True)
    _raise_if_damaged(contents, mismatches)
    return manifest


def _open_checkpoint(path: Path) -> tuple[Json, Contents]:
    """Read a manifest on rank 0, and check the files on all ranks."""
    context = f"{path}: could not be read"
    manifest = run_on_rank_0(lambda: read_manifest(path), context)
    contents = open_contents(path, manifest)
    num_ranks = dist.get_world_size() if dist.is_initialized() else 1
    gather_to_rank_0(lambda: check_files(contents, get_rank(), num_ranks), context)
    return manifest, contents


def _raise_if_damaged(contents: Contents, mismatches: list[str]) -> None:
    """Raise DamagedCheckpoint if any tensor differs from what was saved."""
    if mismatches:
        path = contents.path
        file_problem = run_on_rank_0(
            lambda: find_damaged_file(contents), f"{path}: could not be read"
        )
        reason = (
            file_problem or f"{mismatches[0]} differs from what was saved, but its file is intact"
        )
        raise DamagedCheckpoint(f"{path}: {reason}")


def load_frozen_params(path: Path, model_parts: Sequence[nn.Module]) -> None:
    """Load all but adapters from a checkpoint of the full model.

    Those are frozen parameters, tables that are trained in full, and buffers.

    Every rank calls this function.  Groups of tensors are read in float32, verified, and rounded to
    their dtype.

    Raises:
        DamagedCheckpoint: as in `load_checkpoint`.
        CheckpointError: as in `load_checkpoint`.
    """
    _, contents = _open_checkpoint(path)
    # Tables that are trained in full begin as those of the checkpoint; adapters are not in it.
    trained = dict(trainable_parameters(model_parts))
    adapters = {name for name in trained if ".lora_" in name}
    saved = [
        (name, tensor)
        for name, tensor in trained.items()
        if adapters and name not in adapters and f"model.{name}" in contents.tensors
    ]
    tensors = chain(frozen_parameters(model_parts), saved, persistent_buffers(model_parts))
    params: StateDict = {f"model.{name}": tensor for name, tensor in tensors}

    def check_names() -> None:
        if missing := params.keys() - contents.tensors.keys():
            raise ValueError(f"the checkpoint is of another model: it lacks {min(missing)}")

    _run_on_all(contents, check_names)
    sizes = {name: math.prod(entry.shape) for name, entry in contents.tensors.items()}
    for names in group_by_size(sizes, FROZEN_CHUNK):  # the same on every rank
        subset = contents._replace(tensors={name: contents.tensors[name] for name in names})
        state = {name: float32_buffer(params[name]) for name in names if name in params}
        mismatches = _load_state(subset, model_parts, state, is_complete=True)
        _raise_if_damaged(contents, mismatches)
        for name, values in state.items():
            store_float32(params[name], values)


def load_local_checkpoint(
    run_dir: Path, step: int, epoch: int, model_parts: Sequence[nn.Module], optimizer: Optimizer
) -> Json:
    """Load a local checkpoint as `load_checkpoint` does.

    Raises:
        DamagedCheckpoint: also if the nodes have lost a part of it.
    """
    enter_phase("load")
    fault_point("load")
    step_dir = local_step_dir(run_dir, step, epoch)
    found: list[tuple[Json, Contents] | None] = []
    context = f"{step_dir}: could not be loaded"
    gather_to_rank_0(lambda: found.append(read_local(step_dir)), context)
    (local_files,) = found
    has_local = [local_files is not None]
    if dist.is_initialized():
        has_local *= dist.get_world_size()
        dist.all_gather_object(has_local, local_files is not None)
    if True not in has_local:
        raise DamagedCheckpoint(f"{step_dir}: no node has it")
    source = has_local.index(True)
    manifest = run_on_rank_0(lambda: local_files[0] if local_files else {}, context, rank=source)
    if local_files is not None:
        _, contents = local_files
    else:  # this node has lost all shards
        tensors = parse_contents(manifest, step_dir, require_all_shards=False).tensors
        empty = {name: entry._replace(shards=[]) for name, entry in tensors.items()}
        contents = Contents(step_dir, empty, {})
    frozen = manifest.get("frozen", [])
    mismatches = _load_tensors(contents, model_parts, optimizer, frozen, is_complete=False)
    if mismatches:
        raise DamagedCheckpoint(f"{step_dir}: {mismatches[0]} differs from what was saved")
    return manifest


def _load_tensors(
    contents: Contents,
    model_parts: Sequence[nn.Module],
    optimizer: Optimizer | None,
    frozen: Sequence[str],
    is_complete: bool,
) -> list[str]:
    """Load into live tensors and verify.

    Args:
        contents: table of contents.
        model_parts: this rank's parts of the model.
        optimizer: None: load only the parameters.
        frozen: names of parameters that were frozen when they were saved.
        is_complete: True if ``contents`` has all shards.  Then one rank reads each shard;
            otherwise every rank reads the shards that it finds.

    Returns:
        Tensors that differ from what was saved.
    """
    state: StateDict = model_state(model_parts)
    if optimizer is None:
        state = {averaged_name(contents.tensors, name): value for name, value in state.items()}
    else:
        for name, entry in contents.tensors.items():
            # Memory is allocated by the table, so a wrong dtype would reinterpret the bits.
            if name.startswith("optim.") and entry.dtype not in OPTIMIZER_DTYPES:
                raise DamagedCheckpoint(f"{contents.path}: {name} has dtype {entry.dtype}")
        saved = {
            name: (torch.Size(entry.shape), entry.dtype) for name, entry in contents.tensors.items()
        }
        _run_on_all(contents, lambda: _check_optimizer_state(saved, model_parts, frozen))
        allocate_optimizer_state(model_parts, optimizer, saved)
        state |= optimizer_state(model_parts, optimizer)
    mismatches = _load_state(contents, model_parts, state, is_complete)
    if convert := getattr(optimizer, "convert_loaded_state", None):
        convert()
    elif optimizer is not None:
        upcast_moments(optimizer)
    return mismatches


def _run_on_all(contents: Contents, work: Callable[[], None]) -> None:
    """Run ``work`` on every rank; all ranks raise the error of any rank."""
    gather_to_rank_0(work, f"{contents.path}: could not be loaded")


def _check_optimizer_state(
    saved: Mapping[str, tuple[torch.Size, torch.dtype]],
    model_parts: Sequence[nn.Module],
    frozen: Sequence[str],
) -> None:
    """Check that all trainable parameters have optimizer state of a usual kind.

    Args:
        saved: shape and dtype of every tensor in the checkpoint, by name.
        model_parts: this rank's parts of the model.
        frozen: names of parameters without state, which begins with the next step.

    Raises:
        CorruptData: with the first parameter.
    """
    # For each parameter its keys, such as exp_avg, and whether they have the parameter's shape.
    keys: dict[str, dict[str, bool]] = {}
    for name, (shape, _) in saved.items():
        if name.startswith("optim."):
            param, _, key = name.removeprefix("optim.").rpartition(".")
            param_shape, _ = saved.get(f"model.{param}", (None, None))
            keys.setdefault(param, {})[key] = shape == param_shape
    kinds = {frozenset(each) for each in keys.values()}
    usual = Counter(chain.from_iterable(each.items() for each in keys.values()))
    for name, _ in trainable_parameters(model_parts):
        own = keys.get(name, {})
        is_unusual = any(usual[key, like] < usual[key, not like] for key, like in own.items())
        if name in frozen and not own:
            continue
        if is_unusual or any(own.keys() < kind for kind in kinds):
            raise CorruptData(f"the optimizer state of {name} is missing or incomplete")


def _load_state(
    contents: Contents, model_parts: Sequence[nn.Module], state: StateDict, is_complete: bool
) -> list[str]:
    """Load these tensors as `_load_tensors` does."""
    axes = find_replica_axes(model_parts, state)
    owned = {name for name in state if is_owner(name, axes[name])}
    fingerprints: dict[str, int] = {}
    names = owned if is_complete else None
    _run_on_all(contents, lambda: _read(contents, state, names, fingerprints))
    _broadcast_replicas(state, axes, fingerprints)

    def check_complete() -> None:  # a tensor of zeros that was not loaded could match
        if missing := state.keys() - fingerprints.keys():
            raise CorruptData(f"{min(missing)} is missing or incomplete")

    _run_on_all(contents, check_complete)
    return _find_mismatches(contents, state, axes, owned, fingerprints)


def _read(
    contents: Contents, state: StateDict, names: set[str] | None, fingerprints: dict[str, int]
) -> None:
    """Fill this rank's shards, and compute their fingerprints.

    Args:
        contents: table of contents.
        state: live tensors.
        names: tensors to read; None: all whose shards are in the table.
        fingerprints: receives the fingerprint of every tensor that was read.
    """
    reads: dict[str, list[ShardRead]] = {}
    problems = []
    for name, tensor in state.items():
        entry = contents.tensors.get(name)
        if entry is None:
            problems.append(f"it lacks {name}")
        elif entry.shape != tuple(tensor.shape):
            problems.append(f"{name} has shape {entry.shape}, not {tuple(tensor.shape)}")
        elif names is None or name in names:
            local = local_values(tensor)
            overlaps = list(find_overlaps(entry, shard_offsets(tensor), local))
            if local.numel() == 0:
                fingerprints[name] = 0
            elif sum(overlap.target.numel() for overlap in overlaps) == local.numel():
                reads[name] = overlaps
    if problems:
        others = f"; and {len(problems) - 1} more" if len(problems) > 1 else ""
        raise ValueError(f"the checkpoint is of another model: {problems[0]}{others}")

    def compute_fingerprint(name: str) -> None:  # from live memory, right after the read
        fingerprints[name] = int(local_fingerprint(state[name]))

    read_shards(contents, reads, compute_fingerprint)


def _broadcast_replicas(
    state: StateDict, axes: dict[str, list[ReplicaAxis]], fingerprints: dict[str, int]
) -> None:
    """Broadcast each tensor from a rank that read it to its replicas, axis by axis.

    Args:
        state: live tensors.
        axes: replica axes by tensor.
        fingerprints: of this rank's tensors; those of received tensors are added.
    """
    for depth in range(max((len(tensor_axes) for tensor_axes in axes.values()), default=0)):
        groups: dict[Any, list[str]] = {}
        for name, tensor_axes in axes.items():
            if depth < len(tensor_axes) and tensor_axes[depth].size > 1:
                groups.setdefault(tensor_axes[depth].group, []).append(name)
        for group, names in groups.items():
            held = torch.tensor([name in fingerprints for name in names])
            for name, *holders in zip(names, *gather_numbers(held, group), strict=True):
                if not any(holders) or all(holders):
                    continue
                local = local_values(state[name])
                buffer = to_group_device(local.contiguous(), group)
                dist.broadcast(buffer, group=group, group_src=holders.index(True))
                if name not in fingerprints:
                    if buffer is not local:
                        local.copy_(buffer)
                    fingerprints[name] = int(local_fingerprint(state[name]))


def _find_mismatches(
    contents: Contents,
    state: StateDict,
    axes: dict[str, list[ReplicaAxis]],
    owned: set[str],
    fingerprints: dict[str, int],
) -> list[str]:
    """Return the tensors of which a replica differs from the saved fingerprint."""
    # Columns, summed over ranks: owner's fingerprint, all replicas' fingerprints, ranks with the
    # tensor, replicas.  Tensors that no rank loaded (optimizer state, if only the model is loaded)
    # are not verified.
    rows = []
    for name in contents.tensors:
        value = fingerprints.get(name, 0)
        num_replicas = math.prod(axis.size for axis in axes.get(name, ()))
        rows.append([value * (name in owned), value, name in state, num_replicas * (name in state)])
    sums = torch.tensor(rows).T.contiguous()
    if dist.is_initialized():
        dist.all_reduce(sums)
    mismatches = []
    for (name, entry), owned_sum, replica_sum, ranks, replicas in zip(
        contents.tensors.items(), *sums.tolist(), strict=True
    ):
        saved = entry.fingerprint or 0
        expected = wrap_int64(saved * (replicas // max(ranks, 1)))
        if ranks and (owned_sum, replica_sum) != (saved, expected):
            mismatches.append(name)
    return mismatches
