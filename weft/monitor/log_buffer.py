"""Log writes that can fail: what a run reports about itself must not end the run.

Every log of a run goes through `LogBuffer`: records, events, spans, statistics, and what trackers
are sent.  A record that cannot be written stays in memory, in order, and is tried again before the
next one.  A file that is replaced as a whole has no order to keep: see `tolerate`.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Generic, TypeVar

from weft.config.files import append_bytes, describe_cause

MAX_RECORDS = 10_000  # that wait for a tracker
MAX_WAITING_BYTES = 16 << 20  # that wait for a file
RETRY_SECONDS, MAX_RETRY_SECONDS = 1.0, 60.0  # between attempts; doubled after each failure

T = TypeVar("T")


class LogBuffer(Generic[T]):
    """Records on their way to one destination, which may refuse them for a while.

    The oldest are dropped and counted when too many wait.  The first failure is reported, the
    first success after it, and at the end how many records were lost.

    Attributes:
        lost: records that were dropped.
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
        """
        Args:
            name: of the destination, for people.
            write: writes one record, all or nothing.
            warn: reports a sentence to the user.
            size: of a record, in the unit of ``limit``.
            limit: of all records that wait; the newest is kept in any case.
            errors: of ``write`` that are failures of the destination.
        """
        self.name, self.lost = name, 0
        self._write, self._warn, self._size = write, warn, size
        self._limit, self._errors = limit, errors
        self._records: deque[T] = deque()
        self._used = 0
        self._lock = threading.Lock()  # of the two above
        self._cause = ""  # of the last failure
        self._reported = self._recovered = self._closed = False
        self._failures, self._next = 0, 0.0  # in a row, and when to try again

    @classmethod
    def of_file(cls, path: Path, warn: Callable[[str], object]) -> LogBuffer[bytes]:
        """Return the buffer of a file that lines are appended to; a record is some lines."""
        return LogBuffer[bytes](
            str(path),
            lambda lines: append_bytes(path, lines),
            warn,
            size=len,
            limit=MAX_WAITING_BYTES,
        )

    def write(self, record: T) -> None:
        """Write a record after those that wait, or keep it."""
        self.put(record)
        self.flush()

    def put(self, record: T) -> None:
        """Keep a record until the next `flush`."""
        with self._lock:
            self._records.append(record)
            self._used += self._size(record)
            while self._used > self._limit and len(self._records) > 1:
                self._used -= self._size(self._records.popleft())
                self.lost += 1

    def flush(self, now: bool = False) -> None:
        """Write what waits; ``now``: although the last attempt has just failed."""
        if not (now or self._closed) and time.monotonic() < self._next:
            return
        while self._records:
            record = self._records[0]
            try:
                self._write(record)
            except self._errors as error:
                self.fail(error)
                if self._closed:
                    self.drop()
                return
            with self._lock:
                if self._records and self._records[0] is record:
                    self._used -= self._size(self._records.popleft())
            self._succeed()

    def close(self) -> None:
        """Try a last time, and report how many records are lost.

        A record that comes later is written or lost at once.
        """
        self._closed = True
        self.flush()  # drops what cannot be written
        self.drop()  # reports what was dropped before

    def _succeed(self) -> None:
        if self._failures and not self._records and not self._recovered:
            self._recovered = True
            self._warn(f"{self.name} can be written again, and has the records that waited")
        if not self._records:
            self._failures, self._next = 0, 0.0

    def fail(self, error: BaseException) -> None:
        """The destination has failed: wait before the next attempt, and report it once."""
        self._cause = describe_cause(error)
        seconds = min(MAX_RETRY_SECONDS, RETRY_SECONDS * 2**self._failures)
        self._next, self._failures = time.monotonic() + seconds, min(self._failures + 1, 10)
        if not self._reported:
            self._reported = True
            self._warn(
                f"warning: {self.name} cannot be written: {self._cause}. Training continues; "
                "weft keeps the newest records in memory and tries again"
            )

    def drop(self, error: BaseException | None = None) -> None:
        """Give up what still waits, and report how many records are lost.

        Args:
            error: of the destination at its end, after which nobody knows what it has.
        """
        if error is not None:
            self._cause = describe_cause(error)
        with self._lock:
            self.lost += len(self._records)
            self._records.clear()
            self._used = 0
        if self.lost:
            some = "1 record is" if self.lost == 1 else f"{self.lost:,} records are"
            self._warn(f"warning: {self.name}: {some} lost: {self._cause or 'it is too slow'}")
            self.lost = 0
        elif error is not None:
            self._warn(f"warning: {self.name}: the last records may be lost: {self._cause}")


@contextmanager
def tolerate(path: Path, warn: Callable[[str], object]) -> Iterator[None]:
    """Report that a file of a run cannot be written, and continue without it."""
    try:
        yield
    except OSError as error:
        cause = describe_cause(error)
        warn(f"warning: {path} cannot be written: {cause}. Training continues without it")
