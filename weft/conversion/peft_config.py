"""Read ``adapter_config.json`` of PEFT, and refuse what the adapters of weft lack.

Which layers have adapters follows from the names of the tensors, so the fields that select layers
need no interpretation.  Fields of later versions of PEFT are refused unless they are off.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from weft.config.errors import ConfigErrors
from weft.conversion.hf_convert import read_json_object
from weft.models.hf_mapping import printable

CONFIG = "adapter_config.json"
MAX_RANK, MAX_ID = 1 << 16, 1 << 31
# Fields that say nothing about what the adapter computes, or that the tensors show.
IGNORED = frozenset(
    (
        *("auto_mapping", "base_model_name_or_path", "eva_config", "exclude_modules"),
        *("inference_mode",),
        *("layers_pattern", "layers_to_transform", "lora_dropout", "megatron_core"),
        *("peft_version", "qalora_group_size", "revision", "runtime_config"),
        *("target_modules", "target_parameters", "ensure_weight_tying"),
    )
)
# The only supported value of a field, and what another one means.
REQUIRED = {
    "peft_type": ("LORA", "is another method than LoRA"),
    "task_type": ("CAUSAL_LM", "is another task than next-token prediction"),
    "bias": ("none", "trains biases, which are frozen in weft"),
}
# These change only the values at which A and B start.  The others change the frozen weights.
INITS = (None, True, False, "gaussian", "orthogonal", "eva", "default")
REMEDIES = {
    "init_lora_weights": "convert it: PEFT's save_pretrained has an argument for that, "
    "path_initial_model_for_weight_conversion",
    "rank_pattern": "train with one rank",
    "alpha_pattern": "train with one alpha",
}
NUMBER_PATTERN = re.compile(r"\^?[\w.]+", re.ASCII)  # matches literally, apart from the dots


class PeftConfig(NamedTuple):
    """The fields of an adapter that weft reads; see PEFT's ``LoraConfig``.

    Attributes:
        base: name or directory of the base model; '' if unknown.
        ranks: rank by pattern of a module's name.
        alphas: alpha by pattern of a module's name.
        parameters: ends of the names of adapted parameters.
        modules_to_save: names of modules that are trained in full.
        token_indices: ids of tokens whose rows are trained, by name of the table.
    """

    base: str
    rank: int
    alpha: float
    rank_stabilized: bool
    dora: bool
    ranks: dict[str, int]
    alphas: dict[str, float]
    parameters: tuple[str, ...]
    modules_to_save: tuple[str, ...] = ()
    token_indices: Mapping[str, tuple[int, ...]] = MappingProxyType({})

    def rank_of(self, name: str) -> int:
        """Return the rank of a module or parameter of transformers."""
        rank: int = _find_pattern(self.ranks, name, self.rank)
        return rank

    def scaling_of(self, name: str) -> float:
        """Return the factor of the adapter of a module or parameter."""
        rank = self.rank_of(name)
        divisor = math.sqrt(rank) if self.rank_stabilized else rank
        alpha: float = _find_pattern(self.alphas, name, self.alpha)
        return alpha / divisor


def read_peft_config(directory: Path, errors: ConfigErrors) -> PeftConfig | None:
    """Read the configuration of an adapter; on an error append it and return None."""
    tree = read_json_object(directory / CONFIG, errors)
    if tree is None:
        return None
    found = ConfigErrors()

    def add(field: str, rule: str, remedy: str = "") -> None:
        shown = printable(str(tree.get(field)))
        found.add(f"{CONFIG} {printable(field)}", rule, remedy, value=shown)

    known = {"r", "lora_alpha", "use_rslora", "use_dora", "init_lora_weights", *IGNORED, *REQUIRED}
    known |= {"rank_pattern", "alpha_pattern", "modules_to_save", "trainable_token_indices"}
    for field, value in tree.items():
        if field not in known and value not in (None, False, 0, "", [], {}):
            add(field, "has no counterpart in weft", "train the adapter without it")
    for field, (only, rule) in REQUIRED.items():
        if tree.get(field) not in (only, None):
            add(field, rule, f"use an adapter with {only}")
    if tree.get("init_lora_weights", True) not in INITS:
        rule = "changes the weights of the base model, which the adapter does not contain"
        add("init_lora_weights", rule, REMEDIES["init_lora_weights"])
    rank, alpha = tree.get("r", 8), tree.get("lora_alpha", 8)
    if not _is_rank(rank):
        add("r", f"is not an integer between 1 and {MAX_RANK}")
    if not _is_alpha(alpha):
        add("lora_alpha", "is not a number above 0")
    flags = {name: tree.get(name) or False for name in ("use_rslora", "use_dora")}
    for field, flag in flags.items():
        if not isinstance(flag, bool):
            add(field, "is neither true nor false")
    ranks, alphas = tree.get("rank_pattern") or {}, tree.get("alpha_pattern") or {}
    for field, patterns, is_valid in (
        ("rank_pattern", ranks, _is_rank),
        ("alpha_pattern", alphas, _is_alpha),
    ):
        if not isinstance(patterns, dict) or not all(map(is_valid, patterns.values())):
            add(field, "does not map names to numbers above 0")
        elif not all(map(NUMBER_PATTERN.fullmatch, map(_plain, patterns))):
            add(field, "has a regular expression, which weft does not evaluate", REMEDIES[field])
    base, parameters = tree.get("base_model_name_or_path") or "", tree.get("target_parameters")
    parameters = parameters or []
    if not isinstance(base, str):
        add("base_model_name_or_path", "is not a name")
    if not isinstance(parameters, list) or not all(isinstance(name, str) for name in parameters):
        add("target_parameters", "is not a list of names")
    saved, indices = tree.get("modules_to_save") or [], tree.get("trainable_token_indices") or {}
    if not isinstance(saved, list) or not all(isinstance(name, str) for name in saved):
        add("modules_to_save", "is not a list of names")
    indices = {"embed_tokens": indices} if isinstance(indices, list) else indices
    if not isinstance(indices, dict) or not all(map(_are_ids, indices.values())):
        add("trainable_token_indices", "is neither a list of ids nor maps names to such lists")
    errors += found
    if found:
        return None
    is_stabilized, has_dora = flags.values()
    return PeftConfig(
        *(base, rank, float(alpha), is_stabilized, has_dora, ranks, alphas, tuple(parameters)),
        modules_to_save=tuple(saved),
        token_indices={name: tuple(ids) for name, ids in indices.items()},
    )


def _are_ids(value: object) -> bool:
    return isinstance(value, list) and all(type(id) is int and 0 <= id < MAX_ID for id in value)


def _is_rank(value: object) -> bool:
    return type(value) is int and 0 < value <= MAX_RANK


def _is_alpha(value: object) -> bool:
    return type(value) in (int, float) and 0 < value < 1e9  # type: ignore[operator]


def _plain(pattern: str) -> str:
    return pattern.replace("\\.", ".")


def _find_pattern(patterns: Mapping[str, Any], name: str, default: Any) -> Any:
    """Return the value of the first pattern that matches the end of a name."""
    for pattern, value in patterns.items():
        plain = _plain(pattern)
        if plain.removeprefix("^") == name or f".{name}".endswith(f".{plain}"):
            return value
    return default
