"""Pipeline stages: split a model's consecutive units at the best boundaries.

The slowest stage sets the speed of a pipeline, and the largest stage its memory.  Stages with equal
numbers of blocks balance neither.  The head multiplies by the vocabulary (in Llama 3.1 8B as much
work as two blocks); the embedding is as large as the head and computes nothing; and under 1F1B the
first of S stages keeps the activations of S microbatches, the last those of one.  So weft splits
the units (the embedding, the blocks, the head) by cost.

Dynamic programming over "units from i on, in stages from s on" finds the optimal split.  It cannot
minimize a pair of objectives (slowest stage first, then largest memory) as a pair: the suffix with
the better time may have the worse memory, while an earlier stage is slower anyway.  Each single
objective can be minimized, so weft solves them in turn, and each optimum bounds the later ones.

A sum of floating-point numbers depends on its order, and a stage that meets a bound exactly must
not appear to exceed it.  So all costs become integer multiples of a common unit first: every
comparison is of integers.

The costs exclude communication between stages: every boundary carries the same activations.

Names: unit i of n, stage s of S; bytes and times are those of one rank.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import TYPE_CHECKING, Literal

from weft.config.errors import ConfigError, ConfigErrors
from weft.config.formatting import format_columns
from weft.planning.plan import Stage

if TYPE_CHECKING:
    from weft.models.family import UnitCost

Objective = Literal["speed", "memory"]


# --------------------------------------------------------------------------- partition


def partition(
    seconds: Sequence[float],
    state_bytes: Sequence[float],
    activation_bytes: Sequence[float],
    in_flight: Sequence[int],
    objective: Objective = "speed",
) -> list[range]:
    """Split units into consecutive stages of at least one unit, optimally.

    The memory of a stage is the ``state_bytes`` of its units plus, per microbatch in flight, their
    ``activation_bytes``.  *speed* minimizes the slowest stage; among those splits the largest
    memory; among those the sum of the squares of the stages' times, which is smallest when they
    are most even.  *memory* minimizes the largest memory, then the slowest stage, then the
    squares.  Among equal splits the first stages get the fewest units.

    If a rank has several stages, this still balances stages, not ranks.

    Args:
        seconds: forward and backward time of each unit per microbatch, in any unit.
        state_bytes: bytes of parameters, gradients and optimizer states of each unit.
        activation_bytes: bytes that each unit saves for backward per microbatch.
        in_flight: peak number of microbatches whose activations each stage keeps.  Of M
            microbatches: ``min(M, S - s)`` under 1F1B, ``M`` under GPipe.
        objective: speed or memory.

    Returns:
        The units of each stage.

    Raises:
        ValueError: if a cost is negative or not finite, lengths differ, or there are fewer units
            than stages.
    """
    n, num_stages = len(seconds), len(in_flight)
    if len(state_bytes) != n or len(activation_bytes) != n:
        raise ValueError("seconds, state_bytes and activation_bytes must have equal lengths")
    costs = [*seconds, *state_bytes, *activation_bytes]
    if not all(math.isfinite(cost) and cost >= 0 for cost in costs):
        raise ValueError("the costs of units must be finite and non-negative")
    if num_stages == 0 or min(in_flight) < 1:
        raise ValueError("in_flight must have a number of at least 1 for each stage")
    if n < num_stages:
        raise ValueError(f"{n} units are not enough for {num_stages} stages")

    # Prefix sums of the costs, as integers.
    time = _prefix_sums(_to_common_unit(seconds))
    memory = _to_common_unit([*state_bytes, *activation_bytes])
    state, activation = _prefix_sums(memory[:n]), _prefix_sums(memory[n:])

    def seconds_of(s: int, i: int, j: int) -> int:
        return time[j] - time[i]

    def memory_of(s: int, i: int, j: int) -> int:
        return state[j] - state[i] + in_flight[s] * (activation[j] - activation[i])

    def square_of(s: int, i: int, j: int) -> int:
        return (time[j] - time[i]) ** 2

    first, second = (seconds_of, memory_of) if objective == "speed" else (memory_of, seconds_of)
    bounds: list[tuple[StageCost, int]] = []
    for cost in (first, second):
        bounds.append((cost, _solve(cost, max, bounds, n, num_stages)[0]))
    return _solve(square_of, int.__add__, bounds, n, num_stages)[1]


# The cost of stage s with units i to j - 1.  It does not decrease when a unit is added.
StageCost = Callable[[int, int, int], int]


def _solve(
    cost: StageCost,
    combine: Callable[[int, int], int],
    bounds: Sequence[tuple[StageCost, int]],
    num_units: int,
    num_stages: int,
) -> tuple[int, list[range]]:
    """Minimize the total cost over splits in which every stage satisfies all bounds.

    Args:
        cost: non-negative cost of one stage.
        combine: combines a stage's cost with the total of the later stages: ``max`` or a sum.
        bounds: costs, each with its maximum for any stage; at least one split satisfies them.
        num_units: number of units to split.
        num_stages: number of stages.

    Returns:
        The total and its split; among equals the one with the earliest boundaries.
    """
    # best[i]: minimal total of the units from i on in the stages from s on, and the end of stage s.
    best: dict[int, tuple[int, int]] = {num_units: (0, 0)}
    best_by_stage: list[dict[int, tuple[int, int]]] = []
    for s in reversed(range(num_stages)):
        later, best = best, {}
        for i in range(s, num_units) if s else [0]:
            minimum: tuple[int, int] | None = None
            for j in range(i + 1, num_units + 1):
                if any(bounded(s, i, j) > bound for bounded, bound in bounds):
                    break  # more units only cost more
                stage_cost = cost(s, i, j)
                if minimum and stage_cost >= minimum[0]:
                    break  # likewise, for any later stages
                if j in later:
                    total = combine(stage_cost, later[j][0])
                    if not minimum or total < minimum[0]:
                        minimum = (total, j)
            if minimum:
                best[i] = minimum
        best_by_stage.append(best)
    split, i = [], 0
    for choices in reversed(best_by_stage):
        j = choices[i][1]
        split.append(range(i, j))
        i = j
    return best[0][0], split


def _to_common_unit(values: Sequence[float]) -> list[int]:
    """Convert floats to exact integer multiples of one common unit."""
    fractions = [Fraction(value) for value in values]
    unit = math.lcm(*(fraction.denominator for fraction in fractions))
    return [int(fraction * unit) for fraction in fractions]


def _prefix_sums(values: Sequence[int]) -> list[int]:
    return list(itertools.accumulate(values, initial=0))


# --------------------------------------------------------------------------- stages of a model


def split_into_stages(
    units: Sequence[UnitCost],
    in_flight: Sequence[int],
    tokens_per_microbatch: float,
    bytes_per_param: float,
    objective: Objective = "speed",
    layers_per_stage: Sequence[int] = (),
) -> list[Stage]:
    """Split a model into stages, by cost or by ``layers_per_stage``.

    The time of a unit is assumed to be proportional to its FLOPs.

    Args:
        units: the embedding, the blocks, the head.
        in_flight: see `partition`; its length is the number of stages.
        tokens_per_microbatch: tokens on one rank, divided by the tensor and context degrees.
        bytes_per_param: bytes of state per parameter on one rank, after sharding.
        objective: see `partition`.
        layers_per_stage: blocks of each stage; overrides the costs.

    Raises:
        ValueError: if there are fewer units than stages, or `check_layers_per_stage` finds errors.
    """
    seconds = [unit.flops_per_token for unit in units]
    state_bytes = [unit.params * bytes_per_param for unit in units]
    activation_bytes = [unit.activation_bytes_per_token * tokens_per_microbatch for unit in units]
    if layers_per_stage:
        if errors := check_layers_per_stage(layers_per_stage, len(in_flight), len(units) - 2):
            raise ValueError("\n".join(str(error) for error in errors))
        split = _split_by_layers(layers_per_stage)
    else:
        split = partition(seconds, state_bytes, activation_bytes, in_flight, objective)
    total_seconds = math.fsum(seconds) or 1.0
    return [
        Stage(
            first_unit=stage.start,
            end_unit=stage.stop,
            name=_format_units([units[i].name for i in stage]),
            num_blocks=sum(0 < i < len(units) - 1 for i in stage),
            time_fraction=math.fsum(seconds[i] for i in stage) / total_seconds,
            state_bytes=math.fsum(state_bytes[i] for i in stage),
            activation_bytes=math.fsum(activation_bytes[i] for i in stage),
            in_flight=count,
        )
        for stage, count in zip(split, in_flight, strict=True)
    ]


def check_layers_per_stage(
    layers_per_stage: Sequence[int], num_stages: int, num_blocks: int
) -> list[ConfigError]:
    """Return the errors of ``layers_per_stage`` for a model of ``num_blocks``."""
    errors = ConfigErrors()
    depends = ("parallel.pp", "pipeline.stages_per_rank", "model.num_layers")
    even, remainder = divmod(num_blocks, num_stages)
    # Extra blocks go to the middle: the outer stages also have the embedding and the head.
    middle_first = [*range(1, num_stages - 1), num_stages - 1, 0]
    example = [even + (s in middle_first[:remainder]) for s in range(num_stages)]
    remedy = (
        f"use a list such as {example}, or remove the key to split by cost"
        if num_blocks >= num_stages - 2
        else f"use at most {num_blocks + 2} stages"
    )

    def add_error(rule: str) -> None:
        value = list(layers_per_stage)
        errors.add("pipeline.layers_per_stage", rule, remedy, depends, value=value)

    if len(layers_per_stage) != num_stages:
        add_error(f"lists {len(layers_per_stage)} stages, but the pipeline has {num_stages}")
    if sum(layers_per_stage) != num_blocks:
        add_error(f"adds up to {sum(layers_per_stage)} blocks, but the model has {num_blocks}")
    # Without blocks, the first stage still has the embedding, and the last the head.
    is_empty = [count == 0 for count in layers_per_stage[1:-1]]
    if any(is_empty) or any(count < 0 for count in layers_per_stage):
        add_error("has a stage without a block, which only the first and the last may be")
    return errors


def _split_by_layers(layers_per_stage: Sequence[int]) -> list[range]:
    """Return the units of each stage, with the embedding first and the head last."""
    ends = [1 + end for end in itertools.accumulate(layers_per_stage)]
    ends[-1] += 1
    return [range(first, end) for first, end in itertools.pairwise([0, *ends])]


def _format_units(units: Sequence[str]) -> str:
    """Format unit names, such as ``embed_tokens + layers 0-2``."""
    texts = []
    for (prefix, has_index), group in itertools.groupby(units, key=_split_index):
        names = list(group)
        first, last = names[0].rpartition(".")[2], names[-1].rpartition(".")[2]
        indices = first if first == last else f"{first}-{last}"
        texts.append(f"{prefix} {indices}" if has_index else " + ".join(names))
    return " + ".join(texts)


def _split_index(name: str) -> tuple[str, bool]:
    """Return a unit's name without its index, and True if it had one."""
    prefix, _, last = name.rpartition(".")
    return (prefix, True) if prefix and last.isdigit() else (name, False)


# --------------------------------------------------------------------------- tables


def imbalance(values: Sequence[float]) -> float:
    """Return the maximum over the mean, minus 1."""
    mean = math.fsum(values) / len(values)
    return max(values) / mean - 1 if mean else 0.0


def format_stage_table(stages: Sequence[Stage], stage_ranks: Sequence[int]) -> list[str]:
    """Format stages as lines of text, with sums per rank if ranks have several stages.

    Args:
        stages: stages of the pipeline, in order.
        stage_ranks: pipeline rank of each stage.
    """
    rows = [
        [str(s), str(rank), stage.name, str(stage.num_blocks), _percent(stage.time_fraction)]
        for s, (rank, stage) in enumerate(zip(stage_ranks, stages, strict=True))
    ]
    lines = format_columns(["stage", "rank", "units", "blocks", "time %"], rows, left={2})
    lines += [_format_slowest("stage", [stage.time_fraction for stage in stages])]
    by_rank = [
        [s for s, owner in enumerate(stage_ranks) if owner == rank]
        for rank in sorted(set(stage_ranks))
    ]
    if len(by_rank) < len(stages):
        fractions = [math.fsum(stages[s].time_fraction for s in indices) for indices in by_rank]
        rows = [
            [
                str(rank),
                ", ".join(map(str, indices)),
                str(sum(stages[s].num_blocks for s in indices)),
                _percent(fraction),
            ]
            for rank, (indices, fraction) in enumerate(zip(by_rank, fractions, strict=True))
        ]
        lines += ["", *format_columns(["rank", "stages", "blocks", "time %"], rows, {1})]
        lines += [_format_slowest("rank", fractions)]
    return lines


def _percent(fraction: float) -> str:
    return f"{100 * fraction:.1f}"


def _format_slowest(kind: str, fractions: Sequence[float]) -> str:
    slowest = max(range(len(fractions)), key=fractions.__getitem__)
    return f"slowest {kind}: {slowest}, {100 * imbalance(fractions):.1f}% above the mean"
