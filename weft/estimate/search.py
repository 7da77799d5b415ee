"""Search for the fastest layout that fits.

The search enumerates meshes, microbatch sizes, schedules, recomputation and precision.  Arithmetic
(`weft.estimate.analytic`) estimates memory and time of each in a millisecond, and leaves those that
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
from weft.estimate.analytic import estimate_memory, estimate_step
from weft.estimate.cost import build_hardware, step_seconds
from weft.estimate.decoder import DecoderDims, Layout
from weft.estimate.forecast import OUTSIDE_ALLOCATOR, Forecast, forecast
from weft.estimate.plan_to_analytic import analytic_layout, decoder_dims
from weft.plan.devices import GIB
from weft.plan.float8_rules import supports_float8
from weft.plan.layout import divisors
from weft.plan.pipeline_schedule import SCHEDULES
from weft.plan.placement import AXES
from weft.plan.plan import Machine, Plan
from weft.plan.resolve import resolve

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
    """A layout; ``changes`` of the recipe's job, estimated time and memory."""

    changes: Changes
    layout: Layout
    seconds: float = 0.0
    memory_bytes: float = 0.0

    @property
    def precision(self) -> str:
        """Value of ``precision.float8``."""
        return str(self.changes["precision"]["float8"])

    @property
    def memory_class(self) -> object:
        """Key of candidates whose memory estimates have similar errors."""
        layout = self.layout
        stages = layout.schedule, layout.pp > 1, layout.stages_per_rank
        return *stages, layout.tp > 1, layout.cp > 1, layout.activation_checkpoint


@dataclass(frozen=True)
class RejectedCandidate:
    """A rejected candidate; ``reason`` is a category, ``detail`` is specific."""

    candidate: Candidate
    reason: Literal["memory", "rule", "trace", "slower", "untried"]
    detail: str


@dataclass(frozen=True)
class TraceFailure:
    """A failed trace; see `RejectedCandidate`."""

    reason: Literal["rule", "trace"]
    detail: str


@dataclass(frozen=True)
class TracedCandidate:
    """A candidate and its traced prediction."""

    candidate: Candidate
    job: Job
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
        own_precision = (each for each in self.best if each.candidate.precision == self.precision)
        return next(own_precision, None)

    def to_dict(self) -> dict[str, Any]:
        """Return the best and the rejected layouts as JSON types."""
        best = [
            {"layout": describe_layout(each.candidate.layout), "changes": each.candidate.changes}
            | {"precision": each.candidate.precision, "winner": each is self.winner}
            | each.prediction.to_dict()
            for each in self.best
        ]
        rejected_rows = [
            {
                "layout": describe_layout(item.candidate.layout),
                "why": item.reason,
                "detail": item.detail,
            }
            for item in self.rejected
        ]
        return {"considered": self.num_considered, "best": best, "lost": rejected_rows}


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
    job = plan.job
    device = machine.spec
    if device is None or plan.device == "cpu":
        rule, remedy = "is a device of unknown speed", "use --cluster, such as 64x8xH100"
        raise InvalidConfig([ConfigError("--search", machine.device_name or "CPU", rule, remedy)])
    dims = decoder_dims(plan)
    base = analytic_layout(plan, device)
    if dims is None:
        rule = "is not a Llama-like decoder with all parameters trained, which --search requires"
        remedy = "plan single layouts"
        raise InvalidConfig([ConfigError("model.kind", job.model.kind, rule, remedy)])
    if base is None:
        rule, remedy = "is a file, which fits only one layout", "use the name of a schedule"
        raise InvalidConfig([ConfigError("pipeline.schedule", plan.schedule_name, rule, remedy)])
    hardware = build_hardware(plan, device)
    available_bytes = (
        None if machine.memory_bytes is None else machine.memory_bytes - OUTSIDE_ALLOCATOR["cuda"]
    )
    estimated: list[Candidate] = []
    rejected: list[RejectedCandidate] = []
    with ExitStack() as stack:
        trace = open_tracer(stack)
        for index, candidate in enumerate(enumerate_candidates(dims, base, plan, machine)):
            if index % 500 == 0:
                log(f"{index:,} layouts estimated")
            layout = candidate.layout
            if conflict := schedule_conflict(layout):
                rejected.append(RejectedCandidate(candidate, "rule", conflict))
                continue
            try:
                needed = sum(estimate_memory(dims, layout).values())
                seconds = step_seconds(estimate_step(dims, layout), hardware).total()
            except ValueError as error:
                rejected.append(RejectedCandidate(candidate, "rule", str(error)))
                continue
            estimated.append(replace(candidate, seconds=seconds, memory_bytes=needed))
        own_precision = plan.float8
        best: list[TracedCandidate] = []
        for precision in sorted(
            {c.precision for c in estimated}, key=lambda name: name != own_precision
        ):
            group = [c for c in estimated if c.precision == precision]
            num_wanted = TRACED_OWN
            if precision != own_precision and best:  # worth a trace only if faster
                fastest = min(each.candidate.seconds for each in best)
                rejected += [reject_slower(fastest, c) for c in group if c.seconds >= fastest]
                group = [c for c in group if c.seconds < fastest]
                num_wanted = TRACED_OTHER
            traced, group_rejected = trace_best(
                job, machine, group, available_bytes, num_wanted, trace, log
            )
            best += traced
            rejected += group_rejected
    best.sort(key=lambda each: each.prediction.step_seconds or 0.0)
    return SearchResult(tuple(best), tuple(rejected), len(best) + len(rejected), own_precision)


def trace_best(
    job: Job,
    machine: Machine,
    candidates: Sequence[Candidate],
    available_bytes: float | None,
    num_wanted: int,
    trace: Callable[[Sequence[tuple[Job, Machine]]], Iterable[Forecast | TraceFailure]],
    log: Callable[[str], None],
) -> tuple[list[TracedCandidate], list[RejectedCandidate]]:
    """Trace the fastest candidates of one precision until enough fit.

    Args:
        job: the job searched for.
        machine: target machine.
        candidates: layouts of one precision with estimated time and memory.
        available_bytes: for the allocator of a device; None: unlimited.
        num_wanted: number of fitting layouts to find.
        trace: returns the forecast of each job, or why there is none.
        log: receives progress messages.

    Returns:
        The layouts that fit, and the rejected ones.
    """
    best: list[TracedCandidate] = []
    rejected: list[RejectedCandidate] = []
    correction: dict[object, float] = {}  # traced over estimated bytes
    num_traced, limit = 0, MAX_TRACED * num_wanted // TRACED_OWN
    remaining = sorted(candidates, key=lambda candidate: candidate.seconds)
    if available_bytes is not None:
        fitting = [c for c in remaining if c.memory_bytes <= MARGIN * available_bytes]
        # If no estimate fits, trace the smallest.
        fitting = fitting or sorted(remaining, key=lambda candidate: candidate.memory_bytes)[:1]
        fitting_ids = {id(c) for c in fitting}
        rejected += [
            RejectedCandidate(c, "memory", _needs_gib(c.memory_bytes))
            for c in remaining
            if id(c) not in fitting_ids
        ]
        remaining = fitting
    while remaining and len(best) < num_wanted and num_traced < limit:
        batch: list[Candidate] = []
        while remaining and len(batch) < min(WORKERS, num_wanted - len(best), limit - num_traced):
            candidate = remaining.pop(0)
            needed = candidate.memory_bytes * correction.get(candidate.memory_class, 0.0)
            if available_bytes is not None and needed > available_bytes:
                detail = f"{_needs_gib(needed)}, estimated from traced neighbors"
                rejected.append(RejectedCandidate(candidate, "memory", detail))
            else:
                batch.append(candidate)
        jobs = [replace_sections(job, **candidate.changes) for candidate in batch]
        if batch:
            layouts = describe_layout(batch[0].layout)
            layouts += f" and {len(batch) - 1} more" if len(batch) > 1 else ""
            log(f"{len(best)} of {num_wanted} found; tracing {layouts}")
        num_traced += len(batch)
        results = trace([(changed_job, machine) for changed_job in jobs])
        for candidate, changed_job, result in zip(batch, jobs, results, strict=True):
            if isinstance(result, TraceFailure):
                rejected.append(RejectedCandidate(candidate, result.reason, result.detail))
            elif result.fits is False:
                traced_bytes = result.needed_bytes - result.outside_bytes
                correction[candidate.memory_class] = max(
                    correction.get(candidate.memory_class, 1.0),
                    traced_bytes / candidate.memory_bytes,
                )
                rejected.append(
                    RejectedCandidate(candidate, "memory", f"{_needs_gib(traced_bytes)}, as traced")
                )
            else:
                best.append(TracedCandidate(candidate, changed_job, result))
    for slower in remaining:
        if best:
            rejected.append(reject_slower(min(each.candidate.seconds for each in best), slower))
        else:
            rejected.append(
                RejectedCandidate(slower, "untried", f"{num_traced} faster ones do not fit")
            )
    return best, rejected


def reject_slower(fastest: float, candidate: Candidate) -> RejectedCandidate:
    """Reject a candidate by its estimated time."""
    gap = candidate.seconds / fastest - 1
    return RejectedCandidate(candidate, "slower", f"{gap:.0%} slower, estimated")


def _needs_gib(size: float) -> str:
    return f"needs {size / GIB:.1f} GiB"


# --------------------------------------------------------------------------- tracing


def open_tracer(
    stack: ExitStack,
) -> Callable[[Sequence[tuple[Job, Machine]]], Iterable[Forecast | TraceFailure]]:
    """Return a function that traces several jobs in parallel processes.

    A process can hold only one fake process group.  The processes start now, and end with
    ``stack``.
    """
    if (os.cpu_count() or 1) == 1:
        return lambda tasks: [trace_candidate(task) for task in tasks]
    pool = ProcessPoolExecutor(WORKERS, multiprocessing.get_context("spawn"), _init_worker)
    stack.callback(pool.shutdown, cancel_futures=True)
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


def trace_candidate(task: tuple[Job, Machine]) -> Forecast | TraceFailure:
    """Return the forecast of a job, or the reason why it failed; never raise."""
    job, machine = task
    try:
        return forecast(resolve(job, machine), machine, machine.spec)
    except InvalidConfig as error:
        return TraceFailure("rule", str(error.problems[0]))
    except Exception as error:  # one that torch cannot run is no reason to lose all the others
        return TraceFailure("trace", f"{type(error).__name__}: {error}".partition("\n")[0])


# --------------------------------------------------------------------------- candidates


def enumerate_candidates(
    dims: DecoderDims, base: Layout, plan: Plan, machine: Machine
) -> Iterator[Candidate]:
    """Yield all layouts that satisfy the numeric rules."""
    world, node = plan.world_size, plan.local_world_size
    for tp in divisors(node):
        if dims.kv_heads % tp or dims.vocab % tp:
            continue
        for pp in divisors(world // tp, dims.layers):
            for cp in cp_degrees(plan, world // (tp * pp)):
                dp = world // (tp * pp * cp)
                if world % (tp * pp * cp) or plan.global_batch_size % dp:
                    continue
                for dp_shard in sorted({dp, max(1, min(dp, node // (tp * cp)))}):
                    if dp % dp_shard:
                        continue
                    mesh = replace(
                        base, tp=tp, pp=pp, cp=cp, dp_shard=dp_shard, dp_replicate=dp // dp_shard
                    )
                    for precision in precisions(plan, machine):
                        yield from mesh_candidates(plan, dims, mesh, precision)


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
    can_use_float8 = plan.compute_dtype == "bfloat16" and supports_float8(
        "tensorwise", machine.capability
    )
    return ["none", "tensorwise"] if can_use_float8 else ["none"]


def mesh_candidates(
    plan: Plan, dims: DecoderDims, mesh_layout: Layout, float8: str
) -> Iterator[Candidate]:
    """Yield microbatch sizes, schedules and recomputation for a mesh and precision."""
    local_batch_size = plan.global_batch_size // mesh_layout.dp
    shards = mesh_layout.dp_shard * mesh_layout.cp
    for microbatch_size in MICROBATCHES:
        if local_batch_size % microbatch_size:
            continue
        for schedule, per_rank in schedule_choices(
            mesh_layout.pp, dims.layers, local_batch_size // microbatch_size
        ):
            for activation_checkpoint in CHECKPOINT_MODES:
                layout = replace(
                    mesh_layout,
                    microbatch=microbatch_size,
                    schedule=schedule,
                    stages_per_rank=per_rank,
                    precision="bf16" if float8 == "none" else "float8",
                    activation_checkpoint=activation_checkpoint,
                    activation_checkpoint_fraction=1.0,
                    zero=0 if shards == 1 else 2 if mesh_layout.pp > 1 else 3,
                    unsharded_bytes=0.0,
                    tp_overlap=mesh_layout.tp_overlap if mesh_layout.tp > 1 else "exposed",
                )
                parallel: dict[str, Any] = {axis: getattr(mesh_layout, axis) for axis in AXES}
                parallel |= {"reshard_after_forward": "auto"}
                parallel |= {"async_tp": plan.async_tp and mesh_layout.tp > 1}
                pipeline: dict[str, Any] = {
                    "stages_per_rank": per_rank if per_rank > 1 else "auto",
                    "layers_per_stage": (),
                }
                if mesh_layout.pp > 1:
                    pipeline |= {"schedule": schedule}
                changes: Changes = {
                    "parallel": parallel,
                    "pipeline": pipeline,
                    "train": {"microbatch_size": microbatch_size},
                    "activation_checkpoint": {"mode": activation_checkpoint, "every_n_layers": 1},
                    "precision": {"float8": float8},
                }
                yield Candidate(changes, layout)


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


def schedule_conflict(layout: Layout) -> str:
    """Return why a schedule with split backward cannot run the layout, or ''."""
    if layout.pp == 1 or not SCHEDULES[layout.schedule].splits_backward:
        return ""
    if layout.fusion == "compiled":
        return f"{layout.schedule} does not support torch.compile"
    if layout.activation_checkpoint != "none":
        return f"{layout.schedule} recomputes twice, for input and for weight gradients"
    if layout.precision != "bf16":
        return f"{layout.schedule} runs float8 matmuls twice"
    return ""


# --------------------------------------------------------------------------- text


def describe_layout(layout: Layout) -> str:
    """Describe a layout in one line."""
    mesh = " x ".join(f"{a} {getattr(layout, a)}" for a in AXES if getattr(layout, a) > 1)
    parts = [mesh or "one rank", f"microbatch {layout.microbatch}"]
    if layout.pp > 1:
        stages = f" x {layout.stages_per_rank}" if layout.stages_per_rank > 1 else ""
        parts.append(f"{layout.schedule}{stages}")
    parts.append(f"activation_checkpoint {layout.activation_checkpoint}")
    if layout.precision != "bf16":
        parts.append(layout.precision)
    return ", ".join(parts)


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
        f"{count:,} {texts[reason]}; the closest, {describe_layout(item.candidate.layout)}: "
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
    winner_job = replace_sections(winner.job, run={"cluster": cluster})
    capacity = (
        "" if prediction.capacity_bytes is None else f" of {prediction.capacity_bytes / GIB:.0f}"
    )
    header = [
        f"weft {weft.__version__} found this layout on {date.today()}, the best of "
        f"{result.num_considered:,} layouts on {plan.world_size:,} ranks:",
        f"weft plan {recipe} --cluster {cluster} --search",
        f"Predicted: {prediction.step_seconds:.3f} s per step (within {prediction.error:.0%}), "
        f"{prediction.needed_bytes / GIB:.1f}{capacity} GiB on the fullest rank.",
        "",
    ]
    return "".join(f"# {line}".rstrip() + "\n" for line in header) + to_toml(
        winner_job, recipe, job
    )
