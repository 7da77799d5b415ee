"""LoRA over frozen matrices in float8: the recipe's products, and one process's gradients."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.harness import run_ranks
from tests.layouts import one_process, parse
from tests.parallel.float8.test_linear_layers import (
    ALMOST,
    EQUAL,
    MODEL,
    RECIPES,
    compute_by_hand,
    gathers,
    rounded,
)
from tests.parallel.lora.test_adapters import adapter_gradients, many_adapter_gradients
from tests.parallel.test_layouts import distance
from tests.small import Overrides, merged, small_job
from weft.config.errors import InvalidConfig
from weft.parallel.float8.frozen_linear import frozen_float8_linear
from weft.parallel.lora import apply_lora
from weft.parallel.quantized import dequantize_matrix, quantize_matrix
from weft.planning.plan import Machine
from weft.planning.resolve import resolve

# A row has a multiple of 64 numbers, a quantization block, on two ranks too.
LORA: Overrides = [*MODEL, ("model.dim", "128"), ("model.ffn_dim", "256"), ("lora.rank", "4")]


class Products(TorchDispatchMode):
    """Counts matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.name() in ("aten::mm", "aten::_scaled_mm")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("recipe", RECIPES)
def test_frozen_float8_product_equals_the_recipe(recipe: str) -> None:
    """Two products, not three; the input is not saved."""
    torch.manual_seed(0)
    linear = frozen_float8_linear(recipe, True)
    sizes_D = torch.logspace(-8, 0, 64)  # exceeds the range of one scale
    w, bias = torch.randn(96, 64) / sizes_D, torch.randn(96)
    x = (torch.randn(4, 32, 64) * sizes_D).requires_grad_()
    g = torch.randn(4, 32, 96) / 50
    with Products() as products:
        out = linear(x, w, bias)
        saved = out.grad_fn.next_functions[0][0].saved_tensors  # type: ignore[union-attr]
        (grad_x,) = torch.autograd.grad(out, x, g)
    assert products.count == 2
    assert [tensor.shape for tensor in saved] == [w.shape]
    expected_out, expected_x, _ = compute_by_hand(recipe, w, x, g)
    for ours, theirs in ((out - bias, expected_out), (grad_x, expected_x)):
        # Compare each column alone.
        assert ((ours - theirs).norm(dim=-2) <= 1e-5 * theirs.norm(dim=-2)).all()


@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_frozen_float8_product_of_a_quantized_matrix(kind: str) -> None:
    torch.manual_seed(0)
    packed, x = quantize_matrix(torch.randn(96, 128), kind), torch.randn(32, 128)
    w = dequantize_matrix(packed, torch.float32)
    out = frozen_float8_linear("tensorwise", True)(x, packed)
    e4 = torch.float8_e4m3fn
    expected = rounded(x, e4) @ rounded(w, e4).T
    assert (out - expected).norm() <= 1e-6 * expected.norm()


def test_adapters_stay_in_high_precision() -> None:
    torch.manual_seed(0)
    model = nn.ModuleDict({"block": nn.ModuleDict({"one": nn.Linear(64, 32, bias=False)})})
    w = model.get_parameter("block.one.weight").detach().clone()
    section = small_job(("lora.rank", "4"), ("lora.alpha", "8")).lora
    linears = {"block.one": frozen_float8_linear("tensorwise", True)}
    apply_lora(model, [model["block"]], section, torch.float32, linears)
    layer: Any = model.get_submodule("block.one")
    nn.init.normal_(layer.lora_B.weight)
    x = torch.randn(16, 64)
    e4 = torch.float8_e4m3fn
    base = rounded(x, e4) @ rounded(w, e4).T
    expected = base + 2 * x @ layer.lora_A.weight.T @ layer.lora_B.weight.T
    torch.testing.assert_close(layer(x), expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("kind", ["none", "nf4"])
def test_frozen_float8_product_of_experts_is_that_of_each_expert(kind: str) -> None:
    torch.manual_seed(0)
    linear, counts = frozen_float8_linear("rowwise", True), [5, 0, 17, 10]
    weights = torch.randn(4, 96, 128)
    stored = weights if kind == "none" else quantize_matrix(weights, kind)
    used = weights if kind == "none" else dequantize_matrix(stored, torch.float32)
    bias, x, g = torch.randn(4, 96), torch.randn(32, 128, requires_grad=True), torch.randn(32, 96)
    out = linear(x, stored, bias, torch.tensor(counts))
    (grad_x,) = torch.autograd.grad(out, x, g)
    rows = zip(*(t.split(counts) for t in (x.detach(), g, out, grad_x)), strict=True)
    for (x_e, g_e, out_e, grad_e), w, b in zip(rows, used, bias, strict=True):
        if len(x_e):
            expected_out, expected_x, _ = compute_by_hand("rowwise", w, x_e[None], g_e[None])
            torch.testing.assert_close(out_e - b, expected_out[0], rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(grad_e, expected_x[0], rtol=1e-4, atol=1e-4)


EXPERTS = (
    "model.kind=moe model.preset=toy-moe model.num_experts=4 model.expert_dim=128 "
    "model.expert_biases=true"
)
BOUNDS = {
    "dp_shard2 precision.float8=tensorwise": EQUAL,
    "dp_shard2 precision.float8=mxfp8 lora.quantize=nf4": EQUAL,
    "tp2 precision.float8=tensorwise lora.quantize=int8": ALMOST,
}
MORE = {
    f"dp_shard2 ep=2 {EXPERTS} precision.float8=rowwise": ALMOST,
    f"dp_shard2 {EXPERTS} precision.float8=tensorwise lora.quantize=nf4": ALMOST,
    f"tp2 {EXPERTS} precision.float8=mxfp8 lora.quantize=int8": ALMOST,
    "pp2 pipeline.schedule=ZBVZeroBubble model.num_layers=4 precision.float8=rowwise": EQUAL,
    "tp2 precision.float8=rowwise": ALMOST,
    "tp2 precision.float8=mxfp8": ALMOST,
    "dp_shard2 precision.float8=rowwise lora.quantize=nf4": EQUAL,
    "dp_shard2 precision.float8=rowwise_with_gw_hp lora.targets=q_proj,down_proj": EQUAL,
    "dp_shard2 precision.float8=tensorwise precision.compute_dtype=bfloat16": EQUAL,
    "dp_shard2 tp2 precision.float8=tensorwise lora.quantize=nf4": ALMOST,
    "dp_shard2 pp2 precision.float8=tensorwise": EQUAL,
    "dp_shard2 precision.float8=tensorwise activation_checkpoint.mode=selective": EQUAL,
    "dp_shard2 cpu_offload=true precision.float8=tensorwise": EQUAL,
    "dp_shard3 train.global_batch_size=6 precision.float8=tensorwise": EQUAL,
    "cp2 precision.float8=tensorwise model.qkv_bias=true": ALMOST,
    # Frozen matrices have no product that sums over tokens, which would need multiples of 16.
    "dp_shard2 precision.float8=tensorwise train.seq_len=24": EQUAL,
    "dp_shard2 precision.float8=tensorwise compile.enable=true": ALMOST,
    "dp_shard2 precision.float8=mxfp8 lora.quantize=nf4 compile.enable=true": ALMOST,
}


@pytest.mark.parametrize(
    "bounds",
    [
        BOUNDS,
        *(
            pytest.param({layout: far}, marks=pytest.mark.slow, id=layout)
            for layout, far in MORE.items()
        ),
    ],
)
@pytest.mark.timeout(400)
def test_float8_base_gradients_equal_one_process(
    bounds: dict[str, float], store_path: Path
) -> None:
    """Random adapters in every layer; gradients of the adapters only."""
    prefixes = ("parallel.", "compile.", "activation_checkpoint.")
    ((ranks, *_),) = {(parse(layout)[0],) for layout in bounds}
    rows: Overrides = [("train.global_batch_size", "8")] if ranks > 2 else []
    jobs = [LORA + rows + parse(layout)[1] for layout in bounds]
    single = [[(k, v) for k, v in job if not k.startswith(prefixes)] for job in jobs]
    plain = [(k, v) for k, v in single[0] if k != "precision.float8"]
    exact, *ones = one_process(str(store_path), [plain, *single], many_adapter_gradients)
    by_rank = run_ranks(many_adapter_gradients, ranks, jobs, str(store_path), timeout=380)
    far = {}
    for layout, one, *many in zip(bounds, ones, *by_rank, strict=True):
        far[layout] = max(distance(item["grads"], one["grads"]) for item in merged(many))
    assert {layout: x for layout, x in far.items() if x >= bounds[layout]} == {}
    rounding = distance(ones[0]["grads"], exact["grads"])
    assert rounding > 1e-3
    # Rounding may also send a token to another expert, whose gradient it changes entirely.
    assert rounding < 0.3 or EXPERTS in next(iter(bounds))


def test_frozen_matrices_are_gathered_in_float8(store_path: Path) -> None:
    keys = [*LORA, ("parallel.dp_shard", "2"), ("precision.float8", "tensorwise")]
    for result in run_ranks(gathers, 2, keys, str(store_path)):
        dtypes = Counter(dtype for _, dtype in result)
        assert dtypes["torch.uint8"] >= 3


def test_bfloat16_on_one_rank_trains_adapters_in_float32(store_path: Path) -> None:
    """Tensorwise float8 casts float32 weights; adapters have copies in the compute dtype."""
    keys = [*LORA, ("precision.compute_dtype", "bfloat16"), ("precision.float8", "tensorwise")]
    (result,) = run_ranks(adapter_gradients, 1, keys, str(store_path))
    assert {grad.dtype for grad in result["grads"].values()} == {torch.float32}


def test_rules_of_float8_with_lora() -> None:
    machine = Machine("cpu", devices=2, world_size=1)
    job = small_job(*LORA, ("precision.float8", "rowwise_with_gw_hp"))
    assert any("frozen and have none" in text for text in resolve(job, machine).warnings)
    odd: Overrides = [("train.seq_len", "24"), ("precision.float8", "tensorwise")]
    assert not any("frozen" in text for text in resolve(small_job(*LORA, *odd), machine).warnings)
    with pytest.raises(InvalidConfig, match=r"train\.seq_len"):
        resolve(small_job(*LORA, *odd, ("lora.rank", "0")), machine)
