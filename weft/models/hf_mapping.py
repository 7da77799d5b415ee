"""Conversion between a family's configuration and a Hugging Face ``config.json``.

Weights are not permuted: the rotary convention (see `weft.models.layers.apply_rope`) and all shapes
agree on both sides.  A ``config.json`` that describes another model is refused.  So is one with an
unknown field, because weft cannot know if the field changes what the model computes.  Names that
begin with an underscore are ignored.

The tables below hold for all Llama-like families; each family's `HFMapping` holds the differences.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from weft.config.errors import MISSING, ConfigError
from weft.config.reader import check_section
from weft.models.family import Family, HFMapping, Json

# Hugging Face field -> weft field.
FIELDS = {
    "hidden_size": "dim",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
    "num_key_value_heads": "num_kv_heads",
    "head_dim": "head_dim",
    "intermediate_size": "ffn_dim",
    "vocab_size": "vocab_size",
    "max_position_embeddings": "max_seq_len",
    "rms_norm_eps": "norm_eps",
    "tie_word_embeddings": "tied_embeddings",
}
ROPE_SCALING_FIELDS = {
    "factor": "rope_factor",
    "low_freq_factor": "rope_low_freq_factor",
    "high_freq_factor": "rope_high_freq_factor",
    "original_max_position_embeddings": "rope_original_context",
}
ROPE_FIELDS = ("rope_theta", "rope_scaling", "rope_parameters")
# Defaults of transformers.  The other `FIELDS` are required, except for num_key_value_heads and
# head_dim, which follow from others.
DEFAULTS = {
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}
# Valid ranges, both ends included, far wider than any published model needs.  A number outside
# means a damaged or hostile file.
INT_RANGES = {
    "hidden_size": (1, 1 << 20),
    "num_hidden_layers": (1, 10_000),
    "num_attention_heads": (1, 1 << 16),
    "num_key_value_heads": (1, 1 << 16),
    "head_dim": (1, 1 << 16),
    "intermediate_size": (1, 1 << 24),
    "vocab_size": (2, 1 << 26),
    "max_position_embeddings": (1, 1 << 30),
    "sliding_window": (1, 1 << 30),
    "rope_scaling.original_max_position_embeddings": (1, 1 << 30),
}
FLOAT_RANGES = {
    "rms_norm_eps": (1e-12, 1e-2),
    "rope_theta": (1.0, 1e12),
    "rope_scaling.factor": (1.0, 1e4),
    "rope_scaling.low_freq_factor": (1e-3, 1e4),
    "rope_scaling.high_freq_factor": (1e-3, 1e4),
}
# Fields that do not change what the model computes.
IGNORED_FIELDS = {
    "bos_token_id",
    "chunk_size_feed_forward",
    "dtype",
    "eos_token_id",
    "id2label",
    "initializer_range",
    "label2id",
    "output_attentions",
    "output_hidden_states",
    "pad_token_id",
    "pretraining_tp",
    "problem_type",
    "return_dict",
    "torch_dtype",
    "transformers_version",
    "use_cache",
}
REMEDIES = {
    "auto_map": "remove the field if the model needs none; weft never runs remote code",
    "quantization_config": "save dequantized weights first, in float32, bfloat16 or float16",
}


def get_hf_mapping(family: Family) -> HFMapping:
    """Return the Hugging Face mapping of a family that has one."""
    assert family.hf_mapping is not None
    return family.hf_mapping


def detect_family(
    hf_config: Json, families: Mapping[str, Family]
) -> tuple[str | None, list[ConfigError]]:
    """Return a ``config.json``'s family by its ``model_type``, or None and an error."""
    kind_by_type = {f.hf_mapping.model_type: kind for kind, f in families.items() if f.hf_mapping}
    model_type = hf_config.get("model_type", MISSING)
    if isinstance(model_type, str) and model_type in kind_by_type:
        return kind_by_type[model_type], []
    rule = f"must be {' or '.join(json.dumps(name) for name in kind_by_type)}"
    return None, [
        ConfigError(
            "config.json model_type", _short(model_type), rule, "no other model is supported"
        )
    ]


def param_shapes(family: Family, config: Any) -> dict[str, torch.Size]:
    """Return the shape of every parameter by weft's name, in the order of computation."""
    with torch.device("meta"):  # one block suffices: cheap for any number of layers in a file
        model = family.build(config.model_copy(update={"num_layers": 1, "max_seq_len": 1}))
    template = {name: param.shape for name, param in model.named_parameters()}
    block = [name.removeprefix("layers.0.") for name in template if name.startswith("layers.0.")]
    embedding, *head = [name for name in template if not name.startswith("layers.")]
    layers = [(f"layers.{i}.{name}", name) for i in range(config.num_layers) for name in block]
    return {
        embedding: template[embedding],
        **{name: template[f"layers.0.{kind}"] for name, kind in layers},
        **{name: template[name] for name in head},
    }


def to_hf_config(family: Family, config: Any, dtype: str) -> Json:
    """Return the ``config.json`` of a model whose weights are stored as ``dtype``.

    Rotary positions are written in the form that all versions of transformers read.
    """
    mapping = get_hf_mapping(family)
    rope_scaling = (
        {hf_field: getattr(config, field) for hf_field, field in ROPE_SCALING_FIELDS.items()}
        if getattr(config, "rope_scaling", False)
        else None
    )
    return {
        "architectures": [mapping.architecture],
        "model_type": mapping.model_type,
        **mapping.fixed_fields,
        **{hf_field: getattr(config, field) for hf_field, field in FIELDS.items()},
        **({} if mapping.default_sliding_window is None else {"sliding_window": None}),
        "rope_theta": config.rope_theta,
        "rope_scaling": rope_scaling and {"rope_type": "llama3", **rope_scaling},
        "torch_dtype": dtype,
    }


# The arguments of a `ConfigError`: field, value, rule, and remedy if there is one.
Problem = tuple[Any, ...]


def from_hf_config(family: Family, hf_config: Json) -> tuple[Any, list[ConfigError]]:
    """Convert a ``config.json`` to the family's configuration.

    Returns:
        The configuration, or None if there are errors, and every reason why the family cannot be
        that model; keys are ``config.json <field>``.
    """
    mapping = get_hf_mapping(family)
    given = {name: value for name, value in hf_config.items() if value is not None}
    fields: Json = {}
    range_errors = list(_check_numbers(given))
    found = [
        *_read_rope(given, fields, "rope_scaling" in family.config.model_fields),
        *range_errors,
        *_read_fields(family, hf_config, fields),
        *_check_fixed_fields(mapping, given),
        *_check_attention(mapping, hf_config, fields["max_seq_len"]),
        *_check_unknown_fields(mapping, given),
    ]
    config_errors = check_section(family.config, "model", fields)
    config_errors = [error for error in config_errors if error.value is not None]
    config: Any = None
    if not config_errors and not any(value is MISSING for _, value, *_ in found):
        config = family.config.model_validate(fields)
        config_errors = family.check(config)
        if given.get("head_dim", config.head_dim) != config.head_dim and not config_errors:
            rule = f"must be hidden_size / num_attention_heads = {config.head_dim}"
            found.append(("head_dim", given["head_dim"], rule))
    found += _rename_errors(config_errors, {name for name, *_ in range_errors})
    errors = [_make_error(mapping, *item) for item in found]
    return (None if errors else config), errors


def _make_error(
    mapping: HFMapping, name: str, value: object, rule: str, remedy: str = ""
) -> ConfigError:
    remedy = remedy or f"no other value is supported by weft's {mapping.name}"
    return ConfigError(f"config.json {printable(name)}", _short(value), rule, remedy)


def _read_fields(family: Family, hf_config: Json, fields: Json) -> Iterator[Problem]:
    """Read the `FIELDS` into ``fields``, with the defaults of transformers."""
    given = {name: value for name, value in hf_config.items() if value is not None}
    defaults = DEFAULTS | get_hf_mapping(family).defaults
    for name, field in FIELDS.items():
        if name == "head_dim" and name not in family.config.model_fields:
            continue
        if name == "num_key_value_heads" and name not in given:
            # Even if the family has a default, null means as many as query heads.
            use_default = name not in hf_config and name in defaults
            fields[field] = defaults[name] if use_default else given.get("num_attention_heads")
        elif name in given or name in defaults:
            fields[field] = given.get(name, defaults.get(name))
        elif name == "head_dim":
            width, heads = given.get("hidden_size"), given.get("num_attention_heads")
            if type(width) is type(heads) is int and heads > 0:
                fields[field] = width // heads
        else:
            yield name, MISSING, "is missing", "add it; it has no default"


def _check_fixed_fields(mapping: HFMapping, given: Json) -> Iterator[Problem]:
    """Yield an error for each field that has another value than the one supported."""
    exact = {"architectures": [mapping.architecture], "model_type": mapping.model_type}
    for name, only in {**exact, **mapping.fixed_fields}.items():
        value = given.get(name, MISSING)
        if value != only and (name in exact or name in given):
            yield name, value, f"must be {json.dumps(only)}"


def _check_attention(mapping: HFMapping, hf_config: Json, max_seq_len: Any) -> Iterator[Problem]:
    """Yield an error for each kind of attention that weft lacks."""
    if mapping.default_sliding_window is not None:
        window = hf_config.get("sliding_window", mapping.default_sliding_window)
        if type(max_seq_len) is type(window) is int and window < max_seq_len:
            rule = f"is less than max_position_embeddings={max_seq_len}; weft has no sliding window"
            remedy = "set max_position_embeddings to the window; shorter sequences do not change"
            yield "sliding_window", window, rule, remedy
    types = hf_config.get("layer_types")
    is_full = isinstance(types, list) and types and all(kind == "full_attention" for kind in types)
    if types is not None and not is_full:
        yield "layer_types", types, 'must be "full_attention" for each layer'


def _check_unknown_fields(mapping: HFMapping, given: Json) -> Iterator[Problem]:
    """Yield an error for each field that may change what the model computes."""
    known = {"architectures", "model_type", "layer_types"}
    known |= {*FIELDS, *mapping.fixed_fields, *IGNORED_FIELDS, *mapping.ignored_fields}
    if mapping.default_sliding_window is not None:
        known.add("sliding_window")
    for name, value in given.items():
        if name not in known and not name.startswith(("_", "rope_")):
            remedy = REMEDIES.get(name, "remove it if it does not change what the model computes")
            yield name, value, f"is not a known field of {mapping.name}", remedy


def _rename_errors(errors: list[ConfigError], out_of_range: set[str]) -> Iterator[Problem]:
    """Yield the errors of a configuration as errors of Hugging Face's fields."""
    hf_names = {f"model.{field}": name for name, field in FIELDS.items()}
    hf_names |= {
        f"model.{field}": f"rope_scaling.{name}" for name, field in ROPE_SCALING_FIELDS.items()
    }
    invalid_keys = {error.key for error in errors}
    for error in errors:
        name = hf_names.get(error.key, error.key.removeprefix("model."))
        # An error that depends on another error may be its consequence.
        if invalid_keys.isdisjoint(error.depends) and name not in out_of_range:
            rule = re.sub(r"model\.\w+", lambda m: hf_names.get(m[0], m[0]), error.rule)
            yield name, error.value, rule


def _check_numbers(given: Json) -> Iterator[Problem]:
    """Yield an error for each value that is not a number in its range."""
    scaling = given.get("rope_scaling") or given.get("rope_parameters")
    values = dict(given)
    for rope in (given.get("rope_parameters"), scaling):
        if isinstance(rope, dict):
            values |= {f"rope_scaling.{name}": value for name, value in rope.items()}
            values |= {name: rope[name] for name in ("rope_theta",) if name in rope}
    remedy = "download config.json again, or do not use it"
    for name, (least, most) in INT_RANGES.items():
        value = values.get(name)
        if value is not None and not (type(value) is int and least <= value <= most):
            yield name, value, f"must be an integer from {least} to {most:,}", remedy
    for name, (low, high) in FLOAT_RANGES.items():
        value = values.get(name)
        if value is not None and not (type(value) in (int, float) and low <= value <= high):
            yield name, value, f"must be a number from {low:g} to {high:g}", remedy


def _read_rope(given: Json, fields: Json, scales_rope: bool) -> Iterator[Problem]:
    """Read rotary positions, in the fields of transformers 4 or 5.

    transformers 5 replaced ``rope_theta`` and ``rope_scaling`` by ``rope_parameters``.  Yields
    problems.

    Args:
        given: fields of ``config.json`` that are not null.
        fields: receives weft's fields.
        scales_rope: True if the family has Llama 3.1's scaling.
    """
    both = [given[name] for name in ("rope_scaling", "rope_parameters") if given.get(name)]
    if len(both) == 2 and both[0] != both[1]:
        yield ("rope_scaling", both[0], "contradicts rope_parameters", "remove one of them")
    rope = both[0] if both else {}
    if not isinstance(rope, dict):
        yield ("rope_scaling", rope, "must be an object, or null")
        rope = {}
    rope = {name: value for name, value in rope.items() if value is not None}
    fields["rope_theta"] = rope.pop("rope_theta", given.get("rope_theta", 10000.0))
    legacy = rope.pop("type", "default")
    kind = rope.pop("rope_type", legacy)
    for tree in (rope, given):
        factor = tree.pop("partial_rotary_factor", 1.0)
        if factor != 1.0:
            yield ("partial_rotary_factor", factor, "must be 1.0")
    kinds = ("llama3", "default") if scales_rope else ("default",)
    if scales_rope:
        fields["rope_scaling"] = kind == "llama3"
    if kind not in kinds:
        yield (
            "rope_scaling.rope_type",
            kind,
            f"must be {' or '.join(repr(name) for name in kinds)}",
        )
        return
    for hf_field, field in ROPE_SCALING_FIELDS.items() if kind == "llama3" else ():
        if hf_field in rope:
            fields[field] = rope.pop(hf_field)
        else:
            yield (f"rope_scaling.{hf_field}", MISSING, "is missing", "add it")
    for name, value in rope.items():
        yield (f"rope_scaling.{name}", value, f"is not a field of rope_type {kind!r}")
    for name in given:
        if name.startswith("rope_") and name not in ROPE_FIELDS:
            yield (name, given[name], "is not a known field")


def _short(value: object) -> object:
    text = str(value)
    return value if len(text) <= 60 else text[:60] + "..."


def printable(name: str) -> str:
    """Escape and truncate a name from a file for the terminal."""
    return json.dumps(name)[1:-1][:100]
