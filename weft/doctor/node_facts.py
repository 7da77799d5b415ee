"""Facts and findings about a node, and parsers for tool output.

Facts hold the unparsed output of tools other than NVML, so that tests can replay it.
`weft.doctor.probes` collects facts, `weft.doctor.node_checks` turns them into findings.  The
field names are those of ``weft doctor --json``.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial

from weft.monitor.nvml import Gpu, GpuState
from weft.version import __version__

# Timeout for other nodes and for the device benchmark, which takes long on a busy machine.
WAIT_SECONDS = 180.0


@dataclass(frozen=True)
class Adapter:
    """An RDMA network adapter, as /sys describes it.

    ``rdma_read``: an EFA device that supports RDMA read.  ``p2p``: the provider of GPU memory that
    Amazon's EFA driver names; empty: none, None: the driver does not say (it may use DMA-BUF).
    ``pci_path``: its directory in /sys, which shows the PCIe switches above it.
    """

    name: str
    driver: str = ""
    state: str = ""
    rate: str = ""
    rdma_read: bool = False
    p2p: str | None = None
    pci_path: str = ""


@dataclass(frozen=True)
class Directory:
    """A directory of the job; ``write`` and ``read`` in bytes/s.

    ``locks``: file locks exclude a second holder.  ``links``: the file system has hard links.
    ``renames``: files created and renamed per second, by one process.  ``layout``: on Lustre, the
    stripes of each component (`weft.checkpoint.lustre.parse_layout`).
    ``error``: why the probe failed.
    """

    key: str
    path: str
    kind: str = ""
    options: str = ""
    free: int = 0
    files: int = -1  # free inodes; -1: the file system does not count them
    write: float = 0.0
    read: float = 0.0
    locks: bool = True
    links: bool = True
    renames: float = 0.0
    layout: tuple[int, ...] = ()
    error: str = ""


@dataclass(frozen=True)
class ObjectStore:
    """A prefix in an object store; ``once``: conditional writes never overwrite."""

    key: str
    url: str
    write: float = 0.0
    read: float = 0.0
    seconds: float = 0.0  # of a small put
    once: bool = True
    error: str = ""


@dataclass(frozen=True)
class Node:
    """Facts that nodes exchange.

    ``clock_offset`` is relative to the first node's clock, and ``clock_uncertainty`` is its
    uncertainty, both in seconds.
    """

    host: str
    versions: Mapping[str, str]
    clock_offset: float = 0.0
    clock_uncertainty: float = 0.0


@dataclass(frozen=True)
class DeviceMeasurements:
    """Benchmark results of one node; each tuple has one value per device.

    ``bandwidth``: of memory, in bytes/s.  ``same``: repeated products are bitwise equal.
    ``busbw``: all-reduce bus bandwidth per device in bytes/s, as nccl-tests defines it; 0 with one
    device.  ``pairs``: source, destination, and bytes/s of a copy.  ``loaded``: all
    GPUs of the node under load.  ``cpu_share``: fraction of the CPU time that the
    threads of each process could use; other processes or a cgroup limit took the rest.
    ``error``: why there are no results.
    """

    device: str = "cpu"
    nccl: tuple[int, ...] = ()
    flops: tuple[float, ...] = ()
    bandwidth: tuple[float, ...] = ()
    same: tuple[bool, ...] = ()
    busbw: float = 0.0
    right: bool = True  # the sum over ranks
    has_nccl_tests: bool = False  # busbw and right are from nccl-tests
    pairs: tuple[tuple[int, int, float], ...] = ()
    loaded: tuple[Gpu, ...] = ()
    cpu_share: tuple[float, ...] = ()
    error: str = ""


@dataclass(frozen=True)
class DcgmResult:
    """Result of a test of DCGM's diagnostic.

    ``gpus``: indices of the GPUs.  ``status``: Pass, Fail, Warn or Skip.  ``severity``: DCGM's
    number for the first warning; 0: unknown.
    """

    test: str
    gpus: str
    status: str
    message: str = ""
    severity: int = 0


@dataclass(frozen=True)
class NetworkMeasurements:
    """Bandwidth between the nodes of a job, measured by their ranks together.

    ``pairs``: node, node, and bytes/s in each direction at once.  ``busbw``: all-reduce bus
    bandwidth per rank over all nodes in bytes/s; 0: not measured.  ``errors``: why pairs or nodes
    have no result.  ``nccl_logs``: NCCL's log of every rank of this node; empty on a CPU.
    """

    nodes: tuple[str, ...] = ()
    ranks_per_node: int = 0
    pairs: tuple[tuple[str, str, float], ...] = ()
    busbw: float = 0.0
    errors: tuple[str, ...] = ()
    nccl_logs: tuple[str, ...] = field(default=(), repr=False)


NO_GPUS = GpuState()


@dataclass(frozen=True)
class Facts:
    """Facts about one node; None, an empty string or 0 means unknown."""

    host: str = ""
    device: str = "cpu"  # type of device that the job uses
    nodes: int = 1  # maximum number of nodes of the job
    min_nodes: int = 1  # minimum number of nodes of the job
    weft: str = __version__
    torch: str = ""
    cuda: str = ""  # version for which torch was built
    python: str = platform.python_version()
    kernel: str = platform.release()
    cores: int = 0  # of the machine
    usable: int = 0  # cores in this process's affinity mask
    quota: float = 0.0  # cores that the cgroup allows
    memory: int = 0
    available: int = 0
    limit: int = 0  # bytes of memory that the cgroup allows
    shm: int = 0
    shm_free: int = 0
    memlock: int = -1  # -1: no limit
    nofile: int = -1
    is_clock_synchronized: bool | None = None
    address: str = ""  # to which this host's name resolves
    interfaces: tuple[str, ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict)
    gpu_state: GpuState = NO_GPUS
    kernel_log: str | None = ""  # lines with driver faults; None: not readable
    device_files: int = 0  # of NVIDIA's driver, one per GPU
    modules: tuple[str, ...] = ()
    adapters: tuple[Adapter, ...] = ()
    libfabric: str = ""
    efa_provider: str = ""
    ofi_plugin: str = ""  # version; '?': installed, of unknown version
    ofi_plugin_paths: tuple[str, ...] = ()  # all copies, by directory
    libfabric_paths: tuple[str, ...] = ()  # all copies of libfabric.so.1
    cuda_compat: tuple[str, ...] = ()  # libraries of the package cuda-compat
    efa_installer: str = ""  # version
    instance_type: str = ""  # of EC2, or of SageMaker with its prefix ml.
    is_sagemaker_toolkit: bool = False
    uverbs: int = 0  # device files of RDMA adapters
    huge_pages: int = -1  # of the default size; -1: unknown
    huge_pages_free: int = -1
    directories: tuple[Directory, ...] = ()
    released: tuple[int, int] = (0, 0)  # files of data.path: only in S3, and examined (on Lustre)
    stores: tuple[ObjectStore, ...] = ()
    endpoint: str = ""  # of the rendezvous
    rendezvous_status: str = ""  # endpoint: '' not probed, 'free', 'answers', or the error
    joined_nodes: tuple[Node, ...] = ()
    measured: DeviceMeasurements = DeviceMeasurements()
    dcgm: tuple[DcgmResult, ...] = ()
    dcgm_error: str = ""  # why DCGM's diagnostic, which is installed, has no results
    network: NetworkMeasurements = NetworkMeasurements()

    @property
    def has_efa(self) -> bool:
        """True if the node has EFA adapters."""
        return any(adapter.driver == "efa" for adapter in self.adapters)

    @property
    def gpus(self) -> tuple[Gpu, ...]:
        """The GPUs of the node, also those that this process may not use."""
        return self.gpu_state.gpus


# --------------------------------------------------------------------------- findings

SEVERITIES = ("ok", "note", "warning", "bad")


@dataclass(frozen=True)
class Finding:
    """Result of one check: an observation, and a remedy unless all is well.

    A *bad* finding makes a run fail, hang, compute wrong numbers, or reach less than half the speed
    of its hardware: such a node does not train (`weft.doctor.doctor.preflight`).  A *warning* may
    cost speed, or a later run; a *note* is information.  Checks skip facts that are unknown.

    ``check``: displayed name of the check; `weft.doctor.node_checks.run_checks` sets it.
    """

    check: str = field(default="", kw_only=True)
    severity: str
    observation: str
    remedy: str = ""


ok, note, warning, bad = (partial(Finding, severity) for severity in SEVERITIES)

Check = Callable[[Facts], Iterator[Finding]]
