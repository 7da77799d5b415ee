"""Faults on purpose: for tests, and for a drill on one's own cluster.

The product passes named *sites*, ``at("checkpoint.rename")``, which do nothing.  A fault is data in
the job, and makes one of them do something on one rank:

    [[resilience.faults]]
    site = "checkpoint.rename"
    kind = "kill"
    rank = 1
    passing = 2          # the second time that this rank comes by

Each happens once in a run (or ``times`` times in a row), also if the rank that it killed comes by
again after a restart: a file in the run's folder remembers it.

The sites are at the same time where a rank tells the watchdog where it is, and where one phase of
its timeline ends and the next begins (`weft.monitor.spans`).
"""

from __future__ import annotations

import ctypes
import errno
import os
import signal
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from weft.config.schema import Fault
from weft.monitor.heartbeat import beat

# Every site, in the order in which a step comes by.
SITES = {
    "load": "before a checkpoint is loaded",
    "quorum": "before a step, where replica groups meet",
    "profile": "before a profile begins, or is written",
    "step": "before a step, and before its data is there",
    "forward_backward": "when the data is there",
    "gradients": "after the backward pass, with this rank's gradients",
    "record": "before the host waits for the device, to record a step",
    "tell": "when it has, before the ranks tell each other how they are",
    "evaluate": "before an evaluation",
    "checkpoint": "before a checkpoint is saved",
    "local": "when the node has what this rank holds, before that counts",
    "checkpoint.shards": "before this rank writes its shards",
    "checkpoint.written": "after this rank has written its shards, before they are forced out",
    "checkpoint.manifest": "on rank 0, before the manifest is written",
    "checkpoint.rename": "on rank 0, before the checkpoint becomes visible",
    "checkpoint.renamed": "on rank 0, right after that",
    "checkpoint.delete": "on rank 0, before an old one is deleted",
    "checkpoint.deleting": "on rank 0, when the old one is out of sight",
    "checkpoint.saved": "after a checkpoint is saved",
}

# What a rank does after a site, by the first part of its name.
DOING = {
    "start": "building the model",
    "load": "loading a checkpoint",
    "step": "waiting for data",
    "quorum": "meeting the other replica groups",
    "forward_backward": "forward and backward",
    "gradients": "updating the weights",
    "record": "waiting for the device",
    "tell": "recording the step",
    "profile": "writing a profile",
    "evaluate": "evaluating",
    "checkpoint": "saving a checkpoint",
}

# Called at every site with its name, and the step that begins there or None.
listeners: list[Callable[[str, int | None], None]] = []

_armed: list[tuple[Fault, Path]] = []
_passed: dict[str, int] = {}
_begun: set[Path] = set()  # in this process, not in an earlier one


def doing(site: str) -> str:
    """What a rank does after ``site``, for people."""
    return DOING.get(site.partition(".")[0], site)


def install_faults(faults: Sequence[Fault], rank: int, folder: Path) -> None:
    """From now on these faults happen in this process, if they are this rank's."""
    _passed.clear()
    _begun.clear()
    _armed[:] = [
        (fault, folder / f"fault-{index}.happened")
        for index, fault in enumerate(faults)
        if fault.rank == rank
    ]


def fault_point(site: str, tensors: Iterable[Any] = (), step: int | None = None) -> None:
    """The product is at ``site``; ``tensors`` are what a fault may corrupt there.

    Args:
        step: which begins here; elsewhere None.
    """
    beat(site, step)
    for listener in listeners:
        listener(site, step)
    if not _armed:
        return
    _passed[site] = _passed.get(site, 0) + 1
    for fault, happened in _armed:
        if fault.site != site or not 0 <= _passed[site] - fault.passing < fault.times:
            continue
        if _passed[site] == fault.passing and not happened.exists():
            happened.parent.mkdir(parents=True, exist_ok=True)
            with happened.open("w") as file:
                file.write(f"{fault}\n")
                file.flush()
                os.fsync(file.fileno())
            _begun.add(happened)
        if happened in _begun:
            _happen(fault, tensors)


def _happen(fault: Fault, tensors: Iterable[Any]) -> None:
    print(f"injected fault: {fault}", flush=True)
    match fault.kind:
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "slow":
            time.sleep(fault.seconds)
        case "lock":
            ctypes.PyDLL(None).sleep(int(fault.seconds))
        case "raise":
            raise RuntimeError(f"injected fault at {fault.site}")
        case "error":
            number = getattr(errno, fault.error)
            raise OSError(number, os.strerror(number), f"injected at {fault.site}")
        case "corrupt" | "nan":
            for tensor in tensors:
                tensor.mul_(fault.factor if fault.kind == "corrupt" else float("nan"))
        case "flip":
            flip_bit(tensors)


def flip_bit(tensors: Iterable[Any]) -> None:
    """Flip the highest bit of the exponent of the largest element of the first tensor here."""
    import torch

    from weft.parallel.dtensor import to_local

    local = next(local for tensor in tensors if (local := to_local(tensor)).numel())
    place = torch.unravel_index(local.abs().argmax(), local.shape)
    local[place].view(torch.int32).bitwise_xor_(1 << 30)
