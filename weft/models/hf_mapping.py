"""Conversion between a family's configuration and a Hugging Face ``config.json``.

A ``config.json`` that describes another model is refused.  So is one with an unknown field, because
weft cannot know if the field changes what the model computes.  Names that begin with an underscore
are ignored.  A configuration that ``config.json`` cannot express is refused, too
(`check_hf_config`).

`weft.models.hf_fields` has the tables of all families; each family's `HFMapping` has its own.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from typing import Any

import torch
from torch import nn

from weft.config.errors import MISSING, ConfigError
from weft.config.reader import check_section
from weft.models.decoder_config import DecoderConfig
from weft.models.family import Family
from weft.models.hf_fields import DEFAULTS, HFMapping, Json, Limits
from weft.models.hf_layers import (
    format_hf_choices,
    read_expert_layers,
    read_layers,
    shortest_pattern,
    write_expert_layers,
    write_layers,
)
from weft.models.hf_rope import ROPE_KEYS, ROPE_LIMITS, Problem, read_rope, write_rope

# Valid numbers by weft's key, far wider than any published model needs.  A number outside means a
# damaged or hostile file.
WIDTH, COUNT, LENGTH = Limits(int, 1, 1 << 24), Limits(int, 1, 1 << 16), Limits(int, 1, 1 << 30)
LAYERS, FACTOR = Limits(int, 1, 10_000), Limits(float, 1e-6, 1e6)
LIMITS: dict[str, Limits] = {
    "dim": Limits(int, 1, 1 << 20),
    "num_layers": LAYERS,
    "mtp_layers": Limits(int, 0, 100),
    "num_heads": COUNT,
    "num_kv_heads": COUNT,
    "head_dim": COUNT,
    "ffn_dim": WIDTH,
    "vocab_size": Limits(int, 2, 1 << 26),
    "max_seq_len": LENGTH,
    "sliding_window": LENGTH,
    "attention_chunk": LENGTH,
    "temperature_interval": LENGTH,
    "temperature_scale": FACTOR,
    "norm_eps": Limits(float, 1e-12, 1e-2),
    "kv_rank": COUNT,
    "q_rank": COUNT,
    "rope_head_dim": COUNT,
    "value_head_dim": COUNT,
    "num_experts": COUNT,
    "active_experts": COUNT,
    "expert_dim": WIDTH,
    "shared_experts": Limits(int, 0, 1 << 10),
    "dense_layers": Limits(int, 0, 10_000),
    "expert_interval": LAYERS,
    "expert_groups": COUNT,
    "active_groups": COUNT,
    **dict.fromkeys(("attention_scale", "attention_softcap", "logit_softcap"), FACTOR),
    **dict.fromkeys(("embedding_scale", "residual_scale", "logit_scale"), FACTOR),
    **dict.fromkeys(("route_scale", "expert_limit"), FACTOR),
}
SCORE_HEAD: Json = {"score_head": True, "tied_embeddings": False}  # of `DecoderConfig`
# The labels of a model with one score.
SCORE_LABELS: Json = {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
MTP_FIELD = "num_nextn_predict_layers"  # of a family with layers of multi-token prediction
# Fields of the base class of transformers 4 that set how text is generated: see `weft generate`.
_GENERATION_FIELDS = (
    *("bad_words_ids", "begin_suppress_tokens", "decoder_start_token_id", "diversity_penalty"),
    *("do_sample", "early_stopping", "encoder_no_repeat_ngram_size"),
    *("exponential_decay_length_penalty", "forced_bos_token_id", "forced_eos_token_id"),
    *("length_penalty", "max_length", "max_new_tokens", "min_length", "no_repeat_ngram_size"),
    *("num_beam_groups", "num_beams", "num_return_sequences", "output_scores"),
    *("remove_invalid_values", "repetition_penalty", "return_dict_in_generate"),
    *("suppress_tokens", "temperature", "top_k", "top_p", "typical_p"),
)
# Fields of the base class that only encoders and older models have: the value of all others.
BASE_FIELDS: Json = {
    "add_cross_attention": False,
    "cross_attention_hidden_size": None,
    "is_decoder": (False, True),  # a decoder is one either way
    "is_encoder_decoder": False,
    "pruned_heads": {},
    "tie_encoder_decoder": False,
}
# Fields that do not change what the model computes.
IGNORED_FIELDS = {
    *_GENERATION_FIELDS,
    "attn_implementation",
    "bos_token_id",
    "chunk_size_feed_forward",
    "dtype",
    "eos_token_id",
    "finetuning_task",
    "id2label",
    "initializer_range",
    "label2id",
    "num_labels",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",  # see `_read_router_loss`
    "pad_token_id",
    "prefix",
    "pretraining_tp",
    "problem_type",
    "return_dict",
    "router_aux_loss_coef",
    "sep_token_id",
    "task_specific_params",
    "tf_legacy_loss",
    "tokenizer_class",
    "torch_dtype",
    "torchscript",
    "transformers_version",
    "unsloth_fixed",
    "unsloth_version",
    "use_bfloat16",
    "use_cache",
}
REMEDIES = {
    "auto_map": "remove the field if the model needs none; weft never runs remote code",
    "quantization_config": "use the model's files in bfloat16, or save dequantized weights: in "
    "transformers, from_pretrained(), dequantize() and save_pretrained()",
}
EXPERT_KEYS = (
    *("active_experts", "expert_dim", "shared_experts", "dense_layers", "expert_interval"),
    *("score", "score_selected", "renormalize", "route_scale", "expert_groups", "active_groups"),
    *("scaled_expert_inputs", "router_bias", "expert_biases", "expert_limit"),
    *("balance_rate", "router_aux_loss_coef", "router_aux_loss_scope", "router_z_loss_coef"),
)
TRAINING_KEYS = EXPERT_KEYS[-4:]  # do not change what a trained model computes


def get_hf_mapping(family: Family) -> HFMapping:
    """Return the Hugging Face mapping of a family that has one."""
    mapping = family.hf_mapping
    assert isinstance(mapping, HFMapping)
    return mapping


def detect_family(
    hf_config: Json, families: Mapping[str, Family]
) -> tuple[str | None, list[ConfigError]]:
    """Return a ``config.json``'s family by its ``model_type``, or None and an error."""
    kind_by_type = {f.hf_mapping.model_type: kind for kind, f in families.items() if f.hf_mapping}
    model_type = hf_config.get("model_type", MISSING)
    if isinstance(model_type, str) and model_type in kind_by_type:
        return kind_by_type[model_type], []
    rule = f"must be {format_hf_choices(kind_by_type)}"
    remedy = "docs/add-a-family.md shows how to add another one"
    return None, [ConfigError("config.json model_type", _short(model_type), rule, remedy)]


# Fields of a multi-modal configuration that its text model has, too.
OUTER_FIELDS = (
    *("torch_dtype", "dtype", "transformers_version"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "quantization_config"),
)


def text_config(tree: Json, families: Mapping[str, Family]) -> Json:
    """Return the configuration of the text model in a multi-modal one; else the same."""
    mappings = {f.hf_mapping.model_type: f.hf_mapping for f in families.values() if f.hf_mapping}
    text = tree.get("text_config")
    if tree.get("model_type") in mappings or not isinstance(text, dict):
        return tree
    mapping = mappings.get(str(text.get("model_type")))
    if mapping is None:
        return tree
    outer = {name: tree[name] for name in OUTER_FIELDS if name in tree}
    # transformers ties the embeddings of the whole model or not.
    tied = {name: tree[name] for name in ("tie_word_embeddings",) if name in tree}
    return outer | text | tied | {"architectures": [mapping.architecture]}


def param_shapes(family: Family, config: Any) -> dict[str, torch.Size]:
    """Return the shape of every saved tensor by weft's name, in order.

    These are the parameters and, in layers with experts, the load-balance bias.
    """
    has_experts = getattr(config, "has_experts", lambda layer: False)
    num_layers, mtp_layers = config.num_layers, getattr(config, "mtp_layers", 0)
    kinds = [has_experts(layer) for layer in range(num_layers + mtp_layers)]
    # One block of each kind suffices: cheap for any number of layers in a file.
    templates = {kind: _block_shapes(family.build, config, kind) for kind in sorted(set(kinds))}
    template = templates[kinds[0]]
    embedding, *head = [name for name in template if not name.startswith("layers.")]
    shapes = {embedding: template[embedding]}
    for i, kind in enumerate(kinds):
        prefix = f"layers.{int(i >= num_layers)}."  # of the template
        for name, shape in templates[kind].items():
            if name.startswith(prefix):
                shapes[f"layers.{i}.{name.removeprefix(prefix)}"] = shape
    return shapes | {name: template[name] for name in head}


@lru_cache(maxsize=64)  # an import, its checks and an export ask for the same model
def _block_shapes(
    build: Callable[[Any], nn.Module], config: Any, has_experts: bool
) -> dict[str, torch.Size]:
    update: Json = {"num_layers": 1, "max_seq_len": 1}
    if getattr(config, "mtp_layers", 0):
        update["mtp_layers"] = 1
    if has_experts:
        update |= {"dense_layers": 0, "expert_interval": 1}
    elif getattr(config, "num_experts", 0):
        config = simplify(config.model_copy(update={"num_experts": 0}))  # valid without experts
    with torch.device("meta"):
        model = build(config.model_copy(update=update))
    return {name: tensor.shape for name, tensor in model.state_dict().items()}


# --------------------------------------------------------------------------- writing


def to_hf_config(family: Family, config: Any, dtype: str) -> Json:
    """Return the ``config.json`` of a model whose weights are stored as ``dtype``.

    Rotary positions are written in the form that all versions of transformers read.
    """
    mapping = get_hf_mapping(family)
    values = config.model_dump()
    values["head_dim"] = config.key_dim
    values["attention_scale"] = config.attention_scale or config.key_dim**-0.5
    values["value_head_dim"] = config.value_dim
    tree: Json = {
        "architectures": [mapping.architecture],
        "model_type": mapping.model_type,
        "pad_token_id": None,  # the class's own may exceed the vocabulary
        **mapping.fixed_fields,
    }
    for name, entry in mapping.all_fields.items():
        tree[name] = entry.write(values[entry.keys[0]])
    for name, key in mapping.switches.items():
        tree[name] = bool(values[key])
        unused = [other for other, entry in mapping.all_fields.items() if key in entry.keys]
        tree |= {other: mapping.defaults[other] for other in unused if not values[key]}
    if mapping.has_latent_attention:
        tree["qk_nope_head_dim"] = config.key_dim - config.rope_head_dim
    tree |= write_layers(mapping, config)
    tree |= write_expert_layers(mapping, config)
    tree |= write_rope(mapping, config)
    if config.score_head and mapping.score_architecture:
        tree |= {"architectures": [mapping.score_architecture], **SCORE_LABELS}
    return {**tree, "torch_dtype": dtype}


def check_hf_config(family: Family, config: Any) -> list[ConfigError]:
    """Return the keys that ``config.json`` cannot express with their values."""
    mapping = get_hf_mapping(family)
    expected = simplify(config)
    result, errors = from_hf_config(family, to_hf_config(family, config, "float32"))
    if errors:
        return errors
    remedy = "use a family that has it, or the published value"
    return [
        ConfigError(
            f"model.{key}", value, f"does not exist in a {mapping.name} of transformers", remedy
        )
        for key, value in expected.model_dump().items()
        if key not in TRAINING_KEYS and getattr(result, key) != value
    ]


def simplify(config: DecoderConfig) -> DecoderConfig:
    """Return an equal model whose keys without effect have their default values."""
    local, rope = _layers(config)
    update: Json = {
        "layer_pattern": shortest_pattern(["GL"[is_local] for is_local in local]),
        "rope_pattern": shortest_pattern(["NR"[has_rope] for has_rope in rope]),
    }
    if config.head_dim * config.num_heads == config.dim:
        update["head_dim"] = 0
    if config.value_head_dim == config.key_dim:
        update["value_head_dim"] = 0
    if config.attention_scale == config.key_dim**-0.5:
        update["attention_scale"] = 0.0
    return _reset_unused(config).model_copy(update=update)


def _layers(config: DecoderConfig) -> tuple[list[bool], list[bool]]:
    """Return which layers are local, and which have rotary positions."""
    indices = range(config.num_layers)
    return [config.is_local(i) for i in indices], [config.has_rope(i) for i in indices]


def _reset_unused(config: DecoderConfig) -> DecoderConfig:
    """Return the model with the defaults of the keys that have no effect in it."""
    local, rope = _layers(config)
    unused = {key for keys in ROPE_KEYS.values() for key in keys}
    unused -= set(ROPE_KEYS.get(config.rope_scaling, ()))
    has_same_theta = config.rope_local_theta == config.rope_theta and config.rope_scaling == "none"
    if not any(local):
        unused |= {"sliding_window", "attention_chunk"}
    if not any(local) or has_same_theta:
        unused.add("rope_local_theta")
    if all(rope) or not config.temperature_interval:
        unused |= {"temperature_interval", "temperature_scale"}
    if not config.kv_rank:
        unused |= {"q_rank", "rope_head_dim"}
    if config.norm == "rms":
        unused.add("norm_bias")
    if not config.num_experts:
        unused |= {*EXPERT_KEYS}
    elif config.num_moe_layers == config.num_layers:
        unused |= {"ffn_dim", "dense_layers", "expert_interval"}
    defaults = {key: type(config).model_fields[key].default for key in unused}
    return config.model_copy(update=defaults)


def from_hf_config(family: Family, hf_config: Json) -> tuple[Any, list[ConfigError]]:
    """Convert a ``config.json`` to the family's configuration.

    Returns:
        The configuration, or None if there are errors, and every reason why the family cannot be
        that model; keys are ``config.json <field>``.
    """
    mapping = get_hf_mapping(family)
    twice = [
        (name, hf_config[name], f"contradicts {other}")
        for name, other in mapping.aliases.items()
        if name in hf_config and hf_config.get(other, hf_config[name]) != hf_config[name]
    ]
    hf_config = {mapping.aliases.get(name, name): value for name, value in hf_config.items()}
    given = {name: value for name, value in hf_config.items() if value is not None}
    fields: Json = {**mapping.constants}
    has_score = is_score_model(mapping, given)
    range_errors = [*_check_numbers(mapping, given), *_check_router_loss(given)]
    invalid = {name for name, *_ in range_errors}
    field_errors = list(_read_fields(mapping, hf_config, invalid, fields))
    found = [
        *twice,
        *read_rope(mapping, hf_config, invalid, fields),
        *range_errors,
        *field_errors,
        *_check_fixed_fields(mapping, given, has_score),
        *read_layers(mapping, hf_config, invalid, fields),
        *read_expert_layers(mapping, given, invalid, fields),
        *_check_unknown_fields(mapping, given),
    ]
    if has_score:  # its files have no layers that predict tokens
        fields |= SCORE_HEAD | ({"mtp_layers": 0} if MTP_FIELD in mapping.all_fields else {})
    config_errors = check_section(family.config, "model", fields)
    config_errors = [error for error in config_errors if error.value is not None]
    config: Any = None
    if not config_errors and not any(value is MISSING for _, value, *_ in found):
        config = family.config.model_validate(fields)
        if given.get("output_router_logits") and not range_errors:
            # transformers' loss is a mean over layers; of equal loads it is the active experts.
            scale = config.active_experts / max(1, config.num_moe_layers)
            coef = {"router_aux_loss_coef": scale * given["router_aux_loss_coef"]}
            config = config.model_copy(update=coef)
        if "num_hidden_layers" not in invalid:
            config = _reset_unused(config)
        config_errors = family.check(config)
    found += [*_rename_errors(mapping, config_errors, {name for name, *_ in found})]
    errors = [_make_error(mapping, *item) for item in found]
    return (None if errors else simplify(config)), errors


def _make_error(
    mapping: HFMapping, name: str, value: object, rule: str, remedy: str = ""
) -> ConfigError:
    remedy = remedy or f"no other value is supported by weft's {mapping.name}"
    return ConfigError(f"config.json {printable(name)}", _short(value), rule, remedy)


def _read_fields(
    mapping: HFMapping, hf_config: Json, invalid: set[str], fields: Json
) -> Iterator[Problem]:
    """Read fields with a counterpart, with the defaults of transformers."""
    defaults = DEFAULTS | mapping.defaults
    for name, entry in mapping.all_fields.items():
        value = hf_config.get(name)
        if name in hf_config and value is None and name == "num_key_value_heads":
            value = hf_config.get("num_attention_heads")  # even if the family has a default
        if value is None and not (entry.optional and name in hf_config):
            value = defaults.get(name)
        if value is None and name == "num_key_value_heads":
            value = hf_config.get("num_attention_heads")
        elif value is None and (name == "head_dim" or entry.optional):
            value = 0
        elif value is None:
            yield name, MISSING, "is missing", "add it; it has no default"
            continue
        choices = entry.choices
        if choices and not any(type(value) is type(known) and value == known for known in choices):
            yield name, value, f"must be {format_hf_choices(choices)}"
            continue
        is_zero = entry.optional and value == 0
        for key in entry.keys:
            is_convertible = name not in invalid and not is_zero
            fields[key] = entry.read(value) if is_convertible else value
    for name, key in mapping.switches.items():
        is_on = hf_config.get(name, True)
        if type(is_on) not in (bool, int):
            yield name, is_on, "must be true or false"
        elif not is_on:
            fields[key] = 0
    if mapping.has_latent_attention:
        yield from _read_latent_attention(mapping, hf_config, invalid, fields)
    if mapping.scales_embeddings and "hidden_size" not in invalid and "dim" in fields:
        fields["embedding_scale"] = fields["dim"] ** 0.5


def _read_latent_attention(
    mapping: HFMapping, hf_config: Json, invalid: set[str], fields: Json
) -> Iterator[Problem]:
    """Read the width of a head, which has a part with and a part without positions."""
    name = "qk_nope_head_dim"
    limits = LIMITS["head_dim"]
    value: Any = hf_config.get(name, mapping.defaults.get(name))
    rope = fields.get("rope_head_dim")
    if not _is_within(value, limits):
        yield name, value, *_describe_limits(limits)
    elif "qk_rope_head_dim" not in invalid and type(rope) is int:
        fields["head_dim"] = value + rope
        for other, expected in (("qk_head_dim", value + rope), ("head_dim", rope)):
            if hf_config.get(other, expected) != expected:
                yield other, hf_config[other], f"must be {expected}"


def is_score_model(mapping: HFMapping, tree: Json) -> bool:
    """Return True if a ``config.json`` is of a model with a score head."""
    return tree.get("architectures") == [mapping.score_architecture]


def _check_fixed_fields(mapping: HFMapping, given: Json, has_score: bool) -> Iterator[Problem]:
    """Yield an error for each field that has another value than the one supported."""
    exact = {"architectures": [mapping.architecture], "model_type": mapping.model_type}
    if has_score:
        exact["architectures"] = [mapping.score_architecture]
        labels = given.get("id2label")
        count = len(labels) if isinstance(labels, dict) else given.get("num_labels", 2)
        if count != 1:
            remedy = "weft trains reward models, which have one score"
            yield "id2label", labels, "must have one label", remedy
    for name, only in {**exact, **mapping.fixed_fields}.items():
        value = given.get(name, MISSING)
        if value != only and (name in exact or name in given):
            yield name, value, f"must be {json.dumps(only)}"
    for name, only in BASE_FIELDS.items():
        accepted = only if isinstance(only, tuple) else (only,)
        if name in given and given[name] not in accepted:
            yield name, given[name], f"must be {json.dumps(accepted[0])}"


def _check_router_loss(given: Json) -> Iterator[Problem]:
    """Yield an error if transformers would add a load-balance loss of no valid size."""
    name, limits = "router_aux_loss_coef", FACTOR._replace(least=0.0)
    value = given.get(name, MISSING)
    if given.get("output_router_logits") and not _is_within(value, limits):
        yield name, value, *_describe_limits(limits)


def _check_unknown_fields(mapping: HFMapping, given: Json) -> Iterator[Problem]:
    """Yield an error for each field that may change what the model computes."""
    known = {"architectures", "model_type", "layer_types", mapping.expert_layers}
    known |= {*mapping.all_fields, *mapping.fixed_fields, *IGNORED_FIELDS, *mapping.ignored_fields}
    known |= {*BASE_FIELDS}
    known |= {*mapping.switches}
    if mapping.has_latent_attention:
        known |= {"qk_nope_head_dim", "qk_head_dim", "head_dim"}
    if mapping.rope_layers == "no_rope_layers":
        known |= {"no_rope_layers", "no_rope_layer_interval"}
    if layers := mapping.layers:
        known.add(layers.window[0])
        known |= {"use_sliding_window"} if layers.switch else set()
        known |= {"max_window_layers"} if layers.default == "max_window_layers" else set()
        known |= {"sliding_window_pattern"} if "G" in layers.default else set()
    if mapping.rope.has_original_field:
        known.add("original_max_position_embeddings")
    quantization = given.get("quantization_config")
    method = quantization.get("quant_method") if isinstance(quantization, dict) else None
    form = quantization.get("format") if isinstance(quantization, dict) else None
    is_float8 = method == "fp8" or (method, form) == ("compressed-tensors", "float-quantized")
    if is_float8 or (mapping.quantization and method == mapping.quantization):
        known.add("quantization_config")
    for name, value in given.items():
        is_rope = name.startswith("rope_") or name == "partial_rotary_factor"
        if name not in known and not name.startswith("_") and not is_rope:
            remedy = REMEDIES.get(name, "remove it if it does not change what the model computes")
            yield name, value, f"is not a known field of {mapping.name}", remedy


def _rename_errors(
    mapping: HFMapping, errors: list[ConfigError], reported: set[str]
) -> Iterator[Problem]:
    """Yield the errors of a configuration as errors of Hugging Face's fields."""
    hf_names = {f"model.{key}": f"rope_scaling.{name}" for name, (key, _) in ROPE_LIMITS.items()}
    hf_names |= {f"model.{key}": name for name, e in mapping.all_fields.items() for key in e.keys}
    hf_names |= {"model.rope_fraction": "partial_rotary_factor", "model.rope_theta": "rope_theta"}
    invalid_keys, reported = {error.key for error in errors}, set(reported)
    for error in errors:
        name = hf_names.get(error.key, error.key.removeprefix("model."))
        # An error that depends on another error may be its consequence.
        if invalid_keys.isdisjoint(error.depends) and name not in reported:
            reported.add(name)  # a field may set several keys
            rule = re.sub(r"model\.\w+", lambda m: hf_names.get(m[0], m[0]), error.rule)
            yield name, error.value, rule


def _check_numbers(mapping: HFMapping, given: Json) -> Iterator[Problem]:
    """Yield an error for each value that is not a number in its range."""
    for name, entry in mapping.all_fields.items():
        limits = entry.limits or LIMITS.get(entry.keys[0])
        value = given.get(name)
        if value is not None and limits and not entry.choices and not _is_within(value, limits):
            yield name, value, *_describe_limits(limits)
    if mapping.layers:
        name, key = mapping.layers.window
        if (value := given.get(name)) is not None and not _is_within(value, LIMITS[key]):
            yield name, value, *_describe_limits(LIMITS[key])


def _is_within(value: object, limits: Limits) -> bool:
    kinds = (int,) if limits.kind is int else (int, float)
    if type(value) not in kinds:
        return False
    return limits.least <= value <= limits.most  # type: ignore[operator]


def _describe_limits(limits: Limits) -> tuple[str, str]:
    """Return rule and remedy of a number outside of its limits."""
    least, most = limits.least, limits.most
    is_int = limits.kind is int
    rule = (
        f"must be an integer from {least} to {most:,}"
        if is_int
        else (f"must be a number from {least:g} to {most:g}")
    )
    return rule, "download config.json again, or do not use it"


def _short(value: object) -> object:
    text = str(value)
    return value if len(text) <= 60 else text[:60] + "..."


def printable(name: str) -> str:
    """Escape and truncate a name from a file for the terminal."""
    return json.dumps(name)[1:-1][:100]
