"""NCCL's log: the network that NCCL really uses.

NCCL writes these lines with ``NCCL_DEBUG=INFO`` and ``NCCL_DEBUG_SUBSYS=INIT,NET``.  The texts are
those of NCCL 2.18 to 2.31 and of aws-ofi-nccl 1.4 to 1.21.  A text that changes gives unknown
values, never an error.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import reduce

# One line each; the named group is the field of `NcclLog`.
FIELDS = tuple(
    re.compile(pattern, re.MULTILINE)
    for pattern in (
        r"NCCL version (?P<nccl>\d+\.\d+\.\d+)",
        r"NET/OFI (?:Initializing|Using) aws-ofi-nccl (?P<plugin>\d[\d.]*\d)",
        r"NET/OFI Using Libfabric version (?P<libfabric>\d[\d.]*\d)",
        r"NET/OFI Selected [Pp]rovider is (?P<provider>[\w;-]+)",
        r"NET/OFI Selected provider is .*, fabric is (?P<fabric>\S+)",
        r"NET/OFI Using transport protocol (?P<protocol>\w+)",
        r"Using (?:network|internal Network) (?P<network>[\w ]*\w)",
        r"NET/Plugin ?: (?P<plugin_error>Could not find: .*\S|No plugin found.*\S|dlerror=.*\S)",
        r"NET/Plugin: \S+: (?P<plugin_error>/.*\S)",
    )
)
NICS = re.compile(r"NET/OFI Selected [Pp]rovider is .*\(found (\d+) nics\)")
INFINIBAND_NICS = re.compile(r"NET/IB : Using (.*)")
CHANNEL = re.compile(r"\[(?:send|receive)\] via NET/[^/\n]+/\d+(?:\(\d+\))?(/GDRDMA)?")
PLUGIN_NAMES = ("Libfabric", "AWS Libfabric")  # of aws-ofi-nccl; its old name, and with NCCL_NET


@dataclass(frozen=True)
class NcclLog:
    """The network of one process or one node, by its log; an empty string is unknown.

    Attributes:
        nccl: version of NCCL.
        plugin: version of aws-ofi-nccl.
        libfabric: version of libfabric, without Amazon's suffix.
        provider: provider of libfabric.
        fabric: fabric of the provider; only new plug-ins report it.
        protocol: transport protocol of the plug-in.
        network: name of NCCL's network: Libfabric, IB, Socket.
        plugin_error: why NCCL has loaded no plug-in.
        nics: number of network devices that the plug-in or NCCL found; 0: unknown.
        gpudirect_channels: connections between nodes with GPUDirect RDMA.
        host_channels: connections between nodes that copy through host memory.
    """

    nccl: str = ""
    plugin: str = ""
    libfabric: str = ""
    provider: str = ""
    fabric: str = ""
    protocol: str = ""
    network: str = ""
    plugin_error: str = ""
    nics: int = 0
    gpudirect_channels: int = 0
    host_channels: int = 0

    @property
    def uses_plugin(self) -> bool:
        """True if NCCL uses aws-ofi-nccl."""
        return self.network in PLUGIN_NAMES


def parse_nccl_log(text: str) -> NcclLog:
    """Return the network in the log of one process.

    The last value of a field counts, because every communicator reports its network.
    """
    values: dict[str, str] = {}
    for field in FIELDS:
        for match in field.finditer(text):
            values |= match.groupdict()
    channels = [match[1] for match in CHANNEL.finditer(text)]
    nics = [int(match[1]) for match in NICS.finditer(text)]
    if values.get("network") == "IB" and (line := INFINIBAND_NICS.search(text)):
        nics = [len(re.findall(r"\[\d+\]\w+:\d+", line[1]))]
    return NcclLog(
        **values,
        nics=min(nics, default=0),
        gpudirect_channels=sum(bool(channel) for channel in channels),
        host_channels=sum(not channel for channel in channels),
    )


def merge_logs(logs: Iterable[NcclLog]) -> NcclLog:
    """Combine the logs of a node: sockets win, and the fewest devices."""

    def merge(a: NcclLog, b: NcclLog) -> NcclLog:
        first = {name: getattr(a, name) or getattr(b, name) for name in NcclLog.__annotations__}
        network = "Socket" if "Socket" in (a.network, b.network) else first["network"]
        return replace(
            NcclLog(**first),
            network=network,
            nics=min((n for n in (a.nics, b.nics) if n), default=0),
            gpudirect_channels=a.gpudirect_channels + b.gpudirect_channels,
            host_channels=a.host_channels + b.host_channels,
        )

    return reduce(merge, logs, NcclLog())


def describe_network(log: NcclLog) -> str:
    """Describe the network: 'EFA with GPUDirect RDMA (32 devices, ...)'."""
    if log.uses_plugin:
        name = "EFA" if log.provider == "efa" else f"libfabric's provider {log.provider or '?'}"
    else:
        name = {"IB": "InfiniBand", "Socket": "TCP sockets", "": "?"}.get(log.network, log.network)
    if log.gpudirect_channels and log.host_channels:
        total = log.gpudirect_channels + log.host_channels
        name += f" with GPUDirect RDMA in {log.gpudirect_channels} of {total} connections"
    elif log.gpudirect_channels:
        name += " with GPUDirect RDMA"
    elif log.host_channels and log.network != "Socket":
        name += " without GPUDirect RDMA"
    details = [f"{log.nics} device{'s' * (log.nics > 1)}"] if log.nics else []
    if log.uses_plugin:
        details += [f"aws-ofi-nccl {log.plugin}"] if log.plugin else []
        details += [f"libfabric {log.libfabric}"] if log.libfabric else []
        details += [f"protocol {log.protocol}"] if log.protocol else []
    details += [f"NCCL {log.nccl}"] if log.nccl else []
    return name + (f" ({', '.join(details)})" if details else "")
