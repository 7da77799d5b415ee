"""Overrides as Python values, in the form that the command line has."""

from __future__ import annotations

from collections.abc import Mapping

from weft.api.arguments import show_value
from weft.config.errors import ConfigErrors
from weft.config.formatting import format_toml, to_toml_type
from weft.config.schema import SECTIONS


def encode_overrides(
    overrides: object, errors: ConfigErrors, name: str = "overrides"
) -> list[tuple[str, str]]:
    """Return pairs of key and text, which `weft.config.reader.read_job` checks.

    Args:
        overrides: ``{"section.key": value}``, or ``{"section": {"key": value}}``; values are
            numbers, booleans, strings, paths, lists, mappings.  None: none.
        errors: receives an error for each key or value of another type.
        name: of the argument, for errors.
    """
    if overrides is None:
        return []
    if not isinstance(overrides, Mapping):
        remedy = "use a mapping of values by key, such as {'optim.lr': 1e-3}"
        errors.add(name, "is not a mapping", remedy, value=show_value(overrides))
        return []
    flat: dict[object, object] = {}
    for key, value in overrides.items():
        if key in SECTIONS and isinstance(value, Mapping):
            flat |= {f"{key}.{inner}": item for inner, item in value.items()}
        else:
            flat[key] = value
    pairs = []
    for key, value in flat.items():
        if not isinstance(key, str):
            rule, remedy = "has a key that is not a string", "use keys such as 'optim.lr'"
            errors.add(name, rule, remedy, value=show_value(key))
            continue
        try:
            pairs.append((key, encode_value(key, value)))
        except TypeError as error:
            remedy = "use a number, boolean, string, path, list or mapping"
            if callable(value):
                remedy = "name a function as 'module:function'"
            errors.add(key, str(error), remedy, value=show_value(value))
    return pairs


def encode_value(key: str, value: object) -> str:
    """Return the text of a value on the command line.

    Raises:
        TypeError: if the value has no such text.
    """
    value = to_toml_type(value)
    if not isinstance(value, str):
        return format_toml(value)
    section, _, last = key.partition(".")
    model = SECTIONS.get(section)
    # A key without a type, as of a user's model: quotes keep "8" a string.
    is_typed = model is None or last.partition(".")[0] in model.model_fields
    return str(value) if is_typed else format_toml(value)
