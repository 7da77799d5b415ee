"""Search for the fastest layout that fits.

The search enumerates meshes, microbatch sizes, schedules, recomputation and precision.  Formulas
(`weft.estimate.analytic`) estimate memory and time of each in a millisecond, and leave those that
may fit, sorted by time.  `resolve` plans the best of them, and a trace predicts them; the search
reports traced numbers only.  If a traced layout does not fit, similar ones are assumed to need as
much more, and are skipped if that is too much.  At most `MAX_TRACED` layouts are traced, and
proportionally fewer in the other precision.

*Precision* is the recipe's, and also float8 if the device supports it (or bfloat16 if the recipe
has float8).  The other precision changes the computed numbers, not only the speed.  Such layouts
are in the ranking, marked by their precision.  They take no place from layouts in the recipe's
precision, and the winner is the best of the latter.

Every rejected layout has a reason: a rule, memory, or time.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import shlex
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from datetime import date
from typing import Any, Literal

from weft.config.errors import ConfigError, InvalidConfig
from weft.config.schema import Job
from weft.config.schema import replace as replace_sections
from weft.config.writer import to_toml
from weft.estimate.advice import can_use_float8
from weft.estimate.analytic import DecoderFormulas, supports_formulas
from weft.estimate.cost import build_hardware
from weft.estimate.forecast import OUTSIDE_ALLOCATOR, Forecast, forecast
from weft.planning.degrees import ParallelDims, divisors
from weft.planning.devices import GIB, Device, find_device, linked_devices
from weft.planning.pipeline_schedule import SCHEDULES
from weft.planning.plan import Machine, PipelinePlan, Plan, Stage
from weft.planning.resolve import resolve
from weft.planning.sharding import resolve_reshard
from weft.version import __version__

# Fitting layouts to trace in the recipe's precision and in the other one; the most to trace in the
# recipe's, fitting or not.
TRACED_OWN, TRACED_OTHER, MAX_TRACED = 6, 2, 14
# Estimated memory, relative to the capacity, up to which a layout is traced.
MARGIN = 1.1
# Tracing processes; each needs half a GiB.
WORKERS = 2
MICROBATCHES = (1, 2, 4, 8, 16)
CHECKPOINT_MODES: tuple[Literal["none", "selective", "full"], ...] = ("none", "selective", "full")
SCHEDULES_TRIED = ("1F1B", "Interleaved1F1B", "ZBVZeroBubble")
STAGES_PER_RANK = (2, 4)

Changes = dict[str, dict[str, Any]]


@dataclass(frozen=True)
class Candidate:
    """A layout with its estimated time and memory.

    ``changes`` of the recipe's job; ``plan``: of the changed job, but without the costs of its
    pipeline stages, which take `resolve` a tenth of a second.
    """

    changes: Changes
    plan: Plan
    seconds: float = 0.0
    memory_bytes: float = 0.0

    @property
    def precision(self) -> str:
        """Value of ``precision.float8``."""
        return self.plan.float8

    @property
    def memory_class(self) -> object:
        """Key of candidates whose memory estimates have similar errors."""
        plan = self.plan
        stages = plan.schedule_name, plan.pp > 1, plan.stages_per_rank
        return *stages, plan.tp > 1, plan.cp > 1, plan.activation_checkpoint.mode


@dataclass(frozen=True)
class RejectedCandidate:
    """A rejected candidate; ``reason`` is a category, ``detail`` is specific."""

    candidate: Candidate
    reason: Literal["memory", "rule", "trace", "slower", "untried"]
    detail: str


@dataclass(frozen=True)
class TracedCandidate:
    """A candidate and its traced prediction."""

    candidate: Candidate
    prediction: Forecast


@dataclass(frozen=True)
class SearchResult:
    """Traced layouts that fit, fastest first, and rejected ones.

    ``precision``: the recipe's.
    """

    best: tuple[TracedCandidate, ...]
    rejected: tuple[RejectedCandidate, ...]
    num_considered: int
    precision: str

    @property
    def winner(self) -> TracedCandidate | None:
        """The fastest layout in the recipe's precision, if any."""
        own = (each for each in self.best if each.candidate.precision == self.precision)
        return next(own, None)

    def to_dict(self) -> dict[str, Any]:
        """Return the best and the rejected layouts as JSON types."""
        best = [
            {"layout": describe_layout(each.candidate.plan), "changes": each.candidate.changes}
            | {"precision": each.candidate.precision, "winner": each is self.winner}
            | each.prediction.to_dict()
            for each in self.best
        ]
        lost = [
            {"layout": describe_layout(item.candidate.plan)}
            | {"why": item.reason, "detail": item.detail}
            for item in self.rejected
        ]
        return {"considered": self.num_considered, "best": best, "lost": lost}


def search(
    plan: Plan, machine: Machine, log: Callable[[str], None] = lambda text: None
) -> SearchResult:
    """Search layouts of the job's model and global batch size on a machine.

    Args:
        plan: decides model and global batch size.
        machine: target machine; its device must have a known speed.
        log: receives progress messages.

    Raises:
        InvalidConfig: if the device or the model is not supported.
    """
    device = searched_device(plan, machine)
    available_bytes = (
        None if machine.memory_bytes is None else machine.memory_bytes - OUTSIDE_ALLOCATOR
    )
    by_precision: dict[str, list[Candidate]] = {}
    best: list[TracedCandidate] = []
    rejected: list[RejectedCandidate] = []
    with ExitStack() as stack:
        trace = open_tracer(stack)
        for index, candidate in enumerate(enumerate_candidates(plan, machine)):
            if index % 500 == 0:
                log(f"{index:,} layouts estimated")
            result = estimate_candidate(candidate, device)
            if isinstance(result, RejectedCandidate):
                rejected.append(result)
            else:
                by_precision.setdefault(result.precision, []).append(result)
        for precision in sorted(by_precision, key=lambda name: name != plan.float8):
            group, num_wanted = by_precision[precision], TRACED_OWN
            if precision != plan.float8 and best:  # worth a trace only if faster
                fastest = min(each.candidate.seconds for each in best)
                rejected += [reject_slower(fastest, c) for c in group if c.seconds >= fastest]
                group = [c for c in group if c.seconds < fastest]
                num_wanted = TRACED_OTHER
            traced, group_rejected = trace_best(
                machine, group, available_bytes, num_wanted, trace, log
            )
            best += traced
            rejected += group_rejected
    best.sort(key=lambda each: each.prediction.step_seconds or 0.0)
    return SearchResult(tuple(best), tuple(rejected), len(best) + len(rejected), plan.float8)


def searched_device(plan: Plan, machine: Machine) -> Device:
    """Return the device of a machine.

    Raises:
        InvalidConfig: if the device or the model is not supported.
    """
    job, device = plan.job, find_device(machine)
    if device is None or plan.device == "cpu":
        rule, remedy = "is a device of unknown speed", "use --cluster, such as 64x8xH100"
        raise InvalidConfig([ConfigError("--search", machine.device_name or "CPU", rule, remedy)])
    if plan.pipeline is not None and plan.pipeline.has_schedule_file:
        rule, remedy = "is a file, which fits only one layout", "use the name of a schedule"
        raise InvalidConfig([ConfigError("pipeline.schedule", plan.schedule_name, rule, remedy)])
    if not supports_formulas(plan):
        rule = "is not a Llama-like decoder with all parameters trained, which --search requires"
        remedy = "plan single layouts"
        raise InvalidConfig([ConfigError("model.kind", job.model.kind, rule, remedy)])
    return device


def estimate_candidate(candidate: Candidate, device: Device) -> Candidate | RejectedCandidate:
    """Return a candidate with its estimated time and memory, or why it is impossible."""
    plan = candidate.plan
    if conflict := schedule_conflict(plan):
        return RejectedCandidate(candidate, "rule", conflict)
    formulas = DecoderFormulas(plan, device)
    try:
        needed = sum(formulas.estimate_memory().values())
        seconds = formulas.step_seconds(build_hardware(plan, device)).total()
    except ValueError as error:
        return RejectedCandidate(candidate, "rule", str(error))
    return replace(candidate, seconds=seconds, memory_bytes=needed)


def trace_best(
    machine: Machine,
    candidates: Sequence[Candidate],
    available_bytes: float | None,
    num_wanted: int,
    trace: Tracer,
    log: Callable[[str], None],
) -> tuple[list[TracedCandidate], list[RejectedCandidate]]:
    """Trace the fastest candidates of one precision until enough fit.

    Args:
        machine: target machine.
        candidates: layouts of one precision with estimated time and memory.
        available_bytes: for the allocator of a device; None: unlimited.
        num_wanted: number of fitting layouts to find.
        trace: see `trace_candidate`.
        log: receives progress messages.

    Returns:
        The layouts that fit, and the rejected ones.
    """
    best: list[TracedCandidate] = []
    rejected: list[RejectedCandidate] = []
    correction: dict[object, float] = {}  # traced over estimated bytes
    num_traced, limit = 0, MAX_TRACED * num_wanted // TRACED_OWN
    available = math.inf if available_bytes is None else available_bytes
    by_speed = sorted(candidates, key=lambda candidate: candidate.seconds)
    remaining = [c for c in by_speed if c.memory_bytes <= MARGIN * available]
    if not remaining:  # if no estimate fits, trace the smallest
        remaining = sorted(by_speed, key=lambda candidate: candidate.memory_bytes)[:1]
    kept = set(map(id, remaining))
    rejected += [reject_too_large(c, c.memory_bytes) for c in by_speed if id(c) not in kept]
    while remaining and len(best) < num_wanted and num_traced < limit:
        batch: list[Candidate] = []
        while remaining and len(batch) < min(WORKERS, num_wanted - len(best), limit - num_traced):
            candidate = remaining.pop(0)
            needed = candidate.memory_bytes * correction.get(candidate.memory_class, 0.0)
            if needed > available:
                rejected.append(
                    reject_too_large(candidate, needed, ", estimated from traced neighbors")
                )
            else:
                batch.append(candidate)
        if batch:
            layouts = describe_layout(batch[0].plan)
            layouts += f" and {len(batch) - 1} more" if len(batch) > 1 else ""
            log(f"{len(best)} of {num_wanted} found; tracing {layouts}")
        num_traced += len(batch)
        for result in trace([(candidate, machine) for candidate in batch]):
            if isinstance(result, RejectedCandidate):
                rejected.append(result)
                continue
            candidate, prediction = result.candidate, result.prediction
            if prediction.fits is not False:
                best.append(result)
                continue
            size = prediction.needed_bytes - prediction.outside_bytes
            known = correction.get(candidate.memory_class, 1.0)
            correction[candidate.memory_class] = max(known, size / candidate.memory_bytes)
            rejected.append(reject_too_large(candidate, size, ", as traced"))
    if best:
        fastest = min(each.candidate.seconds for each in best)
        rejected += [reject_slower(fastest, slower) for slower in remaining]
    else:
        detail = f"{num_traced} faster ones do not fit"
        rejected += [RejectedCandidate(slower, "untried", detail) for slower in remaining]
    return best, rejected


def reject_slower(fastest: float, candidate: Candidate) -> RejectedCandidate:
    """Reject a candidate by its estimated time."""
    gap = candidate.seconds / fastest - 1
    return RejectedCandidate(candidate, "slower", f"{gap:.0%} slower, estimated")


def reject_too_large(candidate: Candidate, size: float, source: str = "") -> RejectedCandidate:
    """Reject a candidate that needs ``size`` bytes, known by ``source``."""
    return RejectedCandidate(candidate, "memory", f"needs {size / GIB:.1f} GiB{source}")


# --------------------------------------------------------------------------- tracing


TraceTask = tuple[Candidate, Machine]
Tracer = Callable[[Sequence[TraceTask]], Iterable[TracedCandidate | RejectedCandidate]]


def open_tracer(stack: ExitStack) -> Tracer:
    """Return a function that traces several candidates in parallel processes.

    A process can hold only one fake process group.  The processes start now, and end with
    ``stack``; after an exception, such as an interrupt, at once.
    """
    if (os.cpu_count() or 1) == 1:
        return lambda tasks: [trace_candidate(task) for task in tasks]
    before = multiprocessing.active_children()
    pool = ProcessPoolExecutor(WORKERS, multiprocessing.get_context("spawn"), _init_worker)

    def end(error: type[BaseException] | None, *_: object) -> None:
        if error is not None:
            for process in multiprocessing.active_children():
                if process not in before:
                    process.kill()
        pool.shutdown(cancel_futures=True)

    stack.push(end)
    for _ in range(WORKERS):
        pool.submit(int)
    return lambda tasks: pool.map(trace_candidate, tasks)


def _init_worker() -> None:
    """Exit with the parent process, and silently on an interrupt."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def exit_with_parent() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=exit_with_parent, daemon=True).start()


def trace_candidate(task: TraceTask) -> TracedCandidate | RejectedCandidate:
    """Trace a candidate on a machine; never raise."""
    candidate, machine = task
    try:
        plan = resolve(candidate.plan.job, machine)
        prediction = forecast(plan, machine, find_device(machine), cached=True)
    except InvalidConfig as error:
        return RejectedCandidate(candidate, "rule", str(error.errors[0]))
    except Exception as error:  # one that torch cannot run is no reason to lose all the others
        text = f"{type(error).__name__}: {error}".partition("\n")[0]
        return RejectedCandidate(candidate, "trace", text)
    return TracedCandidate(candidate, prediction)


# --------------------------------------------------------------------------- candidates


def enumerate_candidates(plan: Plan, machine: Machine) -> Iterator[Candidate]:
    """Yield all layouts that satisfy the numeric rules."""
    model, world = plan.model, plan.world_size
    linked = linked_devices(machine, plan.local_world_size)
    for tp in divisors(linked):
        if model.num_kv_heads % tp or model.vocab_size % tp:
            continue
        for pp in divisors(world // tp, model.num_layers):
            for cp in cp_degrees(plan, world // (tp * pp)):
                dp = world // (tp * pp * cp)
                if world % (tp * pp * cp) or plan.global_batch_size % dp:
                    continue
                num_linked = max(1, linked // (tp * cp))
                for dp_shard in sorted({dp, divisors(dp, num_linked)[-1]}):
                    degrees = ParallelDims(
                        pp=pp, dp_replicate=dp // dp_shard, dp_shard=dp_shard, cp=cp, tp=tp
                    )
                    for precision in precisions(plan, machine):
                        yield from mesh_candidates(plan, degrees, precision)


def cp_degrees(plan: Plan, max_degree: int) -> Iterable[int]:
    """Return context-parallel degrees; only long sequences are split."""
    degrees = [1]
    while plan.seq_len // (2 * degrees[-1]) >= 8192 and 2 * degrees[-1] <= max_degree:
        degrees.append(2 * degrees[-1])
    return degrees


def precisions(plan: Plan, machine: Machine) -> list[str]:
    """Return the values of ``precision.float8`` to try, the recipe's first."""
    if plan.float8 != "none":
        return [plan.float8, "none"]
    return ["none", "tensorwise"] if can_use_float8(plan, machine) else ["none"]


def mesh_candidates(plan: Plan, degrees: ParallelDims, float8: str) -> Iterator[Candidate]:
    """Yield microbatch sizes, schedules and recomputation for a mesh and precision."""
    local_batch_size = plan.global_batch_size // degrees.dp_size
    for size in MICROBATCHES:
        if local_batch_size % size:
            continue
        num_microbatches, pp = local_batch_size // size, degrees.pp
        for schedule, per_rank in schedule_choices(pp, plan.model.num_layers, num_microbatches):
            pipeline: dict[str, Any] = {
                "stages_per_rank": per_rank if per_rank > 1 else "auto",
                "layers_per_stage": (),
            } | ({"schedule": schedule} if pp > 1 else {})
            async_tp = plan.async_tp and degrees.tp > 1
            for mode in CHECKPOINT_MODES:
                changes: Changes = {
                    "parallel": degrees.axis_sizes
                    | {"reshard_after_forward": "auto", "async_tp": async_tp},
                    "pipeline": pipeline,
                    "train": {"microbatch_size": size},
                    "activation_checkpoint": {"mode": mode, "every_n_layers": 1},
                    "precision": {"float8": float8},
                }
                job = replace_sections(plan.job, **changes)
                fields: dict[str, Any] = degrees.axis_sizes | {
                    "job": job,
                    "local_batch_size": local_batch_size,
                    "microbatch_size": size,
                    "num_microbatches": num_microbatches,
                    "pipeline": unsplit_pipeline(schedule, pp, per_rank) if pp > 1 else None,
                    "reshard_after_forward": resolve_reshard(job, degrees),
                    "gradient_sync": "microbatch",
                    "float8": float8,
                }
                yield Candidate(changes, replace(plan, **fields))


def unsplit_pipeline(schedule: str, pp: int, stages_per_rank: int) -> PipelinePlan:
    """Return a pipeline whose layers are not yet split into stages."""
    stage = Stage(0, 0, "", 0, 0.0, 0.0, 0.0, 0)
    stages, splits_backward = (stage,) * (pp * stages_per_rank), SCHEDULES[schedule].splits_backward
    return PipelinePlan(schedule, stages, (), (), splits_backward)


def schedule_choices(pp: int, layers: int, microbatches: int) -> Iterator[tuple[str, int]]:
    """Yield schedules, with the stages per rank that they allow."""
    if pp == 1:
        yield "1F1B", 1
        return
    for name in SCHEDULES_TRIED:
        schedule = SCHEDULES[name]
        choices = (schedule.stages_per_rank,) if schedule.stages_per_rank else STAGES_PER_RANK
        for per_rank in choices:
            stages = pp * per_rank
            if stages <= layers and schedule.supports(microbatches, pp, stages):
                yield name, per_rank


def schedule_conflict(plan: Plan) -> str:
    """Return why the search skips a layout with deferred weight gradients, or ''."""
    if not plan.splits_backward:
        return ""
    if plan.activation_checkpoint.mode != "none":
        # No formula has the memory between the two halves, which recomputation does not free.
        return f"the search does not combine {plan.schedule_name} with recomputation"
    if plan.float8 != "none":
        return f"{plan.schedule_name} does not defer the weight gradients of float8 layers"
    return ""


# --------------------------------------------------------------------------- text


def describe_layout(plan: Plan) -> str:
    """Describe the layout of a plan in one line."""
    mesh = " x ".join(f"{axis} {size}" for axis, size in plan.axis_sizes.items() if size > 1)
    parts = [mesh or "one rank", f"microbatch {plan.microbatch_size}"]
    if plan.pp > 1:
        stages = f" x {plan.stages_per_rank}" if plan.stages_per_rank > 1 else ""
        parts.append(f"{plan.schedule_name}{stages}")
    parts.append(f"activation_checkpoint {plan.activation_checkpoint.mode}")
    return ", ".join([*parts, *(["float8"] if plan.float8 != "none" else [])])


def summarize_rejections(rejected: Iterable[RejectedCandidate]) -> list[str]:
    """Return a line per reason with its count and the closest candidate."""
    texts = {
        "memory": "need more memory than the device has",
        "rule": "are not supported",
        "trace": "could not be traced",
        "slower": "are slower",
        "untried": "were not traced, because faster ones do not fit",
    }
    counts: Counter[str] = Counter()
    nearest: dict[str, RejectedCandidate] = {}
    for item in rejected:
        counts[item.reason] += 1
        closest = nearest.setdefault(item.reason, item)
        measure = "memory_bytes" if item.reason == "memory" else "seconds"
        if getattr(item.candidate, measure) < getattr(closest.candidate, measure):
            nearest[item.reason] = item
    return [
        f"{count:,} {texts[reason]}; the closest, {describe_layout(item.candidate.plan)}: "
        f"{item.detail}"
        for reason, count in counts.most_common()
        for item in (nearest[reason],)
    ]


def render_recipe(result: SearchResult, job: Job, recipe: str, cluster: str) -> str:
    """Render the winner as a recipe.

    Args:
        result: must have a winner.
        job: the job searched for.
        recipe: its name.
        cluster: as on the command line.
    """
    winner = result.winner
    assert winner is not None
    prediction, plan = winner.prediction, winner.prediction.plan
    assert prediction.step_seconds is not None
    winner_job = replace_sections(winner.candidate.plan.job, run={"cluster": cluster})
    capacity = (
        "" if prediction.capacity_bytes is None else f" of {prediction.capacity_bytes / GIB:.0f}"
    )
    header = [
        f"weft {__version__} found this layout on {date.today()}, the best of "
        f"{result.num_considered:,} layouts on {plan.world_size:,} ranks:",
        f"weft plan {shlex.quote(recipe)} --cluster {cluster} --search",
        f"Predicted: {prediction.step_seconds:.3f} s per step (within {prediction.error:.0%}), "
        f"{prediction.needed_bytes / GIB:.1f}{capacity} GiB on the fullest rank.",
        "",
    ]
    return "".join(f"# {line}".rstrip() + "\n" for line in header) + to_toml(
        winner_job, recipe, job
    )
