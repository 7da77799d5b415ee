"""A token store in a bucket: what is read, how often, and what happens when it cannot be."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests import aws, s3
from tests.harness import run_ranks
from weft.config.schema import DataSection
from weft.data.dataset import Dataset, dataset_from_store
from weft.data.loader import Batch, Loader, build_mixture
from weft.data.prepare import prepare_data, prepare_store
from weft.data.token_store import STORE_FILE, Store, hash_blocks, open_store

pytest.importorskip("s3fs", reason="pip install 'weft[s3]'")
pytestmark = [
    pytest.mark.system,
    pytest.mark.skipif(bool(aws.missing()), reason=f"{aws.missing()} not installed"),
]

BLOCK = 4096


@pytest.fixture(scope="module")
def server() -> Iterator[int]:
    with aws.moto_server() as port:
        yield port


@pytest.fixture
def proxy(server: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[s3.Proxy]:
    proxy = s3.Proxy(server)
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


def needed_blocks(store: Store) -> int:
    return sum(shard.size_bytes for shard in store.manifest.train.shards)


def test_store_in_bucket_gives_the_batches_of_the_local_store(
    text_store: Store, bucket: str, proxy: s3.Proxy, tmp_path: Path
) -> None:
    url = upload(text_store, bucket)
    for packing in ("windows", "documents", "best_fit"):
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
