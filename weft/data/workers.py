"""Map a function over items with one process per core."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.connection import wait as wait_for
from typing import Any, TypeVar

from weft.config.errors import WeftError

T = TypeVar("T")
R = TypeVar("R")

POLL_SECONDS = 0.2
Advance = Callable[[int], None]

_shared: Any = None  # in a worker: bytes done by all workers, and a stop flag


class _Cancelled(Exception):
    """Raised in a worker after another worker failed."""


def num_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0))


def choose_num_processes(num_items: int, size_bytes: int, min_parallel_bytes: int) -> int:
    """Return one process per core or item; 1 below ``min_parallel_bytes``."""
    return 1 if size_bytes < min_parallel_bytes else max(1, min(num_items, num_cores()))


def parallel_map(
    function: Callable[[T, Advance], R],
    items: Iterable[T],
    advance: Advance,
    num_processes: int,
) -> list[R]:
    """Return ``function(item, advance)`` for each item, in order.

    Args:
        function: picklable; calls its second argument with the bytes done since the last call.
        items: arguments; picklable.
        advance: is called with the bytes that all workers have done since the last call.
        num_processes: with 1, the caller's process runs ``function``.

    Raises:
        InvalidConfig: the first one that ``function`` raises; the other workers stop.
        WeftError: a worker was killed.
    """
    if num_processes == 1:
        return [function(item, advance) for item in items]
    # Not fork: this process may have threads that hold locks.
    context = multiprocessing.get_context("spawn")
    shared = context.Array("q", 2)
    threads = max(1, num_cores() // num_processes)
    reported = 0
    with ProcessPoolExecutor(
        num_processes, context, initializer=_init_worker, initargs=(shared, threads)
    ) as pool:
        try:
            futures = [pool.submit(function, item, _advance) for item in items]
            pending = set(futures)
            while pending:
                done, pending = wait(pending, POLL_SECONDS, FIRST_COMPLETED)
                current = shared[0]  # read once: workers change it meanwhile
                advance(current - reported)
                reported = current
                for future in done:
                    future.result()  # raises the error of a worker
            return [future.result() for future in futures]
        except BrokenProcessPool as error:
            reason = "a process that prepares the data was killed, possibly out of memory"
            raise WeftError(f"{reason}; run the same command to resume") from error
        finally:
            shared[1] = 1
            pool.shutdown(wait=True, cancel_futures=True)


def _init_worker(shared: Any, threads: int) -> None:
    """Initialize a worker, whose tokenizers may use ``threads`` threads."""
    global _shared
    _shared = shared
    os.environ["RAYON_NUM_THREADS"] = str(threads)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent stops this worker
    threading.Thread(target=_exit_with_parent, daemon=True).start()


def _exit_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait_for([parent.sentinel])
    os._exit(1)


def _advance(size: int) -> None:
    if _shared[1]:
        raise _Cancelled
    with _shared.get_lock():
        _shared[0] += size
