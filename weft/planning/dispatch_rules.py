"""Rules for the exchange of tokens: see `weft.parallel.expert_dispatch`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from weft.config.errors import ConfigErrors
from weft.config.schema import Job
from weft.models import Family
from weft.planning.degrees import ParallelDims, divisors, format_choices
from weft.planning.plan import Plan

KEY = "parallel.ep_dispatch"


def check_dispatch(
    errors: ConfigErrors, job: Job, model: Any, family: Family, degrees: ParallelDims
) -> None:
    """Check the keys of expert parallelism; without it, they are only unused."""
    chunks = job.parallel.ep_chunks
    if degrees.ep == 1 or family.moe_layers is None:
        return
    num_local, remainder = divmod(model.num_experts, degrees.ep)
    if not remainder and num_local % chunks:
        rule = (
            f"does not divide the {num_local} experts of a rank (model.num_experts / parallel.ep)"
        )
        depends = ("parallel.ep", "model.num_experts")
        errors.add(
            "parallel.ep_chunks", rule, f"use {format_choices(divisors(num_local))}", depends
        )


def dispatch_warnings(plan: Plan) -> Iterator[str]:
    """Yield a warning if the host waits although buffers are padded."""
    is_padded = plan.ep > 1 and plan.parallel.ep_dispatch == "padded"
    if is_padded and plan.compute_dtype != "bfloat16":
        yield (
            f"{KEY}=padded saves no wait of the host, because grouped GEMMs in "
            f"{plan.compute_dtype} read the numbers of tokens. Use bfloat16 "
            "(precision.compute_dtype), or alltoall."
        )
