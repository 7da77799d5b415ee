"""The same work on many things, by as many processes as there are cores."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.connection import wait as wait_for
from typing import Any, NamedTuple, TypeVar

from weft.config.errors import ConfigError, InvalidConfig, WeftError

T = TypeVar("T")
R = TypeVar("R")

POLL_SECONDS = 0.2
Advance = Callable[[int], None]

_shared: Any = None  # of a worker: bytes done by all of them, and whether they are to stop


class _Stopped(Exception):
    """Something else failed; this one's work is not wanted any more."""


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))


def processes_for(num_things: int, size_bytes: int, alone_bytes: int) -> int:
    """As many as there are cores, if there is that much to do; one below ``alone_bytes``."""
    return 1 if size_bytes < alone_bytes else max(1, min(num_things, num_cores()))


def parallel_map(
    work: Callable[[T, Advance], R],
    things: Sequence[T],
    advance: Advance,
    processes: int,
) -> Iterator[tuple[int, R]]:
    """``work(thing, advance)`` for each thing, as ``(its place, result)`` in the order of ending.

    Args:
        work: a function of a module, so that another process can find it.  It calls its second
            argument from time to time with what it has done since.
        advance: is told what all of them have done.
        processes: with 1 the work is done here.

    Raises:
        InvalidConfig: what ``work`` raised first; the others are stopped.
        WeftError: a process was killed.
    """
    if processes == 1:
        for place, thing in enumerate(things):
            yield place, work(thing, advance)
        return
    # Not forked: this process may have threads, and locks that they hold.
    context = multiprocessing.get_context("spawn")
    shared = context.Array("q", 2)
    threads = max(1, num_cores() // processes)
    told = 0
    with ProcessPoolExecutor(
        processes, context, initializer=_begin, initargs=(shared, threads)
    ) as pool:
        try:
            places = {pool.submit(_guarded, work, thing): n for n, thing in enumerate(things)}
            pending = set(places)
            while pending:
                done, pending = wait(pending, POLL_SECONDS, FIRST_COMPLETED)
                now = shared[0]  # once: they go on meanwhile
                advance(now - told)
                told = now
                for future in done:
                    result = future.result()
                    if isinstance(result, _Refused):
                        raise InvalidConfig(result.problems)
                    yield places[future], result
        except BrokenProcessPool as error:
            why = "a process that prepares the text was killed, perhaps for want of memory"
            raise WeftError(f"{why}; the same command goes on") from error
        finally:
            shared[1] = 1
            pool.shutdown(wait=True, cancel_futures=True)


def _begin(shared: Any, threads: int) -> None:
    """A process begins; ``threads``: how many its tokenizers may have."""
    global _shared
    _shared = shared
    os.environ["RAYON_NUM_THREADS"] = str(threads)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # whoever started this one tells it
    threading.Thread(target=_die_with_parent, daemon=True).start()


def _die_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait_for([parent.sentinel])
    os._exit(1)


def _advance(size: int) -> None:
    if _shared[1]:
        raise _Stopped
    with _shared.get_lock():
        _shared[0] += size


class _Refused(NamedTuple):
    """What an InvalidConfig holds, which does not survive being pickled."""

    problems: list[ConfigError]


def _guarded(work: Callable[[T, Advance], R], thing: T) -> R | _Refused:
    try:
        return work(thing, _advance)
    except InvalidConfig as invalid:
        return _Refused(invalid.problems)
