"""LoRA: reference gradients on every layout, frozen and quantized weights."""

from __future__ import annotations

import functools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.harness import run_ranks
from tests.layouts import check_many, group_by_ranks, many_gradients, parse, size
from tests.parallel.test_layouts import distance
from tests.small import Overrides, gradients, loader_of, merged, plan_here, small_job, this_rank
from weft.checkpoint.state_dict import frozen_parameters, optimizer_state, trainable_parameters
from weft.config.errors import InvalidConfig
from weft.config.reader import read_job
from weft.models import load_family
from weft.models.decoder_costs import num_matmul_params
from weft.models.families.llama import PRESETS
from weft.models.family import Init
from weft.parallel.lora.adapted_layers import LoraLinear
from weft.parallel.lora.adapters import ADAPTER_INIT, apply_lora
from weft.parallel.quantized import NF4, dequantize_matrix, quantize_matrix, quantized_linear
from weft.planning.lora_plan import QUANT_BLOCK_BYTES, QUANT_BLOCK_SIZE
from weft.planning.plan import Machine, Plan
from weft.planning.resolve import resolve
from weft.training.setup import build

MODEL: Overrides = [
    ("model.num_layers", "4"),
    ("model.tied_embeddings", "false"),
    ("data.packing", "documents"),
    ("train.microbatch_size", "1"),
    ("lora.rank", "4"),
]
# A row is a multiple of 64 numbers, a quantization block, on two ranks too.
WIDE: Overrides = [*MODEL, ("model.dim", "128"), ("model.ffn_dim", "256")]
# torch 2.11 rounds sums differently; measured: 1.05e-5.
TOLERANCE = 2e-5 if torch.__version__.startswith("2.11") else 1e-5


def adapter_gradients(overrides: Overrides, store: str) -> dict[str, Any]:
    """Run `gradients` with a non-zero B, so that A has gradients."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(ADAPTER_INIT, "lora_B", Init("fan_in"))
        return gradients(overrides, store)


def many_adapter_gradients(jobs: list[Overrides], store: str) -> list[dict[str, Any]]:
    """Run `many_gradients` with a non-zero B."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(ADAPTER_INIT, "lora_B", Init("fan_in"))
        result = many_gradients(jobs, store)
    assert all(name.rpartition(".lora_")[1] for tensor in result for name in tensor["grads"])
    return result


def check_together(layouts: list[str], store: Path, model: Overrides) -> None:
    def model_of(layout: str) -> Overrides:
        quantize = [pair for pair in parse(layout)[1] if pair[0] == "lora.quantize"]
        return [*model, *size(layout), *quantize]

    check_many(layouts, store, model_of, TOLERANCE, compute=many_adapter_gradients)


@functools.cache
def reference(store: str, overrides: tuple[tuple[str, str], ...]) -> dict[str, Any]:
    return run_ranks(adapter_gradients, 1, list(overrides), store)[0]


def check(layout: str, store: Path, model: Overrides = MODEL, tolerance: float = TOLERANCE) -> None:
    """Compare the layout with one process, on every rank."""
    ranks, overrides = parse(layout)
    one = reference(str(store), tuple(model))
    assert len(one["grads"]) == 4 * 7 * 2
    results = run_ranks(adapter_gradients, ranks, model + overrides, str(store), timeout=240)
    for many in merged(results):
        assert many["loss"] == pytest.approx(one["loss"], rel=tolerance)
        assert many["norm"] == pytest.approx(one["norm"], rel=tolerance)
        assert many["grads"].keys() == one["grads"].keys()
        for name, grad in one["grads"].items():
            scale = grad.abs().max()
            assert scale > 0
            assert (many["grads"][name] - grad).abs().max() < tolerance * scale, name


OFTEN = [
    "dp_shard2",
    "tp2",
    "tp2 sequence_parallel=false",
    "pp2 pipeline.schedule=ZBVZeroBubble",
    "cp2",
]


@pytest.mark.parametrize("layouts", group_by_ranks(OFTEN))
def test_lora_layouts_gradients_equal_one_process(layouts: list[str], store_path: Path) -> None:
    check_together(layouts, store_path, MODEL)


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [
        "dp_replicate2",
        "dp_shard2 dp_replicate2",
        "tp4",  # two key/value heads: two ranks share one
        "dp_shard2 tp2",
        "dp_shard2 tp2 pp2",
        "pp2",
        "pp2 pipeline.schedule=Interleaved1F1B pipeline.layers_per_stage=[1,1,1,1]",
        "pp2 pipeline.schedule=DualPipeV pipeline.layers_per_stage=[1,1,1,1]",
        "dp_shard2 pp2 gradient_sync=microbatch",
        "dp_shard2 reshard_after_forward=never",
        "dp_shard2 tp2 cpu_offload=true",
        "dp_shard2 tp2 activation_checkpoint.mode=full activation_checkpoint.offload=true",
        "dp_shard2 activation_checkpoint.mode=selective",
        "dp_shard2 activation_checkpoint.mode=budget",
        "dp_shard2 train.world_size_invariant=true",
    ],
)
def test_lora_other_layout_gradients_equal_one_process(layout: str, store_path: Path) -> None:
    check(layout, store_path)


QUANTIZED = ["dp_shard2 lora.quantize=nf4 activation_checkpoint.mode=full", "tp2 lora.quantize=nf4"]
MORE_QUANTIZED = [
    "dp_shard2 tp2 lora.quantize=int8",
    "pp2 pipeline.schedule=ZBVZeroBubble lora.quantize=nf4",
]


@pytest.mark.parametrize(
    "layouts",
    [
        QUANTIZED,
        *(pytest.param([layout], marks=pytest.mark.slow) for layout in MORE_QUANTIZED),
    ],
    ids=", ".join,
)
def test_lora_quantized_base_gradients_equal_one_process(
    layouts: list[str], store_path: Path
) -> None:
    check_together(layouts, store_path, WIDE)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("quantize", ["none", "nf4"])
@pytest.mark.parametrize("layout", ["dp_shard2", "tp2"])
def test_lora_compiled_gradients_equal_one_process(
    layout: str, quantize: str, store_path: Path
) -> None:
    model = [*WIDE, ("data.packing", "windows"), ("lora.quantize", quantize)]
    # In one process, compiled gradients of unquantized layers differ by up to 1.1e-5.
    check(f"{layout} compile.enable=true", store_path, model, 3 * TOLERANCE)


@pytest.mark.slow
def test_lora_bfloat16_differs_no_more_than_rounding(store_path: Path) -> None:
    """The bfloat16 error of a layout is at most that of one process.

    Frozen weights are stored in bfloat16.
    """
    model = [*WIDE, ("lora.alpha", "1")]  # larger random adapters would give extreme logits
    low = [*model, ("precision.compute_dtype", "bfloat16")]
    exact, one = reference(str(store_path), tuple(model)), reference(str(store_path), tuple(low))
    ranks, overrides = parse("dp_shard2 tp2")
    many = run_ranks(adapter_gradients, ranks, low + overrides, str(store_path))[0]
    assert many["loss"] == pytest.approx(one["loss"], rel=1e-3)
    rounding = distance(one["grads"], exact["grads"])
    assert 1e-3 < rounding < 5e-2
    assert distance(many["grads"], one["grads"]) < 1.5 * rounding


# --------------------------------------------------------------------------- one process


def test_lora_gradients_equal_plain_implementation() -> None:
    """Compare with x W' + alpha / r (x A') B' in plain autograd."""
    family, config = load_family("llama"), PRESETS["toy"].model_copy(update={"num_layers": 2})
    torch.manual_seed(3)
    model, plain = family.build(config), family.build(config)
    plain.load_state_dict(model.state_dict())
    section = small_job(("lora.rank", "4"), ("lora.alpha", "12")).lora
    apply_lora(model, family.blocks(model), section, torch.float32)
    tokens_BT = torch.randint(config.vocab_size, (2, 16))
    with torch.no_grad():
        for name, param in model.named_parameters():
            if name.endswith("lora_B.weight"):
                param.normal_(std=0.1)
    pairs: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    for name, module in model.named_modules():
        if isinstance(module, LoraLinear):
            assert module.lora_A is not None
            a, b = (tensor.weight.detach().clone() for tensor in (module.lora_A, module.lora_B))
            pairs[name] = a.requires_grad_(), b.requires_grad_()

    def make_adapters(a: torch.Tensor, b: torch.Tensor) -> Any:
        return lambda module, args, out: out + 12 / 4 * (args[0] @ a.T) @ b.T

    for name, (a, b) in pairs.items():
        plain.get_submodule(name).register_forward_hook(make_adapters(a, b))
    assert len(pairs) == 14
    outputs = []
    for item in (model, plain):
        logits_BTV = item(tokens_BT)
        F.cross_entropy(logits_BTV.flatten(0, 1), tokens_BT.flatten()).backward()
        outputs.append(logits_BTV)
    torch.testing.assert_close(outputs[0], outputs[1], rtol=1e-5, atol=1e-5)
    for name, ours in pairs.items():
        module = model.get_submodule(name)
        assert isinstance(module.lora_A, nn.Module)
        assert isinstance(module.lora_B, nn.Module)
        for theirs, own in zip((module.lora_A, module.lora_B), ours, strict=True):
            expected = own.grad
            assert expected is not None
            torch.testing.assert_close(
                theirs.weight.grad, expected, rtol=1e-4, atol=1e-5 * expected.abs().max().item()
            )
    assert all(p.grad is None for _, p in frozen_parameters([model]))


def test_lora_initial_adapters_are_distributed_as_in_peft() -> None:
    """A is uniform in +-1 / sqrt(inputs), B is zero."""
    job = small_job(*WIDE)
    run_ranks(_initial, 1, WIDE)
    assert job.lora.rank == 4


def _initial(overrides: Overrides) -> None:
    job = small_job(*overrides)
    built = build(plan_here(job), this_rank())
    params = dict(trainable_parameters(built.model_parts))
    assert len(params) == 4 * 7 * 2
    for name, param in params.items():
        if "lora_B" in name:
            assert not param.any()
            continue
        edge = 1 / math.sqrt(param.shape[1])
        assert 0.9 * edge < param.max() <= edge
        assert -edge <= param.min() < -0.9 * edge
        assert param.std().item() == pytest.approx(edge / math.sqrt(3), rel=0.1)
        assert abs(param.mean()) < 0.15 * edge


def _step(overrides: Overrides, store: str) -> tuple[int, set[str]]:
    """Run two steps; return the number of changed adapters, and optimizer state names."""
    job = small_job(*overrides)
    plan = plan_here(job)
    built = build(plan, this_rank())
    frozen = {n: p.detach().clone() for n, p in frozen_parameters(built.model_parts)}
    adapters = {n: p.detach().clone() for n, p in trainable_parameters(built.model_parts)}
    loader = loader_of(job, plan, store, built.mesh)
    for step in range(2):
        built.train_step.forward_backward(
            loader.get_microbatches(step * job.train.global_batch_size)
        )
        built.optimizer.step()
        built.optimizer.zero_grad()
    for name, param in frozen_parameters(built.model_parts):
        assert param.grad is None
        bits = [_local(tensor).view(torch.uint8) for tensor in (param.detach(), frozen[name])]
        assert bits[0].equal(bits[1]), name
    now = dict(trainable_parameters(built.model_parts))
    moved = [n for n, before in adapters.items() if not _local(now[n]).equal(_local(before))]
    held = {param for group in built.optimizer.param_groups for param in group["params"]}
    assert held == set(now.values())
    return len(moved), set(optimizer_state(built.model_parts, built.optimizer))


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return getattr(tensor, "_local_tensor", tensor)


@pytest.mark.parametrize("quantize", [pytest.param("none", marks=pytest.mark.slow), "nf4"])
def test_lora_step_moves_only_adapters(quantize: str, store_path: Path) -> None:
    keys = [*WIDE, ("lora.quantize", quantize), ("parallel.dp_shard", "2")]
    keys.append(("train.global_batch_size", "4"))
    for moved, states in run_ranks(_step, 2, keys, str(store_path)):
        assert moved == 4 * 7 * 2
        assert len(states) == 3 * moved
        assert all(".lora_" in name for name in states)


# --------------------------------------------------------------------------- quantization


def test_nf4_levels_equal_torchao() -> None:
    from torchao.quantization.quantize_.workflows.nf4 import nf4_tensor

    torch.manual_seed(0)
    weight = torch.randn(64, 256)
    theirs = nf4_tensor.NF4Tensor.from_tensor(weight, 64, 256)
    torch.testing.assert_close(torch.tensor(NF4), theirs.nf4.float(), rtol=0, atol=1e-4)
    ours = dequantize_matrix(quantize_matrix(weight, "nf4"), torch.float32)
    off = (ours - theirs.get_original_weight()).abs()
    # torchao also quantizes scales to 8 bits and rounds levels to four digits, so a few numbers
    # near the middle of two levels round differently.
    assert (off > 0.02 * weight.abs().max()).sum() < 1e-3 * weight.numel()
    assert off.mean() < 5e-3


@pytest.mark.parametrize(("kind", "error"), [("nf4", 0.152), ("int8", 0.5 / 127)])
def test_quantize_matrix_error_is_within_half_a_level(kind: str, error: float) -> None:
    """The error limit is half of the widest gap between levels."""
    torch.manual_seed(0)
    weight = torch.randn(48, 320) * torch.logspace(-6, 6, 48).unsqueeze(1)
    weight[5] = 0
    packed = quantize_matrix(weight, kind)
    assert packed.shape == (48, 5, QUANT_BLOCK_BYTES[kind])
    assert packed.dtype == torch.uint8
    off = (dequantize_matrix(packed, torch.float32) - weight).view(48, 5, QUANT_BLOCK_SIZE).abs()
    largest = weight.view(48, 5, QUANT_BLOCK_SIZE).abs().amax(2, keepdim=True)
    assert (off <= error * 1.0001 * largest).all()
    assert dequantize_matrix(packed, torch.float32)[5].equal(torch.zeros(320))
    # Numbers that are levels are exact.
    assert dequantize_matrix(
        quantize_matrix(dequantize_matrix(packed, torch.float32), kind), torch.float32
    ).equal(dequantize_matrix(packed, torch.float32))


def test_quantize_matrix_shard_equals_shard_of_the_full_matrix() -> None:
    torch.manual_seed(0)
    weight = torch.randn(10, 256)
    for kind in QUANT_BLOCK_BYTES:
        full = quantize_matrix(weight, kind)
        assert torch.cat([quantize_matrix(part, kind) for part in weight.split((3, 7))]).equal(full)
        parts = [quantize_matrix(part.contiguous(), kind) for part in weight.chunk(2, dim=1)]
        assert torch.cat(parts, dim=1).equal(full)


def test_quantized_linear_equals_matmul_of_dequantized_weights() -> None:
    torch.manual_seed(0)
    weight, x = torch.randn(24, 128), torch.randn(2, 5, 128, dtype=torch.float64)
    packed = quantize_matrix(weight, "nf4")
    matrix = dequantize_matrix(packed, torch.float64)
    local, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    ours, plain = quantized_linear(local, packed), theirs @ matrix.T
    assert ours.equal(F.linear(x, matrix))
    grad = torch.randn_like(plain)
    ours.backward(grad)
    plain.backward(grad)
    torch.testing.assert_close(local.grad, theirs.grad)


def test_lora_quantized_block_memory_is_small() -> None:
    """A block in nf4 takes less than 0.3 of its memory in bfloat16."""
    family = load_family("llama")
    size = {}
    for quantize in ("none", "nf4", "int8"):
        with torch.device("meta"):
            model = family.build(PRESETS["8b"].model_copy(update={"num_layers": 1}))
        section = small_job(("lora.rank", "16"), ("lora.quantize", quantize)).lora
        apply_lora(model, family.blocks(model), section, torch.bfloat16)
        (block,) = family.blocks(model)
        size[quantize] = sum(p.nbytes for p in block.parameters() if not p.requires_grad)
    assert size["nf4"] < 0.3 * size["none"]
    assert size["int8"] < 0.54 * size["none"]


# --------------------------------------------------------------------------- plan


def planned(*overrides: tuple[str, str], preset: str = "8b", devices: int = 1) -> Plan:
    keys = [
        ("model.preset", preset),
        ("precision.compute_dtype", "bfloat16"),
        ("data.vocab_size", "512"),
    ]
    job, _, errors = read_job("demo", [*keys, *overrides])
    assert not errors
    return resolve(job, Machine("cuda", devices=devices, world_size=devices))


def test_plan_with_lora_counts_trained_parameters() -> None:
    plain, plan = planned(), planned(("lora.rank", "16"))
    # Sizes in a block: q and o 4096 to 4096, k and v to 1024, gate and up to 14336, down back.
    sides = 2 * (4096 + 4096) + 2 * (4096 + 1024) + 3 * (4096 + 14336)
    adapters = 32 * 16 * sides
    assert (plain.num_trainable_params, plan.num_trainable_params) == (plain.num_params, adapters)
    assert plan.num_params == plain.num_params + adapters
    weights = num_matmul_params(plan.model)
    assert plan.flops_per_token == plain.flops_per_token - 2 * weights + 6 * adapters
    difference = plan.flops_per_token - plan.causal_flops_per_token
    assert difference == plain.flops_per_token - plain.causal_flops_per_token
    subset = planned(("lora.rank", "16"), ("lora.targets", "q_proj,v_proj"))
    assert subset.num_trainable_params == 32 * 16 * (4096 + 4096 + 4096 + 1024)


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ([("lora.rank", "8"), ("lora.targets", "q_prj")], "Did you mean 'q_proj'?"),
        (
            [("lora.rank", "8"), ("lora.quantize", "nf4"), ("parallel.tp", "2")],
            "blocks of 64, which do not divide the 192 inputs of down_proj over tp=2 ranks",
        ),
        (
            [("lora.rank", "8"), ("parallel.pp", "2"), ("pipeline.layers_per_stage", "[0,2]")],
            "leaves the first stage without an adapter",
        ),
        (
            [("lora.rank", "8"), ("parallel.pp", "2"), ("pipeline.layers_per_stage", "[2,0]")],
            "leaves pipeline rank 1 without an adapter",
        ),
        (
            [
                *[("lora.rank", "8"), ("lora.targets", "experts.up_proj"), ("parallel.pp", "2")],
                *[("model.kind", "moe"), ("model.num_experts", "4"), ("model.dense_layers", "1")],
                ("pipeline.layers_per_stage", "[1,1]"),
            ],
            "leaves the first stage without an adapter",
        ),
        (
            [
                *[("lora.rank", "8"), ("lora.quantize", "nf4"), ("model.kind", "moe")],
                *[("model.ffn_dim", "128"), ("model.num_experts", "4"), ("model.expert_dim", "96")],
            ],
            "blocks of 64, which do not divide the 96 inputs of down_proj",
        ),
        (
            [("lora.rank", "8"), ("parallel.pp", "2"), ("model.num_layers", "1")],
            "parallel.pp=2 leaves pipeline rank 1 without an adapter",
        ),
    ],
)
def test_lora_unsupported_keys_are_refused(keys: Overrides, expected: str) -> None:
    shape = [("model.num_layers", "2"), ("model.dim", "128"), ("model.ffn_dim", "192")]
    heads = [("model.num_heads", "4"), ("model.num_kv_heads", "2")]
    preset = "toy-moe" if ("model.kind", "moe") in keys else "8b"
    with pytest.raises(InvalidConfig) as caught:
        planned(*shape, *heads, *keys, preset=preset, devices=2)
    assert expected in str(caught.value)
