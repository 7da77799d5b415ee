"""Stopping in good order: finish the step, save, and say that the rest is still to be done.

Schedulers announce the end of an allocation by a signal: SIGTERM, or SIGUSR1 as Slurm's
``--signal`` can send some minutes before.  A handler only raises a flag, so a signal does no harm
wherever it comes, in the middle of a save, an evaluation or a compilation.  The flag is looked at
once a step, by all ranks together: it may have been raised on one of them only, and they must stop
after the same step.  Their sum runs on the CPU while the step is computed, so that nobody waits
for it; a signal that comes during a step therefore takes effect at the end of the next one.

Handlers are set before anything heavy is imported: this file imports torch when it is there.
"""

from __future__ import annotations

import signal
import time
from typing import Any

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)

# The signal that came last, for people.
_came: list[str] = []


def listen() -> None:
    """From now on a stop signal raises the flag of this process."""
    for number in STOP_SIGNALS:
        signal.signal(number, lambda number, frame: _came.append(signal.Signals(number).name))


class Stopping:
    """Whether to stop after this step; see above."""

    def __init__(self, seconds: float) -> None:
        """``seconds``: from now on, after which to stop of its own accord; 0: never."""
        self._deadline = time.monotonic() + seconds if seconds else None
        self._flag: Any = None
        self._work: Any = None

    def ask(self) -> None:
        """At the beginning of a step: every rank tells the others whether it wants to stop."""
        import torch
        import torch.distributed as dist

        wanted = bool(_came) or (self._deadline is not None and time.monotonic() > self._deadline)
        self._flag = torch.tensor([wanted], dtype=torch.int32)
        if dist.get_world_size() > 1:
            self._work = dist.all_reduce(self._flag, async_op=True)

    def answer(self) -> bool:
        """At the end of the step: whether any rank wants to stop; the same on all of them."""
        if self._work is not None:
            self._work.wait()
            self._work = None
        return bool(self._flag.item())
