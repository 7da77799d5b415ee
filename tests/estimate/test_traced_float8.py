"""Plans of every float8 recipe need no GPU, and no kernels of a GPU."""

from __future__ import annotations

from typing import get_args

import pytest

from tests.small import small_job
from weft.config.schema import PrecisionSection
from weft.estimate.trace import trace_ranks
from weft.planning.plan import Machine
from weft.planning.resolve import resolve

B200 = Machine("cuda", devices=8, world_size=1, capability=(10, 0))
RECIPES = list(get_args(PrecisionSection.model_fields["float8"].annotation)[1:])


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("adapters", ["0", "2"])
def test_trace_float8_without_its_kernels_has_casts_and_products(
    recipe: str, adapters: str
) -> None:
    overrides = [("precision.float8", recipe), ("precision.float8_small", "true")]
    size = [("model.head_dim", "32"), ("model.num_kv_heads", "4"), ("lora.rank", adapters)]
    plan = resolve(small_job(*overrides, *size, ("train.global_batch_size", "1")), B200)
    assert not plan.float8_emulated
    (trace,) = trace_ranks(plan)
    calls = [event.call for event in trace.op_trace.events if event.call is not None]
    names = [call.name for call in calls]
    # Seven matrices of two blocks; frozen ones have no weight gradient.
    products = names.count("_scaled_mm")
    assert products >= 2 * 7 * (1 if int(adapters) else 2)
    casts = [call for call in calls if call.name == "mxfp8_cast"]
    assert bool(casts) == (recipe == "mxfp8")
    for call in casts:  # reads 2 bytes of a number; writes 1, and a scale for 32 numbers
        read, written = (sum(size for _, size in side) for side in (call.reads, call.writes))
        assert written / read == pytest.approx((1 + 1 / 32) / 2)
