"""Stages: the optimal split, compared with every possible split, and its tables."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Sequence
from fractions import Fraction

import pytest

from weft.models.decoder_costs import unit_costs
from weft.models.families.llama import PRESETS
from weft.models.family import UnitCost
from weft.planning.devices import GIB
from weft.planning.plan import PipelinePlan, Stage
from weft.planning.stages import (
    Objective,
    check_layers_per_stage,
    format_stage_table,
    imbalance,
    partition,
    split_into_stages,
)

OBJECTIVES: tuple[Objective, ...] = ("speed", "memory")


def one_f_one_b(num_stages: int, microbatches: int = 10**6) -> list[int]:
    return [min(microbatches, num_stages - s) for s in range(num_stages)]


def best_by_trying_all(
    seconds: Sequence[float],
    state: Sequence[float],
    activation: Sequence[float],
    in_flight: Sequence[int],
    objective: Objective,
) -> list[range]:
    """Return the best of all splits in exact arithmetic, as `partition` documents."""
    n, num_stages = len(seconds), len(in_flight)
    candidates = []
    for inner in itertools.combinations(range(1, n), num_stages - 1):
        split_evenly = [range(a, b) for a, b in itertools.pairwise([0, *inner, n])]
        times = [sum(Fraction(seconds[i]) for i in stage) for stage in split_evenly]
        memories = [
            sum(Fraction(state[i]) + count * Fraction(activation[i]) for i in stage)
            for stage, count in zip(split_evenly, in_flight, strict=True)
        ]
        levels = [max(times), max(memories)]
        if objective == "memory":
            levels.reverse()
        squares = sum(time * time for time in times)
        candidates.append((*levels, squares, inner, split_evenly))
    return min(candidates)[-1]


# --------------------------------------------------------------------------- partition


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("costs", ["many ties", "tenths", "anything"])
def test_partition_is_the_best_of_all_splits(objective: Objective, costs: str) -> None:
    source = random.Random(f"{objective} {costs}")
    draw = {
        "many ties": lambda: source.randrange(4),
        # Equal sums of these differ as floats, so ties need exact comparison.
        "tenths": lambda: source.choice((0.1, 0.2, 0.3, 0.7)),
        "anything": lambda: source.random() * 10 ** source.randrange(4),
    }[costs]
    for _ in range(250):
        n = source.randrange(1, 9)
        num_stages = source.randrange(1, min(n, 5) + 1)
        seconds, state, activation = ([draw() for _ in range(n)] for _ in range(3))
        in_flight = source.choice(
            (
                one_f_one_b(num_stages, 2),
                one_f_one_b(num_stages),
                [3] * num_stages,  # GPipe
                [source.randrange(1, 4) for _ in range(num_stages)],
            )
        )
        costs_and_counts = seconds, state, activation, in_flight
        assert partition(*costs_and_counts, objective) == best_by_trying_all(
            *costs_and_counts, objective
        )


def test_partition_slower_rest_that_saves_memory_is_used() -> None:
    """The first stage takes 3 s, so the others may take 3 s too and need less memory."""
    result = partition([3, 1, 1, 2], [1, 2, 1, 1], [0] * 4, [1, 1, 1])
    assert result == [range(0, 1), range(1, 2), range(2, 4)]


def test_partition_bound_that_is_met_exactly_is_allowed() -> None:
    """As floats, 0.1 + 0.1 + 0.1 is more than 0.3, but every such sum is equal."""
    assert partition([0.1] * 12, [0.1] * 12, [0] * 12, [1] * 4) == [
        range(0, 3),
        range(3, 6),
        range(6, 9),
        range(9, 12),
    ]


def test_partition_microbatches_in_flight_shrink_the_first_stages() -> None:
    ones = [1.0] * 12
    assert partition(ones, [0] * 12, ones, [4, 2, 1], "memory") == [
        range(0, 2),
        range(2, 6),
        range(6, 12),
    ]
    even = [range(0, 4), range(4, 8), range(8, 12)]
    assert partition(ones, [0] * 12, ones, [3, 3, 3], "memory") == even
    assert partition(ones, [0] * 12, ones, [4, 2, 1], "speed") == even


def test_partition_each_stage_has_its_number_in_flight() -> None:
    """The stage with the most microbatches in flight gets the fewest units."""
    result = partition([1.0] * 9, [0] * 9, [1.0] * 9, [1, 8, 1], "memory")
    assert result == [range(0, 4), range(4, 5), range(5, 9)]


def test_partition_more_stages_are_never_slower() -> None:
    source = random.Random(0)
    for _ in range(30):
        n = source.randrange(6, 14)
        seconds, state = ([source.random() for _ in range(n)] for _ in range(2))
        slowest = [
            max(
                sum(seconds[i] for i in stage)
                for stage in partition(seconds, state, [0] * n, [1] * num_stages)
            )
            for num_stages in range(1, n + 1)
        ]
        assert all(b <= a + 1e-12 for a, b in itertools.pairwise(slowest))


def test_cut_of_one_stage_or_one_unit_each_is_trivial() -> None:
    def split_evenly(n: int, num_stages: int) -> list[range]:
        return partition([1] * n, [1] * n, [1] * n, [1] * num_stages)

    assert split_evenly(5, 1) == [range(5)]
    assert split_evenly(3, 3) == [range(0, 1), range(1, 2), range(2, 3)]
    assert partition([0] * 4, [0] * 4, [0] * 4, [1, 1]) == [range(0, 1), range(1, 4)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([1, 1], [1], [1, 1], [1]), "equal lengths"),
        (([1, -1], [1, 1], [1, 1], [1]), "non-negative"),
        (([1, float("nan")], [1, 1], [1, 1], [1]), "finite"),
        (([1, 1], [1, 1], [1, float("inf")], [1]), "finite"),
        (([1, 1], [1, 1], [1, 1], [1, 1, 1]), "2 units are not enough for 3 stages"),
        (([], [], [], [1]), "0 units"),
        (([1, 1], [1, 1], [1, 1], []), "in_flight"),
        (([1, 1], [1, 1], [1, 1], [1, 0]), "in_flight"),
    ],
)
def test_partition_impossible_costs_are_refused(
    arguments: tuple[object, ...], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        partition(*arguments)  # type: ignore[arg-type]


def test_partition_of_the_largest_models_is_fast() -> None:
    source = random.Random(0)
    costs = [[source.random() for _ in range(128)] for _ in range(3)]
    for objective in OBJECTIVES:
        start = time.process_time()
        partition(*costs, one_f_one_b(32), objective)
        assert time.process_time() - start < 1


# --------------------------------------------------------------------------- stages of a model

SEQ_LEN = 8192


def blocks_of(stages: list[Stage]) -> list[int]:
    return [stage.num_blocks for stage in stages]


@pytest.mark.parametrize(("preset", "num_stages"), [("8b", 4), ("70b", 8)])
def test_split_last_stage_with_the_head_has_fewer_blocks(preset: str, num_stages: int) -> None:
    model = unit_costs(PRESETS[preset], SEQ_LEN)
    in_flight = one_f_one_b(num_stages)
    stages = split_into_stages(model, in_flight, SEQ_LEN, 16)
    assert [stage.units.start for stage in stages[1:]] == [s.units.stop for s in stages[:-1]]
    assert (stages[0].first_unit, stages[-1].end_unit) == (0, len(model))
    assert sum(blocks_of(stages)) == len(model) - 2
    assert stages[-1].num_blocks < max(blocks_of(stages))
    assert sum(stage.time_fraction for stage in stages) == pytest.approx(1)
    # Equal numbers of blocks are possible, but then the last stage is slowest.
    by_count, rest = divmod(len(model) - 2, num_stages)
    assert rest == 0
    counted = split_into_stages(
        model, in_flight, SEQ_LEN, 16, layers_per_stage=[by_count] * num_stages
    )
    shares, counted_shares = (
        [stage.time_fraction for stage in split_evenly] for split_evenly in (stages, counted)
    )
    assert imbalance(shares) < imbalance(counted_shares)
    smallest = split_into_stages(model, in_flight, SEQ_LEN, 16, "memory")
    assert max(s.memory_bytes for s in smallest) < max(s.memory_bytes for s in stages)
    assert blocks_of(smallest)[:-1] == sorted(blocks_of(smallest)[:-1])


def test_split_llama_405b_equals_the_published_stages() -> None:
    """First and last of 16 stages have one block fewer (arXiv:2407.21783, 3.3.2)."""
    model = unit_costs(PRESETS["405b"], SEQ_LEN)
    assert blocks_of(split_into_stages(model, one_f_one_b(16), SEQ_LEN, 16)) == [7, *[8] * 14, 7]


def test_stage_costs_sum_its_units() -> None:
    model = unit_costs(PRESETS["8b"], SEQ_LEN)
    stages = split_into_stages(model, [4, 3, 2, 1], 1024, 2)
    for stage in stages:
        stage_units = [model[i] for i in stage.units]
        assert stage.state_bytes == 2 * sum(unit.params for unit in stage_units)
        remaining = 1024 * sum(unit.activation_bytes_per_token for unit in stage_units)
        assert stage.activation_bytes == remaining
        assert stage.memory_bytes == stage.state_bytes + stage.in_flight * remaining
        flops = sum(unit.flops_per_token for unit in stage_units)
        assert stage.time_fraction == pytest.approx(
            flops / sum(unit.flops_per_token for unit in model)
        )


def test_layers_by_hand() -> None:
    model = unit_costs(PRESETS["8b"], SEQ_LEN)
    stages = split_into_stages(model, [4, 3, 2, 1], SEQ_LEN, 16, layers_per_stage=(0, 20, 12, 0))
    assert [stage.units for stage in stages] == [
        range(0, 1),
        range(1, 21),
        range(21, 33),
        range(33, 34),
    ]
    assert blocks_of(stages) == [0, 20, 12, 0]
    assert [stage.name for stage in stages] == [
        "embed_tokens",
        "layers 0-19",
        "layers 20-31",
        "head",
    ]
    full = split_into_stages(model, [1], SEQ_LEN, 16, layers_per_stage=[32])
    assert [stage.name for stage in full] == ["embed_tokens + layers 0-31 + head"]
    with pytest.raises(ValueError, match="adds up to 31 blocks, but the model has 32"):
        split_into_stages(model, [2, 1], SEQ_LEN, 16, layers_per_stage=[16, 15])


def test_impossible_layers_are_refused_with_a_remedy() -> None:
    assert check_layers_per_stage([7, 9, 9, 7], 4, 32) == []
    assert check_layers_per_stage([0, 3, 0], 3, 3) == []
    [error] = check_layers_per_stage([8, 8, 8], 3, 32)
    assert str(error) == (
        "pipeline.layers_per_stage=[8, 8, 8] adds up to 24 blocks, but the model has 32. "
        "Use a list such as [10, 11, 11], or remove the key to split by cost."
    )
    rules = [error.rule for error in check_layers_per_stage([8, 0, 8], 4, 32)]
    assert rules == [
        "lists 3 stages, but the pipeline has 4",
        "adds up to 16 blocks, but the model has 32",
        "has a stage without a block, which only the first and the last may be",
    ]
    assert len(check_layers_per_stage([-1, 5], 2, 4)) == 1
    [error] = check_layers_per_stage([1, 0, 0, 1], 4, 1)[:1]
    assert error.remedy == "use at most 3 stages"
    for num_stages, num_blocks in itertools.product(range(1, 8), range(1, 10)):
        if num_blocks >= num_stages - 2:
            [error, *_] = check_layers_per_stage([num_blocks + 1], num_stages, num_blocks)
            example = error.remedy.partition("[")[2].partition("]")[0]
            counts = [int(count) for count in example.split(", ")]
            assert check_layers_per_stage(counts, num_stages, num_blocks) == []


# --------------------------------------------------------------------------- stages of a rank


GOLDEN = """\
stage  rank  units                      blocks  time %
    0     0  embed_tokens + layers 0-6       7    20.7
    1     1  layers 7-15                     9    26.6
    2     2  layers 16-24                    9    26.6
    3     3  layers 25-31 + head             7    26.1
slowest stage: 1, 6.4% above the mean"""

GOLDEN_V = """\
stage  rank  units                  blocks  time %
    0     0  embed + layer 0             1    20.0
    1     1  layer 1                     1    20.0
    2     1  layer 2                     1    20.0
    3     0  layer 3 + norm + head       1    40.0
slowest stage: 3, 60.0% above the mean

rank  stages  blocks  time %
   0  0, 3         2    60.0
   1  1, 2         2    40.0
slowest rank: 0, 20.0% above the mean"""


def test_stage_table_has_ranks_and_units() -> None:
    stages = split_into_stages(unit_costs(PRESETS["8b"], SEQ_LEN), [4, 3, 2, 1], 1024, 0.25)
    assert format_stage_table(stages, range(4)) == GOLDEN.splitlines()
    pipeline = PipelinePlan("mine", tuple(stages), (0, 1, 0, 1), (1, 1, 1, 1))
    assert pipeline.stage_names == [
        "embed_tokens + layers 0-6; layers 16-24",
        "layers 7-15; layers 25-31 + head",
    ]


def test_stage_table_sums_the_stages_of_a_rank() -> None:
    remaining = float(GIB)
    stages = [
        Stage(0, 2, "embed + layer 0", 1, 0.2, 2 * remaining, remaining, 3),
        Stage(2, 3, "layer 1", 1, 0.2, remaining, remaining, 2),
        Stage(3, 4, "layer 2", 1, 0.2, remaining, remaining, 2),
        Stage(4, 7, "layer 3 + norm + head", 1, 0.4, 3 * remaining, 3 * remaining, 1),
    ]
    assert format_stage_table(stages, [0, 1, 1, 0]) == GOLDEN_V.splitlines()


def test_stage_table_with_many_stages_is_short() -> None:
    model = unit_costs(PRESETS["405b"], SEQ_LEN)
    stages = split_into_stages(model, [32] * 32, 1024, 0.25)
    lines = format_stage_table(stages, [*range(8)] * 4)
    assert max(map(len, lines)) <= 100
    assert len(lines) == (1 + 32 + 1) + 1 + (1 + 8 + 1)


def test_units_of_any_name() -> None:
    parts = ("tokens", "trunk.layers.0", "trunk.layers.1", "final.norm")
    model = [UnitCost(name, 1, 1.0, 1.0) for name in parts]
    stages = split_into_stages(model, [1], 1, 1)
    assert (stages[0].name, stages[0].num_blocks) == ("tokens + trunk.layers 0-1 + final.norm", 2)
