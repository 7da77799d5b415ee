"""EC2 instance types with GPUs or Trainium, and EFA: their size and their network."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path


@dataclass(frozen=True)
class InstanceType:
    """Size and EFA of an EC2 instance type, as ``instance_types.toml`` describes them."""

    efa: int
    gbps: float
    gpudirect: bool
    protocol: str = ""
    cpus: int = 0
    memory_gib: int = 0
    gpus: int = 0
    gpu: str = ""

    @property
    def bandwidth(self) -> float:
        """Network bandwidth in bytes/s."""
        return self.gbps * 1e9 / 8


@cache
def load_instance_types() -> Mapping[str, InstanceType]:
    """Return the instance types with EFA by name."""
    text = Path(__file__).with_name("instance_types.toml").read_text("utf-8")
    return {name: InstanceType(**row) for name, row in tomllib.loads(text)["types"].items()}


def find_instance_type(name: str) -> InstanceType | None:
    """Return an EC2 instance type; None: unknown, or without EFA and GPUs.

    ``name`` may have SageMaker's prefix: ml.p5.48xlarge.
    """
    return load_instance_types().get(name.removeprefix("ml."))


# Devices of `weft.planning.devices` that are named after their servers.
SERVERS = {"p4d": "A100 40GB", "p4de": "A100 80GB"}


def has_device(instance: InstanceType, name: str) -> bool:
    """Return True if an instance type has devices of a name, as far as the names say."""
    words, known = SERVERS.get(name, name).split(), instance.gpu.split()
    sizes = [{word for word in each if word.endswith("GB")} for each in (words, known)]
    return not known or (words[0] == known[0] and (not all(sizes) or sizes[0] == sizes[1]))
