"""Predict memory and step time of a recipe on any cluster; needs no GPU.

weft traces one rank of each kind of stage with fake tensors, by the code that trains, and
extrapolates to the whole step.  The trace gives memory, FLOPs and communication.  docs/planner.md
describes the time model, and compares predictions with published runs.

  weft plan llama3-405b --cluster 64x8xh100
  weft plan llama3-70b --cluster 32x8xh200 --search --write best.toml
  weft plan llama3-405b --cluster 2048x8xh100 --tokens 15T --price 2.5 --mtbf 3h
  weft plan llama3-8b --cluster 8xh100 --tokens 1T --days 30
  weft plan hf://Qwen/Qwen3-8B --lora 16 --cluster 2xa100

Override any key as --section.key value; 'weft train --help' lists the keys.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from weft.cli.command_parser import RECIPE_HELP, Commands, add_command
from weft.cli.option_values import check_file, parse_days, parse_duration, parse_tokens, write_file
from weft.config.errors import MISSING, ConfigError, ConfigErrors, InvalidConfig
from weft.config.escaping import escape_controls, raw_stream
from weft.config.exit_statuses import FAILED
from weft.config.formatting import format_value

if TYPE_CHECKING:
    from weft.estimate.machine_size import SizedPlan
    from weft.planning.plan import Machine, Plan


def add_plan(commands: Commands) -> None:
    """Add ``weft plan``."""
    parser = add_command(commands, "plan", run_plan, __doc__)
    add = parser.add_argument
    text = f"{RECIPE_HELP}; or a model to fine-tune, by recipe chat: hf://org/name, or a directory "
    text += "with config.json"
    add("recipe", metavar="RECIPE", nargs="?", help=text)
    text = "short for --lora.rank RANK; a model is then planned by recipe lora"
    add("--lora", metavar="RANK", help=text)
    text = "NODESxDEVICESxNAME, such as 64x8xH100 (8xH100: one node), or local; other numbers of "
    text += "ranks than the recipe's change parallel.dp_shard (default: run.cluster)"
    add("--cluster", metavar="NxMxNAME", help=text)
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument(
        "--rank-map", action="store_true", help="print the position of each rank in the device mesh"
    )
    mode.add_argument(
        "--search", action="store_true", help="rank other layouts of the model by step time"
    )
    mode.add_argument(
        "--calibrate", metavar="RUN", help="calibrate this device's speed from a finished run"
    )
    text = (
        "print the plan of the fewest nodes that end the run in so many days; --cluster gives the "
    )
    text += "kind of node"
    mode.add_argument("--days", metavar="DAYS", help=text)
    text = "print the plan of the fewest devices on which the recipe fits, also with changes; "
    text += "--cluster gives the device"
    mode.add_argument("--smallest", action="store_true", help=text)
    add("--json", action="store_true", help="print one JSON object instead")
    add("--report", metavar="FILE", help="also write charts as an HTML page")
    text = "price of a device hour, for the cost of the run"
    add("--price", metavar="MONEY", help=text)
    text = "tokens of the whole run, such as 15T, 300B or 1.5e12 (default: those of train.steps)"
    add("--tokens", metavar="COUNT", help=text)
    text = (
        "mean time between failures of the whole job, such as 30m, 3h or 2d: prints goodput, the "
    )
    text += "best checkpoint.interval and spare nodes (default: no failures)"
    add("--mtbf", metavar="TIME", help=text)
    add("--write", metavar="FILE", help="with --search: write the best layout as a recipe")


def run_plan(options: argparse.Namespace) -> int:
    """Print the predicted memory and step time of a recipe."""
    from weft.conversion.adapter_path import adopt_paths
    from weft.planning.plan_text import format_placement, plan_recipe
    from weft.training.machine import detect_machine

    if options.calibrate:
        calibrate_device(options)
        return 0
    errors: ConfigErrors = options.errors
    if options.recipe is None:
        raise InvalidConfig([*errors, ConfigError("RECIPE", MISSING, "is missing", "use demo")])
    if options.write and not options.search:
        errors.add("--write", "is for --search", "add --search", value=options.write)
    if options.rank_map and options.json:
        errors.add("--rank-map", "has no JSON form", "remove --json", value=True)
    if options.report and (options.rank_map or options.search):
        rule, remedy = "needs a plan", "remove --rank-map and --search"
        errors.add("--report", rule, remedy, value=options.report)
    expand_short_forms(options)
    check_run_options(options)
    for option in ("report", "write"):
        if path := getattr(options, option):
            check_file(f"--{option}", Path(path), errors)
    if options.days is not None or options.smallest:
        show_size(options)
        return 0
    plan, machine = plan_recipe(
        options.recipe,
        options.overrides,
        errors,
        options.cluster,
        detect_machine,
        any_layout=options.search,
        adopt=adopt_paths,
    )
    if options.search:
        return search_layouts(options, plan, machine)
    if options.rank_map:
        print(format_placement(plan))
    else:
        show_forecast(options, plan, machine)
    return 0


def expand_short_forms(options: argparse.Namespace) -> None:
    """Replace a model as the recipe, and --lora, by a recipe and its keys."""
    from weft.config.reader import find_recipe, recipe_names
    from weft.planning.model_config import HUB_NAME

    recipe: str = options.recipe
    overrides: list[tuple[str, str]] = []
    if find_recipe(recipe) is None:
        is_shipped = any(name.startswith(recipe.partition("/")[0] + "/") for name in recipe_names())
        if recipe.startswith("hf://") or (Path(recipe) / "config.json").is_file():
            overrides.append(("model.path", recipe))
            options.recipe = "chat" if options.lora is None else "lora"
        elif HUB_NAME.fullmatch(recipe) and not is_shipped:
            rule = "is not a recipe, the path of a .toml file, or a run directory"
            remedy = f"check the path; a model of the Hub is hf://{recipe}"
            raise InvalidConfig([*options.errors, ConfigError("recipe", recipe, rule, remedy)])
    if options.lora is not None:
        if "lora.rank" in dict(options.overrides):
            rule, remedy = "is short for --lora.rank", "use one of the two"
            options.errors.add("--lora", rule, remedy, value=options.lora)
        overrides.append(("lora.rank", options.lora))
    options.overrides = [*overrides, *options.overrides]
    if overrides and not options.json:
        keys = " ".join(f"--{key} {shlex.quote(value)}" for key, value in overrides)
        print(f"weft plan {shlex.quote(options.recipe)} {keys}\n")


def check_run_options(options: argparse.Namespace) -> None:
    """Parse the options about the whole run; add their errors."""
    from weft.comparison.variants import parse_price

    errors: ConfigErrors = options.errors
    has_no_plan = options.rank_map or options.search
    for name in ("price", "tokens", "mtbf"):
        if (text := getattr(options, name)) is not None and has_no_plan:
            errors.add(f"--{name}", "needs a plan", "remove --rank-map and --search", value=text)
    options.price = parse_price(options.price, errors)
    if options.days is not None:
        options.days = parse_days(options.days, errors)
    if options.tokens is not None:
        for key in ("train.steps", "train.epochs"):
            if key in {name for name, _ in options.overrides}:
                rule, remedy = f"gives another length than --{key}", "use one of the two"
                errors.add("--tokens", rule, remedy, value=options.tokens)
        options.tokens = parse_tokens(options.tokens, errors)
    if options.mtbf is not None:
        options.mtbf = parse_duration("--mtbf", options.mtbf, errors)


def show_size(options: argparse.Namespace) -> None:
    """Print the plan of the fewest nodes that end a run in time, or on which it fits."""
    from weft.conversion.adapter_path import adopt_paths
    from weft.estimate.machine_size import fewest_nodes, smallest_machine
    from weft.planning.devices import Cluster, parse_cluster
    from weft.planning.plan_text import plan_recipe
    from weft.training.machine import detect_machine

    option = "--smallest" if options.smallest else "--days"
    plan, _ = plan_recipe(
        options.recipe,
        options.overrides,
        options.errors,
        options.cluster,
        detect_machine,
        any_layout=True,
        adopt=adopt_paths,
    )
    text = options.cluster or plan.job.run.cluster
    if text == "local":
        rule, remedy = "needs a cluster", "add --cluster, such as 8xH100"
        raise InvalidConfig([ConfigError(option, MISSING, rule, remedy)])

    def plan_on(cluster: Cluster, change: Mapping[str, object]) -> tuple[Plan, Machine]:
        changes = [(key, format_value(value)) for key, value in change.items()]
        overrides = [*options.overrides, *changes]
        return plan_recipe(
            options.recipe, overrides, (), str(cluster), detect_machine, True, adopt_paths
        )

    cluster = parse_cluster(text)
    if options.smallest:
        sized = smallest_machine(cluster, plan_on)
    else:
        days = 86400 * options.days
        sized = fewest_nodes(cluster, plan_on, days, options.tokens, options.mtbf)
    show_forecast(options, sized.plan, sized.machine, sized)


def show_forecast(
    options: argparse.Namespace, plan: Plan, machine: Machine, sized: SizedPlan | None = None
) -> None:
    """Print the prediction for a plan, and advice."""
    from weft.estimate.advice import advise
    from weft.estimate.cost import device_spec
    from weft.estimate.forecast import forecast, forecast_to_json
    from weft.estimate.forecast_text import advice_lines, render_plan
    from weft.estimate.whole_run import count_steps
    from weft.planning.plan_text import describe_machine
    from weft.reporting.forecast_charts import forecast_page

    device = device_spec(plan, machine)
    prediction = sized.prediction if sized else forecast(plan, machine, device, cached=True)
    mtbf = sized.mtbf if sized else options.mtbf
    if options.tokens is not None:
        plan = replace(plan, num_steps=count_steps(plan, options.tokens))
        prediction = replace(prediction, plan=plan)
    if options.report:
        page = forecast_page(prediction, options.recipe, describe_machine(plan, machine))
        write_file(Path(options.report), page)
    if options.json:
        size = {"size": sized.to_dict()} if sized else {}
        values = json.loads(forecast_to_json(plan, prediction, options.price, mtbf)) | size
        print(json.dumps(values, indent=2))
        return
    if sized:
        print(f"{sized.reason}\n--cluster {sized.cluster}\n")
    asked = options.price, mtbf
    print(render_plan(plan, machine, options.recipe, prediction, None, *asked), flush=True)
    # It takes longer than the forecast, so the forecast is there first.
    advice = [] if device is None else advise(plan, machine, device, prediction, cached=True)
    for line in advice_lines(prediction, advice):
        print(line)


def search_layouts(options: argparse.Namespace, plan: Plan, machine: Machine) -> int:
    """Print the best layouts of a recipe's model on a cluster."""
    from weft.config.schema import flatten
    from weft.estimate.forecast_text import render_search
    from weft.estimate.search import render_recipe, search
    from weft.planning.placement import DEGREE_KEYS

    def show_status(text: str) -> None:
        if not options.json and sys.stderr.isatty():
            line = f"\r\033[K{escape_controls(text)}"
            print(line, end="", file=raw_stream(sys.stderr), flush=True)

    errors, values = ConfigErrors(), flatten(plan.job)
    for key, text in options.overrides:
        # The search begins at the nearest layout, whose degrees may be others than those asked for.
        if key in DEGREE_KEYS and text.isdecimal() and values[key] not in ("auto", int(text)):
            rule, remedy = "is in no layout of these ranks", f"leave it out, or use {values[key]}"
            errors.add(key, rule, remedy, value=int(text))
    errors.raise_any()
    fixed = {key for key, _ in options.overrides}
    result = search(plan, machine, log=show_status, fixed=fixed)
    show_status("")
    print(json.dumps(result.to_dict(), indent=2) if options.json else render_search(result))
    if options.write and result.winner:
        cluster = options.cluster or plan.job.run.cluster
        text = render_recipe(result, plan.job, options.recipe, cluster)
        write_file(Path(options.write), text)
        if not options.json:
            print(f"\nlayout {result.best.index(result.winner) + 1} is in {options.write}")
    return 0 if result.winner else FAILED


def calibrate_device(options: argparse.Namespace) -> None:
    """Calibrate the device's speed from a run, and print the errors before and after."""
    from weft.estimate.calibrate import calibrate, read_run, render_calibration, save_calibration

    words = [*(f"--{key}" for key, _ in options.overrides), options.recipe, options.cluster]
    rule, remedy = "cannot be used with --calibrate, which reads the run", "remove it"
    errors: ConfigErrors = options.errors
    words += [options.report, options.write, options.price, options.tokens, options.mtbf]
    words += [options.lora]
    for word in filter(None, words):
        errors.add(word, rule, remedy)
    errors.raise_any()
    result = calibrate(read_run(Path(options.calibrate)))
    path = save_calibration(result)
    text = render_calibration(result, path)
    print(json.dumps(result.to_dict(), indent=2) if options.json else text)
