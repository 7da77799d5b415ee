"""Evaluate a trained model: its loss on text, or multiple-choice tasks.

Without --task, weft computes the loss on the validation set of the run, or on all of the data of
--data.path.  --train.eval_sequences N uses N sequences, evenly spread.

  weft evaluate runs/demo
  weft evaluate runs/mine --data.path book.txt --parallel.dp_shard 2 --json
  weft evaluate runs/mine --task questions.yaml --fewshot 5 --parallel.tp 2

The layout is that of this command: one process, unless degrees are given.  Tasks take parallel.tp
and parallel.dp_shard; the loss takes any degree.
"""

from __future__ import annotations

import argparse
import json
import sys

from weft.cli.command_parser import Commands, add_command
from weft.cli.option_values import add_step, count, local_path, positive, run_path
from weft.config.errors import ConfigError, InvalidConfig
from weft.config.run_paths import absolute_dir

# Keys that decide which tokens are in the validation set.
SPLIT_KEYS = (
    "data.text_field",
    "data.format",
    "data.tokenizer",
    "data.vocab_size",
    "data.validation_fraction",
    "data.invalid_utf8",
)


def add_evaluate(commands: Commands) -> None:
    """Add ``weft evaluate``."""
    add = add_command(commands, "evaluate", run_evaluate, __doc__).add_argument
    add("checkpoint", type=run_path, help="run directory, or directory of a checkpoint")
    add_step(add)
    text = "multiple-choice task, a YAML file of the LM Evaluation Harness; repeatable"
    add("--task", action="append", default=[], type=local_path, metavar="FILE", help=text)
    text = "solved examples before each question of a task (default: its num_fewshot, or 0)"
    add("--fewshot", type=count, metavar="N", help=text)
    add("--batch", type=positive, default=8, help="task batch size, in sequences (default: 8)")
    add("--json", action="store_true", help="print one JSON object per line instead")


def _check_split(overrides: list[tuple[str, str]]) -> list[ConfigError]:
    """Refuse keys with which the validation set has text that the run was trained on."""
    rule = "changes the validation set, so that the run was trained on a part of it"
    remedy = "leave it out, or set data.path"
    return [ConfigError(name, x, rule, remedy) for name, x in overrides if name in SPLIT_KEYS]


def run_evaluate(options: argparse.Namespace) -> int:
    """Print validation losses, or scores of tasks."""
    from dataclasses import asdict

    from weft.data.prepare import show_progress
    from weft.inference.evaluate import (
        ALL_SEQUENCES,
        evaluate_sources,
        load_eval_data,
        prepare_eval_data,
        read_task,
        score_task,
    )
    from weft.inference.generate import load_chat_format
    from weft.inference.inference_model import find_checkpoint, load_model, plan_inference
    from weft.monitor.terminal import quiet_console
    from weft.supervision.local_ranks import run_on_all_ranks
    from weft.training.machine import is_launched_rank
    from weft.training.setup import Rank

    errors: list[ConfigError] = options.errors
    tasks = []
    for path in options.task:
        try:
            tasks.append(read_task(path, options.fewshot))
        except InvalidConfig as error:
            errors += error.errors
    if options.fewshot is not None and not options.task:
        rule, remedy = "has no effect without a task", "add --task FILE, or remove it"
        errors.append(ConfigError("--fewshot", options.fewshot, rule, remedy))
    checkpoint = find_checkpoint(absolute_dir(options.checkpoint), options.step)
    allowed = ["parallel.", "precision.compute_dtype", "run.device"]
    if not tasks:
        allowed += ["pipeline.", "data.", "train.seq_len", "train.microbatch_size"]
        allowed += ["train.eval_sequences"]
    keys = {name for name, _ in options.overrides}
    is_own_data = not keys & {"data.path", "data.mixture"}
    errors += _check_split(options.overrides) if is_own_data else []
    if "data.validation_path" in keys:
        path = dict(options.overrides)["data.validation_path"]
        rule, remedy = "names the validation set of a run", f"use --data.path {path}"
        errors.append(ConfigError("data.validation_path", path, rule, remedy))
    job, plan = plan_inference(
        checkpoint, options.overrides, errors, allowed, for_generation=bool(options.task)
    )
    sequences = job.train.eval_sequences if "train.eval_sequences" in keys else ALL_SEQUENCES
    # One process prepares the data, so that one reports mistakes.
    if not tasks and plan.world_size > 1 and not is_launched_rank():
        prepare_eval_data(checkpoint, job, is_own_data, quiet_console(sys.stderr))

    def run(rank: Rank) -> None:
        console = quiet_console(sys.stderr, quiet=rank.rank != 0)
        results: dict[str, dict[str, object]] = {}
        if tasks:
            model = load_model(checkpoint, plan, rank)
            chat_format = load_chat_format(checkpoint)
            for task in tasks:
                results[task.name] = asdict(score_task(task, model, chat_format, options.batch))
        else:
            data = load_eval_data(checkpoint, job, is_own_data, console, rank)
            # Other data was not trained on: use its training set, too.
            with show_progress(console) as show:
                losses = evaluate_sources(
                    checkpoint, plan, data, sequences, rank, not is_own_data, show
                )
            results = {loss.name: loss.to_dict() for loss in losses}
        for name, numbers in results.items() if rank.rank == 0 else ():
            if options.json:
                print(json.dumps({"checkpoint": str(checkpoint.path), "name": name, **numbers}))
            else:
                print_numbers(name, numbers)

    return run_on_all_ranks(plan, options.words, run)


def print_numbers(name: str, numbers: dict[str, object]) -> None:
    """Print a heading, and one line per number."""
    print(name)
    for key, value in numbers.items():
        if isinstance(value, int | float):
            shown = f"{value:,}" if isinstance(value, int) else f"{value:.4f}"
            print(f"  {key:<16}{shown}")
