"""Checks of environment variables of NCCL, libfabric, gloo and CUDA."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from weft.doctor.node_facts import Facts, Finding, bad, note, ok, warning
from weft.preparation.environment import is_loopback
from weft.version import parse_version


class Variable(NamedTuple):
    """Harmful values of an environment variable, the harm, and the remedy."""

    name: str  # regular expression
    values: str  # regular expression
    network: str  # '' (any), 'efa', 'new efa' (with a plug-in after 1.5.0), 'infiniband'
    severity: str
    why: str
    remedy: str = "unset it"


SET_PATTERN = "(?!0$).+"
ANY_PATTERN = ".+"
# EFA: doc/efa-env-var.md and src/platform-aws.cpp of aws-ofi-nccl 2daf7d3; the cheat sheet in
# awsome-distributed-training, February 2026.  NCCL: its user guide.
# fmt: off
VARIABLES = tuple(Variable(*row) for row in (
    ("RDMAV_.*", SET_PATTERN, "", "warning", "can break RDMA"),
    ("NCCL_IB_DISABLE", SET_PATTERN, "infiniband", "bad", "makes NCCL use TCP, not InfiniBand"),
    ("NCCL_IB_DISABLE", SET_PATTERN, "efa", "warning", "has no effect on EFA, which has a plug-in"),
    ("NCCL_NET", "(?i)socket", "infiniband", "bad", "makes NCCL use TCP"),
    ("NCCL_NET", "(?i)socket|ib", "efa", "bad", "makes NCCL use another network than EFA"),
    ("NCCL_NET_PLUGIN", "none", "efa", "bad", "disables NCCL's plug-in for EFA"),
    ("NCCL_PROTO", "(?i)simple", "new efa", "warning", "was needed only up to aws-ofi-nccl 1.5.0"),
    ("NCCL_PROTO", "(?!(?i:simple)$).+", "", "warning", "overrides NCCL's own choice"),
    ("FI_PROVIDER", "efa", "new efa", "note", "was needed only up to aws-ofi-nccl 1.5.0"),
    ("FI_PROVIDER", "(?!efa$).+", "efa", "bad", "disables the EFA provider"),
    ("FI_EFA_USE_DEVICE_RDMA", "0", "efa", "bad", "disables GPUDirect RDMA"),
    ("FI_EFA_USE_DEVICE_RDMA", "1", "efa", "note", "is not needed since libfabric 1.18"),
    ("FI_EFA_USE_HUGE_PAGE", SET_PATTERN, "efa", "warning",
     "makes fork fail with 'Cannot allocate memory' in data workers", "set it to 0"),
    ("FI_EFA_FORK_SAFE", SET_PATTERN, "efa", "note",
     "has no effect since kernel 5.15, and the plug-in sets it"),
    ("FI_EFA_SET_CUDA_SYNC_MEMOPS", "0", "efa", "note",
     "is needed only for NCCL 2.19 and newer with EFA installers before 1.29"),
    ("FI_EFA_ENABLE_SHM_TRANSFER", ANY_PATTERN, "efa", "note", "has no effect on NCCL"),
    ("NCCL_(BUFFSIZE|MIN_CHANNELS|MAX_CHANNELS|NTHREADS|ALGO)", SET_PATTERN, "", "warning",
     "overrides NCCL's own choice"),
    ("NCCL_(P2P_NET_CHUNKSIZE|NVLSTREE_MAX_CHUNKSIZE|NVLS_CHUNKSIZE|NETDEVS_POLICY)", ANY_PATTERN,
     "efa", "warning", "overrides the value that the plug-in sets for the instance type"),
    ("NCCL_NET_FORCE_FLUSH", "1", "efa", "warning", "costs time that GPUs from H100 on need not"),
    ("NCCL_TUNER_PLUGIN", ANY_PATTERN, "efa", "note", "overrides the tuner that the plug-in sets"),
    ("NCCL_TOPO_FILE", ANY_PATTERN, "efa", "warning",
     "overrides the topology that the plug-in finds; a file of another image may not fit"),
    ("NCCL_(SOCKET_NTHREADS|NSOCKS_PERTHREAD|IB_HCA|IB_GID_INDEX)", ANY_PATTERN, "efa", "note",
     "has no effect on EFA"),
    ("NCCL_P2P_DISABLE", SET_PATTERN, "", "warning", "routes GPU copies through host memory"),
    ("NCCL_SHM_DISABLE", SET_PATTERN, "", "warning", "may route local data over the network"),
    ("NCCL_NET_GDR_LEVEL", "0|LOC", "", "warning", "disables GPUDirect RDMA"),
    ("OFI_NCCL_NIC_DUP_CONNS", SET_PATTERN, "efa", "bad",
     "makes the plug-in fail on instances with GPUDirect RDMA, and NCCL use TCP"),
    ("OFI_NCCL_DISABLE_GDR_REQUIRED_CHECK", SET_PATTERN, "efa", "warning",
     "lets a run go slowly through host memory without GPUDirect RDMA"),
    ("OFI_NCCL_(PROTOCOL|TUNER_TYPE|FORCE_NUM_RAILS|NET_LATENCY|EAGER_MAX_SIZE)", ANY_PATTERN,
     "efa", "note", "overrides the plug-in's choice for the instance type"),
    ("(TORCH_)?NCCL_ASYNC_ERROR_HANDLING", "0", "", "warning", "makes a failed collective hang"),
    ("(TORCH_)?NCCL_BLOCKING_WAIT", SET_PATTERN, "", "warning", "blocks the host in collectives"),
    ("CUDA_LAUNCH_BLOCKING", SET_PATTERN, "", "warning", "blocks the host in kernels"),
    ("NCCL_DEBUG", "INFO|TRACE", "", "note", "fills the logs"),
))
# fmt: on


def check_variables(facts: Facts) -> Iterator[Finding]:
    """Check for harmful variables (`VARIABLES`), and for interfaces that do not exist."""
    is_old = facts.ofi_plugin not in ("", "?") and parse_version(facts.ofi_plugin) <= (1, 5, 0)
    networks = {"", "efa" if facts.has_efa else "infiniband" if facts.adapters else ""}
    networks |= {"new efa"} if facts.has_efa and not is_old else set()
    findings = [*_check_interfaces(facts), *_check_fallback(facts)]
    for name, value in sorted(facts.variables.items()):
        for row in VARIABLES:
            is_match = re.fullmatch(row.name, name) and re.fullmatch(row.values, value)
            if is_match and row.network in networks:
                findings.append(Finding(row.severity, f"{name}={value} {row.why}", row.remedy))
    names = ", ".join(sorted(facts.variables)) or "no variables of NCCL, libfabric or gloo"
    yield from findings or [ok(f"{names}: none is harmful")]


def _check_interfaces(facts: Facts) -> Iterator[Finding]:
    nccl, gloo, threads = (
        facts.variables.get(name, "")
        for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "OMP_NUM_THREADS")
    )
    interfaces = ", ".join(facts.interfaces)
    excluded = nccl.removeprefix("^").removeprefix("=").split(",") if nccl[:1] == "^" else []
    if nccl and not match_interfaces(nccl, facts.interfaces):
        observation = f"NCCL_SOCKET_IFNAME={nccl} matches none of {interfaces}: NCCL will not start"
        yield bad(observation, "unset it, or exclude only virtual interfaces: ^docker,lo,veth")
    elif any(name.startswith(("eth", "en")) for name in excluded):
        observation = f"NCCL_SOCKET_IFNAME={nccl} excludes interfaces that other machines need"
        yield warning(observation, "exclude only virtual interfaces: ^docker,lo,veth")
    if gloo and not set(gloo.split(",")) <= set(facts.interfaces):
        observation = f"GLOO_SOCKET_IFNAME={gloo} is not one of {interfaces}"
        yield bad(observation, "name an interface that exists")
    elif gloo == "lo" and facts.nodes > 1 and not is_loopback(facts.endpoint):
        observation = "GLOO_SOCKET_IFNAME=lo: other nodes cannot reach this node"
        yield bad(observation, "name the interface of the network")
    if threads.isdigit() and int(threads) > facts.usable > 0:
        observation = f"OMP_NUM_THREADS={threads} exceeds the {facts.usable} cores of this process"
        yield warning(observation, "unset it: weft divides the cores among the ranks")


def _check_fallback(facts: Facts) -> Iterator[Finding]:
    """Check for a plug-in that is named, but whose absence would be silent."""
    plugin = facts.variables.get("NCCL_NET_PLUGIN", "")
    if facts.has_efa and plugin not in ("", "none") and "NCCL_NET" not in facts.variables:
        observation = f"NCCL_NET_PLUGIN={plugin} alone does not prevent TCP if the plug-in fails"
        yield note(observation, "NCCL_NET=Libfabric makes that an error")


def match_interfaces(value: str, interfaces: Sequence[str]) -> list[str]:
    """Return the interfaces that NCCL_SOCKET_IFNAME selects.

    The value is a list of prefixes; a leading '=' makes them full names, '^' excludes them.
    """
    names = tuple(value.lstrip("^=").split(","))
    is_exact = "=" in value[:2]
    matching = [i for i in interfaces if (i in names if is_exact else i.startswith(names))]
    return [i for i in interfaces if i not in matching] if value[0] == "^" else matching
