"""Stages of ``python -m benchmarks.gpu_check``: short runs of ``weft train``, as data.

The stages are in order of importance, since the time may end before the last one.  Runs of the
same number of ranks have the same model, so that their speeds can be compared (`EFFECTS`).

Keys are words ``key=value``, of which the last one for a key counts; ``{ranks}`` is the number of
ranks, and ``{batch}`` twice that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.gpu_check_results import (
    Row,
    read_checkpoints,
    read_loss,
    read_resume,
    read_speed,
)
from weft.cluster.node_facts import Directory
from weft.data.stories import stories


def trial_texts() -> Iterator[str]:
    """Yield the demo's stories.

    weft refuses them by their name for large models, but speeds do not depend on the text.
    """
    return stories()


# Of every run.  One node, also inside of a job of several; no restart, which would hide a crash.
COMMON = (
    f"data.path={trial_texts.__module__}:{trial_texts.__name__} "
    "run.nodes=1 run.nproc_per_node={ranks} train.steps=100 train.microbatch_size=1 "
    "train.global_batch_size={batch} train.eval_interval=0 train.eval_sequences=1 "
    "checkpoint.interval=0 resilience.max_restarts_per_hour=0 monitor.log_interval=1 "
    "monitor.trackers= monitor.eval_prompts= monitor.report=false"
)

# Models by size.  A run on GPUs takes the first one that fits into memory, with a margin.
_8B = "model.preset=8b data.vocab_size=128256 train.seq_len=8192"
SIZES = (
    f"{_8B} activation_checkpoint.mode=selective",
    f"{_8B} model.num_layers=16",
    f"{_8B} model.num_layers=6",
    "model.preset=1b data.vocab_size=128256 train.seq_len=8192",
    "model.preset=1b data.vocab_size=128256 train.seq_len=4096",
    "model.preset=350m data.vocab_size=50304 train.seq_len=1024",
)
MEMORY_MARGIN = 0.1  # fraction of the memory that the prediction has to leave free
CHECKPOINT_SIZES = SIZES[-1:]  # a checkpoint has 4 GiB
LOSS_SIZES = (  # its loss falls within 300 steps
    "model.num_layers=8 model.dim=1024 model.num_heads=16 model.num_kv_heads=4 model.ffn_dim=3584 "
    "train.seq_len=1024 train.global_batch_size=16 train.microbatch_size=auto train.steps=300 "
    "optim.lr=6e-4",
)
CPU_SIZES = ("model.preset=toy train.seq_len=256",)  # shows that stages run, not how fast

SPEED = "profile.steps=11"
COMPILE = f"{SPEED} compile.enable=true"
FLOAT8 = "precision.float8=tensorwise"
FSDP = f"{COMPILE} parallel.dp_shard={{ranks}}"
TENSOR = f"{COMPILE} parallel.tp={{ranks}} train.global_batch_size=2"
# An asynchronous save has time to end before the next one.
SAVE = "train.steps=90 checkpoint.interval=30 checkpoint.keep_latest=1 parallel.dp_shard={ranks}"


@dataclass(frozen=True)
class Stage:
    """A run of ``weft train``, and how to read its results.

    Attributes:
        keys: overrides of keys, after `COMMON` and the size.
        sizes: models to choose from, on GPUs.
        ranks: number of ranks: ``one``, ``all`` devices, or the largest ``power`` of two.
        min_devices: devices that the stage needs.
        needs_gpu: True: a CPU cannot show anything.
        num_records: records after which the run is killed, without its final checkpoint; 0: the run
            ends after its last step.
        run_name: name of the run directory, which stays for a later stage of the same name.
        limit: seconds until the run is killed.
        read: returns the results from the run directory, the plan and the measured disk; a stage
            without a value in the first row has failed.
    """

    name: str
    keys: str
    sizes: tuple[str, ...] = SIZES
    ranks: str = "one"
    min_devices: int = 1
    needs_gpu: bool = False
    num_records: int = 12
    run_name: str = ""
    limit: float = 180.0
    read: Callable[[Path, Mapping[str, Any], Directory], list[Row]] = read_speed


_gpu = partial(Stage, needs_gpu=True)
_fsdp = partial(Stage, ranks="all", min_devices=2)
_tensor = partial(Stage, ranks="power", min_devices=2)
_save = partial(Stage, sizes=CHECKPOINT_SIZES, ranks="all", num_records=0, read=read_checkpoints)
_loss = partial(_gpu, sizes=LOSS_SIZES, num_records=300, read=read_loss)

STAGES = (
    Stage("eager", SPEED),
    Stage("compile", COMPILE),
    _gpu("compile, float8", f"{COMPILE} {FLOAT8}"),
    _fsdp("FSDP", FSDP),
    _fsdp("FSDP, float8", f"{FSDP} {FLOAT8}", needs_gpu=True),
    _tensor("tensor parallel", TENSOR),
    _tensor("tensor parallel, async", f"{TENSOR} parallel.async_tp=true", needs_gpu=True),
    _save("save, synchronous", f"{SAVE} checkpoint.async_save=false"),
    _save("save, asynchronous", SAVE, run_name="saved"),
    _save("resume", f"{SAVE} train.steps=92", run_name="saved", read=read_resume),
    _gpu("float8", f"{SPEED} {FLOAT8}"),
    _gpu("compile, float8 rowwise", f"{COMPILE} precision.float8=rowwise"),
    Stage("compile, full recomputation", f"{COMPILE} activation_checkpoint.mode=full"),
    _fsdp("FSDP, no resharding", f"{FSDP} parallel.reshard_after_forward=never"),
    _loss("loss, bfloat16", ""),
    _loss("loss, float8", f"{FLOAT8} precision.float8_small=true"),
)

# A stage, and the stage that lacks its technique; the page compares their first rows.
EFFECTS = (
    ("compile", "eager"),
    ("float8", "eager"),
    ("compile, float8", "compile"),
    ("compile, float8 rowwise", "compile"),
    ("compile, full recomputation", "compile"),
    ("FSDP", "compile"),
    ("FSDP, float8", "FSDP"),
    ("FSDP, no resharding", "FSDP"),
    ("tensor parallel, async", "tensor parallel"),
    ("save, asynchronous", "save, synchronous"),
    ("loss, float8", "loss, bfloat16"),
)


def resolve_keys(stage: Stage, size: str, ranks: int) -> dict[str, str]:
    """Return all overrides of a stage's run, except those of its directories."""
    text = f"{COMMON} {size} {stage.keys}"
    return parse_keys(text.format(ranks=ranks, batch=2 * ranks))


def parse_keys(text: str) -> dict[str, str]:
    """Return keys and values of words ``key=value``; the last one for a key counts."""
    return {key: value for key, _, value in (word.partition("=") for word in text.split())}


def count_ranks(stage: Stage, devices: int) -> int:
    """Return the number of ranks of a stage on a machine with ``devices`` devices."""
    return {"one": 1, "all": devices, "power": 1 << (devices.bit_length() - 1)}[stage.ranks]
