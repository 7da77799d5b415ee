"""Ranges of predicted times, from data."""

from __future__ import annotations

from dataclasses import replace

import pytest

from weft.config.reader import read_job
from weft.estimate.error_ranges import (
    CALIBRATED,
    LOW_CONFIDENCE,
    ErrorRange,
    find_error_range,
    group_of_plan,
    load_error_ranges,
)
from weft.planning.devices import Device, get_device
from weft.planning.plan import Machine, Plan
from weft.planning.resolve import resolve


def plan_of(recipe: str, *overrides: tuple[str, str]) -> Plan:
    job, _, errors = read_job(recipe, [("run.cluster", "local"), *overrides])
    errors.raise_any()
    return resolve(job, Machine("cuda", 8, capability=(9, 0), memory_bytes=80 << 30))


@pytest.fixture(scope="module")
def dense() -> Plan:
    return plan_of("llama3-8b")


def test_groups_are_those_of_published_runs(dense: Plan) -> None:
    assert group_of_plan(dense) == "dense"
    assert group_of_plan(plan_of("llama3-8b", ("parallel.cp", "2"))) == "context parallel"
    assert group_of_plan(plan_of("llama3-8b-lora")) == "adapters"
    assert group_of_plan(plan_of("qwen3-30b-a3b")) == "experts"


def test_every_group_has_a_range_around_its_runs() -> None:
    ranges = load_error_ranges()
    assert set(ranges) == {"dense", "context parallel", "experts", "adapters"}
    for low, high in ranges.values():
        assert 0.3 < low < high < 3


def test_range_grows_where_nothing_was_measured(dense: Plan) -> None:
    device = get_device("H100")
    known = load_error_ranges()["dense"]
    assert find_error_range(dense, device, False) == known
    assert find_error_range(dense, device, True) == known.include(LOW_CONFIDENCE)
    assert find_error_range(replace(dense, device="cpu"), None, False) == known.include(
        LOW_CONFIDENCE
    )
    calibrated: Device = replace(device, calibrated="bandwidth")
    assert find_error_range(dense, calibrated, False) == CALIBRATED
    experts = plan_of("qwen3-30b-a3b")  # what was calibrated is the matmuls of a dense model
    assert find_error_range(experts, calibrated, False) == load_error_ranges()["experts"]


def test_error_has_both_sides() -> None:
    assert ErrorRange(0.8, 1.1).error == pytest.approx(0.25)
    assert ErrorRange(0.9, 1.5).error == pytest.approx(0.5)
    assert ErrorRange(0.9, 1.1).include(ErrorRange(0.8, 1.0)) == (0.8, 1.1)
