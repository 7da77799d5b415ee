"""Workers on a real S3 server that are killed, while requests fail: equal bytes, nothing twice."""

from __future__ import annotations

import gzip
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import fsspec
import pytest

from tests import aws, s3
from weft.config.schema import DataSection
from weft.data.prepare import prepare_store

pytestmark = [
    pytest.mark.slow,
    pytest.mark.system,
    pytest.mark.skipif(bool(s3.missing()), reason=f"needs {', '.join(s3.missing())}"),
    pytest.mark.timeout(1500),
]
BUCKET, SHARD_BYTES = "tokens", 80_000
NUM_KILLS, EXPIRY = 100, 6.0
WORKER = """\
import json, os, sys
from weft.config.schema import DataSection
from weft.data import prepare, shared_preparation
shared_preparation.BEAT_SECONDS, shared_preparation.EXPIRY_SECONDS = 0.5, float(sys.argv[3])
shared_preparation.POLL_SECONDS, shared_preparation.UNIT_BYTES = 0.3, int(sys.argv[2])
section = DataSection(**json.loads(sys.argv[1]))
cache = prepare.cache_dir(section)
print(prepare.prepare_store(section, cache, shard_bytes=int(sys.argv[2])).url)
"""


@pytest.fixture(scope="module")
def server() -> Iterator[s3.Proxy]:
    """A server behind a proxy, which all tests share, because clients are cached."""
    with s3.server() as number:
        proxy = s3.Proxy(number)
        yield proxy
        proxy.close()


@pytest.fixture
def proxy(server: s3.Proxy, monkeypatch: pytest.MonkeyPatch) -> Iterator[s3.Proxy]:
    """The proxy of a server with an empty bucket."""
    proxy = server
    proxy.bytes_by_path.clear()
    variables = aws.variables(proxy.port)
    variables |= {"AWS_ACCESS_KEY_ID": s3.KEY, "AWS_SECRET_ACCESS_KEY": s3.SECRET}
    del variables["AWS_MAX_ATTEMPTS"]
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    fsspec.filesystem("s3").clear_instance_cache()
    bucket = boto3.resource("s3").Bucket(BUCKET)
    bucket.create()
    yield proxy
    proxy.spoil = lambda method, path, number: None
    bucket.objects.all().delete()
    bucket.delete()


def write_source(directory: Path, num_files: int, num_rows: int) -> dict[str, bytes]:
    """Write files of random documents below a directory; return them by name."""
    rng, files = random.Random(0), {}
    words = [f"{rng.randrange(1 << 30):x}" for _ in range(3000)]
    for number in range(num_files):
        rows = [" ".join(rng.choices(words, k=rng.randint(1, 120))) for _ in range(num_rows)]
        content = "".join(json.dumps({"text": row}) + "\n" for row in rows).encode()
        name = f"{number:03}.jsonl"
        if number == 1:  # one unit of many shards
            content, name = gzip.compress(content * 6, mtime=0), f"{name}.gz"
        files[name] = content
    directory.mkdir()
    for name, content in files.items():
        (directory / name).write_bytes(content)
    return files


def upload(files: dict[str, bytes]) -> str:
    for name, content in files.items():
        boto3.client("s3").put_object(Bucket=BUCKET, Key=f"web/{name}", Body=content)
    return f"s3://{BUCKET}/web"


def start_worker(section: DataSection, home: Path, expiry: float) -> subprocess.Popen[str]:
    home.mkdir(exist_ok=True)
    text = section.model_dump_json(exclude_defaults=True)
    return subprocess.Popen(
        [sys.executable, "-c", WORKER, text, str(SHARD_BYTES), str(expiry)],
        env=os.environ | {"HOME": str(home), "XDG_CACHE_HOME": str(home)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def read_store(url: str) -> dict[str, bytes]:
    fs = fsspec.filesystem("s3", use_listings_cache=False)
    return {path.rpartition("/")[2]: fs.cat(path) for path in fs.find(url)}


def expected_store(section: DataSection, cache: Path) -> dict[str, bytes]:
    """Return the files that one machine prepares."""
    store = prepare_store(section, cache, shard_bytes=SHARD_BYTES)
    return {file.name: file.read_bytes() for file in store.path.iterdir() if file.name != "lock"}


def is_source(path: str) -> bool:
    return path.startswith(f"/{BUCKET}/web/")


def test_four_hosts_read_and_tokenize_each_byte_once(proxy: s3.Proxy, tmp_path: Path) -> None:
    files = write_source(tmp_path / "web", num_files=40, num_rows=100)  # one unit each
    section = DataSection(path=upload(files), vocab_size=600, cache_dir=f"s3://{BUCKET}/cache")
    puts: Counter[str] = Counter()

    def count(method: str, path: str, number: int) -> None:
        if method == "PUT":
            puts[path.partition("?")[0]] += 1

    proxy.spoil = count
    workers = [start_worker(section, tmp_path / f"host{n}", 60.0) for n in range(4)]
    outputs = [worker.communicate(timeout=600)[0] for worker in workers]
    assert [worker.returncode for worker in workers] == [0] * 4, outputs
    # Scanned once, sampled for the tokenizer once (all of it: it is small), tokenized once.
    size = sum(map(len, files.values()))
    read = sum(count for path, count in proxy.bytes_by_path.items() if is_source(path))
    assert 2 * size <= read <= 3.05 * size
    [url] = set(outputs)
    stored = read_store(url.strip())
    shards = [name for name in stored if name.endswith(".bin")]
    assert len(shards) > 40
    shards = [f"/{url.strip().removeprefix('s3://')}/{name}" for name in shards]
    assert {name: puts[name] for name in shards} == dict.fromkeys(shards, 1)
    assert stored == expected_store(section, tmp_path / "cache")
    owners = [name for name in puts if "/tokens/worker-" in name]
    assert len(owners) >= 4


def test_kills_and_failed_requests_lose_and_repeat_nothing(proxy: s3.Proxy, tmp_path: Path) -> None:
    files = write_source(tmp_path / "web", num_files=60, num_rows=300)
    section = DataSection(path=upload(files), vocab_size=600, cache_dir=f"s3://{BUCKET}/cache")
    expected = expected_store(section, tmp_path / "cache")
    faults = s3.RandomFaults(0.1, 0.02)
    proxy.spoil = faults
    rng, num_kills = random.Random(1), 0
    workers: list[Any] = [start_worker(section, tmp_path / f"host{n}", EXPIRY) for n in range(4)]
    outputs: list[str] = []
    deadline = time.monotonic() + 1200
    while any(workers) and time.monotonic() < deadline:
        time.sleep(rng.uniform(0.2, 1.2))
        for index, worker in enumerate(workers):
            if worker is not None and worker.poll() is not None:
                outputs.append(worker.communicate()[0])
                assert worker.returncode == 0, outputs[-1]
                workers[index] = None
        running = [index for index, worker in enumerate(workers) if worker is not None]
        if running and num_kills < NUM_KILLS:
            index = rng.choice(running)
            workers[index].send_signal(signal.SIGKILL)
            workers[index].communicate()
            workers[index] = start_worker(section, tmp_path / f"host{index}", EXPIRY)
            num_kills += 1
    print(f"{num_kills} kills, {faults.refused} x 503, {faults.cut} cut connections")
    assert not any(workers)
    [url] = set(outputs)
    assert read_store(url.strip()) == expected
