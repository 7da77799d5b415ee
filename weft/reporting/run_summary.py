"""Print the plan and data of a run before it starts, and its results at the end."""

from __future__ import annotations

import platform
import shlex
from math import nan
from pathlib import Path

import numpy as np
import torch
from rich.console import Console

from weft.checkpoint.best import find_best, get_best_metric
from weft.checkpoint.manifest import checkpoint_step, list_checkpoints
from weft.config.accelerators import GPU
from weft.config.axes import AXES, DEGREES
from weft.config.formatting import display_path, format_count
from weft.config.reader import recipe_names
from weft.data.dataset import Dataset
from weft.data.inspect import describe_packing
from weft.data.loader import build_mixture
from weft.data.source import STDLIB, STORIES
from weft.data.tokenizer import has_excess_padding
from weft.monitor.anomaly import divergence_of
from weft.monitor.device_memory import RunPrediction
from weft.monitor.jsonl import read_tail
from weft.monitor.step_timer import goodput
from weft.monitor.terminal import format_duration
from weft.planning.plan import Plan
from weft.planning.plan_text import describe_float8, format_stages, run_title
from weft.records.run_reader import RunReader
from weft.training.early_stopping import read_early_stop
from weft.training.machine import explain_unused_gpus
from weft.training.run_dir import count_epochs, epoch_warnings
from weft.training.state import checkpoint_dir
from weft.version import __version__, untested_versions


def print_plan(
    plan: Plan, recipe: str, console: Console, prediction: RunPrediction | None, warning: str
) -> None:
    """Print the plan of a run: a summary line, its pipeline stages, and warnings."""
    device = {"cpu": "CPU", GPU: "GPU"}.get(plan.device, plan.device)
    counts = plan.node_counts
    layout = [
        f"{axis} {size}"
        for axis in dict.fromkeys((*AXES, *DEGREES))
        if (size := getattr(plan, axis)) > 1
    ]
    has_frozen = plan.num_trainable_params < plan.num_params
    console.print(
        f"weft {__version__}  {run_title(plan, recipe)}: "
        f"{format_count(plan.num_params)} parameters, "
        f"{f'{format_count(plan.num_trainable_params)} of them trained, ' if has_frozen else ''}"
        f"{plan.world_size} {device} rank{'s' * (plan.world_size > 1)}"
        f"{f' on {counts[0]} to {counts[-1]} nodes' if len(counts) > 1 else ''}"
        f"{' (' + ', '.join(layout) + ')' if layout else ''}, "
        f"{plan.tokens_per_step:,} tokens per step, {plan.compute_dtype}"
        f"{f' and float8 ({describe_float8(plan)})' if plan.float8 != 'none' else ''}"
    )
    if plan.peak_flops is not None:
        peak = f"{plan.peak_flops / 1e12:,.0f} TFLOP/s, the device's dense {plan.peak_dtype} peak"
        console.print(f"MFU is relative to {peak}")
    if plan.pipeline is not None:
        console.print("\n".join(format_stages(plan)))
    if prediction is not None:
        console.print(f"predicted: {prediction}")
    untested = untested_versions(torch.__version__, platform.python_version())
    versions = (f"{fact}; {remedy}" for fact, remedy in untested)
    unused = explain_unused_gpus() if plan.job.run.device == "auto" else ""
    for text in filter(None, (*plan.warnings, warning, *versions, unused)):
        console.print(f"warning: {text}")


def print_dataset(plan: Plan, dataset: Dataset, console: Console) -> None:
    """Print the data sources with their epochs and packing, and warnings."""
    job = plan.job
    entries = dataset.vocab_size
    # A tokenizer that weft trains has fewer entries than it may have if the text has few words.
    if not job.data.trains_tokenizer and has_excess_padding(entries, plan.model.vocab_size):
        fraction = f"{entries:,} of the model's {plan.model.vocab_size:,} vocabulary entries"
        rest = "the other entries are never trained"
        console.print(f"warning: the tokenizer uses {fraction}; {rest}")
    scores = plan.has_score_head
    samples = build_mixture(dataset, "train", plan.seq_len, job.data, plan.seed, scores)
    usage = count_epochs(plan, dataset, samples)
    for store in dataset.stores:
        for note in store.manifest.notes:
            console.print(f"warning: {Path(store.manifest.source).name}: {note}")
    for note in dataset.notes:
        console.print(f"warning: {note}")
    for source, (name, count, epochs) in zip(dataset.sources, usage, strict=True):
        manifest = source.store.manifest
        line = f"{name}: {manifest.train.tokens:,} tokens, {count:,} sequences of "
        line += f"{plan.seq_len:,}, {epochs:,.1f} epochs in {plan.num_steps:,} steps"
        share = f"  {source.share:6.1%}  " if dataset.shares else ""
        console.print(f"{share}{line}")
        if manifest.kind != "text" or job.data.packing == "best_fit":
            line = describe_packing(source.store, plan.seq_len, job.data, plan.seed, scores)
            console.print(f"{Path(manifest.source).name}: {line}")
    if not job.data.has_validation or not dataset.has_validation:
        reason = (
            "the prepared data have none"
            if job.data.has_validation
            else "data.validation_fraction=0"
        )
        console.print(f"no validation set ({reason}): nothing is evaluated")
    elif dataset.validation is not None:
        validation = build_mixture(dataset, "validation", plan.seq_len, job.data, plan.seed, scores)
        manifest = dataset.validation.store.manifest
        line = f"{manifest.train.tokens:,} tokens, {len(validation.sources[0]):,} sequences"
        console.print(f"validation set {Path(manifest.source).name}: {line}")
    for warning in epoch_warnings(plan, dataset, samples):
        console.print(f"warning: {warning}")


def print_results(plan: Plan, recipe: str, dataset: Dataset, console: Console) -> None:
    """Print losses, speed and memory of a finished run, and the next commands."""
    job, run_dir = plan.job, plan.run_path
    run = RunReader(run_dir)
    if not len(run):
        return  # the records have been removed
    # A skipped step has no loss.
    losses = run.column("loss")[np.isfinite(run.column("loss"))]
    newest = losses[-20:] if len(losses) else np.array([nan])
    is_next_token = plan.objective == "next_token"
    num_steps = int(run.last("step") or 0)
    home = checkpoint_dir(job.checkpoint, run_dir)
    if not read_early_stop(home, job):
        num_steps = max(plan.num_steps, num_steps)  # complete before this start
    unit = "in nats per token" if is_next_token else f"of {plan.objective}"
    lines = [
        f"\ntrained {num_steps} steps, {run.last('tokens') or 0:,.0f} tokens, in "
        f"{format_duration(float(np.ptp(run.column('time'))))}; losses {unit}:",
        f"  train      {newest.mean():.3f}   mean of the last {len(newest)} records",
    ]
    if (step := run.last("step") or 0) < num_steps:
        lines.insert(1, f"metrics.jsonl ends at step {step:.0f}, so these numbers end there:")
    if (eval_loss := run.last("eval_loss")) is not None:
        lines.append(f"  validation {eval_loss:.3f}   on the validation set")
    if job.checkpoint.best != "off":
        metric = get_best_metric(job.checkpoint)
        if (best := find_best(list_checkpoints(home), metric)) is not None:
            note = f"best {metric.name}, of step {checkpoint_step(best[0])} (--step best)"
            lines.append(f"  best       {best[1]:.3f}   {note}")
    if is_next_token:
        note = "baseline: loss of predicting tokens by their frequency"
        lines.append(f"  unigram    {dataset.unigram_entropy_nats:.3f}   {note}")
    last = read_tail(run_dir / "metrics.jsonl").last
    if diverged := divergence_of(last, plan.objective, plan.model.vocab_size):
        lines.append(str(diverged))
    if run.last("time_breakdown.restarting"):  # the run was started more than once
        kinds = run.time_breakdown()
        longest = ", ".join(f"{kind} {format_duration(s)}" for kind, s in kinds.items() if s >= 1)
        lines.append(f"goodput {goodput(kinds):.1%} over all starts: {longest}")
    if (memory := run.last("predicted_memory_gib")) is not None:
        median = float(np.nanmedian(run.column("step_seconds")[int(len(run) > 1) :]))
        line = f"memory {run.last('memory_peak_gib') or nan:.1f} GiB"
        line += f" (predicted {memory:.1f}), {median:.3g} s per step"
        if (seconds := run.last("predicted_step_seconds")) is not None:
            line += f" (predicted {seconds:.3g})"
        lines.append(line)
    run_argument = shlex.quote(display_path(run_dir))
    lines.append(f"run directory: {display_path(run_dir)}")
    next_command = "evaluate" if plan.has_score_head else "chat"
    lines.append(f"next:  weft {next_command} {run_argument}")
    own_text = " --data.path FILE_OR_DIRECTORY"
    if job.data.path in (STORIES, STDLIB) and not job.data.is_mixture:
        name = recipe if recipe in recipe_names() else "demo"
        lines.append(f"       weft train {name}{own_text}   # your own text")
    elif is_next_token:
        has_validation = dataset.has_validation and job.data.has_validation
        lines.append(f"       weft evaluate {run_argument}{'' if has_validation else own_text}")
    lines.append(f"       weft report {run_argument} --serve                     # in a browser")
    console.print("\n".join(lines))
