"""Llama as Hugging Face has it: names of weights, and ``config.json``, both ways.

Nothing is permuted: the rotary convention (see `weft.models.layers.apply_rope`) and all shapes are
the same on both sides.  What is not the same model is refused.  That includes every field of a
``config.json`` that is not known here, because whether an unknown field changes what the model
computes cannot be known either.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import torch

from weft.job import MISSING, Problem, check_section
from weft.models.llama import Llama, LlamaConfig, check

Json = dict[str, Any]

# Their field -> ours.
FIELDS = {
    "hidden_size": "dim",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
    "num_key_value_heads": "num_kv_heads",
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
# What transformers takes where a field is missing; the others in `FIELDS` must be there.
DEFAULTS = {
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}
# Fields with the only value that weft's Llama can represent.
ONLY: Json = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "attention_dropout": 0.0,
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
    "auto_map": "it names code to run, which weft never does; take it out if this is a plain Llama",
    "quantization_config": "save the weights dequantised first, in float32, bfloat16 or float16",
}


def their_name(name: str) -> str:
    """The name in a Hugging Face checkpoint of a parameter of `Llama`."""
    return name if name == "lm_head.weight" else f"model.{name}"


def shapes(config: LlamaConfig) -> dict[str, torch.Size]:
    """Every parameter of `Llama`, by our name, in the order in which a token meets them."""
    with torch.device("meta"):  # one block tells of all: cheap however many layers are claimed
        one = Llama(config.model_copy(update={"num_layers": 1, "max_seq_len": 1}))
    found = {name: param.shape for name, param in one.named_parameters()}
    block = [name.removeprefix("layers.0.") for name in found if name.startswith("layers.0.")]
    embedding, *rest = [name for name in found if not name.startswith("layers.")]
    layers = [(f"layers.{i}.{name}", name) for i in range(config.num_layers) for name in block]
    return {
        embedding: found[embedding],
        **{name: found[f"layers.0.{kind}"] for name, kind in layers},
        **{name: found[name] for name in rest},
    }


def to_config(config: LlamaConfig, dtype: str) -> Json:
    """``config.json`` of a model whose weights are stored as ``dtype``.

    Rotary positions are written as all versions of transformers read them.
    """
    scaling = {theirs: getattr(config, ours) for theirs, ours in SCALING.items()}
    return {
        **ONLY,
        **{theirs: getattr(config, ours) for theirs, ours in FIELDS.items()},
        "head_dim": config.head_dim,
        "rope_theta": config.rope_theta,
        "rope_scaling": {"rope_type": "llama3", **scaling} if config.rope_scaling else None,
        "torch_dtype": dtype,
    }


def from_config(tree: Json) -> tuple[LlamaConfig | None, list[Problem]]:
    """The configuration that a ``config.json`` describes.

    Returns:
        None if there are problems, and every reason why weft's Llama is not that model; keys are
        ``config.json <field>``.
    """
    given = {name: value for name, value in tree.items() if value is not None}
    fields: Json = {}
    problems = list(_read_rope(given, fields))
    for theirs, ours in FIELDS.items():
        if theirs in given or theirs in DEFAULTS:
            fields[ours] = given.get(theirs, DEFAULTS.get(theirs))
        elif theirs == "num_key_value_heads":
            fields[ours] = given.get("num_attention_heads")
        else:
            problems.append(_problem(theirs, MISSING, "is missing", "without it nothing is known"))
    for name, only in ONLY.items():
        if name in ("architectures", "model_type") or name in given:
            value = given.get(name, MISSING)
            if value != only:
                problems.append(_problem(name, value, f"must be {json.dumps(only)}"))
    known = {*FIELDS, *ONLY, *IGNORED, "head_dim"}
    for name in given:
        if name not in known and not name.startswith(("_", "rope_")):
            remedy = REMEDIES.get(name, "take it out if the model computes the same without")
            problems.append(_problem(name, given[name], "is nothing that weft's Llama has", remedy))

    named = {f"model.{ours}": theirs for theirs, ours in FIELDS.items()}
    named |= {f"model.{ours}": f"rope_scaling.{theirs}" for theirs, ours in SCALING.items()}
    wrong = [p for p in check_section(LlamaConfig, "model", fields) if p.value is not None]
    config = None
    if not wrong and not any(problem.value is MISSING for problem in problems):
        config = LlamaConfig.model_validate(fields)
        wrong = check(config)
    bad = {problem.key for problem in wrong}
    for problem in wrong:
        if bad.isdisjoint(problem.depends):  # else it may be an echo
            key = named.get(problem.key, problem.key.removeprefix("model."))
            rule = re.sub(r"model\.\w+", lambda m: named.get(m[0], m[0]), problem.rule)
            problems.append(_problem(key, problem.value, rule))
    if config and given.get("head_dim", config.head_dim) != config.head_dim and not wrong:
        rule = f"must be hidden_size / num_attention_heads = {config.head_dim}"
        problems.append(_problem("head_dim", given["head_dim"], rule))
    return (None if problems else config), problems


def _read_rope(given: Json, fields: Json) -> Iterator[Problem]:
    """Rotary positions: ``rope_theta`` and ``rope_scaling``, or since version 5 one of both."""
    both = [given[name] for name in ("rope_scaling", "rope_parameters") if given.get(name)]
    if len(both) == 2 and both[0] != both[1]:
        yield _problem("rope_scaling", both[0], "is not what rope_parameters says", "leave one")
    rope = both[0] if both else {}
    if not isinstance(rope, dict):
        yield _problem("rope_scaling", rope, "must be an object, or null")
        rope = {}
    rope = {name: value for name, value in rope.items() if value is not None}
    fields["rope_theta"] = rope.pop("rope_theta", given.get("rope_theta", 10000.0))
    legacy = rope.pop("type", "default")
    kind = rope.pop("rope_type", legacy)
    for where in (rope, given):
        share = where.pop("partial_rotary_factor", 1.0)
        if share != 1.0:
            yield _problem("partial_rotary_factor", share, "must be 1.0")
    fields["rope_scaling"] = kind == "llama3"
    if kind not in ("llama3", "default"):
        yield _problem("rope_scaling.rope_type", kind, "must be 'llama3' or 'default'")
        return
    for theirs, ours in SCALING.items() if kind == "llama3" else ():
        if theirs in rope:
            fields[ours] = rope.pop(theirs)
        else:
            yield _problem(f"rope_scaling.{theirs}", MISSING, "is missing")
    for name, value in rope.items():
        yield _problem(f"rope_scaling.{name}", value, f"is nothing that {kind!r} has")
    for name in given:
        if name.startswith("rope_") and name not in ROPE:
            yield _problem(name, given[name], "is nothing that weft's Llama has")


def _problem(name: str, value: object, rule: str, remedy: str = "") -> Problem:
    remedy = remedy or "weft's Llama has nothing else, and cannot be this model"
    return Problem(f"config.json {shown(name)}", _short(value), rule, remedy)


def _short(value: object) -> object:
    text = str(value)
    return value if len(text) <= 60 else text[:60] + "..."


def shown(name: str) -> str:
    """A name that somebody else chose, fit for a terminal."""
    return json.dumps(name)[1:-1][:100]
