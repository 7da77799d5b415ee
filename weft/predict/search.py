"""SEARCH: the fastest layout that fits, among all that there are.

Layouts, microbatches, schedules, recomputation and precision are enumerated; a quick analytic twin
(`weft.predict.twin`) reckons memory and time of each; the best are planned by `resolve`, which
knows every rule, and traced, which knows the code.  What is told is the traced figure.

Each one that loses keeps why: it is not allowed, it needs too much memory, or it is slower.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

from weft.job import InvalidJob, Job, Problem
from weft.job import replace as replace_sections
from weft.plan.analytic import Layout, Sizes, memory_of, step_of
from weft.plan.cost import step_seconds
from weft.plan.devices import device_called
from weft.plan.layout import divisors
from weft.plan.resolve import Machine, Plan, resolve
from weft.plan.timetable import SCHEDULES
from weft.predict.forecast import OUTSIDE, Forecast, forecast, hardware_of
from weft.predict.twin import layout_of, sizes_of

# So many of the best are traced.
TRACED = 6
# Of the capacity, what the twin's memory may be beyond it for a layout to be traced all the same.
MARGIN = 1.1
MICROBATCHES = (1, 2, 4, 8)
REMAT: tuple[Literal["none", "selective", "full"], ...] = ("none", "selective", "full")
SCHEDULES_TRIED = ("1F1B", "Interleaved1F1B", "ZBVZeroBubble")
STAGES_PER_RANK = (2, 4)

Changes = dict[str, dict[str, Any]]


@dataclass(frozen=True)
class Candidate:
    """``changes``: what makes the recipe's job it.  ``seconds`` and ``bytes``: the twin's."""

    changes: Changes
    layout: Layout
    seconds: float
    bytes: float


@dataclass(frozen=True)
class Loser:
    """``reason`` is of few kinds, to be counted; ``detail`` is this one's."""

    candidate: Candidate
    reason: str
    detail: str


@dataclass(frozen=True)
class Found:
    """The best first."""

    best: tuple[tuple[Candidate, Job, Forecast], ...]
    losers: tuple[Loser, ...]
    considered: int

    def to_dict(self) -> dict[str, Any]:
        best = [
            {"layout": named(candidate.layout), "changes": candidate.changes} | seen.to_dict()
            for candidate, _, seen in self.best
        ]
        lost = [
            {"layout": named(loser.candidate.layout), "why": loser.reason, "detail": loser.detail}
            for loser in self.losers
        ]
        return {"considered": self.considered, "best": best, "lost": lost}


def search(
    job: Job, plan: Plan, machine: Machine, tell: Callable[[str], None] = lambda text: None
) -> Found:
    """Search for the job's model and global batch on a machine.

    Args:
        plan: of the job as it is; what its layout says is what is searched over.
        tell: hears of the progress.

    Raises:
        InvalidJob: if nothing is known of the device, or the twin does not know the model.
    """
    device = device_called(machine.device_name, machine.memory_bytes)
    if device is None or plan.device == "cpu":
        rule, remedy = "has no device that is known", "use --cluster, such as 64x8xH100"
        raise InvalidJob([Problem("--search", machine.device_name or "CPU", rule, remedy)])
    sizes = sizes_of(plan)
    base = layout_of(job, plan, device)
    if sizes is None:
        rule, remedy = "only layouts of Llama can be searched", "plan single ones"
        raise InvalidJob([Problem("model.kind", job.model.kind, rule, remedy)])
    if base is None:
        rule, remedy = "comes from a file, which fits one layout only", "use the name of a schedule"
        raise InvalidJob([Problem("parallel.schedule", job.parallel.schedule, rule, remedy)])
    hardware = hardware_of(plan, device)
    capacity = machine.memory_bytes
    room = None if capacity is None else MARGIN * (capacity - OUTSIDE)
    fitting: list[Candidate] = []
    losers: list[Loser] = []
    for number, (changes, layout) in enumerate(layouts(job, sizes, base, plan)):
        if number % 500 == 0:
            tell(f"{number:,} layouts reckoned")
        needed = sum(memory_of(sizes, layout).values())
        candidate = Candidate(changes, layout, 0.0, needed)
        if room is not None and needed > room:
            losers.append(Loser(candidate, "memory", f"needs {needed / 2**30:.1f} GiB"))
            continue
        try:
            seconds = step_seconds(step_of(sizes, layout), hardware).total()
        except ValueError as error:
            losers.append(Loser(candidate, "schedule", str(error)))
            continue
        fitting.append(replace(candidate, seconds=seconds))
    fitting.sort(key=lambda candidate: candidate.seconds)
    considered = len(fitting) + len(losers)
    best: list[tuple[Candidate, Job, Forecast]] = []
    remaining = iter(fitting)
    for candidate in remaining:
        if len(best) == TRACED:
            fastest = best[0][0].seconds
            for slower in (candidate, *remaining):
                gap = f"{slower.seconds / fastest - 1:.0%} slower, by arithmetic"
                losers.append(Loser(slower, "slower", gap))
            break
        changed = replace_sections(job, **candidate.changes)
        try:
            its_plan = resolve(changed, machine)
        except InvalidJob as error:
            losers.append(Loser(candidate, "rule", str(error.problems[0])))
            continue
        tell(f"tracing {len(best) + 1} of {TRACED}: {named(candidate.layout)}")
        seen = forecast(changed, its_plan, machine, device)
        if seen.fits is False:
            detail = f"needs {seen.needed / 2**30:.1f} GiB, as traced"
            losers.append(Loser(candidate, "memory", detail))
            continue
        best.append((candidate, changed, seen))
    best.sort(key=lambda found: found[2].step_seconds or 0.0)
    return Found(tuple(best), tuple(losers), considered)


def layouts(job: Job, sizes: Sizes, base: Layout, plan: Plan) -> Iterator[tuple[Changes, Layout]]:
    """Everything that could be; what breaks a rule of numbers alone is left out."""
    world, node = plan.world_size, plan.local_world_size
    for tp in divisors(node):
        if sizes.kv_heads % tp or sizes.vocab % tp:
            continue
        for pp in divisors(world // tp, sizes.layers):
            for cp in context_degrees(job, world // (tp * pp)):
                dp = world // (tp * pp * cp)
                if world % (tp * pp * cp) or job.train.global_batch % dp:
                    continue
                for dp_shard in {dp, max(1, min(dp, node // (tp * cp)))}:
                    if dp % dp_shard:
                        continue
                    sides = {
                        "tp": tp,
                        "pp": pp,
                        "cp": cp,
                        "dp_shard": dp_shard,
                        "dp_replicate": dp // dp_shard,
                    }
                    yield from of_mesh(job, sizes, base, sides)


def context_degrees(job: Job, most: int) -> Iterable[int]:
    """Rows are cut where they are long."""
    cuts = [1]
    while job.train.seq_len // (2 * cuts[-1]) >= 8192 and 2 * cuts[-1] <= most:
        cuts.append(2 * cuts[-1])
    return cuts


def of_mesh(
    job: Job, sizes: Sizes, base: Layout, sides: dict[str, int]
) -> Iterator[tuple[Changes, Layout]]:
    """Microbatches, schedules, recomputation and precision of one mesh."""
    pp, dp = sides["pp"], sides["dp_shard"] * sides["dp_replicate"]
    local = job.train.global_batch // dp
    shards = sides["dp_shard"] * sides["cp"]
    for rows in MICROBATCHES:
        if local % rows:
            continue
        for schedule, per_rank in schedules(pp, sizes.layers, local // rows):
            if schedule == "ZBVZeroBubble" and job.compile.enable:
                continue  # its backward in halves cannot be compiled
            for remat in REMAT:
                layout = replace(
                    base,
                    tp=sides["tp"],
                    cp=sides["cp"],
                    pp=pp,
                    dp_shard=sides["dp_shard"],
                    dp_replicate=sides["dp_replicate"],
                    microbatch=rows,
                    schedule=schedule,
                    stages_per_rank=per_rank,
                    remat=remat,
                    remat_part=1.0,
                    zero=0 if shards == 1 else 2 if pp > 1 else 3,
                    kept_bytes=0.0,
                    tp_overlap=base.tp_overlap if sides["tp"] > 1 else "exposed",
                )
                changes: Changes = {
                    "parallel": sides | {"reshard_after_forward": "auto"},
                    "pipeline": {"stages_per_rank": per_rank if per_rank > 1 else "auto"},
                    "train": {"microbatch": rows},
                    "remat": {"kind": remat, "every": 1},
                }
                if pp > 1:
                    changes["parallel"] |= {"schedule": schedule}
                yield changes, layout


def schedules(pp: int, layers: int, microbatches: int) -> Iterator[tuple[str, int]]:
    if pp == 1:
        yield "1F1B", 1
        return
    for name in SCHEDULES_TRIED:
        schedule = SCHEDULES[name]
        choices = (schedule.stages_per_rank,) if schedule.stages_per_rank else STAGES_PER_RANK
        for per_rank in choices:
            stages = pp * per_rank
            if stages <= layers and schedule.allows(microbatches, pp, stages):
                yield name, per_rank


def named(layout: Layout) -> str:
    """A layout in a line."""
    axes = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
    mesh = " x ".join(f"{a} {getattr(layout, a)}" for a in axes if getattr(layout, a) > 1)
    parts = [mesh or "one rank", f"microbatch {layout.microbatch}"]
    if layout.pp > 1:
        each = f" x {layout.stages_per_rank}" if layout.stages_per_rank > 1 else ""
        parts.append(f"{layout.schedule}{each}")
    parts.append(f"remat {layout.remat}")
    return ", ".join(parts)


def reasons(losers: Iterable[Loser]) -> list[str]:
    """Why the others lost, in a line for each kind, with the nearest miss."""
    texts = {
        "memory": "need more memory than there is",
        "rule": "are not possible",
        "schedule": "have no order for so few microbatches",
        "slower": "are slower",
    }
    counts: Counter[str] = Counter()
    nearest: dict[str, Loser] = {}
    for loser in losers:
        counts[loser.reason] += 1
        kept = nearest.setdefault(loser.reason, loser)
        measure = "bytes" if loser.reason == "memory" else "seconds"
        if getattr(loser.candidate, measure) < getattr(kept.candidate, measure):
            nearest[loser.reason] = loser
    return [
        f"{count:,} {texts[reason]}; the nearest, {named(nearest[reason].candidate.layout)}: "
        f"{nearest[reason].detail}"
        for reason, count in counts.most_common()
    ]
