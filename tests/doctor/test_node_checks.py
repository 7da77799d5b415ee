"""Run every node check on recorded facts of healthy and unhealthy machines; needs no GPU."""

from __future__ import annotations

import platform
import re
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from weft.config.host_limits import read_cgroup_limits
from weft.doctor.network_probes import find_ofi_plugin, list_adapters
from weft.doctor.node_checks import CHECKS, run_checks
from weft.doctor.node_facts import (
    Adapter,
    DcgmResult,
    DeviceMeasurements,
    Directory,
    Facts,
    NetworkMeasurements,
    Node,
    ObjectStore,
)
from weft.doctor.probes import find_mount
from weft.doctor.variable_checks import VARIABLES, Variable, check_variables, match_interfaces
from weft.monitor.nvml import TIMED_OUT, Gpu, GpuState

GIB = 2**30

# An idle DGX H100: a GPU and a network adapter share a PCIe switch.
ROOT = "/sys/devices/pci0000:{n}5/0000:{n}5:01.0"
GPUS = tuple(
    Gpu(
        n,
        "NVIDIA H100 80GB HBM3",
        f"{ROOT.format(n=n)}/0000:{n}6:00.0/0000:{n}7:00.0",
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
        links=tuple("X" if other == n else "NV18" for other in range(8)),
    )
    for n in range(8)
)
LOADED = tuple(replace(gpu, clock_reasons=0) for gpu in GPUS)
STATE = GpuState("580.65.06", (13, 0), GPUS)

FI_INFO = "provider: efa\n    fabric: efa\n    domain: rdmap0s6-rdm\n    version: 122.0\n"

MEASURED = DeviceMeasurements(
    device="cuda",
    nccl=(2, 29, 2),
    flops=(740e12,) * 8,
    bandwidth=(3.1e12,) * 8,
    same=(True,) * 8,
    busbw=355e9,
    pairs=((0, 1, 380e9), (1, 2, 379e9)),
    loaded=LOADED,
)
INFINIBAND = tuple(
    Adapter(
        f"mlx5_{n}",
        "mlx5_core",
        "4: ACTIVE",
        "400 Gb/sec (4X NDR)",
        pci_path=f"{ROOT.format(n=n)}/0000:{n}8:00.0",
    )
    for n in range(8)
)
EFA = tuple(
    Adapter(
        f"rdmap{n}s0",
        "efa",
        "4: ACTIVE",
        "100 Gb/sec (4X EDR)",
        rdma_read=True,
        pci_path=f"{ROOT.format(n=n // 4)}/0000:{n // 4}8:00.0",
    )
    for n in range(32)
)
RUN = Directory("run.dir", "/shared/run", "lustre", "rw,flock", 10**14, 10**9, 2e9, 3e9)

# One of two DGX H100 nodes with InfiniBand.
HEALTHY = Facts(
    host="a",
    device="cuda",
    nodes=2,
    min_nodes=2,
    torch="2.13.0+cu130",
    cuda="13.0",
    cores=224,
    usable=224,
    memory=2048 * GIB,
    available=2000 * GIB,
    shm=1024 * GIB,
    shm_free=1024 * GIB,
    nofile=65536,
    is_clock_synchronized=True,
    address="10.0.0.1",
    interfaces=("lo", "eth0", "ib0", "docker0"),
    variables={"NCCL_SOCKET_IFNAME": "^docker,lo,veth", "NCCL_DEBUG": "WARN"},
    gpu_state=STATE,
    device_files=8,
    modules=("nvidia_peermem",),
    adapters=INFINIBAND,
    directories=(RUN,),
    endpoint="a:29400",
    rendezvous_status="free",
    joined_nodes=(Node("a", {"torch": "2.13.0"}), Node("b", {"torch": "2.13.0"}, 0.002, 0.001)),
    measured=MEASURED,
)
AWS = replace(
    HEALTHY,
    adapters=EFA,
    efa_provider=FI_INFO,
    libfabric="fi_info: 1.22.0amzn1.0\nlibfabric: 1.22.0amzn1.0",
    ofi_plugin="1.13.2",
)


def gpus(**changes: Any) -> tuple[Gpu, ...]:
    """Return the GPUs with changed values of GPU 3."""
    return (*GPUS[:3], replace(GPUS[3], **changes), *GPUS[4:])


def state(**changes: Any) -> dict[str, Any]:
    return {"gpu_state": replace(STATE, **changes)}


NO_GPUS = state(gpus=())


def measured(**changes: Any) -> dict[str, Any]:
    return {"measured": replace(MEASURED, **changes)}


def directory_facts(**changes: Any) -> dict[str, Any]:
    return {"directories": (replace(RUN, **changes),)}


def store_facts(**changes: Any) -> dict[str, Any]:
    remote = ObjectStore("checkpoint.dir", "s3://bucket/run", 3e8, 5e8, 0.02)
    return {"stores": (replace(remote, **changes),)}


def joined_nodes(*nodes: Node) -> dict[str, Any]:
    return {"joined_nodes": nodes}


def measured_network(**changes: Any) -> dict[str, Any]:
    return {"network": NetworkMeasurements(nodes=("a", "b"), ranks_per_node=8, **changes)}


def slow_node(name: str, share: float) -> tuple[tuple[str, str, float], ...]:
    """Return the rates of three nodes of which one is slow, so that most pairs are."""
    pairs = (("a", "b"), ("a", "c"), ("b", "c"))
    return tuple((*pair, 50e9 * (share if name in pair else 1)) for pair in pairs)


A = Node("a", {"torch": "2.13.0"})
EFA_ONLY: dict[str, Any] = {"adapters": EFA}
P5: dict[str, Any] = {"adapters": EFA, "instance_type": "p5.48xlarge"}
SOCKET = "node:7:9 [0] NCCL INFO Using network Socket\n"
SLOW_PAIR = tuple(
    (a, b, 10e9 if (a, b) == ("a", "d") else 50e9) for a, b in ("ab", "ac", "ad", "bc", "bd", "cd")
)
# Name of a check, the changes to HEALTHY, and the expected level and message.
CASES: tuple[tuple[str, dict[str, Any], str, str], ...] = (
    ("versions", state(driver="560.35.03"), "bad", "too old"),
    ("versions", {"cuda": ""}, "bad", "without CUDA"),
    ("versions", state(cuda=(12, 8)), "note", "supports CUDA 12.8"),
    ("versions", {"torch": "", "cuda": ""}, "bad", "torch is missing"),
    ("nccl", measured(nccl=(2, 28, 3)), "warning", "resiliency"),
    ("nccl", measured(nccl=(2, 18, 1)), "warning", "corrupt"),
    ("devices", state(gpus=(), error=TIMED_OUT), "bad", "does not answer"),
    ("devices", NO_GPUS | {"measured": DeviceMeasurements()}, "bad", "8 GPUs have device files"),
    ("devices", NO_GPUS, "note", "8 GPUs, but no NVML"),
    ("devices", state(gpus=gpus(error="GPU is lost")), "bad", "GPU 3: GPU is lost"),
    (
        "devices",
        NO_GPUS | {"device_files": 0, **measured(flops=(), error="no CUDA")},
        "bad",
        "no GPU",
    ),
    ("devices", {"device_files": 9}, "note", "of 9 with device files"),
    ("devices", state(gpus=gpus(name="NVIDIA A10G")), "warning", "A10G, NVIDIA H100"),
    ("devices", state(gpus=gpus(used=40112 * 2**20)), "warning", "GPU 3: 40,112 MiB"),
    ("devices", state(gpus=gpus(is_mig=True)), "note", "GPU 3 is partitioned"),
    ("devices", measured(error="process 3: CUDA error"), "bad", "process 3: CUDA error"),
    ("health", state(gpus=gpus(ecc_errors=2)), "bad", "GPU 3: 2 uncorrected"),
    ("health", state(gpus=gpus(is_remap_failed=True)), "bad", "remapping a memory row failed"),
    ("health", state(gpus=gpus(is_remap_pending=True)), "warning", "pending"),
    (
        "health",
        {"kernel_log": "[1.2] NVRM: Xid (PCI:0000:3b:00): 79, pid=1, GPU has fallen off the bus."},
        "bad",
        "Xid 79, fell off the bus",
    ),
    (
        "health",
        {"kernel_log": "[1.2] NVRM: Xid (PCI:0000:3b:00): 31, pid=2096908, name=python"},
        "warning",
        "Xid 31",
    ),
    ("DCGM", {"dcgm": (DcgmResult("pcie", "3", "Fail", "x", 2),)}, "bad", "pcie, GPU 3: x"),
    ("clocks", measured(loaded=gpus(clock_reasons=0x48, celsius=91)), "bad", "3 (91 C)"),
    ("clocks", measured(loaded=gpus(clock_reasons=0x80)), "bad", "power brake"),
    ("clocks", measured(loaded=gpus(clock_reasons=0x20)), "warning", "thermal"),
    ("clocks", measured(loaded=gpus(clock_reasons=0x4)), "note", "power cap"),
    ("clocks", measured(loaded=gpus(pcie_width=8)), "warning", "8 of 16 PCIe lanes"),
    (
        "clocks",
        state(gpus=gpus(clock_reasons=8)) | {"measured": DeviceMeasurements()},
        "bad",
        "slowdown",
    ),
    ("speed", measured(same=(True,) * 7 + (False,)), "bad", "device 7: repeated"),
    ("speed", measured(flops=(300e12,) * 8), "bad", "38% and 93%"),
    ("speed", measured(bandwidth=(2e12,) * 8), "warning", "93% and 60%"),
    ("speed", measured(flops=(740e12,) * 7 + (655e12,)), "warning", "device 7: matmul"),
    (
        "topology",
        state(gpus=tuple(replace(gpu, links=("X", "SYS")) for gpu in GPUS)),
        "bad",
        "these GPUs have NVLink",
    ),
    (
        "topology",
        state(gpus=gpus(links=("NV12", "NV18", "NV18", "X"))),
        "warning",
        "the links differ",
    ),
    (
        "topology",
        state(gpus=gpus(pci_path="/sys/devices/pci0000:35/0000:35:02.0/x")),
        "note",
        "same PCIe",
    ),
    (
        "topology",
        state(gpus=gpus(inactive_links=(7,))),
        "warning",
        "GPU 3: NVLink 7 is inactive",
    ),
    (
        "topology",
        state(gpus=gpus(link_recoveries=((4, 12),))),
        "note",
        "GPU 3: NVLink 4 recovered from errors 12 times",
    ),
    ("all-reduce", measured(right=False), "bad", "sum over ranks is wrong"),
    ("all-reduce", measured(busbw=250e9), "warning", "69% of the link"),
    ("all-reduce", measured(busbw=21e9), "bad", "6% of the link"),
    ("peer copies", measured(pairs=((2, 3, 40e9), (3, 4, 380e9))), "warning", "GPU 2 to 3"),
    ("rdma", {"adapters": ()}, "warning", "over TCP"),
    (
        "rdma",
        {"adapters": (*INFINIBAND[:7], replace(INFINIBAND[7], state="1: DOWN"))},
        "warning",
        "not active: mlx5_7",
    ),
    ("rdma", {"modules": ()}, "note", "nvidia_peermem"),
    ("efa", {"adapters": EFA, "libfabric": "libfabric: 1.22"}, "bad", "no efa provider"),
    ("efa", {"adapters": EFA}, "warning", "no fi_info"),
    ("efa", {"adapters": EFA, "efa_provider": FI_INFO}, "warning", "plug-in for EFA"),
    (
        "efa",
        {"adapters": tuple(replace(finding, rdma_read=False) for finding in EFA)},
        "warning",
        "lack RDMA read",
    ),
    (
        "memory",
        {"limit": 64 * GIB},
        "warning",
        "limited to 64 GiB by the cgroup; the GPUs have 637 GiB",
    ),
    ("memory", NO_GPUS | {"available": 100 * GIB}, "warning", "100 GiB available"),
    ("shared memory", {"shm": 2**26, "shm_free": 2**26}, "bad", "0.0625 GiB free"),
    ("shared memory", {"shm": 2**31, "shm_free": 2**31}, "warning", "2 GiB free"),
    ("limits", {"memlock": 8 << 20}, "bad", "8,192 KiB"),
    ("limits", {"nofile": 1024}, "warning", "1,024 open files"),
    ("cores", {"usable": 16}, "warning", "16 of 224"),
    ("cores", {"quota": 4.0}, "bad", "4 of 224 usable (limited by the cgroup)"),
    ("time", {"is_clock_synchronized": False}, "warning", "not synchronized"),
    ("time", {"is_clock_synchronized": False, "nodes": 1}, "note", "not synchronized"),
    ("directories", directory_facts(error="cannot be written: Read-only"), "bad", "Read-only"),
    ("directories", directory_facts(locks=False), "bad", "no file locks"),
    ("directories", directory_facts(options="rw,localflock"), "warning", "on this node only"),
    ("directories", directory_facts(links=False), "bad", "no hard links"),
    ("directories", directory_facts(free=GIB), "warning", "only 1 GiB"),
    ("directories", directory_facts(files=12), "warning", "and 12 inodes"),
    ("directories", directory_facts(kind="ext4"), "bad", "each node has its own"),
    ("directories", directory_facts(kind="ext4", key="data.cache_dir"), "warning", "has its own"),
    (
        "directories",
        directory_facts(key="checkpoint.local_dir"),
        "warning",
        "is a network file system",
    ),
    ("directories", directory_facts(write=50e6), "warning", "takes 32 min"),
    ("directories", {**directory_facts(kind="tmpfs"), "nodes": 1}, "note", "in memory"),
    ("stores", store_facts(error="ClientError: 403"), "bad", "ClientError: 403"),
    ("stores", store_facts(once=False), "bad", "ignores conditional writes"),
    ("rendezvous", {"rendezvous_status": "Name or service not known"}, "bad", "not known"),
    ("rendezvous", {"address": "127.0.1.1"}, "bad", "a resolves to 127.0.1.1"),
    ("nodes", joined_nodes(A), "bad", "1 of 2 joined"),
    ("nodes", {**joined_nodes(A), "min_nodes": 1}, "note", "1 of 2 joined"),
    ("nodes", joined_nodes(A, Node("b", {"torch": "2.12.0"})), "bad", "b has torch 2.12.0"),
    ("nodes", joined_nodes(A, Node("b", A.versions, 3.5, 0.1)), "bad", "by 3500.0 ms"),
    ("variables", {"variables": {"NCCL_SOCKET_IFNAME": "en"}}, "bad", "none of lo"),
    ("variables", {"variables": {"GLOO_SOCKET_IFNAME": "ens5"}}, "bad", "not one of lo"),
    ("variables", {"variables": {"GLOO_SOCKET_IFNAME": "lo"}}, "bad", "other nodes"),
    ("variables", {"variables": {"OMP_NUM_THREADS": "300"}}, "warning", "224 cores"),
    ("variables", {"variables": {"NCCL_IB_DISABLE": "1"}}, "bad", "TCP"),
    ("variables", {"variables": {"NCCL_SOCKET_IFNAME": "^docker,eth1"}}, "warning", "excludes"),
    ("variables", {**EFA_ONLY, "variables": {"NCCL_NET_PLUGIN": "ofi"}}, "note", "alone"),
    ("efa", {"instance_type": "p5.48xlarge", "adapters": ()}, "bad", "none of the 32"),
    ("efa", {"instance_type": "p5.48xlarge", "adapters": EFA[:8]}, "warning", "8 of the 32"),
    ("efa", {**P5, "uverbs": 0}, "bad", "0 device files"),
    ("efa", {**P5, "uverbs": 31}, "warning", "31 device files"),
    ("efa", {"adapters": (replace(EFA[0], p2p=""),)}, "note", "no provider of GPU memory"),
    ("efa", {**EFA_ONLY, "ofi_plugin_paths": ("/env/lib", "/opt/x")}, "warning", "/env/lib, /opt"),
    ("efa", {**EFA_ONLY, "libfabric_paths": ("/usr/a", "/opt/b")}, "warning", "copies of libfab"),
    ("efa", {**EFA_ONLY, "cuda_compat": ("/usr/local/cuda/compat",)}, "warning", "cuda-compat"),
    ("efa", {**EFA_ONLY, "huge_pages": 0}, "note", "no huge pages"),
    ("efa", {**EFA_ONLY, "huge_pages": 9, "huge_pages_free": 0}, "note", "all 9 huge pages"),
    ("versions of EFA", {**EFA_ONLY, "efa_installer": "1.28.0"}, "bad", "cuda-sync-memops"),
    ("transport", measured_network(nccl_logs=(SOCKET,)), "bad", "although the node has InfiniBand"),
    ("network", measured_network(errors=("node b did not answer",)), "bad", "node b did not"),
    ("network", measured_network(pairs=slow_node("b", 0.3)), "bad", "node b is slow"),
    ("network", measured_network(pairs=slow_node("b", 0.7)), "warning", "70% of the usual"),
    ("network", measured_network(pairs=SLOW_PAIR), "bad", "a and d: 10 GB/s, 20% of"),
    ("network", {**P5, **measured_network(pairs=(("a", "b", 1e9),))}, "bad", "0% of the 400"),
    ("network", {**P5, **measured_network(pairs=(("a", "b", 1e11),))}, "warning", "25% of the"),
)


@pytest.mark.parametrize(("check", "changes", "severity", "words"), CASES)
def test_examine_faulty_node_finds_the_fault(
    check: str, changes: dict[str, Any], severity: str, words: str
) -> None:
    findings = list(CHECKS[check](replace(HEALTHY, **changes)))
    fitting = [
        finding
        for finding in findings
        if finding.severity == severity and words in finding.observation
    ]
    assert fitting, findings
    assert all(finding.remedy for finding in fitting)


def test_remedy_of_few_open_files_works_below_any_hard_limit() -> None:
    (finding,) = CHECKS["limits"](replace(HEALTHY, nofile=1024))
    command, _, _ = finding.remedy.partition(";")
    script = f"ulimit -Sn 512; ulimit -Hn 3000; {command} && ulimit -n"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "3000\n"


def test_checks_each_have_a_test_case() -> None:
    assert {check for check, *_ in CASES} == set(CHECKS)


@pytest.mark.parametrize("facts", [HEALTHY, AWS], ids=["InfiniBand", "EFA"])
def test_examine_healthy_node_is_all_ok(facts: Facts) -> None:
    facts = replace(facts, **store_facts())
    findings = run_checks(facts)
    assert {finding.severity for finding in findings} == {"ok"}, [
        x for x in findings if x.severity != "ok"
    ]
    silent = {name for name, check in CHECKS.items() if not list(check(facts))}
    measured_by_option = {"DCGM", "transport", "network"}
    assert silent == measured_by_option | (set() if facts.has_efa else {"efa", "versions of EFA"})
    assert not any("cgroup" in finding.observation for finding in findings)


def test_examine_unknown_facts_are_not_judged() -> None:
    """A container may have no /proc, tools or devices."""
    assert {finding.severity for finding in run_checks(Facts(torch="2.13.0"))} == {"ok"}


def test_examine_nonfatal_driver_error_is_a_warning() -> None:
    """A fault that NVIDIA does not call fatal is reported, not hidden."""
    recorded = "[1.2] NVRM: Xid (PCI:0000:3b:00): 31, pid=2096908, name=python"
    (one,) = CHECKS["health"](replace(HEALTHY, kernel_log=recorded))
    assert one.severity == "warning"
    (one,) = CHECKS["health"](replace(HEALTHY, kernel_log=None))
    assert "no memory errors, driver faults unknown" in one.observation


def test_examine_values_unknown_to_nvml_are_not_judged() -> None:
    unknown = replace(STATE, gpus=tuple(Gpu(g.index, g.name, g.pci_path) for g in GPUS))
    findings = run_checks(replace(HEALTHY, gpu_state=unknown, **measured(loaded=())))
    assert {finding.severity for finding in findings} == {"ok"}


def test_examine_slow_cpu_is_not_bad() -> None:
    slow = DeviceMeasurements(flops=(1e9,), bandwidth=(1e9,), same=(True,), busbw=1e6)
    facts = Facts(device="cpu", torch="2.13.0", cores=2, usable=2, measured=slow)
    assert {finding.severity for finding in run_checks(facts)} == {"ok", "note"}


@pytest.mark.parametrize(("share", "severity"), [(0.97, "ok"), (0.8, "ok"), (0.31, "note")])
def test_examine_speed_of_a_busy_machine_is_not_judged(share: float, severity: str) -> None:
    """Communication inside a busy machine may be slow."""
    local = DeviceMeasurements(
        flops=(9e9, 9e9), bandwidth=(9e9, 9e9), same=(True, True), busbw=9e9, cpu_share=(1.0, share)
    )
    facts = Facts(device="cpu", torch="2.13.0", cores=2, usable=2, measured=local)
    findings = {
        finding.check: finding
        for finding in run_checks(facts)
        if finding.check in ("speed", "all-reduce")
    }
    assert {finding.severity for finding in findings.values()} == {severity}
    busy = "not checked: the machine is busy: other processes used 69% of the CPU time"
    assert all(
        (busy in finding.observation) == (severity == "note") for finding in findings.values()
    )
    assert all(bool(finding.remedy) == (severity == "note") for finding in findings.values())


# --------------------------------------------------------------------------- variables

# Variables that SageMaker's toolkit sets on p4d; the AWS OFI NCCL team advises against three.
SAGEMAKER = {
    "FI_PROVIDER": "efa",
    "FI_EFA_USE_DEVICE_RDMA": "1",
    "RDMAV_FORK_SAFE": "1",
    "NCCL_PROTO": "simple",
    "NCCL_IB_DISABLE": "1",
    "NCCL_SOCKET_IFNAME": "eth0",
}


def test_examine_variables_set_by_sagemaker_are_not_bad() -> None:
    findings = list(check_variables(replace(AWS, variables=SAGEMAKER)))
    report = {finding.observation.partition("=")[0]: finding.severity for finding in findings}
    assert report == {
        "FI_PROVIDER": "note",
        "FI_EFA_USE_DEVICE_RDMA": "note",
        "RDMAV_FORK_SAFE": "warning",
        "NCCL_PROTO": "warning",
        "NCCL_IB_DISABLE": "warning",
    }


def test_examine_old_efa_plugin_needs_more_variables() -> None:
    variables = {"FI_PROVIDER": "efa", "NCCL_PROTO": "simple"}
    old = replace(AWS, variables=variables, ofi_plugin="1.5.0")
    assert [finding.severity for finding in check_variables(old)] == ["ok"]


@pytest.mark.parametrize("row", VARIABLES, ids=lambda row: f"{row.name} on {row.network}")
def test_version_table_each_row_can_match_and_fail(row: Variable) -> None:
    names = {
        "RDMAV_.*": "RDMAV_HUGEPAGES_SAFE",
        "NCCL_(BUFFSIZE|MIN_CHANNELS|MAX_CHANNELS|NTHREADS|ALGO)": "NCCL_BUFFSIZE",
        "(TORCH_)?NCCL_ASYNC_ERROR_HANDLING": "TORCH_NCCL_ASYNC_ERROR_HANDLING",
        "(TORCH_)?NCCL_BLOCKING_WAIT": "NCCL_BLOCKING_WAIT",
        "NCCL_(P2P_NET_CHUNKSIZE|NVLSTREE_MAX_CHUNKSIZE|NVLS_CHUNKSIZE|NETDEVS_POLICY)": (
            "NCCL_NETDEVS_POLICY"
        ),
        "NCCL_(SOCKET_NTHREADS|NSOCKS_PERTHREAD|IB_HCA|IB_GID_INDEX)": "NCCL_IB_HCA",
        "OFI_NCCL_(PROTOCOL|TUNER_TYPE|FORCE_NUM_RAILS|NET_LATENCY|EAGER_MAX_SIZE)": (
            "OFI_NCCL_PROTOCOL"
        ),
    }
    name = names.get(row.name, row.name)
    candidates = ("1", "0", "simple", "LL128", "efa", "sockets", "INFO", "Socket", "none")
    wrong = next(value for value in candidates if re.fullmatch(row.values, value))
    facts = AWS if "efa" in row.network else HEALTHY
    findings = list(check_variables(replace(facts, variables={name: wrong})))
    assert [(finding.severity, row.why in finding.observation) for finding in findings] == [
        (row.severity, True)
    ]
    unset = list(check_variables(replace(facts, variables={})))
    assert [finding.severity for finding in unset] == ["ok"]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("eth", ["eth0", "eth1"]),
        ("=eth1", ["eth1"]),
        ("=eth", []),
        ("eth1,ib", ["eth1", "ib0"]),
        ("^lo,eth", ["ib0"]),
        ("^=lo", ["eth0", "eth1", "ib0"]),
    ],
)
def test_interfaces_are_chosen_as_by_nccl(value: str, expected: list[str]) -> None:
    assert match_interfaces(value, ("lo", "eth0", "eth1", "ib0")) == expected


# --------------------------------------------------------------------------- parsers


def test_mount_of_a_path_is_the_innermost() -> None:
    mounts = (
        "22 1 254:0 / / rw,relatime - ext4 /dev/vda rw,discard\n"
        "40 22 0:35 / /my\\040data rw,relatime shared:1 - nfs4 server:/x rw,vers=4.2,nolock\n"
    )
    assert find_mount(Path("/home/x"), mounts) == ("ext4", "/dev/vda", "rw,discard")
    assert find_mount(Path("/my data/x"), mounts) == ("nfs4", "server:/x", "rw,vers=4.2,nolock")
    mounts += "41 22 0:36 / /Läufe rw - lustre fs@tcp:/x rw,flock\n"
    assert find_mount(Path("/Läufe/x"), mounts) == ("lustre", "fs@tcp:/x", "rw,flock")


def test_efa_plugin_is_found_with_its_version(tmp_path: Path) -> None:
    assert find_ofi_plugin(["", str(tmp_path / "nowhere"), str(tmp_path)]) == ""
    library = tmp_path / "lib" / f"{platform.machine()}-linux-gnu" / "libnccl-net.so"
    library.parent.mkdir(parents=True)
    library.write_bytes(b"\0\0NET/OFI Initializing aws-ofi-nccl 1.13.2-aws\0")
    assert find_ofi_plugin([str(tmp_path)]) == "1.13.2"
    library.write_bytes(b"\0")
    assert find_ofi_plugin([str(tmp_path)]) == "?"


def test_adapters_in_sysfs_are_read(tmp_path: Path) -> None:
    port = tmp_path / "rdmap0s6" / "ports" / "1"
    (port / "hw_counters").mkdir(parents=True)
    (port / "state").write_text("4: ACTIVE\n")
    (port / "rate").write_text("100 Gb/sec (4X EDR)\n")
    (tmp_path / "rdmap0s6" / "device").mkdir()
    (tmp_path / "rdmap0s6" / "device" / "driver").symlink_to("/sys/bus/pci/drivers/efa")
    (port / "hw_counters" / "rdma_read_bytes").write_text("0\n")
    (tmp_path / "without_a_port").mkdir()
    first, second = list_adapters(tmp_path)
    path = str(tmp_path / "rdmap0s6" / "device")
    state = ("efa", "4: ACTIVE", "100 Gb/sec (4X EDR)")
    assert first == Adapter("rdmap0s6", *state, rdma_read=True, pci_path=path)
    assert second == Adapter("without_a_port")
    (one,) = CHECKS["rdma"](replace(HEALTHY, adapters=(first, second), modules=("nvidia_peermem",)))
    assert (one.severity, "not active: without_a_port" in one.observation) == ("warning", True)
    assert list(list_adapters(tmp_path / "nowhere")) == []


def test_cgroup_limits_of_both_versions_are_read(tmp_path: Path) -> None:
    own, root = tmp_path / "cgroup", tmp_path / "fs"
    job = root / "slurm" / "job_7"
    job.mkdir(parents=True)
    own.write_text("0::/slurm/job_7/step_0\n")
    assert read_cgroup_limits(own, root) == (0, 0.0)
    (job / "memory.max").write_text("68719476736\n")
    (root / "slurm" / "memory.max").write_text("max\n")
    (job / "cpu.max").write_text("800000 100000\n")
    assert read_cgroup_limits(own, root) == (64 * GIB, 8.0)

    old = root / "memory" / "job"
    old.mkdir(parents=True)
    cpu = root / "cpu"
    cpu.mkdir()
    (old / "memory.limit_in_bytes").write_text("1073741824\n")
    (root / "memory" / "memory.limit_in_bytes").write_text("9223372036854771712\n")
    (cpu / "cpu.cfs_quota_us").write_text("-1\n")
    (cpu / "cpu.cfs_period_us").write_text("100000\n")
    own.write_text("4:memory:/job\n2:cpu,cpuacct:/\n")
    assert read_cgroup_limits(own, root) == (GIB, 0.0)
    (cpu / "cpu.cfs_quota_us").write_text("150000\n")
    assert read_cgroup_limits(own, root) == (GIB, 1.5)
