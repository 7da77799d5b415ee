"""Resolve FSDP's sharding and gradient reduction; estimate a rank's memory.

The memory estimate chooses a shard degree and splits stages.  It is conservative: it counts
weights, gradients and AdamW's two moments in float32 over the ranks of a shard group, the unsharded
copies that the layout keeps, and the activations that autograd saves for the microbatches in
flight, with full recomputation or none.  `weft.estimate` predicts memory by tracing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

from weft.config.errors import ConfigErrors
from weft.config.schema import Job, OptimSection
from weft.models.family import UnitCost
from weft.planning.degrees import ParallelDims, divisors
from weft.planning.devices import GIB
from weft.planning.lora_plan import TrainingCost
from weft.planning.matrices import MOMENT_BLOCK_SIZE
from weft.planning.placement import DEGREE_KEYS
from weft.planning.precision_rules import frozen_weights

# Fraction of a device's memory; the CUDA context, communication buffers and fragmentation take
# the remainder.
USABLE_MEMORY = 0.9
# Bytes of both AdamW moments of a matrix of the blocks, without the ranges of 8bit.
MOMENT_BYTES = {"float32": 8, "bfloat16": 4, "8bit": 2}
# With parallel.gradient_sync = auto, unsharded float32 gradients up to this size are reduced once
# per step.
MAX_UNSHARDED_GRADIENT_BYTES = 2 * GIB


def fsdp_size(job: Job, degrees: ParallelDims) -> int:
    """Return the ranks that FSDP shards a parameter over."""
    return 1 if job.train.world_size_invariant else degrees.fsdp_size


def resolve_reshard(job: Job, degrees: ParallelDims) -> bool | int:
    """Return ``parallel.reshard_after_forward`` as fully_shard takes it."""
    requested, ranks = job.parallel.reshard_after_forward, fsdp_size(job, degrees)
    if requested == "auto":
        # A pipeline runs several forward passes before the first backward pass.  An all-gather
        # for each of them costs more than it saves.
        return degrees.pp == 1 and ranks > 1
    if isinstance(requested, int):
        # Resharding over one rank keeps the parameters; over all ranks it frees them.
        return requested if 1 < requested < ranks else 1 < ranks == requested
    return requested == "always"


def expert_split(dims: Any) -> float:
    """Return how much less of its experts than of other weights a rank has unsharded.

    ``dims``: a `ParallelDims` or a plan.  The result is below 1 if experts are whole.
    """
    return dims.ep * dims.etp / dims.tp  # type: ignore[no-any-return]


def resolve_gradient_sync(
    job: Job, reshard: bool | int, cost: TrainingCost, degrees: ParallelDims
) -> Literal["microbatch", "step"]:
    """Return ``parallel.gradient_sync``; auto: step, unless gradients are large."""
    requested = job.parallel.gradient_sync
    if job.train.world_size_invariant:
        return "microbatch"
    if requested != "auto":
        return requested
    # Without those of experts on other ranks.
    params = cost.trainable_params - cost.expert_params * (1 - 1 / expert_split(degrees))
    is_small = 4 * params / (degrees.tp * degrees.pp) <= MAX_UNSHARDED_GRADIENT_BYTES
    return "step" if reshard is False or is_small else "microbatch"


def fit_dp_shard(
    errors: ConfigErrors,
    job: Job,
    cost: TrainingCost,
    degrees: ParallelDims,
    compute_bytes: int,
    available: int | None,
) -> ParallelDims:
    """Choose the smallest shard degree that fits the memory; replicate the model.

    Args:
        errors: receives the errors.
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
        errors.add(key, rule, "use a number, or auto")
        return degrees
    reshard = resolve_reshard(job, degrees)
    gradient_sync = resolve_gradient_sync(job, reshard, cost, degrees)
    microbatch_size: int | str = job.train.microbatch_size
    if isinstance(microbatch_size, str):  # auto
        microbatch_size = max(1, job.train.global_batch_size // degrees.dp_size)
    tokens = microbatch_size * cost.seq_len / degrees.sequence_shards
    if job.activation_checkpoint.recomputes_all_blocks:
        units = recompute_blocks(units)

    def required_bytes(dp_shard: int) -> float:
        bytes_per_param = state_bytes_per_param(
            job,
            cost,
            fsdp_size(job, replace(degrees, dp_shard=dp_shard)),
            has_unsharded_params=reshard is False,
            has_unsharded_gradients=gradient_sync == "step",
            compute_bytes=compute_bytes,
            ep=expert_split(degrees),
        )
        return estimate_rank_bytes(
            units,
            tp=degrees.tp,
            pp=degrees.pp,
            tokens=int(tokens),
            in_flight=degrees.pp,
            bytes_per_param=bytes_per_param,
            compute_bytes=compute_bytes,
            ep=expert_split(degrees),
        )

    usable, choices = USABLE_MEMORY * available, divisors(degrees.dp_size)
    # A shard group has whole groups of ep ranks; `check_layout` reports if none has.
    unit = degrees.cp * degrees.tp // degrees.etp
    choices = [n for n in choices if n * unit % degrees.ep == 0] or choices
    for dp_shard in choices:
        if required_bytes(dp_shard) <= usable:
            dp_replicate = degrees.dp_size // dp_shard
            return replace(degrees, dp_shard=dp_shard, dp_replicate=dp_replicate)
    rule = (
        f"needs about {required_bytes(choices[-1]) / GIB:.1f} GiB per rank even over {choices[-1]} "
        f"ranks, but {USABLE_MEMORY:.0%} of a rank's memory is {usable / GIB:.1f} GiB"
    )
    remedy = "use more ranks, parallel.tp or parallel.pp, or a smaller train.microbatch_size"
    errors.add(key, rule, remedy, DEGREE_KEYS)
    return degrees


# --------------------------------------------------------------------------- memory


def moment_bytes_per_param(optim: OptimSection, cost: TrainingCost) -> float:
    """Return the mean bytes of the optimizer's state per trainable parameter.

    Matrices of the blocks have one moment with Muon; with SOAP a second, in float32, and its means
    and bases.  Others have AdamW's two.  The average of ``optim.ema_decay`` is a state, too.
    """
    average = 4 if optim.ema_decay else 0
    ranges = 2 / MOMENT_BLOCK_SIZE if optim.state_dtype == "8bit" else 0.0
    if ranges and (rank := cost.lora_rank):  # half of an adapter has rows of this length
        ranges = (ranges + 2 * -(-rank // MOMENT_BLOCK_SIZE) / rank) / 2
    has_momentum = optim.name in ("muon", "soap")
    matrix = average + MOMENT_BYTES[optim.state_dtype] / (1 + has_momentum) + ranges
    if optim.name == "soap":
        matrix += 4 + soap_bytes_per_param(optim, cost)
    other = average + (4 if optim.state_dtype == "bfloat16" else 8)
    if cost.lora_rank:
        saved = cost.saved_params / max(1, cost.trainable_params)
        return saved * other + (1 - saved) * matrix
    if not cost.units:
        return other  # an upper bound
    first, *blocks, last = cost.units
    block_params = sum(unit.params for unit in blocks)
    other_params = first.params + last.params
    return (matrix * block_params + other * other_params) / (block_params + other_params)


def soap_bytes_per_param(optim: OptimSection, cost: TrainingCost) -> float:
    """Return the bytes of SOAP's means and bases per element of a matrix."""
    elements = squares = 0
    for matrix in cost.matrices:
        rows, columns = matrix.out_features, matrix.in_features
        rank = cost.lora_rank
        for sides in ((rank, columns), (rows, rank)) if rank else ((rows, columns),):
            elements += sides[0] * sides[1] * (matrix.experts or 1)
            rotated = (side * side for side in sides if side <= optim.max_precondition_dim)
            squares += sum(rotated) * (matrix.experts or 1)
    return 8 * squares / max(1, elements)


def state_bytes_per_param(
    job: Job,
    cost: TrainingCost,
    fsdp_size: int,
    *,
    has_unsharded_params: bool,
    has_unsharded_gradients: bool,
    compute_bytes: int,
    ep: float = 1,
) -> float:
    """Return the bytes on a rank per parameter of its shard group.

    Args:
        job: keys of the run.
        cost: of the model.
        fsdp_size: ranks of the shard group.
        has_unsharded_params: True if gathered weights stay until the end of the step
            (reshard_after_forward never).
        has_unsharded_gradients: True if unsharded gradients accumulate over microbatches.
        compute_bytes: bytes of one weight in forward and backward.
        ep: see `expert_split`.
    """
    # Weight, gradient and moments.
    sharded = 4 + 4 + moment_bytes_per_param(job.optim, cost)
    local = 1 - cost.expert_params / max(1, cost.trainable_params) * (1 - 1 / ep)
    # FSDP shards experts over tp, too.
    trainable = sharded * (local if job.train.world_size_invariant else 1 / fsdp_size)
    if fsdp_size > 1 or compute_bytes != 4 or ep < 1:
        unsharded = compute_bytes * has_unsharded_params + 4 * has_unsharded_gradients
        trainable += unsharded * local
    frozen = frozen_weights(job.lora, cost, compute_bytes)
    if frozen is None:
        return trainable
    copies = 1 / fsdp_size + (has_unsharded_params and fsdp_size > 1)
    return frozen.bytes_per_weight * copies + frozen.adapter_ratio * trainable


def estimate_rank_bytes(
    units: Sequence[UnitCost],
    *,
    tp: int,
    pp: int,
    tokens: int,
    in_flight: int,
    bytes_per_param: float,
    compute_bytes: int,
    ep: float = 1,
) -> float:
    """Return the bytes on one rank of a layout, as if layers were spread evenly.

    Args:
        units: units of the unsharded model, in order.
        tp: tensor-parallel degree.
        pp: pipeline-parallel degree.
        tokens: tokens of one microbatch on one rank.
        in_flight: microbatches whose activations a rank keeps at once.
        bytes_per_param: see `state_bytes_per_param`.
        compute_bytes: bytes of a weight, and of an activation, in forward and backward.
        ep: see `expert_split`.
    """
    params = sum(unit.params for unit in units) / (tp * pp)
    # FSDP gathers one unit in use and one prefetched unit, with their unsharded gradients.
    gathered = 4 * compute_bytes * max(local_unit_params(unit, ep) for unit in units) / tp
    activations = sum(unit.activation_bytes_per_token for unit in units) * compute_bytes / 2
    return params * bytes_per_param + gathered + activations / (tp * pp) * tokens * in_flight


def local_unit_params(unit: UnitCost, ep: float) -> float:
    """Return the parameters of a unit, with 1 / ``ep`` of the experts."""
    return unit.params - unit.expert_params * (1 - 1 / ep)


def recompute_blocks(units: Sequence[UnitCost]) -> list[UnitCost]:
    """Return the units as if backward recomputed every block.

    Each block keeps only its input, which is as large as the output of the first unit.  One block
    at a time, here the last, has all its activations.
    """
    first, *blocks, last = units
    inputs_only = [
        unit._replace(activation_bytes_per_token=first.activation_bytes_per_token)
        for unit in blocks
    ]
    return [first, *inputs_only[:-1], *blocks[-1:], last]
