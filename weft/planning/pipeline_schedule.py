"""Pipeline schedules: the ordered actions of every pipeline rank.

A schedule with several stages per rank is read from the object of torch.distributed.pipelining
that the engine runs.  The schedules with one stage per rank, GPipe and 1F1B, are written out here,
because torch's own list for 1F1B is wrong for the last rank in 2.13.  A CSV file has one line per
rank, with cells such as ``0F3`` (stage 0, forward, microbatch 3), ``0B3`` (full backward), ``0I3``
(backward of the input) and ``0W3`` (backward of the weights).

The number of stages, their ranks and their microbatches in flight follow from the actions.
"""

from __future__ import annotations

import csv
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple

from weft.config.errors import ConfigError, InvalidConfig, suggest
from weft.planning.plan import Plan, is_schedule_file

ActionKind = Literal["F", "B", "I", "W"]


class Action(NamedTuple):
    """One action: F (forward), B (backward), or its halves I (input) and W (weight)."""

    stage: int
    kind: ActionKind
    microbatch: int


# pipeline rank -> its actions, in order
PipelineSchedule = dict[int, list[Action]]


@dataclass(frozen=True)
class ScheduleSpec:
    """The requirements of a schedule of torch, or of a CSV file.

    Attributes:
        stages_per_rank: the only valid number; None: any, by default 2.
        splits_backward: True if weight gradients are computed after input gradients: see
            `weft.parallel.weight_gradients`.
        actions: from the file; None for a schedule of torch.
    """

    name: str
    stages_per_rank: int | None
    splits_backward: bool = False
    actions: PipelineSchedule | None = None

    def supports(self, num_microbatches: int, pp: int, num_stages: int) -> bool:
        """Return True if the schedule can run this many microbatches over all stages."""
        if self.actions is not None:
            return num_microbatches == num_scheduled_microbatches(self.actions)
        if self.name in ("1F1B", "DualPipeV"):
            return num_microbatches >= num_stages
        if self.name in ("Interleaved1F1B", "InterleavedZeroBubble"):
            return num_microbatches % max(1, num_microbatches // pp) == 0
        return True

    def requirement(self, pp: int, num_stages: int) -> str:
        """Return the condition of `supports` in words."""
        if self.name in ("1F1B", "DualPipeV"):
            return f"at least as many microbatches as stages, {num_stages}"
        return f"a number m that m // {pp} divides (any m below {2 * pp} or multiple of {pp})"


SCHEDULES: dict[str, ScheduleSpec] = {
    schedule.name: schedule
    for schedule in (
        ScheduleSpec("GPipe", 1),
        ScheduleSpec("1F1B", 1),
        ScheduleSpec("Interleaved1F1B", None),
        ScheduleSpec("LoopedBFS", None),
        ScheduleSpec("InterleavedZeroBubble", None, splits_backward=True),
        ScheduleSpec("ZBVZeroBubble", 2, splits_backward=True),
        ScheduleSpec("DualPipeV", 2, splits_backward=True),
    )
}


def find_schedule(name: str, pp: int) -> ScheduleSpec:
    """Return the schedule of a case-insensitive name or a CSV file.

    Raises:
        InvalidConfig: if there is none, or the first error in the file.
    """
    if is_schedule_file(name):
        actions = read_schedule_csv(Path(name), pp)
        splits_backward = any(a.kind == "I" for order in actions.values() for a in order)
        return ScheduleSpec(name, None, splits_backward, actions)
    for known, schedule in SCHEDULES.items():
        if known.lower() == name.lower():
            return schedule
    rule = "is not a known schedule, nor the path of a .csv file"
    remedy = suggest(name, SCHEDULES)
    raise InvalidConfig([ConfigError("pipeline.schedule", name, rule, remedy)])


@lru_cache(maxsize=64)
def build_schedule(
    name: str, pp: int, stages_per_rank: int, num_microbatches: int
) -> PipelineSchedule:
    """Build the schedule of that name.

    Raises:
        ValueError: by torch, if the schedule does not support the numbers.
    """
    if name == "GPipe":
        return {
            rank: [
                *(Action(rank, "F", m) for m in range(num_microbatches)),
                *(Action(rank, "B", m) for m in range(num_microbatches)),
            ]
            for rank in range(pp)
        }
    if name == "1F1B":
        return {rank: _order_1f1b(rank, pp, num_microbatches) for rank in range(pp)}
    order = _torch_order(name, pp, stages_per_rank, num_microbatches)
    return {rank: list(_flatten_actions(actions)) for rank, actions in order.items()}


def _torch_order(
    name: str, pp: int, stages_per_rank: int, num_microbatches: int
) -> dict[int, list[Any]]:
    """Return torch's actions of each pipeline rank."""
    from weft.planning.private_order import load_order_class

    # The constructor reads only these attributes of a stage, no process group.
    stages: Any = [
        SimpleNamespace(
            num_stages=pp * stages_per_rank,
            group_size=pp,
            group_rank=0,
            stage_index=0,
            submod=None,
            is_last=False,
        )
        for _ in range(stages_per_rank)
    ]
    schedule: Any = load_order_class(name)(stages, num_microbatches)
    order: dict[int, list[Any]] = schedule.pipeline_order
    return order


def planned_schedule(plan: Plan) -> PipelineSchedule:
    """Return the actions of each pipeline rank; of a single stage without a pipeline.

    Raises:
        InvalidConfig: if the CSV file of the schedule has become invalid.
    """
    if plan.pipeline is None:
        return single_stage_schedule(plan.num_microbatches)
    if plan.pipeline.has_schedule_file:
        return read_schedule_csv(Path(plan.schedule_name), plan.pp)
    return build_schedule(plan.schedule_name, plan.pp, plan.stages_per_rank, plan.num_microbatches)


def find_pairs(plan: Plan) -> dict[Action, Action]:
    """Return the forward passes that overlap with a backward pass, each with it.

    See `weft.parallel.pass_overlap`.
    """
    pairs: dict[Action, Action] = {}
    if plan.overlaps_dispatch:
        sizes = plan.pp, plan.stages_per_rank, plan.num_microbatches
        for order in _torch_order(plan.schedule_name, *sizes).values():
            for action in filter(None, order):
                if action.sub_actions:
                    forward, backward = _flatten_actions([action])
                    pairs[forward] = backward
    return pairs


def single_stage_schedule(num_microbatches: int) -> PipelineSchedule:
    """Return the schedule of a rank that holds the entire model."""
    kinds: tuple[ActionKind, ActionKind] = ("F", "B")
    return {0: [Action(0, kind, m) for m in range(num_microbatches) for kind in kinds]}


def stage_indices(order: Iterable[Action]) -> list[int]:
    """Return the sorted stages of a rank's actions."""
    return sorted({action.stage for action in order})


def _order_1f1b(rank: int, pp: int, num_microbatches: int) -> list[Action]:
    warmup = min(num_microbatches, pp - rank)
    order = [Action(rank, "F", m) for m in range(warmup)]
    for m in range(num_microbatches):
        order.append(Action(rank, "B", m))
        if m + warmup < num_microbatches:
            order.append(Action(rank, "F", m + warmup))
    return order


def _flatten_actions(order: Iterable[Any]) -> Iterable[Action]:
    """Yield torch's actions of one rank; split overlapped ones, drop idle slots."""
    for action in order:
        if action is None:
            continue
        if action.sub_actions:
            yield from _flatten_actions(action.sub_actions)
        else:
            yield Action(action.stage_index, action.computation_type.value, action.microbatch_index)


def max_pending_backwards(order: Iterable[tuple[int, str, int]]) -> dict[tuple[int, str], int]:
    """Return the peak number of microbatches that await each half of backward.

    Args:
        order: actions of a rank, as (stage, kind, microbatch).

    Returns:
        The peak by (stage, "I" or "W").
    """
    pending: Counter[tuple[int, str]] = Counter()
    peak: dict[tuple[int, str], int] = {}
    for stage, kind, _ in order:
        for half in kind if kind in "IW" else "IW":
            pending[stage, half] += 1 if kind == "F" else -1
            peak[stage, half] = max(peak.get((stage, half), 0), pending[stage, half])
    return peak


def max_in_flight(schedule: PipelineSchedule) -> list[int]:
    """Return the peak number of microbatches whose activations each stage keeps.

    A stage keeps them until the weight half of their backward pass.
    """
    peak = {
        key: count
        for order in schedule.values()
        for key, count in max_pending_backwards(order).items()
    }
    return [peak[key] for key in sorted(peak) if key[1] == "W"]


def join_halves(schedule: PipelineSchedule) -> PipelineSchedule:
    """Return the schedule with whole backward passes, where the input halves were."""
    return {
        rank: [a._replace(kind="B") if a.kind == "I" else a for a in order if a.kind != "W"]
        for rank, order in schedule.items()
    }


def stage_index_to_rank(schedule: PipelineSchedule) -> list[int]:
    """Return the pipeline rank of each stage."""
    ranks = {action.stage: rank for rank, order in schedule.items() for action in order}
    return [ranks[stage] for stage in sorted(ranks)]


def read_schedule_csv(path: Path, pp: int) -> PipelineSchedule:
    """Read a schedule from a CSV file and check that it is a complete training step.

    Raises:
        InvalidConfig: with the first error in the file.
    """

    def invalid(rule: str) -> InvalidConfig:
        remedy = "write one line per rank, with cells such as 0F3, 0B3 (or 0I3 and 0W3)"
        return InvalidConfig([ConfigError("pipeline.schedule", str(path), rule, remedy)])

    try:
        lines = [line for line in csv.reader(path.read_text("utf-8").splitlines()) if line]
    except (OSError, ValueError, csv.Error) as exception:
        raise invalid(f"cannot be read: {exception}") from exception
    if len(lines) != pp:
        raise invalid(f"has {len(lines)} lines for parallel.pp={pp} ranks")
    schedule: PipelineSchedule = {}
    for rank, line in enumerate(lines):
        schedule[rank] = []
        for cell in (cell.strip() for cell in line):
            match = re.fullmatch(r"(\d{1,4})(F|B|I|W)(\d{1,6})", cell)
            if match:
                schedule[rank].append(Action(int(match[1]), match[2], int(match[3])))  # type: ignore[arg-type]
            elif cell:
                raise invalid(f"has an invalid action {cell!r} in line {rank + 1}")
    if rule := _find_error(schedule):
        raise invalid(rule)
    return schedule


def _find_error(schedule: PipelineSchedule) -> str:
    """Return why the schedule is not a complete training step; empty if it is."""
    ranks_by_stage: dict[int, set[int]] = {}
    for rank, order in schedule.items():
        for action in order:
            ranks_by_stage.setdefault(action.stage, set()).add(rank)
    num_stages = len(ranks_by_stage)
    if not num_stages or sorted(ranks_by_stage) != list(range(num_stages)):
        return f"has stages {sorted(ranks_by_stage)}, which are not numbered from 0 without gaps"
    for stage, ranks in ranks_by_stage.items():
        if len(ranks) > 1:
            return f"has stage {stage} on ranks {sorted(ranks)}, not on one rank"
    if any(not order for order in schedule.values()):
        return "has a rank without a stage"
    actions = [action for order in schedule.values() for action in order]
    num_microbatches = num_scheduled_microbatches(schedule)
    expected = num_stages * num_microbatches
    forwards, backwards, inputs, weights = (
        {action[::2] for action in actions if action.kind == kind} for kind in "FBIW"
    )
    if (
        len(forwards) != expected
        or len(backwards | inputs) != expected
        or inputs != weights
        or backwards & inputs
        or len(actions) != expected + len(backwards) + 2 * len(inputs)
    ):
        rule = (
            f"does not run each of {num_microbatches} microbatches once forward and once backward"
        )
        return f"{rule} in each of {num_stages} stages"
    if len(list(execution_order(schedule))) < len(actions):
        return "deadlocks: its actions wait for each other"
    return ""


def num_scheduled_microbatches(schedule: PipelineSchedule) -> int:
    """Return the number of microbatches of a step."""
    return 1 + max(action.microbatch for order in schedule.values() for action in order)


# --------------------------------------------------------------------------- execution

# (stage, kind, microbatch).  B also stands for I, the half that the previous stage waits for.
Dependency = tuple[int, str, int]


def execution_order(
    schedule: PipelineSchedule, paired: Collection[Action] = ()
) -> Iterator[tuple[int, Action, list[Dependency]]]:
    """Yield all actions in an order in which they can run.

    Activations come from the previous stage and gradients from the next stage.  The iterator ends
    early if the remaining actions deadlock.

    Args:
        schedule: actions of each pipeline rank, in order.
        paired: actions that start together with the next one of their rank.

    Yields:
        The rank, its action, and the dependencies of the action, or of both if it is paired.
    """
    last_stage = max(action.stage for order in schedule.values() for action in order)
    done: set[Dependency] = set()
    next_index = dict.fromkeys(schedule, 0)
    has_progress = True
    while has_progress:
        has_progress = False
        for rank, order in schedule.items():
            while next_index[rank] < len(order):
                index = next_index[rank]
                together = order[index : index + 1 + (order[index] in paired)]
                dependencies = [d for a in together for d in _dependencies(*a, last_stage)]
                if not done.issuperset(dependencies):
                    break
                for action in together:
                    yield rank, action, dependencies
                    stage, kind, m = action
                    done.add((stage, "B" if kind == "I" else kind, m))
                next_index[rank] += len(together)
                has_progress = True


def _dependencies(stage: int, kind: str, m: int, last_stage: int) -> list[Dependency]:
    if kind == "F":
        return [(stage - 1, "F", m)] if stage > 0 else []
    if kind == "W":
        return [(stage, "B", m)]
    return [(stage, "F", m), (stage + 1, "B", m)] if stage < last_stage else [(stage, "F", m)]
