"""Files that hold documents or tokens, on a disk or in an object store, and how they are opened.

What an object store holds is read through fsspec, as a stream: never wholly in memory, and never
copied to the disk.  Credentials, region and endpoint are found where the store's own tools look
for them; weft neither takes nor shows them.
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

ATTEMPTS = 8  # at a request that fails for a reason that passes
READ_BYTES = 8 << 20  # of a remote file, asked for at once
# A compressed file may hold so many times its size; a small one may hold FREE_BYTES.
MOST_EXPANSION, FREE_BYTES = 1000, 256 << 20
# Of a compressed stream, given to the library by one call: zlib returns at most 1032 times that,
# zstandard a block of 128 KiB for every four bytes.
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
_CARDS = ("readme", "license", "licence")  # what lies beside the files of a data set
_CARD_ENDINGS = (".md", ".json", ".idx", ".pkl")
_MAGIC = set("*?[")


@dataclass(frozen=True)
class File:
    """One file: its name below the path that was given, where it lies, and its size.

    ``version`` changes with the contents: the time of the last change, or what the store says.
    """

    name: str
    path: str
    size_bytes: int
    version: str


def is_remote(path: str) -> bool:
    """Whether a path is a URL."""
    return "://" in path


def is_glob(path: str) -> bool:
    """Whether a path has one of the signs of a pattern; a file may be called so all the same."""
    return bool(_MAGIC.intersection(path))


def is_compressed(name: str) -> bool:
    """Whether a file of that name is one that `decompressed` knows."""
    return name.lower().endswith(_COMPRESSED)


def format_of(name: str, alone: bool = False) -> Format | None:
    """What a file holds, by its name; None: text.

    Args:
        alone: it was named itself, or by a glob: ``.json`` is lines then, too.  In a folder it
            is a data set's description, or a document like any other.
    """
    name = name.lower()
    for ending in _COMPRESSED:
        if name.endswith(ending):
            name = name.removesuffix(ending)
            return "jsonl" if name.endswith((".jsonl", ".ndjson", ".json")) else None
    if name.endswith(".json"):
        return "jsonl" if alone else None
    return next((kind for ending, kind in _FORMATS.items() if name.endswith(ending)), None)


def is_card(name: str) -> bool:
    """Whether a file among those of a data set only describes them."""
    last = name.rpartition("/")[2].lower()
    return last.startswith((*_CARDS, "_", ".")) or last.endswith(_CARD_ENDINGS)


def local_file(path: Path, name: str) -> File:
    """A file on a disk as it is now; ``name`` is made fit for messages.

    Raises:
        OSError: it is not there.
    """
    stat = path.stat()
    # A file name need not be text; the name goes into hashes and messages, so it is made text.
    shown = os.fsencode(name).decode("utf-8", "backslashreplace")
    return File(shown, str(path), stat.st_size, str(stat.st_mtime_ns))


# --------------------------------------------------------------------------- object stores


@cache
def _filesystem(scheme: str) -> Any:
    options: dict[str, Any] = {"use_listings_cache": False}  # which hides what others wrote
    if scheme == "s3":
        options["config_kwargs"] = {"retries": {"max_attempts": ATTEMPTS, "mode": "standard"}}
    try:
        import fsspec

        return fsspec.filesystem(scheme, **options)
    except ImportError as error:
        rule = f"cannot be read without another package: {error}"
        remedy = "pip install 'weft[s3]' for s3://, or what fsspec names for others"
    except ValueError as error:
        rule, remedy = str(error), "use a path, s3://bucket/prefix or hf://org/name"
    raise InvalidConfig([ConfigError("data.path", f"{scheme}://", rule, remedy)])


def remote_files(url: str) -> list[File]:
    """The files that a URL names: itself, those below it, or those that its glob matches.

    Raises:
        InvalidConfig: it cannot be listed.
    """
    scheme = url.partition("://")[0]
    fs = _filesystem(scheme)
    root = fs._strip_protocol(url)
    # What goes wrong on the way there has a type of its own in every library.
    try:
        if is_glob(url):
            found = fs.glob(root, detail=True)
            root = root[: min(root.find(c) for c in _MAGIC if c in root)].rpartition("/")[0]
        else:
            found = fs.find(root, detail=True)
    except Exception as error:
        rule = f"cannot be listed: {type(error).__name__}: {error}"
        remedy = "check name, credentials and endpoint"
        raise InvalidConfig([ConfigError("data.path", url, rule, remedy)]) from error
    files = []
    for path, about in sorted(found.items()):
        if about.get("type", "file") != "file":
            continue
        if about.get("size") is None:  # of a web server, which lists nothing
            about = fs.info(path)
        name = path.removeprefix(root).lstrip("/") or path.rpartition("/")[2]
        address = path if is_remote(path) else f"{scheme}://{path.lstrip('/')}"
        files.append(File(name, address, int(about.get("size") or 0), _version(about)))
    return files


def _version(about: dict[str, Any]) -> str:
    known = ("ETag", "etag", "LastModified", "last_modified", "Last-Modified", "mtime", "created")
    found = next((about[name] for name in known if about.get(name)), "")
    # Listing a folder and asking for a file may tell the same time in different types.
    return str(found.timestamp() if isinstance(found, datetime) else found)


# --------------------------------------------------------------------------- opening


@contextmanager
def open_file(file: File) -> Iterator[BinaryIO]:
    """Its bytes as they lie there, from the beginning on; may be sought in.

    Raises:
        InvalidConfig: it cannot be read, or is no longer the one that was found.
    """
    # Not around the yield: what goes wrong in the caller's hands is not this file's.
    try:
        if is_remote(file.path):
            fs = _filesystem(file.path.partition("://")[0])
            about = fs.info(file.path)
            found = int(about.get("size") or 0), _version(about)
            stream: BinaryIO
            remote = fs.open(file.path, "rb", block_size=READ_BYTES)
            # Whose readline takes a limit.
            stream = cast(BinaryIO, io.BufferedReader(remote, 1 << 20))
        else:
            stream = open(file.path, "rb", buffering=1 << 20)  # noqa: SIM115 closed below
            stat = os.fstat(stream.fileno())
            found = stat.st_size, str(stat.st_mtime_ns)
    except Exception as error:  # of the store's library, whatever that raises
        raise unreadable(file, error) from error
    with stream:
        if found != (file.size_bytes, file.version):
            raise changed(file)
        yield stream


def unreadable(file: File, error: Exception) -> InvalidConfig:
    """For a file of the user's of which opening or reading failed."""
    told = error.strerror if isinstance(error, OSError) and error.strerror else error
    remedy = "give files that can be read"
    return InvalidConfig([ConfigError("data.path", file.path, f"cannot be read: {told}", remedy)])


def changed(file: File) -> InvalidConfig:
    """For a file that is no longer what it was when it was found, or first read."""
    rule, remedy = "changed while it was being prepared", "start again once it is complete"
    return InvalidConfig([ConfigError("data.path", file.path, rule, remedy)])


class CutOff(Exception):
    """A compressed file that ends early, or is none."""


def most_content(size_bytes: int) -> int:
    """Return how many bytes of content a file of ``size_bytes`` may hold: more is a decompression
    bomb, not text."""
    return max(FREE_BYTES, MOST_EXPANSION * size_bytes)


def decompressed(stream: BinaryIO, name: str, size_bytes: int) -> BinaryIO:
    """The contents of a stream that ``name`` says how to decompress.

    One call of the library returns some megabytes at most.  Reading raises `CutOff` where the
    contents end too early, are damaged, or are more than `most_content`.

    Args:
        size_bytes: of the compressed file.
    """
    name = name.lower()
    if name.endswith(".gz"):
        return _frames(stream, partial(zlib.decompressobj, wbits=31), zlib.error, size_bytes)
    if name.endswith(".zst"):
        try:
            import zstandard
        except ImportError as error:
            rule, remedy = "needs zstandard, which is not installed", "pip install 'weft[data]'"
            raise InvalidConfig([ConfigError("data.path", ".zst", rule, remedy)]) from error
        # The window is memory: a small file has no use for a large one.
        window = min(1 << 31, max(1 << 27, 64 * size_bytes))
        new = zstandard.ZstdDecompressor(max_window_size=window).decompressobj
        return _frames(stream, new, zstandard.ZstdError, size_bytes)
    return stream


def _frames(
    stream: BinaryIO, new: Callable[[], Any], error: type[Exception], size_bytes: int
) -> BinaryIO:
    frames = _Frames(stream, new, error, most_content(size_bytes))
    return cast(BinaryIO, io.BufferedReader(frames, 1 << 20))


class _Frames(io.RawIOBase):
    """Frame after frame, what is whole up to the piece that has an error: that tells about where.

    Of the libraries' own readers gzip's forgets what came before it, and zstandard's takes a
    frame that is cut off for its end.
    """

    def __init__(
        self, stream: BinaryIO, new: Callable[[], Any], error: type[Exception], most: int
    ) -> None:
        self._stream, self._new, self._error = stream, new, error
        self._most = self._left = most  # bytes that may still come out
        self._frame: Any = None
        self._input = b""
        self._output = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._output:
            if self._frame is None:
                self._input = self._input.lstrip(b"\0")  # padding between frames
            self._input = self._input or self._stream.read(INPUT_BYTES)
            if not self._input:
                if self._frame is not None:
                    raise CutOff("the compressed file is cut off")
                return 0
            self._frame = self._frame or self._new()
            try:
                self._output = memoryview(self._frame.decompress(self._input))
            except self._error as error:
                raise CutOff(f"the compressed file is damaged: {error}") from error
            self._left -= len(self._output)
            if self._left < 0:
                raise CutOff(
                    f"the file holds more than {self._most:,} bytes, over {MOST_EXPANSION} times "
                    "its size: a decompression bomb"
                )
            ended = self._frame.eof
            self._input = self._frame.unused_data if ended else b""
            if ended:
                self._frame = None
        size = min(len(buffer), len(self._output))
        buffer[:size] = self._output[:size]
        self._output = self._output[size:]
        return size
