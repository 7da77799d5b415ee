"""Peak memory of a rank, and the message when memory runs out."""

from __future__ import annotations

import json
import resource
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from weft.config.accelerators import supports
from weft.config.errors import WeftError
from weft.config.files import read_json, replace_text
from weft.parallel.dtensor import plain_tensors
from weft.parallel.private import dump_memory_snapshot
from weft.planning.plan import Plan

PREDICTION = "expected.json"  # in the run directory
OTHERS, FRAGMENTS = "activations, gathered parameters and temporaries", "fragmentation"


class OutOfMemory(WeftError):
    """A rank ran out of memory.  ``transient``: after steps that had enough."""

    transient = False


def memory_peak_gib(device: torch.device) -> float:
    """Return the peak GiB of this rank: reserved on a device, resident on a CPU."""
    if device.type != "cpu":
        return torch.accelerator.max_memory_reserved(device) / 2**30
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**30 if sys.platform == "darwin" else 2**20)  # bytes on macOS, KiB on Linux


@dataclass(frozen=True)
class RunPrediction:
    """Memory and step time of the fullest rank, as `weft.estimate` predicts them.

    ``memory_gib``: as a run measures it; ``seconds``: step time by cause
    (`weft.estimate.cost.Seconds`); None if not predicted.
    """

    by: str  # "a trace" or "arithmetic"
    memory_gib: float
    categories_gib: dict[str, float]
    step_seconds: float | None
    seconds: dict[str, float] | None

    def __str__(self) -> str:
        speed = "" if self.step_seconds is None else f", {self.step_seconds:.3g} s per step"
        return f"{self.memory_gib:.1f} GiB on the fullest rank{speed}, by {self.by}"


def save_prediction(prediction: RunPrediction | None, run_dir: Path) -> None:
    """Write a prediction to the run directory, or remove an older one."""
    path = run_dir / PREDICTION
    if prediction is None:
        path.unlink(missing_ok=True)
    else:
        replace_text(path, json.dumps(asdict(prediction), indent=2) + "\n")


def read_prediction(run_dir: Path) -> dict[str, Any]:
    """Return the prediction for a run; empty if the file is missing or damaged."""
    try:
        prediction = read_json(run_dir / PREDICTION)
    except WeftError:
        return {}  # a comparison must not end a run
    return {n: value for n, value in prediction.items() if isinstance(value, int | float | dict)}


def is_out_of_memory(error: BaseException) -> bool:
    """Return True if an error means that memory ran out, on a device or on the host."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or (
        isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
    )


def out_of_memory(
    plan: Plan,
    device: torch.device,
    tensors_by_category: Mapping[str, Iterable[Tensor]],
    error: BaseException,
) -> OutOfMemory:
    """Return the error: memory in use by category, the prediction, and remedies.

    ``tensors_by_category`` is empty while the model is built; the rest of the peak is `OTHERS`.
    """
    peak = memory_peak_gib(device)
    sizes = {name: storage_gib(tensors, device) for name, tensors in tensors_by_category.items()}
    is_cpu = device.type == "cpu"
    used = peak if is_cpu else torch.accelerator.max_memory_allocated(device) / 2**30
    rest = max(0.0, used - sum(sizes.values()))
    sizes[OTHERS if tensors_by_category else "parameters"] = rest
    if used < peak:
        sizes[FRAGMENTS] = peak - used
    largest = max(sizes, key=lambda name: sizes[name])
    has_snapshots = supports(device.type, "memory snapshots")
    categories = ", ".join(f"{name} {size:.2f}" for name, size in sizes.items())
    predicted = read_prediction(Path(plan.run_dir)).get("memory_gib")
    lines = [
        f"out of memory: the peak of this rank is {peak:.2f} GiB: {categories}",
        *([f"the plan predicts {predicted:.2f} GiB"] if predicted else []),
        f"to use less memory for {largest}: {' or '.join(memory_remedies(largest, plan))}",
        *([write_snapshot(Path(plan.run_dir))] if has_snapshots else []),
        *str(error).splitlines()[:1],
    ]
    return OutOfMemory("; ".join(lines))


def write_snapshot(run_dir: Path) -> str:
    """Write a memory snapshot into the run directory; return a message about it."""
    path = run_dir / "traces" / f"out-of-memory-rank-{dist.get_rank()}.pickle"
    try:
        dump_memory_snapshot(path)
    except OSError as error:  # the message of the error itself matters more
        return f"the memory snapshot could not be written: {error}"
    return f"a memory snapshot is in {path}, for https://pytorch.org/memory_viz"


def storage_gib(tensors: Iterable[Tensor], device: torch.device) -> float:
    """Return the GiB of tensors on a device; shared storages count once."""
    sizes = {}
    for tensor in plain_tensors(tensors):
        if tensor.device.type == device.type:
            storage = tensor.untyped_storage()
            sizes[storage.data_ptr()] = storage.nbytes()
    return sum(sizes.values()) / 2**30


def memory_remedies(category: str, plan: Plan) -> list[str]:
    """Return options that reduce the memory of a category, cheapest first."""
    remedies = []
    if category == "gradients" and plan.gradient_sync == "step" and plan.num_microbatches > 1:
        remedies.append("--parallel.gradient_sync microbatch")
    if category == "optimizer" and plan.state_dtype != "8bit":
        remedies.append("--optim.state_dtype 8bit")
    if category in (FRAGMENTS, OTHERS):
        if plan.microbatch_size > 1:
            remedies.append(f"--train.microbatch_size {plan.microbatch_size // 2}")
        if plan.activation_checkpoint.mode != "full":
            remedies.append("--activation_checkpoint.mode full")
        return [*remedies, "shard sequences over more ranks (--parallel.cp, tp)"]
    remedies.append("shard over more ranks (--parallel.dp_shard, tp, pp)")
    offloads = plan.device == "cpu" or plan.cpu_offload
    return remedies if offloads else [*remedies, "--parallel.cpu_offload true"]
