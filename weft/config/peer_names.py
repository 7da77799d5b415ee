"""Names of other projects for weft's keys, and answers where weft has no key.

The tables are data: ``peer_names.toml`` and ``peer_answers.toml`` next to this file.
"""

from __future__ import annotations

import functools
import tomllib
from importlib import resources

FILES = resources.files("weft") / "config"

# Projects of ``peer_names.toml`` by the name that it uses for them.
PROJECTS = {
    "torchtitan": "TorchTitan",
    "megatron": "Megatron-LM",
    "huggingface": "Hugging Face",
    "axolotl": "axolotl",
}


@functools.cache
def load_peer_names() -> dict[str, dict[str, str]]:
    """Return, for each key, its names by project."""
    return tomllib.loads((FILES / "peer_names.toml").read_text("utf-8"))


@functools.cache
def load_peer_answers() -> dict[str, str]:
    """Return what to do instead of each name of other projects without a key."""
    return tomllib.loads((FILES / "peer_answers.toml").read_text("utf-8"))


def describe_peer_name(name: str) -> str:
    """Return the key or the answer for a name of another project; empty if unknown.

    ``name`` is compared without leading dashes, with ``_`` for ``-``, and without its section if it
    has one.
    """
    wanted = _normalize(name)
    if wanted in load_peer_answers():
        return load_peer_answers()[wanted]
    words = ""
    for key, names in load_peer_names().items():
        if wanted in {_normalize(each) for peer, each in names.items() if peer != "words"}:
            return f"use {key}"
        if wanted in map(_normalize, names.get("words", "").split(",")):
            words = words or f"use {key}"
    return words


def _normalize(name: str) -> str:
    last = name.strip().lstrip("-").rpartition(".")[2]
    return last.lower().replace("-", "_").replace(" ", "_")
