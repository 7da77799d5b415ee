"""What clusters have in common: times, words, recipes, options, YAML, command-line tools."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from weft.cluster.submit import Request
from weft.config.errors import MISSING, ConfigError, WeftError, suggest
from weft.config.reader import recipe_names
from weft.config.schema import Job, flatten

RUN_DIR = "run.dir"


def seconds(text: str) -> int:
    """Of ``D-HH:MM:SS`` or ``HH:MM:SS``.

    Raises:
        ValueError: if it is neither.
    """
    found = re.fullmatch(r"(?:(\d{1,4})-)?(\d{1,4}):([0-5]\d):([0-5]\d)", text)
    if found is None:
        raise ValueError("must be D-HH:MM:SS or HH:MM:SS")
    days, hours, minutes, rest = (int(part or 0) for part in found.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60 + rest


def time_problems(text: str, key: str = "launch.time_limit") -> list[ConfigError]:
    """What is wrong with a key that is a time."""
    try:
        rule = "" if seconds(text) else "must be longer"
    except ValueError as error:
        rule = str(error)
    return [ConfigError(key, text, rule)] if rule else []


class Option(NamedTuple):
    """One of ``launch.options``: what it is, and the pattern and the rule of its values, if they
    have one beside that of the cluster's."""

    meaning: str
    pattern: str = ""
    rule: str = ""
    remedy: str = ""


# Of options that are numbers, or switches.
WHOLE, SWITCH = "[0-9]+", ("true|false", "must be true or false")


def common_problems(
    request: Request, known: Mapping[str, Option], needed: Sequence[str], clean: str
) -> list[ConfigError]:
    """What is wrong with [launch] wherever a manifest is made of it.

    Args:
        needed: those of the options that have to be given.
        clean: a pattern for the values of all.
    """
    launch, found = request.job.launch, []
    for name, value in launch.options.items():
        key = f"launch.options.{name}"
        if name not in known:
            found.append(ConfigError(key, value, "is no option here", suggest(name, known)))
        elif not re.fullmatch(clean, value):
            found.append(ConfigError(key, value, "has letters it cannot have"))
        elif known[name].pattern and not re.fullmatch(known[name].pattern, value):
            found.append(ConfigError(key, value, known[name].rule, known[name].remedy))
    for name in needed:
        if name not in launch.options:
            remedy = f"--launch.options {name}=...: {known[name].meaning}"
            found.append(ConfigError(f"launch.options.{name}", MISSING, "is missing", remedy))
    return found + time_problems(launch.time_limit)


def fixed_nodes(request: Request, rule: str) -> list[ConfigError]:
    """What is wrong with a range of nodes, for the reason ``rule``."""
    least, most = request.nodes
    if least == most:
        return []
    return [ConfigError("run.nodes", f"{least}:{most}", rule, f"use {most}")]


def pairs_of(request: Request) -> dict[str, str]:
    """The overrides among the words of the command."""
    words = request.words[3:]
    return {k.removeprefix("--"): v for k, v in zip(words[::2], words[1::2], strict=True)}


def command(request: Request, recipe: str, changes: Mapping[str, str]) -> list[str]:
    """``weft train RECIPE ...`` with some keys changed, as words."""
    pairs = pairs_of(request) | dict(changes)
    return ["weft", "train", recipe, *(word for k, v in pairs.items() for word in (f"--{k}", v))]


def on_lines(words: Sequence[str], indent: str) -> str:
    """The command as shell has it, each option on a line of its own."""
    pairs = zip(words[3::2], words[4::2], strict=True)
    return f" \\\n{indent}".join(shlex.join(part) for part in (words[:3], *pairs))


def script(lines: Sequence[str], words: Sequence[str]) -> str:
    """Shell that runs ``lines`` and then becomes the command."""
    return "\n".join(["set -e", *lines, f"exec {on_lines(words, '  ')}"]) + "\n"


def own_recipe(request: Request) -> str | None:
    """The recipe, with what the command line overrides, as a file that stands alone; None of a
    shipped one, which every node has.

    It has neither the run's directory nor the number of nodes: the command names them.
    """
    if request.words[2] in recipe_names():
        return None
    import tomli_w

    usual, tree = flatten(Job()), dict[str, dict[str, Any]]()
    for key, value in flatten(request.job).items():
        section, _, name = key.partition(".")
        elsewhere = section == "launch" or key in (RUN_DIR, "run.nodes")
        if key not in usual or (value != usual[key] and not elsewhere):
            tree.setdefault(section, {})[name] = value
    return tomli_w.dumps(tree)


def check_name(request: Request, where: str) -> Iterator[ConfigError]:
    """Why the cluster cannot name the run as its directory is named.

    The nodes have the run in a directory, or below a prefix, of that name: two runs that another
    spelling made one would write into the same place.

    Args:
        where: the place of the run on the nodes, for people.
    """
    if request.name and request.run_dir.name != request.name:
        rule = f"ends in a name that the cluster does not take: the run would be {where}"
        remedy = f"use another --run.dir, such as {request.run_dir.with_name(request.name)}: a to "
        remedy += "z, digits and single '-', at most 40 of them"
        yield ConfigError(RUN_DIR, str(request.run_dir), rule, remedy)


def to_yaml(documents: Sequence[Mapping[str, Any]], comment: str) -> str:
    """Documents in their own order, text of several lines as it is, under comment lines."""
    import yaml

    class Dumper(yaml.SafeDumper):  # type: ignore[misc]
        """A text of several lines is shown as such."""

    def text(dumper: Any, value: str) -> Any:
        style = "|" if "\n" in value else None
        return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)

    Dumper.add_representer(str, text)
    head = "".join(f"# {line}\n" for line in comment.splitlines())
    body = yaml.dump_all(documents, Dumper=Dumper, sort_keys=False, width=10_000)
    return head + str(body)


def unchecked(what: str, remedy: str) -> list[str]:
    """Nothing is wrong as far as can be told; says that nothing was checked."""
    print(f"weft: not checked against {what}; to have it checked: {remedy}", file=sys.stderr)
    return []


# --------------------------------------------------------------------------- a cluster's own tool


class Refused(WeftError):
    """By a cluster's command-line tool, in its own words."""


def tool(*words: str, remedy: str) -> str:
    """What a cluster's command-line tool prints.

    Raises:
        Refused: if it fails.
        WeftError: if it is not installed.
    """
    done = subprocess.run(
        _found(words, remedy), capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False
    )
    if done.returncode:
        raise Refused(f"{shlex.join(words)}: {(done.stderr or done.stdout).strip()}")
    return done.stdout


def lines_of(*words: str, remedy: str) -> Iterator[str]:
    """The lines that a tool prints, as they come; it ends with the iterator.

    Raises:
        WeftError: if it is not installed, or fails, which it has said on stderr.
    """
    process = subprocess.Popen(_found(words, remedy), stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        for line in process.stdout:
            yield line.rstrip("\n")
        if status := process.wait():
            raise WeftError(f"{shlex.join(words)}: ended with status {status}")
    finally:
        process.kill()
        process.wait()


def _found(words: Sequence[str], remedy: str) -> list[str]:
    path = shutil.which(words[0])
    if path is None:
        raise WeftError(f"{words[0]} is not installed, or not in $PATH: {remedy}")
    return [path, *words[1:]]
