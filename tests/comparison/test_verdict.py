"""Measurements and verdicts for records whose true values are known."""

from __future__ import annotations

import json
import math
from pathlib import Path
from statistics import geometric_mean
from typing import Any

import pytest

from weft.comparison.comparison_result import (
    ComparisonSettings,
    ComparisonSummary,
    completed_trials,
)
from weft.comparison.trials import (
    TrialResult,
    measure_trial,
    split_warm_up,
    train_loss,
    trial_dir,
    validation_loss,
)
from weft.comparison.variants import Variant
from weft.comparison.verdict import percent
from weft.config.errors import ConfigError
from weft.config.schema import Job, replace

TOKENS = 256  # of a step


def record(step: int, seconds: float, loss: float, **extra: Any) -> dict[str, Any]:
    return {
        "step": step,
        "loss": loss,
        "tokens": step * TOKENS,
        "step_seconds": seconds,
        "mfu": None,
        "memory_peak_gib": 1.0,
        "time_breakdown": {"restarting": 0.0},
    } | extra


def plan(devices: int = 1) -> dict[str, Any]:
    axes = dict.fromkeys(("pp", "dp_replicate", "cp", "tp"), 1) | {"dp_shard": devices}
    return {"world_size": devices, "num_params": 1000, "tokens_per_step": TOKENS, **axes}


def write_run(directory: Path, records: list[dict[str, Any]], devices: int = 1) -> None:
    directory.mkdir(parents=True)
    (directory / "metrics.jsonl").write_text(
        "".join(json.dumps(record) + "\n" for record in records)
    )
    (directory / "plan.json").write_text(json.dumps(plan(devices)))


# --------------------------------------------------------------------------- measuring


def test_step_seconds_are_the_median_without_warm_up(tmp_path: Path) -> None:
    """Two of 20 records are warm-up; an outlier does not change the median."""
    seconds = [9.0, 5.0, *[0.5] * 17, 7.0]
    write_run(tmp_path / "run", [record(i + 1, s, 3.0, mfu=0.4) for i, s in enumerate(seconds)])
    trial = measure_trial(0, 1, 0, tmp_path / "run")
    assert (trial.records, trial.warm_up, trial.step_seconds) == (18, 2, 0.5)
    assert trial.tokens_per_second == 512
    assert trial.device_hours == pytest.approx(1e9 / 512 / 3600)
    assert trial.mfu == 0.4


def test_warm_up_each_start_has_its_own() -> None:
    """The time of restarting marks the first record after a resume."""
    first = [record(i, 1.0, 3.0) for i in range(1, 6)]
    second = [record(i, 1.0, 3.0) | {"time_breakdown": {"restarting": 12.5}} for i in range(6, 11)]
    warm, cold = split_warm_up([*first, *second])
    assert [item["step"] for item in cold] == [1, 6]
    assert [item["step"] for item in warm] == [2, 3, 4, 5, 7, 8, 9, 10]


def test_speed_of_one_step_is_none(tmp_path: Path) -> None:
    write_run(tmp_path / "run", [record(1, 1.0, 3.0)])
    trial = measure_trial(0, 1, 0, tmp_path / "run")
    assert trial.step_seconds is trial.tokens_per_second is trial.device_hours is None


def test_losses_are_compared_at_equal_tokens() -> None:
    records = [record(i, 1.0, 10.0 - i) for i in range(1, 21)]
    records[4] |= {"loss": None}  # a skipped step has no loss
    records[9] |= {"eval_loss": 2.5}
    assert train_loss(records, 20 * TOKENS) == pytest.approx(10 - 19.5)  # the last two
    assert train_loss(records, 10 * TOKENS) == 0.0  # the last one
    assert train_loss(records, 5 * TOKENS) == 6.0  # the one before the skipped
    assert validation_loss(records, 10 * TOKENS) == 2.5
    assert validation_loss(records, 11 * TOKENS) is None


# --------------------------------------------------------------------------- verdicts


def outcome(
    directory: Path,
    speeds: dict[str, list[float]],
    losses: dict[str, list[float]] | None = None,
    devices: dict[str, int] | None = None,
    jobs: dict[str, Job] | None = None,
    **settings: Any,
) -> ComparisonSummary:
    """Compare runs with these step times and losses, by variant and repeat."""
    jobs = jobs or {}
    variants = [
        Variant(label, "demo", jobs.get(label, Job()), plan=object())  # type: ignore[arg-type]
        for label in speeds
    ]
    results = []
    for v, (label, speed) in enumerate(speeds.items()):
        for r, seconds in enumerate(speed, 1):
            loss = (losses or {}).get(label, [3.0] * len(speed))[r - 1]
            steps = [record(i, seconds, loss) for i in range(1, 11)]
            if loss is not None:
                steps[-1] |= {"eval_loss": loss}
            run = trial_dir(directory, v, label, r)
            write_run(run, steps, (devices or {}).get(label, 1))
            results.append(TrialResult(v, r, 0, "", 1.0))
    repeats = max(map(len, speeds.values()))
    return ComparisonSummary(directory, variants, results, ComparisonSettings(repeats, **settings))


def test_judge_faster_variant_is_named(tmp_path: Path) -> None:
    """A repeat in which the machine is twice as slow does not change the paired difference."""
    result = outcome(tmp_path, {"A": [1.0, 2.0, 1.1], "B": [0.95, 1.9, 1.05]})
    (comparison,) = result.comparisons
    assert comparison.speed.answer == "faster"
    assert comparison.speed.differences == pytest.approx(
        [math.log(1 / 0.95), math.log(1 / 0.95), math.log(1.1 / 1.05)]
    )
    (line,) = result.verdict
    assert line.startswith("B is 5.1 % faster than A (95 % interval 4.4 to 5.8 %, 3 pairs); ")
    assert "validation losses are equivalent within 0.5 %: B's is +0.0 % to +0.0 %" in line
    assert result.rows[1][8] == "+5.1 % (+4.4 to +5.8)"


def test_judge_equal_variants_have_no_difference(tmp_path: Path) -> None:
    result = outcome(tmp_path, {"A": [1.0, 1.0, 1.0], "B": [0.98, 1.03, 1.0]})
    assert result.comparisons[0].speed.answer == "no difference found"
    (line,) = result.verdict
    assert line.startswith(
        "no difference in speed was found: B is between 6.3 % slower and 6.1 % faster "
        "than A (95 % interval, 3 pairs)"
    )
    assert "equal" not in line.replace("equivalent", "")


def test_judge_chance_winner_of_three_is_not_claimed(tmp_path: Path) -> None:
    """Among three equal variants, chance gives an interval without zero in 14 % of cases."""
    result = outcome(
        tmp_path,
        {
            "A": [1.0, 1.0, 1.0],
            "B": [0.93, 0.96, 0.95],
            "C": [1.02, 0.99, 1.0],
            "D": [1.0, 1.02, 0.97],
        },
    )
    speed = result.comparisons[0].speed
    assert speed.answer == "not claimed"
    assert speed.interval is not None
    assert speed.interval.low > 0
    assert result.verdict[0].startswith(
        "B may be faster than A, but this is not significant among 3 comparisons"
    )
    assert result.verdict[-1].startswith(
        "3 variants were compared with A, not with each other; Holm's procedure"
    )


def test_judge_more_devices_are_judged_per_device_too(tmp_path: Path) -> None:
    speeds = {"A": [1.0, 1.01, 0.99], "B": [0.60, 0.61, 0.60]}
    result = outcome(tmp_path, speeds, devices={"B": 2}, price=3.0)
    (comparison,) = result.comparisons
    assert comparison.speed.answer == "faster"
    assert comparison.per_device is not None
    assert comparison.per_device.answer == "slower"
    assert "slower than A per device" in result.verdict[0]
    hours = 2 * geometric_mean([0.60, 0.61, 0.60]) / TOKENS * 1e9 / 3600
    assert result.rows[1][-2:] == [f"{hours:,.1f}", f"{3 * hours:,.2f}"]


def test_judge_corrects_for_comparisons_of_the_same_kind(tmp_path: Path) -> None:
    """Three variants are compared in speed; two of them have other numbers of devices."""
    speeds = {
        "A": [1.0, 1.0, 1.0],
        "B": [0.465, 0.48, 0.475],
        "C": [0.51, 0.495, 0.5],
        "D": [1.0, 1.02, 0.97],
    }
    result = outcome(tmp_path, speeds, devices={"B": 2, "C": 2})
    assert result.comparisons[0].per_device is not None
    assert result.comparisons[0].per_device.answer == "not claimed"
    assert "faster than A per device, but this is not significant among 2" in result.verdict[0]


@pytest.mark.parametrize(
    ("theirs", "answer", "words"),
    [
        ([3.001, 3.002, 3.003], "equivalent", "equivalent within 0.5 %: B's is +0.0"),
        ([3.10, 3.11, 3.10], "higher", "B's validation loss is higher: +3.4 %"),
        ([2.90, 2.91, 2.90], "lower", "B's validation loss is lower: -3.2 %"),
        (
            [3.02, 2.97, 3.00],
            "undecided",
            "are neither equivalent within 0.5 % nor different: B's is",
        ),
    ],
)
def test_judge_loss_difference_is_compared_with_margin(
    tmp_path: Path, theirs: list[float], answer: str, words: str
) -> None:
    same = [1.0, 1.0, 1.0]
    result = outcome(tmp_path, {"A": same, "B": same}, {"B": theirs})
    (comparison,) = result.comparisons
    assert comparison.loss is not None
    assert comparison.loss.answer == answer
    assert words in result.verdict[0]
    if answer == "undecided":
        assert comparison.more_pairs is not None
        assert f"--repeat {comparison.more_pairs} might decide" in result.verdict[0]


def test_judge_margin_is_relative_or_in_nats(tmp_path: Path) -> None:
    """The margin is a fraction of the loss, or in nats."""
    same = {"A": [1.0, 1.0, 1.0], "B": [1.0, 1.0, 1.0]}
    losses = {"B": [3.020, 3.021, 3.022]}
    answers = []
    for n, (margin, relative) in enumerate([(0.005, True), (0.01, True), (0.02, False)]):
        result = outcome(tmp_path / str(n), same, losses, margin=margin, relative=relative)
        assert result.comparisons[0].loss is not None
        answers.append(result.comparisons[0].loss.answer)
    assert answers == ["higher", "equivalent", "higher"]


def test_judge_negative_losses_have_a_margin(tmp_path: Path) -> None:
    """A custom objective may be negative; the margin is a fraction of its absolute value."""
    same = {"A": [1.0, 1.0, 1.0], "B": [1.0, 1.0, 1.0]}
    losses = {"A": [-3.0, -3.0, -3.0], "B": [-3.001, -3.002, -3.001]}
    result = outcome(tmp_path, same, losses)
    assert result.comparisons[0].margin_nats == pytest.approx(0.015)
    assert "losses are equivalent within 0.5 %: B's is -0.08 % to -0.01 %" in result.verdict[0]


def test_judge_losses_of_other_data_are_not_compared(tmp_path: Path) -> None:
    same = {name: [1.0, 1.0] for name in "ABCD"}
    jobs = {
        "B": replace(Job(), data={"vocab_size": 300}),
        "C": replace(Job(), train={"objective": "dpo"}),
        "D": replace(Job(), train={"objective": "mine:objective"}),
    }
    result = outcome(tmp_path, same, jobs=jobs)
    for comparison, line in zip(result.comparisons, result.verdict, strict=False):
        assert comparison.loss is None
        assert "losses cannot be compared: they are of different data or objectives" in line
    assert (
        "loss: validation, nats per token, nats per pair, loss of mine:objective after 2,560 tokens"
        in result.notes
    )


def test_judge_without_finished_trial_has_nothing_to_compare(tmp_path: Path) -> None:
    job = Job()
    variants = [
        Variant("A", "demo", job, None, (str(ConfigError("parallel.tp", 3, "does not divide")),)),
        Variant("B", "demo", job, plan=object()),  # type: ignore[arg-type]
    ]
    results = [TrialResult(1, 1, -9, "ended with signal SIGKILL", 2.0)]
    assert completed_trials(tmp_path, variants, results) == []
    result = ComparisonSummary(tmp_path, variants, results, ComparisonSettings(1))
    assert result.verdict == ["no trial has finished, so there is nothing to compare"]
    assert result.failures[0] == "A: cannot be run: parallel.tp=3 does not divide."
    assert "B: repeat 1 failed: ended with signal SIGKILL; log: " in result.failures[1]
    assert "no trial has finished" in result.text()
    json.dumps(result.to_dict(), allow_nan=False)


def test_judge_without_losses_reports_speed(tmp_path: Path) -> None:
    """Speed is compared even if every step was skipped."""
    same = {"A": [1.0, 1.0], "B": [1.0, 1.1]}
    result = outcome(tmp_path, same, {"A": [None, None], "B": [None, None]})  # type: ignore[list-item]
    assert "no repeat has a loss of both variants" in result.verdict[0]
    assert result.rows[0][7] == "-"
    json.dumps(result.to_dict(), allow_nan=False)


def test_judge_baseline_is_the_first_variant_that_ran(tmp_path: Path) -> None:
    result = outcome(tmp_path, {"A": [], "B": [1.0, 1.0], "C": [2.0, 2.1]})
    (comparison,) = result.comparisons
    assert (comparison.baseline, comparison.variant) == (1, 2)
    assert "than B" in result.verdict[0]


def test_percent_is_formatted_without_sign() -> None:
    assert [percent(x) for x in (0.0512, -0.25, 0.0, 4e-5)] == [
        "5.1 %",
        "25.0 %",
        "0.0 %",
        "0.004 %",
    ]
