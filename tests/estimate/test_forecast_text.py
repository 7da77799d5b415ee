"""Text of a forecast: plans that fit or not, and unknown devices."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from weft.config.schema import Job
from weft.estimate.advice import Advice
from weft.estimate.forecast import Forecast, forecast_to_json, price_traces
from weft.estimate.forecast_text import describe_time, render_plan
from weft.estimate.trace import RankTrace, trace_ranks
from weft.planning.devices import GIB, match_device
from weft.planning.plan import Machine, Plan
from weft.planning.plan_text import plan_recipe


@pytest.fixture(scope="module")
def eight() -> tuple[Job, Plan, Machine, Forecast, list[RankTrace]]:
    """Forecast a step of a small Llama on eight H100."""
    small = [
        ("model.num_layers", "4"),
        ("model.dim", "384"),
        ("model.tied_embeddings", "false"),
        ("parallel.tp", "2"),
    ]
    local_machine = Machine("cpu", devices=2)
    plan, machine = plan_recipe("demo", small, [], "1x8xH100", lambda device: local_machine)
    device = match_device(machine.device_name, machine.memory_bytes)
    rank_traces = trace_ranks(plan)
    return plan.job, plan, machine, price_traces(plan, machine, device, rank_traces), rank_traces


Eight = tuple[Job, Plan, Machine, Forecast, list[RankTrace]]


def lines_of(eight: Eight, prediction: Forecast, *advice: Advice) -> list[str]:
    _job, plan, machine, *_ = eight
    return render_plan(plan, machine, "demo", prediction, advice).splitlines()


def column(lines: list[str], head: str) -> dict[str, float]:
    """Return names and numbers below the line that begins with ``head``."""
    start = next(position for position, line in enumerate(lines) if line.startswith(head))
    cells = [line.split() for line in lines[start + 1 :]]
    results = {}
    for row in cells:
        if not row:
            break
        results[row[0]] = float(row[1])
    return results


def test_screen_of_a_plan_that_fits_has_memory_speed_and_communication(eight: Eight) -> None:
    prediction = eight[3]
    lines = lines_of(eight, prediction)
    assert lines[0] == "demo on 8 H100"
    assert lines[1].startswith("  memory     fits: ")
    assert lines[1].endswith("on the fullest rank, of 80.0 GiB")
    speed = prediction.tokens_per_second_per_device
    assert speed is not None
    low, high = prediction.error_range
    assert (
        f"{speed:,.0f} tokens/s per device ({speed / high:,.0f} to {speed / low:,.0f})" in lines[3]
    )
    assert prediction.mfu is not None
    assert f"MFU {prediction.mfu:.1%}" in lines[3]
    memory = column(lines, "memory")
    assert memory.pop("total") == pytest.approx(prediction.needed_bytes / GIB, abs=0.005)
    assert sum(memory.values()) == pytest.approx(prediction.needed_bytes / GIB, abs=0.05)
    collectives = column(lines, "communication per rank")
    assert collectives == {
        axis: item.collectives for axis, item in prediction.communication.items()
    }
    assert not any(line.startswith("changes that") for line in lines)


def test_screen_whole_run_has_hours_and_cost(eight: Eight) -> None:
    _job, plan, machine, prediction, _ = eight
    assert prediction.step_seconds is not None
    hours = prediction.step_seconds * plan.num_steps * 8 / 3600
    lines = render_plan(plan, machine, "demo", prediction, (), price=1000.0).splitlines()
    seconds, (low, high) = prediction.step_seconds * 220, prediction.error_range
    assert lines[4] == (
        f"  whole run  220 steps, 450.6 K tokens: {seconds:.0f} seconds "
        f"({seconds * low:.0f} to {seconds * high:.0f}), {hours:,.1f} GPU-hours, "
        f"cost {hours * 1000:.2f} ({hours * 1000 * low:.2f} to {hours * 1000 * high:.2f}) "
        "at 1000 per hour"
    )
    assert prediction.to_dict()["device_hours"] == pytest.approx(hours)
    unknown = replace(prediction, plan=replace(plan, num_steps=0))  # epochs of unread data
    text = render_plan(unknown.plan, machine, "demo", unknown, (), price=3.0)
    assert "whole run" not in text
    untimed = replace(prediction, time_breakdown=None)
    text = render_plan(plan, machine, "demo", untimed, (), mtbf=3600.0)
    assert "  whole run  220 steps, 450.6 K tokens; how long they take is unknown\n" in text
    assert "whole run" not in render_plan(plan, machine, "demo", untimed, ())
    assert unknown.to_dict()["device_hours"] is None
    data = json.loads(forecast_to_json(plan, prediction, price=3.0))
    assert data["cost"] == pytest.approx(3 * hours)


def test_screen_failures_have_goodput_interval_and_spares(eight: Eight) -> None:
    _job, plan, machine, prediction, _ = eight
    plan = replace(plan, num_steps=10**9)  # a year and more
    prediction = replace(prediction, plan=plan)
    text = render_plan(plan, machine, "demo", prediction, (), price=2.0, mtbf=86400.0)
    run = json.loads(forecast_to_json(plan, prediction, 2.0, 86400.0))["whole_run"]
    goodput, lost = run["goodput"], run["lost"]
    assert sum(lost.values()) + goodput["expected"] == pytest.approx(1)
    assert goodput["low"] < goodput["expected"] < goodput["high"] < 1
    assert run["failures"] == pytest.approx(run["seconds"]["expected"] / 86400)
    alone = 10**9 * (prediction.step_seconds or 0.0)
    assert run["seconds"]["expected"] == pytest.approx(alone / goodput["expected"])
    failures = f"one every 24.0 hours, {run['failures']:,.0f} in all: "
    assert f"{failures}goodput {goodput['expected']:.1%} (" in text
    assert f": --checkpoint.interval {run['checkpoint_interval']}; every 100 steps, as now" in text
    assert f"  with them {run['seconds']['expected'] / 86400:,.1f} days (" in text
    assert f"lost: {lost['saving']:.1%} saving, {lost['repeated']:.1%} repeated steps, " in text
    assert "  spares     3 nodes beside 1, if" not in text  # never more than the job has
    assert "  spares     1 node beside 1, if" in text
    stuck = render_plan(plan, machine, "demo", prediction, (), mtbf=0.1)
    assert "failures   one every 0 seconds, sooner than a restart: no progress" in stuck


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(59, "59 seconds"), (300, "5.0 minutes"), (9000, "2.5 hours"), (86400 * 45.1, "45.1 days")],
)
def test_describe_time_has_a_fitting_unit(seconds: float, text: str) -> None:
    assert describe_time(seconds) == text


def test_screen_times_add_up_to_the_step(eight: Eight) -> None:
    lines = lines_of(eight, eight[3])
    start = next(position for position, line in enumerate(lines) if "step time" in line)
    at = lines[start].index("step time")
    rows = [line[at:].split() for line in lines[start + 1 :] if line[at:].strip()]
    rows = rows[: 1 + [row[0] for row in rows].index("total")]
    report = [
        float(next(word for word in row if word[0].isdigit()).replace(",", "")) for row in rows
    ]
    assert eight[3].step_seconds is not None
    assert report[-1] == pytest.approx(1000 * eight[3].step_seconds, abs=0.05)
    assert sum(report[:-1]) == pytest.approx(report[-1], abs=0.05 * len(report))


@pytest.mark.parametrize(
    ("share", "word"),
    [(0.5, "fits: "), (0.94, "fits: "), (0.96, "fits, narrowly: "), (1.01, "does not fit: ")],
)
def test_screen_verdict_follows_the_share_of_the_capacity(
    eight: Eight, share: float, word: str
) -> None:
    """``share``: needed memory as a fraction of the capacity."""
    prediction = replace(eight[3], capacity_bytes=int(eight[3].needed_bytes / share))
    assert lines_of(eight, prediction)[1].startswith(f"  memory     {word}")
    assert prediction.fits == (share <= 1)


def test_screen_of_a_plan_that_does_not_fit_has_the_advice(eight: Eight) -> None:
    """The screen shows changes, or else --search."""
    prediction = replace(eight[3], capacity_bytes=GIB)
    text = "\n".join(lines_of(eight, prediction))
    assert "use --search to try all layouts" in text
    lines = lines_of(
        eight, prediction, Advice({"activation_checkpoint.mode": "full"}, -0.2, 0.9 * GIB)
    )
    assert any(line.startswith("changes that make it fit") for line in lines)
    (advice,) = [line.split() for line in lines if line.startswith("--")]
    assert advice == ["--activation_checkpoint.mode", "full", "-20%", "921.6", "MiB"]


def test_screen_of_a_plan_that_fits_has_faster_changes(eight: Eight) -> None:
    change = {"compile.enable": True, "precision.float8": "tensorwise"}
    lines = lines_of(eight, eight[3], Advice(change, 0.35, 2 * GIB))
    assert any(line.startswith("changes that make it faster") for line in lines)
    (advice,) = [line for line in lines if line.startswith("--")]
    assert advice.startswith("--compile.enable true --precision.float8 tensorwise")
    assert advice.endswith("+35%  2.0 GiB")


def test_screen_of_an_unknown_device_predicts_memory_only(eight: Eight) -> None:
    _job, plan, machine, _, rank_traces = eight
    prediction = price_traces(plan, machine, None, rank_traces)
    lines = lines_of(eight, prediction)
    assert lines[3] == "  speed      not predicted: the speed of this device is unknown"
    assert not any("step time" in line for line in lines)
    assert prediction.memory == eight[3].memory


def test_screen_of_unknown_memory_shows_the_needed_memory(eight: Eight) -> None:
    _job, plan, machine, _, rank_traces = eight
    prediction = price_traces(plan, replace(machine, memory_bytes=None), None, rank_traces)
    assert prediction.fits is None
    (line,) = [line for line in lines_of(eight, prediction) if "memory is unknown" in line]
    assert line.startswith("  memory     needs ")


def test_screen_caveats_are_warnings(eight: Eight) -> None:
    prediction = replace(eight[3], caveats=("low confidence: so it is",))
    assert "warning: low confidence: so it is" in lines_of(eight, prediction)
