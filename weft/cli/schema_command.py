"""``weft schema``."""

from __future__ import annotations

import argparse
import json

from weft.cli.command_parser import Commands, add_command


def add_schema(commands: Commands) -> None:
    """Add ``weft schema``."""
    add_command(commands, "schema", run_schema, takes_keys=False)


def run_schema(options: argparse.Namespace) -> None:
    """Print the JSON Schema of a recipe, for editors."""
    from weft.config.writer import schema
    from weft.models import FAMILIES

    tree = schema()
    # The fields of llama, the default, come last and win.
    for family in reversed(list(FAMILIES.values())):
        fields = family.config.model_json_schema()["properties"]
        tree["$defs"]["ModelSection"]["properties"] |= {
            name: {key: value for key, value in field.items() if key != "default"}
            for name, field in fields.items()
        }
    print(json.dumps(tree, indent=2))
