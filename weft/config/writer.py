"""Write jobs as TOML files, and the JSON Schema of recipes."""

from __future__ import annotations

from typing import Any

import tomli_w

from weft.config.schema import Job, difference


def to_toml(job: Job, recipe: str, base: Job) -> str:
    """Format the complete job as TOML, below its differences from the recipe."""
    lines = [
        f"# {name}: {theirs!r} -> {ours!r}"
        for name, (ours, theirs) in difference(job, base).items()
    ]
    head = [f"# Complete job of a weft run, started from the recipe {recipe!r}."]
    head += (
        ["# Differences from the recipe:", *lines]
        if lines
        else ["# Nothing differs from the recipe."]
    )
    return "\n".join(head) + "\n\n" + tomli_w.dumps(job.model_dump(mode="json"))


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
