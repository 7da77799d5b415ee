"""Detect the hardware of this host, and whether this process is a rank."""

from __future__ import annotations

import os
import platform

import torch

from weft.config.errors import ConfigError, InvalidConfig
from weft.config.schema import RunSection
from weft.plan.plan import Machine


def detect_machine(section: RunSection) -> Machine:
    """Return the hardware of this host.

    Raises:
        InvalidConfig: if ``run.device`` is cuda and there is none.
    """
    gpus, device = torch.cuda.device_count(), section.device
    if device == "cuda" and gpus == 0:
        rule = "needs a visible CUDA device"
        raise InvalidConfig([ConfigError("run.device", device, rule, "use cpu, or auto")])
    use_cuda = gpus > 0 and device != "cpu"
    return Machine(
        device="cuda" if use_cuda else "cpu",
        devices=gpus if use_cuda else len(os.sched_getaffinity(0)),
        device_name=torch.cuda.get_device_name(0) if use_cuda else platform.processor(),
        world_size=int(os.environ["WORLD_SIZE"]) if is_launched_rank() else None,
        local_world_size=int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        if is_launched_rank()
        else None,
        memory_bytes=torch.cuda.get_device_properties(0).total_memory
        if use_cuda
        else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        peer_access=use_cuda
        and all(torch.cuda.can_device_access_peer(0, other) for other in range(1, gpus)),
        capability=_capability() if use_cuda else (0, 0),
        num_threads=_requested_threads(),
    )


def is_launched_rank() -> bool:
    """Return True if a launcher such as torchrun has made this process a rank."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def _requested_threads() -> int | None:
    """Return the first number of ``OMP_NUM_THREADS``; None without one."""
    threads, _, _ = os.environ.get("OMP_NUM_THREADS", "").partition(",")
    return int(threads) or None if threads.strip().isdecimal() else None


def _capability() -> tuple[int, int]:
    capability = torch.cuda.get_device_capability(0)
    # AMD numbers its devices differently: 9.4 (MI300) is the first with float8.
    return (0, 0) if torch.version.hip and capability < (9, 4) else capability
