"""DoRA: the formula, PEFT's gradients, and one process's gradients in every layout."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.conversion.test_peft_export import check, export, load_in_peft, logits, write_run
from tests.layouts import check_many, group_by_ranks, many_gradients, parse, size, slow_layouts
from tests.models.test_families import EAGER
from tests.parallel.lora.test_adapters import TOLERANCE, WIDE
from tests.small import Overrides, small_job
from weft.config.errors import InvalidConfig
from weft.inference.inference_model import load_unsharded
from weft.models.family import Init
from weft.parallel.lora.adapters import ADAPTER_INIT, apply_lora
from weft.parallel.lora.dora import DoraLinear, row_squares
from weft.parallel.quantized import dequantize_matrix, quantize_matrix
from weft.planning.plan import Machine
from weft.planning.resolve import resolve

DORA: Overrides = [*WIDE, ("lora.dora", "true"), ("lora.alpha", "6")]


@pytest.mark.parametrize("quantize", ["none", "nf4"])
def test_row_squares_equal_those_of_the_full_matrix(quantize: str) -> None:
    torch.manual_seed(0)
    w, a, b = torch.randn(48, 128), torch.randn(4, 128), torch.randn(48, 4)
    packed = w
    if quantize != "none":
        packed = quantize_matrix(w, quantize)
        w = dequantize_matrix(packed, torch.float32)
    before, after = row_squares(packed, a, b, 1.5)
    torch.testing.assert_close(before, w.square().sum(1))
    torch.testing.assert_close(after, (w + 1.5 * b @ a).square().sum(1))


def test_dora_bfloat16_output_follows_a_small_change_of_the_lengths() -> None:
    """A scale in bfloat16 would be 1, and the output the same bits."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"block": nn.ModuleDict({"one": nn.Linear(64, 32, bias=False)})})
    section = small_job(("lora.rank", "4"), ("lora.dora", "true")).lora
    apply_lora(model, [model["block"]], section, torch.float32)
    model.bfloat16()
    layer: Any = model.get_submodule("block.one")
    nn.init.zeros_(layer.lora_B.weight)
    x = torch.randn(4096, 64, dtype=torch.bfloat16)
    before = layer(x).float()
    layer.lora_magnitude.weight.data.copy_(0.003 * layer.weight.float().norm(dim=1))
    change = (layer(x).float() * before).sum() / before.square().sum() - 1
    assert change.item() == pytest.approx(0.003, rel=0.1)


def test_dora_gradients_equal_plain_implementation() -> None:
    """The row norm is a constant of the gradient; rows of zeros give no NaN."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"block": nn.ModuleDict({"one": nn.Linear(64, 32)})})
    plain: Any = model.get_submodule("block.one")
    plain.weight.data[3] = 0
    w, bias = plain.weight.detach().clone(), plain.bias.detach().clone()
    section = small_job(("lora.rank", "4"), ("lora.alpha", "8"), ("lora.dora", "true")).lora
    apply_lora(model, [model["block"]], section, torch.float32)
    layer: Any = model.get_submodule("block.one")
    assert isinstance(layer, DoraLinear)
    x = torch.randn(16, 64, requires_grad=True)
    nn.init.zeros_(layer.lora_B.weight)
    torch.testing.assert_close(layer(x), F.linear(x, w, bias), rtol=1e-5, atol=1e-6)
    for param in (layer.lora_B.weight, layer.lora_magnitude.weight):
        nn.init.normal_(param, std=0.3)
    layer.lora_B.weight.data[3] = 0
    own = [
        p.detach().clone().requires_grad_()
        for p in (layer.lora_A.weight, layer.lora_B.weight, layer.lora_magnitude.weight)
    ]
    a, b, change = own
    full = w + 2 * b @ a
    scale = (w.norm(dim=1) + change) / full.detach().norm(dim=1).clamp(min=1e-12)
    expected = x @ (scale.unsqueeze(1) * full).T + bias
    g = torch.randn(16, 32)
    g[:, 3] = 0
    torch.testing.assert_close(layer(x)[:, 4:], expected[:, 4:], rtol=1e-4, atol=1e-5)
    inputs = (layer.lora_A.weight, layer.lora_B.weight, layer.lora_magnitude.weight, x)
    for ours, theirs in zip(
        torch.autograd.grad(layer(x), inputs, g),
        torch.autograd.grad(expected, (*own, x), g),
        strict=True,
    ):
        assert ours.isfinite().all()
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5 * theirs.abs().max().item())


# --------------------------------------------------------------------------- PEFT


def peft_gradients(model: nn.Module, vocab_size: int) -> dict[str, Tensor]:
    tokens_BT = torch.arange(40).view(2, 20) * 7 % vocab_size
    logits_BTV: Any = model(tokens_BT)
    logits_BTV = getattr(logits_BTV, "logits", logits_BTV)
    F.cross_entropy(logits_BTV[:, :-1].flatten(0, 1), tokens_BT[:, 1:].flatten()).backward()
    grads = {}
    for name, param in model.named_parameters():
        name = name.removeprefix("base_model.model.").removeprefix("model.")
        name = name.replace(".default", "").replace("lora_magnitude_vector", "lora_magnitude")
        name = name.replace("token_adapter.trainable_tokens_delta", "lora_rows.weight")
        name = name.replace(".modules_to_save", "")
        if param.grad is not None:
            if ".lora_embedding_" in name and not name.endswith(".weight"):  # PEFT's
                grads[f"{name}.weight"] = param.grad.T if name.endswith("A") else param.grad
            else:
                grads[name] = param.grad
    return grads


def check_gradients_with_peft(checkpoint: Any, directory: Path) -> None:
    theirs_model = load_in_peft(directory / "source", directory / "adapter")
    for name, param in theirs_model.named_parameters():
        trained = ("lora", "trainable_tokens", "modules_to_save")
        param.requires_grad_(any(each in name for each in trained))
    theirs = peft_gradients(theirs_model, checkpoint.config.vocab_size)
    model = load_unsharded(checkpoint, torch.device("cpu"))
    ours = peft_gradients(model, checkpoint.config.vocab_size)
    assert ours.keys() == theirs.keys()
    for name, grad in theirs.items():
        assert grad.abs().max() > 0, name
        error = (ours[name] - grad).abs().max()
        assert error < 1e-4 * grad.abs().max(), (name, error / grad.abs().max())


KEYS = {"rank": 3, "alpha": 5.0, "dora": True}


def test_dora_logits_and_gradients_equal_those_of_peft(tmp_path: Path) -> None:
    checkpoint = write_run("qwen2", tmp_path, KEYS)
    config = check(checkpoint, tmp_path)
    assert config["use_dora"]
    check_gradients_with_peft(checkpoint, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "keys"),
    [
        ("llama", {"rank_stabilized": True}),
        ("phi3", {}),
        ("phi3", {"targets": ["q_proj", "up_proj"]}),  # PEFT adapts a fused layer
        ("gemma3", {}),
        ("glm4_moe", {"targets": ["q_proj", "o_proj"]}),
    ],
)
def test_dora_of_other_families_equals_peft(
    kind: str, keys: dict[str, Any], tmp_path: Path
) -> None:
    checkpoint = write_run(kind, tmp_path, KEYS | keys)
    check(checkpoint, tmp_path)
    if kind != "phi3":
        check_gradients_with_peft(checkpoint, tmp_path)


@pytest.mark.slow
def test_dora_that_peft_cannot_express_is_refused(tmp_path: Path) -> None:
    checkpoint = write_run("glm4_moe", tmp_path, KEYS | {"targets": ["q_proj", "mlp.up_proj"]})
    with pytest.raises(InvalidConfig, match=r"mlp\.up_proj\.weight with lora\.dora"):
        export(checkpoint, tmp_path / "adapter", True)
    merged = export(checkpoint, tmp_path / "merged", False)
    assert (merged / "config.json").exists()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["mixtral", "gpt_oss"])
def test_dora_of_experts_is_exported_merged(kind: str, tmp_path: Path) -> None:
    """PEFT has no DoRA for experts; the merged model computes what weft does."""
    from transformers import AutoModelForCausalLM

    checkpoint = write_run(kind, tmp_path, KEYS)
    with pytest.raises(InvalidConfig, match=r"experts.*with lora\.dora"):
        export(checkpoint, tmp_path / "adapter", True)
    merged = export(checkpoint, tmp_path / "merged", False)
    theirs = AutoModelForCausalLM.from_pretrained(merged, dtype=torch.float32, **EAGER)
    tokens_BT = torch.arange(40).view(2, 20) * 7 % checkpoint.config.vocab_size
    expected = logits(load_unsharded(checkpoint, torch.device("cpu")), tokens_BT)
    torch.testing.assert_close(logits(theirs, tokens_BT), expected, atol=1e-4, rtol=1e-4)


# --------------------------------------------------------------------------- layouts


def many_dora_gradients(jobs: list[Overrides], store: str) -> list[dict[str, Any]]:
    """Run `many_gradients` with a random B and random changes of the magnitudes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(ADAPTER_INIT, "lora_B", Init("truncated_normal", 0.1))
        patch.setitem(ADAPTER_INIT, "lora_magnitude", Init("truncated_normal", 0.1))
        result = many_gradients(jobs, store)
    assert all(name.rpartition(".lora_")[1] for tensor in result for name in tensor["grads"])
    assert any("lora_magnitude" in name for name in result[0]["grads"])
    return result


OFTEN = [
    "dp_shard2 lora.quantize=nf4 activation_checkpoint.mode=full",
    "tp2",
    "pp2 pipeline.schedule=ZBVZeroBubble",
]
MORE = [
    "tp2 sequence_parallel=false lora.targets=o_proj,down_proj model.qkv_bias=true",
    "tp2 model.num_heads=8 model.num_kv_heads=1 model.kind=qwen3",
    "tp3 sequence_parallel=false model.num_heads=4 model.num_kv_heads=2 train.global_batch_size=6",
    "dp_shard2 tp2 lora.quantize=int8 activation_checkpoint.mode=selective",
    "dp_shard2 tp2 pp2",
    "cp2 lora.rank_stabilized=true",
    "dp_shard2 train.world_size_invariant=true",
    "dp_shard2 tp2 cpu_offload=true",
    "tp2 compile.enable=true data.packing=windows",
    "dp_shard2 compile.enable=true data.packing=windows",
]


@pytest.mark.timeout(400)
@pytest.mark.parametrize("layouts", [*group_by_ranks(OFTEN), *slow_layouts(MORE)])
def test_dora_layouts_gradients_equal_one_process(layouts: list[str], store_path: Path) -> None:
    prefixes = ("parallel.", "compile.", "activation_checkpoint.")

    @functools.cache
    def model_of(layout: str) -> Overrides:
        kept = [(k, v) for k, v in parse(layout)[1] if not k.startswith(prefixes)]
        return [*DORA, *size(layout), *kept]

    check_many(layouts, store_path, model_of, 2 * TOLERANCE, compute=many_dora_gradients)


def test_dora_and_float8_gather_weights_in_high_precision() -> None:
    machine = Machine("cpu", devices=2, world_size=2)
    keys = [*DORA, ("precision.float8", "tensorwise"), ("precision.float8_small", "true")]
    plan = resolve(small_job(*keys, ("parallel.dp_shard", "2")), machine)
    assert not plan.float8_all_gather
    assert plan.num_trainable_params > resolve(small_job(*WIDE), machine).num_trainable_params
