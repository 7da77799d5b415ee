"""Mixtures of experts: every layout computes one process's loss and gradients."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.utils import counters
from torch.distributed.tensor import Shard

from tests.harness import run_ranks
from tests.layouts import check_gradients, check_many, group_by_ranks, parse, size
from tests.small import (
    Overrides,
    loader_of,
    losses,
    newest_state,
    plan_here,
    records,
    small_job,
    this_rank,
    train_rank,
)
from weft.checkpoint.fingerprint import ReplicaMismatch, compare_replicas
from weft.checkpoint.state_dict import persistent_buffers, trainable_parameters
from weft.config.errors import InvalidConfig
from weft.config.reader import read_job
from weft.optim.balance import ExpertBalancer
from weft.parallel.data_parallel import _choose_shard_dim
from weft.parallel.dtensor import to_local
from weft.parallel.step_hook import find_hook
from weft.planning.plan import Machine
from weft.planning.resolve import resolve
from weft.training.setup import build

TOLERANCE = 1e-5

MODEL: Overrides = [
    ("model.kind", "moe"),
    ("model.preset", "toy-moe"),
    ("model.num_layers", "4"),
    ("model.head_dim", "16"),
    ("model.num_experts", "4"),
    ("model.expert_dim", "24"),
    ("model.tied_embeddings", "false"),
    ("model.router_aux_loss_coef", "1"),
    ("model.router_z_loss_coef", "0.1"),
    ("data.packing", "documents"),
    ("train.microbatch_size", "1"),
]


def check(
    layout: str, store: Path, model: Overrides = MODEL, extra: Sequence[tuple[str, str]] = ()
) -> None:
    check_gradients(layout, store, model, TOLERANCE, extra)


OFTEN = [
    "tp2",
    "pp2",
    "cp2",
    "dp_shard2 ep=2 activation_checkpoint.mode=selective",
    "dp_shard4 ep=2 reshard_after_forward=2",  # experts stay, for two ranks have them together
]
EXTRA = [
    "dp_shard2",
    "dp_replicate2",
    "dp_shard2 ep=2",
    "dp_shard4 ep=2",
    "dp_shard4 ep=4",
    "dp_shard8 ep=2 reshard_after_forward=4",
    "dp_shard4 tp2 ep=2 reshard_after_forward=2",
    "dp_shard4 cp2 ep=2 reshard_after_forward=4",
    "cp2 ep=2",
    "dp_shard2 cp2 ep=4",
    "dp_shard2 dp_replicate2 ep=2",
    "dp_shard2 tp2 ep=2",
    "dp_shard2 pp2 ep=2",
    "dp_shard2 pp2 ep=2 gradient_sync=microbatch",
    "dp_shard2 pp2 ep=2 pipeline.schedule=ZBVZeroBubble",
    "dp_shard2 ep=2 activation_checkpoint.mode=full",
    "dp_shard2 ep=2 activation_checkpoint.mode=budget activation_checkpoint.offload=true",
    "dp_shard2 ep=2 gradient_sync=step reshard_after_forward=never",
    "dp_shard2 ep=2 param_persistence_threshold=1000000 fsdp_prefetch=2",
    "dp_shard2 ep=2 cpu_offload=true",
    "tp2 sequence_parallel=false",
    "tp4",
    "dp_shard3 ep=3 model.num_experts=6 train.global_batch_size=9",
    "dp_shard6 train.global_batch_size=12",  # shards the rows of each of four experts
]


@pytest.mark.parametrize("layouts", group_by_ranks(OFTEN))
def test_moe_layouts_gradients_equal_one_process(layouts: list[str], store_path: Path) -> None:
    check_many(layouts, store_path, lambda layout: [*MODEL, *size(layout)], TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize("layout", EXTRA)
def test_expert_parallel_with_other_techniques_gradients_equal_one_process(
    layout: str, store_path: Path
) -> None:
    changed = [word.split("=") for word in layout.split() if "model." in word or "train." in word]
    check(layout, store_path, [*MODEL, *((name, value) for name, value in changed)])


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_expert_parallel_compiled_gradients_equal_one_process(
    store_path: Path, tmp_path: Path
) -> None:
    compiled = [("compile.enable", "true"), ("compile.cache_dir", str(tmp_path))]
    check("dp_shard2 ep=2", store_path, extra=compiled)


BFLOAT16 = [
    ("precision.compute_dtype", "bfloat16"),
    ("monitor.router_metrics", "true"),
    ("train.global_batch_size", "4"),
]
COMPILED = [
    "dp_shard2 ep=2",
    "dp_shard2 ep=2 precision.compute_dtype=float32",
    "dp_shard2 activation_checkpoint.mode=selective",
]
COMPILED_EXTRA = [
    "dp_shard2 ep=2 activation_checkpoint.mode=full",
    "dp_shard2 activation_checkpoint.mode=full",
    "dp_shard2 activation_checkpoint.mode=budget activation_checkpoint.memory_budget=0.5",
    "dp_shard2 lora.rank=3 activation_checkpoint.mode=selective",
    "dp_shard2 lora.rank=2 ep=2",
    "dp_shard2 lora.rank=2 ep=2 precision.compute_dtype=float32",
    "dp_shard2 ep=2 ep_dispatch=padded ep_chunks=2",
    "dp_shard2 ep=2 ep_dispatch=padded ep_chunks=2 precision.compute_dtype=float32",
    "tp2",
    "cp2",
    "pp2",
    "dp_shard2 precision.compute_dtype=float32",
    "dp_shard2 ep=2 precision.compute_dtype=float32 activation_checkpoint.mode=full",
]


def step_results(overrides: Overrides, store: str) -> dict[str, torch.Tensor]:
    """Return this rank's gradients, loads and sums of routers of a step."""
    job = small_job(*overrides)
    plan = plan_here(job)
    built = build(plan, this_rank())
    step = built.train_step
    step.forward_backward(loader_of(job, plan, store, built.mesh).get_microbatches(0))
    params = dict(trainable_parameters(built.model_parts))
    grads = {n: to_local(p.grad) for n, p in params.items() if p.grad is not None}
    balance = find_hook(step.hooks, ExpertBalancer)
    assert balance is not None
    return grads | {str(i): sums for i, sums in enumerate(balance.reduce())}


def compiled_differences(jobs: list[Overrides], store: str, cache: str) -> list[tuple[float, str]]:
    """Return the largest relative difference that torch.compile makes, and where.

    The graphs run operator by operator, so that rounding is the same.
    """
    compile_: Any = torch.compile
    torch.compile = partial(compile_, backend="aot_eager_decomp_partition")  # type: ignore[assignment]
    results = []
    for job in jobs:
        plain = step_results(job, store)
        torch.compiler.reset()
        counters.clear()
        enable = [("compile.enable", "true"), ("compile.cache_dir", cache)]
        compiled = step_results([*job, *enable], store)
        assert counters["stats"]["unique_graphs"] > 0
        assert plain.keys() == compiled.keys()
        errors = {
            name: float((compiled[name] - x).abs().max() / x.abs().max().clamp(min=1e-12))
            for name, x in plain.items()
            if x.numel()
        }
        worst = max(errors, key=lambda name: errors[name])
        results.append((errors[worst], worst))
    return results


def check_compiled(layouts: list[str], store: Path, cache: Path) -> None:
    """Compare compiled and eager gradients.

    With ``ep``, graphs break between the router, the experts and the shared experts, and the three
    gradients of their input are summed in another order than in eager mode.  That is exact to
    rounding only, so bfloat16 has a limit of eight units (2^-8) there.
    """
    jobs = [[*MODEL, *BFLOAT16, *parse(layout)[1]] for layout in layouts]
    args = [jobs, str(store), str(cache)]
    for results in run_ranks(compiled_differences, 2, *args, timeout=500):
        for layout, (error, name) in zip(layouts, results, strict=True):
            exact = "float32" in layout or "sequence_parallel=false" in layout
            sums_differ = "ep=2" in layout and not exact
            assert error <= (2**-5 if sums_differ else 1e-5), (layout, name, error)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_compiled_experts_equal_eager_ones(store_path: Path, tmp_path: Path) -> None:
    check_compiled(COMPILED, store_path, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("layout", COMPILED_EXTRA)
def test_compiled_experts_with_other_techniques_equal_eager_ones(
    layout: str, store_path: Path, tmp_path: Path
) -> None:
    check_compiled([layout], store_path, tmp_path)


# --------------------------------------------------------------------------- training


def run(directory: Path, layout: str, steps: int, store: Path, *extra: tuple[str, str]) -> None:
    ranks, overrides = parse(layout)
    run_overrides = [
        ("run.dir", str(directory)),
        ("train.steps", str(steps)),
        ("optim.decay_fraction", "0"),
    ]
    run_ranks(
        train_rank, ranks, [*MODEL, *overrides, *run_overrides, *extra], str(store), timeout=180
    )


def biases(directory: Path) -> dict[str, torch.Tensor]:
    return {k: v for k, v in newest_state(directory).items() if k.endswith("expert_bias")}


RATE = ("model.balance_rate", "0.01")
GLOBAL = ("model.router_aux_loss_scope", "global")


def test_expert_bias_is_saved_and_loaded_by_every_layout(store_path: Path, tmp_path: Path) -> None:
    """Compare five steps on one process with three steps with ep and two without."""
    subset = [RATE, ("train.global_batch_size", "4"), ("train.microbatch_size", "2"), GLOBAL]
    run(tmp_path / "one", "dp_shard1", 5, store_path, *subset)
    run(tmp_path / "two", "dp_shard2 ep=2", 3, store_path, *subset)
    saved = biases(tmp_path / "two")
    # Each bias is a sum of update steps of the rate 0.01.
    assert saved.keys() == {f"model.layers.{i}.mlp.router.expert_bias" for i in (1, 2, 3)}
    for bias in saved.values():
        moves = bias / 0.01
        torch.testing.assert_close(moves, moves.round(), rtol=0, atol=1e-4)
        assert bias.abs().max() > 0
    run(tmp_path / "two", "tp2", 5, store_path, *subset)
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=1e-4)
    loads = [
        [record["moe_max_load"] for record in records(tmp_path / run)] for run in ("one", "two")
    ]
    assert loads[0] == loads[1]
    assert all(1 <= load <= 2 for load in loads[0])  # two of four experts are active
    expected = biases(tmp_path / "one")
    for name, bias in biases(tmp_path / "two").items():
        torch.testing.assert_close(bias, expected[name], rtol=0, atol=0)


@pytest.mark.slow
def test_expert_parallel_resumed_run_is_equal_bit_for_bit(store_path: Path, tmp_path: Path) -> None:
    layout = "dp_shard2 ep=2 resilience.replica_check=1"
    run(tmp_path / "once", layout, 4, store_path)
    run(tmp_path / "twice", layout, 2, store_path)
    run(tmp_path / "twice", layout, 4, store_path)
    once, twice = newest_state(tmp_path / "once"), newest_state(tmp_path / "twice")
    assert once.keys() == twice.keys()
    assert all(torch.equal(once[name], twice[name]) for name in once)


def other_biases(overrides: Overrides) -> str:
    job = small_job(*overrides)
    plan = plan_here(job)
    built = build(plan, this_rank())
    compare_replicas(built.model_parts, built.optimizer)
    buffers = dict(persistent_buffers(built.model_parts))
    if dist.get_rank() == 1:
        buffers["layers.2.mlp.router.expert_bias"][3] += 0.001
    try:
        compare_replicas(built.model_parts, built.optimizer)
    except ReplicaMismatch as error:
        return str(error)
    return ""


def test_compare_replicas_different_expert_bias_is_found() -> None:
    _, overrides = parse("dp_shard2 ep=2")
    for results in run_ranks(other_biases, 2, MODEL + overrides, timeout=180):
        assert "model.layers.2.mlp.router.expert_bias" in results


@pytest.mark.slow
def test_moe_canonical_order_is_equal_on_any_number_of_ranks(
    store_path: Path, tmp_path: Path
) -> None:
    """Weights and biases are bitwise equal on one rank and on two."""
    canonical = ("train.world_size_invariant", "true")
    for ranks in (1, 2):
        run(tmp_path / str(ranks), f"dp_shard{ranks}", 3, store_path, canonical, RATE)
    one, two = newest_state(tmp_path / "1"), newest_state(tmp_path / "2")
    assert all(torch.equal(one[name], two[name]) for name in one)


# --------------------------------------------------------------------------- refusals


def test_moe_unsupported_keys_are_refused() -> None:
    job, _, result = read_job(
        "demo",
        [
            ("model.kind", "moe"),
            ("model.preset", "toy-moe"),
            ("parallel.ep", "3"),
            ("parallel.dp_shard", "4"),
            ("precision.float8", "rowwise"),
        ],
    )
    assert not result
    with pytest.raises(InvalidConfig) as caught:
        resolve(job, Machine("cpu", devices=2, world_size=4))
    messages = {error.key: str(error) for error in caught.value.errors}
    assert "does not divide" in messages["parallel.ep"]
    assert "precision.float8" in messages

    job, _, _ = read_job("demo", [("parallel.ep", "2")])
    with pytest.raises(InvalidConfig, match="needs experts"):
        resolve(job, Machine("cpu", devices=2, world_size=2))


@pytest.mark.parametrize("shape", [(8, 35, 64), (5, 36, 64), (5, 35, 64)])
def test_choose_shard_dim_never_splits_a_row(shape: tuple[int, int, int]) -> None:
    """8-bit moments are quantized in blocks of a row."""
    placement = _choose_shard_dim(4)(nn.Parameter(torch.empty(shape, device="meta")))
    expected = {8: Shard(0), 36: Shard(1)}
    assert placement == next((expected[size] for size in shape[:2] if size in expected), None)
