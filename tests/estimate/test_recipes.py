"""Every shipped recipe fits on its cluster: by arithmetic, and by a trace."""

from __future__ import annotations

from functools import cache

import pytest

from tests.small import sized_recipes
from weft.config.schema import Job
from weft.estimate.cost import device_spec
from weft.estimate.forecast import forecast
from weft.estimate.memory_check import estimate_run
from weft.planning.plan import Machine, Plan
from weft.planning.plan_text import plan_recipe

GIB = 2**30
LAPTOP = Machine("cpu", devices=2, memory_bytes=16 * GIB)
# The default tests trace these recipes, some with few microbatches.  The slow tests trace all
# recipes, which takes up to 30 s each.  Arithmetic for a recipe takes milliseconds.
TRACED_OFTEN: dict[str, list[tuple[str, str]]] = {
    "demo": [],
    "paper/llama3-70b": [],
    "llama3-8b-qlora": [("train.global_batch_size", "1")],
    "moe-demo": [],
}


def has_arithmetic(plan: Plan) -> bool:
    """Return False for CPUs, experts, partly frozen weights, and windows."""
    model = plan.model
    is_local = any(model.is_local(i) for i in range(model.num_layers))
    is_frozen = plan.num_trainable_params < plan.num_params
    return plan.device == "cuda" and not (model.num_experts or is_frozen or is_local)


@cache
def planned(recipe: str) -> tuple[Job, Plan, Machine]:
    plan, machine = plan_recipe(recipe, [], [], None, lambda device: LAPTOP)
    return plan.job, plan, machine


@pytest.mark.parametrize("recipe", sized_recipes())
def test_recipe_on_its_cluster_can_be_planned(recipe: str) -> None:
    """The job is valid, and arithmetic predicts that memory suffices."""
    _job, plan, machine = planned(recipe)
    expected = estimate_run(plan, machine)
    assert (expected is not None) == has_arithmetic(plan)
    if expected is not None:
        capacity = machine.memory_per_rank(plan.local_world_size)
        assert capacity is not None
        if not plan.job.activation_checkpoint.offload:  # arithmetic keeps activations on the device
            assert expected.memory_gib < 1.1 * capacity / GIB
        assert expected.step_seconds is not None
        assert plan.peak_flops is not None
        flops = plan.tokens_per_step * plan.flops_per_token
        assert 0.25 < flops / expected.step_seconds / plan.world_size / plan.peak_flops < 0.75


@pytest.mark.parametrize("recipe", TRACED_OFTEN)
def test_recipe_on_its_cluster_fits(recipe: str) -> None:
    plan, machine = plan_recipe(recipe, TRACED_OFTEN[recipe], [], None, lambda device: LAPTOP)
    fits(plan.job, plan, machine)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("recipe", sized_recipes())
def test_recipe_in_full_on_its_cluster_fits(recipe: str) -> None:
    fits(*planned(recipe))


def fits(job: Job, plan: Plan, machine: Machine) -> None:
    prediction = forecast(plan, machine, device_spec(plan, machine))
    assert prediction.fits
    if plan.device == "cuda":
        assert prediction.mfu is not None
        # A mixture of experts has lower MFU: small matmuls, and two all-to-all per layer.
        routed = prediction.plan.num_active_params < prediction.plan.num_params
        assert (0.15 if routed else 0.25) < prediction.mfu < 0.75
