"""The newest state of a run on the nodes themselves: in their memory (``/dev/shm``) or on a disk.

Most failures leave most nodes alive, and with them what their ranks held.  So every few steps each
rank leaves all that it holds, copies too, in a folder of its node, which costs no other node
anything; checkpoints in the run's home can then be rare.  When the job starts again, each node
reads what lies there; what a node has lost, a replica that has it sends.  If there is something
that nobody has any more, the newest checkpoint at home is taken: this is an addition to it, never
a substitute.

    FOLDER/IDENTITY OF THE RUN/000003-00001200/     epoch and step
        shard-00000.bin  rank-00000.json            of each rank on the node

``rank-NNNNN.json`` is a manifest that has only its own rank's shards.  It is written once all
ranks of the job have their bytes in place, and what is older is deleted once all have theirs; so
there is always one that is whole.  Nothing is forced to a disk: a node that crashes loses it, and
if it keeps something else, fingerprints tell.
"""

from __future__ import annotations

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
    continues,
    from_rank_0,
    gathered,
    leases,
    manifest_text,
    own_rank,
    parse_manifest,
)
from weft.checkpoint.shard_files import (
    Contents,
    Json,
    Staged,
    check_files,
    parse_contents,
    table_of_contents,
    write_shards,
)
from weft.checkpoint.storage import Damaged, read_regular
from weft.config.files import replace_text
from weft.monitor.faults import fault_point

_NAME = re.compile(r"([0-9]{6,20})-([0-9]{8,20})")


def local_folder(folder: str, home: Path) -> Path | None:
    """Where nodes keep what is of the run with that home; None if nowhere, or if it is new.

    Every rank calls it.

    Args:
        folder: the value of ``checkpoint.local_dir``.
    """

    def identity() -> str | None:
        taken = leases(home)  # the first one is of this run and of no other, whatever its folder
        if not taken:
            return None
        first = (home / f"lease-{taken[0][0]:06}.json").read_bytes()
        return xxhash.xxh3_64_hexdigest(first + str(home).encode())

    if folder == "off":
        return None
    name = from_rank_0(identity, f"{home}: could not be read")
    return None if name is None else Path(folder) / name


def save_local(
    folder: Path, boxes: list[Staged], owned: set[str], manifest: Json, group: Any
) -> None:
    """Leave what this rank holds on its node; every rank calls it.

    Args:
        boxes: all that it holds.
        owned: the names of those that count, so that each part of a tensor counts once.

    Raises:
        CheckpointError: on every rank, whichever failed.  Nothing half-written stays behind.
    """
    place = folder / f"{manifest['epoch']:06}-{manifest['step']:08}"
    name, failed = f"shard-{own_rank():05}.bin", f"{place}: could not be written"

    written: Json = {}

    def write() -> Json:
        place.mkdir(parents=True, exist_ok=True)
        with (place / name).open("wb") as file:
            written.update(write_shards(file, name, boxes))
        return written | {"shards": [each for each in written["shards"] if each[0] in owned]}

    try:
        every = gathered(write, failed, group)
        tensors = from_rank_0(lambda: _without_shards(table_of_contents(every)), failed, group)
        gathered(lambda: _seal(place, manifest, tensors, written), failed, group)
    except Exception:
        with suppress(OSError):
            for path in (place / name, _sealed(place)):
                path.unlink(missing_ok=True)
            place.rmdir()  # the last rank of the node
        raise
    for older in folder.iterdir():
        match = _NAME.fullmatch(older.name)
        if match and (int(match[1]), int(match[2])) < (manifest["epoch"], manifest["step"]):
            shutil.rmtree(older, ignore_errors=True)  # other ranks are at it, too


def _sealed(place: Path) -> Path:
    return place / f"rank-{own_rank():05}.json"


def _without_shards(table: Json) -> Json:
    return {name: entry | {"shards": []} for name, entry in table["tensors"].items()}


def _seal(place: Path, manifest: Json, tensors: Json, written: Json) -> None:
    """Write this rank's manifest."""
    fault_point("local")
    for name, _, _, _, (offsets, sizes, position) in written["shards"]:
        tensors[name] = tensors[name] | {"shards": [[offsets, sizes, 0, position]]}
    table = {"format": FORMAT, "tensors": tensors, "files": [written["file"]]}
    replace_text(_sealed(place), manifest_text(manifest | table))


def kept_steps(folder: Path, home: Path) -> list[tuple[int, int]]:
    """(step, epoch) of what any node keeps, oldest first, without abandoned branches.

    Every rank calls it.
    """
    mine = [
        (int(match[2]), int(match[1]))
        for path in (folder.iterdir() if folder.is_dir() else [])
        if (match := _NAME.fullmatch(path.name)) and any(path.glob("rank-*.json"))
    ]
    every = [mine] * dist.get_world_size()
    dist.all_gather_object(every, mine)
    taken = from_rank_0(lambda: leases(home), f"{home}: could not be read")
    return sorted({each for some in every for each in some if continues(*each, taken)})


def read_local(folder: Path, step: int, epoch: int) -> tuple[Path, Json, Contents] | None:
    """What lies on this node of a step: where, a manifest, and what there is; None if nothing.

    Raises:
        Damaged: if it is not what was written.
    """
    place = folder / f"{epoch:06}-{step:08}"
    manifest: Json | None = None
    contents = Contents({}, {})
    for path in sorted(place.glob("rank-*.json")):
        try:
            manifest = parse_manifest(read_regular(path, MANIFEST_BYTES))
        except (ValueError, Damaged) as error:
            raise Damaged(f"{path}: {error}") from error
        if (manifest["step"], manifest.get("epoch")) != (step, epoch):
            raise Damaged(f"{path}: is of another step")
        found = parse_contents(manifest, whole=False)
        check_files(place, found)
        contents.files.update(found.files)
        for name, entry in found.tensors.items():
            shards = contents.tensors.setdefault(name, entry).shards
            there = {shard.offsets for shard in shards}  # copies on one node are equal
            shards += [shard for shard in entry.shards if shard.offsets not in there]
    return None if manifest is None else (place, manifest, contents)
