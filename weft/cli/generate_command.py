"""Generate text with a trained model.

The seed of a prompt is --seed plus its number from 0, for any --batch.

  weft generate runs/demo 'class ' 'def ' --temperature 0
  weft generate runs/mine --prompts questions.jsonl --json --parallel.tp 2
  weft generate runs/tuned 'What is 2 + 2?' --chat

--parallel.tp and --parallel.dp_shard shard the model over that many ranks of this machine, or of
torchrun, in any layout that it was trained in.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import sys
from dataclasses import fields
from typing import TYPE_CHECKING, TextIO

from weft.cli.command_parser import CommandParser, Commands, add_command
from weft.cli.option_values import add_step, count, local_path, not_negative, positive, run_path
from weft.config.errors import ConfigErrors
from weft.config.escaping import raw_stream
from weft.config.run_paths import absolute_dir

if TYPE_CHECKING:
    from weft.inference.generate import Sampling


def add_generate(commands: Commands) -> None:
    """Add ``weft generate``."""
    parser = add_command(commands, "generate", run_generate, __doc__)
    add = parser.add_argument
    add("checkpoint", type=run_path, help="run directory, or directory of a checkpoint")
    add_step(add)
    text = "prompts (default: start of a document)"
    add("texts", metavar="PROMPT", nargs="*", help=text)
    text = "another prompt, which may begin with --; repeatable"
    add("--prompt", action="append", default=[], help=text)
    text = "file with one prompt per line; .jsonl: a string, or an object with 'prompt'"
    add("--prompts", type=local_path, metavar="FILE", help=text)
    add(
        "--chat",
        action="store_true",
        help="format prompts as user messages with the chat template of the run or of "
        "--data.chat_template; an object in --prompts may have 'messages'",
    )
    add("--batch", type=positive, default=8, help="batch size in prompts (default: 8)")
    add("--json", action="store_true", help="print one JSON object per prompt")
    add_sampling(parser)
    parser.words_after_options = "texts"


def add_sampling(parser: CommandParser) -> None:
    """Add the options of sampling."""
    add = parser.add_argument
    min_p_help = "minimum probability relative to the most likely token (default: 0, off)"
    for name, kind, default, text in (
        ("--max-tokens", count, 200, "maximum new tokens (default: 200)"),
        ("--temperature", not_negative, 0.8, "sampling temperature; 0: greedy (default: 0.8)"),
        ("--top-k", count, 50, "sample from the k most likely tokens; 0: off (default: 50)"),
        ("--top-p", not_negative, 1.0, "nucleus sampling (default: 1, off)"),
        ("--min-p", not_negative, 0.0, min_p_help),
        ("--repetition-penalty", not_negative, 1.0, "repetition penalty (default: 1, off)"),
    ):
        add(name, type=kind, default=default, help=text)
    text = "stop sequence, not printed; repeatable"
    add("--stop", action="append", default=[], metavar="TEXT", help=text)
    add("--seed", type=count, default=0, help="seed of the first prompt (default: 0)")


def read_sampling(options: argparse.Namespace, errors: ConfigErrors) -> Sampling:
    """Return the options of `add_sampling`; append errors."""
    from weft.inference.generate import Sampling

    values = {field.name: getattr(options, field.name) for field in fields(Sampling)}
    sampling = Sampling(**values | {"stop": tuple(filter(None, options.stop))})
    errors += sampling.errors()
    return sampling


def write_backslashes(stream: TextIO) -> None:
    """Write characters as backslash escapes if the terminal cannot show them."""
    if isinstance(raw := raw_stream(stream), io.TextIOWrapper):
        raw.reconfigure(errors="backslashreplace")


def run_generate(options: argparse.Namespace) -> int:
    """Print prompts and their continuations; stream a single one."""
    from weft.inference.generate import (
        Prompt,
        generate,
        load_chat_format,
        make_sequences,
        read_prompts,
    )
    from weft.inference.inference_model import find_checkpoint, load_model, plan_inference
    from weft.supervision.local_ranks import run_on_all_ranks
    from weft.training.setup import Rank

    errors: ConfigErrors = options.errors
    prompts: list[Prompt] = [
        os.fsencode(text).decode("utf-8", "replace") for text in (*options.texts, *options.prompt)
    ]
    if options.prompts:
        prompts += read_prompts(options.prompts, errors, options.chat)
    if options.chat and not prompts and not errors:
        remedy = "add a prompt after the run, or --prompts"
        errors.add("--chat", "needs a prompt", remedy)
    sampling = read_sampling(options, errors)
    write_backslashes(sys.stdout)
    checkpoint = find_checkpoint(absolute_dir(options.checkpoint), options.step)
    allowed = ["parallel.", "precision.compute_dtype", "run.device"]
    allowed += ["data.chat_template"] * options.chat
    job, plan = plan_inference(checkpoint, options.overrides, errors, allowed, for_generation=True)
    template = dict(options.overrides).get("data.chat_template", "auto")
    variables = job.data.chat_template_args
    chat_format = load_chat_format(checkpoint, template if options.chat else None, variables)
    prompts = prompts or [""]
    is_streaming = len(prompts) == 1 and not options.json

    def run(rank: Rank) -> None:
        model = load_model(checkpoint, plan, rank)
        # A file or pipe gets the generated text unescaped.
        out = sys.stdout if sys.stdout.isatty() else raw_stream(sys.stdout)

        def write(text: str) -> None:
            if rank.rank == 0:
                print(text, end="", flush=True, file=out)

        if is_streaming and not options.chat:
            write(str(prompts[0]))
        for first in range(0, len(prompts), options.batch):
            batch = prompts[first : first + options.batch]
            sequences = make_sequences(batch, chat_format, sampling, first)
            for _, text in generate(model, chat_format, sequences, sampling):
                if is_streaming:
                    write(text)
            separator = "\n" if options.chat else ""
            for each in [] if is_streaming else sequences:
                shown = f"{each.prompt}{separator}{each.text}\n---"
                write(f"{json.dumps(each.to_dict()) if options.json else shown}\n")
        if is_streaming:
            write("\n")

    return run_on_all_ranks(plan, options.words, run)
