"""Map a function over items with one process per core."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing.connection import wait as wait_for
from typing import Any, TypeVar

from weft.config.errors import WeftError

T = TypeVar("T")
R = TypeVar("R")

POLL_SECONDS = 0.2
Advance = Callable[[int], None]

_core_limit = 1 << 30
_shared: Any = None  # in a worker: bytes done by all workers, and a stop flag


def ignore_progress(size: int) -> None:
    """Ignore the progress of work that takes little time, or reports it otherwise."""


class _Cancelled(Exception):
    """Raised in a worker after another worker failed."""


def num_cores() -> int:
    """Return the number of cores that this process may use."""
    return min(_core_limit, len(os.sched_getaffinity(0)))


def limit_cores(count: int) -> None:
    """Limit the cores that this process uses, before its first tokenizer."""
    global _core_limit
    _core_limit = count
    os.environ["RAYON_NUM_THREADS"] = str(count)


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
    with open_pool(advance, num_processes) as pool:
        futures = [pool.submit(function, item) for item in items]
        pending = set(futures)
        while pending:
            for future in pool.wait(pending):
                future.result()  # raises the error of a worker
                pending.discard(future)
        return [future.result() for future in futures]


class Pool:
    """Processes that run a function; see `open_pool`."""

    def __init__(self, advance: Advance, executor: ProcessPoolExecutor | None, shared: Any) -> None:
        self._advance, self._executor, self._shared = advance, executor, shared
        self._reported = 0

    def submit(self, function: Callable[[T, Advance], R], item: T) -> Future[R]:
        """Start ``function(item, advance)``; without processes, run it now."""
        if self._executor is not None:
            return self._executor.submit(function, item, _advance)
        future = Future[R]()
        future.set_result(function(item, self._advance))
        return future

    def wait(self, pending: Collection[Future[R]]) -> Iterable[Future[R]]:
        """Return those that are done, after a fraction of a second; report their progress."""
        done, _ = wait(pending, POLL_SECONDS, FIRST_COMPLETED)
        if self._shared is not None:
            current = self._shared[0]  # read once: workers change it meanwhile
            self._advance(current - self._reported)
            self._reported = current
        return done


@contextmanager
def open_pool(advance: Advance, num_processes: int) -> Iterator[Pool]:
    """Yield processes; at an exception they stop.  See `parallel_map`.

    Raises:
        WeftError: a process was killed.
    """
    if num_processes == 1:
        yield Pool(advance, None, None)
        return
    # Not fork: this process may have threads that hold locks.
    context = multiprocessing.get_context("spawn")
    shared = context.Array("q", 2)
    threads = max(1, num_cores() // num_processes)
    with ProcessPoolExecutor(
        num_processes, context, initializer=_init_worker, initargs=(shared, threads)
    ) as executor:
        try:
            yield Pool(advance, executor, shared)
        except BrokenProcessPool as error:
            reason = "a process that prepares the data was killed, possibly out of memory"
            raise WeftError(f"{reason}; run the same command to resume") from error
        finally:
            shared[1] = 1
            executor.shutdown(wait=True, cancel_futures=True)


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
