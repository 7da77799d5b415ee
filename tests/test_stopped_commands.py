"""Commands that a signal ends leave nothing half-written, and can be repeated."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import cast

import pytest

from tests.commands import WEFT, Started, run_weft
from tests.conversion.test_hf_convert import trained
from tests.small import Overrides
from weft.config.exit_statuses import INTERRUPTED
from weft.estimate.search import TraceTask, open_tracer

TERM, INT = signal.SIGTERM, signal.SIGINT
# Large enough that a signal comes before an export is complete.
MODEL: Overrides = [
    ("model.num_layers", "4"),
    ("model.dim", "256"),
    ("model.ffn_dim", "1024"),
    ("train.global_batch_size", "1"),
    ("train.steps", "1"),
]


@pytest.fixture(scope="module")
def run(store_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained("", tmp_path_factory.mktemp("run"), store_path, MODEL)


def stop(
    words: list[str], directory: Path, number: signal.Signals, is_ready: Callable[[Started], bool]
) -> None:
    """Send a signal to a command when it is ready; check its status and output."""
    directory.mkdir(exist_ok=True)
    process = Started([*WEFT, *words], directory)
    while not is_ready(process):
        assert process.poll() is None, process.stdout + process.stderr
        time.sleep(0.002)
    os.kill(process.pid, number)
    assert process.wait(timeout=60) == INTERRUPTED
    assert process.stderr.endswith("\ninterrupted\n"), process.stderr
    assert "Traceback" not in process.stderr


@pytest.mark.system
@pytest.mark.parametrize("number", [TERM, pytest.param(INT, marks=pytest.mark.slow)])
def test_export_after_a_signal_leaves_no_files(
    number: signal.Signals, run: Path, tmp_path: Path
) -> None:
    here = tmp_path / "here"
    words = ["export", str(run), "out", "--max-shard", "50KB"]
    stop(words, here, number, lambda process: any(here.glob(".tmp-out-*/*")))
    assert list(here.iterdir()) == []


@pytest.mark.slow
@pytest.mark.system
@pytest.mark.parametrize("number", [TERM, INT])
def test_import_after_a_signal_leaves_no_files_and_can_be_repeated(
    number: signal.Signals, run: Path, tmp_path: Path
) -> None:
    here, out = tmp_path / "here", str(tmp_path / "out")
    exported = run_weft([*WEFT, "export", str(run), out], tmp_path)
    assert exported.returncode == 0, exported.stderr
    words = ["import", out, "imported"]
    stop(words, here, number, lambda process: any(here.glob(".tmp-imported-*/*")))
    assert list(here.iterdir()) == []
    repeated = run_weft([*WEFT, *words], here)
    assert repeated.returncode == 0, repeated.stderr


@pytest.mark.slow
@pytest.mark.system
@pytest.mark.parametrize("number", [TERM, INT])
@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (["generate", "RUN", "def ", "--max-tokens", "1000000"], "def "),
        (["generate", "RUN", "def ", "--max-tokens", "1000000", "--parallel.tp", "2"], "def "),
        (["evaluate", "RUN"], ""),
    ],
    ids=["generate", "generate on two ranks", "evaluate"],
)
def test_generate_and_evaluate_end_at_a_signal(
    words: list[str], shown: str, number: signal.Signals, run: Path, tmp_path: Path
) -> None:
    """Processes that remain fail the test, too: see `tests.commands.Started`."""
    words = [str(run) if word == "RUN" else word for word in words]
    began = time.monotonic()

    def is_ready(process: Started) -> bool:
        if shown:
            return process.stdout.startswith(shown)
        return time.monotonic() > began + 1  # while the model is loaded, or before

    stop(words, tmp_path / "here", number, is_ready)


class SleepsWhenRead:
    """A task that takes a minute in the process that receives it."""

    def __reduce__(self) -> tuple[Callable[..., object], tuple[float]]:
        return time.sleep, (60.0,)


def interrupt_search() -> None:
    with ExitStack() as stack:
        open_tracer(stack)([cast(TraceTask, SleepsWhenRead())] * 4)
        raise KeyboardInterrupt


@pytest.mark.slow
@pytest.mark.system
@pytest.mark.timeout(50)
def test_search_after_an_interrupt_waits_for_no_trace() -> None:
    before = multiprocessing.active_children()
    with pytest.raises(KeyboardInterrupt):
        interrupt_search()
    assert set(multiprocessing.active_children()) <= set(before)


@pytest.mark.system
def test_interrupt_during_the_imports_gives_no_traceback() -> None:
    program = """\
import sys
class Interrupt:
    def find_spec(self, name, *_):
        if name == "weft.cli.main":
            raise KeyboardInterrupt
sys.meta_path.insert(0, Interrupt())
from weft.__main__ import main
sys.exit(main())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (INTERRUPTED, "\ninterrupted\n")
