"""Search for the fastest layout that fits.

The search enumerates meshes, expert parallelism, microbatch sizes, schedules, recomputation and
precision: thousands of layouts.  Traced blocks (`weft.estimate.pieces`) estimate time and memory of
one, but a recording of blocks takes half a second.  So the search is best first: each layout begins
with a floor of its time, its products and kernels alone, and only the layout with the lowest number
is estimated, until the lowest number is an estimate.  Layouts whose states alone do not fit are not
estimated at all.

`resolve` plans the best layouts, and a trace predicts them; the search reports traced numbers only.
If a traced layout does not fit, similar ones are assumed to need as much more, and are skipped if
that is too much.  At most `MAX_TRACED` layouts are traced, and proportionally fewer in the other
precision.

*Precision* is the recipe's, and also float8 if the device supports it (or bfloat16 if the recipe
has float8).  The other precision changes the computed numbers, not only the speed.  Such layouts
are in the ranking, marked by their precision.  They take no place from layouts in the recipe's
precision, and the winner is the best of the latter.

Every rejected layout has a reason: a rule, memory, or time.
"""

from __future__ import annotations

import heapq
import itertools
import math
import multiprocessing
import os
import shlex
import signal
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from datetime import date
from typing import Any, Literal

from weft.config.errors import MISSING, ConfigError, ConfigErrors, InvalidConfig
from weft.config.schema import Job, flatten
from weft.config.schema import replace as replace_sections
from weft.config.writer import to_toml
from weft.estimate.advice import can_use_float8
from weft.estimate.cost import Hardware, build_hardware
from weft.estimate.forecast import OUTSIDE_ALLOCATOR, Forecast, forecast
from weft.estimate.pieces import Pieces, supports_pieces
from weft.planning.degrees import ParallelDims, divisors
from weft.planning.devices import GIB, Device, find_device, linked_devices
from weft.planning.dispatch_rules import check_dispatch
from weft.planning.lora_plan import plan_cost
from weft.planning.pipeline_schedule import SCHEDULES
from weft.planning.plan import Machine, PipelinePlan, Plan, Stage
from weft.planning.resolve import resolve
from weft.planning.rules import check_layout
from weft.planning.sharding import resolve_gradient_sync, resolve_reshard
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
    def key_without_recomputation(self) -> object:
        """Key of candidates that differ only in what they recompute."""
        changes = {k: v for k, v in self.changes.items() if k != "activation_checkpoint"}
        return repr(changes)

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
    plan: Plan,
    machine: Machine,
    log: Callable[[str], None] = lambda text: None,
    fixed: Collection[str] = (),
) -> SearchResult:
    """Search layouts of the job's model and global batch size on a machine.

    Args:
        plan: decides model and global batch size.
        machine: target machine; its device must have a known speed.
        log: receives progress messages.
        fixed: keys that all layouts have as the job of ``plan``.

    Raises:
        InvalidConfig: if the device or the model is not supported.
    """
    device = searched_device(plan, machine)
    available = math.inf if machine.memory_bytes is None else machine.memory_bytes
    available -= OUTSIDE_ALLOCATOR
    estimator = Estimator(Pieces(device, cached=True), build_hardware(plan, device))
    by_precision: dict[str, list[Candidate]] = {}
    for candidate in enumerate_candidates(plan, machine, fixed):
        by_precision.setdefault(candidate.precision, []).append(candidate)
    if not by_precision:
        keys = " ".join(f"--{key}" for key in sorted(fixed)) or "these ranks"
        rule = f"tries no layout with {keys}"
        remedy = "leave one out, or plan this layout without --search"
        raise InvalidConfig([ConfigError("--search", MISSING, rule, remedy)])
    best: list[TracedCandidate] = []
    rejected: list[RejectedCandidate] = []
    with ExitStack() as stack:
        trace = open_tracer(stack)
        for precision in sorted(by_precision, key=lambda name: name != plan.float8):
            group, num_wanted = by_precision[precision], TRACED_OWN
            fastest = math.inf
            if precision != plan.float8 and best:  # worth a trace only if faster
                fastest = min(each.candidate.seconds for each in best)
                num_wanted = TRACED_OTHER
            log(f"{sum(map(len, by_precision.values())):,} layouts; estimating the best of them")
            frontier = Frontier(group, estimator, available, fastest)
            traced, group_rejected = trace_best(
                machine, frontier, available, num_wanted, trace, log
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
    if plan.world_size_invariant:
        rule, remedy = "allows few layouts, which --search does not know", "plan single layouts"
        raise InvalidConfig([ConfigError("train.world_size_invariant", True, rule, remedy)])
    if not supports_pieces(plan):
        rule = "is not a decoder of weft's, which --search requires"
        raise InvalidConfig(
            [ConfigError("model.kind", job.model.kind, rule, "plan single layouts")]
        )
    return device


# --------------------------------------------------------------------------- estimates


@dataclass(frozen=True)
class Estimator:
    """Estimates candidates on one kind of hardware."""

    pieces: Pieces
    hardware: Hardware

    def floor(self, plan: Plan) -> float:
        """Return the seconds that a step takes at least."""
        return self.pieces.floor_seconds(plan, self.hardware)

    def state_bytes(self, plan: Plan) -> float:
        """Return `Pieces.state_bytes`."""
        return self.pieces.state_bytes(plan)

    def estimate(self, candidate: Candidate) -> Candidate | RejectedCandidate:
        """Return a candidate with its estimated time and memory, or why it is impossible."""
        try:
            estimate = self.pieces.estimate(candidate.plan)
            seconds = estimate.step_seconds(self.hardware).total()
            return replace(candidate, seconds=seconds, memory_bytes=estimate.memory_bytes())
        except ValueError as error:
            return RejectedCandidate(candidate, "rule", str(error))
        except Exception as error:  # blocks that torch cannot run in this layout
            text = f"{type(error).__name__}: {error}".partition("\n")[0]
            return RejectedCandidate(candidate, "trace", text)


class Frontier:
    """Candidates of one precision, of which few are estimated: see above.

    Args:
        candidates: layouts without estimates.
        estimator: see `Estimator`.
        available: bytes for the allocator of a device.
        limit: candidates that take as many seconds, estimated, are not worth a trace.
    """

    def __init__(
        self,
        candidates: Iterable[Candidate],
        estimator: Estimator,
        available: float,
        limit: float = math.inf,
    ) -> None:
        self.rejected: list[RejectedCandidate] = []
        self.limit = limit
        self._estimator, self._room = estimator, MARGIN * available
        self._queue: list[tuple[float, int, bool, Candidate]] = []
        # By the index of a candidate: those that differ in recomputing more, which is slower.
        self._savings: dict[int, list[tuple[int, Candidate]]] = {}
        self._slower: list[Candidate] = []
        self._smallest: Candidate | None = None
        self._returned = False
        index_of: dict[object, int] = {}
        for index, candidate in enumerate(candidates):
            plan = candidate.plan
            size, seconds = estimator.state_bytes(plan), estimator.floor(plan)
            candidate = replace(candidate, memory_bytes=size, seconds=seconds)
            first = index_of.setdefault(candidate.key_without_recomputation, index)
            if conflict := schedule_conflict(plan):
                self.rejected.append(RejectedCandidate(candidate, "rule", conflict))
            elif size > self._room:
                self._reject_too_large(candidate, " for states")
            elif first < index:
                self._savings.setdefault(first, []).append((index, candidate))
            else:
                self._queue.append((seconds, index, False, candidate))
        heapq.heapify(self._queue)

    def pop(self) -> Candidate | None:
        """Return the fastest candidate that may fit, estimated; None: no more.

        If no candidate fits by its estimate, return the smallest once.
        """
        while self._queue and self._queue[0][0] < self.limit:
            _, index, is_estimated, candidate = heapq.heappop(self._queue)
            if is_estimated:
                self._returned = True
                return candidate
            result = self._estimator.estimate(candidate)
            savings = self._savings.pop(index, [])
            if isinstance(result, RejectedCandidate):
                self.rejected.append(result)
            else:
                seconds, size = result.seconds, result.memory_bytes
                savings = [(i, replace(c, seconds=max(c.seconds, seconds))) for i, c in savings]
                if size > self._room:
                    self._reject_too_large(result)
                else:
                    heapq.heappush(self._queue, (seconds, index, True, result))
                if size < self._room / MARGIN**2:  # it surely fits: nothing has to be saved
                    self._slower += [c for _, c in savings]
                    continue
            if savings:
                (index, candidate), *others = savings
                heapq.heappush(self._queue, (candidate.seconds, index, False, candidate))
                self._savings[index] = others
        smallest, self._smallest = self._smallest, None
        if self._returned or smallest is None or self._queue:
            return None
        self.rejected = [item for item in self.rejected if item.candidate is not smallest]
        return smallest

    def remaining(self) -> list[Candidate]:
        """Return all other candidates, fastest first; some have floors only."""
        waiting = [candidate for group in self._savings.values() for _, candidate in group]
        waiting += [candidate for *_, candidate in self._queue]
        return sorted([*waiting, *self._slower], key=lambda candidate: candidate.seconds)

    def _reject_too_large(self, candidate: Candidate, source: str = "") -> None:
        if self._smallest is None or candidate.memory_bytes < self._smallest.memory_bytes:
            self._smallest = candidate
        self.rejected.append(reject_too_large(candidate, candidate.memory_bytes, source))


def trace_best(
    machine: Machine,
    frontier: Frontier,
    available: float,
    num_wanted: int,
    trace: Tracer,
    log: Callable[[str], None],
) -> tuple[list[TracedCandidate], list[RejectedCandidate]]:
    """Trace the fastest candidates of one precision until enough fit.

    Args:
        machine: target machine.
        frontier: layouts of one precision.
        available: bytes for the allocator of a device.
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
    is_empty = False
    while not is_empty and len(best) < num_wanted and num_traced < limit:
        batch: list[Candidate] = []
        while len(batch) < min(WORKERS, num_wanted - len(best), limit - num_traced):
            candidate = frontier.pop()
            if candidate is None:
                is_empty = True
                break
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
        for result in trace([(candidate, machine) for candidate in batch]):
            if isinstance(result, RejectedCandidate):
                rejected.append(result)
                num_traced += result.reason != "rule"  # a rule takes no trace
                continue
            num_traced += 1
            candidate, prediction = result.candidate, result.prediction
            if prediction.fits is not False:
                best.append(result)
                continue
            size = prediction.needed_bytes - prediction.outside_bytes
            known = correction.get(candidate.memory_class, 1.0)
            correction[candidate.memory_class] = max(known, size / candidate.memory_bytes)
            rejected.append(reject_too_large(candidate, size, ", as traced"))
    rejected += frontier.rejected
    fastest = min([frontier.limit, *(each.candidate.seconds for each in best)])
    if math.isfinite(fastest):
        rejected += [reject_slower(fastest, slower) for slower in frontier.remaining()]
    else:
        detail = f"{num_traced} faster ones do not fit"
        rejected += [
            RejectedCandidate(slower, "untried", detail) for slower in frontier.remaining()
        ]
    return best, rejected


def reject_slower(fastest: float, candidate: Candidate) -> RejectedCandidate:
    """Reject a candidate by its estimated time."""
    gap = max(0.0, candidate.seconds / fastest - 1)
    return RejectedCandidate(candidate, "slower", f"at least {gap:.0%} slower, estimated")


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


def enumerate_candidates(
    plan: Plan, machine: Machine, fixed: Collection[str] = ()
) -> Iterator[Candidate]:
    """Yield all layouts that satisfy the numeric rules; for ``fixed`` see `search`."""
    is_expected = {
        key: value
        for key, value in flatten(plan.job).items()
        if key in fixed and value not in ("auto", "fit")
    }
    for degrees in enumerate_meshes(plan, machine):
        for precision in precisions(plan, machine):
            for candidate in mesh_candidates(plan, degrees, precision):
                values = {
                    f"{section}.{name}": value
                    for section, keys in candidate.changes.items()
                    for name, value in keys.items()
                }
                if all(values.get(key, value) == value for key, value in is_expected.items()):
                    yield candidate


def enumerate_meshes(plan: Plan, machine: Machine) -> Iterator[ParallelDims]:
    """Yield the degrees that satisfy the rules of the model."""
    model, world = plan.model, plan.world_size
    linked = linked_devices(machine, plan.local_world_size)
    for tp in divisors(linked):
        for pp in divisors(world // tp, model.num_layers):
            for cp in cp_degrees(plan, world // (tp * pp)):
                dp = world // (tp * pp * cp)
                if world % (tp * pp * cp) or plan.global_batch_size % dp:
                    continue
                num_linked = max(1, linked // (tp * cp))
                for dp_shard in sorted({dp, divisors(dp, num_linked)[-1]}):
                    for ep in ep_degrees(plan, dp_shard * cp, tp, linked):
                        degrees = ParallelDims(
                            pp=pp,
                            dp_replicate=dp // dp_shard,
                            dp_shard=dp_shard,
                            cp=cp,
                            tp=tp,
                            ep=ep,
                            experts_without_tp=plan.parallel.has_experts_without_tp,
                        )
                        if is_possible(plan, degrees):
                            yield degrees


def ep_degrees(plan: Plan, shards: int, tp: int, linked: int) -> Iterable[int]:
    """Return expert-parallel degrees: those within a node, and the recipe's.

    ``shards``: ranks of ``dp_shard`` and ``cp``.
    """
    if not plan.model.num_experts:
        return [1]
    ranks = shards * (tp if plan.parallel.has_experts_without_tp else 1)
    near = divisors(math.gcd(ranks, plan.model.num_experts), linked)
    return sorted({*near, *([plan.ep] if ranks % plan.ep == 0 else [])})


def is_possible(plan: Plan, degrees: ParallelDims) -> bool:
    """Return True if the rules of a plan's model accept the degrees."""
    parallel = degrees.axis_sizes | {"ep": degrees.ep}
    job = replace_sections(plan.job, parallel=parallel | async_tp(plan, degrees))
    errors = ConfigErrors(job)
    check_layout(errors, job, plan.model, plan.family, degrees, plan.world_size)
    check_dispatch(errors, job, plan.model, plan.family, degrees)
    return not errors


def async_tp(plan: Plan, degrees: ParallelDims) -> dict[str, Any]:
    """Return the key of asynchronous tensor parallelism, which needs two ranks."""
    return {"async_tp": plan.async_tp and degrees.tp > 1}


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
    parallel = degrees.axis_sizes | async_tp(plan, degrees)
    if plan.model.num_experts:
        parallel["ep"] = degrees.ep
    # A compiled step computes the same, and is faster on every device but a CPU.
    compiled: Changes = {} if plan.is_compiled else {"compile": {"enable": True}}
    cost = plan_cost(plan)
    sharding = ("auto", "never") if degrees.pp == 1 and degrees.fsdp_size > 1 else ("auto",)
    for size, reshard in itertools.product(MICROBATCHES, sharding):
        if local_batch_size % size:
            continue
        num_microbatches, pp = local_batch_size // size, degrees.pp
        for schedule, per_rank in schedule_choices(pp, plan.model.num_layers, num_microbatches):
            pipeline: dict[str, Any] = {
                "stages_per_rank": per_rank if per_rank > 1 else "auto",
                "layers_per_stage": (),
            } | ({"schedule": schedule} if pp > 1 else {})
            for mode in CHECKPOINT_MODES:
                changes: Changes = compiled | {
                    "parallel": parallel | {"reshard_after_forward": reshard},
                    "pipeline": pipeline,
                    "train": {"microbatch_size": size},
                    "activation_checkpoint": {"mode": mode, "every_n_layers": 1},
                    "precision": {"float8": float8},
                }
                job = replace_sections(plan.job, **changes)
                reshards = resolve_reshard(job, degrees)
                fields: dict[str, Any] = degrees.axis_sizes | {
                    "job": job,
                    "ep": degrees.ep,
                    "local_batch_size": local_batch_size,
                    "microbatch_size": size,
                    "num_microbatches": num_microbatches,
                    "pipeline": unsplit_pipeline(schedule, pp, per_rank) if pp > 1 else None,
                    "reshard_after_forward": reshards,
                    "gradient_sync": resolve_gradient_sync(job, reshards, cost, degrees),
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
    sizes = plan.axis_sizes | {"ep": plan.ep}
    mesh = " x ".join(f"{axis} {size}" for axis, size in sizes.items() if size > 1)
    parts = [mesh or "one rank", f"microbatch {plan.microbatch_size}"]
    if plan.pp > 1:
        stages = f" x {plan.stages_per_rank}" if plan.stages_per_rank > 1 else ""
        parts.append(f"{plan.schedule_name}{stages}")
    if plan.pp == 1 and plan.fsdp_size > 1 and plan.reshard_after_forward is False:
        parts.append("weights gathered once")
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
