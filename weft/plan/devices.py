"""What is known of devices by name: peak arithmetic, memory; and clusters of them.

*Peaks* are in dense bfloat16 FLOP/s, for MFU, from the vendors' data sheets (without sparsity).
A device that is not in the table, and every CPU, has no known peak: MFU is then not reported,
rather than guessed.  With float8 products the peak stays bfloat16's.  Only part of the arithmetic
is in float8, so a float8 peak, twice as high, is none that could be reached, and a mixture of the
two could be compared with nothing.  Against bfloat16 MFUs of equal models compare as their speeds
do, whatever the precision.

*Memory* is what the same data sheets specify: A100 40 or 80 GB, H100 80, H200 141 (nvidia.com,
data sheets of each), B200 180 (DGX B200 user guide: 1,440 GB of eight; 192 was announced), MI300X
192 and MI325X 256 (amd.com).  The vendors' GB of these parts is 2**30 bytes: nvidia-smi tells
81,920 MiB of an A100, 81,559 of an H100 and 143,771 of an H200.  So a driver tells the table's
number or up to 1 % less, and of parts without stacked memory (A10G, L4, L40S) up to 6 % less.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass

from weft.job import Problem

GIB = 2**30

# The longest name that stands, as whole words, in what the driver calls the device wins.
BF16_PEAK_FLOPS: dict[str, float] = {
    "A10G": 70e12,
    "A100": 312e12,
    "A800": 312e12,
    "L4": 121e12,
    "L40S": 362e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "H800": 989e12,
    "H200": 989e12,
    "GH200": 989e12,
    "B200": 2250e12,
    "MI300X": 1307e12,
    "MI325X": 1307e12,
    "RTX 3090": 71e12,
    "RTX 4090": 165e12,
}

# By the names that a cluster may have, each of which `peak_flops` knows, too.  A100 and A800 alone
# would be two devices: which one is meant has to be said.
MEMORY_BYTES: dict[str, int] = {
    "A10G": 24 * GIB,
    "A100 40GB": 40 * GIB,
    "A100 80GB": 80 * GIB,
    "A800 40GB": 40 * GIB,
    "A800 80GB": 80 * GIB,
    "L4": 24 * GIB,
    "L40S": 48 * GIB,
    "H100 PCIe": 80 * GIB,
    "H100 NVL": 94 * GIB,
    "H100": 80 * GIB,
    "H800": 80 * GIB,
    "H200": 141 * GIB,
    "GH200": 96 * GIB,
    "B200": 180 * GIB,
    "MI300X": 192 * GIB,
    "MI325X": 256 * GIB,
    "RTX 3090": 24 * GIB,
    "RTX 4090": 24 * GIB,
}

# A name that a cluster of processors may have; there is no telling their memory.
CPU = "CPU"

# Those that multiply in float8, with the compute capability from which drivers tell it: NVIDIA's
# from Ada on, AMD's from MI300 on; MXFP8's blocks of 32 numbers with a scale are Blackwell's
# (developer.nvidia.com/cuda-gpus; the data sheets of each).
CAPABILITY: dict[str, tuple[int, int]] = {
    "L4": (8, 9),
    "L40S": (8, 9),
    "RTX 4090": (8, 9),
    "H100 PCIe": (9, 0),
    "H100 NVL": (9, 0),
    "H100": (9, 0),
    "H800": (9, 0),
    "H200": (9, 0),
    "GH200": (9, 0),
    "B200": (10, 0),
    "MI300X": (9, 4),
    "MI325X": (9, 4),
}

# More than the largest cluster that there is, and few enough to reckon with in seconds.
MOST_DEVICES = 2**20


def peak_flops(device_name: str) -> float | None:
    """Dense bfloat16 FLOP/s of the device that the driver calls ``device_name``, or None."""
    known = [name for name in BF16_PEAK_FLOPS if re.search(rf"\b{name}\b", device_name)]
    return BF16_PEAK_FLOPS[max(known, key=len)] if known else None


# --------------------------------------------------------------------------- clusters


@dataclass(frozen=True)
class Cluster:
    """Equal nodes of equal devices, with a rank on each device."""

    nodes: int
    devices: int  # of one node
    device_name: str  # a name of `MEMORY_BYTES`, or `CPU`

    @property
    def ranks(self) -> int:
        return self.nodes * self.devices

    @property
    def memory_bytes(self) -> int | None:
        """Of one device; None where unknown."""
        return MEMORY_BYTES.get(self.device_name)

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
    by_plain = {_plain(name): name for name in (*MEMORY_BYTES, CPU)}
    name = by_plain.get(_plain(match[3]))
    if name is None:
        return Problem(key, text, f"{match[3]!r} is not a known device", _nearest(match[3]))
    return Cluster(nodes, devices, name)


def _plain(name: str) -> str:
    return re.sub(r"[\s_-]", "", name).lower()


def _nearest(name: str) -> str:
    """The devices that may be meant: those that begin like that, or else are written alike."""
    plain = {_plain(known): known.replace(" ", "-") for known in (*MEMORY_BYTES, CPU)}
    near = [shown for known, shown in plain.items() if known.startswith(_plain(name))]
    near = near or [plain[k] for k in difflib.get_close_matches(_plain(name), plain, n=3)]
    if not near:
        return f"known: {', '.join(plain.values())}"
    return f"did you mean {' or '.join(near)}?"
