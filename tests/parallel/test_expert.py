"""Mixtures of experts: every layout computes one process's loss and gradients."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.harness import run_ranks
from tests.layouts import parse
from tests.small import Overrides, gradients, merged

TOLERANCE = 1e-5

MODEL: Overrides = [
    ("model.kind", "moe"),
    ("model.preset", "toy-moe"),
    ("model.num_layers", "4"),
    ("model.head_dim", "16"),
    ("model.num_experts", "4"),
    ("model.expert_dim", "24"),
    ("model.tied_embeddings", "false"),
    ("data.packing", "documents"),
    ("train.microbatch", "1"),
]


@functools.cache
def reference(store: str, overrides: tuple[tuple[str, str], ...]) -> dict[str, Any]:
    return run_ranks(gradients, 1, list(overrides), store)[0]  # type: ignore[no-any-return]


def check(layout: str, store: Path, model: Overrides = MODEL) -> None:
    """The layout against one process, on every rank."""
    ranks, overrides = parse(layout)
    one = reference(str(store), tuple(model))
    for many in merged(run_ranks(gradients, ranks, model + overrides, str(store), timeout=180)):
        assert many["loss"] == pytest.approx(one["loss"], rel=TOLERANCE)
        assert many["norm"] == pytest.approx(one["norm"], rel=TOLERANCE)
        for kind in ("grads", "clipped"):
            assert many[kind].keys() == one[kind].keys()
            for name, grad in one[kind].items():
                scale = grad.abs().max()
                assert scale > 0, name
                torch.testing.assert_close(
                    many[kind][name] / scale, grad / scale, rtol=0, atol=TOLERANCE, msg=name
                )


WHOLE = ["dp_shard2", "dp_replicate2", "tp2", "pp2", "cp2"]
SPREAD = [
    "dp_shard2 ep=2",
    "dp_shard4 ep=2",
    "dp_shard4 ep=4",
    "cp2 ep=2",
    "dp_shard2 dp_replicate2 ep=2",
    "dp_shard2 tp2 ep=2",
    "dp_shard2 pp2 ep=2",
]
DETAILS = [
    "dp_shard2 ep=2 remat.kind=full",
    "dp_shard2 ep=2 remat.kind=selective",
    "dp_shard2 ep=2 remat.kind=budget remat.offload=true",
    "dp_shard2 ep=2 gradient_sync=step reshard_after_forward=never",
    "dp_shard2 pp2 ep=2 gradient_sync=microbatch",
    "dp_shard2 ep=2 persist_below=1000000 prefetch=2",
    "dp_shard2 ep=2 cpu_offload=true",
    "dp_shard2 cp2 ep=4",
    "tp2 sequence_parallel=false",
    "tp4",
    "dp_shard3 ep=3 model.num_experts=6 train.global_batch=9",
    "dp_shard6 train.global_batch=12",  # four experts over six ranks: cut by rows of each
]


@pytest.mark.parametrize("layout", WHOLE)
def test_layouts(layout: str, store_path: Path) -> None:
    check(layout, store_path)


@pytest.mark.parametrize("layout", SPREAD)
def test_expert_parallel(layout: str, store_path: Path) -> None:
    check(layout, store_path)


@pytest.mark.parametrize("layout", DETAILS)
def test_expert_parallel_with_everything_else(layout: str, store_path: Path) -> None:
    changed = [word.split("=") for word in layout.split() if "model." in word or "train." in word]
    check(layout, store_path, [*MODEL, *((name, value) for name, value in changed)])
