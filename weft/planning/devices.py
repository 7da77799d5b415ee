"""Specifications of devices, links, networks and clusters by name.

The specifications are data, with their sources, in ``clusters.toml`` next to this file.  The user's
``~/.config/weft/clusters.toml`` adds entries or overrides single numbers; weft writes its own
measurements to ``calibrated.toml`` in the same directory.

*Peaks* are dense FLOP/s, without sparsity.  MFU is relative to the bfloat16 peak, also with float8:
only part of the arithmetic is in float8, so its peak, twice as high, is out of reach.  So MFU ranks
runs of one model as their speed does, in every precision.  A device that is not in the table, and
every CPU, has no known peak, and weft does not report an MFU.

*Memory*: a vendor's GB is 2**30 bytes here: nvidia-smi reports 81,920 MiB for an A100, 81,559 for
an H100 and 143,771 for an H200.  A driver reports the table's number or up to 1 % less, and up to
6 % less for parts without stacked memory (A10G, L4, L40S).
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

import pydantic.dataclasses
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

from weft.config.accelerators import GPU
from weft.config.errors import MISSING, ConfigError, ConfigErrors, InvalidConfig, suggest
from weft.config.files import expand_path
from weft.config.reader import validation_rule
from weft.planning.plan import Machine

T = TypeVar("T")

GIB = 2**30
BUILTIN_CLUSTERS = Path(__file__).with_name("clusters.toml")


def user_cluster_files() -> tuple[Path, Path]:
    """Return the paths of the user's file and of weft's measurements."""
    directory = expand_path(os.environ.get("XDG_CONFIG_HOME") or "~/.config") / "weft"
    return directory / "clusters.toml", directory / "calibrated.toml"


STRICT = ConfigDict(extra="forbid")


@pydantic.dataclasses.dataclass(frozen=True, config=STRICT)
class Link:
    """The link between the devices of a node.

    Attributes:
        bandwidth: bytes/s that a device sends in collectives.
        latency: seconds per hop.
        domain: number of devices that switches connect, if more than a node's (a rack's).
        peer_access: True if devices can read each other's memory over the link.
    """

    bandwidth: PositiveFloat
    latency: PositiveFloat
    domain: NonNegativeInt = 0
    peer_access: bool = False


def _pairs_from_table(achieved: Any) -> Any:
    return list(achieved.items()) if isinstance(achieved, dict) else achieved


def _require_bf16(achieved: Mapping[str, float]) -> Mapping[str, float]:
    if "bf16" not in achieved:
        raise ValueError("must have an entry for bf16")
    return achieved


@pydantic.dataclasses.dataclass(frozen=True, config=STRICT)
class Network:
    """The network between nodes: bytes/s of one device's adapter, and seconds per hop."""

    bandwidth: PositiveFloat
    latency: PositiveFloat
    # (number of nodes, fraction of the bandwidth that collectives achieve); a table in the file.
    achieved: Annotated[
        tuple[tuple[PositiveInt, PositiveFloat], ...],
        BeforeValidator(_pairs_from_table),
        AfterValidator(lambda points: tuple(sorted(points))),
    ] = Field(min_length=1)

    def busbw(self, nodes: int) -> float:
        """Return the bytes/s of a device in a collective over this many nodes."""
        points = self.achieved
        below = max((p for p in points if p[0] <= nodes), default=points[0])
        above = min((p for p in points if p[0] >= nodes), default=points[-1])
        fraction = below[1]
        if above[0] > below[0]:
            exponent = math.log(nodes / below[0]) / math.log(above[0] / below[0])
            fraction *= (above[1] / below[1]) ** exponent
        return self.bandwidth * fraction


@pydantic.dataclasses.dataclass(frozen=True, config=STRICT)
class Device:
    """A device of ``clusters.toml``, which documents the fields.

    Attributes:
        bf16, float8, float4: peaks in FLOP/s; 0 if unsupported or unknown.
        float32: the same, without TF32, which PyTorch uses only if asked.
        launch: host seconds per kernel launch.
        software: measured fraction of the predicted speed.
        calibrated: place and date of that measurement; empty if there is none.
        type: device type in PyTorch.
        note: what a reader of a plan should know.
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
    float32: NonNegativeFloat = 0.0
    memory_gib: NonNegativeFloat = 0.0
    watts: NonNegativeFloat = 0.0
    sustained: PositiveFloat = 0.9
    cores: PositiveInt = 1
    capability: tuple[int, int] = (0, 0)
    launch: PositiveFloat = 12e-6  # profiles of eager PyTorch
    software: PositiveFloat = 1.0
    calibrated: str = ""
    type: str = GPU
    note: str = ""

    def flops(self, precision: str) -> float:
        """Return the FLOP/s of the best matrix product; bfloat16's if unsupported."""
        measured = self.achieved.get(precision)
        peaks = {"bf16": self.bf16, "float8": self.float8}
        peak = (peaks | {"float4": self.float4, "float32": self.float32})[precision]
        return measured or peak * self.achieved["bf16"] / (self.bf16 or 1) or self.flops("bf16")


# Fields that a device does not inherit from its ``like``, because they were measured.
NOT_INHERITED = ("like", "software", "calibrated", "launch")


class _ClusterTables:
    """The entries of several files by table and name, and the errors in them."""

    def __init__(self, files: Iterable[Path]) -> None:
        """Read and merge the files.

        Raises:
            InvalidConfig: if a file cannot be read.
        """
        self.tables: dict[str, dict[str, Any]] = {"devices": {}, "links": {}, "networks": {}}
        self.errors = ConfigErrors()
        self._source: dict[tuple[str, str], Path] = {}  # the last file that has an entry
        for file in files:
            try:
                content = tomllib.loads(file.read_text("utf-8"))
            except (OSError, ValueError) as error:
                raise InvalidConfig(
                    [ConfigError(str(file), MISSING, f"cannot be read: {error}")]
                ) from error
            for table, entries in content.items():
                self._add_table(file, table, entries)

    def _add_table(self, file: Path, table: str, entries: Any) -> None:
        is_valid = table in self.tables and isinstance(entries, dict)
        if not is_valid or not all(isinstance(entry, dict) for entry in entries.values()):
            rule = "is not a table of entries"
            remedy = "use [devices.NAME], [links.NAME] or [networks.NAME]"
            self.errors.add(f"{file}: {table}", rule, remedy)
            return
        for name, entry in entries.items():
            self.tables[table][name] = {**self.tables[table].get(name, {}), **entry}
            self._source[table, name] = file

    def add_error(
        self, table: str, name: str, field: object, value: object, rule: str, remedy: str
    ) -> None:
        """Record an error of a field, once."""
        key = f"{self._source[table, name]}: {table}.{name}.{field}"
        error = ConfigError(key, value, rule, remedy)
        if error not in self.errors:  # entries that inherit the field repeat it
            self.errors.append(error)

    def validate(self, cls: type[T], table: str, name: str, entry: dict[str, Any]) -> T | None:
        """Return an entry as ``cls``; record errors and return None if it is invalid."""
        try:
            return TypeAdapter(cls).validate_python(entry)
        except ValidationError as exception:
            own_fields = self.tables[table][name]
            for error in exception.errors():
                field, is_missing = error["loc"][0], error["type"] == "missing"
                # An inherited field is reported for the entry that defines it.
                if field in own_fields or (is_missing and "like" not in own_fields):
                    fields = cls.__dataclass_fields__  # type: ignore[attr-defined]
                    remedy = "" if field in fields else suggest(str(field), fields)
                    value = MISSING if is_missing else own_fields[field]
                    rule = validation_rule(error)
                    self.add_error(table, name, field, value, rule, remedy)
            return None

    def resolve_like(self, name: str, descendants: tuple[str, ...] = ()) -> dict[str, Any]:
        """Return a device's entry, with the fields that it inherits through ``like``."""
        devices = self.tables["devices"]
        entry: dict[str, Any] = devices[name]
        if "like" not in entry:
            return dict(entry)
        like = str(entry["like"])
        if like not in devices or like in (*descendants, name):
            remedy = suggest(like, [other for other in devices if other != name])
            self.add_error("devices", name, "like", like, "is not another device", remedy)
            return {"link": None, **entry}  # None, which TOML cannot express, marks it invalid
        inherited = self.resolve_like(like, (*descendants, name))
        return {k: v for k, v in inherited.items() if k not in NOT_INHERITED} | entry


def read_clusters(*files: Path) -> tuple[dict[str, Device], dict[str, Network]]:
    """Read devices and networks; each file adds to and overrides those before it.

    Raises:
        InvalidConfig: with every error in the files.
    """
    reader = _ClusterTables(files)
    tables = reader.tables
    links = {n: reader.validate(Link, "links", n, entry) for n, entry in tables["links"].items()}
    networks = {
        n: reader.validate(Network, "networks", n, entry) for n, entry in tables["networks"].items()
    }
    devices = {}
    for name in tables["devices"]:
        entry = {"network": "infiniband-200"} | reader.resolve_like(name)
        entry.pop("like", None)
        for field, candidates in (("link", links), ("network", networks)):
            value = entry.get(field, MISSING)
            if str(value) in candidates:
                entry[field] = candidates[str(value)]
            elif value is not None:
                remedy = suggest(str(value), candidates)
                reader.add_error("devices", name, field, value, f"is not a known {field}", remedy)
        peak = entry.get("bf16", 0.0)
        if isinstance(peak, float | int) and peak > 0:
            # The fraction that A10G and similar devices achieve.
            entry.setdefault("achieved", {"bf16": 0.75 * peak})
        rates = entry.get("achieved")
        best = rates.get("bf16") if isinstance(rates, dict) else None
        # As FlashAttention 2 on A100; the value does not matter if `achieved` is invalid.
        rate = 0.6 * best if isinstance(best, float | int) else 1.0
        entry.setdefault("flash", (rate, 0.85 * rate))
        entry.setdefault("attention", entry["flash"])
        is_linked = isinstance(entry.get("link"), Link) and isinstance(entry["network"], Network)
        entry["name"] = name
        if is_linked and (device := reader.validate(Device, "devices", name, entry)):
            devices[name] = device
    if reader.errors:
        raise InvalidConfig(reader.errors)
    return devices, {name: network for name, network in networks.items() if network}


@lru_cache(maxsize=1)
def load_clusters() -> tuple[dict[str, Device], dict[str, Network]]:
    """Return the built-in devices and networks, with the user's changes."""
    return read_clusters(
        BUILTIN_CLUSTERS, *(file for file in user_cluster_files() if file.is_file())
    )


def get_device(name: str) -> Device:
    """Return the device of that name in ``clusters.toml``."""
    return load_clusters()[0][name]


# The device name of a CPU cluster, whose memory is unknown.
CPU_DEVICE = "CPU"

# Larger than any existing cluster, and small enough to plan in seconds.
MAX_DEVICES = 2**20


def peak_flops(device_name: str) -> float | None:
    """Return the dense bfloat16 FLOP/s of a driver's device name; None if unknown."""
    device = match_device(device_name)
    return device.bf16 or None if device else None


def find_device(machine: Machine) -> Device | None:
    """Return the entry of a machine's devices in the device table; None if unknown."""
    if machine.device == "cpu":
        return get_device(CPU_DEVICE)
    return match_device(machine.device_name, machine.memory_bytes)


def linked_devices(machine: Machine, local_world_size: int) -> int:
    """Return the number of ranks that links connect without the network.

    It is that of a node, or of a rack whose switches connect the devices of its nodes.
    """
    device = find_device(machine)
    return max(local_world_size, device.link.domain if device else 0)


BOARD_WORDS = {"pcie", "nvl", "laptop", "max", "ti", "super", "d"}


def _words(name: str) -> set[str]:
    return set(re.findall(r"\w+", name.lower()))


def match_device(driver_name: str, memory_bytes: int | None = None) -> Device | None:
    """Return the device that a driver's name stands for; None if it is unknown.

    The longest name whose words all occur in the driver's name wins; among equals, the one with
    the nearest memory size.
    """
    devices = load_clusters()[0]
    if driver_name in devices:
        return devices[driver_name]
    base_names = {name: re.sub(r" \d+GB$", "", name) for name in devices}
    words = _words(driver_name)
    matches = [name for name in devices if _words(base_names[name]) <= words]
    # Another board of the same chip is a different device.
    matches = [name for name in matches if _words(name) & BOARD_WORDS == words & BOARD_WORDS]
    longest = max((len(base_names[name]) for name in matches), default=0)
    matches = [name for name in matches if len(base_names[name]) == longest]
    gib = (memory_bytes or 0) / GIB
    nearest = min(matches, key=lambda name: abs(devices[name].memory_gib - gib), default=None)
    return devices[nearest] if nearest else None


# --------------------------------------------------------------------------- clusters


@dataclass(frozen=True)
class Cluster:
    """A homogeneous cluster, with one rank per device."""

    num_nodes: int
    devices_per_node: int
    device_name: str  # a device of ``clusters.toml``

    @property
    def world_size(self) -> int:
        """Ranks of the cluster, one per device."""
        return self.num_nodes * self.devices_per_node

    @property
    def memory_bytes(self) -> int | None:
        """Memory of one device; None if unknown."""
        return int(self.device.memory_gib * GIB) or None

    @cached_property
    def device(self) -> Device:
        """The specification of the devices."""
        return get_device(self.device_name)

    def describe_assumptions(self, text: str) -> list[str]:
        """Return how ``text`` was read, if it is not complete, and the note of the device."""
        is_complete = _normalize(text) == _normalize(str(self))
        reading = [] if is_complete else [f"{text} is taken as {self}"]
        return [*reading, *filter(None, [self.device.note])]

    def __str__(self) -> str:
        return f"{self.num_nodes}x{self.devices_per_node}x{self.device_name.replace(' ', '-')}"


def parse_cluster(text: str, key: str = "run.cluster") -> Cluster:
    """Parse ``NODESxDEVICESxNAME``, such as ``64x8xH100``, regardless of case.

    ``8xH100`` is one node, and ``H100`` one device.  Spaces, hyphens and underscores in the name
    are ignored: ``A100-80GB``, ``rtx4090``.  A name without its memory is the device with the most:
    ``A100`` is A100 80GB.

    Args:
        text: the cluster, as in ``run.cluster``.
        key: configuration key or option of the text, for the error.

    Raises:
        InvalidConfig: if the text is not a cluster, or its device is unknown.
    """
    errors = ConfigErrors({key: text})
    pattern = r"(?:(?:(\d{1,9})x)?(\d{1,9})x)?((?!\d+x)[a-z0-9].*)"
    match = re.fullmatch(pattern, text.strip(), re.IGNORECASE)
    if match is None or (match[1] is None and match[3].isdigit()):
        rule = "is not a cluster of the form NODESxDEVICESxNAME"
        errors.add(key, rule, "use a cluster such as 64x8xH100")
        raise InvalidConfig(errors)
    num_nodes, devices_per_node = int(match[1] or 1), int(match[2] or 1)
    num_devices = num_nodes * devices_per_node
    if not 1 <= num_devices <= MAX_DEVICES:
        rule = f"has {num_devices:,} devices, outside the supported range"
        errors.add(key, rule, f"use 1 to {MAX_DEVICES:,} devices")
    name = _find_device_name(match[3])
    if name is None:
        errors.add(key, f"has an unknown device {match[3]!r}", _suggest_device(match[3]))
    if errors or name is None:
        raise InvalidConfig(errors)
    return Cluster(num_nodes, devices_per_node, name)


def _find_device_name(text: str) -> str | None:
    """Return the device of that name, with or without its memory; None if unknown."""
    devices = load_clusters()[0]
    for known in devices:
        if _normalize(known) == _normalize(text):
            return known
    sizes = [
        known for known in devices if _normalize(re.sub(r" \d+GB$", "", known)) == _normalize(text)
    ]
    return max(sizes, key=lambda known: devices[known].memory_gib, default=None)


def _normalize(name: str) -> str:
    return re.sub(r"[\s_-]", "", name).lower()


def _suggest_device(name: str) -> str:
    """Suggest the devices that begin with ``name``, or else the most similar ones."""
    names = {_normalize(known): known.replace(" ", "-") for known in load_clusters()[0]}
    wanted = _normalize(name)
    begins = [
        shown for known, shown in names.items() if re.match(rf"{re.escape(wanted)}(?!\d)", known)
    ]
    similar = begins or [
        names[known]
        for known in difflib.get_close_matches(wanted, names, n=3)
        if re.sub(r"\D", "", known) == re.sub(r"\D", "", wanted)  # H20 is not H200
    ]
    if not similar:
        return f"use one of {', '.join(names.values())}"
    return f"did you mean {' or '.join(similar)}?"
