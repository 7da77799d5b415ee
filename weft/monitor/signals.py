"""Stop in good order: all ranks agree on where, and the save comes first.

A scheduler announces the end of an allocation by a signal: SIGTERM, or SIGUSR1 as Slurm's
``--signal`` can send some minutes earlier; Ctrl-C is SIGINT.  The handler only notes the signal, so
a signal is safe at any point: during a save, an evaluation or a compilation.

A signal may reach one rank only, and all must stop at the same point.  So all ranks ask together,
at points that all of them pass: before a step, between forward and backward of some microbatches
(`TrainStep.forward_backward`), after the gradients, between batches of an evaluation, and between
tokens of eval prompts.  Each of these *polls* is a reduction on the CPU that a rank starts at one
point and reads at the next one, so no rank waits for it while it computes.  A signal therefore
counts from the second point after it on.  Without a pipeline and with M microbatches, that is after
at most 2 / min(M, 8) of a step (3 / min(M, 8) if the rank that got it waits for the others at such
a point), or the rest of the step and the next forward pass if M = 1; in a pipeline it is the end of
the step, or before the next one.

What follows a stop that all ranks agree on: the step that is being computed is finished if only its
update is missing, and abandoned otherwise, which leaves the state untouched; evaluations,
generation and the second computation of a bad step are abandoned; the last step is recorded and
saved.  The next start makes up for an evaluation that was due: see `StepRecord.eval_skipped`.

Handlers are installed before anything heavy is imported, so this module imports torch lazily.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple, TypeVar

T = TypeVar("T")

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
TIME_LIMIT_SIGNAL = signal.SIGALRM  # from the launcher, after ``resilience.time_limit``

_received: list[tuple[float, str]] = []  # time and name of this process's stop requests
_arrived: list[float] = []  # their times, if a thread noticed them before the handler
_expired: list[float] = []  # time at which the launcher's time limit was over


def listen() -> None:
    """Install the handlers of the stop signals in this process.

    Python calls a handler when the main thread is back from C code, which may wait for a device or
    for other ranks.  A thread notes the time, so that the log does not leave this wait out.
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    threading.Thread(target=_note_times, args=(reader,), name="weft-signals", daemon=True).start()
    for number in STOP_SIGNALS:
        signal.signal(number, _note_signal)
    signal.signal(TIME_LIMIT_SIGNAL, _note_time_limit)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)


def _note_times(reader: int) -> None:
    """Note the time of each signal, whose number Python writes into a pipe at once."""
    while number := os.read(reader, 1):
        if number[0] in STOP_SIGNALS:
            _arrived.append(time.time())


def _note_signal(number: int, frame: object) -> None:
    _received.append((time.time(), signal.Signals(number).name))


def _note_time_limit(number: int, frame: object) -> None:
    _expired.append(time.time())


def request_stop(reason: str) -> None:
    """Request a stop of all ranks, as a stop signal does; safe in any thread."""
    _received.append((time.time(), reason))


def any_rank_received(number: signal.Signals) -> bool:
    """Return True if a rank has received this stop signal; a collective."""
    received = _Reduction()
    received.start(any(name == number.name for _, name in _received))
    return received.wait()[0]


class StopRequested(Exception):
    """All ranks have agreed to stop in the middle of a step or an evaluation."""


class StopReason(NamedTuple):
    """The first stop request of all ranks."""

    time: float  # seconds since the epoch
    text: str  # 'SIGTERM', the name of the limit, or the argument of `request_stop`


class Votes(NamedTuple):
    """Requests of at least one rank; equal on all ranks."""

    retry_save: bool  # the last save failed and should be retried
    is_saving: bool  # a rank is still writing a checkpoint
    has_no_data: bool  # a rank could not read its batch, so the step must not be applied


class RankConsensus:
    """Combine the requests of all ranks.

    Args:
        time_limit: seconds from now after which every rank requests a stop, but not before one
            step is complete; 0: never.

    Attributes:
        is_stopping: True once all ranks have agreed to stop; equal on all ranks.
    """

    def __init__(self, time_limit: float) -> None:
        self.is_stopping = False
        self._deadline = time.time() + time_limit if time_limit else None
        self._has_step = False
        self._votes = _Reduction()
        self._poll = _Reduction()

    def post(self, *, retry_save: bool, is_saving: bool, has_no_data: bool) -> None:
        """Send this rank's votes, at the beginning of a step; an asynchronous collective."""
        self._votes.start(retry_save, is_saving, has_no_data)

    def wait(self) -> Votes:
        """Return the combined votes, at the end of the step."""
        self._has_step = True
        return Votes(*self._votes.wait())

    def should_stop(self) -> bool:
        """Return True if all ranks stop here; a collective.

        It counts the requests that a rank had at its previous call.  Once true, it stays true.
        """
        if not self.is_stopping:
            if not self._poll.is_running:
                self._poll.start(self._request() is not None)
            (self.is_stopping,) = self._poll.wait()
            if not self.is_stopping:
                self._poll.start(self._request() is not None)
        return self.is_stopping

    def check_stop(self) -> None:
        """Raise `StopRequested` if all ranks stop here; a collective."""
        if self.should_stop():
            raise StopRequested

    def until_stop(self, items: Iterable[T]) -> Iterator[T]:
        """Yield items until all ranks stop, then raise `StopRequested`; a collective."""
        for item in items:
            self.check_stop()
            yield item

    def stop_reason(self) -> StopReason:
        """Return the reason of a stop on which all ranks have agreed; a collective."""
        import torch.distributed as dist

        reasons = [self._request()] * dist.get_world_size()
        dist.all_gather_object(reasons, reasons[0])
        return min(reason for reason in reasons if reason is not None)

    def _request(self) -> StopReason | None:
        """Return this rank's first request to stop."""
        if _received:
            seconds, name = _received[0]
            return StopReason(min([seconds, *_arrived[:1]]), name)
        over = [*_expired[:1]]
        if self._deadline is not None and time.time() > self._deadline:
            over.append(self._deadline)
        if over and self._has_step:
            return StopReason(min(over), "resilience.time_limit")
        return None


class _Reduction:
    """Flags that are true for at least one rank, reduced in the background on the CPU."""

    def __init__(self) -> None:
        import torch.distributed as dist

        self.is_running = False
        self._has_others = dist.get_world_size() > 1
        self._work: Any = None
        self._flags: Any = ()

    def start(self, *flags: bool) -> None:
        self.is_running, self._flags = True, flags
        if self._has_others:
            import torch
            import torch.distributed as dist

            self._flags = torch.tensor(flags, dtype=torch.int32)
            self._work = dist.all_reduce(self._flags, async_op=True)

    def wait(self) -> list[bool]:
        self.is_running = False
        if self._work is not None:
            self._work.wait()
            self._work, self._flags = None, self._flags.tolist()
        return [bool(flag) for flag in self._flags]
