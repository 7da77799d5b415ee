"""Read configuration files of other programs, and recognize whose they are.

``peer_configs.toml`` next to this file has the tables of `weft.conversion.recipe_translation`.
"""

from __future__ import annotations

import functools
import itertools
import json
import re
import shlex
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from weft.config.errors import ConfigError, InvalidConfig
from weft.config.files import describe_cause, read_input
from weft.config.peer_names import FILES, PROJECTS

MAX_BYTES = 4 << 20
MAX_VALUES = 100_000
# Sections of TorchTitan's TOML that weft does not have.
TORCHTITAN_SECTIONS = {"training", "parallelism", "lr_scheduler", "optimizer", "metrics", "job"}
TORCHTITAN_SECTIONS |= {"profiling", "validation", "quantize", "float8", "experimental"}
PICKLES = (".bin", ".pt", ".pth", ".pkl")
REMEDY = (
    "give a TOML of TorchTitan, a script or arguments of Megatron-LM, a YAML of axolotl or "
    "LLaMA-Factory, a JSON of DeepSpeed or SageMaker SMP, or the TrainingArguments of transformers "
    "or TRL as YAML or JSON"
)
TITLES = {**PROJECTS, "llamafactory": "LLaMA-Factory"}


@dataclass(frozen=True)
class PeerConfig:
    """A configuration of another program.

    Attributes:
        program: its name in `TITLES`, or ``model``: a ``config.json``.
        values: value by name; sections are joined with dots.
        notes: remarks on how the file was read.
        path: the file; None: there is none.
    """

    program: str
    values: dict[str, Any]
    notes: tuple[str, ...] = ()
    path: Path | None = None

    @property
    def title(self) -> str:
        """Return the name of the program, for messages."""
        return TITLES.get(self.program, "transformers")


@functools.cache
def load_peer_configs() -> dict[str, Any]:
    """Return the tables of ``peer_configs.toml``.

    A program that ``extends`` another one has its tables, too.
    """
    programs = tomllib.loads((FILES / "peer_configs.toml").read_text("utf-8"))
    for tables in programs.values():
        for name, base in programs.get(tables.get("extends"), {}).items():
            own = tables.get(name)
            if name != "markers":
                tables[name] = base if own is None else own | base if isinstance(own, dict) else own
    return programs


def read_peer_config(path: Path) -> PeerConfig:
    """Read a configuration of another program.

    Raises:
        InvalidConfig: the file cannot be read, or is of none of the programs.
    """
    shown = str(path)
    if path.suffix in PICKLES:
        rule = "is a pickle, which may run code when it is read"
        remedy = "write it as JSON: open('args.json', 'w').write(training_args.to_json_string())"
        raise InvalidConfig([ConfigError("FILE", shown, rule, remedy)])
    if path.suffix == ".py":
        rule = "is a Python program, which weft does not run"
        remedy = f"write the values to a file: {REMEDY}"
        raise InvalidConfig([ConfigError("FILE", shown, rule, remedy)])
    try:
        if path.stat().st_size > MAX_BYTES:
            raise ValueError(f"it is larger than {MAX_BYTES >> 20} MiB")
        text = read_input(path).removeprefix("\ufeff")
    except (OSError, ValueError) as error:
        reason = describe_cause(error) if isinstance(error, OSError) else error
        raise InvalidConfig([ConfigError("FILE", shown, f"cannot be read: {reason}")]) from error
    try:
        found = parse_peer_config(text, path.suffix)
    except ValueError as error:
        rule = f"cannot be read as {path.suffix.lstrip('.').upper() or 'text'}: {error}"
        raise InvalidConfig([ConfigError("FILE", shown, rule)]) from error
    if found is None:
        rule = "is not a configuration of a program that weft knows"
        raise InvalidConfig([ConfigError("FILE", shown, rule, REMEDY)])
    return replace(found, path=path)


def parse_peer_config(text: str, suffix: str) -> PeerConfig | None:
    """Return the configuration in a file's text; None if of no known program.

    Args:
        text: content of the file.
        suffix: of its name, such as ``.toml``.

    Raises:
        ValueError: the text is not of the format that the suffix names.
    """
    if suffix in (".toml", ".json", ".yaml", ".yml"):
        try:
            tree = _parse_tree(text, suffix)
        except RecursionError as error:
            raise ValueError("it is nested too deeply") from error
        return _detect_tree(tree) if isinstance(tree, dict) else None
    found = _read_arguments(text)
    return found if len(found.values) > 1 else None


def describe_peer_config(path: Path) -> str:
    """Return whose configuration a file is, such as "an axolotl configuration".

    Empty if it is of no known program.
    """
    try:
        config = read_peer_config(path)
    except InvalidConfig:
        return ""
    if config.program == "model":
        return "the config.json of a model"
    article = "an" if config.title[0] in "aeiou" else "a"
    return f"{article} {config.title} configuration"


def is_torchtitan(tree: Mapping[str, Any]) -> bool:
    """Return True if the sections of a TOML are TorchTitan's."""
    sections = {name for name, value in tree.items() if isinstance(value, dict)}
    return len(sections & TORCHTITAN_SECTIONS) >= 2 and "extends" not in tree


def _parse_tree(text: str, suffix: str) -> Any:
    if suffix == ".toml":
        return tomllib.loads(text)
    if suffix == ".json":
        return json.loads(text)
    try:
        import yaml
    except ImportError as error:
        raise ValueError("YAML needs PyYAML: pip install pyyaml") from error
    try:
        return _numbers(yaml.safe_load(text), itertools.count())
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from error


def _numbers(value: Any, visited: Iterator[int]) -> Any:
    """Convert numbers such as 2e-5, which PyYAML takes for text.

    Raises:
        ValueError: aliases expand a small text to very many values.
    """
    if next(visited) > MAX_VALUES:
        raise ValueError(f"it has more than {MAX_VALUES:,} values")
    if isinstance(value, dict):
        return {str(name): _numbers(inner, visited) for name, inner in value.items()}
    if isinstance(value, list):
        return [_numbers(inner, visited) for inner in value]
    is_number = isinstance(value, str) and re.fullmatch(r"[-+]?[\d.]+[eE][-+]?\d+", value)
    return parse_literal(value) if is_number else value


def _detect_tree(tree: dict[str, Any]) -> PeerConfig | None:
    """Recognize the program of a parsed file."""
    if is_torchtitan(tree):
        return PeerConfig("torchtitan", flatten(tree))
    if isinstance(tree.get("model_type"), str) and "hidden_size" in tree:
        return PeerConfig("model", tree)
    arguments = tree.get("MODEL_ARGS", tree)
    if isinstance(arguments, dict) and sum(str(n).startswith("--") for n in arguments) > 1:
        values = {name: value for name, value in arguments.items() if name.startswith("--")}
        return PeerConfig("megatron", {_normalize_flag(n): v for n, v in values.items()})
    tree = _find_smp_parameters(tree)
    programs = ("llamafactory", "axolotl", "huggingface", "deepspeed", "smp")
    counts = {
        program: sum(name in tree for name in load_peer_configs()[program]["markers"]["any"])
        for program in programs
    }
    if "zero_optimization" in tree or "hybrid_shard_degree" in tree:  # one is enough
        program = "deepspeed" if "zero_optimization" in tree else "smp"
        return PeerConfig(program, flatten(tree))
    if counts["llamafactory"] > 1:  # its file has arguments of the Trainer, too
        return PeerConfig("llamafactory", flatten(tree))
    program = max(counts, key=counts.__getitem__)
    return PeerConfig(program, flatten(tree)) if counts[program] > 1 else None


def _find_smp_parameters(tree: dict[str, Any]) -> dict[str, Any]:
    """Return SMP's parameters in the ``distribution`` of an estimator, else the tree."""
    inner: Any = tree
    for name in ("distribution", "smdistributed", "modelparallel", "parameters"):
        inner = inner.get(name, inner) if isinstance(inner, dict) else inner
    return inner if isinstance(inner, dict) else tree


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return ``{"section.key": value}``; None becomes ''."""
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        if isinstance(value, dict) and value:
            flat |= flatten(value, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = "" if value is None or value == {} else value
    return flat


# ----------------------------------------------------------------------- arguments in a script

ASSIGNMENT = re.compile(r"^\s*(?:export\s+|local\s+)?([A-Za-z_]\w*)=(.*)$", re.DOTALL)
VARIABLE = re.compile(r"\$\{(\w+)(?::?-([^{}]*))?\}|\$(\w+)")
PRODUCT = re.compile(r"\$\(\(\s*(\d+)\s*([*+/-])\s*(\d+)\s*\)\)")
SKIPPED = re.compile(r"^\s*(echo|printf|if|elif|while|case|for|mkdir|sed|grep|source|exit)\b")


def _read_arguments(text: str) -> PeerConfig:
    """Read the arguments in a shell script, a file of arguments, or one line of them.

    Variables with a value in the script are replaced.  Branches are not evaluated: the arguments
    of all of them count, the first wins.
    """
    lines = re.sub(r"\\[ \t]*\n", " ", text).splitlines()
    variables: dict[str, str] = {}
    values: dict[str, Any] = {}
    has_branches = False
    for line in lines:
        line = re.sub(r"(^|\s)#.*$", "", line)
        has_branches |= bool(re.match(r"\s*(if|case)\b", line))
        if SKIPPED.match(line) or re.match(r"^\s*[-\w|*]+\)\s*$", line):
            continue
        match = ASSIGNMENT.match(line)
        if match and "--" not in line.partition("=")[2]:
            value = _substitute(match[2].strip().strip("\"'"), variables)
            if not value.startswith("("):
                variables.setdefault(match[1], value)
            continue
        line = re.sub(r"^\s*(export\s+)?\w+\+?=[(\"']?(?=\s*--)", "", line)  # a list of arguments
        for name, value in _pair(_split(_substitute(line, variables))):
            values.setdefault(_normalize_flag(name), value)
    notes = ("The script has branches; the arguments of all of them were read.",) * has_branches
    return PeerConfig("megatron", values, notes if values else ())


def _substitute(text: str, variables: Mapping[str, str]) -> str:
    def value(match: re.Match[str]) -> str:
        default = match[0] if match[2] is None else match[2].strip("\"'")
        return variables.get(match[1] or match[3], default)

    for _ in range(3):  # a default may be a variable
        text = VARIABLE.sub(value, text)
        text = PRODUCT.sub(_compute, text)
    return text


def _compute(match: re.Match[str]) -> str:
    a, b = int(match[1]), int(match[3])
    results = {"*": a * b, "+": a + b, "-": a - b, "/": a // b if b else 0}
    return str(results[match[2]])


def _split(line: str) -> list[str]:
    try:
        words = shlex.split(line, posix=True)
    except ValueError:  # a quotation that ends in another line
        words = line.replace('"', " ").replace("'", " ").split()
    if any(word.count("--") and " " in word for word in words):  # "--flag value" in quotes
        words = [part for word in words for part in (_split(word) if "--" in word else [word])]
    return [word.strip("()") if not word.startswith("$(") else word for word in words]


def _pair(words: list[str]) -> Iterator[tuple[str, Any]]:
    """Yield flags with their values: True without one, a list with several."""
    name, values = "", list[str]()
    for word in [*words, "--"]:
        if re.fullmatch(r"--[A-Za-z][\w-]*(=.*)?", word) or word == "--":
            if name:
                yield name, _join(values)
            name, equals, value = word.partition("=")
            values = [value] if equals else []
            name = "" if name == "--" else name
        elif name and word and not re.match(r"^(\$\{?\w+\[@\]|[;|&>]|\S*\.py$)", word):
            values.append(word)
        elif name and word:  # the end of a list of arguments
            yield name, _join(values)
            name, values = "", []


def _join(values: list[str]) -> Any:
    literals = [parse_literal(value) for value in values]
    return literals[0] if len(literals) == 1 else literals or True


def parse_literal(text: str) -> Any:
    """Return a number or a boolean if the text is one, else the text."""
    lowered = text.lower()
    if lowered in ("true", "false"):
        return lowered == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _normalize_flag(name: str) -> str:
    return "--" + name.lstrip("-").replace("_", "-")
