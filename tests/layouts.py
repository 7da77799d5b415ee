"""The equivalence matrix: layouts that must compute one process's gradients, and do what a fake
rank of them does.

A layout is a string of axes, and of overrides: ``"pp2 tp2"`` is two stages of two tensor-parallel
ranks.  `tests/parallel/test_layouts.py` compares each with one process, on tensors; and
`tests/predict/test_trace.py` each of at most four ranks with its trace.  What is added here is
compared there and there.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.harness import run_ranks
from tests.small import Overrides, gradients, merged
from weft.plan.timetable import SCHEDULES

AXES = ("dp_shard2", "dp_replicate2", "tp2", "pp2", "cp2")


def parse(layout: str) -> tuple[int, Overrides]:
    """Ranks, and the overrides that make the layout."""
    ranks, overrides = 1, []
    for word in layout.split():
        match = re.fullmatch(r"(dp_shard|dp_replicate|tp|pp|cp)(\d+)", word)
        if match:
            ranks *= int(match[2])
            overrides.append((f"parallel.{match[1]}", match[2]))
        else:
            name, _, value = word.partition("=")
            overrides.append((name if "." in name else f"parallel.{name}", value))
    return ranks, overrides


@functools.cache
def one_process(store: str, overrides: tuple[tuple[str, str], ...]) -> dict[str, Any]:
    return run_ranks(gradients, 1, list(overrides), store)[0]  # type: ignore[no-any-return]


def check_gradients(
    layout: str,
    store: Path,
    model: Overrides,
    tolerance: float,
    more: Sequence[tuple[str, str]] = (),
) -> None:
    """The layout, with ``more``, against one process of ``model``, on every rank."""
    ranks, overrides = parse(layout)
    overrides = [*model, *overrides, *more]
    one = one_process(str(store), tuple(model))
    for many in merged(run_ranks(gradients, ranks, overrides, str(store), timeout=300)):
        assert many["loss"] == pytest.approx(one["loss"], rel=tolerance)
        assert many["norm"] == pytest.approx(one["norm"], rel=tolerance)
        for kind in ("grads", "clipped"):
            assert many[kind].keys() == one[kind].keys()
            for name, grad in one[kind].items():
                scale = grad.abs().max()
                assert scale > 0, name
                torch.testing.assert_close(
                    many[kind][name] / scale, grad / scale, rtol=0, atol=tolerance, msg=name
                )


def combinations(count: int) -> list[str]:
    return [" ".join(axes) for axes in itertools.combinations(AXES, count)]


SINGLE, PAIRS, THREE, FOUR = (combinations(count) for count in (1, 2, 3, 4))
# Of the combinations of three, those that every run of the tests tries.
OFTEN = ["dp_shard2 tp2 pp2", "dp_replicate2 tp2 cp2"]
EACH_SCHEDULE = [f"pp2 schedule={schedule}" for schedule in SCHEDULES]
PIPELINES = [
    "pp4 schedule=GPipe",
    "pp3 placement=replica-outer",
    "pp2 schedule=Interleaved1F1B pipeline.stages_per_rank=3",
    "pp2 train.microbatch=3",  # 8 rows: the last microbatch has 2
    "pp2 train.microbatch=auto",
    "pp2 pipeline.layers=[1,3]",
    "pp2 dp_replicate2 placement=replica-outer",
    "pp2 reshard_after_forward=always",
    "pp2 schedule=ZBVZeroBubble reshard_after_forward=always",
]
TENSOR = [
    "tp4",  # two key/value heads: two ranks share one
    "tp2 sequence_parallel=false",
    "tp4 sequence_parallel=false",
]
CONTEXT = [
    f"cp{size} context={method} context_balance={balance}"
    for method in ("ring", "allgather", "ulysses")
    for balance in ("true", "false")
    for size in (2, 4)
]
DATA = [
    "dp_shard4 reshard_after_forward=2",
    "dp_shard2 tp2 reshard_after_forward=never",
    "dp_shard2 dp_replicate2 gradient_sync=microbatch",
    "dp_shard2 tp2 gradient_sync=microbatch",
    "dp_shard2 cp2 gradient_sync=microbatch",
    "dp_shard2 pp2 gradient_sync=microbatch",
    "dp_replicate2 pp2 gradient_sync=microbatch",
    "dp_shard2 pp2 schedule=ZBVZeroBubble gradient_sync=microbatch",
    "dp_shard2 pp2 schedule=InterleavedZeroBubble reshard_after_forward=always",
    "dp_shard2 dp_replicate2 pp2 gradient_sync=microbatch",
    "dp_shard2 dp_replicate2 tp2 gradient_sync=step",
    "dp_shard2 tp2 persist_below=100",
    "dp_shard2 pp2 persist_below=100 prefetch=2",
    "dp_shard2 tp2 cpu_offload=true",
    "dp_shard2 pp2 cpu_offload=true",
    "dp_shard2 train.microbatch=3",
]
BFLOAT16 = [*SINGLE, "dp_shard2 tp2"]
# What changes what a rank does, and not what comes of it.
TRACED = [
    "dp_shard4",
    "dp_shard4 reshard_after_forward=never",
    "dp_shard4 remat.kind=full",
    "dp_shard4 remat.kind=selective",
    "dp_shard4 remat.kind=selective precision.compute=bfloat16",
    "dp_shard2 tp2 remat.kind=full",
    "tp2 pp2 remat.kind=selective",
    "dp_shard2 pp2 schedule=Interleaved1F1B",
    "dp_shard2 pp2 schedule=Interleaved1F1B pipeline.stages_per_rank=4 model.num_layers=8",
    "dp_shard2 pp2 schedule=ZBVZeroBubble",
    "dp_shard4 optim.states=bfloat16",
    "dp_shard2 tp2 optim.states=8bit model.dim=128 model.ffn_dim=128",
    "dp_shard2 tp2 optim.kind=muon",
    "dp_shard4 train.microbatch=2 train.global_batch=20",
    "dp_shard4 lora.rank=4",
    "dp_shard2 tp2 lora.rank=4 remat.kind=selective",
    "dp_shard2 pp2 lora.rank=4",
]
MATRIX = [
    *(layout for some in (SINGLE, PAIRS, EACH_SCHEDULE, PIPELINES) for layout in some),
    *(f"{layout} model.tied_embeddings={tied}" for layout in TENSOR for tied in ("true", "false")),
    *(f"{layout} data.packing={rows}" for layout in CONTEXT for rows in ("windows", "documents")),
    *DATA,
    *(f"{layout} precision.compute=bfloat16" for layout in BFLOAT16),
    *TRACED,
]
