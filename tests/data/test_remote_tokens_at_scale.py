"""Four nodes without a shared disk, their tokens on a real S3 server, and its failures.

    python -m pytest -s -m slow tests/data/test_remote_tokens_at_scale.py

prints what was measured.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

from tests import s3
from tests.data.test_remote_tokens import find_readers, make_text_store, section_of, upload
from tests.harness import run_ranks
from weft.config.schema import DataSection
from weft.data.dataset import dataset_from_store
from weft.data.loader import Loader, build_mixture
from weft.data.prepare import open_bucket_store
from weft.data.token_store import (
    STORE_FILE,
    Shard,
    Split,
    Store,
    hash_blocks,
    hash_tokens,
    open_store,
)

pytest.importorskip("s3fs", reason="pip install 'weft[s3]'")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.system,
    pytest.mark.skipif(bool(s3.missing()), reason=f"no S3 server: {s3.missing()} not installed"),
    pytest.mark.timeout(900),
]

BLOCK = 1024  # a chunk of the span shuffle has 64, as it has of stores with blocks of 1 MiB
SEQ_LEN, BATCH = 64, 576
SPAN_GIB = 64 * 64 * BLOCK / (1 << 30)


@pytest.fixture(scope="module")
def server() -> Iterator[int]:
    with s3.server() as port:
        yield port


@pytest.fixture
def proxy(server: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[s3.Proxy]:
    proxy = s3.Proxy(server)
    for name, value in s3.variables(proxy.port).items():
        monkeypatch.setenv(name, value)
    yield proxy
    proxy.close()


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """Four million random tokens in 16 shards, 8 MB."""
    return make_random_store(tmp_path_factory.mktemp("random"), 4_000_000, 16, 300)


def make_random_store(
    directory: Path, tokens: int, shards: int, document: int, block: int = BLOCK
) -> Store:
    """Write a store of random tokens in documents of one size."""
    base, random = make_text_store(directory, 20), np.random.default_rng(1)
    flat = random.integers(3, 256, tokens).astype(np.uint16)
    flat[document - 1 :: document] = base.manifest.separator
    entries = []
    for number, part in enumerate(np.array_split(flat, shards)):
        name = f"train-{number:05d}.bin"
        part.tofile(base.path / name)
        blocks = hash_blocks(part.tobytes(), block)
        entries.append(Shard(name, len(part), part.nbytes, hash_tokens(part), block_xxh3=blocks))
    ends = np.flatnonzero(flat == base.manifest.separator) + 1
    ends.tofile(base.path / "train.ends")
    blocks = hash_blocks(ends.tobytes(), block)
    index = Shard("train.ends", len(ends), ends.nbytes, hash_tokens(ends), block_xxh3=blocks)
    train = Split(len(ends), 0, tokens, entries, ends=index)
    validation = base.manifest.validation
    files = [replace(shard, block_xxh3="") for shard in validation.shards]
    validation = replace(validation, shards=files, ends=None)
    manifest = replace(base.manifest, train=train, validation=validation, block_bytes=block)
    (base.path / STORE_FILE).write_text(json.dumps(asdict(manifest)))
    return Store(base.path, manifest)


def open_loader(
    store: Store, section: DataSection, rank: int, ranks: int, steps: int | None = None
) -> Loader:
    mixture = build_mixture(dataset_from_store(store), "train", SEQ_LEN, section, 0)
    keys: dict[str, Any] = {"numbers_tokens": True, "num_samples": steps and steps * BATCH}
    return Loader(mixture, 0, BATCH, rank, ranks, BATCH // ranks, **keys)


def train_as_node(
    section: DataSection, steps: range, compute_seconds: float = 0.0
) -> tuple[list[Any], float, float]:
    """Read as the one rank of a node; return positions with tokens, and seconds.

    The seconds are those to the first batch, and those of the other steps.
    """
    rank, start = dist.get_rank(), time.monotonic()
    section = section.model_copy(update={"node_cache_dir": f"{section.node_cache_dir}{rank}"})
    is_local = "://" not in section.path
    store = open_store(section.path) if is_local else open_bucket_store(section.path, section)
    loader = open_loader(store, section, rank, dist.get_world_size(), steps.stop)
    rows, first = [], 0.0
    for step in steps:
        [batch] = loader.get_microbatches(BATCH * step)
        first = first or time.monotonic()
        rows.append(pack_rows(batch))
        time.sleep(compute_seconds)
    return rows, first - start, time.monotonic() - first


def pack_rows(batch: Any) -> Any:
    """Return the position and the tokens of each sequence, int64 (n, 1 + T)."""
    return np.concatenate((batch.token_ids_BT[:, :1] // SEQ_LEN, batch.tokens_BT), 1)


def local_rows(store: Store, section: DataSection, steps: range) -> list[Any]:
    loader = open_loader(store, section, 0, 1)
    return [sort_rows([pack_rows(loader.get_microbatches(BATCH * step)[0])]) for step in steps]


def sort_rows(parts: list[Any]) -> Any:
    rows = np.concatenate(parts)
    return rows[rows[:, 0].argsort()]


def assert_same_global_batches(ranks: list[list[Any]], expected: list[Any]) -> None:
    for *parts, theirs in zip(*ranks, expected, strict=True):
        np.testing.assert_array_equal(sort_rows(parts), theirs)


def span_section(url: str, tmp_path: Path) -> DataSection:
    return section_of(
        url, tmp_path / "node", shuffle_span_gib=SPAN_GIB, node_cache_gib=4_000_000 / (1 << 30)
    )


def test_four_nodes_read_what_they_train_on_once(
    store: Store, proxy: s3.Proxy, tmp_path: Path
) -> None:
    section = span_section(upload(store, "once"), tmp_path)
    proxy.bytes_by_path.clear()
    steps = range((store.manifest.train.tokens - 1) // SEQ_LEN // BATCH)
    results = run_ranks(train_as_node, 4, section, steps, timeout=300)
    assert_same_global_batches([rows for rows, _, _ in results], local_rows(store, section, steps))
    fetched = sum(n for name, n in proxy.bytes_by_path.items() if name.endswith(".bin"))
    needed = len(steps) * BATCH * SEQ_LEN * 2
    requests = proxy.requests
    print(f"\nread {fetched:,} bytes in {requests} requests for windows of {needed:,} bytes:")
    print(f"{fetched / needed:.3f} times")
    assert fetched < 1.05 * needed


def test_latency_of_the_bucket_is_hidden_behind_the_steps(
    server: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """With 50 ms for each request, against the store on a disk."""
    store = make_random_store(tmp_path, 30_000_000, 8, 300, 1 << 20)
    slow, steps = s3.Proxy(server, 0.05), range(60)
    for name, value in s3.variables(slow.port).items():
        monkeypatch.setenv(name, value)
    try:
        seconds = {}
        local = section_of(str(store.path), tmp_path / "local")
        remote = section_of(upload(store, "latency"), tmp_path / "node")
        for name, section in (("local", local), ("bucket", remote)):
            results = run_ranks(train_as_node, 2, section, steps, 0.2, timeout=300)
            seconds[name] = max(rest for _, _, rest in results)
            print(f"\n{name}: first batch {max(f for _, f, _ in results):.2f} s", end="")
            print(f", the other {len(steps) - 1} steps {seconds[name]:.2f} s")
    finally:
        slow.close()
    assert seconds["local"] / seconds["bucket"] >= 0.95


def test_4_2_and_3_nodes_train_on_the_samples_of_one(
    store: Store, proxy: s3.Proxy, tmp_path: Path
) -> None:
    url = upload(store, "elastic")
    for section in (span_section(url, tmp_path), section_of(url, tmp_path / "full")):
        for nodes, steps in ((4, range(30)), (2, range(30, 60)), (3, range(60, 90))):
            results = run_ranks(train_as_node, nodes, section, steps, timeout=300)
            rows = [rows for rows, _, _ in results]
            assert_same_global_batches(rows, local_rows(store, section, steps))


def test_500_refusals_and_100_kills_lose_nothing(proxy: s3.Proxy, tmp_path: Path) -> None:
    """A kill ends the reader, at a random time; half of the requests are refused at first."""
    store = make_random_store(tmp_path, 4_000_000, 16, 300, 2 << 10)
    section = section_of(upload(store, "kills"), tmp_path / "node")
    faults = s3.RandomFaults(0.5, 0.05)
    refused = 0

    def spoil(method: str, path: str, number: int) -> int | None:
        return faults(method, path, number) if faults.refused < 500 else None

    proxy.spoil = spoil
    steps = range(108)
    rows, kills = run_ranks(read_and_kill, 1, section, steps, 100, timeout=800)[0]
    assert_same_global_batches([rows], local_rows(store, section, steps))
    refused = faults.refused
    print(f"\n{refused} requests refused, {faults.cut} cut, {kills} readers killed")
    assert refused >= 500
    assert kills >= 100


def read_and_kill(section: DataSection, steps: range, num_kills: int) -> tuple[list[Any], int]:
    import threading

    loader = open_loader(open_bucket_store(section.path, section), section, 0, 1)
    cache, kills, is_done = Path(section.node_cache_dir), [0], threading.Event()

    def kill() -> None:
        random = np.random.default_rng(0)
        while kills[0] < num_kills and not is_done.wait(random.uniform(0.2, 2.0)):
            for pid in find_readers(cache):
                os.kill(int(pid), signal.SIGKILL)
                kills[0] += 1

    thread = threading.Thread(target=kill)
    thread.start()
    rows = []
    for step in steps:
        while kills[0] < num_kills * (step - steps[0]) // (len(steps) - 1):
            loader.mixture.announce("train", *np.zeros((2, 1, 1), np.int64))  # starts a reader
            time.sleep(0.1)
        rows.append(pack_rows(loader.get_microbatches(BATCH * step)[0]))
    is_done.set()
    thread.join()
    return rows, kills[0]


def test_resume_with_a_million_documents_takes_a_second(proxy: s3.Proxy, tmp_path: Path) -> None:
    store = make_random_store(tmp_path, 30_000_000, 8, 30, 1 << 20)
    section = section_of(upload(store, "million"), tmp_path / "node", packing="best_fit")
    attempts = [
        section.model_copy(update={"node_cache_dir": f"{section.node_cache_dir}-{attempt}"})
        for attempt in range(3)  # the machine may be busy during some
    ]
    results = [run_ranks(resume, 1, attempt, timeout=300)[0] for attempt in attempts]
    documents = store.manifest.train.documents
    print(f"\n{documents:,} documents")
    for seconds in results:
        print(", ".join(f"{name} {each:.2f} s" for name, each in seconds.items()))
    assert documents >= 1_000_000
    for name in ("new node", "again"):
        assert min(seconds[name] for seconds in results) < 1.0


def resume(section: DataSection) -> dict[str, float]:
    """Return the seconds to a first batch, on a new node and on one that has read it before."""
    seconds = {}
    import s3fs  # noqa: F401  the time of the import is not that of the data

    for name in ("new node", "again"):
        start = time.monotonic()
        store = open_bucket_store(section.path, section)
        opened = time.monotonic()
        loader = open_loader(store, section, 0, 1)
        packed = time.monotonic()
        loader.get_microbatches(BATCH * 100)
        seconds |= {f"{name}: open": opened - start, f"{name}: pack": packed - opened}
        seconds[name] = time.monotonic() - start
    return seconds
