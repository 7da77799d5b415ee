"""Limit the time and memory of rendering a chat template.

A chat template is a program of whoever published the model.  Jinja's sandbox keeps it from files
and attributes, but not from running forever or from filling the memory.

*Time.*  A timer of the process's processor time raises an exception in the main thread, also inside
the filters of Jinja, which are written in Python.  In other threads there is no limit, because
Python delivers signals to the main thread only.

*Memory.*  The limit of the process's address space is lowered to a little more than it has now, so
that an allocation beyond fails with a MemoryError.
"""

from __future__ import annotations

import resource
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

MAX_SECONDS = 2.0  # of processor time; a long conversation takes some milliseconds
MAX_BYTES = 1 << 30
_PAGE_BYTES = resource.getpagesize()


class RenderLimitError(BaseException):
    """A template needs too much time or memory; `except Exception` must not catch it."""


@contextmanager
def limit_rendering() -> Iterator[None]:
    """Raise RenderLimitError if the code inside needs too much time or memory."""
    try:
        with _limit_memory(), _limit_time():
            yield
    except MemoryError:
        raise RenderLimitError(f"needs more than {MAX_BYTES >> 30} GiB of memory") from None


@contextmanager
def _limit_memory() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    with open("/proc/self/statm", "rb") as file:
        limit = int(file.read().split()[0]) * _PAGE_BYTES + MAX_BYTES
    if any(old != resource.RLIM_INFINITY and old < limit for old in (soft, hard)):
        limit = soft
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


@contextmanager
def _limit_time() -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        raise RenderLimitError(f"needs more than {MAX_SECONDS:g} seconds")

    handler = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, MAX_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, handler)
