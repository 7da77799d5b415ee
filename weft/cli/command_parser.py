"""The parser of a command: its options, and overrides ``--section.key value``.

Modules of this package import heavy modules inside functions, because ``weft --help`` must be fast.
"""

from __future__ import annotations

import argparse
import inspect
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, TypeAlias

from weft.config.errors import MISSING, ConfigError, ConfigErrors, find_misspelled, suggest
from weft.config.escaping import raw_stream
from weft.config.exit_statuses import USAGE_ERROR

RECIPE_HELP = "a shipped recipe ('weft recipes' lists them), a TOML file, or a run directory"

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
        self.options_are_words = False  # as of 'weft help --parallel.tp'
        # Argument that also takes words after options; argparse wants all of them in one place.
        self.words_after_options = ""
        self.groups: dict[str, list[str]] = {}  # names of commands by title, for the help
        self._commands: Commands | None = None

    def add_commands(self) -> Commands:
        """Make the next word the name of a command; return the list of commands."""
        self._commands = self.add_subparsers(title="commands", required=True, metavar="COMMAND")
        return self._commands

    def subcommands(self) -> Mapping[str, CommandParser]:
        """Return the parsers of this command's commands by name."""
        return self._commands.choices if self._commands is not None else {}

    def error(self, message: str) -> NoReturn:
        """Print the error and end the process with the exit status of a usage error."""
        if unknown := re.match(r"argument COMMAND: invalid choice: '?([^' ]*)", message):
            remedy = suggest(unknown[1], self.subcommands())
            if f"--{unknown[1]}" in self._option_string_actions:
                remedy = f"did you mean '--{unknown[1]}'?"
            message = f"{unknown[1]!r} is not a command: {remedy}"
        print(f"weft: {message}; see '{self.prog} --help'", file=sys.stderr)
        sys.exit(USAGE_ERROR)

    def format_help(self) -> str:
        """Return the help, with the commands in groups if there are any."""
        if not self.groups:
            return super().format_help()
        lines = [f"usage: {self.prog} COMMAND ...", "", f"{self.description}"]
        for title, names in self.groups.items():
            lines += ["", f"{title}:"]
            lines += [f"  {name:<11} {self.subcommands()[name].description}" for name in names]
        lines += ["", f"{self.prog} COMMAND --help explains a command, {self.prog} help KEY a key."]
        return "\n".join(lines) + "\n"

    def print_help(self, file: Any = None) -> None:
        """Print the help; on a terminal, in color."""
        stream = file or sys.stdout
        if stream.isatty() and "NO_COLOR" not in os.environ:
            from rich.console import Console

            Console(file=raw_stream(stream), highlight=False).print(_color(self.format_help()))
        else:
            print(self.format_help(), end="", file=stream)

    def option_names(self) -> list[str]:
        """Return the options, and the keys as options if the command takes them."""
        from weft.config.schema import keys

        own = [word for word in self._option_string_actions if word.startswith("--")]
        return own + [f"--{key}" for key in keys()] * self.takes_keys

    def option_values(self, option: str) -> list[str]:
        """Return the values of an option, if they are few."""
        action = self._option_string_actions.get(option)
        return [*map(str, action.choices)] if action is not None and action.choices else []

    def describe_option(self, option: str) -> str:
        """Return the help of an option; empty if the command does not have it."""
        action = self._option_string_actions.get(option)
        return "" if action is None or action.help == argparse.SUPPRESS else action.help or ""

    def positional_values(self) -> list[str]:
        """Return the values of the arguments: names of recipes, or choices."""
        from weft.config.reader import recipe_names

        positionals = self._get_positional_actions()
        recipes = recipe_names() if any(a.metavar == "RECIPE" for a in positionals) else []
        return recipes + [str(value) for a in positionals for value in a.choices or ()]

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Parse the words after the command's name; argparse calls this for each command.

        A word that the command does not know ends it, with the name of this command.
        """
        words = list(args)
        overrides: list[tuple[str, str]] = []
        errors: list[ConfigError] = []
        if self.options_are_words:
            words = [key_name(w) if w.startswith("--") and w != "--help" else w for w in words]
        elif self.takes_keys:
            words, overrides, errors = self._split_overrides(args)
        elif unknown := self._find_unknown_option(words):
            self.error(f"{unknown} is not an option{self._suggest_option(unknown)}")
        options, rest = super().parse_known_args(words, namespace)
        if name := self.words_after_options:
            more = [word for word in rest if not word.startswith("-")]
            setattr(options, name, [*getattr(options, name), *more])
            rest = [word for word in rest if word.startswith("-")]
        if rest:
            self.error(f"unrecognized arguments: {' '.join(rest)}")
        if self.takes_keys:
            options.overrides, options.errors = overrides, errors
        return options, []

    def _takes_value(self, option: str) -> bool:
        action = self._option_string_actions.get(option)
        return action is not None and action.nargs != 0

    def _find_unknown_option(self, words: Sequence[str]) -> str:
        """Return the first option that a command without keys does not have; may be empty."""
        remaining = list(words)
        while remaining and remaining[0] != "--":
            option, equals, _ = remaining.pop(0).partition("=")
            if option in self._option_string_actions:
                if self._takes_value(option) and not equals:
                    del remaining[:1]
            elif self._commands is not None and not option.startswith("-"):
                return ""  # the name of a command, which knows its options
            elif option.startswith("--"):
                return option
        return ""

    def _suggest_option(self, option: str) -> str:
        own = [word for word in self._option_string_actions if word.startswith("--")]
        near = find_misspelled(option, own)
        if "." in option and not self.takes_keys:
            return ": this command takes no keys"
        return f": did you mean {near!r}?" if near else ""

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
                if self._takes_value(option) and not equals and remaining:
                    rest.append(remaining.pop(0))
                continue
            name = key_name(option)
            if "." not in name and (near := self._suggest_option(option)):
                errors.add(option, "is not an option", near.removeprefix(": "))
                if not equals and remaining and not remaining[0].startswith("-"):
                    remaining.pop(0)
                continue
            if not equals and name in SWITCHES:
                name, value = SWITCHES[name]
            elif not equals:
                if not remaining or remaining[0].startswith("--") or remaining[0] == "-h":
                    errors.append(_missing_value(name))
                    continue
                value = remaining.pop(0)
            overrides.append((name, value))
        return rest, overrides, errors


def _missing_value(name: str) -> ConfigError:
    """Return the error of a key without a value, which may be no key."""
    from weft.config.reader import nearest_key
    from weft.config.schema import keys

    if name in keys() or name.startswith("model."):
        remedy = f"write --{name} VALUE; 'weft help {name}' describes the values"
        return ConfigError(f"--{name}", MISSING, "needs a value", remedy)
    return ConfigError(f"--{name}", MISSING, "is not a known key", nearest_key(name))


def key_name(option: str) -> str:
    """Return the key of an option; the entry of a table may have a dash."""
    *key, entry = option.partition("=")[0].removeprefix("--").split(".", 2)
    if len(key) < 2:
        name = ".".join([*key, entry]).replace("-", "_")
        return SHORT_KEYS.get(name, name)
    return ".".join([*(word.replace("-", "_") for word in key), entry])


def _color(text: str) -> Any:
    """Return the help as rich text: bold titles; commands, options, keys in color."""
    from rich.text import Text

    lines = []
    for line in text.splitlines():
        styled = Text(line)
        styled.highlight_regex(r"^(usage|[A-Za-z ]+:$)", "bold")
        styled.highlight_regex(
            r"(?<=^  )(-[-\w.]+(, -[-\w.]+)*|[a-z_]+(\.[a-z_<>]+)?)(?= |$)", "cyan"
        )
        lines.append(styled)
    return Text("\n").join(lines)


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
