"""Probes of network adapters, of EFA's software, and of the EC2 instance type."""

from __future__ import annotations

import os
import platform
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from weft.config.files import read_optional_text
from weft.doctor.node_facts import Adapter

ADAPTERS_DIR = Path("/sys/class/infiniband")
# EC2's Nitro system has the instance type here; NCCL's plug-in for EFA reads the same file.
DMI_DIR = Path("/sys/devices/virtual/dmi/id")
EFA_VERSIONS = Path("/opt/amazon/efa_installed_packages")
PLUGIN_DIRS = ("/opt/amazon/ofi-nccl", "/opt/aws-ofi-nccl", "/usr/local", "/usr")
LIBFABRIC_DIRS = ("/opt/amazon/efa", "/usr/local", "/usr")
LIBRARY_SUBDIRS = ("", "lib", "lib64", f"lib/{platform.machine()}-linux-gnu")
PLUGIN_NAMES = ("libnccl-net*.so*", "libnccl-ofi*.so*")


def list_adapters(root: Path) -> Iterator[Adapter]:
    """List the RDMA adapters, each by its first port."""
    for device in sorted(root.iterdir()) if root.is_dir() else []:
        port = device / "ports" / "1"
        state, rate = (read_optional_text(port / name).strip() for name in ("state", "rate"))
        link = device / "device" / "driver"
        driver = link.resolve().name if link.is_symlink() else ""
        read = (port / "hw_counters" / "rdma_read_bytes").exists()
        p2p = device / "device" / "p2p"
        provider = read_optional_text(p2p).strip() if p2p.exists() else None
        path = os.path.realpath(device / "device") if driver else ""
        yield Adapter(device.name, driver, state, rate, read, provider, path)


def detect_instance_type(environment: Mapping[str, str], dmi: Path = DMI_DIR) -> str:
    """Return the EC2 instance type without a request to AWS; empty: unknown."""
    if name := environment.get("SM_CURRENT_INSTANCE_TYPE"):
        return name
    vendors = read_optional_text(dmi / "board_vendor") + read_optional_text(dmi / "sys_vendor")
    return read_optional_text(dmi / "product_name").strip() if "Amazon EC2" in vendors else ""


def find_libraries(directories: Iterable[str], patterns: Iterable[str]) -> Iterator[Path]:
    """Yield the libraries in directories and their subdirectories for libraries."""
    for directory in filter(None, directories):
        for subdir in LIBRARY_SUBDIRS:
            for pattern in patterns:
                yield from sorted(Path(directory, subdir).glob(pattern))


def find_ofi_plugin(directories: Iterable[str]) -> str:
    """Return the version of aws-ofi-nccl; '?': version unknown, '': not installed."""
    for path in find_libraries(directories, PLUGIN_NAMES):
        match = re.search(rb"aws-ofi-nccl (\d+\.\d+\.\d+)", path.read_bytes())
        return match[1].decode() if match else "?"
    return ""


def probe_efa(environment: Mapping[str, str]) -> dict[str, Any]:
    """Return the fields of Facts about the instance type and EFA's software.

    ``environment`` has the library path, and SageMaker's variables.
    """
    path = environment.get("LD_LIBRARY_PATH", "").split(":")
    local = [sys.prefix]  # of conda, or of a virtual environment
    plugins = [*path, *local, *PLUGIN_DIRS]
    libfabrics = find_libraries([*path, *local, *LIBFABRIC_DIRS], ("libfabric.so.1",))
    compat = [*path, *(str(d) for d in Path("/usr/local").glob("cuda*/compat"))]
    pages = dict(re.findall(r"(HugePages_\w+):\s+(\d+)", read_optional_text(Path("/proc/meminfo"))))
    installer = re.search(r"installer version: ([\d.]+)", read_optional_text(EFA_VERSIONS))
    directories = (str(p.resolve().parent) for p in find_libraries(plugins, PLUGIN_NAMES))
    return {
        "ofi_plugin": find_ofi_plugin(plugins),
        "ofi_plugin_paths": tuple(dict.fromkeys(directories)),
        "libfabric_paths": tuple(dict.fromkeys(str(p.resolve()) for p in libfabrics)),
        "cuda_compat": tuple(
            dict.fromkeys(
                str(p) for p in find_libraries(compat, ("libcuda.so.1",)) if "compat" in str(p)
            )
        ),
        "efa_installer": installer[1] if installer else "",
        "instance_type": detect_instance_type(environment),
        "is_sagemaker_toolkit": "SM_TRAINING_ENV" in environment,
        "uverbs": len(list(Path("/dev/infiniband").glob("uverbs*"))),
        "huge_pages": int(pages.get("HugePages_Total", -1)),
        "huge_pages_free": int(pages.get("HugePages_Free", -1)),
    }
