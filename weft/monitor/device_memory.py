"""What a rank holds, what was expected, and what to say when there is no more."""

from __future__ import annotations

import resource
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass_type

from weft.config.errors import WeftError
from weft.config.files import read_json
from weft.config.schema import Job
from weft.parallel.private_hooks import dump_memory_snapshot
from weft.plan.devices import GIB
from weft.plan.resolve import Plan

EXPECTED = "expected.json"  # in a run's folder; `weft.estimate.memory_check` writes it
OTHERS, FRAGMENTS = "activations, gathered weights and temporaries", "fragments"


class OutOfMemory(WeftError):
    """A rank's memory ran out.  ``transient``: it had sufficed for a while."""

    transient = False


def memory_peak_gib(device: torch.device) -> float:
    """Most memory of this rank so far: what torch reserved on a GPU, what is resident on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_reserved(device) / GIB
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (GIB if sys.platform == "darwin" else 2**20)  # bytes there, KiB on Linux


def expected_of(folder: Path) -> dict[str, Any]:
    """Return what was expected of a run; empty if nothing was, or if it cannot be read."""
    try:
        found = read_json(folder / EXPECTED)
    except WeftError:
        return {}  # to compare with it is no reason to lose a run
    return {name: value for name, value in found.items() if isinstance(value, int | float | dict)}


def is_out_of_memory(error: BaseException) -> bool:
    """torch has a class of its own for devices only."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or (
        isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
    )


def out_of_memory(
    job: Job,
    plan: Plan,
    device: torch.device,
    held: Mapping[str, Iterable[Tensor]],
    error: BaseException,
) -> OutOfMemory:
    """What to say: how much was in use, for what, and what would take less.

    Args:
        held: the tensors of each category; what they leave of the peak is `OTHERS`.  Empty: the
            model was being made.
    """
    peak = memory_peak_gib(device)
    parts = {name: gib(tensors, device) for name, tensors in held.items()}
    used = torch.cuda.max_memory_allocated(device) / GIB if device.type == "cuda" else peak
    parts[OTHERS if held else "parameters"] = max(0.0, used - sum(parts.values()))
    if used < peak:
        parts[FRAGMENTS] = peak - used
    most = max(parts, key=lambda name: parts[name])
    shown = ", ".join(f"{name} {size:.2f}" for name, size in parts.items())
    expected = expected_of(Path(plan.run_dir)).get("memory_gib")
    lines = [
        f"out of memory: at most {peak:.2f} GiB were in use on this rank: {shown}",
        *([f"expected were {expected:.2f} GiB"] if expected else []),
        f"what would take less for {most}: {' or '.join(knobs(most, job, plan))}",
        *([snapshot(Path(plan.run_dir))] if device.type == "cuda" else []),
        *str(error).splitlines()[:1],
    ]
    return OutOfMemory("; ".join(lines))


def snapshot(folder: Path) -> str:
    """Write what the allocator holds into a run's folder; where it is, for people."""
    path = folder / "traces" / f"out-of-memory-rank-{dist.get_rank()}.pickle"
    try:
        dump_memory_snapshot(path)
    except OSError as error:  # no reason to lose the message that it belongs to
        return f"what the allocator holds could not be written: {error}"
    return f"what the allocator holds is in {path}, for https://pytorch.org/memory_viz"


def gib(tensors: Iterable[Tensor], device: torch.device) -> float:
    """Of the storages of tensors on a device, each counted once; of DTensors this rank's shards."""
    sizes = {}
    for tensor in tensors:
        for plain in _plain(tensor):
            if plain.device.type == device.type:
                storage = plain.untyped_storage()
                sizes[storage.data_ptr()] = storage.nbytes()
    return sum(sizes.values()) / GIB


def _plain(tensor: Tensor) -> Iterator[Tensor]:
    """The tensors with memory of their own that it is made of: a DTensor's shard, 8-bit states."""
    if not is_traceable_wrapper_subclass_type(type(tensor)):
        yield tensor
        return
    wrapper: Any = tensor
    for name in wrapper.__tensor_flatten__()[0]:
        yield from _plain(getattr(tensor, name))


def knobs(category: str, job: Job, plan: Plan) -> list[str]:
    """Changes of the recipe that take memory from a category, the cheapest first."""
    found = []
    if category == "gradients" and plan.gradient_sync == "step" and plan.accumulation > 1:
        found.append("--parallel.gradient_sync microbatch")
    if category == "optimizer" and job.optim.state_dtype != "8bit":
        found.append("--optim.state_dtype 8bit")
    if category == FRAGMENTS:
        return ["PYTORCH_ALLOC_CONF=expandable_segments:True in the environment"]
    if category == OTHERS:
        if plan.microbatch > 1:
            found.append(f"--train.microbatch_size {plan.microbatch // 2}")
        if job.activation_checkpoint.mode != "full":
            found.append("--activation_checkpoint.mode full")
        return [*found, "rows cut over more ranks (--parallel.cp, tp)"]
    found.append("shards over more ranks (--parallel.dp_shard, tp, pp)")
    offloads = plan.device == "cpu" or job.parallel.cpu_offload
    return found if offloads else [*found, "--parallel.cpu_offload true"]
