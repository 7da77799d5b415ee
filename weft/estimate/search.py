"""The fastest layout that fits, among all that there are.

Meshes, microbatches, schedules, recomputation and precision are enumerated.  An analytic twin
(`weft.estimate.plan_to_analytic`) reckons memory and time of each in a millisecond, which leaves those that may
fit, in the order of their time.  From there the best are planned by `resolve`, which knows every
rule, and traced, which knows the code: what is told of memory and time is what was traced.  If what
is traced does not fit, others of its kind are taken to need as much more, and are not
traced where that is too much.  At most `MOST_TRACED` are traced, and of the other precision, below,
as large a part of that.

*Precision* is the recipe's own, and beside it float8 where the device multiplies so (or bfloat16
where the recipe has float8).  That changes what is computed, not only how fast: such layouts are in
the ranking, with their precision in the name, but they take no place from those that compute what
the recipe asks for, and it is the best of the latter that is written as a recipe.

Each one that loses keeps why: a rule, memory, or time.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from datetime import date
from typing import Any, Literal

import weft
from weft.config.errors import ConfigError, InvalidConfig
from weft.config.schema import Job, to_toml
from weft.config.schema import replace as replace_sections
from weft.estimate.analytic import memory_of, step_of
from weft.estimate.cost import step_seconds
from weft.estimate.decoder import Layout, Sizes
from weft.estimate.forecast import OUTSIDE, Forecast, forecast, hardware_of
from weft.estimate.plan_to_analytic import layout_of, sizes_of
from weft.plan.devices import GIB
from weft.plan.float8_rules import supports_float8
from weft.plan.layout import divisors
from weft.plan.pipeline_schedule import SCHEDULES
from weft.plan.placement import AXES
from weft.plan.resolve import Machine, Plan, resolve

# So many that fit are traced in the recipe's precision and in the other one; and so many at most in
# the recipe's, whether they fit or not.
TRACED, TRACED_OTHERWISE, MOST_TRACED = 6, 2, 14
# Of the capacity, what the twin's memory may be beyond it for a layout to be traced all the same.
MARGIN = 1.1
# Processes that trace; each takes half a GiB.
WORKERS = 2
MICROBATCHES = (1, 2, 4, 8, 16)
REMAT: tuple[Literal["none", "selective", "full"], ...] = ("none", "selective", "full")
SCHEDULES_TRIED = ("1F1B", "Interleaved1F1B", "ZBVZeroBubble")
STAGES_PER_RANK = (2, 4)

Changes = dict[str, dict[str, Any]]


@dataclass(frozen=True)
class Candidate:
    """``changes``: what makes the recipe's job it.  ``seconds`` and ``bytes``: the twin's."""

    changes: Changes
    layout: Layout
    seconds: float = 0.0
    bytes: float = 0.0

    @property
    def precision(self) -> str:
        return str(self.changes["precision"]["float8"])

    @property
    def kind(self) -> object:
        """Those that need more or less than the twin says need it alike."""
        layout = self.layout
        stages = layout.schedule, layout.pp > 1, layout.stages_per_rank
        return *stages, layout.tp > 1, layout.cp > 1, layout.activation_checkpoint


@dataclass(frozen=True)
class Loser:
    """``reason`` is of few kinds, to be counted; ``detail`` is this one's."""

    candidate: Candidate
    reason: Literal["memory", "rule", "trace", "slower", "untried"]
    detail: str


@dataclass(frozen=True)
class Refused:
    """What cannot be traced: see `Loser`."""

    reason: Literal["rule", "trace"]
    detail: str


@dataclass(frozen=True)
class Traced:
    """A candidate, and what its trace says."""

    candidate: Candidate
    job: Job
    seen: Forecast


@dataclass(frozen=True)
class SearchResult:
    """``best``: those that were traced and fit, the fastest first, in any precision; ``winner``:
    the first of them in the recipe's own."""

    best: tuple[Traced, ...]
    losers: tuple[Loser, ...]
    considered: int
    precision: str

    @property
    def winner(self) -> Traced | None:
        own = (each for each in self.best if each.candidate.precision == self.precision)
        return next(own, None)

    def to_dict(self) -> dict[str, Any]:
        best = [
            {"layout": named(each.candidate.layout), "changes": each.candidate.changes}
            | {"precision": each.candidate.precision, "winner": each is self.winner}
            | each.seen.to_dict()
            for each in self.best
        ]
        lost = [
            {"layout": named(loser.candidate.layout), "why": loser.reason, "detail": loser.detail}
            for loser in self.losers
        ]
        return {"considered": self.considered, "best": best, "lost": lost}


def search(
    job: Job, plan: Plan, machine: Machine, tell: Callable[[str], None] = lambda text: None
) -> SearchResult:
    """Search for the job's model and global batch on a machine.

    Args:
        plan: of the job as it is; what its layout says is what is searched over.
        tell: hears of the progress.

    Raises:
        InvalidConfig: if nothing is known of the device, or the twin does not know the model.
    """
    device = machine.spec
    if device is None or plan.device == "cpu":
        rule, remedy = "has no device that is known", "use --cluster, such as 64x8xH100"
        raise InvalidConfig([ConfigError("--search", machine.device_name or "CPU", rule, remedy)])
    sizes = sizes_of(plan)
    base = layout_of(job, plan, device)
    if sizes is None:
        rule, remedy = (
            "only layouts of a Llama that is trained whole can be searched",
            "plan single ones",
        )
        raise InvalidConfig([ConfigError("model.kind", job.model.kind, rule, remedy)])
    if base is None:
        rule, remedy = "comes from a file, which fits one layout only", "use the name of a schedule"
        raise InvalidConfig([ConfigError("pipeline.schedule", job.pipeline.schedule, rule, remedy)])
    hardware = hardware_of(plan, device)
    room = None if machine.memory_bytes is None else machine.memory_bytes - OUTSIDE["cuda"]
    possible: list[Candidate] = []
    losers: list[Loser] = []
    with ExitStack() as stack:
        trace = tracer(stack)
        for number, candidate in enumerate(candidates(job, sizes, base, plan, machine)):
            if number % 500 == 0:
                tell(f"{number:,} layouts reckoned")
            layout = candidate.layout
            if why := impossible(job, layout):
                losers.append(Loser(candidate, "rule", why))
                continue
            try:
                needed = sum(memory_of(sizes, layout).values())
                seconds = step_seconds(step_of(sizes, layout), hardware).total()
            except ValueError as error:
                losers.append(Loser(candidate, "rule", str(error)))
                continue
            possible.append(replace(candidate, seconds=seconds, bytes=needed))
        own = job.precision.float8
        best: list[Traced] = []
        for precision in sorted({c.precision for c in possible}, key=lambda name: name != own):
            some = [c for c in possible if c.precision == precision]
            wanted = TRACED
            if precision != own and best:  # only for what it gains
                fastest = min(each.candidate.seconds for each in best)
                losers += [slower_than(fastest, c) for c in some if c.seconds >= fastest]
                some = [c for c in some if c.seconds < fastest]
                wanted = TRACED_OTHERWISE
            found, lost = trace_best(job, machine, some, room, wanted, trace, tell)
            best += found
            losers += lost
    best.sort(key=lambda each: each.seen.step_seconds or 0.0)
    return SearchResult(tuple(best), tuple(losers), len(best) + len(losers), own)


def trace_best(
    job: Job,
    machine: Machine,
    some: Sequence[Candidate],
    room: float | None,
    wanted: int,
    trace: Callable[[Sequence[tuple[Job, Machine]]], Iterable[Forecast | Refused]],
    tell: Callable[[str], None],
) -> tuple[list[Traced], list[Loser]]:
    """Of candidates of one precision, the fastest ``wanted`` that fit, and why the others do not.

    Args:
        room: bytes of a device that there are; None: any number.
    """
    best: list[Traced] = []
    losers: list[Loser] = []
    more: dict[object, float] = {}  # of what the twin says, by kind, what was traced
    tried, limit = 0, MOST_TRACED * wanted // TRACED
    left = sorted(some, key=lambda candidate: candidate.seconds)
    if room is not None:
        fitting = [c for c in left if c.bytes <= MARGIN * room]
        # Where the twin says that nothing fits, the smallest is traced to be sure.
        fitting = fitting or sorted(left, key=lambda candidate: candidate.bytes)[:1]
        kept = {id(c) for c in fitting}
        losers += [Loser(c, "memory", _gib(c.bytes)) for c in left if id(c) not in kept]
        left = fitting
    while left and len(best) < wanted and tried < limit:
        batch: list[Candidate] = []
        while left and len(batch) < min(WORKERS, wanted - len(best), limit - tried):
            candidate = left.pop(0)
            needed = candidate.bytes * more.get(candidate.kind, 0.0)
            if room is not None and needed > room:
                detail = f"{_gib(needed)}, as traced neighbours show"
                losers.append(Loser(candidate, "memory", detail))
            else:
                batch.append(candidate)
        jobs = [replace_sections(job, **candidate.changes) for candidate in batch]
        if batch:
            more_than_one = f" and {len(batch) - 1} more" if len(batch) > 1 else ""
            tell(f"{len(best)} of {wanted} found; tracing {named(batch[0].layout)}{more_than_one}")
        tried += len(batch)
        seen = trace([(changed, machine) for changed in jobs])
        for candidate, changed, result in zip(batch, jobs, seen, strict=True):
            if isinstance(result, Refused):
                losers.append(Loser(candidate, result.reason, result.detail))
            elif result.fits is False:
                traced = result.needed - result.outside
                more[candidate.kind] = max(more.get(candidate.kind, 1.0), traced / candidate.bytes)
                losers.append(Loser(candidate, "memory", f"{_gib(traced)}, as traced"))
            else:
                best.append(Traced(candidate, changed, result))
    for slower in left:
        if best:
            losers.append(slower_than(min(each.candidate.seconds for each in best), slower))
        else:
            losers.append(Loser(slower, "untried", f"{tried} traced before it do not fit"))
    return best, losers


def slower_than(fastest: float, candidate: Candidate) -> Loser:
    """A candidate that lost by the arithmetic of its step."""
    gap = candidate.seconds / fastest - 1
    return Loser(candidate, "slower", f"{gap:.0%} slower, by arithmetic")


def _gib(size: float) -> str:
    return f"needs {size / GIB:.1f} GiB"


# --------------------------------------------------------------------------- tracing


def tracer(
    stack: ExitStack,
) -> Callable[[Sequence[tuple[Job, Machine]]], Iterable[Forecast | Refused]]:
    """What traces several jobs at once, each in a process of its own: torch's fake world is one a
    process.  They start now, and end with ``stack``."""
    if (os.cpu_count() or 1) == 1:
        return lambda tasks: [traced(task) for task in tasks]
    pool = ProcessPoolExecutor(WORKERS, multiprocessing.get_context("spawn"), _begin)
    stack.callback(pool.shutdown, cancel_futures=True)
    for _ in range(WORKERS):
        pool.submit(int)
    return lambda tasks: pool.map(traced, tasks)


def _begin() -> None:
    """In a new process: end with the one that started it, and without words when interrupted."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def follow() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()


def traced(task: tuple[Job, Machine]) -> Forecast | Refused:
    """The forecast of a job, or why it has none: nothing is raised."""
    job, machine = task
    try:
        return forecast(job, resolve(job, machine), machine, machine.spec)
    except InvalidConfig as error:
        return Refused("rule", str(error.problems[0]))
    except Exception as error:  # one that torch cannot run is no reason to lose all the others
        return Refused("trace", f"{type(error).__name__}: {error}".partition("\n")[0])


# --------------------------------------------------------------------------- what there is


def candidates(
    job: Job, sizes: Sizes, base: Layout, plan: Plan, machine: Machine
) -> Iterator[Candidate]:
    """Everything that could be; what breaks a rule of numbers alone is left out."""
    world, node = plan.world_size, plan.local_world_size
    for tp in divisors(node):
        if sizes.kv_heads % tp or sizes.vocab % tp:
            continue
        for pp in divisors(world // tp, sizes.layers):
            for cp in context_degrees(job, world // (tp * pp)):
                dp = world // (tp * pp * cp)
                if world % (tp * pp * cp) or job.train.global_batch_size % dp:
                    continue
                for dp_shard in sorted({dp, max(1, min(dp, node // (tp * cp)))}):
                    if dp % dp_shard:
                        continue
                    mesh = replace(
                        base, tp=tp, pp=pp, cp=cp, dp_shard=dp_shard, dp_replicate=dp // dp_shard
                    )
                    for precision in precisions(job, plan, machine):
                        yield from of_mesh(job, sizes, mesh, precision)


def context_degrees(job: Job, most: int) -> Iterable[int]:
    """Rows are cut where they are long."""
    cuts = [1]
    while job.train.seq_len // (2 * cuts[-1]) >= 8192 and 2 * cuts[-1] <= most:
        cuts.append(2 * cuts[-1])
    return cuts


def precisions(job: Job, plan: Plan, machine: Machine) -> list[str]:
    """The recipe's ``precision.float8``, and what else there is."""
    own = job.precision.float8
    if own != "none":
        return [own, "none"]
    able = plan.compute_dtype == "bfloat16" and supports_float8("tensorwise", machine.capability)
    return ["none", "tensorwise"] if able else ["none"]


def of_mesh(job: Job, sizes: Sizes, mesh: Layout, float8: str) -> Iterator[Candidate]:
    """Microbatches, schedules and recomputation of one mesh in one precision."""
    local = job.train.global_batch_size // mesh.dp
    shards = mesh.dp_shard * mesh.cp
    for rows in MICROBATCHES:
        if local % rows:
            continue
        for schedule, per_rank in schedules(mesh.pp, sizes.layers, local // rows):
            for activation_checkpoint in REMAT:
                layout = replace(
                    mesh,
                    microbatch=rows,
                    schedule=schedule,
                    stages_per_rank=per_rank,
                    precision="bf16" if float8 == "none" else "float8",
                    activation_checkpoint=activation_checkpoint,
                    activation_checkpoint_part=1.0,
                    zero=0 if shards == 1 else 2 if mesh.pp > 1 else 3,
                    kept_bytes=0.0,
                    tp_overlap=mesh.tp_overlap if mesh.tp > 1 else "exposed",
                )
                parallel: dict[str, Any] = {axis: getattr(mesh, axis) for axis in AXES}
                parallel |= {"reshard_after_forward": "auto"}
                parallel |= {"async_tp": job.parallel.async_tp and mesh.tp > 1}
                pipeline: dict[str, Any] = {
                    "stages_per_rank": per_rank if per_rank > 1 else "auto",
                    "layers_per_stage": (),
                }
                if mesh.pp > 1:
                    pipeline |= {"schedule": schedule}
                changes: Changes = {
                    "parallel": parallel,
                    "pipeline": pipeline,
                    "train": {"microbatch_size": rows},
                    "activation_checkpoint": {"mode": activation_checkpoint, "every_n_layers": 1},
                    "precision": {"float8": float8},
                }
                yield Candidate(changes, layout)


def schedules(pp: int, layers: int, microbatches: int) -> Iterator[tuple[str, int]]:
    """Schedules that the search tries, with as many stages a rank as they allow."""
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


def impossible(job: Job, layout: Layout) -> str:
    """Why a schedule whose backward passes come in halves is out of the question."""
    if layout.pp == 1 or not SCHEDULES[layout.schedule].splits_backward:
        return ""
    if job.compile.enable:
        return f"{layout.schedule} cannot be compiled"
    if layout.activation_checkpoint != "none":
        return f"{layout.schedule} computes anew for inputs and for each weight"
    if layout.precision != "bf16":
        return f"{layout.schedule} multiplies twice in float8"
    return ""


# --------------------------------------------------------------------------- what is told


def named(layout: Layout) -> str:
    """A layout in a line."""
    mesh = " x ".join(f"{a} {getattr(layout, a)}" for a in AXES if getattr(layout, a) > 1)
    parts = [mesh or "one rank", f"microbatch {layout.microbatch}"]
    if layout.pp > 1:
        each = f" x {layout.stages_per_rank}" if layout.stages_per_rank > 1 else ""
        parts.append(f"{layout.schedule}{each}")
    parts.append(f"activation_checkpoint {layout.activation_checkpoint}")
    if layout.precision != "bf16":
        parts.append(layout.precision)
    return ", ".join(parts)


def reasons(losers: Iterable[Loser]) -> list[str]:
    """Why the others lost, in a line for each kind, with the nearest miss."""
    texts = {
        "memory": "need more memory than there is",
        "rule": "are not possible",
        "trace": "could not be traced",
        "slower": "are slower",
        "untried": "were not traced, for faster ones do not fit",
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


def written(found: SearchResult, job: Job, recipe: str, cluster: str) -> str:
    """The winner as a recipe.

    Args:
        job: that was searched for; ``recipe``: its name; ``cluster``: as on the command line.
    """
    winner = found.winner
    assert winner is not None
    seen, plan = winner.seen, winner.seen.plan
    assert seen.step_seconds is not None
    chosen = replace_sections(winner.job, run={"cluster": cluster})
    of = "" if seen.capacity is None else f" of {seen.capacity / GIB:.0f}"
    head = [
        f"weft {weft.__version__} found this on {date.today()}, the best of {found.considered:,} "
        f"layouts on {plan.world_size:,} ranks:",
        f"weft plan {recipe} --cluster {cluster} --search",
        f"Predicted: {seen.step_seconds:.3f} s a step (within {seen.error:.0%}), "
        f"{seen.needed / GIB:.1f}{of} GiB on the fullest rank.",
        "",
    ]
    return "".join(f"# {line}".rstrip() + "\n" for line in head) + to_toml(chosen, recipe, job)
