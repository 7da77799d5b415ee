"""Resolve the degrees of a layout, and suggest valid numbers."""

from __future__ import annotations

import math
from dataclasses import dataclass

from weft.config.axes import AXES, BATCH_AXES, MESSAGE_ORDER, SEQUENCE_AXES, SHARD_AXES
from weft.config.errors import ConfigErrors
from weft.config.schema import ParallelSection
from weft.planning.placement import DEGREE_KEYS, count_ranks

# In remedies: the number of ranks, on one node or on several.
NPROC, RANKS = "run.nproc_per_node=", "run.nodes times run.nproc_per_node = "


@dataclass(frozen=True)
class ParallelDims:
    """Ranks along each axis of the mesh."""

    pp: int
    dp_replicate: int
    dp_shard: int
    cp: int
    tp: int
    ep: int = 1  # splits the dp_shard x cp ranks, and those of tp if experts are whole
    experts_without_tp: bool = False  # parallel.etp=1

    @property
    def axis_sizes(self) -> dict[str, int]:
        """Ranks along each axis of the mesh."""
        return {axis: getattr(self, axis) for axis in AXES}

    @property
    def dp_size(self) -> int:
        """Data-parallel ranks, which read different sequences."""
        return count_ranks(self.axis_sizes, BATCH_AXES)

    @property
    def sequence_shards(self) -> int:
        """Ranks that share the tokens of a sequence through the whole model."""
        return count_ranks(self.axis_sizes, SEQUENCE_AXES)

    @property
    def fsdp_size(self) -> int:
        """Ranks that FSDP shards a parameter over: dp_shard x cp."""
        return count_ranks(self.axis_sizes, SHARD_AXES)

    @property
    def etp(self) -> int:
        """Ranks that split an expert."""
        return 1 if self.experts_without_tp else self.tp

    @property
    def world_size(self) -> int:
        """Ranks of the mesh."""
        return count_ranks(self.axis_sizes)


def resolve_degrees(
    errors: ConfigErrors,
    parallel: ParallelSection,
    world_size: int,
    num_nodes: int = 1,
    max_ranks: int | None = None,
) -> ParallelDims:
    """Return the degrees; ``dp_shard = "fit"`` takes all remaining ranks.

    If there are errors, the degrees are the nearest that other rules can check.  ``max_ranks``:
    ranks that the nodes can have; no remedy names more.
    """
    depends = ("run.nproc_per_node", *DEGREE_KEYS)
    unit = parallel.ranks_per_shard
    is_automatic = isinstance(parallel.dp_shard, str)
    dp_shard = (
        max(1, world_size // unit) if isinstance(parallel.dp_shard, str) else parallel.dp_shard
    )
    degrees = {name: getattr(parallel, name) for name in MESSAGE_ORDER}
    above_one = {name: degree for name, degree in degrees.items() if degree > 1}
    if is_automatic and world_size % unit:
        name = next(iter(above_one))
        others = " and ".join(f"{other}={n}" for other, n in list(above_one.items())[1:])
        times = f"times {others} ({unit} in all) " if others else ""
        rest = unit // above_one[name]
        choices = []
        if world_size % rest == 0:
            choices.append(format_choices(divisors(world_size // rest)))
        if max_ranks is None or unit <= max_ranks:
            choices.append(f"{format_ranks([unit], num_nodes)} or a multiple of {unit}")
        remedy = f"use {', or '.join(choices)}" if choices else "use smaller degrees"
        rule = f"{times}does not divide the {world_size} ranks"
        errors.add(f"parallel.{name}", rule, remedy, depends)
    elif not is_automatic and unit * dp_shard != world_size:
        valid = f"use {world_size // unit}, or auto" if world_size % unit == 0 else "use auto"
        others = ", ".join(f"{other}={n}" for other, n in above_one.items())
        rule = f"times {others} " * bool(others) + f"is not equal to the {world_size} ranks"
        remedy = valid
        if max_ranks is None or unit * dp_shard <= max_ranks:
            remedy += f", or {format_ranks([unit * dp_shard], num_nodes)}"
        elif world_size % unit:
            remedy = f"{valid}, and smaller degrees than {others}"
        errors.add("parallel.dp_shard", rule, remedy, depends)
    sizes = {**degrees, "dp_shard": dp_shard}
    return ParallelDims(**sizes, ep=parallel.ep, experts_without_tp=parallel.has_experts_without_tp)


def divisors(n: int, at_most: int | None = None) -> list[int]:
    """Return the divisors of ``n`` in ascending order, up to ``at_most``."""
    small = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    all_divisors = sorted({*small, *(n // d for d in small)})
    return [d for d in all_divisors if d <= (at_most or n)]


def possible_degrees(name: str, degrees: ParallelDims, num_ranks: int, at_most: int) -> list[int]:
    """Return values of a degree that divide ``num_ranks`` with the other ones.

    ``dp_shard`` is not one of them: it takes the remaining ranks.
    """
    unit = degrees.world_size // degrees.dp_shard
    rest = unit // int(getattr(degrees, name))
    return [] if num_ranks % rest else divisors(num_ranks // rest, at_most)


def nearest_divisors(n: int, unit: int) -> list[int]:
    """Return the nonzero multiples of ``unit`` nearest to ``n``, one on each side."""
    below = n // unit * unit
    return [m for m in (below, below + unit) if m]


def format_ranks(world_sizes: list[int], num_nodes: int) -> str:
    """Format numbers of ranks as the key that sets them."""
    return f"{RANKS if num_nodes > 1 else NPROC}{format_choices(world_sizes)}"


def format_choices(values: list[int]) -> str:
    """Format ``[1, 2, 4]`` as ``1, 2 or 4``; abbreviate a long list in the middle."""
    words = [str(value) for value in values]
    if len(words) > 8:
        words = [*words[:4], "...", *words[-3:]]
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"
