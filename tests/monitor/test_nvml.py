"""The state of GPUs, by the real pynvml on a fake NVML library."""

from __future__ import annotations

import json
import os
import subprocess
import time
from dataclasses import replace
from pathlib import Path

import pytest

from tests import fake_nvml
from tests.commands import WEFT, processes_in
from weft.config.exit_statuses import FAILED
from weft.monitor import nvml
from weft.monitor.nvml import TIMED_OUT, Gpu, GpuState, query_gpus
from weft.monitor.process import run_with_limit

pytestmark = pytest.mark.system

IDLE = Gpu(
    0,
    "NVIDIA H100 80GB HBM3",
    "/sys/bus/pci/devices/0000:10:00.0",
    81559 * 2**20,
    4 * 2**20,
    utilization=0,
    celsius=34,
    watts=71.23,
    clock=1980,
    clock_reasons=1,
    ecc_errors=0,
    pcie_width=16,
    max_pcie_width=16,
)


@pytest.fixture
def query(nvml_dir: Path, monkeypatch: pytest.MonkeyPatch):
    """Return `query_gpus` with values of the fake library."""

    def run(values: str = "", **options: object) -> GpuState:
        for name, value in fake_nvml.environment(nvml_dir, values).items():
            monkeypatch.setenv(name, value)
        return query_gpus(**options)

    return run


def test_query_gpus_of_an_idle_node(query) -> None:
    state = query()
    assert (state.driver, state.cuda, state.error) == ("580.65.06", (13, 0), "")
    assert len(state.gpus) == 8
    assert state.gpus[0] == IDLE


def test_query_gpus_returns_every_value_of_a_gpu(query) -> None:
    values = """\
used.3 42057334784
utilization.3 97
celsius.3 91
milliwatts.3 699500
clock.3 345
reasons.3 72
ecc.3 2
remap_pending.3 1
width.3 8
mig.3 1
remap_failed.4 1
"""
    state = query(values)
    busy = state.gpus[3]
    assert (busy.used, busy.utilization, busy.celsius) == (42057334784, 97, 91)
    assert (busy.watts, busy.clock, busy.clock_reasons) == (699.5, 345, 0x48)
    assert (busy.ecc_errors, busy.pcie_width, busy.max_pcie_width) == (2, 8, 16)
    assert (busy.is_remap_pending, busy.is_remap_failed, busy.is_mig) == (True, False, True)
    assert state.gpus[4].is_remap_failed
    bus = "/sys/bus/pci/devices/0000:15:00.0"
    assert state.gpus[5] == replace(IDLE, index=5, pci_path=bus)


def test_query_gpus_value_that_a_device_lacks_is_unknown(query) -> None:
    names = ("utilization", "celsius", "milliwatts", "clock", "reasons", "ecc", "width", "mig")
    (gpu,) = query("count 1\n" + "".join(f"{name} -\n" for name in names)).gpus
    unknown = (gpu.utilization, gpu.celsius, gpu.watts, gpu.clock, gpu.clock_reasons)
    assert {*unknown, gpu.ecc_errors, gpu.pcie_width} == {None}
    assert not gpu.is_mig


def test_query_gpus_lost_device_has_an_error_and_the_others_their_values(query) -> None:
    state = query("lost.5 15\n", with_links=True)
    assert state.gpus[5] == replace(Gpu(5, error="GPU is lost"), links=state.gpus[5].links)
    assert state.gpus[4].memory == IDLE.memory


def test_query_gpus_links_by_switches(query) -> None:
    gpus = query("link.2.7 0\nrecoveries.1.4 12\n", with_links=True).gpus
    assert gpus[0].links == ("X", "NV18", "NV17", *["NV18"] * 5)
    assert gpus[2].inactive_links == (7,)
    assert gpus[1].link_recoveries == ((4, 12),)
    assert gpus[0].inactive_links == gpus[0].link_recoveries == ()


def test_query_gpus_direct_links_and_pcie(query) -> None:
    """GPU 0 and 1 have two links; the others are on PCIe (buses 16 and 17 are GPU 0 and 1)."""
    values = "count 4\nlink -\nremote 0\nancestor.2.3 20\nancestor.3.2 20\n"
    for a, b in ((0, 17), (1, 16)):
        for link in (0, 1):
            values += f"link.{a}.{link} 1\nremote_bus.{a}.{link} {b}\n"
    gpus = query(values, with_links=True).gpus
    assert [gpu.links for gpu in gpus] == [
        ("X", "NV2", "SYS", "SYS"),
        ("NV2", "X", "SYS", "SYS"),
        ("SYS", "SYS", "X", "PXB"),
        ("SYS", "SYS", "PXB", "X"),
    ]


def test_query_gpus_without_driver_has_its_error(query) -> None:
    assert query("init 18\n") == GpuState(error="RM has detected an NVML/RM version mismatch")


def test_query_gpus_of_a_hanging_driver_ends_in_time(query) -> None:
    start = time.monotonic()
    assert query("hang 1\n", seconds=1.0) == GpuState(error=TIMED_OUT)
    assert time.monotonic() - start < 10


def test_query_gpus_without_library_has_its_error() -> None:
    if nvml.has_nvml():
        pytest.skip("this machine has NVML")
    assert query_gpus() == GpuState(error="NVML Shared Library Not Found")


def test_run_with_limit_returns_status_and_output() -> None:
    assert run_with_limit(["sh", "-c", "echo x; exit 7"], 10) == (7, "x\n")
    assert run_with_limit(["no-such-tool"], 10) == (127, "")


def test_run_with_limit_kills_a_program_that_hangs(tmp_path: Path) -> None:
    command = ["sh", "-c", f"cd {tmp_path}; exec sleep 60"]
    assert run_with_limit(command, 0.5) == (None, "")
    assert processes_in(tmp_path) == {}


@pytest.mark.slow
def test_doctor_reports_faults_of_gpus(nvml_dir: Path, tmp_path: Path) -> None:
    values = "lost.5 15\necc.3 2\nreasons.1 64\ncelsius.1 95\nlink.2.7 0\n"
    variables = os.environ | fake_nvml.environment(nvml_dir, values)
    command = [*WEFT, "doctor", "--json", "--run.device", "cuda", "--run.dir", str(tmp_path / "x")]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == FAILED
    report = json.loads(done.stdout)
    found = {finding["observation"] for finding in report["findings"]}
    assert {
        "GPU 5: GPU is lost",
        "GPU 3: 2 uncorrected memory errors since the last boot",
        "GPU 1 (95 C): hardware thermal slowdown",
        "GPU 2: NVLink 7 is inactive",
    } <= found
    assert report["facts"]["gpu_state"]["driver"] == "580.65.06"
