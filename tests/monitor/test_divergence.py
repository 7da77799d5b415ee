"""Detection of runs that diverge with finite values, and no false alarms."""

from __future__ import annotations

import io
import json
import math
import random
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from rich.console import Console

from tests.harness import run_ranks
from tests.small import Overrides, plan_here, records, small_job, this_rank
from weft.data.dataset import open_dataset
from weft.monitor.anomaly import DivergenceDetector, divergence_of
from weft.records.run_reader import RunReader, read_event_log
from weft.training.loop import train

GUESS = math.log(50_000)  # 10.82

Curve = Callable[[int], tuple[float, float]]  # returns loss and gradient norm of a step


def find_divergence(
    curve: Curve, steps: int, interval: int = 10, guess: float | None = GUESS
) -> list[int]:
    """Return the recorded steps at which a divergence begins."""
    detector = DivergenceDetector(guess)
    noise = random.Random(0)
    begins = []
    for step in [1, *range(interval, steps + 1, interval)]:
        loss, norm = curve(step)
        if norm:  # with zero gradients the loss does not depend on the batch
            loss *= 1 + 0.03 * noise.gauss(0, 1)
        result = detector.check(step, loss, norm, step == steps)
        if result is not None and result.begins:
            begins.append(step)
    return begins


def falling(step: int, start: float = GUESS, end: float = 3.0) -> float:
    return end + (start - end) * math.exp(-step / 300)


HEALTHY: dict[str, tuple[Curve, int]] = {
    "pretraining": (lambda step: (falling(step), 1.0), 3000),
    "long warm-up at guessing": (lambda step: (GUESS, 0.4), 1000),
    "warm-up that overshoots": (lambda step: (GUESS + 0.6 * (step < 200), 2.0), 1000),
    "initial loss far above guessing": (lambda step: (falling(step, 40.0, 9.0), 30.0), 3000),
    "a spike that heals": (lambda step: (falling(step) + 6 * (1500 <= step < 1515), 1.0), 3000),
    "a model that learns little": (lambda step: (GUESS - 0.2, 0.05), 1000),
    "fine-tuning": (lambda step: (falling(step, 1.5, 0.9), 0.8), 1000),
    "fine-tuning by heart": (lambda step: (0.002 + 0.3 * (step % 300 < 50), 1e-5), 1000),
    "converged": (lambda step: (1e-7, 0.0), 1000),
}


@pytest.mark.parametrize("name", HEALTHY)
@pytest.mark.parametrize("interval", [1, 10])
def test_divergence_healthy_run_is_not_reported(name: str, interval: int) -> None:
    curve, steps = HEALTHY[name]
    assert find_divergence(curve, steps, interval) == []


LOST: dict[str, tuple[Curve, int]] = {
    "three times guessing": (lambda step: (falling(step) if step < 500 else 32.0, 5.0), 500),
    "back to the tokens' frequencies": (
        lambda step: (falling(step) if step < 2000 else 7.6, 1.0),
        2000,
    ),
    "from the beginning": (lambda step: (GUESS if step < 5 else 30.0, 9.0), 10),
    "collapsed": (lambda step: (GUESS, 1.0 if step < 100 else 0.0), 100),
    "fine-tuning": (lambda step: (1.0 if step < 200 else 8.0, 3.0), 200),
}


@pytest.mark.parametrize("name", LOST)
@pytest.mark.parametrize("interval", [1, 10])
def test_divergence_is_reported_once(name: str, interval: int) -> None:
    curve, begins = LOST[name]
    (result,) = find_divergence(curve, 4000, interval)
    assert begins <= result <= begins + 40


@pytest.mark.parametrize("curve", [curve for curve, _ in LOST.values()])
def test_divergence_other_objectives_are_not_checked(curve: Curve) -> None:
    assert find_divergence(curve, 4000, guess=None) == []


def test_divergence_short_run_needs_fewer_records() -> None:
    def check(losses: Sequence[float]) -> bool:
        detector = DivergenceDetector(GUESS)
        result = [
            detector.check(10 * n, loss, 1.0, n == len(losses) - 1) for n, loss in enumerate(losses)
        ]
        return result[-1] is not None

    assert check([GUESS, 33.0])
    assert check([GUESS, 9.0, 33.0, 31.0])
    assert not check([GUESS, 9.0, 8.0, 33.0])  # this may be a spike
    assert not check([33.0])


@pytest.mark.parametrize("curve", [curve for curve, _ in LOST.values()])
def test_divergence_restored_detector_continues_as_the_original(curve: Curve) -> None:
    """Restored after each record, through JSON, it gives the same verdicts and lowest loss."""
    original, restored = DivergenceDetector(GUESS), DivergenceDetector(GUESS)
    for step in range(0, 4000, 10):
        values = step, *curve(step), step == 3990
        assert restored.check(*values) == original.check(*values)
        assert restored.best == original.best
        state = json.loads(json.dumps(restored.state()))
        restored = DivergenceDetector(GUESS)
        restored.restore(state)


def test_divergence_damaged_record_is_not_reported() -> None:
    good = {"diverged_since": 5, "loss": 9.0, "grad_norm": 1.0, "best_loss": 3.0}
    assert divergence_of(good, "next_token", 100) is not None
    assert divergence_of(good, "dpo", 100) is None
    assert divergence_of(None, "next_token", 100) is None
    for name in good:
        assert divergence_of(good | {name: "x"}, "next_token", 100) is None


def _train(overrides: Overrides, store: str) -> str:
    out = io.StringIO()
    job = small_job(*overrides)
    console = Console(file=out, width=10_000)
    assert train(plan_here(job), open_dataset(store), this_rank(), console)
    return out.getvalue()


def test_divergence_too_high_learning_rate_is_reported(store_path: Path, tmp_path: Path) -> None:
    job = [
        ("train.steps", "60"),
        ("monitor.log_interval", "5"),
        ("optim.lr", "10"),
        ("optim.max_grad_norm", "1e9"),
        ("run.dir", str(tmp_path)),
    ]
    (out,) = run_ranks(_train, 1, job, str(store_path))
    assert out.count("warning: diverged: the loss ") == 1
    assert "Try a lower --optim.lr" in out
    last = records(tmp_path)[-1]
    assert last["diverged_since"] < 60
    (event,) = [item for item in read_event_log(tmp_path)[0] if item["kind"] == "divergence"]
    assert event["text"].startswith("diverged: ")
    (tmp_path / "job.toml").write_text("[train]\nsteps = 60\n")
    state, reason = RunReader(tmp_path).state(0.0, running=False)
    assert (state, reason) == ("finished", f"diverged since step {last['diverged_since']}")
