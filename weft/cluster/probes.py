"""How the facts of a node are gathered.

Everything here is thin, and gets on with whatever is missing: a tool or file that is not there
gives an empty text.
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
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import weft
from weft.checkpoint.storage import create, is_remote, open_folder, put_new, read_range, remove
from weft.cluster.node_facts import ASKED, TIMED_OUT, Adapter, Facts, Folder, Node, Store
from weft.config.errors import WeftError

ASKS, LINGER_SECONDS = 5, 1.0  # for the time; and for others to read what the store has
TOOL_SECONDS = 30.0  # for a tool to answer; a broken driver lets nvidia-smi wait for ever
OLD_REASONS = "clocks_throttle_reasons.active"
REMAPPED = "gpu_bus_id,remapped_rows.pending,remapped_rows.failure"
# Variables that are looked at; of others not even the name is taken, for some are secrets.
PREFIXES = ("NCCL_", "FI_", "RDMAV_", "OFI_NCCL_", "GLOO_", "TORCH_NCCL_", "UCX_")
NAMES = ("CUDA_VISIBLE_DEVICES", "CUDA_LAUNCH_BLOCKING", "OMP_NUM_THREADS", "MALLOC_ARENA_MAX")
PLUGINS = ("/opt/amazon/ofi-nccl", "/opt/aws-ofi-nccl", "/usr/local", "/usr")
LIBRARIES = ("", "lib", "lib64", f"lib/{platform.machine()}-linux-gnu")


def collect_facts() -> Facts:
    """All that needs neither a job's folders nor its devices at work."""
    told = re.findall(r"(\w+):\s+(\d+) kB", content(Path("/proc/meminfo")))
    sizes = {name: int(number) * 1024 for name, number in told}
    shm = shutil.disk_usage("/dev/shm") if os.path.isdir("/dev/shm") else None
    limit, quota = control_group(Path("/proc/self/cgroup"), Path("/sys/fs/cgroup"))
    address = ""
    with suppress(OSError):
        address = socket.gethostbyname(socket.gethostname())
    return Facts(
        host=socket.gethostname(),
        torch=versions().get("torch", ""),
        cuda=cuda_of_torch(),
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
        clock_in_step=clock_in_step(),
        address=address,
        interfaces=tuple(name for _, name in socket.if_nameindex()),
        variables={k: v for k, v in os.environ.items() if k.startswith(PREFIXES) or k in NAMES},
        gpus=nvidia(),
        smi=run("nvidia-smi"),
        topology=run("nvidia-smi", "topo", "-m"),
        nvlinks=run("nvidia-smi", "nvlink", "-s"),
        remapped=run("nvidia-smi", f"--query-remapped-rows={REMAPPED}", "--format=csv,noheader"),
        kernel_log=driver_faults(),
        device_files=len(list(Path("/dev").glob("nvidia[0-9]*"))),
        modules=tuple(
            name for name in ("nvidia_peermem", "gdrdrv") if Path("/sys/module", name).exists()
        ),
        adapters=tuple(adapters(Path("/sys/class/infiniband"))),
        libfabric=run("fi_info", "--version"),
        efa_provider=run("fi_info", "-p", "efa"),
        ofi_plugin=plugin([*os.environ.get("LD_LIBRARY_PATH", "").split(":"), *PLUGINS]),
    )


def cuda_of_torch() -> str:
    """The CUDA that torch was built for, without importing it, for that may fail."""
    found = importlib.util.find_spec("torch")
    path = Path(found.origin).with_name("version.py") if found and found.origin else None
    text = path.read_text("utf-8") if path and path.is_file() else ""
    match = re.search(r"^cuda\b.*= '([\d.]+)'", text, re.MULTILINE)
    return match[1] if match else ""


def content(path: Path) -> str:
    """What a file of the kernel's has; empty if it is not there, or cannot be read."""
    with suppress(OSError):
        return path.read_text("utf-8", "surrogateescape")
    return ""


def driver_faults() -> str | None:
    """The lines of the kernel's log in which NVIDIA's driver notes a fault; None: not readable."""
    log = run("dmesg")
    return "\n".join(line for line in log.splitlines() if "NVRM: Xid" in line) if log else None


def run(*command: str) -> str:
    """What a tool prints, if it is there and succeeds."""
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=TOOL_SECONDS,
            check=False,
        )
    except OSError:
        return ""
    except subprocess.TimeoutExpired:
        return TIMED_OUT
    return done.stdout if done.returncode == 0 else ""


def nvidia() -> str:
    """`ASKED` of every GPU, as comma-separated lines."""
    for reasons in (ASKED["reasons"], OLD_REASONS):
        names = ",".join((ASKED | {"reasons": reasons}).values())
        if said := run("nvidia-smi", f"--query-gpu={names}", "--format=csv,noheader,nounits"):
            return said
    return ""


def control_group(own: Path, root: Path) -> tuple[int, float]:
    """The memory in bytes and the cores that this process's control groups leave it; the smallest
    on the way up, 0 where there is no limit.  Both versions of control groups.

    Args:
        own: /proc/self/cgroup.
        root: where the groups are mounted.
    """
    memory, cores = [], []
    for line in content(own).splitlines():
        _, kinds, path = line.split(":", 2)
        tops = [root / kind for kind in kinds.split(",")] if kinds else [root, root / "unified"]
        for top in tops:
            for above in (Path(path), *Path(path).parents):
                here = top / str(above).lstrip("/")
                memory += _numbers(here / "memory.max") + _numbers(here / "memory.limit_in_bytes")
                quota = _numbers(here / "cpu.max") or [
                    *_numbers(here / "cpu.cfs_quota_us"),
                    *_numbers(here / "cpu.cfs_period_us"),
                ]
                cores += [quota[0] / quota[1]] if len(quota) == 2 else []
    return min((n for n in memory if n < 2**60), default=0), min(cores, default=0.0)


def _numbers(path: Path) -> list[int]:
    return [int(word) for word in content(path).split() if word.isdigit()]


def clock_in_step() -> bool | None:
    """Whether the kernel's clock follows one outside (NTP, PTP); None: it does not say."""
    adjtimex = getattr(ctypes.CDLL(None), "adjtimex", None)
    if adjtimex is None:
        return None
    state = adjtimex(ctypes.create_string_buffer(512))  # all zeros ask, and change nothing
    time_error = 5  # of <sys/timex.h>
    return None if state < 0 else state != time_error


def adapters(root: Path) -> Iterator[Adapter]:
    """The first port of each."""
    for one in sorted(root.iterdir()) if root.is_dir() else []:
        port = one / "ports" / "1"
        state, rate = (content(port / name).strip() for name in ("state", "rate"))
        link = one / "device" / "driver"
        driver = link.resolve().name if link.is_symlink() else ""
        read = (port / "hw_counters" / "rdma_read_bytes").exists()
        yield Adapter(one.name, driver, state, rate, read)


def plugin(folders: Sequence[str]) -> str:
    """The version of the plug-in that lets NCCL speak with EFA."""
    for folder in filter(None, folders):
        for path in (p for part in LIBRARIES for p in Path(folder, part).glob("*.so*")):
            if path.name.startswith(("libnccl-net", "libnccl-ofi")):
                found = re.search(rb"aws-ofi-nccl (\d+\.\d+\.\d+)", path.read_bytes())
                return found[1].decode() if found else "?"
    return ""


# --------------------------------------------------------------------------- folders, stores


def mount_of(path: Path, mounts: str) -> tuple[str, str]:
    """Kind and options of the file system that has a path, by /proc/self/mountinfo."""
    best = ("", "", "")
    for line in mounts.splitlines():
        left, _, right = line.partition(" - ")
        # A space is \040.
        point = re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), left.split()[4])
        if path.is_relative_to(point) and len(point) >= len(best[0]):
            kind, _, *options = right.split()
            best = (point, kind, ",".join(options))
    return best[1], best[2]


def write_and_read(path: Path, size: int) -> tuple[float, float, str]:
    """Bytes/s of writing a new file of so many bytes, and of reading it from the disk or store;
    and what is wrong with what was read."""
    written = os.urandom(1 << 20) * (size >> 20)
    began = time.perf_counter()
    with create(path, size) as file:
        file.write(written)
    wrote = time.perf_counter() - began
    if not is_remote(path):
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    began = time.perf_counter()
    found = read_range(path, 0, size)
    took = time.perf_counter() - began
    wrong = "" if bytes(found) == written else "what was read is not what was written"
    return size / wrote, size / took, wrong


def try_folder(key: str, folder: Path, size: int) -> Folder:
    """Write and read a file in a folder, or in the nearest one that there is; nothing stays."""
    there = next(path for path in (folder, *folder.parents) if os.path.isdir(path)).resolve()
    kind, options = mount_of(there, content(Path("/proc/self/mountinfo")))
    try:
        with tempfile.TemporaryDirectory(prefix=".weft-doctor-", dir=there) as own:
            path = Path(own, "file")
            write, read, error = write_and_read(path, size)
            usage = os.statvfs(there)
            return Folder(
                key,
                str(folder),
                kind,
                options,
                free=usage.f_bavail * usage.f_frsize,
                files=usage.f_favail if usage.f_files else -1,
                write=write,
                read=read,
                locks=locks(path),
                links=links(path),
                error=error,
            )
    except OSError as error:
        return Folder(key, str(folder), kind, options, error=f"cannot be written: {error.strerror}")


def locks(path: Path) -> bool:
    """Whether the lock by which a run owns its folder keeps a second one out."""
    with path.open("a") as one, path.open("a") as other:
        try:
            fcntl.flock(one, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False  # there are none
        with suppress(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return False
    return True


def links(path: Path) -> bool:
    """Whether a file can have two names; a checkpoint is claimed so (`put_new`)."""
    with suppress(OSError):
        os.link(path, path.with_name("link"))
        return True
    return False


def try_store(key: str, url: str, size: int) -> Store:
    """Write and read an object, as checkpoints are; nothing stays."""
    try:
        place = open_folder(url) / f".weft-doctor-{socket.gethostname()}-{os.getpid()}"
        try:
            write, read, wrong = write_and_read(place / "large", size)
            began = time.perf_counter()
            put_new(place / "small", b"first")
            small = time.perf_counter() - began
            once = False
            try:
                put_new(place / "small", b"second")
            except FileExistsError:
                once = True
        finally:
            remove(place)
    except WeftError as error:
        return Store(key, url, error=str(error))
    except Exception as error:  # whatever the client of the store raises
        return Store(key, url, error=f"{type(error).__name__}: {error.__cause__ or error}")
    return Store(key, url, write, read, small, once, wrong)


# --------------------------------------------------------------------------- other nodes


def try_endpoint(endpoint: str) -> str:
    """Whether the nodes' meeting place could be here ('free'), is there ('answers'), or why not."""
    host, _, port = endpoint.rpartition(":")
    try:
        address = socket.getaddrinfo(host or "localhost", int(port), type=socket.SOCK_STREAM)[0]
    except (OSError, ValueError) as error:
        return f"{error}"
    with closing(socket.socket(address[0], socket.SOCK_STREAM)) as one:
        one.settimeout(3)
        with suppress(OSError):
            one.connect(address[4])
            return "answers"
    with closing(socket.socket(address[0], socket.SOCK_STREAM)) as one:
        try:
            one.bind(address[4])
        except OSError:
            return "no answer, and it is no free port of this host"
    return "free"


def versions() -> dict[str, str]:
    """What should be the same on every node."""
    found = {"weft": weft.__version__, "python": platform.python_version()}
    for name in ("torch", "numpy"):
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def meet(endpoint: str, nodes: int, mine: Mapping[str, str], limit: float) -> list[Node]:
    """Find the other nodes that ask the same, and compare clocks with the first that came.

    Args:
        mine: the versions of this one.
        limit: seconds to wait for the others.

    Returns:
        All of them; fewer than ``nodes`` if the others did not come in time.

    Raises:
        WeftError: if nobody answers at the endpoint.
    """
    from datetime import timedelta

    from torch.distributed import DistStoreError

    from weft.cluster.rendezvous import find_store

    store = find_store(endpoint, "doctor", (1, nodes), limit)
    store.set_timeout(timedelta(seconds=limit))
    number = store.add("count", 1) - 1
    store.set(f"node/{number}", json.dumps([socket.gethostname(), dict(mine)]))
    try:
        if number == 0:
            store.set("ahead/0", "[0.0, 0.0]")
            for other in range(1, nodes):
                store.wait([f"node/{other}"])
                store.set(f"turn/{other}", "")
                for ask in range(ASKS):
                    store.wait([f"ask/{other}/{ask}"])
                    store.set(f"answer/{other}/{ask}", repr(time.time()))
        else:
            store.wait([f"turn/{number}"])
            asked = [_ask(store, f"{number}/{ask}") for ask in range(ASKS)]
            store.set(f"ahead/{number}", json.dumps(min(asked, key=lambda one: one[1])))
        store.wait([f"ahead/{other}" for other in range(nodes)])
    except DistStoreError:
        pass  # not all came: those that did are told
    came = [n for n in range(nodes) if store.check([f"node/{n}"])]
    clocks = {n: json.loads(store.get(f"ahead/{n}")) for n in came if store.check([f"ahead/{n}"])}
    found = [Node(*json.loads(store.get(f"node/{n}")), *clocks.get(n, ())) for n in came]
    time.sleep(LINGER_SECONDS)  # the store may be in this process, and others still read
    return found


def _ask(store: Any, name: str) -> tuple[float, float]:
    """How far this clock is ahead of the first node's, give or take what."""
    began = time.time()
    store.set(f"ask/{name}", "")
    theirs = float(store.get(f"answer/{name}"))
    ended = time.time()
    return (began + ended) / 2 - theirs, (ended - began) / 2
