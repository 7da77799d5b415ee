r"""Compare variants of a recipe by repeated runs, or by their plans.

weft trains each variant --repeat times, as runs below --out.  Each repeat has its own seed, the
same for all variants, and reverses their order.  The first variant is the baseline.  The same
command resumes an interrupted comparison; a higher --repeat adds runs.  docs/comparing.md defines
the measurements and the verdict.

  weft compare demo --vary optim.lr=1e-3,3e-3
  weft compare a.toml b.toml --repeat 5 --train.steps 200
  weft compare llama3-8b --vary parallel.tp=1,2 --vary activation_checkpoint.mode=full,selective \
    --plan-only --cluster 2x8xH100 --price 2.5

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
from functools import partial
from pathlib import Path

from weft.cli.command_parser import RECIPE_HELP, Commands, add_command
from weft.cli.option_values import parse_integer
from weft.cluster import FAILED, INTERRUPTED, REQUEUE
from weft.config.errors import ConfigErrors


def add_compare(commands: Commands) -> None:
    """Add ``weft compare``."""
    add = add_command(commands, "compare", run_compare, __doc__).add_argument
    recipes_help = f"each is {RECIPE_HELP}"
    add("recipes", metavar="RECIPE", nargs="*", help=recipes_help)
    text = "values of a key, one variant each; repeat for every combination"
    add("--vary", action="append", default=[], metavar="KEY=A,B", help=text)
    add("--repeat", default="3", help="runs of each variant (default: 3)")
    text = "largest loss difference that counts as equivalent, in %% or nats (default: 0.5%%)"
    add("--margin", default="0.5%", help=text)
    add("--price", help="price of a device hour, for the cost of a billion tokens")
    add("--out", metavar="DIR", help="directory of the runs (default: runs/compare-...)")
    add("--plan-only", action="store_true", help="compare predictions, run nothing")
    add("--cluster", metavar="NxMxNAME", help="with --plan-only: as for weft plan")
    add("--json", action="store_true", help="print one JSON object instead")


def run_compare(options: argparse.Namespace) -> int:
    """Compare variants by repeated runs, or by their plans."""
    from weft.monitor.terminal import quiet_console
    from weft.tools.comparison_result import ComparisonSettings
    from weft.tools.experiment import compare, default_dir
    from weft.tools.variants import (
        parse_margin,
        parse_price,
        parse_vary,
        prepare_variant,
        read_variants,
    )

    errors: ConfigErrors = options.errors
    repeats = parse_integer("--repeat", options.repeat, 1, 1000, errors)
    margin, relative = parse_margin(options.margin, errors)
    price = parse_price(options.price, errors)
    if options.cluster and not options.plan_only:
        rule = "needs --plan-only, because runs use this machine"
        errors.add("--cluster", rule, "add --plan-only", value=options.cluster)
    if not options.recipes:
        errors.add("RECIPE", "is missing", "use demo")
    vary = [pair for text in options.vary for pair in parse_vary(text, errors)]
    log = partial(quiet_console(sys.stdout, quiet=options.json).print, soft_wrap=True)
    request = (options.recipes, vary, options.overrides, errors)
    if options.plan_only:
        from weft.tools.planned_comparison import compare_plans

        document, num_planned = compare_plans(*request, options.cluster, price, options.out, log)
        if options.json:
            print(json.dumps(document, indent=2))
        return 0 if num_planned > 1 else FAILED
    variants = read_variants(*request, partial(prepare_variant, options.out or "runs"))
    out = Path(options.out) if options.out else default_dir(variants)
    settings = ComparisonSettings(repeats, margin, relative, price)
    result, num_signals = compare(out, variants, settings, log)
    log(f"\n{result.text()}\n\nall runs are in {out}")
    if options.json:
        print(json.dumps(result.to_dict(), indent=2))
    if num_signals:
        print("interrupted; the same command resumes the trial", file=sys.stderr)
        return REQUEUE if num_signals == 1 else INTERRUPTED
    return 0 if result.comparisons else FAILED
