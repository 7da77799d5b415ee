"""Experts without tensor parallelism compute one process's loss, gradients and loads."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.harness import run_ranks
from tests.layouts import check_many, group_by_ranks, one_process, parse, size
from tests.parallel.test_expert_parallel import (
    BFLOAT16,
    MODEL,
    RATE,
    TOLERANCE,
    biases,
    check_compiled,
    run,
)
from tests.small import (
    Overrides,
    full_tensor,
    loader_of,
    losses,
    newest_state,
    plan_here,
    small_job,
    this_rank,
)
from weft.checkpoint.state_dict import trainable_parameters
from weft.config.errors import InvalidConfig
from weft.optim.balance import ExpertBalancer
from weft.optim.optimizer import clip_scale, masked_step
from weft.parallel.step_hook import find_hook
from weft.planning.plan import Machine
from weft.planning.resolve import resolve
from weft.training.setup import build

OFTEN = [
    "tp2 etp=1 ep=2 model.mtp_layers=1",
    "tp2 etp=1 sequence_parallel=false",
]
EXTRA = [
    "cp2 tp2 etp=1 ep=2",
    "tp2 etp=1",
    "tp2 etp=1 ep=2 sequence_parallel=false",
    "tp4 etp=1 ep=2",
    "dp_shard2 tp2 etp=1 ep=4",
    "dp_shard2 tp2 etp=1 ep=2 reshard_after_forward=never gradient_sync=step",
    "dp_shard2 tp2 etp=1 ep=2 activation_checkpoint.mode=full cpu_offload=true",
    "dp_shard2 tp2 etp=1 ep=2 activation_checkpoint.mode=selective",
    "dp_shard2 tp2 etp=1 ep=2 train.world_size_invariant=true",
    "dp_replicate2 tp2 etp=1 gradient_sync=microbatch",
    "pp2 tp2 etp=1 ep=2 pipeline.schedule=ZBVZeroBubble",
    "cp2 tp2 etp=1 ep=4 sequence_parallel=false model.shared_experts=2",
    "dp_shard4 tp2 etp=1 ep=2 reshard_after_forward=2",
    "dp_shard3 tp2 etp=1 ep=3 model.num_experts=6 train.global_batch_size=9",
]


def model_of(layout: str) -> Overrides:
    """Return the model and the batch of a layout."""
    words = [word.split("=") for word in layout.split()]
    own = [(w[0], w[1]) for w in words if w[0].startswith(("model.", "train."))]
    return [*MODEL, *size(layout), *own]


@pytest.mark.parametrize("layouts", group_by_ranks(OFTEN))
def test_without_expert_tp_gradients_equal_one_process(
    layouts: list[str], store_path: Path
) -> None:
    check_many(layouts, store_path, model_of, TOLERANCE)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("layouts", group_by_ranks(EXTRA))
def test_experts_without_tp_with_other_techniques_gradients_equal_one_process(
    layouts: list[str], store_path: Path
) -> None:
    check_many(layouts, store_path, model_of, TOLERANCE)


def draw(rng: random.Random) -> str:
    """Draw a layout of at most 8 ranks with experts without TP."""
    axes = {axis: rng.choice([1, 1, 2]) for axis in ("dp_shard", "cp", "pp", "dp_replicate")}
    axes["tp"] = rng.choice([2, 2, 4])
    if math.prod(axes.values()) > 8:
        return draw(rng)
    ranks = axes["dp_shard"] * axes["cp"] * axes["tp"]
    keys = {
        "etp": ["1"],
        "ep": [str(n) for n in (1, 2, 4, 8) if n <= ranks],
        "sequence_parallel": ["true", "false"],
        "reshard_after_forward": ["auto", "always", "never"],
        "gradient_sync": ["auto", "microbatch", "step"],
        "activation_checkpoint.mode": ["none", "full"],
        "train.world_size_invariant": ["false", "false", "true"],
        "model.num_experts": ["8"],
        "model.shared_experts": ["0", "1", "2"],
        "model.score": ["softmax", "sigmoid"],
        "model.tied_embeddings": ["false", "true"],
    }
    if axes["cp"] > 1:
        keys["cp_method"] = ["ring", "allgather", "ulysses"]
    if axes["pp"] > 1:
        keys["pipeline.schedule"] = ["1F1B", "Interleaved1F1B", "ZBVZeroBubble"]
    words = [f"{axis}{degree}" for axis, degree in axes.items() if degree > 1]
    return " ".join([*words, *(f"{key}={rng.choice(values)}" for key, values in keys.items())])


def is_valid(layout: str) -> bool:
    ranks, overrides = parse(layout)
    job = small_job(*model_of(layout), *overrides)
    try:
        resolve(job, Machine("cpu", devices=2, world_size=ranks))
    except InvalidConfig:
        return False
    return True


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", range(6))
def test_experts_without_tp_random_layouts_gradients_equal_one_process(
    seed: int, store_path: Path
) -> None:
    rng, layouts = random.Random(seed), list[str]()
    while len(layouts) < 4:
        if is_valid(layout := draw(rng)):
            layouts.append(layout)
    for ranks in {parse(layout)[0] for layout in layouts}:
        same = [layout for layout in layouts if parse(layout)[0] == ranks]
        check_many(same, store_path, model_of, TOLERANCE)


# --------------------------------------------------------------------------- routers


def router_sums(jobs: list[Overrides], store: str) -> list[dict[str, Any]]:
    """Return the loads of the experts, and the metrics of routers, of a step."""
    results = []
    for overrides in jobs:
        job = small_job(*overrides)
        plan = plan_here(job)
        built = build(plan, this_rank())
        step = built.train_step
        step.forward_backward(loader_of(job, plan, store, built.mesh).get_microbatches(0))
        balance = find_hook(step.hooks, ExpertBalancer)
        assert balance is not None
        loads, _ = balance.reduce()
        results.append({"loads": loads.clone(), "metrics": balance.measure()})
    return results


def test_experts_without_tp_loads_and_router_metrics_equal_one_process(store_path: Path) -> None:
    model = [*MODEL, *size("tp2")]
    (one,) = one_process(str(store_path), [model], router_sums)
    layouts = ["tp2 etp=1 ep=2", "tp2 etp=1 sequence_parallel=false"]
    jobs = [[*model, *parse(layout)[1]] for layout in layouts]
    for rank in run_ranks(router_sums, 2, jobs, str(store_path), timeout=180):
        for result in rank:
            assert torch.equal(result["loads"], one["loads"])
            torch.testing.assert_close(result["metrics"], one["metrics"], rtol=1e-5, atol=1e-6)


# --------------------------------------------------------------------------- steps and checkpoints


def weights_after_a_step(jobs: list[Overrides], store: str) -> list[dict[str, torch.Tensor]]:
    results = []
    for overrides in jobs:
        job = small_job(*overrides)
        plan = plan_here(job)
        built = build(plan, this_rank())
        loss = built.train_step.forward_backward(
            loader_of(job, plan, store, built.mesh).get_microbatches(0)
        )
        params = dict(trainable_parameters(built.model_parts))
        masked_step(built.optimizer, ~loss.isfinite(), clip_scale(torch.tensor(1.0), 0.5))
        results.append({name: full_tensor(p.detach()).clone() for name, p in params.items()})
    return results


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("layout", ["tp2 etp=1 ep=2", "tp2 etp=1", "dp_shard2 tp2 etp=1 ep=2"])
def test_muon_experts_without_tp_update_equals_one_process(layout: str, store_path: Path) -> None:
    model = [*MODEL, *size(layout), ("optim.name", "muon"), ("optim.lr", "0.01")]
    (one,) = one_process(str(store_path), [model], weights_after_a_step)
    ranks, overrides = parse(layout)
    results = run_ranks(
        weights_after_a_step, ranks, [[*model, *overrides]], str(store_path), timeout=300
    )
    for (many,) in results:
        for name, weight in one.items():
            # Newton-Schulz amplifies rounding of small singular values.
            torch.testing.assert_close(many[name], weight, rtol=0, atol=2e-4, msg=name)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_without_expert_tp_resume_from_and_in_other_layouts(
    store_path: Path, tmp_path: Path
) -> None:
    """Compare six steps on one process with two steps in each of three layouts."""
    subset = [RATE, ("train.global_batch_size", "4"), ("train.microbatch_size", "2")]
    run(tmp_path / "one", "dp_shard1", 6, store_path, *subset)
    layouts = ("dp_shard2 ep=2", "tp2 etp=1 ep=2", "tp2")
    for steps, layout in zip((2, 4, 6), layouts, strict=True):
        run(tmp_path / "many", layout, steps, store_path, *subset)
    assert losses(tmp_path / "many") == pytest.approx(losses(tmp_path / "one"), rel=1e-4)
    expected = biases(tmp_path / "one")
    for name, bias in biases(tmp_path / "many").items():
        torch.testing.assert_close(bias, expected[name], rtol=0, atol=0)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_experts_without_tp_quantized_resumed_run_is_equal_bit_for_bit(
    store_path: Path, tmp_path: Path
) -> None:
    layout = "tp2 etp=1 ep=2 lora.rank=2 lora.quantize=nf4 resilience.replica_check=1"
    sizes = [("model.dim", "64"), ("model.expert_dim", "64"), ("model.head_dim", "32")]
    sizes += [("model.ffn_dim", "128"), ("model.shared_experts", "2")]
    run(tmp_path / "once", layout, 4, store_path, *sizes)
    run(tmp_path / "twice", layout, 2, store_path, *sizes)
    run(tmp_path / "twice", layout, 4, store_path, *sizes)
    once, twice = newest_state(tmp_path / "once"), newest_state(tmp_path / "twice")
    assert all(torch.equal(once[name], twice[name]) for name in once)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "layout",
    [
        "tp2 etp=1 activation_checkpoint.mode=selective",
        "tp2 etp=1 ep=2",
        "tp2 etp=1 ep=2 precision.compute_dtype=float32",
        "tp2 etp=1 ep=2 sequence_parallel=false activation_checkpoint.mode=full",
    ],
)
def test_compiled_experts_without_tp_equal_eager_ones(
    layout: str, store_path: Path, tmp_path: Path
) -> None:
    assert ("precision.compute_dtype", "bfloat16") in BFLOAT16
    check_compiled([layout], store_path, tmp_path)
