"""``weft recipes``."""

from __future__ import annotations

import argparse
import json
import re
import shutil
import textwrap

from weft.cli.command_parser import Commands, add_command
from weft.config.reader import RECIPES, read_job, recipe_names


def add_recipes(commands: Commands) -> None:
    """Add ``weft recipes``."""
    parser = add_command(commands, "recipes", run_recipes, takes_keys=False)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")


def run_recipes(options: argparse.Namespace) -> None:
    """List the shipped recipes: model, hardware and purpose."""
    rows = [describe_recipe(name) for name in recipe_names()]
    if options.json:
        print(json.dumps(rows, indent=2))
        return
    widths = [max(len(row[column]) for row in rows) for column in ("name", "model", "cluster")]
    width = shutil.get_terminal_size((100, 24)).columns
    for row in rows:
        cells = [row["name"], row["model"], row["cluster"]]
        head = "  ".join(cell.ljust(size) for cell, size in zip(cells, widths, strict=True)) + "  "
        indent = " " * len(head)
        if width - len(head) < 40:
            head, indent = head.rstrip() + "\n" + " " * 6, " " * 6
        room = max(40, width - len(indent))
        lines = textwrap.wrap(row["purpose"], room) or [""]
        print(head + f"\n{indent}".join(lines))
    print("\nweft train NAME, weft plan NAME; weft help keys: what a recipe can say")


def describe_recipe(name: str) -> dict[str, str]:
    """Return name, model, cluster and purpose of a shipped recipe.

    The purpose is the first sentence of the comment that opens the file.
    """
    job, _, _ = read_job(name)
    comment = []
    for line in (RECIPES / f"{name}.toml").read_text("utf-8").splitlines()[1:]:
        if not line.startswith("# "):
            break
        comment.append(line.removeprefix("# "))
    first = re.split(r"[.:](?:\s|$)", " ".join(comment), maxsplit=1)[0]
    cluster = "this machine" if job.run.cluster == "local" else job.run.cluster
    model = job.model.kind if job.model.overrides() else job.model.full_name
    if job.model.path:
        model = "any"  # the user names it
    return {"name": name, "model": model, "cluster": cluster, "purpose": first}
