"""How a rank's parameters are shared, gathered and reduced: what a job leaves to weft to choose."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

from weft.config.errors import ConfigError
from weft.config.schema import Job
from weft.models import Family
from weft.plan.devices import GIB
from weft.plan.layout import DEGREE_KEYS, ParallelDims, divisors
from weft.plan.lora_plan import training_cost
from weft.plan.memory_formula import (
    USABLE_MEMORY,
    local_unit_params,
    estimate_rank_bytes,
    recompute_blocks,
    state_bytes_per_param,
)

# Float32 gradients that a rank keeps whole over a step, to reduce them once, without being asked.
MAX_UNSHARDED_GRADIENT_BYTES = 2 * GIB


def resolve_reshard(job: Job, degrees: ParallelDims) -> bool | int:
    """``parallel.reshard_after_forward`` as FSDP2 takes it."""
    asked = job.parallel.reshard_after_forward
    if asked == "auto":
        # A pipeline runs forward many times before it runs backward: gathering anew each time
        # costs more than it saves.
        return degrees.pp == 1 and degrees.shards > 1
    if isinstance(asked, int):
        # Over one rank is to keep them, over all is to free them.
        return {1: False, degrees.shards: degrees.shards > 1}.get(asked, asked)
    return asked == "always"


def resolve_gradient_sync(
    job: Job, reshard: bool | int, params: float, degrees: ParallelDims
) -> Literal["microbatch", "step"]:
    """``parallel.gradient_sync``: by itself, one reduction unless whole gradients are large."""
    asked = job.parallel.gradient_sync
    if asked != "auto":
        return asked
    small = 4 * params / (degrees.tp * degrees.pp) <= MAX_UNSHARDED_GRADIENT_BYTES
    return "step" if reshard is False or small else "microbatch"


def local_trainable_params(family: Family, model: Any, degrees: ParallelDims, trained: int) -> float:
    """Trained parameters without those of experts that are on other ranks."""
    if degrees.ep == 1 or family.units is None:
        return trained
    return sum(local_unit_params(unit, degrees.ep) for unit in family.units(model, 1))


def fit_dp_shard(
    job: Job,
    model: Any,
    family: Family,
    degrees: ParallelDims,
    compute_bytes: int,
    available: int | None,
) -> tuple[ParallelDims, list[ConfigError]]:
    """The fewest ranks to a shard group whose memory suffices; the other ranks are replicas.

    Args:
        model: the family's configuration.
        compute_bytes: of a weight, and of an activation, in forward and backward.
        available: bytes of a rank; None: unknown.

    Returns:
        The degrees, as they were if there are problems.
    """
    key = "parallel.dp_shard"
    if family.units is None or available is None:
        rule = "cannot be told: the " + (
            "device's memory is unknown" if family.units else "family has no units"
        )
        return degrees, [ConfigError(key, "fit", rule, "use a number, or auto")]
    choices = divisors(degrees.dp)
    reshard = resolve_reshard(job, degrees)
    rows = job.train.microbatch_size
    local = max(1, job.train.global_batch_size // degrees.dp)
    tokens = (local if rows == "auto" else rows) * job.train.seq_len / degrees.cp
    units = family.units(model, job.train.seq_len)
    params = training_cost(job.lora, model, family, job.train.seq_len).params
    if job.activation_checkpoint.mode == "full" and job.activation_checkpoint.every_n_layers == 1:
        units = recompute_blocks(units)

    def needed(shard: int) -> float:
        per_param = state_bytes_per_param(
            job,
            model,
            family,
            shard * degrees.cp,
            kept_gathered=reshard is False,
            kept_gradients=resolve_gradient_sync(job, reshard, params, degrees) == "step",
            compute_bytes=compute_bytes,
        )
        return estimate_rank_bytes(
            units,
            tp=degrees.tp,
            pp=degrees.pp,
            tokens=int(tokens),
            in_flight=degrees.pp,
            per_param=per_param,
            compute_bytes=compute_bytes,
        )

    for shard in choices:
        if needed(shard) <= USABLE_MEMORY * available:
            return replace(degrees, dp_shard=shard, dp_replicate=degrees.dp // shard), []
    rule = f"needs about {needed(choices[-1]) / GIB:.1f} GiB a rank even over {choices[-1]} ranks, "
    rule += f"and {USABLE_MEMORY:.0%} of a rank's memory is {USABLE_MEMORY * available / GIB:.1f}"
    remedy = "use more ranks, parallel.tp or parallel.pp, or a smaller train.microbatch_size"
    return degrees, [ConfigError(key, "fit", rule, remedy, DEGREE_KEYS)]
