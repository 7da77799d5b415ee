"""Mixture of experts in one process, compared with a loop over tokens and transformers."""

from __future__ import annotations

from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from weft.models import FAMILIES
from weft.models.decoder import EXPERT_SHARDING, INIT, Decoder, get_init
from weft.models.decoder_config import DecoderConfig
from weft.models.decoder_costs import (
    flops_per_token,
    num_active_params,
    num_params,
    unit_costs,
)
from weft.models.families.moe import PRESETS
from weft.models.layers import group_sizes, grouped_linear
from weft.models.moe import MoE, RouterStep, moe_layers
from weft.parallel.private import add_in_forward
from weft.planning.model_config import resolve_model

TINY: dict[str, Any] = {
    "num_layers": 3,
    "dim": 32,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 16,
    "num_experts": 6,
    "active_experts": 2,
    "expert_dim": 24,
    "dense_layers": 1,
    "ffn_dim": 48,
    "vocab_size": 96,
    "max_seq_len": 32,
    "qk_norm": "head",
    "rope_scaling": "none",
    "rope_theta": 1e6,
    "norm_eps": 1e-6,
}


def config(**changes: Any) -> DecoderConfig:
    return DecoderConfig(**TINY | changes)


def apply_one_by_one(layer: MoE, x_ND: Tensor) -> Tensor:
    """Compute the layer token by token and expert by expert."""
    c, out = layer.router.config, []
    experts = layer.experts
    for x_D in x_ND:
        logits_E = layer.router.weight @ x_D
        scores_E = torch.softmax(logits_E, 0) if c.score == "softmax" else torch.sigmoid(logits_E)
        ranked = sorted(
            range(c.num_experts), key=lambda e: -(scores_E + layer.router.expert_bias)[e]
        )
        chosen = ranked[: c.active_experts]
        total = sum(scores_E[e] for e in chosen) if c.renormalize else 1.0
        y_D = torch.zeros_like(x_D)
        for e in chosen:
            gate, up, down = (
                linear.weight[e]
                for linear in (experts.gate_proj, experts.up_proj, experts.down_proj)
            )
            y_D = y_D + c.route_scale * scores_E[e] / total * (
                down @ (F.silu(gate @ x_D) * (up @ x_D))
            )
        if layer.shared_experts is not None:
            y_D = y_D + layer.shared_experts(x_D)
        out.append(y_D)
    return torch.stack(out)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"renormalize": False},
        {"score": "sigmoid", "route_scale": 2.5, "shared_experts": 2},
        {"active_experts": 1, "num_experts": 2},
        {"active_experts": 6},
    ],
    ids=str,
)
def test_moe_layer_equals_a_loop_over_tokens(changes: dict[str, Any]) -> None:
    torch.manual_seed(0)
    layer = MoE(config(**changes)).double()
    layer.router.expert_bias.copy_(torch.randn(layer.router.config.num_experts) * 0.1)
    x_BTD = torch.randn(2, 7, 32, dtype=torch.float64, requires_grad=True)
    weights = torch.randn(2, 7, 32, dtype=torch.float64)
    inputs = [x_BTD, *layer.parameters()]
    actual = layer(x_BTD)
    expected = apply_one_by_one(layer, x_BTD.flatten(0, 1)).view_as(x_BTD)
    # The router computes in float32.
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-6)
    for ours, theirs in zip(
        torch.autograd.grad((actual * weights).sum(), inputs),
        torch.autograd.grad((expected * weights).sum(), inputs, materialize_grads=True),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)


def test_expert_bias_changes_the_choice_but_not_the_weights() -> None:
    torch.manual_seed(0)
    layer = MoE(config())
    x_ND = torch.randn(20, 32)
    before, weights = layer.router(x_ND)
    layer.router.expert_bias += 3.0  # an equal bias of all experts changes nothing
    second, same = layer.router(x_ND)
    assert torch.equal(before, second)
    assert torch.equal(weights, same)
    layer.router.expert_bias[4] += 1.0  # larger than any probability
    chosen, weights = layer.router(x_ND)
    assert (chosen == 4).any(1).all()
    torch.testing.assert_close(weights.sum(1), torch.ones(20))


@pytest.mark.parametrize("counts", [[3, 0, 5, 2], [0, 0, 0, 10], [0, 0, 0, 0]])
@pytest.mark.parametrize(
    ("dtype", "widths"), [("float32", (6, 10)), ("bfloat16", (16, 8)), ("bfloat16", (6, 10))]
)
def test_grouped_linear_equals_a_loop_over_experts(
    counts: list[int], dtype: str, widths: tuple[int, int]
) -> None:
    """The test fails if the behavior of `torch.nn.functional.grouped_mm` changes."""
    torch.manual_seed(0)
    x_RD = torch.randn(sum(counts), widths[0], dtype=getattr(torch, dtype), requires_grad=True)
    weight_EFD = torch.randn(4, widths[1], widths[0], dtype=x_RD.dtype, requires_grad=True)
    actual = grouped_linear(x_RD, weight_EFD, torch.tensor(counts))
    rows = [F.linear(x, w) for x, w in zip(x_RD.split(counts), weight_EFD, strict=True)]
    expected = torch.cat(rows)
    torch.testing.assert_close(actual, expected)
    grad = torch.randn_like(actual)
    for ours, theirs in zip(
        torch.autograd.grad(actual, (x_RD, weight_EFD), grad),
        torch.autograd.grad(expected, (x_RD, weight_EFD), grad),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs)


def test_sizes_are_no_constants_of_a_compiled_function() -> None:
    def split(x_RD: Tensor, counts_E: Tensor) -> Tensor:
        return torch.cat([x.sum(0, True) for x in x_RD.split(group_sizes(counts_E, len(x_RD)))])

    compiled = torch.compile(split, backend="aot_eager")
    x_RD = torch.arange(8.0)[:, None]
    for sizes in ([7, 0, 1], [2, 4, 2]):
        counts_E = torch.tensor(sizes)
        assert group_sizes(counts_E, 8) == sizes
        torch.testing.assert_close(compiled(x_RD, counts_E), split(x_RD, counts_E))


@pytest.mark.parametrize("renormalize", [True, False])
def test_moe_logits_and_gradients_equal_transformers(renormalize: bool) -> None:
    """Logits and all gradients equal transformers' Qwen3 MoE with the same weights."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    c = config(dense_layers=0, renormalize=renormalize)
    theirs = transformers.Qwen3MoeForCausalLM(
        transformers.Qwen3MoeConfig(
            num_hidden_layers=c.num_layers,
            hidden_size=c.dim,
            num_attention_heads=c.num_heads,
            num_key_value_heads=c.num_kv_heads,
            head_dim=c.head_dim,
            num_experts=c.num_experts,
            num_experts_per_tok=c.active_experts,
            moe_intermediate_size=c.expert_dim,
            norm_topk_prob=renormalize,
            vocab_size=c.vocab_size,
            max_position_embeddings=c.max_seq_len,
            rope_parameters={"rope_type": "default", "rope_theta": c.rope_theta},
            rms_norm_eps=c.norm_eps,
            tie_word_embeddings=False,
            attn_implementation="eager",
        )
    )
    ours = Decoder(c)
    state = {}
    for name, value in theirs.state_dict().items():
        name = name.removeprefix("model.").replace("mlp.gate.", "mlp.router.")
        if name.endswith("experts.gate_up_proj"):
            stem = name.removesuffix("gate_up_proj")
            state[f"{stem}gate_proj.weight"], state[f"{stem}up_proj.weight"] = value.chunk(2, dim=1)
        elif name.endswith("experts.down_proj"):
            state[f"{name}.weight"] = value
        else:
            state[name] = value
    biases = {name: bias for name, bias in ours.state_dict().items() if "expert_bias" in name}
    ours.load_state_dict(state | biases)
    tokens_BT = torch.randint(0, c.vocab_size, (2, 20))
    weights = torch.randn(2, 20, c.vocab_size)
    local, other = ours(tokens_BT), theirs(tokens_BT).logits
    torch.testing.assert_close(local, other, rtol=0, atol=2e-6)
    (local * weights).sum().backward()
    (other * weights).sum().backward()
    pairs = {
        "layers.1.mlp.router.weight": theirs.model.layers[1].mlp.gate.weight.grad,
        "layers.0.self_attn.q_norm.weight": theirs.model.layers[0].self_attn.q_norm.weight.grad,
        "layers.0.mlp.experts.down_proj.weight": theirs.model.layers[0].mlp.experts.down_proj.grad,
        "embed_tokens.weight": theirs.model.embed_tokens.weight.grad,
    }
    grads = {name: param.grad for name, param in ours.named_parameters()}
    for name, expected in pairs.items():
        torch.testing.assert_close(grads[name], expected, rtol=1e-4, atol=1e-4, msg=name)


# --------------------------------------------------------------------------- losses of the router


def router_step(layer: MoE, scale: float) -> RouterStep:
    """Give the router a step; return it."""
    loads_E = torch.zeros(layer.router.config.num_experts, dtype=torch.int64)
    layer.router.step = RouterStep(loads_E, torch.zeros(4), torch.tensor(scale), add_in_forward)
    return layer.router.step


def losses_by_formula(layer: MoE, x_TD: Tensor) -> tuple[Tensor, Tensor]:
    """Return a sequence's losses: DeepSeek-V3, equations 17 to 20, and ST-MoE, equation 5."""
    c, tokens = layer.router.config, len(x_TD)
    logits_TE = x_TD @ layer.router.weight.T
    scores_TE = torch.softmax(logits_TE, 1) if c.score == "softmax" else torch.sigmoid(logits_TE)
    ranked_TE = scores_TE if not c.score_selected else logits_TE
    chosen_TA = (ranked_TE + layer.router.expert_bias).topk(c.active_experts, dim=1).indices
    balance = torch.zeros(())
    for e in range(c.num_experts):
        f = c.num_experts / (c.active_experts * tokens) * (chosen_TA == e).sum()
        if c.router_aux_loss_scope == "global":  # of the step before
            f = 1 + layer.router.excess_load[e]
        p = sum(scores_E[e] / scores_E.sum() for scores_E in scores_TE) / tokens
        balance = balance + f * p
    z = sum(torch.log(torch.exp(logits_E).sum()) ** 2 for logits_E in logits_TE) / tokens
    return balance, torch.as_tensor(z)


ROUTERS: list[dict[str, Any]] = [
    {},
    {"score": "sigmoid", "route_scale": 2.5, "shared_experts": 1},
    {"score_selected": True, "active_experts": 3},
    {"scaled_expert_inputs": True, "renormalize": False, "active_experts": 1},
    {"router_aux_loss_scope": "global"},
    {"router_aux_loss_scope": "global", "score": "sigmoid", "active_experts": 3},
]


@pytest.mark.parametrize("changes", ROUTERS, ids=str)
def test_router_losses_gradients_equal_the_published_formulas(changes: dict[str, Any]) -> None:
    torch.manual_seed(1)
    layer = MoE(config(**changes, router_aux_loss_coef=0.7, router_z_loss_coef=0.05))
    layer.router.expert_bias.copy_(torch.randn(layer.router.config.num_experts) * 0.05)
    if "router_aux_loss_scope" in changes:
        layer.router.excess_load.uniform_(-1, 2)
    x_BTD = torch.randn(3, 7, 32, requires_grad=True)
    weights = torch.randn(3, 7, 32)
    inputs = [x_BTD, *layer.parameters()]
    losses = [losses_by_formula(layer, x_TD) for x_TD in x_BTD]
    extra = torch.stack([0.7 * balance + 0.05 * z for balance, z in losses]).sum()
    expected = torch.autograd.grad((layer(x_BTD) * weights).sum() + 0.25 * extra, inputs)
    plain = torch.autograd.grad((layer(x_BTD) * weights).sum(), inputs)
    assert not torch.allclose(plain[0], expected[0], rtol=0.01)

    step = router_step(layer, scale=0.25)
    for checkpointed in (False, True):  # the recomputation adds nothing to the sums
        run: Any = partial(checkpoint, layer, use_reentrant=False) if checkpointed else layer
        actual = torch.autograd.grad((run(x_BTD) * weights).sum(), inputs)
        for ours, theirs in zip(actual, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    sums = [2 * sum(values).item() for values in zip(*losses, strict=True)]  # type: ignore[arg-type]
    assert step.sums_M is not None
    assert step.sums_M[:2].tolist() == pytest.approx(sums, rel=1e-5)
    assert step.loads_E.sum() == 2 * 21 * layer.router.config.active_experts
    with torch.no_grad():
        layer(x_BTD)
    assert step.sums_M[:2].tolist() == pytest.approx(sums, rel=1e-5)


def test_router_balance_loss_of_one_sequence_equals_transformers() -> None:
    """transformers' loss is ours times the active experts, where its one batch is our sequence."""
    from transformers.models.qwen3_moe import modeling_qwen3_moe as module

    torch.manual_seed(2)
    layer = MoE(config(router_aux_loss_coef=0.3, active_experts=3))
    step = router_step(layer, scale=1.0)
    x_BTD = torch.randn(1, 40, 32, requires_grad=True)
    inputs = [x_BTD, layer.router.weight]
    actual = torch.autograd.grad(layer(x_BTD).sum(), inputs)
    layer.router.step = None
    logits = F.linear(x_BTD[0], layer.router.weight)
    theirs = module.load_balancing_loss_func((logits,), num_experts=6, top_k=3)
    expected = torch.autograd.grad(layer(x_BTD).sum() + 0.3 / 3 * theirs, inputs)
    for ours, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(ours, other, rtol=1e-5, atol=1e-6)
    assert step.sums_M is not None
    assert step.sums_M[0].item() == pytest.approx(theirs.item() / 3)


def test_router_metrics_are_entropy_and_effect_of_the_bias() -> None:
    layer = MoE(config(num_experts=4, active_experts=2))
    step = router_step(layer, scale=1.0)
    with torch.no_grad():
        layer.router.weight.zero_()
        layer.router.weight[:, 0] = torch.tensor([4.0, 3.0, 2.0, 1.0])
    x_BTD = torch.zeros(1, 3, 32)
    x_BTD[0, :, 0] = torch.tensor([1.0, 1.0, -1.0])  # two prefer experts 0 and 1, one 3 and 2
    layer.router.expert_bias[3] = 0.4  # above expert 1's probability of 0.24, below expert 0's
    layer(x_BTD)
    p = torch.softmax(torch.tensor([4.0, 3.0, 2.0, 1.0]), 0)
    entropy = -(p * p.log()).sum().item()
    assert step.sums_M is not None
    assert step.sums_M[2].item() == pytest.approx(entropy, rel=1e-5)
    assert step.sums_M[3].item() == pytest.approx(2 / 3)


# --------------------------------------------------------------------------- tables and sizes


@pytest.mark.parametrize("preset", PRESETS)
def test_moe_preset_tables_and_counts_cover_every_parameter(preset: str) -> None:
    shape = PRESETS[preset]
    with torch.device("meta"):
        model = Decoder(shape)
    params = dict(model.named_parameters())
    assert sum(param.numel() for param in params.values()) == num_params(shape)
    assert sum(unit.params for unit in unit_costs(shape, 1)) == num_params(shape)
    assert sum(unit.flops_per_token for unit in unit_costs(shape, 64)) == flops_per_token(shape, 64)
    experts = sum(p.numel() for name, p in params.items() if ".experts." in name)
    assert sum(unit.expert_params for unit in unit_costs(shape, 1)) == experts
    idle = experts * (shape.num_experts - shape.active_experts) // shape.num_experts
    assert num_active_params(shape) == num_params(shape) - idle
    for name in [*params, *(name for name in model.state_dict() if name not in params)]:
        assert sum(fnmatchcase(name, pattern) for pattern in INIT) == 1, name
        get_init(name, shape)
        module = name.rpartition(".")[0]
        assert sum(fnmatchcase(module, pattern) for pattern in EXPERT_SHARDING) == 1, module
    assert len(moe_layers(model)) == shape.num_layers - shape.dense_layers


def test_moe_preset_has_the_published_sizes() -> None:
    """The model card of Qwen3-30B-A3B has 30.5 B parameters, of which 3.3 B are active."""
    shape = PRESETS["qwen3-30b-a3b"]
    assert round(num_params(shape) / 1e9, 1) == 30.5
    assert 3.3 <= num_active_params(shape) / 1e9 < 3.4
    # Experts of DeepSeek-V3, shared ones included, have 656 of its 671 billion parameters.  This
    # count does not depend on attention.
    v3 = PRESETS["v3-like"]
    assert (
        sum(unit.expert_params for unit in unit_costs(v3, 1)) + 58 * 3 * 7168 * 2048
        == 58 * 257 * 3 * 7168 * 2048
    )


def test_expert_bias_stays_float32_and_is_saved() -> None:
    model = Decoder(config())
    layer = moe_layers(model)[0]
    layer.router.expert_bias += 0.001
    model.to(torch.bfloat16)
    assert layer.router.expert_bias.dtype == torch.float32
    assert layer.router.expert_bias[0] == torch.tensor(0.001)
    assert "layers.1.mlp.router.expert_bias" in model.state_dict()
    assert all("expert_bias" not in name for name, _ in model.named_parameters())


def test_resolve_model_impossible_shapes_are_reported_at_once() -> None:
    _, errors = resolve_model(
        "moe",
        "toy-moe",
        {"active_experts": 9, "dense_layers": 3, "num_kv_heads": 3, "head_dim": 31},
    )
    assert {error.key for error in errors} == {
        "model.active_experts",
        "model.dense_layers",
        "model.num_kv_heads",
        "model.head_dim",
    }
    assert FAMILIES["moe"].check(PRESETS["toy-moe"]) == []
