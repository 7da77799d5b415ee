"""What a rank must hold, by arithmetic: to choose a shard degree and to cut stages.

A first estimate from sizes alone, on the safe side: weights, gradients and AdamW's two moments in
float32 over the ranks that share them, whole copies where the layout keeps them, and what autograd
saves of the microbatches under way, without recomputation or with all of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from weft.config.errors import ConfigError
from weft.config.schema import Job
from weft.models import Family
from weft.models.family import Unit
from weft.plan.layout import ParallelDims, divisors, format_choices
from weft.plan.lora_plan import frozen_weights, is_target
from weft.plan.matrices import weight_split, list_matrices

# Of a device's memory: the rest is for the CUDA context, communication buffers, fragments.
USABLE_MEMORY = 0.9
# Of both moments of a parameter; 8bit: of a matrix of the blocks, see `weft.optim.lean`.
MOMENT_BLOCK_SIZE = 32  # neighbors in a row that share two bytes
MOMENT_BYTES = {"float32": 8, "bfloat16": 4, "8bit": 2 + 2 / MOMENT_BLOCK_SIZE}


def moment_bytes_per_param(job: Job, model: Any, family: Family) -> float:
    """Return the bytes of AdamW's moments for a trained parameter, on the mean.

    Args:
        model: the family's configuration.
    """
    packed = MOMENT_BYTES[job.optim.state_dtype]
    if job.optim.state_dtype != "8bit":
        return packed
    if job.lora.rank:  # of its two matrices one has rows of that length
        return packed if job.lora.rank % MOMENT_BLOCK_SIZE == 0 else (packed + 8) / 2
    if family.units is None:
        return 8  # on the safe side
    first, *blocks, last = family.units(model, job.train.seq_len)
    inside = sum(unit.params for unit in blocks)
    outside = first.params + last.params
    return (packed * inside + 8 * outside) / (inside + outside)


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
    sharded = 4 + 4 + moment_bytes_per_param(job, model, family)  # weight, gradient, AdamW's moments
    trained = sharded / shards + compute_bytes * kept_gathered + 4 * kept_gradients
    if shards == 1 and compute_bytes == 4:
        trained = sharded
    frozen = frozen_weights(job, model, family, compute_bytes)
    if frozen is None:
        return trained
    whole = frozen.weight_bytes * (1 / shards + (kept_gathered and shards > 1))
    return whole + frozen.trained * trained


def check_state_dtype(
    job: Job, model: Any, family: Family, degrees: ParallelDims
) -> Iterator[ConfigError]:
    """Which rows tensor parallelism must not cut: their blocks would be others on each layout."""
    if job.optim.state_dtype != "8bit" or degrees.tp == 1:
        return
    wrong = {}
    for matrix in list_matrices(model, family):
        if job.lora.rank and not is_target(matrix.name, job.lora):
            continue
        rows = weight_split(matrix.name, family) == "row" and matrix.inputs % MOMENT_BLOCK_SIZE == 0
        if rows and matrix.inputs % (degrees.tp * MOMENT_BLOCK_SIZE):
            wrong[matrix.name.rpartition(".")[2]] = matrix.inputs
    for kind, inputs in wrong.items():
        rule = (
            f"cuts the {inputs} inputs of {kind} into parts that are no multiples of "
            f"{MOMENT_BLOCK_SIZE}, the numbers that share a scale under optim.state_dtype 8bit"
        )
        good = [n for n in divisors(inputs // MOMENT_BLOCK_SIZE) if n < degrees.tp]
        remedy = f"use {format_choices(good)}, or optim.state_dtype bfloat16"
        yield ConfigError(
            "parallel.tp", degrees.tp, rule, remedy, ("optim.state_dtype", "model.preset")
        )


def estimate_rank_bytes(
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
    gathered = 4 * compute_bytes * max(local_unit_params(unit, ep) for unit in units) / tp
    saved = sum(unit.activation_bytes_per_token for unit in units) * compute_bytes / 2
    return params * per_param + gathered + saved / (tp * pp) * tokens * in_flight


def local_unit_params(unit: Unit, ep: int) -> float:
    """Parameters of a unit without those of experts that ``ep - 1`` other ranks have."""
    return unit.params - unit.expert_params * (1 - 1 / ep)


def recompute_blocks(units: Sequence[Unit]) -> list[Unit]:
    """The units when each block is computed again in backward: blocks keep what goes into them,
    which is as large as what the first unit makes, and one at a time all that it needs."""
    first, *blocks, last = units
    small = [
        unit._replace(activation_bytes_per_token=first.activation_bytes_per_token)
        for unit in blocks
    ]
    return [first, *small[:-1], *blocks[-1:], last]
