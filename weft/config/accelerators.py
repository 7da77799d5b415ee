"""Types of devices: the only module that names a type of accelerator.

A *device type* is the name that PyTorch has for a kind of device: ``torch.device.type``.  Other
modules use ``torch.accelerator`` and ``torch.get_device_module``, which know every type, and ask
`supports` before they use what only some types have.  docs/accelerators.md says what was tried.
"""

from __future__ import annotations

from typing import Literal

GPU = "cuda"  # of NVIDIA's GPUs, and with ROCm of AMD's

# Hides all GPUs from a process that starts with it.
WITHOUT_GPUS = {"CUDA_VISIBLE_DEVICES": ""}

Technique = Literal[
    "expandable segments",
    "FlexAttention",
    "blocks of attention",
    "compilation",
    "CUDA graphs",
    "float8",
    "memory snapshots",
    "NCCL",
    "kernels in traces",
    "products in float32",
    "choice of attention kernels",
    "replica groups",
]

# The device types of what needs kernels or functions of its own; all others are generic.
_DEVICES: dict[Technique, tuple[str, ...]] = {
    "expandable segments": (GPU,),  # an option of the allocator
    "FlexAttention": (GPU,),  # PyTorch has it on xpu, too: never tried
    "blocks of attention": ("cpu", GPU),  # operators with a log-sum-exp
    "compilation": ("cpu", GPU),  # with inductor; other devices bring other compilers
    "CUDA graphs": (GPU,),
    "float8": ("cpu", GPU),  # a CPU emulates it
    "memory snapshots": (GPU,),
    "NCCL": (GPU,),  # its log, and the settings of EFA
    "kernels in traces": (GPU,),  # of the profiler, with their process groups
    "products in float32": (GPU,),  # torch.bmm of 16-bit numbers with a float32 result
    "choice of attention kernels": (GPU,),  # cuDNN, FlashAttention
    "replica groups": ("cpu", GPU),  # process groups that can be replaced
}


def unit_of(device: str) -> str:
    """Return what a rank of a run computes on: process, GPU or device."""
    return {"cpu": "process", GPU: "GPU"}.get(device, "device")


def supported_devices(technique: Technique) -> tuple[str, ...]:
    """Return the device types on which weft has a technique."""
    return _DEVICES[technique]


def supports(device: str, technique: Technique) -> bool:
    """Return True if weft has a technique on a device type."""
    return device in _DEVICES[technique]
