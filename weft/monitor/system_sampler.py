"""Use of a node during a run: processor, memory, disk, network and GPUs.

The launcher samples it beside the ranks, so that training never waits for a sample.  The numbers
come from ``/proc`` and NVML and describe the whole node, with all its processes.
"""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from weft.config.files import append_bytes
from weft.config.host_limits import read_memory_sizes
from weft.monitor.jsonl import SYSTEM_FILE
from weft.monitor.nvml import Gpu, has_nvml, query_gpus

MIN_SECONDS, MAX_SECONDS = 2.0, 60.0  # between samples
NUM_DENSE_SAMPLES = 1000  # until the time between samples grows with the run
QUERY_SECONDS = 10.0  # a broken driver never answers
SECTOR_BYTES = 512  # of /proc/diskstats, independent of the disk


class SystemSampler:
    """Writer of ``system.jsonl`` in a run directory.

    A sample has rates since the previous one.  The time between samples grows with the run, so
    that a month has some ten thousand samples.

    Args:
        run_dir: the run directory, whose file system has ``disk_free_gib``.
        proc: directory of the kernel's files.
    """

    def __init__(self, run_dir: Path, proc: Path = Path("/proc")) -> None:
        self._run_dir, self._proc = run_dir, proc
        self._start = self._last = time.monotonic()
        self._counters = read_counters(proc)
        self._has_gpus = has_nvml()

    def sample_if_due(self) -> bool:
        """Append a sample if enough time has passed; return True if it did.

        Failures are ignored: a run needs no samples.
        """
        now = time.monotonic()
        interval = (now - self._start) / NUM_DENSE_SAMPLES
        if now - self._last < min(MAX_SECONDS, max(MIN_SECONDS, interval)):
            return False
        with suppress(OSError, ValueError):
            append_bytes(self._run_dir / SYSTEM_FILE, f"{json.dumps(self.sample())}\n".encode())
        return True

    def sample(self) -> dict[str, float]:
        """Return a sample, with rates since the previous one."""
        now, sample = time.monotonic(), {"time": round(time.time(), 3)}
        counters = read_counters(self._proc)
        if now > self._last:
            sample |= compute_rates(self._counters, counters, now - self._last)
        self._counters, self._last = counters, now
        with suppress(OSError, ValueError):
            sample |= read_memory(self._proc)
        with suppress(OSError):
            sample["disk_free_gib"] = round(shutil.disk_usage(self._run_dir).free / 2**30, 3)
        if self._has_gpus:
            gpus = query_gpus(seconds=QUERY_SECONDS).gpus
            self._has_gpus = bool(gpus)  # after a failure, query no more
            sample |= summarize_gpus(gpus)
        return sample


def read_counters(proc: Path) -> dict[str, float]:
    """Return counters since the node booted: ticks of all cores, and bytes."""
    counters: dict[str, float] = {}
    with suppress(OSError, ValueError, IndexError):
        ticks = [int(word) for word in (proc / "stat").read_text().split("\n")[0].split()[1:9]]
        counters["cpu_total"] = float(sum(ticks))
        counters["cpu_idle"] = float(ticks[3] + ticks[4])  # idle, and waiting for a disk
    with suppress(OSError, ValueError, IndexError):
        rows = [line.split() for line in (proc / "diskstats").read_text().splitlines()]
        disks = [row for row in rows if is_disk(row[2])]
        counters["disk_read"] = float(sum(int(row[5]) for row in disks) * SECTOR_BYTES)
        counters["disk_write"] = float(sum(int(row[9]) for row in disks) * SECTOR_BYTES)
    with suppress(OSError, ValueError, IndexError):
        lines = (proc / "net" / "dev").read_text().splitlines()[2:]
        rows = [line.replace(":", " ").split() for line in lines]
        interfaces = [row for row in rows if row[0] != "lo"]
        counters["net_in"] = float(sum(int(row[1]) for row in interfaces))
        counters["net_out"] = float(sum(int(row[9]) for row in interfaces))
    return counters


def is_disk(name: str) -> bool:
    """Return True for a whole disk, not a partition or a virtual disk."""
    return re.fullmatch(r"(sd|vd|xvd|hd)[a-z]+|nvme\d+n\d+|mmcblk\d+", name) is not None


def compute_rates(
    before: Mapping[str, float], after: Mapping[str, float], seconds: float
) -> dict[str, float]:
    """Return rates between two readings: percent of all cores, and MB/s."""
    rates = {}
    if "cpu_total" in before and "cpu_total" in after:
        total = after["cpu_total"] - before["cpu_total"]
        idle = after["cpu_idle"] - before["cpu_idle"]
        if total > 0:
            rates["cpu_percent"] = round(100 * min(1.0, max(0.0, 1 - idle / total)), 2)
    for name in ("disk_read", "disk_write", "net_in", "net_out"):
        if name in before and name in after and after[name] >= before[name]:
            rates[f"{name}_mb_s"] = round((after[name] - before[name]) / seconds / 1e6, 4)
    return rates


def read_memory(proc: Path) -> dict[str, float]:
    """Return the used and total memory of the node in GiB."""
    sizes = read_memory_sizes(proc)
    if not {"MemTotal", "MemAvailable"} <= sizes.keys():
        return {}
    total = sizes["MemTotal"] / 2**30
    used = total - sizes["MemAvailable"] / 2**30
    return {"memory_gib": round(used, 3), "memory_total_gib": round(total, 3)}


def summarize_gpus(gpus: Sequence[Gpu]) -> dict[str, float]:
    """Return the metrics of the GPUs of the node.

    These are the mean and minimum utilization, the fullest GPU's memory in GiB, the power of all
    GPUs in watts, and the temperature of the hottest one.  A value that no GPU reports is missing.
    """
    busy = [gpu.utilization for gpu in gpus if gpu.utilization is not None]
    memory = [gpu.used for gpu in gpus if gpu.memory]
    power = [gpu.watts for gpu in gpus if gpu.watts is not None]
    celsius = [gpu.celsius for gpu in gpus if gpu.celsius is not None]
    values: dict[str, float] = {}
    if busy:
        values |= {"gpu_percent": round(sum(busy) / len(busy), 2), "gpu_percent_min": min(busy)}
    if memory:
        values["gpu_memory_gib"] = round(max(memory) / 2**30, 3)
    if power:
        values["gpu_power_w"] = round(sum(power), 1)
    if celsius:
        values["gpu_temperature"] = max(celsius)
    return values
