"""Memory and processor limits of this host, as the kernel's files describe them."""

from __future__ import annotations

import re
from pathlib import Path

from weft.config.files import read_optional_text


def read_memory_sizes(proc: Path = Path("/proc")) -> dict[str, int]:
    """Return the bytes of each kind of memory, such as MemAvailable; empty: unknown."""
    rows = re.findall(r"(\w+):\s+(\d+) kB", read_optional_text(proc / "meminfo"))
    return {name: int(kib) * 1024 for name, kib in rows}


def read_cgroup_limits(own: Path, root: Path) -> tuple[int, float]:
    """Return the memory limit in bytes and the CPU quota in cores; 0: no limit.

    The result is the smallest limit of the process's cgroups (v1 or v2) and their ancestors.

    Args:
        own: /proc/self/cgroup.
        root: mount point of the cgroup file systems.
    """
    memory, cores = [], []
    for line in read_optional_text(own).splitlines():
        _, kinds, path = line.split(":", 2)
        tops = [root / kind for kind in kinds.split(",")] if kinds else [root, root / "unified"]
        for top in tops:
            for ancestor in (Path(path), *Path(path).parents):
                group = top / str(ancestor).lstrip("/")
                memory += _read_numbers(group / "memory.max")
                memory += _read_numbers(group / "memory.limit_in_bytes")
                quota = _read_numbers(group / "cpu.max") or [
                    *_read_numbers(group / "cpu.cfs_quota_us"),
                    *_read_numbers(group / "cpu.cfs_period_us"),
                ]
                cores += [quota[0] / quota[1]] if len(quota) == 2 else []
    return min((n for n in memory if n < 2**60), default=0), min(cores, default=0.0)


def _read_numbers(path: Path) -> list[int]:
    return [int(word) for word in read_optional_text(path).split() if word.isdigit()]
