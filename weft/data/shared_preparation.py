"""Prepare data in an object store, by any number of identical workers.

Work is divided into *units*, such as the scan or the shards of a part of the source.  A worker
claims a unit with a conditional put, computes its result and puts that, too, so that every byte is
read and tokenized by one worker.  Objects of a piece of work, while it lasts::

    preparing/NAME/job                  what is prepared, with which versions
    preparing/NAME/STAGE/worker-ID      heartbeat of a worker: its content changes while it runs
    preparing/NAME/STAGE/claim-UNIT-N   worker of a unit; N counts the claims of workers that ended
    preparing/NAME/STAGE/result-UNIT    result of a unit as JSON
    preparing/NAME/STAGE/error-N        errors, with which all workers end
    preparing/NAME/summaries/SHARD      token counts and ends of the documents of a shard

A claim is a lease: it lasts while the heartbeat of its worker changes.  If a worker has not seen
it change for `EXPIRY_SECONDS` of its own monotonic clock, it puts the next claim.  So clocks need
not agree, and a store needs nothing but put-if-absent.  A worker that was only slow loses nothing:
results depend on the source alone, and the first one counts.  Workers may be killed at any time.
"""

from __future__ import annotations

import json
import os
import random
import socket
import threading
import time
import uuid
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache, partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter

from weft.config.errors import ConfigError, InvalidConfig
from weft.config.storage import is_remote, put_if_absent, remove
from weft.data import prepared_cache
from weft.data.prepared_cache import (
    Progress,
    Report,
    format_scans,
    read_scans,
)
from weft.data.source import object_version
from weft.data.token_store import hash_json
from weft.data.workers import Advance, open_pool, parallel_map
from weft.version import __version__

T = TypeVar("T")
R = TypeVar("R")

BEAT_SECONDS = 10.0
EXPIRY_SECONDS = 60.0  # without a heartbeat
POLL_SECONDS = 3.0  # between listings
UNIT_BYTES = 32 << 20  # of the source; smaller items are one unit together
WORK_DIR = "preparing"
CONDITIONAL_REMEDY = (
    "use a store with conditional puts, such as Amazon S3, Ceph, MinIO or Cloudflare R2, or a "
    "directory"
)


class Completed(Exception):
    """Another worker has completed the work."""


@dataclass(frozen=True)
class SharedWork:
    """Work that the workers divide among themselves.

    Attributes:
        directory: claims and results, while it lasts.
        final: the object that is put last; if it exists, the work is complete.
    """

    directory: Path
    final: Path

    @property
    def summaries(self) -> Path:
        """Directory of the summaries of shards."""
        return self.directory / "summaries"


def map_units(
    shared: SharedWork | None,
    stage: str,
    function: Callable[[T, Advance], R],
    items: Sequence[T],
    sizes: Sequence[int],
    result_type: type[R],
    advance: Advance,
    num_processes: int,
) -> list[R]:
    """Return ``function(item, advance)`` for each item, in order.

    One worker calls it for an item, and the others read the result.

    Args:
        shared: the work; None: this process and its children do it alone.
        stage: name of this part of the work.
        function: deterministic and idempotent; see `parallel_map`.
        items: the same for all workers.
        sizes: bytes of each item; 0: unknown.
        result_type: type of a result, which pydantic converts to JSON and back.
        advance: is called with the bytes that all workers have done since the last call.
        num_processes: processes on this machine.

    Raises:
        InvalidConfig: ``function`` raised it, here or in another worker.
        Completed: another worker has completed the work.
    """
    if shared is None:
        return parallel_map(function, items, advance, num_processes)
    groups = list(_group_items(sizes))
    results: TypeAdapter[list[R]] = TypeAdapter(list[result_type])  # type: ignore[valid-type]
    run = partial(_run_group, function)
    running: dict[Any, int] = {}
    with (
        _Units(shared.directory / stage, shared.final, len(groups)) as units,
        open_pool(advance, num_processes) as pool,
    ):
        try:
            while units.remaining:
                is_idle = True
                while len(running) < num_processes and (unit := units.claim()) is not None:
                    running[pool.submit(run, [items[n] for n in groups[unit]])] = unit
                    is_idle = False
                for future in pool.wait(running) if running else ():
                    units.publish(running.pop(future), results.dump_json(future.result()))
                if is_idle and not running:
                    time.sleep(POLL_SECONDS)
                for unit in units.refresh():
                    advance(sum(sizes[n] for n in groups[unit]))
        except InvalidConfig as error:
            raise units.fail(error) from None
        texts = units.read_results()
    return [each for text in texts for each in results.validate_json(text)]


def _group_items(sizes: Sequence[int]) -> Iterator[range]:
    """Yield consecutive items of about `UNIT_BYTES` together."""
    begin = total = 0
    for number, size in enumerate(sizes):
        size = size or UNIT_BYTES
        if total and total + size > UNIT_BYTES:
            yield range(begin, number)
            begin, total = number, 0
        total += size
    if total:
        yield range(begin, len(sizes))


def _run_group(
    function: Callable[[T, Advance], R], items: Sequence[T], advance: Advance
) -> list[R]:
    return [function(item, advance) for item in items]


# --------------------------------------------------------------------------- units


class _Units:
    """Units of a stage, of which this worker claims some; a context with a heartbeat."""

    def __init__(self, directory: Path, final: Path, count: int) -> None:
        self._directory, self._final, self._count = directory, final, count
        self._worker = f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
        # A random order, so that workers seldom try the same unit.
        self._order = random.sample(range(count), count)
        self._done: set[int] = set()
        self._running: set[int] = set()
        self._claims: dict[int, int] = {}  # the last claim of each unit
        self._listed_claims: dict[int, int] = {}  # in the last listing
        self._owners: dict[tuple[int, int], str] = {}
        self._beats: dict[str, tuple[str, float]] = {}  # version, and when it was first seen
        self._known_errors: Collection[str] | None = None
        self._refresh_time = -POLL_SECONDS
        self._num_beats = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._keep_beating, daemon=True)

    def __enter__(self) -> _Units:
        self._beat()
        try:
            self.refresh()
        except BaseException:
            self._clear()
            raise
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()
        self._clear()

    @property
    def remaining(self) -> int:
        """Number of units without a result."""
        return self._count - len(self._done)

    def claim(self) -> int | None:
        """Return a unit that this worker is to do; None: there is none at the moment."""
        free = [n for n in self._order if n not in self._done and n not in self._running]
        for unit in free:
            if unit not in self._claims and self._try_claim(unit, 0):
                return unit
        for unit in free:
            generation = self._claims.get(unit)
            # A claim that is newer than the listing has a worker that the listing may lack.
            if (
                generation is not None
                and generation == self._listed_claims.get(unit)
                and self._has_ended(unit, generation)
                and self._try_claim(unit, generation + 1)
            ):
                return unit
        return None

    def publish(self, unit: int, content: bytes) -> None:
        """Put the result of a unit."""
        with suppress(FileExistsError):  # of a worker that took it for dead
            put_if_absent(self._directory / f"result-{unit:06d}", content)
        self._running.discard(unit)
        self._done.add(unit)

    def fail(self, error: InvalidConfig) -> InvalidConfig:
        """Return the error with which all workers end, because one has ended with it."""
        rows = [(e.key, str(e.value), e.rule, e.remedy) for e in error.errors]
        path = self._directory / f"error-{len(self._known_errors or ()):03d}"
        try:
            put_if_absent(path, json.dumps(rows).encode())
        except FileExistsError:
            return self._read_error(path)
        return error

    def refresh(self) -> set[int]:
        """List the objects, if that is due; return the units that others have done since.

        Raises:
            InvalidConfig: another worker failed.
            Completed: the final object exists.
        """
        now = time.monotonic()
        if now - self._refresh_time < POLL_SECONDS:
            return set()
        directory: Any = self._directory
        try:
            entries = directory.fs.ls(directory.path, detail=True)
        except FileNotFoundError:
            entries = []
        # Objects are removed after the final one is put, so without it the listing lacks none.
        if self._final.exists():
            raise Completed
        infos = {entry["name"].rpartition("/")[2]: entry for entry in entries}
        errors = sorted(name for name in infos if name.startswith("error-"))
        if self._known_errors is None:
            self._known_errors = errors  # of earlier attempts
        for name in errors:
            if name not in self._known_errors:
                raise self._read_error(self._directory / name)
        done = {int(name[7:]) for name in infos if name.startswith("result-")} - self._done
        self._done |= done
        for name in sorted(infos):
            if name.startswith("claim-"):
                unit, generation = map(int, name[6:].split("-"))
                self._listed_claims[unit] = generation
        self._claims |= self._listed_claims
        beats = {name[7:]: info for name, info in infos.items() if name.startswith("worker-")}
        self._beats = {
            worker: beat
            if (beat := self._beats.get(worker)) and beat[0] == object_version(info)
            else (object_version(info), now)
            for worker, info in beats.items()
        }
        self._refresh_time = now
        return done

    def read_results(self) -> list[bytes]:
        """Return the results of all units."""
        directory: Any = self._directory
        paths = [f"{directory.path.rstrip('/')}/result-{n:06d}" for n in range(self._count)]
        try:
            contents = directory.fs.cat(paths)
        except FileNotFoundError:
            if self._final.exists():
                raise Completed from None
            raise
        return [contents[path] for path in paths]

    def _try_claim(self, unit: int, generation: int) -> bool:
        self._claims[unit] = generation
        try:
            path = self._directory / f"claim-{unit:06d}-{generation:03d}"
            put_if_absent(path, self._worker.encode())
        except FileExistsError:
            return False
        # Its worker may have completed it after the listing, and ended.
        if generation and (self._directory / f"result-{unit:06d}").exists():
            self._done.add(unit)
            return False
        self._running.add(unit)
        return True

    def _has_ended(self, unit: int, generation: int) -> bool:
        """Return True if the listing shows that the worker of a claim has ended."""
        if (unit, generation) not in self._owners:
            path = self._directory / f"claim-{unit:06d}-{generation:03d}"
            self._owners[unit, generation] = path.read_bytes().decode()
        beat = self._beats.get(self._owners[unit, generation])
        return beat is None or self._refresh_time - beat[1] > EXPIRY_SECONDS

    def _read_error(self, path: Path) -> InvalidConfig:
        return InvalidConfig([ConfigError(*row) for row in json.loads(path.read_bytes())])

    @property
    def _beat_path(self) -> Any:
        return self._directory / f"worker-{self._worker}"

    def _beat(self) -> None:
        self._num_beats += 1
        content = str(self._num_beats).encode()
        self._beat_path.fs.pipe_file(self._beat_path.path, content)

    def _keep_beating(self) -> None:
        while not self._stop.wait(BEAT_SECONDS):
            with suppress(OSError):  # others may do this worker's units, too: no harm
                self._beat()

    def _clear(self) -> None:
        with suppress(OSError):  # then the heartbeat expires
            self._beat_path.fs.rm_file(self._beat_path.path)


# --------------------------------------------------------------------------- work


def load_or_scan(
    cache: Path,
    key: object,
    adapter: TypeAdapter[T],
    scan: Callable[[SharedWork | None], T],
    source: str,
    report: Report,
) -> T:
    """Return the cached result of scanning a source, or scan it and cache the result.

    In an object store, workers scan it together; see `weft.data.prepared_cache.load_or_scan`.
    ``source`` is ``data.path``.
    """
    if not is_remote(cache):
        return prepared_cache.load_or_scan(cache, key, adapter, partial(scan, None))
    name = hash_json(key)
    final = cache / "scans" / f"{name}.json"
    if read_scans(final) is None:
        remove(final)  # it is damaged

    def make(shared: SharedWork) -> bytes:
        return format_scans(adapter.dump_python(scan(shared), mode="json"))

    make_together(cache, f"scan-{name}", final, source, report, make)
    return adapter.validate_python(read_scans(final))


def make_together(
    cache: Path,
    name: str,
    final: Path,
    source: str,
    report: Report,
    make: Callable[[SharedWork], bytes],
) -> None:
    """Put the object that completes a piece of work, unless it exists.

    Args:
        cache: directory of prepared data in an object store.
        name: of the work; hashes all that determines the result.
        final: the object.
        source: ``data.path``, for messages.
        report: is called with messages.
        make: returns the content, after all units are done.
    """
    with convert_store_errors(cache):
        if final.exists():
            return
        check_conditional_put(cache)
        work = SharedWork(cache / WORK_DIR / name, final)
        try:
            _check_versions(cache, work, source, report)
            content = make(work)
            with suppress(FileExistsError):  # of a worker that names the source otherwise
                put_if_absent(final, content)
        except (Completed, OSError):  # another worker has removed what this one reads
            if not final.exists():
                raise
        with suppress(FileNotFoundError):  # others remove them, too
            remove(work.directory)


def put_object(path: Path, content: bytes) -> None:
    """Put a file of a store, whose content is the same in all workers.

    Raises:
        InvalidConfig: the store has other content.
    """
    try:
        put_if_absent(path, content)
    except FileExistsError:
        rule = "has other content than this worker would write: it is damaged, or was prepared "
        rule += "with another version of weft or tokenizers"
        remedy = f"delete {path.parent}, and use one version on all machines"
        error = ConfigError("data.cache_dir", str(path), rule, remedy)
        raise InvalidConfig([error]) from None


def _check_versions(cache: Path, work: SharedWork, source: str, report: Report) -> None:
    """Compare the versions of the workers; report those that prepare something else.

    Raises:
        InvalidConfig: workers with other versions do this work.
    """
    versions = {"weft": __version__, "tokenizers": version("tokenizers")}
    job = work.directory / "job"
    content = json.dumps({"source": source, "versions": versions}).encode()
    try:
        put_if_absent(job, content)
    except FileExistsError:
        others = json.loads(job.read_bytes())["versions"]
        if others != versions:
            theirs, ours = (
                " and ".join(f"{name} {number}" for name, number in each.items())
                for each in (others, versions)
            )
            rule = f"has workers that prepare these data with {theirs}; this one has {ours}"
            remedy = f"use one version on all machines, or delete {work.directory} if none runs"
            raise InvalidConfig([ConfigError("data.cache_dir", str(cache), rule, remedy)]) from None
    kind = work.directory.name.partition("-")[0] if "-" in work.directory.name else ""
    for other in (cache / WORK_DIR).iterdir():
        has_same_kind = other.name.startswith("scan-") == (kind == "scan")
        if other.name == work.directory.name or not has_same_kind:
            continue
        with suppress(OSError):  # it ends just now
            if json.loads((other / "job").read_bytes())["source"] == source:
                text = f"{source}: other workers, or an interrupted preparation, have other "
                text += f"settings, tokenizers or files, and share no work with this one: {other}"
                report(Progress(text))


@cache
def check_conditional_put(cache: Path) -> None:
    """Check that a conditional put never overwrites an object.

    Raises:
        InvalidConfig: it does.
    """
    probe = cache / WORK_DIR / f"probe-{uuid.uuid4().hex}"
    put_if_absent(probe, b"first")
    try:
        put_if_absent(probe, b"second")
    except FileExistsError:
        return
    finally:
        remove(probe)
    rule = "is in a store that ignores conditional puts (If-None-Match): workers would overwrite "
    rule += "each other's claims"
    raise InvalidConfig([ConfigError("data.cache_dir", str(cache), rule, CONDITIONAL_REMEDY)])


@contextmanager
def convert_store_errors(cache: Path) -> Iterator[None]:
    """Convert an exception of a store's library into an error of ``data.cache_dir``."""
    try:
        yield
    except Exception as error:
        if not isinstance(error, (OSError, *_client_errors())):
            raise
        reason = " ".join(str(error.__cause__ or error).split())
        rule = f"cannot be used: {type(error).__name__}: {reason}"
        remedy = "check the name of the bucket, the credentials and the endpoint"
        if "NotImplemented" in rule or "not implemented" in rule:
            remedy = CONDITIONAL_REMEDY
        raise InvalidConfig([ConfigError("data.cache_dir", str(cache), rule, remedy)]) from error


def _client_errors() -> list[type[Exception]]:
    """Return the exceptions of Amazon's client, if it is installed."""
    try:
        from botocore.exceptions import BotoCoreError, ClientError
    except ImportError:
        return []
    return [BotoCoreError, ClientError]
