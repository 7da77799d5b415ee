"""Overrides as Python values, in the form that the command line has."""

from __future__ import annotations

import os
from collections.abc import Mapping

from weft.config.errors import ConfigErrors
from weft.config.formatting import format_toml
from weft.config.schema import SECTIONS


def encode_overrides(
    overrides: Mapping[str, object] | None, errors: ConfigErrors
) -> list[tuple[str, str]]:
    """Return pairs of key and text, which `weft.config.reader.read_job` checks.

    Args:
        overrides: ``{"section.key": value}``, or ``{"section": {"key": value}}``; values are
            numbers, booleans, strings, paths, lists, mappings.
        errors: receives an error for each value of another type.
    """
    pairs = []
    flat: dict[str, object] = {}
    for key, value in (overrides or {}).items():
        if key in SECTIONS and isinstance(value, Mapping):
            flat |= {f"{key}.{name}": inner for name, inner in value.items()}
        else:
            flat[str(key)] = value
    for key, value in flat.items():
        try:
            pairs.append((str(key), encode_value(str(key), value)))
        except TypeError as error:
            remedy = "use a number, boolean, string, path, list or mapping"
            errors.add(str(key), str(error), remedy, value=repr(value))
    return pairs


def encode_value(key: str, value: object) -> str:
    """Return the text of a value on the command line.

    Raises:
        TypeError: if the value has no such text.
    """
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    if not isinstance(value, str):
        return format_toml(value)
    section, _, last = key.partition(".")
    model = SECTIONS.get(section)
    # A key without a type, as of a user's model: quotes keep "8" a string.
    is_typed = model is None or last.partition(".")[0] in model.model_fields
    return value if is_typed else format_toml(value)
