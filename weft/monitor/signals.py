"""Stopping in good order: finish the step, save, and say that the rest is still to be done.

Schedulers announce the end of an allocation by a signal: SIGTERM, or SIGUSR1 as Slurm's
``--signal`` can send some minutes before; Ctrl-C is SIGINT.  A handler only raises a flag, so a
signal does no harm wherever it comes, in the middle of a save, an evaluation or a compilation.  The
flag is looked at once a step, by all ranks together: it may have been raised on one of them only,
and they must stop after the same step.  Their sum runs on the CPU while the step is computed, so
that nobody waits for it; a signal that comes during a step therefore takes effect at the end of the
next one.

Handlers are set before anything heavy is imported: this file imports torch when it is there.
"""

from __future__ import annotations

import signal
import time
from typing import Any

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)

# The signal that came last, for people.
_came: list[str] = []


def listen() -> None:
    """From now on a stop signal raises the flag of this process."""
    for number in STOP_SIGNALS:
        signal.signal(number, lambda number, frame: _came.append(signal.Signals(number).name))


class RankConsensus:
    """What any rank wants all of them to do after a step: stop, save, or wait with saving."""

    def __init__(self, seconds: float) -> None:
        """``seconds``: from now on, after which to stop of its own accord; 0: never."""
        self._deadline = time.monotonic() + seconds if seconds else None
        self._flags: Any = None
        self._work: Any = None

    def ask(self, save: bool, busy: bool, failed: bool) -> None:
        """Send what this rank wants to the others, at the beginning of a step; a collective.

        Args:
            failed: this rank has no data for the step, which must not be applied.
        """
        import torch
        import torch.distributed as dist

        stop = bool(_came) or (self._deadline is not None and time.monotonic() > self._deadline)
        self._flags = (stop, save, busy, failed)
        if dist.get_world_size() > 1:
            self._flags = torch.tensor(self._flags, dtype=torch.int32)
            self._work = dist.all_reduce(self._flags, async_op=True)

    def answer(self) -> tuple[bool, bool, bool, bool]:
        """Return, at the end of the step, what any rank wants; the same on all ranks.

        Returns:
            Stop; save; a rank is busy saving; a rank has failed.
        """
        if self._work is not None:
            self._work.wait()
            self._work, self._flags = None, self._flags.tolist()
        stop, save, busy, failed = self._flags
        return bool(stop), bool(save), bool(busy), bool(failed)
