"""A token store in a bucket: what is read, how often, and what happens when it cannot be."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests import aws, s3
from tests.harness import run_ranks
from weft.cli.main import main
from weft.config.schema import DataSection
from weft.data.dataset import Dataset, dataset_from_store
from weft.data.loader import Batch, Loader, build_mixture
from weft.data.prepare import open_bucket_store, prepare_data, prepare_store
from weft.data.remote_tokens import FetchFailed
from weft.data.token_store import STORE_FILE, Store, hash_blocks, open_store

pytest.importorskip("s3fs", reason="pip install 'weft[s3]'")
pytestmark = [
    pytest.mark.system,
    pytest.mark.skipif(bool(aws.missing()), reason=f"{aws.missing()} not installed"),
]

BLOCK = 4096


@pytest.fixture
def proxy(moto_port: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[s3.Proxy]:
    proxy = s3.Proxy(moto_port)
    for name, value in aws.variables(proxy.port).items():
        monkeypatch.setenv(name, value)
    yield proxy
    proxy.close()


@pytest.fixture
def bucket(proxy: s3.Proxy, request: pytest.FixtureRequest) -> str:
    return f"b{abs(hash(request.node.name)) % 10**8}"


@pytest.fixture(scope="module")
def text_store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return with_small_blocks(make_text_store(tmp_path_factory.mktemp("text"), 400))


def make_text_store(directory: Path, documents: int, shard_bytes: int = 60_000) -> Store:
    random = np.random.default_rng(0)
    words = ["".join(map(chr, random.integers(97, 123, 5))) for _ in range(300)]
    lines = [
        json.dumps({"text": " ".join(random.choice(words, random.integers(20, 300)))})
        for _ in range(documents)
    ]
    (directory / "text.jsonl").write_text("\n".join(lines))
    section = DataSection(path=str(directory / "text.jsonl"), vocab_size=300)
    return prepare_store(section, directory / "cache", shard_bytes=shard_bytes)


def with_small_blocks(store: Store, block_bytes: int = BLOCK) -> Store:
    """Give the store hashes of small blocks, of which a few documents have many."""
    file = store.path / STORE_FILE
    manifest = json.loads(file.read_text())
    manifest["block_bytes"] = block_bytes
    for name in ("train", "validation"):
        split = manifest[name]
        columns = [split[column] for column in ("learned", "index", "weights", "labels", "ends")]
        for shard in (*split["shards"], *filter(None, columns)):
            data = (store.path / shard["file"]).read_bytes()
            shard["block_xxh3"] = hash_blocks(data, block_bytes)
    file.write_text(json.dumps(manifest))
    return open_store(store.path)


def upload(store: Store, bucket: str) -> str:
    """Copy a store as ``aws s3 cp --recursive`` does; return its URL."""
    run_ranks(_upload, 1, str(store.path), bucket)
    return f"s3://{bucket}/tokens/store"


def _upload(directory: str, bucket: str) -> None:
    import s3fs

    fs = s3fs.S3FileSystem()
    fs.mkdir(bucket)
    files = [str(path) for path in Path(directory).iterdir() if path.is_file()]
    fs.put(files, [f"{bucket}/tokens/store/{Path(file).name}" for file in files])


def section_of(url: str, cache: Path, **keys: Any) -> DataSection:
    keys = {"node_cache_dir": str(cache), "path": url} | keys
    return DataSection.model_validate(keys)


def read_batches(
    dataset: Dataset, section: DataSection, rank: int, ranks: int, steps: int, **keys: Any
) -> list[Batch]:
    mixture = build_mixture(dataset, "train", 64, section, 0)
    loader = Loader(mixture, 0, 12, rank, ranks, 12 // ranks, **keys)
    return [loader.get_microbatches(12 * step)[0] for step in range(steps)]


def read_remote(section: DataSection, rank: int, ranks: int, steps: int) -> list[Batch]:
    return read_batches(prepare_data(section, Path("/nonexistent")), section, rank, ranks, steps)


def read_as_rank(section: DataSection, steps: int, caches: int = 1) -> tuple[list[Any], list[str]]:
    """Return this rank's batches, and the ids of the readers of its node."""
    import torch.distributed as dist

    rank, ranks = dist.get_rank(), dist.get_world_size()
    if caches > 1:
        section = section.model_copy(update={"node_cache_dir": f"{section.node_cache_dir}{rank}"})
    batches = read_remote(section, rank, ranks, steps)
    dist.barrier()
    return [list(batch) for batch in batches], find_readers(Path(section.node_cache_dir))


def find_readers(cache: Path) -> list[str]:
    """Return the ids of the processes that read for a cache."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().split(b"\0")
        except OSError:
            continue
        if b"weft.data.remote_tokens" in words and str(cache).encode() in words:
            found.append(path.parent.name)
    return found


def assert_equal(batches: list[Any], expected: list[Batch]) -> None:
    for ours, theirs in zip(batches, expected, strict=True):
        for a, b in zip(ours, theirs, strict=True):
            assert (a is None) == (b is None)
            assert a is None or torch.equal(a, b)


def test_new_node_reads_small_files_together_and_the_index_while_the_reader_starts(
    text_store: Store, bucket: str, proxy: s3.Proxy, tmp_path: Path
) -> None:
    section = section_of(upload(text_store, bucket), tmp_path / "node", packing="best_fit")
    small, paths = threading.Barrier(5), []

    def wait_for_others(method: str, path: str, number: int) -> None:
        paths.append(path.partition("?")[0].rpartition("/")[2])
        if path.endswith((".json", ".jinja")):
            small.wait(30)  # all are asked for before one is answered
        if path.endswith("train.ends"):
            wait_until(lambda: bool(find_readers(tmp_path / "node")))

    proxy.spoil = wait_for_others
    batches = run_ranks(read_opened, 1, section)[0]
    assert_equal(batches, read_batches(dataset_from_store(text_store), section, 0, 1, 1))
    assert paths.count("store.json") == paths.count("tokenizer.json") == 1


def read_opened(section: DataSection) -> list[Batch]:
    dataset = dataset_from_store(open_bucket_store(section.path, section))
    return read_batches(dataset, section, 0, 1, 1)


def wait_until(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.05)


def test_damaged_or_lost_index_is_named(
    text_store: Store, bucket: str, proxy: s3.Proxy, tmp_path: Path
) -> None:
    section = section_of(upload(text_store, bucket), tmp_path / "node", packing="best_fit")
    lost = []

    def lose(method: str, path: str, number: int) -> int | None:
        lost.append(path) if path.endswith("train.ends") else None
        return 404 if path.endswith("train.ends") else None

    proxy.spoil = lose
    message = run_ranks(read_expecting_error, 1, section)[0]
    assert lost
    assert f'data.path="{section.path}/train.ends" does not exist' in message
    proxy.spoil = lambda method, path, number: None
    run_ranks(damage_index, 1, section.path)
    message = run_ranks(read_expecting_error, 1, section)[0]
    assert 'train.ends" is damaged: bytes 0 to 3,' in message


def read_expecting_error(section: DataSection) -> str:
    with pytest.raises(FetchFailed) as info:
        read_remote(section, 0, 1, 1)
    return str(info.value)


def damage_index(url: str) -> None:
    import s3fs

    fs, path = s3fs.S3FileSystem(), f"{url}/train.ends"
    content = bytearray(fs.cat_file(path))
    content[100] ^= 1
    fs.pipe_file(path, bytes(content))


def needed_blocks(store: Store) -> int:
    return sum(shard.size_bytes for shard in store.manifest.train.shards)


def test_store_in_bucket_gives_the_batches_of_the_local_store(
    text_store: Store, bucket: str, proxy: s3.Proxy, tmp_path: Path
) -> None:
    url = upload(text_store, bucket)
    for packing in ("windows", "best_fit"):  # without and with the index of documents
        proxy.bytes_by_path.clear()
        section = section_of(url, tmp_path / packing, packing=packing)
        results = run_ranks(read_as_rank, 2, section, 6)
        assert results[0][1] == results[1][1]
        assert len(results[0][1]) == 1  # one reader
        local = dataset_from_store(text_store)
        for rank, (batches, _) in enumerate(results):
            assert_equal(batches, read_batches(local, section, rank, 2, 6))
        by_file = {name.rpartition("/")[2]: size for name, size in proxy.bytes_by_path.items()}
        for shard in text_store.manifest.train.shards:
            assert by_file.get(shard.file, 0) <= shard.size_bytes  # each block once
        assert ("train.ends" in by_file) == (packing == "best_fit")


@pytest.mark.slow
def test_killed_reader_refusals_and_cut_connections_lose_nothing(
    text_store: Store, bucket: str, proxy: s3.Proxy, tmp_path: Path
) -> None:
    url = upload(text_store, bucket)
    proxy.spoil = faults = s3.RandomFaults(0.3, 0.1)
    section = section_of(url, tmp_path / "node")
    batches, num_kills = run_ranks(read_and_kill, 1, section, 12, 0.5, timeout=120)[0]
    assert_equal(batches, read_batches(dataset_from_store(text_store), section, 0, 1, 12))
    assert num_kills > 0
    assert faults.refused > 3
    assert faults.cut > 0


def read_and_kill(
    section: DataSection, steps: int, probability: float, seed: int = 0
) -> tuple[list[Any], int]:
    """Read batches, and kill the reader before some steps; return the number of kills."""
    dataset = prepare_data(section, Path("/nonexistent"))
    loader = Loader(build_mixture(dataset, "train", 64, section, 0), 0, 12, 0, 1, 12)
    random, batches, kills = np.random.default_rng(seed), [], 0
    for step in range(steps):
        if random.random() < probability:
            for pid in find_readers(Path(section.node_cache_dir)):
                os.kill(int(pid), signal.SIGKILL)
                kills += 1
        batches.append(list(loader.get_microbatches(12 * step)[0]))
    return batches, kills


@pytest.mark.slow
def test_cache_above_its_limit_loses_the_blocks_of_the_longest_unused(
    text_store: Store, bucket: str, proxy: s3.Proxy, tmp_path: Path
) -> None:
    url = upload(text_store, bucket)
    total = sum(shard.size_bytes for shard in text_store.manifest.train.shards)
    limit = total // 4
    section = section_of(url, tmp_path / "node", node_cache_gib=limit / (1 << 30))
    steps = 12
    results = run_ranks(read_as_rank, 1, section, steps)
    assert_equal(results[0][0], read_batches(dataset_from_store(text_store), section, 0, 1, steps))
    used = sum(path.stat().st_size for path in (tmp_path / "node/blocks").glob("??/*"))
    assert used < 1.2 * limit + 12 * 2 * BLOCK  # a batch may need more than the limit


def test_object_that_is_lost_or_damaged_during_a_run_is_named(
    text_store: Store, bucket: str, tmp_path: Path
) -> None:
    url = upload(text_store, bucket)
    rules = {"change": "is damaged: bytes", "truncate": "is damaged: bytes"}
    rules["delete"] = "does not exist"
    for damage, rule in rules.items():
        section = section_of(url, tmp_path / damage)
        text = run_ranks(read_damaged, 1, section, damage)[0]
        assert rule in text
        assert f"{url}/train-0" in text
        assert "Put the object there again" in text


def read_damaged(section: DataSection, damage: str) -> str:
    import s3fs

    dataset = prepare_data(section, Path("/nonexistent"))
    fs = s3fs.S3FileSystem()
    for name in fs.glob(f"{section.path}/train-*.bin"):
        content = fs.cat_file(name)
        fs.rm(name)
        if damage == "change":
            content = content[:-1] + bytes([content[-1] ^ 1])
        if damage != "delete":
            fs.pipe_file(name, content[: -5000 if damage == "truncate" else None])
    with pytest.raises(FetchFailed) as caught:
        read_batches(dataset, section, 0, 1, 30)
    return str(caught.value)


@pytest.mark.slow
def test_two_jobs_on_a_node_share_one_cache(
    text_store: Store, bucket: str, proxy: s3.Proxy, tmp_path: Path
) -> None:
    url = upload(text_store, bucket)
    section = section_of(url, tmp_path / "node")
    run_ranks(read_as_rank, 1, section, 4)
    before = dict(proxy.bytes_by_path)
    other = section.model_copy(update={"node_cache_gib": 1.0})  # its own reader, the same blocks
    run_ranks(read_as_rank, 1, other, 4)
    fetched = {name for name, size in proxy.bytes_by_path.items() if size > before.get(name, 0)}
    assert not [name for name in fetched if name.endswith(".bin")]


def test_places_that_cannot_be_used_are_refused(
    proxy: s3.Proxy, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = {"cache_dir": "http://host/cache", "node_cache_dir": "s3://b/x"}
    rules = ["is a server that can only be read", "is not a directory"]
    keys = [word for name, value in words.items() for word in (f"--data.{name}", value)]
    assert main(["train", "demo", "--run.dir", str(tmp_path / "run"), *keys]) == 2
    error = capsys.readouterr().err
    assert all(rule in error for rule in rules)


def test_data_verify_reads_every_byte_of_a_store_in_a_bucket(
    text_store: Store, bucket: str, proxy: s3.Proxy, tmp_path: Path
) -> None:
    url = upload(text_store, bucket)
    words = ["data", "verify", url, "--data.node_cache_dir", str(tmp_path / "node")]
    good, damaged = run_ranks(verify_twice, 1, words, url)[0]
    assert good == 0
    assert damaged == 1
    fetched = {name.rpartition("/")[2] for name in proxy.bytes_by_path}
    assert {shard.file for split in text_store.splits for shard in split.files} <= fetched


def verify_twice(words: list[str], url: str) -> tuple[int, int]:
    import s3fs

    good, fs = main(words), s3fs.S3FileSystem()
    name = fs.glob(f"{url}/train-*.bin")[0]
    content = fs.cat_file(name)
    fs.pipe_file(name, content[:-1] + bytes([content[-1] ^ 1]))
    return good, main(words)
