"""The function of each command; `weft.cli.arguments` has their arguments.

Heavy imports stay inside the functions, because ``weft --help`` must be fast.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import re
import shlex
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from textwrap import indent
from typing import TYPE_CHECKING

from weft.cli.arguments import parse
from weft.cluster import FAILED, INTERRUPTED, REQUEUE, USAGE_ERROR
from weft.config.errors import MISSING, ConfigError, InvalidConfig, WeftError
from weft.config.escaping import escape_controls, escaping_stream, is_one_line, raw_stream
from weft.config.reader import read_job, recipe_names

if TYPE_CHECKING:
    from weft.data.dataset import Dataset
    from weft.plan.plan import Machine, Plan


def main(argv: list[str] | None = None) -> int:
    """Run one command and return its exit status."""
    if sys.stdout is None:  # closed by the parent process; the ranks inherit it
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        os.set_inheritable(1, True)
        sys.stdout = os.fdopen(1, "w")
    sys.stdout, sys.stderr = escaping_stream(sys.stdout), escaping_stream(sys.stderr)
    try:
        directory = os.getcwd()
    except FileNotFoundError:
        print("weft: the working directory has been removed", file=sys.stderr)
        return USAGE_ERROR
    if not is_one_line(directory):
        rule = "has control characters, or bytes that are not UTF-8, in its path"
        print(f"weft: the working directory {directory!a} {rule}", file=sys.stderr)
        print("  start weft in another directory, or rename this one", file=sys.stderr)
        return USAGE_ERROR
    if directory not in sys.path:
        sys.path.append(directory)  # for the user's module:attribute
    try:
        options = parse(sys.argv[1:] if argv is None else argv)
        return RUN[options.command](options)
    except InvalidConfig as error:
        return reject(error)
    except WeftError as error:
        print(f"weft: {error}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # as in 'weft ... | head'
        return FAILED


def reject(error: InvalidConfig) -> int:
    """Print every error, one per line."""
    count = len(error.problems)
    print(f"weft: {count} problem{'s' * (count != 1)}, nothing was started:", file=sys.stderr)
    for problem in error.problems:
        print(indent(str(problem), "  "), file=sys.stderr)
    return USAGE_ERROR


def train(options: argparse.Namespace) -> int:
    """Check the configuration, prepare the data, and run the ranks."""
    if "RANK" not in os.environ:  # the launcher reports what torch's C++ warns about
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    from weft.cluster.start import run_rank, start_training
    from weft.monitor.terminal import quiet_console
    from weft.train.environment import is_launched_rank, is_log_node
    from weft.train.job_checks import prepare_job

    base, plan = prepare_job(options.recipe, options.overrides, options.problems)
    if options.dry_run:
        print(plan.to_json())
        return 0
    if is_launched_rank():
        run_rank(base, plan, options.recipe, options.force)
    console = quiet_console(sys.stdout, quiet=not is_log_node(os.environ))
    return start_training(base, plan, options.recipe, console, options.force)


def launch(options: argparse.Namespace) -> int:
    """Submit a recipe to a cluster."""
    from weft.cluster.submit import build_request, get_cluster, submit
    from weft.train.machine import detect_machine

    problems = list(options.problems)
    job_request = build_request(
        options.on, options.recipe, options.overrides, problems, detect_machine
    )
    text = get_cluster(options.on).render(job_request)
    print(text)
    if rules := get_cluster(options.on).check(text):
        raise InvalidConfig(
            ConfigError(f"--on {options.on}", MISSING, f"rejects the job: {rule}") for rule in rules
        )
    if not options.dry_run:
        id = submit(options.on, job_request, text)
        next = f"weft job status {shlex.quote(str(job_request.run_dir))}"
        print(f"submitted {options.on} job {id}: {next}")
    return 0


def job_status(options: argparse.Namespace) -> int:
    """Print the status of a submitted run."""
    from weft.cluster.submit import SubmittedJob

    run = SubmittedJob.load(options.run)
    print(f"{run.on} job {run.id}: {run.status()}")
    return 0


def job_logs(options: argparse.Namespace) -> int:
    """Print the output of a submitted run."""
    from weft.cluster.submit import SubmittedJob

    for line in SubmittedJob.load(options.run).logs(options.follow):
        print(line, flush=True)
    return 0


def job_cancel(options: argparse.Namespace) -> int:
    """Cancel a submitted run."""
    from weft.cluster.submit import SubmittedJob

    print(SubmittedJob.load(options.run).cancel())
    return 0


def plan(options: argparse.Namespace) -> int:
    """Print the predicted memory and step time of a recipe."""
    from weft.plan.plan_text import describe_machine, format_placement, plan_recipe
    from weft.train.machine import detect_machine

    problems = list(options.problems)
    if options.calibrate:
        return calibrate(options)
    if options.recipe is None:
        problems.append(ConfigError("RECIPE", MISSING, "is missing", f"use {recipe_names()[0]}"))
        raise InvalidConfig(problems)
    if options.write and not options.search:
        problems.append(ConfigError("--write", options.write, "is for --search", "add --search"))
    if options.rank_map and options.json:
        problems.append(ConfigError("--rank-map", True, "has no JSON form", "remove --json"))
    if options.report and (options.rank_map or options.search):
        rule, remedy = "needs a plan", "remove --rank-map and --search"
        problems.append(ConfigError("--report", options.report, rule, remedy))
    for option in ("report", "write"):
        if path := getattr(options, option):
            check_file(f"--{option}", Path(path), problems)
    plan, machine = plan_recipe(
        options.recipe, options.overrides, problems, options.cluster, detect_machine
    )
    if options.rank_map:
        print(format_placement(plan))
        return 0
    if options.search:
        return search(options, plan, machine)
    from weft.estimate.advice import advise
    from weft.estimate.cost import device_spec
    from weft.estimate.forecast import forecast, forecast_to_json
    from weft.estimate.forecast_text import render_plan
    from weft.tools.report.forecast_charts import forecast_page

    device = device_spec(plan, machine)
    prediction = forecast(plan, machine, device)
    if options.report:
        page = forecast_page(prediction, options.recipe, describe_machine(plan, machine))
        write_file(Path(options.report), page)
    if options.json:
        print(forecast_to_json(plan, prediction))
        return 0
    advice = [] if device is None else advise(plan, machine, device, prediction)
    print(render_plan(plan, machine, options.recipe, prediction, advice))
    return 0


def calibrate(options: argparse.Namespace) -> int:
    """Calibrate the device's speed from a run, and print the errors before and after."""
    from weft.estimate.calibrate import calibrate, read_run, render_calibration, save_calibration

    problems = list(options.problems)
    words = [*(f"--{key}" for key, _ in options.overrides), options.recipe, options.cluster]
    for word in filter(None, [*words, options.report, options.write]):
        rule, remedy = "cannot be used with --calibrate, which reads the run", "remove it"
        problems.append(ConfigError(word, MISSING, rule, remedy))
    if problems:
        raise InvalidConfig(problems)
    result = calibrate(read_run(Path(options.calibrate)))
    path = save_calibration(result)
    print(
        json.dumps(result.to_dict(), indent=2) if options.json else render_calibration(result, path)
    )
    return 0


def search(options: argparse.Namespace, plan: Plan, machine: Machine) -> int:
    """Print the best layouts of a recipe's model on a cluster."""
    from weft.estimate.forecast_text import render_search
    from weft.estimate.search import render_recipe, search

    def show_status(text: str) -> None:
        if not options.json and sys.stderr.isatty():
            line = f"\r\033[K{escape_controls(text)}"
            print(line, end="", file=raw_stream(sys.stderr), flush=True)

    result = search(plan, machine, log=show_status)
    show_status("")
    if options.json:
        print(json.dumps(result.to_dict(), indent=2))
    else:
        print(render_search(result))
    if options.write and result.winner:
        text = render_recipe(
            result, plan.job, options.recipe, options.cluster or plan.job.run.cluster
        )
        write_file(Path(options.write), text)
        if not options.json:
            print(f"\nlayout {result.best.index(result.winner) + 1} is in {options.write}")
    return 0 if result.winner else FAILED


def verify(options: argparse.Namespace) -> int:
    """Compare gradients of a small model in the recipe's layout and in one process."""
    from weft.monitor.terminal import quiet_console
    from weft.plan.resolve import MAX_CPU_RANKS
    from weft.tools.verify import read_recipe, verify

    problems = list(options.problems)
    ranks = parse_integer("--ranks", options.ranks, 2, MAX_CPU_RANKS, problems)
    default = "3" if options.fuzz is None else "2"
    steps = parse_integer("--steps", options.steps or default, 1, 1000, problems)
    console = quiet_console(sys.stdout, quiet=options.json)

    def log(text: str) -> None:
        console.print(text, soft_wrap=True)

    if options.fuzz is not None:
        return fuzz(options, ranks, steps, problems, log)
    for name in ("minutes", "log"):
        if (value := getattr(options, name)) is not None:
            problems.append(ConfigError(f"--{name}", str(value), "needs --fuzz"))
    if options.recipe is None:
        remedy = f"use {recipe_names()[0]}, or --fuzz 100"
        raise InvalidConfig([*problems, ConfigError("RECIPE", MISSING, "is missing", remedy)])
    resume = parse_layout(options.resume_layout or "", problems)
    report = verify(
        read_recipe(options.recipe, options.overrides, problems),
        ranks=ranks,
        steps=steps,
        keep=[name for name, _ in options.overrides],
        resume=resume,
        log=log,
    )
    if options.json:
        print(report.to_json())
    return 0 if report.holds else FAILED


def fuzz(
    options: argparse.Namespace,
    ranks: int,
    steps: int,
    problems: list[ConfigError],
    log: Callable[[str], None],
) -> int:
    """Verify random jobs."""
    count = parse_integer("--fuzz", options.fuzz, 1, 10**6, problems)
    seed = parse_integer("--seed", options.seed, 0, 10**9 - 1, problems)
    minutes = parse_integer("--minutes", options.minutes or "1", 1, 10**5, problems)
    if options.recipe not in (None, "demo"):
        rule, remedy = "cannot be used with --fuzz, which draws its jobs", "remove it"
        problems.append(ConfigError("RECIPE", options.recipe, rule, remedy))
    if options.resume_layout:
        rule, remedy = "cannot be used with --fuzz, which draws it", "remove it"
        problems.append(ConfigError("--resume-layout", options.resume_layout, rule, remedy))
    if problems:
        raise InvalidConfig(problems)
    from weft.tools.verify_fuzz import FAILURE_STATUSES, FuzzSettings, fuzz

    settings = FuzzSettings(seed, ranks, steps, dict(options.overrides))
    path = options.log or Path("runs") / f"verify-fuzz-{seed}.jsonl"
    result = fuzz(count, settings, path, minutes if options.minutes else 0, log)
    if options.json:
        print(json.dumps(result, indent=2))
    if result["interrupted"]:
        return INTERRUPTED
    return FAILED if any(result[status.replace(" ", "_")] for status in FAILURE_STATUSES) else 0


def parse_layout(text: str, problems: list[ConfigError]) -> list[tuple[str, str]]:
    """Parse ``key=value,...``; a value in brackets may have commas."""
    pairs = []
    for part in re.split(r",(?=[a-z_]+\.[a-z0-9_]+=)", text) if text else []:
        name, equals, value = part.partition("=")
        if not equals:
            rule, remedy = (
                "is not KEY=VALUE,...",
                "write for example parallel.tp=2,activation_checkpoint.mode=full",
            )
            problems.append(ConfigError("--resume-layout", text, rule, remedy))
        pairs.append((name, value))
    return pairs


def compare(options: argparse.Namespace) -> int:
    """Compare variants by repeated runs, or by their plans."""
    from weft.monitor.terminal import quiet_console
    from weft.tools.comparison_dir import default_dir
    from weft.tools.comparison_result import ComparisonSettings
    from weft.tools.experiment import compare
    from weft.tools.variants import (
        parse_margin,
        parse_price,
        parse_vary,
        prepare_variant,
        read_variants,
    )

    problems = list(options.problems)
    repeats = parse_integer("--repeat", options.repeat, 1, 1000, problems)
    margin, relative = parse_margin(options.margin, problems)
    price = parse_price(options.price, problems)
    if options.cluster and not options.plan_only:
        rule = "needs --plan-only, because runs use this machine"
        problems.append(ConfigError("--cluster", options.cluster, rule, "add --plan-only"))
    if not options.recipes:
        problems.append(ConfigError("RECIPE", MISSING, "is missing", f"use {recipe_names()[0]}"))
    vary = [pair for text in options.vary for pair in parse_vary(text, problems)]
    console = quiet_console(sys.stdout, quiet=options.json)

    def log(text: str) -> None:
        console.print(text, soft_wrap=True)

    request = (options.recipes, vary, options.overrides, problems)
    if options.plan_only:
        from weft.tools.planned_comparison import compare_plans

        document, num_planned = compare_plans(*request, options.cluster, price, options.out, log)
        if options.json:
            print(json.dumps(document, indent=2))
        return 0 if num_planned > 1 else FAILED
    variants = read_variants(*request, partial(prepare_variant, options.out or "runs"))
    directory = Path(options.out) if options.out else default_dir(variants)
    settings = ComparisonSettings(repeats, margin, relative, price)
    result, num_signals = compare(directory, variants, settings, log)
    log(f"\n{result.text()}\n\nall runs are in {directory}")
    if options.json:
        print(json.dumps(result.document, indent=2))
    if num_signals:
        print("interrupted; the same command resumes the trial", file=sys.stderr)
        return REQUEUE if num_signals == 1 else INTERRUPTED
    return 0 if result.comparisons else FAILED


def check_file(option: str, path: Path, problems: list[ConfigError]) -> None:
    """Add an error to ``problems`` if an option's file cannot be created."""
    if not path.parent.is_dir():
        problems.append(
            ConfigError(
                option,
                str(path),
                "is in a directory that does not exist",
                "create the directory first",
            )
        )
    elif path.is_dir():
        problems.append(ConfigError(option, str(path), "is a directory", "name a file in it"))


def write_file(path: Path, content: str | bytes) -> None:
    """Write the file of an option atomically.

    Raises:
        WeftError: if the file cannot be written.
    """
    from weft.config.files import replace_bytes

    try:
        replace_bytes(path, content.encode() if isinstance(content, str) else content)
    except OSError as error:
        raise WeftError(f"{path}: cannot be written: {error.strerror}") from error


def parse_integer(name: str, text: str, low: int, high: int, problems: list[ConfigError]) -> int:
    """Parse an option's integer; if it is not in [low, high], add an error."""
    if text.isdecimal() and len(text) < 10 and low <= int(text) <= high:
        return int(text)
    problems.append(ConfigError(name, text, f"must be an integer between {low} and {high}"))
    return low


def report(options: argparse.Namespace) -> int:
    """Render the page of one or several runs."""
    from weft.monitor.run_reader import RunReader, is_run_dir, run_dir_error
    from weft.tools.report.page import REPORT_FILE
    from weft.tools.report.run_report import report_page

    run_dirs: list[Path] = options.runs
    out: Path = options.out or (
        run_dirs[0] / REPORT_FILE if len(run_dirs) == 1 else Path(REPORT_FILE)
    )
    problems = [run_dir_error(run) for run in run_dirs if not is_run_dir(run)]
    if options.out:
        check_file("--out", out, problems)
    if problems:
        raise InvalidConfig(problems)
    runs = [RunReader(run) for run in run_dirs]
    from weft.tools.report.report_sections import prediction_sections

    write_file(out, report_page(runs, appendix=prediction_sections(runs)))
    print(out)
    return 0


def generate(options: argparse.Namespace) -> int:
    """Print prompts and their continuations; stream a single one."""
    from weft.cluster.respawn import run_on_all_ranks
    from weft.tools.generate import (
        Prompt,
        Sampling,
        generate,
        load_chat_format,
        make_sequences,
        read_prompts,
    )
    from weft.tools.inference_model import find_checkpoint, load_model, plan_inference
    from weft.train.setup import Rank

    problems = list(options.problems)
    prompts: list[Prompt] = [
        os.fsencode(text).decode("utf-8", "replace") for text in options.prompt
    ]
    if options.prompts:
        prompts += read_prompts(options.prompts, problems, options.chat)
    if options.chat and not prompts and not problems:
        problems.append(
            ConfigError("--chat", MISSING, "needs a prompt", "add --prompt or --prompts")
        )
    names = ("max_tokens", "repetition_penalty", "temperature", "top_k", "top_p", "min_p", "seed")
    values = {name: getattr(options, name) for name in names}
    sampling = Sampling(**values, stop=tuple(filter(None, options.stop)))
    problems += sampling.problems()
    if isinstance(stdout := raw_stream(sys.stdout), io.TextIOWrapper):
        stdout.reconfigure(errors="backslashreplace")  # a terminal that is not UTF-8
    checkpoint = find_checkpoint(options.checkpoint.resolve())
    allowed = ["parallel.", "precision.compute_dtype", "run.device"]
    allowed += ["data.chat_template"] * options.chat
    _job, plan = plan_inference(
        checkpoint, options.overrides, problems, allowed, for_generation=True
    )
    template = dict(options.overrides).get("data.chat_template", "auto")
    chat_format = load_chat_format(checkpoint, template if options.chat else None)

    def run(rank: Rank) -> None:
        model = load_model(checkpoint, plan, rank)

        def write(*texts: str, end: str = "\n") -> None:
            if rank.rank == 0:
                # A file or pipe gets the generated text unescaped.
                out = sys.stdout if sys.stdout.isatty() else raw_stream(sys.stdout)
                print(*texts, end=end, flush=True, file=out)

        is_streaming = len(prompts) < 2 and not options.json
        if is_streaming and not options.chat:
            write(*map(str, prompts), end="")
        for first in range(0, max(1, len(prompts)), options.batch):
            batch = prompts[first : first + options.batch] or [""]
            sequences = make_sequences(batch, chat_format, sampling, first)
            for _, text in generate(model, chat_format, sequences, sampling):
                if is_streaming:
                    write(text, end="")
            separator = "\n" if options.chat else ""
            for each in [] if is_streaming else sequences:
                shown = f"{each.prompt}{separator}{each.text}\n---"
                write(json.dumps(each.to_dict()) if options.json else shown)
        if is_streaming:
            write()

    return run_on_all_ranks(plan, options.words, run)


def evaluate(options: argparse.Namespace) -> int:
    """Print validation losses, or scores of tasks."""
    from dataclasses import asdict

    from weft.cluster.preparing import show_progress
    from weft.cluster.respawn import load_eval_data, prepare_eval_data, run_on_all_ranks
    from weft.monitor.terminal import quiet_console
    from weft.tools.evaluate import ALL_SEQUENCES, evaluate_sources
    from weft.tools.generate import load_chat_format
    from weft.tools.inference_model import find_checkpoint, load_model, plan_inference
    from weft.tools.multiple_choice import read_task, score_task
    from weft.train.environment import is_launched_rank
    from weft.train.setup import Rank

    problems, tasks = list(options.problems), []
    for path in options.task:
        try:
            tasks.append(read_task(path))
        except InvalidConfig as error:
            problems += error.problems
    checkpoint = find_checkpoint(options.checkpoint.resolve())
    allowed = ["parallel.", "precision.compute_dtype", "run.device"]
    if not tasks:
        allowed += ["pipeline.", "data.", "train.seq_len", "train.microbatch_size"]
        allowed += ["train.eval_sequences"]
    job, plan = plan_inference(
        checkpoint, options.overrides, problems, allowed, for_generation=bool(options.task)
    )
    keys = {name for name, _ in options.overrides}
    is_own_data = not keys & {"data.path", "data.mixture"}
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
                continue
            print(name)
            for key, value in numbers.items():
                if isinstance(value, int | float):
                    shown = f"{value:,}" if isinstance(value, int) else f"{value:.4f}"
                    print(f"  {key:<16}{shown}")

    return run_on_all_ranks(plan, options.words, run)


def rollback(options: argparse.Namespace) -> int:
    """Make an earlier checkpoint the newest valid one."""
    from weft.cluster.start import rollback

    print(rollback(options.run.resolve(), options.step))
    return 0


def export(options: argparse.Namespace) -> int:
    """Export a checkpoint to Hugging Face's format."""
    from weft.cluster.preparing import show_progress
    from weft.monitor.terminal import quiet_console
    from weft.tools.hf_convert import export_checkpoint

    console = quiet_console(sys.stdout)
    with show_progress(console) as show:
        paths = (options.checkpoint.resolve(), options.out.absolute())
        summary = export_checkpoint(*paths, options.dtype, options.max_shard, show, options.adapter)
    console.print(summary, soft_wrap=True)
    return 0


def import_(options: argparse.Namespace) -> int:
    """Create a run from a Hugging Face model."""
    from weft.cluster.preparing import show_progress
    from weft.monitor.terminal import quiet_console
    from weft.tools.hf_convert import import_model

    console = quiet_console(sys.stdout)
    with show_progress(console) as show:
        source, run_dir = options.folder.absolute(), options.run_dir.absolute()
        summary = import_model(source, run_dir, show, options.force)
    recipe = shlex.quote(str(options.run_dir / "job.toml"))
    command = f"weft train {recipe} --data.path FILE_OR_DIRECTORY"
    console.print(f"{summary}\nnext:  {command}", soft_wrap=True)
    return 0


def data_prepare(options: argparse.Namespace) -> int:
    """Tokenize the data of a recipe or path, unless it is prepared already."""
    from weft.data.inspect import summarize_dataset

    print("\n".join(summarize_dataset(_prepare(options))))
    return 0


def data_inspect(options: argparse.Namespace) -> int:
    """Prepare the data of a recipe or path, and print what it contains."""
    from weft.data.inspect import inspect_dataset

    for line in inspect_dataset(_prepare(options), options.samples):
        print(line)
    return 0


def data_verify(options: argparse.Namespace) -> int:
    """Compare prepared stores with their manifests, byte by byte."""
    from rich.console import Console

    from weft.cluster.preparing import cache_dir, show_progress
    from weft.data.dataset import MIXTURE_FILE, list_mixture_stores
    from weft.data.prepared_cache import open_verified_store
    from weft.data.token_store import STORE_FILE

    job, _, problems = read_job(recipe_names()[0], options.overrides)
    problems = [*options.problems, *problems]
    rule, remedy = "has no effect on weft data verify", "remove it; it reads data.cache_dir only"
    others = {name: value for name, value in options.overrides if name != "data.cache_dir"}
    for problem in problems:
        others.pop(problem.key, None)
    problems += [ConfigError(name, value, rule, remedy) for name, value in others.items()]
    stores: list[Path] = []
    for path in options.stores:
        try:
            stores += list_mixture_stores(path) if (path / MIXTURE_FILE).is_file() else [path]
        except InvalidConfig as error:
            problems += error.problems
    rule = f"is not a prepared store, because it has no {STORE_FILE}"
    remedy = "create one with weft data prepare"
    problems += [
        ConfigError("STORE", str(path), rule, remedy)
        for path in stores
        if not (path / STORE_FILE).is_file()
    ]
    if problems:
        raise InvalidConfig(problems)
    damaged = 0
    with show_progress(Console(stderr=True)) as show:
        for path in stores:
            try:
                store = open_verified_store(path, cache_dir(job.data), show, force=True)
            except InvalidConfig as error:
                damaged += 1
                print("\n".join(str(problem) for problem in error.problems), flush=True)
                continue
            files = [file for split in store.splits for file in split.files]
            size = sum(file.size_bytes for file in files)
            what = f"{len(files):,} files, {size:,} bytes, unchanged since they were prepared"
            print(f"{path}: {what}", flush=True)
    if damaged:
        print(f"weft: {damaged} of {len(stores)} stores are damaged", file=sys.stderr)
    return FAILED if damaged else 0


def _prepare(options: argparse.Namespace) -> Dataset:
    from weft.cluster.preparing import cache_dir, show_progress
    from weft.data.prepare import prepare_data
    from weft.monitor.terminal import quiet_console

    is_recipe = options.what in recipe_names() or options.what.endswith(".toml")
    recipe = options.what if is_recipe else recipe_names()[0]
    path = [] if is_recipe else [("data.path", options.what)]
    job, _, problems = read_job(recipe, [*path, *options.overrides])
    problems = [*options.problems, *problems]
    if problems:
        raise InvalidConfig(problems)
    with show_progress(quiet_console(sys.stderr)) as show:
        return prepare_data(job.data, cache_dir(job.data), show)


def hang(options: argparse.Namespace) -> int:
    """Print which rank hangs, and where."""
    from weft.cluster.hang import inspect_run

    result = inspect_run(options.run.resolve())
    print(result.to_json() if options.json else result)
    return 0


def diff(options: argparse.Namespace) -> int:
    """Print where two runs differ."""
    from weft.tools.diff import compare_runs

    result = compare_runs(options.run_a, options.run_b, options.tolerance)
    print(result.to_json() if options.json else result)
    return FAILED if result.part else 0


def doctor(options: argparse.Namespace) -> int:
    """Print the findings about this machine."""
    import time

    from weft.cluster.doctor import collect_job_facts, format_report, to_json
    from weft.cluster.node_checks import run_checks

    began = time.monotonic()
    job, _, problems = read_job(options.recipe or recipe_names()[0], options.overrides)
    if problems := [*options.problems, *problems]:
        raise InvalidConfig(problems)
    facts = collect_job_facts(job, options.full)
    findings = run_checks(facts)
    result = (facts, findings, time.monotonic() - began)
    print(json.dumps(to_json(*result), indent=2) if options.json else format_report(*result))
    return FAILED if any(finding.severity == "bad" for finding in findings) else 0


def schema(options: argparse.Namespace) -> int:
    """Print the schema of a recipe, with the fields of weft's models."""
    from weft.config.schema import schema as job_schema
    from weft.models import FAMILIES

    tree = job_schema()
    for family in reversed(
        FAMILIES.values()
    ):  # the fields of llama, the default, come last and win
        fields = family.config.model_json_schema()["properties"]
        tree["$defs"]["ModelSection"]["properties"] |= {
            name: {k: v for k, v in field.items() if k != "default"}
            for name, field in fields.items()
        }
    print(json.dumps(tree, indent=2))
    return 0


# By their names in `weft.cli.arguments.COMMANDS`.
RUN: dict[str, Callable[[argparse.Namespace], int]] = {
    function.__name__.replace("_", " ").strip(): function
    for function in (
        *(train, launch, job_status, job_logs, job_cancel, plan, verify, compare, report),
        *(generate, evaluate, rollback, export, import_, data_prepare, data_inspect, data_verify),
        *(hang, diff, doctor, schema),
    )
}
