"""Model families: finding one by name, and a preset with the user's overrides.

A family is one file with a `Family` in it.  weft's own are listed in `FAMILIES`; a recipe
names a user's as ``model.kind = "package.module:attribute"``.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping
from typing import Any

from weft.config.errors import ConfigError, InvalidConfig, suggest
from weft.config.reader import check_section
from weft.config.schema import Job, Section, replace
from weft.models import llama, mistral, moe, qwen3
from weft.models.family import Family

__all__ = ["FAMILIES", "Family", "load_family", "resolve_model", "spelled_out"]

FAMILIES: dict[str, Family] = {
    "llama": llama.FAMILY,
    "mistral": mistral.FAMILY,
    "qwen3": qwen3.FAMILY,
    "moe": moe.FAMILY,
}


def load_family(kind: str) -> Family:
    """The family of that name, or the user's own at ``package.module:attribute``.

    Raises:
        InvalidConfig: with a problem of ``model.kind`` if there is none.
    """
    if kind in FAMILIES:
        return FAMILIES[kind]
    module_name, colon, attribute = kind.partition(":")
    if not colon:
        remedy = f"{suggest(kind, FAMILIES)} or name your own as package.module:attribute"
        raise _invalid_kind(kind, "no such model family", remedy)
    if not all(part.isidentifier() for part in module_name.split(".")):
        raise _invalid_kind(
            kind, "not a module's name before the colon", "package.module:attribute"
        )
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # whatever the user's module raises
        rule = f"cannot be imported: {type(error).__name__}: {error}"
        missing = isinstance(error, ModuleNotFoundError)
        remedy = "its folder must be on PYTHONPATH" if missing else "mend the module"
        raise _invalid_kind(kind, rule, remedy) from error
    family = getattr(module, attribute, None)
    if not isinstance(family, Family):
        found = [name for name, value in vars(module).items() if isinstance(value, Family)]
        missing = attribute not in vars(module)
        rule = f"{module_name} has no {attribute!r}" if missing else "is not a weft.models.Family"
        remedy = suggest(attribute, found) if found else "make one: weft.models.Family(...)"
        raise _invalid_kind(kind, rule, remedy)
    return family


def _invalid_kind(kind: str, rule: str, remedy: str) -> InvalidConfig:
    return InvalidConfig([ConfigError("model.kind", kind, rule, remedy)])


def resolve_model(
    kind: str, preset: str, overrides: Mapping[str, Any]
) -> tuple[Section | None, list[ConfigError]]:
    """A preset of a family with some fields changed.

    Args:
        kind: see `load_family`.
        preset: a name in the family's presets.
        overrides: field name to value, with TOML's types, taken strictly.

    Returns:
        The configuration, or None if there are problems, and every problem found: unknown
        names, wrong types and impossible values together, each keyed ``model.<field>``.
    """
    try:
        family = load_family(kind)
    except InvalidConfig as error:
        return None, error.problems
    problems = []
    base = family.presets.get(preset)
    if base is None:
        problems.append(
            ConfigError("model.preset", preset, "no such preset", suggest(preset, family.presets))
        )
    # A field is checked alone first, so that one bad value does not hide the others.
    fields = base.model_dump() if base else {}
    invalid = [
        problem
        for problem in check_section(family.config, "model", {**fields, **overrides})
        # Without a base, fields that have no default are missing: not the user's mistake.
        if problem.key.removeprefix("model.") in overrides
    ]
    problems += invalid
    if base is None:
        return None, problems
    bad = {problem.key for problem in invalid}
    good = {name: value for name, value in overrides.items() if f"model.{name}" not in bad}
    config = family.config.model_validate_json(json.dumps(fields | good), strict=True)
    found = [problem for problem in family.check(config) if problem.key not in bad]
    bad |= {problem.key for problem in found}
    problems += [problem for problem in found if bad.isdisjoint(problem.depends)]
    return (None if problems else config), problems


def spelled_out(job: Job) -> Job:
    """The job with every field of its model, so that two of the same model have the same keys.

    A recipe names a preset, and an imported run has the fields that were found.  The job as it is
    if there is no such model.
    """
    config, _ = resolve_model(job.model.kind, job.model.preset, job.model.overrides())
    if config is None:
        return job
    first = next(iter(load_family(job.model.kind).presets))
    return replace(job, model={"preset": first, **config.model_dump()})
