"""Detect the hardware of this host, and whether this process is a rank."""

from __future__ import annotations

import os
import platform
import re
from typing import Any

import torch
import torch.distributed as dist

from weft.config.accelerators import GPU
from weft.config.errors import ConfigError, InvalidConfig
from weft.config.schema import RunSection
from weft.monitor.nvml import has_nvml, is_driver_too_old, query_gpus
from weft.planning.plan import Machine


def detect_machine(section: RunSection) -> Machine:
    """Return the hardware of this host.

    Raises:
        InvalidConfig: if ``run.device`` is an accelerator that this host does not have, or for
            whose type PyTorch has no process groups.
    """
    accelerator, device = find_accelerator(), section.device
    if device not in ("auto", "cpu", accelerator):
        found = accelerator or "no accelerator"
        rule = f"is not a device of this machine, on which PyTorch finds {found}"
        remedy = f"use cpu, {accelerator} or auto" if accelerator else "use cpu, or auto"
        raise InvalidConfig([ConfigError("run.device", device, rule, remedy)])
    if device == "auto":
        device = accelerator or "cpu"
    is_cpu = device == "cpu"
    if not is_cpu and device not in dist.Backend.default_device_backend_map:
        rule = "has no backend for process groups: torch.distributed knows none for this device"
        remedy = "install or import the package that registers one, or use cpu"
        raise InvalidConfig([ConfigError("run.device", device, rule, remedy)])
    count = len(os.sched_getaffinity(0)) if is_cpu else torch.accelerator.device_count()
    gpus = range(count) if device == GPU else ()
    return Machine(
        device=device,
        devices=count,
        device_name=platform.processor() if is_cpu else device_names()[0],
        world_size=int(os.environ["WORLD_SIZE"]) if is_launched_rank() else None,
        local_world_size=int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        if is_launched_rank()
        else None,
        memory_bytes=_host_memory() if is_cpu else _device_memory(),
        peer_access=bool(gpus)
        and all(torch.get_device_module(GPU).can_device_access_peer(0, i) for i in gpus[1:]),
        capability=_capability() if gpus else (0, 0),
        num_threads=_requested_threads(),
    )


def find_accelerator() -> str | None:
    """Return the type of this machine's accelerators; None if there is none."""
    device = torch.accelerator.current_accelerator()  # the one that torch is built for
    return device.type if device is not None and torch.accelerator.device_count() else None


def explain_unused_gpus() -> str:
    """Return why PyTorch cannot use this machine's NVIDIA GPUs.

    "" if it can, if there are none, or if ``CUDA_VISIBLE_DEVICES`` hides them.
    """
    hidden = not re.match(r"\s*(\d|GPU-|MIG-)", os.environ.get("CUDA_VISIBLE_DEVICES", "0"))
    if hidden or find_accelerator() is not None or not has_nvml():
        return ""
    state = query_gpus()
    if not state.gpus:
        return ""
    version: str | None = getattr(torch.version, GPU, None)
    reason, remedy = "it finds none", "weft doctor checks them"
    if version is None:
        reason = f"torch {torch.__version__} is a build without CUDA"
        remedy = "install a torch with CUDA"
    elif is_driver_too_old(state.driver, version):
        supported = ".".join(map(str, state.cuda))
        reason = f"driver {state.driver} supports CUDA {supported}, and torch is for {version}"
        remedy = "install a newer driver, or a torch for that CUDA (docs/gpu-node.md)"
    return f"PyTorch cannot use the {len(state.gpus)} GPUs of this machine: {reason}; {remedy}"


def default_device() -> torch.device:
    """Return an accelerator of this machine if it has one, else the CPU."""
    return torch.device(find_accelerator() or "cpu")


def device_names() -> list[str]:
    """Return the names of this machine's accelerators; the type, if one has no name."""
    accelerator = find_accelerator()
    if accelerator is None:
        return []
    get_name = getattr(torch.get_device_module(accelerator), "get_device_name", None)
    count = torch.accelerator.device_count()
    return [get_name(i) if get_name else accelerator for i in range(count)]


def is_launched_rank() -> bool:
    """Return True if a launcher such as torchrun has made this process a rank."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def _requested_threads() -> int | None:
    """Return the first number of ``OMP_NUM_THREADS``; None without one."""
    threads, _, _ = os.environ.get("OMP_NUM_THREADS", "").partition(",")
    return int(threads) or None if threads.strip().isdecimal() else None


def _host_memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _device_memory() -> int:
    """Return the bytes of an accelerator's memory."""
    # The properties first: to ask for the free memory creates a context on a GPU.
    module: Any = torch.get_device_module()
    properties = module.get_device_properties(0) if hasattr(module, "get_device_properties") else 0
    return int(getattr(properties, "total_memory", 0)) or torch.accelerator.get_memory_info(0)[1]


def _capability() -> tuple[int, int]:
    capability: tuple[int, int] = torch.get_device_module(GPU).get_device_capability(0)
    # AMD numbers its devices differently: 9.4 (MI300) is the first with float8.
    return (0, 0) if torch.version.hip and capability < (9, 4) else capability
