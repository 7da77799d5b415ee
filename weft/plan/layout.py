"""Parallel degrees, and the rules that a parallel layout must satisfy.

weft checks every rule here, before it allocates anything, so that no rank of five hundred fails
with a shape error.  Each error names the key, its value, the rule and a remedy.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from weft.config.errors import ConfigError
from weft.config.schema import Job, ParallelSection
from weft.models import Family
from weft.plan.placement import AXES

DEGREE_KEYS = tuple(f"parallel.{name}" for name in AXES)


@dataclass(frozen=True)
class ParallelDims:
    """Ranks along each axis of the mesh."""

    pp: int
    dp_replicate: int
    dp_shard: int
    cp: int
    tp: int
    ep: int = 1  # splits the dp_shard x cp ranks

    @property
    def axis_sizes(self) -> dict[str, int]:
        """Ranks along each axis of the mesh."""
        return {axis: getattr(self, axis) for axis in AXES}

    @property
    def dp_size(self) -> int:
        """Data-parallel ranks, which read different sequences."""
        return self.dp_replicate * self.dp_shard

    @property
    def fsdp_size(self) -> int:
        """Ranks that FSDP shards a parameter over: dp_shard x cp."""
        return self.dp_shard * self.cp

    @property
    def world_size(self) -> int:
        """Ranks of the mesh."""
        return self.dp_size * self.pp * self.cp * self.tp


def ranks_per_shard(parallel: ParallelSection) -> int:
    """Return the product of all degrees except ``dp_shard``."""
    return parallel.pp * parallel.dp_replicate * parallel.cp * parallel.tp


def resolve_degrees(
    parallel: ParallelSection, world_size: int
) -> tuple[ParallelDims, list[ConfigError]]:
    """Return the degrees; ``dp_shard = "fit"`` takes all remaining ranks.

    If there are errors, the degrees are the nearest that other rules can check.
    """
    errors = []
    depends = ("run.nproc_per_node", *DEGREE_KEYS)
    unit = ranks_per_shard(parallel)
    is_automatic = isinstance(parallel.dp_shard, str)
    dp_shard = (
        max(1, world_size // unit) if isinstance(parallel.dp_shard, str) else parallel.dp_shard
    )
    degrees = {name: getattr(parallel, name) for name in ("tp", "pp", "cp", "dp_replicate")}
    above_one = {name: degree for name, degree in degrees.items() if degree > 1}
    if is_automatic and world_size % unit:
        name, degree = next(iter(above_one.items()))
        others = " and ".join(f"{other}={n}" for other, n in list(above_one.items())[1:])
        times = f"times {others} ({unit} in all) " if others else ""
        valid = format_choices(divisors(world_size)) if not others else ""
        ranks = f"run.nproc_per_node={unit}" + (f" or a multiple of {unit}" if unit > 1 else "")
        remedy = f"use {valid}, or {ranks}" if valid else f"use {ranks}"
        rule = f"{times}does not divide the {world_size} ranks"
        errors.append(ConfigError(f"parallel.{name}", degree, rule, remedy, depends))
    elif not is_automatic and unit * dp_shard != world_size:
        valid = f"use {world_size // unit}, or auto" if world_size % unit == 0 else "use auto"
        others = ", ".join(f"{other}={n}" for other, n in above_one.items())
        times = f"times {others} " if others else ""
        errors.append(
            ConfigError(
                "parallel.dp_shard",
                dp_shard,
                f"{times}is not equal to the {world_size} ranks",
                f"{valid}, or run.nproc_per_node={unit * dp_shard}",
                depends,
            )
        )
    dims = ParallelDims(
        parallel.pp, parallel.dp_replicate, dp_shard, parallel.cp, parallel.tp, parallel.ep
    )
    return dims, errors


def check_layout(
    job: Job, model: Any, family: Family, degrees: ParallelDims
) -> Iterator[ConfigError]:
    """Yield the errors of the layout of a model, except those of pipelines."""
    yield from _check_tensor_parallel(job, model, family, degrees)
    yield from _check_context_parallel(job, model, degrees)
    yield from _check_sharding(job, degrees)
    yield from _check_expert_parallel(job, model, family, degrees)
    if degrees.pp == 1 and job.pipeline.layers_per_stage:
        rule = "has no effect without a pipeline (parallel.pp=1)"
        remedy = "remove the key, or use parallel.pp above 1"
        yield ConfigError(
            "pipeline.layers_per_stage",
            list(job.pipeline.layers_per_stage),
            rule,
            remedy,
            ("parallel.pp",),
        )


def _check_tensor_parallel(
    job: Job, model: Any, family: Family, degrees: ParallelDims
) -> Iterator[ConfigError]:
    tp, parallel = degrees.tp, job.parallel
    name = f"{job.model.kind}-{job.model.preset}"
    if parallel.async_tp:
        yield from _check_async_tp(job, degrees)
    if tp == 1:
        return
    if not family.sharding:
        rule = f"is not supported by the model family {job.model.kind}, which has no SHARDING table"
        yield ConfigError("parallel.tp", tp, rule, "use 1, or define Family.sharding")
        return
    sizes = {field: getattr(model, field) for field in family.tp_divided_fields}
    common = math.gcd(*sizes.values()) if sizes else 0
    kv = getattr(model, "num_kv_heads", 0)
    valid = [n for n in divisors(common) if not kv or kv % n == 0 or n % kv == 0] or [1]
    for field, size in sizes.items():
        if size % tp:
            rule = f"does not divide {field}={size} of {name}"
            if field == "vocab_size":
                padded = -(-size // tp) * tp
                remedy = f"use {format_choices(valid)}, or --model.vocab_size {padded}"
            else:
                remedy = f"use {format_choices(valid)}"
            yield ConfigError("parallel.tp", tp, rule, remedy, (f"model.{field}", "model.preset"))
    if kv and kv % tp and tp % kv:
        rule = f"is neither a divisor nor a multiple of num_kv_heads={kv} of {name}"
        yield ConfigError(
            "parallel.tp", tp, rule, f"use {format_choices(valid)}", ("model.num_kv_heads",)
        )
    local_seq_len = job.train.seq_len // degrees.cp
    if parallel.sequence_parallel and local_seq_len % tp:
        rule = f"is not divisible by tp={tp} ranks of sequence parallelism" + (
            f" within each of cp={degrees.cp} ranks" if degrees.cp > 1 else ""
        )
        unit = tp * degrees.cp * _chunks_per_rank(job.parallel)
        choices = format_choices(nearest_divisors(job.train.seq_len, unit))
        remedy = f"use {choices}, or parallel.sequence_parallel=false"
        depends = ("parallel.tp", "parallel.cp")
        yield ConfigError("train.seq_len", job.train.seq_len, rule, remedy, depends)


def _check_async_tp(job: Job, degrees: ParallelDims) -> Iterator[ConfigError]:
    key = "parallel.async_tp"
    if degrees.tp == 1:
        rule = "has no effect without tensor parallelism (parallel.tp=1)"
        yield ConfigError(key, True, rule, "use parallel.tp above 1")
    if not job.compile.enable:
        rule = "needs torch.compile, which overlaps the communication of tensor parallelism"
        yield ConfigError(key, True, rule, "use compile.enable=true", ("compile.enable",))
    if not job.parallel.sequence_parallel:
        rule = "overlaps the all-gathers and reduce-scatters of sequence parallelism, which is off"
        yield ConfigError(key, True, rule, "use parallel.sequence_parallel=true")


def _chunks_per_rank(parallel: ParallelSection) -> int:
    """Return the chunks of a sequence on each context-parallel rank."""
    return 2 if parallel.cp > 1 and parallel.cp_load_balance else 1


def _check_context_parallel(job: Job, model: Any, degrees: ParallelDims) -> Iterator[ConfigError]:
    cp, parallel, seq_len = degrees.cp, job.parallel, job.train.seq_len
    if cp == 1:
        return
    if not hasattr(model, "num_heads"):
        rule = f"needs num_heads, which the model family {job.model.kind} does not define"
        yield ConfigError("parallel.cp", cp, rule, "use 1")
        return
    unit = cp * _chunks_per_rank(parallel)
    if seq_len % unit:
        chunks = f"{unit} load-balanced chunks of cp={cp}" if unit > cp else f"cp={cp} ranks"
        rule = f"is not divisible by {chunks}"
        remedy = f"use {format_choices(nearest_divisors(seq_len, unit))}"
        yield ConfigError("train.seq_len", seq_len, rule, remedy, ("parallel.cp",))
    if parallel.cp_method == "ulysses":
        heads = model.num_heads // degrees.tp
        valid = divisors(heads)
        if cp not in valid:
            per_rank = f" / tp={degrees.tp}" if degrees.tp > 1 else ""
            rule = f"does not divide num_heads={model.num_heads}{per_rank} (ulysses)"
            remedy = f"use {format_choices(valid)}, or parallel.cp_method=ring"
            depends = ("parallel.tp", "model.num_heads")
            yield ConfigError("parallel.cp", cp, rule, remedy, depends)


def _check_sharding(job: Job, degrees: ParallelDims) -> Iterator[ConfigError]:
    parallel, fsdp_size = job.parallel, degrees.fsdp_size
    key, reshard = "parallel.reshard_after_forward", parallel.reshard_after_forward
    if isinstance(reshard, int) and fsdp_size % reshard:
        rule = f"does not divide the {fsdp_size} ranks of a shard group (dp_shard x cp)"
        remedy = f"use {format_choices(divisors(fsdp_size))}, always or never"
        yield ConfigError(key, reshard, rule, remedy, DEGREE_KEYS)
    elif isinstance(reshard, int) and degrees.tp > 1 and 1 < reshard < fsdp_size:
        rule = "is not supported: FSDP2 cannot partially reshard weights that parallel.tp shards"
        yield ConfigError(key, reshard, rule, "use always or never", ("parallel.tp",))
    if parallel.dp_shard == "fit" and parallel.dp_replicate > 1:
        rule = "conflicts with parallel.dp_shard=fit, which chooses the number of replicas"
        remedy = "remove the key"
        yield ConfigError("parallel.dp_replicate", parallel.dp_replicate, rule, remedy)


def _check_expert_parallel(
    job: Job, model: Any, family: Family, degrees: ParallelDims
) -> Iterator[ConfigError]:
    key, ep, parallel = "parallel.ep", degrees.ep, job.parallel
    if ep == 1:
        return
    if family.moe_layers is None:
        rule = f"needs experts, which the model family {job.model.kind} does not have"
        yield ConfigError(key, ep, rule, "use 1, or --model.kind moe", ("model.kind",))
        return
    num_experts = model.num_experts
    valid = [n for n in divisors(degrees.fsdp_size) if num_experts % n == 0]
    if ep not in valid:
        rule = f"does not divide the {degrees.fsdp_size} ranks of a shard group (dp_shard x cp)"
        if degrees.fsdp_size % ep == 0:
            rule = f"does not divide the {num_experts} experts"
        depends = (*DEGREE_KEYS, "model.num_experts")
        yield ConfigError(key, ep, rule, f"use {format_choices(valid)}", depends)
    if parallel.dp_shard == "fit":
        rule = "is not supported with parallel.dp_shard=fit"
        yield ConfigError(key, ep, rule, "use a number for parallel.dp_shard")
    if job.train.world_size_invariant:
        rule = "is not supported with train.world_size_invariant"
        remedy = "use 1, or train.world_size_invariant=false"
        yield ConfigError(key, ep, rule, remedy, ("train.world_size_invariant",))
    reshard = parallel.reshard_after_forward
    if isinstance(reshard, int) and 1 < reshard < degrees.fsdp_size:
        rule = "is not supported: FSDP2 cannot partially reshard weights that parallel.ep shards"
        remedy = "use always or never"
        yield ConfigError("parallel.reshard_after_forward", reshard, rule, remedy, (key,))


# --------------------------------------------------------------------------- wording


def divisors(n: int, at_most: int | None = None) -> list[int]:
    """Return the divisors of ``n`` in ascending order, up to ``at_most``."""
    small = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    all_divisors = sorted({*small, *(n // d for d in small)})
    return [d for d in all_divisors if d <= (at_most or n)]


def nearest_divisors(n: int, unit: int) -> list[int]:
    """Return the nonzero multiples of ``unit`` nearest to ``n``, one on each side."""
    below = n // unit * unit
    return [m for m in (below, below + unit) if m]


def format_choices(values: list[int]) -> str:
    """Format ``[1, 2, 4]`` as ``1, 2 or 4``; abbreviate a long list in the middle."""
    words = [str(value) for value in values]
    if len(words) > 8:
        words = [*words[:4], "...", *words[-3:]]
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"
