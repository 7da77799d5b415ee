"""Samples of a node: from the kernel's files and NVML, and never a failure."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests import fake_nvml
from weft.monitor import system_sampler
from weft.monitor.jsonl import SYSTEM_FILE
from weft.monitor.nvml import Gpu
from weft.monitor.system_sampler import (
    SystemSampler,
    compute_rates,
    is_disk,
    read_counters,
    read_memory,
    summarize_gpus,
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
    first = Gpu(0, "A", "", 80 << 30, 70 << 30, utilization=90, watts=400.5, celsius=60)
    second = replace(first, index=1, used=72 << 30, utilization=80, watts=390.0, celsius=70)
    assert summarize_gpus([first, second]) == {
        "gpu_percent": 85.0,
        "gpu_percent_min": 80.0,
        "gpu_memory_gib": 72.0,
        "gpu_power_w": 790.5,
        "gpu_temperature": 70.0,
    }
    assert summarize_gpus([Gpu(0, "A", "", 80 << 30, 1 << 30)]) == {"gpu_memory_gib": 1.0}
    assert summarize_gpus([Gpu(0, error="GPU is lost")]) == summarize_gpus([]) == {}


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
    assert sampler.sample_if_due()  # without its memory
    lines = (run_dir / SYSTEM_FILE).read_text().splitlines()
    assert ["memory_gib" in json.loads(line) for line in lines] == [True, True, False]


# Two samples of a sampler that is always due.
PROGRAM = """
import sys
from pathlib import Path
from tests import fake_nvml
from weft.monitor import system_sampler
from weft.monitor.nvml import Gpu
system_sampler.MIN_SECONDS = 0.0
sampler = system_sampler.SystemSampler(Path(sys.argv[1]))
assert sampler.sample_if_due()
print(sampler._has_gpus)
assert sampler.sample_if_due()
"""


@pytest.mark.system
@pytest.mark.parametrize("values", ["utilization.2 80\nlost.5 15\n", "init 18\n"])
def test_sampler_has_gpus_until_the_driver_fails(
    values: str, tmp_path: Path, nvml_dir: Path
) -> None:
    variables = os.environ | fake_nvml.environment(nvml_dir, values)
    command = [sys.executable, "-c", PROGRAM, str(tmp_path)]
    output = subprocess.run(command, env=variables, capture_output=True, text=True, check=True)
    samples = [json.loads(line) for line in (tmp_path / SYSTEM_FILE).read_text().splitlines()]
    assert len(samples) == 2
    if values.startswith("init"):
        assert output.stdout == "False\n"  # queried no more
        assert not any("gpu" in name for sample in samples for name in sample)
    else:
        assert samples[1]["gpu_percent"] == pytest.approx(80 / 7, abs=0.01)
        assert samples[1]["gpu_power_w"] == pytest.approx(7 * 71.23, abs=0.1)
