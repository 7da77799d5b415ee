"""Find, classify and open the files of a data source.

A source's kind follows from its name, and from the names of its files.  Files in an object store
are streamed through fsspec: never fully in memory, and never copied to the disk.  fsspec finds
credentials, region and endpoint as the store's own tools do.
"""

from __future__ import annotations

import glob
import inspect
import io
import os
import re
import sys
import sysconfig
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from functools import cache, partial
from pathlib import Path
from typing import Any, BinaryIO, Literal, NoReturn, cast

from xxhash import xxh3_128_hexdigest

from weft.config.errors import ConfigError, InvalidConfig, lookup, truncate_list
from weft.config.files import check_url, expand_path, storage_options
from weft.config.run_paths import JOB_FILE, RUN_FILES
from weft.data.token_store import STORE_FILE, is_store

STDLIB = "python-stdlib"
STORIES = "weft.data.stories:stories"  # the data of the demo
HUB_SCHEME = "hf://"

_HUB_NAME = re.compile(r"(?P<name>/[^:@]+|[^:@]+)(:(?P<config>[^@]+))?(@(?P<split>.+))?")
_FUNCTION_NAME = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
_SKIPPED_DIRS = {"__pycache__"}
_SKIPPED_LIBRARY_DIRS = _SKIPPED_DIRS | {
    *("site-packages", "dist-packages", "test", "tests", "idle_test")
}
_PATH_REMEDY = f"give a readable file, a directory, a prepared store, or {STDLIB}"

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
_EXPLICIT = (".json", ".csv", ".tsv")
_METADATA_PREFIXES = ("readme", "license", "licence")  # beside the files of a dataset
_METADATA_SUFFIXES = (".md", ".json", ".idx", ".pkl")
_GLOB_CHARS = set("*?[")

Format = Literal["jsonl", "parquet", "arrow", "tokens"]
Kind = Literal["text", "records", "tokens", "saved", "hub", "own"]


@dataclass(frozen=True)
class SourceRef:
    """Kind of a source; ``files``, sorted by name, of text, records or tokens.

    ``repeated`` are names of links to these files, which are read once.
    """

    kind: Kind
    files: tuple[File, ...] = ()
    repeated: tuple[str, ...] = ()


def check_path(path: str) -> list[ConfigError]:
    """Return the errors of ``data.path`` that are visible without reading any text."""
    if not is_store(path):
        try:
            detect_source(path)
        except InvalidConfig as invalid:
            return invalid.errors
    return []


def detect_source(path: str) -> SourceRef:
    """Detect the source at ``path``, which is not a prepared store.

    A directory or glob holds records (or tokens) if all its files do, except for metadata such as
    README.md.  Otherwise it is text, and each file is a document.

    Args:
        path: a file; a glob; a directory, of which all regular files that are not hidden count;
            a URL; the name of a function; or ``python-stdlib``, the library of the running Python
            without its tests.

    Raises:
        InvalidConfig: the source does not exist, is empty, or cannot be read.
    """
    if path.startswith(HUB_SCHEME):
        parse_hub_url(path)
        return SourceRef("hub")
    if is_user_function(path):
        load_user_function(path)
        return SourceRef("own")
    source = _detect_remote(path) if is_remote(path) else _detect_local(path)
    if source.kind != "saved":
        _check_files(path, source.files)
    return source


# --------------------------------------------------------------------------- hub and functions


def parse_hub_url(url: str) -> tuple[str, str | None, str]:
    """Return name, configuration and split of a hub URL.

    Raises:
        InvalidConfig: the URL is malformed.
    """
    match = _HUB_NAME.fullmatch(url.removeprefix(HUB_SCHEME))
    if match is None:
        remedy = "write it as hf://org/name, hf://org/name:config or hf://org/name:config@split"
        raise path_error(url, "is not the name of a dataset", remedy)
    return match["name"], match["config"], match["split"] or "train"


def is_user_function(path: str) -> bool:
    """Return True if a path is ``module:function``, and no file has this name.

    The function takes no arguments and returns rows, in the same order in every call: texts, or
    mappings with the fields that keys such as ``data.text_field`` name.
    """
    return _FUNCTION_NAME.fullmatch(path) is not None and not Path(path).exists()


def load_user_function(path: str) -> Any:
    """Import the function that ``path`` names.

    Raises:
        InvalidConfig: the function cannot be imported, or is not callable.
    """
    try:
        function: Any = lookup(path, {})
    except LookupError as error:
        remedy = "run in the directory of the module, or add it to PYTHONPATH"
        raise path_error(path, str(error), remedy) from error
    if not callable(function):
        raise path_error(path, "is not a function")
    return function


def user_function_file(path: str) -> File:
    """Return a function as a file, whose version is a hash of its source file.

    The version does not cover the data that the function reads.
    """
    function = load_user_function(path)
    try:
        source = inspect.getsourcefile(function)
    except TypeError:  # such as a partial or a builtin
        source = getattr(sys.modules[path.partition(":")[0]], "__file__", None)
    content = Path(source).read_bytes() if source else b""
    return File(path, path, 0, xxh3_128_hexdigest(content))


# --------------------------------------------------------------------------- files


def _detect_remote(url: str) -> SourceRef:
    if errors := check_url("data.path", url):
        raise InvalidConfig(errors)
    source = _classify_files(list_remote_files(url), is_glob(url))
    if source.kind == "text":
        content = "holds files of other formats: " if source.files else "holds no files"
        rule = content + truncate_list([file.name for file in source.files])
        remedy = "give .jsonl, .jsonl.gz, .jsonl.zst or .parquet files, or a glob of these"
        raise path_error(url, rule, remedy)
    if source.kind == "tokens":
        rule = "holds tokens of other software, which weft reads from a disk"
        remedy = "copy it to a disk, and give the copy; for nodes without that disk, "
        remedy += "'weft data prepare COPY --data.cache_dir s3://BUCKET/DIRECTORY' puts the tokens "
        remedy += "into a bucket, and prints the data.path to use"
        raise path_error(url, rule, remedy)
    return source


def _detect_local(path: str) -> SourceRef:
    root = expand_path(path).absolute()
    try:
        if path == STDLIB:
            library = Path(sysconfig.get_path("stdlib"))
            return SourceRef("text", _sort_files(library, _walk_files(library, True)))
        if root.is_dir():
            if (root / JOB_FILE).is_file() and any((root / name).exists() for name in RUN_FILES):
                remedy = f"{_PATH_REMEDY}; 'weft data inspect {path}' shows the data of the run"
                raise path_error(path, "is the directory of a run, which has no text", remedy)
            if _is_saved_dataset(root):
                return SourceRef("saved")
            source = _classify_files(_sort_files(root, _walk_files(root)), explicit=False)
            _refuse_mixed(path, source)
            return source
        if root.is_file():
            return _classify_files(_sort_files(root.parent, [root]), explicit=True)
        if is_glob(path) and (matches := _glob_files(root)):
            return _classify_files(matches, explicit=True)
        megatron = root.with_name(root.name + ".bin")  # Megatron-LM takes names without suffix
        if megatron.is_file() and root.with_name(root.name + ".idx").is_file():
            return SourceRef("tokens", _sort_files(root.parent, [megatron]))
        root.stat()
    except OSError as error:
        location = "" if error.filename in (None, str(root)) else f" ({error.filename})"
        rule = f"cannot be read: {error.strerror}{location}"
        if isinstance(error, FileNotFoundError) and not location:
            rule = "matches no file" if is_glob(path) else "does not exist"
        raise path_error(path, rule, _PATH_REMEDY) from None
    raise path_error(path, "is neither a file nor a directory", _PATH_REMEDY)


def _classify_files(all_files: Sequence[File], explicit: bool) -> SourceRef:
    """Return what the files are together, each read once.

    Args:
        all_files: the data files, with metadata of a directory; links to each other among them.
        explicit: the user named the files, one by one or by a glob.
    """
    data_files, kinds = [], set()
    files = _remove_links(all_files)
    repeated = tuple(file.name for file in all_files if file not in files)
    for file in files:
        kind = detect_format(file.name, explicit)
        is_selected = explicit and kind is not None  # a glob may select metadata names
        if len(files) == 1 or is_selected or not is_metadata_file(file.name):
            data_files.append(file)
            kinds.add(kind)
    if not kinds or None in kinds or ("tokens" in kinds and len(kinds) > 1):
        return SourceRef("text", tuple(files), repeated)
    read_as: Kind = "tokens" if kinds == {"tokens"} else "records"
    return SourceRef(read_as, tuple(data_files), repeated)


def _remove_links(files: Sequence[File]) -> list[File]:
    """Return the files without links to others; of links alone the first remains."""
    kept: dict[object, File] = {}
    for file in sorted(files, key=lambda file: os.path.islink(file.path)):
        is_local = not is_remote(file.path)
        kept.setdefault(_file_id(Path(file.path)) if is_local else file.path, file)
    return [file for file in files if file in kept.values()]


def _refuse_mixed(path: str, source: SourceRef) -> None:
    """Refuse records that are read as text because of a few other files."""
    if source.kind != "text":
        return
    files = [file for file in source.files if not is_metadata_file(file.name)]
    records = [file for file in files if detect_format(file.name, False) not in (None, "tokens")]
    others = [file for file in files if file not in records]
    if sum(file.size_bytes for file in records) > sum(file.size_bytes for file in others):
        rule = (
            f"has {len(records)} files of records beside other files, so weft would read all "
            f"as text; the others are {truncate_list([file.name for file in others])}"
        )
        suffix = Path(records[0].name).suffix
        raise path_error(path, rule, f"move these, or use a glob such as '{path}/**/*{suffix}'")


def _check_files(path: str, files: Sequence[File]) -> None:
    local = [file for file in files if not is_remote(file.path)]
    unreadable = [file.name for file in local if not os.access(file.path, os.R_OK)]
    if not files:
        rule = "is a directory without files (hidden files do not count)"
        raise path_error(path, rule, _PATH_REMEDY)
    if unreadable:
        raise path_error(path, f"cannot be read: {truncate_list(unreadable)}", _PATH_REMEDY)
    if not any(file.size_bytes for file in files):
        rule = "is empty" if len(files) == 1 else "holds only empty files"
        raise path_error(path, rule, "give a path with text in it")


def _is_saved_dataset(directory: Path) -> bool:
    """Return True if ``save_to_disk`` wrote the directory (one or several splits)."""
    return (directory / "dataset_dict.json").is_file() or (
        (directory / "state.json").is_file() and (directory / "dataset_info.json").is_file()
    )


def _glob_files(pattern: Path) -> tuple[File, ...]:
    """Return the matches of a glob, sorted by name relative to its fixed part."""
    root = pattern
    while is_glob(str(root)):
        root = root.parent
    paths = map(Path, glob.glob(str(pattern), recursive=True))
    return _sort_files(root, (path for path in paths if path.is_file()))


def _sort_files(root: Path, paths: Iterable[Path]) -> tuple[File, ...]:
    """Return files with their names relative to ``root``, sorted by name."""
    files = (stat_local_file(path, path.relative_to(root).as_posix()) for path in paths)
    return tuple(sorted(files, key=lambda file: file.name))


def _walk_files(root: Path, is_library: bool = False) -> Iterator[Path]:
    """Yield regular files below ``root``; follow links, enter each directory once."""

    def fail(error: OSError) -> NoReturn:
        raise error

    skipped = _SKIPPED_LIBRARY_DIRS if is_library else _SKIPPED_DIRS
    seen = {_file_id(root)}
    for directory, names, files in os.walk(root, onerror=fail, followlinks=True):
        subdirs = []
        if _is_weft_output(files):
            files = []
            names.clear()
        # Sorted: the name by which a directory is entered must not depend on the file system.
        for name in sorted(names):
            if name.startswith(".") or name in skipped:
                continue
            file_id = _file_id(Path(directory, name))
            if file_id not in seen:
                seen.add(file_id)
                subdirs.append(name)
        names[:] = subdirs
        for file in (Path(directory, name) for name in files if not name.startswith(".")):
            if (not is_library or file.suffix == ".py") and file.is_file():
                yield file


def _is_weft_output(files: Sequence[str]) -> bool:
    """Return True if files are those of a run or a store, not training data."""
    return "tokenizer.json" in files and ("job.toml" in files or STORE_FILE in files)


def _file_id(path: Path) -> tuple[int, int]:
    stat = path.stat()
    return stat.st_dev, stat.st_ino


# --------------------------------------------------------------------------- names


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


def is_table_text(name: str) -> bool:
    """Return True for .csv, .tsv and .json files, which are read from the beginning."""
    name = name.lower()
    for suffix in _COMPRESSED:
        name = name.removesuffix(suffix)
    return name.endswith(_EXPLICIT)


def detect_format(name: str, explicit: bool = False) -> Format | None:
    """Return the format of a file by its name; None: text.

    Args:
        name: file name, any case; a suffix of compression is removed first.
        explicit: the user named the file, or its glob; ``.json``, ``.csv`` and ``.tsv`` then are
            rows.  In a directory they may be metadata or any document.
    """
    name = name.lower()
    for suffix in _COMPRESSED:
        if name.endswith(suffix):
            name = name.removesuffix(suffix)
            return "jsonl" if name.endswith((".jsonl", ".ndjson", *_EXPLICIT)) else None
    if name.endswith(_EXPLICIT):
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
    try:
        import fsspec

        return fsspec.filesystem(scheme, **storage_options(f"{scheme}://"))
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
        files.append(File(name, file_url, int(info.get("size") or 0), object_version(info)))
    return files


def object_version(info: dict[str, Any]) -> str:
    """Return what fsspec's entry of a file says about its version: ETag or time."""
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
            state = int(info.get("size") or 0), object_version(info)
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
