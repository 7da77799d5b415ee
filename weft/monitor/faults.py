"""Inject faults, for tests and for drills on a real cluster.

The code calls `fault_point` at named sites, which does nothing in a normal run.  A fault is data in
the job, and makes one call fail on one rank:

    [[resilience.faults]]
    site = "checkpoint.rename"
    kind = "kill"
    rank = 1
    passing = 2          # the second call of this site on that rank

Each fault fires once per run (or ``times`` times in a row), also if the rank restarts and calls the
site again: a file in the run directory records that it fired.
"""

from __future__ import annotations

import ctypes
import errno
import os
import signal
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from weft.config.schema import Fault

# Every site, in the order of a step.
SITES = {
    "load": "before a checkpoint is loaded",
    "quorum": "before a step, when replica groups synchronize",
    "profile": "before a profile starts, or is written",
    "step": "before a step, before its data is read",
    "forward_backward": "after the data is read",
    "microbatch": "before the forward pass of a microbatch, or of a batch of an evaluation",
    "gradients": "after backward, with this rank's gradients",
    "record": "before the host waits for the device, to log a step",
    "tell": "after that wait, before ranks exchange their measurements",
    "evaluate": "before an evaluation",
    "checkpoint": "before a checkpoint is saved",
    "local": "after this rank has written its node-local state, before the commit",
    "checkpoint.shards": "before this rank writes its shards",
    "checkpoint.written": "after this rank has written its shards, before the manifest is gathered",
    "checkpoint.manifest": "on rank 0, before the manifest is written",
    "checkpoint.rename": "on rank 0, before the checkpoint becomes visible",
    "checkpoint.renamed": "on rank 0, right after that",
    "checkpoint.delete": "on rank 0, before an old one is deleted",
    "checkpoint.deleting": "on rank 0, after the old one is renamed",
    "checkpoint.saved": "after a checkpoint is saved",
}

_faults: list[tuple[Fault, Path]] = []  # with the file that records that it fired
_calls: dict[str, int] = {}  # number of calls of each site
_fired: set[Path] = set()  # in this process


def install_faults(faults: Sequence[Fault], rank: int, log_dir: Path) -> None:
    """Install the faults of this rank in this process.

    A file in ``log_dir`` records that a fault has fired.
    """
    _calls.clear()
    _fired.clear()
    _faults[:] = [
        (fault, log_dir / f"fault-{index}.happened")
        for index, fault in enumerate(faults)
        if fault.rank == rank
    ]


def fault_point(site: str, tensors: Iterable[Any] = ()) -> None:
    """Fire the faults that are due at ``site``; they may corrupt ``tensors``."""
    if not _faults:
        return
    _calls[site] = _calls.get(site, 0) + 1
    for fault, record in _faults:
        if fault.site != site or not 0 <= _calls[site] - fault.passing < fault.times:
            continue
        if _calls[site] == fault.passing and not record.exists():
            record.parent.mkdir(parents=True, exist_ok=True)
            with record.open("w") as file:
                file.write(f"{fault}\n")
                file.flush()
                os.fsync(file.fileno())
            _fired.add(record)
        if record in _fired:
            _fire(fault, tensors)


def _fire(fault: Fault, tensors: Iterable[Any]) -> None:
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
    """Flip the highest exponent bit of the largest element of the first local tensor."""
    import torch

    from weft.parallel.dtensor import to_local

    local = next(local for tensor in tensors if (local := to_local(tensor)).numel())
    index = torch.unravel_index(local.abs().argmax(), local.shape)
    local[index].view(torch.int32).bitwise_xor_(1 << 30)
