"""Time and failures of a whole run: against simulations, and against published runs."""

from __future__ import annotations

import math
import random

import pytest

from weft.estimate.whole_run import (
    REPAIR_SECONDS,
    SPARE_CONFIDENCE,
    Bounds,
    Failures,
    SaveCosts,
    WholeRun,
    best_interval,
    count_spares,
    count_steps,
    expected_goodput,
    predict_failures,
    save_costs,
    split_loss,
)
from weft.planning.plan import Machine, Plan
from weft.planning.plan_text import plan_recipe

HOUR, DAY = 3600.0, 86400.0


def plan_of(recipe: str, cluster: str, **keys: str) -> Plan:
    overrides = [(key.replace("__", "."), value) for key, value in keys.items()]
    return plan_recipe(recipe, overrides, [], cluster, lambda run: Machine("cpu", devices=1))[0]


# --------------------------------------------------------------------------- simulation


def simulate(
    interval: float, mtbf: float, costs: SaveCosts, intervals: int, seed: int
) -> dict[str, float]:
    """Run a job under random failures, event by event; return seconds by cause.

    The run keeps a position in seconds of steps, and the saves whose files are not complete yet.
    """
    chance = random.Random(seed)
    now = repeated = saving = restarting = 0.0
    position, durable, next_failure = 0.0, 0.0, chance.expovariate(1 / mtbf)
    pending: list[tuple[float, float]] = []  # time of completion, position
    furthest = 0.0
    while durable < intervals * interval:
        if pending and pending[0][0] <= now:
            durable = pending.pop(0)[1]
            continue
        is_saving = position % interval == 0 and position > furthest
        length = costs.blocking if is_saving else interval
        if is_saving and pending:  # waits for the save before
            length += pending[0][0] - now
        if next_failure < now + length:
            if is_saving:
                saving += next_failure - now
            now = next_failure
            durable = max([durable, *(place for done, place in pending if done <= now)])
            pending, position, furthest = [], durable, durable
            while True:  # failures also end restarts
                next_failure = now + chance.expovariate(1 / mtbf)
                if next_failure >= now + costs.restart:
                    restarting, now = restarting + costs.restart, now + costs.restart
                    break
                restarting, now = restarting + next_failure - now, next_failure
            continue
        now += length
        if is_saving:
            saving += length
            furthest = position
            pending.append((now + costs.write, position))
        else:
            position += interval
    productive = durable
    repeated = now - productive - saving - restarting
    return {
        "total": now,
        "productive": productive,
        "saving": saving,
        "repeated": repeated,
        "restarting": restarting,
    }


@pytest.mark.parametrize(
    ("interval", "mtbf", "costs"),
    [
        (300.0, 3 * HOUR, SaveCosts(20.0, 0.0, 400.0)),  # a save that blocks until it is written
        (100.0, 1000.0, SaveCosts(5.0, 60.0, 100.0)),
        (100.0, 600.0, SaveCosts(1.0, 95.0, 300.0)),  # failures during restarts
        (40.0, 2000.0, SaveCosts(1.0, 100.0, 50.0)),  # each save waits for the one before
    ],
)
def test_goodput_agrees_with_a_simulation_of_failures(
    interval: float, mtbf: float, costs: SaveCosts
) -> None:
    simulated = simulate(interval, mtbf, costs, intervals=100_000, seed=7)
    goodput = expected_goodput(interval, mtbf, costs)
    assert goodput == pytest.approx(simulated["productive"] / simulated["total"], rel=0.01)
    for cause, part in split_loss(interval, mtbf, costs).items():
        assert part == pytest.approx(simulated[cause] / simulated["total"], abs=0.01), cause


@pytest.mark.parametrize("mtbf", [600.0, 3 * HOUR, 30 * DAY])
@pytest.mark.parametrize("costs", [SaveCosts(1.0, 30.0, 300.0), SaveCosts(60.0, 0.0, 900.0)])
def test_best_interval_has_the_highest_goodput(mtbf: float, costs: SaveCosts) -> None:
    best = best_interval(mtbf, costs)
    highest = expected_goodput(best, mtbf, costs)
    for factor in (0.5, 0.9, 0.99, 1.01, 1.1, 2.0):
        assert expected_goodput(factor * best, mtbf, costs) <= highest
    if mtbf > 1000 * costs.blocking:
        assert best == pytest.approx(math.sqrt(2 * costs.blocking * mtbf), rel=0.03)  # Young's


def test_best_interval_is_not_shorter_than_the_write() -> None:
    costs = SaveCosts(1.0, 500.0, 300.0)
    assert best_interval(1000.0, costs) == pytest.approx(500.0)
    assert best_interval(100.0, costs) == pytest.approx(100.0)


def test_goodput_of_failures_faster_than_a_restart_is_zero() -> None:
    assert expected_goodput(10.0, 0.1, SaveCosts(1.0, 1.0, 300.0)) == 0.0
    assert expected_goodput(1e9, 1.0, SaveCosts(1.0, 1.0, 1.0)) == 0.0


def test_spares_suffice_most_of_the_time() -> None:
    for mtbf in (3 * HOUR, 2 * DAY):
        chance, now, returns, times = random.Random(3), 0.0, list[float](), dict[int, float]()
        while now < 5_000 * DAY:
            step = chance.expovariate(1 / mtbf)
            returns = [moment for moment in returns if moment > now]
            while returns and returns[0] < now + step:  # a node returns before the next failure
                times[len(returns)] = times.get(len(returns), 0.0) + returns[0] - now
                step -= returns[0] - now
                now = returns.pop(0)
            times[len(returns)] = times.get(len(returns), 0.0) + step
            now += step
            if chance.random() < 0.78:
                returns.append(now + REPAIR_SECONDS)
        total = sum(times.values())

        def enough(count: int, times: dict[int, float] = times, total: float = total) -> float:
            return sum(t for number, t in times.items() if number <= count) / total

        spares = count_spares(mtbf)
        assert enough(spares) > SPARE_CONFIDENCE - 0.003
        assert enough(spares - 1) < SPARE_CONFIDENCE + 0.003
    assert count_spares(1.0) > 60_000


# --------------------------------------------------------------------------- plans


def test_failures_of_llama_3_are_those_published() -> None:
    """419 unexpected interruptions in 54 days, more than 90 % of the time effective.

    On 16,384 GPUs, 405 billion parameters (arXiv 2407.21783, section 3.3.4).
    """
    plan = plan_of("paper/llama3-405b", "2048x8xH100", train__global_batch_size="2048")
    steps = math.ceil(0.9 * 54 * DAY / 6.0)  # of about 6 s
    seconds = 6.0 * steps
    failures = predict_failures(
        replace_steps(plan, steps), Bounds(seconds, seconds, seconds), 54 * DAY / 419
    )
    assert failures.count == pytest.approx(419, rel=0.07)
    assert failures.goodput.low > 0.9
    assert failures.goodput.low < failures.goodput.expected < failures.goodput.high < 0.99
    lost_minutes = 54 * DAY / 419 * (1 - failures.goodput.low) / 60
    assert lost_minutes < 0.1 * 54 * 24 * 60 / 419  # what more than 90 % leaves per failure
    assert failures.spare_nodes < 0.01 * failures.num_nodes


def replace_steps(plan: Plan, steps: int) -> Plan:
    from dataclasses import replace

    return replace(plan, num_steps=steps)


def test_save_costs_follow_state_replicas_and_async_save() -> None:
    plan = plan_of("llama3-8b", "2x8xH100")
    costs = save_costs(plan)
    state = 12 * plan.num_params  # float32 weights and moments
    assert costs.write == pytest.approx(state / 2e9)
    assert costs.blocking == pytest.approx(1 + state / 16 / 12e9)
    assert costs.restart == pytest.approx(300 + state / 2e9)
    replicas = save_costs(
        plan_of("llama3-8b", "2x8xH100", parallel__dp_replicate="2", parallel__dp_shard="8")
    )
    assert (replicas.write, replicas.blocking) == (costs.write, costs.blocking)
    assert replicas.restart == pytest.approx(300 + 2 * state / 2e9)
    blocking = save_costs(plan_of("llama3-8b", "2x8xH100", checkpoint__async_save="false"))
    assert blocking == (costs.blocking + costs.write, 0.0, costs.restart)
    adapters = save_costs(plan_of("llama3-8b-lora", "8xH100"))
    assert adapters.write < 0.1 * costs.write


def failures_of(plan: Plan, step_seconds: float, mtbf: float) -> Failures:
    seconds = step_seconds * plan.num_steps
    return predict_failures(plan, Bounds(seconds, 0.8 * seconds, 1.25 * seconds), mtbf)


def test_failures_compare_the_interval_of_the_recipe() -> None:
    plan = plan_of("llama3-8b", "8xH100", checkpoint__interval="100")
    failures = failures_of(plan, 10.0, 5 * HOUR)
    assert failures.own_interval == 100
    assert failures.own_goodput is not None
    assert failures.own_goodput < failures.goodput.expected
    best = best_interval(5 * HOUR, failures.costs) / 10.0
    assert failures.interval in (math.floor(best), math.ceil(best))
    around = [
        expected_goodput(10.0 * (failures.interval + n), 5 * HOUR, failures.costs) for n in (-1, 1)
    ]
    assert max(around) <= failures.goodput.expected
    low, high = failures.seconds.low, failures.seconds.high
    assert low == pytest.approx(8.0 * plan.num_steps / failures.goodput.high)
    assert high == pytest.approx(12.5 * plan.num_steps / failures.goodput.low)
    auto = failures_of(plan_of("llama3-8b", "8xH100", checkpoint__interval="auto"), 10.0, 5 * HOUR)
    assert (auto.own_interval, auto.own_goodput) == (None, None)


def test_failures_of_a_short_run_save_only_at_its_end() -> None:
    plan = plan_of("llama3-8b", "8xH100", train__steps="20", checkpoint__interval="0")
    failures = failures_of(plan, 10.0, 30 * DAY)
    assert failures.interval == failures.own_interval == 20


def test_count_steps_covers_the_tokens() -> None:
    plan = plan_of("llama3-8b", "8xH100")
    steps = count_steps(plan, 15 * 10**12)
    assert (steps - 1) * plan.tokens_per_step < 15 * 10**12 <= steps * plan.tokens_per_step
    assert count_steps(plan, 1) == 1


def test_whole_run_json_has_bounds_and_no_infinity() -> None:
    plan = plan_of("llama3-8b", "8xH100")
    seconds = Bounds(3600.0, 1800.0, 7200.0)
    run = WholeRun(plan.num_steps, 10**9, 8, seconds).to_dict(price=2.0)
    assert run["device_hours"] == {"expected": 8.0, "low": 4.0, "high": 16.0}
    assert run["cost"] == {"expected": 16.0, "low": 8.0, "high": 32.0}
    assert "goodput" not in run
    stuck = WholeRun(10, 10**9, 8, seconds, failures_of(plan, 10.0, 0.01)).to_dict()
    assert stuck["seconds"] == {"expected": None, "low": None, "high": None}
    assert stuck["failures"] is None
