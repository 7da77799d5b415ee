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

--fuzz verifies N random jobs over all keys that change the computation, on up to --ranks processes.
A third of the jobs resume in another layout.  weft shrinks a job that fails to the fewest keys, and
prints the command that reproduces it.  Keys on the command line apply to every job.  The same
command skips the jobs that are in --log, and so resumes.

  weft verify --fuzz 200 --seed 7 --minutes 30
  weft verify --fuzz 100 --pipeline.schedule ZBVZeroBubble

exit status: 0 the layout, or every job, agrees; 1 a value departs, or a rank failed; 2 a mistake in
the recipe or the options; 130 interrupted, and the same --fuzz resumes
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

from weft.cli.command_parser import RECIPE_HELP, Commands, add_command
from weft.cli.option_values import local_path, parse_integer
from weft.cluster import FAILED, INTERRUPTED
from weft.config.errors import MISSING, ConfigError, ConfigErrors, InvalidConfig


def add_verify(commands: Commands) -> None:
    """Add ``weft verify``."""
    add = add_command(commands, "verify", run_verify, __doc__).add_argument
    recipe_help = f"{RECIPE_HELP}; none with --fuzz"
    add("recipe", metavar="RECIPE", nargs="?", help=recipe_help)
    add("--ranks", default="8", help="maximum number of processes, at least 2 (default: 8)")
    add("--steps", help="optimizer steps (default: 3; with --fuzz 2)")
    text = "also save a checkpoint halfway and resume from it in this layout"
    add("--resume-layout", metavar="KEY=VALUE,...", help=text)
    add("--fuzz", metavar="N", help="verify N random jobs instead of a recipe")
    add("--seed", default="0", help="with --fuzz: seed of the jobs (default: 0)")
    add("--minutes", metavar="M", help="with --fuzz: start no job after M minutes")
    text = "with --fuzz: results, one line per job (default: runs/verify-fuzz-SEED.jsonl)"
    add("--log", type=local_path, metavar="FILE", help=text)
    add("--json", action="store_true", help="print one JSON object instead")


def run_verify(options: argparse.Namespace) -> int:
    """Compare gradients of a small model in the recipe's layout and in one process."""
    from weft.monitor.terminal import quiet_console
    from weft.plan.resolve import MAX_CPU_RANKS
    from weft.tools.verify import read_recipe, verify

    errors: ConfigErrors = options.errors
    ranks = parse_integer("--ranks", options.ranks, 2, MAX_CPU_RANKS, errors)
    default = "3" if options.fuzz is None else "2"
    steps = parse_integer("--steps", options.steps or default, 1, 1000, errors)
    log = partial(quiet_console(sys.stdout, quiet=options.json).print, soft_wrap=True)
    if options.fuzz is not None:
        return fuzz_jobs(options, ranks, steps, log)
    for name in ("minutes", "log"):
        if (value := getattr(options, name)) is not None:
            errors.add(f"--{name}", "needs --fuzz", value=str(value))
    if options.recipe is None:
        remedy = "use demo, or --fuzz 100"
        raise InvalidConfig([*errors, ConfigError("RECIPE", MISSING, "is missing", remedy)])
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


def fuzz_jobs(
    options: argparse.Namespace, ranks: int, steps: int, log: Callable[[str], None]
) -> int:
    """Verify random jobs."""
    errors: ConfigErrors = options.errors
    count = parse_integer("--fuzz", options.fuzz, 1, 10**6, errors)
    seed = parse_integer("--seed", options.seed, 0, 10**9 - 1, errors)
    minutes = parse_integer("--minutes", options.minutes or "1", 1, 10**5, errors)
    if options.recipe not in (None, "demo"):
        rule, remedy = "cannot be used with --fuzz, which draws its jobs", "remove it"
        errors.add("RECIPE", rule, remedy, value=options.recipe)
    if options.resume_layout:
        rule, remedy = "cannot be used with --fuzz, which draws it", "remove it"
        errors.add("--resume-layout", rule, remedy, value=options.resume_layout)
    errors.raise_any()
    from weft.tools.verify_fuzz import FAILURE_STATUSES, FuzzSettings, fuzz

    settings = FuzzSettings(seed, ranks, steps, dict(options.overrides))
    path = options.log or Path("runs") / f"verify-fuzz-{seed}.jsonl"
    result = fuzz(count, settings, path, minutes if options.minutes else 0, log)
    if options.json:
        print(json.dumps(result, indent=2))
    if result["interrupted"]:
        return INTERRUPTED
    return FAILED if any(result[status.replace(" ", "_")] for status in FAILURE_STATUSES) else 0


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
