"""Which rank of a pipeline does what, in which order.

A schedule is data: for every rank an ordered list of actions.  For the schedules with several
stages per rank it is read from the very object of torch.distributed.pipelining that the engine
runs; those with one stage per rank have a runtime of their own there, whose order is spelled out
here (torch's own list for 1F1B is wrong for the last rank in 2.13).  A schedule from a CSV file is
its own timetable: one line a rank, cells like ``0F3`` (stage 0, forward, microbatch 3), ``0B3``
(backward), or ``0I3`` and ``0W3`` (its halves: gradients of inputs, of weights).

From it follow the things that would otherwise be formulas beside the truth: how many stages there
are, where they sit, and how many microbatches' activations a stage keeps at most.
"""

from __future__ import annotations

import csv
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple

from weft.config.errors import ConfigError, suggest

ActionKind = Literal["F", "B", "I", "W"]


class Action(NamedTuple):
    """``kind``: F forward, B backward, or in halves I (of inputs) and W (of weights)."""

    stage: int
    kind: ActionKind
    microbatch: int


# rank of the pipeline -> what it does, in order
PipelineSchedule = dict[int, list[Action]]


@dataclass(frozen=True)
class ScheduleSpec:
    """What a schedule of torch.distributed.pipelining asks for.

    ``stages_per_rank``: the only possible number, or None for any from 2.
    ``splits_backward``: gradients of inputs and of weights are computed apart, which
    torch.compile and selective recomputation cannot do, and full recomputation does anew for each.
    """

    name: str
    stages_per_rank: int | None
    splits_backward: bool = False

    def allows(self, microbatches: int, pp: int, stages: int) -> bool:
        """Whether it can run so many microbatches over so many stages in all."""
        if self.name in ("1F1B", "DualPipeV"):
            return microbatches >= stages
        if self.name in ("Interleaved1F1B", "InterleavedZeroBubble"):
            return microbatches % max(1, microbatches // pp) == 0
        return True

    def rule(self, pp: int, stages: int) -> str:
        """What `allows` asks for, in words."""
        if self.name in ("1F1B", "DualPipeV"):
            return f"at least as many microbatches as stages, {stages}"
        return f"a multiple of m // {pp} microbatches m (any below {2 * pp} or multiple of {pp})"


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


def is_schedule_file(schedule: str) -> bool:
    """Whether ``pipeline.schedule`` names a CSV file."""
    return schedule.lower().endswith(".csv")


def find_schedule(name: str) -> ScheduleSpec | ConfigError:
    """The schedule of that name, in any case of letters."""
    for known, schedule in SCHEDULES.items():
        if known.lower() == name.lower():
            return schedule
    remedy = f"{suggest(name, SCHEDULES)}, or the path of a .csv file"
    return ConfigError("pipeline.schedule", name, "no such pipeline schedule", remedy)


@lru_cache(maxsize=64)
def build_schedule(name: str, pp: int, stages_per_rank: int, microbatches: int) -> PipelineSchedule:
    """The order of a schedule by name.

    Raises:
        ValueError: torch's, where the schedule does not allow the numbers.
    """
    if name == "GPipe":
        return {
            rank: [
                *(Action(rank, "F", m) for m in range(microbatches)),
                *(Action(rank, "B", m) for m in range(microbatches)),
            ]
            for rank in range(pp)
        }
    if name == "1F1B":
        return {rank: _order_1f1b(rank, pp, microbatches) for rank in range(pp)}
    from torch.distributed.pipelining.schedules import get_schedule_class

    # What the constructor asks a stage for: numbers, no process group.
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
    schedule = get_schedule_class(name)(stages, microbatches)
    return {rank: list(_flatten_actions(row)) for rank, row in schedule.pipeline_order.items()}


def single_stage_schedule(microbatches: int) -> PipelineSchedule:
    """What a rank does that has the whole model."""
    kinds: tuple[ActionKind, ActionKind] = ("F", "B")
    return {0: [Action(0, kind, m) for m in range(microbatches) for kind in kinds]}


def stage_indices(order: Iterable[Action]) -> list[int]:
    """The stages of a rank, by its actions."""
    return sorted({action.stage for action in order})


def _order_1f1b(rank: int, pp: int, microbatches: int) -> list[Action]:
    warmup = min(microbatches, pp - rank)
    order = [Action(rank, "F", m) for m in range(warmup)]
    for m in range(microbatches):
        order.append(Action(rank, "B", m))
        if m + warmup < microbatches:
            order.append(Action(rank, "F", m + warmup))
    return order


def _flatten_actions(row: Iterable[Any]) -> Iterable[Action]:
    """Torch's actions of one rank; one that overlaps two counts as both, idle places as none."""
    for action in row:
        if action is None:
            continue
        if action.sub_actions:
            yield from _flatten_actions(action.sub_actions)
        else:
            yield Action(action.stage_index, action.computation_type.value, action.microbatch_index)


def max_pending_backwards(order: Iterable[tuple[int, str, int]]) -> dict[tuple[int, str], int]:
    """The most microbatches of each stage of a rank that wait at once for one half of a backward
    pass: by stage and I or W.

    Args:
        order: of the rank, as `Action` or like it: stage, kind, and what is not looked at.
    """
    now: Counter[tuple[int, str]] = Counter()
    most: dict[tuple[int, str], int] = {}
    for stage, kind, _ in order:
        for half in kind if kind in "IW" else "IW":
            now[stage, half] += 1 if kind == "F" else -1
            most[stage, half] = max(most.get((stage, half), 0), now[stage, half])
    return most


def max_in_flight(table: PipelineSchedule) -> list[int]:
    """For each stage the most microbatches whose activations it keeps at once: until the second
    half of their backward, which still needs them."""
    most = {key: count for order in table.values() for key, count in max_pending_backwards(order).items()}
    return [most[key] for key in sorted(most) if key[1] == "W"]


def stage_index_to_rank(table: PipelineSchedule) -> list[int]:
    """For each stage the rank of the pipeline that holds it."""
    home = {action.stage: rank for rank, order in table.items() for action in order}
    return [home[stage] for stage in sorted(home)]


def read_schedule_csv(path: Path, pp: int) -> PipelineSchedule | ConfigError:
    """A schedule from a file, checked: every stage runs every microbatch once, each way, in order.

    Returns:
        The timetable, or what is wrong with the file.
    """

    def problem(rule: str) -> ConfigError:
        remedy = "one line a rank, cells like 0F3, 0B3 (or 0I3 and 0W3)"
        return ConfigError("pipeline.schedule", str(path), rule, remedy)

    try:
        rows = [row for row in csv.reader(path.read_text("utf-8").splitlines()) if row]
    except (OSError, ValueError, csv.Error) as error:
        return problem(f"cannot be read: {error}")
    if len(rows) != pp:
        return problem(f"has {len(rows)} lines for parallel.pp = {pp} ranks")
    table: PipelineSchedule = {}
    for rank, row in enumerate(rows):
        table[rank] = []
        for cell in (cell.strip() for cell in row):
            match = re.fullmatch(r"(\d{1,4})(F|B|I|W)(\d{1,6})", cell)
            if match:
                table[rank].append(Action(int(match[1]), match[2], int(match[3])))  # type: ignore[arg-type]
            elif cell:
                return problem(f"line {rank + 1} has {cell!r}, which is no action")
    flaw = _find_error(table)
    return problem(flaw) if flaw else table


def _find_error(table: PipelineSchedule) -> str:
    """What keeps a timetable from being a training step, or ''."""
    homes: dict[int, set[int]] = {}
    for rank, order in table.items():
        for action in order:
            homes.setdefault(action.stage, set()).add(rank)
    if not homes or sorted(homes) != list(range(len(homes))):
        return f"has stages {sorted(homes)}, which do not count up from 0"
    for stage, ranks in homes.items():
        if len(ranks) > 1:
            return f"has stage {stage} on ranks {sorted(ranks)}"
    if any(not order for order in table.values()):
        return "has a rank without a stage"
    every = [action for order in table.values() for action in order]
    microbatches = num_scheduled_microbatches(table)
    expected = len(homes) * microbatches
    forwards, whole, *halves = ({a[::2] for a in every if a.kind == kind} for kind in "FBIW")
    if (
        len(forwards) != expected
        or len(whole | halves[0]) != expected
        or halves[0] != halves[1]
        or whole & halves[0]
        or len(every) != expected + len(whole) + 2 * len(halves[0])
    ):
        rule = f"does not run each of {microbatches} microbatches once forward and once backward"
        return f"{rule} in each of {len(homes)} stages"
    if len(list(execution_order(table))) < len(every):
        return "never ends: its actions wait for each other"
    return ""


def num_scheduled_microbatches(table: PipelineSchedule) -> int:
    """Microbatches of the whole step."""
    return 1 + max(action.microbatch for order in table.values() for action in order)


# --------------------------------------------------------------------------- as it runs

# Like an `Action`; B stands for the first half of a backward, too, which gives the gradients that
# others wait for.
Dependency = tuple[int, str, int]


def execution_order(table: PipelineSchedule) -> Iterator[tuple[int, Action, list[Dependency]]]:
    """All actions in an order in which they can run: activations come from the stage before,
    gradients from the one after.

    It ends early where what is left waits for each other forever.

    Yields:
        The rank, its action, and what that needed.
    """
    last = max(action.stage for order in table.values() for action in order)
    done: set[Dependency] = set()
    at = dict.fromkeys(table, 0)
    moved = True
    while moved:
        moved = False
        for rank, order in table.items():
            while at[rank] < len(order):
                stage, kind, m = action = order[at[rank]]
                needs = _dependencies(stage, kind, m, last)
                if not done.issuperset(needs):
                    break
                yield rank, action, needs
                done.add((stage, "B" if kind == "I" else kind, m))
                at[rank] += 1
                moved = True


def _dependencies(stage: int, kind: str, m: int, last: int) -> list[Dependency]:
    if kind == "F":
        return [(stage - 1, "F", m)] if stage > 0 else []
    if kind == "W":
        return [(stage, "B", m)]
    return [(stage, "F", m), (stage + 1, "B", m)] if stage < last else [(stage, "F", m)]
