"""Rows of tokens, and tables, that are trained beside adapters: one process's gradients."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from tests.harness import run_ranks
from tests.layouts import (
    check_fused_loss,
    check_many,
    group_by_ranks,
    keep_model_keys,
    many_gradients,
    parse,
    size,
    slow_layouts,
)
from tests.parallel.lora.test_adapters import TOLERANCE
from tests.small import Overrides, plan_here, small_job, this_rank
from weft.checkpoint.state_dict import trainable_parameters
from weft.config.errors import InvalidConfig
from weft.models import load_family
from weft.models.families.llama import PRESETS
from weft.models.family import Init
from weft.parallel.lora.adapters import ADAPTER_INIT, apply_lora
from weft.planning.optim_rules import trainable_names
from weft.planning.plan import Machine
from weft.planning.resolve import resolve
from weft.training.setup import build

MODEL: Overrides = [
    ("model.num_layers", "4"),
    ("data.packing", "documents"),
    ("train.microbatch_size", "1"),
    ("lora.rank", "4"),
]
IDS = "lora.trainable_tokens=289,83,259,511,221,63"  # in no order; on the first and the last rank
TIED, UNTIED = (f"model.tied_embeddings={value} {IDS}" for value in ("true", "false"))
SAVED = "model.tied_embeddings=false lora.modules_to_save=embed_tokens,lm_head"
SAVED_TIED = "model.tied_embeddings=true lora.modules_to_save=embed_tokens"
HEAD = f"model.tied_embeddings=false {IDS} lora.modules_to_save=lm_head lora.targets=q_proj"


def many_row_gradients(jobs: list[Overrides], store: str) -> list[dict[str, Any]]:
    """Run `many_gradients` with random changes."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("lora_B", "lora_rows"):
            patch.setitem(ADAPTER_INIT, name, Init("truncated_normal", 0.1))
        result = many_gradients(jobs, store)
    trained = ("embed_tokens.lora_rows.weight", "embed_tokens.weight")
    assert dist.get_rank() or any(name in result[0]["grads"] for name in trained)
    return result


OFTEN = [
    f"tp2 {UNTIED}",
    f"pp2 {TIED}",
    f"dp_shard2 {HEAD}",
]
MORE = [
    f"tp2 {TIED}",
    f"tp2 sequence_parallel=false {TIED}",
    f"tp2 {SAVED}",
    f"tp2 {HEAD}",
    f"pp2 {SAVED_TIED}",
    f"pp2 {UNTIED} pipeline.schedule=ZBVZeroBubble",
    f"pp2 {TIED} pipeline.schedule=ZBVZeroBubble",  # both copies are on one rank
    f"dp_shard2 {TIED}",
    f"dp_shard2 {UNTIED} activation_checkpoint.mode=full",
    f"dp_shard2 {SAVED_TIED} lora.dora=true",
    f"tp2 pp2 {TIED} model.vocab_size=513",
    f"tp2 pp2 {SAVED_TIED}",
    f"tp3 sequence_parallel=false {UNTIED} train.global_batch_size=6",
    f"cp2 {TIED}",
    f"cp2 {UNTIED} parallel.cp_method=ulysses",
    f"dp_shard2 tp2 {UNTIED} cpu_offload=true",
    f"dp_shard2 {TIED} train.world_size_invariant=true",
    f"tp2 {UNTIED} compile.enable=true data.packing=windows",
    f"dp_replicate2 dp_shard2 {UNTIED}",
]


@pytest.mark.timeout(400)
@pytest.mark.parametrize("layouts", [*group_by_ranks(OFTEN), *slow_layouts(MORE)])
def test_trained_rows_layouts_gradients_equal_one_process(
    layouts: list[str], store_path: Path
) -> None:
    def model_of(layout: str) -> Overrides:
        return [*MODEL, *keep_model_keys(layout)]

    check_many(layouts, store_path, model_of, 2 * TOLERANCE, compute=many_row_gradients)


@pytest.mark.parametrize(
    ("layout", "keys"),
    [
        ("tp2", UNTIED),
        *(
            pytest.param(*pair, marks=pytest.mark.slow)
            for pair in (
                ("tp2", TIED),
                ("pp2", TIED),
                ("tp2", HEAD),
                ("tp2", SAVED_TIED),
                ("pp2 pipeline.schedule=ZBVZeroBubble", UNTIED),
            )
        ),
    ],
)
def test_fused_loss_with_trained_rows_has_the_same_gradients(
    layout: str, keys: str, store_path: Path
) -> None:
    overrides = [*MODEL, *size(layout), *parse(f"{layout} {keys}")[1]]
    check_fused_loss(many_row_gradients, overrides, store_path)


# --------------------------------------------------------------------------- one process


@pytest.mark.parametrize("tied", [False, True])
def test_trained_rows_equal_a_changed_table(tied: bool) -> None:
    family = load_family("llama")
    config = PRESETS["toy"].model_copy(update={"num_layers": 1, "tied_embeddings": tied})
    torch.manual_seed(3)
    model, plain = family.build(config), family.build(config)
    plain.load_state_dict(model.state_dict())
    ids = [7, 2, 4000]
    section = small_job(("lora.rank", "4"), ("lora.trainable_tokens", "7,2,4000,7")).lora
    assert section.token_ids == (2, 7, 4000)
    apply_lora(model, family.blocks(model), section, torch.float32)
    params = dict(model.named_parameters())
    for name in (name for name in params if "lora_B" in name):
        torch.nn.init.zeros_(params[name])
    rows = {n: p for n, p in params.items() if n.endswith("lora_rows.weight")}
    assert len(rows) == (1 if tied else 2)
    own, changed = {}, {}
    for name, param in rows.items():
        torch.nn.init.normal_(param, std=0.1)
        own[name] = param.detach().clone().requires_grad_()
        table = name.replace("lora_rows.", "")
        before = dict(plain.named_parameters())[table].detach()
        changed[table] = before.index_add(0, torch.tensor(sorted(ids)), own[name])
    tokens_BT = torch.randint(config.vocab_size, (2, 16))
    tokens_BT[:, ::3] = torch.tensor(ids).repeat(2)
    expected = torch.func.functional_call(plain, changed, (tokens_BT,))
    outputs = model(tokens_BT)
    torch.testing.assert_close(outputs, expected, rtol=1e-4, atol=1e-5)
    for logits_BTV in (outputs, expected):
        F.cross_entropy(logits_BTV.flatten(0, 1), tokens_BT.flatten()).backward()
    for name, param in rows.items():
        theirs, grad = own[name].grad, param.grad
        assert theirs is not None
        assert grad is not None
        limit = 1e-5 * theirs.abs().max().item()
        torch.testing.assert_close(grad, theirs, rtol=1e-4, atol=limit)


def _planned(overrides: Overrides) -> None:
    job = small_job(*overrides)
    built = build(plan_here(job), this_rank())
    params = dict(trainable_parameters(built.model_parts))
    names = trainable_names(job, built.plan.model, built.plan.family)
    assert {*params} == {*names}
    assert built.plan.num_trainable_params == sum(param.numel() for param in params.values())
    rows = {name: param for name, param in params.items() if "lora_rows" in name}
    assert not any(param.detach().any() for param in rows.values())
    decayed = {
        id(param)
        for group in built.optimizer.param_groups
        for param in group["params"]
        if group["weight_decay"]
    }
    assert decayed.isdisjoint(map(id, rows.values()))
    total = sum(p.numel() for part in built.model_parts for p in part.parameters())
    assert built.plan.num_params == total


@pytest.mark.parametrize("keys", [TIED, UNTIED, SAVED, SAVED_TIED, HEAD])
def test_plan_counts_trained_rows_and_tables(keys: str) -> None:
    run_ranks(_planned, 1, [*MODEL, ("optim.weight_decay", "0.1"), *parse(keys)[1]])


@pytest.mark.parametrize(
    ("keys", "rule"),
    [
        ("model.tied_embeddings=true lora.modules_to_save=lm_head", "which is the head, too"),
        (
            "lora.modules_to_save=embed_tokens lora.targets=embed_tokens,q_proj",
            "is also in lora.targets",
        ),
        ("lora.trainable_tokens=1,512", "lora.trainable_tokens=512 is not below model.vocab_size"),
    ],
)
def test_rules_of_trained_rows_and_tables(keys: str, rule: str) -> None:
    with pytest.raises(InvalidConfig, match=rule):
        resolve(small_job(*MODEL, *parse(keys)[1]), Machine("cpu", devices=1, world_size=1))


def test_trained_rows_count_as_parameters_of_the_first_stage() -> None:
    machine = Machine("cpu", devices=2, world_size=2)
    keys: Overrides = [*MODEL, ("parallel.pp", "2"), ("lora.targets", "layers.3.mlp.up_proj")]
    untied = ("model.tied_embeddings", "false")
    with pytest.raises(InvalidConfig, match="leaves the first stage without an adapter to train"):
        resolve(small_job(*keys, untied), machine)
    for more in ("lora.trainable_tokens", "1"), ("lora.modules_to_save", "embed_tokens"):
        assert resolve(small_job(*keys, untied, more), machine)
