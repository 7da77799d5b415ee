"""Rules for the exchange of tokens: see `weft.parallel.expert_dispatch`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from weft.config.accelerators import supports
from weft.config.errors import ConfigErrors
from weft.config.schema import Job
from weft.models import Family
from weft.plan.degrees import ParallelDims, divisors, format_choices
from weft.plan.plan import Machine, Plan

KEY = "parallel.ep_dispatch"


def check_dispatch(
    errors: ConfigErrors,
    job: Job,
    model: Any,
    family: Family,
    degrees: ParallelDims,
    machine: Machine,
    compute_dtype: str,
) -> None:
    """Check the keys of expert parallelism; without it, they are only unused."""
    name, chunks = job.parallel.ep_dispatch, job.parallel.ep_chunks
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
    if name != "deepep":
        return
    if not supports(machine.device, "DeepEP"):
        rule = f"needs GPUs, but run.device is {machine.device}"
        errors.add(KEY, rule, "use alltoall or padded", ("run.device",))
    elif compute_dtype != "bfloat16":
        rule = f"exchanges bfloat16, but precision.compute_dtype is {compute_dtype}"
        errors.add(KEY, rule, "use bfloat16, or alltoall", ("precision.compute_dtype",))
    # DeepEP's kernels of Hopper move parts of a row, in csrc/kernels/intranode.cu and internode.cu.
    multiple = 16 if degrees.ep <= (machine.local_world_size or degrees.ep) else 256
    if model.dim % multiple:
        rule = f"needs a multiple of {multiple} as model.dim, which is {model.dim}"
        errors.add(KEY, rule, "use alltoall or padded", ("model.dim",))
    if job.lora.dropout:
        rule = f"adds columns to the rows, whose width {KEY}=deepep does not support"
        errors.add("lora.dropout", rule, "use 0, or alltoall or padded", (KEY,))
    if chunks > 1:
        rule = f"does not work with {KEY}=deepep, which sends all rows of a layer at once"
        errors.add("parallel.ep_chunks", rule, "use 1, or alltoall or padded", (KEY,))


def has_fixed_buffers(plan: Plan) -> bool:
    """Return True if ``parallel.ep_capacity_factor`` may have an effect."""
    name = plan.job.parallel.ep_dispatch
    return plan.ep > 1 and (name == "padded" or ":" in name)


def dispatch_warnings(plan: Plan) -> Iterator[str]:
    """Yield a warning if the host waits although buffers are padded."""
    is_padded = plan.ep > 1 and plan.job.parallel.ep_dispatch == "padded"
    if is_padded and plan.compute_dtype != "bfloat16":
        yield (
            f"{KEY}=padded saves no wait of the host, because grouped products in "
            f"{plan.compute_dtype} read the numbers of tokens. Use bfloat16 "
            "(precision.compute_dtype), or alltoall."
        )
