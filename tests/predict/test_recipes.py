"""Every shipped recipe fits on the cluster that it is made for, traced as `weft plan` does it."""

from __future__ import annotations

import pytest

from weft.job import recipe_names
from weft.plan.report import plan_recipe
from weft.plan.resolve import Machine
from weft.predict.forecast import Forecast, device_of, forecast

GIB = 2**30
LAPTOP = Machine("cpu", devices=2, memory_bytes=16 * GIB)


def planned(recipe: str) -> Forecast:
    job, plan, machine = plan_recipe(recipe, [], [], None, lambda device: LAPTOP)
    return forecast(job, plan, machine, device_of(plan, machine))


@pytest.mark.timeout(300)
@pytest.mark.parametrize("recipe", recipe_names())
def test_a_recipe_fits_its_cluster(recipe: str) -> None:
    seen = planned(recipe)
    assert seen.fits
    if seen.plan.device == "cuda":
        assert seen.mfu is not None
        # Small products and an exchange of tokens twice a layer: a mixture of experts has less.
        routed = seen.plan.num_active_params < seen.plan.num_params
        assert (0.15 if routed else 0.25) < seen.mfu < 0.75
