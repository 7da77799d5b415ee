"""World-size-invariant training: the same bits on any number of ranks."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.harness import run_ranks
from tests.layouts import parse
from tests.small import (
    Overrides,
    full_tensor,
    gradients,
    loader_of,
    losses,
    newest_state,
    plan_here,
    small_job,
    this_rank,
    train_rank,
)
from weft.checkpoint.state_dict import trainable_parameters
from weft.config.errors import InvalidConfig
from weft.optim.optimizer import clip_scale, compute_grad_norm, masked_step, set_learning_rate
from weft.planning.plan import Machine
from weft.planning.resolve import resolve
from weft.training.setup import build

STEPS: Overrides = [
    ("train.steps", "4"),
    ("train.global_batch_size", "12"),
    ("train.world_size_invariant", "true"),
    ("monitor.log_interval", "1"),
]


@pytest.fixture(scope="module")
def one_rank_run(store_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("alone")
    run_ranks(train_rank, 1, [*STEPS, ("run.dir", str(directory))], str(store_path))
    return directory


@pytest.mark.parametrize(
    ("ranks", "extra"),
    [
        pytest.param(2, [], marks=pytest.mark.slow),
        (3, [("data.packing", "windows")]),
        (4, [("parallel.dp_replicate", "2")]),
        pytest.param(6, [("parallel.dp_replicate", "6")], marks=pytest.mark.slow),
    ],
)
def test_canonical_any_number_of_ranks_gives_the_same_bits(
    ranks: int, extra: Overrides, store_path: Path, tmp_path: Path, one_rank_run: Path
) -> None:
    overrides = [*STEPS, ("run.dir", str(tmp_path)), *extra]
    run_ranks(train_rank, ranks, overrides, str(store_path))
    expected, state = newest_state(one_rank_run), newest_state(tmp_path)
    assert expected.keys() == state.keys()
    assert all(state[name].equal(tensor) for name, tensor in expected.items())
    assert losses(tmp_path) == losses(one_rank_run)


def test_canonical_gradients_equal_usual_order_to_rounding(store_path: Path) -> None:
    """Gradients differ in some bits, else the mode would be useless."""
    (usual,) = run_ranks(gradients, 1, [STEPS[1]], str(store_path))
    (ordered,) = run_ranks(gradients, 1, STEPS[1:3], str(store_path))
    assert ordered["loss"] == pytest.approx(usual["loss"], rel=1e-6)
    assert ordered["norm"] == pytest.approx(usual["norm"], rel=1e-5)
    for name, grad in usual["grads"].items():
        torch.testing.assert_close(ordered["grads"][name], grad, rtol=1e-4, atol=1e-7)
    assert any(not ordered["grads"][name].equal(grad) for name, grad in usual["grads"].items())


# --------------------------------------------------------------------------- other axes


def two_steps(jobs: list[Overrides], store: str) -> list[dict[str, torch.Tensor]]:
    """Return loss, gradient norm, gradients and weights of two steps, for each job."""
    return [_two_steps(job, store) for job in jobs]


def _two_steps(overrides: Overrides, store: str) -> dict[str, torch.Tensor]:
    job = small_job(*overrides)
    plan = plan_here(job)
    built = build(plan, this_rank())
    loader = loader_of(job, plan, store, built.mesh)
    params, values = dict(trainable_parameters(built.model_parts)), {}
    for step in range(2):
        for param in params.values():
            param.grad = None
        batches = loader.get_microbatches(step * job.train.global_batch_size)
        loss = built.train_step.forward_backward(batches)
        dist.all_reduce(loss)
        norm, _ = compute_grad_norm([*params.values()], built.pp_group)
        values |= {f"{step} loss": loss, f"{step} norm": norm}
        values |= {f"{step} {n}.grad": full_tensor(p.grad).clone() for n, p in params.items()}  # type: ignore[arg-type]
        set_learning_rate(built.optimizer, 0.01)
        masked_step(built.optimizer, ~loss.isfinite(), clip_scale(norm, 0.5))
        values |= {f"{step} {n}": full_tensor(p.detach()).clone() for n, p in params.items()}
    return values


def check_bits(jobs: list[tuple[Overrides, list[str]]], store: Path) -> None:
    """Compare each job between layouts; jobs of equally many ranks share a world."""
    worlds: dict[int, list[tuple[int, Overrides]]] = {}
    for index, (overrides, layouts) in enumerate(jobs):
        for layout in layouts:
            ranks, keys = parse(layout)
            job = [*STEPS[2:3], *SHORT, *overrides, *keys]
            worlds.setdefault(ranks, []).append((index, job))
    found: dict[int, list[dict[str, torch.Tensor]]] = {}
    for ranks, items in sorted(worlds.items()):
        results = run_ranks(two_steps, ranks, [job for _, job in items], str(store), timeout=300)
        for (index, _), of_ranks in zip(items, zip(*results, strict=True), strict=True):
            merged = {name: value for rank in of_ranks for name, value in rank.items()}
            for rank in of_ranks:
                assert all(value.equal(merged[name]) for name, value in rank.items())
            found.setdefault(index, []).append(merged)
    for index, (overrides, layouts) in enumerate(jobs):
        first, *others = found[index]
        assert len(others) == len(layouts) - 1
        for other in others:
            assert first.keys() == other.keys(), (overrides, layouts)
            differing = [name for name, value in first.items() if not value.equal(other[name])]
            assert not differing, (overrides, layouts, differing[:3])


SHORT: Overrides = [
    ("run.dir", "/nonexistent"),
    ("train.seq_len", "16"),
    ("optim.max_grad_norm", "0.5"),
]
MOE: Overrides = [
    ("model.kind", "moe"),
    ("model.preset", "toy-moe"),
    ("model.head_dim", "16"),
    ("model.num_experts", "4"),
    ("model.expert_dim", "24"),
]
ZBV: Overrides = [("model.num_layers", "4"), ("pipeline.schedule", "ZBVZeroBubble")]
RESHARD: Overrides = [("parallel.reshard_after_forward", "always")]
BFLOAT16, TIED = ("precision.compute_dtype", "bfloat16"), ("model.tied_embeddings", "true")


def test_canonical_other_axes_any_number_of_data_parallel_ranks_gives_the_same_bits(
    store_path: Path,
) -> None:
    check_bits(
        [
            ([BFLOAT16, TIED], ["tp2", "tp2 dp_shard2"]),
            ([*ZBV, TIED], ["pp2", "pp2 dp_shard2"]),
            (MOE, ["dp_shard2 ep=2", "dp_shard4 ep=2"]),
        ],
        store_path,
    )


@pytest.mark.slow
def test_canonical_more_axes_any_number_of_data_parallel_ranks_gives_the_same_bits(
    store_path: Path,
) -> None:
    check_bits(
        [
            (RESHARD, ["cp2", "cp2 dp_replicate2"]),
            (MOE, ["tp2 etp=1 ep=2", "tp2 dp_shard2 etp=1 ep=2"]),
            ([BFLOAT16], ["dp_shard2 cpu_offload=true", "dp_shard4 cpu_offload=true"]),
        ],
        store_path,
    )


def draw(rng: random.Random) -> tuple[Overrides, list[str]]:
    """Draw a job and two layouts that differ only in data parallelism; at most 8 ranks."""
    axes = {axis: rng.choice([1, 1, 2]) for axis in ("tp", "pp", "cp")}
    moe = rng.random() < 0.5
    keys: Overrides = [("train.global_batch_size", "16"), ("model.num_layers", "4")]
    float8 = rng.choice(["none", "none", "tensorwise", "rowwise", "mxfp8"])
    choices = {
        "precision.compute_dtype": ["float32", "bfloat16"],
        "precision.float8": ["none" if moe else float8],
        "parallel.cpu_offload": ["false", "true"],
        "parallel.sequence_parallel": ["false", "true"] if axes["tp"] > 1 else ["true"],
        "parallel.cp_method": ["ring", "allgather", "ulysses"] if axes["cp"] > 1 else ["ring"],
        "parallel.reshard_after_forward": ["auto", "always", "never"],
        "activation_checkpoint.mode": ["none", "full"],
        "data.packing": ["windows", "documents"],
        "optim.name": ["adamw", "muon"],
        "model.tied_embeddings": ["false", "true"],
        "lora.rank": ["0", "0", "2"],
    }
    if axes["pp"] > 1:
        choices["pipeline.schedule"] = [
            *("GPipe", "1F1B", "Interleaved1F1B", "InterleavedZeroBubble"),
            *("ZBVZeroBubble", "DualPipeV"),
        ]
    keys += [(key, rng.choice(values)) for key, values in choices.items()]
    if float8 != "none" and not moe:
        keys += [("precision.float8_small", "true"), ("model.dim", "128"), ("model.ffn_dim", "256")]
        keys = [("lora.rank", "0") if key == "lora.rank" else (key, v) for key, v in keys]
    smallest = {"dp_shard": 1}
    if moe:
        keys += [*MOE, ("optim.name", "adamw")]
        if axes["tp"] > 1:
            keys.append(("parallel.etp", rng.choice(["tp", "1"])))
        if rng.random() < 0.7:
            keys.append(("parallel.ep", "2"))
            smallest = {"dp_shard": 1 if axes["cp"] == 2 else 2}
    ranks = math.prod([*axes.values(), *smallest.values()])
    if ranks > 4:
        return draw(rng)
    larger = rng.choice([{"dp_replicate": 2}, {"dp_shard": 2 * smallest["dp_shard"]}])
    layouts = [
        " ".join(f"{axis}{size}" for axis, size in (axes | smallest | change).items())
        for change in ({}, larger)
    ]
    return keys, layouts


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", range(6))
def test_canonical_random_jobs_on_twice_as_many_ranks_give_the_same_bits(
    seed: int, store_path: Path
) -> None:
    rng, jobs = random.Random(seed), list[tuple[Overrides, list[str]]]()
    while len(jobs) < 4:
        keys, layouts = draw(rng)
        try:
            for layout in layouts:
                ranks, axes = parse(layout)
                job = small_job(*STEPS[2:3], *SHORT, *keys, *axes)
                resolve(job, Machine("cpu", devices=2, world_size=ranks))
        except InvalidConfig:
            continue
        jobs.append((keys, layouts))
    check_bits(jobs, store_path)


def test_canonical_several_sequences_at_once_are_refused() -> None:
    job: Any = small_job(*STEPS, ("run.dir", "/nonexistent"), ("train.microbatch_size", "3"))
    with pytest.raises(InvalidConfig, match="must be 1 with train"):
        resolve(job, Machine("cpu", devices=2, world_size=4))


@pytest.mark.parametrize("layout", ["dp_shard4", "dp_shard2 cp2 ep=4", "dp_replicate2 tp2", "pp4"])
def test_canonical_plan_has_one_sequence_per_pass_and_no_shards(layout: str) -> None:
    ranks, keys = parse(layout)
    model = [*MOE, ("model.num_layers", "4")] if "ep" in layout else [("model.num_layers", "4")]
    extra = [("parallel.gradient_sync", "step"), ("precision.reduce_dtype", "bfloat16")]
    job = small_job(*STEPS, ("train.global_batch_size", "16"), *model, *keys, *extra)
    plan = resolve(job, Machine("cpu", devices=2, world_size=ranks))
    assert (plan.microbatch_size, plan.fsdp_size, plan.num_threads) == (1, 1, 1)
    assert (plan.gradient_sync, plan.reduce_dtype) == ("microbatch", "float32")
    assert plan.reshard_after_forward is False
    unused = [text.partition("=")[0] for text in plan.warnings]
    assert {"parallel.gradient_sync", "precision.reduce_dtype"} <= {*unused}
