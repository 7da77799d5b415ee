"""What a rank says of itself while it lives, so that others can tell when it hangs and where.

A rank that hangs cannot help: it is stopped, or holds the interpreter lock in C, or waits for what
never comes.  So it says beforehand where it is.  Whenever it passes a site (`faults.SITES`) it
stores a line into memory of its own, and a process outside reads it there:

    18232.501 7 60.0 forward_backward

at that time of the monotonic clock, in step 7; 'you hear from me again within 60 s'.  The rank
itself knows best how long that may be, and the judge (`weft.launch.watchdog`) needs no policy.  The
price is a store into memory, some microseconds a site.

Two more things are prepared for the day of need: faulthandler writes the stacks of all threads on
SIGUSR2, without asking the interpreter; and a thread that sleeps in a pipe tells which collectives
are open, if it can have the interpreter lock.  All of it lies in anonymous memory, which ends with
the process and which no file system can hold up.
"""

from __future__ import annotations

import faulthandler
import json
import mmap
import os
import signal
import statistics
import threading
import time
from collections import deque
from typing import NamedTuple

# Sites between which a rank is in an ordinary step.
IN_A_STEP = ("step", "forward_backward", "gradients", "record", "tell")
LINE_BYTES = 128

_line: mmap.mmap | None = None
_step = 0
_timeout: float | None = None
_log_interval = 1
_measured: deque[float] = deque(maxlen=100)
_limit = 0.0  # of a step


class Contact(NamedTuple):
    """Where another process of this host finds a rank: files of ``/proc/PID/fd``."""

    rank: int
    pid: int
    line: int  # where it is
    stacks: int  # written on SIGUSR2
    question: int  # a byte into this pipe ...
    answer: int  # ... and the open collectives are written here, as JSON
    torchrun: str | None  # torchrun's file for this rank's error


def start(rank: int, timeout: float | None, log_interval: int) -> Contact:
    """From now on this process tells where it is.  Linux only.

    Args:
        timeout: seconds that a step may take; None: from what is measured.
        log_interval: as many steps a GPU may be behind its host.
    """
    global _line, _timeout, _log_interval, _limit
    _timeout, _log_interval = timeout, log_interval
    _measured.clear()
    _limit = step_limit(timeout, 0.0, log_interval)
    memory, stacks, answer = (os.memfd_create(f"weft-{n}") for n in ("line", "stacks", "answer"))
    os.truncate(memory, LINE_BYTES)
    _line = mmap.mmap(memory, LINE_BYTES)
    beat("start", 0)
    faulthandler.register(signal.SIGUSR2, file=stacks, all_threads=True)
    asked, question = os.pipe()
    threading.Thread(target=_tell, args=(asked, answer), name="weft-witness", daemon=True).start()
    torchrun = os.environ.get("TORCHELASTIC_ERROR_FILE")
    return Contact(rank, os.getpid(), memory, stacks, question, answer, torchrun)


def _tell(asked: int, answer: int) -> None:
    os.read(asked, 1)
    from weft.parallel.private import open_collectives

    os.pwrite(answer, json.dumps(open_collectives()).encode() + b"\n", 0)


def beat(site: str, step: int | None = None) -> None:
    """This rank is at ``site``, in step ``step`` (None: in the same one as before).

    Before the first measurement, when things are compiled, and in loading, evaluating and saving
    the limit is ten times that of a step, from ten minutes.
    """
    global _step
    if _line is None or threading.current_thread() is not threading.main_thread():
        return  # what is written in the background is no progress
    if step is not None:
        _step = step
    limit = _limit if _measured and site in IN_A_STEP else max(600.0, 10 * _limit)
    text = f"{time.monotonic():.6f} {_step} {limit:.1f} {site}"
    _line[:] = text.encode().ljust(LINE_BYTES)


def measured(step_seconds: float) -> None:
    """Steps have taken so long, on the mean since the last call."""
    global _limit
    _measured.append(step_seconds)
    _limit = step_limit(_timeout, statistics.median(_measured), _log_interval)


def step_limit(timeout: float | None, median_seconds: float, log_interval: int) -> float:
    """Seconds that a part of a step may take: what the job says, or what steps take, times ten.

    And more: a GPU may be as many steps behind its host as lie between two records.
    """
    return max(60.0, (10 + log_interval) * median_seconds) if timeout is None else timeout
