"""LoRA of experts: gradients, layouts, planned costs, frozen routers."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.harness import run_ranks
from tests.layouts import check_many, group_by_ranks, parse, size
from tests.parallel.lora.test_adapters import many_adapter_gradients
from tests.parallel.test_expert_parallel import MODEL
from tests.small import Overrides, losses, newest_state, plan_here, small_job, this_rank, train_rank
from weft.checkpoint.state_dict import trainable_parameters
from weft.config.schema import LoraSection
from weft.models import FAMILIES
from weft.models.family import Init
from weft.models.layers import grouped_linear
from weft.models.moe import ExpertLinear, moe_layers
from weft.optim.balance import ExpertBalancer
from weft.parallel.lora.adapted_layers import LoraExpertLinear, LoraLayer
from weft.parallel.lora.adapters import ADAPTER_INIT, apply_lora
from weft.parallel.lora.dropout import apply_lora_dropout, is_kept
from weft.parallel.quantized import dequantize_matrix, quantize_matrix, quantized_linear
from weft.parallel.step_hook import find_hook
from weft.planning.lora_plan import is_target, lora_scaling, training_cost
from weft.planning.plan import Machine
from weft.planning.resolve import resolve
from weft.training.setup import build

PRESETS: dict[str, Any] = {kind: next(iter(f.presets.values())) for kind, f in FAMILIES.items()}
KINDS = [kind for kind, preset in PRESETS.items() if preset.num_experts]
TOLERANCE = 2e-5  # of rounding; measured: 1.06e-5


def adapted(kind: str, section: LoraSection) -> nn.Module:
    """Build a family's smallest model with adapters, all random."""
    family = FAMILIES[kind].of(PRESETS[kind])
    torch.manual_seed(2)
    model = family.build(PRESETS[kind])
    apply_lora(model, family.blocks(model), section, torch.float32)
    with torch.no_grad():
        for param in model.parameters():
            if param.is_floating_point() and param.dim() > 1:
                param.normal_(0, param.shape[-1] ** -0.5)
        for name, param in model.named_parameters():
            if name.endswith("lora_magnitude.weight"):
                param.normal_(0, 0.1)
    return model


# Routed alone; biases; groups, shared experts and latent attention; scaled inputs.
OFTEN_MERGED = ("moe", "gpt_oss", "deepseek_v3", "llama4")
assert set(OFTEN_MERGED) <= set(KINDS)


@pytest.mark.parametrize(
    ("kind", "dora"),
    [
        *(
            pytest.param(kind, False, marks=[] if kind in OFTEN_MERGED else pytest.mark.slow)
            for kind in KINDS
        ),
        ("moe", True),
        ("gpt_oss", True),
    ],
)
def test_adapter_gradients_follow_from_those_of_the_merged_weights(kind: str, dora: bool) -> None:
    """With W' = c (W + s B A), the gradients are s c dW' A^T of B, and s B^T c dW' of A.

    With DoRA, c is m / |W + s B A| per row, a constant here, and the gradient of m is that of the
    row's length.  Otherwise it is 1.
    """
    section = LoraSection(rank=3, alpha=5.0, dora=dora)
    model, scale = adapted(kind, section), lora_scaling(section)
    family = FAMILIES[kind].of(PRESETS[kind])
    merged = family.build(PRESETS[kind])
    layers = {n: m for n, m in model.named_modules() if isinstance(m, LoraLayer)}
    state = {n: p.detach().clone() for n, p in model.state_dict().items() if ".lora_" not in n}
    scales, directions = {}, {}
    for name, layer in layers.items():
        assert layer.lora_A is not None
        update = layer.lora_B.get_parameter("weight") @ layer.lora_A.get_parameter("weight")
        before = state[f"{name}.weight"].norm(dim=-1, keepdim=True)
        state[f"{name}.weight"] += scale * update.detach()
        directions[name] = F.normalize(state[f"{name}.weight"], dim=-1)
        scales[name] = torch.ones_like(before)
        if dora:
            change = layer.get_parameter("lora_magnitude.weight")
            assert change.shape == before.shape[:-1]
            length = before + change.detach().unsqueeze(-1)
            scales[name] = length / state[f"{name}.weight"].norm(dim=-1, keepdim=True)
        state[f"{name}.weight"] *= scales[name]
    merged.load_state_dict(state)
    tokens_BT = torch.randint(PRESETS[kind].vocab_size, (2, 12))
    outputs = []
    for item in (model, merged):
        logits_BTV = item(tokens_BT)
        F.cross_entropy(logits_BTV.flatten(0, 1), tokens_BT.flatten()).backward()
        outputs.append(logits_BTV)
    torch.testing.assert_close(*outputs, rtol=1e-4, atol=1e-4 * outputs[1].abs().max().item())

    trained = {name for name, param in model.named_parameters() if param.grad is not None}
    kinds = ["A", "B", *(["magnitude"] if dora else [])]
    assert trained == {f"{n}.lora_{which}.weight" for n in layers for which in kinds}
    assert {n for n, p in model.named_parameters() if p.requires_grad} == trained
    assert sum(isinstance(layer, LoraExpertLinear) for layer in layers.values()) == (
        3 * PRESETS[kind].num_moe_layers
    )
    for name, layer in layers.items():
        dense = merged.get_submodule(name).get_parameter("weight").grad
        assert layer.lora_A is not None
        assert dense is not None
        a, b = (m.get_parameter("weight") for m in (layer.lora_A, layer.lora_B))
        scaled = scale * scales[name] * dense
        pairs = [(a, b.mT @ scaled), (b, scaled @ a.mT)]
        if dora:
            length = layer.get_parameter("lora_magnitude.weight")
            pairs.append((length, (dense * directions[name]).sum(-1)))
        for param, expected in pairs:
            assert param.grad is not None
            limit = expected.abs().max()
            assert limit > 0, name
            assert (param.grad - expected).abs().max() < 1e-4 * limit, name


def test_expert_adapters_of_gpt_oss_keep_biases_frozen() -> None:
    model = adapted("gpt_oss", LoraSection(rank=2))
    biases = [p for n, p in model.named_parameters() if n.endswith("experts.up_proj.bias")]
    assert biases
    assert not any(bias.requires_grad for bias in biases)


def test_dropout_of_experts_is_that_of_the_token_before_routing() -> None:
    """Compare a layer with one product per token and expert."""
    config = PRESETS["moe"].model_copy(update={"active_experts": 2, "dense_layers": 0})
    family, p = FAMILIES["moe"].of(config), 0.3
    torch.manual_seed(2)
    model = family.build(config)
    apply_lora(model, family.blocks(model), LoraSection(rank=3, dropout=p), torch.float32)
    apply_lora_dropout(model, family.blocks(model), p, seed=5)
    moe = moe_layers(model)[0]
    layers: list[Any] = [moe.experts.gate_proj, moe.experts.up_proj, moe.experts.down_proj]
    adapters = [weight for each in layers for weight in (each.lora_A.weight, each.lora_B.weight)]
    for param in (moe.router.weight, *adapters):
        nn.init.normal_(param, std=0.2)
    x_BTD = torch.randn(2, 5, config.dim)
    keys_BT = torch.randint(-(2**31), 2**31 - 1, (2, 5)).to(torch.int32)
    layers[0].dropout.token_keys.value = keys_BT
    out_BTD = moe(x_BTD)

    def project(layer: Any, expert: int, token: int, x_D: Tensor) -> Tensor:
        kept_ND = is_kept(keys_BT.flatten(), layer.dropout.columns_D, p)
        a, b = (each.weight[expert] for each in (layer.lora_A, layer.lora_B))
        dropped_D = torch.where(kept_ND[token], x_D / (1 - p), 0)
        return layer.weight[expert] @ x_D + layer.scaling * b @ (a @ dropped_D)

    x_ND = x_BTD.flatten(0, 1)
    chosen_NA, weights_NA = moe.router(x_ND)
    rows = []
    for n, x_D in enumerate(x_ND):
        total_D = torch.zeros(config.dim)
        for e, weight in zip(chosen_NA[n].tolist(), weights_NA[n], strict=True):
            gate, up = (project(layer, e, n, x_D) for layer in layers[:2])
            total_D = total_D + weight * project(layers[2], e, n, F.silu(gate) * up)
        rows.append(total_D)
    expected_BTD = torch.stack(rows).view_as(x_BTD)
    if moe.shared_experts is not None:
        expected_BTD = expected_BTD + moe.shared_experts(x_BTD)
    torch.testing.assert_close(out_BTD, expected_BTD, rtol=1e-4, atol=1e-5)
    grad_BTD = torch.randn_like(out_BTD)
    ours, theirs = (torch.autograd.grad(out, adapters, grad_BTD) for out in (out_BTD, expected_BTD))
    for grad, expected in zip(ours, theirs, strict=True):
        torch.testing.assert_close(
            grad, expected, rtol=1e-4, atol=1e-4 * expected.abs().max().item()
        )
    layers[0].dropout.token_keys.value = None  # evaluation
    assert (moe(x_BTD) - out_BTD).abs().max() > 0.01


def test_targets_select_experts_shared_experts_and_dense_layers() -> None:
    names = ("layers.0.mlp.up_proj", "layers.1.mlp.shared_experts.up_proj")
    names += ("layers.1.mlp.experts.up_proj", "layers.1.self_attn.q_proj")

    def selected(*targets: str) -> list[bool]:
        return [is_target(name, LoraSection(rank=1, targets=targets)) for name in names]

    assert selected() == [True] * 4
    assert selected("up_proj") == [True, True, True, False]
    assert selected("experts.up_proj") == [False, False, True, False]
    assert selected("shared_experts.up_proj", "q_proj") == [False, True, False, True]
    assert selected("mlp.up_proj") == [True, False, False, False]


# --------------------------------------------------------------------------- quantized experts


@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_quantized_experts_equal_products_of_dequantized_matrices(kind: str) -> None:
    torch.manual_seed(0)
    weight_EOI, bias_EO = torch.randn(3, 20, 128), torch.randn(3, 20)
    packed = quantize_matrix(weight_EOI, kind)
    each = [quantize_matrix(matrix, kind) for matrix in weight_EOI]
    assert packed.equal(torch.stack(each))
    matrices_EOI = torch.stack([dequantize_matrix(matrix, torch.float32) for matrix in each])
    assert dequantize_matrix(packed, torch.float32).equal(matrices_EOI)
    counts_E = torch.tensor([4, 0, 3])
    x_RI = torch.randn(7, 128, requires_grad=True)
    ours = quantized_linear(x_RI, packed, bias_EO, counts_E)
    experts_R = torch.tensor([0, 0, 0, 0, 2, 2, 2])
    plain = torch.einsum("ri,roi->ro", x_RI, matrices_EOI[experts_R]) + bias_EO[experts_R]
    torch.testing.assert_close(ours, plain)
    grad = torch.randn_like(plain)
    torch.testing.assert_close(
        torch.autograd.grad(ours, x_RI, grad)[0], torch.autograd.grad(plain, x_RI, grad)[0]
    )


def test_quantized_experts_keep_only_bytes_for_backward() -> None:
    layer = ExpertLinear(4, 256, 512)
    layer.weight = nn.Parameter(quantize_matrix(layer.weight.data, "nf4"), requires_grad=False)
    saved: list[Tensor] = []

    def save(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    x_RI = torch.randn(8, 256, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
        quantized_linear(x_RI, layer.weight, None, torch.tensor([2, 2, 2, 2]))
    assert sum(tensor.nbytes for tensor in saved) <= layer.weight.nbytes + 64


def test_grouped_product_of_transposed_weights_in_bfloat16() -> None:
    """The gradient of a quantized layer's input is such a product."""
    torch.manual_seed(0)
    weight_EOI = torch.randn(3, 16, 24, dtype=torch.bfloat16)
    grad_RO, counts_E = torch.randn(9, 16, dtype=torch.bfloat16), torch.tensor([2, 0, 7])
    expected = torch.cat([grad_RO[:2] @ weight_EOI[0], grad_RO[2:] @ weight_EOI[2]])
    torch.testing.assert_close(
        grouped_linear(grad_RO, weight_EOI.transpose(1, 2), counts_E), expected
    )


# --------------------------------------------------------------------------- layouts

EXPERTS: Overrides = [*MODEL, ("lora.rank", "4")]
OSS: Overrides = [*EXPERTS, ("model.kind", "gpt_oss"), ("model.preset", "toy")]
# A row of each matrix is a multiple of 64 on two ranks.
QUANTIZED: Overrides = [
    *EXPERTS,
    *[("model.dim", "128"), ("model.ffn_dim", "128"), ("model.expert_dim", "128")],
    *[("model.head_dim", "32"), ("lora.quantize", "nf4")],
]
LATENT: Overrides = [
    *[("model.kind", "deepseek_v3"), ("model.preset", "toy"), ("model.num_layers", "3")],
    *[("model.num_heads", "4"), ("model.num_kv_heads", "4"), ("model.num_experts", "4")],
    *[("model.expert_dim", "24"), ("model.expert_groups", "2"), ("train.microbatch_size", "1")],
    *[("data.packing", "documents"), ("lora.rank", "4")],
]
MODELS = {"moe": EXPERTS, "gpt_oss": OSS, "nf4": QUANTIZED, "deepseek_v3": LATENT}
BOTH = "lora.dora=true lora.dropout=0.2"
OFTEN = {
    "moe": ["dp_shard2 ep=2", f"tp2 {BOTH}"],
    "nf4": [f"dp_shard2 ep=2 activation_checkpoint.mode=full {BOTH}"],
}
EXTRA = {
    "moe": [
        "dp_shard2",
        "pp2",
        "tp2",
        f"dp_shard2 tp2 ep=2 {BOTH}",
        f"pp2 pipeline.schedule=ZBVZeroBubble {BOTH}",
        f"dp_shard2 cpu_offload=true ep=2 {BOTH}",
        f"cp2 ep=2 {BOTH}",
        f"dp_shard2 ep=2 activation_checkpoint.mode=selective {BOTH}",
        f"dp_shard3 lora.rank=3 {BOTH}",
        f"tp2 sequence_parallel=false lora.targets=experts.down_proj {BOTH}",
        f"dp_shard2 train.world_size_invariant=true {BOTH}",
        f"dp_shard2 ep=2 precision.float8=rowwise precision.float8_small=true {BOTH}",
        "dp_shard2 ep=2 lora.targets=experts.up_proj",
        "dp_shard2 ep=2 lora.targets=q_proj",
        "dp_shard2 ep=2 reshard_after_forward=never",
        "dp_shard2 ep=2 cpu_offload=true",
        "dp_shard2 pp2 ep=2",
        "dp_shard2 tp2 ep=2",
        "dp_shard3 lora.rank=3",  # shards the ranks of A, and rows of B
        "cp2 ep=2",
        "dp_shard2 train.world_size_invariant=true",
        "dp_shard2 dp_replicate2 ep=2",
        "tp2 etp=1 ep=2",
        f"tp2 etp=1 ep=2 {BOTH}",
        f"dp_shard2 ep=2 ep_dispatch=padded ep_chunks=2 {BOTH}",
        f"dp_shard2 ep=2 ep_dispatch=padded ep_capacity_factor=1 {BOTH}",
    ],
    "gpt_oss": [
        *("dp_shard2 ep=2", "tp2", "dp_shard2 tp2 ep=2", f"tp2 {BOTH}"),
        f"tp2 etp=1 sequence_parallel=false {BOTH}",
    ],
    "nf4": [
        *("tp2", "dp_shard2 ep=2", f"dp_shard2 tp2 ep=2 {BOTH}"),
        *("dp_shard2 tp2 ep=2 lora.quantize=int8", "dp_shard3 lora.quantize=int8"),
        f"tp2 etp=1 ep=2 {BOTH}",
    ],
    "deepseek_v3": [
        *("tp2", "dp_shard2 ep=2", "tp2 sequence_parallel=false"),
        "tp2 etp=1 ep=2 sequence_parallel=false",
    ],
}


def check(kind: str, layouts: list[str], store: Path) -> None:
    def model_of(layout: str) -> Overrides:
        prefixes = ("lora.", "precision.")
        changed = [pair for pair in parse(layout)[1] if pair[0].startswith(prefixes)]
        return [*MODELS[kind], *size(layout), *changed]

    check_many(layouts, store, model_of, 2 * TOLERANCE, compute=many_expert_gradients)


def many_expert_gradients(jobs: list[Overrides], store: str) -> list[dict[str, Any]]:
    """Run `many_adapter_gradients` with random changes of the magnitudes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(ADAPTER_INIT, "lora_magnitude", Init("truncated_normal", 0.1))
        return many_adapter_gradients(jobs, store)


@pytest.mark.parametrize(("kind", "layouts"), list(OFTEN.items()))
def test_expert_adapters_in_layouts_gradients_equal_one_process(
    kind: str, layouts: list[str], store_path: Path
) -> None:
    check(kind, layouts, store_path)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("kind", "layouts"),
    [
        pytest.param(kind, *group.values, marks=group.marks, id=f"{kind} {group.id}")
        for kind, layouts in EXTRA.items()
        for group in group_by_ranks(layouts)
    ],
)
def test_expert_adapters_in_other_layouts_gradients_equal_one_process(
    kind: str, layouts: list[str], store_path: Path
) -> None:
    check(kind, layouts, store_path)


def test_expert_adapters_are_initialized_as_in_peft() -> None:
    """A is uniform in +-1 / sqrt(inputs), B is zero."""
    run_ranks(_initial, 1, [*EXPERTS, ("model.expert_dim", "64")])


def _initial(overrides: Overrides) -> None:
    built = build(plan_here(small_job(*overrides)), this_rank())
    factors = {n: p for n, p in trainable_parameters(built.model_parts) if ".experts." in n}
    assert len(factors) == 3 * 3 * 2  # the first of four layers is dense
    for name, param in factors.items():
        experts, rows, inputs = param.shape
        if "lora_B" in name:
            assert (experts, inputs) == (4, 4)
            assert not param.any()
            continue
        assert (experts, rows) == (4, 4)
        edge = 1 / math.sqrt(inputs)
        assert 0.9 * edge < param.abs().max() <= edge
        assert param.std().item() == pytest.approx(edge / math.sqrt(3), rel=0.1)
        assert not param[0].equal(param[1])


# --------------------------------------------------------------------------- runs


def train(directory: Path, layout: str, steps: int, store: Path, *extra: tuple[str, str]) -> None:
    ranks, overrides = parse(layout)
    keys = [("run.dir", str(directory)), ("train.steps", str(steps)), ("optim.lr", "0.01")]
    keys += [("optim.decay_fraction", "0"), ("optim.warmup_steps", "0")]
    run_ranks(train_rank, ranks, [*EXPERTS, *overrides, *keys, *extra], str(store), timeout=180)


def test_expert_adapters_resume_in_another_layout_with_a_fixed_selection_bias(
    store_path: Path, tmp_path: Path
) -> None:
    """Compare two steps on one process with a step with ep and one with tp."""
    some = [("model.balance_rate", "0.01"), ("train.global_batch_size", "4")]
    some += [("model.num_layers", "2"), ("monitor.log_interval", "1")]
    train(tmp_path / "one", "dp_shard1", 2, store_path, *some)
    train(tmp_path / "two", "dp_shard2 ep=2", 1, store_path, *some)
    train(tmp_path / "two", "tp2", 2, store_path, *some)
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=1e-5)
    one, two = newest_state(tmp_path / "one"), newest_state(tmp_path / "two")
    assert one.keys() == two.keys()
    biases = [name for name in one if name.endswith("expert_bias")]
    assert biases
    assert not any(state[name].any() for state in (one, two) for name in biases)
    experts = [n for n in one if n.startswith("model.") and ".experts." in n]
    assert len(experts) == 3 * 2
    for name in experts:
        assert one[name].any()
        assert (two[name] - one[name]).norm() < 1e-2 * one[name].norm(), name


# --------------------------------------------------------------------------- plan


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "section",
    [
        LoraSection(rank=5),
        LoraSection(rank=2, targets=("experts.down_proj", "q_proj"), quantize="nf4"),
        LoraSection(rank=2, dora=True),
    ],
    ids=["all", "targets", "dora"],
)
def test_planned_adapters_are_those_of_the_built_model(kind: str, section: LoraSection) -> None:
    sizes = {"dim": 128, "expert_dim": 64, "ffn_dim": 128, "num_heads": 4, "num_kv_heads": 2}
    sizes["head_dim"] = 64
    if PRESETS[kind].kv_rank:
        sizes |= {"num_kv_heads": 4, "kv_rank": 64, "q_rank": 128, "value_head_dim": 64}
    config: Any = PRESETS[kind].model_copy(update=sizes)
    family = FAMILIES[kind].of(config)
    with torch.device("meta"):
        model = family.build(config)
        apply_lora(model, family.blocks(model), section, torch.float32)
    cost = training_cost(section, config, family, seq_len=32)
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    experts = sum(p.numel() for n, p in trained.items() if ".experts." in n)
    total = sum(p.numel() for p in trained.values())
    active = total - experts + experts * config.active_experts // config.num_experts
    assert experts > 0
    assert (cost.trainable_params, cost.expert_params) == (total, experts)
    packed = sum(p.numel() for p in model.parameters() if p.dtype == torch.uint8)
    assert cost.quantized_params == packed // 36 * 64
    frozen = sum(
        p.numel() * (64 / 36 if p.dtype == torch.uint8 else 1)
        for p in model.parameters()
        if not p.requires_grad
    )
    assert cost.num_params == frozen
    assert family.num_active_params is not None
    assert cost.active_params == family.num_active_params(config) + active
    # A frozen weight in a product costs 4 FLOPs of an active token's 6; adapters cost all 6.
    weights = family.flops_per_token(config, 0) / 6
    full = family.flops_per_token(config, 32)
    assert cost.flops_per_token == pytest.approx(full - 2 * weights + 6 * active)


def test_load_balance_bias_of_an_imported_model_stays() -> None:
    """A moved bias could not be exported with the adapters."""
    run_ranks(_bias_after_a_step, 1, [*EXPERTS, ("model.balance_rate", "0.01")])


def _bias_after_a_step(overrides: Overrides) -> None:
    built = build(plan_here(small_job(*overrides)), this_rank())
    routers = [layer.router for layer in moe_layers(built.model_parts[0])]
    for router in routers:
        router.expert_bias.fill_(0.25)
    balance = find_hook(built.train_step.hooks, ExpertBalancer)
    assert balance is not None
    balance.loads_LE[:, 0] = 7
    balance.update(torch.tensor(False))
    assert all(router.expert_bias.eq(0.25).all() for router in routers)


def test_a_load_balance_rate_without_effect_is_a_warning() -> None:
    keys = [("model.kind", "moe"), ("model.preset", "toy-moe"), ("lora.rank", "4")]
    assert not any("balance_rate" in text for text in planned(*keys))
    (warning,) = [text for text in planned(*keys, ("model.balance_rate", "0.1")) if "rate" in text]
    assert "model.balance_rate=0.1 has no effect: the routers are frozen" in warning


def planned(*overrides: tuple[str, str]) -> tuple[str, ...]:
    return resolve(small_job(*overrides), Machine("cpu", devices=1, world_size=1)).warnings
