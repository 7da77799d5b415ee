"""Local checkpoints: the newest state on the nodes, in ``/dev/shm`` or on a disk.

Most failures leave most nodes alive, with the state of their ranks.  Every few steps each rank
therefore saves all of its shards, replicas included, in a directory of its node, without network
traffic, and persistent checkpoints can be rare.  After a restart each node reads its own files, and
replicas send what a node has lost.  If part of the state is lost on all nodes, the run resumes from
the newest persistent checkpoint.  Local checkpoints never replace persistent ones.

    DIRECTORY/RUN IDENTITY/000003-00001200/         epoch and step
        shard-00000.safetensors  rank-00000.json    of each rank on the node

The files have the formats of a persistent checkpoint; ``rank-NNNNN.json`` is a manifest with all
tensors, and the shards of one rank.  Ranks write it once all ranks have
written their shards, and delete older steps once all ranks have a manifest, so one complete step
always exists.  Files are not synced to disk: a node that crashes loses them, and fingerprints
detect corruption.
"""

from __future__ import annotations

import os
import re
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch.distributed as dist
import xxhash

from weft.checkpoint.manifest import (
    FORMAT,
    MANIFEST_BYTES,
    gather_to_rank_0,
    get_rank,
    is_on_current_branch,
    list_leases,
    manifest_text,
    parse_manifest,
    run_on_rank_0,
)
from weft.checkpoint.shard_files import (
    Contents,
    Json,
    StagedShard,
    build_contents,
    check_files,
    parse_contents,
    shard_name,
    write_shards,
)
from weft.config.files import replace_text
from weft.config.storage import CorruptData, is_remote, read_regular_file
from weft.monitor.faults import fault_point

_NAME = re.compile(r"([0-9]{6,20})-([0-9]{8,20})")


def local_run_dir(local_dir: str, checkpoint_dir: Path) -> Path | None:
    """Return the local directory of a run; None if disabled, or if the run is new.

    Every rank calls this function.

    Args:
        local_dir: value of ``checkpoint.local_dir``.
        checkpoint_dir: directory of the run's persistent checkpoints.
    """

    def identity() -> str | None:
        leases = list_leases(checkpoint_dir)  # the first lease identifies the run
        if not leases:
            return None
        first = (checkpoint_dir / f"lease-{leases[0][0]:06}.json").read_bytes()
        # A copy of the run has this lease, too, but another directory.
        remote = is_remote(checkpoint_dir)
        place = str(checkpoint_dir) if remote else os.path.realpath(checkpoint_dir)
        return xxhash.xxh3_64_hexdigest(first + os.fsencode(place))

    if local_dir == "off":
        return None
    name = run_on_rank_0(identity, f"{checkpoint_dir}: could not be read")
    return None if name is None else Path(local_dir) / name


def save_local(run_dir: Path, shards: list[StagedShard], manifest: Json, group: Any) -> None:
    """Save this rank's shards on its node; every rank calls this function.

    Args:
        run_dir: result of `local_run_dir`.
        shards: all shards of this rank, replicas included.
        manifest: manifest without the table of contents.
        group: process group; None: all ranks.

    Raises:
        CheckpointError: on every rank, if any rank failed; partial files are deleted.
    """
    step_dir = local_step_dir(run_dir, manifest["step"], manifest["epoch"])
    context = f"{step_dir}: could not be written"
    shard_path = step_dir / shard_name(get_rank())
    manifest_path = step_dir / f"rank-{get_rank():05}.json"
    owned = {shard.name for shard in shards if shard.is_owned}  # so that no part counts twice
    own_entries: Json = {}

    def write() -> Json:
        step_dir.mkdir(parents=True, exist_ok=True)
        own_entries.update(write_shards(shard_path, shards, durable=False))
        return own_entries | {
            "shards": [entry for entry in own_entries["shards"] if entry[0] in owned]
        }

    def write_manifest() -> None:
        fault_point("local")
        for name, _, _, _, (offsets, sizes, position) in own_entries["shards"]:
            tensors[name] = tensors[name] | {"shards": [[offsets, sizes, 0, position]]}
        table = {"format": FORMAT, "tensors": tensors, "files": [own_entries["file"]]}
        replace_text(manifest_path, manifest_text(manifest | table))

    try:
        entries = gather_to_rank_0(write, context, group)
        tensors = run_on_rank_0(lambda: _without_shards(build_contents(entries)), context, group)
        gather_to_rank_0(write_manifest, context, group)
    except Exception:
        with suppress(OSError):
            for path in (shard_path, manifest_path):
                path.unlink(missing_ok=True)
            step_dir.rmdir()  # succeeds on the last rank of the node
        raise
    for old_dir in run_dir.iterdir():
        match = _NAME.fullmatch(old_dir.name)
        if match and (int(match[1]), int(match[2])) < (manifest["epoch"], manifest["step"]):
            shutil.rmtree(old_dir, ignore_errors=True)  # other ranks delete it too


def _without_shards(table: Json) -> Json:
    return {name: entry | {"shards": []} for name, entry in table["tensors"].items()}


def list_local_steps(run_dir: Path, checkpoint_dir: Path) -> list[tuple[int, int]]:
    """Return (step, epoch) of all nodes' local checkpoints, oldest first.

    Abandoned branches are excluded.  Every rank calls this function.
    """
    own = [
        (int(match[2]), int(match[1]))
        for path in (run_dir.iterdir() if run_dir.is_dir() else [])
        if (match := _NAME.fullmatch(path.name)) and any(path.glob("rank-*.json"))
    ]
    gathered = [own] * dist.get_world_size()
    dist.all_gather_object(gathered, own)
    leases = run_on_rank_0(
        lambda: list_leases(checkpoint_dir), f"{checkpoint_dir}: could not be read"
    )
    return sorted(
        {step for steps in gathered for step in steps if is_on_current_branch(*step, leases)}
    )


def local_step_dir(run_dir: Path, step: int, epoch: int) -> Path:
    """Return the directory of a local checkpoint on a node."""
    return run_dir / f"{epoch:06}-{step:08}"


def read_local(step_dir: Path) -> tuple[Json, Contents] | None:
    """Return the manifest and contents of this node's files; None without any.

    Raises:
        CorruptData: if the files differ from what was written.
    """
    manifest: Json | None = None
    contents = Contents(step_dir, {}, {})
    for path in sorted(step_dir.glob("rank-*.json")):
        try:
            manifest = parse_manifest(read_regular_file(path, MANIFEST_BYTES))
        except (ValueError, CorruptData) as error:
            raise CorruptData(f"{path}: {error}") from error
        own_dir = local_step_dir(step_dir.parent, manifest["step"], manifest.get("epoch", 0))
        if own_dir != step_dir:
            raise CorruptData(f"{path}: the manifest has another step or epoch")
        rank_contents = parse_contents(manifest, step_dir, require_all_shards=False)
        check_files(rank_contents)
        contents.files.update(rank_contents.files)
        for name, entry in rank_contents.tensors.items():
            shards = contents.tensors.setdefault(name, entry).shards
            offsets = {shard.offsets for shard in shards}  # replicas on one node are equal
            shards += [shard for shard in entry.shards if shard.offsets not in offsets]
    return None if manifest is None else (manifest, contents)
