"""The commands.  Heavy imports stay inside them: ``weft --help`` must be quick."""

from __future__ import annotations

import argparse
import io
import json
import os
import shlex
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import weft
from weft.job import (
    MISSING,
    SECTIONS,
    InvalidJob,
    Job,
    Problem,
    WeftError,
    read_job,
    recipe_names,
)
from weft.launch import FAILED, INTERRUPTED, MISTAKE, REQUEUE

if TYPE_CHECKING:
    from weft.data.text import Text
    from weft.plan.resolve import Machine, Plan


def main(argv: list[str] | None = None) -> int:
    """Run one command; returns its exit status."""
    arguments = sys.argv[1:] if argv is None else argv
    if sys.stdout is None:  # closed by whoever started this; the ranks inherit it
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        os.set_inheritable(1, True)
        sys.stdout = os.fdopen(1, "w")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # where module:attribute of the user's own is looked for
    try:
        overrides: list[tuple[str, str]] = []
        problems: list[Problem] = []
        words, known = arguments, parser()
        if arguments and arguments[0] in OVERRIDDEN:
            arguments, overrides, problems = split_overrides(
                arguments, options_of(known, arguments[0])
            )
        given = argparse.Namespace(overrides=overrides, problems=problems, arguments=words)
        options = known.parse_args(arguments, given)
        return int(options.command(options))
    except InvalidJob as error:
        return reject(error)
    except WeftError as error:
        print(f"weft: {error}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # the reader has left: 'weft ... | head'
        return FAILED


def reject(error: InvalidJob) -> int:
    """Show every problem, one a line."""
    count = len(error.problems)
    print(f"weft: {count} problem{'s' * (count != 1)}, nothing was started:", file=sys.stderr)
    for problem in error.problems:
        print(f"  {problem}", file=sys.stderr)
    return MISTAKE


# Commands that take overrides.
OVERRIDDEN = (
    "train",
    "launch",
    "plan",
    "verify",
    "generate",
    "evaluate",
    "compare",
    "data",
    "doctor",
)


# Keys that may go without their section.
SHORT = {"nodes": "run.nodes", "rendezvous": "run.rendezvous"}
# And that may go without a value.
SWITCHES = {"preflight": ("resilience.preflight", "true")}


def options_of(known: argparse.ArgumentParser, command: str = "") -> dict[str, bool]:
    """The options of a command and of all below it, and whether a word follows."""
    found: dict[str, bool] = {}
    for action in known._actions:  # argparse has no public way to ask
        if isinstance(action, argparse._SubParsersAction):
            for name, sub in action.choices.items():
                found |= options_of(sub) if command in ("", name) else {}
        elif not command:
            found |= dict.fromkeys(action.option_strings, action.nargs != 0)
    return found


def split_overrides(
    arguments: list[str], options: Mapping[str, bool]
) -> tuple[list[str], list[tuple[str, str]], list[Problem]]:
    """Take the ``--section.key value`` and ``--section.key=value`` out of a command's arguments.

    Any other option that the command does not have is taken, too: it is reported with the rest.

    Args:
        options: of the command, and whether a word follows.

    Returns:
        The other arguments, the overrides, and a problem for each key without a value.
    """
    rest: list[str] = []
    overrides: list[tuple[str, str]] = []
    problems: list[Problem] = []
    own = {**options, "--": False}
    remaining = list(arguments)
    while remaining:
        word = remaining.pop(0)
        option = word.partition("=")[0]
        if not word.startswith("--") or option in own:
            rest.append(word)
            if "=" not in word and own.get(option) and remaining:
                rest.append(remaining.pop(0))
            continue
        name, equals, value = word.removeprefix("--").partition("=")
        name = name.replace("-", "_")
        name = SHORT.get(name, name)
        if not equals and name in SWITCHES:
            name, value = SWITCHES[name]
        elif not equals:
            if not remaining or remaining[0].startswith("--") or remaining[0] == "-h":
                problems.append(Problem(f"--{name}", MISSING, "needs a value"))
                continue
            value = remaining.pop(0)
        overrides.append((name, value))
    return rest, overrides, problems


class Parser(argparse.ArgumentParser):
    """Mistakes in one line instead of the whole usage."""

    def error(self, message: str) -> NoReturn:
        print(f"weft: {message}; see '{self.prog} --help'", file=sys.stderr)
        sys.exit(MISTAKE)


def parser() -> Parser:
    """The command line, without the ``--section.key`` overrides."""
    top = Parser(prog="weft", description=weft.__doc__, allow_abbrev=False)
    top.add_argument("--version", action="version", version=f"weft {weft.__version__}")
    commands = top.add_subparsers(title="commands", required=True, metavar="COMMAND")

    def add(name: str, command: Callable[[argparse.Namespace], int], text: str) -> Parser:
        sub: Parser = commands.add_parser(
            name,
            help=text,
            description=text,
            allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        sub.set_defaults(command=command)
        return sub

    sub = add("train", train, "Train a model: start its processes here, or join a launcher's.")
    recipes = ", ".join(recipe_names())
    sub.add_argument(
        "recipe", metavar="RECIPE", help=f"a shipped recipe ({recipes}) or a TOML file"
    )
    sub.add_argument(
        "--dry-run", action="store_true", help="check and show the plan, start nothing"
    )
    sub.add_argument(
        "--force", action="store_true", help="start though the planner says that it will not fit"
    )
    sub.epilog = keys_help()

    sub = add("launch", launch, "Have a cluster's nodes train a recipe; ask after it, or stop it.")
    sub.add_argument(
        "what",
        metavar="RECIPE|status|logs|stop",
        help=f"a shipped recipe ({recipes}) or a TOML file; or what to do about RUN",
    )
    sub.add_argument("run", metavar="RUN", nargs="?", type=Path, help="folder of a run")
    sub.add_argument("--on", help="kind of cluster: slurm, kubernetes, sagemaker or skypilot")
    sub.add_argument(
        "--dry-run", action="store_true", help="print the script or manifest, hand in nothing"
    )
    sub.add_argument("--follow", action="store_true", help="of logs: until the job has ended")
    sub.epilog = LAUNCH_HELP

    sub = add("plan", plan, "Show what a recipe does on a cluster: no GPU needed, nothing started.")
    sub.add_argument(
        "recipe",
        metavar="RECIPE",
        nargs="?",
        help=f"a shipped recipe ({recipes}) or a TOML file",
    )
    sub.add_argument(
        "--cluster",
        metavar="NxMxNAME",
        help="nodes x devices x name, such as 64x8xH100, or local (default: run.cluster)",
    )
    shown = sub.add_mutually_exclusive_group()
    shown.add_argument("--rank-map", action="store_true", help="show which rank is where instead")
    shown.add_argument("--search", action="store_true", help="rank other layouts of the model")
    shown.add_argument(
        "--calibrate", metavar="RUN", help="learn this device's speed from a finished run's folder"
    )
    sub.add_argument("--json", action="store_true", help="print one JSON object instead")
    sub.add_argument("--report", metavar="FILE", help="also write a page of pictures (HTML)")
    sub.add_argument("--write", metavar="FILE", help="with --search: the winner as a recipe")
    sub.epilog = PLAN_HELP

    sub = add("verify", verify, "Prove that a recipe's layout trains what one process would.")
    sub.add_argument(
        "recipe", metavar="RECIPE", help=f"a shipped recipe ({recipes}) or a TOML file"
    )
    sub.add_argument("--ranks", default="8", help="at most so many processes, from 2 (8)")
    sub.add_argument("--steps", default="3", help="optimizer steps (3)")
    sub.add_argument("--json", action="store_true", help="print one JSON object instead")
    sub.epilog = VERIFY_HELP

    sub = add("compare", compare, "Run, or only plan, variants of a recipe; tell which is better.")
    sub.add_argument(
        "recipes", metavar="RECIPE", nargs="*", help=f"shipped recipes ({recipes}) or TOML files"
    )
    sub.add_argument(
        "--vary",
        metavar="KEY=A,B",
        action="append",
        default=[],
        help="values of a key, each a variant; several times: every combination",
    )
    sub.add_argument("--repeat", default="3", help="runs of each variant (3)")
    sub.add_argument(
        "--margin", default="0.5%", help="losses that close are equivalent: 0.5%%, or nats (0.5%%)"
    )
    sub.add_argument("--price", help="of a device's hour, to tell what a billion tokens cost")
    sub.add_argument("--out", metavar="FOLDER", help="of all the runs (runs/compare-...)")
    sub.add_argument("--plan-only", action="store_true", help="predict all, run nothing")
    sub.add_argument(
        "--cluster", metavar="NxMxNAME", help="with --plan-only: as 'weft plan' has it"
    )
    sub.add_argument("--json", action="store_true", help="print one JSON object instead")
    sub.epilog = COMPARE_HELP

    sub = add("report", report, "Write one page that shows runs, and opens without a network.")
    sub.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="folder of a run")
    sub.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help="the page (default: report.html, in the run's folder or, of several runs, here)",
    )

    sub = add("generate", generate, "Continue prompts with a trained model.")
    sub.add_argument("checkpoint", type=Path, help="folder of a run, or of one of its checkpoints")
    sub.add_argument(
        "--prompt",
        action="append",
        default=[],
        help="text to continue, more than one if given again (default: a new document)",
    )
    sub.add_argument(
        "--prompts",
        type=Path,
        metavar="FILE",
        help="a prompt a line; of a .jsonl file a string, or an object with 'prompt'",
    )
    sub.add_argument(
        "--chat",
        action="store_true",
        help="prompts are what a user says: written by the run's chat template, or by the one at "
        "--data.chat_template; an object of --prompts may have 'messages'",
    )
    sub.add_argument("--batch", type=positive, default=8, help="prompts at a time (8)")
    sub.add_argument("--json", action="store_true", help="print an object a prompt, each on a line")
    sub.add_argument("--max-tokens", type=count, default=200, help="at most that many (200)")
    sub.add_argument("--temperature", type=not_negative, default=0.8, help="0: likeliest (0.8)")
    sub.add_argument("--top-k", type=count, default=50, help="among so many; 0: all (50)")
    sub.add_argument(
        "--top-p", type=not_negative, default=1.0, help="among the likeliest of that share (1)"
    )
    sub.add_argument(
        "--min-p", type=not_negative, default=0.0, help="at least that share of the likeliest's (0)"
    )
    sub.add_argument(
        "--repetition-penalty",
        type=not_negative,
        default=1.0,
        help="divides logits of what is there already (1)",
    )
    sub.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="end before it; several times"
    )
    sub.add_argument("--seed", type=count, default=0, help="of the first prompt's sampling (0)")
    sub.epilog = GENERATE_HELP

    sub = add("evaluate", evaluate, "Measure a trained model: its loss on text, or its answers.")
    sub.add_argument("checkpoint", type=Path, help="folder of a run, or of one of its checkpoints")
    sub.add_argument(
        "--task",
        type=Path,
        metavar="FILE",
        action="append",
        default=[],
        help="multiple choice, a YAML file as the Evaluation Harness has it; several times",
    )
    sub.add_argument("--batch", type=positive, default=8, help="of tasks, rows at a time (8)")
    sub.add_argument("--json", action="store_true", help="print an object a line instead")
    sub.epilog = EVALUATE_HELP

    sub = add("rollback", rollback, "Let a run go on from an earlier checkpoint.")
    sub.add_argument("run", type=Path, help="folder of the run")
    sub.add_argument("step", type=count, help="of the checkpoint; 0: from the beginning")
    sub.epilog = (
        "later checkpoints stay until the run has come past them, but do not count any more"
    )

    sub = add("export", export, "Write a checkpoint as a folder that Hugging Face's tools load.")
    sub.add_argument("checkpoint", type=Path, help="folder of a run, or of one of its checkpoints")
    sub.add_argument(
        "out", type=place, metavar="OUT", help="folder, or s3://bucket/prefix, to make"
    )
    sub.add_argument("--dtype", default="float32", help="float32, bfloat16 or float16 (float32)")
    sub.add_argument("--max-shard", default="5GB", help="largest file (5GB)")
    sub.add_argument(
        "--adapter", action="store_true", help="of a LoRA run, only the adapters, as PEFT has them"
    )

    sub = add("import", import_, "Make a run of a Hugging Face model, to train it further.")
    sub.add_argument(
        "folder",
        type=place,
        help="or s3://bucket/prefix, with config.json, safetensors and tokenizer.json",
    )
    sub.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="folder to make")
    sub.add_argument(
        "--force", action="store_true", help="though the tokenizer is far smaller than the model's"
    )

    sub = add("data", data_prepare, "Tokenise data before a run needs them, or look into them.")
    what = sub.add_subparsers(title="what", required=True, metavar="WHAT")

    text = "Tokenise data once, for every run to come; goes on where it was interrupted."
    ready = what.add_parser("prepare", help=text, description=text, allow_abbrev=False)
    ready.set_defaults(command=data_prepare)
    text = "Tell how much there is, how long documents are, and show some."
    seen = what.add_parser("inspect", help=text, description=text, allow_abbrev=False)
    seen.add_argument("--samples", type=count, default=3, help="documents to show (3)")
    seen.set_defaults(command=data_inspect)
    for each in (ready, seen):
        each.add_argument("what", metavar="PATH|RECIPE", help="data, or a recipe that names them")
        each.formatter_class = argparse.RawDescriptionHelpFormatter
        each.epilog = DATA_HELP

    sub = add("debug", debug_hang, "Find out where a run hangs, or where two runs part.")
    what = sub.add_subparsers(title="what", required=True, metavar="WHAT")

    text = "Say which rank stands still where, and who waits for it; ends nobody."
    hang = what.add_parser("hang", help=text, description=text, allow_abbrev=False)
    hang.add_argument("run", type=Path, help="folder of the run")
    hang.add_argument("--json", action="store_true", help="print one JSON object instead")
    hang.set_defaults(command=debug_hang)

    text = "Say at which step, and in which layer, two runs part."
    diff = what.add_parser("diff", help=text, description=text, allow_abbrev=False)
    diff.add_argument("run_a", type=Path, help="folder of a run")
    diff.add_argument("run_b", type=Path, help="folder of another one")
    diff.add_argument(
        "--tolerance",
        type=not_negative,
        default=1e-4,
        help="relative difference that is still rounding (1e-4)",
    )
    diff.add_argument("--json", action="store_true", help="print one JSON object instead")
    diff.epilog = "exit status: 0 they agree within the tolerance; 1 they part; 2 not comparable"
    diff.set_defaults(command=debug_diff)

    sub = add(
        "doctor", doctor, "Look at this machine: is it fit to train, and as fast as it should?"
    )
    sub.add_argument(
        "recipe", metavar="RECIPE", nargs="?", help="whose folders, store and nodes are looked at"
    )
    sub.add_argument("--full", action="store_true", help="every pair of GPUs, and larger files")
    sub.add_argument("--json", action="store_true", help="print one JSON object instead")
    sub.epilog = DOCTOR_HELP

    add("schema", schema, "Print the JSON Schema of a recipe, for editors.")
    return top


DATA_HELP = """\
  weft data prepare my-recipe.toml --data.path 'web/*.jsonl.zst'
  weft data prepare s3://bucket/web --data.tokenizer tokenizer.json
  weft data inspect hf://org/name:config@train --data.field content

The keys of [data] are overridden as --data.key value; 'weft train --help' lists them, and
docs/data.md tells what data may be."""


LAUNCH_HELP = """\
What is handed in starts 'weft train' with the same words on every node; it is shown, and kept in
the run's folder.  A job that is stopped before its time limit saves, comes back and goes on.

  weft launch llama3-8b --on slurm --nodes 4 --run.cluster 4x8xH100 --launch.time 12:00:00
  weft launch mine.toml --on slurm --nodes 2:8 --run.cluster 8x8xH100 \\
    --launch.options partition=gpu,account=mine --dry-run
  weft launch status runs/mine
  weft launch logs runs/mine --follow
  weft launch stop runs/mine

--nodes N asks for N nodes, MIN:MAX for as many as there are; run.cluster tells what a node has
(--run.device cpu: no GPUs).  Any key is overridden as --section.key value, those of [launch] say
what else is asked for; 'weft train --help' lists them."""


PLAN_HELP = """\
One rank of each stage runs a step of the recipe's model, by the code that trains, on tensors that
have shapes but no memory.  From that come memory, FLOPs and everything that ranks say to each
other; docs/planner.md tells how they are priced, and how far predictions are from published runs.

  weft plan llama3-405b --cluster 64x8xh100
  weft plan llama3-70b --cluster 32x8xh200 --search --write best.toml

Any key is overridden as --section.key value; 'weft train --help' lists them."""


GENERATE_HELP = """\
Each prompt is sampled by a seed of its own, --seed plus its number from 0, whatever --batch is.

  weft generate runs/demo --prompt 'class ' --prompt 'def ' --temperature 0
  weft generate runs/mine --prompts questions.jsonl --json --parallel.tp 2
  weft generate runs/tuned --chat --prompt 'What is 2 + 2?'

--parallel.tp and --parallel.dp_shard spread the model over that many ranks of this machine, or of
torchrun's, whatever layout it was trained in."""


EVALUATE_HELP = """\
Without --task it is the loss on all of the run's held-out text, or on all of another text with
--data.path; --train.eval_sequences takes that many sequences only, evenly spread.

  weft evaluate runs/demo
  weft evaluate runs/mine --data.path book.txt --parallel.dp_shard 2 --json
  weft evaluate runs/mine --task questions.yaml --parallel.tp 2

The layout is that of this command: one process unless degrees are given.  With --task these are
parallel.tp and parallel.dp_shard; else any."""


VERIFY_HELP = """\
The recipe is shrunk to test size: few narrow layers, short rows, a small vocabulary, and at most
--ranks processes on this machine's CPU.  What makes its layout is kept: every axis of more than one
rank where there are ranks enough, schedule and stages, microbatches, context method, resharding,
tied embeddings, grouped heads.  No text and no GPU is needed.  Both train on the same noise from
the same weights, by the code that trains, in float32; losses, gradient norms and every gradient
must agree within 1e-4.  If something does not, the answer tells where it departs first.

  weft verify llama3-405b
  weft verify mine.toml --parallel.tp 2 --parallel.schedule ZBVZeroBubble --ranks 4

Any key is overridden as --section.key value; 'weft train --help' lists them.  These are honoured
if given so, and replaced otherwise: --compile.enable true, --precision.compute bfloat16 (within
5e-2 then), --precision.float8 tensorwise (within 1e-1: where a number falls on the edge between two
of float8, the smallest difference is a large one).

exit status: 0 the layout holds; 1 it does not, or a rank failed; 2 a mistake in the recipe"""


COMPARE_HELP = """\
Each variant is trained --repeat times, as runs of their own below --out; their order is reversed
from repeat to repeat, and each repeat has another seed, the same for all variants.  The first
variant is what the others are compared with.  Interrupted, the same command goes on; with a higher
--repeat it adds runs.  docs/comparing.md tells what is measured, and what the verdict means.

  weft compare demo --vary optim.lr=1e-3,3e-3
  weft compare a.toml b.toml --repeat 5 --train.steps 200
  weft compare llama3-8b --vary parallel.tp=1,2 --vary remat.kind=full,selective \\
    --plan-only --cluster 2x8xH100 --price 2.5

The runs write no checkpoint but the last and no report of their own, unless --checkpoint.interval
or --observe.report says otherwise; report.html in the comparison's folder shows all of it.
Any key is overridden for all variants as --section.key value; 'weft train --help' lists them.

exit status: 0 compared; 1 fewer than two variants could be; 2 a mistake in what was asked;
75 interrupted, the same command goes on; 130 interrupted twice"""


DOCTOR_HELP = """\
Devices, drivers, links, adapters, variables, limits, folders: some seconds, and nothing is changed.

  weft doctor
  weft doctor --checkpoint.dir s3://bucket/run-7 --checkpoint.local /dev/shm/$USER
  srun --nodes 2 --ntasks-per-node=1 weft doctor               also clocks, and versions, of all

'weft train RECIPE --preflight' does it on every node before its ranks start.  Any
key may be given as --section.key value; run.dir, checkpoint.dir, checkpoint.local, data.cache,
run.nodes, run.rendezvous and run.device count.  docs/doctor.md tells what is looked at.

exit status: 0 nothing bad; 1 something bad; 2 a mistake in what was asked"""


def count(text: str) -> int:
    """A whole number from 0."""
    if not text.isdecimal() or int(text[:20]) >= 2**63:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 0")
    return int(text)


def place(text: str) -> Path:
    """A folder, or an object store's URL."""
    from weft.checkpoint.storage import open_folder

    return open_folder(text)


def positive(text: str) -> int:
    """A whole number from 1."""
    if (number := count(text)) == 0:
        raise argparse.ArgumentTypeError("0 is not a whole number from 1")
    return number


def not_negative(text: str) -> float:
    """A number from 0."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0")
    return value


def keys_help() -> str:
    """Every key with its default and meaning."""
    lines = ["keys, each of which the command line overrides as --section.key value:"]
    for name, section in SECTIONS.items():
        lines.append("")
        for key, field in section.model_fields.items():
            lines.append(
                f"  {f'{name}.{key}':<30} {json.dumps(field.default):<16} {field.description}"
            )
        if section.model_config["extra"] == "allow":
            lines.append(f"  {f'{name}.<field>':<30} {'':<16} any field of the configuration")
    return "\n".join(lines)


# --------------------------------------------------------------------------- the commands


def train(options: argparse.Namespace) -> int:
    """Check everything, prepare the text, then run the ranks."""
    if "RANK" not in os.environ:  # what is worth a warning in C++, the launcher says itself
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    from weft.launch.start import join, start
    from weft.observe.terminal import quiet_console
    from weft.train.check import prepare_job
    from weft.train.setup import joined
    from weft.train.where import speaks

    job, base, plan = prepare_job(options.recipe, options.overrides, options.problems)
    if options.dry_run:
        print(plan.to_json())
        return 0
    if joined():
        join(job, base, plan, options.recipe, options.force)
    console = quiet_console(sys.stdout, quiet=not speaks(os.environ))
    return start(job, base, plan, options.recipe, console, options.force)


def launch(options: argparse.Namespace) -> int:
    """Hand a recipe in to a cluster, or look after a run that was."""
    from weft.launch.submit import Launched, cluster, request, submit

    problems, doing = list(options.problems), options.what in ("status", "logs", "stop")
    if doing:
        problems += (Problem(key, value, "is not for this") for key, value in options.overrides)
        if options.run is None:
            rule = "is missing: the folder of the run"
            problems.append(Problem("RUN", MISSING, rule))
    elif options.run is not None:
        remedy = f"did you mean 'weft launch status {options.run}'?"
        problems.append(Problem("RUN", str(options.run), "is only for status, logs, stop", remedy))
    if options.follow and options.what != "logs":
        problems.append(Problem("--follow", True, "is for weft launch logs"))
    if doing:
        if problems:
            raise InvalidJob(problems)
        run = Launched.of(options.run)
        if options.what == "logs":
            for line in run.logs(options.follow):
                print(line, flush=True)
        else:
            print(
                f"{run.on} job {run.id}: {run.status()}" if options.what == "status" else run.stop()
            )
        return 0
    from weft.train.setup import detect_machine

    asked = request(options.on, options.what, options.overrides, problems, detect_machine)
    text = cluster(options.on).render(asked)
    print(text)
    if wrong := cluster(options.on).check(text):
        raise InvalidJob(Problem(f"--on {options.on}", MISSING, rule) for rule in wrong)
    if not options.dry_run:
        id = submit(options.on, asked, text)
        next = f"weft launch status {shlex.quote(str(asked.run_dir))}"
        print(f"handed in as {options.on} job {id}: {next}")
    return 0


def plan(options: argparse.Namespace) -> int:
    """Print what a recipe does on a cluster."""
    from weft.plan.report import machine_text, map_of_ranks, plan_recipe
    from weft.train.setup import detect_machine

    problems = list(options.problems)
    if options.calibrate:
        return calibrate(options)
    if options.recipe is None:
        problems.append(Problem("RECIPE", MISSING, "is missing", f"use {recipe_names()[0]}"))
        raise InvalidJob(problems)
    if options.write and not options.search:
        problems.append(Problem("--write", options.write, "is for --search", "add --search"))
    if options.rank_map and options.json:
        problems.append(Problem("--rank-map", True, "is a drawing", "leave out --json"))
    job, plan, machine = plan_recipe(
        options.recipe, options.overrides, problems, options.cluster, detect_machine
    )
    if options.rank_map:
        print(map_of_ranks(plan))
        return 0
    if options.search:
        return search(options, job, plan, machine)
    from weft.predict.advice import advise
    from weft.predict.forecast import device_of, forecast, to_json
    from weft.predict.pictures import page
    from weft.predict.report import screen

    device = device_of(plan, machine)
    seen = forecast(job, plan, machine, device)
    if options.report:
        where = machine_text(plan, machine)
        Path(options.report).write_text(page(job, plan, seen, options.recipe, where), "utf-8")
    if options.json:
        print(to_json(plan, seen))
        return 0
    advice = [] if device is None else advise(job, plan, machine, device, seen)
    print(screen(job, plan, machine, options.recipe, seen, advice))
    return 0


def calibrate(options: argparse.Namespace) -> int:
    """Learn from a run, and print the errors before and after."""
    from weft.predict.calibrate import calibrate, read_run, save, told

    problems = list(options.problems)
    given = [*(f"--{key}" for key, _ in options.overrides), options.recipe, options.cluster]
    for word in filter(None, [*given, options.report, options.write]):
        rule, remedy = "does not go with --calibrate, which takes all from the run", "leave it out"
        problems.append(Problem(word, MISSING, rule, remedy))
    if problems:
        raise InvalidJob(problems)
    found = calibrate(read_run(Path(options.calibrate)))
    path = save(found)
    print(json.dumps(found.to_dict(), indent=2) if options.json else told(found, path))
    return 0


def search(options: argparse.Namespace, job: Job, plan: Plan, machine: Machine) -> int:
    """Print the best layouts of a recipe's model on a cluster."""
    from weft.predict.report import search_screen
    from weft.predict.search import search, written

    def tell(text: str) -> None:
        if not options.json and sys.stderr.isatty():
            print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)

    found = search(job, plan, machine, tell=tell)
    tell("")
    if options.json:
        print(json.dumps(found.to_dict(), indent=2))
    else:
        print(search_screen(found))
    if options.write and found.winner:
        text = written(found, job, options.recipe, options.cluster or job.run.cluster)
        Path(options.write).write_text(text, "utf-8")
        if not options.json:
            print(f"\nnumber {found.best.index(found.winner) + 1} is in {options.write}")
    return 0 if found.winner else FAILED


def verify(options: argparse.Namespace) -> int:
    """Train the recipe's layout and one process, both small, and compare them."""
    from weft.compare.verify import read_recipe, verify
    from weft.observe.terminal import quiet_console
    from weft.plan.resolve import MAX_CPU_WORKERS

    problems = list(options.problems)
    ranks = between("--ranks", options.ranks, 2, MAX_CPU_WORKERS, problems)
    steps = between("--steps", options.steps, 1, 1000, problems)
    job = read_recipe(options.recipe, options.overrides, problems)
    console = quiet_console(sys.stdout, quiet=options.json)
    report = verify(
        job,
        ranks=ranks,
        steps=steps,
        keep=[name for name, _ in options.overrides],
        say=lambda text: console.print(text, soft_wrap=True),
    )
    if options.json:
        print(report.to_json())
    return 0 if report.holds else FAILED


def compare(options: argparse.Namespace) -> int:
    """Train variants, or only plan them, and compare them."""
    from weft.compare.experiment import compare
    from weft.compare.folder import default_folder
    from weft.compare.result import Settings
    from weft.compare.variants import (
        parse_margin,
        parse_price,
        parse_vary,
        prepare,
        read_variants,
    )
    from weft.observe.terminal import quiet_console

    problems = list(options.problems)
    repeats = between("--repeat", options.repeat, 1, 1000, problems)
    margin, relative = parse_margin(options.margin, problems)
    price = parse_price(options.price, problems)
    if options.cluster and not options.plan_only:
        rule = "is for --plan-only: runs are started on this machine"
        problems.append(Problem("--cluster", options.cluster, rule, "add --plan-only"))
    if not options.recipes:
        problems.append(Problem("RECIPE", MISSING, "is missing", f"use {recipe_names()[0]}"))
    vary = [pair for text in options.vary for pair in parse_vary(text, problems)]
    console = quiet_console(sys.stdout, quiet=options.json)

    def say(text: str) -> None:
        console.print(text, soft_wrap=True)

    asked = (options.recipes, vary, options.overrides, problems)
    if options.plan_only:
        from weft.compare.planned import compare_plans

        found, able = compare_plans(*asked, options.cluster, price, options.out, say)
        if options.json:
            print(json.dumps(found, indent=2))
        return 0 if able > 1 else FAILED
    variants = read_variants(*asked, partial(prepare, options.out or "runs"))
    folder = Path(options.out) if options.out else default_folder(variants)
    result, stopped = compare(folder, variants, Settings(repeats, margin, relative, price), say)
    say(f"\n{result.text()}\n\neverything is in {folder}")
    if options.json:
        print(json.dumps(result.document, indent=2))
    if stopped:
        print("interrupted; the same command goes on with the trial", file=sys.stderr)
        return REQUEUE if stopped == 1 else INTERRUPTED
    return 0 if result.judged else FAILED


def between(name: str, text: str, least: int, most: int, problems: list[Problem]) -> int:
    """An option's whole number; a mistake is added to ``problems``."""
    if text.isdecimal() and len(text) < 10 and least <= int(text) <= most:
        return int(text)
    problems.append(Problem(name, text, f"must be a whole number from {least} to {most}"))
    return least


def report(options: argparse.Namespace) -> int:
    """Write the page of one run, or of several beside each other."""
    from weft.observe.files import replace_bytes
    from weft.observe.history import History, no_run
    from weft.observe.html import plotly
    from weft.observe.report import FILE, report_page

    folders: list[Path] = options.runs
    out: Path = options.out or (folders[0] / FILE if len(folders) == 1 else Path(FILE))
    problems = [no_run(folder) for folder in folders if not (folder / "job.toml").is_file()]
    if not out.parent.is_dir():
        problems.append(Problem("--out", str(out), "its folder does not exist", "make it first"))
    elif out.is_dir():
        problems.append(Problem("--out", str(out), "is a folder", f"use {out / FILE}"))
    if problems:
        raise InvalidJob(problems)
    plotly()  # it is missed before the seconds that a forecast takes
    runs = [History(folder) for folder in folders]
    from weft.predict.sections import sections

    page = report_page(runs, later=sections(runs))
    try:
        replace_bytes(out, page)
    except OSError as error:
        raise WeftError(f"{out}: cannot be written: {error.strerror}") from error
    print(out)
    return 0


def generate(options: argparse.Namespace) -> int:
    """Print the prompts and their continuations, one alone as it grows."""
    from weft.launch.again import on_every_rank
    from weft.train.generate import Prompt, Sampling, generate, read_prompts, rows_of, speech_of
    from weft.train.inference import find_checkpoint, lay_out, restore
    from weft.train.setup import Rank

    problems = list(options.problems)
    prompts: list[Prompt] = [
        os.fsencode(text).decode("utf-8", "replace") for text in options.prompt
    ]
    if options.prompts:
        prompts += read_prompts(options.prompts, problems, options.chat)
    if options.chat and not prompts and not problems:
        problems.append(Problem("--chat", MISSING, "answers prompts", "give --prompt or --prompts"))
    names = ("max_tokens", "repetition_penalty", "temperature", "top_k", "top_p", "min_p", "seed")
    chosen = {name: getattr(options, name) for name in names}
    sampling = Sampling(**chosen, stop=tuple(filter(None, options.stop)))
    problems += sampling.problems()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a terminal that is not UTF-8
    found = find_checkpoint(options.checkpoint.resolve())
    allowed = ["parallel.", "precision.compute", "run.device"]
    allowed += ["data.chat_template"] * options.chat
    job, plan = lay_out(found, options.overrides, problems, allowed, generating=True)
    given = dict(options.overrides).get("data.chat_template", "auto")
    speech = speech_of(found, given if options.chat else None)

    def run(rank: Rank) -> None:
        model = restore(found, job, plan, rank)

        def say(*texts: str, end: str = "\n") -> None:
            if rank.rank == 0:
                print(*texts, end=end, flush=True)

        growing = len(prompts) < 2 and not options.json
        if growing and not options.chat:
            say(*map(str, prompts), end="")
        for first in range(0, max(1, len(prompts)), options.batch):
            here = prompts[first : first + options.batch] or [""]
            rows = rows_of(here, speech, sampling, first)
            for _, piece in generate(model, speech, rows, sampling):
                if growing:
                    say(piece, end="")
            between = "\n" if options.chat else ""
            for row in [] if growing else rows:
                told = f"{row.prompt}{between}{row.text}\n---"
                say(json.dumps(row.to_dict()) if options.json else told)
        if growing:
            say()

    return on_every_rank(plan, options.arguments, run)


def evaluate(options: argparse.Namespace) -> int:
    """Print losses, or scores of tasks."""
    from dataclasses import asdict

    from weft.launch.again import on_every_rank, prepare_to_evaluate, text_to_evaluate
    from weft.observe.terminal import quiet_console
    from weft.train.evaluate import EVERY, losses_on
    from weft.train.generate import speech_of
    from weft.train.inference import find_checkpoint, lay_out, restore
    from weft.train.setup import Rank, joined
    from weft.train.tasks import read_task, score

    problems, tasks = list(options.problems), []
    for path in options.task:
        try:
            tasks.append(read_task(path))
        except InvalidJob as error:
            problems += error.problems
    found = find_checkpoint(options.checkpoint.resolve())
    allowed = ["parallel.", "precision.compute", "run.device"]
    if not tasks:
        allowed += ["pipeline.", "data.", "train.seq_len", "train.microbatch"]
        allowed += ["train.eval_sequences"]
    asking = bool(options.task)
    job, plan = lay_out(found, options.overrides, problems, allowed, generating=asking)
    given = {name for name, _ in options.overrides}
    own = not given & {"data.path", "data.mixture"}
    sequences = job.train.eval_sequences if "train.eval_sequences" in given else EVERY
    if not tasks and plan.world_size > 1 and not joined():  # mistakes are told by one process
        prepare_to_evaluate(found, job, own, quiet_console(sys.stderr))

    def run(rank: Rank) -> None:
        console = quiet_console(sys.stderr, quiet=rank.rank != 0)
        told: dict[str, dict[str, object]] = {}
        if tasks:
            model, speech = restore(found, job, plan, rank), speech_of(found)
            told = {task.name: asdict(score(task, model, speech, options.batch)) for task in tasks}
        else:
            text = text_to_evaluate(found, job, own, console, rank)
            # Another text was not trained on, neither its one split nor its other.
            losses = losses_on(found, job, plan, text, sequences, rank, whole=not own)
            told = {loss.name: loss.to_dict() for loss in losses}
        for name, numbers in told.items() if rank.rank == 0 else ():
            if options.json:
                print(json.dumps({"checkpoint": str(found.path), "name": name, **numbers}))
                continue
            print(name)
            for key, value in numbers.items():
                if isinstance(value, int | float):
                    shown = f"{value:,}" if isinstance(value, int) else f"{value:.4f}"
                    print(f"  {key:<16}{shown}")

    return on_every_rank(plan, options.arguments, run)


def rollback(options: argparse.Namespace) -> int:
    """Make an earlier checkpoint the newest one that counts."""
    from weft.launch.start import rollback

    print(rollback(options.run.resolve(), options.step))
    return 0


def export(options: argparse.Namespace) -> int:
    """Write a checkpoint for others."""
    from weft.launch.preparing import showing
    from weft.observe.terminal import quiet_console
    from weft.train.interchange import export_checkpoint

    console = quiet_console(sys.stdout)
    with showing(console) as show:
        paths = (options.checkpoint.resolve(), options.out.absolute())
        said = export_checkpoint(*paths, options.dtype, options.max_shard, show, options.adapter)
    console.print(said, soft_wrap=True)
    return 0


def import_(options: argparse.Namespace) -> int:
    """Make a run of what others have trained."""
    from weft.launch.preparing import showing
    from weft.observe.terminal import quiet_console
    from weft.train.interchange import import_model

    console = quiet_console(sys.stdout)
    with showing(console) as show:
        folder, run_dir = options.folder.absolute(), options.run_dir.absolute()
        said = import_model(folder, run_dir, show, options.force)
    again = shlex.quote(str(options.run_dir / "job.toml"))
    console.print(f"{said}\nnext:  weft train {again} --data.path FILE_OR_FOLDER", soft_wrap=True)
    return 0


def data_prepare(options: argparse.Namespace) -> int:
    """Tokenise what a recipe or path names, unless that was done before."""
    from weft.data.inspect import summary

    print("\n".join(summary(_prepared(options))))
    return 0


def data_inspect(options: argparse.Namespace) -> int:
    """Print what is in the data of a recipe or path, which are prepared for it."""
    from weft.data.inspect import inspect

    for line in inspect(_prepared(options), options.samples):
        print(line)
    return 0


def _prepared(options: argparse.Namespace) -> Text:
    from rich.console import Console

    from weft.data.prepare import prepare_text
    from weft.launch.preparing import cache_folder, showing

    named = options.what in recipe_names() or options.what.endswith(".toml")
    recipe = options.what if named else recipe_names()[0]
    given = [] if named else [("data.path", options.what)]
    job, _, problems = read_job(recipe, [*given, *options.overrides])
    problems = [*options.problems, *problems]
    if problems:
        raise InvalidJob(problems)
    with showing(Console(stderr=True)) as show:
        return prepare_text(job.data, cache_folder(job.data), show)


def debug_hang(options: argparse.Namespace) -> int:
    """Print which rank stands still where."""
    from weft.launch.hang import explain

    told = explain(options.run.resolve())
    print(told.to_json() if options.json else told)
    return 0


def debug_diff(options: argparse.Namespace) -> int:
    """Print where two runs part."""
    from weft.compare.diff import compare_runs

    found = compare_runs(options.run_a, options.run_b, options.tolerance)
    print(found.to_json() if options.json else found)
    return FAILED if found.part else 0


def doctor(options: argparse.Namespace) -> int:
    """Print what is good and bad about this machine."""
    import time

    from weft.launch.checks import examine
    from weft.launch.doctor import gather, screen, to_json

    began = time.monotonic()
    job, _, problems = read_job(options.recipe or recipe_names()[0], options.overrides)
    if problems := [*options.problems, *problems]:
        raise InvalidJob(problems)
    facts = gather(job, options.full)
    findings = examine(facts)
    told = (facts, findings, time.monotonic() - began)
    print(json.dumps(to_json(*told), indent=2) if options.json else screen(*told))
    return FAILED if any(finding.severity == "bad" for finding in findings) else 0


def schema(options: argparse.Namespace) -> int:
    """Print the recipe's schema with the fields of weft's own models."""
    from weft.job import schema as job_schema
    from weft.models import FAMILIES

    tree = job_schema()
    for family in reversed(FAMILIES.values()):  # llama, the default, has the last word
        fields = family.config.model_json_schema()["properties"]
        tree["$defs"]["ModelSection"]["properties"] |= {
            name: {k: v for k, v in field.items() if k != "default"}
            for name, field in fields.items()
        }
    print(json.dumps(tree, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
