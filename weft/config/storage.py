"""File operations of checkpoints and token stores: file system or object store.

Paths are ``pathlib.Path``, or for ``s3://bucket/prefix`` universal_pathlib's, on fsspec and s3fs.
The two kinds of storage differ in durability and atomicity, which this module hides.  A file system
has fsync and an atomic rename of directories.  An object store has neither: an object becomes
visible, complete and durable when its upload completes, and a *conditional* put fails if the object
exists.

Credentials, region and endpoint of a store come from its own tools' sources (``AWS_ACCESS_KEY_ID``,
``AWS_ENDPOINT_URL``, ``~/.aws``, a role).  weft neither takes nor prints them.
"""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import stat
import sys
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path, PurePath
from typing import IO, Any

from weft.config.errors import ConfigError, InvalidConfig, WeftError
from weft.config.files import MAX_ATTEMPTS, check_url, storage_options, sync_directory

# os.posix_fallocate would write all blocks on a file system without support.
_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]


BUCKET_SCHEMES = ("s3", "s3a", "gs", "gcs", "az", "abfs", "oss")
READ_ONLY_SCHEMES = ("http://", "https://")


class CorruptData(Exception):
    """Stored bytes are not what was written; the message is a clause."""


def open_directory(location: str | Path) -> Path:
    """Return the path of a directory name or URL; it need not exist.

    Raises:
        WeftError: if the package for such URLs is not installed, or the URL contains credentials.
        InvalidConfig: if no file system is known for the URL.
    """
    if "://" not in str(location):
        return Path(location)
    if problems := check_url("directory", str(location)):
        raise InvalidConfig(problems)
    scheme, _, rest = str(location).partition("://")
    if scheme in BUCKET_SCHEMES and not rest.strip("/"):
        rule, remedy = "names no bucket", f"use {scheme}://BUCKET/PATH"
        raise InvalidConfig([ConfigError("directory", str(location), rule, remedy)])
    try:
        from upath import UPath

        directory: Any = UPath(location, **storage_options(str(location)))
        assert directory.fs  # imports the file system's package
    except ImportError as error:
        raise WeftError(f"{location}: needs {error.name}: pip install 'weft[s3]'") from error
    except ValueError as error:
        rule, remedy = f"is not the URL of a store: {error}", "use s3://BUCKET/PATH"
        raise InvalidConfig([ConfigError("directory", str(location), rule, remedy)]) from error
    return directory  # type: ignore[no-any-return]


def is_bucket_url(path: str) -> bool:
    """Return True for a URL of an object store, such as ``s3://bucket/store``."""
    scheme, is_url, _ = path.partition("://")
    return bool(is_url) and scheme in BUCKET_SCHEMES


def check_store_writable(key: str, url: str) -> list[ConfigError]:
    """Return an error if a URL's file system can only be read."""
    if not url.startswith(READ_ONLY_SCHEMES):
        return []
    rule, remedy = "is a server that can only be read", "use a directory, or s3://BUCKET/PATH"
    return [ConfigError(key, url, rule, remedy)]


def is_remote(path: Path) -> bool:
    """Return True if a path is in an object store."""
    return not isinstance(path, PurePath)


@contextmanager
def create_file(path: Path, size: int = 0, durable: bool = True) -> Iterator[IO[bytes]]:
    """Create a file that is complete when the context exits.

    After an error, a store has no object, and a file system may have a partial file.

    Args:
        path: file that does not exist yet.
        size: final size in bytes, if known.  Space is allocated at once, which is faster and fails
            early on a full disk.
        durable: wait until the file would survive a power failure.

    Raises:
        FileExistsError: on a file system, if the file exists.
    """
    if is_remote(path):
        with path.open("wb") as file:
            try:
                yield file
            except BaseException:
                file.discard()  # type: ignore[attr-defined]
                file.close = lambda: None  # type: ignore[method-assign]  # it would upload
                raise
        return
    with path.open("xb") as file:
        if size and sys.platform == "linux" and _LIBC.fallocate(file.fileno(), 0, 0, size):
            code = ctypes.get_errno()
            if code != errno.EOPNOTSUPP:
                raise OSError(code, os.strerror(code), str(path))
        yield file
        if durable:
            file.flush()
            os.fsync(file.fileno())


def put_if_absent(path: Path, content: bytes) -> None:
    """Write a small file atomically; of several writers one succeeds.

    Raises:
        FileExistsError: if the file exists.
    """
    if is_remote(path):
        try:
            path.fs.pipe_file(path.path, content, mode="create")  # type: ignore[attr-defined]
        except OSError as error:
            # Stores raise different errors, and a retried put may find its own object.
            stored = path.read_bytes() if path.exists() else None
            if stored is None:
                raise
            if stored != content:
                raise FileExistsError(f"{path} is there already") from error
        return
    # The link makes name and contents visible together, so no reader sees an empty file.  The name
    # is random, because process ids repeat on other hosts and in other containers.
    temporary = path.with_name(f".tmp-{path.name}-{uuid.uuid4().hex[:8]}")
    try:
        with open(temporary, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        try:
            os.link(temporary, path)
        except FileNotFoundError:  # another process has just deleted it as a leftover
            return put_if_absent(path, content)
    finally:
        temporary.unlink(missing_ok=True)
    sync_directory(path.parent)


def regular_file_size(path: Path) -> int:
    """Return the size of a file in bytes.

    Raises:
        CorruptData: if it is a link, FIFO, device or directory, none of which a checkpoint has.
        OSError: if it does not exist.
    """
    if is_remote(path):
        return path.stat().st_size
    status = path.lstat()
    if not stat.S_ISREG(status.st_mode):
        raise CorruptData(f"{path.name} is {_file_type(status.st_mode)}, not a regular file")
    return status.st_size


def _file_type(mode: int) -> str:
    kinds = {stat.S_ISLNK: "a symbolic link", stat.S_ISDIR: "a directory", stat.S_ISFIFO: "a FIFO"}
    return next((name for is_kind, name in kinds.items() if is_kind(mode)), "a device or socket")


def read_regular_file(path: Path, max_bytes: int) -> bytes:
    """Return the content of a regular file of at most ``max_bytes`` bytes.

    Raises:
        CorruptData: if the file is larger or not regular.
        OSError: if it cannot be read.
    """
    size = regular_file_size(path)
    if size > max_bytes:
        raise CorruptData(f"{path.name} has {size:,} bytes, more than the limit of {max_bytes:,}")
    if is_remote(path):
        return path.read_bytes()
    with _open_regular(path) as file:
        return file.read(size)


def _open_regular(path: Path) -> IO[bytes]:
    """Open a file that `regular_file_size` has checked, without following links."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    return os.fdopen(os.open(path, flags), "rb", buffering=0)


def read_range(path: Path, start: int, stop: int) -> memoryview:
    """Return the bytes of a file from ``start`` to ``stop``; fewer at its end."""
    buffer = allocate_buffer(stop - start)
    return buffer[: stop - start - read_chunks(path, [(start, buffer)])]


def allocate_buffer(size: int) -> memoryview:
    """Return uninitialized memory of ``size`` bytes."""
    import numpy as np  # which the command line need not wait for

    return memoryview(np.empty(size, np.uint8).data)


def read_chunks(path: Path, chunks: Sequence[tuple[int, memoryview]]) -> int:
    """Fill each chunk's memory with the bytes of a file from its position.

    A store gets one request for all chunks, gaps included; a disk is read without the gaps.

    Args:
        path: file or object.
        chunks: (position, memory) pairs, by position.

    Returns:
        The number of bytes that the file is too short.
    """
    missing = 0
    if is_remote(path):
        begin, end = chunks[0][0], max(start + len(chunk) for start, chunk in chunks)
        content = chunks[0][1] if len(chunks) == 1 else allocate_buffer(end - begin)
        missing = end - begin - _fetch(path, begin, content)
        if len(chunks) > 1:
            for start, chunk in chunks:
                chunk[:] = content[start - begin : start - begin + len(chunk)]
        return missing
    with _open_regular(path) as file:
        for start, chunk in chunks:
            file.seek(start)
            done = 0
            while done < len(chunk) and (count := file.readinto(chunk[done:])):  # type: ignore[attr-defined]
                done += count
            missing += len(chunk) - done
    return missing


def _fetch(path: Any, start: int, buffer: memoryview) -> int:
    """Fill ``buffer`` with an object's bytes from ``start``; return their number.

    Uses Amazon's own client if it is installed and supports the store.
    """
    if client := _amazon_client(path.fs):
        from s3torchconnector import S3Exception, S3ReaderConstructor

        bucket, _, key = path.path.partition("/")
        # Without a buffer the reader fetches only the requested range.
        exact = S3ReaderConstructor.range_based(buffer_size=0)
        try:
            reader = client.get_object(bucket, key, reader_constructor=exact)
            reader.seek(start)
            return int(reader.readinto(buffer))
        except S3Exception:
            pass  # not every store supports this client; s3fs retries and reports the error
    content = path.fs.cat_file(path.path, start=start, end=start + len(buffer))
    buffer[: len(content)] = content
    return len(content)


@cache
def _amazon_client(fs: Any) -> Any:
    """Return s3torchconnector's client for the same store, or None.

    The client is written in Rust, so readers do not share Python's lock.  Its class is private,
    because the public one reads objects only from the start.
    """
    if "s3" not in fs.protocol:
        return None
    try:
        from s3torchconnector import S3ClientConfig
        from s3torchconnector._s3client import S3Client
    except ImportError:
        return None
    fs.connect()
    client = fs.s3.meta
    is_amazon = "amazonaws.com" in client.endpoint_url
    config = S3ClientConfig(
        unsigned=fs.anon, force_path_style=not is_amazon, max_attempts=MAX_ATTEMPTS
    )
    endpoint = None if is_amazon else client.endpoint_url
    return S3Client(client.region_name or "us-east-1", endpoint=endpoint, s3client_config=config)


def remove(path: Path) -> None:
    """Delete a file or a directory tree; no error if it does not exist."""
    if is_remote(path):
        if path.exists():
            path.fs.rm(path.path, recursive=True)  # type: ignore[attr-defined]
    elif path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
