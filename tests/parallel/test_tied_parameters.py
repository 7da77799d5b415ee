"""Tied embeddings in a pipeline: two copies that one process does not need."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from tests.harness import RankError, run_ranks
from tests.layouts import check_many, group_by_ranks, many_gradients, parse, size
from tests.small import (
    Overrides,
    full_tensor,
    loader_of,
    newest_state,
    plan_here,
    records,
    small_job,
    this_rank,
    train_rank,
)
from weft.checkpoint.fingerprint import compare_replicas
from weft.checkpoint.state_dict import model_state, optimizer_state
from weft.config.errors import InvalidConfig
from weft.models.families import llama
from weft.parallel.dtensor import to_local
from weft.parallel.tied_parameters import TiedParameters
from weft.planning.pipeline_schedule import SCHEDULES
from weft.planning.plan import Machine, Stage
from weft.planning.resolve import resolve
from weft.training.setup import build

TOLERANCE = 1e-5
TABLE = "embed_tokens.weight"
MODEL: Overrides = [
    ("model.num_layers", "4"),
    ("model.tied_embeddings", "true"),
    ("data.packing", "documents"),
    ("train.microbatch_size", "1"),
]


def check(*layouts: str, store: Path, compute: Any = many_gradients) -> None:
    check_many(layouts, store, lambda layout: [*MODEL, *size(layout)], TOLERANCE, compute=compute)


# --------------------------------------------------------------------------- gradients

# One stage per rank; several; both ends on one rank.
KINDS = [f"pp2 pipeline.schedule={name}" for name in ("1F1B", "Interleaved1F1B", "ZBVZeroBubble")]


def test_two_ranks_compute_gradients_of_one_process(store_path: Path) -> None:
    check(*KINDS, store=store_path)


# The two copies have a separate group, and a middle rank is not in it.
def test_three_ranks_compute_gradients_of_one_process(store_path: Path) -> None:
    check("pp3", store=store_path)


MORE = [
    *(
        f"pp2 pipeline.schedule={name}"
        for name in SCHEDULES
        if f"schedule={name}" not in str(KINDS)
    ),
    *(f"{kind} dp_shard2 gradient_sync=microbatch" for kind in KINDS),
    *(f"{kind} dp_shard2 reshard_after_forward=always" for kind in KINDS),
    *(f"{kind} tp2" for kind in KINDS),
    "pp2 cp2",
    "pp2 dp_replicate2",
    "pp2 tp2 sequence_parallel=false",
    "pp2 dp_shard2 cpu_offload=true",
    "pp4",
    "pp3 pipeline.schedule=ZBVZeroBubble",
    "pp2 dp_shard2 tp2 mesh_order=replica-outer",
    "pp3 dp_shard2 pipeline.schedule=InterleavedZeroBubble train.microbatch_size=1",
]


@pytest.mark.slow
@pytest.mark.parametrize("layouts", group_by_ranks(MORE))
def test_other_layout_computes_gradients_of_one_process(
    layouts: list[str], store_path: Path
) -> None:
    check(*layouts, store=store_path)


def gradients_without_sum(jobs: list[Overrides], store: str) -> list[dict[str, Any]]:
    with patch.object(TiedParameters, "end_passes", lambda self: False):
        return many_gradients(jobs, store)


def test_missing_sum_is_an_error(store_path: Path) -> None:
    with pytest.raises(AssertionError, match="ZBVZeroBubble"):
        check(KINDS[2], store=store_path, compute=gradients_without_sum)


# --------------------------------------------------------------------------- plans


def stages_of(tied: str) -> tuple[Stage, ...]:
    overrides = [*MODEL, ("model.tied_embeddings", tied), ("parallel.pp", "2")]
    plan = resolve(small_job(*overrides), Machine("cpu", devices=2, world_size=2))
    assert plan.pipeline is not None
    return plan.pipeline.stages


def test_last_stage_counts_its_copy() -> None:
    assert stages_of("true") == stages_of("false")


def test_family_without_a_tied_parameter_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llama, "FAMILY", replace(llama.FAMILY, tied_parameter=None))
    assert stages_of("false")
    with pytest.raises(InvalidConfig, match=r"parallel.pp=2 is not supported for tied embeddings"):
        stages_of("true")


# --------------------------------------------------------------------------- copies


def train_copies(overrides: Overrides, store: str, corrupt: bool = False) -> list[torch.Tensor]:
    """Train three steps; return this rank's table and its moments, after a comparison."""
    job = small_job(*MODEL, ("train.global_batch_size", "4"), *overrides)
    plan = plan_here(job)
    built = build(plan, this_rank())
    loader = loader_of(job, plan, store, built.mesh)
    for step in range(3):
        built.train_step.forward_backward(loader.get_microbatches(step * plan.global_batch_size))
        built.optimizer.step()
        built.optimizer.zero_grad()
    state = model_state(built.model_parts) | optimizer_state(built.model_parts, built.optimizer)
    if corrupt and dist.get_rank() == 1:
        to_local(state[f"model.{TABLE}"])[0] += 1e-6
    compare_replicas(built.model_parts, built.optimizer)
    return [full_tensor(state[name]).float() for name in sorted(state) if TABLE in name]


def check_copies(layout: str, store: Path) -> None:
    ranks, overrides = parse(layout)
    first, *_, last = run_ranks(train_copies, ranks, overrides, str(store))
    assert len(first) == 4  # the table, two moments and the number of steps
    for ours, theirs in zip(first, last, strict=True):
        assert torch.equal(ours, theirs)


def test_copies_stay_equal_with_stochastic_rounding(store_path: Path) -> None:
    check_copies("pp2 optim.state_dtype=bfloat16", store_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [
        "pp2 dp_shard3 optim.state_dtype=8bit model.dim=128 train.global_batch_size=12",
        "pp2 tp2 optim.name=muon precision.compute_dtype=bfloat16",
        "pp3 dp_replicate2 gradient_sync=microbatch train.global_batch_size=6",
    ],
)
def test_copies_stay_equal_in_other_layouts(layout: str, store_path: Path) -> None:
    check_copies(layout, store_path)


def test_different_copies_are_an_error(store_path: Path) -> None:
    with pytest.raises(RankError, match=f"differs from its replica in model.{TABLE}"):
        run_ranks(train_copies, 2, parse("pp2")[1], str(store_path), corrupt=True)


# --------------------------------------------------------------------------- runs


def run(directory: Path, store: Path, layout: str, steps: int) -> None:
    """Train, or resume, up to a step in a layout."""
    ranks, overrides = parse(layout)
    keys = {"train.steps": str(steps), "train.eval_interval": "1", "monitor.log_interval": "1"}
    keys |= {"train.global_batch_size": "4", "optim.decay_fraction": "0"}
    keys |= {"monitor.layer_grad_norms": "true", "debug.layer_stats_steps": "1-9"}
    keys |= {"run.dir": str(directory)}
    run_ranks(train_rank, ranks, [*MODEL, *keys.items(), *overrides], str(store), timeout=180)


def check_run(directory: Path, expected: Path) -> None:
    """Compare records, statistics of layers, and the last checkpoint of two runs."""
    for ours, theirs in zip(records(directory), records(expected), strict=True):
        names = [name for name in theirs if name.startswith(("loss", "eval_loss", "grad_norm"))]
        assert "grad_norm/embed_tokens" in names
        for name in names:
            assert ours[name] == pytest.approx(theirs[name], rel=1e-4), name
    ours, theirs = (read_statistics(each) for each in (directory, expected))
    assert ours.keys() == theirs.keys()
    for key, row in theirs.items():
        assert ours[key]["rms"] == pytest.approx(row["rms"], rel=1e-3), key
    state, expected_state = newest_state(directory), newest_state(expected)
    assert state.keys() == expected_state.keys()
    for name, tensor in expected_state.items():
        torch.testing.assert_close(state[name], tensor, rtol=1e-3, atol=1e-5, msg=name)


def read_statistics(directory: Path) -> dict[tuple[Any, ...], dict[str, Any]]:
    lines = (directory / "statistics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    return {(row["step"], row["kind"], row["name"]): row for row in rows}


@pytest.fixture(scope="module")
def one_process(store_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("one")
    run(directory, store_path, "", 4)
    return directory


def check_resumed(layouts: list[str], one_process: Path, store: Path, directory: Path) -> None:
    """Train four steps, equally many in each layout, and compare with one process."""
    for turn, layout in enumerate(layouts, 1):
        run(directory, store, layout, 4 * turn // len(layouts))
    check_run(directory, one_process)


def test_resumed_in_one_process_equals_one_process(
    one_process: Path, store_path: Path, tmp_path: Path
) -> None:
    check_resumed(["pp2", ""], one_process, store_path, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    "layouts",
    [
        ["", "pp2"],
        ["pp2 pipeline.schedule=ZBVZeroBubble", "pp3", "", "dp_shard2 pp2"],
        ["dp_replicate2 pp2", "tp2 pp2 pipeline.schedule=DualPipeV"],
    ],
    ids=" -> ".join,
)
def test_resumed_in_other_layouts_equals_one_process(
    layouts: list[str], one_process: Path, store_path: Path, tmp_path: Path
) -> None:
    check_resumed(layouts, one_process, store_path, tmp_path)
