"""Workers of ``weft data prepare --on ray`` that are killed: bytes equal to one machine's."""

from __future__ import annotations

import importlib.util
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import boto3
import fsspec
import pytest

from tests import aws
from weft.cli.main import main
from weft.data.tokenizer_training import train_tokenizer

HAS_RAY = importlib.util.find_spec("ray") is not None
BUCKET = "tokens"
# Short times and small units in every process, also in those that Ray starts.
SITE = """\
from weft.data import shared_preparation
shared_preparation.BEAT_SECONDS, shared_preparation.EXPIRY_SECONDS = 1.0, 15.0
shared_preparation.POLL_SECONDS, shared_preparation.UNIT_BYTES = 0.5, 1 << 19
"""


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--on", "ray"], 'data.cache_dir="auto" is not in an object store: one worker would'),
        (["--workers", "2"], "--workers=2 needs a cluster. Add --on"),
    ],
)
def test_prepare_on_ray_without_a_bucket_or_cluster_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    (tmp_path / "x.txt").write_text("some text")
    assert main(["data", "prepare", str(tmp_path / "x.txt"), *options]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.skipif(HAS_RAY, reason="ray is installed")
def test_prepare_on_ray_without_ray_names_the_extra(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "x.txt").write_text("some text")
    keys = ["--on", "ray", "--data.cache_dir", "s3://bucket/cache"]
    assert main(["data", "prepare", str(tmp_path / "x.txt"), *keys]) != 0
    assert "--on ray needs ray: pip install 'weft[ray]'" in capsys.readouterr().err


def find_workers(home: Path) -> dict[int, float]:
    """Return the processor seconds of the workers of this test by process, with children."""
    workers = {}
    for directory in Path("/proc").iterdir():
        try:
            if not (directory / "cmdline").read_bytes().startswith(b"ray::run_worker"):
                continue
            if str(home).encode() in (directory / "environ").read_bytes():
                fields = (directory / "stat").read_text().rpartition(")")[2].split()
                ticks = sum(map(int, fields[11:15]))
                workers[int(directory.name)] = ticks / os.sysconf("SC_CLK_TCK")
        except OSError:  # it has ended
            continue
    return workers


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory, rng = tmp_path_factory.mktemp("source"), random.Random(0)
    words = [f"{rng.randrange(1 << 30):x}" for _ in range(5000)]
    for number in range(24):
        rows = [" ".join(rng.choices(words, k=rng.randint(50, 800))) for _ in range(250)]
        lines = "".join(json.dumps({"text": row}) + "\n" for row in rows)
        (directory / f"{number:02}.jsonl").write_text(lines)
    tokenizer = directory.parent / "tokenizer" / "tokenizer.json"
    tokenizer.parent.mkdir(exist_ok=True)
    train_tokenizer(rows, 4096).save(str(tokenizer))
    return directory


@pytest.fixture(scope="module")
def expected(source: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    cache = tmp_path_factory.mktemp("cache")
    tokenizer = source.parent / "tokenizer" / "tokenizer.json"
    keys = ["--data.cache_dir", str(cache), "--data.tokenizer", str(tokenizer)]
    assert main(["data", "prepare", str(source), *keys]) == 0
    [store] = (cache / "stores").iterdir()
    return {file.name: file.read_bytes() for file in store.iterdir() if file.name != "lock"}


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with aws.moto_server() as port:
        for name, value in aws.variables(port).items():
            monkeypatch.setenv(name, value)
        boto3.client("s3").create_bucket(Bucket=BUCKET)
        fsspec.filesystem("s3").clear_instance_cache()
        yield


@pytest.mark.slow
@pytest.mark.system
@pytest.mark.timeout(900)
@pytest.mark.skipif(not HAS_RAY, reason="needs ray (pip install 'weft[ray]')")
@pytest.mark.skipif(bool(aws.missing()), reason=f"needs {', '.join(aws.missing())}")
@pytest.mark.parametrize("num_workers", [1, 2, 4])
@pytest.mark.parametrize("num_kills", [0, 6])
def test_prepare_on_ray_gives_the_bytes_of_one_machine(
    bucket: None,
    source: Path,
    expected: dict[str, bytes],
    tmp_path: Path,
    num_workers: int,
    num_kills: int,
) -> None:
    (tmp_path / "sitecustomize.py").write_text(SITE)
    variables = {"HOME": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path)}
    variables["PYTHONPATH"] = os.pathsep.join([str(tmp_path), os.environ["PYTHONPATH"]])
    variables["RAY_TMPDIR"] = "/tmp"  # short: sockets lie in it
    tokenizer = source.parent / "tokenizer" / "tokenizer.json"
    keys = ["--data.cache_dir", f"s3://{BUCKET}/cache", "--data.tokenizer", str(tokenizer)]
    command = [sys.executable, "-m", "weft", "data", "prepare", str(source), *keys, "--on", "ray"]
    with (tmp_path / "output").open("w") as output:
        job = subprocess.Popen(
            [*command, "--workers", str(num_workers)],
            env=os.environ | variables,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    rng, seconds, killed, start = random.Random(num_workers), {}, 0, time.monotonic()
    next_kill = float("inf")
    while job.poll() is None:
        time.sleep(0.2)
        workers = find_workers(tmp_path)
        seconds |= workers
        if workers and next_kill == float("inf"):
            next_kill = time.monotonic() + 3.0
        if workers and killed < num_kills and time.monotonic() > next_kill:
            os.kill(rng.choice(list(workers)), signal.SIGKILL)
            killed += 1
            next_kill = time.monotonic() + rng.uniform(1.0, 6.0)
    assert job.returncode == 0, (tmp_path / "output").read_text()
    print(
        f"{num_workers} workers, {killed} kills: {time.monotonic() - start:.0f} s, "
        f"{sum(seconds.values()):.1f} processor seconds of {len(seconds)} processes"
    )
    fs = fsspec.filesystem("s3", use_listings_cache=False)
    stored = fs.find(f"{BUCKET}/cache/stores")
    assert {path.rpartition("/")[2]: fs.cat(path) for path in stored} == expected
    assert fs.find(f"{BUCKET}/cache/preparing") == []
    assert "train" in (tmp_path / "output").read_text()
