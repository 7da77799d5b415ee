"""Adapters of the embedding and the head: PEFT's numbers, and one process's gradients."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from tests.conversion.test_peft_export import check, write_run
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
from tests.parallel.lora.test_dora import check_gradients_with_peft
from tests.small import Overrides, plan_here, small_job, this_rank
from weft.checkpoint.state_dict import trainable_parameters
from weft.config.errors import InvalidConfig
from weft.models import load_family
from weft.models.families.llama import PRESETS
from weft.models.family import Init
from weft.parallel.lora.adapters import ADAPTER_INIT, apply_lora
from weft.planning.plan import Machine
from weft.planning.resolve import resolve
from weft.training.setup import build

MODEL: Overrides = [
    ("model.num_layers", "4"),
    ("data.packing", "documents"),
    ("train.microbatch_size", "1"),
    ("lora.rank", "4"),
    ("lora.alpha", "6"),
]
UNTIED = "model.tied_embeddings=false lora.targets=embed_tokens,lm_head,o_proj"
TIED = "model.tied_embeddings=true lora.targets=embed_tokens,up_proj"


def many_embedding_gradients(jobs: list[Overrides], store: str) -> list[dict[str, Any]]:
    """Run `many_gradients` with random factors."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("lora_B", "lora_magnitude", "lora_embedding_A", "lora_embedding_B"):
            patch.setitem(ADAPTER_INIT, name, Init("truncated_normal", 0.1))
        result = many_gradients(jobs, store)
    has_first_stage = dist.get_rank() == 0
    assert not has_first_stage or any("embed_tokens.lora" in name for name in result[0]["grads"])
    return result


OFTEN = [
    f"tp2 {UNTIED} lora.dora=true",
    f"pp2 {TIED}",
]
MORE = [
    f"tp2 {TIED}",
    f"pp2 {UNTIED} pipeline.schedule=ZBVZeroBubble",
    f"dp_shard2 {TIED} lora.dropout=0.1",
    f"dp_shard2 {UNTIED} lora.dora=true activation_checkpoint.mode=full",
    f"pp2 {TIED} pipeline.schedule=ZBVZeroBubble",  # both copies are on one rank
    f"tp2 pp2 {TIED} model.vocab_size=513",
    f"tp3 sequence_parallel=false {UNTIED} lora.dora=true train.global_batch_size=6",
    f"dp_shard2 pp2 {UNTIED} pipeline.schedule=Interleaved1F1B",
    f"cp2 {TIED}",
    f"dp_shard2 tp2 {UNTIED} cpu_offload=true",
    f"dp_shard2 {TIED} train.world_size_invariant=true",
    f"tp2 {UNTIED} compile.enable=true data.packing=windows",
]


@pytest.mark.timeout(400)
@pytest.mark.parametrize("layouts", [*group_by_ranks(OFTEN), *slow_layouts(MORE)])
def test_embedding_adapters_layouts_gradients_equal_one_process(
    layouts: list[str], store_path: Path
) -> None:
    def model_of(layout: str) -> Overrides:
        return [*MODEL, *keep_model_keys(layout)]

    check_many(layouts, store_path, model_of, 2 * TOLERANCE, compute=many_embedding_gradients)


@pytest.mark.parametrize(
    ("layout", "keys"),
    [
        pytest.param("tp2", UNTIED, marks=pytest.mark.slow),
        pytest.param("tp2", f"{UNTIED} lora.dora=true", marks=pytest.mark.slow),
        pytest.param("pp2 pipeline.schedule=ZBVZeroBubble", UNTIED, marks=pytest.mark.slow),
        pytest.param("pp2", TIED, marks=pytest.mark.slow),
        pytest.param("tp2", TIED, marks=pytest.mark.slow),
    ],
)
def test_fused_loss_of_an_adapted_head_has_the_same_gradients(
    layout: str, keys: str, store_path: Path
) -> None:
    overrides = [*MODEL, *size(layout), *parse(f"{layout} {keys}")[1]]
    check_fused_loss(many_embedding_gradients, overrides, store_path)


# --------------------------------------------------------------------------- one process


@pytest.mark.parametrize("tied", [False, True])
def test_embedding_adapter_equals_a_changed_table(tied: bool) -> None:
    family = load_family("llama")
    config = PRESETS["toy"].model_copy(update={"num_layers": 1, "tied_embeddings": tied})
    torch.manual_seed(3)
    model, plain = family.build(config), family.build(config)
    plain.load_state_dict(model.state_dict())
    targets = "embed_tokens" if tied else "embed_tokens,lm_head"
    section = small_job(("lora.rank", "4"), ("lora.alpha", "8"), ("lora.targets", targets)).lora
    apply_lora(model, family.blocks(model), section, torch.float32)
    factors = {n: p for n, p in model.named_parameters() if p.requires_grad}
    assert len(factors) == (2 if tied else 4)
    own = {}
    for name, param in factors.items():
        torch.nn.init.normal_(param, std=0.1)
        own[name] = param.detach().clone().requires_grad_()
    table, embed = plain.embed_tokens.weight.detach(), "embed_tokens.lora_embedding_"
    changed = {
        "embed_tokens.weight": table + 2 * own[f"{embed}A.weight"] @ own[f"{embed}B.weight"].T
    }
    if not tied:
        update = 2 * own["lm_head.lora_B.weight"] @ own["lm_head.lora_A.weight"]
        changed["lm_head.weight"] = plain.lm_head.weight.detach() + update
    tokens_BT = torch.randint(config.vocab_size, (2, 16))
    expected = torch.func.functional_call(plain, changed, (tokens_BT,))
    outputs = model(tokens_BT)
    torch.testing.assert_close(outputs, expected, rtol=1e-4, atol=1e-5)
    for logits_BTV in (outputs, expected):
        F.cross_entropy(logits_BTV.flatten(0, 1), tokens_BT.flatten()).backward()
    for name, param in factors.items():
        theirs = own[name].grad
        assert theirs is not None
        assert param.grad is not None
        torch.testing.assert_close(
            param.grad, theirs, rtol=1e-4, atol=1e-5 * theirs.abs().max().item()
        )


@pytest.mark.parametrize(
    ("tied", "keys"),
    [
        (True, {}),
        pytest.param(False, {"dora": True}, marks=pytest.mark.slow),
        pytest.param(False, {"rank_stabilized": True}, marks=pytest.mark.slow),
    ],
)
def test_embedding_adapters_equal_those_of_peft(
    tied: bool, keys: dict[str, Any], tmp_path: Path
) -> None:
    """Compare logits, also of the merged model, and without a tied head gradients."""
    targets = ["embed_tokens", "q_proj", *(() if tied else ("lm_head",))]
    lora_keys = {"rank": 3, "alpha": 5.0, "targets": targets} | keys
    checkpoint = write_run("llama", tmp_path, lora_keys, tie_word_embeddings=tied)
    config = check(checkpoint, tmp_path)
    assert config["ensure_weight_tying"] == tied
    assert "embed_tokens" in config["target_modules"]
    if not tied:
        check_gradients_with_peft(checkpoint, tmp_path)


def _initial(overrides: Overrides) -> None:
    job = small_job(*overrides)
    built = build(plan_here(job), this_rank())
    params = {name: param.detach() for name, param in trainable_parameters(built.model_parts)}
    a, b = (params[f"embed_tokens.lora_embedding_{which}.weight"] for which in "AB")
    assert not a.any()
    assert a.shape == (512, 4)
    expected = (3 * 32) ** -0.5 if job.model.overrides()["tied_embeddings"] else 1
    assert b.std().item() == pytest.approx(expected, rel=0.2)
    assert built.plan.num_trainable_params == sum(param.numel() for param in params.values())


@pytest.mark.parametrize("keys", [f"{UNTIED} lora.dora=true", TIED])
def test_initial_embedding_adapters_are_those_of_peft(keys: str) -> None:
    run_ranks(_initial, 1, [*MODEL, *parse(keys)[1]])


def test_rules_of_embedding_adapters() -> None:
    machine = Machine("cpu", devices=2, world_size=2)
    tied: Overrides = [*MODEL, ("parallel.tp", "2"), ("model.tied_embeddings", "true")]
    with pytest.raises(InvalidConfig, match="Use embed_tokens, whose adapter changes both"):
        resolve(small_job(*tied, ("lora.targets", "lm_head")), machine)
    keys = [("lora.targets", "embed_tokens"), ("lora.dora", "true")]
    with pytest.raises(InvalidConfig, match=r"lora\.dora=true has magnitudes of columns"):
        resolve(small_job(*tied, *keys), machine)
    with pytest.raises(InvalidConfig, match="nor embed_tokens or lm_head"):
        resolve(small_job(*tied, ("lora.targets", "norm")), machine)
    # The first stage trains the embedding, and no block.
    keys = [*MODEL, ("model.tied_embeddings", "false"), ("parallel.pp", "2")]
    resolve(small_job(*keys, ("lora.targets", "embed_tokens,lm_head")), machine)
