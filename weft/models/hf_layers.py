"""Layers of a Hugging Face model: local ones, positions, experts.

`weft.models.decoder_config` has patterns; ``config.json`` has lists, intervals and switches.
"""

from __future__ import annotations

import json
from collections.abc import Generator, Iterator, Sequence
from typing import Any

from weft.config.errors import MISSING
from weft.models.decoder_config import DecoderConfig
from weft.models.hf_fields import HFLayers, HFMapping, Json
from weft.models.hf_rope import Problem


def write_layers(mapping: HFMapping, config: DecoderConfig) -> Json:
    """Return the fields that say which layers are local and have positions."""
    indices = range(config.num_layers)
    tree: Json = {}
    if mapping.rope_layers == "no_rope_layers":
        tree["no_rope_layers"] = [int(config.has_rope(i)) for i in indices]
    if layers := mapping.layers:
        local = [config.is_local(i) for i in indices]
        hf_field, key = layers.window
        tree[hf_field] = getattr(config, key) or None
        is_optional = mapping.rope_layers == "hybrid" and config.has_rope(0)
        if not any(local) and "G" in layers.default and not is_optional:
            tree[hf_field] = layers.default_window  # transformers needs it, though it has no effect
        if "G" in layers.default and len(layers.default) > 2:  # for programs without layer_types
            tree |= _write_pattern(mapping, shortest_pattern(["GL"[value] for value in local]))
        if layers.has_types:
            tree["layer_types"] = [
                layers.local if is_local else "full_attention" for is_local in local
            ]
        if layers.switch:
            tree["use_sliding_window"] = any(local)
        if layers.default == "max_window_layers":
            tree["max_window_layers"] = local.index(True) if any(local) else config.num_layers
    return tree


def _write_pattern(mapping: HFMapping, pattern: str) -> Json:
    """Return ``sliding_window_pattern`` if the last layer of each period is global."""
    is_regular = len(pattern) > 1 and pattern == "L" * (len(pattern) - 1) + "G"
    if mapping.rope_layers == "hybrid":  # EXAONE 4 has a text
        return {"sliding_window_pattern": pattern if is_regular else None}
    return {"sliding_window_pattern": len(pattern)} if is_regular else {}


def write_expert_layers(mapping: HFMapping, config: DecoderConfig) -> Json:
    """Return the list of layers with experts, if the family has one."""
    indices = range(config.num_layers)
    lists: Json = {
        "mlp_only_layers": [*range(config.dense_layers)],
        "moe_layers": [i for i in indices if config.has_experts(i)],
        "moe_layer_end_index": config.num_layers - 1,
    }
    return {name: value for name, value in lists.items() if name == mapping.expert_layers}


def shortest_pattern(kinds: Sequence[str]) -> str:
    """Return the shortest pattern that, repeated, gives these kinds of layers."""
    # The longest proper prefix that is also a suffix, of each prefix (Knuth, Morris and Pratt).
    borders = [0] * len(kinds)
    for i in range(1, len(kinds)):
        length = borders[i - 1]
        while length and kinds[i] != kinds[length]:
            length = borders[length - 1]
        borders[i] = length + (kinds[i] == kinds[length])
    return "".join(kinds[: len(kinds) - borders[-1]])


def read_layers(
    mapping: HFMapping, hf_config: Json, invalid: set[str], fields: Json
) -> Iterator[Problem]:
    """Read which layers are local, and which have rotary positions."""
    count, layers = fields.get("num_layers"), mapping.layers
    if "num_hidden_layers" in invalid or type(count) is not int:
        return
    has_rope = [True] * count
    if mapping.rope_layers == "no_rope_layers":
        listed = yield from _read_rope_layers(hf_config, count)
        if listed is None:
            return
        has_rope = listed
        fields["rope_pattern"] = shortest_pattern(["NR"[value] for value in has_rope])
    types = hf_config.get("layer_types")
    if layers is None:
        if types is not None and not (
            types and isinstance(types, list) and all(kind == "full_attention" for kind in types)
        ):
            yield "layer_types", types, 'must be "full_attention" for each layer'
        return
    window_field, key = layers.window
    window, problems = _read_window(layers, hf_config)
    yield from problems
    if problems:
        return
    default = _default_layers(mapping, layers.default, hf_config, has_rope)
    is_hybrid = mapping.rope_layers == "hybrid"
    is_required = layers.default == "rope" or ("G" in layers.default and not is_hybrid)
    is_local = default if window or is_required else [False] * count
    if types is not None:
        names = ("full_attention", layers.local)
        read = [kind == layers.local for kind in types] if isinstance(types, list) else []
        if not _is_list_of(types, count, names):
            yield (
                "layer_types",
                types,
                f"must have {format_hf_choices(names)} for each of {count} layers",
            )
            return
        if not layers.has_types and read != is_local:
            yield "layer_types", types, f"contradicts {window_field}"
        is_local = read
    if any(is_local) and not window:
        yield window_field, MISSING, "must be set, because there are local layers"
        return
    fields[key] = window or 0
    pattern = shortest_pattern(["GL"[value] for value in is_local])
    fields["layer_pattern"] = pattern
    if not any(is_local):
        fields[key] = 0
    if mapping.rope_layers == "local" or (is_hybrid and window):
        fields["rope_pattern"] = pattern.replace("L", "R").replace("G", "N")


def _read_rope_layers(hf_config: Json, count: int) -> Generator[Problem, None, list[bool] | None]:
    """Read which layers have rotary positions; return None after an error."""
    listed = hf_config.get("no_rope_layers")
    interval = hf_config.get("no_rope_layer_interval", 4)
    if listed is None or listed == []:
        if type(interval) is int and interval >= 1:
            return [(i + 1) % interval != 0 for i in range(count)]
        yield "no_rope_layer_interval", interval, "must be an integer from 1"
    elif _is_list_of(listed, count, (0, 1)):
        return [bool(value) for value in listed]
    else:
        yield "no_rope_layers", listed, f"must have 0 or 1 for each of {count} layers"
    return None


def _read_window(layers: HFLayers, hf_config: Json) -> tuple[Any, list[Problem]]:
    """Return the window of local layers, or None, and all errors of its fields."""
    problems: list[Problem] = []
    window = hf_config.get(layers.window[0], layers.default_window)
    if layers.switch:
        is_on = hf_config.get("use_sliding_window", False)
        if type(is_on) is not bool:
            problems.append(("use_sliding_window", is_on, "must be true or false"))
        window = window if is_on else None
    for name, least in (("max_window_layers", 0), ("sliding_window_pattern", 1)):
        value = hf_config.get(name)
        if name == "sliding_window_pattern" and hf_config.get("layer_types"):
            continue  # transformers does not read it, and its text form (LLLG) never
        if value is not None and (type(value) is not int or value < least):
            problems.append((name, value, f"must be an integer from {least}"))
    return window, problems


def _default_layers(
    mapping: HFMapping, pattern: str, hf_config: Json, has_rope: list[bool]
) -> list[bool]:
    """Return which layers are local in a file without ``layer_types``."""
    count = len(has_rope)
    if pattern == "rope":
        return has_rope
    if pattern == "no_rope":
        return [not value for value in has_rope]
    if pattern == (name := "max_window_layers"):
        first = hf_config.get(name, mapping.defaults.get(name, 28))
        return [first is None or i >= first for i in range(count)]
    period = hf_config.get("sliding_window_pattern")
    if type(period) is int and period and "G" in pattern:
        return [(i + 1) % period != 0 for i in range(count)]
    return [pattern[i % len(pattern)] == "L" for i in range(count)]


def read_expert_layers(
    mapping: HFMapping, given: Json, invalid: set[str], fields: Json
) -> Iterator[Problem]:
    """Read or check the list of layers with experts."""
    name, count = mapping.expert_layers, fields.get("num_layers")
    if not name or "num_hidden_layers" in invalid or type(count) is not int:
        return
    value = given.get(name)
    if name == "mlp_only_layers":
        value = [] if value is None else value
        if isinstance(value, list) and len(value) <= count and value == [*range(len(value))]:
            fields["dense_layers"] = len(value)
        else:
            yield name, value, "must have the first layers"
    elif name == "moe_layers" and value is not None:
        step = fields.get("expert_interval", 1)
        if type(step) is int and step > 0 and value != [*range(step - 1, count, step)]:
            yield name, value, f"must have every layer of interleave_moe_layer_step={step}"
    elif name == "moe_layer_end_index" and value not in (None, -1, count - 1):
        yield name, value, f"must be -1 or {count - 1}"


def _is_list_of(value: object, count: int, choices: Sequence[object]) -> bool:
    return (
        isinstance(value, list)
        and len(value) == count
        and all(type(item) in (str, int, bool) and item in choices for item in value)
    )


def format_hf_choices(choices: Any) -> str:
    """Format values of a JSON file, as in '"a" or 1'."""
    return " or ".join(json.dumps(choice) for choice in choices)
