"""Probes that collect the facts of a node.

A missing tool or file is not an error: it gives an empty string.  `weft.doctor.node_checks` checks
the facts.
"""

from __future__ import annotations

import ctypes
import fcntl
import importlib.util
import json
import os
import platform
import re
import resource
import shutil
import socket
import tempfile
import time
from collections.abc import Mapping
from contextlib import closing, suppress
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from weft.checkpoint.lustre import parse_layout
from weft.config.errors import WeftError
from weft.config.files import replace_text
from weft.config.host_limits import read_cgroup_limits, read_memory_sizes
from weft.config.mounts import S3_MOUNT, S3_MOUNT_RULE, find_mount
from weft.config.storage import (
    create_file,
    is_remote,
    open_directory,
    put_if_absent,
    read_range,
    remove,
)
from weft.doctor.network_probes import ADAPTERS_DIR, list_adapters, probe_efa
from weft.doctor.node_facts import Directory, Facts, Node, ObjectStore
from weft.monitor.nvml import query_gpus
from weft.monitor.process import run_with_limit
from weft.version import __version__

RENAMES, RENAME_SECONDS = 50, 1.0
CLOCK_SAMPLES = 5
TOOL_TIMEOUT_SECONDS = 30.0
# The report has only these variables, because others may hold secrets.
VARIABLE_PREFIXES = ("NCCL_", "FI_", "RDMAV_", "OFI_NCCL_", "GLOO_", "TORCH_NCCL_", "UCX_")
VARIABLE_NAMES = (
    "CUDA_VISIBLE_DEVICES",
    "CUDA_LAUNCH_BLOCKING",
    "OMP_NUM_THREADS",
    "MALLOC_ARENA_MAX",
)


def collect_facts() -> Facts:
    """Collect all facts that need no measurement and no other node."""
    sizes = read_memory_sizes()
    shm = shutil.disk_usage("/dev/shm") if os.path.isdir("/dev/shm") else None
    limit, quota = read_cgroup_limits(Path("/proc/self/cgroup"), Path("/sys/fs/cgroup"))
    address = ""
    with suppress(OSError):
        address = socket.gethostbyname(socket.gethostname())
    return Facts(
        host=socket.gethostname(),
        torch=package_versions().get("torch", ""),
        cuda=find_torch_cuda(),
        cores=os.cpu_count() or 0,
        usable=len(os.sched_getaffinity(0)),
        quota=quota,
        memory=sizes.get("MemTotal", 0),
        available=sizes.get("MemAvailable", 0),
        limit=limit if limit < sizes.get("MemTotal", 0) else 0,
        shm=shm.total if shm else 0,
        shm_free=shm.free if shm else 0,
        memlock=resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
        nofile=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        is_clock_synchronized=is_clock_synchronized(),
        address=address,
        interfaces=tuple(name for _, name in socket.if_nameindex()),
        variables={
            k: v
            for k, v in os.environ.items()
            if k.startswith(VARIABLE_PREFIXES) or k in VARIABLE_NAMES
        },
        gpu_state=query_gpus(with_links=True),
        kernel_log=read_driver_faults(),
        device_files=len(list(Path("/dev").glob("nvidia[0-9]*"))),
        modules=tuple(
            name for name in ("nvidia_peermem", "gdrdrv") if Path("/sys/module", name).exists()
        ),
        adapters=tuple(list_adapters(ADAPTERS_DIR)),
        libfabric=run_tool("fi_info", "--version"),
        efa_provider=run_tool("fi_info", "-p", "efa"),
        **probe_efa(os.environ),
    )


def find_torch_cuda() -> str:
    """Return torch's CUDA version without importing torch, which may fail."""
    spec = importlib.util.find_spec("torch")
    path = Path(spec.origin).with_name("version.py") if spec and spec.origin else None
    text = path.read_text("utf-8") if path and path.is_file() else ""
    match = re.search(r"^cuda\b.*= '([\d.]+)'", text, re.MULTILINE)
    return match[1] if match else ""


def read_driver_faults() -> str | None:
    """Return the kernel log's lines with driver faults (Xid); None: not readable."""
    log = run_tool("dmesg")
    return "\n".join(line for line in log.splitlines() if "NVRM: Xid" in line) if log else None


def run_tool(*command: str) -> str:
    """Return the output of a tool; empty if it is missing, fails or hangs."""
    status, output = run_with_limit(command, TOOL_TIMEOUT_SECONDS)
    return output if status == 0 else ""


def is_clock_synchronized() -> bool | None:
    """Return True if the kernel clock is synchronized (NTP, PTP); None: unknown."""
    adjtimex = getattr(ctypes.CDLL(None), "adjtimex", None)
    if adjtimex is None:
        return None
    state = adjtimex(ctypes.create_string_buffer(512))  # all zeros: query only
    time_error = 5  # TIME_ERROR of <sys/timex.h>
    return None if state < 0 else state != time_error


# --------------------------------------------------------------------------- directories, stores


def measure_rates(path: Path, size: int) -> tuple[float, float, str]:
    """Write and read a new file; return both rates in bytes/s, and an error."""
    data = os.urandom(1 << 20) * (size >> 20)
    start = time.perf_counter()
    with create_file(path, size) as file:
        file.write(data)
    write_seconds = time.perf_counter() - start
    if not is_remote(path):
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    start = time.perf_counter()
    content = read_range(path, 0, size)
    read_seconds = time.perf_counter() - start
    error = "" if bytes(content) == data else "reads return other data than was written"
    return size / write_seconds, size / read_seconds, error


def probe_directory(key: str, directory: Path, size: int) -> Directory:
    """Write and read a temporary file in a directory or its nearest ancestor."""
    above = next(path for path in (directory, *directory.parents) if os.path.isdir(path))
    existing = Path(os.path.realpath(above))
    mount = find_mount(existing)
    result = Directory(key, str(directory), mount.kind, mount.options)
    if mount.source == S3_MOUNT:
        return replace(result, error=S3_MOUNT_RULE)
    if mount.is_lustre:
        layout = parse_layout(run_tool("lfs", "getstripe", "-d", str(existing)))
        result = replace(result, layout=tuple(layout))
    try:
        with tempfile.TemporaryDirectory(prefix=".weft-doctor-", dir=existing) as temporary:
            path = Path(temporary, "file")
            write, read, error = measure_rates(path, size)
            usage = os.statvfs(existing)
            return replace(
                result,
                free=usage.f_bavail * usage.f_frsize,
                files=usage.f_favail if usage.f_files else -1,
                write=write,
                read=read,
                locks=supports_locks(path),
                links=supports_hard_links(path),
                renames=measure_renames(path),
                error=error,
            )
    except OSError as error:
        return replace(result, error=f"cannot be written: {error.strerror}")


def measure_renames(path: Path) -> float:
    """Create and rename files beside ``path``; return their number per second."""
    start, count = time.perf_counter(), 0
    while count < RENAMES and time.perf_counter() - start < RENAME_SECONDS:
        replace_text(path.with_name("renamed"), "")
        count += 1
    return count / (time.perf_counter() - start)


def supports_locks(path: Path) -> bool:
    """Return True if a file lock excludes a second holder."""
    with path.open("a") as first, path.open("a") as second:
        try:
            fcntl.flock(first, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False  # the file system has no locks
        with suppress(BlockingIOError):
            fcntl.flock(second, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return False
    return True


def supports_hard_links(path: Path) -> bool:
    """Return True if the file system has hard links; `put_if_absent` needs them."""
    with suppress(OSError):
        os.link(path, path.with_name("link"))
        return True
    return False


def probe_store(key: str, url: str, size: int) -> ObjectStore:
    """Write and read temporary objects with the functions that checkpoints use."""
    try:
        prefix = open_directory(url) / f".weft-doctor-{socket.gethostname()}-{os.getpid()}"
        try:
            write, read, error_text = measure_rates(prefix / "large", size)
            start = time.perf_counter()
            put_if_absent(prefix / "small", b"first")
            put_seconds = time.perf_counter() - start
            try:
                put_if_absent(prefix / "small", b"second")
                once = False
            except FileExistsError:
                once = True
        finally:
            remove(prefix)
    except WeftError as error:
        return ObjectStore(key, url, error=str(error))
    except Exception as error:  # any exception of the store's client
        return ObjectStore(key, url, error=f"{type(error).__name__}: {error.__cause__ or error}")
    return ObjectStore(key, url, write, read, put_seconds, once, error_text)


# --------------------------------------------------------------------------- other nodes


def probe_endpoint(endpoint: str) -> str:
    """Return 'free' (this host can listen there), 'answers', or an error message."""
    host, _, port = endpoint.rpartition(":")
    try:
        address = socket.getaddrinfo(host or "localhost", int(port), type=socket.SOCK_STREAM)[0]
    except (OSError, ValueError) as error:
        return f"{error}"
    with closing(socket.socket(address[0], socket.SOCK_STREAM)) as client:
        client.settimeout(3)
        with suppress(OSError):
            client.connect(address[4])
            return "answers"
    with closing(socket.socket(address[0], socket.SOCK_STREAM)) as server:
        try:
            server.bind(address[4])
        except OSError:
            return "no answer, and this host cannot listen there"
    return "free"


def package_versions() -> dict[str, str]:
    """Return the versions that must be equal on every node."""
    versions = {"weft": __version__, "python": platform.python_version()}
    for name in ("torch", "numpy"):
        with suppress(PackageNotFoundError):
            versions[name] = version(name)
    return versions


def exchange_with_nodes(
    store: Any, nodes: int, own_versions: Mapping[str, str], timeout: float
) -> list[Node]:
    """Exchange versions with the other nodes, and measure clock offsets.

    Args:
        store: the store at the rendezvous endpoint, which all nodes use.
        nodes: number of nodes to wait for, with this one.
        own_versions: the versions of this node.
        timeout: seconds to wait for the other nodes.

    Returns:
        The nodes that joined in time, at most ``nodes``.
    """
    from datetime import timedelta

    from torch.distributed import DistStoreError

    store.set_timeout(timedelta(seconds=timeout))
    number = store.add("count", 1) - 1
    store.set(f"node/{number}", json.dumps([socket.gethostname(), dict(own_versions)]))
    try:
        if number == 0:
            store.set("clock/0", "[0.0, 0.0]")
            for other in range(1, nodes):
                store.wait([f"node/{other}"])
                store.set(f"turn/{other}", "")
                for ask in range(CLOCK_SAMPLES):
                    store.wait([f"ask/{other}/{ask}"])
                    store.set(f"answer/{other}/{ask}", repr(time.time()))
        else:
            store.wait([f"turn/{number}"])
            names = [f"{number}/{ask}" for ask in range(CLOCK_SAMPLES)]
            offsets = [_measure_clock_offset(store, name) for name in names]
            store.set(f"clock/{number}", json.dumps(min(offsets, key=lambda offset: offset[1])))
        store.wait([f"clock/{other}" for other in range(nodes)])
    except DistStoreError:
        pass  # some nodes did not join in time
    joined = [n for n in range(nodes) if store.check([f"node/{n}"])]
    clocks = {n: json.loads(store.get(f"clock/{n}")) for n in joined if store.check([f"clock/{n}"])}
    return [Node(*json.loads(store.get(f"node/{n}")), *clocks.get(n, ())) for n in joined]


def _measure_clock_offset(store: Any, name: str) -> tuple[float, float]:
    """Return this clock's offset to the first node's, and its uncertainty, in seconds."""
    start = time.time()
    store.set(f"ask/{name}", "")
    remote = float(store.get(f"answer/{name}"))
    end = time.time()
    return (start + end) / 2 - remote, (end - start) / 2
