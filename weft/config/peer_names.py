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
    "deepspeed": "DeepSpeed",
    "smp": "SageMaker SMP",
}


@functools.cache
def load_peer_names() -> dict[str, dict[str, str]]:
    """Return, for each key, its names by project."""
    return tomllib.loads((FILES / "peer_names.toml").read_text("utf-8"))


@functools.cache
def load_peer_answers() -> dict[str, str]:
    """Return what to do instead of each name of other projects without a key."""
    table = tomllib.loads((FILES / "peer_answers.toml").read_text("utf-8"))
    return {name: answer for names, answer in table.items() for name in names.split(", ")}


def describe_peer_name(name: str) -> str:
    """Return the key or the answer for a name of another project; empty if unknown.

    ``name`` is compared without leading dashes, with ``_`` for ``-``, and without its section if it
    has one.  An answer may be for the name in one section only.
    """
    wanted, full = _normalize(name), _normalize(name, keep_section=True)
    if full in load_peer_answers():
        return load_peer_answers()[full]
    if wanted in load_peer_answers():
        return load_peer_answers()[wanted]
    words = ""
    for key, names in load_peer_names().items():
        if wanted in {_normalize(each) for peer, each in names.items() if peer != "words"}:
            return f"use {key}"
        if wanted in map(_normalize, names.get("words", "").split(",")):
            words = words or f"use {key}"
    return words


@functools.cache
def all_peer_names() -> frozenset[str]:
    """Return every name that `describe_peer_name` knows, in the form that it compares."""
    words = [names.get("words", "").split(",") for names in load_peer_names().values()]
    own = [n for names in load_peer_names().values() for p, n in names.items() if p != "words"]
    names = [*load_peer_answers(), *own, *(word for each in words for word in each)]
    return frozenset(filter(None, map(_normalize, names)))


def _normalize(name: str, keep_section: bool = False) -> str:
    full = name.strip().lstrip("-")
    last = full if keep_section else full.rpartition(".")[2]
    return last.lower().replace("-", "_").replace(" ", "_")
