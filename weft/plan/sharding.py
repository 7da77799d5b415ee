"""Resolve FSDP's automatic shard degree, resharding and gradient reduction."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

from weft.config.errors import ConfigError
from weft.config.schema import Job
from weft.models import Family
from weft.plan.devices import GIB
from weft.plan.layout import DEGREE_KEYS, ParallelDims, divisors
from weft.plan.lora_plan import TrainingCost
from weft.plan.memory_formula import (
    USABLE_MEMORY,
    estimate_rank_bytes,
    local_unit_params,
    recompute_blocks,
    state_bytes_per_param,
)

# With parallel.gradient_sync = auto, unsharded float32 gradients up to this size are reduced once
# per step.
MAX_UNSHARDED_GRADIENT_BYTES = 2 * GIB


def resolve_reshard(job: Job, degrees: ParallelDims) -> bool | int:
    """Return ``parallel.reshard_after_forward`` as fully_shard takes it."""
    requested = job.parallel.reshard_after_forward
    if requested == "auto":
        # A pipeline runs several forward passes before the first backward pass.  An all-gather
        # for each of them costs more than it saves.
        return degrees.pp == 1 and degrees.fsdp_size > 1
    if isinstance(requested, int):
        # Resharding over one rank keeps the parameters; over all ranks it frees them.
        return {1: False, degrees.fsdp_size: degrees.fsdp_size > 1}.get(requested, requested)
    return requested == "always"


def resolve_gradient_sync(
    job: Job, reshard: bool | int, params: float, degrees: ParallelDims
) -> Literal["microbatch", "step"]:
    """Return ``parallel.gradient_sync``; auto: step, unless gradients are large."""
    requested = job.parallel.gradient_sync
    if requested != "auto":
        return requested
    is_small = 4 * params / (degrees.tp * degrees.pp) <= MAX_UNSHARDED_GRADIENT_BYTES
    return "step" if reshard is False or is_small else "microbatch"


def local_trainable_params(
    family: Family, model: Any, degrees: ParallelDims, trainable_params: int
) -> float:
    """Return the trainable parameters, without those of experts on other ranks."""
    if degrees.ep == 1 or family.unit_costs is None:
        return trainable_params
    return sum(local_unit_params(unit, degrees.ep) for unit in family.unit_costs(model, 1))


def fit_dp_shard(
    job: Job,
    cost: TrainingCost,
    degrees: ParallelDims,
    compute_bytes: int,
    available: int | None,
) -> tuple[ParallelDims, list[ConfigError]]:
    """Choose the smallest shard degree that fits the memory; replicate the model.

    Args:
        job: keys of the run.
        cost: of the model.
        degrees: degrees of all axes, before ``dp_shard`` is chosen.
        compute_bytes: bytes of a weight, and of an activation, in forward and backward.
        available: bytes of memory per rank; None: unknown.

    Returns:
        The degrees, unchanged if there are errors.
    """
    key = "parallel.dp_shard"
    units = cost.units
    if not units or available is None:
        rule = "cannot be resolved: the " + (
            "memory of the device is unknown" if units else "model family defines no units"
        )
        return degrees, [ConfigError(key, "fit", rule, "use a number, or auto")]
    reshard = resolve_reshard(job, degrees)
    gradient_sync = resolve_gradient_sync(job, reshard, cost.trainable_params, degrees)
    microbatch_size: int | str = job.train.microbatch_size
    if isinstance(microbatch_size, str):  # auto
        microbatch_size = max(1, job.train.global_batch_size // degrees.dp_size)
    tokens = microbatch_size * cost.seq_len / degrees.cp
    if job.activation_checkpoint.recomputes_all_blocks:
        units = recompute_blocks(units)

    def required_bytes(dp_shard: int) -> float:
        bytes_per_param = state_bytes_per_param(
            job,
            cost,
            dp_shard * degrees.cp,
            has_unsharded_params=reshard is False,
            has_unsharded_gradients=gradient_sync == "step",
            compute_bytes=compute_bytes,
        )
        return estimate_rank_bytes(
            units,
            tp=degrees.tp,
            pp=degrees.pp,
            tokens=int(tokens),
            in_flight=degrees.pp,
            bytes_per_param=bytes_per_param,
            compute_bytes=compute_bytes,
        )

    usable, choices = USABLE_MEMORY * available, divisors(degrees.dp_size)
    for dp_shard in choices:
        if required_bytes(dp_shard) <= usable:
            dp_replicate = degrees.dp_size // dp_shard
            return replace(degrees, dp_shard=dp_shard, dp_replicate=dp_replicate), []
    rule = (
        f"needs about {required_bytes(choices[-1]) / GIB:.1f} GiB per rank even over {choices[-1]} "
        f"ranks, but {USABLE_MEMORY:.0%} of a rank's memory is {usable / GIB:.1f} GiB"
    )
    remedy = "use more ranks, parallel.tp or parallel.pp, or a smaller train.microbatch_size"
    return degrees, [ConfigError(key, "fit", rule, remedy, DEGREE_KEYS)]
