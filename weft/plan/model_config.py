"""Resolve the model section of a job to the configuration of its family."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from weft.config.errors import ConfigError, ConfigErrors, InvalidConfig, suggest
from weft.config.reader import check_section
from weft.config.schema import Job, ModelSection, Section, replace
from weft.models import load_family


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
    except InvalidConfig as invalid_config:
        return None, invalid_config.errors
    errors = ConfigErrors()
    base = family.presets.get(preset)
    if base is None:
        remedy = suggest(preset, family.presets)
        errors.add("model.preset", "is not a known preset", remedy, value=preset)
    # Each field is validated alone first, so that one bad value does not hide the others.
    fields = base.model_dump() if base else {}
    invalid = [
        error
        for error in check_section(family.config, "model", {**fields, **overrides})
        # Without a base, fields without a default are missing, which is not a user error.
        if error.key.removeprefix("model.") in overrides
    ]
    errors += invalid
    if base is None:
        return None, errors
    invalid_keys = {error.key for error in invalid}
    valid = {
        name: value for name, value in overrides.items() if f"model.{name}" not in invalid_keys
    }
    config = family.config.model_validate_json(json.dumps(fields | valid), strict=True)
    conflicts = [error for error in family.check(config) if error.key not in invalid_keys]
    invalid_keys |= {error.key for error in conflicts}
    errors += [error for error in conflicts if invalid_keys.isdisjoint(error.depends)]
    return (None if errors else config), errors


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
