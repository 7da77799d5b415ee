"""Where checkpoints lie: a folder, local or shared, or a place in an object store.

Both are paths: ``pathlib.Path``, or for ``s3://bucket/prefix`` universal_pathlib's, on fsspec and
s3fs.  They differ in what makes a thing durable and whole, and that is all there is here.  A file
system has fsync and an atomic rename of folders.  An object store has neither: an object is there,
whole and durable, once its upload is completed, and a *conditional* put fails if there is one of
that name already.

Credentials, region and endpoint of a store are found where its own tools look for them
(``AWS_ACCESS_KEY_ID``, ``AWS_ENDPOINT_URL``, ``~/.aws``, a role); weft neither takes nor shows
them.
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

import numpy as np

from weft.config.errors import InvalidConfig, WeftError
from weft.config.files import check_url, sync_folder

# Not os.posix_fallocate: where a file system cannot do it, that writes all blocks.
_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]


class Damaged(Exception):
    """What a checkpoint holds is not what was written."""


ATTEMPTS = 8  # at a request that fails for a reason that passes, waiting longer each time: ~30 s


def open_folder(place: str | Path) -> Path:
    """The folder of that name or URL, which need not exist.

    Raises:
        WeftError: if what reads such URLs is not installed, or the URL has credentials in it.
    """
    if "://" not in str(place):
        return Path(place)
    if problems := check_url("folder", str(place)):
        raise InvalidConfig(problems)
    try:
        from upath import UPath

        options: dict[str, Any] = {"use_listings_cache": False}  # which hides what others wrote
        if str(place).startswith("s3://"):
            options["config_kwargs"] = {"retries": {"max_attempts": ATTEMPTS, "mode": "standard"}}
        folder: Any = UPath(place, **options)
        assert folder.fs  # imports what reads it
    except ImportError as error:
        raise WeftError(f"{place}: needs {error.name}: pip install 'weft[s3]'") from error
    return folder  # type: ignore[no-any-return]


def is_remote(path: Path) -> bool:
    """Whether a path lies in an object store."""
    return not isinstance(path, PurePath)


@contextmanager
def create(path: Path, size: int = 0) -> Iterator[IO[bytes]]:
    """A new file to write, on the disk or in the store when this ends.

    If it fails there is none in a store, and perhaps a part of one in a file system.

    Args:
        size: that it will have, if known: room is made at once, which is faster, and it is known
            at once if there is none.

    Raises:
        FileExistsError: in a file system, if there is one.
    """
    if is_remote(path):
        with path.open("wb") as file:
            try:
                yield file
            except BaseException:
                file.discard()  # type: ignore[attr-defined]
                file.close = lambda: None  # type: ignore[method-assign]  # which would upload
                raise
        return
    with path.open("xb") as file:
        if size and sys.platform == "linux" and _LIBC.fallocate(file.fileno(), 0, 0, size):
            number = ctypes.get_errno()
            if number != errno.EOPNOTSUPP:
                raise OSError(number, os.strerror(number), str(path))
        yield file
        file.flush()
        os.fsync(file.fileno())


def put_new(path: Path, content: bytes) -> None:
    """Write a small file that nobody else may have written: of several writers one succeeds.

    Raises:
        FileExistsError: if it is there.
    """
    if is_remote(path):
        try:
            path.fs.pipe_file(path.path, content, mode="create")  # type: ignore[attr-defined]
        except OSError as error:
            # Stores say it in different ways; and a put that was tried again may meet itself.
            found = path.read_bytes() if path.exists() else None
            if found is None:
                raise
            if found != content:
                raise FileExistsError(f"{path} is there already") from error
        return
    # In one step with its contents: a reader must not see it empty.  By a name of its own: on other
    # hosts, and in other containers, processes have the same numbers.
    temporary = path.with_name(f".tmp-{path.name}-{uuid.uuid4().hex[:8]}")
    try:
        with open(temporary, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        try:
            os.link(temporary, path)
        except FileNotFoundError:  # another process has just cleared it away as a leftover
            return put_new(path, content)
    finally:
        temporary.unlink(missing_ok=True)
    sync_folder(path.parent)


def regular_size(path: Path) -> int:
    """Return the size of a file in bytes.

    Raises:
        Damaged: if it is a link, a FIFO, a device or a directory: a checkpoint has none of these.
        OSError: if there is none.
    """
    if is_remote(path):
        return path.stat().st_size
    found = path.lstat()
    if not stat.S_ISREG(found.st_mode):
        raise Damaged(f"{path.name} is {_kind_of(found.st_mode)}, not a regular file")
    return found.st_size


def _kind_of(mode: int) -> str:
    kinds = {stat.S_ISLNK: "a symbolic link", stat.S_ISDIR: "a directory", stat.S_ISFIFO: "a FIFO"}
    return next((name for is_kind, name in kinds.items() if is_kind(mode)), "a device or socket")


def read_regular(path: Path, most: int) -> bytes:
    """Return the content of a regular file of at most ``most`` bytes.

    Raises:
        Damaged: if it is larger, or not regular.
        OSError: if it cannot be read.
    """
    size = regular_size(path)
    if size > most:
        raise Damaged(f"{path.name} has {size:,} bytes; at most {most:,} are read")
    if is_remote(path):
        return path.read_bytes()
    with _open_regular(path) as file:
        return file.read(size)


def _open_regular(path: Path) -> IO[bytes]:
    """Open a file that `regular_size` has seen; no link is followed."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    return os.fdopen(os.open(path, flags), "rb", buffering=0)


def read_range(path: Path, start: int, stop: int) -> memoryview:
    """The bytes of a file from ``start`` up to ``stop``, and no others; fewer at its end."""
    buffer = room(stop - start)
    return buffer[: stop - start - read_pieces(path, [(start, buffer)])]


def room(size: int) -> memoryview:
    """New memory, not touched before it is filled."""
    return memoryview(np.empty(size, np.uint8).data)


def read_pieces(path: Path, pieces: Sequence[tuple[int, memoryview]]) -> int:
    """Fill each piece of memory with the bytes of a file from a position on.

    One request to a store for all of them, what lies between included; from a disk nothing else.

    Args:
        pieces: in the order of their positions.

    Returns:
        How many bytes the file lacks.
    """
    lacking = 0
    if is_remote(path):
        begin, end = pieces[0][0], max(start + len(piece) for start, piece in pieces)
        content = pieces[0][1] if len(pieces) == 1 else room(end - begin)
        lacking = end - begin - _fetch(path, begin, content)
        if len(pieces) > 1:
            for start, piece in pieces:
                piece[:] = content[start - begin : start - begin + len(piece)]
        return lacking
    with _open_regular(path) as file:
        for start, piece in pieces:
            file.seek(start)
            got = 0
            while got < len(piece) and (count := file.readinto(piece[got:])):  # type: ignore[attr-defined]
                got += count
            lacking += len(piece) - got
    return lacking


def _fetch(path: Any, start: int, buffer: memoryview) -> int:
    """Fill ``buffer`` from an object's byte ``start`` on; how many there were.

    With Amazon's own client, if that is installed and can.
    """
    if client := _amazon_client(path.fs):
        from s3torchconnector import S3Exception, S3ReaderConstructor

        bucket, _, key = path.path.partition("/")
        # Without a buffer it fetches what is asked for, and no more.
        exact = S3ReaderConstructor.range_based(buffer_size=0)
        try:
            reader = client.get_object(bucket, key, reader_constructor=exact)
            reader.seek(start)
            return int(reader.readinto(buffer))
        except S3Exception:
            pass  # not all stores get on with it; s3fs tries again, and says what is wrong
    content = path.fs.cat_file(path.path, start=start, end=start + len(buffer))
    buffer[: len(content)] = content
    return len(content)


@cache
def _amazon_client(fs: Any) -> Any:
    """s3torchconnector's client for the same store; None if it is not installed.

    Written in Rust, so it does not share Python's lock with others that read.  Its class is
    private: what it makes public reads an object from its beginning on.
    """
    if "s3" not in fs.protocol:
        return None
    try:
        from s3torchconnector import S3ClientConfig
        from s3torchconnector._s3client import S3Client
    except ImportError:
        return None
    fs.connect()
    found = fs.s3.meta
    amazon = "amazonaws.com" in found.endpoint_url
    config = S3ClientConfig(unsigned=fs.anon, force_path_style=not amazon, max_attempts=ATTEMPTS)
    endpoint = None if amazon else found.endpoint_url
    return S3Client(found.region_name or "us-east-1", endpoint=endpoint, s3client_config=config)


def remove(path: Path) -> None:
    """Delete a folder and what is in it, or a file; no error if it is not there."""
    if is_remote(path):
        if path.exists():
            path.fs.rm(path.path, recursive=True)  # type: ignore[attr-defined]
    elif path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
