r"""Verify that a layout computes the same gradients as one process.

weft shrinks the recipe to test size: few narrow layers, short sequences, a small vocabulary, and at
most --ranks processes on this machine's CPU.  It keeps the layout: every axis of more than one rank
that fits, pipeline schedule and stages, microbatches, context-parallel method, resharding, tied
embeddings, grouped-query attention.  It needs no data and no GPU.  The layout and one process train
on the same random tokens from the same weights, in float32.  Losses, gradient norms, every gradient
and every update must agree to rounding; docs/verify.md says how weft measures that limit.  If a
value does not agree, the report names the first one that differs.

  weft verify llama3-405b
  weft verify mine.toml --parallel.tp 2 --pipeline.schedule ZBVZeroBubble --ranks 4

Override any key as --section.key value; 'weft train --help' lists the keys.
These keys keep their value only if they are on the command line: --compile.enable true,
--precision.compute_dtype bfloat16, --precision.float8 tensorwise, and the other keys of precision.

--resume-layout saves a checkpoint after half of the steps, loads it in another layout, and compares
the remaining steps with one process: weights, optimizer state and updates.  It takes the keys of
parallel, pipeline and activation_checkpoint, and train.microbatch_size.

  weft verify demo --parallel.tp 2 \
    --resume-layout parallel.dp_shard=2,activation_checkpoint.mode=full

exit status: 0 the layout agrees; 1 a value departs, or a rank failed; 2 a mistake in the recipe or
the options; 130 interrupted
"""

from __future__ import annotations

import argparse
import re
import sys
from functools import partial

from weft.cli.command_parser import RECIPE_HELP, Commands, add_command
from weft.cli.option_values import parse_integer
from weft.config.errors import ConfigErrors
from weft.config.exit_statuses import FAILED


def add_verify(commands: Commands) -> None:
    """Add ``weft verify``."""
    add = add_command(commands, "verify", run_verify, __doc__).add_argument
    add("recipe", metavar="RECIPE", help=RECIPE_HELP)
    add("--ranks", default="8", help="maximum number of processes, at least 2 (default: 8)")
    add("--steps", default="3", help="optimizer steps (default: 3)")
    text = "also save a checkpoint halfway and resume from it in this layout"
    add("--resume-layout", metavar="KEY=VALUE,...", help=text)
    add("--json", action="store_true", help="print one JSON object instead")


def run_verify(options: argparse.Namespace) -> int:
    """Compare gradients of a small model in the recipe's layout and in one process."""
    from weft.monitor.terminal import quiet_console
    from weft.planning.resolve import MAX_CPU_RANKS
    from weft.verification.verify import read_recipe, verify

    errors: ConfigErrors = options.errors
    ranks = parse_integer("--ranks", options.ranks, 2, MAX_CPU_RANKS, errors)
    steps = parse_integer("--steps", options.steps, 1, 1000, errors)
    log = partial(quiet_console(sys.stdout, quiet=options.json).print, soft_wrap=True)
    resume = parse_layout(options.resume_layout or "", errors)
    report = verify(
        read_recipe(options.recipe, options.overrides, errors),
        ranks=ranks,
        steps=steps,
        keep=[name for name, _ in options.overrides],
        resume=resume,
        log=log,
    )
    if options.json:
        print(report.to_json())
    return 0 if report.holds else FAILED


def parse_layout(text: str, errors: ConfigErrors) -> list[tuple[str, str]]:
    """Parse ``key=value,...``; a value in brackets may have commas."""
    pairs = []
    for part in re.split(r",(?=[a-z_]+\.[a-z0-9_]+=)", text) if text else []:
        name, equals, value = part.partition("=")
        if not equals:
            remedy = "write for example parallel.tp=2,activation_checkpoint.mode=full"
            errors.add("--resume-layout", "is not KEY=VALUE,...", remedy, value=text)
        pairs.append((name, value))
    return pairs
