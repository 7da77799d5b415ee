"""The command line: what each command is called with, as a table, and how words are read by it.

Heavy imports stay out of here: ``weft --help`` must be quick.  What the commands do is in
`weft.cli.main`.
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
from weft.cluster import MISTAKE
from weft.config.errors import MISSING, ConfigError
from weft.config.reader import recipe_names
from weft.config.schema import SECTIONS

# --------------------------------------------------------------------------- kinds of values


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


@dataclass(frozen=True)
class Argument:
    """One word of a command or one of its options, as argparse's ``add_argument`` takes it."""

    name: str
    options: Mapping[str, Any]


def value(name: str, text: str, **options: Any) -> Argument:
    """A word, or an option with a value."""
    return Argument(name, {"help": text} | options)


def several(name: str, text: str, **options: Any) -> Argument:
    """An option that may be given more than once."""
    return value(name, text, action="append", default=[], **options)


def flag(name: str, text: str) -> Argument:
    """An option without a value."""
    return value(name, text, action="store_true")


@dataclass(frozen=True)
class Command:
    """What there is to know of a command before it runs.

    Args:
        text: a line that says what it does.
        arguments: in the order of the help; those in a list exclude each other.
        takes_keys: ``--section.key value`` overrides keys of a recipe.
    """

    text: str
    arguments: Sequence[Argument | list[Argument]] = ()
    takes_keys: bool = True


NAMES = ", ".join(recipe_names())
SHIPPED = f"a shipped recipe ({NAMES}) or a TOML file"
RECIPE = value("recipe", SHIPPED, metavar="RECIPE")
CHECKPOINT = value("checkpoint", "folder of a run, or of one of its checkpoints", type=Path)
JSON = flag("--json", "print one JSON object instead")
DATA = value("what", "data, or a recipe that names them", metavar="PATH|RECIPE")
COMMANDS = {
    "train": Command(
        "Train a model: start its processes here, or join a launcher's.",
        [
            RECIPE,
            flag("--dry-run", "check and show the plan, start nothing"),
            flag("--force", "start though the planner says that it will not fit"),
        ],
    ),
    "launch": Command(
        "Have a cluster's nodes train a recipe; ask after it, or stop it.",
        [
            value("what", f"{SHIPPED}; or what to do about RUN", metavar="RECIPE|status|logs|stop"),
            value("run", "folder of a run", type=Path, metavar="RUN", nargs="?"),
            value("--on", "kind of cluster: slurm, kubernetes, sagemaker or skypilot"),
            flag("--dry-run", "print the script or manifest, hand in nothing"),
            flag("--follow", "of logs: until the job has ended"),
        ],
    ),
    "plan": Command(
        "Show what a recipe does on a cluster: no GPU needed, nothing started.",
        [
            value("recipe", SHIPPED, metavar="RECIPE", nargs="?"),
            value(
                "--cluster",
                "nodes x devices x name, such as 64x8xH100, or local (default: run.cluster)",
                metavar="NxMxNAME",
            ),
            [
                flag("--rank-map", "show which rank is where instead"),
                flag("--search", "rank other layouts of the model"),
                value(
                    "--calibrate",
                    "learn this device's speed from a finished run's folder",
                    metavar="RUN",
                ),
            ],
            JSON,
            value("--report", "also write a page of pictures (HTML)", metavar="FILE"),
            value("--write", "with --search: the winner as a recipe", metavar="FILE"),
        ],
    ),
    "verify": Command(
        "Prove that a recipe's layout trains what one process would.",
        [
            value("recipe", f"{SHIPPED}; none with --fuzz", metavar="RECIPE", nargs="?"),
            value("--ranks", "at most so many processes, from 2 (8)", default="8"),
            value("--steps", "optimizer steps (3; 2 with --fuzz)"),
            value(
                "--resume-layout",
                "save a checkpoint half-way, and resume from it in this layout, too",
                metavar="KEY=VALUE,...",
            ),
            value("--fuzz", "verify N random jobs instead of a recipe", metavar="N"),
            value("--seed", "of --fuzz: which jobs (0)", default="0"),
            value("--minutes", "of --fuzz: after which no job is started", metavar="M"),
            value(
                "--log",
                "of --fuzz: file of results, one line each (runs/verify-fuzz-SEED.jsonl)",
                type=Path,
                metavar="FILE",
            ),
            JSON,
        ],
    ),
    "compare": Command(
        "Run, or only plan, variants of a recipe; tell which is better.",
        [
            value(
                "recipes", f"shipped recipes ({NAMES}) or TOML files", metavar="RECIPE", nargs="*"
            ),
            several(
                "--vary",
                "values of a key, each a variant; several times: every combination",
                metavar="KEY=A,B",
            ),
            value("--repeat", "runs of each variant (3)", default="3"),
            value(
                "--margin",
                "losses that close are equivalent: 0.5%%, or nats (0.5%%)",
                default="0.5%",
            ),
            value("--price", "of a device's hour, to tell what a billion tokens cost"),
            value("--out", "of all the runs (runs/compare-...)", metavar="FOLDER"),
            flag("--plan-only", "predict all, run nothing"),
            value("--cluster", "with --plan-only: as 'weft plan' has it", metavar="NxMxNAME"),
            JSON,
        ],
    ),
    "report": Command(
        "Write one page that shows runs, and opens without a network.",
        [
            value("runs", "folder of a run", type=Path, metavar="RUN", nargs="+"),
            value(
                "--out",
                "the page (default: report.html, in the run's folder or, of several runs, here)",
                type=Path,
                metavar="FILE",
            ),
        ],
        takes_keys=False,
    ),
    "generate": Command(
        "Continue prompts with a trained model.",
        [
            CHECKPOINT,
            several(
                "--prompt",
                "text to continue, more than one if given again (default: a new document)",
            ),
            value(
                "--prompts",
                "a prompt a line; of a .jsonl file a string, or an object with 'prompt'",
                type=Path,
                metavar="FILE",
            ),
            flag(
                "--chat",
                "prompts are what a user says: written by the run's chat template, or by the one "
                "at --data.chat_template; an object of --prompts may have 'messages'",
            ),
            value("--batch", "prompts at a time (8)", type=positive, default=8),
            flag("--json", "print an object a prompt, each on a line"),
            value("--max-tokens", "at most that many (200)", type=count, default=200),
            value("--temperature", "0: likeliest (0.8)", type=not_negative, default=0.8),
            value("--top-k", "among so many; 0: all (50)", type=count, default=50),
            value(
                "--top-p", "among the likeliest of that share (1)", type=not_negative, default=1.0
            ),
            value(
                "--min-p",
                "at least that share of the likeliest's (0)",
                type=not_negative,
                default=0.0,
            ),
            value(
                "--repetition-penalty",
                "divides logits of what is there already (1)",
                type=not_negative,
                default=1.0,
            ),
            several("--stop", "end before it; several times", metavar="TEXT"),
            value("--seed", "of the first prompt's sampling (0)", type=count, default=0),
        ],
    ),
    "evaluate": Command(
        "Measure a trained model: its loss on text, or its answers.",
        [
            CHECKPOINT,
            several(
                "--task",
                "multiple choice, a YAML file as the Evaluation Harness has it; several times",
                type=Path,
                metavar="FILE",
            ),
            value("--batch", "of tasks, rows at a time (8)", type=positive, default=8),
            flag("--json", "print an object a line instead"),
        ],
    ),
    "rollback": Command(
        "Let a run go on from an earlier checkpoint.",
        [
            value("run", "folder of the run", type=Path),
            value("step", "of the checkpoint; 0: from the beginning", type=count),
        ],
        takes_keys=False,
    ),
    "export": Command(
        "Write a checkpoint as a folder that Hugging Face's tools load.",
        [
            CHECKPOINT,
            value("out", "folder, or s3://bucket/prefix, to make", type=place, metavar="OUT"),
            value("--dtype", "float32, bfloat16 or float16 (float32)", default="float32"),
            value("--max-shard", "largest file (5GB)", default="5GB"),
            flag("--adapter", "of a LoRA run, only the adapters, as PEFT has them"),
        ],
        takes_keys=False,
    ),
    "import": Command(
        "Make a run of a Hugging Face model, to train it further.",
        [
            value(
                "folder",
                "or s3://bucket/prefix, with config.json, safetensors and tokenizer.json",
                type=place,
            ),
            value("run_dir", "folder to make", type=Path, metavar="RUN_DIR"),
            flag("--force", "though the tokenizer is far smaller than the model's"),
        ],
        takes_keys=False,
    ),
    "data prepare": Command(
        "Tokenise data once, for every run to come; goes on where it was interrupted.", [DATA]
    ),
    "data inspect": Command(
        "Tell how much there is, how long documents are, and show some.",
        [value("--samples", "documents to show (3)", type=count, default=3), DATA],
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
    "debug hang": Command(
        "Say which rank stands still where, and who waits for it; ends nobody.",
        [value("run", "folder of the run", type=Path), JSON],
        takes_keys=False,
    ),
    "debug diff": Command(
        "Say at which step, and in which layer, two runs part.",
        [
            value("run_a", "folder of a run", type=Path),
            value("run_b", "folder of another one", type=Path),
            value(
                "--tolerance",
                "relative difference that is still rounding (1e-4)",
                type=not_negative,
                default=1e-4,
            ),
            JSON,
        ],
        takes_keys=False,
    ),
    "doctor": Command(
        "Look at this machine: is it fit to train, and as fast as it should?",
        [
            value(
                "recipe",
                "whose folders, store and nodes are looked at",
                metavar="RECIPE",
                nargs="?",
            ),
            flag("--full", "every pair of GPUs, and larger files"),
            JSON,
        ],
    ),
    "schema": Command("Print the JSON Schema of a recipe, for editors.", takes_keys=False),
}
# Commands of two words, by the first.
GROUPS = {
    "data": "Tokenise data before a run needs them, inspect or verify them.",
    "debug": "Find out where a run hangs, or where two runs part.",
}
# What follows the arguments in the help of some.
DATA_HELP = """\
  weft data prepare my-recipe.toml --data.path 'web/*.jsonl.zst'
  weft data prepare s3://bucket/web --data.tokenizer tokenizer.json
  weft data inspect hf://org/name:config@train --data.text_field content

The keys of [data] are overridden as --data.key value; 'weft train --help' lists them, and
docs/data.md tells what data may be."""
BELOW = {
    "train": keys_help(),
    "launch": """\
What is handed in starts 'weft train' with the same words on every node; it is shown, and kept in
the run's folder.  A job that is stopped before its time limit saves, comes back and goes on.

  weft launch llama3-8b --on slurm --nodes 4 --run.cluster 4x8xH100 --launch.time_limit 12:00:00
  weft launch mine.toml --on slurm --nodes 2:8 --run.cluster 8x8xH100 --run.dir runs/mine \\
    --launch.options partition=gpu,account=mine --dry-run
  weft launch status runs/mine
  weft launch logs runs/mine --follow
  weft launch stop runs/mine

--nodes N asks for N nodes, MIN:MAX for as many as there are; run.cluster tells what a node has
(--run.device cpu: no GPUs).  Any key is overridden as --section.key value, those of [launch] say
what else is asked for; 'weft train --help' lists them.""",
    "plan": """\
A stage of each kind runs, with few of its blocks and microbatches, by the code that trains, on
tensors that have shapes but no memory, and is repeated to the whole step.  From that come memory,
FLOPs and everything that ranks say to each other; docs/planner.md tells how they are priced, and
how far predictions are from published runs.

  weft plan llama3-405b --cluster 64x8xh100
  weft plan llama3-70b --cluster 32x8xh200 --search --write best.toml

Any key is overridden as --section.key value; 'weft train --help' lists them.""",
    "verify": """\
The recipe is shrunk to test size: few narrow layers, short rows, a small vocabulary, and at most
--ranks processes on this machine's CPU.  What makes its layout is kept: every axis of more than one
rank where there are ranks enough, schedule and stages, microbatches, context method, resharding,
tied embeddings, grouped heads.  No text and no GPU is needed.  Both train on the same noise from
the same weights, by the code that trains, in float32.  Losses, gradient norms, every gradient and
every update must agree to rounding; how much that is, is measured (docs/verify.md).  If something
does not agree, the report names where it departs first.

  weft verify llama3-405b
  weft verify mine.toml --parallel.tp 2 --pipeline.schedule ZBVZeroBubble --ranks 4

Any key is overridden as --section.key value; 'weft train --help' lists them.  These are honoured
if given so, and replaced otherwise: --compile.enable true, --precision.compute_dtype bfloat16,
--precision.float8 tensorwise and the other keys of precision.

--resume-layout saves a checkpoint after half of the steps, loads it into another layout, and
compares the rest of the steps with one process, too: weights, optimizer states and updates.  Its
keys are those of parallel, pipeline and activation_checkpoint, and train.microbatch_size; others are one process's.

  weft verify demo --parallel.tp 2 --resume-layout parallel.dp_shard=2,activation_checkpoint.mode=full

--fuzz verifies N random jobs of all keys that change what is computed, on up to --ranks processes.
A third of them resume in another layout.  A job that fails is shrunk to the fewest keys, and
printed as the command that reproduces it.  Keys on the command line are those of every job.
Results are appended to --log; the same command skips what is in it, and so resumes.

  weft verify --fuzz 200 --seed 7 --minutes 30
  weft verify --fuzz 100 --pipeline.schedule ZBVZeroBubble

exit status: 0 the layout holds, or every job does; 1 it does not, or a rank failed; 2 a mistake in
the recipe or the options; 130 interrupted, the same --fuzz resumes""",
    "compare": """\
Each variant is trained --repeat times, as runs of their own below --out; their order is reversed
from repeat to repeat, and each repeat has another seed, the same for all variants.  The first
variant is what the others are compared with.  Interrupted, the same command goes on; with a higher
--repeat it adds runs.  docs/comparing.md tells what is measured, and what the verdict means.

  weft compare demo --vary optim.lr=1e-3,3e-3
  weft compare a.toml b.toml --repeat 5 --train.steps 200
  weft compare llama3-8b --vary parallel.tp=1,2 --vary activation_checkpoint.mode=full,selective \\
    --plan-only --cluster 2x8xH100 --price 2.5

The runs write no checkpoint but the last and no report of their own, unless --checkpoint.interval
or --monitor.report says otherwise; report.html in the comparison's folder shows all of it.
Any key is overridden for all variants as --section.key value; 'weft train --help' lists them.

exit status: 0 compared; 1 fewer than two variants could be; 2 a mistake in what was asked;
75 interrupted, the same command goes on; 130 interrupted twice""",
    "generate": """\
Each prompt is sampled by a seed of its own, --seed plus its number from 0, whatever --batch is.

  weft generate runs/demo --prompt 'class ' --prompt 'def ' --temperature 0
  weft generate runs/mine --prompts questions.jsonl --json --parallel.tp 2
  weft generate runs/tuned --chat --prompt 'What is 2 + 2?'

--parallel.tp and --parallel.dp_shard spread the model over that many ranks of this machine, or of
torchrun's, whatever layout it was trained in.""",
    "evaluate": """\
Without --task it is the loss on all of the run's held-out text, or on all of another text with
--data.path; --train.eval_sequences takes that many sequences only, evenly spread.

  weft evaluate runs/demo
  weft evaluate runs/mine --data.path book.txt --parallel.dp_shard 2 --json
  weft evaluate runs/mine --task questions.yaml --parallel.tp 2

The layout is that of this command: one process unless degrees are given.  With --task these are
parallel.tp and parallel.dp_shard; else any.""",
    "rollback": """\
later checkpoints stay until the run has come past them, but do not count any more""",
    "data prepare": DATA_HELP,
    "data inspect": DATA_HELP,
    "data verify": """\
A run checks a store when it opens it for the first time, and again when a file's size or
modification time has changed.  This command reads every byte again, for damage that changes
neither, such as that of a failing disk: content hashes, and token ids against the vocabulary.
'weft data prepare' prints the directory of a store.

  weft data verify /data/store
  weft data verify ~/.cache/weft/stores/*

A good result is remembered in data.cache_dir (--data.cache_dir DIRECTORY); a bad one makes the next run
check the store, too.

exit status: 0 every store is what was prepared; 1 one is damaged; 2 a mistake in what was asked""",
    "debug diff": "exit status: 0 they agree within the tolerance; 1 they part; 2 not comparable",
    "doctor": """\
Devices, drivers, links, adapters, variables, limits, folders: some seconds, and nothing is changed.

  weft doctor
  weft doctor --checkpoint.dir s3://bucket/run-7 --checkpoint.local_dir /dev/shm/$USER
  srun --nodes 2 --ntasks-per-node=1 weft doctor               also clocks, and versions, of all

'weft train RECIPE --preflight' does it on every node before its ranks start.  Any
key may be given as --section.key value; run.dir, checkpoint.dir, checkpoint.local_dir, data.cache_dir,
run.nodes, run.rendezvous and run.device count.  docs/doctor.md tells what is looked at.

exit status: 0 nothing bad; 1 something bad; 2 a mistake in what was asked""",
}


# --------------------------------------------------------------------------- reading words


def parse(words: Sequence[str]) -> argparse.Namespace:
    """The arguments of a command, whose name is ``command``.

    Beside what the table names it has ``overrides``, ``problems`` (mistakes among them that are
    still to be told) and ``words``, all as they were given.

    Raises:
        SystemExit: for help, and for mistakes, which have been told.
    """
    rest, overrides, problems = list(words), list[tuple[str, str]](), list[ConfigError]()
    name = words[0] if words else ""
    if any(command.takes_keys for command in named(name).values()):
        rest, overrides, problems = split_overrides(words, options_of(name))
    given = argparse.Namespace(overrides=overrides, problems=problems, words=list(words))
    return parser().parse_args(rest, given)


def named(first: str) -> dict[str, Command]:
    """The commands that begin with a word."""
    return {name: command for name, command in COMMANDS.items() if name.split()[0] == first}


def options_of(first: str) -> dict[str, bool]:
    """The options of the commands that begin with a word, and whether a value follows."""
    found = {"-h": False, "--help": False}
    for command in named(first).values():
        for each in command.arguments:
            for one in each if isinstance(each, list) else [each]:
                if one.name.startswith("-"):
                    found[one.name] = one.options.get("action") != "store_true"
    return found


# Keys that may go without their section.
SHORT = {"nodes": "run.nodes", "rendezvous": "run.rendezvous"}
# And that may go without a value.
SWITCHES = {"preflight": ("resilience.preflight", "true")}


def split_overrides(
    words: Sequence[str], options: Mapping[str, bool]
) -> tuple[list[str], list[tuple[str, str]], list[ConfigError]]:
    """Take the ``--section.key value`` and ``--section.key=value`` out of a command's arguments.

    Any other option that the command does not have is taken, too: it is reported with the rest.

    Args:
        options: of the command, and whether a word follows.

    Returns:
        The other arguments, the overrides, and a problem for each key without a value.
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
    """Mistakes in one line instead of the whole usage."""

    def error(self, message: str) -> NoReturn:
        print(f"weft: {message}; see '{self.prog} --help'", file=sys.stderr)
        sys.exit(MISTAKE)


def parser() -> Parser:
    """The command line of `COMMANDS`, without the ``--section.key`` overrides."""
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
            groups[group] = sub.add_subparsers(title="what", required=True, metavar="WHAT")
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
