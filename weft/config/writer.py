"""Write jobs as TOML files, and the JSON Schema of recipes."""

from __future__ import annotations

from typing import Any

import tomli_w

from weft.config.schema import Job, difference


def to_toml(job: Job, recipe: str, base: Job, earlier: str = "") -> str:
    """Format the complete job as TOML, below its differences from the recipe.

    Args:
        job: the job.
        recipe: name or path of the recipe.
        base: the recipe without overrides.
        earlier: result of this function for the recipe itself, if that is a job.toml: the recipe
            and the differences are then those of the first start, with the changes since then.
    """
    title, changes = _read_head(earlier)
    for name, (ours, theirs) in difference(job, base).items():
        first = changes.get(name, repr(theirs)).partition(ARROW)[0]
        changes[name] = f"{first}{ARROW}{ours!r}"
    lines = [f"# {name}: {change}" for name, change in changes.items()]
    head = [title or f"# Complete job of a weft run, started from the recipe {recipe!r}."]
    head += (
        ["# Differences from the recipe:", *lines]
        if lines
        else ["# Nothing differs from the recipe."]
    )
    return "\n".join(head) + "\n\n" + tomli_w.dumps(job.model_dump(mode="json"))


ARROW = " -> "


def read_changes(text: str) -> dict[str, str]:
    """Return the differences that a job.toml lists: ``{"section.key": "old -> new"}``."""
    return _read_head(text)[1]


def _read_head(text: str) -> tuple[str, dict[str, str]]:
    """Return the first line of a job.toml, and the differences from its recipe."""
    lines = text.splitlines()
    pairs = [line[2:].partition(": ") for line in lines if line.startswith("# ") and ARROW in line]
    title = lines[0] if lines and lines[0].startswith("# ") else ""
    return title, {name: change for name, _, change in pairs}


def schema() -> dict[str, Any]:
    """Return the JSON Schema of a recipe file, with ``extends``, for editors."""
    tree = Job.model_json_schema()
    tree["title"] = "weft recipe"
    tree["properties"] = {
        "extends": {
            "type": "string",
            "description": "a shipped recipe's name, or a path beside this file",
        }
    } | tree["properties"]
    return tree
