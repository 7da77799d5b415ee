"""Which layouts are possible: degrees from what was asked, and every rule about them.

Rules are judged here, before anything is allocated, so that none is met as a shape error on some
rank of five hundred.  Each names the key, its value, the rule and a remedy.
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
    ep: int = 1  # of the shards, those that share out experts

    @property
    def sizes(self) -> dict[str, int]:
        """Ranks along each axis of the mesh."""
        return {axis: getattr(self, axis) for axis in AXES}

    @property
    def dp(self) -> int:
        """Ranks that read different rows."""
        return self.dp_replicate * self.dp_shard

    @property
    def shards(self) -> int:
        """Ranks that FSDP shards a parameter over: those of ``cp`` share it, too."""
        return self.dp_shard * self.cp

    @property
    def world(self) -> int:
        return self.dp * self.pp * self.cp * self.tp


def ranks_per_shard(parallel: ParallelSection) -> int:
    """Ranks of one shard: the product of all degrees but ``dp_shard``."""
    return parallel.pp * parallel.dp_replicate * parallel.cp * parallel.tp


def resolve_degrees(
    parallel: ParallelSection, world: int
) -> tuple[ParallelDims, list[ConfigError]]:
    """The degrees on ``world`` ranks; ``dp_shard = "fit"`` counts as all that remain here.

    With problems the degrees are the nearest that other rules can be judged by.
    """
    problems = []
    depends = ("run.nproc_per_node", *DEGREE_KEYS)
    unit = ranks_per_shard(parallel)
    automatic = isinstance(parallel.dp_shard, str)
    shard = max(1, world // unit) if isinstance(parallel.dp_shard, str) else parallel.dp_shard
    asked = {name: getattr(parallel, name) for name in ("tp", "pp", "cp", "dp_replicate")}
    above_one = {name: degree for name, degree in asked.items() if degree > 1}
    if automatic and world % unit:
        name, degree = next(iter(above_one.items()))
        others = " and ".join(f"{other} = {n}" for other, n in list(above_one.items())[1:])
        times = f"times {others} ({unit} in all) " if others else ""
        fits = format_choices(divisors(world)) if not others else ""
        ranks = f"run.nproc_per_node = {unit}" + (f" or a multiple of {unit}" if unit > 1 else "")
        remedy = f"use {fits}, or {ranks}" if fits else f"use {ranks}"
        rule = f"{times}does not divide the {world} ranks"
        problems.append(ConfigError(f"parallel.{name}", degree, rule, remedy, depends))
    elif not automatic and unit * shard != world:
        fits = f"use {world // unit}, or auto" if world % unit == 0 else "use auto"
        others = ", ".join(f"{other} = {n}" for other, n in above_one.items()) or "one replica"
        problems.append(
            ConfigError(
                "parallel.dp_shard",
                shard,
                f"times {others} is not the number of ranks, {world}",
                f"{fits}, or run.nproc_per_node = {unit * shard}",
                depends,
            )
        )
    degrees = ParallelDims(
        parallel.pp, parallel.dp_replicate, shard, parallel.cp, parallel.tp, parallel.ep
    )
    return degrees, problems


def check_layout(
    job: Job, model: Any, family: Family, degrees: ParallelDims
) -> Iterator[ConfigError]:
    """Every reason why this model cannot be laid out so; the pipeline has its own rules."""
    yield from _check_tensor_parallel(job, model, family, degrees)
    yield from _check_context_parallel(job, model, degrees)
    yield from _check_sharding(job, degrees)
    yield from _check_expert_parallel(job, model, family, degrees)
    if degrees.pp == 1 and job.pipeline.layers_per_stage:
        rule = "there is no pipeline"
        remedy = "leave it out, or use parallel.pp above 1"
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
        rule = f"the family {job.model.kind} has no SHARDING table"
        yield ConfigError("parallel.tp", tp, rule, "use 1, or give its Family one")
        return
    sizes = {field: getattr(model, field) for field in family.split_sizes}
    common = math.gcd(*sizes.values()) if sizes else 0
    kv = getattr(model, "num_kv_heads", 0)
    good = [n for n in divisors(common) if not kv or kv % n == 0 or n % kv == 0] or [1]
    for field, size in sizes.items():
        if size % tp:
            rule = f"does not divide {field} = {size} of {name}"
            if field == "vocab_size":
                more = -(-size // tp) * tp
                remedy = f"use {format_choices(good)}, or --model.vocab_size {more}"
            else:
                remedy = f"use {format_choices(good)}"
            yield ConfigError("parallel.tp", tp, rule, remedy, (f"model.{field}", "model.preset"))
    if kv and kv % tp and tp % kv:
        rule = f"is neither a divisor nor a multiple of num_kv_heads = {kv} of {name}"
        yield ConfigError(
            "parallel.tp", tp, rule, f"use {format_choices(good)}", ("model.num_kv_heads",)
        )
    local = job.train.seq_len // degrees.cp
    if parallel.sequence_parallel and local % tp:
        rule = f"does not divide over tp = {tp}" + (
            f" within cp = {degrees.cp}" if degrees.cp > 1 else ""
        )
        unit = tp * degrees.cp * _chunks_per_rank(job.parallel)
        remedy = f"use {format_choices(nearest_divisors(job.train.seq_len, unit))}, or parallel.sequence_parallel false"
        depends = ("parallel.tp", "parallel.cp")
        yield ConfigError("train.seq_len", job.train.seq_len, rule, remedy, depends)


def _check_async_tp(job: Job, degrees: ParallelDims) -> Iterator[ConfigError]:
    key = "parallel.async_tp"
    if degrees.tp == 1:
        yield ConfigError(key, True, "there is no tensor parallelism", "use parallel.tp above 1")
    if not job.compile.enable:
        rule = "torch.compile is what overlaps tensor parallelism's communication"
        yield ConfigError(key, True, rule, "use compile.enable true", ("compile.enable",))
    if not job.parallel.sequence_parallel:
        rule = "overlaps the gathers and scatters of sequence parallelism, which is off"
        yield ConfigError(key, True, rule, "use parallel.sequence_parallel true")


def _chunks_per_rank(parallel: ParallelSection) -> int:
    """Pieces of a sequence on each context-parallel rank."""
    return 2 if parallel.cp > 1 and parallel.cp_load_balance else 1


def _check_context_parallel(job: Job, model: Any, degrees: ParallelDims) -> Iterator[ConfigError]:
    cp, parallel, seq_len = degrees.cp, job.parallel, job.train.seq_len
    if cp == 1:
        return
    if not hasattr(model, "num_heads"):
        rule = f"the family {job.model.kind} tells no num_heads"
        yield ConfigError("parallel.cp", cp, rule, "use 1")
        return
    unit = cp * _chunks_per_rank(parallel)
    if seq_len % unit:
        pieces = f"into the {unit} pieces of cp = {cp}, balanced" if unit > cp else f"by cp = {cp}"
        rule = f"does not divide {pieces}"
        remedy = f"use {format_choices(nearest_divisors(seq_len, unit))}"
        yield ConfigError("train.seq_len", seq_len, rule, remedy, ("parallel.cp",))
    if parallel.cp_method == "ulysses":
        heads = model.num_heads // degrees.tp
        good = divisors(heads)
        if cp not in good:
            of = f" / tp = {degrees.tp}" if degrees.tp > 1 else ""
            rule = f"does not divide num_heads = {model.num_heads}{of} (ulysses)"
            remedy = f"use {format_choices(good)}, or parallel.cp_method ring"
            depends = ("parallel.tp", "model.num_heads")
            yield ConfigError("parallel.cp", cp, rule, remedy, depends)


def _check_sharding(job: Job, degrees: ParallelDims) -> Iterator[ConfigError]:
    parallel, shards = job.parallel, degrees.shards
    to = parallel.reshard_after_forward
    if isinstance(to, int) and shards % to:
        rule = f"does not divide the {shards} ranks that share a parameter"
        remedy = f"use {format_choices(divisors(shards))}, always or never"
        yield ConfigError("parallel.reshard_after_forward", to, rule, remedy, DEGREE_KEYS)
    elif isinstance(to, int) and degrees.tp > 1 and 1 < to < shards:
        rule = "FSDP2 cannot reshard over some of the ranks what tensor parallelism has cut"
        remedy = "use always or never"
        yield ConfigError("parallel.reshard_after_forward", to, rule, remedy, ("parallel.tp",))
    if parallel.dp_shard == "fit" and parallel.dp_replicate > 1:
        rule = "is found by dp_shard = fit"
        yield ConfigError("parallel.dp_replicate", parallel.dp_replicate, rule, "leave it out")


def _check_expert_parallel(
    job: Job, model: Any, family: Family, degrees: ParallelDims
) -> Iterator[ConfigError]:
    key, ep, parallel = "parallel.ep", degrees.ep, job.parallel
    if ep == 1:
        return
    if family.routed is None:
        rule = f"the family {job.model.kind} has no experts"
        yield ConfigError(key, ep, rule, "use 1, or --model.kind moe", ("model.kind",))
        return
    experts = model.num_experts
    good = [n for n in divisors(degrees.shards) if experts % n == 0]
    if ep not in good:
        rule = f"does not divide the {degrees.shards} ranks that share a parameter (dp_shard x cp)"
        if degrees.shards % ep == 0:
            rule = f"does not divide the {experts} experts"
        yield ConfigError(
            key, ep, rule, f"use {format_choices(good)}", (*DEGREE_KEYS, "model.num_experts")
        )
    if parallel.dp_shard == "fit":
        yield ConfigError(key, ep, "is not known to dp_shard = fit", "use a number for dp_shard")
    if job.train.world_size_invariant:
        rule, remedy = (
            "is not possible in canonical order",
            "use 1, or train.world_size_invariant false",
        )
        yield ConfigError(key, ep, rule, remedy, ("train.world_size_invariant",))
    if isinstance(to := parallel.reshard_after_forward, int) and 1 < to < degrees.shards:
        rule = "FSDP2 cannot reshard over some of the ranks what expert parallelism has cut"
        remedy = "use always or never"
        yield ConfigError("parallel.reshard_after_forward", to, rule, remedy, (key,))


# --------------------------------------------------------------------------- wording


def divisors(n: int, at_most: int | None = None) -> list[int]:
    """Divisors of ``n`` in order, none above ``at_most``."""
    small = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    every = sorted({*small, *(n // d for d in small)})
    return [d for d in every if d <= (at_most or n)]


def nearest_divisors(n: int, unit: int) -> list[int]:
    """The multiples of ``unit`` on both sides of ``n``, none of them 0."""
    below = n // unit * unit
    return [m for m in (below, below + unit) if m]


def format_choices(values: list[int]) -> str:
    """``[1, 2, 4]`` -> ``'1, 2 or 4'``; a long list is cut in the middle."""
    words = [str(value) for value in values]
    if len(words) > 8:
        words = [*words[:4], "...", *words[-3:]]
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"
