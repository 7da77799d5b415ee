"""Find and open source files, on a disk or in an object store.

Files in an object store are streamed through fsspec: never fully in memory, and never copied to the
disk.  fsspec finds credentials, region and endpoint as the store's own tools do.
"""

from __future__ import annotations

import io
import os
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from functools import cache, partial
from pathlib import Path
from typing import Any, BinaryIO, Literal, cast

from weft.config.errors import ConfigError, InvalidConfig

Format = Literal["jsonl", "parquet", "arrow", "tokens"]

MAX_ATTEMPTS = 8  # per request, if the error is transient
READ_BYTES = 8 << 20  # per request to an object store
# Limit of a compressed file: this multiple of its size, and at least the second number.
MAX_EXPANSION, MIN_CONTENT_LIMIT = 1000, 256 << 20
# Compressed bytes per call of the library: zlib returns at most 1032 times as many, zstandard a
# block of 128 KiB per four bytes.
INPUT_BYTES = 256

_FORMATS: dict[str, Format] = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".feather": "arrow",
    ".bin": "tokens",
}
_COMPRESSED = (".gz", ".zst")
_METADATA_PREFIXES = ("readme", "license", "licence")  # beside the files of a dataset
_METADATA_SUFFIXES = (".md", ".json", ".idx", ".pkl")
_GLOB_CHARS = set("*?[")


@dataclass(frozen=True)
class File:
    """Source file; ``name`` is relative to the source, ``path`` a path or URL.

    ``version`` changes with the content: the modification time, or what the object store reports.
    """

    name: str
    path: str
    size_bytes: int
    version: str

    @property
    def identity(self) -> list[object]:
        """Return what identifies the content of a file, without its path, as JSON types."""
        return [self.name, self.size_bytes, self.version]


def is_remote(path: str) -> bool:
    """Return True if a path is a URL."""
    return "://" in path


def is_glob(path: str) -> bool:
    """Return True if a path has a glob character (which file names may have, too)."""
    return bool(_GLOB_CHARS.intersection(path))


def is_compressed(name: str) -> bool:
    """Return True if `decompress_stream` decompresses files of this name."""
    return name.lower().endswith(_COMPRESSED)


def detect_format(name: str, explicit: bool = False) -> Format | None:
    """Return the format of a file by its name; None: text.

    Args:
        name: file name, any case; a suffix of compression is removed first.
        explicit: the user named the file, or its glob; ``.json`` then is JSON Lines.  In a
            directory, ``.json`` may be metadata or any document.
    """
    name = name.lower()
    for suffix in _COMPRESSED:
        if name.endswith(suffix):
            name = name.removesuffix(suffix)
            return "jsonl" if name.endswith((".jsonl", ".ndjson", ".json")) else None
    if name.endswith(".json"):
        return "jsonl" if explicit else None
    return next((kind for suffix, kind in _FORMATS.items() if name.endswith(suffix)), None)


def is_metadata_file(name: str) -> bool:
    """Return True if a file among those of a dataset only describes them."""
    last = name.rpartition("/")[2].lower()
    return last.startswith((*_METADATA_PREFIXES, "_", ".")) or last.endswith(_METADATA_SUFFIXES)


def stat_local_file(path: Path, name: str) -> File:
    """Return the current state of a local file, with a printable name.

    Raises:
        OSError: the file does not exist.
    """
    stat = path.stat()
    # A file name need not be UTF-8, but hashes and messages need text.
    safe_name = os.fsencode(name).decode("utf-8", "backslashreplace")
    return File(safe_name, str(path), stat.st_size, str(stat.st_mtime_ns))


# --------------------------------------------------------------------------- object stores


@cache
def _filesystem(scheme: str) -> Any:
    options: dict[str, Any] = {"use_listings_cache": False}  # a cache hides new files
    if scheme == "s3":
        options["config_kwargs"] = {"retries": {"max_attempts": MAX_ATTEMPTS, "mode": "standard"}}
    try:
        import fsspec

        return fsspec.filesystem(scheme, **options)
    except ImportError as error:
        rule = f"cannot be read without another package: {error}"
        remedy = "run pip install 'weft[s3]' for s3://; for others, the package that fsspec names"
    except ValueError as error:
        rule, remedy = str(error), "use a path, s3://bucket/prefix or hf://org/name"
    raise path_error(f"{scheme}://", rule, remedy)


def list_remote_files(url: str) -> list[File]:
    """List the files at a URL, below it, or matching its glob.

    Raises:
        InvalidConfig: the files cannot be listed.
    """
    scheme = url.partition("://")[0]
    fs = _filesystem(scheme)
    root = fs._strip_protocol(url)
    # Every library has other exception types.
    try:
        if is_glob(url):
            entries = fs.glob(root, detail=True)
            root = root[: min(root.find(c) for c in _GLOB_CHARS if c in root)].rpartition("/")[0]
        else:
            entries = fs.find(root, detail=True)
    except Exception as error:
        rule = f"cannot be listed: {type(error).__name__}: {error}"
        remedy = "check the name, the credentials and the endpoint"
        raise path_error(url, rule, remedy) from error
    files = []
    for path, info in sorted(entries.items()):
        if info.get("type", "file") != "file":
            continue
        if info.get("size") is None:  # web servers do not list sizes
            info = fs.info(path)
        name = path.removeprefix(root).lstrip("/") or path.rpartition("/")[2]
        file_url = path if is_remote(path) else f"{scheme}://{path.lstrip('/')}"
        files.append(File(name, file_url, int(info.get("size") or 0), _version(info)))
    return files


def _version(info: dict[str, Any]) -> str:
    keys = ("ETag", "etag", "LastModified", "last_modified", "Last-Modified", "mtime", "created")
    value = next((info[name] for name in keys if info.get(name)), "")
    # Listing a directory and querying a file may return the time in different types.
    return str(value.timestamp() if isinstance(value, datetime) else value)


# --------------------------------------------------------------------------- opening


@contextmanager
def open_file(file: File) -> Iterator[BinaryIO]:
    """Open a file in binary mode, seekable.

    Raises:
        InvalidConfig: the file cannot be read, or has changed since it was found.
    """
    # Not around the yield: errors of the caller are not errors of this file.
    try:
        if is_remote(file.path):
            fs = _filesystem(file.path.partition("://")[0])
            info = fs.info(file.path)
            state = int(info.get("size") or 0), _version(info)
            stream: BinaryIO
            remote = fs.open(file.path, "rb", block_size=READ_BYTES)
            # Its readline accepts a limit.
            stream = cast(BinaryIO, io.BufferedReader(remote, 1 << 20))
        else:
            stream = open(file.path, "rb", buffering=1 << 20)  # noqa: SIM115 closed below
            stat = os.fstat(stream.fileno())
            state = stat.st_size, str(stat.st_mtime_ns)
    except Exception as error:  # any type, of the library of the store
        raise unreadable_error(file, error) from error
    with stream:
        if state != (file.size_bytes, file.version):
            raise changed_error(file)
        yield stream


def path_error(path: str, rule: str, remedy: str = "") -> InvalidConfig:
    """Return an error of ``data.path``."""
    return InvalidConfig([ConfigError("data.path", path, rule, remedy)])


def unreadable_error(file: File, error: Exception) -> InvalidConfig:
    """Return the error for a source file that cannot be opened or read."""
    reason = error.strerror if isinstance(error, OSError) and error.strerror else error
    remedy = "make the file readable, or give other files"
    return path_error(file.path, f"cannot be read: {reason}", remedy)


def changed_error(file: File) -> InvalidConfig:
    """Return the error for a file that changed after it was found or first read."""
    rule, remedy = "changed while it was being prepared", "run again when the file is complete"
    return path_error(file.path, rule, remedy)


class DecompressionError(Exception):
    """Compressed file that is truncated, damaged, or a decompression bomb."""


def max_content_bytes(size_bytes: int) -> int:
    """Return the content limit of a compressed file; more is a decompression bomb."""
    return max(MIN_CONTENT_LIMIT, MAX_EXPANSION * size_bytes)


def decompress_stream(stream: BinaryIO, name: str, size_bytes: int) -> BinaryIO:
    """Return the decompressed content of a stream, by the suffix of ``name``.

    One call of the library returns a few megabytes at most.  Reading raises `DecompressionError` if
    the content ends early, is damaged, or exceeds `max_content_bytes`.

    Args:
        stream: the compressed file, opened for reading.
        name: file name with its suffix, ``.gz`` or ``.zst``.
        size_bytes: size of the compressed file.
    """
    if name.lower().endswith(".gz"):
        new_decoder: Callable[[], Any] = partial(zlib.decompressobj, wbits=31)
        frames = _FrameReader(stream, new_decoder, zlib.error, size_bytes)
    else:
        try:
            import zstandard
        except ImportError as error:
            rule, remedy = "needs zstandard, which is not installed", "run pip install 'weft[data]'"
            raise path_error(".zst", rule, remedy) from error
        # The window costs memory, and a small file needs no large one.
        window = min(1 << 31, max(1 << 27, 64 * size_bytes))
        new_decoder = zstandard.ZstdDecompressor(max_window_size=window).decompressobj
        frames = _FrameReader(stream, new_decoder, zstandard.ZstdError, size_bytes)
    return cast(BinaryIO, io.BufferedReader(frames, 1 << 20))


class _FrameReader(io.RawIOBase):
    """Raw stream that decompresses frames, and returns all data before an error.

    The reader of gzip discards the data before an error; that of zstandard treats a truncated frame
    as the end.
    """

    def __init__(
        self,
        stream: BinaryIO,
        new_decoder: Callable[[], Any],
        error: type[Exception],
        size_bytes: int,
    ) -> None:
        self._stream, self._new_decoder, self._error = stream, new_decoder, error
        self._limit_bytes = self._remaining_bytes = max_content_bytes(size_bytes)
        self._decoder: Any = None
        self._input = b""
        self._output = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._output:
            if self._decoder is None:
                self._input = self._input.lstrip(b"\0")  # padding between frames
            self._input = self._input or self._stream.read(INPUT_BYTES)
            if not self._input:
                if self._decoder is not None:
                    raise DecompressionError("the compressed file is truncated")
                return 0
            self._decoder = self._decoder or self._new_decoder()
            try:
                self._output = memoryview(self._decoder.decompress(self._input))
            except self._error as error:
                raise DecompressionError(f"the compressed file is damaged: {error}") from error
            self._remaining_bytes -= len(self._output)
            if self._remaining_bytes < 0:
                raise DecompressionError(
                    f"the file holds more than {self._limit_bytes:,} bytes, over {MAX_EXPANSION} "
                    "times its size: a decompression bomb"
                )
            ended = self._decoder.eof
            self._input = self._decoder.unused_data if ended else b""
            if ended:
                self._decoder = None
        size = min(len(buffer), len(self._output))
        buffer[:size] = self._output[:size]
        self._output = self._output[size:]
        return size
