"""Compare the planner's predictions with three published gains.

    python benchmarks/plan_gains.py [--json]

Each gain compares two variants of a shipped recipe on the published devices: H100 of 500 W with
HBM2e memory, eight to a node.  Both variants are predicted twice: from a trace of weft's step, as
in `weft plan`, and by arithmetic (`weft.estimate.analytic`), as in its search.  TorchTitan
published tokens per second and device.  TorchTitan is another program, so only ratios are compared.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from dataclasses import dataclass

import torch

from weft.estimate.analytic import DecoderFormulas
from weft.estimate.cost import build_hardware
from weft.estimate.forecast import forecast
from weft.planning.devices import match_device
from weft.planning.plan_text import plan_recipe
from weft.training.machine import detect_machine

PAPER = "TorchTitan, arXiv:2410.06511"
REPOSITORY = "TorchTitan, benchmarks/llama3_h100_202412_torchtitan.md"
Overrides = dict[str, str]


@dataclass(frozen=True)
class Gain:
    """A published gain of ``better`` over ``plain``; both have the keys ``common``."""

    name: str
    recipe: str
    cluster: str
    common: Overrides
    plain: Overrides
    better: Overrides
    published: dict[str, float]


FLOAT8: Overrides = {"compile.enable": "true", "precision.float8": "tensorwise"}
GAINS = [
    Gain(
        "compile and float8, 8B on 128",
        "paper/llama3-8b",
        "16x8xH100 500W",
        {
            "train.microbatch_size": "2",
            "train.global_batch_size": "256",
            "activation_checkpoint.mode": "selective",
        },
        {},
        FLOAT8,
        {PAPER: 0.65, REPOSITORY: 0.50},  # 5,645 to 9,319; 5,605 to 8,380
    ),
    Gain(
        "asynchronous tensor parallel, 70B on 256",
        "paper/llama3-70b",
        "32x8xH100 500W",
        {
            **FLOAT8,
            "train.microbatch_size": "16",
            "train.global_batch_size": "512",
            "activation_checkpoint.mode": "full",
        },
        {"parallel.async_tp": "false"},
        {"parallel.async_tp": "true"},
        {PAPER: 0.126, REPOSITORY: 0.057},  # 897 to 1,010; 829 to 876
    ),
    Gain(
        "interleaved against plain 1F1B, 405B on 512",
        "paper/llama3-405b",
        "64x8xH100 500W",
        {
            **FLOAT8,
            "train.microbatch_size": "4",
            "train.global_batch_size": "256",
            "activation_checkpoint.mode": "full",
            "parallel.async_tp": "true",
        },
        {"pipeline.schedule": "1F1B", "pipeline.stages_per_rank": "1"},
        {"pipeline.schedule": "Interleaved1F1B", "pipeline.stages_per_rank": "2"},
        {PAPER: 0.30, REPOSITORY: 0.28},  # text of the paper; 100 to 128
    ),
]


def speeds(gain: Gain, changes: Overrides) -> dict[str, float]:
    """Return tokens per second and device, by trace and by arithmetic."""
    overrides = list((gain.common | changes).items())
    plan, machine = plan_recipe(gain.recipe, overrides, [], gain.cluster, detect_machine)
    device = match_device(machine.device_name, machine.memory_bytes)
    assert device is not None
    traced = forecast(plan, machine, device).tokens_per_second_per_device
    assert traced is not None
    formulas = DecoderFormulas(plan, device)
    seconds = formulas.step_seconds(build_hardware(plan, device)).total()
    return {"traced": traced, "arithmetic": plan.tokens_per_step / seconds / plan.world_size}


def predict(gain: Gain) -> dict[str, dict[str, float]]:
    """Return both speeds and the gain as a fraction, by method of prediction."""
    plain, better = speeds(gain, gain.plain), speeds(gain, gain.better)
    return {
        way: {"plain": plain[way], "better": better[way], "gain": better[way] / plain[way] - 1}
        for way in plain
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--json", action="store_true", help="one object, for machines")
    options = parser.parse_args()
    start_time = time.monotonic()
    result = {gain.name: predict(gain) for gain in GAINS}
    if options.json:
        published = {gain.name: {"published": gain.published} for gain in GAINS}
        print(json.dumps({name: results | published[name] for name, results in result.items()}))
        return
    for gain in GAINS:
        print(f"{gain.name} ({gain.recipe} on {gain.cluster})")
        for variant, observed in result[gain.name].items():
            print(
                f"  {variant:10} {observed['gain']:+6.1%}"
                f"   {observed['plain']:7.0f} to {observed['better']:.0f} tokens/s and device"
            )
        for source, fraction in gain.published.items():
            print(f"  published  {fraction:+6.1%}   {source}")
    seconds = time.monotonic() - start_time
    print(f"torch {torch.__version__}, Python {platform.python_version()}, {seconds:.0f} s")


if __name__ == "__main__":
    main()
