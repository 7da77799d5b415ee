"""Write logs without ending the run when a write fails.

All logs go through `LogBuffer`: records, events, spans, statistics and the trackers' records.  A
record that cannot be written stays in memory, in order, and is retried before the next one.  Files
that are replaced atomically have no order to keep: see `tolerate`.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Generic, TypeVar

from weft.config.files import append_bytes, describe_cause

MAX_RECORDS = 10_000  # waiting for a tracker
MAX_WAITING_BYTES = 16 << 20  # for a file
RETRY_SECONDS, MAX_RETRY_SECONDS = 1.0, 60.0  # between attempts; doubles after each failure

T = TypeVar("T")


class LogBuffer(Generic[T]):
    """A queue of records for one destination, which may fail for a while.

    It drops and counts the oldest records when too many wait.  It reports the first failure, the
    first success after it, and at the end the number of lost records.

    Args:
        name: name of the destination, for messages.
        write: writes one record, all or nothing.
        warn: receives messages for the user.
        size: returns the size of a record, in the unit of ``limit``.
        limit: maximum total size of waiting records; the newest record always stays.
        errors: exceptions of ``write`` that are failures of the destination.

    Attributes:
        lost: number of dropped records.
    """

    def __init__(
        self,
        name: str,
        write: Callable[[T], object],
        warn: Callable[[str], object],
        *,
        size: Callable[[T], int] = lambda record: 1,
        limit: int = MAX_RECORDS,
        errors: type[BaseException] = OSError,
    ) -> None:
        self.name, self.lost = name, 0
        self._write, self._warn, self._size = write, warn, size
        self._limit, self._errors = limit, errors
        self._records: deque[T] = deque()
        self._used = 0
        self._lock = threading.Lock()  # for the two above
        self._cause = ""  # of the last failure
        self._reported = self._recovered = self._closed = False
        self._failures, self._next = 0, 0.0  # in a row; time of the next attempt

    @classmethod
    def for_file(
        cls,
        path: Path,
        warn: Callable[[str], object],
        write: Callable[[bytes], object] | None = None,
    ) -> LogBuffer[bytes]:
        """Return a buffer for a file; a record consists of complete lines.

        Without ``write``, it appends to the file.
        """
        write = partial(append_bytes, path) if write is None else write
        return LogBuffer[bytes](str(path), write, warn, size=len, limit=MAX_WAITING_BYTES)

    @property
    def is_empty(self) -> bool:
        """Return True if no record is waiting."""
        return not self._records

    def write(self, record: T) -> None:
        """Write a record after the waiting ones, or keep it."""
        self.put(record)
        self.flush()

    def put(self, record: T) -> None:
        """Add a record to the queue, for the next `flush`."""
        with self._lock:
            self._records.append(record)
            self._used += self._size(record)
            while self._used > self._limit and len(self._records) > 1:
                self._used -= self._size(self._records.popleft())
                self.lost += 1

    def flush(self, now: bool = False) -> None:
        """Write waiting records; ``now``: even if the last attempt has just failed."""
        if not (now or self._closed) and time.monotonic() < self._next:
            return
        while self._records:
            record = self._records[0]
            try:
                self._write(record)
            except self._errors as error:
                self._record_failure(error)
                if self._closed:
                    self.discard()
                return
            with self._lock:
                if self._records and self._records[0] is record:
                    self._used -= self._size(self._records.popleft())
            self._succeed()

    def close(self) -> None:
        """Try a last time, and report the number of lost records.

        A later record is written or lost at once.
        """
        self._closed = True
        self.flush()  # drops records that cannot be written
        self.discard()  # reports earlier losses

    def _succeed(self) -> None:
        if self._failures and not self._records and not self._recovered:
            self._recovered = True
            self._warn(f"{self.name} can be written again, and has all waiting records")
        if not self._records:
            self._failures, self._next = 0, 0.0

    def _record_failure(self, error: BaseException) -> None:
        """Delay the next attempt after a failure, and report the first one."""
        self._cause = describe_cause(error)
        seconds = min(MAX_RETRY_SECONDS, RETRY_SECONDS * 2**self._failures)
        self._next, self._failures = time.monotonic() + seconds, min(self._failures + 1, 10)
        if not self._reported:
            self._reported = True
            self._warn(
                f"warning: {self.name} cannot be written: {self._cause}. Training continues; "
                "weft keeps the newest records in memory and tries again"
            )

    def discard(self, error: BaseException | None = None) -> None:
        """Discard waiting records, and report how many are lost.

        If ``error`` ended the destination, its last records may be lost, too.
        """
        if error is not None:
            self._cause = describe_cause(error)
        with self._lock:
            self.lost += len(self._records)
            self._records.clear()
            self._used = 0
        if self.lost:
            records = "1 record is" if self.lost == 1 else f"{self.lost:,} records are"
            self._warn(f"warning: {self.name}: {records} lost: {self._cause or 'it is too slow'}")
            self.lost = 0
        elif error is not None:
            self._warn(f"warning: {self.name}: the last records may be lost: {self._cause}")


@contextmanager
def tolerate(path: Path, warn: Callable[[str], object]) -> Iterator[None]:
    """Report a file of a run that cannot be written, and continue without it."""
    try:
        yield
    except OSError as error:
        cause = describe_cause(error)
        warn(f"warning: {path} cannot be written: {cause}. Training continues without it")
