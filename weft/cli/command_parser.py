"""The parser of a command: its options, and overrides ``--section.key value``.

Modules of this package import heavy modules inside functions, because ``weft --help`` must be fast.
"""

from __future__ import annotations

import argparse
import inspect
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, TypeAlias

from weft.cluster import USAGE_ERROR
from weft.config.errors import ConfigError, ConfigErrors
from weft.config.reader import recipe_names

RECIPE_NAMES = ", ".join(recipe_names())
RECIPE_HELP = f"a shipped recipe ({RECIPE_NAMES}) or a TOML file"

# Keys that need no section.
SHORT_KEYS = {"nodes": "run.nodes", "rendezvous": "run.rendezvous"}
# Keys that need no value.
SWITCHES = {"preflight": ("resilience.preflight", "true")}

Commands: TypeAlias = "argparse._SubParsersAction[CommandParser]"


class CommandParser(argparse.ArgumentParser):
    """A parser that reports a mistake in one line, and may take overrides of keys.

    Args:
        takes_keys: whether the command accepts ``--section.key value``.  Its options then have the
            pairs of key and value as ``overrides``, and the errors in them as ``errors``.
    """

    def __init__(self, takes_keys: bool = False, **settings: Any) -> None:
        formatter = argparse.RawDescriptionHelpFormatter
        super().__init__(allow_abbrev=False, formatter_class=formatter, **settings)
        self.takes_keys = takes_keys

    def add_commands(self) -> Commands:
        """Make the next word the name of a command; return the list of commands."""
        return self.add_subparsers(title="commands", required=True, metavar="COMMAND")

    def error(self, message: str) -> NoReturn:
        """Print the error and end the process with the exit status of a usage error."""
        print(f"weft: {message}; see '{self.prog} --help'", file=sys.stderr)
        sys.exit(USAGE_ERROR)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Parse the words after the command's name; argparse calls this for each command."""
        if not self.takes_keys:
            return super().parse_known_args(args, namespace)
        words, overrides, errors = self._split_overrides(args)
        options, unknown = super().parse_known_args(words, namespace)
        options.overrides, options.errors = overrides, errors
        return options, unknown

    def _split_overrides(
        self, words: Sequence[str]
    ) -> tuple[list[str], list[tuple[str, str]], list[ConfigError]]:
        """Separate overrides, ``--key value`` or ``--key=value``, from other words.

        An unknown option counts as an override, so that it is reported with the other errors.

        Returns:
            The other words, the overrides, and an error for each key without a value.
        """
        own = self._option_string_actions
        rest: list[str] = []
        overrides: list[tuple[str, str]] = []
        errors = ConfigErrors()
        remaining = list(words)
        while remaining:
            word = remaining.pop(0)
            option, equals, value = word.partition("=")
            if not word.startswith("--") or option == "--" or option in own:
                rest.append(word)
                takes_value = option in own and own[option].nargs != 0
                if takes_value and not equals and remaining:
                    rest.append(remaining.pop(0))
                continue
            name = option.removeprefix("--").replace("-", "_")
            name = SHORT_KEYS.get(name, name)
            if not equals and name in SWITCHES:
                name, value = SWITCHES[name]
            elif not equals:
                if not remaining or remaining[0].startswith("--") or remaining[0] == "-h":
                    errors.add(f"--{name}", "needs a value")
                    continue
                value = remaining.pop(0)
            overrides.append((name, value))
        return rest, overrides, errors


def add_command(
    commands: Commands,
    name: str,
    function: Callable[[argparse.Namespace], int | None],
    text: str | None = None,
    takes_keys: bool = True,
) -> CommandParser:
    """Add a command that calls ``function`` with its options; return its parser.

    ``text`` is the help, by default the docstring of the function: one line about the command and,
    after an empty line, the text below the options.
    """
    summary, _, details = inspect.cleandoc(text or function.__doc__ or "").partition("\n\n")
    parser = commands.add_parser(
        name, help=summary, description=summary, epilog=details, takes_keys=takes_keys
    )
    parser.set_defaults(function=function)
    return parser
