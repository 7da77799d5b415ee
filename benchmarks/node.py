"""Measure one node of eight GPUs in at most an hour, and write one page.

    python -m benchmarks.node [--run.dir DIRECTORY] [--run.device cpu]     in a clone

First the communicator is split, which every run on several GPUs needs.  Then each parallel axis
trains 20 steps, whose losses must equal those of data parallelism; a killed rank and a stopped rank
follow, and weft's speed beside TorchTitan's.  Each stage has a budget in seconds; a stage may also
use what earlier ones have left.  docs/gpu-check.md explains stages and page.
"""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from functools import partial

from benchmarks.gpu_check import main
from benchmarks.gpu_check_results import (
    Row,
    read_checkpoints,
    read_first_losses,
    read_hang,
    read_resume,
)
from benchmarks.gpu_check_stages import (
    CHECKPOINT_SIZES,
    COMPILE,
    FLOAT8,
    GPU_TESTS,
    SAVE,
    Program,
    Schedule,
    Stage,
)
from benchmarks.h200 import CPU_LAYERS, TITAN_FLOAT8, torchtitan
from weft.config.exit_statuses import HUNG

MINUTES = 60
MACHINE_SECONDS = 90.0  # the checks of weft doctor, which are no stage
TOLERANCE = 1e-2  # of a loss in bfloat16
STEPS = "train.steps=20 monitor.log_interval=1"
LAYERS = ("model.preset=8b data.vocab_size=128256 train.seq_len=8192 model.num_layers=8",)
CPU_AXIS = f"{CPU_LAYERS} model.num_layers=4"
EXPERTS = (
    "model.kind=moe model.preset=qwen3-30b-a3b model.num_layers=8 data.vocab_size=151936 "
    "train.seq_len=4096",
)
CPU_EXPERTS = (
    f"model.kind=moe model.preset=toy-moe {CPU_AXIS} model.dense_layers=0 model.expert_dim=64",
)
FULL = ("model.preset=8b data.vocab_size=128256 train.seq_len=8192",)
KILL = 'resilience.faults=[{{kind="kill",rank=1,passing=15}}]'
STOP = 'resilience.faults=[{{kind="stop",rank=1,passing=15}}]'


def read_splits(output: str) -> list[Row]:
    """Return what benchmarks/group_split.py printed."""
    found = re.search(r"(\d{1,9}) splits, the slowest in ([\d.]+) ms", output)
    return [Row("slowest split, ms", float(found[2]) if found else None)]


def split(name: str, ranks: str) -> Program:
    """Return the splits of the communicator of this number of ranks."""
    words = "benchmarks/group_split.py --ranks {ranks}"
    cpu_words = f"{words} --device cpu"
    return Program(name, words, read_splits, cpu_words, ranks=ranks, min_devices=2, seconds=60.0)


_run = partial(
    Stage,
    sizes=LAYERS,
    cpu_sizes=(CPU_AXIS,),
    ranks="all",
    min_devices=2,
    num_records=20,
    seconds=75.0,
    read=read_first_losses,
)
_axis = partial(_run, reference="data parallel", tolerance=TOLERANCE)
_experts = partial(_axis, sizes=EXPERTS, cpu_sizes=CPU_EXPERTS, reference="experts, data parallel")
_recipe = partial(
    Stage,
    recipe="llama3-8b-8gpu",
    sizes=FULL,
    cpu_sizes=(CPU_LAYERS,),
    ranks="all",
    min_devices=2,
    seconds=150.0,
)
_titan = partial(torchtitan, layers=32, size=FULL[0], ranks="all", min_devices=2, seconds=150.0)
PIPELINE = f"{STEPS} parallel.pp=2 parallel.dp_shard={{half}}"
RING = f"{STEPS} parallel.cp={{ranks}}"
EP = f"{STEPS} parallel.ep={{ranks}}"
TITAN_WORDS = (
    "--training.local_batch_size 2 --training.steps 12 --activation_checkpoint.mode selective"
)
GATHER = (
    "--quantize.linear.float8.enable_fsdp_float8_all_gather "
    "--quantize.linear.float8.precompute_float8_dynamic_scale_for_fsdp"
)
SELECTIVE = "activation_checkpoint.mode=selective"
BATCH = "train.microbatch_size=2 train.global_batch_size={batch}"

STAGES = (
    split("communicator split, 2 ranks", "two"),
    split("communicator split, all ranks", "all"),
    _run("two ranks", f"{STEPS} parallel.dp_shard={{ranks}}", ranks="two"),
    _run("data parallel", f"{STEPS} parallel.dp_shard={{ranks}}"),
    _axis("tensor parallel", f"{STEPS} parallel.tp={{ranks}}"),
    _axis("context parallel, ring", RING),
    _run("experts, data parallel", STEPS, sizes=EXPERTS, cpu_sizes=CPU_EXPERTS),
    _experts("experts, alltoall", EP),
    _axis("pipeline, 1F1B", f"{PIPELINE} pipeline.schedule=1F1B"),
    _axis("HSDP", f"{STEPS} parallel.dp_replicate=2 parallel.dp_shard={{half}}"),
    _recipe("tensorwise", f"{COMPILE} {BATCH} {SELECTIVE} {FLOAT8}"),
    _titan("TorchTitan, tensorwise", words=f"{TITAN_WORDS} {TITAN_FLOAT8} {GATHER}"),
    _recipe(
        "tensorwise, no recomputation",
        f"{COMPILE} {BATCH} activation_checkpoint.mode=none {FLOAT8}",
    ),
    _recipe("bfloat16", f"{COMPILE} {BATCH} {SELECTIVE} precision.float8=none"),
    _titan("TorchTitan, bfloat16", words=TITAN_WORDS),
    _axis(
        "kill and resume",
        f"{STEPS} checkpoint.interval=10 resilience.max_restarts_per_hour=1 {KILL}",
        num_records=0,
        read=read_resume,
        seconds=180.0,
    ),
    _run(
        "stopped rank",
        f"{STEPS} resilience.step_timeout=30 {STOP}",
        num_records=0,
        read=read_hang,
        exit_status=HUNG,
        seconds=150.0,
    ),
    _axis("tensor parallel, compiled", f"{STEPS} compile.enable=true parallel.tp={{ranks}}"),
    _axis(
        "tensor parallel, async",
        f"{STEPS} compile.enable=true parallel.tp={{ranks}} parallel.async_tp=true",
        needs_gpu=True,
    ),
    Stage(
        "save, asynchronous",
        SAVE,
        sizes=CHECKPOINT_SIZES,
        ranks="all",
        min_devices=2,
        num_records=0,
        run_name="saved",
        read=read_checkpoints,
    ),
    _axis("context parallel, allgather", f"{RING} parallel.cp_method=allgather"),
    _axis("context parallel, ulysses", f"{RING} parallel.cp_method=ulysses"),
    _experts("experts, padded", f"{EP} parallel.ep_dispatch=padded"),
    _experts("experts, 2 chunks", f"{EP} parallel.ep_chunks=2"),
    _axis(
        "pipeline, interleaved",
        f"{PIPELINE} pipeline.schedule=Interleaved1F1B pipeline.stages_per_rank=2",
    ),
    replace(GPU_TESTS, seconds=150.0),
    _recipe("rowwise", f"{COMPILE} {BATCH} {SELECTIVE} precision.float8=rowwise"),
)
EFFECTS = (
    ("tensorwise", "bfloat16"),
    ("rowwise", "bfloat16"),
    ("tensorwise, no recomputation", "tensorwise"),
    ("tensorwise", "TorchTitan, tensorwise"),
    ("bfloat16", "TorchTitan, bfloat16"),
)
NODE = Schedule("node", STAGES, EFFECTS, 60.0 * MINUTES)

if __name__ == "__main__":
    sys.exit(main(NODE, __doc__ or ""))
