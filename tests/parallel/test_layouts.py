"""Every layout of `tests.layouts` computes one process's loss and gradients.

The tests compare one global batch from equal initial weights: the loss, the global gradient norm,
and every unsharded gradient relative to its largest element.
"""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from tests.harness import run_ranks
from tests.layouts import (
    BFLOAT16,
    COVERED,
    COVERED_BY_ALL_SCHEDULES,
    COVERED_SCHEDULES,
    DATA,
    EACH_SCHEDULE,
    FOUR,
    LARGER_RINGS,
    MORE_DATA,
    MORE_TENSOR,
    OFTEN,
    PAIRS,
    PIPELINES,
    TENSOR,
    THREE,
    check_gradients,
    check_many,
    group_by_ranks,
    one_process,
    parse,
    size,
)
from tests.small import Overrides, gradients, merged
from weft.planning.pipeline_schedule import SCHEDULES
from weft.verification.verify import read_recipe, verify

# Float32 sums in another order; measured: 3e-7 to 2e-6.
TOLERANCE = 1e-5

# Four blocks allow two stages on each of two ranks. Documents need masks.
MODEL: Overrides = [
    ("model.num_layers", "4"),
    ("model.tied_embeddings", "false"),
    ("data.packing", "documents"),
    ("train.microbatch_size", "1"),
]


def check(layout: str, store: Path, model: Overrides = MODEL) -> None:
    check_gradients(layout, store, [*model, *size(layout)], TOLERANCE)


def check_any(*layouts: str, store: Path) -> None:
    """Compare each layout with one process on the layout's model and sequences."""
    check_many(layouts, store, own_model, TOLERANCE)


def own_model(layout: str) -> Overrides:
    changed = [word for word in layout.split() if word.startswith(("model.", "data."))]
    return [*MODEL, *size(layout), *parse(" ".join(changed))[1]]


# Layouts that are not in `COVERED`.
NOT_COVERED = [
    *(it for it in EACH_SCHEDULE if it.partition("schedule=")[2] not in COVERED_SCHEDULES),
    *PIPELINES,
    TENSOR[0],
    *DATA[:2],
    LARGER_RINGS[0],
    # All stages stay gathered.
    "dp_shard2 pp2 pipeline.schedule=Interleaved1F1B pipeline.stages_per_rank=4",
]


# Layouts with the same number of ranks share a world.
@pytest.mark.parametrize("layouts", group_by_ranks(NOT_COVERED))
def test_layout_computes_gradients_of_one_process(layouts: list[str], store_path: Path) -> None:
    check_any(*layouts, store=store_path)


@pytest.mark.slow
@pytest.mark.parametrize("layout", [layout for layout in OFTEN if layout not in NOT_COVERED])
def test_single_axis_computes_gradients_of_one_process(layout: str, store_path: Path) -> None:
    check_any(layout, store=store_path)


@pytest.mark.parametrize("layouts", group_by_ranks(COVERED))
def test_pairs_of_techniques_compute_gradients_of_one_process(
    layouts: list[str], store_path: Path
) -> None:
    check_any(*layouts, store=store_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout", [schedule for schedule in COVERED_BY_ALL_SCHEDULES if schedule not in COVERED]
)
def test_pairs_with_each_schedule_compute_gradients_of_one_process(
    layout: str, store_path: Path
) -> None:
    check_any(layout, store=store_path)


@pytest.mark.slow
@pytest.mark.parametrize("layout", [*PAIRS, *THREE])
def test_two_or_three_axes_compute_gradients_of_one_process(layout: str, store_path: Path) -> None:
    check(layout, store_path)


@pytest.mark.slow
@pytest.mark.parametrize("layout", FOUR)
def test_four_axes_compute_gradients_of_one_process(layout: str, store_path: Path) -> None:
    check(layout, store_path)


# --------------------------------------------------------------------------- pipelines


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("other", ["tp2", "dp_shard2", "cp2", "dp_shard2 tp2"])
def test_schedule_with_other_axes_computes_gradients_of_one_process(
    schedule: str, other: str, store_path: Path
) -> None:
    check(f"pp2 {other} pipeline.schedule={schedule}", store_path)


SPLIT = [name for name, schedule in SCHEDULES.items() if schedule.splits_backward]
# Every stage has a block, which is resharded between the two halves of a backward pass.
RESHARDED: Overrides = [
    ("model.tied_embeddings", "false"),
    ("model.num_layers", "4"),
    ("pipeline.layers_per_stage", "[1,1,1,1]"),
    ("train.microbatch_size", "1"),
    ("parallel.pp", "2"),
    ("parallel.reshard_after_forward", "always"),
]


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param("dp_shard2 pipeline.schedule=InterleavedZeroBubble", marks=pytest.mark.slow),
        "pipeline.schedule=ZBVZeroBubble lora.rank=4 gradient_sync=microbatch",
        pytest.param("pipeline.schedule=DualPipeV", marks=pytest.mark.slow),
    ],
)
def test_split_backward_resharded_weights_updates_equal_one_process(layout: str) -> None:
    overrides = [*RESHARDED, ("parallel.dp_shard", "1"), *parse(layout)[1]]
    report = verify(read_recipe("demo", list(dict(overrides).items())), steps=2)
    assert report.holds, report.reason
    assert report.reached < TOLERANCE
    assert len(report.steps) == 2
    assert report.update_difference < 1e-3


WHOLE = "pipeline.defer_weight_gradients=false"


@pytest.mark.parametrize(
    "layout",
    [
        f"pipeline.schedule=DualPipeV {WHOLE} gradient_sync=microbatch",
        *(
            pytest.param(f"pipeline.schedule={name} {WHOLE}", marks=pytest.mark.slow)
            for name in SPLIT
        ),
        pytest.param(
            f"pipeline.schedule=DualPipeV {WHOLE} dp_shard2 model.num_experts=4 ep=2 "
            "activation_checkpoint.mode=full",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_whole_backward_in_a_schedule_of_halves_updates_equal_one_process(layout: str) -> None:
    overrides = [*RESHARDED, ("parallel.dp_shard", "1"), *parse(layout)[1]]
    report = verify(read_recipe("demo", list(dict(overrides).items())), steps=2)
    assert report.holds, report.reason
    assert report.reached < TOLERANCE
    assert report.update_difference < 1e-3


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [
        "pipeline.schedule=ZBVZeroBubble compile.enable=true",
        "pipeline.schedule=DualPipeV compile.enable=true activation_checkpoint.mode=selective tp2",
        "pipeline.schedule=InterleavedZeroBubble activation_checkpoint.mode=selective cp2",
        "pipeline.schedule=ZBVZeroBubble activation_checkpoint.mode=full model.num_experts=4",
    ],
)
def test_split_backward_compiled_or_recomputed_holds(layout: str, store_path: Path) -> None:
    check_any(f"pp2 {layout}", store=store_path)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SPLIT)
@pytest.mark.parametrize("other", ["dp_shard4 reshard_after_forward=2", "cp2", "dp_replicate2"])
def test_split_backward_resharded_weights_other_axes_hold(
    schedule: str, other: str, store_path: Path
) -> None:
    check(f"pp2 pipeline.schedule={schedule} reshard_after_forward=always {other}", store_path)


def test_schedule_from_a_file_computes_gradients_of_one_process(
    store_path: Path, tmp_path: Path
) -> None:
    """Three stages on two ranks, in a custom order."""
    file = tmp_path / "mine.csv"
    forward = "".join(f"0F{m}," for m in range(4))
    first = forward + "2F0,2B0,2F1,2B1,2F2,2I2,2F3,2I3,2W2,2W3,0B0,0B1,0B2,0B3"
    second = "1F0,1F1,1F2,1F3,1B0,1B1,1B2,1B3"
    file.write_text(f"{first}\n{second}\n")
    check(f"pp2 train.microbatch_size=2 pipeline.schedule={file}", store_path)


# --------------------------------------------------------------------------- one axis at a time


@pytest.mark.slow
@pytest.mark.parametrize("layout", LARGER_RINGS)
def test_context_parallel_four_ranks_compute_gradients_of_one_process(
    layout: str, store_path: Path
) -> None:
    check_any(layout, store=store_path)


@pytest.mark.slow
@pytest.mark.parametrize("layout", [*MORE_TENSOR, *MORE_DATA])
def test_other_layout_computes_gradients_of_one_process(layout: str, store_path: Path) -> None:
    check_any(layout, store=store_path)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["allgather", "ulysses"])
@pytest.mark.parametrize("other_overrides", ["tp2", "pp2", "dp_shard2", "tp2 pp2"])
def test_context_parallel_with_other_axes_computes_gradients_of_one_process(
    method: str, other_overrides: str, store_path: Path
) -> None:
    check(f"cp2 {other_overrides} cp_method={method}", store_path)


# --------------------------------------------------------------------------- lower precision


@pytest.mark.parametrize(
    "layout",
    [pytest.param(layout, marks=pytest.mark.slow) for layout in BFLOAT16[:-2]] + BFLOAT16[-2:],
)
def test_bfloat16_layout_differs_no_more_than_rounding(layout: str, store_path: Path) -> None:
    """The bfloat16 error of a layout is at most that of one process."""
    plain = [*MODEL, *size(layout)]
    low = [*plain, ("precision.compute_dtype", "bfloat16")]
    exact, one = one_process(str(store_path), [plain, low])
    ranks, overrides = parse(layout)
    for many in merged(run_ranks(gradients, ranks, low + overrides, str(store_path))):
        assert many["loss"] == pytest.approx(one["loss"], rel=1e-3)
        rounding = distance(one["grads"], exact["grads"])
        assert 1e-3 < rounding < 2e-2
        assert distance(many["grads"], one["grads"]) < 1.5 * rounding


def distance(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    """Return the relative norm of the difference of all gradients."""
    difference = sum((ours[name] - grad).square().sum().item() for name, grad in theirs.items())
    return math.sqrt(difference / sum(grad.square().sum().item() for grad in theirs.values()))


def test_layout_sequence_of_odd_parts_computes_the_gradients(store_path: Path) -> None:
    """Two ranks have 15 tokens each, in parts of unequal length."""
    methods = ("", "cp_load_balance=documents", "cp_method=allgather", "cp_method=ulysses")
    model = [*MODEL, *size("cp2"), ("train.seq_len", "30")]
    layouts = [f"cp2 {method}" for method in methods]
    check_many(layouts, store_path, lambda layout: model, TOLERANCE)


def test_layout_one_stage_of_an_interleaved_schedule_computes_the_gradients(
    store_path: Path,
) -> None:
    schedules = ("Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble")
    layouts = [f"pp2 pipeline.schedule={name} pipeline.stages_per_rank=1" for name in schedules]
    check_any(*layouts, store=store_path)
