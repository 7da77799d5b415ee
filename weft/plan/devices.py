"""What is known of devices by name: arithmetic, memory, links; and clusters of them.

The facts are data, with their sources: ``clusters.toml`` beside this file, and the user's own
``~/.config/weft/clusters.toml``, which adds devices, links and networks or changes single numbers.

*Peaks* are dense FLOP/s, without sparsity; MFU is reckoned against bfloat16's.  A device that is
not in the table, and every CPU, has no known peak: MFU is then not reported, rather than guessed.
With float8 products the peak stays bfloat16's.  Only part of the arithmetic is in float8, so a
float8 peak, twice as high, is none that could be reached, and a mixture of the two could be
compared with nothing.  Against bfloat16 MFUs of equal models compare as their speeds do, whatever
the precision.

*Memory*: the vendors' GB of these parts is 2**30 bytes: nvidia-smi tells 81,920 MiB of an A100,
81,559 of an H100 and 143,771 of an H200.  So a driver tells the table's number or up to 1 % less,
and of parts without stacked memory (A10G, L4, L40S) up to 6 % less.
"""

from __future__ import annotations

import difflib
import math
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from weft.job import Problem

GIB = 2**30
USER_CLUSTERS = Path("~/.config/weft/clusters.toml")


@dataclass(frozen=True)
class Link:
    """Between the devices of a node: bytes/s that a device sends in collectives, and seconds a hop.

    ``domain``: how many devices it joins, where these are more than a node's.  ``peer_access``:
    devices reach each other's memory over it.
    """

    bandwidth: float
    latency: float
    domain: int = 0
    peer_access: bool = False


@dataclass(frozen=True)
class Network:
    """Between nodes: bytes/s of one device's adapter, and the part that collectives reach."""

    bandwidth: float
    latency: float
    achieved: tuple[tuple[int, float], ...]  # rising numbers of nodes, each with its fraction

    def busbw(self, nodes: int) -> float:
        """Bytes/s of a device in a collective over so many nodes."""
        points = self.achieved
        below = max((p for p in points if p[0] <= nodes), default=points[0])
        above = min((p for p in points if p[0] >= nodes), default=points[-1])
        part = below[1]
        if above[0] > below[0]:
            way = math.log(nodes / below[0]) / math.log(above[0] / below[0])
            part *= (above[1] / below[1]) ** way
        return self.bandwidth * part


@dataclass(frozen=True)
class Device:
    """One of ``clusters.toml``; see there.  ``bf16``, ``float8``, ``float4``: peaks, 0 if none.

    ``software``: of the predicted speed, the part that was measured; ``calibrated``: where, and
    when; empty if nowhere.
    """

    name: str
    bandwidth: float
    link: Link
    network: Network
    achieved: Mapping[str, float]
    bf16: float = 0.0
    float8: float = 0.0
    float4: float = 0.0
    memory_gib: float = 0.0
    watts: float = 0.0
    sustained: float = 0.9
    cores: int = 1
    flash: tuple[float, float] = (0.0, 0.0)  # causal attention, forward and backward
    attention: tuple[float, float] = (0.0, 0.0)
    capability: tuple[int, int] = (0, 0)
    software: float = 1.0
    calibrated: str = ""

    def flops(self, precision: str) -> float:
        """FLOP/s of the best matrix product; a precision that it lacks runs in bfloat16."""
        known = self.achieved.get(precision)
        peak = {"bf16": self.bf16, "float8": self.float8, "float4": self.float4}[precision]
        return known or peak * self.achieved["bf16"] / (self.bf16 or 1) or self.flops("bf16")


def read_clusters(*files: Path) -> tuple[dict[str, Device], dict[str, Network]]:
    """Devices and networks of files; each may change and add to what came before it."""
    tables: dict[str, dict[str, Any]] = {"devices": {}, "links": {}, "networks": {}}
    for file in files:
        for table, entries in tomllib.loads(file.read_text()).items():
            for name, entry in entries.items():
                tables[table][name] = {**tables[table].get(name, {}), **entry}
    links = {name: Link(**entry) for name, entry in tables["links"].items()}
    networks = {}
    for name, entry in tables["networks"].items():
        curve = sorted((int(nodes), part) for nodes, part in entry.pop("achieved").items())
        networks[name] = Network(**entry, achieved=tuple(curve))

    def entry_of(name: str) -> dict[str, Any]:
        entry = tables["devices"][name]
        base = entry_of(entry["like"]) if "like" in entry else {}
        return {**base, **{key: value for key, value in entry.items() if key != "like"}}

    devices = {}
    for name in tables["devices"]:
        entry = entry_of(name)
        # What most devices are, where the table says nothing: the fraction A10G and its like reach.
        entry.setdefault("achieved", {"bf16": 0.75 * entry.get("bf16", 0.0)})
        entry["link"] = links[entry["link"]]
        entry["network"] = networks[entry.get("network", "infiniband-200")]
        for key in ("flash", "attention", "capability"):
            if key in entry:
                entry[key] = tuple(entry[key])
        rate = 0.6 * entry["achieved"]["bf16"]  # as A100's FlashAttention 2
        entry.setdefault("flash", (rate, 0.85 * rate))
        entry.setdefault("attention", entry["flash"])
        devices[name] = Device(name, **entry)
    return devices, networks


@lru_cache(maxsize=1)
def known_clusters() -> tuple[dict[str, Device], dict[str, Network]]:
    """What ships with weft, changed by the user's file."""
    user = USER_CLUSTERS.expanduser()
    return read_clusters(
        Path(__file__).with_name("clusters.toml"), *([user] if user.is_file() else [])
    )


def device_named(name: str) -> Device:
    """The device of a name of a cluster."""
    return known_clusters()[0][name]


# A name that a cluster of processors may have; there is no telling their memory.
CPU = "CPU"

# More than the largest cluster that there is, and few enough to reckon with in seconds.
MOST_DEVICES = 2**20


def peak_flops(device_name: str) -> float | None:
    """Dense bfloat16 FLOP/s of the device that the driver calls ``device_name``, or None.

    The longest name that stands there as whole words wins.  Drivers tell no memory.
    """
    peaks = {re.sub(r" \d+GB$", "", d.name): d.bf16 for d in known_clusters()[0].values()}
    known = [n for n in peaks if peaks[n] and re.search(rf"\b{n}\b", device_name)]
    return peaks[max(known, key=len)] if known else None


def device_called(driver_name: str, memory_bytes: int | None) -> Device | None:
    """The device that a driver calls so, by the longest name in it; of equals the one of that
    memory.  None if it is not known."""
    known = known_clusters()[0]
    if driver_name in known:
        return known[driver_name]
    plain = {name: re.sub(r" \d+GB$", "", name) for name in known}
    found = [name for name in known if re.search(rf"\b{re.escape(plain[name])}\b", driver_name)]
    found = [name for name in found if len(plain[name]) == max(len(plain[n]) for n in found)]
    size = (memory_bytes or 0) / GIB
    near = sorted(found, key=lambda name: abs(known[name].memory_gib - size))
    return known[near[0]] if near else None


# --------------------------------------------------------------------------- clusters


@dataclass(frozen=True)
class Cluster:
    """Equal nodes of equal devices, with a rank on each device."""

    nodes: int
    devices: int  # of one node
    device_name: str  # of `clusters.toml`

    @property
    def ranks(self) -> int:
        return self.nodes * self.devices

    @property
    def memory_bytes(self) -> int | None:
        """Of one device; None where unknown."""
        return int(self.device.memory_gib * GIB) or None

    @cached_property
    def device(self) -> Device:
        return device_named(self.device_name)

    def __str__(self) -> str:
        return f"{self.nodes}x{self.devices}x{self.device_name.replace(' ', '-')}"


def parse_cluster(text: str, key: str = "run.cluster") -> Cluster | Problem:
    """A cluster from ``NODESxDEVICESxNAME``, such as ``64x8xH100``, in any case of letters.

    Spaces, hyphens and underscores in a name count for nothing: ``A100-80GB``, ``rtx4090``.

    Args:
        key: where the text comes from, for the problem.

    Returns:
        The cluster, or what is wrong with the text.
    """
    match = re.fullmatch(r"(\d{1,9})x(\d{1,9})x(\S.*)", text.strip(), re.IGNORECASE)
    if match is None:
        remedy = "NODESxDEVICESxNAME, such as 64x8xH100"
        return Problem(key, text, "is not a cluster", remedy)
    nodes, devices = int(match[1]), int(match[2])
    if not 1 <= nodes * devices <= MOST_DEVICES:
        return Problem(key, text, f"has {nodes * devices:,} devices", f"use 1 to {MOST_DEVICES:,}")
    by_plain = {_plain(name): name for name in known_clusters()[0]}
    name = by_plain.get(_plain(match[3]))
    if name is None:
        return Problem(key, text, f"{match[3]!r} is not a known device", _nearest(match[3]))
    return Cluster(nodes, devices, name)


def _plain(name: str) -> str:
    return re.sub(r"[\s_-]", "", name).lower()


def _nearest(name: str) -> str:
    """The devices that may be meant: those that begin like that, or else are written alike."""
    plain = {_plain(known): known.replace(" ", "-") for known in known_clusters()[0]}
    near = [shown for known, shown in plain.items() if known.startswith(_plain(name))]
    near = near or [plain[k] for k in difflib.get_close_matches(_plain(name), plain, n=3)]
    if not near:
        return f"known: {', '.join(plain.values())}"
    return f"did you mean {' or '.join(near)}?"
