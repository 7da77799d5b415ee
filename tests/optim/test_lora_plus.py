"""LoRA+: learning rates of PEFT's groups, and the steps of AdamW with two groups."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from tests.small import small_job
from weft.config.schema import LoraSection, OptimSection, replace
from weft.models import load_family
from weft.optim.optimizer import OPTIMIZERS, build_optimizer, set_learning_rate
from weft.parallel.lora import apply_lora
from weft.planning.lora_plan import lora_lr_factor
from weft.planning.matrices import is_matrix
from weft.planning.optim_rules import trainable_names

LORA = LoraSection(rank=2, lr_ratio=16.0)


def parameters() -> dict[str, nn.Parameter]:
    torch.manual_seed(0)
    shapes = {"lora_A": (2, 8), "lora_B": (6, 2), "lora_magnitude": (6,)}
    return {
        f"layers.{i}.q_proj.{name}.weight": nn.Parameter(torch.randn(shape))
        for i in range(2)
        for name, shape in shapes.items()
    }


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_lora_plus_steps_equal_those_of_two_groups(name: str) -> None:
    """Three steps: each factor has its own learning rate, with one schedule."""
    section = OptimSection(name=name, lr=0.01, weight_decay=0.1)
    ours, theirs = parameters(), parameters()
    build = OPTIMIZERS["adamw"] if name == "adamw" else None
    if build is None:
        from weft.optim.optimizer import build_muon

        build = build_muon
    assert not isinstance(build, str)
    is_decayed = [n for n in ours if "magnitude" not in n]
    optimizer = build_optimizer(
        ours.items(),
        section,
        build,
        lambda name: name in is_decayed,
        set(ours.values()),
        lambda name: lora_lr_factor(name, LORA),
    )
    # The same optimizer without factors, for the parameters of one learning rate each.
    others = [
        (
            ratio,
            build_optimizer(
                [(n, p) for n, p in theirs.items() if ("lora_A" in n) == (ratio == 1)],
                section,
                build,
                lambda name: name in is_decayed,
                set(theirs.values()),
            ),
        )
        for ratio in (1.0, 16.0)
    ]
    for step in range(3):
        for params in (ours, theirs):
            torch.manual_seed(step)
            for param in params.values():
                param.grad = torch.randn_like(param)
        set_learning_rate(optimizer, 0.01 / (step + 1))
        optimizer.step()
        for ratio, other in others:
            set_learning_rate(other, ratio * 0.01 / (step + 1))
            other.step()
    for key, param in ours.items():
        torch.testing.assert_close(param, theirs[key], rtol=1e-5, atol=1e-6)


def test_lora_plus_learning_rates_equal_those_of_peft() -> None:
    from peft import LoraConfig, get_peft_model
    from peft.optimizers import create_loraplus_optimizer
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    plain = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, vocab_size=32))
    model = get_peft_model(plain, LoraConfig(r=2, use_dora=True, target_modules="all-linear"))
    theirs = create_loraplus_optimizer(
        model, torch.optim.AdamW, lr=0.01, loraplus_lr_ratio=LORA.lr_ratio
    )
    names = {param: name for name, param in model.named_parameters()}
    count = 0
    for group in theirs.param_groups:
        for param in group["params"]:
            name = names[param].replace(".default", "").replace("_vector", "")
            assert math.isclose(group["lr"], 0.01 * lora_lr_factor(name, LORA)), name
            count += 1
    assert count == 3 * 7


# --------------------------------------------------------------------------- parameter groups


@pytest.mark.parametrize(
    ("kind", "section"),
    [
        ("llama", LoraSection(rank=4)),
        ("llama", LoraSection(rank=4, targets=("q_proj", "embed_tokens", "lm_head"), dora=True)),
        ("llama", LoraSection(rank=4, targets=("embed_tokens",))),
        ("moe", LoraSection(rank=4, targets=("experts.up_proj", "lm_head"))),
    ],
)
def test_patterns_of_groups_match_the_adapters_that_are_built(
    kind: str, section: LoraSection
) -> None:
    family = load_family(kind)
    preset = {"llama": "toy", "moe": "toy-moe"}[kind]
    model: Any = family.presets[preset].model_copy(update={"tied_embeddings": False})
    family = family.of(model)
    with torch.device("meta"):
        module = family.build(model)
    blocks = family.blocks(module)
    apply_lora(module, blocks, section, torch.float32)
    block_params = {param for block in blocks for param in block.parameters()}
    built = {
        name: is_matrix(name, param, block_params)
        for name, param in module.named_parameters()
        if param.requires_grad
    }
    job = replace(small_job(), lora=section)
    assert trainable_names(job, model, family) == built
