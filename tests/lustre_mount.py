"""A file system that behaves like Lustre where it matters to weft, over a local directory.

    python -m tests.lustre_mount BACKING MOUNTPOINT [--delays mkdir=0.007,rename=0.007] [--no-flock]

It needs Linux, /dev/fuse, libfuse 3 (Debian: fuse3), and mfusepy from PyPI.  All files are those of
BACKING.  Metadata operations take the time that ``--delays`` sets, one after another, as at a
metadata server with a limited rate.  A rename of a directory takes it for each entry.
``--no-flock``: flock fails with ENOSYS, as on Lustre without the mount option flock.  ``--space``:
bytes of all files; a write beyond them fails with ENOSPC.  There is no fallocate and no O_TMPFILE,
as in older versions of Lustre.  The program counts all operations, and on SIGUSR1 writes the counts
to ``--counts FILE``.

The type in /proc/self/mountinfo is fuse.lustre.  With ``--type mountpoint-s3`` it is what
Mountpoint for Amazon S3 has there, and renames and hard links fail as they do there.

It simulates neither the network, nor several clients with caches, nor stripes.
"""

from __future__ import annotations

import argparse
import errno
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

STAT_FIELDS = (
    *("st_mode", "st_nlink", "st_uid", "st_gid", "st_size", "st_ino"),
    *("st_atime_ns", "st_mtime_ns", "st_ctime_ns", "st_blocks"),
)
STATFS_FIELDS = (
    *("f_bavail", "f_bfree", "f_blocks", "f_bsize", "f_favail", "f_ffree", "f_files", "f_frsize"),
    "f_namemax",
)

# Outputs of ``lfs getstripe -d`` on Polaris, and of ``lfs df`` on a file system with five OSTs.
ONE_STRIPE = "stripe_count:  1 stripe_size:   1048576 pattern:       0 stripe_offset: -1\n\n"
DF = """\
UUID                       bytes        Used   Available Use% Mounted on
fs-MDT0000_UUID             2.8G        2.1M      288.8M   1% /mnt/fs[MDT:0]
fs-MDT0001_UUID             2.8G        2.0M      288.9M   1% /mnt/fs[MDT:1]
fs-OST0000_UUID             4.6G       21.5M        3.9G   1% /mnt/fs[OST:0]
fs-OST0001_UUID             4.6G       21.5M        3.9G   1% /mnt/fs[OST:1]
fs-OST0002_UUID             4.6G       21.5M        3.9G   1% /mnt/fs[OST:2]
fs-OST0003_UUID             4.6G       21.5M        3.9G   1% /mnt/fs[OST:3]
fs-OST0004_UUID             4.6G       21.5M        3.9G   1% /mnt/fs[OST:4]

filesystem_summary:        23.0G      107.5M       19.5G   1% /mnt/fs
"""
# A file whose name ends with "s3" is released; "hsm_state" prints the state of each argument.
LFS = """\
#!/bin/sh
echo "$@" >> {here}/calls
command=$1
shift
if [ "$command" = hsm_state ]; then
    for file; do
        case $file in
            *s3) echo "$file: (0x0000000d) released exists archived, archive_id:1" ;;
            *) echo "$file: (0x00000009) exists archived, archive_id:1" ;;
        esac
    done
elif [ -e {here}/$command ]; then
    cat {here}/$command
fi
"""

MOUNT_SECONDS = 100.0  # until a busy machine has mounted or unmounted it


def missing() -> str:
    """Return what this machine lacks for a mount; empty: nothing."""
    if importlib.util.find_spec("mfusepy") is None:
        return "mfusepy is not installed"
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        return "/dev/fuse cannot be opened"
    return "" if shutil.which("fusermount3") else "fusermount3 is not installed"


@contextmanager
def mounted(backing: Path, mountpoint: Path, *options: str) -> Iterator[subprocess.Popen[bytes]]:
    """Mount the file system; it ends with the context."""
    backing.mkdir(parents=True, exist_ok=True)
    mountpoint.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "tests.lustre_mount", str(backing), str(mountpoint), *options]
    # Where libfuse 2 is installed, too, mfusepy would take it, which writes 4 KiB at a time.
    environment = os.environ | {"FUSE_LIBRARY_NAME": "fuse3"}
    server = subprocess.Popen(command, cwd=Path(__file__).parent.parent, env=environment)
    try:
        deadline = time.monotonic() + MOUNT_SECONDS
        while not mountpoint.is_mount():
            assert server.poll() is None, "the mount failed"
            assert time.monotonic() < deadline, "the mount failed"
            time.sleep(0.02)
        yield server
    finally:
        unmount = ["fusermount3", "-uz", str(mountpoint)]
        if subprocess.run(unmount, stderr=subprocess.DEVNULL, check=False).returncode:
            server.kill()  # it is not mounted yet
        server.wait(MOUNT_SECONDS)


def read_counts(server: subprocess.Popen[bytes], file: Path) -> Counter[str]:
    """Return the number of operations so far, by name."""
    file.unlink(missing_ok=True)
    server.send_signal(signal.SIGUSR1)
    while not file.exists():
        time.sleep(0.01)
    return Counter(json.loads(file.read_text()))


def make_lfs(directory: Path) -> Path:
    """Make a directory with a stand-in of ``lfs``, which records its arguments in ``calls``."""
    directory.mkdir()
    (directory / "lfs").write_text(LFS.format(here=directory))
    (directory / "lfs").chmod(0o755)
    (directory / "df").write_text(DF)
    (directory / "getstripe").write_text(ONE_STRIPE)
    return directory


def lfs_calls(directory: Path, name: str = "") -> list[str]:
    """Return the recorded calls of a command of ``lfs``."""
    file = directory / "calls"
    lines = file.read_text().splitlines() if file.exists() else []
    return [line for line in lines if line.startswith(name)]


def make_operations(options: argparse.Namespace) -> Any:
    """Return the operations of the file system."""
    from mfusepy import FuseOSError, Operations

    delays = {name: float(t) for name, _, t in (d.partition("=") for d in options.delays)}
    turn = threading.Lock()  # the metadata server does one operation at a time
    is_s3 = options.type == "mountpoint-s3"

    class LustreLike(Operations):  # type: ignore[misc]
        use_ns = True

        def __init__(self) -> None:
            self.root = os.path.realpath(options.backing)
            self.counts: Counter[str] = Counter()

        def _meta(self, name: str, times: int = 1) -> None:
            self.counts[name] += 1
            if seconds := delays.get(name.split()[0], 0.0) * max(1, times):
                with turn:
                    time.sleep(seconds)

        def _full(self, path: str) -> str:
            return self.root + path

        def _reserve(self, handle: int, end: int) -> None:
            """Fail if the file cannot grow to ``end`` bytes."""
            if not options.space or end <= (size := os.fstat(handle).st_size):
                return
            files = (Path(d, f) for d, _, names in os.walk(self.root) for f in names)
            with suppress(FileNotFoundError):
                if sum(file.lstat().st_size for file in files) + end - size > options.space:
                    raise FuseOSError(errno.ENOSPC)

        # Names.

        def getattr(self, path: str, fh: int | None = None) -> dict[str, Any]:
            self.counts["stat"] += 1
            status = os.lstat(self._full(path)) if fh is None else os.fstat(fh)
            return {field.removesuffix("_ns"): getattr(status, field) for field in STAT_FIELDS}

        def readdir(self, path: str, fh: int) -> list[tuple[str, dict[str, int], int]]:
            self.counts["readdir"] += 1
            names = [".", "..", *os.listdir(self._full(path))]
            # With inode 0, which a plain name would have, the C library hides the entry.
            return [(name, {"st_ino": 1, "st_mode": 0}, 0) for name in names]

        def mkdir(self, path: str, mode: int) -> int:
            self._meta("mkdir")
            os.mkdir(self._full(path), mode)
            return 0

        def rmdir(self, path: str) -> int:
            self._meta("rmdir")
            os.rmdir(self._full(path))
            return 0

        def unlink(self, path: str) -> int:
            self._meta("unlink")
            os.unlink(self._full(path))
            return 0

        def rename(self, old: str, new: str) -> int:
            source, is_directory = self._full(old), os.path.isdir(self._full(old))
            kind = "rename directory" if is_directory else "rename"
            self._meta(kind, len(os.listdir(source)) if is_directory else 1)
            if is_s3:
                raise FuseOSError(errno.ENOSYS)
            os.rename(source, self._full(new))
            return 0

        def link(self, target: str, source: str) -> int:
            self._meta("link")
            if is_s3:
                raise FuseOSError(errno.ENOSYS)
            os.link(self._full(source), self._full(target))
            return 0

        def symlink(self, target: str, source: str) -> int:
            self._meta("symlink")
            os.symlink(source, self._full(target))
            return 0

        def readlink(self, path: str) -> str:
            return os.readlink(self._full(path))

        def chmod(self, path: str, mode: int) -> int:
            os.chmod(self._full(path), mode)
            return 0

        def chown(self, path: str, uid: int, gid: int) -> int:
            os.chown(self._full(path), uid, gid)
            return 0

        def utimens(self, path: str, times: tuple[int, int] | None = None) -> int:
            os.utime(self._full(path), ns=times)
            return 0

        def statfs(self, path: str) -> dict[str, int]:
            values = os.statvfs(self.root)
            return {field: getattr(values, field) for field in STATFS_FIELDS}

        # Contents.

        def create(self, path: str, mode: int, fi: Any = None) -> int:
            self._meta("create")
            flags = (fi or 0) & ~os.O_APPEND  # the kernel passes the position
            return os.open(self._full(path), flags | os.O_CREAT, mode)

        def open(self, path: str, flags: int) -> int:
            self._meta("open")
            return os.open(self._full(path), flags & ~os.O_APPEND)

        def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
            self.counts["read"] += 1
            return os.pread(fh, size, offset)

        def write(self, path: str, data: bytes, offset: int, fh: int) -> int:
            self.counts["write"] += 1
            self._reserve(fh, offset + len(data))
            return os.pwrite(fh, data, offset)

        def truncate(self, path: str, length: int, fh: int | None = None) -> int:
            os.truncate(self._full(path) if fh is None else fh, length)
            return 0

        def fsync(self, path: str, datasync: int, fh: int) -> int:
            self._meta("fsync")
            os.fsync(fh)
            return 0

        def fsyncdir(self, path: str, datasync: int, fh: int) -> int:
            self._meta("fsync directory")
            return 0

        def release(self, path: str, fh: int) -> int:
            os.close(fh)
            return 0

        if options.no_flock:

            def flock(self, path: str, fh: int, op: int) -> int:
                raise FuseOSError(errno.ENOSYS)

    return LustreLike()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("backing")
    parser.add_argument("mountpoint")
    parser.add_argument("--delays", type=lambda text: text.split(","), default=[])
    parser.add_argument("--no-flock", action="store_true")
    parser.add_argument("--space", type=int, default=0)
    parser.add_argument("--counts", type=Path)
    parser.add_argument("--type", choices=("lustre", "mountpoint-s3"), default="lustre")
    options = parser.parse_args()
    from mfusepy import FUSE

    operations = make_operations(options)

    def write_counts() -> None:
        while signal.sigwait({signal.SIGUSR1}):
            temporary = options.counts.with_suffix(".tmp")
            temporary.write_text(json.dumps(operations.counts))
            temporary.rename(options.counts)

    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    threading.Thread(target=write_counts, daemon=True).start()
    name = {"fsname": "fs-0123@tcp:/weft", "subtype": "lustre"}
    if options.type == "mountpoint-s3":
        name = {"fsname": "mountpoint-s3"}
    FUSE(operations, options.mountpoint, foreground=True, use_ino=True, nonempty=False, **name)


if __name__ == "__main__":
    main()
