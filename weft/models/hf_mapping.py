"""Models as Hugging Face has them: names of weights, and ``config.json``, both ways.

Nothing is permuted: the rotary convention (see `weft.models.layers.apply_rope`) and all shapes are
the same on both sides.  What is not the same model is refused.  That includes every field of a
``config.json`` that is not known here (but for names that begin with an underscore), because
whether an unknown field changes what the model computes cannot be known either.

The tables below are of all families like Llama; what differs stands in the family's `Counterpart`.
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

# Their field -> ours.
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
SCALING = {
    "factor": "rope_factor",
    "low_freq_factor": "rope_low_freq_factor",
    "high_freq_factor": "rope_high_freq_factor",
    "original_max_position_embeddings": "rope_original_context",
}
ROPE = ("rope_theta", "rope_scaling", "rope_parameters")
# What transformers takes where a field is missing; the others in `FIELDS` must be there, but for
# num_key_value_heads and head_dim, which follow from others.
DEFAULTS = {
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}
# Numbers that a model can have: the least and the most, both included.  Far outside of what any
# published model has; a number beyond that is a damaged or hostile file.
WHOLE = {
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
REAL = {
    "rms_norm_eps": (1e-12, 1e-2),
    "rope_theta": (1.0, 1e12),
    "rope_scaling.factor": (1.0, 1e4),
    "rope_scaling.low_freq_factor": (1e-3, 1e4),
    "rope_scaling.high_freq_factor": (1e-3, 1e4),
}
# Fields that do not change what the model computes.
IGNORED = {
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
    "auto_map": "it names code to run, which weft never does; take it out if the model is plain",
    "quantization_config": "save the weights dequantised first, in float32, bfloat16 or float16",
}


def counterpart(family: Family) -> HFMapping:
    """Of a family that has one."""
    assert family.huggingface is not None
    return family.huggingface


def kind_of(tree: Json, families: Mapping[str, Family]) -> tuple[str | None, list[ConfigError]]:
    """The family that a ``config.json`` is of, by its ``model_type``; None, and why, if of none."""
    types = {f.huggingface.model_type: kind for kind, f in families.items() if f.huggingface}
    found = tree.get("model_type", MISSING)
    if isinstance(found, str) and found in types:
        return types[found], []
    rule = f"must be {' or '.join(json.dumps(name) for name in types)}"
    return None, [
        ConfigError("config.json model_type", _short(found), rule, "weft has no such model")
    ]


def shapes(family: Family, config: Any) -> dict[str, torch.Size]:
    """Every parameter of the model, by our name, in the order in which a token meets them."""
    with torch.device("meta"):  # one block tells of all: cheap however many layers are claimed
        one = family.build(config.model_copy(update={"num_layers": 1, "max_seq_len": 1}))
    found = {name: param.shape for name, param in one.named_parameters()}
    block = [name.removeprefix("layers.0.") for name in found if name.startswith("layers.0.")]
    embedding, *rest = [name for name in found if not name.startswith("layers.")]
    layers = [(f"layers.{i}.{name}", name) for i in range(config.num_layers) for name in block]
    return {
        embedding: found[embedding],
        **{name: found[f"layers.0.{kind}"] for name, kind in layers},
        **{name: found[name] for name in rest},
    }


def to_config(family: Family, config: Any, dtype: str) -> Json:
    """``config.json`` of a model whose weights are stored as ``dtype``.

    Rotary positions are written as all versions of transformers read them.
    """
    theirs = counterpart(family)
    stretched = (
        {name: getattr(config, ours) for name, ours in SCALING.items()}
        if getattr(config, "rope_scaling", False)
        else None
    )
    return {
        "architectures": [theirs.architecture],
        "model_type": theirs.model_type,
        **theirs.only,
        **{name: getattr(config, ours) for name, ours in FIELDS.items()},
        **({} if theirs.window is None else {"sliding_window": None}),
        "rope_theta": config.rope_theta,
        "rope_scaling": stretched and {"rope_type": "llama3", **stretched},
        "torch_dtype": dtype,
    }


def from_config(family: Family, tree: Json) -> tuple[Any, list[ConfigError]]:
    """The family's configuration that a ``config.json`` describes.

    Returns:
        None if there are problems, and every reason why weft's family is not that model; keys are
        ``config.json <field>``.
    """
    theirs = counterpart(family)

    def problem(name: str, value: object, rule: str, remedy: str = "") -> ConfigError:
        remedy = remedy or f"weft's {theirs.name} has nothing else, and cannot be this model"
        return ConfigError(f"config.json {shown(name)}", _short(value), rule, remedy)

    given = {name: value for name, value in tree.items() if value is not None}
    fields: Json = {}
    stretches = "rope_scaling" in family.config.model_fields
    own_width = "head_dim" in family.config.model_fields
    problems = [problem(*each) for each in _read_rope(given, fields, stretches)]
    wrong_numbers = list(_check_numbers(given))
    problems += [problem(*each) for each in wrong_numbers]
    reported = {name for name, *_ in wrong_numbers}
    defaults = DEFAULTS | theirs.defaults
    for name, ours in FIELDS.items():
        if name == "head_dim" and not own_width:
            continue
        if name == "num_key_value_heads" and name not in given:
            # Where a family has a default of its own, null still means as many as there are heads.
            missing = name not in tree and name in defaults
            fields[ours] = defaults[name] if missing else given.get("num_attention_heads")
        elif name in given or name in defaults:
            fields[ours] = given.get(name, defaults.get(name))
        elif name == "head_dim":
            width, heads = given.get("hidden_size"), given.get("num_attention_heads")
            if type(width) is type(heads) is int and heads > 0:
                fields[ours] = width // heads
        else:
            problems.append(problem(name, MISSING, "is missing", "without it nothing is known"))
    exact = {"architectures": [theirs.architecture], "model_type": theirs.model_type}
    for name, only in {**exact, **theirs.only}.items():
        if name in exact or name in given:
            value = given.get(name, MISSING)
            if value != only:
                problems.append(problem(name, value, f"must be {json.dumps(only)}"))
    known = {*FIELDS, *exact, *theirs.only, *IGNORED, *theirs.ignored, "layer_types"}
    if theirs.window is not None:
        known.add("sliding_window")
        window, longest = tree.get("sliding_window", theirs.window), fields["max_seq_len"]
        if type(longest) is type(window) is int and window < longest:
            rule = f"is narrower than max_position_embeddings = {longest}, and weft has no windows"
            remedy = "set max_position_embeddings to the window: rows up to it are the same model"
            problems.append(problem("sliding_window", window, rule, remedy))
    types = given.get("layer_types", ["full_attention"])
    full = isinstance(types, list) and types and all(kind == "full_attention" for kind in types)
    if not full:
        problems.append(problem("layer_types", types, 'must be "full_attention" for each layer'))
    for name in given:
        if name not in known and not name.startswith(("_", "rope_")):
            remedy = REMEDIES.get(name, "take it out if the model computes the same without")
            rule = f"is nothing that weft's {theirs.name} has"
            problems.append(problem(name, given[name], rule, remedy))

    named = {f"model.{ours}": name for name, ours in FIELDS.items()}
    named |= {f"model.{ours}": f"rope_scaling.{name}" for name, ours in SCALING.items()}
    wrong = [p for p in check_section(family.config, "model", fields) if p.value is not None]
    config: Any = None
    if not wrong and not any(problem.value is MISSING for problem in problems):
        config = family.config.model_validate(fields)
        wrong = family.check(config)
    bad = {each.key for each in wrong}
    for each in wrong:
        key = named.get(each.key, each.key.removeprefix("model."))
        if bad.isdisjoint(each.depends) and key not in reported:  # else it may be an echo
            rule = re.sub(r"model\.\w+", lambda m: named.get(m[0], m[0]), each.rule)
            problems.append(problem(key, each.value, rule))
    if config and given.get("head_dim", config.head_dim) != config.head_dim and not wrong:
        rule = f"must be hidden_size / num_attention_heads = {config.head_dim}"
        problems.append(problem("head_dim", given["head_dim"], rule))
    return (None if problems else config), problems


def _check_numbers(given: Json) -> Iterator[tuple[Any, ...]]:
    """Yield arguments of a problem for each number that no model can have, and what is none."""
    scaling = given.get("rope_scaling") or given.get("rope_parameters")
    values = dict(given)
    for part in (given.get("rope_parameters"), scaling):
        if isinstance(part, dict):
            values |= {f"rope_scaling.{name}": value for name, value in part.items()}
            values |= {name: part[name] for name in ("rope_theta",) if name in part}
    remedy = "fetch config.json again, or do not use it"
    for name, (least, most) in WHOLE.items():
        value = values.get(name)
        if value is not None and not (type(value) is int and least <= value <= most):
            yield name, value, f"must be a whole number from {least} to {most:,}", remedy
    for name, (low, high) in REAL.items():
        value = values.get(name)
        if value is not None and not (type(value) in (int, float) and low <= value <= high):
            yield name, value, f"must be a number from {low:g} to {high:g}", remedy


def _read_rope(given: Json, fields: Json, stretches: bool) -> Iterator[tuple[Any, ...]]:
    """Rotary positions: ``rope_theta`` and ``rope_scaling``, or since version 5 one of both.

    Yields arguments of a problem.  ``stretches``: whether the family has Llama 3.1's scaling.
    """
    both = [given[name] for name in ("rope_scaling", "rope_parameters") if given.get(name)]
    if len(both) == 2 and both[0] != both[1]:
        yield ("rope_scaling", both[0], "is not what rope_parameters says", "leave one")
    rope = both[0] if both else {}
    if not isinstance(rope, dict):
        yield ("rope_scaling", rope, "must be an object, or null")
        rope = {}
    rope = {name: value for name, value in rope.items() if value is not None}
    fields["rope_theta"] = rope.pop("rope_theta", given.get("rope_theta", 10000.0))
    legacy = rope.pop("type", "default")
    kind = rope.pop("rope_type", legacy)
    for where in (rope, given):
        share = where.pop("partial_rotary_factor", 1.0)
        if share != 1.0:
            yield ("partial_rotary_factor", share, "must be 1.0")
    kinds = ("llama3", "default") if stretches else ("default",)
    if stretches:
        fields["rope_scaling"] = kind == "llama3"
    if kind not in kinds:
        yield (
            "rope_scaling.rope_type",
            kind,
            f"must be {' or '.join(repr(name) for name in kinds)}",
        )
        return
    for theirs, ours in SCALING.items() if kind == "llama3" else ():
        if theirs in rope:
            fields[ours] = rope.pop(theirs)
        else:
            yield (f"rope_scaling.{theirs}", MISSING, "is missing")
    for name, value in rope.items():
        yield (f"rope_scaling.{name}", value, f"is nothing that {kind!r} has")
    for name in given:
        if name.startswith("rope_") and name not in ROPE:
            yield (name, given[name], "is nothing that weft has")


def _short(value: object) -> object:
    text = str(value)
    return value if len(text) <= 60 else text[:60] + "..."


def shown(name: str) -> str:
    """A name that somebody else chose, fit for a terminal."""
    return json.dumps(name)[1:-1][:100]
