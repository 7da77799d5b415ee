"""State of this node's GPUs, from NVML, the management library of NVIDIA's driver.

A call of a broken driver may never return and cannot be interrupted.  So `query_gpus` starts this
module as a process, with a time limit, and the process prints the state as JSON.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

import pynvml

from weft.monitor.process import PYTHON, run_with_limit
from weft.version import parse_version

QUERY_SECONDS = 30.0
TIMED_OUT = "no answer"  # error of a driver that did not answer in time
LIBRARY = "libnvidia-ml.so.1"
SWITCH = "switch"  # the other end of an NVLink
# Minimum drivers by CUDA major version: CUDA's release notes, 'minor version compatibility'.
MIN_DRIVERS = {11: (450, 80), 12: (525, 60), 13: (580, 0)}
# Names of ``nvidia-smi topo -m`` for the path between two GPUs, by NVML's level.
PATHS = {
    pynvml.NVML_TOPOLOGY_SINGLE: "PIX",  # one PCIe switch
    pynvml.NVML_TOPOLOGY_MULTIPLE: "PXB",  # several
    pynvml.NVML_TOPOLOGY_HOSTBRIDGE: "PHB",
    pynvml.NVML_TOPOLOGY_NODE: "NODE",
    pynvml.NVML_TOPOLOGY_SYSTEM: "SYS",
}


@dataclass(frozen=True)
class Gpu:
    """A GPU; None: the driver does not report the value for this device.

    ``pci_path``: its directory in /sys, which shows the PCIe switches above it.  Memory in bytes,
    ``utilization`` in percent, clocks in MHz.  ``clock_reasons``: bits of NVML's clock event
    reasons.  ``ecc_errors``: uncorrected memory errors since the last boot.  ``pcie_width``: lanes.
    ``inactive_links``, ``link_recoveries``: NVLinks that are down, and the number of recoveries by
    link.  ``links``: the connection to each GPU of the node, as in ``nvidia-smi topo -m`` (NV18,
    PIX, SYS); empty if it was not queried.  ``error``: why the device cannot be used.
    """

    index: int
    name: str = ""
    pci_path: str = ""
    memory: int = 0
    used: int = 0
    utilization: int | None = None
    celsius: int | None = None
    watts: float | None = None
    clock: int | None = None
    clock_reasons: int | None = None
    ecc_errors: int | None = None
    is_remap_pending: bool = False
    is_remap_failed: bool = False
    pcie_width: int | None = None
    max_pcie_width: int | None = None
    is_mig: bool = False
    inactive_links: tuple[int, ...] = ()
    link_recoveries: tuple[tuple[int, int], ...] = ()
    links: tuple[str, ...] = ()
    error: str = ""


@dataclass(frozen=True)
class GpuState:
    """All GPUs of a node; ``cuda``: the newest version that the driver supports.

    ``error``: why there is no state, for example because the node has no driver.
    """

    driver: str = ""
    cuda: tuple[int, ...] = ()
    gpus: tuple[Gpu, ...] = ()
    error: str = ""


def minimum_driver(cuda: str) -> tuple[int, ...]:
    """Return the oldest driver for a CUDA version, such as 13.0; (): unknown."""
    return MIN_DRIVERS.get(parse_version(cuda)[0], ())


def is_driver_too_old(driver: str, cuda: str) -> bool:
    """Return True if a driver cannot run programs of a CUDA version."""
    return parse_version(driver) < minimum_driver(cuda)


def query_gpus(with_links: bool = False, seconds: float = QUERY_SECONDS) -> GpuState:
    """Return the state of all GPUs of this node.

    Args:
        with_links: also query NVLinks and the paths between GPUs.
        seconds: time limit.
    """
    command = [*PYTHON, "weft.monitor.nvml", *(["links"] if with_links else [])]
    status, output = run_with_limit(command, seconds)
    if status is None:
        return GpuState(error=TIMED_OUT)
    if status != 0:
        return GpuState(error=f"the query of the driver ended with status {status}")
    return parse_state(json.loads(output))


def has_nvml() -> bool:
    """Return True if the library is installed, which says nothing about devices."""
    try:
        ctypes.CDLL(LIBRARY)
    except OSError:
        return False
    return True


def parse_state(fields: Mapping[str, Any]) -> GpuState:
    """Return the state whose fields are JSON values."""
    gpus = tuple(Gpu(**_freeze(gpu)) for gpu in fields["gpus"])
    return GpuState(**_freeze(dict(fields)) | {"gpus": gpus})


def _freeze(values: Any) -> Any:
    """Return JSON values with tuples instead of lists."""
    if isinstance(values, dict):
        return {name: _freeze(value) for name, value in values.items()}
    return tuple(map(_freeze, values)) if isinstance(values, list) else values


# --------------------------------------------------------------------------- in the process


def read_state(with_links: bool) -> GpuState:
    """Read the state of all GPUs; the error says why there is none."""
    try:
        pynvml.nvmlInit()
        handles = [_try(pynvml.nvmlDeviceGetHandleByIndex, n) for n in range(_count_gpus())]
        links = read_links(handles) if with_links else [{}] * len(handles)
        version = pynvml.nvmlSystemGetCudaDriverVersion()  # 13000 for 13.0
        return GpuState(
            driver=pynvml.nvmlSystemGetDriverVersion(),
            cuda=(version // 1000, version % 1000 // 10),
            gpus=tuple(read_gpu(n, **fields) for n, fields in enumerate(links)),
        )
    except pynvml.NVMLError as error:
        return GpuState(error=str(error).rstrip("."))


def _count_gpus() -> int:
    count: int = pynvml.nvmlDeviceGetCount()
    return count


def _try(function: Callable[..., Any], *arguments: Any) -> Any:
    """Return the result of an NVML function; None if this device or driver lacks it."""
    with suppress(pynvml.NVMLError):
        return function(*arguments)
    return None


def read_gpu(index: int, **links: Any) -> Gpu:
    """Read the state of one GPU; one that the driver has lost has only an error."""
    try:
        gpu = pynvml.nvmlDeviceGetHandleByIndex(index)
        memory, bus = pynvml.nvmlDeviceGetMemoryInfo(gpu), read_bus(gpu)
        name = pynvml.nvmlDeviceGetName(gpu)
    except pynvml.NVMLError as error:
        return Gpu(index, error=str(error).rstrip("."))
    utilization = _try(pynvml.nvmlDeviceGetUtilizationRates, gpu)
    milliwatts = _try(pynvml.nvmlDeviceGetPowerUsage, gpu)
    remapped = _try(pynvml.nvmlDeviceGetRemappedRows, gpu) or (0, 0, 0, 0)
    mig = _try(pynvml.nvmlDeviceGetMigMode, gpu) or (0, 0)
    counts = (pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, pynvml.NVML_VOLATILE_ECC)
    return Gpu(
        index,
        name,
        os.path.realpath(f"/sys/bus/pci/devices/{bus}"),
        memory.total,
        memory.used,
        utilization=utilization.gpu if utilization else None,
        celsius=_try(pynvml.nvmlDeviceGetTemperature, gpu, pynvml.NVML_TEMPERATURE_GPU),
        watts=None if milliwatts is None else milliwatts / 1000,
        clock=_try(pynvml.nvmlDeviceGetClockInfo, gpu, pynvml.NVML_CLOCK_SM),
        # The older name of the clock event reasons, which all drivers have.
        clock_reasons=_try(pynvml.nvmlDeviceGetCurrentClocksThrottleReasons, gpu),
        ecc_errors=_try(pynvml.nvmlDeviceGetTotalEccErrors, gpu, *counts),
        is_remap_pending=bool(remapped[2]),
        is_remap_failed=bool(remapped[3]),
        pcie_width=_try(pynvml.nvmlDeviceGetCurrPcieLinkWidth, gpu),
        max_pcie_width=_try(pynvml.nvmlDeviceGetMaxPcieLinkWidth, gpu),
        is_mig=bool(mig[0]),
        **links,
    )


def read_bus(gpu: Any) -> str:
    """Return the PCI address of a GPU as in /sys."""
    return format_bus(pynvml.nvmlDeviceGetPciInfo(gpu))


def format_bus(pci: Any) -> str:
    """Format a PCI address as in /sys."""
    return f"{pci.domain:04x}:{pci.bus:02x}:{pci.device:02x}.0"


def read_links(gpus: Sequence[Any]) -> list[dict[str, Any]]:
    """Return the fields of each `Gpu` about NVLinks and the connections between GPUs."""
    recovery, numbers = pynvml.NVML_NVLINK_ERROR_DL_RECOVERY, range(pynvml.NVML_NVLINK_MAX_LINKS)
    fields: list[dict[str, Any]] = []
    ends = []
    for gpu in gpus:
        states = [_try(pynvml.nvmlDeviceGetNvLinkState, gpu, n) for n in numbers]
        active = [n for n in numbers if states[n] == pynvml.NVML_FEATURE_ENABLED]
        inactive = [n for n in numbers if states[n] == pynvml.NVML_FEATURE_DISABLED]
        counts = [_try(pynvml.nvmlDeviceGetNvLinkErrorCounter, gpu, n, recovery) for n in active]
        recoveries = [(n, count) for n, count in zip(active, counts, strict=True) if count]
        fields.append({"inactive_links": tuple(inactive), "link_recoveries": tuple(recoveries)})
        ends.append([remote_end(gpu, n) for n in active])
    buses = [_try(read_bus, gpu) for gpu in gpus]
    for a, gpu in enumerate(gpus):
        links = []
        for b, other in enumerate(gpus):
            count = ends[a].count(buses[b]) if buses[b] else 0
            count += min(ends[a].count(SWITCH), ends[b].count(SWITCH))
            level = _try(pynvml.nvmlDeviceGetTopologyCommonAncestor, gpu, other)
            links.append("X" if a == b else f"NV{count}" if count else PATHS.get(level, ""))
        fields[a]["links"] = tuple(links)
    return fields


def remote_end(gpu: Any, link: int) -> str | None:
    """Return the other end of an NVLink: the PCI address of a GPU, or `SWITCH`."""
    kind = _try(pynvml.nvmlDeviceGetNvLinkRemoteDeviceType, gpu, link)
    if kind == pynvml.NVML_NVLINK_DEVICE_TYPE_SWITCH:
        return SWITCH
    pci = _try(pynvml.nvmlDeviceGetNvLinkRemotePciInfo, gpu, link)
    return format_bus(pci) if pci else None


if __name__ == "__main__":
    print(json.dumps(asdict(read_state("links" in sys.argv))))
