"""Samples of a node: from the kernel's files and nvidia-smi, and never a failure."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from weft.monitor import system_sampler
from weft.monitor.run_reader import SYSTEM_FILE
from weft.monitor.system_sampler import (
    SystemSampler,
    compute_rates,
    is_disk,
    parse_gpus,
    read_counters,
    read_memory,
)

DISKS = """\
 259 0 nvme0n1 10 0 2000 5 20 0 4000 9 0 3 14
 259 1 nvme0n1p1 9 0 1900 5 19 0 3900 9 0 3 14
   7 0 loop0 1 0 999 0 0 0 0 0 0 0 0
"""
INTERFACES = """\
Inter-|   Receive                                                |  Transmit
 face |bytes    packets errs drop fifo frame compressed multicast|bytes    packets errs drop
    lo: 7777 1 0 0 0 0 0 0 7777 1 0 0 0 0 0 0
  eth0:1000 2 0 0 0 0 0 0 500 2 0 0 0 0 0 0
"""


def fake_proc(path: Path, idle: int) -> Path:
    (path / "net").mkdir(parents=True, exist_ok=True)
    (path / "stat").write_text(f"cpu  100 0 100 {idle} 0 0 0 0 0 0\ncpu0 1 1 1 1\n")
    (path / "diskstats").write_text(DISKS)
    (path / "net" / "dev").write_text(INTERFACES)
    text = "MemTotal: 4194304 kB\nMemFree: 1 kB\nMemAvailable: 1048576 kB\n"
    (path / "meminfo").write_text(text)
    return path


def test_counters_are_of_whole_disks_and_real_interfaces(tmp_path: Path) -> None:
    counters = read_counters(fake_proc(tmp_path, 800))
    assert counters == {
        "cpu_total": 1000.0,
        "cpu_idle": 800.0,
        "disk_read": 2000.0 * 512,
        "disk_write": 4000.0 * 512,
        "net_in": 1000.0,
        "net_out": 500.0,
    }
    assert read_memory(tmp_path) == {"memory_gib": 3.0, "memory_total_gib": 4.0}
    assert read_counters(tmp_path / "nowhere") == {}
    disks = ["sda", "vdb", "nvme0n1", "mmcblk0"]
    assert [n for n in (*disks, "sda1", "dm-0", "nvme0n1p2", "ram0") if is_disk(n)] == disks


def test_rates_are_per_second_and_percent() -> None:
    before = {"cpu_total": 100.0, "cpu_idle": 50.0, "disk_read": 0.0, "net_in": 5e6}
    after = {"cpu_total": 200.0, "cpu_idle": 75.0, "disk_read": 4e6, "net_in": 1e6}
    # The network's counter was reset.
    assert compute_rates(before, after, 2.0) == {"cpu_percent": 75.0, "disk_read_mb_s": 2.0}


def test_gpus_are_summed_over_the_node() -> None:
    output = "90, 71680, 400.5, 60\n80, 73728, 390, 70\n"
    assert parse_gpus(output) == {
        "gpu_percent": 85.0,
        "gpu_percent_min": 80.0,
        "gpu_memory_gib": 72.0,
        "gpu_power_w": 790.5,
        "gpu_temperature": 70.0,
    }
    assert parse_gpus("[N/A], 1024, [N/A], [N/A]\n") == {"gpu_memory_gib": 1.0}
    assert parse_gpus("No devices were found\n") == {}


def test_sampler_writes_when_due_and_survives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]
    monkeypatch.setattr(system_sampler.time, "monotonic", lambda: clock[0])
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    proc = fake_proc(tmp_path / "proc", 800)
    sampler = SystemSampler(run_dir, proc)
    assert not sampler.sample_if_due()
    clock[0] = 2.5
    fake_proc(proc, 900)
    assert sampler.sample_if_due()
    (line,) = (run_dir / SYSTEM_FILE).read_text().splitlines()
    sample = json.loads(line)
    assert (sample["cpu_percent"], sample["memory_gib"]) == (0.0, 3.0)
    assert sample["disk_free_gib"] > 0
    clock[0] = 10_000.0  # the interval grows with the run
    assert sampler.sample_if_due()
    clock[0] = 10_008.0
    assert not sampler.sample_if_due()
    clock[0] = 10_100.0
    (proc / "meminfo").unlink()
    assert sampler.sample_if_due()  # without a sample
    assert len((run_dir / SYSTEM_FILE).read_text().splitlines()) == 2


def test_sampler_broken_nvidia_smi_is_not_called_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\necho called >> {tmp_path}/calls\nexit 9\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    sampler = SystemSampler(tmp_path)
    monkeypatch.setattr(system_sampler, "MIN_SECONDS", 0.0)
    assert sampler.sample_if_due()
    assert sampler.sample_if_due()
    assert (tmp_path / "calls").read_text().split() == ["called"]
    assert len((tmp_path / SYSTEM_FILE).read_text().splitlines()) == 2
