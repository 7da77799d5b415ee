"""The arguments of each command, as a table, and the parser of the command line.

This module imports nothing heavy, because ``weft --help`` must be fast.  `weft.cli.main` has the
function of each command.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import weft
from weft.cluster import USAGE_ERROR
from weft.config.errors import MISSING, ConfigError
from weft.config.reader import recipe_names
from weft.config.schema import SECTIONS

# --------------------------------------------------------------------------- kinds of values


def count(text: str) -> int:
    """Parse an integer of at least 0."""
    if not text.isdecimal() or int(text[:20]) >= 2**63:
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer of at least 0")
    return int(text)


def directory(text: str) -> Path:
    """Parse a directory, or the URL of an object store."""
    from weft.checkpoint.storage import open_directory

    return open_directory(text)


def positive(text: str) -> int:
    """Parse an integer of at least 1."""
    if (number := count(text)) == 0:
        raise argparse.ArgumentTypeError("0 is not an integer of at least 1")
    return number


def not_negative(text: str) -> float:
    """Parse a number of at least 0."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least 0")
    return value


def keys_help() -> str:
    """Return every key with its default and description."""
    lines = ["keys; override them as --section.key value:"]
    for name, section in SECTIONS.items():
        lines.append("")
        for key, field in section.model_fields.items():
            lines.append(
                f"  {f'{name}.{key}':<30} {json.dumps(field.default):<16} {field.description}"
            )
        if section.model_config["extra"] == "allow":
            lines.append(
                f"  {f'{name}.<field>':<30} {'':<16} any field of the model's configuration"
            )
    return "\n".join(lines)


# --------------------------------------------------------------------------- the commands


@dataclass(frozen=True)
class Argument:
    """One argument of a command, as argparse's ``add_argument`` takes it."""

    name: str
    options: Mapping[str, Any]


def value(name: str, text: str, **options: Any) -> Argument:
    """Return a positional argument, or an option with a value."""
    return Argument(name, {"help": text} | options)


def several(name: str, text: str, **options: Any) -> Argument:
    """Return an option that may be repeated."""
    return value(name, text, action="append", default=[], **options)


def flag(name: str, text: str) -> Argument:
    """Return an option without a value."""
    return value(name, text, action="store_true")


@dataclass(frozen=True)
class Command:
    """The arguments of a command.

    Args:
        text: one-line summary.
        arguments: arguments in the order of the help; those in a list exclude each other.
        takes_keys: whether the command accepts ``--section.key value``.
    """

    text: str
    arguments: Sequence[Argument | list[Argument]] = ()
    takes_keys: bool = True


NAMES = ", ".join(recipe_names())
SHIPPED = f"a shipped recipe ({NAMES}) or a TOML file"
RECIPE = value("recipe", SHIPPED, metavar="RECIPE")
RUN = value("run", "run directory", type=Path, metavar="RUN")
CHECKPOINT = value("checkpoint", "run directory, or directory of a checkpoint", type=Path)
JSON = flag("--json", "print one JSON object instead")
DATA = value("what", "data, or a recipe that names it", metavar="PATH|RECIPE")
COMMANDS = {
    "train": Command(
        "Train a model: start its ranks here, or run as one rank of torchrun, Slurm or MPI.",
        [
            RECIPE,
            flag("--dry-run", "check the configuration and print the plan; start nothing"),
            flag("--force", "start even if the plan predicts that memory does not suffice"),
        ],
    ),
    "launch": Command(
        "Submit a recipe to a cluster.",
        [
            RECIPE,
            value("--on", "kind of cluster: slurm, kubernetes, sagemaker or skypilot"),
            flag("--dry-run", "print the script or manifest; submit nothing"),
        ],
    ),
    "job status": Command("Show the status of a submitted run.", [RUN], takes_keys=False),
    "job logs": Command(
        "Print the output of a submitted run.",
        [RUN, flag("--follow", "keep printing until the job ends")],
        takes_keys=False,
    ),
    "job cancel": Command("Cancel a submitted run.", [RUN], takes_keys=False),
    "plan": Command(
        "Predict memory and step time of a recipe on any cluster; needs no GPU.",
        [
            value("recipe", SHIPPED, metavar="RECIPE", nargs="?"),
            value(
                "--cluster",
                "NODESxDEVICESxNAME, such as 64x8xH100, or local (default: run.cluster)",
                metavar="NxMxNAME",
            ),
            [
                flag("--rank-map", "print the position of each rank in the device mesh"),
                flag("--search", "rank other layouts of the model by step time"),
                value(
                    "--calibrate",
                    "calibrate this device's speed from a finished run",
                    metavar="RUN",
                ),
            ],
            JSON,
            value("--report", "also write charts as an HTML page", metavar="FILE"),
            value("--write", "with --search: write the best layout as a recipe", metavar="FILE"),
        ],
    ),
    "verify": Command(
        "Verify that a layout computes the same gradients as one process.",
        [
            value("recipe", f"{SHIPPED}; none with --fuzz", metavar="RECIPE", nargs="?"),
            value("--ranks", "maximum number of processes, at least 2 (default: 8)", default="8"),
            value("--steps", "optimizer steps (default: 3; with --fuzz 2)"),
            value(
                "--resume-layout",
                "also save a checkpoint halfway and resume from it in this layout",
                metavar="KEY=VALUE,...",
            ),
            value("--fuzz", "verify N random jobs instead of a recipe", metavar="N"),
            value("--seed", "with --fuzz: seed of the jobs (default: 0)", default="0"),
            value("--minutes", "with --fuzz: start no job after M minutes", metavar="M"),
            value(
                "--log",
                "with --fuzz: results, one line per job (default: runs/verify-fuzz-SEED.jsonl)",
                type=Path,
                metavar="FILE",
            ),
            JSON,
        ],
    ),
    "compare": Command(
        "Compare variants of a recipe by repeated runs, or by their plans.",
        [
            value(
                "recipes", f"shipped recipes ({NAMES}) or TOML files", metavar="RECIPE", nargs="*"
            ),
            several(
                "--vary",
                "values of a key, one variant each; repeat for every combination",
                metavar="KEY=A,B",
            ),
            value("--repeat", "runs of each variant (default: 3)", default="3"),
            value(
                "--margin",
                "largest loss difference that counts as equivalent, in %% or nats (default: 0.5%%)",
                default="0.5%",
            ),
            value("--price", "price of a device hour, for the cost of a billion tokens"),
            value("--out", "directory of the runs (default: runs/compare-...)", metavar="DIR"),
            flag("--plan-only", "compare predictions, run nothing"),
            value("--cluster", "with --plan-only: as for weft plan", metavar="NxMxNAME"),
            JSON,
        ],
    ),
    "report": Command(
        "Render one or several runs as one self-contained HTML page.",
        [
            value("runs", "run directory", type=Path, metavar="RUN", nargs="+"),
            value(
                "--out",
                "output file (default: report.html in the run directory, or here for several runs)",
                type=Path,
                metavar="FILE",
            ),
        ],
        takes_keys=False,
    ),
    "generate": Command(
        "Generate text with a trained model.",
        [
            CHECKPOINT,
            several("--prompt", "prompt; repeatable (default: start of a document)"),
            value(
                "--prompts",
                "file with one prompt per line; .jsonl: a string, or an object with 'prompt'",
                type=Path,
                metavar="FILE",
            ),
            flag(
                "--chat",
                "format prompts as user messages with the chat template of the run or of "
                "--data.chat_template; an object in --prompts may have 'messages'",
            ),
            value("--batch", "batch size in prompts (default: 8)", type=positive, default=8),
            flag("--json", "print one JSON object per prompt"),
            value("--max-tokens", "maximum new tokens (default: 200)", type=count, default=200),
            value(
                "--temperature",
                "sampling temperature; 0: greedy (default: 0.8)",
                type=not_negative,
                default=0.8,
            ),
            value(
                "--top-k",
                "sample from the k most likely tokens; 0: off (default: 50)",
                type=count,
                default=50,
            ),
            value("--top-p", "nucleus sampling (default: 1, off)", type=not_negative, default=1.0),
            value(
                "--min-p",
                "minimum probability relative to the most likely token (default: 0, off)",
                type=not_negative,
                default=0.0,
            ),
            value(
                "--repetition-penalty",
                "repetition penalty (default: 1, off)",
                type=not_negative,
                default=1.0,
            ),
            several("--stop", "stop sequence, not printed; repeatable", metavar="TEXT"),
            value("--seed", "seed of the first prompt (default: 0)", type=count, default=0),
        ],
    ),
    "evaluate": Command(
        "Evaluate a trained model: its loss on text, or multiple-choice tasks.",
        [
            CHECKPOINT,
            several(
                "--task",
                "multiple-choice task, a YAML file of the LM Evaluation Harness; repeatable",
                type=Path,
                metavar="FILE",
            ),
            value(
                "--batch", "task batch size, in sequences (default: 8)", type=positive, default=8
            ),
            flag("--json", "print one JSON object per line instead"),
        ],
    ),
    "rollback": Command(
        "Resume a run from an earlier checkpoint.",
        [RUN, value("step", "step of the checkpoint; 0: from the beginning", type=count)],
        takes_keys=False,
    ),
    "export": Command(
        "Export a checkpoint as a Hugging Face model directory.",
        [
            CHECKPOINT,
            value("out", "new directory, or s3://bucket/prefix", type=directory, metavar="OUT"),
            value("--dtype", "float32, bfloat16 or float16 (default: float32)", default="float32"),
            value("--max-shard", "maximum file size (default: 5GB)", default="5GB"),
            flag("--adapter", "export only the adapters of a LoRA run, as PEFT does"),
        ],
        takes_keys=False,
    ),
    "import": Command(
        "Import a Hugging Face model as a run, to train it further.",
        [
            value(
                "folder",
                "directory, or s3://bucket/prefix, with config.json, safetensors, tokenizer.json",
                type=directory,
                metavar="DIR",
            ),
            value("run_dir", "new run directory", type=Path, metavar="RUN_DIR"),
            flag("--force", "accept a tokenizer far smaller than the model's vocabulary"),
        ],
        takes_keys=False,
    ),
    "data prepare": Command(
        "Tokenize data once for all runs; resumes where it was interrupted.", [DATA]
    ),
    "data inspect": Command(
        "Show the size of data, the lengths of its documents, and some of them.",
        [value("--samples", "documents to print (default: 3)", type=count, default=3), DATA],
    ),
    "data verify": Command(
        "Read prepared stores in full and compare them with their manifests.",
        [
            value(
                "stores",
                "directory of a prepared store, or of a mixture of stores",
                type=Path,
                metavar="STORE",
                nargs="+",
            )
        ],
    ),
    "hang": Command(
        "Find the hung rank, its stack, and the ranks blocked on it; ends no process.",
        [RUN, JSON],
        takes_keys=False,
    ),
    "diff": Command(
        "Find the first step and layer in which two runs differ.",
        [
            value("run_a", "run directory", type=Path),
            value("run_b", "another run directory", type=Path),
            value(
                "--tolerance",
                "relative difference that counts as rounding (default: 1e-4)",
                type=not_negative,
                default=1e-4,
            ),
            JSON,
        ],
        takes_keys=False,
    ),
    "doctor": Command(
        "Check that this machine is fit to train, and as fast as it should be.",
        [
            value(
                "recipe",
                "recipe whose directories, object store and nodes are checked",
                metavar="RECIPE",
                nargs="?",
            ),
            flag("--full", "also test every pair of GPUs, and larger files"),
            JSON,
        ],
    ),
    "schema": Command("Print the JSON Schema of a recipe, for editors.", takes_keys=False),
}
# Commands of two words, by the first.
GROUPS = {
    "data": "Tokenize data before a run, inspect or verify it.",
    "job": "Show the status or logs of a submitted run, or cancel it.",
}
KEYS = "Override any key as --section.key value; 'weft train --help' lists the keys."
DATA_HELP = """\
  weft data prepare my-recipe.toml --data.path 'web/*.jsonl.zst'
  weft data prepare s3://bucket/web --data.tokenizer tokenizer.json
  weft data inspect hf://org/name:config@train --data.text_field content

Override the keys of [data] as --data.key value; 'weft train --help' lists them.  docs/data.md
describes the kinds of data."""
# Text below the options in the help of a command.
BELOW = {
    "train": keys_help(),
    "launch": f"""\
weft prints what it submits, and keeps it in the run directory.  The job starts 'weft train' with
the same arguments on every node.  A job that reaches its time limit saves, and resumes when it is
scheduled again.

  weft launch llama3-8b --on slurm --nodes 4 --run.cluster 4x8xH100 --launch.time_limit 12:00:00
  weft launch mine.toml --on slurm --nodes 2:8 --run.cluster 8x8xH100 --run.dir runs/mine \\
    --launch.options partition=gpu,account=mine --dry-run
  weft job status runs/mine
  weft job logs runs/mine --follow
  weft job cancel runs/mine

--nodes N requests N nodes, MIN:MAX as many as are available.  run.cluster names the devices of a
node (--run.device cpu: no GPUs).  The keys of [launch] request the rest.
{KEYS}""",
    "plan": f"""\
weft traces one rank of each kind of stage with fake tensors, by the code that trains, and
extrapolates to the whole step.  The trace gives memory, FLOPs and communication.  docs/planner.md
describes the time model, and compares predictions with published runs.

  weft plan llama3-405b --cluster 64x8xh100
  weft plan llama3-70b --cluster 32x8xh200 --search --write best.toml

{KEYS}""",
    "verify": f"""\
weft shrinks the recipe to test size: few narrow layers, short sequences, a small vocabulary, and at
most --ranks processes on this machine's CPU.  It keeps the layout: every axis of more than one rank
that fits, pipeline schedule and stages, microbatches, context-parallel method, resharding, tied
embeddings, grouped-query attention.  It needs no data and no GPU.  The layout and one process train
on the same random tokens from the same weights, in float32.  Losses, gradient norms, every gradient
and every update must agree to rounding; docs/verify.md says how weft measures that limit.  If a
value does not agree, the report names the first one that differs.

  weft verify llama3-405b
  weft verify mine.toml --parallel.tp 2 --pipeline.schedule ZBVZeroBubble --ranks 4

{KEYS}
These keys keep their value only if they are on the command line: --compile.enable true,
--precision.compute_dtype bfloat16, --precision.float8 tensorwise, and the other keys of precision.

--resume-layout saves a checkpoint after half of the steps, loads it in another layout, and compares
the remaining steps with one process: weights, optimizer state and updates.  It takes the keys of
parallel, pipeline and activation_checkpoint, and train.microbatch_size.

  weft verify demo --parallel.tp 2 \\
    --resume-layout parallel.dp_shard=2,activation_checkpoint.mode=full

--fuzz verifies N random jobs over all keys that change the computation, on up to --ranks processes.
A third of the jobs resume in another layout.  weft shrinks a job that fails to the fewest keys, and
prints the command that reproduces it.  Keys on the command line apply to every job.  The same
command skips the jobs that are in --log, and so resumes.

  weft verify --fuzz 200 --seed 7 --minutes 30
  weft verify --fuzz 100 --pipeline.schedule ZBVZeroBubble

exit status: 0 the layout, or every job, agrees; 1 a value departs, or a rank failed; 2 a mistake in
the recipe or the options; 130 interrupted, and the same --fuzz resumes""",
    "compare": f"""\
weft trains each variant --repeat times, as runs below --out.  Each repeat has its own seed, the
same for all variants, and reverses their order.  The first variant is the baseline.  The same
command resumes an interrupted comparison; a higher --repeat adds runs.  docs/comparing.md defines
the measurements and the verdict.

  weft compare demo --vary optim.lr=1e-3,3e-3
  weft compare a.toml b.toml --repeat 5 --train.steps 200
  weft compare llama3-8b --vary parallel.tp=1,2 --vary activation_checkpoint.mode=full,selective \\
    --plan-only --cluster 2x8xH100 --price 2.5

A run of a comparison saves its last checkpoint only and renders no report, unless
--checkpoint.interval or --monitor.report is given.  report.html in --out shows all runs.
{KEYS}

exit status: 0 compared; 1 fewer than two variants completed; 2 a mistake in the arguments; 75
interrupted, and the same command resumes; 130 interrupted twice""",
    "generate": """\
The seed of a prompt is --seed plus its number from 0, for any --batch.

  weft generate runs/demo --prompt 'class ' --prompt 'def ' --temperature 0
  weft generate runs/mine --prompts questions.jsonl --json --parallel.tp 2
  weft generate runs/tuned --chat --prompt 'What is 2 + 2?'

--parallel.tp and --parallel.dp_shard shard the model over that many ranks of this machine, or of
torchrun, in any layout that it was trained in.""",
    "evaluate": """\
Without --task, weft computes the loss on the validation set of the run, or on all of the data of
--data.path.  --train.eval_sequences N uses N sequences, evenly spread.

  weft evaluate runs/demo
  weft evaluate runs/mine --data.path book.txt --parallel.dp_shard 2 --json
  weft evaluate runs/mine --task questions.yaml --parallel.tp 2

The layout is that of this command: one process, unless degrees are given.  Tasks take parallel.tp
and parallel.dp_shard; the loss takes any degree.""",
    "rollback": """\
later checkpoints no longer count; weft deletes them when the run has passed them""",
    "data prepare": DATA_HELP,
    "data inspect": DATA_HELP,
    "data verify": """\
A run checks a store when it first opens it, and again when the size or modification time of a file
changes.  This command reads every byte again.  It finds damage that changes neither, such as that
of a failing disk.  It compares content hashes, and token ids with the vocabulary.  'weft data
prepare' prints the directory of a store.

  weft data verify /data/store
  weft data verify ~/.cache/weft/stores/*

weft remembers a good result in data.cache_dir (--data.cache_dir DIR).  After a bad one, the next
run checks the store, too.

exit status: 0 every store equals what was prepared; 1 a store is damaged; 2 a mistake in the
arguments""",
    "diff": "exit status: 0 the runs agree within the tolerance; 1 they differ; 2 not comparable",
    "doctor": """\
The checks take some seconds and change nothing: devices, drivers, links, network adapters,
environment variables, limits, directories.

  weft doctor
  weft doctor --checkpoint.dir s3://bucket/run-7 --checkpoint.local_dir /dev/shm/$USER
  srun --nodes 2 --ntasks-per-node=1 weft doctor               also clocks and versions of all nodes

'weft train RECIPE --preflight' runs the checks on every node before its ranks start.  These keys
change what is checked: run.dir, run.nodes, run.rendezvous, run.device, checkpoint.dir,
checkpoint.local_dir, data.cache_dir.  docs/doctor.md lists the checks.

exit status: 0 nothing bad; 1 a bad finding; 2 a mistake in the arguments""",
}


# --------------------------------------------------------------------------- reading words


def parse(words: Sequence[str]) -> argparse.Namespace:
    """Parse a command line.

    Returns:
        The arguments of the command, its name as ``command``, its overrides of keys as
        ``overrides``, mistakes among them as ``problems``, and ``words``.

    Raises:
        SystemExit: after help, or after the message of a mistake.
    """
    rest, overrides, problems = list(words), list[tuple[str, str]](), list[ConfigError]()
    name = words[0] if words else ""
    if any(command.takes_keys for command in named(name).values()):
        rest, overrides, problems = split_overrides(words, options_of(name))
    given = argparse.Namespace(overrides=overrides, problems=problems, words=list(words))
    return parser().parse_args(rest, given)


def named(first: str) -> dict[str, Command]:
    """Return the commands whose name begins with the word ``first``."""
    return {name: command for name, command in COMMANDS.items() if name.split()[0] == first}


def options_of(first: str) -> dict[str, bool]:
    """Return the options of these commands, and whether a value follows."""
    found = {"-h": False, "--help": False}
    for command in named(first).values():
        for each in command.arguments:
            for one in each if isinstance(each, list) else [each]:
                if one.name.startswith("-"):
                    found[one.name] = one.options.get("action") != "store_true"
    return found


# Keys that need no section.
SHORT = {"nodes": "run.nodes", "rendezvous": "run.rendezvous"}
# Keys that need no value.
SWITCHES = {"preflight": ("resilience.preflight", "true")}


def split_overrides(
    words: Sequence[str], options: Mapping[str, bool]
) -> tuple[list[str], list[tuple[str, str]], list[ConfigError]]:
    """Separate overrides of keys from other arguments.

    An override is ``--section.key value`` or ``--section.key=value``.  An unknown option counts as
    an override, so that it is reported with the other errors.

    Args:
        words: words of the command line after ``weft``.
        options: options of the command, and whether a value follows.

    Returns:
        The other arguments, the overrides, and an error for each key without a value.
    """
    rest: list[str] = []
    overrides: list[tuple[str, str]] = []
    problems: list[ConfigError] = []
    own = {**options, "--": False}
    remaining = list(words)
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
                problems.append(ConfigError(f"--{name}", MISSING, "needs a value"))
                continue
            value = remaining.pop(0)
        overrides.append((name, value))
    return rest, overrides, problems


class Parser(argparse.ArgumentParser):
    """A parser that reports a mistake in one line."""

    def error(self, message: str) -> NoReturn:
        """Print the error and end the process with the exit status of a usage error."""
        print(f"weft: {message}; see '{self.prog} --help'", file=sys.stderr)
        sys.exit(USAGE_ERROR)


def parser() -> Parser:
    """Return the parser of `COMMANDS`, without ``--section.key`` overrides."""
    top = Parser(prog="weft", description=weft.__doc__, allow_abbrev=False)
    top.add_argument("--version", action="version", version=f"weft {weft.__version__}")
    groups = {"": top.add_subparsers(title="commands", required=True, metavar="COMMAND")}

    def add(group: str, name: str, text: str, below: str = "") -> Parser:
        sub: Parser = groups[group].add_parser(
            name,
            help=text,
            description=text,
            epilog=below,
            allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        return sub

    for name, command in COMMANDS.items():
        group, _, last = name.rpartition(" ")
        if group not in groups:
            sub = add("", group, GROUPS[group])
            groups[group] = sub.add_subparsers(title="commands", required=True, metavar="COMMAND")
        sub = add(group, last, command.text, BELOW.get(name, ""))
        sub.set_defaults(command=name)
        for each in command.arguments:
            if isinstance(each, list):
                one_of = sub.add_mutually_exclusive_group()
                for one in each:
                    one_of.add_argument(one.name, **one.options)
            else:
                sub.add_argument(each.name, **each.options)
    return top
