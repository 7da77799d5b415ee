"""No shipped recipe is more than a tenth slower than what weft itself finds near it."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

import pytest

from benchmarks.recipe_neighbors import (
    FREE,
    Neighborhood,
    leaves_room,
    neighbors_recipes,
    read_results,
    speed,
)
from weft.config.errors import InvalidConfig
from weft.config.reader import read_job
from weft.estimate.advice import advise, apply_change, candidate_changes
from weft.estimate.analytic import DecoderFormulas, supports_formulas
from weft.estimate.cost import build_hardware
from weft.estimate.forecast import forecast
from weft.planning.devices import GIB, parse_cluster
from weft.planning.plan import Plan
from weft.planning.resolve import resolve

SLOWER = 1.1
# Formulas of memory are up to this fraction too low.
FORMULA_ERROR = 0.05
# Its layout is its purpose: a lost server costs one replica.
FIXED_LAYOUT = ("three-servers",)
# These keys change the numbers of a step, so they are the recipe's choice.
NUMBERS = ("precision.float8", "optim.state_dtype")
RECIPES = [name for name in neighbors_recipes() if name not in FIXED_LAYOUT]
OFTEN = ("llama3-8b-8gpu", "llama3-70b", "llama3-405b")
near = cache(Neighborhood)
pytestmark = pytest.mark.timeout(600)


def fastest_that_fits(plans: Mapping[str, dict[str, float]], capacity: float) -> float:
    """Return the tokens/s of the best recorded neighbor that computes the same numbers."""
    return max(
        (
            plan["tokens_per_second_per_device"]
            for change, plan in plans.items()
            if plan["gib"] <= (1 - FREE) * capacity and not any(key in change for key in NUMBERS)
        ),
        default=0.0,
    )


def test_recorded_neighbors_that_leave_room_are_not_faster() -> None:
    results = read_results()
    assert {"llama3-8b", "llama3-70b", "llama3-405b", "qwen3-30b-a3b"} <= results.keys()
    for recipe, row in results.items():
        capacity = (parse_cluster(read_job(recipe)[0].run.cluster).memory_bytes or 0) / GIB
        plans = row["plans"]
        assert plans[""]["gib"] <= (1 - FREE) * capacity, recipe
        best = fastest_that_fits(plans, capacity)
        assert best <= SLOWER * plans[""]["tokens_per_second_per_device"], recipe


def by_formulas(here: Neighborhood, plan: Plan) -> tuple[float, float]:
    formulas = DecoderFormulas(plan, here.device)
    seconds = formulas.step_seconds(build_hardware(plan, here.device)).total()
    return seconds, sum(formulas.estimate_memory().values())


@pytest.mark.parametrize(
    "recipe",
    [pytest.param(name, marks=[] if name in OFTEN else [pytest.mark.slow]) for name in RECIPES],
)
def test_recipe_is_not_slower_than_its_advice_by_formulas(recipe: str) -> None:
    here = near(recipe)
    if not supports_formulas(here.plan):
        assert recipe not in ("llama3-8b", "llama3-70b", "llama3-405b")
        return
    own, _ = by_formulas(here, here.plan)
    room = (1 - FREE - FORMULA_ERROR) * (here.machine.memory_bytes or 0)
    for change in candidate_changes(here.plan, here.machine):
        if change.keys() & set(NUMBERS):
            continue
        try:
            plan = resolve(apply_change(here.plan.job, change), here.machine)
            seconds, memory = by_formulas(here, plan)
        except (InvalidConfig, ValueError):
            continue
        assert memory > room or own <= SLOWER * seconds, change


def test_recipes_of_dense_pretraining_multiply_in_float8_where_the_device_can() -> None:
    for recipe in ("llama3-1b", "llama3-3b", "llama3-8b", "llama3-8b-8gpu", "llama3-70b"):
        assert read_job(recipe)[0].precision.float8 == "tensorwise"
    for recipe in ("llama3-405b", "llama3-405b-131k", "olmo2-7b", "olmo3-7b"):
        assert read_job(recipe)[0].precision.float8 == "tensorwise"
    assert read_job("mics-50b")[0].precision.float8 == "none"


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
def test_recipe_is_not_slower_than_its_traced_advice_and_neighbors(recipe: str) -> None:
    here = near(recipe)
    prediction = forecast(here.plan, here.machine, here.device)
    assert prediction.fits
    for advice in advise(here.plan, here.machine, here.device, prediction):
        if advice.speedup > SLOWER - 1 and not advice.change.keys() & set(NUMBERS):
            # Formulas err by some percent, in time and memory: a trace decides.
            traced = here.predict(advice.change)
            assert (
                traced is None
                or not leaves_room(traced)
                or speed(traced) <= SLOWER * speed(prediction)
            ), str(advice)
    plans = read_results().get(recipe, {"plans": {}})["plans"]
    best = fastest_that_fits(plans, (here.machine.memory_bytes or 0) / GIB)
    assert best <= SLOWER * speed(prediction)
