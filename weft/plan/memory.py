"""What a rank must hold, by arithmetic: to choose a shard degree and to cut stages.

A first estimate from sizes alone, on the safe side: weights, gradients and AdamW's two moments in
float32 over the ranks that share them, whole copies where the layout keeps them, and what autograd
saves of the microbatches under way, without recomputation or with all of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from weft.job import Job
from weft.models import Family
from weft.models.family import Unit
from weft.plan.lora import frozen_of

# Of a device's memory: the rest is for the CUDA context, communication buffers, fragments.
USABLE = 0.9
# Of both moments of a parameter.
MOMENT_BYTES = {"float32": 8, "bfloat16": 4, "8bit": 2}


def state_bytes_per_param(
    job: Job,
    model: Any,
    family: Family,
    shards: int,
    *,
    kept_gathered: bool,
    kept_gradients: bool,
    compute_bytes: int,
) -> float:
    """Bytes on a rank for each parameter of the model that its shard group holds.

    Args:
        model: the family's configuration.
        shards: ranks of the group.
        kept_gathered: gathered weights stay over the step (reshard_after_forward never).
        kept_gradients: whole gradients add up over microbatches before they are reduced.
        compute_bytes: of one weight in forward and backward.
    """
    sharded = 4 + 4 + MOMENT_BYTES[job.optim.states]  # weight, gradient, AdamW's moments
    trained = sharded / shards + compute_bytes * kept_gathered + 4 * kept_gradients
    if shards == 1 and compute_bytes == 4:
        trained = sharded
    frozen = frozen_of(job, model, family, compute_bytes)
    if frozen is None:
        return trained
    whole = frozen.weight_bytes * (1 / shards + (kept_gathered and shards > 1))
    return whole + frozen.trained * trained


def rank_bytes(
    units: Sequence[Unit],
    *,
    tp: int,
    pp: int,
    tokens: int,
    in_flight: int,
    per_param: float,
    compute_bytes: int,
    ep: int = 1,
) -> float:
    """Bytes on one rank of a layout, its share of the layers taken as even.

    Args:
        tokens: of one microbatch on one rank: rows times tokens of a row over ``cp``.
        in_flight: microbatches whose activations are kept at once.
        per_param: see `state_bytes_per_param`.
        ep: ranks that share out experts, and gather no others'.
    """
    params = sum(unit.params for unit in units) / (tp * pp)
    # Gathered at once: one unit in use and one ahead, and their whole gradients.
    gathered = 4 * compute_bytes * max(of_one_rank(unit, ep) for unit in units) / tp
    saved = sum(unit.activation_bytes_per_token for unit in units) * compute_bytes / 2
    return params * per_param + gathered + saved / (tp * pp) * tokens * in_flight


def of_one_rank(unit: Unit, ep: int) -> float:
    """Parameters of a unit without those of experts that ``ep - 1`` other ranks have."""
    return unit.params - unit.expert_params * (1 - 1 / ep)


def recomputed(units: Sequence[Unit]) -> list[Unit]:
    """The units when each block is computed again in backward: blocks keep what goes into them,
    which is as large as what the first unit makes, and one at a time all that it needs."""
    first, *blocks, last = units
    small = [
        unit._replace(activation_bytes_per_token=first.activation_bytes_per_token)
        for unit in blocks
    ]
    return [first, *small[:-1], *blocks[-1:], last]
