"""Peak arithmetic of devices, in dense bfloat16 FLOP/s, for MFU.

Sources: the vendors' data sheets of each part (dense figures, without sparsity).
A device that is not in the table, and every CPU, has no known peak: MFU is then
not reported, rather than guessed.
"""

from __future__ import annotations

import re

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


def peak_flops(device_name: str) -> float | None:
    """Dense bfloat16 FLOP/s of the device that the driver calls ``device_name``, or None."""
    known = [name for name in BF16_PEAK_FLOPS if re.search(rf"\b{name}\b", device_name)]
    return BF16_PEAK_FLOPS[max(known, key=len)] if known else None
