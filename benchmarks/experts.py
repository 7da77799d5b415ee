"""Compare a layer of experts with a dense layer of equal active FLOPs, on one CPU thread.

    python benchmarks/experts.py [--rounds 40]
    git worktree add /tmp/before COMMIT && PYTHONPATH=/tmp/before python benchmarks/experts.py

Forward and backward of both layers alternate within one run.  The numbers are processor time of
this process: medians with quartiles, and the median of the ratios of a round.  The dense layer is
as wide as the active experts of a token together, so both multiply equally often.  The rest is the
router, the permutation of tokens, and smaller products.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from datetime import date

import torch
from torch import nn

from weft.models import load_family
from weft.models.decoder_config import DecoderConfig
from weft.models.layers import FeedForward
from weft.models.moe import MoE

SIZES = {"dim": 512, "num_experts": 16, "active_experts": 4, "expert_dim": 256, "shared_experts": 0}
TOKENS = 2048


def build(dtype: torch.dtype) -> dict[str, nn.Module]:
    torch.manual_seed(0)
    preset = load_family("moe").presets["toy-moe"]
    config = DecoderConfig.model_validate(preset.model_dump() | SIZES)
    layers = {
        "dense": FeedForward(config, SIZES["active_experts"] * SIZES["expert_dim"]),
        "experts": MoE(config),
    }
    return {name: layer.to(dtype) for name, layer in layers.items()}


def measure(layer: nn.Module, x_BTD: torch.Tensor) -> float:
    """Return the processor time of forward and backward, in seconds."""
    begin = time.process_time()
    layer(x_BTD).sum().backward()
    return time.process_time() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=40)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    print(f"{date.today()}, torch {torch.__version__}, Python {platform.python_version()}")
    for dtype in (torch.float32, torch.bfloat16):
        layers = build(dtype)
        x_BTD = torch.randn(1, TOKENS, SIZES["dim"], dtype=dtype, requires_grad=True)
        seconds: dict[str, list[float]] = {name: [] for name in layers}
        for index in range(rounds + 2):
            for name, layer in layers.items():
                elapsed = measure(layer, x_BTD)
                if index >= 2:  # warmed up
                    seconds[name].append(elapsed)
        ratios = [b / a for a, b in zip(seconds["dense"], seconds["experts"], strict=True)]
        print(str(dtype).removeprefix("torch."))
        for name, values in seconds.items():
            low, middle, high = (1e3 * q for q in statistics.quantiles(values))
            print(f"  {name}: {middle:.1f} ms ({low:.1f} to {high:.1f})")
        low, middle, high = statistics.quantiles(ratios)
        print(f"  experts / dense: {middle:.2f} ({low:.2f} to {high:.2f})")


if __name__ == "__main__":
    main()
