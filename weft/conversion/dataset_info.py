"""Read the ``dataset_info.json`` of LLaMA-Factory: its data sets and their rows.

The format is that of its ``data/README.md``.  An entry names a file or a data set of the Hub, the
columns of its rows, and the tags of its messages.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from weft.config.errors import ConfigError, InvalidConfig, suggest
from weft.config.files import describe_cause, read_input
from weft.data.chat_rows import FIELDS, FUNCTION_CALL, MESSAGE_FIELDS, ROLE_NAMES

INFO_FILE = "dataset_info.json"

# Columns with the name of weft's field, and of one turn: prompt, query and response.
COLUMNS = {
    **{name: name for name in ("messages", "system", "tools", "history", "chosen", "rejected")},
    "kto_tag": "label",
}
ALPACA_DEFAULTS = {"prompt": "instruction", "query": "input", "response": "output"}
SHAREGPT_DEFAULTS = {"messages": "conversations"}
ROLE_TAGS = {
    "user_tag": ("user", "human"),
    "assistant_tag": ("assistant", "gpt"),
    "observation_tag": ("tool", "observation"),
    "system_tag": ("system", "system"),
}
MEDIA = ("images", "videos", "audios")


@dataclass(frozen=True)
class DatasetEntry:
    """A data set in weft's terms.

    Attributes:
        path: as ``data.path``; empty: weft cannot read it.
        format: as ``data.format``.
        fields: as ``data.fields``, where rows have other names than weft expects.
        roles: as ``data.roles``.
        text_field: as ``data.text_field``, of documents.
        unsupported: what weft does not do: name -> what to use instead.
    """

    path: str
    format: str
    fields: dict[str, str] = field(default_factory=dict)
    roles: dict[str, str] = field(default_factory=dict)
    text_field: str = ""
    unsupported: dict[str, str] = field(default_factory=dict)


def read_dataset_info(directory: Path) -> dict[str, Any]:
    """Return the entries of ``dataset_info.json`` by name.

    Raises:
        InvalidConfig: the file cannot be read, or is no such file.
    """
    file = directory / INFO_FILE
    reason = "it is not a JSON object of data sets"
    try:
        tree = json.loads(read_input(file))
    except OSError as error:
        tree, reason = None, describe_cause(error)
    except (ValueError, RecursionError) as error:
        tree, reason = None, str(error)
    if isinstance(tree, dict) and all(isinstance(entry, dict) for entry in tree.values()):
        return tree
    remedy = f"set dataset_dir to the directory that has {INFO_FILE}"
    raise InvalidConfig(
        [ConfigError("dataset_dir", str(file), f"cannot be read: {reason}", remedy)]
    )


def convert_entry(info: dict[str, Any], name: str, directory: Path, stage: str) -> DatasetEntry:
    """Convert the entry of a data set.

    Args:
        info: entries by name.
        name: of the data set.
        directory: of the file, which has the data files.
        stage: of the training: pt (documents), sft, dpo, ...

    Raises:
        InvalidConfig: there is no such entry.
    """
    if name not in info:
        rule, remedy = f"is not in {directory / INFO_FILE}", suggest(name, list(info))
        raise InvalidConfig([ConfigError("dataset", name, rule, remedy)])
    entry = info[name]
    unsupported: dict[str, str] = {}
    path = _find_path(entry, name, directory, unsupported)
    columns, tags = (
        value if isinstance(value := entry.get(key), dict) else {} for key in ("columns", "tags")
    )
    for each in MEDIA:
        if columns.get(each):
            unsupported[f"{name}: columns.{each}"] = "weft trains text models"
    if entry.get("num_samples"):
        unsupported[f"{name}: num_samples"] = "data.path takes a file with fewer rows"
    is_sharegpt = entry.get("formatting", "alpaca") != "alpaca"
    if stage == "pt":
        text_field = columns.get("prompt") or ALPACA_DEFAULTS["prompt"]
        return DatasetEntry(path, "text", text_field=text_field, unsupported=unsupported)
    # Named columns replace all defaults.
    columns = columns or (SHAREGPT_DEFAULTS if is_sharegpt else ALPACA_DEFAULTS)
    fields = {weft: columns[own] for own, weft in COLUMNS.items() if columns.get(own)}
    if not is_sharegpt:
        fields.pop("messages", None)
        has_instruction = bool(columns.get("query") or columns.get("history"))
        names = ("instruction", "output") if has_instruction else ("prompt", "response")
        turn = {names[0]: "prompt", names[1]: "response", "input": "query"}
        fields |= {weft: columns[own] for weft, own in turn.items() if columns.get(own)}
    elif "messages" not in fields:
        fields["messages"] = SHAREGPT_DEFAULTS["messages"]
    roles = {}
    if is_sharegpt:
        fields |= {weft: tags[f"{weft}_tag"] for weft in MESSAGE_FIELDS if tags.get(f"{weft}_tag")}
        for tag, (role, default) in ROLE_TAGS.items():
            own = tags.get(tag) or default
            if ROLE_NAMES.get(own, own) != role:
                roles[own] = role
        if tags.get("function_tag") not in (None, FUNCTION_CALL):
            remedy = f"weft reads calls of the role {FUNCTION_CALL}: rename the role in the rows"
            unsupported[f"{name}: tags.function_tag = {tags['function_tag']}"] = remedy
    known = FIELDS | MESSAGE_FIELDS
    # weft finds its own names, and the first that a row has.
    fields = {weft: own for weft, own in fields.items() if own not in known[weft]}
    format = "preferences" if entry.get("ranking") else "chat"
    format = "unpaired" if columns.get("kto_tag") else format
    return DatasetEntry(path, format, fields, roles, unsupported=unsupported)


def _find_path(
    entry: dict[str, Any], name: str, directory: Path, unsupported: dict[str, str]
) -> str:
    """Return ``data.path`` of an entry; empty and a remedy if weft cannot read it."""
    if hub := entry.get("hf_hub_url"):
        if entry.get("folder"):
            unsupported[f"{name}: folder"] = "hf download the folder, and set data.path to it"
        subset, split = entry.get("subset") or "", entry.get("split") or "train"
        path = f"hf://{hub}" + (f":{subset}" if subset else "")
        return path + (f"@{split}" if split != "train" else "")
    if file := entry.get("file_name"):
        return str(directory / file)
    if url := entry.get("cloud_file_name"):
        return str(url)
    for each in ("ms_hub_url", "om_hub_url", "script_url"):
        if each in entry:
            remedy = "weft reads files, hf:// and s3://: download it, and set data.path"
            unsupported[f"{name}: {each} = {entry[each]}"] = remedy
    return ""
