"""Kill and stop runs at random moments: ``python -m tests.stop_drill [SIGNALS] [SEED]``.

The runs evaluate and continue eval prompts, on 1 or 2 ranks, with asynchronous and synchronous
saves.  Each must end in the weights, optimizer state, records and texts of an undisturbed run.
Histograms show how long after a stop signal the save began, in step times, and how long it took.
"""

from __future__ import annotations

import io
import os
import random
import re
import shutil
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import NamedTuple

from rich.console import Console

from tests.conftest import make_store, make_text
from tests.harness import RankError, run_ranks
from tests.small import (
    SMALL,
    Overrides,
    newest_state,
    plan_here,
    records,
    small_job,
    this_rank,
    untimed_records,
)
from weft.checkpoint.manifest import checkpoint_step, list_checkpoints
from weft.data.dataset import open_dataset
from weft.inference import eval_text
from weft.inference.eval_text import prompt_generator
from weft.inference.generate import Sampling
from weft.monitor.signals import listen
from weft.records.run_reader import read_event_log
from weft.training.loop import train

STEPS = 16
JOB: Overrides = [
    ("model.num_layers", "1"),
    ("train.steps", str(STEPS)),
    ("train.microbatch_size", "1"),
    ("train.eval_interval", "4"),
    ("train.eval_sequences", "16"),
    ("checkpoint.interval", "5"),
    ("monitor.log_interval", "1"),
    ("monitor.eval_prompts", '["def ", "import os"]'),
]
SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
MAX_SECONDS = 9.0  # from the start to a signal
STEP_SECONDS = 0.8  # at least, also of as many microbatches of an evaluation
# A sleep needs no processor, and rank 0 delays all.
FAULT = '[{site = "microbatch", kind = "slow", seconds = %f, times = 1000000}]'
STEP_BINS = (0.125, 0.25, 0.5, 0.75, 1.0)  # of a histogram, in step times
SECOND_BINS = (0.05, 0.1, 0.2, 0.4, 0.8)
TIMES = re.compile(
    r"saved step .*: [0-9.]+ s until all ranks stopped, "
    r"((?P<wait>[0-9.]+) s until the checkpoint before was written, )?(?P<save>[0-9.]+) s to save"
)


class Stop(NamedTuple):
    """Times of a stop with a save, from the signal on.

    There is no save before the first step of a start.
    """

    steps: float  # step times until the save began
    wait: float  # seconds until the checkpoint before was written
    save: float  # seconds of the save


def train_until_signal(
    overrides: Overrides, store: str, number: int, targets: list[int], seconds: float
) -> bool:
    """Train as weft does; the ranks ``targets`` get a signal after ``seconds``."""
    listen()
    job, rank = small_job(*overrides), this_rank()
    run_dir = Path(job.run.dir)

    def send() -> None:
        (run_dir / "signal").write_text(repr(time.time()))
        os.kill(os.getpid(), number)

    if rank.rank in targets:
        timer = threading.Timer(seconds, send)
        timer.daemon = True
        timer.start()
    eval_text.SAMPLING = Sampling(max_tokens=12)
    plan = plan_here(job)
    return train(plan, open_dataset(Path(store)), rank, Console(quiet=True), prompt_generator(plan))


def texts(run_dir: Path) -> set[tuple[int, str]]:
    """Return the continued prompts by step; a step that is repeated continues them again."""
    events, _ = read_event_log(run_dir)
    return {(event["step"], event["text"]) for event in events if event["kind"] == "generation"}


def start(run_dir: Path, store: Path, ranks: int, keys: Overrides, *call: object) -> bool:
    """Start a run or resume it; return True when all steps are done."""
    for record in (run_dir / "logs").glob("*.happened"):
        record.unlink()  # so that each start is as slow
    microbatches = int(dict(SMALL)["train.global_batch_size"]) // ranks
    fault = FAULT % (STEP_SECONDS / microbatches)
    overrides = [*JOB, *keys, ("resilience.faults", fault), ("run.dir", str(run_dir))]
    with redirect_stdout(io.StringIO()):  # discard the output of the ranks
        return all(run_ranks(train_until_signal, ranks, overrides, str(store), *call, timeout=300))


def new_run_dir(path: Path, store: Path) -> Path:
    path.mkdir(parents=True)
    for file in store.glob("*token*"):
        shutil.copy(file, path)
    return path


def drill(signals: int, seed: int, home: Path) -> list[Stop]:
    """Send signals to runs until all are spent and the last run is complete.

    Returns:
        The stops, in order.

    Raises:
        AssertionError: if a run ends in another state than an undisturbed one.
    """
    source, counts, stops, runs = random.Random(seed), Counter[str](), list[Stop](), 0
    (home / "text").mkdir()
    store = make_store(make_text(home / "text"), home / "cache")
    references, step_seconds = {}, {}
    for ranks in (1, 2):
        references[ranks] = new_run_dir(home / f"reference-{ranks}", store)
        assert start(references[ranks], store, ranks, [], 0, [], 0.0)
        times = [record["step_seconds"] for record in records(references[ranks])]
        step_seconds[ranks] = statistics.median(times)
    while sum(counts.values()) < signals:
        ranks, is_async = source.choice((1, 2)), source.choice(("true", "false"))
        run_dir, is_complete = new_run_dir(home / f"run-{runs}", store), False
        while not is_complete:
            number = source.choice(SIGNALS)
            targets = source.choice([[source.randrange(ranks)], list(range(ranks))])
            seconds = source.uniform(0, MAX_SECONDS)
            if sum(counts.values()) >= signals:
                targets = []
            (run_dir / "signal").unlink(missing_ok=True)
            keys = [("checkpoint.async_save", is_async)]
            before = len(read_event_log(run_dir)[0])
            try:
                is_complete = start(run_dir, store, ranks, keys, int(number), targets, seconds)
            except RankError as error:
                if "SIGKILL" not in str(error):
                    raise
            if (run_dir / "signal").exists():
                counts[number.name] += 1
            for event in read_event_log(run_dir)[0][before:]:
                if event["kind"] == "stop" and (times := TIMES.search(event["text"])):
                    wait, save = float(times["wait"] or 0), float(times["save"])
                    began = event["time"] - wait - save - float((run_dir / "signal").read_text())
                    stops.append(Stop(began / step_seconds[ranks], wait, save))
        expected = references[ranks]
        ours, theirs = newest_state(run_dir), newest_state(expected)
        assert ours.keys() == theirs.keys(), run_dir
        assert all(ours[name].equal(tensor) for name, tensor in theirs.items()), run_dir
        assert untimed_records(run_dir) == untimed_records(expected), run_dir
        assert texts(run_dir) == texts(expected), run_dir
        assert checkpoint_step(list_checkpoints(run_dir / "checkpoints")[-1]) == STEPS
        shutil.rmtree(run_dir)
        runs += 1
        print(f"{runs} runs as undisturbed; {dict(counts)}", flush=True)
    print(f"a step takes {step_seconds[1]:.2f} s on 1 rank, {step_seconds[2]:.2f} s on 2")
    return stops


def print_stops(stops: list[Stop]) -> None:
    """Print the times of the stops."""
    print_histogram("step times from signal to save", [s.steps for s in stops], STEP_BINS)
    print_histogram("seconds of the save", [s.save for s in stops], SECOND_BINS)
    waits = [s.wait for s in stops if s.wait]
    print_histogram("seconds until the checkpoint before was written", waits, SECOND_BINS)


def print_histogram(title: str, values: list[float], bins: Sequence[float]) -> None:
    """Print how many values are in each bin."""
    print(f"{title} ({len(values)} stops, at most {max(values, default=0):.2f}):")
    lower = 0.0
    for upper in (*bins, float("inf")):
        count = sum(lower <= max(value, 0) < upper for value in values)
        print(f"{lower:6.3f} to {upper:6.3f}: {count:4d} {'#' * count}")
        lower = upper


def main() -> None:
    signals = int(sys.argv[1]) if len(sys.argv) > 1 else 100
    seed = int(sys.argv[2]) if len(sys.argv) > 2 else 1
    home = Path(tempfile.mkdtemp(prefix="weft-stops-"))
    print(f"{signals} signals, seed {seed}, in {home}", flush=True)
    print_stops(drill(signals, seed, home))
    shutil.rmtree(home)


if __name__ == "__main__":
    from tests import stop_drill  # ranks need functions of a module that they can import

    stop_drill.main()
