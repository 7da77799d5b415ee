"""``weft completion``: complete commands, keys and recipes in a shell.

The script calls weft at every TAB with the words of the line, so it never gets old.
"""

from __future__ import annotations

import argparse
import json

from weft.cli.command_parser import CommandParser, Commands, add_command

SCRIPTS = {
    "bash": """\
_weft() {
    local IFS=$'\\n'
    COMPREPLY=($(weft completion --line "${COMP_WORDS[@]:1:COMP_CWORD}" 2>/dev/null))
}
complete -o default -o bashdefault -F _weft weft
""",
    "zsh": """\
#compdef weft
_weft() {
    local -a found
    found=(${(f)"$(weft completion --line "${(@)words[2,CURRENT]}" 2>/dev/null)"})
    if (( $#found )); then compadd -- $found; else _files; fi
}
compdef _weft weft
""",
    "fish": """\
complete -c weft -a '(weft completion --line (commandline -opc)[2..] (commandline -ct) 2>/dev/null)'
""",
}


def add_completion(commands: Commands) -> None:
    """Add ``weft completion``."""
    parser = add_command(commands, "completion", run_completion, takes_keys=False)
    parser.add_argument("shell", nargs="?", choices=[*SCRIPTS], help="shell of the script")
    parser.add_argument("--line", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)


def run_completion(options: argparse.Namespace) -> None:
    """Print a script that completes commands, keys and recipes in bash, zsh or fish.

    bash   eval "$(weft completion bash)"           in ~/.bashrc
    zsh    eval "$(weft completion zsh)"            in ~/.zshrc, after compinit
    fish   weft completion fish | source            in ~/.config/fish/config.fish
    """
    if options.line is not None:
        print("\n".join(complete(options.parser, options.line)))
    else:
        print(SCRIPTS[options.shell or "bash"], end="")


def complete(parser: CommandParser, words: list[str]) -> list[str]:
    """Return the completions of the last word; none: the shell completes file names.

    Args:
        parser: the parser of all commands.
        words: the words after ``weft``; the last one may be empty.
    """
    *before, last = words or [""]
    while before and before[0] in parser.subcommands():
        parser = parser.subcommands()[before.pop(0)]
    if last.startswith("-"):
        found = parser.option_names()
    elif before and before[-1].startswith("--"):
        found = _values(parser, before[-1])
    elif commands := parser.subcommands():
        found = [*commands]
    else:
        found = parser.positional_values()
    return sorted(word for word in found if word.startswith(last))


def _values(parser: CommandParser, option: str) -> list[str]:
    """Return the values of an option or a key, if they are few."""
    from weft.config.schema import SECTIONS

    section, _, key = option.removeprefix("--").partition(".")
    if parser.takes_keys and key in getattr(SECTIONS.get(section), "model_fields", ()):
        entry = SECTIONS[section].model_json_schema()["properties"][key]
        values = [value for each in entry.get("anyOf", [entry]) for value in _enumerate(each)]
        return [value if isinstance(value, str) else json.dumps(value) for value in values]
    return parser.option_values(option)


def _enumerate(entry: dict[str, object]) -> list[object]:
    if entry.get("type") == "boolean":
        return [True, False]
    values = entry.get("enum", [entry["const"]] if "const" in entry else [])
    return list(values) if isinstance(values, list) else []
