"""Read a token store in a bucket: one reader per node, and a cache of blocks.

The order of the data is a function of the seed and the number of samples, so a rank knows the next
windows, and thus the next *blocks*: ranges of `RemoteFile.block_bytes` of a file, each with a hash
in ``store.json``.  A rank asks for the blocks that it needs now, and names those of the next steps.
A *reader*, one process per node and cache, fetches each block once for all ranks::

    rank 0 ──┐  Unix socket: needed, soon      ranged GETs, hashes, retries
    rank 1 ──┼───────────────────────── reader ───────────────────────────── bucket
    rank 7 ──┘                             │
        └───── reads ───── NODE_CACHE/blocks/ab/ab12...-00003  (renamed when complete)

A block is named by the content of its file, and its file is complete when it has this name.  So
jobs of one node share the cache, a killed reader leaves nothing wrong, and a block that is deleted
too early is only fetched again.  When the cache exceeds its limit, the reader deletes the blocks
that have not been used for longest, but none that a rank has named.

It is a process, because its HTTP client would take the interpreter lock from a rank that launches
kernels.  The first rank that needs it starts it, so it does not matter who launched the ranks.  It
ends with the last connection; if it is killed, the next request starts another.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import random
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64_hexdigest, xxh3_128_hexdigest

from weft.config.errors import ConfigError, InvalidConfig
from weft.config.files import replacing, storage_options
from weft.config.locks import hold_lock, try_lock

REQUEST_BYTES = 8 << 20  # of neighboring blocks that are fetched with one request
COPY_BYTES = 2 << 20  # of a request for a part of a whole file, whose parts are needed at once
NUM_THREADS = 16  # requests at a time
RETRY_SECONDS = 600.0  # then a transient error is final
MAX_DELAY = 15.0  # seconds between two attempts
MAX_DAMAGED = 3  # attempts for a block whose content differs from its hash
IDLE_SECONDS = 3.0  # without a connection, after which the reader ends
CONNECT_SECONDS = 120.0  # for the reader to start; a loaded node imports slowly
WAIT_SECONDS = 1.0  # between two signs of life of a rank that waits
LOG_SECONDS = 10.0  # between two lines of a rank that waits
AUTO_FRACTION = 0.8  # of the free space, the limit of a cache without one
PINNED_FRACTION = 0.8  # of the limit, for blocks of the next steps
TRAIN = "train"  # purpose of the blocks of the next steps
# Variables that decide what a reader may read: jobs with others have their own reader.
ACCESS_VARIABLES = ("AWS_", "GOOGLE_", "AZURE_", "FSSPEC_", "GCSFS_", "HOME", "ENDPOINT_URL")

GONE = (
    "does not exist: the object, or its bucket, was deleted or never written",
    "put the object there again, or prepare the data again",
)

Block = tuple[str, int]  # key of a file, and number
Problem = tuple[str, str]  # what is wrong, and what to do


class RemoteFile(NamedTuple):
    """A file of a store in a bucket.

    ``key`` is a hash of its content; ``block_xxh3`` has 16 digits for each block of
    ``block_bytes``.  If it is empty, the file is one block, whose hash is the key.
    """

    url: str
    size_bytes: int
    key: str
    block_bytes: int
    block_xxh3: str

    @property
    def num_blocks(self) -> int:
        """Return the number of blocks."""
        return -(-self.size_bytes // self.block_bytes) if self.block_xxh3 else 1

    def range_of(self, number: int) -> tuple[int, int]:
        """Return the bytes of a block: first, and one past the last."""
        if not self.block_xxh3:
            return 0, self.size_bytes
        begin = number * self.block_bytes
        return begin, min(self.size_bytes, begin + self.block_bytes)

    def matches(self, number: int, data: bytes | memoryview) -> bool:
        """Return True if bytes are those of a block."""
        begin, end = self.range_of(number)
        if len(data) != end - begin:
            return False
        if not self.block_xxh3:
            return xxh3_128_hexdigest(data) == self.key
        return xxh3_64_hexdigest(data) == self.block_xxh3[16 * number : 16 * number + 16]


class CacheLocation(NamedTuple):
    """Directory for blocks on this node, and its limit in bytes; 0: automatic."""

    directory: str
    limit_bytes: int

    def path_of(self, block: Block) -> str:
        """Return the file of a block."""  # a Path would take longer than reading it
        return f"{self.directory}/blocks/{block[0][:2]}/{block[0]}-{block[1]:05d}"

    @property
    def blocks(self) -> Path:
        """Return the directory of all blocks."""
        return Path(self.directory, "blocks")


NO_CACHE = CacheLocation("", 0)


class FetchFailed(InvalidConfig):
    """A file of a store in a bucket cannot be read."""


def fetch_failed(url: str, problem: Problem) -> FetchFailed:
    """Return the error for a problem of a reader."""
    return FetchFailed([ConfigError("data.path", url, *problem)])


# --------------------------------------------------------------------------- requests


@cache
def _file_system(scheme: str) -> Any:
    import fsspec

    options = storage_options(f"{scheme}://")
    if scheme == "s3":
        # The reader repeats requests: its delays are random, and it says that it waits.
        retries = {"max_attempts": 1, "mode": "standard"}
        options["config_kwargs"] = {
            "retries": retries,
            "connect_timeout": 10,
            "read_timeout": 30,
            "max_pool_connections": NUM_THREADS,
        }
        options["max_concurrency"] = (
            1  # otherwise it asks for the size of an object before it reads
        )
    return fsspec.filesystem(scheme, **options)


def read_object(
    url: str, begin: int = 0, end: int | None = None, patience: float = RETRY_SECONDS
) -> bytes:
    """Read the bytes of an object; repeat the request after a transient error.

    ``patience`` is the seconds after which a transient error is final.

    Raises:
        FileNotFoundError: there is no such object.
        InvalidConfig: it cannot be read.
    """
    start, attempt = time.monotonic(), 0
    while True:
        try:
            return _request(url, begin, end)
        except FileNotFoundError:
            raise
        except Exception as error:  # every library has its own types
            problem = describe_problem(error)
            if problem is None and time.monotonic() - start > patience:
                problem = _transient_problem(error, patience)
            if problem is not None:
                raise fetch_failed(url, problem) from error
        attempt += 1
        time.sleep(retry_delay(attempt))


def _request(url: str, begin: int, end: int | None) -> bytes:
    scheme, _, path = url.partition("://")
    content: bytes = _file_system(scheme).cat_file(path, start=begin or None, end=end)
    return content


def read_objects(urls: Sequence[str]) -> list[bytes | None]:
    """Read small objects at the same time; None: there is no such object.

    Raises:
        InvalidConfig: one cannot be read.
    """

    def read(url: str) -> bytes | None:
        try:
            return read_object(url)
        except FileNotFoundError:
            return None

    with ThreadPoolExecutor(len(urls)) as pool:
        return list(pool.map(read, urls))


def copy_file(file: RemoteFile, target: Path) -> None:
    """Copy a file of a store to this node, in parallel, and check its hashes.

    Raises:
        FetchFailed: it cannot be read.
        OSError: the copy cannot be written.
    """
    count = max(1, COPY_BYTES // file.block_bytes)
    runs = [
        range(first, min(first + count, file.num_blocks))
        for first in range(0, file.num_blocks, count)
    ]
    with replacing(target, durable=True) as output, ThreadPoolExecutor(NUM_THREADS) as pool:

        def copy(run: range) -> None:
            content = _read_blocks(file, run, _ignore_error)
            os.pwrite(output.fileno(), content, file.range_of(run[0])[0])

        copies = [pool.submit(copy, run) for run in runs]
        while wait(copies, WAIT_SECONDS, FIRST_EXCEPTION).not_done:
            if any(each.done() and each.exception() for each in copies):
                pool.shutdown(cancel_futures=True)
                break
            when_waiting()
        for each in copies:
            if not each.cancelled():
                each.result()


def _read_blocks(file: RemoteFile, run: range, on_error: Callable[[str], None]) -> memoryview:
    """Read neighboring blocks of a file with one request, and check their hashes.

    ``on_error`` is called with a description of each transient error.

    Raises:
        FetchFailed: they cannot be read.
    """
    begin, end = file.range_of(run[0])[0], file.range_of(run[-1])[1]
    start, attempt, num_damaged = time.monotonic(), 0, 0
    while True:
        problem: Problem | None
        try:
            data = memoryview(_request(file.url, begin, end))
            damaged = [n for n in run if not file.matches(n, _part(file, n, data, begin))]
            if not damaged:
                return data
            num_damaged += 1
            error: Exception = ValueError("the content differs from its hash")
            problem = None
            if num_damaged == MAX_DAMAGED:
                bounds = " to ".join(f"{byte:,}" for byte in file.range_of(damaged[0]))
                rule = f"is damaged: bytes {bounds} differ from their hash in store.json"
                problem = rule, "put the object there again, or prepare the data again"
        except Exception as caught:  # every library has its own types
            error, problem = caught, describe_problem(caught)
            if problem is None and time.monotonic() - start > RETRY_SECONDS:
                problem = _transient_problem(error, RETRY_SECONDS)
        if problem is not None:
            raise fetch_failed(file.url, problem) from error
        attempt += 1
        description = f"{type(error).__name__}: {error}"
        print(f"{file.url}: attempt {attempt} failed: {description}", file=sys.stderr)
        on_error(description)
        time.sleep(retry_delay(attempt))


def _ignore_error(_: str) -> None:
    pass


def open_object(url: str) -> Any:
    """Open an object as a binary file that is read from the beginning.

    Raises:
        OSError: it cannot be read.
    """
    scheme, _, path = url.partition("://")
    return _file_system(scheme).open(path, "rb", block_size=REQUEST_BYTES, cache_type="readahead")


def retry_delay(attempt: int) -> float:
    """Return random seconds before an attempt: many nodes must not return at once."""
    return random.uniform(0.0, min(MAX_DELAY, 0.1 * 2**attempt))


def describe_problem(error: BaseException) -> Problem | None:
    """Return what is wrong and what to do; None: another attempt may succeed."""
    name = type(error).__name__
    if isinstance(error, ImportError):
        rule = f"cannot be read without another package: {error}"
        return rule, "run pip install 'weft[s3]' for s3://; for others, what fsspec names"
    if name in ("NoCredentialsError", "PartialCredentialsError", "CredentialRetrievalError"):
        rule = f"cannot be read without credentials: {error}"
        return rule, "give them in AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, ~/.aws or a role"
    if isinstance(error, FileNotFoundError):
        return GONE
    if isinstance(error, PermissionError):
        remedy = "allow s3:GetObject and s3:ListBucket, and check credentials and endpoint"
        return f"may not be read: {error}", remedy
    return None


def _transient_problem(error: BaseException, seconds: float) -> Problem:
    rule = f"could not be read for {seconds:.0f} s: {type(error).__name__}: {error}"
    return rule, "check the store and the network, and run the command again"


# --------------------------------------------------------------------------- reader


class _Client:
    """Blocks that a connection needs now, and those of later steps by purpose."""

    def __init__(self) -> None:
        self.needed: list[Block] = []
        self.soon: dict[str, list[Block]] = {}
        self.queues: dict[str, deque[Block]] = {}

    @property
    def named(self) -> Iterator[Block]:
        """Yield the blocks that must stay."""
        yield from self.needed
        yield from chain.from_iterable(self.soon.values())


class Reader:
    """Fetch blocks into a cache, for the ranks that are connected to a socket."""

    def __init__(self, location: CacheLocation) -> None:
        self.location = location
        self.files: dict[str, RemoteFile] = {}
        self._clients: set[_Client] = set()
        self._changed = threading.Condition()
        self._fetching: set[Block] = set()
        self._failed: dict[Block, Problem] = {}
        self._last_error = ""
        location.blocks.mkdir(parents=True, exist_ok=True)
        self._used = sum(entry.st_size for _, entry in self._scan())
        free = shutil.disk_usage(location.directory).free
        self.limit_bytes = location.limit_bytes or int(AUTO_FRACTION * (free + self._used))
        self._unscanned = 0  # bytes written since the last scan, which sees those of other jobs
        self.num_requests = self.fetched_bytes = 0
        for _ in range(NUM_THREADS):
            threading.Thread(target=self._work, daemon=True).start()

    def serve(self, listener: socket.socket) -> None:
        """Answer connections until there has been none for `IDLE_SECONDS`."""
        listener.settimeout(1.0)
        idle_since = time.monotonic() + CONNECT_SECONDS
        while True:
            with suppress(TimeoutError):
                connection, _ = listener.accept()
                client = _Client()
                with self._changed:
                    self._clients.add(client)
                arguments = (connection, client)
                threading.Thread(target=self._answer, args=arguments, daemon=True).start()
                idle_since = 0.0
            now = time.monotonic()
            with self._changed:
                is_idle = not self._clients
            if not is_idle:
                idle_since = 0.0
            elif not idle_since:
                idle_since = now
            if is_idle and now - idle_since > IDLE_SECONDS:
                return

    def _answer(self, connection: socket.socket, client: _Client) -> None:
        """Answer the requests of a connection until it ends."""
        with suppress(OSError, ValueError), connection, connection.makefile("rwb") as stream:
            for line in stream:
                request = json.loads(line)
                needed: list[Block] = [(key, number) for key, number in request["needed"]]
                with self._changed:
                    for file in request["files"]:
                        self.files[file[2]] = RemoteFile(*file)
                    client.needed = needed
                    for purpose, blocks in request["soon"].items():
                        client.soon[purpose] = self._limit([(k, n) for k, n in blocks])
                        client.queues[purpose] = deque(client.soon[purpose])
                    self._changed.notify_all()
                for answer in self._wait_for(needed):
                    stream.write(json.dumps(answer).encode() + b"\n")
                    stream.flush()
                with self._changed:
                    client.needed = []
        with self._changed:
            self._clients.discard(client)

    def _limit(self, blocks: list[Block]) -> list[Block]:
        """Return the first of the blocks, as many as may stay in the cache."""
        budget = PINNED_FRACTION * self.limit_bytes / max(1, len(self._clients))
        kept: dict[Block, None] = {}
        for block in blocks:
            if block in kept:
                continue
            begin, end = self.files[block[0]].range_of(block[1])
            budget -= end - begin
            if budget < 0:
                break
            kept[block] = None
        return list(kept)

    def _wait_for(self, needed: Sequence[Block]) -> Iterator[dict[str, Any]]:
        """Yield lines while blocks are missing, and a last one."""
        missing = list(needed)
        while True:
            with self._changed:
                missing = [block for block in missing if not self._is_present(block)]
                failed = [block for block in missing if block in self._failed]
                if failed:
                    url = self.files[failed[0][0]].url
                    problem = self._failed[failed[0]]
                    for block in failed:  # a later request tries again
                        self._failed.pop(block, None)
                    yield {"failed": [url, *problem]}
                    return
                if not missing:
                    break
                if not self._changed.wait(WAIT_SECONDS):
                    error = self._last_error
                    yield {"waiting": len(missing), "error": error}
        if needed:
            yield {"done": True}

    def _is_present(self, block: Block) -> bool:
        begin, end = self.files[block[0]].range_of(block[1])
        try:
            return os.stat(self.location.path_of(block)).st_size == end - begin
        except FileNotFoundError:
            return False

    def _work(self) -> None:
        while True:
            with self._changed:
                while (run := self._next_run()) is None:
                    self._changed.wait()
                self._fetching.update(run)
            problem: Problem | None = None
            try:
                problem = self._fetch(run)
            except Exception as error:  # a thread that ends would let ranks wait forever
                problem = (f"cannot be read: {type(error).__name__}: {error}", "report this error")
            with self._changed:
                self._fetching.difference_update(run)
                if problem is not None:
                    needed = {block for client in self._clients for block in client.needed}
                    self._failed.update((block, problem) for block in run if block in needed)
                self._changed.notify_all()

    def _next_run(self) -> list[Block] | None:
        """Return neighboring blocks of a file that are to be fetched with one request."""
        is_missing = self._is_missing
        for client in self._clients:
            for block in client.needed:
                if block not in self._failed and is_missing(block):
                    return self._extend(block)
        named = [item for client in self._clients for item in client.queues.items() if item[1]]
        while named := [item for item in named if item[1]]:
            # Training first, and the queue that has advanced least: its rank would wait first.
            block = max(named, key=lambda item: (item[0] == TRAIN, len(item[1])))[1].popleft()
            if is_missing(block):
                return self._extend(block)
            with suppress(OSError):
                os.utime(self.location.path_of(block))  # in use: it stays
        return None

    def _is_missing(self, block: Block) -> bool:
        return block not in self._fetching and not self._is_present(block)

    def _extend(self, block: Block) -> list[Block]:
        named = {each for client in self._clients for each in client.named if each[0] == block[0]}
        run, file = [block], self.files[block[0]]
        begin, end = file.range_of(block[1])
        size = end - begin
        while (following := (block[0], run[-1][1] + 1)) in named and self._is_missing(following):
            begin, end = file.range_of(following[1])
            size += end - begin
            if size > REQUEST_BYTES:
                break
            run.append(following)
        return run

    def _fetch(self, run: Sequence[Block]) -> Problem | None:
        """Fetch blocks of one file; return the problem, if there is one."""
        file = self.files[run[0][0]]
        numbers = range(run[0][1], run[-1][1] + 1)
        try:
            data = _read_blocks(file, numbers, self._keep_error)
        except FetchFailed as failed:
            return failed.errors[0].rule, failed.errors[0].remedy
        self.num_requests += 1
        self.fetched_bytes += len(data)
        return self._publish(file, run, data, file.range_of(numbers[0])[0])

    def _keep_error(self, description: str) -> None:
        self._last_error = description

    def _publish(
        self, file: RemoteFile, run: Sequence[Block], data: memoryview, begin: int
    ) -> Problem | None:
        for block in run:
            content = _part(file, block[1], data, begin)
            self._make_space(len(content))
            for is_last in (False, True):
                try:
                    _write_block(Path(self.location.path_of(block)), content)
                    break
                except OSError as error:
                    is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
                    if is_full and not is_last and self._delete_unused(self._used // 2):
                        continue
                    rule = f"cannot be stored in {self.location.directory}: {error.strerror}"
                    remedy = "set data.node_cache_dir to a directory with enough space"
                    if is_full:
                        remedy += ", or a smaller data.node_cache_gib"
                    return rule, remedy
        return None

    def _make_space(self, size: int) -> None:
        with self._changed:
            self._used += size
            self._unscanned += size
            is_due = self._used > self.limit_bytes or self._unscanned > self.limit_bytes // 20
        if is_due:
            self._delete_unused()

    def _delete_unused(self, target: int | None = None) -> bool:
        """Delete blocks that no rank has named until ``target`` bytes remain.

        Without a target, delete a tenth of the limit, if the cache exceeds it.  Return True if
        blocks were deleted.
        """
        with hold_lock(self.location.blocks / "lock", lambda: None):
            entries = self._scan()
            used = before = sum(stat.st_size for _, stat in entries)
            if target is None:
                target = used if used <= self.limit_bytes else int(0.9 * self.limit_bytes)
            with self._changed:
                named = {block for client in self._clients for block in client.named}
                named |= self._fetching
            kept = {self.location.path_of(block) for block in named}
            for path, stat in sorted(entries, key=lambda entry: entry[1].st_mtime_ns):
                if used <= target:
                    break
                # Another job may be writing a temporary file.
                if path in kept or (path.endswith(".tmp") and time.time() - stat.st_mtime < 600):
                    continue
                with suppress(FileNotFoundError):
                    os.unlink(path)
                used -= stat.st_size
            with self._changed:
                self._used, self._unscanned = used, 0
        return used < before

    def _scan(self) -> list[tuple[str, os.stat_result]]:
        """Return the files of all blocks, also of those that another job fetches."""
        entries = []
        for directory in self.location.blocks.iterdir():
            if directory.is_dir():
                for entry in os.scandir(directory):
                    with suppress(FileNotFoundError):
                        entries.append((entry.path, entry.stat()))
        return entries


def _part(file: RemoteFile, number: int, data: memoryview, begin: int) -> memoryview:
    """Return the bytes of a block; ``data`` begins at byte ``begin`` of the file."""
    first, last = file.range_of(number)
    return data[first - begin : last - begin]


def _write_block(path: Path, content: memoryview) -> None:
    """Write the file of a block; it is on the disk when it has its name."""
    path.parent.mkdir(exist_ok=True)
    temporary = path.with_name(f"{path.name}.{socket.gethostname()}-{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


# --------------------------------------------------------------------------- process


@contextmanager
def _short_path(directory: Path, name: str) -> Iterator[str]:
    """Yield a path for a socket: that of the system has at most 107 characters."""
    handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{handle}/{name}"
    finally:
        os.close(handle)


def _reader_name(location: CacheLocation) -> str:
    """Return the name of the reader that this process may use."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    access = {k: v for k, v in sorted(os.environ.items()) if k.startswith(ACCESS_VARIABLES)}
    identity = [socket.gethostname(), boot, location.limit_bytes, access]
    # Not a hash from which one could guess a secret.
    return f"reader-{hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:16]}"


def main() -> None:
    """Serve as the reader of a cache.

    ``python -m weft.data.remote_tokens DIRECTORY LIMIT_BYTES SCHEME START_LOCK``
    """
    location = CacheLocation(sys.argv[1], int(sys.argv[2]))
    directory = Path(location.directory)
    name = _reader_name(location)
    with (directory / f"{name}.lock").open("a") as lock:
        if not try_lock(lock.fileno()):
            return  # another reader serves
        reader = Reader(location)
        with socket.socket(socket.AF_UNIX) as listener:
            (directory / name).unlink(missing_ok=True)
            with _short_path(directory, name) as path:
                listener.bind(path)
            os.chmod(directory / name, 0o600)
            listener.listen(1024)
            os.close(int(sys.argv[4]))
            # The first request needs the library of the store, which takes half a second to import.
            threading.Thread(target=_connect_store, args=[sys.argv[3]], daemon=True).start()
            reader.serve(listener)
            fetched = f"{reader.fetched_bytes:,} bytes in {reader.num_requests:,} requests"
            print(f"no more connections; read {fetched}", file=sys.stderr)
            (directory / name).unlink(missing_ok=True)


def _connect_store(scheme: str) -> None:
    with suppress(Exception):  # the first request reports it
        store = _file_system(scheme)
        if scheme == "s3":
            store.connect()


# --------------------------------------------------------------------------- ranks


class ReaderClient:
    """Connection of this process to the reader of its node."""

    def __init__(self, location: CacheLocation) -> None:
        self.location = location
        self.files: dict[str, RemoteFile] = {}
        self._sent: set[str] = set()
        self._stream: Any = None
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    def start_reader(self) -> None:
        """Start the reader, unless there is one, before it is needed."""
        directory, name = Path(self.location.directory), _reader_name(self.location)
        with (directory / f"{name}.start").open("a") as start:
            if not try_lock(start.fileno()):
                return  # it starts
            with (directory / f"{name}.lock").open("a") as lock:
                if not try_lock(lock.fileno()):
                    return  # it serves
            self._start(directory, start.fileno())

    def announce(self, purpose: str, blocks: Iterable[Block]) -> None:
        """Name the blocks of the next steps, in order, in place of those named before."""
        with self._lock:
            self._ask([], {purpose: list(dict.fromkeys(blocks))})

    def ensure(self, blocks: Iterable[Block]) -> None:
        """Wait until blocks are in the cache.

        Raises:
            FetchFailed: one cannot be read.
        """
        distinct, path_of = dict.fromkeys(blocks), self.location.path_of
        if missing := [block for block in distinct if not os.path.exists(path_of(block))]:
            with self._lock:
                self._ask(missing, {})

    def read(self, block: Block, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        """Read ranges of bytes of a block, which is fetched if it is not in the cache."""
        path = self.location.path_of(block)
        while True:
            try:
                handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            except FileNotFoundError:  # deleted since it was named
                self.ensure([block])
                continue
            try:
                parts = [os.pread(handle, end - begin, begin) for begin, end in ranges]
            finally:
                os.close(handle)
            if all(len(p) == end - begin for p, (begin, end) in zip(parts, ranges, strict=True)):
                return parts
            with suppress(FileNotFoundError):
                os.unlink(path)  # the disk has lost its end

    def _ask(self, needed: list[Block], soon: Mapping[str, list[Block]]) -> None:
        start, last_log, num_attempts = time.monotonic(), 0.0, 0
        while True:
            try:
                self._send(needed, soon)
                for line in self._stream if needed else ():
                    answer, num_attempts = json.loads(line), 0
                    if "done" in answer:
                        return
                    if failed := answer.get("failed"):
                        raise fetch_failed(failed[0], (failed[1], failed[2]))
                    seconds = time.monotonic() - start
                    when_waiting()
                    if seconds - last_log > LOG_SECONDS:
                        last_log = seconds
                        cause = f" (last error: {answer['error']})" if answer["error"] else ""
                        noun = f"{answer['waiting']} blocks of the token store"
                        print(f"waiting for {noun} for {seconds:.0f} s{cause}", flush=True)
                if not needed:
                    return
            except OSError:
                pass
            # The reader was killed, or ended before it saw this connection.
            self._disconnect()
            # Blocks that it has fetched are progress, even if it never answered.
            missing = [b for b in needed if not os.path.exists(self.location.path_of(b))]
            num_attempts = 0 if len(missing) < len(needed) else num_attempts + 1
            if needed and not missing:
                return
            needed = missing
            if num_attempts > 20:
                raise self._broken_reader("ends again and again")
            when_waiting()

    def _send(self, needed: list[Block], soon: Mapping[str, list[Block]]) -> None:
        if self._stream is None:
            self._connect()
        named = {block[0] for block in chain(needed, *soon.values())}
        files = [self.files[key] for key in named - self._sent]
        request = {"files": files, "needed": needed, "soon": soon}
        self._stream.write(json.dumps(request).encode() + b"\n")
        self._stream.flush()
        self._sent |= named

    def _connect(self) -> None:
        """Connect to the reader; start it if there is none."""
        directory, name = Path(self.location.directory), _reader_name(self.location)
        deadline, num_failed = time.monotonic() + CONNECT_SECONDS, 0
        connection = socket.socket(socket.AF_UNIX)
        while True:
            with suppress(OSError), _short_path(directory, name) as path:
                connection.connect(path)
                break
            if self._process is not None and (status := self._process.poll()):
                self._process = None
                num_failed += status > 0  # one that a signal killed may start again
            if time.monotonic() > deadline or num_failed == 3:
                raise self._broken_reader("does not start")
            self.start_reader()
            when_waiting()
            time.sleep(0.02)
        self._stream = connection.makefile("rwb")
        connection.close()  # the stream keeps it open

    def _start(self, directory: Path, start_lock: int) -> None:
        with (directory / "reader.log").open("wb") as log:
            command = [sys.executable, "-P", "-m", "weft.data.remote_tokens"]
            scheme = next(iter(self.files.values())).url.partition("://")[0]
            arguments = [str(directory), str(self.location.limit_bytes), scheme, str(start_lock)]
            self._process = subprocess.Popen(
                [*command, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # signals of a terminal are for the ranks
                pass_fds=[start_lock],  # locked until it serves: there is one start at a time
            )

    def _broken_reader(self, rule: str) -> FetchFailed:
        log = Path(self.location.directory, "reader.log")
        with suppress(OSError):
            rule += f": {log.read_text(errors='replace').strip().rpartition(chr(10))[2][:300]}"
        problem = (f"cannot be read, because the reader of this node {rule}", f"see {log}")
        return fetch_failed(next(iter(self.files.values())).url, problem)

    def _disconnect(self) -> None:
        if self._stream is not None:
            with suppress(OSError):
                self._stream.close()
        self._stream = None
        self._sent = set()


def _do_nothing() -> None:
    pass


_wait_hook: Callable[[], None] = _do_nothing
_last_wait = -10.0 * WAIT_SECONDS


def set_wait_hook(hook: Callable[[], None]) -> None:
    """Call ``hook`` about once per second while a thread waits for bytes."""
    global _wait_hook
    _wait_hook = hook


def when_waiting() -> None:
    """Report that this thread waits for bytes of a store in a bucket."""
    global _last_wait
    _last_wait = time.monotonic()
    _wait_hook()


def beat_if_waiting() -> None:
    """Call the hook if another thread of this process waits for bytes."""
    if time.monotonic() - _last_wait < 3 * WAIT_SECONDS:
        _wait_hook()


@cache
def _client(location: CacheLocation, pid: int) -> ReaderClient:
    return ReaderClient(location)


def get_client(location: CacheLocation) -> ReaderClient:
    """Return the client of this process, which a fork does not share."""
    return _client(location, os.getpid())


# --------------------------------------------------------------------------- columns


class RemoteColumn:
    """Numbers of a file in a bucket; slices are arrays."""

    def __init__(self, file: RemoteFile, dtype: str, location: CacheLocation) -> None:
        self.file, self.dtype, self._location = file, np.dtype(dtype), location
        self.length = file.size_bytes // self.dtype.itemsize
        # Entries of a block.
        width = file.block_bytes if file.block_xxh3 else file.size_bytes
        self.block_length = max(1, width // self.dtype.itemsize)

    def __len__(self) -> int:
        return self.length

    @property
    def client(self) -> ReaderClient:
        """Return the connection of this process."""
        client = get_client(self._location)
        client.files[self.file.key] = self.file
        return client

    def __getitem__(self, span: slice) -> NDArray[Any]:
        begin, end, _ = span.indices(self.length)
        if begin >= end:
            return np.empty(0, self.dtype)
        width, size, parts = self.block_length, self.dtype.itemsize, []
        blocks = [(self.file.key, number) for number in range(begin // width, -(-end // width))]
        client = self.client
        client.ensure(blocks)
        for block in blocks:
            first = block[1] * width
            low, high = max(begin - first, 0), min(end - first, width)
            parts += client.read(block, [(low * size, high * size)])
        return np.frombuffer(b"".join(parts), self.dtype)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        return np.asarray(self[:], dtype)


if __name__ == "__main__":
    main()
