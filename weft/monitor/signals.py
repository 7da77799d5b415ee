"""Stop in good order, and let all ranks decide the same after a step.

A scheduler announces the end of an allocation by a signal: SIGTERM, or SIGUSR1 as Slurm's
``--signal`` can send some minutes earlier; Ctrl-C is SIGINT.  The handler only sets a flag, so a
signal is safe at any point: during a save, an evaluation or a compilation.  Once per step all ranks
combine their flags, because a signal may reach only one of them and all must stop after the same
step.  The reduction runs on the CPU during forward and backward, so no rank waits for it; a signal
during a step therefore takes effect at the end of the next one.

Handlers are installed before anything heavy is imported, so this module imports torch lazily.
"""

from __future__ import annotations

import signal
import time
from typing import Any, NamedTuple

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)

_received: list[str] = []  # names of the stop signals of this process


def listen() -> None:
    """Install the handlers of the stop signals in this process."""
    for number in STOP_SIGNALS:
        signal.signal(number, lambda number, frame: _received.append(signal.Signals(number).name))


class Votes(NamedTuple):
    """Requests of at least one rank; equal on all ranks."""

    stop: bool  # a signal, or the time limit
    retry_save: bool  # the last save failed and should be retried
    is_saving: bool  # a rank is still writing a checkpoint
    has_no_data: bool  # a rank could not read its batch, so the step must not be applied


class RankConsensus:
    """Combine the requests of all ranks once per step.

    Args:
        time_limit: seconds from now after which every rank votes to stop; 0: never.
    """

    def __init__(self, time_limit: float) -> None:
        self._deadline = time.monotonic() + time_limit if time_limit else None
        self._votes: Any = None
        self._work: Any = None

    def post(self, *, retry_save: bool, is_saving: bool, has_no_data: bool) -> None:
        """Send this rank's votes, at the beginning of a step; an asynchronous collective."""
        import torch
        import torch.distributed as dist

        is_late = self._deadline is not None and time.monotonic() > self._deadline
        self._votes = (bool(_received) or is_late, retry_save, is_saving, has_no_data)
        if dist.get_world_size() > 1:
            self._votes = torch.tensor(self._votes, dtype=torch.int32)
            self._work = dist.all_reduce(self._votes, async_op=True)

    def wait(self) -> Votes:
        """Return the combined votes, at the end of the step."""
        if self._work is not None:
            self._work.wait()
            self._work, self._votes = None, self._votes.tolist()
        return Votes(*map(bool, self._votes))
