"""Unwritable logs are reported once, stay in order, and do not stop training."""

from __future__ import annotations

import io
import json
import os
import resource
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from tests.harness import run_ranks
from tests.monitor.test_step_record import record
from tests.small import Overrides, before_each_step, plan_here, small_job, this_rank
from weft.checkpoint.manifest import list_checkpoints
from weft.config.files import append_bytes
from weft.data.dataset import open_dataset
from weft.monitor.event_log import EventLog
from weft.monitor.log_buffer import LogBuffer
from weft.monitor.spans import SpanWriter, span, spans_path
from weft.monitor.tracker_services import TensorBoard
from weft.monitor.trackers import Jsonl
from weft.records.jsonl_reader import read_records
from weft.records.run_reader import read_event_log
from weft.records.span_reader import read_spans
from weft.training.loop import train

MIB = 1 << 20


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Mount a file system of 1 MiB that a test can fill."""
    path = tmp_path / "disk"
    path.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(path)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("only root may mount a file system")
    yield path
    subprocess.run(["umount", "-l", str(path)], check=True)


def fill(disk: Path) -> Path:
    """Fill the disk; return the file that takes the space."""
    path = disk / "filler"
    with path.open("wb", buffering=0) as file:
        for size in (65536, 4096, 1):
            try:
                while True:
                    file.write(b"x" * size)
            except OSError:
                continue
    return path


def test_append_bytes_on_a_full_disk_leaves_no_partial_record(small_disk: Path) -> None:
    path = small_disk / "events.jsonl"
    append_bytes(path, b"one\n")
    filler = fill(small_disk)
    with pytest.raises(OSError, match="No space left"):
        append_bytes(path, b"two " * 5000 + b"\n")  # a part of it fits into the last page
    assert path.read_bytes() == b"one\n"
    filler.unlink()
    append_bytes(path, b"three\n")
    assert path.read_bytes() == b"one\nthree\n"


def test_append_bytes_after_a_torn_line_begins_a_new_one(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"to")
    append_bytes(tmp_path / "a", b"whole\n")
    assert (tmp_path / "a").read_bytes() == b"to\nwhole\n"


def test_log_on_a_full_disk_preserves_the_order_of_records(small_disk: Path) -> None:
    messages: list[str] = []
    path = small_disk / "metrics.jsonl"
    sink = Jsonl(path, 0, messages.append)
    sink.write(record(1))
    filler = fill(small_disk)
    for step in range(2, 40):
        sink.write(record(step))
    filler.unlink()
    sink.write(record(40))
    sink.close()
    assert [line["step"] for line in read_records(path)] == list(range(1, 41))
    first, second = messages
    assert first.startswith(f"warning: {path} cannot be written: no space left on device. Training")
    assert second == f"{path} can be written again, and has all waiting records"


def test_log_that_stays_unwritable_counts_lost_records() -> None:
    messages: list[str] = []
    buffer = LogBuffer.for_file(Path("/dev/full"), messages.append)
    for _ in range(7):
        buffer.write(b"{}\n")
    buffer.close()
    assert len(messages) == 2
    assert messages[1] == "warning: /dev/full: 7 records are lost: no space left on device"
    buffer.write(b"{}\n")  # after close, a record is lost at once
    assert messages[2] == "warning: /dev/full: 1 record is lost: no space left on device"


def test_log_buffer_full_drops_the_oldest_record() -> None:
    messages: list[str] = []
    written: list[int] = []
    broken = True

    def write(number: int) -> None:
        if broken:
            raise OSError(5, os.strerror(5))
        written.append(number)

    buffer = LogBuffer[int]("it", write, messages.append, limit=10)
    for number in range(25):
        buffer.write(number)
    broken = False
    buffer.close()
    assert written == list(range(15, 25))
    assert messages[0].startswith("warning: it cannot be written: input/output error. Training")
    assert messages[-1] == "warning: it: 15 records are lost: input/output error"


def test_file_over_its_size_limit_is_reported_by_name(tmp_path: Path) -> None:
    """The file size limit of one rank's process acts like a quota."""
    (messages, steps) = run_ranks(_limited, 1, str(tmp_path))[0]
    assert steps == list(range(1, 31))
    assert messages[0].startswith(
        f"warning: {tmp_path}/metrics.jsonl cannot be written: file too lar"
    )


def _limited(directory: str) -> tuple[list[str], list[int]]:
    messages: list[str] = []
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    sink = Jsonl(Path(directory) / "metrics.jsonl", 0, messages.append)
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, hard))
    for step in range(1, 31):
        sink.write(record(step))
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    sink.close()
    return messages, [line["step"] for line in read_records(Path(directory) / "metrics.jsonl")]


def test_events_spans_and_tensorboard_wait_for_space(
    small_disk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    messages: list[str] = []
    events, board = EventLog(small_disk, messages.append), TensorBoard(small_disk, {}, 0)
    remaining = SpanWriter(spans_path(small_disk, 0), 0)
    filler = fill(small_disk)
    for step in (1, 2, 3):
        events.add("start", step, "x" * 3000)
        with span(f"named {step}"):
            pass
        remaining.flush()
    for step in (1, 2):
        with pytest.raises(OSError, match="No space left"):
            board.write(record(step))
    filler.unlink()
    for step in (1, 2, 3):
        board.write(record(step))
    events.close()
    remaining.close()
    assert [event["step"] for event in read_event_log(small_disk)[0]] == [1, 2, 3]
    names = [event["name"] for event in read_spans(small_disk, 0)]
    assert [name for name in names if name.startswith("named")] == ["named 1", "named 2", "named 3"]
    json.loads(spans_path(small_disk, 0).read_text())  # a complete file
    result = EventAccumulator(str(small_disk / "tensorboard"))
    result.Reload()
    assert [event.step for event in result.Scalars("train/loss")] == [1, 2, 3]
    assert len(messages) == 2
    assert capsys.readouterr().out.count("no space left on device") == 1


# --------------------------------------------------------------------------- runs

RUN: Overrides = [
    ("train.steps", "8"),
    ("monitor.log_interval", "1"),
    ("checkpoint.interval", "4"),
    ("debug.layer_stats_steps", "2,6"),
    ("monitor.report", "true"),
    ("monitor.trackers", "tensorboard"),
]


def _train(overrides: Overrides, store: str) -> str:
    out = io.StringIO()
    job = small_job(*overrides)
    console = Console(file=out, width=10_000)
    assert train(plan_here(job), open_dataset(store), this_rank(), console)
    return out.getvalue()


def test_run_on_a_full_disk_completes(small_disk: Path, store_path: Path, tmp_path: Path) -> None:
    directory = small_disk / "run"
    directory.mkdir()
    filler = fill(small_disk)
    job = [*RUN, ("run.dir", str(directory)), ("checkpoint.dir", str(tmp_path / "elsewhere"))]
    (out,) = run_ranks(_train, 1, job, str(store_path))
    assert len(list_checkpoints(tmp_path / "elsewhere")) == 2
    for name in ("plan.json", "metrics.jsonl", "events.jsonl", "statistics.jsonl"):
        assert out.count(f"{directory / name} cannot be written: no space left on device") == 1, (
            name
        )
    assert "metrics.jsonl: 8 records are lost: no space left on device" in out
    assert "tensorboard: 8 records are lost: no space left on device" in out
    filler.unlink()


@pytest.mark.parametrize("trouble", ["deleted", "read-only"])
def test_run_with_a_lost_directory_completes(
    trouble: str, small_disk: Path, store_path: Path, tmp_path: Path
) -> None:
    directory = small_disk / "run"
    directory.mkdir()
    job = [*RUN, ("run.dir", str(directory)), ("checkpoint.dir", str(tmp_path / "elsewhere"))]
    job += [("monitor.spans", "false")]  # the kernel refuses to remount while a file is open
    (out,) = run_ranks(_train_without, 1, job, str(store_path), trouble)
    assert len(list_checkpoints(tmp_path / "elsewhere")) == 2
    reason = {"deleted": "no such file or directory", "read-only": "read-only file system"}[trouble]
    assert out.count(f"{directory / 'metrics.jsonl'} cannot be written: {reason}") == 1
    if trouble == "deleted":  # TensorBoard creates the directory again
        assert [line["step"] for line in read_records(directory / "metrics.jsonl")] == [
            *range(3, 9)
        ]
    else:
        assert f"{directory / 'metrics.jsonl'}: 6 records are lost: {reason}" in out


def _train_without(overrides: Overrides, store: str, trouble: str) -> str:
    directory = Path(small_job(*overrides).run.dir)

    def fail_at(step: int) -> None:
        if step == 3 and trouble == "deleted":
            shutil.rmtree(directory)
        elif step == 3:
            subprocess.run(["mount", "-o", "remount,ro", str(directory.parent)], check=True)

    before_each_step(fail_at)
    return _train(overrides, store)


def test_resume_over_damaged_records_moves_and_reports_them(
    store_path: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    job = [*RUN, ("run.dir", str(run_dir)), ("monitor.trackers", ""), ("monitor.report", "false")]
    run_ranks(_train, 1, job, str(store_path))
    shutil.rmtree(run_dir / "checkpoints" / "step-00000008")
    path = run_dir / "metrics.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    damage = [b"[" * 100_000 + b"\n", lines[6][:50] + b"\n"]
    path.write_bytes(b"".join([lines[0][:40] + b"\n", *lines[1:6], *damage, *lines[6:]]))
    (out,) = run_ranks(_train, 1, job, str(store_path))
    assert out.count(f"{path}: 2 damaged lines were moved to metrics.damaged.jsonl") == 1
    assert (run_dir / "metrics.damaged.jsonl").read_bytes() == b"".join(damage)
    assert [record["step"] for record in read_records(path)] == [2, 3, 4, 5, 6, 7, 8]
    assert path.read_bytes().startswith(lines[0][:40] + b"\n" + lines[1])
