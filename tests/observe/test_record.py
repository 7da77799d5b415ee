"""Formulas with numbers worked out by hand, and the sinks read back by others."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from weft.models import llama
from weft.observe.record import Clock, StepRecord, mfu, tflops_per_device, tokens_per_second
from weft.observe.sinks import Jsonl, TensorBoard, Terminal, duration


def record(step: int, **changes: object) -> StepRecord:
    values = {
        "step": step,
        "loss": 10.0 / step,
        "grad_norm": 1.0,
        "lr": 1e-3,
        "tokens": step * 1000,
        "tokens_per_step": 1000,
        "times": (0.5, 0.1),
        "devices": 2,
        "flops_per_token": 3e9,
        "peak_flops": 6e12,
        "memory_peak_gib": 1.5,
        "seconds": {"productive": 1.0},
    }
    return StepRecord.of(**(values | changes))  # type: ignore[arg-type]


def test_formulas() -> None:
    assert tokens_per_second(1000, 0.5) == 2000
    # 1000 tokens x 3 GFLOP in 0.5 s on 2 devices: 3 TFLOP/s each.
    assert tflops_per_device(1000, 0.5, 2, 3e9) == pytest.approx(3.0)
    assert mfu(3.0, 6e12) == pytest.approx(0.5)
    assert mfu(3.0, None) is None


def test_a_published_mfu() -> None:
    """TorchTitan's paper, table 1: 8B on 8 H100 at 8192 tokens, 5,762 tokens/s a GPU: about 33 %.

    6 x 8.03e9 less the embedding + 12 x 32 x 4096 x 8192 = 57.9 GFLOP a token.
    """
    flops = llama.flops_per_token(llama.PRESETS["8b"], 8192)
    assert flops == pytest.approx(
        6 * (8_030_261_248 - 525_336_576) + 12 * 32 * 4096 * 8192, rel=1e-4
    )
    achieved = mfu(tflops_per_device(5762, 1.0, 1, flops), 989e12)
    assert achieved == pytest.approx(0.338, abs=0.002)


def test_a_record_derives_its_rates() -> None:
    values = record(4).to_dict()
    assert values["tokens_per_second"] == 2000
    assert values["tokens_per_second_per_device"] == 1000
    assert values["mfu"] == pytest.approx(0.5)
    assert (values["step_seconds"], values["data_seconds"]) == (0.5, 0.1)
    assert "eval_loss" not in values
    assert record(4, eval_loss=2.0).to_dict()["eval_loss"] == 2.0


def test_the_clock_counts_since_its_restart() -> None:
    clock = Clock()
    clock.count_step()
    clock.restart()
    with clock.waiting_for_data():
        pass
    for _ in range(4):
        clock.count_step()
    seconds, data = clock.read()
    assert 0 <= data <= seconds < 0.1


def test_jsonl_drops_what_a_resumed_run_does_again(tmp_path: Path) -> None:
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


def test_tensorboard_reads_what_is_written(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for resumed, steps in ((0, (1, 2, 3)), (2, (3, 4))):
        sink = TensorBoard(tmp_path, resumed)
        for step in steps:
            sink.write(record(step, loss=float(step + 10 * resumed)))
        sink.close()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    losses = [(event.step, event.value) for event in events.Scalars("train/loss")]
    assert losses == [(1, 1.0), (2, 2.0), (3, 23.0), (4, 24.0)]
    assert set(events.Tags()["scalars"]) == set(TensorBoard.NAMES.values()) - {"eval/loss"}


def test_plain_lines_without_a_terminal() -> None:
    out = io.StringIO()
    sink = Terminal(Console(file=out, width=40), steps=10, resumed_step=0)
    sink.write(record(1))
    sink.write(record(2, peak_flops=None, eval_loss=3.0))
    sink.close()
    first, second, third = out.getvalue().splitlines()
    assert first.startswith("step 1/10  loss 10.0000  2,000 tokens/s  MFU 50.0%  grad norm 1.000")
    assert first.endswith(" left")
    assert "MFU" not in second
    assert third == "step 2: held-out loss 3.0000 nats/token"


def test_a_live_line_on_a_terminal() -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=120)
    sink = Terminal(console, steps=10, resumed_step=0)
    sink.write(record(5))
    sink.close()
    assert "step 5/10" in out.getvalue()
    assert "loss 2.0000  2,000 tokens/s  MFU 50.0%" in out.getvalue()


def test_duration() -> None:
    assert [duration(s) for s in (0, 59.6, 61, 3725)] == ["0:00", "1:00", "1:01", "1:02:05"]
