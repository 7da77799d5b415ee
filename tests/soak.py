"""Train under random faults, for hours: see scripts/soak.sh."""

from __future__ import annotations

import io
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from contextlib import redirect_stdout
from pathlib import Path

from tests.conftest import make_store, make_text
from tests.harness import RankError, run_ranks
from tests.monitor.test_chaos import CANONICAL, JOB, STEPS, check, train_until_killed
from weft.checkpoint.manifest import checkpoint_step, list_checkpoints


def disturb(source: random.Random, directory: Path, counts: Counter[str]) -> None:
    """Sometimes damage a file of the newest checkpoint or of a local checkpoint."""
    result = list_checkpoints(directory / "run/checkpoints")
    if len(result) < 2 or source.random() > 0.4:
        return
    remaining = sorted((directory / "node").glob("*/*/*"))
    path = source.choice(
        source.choice([sorted(result[-1].iterdir()), remaining or [result[-1] / "manifest.json"]])
    )
    content = bytearray(path.read_bytes())
    match source.choice(["flip", "cut", "zero", "delete"]):
        case "flip":
            content[source.randrange(len(content))] ^= 1 << source.randrange(8)
        case "cut":
            del content[source.randrange(len(content)) :]
        case "zero":
            at = source.randrange(len(content))
            content[at : at + 4096] = bytes(min(4096, len(content) - at))
        case "delete":
            path.unlink()
    if path.exists():
        path.write_bytes(content)
    counts["spoiled on the node" if path in remaining else "spoiled checkpoints"] += 1


def run_once(source: random.Random, directory: Path, store: Path, counts: Counter[str]) -> None:
    """Train one run to its end, under faults."""
    overrides = [*JOB, CANONICAL, ("run.dir", str(directory / "run"))]
    completed = 0
    for start in range(1000):
        ranks, patience = source.choice([1, 2, 3]), 1.0 + 0.1 * start
        doomed = source.choice([[source.randrange(ranks)], list(range(ranks))])
        site = source.choice(["checkpoint.shards", "checkpoint.written", "checkpoint.rename"])
        error = source.choice(["ENOSPC", "EIO", "EDQUOT"])
        fault = f'{{site = "{site}", kind = "error", error = "{error}", passing = 2}}'
        # Each start adds a fault, because the earlier faults have already fired.
        faults = [fault] * (start + 1)
        extra = [
            ("checkpoint.async_save", source.choice(["true", "false"])),
            ("checkpoint.local_dir", source.choice(["off", str(directory / "node")])),
            ("checkpoint.local_interval", "1"),
            ("resilience.faults", f"[{', '.join(faults)}]"),
        ]
        call = ([*overrides, *extra], str(store), doomed, source.uniform(0, patience))
        try:
            with redirect_stdout(io.StringIO()):  # discard the output of the ranks
                run_ranks(train_until_killed, ranks, *call, str(directory / "seen"), timeout=300)
        except RankError as error_:
            if "SIGKILL" in str(error_):
                counts["kills"] += 1
            elif "could not be written" in str(error_):
                counts["last saves that failed"] += 1
            else:
                raise
        result = list_checkpoints(directory / "run/checkpoints")
        completed = checkpoint_step(result[-1]) if result else 0
        if completed == STEPS:
            return
        disturb(source, directory, counts)
    raise AssertionError("a run does not come to its end")


def main() -> None:
    hours, seed = float(sys.argv[1]), int(sys.argv[2])
    source, start_time, runs = random.Random(seed), time.monotonic(), 0
    counts: Counter[str] = Counter()
    home = Path(tempfile.mkdtemp(prefix="weft-soak-"))
    text, single_dir = home / "text", home / "alone"
    text.mkdir()
    single_dir.mkdir()
    store = make_store(make_text(text), home / "cache")
    call = ([*JOB, CANONICAL, ("run.dir", str(single_dir / "run"))], str(store), [], 0.0)
    run_ranks(train_until_killed, 1, *call, str(single_dir / "seen"))
    print(f"seed {seed}, in {home}", flush=True)
    while time.monotonic() - start_time < hours * 3600:
        directory = home / f"run-{runs}"
        directory.mkdir()
        try:
            run_once(source, directory, store, counts)
            check(directory, single_dir)
        except BaseException:
            print(f"FAILED in {directory}, seed {seed}: {dict(counts)}", flush=True)
            raise
        shutil.rmtree(directory)
        runs += 1
        minutes = (time.monotonic() - start_time) / 60
        print(f"{minutes:6.1f} min: {runs} runs as undisturbed; {dict(counts)}", flush=True)
    shutil.rmtree(home)


if __name__ == "__main__":
    main()
