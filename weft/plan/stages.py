"""Pipeline stages: where to cut a model's consecutive units.

A pipeline is as fast as its slowest stage, and needs the memory of its largest one.  Equal
numbers of blocks give neither: the head multiplies by the whole vocabulary (in Llama 3.1 8B as
much work as two blocks), the embedding weighs as much as the head and computes nothing, and
under 1F1B the first of S stages keeps the activations of S microbatches while the last keeps
those of one.  So the units (the embedding, the blocks, the head) are cut by what they cost.

There are few enough cuts to find the best one exactly, by dynamic programming over "the units
from i on, in the stages from s on".  One thing there is easily wrong.  A pair of objectives
(slowest stage first, largest memory among equals) cannot be minimised as a pair: the suffix
with the better time may have the worse memory, and its time may not even matter because an
earlier stage is slower anyway.  Each objective alone can, so they are solved one after another,
each with the optimum of those before as a bound on every stage.

Sums of floating-point numbers depend on their order, and a bound that is met exactly must be
seen to be met.  All costs are therefore turned into whole multiples of one common unit first:
every comparison below is of integers, and every tie is a real one.

What is left out: communication between stages.  Each boundary carries the same activations, so
it does not tell one cut from another.

Names: unit i of n, stage s of S; bytes and times are one rank's.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Literal

from weft.config.errors import ConfigError

if TYPE_CHECKING:
    from weft.models.family import Unit

Objective = Literal["speed", "memory"]


# --------------------------------------------------------------------------- the cut


def partition(
    seconds: Sequence[float],
    state_bytes: Sequence[float],
    activation_bytes: Sequence[float],
    in_flight: Sequence[int],
    objective: Objective = "speed",
) -> list[range]:
    """Cut units into consecutive stages, each of at least one unit, in the best possible way.

    The memory of a stage is its units' ``state_bytes`` and, for every microbatch in flight,
    their ``activation_bytes``.  *speed* minimises the slowest stage; among those cuts the
    largest memory; among those the sum of the squares of the stages' times, which is smallest
    where they are most even.  *memory* minimises the largest memory, then the slowest stage,
    then the squares.  Among cuts equal in all of that the first stages get the fewest units.

    In a schedule where a rank has several stages this still cuts stages, not ranks: it makes
    the slowest *stage* fastest.

    Args:
        seconds: of each unit, forward and backward of one microbatch, in any unit of time.
        state_bytes: of each unit: parameters, gradients, optimizer states.
        activation_bytes: what each unit keeps for backward of one microbatch.
        in_flight: for each stage, the microbatches whose activations it keeps at its worst
            moment.  Of M microbatches: ``min(M, S - s)`` under 1F1B, ``M`` under GPipe.

    Returns:
        The units of each stage.

    Raises:
        ValueError: if a cost is negative or not finite, lengths do not agree, or there are fewer
            units than stages.
    """
    n, num_stages = len(seconds), len(in_flight)
    if len(state_bytes) != n or len(activation_bytes) != n:
        raise ValueError("seconds, state_bytes and activation_bytes must be of equal length")
    costs = [*seconds, *state_bytes, *activation_bytes]
    if not all(math.isfinite(cost) and cost >= 0 for cost in costs):
        raise ValueError("costs of units must be finite and not negative")
    if num_stages == 0 or min(in_flight) < 1:
        raise ValueError("in_flight needs one number per stage, of at least 1")
    if n < num_stages:
        raise ValueError(f"{n} units are not enough for {num_stages} stages")

    # Prefix sums: the first i units' costs, as integers.
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


# Of stage s with the units from i to before j.  Grows with every unit that joins.
StageCost = Callable[[int, int, int], int]


def _solve(
    cost: StageCost,
    combine: Callable[[int, int], int],
    bounds: Sequence[tuple[StageCost, int]],
    num_units: int,
    num_stages: int,
) -> tuple[int, list[range]]:
    """The smallest total, over cuts in which every stage keeps all bounds.

    Args:
        cost: of one stage, not negative.
        combine: a stage's cost with the total of those after it: ``max``, or the sum.
        bounds: costs, each with the most of it that any stage may have; some cut keeps them.

    Returns:
        That total and the cut, the one with the earliest ends among equals.
    """
    # best[i]: total of the units from i on in the stages from s on, and where stage s ends.
    best: dict[int, tuple[int, int]] = {num_units: (0, 0)}
    choices: list[dict[int, tuple[int, int]]] = []
    for s in reversed(range(num_stages)):
        after, best = best, {}
        for i in range(s, num_units) if s else [0]:
            least: tuple[int, int] | None = None
            for j in range(i + 1, num_units + 1):
                if any(bounded(s, i, j) > most for bounded, most in bounds):
                    break  # more units only make it worse
                own = cost(s, i, j)
                if least and own >= least[0]:
                    break  # likewise, whatever follows
                if j in after:
                    total = combine(own, after[j][0])
                    if not least or total < least[0]:
                        least = (total, j)
            if least:
                best[i] = least
        choices.append(best)
    cut, i = [], 0
    for choice in reversed(choices):
        j = choice[i][1]
        cut.append(range(i, j))
        i = j
    return best[0][0], cut


def _to_common_unit(values: Sequence[float]) -> list[int]:
    """The values as multiples of one common unit, exactly: every float is a fraction."""
    fractions = [Fraction(value) for value in values]
    unit = math.lcm(*(fraction.denominator for fraction in fractions))
    return [int(fraction * unit) for fraction in fractions]


def _prefix_sums(values: Sequence[int]) -> list[int]:
    return list(itertools.accumulate(values, initial=0))


# --------------------------------------------------------------------------- stages of a model


@dataclass(frozen=True)
class Stage:
    """Consecutive units of a model that one rank computes."""

    first: int  # its first unit
    end: int  # the unit after its last
    name: str  # of its units, for people
    blocks: int
    share: float  # of the time of all stages
    state_bytes: float
    activation_bytes: float  # of one microbatch
    in_flight: int  # microbatches whose activations it keeps at its worst moment

    @property
    def units(self) -> range:
        """Its units, as the model family's ``keep`` takes them."""
        return range(self.first, self.end)

    @property
    def memory_bytes(self) -> float:
        return self.state_bytes + self.in_flight * self.activation_bytes


def split_into_stages(
    units: Sequence[Unit],
    in_flight: Sequence[int],
    tokens_per_microbatch: float,
    bytes_per_param: float,
    objective: Objective = "speed",
    layers: Sequence[int] = (),
) -> list[Stage]:
    """The stages of a model, cut by cost with `partition`, or as ``layers`` says.

    Time is taken to be proportional to the units' FLOPs.

    Args:
        units: the embedding, the blocks, the head.
        in_flight: for each stage, see `partition`; its length is the number of stages.
        tokens_per_microbatch: of one rank: a row cut by tensor or context parallelism counts
            in part.
        bytes_per_param: state of one parameter on one rank: where states are sharded over N
            ranks, their bytes divided by N.
        objective: see `partition`.
        layers: blocks of each stage, instead of cutting by cost.

    Raises:
        ValueError: if there are fewer units than stages, or `check_layers_per_stage` finds ``layers``
            impossible.
    """
    seconds = [unit.flops_per_token for unit in units]
    state_bytes = [unit.params * bytes_per_param for unit in units]
    activation_bytes = [unit.activation_bytes_per_token * tokens_per_microbatch for unit in units]
    if layers:
        if problems := check_layers_per_stage(layers, len(in_flight), len(units) - 2):
            raise ValueError("\n".join(str(problem) for problem in problems))
        cut = _split_by_layers(layers)
    else:
        cut = partition(seconds, state_bytes, activation_bytes, in_flight, objective)
    total = math.fsum(seconds) or 1.0
    return [
        Stage(
            first=stage.start,
            end=stage.stop,
            name=_format_units([units[i].name for i in stage]),
            blocks=sum(0 < i < len(units) - 1 for i in stage),
            share=math.fsum(seconds[i] for i in stage) / total,
            state_bytes=math.fsum(state_bytes[i] for i in stage),
            activation_bytes=math.fsum(activation_bytes[i] for i in stage),
            in_flight=count,
        )
        for stage, count in zip(cut, in_flight, strict=True)
    ]


def check_layers_per_stage(layers: Sequence[int], num_stages: int, num_blocks: int) -> list[ConfigError]:
    """Every reason why a model of ``num_blocks`` cannot be cut into stages of ``layers`` blocks."""
    problems = []
    shown = list(layers)
    depends = ("parallel.pp", "pipeline.stages_per_rank", "model.num_layers")
    even, rest = divmod(num_blocks, num_stages)
    # Those left over go to the middle: the outer stages also have the embedding and the head.
    middle_first = [*range(1, num_stages - 1), num_stages - 1, 0]
    example = [even + (s in middle_first[:rest]) for s in range(num_stages)]
    remedy = (
        f"such as {example}, or leave it out to cut by cost"
        if num_blocks >= num_stages - 2
        else f"use at most {num_blocks + 2} stages"
    )

    def problem(rule: str) -> None:
        problems.append(ConfigError("pipeline.layers_per_stage", shown, rule, remedy, depends))

    if len(layers) != num_stages:
        problem(f"lists {len(layers)} stages, and there are {num_stages}")
    if sum(layers) != num_blocks:
        problem(f"adds up to {sum(layers)} blocks, and the model has {num_blocks}")
    # The first stage still has the embedding, and the last the head.
    empty = [s for s in range(1, len(layers) - 1) if layers[s] == 0]
    if empty or any(count < 0 for count in layers):
        problem("has a stage without a block; only the first and the last may have none")
    return problems


def _split_by_layers(layers: Sequence[int]) -> list[range]:
    """Units of each stage: the embedding is unit 0, and the head the last."""
    ends = [1 + end for end in itertools.accumulate(layers)]
    ends[-1] += 1
    return [range(first, end) for first, end in itertools.pairwise([0, *ends])]


def _format_units(units: Sequence[str]) -> str:
    """``embed_tokens, layers.0, layers.1, layers.2`` -> ``embed_tokens + layers 0-2``."""
    parts = []
    for (stem, numbered), run in itertools.groupby(units, key=_split_index):
        names = list(run)
        first, last = names[0].rpartition(".")[2], names[-1].rpartition(".")[2]
        numbers = first if first == last else f"{first}-{last}"
        parts.append(f"{stem} {numbers}" if numbered else " + ".join(names))
    return " + ".join(parts)


def _split_index(name: str) -> tuple[str, bool]:
    """A unit's name without its number, and whether it had one."""
    stem, _, last = name.rpartition(".")
    return (stem, True) if stem and last.isdigit() else (name, False)


# --------------------------------------------------------------------------- stages of a rank


def imbalance(values: Sequence[float]) -> float:
    """The largest over the mean, minus 1: what evenness would win."""
    mean = math.fsum(values) / len(values)
    return max(values) / mean - 1 if mean else 0.0


def format_stage_table(stages: Sequence[Stage], ranks: Sequence[int]) -> list[str]:
    """Stages as lines of text; below them, where ranks have several, the sums of each rank.

    Args:
        ranks: of each stage, the pipeline rank that holds it.
    """
    rows = [
        [str(s), str(rank), stage.name, str(stage.blocks), _percent(stage.share)]
        for s, (rank, stage) in enumerate(zip(ranks, stages, strict=True))
    ]
    lines = format_columns(["stage", "rank", "units", "blocks", "time %"], rows, left={2})
    lines += [_slowest("stage", [stage.share for stage in stages])]
    held = [[s for s, home in enumerate(ranks) if home == rank] for rank in sorted(set(ranks))]
    if len(held) < len(stages):
        shares = [math.fsum(stages[s].share for s in mine) for mine in held]
        blocks = [sum(stages[s].blocks for s in mine) for mine in held]
        rows = [
            [str(rank), ", ".join(map(str, mine)), str(count), _percent(share)]
            for rank, (mine, count, share) in enumerate(zip(held, blocks, shares, strict=True))
        ]
        lines += ["", *format_columns(["rank", "stages", "blocks", "time %"], rows, {1})]
        lines += [_slowest("rank", shares)]
    return lines


def _percent(share: float) -> str:
    return f"{100 * share:.1f}"


def _slowest(what: str, shares: Sequence[float]) -> str:
    slowest = max(range(len(shares)), key=shares.__getitem__)
    return f"slowest {what}: {slowest}, {100 * imbalance(shares):.1f}% above the mean"


def format_columns(head: Sequence[str], rows: Sequence[Sequence[str]], left: Collection[int]) -> list[str]:
    """Lines of columns, right-aligned but those in ``left``."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if c in left else cell.rjust(width)
            for c, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in [head, *rows]
    ]
