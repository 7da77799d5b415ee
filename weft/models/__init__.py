"""Registry of model families, and resolution of presets with overrides.

A family is one file with a `Family` in it.  `FAMILIES` lists weft's own; a recipe names a user's
family as ``model.kind = "package.module:attribute"``.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping
from typing import Any

from weft.config.errors import ConfigError, ConfigErrors, InvalidConfig, suggest
from weft.config.reader import check_section
from weft.config.schema import Job, ModelSection, Section, replace
from weft.models import llama, mistral, moe, qwen3
from weft.models.family import Family

__all__ = [
    "FAMILIES",
    "Family",
    "expand_preset",
    "load_family",
    "resolve_model",
    "resolve_section",
]

FAMILIES: dict[str, Family] = {
    "llama": llama.FAMILY,
    "mistral": mistral.FAMILY,
    "qwen3": qwen3.FAMILY,
    "moe": moe.FAMILY,
}


def load_family(kind: str) -> Family:
    """Return a family by name, or import a user's ``package.module:attribute``.

    Raises:
        InvalidConfig: with an error of ``model.kind``.
    """
    if kind in FAMILIES:
        return FAMILIES[kind]
    module_name, colon, attribute = kind.partition(":")
    if not colon:
        rule = "is not a known model family, nor of the form package.module:attribute"
        raise _invalid_kind(kind, rule, suggest(kind, FAMILIES))
    if not all(name.isidentifier() for name in module_name.split(".")):
        raise _invalid_kind(
            kind, "is not a module name before the colon", "use package.module:attribute"
        )
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # the user's module can raise any exception
        rule = f"cannot be imported: {type(error).__name__}: {error}"
        is_missing = isinstance(error, ModuleNotFoundError)
        remedy = "add its directory to PYTHONPATH" if is_missing else "fix the module"
        raise _invalid_kind(kind, rule, remedy) from error
    family = getattr(module, attribute, None)
    if not isinstance(family, Family):
        families = [name for name, value in vars(module).items() if isinstance(value, Family)]
        is_missing = attribute not in vars(module)
        rule = (
            f"does not exist: {module_name} has no {attribute!r}"
            if is_missing
            else "is not a weft.models.Family"
        )
        remedy = suggest(attribute, families) if families else "make one: weft.models.Family(...)"
        raise _invalid_kind(kind, rule, remedy)
    return family


def _invalid_kind(kind: str, rule: str, remedy: str) -> InvalidConfig:
    return InvalidConfig([ConfigError("model.kind", kind, rule, remedy)])


def resolve_model(
    kind: str, preset: str, overrides: Mapping[str, Any]
) -> tuple[Section | None, list[ConfigError]]:
    """Resolve a preset of a family with some fields changed.

    Args:
        kind: see `load_family`.
        preset: name of a preset of the family.
        overrides: field name to value, with TOML's types, validated strictly.

    Returns:
        The configuration, or None if there are errors, and all errors: unknown names, wrong types
        and impossible values, each keyed ``model.<field>``.
    """
    try:
        family = load_family(kind)
    except InvalidConfig as error:
        return None, error.problems
    problems = ConfigErrors()
    base = family.presets.get(preset)
    if base is None:
        remedy = suggest(preset, family.presets)
        problems.add("model.preset", "is not a known preset", remedy, value=preset)
    # Each field is validated alone first, so that one bad value does not hide the others.
    fields = base.model_dump() if base else {}
    invalid = [
        problem
        for problem in check_section(family.config, "model", {**fields, **overrides})
        # Without a base, fields without a default are missing, which is not a user error.
        if problem.key.removeprefix("model.") in overrides
    ]
    problems += invalid
    if base is None:
        return None, problems
    invalid_keys = {problem.key for problem in invalid}
    valid = {
        name: value for name, value in overrides.items() if f"model.{name}" not in invalid_keys
    }
    config = family.config.model_validate_json(json.dumps(fields | valid), strict=True)
    conflicts = [problem for problem in family.check(config) if problem.key not in invalid_keys]
    invalid_keys |= {problem.key for problem in conflicts}
    problems += [problem for problem in conflicts if invalid_keys.isdisjoint(problem.depends)]
    return (None if problems else config), problems


def resolve_section(section: ModelSection) -> tuple[Section | None, list[ConfigError]]:
    """Resolve the model of a job: see `resolve_model`."""
    return resolve_model(section.kind, section.preset, section.overrides())


def expand_preset(job: Job) -> Job:
    """Return the job with every field of its model written out.

    Two jobs with the same model then have the same keys, even if one is imported and has no preset.
    The job is returned unchanged if its model is unknown.
    """
    config, _ = resolve_section(job.model)
    if config is None:
        return job
    first = next(iter(load_family(job.model.kind).presets))
    return replace(job, model={"preset": first, **config.model_dump()})
