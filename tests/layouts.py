"""The equivalence matrix: layouts that must compute one process's gradients, and do what a fake
rank of them does.

A layout is a string of axes, and of overrides: ``"pp2 tp2"`` is two stages of two tensor-parallel
ranks.  `COVERED` holds every pair of techniques in as few layouts as that takes.
`tests/parallel/test_layouts.py` compares each with one process, on tensors; and
`tests/predict/test_trace.py` each of at most four ranks with its trace.  What is added here is
compared there and there.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.covering import Case, cover_pairs
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
EACH_SCHEDULE = [f"pp2 schedule={schedule}" for schedule in SCHEDULES]


def cover(schedules: Iterable[str]) -> list[str]:
    """Return layouts that together hold every pair of these techniques."""
    axes = {
        "pp": ["", *(f"pp2 schedule={schedule}" for schedule in schedules)],
        "cp": ["", *(f"cp2 context={method}" for method in ("ring", "allgather", "ulysses"))],
        "dp": ["", "dp_shard2", "dp_replicate2"],
        "tp": ["", "tp2", "tp2 sequence_parallel=false"],
        "rows": ["data.packing=windows", "data.packing=documents"],
        "balance": ["context_balance=true", "context_balance=false"],
        "tied": ["model.tied_embeddings=false", "model.tied_embeddings=true"],
        "reshard": ["", "reshard_after_forward=always", "reshard_after_forward=never"],
        "sync": ["", "gradient_sync=step", "gradient_sync=microbatch"],
        "offload": ["", "cpu_offload=true"],
        "persist": ["", "persist_below=100 prefetch=2"],
        "microbatch": ["", "train.microbatch=3"],  # 8 sequences: the last one has 2
    }

    def is_valid(case: Case) -> bool:
        meshes = sum(bool(case.get(axis)) for axis in ("pp", "cp", "dp", "tp"))
        torn = case.get("pp") and case.get("tied", "").endswith("true")
        return meshes <= 3 and not torn

    texts = [" ".join(filter(None, case.values())) for case in cover_pairs(axes, is_valid)]
    return [text for text in texts if parse(text)[0] > 1]


# Of the schedules those of one stage a rank, of several, and of stages in the shape of a V.
COVERED = cover(["1F1B", "Interleaved1F1B", "ZBVZeroBubble"])
COVERED_BY_ALL_SCHEDULES = cover(SCHEDULES)
PIPELINES = [
    "pp4 schedule=GPipe",
    "pp3 placement=replica-outer",
    "pp2 schedule=Interleaved1F1B pipeline.stages_per_rank=3",
    "pp2 train.microbatch=auto",
    "pp2 pipeline.layers=[1,3]",
    "pp2 dp_replicate2 placement=replica-outer",
    "pp2 schedule=ZBVZeroBubble reshard_after_forward=always",
]
TENSOR = [  # two key/value heads: two ranks share one
    "tp4 model.tied_embeddings=true",
    "tp4 sequence_parallel=false model.tied_embeddings=false",
]
MORE_TENSOR = [
    "tp4 model.tied_embeddings=false",
    "tp4 sequence_parallel=false model.tied_embeddings=true",
]


def rings(size: int) -> list[str]:
    """Return a context-parallel layout for each of its pairs of keys."""
    axes = {
        "method": [f"cp{size} context={method}" for method in ("ring", "allgather", "ulysses")],
        "balance": ["context_balance=true", "context_balance=false"],
        "rows": ["data.packing=documents", "data.packing=windows"],
    }
    return [" ".join(case.values()) for case in cover_pairs(axes)]


DATA = [
    "dp_shard2 dp_replicate2",
    "dp_shard4 reshard_after_forward=2",
    "dp_shard2 dp_replicate2 gradient_sync=microbatch",
]
MORE_DATA = [
    "dp_shard2 pp2 schedule=InterleavedZeroBubble reshard_after_forward=always",
    "dp_shard2 dp_replicate2 pp2 gradient_sync=microbatch",
    "dp_shard2 dp_replicate2 tp2 gradient_sync=step",
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
LARGER_RINGS = rings(4)
# Few enough for every run of the tests, and all.
OFTEN = [*SINGLE, *EACH_SCHEDULE, *PIPELINES, *rings(2), *TENSOR, *DATA]
EVERY = [
    *OFTEN,
    *COVERED,
    *PAIRS,
    *MORE_TENSOR,
    *MORE_DATA,
    *LARGER_RINGS,
    *(f"{layout} precision.compute=bfloat16" for layout in BFLOAT16),
    *TRACED,
]
MATRIX = list(dict.fromkeys(EVERY))
