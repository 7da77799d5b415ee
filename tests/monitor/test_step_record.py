"""Formulas with hand-computed values, and sinks read back by other programs."""

from __future__ import annotations

import io
import json
import threading
from pathlib import Path

import pytest
from rich.console import Console

from tests.small import small_job
from weft.config.errors import WeftError
from weft.config.schema import flatten
from weft.models.decoder_costs import flops_per_token
from weft.models.families.llama import PRESETS
from weft.monitor import trackers as sinks
from weft.monitor.event_log import note_event
from weft.monitor.step_record import (
    StepRecord,
    device_hours,
    mfu,
    rank_stats,
    tflops_per_device,
    to_scalars,
)
from weft.monitor.step_timer import StepTimes
from weft.monitor.terminal import Terminal, format_duration, quiet_console
from weft.monitor.tracker_services import TensorBoard
from weft.monitor.trackers import SINKS, BackgroundTracker, Config, Jsonl, Sink, open_sinks
from weft.planning.plan import Machine
from weft.planning.resolve import resolve
from weft.records.run_reader import read_event_log


def record(step: int, **changes: object) -> StepRecord:
    values = {
        "step": step,
        "loss": 10.0 / step,
        "grad_norm": 1.0,
        "lr": 1e-3,
        "tokens": step * 1000,
        "tokens_per_step": 1000,
        "times": StepTimes(0.5, 0.1, 0.0, 0.0),
        "devices": 2,
        "flops_per_token": 3e9,
        "causal_flops_per_token": 2e9,
        "peak_flops": 6e12,
        "memory_peak_gib": 1.5,
        "time_breakdown": {"productive": 3.0, "lost": 1.0},
    }
    return StepRecord.create(**(values | changes))  # type: ignore[arg-type]


def test_throughput_formulas_equal_hand_computed_values() -> None:
    # 1000 tokens x 3 GFLOP in 0.5 s on 2 devices: 3 TFLOP/s each.
    assert tflops_per_device(1000, 0.5, 2, 3e9) == pytest.approx(3.0)
    assert mfu(3.0, 6e12) == pytest.approx(0.5)
    assert mfu(3.0, None) is None
    assert device_hours(8, 1e9 / 3600) == pytest.approx(8)


def test_mfu_equals_the_published_one() -> None:
    """TorchTitan's paper, table 1: 8B on 8 H100, 5,762 tokens/s per GPU, 33 % MFU.

    6 x (8.03e9 - embedding) + 12 x 32 x 4096 x 8192 = 57.9 GFLOP per token.
    """
    flops = flops_per_token(PRESETS["8b"], 8192)
    assert flops == pytest.approx(
        6 * (8_030_261_248 - 525_336_576) + 12 * 32 * 4096 * 8192, rel=1e-4
    )
    achieved = mfu(tflops_per_device(5762, 1.0, 1, flops), 989e12)
    assert achieved == pytest.approx(0.338, abs=0.002)


def test_causal_discount_is_half_of_attention() -> None:
    """For 8B at 8,192 tokens, attention is 12.9 of 57.9 GFLOP per token."""
    config = PRESETS["8b"]
    attention = 12 * 32 * 4096 * 8192
    full, causal = (flops_per_token(config, keys) for keys in (8192, 4096))
    assert full - causal == attention / 2


def test_rank_stats_are_minimum_median_maximum() -> None:
    assert rank_stats([[1.0, 2.0, 0, 3.0]]) is None
    result = rank_stats([[0.1, 2.0, 0, 3.0], [0.3, 1.0, 0, 3.5], [0.2, 1.5, 1, 3.0]])
    assert result is not None
    assert result["data_seconds"] == {"min": 0.1, "median": 0.2, "max": 0.3, "rank": 1}
    assert result["compute_seconds"] == {"min": 1.0, "median": 1.5, "max": 2.0, "rank": 0}
    assert result["memory_peak_gib"] == {"min": 3.0, "median": 3.0, "max": 3.5, "rank": 1}


def test_scalars_have_the_names_of_trackers() -> None:
    result = to_scalars(
        record(2, layer_grad_norms={"layers.0": 0.5, "head": float("nan")}, grad_norm=float("inf"))
    )
    assert result["train/loss"] == 5.0
    assert result["grad_norm/layers.0"] == 0.5
    assert result["time/goodput"] == 0.75
    assert to_scalars(record(2, moe_max_load=1.5))["train/moe_max_load"] == 1.5
    assert "grad_norm/head" not in result
    assert "train/grad_norm" not in result
    assert all(isinstance(value, float | int) for value in result.values())


def test_record_derives_its_rates() -> None:
    values = record(4).to_dict()
    assert values["tokens_per_second"] == 2000
    assert values["tokens_per_second_per_device"] == 1000
    assert values["mfu"] == pytest.approx(0.5)
    assert values["mfu_causal"] == pytest.approx(1 / 3)
    assert values["goodput"] == 0.75
    assert (values["step_seconds"], values["data_seconds"]) == (0.5, 0.1)
    assert "eval_loss" not in values
    assert record(4, eval_loss=2.0).to_dict()["eval_loss"] == 2.0


def test_record_nonfinite_values_are_null_at_any_depth() -> None:
    bad = float("inf")
    values = record(
        4, loss=float("nan"), layer_grad_norms={"head": bad}, loss_by_source={"a": bad, "b": 1.0}
    )
    report = json.loads(json.dumps(values.to_dict(), allow_nan=False))
    assert report["loss"] is report["grad_norm/head"] is report["loss/a"] is None
    assert report["loss/b"] == 1.0


def test_jsonl_drops_records_that_a_resumed_run_repeats(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    sink = Jsonl(path, 0)
    for step in (1, 2, 3):
        sink.write(record(step))
    sink.close()
    with path.open("a") as file:
        file.write('{"step": 4, "lo')  # cut short by a crash
    sink = Jsonl(path, 2)
    sink.write(record(3, loss=0.5))
    sink.close()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert lines[-1]["loss"] == 0.5
    assert list(tmp_path.iterdir()) == [path]


def test_tensorboard_reads_the_written_records(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for resumed, steps in ((0, (1, 2, 3)), (2, (3, 4))):
        sink = TensorBoard(tmp_path, {}, resumed)
        for step in steps:
            sink.write(record(step, loss=float(step + 10 * resumed)))
        sink.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    losses = [(event.step, event.value) for event in events.Scalars("train/loss")]
    assert losses == [(1, 1.0), (2, 2.0), (3, 23.0), (4, 24.0)]
    assert set(events.Tags()["scalars"]) == set(to_scalars(record(1)))


class Waits:
    """A tracker that blocks until released, and records steps and threads."""

    def __init__(self, let: bool = False) -> None:
        self.released, self.reached = threading.Event(), threading.Event()
        if let:
            self.released.set()
        self.steps: list[int] = []
        self.threads: set[threading.Thread] = set()
        self.closed = self.failing = False

    def write(self, record: StepRecord) -> None:
        self.reached.set()
        if not self.released.wait(10):
            raise TimeoutError("this test waits for this tracker")
        self.steps.append(record.step)
        self.threads.add(threading.current_thread())

    def close(self) -> None:
        if self.failing:
            raise ConnectionError("nobody is there")
        self.closed = True


def guarded(
    sink: Sink, directory: Path, monkeypatch: pytest.MonkeyPatch, interval: float = 0.01
) -> tuple[BackgroundTracker, io.StringIO]:
    """Return a background tracker with an interval between bursts, and its messages."""
    monkeypatch.setattr(sinks, "BURST_SECONDS", interval)
    out = io.StringIO()
    created = BackgroundTracker(
        "mine", lambda *_: sink, directory, {}, 0, Console(file=out, width=200)
    )
    return created, out


def test_slow_tracker_blocks_neither_the_step_nor_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow, quick = Waits(), Waits(let=True)
    trackers = [guarded(sink, tmp_path, monkeypatch)[0] for sink in (slow, quick)]
    for step in range(1, 6):
        for tracker in trackers:
            tracker.write(record(step))  # returns while the slow tracker blocks
    assert slow.reached.wait(60)
    trackers[1].close()
    assert (slow.steps, quick.steps, quick.closed) == ([], [1, 2, 3, 4, 5], True)
    slow.released.set()
    trackers[0].close()
    assert (slow.steps, slow.closed) == ([1, 2, 3, 4, 5], True)
    assert threading.current_thread() not in slow.threads | quick.threads


def test_tracker_writes_records_in_bursts_and_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink = Waits(let=True)
    tracker, _ = guarded(sink, tmp_path, monkeypatch, interval=600)
    for step in (1, 2, 3):
        tracker.write(record(step))
    assert sink.steps == []
    tracker.close()
    assert (sink.steps, sink.closed, len(sink.threads)) == ([1, 2, 3], True, 1)


def test_tracker_without_a_record_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink = Waits(let=True)
    guarded(sink, tmp_path, monkeypatch)[0].close()
    assert sink.closed


def test_hung_tracker_does_not_block_the_end_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sinks, "CLOSE_SECONDS", 0.2)
    sink = Waits()
    tracker, out = guarded(sink, tmp_path, monkeypatch)
    for step in (1, 2):
        tracker.write(record(step))
    assert sink.reached.wait(60)
    tracker.close()
    assert not sink.closed
    expected = "mine: 2 records are lost: TimeoutError: closing takes longer than 0.2 s"
    assert expected in out.getvalue()
    sink.failing = True
    sink.released.set()  # the tracker writes its current records, then close fails
    (thread,) = [item for item in threading.enumerate() if item.name == "weft-mine"]
    thread.join(60)
    assert (sink.steps, out.getvalue().count("warning")) == ([1], 1)


class Broken:
    """A sink that fails after its first record."""

    def __init__(self, error: BaseException) -> None:
        self.steps: list[int] = []
        self.error = error

    def write(self, record: StepRecord) -> None:
        if self.steps:
            raise self.error
        self.steps.append(record.step)

    def close(self) -> None:
        self.steps.append(-1)


@pytest.mark.parametrize("error", [ConnectionError("nobody is there"), SystemExit("enough")])
def test_failed_sink_does_not_end_the_run(
    error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = Broken(error)
    sink, out = guarded(broken, tmp_path, monkeypatch)
    for step in (1, 2, 3):
        sink.write(record(step))
    sink.close()
    assert broken.steps == [1, -1]
    cause = f"{type(error).__name__}: {error}"
    first, second = out.getvalue().splitlines()
    assert first.startswith(f"warning: mine cannot be written: {cause}. Training continues")
    assert second == f"warning: mine: 2 records are lost: {cause}"


def test_sink_that_cannot_start_ends_only_a_first_start(tmp_path: Path) -> None:
    def make(directory: Path, config: Config, resumed_step: int) -> Sink:
        raise ConnectionError("nobody is there")

    out = io.StringIO()
    with pytest.raises(WeftError, match="mine cannot start: ConnectionError: nobody is there"):
        BackgroundTracker("mine", make, tmp_path, {}, 0, Console(file=out))
    later = BackgroundTracker("mine", make, tmp_path, {}, 7, Console(file=out, width=200))
    later.write(record(8))
    later.close()
    assert "mine: 1 record is lost: ConnectionError: nobody is there" in out.getvalue()


def test_sink_that_cannot_start_leaves_the_terminal_unchanged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The live line hides the cursor until it is closed."""

    def make(directory: Path, config: Config, resumed_step: int) -> Sink:
        raise ConnectionError("nobody is there")

    monkeypatch.setitem(SINKS, "wandb", make)
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=120)
    job = small_job(("monitor.trackers", '["wandb"]'), ("run.dir", str(tmp_path)))
    plan = resolve(job, Machine("cpu", devices=1, world_size=1))
    with pytest.raises(WeftError, match="wandb cannot start"):
        open_sinks(job.monitor, flatten(job), plan, 0, console)
    assert out.getvalue() == ""


def test_event_log_is_appended_to(tmp_path: Path) -> None:
    assert read_event_log(tmp_path) == ([], 0)
    note_event(tmp_path, "start", 0, "starts")
    with (tmp_path / "events.jsonl").open("a") as file:
        file.write('{"time": 1\n[]\n')  # damaged
    note_event(tmp_path, "checkpoint", 10, "saved")
    events, damaged = read_event_log(tmp_path)
    assert damaged == 2
    kinds = [(event["kind"], event["step"], event["text"]) for event in events]
    assert kinds == [("start", 0, "starts"), ("checkpoint", 10, "saved")]


def test_output_without_a_terminal_has_plain_lines() -> None:
    out = io.StringIO()
    sink = Terminal(quiet_console(out), steps=10, resumed_step=0)
    sink.write(record(1))
    sink.write(record(2, peak_flops=None, eval_loss=3.0))
    sink.close()
    first, second, third = out.getvalue().splitlines()
    assert first.startswith("step 1/10  loss 10.0000  2000 tokens/s  MFU 0.500  grad norm 1.000")
    assert first.endswith(" left")
    assert "MFU" not in second
    assert third == "step 2: validation loss 3.0000 nats/token"


def test_terminal_has_a_live_line() -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=120)
    sink = Terminal(console, steps=10, resumed_step=0)
    sink.write(record(5))
    sink.close()
    assert "step 5/10" in out.getvalue()
    assert "loss 2.0000  2000 tokens/s  MFU 0.500" in out.getvalue()


def test_duration_is_hours_minutes_seconds() -> None:
    assert [format_duration(s) for s in (0, 59.6, 61, 3725)] == ["0:00", "1:00", "1:01", "1:02:05"]
