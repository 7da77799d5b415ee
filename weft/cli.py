"""The commands.  Heavy imports stay inside them: ``weft --help`` must be quick."""

from __future__ import annotations

import argparse
import io
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import weft
from weft.job import MISSING, SECTIONS, InvalidJob, Problem, WeftError, recipe_names
from weft.launch import FAILED, INTERRUPTED, MISTAKE


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
        if arguments[:1] == ["train"]:
            arguments, overrides, problems = split_overrides(arguments)
        given = argparse.Namespace(overrides=overrides, problems=problems)
        options = parser().parse_args(arguments, given)
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


def split_overrides(
    arguments: list[str],
) -> tuple[list[str], list[tuple[str, str]], list[Problem]]:
    """Take the ``--section.key value`` and ``--section.key=value`` out of weft train's arguments.

    Any other option that weft train does not have is taken, too: it is reported with the rest.

    Returns:
        The other arguments, the overrides, and a problem for each key without a value.
    """
    rest: list[str] = []
    overrides: list[tuple[str, str]] = []
    problems: list[Problem] = []
    remaining = list(arguments)
    while remaining:
        word = remaining.pop(0)
        if not word.startswith("--") or word in ("--", "--help", "--dry-run"):
            rest.append(word)
            continue
        name, equals, value = word.removeprefix("--").partition("=")
        name = name.replace("-", "_")
        if not equals:
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
    sub.epilog = keys_help()

    sub = add("generate", generate, "Continue a prompt with a trained model.")
    sub.add_argument("checkpoint", type=Path, help="folder of a run, or of one of its checkpoints")
    sub.add_argument("--prompt", default="", help="text to continue (default: a new document)")
    sub.add_argument("--max-tokens", type=count, default=200, help="at most that many (200)")
    sub.add_argument("--temperature", type=not_negative, default=0.8, help="0: likeliest (0.8)")
    sub.add_argument("--top-k", type=count, default=50, help="among so many; 0: all (50)")
    sub.add_argument("--seed", type=count, default=0, help="of the sampling (0)")

    add("schema", schema, "Print the JSON Schema of a recipe, for editors.")
    return top


def count(text: str) -> int:
    """A whole number from 0."""
    if not text.isdecimal() or int(text[:20]) >= 2**63:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 0")
    return int(text)


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
    from weft.launch.start import join, start
    from weft.observe.sinks import quiet_console
    from weft.train.setup import joined, prepare_job

    job, base, plan = prepare_job(options.recipe, options.overrides, options.problems)
    if options.dry_run:
        print(plan.to_json())
        return 0
    if joined():
        join(job, base, plan, options.recipe)
    return start(job, base, plan, options.recipe, quiet_console(sys.stdout))


def generate(options: argparse.Namespace) -> int:
    """Print the prompt and its continuation as it grows."""
    import torch

    from weft.train.generate import generate, load_checkpoint

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    prompt = os.fsencode(options.prompt).decode("utf-8", "replace")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a terminal that is not UTF-8
    model, tokenizer, seq_len = load_checkpoint(options.checkpoint.resolve(), device)
    print(prompt, end="", flush=True)
    for text in generate(
        model,
        tokenizer,
        prompt,
        max_tokens=options.max_tokens,
        context=seq_len,
        temperature=options.temperature,
        top_k=options.top_k,
        seed=options.seed,
    ):
        print(text, end="", flush=True)
    print()
    return 0


def schema(options: argparse.Namespace) -> int:
    """Print the recipe's schema with the fields of weft's own models."""
    from weft.job import schema as job_schema
    from weft.models import load_family

    tree = job_schema()
    fields = load_family("llama").config.model_json_schema()["properties"]
    tree["$defs"]["ModelSection"]["properties"] |= {
        name: {k: v for k, v in field.items() if k != "default"} for name, field in fields.items()
    }
    print(json.dumps(tree, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
