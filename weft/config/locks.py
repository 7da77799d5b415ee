"""Locks of files and directories, for processes that prepare or start a run."""

from __future__ import annotations

import errno
import fcntl
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from weft.config.errors import ConfigError, InvalidConfig, WeftError

NO_LOCKS_REMEDY = (
    "mount the file system with locks (Lustre: option flock, NFS: without nolock), or use another "
    "directory"
)


class LocksMissing(OSError):
    """The file system has no locks."""

    @property
    def rule(self) -> str:
        """The rule that a directory violates, for `ConfigError`."""
        return str(self.strerror)


@contextmanager
def hold_lock(file: Path, when_busy: Callable[[], None], shared: bool = False) -> Iterator[None]:
    """Hold the lock of a file; the system releases it if this process dies.

    Args:
        file: is created if it does not exist, with its directory.
        when_busy: is called if another process holds the lock; unless it raises, this one waits.
        shared: share the lock with other processes that share it.

    Raises:
        LocksMissing: if the file system has no locks.
        OSError: if the file cannot be created.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    mode = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    with file.open("a+") as stream:
        if not try_lock(stream.fileno(), mode):
            when_busy()
            fcntl.flock(stream, mode)
        yield


def try_lock(file: int, mode: int = fcntl.LOCK_EX) -> bool:
    """Lock an open file or directory; return False if another process holds the lock.

    Raises:
        LocksMissing: if the file system has no locks.
    """
    try:
        fcntl.flock(file, mode | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK):
            raise
        raise LocksMissing(error.errno, f"has no file locks (flock: {error.strerror})") from error
    return True


@contextmanager
def lock_directory(directory: Path, in_use: ConfigError, shared: bool = False) -> Iterator[None]:
    """Hold the lock of a directory that only one process may write to.

    The kernel releases the lock when the process ends.

    Args:
        directory: the directory; created if it does not exist.
        in_use: the error if another process holds the lock.
        shared: True: share the lock with other processes that share it.

    Raises:
        InvalidConfig: if another process holds the lock, or the file system has no locks.
        WeftError: if the directory cannot be written.
    """

    def fail() -> None:
        raise InvalidConfig([in_use])

    with ExitStack() as stack:
        try:
            stack.enter_context(hold_lock(directory / ".lock", fail, shared))
        except LocksMissing as error:
            problem = ConfigError(in_use.key, str(directory), error.rule, NO_LOCKS_REMEDY)
            raise InvalidConfig([problem]) from error
        except OSError as error:
            raise unwritable_error(directory, error) from error
        yield


def unwritable_error(directory: Path, error: OSError) -> WeftError:
    """Return the error that a file in a directory cannot be written."""
    return WeftError(f"{error.filename or directory}: cannot be written: {error.strerror}")


def run_dir_in_use(run_dir: Path) -> ConfigError:
    """Return the error for a second process that would train in a run directory."""
    rule = "is in use by another training process"
    return ConfigError("run.dir", str(run_dir), rule, "wait for it, or use another --run.dir")
