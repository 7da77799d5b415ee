"""Stages of ``python -m benchmarks.gpu_check``, and what the stages of all checks have in common.

A stage is a short run of ``weft train`` (`Stage`) or another Python program (`Program`), as data.
The stages are in order of importance, since the time may end before the last one.  Runs of the
same number of ranks have the same model, so that their speeds can be compared (`EFFECTS`).

Keys are words ``key=value``, of which the last one for a key counts; ``{ranks}`` is the number of
ranks, ``{half}`` half of it, and ``{batch}`` twice that number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.gpu_check_results import (
    Row,
    read_checkpoints,
    read_loss,
    read_resume,
    read_speed,
    read_test_counts,
)
from weft.data.stories import stories
from weft.doctor.node_facts import Directory


def trial_texts() -> Iterator[str]:
    """Yield the demo's stories.

    weft refuses them by their name for large models, but speeds do not depend on the text.
    """
    return stories()


# Of every run.  One node, also inside of a job of several; no restart, which would hide a crash.
COMMON = (
    f"data.path={trial_texts.__module__}:{trial_texts.__name__} "
    "run.cluster=local run.nodes=1 run.nproc_per_node={ranks} train.steps=100 "
    "train.microbatch_size=1 train.global_batch_size={batch} train.eval_interval=0 "
    "train.eval_sequences=1 "
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
EXPERT_LOSS_SIZES = (
    f"model.kind=moe model.preset=toy-moe {LOSS_SIZES[0]} model.num_layers=4 model.ffn_dim=2048 "
    "model.expert_dim=512 model.head_dim=64 model.balance_rate=0.01",
)
# A CPU shows that stages run, not how fast.  Float8 is emulated there.
CPU_SIZES = ("model.preset=toy train.seq_len=256 precision.float8_small=true",)
CPU_LOSS_SIZES = (
    "model.num_layers=4 model.dim=128 model.num_heads=4 model.num_kv_heads=2 model.ffn_dim=384 "
    "data.vocab_size=1024 train.seq_len=128 train.global_batch_size=4 train.microbatch_size=4 "
    "train.steps=300 optim.lr=2e-3 precision.compute_dtype=bfloat16",
)
CPU_EXPERT_LOSS_SIZES = (
    f"model.kind=moe model.preset=toy-moe {CPU_LOSS_SIZES[0]} model.balance_rate=0.01",
)

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
        recipe: the run's recipe.
        sizes: models to choose from, on GPUs.
        cpu_sizes: the same on a CPU.
        ranks: number of ranks: ``one``, ``two``, ``all`` devices, or the largest ``power`` of two.
        min_devices: devices that the stage needs.
        needs_gpu: True: a CPU cannot show anything.
        num_records: records after which the run is killed, without its final checkpoint; 0: the run
            ends after its last step.
        run_name: name of the run directory, which stays for a later stage of the same name.
        seconds: time that the stage should need; it is killed after `KILL_FACTOR` times that.
        read: returns the results from the run directory, the plan and the measured disk; a stage
            without a value in the first row has failed.
        exit_status: of the run.
        reference: an earlier stage with the same steps; "": none.
        tolerance: largest relative difference of the loss from that of the reference.
        window: number of steps whose mean loss is compared.
    """

    name: str
    keys: str
    recipe: str = "demo"
    sizes: tuple[str, ...] = SIZES
    cpu_sizes: tuple[str, ...] = CPU_SIZES
    ranks: str = "one"
    min_devices: int = 1
    needs_gpu: bool = False
    num_records: int = 12
    run_name: str = ""
    seconds: float = 90.0
    read: Callable[[Path, Mapping[str, Any], Directory], list[Row]] = read_speed
    exit_status: int = 0
    reference: str = ""
    tolerance: float = 0.0
    window: int = 1


@dataclass(frozen=True)
class Program:
    """A Python program that prints its results.

    Attributes:
        words: what follows ``python``, with ``{ranks}``; it runs in the clone.
        read: returns the results from its output, as `Stage.read`.
        cpu_words: the words on a CPU; "": it needs a GPU.
        size: keys of the weft run with the same model, which `EFFECTS` may compare with it.
        packages: what the program imports; without one of them the stage is skipped.
        install: how to install them.
    """

    name: str
    words: str
    read: Callable[[str], list[Row]]
    cpu_words: str = ""
    size: str = ""
    packages: tuple[str, ...] = ()
    install: str = ""
    ranks: str = "one"
    min_devices: int = 1
    seconds: float = 90.0


@dataclass(frozen=True)
class Schedule:
    """The stages of a check, and its time.

    Attributes:
        name: of the script and of its page.
        stages: in order of importance.
        effects: pairs of stages; the page compares the first row of each with the one that lacks
            its technique.
        seconds: time limit.
    """

    name: str
    stages: tuple[Stage | Program, ...]
    effects: tuple[tuple[str, str], ...]
    seconds: float


def read_tests(output: str) -> list[Row]:
    """Return the number of passed tests, of all that ran, from the output of pytest."""
    counts = read_test_counts(output)
    total = sum(counts.values()) - counts.get("skipped", 0)
    return [Row("tests passed", counts.get("passed", 0), total)] if total else []


# In four processes, since most of the time is compilation.  On a CPU, tests of kernels are skipped.
PYTEST = "-m pytest -v -rfE -p no:cacheprovider --numprocesses 4 tests/gpu"
GPU_TESTS = Program(
    "GPU tests",
    PYTEST,
    read_tests,
    cpu_words=PYTEST,
    packages=("pytest", "xdist"),
    install="pip install pytest pytest-timeout pytest-xdist",
    seconds=150.0,
)

_gpu = partial(Stage, needs_gpu=True)
_fsdp = partial(Stage, ranks="all", min_devices=2)
_tensor = partial(Stage, ranks="power", min_devices=2)
_save = partial(Stage, sizes=CHECKPOINT_SIZES, ranks="all", num_records=0, read=read_checkpoints)
# Of the mean loss of 50 steps, relative: how much bfloat16 runs of other seeds differ, measured by
# benchmarks/float8_losses.py.
LOSS_TOLERANCE = 0.08


def loss_stage(precision: str, experts: bool = False, **changes: Any) -> Stage:
    """Return a stage of 300 compiled steps, compared with those in bfloat16."""
    kind = "loss, experts, " if experts else "loss, "
    keys = f"compile.enable=true precision.float8={precision} precision.float8_small=true"
    fields: dict[str, Any] = {
        "sizes": EXPERT_LOSS_SIZES if experts else LOSS_SIZES,
        "cpu_sizes": CPU_EXPERT_LOSS_SIZES if experts else CPU_LOSS_SIZES,
        "num_records": 300,
        "read": read_loss,
    }
    if precision == "none":
        return Stage(f"{kind}bfloat16", "compile.enable=true", **fields | changes)
    fields |= {"reference": f"{kind}bfloat16", "tolerance": LOSS_TOLERANCE, "window": 50}
    return Stage(f"{kind}{precision}", keys, **fields | changes)


LOSSES = (
    loss_stage("none"),
    loss_stage("rowwise"),
    loss_stage("tensorwise"),
    loss_stage("mxfp8"),
    loss_stage("none", experts=True),
    loss_stage("tensorwise", experts=True),
)

STAGES: tuple[Stage | Program, ...] = (
    GPU_TESTS,
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
    *(replace(stage, needs_gpu=True) for stage in LOSSES),
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
)
GPU_CHECK = Schedule("gpu-check", STAGES, EFFECTS, 20 * 60.0)


def resolve_keys(stage: Stage, size: str, ranks: int) -> dict[str, str]:
    """Return all overrides of a stage's run, except those of its directories."""
    text = f"{COMMON} {size} {stage.keys}"
    return parse_keys(text.format(ranks=ranks, half=max(ranks // 2, 1), batch=2 * ranks))


def parse_keys(text: str) -> dict[str, str]:
    """Return keys and values of words ``key=value``; the last one for a key counts."""
    return {key: value for key, _, value in (word.partition("=") for word in text.split())}


def count_ranks(stage: Stage | Program, devices: int) -> int:
    """Return the number of ranks of a stage on a machine with ``devices`` devices."""
    power = 1 << (devices.bit_length() - 1)
    return {"one": 1, "two": 2, "all": devices, "power": power}[stage.ranks]
