"""LoRA dropout: one mask for all layouts, recomputations and resumed runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.harness import run_ranks
from tests.layouts import check_many, group_by_ranks, many_gradients, parse, size, slow_layouts
from tests.parallel.lora.test_adapters import TOLERANCE, WIDE, many_adapter_gradients
from tests.parallel.test_activation_checkpoint import find_differing
from tests.parallel.test_layouts import distance
from tests.small import Overrides, loader_of, plan_here, small_job, this_rank
from weft.parallel.initialization import GOLDEN, mix_bits
from weft.parallel.lora.adapted_layers import LoraLayer
from weft.parallel.lora.dropout import AdapterDropout, apply_mask, is_kept
from weft.training.setup import build

DROPOUT: Overrides = [*WIDE, ("lora.dropout", "0.2"), ("lora.alpha", "6")]


def keys(count: int, stream: int) -> Tensor:
    return mix_bits(torch.arange(count) * GOLDEN + stream).to(torch.int32)


@pytest.mark.parametrize("probability", [0.05, 0.5])
def test_mask_is_independent_between_tokens_columns_and_layers(probability: float) -> None:
    """Counts are within 5.5 standard deviations of a binomial distribution.

    Of the 30,000 counts, 0.001 of a normal distribution would be outside.
    """
    tokens, columns = keys(512, 7), keys(384, -3)
    keep = is_kept(tokens, columns, probability)
    other_layer = is_kept(keys(512, 8), columns, probability)
    p = 1 - probability

    def check(mask: Tensor, expected: float, dim: int | None) -> None:
        count = mask.numel() if dim is None else mask.shape[dim]
        means = mask.double().mean() if dim is None else mask.double().mean(dim)
        assert ((means - expected).abs() < 5.5 * (expected * (1 - expected) / count) ** 0.5).all()

    for dim in (None, 0, 1):
        check(keep, p, dim)
        check(keep & other_layer, p * p, dim)
        for shift in (1, 2, 64):
            check(keep & keep.roll(shift, 0), p * p, dim)
            check(keep & keep.roll(shift, 1), p * p, dim)
    # Rectangles of four: a mask of an xor alone would repeat.
    corner = keep & keep.roll(1, 0) & keep.roll(1, 1) & keep.roll((1, 1), (0, 1))
    check(corner, p**4, None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_apply_mask_scales_what_it_keeps(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens, columns = keys(60, 0).view(2, 30), keys(40, 1)
    x = torch.randn(2, 30, 40, dtype=dtype)
    out = apply_mask(x, tokens, columns, 0.3)
    keep = is_kept(tokens.flatten(), columns, 0.3).view(x.shape)
    torch.testing.assert_close(out, torch.where(keep, x / 0.7, 0).to(dtype))
    monkeypatch.setattr("weft.parallel.token_keys.CHUNK_ELEMENTS", 300)
    assert apply_mask(x, tokens, columns, 0.3).equal(out)


# --------------------------------------------------------------------------- layouts

OFTEN = [
    "tp2 activation_checkpoint.mode=full model.mtp_layers=1",
    "pp2 pipeline.schedule=ZBVZeroBubble",
]
MORE = [
    "dp_shard2 train.microbatch_size=2",
    "cp2",
    "dp_replicate2 lora.dora=true",
    "tp2 sequence_parallel=false lora.targets=o_proj,down_proj",
    "tp3 sequence_parallel=false train.global_batch_size=6 lora.targets=o_proj,down_proj",
    "pp2 dp_shard2 activation_checkpoint.mode=selective pipeline.schedule=Interleaved1F1B",
    "cp2 cp_method=ulysses data.packing=windows cp_load_balance=false",
    "dp_shard2 train.world_size_invariant=true",
    "dp_shard2 activation_checkpoint.mode=budget",
    "dp_shard2 tp2 lora.quantize=nf4",
    "dp_shard2 compile.enable=true data.packing=windows",
    "tp2 compile.enable=true data.packing=windows activation_checkpoint.mode=full",
    "model.kind=deepseek_v3 model.num_kv_heads=4 tp2 lora.targets=kv_b_proj,o_proj",
]


@pytest.mark.timeout(400)
@pytest.mark.parametrize("layouts", [*group_by_ranks(OFTEN), *slow_layouts(MORE)])
def test_dropout_layouts_gradients_equal_one_process(layouts: list[str], store_path: Path) -> None:
    prefixes = ("parallel.", "compile.", "activation_checkpoint.", "train.microbatch")

    def model_of(layout: str) -> Overrides:
        kept = [(k, v) for k, v in parse(layout)[1] if not k.startswith(prefixes)]
        return [*DROPOUT, *size(layout), *kept]

    check_many(layouts, store_path, model_of, 2 * TOLERANCE, compute=many_adapter_gradients)


def _steps(overrides: Overrides, store: str) -> dict[str, Any]:
    """Return gradients of two steps, of a repeated step, and losses of two evaluations."""
    job = small_job(*overrides)
    plan = plan_here(job)
    built = build(plan, this_rank())
    for part in built.model_parts:
        for name, param in part.named_parameters():
            if name.endswith("lora_B.weight"):
                torch.nn.init.normal_(param, std=0.1)
    layers = [m for m in built.model_parts[0].modules() if isinstance(m, AdapterDropout)]
    assert len({tuple(layer.columns_D[:32].tolist()) for layer in layers}) == len(layers) == 4 * 7
    loader, grads = loader_of(job, plan, store, built.mesh), []
    for step in (0, 1, 0):
        built.optimizer.zero_grad()
        batches = loader.get_microbatches(step * job.train.global_batch_size)
        if step:  # the same data, as in a second epoch
            again = loader.get_microbatches(0)
            batches = [
                x._replace(token_ids_BT=y.token_ids_BT) for x, y in zip(again, batches, strict=True)
            ]
        built.train_step.forward_backward(batches)
        params = built.model_parts[0].named_parameters()
        grads.append({n: p.grad.clone() for n, p in params if p.grad is not None})
    losses = []
    for dropout in (True, False):
        if not dropout:
            for module in built.model_parts[0].modules():
                if isinstance(module, LoraLayer):
                    module.dropout = None
        losses.append(built.train_step.evaluate(loader.get_microbatches(0)))
    assert dist.get_world_size() == 1
    return {"grads": grads, "losses": losses}


def test_dropout_of_steps_and_evaluation(store_path: Path) -> None:
    """Steps have different masks, a repeated step has the same, and evaluation has none."""
    (result,) = run_ranks(_steps, 1, DROPOUT, str(store_path))
    first, second, repeated = result["grads"]
    assert distance(first, second) > 0.05
    assert all(grad.equal(repeated[name]) for name, grad in first.items())
    with_dropout, without = result["losses"]
    assert with_dropout == without


@pytest.mark.slow
def test_dropout_recomputed_gradients_are_equal_bit_for_bit(store_path: Path) -> None:
    methods = ("full", "selective", "budget")
    for result in run_ranks(find_differing, 1, DROPOUT, str(store_path), methods, timeout=300):
        assert result == {name: [] for name in methods}


@pytest.mark.slow
def test_dropout_mean_over_masks_approaches_the_gradient(store_path: Path) -> None:
    """With half of the inputs dropped, outputs keep their mean."""
    (plain,) = run_ranks(many_gradients, 1, [WIDE], str(store_path))
    (dropped,) = run_ranks(many_gradients, 1, [[*WIDE, ("lora.dropout", "0.5")]], str(store_path))
    # B is zero, so its gradient is linear in the dropped input, and A has none.
    far = []
    for name, grad in plain[0]["grads"].items():
        if "lora_B" in name:
            other = dropped[0]["grads"][name]
            cosine = (grad * other).sum() / (grad.norm() * other.norm())
            assert 0.3 < cosine < 0.999, name
            far.append(((grad * other).sum() / grad.square().sum()).item())
    assert abs(sum(far) / len(far) - 1) < 0.05
