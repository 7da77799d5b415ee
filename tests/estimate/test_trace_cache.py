"""Forecasts kept on disk: the same numbers, and never those of another job or damaged ones."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from weft.estimate import trace
from weft.estimate.forecast import forecast, forecast_to_json
from weft.estimate.trace_cache import cache_dir
from weft.planning.devices import find_device
from weft.planning.plan import Machine, Plan
from weft.planning.plan_text import plan_recipe

SMALL = {
    "model.num_layers": "4",
    "model.dim": "32",
    "model.num_heads": "2",
    "model.num_kv_heads": "2",
    "train.seq_len": "64",
}


@pytest.fixture(autouse=True)
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return cache_dir()


def planned(cluster: str = "1x2xH100", **overrides: str) -> tuple[Plan, Machine]:
    changes = SMALL | {name.replace("__", "."): value for name, value in overrides.items()}
    return plan_recipe("demo", [*changes.items()], [], cluster, lambda run: Machine("cpu", 2))


def text_of(plan: Plan, machine: Machine, cached: bool) -> str:
    return forecast_to_json(plan, forecast(plan, machine, find_device(machine), cached))


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[Plan]:
    """List the plans that are recorded from now on."""
    plans: list[Plan] = []
    record_rank = trace.record_rank

    def count(plan: Plan, *args: object) -> object:
        plans.append(plan)
        return record_rank(plan, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(trace, "record_rank", count)
    return plans


def test_forecast_cached_is_equal_and_records_once(recorded: list[Plan], empty_cache: Path) -> None:
    plan, machine = planned()
    expected = text_of(plan, machine, cached=False)
    assert not empty_cache.exists()
    assert text_of(plan, machine, cached=True) == expected
    assert len(recorded) == 2
    assert text_of(plan, machine, cached=True) == expected
    longer = replace(plan, num_steps=2 * plan.num_steps)
    prediction = forecast(longer, machine, find_device(machine), cached=True)
    assert prediction.plan is longer
    assert len(recorded) == 2
    other, machine = planned("1x2xH200")
    assert text_of(other, machine, cached=True) == text_of(other, machine, cached=False)
    assert len(recorded) == 3, "another device has the same recording"


@pytest.mark.parametrize(
    "change",
    [
        pytest.param({"activation_checkpoint__mode": "full"}, marks=pytest.mark.slow),
        pytest.param({"optim__state_dtype": "bfloat16"}, marks=pytest.mark.slow),
        pytest.param({"train__microbatch_size": "1"}, marks=pytest.mark.slow),
        {"data__packing": "documents"},
    ],
)
def test_forecast_of_another_job_is_not_taken_from_the_cache(change: dict[str, str]) -> None:
    plan, machine = planned()
    forecast(plan, machine, find_device(machine), cached=True)
    other, machine = planned(**change)
    assert text_of(other, machine, cached=True) == text_of(other, machine, cached=False)


def test_forecast_damaged_cache_is_recorded_again(empty_cache: Path, recorded: list[Plan]) -> None:
    plan, machine = planned()
    expected = text_of(plan, machine, cached=True)
    for number, content in enumerate((b"damaged", b"", b"\x80\x04N.", None), 2):
        for path in empty_cache.iterdir():
            path.write_bytes(path.read_bytes()[:1000] if content is None else content)
        assert text_of(plan, machine, cached=True) == expected
        assert len(recorded) == number, content


def test_forecast_without_a_writable_cache_is_computed(
    empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = empty_cache.parent.parent / "file"
    file.touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(file))
    plan, machine = planned()
    assert text_of(plan, machine, cached=True) == text_of(plan, machine, cached=False)


def test_forecast_of_own_code_is_never_cached(empty_cache: Path) -> None:
    plan, machine = planned(optim__schedule="weft.optim.optimizer:cosine")
    forecast(plan, machine, find_device(machine), cached=True)
    assert not empty_cache.exists()
