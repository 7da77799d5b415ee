"""What is known of a node: facts, and how the texts among them are read.

What tools print is kept as they print it, and taken apart by functions of their own, so that tests
can give them what other machines have printed.  `weft.cluster.probes` gathers them,
`weft.cluster.node_checks` judges them.
"""

from __future__ import annotations

import platform
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

import weft

# For other nodes, and for devices at work: many on a busy machine take long.
WAIT_SECONDS = 180.0
TIMED_OUT = "no answer"  # what a tool has said that does not answer
# What is asked of every GPU; "reasons" has another name in drivers before 535.
ASKED = {
    "index": "index",
    "name": "name",
    "driver": "driver_version",
    "memory": "memory.total",
    "used": "memory.used",
    "celsius": "temperature.gpu",
    "watts": "power.draw",
    "sm": "clocks.sm",
    "most_sm": "clocks.max.sm",
    "reasons": "clocks_event_reasons.active",
    "ecc": "ecc.errors.uncorrected.volatile.total",
    "width": "pcie.link.width.current",
    "most_width": "pcie.link.width.max",
    "mig": "mig.mode.current",
}


@dataclass(frozen=True)
class Adapter:
    """One of InfiniBand's kind, by /sys; ``rdma_read``: EFA's own, on devices that can."""

    name: str
    driver: str = ""
    state: str = ""
    rate: str = ""
    rdma_read: bool = False


@dataclass(frozen=True)
class Folder:
    """A folder of the job's.  Rates in bytes/s; ``locks``: a second holder of its lock is refused;
    ``links``: it has hard links.  ``error``: why nothing could be tried."""

    key: str
    path: str
    kind: str = ""
    options: str = ""
    free: int = 0
    files: int = -1  # free inodes; -1: not counted there
    write: float = 0.0
    read: float = 0.0
    locks: bool = True
    links: bool = True
    error: str = ""


@dataclass(frozen=True)
class Store:
    """A place in an object store; ``once``: it refuses to put an object that is there already."""

    key: str
    url: str
    write: float = 0.0
    read: float = 0.0
    seconds: float = 0.0  # of a small put
    once: bool = True
    error: str = ""


@dataclass(frozen=True)
class Node:
    """What nodes tell each other.  ``ahead``: of the first one's clock, in seconds, give or take
    ``doubt``."""

    host: str
    versions: Mapping[str, str]
    ahead: float = 0.0
    doubt: float = 0.0


@dataclass(frozen=True)
class Measured:
    """Of one node; each tuple has a number of every device.

    ``busbw``: bytes/s of each in all-reduces, as nccl-tests reckons it; 0 of one device.
    ``pairs``: from, to, and bytes/s of a copy.  ``same``: whether products came out the same every
    time.  ``clocks``: what `weft.cluster.probes.nvidia` saw under load.  ``cpu_share``: of a CPU,
    the processor time that each process got of what its threads could use; other processes, or a
    control group's limit, had the rest.  ``error``: instead of all.
    """

    device: str = "cpu"
    nccl: tuple[int, ...] = ()
    flops: tuple[float, ...] = ()
    bandwidth: tuple[float, ...] = ()
    same: tuple[bool, ...] = ()
    busbw: float = 0.0
    right: bool = True  # the sum over ranks
    pairs: tuple[tuple[int, int, float], ...] = ()
    clocks: str = ""
    cpu_share: tuple[float, ...] = ()
    error: str = ""


@dataclass(frozen=True)
class Facts:
    """Of one node.  Texts are what tools have printed; None, an empty text or 0 is not known."""

    host: str = ""
    device: str = "cpu"  # that the job is to use
    nodes: int = 1  # that the job is to have, at most ...
    least_nodes: int = 1  # ... and at least
    weft: str = weft.__version__
    torch: str = ""
    cuda: str = ""  # that torch was built for
    python: str = platform.python_version()
    kernel: str = platform.release()
    cores: int = 0  # of the machine
    usable: int = 0  # of them by affinity
    quota: float = 0.0  # of them by the control group
    memory: int = 0
    available: int = 0
    limit: int = 0  # of the control group, in bytes
    shm: int = 0
    shm_free: int = 0
    memlock: int = -1  # -1: no limit
    nofile: int = -1
    clock_in_step: bool | None = None
    address: str = ""  # that this host's name resolves to
    interfaces: tuple[str, ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict)
    gpus: str = ""
    smi: str = ""  # its head, which has the newest CUDA of the driver
    topology: str = ""
    nvlinks: str = ""
    remapped: str = ""
    kernel_log: str | None = ""  # the driver's faults; None: it cannot be read
    device_files: int = 0  # of NVIDIA's driver, one a GPU
    modules: tuple[str, ...] = ()
    adapters: tuple[Adapter, ...] = ()
    libfabric: str = ""
    efa_provider: str = ""
    ofi_plugin: str = ""  # its version; '?': one of a version unknown
    folders: tuple[Folder, ...] = ()
    stores: tuple[Store, ...] = ()
    endpoint: str = ""  # where nodes are to meet
    meeting: str = ""  # '' nobody asked, else 'free', 'answers' or why not
    others: tuple[Node, ...] = ()
    measured: Measured | None = None

    @property
    def has_efa(self) -> bool:
        """Whether there are adapters of AWS's kind."""
        return any(one.driver == "efa" for one in self.adapters)


def gpus_in(text: str) -> list[dict[str, str]]:
    """The lines of `nvidia`, each by the names of `ASKED`."""
    rows = [[cell.strip() for cell in line.split(",")] for line in text.splitlines()]
    return [dict(zip(ASKED, row, strict=True)) for row in rows if len(row) == len(ASKED)]


def whole(text: str) -> int:
    """A number of `nvidia`'s; 0 where it has none ('[N/A]')."""
    return int(text) if text.isdigit() else 0


def release(text: str) -> tuple[int, ...]:
    """The first three numbers of a version: (535, 161, 8) of '535.161.08'."""
    return tuple(int(n) for n in re.findall(r"\d+", text)[:3])


def topology_in(text: str) -> dict[tuple[str, str], str]:
    """Of ``nvidia-smi topo -m`` how each pair of GPUs and adapters is joined: NV18, PIX, SYS."""
    lines = [re.sub(r"\x1b\[\d*m", "", line).split() for line in text.splitlines()]
    head = next((words for words in lines if words[:1] == ["GPU0"]), [])
    known = [word for word in head if re.fullmatch(r"(GPU|NIC)\d+|mlx\w+", word)]
    rows = [words for words in lines if words and words[0] in known and words != head]
    return {(row[0], name): how for row in rows for name, how in zip(known, row[1:], strict=False)}
