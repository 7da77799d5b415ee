"""Locks of files and directories, for processes that prepare or start a run."""

from __future__ import annotations

import fcntl
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from weft.config.errors import ConfigError, InvalidConfig, WeftError


@contextmanager
def hold_lock(file: Path, when_busy: Callable[[], None], shared: bool = False) -> Iterator[None]:
    """Hold the lock of a file; the system releases it if this process dies.

    Args:
        file: is created if it does not exist, with its directory.
        when_busy: is called if another process holds the lock; unless it raises, this one waits.
        shared: share the lock with other processes that share it.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    mode = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    with file.open("a+") as stream:
        try:
            fcntl.flock(stream, mode | fcntl.LOCK_NB)
        except BlockingIOError:
            when_busy()
            fcntl.flock(stream, mode)
        yield


@contextmanager
def lock_directory(directory: Path, in_use: ConfigError, shared: bool = False) -> Iterator[None]:
    """Hold the lock of a directory that only one process may write to.

    The kernel releases the lock when the process ends.

    Args:
        directory: the directory; created if it does not exist.
        in_use: the error if another process holds the lock.
        shared: True: share the lock with other processes that share it.

    Raises:
        InvalidConfig: if another process holds the lock.
        WeftError: if the directory cannot be written.
    """

    def fail() -> None:
        raise InvalidConfig([in_use])

    with ExitStack() as stack:
        try:
            stack.enter_context(hold_lock(directory / ".lock", fail, shared))
        except OSError as error:
            raise unwritable_error(directory, error) from error
        yield


def unwritable_error(directory: Path, error: OSError) -> WeftError:
    """Return the error that a file in a directory cannot be written."""
    return WeftError(f"{error.filename or directory}: cannot be written: {error.strerror}")
