"""Measure one GPU in at most ten minutes, and write one page.

    python -m benchmarks.h200 [--run.dir DIRECTORY] [--run.device cpu]     in a clone

The stages are those of the GPU check whose results matter most for one GPU, and TorchTitan's Llama
of the same size in the same minutes.  Each stage has a budget in seconds; a stage may also use what
earlier ones have left.  docs/gpu-check.md explains stages and page.
"""

from __future__ import annotations

import re
import sys
from functools import partial
from statistics import median

from benchmarks.gpu_check import main
from benchmarks.gpu_check_results import Row
from benchmarks.gpu_check_stages import (
    COMPILE,
    CPU_LOSS_SIZES,
    FLOAT8,
    GPU_TESTS,
    LOSS_SIZES,
    Program,
    Schedule,
    Stage,
    loss_stage,
    replace,
)

MINUTES = 10
MACHINE_SECONDS = 30.0  # the checks of weft doctor, which are no stage
CPU_LAYERS = "model.num_layers=1 model.dim=64 model.num_heads=4 model.num_kv_heads=2 "
CPU_LAYERS += "model.ffn_dim=128 train.seq_len=64 data.vocab_size=512 precision.float8_small=true"
LAYERS = ("model.preset=8b data.vocab_size=128256 train.seq_len=8192 model.num_layers=4",)
EXPERTS = (
    "model.kind=moe model.preset=qwen3-30b-a3b model.num_layers=4 data.vocab_size=151936 "
    "train.seq_len=4096",
)
CPU_EXPERTS = (
    f"model.kind=moe model.preset=toy-moe {CPU_LAYERS} model.dense_layers=0 model.expert_dim=64",
)
LOSS = (f"{LOSS_SIZES[0]} model.num_layers=4",)
SHORT_LOSS = (f"{CPU_LOSS_SIZES[0]} model.num_layers=1 train.seq_len=64 train.steps=50",)

INSTALL = "pip install --no-deps torchtitan==0.2.2 torchdata tyro docstring-parser typeguard"
TITAN_PACKAGES = ("torchtitan", "torchdata", "tyro", "docstring_parser", "typeguard")
TITAN_CPU = (
    "benchmarks/torchtitan_run.py --ranks {ranks} --layers 0 --device cpu "
    "--training.seq_len 64 --training.local_batch_size 1 --training.steps 4 "
    "--activation_checkpoint.mode none"
)
# As weft: all but the output layer.
TITAN_FLOAT8 = (
    "--model.converters quantize.linear.float8 --quantize.linear.float8.filter_fqns output"
)
EMULATE = "--quantize.linear.float8.emulate"


def read_torchtitan(output: str) -> list[Row]:
    """Return TorchTitan's speed and memory: medians of the steps after the first two."""
    text = re.sub(r"\x1b\[[\d;]*m", "", output)
    pattern = r"step: +(\d+) .*?memory: +(-?[\d.]+)GiB.*?tps: ([\d,]+)"
    steps = [
        (float(tokens.replace(",", "")), float(memory))
        for step, memory, tokens in re.findall(pattern, text)
        if int(step) > 2
    ]
    if not steps:
        return [Row("tokens/s per device", None)]
    memory = max(memory for _, memory in steps)
    return [
        Row("tokens/s per device", median(tokens for tokens, _ in steps)),
        Row("memory, GiB", memory if memory > 0 else None),  # a CPU has none
    ]


def torchtitan(name: str, layers: int, words: str, **changes: object) -> Program:
    """Return a run of TorchTitan's Llama 3.1 8B, compiled, with this number of layers."""
    command = (
        f"benchmarks/torchtitan_run.py --ranks {{ranks}} --layers {layers} "
        f"--training.seq_len 8192 --compile.enable {words}"
    )
    program = Program(
        name,
        command,
        read_torchtitan,
        cpu_words=f"{TITAN_CPU} {TITAN_FLOAT8} {EMULATE}" if TITAN_FLOAT8 in words else TITAN_CPU,
        packages=TITAN_PACKAGES,
        install=INSTALL,
    )
    return replace(program, **changes)  # type: ignore[arg-type]


_speed = partial(Stage, sizes=LAYERS, cpu_sizes=(CPU_LAYERS,), seconds=40.0)
_experts = partial(_speed, sizes=EXPERTS, cpu_sizes=CPU_EXPERTS)
_loss = partial(loss_stage, sizes=LOSS, cpu_sizes=SHORT_LOSS, seconds=45.0)
_titan = partial(torchtitan, layers=4, size=LAYERS[0], seconds=40.0)
TITAN_WORDS = (
    "--training.local_batch_size 1 --training.global_batch_size 2 --training.steps 12 "
    "--activation_checkpoint.mode none"
)

STAGES = (
    replace(GPU_TESTS, seconds=110.0),
    _speed("bfloat16", COMPILE, seconds=45.0),
    _loss("none"),
    _loss("rowwise"),
    _speed("tensorwise", f"{COMPILE} {FLOAT8}"),
    _titan("TorchTitan, bfloat16", words=TITAN_WORDS),
    _loss("tensorwise"),
    _speed("rowwise", f"{COMPILE} precision.float8=rowwise"),
    _speed("documents", f"{COMPILE} data.packing=documents"),
    _experts("experts", COMPILE, seconds=45.0),
    _titan("TorchTitan, tensorwise", words=f"{TITAN_WORDS} {TITAN_FLOAT8}"),
    _experts(
        "experts, tensorwise", f"{COMPILE} {FLOAT8} precision.float8_small=true", seconds=35.0
    ),
)
EFFECTS = (
    ("tensorwise", "bfloat16"),
    ("rowwise", "bfloat16"),
    ("documents", "bfloat16"),
    ("bfloat16", "TorchTitan, bfloat16"),
    ("tensorwise", "TorchTitan, tensorwise"),
    ("experts, tensorwise", "experts"),
)
H200 = Schedule("h200", STAGES, EFFECTS, 60.0 * MINUTES)

if __name__ == "__main__":
    sys.exit(main(H200, __doc__ or ""))
