r"""Compare variants of a recipe by repeated runs, or by their plans.

weft trains each variant --repeat times, as runs below --out.  Each repeat has its own seed, the
same for all variants, and reverses their order.  The first variant is the baseline.  The same
command resumes an interrupted comparison; a higher --repeat adds runs.  docs/comparing.md defines
the measurements and the verdict.

  weft compare demo --vary optim.lr=1e-3,3e-3
  weft compare a.toml b.toml --repeat 5 --train.steps 200
  weft compare llama3-8b --vary parallel.tp=1,2 --vary activation_checkpoint.mode=full,selective \
    --plan-only --cluster 2x8xH100 --price 2.5

  weft compare runs/compare-demo-0d6f8a51

With the directory of a comparison, weft trains nothing: it summarizes the runs that have finished
there, also while others run.  'weft launch --vary' submits the runs to a cluster.

A run of a comparison saves its last checkpoint only and renders no report, unless
--checkpoint.interval or --monitor.report is given.  report.html in --out shows all runs.
Override any key as --section.key value; 'weft train --help' lists the keys.

exit status: 0 compared; 1 fewer than two variants completed; 2 a mistake in the arguments; 75
interrupted, and the same command resumes; 130 interrupted twice
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from weft.cli.command_parser import RECIPE_HELP, Commands, add_command
from weft.cli.option_values import parse_integer
from weft.config.errors import ConfigErrors
from weft.config.exit_statuses import FAILED, INTERRUPTED, REQUEUE

if TYPE_CHECKING:
    from weft.comparison.comparison_result import ComparisonSummary


def add_compare(commands: Commands) -> None:
    """Add ``weft compare``."""
    add = add_command(commands, "compare", run_compare, __doc__).add_argument
    recipes_help = f"each is {RECIPE_HELP}"
    add("recipes", metavar="RECIPE", nargs="*", help=recipes_help)
    text = "values of a key, one variant each; repeat for every combination"
    add("--vary", action="append", default=[], metavar="KEY=A,B", help=text)
    add("--repeat", help="runs of each variant (default: 3)")
    text = "largest loss difference that counts as equivalent, in %% or nats (default: 0.5%%)"
    add("--margin", help=text)
    add("--price", help="price of a device hour, for the cost of a billion tokens")
    add("--out", metavar="DIR", help="directory of the runs (default: runs/compare-...)")
    add("--plan-only", action="store_true", help="compare predictions, run nothing")
    add("--cluster", metavar="NxMxNAME", help="with --plan-only: as for weft plan")
    add("--json", action="store_true", help="print one JSON object instead")


def run_compare(options: argparse.Namespace) -> int:
    """Compare variants by repeated runs, or by their plans."""
    from weft.comparison.comparison_result import ComparisonSettings
    from weft.comparison.experiment import COMPARISON, collect, compare, default_dir
    from weft.comparison.variants import (
        parse_margin,
        parse_price,
        parse_vary,
        prepare_variant,
        read_variants,
    )
    from weft.monitor.terminal import quiet_console

    errors: ConfigErrors = options.errors
    repeats = parse_integer("--repeat", options.repeat or "3", 1, 1000, errors)
    margin, relative = parse_margin(options.margin or "0.5%", errors)
    price = parse_price(options.price, errors)
    if options.cluster and not options.plan_only:
        rule = "needs --plan-only, because runs use this machine"
        errors.add("--cluster", rule, "add --plan-only", value=options.cluster)
    if not options.recipes:
        errors.add("RECIPE", "is missing", "use demo")
    vary = [pair for text in options.vary for pair in parse_vary(text, errors)]
    log = partial(quiet_console(sys.stdout, quiet=options.json).print, soft_wrap=True)
    if len(options.recipes) == 1 and (Path(options.recipes[0]) / COMPARISON).is_file():
        out = Path(options.recipes[0])
        check_collected(options)
        given = {"margin": margin, "relative": relative} if options.margin else {}
        result = collect(out, given | ({"price": price} if price else {}), log)
        return print_result(result, out, options.json, log)
    request = (options.recipes, vary, options.overrides, errors)
    if options.plan_only:
        from weft.comparison.planned_comparison import compare_plans

        document, num_planned = compare_plans(*request, options.cluster, price, options.out, log)
        if options.json:
            print(json.dumps(document, indent=2))
        return 0 if num_planned > 1 else FAILED
    variants = read_variants(*request, partial(prepare_variant, options.out or "runs"))
    out = Path(options.out) if options.out else default_dir(variants)
    settings = ComparisonSettings(repeats, margin, relative, price)
    result, num_signals = compare(out, variants, settings, log)
    status = print_result(result, out, options.json, log)
    if num_signals:
        print("interrupted; the same command resumes the trial", file=sys.stderr)
        return REQUEUE if num_signals == 1 else INTERRUPTED
    return status


def check_collected(options: argparse.Namespace) -> None:
    """Check the options of a comparison whose runs exist.

    Raises:
        InvalidConfig: with every error of the command line.
    """
    errors: ConfigErrors = options.errors
    rule = "is not possible with the directory of a comparison, whose runs exist"
    given = {f"--{name}": getattr(options, name) for name in ("repeat", "out", "vary")}
    given |= {"--plan-only": options.plan_only} | {f"--{key}": v for key, v in options.overrides}
    for name, value in given.items():
        if value:
            errors.add(name, rule, "remove it, or name a recipe", value=value)
    errors.raise_any()


def print_result(
    result: ComparisonSummary, out: Path, as_json: bool, log: Callable[[str], object]
) -> int:
    """Print the summary of a comparison; return the exit status."""
    log(f"\n{result.text()}\n\nall runs are in {out}")
    if as_json:
        print(json.dumps(result.to_dict(), indent=2))
    return 0 if result.comparisons else FAILED
