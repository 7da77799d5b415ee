"""Layer statistics equal one process's in every layout, and name the first NaN."""

from __future__ import annotations

import functools
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.harness import RankError, run_ranks
from tests.layouts import parse
from tests.monitor.test_faults import fault
from tests.small import Overrides, train_rank
from weft.monitor.layer_stats import (
    compute_sums,
    find_first_nonfinite,
    hook_forward,
    make_row,
    name_layers,
    reduce_sums,
)
from weft.records.layer_comparison import read_statistics

MODEL: Overrides = [
    ("model.num_layers", "2"),
    ("model.tied_embeddings", "false"),
    ("train.microbatch_size", "2"),
    ("train.steps", "3"),
    ("debug.layer_stats_steps", "1-2"),
]
LAYOUTS = [
    "dp_shard2 tp2",
    "dp_replicate2 cp2 train.microbatch_size=2 activation_checkpoint.mode=full",
    # The last microbatch has 2 of 8 sequences.
    "pp2 pipeline.schedule=ZBVZeroBubble train.microbatch_size=3",
]
EXTRA = [
    # Two ranks share each key head.
    "tp4 sequence_parallel=false train.microbatch_size=4 activation_checkpoint.mode=selective",
    "dp_shard3 train.global_batch_size=9",
    "pp2 tp2 pipeline.schedule=1F1B",
    "pp2 dp_shard2 pipeline.schedule=Interleaved1F1B",
    "pp2 pipeline.schedule=DualPipeV",
    "pp2 cp2 pipeline.schedule=InterleavedZeroBubble",
    "dp_shard2 cpu_offload=true",
    "dp_shard2 resilience.on_anomaly=skip",
    "dp_shard2 train.world_size_invariant=true train.microbatch_size=1",
    "dp_shard2 optim.name=muon",
    "dp_shard2 model.tied_embeddings=true",
    "pp2 pipeline.schedule=1F1B model.mtp_layers=1",
]
KEYS = {"step", "kind", "name", "order", "count", "mean", "rms", "max_abs", "nonfinite"}
COMPILED = "dp_shard2 compile.enable=true activation_checkpoint.mode=full train.microbatch_size=2"


def rows_of(layout: str, store: str, run_dir: Path) -> list[dict[str, Any]]:
    ranks, overrides = parse(layout)
    run_overrides = [("run.dir", str(run_dir))]
    run_ranks(train_rank, ranks, MODEL + overrides + run_overrides, store, timeout=240)
    return read_statistics(run_dir)


@functools.cache
def reference(store: str, run_dir: Path, changes: str) -> list[dict[str, Any]]:
    return rows_of(changes, store, run_dir / changes.replace(" ", ","))


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("one")


def check(layout: str, store: Path, run_dir: Path, tmp_path: Path) -> None:
    """Compare with one process, with the overrides that change its numbers."""
    same = ("train.global_batch_size", "optim.", "model.")
    changes = " ".join(word for word in layout.split() if word.startswith(same))
    ones, many = reference(str(store), run_dir, changes), rows_of(layout, str(store), tmp_path)
    position = [(row["step"], row["kind"], row["name"], row["order"]) for row in ones]
    assert [(row["step"], row["kind"], row["name"], row["order"]) for row in many] == position
    for one, other in zip(ones, many, strict=True):
        assert set(other) == KEYS
        assert (other["count"], other["nonfinite"]) == (one["count"], 0), other
        # AdamW makes full steps from nearly zero gradients, which amplifies rounding.
        exact = 1e-3 if other["kind"] == "parameter" else 2e-5
        assert other["rms"] == pytest.approx(one["rms"], rel=exact), other
        assert other["max_abs"] == pytest.approx(one["max_abs"], rel=exact), other
        assert other["mean"] == pytest.approx(one["mean"], abs=exact * one["rms"]), other


@pytest.mark.parametrize("layout", LAYOUTS)
def test_statistics_of_a_layout_equal_one_process(
    layout: str, store_path: Path, run_dir: Path, tmp_path: Path
) -> None:
    check(layout, store_path, run_dir, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("layout", [*EXTRA, pytest.param(COMPILED, marks=pytest.mark.timeout(300))])
def test_statistics_of_further_layouts_equal_one_process(
    layout: str, store_path: Path, run_dir: Path, tmp_path: Path
) -> None:
    check(layout, store_path, run_dir, tmp_path)


def test_statistics_file_has_activations_gradients_and_parameters(
    store_path: Path, run_dir: Path
) -> None:
    rows = reference(str(store_path), run_dir, "")
    forward = [r["name"] for r in rows if (r["step"], r["kind"]) == (1, "activation")]
    assert forward == ["embed_tokens", *(f"layers.{n}" for n in range(2)), "norm"]
    assert {row["step"] for row in rows} == {1, 2}
    by_name = {(row["step"], row["kind"], row["name"]): row for row in rows}
    # 8 sequences of 32 tokens, with 32 features.
    assert by_name[1, "activation", "layers.1"]["count"] == 8 * 32 * 32
    assert by_name[1, "gradient", "lm_head.weight"]["count"] == 512 * 32
    gain = by_name[1, "parameter", "norm.weight"]
    assert gain["rms"] == pytest.approx(1.0, abs=0.01)
    gradients = [r["name"] for r in rows if (r["step"], r["kind"]) == (1, "gradient")]
    assert gradients[0] == "embed_tokens.weight"
    assert gradients[-2:] == ["norm.weight", "lm_head.weight"]


def test_statistics_resumed_run_drops_later_rows(store_path: Path, tmp_path: Path) -> None:
    overrides: Overrides = [("run.dir", str(tmp_path)), ("checkpoint.interval", "2")]
    steps: Overrides = [("train.steps", "5"), ("debug.layer_stats_steps", "2,4-5")]
    run_ranks(train_rank, 2, MODEL + overrides + steps, str(store_path))
    before = read_statistics(tmp_path)
    (tmp_path / "checkpoints" / "step-00000005").rename(tmp_path / "elsewhere")
    run_ranks(train_rank, 2, MODEL + overrides + steps, str(store_path))
    assert (
        read_statistics(tmp_path) == before
    )  # rows of steps 2 and 4 remained, step 5 was repeated
    assert [row["step"] for row in before] == sorted(row["step"] for row in before)
    assert {row["step"] for row in before} == {2, 4, 5}


@pytest.mark.parametrize("chosen", ["3", ""])
def test_error_names_the_first_nonfinite_tensor(
    chosen: str, store_path: Path, tmp_path: Path
) -> None:
    change = fault(site="gradients", kind="nan", rank=0, passing=3)
    overrides: Overrides = [("run.dir", str(tmp_path)), ("debug.layer_stats_steps", chosen)]
    with pytest.raises(RankError) as caught:
        run_ranks(train_rank, 2, MODEL + overrides + change, str(store_path))
    message = str(caught.value)
    assert "the gradient norm is nan in step 3" in message
    if chosen:
        # All gradients are NaN; backward computes that of the head first.
        assert (
            "first in the gradient of lm_head.weight in backward (8192 of 16384 elements)"
            in message
        )
        assert {row["step"] for row in read_statistics(tmp_path)} == {3}
    else:
        assert "to find the layer, run again with --debug.layer_stats_steps 3;" in message
        assert not (tmp_path / "statistics.jsonl").exists()


def test_first_nonfinite_is_the_first_in_order_of_computation() -> None:
    def row(kind: str, name: str, bad: int) -> dict[str, Any]:
        order = "abc".index(name[0])
        return {"kind": kind, "name": name, "order": order, "nonfinite": bad, "count": 8}

    rows = [row("activation", "a", 0), row("activation", "b", 2), row("activation", "c", 8)]
    grads = [row("gradient", "a.w", 8), row("gradient", "c.w", 1), row("parameter", "a.w", 8)]
    assert find_first_nonfinite([*rows, *grads]) == "output of b in forward (2 of 8 elements)"
    assert find_first_nonfinite(grads) == "gradient of c.w in backward (1 of 8 elements)"
    assert find_first_nonfinite(grads[2:]) == "parameter a.w (8 of 8 elements)"
    assert find_first_nonfinite(rows[:1]) == ""


def test_rows_of_finite_values_are_merged_over_ranks() -> None:
    """Merge finite values: shards of several ranks, and replicas."""
    tensor = torch.tensor([[1.0, -3.0], [math.nan, math.inf]])
    assert make_row([reduce_sums([(2, compute_sums(tensor))])], 2) == {
        "count": 4,
        "mean": -1.0,
        "rms": math.sqrt(5.0),
        "max_abs": 3.0,
        "nonfinite": 2,
    }
    half = reduce_sums([(1, compute_sums(tensor[:1]))])
    other = reduce_sums([(1, compute_sums(tensor[1:]))])
    full = reduce_sums([(2, compute_sums(tensor))])
    assert make_row([half, other], 2) == make_row([full], 2) == make_row([full, full], 2)
    empty = make_row([reduce_sums([(0, compute_sums(tensor[:0]))])], 2)
    assert (empty["count"], empty["mean"], empty["max_abs"]) == (0, 0.0, 0.0)
    json.dumps(empty, allow_nan=False)


def test_hooks_are_removed_afterwards() -> None:
    part = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2), nn.Linear(2, 3))
    layers = name_layers(part, {part[0]})
    assert list(layers) == ["0", "1", "2"]
    del layers["2"]
    received: list[tuple[str, int]] = []
    x = torch.ones(4, 2)
    with hook_forward(
        layers, [4, 3], lambda name, rows, before, after: received.append((name, rows))
    ):
        part(x)
        part(x)
        part(x)  # recompute for backward
    part(x)
    assert received == [("0", 4), ("1", 4), ("0", 3), ("1", 3)]
    assert not any(module._forward_hooks for module in part.modules())
