"""Measure training with low-precision AdamW moments on mostly rare tokens.

One process on the CPU trains a small Llama on a Zipf-distributed Markov chain, once with each kind
of moments: torch.optim.AdamW in float32, weft's `optim.state_dtype`, and torchao's AdamW8bit,
without its compiler.  All start from equal weights and see equal tokens.  The table has the final
loss on new tokens, the final distance of all weights from those of float32, and the largest update
of one element in one step, in learning rates (bias-corrected AdamW moves the first step by one).

    .venv/bin/python benchmarks/moments.py [--steps 300] [--seeds 3]
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Iterator
from datetime import date
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from weft.config.schema import OptimSection
from weft.models import load_family
from weft.models.decoder_config import DecoderConfig
from weft.optim.optimizer import build_adamw, build_optimizer
from weft.parallel.float8 import import_quietly
from weft.parallel.initialization import init_params

CONFIG = DecoderConfig(
    num_layers=2,
    dim=64,
    num_heads=4,
    num_kv_heads=2,
    ffn_dim=192,
    vocab_size=4096,
    max_seq_len=64,
    tied_embeddings=False,
)
ROWS, LR = 16, 3e-3
KINDS = ("float32", "bfloat16", "8bit", "torchao")


def batches(seed: int) -> Iterator[Tensor]:
    """Yield sequences: half of the tokens follow from the one before, half are Zipf-distributed."""
    draw = torch.Generator().manual_seed(seed)
    follows = torch.randperm(CONFIG.vocab_size, generator=torch.Generator().manual_seed(7))
    weights = 1 / torch.arange(1, CONFIG.vocab_size + 1).float()
    while True:
        size = ROWS * (CONFIG.max_seq_len + 1)
        rows_BT = torch.multinomial(weights, size, True, generator=draw).view(ROWS, -1)
        for t in range(1, rows_BT.shape[1]):
            known_B = torch.rand(ROWS, generator=draw) < 0.5
            rows_BT[:, t] = torch.where(known_B, follows[rows_BT[:, t - 1]], rows_BT[:, t])
        yield rows_BT


def loss_of(model: nn.Module, rows_BT: Tensor) -> Tensor:
    logits_BTV = model(rows_BT[:, :-1], None, None)
    return nn.functional.cross_entropy(logits_BTV.flatten(0, 1), rows_BT[:, 1:].flatten())


def optimizer_of(kind: str, model: nn.Module) -> Any:
    family = load_family("llama")
    section = OptimSection(lr=LR, state_dtype="float32" if kind == "torchao" else kind)  # type: ignore[arg-type]
    inside = {param for block in family.blocks(model) for param in block.parameters()}
    named = model.named_parameters()
    optimizer = build_optimizer(named, section, build_adamw, family.has_weight_decay, inside)
    if kind != "torchao":
        return optimizer
    groups = [
        {"params": group["params"], "weight_decay": group["weight_decay"]}
        for group in optimizer.param_groups
    ]
    return import_quietly("torchao.optim").AdamW8bit(groups, lr=LR, betas=(0.9, 0.95))


def new_model(seed: int) -> nn.Module:
    family = load_family("llama")
    model = family.build(CONFIG)
    init_params(model.named_parameters(), seed, lambda name: family.get_init(name, CONFIG))
    return model


def trained(kind: str, seed: int, steps: int) -> tuple[dict[str, Tensor], float, float]:
    """Return weights, loss on new tokens, and the largest update in learning rates."""
    model = new_model(seed)
    optimizer, most = optimizer_of(kind, model), 0.0
    tokens = batches(seed)
    for _ in range(steps):
        optimizer.zero_grad()
        loss_of(model, next(tokens)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        before = [param.detach().clone() for param in model.parameters()]
        with mock.patch.object(torch, "compile", lambda function, **options: function):
            optimizer.step()
        moved = zip(model.parameters(), before, strict=True)
        most = max(most, *((p.detach() - old).abs().max().item() / LR for p, old in moved))
    new = batches(1_000_000 + seed)
    with torch.no_grad():
        losses = [loss_of(model, next(new)).item() for _ in range(20)]
    weights = {name: param.detach() for name, param in model.named_parameters()}
    return weights, statistics.fmean(losses), most


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    print(f"{date.today()}, torch {torch.__version__}, {options.steps} steps, lr {LR}")
    print("| moments | seed | loss on new tokens | weights off, of their way | largest move / lr |")
    print("|---|---|---|---|---|")
    for seed in range(options.seeds):
        result = {kind: trained(kind, seed, options.steps) for kind in KINDS}
        first = dict(new_model(seed).named_parameters())
        exact, _, _ = result["float32"]
        distance = math.sqrt(
            sum((exact[name] - first[name]).square().sum().item() for name in exact)
        )
        for kind, (weights, loss, most) in result.items():
            off = sum((weights[name] - exact[name]).square().sum().item() for name in exact)
            print(
                f"| {kind} | {seed} | {loss:.4f} | {math.sqrt(off) / distance:.3f} | {most:.1f} |"
            )


if __name__ == "__main__":
    main()
