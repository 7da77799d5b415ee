"""Files that are written as a whole: a reader, and the next start, sees the old or the new one.

What a run shows is written with `replace_text`, `replace_bytes` and `write_json`; what must still
be there after a power cut with `write_durably`, which waits for the disk.  Checkpoints have more
to fear than that and their own way: `weft.checkpoint.storage`.
"""

from __future__ import annotations

import errno
import json
import math
import os
import re
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from weft.job import Problem, WeftError


def replace_text(path: Path, text: str) -> None:
    """See `replace_bytes`."""
    replace_bytes(path, text.encode())


def replace_bytes(path: Path, data: bytes) -> None:
    """Write a file so that a reader sees the old or the new one, never a part.

    Raises:
        OSError: nothing of the new one is left.
    """
    with _replacing(path) as file:
        file.write(data)


def write_durably(path: Path, data: bytes | memoryview[Any]) -> None:
    """`replace_bytes`, and when this returns the file outlives a power cut."""
    with _replacing(path) as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    sync_folder(path.parent)


@contextmanager
def _replacing(path: Path) -> Iterator[IO[bytes]]:
    # Other nodes may be writing the same.
    temporary = path.with_name(f".{path.name}.{socket.gethostname()}-{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            yield file
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)  # a full disk needs its bytes
        raise


def sync_folder(path: Path) -> None:
    """Force a folder's entries to the disk: a rename is durable only then.

    Raises:
        OSError: if the disk fails; not on a file system that knows no such thing.
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
    """See `replace_bytes`."""
    replace_text(path, json.dumps(value, indent=indent) + "\n")


def read_json(path: Path) -> dict[str, Any]:
    """The object in a file; empty if there is no file.

    Raises:
        WeftError: if it cannot be read.
    """
    try:
        found = json.loads(path.read_text("utf-8")) if path.exists() else {}
    except (OSError, ValueError) as error:
        raise WeftError(f"{path}: cannot be read: {error}") from error
    return found if isinstance(found, dict) else {}


def only_finite(value: Any, instead: Callable[[float], object] = lambda number: None) -> Any:
    """A tree of dicts and lists as JSON can have it: what is infinite or not a number becomes null.

    Args:
        instead: makes something else of such a number.
    """
    if isinstance(value, dict):
        return {name: only_finite(each, instead) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [only_finite(each, instead) for each in value]
    return instead(value) if isinstance(value, float) and not math.isfinite(value) else value


def check_url(key: str, url: str) -> list[Problem]:
    """Refuse credentials in a URL, without showing them: it would stand in files and logs."""
    scheme, found, rest = url.partition("://")
    # A secret may have slashes: then it looks like a folder.
    if not found or not re.match(r"[^/]*@|[^/@]*:[^@]*@", rest):
        return []
    remedy = "put them into ~/.aws/credentials, AWS_* variables or ~/.netrc"
    return [Problem(key, f"{scheme}://...", "has credentials in it", remedy)]
