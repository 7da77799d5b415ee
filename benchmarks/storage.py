"""Compare an object store with a local disk, for data and checkpoints.

    python -m benchmarks.storage [--megabytes 100] [--rounds 5]        from the repository's root

The store is Ceph's RADOS Gateway on loopback, started by tests/s3.py, which lists its requirements.
It is a real S3 server: the network is free, but processor, disk and signatures are not.  So the
result is the cost of S3 on this machine, part of which is the cost of Ceph's daemons.  On a
cluster, the store has separate machines and a network.  A round runs each of these once, in
alternating order:

    data         prepare the same JSON lines from a file, and from s3://, with an empty cache
    checkpoint   save and load the same state, with verification, in a directory and in s3://
    one object   write and read the same bytes with the store's client only: the least cost

Ratios are those of pairs in one round.  An additional round runs through a proxy that counts bytes.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import date
from importlib.metadata import version
from pathlib import Path

import torch.distributed as dist

from benchmarks.checkpoint import build_model, drop_page_cache, step
from benchmarks.data import write_lines
from tests import s3
from weft.checkpoint.load import load_checkpoint
from weft.checkpoint.manager import CheckpointManager
from weft.checkpoint.manifest import checkpoint_path
from weft.checkpoint.storage import create_file, open_directory, remove
from weft.data.tokenizer_training import train_tokenizer
from weft.train.setup import Built

BUCKET = "s3://bench"


def prepare(source: str, tokenizer: Path, cache: Path) -> None:
    """Run `weft data prepare` in a separate process."""
    words = [source, "--data.tokenizer", str(tokenizer), "--data.cache_dir", str(cache)]
    command = [sys.executable, "-m", "weft", "data", "prepare", *words]
    completed = subprocess.run(command, capture_output=True, text=True, check=False)
    assert completed.returncode == 0, completed.stderr
    shutil.rmtree(cache)


class Checkpoints:
    """Saves and loads one state repeatedly in one directory."""

    def __init__(self, path: str | Path, built: Built) -> None:
        self.home, self.built, self.step = open_directory(path), built, 0
        self.saver = CheckpointManager(self.home, 1, async_save=False)

    def save(self) -> None:
        self.step += 1
        self.saver.save(self.built.model_parts, self.built.optimizer, {"step": self.step})
        self.saver.wait()

    def load(self) -> None:
        load_checkpoint(
            checkpoint_path(self.home, self.step), self.built.model_parts, self.built.optimizer
        )


@contextmanager
def counting(port: int) -> Iterator[s3.Proxy]:
    """Send the requests of new clients through a proxy that counts bytes."""
    proxy, before = s3.Proxy(port), os.environ["AWS_ENDPOINT_URL"]
    os.environ["AWS_ENDPOINT_URL"] = f"http://127.0.0.1:{proxy.port}"
    type(open_directory(BUCKET).fs).clear_instance_cache()  # type: ignore[attr-defined]
    yield proxy
    os.environ["AWS_ENDPOINT_URL"] = before
    type(open_directory(BUCKET).fs).clear_instance_cache()  # type: ignore[attr-defined]
    proxy.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=100, help="of a checkpoint")
    parser.add_argument("--text", type=int, default=8, help="megabytes of data")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    if missing := s3.missing():
        raise SystemExit(f"needs {', '.join(missing)}: see tests/s3.py")
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="0", RANK="0", WORLD_SIZE="1")
    dist.init_process_group("gloo", init_method="tcp://localhost:0", rank=0, world_size=1)
    built, size = build_model(options.megabytes)
    step(built)  # creates AdamW's moments
    Path("runs").mkdir(exist_ok=True)
    directory = Path(tempfile.mkdtemp(prefix="weft-storage-", dir="runs")).absolute()
    load_before = os.getloadavg()
    try:
        with s3.server() as port:
            os.environ |= {
                "AWS_ACCESS_KEY_ID": s3.KEY,
                "AWS_SECRET_ACCESS_KEY": s3.SECRET,
                "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
                "AWS_DEFAULT_REGION": "us-east-1",
            }
            open_directory(BUCKET).fs.mkdir("bench")  # type: ignore[attr-defined]
            measure(options, built, size, directory, port)
    finally:
        shutil.rmtree(directory)
        dist.destroy_process_group()
    loads = [f"{load_checkpoint:.1f}" for load_checkpoint in (load_before[0], os.getloadavg()[0])]
    print(f"load of the machine before and after: {', '.join(loads)} on {os.cpu_count()} cores")


def measure(
    options: argparse.Namespace, built: Built, size: int, directory: Path, port: int
) -> None:
    lines, tokenizer = directory / "lines.jsonl", directory / "tokenizer.json"
    write_lines(lines, options.text << 20)
    texts = [json.loads(line)["text"] for line in lines.read_text().splitlines()[:500]]
    train_tokenizer(texts, 4096).save(str(tokenizer))
    remote = open_directory(f"{BUCKET}/lines.jsonl")
    remote.write_bytes(lines.read_bytes())
    local, store = Checkpoints(directory / "home", built), Checkpoints(f"{BUCKET}/home", built)
    one = open_directory(f"{BUCKET}/one")
    content = os.urandom(size)

    def put() -> None:
        with create_file(one, size) as file:
            file.write(content)

    cache = directory / "cache"
    pairs: dict[str, list[tuple[str, Callable[[], object]]]] = {
        "prepare": [
            ("disk", lambda: prepare(str(lines), tokenizer, cache)),
            ("s3", lambda: prepare(str(remote), tokenizer, cache)),
        ],
        "save": [("disk", local.save), ("s3", store.save), ("one object", put)],
        "load": [("disk", local.load), ("s3", store.load), ("one object", one.read_bytes)],
    }
    seconds: dict[tuple[str, str], list[float]] = {}
    for round_ in range(options.rounds + 1):  # the first round warms up
        for what, methods in pairs.items():
            for name, run in methods[:: 1 if round_ % 2 else -1]:
                os.sync()
                drop_page_cache(directory)
                start_time = time.perf_counter()
                run()
                if round_:
                    seconds.setdefault((what, name), []).append(time.perf_counter() - start_time)
    fetched = {}
    with counting(port) as proxy:
        counted = Checkpoints(f"{BUCKET}/counted", built)
        for what, run in (
            ("prepare", pairs["prepare"][1][1]),
            ("save", counted.save),
            ("load", counted.load),
        ):
            before = (proxy.requests, proxy.all_bytes)
            run()
            fetched[what] = (proxy.requests - before[0], proxy.all_bytes - before[1])
    remove(open_directory(BUCKET))
    print_report(seconds, fetched, size, lines.stat().st_size, options.rounds)


def print_report(
    seconds: dict[tuple[str, str], list[float]],
    fetched: dict[str, tuple[int, int]],
    size: int,
    text: int,
    rounds: int,
) -> None:
    names = ("torch", "s3fs", "botocore")
    versions = "  ".join(f"{name} {version(name)}" for name in names)
    ceph = subprocess.run(["ceph", "--version"], capture_output=True, text=True, check=False)
    print(f"{date.today()}  {versions}  Python {platform.python_version()}")
    print(" ".join(ceph.stdout.split()[:3]))
    print(f"{text / 1e6:.1f} MB of lines, {size / 1e6:.0f} MB a checkpoint, {rounds} rounds")
    for (what, name), value in seconds.items():
        rate = (text if what == "prepare" else size) / 1e6 / statistics.median(value)
        ratios = sorted(a / b for a, b in zip(value, seconds[what, "disk"], strict=True))
        span = f"{statistics.median(ratios):.2f} ({ratios[0]:.2f}-{ratios[-1]:.2f}) of the disk's"
        print(
            f"{what:<8} {name:<11} {statistics.median(value):7.2f} s  "
            f"{rate:7.1f} MB/s   {span} time"
        )
    for what, (requests, fetched_bytes) in fetched.items():
        total_bytes = text if what == "prepare" else size
        print(
            f"{what:<8} {requests} requests, {fetched_bytes / 1e6:.1f} MB fetched: "
            f"{fetched_bytes / total_bytes:.2f} of it"
        )
    print(json.dumps({f"{what} {name}": value for (what, name), value in seconds.items()}))


if __name__ == "__main__":
    main()
