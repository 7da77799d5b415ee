"""The site of docs/: tables of peers' names, generated references, diagrams, llms.txt."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from weft.config.schema import SECTIONS, keys

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PEERS = {"torchtitan", "megatron", "huggingface", "axolotl", "words"}


def load(name: str) -> dict[str, dict[str, str]]:
    return tomllib.loads((ROOT / "weft" / "config" / name).read_text("utf-8"))


def test_peer_names_are_of_keys_that_exist() -> None:
    table = load("peer_names.toml")
    assert set(table) - set(keys()) == set()
    assert all(set(names) <= PEERS and all(names.values()) for names in table.values())
    assert list(table) == [key for key in keys() if key in table], "not in the order of the schema"


def test_peer_names_stand_for_one_key_each() -> None:
    """Two keys may share a name only if the other project sets both with it."""
    owners: dict[tuple[str, str], list[str]] = {}
    for key, names in load("peer_names.toml").items():
        for peer, name in names.items():
            if peer != "words":
                owners.setdefault((peer, name), []).append(key)
    assert {name: several for name, several in owners.items() if len(several) > 1} == {}


def test_peer_answers_name_only_keys_that_exist() -> None:
    answers = load("peer_answers.toml")
    sections = "|".join(SECTIONS)
    named = {
        name
        for answer in answers.values()
        for name in re.findall(rf"\b((?:{sections})\.[a-z_]+)", answer)
    }
    assert named <= set(keys())
    assert not any(name.startswith("-") for name in answers)
    other = {
        name.lstrip("-") for names in load("peer_names.toml").values() for name in names.values()
    }
    assert other & set(answers) == set()
