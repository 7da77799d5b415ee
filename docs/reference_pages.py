"""References of keys and metrics, as Markdown made from weft's own tables."""

from __future__ import annotations

import ast
import inspect
import io
import json
import re
import tokenize
from collections.abc import Callable, Iterator
from typing import Any

from weft.config import schema
from weft.config.keys import Section, describe_facts
from weft.config.peer_names import PROJECTS, load_peer_answers, load_peer_names
from weft.monitor import step_record
from weft.monitor.exported_metrics import LABELS, RECORD_HELP, exported_name
from weft.monitor.step_timer import KINDS

Json = dict[str, Any]


def code(text: object) -> str:
    return f"`{text}`"


# --------------------------------------------------------------------------- keys


def type_text(values: Json) -> str:
    """Describe a property of the JSON schema: its type and its range."""
    if choices := values.get("anyOf"):
        return ", or ".join(map(type_text, choices))
    if "const" in values:
        return code(values["const"])
    if "enum" in values:
        return "one of " + ", ".join(map(code, values["enum"]))
    if "$ref" in values:
        return "table"
    if values["type"] == "array":
        return f"list of {type_text(values['items'])}s"
    if values["type"] == "object":
        return "table"
    signs = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
    bounds = [
        f"{sign} {values[name]}"
        for name, sign in signs.items()
        if name in values and values[name] != schema.MOST
    ]
    return " ".join([values["type"], ", ".join(bounds)]).strip()


def default_text(value: object) -> str:
    return code(json.dumps(value, ensure_ascii=False)) if value != "" else "empty"


def prose(text: str) -> str:
    """Escape ``<name>`` in text outside of code, which Markdown would take for HTML."""
    parts = text.split("`")
    return "`".join(part if i % 2 else part.replace("<", "&lt;") for i, part in enumerate(parts))


def sentence(text: str) -> str:
    return prose(f"{text[0].upper()}{text[1:].removesuffix('.')}.")


def properties(model: type[Section]) -> dict[str, Json]:
    values: dict[str, Json] = model.model_json_schema()["properties"]
    return values


def peers_line(names: dict[str, str]) -> Iterator[str]:
    """Yield lines with the names that other projects use."""
    known = [f"{title} {code(names[peer])}" for peer, title in PROJECTS.items() if peer in names]
    if known:
        yield f":Elsewhere: {', '.join(known)}"
    if "words" in names:
        yield f":Related: {prose(names['words'])}"


def key_entry(name: str, values: Json, section: type[Section]) -> Iterator[str]:
    yield f"```{{confval}} {name}"
    yield f":type: {type_text(values)}"
    yield f":default: {default_text(values['default'])}"
    yield ""
    yield sentence(values["description"])
    if section is not schema.LaunchSection:
        yield prose(" ".join(describe_facts(section, name.rpartition(".")[2])))
    if lines := list(peers_line(load_peer_names().get(name, {}))):
        yield from ["", *lines]
    yield from ["```", ""]


def section_text(section: type[Section]) -> str:
    """Return the docstring of a section, with links to the pages that it names."""
    text = prose(inspect.cleandoc(section.__doc__ or ""))
    return re.sub(r"docs/(\w[\w-]*)\.md", r"[\1](../\1.md)", text)


def keys_page() -> str:
    """Return every key of every section: type, default, description, other projects' names."""
    lines: list[str] = []
    for name, section in schema.SECTIONS.items():
        lines += [f"## {name}", "", section_text(section), ""]
        for key, values in properties(section).items():
            lines += key_entry(f"{name}.{key}", values, section)
        if name == "model":
            lines += ["The [fields of the family](#fields-of-model-families) are further keys.", ""]
        if name == "resilience":
            lines += ["Each table of `resilience.faults` has these keys:", ""]
            lines += fields_table(schema.Fault)
    return "\n".join([*lines, *model_fields()])


def fields_table(section: type[Section], prefix: str = "") -> list[str]:
    """Return a table of a section's keys; ``prefix`` of their names in ``peer_names.toml``."""
    rows = []
    for key, values in properties(section).items():
        names = load_peer_names().get(f"{prefix}{key}", {})
        others = " ".join(peers_line(names)).replace(":Related: ", "Related: ").strip()
        meaning = ". ".join(filter(None, (prose(values["description"]), others.lstrip(":"))))
        default = default_text(values["default"])
        rows.append(f"| {code(key)} | {type_text(values)} | {default} | {meaning} |")
    return ["| key | type | default | meaning |", "|---|---|---|---|", *rows, ""]


def model_fields() -> list[str]:
    """Return the fields of a decoder, which are further keys of ``model``."""
    from weft.models import FAMILIES

    lines = [
        "## Fields of model families",
        "",
        "Further keys of `[model]` override fields of the family's configuration, such as "
        "`--model.num_layers 4`. A preset sets all of them; the defaults here are those of a "
        "configuration without a preset.",
        "",
    ]
    lines += ["| `model.kind` | presets |", "|---|---|"]
    for name, family in FAMILIES.items():
        lines.append(f"| {code(name)} | {', '.join(map(code, family.presets))} |")
    return [*lines, "", *fields_table(FAMILIES["llama"].config, "model.")]


def peers_page() -> str:
    """Return a table of all names of other projects, and the answers without a key."""
    lines: list[str] = []
    sections: dict[str, dict[str, dict[str, str]]] = {}
    for key, names in load_peer_names().items():
        if set(names) & set(PROJECTS):
            sections.setdefault(key.partition(".")[0], {})[key] = names
    for section, table in sections.items():
        # A project without a name in the section has no column.
        peers = [peer for peer in PROJECTS if any(peer in names for names in table.values())]
        titles = " | ".join(["weft", *(PROJECTS[peer] for peer in peers)])
        lines += ["", f"## {section}", "", f"| {titles} |", "|---" * (1 + len(peers)) + "|"]
        for key, names in table.items():
            cells = [code(names[peer]) if peer in names else "" for peer in peers]
            lines.append(f"| {code(key)} | {' | '.join(cells)} |")
    lines += ["", "## Names without a key", "", "| elsewhere | in weft |", "|---|---|"]
    lines += [f"| {code(name)} | {prose(answer)} |" for name, answer in load_peer_answers().items()]
    return "\n".join(lines)


# --------------------------------------------------------------------------- metrics


def field_comments() -> dict[str, tuple[str, str]]:
    """Return the annotation and the comment of each field of `StepRecord`."""
    source = inspect.getsource(step_record)
    comments = {
        token.start[0]: (token.line.lstrip().startswith("#"), token.string.removeprefix("# "))
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT
    }
    (definition,) = (
        node
        for node in ast.parse(source).body
        if isinstance(node, ast.ClassDef) and node.name == "StepRecord"
    )
    results = {}
    for node in definition.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            above: list[str] = []
            line = node.lineno - 1
            while (own := comments.get(line)) and own[0]:
                above.insert(0, own[1])
                line -= 1
            text = " ".join(above) or comments.get(node.end_lineno or node.lineno, (False, ""))[1]
            results[node.target.id] = (ast.unparse(node.annotation), text)
    return results


def metric_entries() -> Iterator[tuple[str, str, str, str]]:
    """Yield key in metrics.jsonl, type, description and name in trackers."""
    prefixes = {name: f"{prefix}/" for name, prefix in step_record.KEY_PREFIXES.items()}
    parts = {"loss": "source", "eval_loss": "source", "grad_norm": "layer"}
    for name, (annotation, text) in field_comments().items():
        key, prefix = name, prefixes.get(name)
        if prefix:
            key, annotation = f"{prefix}<{parts[prefix[:-1]]}>", "float | None"
        tracked = step_record.TRACKER_NAMES.get(prefix or name, "")
        if prefix:
            tracked += key.removeprefix(prefix)
        text = re.sub(r"(: see|, by) `[^`]*`", "", text)  # names inside the code
        yield key, annotation, text, tracked


def exported_names(key: str) -> str:
    """Return the names of a key in Prometheus and OTLP, with their labels; may be empty."""
    head, slash, _ = key.partition("/")
    names = [head + slash] if head + slash in RECORD_HELP else []
    names = [name for name in RECORD_HELP if name.startswith("rank/")] if key == "ranks" else names
    labels = [LABELS.get(name) or ("stat" if name.startswith("rank/") else "") for name in names]
    texts = [
        exported_name(name)[0] + (f"{{{label}}}" if label else "")
        for name, label in zip(names, labels, strict=True)
    ]
    return ", ".join(map(code, texts))


def metrics_page() -> str:
    """Return every metric of a record: type, meaning, and name in trackers."""
    lines: list[str] = []
    for key, annotation, text, tracked in metric_entries():
        lines += [f"```{{metric}} {key}", ""]
        lines += [sentence(text) if text else f"{key.replace('_', ' ').capitalize()}.", ""]
        if key == "time_breakdown":
            lines += [f"Kinds: {', '.join(map(code, KINDS))}.", ""]
        lines.append(f":Type: {code(annotation.removesuffix(' | None'))}")
        if annotation.endswith("None"):
            lines.append(":Present: where it applies")
        if tracked:
            lines.append(f":In trackers: {code(tracked)}")
        if exported := exported_names(key):
            lines.append(f":In Prometheus and OTLP: {exported}")
        lines += ["```", ""]
    return "\n".join(lines)


PAGES: dict[str, Callable[[], str]] = {
    "keys": keys_page,
    "peers": peers_page,
    "metrics": metrics_page,
}
