"""What is known of devices by name: arithmetic, memory, links; and clusters of them.

The facts are data, with their sources: ``clusters.toml`` beside this file, and the user's own
``~/.config/weft/clusters.toml``, which adds devices, links and networks or changes single numbers.
Beside that lies ``calibrated.toml``: what weft itself has measured.

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
import os
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    TypeAdapter,
    ValidationError,
)
from pydantic.dataclasses import dataclass as checked

from weft.config.errors import MISSING, ConfigError, InvalidConfig, suggest

T = TypeVar("T")

GIB = 2**30
BUILTIN_CLUSTERS = Path(__file__).with_name("clusters.toml")


def user_cluster_files() -> tuple[Path, Path]:
    """What the user writes, and what weft has measured; whether they are there or not."""
    folder = Path(os.environ.get("XDG_CONFIG_HOME") or "~/.config").expanduser() / "weft"
    return folder / "clusters.toml", folder / "calibrated.toml"


STRICT = ConfigDict(extra="forbid")


@checked(frozen=True, config=STRICT)
class Link:
    """Between the devices of a node: bytes/s that a device sends in collectives, and seconds a hop.

    ``domain``: how many devices it joins, where these are more than a node's.  ``peer_access``:
    devices reach each other's memory over it.
    """

    bandwidth: PositiveFloat
    latency: PositiveFloat
    domain: NonNegativeInt = 0
    peer_access: bool = False


def _pairs_from_table(achieved: Any) -> Any:
    return list(achieved.items()) if isinstance(achieved, dict) else achieved


def _require_bf16(achieved: Mapping[str, float]) -> Mapping[str, float]:
    if "bf16" not in achieved:
        raise ValueError("lacks bf16, which every device computes in")
    return achieved


@checked(frozen=True, config=STRICT)
class Network:
    """Between nodes: bytes/s of one device's adapter, and the part that collectives reach."""

    bandwidth: PositiveFloat
    latency: PositiveFloat
    # Rising numbers of nodes, each with its fraction; in a file a table of them.
    achieved: Annotated[
        tuple[tuple[PositiveInt, PositiveFloat], ...],
        BeforeValidator(_pairs_from_table),
        AfterValidator(lambda points: tuple(sorted(points))),
    ] = Field(min_length=1)

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


@checked(frozen=True, config=STRICT)
class Device:
    """One of ``clusters.toml``; see there.  ``bf16``, ``float8``, ``float4``: peaks, 0 if none.

    ``launch``: seconds that a kernel costs the host.  ``software``: of the predicted speed, the
    part that was measured; ``calibrated``: where, and when; empty if nowhere.
    """

    name: str
    bandwidth: PositiveFloat
    link: Link
    network: Network
    achieved: Annotated[Mapping[str, PositiveFloat], AfterValidator(_require_bf16)]
    flash: tuple[PositiveFloat, PositiveFloat]  # causal attention, forward and backward
    attention: tuple[PositiveFloat, PositiveFloat]
    bf16: NonNegativeFloat = 0.0
    float8: NonNegativeFloat = 0.0
    float4: NonNegativeFloat = 0.0
    memory_gib: NonNegativeFloat = 0.0
    watts: NonNegativeFloat = 0.0
    sustained: PositiveFloat = 0.9
    cores: PositiveInt = 1
    capability: tuple[int, int] = (0, 0)
    launch: PositiveFloat = 12e-6  # profiles of eager PyTorch
    software: PositiveFloat = 1.0
    calibrated: str = ""

    def flops(self, precision: str) -> float:
        """FLOP/s of the best matrix product; a precision that it lacks runs in bfloat16."""
        known = self.achieved.get(precision)
        peak = {"bf16": self.bf16, "float8": self.float8, "float4": self.float4}[precision]
        return known or peak * self.achieved["bf16"] / (self.bf16 or 1) or self.flops("bf16")


# What was measured of one device says nothing of those that are like it.
NOT_INHERITED = ("like", "software", "calibrated", "launch")


class _ClusterTables:
    """What files say, by table and name, and what is wrong with it."""

    def __init__(self, files: Iterable[Path]) -> None:
        """
        Raises:
            InvalidConfig: if a file cannot be read.
        """
        self.tables: dict[str, dict[str, Any]] = {"devices": {}, "links": {}, "networks": {}}
        self.problems: list[ConfigError] = []
        self._wrote: dict[tuple[str, str], Path] = {}  # the last file that has an entry
        for file in files:
            try:
                read = tomllib.loads(file.read_text("utf-8"))
            except (OSError, ValueError) as error:
                raise InvalidConfig(
                    [ConfigError(str(file), MISSING, f"cannot be read: {error}")]
                ) from error
            for table, entries in read.items():
                self._add(file, table, entries)

    def _add(self, file: Path, table: str, entries: Any) -> None:
        whole = table in self.tables and isinstance(entries, dict)
        if not whole or not all(isinstance(entry, dict) for entry in entries.values()):
            rule, remedy = "is no table of entries", "use [devices.NAME], links or networks"
            self.problems.append(ConfigError(f"{file}: {table}", MISSING, rule, remedy))
            return
        for name, entry in entries.items():
            self.tables[table][name] = {**self.tables[table].get(name, {}), **entry}
            self._wrote[table, name] = file

    def complain(
        self, table: str, name: str, field: object, value: object, rule: str, remedy: str
    ) -> None:
        key = f"{self._wrote[table, name]}: {table}.{name}.{field}"
        problem = ConfigError(key, value, rule, remedy)
        if problem not in self.problems:  # it shows in whatever is like this
            self.problems.append(problem)

    def made(self, kind: type[T], table: str, name: str, entry: dict[str, Any]) -> T | None:
        """An entry as ``kind``; None, with complaints, if it is none."""
        try:
            return TypeAdapter(kind).validate_python(entry)
        except ValidationError as error:
            own = self.tables[table][name]
            for one in error.errors():
                field, missing = one["loc"][0], one["type"] == "missing"
                if field in own or (missing and "like" not in own):  # else its model's mistake
                    known = kind.__dataclass_fields__  # type: ignore[attr-defined]
                    remedy = "" if field in known else suggest(str(field), known)
                    value = MISSING if missing else own[field]
                    rule = one["msg"].removeprefix("Value error, ").lower()
                    self.complain(table, name, field, value, rule, remedy)
            return None

    def complete(self, name: str, above: tuple[str, ...] = ()) -> dict[str, Any]:
        """A device's entry, with what it takes from the one that it is like."""
        devices = self.tables["devices"]
        entry: dict[str, Any] = devices[name]
        if "like" not in entry:
            return dict(entry)
        like = str(entry["like"])
        if like not in devices or like in (*above, name):
            remedy = suggest(like, [other for other in devices if other != name])
            self.complain("devices", name, "like", like, "is no other device", remedy)
            return {"link": None, **entry}  # that is enough of it; no TOML has this value
        taken = self.complete(like, (*above, name))
        return {k: v for k, v in taken.items() if k not in NOT_INHERITED} | entry


def read_clusters(*files: Path) -> tuple[dict[str, Device], dict[str, Network]]:
    """Devices and networks of files; each may change and add to what came before it.

    Raises:
        InvalidConfig: with everything that is wrong in them.
    """
    read = _ClusterTables(files)
    tables = read.tables
    links = {n: read.made(Link, "links", n, entry) for n, entry in tables["links"].items()}
    networks = {n: read.made(Network, "networks", n, e) for n, e in tables["networks"].items()}
    devices = {}
    for name in tables["devices"]:
        entry = {"network": "infiniband-200"} | read.complete(name)
        entry.pop("like", None)
        for field, among in (("link", links), ("network", networks)):
            value = entry.get(field, MISSING)
            if str(value) in among:
                entry[field] = among[str(value)]
            elif value is not None:
                remedy = suggest(str(value), among)
                read.complain("devices", name, field, value, "is not known", remedy)
        peak = entry.get("bf16", 0.0)
        if isinstance(peak, float | int) and peak > 0:
            # What most reach where the table says nothing: the fraction of A10G and its like.
            entry.setdefault("achieved", {"bf16": 0.75 * peak})
        rates = entry.get("achieved")
        best = rates.get("bf16") if isinstance(rates, dict) else None
        # As A100's FlashAttention 2; any number where `achieved` is refused anyway.
        rate = 0.6 * best if isinstance(best, float | int) else 1.0
        entry.setdefault("flash", (rate, 0.85 * rate))
        entry.setdefault("attention", entry["flash"])
        linked = isinstance(entry.get("link"), Link) and isinstance(entry["network"], Network)
        if linked and (device := read.made(Device, "devices", name, {**entry, "name": name})):
            devices[name] = device
    if read.problems:
        raise InvalidConfig(read.problems)
    return devices, {name: network for name, network in networks.items() if network}


@lru_cache(maxsize=1)
def load_clusters() -> tuple[dict[str, Device], dict[str, Network]]:
    """What ships with weft, changed by the user's files."""
    return read_clusters(BUILTIN_CLUSTERS, *(file for file in user_cluster_files() if file.is_file()))


def get_device(name: str) -> Device:
    """The device of a name of a cluster."""
    return load_clusters()[0][name]


# A name that a cluster of processors may have; there is no telling their memory.
CPU_DEVICE = "CPU"

# More than the largest cluster that there is, and few enough to reckon with in seconds.
MAX_DEVICES = 2**20


def peak_flops(device_name: str) -> float | None:
    """Dense bfloat16 FLOP/s of the device that the driver calls ``device_name``, or None."""
    device = match_device(device_name)
    return device.bf16 or None if device else None


BOARD_WORDS = {"pcie", "nvl", "laptop", "max", "ti", "super", "d"}


def _words(name: str) -> set[str]:
    return set(re.findall(r"\w+", name.lower()))


def match_device(driver_name: str, memory_bytes: int | None = None) -> Device | None:
    """The device that a driver calls so, by the longest name whose words are in it; of equals the
    one of that memory.  None if it is not known."""
    known = load_clusters()[0]
    if driver_name in known:
        return known[driver_name]
    plain = {name: re.sub(r" \d+GB$", "", name) for name in known}
    words = _words(driver_name)
    found = [name for name in known if _words(plain[name]) <= words]
    # Another board of the same chip is another device.
    found = [name for name in found if _words(name) & BOARD_WORDS == words & BOARD_WORDS]
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
        return get_device(self.device_name)

    def __str__(self) -> str:
        return f"{self.nodes}x{self.devices}x{self.device_name.replace(' ', '-')}"


def parse_cluster(text: str, key: str = "run.cluster") -> Cluster | ConfigError:
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
        return ConfigError(key, text, "is not a cluster", remedy)
    nodes, devices = int(match[1]), int(match[2])
    if not 1 <= nodes * devices <= MAX_DEVICES:
        return ConfigError(
            key, text, f"has {nodes * devices:,} devices", f"use 1 to {MAX_DEVICES:,}"
        )
    by_plain = {_normalize(name): name for name in load_clusters()[0]}
    name = by_plain.get(_normalize(match[3]))
    if name is None:
        return ConfigError(key, text, f"{match[3]!r} is not a known device", _suggest_device(match[3]))
    return Cluster(nodes, devices, name)


def _normalize(name: str) -> str:
    return re.sub(r"[\s_-]", "", name).lower()


def _suggest_device(name: str) -> str:
    """The devices that may be meant: those that begin like that, or else are written alike."""
    plain = {_normalize(known): known.replace(" ", "-") for known in load_clusters()[0]}
    near = [shown for known, shown in plain.items() if known.startswith(_normalize(name))]
    near = near or [plain[k] for k in difflib.get_close_matches(_normalize(name), plain, n=3)]
    if not near:
        return f"known: {', '.join(plain.values())}"
    return f"did you mean {' or '.join(near)}?"
