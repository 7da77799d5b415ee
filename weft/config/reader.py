"""Read a Job from a recipe and from command-line overrides.

Two rules make mistakes cheap for the user:

* Reading does not stop at the first mistake.  The reader replaces a bad value by its default,
  records a `ConfigError`, and continues, so that one attempt shows every mistake.
* A value in TOML is taken strictly (``steps = "100"`` is a mistake).  A value on the command line
  is text, and is read by the type of its key.

This module does not import torch.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from importlib import resources
from pathlib import Path
from types import UnionType
from typing import Any, TypeVar, Union, get_args, get_origin

from pydantic import ValidationError

from weft.config.errors import (
    MISSING,
    ConfigError,
    ConfigErrors,
    capitalize,
    find_misspelled,
    suggest,
    truncate_list,
)
from weft.config.keys import Section
from weft.config.peer_configs import describe_peer_config, is_torchtitan
from weft.config.peer_names import all_peer_names, describe_peer_name, load_peer_names
from weft.config.run_paths import JOB_FILE, absolute_dir, is_run_file, resolve_run_paths
from weft.config.schema import (
    CHANGEABLE_KEYS,
    NO_NUL,
    ONE_LINE,
    PAIR_OBJECTIVES,
    SECTIONS,
    Job,
    Name,
    Text,
    keys,
)

T = TypeVar("T")


RECIPES = resources.files("weft") / "recipes"


def nearest_key(name: str, extra: Iterable[str] = ()) -> str:
    """Return what to use instead of an unknown ``section.key`` or bare key.

    That is the key that a name of another project stands for, the answer to a name that weft has no
    key for (`weft.config.peer_names`), or the key that ``name`` misspells.  ``extra`` has valid
    keys that are not among ``keys()``.
    """
    if advice := describe_peer_name(name):
        return advice
    every = dict.fromkeys([*keys(), *extra])
    section, dot, last = name.rpartition(".")
    if dot and section not in SECTIONS and (other := find_misspelled(section, SECTIONS)):
        is_open = SECTIONS[other].model_config["extra"] == "allow"
        if is_open or f"{other}.{last}" in every:
            return f"did you mean '{other}.{last}'?"
    inside = [key for key in every if key.startswith(f"{section}.")]
    if near := find_misspelled(name, inside):
        return f"did you mean {near!r}?"
    # In another section only the name itself, because a similar one means another thing there.
    sections = [key for key in every if key.rpartition(".")[2] == last]
    if not dot and not sections:
        names = {key.rpartition(".")[2] for key in every}
        near = find_misspelled(last, names)
        sections = [key for key in every if near and key.rpartition(".")[2] == near]
    if not sections and (peer := find_misspelled(last, all_peer_names())):
        return f"did you mean {peer!r}? {capitalize(describe_peer_name(peer))}"
    if 0 < len(sections) < 4:
        return f"did you mean {' or '.join(map(repr, sections))}?"
    return "'weft help keys' lists every key"


Tree = dict[str, dict[str, Any]]


MAX_RECIPE_BYTES = 16 << 20


def recipe_names() -> list[str]:
    """Return the names of the shipped recipes, sorted.

    Those in a directory of recipes have its name: ``paper/llama3-8b``.
    """
    directories = {"": RECIPES, "paper/": RECIPES / "paper"}
    return sorted(
        prefix + file.name.removesuffix(".toml")
        for prefix, directory in directories.items()
        for file in directory.iterdir()
        if file.name.endswith(".toml")
    )


def recipe_title(recipe: str) -> str:
    """Return the name of a recipe for people.

    That is a shipped name, or the last part of a path, without ``.toml``.
    """
    return recipe if recipe in recipe_names() else Path(recipe).name.removesuffix(".toml")


def recipe_slug(recipe: str) -> str:
    """Return the `recipe_title` as one part of a path."""
    return recipe_title(recipe).replace("/", "-")


def read_job(
    recipe: str,
    overrides: Sequence[tuple[str, str]] = (),
    cli_errors: Iterable[ConfigError] = (),
) -> tuple[Job, Job, ConfigErrors]:
    """Read a recipe and apply command-line overrides.

    Args:
        recipe: a shipped name, the path of a TOML file, or a run directory or its job.toml: then
            ``run.dir`` is that directory.
        overrides: ``("section.key", "text")`` pairs; a later one wins.  ``section.key.entry``
            changes one entry of a table, such as ``launch.options.partition``.
        cli_errors: errors that the command line already has.

    Returns:
        The job, the recipe without the overrides (to list the differences), and every error.
        Where a value was invalid, the jobs have the default.
    """
    errors = ConfigErrors()
    errors += cli_errors
    tree = _load_recipe(recipe, errors)
    base = _validate(tree, errors)
    _drop_replaced(tree, dict(overrides))
    for name, text in overrides:
        _override(tree, name, text, errors)
    _move_checkpoints(tree, base, dict(overrides))
    return _validate(tree, errors), base, errors


def _drop_replaced(tree: Tree, chosen: Mapping[str, object]) -> None:
    """Remove the keys of ``tree`` that keys chosen later take the place of.

    Those are ``train.epochs`` and ``train.steps``, ``data.mixture`` and ``data.path``, and
    ``model.path`` and the other model keys.
    """
    beside = {f"model.{name}" for name in ("path", "mtp_layers", *CHANGEABLE_KEYS)}
    model = [name for name in chosen if name.startswith("model.") and name not in beside]
    for first, others in (
        ("train.steps", ["train.epochs"]),
        ("data.path", ["data.mixture"]),
        ("model.path", model),
    ):
        is_first = chosen.get(first, "auto") not in ("auto", "")
        is_other = any(chosen.get(name, 0) not in (0, "0", "", "{}", {}) for name in others)
        section, _, last = first.partition(".")
        values = tree.get(section, {})
        if is_other and not is_first:
            values.pop(last, None)
        elif is_first and not is_other:
            replaced = {"train": ["epochs"], "data": ["mixture"]}
            for key in replaced.get(section, [key for key in values if key != last]):
                values.pop(key, None)


def _move_checkpoints(tree: Tree, base: Job, chosen: Mapping[str, str]) -> None:
    """Let a ``checkpoint.dir`` in the run directory follow another ``run.dir``."""
    if "run.dir" not in chosen or "checkpoint.dir" in chosen or base.checkpoint.is_in_run_dir:
        return
    here, run_dir = Path(base.checkpoint.dir), tree.get("run", {}).get("dir", "auto")
    if base.run.dir != "auto" and here.is_relative_to(base.run.dir):
        inside = here.relative_to(base.run.dir)
        tree["checkpoint"]["dir"] = "auto" if run_dir == "auto" else str(Path(run_dir) / inside)


# Methods that people type as the name of a recipe.
RECIPES_OF_METHODS = {
    **{name: f"use dpo --train.objective {name}" for name in PAIR_OBJECTIVES if name != "dpo"},
    "kto": "use dpo --data.format unpaired --train.objective kto",
    "sft": "use chat, or lora for adapters",
    "rm": "use reward",
}


def _load_recipe(recipe: str, errors: ConfigErrors, seen: tuple[str, ...] = ()) -> Tree:
    """Load a recipe over the recipes that it extends; return its tree."""
    named = find_recipe(recipe, Path(seen[-1]).parent if seen else None)
    if named is None:
        rule = "is not a known recipe, the path of a .toml file, or a run directory"
        remedy = suggest(recipe, recipe_names())
        remedy = RECIPES_OF_METHODS.get(recipe.lower(), remedy)
        errors.add("extends" if seen else "recipe", rule, remedy, value=recipe)
        return {}
    path = named.resolve()
    if str(path) in seen:
        chain = " -> ".join(Path(p).name for p in (*seen, str(path)))
        errors.add("extends", f"makes recipes extend each other: {chain}", value=recipe)
        return {}
    try:
        if path.stat().st_size > MAX_RECIPE_BYTES:
            raise ValueError(f"it is larger than {MAX_RECIPE_BYTES >> 20} MiB")
        tree = tomllib.loads(path.read_text("utf-8-sig"))
    except (OSError, ValueError, RecursionError) as error:
        rule, remedy = f"cannot be read as TOML: {error}", ""
        if program := describe_peer_config(path):
            rule, remedy = f"is {program}", f"translate it: weft recipe from {recipe}"
        errors.add("recipe", rule, remedy, value=recipe if program else str(path))
        return {}
    if is_torchtitan(tree):
        remedy = f"translate it: weft recipe from {recipe}"
        errors.add("recipe", "is a TorchTitan configuration", remedy, value=recipe)
        return {}
    is_run = is_run_file(named, tree, frozenset(SECTIONS))
    parent = tree.pop("extends", None)
    for name in [name for name, section in tree.items() if not isinstance(section, dict)]:
        rule = "is not a section" if name in SECTIONS else "is not a known key"
        remedy = f"write [section] first. {capitalize(nearest_key(name))}"
        errors.add(name, rule, remedy, value=tree.pop(name))
    if is_run:
        _place_run(tree, absolute_dir(named.parent), is_extended=bool(seen))
    if parent is None:
        return tree
    if not isinstance(parent, str):
        errors.add("extends", "must be the name or path of a recipe", value=parent)
        return tree
    below = _load_recipe(parent, errors, (*seen, str(path)))
    _drop_replaced(
        below, {f"{n}.{k}": v for n, section in tree.items() for k, v in section.items()}
    )
    return {
        name: below.get(name, {}) | tree.get(name, {}) for name in dict.fromkeys([*below, *tree])
    }


def _place_run(tree: Tree, run_dir: Path, is_extended: bool) -> None:
    """Resolve the paths in a run's job.toml; a recipe that extends it is another run."""
    checkpoints = tree.get("checkpoint", {}).get("dir")
    if is_extended and isinstance(checkpoints, str) and checkpoints.startswith("./"):
        del tree["checkpoint"]["dir"]
    resolve_run_paths(tree, run_dir)
    tree.setdefault("run", {})["dir"] = "auto" if is_extended else str(run_dir)


def find_recipe(recipe: str, beside: Path | None = None) -> Path | None:
    """Return the TOML file of a recipe; None if there is none.

    Args:
        recipe: see `read_job`.
        beside: directory in which a path is tried first.
    """
    shipped = Path(str(RECIPES / f"{recipe}.toml"))
    names = [Path(recipe)] if beside is None else [beside / recipe, Path(recipe)]
    candidates = [path for name in names for path in (name, name / JOB_FILE)]
    if recipe in recipe_names():
        return shipped
    try:
        return next((path for path in candidates if path.is_file()), None)
    except (OSError, ValueError):  # too long for a path, or has a NUL
        return None


def _override(tree: Tree, name: str, text: str, errors: ConfigErrors) -> None:
    if any("\ud800" <= letter <= "\udfff" for letter in name + text):
        errors.add(ascii(name)[1:-1], "is not UTF-8 text", value=ascii(text))
        return
    section, _, last = name.partition(".")
    model = SECTIONS.get(section)
    table, _, entry = last.partition(".")
    if model is not None and entry and _is_table(model, table):
        values = tree.setdefault(section, {}).get(table)
        added = {entry: text if _has_text_values(model, table) else _literal(text)}
        tree[section][table] = (values if isinstance(values, dict) else {}) | added
        return
    if model is None or (
        last not in model.model_fields and model.model_config["extra"] == "forbid"
    ):
        remedy = nearest_key(name)
        value = _shown(f"{name} {remedy}", _literal(text))
        errors.add(name, "is not a known key", remedy, value=value)
        return
    if last not in model.model_fields:
        tree.setdefault(section, {})[last] = _literal(text)
        return
    literal = _literal(text)
    parts = [part.strip() for part in text.split(",") if part.strip()]
    annotation = model.model_fields[last].annotation
    origin = get_origin(annotation)
    if origin in (Union, UnionType) and text != "auto":  # a list, or auto
        origin = next((tuple for each in get_args(annotation) if get_origin(each) is tuple), origin)
    if origin is tuple and not isinstance(literal, list):
        literal = [_literal(part) for part in parts]
    elif origin is dict and not isinstance(literal, dict):
        is_text = _has_text_values(model, last)
        if get_args(annotation)[1] == Name:  # values may have commas: NCCL_IB_HCA=mlx5_0,mlx5_1
            if parts and "=" not in parts[0]:
                errors.add(name, "must be NAME=VALUE", f"use --{name} NAME=VALUE", value=text)
                return
            pairs = [p.partition("=") for p in re.split(r"\s*,\s*(?=[^,=]+=)", text) if p.strip()]
        elif is_text:
            pairs = [part.partition("=") for part in parts]
        else:  # a path, which may contain '=', and a number
            pairs = [part.rpartition("=") for part in parts]
        literal = {
            name or value: (value if equals else name) if is_text else _literal(value)
            for name, equals, value in pairs
        }
    try:
        if isinstance(literal, list | dict):
            model.model_validate_json(json.dumps({last: literal}, default=_no_json), strict=True)
            value = literal
        else:
            value = getattr(model.model_validate_strings({last: text}), last)
    except ValidationError as error:
        errors += _translate(error, model, section, {last: literal})
        value = None
    if value is None:
        tree.get(section, {}).pop(last, None)
    else:
        tree.setdefault(section, {})[last] = value


def _is_table(model: type[Section], name: str) -> bool:
    field = model.model_fields.get(name)
    return field is not None and get_origin(field.annotation) is dict


def _has_text_values(model: type[Section], name: str) -> bool:
    """Return True if the values of a table are text, also if they look like numbers."""
    return get_args(model.model_fields[name].annotation)[1] in (Text, Name)


def _literal(text: str) -> Any:
    """Parse text for a key of unknown type: a TOML value, else a string."""
    try:
        return tomllib.loads(f"x = {text}")["x"]
    except (ValueError, RecursionError):
        return text


def _validate(tree: Tree, errors: ConfigErrors) -> Job:
    """Return the Job of ``tree``.

    Report each invalid entry once, and remove it from ``tree``: the Job has its default.
    """
    for name in [name for name in tree if name not in SECTIONS]:
        shown = f"[{name}]"
        remedy = _describe_peer_section(name, tree[name]) or suggest(name, SECTIONS)
        errors.add(shown, "is not a known section", remedy)
        del tree[name]
    for name, section in tree.items():
        found = check_section(SECTIONS[name], name, section)
        errors += found
        for error in found:
            section.pop(error.key.split(".")[1], None)
    return Job.model_validate_json(json.dumps(tree, default=_no_json), strict=True)


def _describe_peer_section(name: str, values: Mapping[str, Any]) -> str:
    """Return weft's keys for a section of TorchTitan's; empty if it is none."""
    keys_by_name = {n["torchtitan"]: k for k, n in load_peer_names().items() if "torchtitan" in n}
    found = [
        f"{v} is {keys_by_name[f'{name}.{v}']}" for v in values if f"{name}.{v}" in keys_by_name
    ]
    return f"it is a section of TorchTitan: {truncate_list(found)}" if found else ""


def _no_json(value: object) -> dict[str, str]:
    """Convert a date of TOML to a value that no key accepts."""
    return {"date": str(value)}


def check_section(kind: type[Section], name: str, values: Mapping[str, Any]) -> list[ConfigError]:
    """Return the errors of the ``values`` of section ``name``.

    Types are strict as in JSON: an array may become a tuple, but "8" is not 8.
    """
    try:
        kind.model_validate_json(json.dumps(values, default=_no_json), strict=True)
    except ValidationError as error:
        return _translate(error, kind, name, values)
    return []


def _translate(
    error: ValidationError, kind: type[Section], name: str, values: Mapping[str, Any]
) -> ConfigErrors:
    """Convert pydantic's errors to one `ConfigError` per key, with all alternatives."""
    rules: dict[str, list[str]] = {}
    errors = ConfigErrors()
    for entry in error.errors(include_url=False):
        table = values.get(str(entry["loc"][0])) if entry["loc"] else None
        if entry["type"] == "string_type" and isinstance(table, Mapping) and len(entry["loc"]) == 2:
            inside = str(entry["loc"][1])
            remedy = f'use {inside} = "{json.dumps(table[inside], default=str)}", in quotes'
            full = f"{name}.{entry['loc'][0]}.{inside}"
            errors.add(full, "must be text", remedy, value=table[inside])
            continue
        # An error of nesting names no key; blame every list and table.
        nested = [last for last, value in values.items() if isinstance(value, list | dict)]
        # Of a list of tables, the table and its key.
        inner = [loc for loc in entry["loc"][1:3] if len(entry["loc"]) > 2]
        where = f"[{inner[0]}].{inner[1]} " if inner and isinstance(inner[0], int) else ""
        rule = validation_rule(entry)
        if where and entry["type"] == "extra_forbidden":
            rule = f"is not one of {', '.join(_table_keys(kind, str(entry['loc'][0])))}"
        for last in entry["loc"][:1] or nested:
            rules.setdefault(str(last), []).append(where + rule)
    for last, messages in rules.items():
        field = kind.model_fields.get(last)
        if field is None:
            remedy = nearest_key(
                f"{name}.{last}", [f"{name}.{known}" for known in kind.model_fields]
            )
        else:
            usual = json.dumps(field.get_default(call_default_factory=True), default=str)
            default = "" if field.is_required() else f" (default {usual})"
            remedy = f"{field.description or kind.__name__}{default}"
        shown = " or ".join(dict.fromkeys(messages))
        value = _shown(f"{name}.{last} {remedy}", values.get(last, MISSING))
        errors.add(f"{name}.{last}", shown, remedy, value=value)
    return errors


def _shown(text: str, value: object) -> object:
    """Return a value for a message; hide it if ``text`` is about ``launch.secrets``."""
    return "(not shown)" if "launch.secret" in text else value


def _table_keys(kind: type[Section], name: str) -> list[str]:
    """Return the keys of the tables of a key that is a list of tables."""
    tables = get_args(kind.model_fields[name].annotation)
    return [key for table in tables if table is not Ellipsis for key in table.model_fields]


_RULES = {
    "extra_forbidden": "is not a known key",
    "unexpected_keyword_argument": "is not a known key",
    "missing": "is missing",
    "int_type": "must be a whole number",
    "int_parsing": "must be a whole number",
    "int_parsing_size": "must be a whole number of fewer digits",
    "int_from_float": "must be a whole number",
    "float_type": "must be a number",
    "float_parsing": "must be a number",
    "finite_number": "must be a finite number",
    "string_type": "must be a string",
    "bool_type": "must be true or false",
    "bool_parsing": "must be true or false",
    "literal_error": "must be {expected}",
    "greater_than": "must be greater than {gt}",
    "greater_than_equal": "must be at least {ge}",
    "less_than": "must be less than {lt}",
    "less_than_equal": "must be at most {le}",
    "string_too_short": "must not be empty",
    "tuple_type": "must be a list: [1, 2]",
    "string_pattern_mismatch": "must match {pattern}",
    "value_error": "{error}",
}


def validation_rule(entry: Mapping[str, Any]) -> str:
    """Return the rule of a pydantic error, as the end of a sentence."""
    broken = {
        NO_NUL: "must not contain a NUL character",
        ONE_LINE: "must not contain control characters, such as a newline",
    }.get(entry.get("ctx", {}).get("pattern", ""))
    if broken:
        return broken
    template = _RULES.get(entry["type"])
    if template is None:
        return re.sub(r"^\w+ should", "must", entry["msg"])
    return template.format(**entry.get("ctx", {}))
