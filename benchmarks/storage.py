"""Compare an object store and a simulated Lustre with a local disk, for data and checkpoints.

    python -m benchmarks.storage [--megabytes 100] [--rounds 5]        from the repository's root

It compares what this machine has: without Ceph only Lustre, without FUSE only the store.

*Lustre* is tests/lustre_mount.py: a directory of the disk through FUSE and Python, in which a
directory or rename takes 1 / 150 s and a file 1 / 3000 s, one after another.  These are the rates
of a whole FSx file system with 1,500 metadata IOPS.  The bandwidth is FUSE's, not that of FSx.  The
report has the metadata operations of one save.

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
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import date
from importlib.metadata import version
from pathlib import Path

import torch.distributed as dist

from benchmarks.checkpoint import build_model, drop_page_cache, step
from benchmarks.data import write_lines
from tests import lustre_mount, s3
from weft.checkpoint.load import load_checkpoint
from weft.checkpoint.manager import CheckpointManager
from weft.checkpoint.manifest import checkpoint_path
from weft.config.storage import create_file, open_directory, remove
from weft.data.tokenizer_training import train_tokenizer
from weft.training.setup import Built

BUCKET = "s3://bench"
# Seconds per operation at 1,500 metadata IOPS; an unlink is one IOPS, a directory or rename ten.
FSX_DELAYS = {"mkdir": 1 / 150, "rename": 1 / 150, "rmdir": 1 / 300}
FSX_DELAYS |= {"create": 1 / 3000, "open": 1 / 3000, "link": 1 / 3000, "unlink": 1 / 1500}


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
        manifest = {"step": self.step, "samples": self.step}
        self.saver.save(self.built.model_parts, self.built.optimizer, manifest)
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
    missing = {"s3": ", ".join(s3.missing()), "lustre": lustre_mount.missing()}
    if all(missing.values()):
        raise SystemExit(f"needs {missing}: see tests/s3.py and tests/lustre_mount.py")
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="0", RANK="0", WORLD_SIZE="1")
    dist.init_process_group("gloo", init_method="tcp://localhost:0", rank=0, world_size=1)
    built, size = build_model(options.megabytes)
    step(built)  # creates AdamW's moments
    Path("runs").mkdir(exist_ok=True)
    directory = Path(tempfile.mkdtemp(prefix="weft-storage-", dir="runs")).absolute()
    load_before = os.getloadavg()
    try:
        with ExitStack() as stack:
            port = None if missing["s3"] else start_store(stack)
            mount = None if missing["lustre"] else start_lustre(stack, directory)
            measure(options, built, size, directory, port, mount)
    finally:
        shutil.rmtree(directory)
        dist.destroy_process_group()
    loads = [f"{load_checkpoint:.1f}" for load_checkpoint in (load_before[0], os.getloadavg()[0])]
    print(f"load of the machine before and after: {', '.join(loads)} on {os.cpu_count()} cores")


def start_store(stack: ExitStack) -> int:
    """Start the object store, with a bucket; return its port."""
    port = stack.enter_context(s3.server())
    os.environ |= {
        "AWS_ACCESS_KEY_ID": s3.KEY,
        "AWS_SECRET_ACCESS_KEY": s3.SECRET,
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    open_directory(BUCKET).fs.mkdir("bench")  # type: ignore[attr-defined]
    return port


def start_lustre(stack: ExitStack, directory: Path) -> tuple[Path, Callable[[], Counter[str]]]:
    """Mount the simulated Lustre; return where, and a function that counts its operations."""
    delays = ",".join(f"{name}={seconds:.6f}" for name, seconds in FSX_DELAYS.items())
    counts, mount = directory / "counts", directory / "lustre"
    words = ("--delays", delays, "--counts", str(counts))
    server = stack.enter_context(lustre_mount.mounted(directory / "backing", mount, *words))
    return mount, lambda: lustre_mount.read_counts(server, counts)


def measure(
    options: argparse.Namespace,
    built: Built,
    size: int,
    directory: Path,
    port: int | None,
    lustre: tuple[Path, Callable[[], Counter[str]]] | None,
) -> None:
    lines, tokenizer = directory / "lines.jsonl", directory / "tokenizer.json"
    write_lines(lines, options.text << 20)
    texts = [json.loads(line)["text"] for line in lines.read_text().splitlines()[:500]]
    train_tokenizer(texts, 4096).save(str(tokenizer))
    local, cache = Checkpoints(directory / "home", built), directory / "cache"
    pairs: dict[str, list[tuple[str, Callable[[], object]]]] = {
        "prepare": [("disk", lambda: prepare(str(lines), tokenizer, cache))],
        "save": [("disk", local.save)],
        "load": [("disk", local.load)],
    }
    if lustre is not None:
        there = Checkpoints(lustre[0] / "home", built)
        copy = str(shutil.copy(lines, lustre[0]))
        pairs["prepare"].append(("lustre", lambda: prepare(copy, tokenizer, lustre[0] / "cache")))
        pairs["save"].append(("lustre", there.save))
        pairs["load"].append(("lustre", there.load))
    remote = f"{BUCKET}/lines.jsonl"
    if port is not None:
        store, one = Checkpoints(f"{BUCKET}/home", built), open_directory(f"{BUCKET}/one")
        open_directory(remote).write_bytes(lines.read_bytes())
        content = os.urandom(size)

        def put() -> None:
            with create_file(one, size) as file:
                file.write(content)

        pairs["prepare"].append(("s3", lambda: prepare(remote, tokenizer, cache)))
        pairs["save"] += [("s3", store.save), ("one object", put)]
        pairs["load"] += [("s3", store.load), ("one object", one.read_bytes)]
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
    if port is not None:
        with counting(port) as proxy:
            counted = Checkpoints(f"{BUCKET}/counted", built)
            for what, run in (
                ("prepare", lambda: prepare(remote, tokenizer, cache)),
                ("save", counted.save),
                ("load", counted.load),
            ):
                before = (proxy.requests, proxy.all_bytes)
                run()
                fetched[what] = (proxy.requests - before[0], proxy.all_bytes - before[1])
        remove(open_directory(BUCKET))
    print_report(seconds, fetched, size, lines.stat().st_size, options.rounds)
    if lustre is not None:
        earlier = lustre[1]()
        there.save()
        operations = lustre[1]() - earlier
        print("operations of one save on lustre:", dict(operations.most_common()))


def print_report(
    seconds: dict[tuple[str, str], list[float]],
    fetched: dict[str, tuple[int, int]],
    size: int,
    text: int,
    rounds: int,
) -> None:
    names = ("torch", "s3fs", "botocore")
    versions = "  ".join(f"{name} {version(name)}" for name in names)
    print(f"{date.today()}  {versions}  Python {platform.python_version()}")
    if shutil.which("ceph"):
        ceph = subprocess.run(["ceph", "--version"], capture_output=True, text=True, check=False)
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
