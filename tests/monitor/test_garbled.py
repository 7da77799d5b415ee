"""Damaged run directories: readers show the readable part, or name the file."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tests.garbled import FILES, Case, cases, garbled
from tests.harness import run_ranks
from tests.small import SMALL, Overrides, plan_here, small_job, this_rank
from weft.cli.main import main
from weft.comparison.trials import measure_trial
from weft.config.errors import WeftError
from weft.config.reader import read_job
from weft.data.dataset import open_dataset
from weft.monitor.device_memory import RunPrediction, read_prediction
from weft.monitor.jsonl import JsonlFile, last_logged_step, read_tail
from weft.monitor.spans import SpanWriter
from weft.monitor.step_timer import StepTimer
from weft.preparation.job_checks import describe_changes
from weft.preparation.run_files import write_run_files
from weft.records.jsonl_reader import read_records
from weft.records.run_reader import RunReader
from weft.reporting.page import REPORT_FILE
from weft.reporting.run_report import report_page
from weft.supervision.rank_exit import log_path, read_error_reports, write_error
from weft.training.loop import train

CASES = cases()
SECONDS = 60  # limit for all readers of a directory; a read of a pipe would never end


@pytest.fixture(scope="module")
def intact_run(tmp_path_factory: pytest.TempPathFactory, store_path: Path) -> Path:
    """Return the directory of a real run."""
    run_dir = tmp_path_factory.mktemp("sound") / "run"
    run_ranks(_train, 1, [*STEPS, ("run.dir", str(run_dir))], str(store_path), str(run_dir))
    assert all((run_dir / name).is_file() for name in FILES)
    return run_dir


STEPS: Overrides = [
    ("train.steps", "12"),
    ("monitor.log_interval", "1"),
    ("checkpoint.interval", "6"),
    ("debug.layer_stats_steps", "2,6"),
]


def _train(overrides: Overrides, store: str, run: str) -> None:
    directory, job = Path(run), small_job(*overrides)
    base, text = read_job("demo", SMALL)[0], open_dataset(store)
    directory.mkdir()
    expected = RunPrediction("a trace", 1.0, {"weights": 0.5}, 0.1, {"computing": 0.1})
    write_run_files(plan_here(job), base, "demo", text, expected)
    train(plan_here(job), text, this_rank(), Console(quiet=True))
    log_path(directory, 0).parent.mkdir(exist_ok=True)
    write_error(directory, 0, RuntimeError("planted"), sys.stderr)  # type: ignore[arg-type]


@contextmanager
def time_limit(seconds: int) -> Iterator[None]:
    def ring(number: int, frame: object) -> None:
        raise AssertionError(f"it took longer than {seconds} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def show_in_report(directory: Path) -> bytes:
    """Return the report without a prediction, which would take seconds."""
    return report_page([RunReader(directory)])


def read_all(directory: Path, intact_run: Path) -> None:
    """Read the run like a resumed run and a comparison."""
    describe_changes(directory, small_job())
    last_logged_step(directory)
    tail = read_tail(directory / "metrics.jsonl", 6)
    timer = StepTimer(tail.last, SpanWriter(None, 0))
    timer.rewind(6, tail.last, tail.current)
    timer.close()
    read_prediction(directory)
    read_error_reports(directory)
    for read in (
        lambda: read_records(directory / "metrics.jsonl"),
        lambda: measure_trial(0, 0, 0, directory),
    ):
        reason = ""
        try:
            read()
        except WeftError as error:
            reason = str(error)
        assert not reason or str(directory) in reason
    for name in ("metrics.jsonl", "statistics.jsonl"):
        JsonlFile(directory / name, 6, lambda text: None).close()


def commands(directory: Path, intact_run: Path) -> Iterator[list[str]]:
    yield ["diff", str(directory), str(intact_run)]
    yield ["diff", str(intact_run), str(directory)]
    yield ["hang", str(directory)]
    yield ["rollback", str(directory), "12"]


def check(case: Case, intact_run: Path, to: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = garbled(intact_run, case, to)
    page = b""
    if os.path.lexists(directory / "job.toml") or os.path.lexists(directory / "metrics.jsonl"):
        page = show_in_report(directory)
    path = directory / case.file
    is_other = os.path.lexists(path) and not path.is_file() and "dangling" not in case.name
    if is_other and case.file.count("/") == 0:
        shown_files = ("job.toml", "plan.json", "environment.json", "metrics.jsonl", "events.jsonl")
        assert (f"{case.file} cannot be read: ".encode() in page) == (case.file in shown_files)
    for command in commands(directory, intact_run):
        capsys.readouterr()
        status = main(command)
        output = capsys.readouterr().err
        differ = status == 1 and not output and command[0] == "diff"
        assert status == 0 or differ or directory.name in output, (command, output)
    read_all(directory, intact_run)


SAMPLE = 12


@pytest.mark.parametrize("case", CASES[:SAMPLE], ids=lambda case: case.name)
def test_readers_of_a_damaged_run_name_the_file_or_show_the_rest(
    case: Case, intact_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with time_limit(SECONDS):
        check(case, intact_run, tmp_path / "garbled", capsys)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES[SAMPLE:], ids=lambda case: case.name)
def test_readers_of_every_damaged_run_name_the_file_or_show_the_rest(
    case: Case, intact_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with time_limit(SECONDS):
        check(case, intact_run, tmp_path / "garbled", capsys)


PLANNED = ("job.toml", "plan.json", "environment.json", "tokenizer.json", "spans/rank-0.json")


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", [case for case in CASES if case.file in PLANNED], ids=lambda case: case.name
)
def test_report_and_generate_of_a_damaged_run_name_the_directory(
    case: Case, intact_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Read it with ``weft report``, prediction included, with generate and evaluate."""
    directory = garbled(intact_run, case, tmp_path / "garbled")
    with time_limit(2 * SECONDS):
        assert main(["report", str(directory)]) == 0
        assert (directory / REPORT_FILE).exists()
        words: list[Any] = [["generate", str(directory), "--prompt", "a", "--max-tokens", "1"]]
        for command in words:
            capsys.readouterr()
            status = main(command)
            assert status == 0 or str(directory) in capsys.readouterr().err


def test_cases_of_damage_are_many_and_unique() -> None:
    assert len(CASES) >= 214
    assert len({case.name for case in CASES}) == len(CASES)
