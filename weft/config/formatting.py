"""Text for people: columns, counts and paths, in what commands print."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any


def format_columns(
    head: Sequence[str], rows: Sequence[Sequence[str]], left: Collection[int]
) -> list[str]:
    """Format rows as columns, right-aligned except those in ``left``."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if c in left else cell.rjust(width)
            for c, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in [head, *rows]
    ]


def format_count(count: int) -> str:
    """Format a count with its unit: ``2_023_488`` -> ``'2.0 M'``."""
    for power, letter in ((12, "T"), (9, "B"), (6, "M"), (3, "K")):
        if count >= 10**power:
            return f"{count / 10**power:.1f} {letter}"
    return str(count)


def display_path(path: Path) -> str:
    """Return a path relative to the working directory if it is inside it."""
    relative = os.path.relpath(path)
    return str(path) if relative.startswith("..") else relative


def format_value(value: object) -> str:
    """Format a value as ``--section.key VALUE`` has it: a string as it is, else TOML."""
    return value if isinstance(value, str) else format_toml(value)


def to_python(value: object) -> Any:
    """Return scalars and arrays of NumPy or PyTorch as Python numbers and lists."""
    return value.tolist() if callable(getattr(value, "tolist", None)) else value  # type: ignore[attr-defined]


def to_toml_type(value: object) -> object:
    """Return numbers, paths and dtypes of other libraries as numbers and strings."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if type(value).__name__ == "dtype" and type(value).__module__ == "torch":
        return str(value).removeprefix("torch.")
    return to_python(value)


def format_toml(value: object) -> str:
    """Format a value as TOML, on one line.

    Raises:
        TypeError: if TOML has no such value.
    """
    value = to_toml_type(value)
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise TypeError("is an integer of more than 64 bits")
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, Mapping):
        items = (f"{format_toml(str(k))} = {format_toml(v)}" for k, v in value.items())
        return f"{{{', '.join(items)}}}"
    if isinstance(value, list | tuple | range):
        return f"[{', '.join(map(format_toml, value))}]"
    raise TypeError(f"has the type {type(value).__name__}, which no key has")
