"""Groups of ``optim.groups`` with ``lr_mult=0``: frozen parameters."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.harness import run_ranks
from tests.layouts import check_many, group_by_ranks, size, slow_layouts
from tests.small import (
    Overrides,
    gradients,
    loader_of,
    plan_here,
    records,
    small_job,
    this_rank,
    train_rank,
)
from weft.checkpoint.manifest import list_checkpoints, read_manifest
from weft.checkpoint.state_dict import model_state, optimizer_state
from weft.config.errors import InvalidConfig
from weft.estimate.trace import trace_ranks
from weft.estimate.trace_memory import simulate_memory
from weft.planning.lora_plan import plan_cost
from weft.planning.plan import Machine, Plan
from weft.planning.plan_text import describe_plan
from weft.planning.resolve import resolve
from weft.training.setup import build

FROZEN = '[{params=["embed_tokens.*", "*norm*", "layers.0.*up_proj*", "*.k_proj.*"], lr_mult=0}]'
GROUPS: Overrides = [("optim.groups", FROZEN)]
MODEL: Overrides = [("model.tied_embeddings", "false"), ("train.microbatch_size", "1"), *GROUPS]
EXPERTS: Overrides = [
    ("model.kind", "moe"),
    ("model.preset", "toy-moe"),
    ("train.microbatch_size", "1"),
    ("optim.groups", '[{params=["*.experts.up_proj*", "*.k_proj.*", "embed*"], lr_mult=0}]'),
]


def is_frozen(name: str) -> bool:
    kinds = ("embed_tokens", "norm", "k_proj")
    return any(kind in name for kind in kinds) or name == "layers.0.mlp.up_proj.weight"


def plan_of(*overrides: tuple[str, str], ranks: int = 1) -> Plan:
    return resolve(small_job(*overrides), Machine("cpu", devices=ranks, world_size=ranks))


# --------------------------------------------------------------------------- one process


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_frozen_group_has_no_gradient_no_state_and_stays(optimizer: str, store_path: Path) -> None:
    [(grads, all_grads)] = run_ranks(_step, 1, optimizer, str(store_path))
    assert grads["loss"] == all_grads["loss"]
    expected = {name: g for name, g in all_grads["grads"].items() if not is_frozen(name)}
    assert grads["grads"].keys() == expected.keys() != all_grads["grads"].keys()
    for name, grad in expected.items():
        torch.testing.assert_close(grads["grads"][name], grad, rtol=0, atol=0)
    squares = sum(float(grad.double().square().sum()) for grad in expected.values())
    assert grads["norm"] == pytest.approx(squares**0.5, rel=1e-5)


def _step(optimizer: str, store: str) -> tuple[dict[str, Any], dict[str, Any]]:
    overrides = [*MODEL, ("optim.name", optimizer)]
    job = small_job(*overrides)
    plan = plan_here(job)
    built = build(plan, this_rank())
    before = {name: tensor.clone() for name, tensor in model_state(built.model_parts).items()}
    for step in range(2):
        batches = loader_of(job, plan, store, built.mesh).get_microbatches(8 * step)
        built.train_step.forward_backward(batches)
        built.optimizer.step()
    [model] = built.model_parts
    for name, param in model.named_parameters():
        assert param.requires_grad != is_frozen(name)
        assert (param.grad is None) == is_frozen(name)
        assert torch.equal(param, before[f"model.{name}"]) == is_frozen(name), name
    with_state = {
        name.split(".", 1)[1].rsplit(".", 1)[0]
        for name in optimizer_state([model], built.optimizer)
    }
    assert with_state == {name for name, _ in model.named_parameters() if not is_frozen(name)}
    return gradients(overrides, store), gradients([*overrides, ("optim.groups", "[]")], store)


# --------------------------------------------------------------------------- layouts

OFTEN = [
    "dp_shard2 activation_checkpoint.mode=full",
    "tp2",
    "pp2",
    "cp2 activation_checkpoint.mode=selective",
    "dp_replicate2",
    "dp_shard2 reshard_after_forward=never",
]
MORE = [
    "dp_shard2 train.world_size_invariant=true",
    "dp_shard2 tp2 activation_checkpoint.mode=full activation_checkpoint.offload=true",
    "dp_shard2 tp2 pp2",
    "pp2 pipeline.schedule=ZBVZeroBubble",
    "dp_shard2 pp2 gradient_sync=microbatch",
    "dp_shard2 tp2 cpu_offload=true",
    "dp_shard2 cp2",
]


@pytest.mark.parametrize("layouts", [*group_by_ranks(OFTEN), *slow_layouts(MORE)])
def test_frozen_group_layouts_gradients_equal_one_process(
    layouts: list[str], store_path: Path
) -> None:
    check_many(layouts, store_path, lambda layout: [*MODEL, *size(layout)], 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["dp_shard2 ep=2", "dp_shard2 tp2 ep=2", "pp2"])
def test_frozen_experts_gradients_equal_one_process(layout: str, store_path: Path) -> None:
    check_many([layout], store_path, lambda each: [*EXPERTS, *size(each)], 1e-5)


# --------------------------------------------------------------------------- checkpoints


def test_frozen_group_resumes_and_may_change(tmp_path: Path, store_path: Path) -> None:
    """A resumed run equals one without a break; parameters may be frozen or trained later."""

    def train(name: str, steps: int, groups: str, ranks: int = 1) -> None:
        overrides = [
            ("run.dir", str(tmp_path / name)),
            ("train.steps", str(steps)),
            ("optim.lr", "1e-3"),
        ]
        overrides += [
            ("optim.warmup_steps", "0"),
            ("optim.decay_fraction", "0"),
        ]
        overrides += [("optim.groups", groups), ("model.tied_embeddings", "false")]
        overrides += [("parallel.dp_shard", str(ranks))] if ranks > 1 else []
        run_ranks(train_rank, ranks, overrides, str(store_path))

    train("whole", 4, FROZEN)
    train("broken", 2, FROZEN)
    manifest = read_manifest(list_checkpoints(tmp_path / "broken" / "checkpoints")[-1])
    assert {name for name in manifest["frozen"] if "layers.1." not in name} == {
        *("embed_tokens.weight", "norm.weight", "layers.0.mlp.up_proj.weight"),
        *("layers.0.self_attn.k_proj.weight", "layers.0.input_layernorm.weight"),
        "layers.0.post_attention_layernorm.weight",
    }
    # The checkpoint has the whole model, and no state of frozen parameters.
    names = set(manifest["tensors"])
    assert "model.embed_tokens.weight" in names
    assert not any(name.startswith("optim.embed_tokens") for name in names)
    train("broken", 4, FROZEN, ranks=2)
    losses = [[r["loss"] for r in records(tmp_path / name)] for name in ("whole", "broken")]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    train("broken", 5, "[]")  # now all are trained
    train("broken", 6, '[{params=["lm_head*"], lr_mult=0}]')
    manifest = read_manifest(list_checkpoints(tmp_path / "broken" / "checkpoints")[-1])
    assert manifest["frozen"] == ["lm_head.weight"]
    assert len(records(tmp_path / "broken")) == 6


# --------------------------------------------------------------------------- plans


def test_frozen_group_plan_counts_parameters_and_flops() -> None:
    free, plan = plan_of(*MODEL, ("optim.groups", "[]")), plan_of(*MODEL)
    with torch.device("meta"):
        module = plan.family.build(plan.model)
    frozen = {name: p.numel() for name, p in module.named_parameters() if is_frozen(name)}
    assert plan.frozen_params == tuple(frozen)
    assert plan.num_params == free.num_params
    assert plan.num_trainable_params == plan.num_params - sum(frozen.values())
    matrices = sum(size for name, size in frozen.items() if name.endswith("_proj.weight"))
    assert free.flops_per_token - plan.flops_per_token == 2 * matrices
    assert plan_cost(plan).trainable_params == plan.num_trainable_params
    assert "lr_mult=0 freezes others" in describe_plan(plan, Machine("cpu", devices=1), "demo")


def test_blocks_below_the_first_trained_one_have_no_backward_pass() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    overrides: Overrides = [("model.num_layers", "4"), ("model.tied_embeddings", "false")]
    groups = '[{params=["embed_tokens.*", "layers.[0-1].*"], lr_mult=0}]'
    free, plan = plan_of(*overrides), plan_of(*overrides, ("optim.groups", groups))
    counted = []
    for each in (free, plan):
        module = each.family.build(each.model)
        for name, param in module.named_parameters():
            param.requires_grad_(name not in each.frozen_params)
        with FlopCounterMode(display=False) as counter:
            module(torch.zeros(1, each.seq_len, dtype=torch.long)).sum().backward()
        counted.append(counter.get_total_flops() / each.seq_len)
    saved = free.flops_per_token - plan.flops_per_token
    # torch counts no attention on a CPU: four products of all heads' width and the length, times
    # two FLOPs, in each of the two blocks.
    attention = 2 * 8 * plan.model.dim * plan.seq_len
    assert saved == pytest.approx(counted[0] - counted[1] + attention)
    units = plan_cost(free).units
    assert saved == pytest.approx(2 / 3 * sum(unit.flops_per_token for unit in units[1:3]))


def test_frozen_experts_plan_counts_them() -> None:
    free, plan = plan_of(*EXPERTS, ("optim.groups", "[]")), plan_of(*EXPERTS)
    with torch.device("meta"):
        sizes = {n: p.numel() for n, p in plan.family.build(plan.model).named_parameters()}
    frozen = sum(size for name, size in sizes.items() if ".experts.up_proj" in name)
    assert plan_cost(free).expert_params - plan_cost(plan).expert_params == frozen > 0


def test_frozen_group_trace_predicts_the_memory_that_it_saves() -> None:
    """Each frozen parameter saves its gradient and two moments, 12 bytes."""
    layers = [("model.num_layers", "6"), ("train.microbatch_size", "1")]
    layers += [("train.global_batch_size", "2")]
    groups = '[{params=["layers.[0-3].*_proj*"], lr_mult=0}]'
    free = plan_of(*layers, ("optim.groups", "[]"))
    plan = plan_of(*layers, ("optim.groups", groups))
    saved = plan.num_params - plan.num_trainable_params
    live = [
        simulate_memory(trace_ranks(each)[0], caching=False).live_bytes for each in (free, plan)
    ]
    assert live[0]["parameters"] == live[1]["parameters"]
    assert live[0]["optimizer"] - live[1]["optimizer"] == pytest.approx(8 * saved, rel=1e-3)
    assert live[0]["gradients"] - live[1]["gradients"] >= 3.9 * saved


@pytest.mark.parametrize(
    ("overrides", "ranks", "message"),
    [
        ([("optim.groups", '[{params=["*"], lr_mult=0}]')], 1, "freezes every trainable"),
        (
            [
                ("optim.groups", '[{params=["layers.0.*", "embed*"], lr_mult=0}]'),
                ("model.tied_embeddings", "false"),
                ("parallel.pp", "2"),
                ("pipeline.layers_per_stage", "1,1"),
            ],
            2,
            "leaves the first stage without a parameter to train",
        ),
        (
            [
                ("optim.groups", '[{params=["*.k_proj.*"], lr_mult=0}]'),
                ("optim.qk_clip_threshold", "50"),
            ],
            1,
            "cannot scale the weights of queries and keys that lr_mult=0 freezes",
        ),
    ],
)
def test_frozen_groups_that_cannot_work_are_refused(
    overrides: Overrides, ranks: int, message: str
) -> None:
    with pytest.raises(InvalidConfig, match=message):
        plan_of(*overrides, ranks=ranks)


# --------------------------------------------------------------------------- adapters


def test_frozen_adapters_are_saved_and_counted(tmp_path: Path, store_path: Path) -> None:
    lora = [("lora.rank", "4"), ("lora.targets", "q_proj,v_proj")]
    frozen = ("optim.groups", '[{params=["*.lora_A*"], lr_mult=0}]')
    free, plan = plan_of(*lora), plan_of(*lora, frozen)
    factors = 2 * 2 * 4 * plan.model.dim
    assert free.num_trainable_params - plan.num_trainable_params == factors
    run = ("run.dir", str(tmp_path / "run"))
    run_ranks(train_rank, 1, [*lora, frozen, run, ("train.steps", "1")], str(store_path))
    [path] = [p for p in list_checkpoints(tmp_path / "run" / "checkpoints") if "00001" in p.name]
    names = set(json.loads((path / "manifest.json").read_text())["tensors"])
    assert any("lora_A" in name for name in names if name.startswith("model."))
    assert not any("lora_A" in name for name in names if name.startswith("optim."))
