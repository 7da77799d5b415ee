"""What there is at a path; and of text, whether it is text, and which part of it is held out.

Files of many documents are for `weft.data.records`, and stores of tokens that others made for
`weft.data.tokens`.

Here a *document* is one file.  A *scan* reads a document once, in blocks, and keeps what the later
steps need: a hash of its content, the first place where it is not text, and where it can be cut.
A *piece* is a range of bytes between two cuts, small enough to hold and never ending inside a
character, so that a file of any size is tokenised in bounded memory.  A *part* is the range of a
document that belongs to one split: the whole, its beginning, or its tail.
"""

from __future__ import annotations

import codecs
import glob
import os
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from stat import S_ISDIR, S_ISREG
from typing import BinaryIO, Literal, NoReturn

from xxhash import xxh3_64_hexdigest, xxh3_128

from weft.data.files import (
    File,
    format_of,
    is_card,
    is_glob,
    is_remote,
    local_file,
    remote_files,
)
from weft.data.hub import HUB, check_name, is_saved
from weft.data.own import is_own, own_set
from weft.job import InvalidJob, Problem

STDLIB = "python-stdlib"
STORE_FILE = "store.json"  # a folder that holds this is a prepared store, not text
BLOCK_BYTES = 1 << 20
PIECE_BYTES = 1 << 17  # a batch of these keeps every core busy; far longer strings encode slowly
WHOLE_DOCUMENTS = 20  # from this many on, whole documents are held out instead of tails
SHOWN = 10

_NOT_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
_STORE_FILES = ("tokenizer.json", "train-00000.bin")
_NOT_TEXT = {"__pycache__"}


@dataclass(frozen=True)
class Document:
    """One file: its posix path below ``data.path``, where it lies, and its size."""

    name: str
    path: Path
    size_bytes: int


@dataclass(frozen=True)
class Fault:
    """The first byte of a document that is not text; ``line`` counts from 1."""

    offset: int
    line: int
    what: str


@dataclass(frozen=True)
class Scan:
    """What one reading of a document found.

    ``cuts`` are ascending byte offsets; pieces lie between neighbours, and the first cut comes
    after a byte order mark.  ``tail`` is the offset from which the document is held out when
    tails are.  ``version`` (size, time of change) tells whether the file is still the same.
    """

    document: Document
    content_hash: str
    cuts: list[int]
    tail: int
    fault: Fault | None
    version: tuple[int, int]

    @property
    def text_bytes(self) -> int:
        return self.cuts[-1] - self.cuts[0]


@dataclass(frozen=True)
class Part:
    """The bytes ``begin:end`` of a document, all of one split."""

    scan: Scan
    begin: int
    end: int

    def pieces(self) -> Iterator[tuple[int, int]]:
        """Consecutive byte ranges that make up the part; none ends inside a character."""
        for begin, end in pairwise(self.scan.cuts):
            if begin < self.end and end > self.begin:
                yield max(begin, self.begin), min(end, self.end)


# --------------------------------------------------------------------------- what there is

Kind = Literal["text", "records", "tokens", "saved", "hub", "own"]


@dataclass(frozen=True)
class Found:
    """What there is at a path; ``files`` are those of records and tokens, by their names."""

    kind: Kind
    files: tuple[File, ...] = ()


def look(path: str) -> Found:
    """What there is at ``path``, by names only.

    A folder or a glob is of records (or of tokens) if all its files are, but for those that only
    describe them, such as README.md.  Otherwise it is text, each file a document.

    Raises:
        InvalidJob: there is no such place, or it cannot be listed.
    """
    if path.startswith(HUB):
        return Found("hub")
    if is_own(path):
        return Found("own")
    if path == STDLIB:
        return Found("text")
    if is_remote(path):
        found = _look(remote_files(path), is_glob(path))
        if found.kind == "text":
            many = "holds no files" if not found.files else "holds other files than documents"
            rule = f"{many}: {some([file.name for file in found.files])}".removesuffix(": ")
            remedy = "give .jsonl, .jsonl.gz, .jsonl.zst or .parquet files, or a glob of such"
            raise InvalidJob([Problem("data.path", path, rule, remedy)])
        if found.kind == "tokens":
            rule, remedy = "is mapped into memory, which takes a disk", "copy it to one"
            raise InvalidJob([Problem("data.path", path, rule, remedy)])
        return found
    root = Path(path).expanduser().absolute()
    try:
        if root.is_dir():
            if is_saved(root):
                return Found("saved")
            files = [local_file(f, f.relative_to(root).as_posix()) for f in _walk(root, False)]
            return _look(sorted(files, key=lambda file: file.name), alone=False)
        if root.is_file():
            return _look([local_file(root, root.name)], alone=True)
        if is_glob(path):
            return _look([local_file(file, name) for name, file in _matches(root)], alone=True)
        megatron = root.with_name(root.name + ".bin")  # its tools take the name without ending
        if megatron.is_file() and root.with_name(root.name + ".idx").is_file():
            return Found("tokens", (local_file(megatron, megatron.name),))
    except OSError as error:
        raise _no_path(path, root, error) from None
    return Found("text")  # there is nothing, and `find_documents` says so


def _look(files: Sequence[File], alone: bool) -> Found:
    many = len(files) > 1
    told = [file for file in files if not (many and is_card(file.name) and not _named(file, alone))]
    kinds = {format_of(file.name, alone) for file in told}
    if not kinds or None in kinds or ("tokens" in kinds and len(kinds) > 1):
        return Found("text", tuple(files))
    return Found("tokens" if kinds == {"tokens"} else "records", tuple(told))


def _named(file: File, alone: bool) -> bool:
    """Whether the user's glob asks for just such files."""
    return alone and format_of(file.name, True) is not None


def _matches(pattern: Path) -> list[tuple[str, Path]]:
    """The files that a glob matches: names below its fixed part, and where they lie, in order."""
    fixed = Path(*_before_glob(pattern))
    found = (Path(name) for name in glob.glob(str(pattern), recursive=True))
    files = [file for file in found if file.is_file()]
    return sorted((file.relative_to(fixed).as_posix(), file) for file in files)


def _before_glob(pattern: Path) -> Iterator[str]:
    for part in pattern.parts[:-1]:
        if is_glob(part):
            return
        yield part


# --------------------------------------------------------------------------- finding


def find_documents(path: str) -> list[Document]:
    """Every document below ``path``, in the order of their names.

    Args:
        path: ``python-stdlib`` (the library of the running Python, without its tests), a file,
            a glob, or a folder, of which every regular file counts that is not hidden.

    Raises:
        InvalidJob: there is no such path, or it (or a folder below it) cannot be read.
    """
    root = Path(path).expanduser().absolute()
    if path == STDLIB:
        root = Path(sysconfig.get_path("stdlib"))
    try:
        if is_glob(path) and not root.exists() and (matches := _matches(root)):
            return [_document(file, name) for name, file in matches]
        mode = root.stat().st_mode
        if S_ISREG(mode):
            return [_document(root, root.name)]
        if not S_ISDIR(mode):
            raise InvalidJob(
                [Problem("data.path", path, "is neither a file nor a folder", _PATH_REMEDY)]
            )
        found = [_document(f, f.relative_to(root).as_posix()) for f in _walk(root, path == STDLIB)]
    except OSError as error:
        raise _no_path(path, root, error) from None
    return sorted(found, key=lambda document: document.name)


def _no_path(path: str, root: Path, error: OSError) -> InvalidJob:
    where = "" if error.filename in (None, str(root)) else f" ({error.filename})"
    rule = f"cannot be read: {error.strerror}{where}"
    if isinstance(error, FileNotFoundError) and not where:
        rule = "matches no file" if is_glob(path) else "does not exist"
    return InvalidJob([Problem("data.path", path, rule, _PATH_REMEDY)])


_PATH_REMEDY = f"give a readable file, a folder, a prepared store, or {STDLIB}"


def _document(path: Path, name: str) -> Document:
    # A file name need not be text; the name goes into hashes and messages, so it is made text.
    shown = os.fsencode(name).decode("utf-8", "backslashreplace")
    return Document(shown, path, path.stat().st_size)


def _walk(root: Path, library: bool) -> Iterator[Path]:
    """Regular files below ``root``.  Links to folders are followed, each folder only once."""

    def fail(error: OSError) -> NoReturn:
        raise error

    seen = {_identity(root)}
    for folder, names, files in os.walk(root, onerror=fail, followlinks=True):
        if _made_by_weft(files):
            names[:] = []
            continue
        entered = []
        for name in sorted(names):  # sorted, so that it never depends on the file system ...
            if name.startswith(".") or name in (_NOT_LIBRARY if library else _NOT_TEXT):
                continue
            identity = _identity(Path(folder, name))
            if identity not in seen:  # ... by which of two names a folder is reached
                seen.add(identity)
                entered.append(name)
        names[:] = entered
        for name in files:
            file = Path(folder, name)
            if (
                not name.startswith(".")
                and (not library or file.suffix == ".py")
                and file.is_file()
            ):
                yield file


def _made_by_weft(files: Sequence[str]) -> bool:
    """A run's folder or a store below the text is not text: a run would train on its own logs."""
    return "tokenizer.json" in files and ("job.toml" in files or STORE_FILE in files)


def _identity(path: Path) -> tuple[int, int]:
    stat = path.stat()
    return stat.st_dev, stat.st_ino


def is_store(path: str | Path) -> bool:
    """Whether the folder ``path`` is a prepared store (complete, as store.json comes last).

    A text folder may have a file of that name, too; it has none of a store's others.
    """
    folder = os.path.expanduser(path)
    found = [os.path.isfile(os.path.join(folder, name)) for name in (STORE_FILE, *_STORE_FILES)]
    return found[0] and any(found[1:])


def check_path(path: str) -> list[Problem]:
    """What is wrong with ``data.path``, found without reading any text; empty when nothing is."""
    if is_store(path):
        return []
    try:
        found = look(path)
        if found.kind == "hub":
            return check_name(path)
        if found.kind == "own":
            own_set(path)
            return []
        if found.kind != "text":
            return _check_files(path, found)
        documents = find_documents(path)
    except InvalidJob as invalid:
        return invalid.problems
    unreadable = [d.name for d in documents if not os.access(d.path, os.R_OK)]
    if unreadable:
        return [Problem("data.path", path, f"cannot be read: {some(unreadable)}", _PATH_REMEDY)]
    if not documents:
        rule = "is a folder without files (hidden ones do not count)"
        return [Problem("data.path", path, rule, _PATH_REMEDY)]
    if not any(document.size_bytes for document in documents):
        rule = "is empty" if len(documents) == 1 else "holds only empty files"
        return [Problem("data.path", path, rule, "give a path with text in it")]
    return []


def _check_files(path: str, found: Found) -> list[Problem]:
    unreadable = [f.name for f in found.files if not is_remote(f.path) and not _readable(f)]
    if unreadable:
        return [Problem("data.path", path, f"cannot be read: {some(unreadable)}", _PATH_REMEDY)]
    if found.files and not any(file.size_bytes for file in found.files):
        rule = "is empty" if len(found.files) == 1 else "holds only empty files"
        return [Problem("data.path", path, rule, "give a path with text in it")]
    return []


def _readable(file: File) -> bool:
    return os.access(file.path, os.R_OK)


def some(lines: Sequence[str], separator: str = ", ", count: int | None = None) -> str:
    """The first few, and how many more there are (of ``count``, if not all are listed)."""
    more = (len(lines) if count is None else count) - len(lines[:SHOWN])
    return separator.join([*lines[:SHOWN], *([f"and {more:,} more"] if more else [])])


# --------------------------------------------------------------------------- scanning


def scan(document: Document, holdout: float) -> Scan:
    """Read a document once, in blocks.

    Args:
        document: what to read.
        holdout: share of the document that its tail should have.

    Raises:
        InvalidJob: the file cannot be read.
    """
    content, text = xxh3_128(), _TextCheck()
    size = 0
    cuts: list[int] = []
    pending = b""  # the bytes since the last cut
    try:
        with document.path.open("rb") as file:
            stat = os.fstat(file.fileno())
            while block := file.read(BLOCK_BYTES):
                if not cuts:
                    cuts.append(3 if block.startswith(codecs.BOM_UTF8) else 0)
                    pending = block[cuts[0] :]
                else:
                    pending += block
                content.update(block)
                text.feed(block, size)
                size += len(block)
                while len(pending) > PIECE_BYTES:
                    cut = cut_at(pending, 0, PIECE_BYTES)
                    cuts.append(cuts[-1] + cut)
                    pending = pending[cut:]
            text.feed(b"", size, final=True)
            cuts = cuts or [0]
            if pending:
                cuts.append(size)
            tail = _tail(file, cuts[0], size, holdout)
    except OSError as error:
        raise _unreadable(document, error) from None
    version = (stat.st_size, stat.st_mtime_ns)
    return Scan(document, content.hexdigest(), cuts, tail, text.fault, version)


class _TextCheck:
    """Finds the first byte that is not UTF-8 text, over blocks that may cut characters."""

    def __init__(self) -> None:
        self.fault: Fault | None = None
        self._decoder = codecs.getincrementaldecoder("utf-8")()
        self._newlines = 0

    def feed(self, block: bytes, position: int, final: bool = False) -> None:
        if self.fault:
            return
        offset, what = None, ""
        undecoded = len(self._decoder.getstate()[0])
        try:
            self._decoder.decode(block, final)
        except UnicodeDecodeError as error:
            offset = position - undecoded + error.start
            what = "UTF-16 byte order mark" if _is_utf16(error.object, offset) else "not UTF-8"
        # UTF-8 allows NUL, but no text has it: this is a binary file.
        nul = block.find(0)
        if nul >= 0 and (offset is None or position + nul < offset):
            offset, what = position + nul, "NUL, as in a binary file"
        if offset is not None:
            line = self._newlines + block.count(b"\n", 0, max(0, offset - position)) + 1
            self.fault = Fault(offset, line, what)
        self._newlines += block.count(b"\n")


def _is_utf16(data: bytes, offset: int) -> bool:
    return offset == 0 and data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))


def cut_at(data: bytes, begin: int, size: int) -> int:
    """Where to cut ``data``, which is longer, at most ``size`` bytes behind ``begin``: after the
    last newline, or at a character."""
    limit = begin + size
    newline = data.rfind(b"\n", begin, limit)
    if newline >= 0:
        return newline + 1
    cut = limit
    while cut > max(begin, limit - 3) and data[cut] & 0xC0 == 0x80:  # a continuation byte
        cut -= 1
    return cut


def in_pieces(data: bytes) -> Iterator[tuple[int, int]]:
    """A document in ranges that are quick to encode; none ends inside a character."""
    begin = 0
    while len(data) - begin > PIECE_BYTES:
        end = cut_at(data, begin, PIECE_BYTES)
        yield begin, end
        begin = end
    yield begin, len(data)


def _tail(file: BinaryIO, begin: int, size: int, holdout: float) -> int:
    """Offset at which the last ``holdout`` of the text begins: at most twice that, by lines."""
    held = int((size - begin) * holdout)
    if held <= 0:
        return size
    mark = size - held
    low = max(begin, mark - max(4, min(held, BLOCK_BYTES)))  # 4: the longest character
    file.seek(low)
    return low + cut_at(file.read(mark - low + 1), 0, mark - low)


def _unreadable(document: Document, error: OSError) -> InvalidJob:
    rule = f"cannot be read: {error.strerror}"
    return InvalidJob([Problem("data.path", str(document.path), rule, _PATH_REMEDY)])


def keep_text(
    scans: Sequence[Scan], invalid_utf8: Literal["error", "replace", "skip"], path: str
) -> list[Scan]:
    """The scans to go on with: those that hold text, and under ``replace`` the faulty ones too.

    Raises:
        InvalidJob: under ``error``, one problem that lists the files that are not text.
    """
    scans = [scan for scan in scans if scan.text_bytes]
    faulty = [(scan.document.name, scan.fault) for scan in scans if scan.fault]
    if not faulty or invalid_utf8 == "replace":
        return scans
    if invalid_utf8 == "skip":
        return [scan for scan in scans if not scan.fault]
    lines = [f"{name}: byte {f.offset}, line {f.line}: {f.what}" for name, f in faulty]
    count = "a file is" if len(faulty) == 1 else f"{len(faulty)} files are"
    raise InvalidJob(
        [
            Problem(
                "data.path",
                path,
                f"{count} not UTF-8 text:\n  " + some(lines, "\n  "),
                "use --data.invalid_utf8 skip to leave out such files (best for binary ones), "
                "--data.invalid_utf8 replace to put U+FFFD for the bad bytes, "
                "or give a path that holds only text",
            )
        ]
    )


def read_piece(scan: Scan, begin: int, end: int) -> str:
    """The text of bytes ``begin:end`` as they stand (newlines untouched), bad bytes as U+FFFD.

    Raises:
        InvalidJob: the file cannot be read, or is no longer the one that was scanned.
    """
    try:
        with scan.document.path.open("rb") as file:
            stat = os.fstat(file.fileno())
            file.seek(begin)
            data = file.read(end - begin)
    except OSError as error:
        raise _unreadable(scan.document, error) from None
    if (stat.st_size, stat.st_mtime_ns) != scan.version or len(data) != end - begin:
        rule, remedy = "changed while it was being prepared", "start again once it is complete"
        raise InvalidJob([Problem("data.path", str(scan.document.path), rule, remedy)])
    return data.decode("utf-8", "replace").replace("\0", "\ufffd")


# --------------------------------------------------------------------------- holding out


def split(scans: Sequence[Scan], holdout: float) -> tuple[list[Part], list[Part]]:
    """Train and validation parts, without a byte in both.  A pure function of its arguments.

    From ``WHOLE_DOCUMENTS`` documents on, whole documents are held out, chosen by a hash of
    their names (so that one more document hardly changes the choice); copies of the same
    content stay on the same side.  With fewer documents, or where whole ones cannot make up
    about ``holdout`` of the bytes, the tail of each is held out.
    """
    held = _whole_documents(scans, holdout)
    train, validation = [], []
    for scan in scans:
        begin, end = scan.cuts[0], scan.cuts[-1]
        middle = scan.tail if not held else begin if scan.content_hash in held else end
        train.append(Part(scan, begin, middle))
        validation.append(Part(scan, middle, end))
    return [p for p in train if p.begin < p.end], [p for p in validation if p.begin < p.end]


def _whole_documents(scans: Sequence[Scan], holdout: float) -> set[str]:
    """Content hashes of the documents to hold out whole; empty to hold out tails."""
    if len(scans) < WHOLE_DOCUMENTS:
        return set()
    bytes_by_content: dict[str, int] = {}
    for scan in sorted(
        scans, key=lambda s: (xxh3_64_hexdigest(s.document.name.encode()), s.document.name)
    ):
        known = bytes_by_content.get(scan.content_hash, 0)
        bytes_by_content[scan.content_hash] = known + scan.text_bytes
    wanted = holdout * sum(bytes_by_content.values())
    held: set[str] = set()
    held_bytes = 0
    for content, size in bytes_by_content.items():
        # One huge document must not become the validation text.
        if held_bytes < wanted and held_bytes + size <= 1.5 * wanted:
            held.add(content)
            held_bytes += size
    return held if held_bytes >= 0.5 * wanted else set()
