"""Replace files atomically.

A reader sees the old file or the new one, never a part.  `replace_text`, `replace_bytes` and
`write_json` write files that a run can write again.  `write_durably` waits for the disk, so that
the file survives a power failure.  Checkpoints need more: see `weft.config.storage`.
"""

from __future__ import annotations

import errno
import json
import math
import os
import re
import socket
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path, PurePath
from typing import IO, Any

from weft.config.errors import ConfigError, WeftError

MAX_BYTES = 64 << 20  # of a file that is read at once
# Per request to a store, for transient errors, with exponential backoff: about 30 s.
MAX_PORT = 65535
MAX_ATTEMPTS = 8


def expand_path(path: str | os.PathLike[str]) -> Path:
    """Replace a leading ``~`` or ``~user``; an unknown user's name stays."""
    return Path(os.path.expanduser(path))


def user_cache_dir() -> Path:
    """Return weft's directory below the user's cache, which need not exist."""
    return expand_path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "weft"


def replace_text(path: Path, text: str) -> None:
    """Replace a file by UTF-8 text; see `replace_bytes`."""
    replace_bytes(path, text.encode())


def replace_bytes(path: Path, data: bytes) -> None:
    """Replace a file atomically.

    Raises:
        OSError: nothing was replaced, and no temporary file is left.
    """
    with replacing(path) as file:
        file.write(data)


def write_durably(path: Path, data: bytes | memoryview[Any]) -> None:
    """Replace a file, and wait until it would survive a power failure."""
    with replacing(path, durable=True) as file:
        file.write(data)


@contextmanager
def replacing(path: Path, durable: bool = False) -> Iterator[IO[bytes]]:
    """Yield a binary file that replaces a file if the context exits normally.

    ``durable``: it would then survive a power failure.
    """
    with suppress(FileNotFoundError):
        mode = path.stat().st_mode  # a directory is refused by the replacement
        if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):  # root could replace a device
            raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    # Other nodes may write the same file.
    temporary = path.with_name(f".{path.name}.{socket.gethostname()}-{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            yield file
            if durable:
                file.flush()
                os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)  # a full disk needs its bytes
        raise
    if durable:
        sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Write a directory's entries to the disk, which makes a rename durable.

    Raises:
        OSError: if the disk fails; not on a file system that cannot sync directories.
    """
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
            raise
    finally:
        os.close(handle)


def write_json(path: Path, value: object, indent: int | None = None) -> None:
    """Replace a file by a line of JSON; see `replace_bytes`."""
    replace_text(path, json.dumps(value, indent=indent) + "\n")


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file; empty if there is no file.

    Raises:
        WeftError: if the file cannot be read, or is not a JSON object.
    """
    try:
        found = json.loads(read_text(path))
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise WeftError(f"{path}: cannot be read: {describe_cause(error)}") from error
    except RecursionError as error:
        raise WeftError(f"{path}: cannot be read: its values are nested too deep") from error
    except ValueError as error:
        raise WeftError(f"{path}: cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise WeftError(f"{path}: cannot be read: it is not a JSON object")
    return found


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Convert errors that damaged content causes into one that names the file.

    Raises:
        WeftError: the content of ``path`` is not what weft wrote.
    """
    try:
        yield
    except OSError as error:
        raise WeftError(f"{path}: cannot be read: {describe_cause(error)}") from error
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise WeftError(f"{path}: is damaged: {describe_cause(error)}") from error
    except (ArithmeticError, RecursionError) as error:
        raise WeftError(f"{path}: is damaged: {describe_cause(error)}") from error


def open_regular(path: Path) -> IO[bytes]:
    """Open a regular file for reading; a pipe or device could block forever.

    Raises:
        OSError: if there is none, or it is something else.
    """
    if not isinstance(path, PurePath):  # a universal_pathlib path of an object store
        return path.open("rb")  # type: ignore[unreachable]
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return open(handle, "rb")


def read_text(path: Path) -> str:
    """Return the text of a regular file of at most `MAX_BYTES`.

    Raises:
        OSError: if it cannot be read, or is longer.
        ValueError: if it is not UTF-8.
    """
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > MAX_BYTES:
            raise OSError(errno.EFBIG, f"it is larger than {MAX_BYTES >> 20} MiB", str(path))
        return file.read(size).decode("utf-8")


def read_input(path: Path) -> str:
    """Return the text of a file or pipe that the user names, of at most `MAX_BYTES`.

    A shell passes ``<(command)`` as a pipe.  A pipe that no process writes to is an error.

    Raises:
        OSError: if it cannot be read, is empty and a pipe, or is longer.
        ValueError: if it is not UTF-8.
    """
    if not path.is_fifo():
        return _with_newlines(read_text(path))
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
        os.set_blocking(file.fileno(), True)  # only the opening must not wait
        content = file.read(MAX_BYTES + 1)
    if not content:
        raise OSError(errno.EINVAL, "it is a pipe to which nothing is written", str(path))
    if len(content) > MAX_BYTES:
        raise OSError(errno.EFBIG, f"it is larger than {MAX_BYTES >> 20} MiB", str(path))
    return _with_newlines(content.decode("utf-8"))


def _with_newlines(text: str) -> str:
    """Convert the ends of lines of other systems, as Python's text files do."""
    return text.replace("\r\n", "\n").replace("\r", "\n")


def append_bytes(path: Path, data: bytes, lines: bool = True) -> None:
    """Append all of ``data`` to a file, or nothing.

    Other processes may append to the file, too.  If ``lines``, the file has lines of text: a last
    line that a crash cut short gets a newline first, so that it does not damage the next one.

    Raises:
        OSError: nothing of ``data`` is left in the file.
    """
    with path.open("a+b", buffering=0) as file:
        end = file.seek(0, os.SEEK_END)
        if lines and end and os.pread(file.fileno(), 1, end - 1) != b"\n":
            data = b"\n" + data
        done = 0
        try:
            while done < len(data):
                done += file.write(data[done:]) or 0
        except OSError:
            if done and os.fstat(file.fileno()).st_size == end + done:
                file.truncate(end)
            raise


def describe_cause(error: BaseException) -> str:
    """Return the reason of an error for people: 'no space left on device'."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror[0].lower() + error.strerror[1:]
    return f"{type(error).__name__}: {error}"


def only_finite(value: Any, instead: Callable[[float], object] = lambda number: None) -> Any:
    """Return a tree of dicts and lists that JSON allows: NaN and Inf become null.

    ``instead`` returns another replacement for such a number.
    """
    if isinstance(value, dict):
        return {name: only_finite(each, instead) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [only_finite(each, instead) for each in value]
    return instead(value) if isinstance(value, float) and not math.isfinite(value) else value


def check_url(key: str, url: str) -> list[ConfigError]:
    """Return an error, which hides them, if a URL has credentials."""
    scheme, found, rest = url.partition("://")
    # A secret may have slashes; then it looks like a directory.
    if not found or not re.match(r"[^/]*@|[^/@]*:[^@]*@", rest):
        return []
    remedy = "put them into ~/.aws/credentials, AWS_* variables or ~/.netrc"
    return [ConfigError(key, f"{scheme}://...", "has credentials in it", remedy)]


def parse_address(text: str) -> tuple[str, int] | None:
    """Return host and port of HOST:PORT or [IPv6]:PORT; None if the text is neither."""
    match = re.fullmatch(r"(?:\[([0-9a-fA-F:]+)\]|([^:/\[\]\s]+)):(\d{1,5})", text)
    if match is None or int(match[3]) > MAX_PORT:
        return None
    return match[1] or match[2], int(match[3])


def storage_options(url: str) -> dict[str, Any]:
    """Return fsspec's options for a URL: fresh listings, repeated requests to S3."""
    options: dict[str, Any] = {"use_listings_cache": False}  # it would hide what others write
    if url.startswith("s3://"):
        retries = {"max_attempts": MAX_ATTEMPTS, "mode": "standard"}
        options["config_kwargs"] = {"retries": retries}
    return options


def read_optional_text(path: Path) -> str:
    """Return the text of a file; empty if it is missing or not readable."""
    with suppress(OSError):
        return path.read_text("utf-8", "surrogateescape")
    return ""
