"""The file system of a directory, and what weft cannot do on it."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import NamedTuple

from weft.config.errors import ConfigError

MOUNTS_FILE = Path("/proc/self/mountinfo")
S3_MOUNT = "mountpoint-s3"  # the source that Mountpoint for Amazon S3 shows in mountinfo
S3_MOUNT_RULE = (
    "is in a bucket mounted by Mountpoint for Amazon S3, which can neither rename nor link files"
)
S3_MOUNT_REMEDIES = {
    "checkpoint.dir": "use s3://bucket/prefix, where weft needs neither",
    "run.dir": "use a directory of a shared file system; only checkpoint.dir may be in a bucket",
    "data.cache_dir": "use a directory of a disk or a shared file system; data.path may stay there",
}


class Mount(NamedTuple):
    """Mount of a file system: its type, what is mounted, and the options."""

    kind: str = ""
    source: str = ""
    options: str = ""

    @property
    def is_lustre(self) -> bool:
        """True for Lustre, and for the file system in the tests that behaves like it."""
        return self.kind in ("lustre", "fuse.lustre")


def find_mount(path: Path, mounts: str | None = None) -> Mount:
    """Return the mount of a path, or of its nearest parent that exists.

    Args:
        path: absolute path.
        mounts: content of /proc/self/mountinfo, for which ``path`` need not exist; None: this
            machine's.  Without such a file, the fields of the result are empty.
    """
    if mounts is None:
        try:
            mounts = MOUNTS_FILE.read_text("utf-8", "surrogateescape")
        except OSError:
            return Mount()
        path = Path(os.path.realpath(existing_parent(path)))
    best, result = "", Mount()
    for line in mounts.splitlines():
        left, _, right = line.partition(" - ")
        # mountinfo writes a space as \040.
        point = re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), left.split()[4])
        if path.is_relative_to(point) and len(point) >= len(best):
            kind, source, *options = right.split(" ")
            best, result = point, Mount(kind, source, ",".join(options))
    return result


def existing_parent(path: Path) -> Path:
    """Return the path itself, or its nearest parent that exists."""
    return next((p for p in (path, *path.parents) if os.path.lexists(p)), Path("/"))


def check_mount(key: str, path: str) -> list[ConfigError]:
    """Return an error if a directory that weft writes is a mounted S3 bucket."""
    if find_mount(Path(path).absolute()).source != S3_MOUNT:
        return []
    remedy = S3_MOUNT_REMEDIES.get(key, "use a directory on a disk of the node")
    return [ConfigError(key, path, S3_MOUNT_RULE, remedy)]
