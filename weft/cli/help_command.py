"""``weft help``: help of a command, a key or a section; the list of all keys."""

from __future__ import annotations

import argparse
import json
import re
import shutil
import textwrap
from typing import Any

from weft.cli.command_parser import CommandParser, Commands, add_command
from weft.config.errors import ConfigError, InvalidConfig, find_misspelled
from weft.config.keys import Section, describe_facts
from weft.config.peer_names import PROJECTS, describe_peer_name, load_peer_names
from weft.config.reader import nearest_key
from weft.config.schema import MOST, SECTIONS, keys


def add_help(commands: Commands) -> None:
    """Add ``weft help``."""
    parser = add_command(commands, "help", run_help, takes_keys=False)
    parser.options_are_words = True
    parser.add_argument("topics", metavar="TOPIC", nargs="*", help="command, key or section")


def run_help(options: argparse.Namespace) -> None:
    """Explain a command, a configuration key, a section, or 'keys': all of them.

    weft help train
    weft help batch         keys that have the word in their name or description
    weft help optim.lr
    weft help optim
    """
    parser: CommandParser = options.parser
    topics: list[str] = options.topics
    while topics and topics[0] in parser.subcommands():
        parser = parser.subcommands()[topics.pop(0)]
    if not topics:
        parser.print_help()
        return
    for topic in topics:
        if topic in keys():
            print(describe_key(topic))
        elif topic in _model_keys():
            print(describe_key(topic, _model_keys()[topic]))
        elif topic == "keys" or topic in SECTIONS:
            print(list_keys("" if topic == "keys" else topic, _model_fields()))
        elif not describe_peer_name(topic) and (lines := find_named(parser, topic)):
            print("\n".join(lines))
        else:
            rule = "is neither a command, a key nor a section"
            names = [*parser.subcommands(), *SECTIONS]
            near = find_misspelled(topic, names)
            remedy = f"did you mean {near!r}?" if near else nearest_key(topic)
            raise InvalidConfig([ConfigError("TOPIC", topic, rule, remedy)])


def list_keys(section: str = "", fields: type[Section] | None = None) -> str:
    """Return every key with its default and description, as wide as the terminal.

    Args:
        section: only the keys of this one.
        fields: the model's fields, to list them, too; None: say how to list them.
    """
    lines = [] if section else ["keys; override them as --section.key value:"]
    for name, kind in SECTIONS.items():
        if section not in ("", name):
            continue
        lines += [""] if lines else []
        for key, field in kind.model_fields.items():
            lines += _wrap(f"{name}.{key}", json.dumps(field.default), field.description or "")
        if kind.model_config["extra"] == "allow" and fields is None:
            text = "fields of the model, such as model.num_layers: weft help model"
            lines += _wrap(f"{name}.<field>", "", text)
        elif kind.model_config["extra"] == "allow" and fields is not None:
            lines += ["", "  Fields of the model; a preset has its own values:"]
            for key, field in fields.model_fields.items():
                lines += _wrap(f"{name}.{key}", json.dumps(field.default), field.description or "")
    return "\n".join(lines)


def find_keys(word: str) -> list[str]:
    """Return lines about the keys with a word in name, description or synonyms."""
    kinds: dict[str, type[Section]] = {
        f"{name}.{key}": kind for name, kind in SECTIONS.items() for key in kind.model_fields
    }
    kinds |= _model_keys()
    wanted = word.lower().replace("-", "_")
    texts = {key: kind.model_fields[key.partition(".")[2]] for key, kind in kinds.items()}
    words = {key: " ".join(names.values()) for key, names in load_peer_names().items()}
    named = [key for key in texts if wanted in key]
    plain = wanted.replace("_", " ")
    described = [
        key
        for key, field in texts.items()
        if key not in named
        and any(
            re.search(rf"\b{re.escape(plain)}", text.lower().replace("_", " "))
            for text in (field.description or "", words.get(key, ""))
        )
    ]
    lines = []
    for key in [*named, *described]:
        default = json.dumps(texts[key].default)
        lines += _wrap(key, default, texts[key].description or "")
    return lines


def find_named(parser: CommandParser, word: str) -> list[str]:
    """Return lines about the options named ``word``, and about the keys with the word."""
    found = find_keys(word)
    return [*find_options(parser, word), *([f"keys about {word!r}:", *found] if found else [])]


def find_options(parser: CommandParser, name: str) -> list[str]:
    """Return a line for each command with the option ``--name``, and what it does."""
    lines = []
    for command, each in {parser.prog: parser, **parser.subcommands()}.items():
        if text := each.describe_option(f"--{name.replace('_', '-')}"):
            prog = command if each is parser else f"{parser.prog} {command}"
            lines.append(f"{prog} --{name.replace('_', '-')}: {text}")
        if each is not parser and each.subcommands():
            lines += find_options(each, name)
    return lines


def _wrap(key: str, default: str, description: str) -> list[str]:
    """Format a key: three columns on a wide terminal, else the description below."""
    width = shutil.get_terminal_size((100, 24)).columns
    head = f"  {key:<30} {default:<16} "
    if width < 90:
        indent = " " * 6
        return [head.rstrip(), *textwrap.wrap(description, width, **_indents(indent, indent))]
    return textwrap.wrap(description, width, **_indents(head, " " * 50))


def _indents(first: str, rest: str) -> dict[str, Any]:
    return {"initial_indent": first, "subsequent_indent": rest, "break_long_words": False}


def _model_fields() -> type[Section]:
    """Return the class with the fields of the model families that weft configures."""
    from weft.models.decoder_config import DecoderConfig  # imports torch

    return DecoderConfig


def _model_keys() -> dict[str, type[Section]]:
    """Return the keys of the model families that weft configures, with their class."""
    return {f"model.{field}": _model_fields() for field in _model_fields().model_fields}


def describe_key(name: str, kind: type[Section] | None = None) -> str:
    """Return meaning, values and default of a key, and its names in other projects."""
    section, _, key = name.partition(".")
    kind = kind or SECTIONS[section]
    schema, field = kind.model_json_schema(), kind.model_fields[key]
    entry = schema["properties"][key]
    if "$ref" in (item := entry.get("items", {})):
        fields = schema["$defs"][item["$ref"].rpartition("/")[2]]["properties"]
        entry = {"const": f"a list of tables with the fields {', '.join(fields)}"}
    width = shutil.get_terminal_size((100, 24)).columns
    text = [f"{field.description}"]
    text.append(f"Values: {describe_values(entry)}. Default: {json.dumps(field.default)}.")
    if name.partition(".")[0] != "launch":
        text.append(" ".join(describe_facts(kind, key)))
    names = load_peer_names().get(name, {})
    others = [f"{names[each]} ({title})" for each, title in PROJECTS.items() if each in names]
    if others:
        text.append(f"In other projects: {', '.join(others)}.")
    text.append(f"Set it with --{name} VALUE, or in a recipe as {key} under [{section}].")
    wrapped = [textwrap.fill(each, width, **_indents("  ", "  ")) for each in text]
    return "\n".join([name, *wrapped])


def describe_values(entry: dict[str, Any]) -> str:
    """Describe the values that a JSON Schema accepts: ``an integer, at least 1``."""
    if "enum" in entry or "const" in entry:
        values = entry.get("enum", [entry.get("const")])
        return " or ".join(str(value) for value in values)
    if "anyOf" in entry:
        return " or ".join(dict.fromkeys(describe_values(each) for each in entry["anyOf"]))
    kinds = {
        "integer": "an integer",
        "number": "a number",
        "boolean": "true or false",
        "string": "text",
        "array": "a list, such as a,b",
        "object": "a table, such as name=value,name=value",
    }
    text = kinds.get(entry.get("type", ""), "any value")
    limits = {
        "minimum": "at least",
        "exclusiveMinimum": "above",
        "maximum": "at most",
        "exclusiveMaximum": "below",
    }
    bounds = [f"{word} {entry[name]:,}" for name, word in limits.items() if name in entry]
    bounds = [bound for bound in bounds if bound != f"at most {MOST:,}"]
    return f"{text}, {' and '.join(bounds)}" if bounds else text
