"""Fit the layout of a recipe to another number of ranks.

A recipe's degrees are for one cluster.  When ``weft plan --cluster`` names another, the number of
data-parallel shards follows it, and the global batch becomes the nearest one that they divide.  If
the other degrees do not divide its ranks, weft names the nearest layouts that the rules accept.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterator

from weft.config.axes import DEGREES
from weft.config.errors import InvalidConfig
from weft.config.schema import Job, ParallelSection, replace
from weft.planning.degrees import divisors
from weft.planning.plan import Machine
from weft.planning.resolve import resolve

# Layouts that `nearest_layouts` tries at most; each takes a few milliseconds.
MAX_TRIED = 60


def follow_ranks(job: Job, chosen: Collection[str], world_size: int) -> tuple[Job, str]:
    """Let ``parallel.dp_shard`` follow the number of ranks.

    Args:
        job: a job whose degrees may be for another number of ranks.
        chosen: keys that the user set; they stay as they are.
        world_size: number of ranks.

    Returns:
        The job, and a sentence about the change; empty if there is none.
    """
    parallel = job.parallel
    if parallel.num_ranks in (None, world_size) or "parallel.dp_shard" in chosen:
        return job, ""
    changes: dict[str, int | str] = {"dp_shard": "auto"}
    if world_size % parallel.ranks_per_shard and "parallel.dp_replicate" not in chosen:
        changes["dp_replicate"] = 1
    job = replace(job, parallel=changes)
    unit = job.parallel.ranks_per_shard
    if world_size % unit:
        return job, ""  # the degrees are an error, which `resolve` reports
    sizes = f"parallel.dp_shard={parallel.dp_shard} becomes {world_size // unit}"
    if changes.get("dp_replicate", parallel.dp_replicate) != parallel.dp_replicate:
        sizes += f" and parallel.dp_replicate={parallel.dp_replicate} becomes 1"
    return job, f"{sizes}: the recipe is for {parallel.num_ranks:,} ranks, not {world_size:,}"


def follow_batch(job: Job, machine: Machine) -> Job | None:
    """Return the job with the nearest global batch that the rules accept, if any."""
    parallel, train = job.parallel, job.train
    ranks, unit = machine.world_size or 1, parallel.pp * parallel.cp * parallel.tp
    if ranks % unit:
        return None
    dp, size = ranks // unit, 1 if train.microbatch_size == "auto" else train.microbatch_size
    microbatches = train.global_batch_size / (dp * size)
    counts = {math.floor(microbatches), math.ceil(microbatches)} - {0}
    counts |= {parallel.pp * stages for stages in (1, 2, 4)}  # schedules need as many as stages
    batches = sorted({dp * size * count for count in counts} | {dp})
    for batch in sorted(batches, key=lambda batch: abs(batch - train.global_batch_size)):
        changed = replace(job, train={"global_batch_size": batch})
        if _is_accepted(changed, machine):
            return changed
    return None


def nearest_layouts(
    job: Job, machine: Machine, count: int = 3, keeps_batch: bool = True
) -> list[Job]:
    """Return jobs with other degrees that the rules accept, the nearest first.

    Args:
        job: a job whose degrees do not suit the machine.
        machine: has the ranks.
        count: the most jobs to return.
        keeps_batch: if False, the global batch may follow the ranks.
    """
    accepted: list[Job] = []
    for degrees in itertools.islice(_list_layouts(job.parallel, machine), MAX_TRIED):
        changed = replace(job, parallel=degrees | {"dp_shard": "auto"})
        if _is_accepted(changed, machine):
            accepted.append(changed)
        elif not keeps_batch and (followed := follow_batch(changed, machine)) is not None:
            accepted.append(followed)
        if len(accepted) == count:
            break
    return accepted


def _list_layouts(parallel: ParallelSection, machine: Machine) -> Iterator[dict[str, int]]:
    """Yield degrees that divide the ranks, nearest to the recipe's first."""
    world_size = machine.world_size or 1
    tp_degrees = divisors(math.gcd(world_size, machine.local_world_size or world_size))
    found = [
        {"pp": pp, "cp": cp, "tp": tp, "ep": math.gcd(parallel.ep, world_size // (pp * etp))}
        for pp, cp, tp in itertools.product(
            divisors(world_size, 2 * parallel.pp), divisors(world_size, parallel.cp), tp_degrees
        )
        for etp in [1 if parallel.has_experts_without_tp else tp]
        if world_size % (pp * cp * tp) == 0
    ]

    def distance(degrees: dict[str, int]) -> float:
        return sum(abs(math.log2(n / getattr(parallel, name))) for name, n in degrees.items())

    for degrees in sorted(found, key=distance):
        yield degrees | {"dp_replicate": 1}


def _is_accepted(job: Job, machine: Machine) -> bool:
    try:
        resolve(job, machine)
    except InvalidConfig:
        return False
    return True


def format_degrees(parallel: ParallelSection, recipe: ParallelSection) -> str:
    """Format degrees as options, such as ``--parallel.pp 4 --parallel.tp 8``.

    Args:
        parallel: the degrees.
        recipe: those of the recipe; a degree of 1 is left out if it is 1 there, too.
    """
    names = [n for n in DEGREES if n != "dp_shard"]
    changed = [n for n in names if max(getattr(parallel, n), getattr(recipe, n)) > 1]
    options = [f"--parallel.{name} {getattr(parallel, name)}" for name in changed]
    return " ".join([*options, "--parallel.dp_shard auto"])
