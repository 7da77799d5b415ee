"""Shared code of the cluster modules: options, commands, recipes, YAML, tools."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from weft.cluster.submit import JobRequest
from weft.config.errors import MISSING, ConfigError, WeftError, suggest
from weft.config.reader import recipe_names
from weft.config.schema import Job, flatten

RUN_DIR = "run.dir"


def parse_duration(text: str) -> int:
    """Return the seconds of ``D-HH:MM:SS`` or ``HH:MM:SS``.

    Raises:
        ValueError: if the text has neither form.
    """
    match = re.fullmatch(r"(?:(\d{1,4})-)?(\d{1,4}):([0-5]\d):([0-5]\d)", text)
    if match is None:
        raise ValueError("must be D-HH:MM:SS or HH:MM:SS")
    days, hours, minutes, seconds = (int(group or 0) for group in match.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds


def check_duration(text: str, key: str = "launch.time_limit") -> list[ConfigError]:
    """Return the errors of a key that is a duration."""
    try:
        rule = "" if parse_duration(text) else "must be longer than 0 seconds"
    except ValueError as error:
        rule = str(error)
    return [ConfigError(key, text, rule)] if rule else []


class Option(NamedTuple):
    """One of ``launch.options``: its meaning, and the rule of its values."""

    meaning: str
    pattern: str = ""
    rule: str = ""
    remedy: str = ""


# For options that are integers, or booleans.
INTEGER_PATTERN, BOOLEAN_RULE = "[0-9]+", ("true|false", "must be true or false")


def check_options(
    request: JobRequest, known: Mapping[str, Option], required: Sequence[str], pattern: str
) -> list[ConfigError]:
    """Return the errors of the launch section, for clusters with a manifest.

    Args:
        request: has the job whose launch section is checked.
        known: the options of the cluster.
        required: names of the required options.
        pattern: regular expression that all values must match.
    """
    launch, errors = request.job.launch, []
    for name, value in launch.options.items():
        key = f"launch.options.{name}"
        if name not in known:
            rule = "is not an option of this cluster"
            errors.append(ConfigError(key, value, rule, suggest(name, known)))
        elif not re.fullmatch(pattern, value):
            errors.append(
                ConfigError(key, value, f"has invalid characters; it must match {pattern}")
            )
        elif known[name].pattern and not re.fullmatch(known[name].pattern, value):
            errors.append(ConfigError(key, value, known[name].rule, known[name].remedy))
    for name in required:
        if name not in launch.options:
            remedy = f"give --launch.options {name}=...: {known[name].meaning}"
            errors.append(ConfigError(f"launch.options.{name}", MISSING, "is missing", remedy))
    return errors + check_duration(launch.time_limit)


def check_fixed_nodes(request: JobRequest, rule: str) -> list[ConfigError]:
    """Return an error with this rule if the request has a range of nodes."""
    minimum, maximum = request.nodes
    if minimum == maximum:
        return []
    return [ConfigError("run.nodes", f"{minimum}:{maximum}", rule, f"use {maximum}")]


def parse_overrides(request: JobRequest) -> dict[str, str]:
    """Return the overrides in the command of a request, by key."""
    words = request.words[3:]
    return {k.removeprefix("--"): v for k, v in zip(words[::2], words[1::2], strict=True)}


def build_command(request: JobRequest, recipe: str, changes: Mapping[str, str]) -> list[str]:
    """Return the words of the request's command with another recipe and changed keys."""
    pairs = parse_overrides(request) | dict(changes)
    return ["weft", "train", recipe, *(word for k, v in pairs.items() for word in (f"--{k}", v))]


def format_command(words: Sequence[str], indent: str) -> str:
    """Return the command in shell syntax, with one option per line."""
    pairs = zip(words[3::2], words[4::2], strict=True)
    return f" \\\n{indent}".join(shlex.join(part) for part in (words[:3], *pairs))


def build_script(lines: Sequence[str], words: Sequence[str]) -> str:
    """Return a shell script that runs ``lines`` and then executes the command."""
    return "\n".join(["set -e", *lines, f"exec {format_command(words, '  ')}"]) + "\n"


def standalone_recipe(request: JobRequest) -> str | None:
    """Return the recipe with all overrides as TOML; None for a shipped recipe.

    The file has neither run.dir nor run.nodes, which are on the command line of each node.
    """
    if request.words[2] in recipe_names():
        return None
    import tomli_w

    defaults, tree = flatten(Job()), dict[str, dict[str, Any]]()
    for key, value in flatten(request.job).items():
        section, _, name = key.partition(".")
        is_excluded = section == "launch" or key in (RUN_DIR, "run.nodes")
        if key not in defaults or (value != defaults[key] and not is_excluded):
            tree.setdefault(section, {})[name] = value
    return tomli_w.dumps(tree)


def check_name(request: JobRequest, location: str) -> Iterator[ConfigError]:
    """Check that the cluster accepts the name of the run directory.

    The nodes store the run under this name, so two runs whose names the cluster maps to one name
    would overwrite each other.

    Args:
        request: has the run directory, and the name that the cluster accepts.
        location: where the nodes store the run, for the message.
    """
    if request.name and request.run_dir.name != request.name:
        rule = f"ends in a name that the cluster does not accept: the run would be {location}"
        remedy = f"use another --run.dir, such as {request.run_dir.with_name(request.name)} "
        remedy += "(a to z, digits and single '-', at most 40 characters)"
        yield ConfigError(RUN_DIR, str(request.run_dir), rule, remedy)


def to_yaml(documents: Sequence[Mapping[str, Any]], comment: str) -> str:
    """Return YAML documents under a comment, with the given order of keys."""
    import yaml

    class Dumper(yaml.SafeDumper):  # type: ignore[misc]
        """Dumper that writes multi-line strings as blocks."""

    def represent_string(dumper: Any, value: str) -> Any:
        style = "|" if "\n" in value else None
        return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)

    Dumper.add_representer(str, represent_string)
    head = "".join(f"# {line}\n" for line in comment.splitlines())
    body = yaml.dump_all(documents, Dumper=Dumper, sort_keys=False, width=10_000)
    return head + str(body)


def warn_unchecked(schema: str, remedy: str) -> list[str]:
    """Warn that a file was not checked against a schema; return no errors."""
    print(f"weft: not checked against {schema}; to enable the check: {remedy}", file=sys.stderr)
    return []


# --------------------------------------------------------------------------- command-line tools


class ToolError(WeftError):
    """A cluster's command-line tool failed; has the tool's own message."""


def run_cli(*words: str, remedy: str) -> str:
    """Run a cluster's command-line tool and return its output.

    Raises:
        ToolError: if the tool fails.
        WeftError: if the tool is not installed.
    """
    result = subprocess.run(
        _resolve_executable(words, remedy),
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        check=False,
    )
    if result.returncode:
        raise ToolError(f"{shlex.join(words)}: {(result.stderr or result.stdout).strip()}")
    return result.stdout


def stream_cli(*words: str, remedy: str) -> Iterator[str]:
    """Run a command-line tool and yield its lines; closing the iterator ends it.

    Raises:
        WeftError: if the tool is not installed, or fails; its message is on stderr.
    """
    process = subprocess.Popen(
        _resolve_executable(words, remedy), stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    try:
        for line in process.stdout:
            yield line.rstrip("\n")
        if status := process.wait():
            raise WeftError(f"{shlex.join(words)}: exited with status {status}")
    finally:
        process.kill()
        process.wait()


def _resolve_executable(words: Sequence[str], remedy: str) -> list[str]:
    path = shutil.which(words[0])
    if path is None:
        raise WeftError(f"{words[0]} is not installed, or not in $PATH; {remedy}")
    return [path, *words[1:]]
